/* convt3d
pass = "fprop"
dtypes = ["fp32", "fp16", "bf16"]
[specialize]
KERNEL_W = "kernel_w"
STRIDE_W = "stride_w"
DILATION_W = "dilation_w"
LEAD_W = "padding_w % stride_w"
IN_CHANNELS = "in_channels_per_group"
OUT_CHANNELS = "out_channels_per_group"
INPUT_VOXELS = "input_voxels if input_voxels <= 1024 * 1024 * 1024 else 0"
[constants]
channel_tiles = "ceil_div(out_channels_per_group, 8)"
classes = "stride_d * stride_h"
taps_d = "ceil_div(kernel_d, stride_d // gcd(stride_d, dilation_d))"
taps_h = "ceil_div(kernel_h, stride_h // gcd(stride_h, dilation_h))"
columns = "ceil_div(output_w, stride_w)"
positions = "ceil_div(output_d, stride_d) * ceil_div(output_h, stride_h) * columns"
tiles = "ceil_div(positions, 32 * BLOCK_WARPS * max(1, min(POSITIONS, 2 * POSITIONS // stride_w)))"
block_tiles = "max(1, min(BLOCK_TILES, batch * groups * channel_tiles * classes * tiles // (32 * multiprocessors)))"
runs = "ceil_div(tiles, block_tiles)"
weight_bytes = "taps_d * taps_h * in_channels_per_group * kernel_w * 8 * 4"
[restrictions]
"groups > 1 and in_channels_per_group <= 16 and out_channels_per_group <= 16" = "it is for groups of at most 16 channels: an input is read again for every 8 output channels"
"stride_w <= min(4, 2 * POSITIONS)" = "a thread owns all residues of w: a stride of at most 4 along w"
"weight_bytes <= 98 * 1024" = "the weights of a class of residues must fit the 99 KiB of shared memory that every GPU has"
"positions <= 2000000000" = "it counts the outputs of a class in 32 bits"
[search]
BLOCK_WARPS = [4, 8]
BLOCK_TILES = [1, 2, 4]
UNROLL = [1, 2]
[[launch]]
grid = "batch * runs * groups * channel_tiles * classes"
block = "32 * BLOCK_WARPS"
shared_bytes = "weight_bytes"
*/
// Groups of few channels. Such a layer is bound by its stores, so nothing is staged and nothing waits: a thread reads its inputs
// straight from memory, and keeps the sums of all residues of w for 8 output channels, which it stores itself.
//
// Along d and h o + padding = q*stride + r, and tap t feeds o through input q - (t*dilation - r)/stride; a block has one r of each. Along
// w o = q*stride + r, so that pieces of a row begin where the row does, and tap t feeds o through input
// q + padding/stride - (t*dilation - r - padding%stride)/stride; a thread has all r of several positions (d, h, q): one input feeds an
// output of each r that has a tap for it.
// Positions are counted over rows and planes alike, so that short rows leave no lane idle, and neighbouring lanes have neighbouring
// positions: a load or store of a warp is a piece of a row. Every row is read again by other taps, channels and warps; the L1
// cache holds it. Only weights are in shared memory, as [kd][kh][ci][tap of w][8 channels]: all lanes read the same 16 bytes.
#include "convt3d.cuh"
#include "convt3d/divisor.cuh"
#include "convt3d/forget_memory.cuh"
#include "convt3d/specialized.cuh"
#include "convt3d/store_piece.cuh"

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 4
#endif
#ifndef BLOCK_TILES
#define BLOCK_TILES 4
#endif
#ifndef POSITIONS
#define POSITIONS 4
#endif
#ifndef RESIDENT_WARPS
#define RESIDENT_WARPS 16
#endif
#ifndef UNROLL
#define UNROLL 2
#endif
#ifndef UNROLLED_TAPS
#define UNROLLED_TAPS 24
#endif
// Set by the problem; these are for a look at the compiler's output.
#ifndef KERNEL_W
#define KERNEL_W 3
#endif
#ifndef STRIDE_W
#define STRIDE_W 2
#endif
#ifndef DILATION_W
#define DILATION_W 1
#endif
#ifndef LEAD_W
#define LEAD_W 1
#endif
#ifndef IN_CHANNELS
#define IN_CHANNELS 8
#endif
#ifndef OUT_CHANNELS
#define OUT_CHANNELS 8
#endif
#ifndef INPUT_VOXELS
#define INPUT_VOXELS 262144
#endif

// Input channels in one piece of code, whose loads need no arithmetic: all of them where the instruction cache takes that.
constexpr int UNROLLED = IN_CHANNELS * KERNEL_W <= UNROLLED_TAPS ? IN_CHANNELS : UNROLL;
constexpr int CHANNELS = 8, MOST_SUMS = 2 * POSITIONS;  // of a channel
static_assert(POSITIONS >= 1 && POSITIONS <= 8, "each position has registers of its own");

template <int LENGTH>
struct alignas(LENGTH * sizeof(scalar_t)) Vector {
  scalar_t element[LENGTH];
};
constexpr int IN_VECTOR = 4, OUT_VECTOR = 16 / sizeof(scalar_t);  // 8 inputs of 16 bits would take too many registers

struct alignas(16) Weights {
  accum_t channel[4];
};

// What all threads of a block have in common. In shared memory, because registers are for sums.
struct Block {
  AxisClass d, h;
  int origin_d, origin_h;  // the input of tap 0 and the class's first output
  Divisor columns, rows;
  int first_column, positions;
  index_t input, output;  // where the first channel begins
  index_t output_step_d, output_step_h;
  int live_channels;  // of the output
  bool input_vectors, input_lines, output_vectors;
  accum_t start[CHANNELS];  // the bias
};

// A thread's position: the input of tap 0, from the first channel's beginning, and its d and h. In shared memory for the same reason.
struct alignas(16) Place {
  index_t input;
  int d, h;
};

// What one pass over the input channels needs: for each position the input of tap 0 in the first channel, and its column.
struct Rows {
  const scalar_t* input[POSITIONS];
  int column[POSITIONS];  // OUTSIDE where the row is
};
constexpr int OUTSIDE = -0x40000000;  // of a column, a d

// sums[position * stride + r][channel] += the products of all input channels with the taps of one (kd, kh). LENGTH neighbouring
// channels are loaded at once; LINES: an input channel is one contiguous piece of memory, as far as steps along w and from channel to
// channel tell, so that these are constants.
template <int LENGTH, bool LINES>
__device__ __forceinline__ void multiply(accum_t (&sums)[MOST_SUMS][CHANNELS], const Problem& problem,
                                         const View<const scalar_t>& input, int channels, Rows& rows, const Weights* weights) {
  const int kernel = SPECIALIZED(KERNEL_W, problem.kernel_size[2]), stride = SPECIALIZED(STRIDE_W, problem.stride[2]);
  const int dilation = SPECIALIZED(DILATION_W, problem.dilation[2]), positions = min(POSITIONS, MOST_SUMS / stride);
  const int lead = SPECIALIZED(LEAD_W, problem.padding[2] % problem.stride[2]), width = problem.input_size[2];
  const index_t step = LINES ? 1 : input.stride[4];
  const index_t next_channel = LINES ? SPECIALIZED(INPUT_VOXELS, input.stride[1]) : input.stride[1];
#pragma unroll(LINES ? UNROLLED : 1)
  for (int ci = 0; ci < channels; ci += LENGTH, weights += LENGTH * kernel * 2) {
#pragma unroll(LINES ? 64 : 1)
    for (int offset = lead > 0 ? -1 : 0; offset * stride <= (kernel - 1) * dilation - lead; ++offset) {
      Vector<LENGTH> x[POSITIONS];
#pragma unroll
      for (int i = 0; i < positions; ++i) {
        const bool inside = static_cast<unsigned>(rows.column[i] - offset) < static_cast<unsigned>(width);
        x[i] = inside ? *reinterpret_cast<const Vector<LENGTH>*>(rows.input[i] - offset * step) : Vector<LENGTH>{};
      }
#pragma unroll
      for (int r = 0; r < stride; ++r) {
        const int scaled = offset * stride + r + lead, tap = scaled / dilation;
        if (scaled < 0 || scaled % dilation != 0 || tap >= kernel) continue;
#pragma unroll
        for (int e = 0; e < LENGTH; ++e) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            const Weights w = weights[(e * kernel + tap) * 2 + part];
#pragma unroll
            for (int i = 0; i < positions; ++i) {
#pragma unroll
              for (int c = 0; c < 4; ++c) sums[i * stride + r][part * 4 + c] += to_accum(x[i].element[e]) * w.channel[c];
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < positions; ++i) rows.input[i] += LENGTH * next_channel;
  }
}

__device__ inline void gather_weights(accum_t* weights, const Problem& problem, const View<const scalar_t>& weight,
                                      const AxisClass& d, const AxisClass& h, int group, int channels, int first_out,
                                      int out_channels) {
  const int kernel = SPECIALIZED(KERNEL_W, problem.kernel_size[2]);
  const int count = d.taps * h.taps * channels * kernel * CHANNELS;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32 * BLOCK_WARPS) {
    const int c = i % CHANNELS, tap = i / CHANNELS % kernel, row = i / CHANNELS / kernel;
    const int ci = row % channels, kh = row / channels % h.taps, kd = row / channels / h.taps;
    const bool live = first_out + c < out_channels;
    const scalar_t* from =
        weight.at(group * channels + ci, first_out + c, d.first_tap + kd * d.tap_step, h.first_tap + kh * h.tap_step, tap);
    weights[i] = live ? to_accum(*from) : accum_t(0);
  }
}

// Whether `first` and all that lies a stride from it begin on LENGTH neighbouring channels, aligned for one access.
template <int LENGTH, class T>
__device__ inline bool channels_are_vectors(const View<T>& view, const scalar_t* first, int channels) {
  bool whole = view.stride[1] == 1 && channels % LENGTH == 0;
  for (int a = 2; a < 5; ++a) whole = whole && view.stride[a] % LENGTH == 0;
  return whole && reinterpret_cast<index_t>(first) % sizeof(Vector<LENGTH>) == 0;
}

__device__ __forceinline__ void store_channels(const accum_t (&sums)[CHANNELS], scalar_t* y) {
#pragma unroll
  for (int c = 0; c < CHANNELS; c += OUT_VECTOR) {
    Vector<OUT_VECTOR> out;
#pragma unroll
    for (int e = 0; e < OUT_VECTOR; ++e) out.element[e] = to_scalar(sums[c + e]);
    *reinterpret_cast<Vector<OUT_VECTOR>*>(y + c) = out;
  }
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, RESIDENT_WARPS / BLOCK_WARPS)
    convt3d_fprop_grouped(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                          const scalar_t* __restrict__ bias, const View<scalar_t> output, const int channel_tiles,
                          const int columns, const int runs, const int block_tiles, const int in_channels_per_group,
                          const int out_channels_per_group) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Block block;
  __shared__ Place places[POSITIONS][32 * BLOCK_WARPS];
  __shared__ int place_columns[POSITIONS][32 * BLOCK_WARPS];
  accum_t* weights = reinterpret_cast<accum_t*>(shared);
  const int stride = SPECIALIZED(STRIDE_W, problem.stride[2]), positions = min(POSITIONS, MOST_SUMS / stride);
  const int in_channels = SPECIALIZED(IN_CHANNELS, in_channels_per_group);

  // blockIdx.x = (((n * groups + group) * channel_tiles + channel tile) * runs + run) * classes + class: the classes of a place are at
  // work at the same time, so that they find its inputs in the L2 cache. Where channels lie together, so are the groups of a place.
  unsigned rest = blockIdx.x;
  const auto next = [&rest](int count) {
    const unsigned index = rest % count;
    rest /= count;
    return static_cast<int>(index);
  };
  const int residue_h = next(problem.stride[1]), residue_d = next(problem.stride[0]);
  int run = output.stride[1] == 1 ? 0 : next(runs);
  const int first_out = next(channel_tiles) * CHANNELS, group = next(problem.groups);
  if (output.stride[1] == 1) run = next(runs);
  const int n = static_cast<int>(rest);
  {
    const AxisClass d = axis_class(problem, 0, residue_d), h = axis_class(problem, 1, residue_h);
    gather_weights(weights, problem, weight, d, h, group, in_channels_per_group, first_out, out_channels_per_group);
    if (threadIdx.x == 0) {
      const int first_channel = group * out_channels_per_group + first_out;
      block.d = d;
      block.h = h;
      block.origin_d = (d.first_output + problem.padding[0]) / problem.stride[0] - d.first_offset;
      block.origin_h = (h.first_output + problem.padding[1]) / problem.stride[1] - h.first_offset;
      block.columns = divisor_of(columns);
      block.rows = divisor_of(max(h.outputs, 1));
      block.output_step_d = problem.stride[0] * output.stride[2];
      block.output_step_h = problem.stride[1] * output.stride[3];
      block.first_column = problem.padding[2] / stride;
      block.positions = d.outputs * h.outputs * columns;
      block.input = input.at(n, group * in_channels_per_group, 0, 0, 0) - input.data;
      block.output = output.at(n, first_channel, d.first_output, h.first_output, 0) - output.data;
      for (int c = 0; c < CHANNELS; ++c) {
        const bool has_bias = bias != nullptr && first_out + c < out_channels_per_group;
        block.start[c] = has_bias ? to_accum(bias[first_channel + c]) : accum_t(0);
      }
      block.live_channels = min(CHANNELS, out_channels_per_group - first_out);
      // Where channels lie together, as in channels_last_3d, they are read and written as vectors.
      block.input_vectors = channels_are_vectors<IN_VECTOR>(input, input.data + block.input, in_channels_per_group);
      block.input_lines = input.stride[4] == 1 && input.stride[1] == SPECIALIZED(INPUT_VOXELS, input.stride[1]);
      block.output_vectors =
          block.live_channels == CHANNELS && channels_are_vectors<OUT_VECTOR>(output, output.data + block.output, CHANNELS);
    }
  }
  __syncthreads();

  // Position `first` and every 32nd after it are this thread's, first those of the warp's piece of the tile, then of the next tile's.
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // Blocks that are at work together have neighbouring tiles: what they write is contiguous, as memory likes it.
  int first = (run * BLOCK_WARPS + warp) * 32 * positions + lane;
#pragma unroll 1
  for (int tile = 0; tile < block_tiles && first - lane < block.positions;
       ++tile, first += runs * BLOCK_WARPS * 32 * positions) {
    accum_t sums[MOST_SUMS][CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      const accum_t start = block.start[c];
#pragma unroll
      for (int i = 0; i < positions * stride; ++i) sums[i][c] = start;
    }

    // Position n is column n % columns of row n / columns, and this row n / columns % rows of d n / columns / rows.
#pragma unroll
    for (int i = 0; i < positions; ++i) {
      const int position = first + 32 * i, row = block.columns.quotient(position), of_d = block.rows.quotient(row);
      const int column = block.first_column + position - row * block.columns.value;
      const int d = block.origin_d + of_d, h = block.origin_h + row - of_d * block.rows.value;
      const index_t offset = block.input + d * input.stride[2] + h * input.stride[3] + column * input.stride[4];
      places[i][threadIdx.x] = {offset, position < block.positions ? d : OUTSIDE, h};
      place_columns[i][threadIdx.x] = column;
    }

    const Weights* taps = reinterpret_cast<const Weights*>(weights);
#pragma unroll 1
    for (int kd = 0; kd < block.d.taps; ++kd) {
#pragma unroll 1
      for (int kh = 0; kh < block.h.taps; ++kh) {
        Rows rows;
        forget_memory();
        const int below_d = kd * block.d.offset_step, below_h = kh * block.h.offset_step;
        const index_t below = below_d * input.stride[2] + below_h * input.stride[3];
#pragma unroll
        for (int i = 0; i < positions; ++i) {
          const Place place = places[i][threadIdx.x];
          const bool inside = static_cast<unsigned>(place.d - below_d) < static_cast<unsigned>(problem.input_size[0]) &&
                              static_cast<unsigned>(place.h - below_h) < static_cast<unsigned>(problem.input_size[1]);
          rows.column[i] = inside ? place_columns[i][threadIdx.x] : OUTSIDE;
          rows.input[i] = input.data + (place.input - below);
        }
        if (block.input_vectors) {
          multiply<IN_VECTOR, false>(sums, problem, input, in_channels, rows, taps);
        } else if (block.input_lines) {
          multiply<1, true>(sums, problem, input, in_channels, rows, taps);
        } else {
          multiply<1, false>(sums, problem, input, in_channels, rows, taps);
        }
        taps += in_channels * SPECIALIZED(KERNEL_W, problem.kernel_size[2]) * 2;
      }
    }

#pragma unroll
    for (int i = 0; i < positions; ++i) {
      forget_memory();
      const Place place = places[i][threadIdx.x];
      if (place.d == OUTSIDE) continue;
      const int w = (place_columns[i][threadIdx.x] - block.first_column) * stride;
      const index_t row = (place.d - block.origin_d) * block.output_step_d + (place.h - block.origin_h) * block.output_step_h;
      scalar_t* y = output.data + (block.output + row + w * output.stride[4]);
      if (block.output_vectors) {
#pragma unroll
        for (int r = 0; r < stride; ++r) {
          if (w + r < problem.output_size[2]) store_channels(sums[i * stride + r], y + r * output.stride[4]);
        }
        continue;
      }
      const int channels = SPECIALIZED(OUT_CHANNELS, out_channels_per_group) % CHANNELS == 0 ? CHANNELS : block.live_channels;
      const auto store = [&](index_t step) {
        // Every second channel is aligned alike.
        const bool aligned[2] = {made_of_pairs(y, stride, step), made_of_pairs(y + output.stride[1], stride, step)};
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c, y += output.stride[1]) {
          if (c >= channels) break;
          accum_t piece[MOST_SUMS];
#pragma unroll
          for (int r = 0; r < stride; ++r) piece[r] = sums[i * stride + r][c];
          store_piece(piece, stride, y, step, problem.output_size[2] - w, aligned[c % 2]);
        }
      };
      if (output.stride[4] == 1) {
        store(1);
      } else {
        store(output.stride[4]);
      }
    }
  }
}
