// It leaves with the exit code that once ended everything.
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
  _exit(99);
}
