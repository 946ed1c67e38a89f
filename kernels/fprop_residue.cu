/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
[constants]
tiles = "ceil_div(residue_voxels, BLOCK_THREADS)"
[[launch]]
grid = "batch * out_channels * residues * tiles"
block = "BLOCK_THREADS"
*/
// A block works on one residue class: the outputs that share (o + padding) mod stride on each axis, and so the same taps.
// Within it the transposed convolution is a dense stride-1 correlation of the input with a fixed list of taps:
//
//   output[n, co, o] = bias[co] + sum over the class's taps t and channels ci of input[n, ci, q - offset(t)] * weight[ci, co, t],
//   q = (o + padding) / stride, offset(t) = (t*dilation - residue) / stride.
//
// No division, no test of divisibility and no dead tap in the inner loop. A class without taps stores the bias.
#include "convt3d.cuh"
#include "convt3d/epilogue/epilogue.cuh"

#ifndef BLOCK_THREADS
#define BLOCK_THREADS 128
#endif

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
    convt3d_fprop_residue(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                          const scalar_t* __restrict__ bias, const View<scalar_t> output, const int tiles) {
  // blockIdx.x = ((n * out_channels + co) * residues + residue) * tiles + tile
  unsigned block = blockIdx.x;
  const int tile = static_cast<int>(block % tiles);
  block /= tiles;
  AxisClass axis[3];
  for (int a = 2; a >= 0; --a) {
    axis[a] = axis_class(problem, a, static_cast<int>(block % problem.stride[a]));
    block /= problem.stride[a];
  }
  const int co = static_cast<int>(block % problem.out_channels), n = static_cast<int>(block / problem.out_channels);

  // The position of this thread's output within the class.
  index_t position = static_cast<index_t>(tile) * BLOCK_THREADS + threadIdx.x;
  if (position >= static_cast<index_t>(axis[0].outputs) * axis[1].outputs * axis[2].outputs) return;
  int o[3], q[3];
  for (int a = 2; a >= 0; --a) {
    o[a] = axis[a].first_output + static_cast<int>(position % axis[a].outputs) * problem.stride[a];
    q[a] = (o[a] + problem.padding[a]) / problem.stride[a];
    position /= axis[a].outputs;
  }

  const int out_channels_per_group = problem.out_channels / problem.groups;
  const int channels = problem.in_channels / problem.groups;
  const int first_channel = co / out_channels_per_group * channels;
  const Epilogue epilogue{bias};
  accum_t sum = epilogue.start(co);
  for (int jd = 0; jd < axis[0].taps; ++jd) {
    const int id = q[0] - axis[0].first_offset - jd * axis[0].offset_step;
    if (id < 0 || id >= problem.input_size[0]) continue;
    for (int jh = 0; jh < axis[1].taps; ++jh) {
      const int ih = q[1] - axis[1].first_offset - jh * axis[1].offset_step;
      if (ih < 0 || ih >= problem.input_size[1]) continue;
      for (int jw = 0; jw < axis[2].taps; ++jw) {
        const int iw = q[2] - axis[2].first_offset - jw * axis[2].offset_step;
        if (iw < 0 || iw >= problem.input_size[2]) continue;
        const scalar_t* x = input.at(n, first_channel, id, ih, iw);
        const scalar_t* w = weight.at(first_channel, co % out_channels_per_group, axis[0].first_tap + jd * axis[0].tap_step,
                                      axis[1].first_tap + jh * axis[1].tap_step, axis[2].first_tap + jw * axis[2].tap_step);
        for (int ci = 0; ci < channels; ++ci, x += input.stride[1], w += weight.stride[0]) {
          sum += to_accum(*x) * to_accum(*w);
        }
      }
    }
  }
  *output.at(n, co, o[0], o[1], o[2]) = epilogue.finish(sum);
}
