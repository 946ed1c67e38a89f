/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "bf16", "fp16"]
architectures = ["sm_90a"]
[specialize]
WGMMA_TILES = "tile_columns // 8"
WHOLE_CHUNKS = "whole_chunks"
NEIGHBOURS = "1 if in_channels_per_group % vector or out_channels_per_group % vector else 0"
[constants]
voxels = "batch * input_voxels"
vector = "16 // itemsize"
# A tap's channels are whole vectors; four of them make a group of columns.
columns = "taps * vector * ceil_div(out_channels_per_group, vector)"
# Channels come in chunks of 128 bytes, in two halves.
chunks = "ceil_div(in_channels_per_group * itemsize, 128)"
whole_chunks = "1 if in_channels_per_group * itemsize % 128 == 0 else 0"
block_tiles = "ceil_div(voxels, 64 * ROWS)"
ring_bytes = "WARPGROUPS * 4 * STAGES * ROWS * 1024"
chunk_bytes = "128 * (1 + split)"
room = "227 * 1024 - ring_bytes - 8 * chunks"
# A thread has half a sum for each column of a row, in tf32x3 two halves.
fit_columns = "2 * (min(255, 512 // WARPGROUPS) - 40 - 24 * ROWS - 32 * split) // ((1 + split) * ROWS)"
most_columns = "min(COLUMNS, 4 * vector * (fit_columns // (4 * vector)), 4 * vector * (room // (chunks * chunk_bytes + 8) // (4 * vector)))"
column_tiles = "ceil_div(columns, max(4 * vector, most_columns))"
tile_columns = "4 * vector * ceil_div(ceil_div(columns, column_tiles), 4 * vector)"
pack_blocks = "ceil_div(column_tiles * tile_columns, 128)"
# Each block has a tile: it begins with copies of weights that only waiting for a product's waits for.
streams = "max(1, min(ceil_div(block_tiles, WARPGROUPS), multiprocessors // (column_tiles * groups)))"
# Behind the weights and the stages: a slot for each vector of columns and a bias for each column, at most 8 bytes a column.
slots_at = "chunks * chunk_bytes * tile_columns + ring_bytes"
shared_bytes = "slots_at + 8 * tile_columns + 8 * chunks"
[restrictions]
"kernel_size == stride and padding == (0, 0, 0) and output_padding == (0, 0, 0)" = "it is for kernel = stride with no padding, where each input owns a block of the output"
"all((dilation_d == 1 or kernel_d == 1, dilation_h == 1 or kernel_h == 1, dilation_w == 1 or kernel_w == 1))" = "dilation must be 1, else taps do not fill the block"
"chunks <= 128 and most_columns >= 4 * vector and shared_bytes <= 232448" = "a block keeps all channels of its weights in shared memory"
"tile_columns <= 256" = "a product has at most 256 columns"
"max(voxels, column_tiles * tile_columns, groups * chunks * 8 * pack_blocks) < 2 * 1024 * 1024 * 1024 - 512" = "voxels, columns and blocks must be below 2^31"
[search]
COLUMNS = [64, 128, 192, 256]
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
[[launch]]
symbol = "convt3d_pack_channels_last_weight"
general = true
packs = "packed_weight"
grid = "groups * chunks * 8 * pack_blocks"
block = 128
[[launch]]
symbol = "convt3d_fprop_patch_channels_last"
grid = "streams * column_tiles * groups if batch > 0 else 0"
block = "128 * WARPGROUPS"
shared_bytes = "shared_bytes"
*/
// Kernel = stride on Hopper's warpgroups, for tensors whose channels lie together (channels_last_3d); right for any layout. Each input
// voxel owns a block of kernel_size outputs, so the layer is one matrix product, with the reordering fused into the store:
//
//   output[n, co, i*stride + t] = bias[co] + sum over ci of weight[ci, co, t] * input[n, ci, i]
//
// with a row for each voxel (n, i), a column for each (t, co), and depth ci. As in fprop_patch_wgmma a block keeps the weights of its
// columns, all channels of them, in shared memory for as long as it runs.
//
// In which order a product takes its depth and its columns can be chosen, as long as the packed weights have the same. wgmma gives a lane
// two of every eight columns, and takes from it two (16 bits) or one (tf32) of every eight or four of the depth. So the order is one in
// which what a lane has of 64 bytes of channels are 16 neighbouring bytes: it loads them with one copy, stores them with one, and four
// lanes have 64 bytes in a row. The copy goes to a place in shared memory that only this lane reads: a queue of its own (cp.async), which
// needs no barrier and no shuffle. Channels that lie together but are no whole vectors begin anywhere: then a lane reads the two vectors
// that have its own, and what it stores it completes from the lane behind.
#include "convt3d.cuh"
#include "convt3d/ptx/beside_packing.cuh"
#include "convt3d/core/unaligned.cuh"
#include "convt3d/epilogue/epilogue.cuh"

// At most so many columns of a block.
#ifndef COLUMNS
#define COLUMNS 128
#endif
// Tiles of 64 voxels that a warpgroup multiplies at a time, and an even number of stages, each half a chunk of channels of them.
#ifndef ROWS
#define ROWS 1
#endif
#ifndef STAGES
#define STAGES 8
#endif
#ifndef WARPGROUPS
#define WARPGROUPS 2
#endif
#include "convt3d/pipe/patch_wgmma.cuh"

constexpr int EACH = 4 / SIZE, GROUP = 4 * VECTOR;  // elements of a register; columns of which four lanes have a vector each

// ---- packing ----

extern "C" __global__ void __launch_bounds__(128)
    convt3d_pack_channels_last_weight(const Problem problem, const View<const scalar_t> weight,
                                      accum_t* __restrict__ packed_weight, const int columns, const int column_tiles,
                                      const int chunks, const int tile_columns, const int pack_blocks) {
  let_next_begin();
  // blockIdx.x = (group * cells + cell) * pack_blocks + which 128 columns, of all tiles
  const int cells = chunks * 8, block = static_cast<int>(blockIdx.x);
  const int cell = block / pack_blocks % cells, group = block / pack_blocks / cells;
  const int index = block % pack_blocks * 128 + static_cast<int>(threadIdx.x);
  if (index >= column_tiles * tile_columns) return;
  const int* const kernel = problem.kernel_size;
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int taps = kernel[0] * kernel[1] * kernel[2], each_tap = columns / taps;
  // Neighbouring threads read neighbours: taps of a channel, or channels of a tap.
  const bool channels_together = weight.stride[1] == 1;
  const int tap = channels_together ? index / each_tap : index % taps, co = channels_together ? index % each_tap : index / taps;
  const bool live = index < columns && co < out_channels;
  scalar_t values[VECTOR];
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) {
    // Element e of lane l in cell number c of four is channel VECTOR*l + EACH*c + e of its stage.
    const int ci = cell / 4 * STAGED + v / EACH * VECTOR + cell % 4 * EACH + v % EACH;
    values[v] = live && ci < channels ? *weight.at(group * channels + ci, co, tap / (kernel[1] * kernel[2]),
                                                   tap / kernel[2] % kernel[1], tap % kernel[2])
                                      : scalar_t();
  }
  // Column 2*l + e of a product's eight number m is channel VECTOR*l + 2*m + e of its group.
  const int column = index < columns ? tap * each_tap + co : index;
  const int place = column % tile_columns / GROUP * GROUP + column % VECTOR / 2 * 8 + column % GROUP / VECTOR * 2 + column % 2;
  const index_t row = static_cast<index_t>(group * column_tiles + column / tile_columns) * cells + cell;
  pack_cell(values, packed_weight, row, tile_columns, place);
}

// ---- the product ----

// A vector of neighbouring output channels of a tap: how many bytes behind a voxel's output it lies.
struct alignas(16) Slot {
  index_t output;
  int live;  // how many of them there are; of neighbours, with those behind that the block has, and FIRST where it has none before
};

enum { FIRST = 1024 };  // a constant would be data of each binary

struct alignas(16) Biases {
  float of[VECTOR];
};

// A warp's copies, stage after stage of the channels of its voxels. Of neighbours each lane copies what it multiplies, VECTOR channels of
// each of its rows. Channels that lie apart are copied one by one, a row of the stage by neighbouring lanes.
struct Copier {
  const View<const scalar_t>& input;
  Extent<const scalar_t> extent;
  bool vectors, neighbours;  // of 16 bytes, or in pieces of 8 or 4 bytes that can be copied, or of 2 that cannot
  int piece, channels, lane;
  int first = 0;                        // channel of the next chunk
  index_t place = 0;                    // in the input, of the warp's voxel number lane
  const scalar_t* from[2 * ROWS] = {};  // where the lane's own are in each of its rows

  template <int BYTES>
  static __device__ __forceinline__ void copy_pieces(unsigned char* target, const scalar_t* source, int live) {
#pragma unroll
    for (int at = 0; at < VECTOR; at += BYTES / SIZE) {
      cp_async<BYTES>(shared_address(target + at * SIZE), source + (at < live ? at : 0), at < live ? BYTES : 0);
    }
  }

  __device__ __forceinline__ bool of_elements() const { return !vectors && !(SPECIALIZED(NEIGHBOURS, 1) && neighbours); }

  // The warp's voxels are others now. Past the last one, -1, it is the first voxel again, for nobody stores what comes of it.
  __device__ __forceinline__ void begin(index_t voxel) {
    first = 0;
    place = voxel < 0 ? 0 : voxel;
    const int channel = lane % 4 * VECTOR;
#pragma unroll
    for (int q = 0; q < 2 * ROWS; ++q) {
      from[q] =
          input.data + __shfl_sync(0xffffffffu, place, q * 8 + lane / 4) + (channel < channels ? channel : 0) * input.stride[1];
    }
  }

  __device__ __forceinline__ void copy(unsigned char* stage, int half) {
    const int begin = first + half * STAGED;
    if (half == 1) first += 2 * STAGED;
    if (vectors) {
      const int channel = lane % 4 * VECTOR;
      const bool inside = WHOLE_CHUNKS || begin + channel < channels,
                 goes_on = half == 1 && (WHOLE_CHUNKS || first + channel < channels);
      unsigned char* const target = stage + lane * 16;
#pragma unroll
      for (int q = 0; q < 2 * ROWS; ++q) {
        cp_async<16>(shared_address(target) + static_cast<unsigned>(q * 512), from[q] + (inside ? half * STAGED : 0),
                     inside ? 16 : 0);
        if (goes_on) from[q] = advanced(from[q], 2 * STAGED * SIZE);
      }
      return;
    }
    if (SPECIALIZED(NEIGHBOURS, 1) && neighbours) {
      const int live = channels - begin - lane % 4 * VECTOR;
      if (piece > 2) {
#pragma unroll
        for (int q = 0; q < 2 * ROWS; ++q) {
          unsigned char* const target = stage + q * 512 + lane * 16;
          if (piece == 8) copy_pieces<8>(target, from[q] + begin, live);
          if (piece == 4) copy_pieces<4>(target, from[q] + begin, live);
        }
        return;
      }
      Cell cells[2 * ROWS];
#pragma unroll
      for (int q = 0; q < 2 * ROWS; ++q) cells[q] = load_unaligned(from[q] + begin, live, extent);
#pragma unroll
      for (int q = 0; q < 2 * ROWS; ++q) *reinterpret_cast<Cell*>(stage + q * 512 + lane * 16) = cells[q];
      return;
    }
    constexpr int APART = 32 / STAGED;  // rows at a time
    const int k = lane % STAGED;
    const bool there = begin + k < channels;
    const scalar_t* const channel = input.data + (there ? begin + k : 0) * input.stride[1];
#pragma unroll 8
    for (int i = 0; i < COUNT; i += APART) {
      const int row = i + lane / STAGED;
      const scalar_t* const one = channel + __shfl_sync(0xffffffffu, place, row);
      scalar_t* const target = reinterpret_cast<scalar_t*>(stage + row / 8 * 512 + row % 8 * 64) + k;
      if constexpr (SIZE == 4) {
        cp_async<4>(shared_address(target), one, there ? 4 : 0);
      } else {
        *target = there ? *one : scalar_t();
      }
    }
  }
};

__device__ __forceinline__ void load_fragments(const unsigned char* stage, int lane, Fragments& fragments) {
#pragma unroll
  for (int q = 0; q < 2 * ROWS; ++q) {
    const Cell cell = *reinterpret_cast<const Cell*>(stage + q * 512 + lane * 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) fragments.set(i, q, cell.element[i]);
  }
}

extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS, 1)
    convt3d_fprop_patch_channels_last(const Problem problem, const View<const scalar_t> input,
                                      const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                      const View<scalar_t> output, const int voxels, const int columns, const int column_tiles,
                                      const int streams, const int chunks, const int tile_columns, const int block_tiles,
                                      const int slots_at) {
  const Epilogue epilogue{bias};
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  // blockIdx.x = (stream * groups + group) * column_tiles + column tile: neighbours share inputs.
  const int block = static_cast<int>(blockIdx.x), group = block / column_tiles % problem.groups;
  const int tile_width = SPECIALIZED(WGMMA_TILES * 8, tile_columns), first_column = block % column_tiles * tile_width;
  const int out_channels = problem.out_channels / problem.groups, in_channels = problem.in_channels / problem.groups;
  const int* const kernel = problem.kernel_size;
  const int each_tap = columns / (kernel[0] * kernel[1] * kernel[2]);

  extern __shared__ __align__(128) unsigned char shared[];
  const int weight_bytes = PARTS * 128 * chunks * tile_width;
  Ring ring{shared + weight_bytes + warp * STAGES * STAGE_BYTES};
  Slot* const slots = reinterpret_cast<Slot*>(shared + slots_at);
  Biases* const biases = reinterpret_cast<Biases*>(slots + tile_width / VECTOR);
  Weights weights{shared_address(shared), shared_address(biases + tile_width / VECTOR), chunks, tile_width};
  // What takes long to come is asked for first.
  if (thread == 0) weights.copy(packed_weight, group * column_tiles + block % column_tiles);

  const auto vectors = [](const auto& tensor, int channels) {
    const index_t* stride = tensor.stride;
    return stride[1] == 1 && channels % VECTOR == 0 && aligned(tensor, stride[0] | stride[2] | stride[3] | stride[4], VECTOR);
  };
  const auto neighbours = [&](const auto& tensor, int channels) { return tensor.stride[1] == 1 && !vectors(tensor, channels); };
  const auto in_pieces = [&](int bytes) {
    const index_t* stride = input.stride;
    return in_channels * SIZE % bytes == 0 && aligned(input, stride[0] | stride[2] | stride[3] | stride[4], bytes / SIZE);
  };
  Copier copier{input,
                extent_of(input, problem.batch, problem.in_channels, problem.input_size),
                vectors(input, in_channels),
                neighbours(input, in_channels),
                in_pieces(8)   ? 8
                : in_pieces(4) ? 4
                               : 2,
                in_channels,
                lane};

  const auto place = [&](int tile) {
    return place_of(problem, (tile * 4 + warp % 4) * COUNT + lane % COUNT, voxels, input, output, group * in_channels,
                    group * out_channels, kernel[0], kernel[1], kernel[2]);
  };
  const int step = streams * WARPGROUPS;
  // Where the last tiles are too few for all warpgroups, each block has as many of them as the others.
  int copied_tile = warp / 4 * streams + block / column_tiles / problem.groups, copied_chunk = 0;
  const auto copy_half = [&](unsigned char* stage, int half) {
    if (copied_tile < block_tiles) {
      if (half == 0 && copied_chunk == 0) {
        copier.begin(place(copied_tile).input);
      }
      copier.copy(stage, half);
      if (half == 1 && ++copied_chunk == chunks) {
        copied_chunk = 0;
        copied_tile += step;
      }
    }
    cp_async_commit();
  };
  int tile = copied_tile;
  for (int s = 0; s + 1 < STAGES; ++s) copy_half(ring.first + s * STAGE_BYTES, s % 2);
  for (int i = thread; i < tile_width; i += 128 * WARPGROUPS) {
    const int column = first_column + i, tap = column / each_tap, co = column % each_tap;
    const bool live = column < columns && co < out_channels;
    biases[i / VECTOR].of[i % VECTOR] = epilogue.start(group * out_channels + co, live);
    if (i % VECTOR != 0) continue;
    Slot slot{0, 0};
    if (live) {
      slot.live = min(SPECIALIZED(NEIGHBOURS, 1) ? tile_width - i : VECTOR, out_channels - co);
      if (SPECIALIZED(NEIGHBOURS, 1) && (i == 0 || co == 0)) slot.live += FIRST;
      slot.output = (co * output.stride[1] + tap / (kernel[1] * kernel[2]) * output.stride[2] +
                     tap / kernel[2] % kernel[1] * output.stride[3] + tap % kernel[2] * output.stride[4]) *
                    SIZE;
    }
    slots[i / VECTOR] = slot;
  }
  __syncthreads();

  float sums[ROWS][SUMS];
  const auto load = [&](const unsigned char* stage, Fragments& fragments) {
    if (copier.of_elements()) __syncwarp();  // all lanes' copies have landed, and all have read the stage before
    load_fragments(stage, lane, fragments);
  };
  for (; tile < block_tiles; tile += step) {
    multiply_tile(sums, weights, ring, load, copy_half);
    const index_t own = place(tile).output;
    scalar_t* to[2 * ROWS];  // the outputs of the lane's voxels
#pragma unroll
    for (int q = 0; q < 2 * ROWS; ++q) {
      const index_t target = __shfl_sync(0xffffffffu, own, q * 8 + lane / 4);
      to[q] = target < 0 ? nullptr : output.data + target;
    }
    const auto store = [&](auto whole, auto biased) {
#pragma unroll
      for (int g = 0; g < SUMS * 2 / GROUP && g < tile_width / GROUP; ++g) {
        const Slot into = slots[g * 4 + lane % 4];
        const Biases own = decltype(biased)::value ? biases[g * 4 + lane % 4] : Biases{};
#pragma unroll
        for (int q = 0; q < 2 * ROWS; ++q) {
          Vector<VECTOR> run;
#pragma unroll
          for (int v = 0; v < VECTOR; ++v) {
            const float sum = sums[q / 2][(g * (VECTOR / 2) + v / 2) * 4 + q % 2 * 2 + v % 2];
            run.element[v] = decltype(biased)::value ? epilogue.finish(sum, own.of[v]) : epilogue.finish(sum);
          }
          scalar_t* const y = advanced(to[q], into.output);
          const int live = to[q] == nullptr ? 0 : SPECIALIZED(NEIGHBOURS, 1) ? into.live % FIRST : into.live;
          if constexpr (decltype(whole)::value) {
            if (live != 0) *reinterpret_cast<Vector<VECTOR>*>(y) = run;
          } else {
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
              if (v < live) y[v * output.stride[1]] = run.element[v];
            }
          }
        }
      }
    };
    // A group's vectors and the next one's, of which a lane may have the first.
    const auto store_neighbours = [&] {
      Cell own[2 * ROWS], later[2 * ROWS] = {};
      const auto load_group = [&](int g, Cell(&cells)[2 * ROWS]) {
        const Biases start = biases[g * 4 + lane % 4];
#pragma unroll
        for (int q = 0; q < 2 * ROWS; ++q) {
          Vector<VECTOR> run;
#pragma unroll
          for (int v = 0; v < VECTOR; ++v) {
            run.element[v] = epilogue.finish(sums[q / 2][(g * (VECTOR / 2) + v / 2) * 4 + q % 2 * 2 + v % 2], start.of[v]);
          }
          memcpy(&cells[q], &run, sizeof run);
        }
      };
      load_group(0, own);
#pragma unroll
      for (int g = 0; g < SUMS * 2 / GROUP && g < tile_width / GROUP; ++g) {
        if ((g + 1) * GROUP < SUMS * 2 && (g + 1) * GROUP < tile_width) load_group(g + 1, later);
        const Slot into = slots[g * 4 + lane % 4];
#pragma unroll
        for (int q = 0; q < 2 * ROWS; ++q) {
          unsigned next[4];
          take_from_behind(next, own[q].element, later[q].element, lane);
          store_unaligned(advanced(to[q], into.output), own[q].element, next, to[q] == nullptr ? 0 : into.live % FIRST,
                          into.live >= FIRST);
          own[q] = later[q];
        }
      }
    };
    if (SPECIALIZED(NEIGHBOURS, 1) && neighbours(output, out_channels)) {
      store_neighbours();
    } else if (!vectors(output, out_channels)) {
      store(Constant<false>{}, Constant<true>{});
    } else if (epilogue.changes_sums()) {
      store(Constant<true>{}, Constant<true>{});
    } else {
      store(Constant<true>{}, Constant<false>{});
    }
  }
}
