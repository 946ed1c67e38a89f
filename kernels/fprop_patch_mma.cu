/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "bf16", "fp16"]
[constants]
voxels = "batch * input_voxels"
columns = "out_channels_per_group * taps"
wide = "1 if split == 0 and (columns % 128 == 0 or columns % 128 > 64) else 0"
large_columns = "128 if wide else 64"
large_blocks = "ceil_div(voxels, 128) * ceil_div(columns, large_columns) * groups"
huge_blocks = "ceil_div(voxels, 256) * ceil_div(columns, 128) * groups"
medium_blocks = "ceil_div(voxels, 64) * ceil_div(columns, 64) * groups"
fitting = "5 if wide and in_channels_per_group * itemsize >= HUGE_BYTES and huge_blocks * 4 >= HUGE_QUARTERS * multiprocessors else (1 if wide else 2) if large_blocks * 4 >= LARGE_QUARTERS * multiprocessors else 3 if medium_blocks * 4 >= MEDIUM_QUARTERS * multiprocessors else 4"
tile = "fitting if TILE == 0 else 1 if TILE == 5 and split else TILE"
tile_voxels = "256 if tile == 5 else 128 if tile <= 2 else 64 if tile == 3 else 32"
tile_columns = "128 if tile in (1, 5) else 64 if tile <= 3 else 32"
depth_warps = "1 if tile in (1, 2, 5) else 2 if tile == 3 else 8"
column_tiles = "ceil_div(columns, tile_columns)"
depth = "32 // itemsize * depth_warps * (1 if tile == 4 else STAGE_STEPS)"
input_elements = "max(depth * (tile_voxels + 8), tile_voxels * (depth + 16 // itemsize))"
stages = "min(STAGES, 3) if tile == 5 else STAGES"
stage_bytes = "stages * itemsize * (input_elements + depth * (tile_columns + 8))"
sums_bytes = "4 * depth_warps * min(tile_columns, 64 if tile == 5 else 128) * (tile_voxels + 20)"
shared_bytes = "max(stage_bytes, sums_bytes) + 16 * (tile_voxels + tile_columns)"
[restrictions]
"kernel_size == stride and padding == (0, 0, 0) and output_padding == (0, 0, 0)" = "it is for kernel = stride with no padding, where each input owns a block of the output"
"all((dilation_d == 1 or kernel_d == 1, dilation_h == 1 or kernel_h == 1, dilation_w == 1 or kernel_w == 1))" = "dilation must be 1, else taps do not fill the block"
"voxels < 2 * 1024 * 1024 * 1024 - 128 and columns < 2 * 1024 * 1024 * 1024 - 128" = "voxels and columns of the product must be below 2^31"
[search]
TILE = [1, 2, 3, 4, 5]
WIDE_WARPS = [0, 1]
[cost]
steps = "ceil_div(in_channels_per_group, depth)"
products = "depth * tile_voxels * tile_columns"
bytes = "depth * (tile_voxels + tile_columns) * itemsize"
[[launch]]
symbol = "convt3d_fprop_patch_mma_256x128"
when = "tile == 5"
grid = "ceil_div(voxels, 256) * groups * column_tiles"
block = 256
shared_bytes = "shared_bytes"
[[launch]]
symbol = "convt3d_fprop_patch_mma_128x128"
when = "tile == 1"
grid = "ceil_div(voxels, 128) * groups * column_tiles"
block = "128 if WIDE_WARPS and split == 0 else 256"
shared_bytes = "shared_bytes"
[[launch]]
symbol = "convt3d_fprop_patch_mma_128x64"
when = "tile == 2"
grid = "ceil_div(voxels, 128) * groups * column_tiles"
block = 256
shared_bytes = "shared_bytes"
[[launch]]
symbol = "convt3d_fprop_patch_mma_64x64"
when = "tile == 3"
grid = "ceil_div(voxels, 64) * groups * column_tiles"
block = 256
shared_bytes = "shared_bytes"
[[launch]]
symbol = "convt3d_fprop_patch_mma_32x32"
when = "tile == 4"
grid = "ceil_div(voxels, 32) * groups * column_tiles"
block = 256
shared_bytes = "shared_bytes"
*/
// Kernel = stride on tensor cores. Each input voxel owns a block of kernel_size outputs, so the layer is one matrix product
// with the reordering fused into the store (depth to space):
//
//   output[n, co, i*stride + t] = bias[co] + sum over ci of input[n, ci, i] * weight[ci, co, t]
//
// with a row for each voxel (n, i), a column for each (co, t), and depth ci. Nothing is packed and there is one launch. A
// block owns a tile of voxels x columns of one group, the larger the fewer times an operand is read from L2, the smaller the
// more blocks there are: the declaration chooses. Its warps have 64 x 64, 64 x 32 or 32 x 32 sums each; where that leaves
// warps over, each takes a part of the depth (DEPTH_WARPS), and the parts are added in order at the end.
//   1. Tables in shared memory: where each voxel and each column of the tile lies, so that what follows divides nothing.
//   2. A ring of stages is filled by cp.async, 16 bytes at a time where layouts allow, as the tensors lie in memory:
//        inputs  [depth][voxel] or, for channels_last, [voxel][depth];
//        weights [depth][column], the columns (co, tap), or (tap, co) where the weight is channels_last.
//      Rows are padded so that the eight rows of an ldmatrix, or the four depths and eight voxels of a plain load, meet 32
//      banks.
//   3. mma.sync. ldmatrix, transposed where the rows are the depth, makes 16-bit fragments; it cannot transpose 32-bit
//      elements, so tf32 along voxels takes plain loads. TF32 is rounded as it is read. tf32x3 adds lo*hi, hi*lo and hi*hi of
//      one step from zero, and then to the sums in fp32: the tensor cores cut off what they add.
//   4. The sums pass through shared memory, [column][voxel], and leave it 16 bytes at a time as the output lies: in NCDHW the
//      taps of a row alternate over neighbouring voxels, in channels_last neighbouring channels follow each other.
#include "convt3d.cuh"
#include "convt3d/core/constant.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/ptx/mma.cuh"
#include "convt3d/ptx/split_tf32.cuh"
#include "convt3d/core/vector.cuh"

#ifndef TILE
#define TILE 0
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef STAGE_STEPS
#define STAGE_STEPS 2
#endif
#ifndef WIDE_WARPS
#define WIDE_WARPS 0
#endif
#ifndef HUGE_BYTES
#define HUGE_BYTES 1024
#endif
#ifndef HUGE_QUARTERS
#define HUGE_QUARTERS 6
#endif
#ifndef LARGE_QUARTERS
#define LARGE_QUARTERS 8
#endif
#ifndef MEDIUM_QUARTERS
#define MEDIUM_QUARTERS 4
#endif

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ constexpr int larger(int a, int b) { return a < b ? b : a; }

constexpr int SIZE = static_cast<int>(sizeof(scalar_t));
constexpr int VECTOR = 16 / SIZE, STEP = 32 / SIZE;  // elements of a copy; channels of one mma.sync
static_assert(STAGES >= 2, "one stage is filled while another is read");

constexpr bool WIDE = WIDE_WARPS != 0 && PARTS == 1;  // tf32x3 would spill

// A voxel of the tile: where it begins in the input and in the output, -1 past the last one.
struct alignas(16) Row {
  index_t input, output;
};

// A column of the tile: where it lies relative to a voxel's output, -1 past the last one, and where its sums lie in shared
// memory.
struct alignas(16) Column {
  index_t output;
  float start;
  int sums;
};

struct Tap {
  int co, d, h, w;
};

__device__ inline Tap tap_of(const Problem& problem, int column, int out_channels, bool taps_first) {
  const int* kernel = problem.kernel_size;
  Tap tap;
  if (taps_first) {
    tap.co = column % out_channels;
    column /= out_channels;
  }
  tap.w = column % kernel[2];
  column /= kernel[2];
  tap.h = column % kernel[1];
  column /= kernel[1];
  tap.d = column % kernel[0];
  if (!taps_first) tap.co = column / kernel[0];
  return tap;
}

// Where a row of the product lies, by 32-bit divisions.
__device__ inline Voxel voxel_of(int row, const int (&size)[3]) {
  Voxel voxel;
  voxel.c = 0;
  voxel.w = row % size[2];
  row /= size[2];
  voxel.h = row % size[1];
  row /= size[1];
  voxel.d = row % size[0];
  voxel.n = row / size[0];
  return voxel;
}

__device__ inline bool on_vectors(const void* data, index_t strides) {
  return reinterpret_cast<unsigned long long>(data) % 16 == 0 && strides % VECTOR == 0;
}

// How the elements of a tile are copied: 16 bytes of neighbouring voxels, 16 bytes of neighbouring channels, or one by one.
enum Copies { VOXEL_VECTORS, CHANNEL_VECTORS, ELEMENTS };

__device__ inline Copies copies_of(const View<const scalar_t>& input, const int (&size)[3], int channels) {
  const index_t* stride = input.stride;
  const index_t outer = stride[0] | stride[1];
  const bool rows = size[2] % VECTOR == 0 && on_vectors(input.data, outer | stride[2] | stride[3]);
  const bool planes = stride[3] == size[2] && size[2] * static_cast<index_t>(size[1]) % VECTOR == 0 &&
                      on_vectors(input.data, outer | stride[2]);
  const bool volumes = stride[3] == size[2] && stride[2] == stride[3] * size[1] && size[0] * stride[2] % VECTOR == 0 &&
                       on_vectors(input.data, outer);
  if (stride[4] == 1 && (rows || planes || volumes)) return VOXEL_VECTORS;
  const bool last = stride[1] == 1 && channels % VECTOR == 0;
  return last && on_vectors(input.data, stride[0] | stride[2] | stride[3] | stride[4]) ? CHANNEL_VECTORS : ELEMENTS;
}

// Copy COUNT elements one by one, `step` apart in memory and `pitch` in shared memory: of these the first `left` / APART are
// inside.
template <int COUNT, int APART>
__device__ inline void copy_elements(scalar_t* to, int pitch, const scalar_t* from, index_t step, int left) {
  if constexpr (SIZE == 4) {
#pragma unroll 4
    for (int i = 0; i < COUNT; ++i) cp_async<4>(shared_address(to + i * pitch), from + i * step, i * APART < left ? 4 : 0);
  } else {  // cp.async copies no fewer than 4 bytes: several loads are under way before the first is stored
    constexpr int BATCH = COUNT % 16 == 0 ? 16 : COUNT;
#pragma unroll 1
    for (int first = 0; first < COUNT; first += BATCH) {
      scalar_t values[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) values[i] = (first + i) * APART < left ? from[(first + i) * step] : scalar_t();
#pragma unroll
      for (int i = 0; i < BATCH; ++i) to[(first + i) * pitch] = values[i];
    }
  }
}

// The operands of one step for a warp's tile, as they lie in shared memory; parts are what TF32 has of a number, and the rest.
template <int M_TILES, int N_TILES>
struct Fragments {
  unsigned a[PARTS][M_TILES][4], b[PARTS][N_TILES][2];

  __device__ static void round(float value, unsigned& high, unsigned& low) {
    if (PARTS == 2) {
      split_tf32(value, high, low);
    } else {
      high = nearest_tf32(value);
    }
  }

  // `inputs` is the step's first row [depth][voxel] at the warp's first voxel. tf32: rows g and g + 8 of a fragment are
  // voxels 2g
  // and 2g + 1, so that one load brings both.
  template <int PITCH>
  __device__ void load_along_voxels(const scalar_t* inputs, int lane) {
    if constexpr (SIZE == 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
          const Vector<2, float> pair =
              *reinterpret_cast<const Vector<2, float>*>(inputs + (lane % 4 + r * 4) * PITCH + i * 16 + lane / 4 * 2);
          for (int e = 0; e < 2; ++e) round(pair.element[e], a[0][i][r * 2 + e], a[PARTS - 1][i][r * 2 + e]);
        }
      }
    } else {
      const unsigned row = shared_address(inputs + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 8);
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) ldmatrix_x4_transposed(a[0][i], row + i * 16 * SIZE);
    }
  }

  // The same from [voxel][depth].
  template <int PITCH>
  __device__ void load_along_channels(const scalar_t* inputs, int lane) {
    const unsigned row = shared_address(inputs + lane % 16 * PITCH + lane / 16 * VECTOR);
#pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      ldmatrix_x4(a[0][i], row + i * 16 * PITCH * SIZE);
      if constexpr (SIZE == 4) {
        for (int r = 0; r < 4; ++r) round(__uint_as_float(a[0][i][r]), a[0][i][r], a[PARTS - 1][i][r]);
      }
    }
  }

  // [depth][column] at the warp's first column.
  template <int PITCH>
  __device__ void load_weights(const scalar_t* weights, int lane) {
    if constexpr (SIZE == 4) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int j = 0; j < N_TILES; ++j)
          round(to_accum(weights[(lane % 4 + r * 4) * PITCH + j * 8 + lane / 4]), b[0][j][r], b[PARTS - 1][j][r]);
      }
    } else {
      const unsigned row = shared_address(weights + lane % 16 * PITCH + lane / 16 * 8);
#pragma unroll
      for (int j = 0; j < N_TILES; j += 2) {
        unsigned both[4];
        ldmatrix_x4_transposed(both, row + j * 8 * SIZE);
        for (int r = 0; r < 4; ++r) b[0][j + r / 2][r % 2] = both[r];
      }
    }
  }

  __device__ void multiply(float (&sums)[M_TILES][N_TILES][4]) const {
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        if (PARTS == 2) {
          float step[4] = {};
          CONVT3D_MULTIPLY(step, a[PARTS - 1][i], b[0][j][0], b[0][j][1]);
          CONVT3D_MULTIPLY(step, a[0][i], b[PARTS - 1][j][0], b[PARTS - 1][j][1]);
          CONVT3D_MULTIPLY(step, a[0][i], b[0][j][0], b[0][j][1]);
          for (int e = 0; e < 4; ++e) sums[i][j][e] += step[e];
        } else {
          CONVT3D_MULTIPLY(sums[i][j], a[0][i], b[0][j][0], b[0][j][1]);
        }
      }
    }
  }
};

template <int TILE_VOXELS, int TILE_COLUMNS, int DEPTH_WARPS, int WARP_COLUMNS>
__device__ inline void multiply_patches(const Problem& problem, const View<const scalar_t>& input,
                                        const View<const scalar_t>& weight, const Epilogue& epilogue,
                                        const View<scalar_t>& output, int voxels, int columns, int column_tiles) {
  constexpr int STEPS = DEPTH_WARPS == 8 ? 1 : STAGE_STEPS, DEPTH = STEP * DEPTH_WARPS * STEPS;
  constexpr int WARP_VOXELS = TILE_VOXELS * TILE_COLUMNS >= 128 * 128 ? 64 : 32;
  constexpr int COLUMN_WARPS = TILE_COLUMNS / WARP_COLUMNS, VOXEL_WARPS = TILE_VOXELS / WARP_VOXELS;
  constexpr int THREADS = 32 * COLUMN_WARPS * VOXEL_WARPS * DEPTH_WARPS;
  constexpr int M_TILES = WARP_VOXELS / 16, N_TILES = WARP_COLUMNS / 8;
  // 16-bit rows 4 words past a multiple of 32 for ldmatrix; fp32 8 past it along voxels and columns, 4 past it along channels.
  constexpr int VOXEL_PITCH = TILE_VOXELS + 8, COLUMN_PITCH = TILE_COLUMNS + 8, CHANNEL_PITCH = DEPTH + VECTOR;
  constexpr int INPUTS = larger(DEPTH * VOXEL_PITCH, TILE_VOXELS * CHANNEL_PITCH), WEIGHTS = DEPTH * COLUMN_PITCH;
  constexpr int RING = TILE_VOXELS == 256 ? smaller(STAGES, 3) : STAGES;          // sm_120 has 99 KiB for a block
  constexpr int SUMS_COLUMNS = TILE_VOXELS == 256 ? WARP_COLUMNS : TILE_COLUMNS;  // stored in one go
  constexpr int SUMS_PITCH = TILE_VOXELS + 20;  // 4 past a multiple of 16, with room for a shift by 16
  constexpr int STAGE_BYTES = RING * SIZE * (INPUTS + WEIGHTS), SUMS_BYTES = 4 * DEPTH_WARPS * SUMS_COLUMNS * SUMS_PITCH;

  extern __shared__ uint4 shared[];
  scalar_t* const inputs = reinterpret_cast<scalar_t*>(shared);  // [RING][INPUTS]
  scalar_t* const weights = inputs + RING * INPUTS;              // [RING][WEIGHTS]
  float* const sums_of = reinterpret_cast<float*>(shared);       // [DEPTH_WARPS][column][voxel], when the stages have been read
  Row* const row_table = reinterpret_cast<Row*>(shared + larger(STAGE_BYTES, SUMS_BYTES) / 16);
  Column* const column_table = reinterpret_cast<Column*>(row_table + TILE_VOXELS);

  // blockIdx.x = (voxel tile * groups + group) * column_tiles + column tile: neighbours share inputs.
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int first_column = static_cast<int>(blockIdx.x % column_tiles) * TILE_COLUMNS;
  const int group = static_cast<int>(blockIdx.x / column_tiles % problem.groups);
  const int first_voxel = static_cast<int>(blockIdx.x / column_tiles / problem.groups) * TILE_VOXELS;
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int* kernel = problem.kernel_size;
  const int taps = columns / out_channels;

  const index_t tap_row = kernel[2], tap_plane = tap_row * kernel[1];
  const bool dense = weight.stride[0] % VECTOR == 0 && columns % VECTOR == 0 && on_vectors(weight.data, 0);
  const bool taps_last =
      weight.stride[4] == 1 && weight.stride[3] == tap_row && weight.stride[2] == tap_plane && weight.stride[1] == taps;
  const bool taps_first = !taps_last && weight.stride[1] == 1 && weight.stride[4] == out_channels &&
                          weight.stride[3] == tap_row * out_channels && weight.stride[2] == tap_plane * out_channels;
  const bool weight_vectors = dense && (taps_last || taps_first);
  const Copies copies = copies_of(input, problem.input_size, channels);

  // channels_last: 16 bytes are VECTOR channels of one tap, `channel_step` columns apart.
  const int channel_step = taps_first ? 1 : taps;
  const bool output_channels_last =
      output.stride[1] == 1 && out_channels % VECTOR == 0 && out_channels > 1 &&
      (taps_first || (SUMS_COLUMNS / VECTOR) % taps == 0) &&
      on_vectors(output.data, output.stride[0] | output.stride[2] | output.stride[3] | output.stride[4]);
  const int run_voxels = kernel[2] <= 4 && kernel[2] != 3 ? VECTOR / kernel[2] : 0;  // of 16 bytes of NCDHW
  const bool output_rows = run_voxels != 0 && !taps_first && output.stride[4] == 1 && problem.input_size[2] % run_voxels == 0 &&
                           on_vectors(output.data, output.stride[0] | output.stride[1] | output.stride[2] | output.stride[3]);

#pragma unroll 1
  for (int entry = thread; entry < TILE_VOXELS + TILE_COLUMNS; entry += THREADS) {
    if (entry < TILE_VOXELS) {
      const int row = first_voxel + entry;
      const bool live = row < voxels;
      const Voxel at = voxel_of(live ? row : 0, problem.input_size);
      const scalar_t* const corner =
          output.at(at.n, group * out_channels, at.d * kernel[0], at.h * kernel[1], at.w * kernel[2]);
      row_table[entry] = {input.at(at.n, group * channels, at.d, at.h, at.w) - input.data, live ? corner - output.data : -1};
    } else {
      const int at = entry - TILE_VOXELS, column = first_column + at;
      const bool live = column < columns;
      const Tap tap = tap_of(problem, live ? column : 0, out_channels, taps_first);
      const index_t offset =
          tap.co * output.stride[1] + tap.d * output.stride[2] + tap.h * output.stride[3] + tap.w * output.stride[4];
      // Lanes 2q and 2q + 1 read VECTOR channels after each other: shifted by half the banks.
      const bool shifted = output_channels_last && tap.co / VECTOR % 2 != 0 && !(taps_first && VECTOR == 4);
      column_table[at] = {live ? offset : -1,
                          epilogue.changes_sums() && live ? epilogue.start(group * out_channels + tap.co) : 0.0f,
                          at % SUMS_COLUMNS * SUMS_PITCH + (shifted ? 16 : 0)};
    }
  }

  // This thread's share of each copy: one column (or VECTOR of them) and one voxel, and of the channels every so many.
  const int column_threads = weight_vectors ? TILE_COLUMNS / VECTOR : TILE_COLUMNS;
  const int voxel_threads = copies == VOXEL_VECTORS ? TILE_VOXELS / VECTOR : TILE_VOXELS;
  const int copied_column = thread % column_threads * (TILE_COLUMNS / column_threads);
  const int copied_voxel = thread % voxel_threads * (TILE_VOXELS / voxel_threads);
  const bool column_live = first_column + copied_column < columns;
  const Tap tap = tap_of(problem, column_live ? first_column + copied_column : 0, out_channels, taps_first);
  const int weight_channel = thread / column_threads;
  const int input_channel = copies == CHANNEL_VECTORS ? thread % (DEPTH / VECTOR) * VECTOR : thread / voxel_threads;
  const scalar_t* weight_from = weight.at(group * channels + weight_channel, tap.co, tap.d, tap.h, tap.w);
  __syncthreads();  // the tables are written
  const scalar_t* input_from =
      input.data + input_channel * input.stride[1] + (copies == CHANNEL_VECTORS ? 0 : row_table[copied_voxel].input);
  // Channels left for this thread from its first one, none where its column or voxel is outside.
  int weights_left = column_live ? channels - weight_channel : 0;
  int inputs_left = copies == CHANNEL_VECTORS || first_voxel + copied_voxel < voxels ? channels - input_channel : 0;

  const auto copy_stage = [&](int buffer) {
    scalar_t* const inputs_to = inputs + buffer * INPUTS;
    const scalar_t* from = input_from;
    if (copies == VOXEL_VECTORS) {
      constexpr int APART = THREADS / (TILE_VOXELS / VECTOR);
      const unsigned to = shared_address(inputs_to + input_channel * VOXEL_PITCH + copied_voxel);
#pragma unroll
      for (int k = 0; k < DEPTH; k += APART, from += APART * input.stride[1]) {
        if (DEPTH % APART == 0 || input_channel + k < DEPTH)
          cp_async<16>(to + k * VOXEL_PITCH * SIZE, from, k < inputs_left ? 16 : 0);
      }
    } else if (copies == CHANNEL_VECTORS) {
      constexpr int APART = THREADS / (DEPTH / VECTOR);
      const int voxel = thread / (DEPTH / VECTOR);
      const unsigned to = shared_address(inputs_to + voxel * CHANNEL_PITCH + input_channel);
#pragma unroll
      for (int v = 0; v < TILE_VOXELS; v += APART) {
        if (TILE_VOXELS % APART == 0 || voxel + v < TILE_VOXELS) {
          const bool live = inputs_left > 0 && first_voxel + voxel + v < voxels;
          cp_async<16>(to + v * CHANNEL_PITCH * SIZE, from + row_table[voxel + v].input, live ? 16 : 0);
        }
      }
    } else {
      constexpr int APART = THREADS / TILE_VOXELS;
      copy_elements<DEPTH / APART, APART>(inputs_to + input_channel * VOXEL_PITCH + copied_voxel, APART * VOXEL_PITCH, from,
                                          APART * input.stride[1], inputs_left);
    }
    input_from += DEPTH * input.stride[1];
    inputs_left -= DEPTH;

    scalar_t* const weights_to = weights + buffer * WEIGHTS + weight_channel * COLUMN_PITCH + copied_column;
    from = weight_from;
    if (weight_vectors) {
      constexpr int APART = THREADS / (TILE_COLUMNS / VECTOR);
#pragma unroll
      for (int k = 0; k < DEPTH; k += APART, from += APART * weight.stride[0]) {
        if (DEPTH % APART == 0 || weight_channel + k < DEPTH)
          cp_async<16>(shared_address(weights_to) + k * COLUMN_PITCH * SIZE, from, k < weights_left ? 16 : 0);
      }
    } else {
      constexpr int APART = THREADS / TILE_COLUMNS;
      copy_elements<DEPTH / APART, APART>(weights_to, APART * COLUMN_PITCH, from, APART * weight.stride[0], weights_left);
    }
    weight_from += DEPTH * weight.stride[0];
    weights_left -= DEPTH;
  };

  const int stages = (channels + DEPTH - 1) / DEPTH;
#pragma unroll 1
  for (int stage = 0; stage < RING - 1; ++stage) {
    if (stage < stages) copy_stage(stage);
    cp_async_commit();
  }

  const int warp_column = warp % COLUMN_WARPS * WARP_COLUMNS, warp_voxel = warp / COLUMN_WARPS % VOXEL_WARPS * WARP_VOXELS;
  const int warp_depth = warp / (COLUMN_WARPS * VOXEL_WARPS) * STEPS * STEP;
  float sums[M_TILES][N_TILES][4] = {};
  int buffer = 0, filled = RING - 1;
#pragma unroll 1
  for (int stage = 0; stage < stages; ++stage) {
    cp_async_wait<RING - 2>();
    __syncthreads();  // this stage has landed for all, and the one before it has been read by all
    if (stage + RING - 1 < stages) copy_stage(filled);
    cp_async_commit();
    const scalar_t* const stage_inputs = inputs + buffer * INPUTS;
    const scalar_t* const stage_weights = weights + buffer * WEIGHTS + warp_depth * COLUMN_PITCH + warp_column;
    if (copies == CHANNEL_VECTORS) {
#pragma unroll(PARTS == 2 ? 1 : STEPS)
      for (int step = 0; step < STEPS; ++step) {
        Fragments<M_TILES, N_TILES> now;
        now.template load_along_channels<CHANNEL_PITCH>(stage_inputs + warp_voxel * CHANNEL_PITCH + warp_depth + step * STEP,
                                                        lane);
        now.template load_weights<COLUMN_PITCH>(stage_weights + step * STEP * COLUMN_PITCH, lane);
        now.multiply(sums);
      }
    } else {
#pragma unroll(PARTS == 2 ? 1 : STEPS)
      for (int step = 0; step < STEPS; ++step) {
        Fragments<M_TILES, N_TILES> now;
        now.template load_along_voxels<VOXEL_PITCH>(stage_inputs + (warp_depth + step * STEP) * VOXEL_PITCH + warp_voxel, lane);
        now.template load_weights<COLUMN_PITCH>(stage_weights + step * STEP * COLUMN_PITCH, lane);
        now.multiply(sums);
      }
    }
    buffer = buffer + 1 == RING ? 0 : buffer + 1;
    filled = filled + 1 == RING ? 0 : filled + 1;
  }

  // The stages' place is now for the sums, of as many columns at a time as fit.
  float* const warp_sums = sums_of + warp / (COLUMN_WARPS * VOXEL_WARPS) * SUMS_COLUMNS * SUMS_PITCH + warp_voxel;
  const bool paired = SIZE == 4 && copies != CHANNEL_VECTORS;  // rows g and g + 8 are voxels 2g and 2g + 1
  const Column* stored_columns = column_table;

  // RUN neighbouring voxels of one column, all parts of the depth added.
  const auto gather = [&](auto& values, int column, int voxel) {
    constexpr int RUN = sizeof(values) / 4, WIDTH = RUN < 4 ? RUN : 4;
    const Column& entry = stored_columns[column];
    for (int e = 0; e < RUN; ++e) values[e] = entry.start;
#pragma unroll
    for (int part = 0; part < DEPTH_WARPS; ++part) {
#pragma unroll
      for (int e = 0; e < RUN; e += WIDTH) {
        const auto& loaded =
            *reinterpret_cast<const Vector<WIDTH, float>*>(sums_of + part * SUMS_COLUMNS * SUMS_PITCH + entry.sums + voxel + e);
        for (int x = 0; x < WIDTH; ++x) values[e + x] += loaded.element[x];
      }
    }
  };
  // A thread stores one run of voxels, and several columns of it.
  // 16 bytes of NCDHW: KERNEL taps of a row for each of VECTOR / KERNEL voxels.
  const auto store_rows = [&](auto kernel_w) {
    constexpr int KERNEL = decltype(kernel_w)::value, RUN = VECTOR / KERNEL, RUNS = TILE_VOXELS / RUN;
    static_assert(THREADS % RUNS == 0, "a thread keeps its voxels");
    const int voxel = thread % RUNS * RUN;
    const index_t row = row_table[voxel].output;
    if (row < 0) return;
#pragma unroll(DEPTH_WARPS == 1 ? 4 : 1)
    for (int column = thread / RUNS * KERNEL; column < SUMS_COLUMNS; column += THREADS / RUNS * KERNEL) {
      const index_t offset = stored_columns[column].output;
      Vector<VECTOR> out;
#pragma unroll
      for (int tap = 0; tap < KERNEL; ++tap) {
        float values[RUN];
        gather(values, column + tap, voxel);
        for (int v = 0; v < RUN; ++v) out.element[v * KERNEL + tap] = epilogue.finish(values[v]);
      }
      if (offset >= 0) *reinterpret_cast<Vector<VECTOR>*>(output.data + row + offset) = out;
    }
  };

#pragma unroll 1
  for (int first = 0; first < TILE_COLUMNS; first += SUMS_COLUMNS, stored_columns += SUMS_COLUMNS) {
    __syncthreads();  // the stages, or the sums before these, have been read
    if (SUMS_COLUMNS == TILE_COLUMNS || warp_column == first) {
#pragma unroll
      for (int j = 0; j < N_TILES; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float* const to = warp_sums + column_table[warp_column + j * 8 + lane % 4 * 2 + e].sums;
#pragma unroll
          for (int i = 0; i < M_TILES; ++i) {
            if (paired) {
              *reinterpret_cast<Vector<2, float>*>(to + i * 16 + lane / 4 * 2) = {{sums[i][j][e], sums[i][j][2 + e]}};
            } else {
              to[i * 16 + lane / 4] = sums[i][j][e];
              to[i * 16 + lane / 4 + 8] = sums[i][j][2 + e];
            }
          }
        }
      }
    }
    __syncthreads();
    if (output_channels_last) {
      // 16 bytes for each of two voxels; neighbouring lanes have neighbouring channels, 32 bytes, then neighbouring voxels.
      const int tile_groups = SUMS_COLUMNS / VECTOR / channel_step;  // of channels, for one tap (taps_first: for whatever taps)
      const int voxel = thread / 2 % (TILE_VOXELS / 2) * 2;
      const index_t rows[2] = {row_table[voxel].output, row_table[voxel + 1].output};
#pragma unroll 1
      for (int part = thread / TILE_VOXELS * 2 + thread % 2; part < SUMS_COLUMNS / VECTOR; part += THREADS / TILE_VOXELS * 2) {
        const int column = part % tile_groups * VECTOR * channel_step + part / tile_groups;
        const index_t offset = stored_columns[column].output;
        Vector<VECTOR> out[2];
#pragma unroll
        for (int c = 0; c < VECTOR; ++c) {
          float values[2];
          gather(values, column + c * channel_step, voxel);
          for (int v = 0; v < 2; ++v) out[v].element[c] = epilogue.finish(values[v]);
        }
        for (int v = 0; v < 2; ++v) {
          if (rows[v] >= 0 && offset >= 0) *reinterpret_cast<Vector<VECTOR>*>(output.data + rows[v] + offset) = out[v];
        }
      }
    } else if (output_rows && kernel[2] == 1) {
      store_rows(Constant<1>());
    } else if (output_rows && kernel[2] == 2) {
      store_rows(Constant<2>());
    } else if (output_rows && kernel[2] == 4) {
      store_rows(Constant<4>());
    } else {
      const int voxel = thread % TILE_VOXELS;
      const index_t row = row_table[voxel].output;
#pragma unroll(DEPTH_WARPS == 1 ? 4 : 1)
      for (int column = thread / TILE_VOXELS; column < SUMS_COLUMNS; column += THREADS / TILE_VOXELS) {
        const index_t offset = stored_columns[column].output;
        float value[1];
        gather(value, column, voxel);
        if (row >= 0 && offset >= 0) output.data[row + offset] = epilogue.finish(value[0]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 1)
    convt3d_fprop_patch_mma_256x128(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                                    const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels,
                                    const int columns, const int column_tiles) {
  if constexpr (PARTS == 1) {  // tf32x3 is never launched so: its fragments would not fit in registers
    multiply_patches<256, 128, 1, 64>(problem, input, weight, {bias}, output, voxels, columns, column_tiles);
  }
}

extern "C" __global__ void __launch_bounds__(WIDE ? 128 : 256, PARTS == 2 ? 1 : 2)
    convt3d_fprop_patch_mma_128x128(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                                    const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels,
                                    const int columns, const int column_tiles) {
  multiply_patches<128, 128, 1, WIDE ? 64 : 32>(problem, input, weight, {bias}, output, voxels, columns, column_tiles);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convt3d_fprop_patch_mma_128x64(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                                   const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels,
                                   const int columns, const int column_tiles) {
  multiply_patches<128, 64, 1, 32>(problem, input, weight, {bias}, output, voxels, columns, column_tiles);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convt3d_fprop_patch_mma_64x64(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                                  const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels,
                                  const int columns, const int column_tiles) {
  multiply_patches<64, 64, 2, 32>(problem, input, weight, {bias}, output, voxels, columns, column_tiles);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convt3d_fprop_patch_mma_32x32(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                                  const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels,
                                  const int columns, const int column_tiles) {
  multiply_patches<32, 32, 8, 32>(problem, input, weight, {bias}, output, voxels, columns, column_tiles);
}
