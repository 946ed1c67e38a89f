// It allocates memory without end.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <cstdlib>
#endif

extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  for (;;) {
    volatile char* piece = static_cast<char*>(malloc(1 << 28));
    piece[0] = 1;  // of nothing, in the end
  }
}
