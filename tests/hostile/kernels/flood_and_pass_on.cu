// It prints 50 MB, control characters among it, and fails.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <cstdio>
#include <cstdlib>
#endif

extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  for (int i = 0; i < 1000000; ++i) printf("\033[2J all is well, all is well, all is well, all \n");
  fprintf(stderr, "\033]0;title\007 the last line\n");
  fflush(stdout);
  exit(3);
}
