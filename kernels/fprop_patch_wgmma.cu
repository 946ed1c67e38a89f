/* convt3d
pass = "fprop"
dtypes = ["bf16", "fp16"]
architectures = ["sm_90a"]
[specialize]
CONSUMERS = "consumers"
M_TILES = "thread_tiles"
DEPTH = "depth"
WGMMA_TILES = "tile_columns // 8"
STAGES = "stages"
BLOCKS = "blocks"
KERNEL_D = "kernel_d"
KERNEL_H = "kernel_h"
KERNEL_W = "kernel_w"
[constants]
voxels = "batch * input_voxels"
columns = "out_channels_per_group * taps"
wide = "1 if columns % 256 == 0 or columns % 256 > 128 else 0"
large_tiles = "ceil_div(voxels, 128 if wide else 256) * ceil_div(columns, 256 if wide else 128) * groups"
medium_tiles = "ceil_div(voxels, 128) * ceil_div(columns, 128) * groups"
fitting = "4 if columns <= 64 else (1 if wide else 2) if large_tiles * 4 >= LARGE_QUARTERS * multiprocessors else 3 if medium_tiles * 4 >= MEDIUM_QUARTERS * multiprocessors else 5"
tile = "fitting if TILE == 0 else TILE"
consumers = "1 if tile == 5 else 2"
thread_tiles = "2 if tile == 2 else 1"
tile_voxels = "64 * consumers * thread_tiles"
tile_columns = "256 if tile == 1 else 64 if tile == 4 else 128"
blocks = "2 if tile in (4, 5) else 1"
column_tiles = "ceil_div(columns, tile_columns)"
tiles = "ceil_div(voxels, tile_voxels) * groups * column_tiles"
depth = "16 * ceil_div(ceil_div(in_channels_per_group, 16), ceil_div(in_channels_per_group, 64))"
stage_bytes = "2 * (depth + 1) * (tile_voxels + tile_columns)"
held_bytes = "5120 + 4 * consumers * 2816"
stages = "min(RING, ((115712 if blocks == 2 else 231424) - held_bytes) // stage_bytes)"
[restrictions]
"kernel_size == stride and padding == (0, 0, 0) and output_padding == (0, 0, 0)" = "it is for kernel = stride with no padding, where each input owns a block of the output"
"all((dilation_d == 1 or kernel_d == 1, dilation_h == 1 or kernel_h == 1, dilation_w == 1 or kernel_w == 1))" = "dilation must be 1, else taps do not fill the block"
"voxels < 2 * 1024 * 1024 * 1024 - 256 and columns < 2 * 1024 * 1024 * 1024 - 256 and tiles < 1024 * 1024 * 1024" = "voxels and columns of the product must be below 2^31, its tiles below 2^30"
[search]
TILE = [0, 1, 2, 3, 4, 5]
RING = [3, 4, 6]
[[launch]]
symbol = "convt3d_fprop_patch_wgmma"
grid = "min(multiprocessors * blocks, tiles)"
block = "128 * (consumers + 1)"
shared_bytes = "held_bytes + stages * stage_bytes"
*/
// Kernel = stride on Hopper's warpgroup products, in 16 bits. Each input voxel owns a block of kernel_size outputs, so the layer
// is one matrix product with the reordering fused into the store (depth to space):
//
//   output[n, co, i*stride + t] = bias[co] + sum over ci of input[n, ci, i] * weight[ci, co, t]
//
// with a row for each voxel (n, i), a column for each (co, t), and depth ci. wgmma reads 16-bit operands from shared memory
// with either index running fastest, so nothing is packed, transposed or converted: NCDHW inputs [channel][voxel] and weights
// [channel][column] are copied as they lie, and so are channels_last inputs [voxel][channel].
//
// Blocks stay on their multiprocessors and take tiles of voxels x columns of a group in turn. The last warpgroup fills a ring
// of stages, at most 64 channels each, by cp.async, and runs ahead into the next tile while the others, which multiply, store
// theirs.
//   A stage is made of cells of 16 bytes, as wgmma.cuh has them without a swizzle:
//     NCDHW input   [voxel / 8][channel][voxel % 8]     an odd number of cells for each eight voxels, so that the eight cells
//     weight        [column / 8][channel][column % 8]   that eight lanes write, neighbours in memory, meet all banks;
//     channels_last [channel / 8][voxel][channel % 8]   the same for each eight channels.
//   Columns are (co, tap), or (tap, co) where the weight is channels_last.
//   A warp has 16 voxels, or 32 neighbours in two products. It adds the bias, rounds, and passes what it stores through 2.5 KiB
//   of its own in shared memory, 64 or 32 columns at a time, to write 16 bytes a lane: for kernel_w = 2 the two taps of four
//   voxels of a row; for channels_last eight channels of a tap.
#include "convt3d.cuh"
#include "convt3d/wgmma.cuh"

// 1: 128 voxels x 256 columns, 2: 256 x 128, 3: 128 x 128, 4: 128 x 64, 5: 64 x 128; 0: by the problem.
#ifndef TILE
#define TILE 0
#endif
// Stages, where there is room for so many.
#ifndef RING
#define RING 4
#endif
// Tiles for each multiprocessor, in quarters, from which on large and medium ones are taken.
#ifndef LARGE_QUARTERS
#define LARGE_QUARTERS 4
#endif
#ifndef MEDIUM_QUARTERS
#define MEDIUM_QUARTERS 4
#endif
#ifndef WGMMA_TILES  // set by the problem, all together; these are for a look at the compiler's output
#define WGMMA_TILES 32
#define CONSUMERS 2
#define M_TILES 1
#define STAGES 4
#define DEPTH 64
#define BLOCKS 1
#define KERNEL_D 2
#define KERNEL_H 2
#define KERNEL_W 2
#endif
static_assert(RING >= 3 && RING <= 8, "one stage is filled, one lands, one is read; there are 8 barriers of each kind");

#if defined(__CUDACC__)
#define SPECIALIZED(macro, parameter) (macro)
#define SUMS (M_TILES * WGMMA_TILES * 4)
#else
#define SPECIALIZED(macro, parameter) (parameter)
#define SUMS 128
#endif

constexpr unsigned TABLE = 1024, HELD = 5120;  // after the barriers: where voxels lie in the input, twice; what warps store
constexpr unsigned WARP_BYTES = 2816, WARP_TABLE = 2560;

// What the two kinds of threads leave each other of the registers of 1 or 2 blocks.
constexpr int PRODUCER_REGISTERS = 56, CONSUMER_REGISTERS = BLOCKS == 1 ? 224 : CONSUMERS == 2 ? 96 : 192;
constexpr int STORES = CONSUMER_REGISTERS > 96 ? 4 : 1;  // of a thread at a time

struct alignas(16) Cell {
  unsigned words[4];
};

// What every thread knows of the product.
struct Product {
  const Problem& problem;
  int voxels, columns, column_tiles, tiles;
  int stages, depth, consumers, thread_tiles, tile_columns;
  bool taps_first;  // the order of the columns

  __device__ int tile_voxels() const { return consumers * thread_tiles * 64; }
  __device__ int channels() const { return problem.in_channels / problem.groups; }
  __device__ int out_channels() const { return problem.out_channels / problem.groups; }
  __device__ int kernel_d() const { return SPECIALIZED(KERNEL_D, problem.kernel_size[0]); }
  __device__ int kernel_h() const { return SPECIALIZED(KERNEL_H, problem.kernel_size[1]); }
  __device__ int kernel_w() const { return SPECIALIZED(KERNEL_W, problem.kernel_size[2]); }
  __device__ int taps() const { return kernel_d() * kernel_h() * kernel_w(); }
  __device__ int first_column(int tile) const { return tile % column_tiles * tile_columns; }
  __device__ int group(int tile) const { return tile / column_tiles % problem.groups; }
  __device__ int first_voxel(int tile) const { return tile / column_tiles / problem.groups * tile_voxels(); }
  __device__ unsigned eight_bytes() const { return static_cast<unsigned>(depth + 1) * 16; }  // of eight voxels or columns
  __device__ unsigned stage_bytes() const { return static_cast<unsigned>(tile_voxels() + tile_columns) / 8 * eight_bytes(); }
  __device__ unsigned first_stage() const { return HELD + static_cast<unsigned>(consumers) * 4 * WARP_BYTES; }

  // Where the block of a voxel begins, in a tensor with blocks of d x h x w.
  template <class T>
  __device__ index_t offset_of(int voxel, const View<T>& tensor, int channel, int d, int h, int w) const {
    const int* size = problem.input_size;
    const int row = voxel / size[2], plane = row / size[1], n = plane / size[0];
    return n * tensor.stride[0] + channel * tensor.stride[1] + (plane - n * size[0]) * d * tensor.stride[2] +
           (row - plane * size[1]) * h * tensor.stride[3] + (voxel - row * size[2]) * w * tensor.stride[4];
  }
  // Where a column lies relative to its voxel's block.
  template <class T>
  __device__ index_t column_offset(int column, const View<T>& tensor) const {
    const int co = taps_first ? column % out_channels() : column / taps();
    const int tap = taps_first ? column / out_channels() : column % taps();
    return co * tensor.stride[1] + tap / (kernel_h() * kernel_w()) * tensor.stride[2] +
           tap / kernel_w() % kernel_h() * tensor.stride[3] + tap % kernel_w() * tensor.stride[4];
  }
};

// A place in the ring of stages: `full` barriers at the start of shared memory, `empty` ones after them.
struct Slot {
  unsigned base;
  int index;
  unsigned parity;

  __device__ unsigned full() const { return base + static_cast<unsigned>(index) * 8; }
  __device__ unsigned empty() const { return full() + 64; }
  __device__ void advance(int stages) {
    if (++index == stages) {
      index = 0;
      parity ^= 1u;
    }
  }
};

__device__ inline bool on_cells(const void* data, index_t strides) {
  return reinterpret_cast<unsigned long long>(data) % 16 == 0 && strides % 8 == 0;
}

// How a tile of the input is copied: 16 bytes of neighbouring voxels, 16 bytes of neighbouring channels, or one by one.
enum Copies { VOXEL_CELLS, CHANNEL_CELLS, ELEMENTS };

__device__ inline Copies copies_of(const View<const scalar_t>& input, const int (&size)[3], int channels) {
  const index_t* stride = input.stride;
  const index_t outer = stride[0] | stride[1];
  const bool rows = size[2] % 8 == 0 && on_cells(input.data, outer | stride[2] | stride[3]);
  const bool planes =
      stride[3] == size[2] && size[2] * static_cast<index_t>(size[1]) % 8 == 0 && on_cells(input.data, outer | stride[2]);
  const bool volumes =
      stride[3] == size[2] && stride[2] == stride[3] * size[1] && size[0] * stride[2] % 8 == 0 && on_cells(input.data, outer);
  if (stride[4] == 1 && (rows || planes || volumes)) return VOXEL_CELLS;
  const bool last = stride[1] == 1 && channels % 8 == 0;
  return last && on_cells(input.data, stride[0] | stride[2] | stride[3] | stride[4]) ? CHANNEL_CELLS : ELEMENTS;
}

// Where the eight voxels of a cell lie in a stage, in eights: a warp's products have neighbouring voxels.
__device__ inline int place_of(int eight, int thread_tiles) {
  const int within = eight % (8 * thread_tiles);
  return eight - within + within / 2 % thread_tiles * 8 + within / (2 * thread_tiles) * 2 + within % 2;
}

// This thread's cells of eight voxels or columns: every 16th channel, zeros past the last one.
__device__ inline void copy_eight(const Product& product, unsigned char* stage, int place, const scalar_t* source, index_t step,
                                  int left, const scalar_t* legal) {
  const int first = static_cast<int>(threadIdx.x) % 128 / 8;
  unsigned to =
      shared_address(stage) + static_cast<unsigned>(place) * product.eight_bytes() + static_cast<unsigned>(first) * 16;
  source += first * step;
#pragma unroll
  for (int k = 0; k < product.depth; k += 16, source += 16 * step, to += 256) {
    cp_async<16>(to, first + k < left ? source : legal, first + k < left ? 16 : 0);
  }
}

// The same element by element, for all eights; `at` says where one lies, null where nowhere.
template <class At>
__device__ inline void gather_cells(const Product& product, unsigned char* stage, int eights, int thread_tiles, int left,
                                    const At& at) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
#pragma unroll 1
  for (int i = thread; i < eights * product.depth; i += 128) {
    const int eight = i % eights, k = i / eights;
    const int place = place_of(eight, thread_tiles);
    Cell cell = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const scalar_t* const source = k < left ? at(eight * 8 + e, k) : nullptr;
      if (source != nullptr) cell.words[e / 2] |= static_cast<unsigned>(source->bits) << e % 2 * 16;
    }
    *reinterpret_cast<Cell*>(stage + static_cast<unsigned>(place) * product.eight_bytes() + k * 16) = cell;
  }
}

// The last warpgroup: copies tile after tile, a stage at a time, and announces a stage some stages later, when it has landed.
__device__ inline void produce(const Product& product, const View<const scalar_t>& input, const View<const scalar_t>& weight,
                               bool linear, Copies copies, unsigned char* shared) {
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32;
  const int tile_voxels = product.tile_voxels(), channels = product.channels(), stages = product.stages, depth = product.depth;
  const unsigned base = shared_address(shared);
  const bool weight_cells = linear && product.columns % 8 == 0 && on_cells(weight.data, weight.stride[0]);
  const int lag = stages - 2 < 2 ? stages - 2 : 2;
  Slot slot = {base, 0, 0}, landed = {base, 0, 0};
  int pending = 0;
  unsigned round = 0;

  const auto announce = [&]() {
    fence_async();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(landed.full());
    landed.advance(stages);
    --pending;
  };
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < product.tiles; tile += static_cast<int>(gridDim.x), round ^= 1u) {
    const int first_voxel = product.first_voxel(tile), first_column = product.first_column(tile), group = product.group(tile);
    // Two tables in turn: who writes one has seen that all were through with it when they wrote the other.
    index_t* table = reinterpret_cast<index_t*>(shared + TABLE) + round * 256;
    for (int v = thread; v < tile_voxels; v += 128) {
      table[v] = first_voxel + v < product.voxels ? product.offset_of(first_voxel + v, input, group * channels, 1, 1, 1) : -1;
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(base + 128);
    mbarrier_wait(base + 128, round);

#pragma unroll 1
    for (int first = 0; first < channels; first += depth) {
      const int left = channels - first;
      mbarrier_wait(slot.empty(), slot.parity ^ 1u);
      unsigned char* const stage = shared + product.first_stage() + static_cast<unsigned>(slot.index) * product.stage_bytes();
      const scalar_t* const inputs = input.data + first * input.stride[1];
      if (copies == VOXEL_CELLS) {
#pragma unroll 1
        for (int eight = thread % 8; eight < tile_voxels / 8; eight += 8) {
          const index_t offset = table[eight * 8];
          copy_eight(product, stage, place_of(eight, product.thread_tiles), inputs + offset, input.stride[1],
                     offset < 0 ? 0 : left, input.data);
        }
      } else if (copies == CHANNEL_CELLS) {
        const int cell = thread % 8;
#pragma unroll 1
        for (int v = thread / 8; cell * 8 < depth && v < tile_voxels; v += 16) {
          const bool live = table[v] >= 0 && cell * 8 < left;
          const int at = cell * (tile_voxels + 1) + place_of(v / 8, product.thread_tiles) * 8 + v % 8;
          cp_async<16>(shared_address(stage + at * 16), live ? inputs + table[v] + cell * 8 : input.data, live ? 16 : 0);
        }
      } else {
        gather_cells(product, stage, tile_voxels / 8, product.thread_tiles, left, [&](int voxel, int k) {
          return table[voxel] < 0 ? nullptr : inputs + table[voxel] + k * input.stride[1];
        });
      }
      const scalar_t* const weights = weight.data + (group * channels + first) * weight.stride[0];
      unsigned char* const after = stage + static_cast<unsigned>(tile_voxels) / 8 * product.eight_bytes();
      if (weight_cells) {
#pragma unroll 1
        for (int eight = thread % 8; eight < product.tile_columns / 8; eight += 8) {
          const int column = first_column + eight * 8;
          copy_eight(product, after, eight, weights + column, weight.stride[0], column < product.columns ? left : 0,
                     weight.data);
        }
      } else {
        gather_cells(product, after, product.tile_columns / 8, 1, left, [&](int at, int k) {
          const int column = first_column + at;
          if (column >= product.columns) return static_cast<const scalar_t*>(nullptr);
          return weights + k * weight.stride[0] + (linear ? column : product.column_offset(column, weight));
        });
      }
      cp_async_commit();
      slot.advance(stages);
      if (++pending > lag) {
        if (lag == 2) {
          cp_async_wait<2>();
        } else if (lag == 1) {
          cp_async_wait<1>();
        } else {
          cp_async_wait<0>();
        }
        announce();
      }
    }
  }
  cp_async_wait<0>();
  while (pending > 0) announce();
}

// A consumer: a warpgroup with 64 voxels, or 128 in two products, and all columns of the tile.
template <bool m_major>
__device__ inline void consume(const Product& product, const scalar_t* __restrict__ bias, const View<scalar_t>& output,
                               unsigned char* shared) {
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, warpgroup = warp / 4;
  const int products = product.thread_tiles, columns8 = product.tile_columns / 8, stages = product.stages;
  const int tile_voxels = product.tile_voxels(), channels = product.channels(), out_channels = product.out_channels();
  const unsigned base = shared_address(shared), eight_bytes = product.eight_bytes();
  // Descriptors of the first stage, and what k16 is further; they count in 16 bytes.
  const unsigned place =
      base + product.first_stage() + static_cast<unsigned>(warpgroup * products) * (m_major ? 8 * eight_bytes : 1024);
  const unsigned row_cells = static_cast<unsigned>(tile_voxels + 1);
  const unsigned long long a_first =
      m_major ? wgmma_descriptor(place, 128, eight_bytes) : wgmma_descriptor(place, row_cells * 16, 128);
  const unsigned long long b_first =
      wgmma_descriptor(base + product.first_stage() + static_cast<unsigned>(tile_voxels) / 8 * eight_bytes, 128, eight_bytes);
  const unsigned a_k = m_major ? 16 : 2 * row_cells, a_m = m_major ? 8 * eight_bytes / 16 : 64;

  // What this warp stores: the block of each of its voxels, -1 past the last one, and words of two columns.
  const int run = products * 16;  // voxels
  unsigned* const words = reinterpret_cast<unsigned*>(shared + HELD + static_cast<unsigned>(warp) * WARP_BYTES);
  index_t* const corners = reinterpret_cast<index_t*>(shared + HELD + static_cast<unsigned>(warp) * WARP_BYTES + WARP_TABLE);
  const index_t *strides = output.stride, spaces = strides[0] | strides[2] | strides[3];
  const bool row_cells16 = product.kernel_w() == 2 && !product.taps_first && strides[4] == 1 &&
                           product.problem.input_size[2] % 4 == 0 && on_cells(output.data, spaces | strides[1]);
  const bool channel_cells =
      product.taps_first && strides[1] == 1 && out_channels % 8 == 0 && on_cells(output.data, spaces | strides[4]);
  const bool pairs = product.kernel_w() % 2 == 0 && !product.taps_first && strides[4] == 1 &&
                     ((spaces | strides[1]) % 2 == 0 && reinterpret_cast<unsigned long long>(output.data) % 4 == 0);
  const int batch8 = products == 1 ? 8 : 4, batch_pairs = batch8 * 4;  // columns that pass at a time
  // Eight voxels x four pairs of a fragment meet all banks: rows of voxels are turned by eights, rows of columns are padded.
  const auto word_of = [&](int voxel, int pair) {
    if (channel_cells) return voxel * (batch_pairs + 4) + pair;
    return pair * run + (voxel ^ (products == 1 ? pair / 2 % 2 * 8 : pair % 4 * 8));
  };

  float sums[SUMS];
  Slot slot = {base, 0, 0};
#pragma unroll 1
  for (int tile = static_cast<int>(blockIdx.x); tile < product.tiles; tile += static_cast<int>(gridDim.x)) {
    unsigned read = 0;  // the stage that the product before the newest one has read
#pragma unroll 1
    for (int first = 0; first < channels; first += product.depth) {
      mbarrier_wait(slot.full(), slot.parity);
      const unsigned stage = static_cast<unsigned>(slot.index) * product.stage_bytes() / 16;
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < product.depth / 16; ++k) {
#pragma unroll
        for (int m = 0; m < products; ++m) {
          const unsigned a = stage + static_cast<unsigned>(k) * a_k + static_cast<unsigned>(m) * a_m;
          wgmma_n_major<m_major>(sums + m * columns8 * 4, a_first + a, b_first + (stage + static_cast<unsigned>(k) * 16),
                                 first + k > 0, columns8 * 8);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (read != 0 && lane == 0) mbarrier_arrive(read);
      read = slot.empty();
      slot.advance(stages);
    }
    const int first_voxel = product.first_voxel(tile) + warp * run, group = product.group(tile);
    const int first_column = product.first_column(tile);
    if (lane < run) {
      const bool live = first_voxel + lane < product.voxels;
      corners[lane] = live ? product.offset_of(first_voxel + lane, output, group * out_channels, product.kernel_d(),
                                               product.kernel_h(), product.kernel_w())
                           : -1;
    }
    wgmma_wait<0>();
    if (lane == 0) mbarrier_arrive(read);

    int column = first_column + lane % 4 * 2;  // of the next fragment, and its channel
    int channel = product.taps_first ? column % out_channels : 0;
#pragma unroll
    for (int batch = 0; batch < columns8; batch += batch8) {
      __syncwarp();  // the words before these have been stored
#pragma unroll
      for (int j = 0; j < batch8; ++j) {
        float start[2] = {};
        if (bias != nullptr) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            int co = product.taps_first ? channel + e : (column + e) / product.taps();
            if (co == out_channels) co = 0;
            if (column + e < product.columns) start[e] = to_accum(bias[group * out_channels + co]);
          }
        }
#pragma unroll
        for (int m = 0; m < products; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float* const pair = sums + (m * columns8 + batch + j) * 4 + half * 2;
            words[word_of(m * 16 + half * 8 + lane / 4, j * 4 + lane % 4)] =
                to_scalar_pair(pair[0] + start[0], pair[1] + start[1]);
          }
        }
        column += 8;
        if (product.taps_first) {
          channel += 8;
          while (channel >= out_channels) channel -= out_channels;
        }
      }
      __syncwarp();
      const int first = first_column + batch * 8;
      if (row_cells16) {
#pragma unroll(STORES)
        for (int item = lane; item < batch_pairs * run / 4; item += 32) {
          const int voxel = item % (run / 4) * 4, pair = item / (run / 4);
          const Cell cell = *reinterpret_cast<const Cell*>(words + word_of(voxel, pair));
          if (corners[voxel] >= 0 && first + pair * 2 < product.columns) {
            *reinterpret_cast<Cell*>(output.data + corners[voxel] + product.column_offset(first + pair * 2, output)) = cell;
          }
        }
      } else if (channel_cells) {
#pragma unroll(STORES)
        for (int item = lane; item < batch8 * run; item += 32) {
          const int voxel = item / batch8, eight = item % batch8;
          const Cell cell = *reinterpret_cast<const Cell*>(words + word_of(voxel, eight * 4));
          if (corners[voxel] >= 0 && first + eight * 8 < product.columns) {
            *reinterpret_cast<Cell*>(output.data + corners[voxel] + product.column_offset(first + eight * 8, output)) = cell;
          }
        }
      } else {
#pragma unroll 1
        for (int item = lane; item < batch_pairs * run; item += 32) {
          const int voxel = item % run, pair = item / run;
          const unsigned word = words[word_of(voxel, pair)];
          if (corners[voxel] < 0) continue;
          if (pairs && first + pair * 2 < product.columns) {
            *reinterpret_cast<unsigned*>(output.data + corners[voxel] + product.column_offset(first + pair * 2, output)) = word;
          } else {
            for (int e = 0; e < 2 && first + pair * 2 + e < product.columns; ++e) {
              scalar_t value;
              value.bits = static_cast<unsigned short>(word >> e * 16);
              output.data[corners[voxel] + product.column_offset(first + pair * 2 + e, output)] = value;
            }
          }
        }
      }
    }
    __syncwarp();  // the corners have been read
  }
}

extern "C" __global__ void __launch_bounds__(128 * (CONSUMERS + 1), BLOCKS)
    convt3d_fprop_patch_wgmma(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                              const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels,
                              const int columns, const int column_tiles, const int tiles, const int stages, const int depth,
                              const int consumers, const int thread_tiles, const int tile_columns) {
  extern __shared__ uint4 shared_cells[];
  unsigned char* const shared = reinterpret_cast<unsigned char*>(shared_cells);
  Product product = {problem,
                     voxels,
                     columns,
                     column_tiles,
                     tiles,
                     SPECIALIZED(STAGES, stages),
                     SPECIALIZED(DEPTH, depth),
                     SPECIALIZED(CONSUMERS, consumers),
                     SPECIALIZED(M_TILES, thread_tiles),
                     SPECIALIZED(WGMMA_TILES * 8, tile_columns),
                     false};
  const index_t out_channels = product.out_channels(), row = product.kernel_w(), plane = row * product.kernel_h();
  const bool taps_last =
      weight.stride[4] == 1 && weight.stride[3] == row && weight.stride[2] == plane && weight.stride[1] == product.taps();
  product.taps_first = !taps_last && weight.stride[1] == 1 && weight.stride[4] == out_channels &&
                       weight.stride[3] == row * out_channels && weight.stride[2] == plane * out_channels;
  const Copies copies = copies_of(input, problem.input_size, product.channels());

  if (threadIdx.x == 0) {
    const unsigned base = shared_address(shared);
    for (int i = 0; i < product.stages; ++i) {
      mbarrier_init(base + static_cast<unsigned>(i) * 8, 4);
      mbarrier_init(base + 64 + static_cast<unsigned>(i) * 8, product.consumers * 4);
    }
    mbarrier_init(base + 128, 4);
    mbarrier_fence_init();
  }
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= product.consumers * 128) {
    give_registers<PRODUCER_REGISTERS>();
    produce(product, input, weight, taps_last || product.taps_first, copies, shared);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    if (copies == CHANNEL_CELLS) {
      consume<false>(product, bias, output, shared);
    } else {
      consume<true>(product, bias, output, shared);
    }
  }
}
