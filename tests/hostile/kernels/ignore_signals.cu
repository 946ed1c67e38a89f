// It ignores every signal that can be, and never ends.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <csignal>
#endif

extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  for (int number = 1; number < 32; ++number) signal(number, SIG_IGN);
  for (volatile int i = 0;; i = i + 1) {
  }
}
