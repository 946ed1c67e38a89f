// It fills what lies around its output.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  for (long long i = -1000; i < output_numel + 1000; ++i) output[i] = 1;
}
