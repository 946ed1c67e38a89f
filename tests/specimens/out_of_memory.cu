// Mistake: the workspace has 2^42 elements for each output.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[workspace]
scratch = "output_numel * 4398046511104"
[[launch]]
grid = 1
block = 1
*/
extern "C" __global__ void specimen(float* scratch, float* output) { output[0] = scratch[0]; }
