/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "fp32", "bf16", "fp16"]
static_shared_bytes = 128
skips_dead_taps = true
[specialize]
ROW_TILES = "row_tiles_of_warp"
COLUMN_TILES = "tile_columns // 32"
WARP_ROWS = "warp_rows"
CELLS = "cells"
[constants]
vector = "16 // itemsize"
operand_parts = "1 + split"
row_channels = "ceil_div(in_channels_per_group, vector) * vector"
# Of an output channel's taps a tile has the stretch from the first to the last that lead from an input to an output, in whole vectors.
low_d = "min(kernel_d - 1, max(0, ceil_div(padding_d - (input_d - 1) * stride_d, dilation_d)))"
low_h = "min(kernel_h - 1, max(0, ceil_div(padding_h - (input_h - 1) * stride_h, dilation_h)))"
low_w = "min(kernel_w - 1, max(0, ceil_div(padding_w - (input_w - 1) * stride_w, dilation_w)))"
high_d = "max(low_d, min(kernel_d - 1, (output_d - 1 + padding_d) // dilation_d))"
high_h = "max(low_h, min(kernel_h - 1, (output_h - 1 + padding_h) // dilation_h))"
high_w = "max(low_w, min(kernel_w - 1, (output_w - 1 + padding_w) // dilation_w))"
low_tap = "(low_d * kernel_h + low_h) * kernel_w + low_w"
high_tap = "(high_d * kernel_h + high_h) * kernel_w + high_w"
whole_vectors = "1 if taps % vector == 0 else 0"
first_tap = "low_tap // vector * vector if whole_vectors else 0"
live_taps = "(high_tap // vector + 1) * vector - first_tap if whole_vectors else taps"
most_shift = "0 if whole_vectors else vector - 1"
least_columns = "64 if live_taps + most_shift <= 64 else 128 if live_taps + most_shift <= 128 else 256"
# Rows: whole volumes, or boxes of one.
voxels = "batch * input_voxels"
many = "1 if least_columns <= 128 and voxels * groups * out_channels_per_group * live_taps >= 3 * 128 * 128 * multiprocessors else 0"
tile_rows = "TILE_ROWS if TILE_ROWS != 0 else 16 if voxels <= 16 else 32 if voxels <= 32 else 128 if many or (64 < input_voxels <= 128 and least_columns <= 128) else 64"
boxes_w = "ceil_div(input_w, min(input_w, tile_rows))"
box_w = "ceil_div(input_w, boxes_w)"
boxes_h = "ceil_div(input_h, min(input_h, tile_rows // box_w))"
box_h = "ceil_div(input_h, boxes_h)"
boxes_d = "ceil_div(input_d, min(input_d, tile_rows // (box_w * box_h)))"
box_d = "ceil_div(input_d, boxes_d)"
boxes = "boxes_d * boxes_h * boxes_w"
tile_images = "tile_rows // input_voxels if boxes == 1 else 1"
row_tiles = "ceil_div(batch, tile_images) * boxes"
# Columns: as many as leave all multiprocessors work. Where there are too few tiles all the same, parts of the depth.
fewest_tiles = "row_tiles * groups * ceil_div(out_channels_per_group, max(1, (256 - most_shift) // live_taps))"
fewer_tiles = "row_tiles * groups * ceil_div(out_channels_per_group, max(1, (128 - most_shift) // live_taps))"
wanted_columns = "TILE_COLUMNS if TILE_COLUMNS != 0 else 256 if tile_rows <= 64 and 2 * fewest_tiles >= 3 * multiprocessors else 128 if fewer_tiles >= multiprocessors else 64"
tile_columns = "max(least_columns, wanted_columns)"
pitch = "tile_columns + 8"
warp_rows = "4 if tile_rows * tile_columns > 16384 else 2 if tile_rows >= 64 else 1"
row_tiles_of_warp = "tile_rows // (16 * warp_rows)"
tile_channels = "max(1, (tile_columns - most_shift) // live_taps)"
channel_tiles = "ceil_div(out_channels_per_group, tile_channels)"
tiles = "row_tiles * channel_tiles * groups"
# A weight with channels in a row: a tile has only the taps of one class of outputs, and as many more channels, up to 128 bytes in a row.
# Taps split_d apart lead to outputs split_d apart; from one input each tap leads to an output of its own.
whole_planes = "1 if first_tap % (kernel_h * kernel_w) == 0 and live_taps % (kernel_h * kernel_w) == 0 else 0"
apart_d = "gcd(kernel_d, stride_d if input_d > 1 else 0) if live_taps == taps and tile_channels < wide else 1"
apart_h = "gcd(kernel_h, stride_h if input_h > 1 else 0) if whole_planes and tile_channels * split_d < wide else 1"
apart_w = "gcd(kernel_w, stride_w if input_w > 1 else 0) if whole_planes and tile_channels * split_d * split_h < wide else 1"
split_d = "apart_d if gcd(apart_d, dilation_d) == 1 else 1"
split_h = "apart_h if gcd(apart_h, dilation_h) == 1 else 1"
split_w = "apart_w if gcd(apart_w, dilation_w) == 1 else 1"
wide = "min(out_channels_per_group, 8 * vector)"
classes = "split_d * split_h * split_w"
most_channels = "tile_channels * classes"
class_channels = "most_channels // vector * vector if most_channels >= vector else most_channels"
class_tiles = "ceil_div(out_channels_per_group, class_channels)"
column_tiles = "max(channel_tiles, classes * class_tiles)"
# The depth comes in chunks of so many cells of 16 bytes.
cells = "STAGE_CELLS if STAGE_CELLS != 0 else 8 if tile_rows * tile_columns <= 4096 and in_channels_per_group > 4 * vector else 4"
chunk = "cells * vector"
chunks = "ceil_div(in_channels_per_group, chunk)"
parts = "max(1, min(chunks, DEPTH_PARTS if DEPTH_PARTS != 0 else min(ceil_div(chunks, 4), multiprocessors // max(1, tiles))))"
# What a box's taps reach, or where boxes share no outputs its share of the output.
overlap_d = "1 if boxes_d > 1 and (kernel_d - 1) * dilation_d >= stride_d else 0"
overlap_h = "1 if boxes_h > 1 and (kernel_h - 1) * dilation_h >= stride_h else 0"
overlap_w = "1 if boxes_w > 1 and (kernel_w - 1) * dilation_w >= stride_w else 0"
reach_d = "output_d if boxes_d == 1 else min(output_d, (box_d - 1) * stride_d + (kernel_d - 1) * dilation_d + 1 if overlap_d else box_d * stride_d + output_padding[0])"
reach_h = "output_h if boxes_h == 1 else min(output_h, (box_h - 1) * stride_h + (kernel_h - 1) * dilation_h + 1 if overlap_h else box_h * stride_h + output_padding[1])"
reach_w = "output_w if boxes_w == 1 else min(output_w, (box_w - 1) * stride_w + (kernel_w - 1) * dilation_w + 1 if overlap_w else box_w * stride_w + output_padding[2])"
summed = "1 if parts > 1 or overlap_d or overlap_h or overlap_w else 0"
partial_count = "row_tiles * parts * tile_images * out_channels * reach_d * reach_h * reach_w if summed else 0"
# From output to output of a class, its next tap and the input before: how far apart the products are.
run_step_d = "(stride_d * kernel_h * kernel_w - dilation_d * box_h * box_w * pitch) // gcd(stride_d, dilation_d)"
run_step_h = "(stride_h * kernel_w - dilation_h * box_w * pitch) // gcd(stride_h, dilation_h)"
run_step_w = "(stride_w - dilation_w * pitch) // gcd(stride_w, dilation_w)"
# ... and where a tap's channels follow one another.
tap_step_w = "class_channels"
tap_step_h = "kernel_w // split_w * tap_step_w"
tap_step_d = "kernel_h // split_h * tap_step_h"
class_step_d = "(stride_d // split_d * tap_step_d - dilation_d * box_h * box_w * pitch) // gcd(stride_d, dilation_d)"
class_step_h = "(stride_h // split_h * tap_step_h - dilation_h * box_w * pitch) // gcd(stride_h, dilation_h)"
class_step_w = "(stride_w // split_w * tap_step_w - dilation_w * pitch) // gcd(stride_w, dilation_w)"
row_cells = "voxels * groups * row_channels // vector"
runs = "boxes_d * reach_d + boxes_h * reach_h + boxes_w * reach_w"
stage_bytes = "tile_rows * (cells * 16 + 16) + chunk * pitch * itemsize"
tables_at = "max(STAGES * stage_bytes, tile_rows * pitch * 4)"
channel_quads = "ceil_div(out_channels, 4)"
[restrictions]
"reach_d + reach_h + reach_w <= 2048" = "a block has tables of at most 2048 coordinates of its outputs"
"tile_rows * tile_columns <= 32768 // operand_parts" = "a thread has registers for at most 64 sums, and in tf32x3 as many small ones"
"live_taps + most_shift <= 256" = "a tile of at most 256 columns has all taps of an output channel"
"max(out_channels_per_group * taps, row_tiles * column_tiles * groups * parts, 4 * row_cells, runs, batch * channel_quads * output_voxels) < 2147483136" = "the columns of a group, the blocks, the input and the quads of outputs must be below 2^31"
[search]
TILE_ROWS = [0, 16, 32, 64, 128]
TILE_COLUMNS = [64, 128, 256]
DEPTH_PARTS = [1, 2, 4, 8]
[cost]
steps = "ceil_div(chunks, parts)"
products = "tile_rows * tile_columns * chunk"
bytes = "(tile_rows + tile_columns) * chunk * itemsize"
[workspace]
prepared = "4 * row_cells + 2 * runs"
partial_sums = "partial_count"
[[launch]]
symbol = "convt3d_prepare_col2im"
general = true
prepares = "prepared"
grid = "ceil_div(row_cells, 256) + ceil_div(runs, 256) if batch > 0 else 0"
block = 256
[[launch]]
symbol = "convt3d_fprop_col2im"
prepares = "partial_sums"
grid = "row_tiles * column_tiles * groups * parts"
block = "128 * warp_rows"
shared_bytes = "tables_at + 8 * (reach_d + reach_h + reach_w)"
[[launch]]
symbol = "convt3d_add_partial_sums"
general = true
when = "summed"
grid = "ceil_div(batch * channel_quads * output_voxels, 256)"
block = 256
*/
// Few voxels with many channels: one matrix product of the input with the weight as it lies in memory, and col2im, the sum of its columns
// into the outputs that they belong to.
//
//   product[n, i][co, t] = sum over ci of input[n, ci, i] * weight[ci, co, t]
//   output[n, co, o] = bias[co] + sum over i*stride - padding + t*dilation = o of product[n, i][co, t]
//
// The weight is (ci, co, t): a matrix whose rows are the depth, and it is nearly all that has to be read. A block reads some of its columns, all
// live taps of a few output channels, in vectors, and serves all residue classes by them. Where it is (ci, t, co) in memory, as channels_last has
// it, so few channels are no vectors: a block then reads the taps of one class of outputs, and as many more channels, in columns (t, co).
// GEMM rows are voxels: whole volumes, or a box of one.
// So that all multiprocessors have work, tiles have few columns, and where that is not enough, a part of the depth each.
//
//   1. A launch lays the input out with channels in a row, if it is not so. Meanwhile the blocks of the next copy their first weights.
//   2. A ring of STAGES stages, each 64 bytes of channels of the rows [row][channel], and as many rows of the weight [channel][column].
//      A warp multiplies ROW_TILES * 16 rows by COLUMN_TILES * 8 columns, on tensor cores or, in fp32, by multiply-adds.
//   3. The products go to shared memory, [row][column]. A thread adds up those of an output, of four channels or volumes, by tables that have
//      the first product of each coordinate of an axis and how many follow, equal steps apart.
//   4. Where a tile has all of the depth, and no other shares its outputs, they are stored. Else its sums are, and a third launch adds them up
//      in a fixed order.
#include "convt3d.cuh"
#include "convt3d/ptx/beside_launches.cuh"
#include "convt3d/ptx/beside_packing.cuh"
#include "convt3d/pipe/channel_rows.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/ptx/mma.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/ptx/split_tf32.cuh"
#include "convt3d/core/vector.cuh"

// Rows of a tile, 16, 32, 64 or 128; columns of a tile, 64, 128 or 256; parts of the depth. 0: by the problem.
#ifndef TILE_ROWS
#define TILE_ROWS 0
#endif
#ifndef TILE_COLUMNS
#define TILE_COLUMNS 0
#endif
#ifndef DEPTH_PARTS
#define DEPTH_PARTS 0
#endif
#ifndef STAGES
#define STAGES 4
#endif
// Cells of 16 bytes of a row in a stage, 4 or 8; 0: by the problem.
#ifndef STAGE_CELLS
#define STAGE_CELLS 0
#endif

constexpr int SIZE = static_cast<int>(sizeof(scalar_t)), VECTOR = ROW_VECTOR;
#if defined(__CUDACC__)
constexpr int ROWS = ROW_TILES, COLUMNS = COLUMN_TILES, THREADS = 128 * WARP_ROWS;
constexpr int OWN_CELLS = ROWS * CELLS > 8 ? ROWS * CELLS / 8 : 1;  // of the rows, that a thread copies
#else
constexpr int ROWS = 4, COLUMNS = 8, THREADS = 512, OWN_CELLS = 4;  // the most there can be
#endif
// Registers of a thread, about: its sums, what it multiplies, and the rest. So many threads a multiprocessor has room for.
#if defined(CONVT3D_FP32)
constexpr int OPERANDS = 2 * COLUMNS + 8;
#else
constexpr int OPERANDS = 4 * ROWS * PARTS + 8 * (PARTS - 1);
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int REST = 48;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int REST = 44;
#else
constexpr int REST = 40;
#endif
constexpr int REGISTERS = ROWS * COLUMNS * 4 * PARTS + OPERANDS + REST;
// In fp32 64 sums and four channels of what they are made of fit in 128 up to sm_90; newer architectures would spill.
#if defined(CONVT3D_FP32) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ <= 900
constexpr int HALF = 132;
#else
constexpr int HALF = 120;
#endif
#if defined(CONVT3D_FP32)
constexpr int TOGETHER = HALF == 120 && ROWS * COLUMNS == 16 && THREADS == 512 ? 2 : 4;
#endif
constexpr int RESIDENT = REGISTERS <= 56 ? 1024 : REGISTERS <= 64 ? 768 : REGISTERS <= HALF ? 512 : 256;
constexpr int BLOCKS = RESIDENT > THREADS ? RESIDENT / THREADS : 1;

// Whether all taps of an output channel lie together; else columns are (t, co).
__device__ __forceinline__ bool taps_lie_together(const Problem& problem, const View<const scalar_t>& weight) {
  const int (&kernel)[3] = problem.kernel_size;
  return (kernel[2] == 1 || weight.stride[4] == 1) && (kernel[1] == 1 || weight.stride[3] == kernel[2]) &&
         (kernel[0] == 1 || weight.stride[2] == static_cast<index_t>(kernel[1]) * kernel[2]);
}

// ---- what comes before ----

// The products of one coordinate of an output: where the first of them is, and how many there are.
struct alignas(8) Run {
  int first, count;
};

// The outputs of one axis that a box stores: all that its taps reach, or where boxes share none its share of the output.
struct Share {
  int first, count;
};

__device__ __forceinline__ Share share_of(const Problem& problem, int axis, int box, int boxes, int length, int overlap) {
  const int size = problem.output_size[axis], stride = problem.stride[axis];
  const index_t first = static_cast<index_t>(box) * length * stride - problem.padding[axis];
  index_t end = size;
  if (overlap) {
    end = first + static_cast<index_t>(length - 1) * stride +
          static_cast<index_t>(problem.kernel_size[axis] - 1) * problem.dilation[axis] + 1;
  } else if (box + 1 < boxes) {
    end = first + static_cast<index_t>(length) * stride;
  }
  Share share;
  share.first = box == 0 ? 0 : static_cast<int>(max(index_t(0), min(static_cast<index_t>(size), first)));
  share.count = static_cast<int>(max(index_t(0), min(end, static_cast<index_t>(size)) - share.first));
  return share;
}

// Of an axis [box][output]: where inputs and taps that lead to an output begin, `input_step` and `tap_step` apart in the products, which have
// every `split`th tap.
__device__ __forceinline__ Run run_of(const Problem& problem, int axis, int index, int boxes, int length, int reach,
                                      int overlap, int input_step, int tap_step, int split) {
  const int box = index / reach, begin = box * length, inputs = min(length, problem.input_size[axis] - begin);
  const Share share = share_of(problem, axis, box, boxes, length, overlap);
  if (index % reach >= share.count) return {0, 0};
  const int shifted = share.first + index % reach + problem.padding[axis], stride = problem.stride[axis];
  const AxisClass taps = axis_class(problem, axis, shifted % stride);
  // Tap j of the class reads input `nearest - j * taps.offset_step` of the box.
  const int nearest = shifted / stride - taps.first_offset - begin, beyond = nearest - (inputs - 1);
  const int from = beyond > 0 ? (beyond + taps.offset_step - 1) / taps.offset_step : 0;
  const int to = nearest < 0 ? 0 : min(taps.taps, nearest / taps.offset_step + 1);
  if (to <= from) return {0, 0};
  const int tap = (taps.first_tap + from * taps.tap_step) / split;
  return {(nearest - from * taps.offset_step) * input_step + tap * tap_step, to - from};
}

// prepared: [group][n, voxel][channel] of the input, zero from the last channel on, a vector a thread; and the runs of the axes.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_prepare_col2im(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                           accum_t* __restrict__ prepared, const int voxels, const int row_channels, const int row_cells,
                           const int boxes_d, const int boxes_h, const int boxes_w, const int box_d, const int box_h,
                           const int box_w, const int reach_d, const int reach_h, const int reach_w, const int overlap_d,
                           const int overlap_h, const int overlap_w, const int pitch, const int tap_step_d,
                           const int tap_step_h, const int tap_step_w, const int split_d, const int split_h,
                           const int split_w) {
  begin_next();
  const int row_blocks = (row_cells + 255) / 256, index = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (static_cast<int>(blockIdx.x) >= row_blocks) {
    Run* const runs = reinterpret_cast<Run*>(prepared + static_cast<index_t>(row_cells) * 4);
    const int i = index - row_blocks * 256, before_h = boxes_d * reach_d, before_w = before_h + boxes_h * reach_h;
    const bool together = taps_lie_together(problem, weight);
    const int row = problem.kernel_size[2], plane = problem.kernel_size[1] * row;
    if (i < before_h) {
      runs[i] = run_of(problem, 0, i, boxes_d, box_d, reach_d, overlap_d, box_h * box_w * pitch, together ? plane : tap_step_d,
                       together ? 1 : split_d);
    } else if (i < before_w) {
      runs[i] = run_of(problem, 1, i - before_h, boxes_h, box_h, reach_h, overlap_h, box_w * pitch, together ? row : tap_step_h,
                       together ? 1 : split_h);
    } else if (i < before_w + boxes_w * reach_w) {
      runs[i] = run_of(problem, 2, i - before_w, boxes_w, box_w, reach_w, overlap_w, pitch, together ? 1 : tap_step_w,
                       together ? 1 : split_w);
    }
    return;
  }
  if (index >= row_cells || lies_in_rows(problem, input)) return;
  lay_in_rows(problem, input, reinterpret_cast<RowVector*>(prepared), index, voxels, row_channels);
}

// ---- the products of a warp ----

// A lane has four rows of products by multiply-adds, and pairs of columns by tensor cores.
#if defined(CONVT3D_FP32)
__device__ __forceinline__ int row_of(int lane, int i, int e) { return (i * 4 + e) * 4 + lane / 8; }
#endif

// Store the products [i][j] of a lane to where those of its warp begin.
__device__ __forceinline__ void store_products(float* products, int pitch, const float (&sums)[4], int lane, int i, int j,
                                               int columns) {
#if defined(CONVT3D_FP32)
  const int column = columns == 2 ? lane % 8 * 2 + j : j / 4 * 32 + lane % 8 * 4 + j % 4;
#pragma unroll
  for (int e = 0; e < 4; ++e) products[row_of(lane, i, e) * pitch + column] = sums[e];
#else
  float* const first = products + (i * 16 + lane / 4) * pitch + j * 8 + lane % 4 * 2;
  *reinterpret_cast<float2*>(first) = make_float2(sums[0], sums[1]);
  *reinterpret_cast<float2*>(first + 8 * pitch) = make_float2(sums[2], sums[3]);
#endif
}

// A warp's share of a stage: `rows` and `columns` point to its first row and its first column; a row of weights has `pitch` elements.
struct Stage {
  const char* rows;
  const scalar_t* columns;
  int pitch, lane, row_tiles, column_tiles, cells;
  unsigned own_row, own_columns;  // what this lane reads by ldmatrix, of the first cells

#if defined(CONVT3D_FP32)
  __device__ __forceinline__ void multiply(float (&sums)[ROWS][COLUMNS][4], float (&)[ROWS][COLUMNS][4]) const {
    const char* const own_rows = rows + lane / 8 * (cells * 16 + 16);
    const float* const own = columns + lane % 8 * (COLUMNS == 2 || column_tiles == 2 ? 2 : 4);
    // One piece of code for the channels of a vector: in a longer one the compiler moves sums between registers.
#pragma unroll 1
    for (int k = 0; k < cells * VECTOR; k += TOGETHER) {
      float b[TOGETHER][COLUMNS];
#pragma unroll
      for (int d = 0; d < TOGETHER; ++d) {
        const float* const from = own + (k + d) * pitch;
        if (COLUMNS == 2 || column_tiles == 2) {
          const float2 two = *reinterpret_cast<const float2*>(from);
          b[d][0] = two.x;
          b[d][1] = two.y;
        } else if constexpr (COLUMNS > 2) {
#pragma unroll
          for (int j = 0; j < COLUMNS && j < column_tiles; j += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + j * 8);
            b[d][j] = four.x;
            b[d][j + 1] = four.y;
            b[d][j + 2] = four.z;
            b[d][j + 3] = four.w;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < ROWS && i < row_tiles; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Vector<TOGETHER> a =
              *reinterpret_cast<const Vector<TOGETHER>*>(own_rows + (i * 4 + e) * 4 * (cells * 16 + 16) + k * 4);
#pragma unroll
          for (int d = 0; d < TOGETHER; ++d) {
#pragma unroll
            for (int j = 0; j < COLUMNS && j < column_tiles; ++j) sums[i][j][e] += a.element[d] * b[d][j];
          }
        }
      }
    }
  }
#else
  // The rows of two cells, of the sixteen from 16 * i on.
  __device__ __forceinline__ void load_rows(unsigned (&a)[4], int pair, int i) const {
    ldmatrix_x4(a, own_row + i * 16 * (cells * 16 + 16) + pair * 32);
  }

#if defined(CONVT3D_TF32X3)
  __device__ __forceinline__ void multiply(float (&sums)[ROWS][COLUMNS][4], float (&low)[ROWS][COLUMNS][4]) const {
#pragma unroll 1
    for (int pair = 0; pair < cells / 2; ++pair) {
      unsigned a[2][ROWS][4];  // high, low
#pragma unroll
      for (int i = 0; i < ROWS && i < row_tiles; ++i) {
        unsigned whole[4];
        load_rows(whole, pair, i);
#pragma unroll
        for (int r = 0; r < 4; ++r) split_tf32(__uint_as_float(whole[r]), a[0][i][r], a[1][i][r]);
      }
#pragma unroll
      for (int j = 0; j < COLUMNS && j < column_tiles; ++j) {
        unsigned b[2][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          split_tf32(columns[(pair * 8 + r * 4 + lane % 4) * pitch + j * 8 + lane / 4], b[0][r], b[1][r]);
        }
#pragma unroll
        for (int i = 0; i < ROWS && i < row_tiles; ++i) {
          float high[4] = {};  // tensor cores cut off what they add, so these sums leave them at once
          CONVT3D_MULTIPLY(low[i][j], a[1][i], b[0][0], b[0][1]);
          CONVT3D_MULTIPLY(high, a[0][i], b[0][0], b[0][1]);
          CONVT3D_MULTIPLY(low[i][j], a[0][i], b[1][0], b[1][1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[i][j][e] += high[e];
        }
      }
    }
  }
#else
  // The columns of two cells, of the sixteen from 8 * j on.
  __device__ __forceinline__ void load_columns(unsigned (&b)[4], int pair, int j) const {
    if constexpr (SIZE == 2) {
      ldmatrix_x4_transposed(b, own_columns + (pair * 16 * pitch + j * 8) * SIZE);
    } else {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        b[r] = nearest_tf32(to_accum(columns[(pair * 8 + r % 2 * 4 + lane % 4) * pitch + (j + r / 2) * 8 + lane / 4]));
      }
    }
  }
  __device__ __forceinline__ void multiply(float (&sums)[ROWS][COLUMNS][4], float (&)[ROWS][COLUMNS][4]) const {
    // Steps that are one stretch of code; TF32 is rounded on the way, which with 64 sums leaves registers for one.
    constexpr int UNROLLED = SIZE == 4 && ROWS * COLUMNS == 16 ? 1 : 4;
#pragma unroll UNROLLED
    for (int pair = 0; pair < cells / 2; ++pair) {
      unsigned a[ROWS][4];
#pragma unroll
      for (int i = 0; i < ROWS && i < row_tiles; ++i) {
        load_rows(a[i], pair, i);
        if constexpr (SIZE == 4) {
#pragma unroll
          for (int r = 0; r < 4; ++r) a[i][r] = nearest_tf32(__uint_as_float(a[i][r]));
        }
      }
#pragma unroll
      for (int j = 0; j < COLUMNS && j < column_tiles; j += 2) {
        unsigned b[4];
        load_columns(b, pair, j);
#pragma unroll
        for (int i = 0; i < ROWS && i < row_tiles; ++i) {
          CONVT3D_MULTIPLY(sums[i][j], a[i], b[0], b[1]);
          CONVT3D_MULTIPLY(sums[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
#endif
#endif
};

// ---- col2im ----

// Four outputs, `count` of which there are, a step apart; `whole` where the step is one.
__device__ __forceinline__ void store_four(const Epilogue& epilogue, scalar_t* y, const float (&sum)[4], index_t step,
                                           int count, bool whole) {
  Vector<4> four;
#pragma unroll
  for (int q = 0; q < 4; ++q) four.element[q] = epilogue.finish(sum[q]);
  if (whole && count == 4 && reinterpret_cast<unsigned long long>(y) % sizeof(Vector<4>) == 0) {
    *reinterpret_cast<Vector<4>*>(y) = four;
    return;
  }
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    if (q < count) y[q * step] = four.element[q];
  }
}

// What a block computes; in shared memory where registers are for sums.
struct Tile {
  int row_tile, part, first_co, channels, first_n, images, first_product, image_step, together;
  Share shares[3];
  Share own[3];  // of these, the first and how many there are of the tile's class
};

// Of the outputs from `first` on, the next whose taps are number `number` of every `split` taps.
__device__ __forceinline__ int next_of_class(const Problem& problem, int axis, int first, int number, int split) {
  const int lead = number * (problem.dilation[axis] % split) % split;
  return (lead + 2 * split - problem.padding[axis] % split - first % split) % split;
}

__device__ __forceinline__ Share own_outputs(const Problem& problem, int axis, const Share& share, int number, int split) {
  const int next = next_of_class(problem, axis, share.first, number, split);
  return {next, share.count > next ? (share.count - next - 1) / split + 1 : 0};
}

// How far apart the products of an output are, on an axis.
struct Steps {
  int d, h, w;
};

// Outputs of four channels, or volumes, and one place each: stored with the bias, or as the sums of a box and a part of the depth.
template <bool TOGETHER>
__device__ __forceinline__ void store_outputs(const Problem& problem, const Epilogue& epilogue, const View<scalar_t>& output,
                                              accum_t* __restrict__ partial_sums, const float* products, const Run* tables,
                                              const Tile& tile, Steps steps, Steps splits, int threads, int channel_step,
                                              int tile_channels, int tile_images, int parts, int reach_d, int reach_h,
                                              int reach_w, bool summed) {
  const Share(&shares)[3] = tile.shares, (&own)[3] = TOGETHER ? tile.shares : tile.own;
  const int outputs = own[0].count * own[1].count * own[2].count;
  if (outputs == 0) return;
  const bool along_channels = tile_channels >= 4 || tile_channels >= tile_images;
  const int inner = along_channels ? tile.channels : tile.images, outer = along_channels ? tile.images : tile.channels;
  const int inner_step = along_channels ? channel_step : tile.image_step,
            outer_step = along_channels ? tile.image_step : channel_step;
  const int quads = (inner + 3) / 4, thread = static_cast<int>(threadIdx.x);
  const index_t reach = static_cast<index_t>(reach_d) * reach_h * reach_w;
  const index_t channel_stride = summed ? reach : output.stride[1];
  const index_t image_stride = summed ? problem.out_channels * reach : output.stride[0];
  const index_t inner_stride = along_channels ? channel_stride : image_stride;
  const index_t outer_stride = along_channels ? image_stride : channel_stride;
  // As many sets of threads as there are places for have their own quads.
  const int sets = max(1, threads / outputs), set = sets > 1 ? thread / outputs : 0;
  if (set >= sets) return;
#pragma unroll 1
  for (int place = sets > 1 ? thread % outputs : thread; place < outputs; place += threads) {
    const int row = place / own[2].count;
    int w = place % own[2].count, h = row % own[1].count, d = row / own[1].count;
    if (!TOGETHER) {
      w = own[2].first + w * splits.w;
      h = own[1].first + h * splits.h;
      d = own[0].first + d * splits.d;
    }
    const Run run_d = tables[d], run_h = tables[reach_d + h], run_w = tables[reach_d + reach_h + w];
    const float* const first_product = products + (tile.first_product + run_d.first + run_h.first + run_w.first);
    accum_t* const sums =
        partial_sums +
        (((static_cast<index_t>(tile.row_tile) * parts + tile.part) * tile_images) * problem.out_channels + tile.first_co) *
            reach +
        (d * reach_h + h) * reach_w + w;
    scalar_t* const outputs_here =
        output.at(tile.first_n, tile.first_co, shares[0].first + d, shares[1].first + h, shares[2].first + w);
#pragma unroll 1
    for (int quad = set; quad < outer * quads; quad += sets) {
      const int other = quad / quads, first = (quad - other * quads) * 4, count = min(4, inner - first);
      const float* at[4];
      float sum[4] = {}, added[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int each = first + min(q, count - 1);
        at[q] = first_product + (other * outer_step + each * inner_step);
        added[q] = epilogue.start(tile.first_co + (along_channels ? each : other), !summed);
      }
#pragma unroll 1
      for (int i = 0; i < run_d.count; ++i) {
#pragma unroll 1
        for (int j = 0; j < run_h.count; ++j) {
          int offset = i * steps.d + j * steps.h;
#pragma unroll 2
          for (int k = 0; k < run_w.count; ++k, offset += steps.w) {
#pragma unroll
            for (int q = 0; q < 4; ++q) sum[q] += at[q][offset];
          }
        }
      }
#pragma unroll
      for (int q = 0; q < 4; ++q) sum[q] += added[q];
      const index_t offset = other * outer_stride + first * inner_stride;
      if (summed) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          if (q < count) sums[offset + q * inner_stride] = sum[q];
        }
      } else {
        store_four(epilogue, outputs_here + offset, sum, inner_stride, count, along_channels && inner_stride == 1);
      }
    }
  }
}

// The rows of a block: the cells that a thread copies, where they come from and where they go in a stage.
struct Rows {
  const scalar_t* sources[OWN_CELLS];  // of the next chunk
  int live[OWN_CELLS];                 // channels that are left
  unsigned targets[OWN_CELLS];
  int count, chunk;

  // The next chunk of channels; nothing is read where none are left.
  __device__ __forceinline__ void copy(unsigned stage) {
#pragma unroll
    for (int c = 0; c < OWN_CELLS && c < count; ++c) {
      cp_async<16>(stage + targets[c], sources[c], live[c] > 0 ? 16 : 0);
      sources[c] = advanced(sources[c], static_cast<index_t>(chunk) * SIZE);
      live[c] -= chunk;
    }
  }
};

// Which columns a block has, and where they lie in a row of the weight.
struct Places {
  int first_co, channels, taps, first_tap, live_taps, shift;  // shift: what comes before the first, so that vectors are whole
  int class_channels, local_h, local_w;                       // of columns (t, co)
  Steps numbers, splits;
  bool together;

  __device__ __forceinline__ int classes() const { return splits.d * splits.h * splits.w; }
  __device__ __forceinline__ int class_first_tap() const { return first_tap / classes(); }
  __device__ __forceinline__ int covered() const {
    return together ? shift + channels * live_taps : live_taps / classes() * class_channels;
  }
  __device__ __forceinline__ int first_product() const {  // where that of tap 0 and the first channel would be
    return together ? shift - first_tap : -class_first_tap() * class_channels;
  }
  __device__ __forceinline__ bool has(int column) const {
    return column < covered() && (together || column % class_channels < channels);
  }
  __device__ __forceinline__ index_t place_of(const View<const scalar_t>& weight, int column) const {
    if (together) {
      if (live_taps == taps && weight.stride[1] == taps) return static_cast<index_t>(first_co) * taps - shift + column;
      return (first_co + column / live_taps) * weight.stride[1] + first_tap + column % live_taps;
    }
    const int tap = class_first_tap() + column / class_channels, row = tap / local_w;
    return (first_co + column % class_channels) * weight.stride[1] + (row / local_h * splits.d + numbers.d) * weight.stride[2] +
           (row % local_h * splits.h + numbers.h) * weight.stride[3] +
           (tap % local_w * splits.w + numbers.w) * weight.stride[4];
  }
  // How many elements may be copied at a time: vectors, pairs of 16 bits, or one.
  __device__ __forceinline__ int piece(const View<const scalar_t>& weight, int out_channels) const {
    const index_t step = weight.stride[1];
    if (together) {
      const bool whole = reinterpret_cast<unsigned long long>(weight.data) % 16 == 0 && weight.stride[0] % VECTOR == 0 &&
                         static_cast<index_t>(out_channels) * taps % VECTOR == 0;
      return whole && (step == taps || (step % VECTOR == 0 && taps % VECTOR == 0)) ? VECTOR : 1;
    }
    // Of all that pieces have to be a multiple of, the lowest bit that is set.
    const unsigned long long bits =
        (weight.stride[0] | weight.stride[2] | weight.stride[3] | weight.stride[4] | out_channels | class_channels) * SIZE |
        reinterpret_cast<unsigned long long>(weight.data);
    if (step != 1 || bits % (2 * SIZE) != 0) return 1;
    return bits % 16 == 0 ? VECTOR : SIZE == 2 && bits % 4 == 0 ? 2 : 1;
  }
};

// The columns of a block, from channel to channel.
struct Columns {
  const scalar_t *weight, *next;  // all of it; what this thread copies next
  index_t row_length, beyond;     // ... from there to its second piece
  int width, threads, chunk, first, piece;
  unsigned target;  // of a vector, in a stage
  bool own, own_beyond;

  template <int COUNT>
  __device__ __forceinline__ void begin(const View<const scalar_t>& view, const Places& places, index_t first_channel,
                                        int thread) {
    const int pieces = width / COUNT, column = thread % pieces * COUNT, second = column + threads * COUNT;
    first = thread / pieces;
    own = places.has(column);
    own_beyond = second < width && places.has(second);
    const index_t place = own ? places.place_of(view, column) : 0;
    weight = view.data;
    next = weight + ((first_channel + first) * row_length + place);
    beyond = own_beyond ? places.place_of(view, second) - place : 0;
    target = (first * (width + 8) + column) * SIZE;
  }
  // The next chunk of channels, of which `live` are left; nothing is read of the others.
  __device__ __forceinline__ void copy(int live, unsigned stage, scalar_t* elements) {
    if (piece == VECTOR) {
      if (own) copy_vectors(live, stage);
    } else if (SIZE == 2 && piece == 2) {
      copy_pieces<2>(live, elements);
    } else {
      copy_pieces<1>(live, elements);
    }
  }
  __device__ __forceinline__ void copy_vectors(int live, unsigned stage) {
    const int apart = threads / (width / VECTOR);
    const index_t step = apart * row_length * SIZE;
    if (live >= chunk) {
#pragma unroll
      for (int k = 0; k < chunk; k += apart, next = advanced(next, step)) {
        cp_async<16>(stage + target + k * (width + 8) * SIZE, next);
      }
    } else {
#pragma unroll 1
      for (int k = 0; k < chunk; k += apart, next = advanced(next, step)) {
        const bool inside = first + k < live;
        cp_async<16>(stage + target + k * (width + 8) * SIZE, inside ? next : weight, inside ? 16 : 0);
      }
    }
  }
  template <int COUNT>
  __device__ __forceinline__ void copy_pieces(int live, scalar_t* stage) {
    const int pieces = width / COUNT, pitch = width + 8, apart = pieces < threads ? threads / pieces : 1;
    const int thread = static_cast<int>(threadIdx.x), first_k = thread / pieces;
    const index_t step = apart * row_length * SIZE;
#pragma unroll 1
    for (int second = 0; second < (pieces > threads ? 2 : 1); ++second) {
      if (!(second == 0 ? own : own_beyond)) continue;
      const scalar_t* from = second == 0 ? next : next + beyond;
      scalar_t* to = stage + (first_k * pitch + (thread % pieces + second * threads) * COUNT);
#pragma unroll 1
      for (int k = first_k; k < chunk; k += 4 * apart) {
        scalar_t values[4];
#pragma unroll
        for (int i = 0; i < 4; ++i, from = advanced(from, step)) {
          const bool inside = k + i * apart < live;
          if constexpr (SIZE * COUNT == 4) {
            cp_async<4>(shared_address(to + i * apart * pitch), inside ? from : weight, inside ? 4 : 0);
          } else {
            values[i] = inside ? *from : to_scalar(accum_t(0));
          }
        }
#pragma unroll
        for (int i = 0; i < 4 && SIZE * COUNT != 4; ++i) to[i * apart * pitch] = values[i];
        to += 4 * apart * pitch;
      }
    }
    next = advanced(next, chunk * row_length * SIZE);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convt3d_fprop_col2im(const Problem problem, const View<const scalar_t> input, const accum_t* __restrict__ prepared,
                         const View<const scalar_t> weight, const scalar_t* __restrict__ bias, const View<scalar_t> output,
                         accum_t* __restrict__ partial_sums, const int voxels, const int row_channels, const int chunks,
                         const int row_tiles, const int parts, const int column_tiles, const int tile_channels,
                         const int tile_images, const int tile_columns, const int row_tiles_of_warp, const int warp_rows,
                         const int first_tap, const int live_taps, const int boxes_d, const int boxes_h, const int boxes_w,
                         const int box_d, const int box_h, const int box_w, const int reach_d, const int reach_h,
                         const int reach_w, const int overlap_d, const int overlap_h, const int overlap_w, const int summed,
                         const int cells, const int row_cells, const int run_step_d, const int run_step_h, const int run_step_w,
                         const int split_d, const int split_h, const int split_w, const int class_channels,
                         const int class_tiles, const int class_step_d, const int class_step_h, const int class_step_w,
                         const int tables_at) {
  begin_next();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int own_rows = SPECIALIZED(ROW_TILES, row_tiles_of_warp), own_columns = SPECIALIZED(COLUMN_TILES, tile_columns / 32);
  const int row_warps = SPECIALIZED(WARP_ROWS, warp_rows), threads = 128 * row_warps;
  const int own_cells = SPECIALIZED(CELLS, cells), chunk_channels = own_cells * VECTOR;
  const int height = 16 * own_rows * row_warps, width = 32 * own_columns, pitch = width + 8;  // of a tile
  const int columns_at = height * (own_cells * 16 + 16), stage_bytes = columns_at + chunk_channels * pitch * SIZE;
  extern __shared__ uint4 shared[];
  __shared__ Tile tile;
  char* const memory = reinterpret_cast<char*>(shared);
  const unsigned stages = shared_address(shared);

  // blockIdx.x = ((group * column_tiles + column tile) * parts + part) * row_tiles + row tile: those that read the same weights are
  // neighbours. Of columns (t, co) tiles are [class][channels]; where there are fewer than column_tiles, the others have nothing to do.
  unsigned block = blockIdx.x;
  const int row_tile = static_cast<int>(block % row_tiles);
  block /= row_tiles;
  const int part = static_cast<int>(block % parts);
  block /= parts;
  const int column_tile = static_cast<int>(block % column_tiles), group = static_cast<int>(block / column_tiles);
  const int *const kernel = problem.kernel_size, taps = kernel[0] * kernel[1] * kernel[2];
  const int in_channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const bool together = taps_lie_together(problem, weight);
  const Steps splits = together ? Steps{1, 1, 1} : Steps{split_d, split_h, split_w};
  Steps numbers = {0, 0, 0};
  int first_co = column_tile * tile_channels, most_channels = tile_channels;
  if (!together) {
    const int of_class = column_tile / class_tiles;
    numbers = {of_class / split_w / split_h, of_class / split_w % split_h, of_class % split_w};
    first_co = column_tile % class_tiles * class_channels;
    most_channels = class_channels;
    if (numbers.d >= split_d || next_of_class(problem, 0, 0, numbers.d, split_d) >= problem.output_size[0] ||
        next_of_class(problem, 1, 0, numbers.h, split_h) >= problem.output_size[1] ||
        next_of_class(problem, 2, 0, numbers.w, split_w) >= problem.output_size[2]) {
      return;
    }
  }
  if (first_co >= out_channels) return;
  const int channels = min(most_channels, out_channels - first_co);
  const int first_chunk = static_cast<int>(static_cast<index_t>(part) * chunks / parts);
  const int own_chunks = static_cast<int>(static_cast<index_t>(part + 1) * chunks / parts) - first_chunk;

  Places places{
      first_co, channels, taps,    first_tap, live_taps, 0, class_channels, kernel[1] / splits.h, kernel[2] / splits.w,
      numbers,  splits,   together};
  Columns columns;
  columns.row_length = weight.stride[0];
  const index_t first_channel = group * static_cast<index_t>(in_channels) + first_chunk * chunk_channels;
  columns.width = width;
  columns.threads = threads;
  columns.chunk = chunk_channels;
  columns.piece = places.piece(weight, out_channels);
  if (columns.piece == VECTOR) {
    if (together && live_taps == taps) places.shift = first_co * taps % VECTOR;
    columns.begin<VECTOR>(weight, places, first_channel, thread);
  } else if (SIZE == 2 && columns.piece == 2) {
    columns.begin<2>(weight, places, first_channel, thread);
  } else {
    columns.begin<1>(weight, places, first_channel, thread);
  }
  if (thread == 0) {
    tile.row_tile = row_tile;
    tile.part = part;
    tile.first_co = group * out_channels + first_co;
    tile.channels = channels;
    tile.together = together;
    tile.first_product = places.first_product();
    tile.own[0].first = numbers.d;
    tile.own[1].first = numbers.h;
    tile.own[2].first = numbers.w;
  }
  int live = in_channels - first_chunk * chunk_channels;
#pragma unroll 1
  for (int chunk = 0; chunk < min(STAGES - 1, own_chunks); ++chunk, live -= chunk_channels) {
    columns.copy(live, stages + chunk * stage_bytes + columns_at,
                 reinterpret_cast<scalar_t*>(memory + chunk * stage_bytes + columns_at));
  }

  // While they are under way: which products an output adds up, and where rows lie.
  const int box = row_tile % (boxes_d * boxes_h * boxes_w), first_n = row_tile / (boxes_d * boxes_h * boxes_w) * tile_images;
  const int at[3] = {box / boxes_w / boxes_h, box / boxes_w % boxes_h, box % boxes_w}, box_volume = box_d * box_h * box_w;
  const int images = min(tile_images, problem.batch - first_n);
  if (thread == 0) {
    tile.first_n = first_n;
    tile.images = images;
    tile.image_step = box_volume * pitch;
    tile.shares[0] = share_of(problem, 0, at[0], boxes_d, box_d, overlap_d);
    tile.shares[1] = share_of(problem, 1, at[1], boxes_h, box_h, overlap_h);
    tile.shares[2] = share_of(problem, 2, at[2], boxes_w, box_w, overlap_w);
    tile.own[0] = own_outputs(problem, 0, tile.shares[0], tile.own[0].first, tile.together ? 1 : split_d);
    tile.own[1] = own_outputs(problem, 1, tile.shares[1], tile.own[1].first, tile.together ? 1 : split_h);
    tile.own[2] = own_outputs(problem, 2, tile.shares[2], tile.own[2].first, tile.together ? 1 : split_w);
  }
  Rows rows;
  rows.chunk = chunk_channels;
  rows.count = 0;
  const bool in_rows = lies_in_rows(problem, input);
  const int (&size)[3] = problem.input_size;
#pragma unroll
  for (int c = 0; c < OWN_CELLS; ++c) {
    const int row = thread / own_cells + c * (threads / own_cells), image = row / box_volume, place = row % box_volume;
    const int d = at[0] * box_d + place / box_w / box_h, h = at[1] * box_h + place / box_w % box_h,
              w = at[2] * box_w + place % box_w;
    const bool inside = row < height && image < images && d < size[0] && h < size[1] && w < size[2];
    const int first = first_chunk * chunk_channels + thread % own_cells * VECTOR, n = first_n + image;
    if (row < height) rows.count = c + 1;
    rows.targets[c] = row * (own_cells * 16 + 16) + thread % own_cells * 16;
    rows.live[c] = inside ? row_channels - first : 0;
    const index_t voxel = ((static_cast<index_t>(n) * size[0] + d) * size[1] + h) * size[2] + w;
    rows.sources[c] = in_rows ? input.data : reinterpret_cast<const scalar_t*>(prepared);
    if (rows.live[c] > 0) {
      rows.sources[c] += in_rows ? input.at(n, group * in_channels + first, d, h, w) - input.data
                                 : (group * static_cast<index_t>(voxels) + voxel) * row_channels + first;
    }
  }
  wait_for_launch_before();
  Run* const tables = reinterpret_cast<Run*>(memory + tables_at);
  const Run* const runs = reinterpret_cast<const Run*>(prepared + static_cast<index_t>(row_cells) * 4);
#pragma unroll 1
  for (int i = thread; i < reach_d + reach_h + reach_w; i += threads) {
    const int before = i < reach_d             ? at[0] * reach_d
                       : i < reach_d + reach_h ? (boxes_d - 1) * reach_d + at[1] * reach_h
                                               : (boxes_d - 1) * reach_d + (boxes_h - 1) * reach_h + at[2] * reach_w;
    cp_async<8>(shared_address(tables + i), runs + (before + i));
  }
#pragma unroll 1
  for (int chunk = 0; chunk < STAGES - 1; ++chunk) {
    if (chunk < own_chunks) rows.copy(stages + chunk * stage_bytes);
    cp_async_commit();
  }
  const int first_row = warp / 4 * own_rows * 16, first_column = warp % 4 * own_columns * 8;
  float sums[ROWS][COLUMNS][4] = {}, low[ROWS][COLUMNS][4] = {};
  const unsigned lane_rows = stages + (first_row + lane % 16) * (own_cells * 16 + 16) + lane / 16 * 16;
  const unsigned lane_columns = stages + columns_at + (lane % 16 * pitch + first_column + lane / 16 * 8) * SIZE;
  int stage = 0, ahead = STAGES - 1;
#pragma unroll 1
  for (int chunk = 0; chunk < own_chunks; ++chunk) {
    cp_async_wait<STAGES - 2>();
    __syncthreads();  // this stage has landed for all, and the one before has been read by all
    if (chunk + STAGES - 1 < own_chunks) {
      columns.copy(live, stages + ahead * stage_bytes + columns_at,
                   reinterpret_cast<scalar_t*>(memory + ahead * stage_bytes + columns_at));
      rows.copy(stages + ahead * stage_bytes);
      live -= chunk_channels;
    }
    cp_async_commit();
    const char* const now = memory + stage * stage_bytes;
    const scalar_t* const weights = reinterpret_cast<const scalar_t*>(now + columns_at) + first_column;
    const Stage mine{now + first_row * (own_cells * 16 + 16),
                     weights,
                     pitch,
                     lane,
                     own_rows,
                     own_columns,
                     own_cells,
                     lane_rows + stage * stage_bytes,
                     lane_columns + stage * stage_bytes};
    mine.multiply(sums, low);
    ahead = stage;
    if (++stage == STAGES) stage = 0;
  }
  cp_async_wait<0>();
  __syncthreads();  // all have read the last stage, whose place is now for the products
  float* const products = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int i = 0; i < ROWS && i < own_rows; ++i) {
#pragma unroll
    for (int j = 0; j < COLUMNS && j < own_columns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (PARTS == 2) sums[i][j][e] += low[i][j][e];
      }
      store_products(products + first_row * pitch + first_column, pitch, sums[i][j], lane, i, j, own_columns);
    }
  }
  __syncthreads();
  const Epilogue epilogue{bias};
  if (tile.together) {
    store_outputs<true>(problem, epilogue, output, partial_sums, products, tables, tile, {run_step_d, run_step_h, run_step_w},
                        {1, 1, 1}, threads, live_taps, tile_channels, tile_images, parts, reach_d, reach_h, reach_w,
                        summed != 0);
  } else {
    store_outputs<false>(problem, epilogue, output, partial_sums, products, tables, tile,
                         {class_step_d, class_step_h, class_step_w}, {split_d, split_h, split_w}, threads, 1, class_channels,
                         tile_images, parts, reach_d, reach_h, reach_w, summed != 0);
  }
}

// ---- the sums of parts of the depth, and of boxes ----

// The boxes whose sums an output has a share of, and where it lies in the first of them.
struct Boxes {
  int first, end;
};

__device__ __forceinline__ Boxes boxes_of(const Problem& problem, int axis, int output, int boxes, int length, int overlap) {
  if (boxes == 1) return {0, 1};
  const index_t shifted = static_cast<index_t>(output) + problem.padding[axis];
  const index_t step = static_cast<index_t>(length) * problem.stride[axis];
  const int last = static_cast<int>(min(static_cast<index_t>(boxes - 1), shifted / step));
  if (!overlap) return {last, last + 1};
  const index_t beyond = shifted - static_cast<index_t>(length - 1) * problem.stride[axis] -
                         static_cast<index_t>(problem.kernel_size[axis] - 1) * problem.dilation[axis];
  return {beyond > 0 ? static_cast<int>(min(static_cast<index_t>(boxes), (beyond + step - 1) / step)) : 0, last + 1};
}

extern "C" __global__ void __launch_bounds__(256)
    convt3d_add_partial_sums(const Problem problem, const accum_t* __restrict__ partial_sums, const scalar_t* __restrict__ bias,
                             const View<scalar_t> output, const int parts, const int tile_images, const int channel_quads,
                             const int boxes_d, const int boxes_h, const int boxes_w, const int box_d, const int box_h,
                             const int box_w, const int reach_d, const int reach_h, const int reach_w, const int overlap_d,
                             const int overlap_h, const int overlap_w) {
  const int index = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  const int (&size)[3] = problem.output_size;
  const int volume = size[0] * size[1] * size[2], place = index % volume, quad = index / volume % channel_quads,
            n = index / volume / channel_quads;
  wait_for_launch_before();
  if (n >= problem.batch) return;
  const int w = place % size[2], h = place / size[2] % size[1], d = place / size[2] / size[1];
  const Boxes of_d = boxes_of(problem, 0, d, boxes_d, box_d, overlap_d),
              of_h = boxes_of(problem, 1, h, boxes_h, box_h, overlap_h),
              of_w = boxes_of(problem, 2, w, boxes_w, box_w, overlap_w);
  const index_t reach = static_cast<index_t>(reach_d) * reach_h * reach_w;
  const int co = quad * 4, count = min(4, problem.out_channels - co);
  const Epilogue epilogue{bias};
  float sum[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) sum[q] = epilogue.start(co + q, q < count);
  // Where the place lies in a box: its distance from the first output of the box.
  const auto inside = [&](int axis, int output_index, int box, int length) {
    const index_t first = static_cast<index_t>(box) * length * problem.stride[axis] - problem.padding[axis];
    return static_cast<int>(output_index - (box == 0 ? 0 : max(index_t(0), first)));
  };
  const int tile = n / tile_images;
  for (int i = of_d.first; i < of_d.end; ++i) {
    for (int j = of_h.first; j < of_h.end; ++j) {
      for (int k = of_w.first; k < of_w.end; ++k) {
        const index_t row_tile = ((static_cast<index_t>(tile) * boxes_d + i) * boxes_h + j) * boxes_w + k;
        const accum_t* from = partial_sums +
                              ((row_tile * parts * tile_images + n % tile_images) * problem.out_channels + co) * reach +
                              (inside(0, d, i, box_d) * reach_h + inside(1, h, j, box_h)) * reach_w + inside(2, w, k, box_w);
        for (int part = 0; part < parts; ++part, from += tile_images * problem.out_channels * reach) {
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            if (q < count) sum[q] += from[q * reach];
          }
        }
      }
    }
  }
  store_four(epilogue, output.at(n, co, d, h, w), sum, output.stride[1], count, output.stride[1] == 1);
}
