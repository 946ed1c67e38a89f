// Integer arithmetic that C++ has no operator for.
#pragma once

// Not constexpr: fprop_implicit_gemm_wgmma is then other machine code.
__device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
