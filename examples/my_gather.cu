/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = "ceil_div(output_numel, 128)"
block = 128
*/
#include "convt3d.cuh"

// A thread owns one output voxel and gathers the inputs that reach it.
extern "C" __global__ void my_gather(const Problem problem, const float* input, const float* weight, const float* bias,
                                     float* output, long long output_numel, int in_channels_per_group,
                                     int out_channels_per_group) {
  const long long index = blockIdx.x * 128LL + threadIdx.x;
  if (index >= output_numel) return;
  const Voxel o = voxel_at(index, problem.out_channels, problem.output_size);
  float sum = bias != nullptr ? bias[o.c] : 0.0f;
  for (int ci = 0; ci < in_channels_per_group; ++ci) {
    const long long c = o.c / out_channels_per_group * in_channels_per_group + ci;
    const float* tap = weight + (c * out_channels_per_group + o.c % out_channels_per_group) * problem.kernel_size[0] *
                                    problem.kernel_size[1] * problem.kernel_size[2];
    for (int td = 0; td < problem.kernel_size[0]; ++td) {
      for (int th = 0; th < problem.kernel_size[1]; ++th) {
        for (int tw = 0; tw < problem.kernel_size[2]; ++tw, ++tap) {
          const int d = input_index(problem, 0, o.d, td);  // -1 where the division is not exact or outside the input
          const int h = input_index(problem, 1, o.h, th);
          const int w = input_index(problem, 2, o.w, tw);
          if (d < 0 || h < 0 || w < 0) continue;
          const long long plane = (o.n * static_cast<long long>(problem.in_channels) + c) * problem.input_size[0] + d;
          sum += input[(plane * problem.input_size[1] + h) * problem.input_size[2] + w] * *tap;
        }
      }
    }
  }
  output[index] = sum;
}
