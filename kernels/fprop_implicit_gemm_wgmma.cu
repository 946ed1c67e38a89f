/* convt3d
pass = "fprop"
dtypes = ["tf32", "bf16", "fp16"]
architectures = ["sm_90a"]
multiplies_padding = true

[search]
TILES_M = [1, 2, 4]
COLUMNS = [64, 128, 256]
CHUNK_CELLS = [4, 8]
STAGES = [2, 3]
LAY_OUT = [0, 1]

[specialize]
WGMMA_TILES = "tile8"
CELLS = "chunk_cells"
WINDOW_H = "window_h"
WINDOW_W = "window_w"
STRIDE_W = "stride_w"
RESIDENT = "resident"
WHOLE_TILES = "whole_tiles"
OUTPUT_LAYOUT = "output_layout if output_layout == 2 or known_runs else 0"
# Whether outputs are stored in whole runs of a row, or of eight channels: 1 no, 2 yes; 0: of any strides.
WHOLE_RUNS = "0 if OUTPUT_LAYOUT == 0 or not known_runs else 2 if OUTPUT_LAYOUT == 1 and stride_w == 2 and not ragged else 1"
WHOLE_CHANNELS = "0 if OUTPUT_LAYOUT == 0 or itemsize != 2 else 2 if OUTPUT_LAYOUT == 2 and out_channels_per_group % 8 == 0 else 1"
# An odd number of channels of 16 bits that lie together begins anywhere; few are stored one by one as quickly.
CHANNEL_RUNS = "1 if OUTPUT_LAYOUT == 2 and itemsize == 2 and out_channels_per_group % 2 and out_channels_per_group > 16 else 0"

[constants]
# Columns of a product: channels of a tile, in eights; in TF32 half as many, for the sums of two classes.
out_tiles = "ceil_div(out_channels_per_group, 8)"
channel_tiles = "ceil_div(out_tiles, max(1, min(COLUMNS * 2 // itemsize, 256 // TILES_M) // 8))"
tile8 = "ceil_div(out_tiles, channel_tiles)"
ragged = "1 if stride_w == 2 and output_w % (2 * TILES_M) != 0 else 0"
# Whether rows are whole runs is looked at when it runs where it would ask for more than the layout promises, or for too many registers.
known_runs = "1 if 2 * TILES_M * itemsize <= 16 and not (ragged and tile8 * TILES_M >= 32) else 0"
whole_tiles = "1 if out_channels_per_group == channel_tiles * tile8 * 8 else 0"
# Cells of 16 bytes: a chunk has an even number of them, two for each step of a product.
all_cells = "2 * ceil_div(in_channels_per_group * itemsize, 32)"

# Output blocks of stride_d x stride_h x stride_w, and a tile of them: CONSUMERS x 8 x 8 TILES_M.
tile_w = "8 * TILES_M"
tiles_d = "ceil_div(ceil_div(output_d, stride_d), CONSUMERS)"
tiles_h = "ceil_div(ceil_div(output_h, stride_h), 8)"
tiles_w = "ceil_div(ceil_div(output_w, stride_w), tile_w)"
tiles = "batch * tiles_d * tiles_h * tiles_w"

# Tap t of the one class that it reaches reads the input (padding - t*dilation) / stride, rounded up, ahead of the output block.
lowest_d = "-(((kernel_d - 1) * dilation_d - padding_d) // stride_d)"
lowest_h = "-(((kernel_h - 1) * dilation_h - padding_h) // stride_h)"
lowest_w = "-(((kernel_w - 1) * dilation_w - padding_w) // stride_w)"
apart_d = "dilation_d // gcd(stride_d, dilation_d)"
apart_h = "dilation_h // gcd(stride_h, dilation_h)"
apart_w = "dilation_w // gcd(stride_w, dilation_w)"
period_d = "stride_d // gcd(stride_d, dilation_d)"
period_h = "stride_h // gcd(stride_h, dilation_h)"
period_w = "stride_w // gcd(stride_w, dilation_w)"
# How far the taps of all classes reach, and those of one.
all_d = "ceil_div(padding_d, stride_d) - lowest_d"
all_h = "ceil_div(padding_h, stride_h) - lowest_h"
all_w = "ceil_div(padding_w, stride_w) - lowest_w"
one_d = "(kernel_d - 1) // period_d * apart_d"
one_h = "(kernel_h - 1) // period_h * apart_h"
one_w = "(kernel_w - 1) // period_w * apart_w"
# In TF32 both classes of w at a stride of 2 are multiplied together, from one window, where a thread has registers for their sums.
both = "1 if itemsize == 4 and stride_w == 2 and tile8 * TILES_M <= 16 else 0"
# A window is kept in TILES_M parts, each with every TILES_M-th position of w; an odd number of positions.
all_positions = "(CONSUMERS + all_d) * (8 + all_h) * (8 + ceil_div(all_w, TILES_M)) * TILES_M // 2 * 2 + 1"
one_positions = "(CONSUMERS + one_d) * (8 + one_h) * (8 + ceil_div(all_w if LAY_OUT or both else one_w, TILES_M)) * TILES_M // 2 * 2 + 1"

# A chunk has as many cells as divide all, or leave a tenth of the last chunk's products for nothing at most: the fewer chunks, the less a
# product waits for. It is smaller where neither two windows of it fit nor the windows of all.
wide_cells = "all_cells if all_cells < CHUNK_CELLS else CHUNK_CELLS if CHUNK_CELLS <= 4 or all_cells % CHUNK_CELLS == 0 else 6 if all_cells % 6 == 0 else 10 if all_cells % 10 == 0 else 14 if all_cells % 14 == 0 else CHUNK_CELLS if 10 * ceil_div(all_cells, CHUNK_CELLS) * CHUNK_CELLS <= 11 * all_cells else 4"
room = "230400 - 3 * 128 * wide_cells * tile8"
wide_fit = "2 * 16 * wide_cells * one_positions <= room or 16 * wide_cells * all_positions * ceil_div(all_cells, wide_cells) <= room"
chunk_cells = "wide_cells if wide_cells <= 4 or wide_fit else 4"
chunks = "ceil_div(all_cells, chunk_cells)"

slab_bytes = "128 * chunk_cells * tile8"
memory = "230400 - 3 * slab_bytes"
# Where all channels of a tile's inputs fit they stay for all classes.
resident = "1 if 16 * chunk_cells * all_positions * chunks <= memory and chunks <= 16 else 0"
# Laid-out windows are those of all classes of w.
reach_w = "all_w if resident or LAY_OUT or both else one_w"
window_d = "CONSUMERS + (all_d if resident else one_d)"
window_h = "8 + (all_h if resident else one_h)"
window_w = "8 + ceil_div(reach_w, TILES_M)"
positions = "all_positions if resident else one_positions"
stage_bytes = "16 * chunk_cells * positions"
stages = "chunks if resident else min(STAGES, memory // stage_bytes)"
# What is laid out: windows along w in parts, one behind another, of so many rows of h; before it a plane of zeros.
cells_h = "tiles_h * 8 + all_h + (0 if resident else one_h)"
plane_cells = "cells_h * tiles_w * TILES_M * window_w"
planes = "batch * input_d * groups * chunks"
zeros = "window_h * window_w"
# Who lays it out: a block has all cells of a chunk in a band of rows of some tiles along w, and a thread a run, a cell's channels at the
# neighbours along w that lie on 16 bytes. Of a row it reads 16 runs at most; an odd number of eights lies from cell to cell.
neighbours = "16 // itemsize"
row_runs = "ceil_div(input_w, neighbours)"
band_tiles = "tiles_w if row_runs <= 16 else min(tiles_w, max(1, ((16 * neighbours - lowest_w % neighbours) // TILES_M - window_w) // 8 + 1))"
band_runs = "min(row_runs, ceil_div(lowest_w % neighbours + (8 * (band_tiles - 1) + window_w) * TILES_M, neighbours))"
most_rows = "max(1, LAID_THREADS // (chunk_cells * band_runs))"
band_rows = "cells_h if input_h <= most_rows else min(cells_h, most_rows)"
read_rows = "min(input_h, band_rows)"
row_bands = "ceil_div(cells_h, band_rows)"
tile_bands = "ceil_div(tiles_w, band_tiles)"
cell_pitch = "ceil_div(read_rows * band_runs * neighbours, 8) // 2 * 16 + 8"
slabs = "min(16, (230400 - stages * stage_bytes) // slab_bytes)"

# A unit of work is a tile and its classes of one (d, h): its rows of taps and as much again as one for its stores. Blocks take whole tiles
# where that makes the longest share an eighth longer at most.
tile_cost = "kernel_d * kernel_h + stride_d * stride_h"
all_tiles = "groups * tiles * channel_tiles"
costs = "all_tiles * tile_cost"
granule = "tile_cost if 8 * ceil_div(all_tiles, multiprocessors) * multiprocessors <= 9 * all_tiles else 1"

[restrictions]
"max(stride_d, stride_h, stride_w) <= 8" = "it goes through the outputs of a block class by class: strides of at most 8"
"tile8 * TILES_M <= 32" = "a thread has no registers for so many sums"
"stages >= 2 - resident and slabs >= 2 and positions * 16 <= 262143" = "a tile of the input and its weights pass the shared memory"
"max(costs, kernel_d * kernel_h * kernel_w * chunks * groups * channel_tiles, planes * chunk_cells * plane_cells) <= 1000000000" = "the volume passes its 32-bit tile offsets"

[cost]
steps = "ceil_div(costs, multiprocessors * granule) * granule * taps * chunks // tile_cost"
products = "64 * CONSUMERS * TILES_M * tile8 * 8 * chunk_cells * (16 // itemsize)"
bytes = "slab_bytes + stage_bytes * (1 if resident else stride_d * stride_h * stride_w) // taps"

[workspace]
packed_weight = "groups * channel_tiles * kernel_d * kernel_h * kernel_w * chunks * slab_bytes // 4"
input_cells = "LAY_OUT * (zeros + planes * chunk_cells * plane_cells) * 4"

[[launch]]
symbol = "convt3d_pack_implicit_gemm_weight"
general = true
packs = "packed_weight"
grid = "groups * channel_tiles * chunks * chunk_cells * ceil_div(tile8 * 8 // itemsize * ceil_div(kernel_d * kernel_h * kernel_w * itemsize, 32), 8)"
block = 256

[[launch]]
symbol = "convt3d_lay_out_channels"
when = "LAY_OUT"
prepares = "input_cells"
grid = "planes * tile_bands * row_bands"
block = "LAID_THREADS"
shared_bytes = "16 * chunk_cells * cell_pitch"

[[launch]]
symbol = "convt3d_fprop_implicit_gemm_wgmma"
grid = "min(multiprocessors, all_tiles * stride_d * stride_h)"
block = "(CONSUMERS + 1) * 128"
shared_bytes = "2048 + stages * stage_bytes + slabs * slab_bytes"
*/
// The transposed convolution as matrix products of Hopper's warpgroups, a residue class of outputs at a time.
//
// Outputs come in blocks of stride_d x stride_h x stride_w; each place in a block is a class with taps of its own, and what these read lies
// at the same offset from every block. GEMM rows are output blocks, columns the channels of a tile, and the depth is input channels x
// taps of the class. In shared memory a row of a product's operand is 16 bytes of channels; eight neighbours along w lie together, and those of the next
// h one row of the window behind. So a product's 64 rows are a patch of 8 x 8 with nothing between, and a tap is another start address.
// A thread block has CONSUMERS such patches along d, one for each warpgroup that multiplies, and TILES_M side by side along w, each with every
// TILES_M-th position, so that a lane has TILES_M neighbours.
//
// It loads the window of inputs that its tile reads, all channels of it where these fit, and multiplies it by the taps of class after
// class; else a chunk of channels of a class at a time. An input is read from L2 about once for each tile of output channels (or class), a
// weight once for each tile.
//
// Windows: a launch of its own lays the input out as they are read (LAY_OUT), and one warp copies planes of them in bulk. Without it, the
// warps that multiply load windows that stay, and three others meanwhile those that do not: they turn the input's channels into cells
// of 16 bytes, eight neighbours along w at a time where these lie on 16 bytes, or copy cells (cp.async) where channels lie together. The
// last warp copies slabs of packed weights in bulk, a tap of a chunk of channels each.
//
// In 16 bits the classes of w come one after another; where two of them make whole runs of the output, the sums of the first are kept, rounded,
// until those of the second are there. In TF32 two are multiplied together, of half as many columns. Half of the runs are stored only while the next products are on their way. Blocks begin their tiles
// with different classes, and in laid-out windows the first warpgroup is ahead of the second, so that not all store at the same time.
#include "convt3d.cuh"
#include "convt3d/core/advanced.cuh"
#include "convt3d/ptx/beside_packing.cuh"
#include "convt3d/core/cell.cuh"
#include "convt3d/core/constant.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/digits.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/integers.cuh"
#include "convt3d/core/layout.cuh"
#include "convt3d/pipe/ring.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/epilogue/streaming_store.cuh"
#include "convt3d/core/unaligned.cuh"
#include "convt3d/core/vector.cuh"
#include "convt3d/core/warp.cuh"
#include "convt3d/ptx/wgmma_rows.cuh"

#if defined(__CUDACC__)
#pragma nv_diag_suppress 128  // loops of a way to store that the output's layout leaves out
#endif

// Patches of 64 output blocks that a warpgroup has (1, 2 or 4); at most so many columns (in TF32 half as many) and cells of a chunk.
#ifndef TILES_M
#define TILES_M 2
#endif
#ifndef COLUMNS
#define COLUMNS 128
#endif
#ifndef CHUNK_CELLS
#define CHUNK_CELLS 8
#endif
// Windows of a chunk in shared memory, where not all of a tile's stay; more of them leave less room for slabs of weights.
#ifndef STAGES
#define STAGES 3
#endif
// Warpgroups that multiply.
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
// Whether a launch of its own lays out the input with its channels together.
#ifndef LAY_OUT
#define LAY_OUT 1
#endif
// Threads of a block that lays out.
#ifndef LAID_THREADS
#define LAID_THREADS 256
#endif

#if defined(__CUDACC__)
#define SUMS (WGMMA_TILES * 4)
#define HELD (STRIDE_W == 2 && (HALVES || WGMMA_TILES * TILES_M <= 16) ? SUMS / 2 : 1)
#else
#define SUMS (128 / TILES_M)
#define HELD (SUMS / 2)
#endif

constexpr int HEADER =
    2048;  // bytes in shared memory: barriers, from 512 on those of slabs passed on, from 640 on taps, from 1024 on units
constexpr bool HALVES = sizeof(scalar_t) == 2;
constexpr int RUN = 2 * TILES_M / (4 / sizeof(scalar_t));  // words of a lane's neighbours along w, of both classes

__device__ inline int of_axis(const int (&values)[3], int axis) {
  return axis == 0 ? values[0] : axis == 1 ? values[1] : values[2];
}

// The taps of one axis that reach place e of every output block: first_tap + j*stride/gcd, which reads the input first - j*dilation/gcd
// ahead of the block, for j in [0, count). `before`: how many taps the places before have.
struct alignas(16) Taps {
  int count, first, before, first_tap;
};

__device__ inline Taps taps_of(const Problem& problem, int axis, int e) {
  const int stride = of_axis(problem.stride, axis), kernel = of_axis(problem.kernel_size, axis),
            dilation = of_axis(problem.dilation, axis);
  const int period = stride / greatest_common_divisor(stride, dilation);
  Taps taps = {0, 0, 0, 0};
  for (int place = 0; place <= e; ++place) {
    taps.before += taps.count;
    int ahead = place + of_axis(problem.padding, axis), tap = 0;
    while (tap < min(period, kernel) && ahead % stride != 0) ++tap, ahead -= dilation;
    taps.first_tap = tap;
    taps.first = ahead / stride;
    taps.count = tap < min(period, kernel) ? (kernel - 1 - tap) / period + 1 : 0;
  }
  return taps;
}

// Four lanes have a word of each of four runs, and then all of one.
__device__ __forceinline__ void trade_words(Words<4>& run, int quarter) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (quarter & bit) != 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if ((c & bit) != 0) continue;
      const unsigned got = __shfl_xor_sync(0xffffffffu, upper ? run.element[c] : run.element[c + bit], bit);
      (upper ? run.element[c] : run.element[c + bit]) = got;
    }
  }
}

// ---- packing: slabs [group][channel tile][class d, h, w][chunk][tap d, h, w] of cells [cell][channel] ----

// Of a warp: whole sectors of 32 bytes are read along the taps, which lie together, and written along the columns.
constexpr int PACKED_TAPS = 2 * VECTOR, PACKED_COLUMNS = 32 / PACKED_TAPS;

extern "C" __global__ void __launch_bounds__(256)
    convt3d_pack_implicit_gemm_weight(const Problem problem, const View<const scalar_t> weight,
                                      accum_t* __restrict__ packed_weight, const int channel_tiles, const int tile8,
                                      const int chunks, const int chunk_cells, const int period_d, const int period_h,
                                      const int period_w) {
  __shared__ Taps classes[3][8];
  let_next_begin();
  const int thread = static_cast<int>(threadIdx.x), columns = tile8 * 8;
  const int kernel_h = problem.kernel_size[1], kernel_w = problem.kernel_size[2],
            taps = problem.kernel_size[0] * kernel_h * kernel_w;
  const int tap_parts = ceil_div(taps, PACKED_TAPS), parts = tap_parts * (columns / PACKED_COLUMNS);
  int rest = static_cast<int>(blockIdx.x);
  const auto digit = [&](int size) {
    const int value = rest % size;
    rest /= size;
    return value;
  };
  const int part = digit(ceil_div(parts, 8)) * 8 + thread / 32;
  const int cell = digit(chunks * chunk_cells), tile = digit(channel_tiles), group = rest;
  const int tap = part % tap_parts * PACKED_TAPS + thread % PACKED_TAPS,
            column = part / tap_parts * PACKED_COLUMNS + thread % 32 / PACKED_TAPS;
  const int place[3] = {tap / kernel_w / kernel_h, tap / kernel_w % kernel_h, tap % kernel_w};
  const int in_channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int ci = cell * VECTOR, co = tile * columns + column;
  scalar_t values[VECTOR];
  load_weight_cell(values, weight, group * in_channels + ci, co, place[0], place[1], place[2],
                   tap < taps && column < columns && co < out_channels ? in_channels - ci : 0);
  if (thread < 24 && thread % 8 < of_axis(problem.stride, thread / 8))
    classes[thread / 8][thread % 8] = taps_of(problem, thread / 8, thread % 8);
  __syncthreads();
  if (tap >= taps || column >= columns) return;
  // The slabs before this tap's class, then those of the class's other chunks and taps.
  const int period[3] = {period_d, period_h, period_w};
  int before = 0, count = 1, number = 0, inner = taps * chunks;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    const int stride = problem.stride[axis], from = (place[axis] * problem.dilation[axis] - problem.padding[axis]) % stride;
    const Taps reached = classes[axis][from < 0 ? from + stride : from];
    inner /= problem.kernel_size[axis];
    before += count * reached.before * inner;
    count *= reached.count;
    number = number * reached.count + (place[axis] - reached.first_tap) / period[axis];
  }
  const index_t slab =
      static_cast<index_t>(group * channel_tiles + tile) * (taps * chunks) + before + cell / chunk_cells * count + number;
  reinterpret_cast<Cell*>(packed_weight)[(slab * chunk_cells + cell % chunk_cells) * columns + column] = cell_of(values);
}

// action(Constant<number>{}), where 0 <= number < COUNT.
template <int COUNT, class Action>
__device__ __forceinline__ void with_number(int number, Action action) {
  if constexpr (COUNT > 1) {
    if (number < COUNT - 1) return with_number<COUNT - 1>(number, action);
  }
  action(Constant<COUNT - 1>{});
}

// ---- loading: a launch that lays the input out as [n, d, h, w][group][chunk][cell], and windows ----

// COUNT cells of one position, of whose channels from the first one on `live` are there.
template <int COUNT, class Store>
__device__ __forceinline__ void load_cells(const scalar_t* source, index_t channel_bytes, int live, Store store) {
  scalar_t values[COUNT][VECTOR];
#pragma unroll
  for (int c = 0; c < COUNT * VECTOR; ++c) {
    values[c / VECTOR][c % VECTOR] = c < live ? *source : to_scalar(accum_t(0));
    if (c + 1 < live) source = advanced(source, channel_bytes);
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) store(i, cell_of(values[i]));
}

// The cells of VECTOR neighbours along w, read as 16 bytes of each channel; the first `live` channels are there.
template <class Store>
__device__ __forceinline__ void turn_rows(const scalar_t* source, index_t channel_bytes, int live, Store store) {
  Cell rows[VECTOR];
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) {
    rows[c] = c < live ? *reinterpret_cast<const Cell*>(source) : Cell{};
    if (c + 1 < live) source = advanced(source, channel_bytes);
  }
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    Cell cell;
#if defined(CONVT3D_BF16) || defined(CONVT3D_FP16)
#pragma unroll
    for (int c = 0; c < VECTOR; c += 2) {
      const unsigned even = rows[c].element[i / 2], odd = rows[c + 1].element[i / 2];
      cell.element[c / 2] = i % 2 == 0 ? (even & 0xffffu) | odd << 16 : even >> 16 | (odd & 0xffff0000u);
    }
#else
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) cell.element[c] = nearest_tf32(__uint_as_float(rows[c].element[i]));
#endif
    store(i, cell);
  }
}

// Whether rows along w are made of whole 16 bytes, on a multiple of 16.
__device__ inline bool takes_rows(const Problem& problem, const View<const scalar_t>& input) {
  return problem.input_size[2] % VECTOR == 0 && made_of_vectors(input, 4, VECTOR);
}

// Channels of one position that lie together, whole cells of them on 16 bytes; places in a volume fit 32 bits.
__device__ inline bool takes_whole_cells(const Problem& problem, const View<const scalar_t>& input) {
  bool whole = input.stride[1] == 1 && input.stride[0] % VECTOR == 0 && problem.in_channels / problem.groups % VECTOR == 0 &&
               reinterpret_cast<unsigned long long>(input.data) % 16 == 0;
  index_t last = 0;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    whole = whole && input.stride[2 + axis] >= 0 && input.stride[2 + axis] % VECTOR == 0;
    last += (problem.input_size[axis] - 1) * input.stride[2 + axis];
  }
  return whole && last <= index_t(2147483647);
}

// Where a block keeps a cell: eight that lie eight apart, as runs and their channels do, are in different banks.
__device__ inline int kept_at(int cell) { return cell ^ (cell / 8 % 8); }

extern "C" __global__ void __launch_bounds__(LAID_THREADS)
    convt3d_lay_out_channels(const Problem problem, const View<const scalar_t> input, accum_t* __restrict__ input_cells,
                             const int chunks, const int chunk_cells, const int tiles_w, const int window_w, const int lowest_h,
                             const int lowest_w, const int cells_h, const int plane_cells, const int zeros,
                             const int band_tiles, const int band_runs, const int band_rows, const int read_rows,
                             const int row_bands, const int tile_bands, const int cell_pitch) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Cell* const kept = reinterpret_cast<Cell*>(shared);  // [cell][row of h][w]
  const int cells = SPECIALIZED(CELLS, chunk_cells), rows_w = SPECIALIZED(WINDOW_W, window_w);
  const int thread = static_cast<int>(threadIdx.x);
  Cell* const laid_out = reinterpret_cast<Cell*>(input_cells);
  let_next_begin();
  if (blockIdx.x == 0) {
#pragma unroll 1
    for (int i = thread; i < zeros; i += LAID_THREADS) laid_out[i] = Cell{};
  }
  Digits index{blockIdx.x};
  const int first_row = index.next(row_bands) * band_rows, first_tile = index.next(tile_bands) * band_tiles,
            plane = index.last();
  const int chunk = index.next(chunks), group = index.next(problem.groups), d = index.next(problem.input_size[0]),
            n = index.last();
  const int rows = min(band_rows, cells_h - first_row), tiles = min(band_tiles, tiles_w - first_tile);
  // What is read: whole runs of rows, from the first that this band reaches in the input.
  const int size_h = problem.input_size[1], size_w = problem.input_size[2], width = band_runs * VECTOR;
  const int first_h = first_row + lowest_h, first_w = first_tile * 8 * TILES_M + lowest_w;
  const int read_h = max(first_h, 0), read_w = max(first_w & -VECTOR, 0);
  const int end_h = min(size_h, first_h + rows), end_w = min(size_w, first_w + ((tiles - 1) * 8 + rows_w) * TILES_M);
  const int in_channels = problem.in_channels / problem.groups, channel = chunk * cells * VECTOR;
  const index_t channel_bytes = input.stride[1] * static_cast<index_t>(sizeof(scalar_t));
  // The channels from a cell on that are there, and the first of them.
  const auto live_at = [&](int cell, int row, int w) {
    return read_h + row < end_h && read_w + w < end_w ? in_channels - channel - cell * VECTOR : 0;
  };
  const auto source_at = [&](int cell, int row, int w) {
    return live_at(cell, row, w) > 0 ? input.at(n, group * in_channels + channel + cell * VECTOR, d, read_h + row, read_w + w)
                                     : input.data;
  };
  if (takes_rows(problem, input)) {
#pragma unroll 1
    for (int item = thread; item < cells * read_rows * band_runs; item += LAID_THREADS) {
      Digits place{static_cast<unsigned>(item)};
      const int w = place.next(band_runs) * VECTOR, row = place.next(read_rows), cell = place.last();
      turn_rows(source_at(cell, row, w), channel_bytes, live_at(cell, row, w),
                [&](int i, const Cell& value) { kept[kept_at(cell * cell_pitch + row * width + w + i)] = value; });
    }
  } else if (takes_whole_cells(problem, input)) {
    // Neighbouring threads read neighbouring cells.
#pragma unroll 4
    for (int item = thread; item < cells * read_rows * width; item += LAID_THREADS) {
      const int cell = item % cells, place = item / cells, row = place / width, w = place % width;
      const Cell loaded = live_at(cell, row, w) > 0 ? *reinterpret_cast<const Cell*>(source_at(cell, row, w)) : Cell{};
      scalar_t values[VECTOR];
      memcpy(values, &loaded, sizeof values);
      kept[kept_at(cell * cell_pitch + place)] = cell_of(values);
    }
  } else {
#pragma unroll 1
    for (int item = thread; item < cells / 2 * read_rows * width; item += LAID_THREADS) {
      Digits place{static_cast<unsigned>(item)};
      const int w = place.next(width), row = place.next(read_rows), cell = place.last() * 2;
      load_cells<2>(source_at(cell, row, w), channel_bytes, live_at(cell, row, w),
                    [&](int i, const Cell& value) { kept[kept_at((cell + i) * cell_pitch + row * width + w)] = value; });
    }
  }
  __syncthreads();  // all cells of the band are kept
  for (int item = thread; item < tiles * TILES_M * rows * rows_w; item += LAID_THREADS) {
    Digits place{static_cast<unsigned>(item)};
    const int position = place.next(rows_w), row = place.next(rows), part = place.next(TILES_M), tile = place.last();
    const int w = first_w + (tile * 8 + position) * TILES_M + part, h = first_h + row;
    const bool inside =
        static_cast<unsigned>(h) < static_cast<unsigned>(size_h) && static_cast<unsigned>(w) < static_cast<unsigned>(size_w);
    const int from = inside ? (h - read_h) * width + w - read_w : 0;
    Cell* const target = laid_out + zeros + static_cast<index_t>(plane) * cells * plane_cells +
                         (((first_tile + tile) * TILES_M + part) * cells_h + first_row + row) * rows_w + position;
#pragma unroll
    for (int cell = 0; cell < cells; ++cell) {
      const Cell value = kept[kept_at(cell * cell_pitch + from)];
      target[cell * plane_cells] = inside ? value : Cell{};
    }
  }
  if (thread == 0) wait_for_packing();  // so that who waits for this launch waits for both
}

// ---- the product ----

// A unit of work: the classes of one (d, h) of a tile, for a tile of output channels. (n, d, h, w) is the tile's first output block.
struct alignas(16) Unit {
  int n, d, h, w;
  int group, channel_tile, ed, eh;
};

// The input at which a window begins.
struct Corner {
  int n, d, h, w;
};

// Keeps what is done with a sum behind the wait for the products that make it.
__device__ __forceinline__ void keep_here(float& sum) {
#if defined(__CUDACC__)
  asm volatile("" : "+f"(sum)::"memory");
#endif
}

extern "C" __global__ void __launch_bounds__((CONSUMERS + 1) * 128, 1) convt3d_fprop_implicit_gemm_wgmma(
    const Problem problem, const View<const scalar_t> input, const accum_t* __restrict__ packed_weight,
    const accum_t* __restrict__ input_cells, const scalar_t* __restrict__ bias, View<scalar_t> output, const int channel_tiles,
    const int tile8, const int chunks, const int chunk_cells, const int tile_w, const int tiles_d, const int tiles_h,
    const int tiles_w, const int lowest_d, const int lowest_h, const int lowest_w, const int apart_d, const int apart_h,
    const int apart_w, const int resident, const int window_d, const int window_h, const int window_w, const int positions,
    const int stage_bytes, const int stages, const int slabs, const int slab_bytes, const int tile_cost, const int granule,
    const int costs, const int cells_h, const int plane_cells, const int zeros) {
  lay_out(problem, output, OUTPUT_LAYOUT ? SPECIALIZED(OUTPUT_LAYOUT, layout_of(problem, output)) : 0);
  const Epilogue epilogue{bias};
  extern __shared__ __align__(1024) unsigned char shared[];
  const int cells = SPECIALIZED(CELLS, chunk_cells), columns8 = SPECIALIZED(WGMMA_TILES, tile8);
  const int rows_h = SPECIALIZED(WINDOW_H, window_h), rows_w = SPECIALIZED(WINDOW_W, window_w);
  const int stride_w = SPECIALIZED(STRIDE_W, problem.stride[2]);
  const bool stays = SPECIALIZED(RESIDENT, resident);
  const bool both = !HALVES && stride_w == 2 && columns8 * TILES_M <= 16;  // classes of w at once
  const int at_once = both ? 2 : 1;
  const int in_channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int thread = static_cast<int>(threadIdx.x), warp = of_warp(thread / 32), lane = thread % 32;
  const unsigned base = shared_address(shared), stage_base = base + HEADER,
                 slab_base = stage_base + static_cast<unsigned>(stages * stage_bytes);
  Ring stage(base, stages), slab(base + 16 * static_cast<unsigned>(stages), slabs);
  Taps* const taps = reinterpret_cast<Taps*>(shared + 640);  // [axis][place in an output block]
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
    if (warp == axis + 1 && lane < problem.stride[axis]) taps[axis * 8 + lane] = taps_of(problem, axis, lane);
  }
  if (thread == 0) {
    for (int i = 0; i < stages + slabs; ++i) {
      const unsigned full = base + static_cast<unsigned>(i < stages ? i : i + stages) * 8;
      mbarrier_init(full, LAY_OUT || i >= stages ? 1 : stays ? CONSUMERS * 4 : 3);
      mbarrier_init(full + static_cast<unsigned>(i < stages ? stages : slabs) * 8, CONSUMERS * 4);
    }
    for (int i = 0; i < slabs; ++i) mbarrier_init(base + 512 + static_cast<unsigned>(i) * 8, 1);
    mbarrier_fence_init();
  }
  __syncthreads();

  // Load a chunk of the window that begins at an input, by so many warps of which this is number `me`. A warp has 32 positions at a time,
  // and a thread BATCH cells on their way.
  const auto load_window = [&](int slot, Corner from, int group, int chunk, int me, int warps) {
    constexpr int BATCH = RESIDENT ? 4 : 2;
    const int size_d = problem.input_size[0], size_h = problem.input_size[1], size_w = problem.input_size[2];
    const int width = rows_w * TILES_M, count = window_d * rows_h * width,
              lane_now = static_cast<int>(computed_anew(threadIdx.x)) % 32;
    Cell* const target = reinterpret_cast<Cell*>(shared + HEADER + slot * stage_bytes);
    const bool whole_cells = HALVES && takes_whole_cells(problem, input);  // TF32 is rounded on its way
    const scalar_t* const volume = input.at(from.n, group * in_channels + chunk * cells * VECTOR, 0, 0, 0);
    const int live = in_channels - chunk * cells * VECTOR;
    const int parts = whole_cells ? 1 : ceil_div(cells, BATCH);
    // Where a position is kept: those of w come in turns from TILES_M parts of the window.
    const auto place_of = [&](int position) { return position % TILES_M * (window_d * rows_h * rows_w) + position / TILES_M; };
    const bool turns = stays && !whole_cells && takes_rows(problem, input);
    if (turns) {
      // A lane turns a cell of channels of VECTOR neighbours along w.
      const int first_w = from.w & -VECTOR, runs = ceil_div(from.w - first_w + width, VECTOR), rows = window_d * rows_h;
#pragma unroll 1
      for (int item = me * 32 + lane_now; item < cells * rows * runs; item += warps * 32) {
        const int row = item / runs % rows, cell = item / runs / rows;
        const int w = first_w + item % runs * VECTOR, h = from.h + row % rows_h, d = from.d + row / rows_h;
        const bool inside = static_cast<unsigned>(d) < static_cast<unsigned>(size_d) &&
                            static_cast<unsigned>(h) < static_cast<unsigned>(size_h) &&
                            static_cast<unsigned>(w) < static_cast<unsigned>(size_w) && cell * VECTOR < live;
        const index_t place = d * input.stride[2] + h * input.stride[3] + w + cell * VECTOR * input.stride[1];
        turn_rows(inside ? volume + place : input.data, input.stride[1] * static_cast<index_t>(sizeof(scalar_t)),
                  inside ? live - cell * VECTOR : 0, [&](int i, const Cell& value) {
                    const int kept = w + i - from.w;
                    if (kept >= 0 && kept < width) target[cell * positions + place_of(row * width + kept)] = value;
                  });
      }
    }
#pragma unroll 1
    for (int item = me; !turns && item * 32 < ceil_div(count, 32) * 32 * parts; item += warps) {
      const int first = item / parts * 32, position = first + lane_now, part = item % parts;
      const int w = from.w + position % width, h = from.h + position / width % rows_h, d = from.d + position / width / rows_h;
      const bool inside = position < count && static_cast<unsigned>(d) < static_cast<unsigned>(size_d) &&
                          static_cast<unsigned>(h) < static_cast<unsigned>(size_h) &&
                          static_cast<unsigned>(w) < static_cast<unsigned>(size_w);
      if (whole_cells) {
        // Neighbouring lanes copy neighbouring cells; places are counted in cells.
        const index_t at = (d * input.stride[2] + h * input.stride[3] + w * input.stride[4]) / VECTOR;
        const int place = inside ? static_cast<int>(at) : -1;
#pragma unroll(BATCH == 4 ? 4 : 2)
        for (int i = 0; i < cells; ++i) {
          const int owner = (i * 32 + lane_now) / cells, cell = (i * 32 + lane_now) % cells;
          const int owned = __shfl_sync(0xffffffffu, place, owner);
          const bool copied = owned >= 0 && cell * VECTOR < live;
          const Cell* const source = reinterpret_cast<const Cell*>(volume) + (copied ? owned + cell : 0);
          if (first + owner >= count) continue;
          cp_async<16>(shared_address(target + cell * positions + place_of(first + owner)), source, copied ? 16 : 0);
        }
      } else if (position < count) {
        const int cell = part * BATCH, ahead = cell * VECTOR, kept = place_of(position);
        const index_t place = d * input.stride[2] + h * input.stride[3] + w * input.stride[4] + ahead * input.stride[1];
        load_cells<BATCH>(inside ? volume + place : input.data, input.stride[1] * static_cast<index_t>(sizeof(scalar_t)),
                          inside ? live - ahead : 0, [&](int i, const Cell& value) {
                            if (cells % BATCH == 0 || cell + i < cells) target[(cell + i) * positions + kept] = value;
                          });
      }
    }
    cp_async_wait_all();
    fence_async();
    __syncwarp();
  };
  // Copy a chunk of so many planes of a window that has been laid out, a plane of a cell and a part at a time.
  const auto copy_window = [&](const Ring& at, Corner from, int planes, int group, int chunk) {
    const int plane = rows_h * rows_w, copies = cells * TILES_M * planes;
    const unsigned bytes = static_cast<unsigned>(plane) * 16;
    if (lane == 0) mbarrier_arrive_expect(at.full(), static_cast<unsigned>(copies) * bytes);
    __syncwarp();
    for (int item = lane; item < copies; item += 32) {
      const int ahead = item % planes, part = item / planes % TILES_M, cell = item / planes / TILES_M, d = from.d + ahead;
      const Cell* source = reinterpret_cast<const Cell*>(input_cells);
      if (static_cast<unsigned>(d) < static_cast<unsigned>(problem.input_size[0])) {
        const int number = ((from.n * problem.input_size[0] + d) * problem.groups + group) * chunks + chunk;
        source += zeros + (static_cast<index_t>(number) * cells + cell) * plane_cells +
                  (((from.w - lowest_w) / 8 + part) * cells_h + from.h - lowest_h) * rows_w;
      }
      bulk_copy(stage_base +
                    static_cast<unsigned>(at.slot * stage_bytes + (cell * positions + (part * window_d + ahead) * plane) * 16),
                source, bytes, at.full());
    }
  };
  // Whole tiles are taken in turns, so that blocks have neighbours along w at the same time, whose outputs lie together in memory; but a
  // window that stays for several tiles of channels is not left. Else a block owns the units that begin in its share of what all cost.
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int classes = problem.stride[0] * problem.stride[1], tile_row = channel_tiles * tiles_w;
  const bool in_turns = granule > 1 && (channel_tiles == 1 || !stays);
  const auto first_unit = [&](int number) {
    const int granules = costs / granule;
    const int from = (granules / blocks * number + min(number, granules % blocks)) * granule;
    int rest = from % tile_cost, unit = 0;
    for (int ed = 0, eh = 0; rest > 0; ++unit) {
      rest -= taps[ed].count * taps[8 + eh].count + 1;
      if (++eh == problem.stride[1]) eh = 0, ++ed;
    }
    return from / tile_cost * problem.stride[0] * problem.stride[1] + unit;
  };
  const int either = first_unit(block + lane % 2);
  const int first_number = in_turns ? block * classes : of_warp(either);
  const int count =
      in_turns ? ceil_div(costs / granule - block, blocks) * classes : __shfl_sync(0xffffffffu, either, 1) - first_number;
  // Blocks of whole tiles begin these with different classes, each row of tiles with another: else all would store at the same time.
  const int turn = in_turns ? block / tile_row : granule > 1 ? block : 0;
  const int first_eh = of_warp(turn % problem.stride[1]), first_ed = of_warp(turn / problem.stride[1] % problem.stride[0]);
  // Each warp keeps its unit in shared memory, and how far it is to its next tile.
  Unit* const unit = reinterpret_cast<Unit*>(shared + 1024) + warp * 2;
  if (lane < 2) {
    int rest = lane == 0 ? first_number : (in_turns ? blocks : 1) * classes;
    Unit own;
    own.eh = (lane == 0 ? first_eh : 0) + rest % problem.stride[1], rest /= problem.stride[1];
    own.ed = (lane == 0 ? first_ed : 0) + rest % problem.stride[0], rest /= problem.stride[0];
    own.channel_tile = rest % channel_tiles, rest /= channel_tiles;
    own.w = rest % tiles_w * tile_w, rest /= tiles_w;
    own.h = rest % tiles_h * 8, rest /= tiles_h;
    own.d = rest % tiles_d * CONSUMERS, rest /= tiles_d;
    own.n = rest % problem.batch, own.group = rest / problem.batch;
    unit[lane] = own;
  }
  __syncwarp();
  const auto next_unit = [&] {
    __syncwarp();  // all lanes have read what changes
    if (lane == 0) {
      // The classes of a tile come around from where they began.
      if (++unit->eh == problem.stride[1]) unit->eh = 0;
      if (unit->eh == first_eh && ++unit->ed == problem.stride[0]) unit->ed = 0;
      if (unit->eh == first_eh && unit->ed == first_ed) {
        int carry = 0;
        const auto add = [&carry](int& digit, int ahead, int one, int size) {
          digit += ahead + carry * one;
          carry = digit >= size ? 1 : 0;
          digit -= carry * size;
        };
        const Unit ahead = unit[1];
        add(unit->channel_tile, ahead.channel_tile, 1, channel_tiles);
        add(unit->w, ahead.w, tile_w, tiles_w * tile_w);
        add(unit->h, ahead.h, 8, tiles_h * 8);
        add(unit->d, ahead.d, CONSUMERS, tiles_d * CONSUMERS);
        add(unit->n, ahead.n, 1, problem.batch);
        unit->group += ahead.group + carry;
      }
    }
    __syncwarp();
  };
  const auto lowest = [&](int axis, int e) {
    if (stays || ((LAY_OUT || both) && axis == 2)) return axis == 0 ? lowest_d : axis == 1 ? lowest_h : lowest_w;
    const Taps own = taps[axis * 8 + e];
    return own.first - (own.count - 1) * (axis == 0 ? apart_d : axis == 1 ? apart_h : apart_w);
  };
  // Where the window of a tile begins, for all classes or for one.
  const auto window_of = [&](int ew) {
    return Corner{unit->n, unit->d + lowest(0, unit->ed), unit->h + lowest(1, unit->eh), unit->w + lowest(2, ew)};
  };
  const auto begins_tile = [&] { return unit->channel_tile == 0 && unit->ed == first_ed && unit->eh == first_eh; };
  const auto ends_tile = [&] {
    return unit->channel_tile + 1 == channel_tiles && (unit->ed + 1) % problem.stride[0] == first_ed &&
           (unit->eh + 1) % problem.stride[1] == first_eh;
  };
  // Of the two classes of w the one with more taps comes first: until it is done the outputs of the last ones are stored.
  const bool swapped = !both && stride_w == 2 && taps[17].count > taps[16].count;
  const auto class_w = [&](int turn) { return swapped ? 1 - turn : turn; };
  const auto row_taps = [&] { return taps[unit->ed].count * taps[8 + unit->eh].count; };
  if (warp >= CONSUMERS * 4) {
#if CONSUMERS == 2
    give_registers<40>();
#endif
    if (warp < CONSUMERS * 4 + 3) {
      if (LAY_OUT) wait_for_packing();
      const bool loads = LAY_OUT ? warp == CONSUMERS * 4 : !stays;
      for (int i = 0; loads && i < count; ++i, next_unit()) {
        if (stays && i > 0 && !begins_tile()) continue;
        for (int turn = 0; turn < (stays || both ? 1 : stride_w); ++turn) {
          const int ew = class_w(turn);
          if (!stays && row_taps() * (both ? 1 : taps[16 + ew].count) == 0) continue;
          for (int chunk = 0; chunk < chunks; ++chunk, stage.advance()) {
            mbarrier_wait_patiently(stage.empty(), stage.parity ^ 1u);
            if (LAY_OUT) {
              copy_window(stage, window_of(ew), stays ? window_d : CONSUMERS + (taps[unit->ed].count - 1) * apart_d,
                          unit->group, chunk);
              continue;
            }
            load_window(stage.slot, window_of(ew), unit->group, chunk, warp - CONSUMERS * 4, 3);
            if (lane == 0) mbarrier_arrive(stage.full());
          }
        }
      }
    } else {
      const int kernel_h = problem.kernel_size[1], kernel_w = problem.kernel_size[2];
      if (lane == 0) wait_for_packing();
      for (int i = 0; i < count; ++i, next_unit()) {
        if (lane != 0) continue;
        // The classes of w of a unit lie one behind another.
        const int rows = (unit->group * channel_tiles + unit->channel_tile) * problem.kernel_size[0] * kernel_h +
                         taps[unit->ed].before * kernel_h + taps[unit->ed].count * taps[8 + unit->eh].before;
        for (int turn = 0; turn < stride_w * chunks; ++turn) {
          const int chunk = turn / at_once % chunks, ew = both ? turn % 2 : class_w(turn / chunks),
                    own = row_taps() * taps[16 + ew].count;
          const int first = (rows * kernel_w + row_taps() * taps[16 + ew].before) * chunks + chunk * own;
          const unsigned char* source =
              reinterpret_cast<const unsigned char*>(packed_weight) + static_cast<index_t>(first) * slab_bytes;
          for (int left = own; left > 0; --left, source += slab_bytes) {
            mbarrier_wait_patiently(slab.empty(), slab.parity ^ 1u);
            mbarrier_arrive_expect(slab.full(), static_cast<unsigned>(slab_bytes));
            bulk_copy(slab_base + static_cast<unsigned>(slab.slot * slab_bytes), source, static_cast<unsigned>(slab_bytes),
                      slab.full());
            slab.advance();
          }
        }
      }
    }
    return;
  }

#if CONSUMERS == 2
  take_registers<232>();
#endif
  float sums[HALVES ? TILES_M : 2 * TILES_M][SUMS];  // of each patch, then of those of the second class
  const int warpgroup = warp / 4;
  // In laid-out windows the first warpgroup is a slab ahead of the others, so that not all end a class at the same time.
  const bool apart = LAY_OUT && CONSUMERS > 1 && slabs >= 3, leads = apart && warpgroup == 0, follows = apart && warpgroup > 0;
  // The outputs of a lane's neighbours are whole runs of their row, or eight channels neighbours in memory.
  const bool are_runs = stride_w == 2 && problem.output_size[2] % (2 * TILES_M) == 0 && made_of_vectors(output, 4, 2 * TILES_M);
  const bool are_eights = out_channels % 8 == 0 && made_of_vectors(output, 1, 8);
  [[maybe_unused]] const bool whole_runs = WHOLE_RUNS ? SPECIALIZED(WHOLE_RUNS == 2, are_runs) : are_runs;
  [[maybe_unused]] const bool whole_channels = WHOLE_CHANNELS ? SPECIALIZED(WHOLE_CHANNELS == 2, are_eights) : are_eights;
  const unsigned stage_k = static_cast<unsigned>(positions), slab_k = static_cast<unsigned>(columns8) * 8;  // in 16 bytes
  const unsigned first_stage = wgmma_operand(stage_base, stage_k * 16) + static_cast<unsigned>(warpgroup * rows_h * rows_w);
  const unsigned first_slab = wgmma_operand(slab_base, slab_k * 16);

  // In 16 bits the sums of the first class of w, rounded; then, until products are on their way again, half of the runs that both classes
  // make: in how many pieces these are yet to be stored, and where.
  unsigned held[RUN][HELD] = {};
  constexpr int LATE = HELD > 1 ? SUMS / 8 : 0, LATE_PIECES = HALVES ? 8 : 4, PIECE = (LATE + LATE_PIECES - 1) / LATE_PIECES;
  int late_pieces = 0, late_left = 0;
  scalar_t* late_targets[2] = {nullptr, nullptr};
  const auto store_run = [&](scalar_t* target, const Words<RUN>& run) {
    store_streaming(reinterpret_cast<Words<RUN>*>(target), run);
  };
  const auto store_piece = [&](auto piece) {
    constexpr int FIRST = decltype(piece)::value * PIECE;
#pragma unroll
    for (int t = FIRST; t < FIRST + PIECE; ++t) {
      if (t >= LATE || SUMS / 4 - LATE + t >= columns8) break;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          Words<RUN> run;
#pragma unroll
          for (int word = 0; word < RUN; ++word) run.element[word] = held[word][(t * 4 + r * 2 + c) % HELD];
          if (late_targets[r] != nullptr && (SPECIALIZED(WHOLE_TILES, false) || c < late_left))
            store_run(late_targets[r] + (c == 0 ? 0 : output.stride[1]), run);
        }
        if (late_targets[r] != nullptr)
          late_targets[r] = advanced(late_targets[r], 8 * output.stride[1] * static_cast<index_t>(sizeof(scalar_t)));
      }
      late_left -= 8;
    }
  };
  const auto store_late = [&] { with_number<LATE_PIECES>(LATE_PIECES - late_pieces--, store_piece); };

  for (int i = 0; i < count; ++i) {
    if (stays && !LAY_OUT && (i == 0 || begins_tile())) {
      Ring fresh = stage;
      for (int chunk = 0; chunk < chunks; ++chunk, fresh.advance()) {
        mbarrier_wait(fresh.empty(), fresh.parity ^ 1u);
        load_window(fresh.slot, window_of(0), unit->group, chunk, warp, CONSUMERS * 4);
        if (lane == 0) mbarrier_arrive(fresh.full());
      }
    }
    const Taps taps_d = taps[unit->ed], taps_h = taps[8 + unit->eh];
    const int count_d = of_warp(taps_d.count), count_h = of_warp(taps_h.count);
    const bool last = of_warp(i + 1 == count || ends_tile()) != 0;
    const unsigned origin =
        first_stage + static_cast<unsigned>(
                          of_warp((taps_d.first - lowest(0, unit->ed)) * rows_h + taps_h.first - lowest(1, unit->eh)) * rows_w);
#pragma unroll 1
    for (int turn = 0; turn < stride_w; turn += at_once) {
      const int ew = class_w(turn);
      const bool releases = !stays || (last && turn + at_once == stride_w);
      int counts_w[2] = {}, aheads_w[2] = {};
#pragma unroll
      for (int e = 0; e < at_once; ++e) {
        counts_w[e] = of_warp(taps[16 + ew + e].count);
        aheads_w[e] = of_warp(taps[16 + ew + e].first - lowest(2, ew));
      }
      const bool has_taps = count_d * count_h * (counts_w[0] + counts_w[1]) > 0;
#pragma unroll
      for (int s = 0; s < at_once * TILES_M * SUMS; ++s) sums[s / SUMS][s % SUMS] = 0.0f;
      Ring at = stage;
      unsigned read_slab = 0, read_stage = 0;  // what the products before the newest ones have read is given back
      Ring passed = slab;
      bool keeps = false;  // the newest slab to itself
      const auto pass = [&] {
        if (keeps) {
          if (thread == 0) mbarrier_arrive(base + 512 + static_cast<unsigned>(passed.slot) * 8);
          passed.advance();
        }
        keeps = true;
      };
      const auto give_back = [&](unsigned& read) {
        if (lane == 0 && read != 0) mbarrier_arrive(read);
        read = 0;
      };
      for (int chunk = 0; (has_taps || (stays && releases)) && chunk < chunks; ++chunk) {
        mbarrier_wait(at.full(), at.parity);
#pragma unroll
        for (int e = 0; e < at_once; ++e) {
          unsigned plane = origin + (static_cast<unsigned>(at.slot * stage_bytes) >> 4);
          for (int jd = 0; has_taps && jd < count_d; ++jd, plane -= static_cast<unsigned>(apart_d * rows_h * rows_w)) {
            unsigned row = plane;
            for (int jh = 0; jh < count_h; ++jh, row -= static_cast<unsigned>(apart_h * rows_w)) {
              for (int jw = 0, ahead = aheads_w[e]; jw < counts_w[e]; ++jw, ahead -= apart_w) {
                if (follows) mbarrier_wait(base + 512 + static_cast<unsigned>(slab.slot) * 8, slab.parity);
                mbarrier_wait(slab.full(), slab.parity);
                if (leads) pass();
                wgmma_fence();
                const unsigned b = first_slab + (static_cast<unsigned>(slab.slot * slab_bytes) >> 4);
                unsigned a[TILES_M];
#pragma unroll
                for (int m = 0; m < TILES_M; ++m) {
                  a[m] =
                      row + static_cast<unsigned>((ahead + m) % TILES_M * (window_d * rows_h * rows_w) + (ahead + m) / TILES_M);
                }
#pragma unroll
                for (int k = 0; k < cells / 2; ++k) {
#pragma unroll
                  for (int m = 0; m < TILES_M; ++m) {
                    wgmma_rows(sums[e * TILES_M + m], a[m], static_cast<unsigned>(rows_w) * 16,
                               b + static_cast<unsigned>(k) * 2 * slab_k, 1u, columns8 * 8);
                    a[m] += 2 * stage_k;
                  }
                }
                wgmma_commit();
                if (late_pieces > 0) store_late();
                wgmma_wait<1>();
                give_back(read_stage);
                give_back(read_slab);
                read_slab = slab.empty();
                slab.advance();
              }
            }
          }
        }
        // At the end of a class, and of a chunk whose stage is given back: the second keeps it until it has had all slabs.
        if (keeps && (chunk + 1 == chunks || releases)) pass(), keeps = false;
        if (!has_taps) __syncwarp();  // all lanes have seen it full
        give_back(read_stage);
        if (releases) read_stage = at.empty();
        at.advance();
      }
      // Of a patch's rows a lane has number lane / 4 of w in two neighbouring rows of h, and of eight channels two.
      const int group = unit->group, own = static_cast<int>(computed_anew(threadIdx.x)) % 32;
      const int w = (unit->w + own / 4 * TILES_M) * stride_w;
      const index_t ahead = 8 * output.stride[1] * static_cast<index_t>(sizeof(scalar_t));
      const int first_channel = unit->channel_tile * columns8 * 8 + own % 4 * 2;
      const int d = (unit->d + warpgroup) * problem.stride[0] + unit->ed,
                h = (unit->h + warp % 4 * 2) * problem.stride[1] + unit->eh;
      const bool live[2] = {d < problem.output_size[0] && h < problem.output_size[1],
                            d < problem.output_size[0] && h + problem.stride[1] < problem.output_size[1]};
      scalar_t* const corner = output.at(unit->n, group * out_channels + first_channel, d, h, w);
      if (turn + at_once == stride_w) next_unit();
      wgmma_wait<0>();
      __syncwarp();
      give_back(read_stage);
      give_back(read_slab);
      if (releases && (stays || has_taps)) stage = at;
      if constexpr (HELD > 1) {
        while (late_pieces > 0) store_late();
      }
#if defined(CONVT3D_TF32)
#pragma unroll
      for (int s = 0; s < at_once * TILES_M * SUMS; ++s) keep_here(sums[s / SUMS][s % SUMS]);
      const bool in_runs = both && whole_runs;
      const auto start_of = [&](int channel) {
        return epilogue.start(group * out_channels + channel, SPECIALIZED(WHOLE_TILES, false) || channel < out_channels);
      };
#else
      const bool in_runs = whole_runs;
      if (epilogue.changes_sums()) {
#pragma unroll
        for (int j = 0; j < SUMS / 4; ++j) {
          if (j >= columns8) break;
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int channel = first_channel + j * 8 + c;
            const bool there = SPECIALIZED(WHOLE_TILES, false) || channel < out_channels;
            const float start = there ? epilogue.start(group * out_channels + channel) : 0.0f;
#pragma unroll
            for (int i = 0; i < 2 * TILES_M; ++i) sums[i / 2][j * 4 + i % 2 * 2 + c] += start;
          }
        }
      }
      // A word of two channels, in row r of patch m.
      const auto rounded = [&](int m, int j, int r) {
        const Vector<2> pair = epilogue.finish_pair(sums[m][j * 4 + r * 2], sums[m][j * 4 + r * 2 + 1]);
        unsigned word;
        memcpy(&word, &pair, sizeof word);
        return word;
      };
      if (HELD > 1 && in_runs && turn == 0) {
#pragma unroll
        for (int word = 0; word < TILES_M * SUMS / 2; ++word) {
          const int m = word / (SUMS / 2), at = word % (SUMS / 2);
          held[m][at % HELD] = rounded(m, at / 2, at % 2);
        }
        continue;
      }
#endif
      scalar_t* targets[2] = {corner,
                              advanced(corner, problem.stride[1] * output.stride[3] * static_cast<index_t>(sizeof(scalar_t)))};
      if constexpr (HELD > 1) {
        if (in_runs) {
#pragma unroll
          for (int j = 0; j < SUMS / 4; ++j) {
            if (j >= columns8) break;
            const int left = SPECIALIZED(WHOLE_TILES, false) ? 2 : out_channels - first_channel - j * 8;
#if defined(CONVT3D_TF32)
            const float start[2] = {start_of(first_channel + j * 8), start_of(first_channel + j * 8 + 1)};
#endif
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              Words<RUN> run[2];
#if defined(CONVT3D_TF32)
#pragma unroll
              for (int word = 0; word < 2 * RUN; ++word) {
                const int c = word / RUN, m = word % RUN / 2, e = word % 2;
                run[c].element[word % RUN] =
                    __float_as_uint(epilogue.finish(sums[e * (at_once - 1) * TILES_M + m][j * 4 + r * 2 + c], start[c]));
              }
#else
#pragma unroll
              for (int m = 0; m < TILES_M; ++m) {
                const unsigned before = held[m][j * 2 + r], now = rounded(m, j, r);
                run[0].element[m] = __byte_perm(before, now, swapped ? 0x1054u : 0x5410u);
                run[1].element[m] = __byte_perm(before, now, swapped ? 0x3276u : 0x7632u);
              }
#endif
              if (j >= SUMS / 4 - LATE) {
#pragma unroll
                for (int word = 0; word < RUN; ++word) {
                  const int at = (j - (SUMS / 4 - LATE)) * 4 + r * 2;
                  held[word][at % HELD] = run[0].element[word], held[word][(at + 1) % HELD] = run[1].element[word];
                }
                continue;
              }
              const bool stored = live[r] && w < problem.output_size[2];
              if (stored && left > 0) store_run(targets[r], run[0]);
              if (stored && left > 1) store_run(targets[r] + output.stride[1], run[1]);
              targets[r] = advanced(targets[r], ahead);
            }
          }
          late_pieces = LATE_PIECES, late_left = out_channels - first_channel - (SUMS / 4 - LATE) * 8;
#pragma unroll
          for (int r = 0; r < 2; ++r) late_targets[r] = live[r] && w < problem.output_size[2] ? targets[r] : nullptr;
          continue;
        }
      }
#if defined(CONVT3D_TF32)
      const bool channel_pairs = out_channels % 2 == 0 && made_of_vectors(output, 1, 2);
#pragma unroll
      for (int j = 0; j < SUMS / 4; ++j) {
        if (j >= columns8) break;
        const int left = SPECIALIZED(WHOLE_TILES, false) ? 2 : out_channels - first_channel - j * 8;
        const float start[2] = {start_of(first_channel + j * 8), start_of(first_channel + j * 8 + 1)};
#pragma unroll
        for (int i = 0; i < at_once * 2 * TILES_M; ++i) {
          const int r = i % 2, ahead_w = i / 2 % TILES_M * stride_w + ew + i / 2 / TILES_M;
          scalar_t* const y = targets[r] + ahead_w * output.stride[4];
          Words<2> pair;
#pragma unroll
          for (int c = 0; c < 2; ++c)
            pair.element[c] = __float_as_uint(epilogue.finish(sums[i / 2][j * 4 + r * 2 + c], start[c]));
          const bool stored = live[r] && w + ahead_w < problem.output_size[2];
          if (channel_pairs) {
            if (stored && left > 0) store_streaming(reinterpret_cast<Words<2>*>(y), pair);
            continue;
          }
          if (stored && left > 0) *y = __uint_as_float(pair.element[0]);
          if (stored && left > 1) y[output.stride[1]] = __uint_as_float(pair.element[1]);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) targets[r] = advanced(targets[r], ahead);
      }
#else
      unsigned words[TILES_M][SUMS / 2];
#pragma unroll
      for (int word = 0; word < TILES_M * SUMS / 2; ++word) {
        const int m = word / (SUMS / 2), at = word % (SUMS / 2);
        words[m][at] = rounded(m, at / 2, at % 2);
      }
      forget_memory();
      // Of four times eight channels a lane has a pair each; four lanes trade them, so that each has all of one.
      const int quarter = own % 4;
      if (SPECIALIZED(CHANNEL_RUNS, 0)) {
#pragma unroll
        for (int i = 0; i < 2 * TILES_M; ++i) {
          const auto traded = [&](int j) {
            Words<4> run;
#pragma unroll
            for (int c = 0; c < 4; ++c) run.element[c] = j + c < SUMS / 4 ? words[i / 2][(j + c) % (SUMS / 4) * 2 + i % 2] : 0u;
            trade_words(run, quarter);
            return run;
          };
          const int ahead_w = i / 2 * stride_w + ew, column = quarter * 8;
          scalar_t* y = targets[i % 2] + (ahead_w * output.stride[4] + quarter * 6);  // its pair of channels is 2 * quarter
          const bool stored = live[i % 2] && w + ahead_w < problem.output_size[2];
          const int left = stored ? min(columns8 * 8, out_channels - (first_channel - quarter * 2)) - column : 0;
          Words<4> mine = traded(0), later = mine;
#pragma unroll
          for (int j = 0; j < SUMS / 4; j += 4, y += 32) {
            if (j >= columns8) break;
            if (j + 4 < SUMS / 4) later = traded(j + 4);
            unsigned next[4];
            take_from_behind(next, mine.element, later.element, own);
            store_unaligned(y, mine.element, next, left - j * 8, j == 0 && quarter == 0);
            mine = later;
          }
        }
        continue;
      }
      if (whole_channels) {
#pragma unroll
        for (int j = 0; j < SUMS / 4; j += 4) {
          if (j >= columns8) break;
#pragma unroll
          for (int i = 0; i < 2 * TILES_M; ++i) {
            forget_memory();
            Words<4> run;
#pragma unroll
            for (int c = 0; c < 4; ++c) run.element[c] = j + c < SUMS / 4 ? words[i / 2][(j + c) % (SUMS / 4) * 2 + i % 2] : 0u;
            trade_words(run, quarter);
            const int ahead_w = i / 2 * stride_w + ew;
            scalar_t* const y =
                targets[i % 2] + ahead_w * output.stride[4] + quarter * 6;  // its pair of channels is 2 * quarter
            const bool stored = live[i % 2] && w + ahead_w < problem.output_size[2] && j + quarter < columns8 &&
                                (SPECIALIZED(WHOLE_TILES, false) || first_channel + quarter * 6 + j * 8 < out_channels);
            if (stored) store_streaming(reinterpret_cast<Words<4>*>(y), run);
          }
#pragma unroll
          for (int r = 0; r < 2; ++r) targets[r] = advanced(targets[r], 4 * ahead);
        }
        continue;
      }
#pragma unroll
      for (int j = 0; j < SUMS / 4; ++j) {
        if (j >= columns8) break;
        const int left = SPECIALIZED(WHOLE_TILES, false) ? 2 : out_channels - first_channel - j * 8;
#pragma unroll
        for (int i = 0; i < 2 * TILES_M; ++i) {
          const int ahead_w = i / 2 * stride_w + ew;
          scalar_t* const y = targets[i % 2] + ahead_w * output.stride[4];
          const bool stored = live[i % 2] && w + ahead_w < problem.output_size[2];
          const unsigned word = words[i / 2][j * 2 + i % 2];
          scalar_t element;
          element.bits = static_cast<unsigned short>(word);
          if (stored && left > 0) *y = element;
          element.bits = static_cast<unsigned short>(word >> 16);
          if (stored && left > 1) y[output.stride[1]] = element;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) targets[r] = advanced(targets[r], ahead);
      }
#endif
    }
  }
  while (HELD > 1 && late_pieces > 0) store_late();
}
