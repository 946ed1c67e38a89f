/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
[specialize]
KERNEL_H = "kernel_h"
KERNEL_W = "kernel_w"
STRIDE_H = "stride_h"
STRIDE_W = "stride_w"
DILATION_H = "dilation_h"
DILATION_W = "dilation_w"
LEAD_W = "padding_w % stride_w"
MULTIPLIER = "out_channels_per_group"
[constants]
rows = "(output_h - 1 + padding_h) // stride_h - padding_h // stride_h + 1"
columns = "ceil_div(output_w, stride_w)"
run_length = "min(RUN, SUMS // (stride_h * stride_w)) if stride_h <= 4 and stride_w <= 4 else 1"
runs = "ceil_div(rows, run_length)"
positions = "ceil_div(output_d, stride_d) * runs * columns"
tiles = "ceil_div(positions, 32 * BLOCK_WARPS)"
taps_d = "ceil_div(kernel_d, stride_d // gcd(stride_d, dilation_d))"
weight_pitch = "taps_d * kernel_h * kernel_w // 2 * 2 + 1"
channel_bytes = "weight_pitch * max(itemsize, 4)"
block_channels = "max(1, min(BLOCK_CHANNELS, out_channels, 98 * 1024 // channel_bytes))"
channel_blocks = "ceil_div(out_channels, block_channels)"
[restrictions]
"groups > 1 and in_channels_per_group == 1 and out_channels_per_group <= 4" = "it is for depthwise layers: one input channel a group, a multiplier of at most 4"
"stride_h <= 4 and stride_w <= 4" = "a thread owns all residues of h and w: strides of at most 4 along them"
"(kernel_h - 1) * dilation_h // stride_h <= 48" = "the inputs of a column along h are in registers: a kernel that reaches over at most 49 of them"
"channel_bytes <= 98 * 1024" = "the weights of a channel must fit the 99 KiB of shared memory that every GPU has"
"positions <= 2000000000" = "it counts the outputs of a class in 32 bits"
[search]
BLOCK_WARPS = [4, 8]
BLOCK_CHANNELS = [4, 8, 16]
[[launch]]
grid = "batch * channel_blocks * tiles * stride_d"
block = "32 * BLOCK_WARPS"
shared_bytes = "block_channels * channel_bytes"
*/
// Depthwise (groups = in_channels, with a channel multiplier of up to 4). There is next to no arithmetic: what counts is how often
// an input is loaded, and that nothing waits. Nothing is staged but weights; the L1 cache holds the inputs.
//
// Along d and h o + padding = q*stride + r, and tap t feeds o through input q - (t*dilation - r)/stride; along w the same holds for
// o + padding % stride, so that pieces of a row begin where the row does. A block has one residue of d, a
// tile of positions (d, run of h, q of w) and a few channels. A thread takes one of these channels and a run of neighbouring q of h,
// with all residues of h and w: an input row, loaded once, serves all q of the run that it reaches and all their residues. Where
// rows lie together in memory neighbouring lanes have neighbouring positions, where channels do they have neighbouring channels.
#include "convt3d.cuh"
#include "convt3d/divisor.cuh"
#include "convt3d/specialized.cuh"
#include "convt3d/store_piece.cuh"

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 4
#endif
#ifndef BLOCK_CHANNELS
#define BLOCK_CHANNELS 8
#endif
#ifndef RUN
#define RUN 8
#endif
#ifndef SUMS
#define SUMS 16
#endif
#ifndef RESIDENT_WARPS
#define RESIDENT_WARPS 16
#endif
// Set by the problem; these are for a look at the compiler's output.
#ifndef KERNEL_H
#define KERNEL_H 3
#endif
#ifndef KERNEL_W
#define KERNEL_W 3
#endif
#ifndef STRIDE_H
#define STRIDE_H 2
#endif
#ifndef STRIDE_W
#define STRIDE_W 2
#endif
#ifndef DILATION_H
#define DILATION_H 1
#endif
#ifndef DILATION_W
#define DILATION_W 1
#endif
#ifndef LEAD_W
#define LEAD_W 1
#endif
#ifndef MULTIPLIER
#define MULTIPLIER 1
#endif

constexpr int MOST_ROWS = 64;                                                                   // that a run reads
constexpr int LENGTH = STRIDE_H * STRIDE_W * RUN <= SUMS ? RUN : SUMS / (STRIDE_H * STRIDE_W);  // of a run
static_assert(RUN <= 16, "the rows of a run and those its taps reach over are at most 64");
static_assert(SUMS >= 16, "a stride of 4 along h and w has 16 residues");
constexpr int BLOCKS = (sizeof(accum_t) == 8 ? 8 : RESIDENT_WARPS) / BLOCK_WARPS;  // on a multiprocessor
constexpr int UNROLL = KERNEL_H * KERNEL_W <= 16 && DILATION_H * DILATION_W == 1 ? 8 : 1;
constexpr int COLUMNS = UNROLL > 1 ? 4 : 1;  // whose inputs are in registers at once

// The numbers of a problem that the GPU's binary knows, for the axes h and w.
struct Taps {
  int kernel, stride, dilation, lead;  // o + padding - padding / stride * stride = q*stride + r + lead

  // Inputs from nearest() to reach() below q have taps.
  __device__ int nearest() const { return lead > 0 ? -1 : 0; }
  __device__ int reach() const { return ((kernel - 1) * dilation - lead + stride) / stride - 1; }
  // The tap that leads from an input `offset` below q to residue r, or -1.
  __device__ int tap(int offset, int r) const {
    const int scaled = offset * stride + r + lead;
    return scaled >= 0 && scaled % dilation == 0 && scaled / dilation < kernel ? scaled / dilation : -1;
  }
};

// What all threads of a block have in common. In shared memory, because registers are for inputs and sums.
struct Block {
  AxisClass d;
  int origin_d;  // the input of tap 0 and the class's first output
  Divisor columns, runs, channels;
  int n, first_channel;
};

// Where a thread's run of q of h lies: which d of the class, the first q of h, the q of w.
struct Place {
  int d, q_h, q_w;
};

// sums[(q of the run * stride_h + r_h) * stride_w + r_w] += the products of one plane of inputs. `plane` is column w, tap 0 of the
// first q; weights are [tap of h][tap of w].
template <bool UNIT_STEP>
__device__ __forceinline__ void multiply(accum_t (&sums)[SUMS], const Taps& th, const Taps& tw, int run, const Problem& problem,
                                         const View<const scalar_t>& input, const scalar_t* plane, int h, int w,
                                         const accum_t* weights) {
  const index_t step_h = input.stride[3], step_w = UNIT_STEP ? 1 : input.stride[4];
  const int reach = th.reach();
#pragma unroll(UNROLL)
  for (int first = tw.nearest(); first <= tw.reach(); first += COLUMNS) {  // columns first to first + COLUMNS - 1 below w
    accum_t x[MOST_ROWS][COLUMNS];
    bool inside[COLUMNS];
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      inside[j] =
          first + j <= tw.reach() && static_cast<unsigned>(w - first - j) < static_cast<unsigned>(problem.input_size[2]);
    }
    const scalar_t* line = plane - reach * step_h - first * step_w;
#pragma unroll
    for (int row = 0; row < run + reach; ++row, line += step_h) {
      const bool live = static_cast<unsigned>(h + row - reach) < static_cast<unsigned>(problem.input_size[1]);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) x[row][j] = live && inside[j] ? to_accum(line[-j * step_w]) : accum_t(0);
    }
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
#pragma unroll
      for (int r_w = 0; r_w < tw.stride; ++r_w) {
        const int tap_w = tw.tap(first + j, r_w);
        if (tap_w < 0) continue;
#pragma unroll
        for (int tap_h = 0; tap_h < th.kernel; ++tap_h) {
          const accum_t weight = weights[tap_h * tw.kernel + tap_w];
          const int offset_h = tap_h * th.dilation / th.stride, r_h = tap_h * th.dilation % th.stride;
#pragma unroll
          for (int i = 0; i < run; ++i) sums[(i * th.stride + r_h) * tw.stride + r_w] += x[i + reach - offset_h][j] * weight;
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, BLOCKS)
    convt3d_fprop_depthwise(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                            const scalar_t* __restrict__ bias, const View<scalar_t> output, const int columns,
                            const int run_length, const int runs, const int tiles, const int block_channels,
                            const int channel_blocks, const int out_channels_per_group, const int weight_pitch) {
  __shared__ Block block;
  extern __shared__ __align__(16) unsigned char shared[];
  const int run = SPECIALIZED(LENGTH, run_length);
  accum_t* weights = reinterpret_cast<accum_t*>(shared);  // [channel][kd][tap of h][tap of w], an odd pitch
  const Taps th = {SPECIALIZED(KERNEL_H, problem.kernel_size[1]), SPECIALIZED(STRIDE_H, problem.stride[1]),
                   SPECIALIZED(DILATION_H, problem.dilation[1]), 0};
  const Taps tw = {SPECIALIZED(KERNEL_W, problem.kernel_size[2]), SPECIALIZED(STRIDE_W, problem.stride[2]),
                   SPECIALIZED(DILATION_W, problem.dilation[2]), SPECIALIZED(LEAD_W, problem.padding[2] % problem.stride[2])};

  // blockIdx.x = ((n * channel_blocks + channel block) * tiles + tile) * stride_d + residue of d
  unsigned rest = blockIdx.x;
  const AxisClass d = axis_class(problem, 0, static_cast<int>(rest % problem.stride[0]));
  rest /= problem.stride[0];
  const int tile = static_cast<int>(rest % tiles);
  rest /= tiles;
  const int first_channel = static_cast<int>(rest % channel_blocks) * block_channels;
  const int n = static_cast<int>(rest / channel_blocks);
  const int channels = min(block_channels, problem.out_channels - first_channel);

  const int taps_hw = th.kernel * tw.kernel, multiplier = SPECIALIZED(MULTIPLIER, out_channels_per_group);
  for (int i = static_cast<int>(threadIdx.x); i < d.taps * taps_hw * channels; i += 32 * BLOCK_WARPS) {
    const int channel = i / (d.taps * taps_hw), tap = i % taps_hw, kd = i / taps_hw % d.taps, co = first_channel + channel;
    weights[channel * weight_pitch + i % (d.taps * taps_hw)] =
        to_accum(*weight.at(co / multiplier, co % multiplier, d.first_tap + kd * d.tap_step, tap / tw.kernel, tap % tw.kernel));
  }
  if (threadIdx.x == 0) {
    block = {d,
             (d.first_output + problem.padding[0]) / problem.stride[0] - d.first_offset,
             divisor_of(columns),
             divisor_of(runs),
             divisor_of(channels),
             n,
             first_channel};
  }
  __syncthreads();

  const auto place_of = [&](int position) {
    const int line = block.columns.quotient(position), of_d = block.runs.quotient(line);
    return Place{of_d, problem.padding[1] / th.stride + (line - of_d * runs) * run,
                 problem.padding[2] / tw.stride + position - line * columns};
  };
  const int first_item = tile * 32 * BLOCK_WARPS;
  Place place = place_of(first_item + static_cast<int>(threadIdx.x));
#pragma unroll 1
  for (int i = 0; i < channels; ++i) {
    int channel = i;
    if (output.stride[1] == 1) {  // channels lie together in memory: neighbouring threads have neighbouring channels
      const int item = i * 32 * BLOCK_WARPS + static_cast<int>(threadIdx.x), position = block.channels.quotient(item);
      channel = item - position * channels;
      place = place_of(first_item + position);
    }
    if (place.d >= block.d.outputs) continue;
    const int q_h = place.q_h, q_w = place.q_w, co = block.first_channel + channel;

    accum_t sums[SUMS];
    const accum_t start = bias != nullptr ? to_accum(bias[co]) : accum_t(0);
#pragma unroll
    for (int s = 0; s < run * th.stride * tw.stride; ++s) sums[s] = start;
#pragma unroll 1
    for (int kd = 0; kd < block.d.taps; ++kd) {
      const int in_d = block.origin_d + place.d - kd * block.d.offset_step;
      if (in_d < 0 || in_d >= problem.input_size[0]) continue;
      const scalar_t* plane = input.at(block.n, co / multiplier, in_d, q_h, q_w);
      const accum_t* taps = weights + channel * weight_pitch + kd * taps_hw;
      if (input.stride[4] == 1) {
        multiply<true>(sums, th, tw, run, problem, input, plane, q_h, q_w, taps);
      } else {
        multiply<false>(sums, th, tw, run, problem, input, plane, q_h, q_w, taps);
      }
    }

    const int o_h = q_h * th.stride - problem.padding[1], o_w = (q_w - problem.padding[2] / tw.stride) * tw.stride;
    scalar_t* y = output.at(block.n, co, block.d.first_output + place.d * problem.stride[0], o_h, o_w);
#pragma unroll
    for (int row = 0; row < run * th.stride; ++row, y += output.stride[3]) {
      if (o_h + row < 0 || o_h + row >= problem.output_size[1]) continue;
      store_piece(&sums[row * tw.stride], tw.stride, y, output.stride[4], problem.output_size[2] - o_w,
                  made_of_pairs(y, tw.stride, output.stride[4]));
    }
  }
}
