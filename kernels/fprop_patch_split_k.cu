/* convt3d
pass = "fprop"
dtypes = ["tf32", "bf16", "fp16"]
[specialize]
ROW_TILES = "tile_voxels // 16"
COLUMN_TILES = "tile_columns // 8"
CHANNELS = "in_channels_per_group"
BATCH = "batch_chunks"
PITCH = "pitch"
PARTS_OF_COLUMNS = "column_tiles"
GROUPS = "groups"
[constants]
voxels = "batch * input_voxels"
columns = "out_channels_per_group * taps"
# Channels come in chunks of 64 bytes, and a warp has so many of them at most.
chunks = "ceil_div(in_channels_per_group * itemsize, 64)"
warp_chunks = "ceil_div(chunks, WARPS)"
tile_voxels = "TILE if TILE != 0 else 64 if voxels > 32 and WARPS * warp_chunks * 64 * 64 <= 96 * 1024 else 32"
# A tile has whole volumes, or a part of one. Where these are no whole vectors they are staged as they lie, `pitch` apart.
voxel_tiles = "ceil_div(batch, tile_voxels // max(1, input_voxels)) if input_voxels <= tile_voxels else batch * ceil_div(input_voxels, tile_voxels)"
ragged = "input_voxels * itemsize % 16"
pitch = "0 if ragged == 0 else input_voxels if input_voxels <= tile_voxels else tile_voxels + (16 + ragged) // itemsize"
# As many columns as leave a block for each multiprocessor, and no more than a thread has registers for.
all_eights = "ceil_div(columns, 8)"
eights = "max(1, min(COLUMNS // 8, (384 if WARPS <= 8 else 128) // tile_voxels, ceil_div(all_eights * voxel_tiles * groups, multiprocessors)))"
column_tiles = "ceil_div(all_eights, eights)"
tile_columns = "8 * ceil_div(all_eights, column_tiles)"
loads = "min(LOADS, ((184 - 5 * tile_voxels // 8 if WARPS <= 8 else 60) - tile_voxels * tile_columns // 32) // 4)"
batch_chunks = "max(1, min(warp_chunks, loads * 8 // tile_columns))"
warp_bytes = "max(warp_chunks * 64 * max(tile_voxels, pitch), 4 * tile_columns * (tile_voxels + 4))"
shared_bytes = "WARPS * warp_bytes + 16 * tile_columns"
cells = "groups * column_tiles * chunks * tile_columns * 4"
[restrictions]
"kernel_size == stride and padding == (0, 0, 0) and output_padding == (0, 0, 0)" = "it is for kernel = stride with no padding, where each input owns a block of the output"
"all((dilation_d == 1 or kernel_d == 1, dilation_h == 1 or kernel_h == 1, dilation_w == 1 or kernel_w == 1))" = "dilation must be 1, else taps do not fill the block"
"shared_bytes <= 232448" = "a block keeps all channels of its voxels in shared memory"
"max(voxels, columns, cells, voxel_tiles * groups * column_tiles) < 2 * 1024 * 1024 * 1024 - 512" = "voxels, columns, cells of weights and blocks must be below 2^31"
[search]
TILE = [32, 64]
COLUMNS = [8, 16, 24, 32, 48]
WARPS = [4, 8, 16]
[cost]
steps = "ceil_div(chunks, WARPS)"
products = "WARPS * tile_voxels * tile_columns * 64 // itemsize"
bytes = "WARPS * 64 * (tile_voxels + tile_columns)"
[workspace]
packed_weight = "cells * 4"
[[launch]]
symbol = "convt3d_pack_split_k_weight"
packs = "packed_weight"
grid = "ceil_div(cells, 128)"
block = 128
[[launch]]
symbol = "convt3d_fprop_patch_split_k"
grid = "voxel_tiles * groups * column_tiles"
block = "32 * WARPS"
shared_bytes = "shared_bytes"
*/
// Kernel = stride of few voxels on tensor cores, the depth split among warps. Each input voxel owns a block of kernel_size outputs, so the
// layer is one matrix product with the reordering fused into the store (depth to space):
//
//   output[n, co, i*stride + t] = bias[co] + sum over ci of weight[ci, co, t] * input[n, ci, i]
//
// with a row for each voxel (n, i), a column for each (co, t), and depth ci. With few voxels it takes as long as memory takes to answer, once
// if all is asked for at the same time. So a block has few columns of all depth, there is a block for each multiprocessor, and each of
// its warps has a part of the depth for itself:
//   1. It loads its weights into registers, each lane 16 bytes of the fragments of two products, as they were packed. All that a warp has, or
//      `BATCH` chunks of channels of them; the registers of a chunk that has been multiplied take the next one to come.
//   2. It copies its channels of the block's voxels into its part of shared memory. Volumes that are no whole vectors are copied as they
//      lie: the channels of a warp are one stretch of a dense volume, and what is a multiple of 16 bytes is the stretch, not a row of it.
//   3. It waits for its own copies, makes fragments of them and multiplies.
// One barrier then, behind the sums in shared memory [warp][column][voxel]. The warps' sums are added in order and stored.
//
// Which voxel a row of a product is can be chosen: in 16 bits rows in their order, for ldmatrix; in tf32 a lane has 4 neighbouring voxels.
#include "convt3d.cuh"
#include "convt3d/advanced.cuh"
#include "convt3d/epilogue.cuh"
#include "convt3d/mma.cuh"
#include "convt3d/patch.cuh"
#include "convt3d/specialized.cuh"
#include "convt3d/store_piece.cuh"

// 32 or 64 voxels of a block; 0: by the problem.
#ifndef TILE
#define TILE 0
#endif
// At most so many (co, t) of a block, a multiple of 8.
#ifndef COLUMNS
#define COLUMNS 96
#endif
#ifndef WARPS
#define WARPS 8
#endif
// At most so many loads of 16 bytes of weights of a lane at a time.
#ifndef LOADS
#define LOADS 24
#endif
#ifndef ROW_TILES  // set by the problem, all together; these are for a look at the compiler's output
#define ROW_TILES 2
#define COLUMN_TILES 3
#define CHANNELS 768
#define BATCH 3
#define PITCH 27
#define PARTS_OF_COLUMNS 128
#define GROUPS 1
#endif

constexpr int SIZE = static_cast<int>(sizeof(scalar_t)), THREADS = 32 * WARPS;
static_assert(WARPS % 2 == 0, "a thread stores outputs of one of up to 64 voxels");
constexpr int VECTOR = 16 / SIZE, CHUNK = 64 / SIZE;  // channels of a copy, of a chunk
constexpr int EACH = 4 / SIZE, HALF = 16 / SIZE;      // channels of a register, of half a product

#if defined(__CUDACC__)
constexpr int ROWS = ROW_TILES, EIGHTS = COLUMN_TILES, AHEAD = BATCH;
constexpr bool ALL_AHEAD = (CHANNELS + CHUNK - 1) / CHUNK <= WARPS * BATCH;
#else
constexpr int ROWS = 4, EIGHTS = 12, AHEAD = LOADS;  // the most there can be
constexpr bool ALL_AHEAD = false;
#endif

struct alignas(16) Cell {
  unsigned words[4];
};

// What a register has of an operand: a number rounded to TF32, or two numbers `step` apart.
__device__ __forceinline__ unsigned word_of(const float* from, int) { return nearest_tf32(*from); }
template <class Half>
__device__ __forceinline__ unsigned word_of(const Half* from, int step) {
  return from[0].bits | static_cast<unsigned>(from[step].bits) << 16;
}

// ---- packing: [group][column tile][chunk][8 columns][lane] of cells, the fragments of two products ----

extern "C" __global__ void __launch_bounds__(128)
    convt3d_pack_split_k_weight(const Problem problem, const View<const scalar_t> weight, accum_t* __restrict__ packed_weight,
                                const int columns, const int column_tiles, const int chunks, const int tile_columns,
                                const int cells) {
  const int cell = static_cast<int>(blockIdx.x * 128 + threadIdx.x), lane = cell % 32;
  if (cell >= cells) return;
  const int eights = tile_columns / 8, part = cell / 32 / eights, tile = part / chunks;
  const int column = tile % column_tiles * tile_columns + cell / 32 % eights * 8 + lane / 4, group = tile / column_tiles;
  const int *const kernel = problem.kernel_size, taps = kernel[0] * kernel[1] * kernel[2];
  const int channels = problem.in_channels / problem.groups, first = part % chunks * CHUNK + lane % 4 * EACH;
  const int tap = column % taps, row = tap / kernel[2];
  Cell packed;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    scalar_t values[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int ci = first + p * HALF + e;
      values[e] = column < columns && ci < channels
                      ? *weight.at(group * channels + ci, column / taps, row / kernel[1], row % kernel[1], tap % kernel[2])
                      : scalar_t();
    }
    packed.words[p] = word_of(values, 1);
  }
  reinterpret_cast<Cell*>(packed_weight)[cell] = packed;
}

// ---- the product ----

// A cell that is read once, past L1; in PTX, so that it is asked for here and not where it is used.
__device__ __forceinline__ Cell load_once(const Cell* from) {
#if defined(__CUDACC__)
  Cell cell;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(cell.words[0]), "=r"(cell.words[1]), "=r"(cell.words[2]), "=r"(cell.words[3])
               : "l"(from));
  return cell;
#else
  return *from;
#endif
}

// A column of the tile: where it lies relative to a voxel's output.
struct alignas(16) Column {
  index_t output;
  float start;
  int live;
};

// The voxels of a block: `count` from `first` on, of all volumes; voxel `begin` of volume n is the first.
struct Tile {
  int size, first, count, n, begin, volume;  // rows of the product; ... voxels of a volume
};

// Row g + 8 * half of a fragment's 16.
__device__ __forceinline__ int voxel_of(int fragment, int half, int g) {
  const int q = fragment * 2 + half;
  return SIZE == 4 ? q / 4 * 32 + g * 4 + q % 4 : q * 8 + g;
}

// How inputs are staged: along voxels [channel][voxel] and along channels [chunk][voxel][channel] in units of 16 bytes, moved so that those
// that a warp reads at once meet all banks; as they lie, [volume][channel][voxel], or [channel][voxel] in rows that begin where they did.
enum Staged { ALONG_VOXELS, ALONG_CHANNELS, AS_THEY_LIE };

__device__ __forceinline__ int along_voxels(int k, int voxel, int tile) {
  const int moved = SIZE == 4 ? k % 4 * 2 : tile == 64 ? k % 8 : k / 2 % 4;
  return k * tile + (voxel / VECTOR ^ moved) * VECTOR + voxel % VECTOR;
}
__device__ __forceinline__ int along_channels(int k, int voxel, int tile) {
  return (k / CHUNK * tile + voxel) * CHUNK + (k % CHUNK / VECTOR ^ voxel / EACH / 2 % 4) * VECTOR;
}

// A warp's channels, `depth` from `first` on, of a block's voxels.
struct Warp {
  const View<const scalar_t>& input;
  const Tile& tile;
  int channels, first, depth, pitch, lane;
  scalar_t* stage;

  // The places in the input that lanes have, of voxels `lane`, `lane` + 32 ...
  __device__ __forceinline__ static index_t place_of(const index_t (&places)[ROWS / 2], int voxel) {
    index_t place = __shfl_sync(0xffffffffu, places[0], voxel % 32);
#pragma unroll
    for (int h = 1; h < ROWS / 2; ++h) {
      const index_t other = __shfl_sync(0xffffffffu, places[h], voxel % 32);
      if (voxel / 32 == h) place = other;
    }
    return place;
  }

  // 16 bytes of neighbouring voxels.
  __device__ __forceinline__ void copy_voxels(const index_t (&places)[ROWS / 2]) const {
    const int units = tile.size / VECTOR, apart = 32 / units, voxel = lane % units * VECTOR;
    const index_t place = place_of(places, voxel), step = apart * SIZE * input.stride[1];
    const scalar_t* from = input.data + (place < 0 ? 0 : place + lane / units * input.stride[1]);
    const int live = place < 0 ? 0 : channels - first;
#pragma unroll 4
    for (int k = lane / units; k < depth; k += apart, from = advanced(from, step)) {
      cp_async<16>(shared_address(stage + along_voxels(k, voxel, tile.size)), k < live ? from : input.data, k < live ? 16 : 0);
    }
  }

  // 16 bytes of neighbouring channels.
  __device__ __forceinline__ void copy_channels(const index_t (&places)[ROWS / 2]) const {
    const int unit = lane % 4 * VECTOR;
#pragma unroll 1
    for (int row = 0; row < tile.size; row += 8) {
      const int voxel = row + lane / 4;
      const index_t place = place_of(places, voxel);
      const int live = place < 0 ? 0 : channels - first;
#pragma unroll 4
      for (int k = unit; k < depth; k += CHUNK) {
        cp_async<16>(shared_address(stage + along_channels(k, voxel, tile.size)), input.data + (k < live ? place + k : 0),
                     k < live ? 16 : 0);
      }
    }
  }

  __device__ __forceinline__ void copy_elements(const index_t (&places)[ROWS / 2]) const {
#pragma unroll
    for (int h = 0; h < ROWS / 2 && h * 32 < tile.size; ++h) {
      const int voxel = h * 32 + lane;
      const index_t place = places[h];
      const int live = place < 0 ? 0 : channels - first;
#pragma unroll 1
      for (int k = 0; k < depth; k += 8) {
        scalar_t values[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) values[e] = k + e < live ? input.data[place + (k + e) * input.stride[1]] : scalar_t();
#pragma unroll
        for (int e = 0; e < 8; ++e) stage[along_voxels(k + e, voxel, tile.size)] = values[e];
      }
    }
  }

  // Dense volumes whose channels are whole vectors together: the channels of each volume in one piece, or of a part of one row by row.
  __device__ __forceinline__ void copy_as_they_lie(int batch, int group) const {
    const scalar_t* from =
        input.data + tile.n * input.stride[0] + static_cast<index_t>(group * channels + first) * tile.volume + tile.begin;
    if (pitch <= tile.size) {
      const int all = depth * tile.volume, live = (channels - first) * tile.volume;
#pragma unroll 1
      for (int i = 0; i < tile.count / tile.volume && tile.n + i < batch; ++i, from += input.stride[0]) {
#pragma unroll 32
        for (int unit = 0; unit < all; unit += 32 * VECTOR) {  // from 0 on, so that the compiler knows how many there are
          const int at = unit + lane * VECTOR;
          const bool inside = channels % CHUNK == 0 || at < live;
          if (at < all) cp_async<16>(shared_address(stage + i * all + at), inside ? from + at : input.data, inside ? 16 : 0);
        }
      }
    } else {
      const int lanes = tile.size * 2 / VECTOR, unit = lane % lanes * VECTOR;
#pragma unroll 4
      for (int k = lane / lanes; k < depth; k += 32 / lanes) {
        const int before = k * pitch % VECTOR;
        if (unit >= before + tile.count) continue;
        const bool live = first + k < channels;
        cp_async<16>(shared_address(stage + k * pitch - before + unit),
                     live ? from + (static_cast<index_t>(k) * tile.volume - before + unit) : input.data, live ? 16 : 0);
      }
    }
  }

  // Where row `voxel` of the product begins in what lies as it did.
  __device__ int start(int voxel) const {
    const int live = voxel < tile.count ? voxel : 0;
    return pitch > tile.size ? live : live / tile.volume * tile.volume * depth + live % tile.volume;
  }

  // The fragments of the two products of chunk `chunk`.
  __device__ __forceinline__ void load(unsigned (&a)[2][ROWS][4], int chunk, Staged staged,
                                       const int (&starts)[2 * ROWS]) const {
    const int g = lane / 4, t = lane % 4, k = chunk * CHUNK;
    if (staged == ALONG_CHANNELS) {
#pragma unroll
      for (int i = 0; i < ROWS && i * 16 < tile.size; ++i) {
        const int voxel = voxel_of(i, lane / 8 % 2, lane % 8);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          ldmatrix_x4(a[s][i], shared_address(stage + along_channels(k + (s * 2 + lane / 16) * VECTOR, voxel, tile.size)));
          if constexpr (SIZE == 4) {
            for (int r = 0; r < 4; ++r) a[s][i][r] = nearest_tf32(__uint_as_float(a[s][i][r]));
          }
        }
      }
    } else if (staged == AS_THEY_LIE) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int at = (k + p * HALF + t * EACH) * pitch;
#pragma unroll
        for (int q = 0; q < 2 * ROWS && q * 8 < tile.size; ++q) {
          a[p / 2][q / 2][p % 2 * 2 + q % 2] = word_of(stage + starts[q] + at, pitch);
        }
      }
    } else if constexpr (SIZE == 4) {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
#pragma unroll
        for (int u = 0; u < ROWS / 2 && u * 32 < tile.size; ++u) {
          const Run<4> run =
              *reinterpret_cast<const Run<4>*>(stage + along_voxels(k + p * HALF + t, u * 32 + g * 4, tile.size));
          for (int e = 0; e < 4; ++e) a[p / 2][u * 2 + e / 2][p % 2 * 2 + e % 2] = word_of(run.element + e, 1);
        }
      }
    } else {
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        const int row = k + s * 2 * HALF + lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int i = 0; i < ROWS && i * 16 < tile.size; ++i) {
          ldmatrix_x4_transposed(a[s][i], shared_address(stage + along_voxels(row, i * 16 + lane / 8 % 2 * 8, tile.size)));
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convt3d_fprop_patch_split_k(const Problem problem, const View<const scalar_t> input,
                                const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                const View<scalar_t> output, const int voxels, const int columns, const int column_tiles,
                                const int tile_voxels, const int tile_columns, const int batch_chunks, const int pitch,
                                const int warp_bytes) {
  const Epilogue epilogue{bias};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int width = SPECIALIZED(EIGHTS * 8, tile_columns), eights = width / 8, size = SPECIALIZED(ROWS * 16, tile_voxels);
  const int ahead = SPECIALIZED(AHEAD, batch_chunks);
  // blockIdx.x = (voxel tile * groups + group) * column_tiles + column tile
  const int weight_tiles = SPECIALIZED(PARTS_OF_COLUMNS * GROUPS, column_tiles * problem.groups);
  const int weight_tile = static_cast<int>(blockIdx.x) % weight_tiles, voxel_tile = static_cast<int>(blockIdx.x) / weight_tiles;

  const int in_channels = SPECIALIZED(CHANNELS, problem.in_channels / problem.groups),
            chunks = (in_channels + CHUNK - 1) / CHUNK;
  const int first_chunk = warp * chunks / WARPS;
  const int own = chunks % WARPS == 0 ? chunks / WARPS : (warp + 1) * chunks / WARPS - first_chunk;
  const Cell* const packed = reinterpret_cast<const Cell*>(packed_weight) +
                             (static_cast<index_t>(weight_tile) * chunks + first_chunk) * eights * 32 + lane;
  Cell weights[AHEAD][EIGHTS];
#pragma unroll
  for (int b = 0; b < AHEAD && b < ahead; ++b) {
    if (b >= own) break;
#pragma unroll
    for (int j = 0; j < EIGHTS && j < eights; ++j) weights[b][j] = load_once(packed + (b * eights + j) * 32);
  }

  const int (&sizes)[3] = problem.input_size;
  const int whole = SPECIALIZED(PITCH, pitch) <= size ? SPECIALIZED(PITCH, pitch) : 0;
  const int volume = SPECIALIZED(whole, 0) != 0 ? whole : sizes[0] * sizes[1] * sizes[2];
  Tile tile{size, 0, 0, 0, 0, volume};
  if (volume <= size) {
    const int volumes = size / volume;
    tile.n = voxel_tile * volumes;
    tile.count = volumes * volume;
  } else {
    const int parts = (volume + size - 1) / size;
    tile.n = voxel_tile / parts;
    tile.begin = voxel_tile % parts * size;
    tile.count = volume - tile.begin < size ? volume - tile.begin : size;
  }
  tile.first = tile.n * volume + tile.begin;

  extern __shared__ uint4 shared[];
  char* const own_shared = reinterpret_cast<char*>(shared) + warp * warp_bytes;
  Column* const table = reinterpret_cast<Column*>(reinterpret_cast<char*>(shared) + WARPS * warp_bytes);
  const int out_channels = problem.out_channels / SPECIALIZED(GROUPS, problem.groups);
  const int group = weight_tile / SPECIALIZED(PARTS_OF_COLUMNS, column_tiles);
  const Warp mine{input,       tile,
                  in_channels, first_chunk * CHUNK,
                  own * CHUNK, SPECIALIZED(PITCH, pitch),
                  lane,        reinterpret_cast<scalar_t*>(own_shared)};

  const bool as_they_lie = mine.pitch != 0 && static_cast<index_t>(in_channels) * volume % VECTOR == 0 &&
                           input.stride[4] == 1 && input.stride[3] == sizes[2] && input.stride[2] == sizes[2] * sizes[1] &&
                           input.stride[1] == volume && aligned(input, input.stride[0], VECTOR);
  if (as_they_lie) mine.copy_as_they_lie(problem.batch, group);

  // Voxels `lane`, `lane` + 32 ... of the tile, and the one of which this thread stores outputs.
  const int *const kernel = problem.kernel_size, taps = kernel[0] * kernel[1] * kernel[2];
  index_t sources[ROWS / 2] = {}, target = -1;
#pragma unroll
  for (int h = 0; h < ROWS / 2 && h * 32 < size; ++h) {
    const int row = h * 32 + lane;
    const Place place = place_of(problem, row < tile.count ? tile.first + row : voxels, voxels, input, output,
                                 group * in_channels + mine.first, group * out_channels, kernel[0], kernel[1], kernel[2]);
    sources[h] = place.input;
    if (row == thread % size) target = place.output;
  }
  const Copies copies = as_they_lie ? ELEMENTS : copies_of(input, sizes, in_channels);
  const Staged staged = as_they_lie ? AS_THEY_LIE : copies == CHANNEL_VECTORS ? ALONG_CHANNELS : ALONG_VOXELS;
  if (copies == VOXEL_VECTORS) {
    mine.copy_voxels(sources);
  } else if (copies == CHANNEL_VECTORS) {
    mine.copy_channels(sources);
  } else if (!as_they_lie) {
    mine.copy_elements(sources);
  }

  // While all that is under way: where the block's columns lie in the output.
#pragma unroll 1
  for (int i = thread; i < width; i += THREADS) {
    const int column = weight_tile % SPECIALIZED(PARTS_OF_COLUMNS, column_tiles) * width + i, co = column / taps,
              tap = column % taps, row = tap / kernel[2];
    Column entry{0, 0.0f, 0};
    if (column < columns) {
      entry.live = 1;
      entry.output = co * output.stride[1] + row / kernel[1] * output.stride[2] + row % kernel[1] * output.stride[3] +
                     tap % kernel[2] * output.stride[4];
      entry.start = epilogue.start(group * out_channels + co);
    }
    table[i] = entry;
  }
  const int voxel = thread % size;
  const bool in_pairs = kernel[2] % 2 == 0 && output.stride[4] == 1 &&
                        aligned(output, output.stride[0] | output.stride[1] | output.stride[2] | output.stride[3], 2);
  int starts[2 * ROWS];
#pragma unroll
  for (int q = 0; q < 2 * ROWS; ++q) starts[q] = staged == AS_THEY_LIE ? mine.start(voxel_of(q / 2, q % 2, lane / 4)) : 0;

  cp_async_wait_all();
  __syncwarp();  // all lanes' copies have landed
  float sums[ROWS][EIGHTS][4] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < own; chunk += ahead) {
#pragma unroll
    for (int b = 0; b < AHEAD && b < ahead; ++b) {
      if (chunk + b >= own) break;
      unsigned a[2][ROWS][4];
      mine.load(a, chunk + b, staged, starts);
#pragma unroll
      for (int j = 0; j < EIGHTS && j < eights; ++j) {
#pragma unroll
        for (int i = 0; i < ROWS && i * 16 < size; ++i) {
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            CONVT3D_MULTIPLY(sums[i][j], a[s][i], weights[b][j].words[s * 2], weights[b][j].words[s * 2 + 1]);
          }
        }
        if (!ALL_AHEAD && chunk + b + ahead < own) weights[b][j] = load_once(packed + ((chunk + b + ahead) * eights + j) * 32);
      }
    }
  }

  __syncwarp();  // all lanes have read the inputs, whose place is now for the sums
  float* const own_sums = reinterpret_cast<float*>(own_shared);
  const int sums_pitch = size + 4;
#pragma unroll
  for (int j = 0; j < EIGHTS && j < eights; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float* const to = own_sums + (j * 8 + lane % 4 * 2 + e) * sums_pitch;
#pragma unroll
      for (int i = 0; i < ROWS && i * 16 < size; ++i) {
        for (int half = 0; half < 2; ++half) to[voxel_of(i, half, lane / 4)] = sums[i][j][half * 2 + e];
      }
    }
  }
  __syncthreads();
  if (target < 0) return;
  for (int i = thread / size * 2; i < width; i += THREADS / size * 2) {
    const Column first = table[i], second = table[i + 1];
    float one = first.start, other = second.start;
    const char* from = reinterpret_cast<const char*>(reinterpret_cast<const float*>(shared) + i * sums_pitch + voxel);
#pragma unroll
    for (int w = 0; w < WARPS; ++w, from += warp_bytes) {
      one += reinterpret_cast<const float*>(from)[0];
      other += reinterpret_cast<const float*>(from)[sums_pitch];
    }
    scalar_t* const y = output.data + target;
    if (in_pairs && first.live != 0) {
      store_pair(y + first.output, epilogue.finish(one), epilogue.finish(other));
    } else {
      if (first.live != 0) y[first.output] = epilogue.finish(one);
      if (second.live != 0) y[second.output] = epilogue.finish(other);
    }
  }
}
