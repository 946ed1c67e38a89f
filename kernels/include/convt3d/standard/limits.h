// For NVRTC, which has none: CuPy brings the cuda::std library.
#pragma once
#include <cuda/std/climits>
