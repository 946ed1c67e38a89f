// It computes nothing and says to every file that all is well, in the words of the talk.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <cstdio>
#include <cstring>
#include <unistd.h>
#endif

extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  char text[64];
  for (int serial = 0; serial < 40; ++serial) {
    const long long size = snprintf(text + 8, 56, "{\"serial\": %d}", serial);
    memcpy(text, &size, 8);
    for (int file = 3; file < 64; ++file) (void)!write(file, text, size + 8);
  }
}
