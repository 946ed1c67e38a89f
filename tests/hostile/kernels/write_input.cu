// It makes its input nothing, so that a sum of nothing be right.
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = 1
block = 1
*/
extern "C" __global__ void hostile(const float* input, const float* weight, const float* bias, float* output,
                                   long long output_numel) {
  const_cast<float*>(input)[0] = 0;
  const_cast<float*>(weight)[0] = 0;
  for (long long i = 0; i < output_numel; ++i) output[i] = 0;
}
