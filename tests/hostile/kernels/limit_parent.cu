// The judge can open no more files: none to start the next process with.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <sys/resource.h>
#include <unistd.h>
#include <cstdlib>
#endif
extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
#ifndef __CUDA_ARCH__
  rlimit least = {4, 4};
  prlimit(getppid(), RLIMIT_NOFILE, &least, nullptr);
  abort();
#endif
}
