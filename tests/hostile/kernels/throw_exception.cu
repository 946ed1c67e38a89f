// It throws an exception that nobody catches.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#ifndef __CUDA_ARCH__
#include <stdexcept>
#endif

extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  throw std::runtime_error("\033[2J thrown");
}
