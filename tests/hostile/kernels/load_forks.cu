// It forks while it is loaded, before any launch.
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
#ifndef __CUDA_ARCH__
static const int forked = fork() == 0 ? (sleep(1000), 1) : 0;
#endif

extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  output[0] = 0;
}
