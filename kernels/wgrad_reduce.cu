/* convt3d
pass = "wgrad"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
[constants]
splits = "max(1, min(ceil_div(batch * input_voxels, SPLIT_VOXELS), ceil_div(MAX_BLOCKS, weight_numel)))"
[workspace]
partial = "splits * weight_numel"
[search]
BLOCK_THREADS = [128, 256]
SPLIT_VOXELS = [512, 2048, 8192]
[[launch]]
symbol = "convt3d_wgrad_reduce"
grid = "splits * weight_numel"
block = "BLOCK_THREADS"
[[launch]]
symbol = "convt3d_wgrad_reduce_sum"
grid = "ceil_div(weight_numel, BLOCK_THREADS)"
block = "BLOCK_THREADS"
*/
// The gradient of the weight is a reduction over all input voxels i of all volumes, one for each weight element:
//
//   grad_weight[ci, co, t] = sum over n and i of input[n, ci, i] * grad_output[n, co, o], o = i*stride - padding + t*dilation.
//
// Stage one: a block sums one contiguous range of (n, i) for one element, its threads strided over the range, then pairwise in
// shared memory. Stage two adds the ranges' sums in order. No atomics: the same bits in each run.
#include "convt3d.cuh"

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 128
#endif
#ifndef SPLIT_VOXELS
#define SPLIT_VOXELS 2048
#endif
#ifndef MAX_BLOCKS
#define MAX_BLOCKS 16384
#endif
static_assert((BLOCK_THREADS & (BLOCK_THREADS - 1)) == 0, "the pairwise sum halves the threads at each step");

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    convt3d_wgrad_reduce(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> grad_output,
                         accum_t* __restrict__ partial, const int splits) {
  __shared__ accum_t sums[BLOCK_THREADS];

  // blockIdx.x = element * splits + split; element counts (ci, co in its group, t) as the weight is laid out
  const int split = static_cast<int>(blockIdx.x % splits);
  const int out_channels = problem.out_channels / problem.groups;
  const Voxel element = voxel_at(blockIdx.x / splits, out_channels, problem.kernel_size);  // .n is ci, .c is co
  const int co = element.n / (problem.in_channels / problem.groups) * out_channels + element.c;
  const int tap[3] = {element.d, element.h, element.w};

  const index_t voxels = static_cast<index_t>(problem.input_size[0]) * problem.input_size[1] * problem.input_size[2];
  const index_t total = voxels * problem.batch, share = (total + splits - 1) / splits;
  const index_t begin = share * split, end = begin + share < total ? begin + share : total;

  accum_t sum = 0;
  for (index_t index = begin + threadIdx.x; index < end; index += BLOCK_THREADS) {
    const Voxel i = voxel_at(index, 1, problem.input_size);
    const int od = output_index(problem, 0, i.d, tap[0]), oh = output_index(problem, 1, i.h, tap[1]),
              ow = output_index(problem, 2, i.w, tap[2]);
    if (od < 0 || oh < 0 || ow < 0) continue;
    sum += to_accum(*input.at(i.n, element.n, i.d, i.h, i.w)) * to_accum(*grad_output.at(i.n, co, od, oh, ow));
  }
  sums[threadIdx.x] = sum;
  for (int half = BLOCK_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    convt3d_wgrad_reduce_sum(const Problem problem, const accum_t* __restrict__ partial, const View<scalar_t> grad_weight,
                             const int splits, const long long weight_numel) {
  const index_t index = static_cast<index_t>(blockIdx.x) * BLOCK_THREADS + threadIdx.x;
  if (index >= weight_numel) return;
  accum_t sum = 0;
  for (int split = 0; split < splits; ++split) sum += partial[index * splits + split];
  const Voxel element = voxel_at(index, problem.out_channels / problem.groups, problem.kernel_size);
  *grad_weight.at(element.n, element.c, element.d, element.h, element.w) = to_scalar(sum);
}
