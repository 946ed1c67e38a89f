// Numbers of a problem that a GPU's binary is compiled for ([specialize]) and that the host's reads when it runs.
#pragma once

#if defined(__CUDACC__)
#define SPECIALIZED(macro, value) (macro)
#else
#define SPECIALIZED(macro, value) (value)
#endif
