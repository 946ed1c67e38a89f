/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[specialize]
KERNEL_D = "kernel_d"
KERNEL_H = "kernel_h"
KERNEL_W = "kernel_w"
COLUMN_WARPS = "column_warps"
HALF_STAGE = "half_stage"
[constants]
voxels = "batch * input_voxels"
# A column is a channel of a tap; those of a tap are a multiple of four.
tap_columns = "4 * ceil_div(out_channels_per_group, 4)"
columns = "taps * tap_columns"
large_blocks = "ceil_div(voxels, 128) * ceil_div(columns, 128) * groups"
medium_blocks = "ceil_div(voxels, 64) * ceil_div(columns, 64) * groups"
fitting = "1 if large_blocks >= LARGE_BLOCKS * multiprocessors else 2 if medium_blocks >= MEDIUM_BLOCKS * multiprocessors else 3"
tile = "TILE if TILE else fitting"
edge = "128 if tile == 1 else 64 if tile == 2 else 32"
parts = "1 if tile == 1 else 2 if tile == 2 else 8"
ring = "2 if tile == 1 else STAGES"
# A warp has 32 columns; the large tile has as many warps side by side as divide the columns evenly.
column_warps = "ceil_div(ceil_div(columns, ceil_div(columns, MOST_COLUMNS)), 32) if tile == 1 else edge // 32"
column_tiles = "ceil_div(columns, 32 * column_warps)"
threads = "64 * column_warps if tile == 1 else 128 if tile == 2 else 256"
# Whether a tile's last stage has channels in its first half alone, which is worth a branch where stages are few.
half_stage = "1 if tile == 1 and 0 < in_channels_per_group % 16 <= 8 and in_channels_per_group < 128 else 0"
stage_bytes = "4 * edge * (16 * parts + 4) + 2048 * column_warps * parts"
[restrictions]
"kernel_size == stride and padding == (0, 0, 0) and output_padding == (0, 0, 0)" = "it is for kernel = stride with no padding, where each input owns a block of the output"
"all((dilation_d == 1 or kernel_d == 1, dilation_h == 1 or kernel_h == 1, dilation_w == 1 or kernel_w == 1))" = "dilation must be 1, else taps do not fill the block"
"max(voxels, columns, groups * in_channels_per_group) < 2 * 1024 * 1024 * 1024 - 128" = "voxels and columns of the product must be below 2^31"
[search]
TILE = [1, 2, 3]
MOST_COLUMNS = [64, 128]
STAGES = [3, 4]
[cost]
steps = "in_channels_per_group"
products = "edge * 32 * column_warps"
bytes = "(edge + 32 * column_warps) * itemsize"
[workspace]
packed_weight = "groups * in_channels_per_group * columns"
[[launch]]
symbol = "convt3d_pack_columns"
packs = "packed_weight"
grid = "groups * in_channels_per_group"
block = 256
[[launch]]
symbol = "convt3d_fprop_patch_rows_128"
when = "tile == 1"
grid = "ceil_div(voxels, edge) * groups * column_tiles"
block = "threads"
shared_bytes = "16 * edge + ring * stage_bytes"
[[launch]]
symbol = "convt3d_fprop_patch_rows_64x64"
when = "tile == 2"
grid = "ceil_div(voxels, edge) * groups * column_tiles"
block = "threads"
shared_bytes = "16 * edge + ring * stage_bytes"
[[launch]]
symbol = "convt3d_fprop_patch_rows_32x32"
when = "tile == 3"
grid = "ceil_div(voxels, edge) * groups * column_tiles"
block = "threads"
shared_bytes = "16 * edge + ring * stage_bytes"
*/
// Kernel = stride where channels lie together, on the CUDA cores: one matrix product, with the reordering fused into the store.
//
//   output[n, co, i*stride + t] = bias[co] + sum over ci of input[n, ci, i] * weight[ci, co, t]
//
// with a row for each voxel (n, i), a column for each (t, co), and depth ci. A voxel's channels are read, and a tap's channels written, as
// they lie: so columns are taps first and the weight is packed in that order. A block stages some channels of a tile of both by cp.async,
// in a ring of buffers, while it multiplies those before: of inputs [voxel][channel], of weights [channel][column].
//
// Eight lanes of a warp have voxels, four have columns. A thread reads four channels of four of its voxels at once, then the weights of
// one channel after the other: a voxel's row is 16 bytes longer than its channels, so that eight of them meet all banks. Its columns
// are two times 4 neighbours, 16 apart: so the four lanes of a voxel store 64 bytes.
//
// Tiles of 64 x 64 and 32 x 32 are for few voxels: there PARTS of the threads have the whole tile, each with its share of the channels of
// a stage, and their sums pass through shared memory and are added in order.
#include "convt3d.cuh"
#include "convt3d/ptx/copy_async.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/pipe/patch.cuh"
#include "convt3d/core/specialized.cuh"

// 1, 2, 3: 128 x 32 to 128, 64 x 64, 32 x 32; 0: the largest of which each multiprocessor gets LARGE_BLOCKS or MEDIUM_BLOCKS, else the last.
#ifndef TILE
#define TILE 0
#endif
#ifndef LARGE_BLOCKS
#define LARGE_BLOCKS 3
#endif
#ifndef MEDIUM_BLOCKS
#define MEDIUM_BLOCKS 2
#endif
// Columns of the large tile, at most.
#ifndef MOST_COLUMNS
#define MOST_COLUMNS 128
#endif
// Of the ring of the two smaller tiles.
#ifndef STAGES
#define STAGES 3
#endif

static_assert(STAGES >= 3, "the sums of the parts take the room of two stages");

// [group][channel in][tap][channel out], a multiple of four channels with zeros behind them.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_pack_columns(const Problem problem, const View<const scalar_t> weight, accum_t* __restrict__ packed_weight,
                         const int tap_columns, const int columns) {
  const int kernel_h = SPECIALIZED(KERNEL_H, problem.kernel_size[1]), kernel_w = SPECIALIZED(KERNEL_W, problem.kernel_size[2]);
  const int channel = static_cast<int>(blockIdx.x), out_channels = problem.out_channels / problem.groups;
  for (int column = static_cast<int>(threadIdx.x); column < columns; column += 256) {
    const int tap = column / tap_columns, co = column % tap_columns, row = tap / kernel_w;
    const scalar_t value =
        co < out_channels ? *weight.at(channel, co, row / kernel_h, row % kernel_h, tap % kernel_w) : scalar_t(0);
    packed_weight[static_cast<index_t>(channel) * columns + column] = value;
  }
}

// A tile of 8 * VOXELS * WARPS_V voxels x 32 * column_warps columns: WARPS_V x column_warps warps for each part, each with 8 lanes of VOXELS
// and 4 of 8 columns.
template <int VOXELS, int WARPS_V, int PARTS, int RING>
__device__ __forceinline__ void multiply_tile(const Problem& problem, const View<const scalar_t>& input,
                                              const accum_t* __restrict__ packed_weight, const Epilogue& epilogue,
                                              const View<scalar_t>& output, int voxels, int tap_columns, int columns,
                                              int column_tiles, int column_warps, int half_stage) {
  constexpr int ROWS = 8 * VOXELS * WARPS_V, PART_DEPTH = 16, DEPTH = PART_DEPTH * PARTS, PITCH = DEPTH + 4;
  const int warps = WARPS_V * column_warps, threads = 32 * warps * PARTS;
  const int tile_width = 32 * column_warps, stage_elements = ROWS * PITCH + DEPTH * tile_width;
  extern __shared__ uint4 shared[];
  Place* const places = reinterpret_cast<Place*>(shared);             // of the tile's voxels
  accum_t* const stages = reinterpret_cast<accum_t*>(places + ROWS);  // [RING] of [voxel][channel], [channel][column]

  // blockIdx.x = (voxel tile * groups + group) * column_tiles + column tile
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32 % warps;
  const int first_column = static_cast<int>(blockIdx.x % column_tiles) * tile_width;
  const int group = static_cast<int>(blockIdx.x / column_tiles % problem.groups);
  const int first_voxel = static_cast<int>(blockIdx.x / column_tiles / problem.groups) * ROWS;
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int kernel_d = SPECIALIZED(KERNEL_D, problem.kernel_size[0]), kernel_h = SPECIALIZED(KERNEL_H, problem.kernel_size[1]),
            kernel_w = SPECIALIZED(KERNEL_W, problem.kernel_size[2]);
  for (int row = thread; row < ROWS; row += threads) {
    places[row] = place_of(problem, first_voxel + row, voxels, input, output, group * channels, group * out_channels, kernel_d,
                           kernel_h, kernel_w);
  }
  __syncthreads();

  const bool input_vectors = input.stride[1] == 1 && channels % 4 == 0 &&
                             aligned(input, input.stride[0] | input.stride[2] | input.stride[3] | input.stride[4], 4);
  const bool output_vectors = output.stride[1] == 1 && out_channels % 4 == 0 &&
                              aligned(output, output.stride[0] | output.stride[2] | output.stride[3] | output.stride[4], 4);
  const accum_t* const weights = packed_weight + static_cast<index_t>(group) * channels * columns + first_column;
  // What lies past the last voxel, channel or column is zeros.
  const auto stage = [&](int slot, int first_channel) {
    accum_t* const rows = stages + slot * stage_elements;
    const int first = computed_anew(thread);
    if (input_vectors) {
#pragma unroll
      for (int unit = first; unit < ROWS * DEPTH / 4; unit += threads) {
        const int row = unit / (DEPTH / 4), k = unit % (DEPTH / 4) * 4;
        const index_t place = places[row].input;
        const bool live = place >= 0 && first_channel + k < channels;
        copy_async(reinterpret_cast<Vector<4>*>(rows + row * PITCH + k),
                   reinterpret_cast<const Vector<4>*>(input.data + (live ? place + first_channel + k : 0)), live);
      }
    } else {
#pragma unroll 4
      for (int unit = first; unit < ROWS * DEPTH; unit += threads) {
        const int row = unit / DEPTH, k = unit % DEPTH;
        const index_t place = places[row].input;
        const bool live = place >= 0 && first_channel + k < channels;
        copy_async(rows + row * PITCH + k, input.data + (live ? place + (first_channel + k) * input.stride[1] : 0), live);
      }
    }
#pragma unroll
    for (int unit = first; unit < DEPTH * tile_width / 4; unit += threads) {
      const int k = unit / (tile_width / 4), column = unit % (tile_width / 4) * 4;
      const bool live = first_channel + k < channels && first_column + column < columns;
      copy_async(reinterpret_cast<Vector<4>*>(rows + ROWS * PITCH + k * tile_width + column),
                 reinterpret_cast<const Vector<4>*>(live ? weights + static_cast<index_t>(first_channel + k) * columns + column
                                                         : packed_weight),
                 live);
    }
  };

  const int own_row = warp % WARPS_V * (8 * VOXELS) + lane / 4, own_column = warp / WARPS_V * 32 + lane % 4 * 4;
  const int own_depth = thread / (threads / PARTS) * PART_DEPTH;
  accum_t sums[VOXELS][8] = {};
  const int steps = (channels + DEPTH - 1) / DEPTH;
#pragma unroll
  for (int s = 0; s + 1 < RING; ++s) {
    if (s < steps) stage(s, s * DEPTH);
    cp_async_commit();
  }
#pragma unroll 1
  for (int step = 0, slot = 0; step < steps; ++step) {
    cp_async_wait<RING - 2>();
    __syncthreads();  // the stage to be multiplied has landed, and the one before it has been read
    if (step + RING - 1 < steps) stage(slot == 0 ? RING - 1 : slot - 1, (step + RING - 1) * DEPTH);
    cp_async_commit();
    const accum_t* const rows = stages + slot * stage_elements + own_row * PITCH + own_depth;
    const accum_t* const by_channel = stages + slot * stage_elements + ROWS * PITCH + own_depth * tile_width + own_column;
    slot = slot + 1 == RING ? 0 : slot + 1;
#pragma unroll
    for (int k = 0; k < PART_DEPTH; k += 4) {
      if (PARTS == 1 && SPECIALIZED(HALF_STAGE, half_stage) != 0 && k == PART_DEPTH / 2 && step * DEPTH + k >= channels) break;
#pragma unroll
      for (int h = 0; h < VOXELS; h += 4) {
        Vector<4> x[4];
#pragma unroll
        for (int v = 0; v < 4; ++v) x[v] = *reinterpret_cast<const Vector<4>*>(rows + (h + v) * 8 * PITCH + k);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Vector<4> w[2] = {*reinterpret_cast<const Vector<4>*>(by_channel + (k + e) * tile_width),
                                  *reinterpret_cast<const Vector<4>*>(by_channel + (k + e) * tile_width + 16)};
#pragma unroll
          for (int c = 0; c < 8; ++c) {
#pragma unroll
            for (int v = 0; v < 4; ++v) sums[h + v][c] += x[v].element[e] * w[c / 4].element[c % 4];
          }
        }
      }
    }
  }

  // Store four neighbouring columns of a voxel, channels of one tap.
  const auto store = [&](int row, int column, const accum_t(&four)[4]) {
    const index_t place = places[row].output;
    const int tap = (first_column + column) / tap_columns, co = (first_column + column) % tap_columns, line = tap / kernel_w;
    if (place < 0 || first_column + column >= columns) return;
    scalar_t* const y = output.data + (place + line / kernel_h * output.stride[2] + line % kernel_h * output.stride[3] +
                                       tap % kernel_w * output.stride[4] + co * output.stride[1]);
    Vector<4> run;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      run.element[c] = epilogue.finish(four[c], epilogue.start(group * out_channels + co + c, co + c < out_channels));
    }
    if (output_vectors) {
      *reinterpret_cast<Vector<4>*>(y) = run;
      return;
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (co + c < out_channels) y[c * output.stride[1]] = run.element[c];
    }
  };
  if constexpr (PARTS == 1) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int v = 0; v < VOXELS; ++v) {
        const accum_t four[4] = {sums[v][half * 4], sums[v][half * 4 + 1], sums[v][half * 4 + 2], sums[v][half * 4 + 3]};
        store(own_row + v * 8, own_column + half * 16, four);
      }
    }
  } else {
    accum_t* const part_sums = stages;  // [part][voxel][column], in place of the stages
    cp_async_wait_all();
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int v = 0; v < VOXELS; ++v) {
        const int row = thread / (threads / PARTS) * ROWS + own_row + v * 8;
        *reinterpret_cast<Vector<4>*>(part_sums + row * tile_width + own_column + half * 16) = {
            sums[v][half * 4], sums[v][half * 4 + 1], sums[v][half * 4 + 2], sums[v][half * 4 + 3]};
      }
    }
    __syncthreads();
    for (int unit = thread; unit < ROWS * tile_width / 4; unit += threads) {
      const int row = unit / (tile_width / 4), column = unit % (tile_width / 4) * 4;
      accum_t total[4] = {};
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const Vector<4> four = *reinterpret_cast<const Vector<4>*>(part_sums + (part * ROWS + row) * tile_width + column);
#pragma unroll
        for (int c = 0; c < 4; ++c) total[c] += four.element[c];
      }
      store(row, column, total);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convt3d_fprop_patch_rows_128(const Problem problem, const View<const scalar_t> input,
                                 const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                 const View<scalar_t> output, const int voxels, const int tap_columns, const int columns,
                                 const int column_tiles, const int column_warps, const int half_stage) {
  multiply_tile<8, 2, 1, 2>(problem, input, packed_weight, {bias}, output, voxels, tap_columns, columns, column_tiles,
                            SPECIALIZED(COLUMN_WARPS, column_warps), half_stage);
}

extern "C" __global__ void __launch_bounds__(128, 4)
    convt3d_fprop_patch_rows_64x64(const Problem problem, const View<const scalar_t> input,
                                   const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                   const View<scalar_t> output, const int voxels, const int tap_columns, const int columns,
                                   const int column_tiles) {
  multiply_tile<8, 1, 2, STAGES>(problem, input, packed_weight, {bias}, output, voxels, tap_columns, columns, column_tiles, 2,
                                 0);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convt3d_fprop_patch_rows_32x32(const Problem problem, const View<const scalar_t> input,
                                   const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                   const View<scalar_t> output, const int voxels, const int tap_columns, const int columns,
                                   const int column_tiles) {
  multiply_tile<4, 1, 8, STAGES>(problem, input, packed_weight, {bias}, output, voxels, tap_columns, columns, column_tiles, 1,
                                 0);
}
