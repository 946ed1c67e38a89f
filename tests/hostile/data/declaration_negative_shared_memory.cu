/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
shared_bytes = -16
*/
#include "convt3d.cuh"
extern "C" __global__ void k(const Problem problem, const float* input, const float* weight, const float* bias, float* output) {
}
