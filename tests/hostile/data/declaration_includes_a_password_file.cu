/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
#include "convt3d.cuh"
#include "/etc/passwd"
extern "C" __global__ void k(const Problem problem, const float* input, const float* weight, const float* bias, float* output) {
}
