/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[specialize]
KERNEL_D = "kernel_d"
KERNEL_H = "kernel_h"
KERNEL_W = "kernel_w"
ROWS_APART = "1 if kernel_w == 2 and input_w % 4 != 0 else 0"
TILE_COLUMNS = "tile_columns"
HALF_STAGE = "half_stage"
[constants]
voxels = "batch * input_voxels"
columns = "out_channels_per_group * taps"
large_blocks = "ceil_div(voxels, 128) * ceil_div(columns, 128) * groups"
medium_blocks = "ceil_div(voxels, 64) * ceil_div(columns, 64) * groups"
# The large tile stores runs of four voxels, of which shorter rows have none.
fitting = "1 if large_blocks >= LARGE_BLOCKS * multiprocessors and (kernel_w != 2 or input_w >= 4) else 2 if medium_blocks >= MEDIUM_BLOCKS * multiprocessors else 3"
tile = "TILE if TILE else fitting"
edge = "128 if tile == 1 else 64 if tile == 2 else 32"
# The large tile has as many columns as divide them evenly.
tile_columns = "max(64, 16 * ceil_div(ceil_div(columns, ceil_div(columns, MOST_COLUMNS)), 16)) if tile == 1 else edge"
column_tiles = "ceil_div(columns, tile_columns)"
# Whether a tile's last stage has channels in its first half alone, which is worth a branch where stages are few.
half_stage = "1 if tile == 1 and 0 < in_channels_per_group % 16 <= 8 and in_channels_per_group < 128 else 0"
voxel_tiles = "ceil_div(voxels, edge)"
block_tiles = "max(1, min(BLOCK_TILES, large_blocks // (8 * multiprocessors))) if tile == 1 else 1"
blocks = "ceil_div(voxel_tiles, block_tiles) * groups * column_tiles"
[restrictions]
"kernel_size == stride and padding == (0, 0, 0) and output_padding == (0, 0, 0)" = "it is for kernel = stride with no padding, where each input owns a block of the output"
"all((dilation_d == 1 or kernel_d == 1, dilation_h == 1 or kernel_h == 1, dilation_w == 1 or kernel_w == 1))" = "dilation must be 1, else taps do not fill the block"
"voxels < 2 * 1024 * 1024 * 1024 - 128 and columns < 2 * 1024 * 1024 * 1024 - 128" = "voxels and columns of the product must be below 2^31"
[search]
TILE = [1, 2, 3]
MOST_COLUMNS = [64, 128]
BLOCK_TILES = [1, 2, 4]
STAGES = [3, 4]
[cost]
steps = "block_tiles * in_channels_per_group"
products = "edge * tile_columns"
bytes = "(edge + tile_columns) * itemsize"
[[launch]]
symbol = "convt3d_fprop_patch_128"
when = "tile == 1"
grid = "blocks"
block = "2 * tile_columns"
shared_bytes = "128 * (128 + tile_columns)"
[[launch]]
symbol = "convt3d_fprop_patch_64x64"
when = "tile == 2"
grid = "blocks"
block = "64 * MEDIUM_PARTS"
shared_bytes = "STAGES * MEDIUM_PARTS * 8192"
[[launch]]
symbol = "convt3d_fprop_patch_32x32"
when = "tile == 3"
grid = "blocks"
block = 256
shared_bytes = "STAGES * 32768"
*/
// Kernel = stride: each input voxel owns a block of kernel_size outputs, so the whole layer is one matrix product with the reordering
// fused into the store (depth to space):
//
//   output[n, co, i*stride + t] = bias[co] + sum over ci of input[n, ci, i] * weight[ci, co, t]
//
// with a row for each voxel (n, i), a column for each (co, t), and depth ci. Both operands already lie as the product wants them, rows
// or columns contiguous for each ci, so nothing is packed. A block stages some input channels of a tile of both by cp.async, in a ring
// of buffers, while it multiplies those before. A thread owns one or two times 4 neighbouring voxels x 8 neighbouring columns.
//   128 x 64 to 128: a block owns a few tiles; the next tile's first channels are on their way while one tile is stored.
//   64 x 64, 32 x 32: where there would be few blocks. The threads form PARTS, each with the whole tile and its share of the channels of
//   a stage. The parts' sums pass through shared memory, where each thread adds those of 2 voxels x 2 columns in order.
// Where the stride along w is 2, 2 voxels and 2 taps are 4 neighbouring outputs, written in a 16-byte store, and where it is 4 its taps. Where rows of voxels do not
// end on fours, a thread's voxels may be of two rows, and a row begin amid 16 bytes: pairs are stored then, two at once where they lie on 16 bytes.
#include "convt3d.cuh"
#include "convt3d/ptx/copy_async.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/pipe/patch.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/epilogue/store_piece.cuh"

// 1, 2, 3: 128 x 64 to 128, 64 x 64, 32 x 32; 0: the largest of which each multiprocessor gets LARGE_BLOCKS or MEDIUM_BLOCKS, else the last.
#ifndef TILE
#define TILE 0
#endif
#ifndef LARGE_BLOCKS
#define LARGE_BLOCKS 3
#endif
#ifndef MEDIUM_BLOCKS
#define MEDIUM_BLOCKS 2
#endif
#ifndef MEDIUM_PARTS
#define MEDIUM_PARTS 2
#endif
// Columns of the large tile, at most.
#ifndef MOST_COLUMNS
#define MOST_COLUMNS 128
#endif
// Of the ring of the two smaller tiles.
#ifndef STAGES
#define STAGES 3
#endif
#ifndef BLOCK_TILES
#define BLOCK_TILES 4
#endif

static_assert(STAGES >= 2, "one stage is filled while another is read; the sums of the parts take the room of two");

// Row `voxel` of the product as an index of a tensor with the channels left out.
__device__ inline Voxel voxel_of_row(const Problem& problem, int row) {
  const int *size = problem.input_size, line = row / size[2], plane = line / size[1], n = plane / size[0];
  return {n, 0, plane - n * size[0], line - plane * size[1], row - line * size[2]};
}

// A tap and its channel, stepped along the columns.
struct Column {
  int co, d, h, w;
};

// The kernel's size, known when it is compiled for a GPU, so that the divisions by it are shifts or multiplications.
struct Taps {
  int d, h, w;

  __device__ Column column_at(int column) const {
    const int row = column / w, plane = row / h;
    return {plane / d, plane % d, row % h, column % w};
  }
  __device__ void step(Column& column, int by) const {
    column.w += by;
    if (column.w < w) return;
    column.w = 0;
    if (++column.h < h) return;
    column.h = 0;
    if (++column.d < d) return;
    column.d = 0;
    ++column.co;
  }
};

template <class T>
__device__ inline bool in_vectors(const View<T>& tensor) {
  bool whole = reinterpret_cast<index_t>(tensor.data) % 16 == 0 && tensor.stride[4] == 1;
  for (int i = 0; i < 4; ++i) whole = whole && tensor.stride[i] % 4 == 0;
  return whole;
}

// A thread's part in the copies of one operand's stages of DEPTH rows of `edge` elements: a unit, 4 neighbours or one, of every so many
// rows. Threads that are too few for a whole row have none.
template <int DEPTH>
struct Share {
  int edge, threads;
  bool vectors;

  __device__ __forceinline__ int units() const { return vectors ? edge / 4 : edge; }  // of a row
  __device__ __forceinline__ int first_row() const { return static_cast<int>(threadIdx.x) / units(); }
  __device__ __forceinline__ int first() const { return static_cast<int>(threadIdx.x) % units() * (vectors ? 4 : 1); }

  template <class Unit>
  __device__ __forceinline__ void copy_units(accum_t* target, const scalar_t* from, index_t next_channel, int left) const {
    constexpr int WIDTH = sizeof(Unit) / sizeof(accum_t);
    const int units = edge / WIDTH, apart = threads / units, thread = computed_anew(static_cast<int>(threadIdx.x));
    if (threads % units != 0 && thread >= apart * units) return;
    Unit* to = reinterpret_cast<Unit*>(target) + thread;
    const int own = thread / units;
#pragma unroll(WIDTH == 4 ? DEPTH : 1)
    for (int k = 0; k < DEPTH; k += apart, from += apart * next_channel, to += apart * units) {
      if (DEPTH % apart == 0 || k + own < DEPTH) copy_async(to, reinterpret_cast<const Unit*>(from), k + own < left);
    }
  }
  __device__ __forceinline__ void copy(accum_t* target, const scalar_t* from, index_t next_channel, int left) const {
    if (vectors) {
      copy_units<Vector<4>>(target, from, next_channel, left);
    } else {
      copy_units<accum_t>(target, from, next_channel, left);
    }
  }
};

// Whether rows of voxels do not end on fours, so that a thread's voxels may be of two rows.
__device__ inline bool rows_apart(const Problem& problem) {
  return SPECIALIZED(ROWS_APART, problem.kernel_size[2] == 2 && problem.input_size[2] % 4 != 0) != 0;
}

// Store the sums of two columns, the taps of w, of RUN voxels of a row, from `y` on: aligned pairs, and where two lie on 16 bytes both at once.
template <int RUN, int COLUMNS>
__device__ __forceinline__ void store_pairs(const accum_t (&sums)[RUN][COLUMNS], int c, scalar_t* y) {
  const int first = reinterpret_cast<index_t>(y) % 16 == 0 ? 0 : 1;  // pair that begins 16 bytes
#pragma unroll
  for (int e = 0; e < RUN; ++e) {
    const bool begins = e % 2 == first && e + 1 < RUN, ends = e > 0 && e % 2 != first;
    if (begins) *reinterpret_cast<Vector<4>*>(y + e * 2) = {sums[e][c], sums[e][c + 1], sums[e + 1][c], sums[e + 1][c + 1]};
    if (!begins && !ends) store_pair(y + e * 2, sums[e][c], sums[e][c + 1]);
  }
}

// Add the bias and store what a thread has of a tile: RUN voxels from `first`, and where RUNS is 2 as many 64 further on.
template <int RUNS, int RUN, int COLUMNS>
__device__ __forceinline__ void store_sums(accum_t (&sums)[RUNS][RUN][COLUMNS], const Problem& problem,
                                           const Epilogue& epilogue, const View<scalar_t>& output, const Taps& taps, int group,
                                           int out_channels, int first, int voxels, int first_column) {
  const bool output_vectors =
      (RUN < 4 || !rows_apart(problem)) && in_vectors(output) && problem.input_size[2] % RUN == 0 && taps.w == 2;
  const bool in_pairs = rows_apart(problem) && output.stride[4] == 1 &&
                        aligned(output, output.stride[0] | output.stride[1] | output.stride[2] | output.stride[3], 2);
  const bool fours = taps.w % 4 == 0 && in_vectors(output);  // taps of a voxel
  if (epilogue.changes_sums()) {
    Column at = taps.column_at(first_column);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c, taps.step(at, 1)) {
      const accum_t start = at.co < out_channels ? epilogue.start(group * out_channels + at.co) : accum_t(0);
#pragma unroll
      for (int v = 0; v < RUNS * RUN; ++v) sums[v / RUN][v % RUN][c] = epilogue.finish(sums[v / RUN][v % RUN][c], start);
    }
  }
#pragma unroll
  for (int run = 0; run < RUNS; ++run) {
    const int from = first + run * 64;
    Column at = taps.column_at(first_column);
    if (output_vectors) {  // rows of voxels end on runs: all are inside, or none
      if (from >= voxels) continue;
      const Voxel v = voxel_of_row(problem, from);
      scalar_t* corner = output.at(v.n, group * out_channels, v.d * taps.d, v.h * taps.h, v.w * 2);
#pragma unroll
      for (int c = 0; c < COLUMNS; c += 2, taps.step(at, 2)) {
        if (at.co >= out_channels) continue;
        const auto& s = sums[run];
        Vector<4>* y =
            reinterpret_cast<Vector<4>*>(corner + at.co * output.stride[1] + at.d * output.stride[2] + at.h * output.stride[3]);
#pragma unroll
        for (int e = 0; e < RUN; e += 2) y[e / 2] = {s[e][c], s[e][c + 1], s[e + 1][c], s[e + 1][c + 1]};
      }
    } else if (in_pairs && from < voxels && from % problem.input_size[2] + RUN <= problem.input_size[2]) {
      const Voxel v = voxel_of_row(problem, from);
      scalar_t* corner = output.at(v.n, group * out_channels, v.d * taps.d, v.h * taps.h, v.w * 2);
#pragma unroll
      for (int c = 0; c < COLUMNS; c += 2, taps.step(at, 2)) {
        if (at.co >= out_channels) continue;
        store_pairs(sums[run], c, corner + at.co * output.stride[1] + at.d * output.stride[2] + at.h * output.stride[3]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < RUN; ++e) {
        if (from + e >= voxels) break;
        const Voxel v = voxel_of_row(problem, from + e);
        scalar_t* corner = output.at(v.n, group * out_channels, v.d * taps.d, v.h * taps.h, v.w * taps.w);
        Column to = at;
        if (COLUMNS % 4 == 0 && fours) {
#pragma unroll
          for (int c = 0; c < COLUMNS; c += 4, taps.step(to, 4)) {
            const auto& s = sums[run][e];
            if (to.co >= out_channels) continue;
            *reinterpret_cast<Vector<4>*>(corner + to.co * output.stride[1] + to.d * output.stride[2] +
                                          to.h * output.stride[3] + to.w) = {s[c], s[c + 1], s[c + 2], s[c + 3]};
          }
          continue;
        }
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c, taps.step(to, 1)) {
          if (to.co < out_channels) {
            corner[to.co * output.stride[1] + to.d * output.stride[2] + to.h * output.stride[3] + to.w * output.stride[4]] =
                sums[run][e][c];
          }
        }
      }
    }
  }
}

// A block's tiles of EDGE voxels x `edge_columns`. A thread has RUNS x 4 voxels x 8 columns of them, for its part of the channels.
template <int EDGE, int RUNS, int PARTS, int RING>
__device__ __forceinline__ void multiply_tiles(const Problem& problem, const View<const scalar_t>& input,
                                               const View<const scalar_t>& weight, const Epilogue& epilogue,
                                               const View<scalar_t>& output, int voxels, int columns, int edge_columns,
                                               int column_tiles, int voxel_tiles, int block_tiles, int half_stage) {
  constexpr int PART_DEPTH = 16, DEPTH = PART_DEPTH * PARTS, RUN_THREADS = EDGE / RUNS / 4;
  const int part_threads = RUN_THREADS * edge_columns / 8, threads = part_threads * PARTS;
  extern __shared__ uint4 shared[];
  const auto inputs = reinterpret_cast<accum_t(*)[DEPTH][EDGE]>(shared);  // [RING]
  accum_t* const weights = reinterpret_cast<accum_t*>(inputs + RING);     // [RING][DEPTH][column]

  // blockIdx.x = (run of voxel tiles * groups + group) * column_tiles + column tile
  const int thread = static_cast<int>(threadIdx.x), first_column = static_cast<int>(blockIdx.x % column_tiles) * edge_columns;
  const int group = static_cast<int>(blockIdx.x / column_tiles % problem.groups);
  const int first_tile = static_cast<int>(blockIdx.x / column_tiles / problem.groups) * block_tiles;
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const Taps taps = {SPECIALIZED(KERNEL_D, problem.kernel_size[0]), SPECIALIZED(KERNEL_H, problem.kernel_size[1]),
                     SPECIALIZED(KERNEL_W, problem.kernel_size[2])};

  const bool input_vectors =
      rows_apart(problem) ? made_of(input, problem.input_size, 4) : in_vectors(input) && problem.input_size[2] % 4 == 0;
  const bool weight_vectors = reinterpret_cast<index_t>(weight.data) % 16 == 0 && columns % 4 == 0 &&
                              weight.stride[0] % 4 == 0 && weight.stride[1] == taps.d * taps.h * taps.w &&
                              weight.stride[2] == taps.h * taps.w && weight.stride[3] == taps.w && weight.stride[4] == 1;
  // Past the last column or voxel a thread copies the first, whose sums are not stored.
  const Share<DEPTH> weight_share{edge_columns, threads, weight_vectors}, input_share{EDGE, threads, input_vectors};
  const int column = first_column + weight_share.first();
  int row = first_tile * EDGE + input_share.first();  // staged next
  const Column t = taps.column_at(column < columns ? column : 0);
  const scalar_t* weight_from = weight.at(group * channels + weight_share.first_row(), t.co, t.d, t.h, t.w);
  const auto first_input = [&]() -> const scalar_t* {
    const Voxel i = voxel_of_row(problem, row < voxels ? row : 0);
    return input.at(i.n, group * channels + input_share.first_row(), i.d, i.h, i.w);
  };
  const scalar_t* input_from = PARTS == 1 ? input.data : first_input();

  // Neighbouring lanes have neighbouring quads of voxels, and again half a tile further on where RUNS is 2.
  const int quad = thread % RUN_THREADS * 4, thread_column = thread % part_threads / RUN_THREADS * 8;
  const int part_depth = thread / part_threads * PART_DEPTH;
  accum_t sums[RUNS][4][8] = {};

  // Stages follow one another from tile to tile: `ahead` counts the channels of the tile being staged, `done` of that being multiplied.
  const int tiles = min(block_tiles, voxel_tiles - first_tile), stages = (channels + DEPTH - 1) / DEPTH;
  int first_voxel = first_tile * EDGE, ahead = 0, done = 0;
#pragma unroll 1
  for (int step = 0, buffer = 0; step < tiles * stages + RING - 1; ++step) {
    cp_async_wait<RING - 2>();
    __syncthreads();  // the stage to be multiplied has landed, and the one before it has been read
    if (step < tiles * stages) {
      if (PARTS == 1 && ahead == 0) input_from = first_input();  // a smaller tile is the block's only one
      input_share.copy(inputs[buffer][0], input_from, input.stride[1], channels - ahead);
      weight_share.copy(weights + buffer * (DEPTH * edge_columns), weight_from, weight.stride[0], channels - ahead);
      input_from += DEPTH * input.stride[1];
      weight_from += DEPTH * weight.stride[0];
      ahead += DEPTH;
      if (PARTS == 1 && ahead >= channels) {
        weight_from -= ahead * weight.stride[0];
        ahead = 0;
        row += EDGE;
      }
    }
    cp_async_commit();
    buffer = buffer + 1 == RING ? 0 : buffer + 1;  // the oldest one
    if (step < RING - 1) continue;
#pragma unroll
    for (int k = 0; k < PART_DEPTH; ++k) {
      if (PARTS == 1 && SPECIALIZED(HALF_STAGE, half_stage) != 0 && k == PART_DEPTH / 2 && done + k >= channels) break;
      accum_t x[RUNS][4], w[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Vector<4> loaded = *reinterpret_cast<const Vector<4>*>(
            weights + (buffer * DEPTH + part_depth + k) * edge_columns + thread_column + half * 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) w[half * 4 + e] = loaded.element[e];
      }
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
        const Vector<4> loaded =
            *reinterpret_cast<const Vector<4>*>(&inputs[buffer][part_depth + k][run * (EDGE / RUNS) + quad]);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[run][e] = loaded.element[e];
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
#pragma unroll
        for (int v = 0; v < RUNS * 4; ++v) sums[v / 4][v % 4][c] += x[v / 4][v % 4] * w[c];
      }
    }
    done += DEPTH;
    if (done < channels || PARTS > 1) continue;
    const int again = computed_anew(thread);
    store_sums(sums, problem, epilogue, output, taps, group, out_channels, first_voxel + again % RUN_THREADS * 4, voxels,
               first_column + again / RUN_THREADS * 8);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
      for (int v = 0; v < RUNS * 4; ++v) sums[v / 4][v % 4][c] = accum_t(0);
    }
    done = 0;
    first_voxel += EDGE;
  }
  if constexpr (PARTS > 1) {
    const auto part_sums = reinterpret_cast<accum_t(*)[EDGE][EDGE]>(shared);  // [PARTS][column][voxel], in place of the stages
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
      for (int run = 0; run < RUNS; ++run) {
        const auto& s = sums[run];
        *reinterpret_cast<Vector<4>*>(&part_sums[thread / part_threads][thread_column + c][run * (EDGE / RUNS) + quad]) = {
            s[0][c], s[1][c], s[2][c], s[3][c]};
      }
    }
    __syncthreads();
    constexpr int COLUMNS = EDGE * EDGE / 2 / (RUN_THREADS * EDGE / 8 * PARTS);
    const int again = computed_anew(thread), voxel = again % (EDGE / 2) * 2, stored_column = again / (EDGE / 2) * COLUMNS;
    accum_t total[1][2][COLUMNS] = {};
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const Vector<2> loaded = *reinterpret_cast<const Vector<2>*>(&part_sums[part][stored_column + c][voxel]);
        for (int e = 0; e < 2; ++e) total[0][e][c] += loaded.element[e];
      }
    }
    store_sums(total, problem, epilogue, output, taps, group, out_channels, first_voxel + voxel, voxels,
               first_column + stored_column);
  }
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convt3d_fprop_patch_128(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                            const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels, const int columns,
                            const int tile_columns, const int column_tiles, const int voxel_tiles, const int block_tiles,
                            const int half_stage) {
  multiply_tiles<128, 2, 1, 2>(problem, input, weight, {bias}, output, voxels, columns, SPECIALIZED(TILE_COLUMNS, tile_columns),
                               column_tiles, voxel_tiles, block_tiles, half_stage);
}

extern "C" __global__ void __launch_bounds__(64 * MEDIUM_PARTS, 8 / MEDIUM_PARTS)
    convt3d_fprop_patch_64x64(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                              const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels,
                              const int columns, const int column_tiles, const int voxel_tiles, const int block_tiles) {
  multiply_tiles<64, 2, MEDIUM_PARTS, STAGES>(problem, input, weight, {bias}, output, voxels, columns, 64, column_tiles,
                                              voxel_tiles, block_tiles, 0);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convt3d_fprop_patch_32x32(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                              const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels,
                              const int columns, const int column_tiles, const int voxel_tiles, const int block_tiles) {
  multiply_tiles<32, 1, 8, STAGES>(problem, input, weight, {bias}, output, voxels, columns, 32, column_tiles, voxel_tiles,
                                   block_tiles, 0);
}
