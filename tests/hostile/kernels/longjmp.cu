// It jumps to a place that is no longer.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <csetjmp>
#include <cstring>
#endif

extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  jmp_buf nowhere;
  memset(&nowhere, 0x41, sizeof(nowhere));
  longjmp(nowhere, 1);
}
