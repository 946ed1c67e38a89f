// It overwrites what malloc keeps beside its memory.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <cstdlib>
#include <cstring>
#endif

extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  char* a[64];
  for (char*& piece : a) piece = static_cast<char*>(malloc(40));
  for (char* piece : a) {
    volatile char* start = piece - 16;
    for (int i = 0; i < 80; ++i) start[i] = 0x7f;
  }
  for (char* piece : a) free(piece);
}
