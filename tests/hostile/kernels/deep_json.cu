// It sends a reply nested so deeply that a reader runs out of stack.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <cstring>
#include <unistd.h>
#endif

extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  static char text[100008];
  const long long size = 100000;
  memcpy(text, &size, 8);
  memset(text + 8, '[', size);
  for (int file = 3; file < 64; ++file) {
    for (long long done = 0, n; done < size + 8 && (n = write(file, text + done, size + 8 - done)) > 0;) done += n;
  }
}
