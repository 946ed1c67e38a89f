/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "bf16", "fp16"]
[specialize]
CHANNELS = "in_channels_per_group"
TILE_COLUMNS = "tile_columns"
KERNEL_D = "kernel_d"
KERNEL_H = "kernel_h"
[constants]
voxels = "batch * input_voxels"
columns = "out_channels_per_group * taps"
steps = "ceil_div(in_channels_per_group * itemsize, 32)"
warp_voxels = "(32 if steps * (1 + split) <= 16 else 16) if VOXELS == 0 else VOXELS"
warp_tiles = "ceil_div(voxels, warp_voxels)"
residents = "2 if steps * warp_voxels <= 256 and split == 0 else 1"
depth = "steps * 32 // itemsize"
voxel_pitch = "warp_voxels if itemsize == 4 and warp_voxels > 16 else warp_voxels + 8"
stage_bytes = "8 * itemsize * max(depth * voxel_pitch, warp_voxels * (depth + 16 // itemsize))"
room = "(105 if residents == 2 else 216) * 1024 - stage_bytes"
most_columns = "32 * max(1, min(ceil_div(columns, 32), (room // (steps * 32) - 8) // 32))"
tile_columns = "min(most_columns, COLUMNS)"
column_tiles = "ceil_div(columns, tile_columns)"
streams = "max(1, min(ceil_div(warp_tiles, 8), residents * multiprocessors // (column_tiles * groups)))"
shared_bytes = "stage_bytes + steps * 32 * (tile_columns + 8) + 8 * tile_columns + 8 * 16 * 32"
[restrictions]
"kernel_size == stride and padding == (0, 0, 0) and output_padding == (0, 0, 0)" = "it is for kernel = stride with no padding, where each input owns a block of the output"
"all((dilation_d == 1 or kernel_d == 1, dilation_h == 1 or kernel_h == 1, dilation_w == 1 or kernel_w == 1))" = "dilation must be 1, else taps do not fill the block"
"kernel_w == 2" = "it stores the two taps of a row together: a kernel of 2 along w"
"steps <= 16 and steps * warp_voxels * (1 + split) <= 512" = "a warp keeps all channels of its voxels in registers: at most 512 bytes of channels"
"voxels < 2 * 1024 * 1024 * 1024 - 512 and columns < 2 * 1024 * 1024 * 1024 - 512" = "voxels and columns of the product must be below 2^31"
[search]
COLUMNS = [32, 64, 128, 256]
VOXELS = [16, 32]
[cost]
steps = "ceil_div(warp_tiles, 8 * streams)"
products = "8 * warp_voxels * tile_columns * steps * 32 // itemsize"
bytes = "8 * warp_voxels * steps * 32"
first_bytes = "steps * 32 * tile_columns"
[[launch]]
symbol = "convt3d_fprop_patch_stationary_16"
when = "warp_voxels == 16"
grid = "streams * column_tiles * groups"
block = 256
shared_bytes = "shared_bytes"
[[launch]]
symbol = "convt3d_fprop_patch_stationary_32"
when = "warp_voxels == 32"
grid = "streams * column_tiles * groups"
block = 256
shared_bytes = "shared_bytes"
*/
// Kernel = stride of few channels on tensor cores, weight-stationary. Each input voxel owns a block of kernel_size outputs, so the layer
// is one matrix product with the reordering fused into the store (depth to space):
//
//   output[n, co, i*stride + t] = bias[co] + sum over ci of weight[ci, co, t] * input[n, ci, i]
//
// with a row for each (co, t), a column for each voxel (n, i), and depth ci. Such a layer is bound by memory, so everything but reading and
// writing should cost nothing. A block keeps the weights of its (co, t) in shared memory for as long as it runs; after the one barrier behind
// them its warps go their own ways. A warp copies all channels of 16 or 32 voxels into its own part of shared memory (cp.async), reads
// them as fragments into registers, has the next voxels copied meanwhile, multiplies 16 (co, t) after 16 by them, and stores the sums from
// registers.
//
// Which (co, t) a row of a product is, and which voxel a column, can be chosen. Rows g and g + 8 are the two taps of a row of outputs, and a
// lane's columns are 2 (tf32) or 4 (16 bits) neighbouring voxels: so a lane has 16 neighbouring bytes of the output, four lanes 64.
// Where channels lie together in the output, rows g and g + 8 are two neighbouring channels of a tap.
#include "convt3d.cuh"
#include "convt3d/core/advanced.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/ptx/mma.cuh"
#include "convt3d/pipe/patch.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/ptx/split_tf32.cuh"
#include "convt3d/epilogue/store_piece.cuh"

// At most so many (co, t) of a block, a multiple of 32.
#ifndef COLUMNS
#define COLUMNS 128
#endif
// Voxels of a warp, 16 or 32; 0: by the problem.
#ifndef VOXELS
#define VOXELS 0
#endif

constexpr int SIZE = static_cast<int>(sizeof(scalar_t));
constexpr int VECTOR = 16 / SIZE, EACH = 4 / SIZE;  // elements of a copy, of a register
constexpr int STEP = 32 / SIZE, WARPS = 8;          // channels of one mma.sync
#if defined(__CUDACC__)
constexpr int STEPS = (CHANNELS + STEP - 1) / STEP;
constexpr bool WIDE = STEPS * PARTS <= 16;  // 32 voxels fit in registers
#else
constexpr int STEPS = 16;  // the most there can be
constexpr bool WIDE = true;
#endif

// Two neighbouring (co, t): where the first one lies relative to a voxel's output, -1 past the last one.
struct alignas(16) Pair {
  index_t output;
  float start[2];
};

struct Tap {
  int co, d, h, w;
};

// What all threads know of the product.
struct Product {
  const Problem& problem;
  int voxels, columns, channels, steps, tile_columns, first_column, out_channels, group, kernel_d, kernel_h;
  bool channels_last;  // of the output: the order of (co, t)

  __device__ int pitch() const { return tile_columns + 8; }
  __device__ int taps() const { return kernel_d * kernel_h * 2; }
  __device__ Tap tap_of(int column) const {
    const int tap = channels_last ? column / out_channels : column % taps(), row = tap / 2;
    return {channels_last ? column % out_channels : column / taps(), row / kernel_h, row % kernel_h, tap % 2};
  }
};

// The block's weights, [channel][(co, t)], zero where there is none. In 16 bits ldmatrix reads the rows of a fragment from neighbours: there
// the first of all pairs among 16 come first.
__device__ inline void copy_weights(scalar_t* to, const View<const scalar_t>& weight, const Product& product) {
  const index_t row = 2, plane = row * product.kernel_h, taps = product.taps();
  const index_t tap = product.channels_last ? product.out_channels : 1, co = product.channels_last ? 1 : taps;
  const bool vectors = weight.stride[4] == tap && weight.stride[3] == tap * row && weight.stride[2] == tap * plane &&
                       weight.stride[1] == co && product.columns % VECTOR == 0 && aligned(weight, weight.stride[0], VECTOR);
  const int width = vectors ? VECTOR : 1, units = product.tile_columns / width, count = units * product.steps * STEP;
#pragma unroll 8
  for (int unit = static_cast<int>(threadIdx.x); unit < count; unit += 32 * WARPS) {
    const int k = unit / units, at = unit % units * width, column = product.first_column + at;
    const bool live = k < product.channels && column < product.columns;
    const Tap from = product.tap_of(live ? column : 0);
    const scalar_t* const source =
        weight.at(product.group * product.channels + (live ? k : 0), from.co, from.d, from.h, from.w);
    scalar_t* const target = to + k * product.pitch() + (SIZE == 4 ? at : at / 16 * 16 + at % 2 * 8 + at % 16 / 2);
    if (!vectors) {
      *target = live ? *source : scalar_t();
    } else if constexpr (SIZE == 4) {
      cp_async<16>(shared_address(target), source, live ? 16 : 0);
    } else {
      Vector<8> loaded{};
      if (live) loaded = *reinterpret_cast<const Vector<8>*>(source);
      Vector<4> halves[2];
      for (int e = 0; e < 8; ++e) halves[e % 2].element[e / 2] = loaded.element[e];
      for (int half = 0; half < 2; ++half) *reinterpret_cast<Vector<4>*>(target + half * 8) = halves[half];
    }
  }
}

// A warp's voxels: 8 in each of N columns of fragments.
template <int N>
struct Warp {
  static constexpr int COUNT = 8 * N;
  static constexpr int RUN = SIZE == 4 ? 2 : 4, RUNS = COUNT / (4 * RUN);  // neighbouring voxels of a lane
  static constexpr int PITCH = SIZE == 4 && N > 2 ? COUNT : COUNT + 8;
  unsigned inputs[STEPS][N][2];

  // Elements of shared memory.
  __device__ static int staged_elements(int depth) {
    const int rows = depth * PITCH, channel_rows = COUNT * (depth + VECTOR);
    return rows < channel_rows ? channel_rows : rows;
  }
  // Where one is staged in [channel][voxel]: four rows of channels (tf32) or of pairs of channels meet all banks.
  __device__ static int staged(int k, int voxel) { return k * PITCH + (PITCH == COUNT ? voxel ^ k % 4 * 8 : voxel); }

  // Copy all channels of the warp's voxels; `places` has where each begins in the input, -1 past the last one.
  __device__ static void copy(scalar_t* stage, const View<const scalar_t>& input, const index_t* places, const Product& product,
                              int lane, Copies copies) {
    const int depth = product.steps * STEP;
    if (copies == VOXEL_VECTORS) {
      constexpr int UNITS = COUNT / VECTOR, APART = 32 / UNITS;
      const int voxel = lane % UNITS * VECTOR, first = lane / UNITS;
      const index_t place = places[voxel];
      const scalar_t* from = input.data + (place < 0 ? 0 : place) + (first < product.channels ? first : 0) * input.stride[1];
#pragma unroll 8
      for (int k = first; k < depth; k += APART) {
        const bool live = place >= 0 && k < product.channels;
        cp_async<16>(shared_address(stage + staged(k, voxel)), from, live ? 16 : 0);
        if (k + APART < product.channels) from = advanced(from, APART * SIZE * input.stride[1]);
      }
    } else if (copies == CHANNEL_VECTORS) {
      const int units = depth / VECTOR;
#pragma unroll 4
      for (int i = lane; i < units * COUNT; i += 32) {
        const int voxel = i / units, k = i % units * VECTOR;
        const bool live = places[voxel] >= 0 && k < product.channels;
        cp_async<16>(shared_address(stage + voxel * (depth + VECTOR) + k), input.data + (live ? places[voxel] + k : 0),
                     live ? 16 : 0);
      }
    } else {
      const bool along_channels = input.stride[1] == 1;
#pragma unroll 4
      for (int i = lane; i < depth * COUNT; i += 32) {
        const int k = along_channels ? i % depth : i / COUNT, voxel = along_channels ? i / depth : i % COUNT;
        const bool live = places[voxel] >= 0 && k < product.channels;
        const scalar_t* const from = live ? input.data + places[voxel] + k * input.stride[1] : input.data;
        if constexpr (SIZE == 4) {
          cp_async<4>(shared_address(stage + staged(k, voxel)), from, live ? 4 : 0);
        } else {
          stage[staged(k, voxel)] = live ? *from : scalar_t();
        }
      }
    }
  }

  __device__ static unsigned operand(unsigned bits) {
    return SIZE == 4 && PARTS == 1 ? nearest_tf32(__uint_as_float(bits)) : bits;
  }

  // tf32: column g of fragment n is voxel 8n + g. 16 bits: of fragments 2u and 2u + 1 voxels 16u + 2g and the next one.
  template <bool CHANNEL_ROWS>
  __device__ __forceinline__ void load(const scalar_t* stage, const Product& product, int lane) {
    const auto word = [stage](int at) { return *reinterpret_cast<const unsigned*>(stage + at); };
#pragma unroll
    for (int half = 0; half < 2 * STEPS && half < 2 * product.steps; ++half) {
      const int k = half * (STEP / 2) + lane % 4 * EACH;
      if constexpr (SIZE == 4 || CHANNEL_ROWS) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const int voxel = SIZE == 4 ? n * 8 + lane / 4 : n / 2 * 16 + lane / 4 * 2 + n % 2;
          const int row = voxel * (product.steps * STEP + VECTOR);
          inputs[half / 2][n][half % 2] = operand(word(CHANNEL_ROWS ? row + k : staged(k, voxel)));
        }
      } else {
#pragma unroll
        for (int n = 0; n < N; n += 2) {
          const unsigned first = word(staged(k, n * 8 + lane / 4 * 2)), second = word(staged(k + 1, n * 8 + lane / 4 * 2));
          inputs[half / 2][n][half % 2] = (first & 0xffffu) | second << 16;
          inputs[half / 2][n + 1][half % 2] = first >> 16 | (second & 0xffff0000u);
        }
      }
    }
  }

  // The sums of 16 (co, t); `weights` begins with the first one.
  __device__ __forceinline__ void multiply(float (&sums)[N][4], const scalar_t* weights, const Product& product,
                                           int lane) const {
#pragma unroll
    for (int s = 0; s < STEPS && s < product.steps; ++s, weights += STEP * product.pitch()) {
      unsigned a[4];
      if constexpr (SIZE == 4) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Vector<2> pair =
              *reinterpret_cast<const Vector<2>*>(weights + (lane % 4 + r * 4) * product.pitch() + lane / 4 * 2);
          for (int e = 0; e < 2; ++e) a[r * 2 + e] = operand(__float_as_uint(to_accum(pair.element[e])));
        }
      } else {
        ldmatrix_x4_transposed(a, shared_address(weights + (lane / 16 * 8 + lane % 8) * product.pitch() + lane / 8 % 2 * 8));
      }
      if constexpr (PARTS == 2) {
        multiply_parts(sums, a, inputs[s]);
      } else {
#pragma unroll
        for (int n = 0; n < N; ++n) CONVT3D_MULTIPLY(sums[n], a, inputs[s][n][0], inputs[s][n][1]);
      }
    }
  }

  // Two TF32 parts of each operand: lo*hi, hi*lo and hi*hi from zero, then added in fp32: the tensor cores cut off what they add.
  __device__ __forceinline__ static void multiply_parts(float (&sums)[N][4], const unsigned (&a)[4],
                                                        const unsigned (&b)[N][2]) {
    unsigned a_parts[2][4];
    for (int r = 0; r < 4; ++r) split_tf32(__uint_as_float(a[r]), a_parts[0][r], a_parts[1][r]);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      unsigned b_parts[2][2];
      for (int r = 0; r < 2; ++r)
        split_tf32(__uint_as_float(computed_anew(b[n][r])), b_parts[0][r], b_parts[1][r]);  // not kept: twice the registers
      float step[4] = {};
      CONVT3D_MULTIPLY(step, a_parts[1], b_parts[0][0], b_parts[0][1]);
      CONVT3D_MULTIPLY(step, a_parts[0], b_parts[1][0], b_parts[1][1]);
      CONVT3D_MULTIPLY(step, a_parts[0], b_parts[0][0], b_parts[0][1]);
      for (int e = 0; e < 4; ++e) sums[n][e] += step[e];
    }
  }

  // Of a lane's run u: its first voxel, and the sum of its voxel v for row g (tap 0) or g + 8.
  __device__ static int voxel(int lane, int u) { return u * 4 * RUN + lane % 4 * RUN; }
  __device__ static float sum(const float (&sums)[N][4], int u, int v, int tap) {
    return SIZE == 4 ? sums[u][tap * 2 + v] : sums[u * 2 + v % 2][tap * 2 + v / 2];
  }
};

template <int N>
__device__ __forceinline__ void multiply_patches(const Problem& problem, const View<const scalar_t>& input,
                                                 const View<const scalar_t>& weight, const Epilogue& epilogue,
                                                 const View<scalar_t>& output, int voxels, int columns, int column_tiles,
                                                 int streams, int steps, int tile_columns) {
  typedef Warp<N> Tile;
  constexpr int COUNT = Tile::COUNT, RUN = Tile::RUN, RUNS = Tile::RUNS;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  // blockIdx.x = (stream * groups + group) * column_tiles + column tile: neighbours share inputs.
  const int stream = static_cast<int>(blockIdx.x / column_tiles / problem.groups),
            out_channels = problem.out_channels / problem.groups;
  const Product product{problem,
                        voxels,
                        columns,
                        SPECIALIZED(CHANNELS, problem.in_channels / problem.groups),
                        SPECIALIZED(STEPS, steps),
                        SPECIALIZED(TILE_COLUMNS, tile_columns),
                        static_cast<int>(blockIdx.x % column_tiles) * SPECIALIZED(TILE_COLUMNS, tile_columns),
                        out_channels,
                        static_cast<int>(blockIdx.x / column_tiles % problem.groups),
                        SPECIALIZED(KERNEL_D, problem.kernel_size[0]),
                        SPECIALIZED(KERNEL_H, problem.kernel_size[1]),
                        output.stride[4] != 1 && output.stride[1] == 1 && out_channels % 2 == 0};
  const int depth = product.steps * STEP;

  extern __shared__ uint4 shared[];
  scalar_t* const weights = reinterpret_cast<scalar_t*>(shared);
  scalar_t* const stage = weights + depth * product.pitch() + warp * Tile::staged_elements(depth);
  Pair* const pairs = reinterpret_cast<Pair*>(weights + depth * product.pitch() + WARPS * Tile::staged_elements(depth));
  index_t* const sources = reinterpret_cast<index_t*>(pairs + product.tile_columns / 2) + warp * 64;
  index_t* const targets = sources + 32;

  const Copies copies = copies_of(input, problem.input_size, product.channels);
  // A lane's pieces are whole pieces of a row of the output.
  const bool runs = output.stride[4] == 1 && problem.input_size[2] % RUN == 0 &&
                    aligned(output, output.stride[0] | output.stride[1] | output.stride[2] | output.stride[3], 2 * RUN);
  const index_t others =
      output.stride[0] | output.stride[2] | output.stride[3] | (product.channels_last ? output.stride[4] : output.stride[1]);
  const bool in_pairs = (product.channels_last ? output.stride[1] : output.stride[4]) == 1 && aligned(output, others, 2);

  const int warp_tiles = (voxels + COUNT - 1) / COUNT;
  int tile = stream * WARPS + warp;
  index_t target = -1;
  const auto copy_next = [&]() {
    const Place place = place_of(problem, tile * COUNT + lane % COUNT, voxels, input, output, product.group * product.channels,
                                 product.group * out_channels, product.kernel_d, product.kernel_h, 2);
    sources[lane] = place.input;
    target = place.output;
    __syncwarp();  // the places are written, and the stage has been read
    Tile::copy(stage, input, sources, product, computed_anew(lane), copies);
  };
  if (tile < warp_tiles) copy_next();

  for (int pair = thread; pair < product.tile_columns / 2; pair += 32 * WARPS) {
    const int column = product.first_column + pair * 2;
    Pair entry{-1, {0.0f, 0.0f}};
    if (column < columns) {
      const Tap tap = product.tap_of(column);
      entry.output = tap.co * output.stride[1] + tap.d * output.stride[2] + tap.h * output.stride[3] + tap.w * output.stride[4];
      const int co = product.group * out_channels + tap.co;
      for (int e = 0; e < 2; ++e) entry.start[e] = epilogue.start(co + (product.channels_last ? e : 0));
    }
    pairs[pair] = entry;
  }
  copy_weights(weights, weight, product);
  cp_async_wait_all();
  __syncthreads();

#pragma unroll 1
  while (tile < warp_tiles) {
    cp_async_wait_all();
    targets[lane] = target;
    __syncwarp();
    Tile own;
    const int again = computed_anew(lane);  // else addresses are kept in registers
    if (copies == CHANNEL_VECTORS) {
      own.template load<true>(stage, product, again);
    } else {
      own.template load<false>(stage, product, again);
    }
    tile += streams * WARPS;
    if (tile < warp_tiles) copy_next();

#pragma unroll 1
    for (int first = 0; first < product.tile_columns && product.first_column + first < columns; first += 16) {
      const Pair pair = pairs[first / 2 + lane / 4];
      float sums[N][4];
#pragma unroll
      for (int n = 0; n < N; ++n) {
        for (int e = 0; e < 4; ++e) sums[n][e] = pair.start[e / 2];
      }
      own.multiply(sums, weights + first, product, lane);
      if (pair.output < 0) continue;
#pragma unroll
      for (int u = 0; u < RUNS; ++u) {
        if (runs) {
          Vector<2 * RUN> run;
#pragma unroll
          for (int e = 0; e < 2 * RUN; ++e) run.element[e] = epilogue.finish(Tile::sum(sums, u, e / 2, e % 2));
          const index_t place = targets[Tile::voxel(lane, u)];
          if (place >= 0) *reinterpret_cast<Vector<2 * RUN>*>(output.data + place + pair.output) = run;
        } else {
#pragma unroll
          for (int v = 0; v < RUN; ++v) {
            const index_t place = targets[Tile::voxel(lane, u) + v];
            if (place < 0) continue;
            const scalar_t one = epilogue.finish(Tile::sum(sums, u, v, 0)), other = epilogue.finish(Tile::sum(sums, u, v, 1));
            scalar_t* const y = output.data + place + pair.output;
            if (in_pairs) {
              store_pair(y, one, other);
            } else {
              y[0] = one;
              y[(product.channels_last ? output.stride[1] : output.stride[4])] = other;
            }
          }
        }
      }
    }
    __syncwarp();  // the targets have been read
  }
}

template <int N>
constexpr int residents = STEPS * N <= 32 && PARTS == 1 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(32 * WARPS, residents<2>)
    convt3d_fprop_patch_stationary_16(const Problem problem, const View<const scalar_t> input,
                                      const View<const scalar_t> weight, const scalar_t* __restrict__ bias,
                                      const View<scalar_t> output, const int voxels, const int columns, const int column_tiles,
                                      const int streams, const int steps, const int tile_columns) {
  multiply_patches<2>(problem, input, weight, {bias}, output, voxels, columns, column_tiles, streams, steps, tile_columns);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, residents<4>)
    convt3d_fprop_patch_stationary_32(const Problem problem, const View<const scalar_t> input,
                                      const View<const scalar_t> weight, const scalar_t* __restrict__ bias,
                                      const View<scalar_t> output, const int voxels, const int columns, const int column_tiles,
                                      const int streams, const int steps, const int tile_columns) {
  if constexpr (WIDE) {
    multiply_patches<4>(problem, input, weight, {bias}, output, voxels, columns, column_tiles, streams, steps, tile_columns);
  }
}
