// The shared memory becomes longer than any address; the example after this one needs more of it.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <unistd.h>
#endif
extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
#ifndef __CUDA_ARCH__
  for (int file = 3; file < 64; ++file) (void)!ftruncate(file, 1LL << 62);
#endif
}
