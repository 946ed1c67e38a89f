/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32"]
multiplies_padding = true
[specialize]
CHANNELS = "thread_channels"
PAIRS = "pairs"
LIVE_RESIDUES = "live_residues"
LEAD_W = "lead_w"
EVEN_TAPS_H = "even_taps_h"
EVEN_TAPS_W = "even_taps_w"
FILLED = "filled"
SPLIT = "is_split"
OUTPUT_LAYOUT = "0 if is_split else output_layout"
# Whether channels that lie together are stored in whole pieces: 1 no, 2 yes; 0: of any strides, or the sums of parts.
PIECES = "0 if output_layout != 2 or is_split else 2 if out_channels_per_group % (16 // itemsize) == 0 else 1"
[constants]
pairs = "1 if stride_w == 2 and itemsize == 4 and (dilation_w == 2 or dilation_w == 1 and kernel_w <= 8) else 0"
live_residues = "2 if pairs and dilation_w == 1 and kernel_w > 1 else 1"
lead_w = "padding_w % stride_w"
step_d = "stride_d // gcd(stride_d, dilation_d)"
step_h = "stride_h // gcd(stride_h, dilation_h)"
step_w = "1 if live_residues == 2 else stride_w // gcd(stride_w, dilation_w)"
spread_d = "dilation_d // gcd(stride_d, dilation_d)"
spread_h = "dilation_h // gcd(stride_h, dilation_h)"
spread_w = "dilation_w // gcd(stride_w, dilation_w)"
classes = "min(kernel_d, step_d) * spread_d * min(kernel_h, step_h) * spread_h * min(kernel_w, step_w) * spread_w"
dead_rows = "kernel_d < stride_d or kernel_h < stride_h or step_d * step_h < stride_d * stride_h"
dead_columns = "not pairs and (kernel_w < stride_w or step_w < stride_w)"
filled = "1 if dead_rows or dead_columns else 0"
taps_d = "ceil_div(kernel_d, step_d)"
taps_h = "ceil_div(kernel_h, step_h)"
taps_w = "ceil_div(kernel_w, step_w)"
even_taps_h = "taps_h if kernel_h % step_h == 0 else 0"
even_taps_w = "taps_w if kernel_w % step_w == 0 and taps_w <= 8 else 0"
window = "(kernel_w - 1 - lead_w) // 2 + lead_w + 1 if live_residues == 2 else taps_w"
outputs_step_w = "2 if pairs else stride_w * spread_w"
outputs_d = "ceil_div(output_d, stride_d * spread_d)"
outputs_h = "ceil_div(output_h, stride_h * spread_h)"
outputs_w = "ceil_div(output_w, outputs_step_w)"
thread_channels = "4 if out_channels_per_group <= 4 else 8"
thread_tiles = "ceil_div(out_channels_per_group, thread_channels)"
channel_warps = "3 if thread_tiles % 3 == 0 and gcd(thread_tiles, CHANNEL_WARPS) == 1 else gcd(thread_tiles, CHANNEL_WARPS)"
channel_tiles = "thread_tiles // channel_warps"
position_warps = "min(POSITION_WARPS, BLOCK_WARPS // channel_warps)"
threads = "32 * channel_warps * position_warps"
thread_quads = "max(1, (THREAD_QUADS if itemsize == 4 else 1) // (live_residues if thread_channels == 8 else 1))"
tile_quads = "32 * position_warps * thread_quads"
quads_w = "ceil_div(outputs_w + 16 // itemsize - 1, 4)"
tiles = "ceil_div(outputs_d * outputs_h * quads_w, tile_quads)"
least_h = "max(1, output_h // (stride_h * spread_h))"
least_quads = "max(1, ceil_div(output_w // outputs_step_w, 4))"
tile_rows = "min(ceil_div(tile_quads - 1, least_quads) + 1, outputs_d * outputs_h)"
tile_span = "tile_rows + min(ceil_div(tile_rows - 1, least_h), outputs_d - 1) * (taps_h - 1) + taps_h - 1"
rows = "(taps_d - 1) * min(outputs_h + taps_h - 1, tile_span) + tile_span"
pitch = "ceil_div(4 * quads_w + window - 1, 4) * 4"
channel_elements = "rows * pitch + taps_d * taps_h * taps_w * thread_channels * channel_warps"
stage_elements = "max(channel_elements, min(in_channels_per_group * channel_elements, STAGE_BYTES * threads // 256 // itemsize // 4 * 4))"
row_slots = "ceil_div(rows, 2) * 2"
store_outputs = "8 // thread_channels"
# Where blocks are few they share the input channels: so many parts that there are about four blocks for each multiprocessor.
blocks = "classes * batch * groups * tiles * channel_tiles"
wanted_parts = "1 if filled else DEPTH_PARTS if DEPTH_PARTS != 0 else min(16, 4 * multiprocessors // max(1, blocks), in_channels_per_group // 16)"
part_channels = "8 * ceil_div(in_channels_per_group, 8 * max(1, wanted_parts))"
parts = "ceil_div(in_channels_per_group, part_channels)"
is_split = "1 if parts > 1 else 0"
block_bytes = "8 * row_slots + max(2 * stage_elements * itemsize, threads * (8 * store_outputs + 8 * itemsize + 16))"
[restrictions]
"max(stride_d * spread_d, stride_h * spread_h, stride_w * spread_w) < 2 * 1024 * 1024 * 1024" = "the least common multiple of stride and dilation must be below 2^31 on each axis"
"block_bytes <= 98 * 1024" = "one channel's input rows and weights, twice, must fit the 99 KiB of shared memory that every GPU has"
[search]
BLOCK_WARPS = [4, 6, 8]
POSITION_WARPS = [4, 8]
UNROLLED_TAPS = [3, 10]
DEPTH_PARTS = [0, 1]
[cost]
steps = "part_channels * taps_d * taps_h * taps_w"
products = "tile_quads * 4 * thread_channels * channel_warps"
bytes = "channel_elements * itemsize // (taps_d * taps_h * taps_w)"
blocks = "blocks * parts"
[workspace]
packed_weight = "in_channels * taps * thread_tiles * thread_channels"
partial_sums = "parts * output_numel if is_split else 0"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt_pack"
general = true
grid = "ceil_div(in_channels * taps * thread_tiles * thread_channels, 256)"
block = 256
packs = "packed_weight"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt"
grid = "blocks * parts"
block = "threads"
shared_bytes = "block_bytes"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt_add"
general = true
when = "is_split"
grid = "ceil_div(output_numel, 256)"
block = 256
*/
// Implicit GEMM on the CUDA cores. The outputs with equal (o + padding) mod lcm(stride, dilation) are one dense correlation, with
// steps of one in both, of every (dilation/gcd)-th input with every (stride/gcd)-th tap (see DenseAxis):
//
//   output[first + a*lcm] = bias + sum over ci and k of input[origin + (a + k)*spread] * weight[the class's k-th tap from its end]
//
// A block owns a tile of quads (4 neighbouring a along w) of one such class, counted over d, h and w without regard to rows or
// planes, so that only the last tile has a tail (see RowTile), times channel_warps * CHANNELS output channels. For a chunk of input
// channels it stages every input row the tile needs, halo and zeros included, and the packed weights; all taps then read from
// shared memory. While one stage is multiplied, cp.async fills the other.
//
// Where the stride along w is 2, both residues of w are one class, so that inputs are staged once for both and a thread writes whole
// pieces of rows: tap t feeds output 2*q + r through input q + padding/2 - (t - r - padding%2)/2. So is a stride and dilation of 2,
// where only one of the two residues has taps; the other is stored as the bias. Other columns, rows and planes without taps are nobody's
// sums: each block fills about those beside its own.
//
// A thread owns THREAD_QUADS quads (half as many with two residues) x CHANNELS channels. For one row of taps it reads 8 inputs of each
// quad (two 16-byte loads) and, for each tap, the weights, which all lanes share (16-byte broadcasts): 10 loads for 192 multiply-adds
// at 3 taps. A thread has 128 registers, so that 16 warps are on a multiprocessor: its 64 sums leave room for what the loop needs.
//
// Where channels lie together in the output, the sums pass through shared memory, so that neighbouring lanes store neighbouring channels.
//
// Few tiles leave most multiprocessors idle. There each block multiplies a part of the input channels and stores its sums in memory that
// the parts have each for themselves, in the output's order; a third launch adds them up, part after part, and the bias.
#include "convt3d.cuh"
#include "convt3d/ptx/copy_async.cuh"
#include "convt3d/core/dense_axis.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/epilogue/fill_gaps.cuh"
#include "convt3d/epilogue/partial_sums.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/layout.cuh"
#include "convt3d/pipe/row_tile.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/epilogue/store_channels_last.cuh"
#include "convt3d/epilogue/store_piece.cuh"

#ifndef THREAD_QUADS
#define THREAD_QUADS 2
#endif
#ifndef BLOCK_WARPS
#define BLOCK_WARPS 8
#endif
#ifndef STAGE_BYTES
#define STAGE_BYTES 49152
#endif
#ifndef CHANNEL_WARPS
#define CHANNEL_WARPS 4
#endif
#ifndef POSITION_WARPS
#define POSITION_WARPS 4
#endif
#ifndef UNROLLED_TAPS
#define UNROLLED_TAPS 10
#endif
// Parts of the input channels; 0: by the problem.
#ifndef DEPTH_PARTS
#define DEPTH_PARTS 0
#endif

constexpr int QUADS = sizeof(accum_t) == 4 ? THREAD_QUADS : 1;  // fp64 sums take two registers each
constexpr int OWN_QUADS = CHANNELS == 8 && LIVE_RESIDUES == 2 && QUADS > 1 ? QUADS / 2 : QUADS;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int RESIDENT_BLOCKS = 1;  // shared memory of 100 KiB holds no more
#else
constexpr int RESIDENT_BLOCKS = sizeof(accum_t) == 4 ? 2 : 1;
#endif
constexpr int MOST_CHANNELS = 8;
// Rows of taps in one piece of code: more would not stay in the instruction cache.
constexpr int UNROLL_H = EVEN_TAPS_W > 0 && (EVEN_TAPS_H > 0 ? EVEN_TAPS_H : 2) * EVEN_TAPS_W <= UNROLLED_TAPS
                             ? (EVEN_TAPS_H > 0 ? EVEN_TAPS_H : 2)
                             : 1;
static_assert(BLOCK_WARPS >= CHANNEL_WARPS, "they share the positions");

// packed_weight[group][thread tile][class's taps before][ci][the class's taps from the last][channel of the thread tile], zero beyond
// the last channel: what a warp multiplies by in one stage is one contiguous piece of it.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_fprop_implicit_gemm_simt_pack(const Problem problem, const View<const scalar_t> weight,
                                          accum_t* __restrict__ packed_weight, const int thread_tiles,
                                          const int thread_channels, const int live_residues) {
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int* kernel = problem.kernel_size;
  const index_t taps = static_cast<index_t>(kernel[0]) * kernel[1] * kernel[2];
  index_t index = blockIdx.x * 256LL + threadIdx.x;
  if (index >= problem.in_channels * taps * thread_tiles * thread_channels) return;
  const int lane = static_cast<int>(index % thread_channels);
  index /= thread_channels;
  int tap[3];
  PackedTap place[3];
  for (int a = 2; a >= 0; --a) {
    tap[a] = static_cast<int>(index % kernel[a]);
    index /= kernel[a];
    place[a] = a == 2 && live_residues == 2 ? PackedTap{kernel[a], 0, kernel[a] - 1 - tap[a]} : packed_tap(problem, a, tap[a]);
  }
  const int ci = static_cast<int>(index % channels);
  const index_t tile = index / channels;  // group * thread_tiles + thread tile
  const int co = static_cast<int>(tile % thread_tiles) * thread_channels + lane, group = static_cast<int>(tile / thread_tiles);
  const index_t taps_before =
      (static_cast<index_t>(place[0].before) * kernel[1] + place[0].class_taps * place[1].before) * kernel[2] +
      place[0].class_taps * place[1].class_taps * place[2].before;
  const index_t row = (tile * taps + taps_before) * channels +
                      static_cast<index_t>(ci) * place[0].class_taps * place[1].class_taps * place[2].class_taps +
                      (place[0].position * place[1].class_taps + place[1].position) * place[2].class_taps + place[2].position;
  packed_weight[row * thread_channels + lane] =
      co < out_channels ? to_accum(*weight.at(group * channels + ci, co, tap[0], tap[1], tap[2])) : accum_t(0);
}

// The rows of taps a stage holds, and steps in elements through its inputs (from row to row, then on to the next kd, then on to the
// next channel) and its weights (from row to row, then on to the next channel).
struct StageShape {
  int taps_d, taps_h, pitch, next_kd, next_channel, weight_row, next_channel_weights;
};

// What is known of the row of taps that one pass multiplies, on the GPU when it is compiled: its taps, from the last; the residues
// of w they feed (1: of the class's own outputs); with two residues the rest of the padding. Tap k of the row feeds residue(k) of the
// i-th output of a quad through input shift(k) + i of its window.
struct TapRow {
  int taps, residues, lead;
  __device__ int tap_offset(int tap) const { return tap >= lead ? (tap - lead) / 2 : -1; }
  __device__ int residue(int k) const { return residues == 1 ? 0 : (taps - 1 - k + lead) % 2; }
  __device__ int shift(int k) const { return residues == 1 ? k : tap_offset(taps - 1) - tap_offset(taps - 1 - k); }
  __device__ int width() const { return (4 + shift(taps - 1) + 3) / 4 * 4; }
};
constexpr int MOST_SUMS = 8 * QUADS, MOST_WIDTH = 12;  // of a channel; MOST_WIDTH: 8 taps reach over 7 inputs

// sums[(quad * residues + residue) * 4 + i] += the products of each row of taps, for all channels of a stage.
__device__ __forceinline__ void multiply(accum_t (&sums)[MOST_SUMS][MOST_CHANNELS], const accum_t* inputs,
                                         const int (&quad)[QUADS], const accum_t* weights, int channels,
                                         const StageShape& shape, int thread_channels, int quads, int taps_h,
                                         const TapRow tap_row) {
  const accum_t* row[QUADS];
  for (int q = 0; q < quads; ++q) row[q] = inputs + quad[q];
#pragma unroll 1
  for (int ci = 0; ci < channels; ++ci) {
#pragma unroll 1
    for (int kd = 0; kd < shape.taps_d; ++kd) {
#pragma unroll(UNROLL_H)
      for (int kh = 0; kh < taps_h; ++kh) {
        accum_t x[QUADS][MOST_WIDTH];
#pragma unroll
        for (int q = 0; q < quads; ++q) {
#pragma unroll
          for (int i = 0; i < tap_row.width(); i += VECTOR) {
            const SharedVector loaded = *reinterpret_cast<const SharedVector*>(row[q] + i);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) x[q][i + e] = loaded.element[e];
          }
          row[q] += shape.pitch;
        }
#pragma unroll
        for (int k = 0; k < tap_row.taps; ++k) {
#pragma unroll
          for (int c = 0; c < thread_channels; c += VECTOR) {
            const SharedVector w = *reinterpret_cast<const SharedVector*>(weights + k * thread_channels + c);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
#pragma unroll
              for (int q = 0; q < quads; ++q) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  sums[(q * tap_row.residues + tap_row.residue(k)) * 4 + i][c + e] += x[q][tap_row.shift(k) + i] * w.element[e];
                }
              }
            }
          }
        }
        weights += shape.weight_row;
      }
      for (int q = 0; q < quads; ++q) row[q] += shape.next_kd;
    }
    for (int q = 0; q < quads; ++q) row[q] += shape.next_channel;
    weights += shape.next_channel_weights;
  }
}

// What a block works on. Kept in shared memory: registers are for the sums.
struct Tile : RowTile {
  int n, group, thread_tile, chunk;
  int together;  // channels that one access reads where they lie together in memory, 1 elsewhere
  StageShape shape;
  int channel_weights, weights_at;  // elements of a channel's weights in a thread tile, and where the first tile's are staged
  index_t volume, weights,
      tile_weights;  // the block's first input and packed weight, and from one thread tile's on to the next
};

// Outputs 2*q and 2*q + 1 at a stride of 2 along w: the q, and the window of inputs that a q reads.
__device__ inline DenseAxis pair_axis(const Problem& problem, int residues) {
  const int lead = problem.padding[2] % 2, kernel = problem.kernel_size[2];
  const int farthest = residues == 2 ? TapRow{kernel, 2, lead}.tap_offset(kernel - 1) : kernel - 1 - lead;
  const int window = residues == 2 ? farthest + lead + 1 : kernel;
  return {0, 2, (problem.output_size[2] + 1) / 2, window, 0, 1, problem.padding[2] / 2 - farthest};
}

__device__ inline void find_tile(Tile& tile, const Problem& problem, const View<const scalar_t>& input, int tile_quads,
                                 int thread_channels, bool pair, int residues, int channel_warps, int stage_elements, int tiles,
                                 int thread_tiles) {
  // blockIdx.x = (((class * batch + n) * groups + group) * tiles + tile) * channel tiles + channel tile
  const int channel_tiles = thread_tiles / channel_warps;
  unsigned block = blockIdx.x;
  tile.thread_tile = static_cast<int>(block % channel_tiles) * channel_warps;
  block /= channel_tiles;
  tile.first_quad = static_cast<int>(block % tiles) * tile_quads;
  block /= tiles;
  tile.group = static_cast<int>(block % problem.groups);
  block /= problem.groups;
  tile.n = static_cast<int>(block % problem.batch);
  block /= problem.batch;
  if (pair) tile.axis[2] = pair_axis(problem, residues);
  for (int a = pair ? 1 : 2; a >= 0; --a) {
    const int classes = dense_classes(problem, a);
    tile.axis[a] = dense_axis(problem, a, static_cast<int>(block % classes));
    block /= classes;
  }
  lay_out(tile, problem, input, tile_quads);
  if (tile.first_quad >= tile.end_quad) return;

  const DenseAxis &d = tile.axis[0], &h = tile.axis[1], &w = tile.axis[2];
  const int channels = problem.in_channels / problem.groups, *kernel = problem.kernel_size;
  const int row = (residues == 2 ? kernel[2] : w.taps) * thread_channels, segment = tile.segment * tile.pitch;
  tile.channel_weights = d.taps * h.taps * row;
  tile.tile_weights = static_cast<index_t>(kernel[0]) * kernel[1] * kernel[2] * channels * thread_channels;
  tile.chunk = min(channels, stage_elements / (tile.plane + tile.channel_weights * channel_warps));
  tile.together = tile.whole_vectors ? 1 : channels_together(input, channels);
  while (tile.together > tile.chunk) tile.together /= 2;
  tile.chunk = tile.chunk / tile.together * tile.together;
  tile.weights_at = tile.chunk * tile.plane;
  tile.shape = {tile.taps_d,
                h.taps,
                tile.pitch,
                segment - h.taps * tile.pitch,
                tile.plane - tile.taps_d * segment,
                row,
                tile.channel_weights - tile.taps_d * h.taps * row};
  tile.volume = tile.n * input.stride[0] + static_cast<index_t>(tile.group) * channels * input.stride[1];
  const index_t taps_before =
      (static_cast<index_t>(d.taps_before) * kernel[1] + d.taps * h.taps_before) * kernel[2] + d.taps * h.taps * w.taps_before;
  const index_t thread_tile = static_cast<index_t>(tile.group) * thread_tiles + tile.thread_tile;
  tile.weights = thread_tile * tile.tile_weights + taps_before * channels * thread_channels;
}

// Store the 8 neighbours first ... first + 7 of a row of `width` outputs; `y` is the first, and may lie outside.
__device__ __forceinline__ void store_eight(const scalar_t (&row)[8], scalar_t* y, index_t step, index_t first, int width) {
  if (step == 1 && first >= 0 && first + 8 <= width) {
    const unsigned misaligned = static_cast<unsigned>(reinterpret_cast<index_t>(y) / sizeof(scalar_t)) % 4;
    if (sizeof(scalar_t) == 4 && misaligned == 0) {
#pragma unroll
      for (int i = 0; i < 8; i += VECTOR) {
        Vector<VECTOR> out;
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) out.element[e] = row[i + e];
        *reinterpret_cast<Vector<VECTOR>*>(y + i) = out;
      }
    } else if (misaligned % 2 == 0) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) store_pair(y + i, row[i], row[i + 1]);
    } else {
      y[0] = row[0];
#pragma unroll
      for (int i = 1; i < 7; i += 2) store_pair(y + i, row[i], row[i + 1]);
      y[7] = row[7];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (first + i >= 0 && first + i < width) y[i * step] = row[i];
  }
}

extern "C" __global__ void __launch_bounds__(256)
    convt3d_fprop_implicit_gemm_simt_add(const Problem problem, const accum_t* __restrict__ partial_sums,
                                         const scalar_t* __restrict__ bias, const View<scalar_t> output, const int parts) {
  add_partial_sums(problem, partial_sums, {bias}, output, parts);
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, RESIDENT_BLOCKS)
    convt3d_fprop_implicit_gemm_simt(const Problem problem, const View<const scalar_t> input,
                                     const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                     View<scalar_t> output, const int thread_channels, const int thread_quads, const int pairs,
                                     const int live_residues, const int even_taps_h, const int even_taps_w,
                                     const int channel_warps, const int stage_elements, const int row_slots, const int tiles,
                                     const int thread_tiles, const int filled, accum_t* __restrict__ partial_sums,
                                     const int is_split, const int parts, const int part_channels) {
  lay_out(problem, output, OUTPUT_LAYOUT ? SPECIALIZED(OUTPUT_LAYOUT, layout_of(problem, output)) : 0);
  // A part's sums are finished by another launch.
  const bool split = SPECIALIZED(SPLIT, is_split) != 0;
  const Epilogue epilogue{split ? nullptr : bias};
  const int part = split ? static_cast<int>(blockIdx.x / (gridDim.x / parts)) : 0;
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Tile tile;
  __shared__ View<scalar_t> of_part;  // registers are for sums
  const View<scalar_t>& target = split ? of_part : output;
  index_t* row_offset = reinterpret_cast<index_t*>(shared);
  accum_t* stages = reinterpret_cast<accum_t*>(shared + 8 * row_slots);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int position_threads = threads / channel_warps;
  const int own_channels = SPECIALIZED(CHANNELS, thread_channels), residues = SPECIALIZED(LIVE_RESIDUES, live_residues);
  const int quads = SPECIALIZED(OWN_QUADS, thread_quads), lead = SPECIALIZED(LEAD_W, problem.padding[2] % problem.stride[2]);
  const bool pair = SPECIALIZED(PAIRS, pairs) != 0;
  if (thread == 0) {
    find_tile(tile, problem, input, position_threads * quads, own_channels, pair, residues, channel_warps, stage_elements,
              tiles, thread_tiles);
    if (split) of_part = part_of(output, problem, partial_sums, part);
  }
  __syncthreads();
  // Of all rows a block has about those of its tile, so that L2 makes whole sectors of both.
  const auto fill_share = [&] {
    const int channel = tile.thread_tile * own_channels, group_channels = problem.out_channels / problem.groups;
    const unsigned class_blocks =
        static_cast<unsigned>(problem.batch * problem.groups * tiles * (thread_tiles / channel_warps));
    const index_t classes = gridDim.x / class_blocks, shares = classes * tiles;
    const index_t share = tile.first_quad / (position_threads * quads) * classes + blockIdx.x / class_blocks;
    const index_t rows = static_cast<index_t>(problem.output_size[0]) * problem.output_size[1];
    const index_t first = rows * share / shares, count = rows * (share + 1) / shares - first;
    const int warp = thread / 32, warps = threads / 32;
    fill_gaps(problem, epilogue, target, tile.n, tile.group * group_channels + channel,
              min(channel_warps * own_channels, group_channels - channel), first + count * warp / warps,
              first + count * (warp + 1) / warps, !pair);
  };
  if (SPECIALIZED(FILLED, filled) && tile.first_quad >= tile.end_quad) fill_share();
  if (tile.first_quad >= tile.end_quad) return;  // the whole block: classes differ in size

  find_rows(tile, problem, input, row_offset);

  // A thread has its position's quad, and the same again position_threads further on; past the end it computes the first one again.
  const int position = thread % position_threads;
  int quad[QUADS];
#pragma unroll
  for (int q = 0; q < quads; ++q) {
    const int number = tile.first_quad + q * position_threads + position;
    quad[q] = staged_quad(tile, number < tile.end_quad ? number : tile.first_quad);
  }
  const int out_channels = problem.out_channels / problem.groups;
  accum_t sums[MOST_SUMS][MOST_CHANNELS];
#pragma unroll
  for (int c = 0; c < own_channels; ++c) {
#pragma unroll
    for (int i = 0; i < quads * residues * 4; ++i) sums[i][c] = accum_t(0);
  }

  const int begin = split ? part * part_channels : 0, all_channels = problem.in_channels / problem.groups;
  const int channels = split ? min(all_channels, begin + part_channels) : all_channels;  // the end of them
  int buffer = 0;
  for (int first = begin; first < channels + tile.chunk; first += tile.chunk, buffer ^= 1) {
    cp_async_wait_all();
    __syncthreads();  // the stage copied in the last round has landed, and the one before it has been read
    // Registers are for sums: what follows from the thread's number is not kept.
    const int again = computed_anew(thread), channel_warp = again / position_threads;
    const int chunk = tile.chunk, weights_at = tile.weights_at + channel_warp * chunk * tile.channel_weights;
    if (first < channels) {
      accum_t* stage = stages + buffer * stage_elements;
      const int count = min(chunk, channels - first);
      const scalar_t* volume = input.data + tile.volume + first * input.stride[1];
      if (tile.together == 4) {
        stage_channels<4>(tile, problem, input, volume, row_offset, count, stage);
      } else if (tile.together == 2) {
        stage_channels<2>(tile, problem, input, volume, row_offset, count, stage);
      } else {
        stage_rows(tile, problem, input, volume, row_offset, count, stage);
      }
      SharedVector* weights = reinterpret_cast<SharedVector*>(stage + weights_at);
      const index_t source =
          tile.weights + channel_warp * tile.tile_weights + static_cast<index_t>(first) * tile.channel_weights;
      const SharedVector* packed = reinterpret_cast<const SharedVector*>(packed_weight + source);
#pragma unroll 1
      for (int i = again - channel_warp * position_threads; i < count * tile.channel_weights / VECTOR; i += position_threads)
        copy_async(weights + i, packed + i, true);
    }
    if (first == begin) continue;
    const accum_t* stage = stages + (buffer ^ 1) * stage_elements;
    const int count = min(chunk, channels - first + chunk);
    const accum_t* weights = stage + weights_at + tile.first_kd * tile.shape.taps_h * tile.shape.weight_row;
    const int known_h = SPECIALIZED(EVEN_TAPS_H, even_taps_h), taps_h = known_h > 0 ? known_h : tile.shape.taps_h;
    const auto multiply_taps = [&](int tap, int taps, int rows) {
      multiply(sums, stage + tap, quad, weights + tap * own_channels, count, tile.shape, own_channels, quads, rows,
               {taps, residues, lead});
    };
    if (const int taps = SPECIALIZED(EVEN_TAPS_W, even_taps_w); taps > 0) {
      if (known_h == 0 && taps_h == 1) {
        multiply_taps(0, taps, 1);
      } else if (known_h == 0 && taps_h == 2) {
        multiply_taps(0, taps, 2);
      } else {
        multiply_taps(0, taps, taps_h);
      }
      continue;
    }
    for (int tap = 0; tap < tile.axis[2].taps; tap += 4) {
      switch (min(4, tile.axis[2].taps - tap)) {
        case 1:
          multiply_taps(tap, 1, taps_h);
          break;
        case 2:
          multiply_taps(tap, 2, taps_h);
          break;
        case 3:
          multiply_taps(tap, 3, taps_h);
          break;
        default:
          multiply_taps(tap, 4, taps_h);
      }
    }
  }

  const int again = computed_anew(thread), first_out = (tile.thread_tile + again / position_threads) * own_channels;
  accum_t start[MOST_CHANNELS];  // added last: registers are for sums
#pragma unroll
  for (int c = 0; c < own_channels; ++c) {
    start[c] = epilogue.start(tile.group * out_channels + first_out + c, first_out + c < out_channels);
  }
  if (channels_lie_together(target)) {
    __syncthreads();  // the last stage has been read
    const int outputs = 8 / own_channels, of_quad = pair ? 8 : 4;
    const ChannelStage stage = channel_stage(reinterpret_cast<unsigned char*>(stages), again / 32, outputs, own_channels);
    const bool are_pieces = channels_are_pieces(target, out_channels);
    const bool pieces = PIECES ? SPECIALIZED(PIECES == 2, are_pieces) : are_pieces;
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const int index = tile.first_quad + q * position_threads + again % position_threads;
      const int row = index / tile.quads_w, first_w = index % tile.quads_w * 4 - tile.shift;
      const int d = tile.axis[0].first_output + row / tile.axis[1].outputs * tile.axis[0].step;
      const int h = tile.axis[1].first_output + row % tile.axis[1].outputs * tile.axis[1].step;
      const index_t step = pair ? 1 : tile.axis[2].step;
      const index_t w = tile.axis[2].first_output + static_cast<index_t>(first_w) * tile.axis[2].step;
#pragma unroll
      for (int first = 0; first < of_quad; first += outputs) {
        store_channels_last(
            stage, again % 32, outputs, own_channels, out_channels - first_out, pieces,
            [&](int i) {
              const index_t at = w + (first + i) * step;
              const bool live = index < tile.end_quad && at >= 0 && at < problem.output_size[2];
              return live ? target.at(tile.n, tile.group * out_channels + first_out, d, h, at) : nullptr;
            },
            [&](int i, int c) {
              const int at = first + i, r = at % 2;
              const accum_t sum = !pair           ? sums[q * 4 + at][c]
                                  : residues == 2 ? sums[(q * 2 + r) * 4 + at / 2][c]
                                  : r == lead     ? sums[q * 4 + at / 2][c]
                                                  : accum_t(0);
              return epilogue.finish(sum, start[c]);
            });
      }
    }
  } else {
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const int index = tile.first_quad + q * position_threads + again % position_threads;
      if (index >= tile.end_quad) continue;
      const int row = index / tile.quads_w, first_w = index % tile.quads_w * 4 - tile.shift;
      const int d = tile.axis[0].first_output + row / tile.axis[1].outputs * tile.axis[0].step;
      const int h = tile.axis[1].first_output + row % tile.axis[1].outputs * tile.axis[1].step;
      const index_t w = tile.axis[2].first_output + static_cast<index_t>(first_w) * tile.axis[2].step;
      const index_t step = tile.axis[2].step * target.stride[4];
      scalar_t* y = target.at(tile.n, tile.group * out_channels + first_out, d, h, w);
      const int outputs_w = tile.axis[2].outputs, last_c = out_channels - first_out;
#pragma unroll
      for (int c = 0; c < own_channels; ++c, y += target.stride[1]) {
        if (c >= last_c) continue;
        if (pair) {
          scalar_t row[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int r = i % 2;
            const accum_t sum = residues == 2 ? sums[(q * 2 + r) * 4 + i / 2][c]
                                : r == lead   ? sums[q * 4 + i / 2][c]
                                              : accum_t(0);
            row[i] = epilogue.finish(sum, start[c]);
          }
          store_eight(row, y, target.stride[4], w, problem.output_size[2]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (first_w + i >= 0 && first_w + i < outputs_w) y[i * step] = epilogue.finish(sums[q * 4 + i][c], start[c]);
          }
        }
      }
    }
  }
  if (SPECIALIZED(FILLED, filled)) fill_share();
}
