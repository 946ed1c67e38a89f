/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
multiplies_padding = true
[specialize]
KERNEL_H = "kernel_h"
KERNEL_W = "kernel_w"
STRIDE_H = "stride_h"
STRIDE_W = "stride_w"
DILATION_H = "dilation_h"
DILATION_W = "dilation_w"
PADDING_H = "padding_h"
PADDING_W = "padding_w"
MULTIPLIER = "out_channels_per_group"
[constants]
run_w = "max(1, min(RUN_W, 16 // (itemsize * stride_w)))"
run_h = "max(1, min(RUN_H, SUMS // max(1, itemsize // 4) // (stride_h * stride_w * run_w)))"
columns = "ceil_div(output_w, stride_w * run_w)"
runs = "ceil_div(output_h, stride_h * run_h)"
positions = "ceil_div(output_d, stride_d) * runs * columns"
tiles = "ceil_div(positions, 32 * BLOCK_WARPS)"
taps_d = "ceil_div(kernel_d, stride_d // gcd(stride_d, dilation_d))"
weight_pitch = "taps_d * kernel_h * kernel_w // 2 * 2 + 1"
channel_bytes = "weight_pitch * max(itemsize, 4)"
block_channels = "max(1, min(BLOCK_CHANNELS, out_channels, 98 * 1024 // channel_bytes))"
channel_blocks = "ceil_div(out_channels, block_channels)"
[restrictions]
"in_channels_per_group == 1 and out_channels_per_group <= 4" = "it is for depthwise layers: one input channel a group, a multiplier of at most 4"
"stride_h <= 4 and stride_w <= 4" = "a thread owns all residues of h and w: strides of at most 4 along them"
"(kernel_h - 1) * dilation_h // stride_h <= 48" = "the inputs of a column along h are in registers: a kernel that reaches over at most 49 of them"
"channel_bytes <= 98 * 1024" = "the weights of a channel must fit the 99 KiB of shared memory that every GPU has"
"positions <= 2000000000" = "it counts the outputs of a class in 32 bits"
[search]
BLOCK_WARPS = [4, 8]
BLOCK_CHANNELS = [4, 8, 16]
SUMS = [32, 64]
[cost]
steps = "block_channels * taps_d"
products = "min(32 * BLOCK_WARPS, positions) * run_h * run_w * kernel_h * kernel_w"
bytes = "32 * BLOCK_WARPS * (run_h + (kernel_h - 1) * dilation_h // stride_h) * (run_w + (kernel_w - 1) * dilation_w // stride_w) * itemsize"
[[launch]]
grid = "batch * channel_blocks * tiles * stride_d"
block = "32 * BLOCK_WARPS"
shared_bytes = "block_channels * channel_bytes"
*/
// Depthwise (groups = in_channels, with a channel multiplier of up to 4). There is next to no arithmetic: what counts is how
// many instructions go with it, and that nothing waits. Nothing is staged but weights; the L1 cache holds the inputs.
//
// Along d o + padding = q*stride + r, and tap t feeds o through input q - (t*dilation - r)/stride; along h and w the same
// holds for o + padding % stride, so that runs of q begin where the output does. A block has one residue of d, a tile of
// positions (d, run of h, run of w) and a few channels. A thread takes one of these channels and neighbouring q of h and w
// with all their residues: an input, loaded once, serves all that it reaches. What a thread has of a row is at most 16 bytes,
// stored at once where rows are aligned; where rows of inputs are, those of its q are loaded at once. Where rows lie together
// in memory neighbouring lanes have neighbouring positions, where channels do they have neighbouring channels.
#include "convt3d.cuh"
#include "convt3d/core/divisor.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/epilogue/store_piece.cuh"
#include "convt3d/core/taps.cuh"
#include "convt3d/core/vector.cuh"

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 4
#endif
#ifndef BLOCK_CHANNELS
#define BLOCK_CHANNELS 16
#endif
#ifndef RUN_H
#define RUN_H 8
#endif
#ifndef RUN_W
#define RUN_W 4
#endif
#ifndef SUMS
#define SUMS 32
#endif
#ifndef RESIDENT_WARPS
#define RESIDENT_WARPS 16
#endif

constexpr int between(int low, int value, int high) { return value < low ? low : value < high ? value : high; }

constexpr int MOST_ROWS = 64, MOST_SUMS = SUMS * 4 / sizeof(accum_t);  // of a thread
// The q of a thread: along w as many as give 16 bytes of a row of the output, along h as many as give MOST_SUMS.
constexpr int LENGTH_W = between(1, 16 / static_cast<int>(sizeof(scalar_t)) / STRIDE_W, RUN_W);
constexpr int LENGTH_H = between(1, MOST_SUMS / (STRIDE_H * STRIDE_W * LENGTH_W), RUN_H);
static_assert(RUN_H <= 15, "the rows of a run and those its taps reach over are at most 64");
static_assert(RUN_W == 1 || RUN_W == 2 || RUN_W == 4, "inputs are loaded as vectors of so many");
static_assert(SUMS >= 32, "a stride of 4 along h and w has 16 residues, in 16 bits for two q");
constexpr int BLOCKS = (sizeof(accum_t) == 8 ? 8 : RESIDENT_WARPS) / BLOCK_WARPS;  // on a multiprocessor
// Of a plane; where they are few they are all in registers at once.
constexpr int INPUTS = (LENGTH_H + KERNEL_H / STRIDE_H) * (LENGTH_W + KERNEL_W / STRIDE_W);
constexpr int UNROLL = INPUTS <= 80 && KERNEL_H * KERNEL_W <= 16 && DILATION_H * DILATION_W == 1 ? 8 : 1;

// What all threads of a block have in common. In shared memory, because registers are for inputs and sums.
struct Block {
  AxisClass d;
  int origin_d;  // the input of tap 0 and the class's first output; where the class has no tap, so that all lie outside
  Divisor columns, runs, channels;
  int n, first_channel;
  index_t step_h, step_w;              // of the input
  bool input_vectors, output_vectors;  // rows are made of aligned vectors: run_w inputs, what a thread has of a row
};

// Where a thread's q lie: which d of the class, the first q as an input of h and of w; input and output there, of channel 0.
struct Place {
  int d, h, w;
  const scalar_t* input;
  scalar_t* output;
};

// As words where elements have 16 bits: these the compiler would take apart one by one.
template <int LENGTH>
__device__ __forceinline__ void load_vector(accum_t* x, const scalar_t* from, bool inside) {
  if constexpr (sizeof(scalar_t) == 2) {
    const Words<LENGTH / 2> loaded = inside ? *reinterpret_cast<const Words<LENGTH / 2>*>(from) : Words<LENGTH / 2>{};
#pragma unroll
    for (int e = 0; e < LENGTH; ++e)
      x[e] = to_accum(scalar_t{static_cast<unsigned short>(loaded.element[e / 2] >> 16 * (e % 2))});
  } else {
    const Vector<LENGTH> loaded = inside ? *reinterpret_cast<const Vector<LENGTH>*>(from) : Vector<LENGTH>{};
#pragma unroll
    for (int e = 0; e < LENGTH; ++e) x[e] = loaded.element[e];
  }
}

template <int LENGTH>
__device__ __forceinline__ void store_vector(const Epilogue& epilogue, scalar_t* y, const accum_t* sums) {
  Vector<LENGTH> stored;
#pragma unroll
  for (int e = 0; e < LENGTH; ++e) stored.element[e] = epilogue.finish(sums[e]);
  *reinterpret_cast<Vector<LENGTH>*>(y) = stored;
}

// sums[((q of h * stride_h + r_h) * run_w + q of w) * stride_w + r_w] += all products. `plane` is the input at `place`, weights
// are [kd][tap of h][tap of w]. With VECTORS run_w inputs from a multiple of run_w on are loaded at once.
template <bool VECTORS>
__device__ __forceinline__ void multiply(accum_t (&sums)[MOST_SUMS], const Taps& th, const Taps& tw, const Problem& problem,
                                         const Block& block, const View<const scalar_t>& input, const scalar_t* plane,
                                         const Place& place, const accum_t* weights) {
  const int first_row = -th.reach(), first_column = -tw.reach(), rows = th.inputs(), columns = tw.inputs();
  const int taps_hw = th.kernel * tw.kernel;
  plane += first_row * input.stride[3] + first_column * input.stride[4];
  constexpr int COLUMNS = UNROLL == 1 ? 1 : VECTORS ? 8 : 4;  // whose inputs are in registers at once
  int d = block.origin_d + place.d, kd = 0;
  do {
    if (d < 0 || d >= problem.input_size[0]) continue;
    const int h = computed_anew(place.h) + first_row, w = computed_anew(place.w) + first_column;
#pragma unroll(UNROLL)
    for (int first = 0; first < columns; first += COLUMNS) {
      accum_t x[MOST_ROWS][COLUMNS];
      const scalar_t* line = plane + first * input.stride[4];
#pragma unroll
      for (int row = 0; row < rows; ++row) {
        if (!VECTORS) forget_memory();  // or the way to each input is computed before the loops, and kept
        if (row > 0) line += VECTORS ? input.stride[3] : block.step_h;
        const index_t step_w = VECTORS ? 1 : block.step_w;
        const bool live = static_cast<unsigned>(h + row) < static_cast<unsigned>(problem.input_size[1]);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
          if (first + j >= columns) continue;
          // Column j is number `at` of a vector, which may lie among these columns as a whole.
          const int at = static_cast<unsigned>(tw.first() + first_column + first + j) % tw.run, end = j - at + tw.run;
          const bool whole = VECTORS && COLUMNS > 1 && tw.run > 1 && j >= at && end <= min(COLUMNS, columns - first);
          const bool inside = live && static_cast<unsigned>(w + first + j) < static_cast<unsigned>(problem.input_size[2]);
          if (!whole) x[row][j] = to_accum(inside ? line[j * step_w] : scalar_t{});
          if (whole && at == 0 && tw.run == 2) load_vector<2>(&x[row][j], line + j, inside);
          if (whole && at == 0 && tw.run == 4) load_vector<4>(&x[row][j], line + j, inside);
        }
      }
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        if (first + j >= columns) continue;
#pragma unroll
        for (int i = 0; i < tw.run * tw.stride; ++i) {
          const int tap_w = tw.tap(i / tw.stride - first_column - first - j, i % tw.stride);
          if (tap_w < 0) continue;
#pragma unroll
          for (int tap_h = 0; tap_h < th.kernel; ++tap_h) {
            const accum_t weight = weights[tap_h * tw.kernel + tap_w];
            const int scaled = tap_h * th.dilation - th.lead() + th.stride, r = scaled % th.stride;
            const int row = th.reach() + 1 - scaled / th.stride;  // that it leads to from the first q
#pragma unroll
            for (int q = 0; q < th.run; ++q) sums[(q * th.stride + r) * tw.run * tw.stride + i] += x[row + q][j] * weight;
          }
        }
      }
    }
    // `continue` leads here. A loop that might not run at all would need all sums twice before it.
  } while (weights += taps_hw, d -= block.d.offset_step, plane -= block.d.offset_step * input.stride[2], ++kd < block.d.taps);
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, BLOCKS)
    convt3d_fprop_depthwise(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                            const scalar_t* __restrict__ bias, const View<scalar_t> output, const int columns, const int run_h,
                            const int run_w, const int runs, const int tiles, const int block_channels,
                            const int channel_blocks, const int out_channels_per_group, const int weight_pitch) {
  const Epilogue epilogue{bias};
  __shared__ Block block;
  extern __shared__ __align__(16) unsigned char shared[];
  accum_t* weights = reinterpret_cast<accum_t*>(shared);  // [channel][kd][tap of h][tap of w], an odd pitch
  const Taps th = {SPECIALIZED(KERNEL_H, problem.kernel_size[1]), SPECIALIZED(STRIDE_H, problem.stride[1]),
                   SPECIALIZED(DILATION_H, problem.dilation[1]), SPECIALIZED(PADDING_H, problem.padding[1]),
                   SPECIALIZED(LENGTH_H, run_h)};
  const Taps tw = {SPECIALIZED(KERNEL_W, problem.kernel_size[2]), SPECIALIZED(STRIDE_W, problem.stride[2]),
                   SPECIALIZED(DILATION_W, problem.dilation[2]), SPECIALIZED(PADDING_W, problem.padding[2]),
                   SPECIALIZED(LENGTH_W, run_w)};

  // blockIdx.x = ((n * channel_blocks + channel block) * tiles + tile) * stride_d + residue of d
  unsigned rest = blockIdx.x;
  const AxisClass d = axis_class(problem, 0, static_cast<int>(rest % problem.stride[0]));
  rest /= problem.stride[0];
  const int tile = static_cast<int>(rest % tiles);
  rest /= tiles;
  const int first_channel = static_cast<int>(rest % channel_blocks) * block_channels;
  const int n = static_cast<int>(rest / channel_blocks);
  const int channels = min(block_channels, problem.out_channels - first_channel);

  const int length = tw.run * tw.stride;  // of a row's outputs
  const int taps_hw = th.kernel * tw.kernel, multiplier = SPECIALIZED(MULTIPLIER, out_channels_per_group);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  for (int channel = warp; channel < channels; channel += BLOCK_WARPS) {
    const int co = first_channel + channel;
    for (int i = lane; i < d.taps * taps_hw; i += 32) {
      const int kd = i / taps_hw, tap = i % taps_hw;
      weights[channel * weight_pitch + i] = to_accum(
          *weight.at(co / multiplier, co % multiplier, d.first_tap + kd * d.tap_step, tap / tw.kernel, tap % tw.kernel));
    }
  }
  if (threadIdx.x == 0) {
    block = {d,
             d.taps > 0 ? (d.first_output + problem.padding[0]) / problem.stride[0] - d.first_offset : -d.outputs,
             divisor_of(columns),
             divisor_of(runs),
             divisor_of(channels),
             n,
             first_channel,
             input.stride[3],
             input.stride[4],
             problem.input_size[2] % tw.run == 0 && made_of_vectors(input, tw.run),
             (length == 4 || length == 8) && made_of_vectors(output, length)};
  }
  __syncthreads();

  const auto place_of = [&](int position) {
    const int line = block.columns.quotient(position), of_d = block.runs.quotient(line);
    const int q_h = (line - of_d * runs) * th.run, q_w = (position - line * columns) * tw.run;
    const int in_h = th.first() + q_h, in_w = tw.first() + q_w;
    return Place{of_d, in_h, in_w, input.at(block.n, 0, block.origin_d + of_d, in_h, in_w),
                 output.at(block.n, 0, block.d.first_output + of_d * problem.stride[0], q_h * th.stride, q_w * tw.stride)};
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
    const int co = block.first_channel + channel;

    accum_t sums[MOST_SUMS];
    const accum_t start = epilogue.start(co);
#pragma unroll
    for (int s = 0; s < th.run * th.stride * length; ++s) sums[s] = start;
    const scalar_t* plane = place.input + co / multiplier * input.stride[1];
    const accum_t* taps = weights + channel * weight_pitch;
    if (block.input_vectors) {
      multiply<true>(sums, th, tw, problem, block, input, plane, place, taps);
    } else {
      multiply<false>(sums, th, tw, problem, block, input, plane, place, taps);
    }

    const int o_h = (place.h - th.first()) * th.stride, o_w = (place.w - tw.first()) * tw.stride;
    const int live = problem.output_size[2] - o_w;
    scalar_t* y = place.output + co * output.stride[1];
    if (block.output_vectors && live >= length) {
#pragma unroll
      for (int row = 0; row < th.run * th.stride; ++row, y += output.stride[3]) {
        if (o_h + row >= problem.output_size[1]) continue;
        if (length == 4) store_vector<4>(epilogue, y, &sums[row * 4]);
        if (length == 8) store_vector<8>(epilogue, y, &sums[row * 8]);
      }
    } else {
#pragma unroll
      for (int row = 0; row < th.run * th.stride; ++row, y += output.stride[3]) {
        if (o_h + row >= problem.output_size[1]) continue;
        store_piece(epilogue, &sums[row * length], length, y, output.stride[4], live,
                    made_of_pairs(y, length, output.stride[4]));
      }
    }
  }
}
