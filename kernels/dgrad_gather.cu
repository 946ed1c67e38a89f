/* convt3d
pass = "dgrad"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
[[launch]]
grid = "ceil_div(input_numel, BLOCK_THREADS)"
block = "BLOCK_THREADS"
*/
// The gradient of the input is an ordinary strided convolution of grad_output. A thread owns one input voxel i of one channel:
//
//   grad_input[n, ci, i] = sum over taps t and channels co of the group of grad_output[n, co, o] * weight[ci, co, t],
//   where o = i*stride - padding + t*dilation lies in the output.
#include "convt3d.cuh"

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 128
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    convt3d_dgrad_gather(const Problem problem, const View<const scalar_t> grad_output, const View<const scalar_t> weight,
                         const View<scalar_t> grad_input) {
  const index_t voxels = static_cast<index_t>(problem.input_size[0]) * problem.input_size[1] * problem.input_size[2];
  const index_t index = static_cast<index_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (index >= voxels * problem.batch * problem.in_channels) return;

  const Voxel i = voxel_at(index, problem.in_channels, problem.input_size);
  const int channels = problem.out_channels / problem.groups;
  const int first_channel = i.c / (problem.in_channels / problem.groups) * channels;

  accum_t sum = 0;
  for (int td = 0; td < problem.kernel_size[0]; ++td) {
    const int od = output_index(problem, 0, i.d, td);
    if (od < 0) continue;
    for (int th = 0; th < problem.kernel_size[1]; ++th) {
      const int oh = output_index(problem, 1, i.h, th);
      if (oh < 0) continue;
      for (int tw = 0; tw < problem.kernel_size[2]; ++tw) {
        const int ow = output_index(problem, 2, i.w, tw);
        if (ow < 0) continue;
        const scalar_t* g = grad_output.at(i.n, first_channel, od, oh, ow);
        const scalar_t* w = weight.at(i.c, 0, td, th, tw);
        for (int co = 0; co < channels; ++co, g += grad_output.stride[1], w += weight.stride[1]) {
          sum += to_accum(*g) * to_accum(*w);
        }
      }
    }
  }
  *grad_input.at(i.n, i.c, i.d, i.h, i.w) = to_scalar(sum);
}
