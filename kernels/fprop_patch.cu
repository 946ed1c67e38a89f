/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[specialize]
KERNEL_D = "kernel_d"
KERNEL_H = "kernel_h"
KERNEL_W = "kernel_w"
[constants]
voxels = "batch * input_voxels"
columns = "out_channels_per_group * taps"
column_tiles = "ceil_div(columns, 128)"
voxel_tiles = "ceil_div(voxels, 128)"
block_tiles = "max(1, min(BLOCK_TILES, voxel_tiles * groups * column_tiles // (8 * multiprocessors)))"
runs = "ceil_div(voxel_tiles, block_tiles)"
[restrictions]
"kernel_size == stride and padding == (0, 0, 0) and output_padding == (0, 0, 0)" = "it is for kernel = stride with no padding, where each input owns a block of the output"
"all((dilation_d == 1 or kernel_d == 1, dilation_h == 1 or kernel_h == 1, dilation_w == 1 or kernel_w == 1))" = "dilation must be 1, else taps do not fill the block"
"voxels < 2 * 1024 * 1024 * 1024 - 128 and columns < 2 * 1024 * 1024 * 1024 - 128" = "voxels and columns of the product must be below 2^31"
[search]
BLOCK_TILES = [1, 2, 4]
[[launch]]
grid = "runs * groups * column_tiles"
block = 256
*/
// Kernel = stride: each input voxel owns a block of kernel_size outputs, so the whole layer is one matrix product with the reordering
// fused into the store (depth to space):
//
//   output[n, co, i*stride + t] = bias[co] + sum over ci of input[n, ci, i] * weight[ci, co, t]
//
// with a row for each voxel (n, i), a column for each (co, t), and depth ci. Both operands already lie as the product wants them, rows
// or columns contiguous for each ci, so nothing is packed. A block owns a few tiles of 128 voxels x 128 columns, and stages 16 input
// channels of both by cp.async while it multiplies the last 16; the next tile's first 16 are on their way while one tile is stored.
// A thread owns 2 x 4 neighbouring voxels x 8 neighbouring columns: where the
// stride along w is 2, 4 voxels and 2 taps are 8 neighbouring outputs, written in two 16-byte stores.
#include "convt3d.cuh"
#include "convt3d/copy_async.cuh"
#include "convt3d/forget_memory.cuh"
#include "convt3d/specialized.cuh"

#ifndef BLOCK_TILES
#define BLOCK_TILES 4
#endif
// Set by the problem; these are for a look at the compiler's output.
#ifndef KERNEL_D
#define KERNEL_D 2
#endif
#ifndef KERNEL_H
#define KERNEL_H 2
#endif
#ifndef KERNEL_W
#define KERNEL_W 2
#endif

constexpr int TILE = 128, DEPTH = 16, THREADS = 256;

struct alignas(16) Vector {
  accum_t element[4];
};

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

// Copy DEPTH rows of TILE elements: this thread's one element of every other row, or its 4 of every eighth.
template <int WIDTH, class Unit>
__device__ __forceinline__ void stage_units(accum_t (&target)[DEPTH][TILE], const scalar_t* source, index_t next_channel,
                                            int channels, bool live) {
  constexpr int ROW_THREADS = TILE / WIDTH;
  const int thread = static_cast<int>(threadIdx.x), first = thread / ROW_THREADS;
  const scalar_t* from = source + first * next_channel;
#pragma unroll(WIDTH == 4 ? 2 : 1)
  for (int k = 0; k < DEPTH; k += THREADS / ROW_THREADS, from += THREADS / ROW_THREADS * next_channel) {
    const bool inside = live && first + k < channels;
    copy_async(reinterpret_cast<Unit*>(&target[first + k][thread % ROW_THREADS * WIDTH]),
               reinterpret_cast<const Unit*>(inside ? from : source), inside);
  }
}

__device__ __forceinline__ void stage(accum_t (&target)[DEPTH][TILE], const scalar_t* source, index_t next_channel,
                                      int channels, bool live, bool vectors) {
  if (vectors) {
    stage_units<4, Vector>(target, source, next_channel, channels, live);
  } else {
    stage_units<1, accum_t>(target, source, next_channel, channels, live);
  }
}

// Add the bias and store what a thread has of a tile: voxels `first` to first + 3 and the same half a tile further on, 8 columns.
__device__ __forceinline__ void store_tile(accum_t (&sums)[2][4][8], const Problem& problem, const scalar_t* bias,
                                           const View<scalar_t>& output, const Taps& taps, int group, int out_channels,
                                           int first, int voxels, int first_column) {
  const bool output_vectors = in_vectors(output) && problem.input_size[2] % 4 == 0 && taps.w == 2;
  if (bias != nullptr) {
    Column at = taps.column_at(first_column);
#pragma unroll
    for (int c = 0; c < 8; ++c, taps.step(at, 1)) {
      const accum_t value = at.co < out_channels ? bias[group * out_channels + at.co] : accum_t(0);
#pragma unroll
      for (int v = 0; v < 8; ++v) sums[v / 4][v % 4][c] += value;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int from = first + half * 64;
    Column at = taps.column_at(first_column);
    if (output_vectors) {  // rows of voxels end on quads: all 4 are inside, or none
      if (from >= voxels) continue;
      const Voxel v = voxel_of_row(problem, from);
      scalar_t* corner = output.at(v.n, group * out_channels, v.d * taps.d, v.h * taps.h, v.w * 2);
#pragma unroll
      for (int c = 0; c < 8; c += 2, taps.step(at, 2)) {
        if (at.co >= out_channels) continue;
        const auto& s = sums[half];
        Vector* y =
            reinterpret_cast<Vector*>(corner + at.co * output.stride[1] + at.d * output.stride[2] + at.h * output.stride[3]);
        y[0] = {s[0][c], s[0][c + 1], s[1][c], s[1][c + 1]};
        y[1] = {s[2][c], s[2][c + 1], s[3][c], s[3][c + 1]};
      }
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (from + e >= voxels) break;
        const Voxel v = voxel_of_row(problem, from + e);
        scalar_t* corner = output.at(v.n, group * out_channels, v.d * taps.d, v.h * taps.h, v.w * taps.w);
        Column to = at;
#pragma unroll
        for (int c = 0; c < 8; ++c, taps.step(to, 1)) {
          if (to.co < out_channels) {
            corner[to.co * output.stride[1] + to.d * output.stride[2] + to.h * output.stride[3] + to.w * output.stride[4]] =
                sums[half][e][c];
          }
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    convt3d_fprop_patch(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                        const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels, const int columns,
                        const int column_tiles, const int voxel_tiles, const int block_tiles) {
  __shared__ accum_t inputs[2][DEPTH][TILE];
  __shared__ accum_t weights[2][DEPTH][TILE];

  // blockIdx.x = (run of voxel tiles * groups + group) * column_tiles + column tile
  const int thread = static_cast<int>(threadIdx.x), first_column = static_cast<int>(blockIdx.x % column_tiles) * TILE;
  const int group = static_cast<int>(blockIdx.x / column_tiles % problem.groups);
  const int first_tile = static_cast<int>(blockIdx.x / column_tiles / problem.groups) * block_tiles;
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const Taps taps = {SPECIALIZED(KERNEL_D, problem.kernel_size[0]), SPECIALIZED(KERNEL_H, problem.kernel_size[1]),
                     SPECIALIZED(KERNEL_W, problem.kernel_size[2])};

  const bool input_vectors = in_vectors(input) && problem.input_size[2] % 4 == 0;
  const bool weight_vectors = reinterpret_cast<index_t>(weight.data) % 16 == 0 && columns % 4 == 0 &&
                              weight.stride[0] % 4 == 0 && weight.stride[1] == taps.d * taps.h * taps.w &&
                              weight.stride[2] == taps.h * taps.w && weight.stride[3] == taps.w && weight.stride[4] == 1;
  const int column = first_column + thread % (weight_vectors ? 32 : TILE) * (weight_vectors ? 4 : 1);
  const Column t = taps.column_at(column < columns ? column : 0);
  const scalar_t* weight_from = weight.at(group * channels, t.co, t.d, t.h, t.w);
  const scalar_t* input_from = input.data;
  int row = first_tile * TILE + thread % (input_vectors ? 32 : TILE) * (input_vectors ? 4 : 1);  // staged next

  // Lanes 0 to 15 of a warp have neighbouring quads of voxels, and again half a tile further on.
  const int quad = thread % 16 * 4, thread_column = thread / 16 * 8;
  accum_t sums[2][4][8] = {};

  // Stages follow one another from tile to tile: `ahead` counts the channels of the tile being staged, `done` of that being multiplied.
  const int tiles = min(block_tiles, voxel_tiles - first_tile), stages = (channels + DEPTH - 1) / DEPTH;
  int first_voxel = first_tile * TILE, ahead = 0, done = 0;
#pragma unroll 1
  for (int step = 0, buffer = 0; step <= tiles * stages; ++step, buffer ^= 1) {
    cp_async_wait_all();
    __syncthreads();  // the stage copied in the last round has landed, and the one before it has been read
    if (step < tiles * stages) {
      if (ahead == 0) {
        const Voxel i = voxel_of_row(problem, row < voxels ? row : 0);
        input_from = input.at(i.n, group * channels, i.d, i.h, i.w);
      }
      stage(inputs[buffer], input_from + ahead * input.stride[1], input.stride[1], channels - ahead, row < voxels,
            input_vectors);
      stage(weights[buffer], weight_from + ahead * weight.stride[0], weight.stride[0], channels - ahead, column < columns,
            weight_vectors);
      ahead += DEPTH;
      if (ahead >= channels) {
        ahead = 0;
        row += TILE;
      }
    }
    if (step == 0) continue;
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      accum_t x[2][4], w[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Vector loaded = *reinterpret_cast<const Vector*>(&inputs[buffer ^ 1][k][half * 64 + quad]);
        const Vector taps_of = *reinterpret_cast<const Vector*>(&weights[buffer ^ 1][k][thread_column + half * 4]);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[half][e] = loaded.element[e];
          w[half * 4 + e] = taps_of.element[e];
        }
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
#pragma unroll
        for (int v = 0; v < 8; ++v) sums[v / 4][v % 4][c] += x[v / 4][v % 4] * w[c];
      }
    }
    done += DEPTH;
    if (done < channels) continue;
    const int again = computed_anew(thread);
    store_tile(sums, problem, bias, output, taps, group, out_channels, first_voxel + again % 16 * 4, voxels,
               first_column + again / 16 * 8);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
      for (int v = 0; v < 8; ++v) sums[v / 4][v % 4][c] = accum_t(0);
    }
    done = 0;
    first_voxel += TILE;
  }
}
