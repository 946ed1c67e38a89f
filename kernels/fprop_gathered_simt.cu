/* convt3d
pass = "fprop"
dtypes = ["fp32"]
multiplies_padding = true
static_shared_bytes = 1024
[specialize]
ROW_THREADS = "row_threads"
COLUMN_THREADS = "column_threads"
THREAD_COLUMNS = "thread_columns"
[constants]
column_tiles = "ceil_div(out_channels_per_group, MOST_COLUMNS)"
wanted_columns = "ceil_div(out_channels_per_group, column_tiles)"
# A thread has 16 columns where an even number of threads has all of a tile's, else 8.
sixteens = "ceil_div(wanted_columns, 16)"
eights = "ceil_div(wanted_columns, 8)"
thread_columns = "16 if sixteens % 2 == 0 else 8"
column_threads = "sixteens if sixteens % 2 == 0 else eights if eights == 1 else ceil_div(eights, 2) * 2"
lane_rows = "32 if column_threads % 2 else 16 if column_threads % 4 else 8"
row_threads = "max(lane_rows, min(64, TILE_THREADS // column_threads // lane_rows * lane_rows))"
threads = "row_threads * column_threads"
tile_rows = "8 * row_threads"
tile_columns = "thread_columns * column_threads"
# Rows: the outputs of a class of all images.
class_voxels = "ceil_div(output_d, stride_d) * ceil_div(output_h, stride_h) * ceil_div(output_w, stride_w)"
row_tiles = "ceil_div(batch * class_voxels, tile_rows)"
tiles = "residues * groups * column_tiles * row_tiles"
# The depth of a tile: stages of 8 channels of each tap of its class. Blocks have equal shares of all stages of all tiles, or of all tiles
# where these are many.
chunks = "ceil_div(in_channels_per_group, 8)"
class_taps = "ceil_div(kernel_d, stride_d // gcd(stride_d, dilation_d)) * ceil_div(kernel_h, stride_h // gcd(stride_h, dilation_h)) * ceil_div(kernel_w, stride_w // gcd(stride_w, dilation_w))"
all_stages = "row_tiles * column_tiles * groups * taps * chunks"
blocks = "min(multiprocessors * max(1, 4096 // thread_columns // threads), max(tiles, all_stages // LEAST_STAGES))"
is_split = "1 if all_stages < 8 * blocks * class_taps * chunks else 0"
packed_columns = "column_tiles * tile_columns"
row_channels = "ceil_div(in_channels_per_group, 4) * 4"
voxels = "batch * input_voxels"
row_vectors = "voxels * groups * row_channels // 4"
[restrictions]
"residues <= 64" = "a block finds its share in a table of at most 64 residue classes"
"max(8 * tiles, all_stages + tiles, taps * in_channels * ceil_div(packed_columns, 32), row_vectors, batch * class_voxels + tile_rows) < 2147483648" = "the stages, the blocks and the outputs of a class must be fewer than 2^31"
[search]
TILE_THREADS = [64, 128]
MOST_COLUMNS = [64, 128]
[cost]
steps = "ceil_div(all_stages, blocks)"
products = "8 * tile_rows * tile_columns"
bytes = "32 * (tile_rows + tile_columns)"
blocks = "blocks"
[workspace]
packed_weight = "taps * groups * chunks * 8 * packed_columns"
input_rows = "4 * row_vectors"
partial_sums = "2 * blocks * tile_rows * tile_columns if is_split else 0"
[[launch]]
symbol = "convt3d_pack_gathered_weight"
packs = "packed_weight"
grid = "groups * chunks * 8 * ceil_div(packed_columns, 32) * ceil_div(taps, 32)"
block = 256
[[launch]]
symbol = "convt3d_lay_gathered_rows"
prepares = "input_rows"
grid = "ceil_div(row_vectors, 256)"
block = 256
[[launch]]
symbol = "convt3d_fprop_gathered_simt"
prepares = "partial_sums"
grid = "blocks"
block = "threads"
shared_bytes = "STAGES * (48 * tile_rows + 32 * tile_columns) + 32 * tile_rows"
[[launch]]
symbol = "convt3d_add_gathered_parts"
when = "is_split"
grid = "thread_columns // 2 * tiles"
block = "threads"
shared_bytes = "64 * threads"
*/
// Implicit GEMM on the CUDA cores whose rows are gathered one by one, for images of few voxels: the outputs of one residue class of all
// images are rows of one matrix, so tiles are full whatever the images' size.
//
//   output[n, co, o] = bias[co] + sum over taps t of the class and ci of input[n, ci, q(o) - offset(t)] * weight[ci, co, t]
//
// A row is gathered in pieces of 16 bytes, so channels have to lie together: a launch lays the input out so, if it is not. Rows are in the
// order of the output's memory; where channels lie together there, by voxel, and of one voxel by image: then a tile of many images has few
// voxels, and a tap that leads outside of the input for all of them is left out.
//
// A block owns a tile of rows x columns (output channels) of a class. A stage is 8 input channels of one tap: [row][channel] of the input,
// zeros where a tap leads outside, and [channel][column] of the packed weight, both by cp.async of 16 bytes. A ring of STAGES stages.
// A thread has 8 x 16 sums, or 8 x 8 where 16 would leave an odd number of threads for the columns: of rows that are as far apart as there
// are threads for rows, and of fours of columns, so that lanes read neighbours. It goes along the columns of one row and back along the next one's: the
// operand of the turn is kept, and a multiply-add finds its others in different banks of registers (see fprop_flattened_simt's log).
//
// Classes differ in taps, so tiles in depth, and few tiles leave multiprocessors idle. So the stages of all tiles are one line, and each block
// has an equal stretch of it, as in stream-K (Osama et al., "Stream-K", 2023). A tile that more than one block has a share of is left in
// memory as their sums have it; a third launch adds these up in a fixed order. Where tiles are many, blocks have whole ones.
#include "convt3d.cuh"
#include "convt3d/beside_launches.cuh"
#include "convt3d/beside_packing.cuh"
#include "convt3d/channel_rows.cuh"
#include "convt3d/copy_async.cuh"
#include "convt3d/epilogue.cuh"
#include "convt3d/forget_memory.cuh"
#include "convt3d/specialized.cuh"
#include "convt3d/store_channels_last.cuh"

// Threads of a block, about, and columns of a tile at most.
#ifndef TILE_THREADS
#define TILE_THREADS 128
#endif
#ifndef MOST_COLUMNS
#define MOST_COLUMNS 128
#endif
#ifndef STAGES
#define STAGES 4
#endif
// Stages of a block at least.
#ifndef LEAST_STAGES
#define LEAST_STAGES 8
#endif
// Set by the problem; these are for a look at the compiler's output.
#ifndef ROW_THREADS
#define ROW_THREADS 16
#endif
#ifndef COLUMN_THREADS
#define COLUMN_THREADS 8
#endif
#ifndef THREAD_COLUMNS
#define THREAD_COLUMNS 16
#endif

// Channels of a stage; elements from row to row of it, so that lanes meet all banks; columns of a thread.
constexpr int CHUNK = 8, PITCH = CHUNK + 4, MOST_COLUMNS_OF_THREAD = 16;
#if defined(__CUDACC__)
constexpr int THREADS = ROW_THREADS * COLUMN_THREADS, RESIDENT_THREADS = 4096 / THREAD_COLUMNS,
              RESIDENT = THREADS < RESIDENT_THREADS ? RESIDENT_THREADS / THREADS : 1;
#else
constexpr int THREADS = 1024, RESIDENT = 1;
#endif

__device__ __forceinline__ void load_four(float* to, const float* from) {
  const RowVector four = *reinterpret_cast<const RowVector*>(from);
#pragma unroll
  for (int e = 0; e < 4; ++e) to[e] = four.element[e];
}

// ---- what comes before ----

// packed_weight[tap][group][column tile][ci][column], zero beyond the last channels: a stage's part is one piece of memory. A block has 32
// columns and 32 taps of one input channel, and reads them in the order of memory.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_pack_gathered_weight(const Problem problem, const View<const scalar_t> weight, accum_t* __restrict__ packed_weight,
                                 const int chunks, const int tile_columns, const int packed_columns) {
  begin_next();
  __shared__ float tile[32][33];
  const int *const kernel = problem.kernel_size, all_taps = kernel[0] * kernel[1] * kernel[2];
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int column_runs = (packed_columns + 31) / 32, padded = chunks * CHUNK, thread = static_cast<int>(threadIdx.x);
  unsigned block = blockIdx.x;
  const int first_column = static_cast<int>(block % column_runs) * 32;
  block /= column_runs;
  const int ci = static_cast<int>(block % padded);
  block /= padded;
  const int group = static_cast<int>(block % problem.groups), first_tap = static_cast<int>(block / problem.groups) * 32;
  const int taps = min(32, all_taps - first_tap), columns = min(32, packed_columns - first_column);
  const int lane = thread % 32, warp = thread / 32;
  const bool by_channels = weight.stride[1] == 1;  // (ci, t, co) in memory
  for (int other = warp; other < (by_channels ? taps : columns); other += 8) {
    const int t = by_channels ? other : lane, column = by_channels ? lane : other, tap = first_tap + t,
              co = first_column + column;
    if (t >= taps || column >= columns) continue;
    const int row = tap / kernel[2], kd = row / kernel[1];
    const bool there = ci < channels && co < out_channels;
    tile[column][t] = there ? *weight.at(group * channels + ci, co, kd, row - kd * kernel[1], tap - row * kernel[2]) : 0.0f;
  }
  __syncthreads();
  if (lane >= columns) return;
  const int place = first_column + lane, in_tile = place % tile_columns;
  for (int t = warp; t < taps; t += 8) {
    const index_t slab = (static_cast<index_t>(first_tap + t) * problem.groups + group) * packed_columns + place - in_tile;
    packed_weight[slab * padded + ci * tile_columns + in_tile] = tile[lane][t];
  }
}

extern "C" __global__ void __launch_bounds__(256)
    convt3d_lay_gathered_rows(const Problem problem, const View<const scalar_t> input, accum_t* __restrict__ input_rows,
                              const int voxels, const int row_channels, const int row_vectors) {
  begin_next();
  if (threadIdx.x == 0) wait_for_launch_before();  // so that who waits for this launch waits for both
  const int index = static_cast<int>(blockIdx.x * 256 + threadIdx.x);
  if (index >= row_vectors || lies_in_rows(problem, input)) return;
  lay_in_rows(problem, input, reinterpret_cast<RowVector*>(input_rows), index, voxels, row_channels);
}

// ---- the product ----

// A tile of a class; in shared memory where registers are for sums.
struct Tile {
  AxisClass axis[3];
  int first_position[3];      // (o + padding) / stride of the class's first output
  int lowest[3], highest[3];  // positions that its rows have
  int class_rows, first_row, first_column, group, stages;
  bool voxels_first;  // rows are ordered by image, and of one image by voxel
};

// A row's image, negative where there is no such row, and positions of its voxel.
struct alignas(16) Row {
  int n, d, h, w;
};
constexpr index_t NOWHERE = -(1LL << 62);  // no legal place: strides may be negative

__device__ __forceinline__ Row row_at(const Problem& problem, const Tile& tile, int index) {
  if (index >= tile.class_rows) return {-1, 0, 0, 0};
  const int class_voxels = tile.axis[0].outputs * tile.axis[1].outputs * tile.axis[2].outputs;
  const int outer = index / (tile.voxels_first ? class_voxels : problem.batch);
  const int inner = index - outer * (tile.voxels_first ? class_voxels : problem.batch);
  const int voxel = tile.voxels_first ? inner : outer;
  Row row;
  row.n = tile.voxels_first ? outer : inner;
  const int h = voxel / tile.axis[2].outputs;
  row.w = tile.first_position[2] + voxel - h * tile.axis[2].outputs;
  const int d = h / tile.axis[1].outputs;
  row.h = tile.first_position[1] + h - d * tile.axis[1].outputs;
  row.d = tile.first_position[0] + d;
  return row;
}

// The line of all stages: where those of each class begin, and its tiles. A class without taps has one stage a tile, of nothing.
constexpr int MOST_CLASSES = 64;
struct Line {
  int first_stage[MOST_CLASSES + 1], first_tile[MOST_CLASSES + 1], classes, blocks;

  __device__ __forceinline__ int stages() const { return first_stage[classes]; }
  __device__ __forceinline__ int class_at(const int* first, int number) const {
    int index = 0;
    while (first[index + 1] <= number) ++index;
    return index;
  }
  __device__ __forceinline__ int tile_stages(int index) const {
    return (first_stage[index + 1] - first_stage[index]) / (first_tile[index + 1] - first_tile[index]);
  }
  // Where the share of a block begins: the first ones have a stage more. Whose share a stage is.
  __device__ __forceinline__ int share(int block) const {
    const int each = stages() / blocks;
    return block * each + min(block, stages() - each * blocks);
  }
  __device__ __forceinline__ int owner(int stage) const {
    const int each = stages() / blocks, longer = stages() - each * blocks, beyond = stage - longer * (each + 1);
    return beyond < 0 ? stage / (each + 1) : longer + beyond / each;
  }
  // Down to where a tile begins.
  __device__ __forceinline__ int tile_begin(int stage) const {
    if (stage == stages()) return stage;
    const int index = class_at(first_stage, stage);
    return stage - (stage - first_stage[index]) % tile_stages(index);
  }
};

// A warp makes it, a class a lane.
__device__ inline void find_line(Line& line, const Problem& problem, int thread, int most_blocks, int tile_rows,
                                 int row_tile_columns, int chunks) {
  const int (&stride)[3] = problem.stride;
  const int classes = stride[0] * stride[1] * stride[2];
  if (thread < 32) {
    for (int index = thread; index < classes; index += 32) {
      int rest = index, outputs = problem.batch, taps = 1;
      for (int a = 2; a >= 0; --a) {
        const AxisClass axis = axis_class(problem, a, rest % stride[a]);
        rest /= stride[a];
        outputs *= axis.outputs;
        taps *= axis.taps;
      }
      const int tiles = (outputs + tile_rows - 1) / tile_rows * row_tile_columns;
      line.first_tile[index + 1] = tiles;
      line.first_stage[index + 1] = tiles * max(1, taps * chunks);
    }
    __syncwarp();
    int stages[MOST_CLASSES / 32], tiles[MOST_CLASSES / 32];
    for (int i = 0; i < MOST_CLASSES / 32; ++i) {
      stages[i] = tiles[i] = 0;
      for (int before = 0; before <= thread + i * 32 && before < classes; ++before) {
        stages[i] += line.first_stage[before + 1];
        tiles[i] += line.first_tile[before + 1];
      }
    }
    __syncwarp();
    for (int i = 0; i < MOST_CLASSES / 32; ++i) {
      const int index = thread + i * 32;
      if (index >= classes) continue;
      line.first_stage[index + 1] = stages[i];
      line.first_tile[index + 1] = tiles[i];
      if (index == classes - 1) line.blocks = min(most_blocks, max(1, stages[i] / LEAST_STAGES));
    }
    if (thread == 0) {
      line.first_stage[0] = line.first_tile[0] = 0;
      line.classes = classes;
    }
  }
  __syncthreads();
}

// The `number`th tile of a class: [group][column tile][row tile]. Two warps share the axes, because divisions take long.
__device__ inline void find_tile(Tile& tile, const Problem& problem, int index, int number, bool voxels_first, int thread,
                                 int column_tiles, int tile_rows, int tile_columns, int chunks) {
#pragma unroll
  for (int a = 2, residue = index; a >= 0; --a) {
    const int stride = problem.stride[a];
    if (thread == a % 2 * 32) {
      tile.axis[a] = axis_class(problem, a, residue % stride);
      tile.first_position[a] = (tile.axis[a].first_output + problem.padding[a]) / stride;
    }
    residue /= stride;
  }
  __syncthreads();
  if (thread == 0) {
    tile.voxels_first = voxels_first;
    tile.class_rows = problem.batch * tile.axis[0].outputs * tile.axis[1].outputs * tile.axis[2].outputs;
    tile.stages = tile.axis[0].taps * tile.axis[1].taps * tile.axis[2].taps * chunks;
    const int row_tiles = (tile.class_rows + tile_rows - 1) / tile_rows, columns = number / row_tiles;
    tile.first_row = (number - columns * row_tiles) * tile_rows;
    tile.group = columns / column_tiles;
    tile.first_column = (columns - tile.group * column_tiles) * tile_columns;
    const Row first = row_at(problem, tile, tile.first_row),
              last = row_at(problem, tile, min(tile.first_row + tile_rows, tile.class_rows) - 1);
    const bool image = !tile.voxels_first || first.n == last.n, plane = image && first.d == last.d,
               row = plane && first.h == last.h;
    tile.lowest[0] = image ? first.d : tile.first_position[0];
    tile.highest[0] = image ? last.d : tile.first_position[0] + tile.axis[0].outputs - 1;
    tile.lowest[1] = plane ? first.h : tile.first_position[1];
    tile.highest[1] = plane ? last.h : tile.first_position[1] + tile.axis[1].outputs - 1;
    tile.lowest[2] = row ? first.w : tile.first_position[2];
    tile.highest[2] = row ? last.w : tile.first_position[2] + tile.axis[2].outputs - 1;
  }
}

// Where a block reads: the first element of its group's input and of its columns' weights, and steps through both. In shared memory.
struct Operands {
  const scalar_t* input;
  const accum_t* weight;
  index_t step_n, step_d, step_h, step_w, step_tap;
  int channels;
};

// A tap of the class: by how much its input is before the position, and its number in the weight.
struct ClassTap {
  int offset[3], number;

  // Whether it leads from any row to an input.
  __device__ __forceinline__ bool is_live(const Problem& problem, const Tile& tile) const {
    bool live = true;
    for (int a = 0; a < 3; ++a) {
      live = live && tile.highest[a] - offset[a] >= 0 && tile.lowest[a] - offset[a] < problem.input_size[a];
    }
    return live;
  }
};

__device__ __forceinline__ ClassTap class_tap(const Problem& problem, const Tile& tile, int index) {
  const int row = index / tile.axis[2].taps, plane = row / tile.axis[1].taps;
  const int tap[3] = {plane, row - plane * tile.axis[1].taps, index - row * tile.axis[2].taps};
  ClassTap result{{}, 0};
  for (int a = 0; a < 3; ++a) {
    result.offset[a] = tile.axis[a].first_offset + tap[a] * tile.axis[a].offset_step;
    result.number = result.number * problem.kernel_size[a] + tile.axis[a].first_tap + tap[a] * tile.axis[a].tap_step;
  }
  return result;
}

// The next stage: a chunk of channels of a tap; how many are left, with those of dead taps.
struct Depth {
  int tap, chunk, left;

  __device__ __forceinline__ void skip_dead_taps(const Problem& problem, const Tile& tile, int chunks) {
    while (left > 0 && !class_tap(problem, tile, tap).is_live(problem, tile)) {
      left -= chunks - chunk;
      chunk = 0;
      ++tap;
    }
  }
  // Whether the stage after this one is another tap's.
  __device__ __forceinline__ bool advance(const Problem& problem, const Tile& tile, int chunks) {
    --left;
    if (++chunk < chunks) return false;
    chunk = 0;
    ++tap;
    skip_dead_taps(problem, tile, chunks);
    return left > 0;
  }
};

// Where a thread stands in its tile: the first of its rows, of which the others are row_threads apart, and of its fours of columns; its
// warp's.
struct Place {
  int row, column, warp_row, warp_column, lane_rows;
};

__device__ __forceinline__ Place place_of(int thread, int row_threads, int column_threads) {
  const int lane_rows = column_threads % 2 ? 32 : column_threads % 4 ? 16 : 8;
  const int warp = thread / 32, lane = thread % 32, row_warps = row_threads / lane_rows;
  const int warp_row = warp % row_warps * lane_rows, warp_column = warp / row_warps * (32 / lane_rows) * 4;
  return {warp_row + lane % lane_rows, warp_column + lane / lane_rows * 4, warp_row, warp_column, lane_rows};
}

// Put a thread's 4 x 4 sums where the warp's are: [column][row of the thread][lane's row], 128 / lane_rows x 4 x lane_rows. Element by
// element, as all sums leave their registers: vectors would number these, and the loop's products have to.
__device__ __forceinline__ void stage_square(float* staged, const Place& place, const float (&sums)[4][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, lane_rows = place.lane_rows;
  float* const to = staged + lane / lane_rows * 16 * lane_rows + lane % lane_rows;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(c * 4 + i) * lane_rows] = sums[i][c];
  }
}

// Store what a warp has staged, the `number`th square of its threads: a row a lane, or where channels lie together four channels of one.
__device__ __forceinline__ void store_staged(const Problem& problem, const Tile& tile, const Epilogue& epilogue,
                                             const View<scalar_t>& output, const float* staged, const Place& place, int number,
                                             int row_threads, int column_threads, int thread_columns) {
  const int of_row = thread_columns / 4, lane_rows = place.lane_rows;
  const int first_row = tile.first_row + number / of_row * 4 * row_threads + place.warp_row;
  const int first_column = tile.first_column + number % of_row * 4 * column_threads + place.warp_column;
  const int lane = static_cast<int>(threadIdx.x) % 32, out_channels = problem.out_channels / problem.groups;
  const int rows = 4 * lane_rows, columns = 128 / lane_rows, live = min(columns, out_channels - first_column);
  const int group_first = tile.group * out_channels + first_column;
  const bool together = channels_lie_together(output), pieces = together && channels_are_pieces(output, out_channels);
  const int runs = together ? columns / 4 : 1;  // of channels in a row
#pragma unroll 1
  for (int i = lane; i < rows * runs; i += 32) {
    const int r = i / runs, first = together ? i % runs * 4 : 0,
              index = first_row + r / lane_rows * row_threads + r % lane_rows;
    if (index >= tile.class_rows || first >= live) continue;
    const float* const from = staged + r;
    const Row row = row_at(problem, tile, index);
    const int d = tile.axis[0].first_output + (row.d - tile.first_position[0]) * problem.stride[0];
    const int h = tile.axis[1].first_output + (row.h - tile.first_position[1]) * problem.stride[1];
    const int w = tile.axis[2].first_output + (row.w - tile.first_position[2]) * problem.stride[2];
    scalar_t* y = output.at(row.n, group_first + first, d, h, w);
    if (pieces) {
      ChannelPiece piece;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        piece.channel[c] = epilogue.finish(from[(first + c) * rows], epilogue.start(group_first + first + c));
      }
      *reinterpret_cast<ChannelPiece*>(y) = piece;
      continue;
    }
    const int end = together ? min(first + 4, live) : live;
#pragma unroll 4
    for (int c = first; c < end; ++c, y += output.stride[1]) {
      *y = epilogue.finish(from[c * rows], epilogue.start(group_first + c));
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    convt3d_fprop_gathered_simt(const Problem problem, const View<const scalar_t> input, const accum_t* __restrict__ input_rows,
                                const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                const View<scalar_t> output, accum_t* __restrict__ partial_sums, const int thread_columns,
                                const int row_threads, const int column_threads, const int column_tiles, const int voxels,
                                const int row_channels, const int chunks, const int is_split, const int packed_columns) {
  begin_next();
  extern __shared__ uint4 shared[];
  __shared__ Line line;
  __shared__ Tile tile;
  __shared__ Operands operands;
  __shared__ index_t tap_weights[2];
  const int thread = static_cast<int>(threadIdx.x);
  const int own_rows = SPECIALIZED(ROW_THREADS, row_threads), own_columns = SPECIALIZED(COLUMN_THREADS, column_threads);
  const int sum_columns = SPECIALIZED(THREAD_COLUMNS, thread_columns), squares = sum_columns / 2;
  const int threads = own_rows * own_columns, tile_rows = 8 * own_rows, tile_columns = sum_columns * own_columns;
  float* const stages = reinterpret_cast<float*>(shared);  // [STAGES][row][channel], and [channel][column]
  const int stage_elements = PITCH * tile_rows + CHUNK * tile_columns;
  Row* const rows = reinterpret_cast<Row*>(stages + STAGES * stage_elements);
  index_t* const places = reinterpret_cast<index_t*>(rows + tile_rows);  // [2][row], in the input
  find_line(line, problem, thread, static_cast<int>(gridDim.x), tile_rows, column_tiles * problem.groups, chunks);
  const int block = static_cast<int>(blockIdx.x);
  if (block >= line.blocks) return wait_for_launch_before();
  int at = line.share(block), end = line.share(block + 1);
  if (!is_split) {
    at = line.tile_begin(at);
    end = line.tile_begin(end);
  }
  for (int tile_turn = 0, count = 0; at < end; ++tile_turn, at += count) {
    __syncthreads();  // the tile before is stored
    Depth depth;
    {
      const int index = line.class_at(line.first_stage, at), in_class = at - line.first_stage[index];
      const int tile_stages = line.tile_stages(index), number = in_class / tile_stages, first = in_class - number * tile_stages;
      count = min(tile_stages - first, end - at);
      find_tile(tile, problem, index, number, !channels_lie_together(output), thread, column_tiles, tile_rows, tile_columns,
                chunks);
      depth = {first / chunks, first % chunks, count};
    }
    if (thread == 0) {
      const bool in_place = lies_in_rows(problem, input);
      const index_t row_step = static_cast<index_t>(row_channels) * problem.input_size[2],
                    plane_step = row_step * problem.input_size[1];
      operands.step_n = in_place ? input.stride[0] : plane_step * problem.input_size[0];
      operands.step_d = in_place ? input.stride[2] : plane_step;
      operands.step_h = in_place ? input.stride[3] : row_step;
      operands.step_w = in_place ? input.stride[4] : row_channels;
      operands.channels = row_channels;
      operands.input = in_place ? input.data + tile.group * row_channels
                                : input_rows + tile.group * static_cast<index_t>(voxels) * row_channels;
      const int padded = chunks * CHUNK;
      operands.weight = packed_weight + (static_cast<index_t>(tile.group) * packed_columns + tile.first_column) * padded;
      operands.step_tap = static_cast<index_t>(problem.groups) * packed_columns * padded;
    }
    __syncthreads();
    if (tile.stages == 0) depth.left = 0;
    for (int i = thread; i < tile_rows; i += threads) rows[i] = row_at(problem, tile, tile.first_row + i);

    // Where the rows of the next tap read, and its weights.
    const auto find_places = [&](int turn) {
      const ClassTap tap = class_tap(problem, tile, depth.tap);
      if (thread == 0) tap_weights[turn] = tap.number * operands.step_tap;
#pragma unroll 1
      for (int i = thread; i < tile_rows; i += threads) {
        const Row row = rows[i];
        const int d = row.d - tap.offset[0], h = row.h - tap.offset[1], w = row.w - tap.offset[2];
        const bool inside = row.n >= 0 && d >= 0 && d < problem.input_size[0] && h >= 0 && h < problem.input_size[1] &&
                            w >= 0 && w < problem.input_size[2];
        places[turn * tile_rows + i] =
            inside ? row.n * operands.step_n + d * operands.step_d + h * operands.step_h + w * operands.step_w : NOWHERE;
      }
    };
    int turn = 0, copied = 0;
    const auto copy_stage = [&](int slot) {
      if (depth.left <= 0) return;
      ++copied;
      const unsigned again = computed_anew(threadIdx.x);
      const int first = depth.chunk * CHUNK;
      float* const stage = stages + slot * stage_elements;
      // Two pieces of a row, one a thread.
      const int piece = again % 2 * 4;
      const bool there = first + piece < operands.channels;
      const scalar_t* const from = operands.input + first + piece;
#pragma unroll
      for (int i = 0; i < 2 * tile_rows; i += threads) {
        const int row = (i + again) / 2;
        if (2 * tile_rows % threads != 0 && row >= tile_rows) continue;
        const index_t place = places[turn * tile_rows + row];
        const bool live = there && place != NOWHERE;
        copy_async(reinterpret_cast<RowVector*>(stage + row * PITCH + piece),
                   reinterpret_cast<const RowVector*>(live ? from + place : operands.input), live);
      }
      const RowVector* const weights =
          reinterpret_cast<const RowVector*>(operands.weight + (tap_weights[turn] + first * tile_columns));
      RowVector* const target = reinterpret_cast<RowVector*>(stage + PITCH * tile_rows);
#pragma unroll
      for (int i = 0; i < CHUNK * tile_columns / 4; i += threads) {
        if (i + again < CHUNK * tile_columns / 4) copy_async(target + i + again, weights + i + again, true);
      }
      if (depth.advance(problem, tile, chunks)) find_places(turn ^= 1);
    };

    depth.skip_dead_taps(problem, tile, chunks);
    __syncthreads();  // rows are there
    if (depth.left > 0) find_places(0);
    wait_for_launch_before();
    for (int i = 0; i < STAGES - 1; ++i) {
      __syncthreads();  // places are there
      copy_stage(i);
      cp_async_commit();
    }
    float sums[8][MOST_COLUMNS_OF_THREAD] = {};
    int slot = 0, ahead = STAGES - 1;
#pragma unroll 1
    for (int stage = 0; stage < copied; ++stage) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();  // this stage has landed for all, and the one before has been read by all
      forget_memory();  // registers are for sums
      copy_stage(ahead);
      cp_async_commit();
      const Place place = place_of(computed_anew(thread), own_rows, own_columns);
      const float* a = stages + slot * stage_elements + place.row * PITCH;
      const float* b = stages + slot * stage_elements + PITCH * tile_rows + place.column;
#pragma unroll 1  // in longer pieces of code the compiler moves sums between registers, and loses their numbering
      for (int first = 0; first < CHUNK; first += 2, a += 2) {
        float x[8][2];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float2 two = *reinterpret_cast<const float2*>(a + i * own_rows * PITCH);
          x[i][0] = two.x;
          x[i][1] = two.y;
        }
#pragma unroll
        for (int k = 0; k < 2; ++k, b += tile_columns) {
          float y[MOST_COLUMNS_OF_THREAD];
#pragma unroll
          for (int j = 0; j < sum_columns; j += 4) load_four(y + j, b + j * own_columns);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
#pragma unroll
            for (int turn_j = 0; turn_j < sum_columns; ++turn_j) {
              const int j = i % 2 ? sum_columns - 1 - turn_j : turn_j;
              sums[i][j] += x[i][k] * y[j];
            }
          }
        }
      }
      ahead = slot;
      if (++slot == STAGES) slot = 0;
    }
    // A thread's squares: of each half of its rows, one for each four of its columns.
    const auto square_of = [&](int number, float (&square)[4][4]) {
      const int half = number / (sum_columns / 4) * 4, first = number % (sum_columns / 4) * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int c = 0; c < 4; ++c) square[i][c] = sums[half + i][first + c];
      }
    };
    if (count < tile.stages) {  // another block has the rest
      float* const own = partial_sums + (static_cast<index_t>(block) * 2 + (tile_turn > 0)) * (16 * squares * threads) + thread;
#pragma unroll
      for (int number = 0; number < squares; ++number) {
        float square[4][4];
        square_of(number, square);
#pragma unroll
        for (int i = 0; i < 16; ++i) own[(number * 16 + i) * threads] = square[i / 4][i % 4];
      }
      continue;
    }
    __syncthreads();  // the ring has been read
    const Place place = place_of(computed_anew(thread), own_rows, own_columns);
    float* const staged = stages + thread / 32 * 512;
#pragma unroll 1
    for (int number = 0; number < squares; ++number) {
      __syncwarp();  // what was staged before has been read
#pragma unroll
      for (int i = 0; i < squares; ++i) {
        if (number != i) continue;
        float square[4][4];
        square_of(i, square);
        stage_square(staged, place, square);
      }
      __syncwarp();
      store_staged(problem, tile, {bias}, output, staged, place, number, own_rows, own_columns, sum_columns);
    }
  }
}

// A block adds up one square of each thread of a tile that several blocks have shares of.
extern "C" __global__ void __launch_bounds__(THREADS)
    convt3d_add_gathered_parts(const Problem problem, const accum_t* __restrict__ partial_sums,
                               const scalar_t* __restrict__ bias, const View<scalar_t> output, const int thread_columns,
                               const int row_threads, const int column_threads, const int column_tiles, const int chunks,
                               const int blocks) {
  extern __shared__ uint4 shared[];
  __shared__ Line line;
  __shared__ Tile tile;
  const int thread = static_cast<int>(threadIdx.x);
  const int own_rows = SPECIALIZED(ROW_THREADS, row_threads), own_columns = SPECIALIZED(COLUMN_THREADS, column_threads);
  const int sum_columns = SPECIALIZED(THREAD_COLUMNS, thread_columns), squares = sum_columns / 2;
  const int threads = own_rows * own_columns, square = static_cast<int>(blockIdx.x % squares);
  const int number = static_cast<int>(blockIdx.x / squares);
  find_line(line, problem, thread, blocks, 8 * own_rows, column_tiles * problem.groups, chunks);
  if (number >= line.first_tile[line.classes]) return wait_for_launch_before();
  const int index = line.class_at(line.first_tile, number), in_class = number - line.first_tile[index];
  const int tile_stages = line.tile_stages(index), first = line.first_stage[index] + in_class * tile_stages;
  const int first_block = line.owner(first), last_block = line.owner(first + tile_stages - 1);
  if (first_block == last_block) return wait_for_launch_before();
  find_tile(tile, problem, index, in_class, !channels_lie_together(output), thread, column_tiles, 8 * own_rows,
            sum_columns * own_columns, chunks);
  __syncthreads();
  wait_for_launch_before();
  // A block's first tile is in its first place, its last in its second. All but the first block begin in this tile.
  const int first_place = 2 * first_block + (line.share(first_block) < first);
  const float* const from = partial_sums + (square * 16 * threads + thread);
  float sums[4][4] = {};
#pragma unroll 4
  for (int block = first_block; block <= last_block; ++block) {
    const int place = block == first_block ? first_place : 2 * block;
    const float* const part = from + static_cast<index_t>(place) * (16 * squares * threads);
#pragma unroll
    for (int i = 0; i < 16; ++i) sums[i / 4][i % 4] += part[i * threads];
  }
  const Place place = place_of(thread, own_rows, own_columns);
  float* const staged = reinterpret_cast<float*>(shared) + thread / 32 * 512;
  stage_square(staged, place, sums);
  __syncwarp();
  store_staged(problem, tile, {bias}, output, staged, place, square, own_rows, own_columns, sum_columns);
}
