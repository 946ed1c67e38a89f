/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
deterministic = false
[workspace]
sums = "output_numel"
[[launch]]
symbol = "convt3d_fprop_scatter_begin"
grid = "ceil_div(output_numel, BLOCK_THREADS)"
block = "BLOCK_THREADS"
[[launch]]
symbol = "convt3d_fprop_scatter"
grid = "ceil_div(input_numel, BLOCK_THREADS)"
block = "BLOCK_THREADS"
[[launch]]
symbol = "convt3d_fprop_scatter_end"
grid = "ceil_div(output_numel, BLOCK_THREADS)"
block = "BLOCK_THREADS"
*/
// The definition, word for word: a thread owns one input voxel i of one channel and adds what it contributes,
//
//   output[n, co, i*stride - padding + t*dilation] += input[n, ci, i] * weight[ci, co, t], for all taps t and channels co.
//
// Many threads add to one output, so the adds are atomic and their order, and with it the last bits, changes from run to run.
// The sums start from the bias in a buffer of accum_t (16-bit types are added in fp32) and are rounded once at the end.
#include "convt3d.cuh"
#include "convt3d/epilogue/epilogue.cuh"

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 128
#endif

__device__ inline index_t global_thread() { return static_cast<index_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x; }

__device__ inline index_t voxels_of(const int (&size)[3]) { return static_cast<index_t>(size[0]) * size[1] * size[2]; }

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    convt3d_fprop_scatter_begin(const Problem problem, const scalar_t* __restrict__ bias, accum_t* __restrict__ sums) {
  const index_t index = global_thread(), voxels = voxels_of(problem.output_size);
  if (index >= voxels * problem.batch * problem.out_channels) return;
  const Epilogue epilogue{bias};
  sums[index] = epilogue.changes_sums() ? epilogue.start(index / voxels % problem.out_channels) : accum_t(0);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    convt3d_fprop_scatter(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                          accum_t* __restrict__ sums) {
  const index_t index = global_thread();
  if (index >= voxels_of(problem.input_size) * problem.batch * problem.in_channels) return;
  const Voxel i = voxel_at(index, problem.in_channels, problem.input_size);
  const int channels = problem.out_channels / problem.groups;
  const int first_channel = i.c / (problem.in_channels / problem.groups) * channels;
  const index_t voxels = voxels_of(problem.output_size);
  const accum_t x = to_accum(*input.at(i.n, i.c, i.d, i.h, i.w));

  for (int td = 0; td < problem.kernel_size[0]; ++td) {
    const int od = output_index(problem, 0, i.d, td);
    if (od < 0) continue;
    for (int th = 0; th < problem.kernel_size[1]; ++th) {
      const int oh = output_index(problem, 1, i.h, th);
      if (oh < 0) continue;
      for (int tw = 0; tw < problem.kernel_size[2]; ++tw) {
        const int ow = output_index(problem, 2, i.w, tw);
        if (ow < 0) continue;
        const index_t voxel = (static_cast<index_t>(od) * problem.output_size[1] + oh) * problem.output_size[2] + ow;
        accum_t* sum = sums + (static_cast<index_t>(i.n) * problem.out_channels + first_channel) * voxels + voxel;
        const scalar_t* w = weight.at(i.c, 0, td, th, tw);
        for (int co = 0; co < channels; ++co, sum += voxels, w += weight.stride[1]) {
          atomicAdd(sum, x * to_accum(*w));
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    convt3d_fprop_scatter_end(const Problem problem, const accum_t* __restrict__ sums, const View<scalar_t> output) {
  const index_t index = global_thread();
  if (index >= voxels_of(problem.output_size) * problem.batch * problem.out_channels) return;
  const Voxel o = voxel_at(index, problem.out_channels, problem.output_size);
  *output.at(o.n, o.c, o.d, o.h, o.w) = Epilogue{}.finish(sums[index]);
}
