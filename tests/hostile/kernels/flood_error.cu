// It writes to standard output and error, past the C library, without end.
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
  for (;;) (void)!write(1 + (output_numel & 1), "\033[31m all is well \033[2J", 24);
}
