/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
multiplies_padding = true
[specialize]
KERNEL_D = "kernel_d"
KERNEL_H = "kernel_h"
KERNEL_W = "kernel_w"
STRIDE_D = "stride_d"
STRIDE_H = "stride_h"
STRIDE_W = "stride_w"
DILATION_D = "dilation_d"
DILATION_H = "dilation_h"
DILATION_W = "dilation_w"
PADDING_D = "padding_d"
PADDING_H = "padding_h"
PADDING_W = "padding_w"
OUT_CHANNELS = "out_tile"
LENGTH_H = "run_h"
LENGTH_W = "run_w"
SHIFT_W = "shift_w"
[constants]
lead_d = "padding_d % stride_d"
lead_h = "padding_h % stride_h"
lead_w = "padding_w % stride_w"
halo_d = "((kernel_d - 1) * dilation_d - lead_d + stride_d) // stride_d - 1 + (1 if lead_d > 0 else 0)"
halo_h = "((kernel_h - 1) * dilation_h - lead_h + stride_h) // stride_h - 1 + (1 if lead_h > 0 else 0)"
halo_w = "((kernel_w - 1) * dilation_w - lead_w + stride_w) // stride_w - 1 + (1 if lead_w > 0 else 0)"
q_d = "ceil_div(output_d, stride_d)"
q_h = "ceil_div(output_h, stride_h)"
q_w = "ceil_div(output_w, stride_w)"
residues_of_all = "stride_d * stride_h * stride_w"
# Stages and sums are of accum_t.
size = "max(4, itemsize)"
sums = "SUMS * 4 // size"
# A thread's outputs of a row are 16 bytes, where its sums allow.
most_w = "1 if q_w == 1 or stride_w >= 4 else 2 if q_w == 2 or stride_w >= 2 or itemsize == 8 else 4"
run_w = "most_w if most_w * residues_of_all <= sums else 2 if 2 * residues_of_all <= sums and most_w > 1 else 1"
most_channels = "max(1, min(out_channels_per_group, CHANNELS, sums // (residues_of_all * run_w)))"
out_tiles = "ceil_div(out_channels_per_group, most_channels)"
out_tile = "ceil_div(out_channels_per_group, out_tiles)"
most_h = "max(1, min(8, sums // (residues_of_all * run_w * out_tile)))"
# One after the other rounding errors of many products add up: a thread has at most 1000 of an output's.
taps_d = "ceil_div(kernel_d, stride_d // gcd(stride_d, dilation_d))"
taps_h = "ceil_div(kernel_h, stride_h // gcd(stride_h, dilation_h))"
taps_w = "ceil_div(kernel_w, stride_w // gcd(stride_w, dilation_w))"
products = "in_channels_per_group * taps_d * taps_h * taps_w"
least_parts = "1 if products <= 1000 else 2 if products <= 2000 else 4 if products <= 4000 else 8"
most_parts = "1 if in_channels_per_group == 1 else 2 if in_channels_per_group < 4 else 4 if in_channels_per_group < 8 else 8"
channel_parts = "min(most_parts, max(PARTS, least_parts))"
room = "THREADS // channel_parts"
columns = "ceil_div(q_w, run_w)"
region_w = "columns if columns <= 16 else ceil_div(ceil_div(columns, ceil_div(columns, 16)), 4 // run_w) * (4 // run_w)"
slots = "max(1, room // region_w)"
# A window begins where rows of inputs have a vector: so many columns early.
together = "4 if input_w % 4 == 0 and size == 4 else 2 if input_w % 2 == 0 else 1"
shift_w = "(padding_w // stride_w - ((kernel_w - 1) * dilation_w - lead_w + stride_w) // stride_w + 1) % together"
pitch = "ceil_div(run_w * region_w + ceil_div(shift_w + halo_w, run_w) * run_w, 4) * 4"
# A region is about as deep as it is high, as far as a stage holds; its rows are shared out evenly.
depth = "min(q_d, 8 if slots * most_h >= 64 else 4 if slots * most_h >= 16 else 2 if slots * most_h >= 4 else 1)"
fitting_rows = "STAGE_BYTES // (pitch * size * channel_parts * (depth + halo_d)) - halo_h"
most_rows = "max(1, min(max(1, slots // depth) * most_h, fitting_rows))"
region_rows = "ceil_div(q_h, ceil_div(q_h, most_rows))"
region_h = "ceil_div(region_rows, most_h)"
run_h = "ceil_div(region_rows, region_h)"
rows = "region_h * run_h + halo_h"
most_d = "max(1, min(slots // region_h, STAGE_BYTES // (rows * pitch * size * channel_parts) - halo_d))"
region_d = "ceil_div(q_d, ceil_div(q_d, most_d))"
planes = "region_d + halo_d"
positions = "region_w * region_h * region_d"
# Lanes whose vectors lie side by side in all banks: runs of rows, planes and parts begin where the ones before end, modulo 32 words.
skew = "(run_w * region_w - run_h * pitch) % 32 // 4 * 4 if size == 4 else 0"
filled = "rows * pitch + ceil_div(rows, run_h) * skew"
plane = "filled + ((run_w * region_w * region_h - filled) % 32 // 4 * 4 if size == 4 else 0)"
row_weights = "ceil_div(kernel_w * out_tile, 4) * 4"
channel_filled = "planes * plane + kernel_d * kernel_h * row_weights"
channel_elements = "channel_filled + ((run_w * positions - channel_filled) % 32 // 4 * 4 if size == 4 else 0)"
group_parts = "1 if in_channels_per_group % channel_parts > 0 else max(1, min(groups, room // positions, STAGE_BYTES // (channel_elements * size * channel_parts)))"
parts = "group_parts * channel_parts"
threads = "ceil_div(parts * positions, 32) * 32"
sets = "ceil_div(groups, group_parts)"
regions_h = "ceil_div(q_h, region_h * run_h)"
regions_w = "ceil_div(columns, region_w)"
regions = "ceil_div(q_d, region_d) * regions_h * regions_w"
blocks = "batch * out_tiles * sets * regions"
block_sets = "1 if channel_parts > 1 else max(1, min(BLOCK_SETS, blocks // (4 * multiprocessors)))"
set_blocks = "ceil_div(sets, block_sets)"
steps = "ceil_div(in_channels_per_group, channel_parts)"
stage_elements = "parts * channel_elements"
sum_elements = "residues_of_all * run_h * run_w * out_tile * group_parts * positions if channel_parts > 1 else 0"
ring_bytes = "size * ceil_div(max(STAGES * stage_elements, sum_elements), 4) * 4"
row_copies = "parts * planes * rows"
copies = "row_copies + taps * out_tile"
shared_bytes = "ring_bytes + 16 * copies + (32 + run_w * stride_w * size) * threads"
[restrictions]
"residues_of_all * out_tile <= sums" = "a thread owns all residues of its outputs: the product of the strides must be at most SUMS, in fp64 half of it"
"out_channels_per_group <= 16" = "it is for at most 16 output channels a group: an input is staged again for every few of them"
"kernel_w * out_tile <= 64 and run_w + halo_w <= 32" = "a row of taps and the inputs it reaches are in registers: at most 64 weights and 32 inputs"
"shared_bytes <= 98 * 1024" = "what the taps of one position reach over must fit the 99 KiB of shared memory that every GPU has"
"in_channels_per_group == 1 or steps * taps_d * taps_h * taps_w <= 1000" = "a thread adds at most 1000 products of an output one after the other, since rounding errors add up"
"q_d * q_h * q_w <= 2000000000" = "it counts positions in 32 bits"
[search]
SUMS = [32, 64]
CHANNELS = [2, 8]
PARTS = [1, 2, 4, 8]
THREADS = [128, 256]
STAGES = [1, 2]
STAGE_BYTES = [16384, 32768]
[cost]
blocks = "batch * out_tiles * set_blocks * regions"
steps = "block_sets * steps"
products = "parts * positions * run_h * run_w * taps * out_tile"
bytes = "stage_elements * itemsize"
[[launch]]
grid = "batch * out_tiles * set_blocks * regions"
block = "threads"
shared_bytes = "shared_bytes"
*/
// Direct convolution for groups of few output channels: depthwise layers, heads of one to four channels, small groups. A matrix product's
// tile would be empty for the most part; here a thread has the sums of neighbouring outputs, and inputs pass through shared memory.
//
// Along each axis o + padding % stride = q*stride + r, and tap t feeds o through input q + padding / stride - (t*dilation - r - lead)/stride
// (`Taps`). A block has an image, `out_tile` output channels of some groups and a region of positions: of q of d, runs of q of h, and runs of
// q of w. A thread has one position with all its residues r:
//
//   sums[r_d][q_h, r_h][co][q_w, r_w] = sum over its ci, kd, kh, kw of input[ci, ...] * weight[ci, co, kd, kh, kw]
//
// A step is one input channel for each part of the threads: parts have groups of their own (a depthwise layer's channels), or share a group's
// channels. While a step is multiplied, the next ones are copied: the window of the region, halo and zeros included, so that no thread asks
// what lies outside, and the channel's weights. Rows that begin anywhere in memory begin on a vector there. A thread reads a row of its window
// by vectors, weights by broadcast, and multiplies the row by all taps that lead from it to its outputs.
//
// Where parts share a group, their sums pass through shared memory at the end and are added in order.
#include "convt3d.cuh"
#include "convt3d/core/advanced.cuh"
#include "convt3d/ptx/copy_async.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/digits.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/epilogue/store_vector.cuh"
#include "convt3d/core/taps.cuh"
#include "convt3d/core/vector.cuh"

#ifndef THREADS
#define THREADS 128
#endif
#ifndef SUMS
#define SUMS 32
#endif
// Output channels of a thread, at most.
#ifndef CHANNELS
#define CHANNELS 8
#endif
// Parts of a block's threads that share a group's input channels.
#ifndef PARTS
#define PARTS 2
#endif
#ifndef STAGES
#define STAGES 2
#endif
#ifndef STAGE_BYTES
#define STAGE_BYTES 32768
#endif
// Sets of groups that a block has one after the other, where that leaves enough blocks.
#ifndef BLOCK_SETS
#define BLOCK_SETS 4
#endif
#ifndef RESIDENT_WARPS
#define RESIDENT_WARPS 16
#endif

static_assert(SUMS == 32 || SUMS == 64, "a thread has registers for no more");
static_assert(STAGES >= 1 && STAGES <= 4, "where there are several, one is multiplied while others are copied");
constexpr int FOUR = 16 / sizeof(accum_t);                        // neighbours that move together: two in fp64
constexpr int MOST_SUMS = SUMS * 4 / sizeof(accum_t);             // of a thread
constexpr int MOST_INPUTS = 64, MOST_ROW = 64, MOST_LENGTH = 64;  // of a row of inputs, of taps, of outputs
// Rows of many weights need registers too.
constexpr int WARPS = SUMS > 32 && (OUT_CHANNELS > 2 || KERNEL_W > 4) ? RESIDENT_WARPS * 3 / 4 : RESIDENT_WARPS;
// Planes of a window in one piece of code; without a stride all planes are alike but for their tap.
constexpr int UNROLLED_PLANES = STRIDE_D == 1 ? 1 : 16;

// A thread's window and the weights of its channel.
struct Window {
  Taps d, h, w;
  int out_channels;
  int pitch, skew, plane;  // of the stage: row r of a plane begins at r * pitch + r / h.run * skew
  int shift;               // columns of the stage before the first run's window

  __device__ int length() const { return w.run * w.stride; }  // outputs of a row
  __device__ int row_weights() const { return (w.kernel * out_channels + 3) / 4 * 4; }
  // A window's row is read from a vector on, which begins `lead` columns before it.
  __device__ int lead() const { return shift % w.run; }
  __device__ int vectors() const { return (lead() + w.inputs() + w.run - 1) / w.run; }
  // Where the sums of an output row begin.
  __device__ int at(int r_d, int row, int co) const { return ((r_d * h.run * h.stride + row) * out_channels + co) * length(); }
};

template <int LENGTH>
__device__ __forceinline__ void load_vector(accum_t* x, const accum_t* from) {
  const Vector<LENGTH, accum_t> loaded = *reinterpret_cast<const Vector<LENGTH, accum_t>*>(from);
#pragma unroll
  for (int e = 0; e < LENGTH; ++e) x[e] = loaded.element[e];
}

// All products of one channel: `window` is the first input that the thread's taps reach, weights are [kd][kh][kw][co].
__device__ __forceinline__ void multiply(accum_t (&sums)[MOST_SUMS], const Window& shape, const accum_t* window,
                                         const accum_t* weights) {
  const Taps &td = shape.d, &th = shape.h, &tw = shape.w;
  // Or where each row begins is worked out before all steps, and kept.
  const int next_plane = computed_anew(shape.plane), pitch = computed_anew(shape.pitch), skew = computed_anew(shape.skew);
#pragma unroll(UNROLLED_PLANES)
  for (int plane = 0; plane < td.inputs(); ++plane, window += next_plane) {
    const accum_t* line = window;
#pragma unroll
    for (int row = 0; row < th.inputs(); ++row, line += pitch + (row % th.run == 0 ? skew : 0)) {
      accum_t x[MOST_INPUTS];
#pragma unroll
      for (int v = 0; v < shape.vectors(); ++v) {
        if (tw.run == 4) load_vector<FOUR>(x + 4 * v, line + 4 * v);  // not in fp64, where runs are of 2
        if (tw.run == 2) load_vector<2>(x + 2 * v, line + 2 * v);
        if (tw.run == 1) x[v] = line[v];
      }
#pragma unroll
      for (int r_d = 0; r_d < td.stride; ++r_d) {
        const int kd = td.tap(td.reach() - plane, r_d);
        if (kd < 0) continue;
#pragma unroll
        for (int kh = 0; kh < th.kernel; ++kh) {
          // Tap kh leads from this row to residue r_h of q.
          const int scaled = kh * th.dilation - th.lead() + th.stride, r_h = scaled % th.stride;
          const int q = row - (th.reach() + 1 - scaled / th.stride);
          if (q < 0 || q >= th.run) continue;
          const accum_t* const taps = weights + (kd * th.kernel + kh) * shape.row_weights();
          accum_t weight[MOST_ROW];
#pragma unroll
          for (int i = 0; i < shape.row_weights(); i += FOUR) load_vector<FOUR>(weight + i, taps + i);
          accum_t* const own = sums + shape.at(r_d, q * th.stride + r_h, 0);
#pragma unroll
          for (int kw = 0; kw < tw.kernel; ++kw) {
            const int of_tap = kw * tw.dilation - tw.lead() + tw.stride, r_w = of_tap % tw.stride;
            const int column = tw.reach() + 1 - of_tap / tw.stride;
#pragma unroll
            for (int co = 0; co < shape.out_channels; ++co) {
#pragma unroll
              for (int q_w = 0; q_w < tw.run; ++q_w)
                own[co * shape.length() + q_w * tw.stride + r_w] +=
                    x[shape.lead() + column + q_w] * weight[kw * shape.out_channels + co];
            }
          }
        }
      }
    }
  }
}

// A row of a thread's outputs, which begins on a vector; `inside` of them lie in the row.
__device__ __forceinline__ void store_row(const Epilogue& epilogue, const accum_t* sums, int length, scalar_t* y, int inside) {
#pragma unroll
  for (int first = 0; first + FOUR <= length; first += FOUR) {
    scalar_t stored[FOUR];
#pragma unroll
    for (int e = 0; e < FOUR; ++e) stored[e] = epilogue.finish(sums[first + e]);
    if (first + FOUR <= inside) {
      store_vector(y + first, stored);
    } else {
#pragma unroll
      for (int e = 0; e < FOUR; ++e) {
        if (first + e < inside) y[first + e] = stored[e];
      }
    }
  }
}

template <int LENGTH>
__device__ __forceinline__ void keep_vector(accum_t* to, const accum_t* sums) {
  Vector<LENGTH, accum_t> kept;
#pragma unroll
  for (int e = 0; e < LENGTH; ++e) kept.element[e] = sums[e];
  *reinterpret_cast<Vector<LENGTH, accum_t>*>(to) = kept;
}

// A row of a thread's outputs, to shared memory.
__device__ __forceinline__ void keep_row(accum_t* to, const accum_t* sums, int length) {
#pragma unroll
  for (int e = 0; e < length; e += length % FOUR == 0 ? FOUR : length % 2 == 0 ? 2 : 1) {
    if (length % FOUR == 0) {
      keep_vector<FOUR>(to + e, sums + e);
    } else if (length % 2 == 0) {
      keep_vector<2>(to + e, sums + e);
    } else {
      to[e] = sums[e];
    }
  }
}

// Where an output of another thread goes, and how many planes and rows of it lie inside.
struct Target {
  scalar_t* first;
  int inside;
};

// What a thread has: where its outputs begin, how many planes, rows and columns of them lie inside, and which of a step's groups and of a
// group's input channels are its own. In shared memory: registers are for sums.
struct alignas(16) Place {
  index_t output;
  short columns, rows, group;
  unsigned char planes, channel;
};
constexpr int NO_CHANNEL = 255;  // of a thread that has no part

// Where a row of inputs, or a weight, comes from in its channel, and where it goes in a stage.
struct alignas(16) Copy {
  index_t from;
  int to;
};

// What a thread copies: units of so many neighbours of a row, every so many columns of these and every so many rows from its own on; and
// every so many weights of every so many parts. In shared memory too.
struct alignas(16) Share {
  short length, column, row, columns, rows;
  short weight, part, parts;
};

// Neighbours from memory to a stage. Those of 16 bits become accum_t on the way, so nothing copies them by itself.
template <int LENGTH>
__device__ __forceinline__ void copy_to(accum_t* to, const scalar_t* from) {
  if constexpr (sizeof(scalar_t) == sizeof(accum_t)) {
    copy_async(reinterpret_cast<Vector<LENGTH>*>(to), reinterpret_cast<const Vector<LENGTH>*>(from), true);
  } else {
    const Vector<LENGTH> read = *reinterpret_cast<const Vector<LENGTH>*>(from);
    Vector<LENGTH, accum_t> kept;
#pragma unroll
    for (int e = 0; e < LENGTH; ++e) kept.element[e] = to_accum(read.element[e]);
    *reinterpret_cast<Vector<LENGTH, accum_t>*>(to) = kept;
  }
}

template <int LENGTH>
__device__ __forceinline__ void copy_rows(accum_t* to, const Share& own, const scalar_t* channel, const Copy* copies, int rows,
                                          int pitch, int first, int width, index_t step) {
  if (own.row >= own.rows) return;
#pragma unroll 1
  for (int column = own.column; column < pitch; column += own.columns) {
    if (first + column < 0 || first + column >= width) continue;
    const scalar_t* const from = channel + (first + column) * step;
#pragma unroll 4
    for (int row = own.row; row < rows; row += own.rows) {
      const Copy copy = copies[row];
      copy_to<LENGTH>(to + copy.to + column, from + copy.from);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 32 * WARPS / THREADS)
    convt3d_fprop_direct(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                         const scalar_t* __restrict__ bias, const View<scalar_t> output, const int in_channels_per_group,
                         const int out_channels_per_group, const int out_tile, const int out_tiles, const int run_h,
                         const int run_w, const int region_d, const int region_h, const int region_w, const int regions_h,
                         const int regions_w, const int regions, const int channel_parts, const int group_parts,
                         const int positions, const int planes, const int rows, const int pitch, const int skew,
                         const int plane, const int shift_w, const int channel_elements, const int sets, const int block_sets,
                         const int set_blocks, const int steps, const int ring_bytes, const int row_copies, const int copies) {
  const Epilogue epilogue{bias};
  extern __shared__ __align__(16) unsigned char shared[];
  accum_t* const ring = reinterpret_cast<accum_t*>(shared);
  Copy* const row_copy = reinterpret_cast<Copy*>(shared + ring_bytes);  // of all parts' windows, from the first part's channel
  Copy* const weight_copy = row_copy + row_copies;                      // of a channel
  Place* const places = reinterpret_cast<Place*>(row_copy + copies);    // of threads
  Share* const shares = reinterpret_cast<Share*>(places + blockDim.x);
  accum_t* const exchange = reinterpret_cast<accum_t*>(shares + blockDim.x);  // of outputs
  const Window shape = {
      {SPECIALIZED(KERNEL_D, problem.kernel_size[0]), SPECIALIZED(STRIDE_D, problem.stride[0]),
       SPECIALIZED(DILATION_D, problem.dilation[0]), SPECIALIZED(PADDING_D, problem.padding[0]), 1},
      {SPECIALIZED(KERNEL_H, problem.kernel_size[1]), SPECIALIZED(STRIDE_H, problem.stride[1]),
       SPECIALIZED(DILATION_H, problem.dilation[1]), SPECIALIZED(PADDING_H, problem.padding[1]), SPECIALIZED(LENGTH_H, run_h)},
      {SPECIALIZED(KERNEL_W, problem.kernel_size[2]), SPECIALIZED(STRIDE_W, problem.stride[2]),
       SPECIALIZED(DILATION_W, problem.dilation[2]), SPECIALIZED(PADDING_W, problem.padding[2]), SPECIALIZED(LENGTH_W, run_w)},
      SPECIALIZED(OUT_CHANNELS, out_tile),
      pitch,
      skew,
      plane,
      SPECIALIZED(SHIFT_W, shift_w)};
  const Taps &td = shape.d, &th = shape.h, &tw = shape.w;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);

  // blockIdx.x = ((n * out_tiles + tile of output channels) * set_blocks + sets) * regions + region
  Digits index{blockIdx.x};
  const int region = index.next(regions), first_set = index.next(set_blocks) * block_sets;
  const int first_out = index.next(out_tiles) * shape.out_channels, n = index.last();
  const int of_plane = regions_h * regions_w;
  const int first_d = region / of_plane * region_d, first_h = region % of_plane / regions_w * region_h * th.run;
  const int first_w = region % regions_w * region_w * tw.run;

  // What a step copies, the same for each channel. Cells of the ring that lie outside the input stay zero.
  const int from_d = td.first() - td.reach() + first_d, from_h = th.first() - th.reach() + first_h;
  const int from_w = tw.first() - tw.reach() + first_w - shape.shift;
  const int begin_d = max(0, -from_d), live_d = max(0, min(planes, problem.input_size[0] - from_d) - begin_d);
  const int begin_h = max(0, -from_h), live_h = max(0, min(rows, problem.input_size[1] - from_h) - begin_h);
  const int parts = group_parts * channel_parts, live_rows = live_d * live_h;
  for (int i = thread; i < parts * live_rows; i += threads) {
    const int p = i / live_rows, d = begin_d + i % live_rows / live_h, h = begin_h + i % live_rows % live_h;
    const int channel = p / channel_parts * in_channels_per_group + p % channel_parts;
    row_copy[i] = {channel * input.stride[1] + (from_d + d) * input.stride[2] + (from_h + h) * input.stride[3],
                   p * channel_elements + d * plane + h * pitch + h / th.run * skew};
  }
  const int window_elements = planes * plane, taps_hw = th.kernel * tw.kernel, taps = td.kernel * taps_hw;
  const int own_out = min(shape.out_channels, out_channels_per_group - first_out), all_weights = taps * own_out;
  for (int i = thread; i < all_weights; i += threads) {
    const int tap = i % taps, co = i / taps, kd = tap / taps_hw, kh = tap / tw.kernel % th.kernel, kw = tap % tw.kernel;
    weight_copy[i] = {weight.at(0, first_out + co, kd, kh, kw) - weight.data,
                      window_elements + (kd * th.kernel + kh) * shape.row_weights() + kw * shape.out_channels + co};
  }
  for (int i = thread; i < STAGES * parts * channel_elements; i += threads) ring[i] = accum_t(0);

  int window, weights;  // in a stage
  {
    const int part = thread / positions, position = thread % positions, d = position / (region_w * region_h);
    const int run = position / region_w % region_h, h = run * th.run, w = position % region_w * tw.run;
    weights = part * channel_elements + window_elements;
    window = part * channel_elements + d * plane + h * pitch + run * skew + w + shape.shift - shape.lead();
    const int o_d = (first_d + d) * td.stride, o_h = (first_h + h) * th.stride, o_w = (first_w + w) * tw.stride;
    places[thread] = {output.at(n, 0, o_d, o_h, o_w) - output.data,
                      static_cast<short>(max(0, min(shape.length(), problem.output_size[2] - o_w))),
                      static_cast<short>(max(0, min(th.run * th.stride, problem.output_size[1] - o_h))),
                      static_cast<short>(part / channel_parts),
                      static_cast<unsigned char>(max(0, min(td.stride, problem.output_size[0] - o_d))),
                      static_cast<unsigned char>(part < parts ? part % channel_parts : NO_CHANNEL)};
  }
  const auto fits = [&](int length) {
    return length * sizeof(scalar_t) <= 16 && from_w % length == 0 && problem.input_size[2] % length == 0 &&
           made_of_vectors(input, length);
  };
  {
    const int length = fits(4) ? 4 : fits(2) ? 2 : 1, columns = min(pitch / length, threads);
    const int weight_threads = min(threads, all_weights);
    shares[thread] = {static_cast<short>(length),
                      static_cast<short>(thread % columns * length),
                      static_cast<short>(thread / columns),
                      static_cast<short>(columns * length),
                      static_cast<short>(threads / columns),
                      static_cast<short>(thread % weight_threads),
                      static_cast<short>(thread / weight_threads),
                      static_cast<short>(threads / weight_threads)};
  }
  __syncthreads();

  const bool stored_vectors = shape.length() % FOUR == 0 && made_of_vectors(output, FOUR);
  const auto copy = [&](int set, int step, int slot) {
    const Share share = shares[computed_anew(thread)];
    accum_t* const to = ring + slot * parts * channel_elements;
    const int channel = set * group_parts * in_channels_per_group + step * channel_parts, width = problem.input_size[2];
    const int live_parts = group_parts == 1 ? min(parts, in_channels_per_group - step * channel_parts)
                                            : min(group_parts, problem.groups - set * group_parts) * channel_parts;
    const scalar_t* const from = input.at(n, channel, 0, 0, 0);
    const int all = live_parts * live_rows;
    if (share.length == 4) copy_rows<FOUR>(to, share, from, row_copy, all, pitch, from_w, width, 1);
    if (share.length == 2) copy_rows<2>(to, share, from, row_copy, all, pitch, from_w, width, 1);
    if (share.length == 1) copy_rows<1>(to, share, from, row_copy, all, pitch, from_w, width, input.stride[4]);
    if (share.part >= share.parts) return;
#pragma unroll 1
    for (int p = share.part; p < live_parts; p += share.parts) {
      const scalar_t* const weights =
          weight.at(channel + p / channel_parts * in_channels_per_group + p % channel_parts, 0, 0, 0, 0);
#pragma unroll 1
      for (int i = share.weight; i < all_weights; i += threads) {
        const Copy one = weight_copy[i];
        copy_to<1>(to + p * channel_elements + one.to, weights + one.from);
      }
    }
  };

  const int last_set = min(first_set + block_sets, sets), all_steps = (last_set - first_set) * steps;
  int copied_set = first_set, copied_step = 0;  // what is copied next
  int set = first_set, step = 0;
  accum_t sums[MOST_SUMS];
#pragma unroll 1
  for (int i = 1 - STAGES; i < all_steps; ++i) {
    if (STAGES > 1 && i >= 0) cp_async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
    if (i >= 0) __syncthreads();  // the step before has been multiplied, and this one's copies have landed
    if (copied_set < last_set) {
      copy(copied_set, copied_step, (i + STAGES - 1) % STAGES);
      if (++copied_step == steps) copied_step = 0, ++copied_set;
    }
    cp_async_commit();
    if (i < 0) continue;
    if (STAGES == 1) {
      cp_async_wait<0>();
      __syncthreads();
    }

    const Place own = places[thread];
    const int group = set * group_parts + own.group, first_channel = group * out_channels_per_group + first_out;
    const bool live = own.channel != NO_CHANNEL && group < problem.groups;
    if (step == 0) {
#pragma unroll
      for (int co = 0; co < shape.out_channels; ++co) {
        const accum_t start =
            epilogue.start(first_channel + co, live && own.channel == 0 && first_out + co < out_channels_per_group);
#pragma unroll
        for (int r_d = 0; r_d < td.stride; ++r_d) {
#pragma unroll
          for (int row = 0; row < th.run * th.stride; ++row) {
#pragma unroll
            for (int e = 0; e < shape.length(); ++e) sums[shape.at(r_d, row, co) + e] = start;
          }
        }
      }
    }
    if (live && step * channel_parts + own.channel < in_channels_per_group) {
      const accum_t* const stage = ring + i % STAGES * parts * channel_elements;
      multiply(sums, shape, stage + window, stage + weights);
    }
    if (++step < steps) continue;
    step = 0, ++set;

    if (channel_parts > 1) {  // a block has one set then, and the ring is free
      const int all = th.run * th.stride * td.stride * shape.length() * shape.out_channels;
      const int pitch_of_sums = group_parts * positions;
      accum_t* const shared_sums = ring + own.group * positions + thread % positions;
#pragma unroll 1
      for (int from = 1; from < channel_parts; ++from) {
        __syncthreads();
        if (live && own.channel == from) {
#pragma unroll
          for (int s = 0; s < all; ++s) shared_sums[s * pitch_of_sums] = sums[s];
        }
        __syncthreads();
        if (live && own.channel == 0) {
#pragma unroll
          for (int s = 0; s < all; ++s) sums[s] += shared_sums[s * pitch_of_sums];
        }
      }
    }
    const bool stores = live && own.channel == 0;
    if (stored_vectors) {
      const Place place = places[computed_anew(thread)];
      scalar_t* first = output.data + place.output + first_channel * output.stride[1];
#pragma unroll
      for (int co = 0; co < shape.out_channels; ++co, first = advanced(first, output.stride[1] * sizeof(scalar_t))) {
        scalar_t* plane_of = first;
#pragma unroll
        for (int r_d = 0; r_d < td.stride; ++r_d, plane_of = advanced(plane_of, output.stride[2] * sizeof(scalar_t))) {
          scalar_t* y = plane_of;
#pragma unroll
          for (int row = 0; row < th.run * th.stride; ++row, y = advanced(y, output.stride[3] * sizeof(scalar_t))) {
            if (!stores || co >= own_out || r_d >= place.planes || row >= place.rows) continue;
            store_row(epilogue, sums + shape.at(r_d, row, co), shape.length(), y, place.columns);
          }
        }
      }
      continue;
    }
    // Rows that begin anywhere: a warp's outputs of a row change lanes, so that neighbours store neighbours.
    const int lane = thread % 32;
    accum_t* const of_warp = exchange + (thread - lane) * shape.length();
    Target targets[MOST_LENGTH];
#pragma unroll
    for (int j = 0; j < shape.length(); ++j) {
      const int of_lane = (j * 32 + lane) / shape.length(), e = (j * 32 + lane) % shape.length();
      const Place place = places[thread - lane + of_lane];
      const int channel = ((set - 1) * group_parts + place.group) * out_channels_per_group + first_out;
      const bool there = place.channel == 0 && e < place.columns && (set - 1) * group_parts + place.group < problem.groups;
      targets[j] = {output.data + place.output + channel * output.stride[1] + e * output.stride[4],
                    there ? place.planes << 16 | place.rows : 0};
    }
    const int rows_of_run = th.run * th.stride;
    const index_t next_row = output.stride[3] * sizeof(scalar_t);
    const auto step_by = [&](index_t bytes) {
#pragma unroll
      for (int j = 0; j < shape.length(); ++j) targets[j].first = advanced(targets[j].first, bytes);
    };
#pragma unroll
    for (int co = 0; co < shape.out_channels; ++co) {
#pragma unroll
      for (int r_d = 0; r_d < td.stride; ++r_d) {
#pragma unroll
        for (int row = 0; row < rows_of_run; ++row) {
          __syncwarp();  // the row before has been read
          keep_row(of_warp + lane * shape.length(), sums + shape.at(r_d, row, co), shape.length());
          __syncwarp();
#pragma unroll
          for (int j = 0; j < shape.length(); ++j) {
            const bool there = co < own_out && r_d < targets[j].inside >> 16 && row < (targets[j].inside & 0xffff);
            if (there) *targets[j].first = epilogue.finish(of_warp[j * 32 + lane]);
          }
          if (row + 1 < rows_of_run) step_by(next_row);
        }
        if (r_d + 1 < td.stride) step_by(output.stride[2] * sizeof(scalar_t) - (rows_of_run - 1) * next_row);
      }
      if (co + 1 < shape.out_channels)
        step_by((output.stride[1] - (td.stride - 1) * output.stride[2]) * sizeof(scalar_t) - (rows_of_run - 1) * next_row);
    }
  }
}
