/* convt3d
pass = "fprop"
dtypes = ["fp32"]
architectures = ["sm_90"]
multiplies_padding = true
static_shared_bytes = 256
[specialize]
CHANNELS = "thread_channels"
QUADS = "thread_quads"
PAIRS = "pairs"
LIVE_RESIDUES = "live_residues"
LEAD_W = "lead_w"
SPREAD_W = "spread_w"
EVEN_TAPS_W = "even_taps_w"
FILLED = "filled"
# Of few sums in a row a thread has few registers, which do not suffice where rows are known.
OUTPUT_LAYOUT = "output_layout if output_layout == 2 or pairs or sums > 64 else 0"
# Whether channels that lie together are stored in whole pieces: 1 no, 2 yes; 0: of any strides.
PIECES = "0 if output_layout != 2 else 2 if out_channels_per_group % 4 == 0 else 1"
[constants]
pairs = "1 if stride_w == 2 and (dilation_w == 2 or dilation_w == 1 and kernel_w <= 8) else 0"
live_residues = "2 if pairs and dilation_w == 1 and kernel_w > 1 else 1"
lead_w = "padding_w % stride_w"
step_d = "stride_d // gcd(stride_d, dilation_d)"
step_h = "stride_h // gcd(stride_h, dilation_h)"
step_w = "1 if live_residues == 2 else stride_w // gcd(stride_w, dilation_w)"
spread_d = "dilation_d // gcd(stride_d, dilation_d)"
spread_h = "dilation_h // gcd(stride_h, dilation_h)"
spread_w = "dilation_w // gcd(stride_w, dilation_w)"
classes = "min(kernel_d, step_d) * min(kernel_h, step_h) * min(kernel_w, step_w)"
dead_rows = "kernel_d < stride_d or kernel_h < stride_h or step_d * step_h < stride_d * stride_h"
dead_columns = "not pairs and (kernel_w < stride_w or step_w < stride_w)"
filled = "1 if dead_rows or dead_columns else 0"
taps_h = "ceil_div(kernel_h, step_h)"
taps_w = "ceil_div(kernel_w, step_w)"
even_taps_w = "taps_w if kernel_w % step_w == 0 and taps_w <= 8 else 0"
low_d = "padding_d // stride_d"
low_h = "padding_h // stride_h"
low_w = "padding_w // stride_w + (lead_w if pairs and live_residues == 1 else 0)"
reach_d = "(kernel_d - 1) * dilation_d // stride_d"
reach_h = "(kernel_h - 1) * dilation_h // stride_h"
reach_w = "(kernel_w - 1 - lead_w) // 2 if live_residues == 2 else kernel_w - 1 if pairs else (kernel_w - 1) * dilation_w // stride_w"
ahead_w = "lead_w if live_residues == 2 else 0"
rows_h = "(output_h - 1 + padding_h) // stride_h - low_h + 1"
rows_w = "ceil_div(output_w, 2) if pairs else (output_w - 1 + padding_w) // stride_w - low_w + 1"
pitch = "max(input_w + max(0, reach_w - low_w), low_w + rows_w + ahead_w)"
plane = "max(input_h + max(0, reach_h - low_h), low_h + rows_h) * pitch"
images = "gcd(batch, 4)"
part_d = "ceil_div(ceil_div(output_d, stride_d), 4 // images)"
wide = "live_residues == 1 and MOST_CHANNELS > 8"
thread_channels = "12 if wide and out_channels_per_group % 12 == 0 else 16 if wide and out_channels_per_group % 16 == 0 else 8"
thread_quads = "max(1, min(THREAD_QUADS, 144 // (4 * live_residues * thread_channels)))"
thread_tiles = "ceil_div(out_channels_per_group, thread_channels)"
channel_warps = "gcd(thread_tiles, CHANNEL_WARPS)"
channel_tiles = "thread_tiles // channel_warps"
position_warps = "BLOCK_WARPS // channel_warps"
segment = "32 * position_warps * thread_quads"
tiles = "ceil_div(part_d * plane, segment)"
cells = "tiles * segment + (reach_d + 1) * plane + reach_h * pitch + reach_w + ahead_w"
window = "segment + (taps_h - 1) * spread_h * pitch + (reach_w + ahead_w if live_residues == 2 else (taps_w - 1) * spread_w)"
channel_bytes = "16 * window + 4 * taps_h * taps_w * thread_channels * channel_warps"
sums = "4 * thread_quads * live_residues * thread_channels"
resident = "max(1, (8 if sums > 96 else 12 if sums > 64 else 16) // BLOCK_WARPS)"
ring_bytes = "(220 * 1024 - 2048 * resident) // resident"
most_chunk = "max(1, min(in_channels_per_group, ring_bytes // (STAGES * channel_bytes)))"
chunk = "ceil_div(in_channels_per_group, ceil_div(in_channels_per_group, most_chunk))"
stages = "min(STAGES, max(2, ring_bytes // (chunk * channel_bytes)))"
store_bytes = "32 * channel_warps * position_warps * (8 + 4 * (thread_channels if thread_channels % 8 == 4 else thread_channels + 4))"
block_bytes = "128 + max(stages * chunk * channel_bytes, store_bytes)"
[restrictions]
"STAGES <= 8" = "there is room for the barriers of eight stages"
"cells + 2 * plane < 2 * 1024 * 1024 * 1024" = "the cells of a volume must be fewer than 2^31"
"stages * chunk * channel_bytes <= 220 * 1024" = "two windows of one channel and its weights must fit 220 KiB of shared memory"
[search]
BLOCK_WARPS = [4, 8]
CHANNEL_WARPS = [1, 2, 4]
THREAD_QUADS = [2, 3]
MOST_CHANNELS = [8, 16]
[cost]
steps = "in_channels_per_group * ceil_div(kernel_d, step_d) * taps_h * taps_w"
products = "segment * 4 * thread_channels * channel_warps"
bytes = "channel_bytes // (taps_h * taps_w)"
[workspace]
packed_weight = "in_channels * taps * thread_tiles * thread_channels"
input_cells = "batch // images * in_channels * cells * 4"
[[launch]]
symbol = "convt3d_pack_flattened_weight"
general = true
grid = "ceil_div(in_channels * taps * thread_tiles * thread_channels, 256)"
block = 256
packs = "packed_weight"
[[launch]]
symbol = "convt3d_flatten_input"
general = true
grid = "batch // images * ceil_div(in_channels, 8) * ceil_div(cells, 256)"
block = 256
prepares = "input_cells"
[[launch]]
symbol = "convt3d_fprop_flattened_simt"
grid = "classes * (batch // images) * groups * tiles * channel_tiles"
block = "32 * channel_warps * position_warps"
shared_bytes = "block_bytes"
*/
// Implicit GEMM on the CUDA cores, with the input as one line. Of each class of outputs with equal (o + padding) mod stride, all taps are
// steps of one length along a line of cells: rows and planes of the input follow one another, with just so many zeros between them that
// what is read past the end of one are the zeros before the next. A launch lays the input out so, four volumes beside one another: cell by
// cell, four segments, which are four images, or parts of the depth where there are fewer.
//
// A block owns a run of neighbouring positions of all four segments x channel_warps * CHANNELS output channels. What one tap of
// the depth reads of an input channel is one piece of memory, a window, copied in bulk; so are a stage's weights. A ring of stages
// lets warps be ahead of one another, and none of them waits for copies but in turn.
//
// A thread owns QUADS cells of four segments x CHANNELS channels (x 2 residues of w): 96 to 144 sums. What makes it quick is where their
// operands lie. A multiprocessor's quarter reads its registers through two ports, one for even and one for odd numbers, an operand a
// cycle each; a multiply-add has three operands, of which one may be kept from the instruction before. So a multiply-add a cycle takes
// even and odd ones in turn, and a compiler can number the sums so if a sum always meets the same place of a vector, as here. Where inputs
// slide past the sums from tap to tap, as they do along a row, no numbering serves all taps: see docs/performance/fprop_flattened_simt.md.
//
// Where the stride along w is 2, both residues of w are one class, so that a thread writes pairs of neighbours: tap t feeds output 2*q + r
// through input q + padding/2 - (t - r - padding%2)/2. So is a stride and dilation of 2, where only one of the two residues has taps; the
// other is stored as the bias. Other columns, rows and planes without taps are nobody's sums: each block fills about those beside its own.
//
// Where channels lie together in the output, the sums pass through shared memory, so that neighbouring lanes store neighbouring channels.
#include "convt3d.cuh"
#include "convt3d/ptx/beside_packing.cuh"
#include "convt3d/core/dense_axis.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/epilogue/fill_gaps.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/layout.cuh"
#include "convt3d/pipe/pipeline.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/epilogue/store_channels_last.cuh"
#include "convt3d/epilogue/store_piece.cuh"
#include "convt3d/core/vector.cuh"

#ifndef THREAD_QUADS
#define THREAD_QUADS 3
#endif
#ifndef BLOCK_WARPS
#define BLOCK_WARPS 4
#endif
#ifndef CHANNEL_WARPS
#define CHANNEL_WARPS 2
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef MOST_CHANNELS
#define MOST_CHANNELS 16
#endif

constexpr int SEGMENTS = 4, MOST_QUADS = THREAD_QUADS, ROOM = 16;  // ROOM: for channels, or those of two taps
// Registers for the sums and 50 to 70 more: 8, 12 or 16 warps a multiprocessor.
constexpr int SUMS = SEGMENTS * QUADS * LIVE_RESIDUES * CHANNELS, RESIDENT_WARPS = SUMS > 96 ? 8 : SUMS > 64 ? 12 : 16;
constexpr int RESIDENT_BLOCKS = RESIDENT_WARPS > BLOCK_WARPS ? RESIDENT_WARPS / BLOCK_WARPS : 1;
constexpr int HEADER = 128;  // bytes of shared memory before the ring, for its barriers

// ---- what comes before ----

// packed_weight[group][thread tile][class's taps before][kd from the last][ci][kh, kw from the last][channel of the thread tile], zero
// beyond the last channel: what a warp multiplies by in one stage is one contiguous piece of it.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_pack_flattened_weight(const Problem problem, const View<const scalar_t> weight, accum_t* __restrict__ packed_weight,
                                  const int thread_tiles, const int thread_channels, const int live_residues) {
  let_next_begin();
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
  const int plane_taps = place[1].class_taps * place[2].class_taps;
  const index_t row = (tile * taps + taps_before) * channels +
                      (static_cast<index_t>(place[0].position) * channels + ci) * plane_taps +
                      place[1].position * place[2].class_taps + place[2].position;
  packed_weight[row * thread_channels + lane] =
      co < out_channels ? to_accum(*weight.at(group * channels + ci, co, tap[0], tap[1], tap[2])) : accum_t(0);
}

// Whether channels lie together, fours of them aligned for one access.
__device__ inline bool channels_are_vectors(const View<const scalar_t>& input, int channels) {
  bool whole = input.stride[1] == 1 && channels % 4 == 0 && reinterpret_cast<index_t>(input.data) % sizeof(Vector<4>) == 0;
  for (int a = 0; a < 5; ++a) whole = whole && (a == 1 || input.stride[a] % 4 == 0);
  return whole;
}

// input_cells[n / images][channel][cell][segment]: input (d, h, w) is cell (d - low_d + reach_d) * plane + (h - low_h + reach_h) * pitch + w -
// low_w + reach_w of an image; segment s is image s % images, from its plane s / images * part_d on.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_flatten_input(const Problem problem, const View<const scalar_t> input, accum_t* __restrict__ input_cells,
                          const int images, const int part_d, const int pitch, const int plane, const int cells,
                          const int low_d, const int low_h, const int low_w, const int reach_d, const int reach_h,
                          const int reach_w) {
  let_next_begin();
  if (threadIdx.x == 0) wait_for_packing();  // so that who waits for this launch waits for both
  const int runs = (cells + 255) / 256, pieces = (problem.in_channels + 7) / 8;
  const int cell = static_cast<int>(blockIdx.x % runs) * 256 + static_cast<int>(threadIdx.x);
  const int first = static_cast<int>(blockIdx.x / runs % pieces) * 8, n = static_cast<int>(blockIdx.x / runs / pieces) * images;
  if (cell >= cells) return;
  // One plane further on, so that what lies before the first is no negative number.
  const int number = cell + plane + (low_h - reach_h) * pitch + low_w - reach_w;
  const int planes = number / plane, in_plane = number - planes * plane, h = in_plane / pitch, w = in_plane - h * pitch;
  const bool inside = h < problem.input_size[1] && w < problem.input_size[2];
  const scalar_t* source[SEGMENTS];
  bool live[SEGMENTS];
#pragma unroll
  for (int s = 0; s < SEGMENTS; ++s) {
    const int d = planes - 1 + low_d - reach_d + s / images * part_d;
    live[s] = inside && d >= 0 && d < problem.input_size[0];
    source[s] = live[s] ? input.at(n + s % images, first, d, h, w) : input.data;
  }
  Vector<4>* target = reinterpret_cast<Vector<4>*>(input_cells) +
                      (static_cast<index_t>(n / images) * problem.in_channels + first) * cells + cell;
  const int channels = min(8, problem.in_channels - first);
  if (channels_are_vectors(input, problem.in_channels)) {
#pragma unroll 2
    for (int c = 0; c < channels; c += 4) {
      Vector<4> four[SEGMENTS];
#pragma unroll
      for (int s = 0; s < SEGMENTS; ++s) four[s] = live[s] ? *reinterpret_cast<const Vector<4>*>(source[s] + c) : Vector<4>{};
#pragma unroll
      for (int e = 0; e < 4; ++e, target += cells) {
        *target = {four[0].element[e], four[1].element[e], four[2].element[e], four[3].element[e]};
      }
    }
    return;
  }
#pragma unroll 4
  for (int c = 0; c < channels; ++c, target += cells) {
    Vector<4> value;
#pragma unroll
    for (int s = 0; s < SEGMENTS; ++s) value.element[s] = live[s] ? to_accum(source[s][c * input.stride[1]]) : accum_t(0);
    *target = value;
  }
}

// ---- the product ----

// One residue class on one axis: output first_output + a*step has position start + a, for a in [0, outputs). Its tap k, from the last, is
// `first_cell + k*spread` cells of this axis further on than the position.
struct LineAxis {
  int first_output, step, outputs, start;
  int taps, taps_before, spread, first_cell;
};

__device__ inline LineAxis line_axis(const Problem& problem, int axis, int index, int low, int reach) {
  const int stride = problem.stride[axis], dilation = problem.dilation[axis], kernel = problem.kernel_size[axis];
  const int padding = problem.padding[axis], divisor = greatest_common_divisor(stride, dilation), tap_step = stride / divisor;
  LineAxis result;
  result.first_output = (index * dilation % stride - padding % stride + stride) % stride;
  result.step = stride;
  const int beyond = problem.output_size[axis] - result.first_output;
  result.outputs = beyond > 0 ? (beyond - 1) / stride + 1 : 0;
  result.start = (result.first_output + padding) / stride - low;
  result.taps = taps_of_class(kernel, tap_step, index);
  result.taps_before = taps_before_class(kernel, tap_step, index);
  result.spread = dilation / divisor;
  result.first_cell = reach - index * dilation / stride - (result.taps - 1) * result.spread;
  return result;
}

// What is known of the row of taps that one pass multiplies, on the GPU when it is compiled: its taps, from the last; the residues
// of w they feed (1: of the class's own outputs); with two residues the rest of the padding, else the cells from one to the next. Tap k of
// the row feeds residue(k) of a position through the cell shift(k) further on.
struct TapRow {
  int taps, residues, lead, spread;
  __device__ int tap_offset(int tap) const { return tap >= lead ? (tap - lead) / 2 : -1; }
  __device__ int residue(int k) const { return residues == 1 ? 0 : (taps - 1 - k + lead) % 2; }
  __device__ int shift(int k) const { return residues == 1 ? k * spread : tap_offset(taps - 1) - tap_offset(taps - 1 - k); }
};

// Elements from a thread's quad to its next, from a row of cells to the next, from behind the last row of a channel to the next channel.
struct Steps {
  int quad, row, channel;
};

// What a thread multiplies at a time: its positions' inputs of one cell each, and the weights of one tap, or of both that read there.
struct Operands {
  accum_t input[MOST_QUADS * SEGMENTS], weight[ROOM];
  __device__ __forceinline__ void load(const accum_t* inputs, const accum_t* weights, int quads, int next_quad, int columns) {
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const Vector<4> loaded = *reinterpret_cast<const Vector<4>*>(inputs + q * next_quad);
#pragma unroll
      for (int s = 0; s < SEGMENTS; ++s) input[q * SEGMENTS + s] = loaded.element[s];
    }
#pragma unroll
    for (int c = 0; c < columns; c += 4) {
      const Vector<4> loaded = *reinterpret_cast<const Vector<4>*>(weights + c);
#pragma unroll
      for (int e = 0; e < 4; ++e) weight[c + e] = loaded.element[e];
    }
  }
};

// sums[residue * quads + quad][segment][channel] += the products of all channels of a stage.
__device__ __forceinline__ void multiply(accum_t (&sums)[2 * MOST_QUADS][SEGMENTS][ROOM], const accum_t* inputs,
                                         const accum_t* weights, int channels, int quads, const Steps& next, int weight_row,
                                         int thread_channels, int taps_h, const TapRow tap_row) {
  const auto columns_of = [&](int k) {
    return k + 1 < tap_row.taps && tap_row.shift(k + 1) == tap_row.shift(k) ? 2 * thread_channels : thread_channels;
  };
  Operands now;
  now.load(inputs, weights, quads, next.quad, columns_of(0));
  int rows = channels * taps_h, kh = taps_h;
#pragma unroll 1
  do {
    // The next row's first operands are loaded before this row's last products; behind the last row it is that row again.
    --rows;
    const bool turn = --kh == 0;
    if (turn) kh = taps_h;
    const accum_t* next_inputs = rows == 0 ? inputs : inputs + next.row + (turn ? next.channel : 0);
    const accum_t* next_weights = rows == 0 ? weights : weights + weight_row;
#pragma unroll
    for (int k = 0; k < tap_row.taps; ++k) {
      if (k > 0 && tap_row.shift(k) == tap_row.shift(k - 1)) continue;  // done with the tap before it, on the same cells
      const int columns = columns_of(k), following = k + columns / thread_channels;
      Operands then;
      if (following < tap_row.taps) {
        then.load(inputs + tap_row.shift(following) * SEGMENTS, weights + following * thread_channels, quads, next.quad,
                  columns_of(following));
      } else {
        then.load(next_inputs, next_weights, quads, next.quad, columns_of(0));
      }
      const auto add_product = [&](int i, int tap, int c) {
        sums[tap_row.residue(k + tap) * quads + i / SEGMENTS][i % SEGMENTS][c] +=
            now.input[i] * now.weight[tap * thread_channels + c];
      };
      // There and back again: the weight of the turn is kept from one position to the next, as an input is for all its columns. These
      // are loops of numbers known to the compiler: where one has to follow from `k` and `i`, it takes half as long again.
#pragma unroll
      for (int i = 0; i < quads * SEGMENTS; i += 2) {
#pragma unroll
        for (int tap = 0; tap < 2; ++tap) {
          if (tap * thread_channels >= columns) continue;
#pragma unroll
          for (int c = 0; c < thread_channels; ++c) add_product(i, tap, c);
        }
#pragma unroll
        for (int tap = 1; tap >= 0; --tap) {
          if (tap * thread_channels >= columns) continue;
#pragma unroll
          for (int c = thread_channels - 1; c >= 0; --c) add_product(i + 1, tap, c);
        }
      }
      now = then;
    }
    inputs = next_inputs;
    weights = next_weights;
  } while (rows > 0);
}

// What a block works on. Kept in shared memory: registers are for the sums.
struct Tile {
  LineAxis axis[3];
  int n, group, thread_tile, first;          // the first image and position
  int first_kd, taps_d;                      // those that read any plane inside the input
  int window, row_weights, channel_weights;  // cells of a window, elements of a row's and a channel's weights in a thread tile
  index_t cells, weights,
      tile_weights;  // the first cell that tap 0 reads, the first weight, and from one thread tile's on to the next
};

// Find the planes that taps reach of positions `first` to `last`, a part of the depth from plane `from` on.
__device__ inline void add_live_taps(Tile& tile, const Problem& problem, int origin, int from, int first, int last) {
  const LineAxis& d = tile.axis[0];
  const int first_d = origin + from + first, last_d = origin + from + min(last, d.outputs - 1 - from);
  if (first_d > last_d) return;
  const int begin = last_d < 0 ? (-last_d + d.spread - 1) / d.spread : 0, beyond = problem.input_size[0] - first_d;
  const int end = min(beyond > 0 ? (beyond + d.spread - 1) / d.spread : 0, d.taps);
  if (begin >= end) return;
  const int known = tile.first_kd + tile.taps_d;
  tile.first_kd = tile.taps_d == 0 ? begin : min(begin, tile.first_kd);
  tile.taps_d = (tile.taps_d == 0 ? end : max(end, known)) - tile.first_kd;
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, RESIDENT_BLOCKS)
    convt3d_fprop_flattened_simt(const Problem problem, const accum_t* __restrict__ input_cells,
                                 const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                 View<scalar_t> output, const int images, const int part_d, const int pitch, const int plane,
                                 const int cells, const int low_d, const int low_h, const int low_w, const int reach_d,
                                 const int reach_h, const int reach_w, const int ahead_w, const int rows_w, const int segment,
                                 const int thread_channels, const int thread_quads, const int pairs, const int live_residues,
                                 const int lead_w, const int spread_w, const int even_taps_w, const int channel_warps,
                                 const int position_warps, const int chunk, const int stages, const int channel_bytes,
                                 const int tiles, const int thread_tiles, const int filled) {
  lay_out(problem, output, OUTPUT_LAYOUT ? SPECIALIZED(OUTPUT_LAYOUT, layout_of(problem, output)) : 0);
  const Epilogue epilogue{bias};
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ Tile tile;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, warps = channel_warps * position_warps;
  const int position_threads = 32 * position_warps;
  const int own_channels = SPECIALIZED(CHANNELS, thread_channels), residues = SPECIALIZED(LIVE_RESIDUES, live_residues);
  const int lead = SPECIALIZED(LEAD_W, lead_w), quads = SPECIALIZED(QUADS, thread_quads);
  const bool pair = SPECIALIZED(PAIRS, pairs) != 0;
  const unsigned base = shared_address(shared), stage_bytes = static_cast<unsigned>(chunk * channel_bytes);
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  if (thread == 0) {
    // blockIdx.x = (((class * batch / images + n / images) * groups + group) * tiles + tile) * channel tiles + channel tile
    const int channel_tiles = thread_tiles / channel_warps, *kernel = problem.kernel_size;
    unsigned block = blockIdx.x;
    const auto digit = [&block](int size) {
      const int value = static_cast<int>(block % size);
      block /= size;
      return value;
    };
    tile.thread_tile = digit(channel_tiles) * channel_warps;
    tile.first = digit(tiles) * segment;
    tile.group = digit(problem.groups);
    tile.n = digit(problem.batch / images) * images;
    const int low[3] = {low_d, low_h, low_w}, reach[3] = {reach_d, reach_h, reach_w};
    for (int a = 2; a >= 0; --a) {
      if (a == 2 && pair) {
        tile.axis[2] = {0, 2, rows_w, 0, residues == 2 ? reach_w + ahead_w + 1 : kernel[2], 0, 1, 0};
      } else {
        tile.axis[a] = line_axis(
            problem, a,
            digit(min(kernel[a], problem.stride[a] / greatest_common_divisor(problem.stride[a], problem.dilation[a]))), low[a],
            reach[a]);
      }
    }
    const LineAxis &d = tile.axis[0], &h = tile.axis[1], &w = tile.axis[2];
    tile.first_kd = tile.taps_d = 0;
    const int origin = low_d + d.start - reach_d + d.first_cell;
    for (int from = 0; from < SEGMENTS / images * part_d; from += part_d) {
      add_live_taps(tile, problem, origin, from, tile.first / plane, min((tile.first + segment - 1) / plane, part_d - 1));
    }
    tile.window = segment + (h.taps - 1) * h.spread * pitch + (w.taps - 1) * w.spread;
    tile.row_weights = (residues == 2 ? kernel[2] : w.taps) * own_channels;
    tile.channel_weights = h.taps * tile.row_weights;
    tile.tile_weights = static_cast<index_t>(kernel[0]) * kernel[1] * kernel[2] * channels * own_channels;
    const index_t taps_before = (static_cast<index_t>(d.taps_before) * kernel[1] + d.taps * h.taps_before) * kernel[2] +
                                static_cast<index_t>(d.taps) * h.taps * w.taps_before;
    tile.weights = (static_cast<index_t>(tile.group) * thread_tiles + tile.thread_tile) * tile.tile_weights +
                   taps_before * channels * own_channels;
    tile.cells =
        (static_cast<index_t>(tile.n / images) * problem.in_channels + static_cast<index_t>(tile.group) * channels) * cells +
        tile.first + (d.start + d.first_cell) * plane + h.first_cell * pitch + w.first_cell;
    for (int i = 0; i < stages; ++i) {
      mbarrier_init(base + static_cast<unsigned>(i) * 8, 1);
      mbarrier_init(base + static_cast<unsigned>(stages + i) * 8, 32 * warps);
    }
    mbarrier_fence_init();
  }
  __syncthreads();
  const bool empty = tile.axis[0].outputs == 0 || tile.axis[1].outputs == 0 || tile.axis[2].outputs == 0;
  // Of all rows a block has about those of its tile, so that L2 makes whole sectors of both.
  const auto fill_share = [&] {
    if (!SPECIALIZED(FILLED, filled)) return;
    const int channel = tile.thread_tile * own_channels;
    const unsigned class_blocks =
        static_cast<unsigned>(problem.batch / images * problem.groups * tiles * (thread_tiles / channel_warps));
    const index_t classes = gridDim.x / class_blocks, shares = classes * tiles;
    const index_t share = tile.first / segment * classes + blockIdx.x / class_blocks;
    const index_t rows = static_cast<index_t>(problem.output_size[0]) * problem.output_size[1];
    const index_t first = rows * share / shares, count = rows * (share + 1) / shares - first;
    for (int i = 0; i < images; ++i) {
      fill_gaps(problem, epilogue, output, tile.n + i, tile.group * out_channels + channel,
                min(channel_warps * own_channels, out_channels - channel), first + count * warp / warps,
                first + count * (warp + 1) / warps, !pair);
    }
  };
  if (thread == 0) wait_for_packing();
  if (empty) return fill_share();

  // Stages: channels by chunks, for one kd after the other. One thread asks for the windows and weights of a stage, once all warps have
  // read what was in its place.
  const int chunks = (channels + chunk - 1) / chunk, all_stages = tile.taps_d * chunks;
  const auto copy_stage = [&](int number) {
    if (number >= all_stages) return;
    const int kd = tile.first_kd + number / chunks, first = number % chunks * chunk, count = min(chunk, channels - first);
    const unsigned slot = static_cast<unsigned>(number % stages), turn = static_cast<unsigned>(number / stages);
    const unsigned window_bytes = static_cast<unsigned>(tile.window) * 16,
                   weight_bytes = static_cast<unsigned>(count * tile.channel_weights) * 4;
    const unsigned full = base + slot * 8;
    mbarrier_wait(full + static_cast<unsigned>(stages) * 8, (turn & 1u) ^ 1u);
    mbarrier_arrive_expect(full,
                           static_cast<unsigned>(count) * window_bytes + static_cast<unsigned>(channel_warps) * weight_bytes);
    unsigned target = base + HEADER + slot * stage_bytes;
    const accum_t* packed =
        packed_weight + (tile.weights + (static_cast<index_t>(kd) * channels + first) * tile.channel_weights);
    for (int i = 0; i < channel_warps; ++i, target += weight_bytes, packed += tile.tile_weights) {
      bulk_copy(target, packed, weight_bytes, full);
    }
    const Vector<4>* source =
        reinterpret_cast<const Vector<4>*>(input_cells) +
        (tile.cells + static_cast<index_t>(kd) * tile.axis[0].spread * plane + static_cast<index_t>(first) * cells);
#pragma unroll 1
    for (int ci = 0; ci < count; ++ci, target += window_bytes, source += cells) bulk_copy(target, source, window_bytes, full);
  };
  const int ahead = stages > 2 ? stages - 2 : 1;
  if (thread == 0) {
    for (int i = 0; i < ahead; ++i) copy_stage(i);
  }

  accum_t sums[2 * MOST_QUADS][SEGMENTS][ROOM];
#pragma unroll
  for (int c = 0; c < own_channels; ++c) {
#pragma unroll
    for (int q = 0; q < residues * quads; ++q) {
#pragma unroll
      for (int s = 0; s < SEGMENTS; ++s) sums[q][s][c] = accum_t(0);
    }
  }
  unsigned slot = 0, parity = 0;
#pragma unroll 1
  for (int number = 0, first = 0; number < all_stages; ++number) {
    const int count = min(chunk, channels - first);
    first = first + chunk < channels ? first + chunk : 0;
    // The warps take turns: asking for copies takes longer than a multiplication of the same number of instructions.
    if (computed_anew(thread) == number % warps * 32) copy_stage(number + ahead);
    const unsigned full = base + slot * 8;
    mbarrier_wait(full, parity);
    // Registers are for sums: what follows from the thread's number is not kept.
    const int again = computed_anew(thread), channel_warp = again / position_threads;
    const accum_t* stage = reinterpret_cast<const accum_t*>(shared + HEADER + slot * stage_bytes);
    const accum_t* weights = stage + channel_warp * count * tile.channel_weights;
    const accum_t* inputs =
        stage + channel_warps * count * tile.channel_weights + (again - channel_warp * position_threads) * SEGMENTS;
    const int row = tile.axis[1].spread * pitch, taps_h = tile.axis[1].taps, spread = SPECIALIZED(SPREAD_W, spread_w);
    const Steps next = {position_threads * SEGMENTS, row * SEGMENTS, (tile.window - taps_h * row) * SEGMENTS};
    const auto multiply_taps = [&](int tap, int taps) {
      multiply(sums, inputs + tap * spread * SEGMENTS, weights + tap * own_channels, count, quads, next, tile.row_weights,
               own_channels, taps_h, {taps, residues, lead, spread});
    };
    if (const int taps = SPECIALIZED(EVEN_TAPS_W, even_taps_w); taps > 0) {
      multiply_taps(0, taps);
    } else {
      for (int tap = 0; tap < tile.axis[2].taps; tap += 4) {
        switch (min(4, tile.axis[2].taps - tap)) {
          case 1:
            multiply_taps(tap, 1);
            break;
          case 2:
            multiply_taps(tap, 2);
            break;
          case 3:
            multiply_taps(tap, 3);
            break;
          default:
            multiply_taps(tap, 4);
        }
      }
    }
    mbarrier_arrive(full + static_cast<unsigned>(stages) * 8);  // each lane for what it has read
    __syncwarp();
    if (++slot == static_cast<unsigned>(stages)) {
      slot = 0;
      parity ^= 1u;
    }
  }

  const int again = computed_anew(thread), first_out = (tile.thread_tile + again / position_threads) * own_channels;
  const int last_c = out_channels - first_out;
  accum_t start[ROOM];  // added last: registers are for sums
  const auto load_start = [&] {
#pragma unroll
    for (int c = 0; c < own_channels; ++c) {
      start[c] = c < last_c ? epilogue.start(tile.group * out_channels + first_out + c) : accum_t(0);
    }
  };
  // Where these loads stand decides how the sums of the loop above are numbered.
  if (!pair) load_start();
  if (channels_lie_together(output)) {
    __syncthreads();  // the ring has been read
    if (pair) load_start();
    const ChannelStage stage = channel_stage(shared + HEADER, again / 32, 1, own_channels);
    const bool are_pieces = channels_are_pieces(output, out_channels);
    const bool pieces = PIECES ? SPECIALIZED(PIECES == 2, are_pieces) : are_pieces;
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const int position = tile.first + q * position_threads + again % position_threads;
      const int at_d = position / plane, in_plane = position - at_d * plane, row = in_plane / pitch;
      const int at_h = row - tile.axis[1].start, at_w = in_plane - row * pitch - tile.axis[2].start;
      const bool inside = at_d < part_d && at_h >= 0 && at_h < tile.axis[1].outputs && at_w >= 0 && at_w < tile.axis[2].outputs;
      const int h = tile.axis[1].first_output + at_h * tile.axis[1].step;
      const index_t w = tile.axis[2].first_output + static_cast<index_t>(at_w) * tile.axis[2].step;
#pragma unroll
      for (int s = 0; s < SEGMENTS; ++s) {
        const int plane_of_s = s / images * part_d + at_d, image = tile.n + s % images;
        const int d = tile.axis[0].first_output + plane_of_s * tile.axis[0].step;
        const bool live = inside && plane_of_s < tile.axis[0].outputs;
#pragma unroll
        for (int r = 0; r < (pair ? 2 : 1); ++r) {
          store_channels_last(
              stage, again % 32, 1, own_channels, last_c, pieces,
              [&](int) {
                const bool there = live && (r == 0 || w + 1 < problem.output_size[2]);
                return there ? output.at(image, tile.group * out_channels + first_out, d, h, w + r) : nullptr;
              },
              [&](int, int c) {
                const accum_t sum = residues == 2 ? sums[r * quads + q][s][c] : !pair || r == lead ? sums[q][s][c] : accum_t(0);
                return epilogue.finish(sum, start[c]);
              });
        }
      }
    }
  } else {
    if (pair) load_start();
#pragma unroll
    for (int q = 0; q < quads; ++q) {
      const int position = tile.first + q * position_threads + again % position_threads;
      const int at_d = position / plane, in_plane = position - at_d * plane, row = in_plane / pitch;
      const int at_h = row - tile.axis[1].start, at_w = in_plane - row * pitch - tile.axis[2].start;
      if (at_d >= part_d || at_h < 0 || at_h >= tile.axis[1].outputs || at_w < 0 || at_w >= tile.axis[2].outputs) continue;
      const int h = tile.axis[1].first_output + at_h * tile.axis[1].step;
      const index_t w = tile.axis[2].first_output + static_cast<index_t>(at_w) * tile.axis[2].step;
#pragma unroll
      for (int s = 0; s < SEGMENTS; ++s) {
        const int plane_of_s = s / images * part_d + at_d;
        if (plane_of_s >= tile.axis[0].outputs) continue;
        const int d = tile.axis[0].first_output + plane_of_s * tile.axis[0].step;
        scalar_t* y = output.at(tile.n + s % images, tile.group * out_channels + first_out, d, h, w);
        if (!pair) {
#pragma unroll
          for (int c = 0; c < own_channels; ++c, y += output.stride[1]) {
            if (c < last_c) *y = epilogue.finish(sums[q][s][c], start[c]);
          }
        } else {
          const bool both = w + 1 < problem.output_size[2];
          const bool paired = both && output.stride[4] == 1 && output.stride[1] % 2 == 0 &&
                              reinterpret_cast<unsigned long long>(y) % (2 * sizeof(scalar_t)) == 0;
#pragma unroll
          for (int c = 0; c < own_channels; ++c, y += output.stride[1]) {
            if (c >= last_c) continue;
            const scalar_t even = epilogue.finish(residues == 2 || lead == 0 ? sums[q][s][c] : accum_t(0), start[c]);
            const scalar_t odd = epilogue.finish(residues == 2 ? sums[quads + q][s][c]
                                                 : lead == 1   ? sums[q][s][c]
                                                               : accum_t(0),
                                                 start[c]);
            if (paired) {
              store_pair(y, even, odd);
            } else {
              y[0] = even;
              if (both) y[output.stride[4]] = odd;
            }
          }
        }
      }
    }
  }
  fill_share();
}
