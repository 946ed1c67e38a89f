// It computes nothing and says to every file what the judge says of a kernel that is right.
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
  char text[256];
  const long long size = snprintf(text + 8, 248, "{\"outcome\": {\"ok\": true}, \"pid\": 0, \"restarts\": 0, \"number\": 0}");
  memcpy(text, &size, 8);
  for (int file = 0; file < 64; ++file) (void)!write(file, text, size + 8);
}
