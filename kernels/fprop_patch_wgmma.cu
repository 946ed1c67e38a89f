/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "bf16", "fp16"]
architectures = ["sm_90a"]
[specialize]
WGMMA_TILES = "tile_columns // 8"
WHOLE_CHUNKS = "whole_chunks"
ROWS_APART = "rows_apart"
KERNEL_W = "kernel_w"
PADDED = "padded"
[constants]
# Volumes that are no whole vectors are copied to such as end with a few voxels more.
padded = "1 if input_voxels % (16 // itemsize) != 0 else 0"
volume = "ceil_div(input_voxels * itemsize, 16) * 16 // itemsize"
volume_cells = "batch * in_channels * volume * itemsize // 16"
voxels = "batch * volume"
columns = "out_channels_per_group * taps"
# Channels come in chunks of 128 bytes, in two halves.
chunks = "ceil_div(in_channels_per_group * itemsize, 128)"
whole_chunks = "1 if in_channels_per_group * itemsize % 128 == 0 else 0"
block_tiles = "ceil_div(voxels, 64 * ROWS)"
ring_bytes = "WARPGROUPS * 4 * STAGES * ROWS * 1024"
# Where rows do not end on a lane's voxels, eight columns at a time pass through shared memory on their way out.
rows_apart = "1 if kernel_w == 2 and input_w % (2 if itemsize == 4 else 2 * ROWS) != 0 else 0"
passed_bytes = "rows_apart * (16 + WARPGROUPS * 16 * (32 * ROWS * itemsize + 32))"
chunk_bytes = "128 * (1 + split)"
room = "227 * 1024 - ring_bytes - 8 * chunks - passed_bytes"
# A thread has half a sum for each column of a row, in tf32x3 two halves.
fit_columns = "2 * (min(255, 512 // WARPGROUPS) - 40 - (24 + 16 * split) * ROWS) // ((1 + split) * ROWS)"
most_columns = "min(COLUMNS, 8 * (fit_columns // 8), 8 * (room // (chunks * chunk_bytes + 8) // 8))"
column_tiles = "ceil_div(columns, max(8, most_columns))"
tile_columns = "8 * ceil_div(ceil_div(columns, column_tiles), 8)"
# Each block has a tile: it begins with copies of weights that only waiting for a product's waits for.
streams = "max(1, min(ceil_div(block_tiles, WARPGROUPS), multiprocessors // (column_tiles * groups)))"
# Where blocks have many tiles, the launch begins behind the one that packs, not beside it.
beside = "1 if block_tiles <= 16 * streams else 0"
pairs_at = "chunks * chunk_bytes * tile_columns + ring_bytes"
shared_bytes = "pairs_at + 8 * (tile_columns + chunks) + passed_bytes"
[restrictions]
"kernel_size == stride and padding == (0, 0, 0) and output_padding == (0, 0, 0)" = "it is for kernel = stride with no padding, where each input owns a block of the output"
"all((dilation_d == 1 or kernel_d == 1, dilation_h == 1 or kernel_h == 1, dilation_w == 1 or kernel_w == 1))" = "dilation must be 1, else taps do not fill the block"
"kernel_w % 2 == 0" = "it stores two taps of a row together: an even kernel along w"
"chunks <= 128 and most_columns >= 8 and shared_bytes <= 232448" = "a block keeps all channels of its weights in shared memory"
"tile_columns <= 256" = "a product has at most 256 columns"
"max(voxels, columns, groups * column_tiles * chunks * 8, padded * volume_cells) < 2 * 1024 * 1024 * 1024 - 512" = "voxels, columns, blocks and the vectors of padded volumes must be below 2^31"
[search]
COLUMNS = [32, 96, 128, 160, 256]
ROWS = [1, 2]
WARPGROUPS = [2, 3]
STAGES = [4, 6, 8]
[cost]
steps = "ceil_div(block_tiles, WARPGROUPS * streams)"
products = "WARPGROUPS * 64 * ROWS * tile_columns * chunks * 128 // itemsize"
bytes = "WARPGROUPS * 64 * ROWS * chunks * 128"
first_bytes = "chunks * chunk_bytes * tile_columns"
[workspace]
packed_weight = "groups * column_tiles * chunks * tile_columns * chunk_bytes // 4"
padded_input = "padded * volume_cells * 4"
[[launch]]
symbol = "convt3d_pack_patch_weight"
general = true
packs = "packed_weight"
grid = "groups * column_tiles * chunks * 8 * ceil_div(tile_columns, 128)"
block = 128
[[launch]]
symbol = "convt3d_pad_volumes"
general = true
when = "padded"
prepares = "padded_input"
grid = "ceil_div(volume_cells, 256)"
block = 256
[[launch]]
symbol = "convt3d_fprop_patch_wgmma"
grid = "streams * column_tiles * groups if batch > 0 else 0"
block = "128 * WARPGROUPS"
shared_bytes = "shared_bytes"
*/
// Kernel = stride on Hopper's warpgroups, weight-stationary. Each input voxel owns a block of kernel_size outputs, so the layer is one
// matrix product with the reordering fused into the store (depth to space):
//
//   output[n, co, i*stride + t] = bias[co] + sum over ci of weight[ci, co, t] * input[n, ci, i]
//
// with a row for each voxel (n, i), a column for each (co, t), and depth ci. A tile of m x n reads K * (m + n) elements from L2, more than
// L2 gives where m and n are the 128 or 256 that sums fit registers for. So a block keeps the weights of its columns, all channels of
// them, in shared memory for as long as it runs, and m is as long as the block's share of voxels.
//
// Weights are packed as wgmma reads them, 16 bytes of channels for each column, and copied in bulk. After that a warp needs no other one:
// it copies 64 bytes of the channels of its 16 or 32 voxels at a time (cp.async), a few such stages ahead, reads them as fragments into
// registers, rounds them, and its warpgroup multiplies them by the weights. One warpgroup's stores and another's products overlap in part.
//
// Which voxel a row of a product is can be chosen. A lane's rows are 2 (tf32) or 4 (16 bits) neighbouring voxels, and its columns two
// taps of a row of outputs: so where these are all of a voxel's row, a lane has 16 neighbouring bytes of the output, eight lanes 128. Where
// rows do not end on a lane's voxels, these may be of two rows, and a row begins anywhere: then a warp's rows of taps pass through shared
// memory, and each lane stores a voxel's pair. With more taps in a row lanes that have other columns of a voxel have its other pairs.
#include "convt3d.cuh"
#include "convt3d/ptx/beside_packing.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"

// At most so many (co, t) of a block, a multiple of 8.
#ifndef COLUMNS
#define COLUMNS 128
#endif
// Tiles of 64 voxels that a warpgroup multiplies at a time, and an even number of stages, each half a chunk of channels of them.
#ifndef ROWS
#define ROWS 2
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef WARPGROUPS
#define WARPGROUPS 2
#endif
#include "convt3d/pipe/patch_wgmma.cuh"

constexpr int STEP = 32 / SIZE;                                       // channels of a product
constexpr int RUN = SIZE == 4 ? 2 : 2 * ROWS, RUNS = 2 * ROWS / RUN;  // neighbouring voxels of a lane

// ---- packing ----

extern "C" __global__ void __launch_bounds__(128)
    convt3d_pack_patch_weight(const Problem problem, const View<const scalar_t> weight, accum_t* __restrict__ packed_weight,
                              const int columns, const int column_tiles, const int chunks, const int tile_columns,
                              const int beside) {
  // Beside packing large layers lose, it seems because blocks that begin late store far from their neighbours in time.
  if (beside) let_next_begin();
  // blockIdx.x = (((group * column_tiles + column tile) * chunks + chunk) * 8 + cell) * parts + part
  const int cells = chunks * 8, parts = (tile_columns + 127) / 128;
  const int number = static_cast<int>(blockIdx.x) / parts,
            i = static_cast<int>(blockIdx.x) % parts * 128 + static_cast<int>(threadIdx.x);
  if (i >= tile_columns) return;
  const int ci = number % cells * VECTOR, tile = number / cells % column_tiles, group = number / cells / column_tiles;
  const int kernel_w = problem.kernel_size[2], taps_h = problem.kernel_size[1] * kernel_w,
            taps = problem.kernel_size[0] * taps_h;
  const int channels = problem.in_channels / problem.groups;
  const int column = tile * tile_columns + i, tap = column % taps;
  scalar_t values[VECTOR];
  load_weight_cell(values, weight, group * channels + ci, column / taps, tap / taps_h, tap % taps_h / kernel_w, tap % kernel_w,
                   column < columns ? channels - ci : 0);
  pack_cell(values, packed_weight, number, tile_columns, i);
}

// ---- volumes that are no whole vectors ----

// A thread has a vector of voxels of a channel, zeros behind the last one.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_pad_volumes(const Problem problem, const View<const scalar_t> input, accum_t* __restrict__ padded_input,
                        const int volume, const int volume_cells) {
  let_next_begin();
  if (threadIdx.x == 0) wait_for_packing();  // so that who waits for this launch waits for both
  const int cell = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x), row = cell / (volume / VECTOR);
  if (cell >= volume_cells) return;
  const int n = row / problem.in_channels, c = row - n * problem.in_channels;
  const int line = (cell - row * (volume / VECTOR)) * VECTOR / problem.input_size[2];
  int w = (cell - row * (volume / VECTOR)) * VECTOR - line * problem.input_size[2];
  int d = line / problem.input_size[1], h = line - d * problem.input_size[1];
  Vector<VECTOR> values = {};
#pragma unroll
  for (int e = 0; e < VECTOR; ++e) {
    if (d < problem.input_size[0]) values.element[e] = *input.at(n, c, d, h, w);
    if (++w == problem.input_size[2]) w = 0, ++h;
    if (h == problem.input_size[1]) h = 0, ++d;
  }
  reinterpret_cast<Vector<VECTOR>*>(padded_input)[cell] = values;
}

// ---- the product ----

// Two neighbouring columns, taps of a row: how many bytes behind a voxel's output the first one lies.
struct alignas(16) Pair {
  index_t output;
  float start;
  int live;  // whether there is such a column
};

// Where channel k of a stage and a voxel are staged. What lanes read at once, 32 bytes each of four rows of channels (tf32) or of every
// other one (16 bits), meets all banks: in 16 bits the even rows of eight come first, and then 32 bytes of a row change places.
__device__ inline int staged(int k, int voxel) {
  constexpr int WORDS = COUNT * SIZE / 4;  // of a row
  const int row = SIZE == 4 ? k : k / 8 * 8 + k % 2 * 4 + k / 2 % 4;
  return row * COUNT + (voxel ^ row * WORDS / 32 % (WORDS / 8) * (32 / SIZE));
}

// A warp's copies, stage after stage of the channels of its voxels: a lane has an address and a copy for each 16 bytes of neighbouring
// voxels. Volumes that are not made of those are copied element by element.
struct Copier {
  static constexpr int UNITS = COUNT / VECTOR, APART = 32 / UNITS;  // vectors of voxels; channels that a warp copies at once

  const View<const scalar_t>& input;
  bool vectors;
  int channels, lane;
  const scalar_t* from = nullptr;

  // Which of the warp's voxels a lane begins with.
  __device__ int voxel() const { return vectors ? lane % UNITS * VECTOR : lane % COUNT; }

  // The warp's voxels are others now; `place` is where `voxel()` begins in the input. Past the last one, -1, it is the first voxel again,
  // for nobody stores what comes of it.
  __device__ __forceinline__ void begin(index_t place) {
    const int first = vectors && lane / UNITS < channels ? lane / UNITS : 0;
    from = input.data + (place < 0 ? 0 : place) + first * input.stride[1];
  }

  __device__ __forceinline__ void copy(scalar_t* stage, int first_channel) {
    if (vectors) {
      const int first = lane / UNITS;
      const unsigned target = shared_address(stage + staged(first, lane % UNITS * VECTOR));
      const index_t apart = APART * SIZE * input.stride[1];
#pragma unroll
      for (int i = 0; i < STAGED / APART; ++i) {
        const int k = first_channel + first + i * APART;
        cp_async<16>(target + static_cast<unsigned>(i * APART * COUNT * SIZE), from, WHOLE_CHUNKS || k < channels ? 16 : 0);
        if (WHOLE_CHUNKS || k + APART < channels) from = advanced(from, apart);
      }
    } else {
      const int lane = computed_anew(this->lane);
#pragma unroll 4
      for (int i = 0; i < STAGED * COUNT / 32; ++i) {
        const int k = i * (32 / COUNT) + lane / COUNT;
        const bool inside = first_channel + k < channels;
        const scalar_t* const one = inside ? from + (first_channel + k) * input.stride[1] : input.data;
        scalar_t* const target = stage + staged(k, lane % COUNT);
        if constexpr (SIZE == 4) {
          cp_async<4>(shared_address(target), one, inside ? 4 : 0);
        } else {
          *target = inside ? *one : scalar_t();
        }
      }
    }
  }
};

// What a lane multiplies of a stage: of its voxels q = 0, 1 ... number q is row g + q % 2 * 8 of tile q / 2. tf32: a word is a voxel.
// 16 bits: the first ROWS words are pairs of voxels in one channel, the others in the next.
__device__ __forceinline__ void load_fragments(const scalar_t* stage, const int (&starts)[2], Fragments& fragments) {
  constexpr int EACH = SIZE == 4 ? 2 : ROWS;
  unsigned word[4][2 * ROWS];
#pragma unroll
  for (int u = 0; u < 2 * ROWS / EACH; ++u) {
    const scalar_t* const from = stage + starts[u];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Words<EACH> some = *reinterpret_cast<const Words<EACH>*>(from + i * (STEP / 2) * COUNT);
#pragma unroll
      for (int e = 0; e < EACH; ++e) word[i][u * EACH + e] = some.element[e];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int q = 0; q < 2 * ROWS; ++q) {
      if constexpr (SIZE == 4) {
        fragments.set(i, q, word[i][q]);
      } else {
        const unsigned both = __byte_perm(word[i][q / 2], word[i][ROWS + q / 2], q % 2 == 0 ? 0x5410u : 0x7632u);
        fragments.set(i, q, computed_anew(both));  // before the fence, else products wait for one another
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS, 1)
    convt3d_fprop_patch_wgmma(const Problem problem, const View<const scalar_t> input,
                              const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                              const View<scalar_t> output, const int voxels, const int columns, const int column_tiles,
                              const int streams, const int chunks, const int tile_columns, const int block_tiles,
                              const int pairs_at, const accum_t* __restrict__ padded_input, const int volume,
                              const int padded) {
  const Epilogue epilogue{bias};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  // blockIdx.x = (stream * groups + group) * column_tiles + column tile: neighbours share inputs.
  const int block = static_cast<int>(blockIdx.x), group = block / column_tiles % problem.groups;
  const int tile_width = SPECIALIZED(WGMMA_TILES * 8, tile_columns), first_column = block % column_tiles * tile_width;
  const int out_channels = problem.out_channels / problem.groups, in_channels = problem.in_channels / problem.groups;
  const int kernel_d = problem.kernel_size[0], kernel_h = problem.kernel_size[1];
  const int kernel_w = SPECIALIZED(KERNEL_W, problem.kernel_size[2]), taps = kernel_d * kernel_h * kernel_w;

  extern __shared__ __align__(128) unsigned char shared[];
  Ring ring{shared + PARTS * 128 * chunks * tile_width + warp * STAGES * STAGE_BYTES};
  Pair* const pairs = reinterpret_cast<Pair*>(shared + pairs_at);
  Weights weights{shared_address(shared), shared_address(pairs + tile_width / 2), chunks, tile_width};
  // What takes long to come is asked for first.
  if (thread == 0) weights.copy(packed_weight, group * column_tiles + block % column_tiles);
  __syncwarp();

  View<const scalar_t> source = input;
  if (SPECIALIZED(PADDED, padded) != 0) {
    const int plane = problem.input_size[1] * problem.input_size[2];
    source = {reinterpret_cast<const scalar_t*>(padded_input),
              {static_cast<index_t>(volume) * problem.in_channels, volume, plane, problem.input_size[2], 1}};
    wait_for_packing();  // for the launch that pads
  }
  Copier copier{source, SPECIALIZED(PADDED, padded) != 0 || made_of(input, problem.input_size, VECTOR), in_channels, lane};
  // A lane's pieces are whole pieces of a row of the output.
  const bool runs = kernel_w == 2 && output.stride[4] == 1 && problem.input_size[2] % RUN == 0 &&
                    aligned(output, output.stride[0] | output.stride[1] | output.stride[2] | output.stride[3], 2 * RUN);

  const bool in_pairs =
      output.stride[4] == 1 && aligned(output, output.stride[0] | output.stride[1] | output.stride[2] | output.stride[3], 2);

  const auto place = [&](int tile, int voxel) {
    int index = (tile * 4 + warp % 4) * COUNT + voxel, all = voxels;
    if (SPECIALIZED(PADDED, padded) != 0) {  // from the number among padded volumes to that among those without what pads them
      const int own = problem.input_size[0] * problem.input_size[1] * problem.input_size[2], n = index / volume;
      all = problem.batch * own;
      index = index - n * volume < own ? index - n * (volume - own) : all;
    }
    return place_of(problem, index, all, source, output, group * in_channels, group * out_channels, kernel_d, kernel_h,
                    kernel_w);
  };
  const int step = streams * WARPGROUPS;
  // Where the last tiles are too few for all warpgroups, each block has as many of them as the others.
  int copied_tile = warp / 4 * streams + block / column_tiles / problem.groups, copied_chunk = 0;
  const auto copy_half = [&](unsigned char* stage, int half) {
    if (copied_tile < block_tiles) {
      if (half == 0 && copied_chunk == 0) copier.begin(place(copied_tile, copier.voxel()).input);
      copier.copy(reinterpret_cast<scalar_t*>(stage), (copied_chunk * 2 + half) * STAGED);
      if (half == 1 && ++copied_chunk == chunks) {
        copied_chunk = 0;
        copied_tile += step;
      }
    }
    cp_async_commit();
  };
  int tile = copied_tile;
  for (int s = 0; s + 1 < STAGES; ++s) copy_half(ring.first + s * STAGE_BYTES, s % 2);
  for (int pair = thread; pair < tile_width / 2; pair += 128 * WARPGROUPS) {
    const int column = first_column + pair * 2, co = column / taps, tap = column % taps, row = tap / kernel_w;
    Pair entry{0, 0.0f, 0};
    if (column < columns) {
      entry.live = 1;
      entry.output = (co * output.stride[1] + row / kernel_h * output.stride[2] + row % kernel_h * output.stride[3] +
                      tap % kernel_w * output.stride[4]) *
                     SIZE;
      entry.start = epilogue.start(group * out_channels + co);
    }
    pairs[pair] = entry;
  }
  __syncthreads();

  float sums[ROWS][SUMS];
  const int first_k = lane % 4 * (4 / SIZE), first = lane / 4 * RUN;  // a lane's in a stage
  const int starts[2] = {staged(first_k, first), SIZE == 4 ? staged(first_k, 16 + first) : staged(first_k + 1, first)};
  const auto load = [&](const unsigned char* stage, Fragments& fragments) {
    __syncwarp();  // all lanes' copies have landed, and all have read the stage before
    load_fragments(reinterpret_cast<const scalar_t*>(stage), starts, fragments);
  };
  for (; tile < block_tiles; tile += step) {
    multiply_tile(sums, weights, ring, load, copy_half);
    const index_t own = place(tile, lane % COUNT).output;
    if (SPECIALIZED(ROWS_APART, kernel_w == 2 && problem.input_size[2] % RUN != 0) != 0 && in_pairs) {
      constexpr int PASSED = COUNT * 2 + 32 / SIZE;  // outputs of a row, and 32 bytes that keep rows off each other's banks
      scalar_t* const passed =
          reinterpret_cast<scalar_t*>(shared + pairs_at + (tile_width + chunks + 1) / 2 * 16) + warp * 4 * PASSED;
#pragma unroll
      for (int j = 0; j < SUMS / 4 && j < tile_width / 8; ++j) {
        const float start = epilogue.changes_sums() ? pairs[j * 4 + lane % 4].start : 0.0f;
#pragma unroll
        for (int u = 0; u < RUNS; ++u) {
          Vector<2 * RUN> run;
#pragma unroll
          for (int e = 0; e < 2 * RUN; ++e) {
            run.element[e] = epilogue.finish(sums[(u * RUN + e / 2) / 2][j * 4 + (u * RUN + e / 2) % 2 * 2 + e % 2], start);
          }
          *reinterpret_cast<Vector<2 * RUN>*>(passed + lane % 4 * PASSED + (u * 8 + lane / 4) * 2 * RUN) = run;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i += 32 / COUNT) {
          const int row = i + lane / COUNT;
          const Pair pair = pairs[j * 4 + row];
          const Vector<2> both = *reinterpret_cast<const Vector<2>*>(passed + row * PASSED + lane % COUNT * 2);
          if (own >= 0 && pair.live != 0) *reinterpret_cast<Vector<2>*>(advanced(output.data + own, pair.output)) = both;
        }
        __syncwarp();  // all have read what the next columns are written over
      }
      continue;
    }
    scalar_t* to[2 * ROWS];  // the outputs of the lane's voxels
#pragma unroll
    for (int q = 0; q < 2 * ROWS; ++q) {
      const index_t target = __shfl_sync(0xffffffffu, own, q / RUN * 8 * RUN + lane / 4 * RUN + q % RUN);
      to[q] = target < 0 ? nullptr : output.data + target;
    }
    // As runs of a lane's voxels, or each voxel for itself.
    const auto store = [&](auto in_runs, auto biased) {
#pragma unroll
      for (int j = 0; j < SUMS / 4 && j < tile_width / 8; ++j) {
        const Pair pair = pairs[j * 4 + lane % 4];
#pragma unroll
        for (int u = 0; u < RUNS; ++u) {
          Vector<2 * RUN> run;
#pragma unroll
          for (int e = 0; e < 2 * RUN; ++e) {
            const float sum = sums[(u * RUN + e / 2) / 2][j * 4 + (u * RUN + e / 2) % 2 * 2 + e % 2];
            run.element[e] = decltype(biased)::value ? epilogue.finish(sum, pair.start) : epilogue.finish(sum);
          }
          if constexpr (decltype(in_runs)::value) {
            scalar_t* const y = advanced(to[u * RUN], pair.output);
            if (to[u * RUN] != nullptr && pair.live != 0) *reinterpret_cast<Vector<2 * RUN>*>(y) = run;
          } else {
#pragma unroll
            for (int v = 0; v < RUN; ++v) {
              scalar_t* const y = advanced(to[u * RUN + v], pair.output);
              if (to[u * RUN + v] == nullptr || pair.live == 0) continue;
              if (in_pairs) {
                *reinterpret_cast<Vector<2>*>(y) = {run.element[2 * v], run.element[2 * v + 1]};
              } else {
                y[0] = run.element[2 * v];
                y[output.stride[4]] = run.element[2 * v + 1];
              }
            }
          }
        }
      }
    };
    if (!runs) {
      store(Constant<false>{}, Constant<true>{});
    } else if (epilogue.changes_sums()) {
      store(Constant<true>{}, Constant<true>{});
    } else {
      store(Constant<true>{}, Constant<false>{});
    }
  }
}
