/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
[[launch]]
grid = "ceil_div(output_numel, BLOCK_THREADS)"
block = "BLOCK_THREADS"
*/
// A thread owns one output voxel o of one channel and gathers what reaches it:
//
//   output[n, co, o] = bias[co] + sum over taps t and channels ci of the group of input[n, ci, i] * weight[ci, co, t],
//   where i = (o + padding - t*dilation) / stride, if that division is exact and i lies in the input.
//
// Most of the time goes into testing taps that do not apply: with stride s only one in s^3 divides. Takes every problem.
#include "convt3d.cuh"
#include "convt3d/epilogue/epilogue.cuh"

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 128
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    convt3d_fprop_gather(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                         const scalar_t* __restrict__ bias, const View<scalar_t> output) {
  const index_t voxels = static_cast<index_t>(problem.output_size[0]) * problem.output_size[1] * problem.output_size[2];
  const index_t index = static_cast<index_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (index >= voxels * problem.batch * problem.out_channels) return;

  const Voxel o = voxel_at(index, problem.out_channels, problem.output_size);
  const int out_channels_per_group = problem.out_channels / problem.groups;
  const int channels = problem.in_channels / problem.groups;
  const int first_channel = o.c / out_channels_per_group * channels;

  const Epilogue epilogue{bias};
  accum_t sum = epilogue.start(o.c);
  for (int td = 0; td < problem.kernel_size[0]; ++td) {
    const int id = input_index(problem, 0, o.d, td);
    if (id < 0) continue;
    for (int th = 0; th < problem.kernel_size[1]; ++th) {
      const int ih = input_index(problem, 1, o.h, th);
      if (ih < 0) continue;
      for (int tw = 0; tw < problem.kernel_size[2]; ++tw) {
        const int iw = input_index(problem, 2, o.w, tw);
        if (iw < 0) continue;
        const scalar_t* x = input.at(o.n, first_channel, id, ih, iw);
        const scalar_t* w = weight.at(first_channel, o.c % out_channels_per_group, td, th, tw);
        for (int ci = 0; ci < channels; ++ci, x += input.stride[1], w += weight.stride[0]) {
          sum += to_accum(*x) * to_accum(*w);
        }
      }
    }
  }
  *output.at(o.n, o.c, o.d, o.h, o.w) = epilogue.finish(sum);
}
