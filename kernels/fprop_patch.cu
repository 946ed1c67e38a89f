/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[constants]
voxels = "batch * input_voxels"
columns = "out_channels_per_group * taps"
column_tiles = "ceil_div(columns, 128)"
[restrictions]
"kernel_size == stride and padding == (0, 0, 0) and output_padding == (0, 0, 0)" = "it is for kernel = stride with no padding, where each input owns a block of the output"
"all((dilation_d == 1 or kernel_d == 1, dilation_h == 1 or kernel_h == 1, dilation_w == 1 or kernel_w == 1))" = "dilation must be 1, else taps do not fill the block"
"voxels < 2 * 1024 * 1024 * 1024 - 128 and columns < 2 * 1024 * 1024 * 1024 - 128" = "voxels and columns of the product must be below 2^31"
[[launch]]
grid = "ceil_div(voxels, 128) * groups * column_tiles"
block = 256
*/
// Kernel = stride: each input voxel owns a block of kernel_size outputs, so the whole layer is one matrix product with the reordering
// fused into the store (depth to space):
//
//   output[n, co, i*stride + t] = bias[co] + sum over ci of input[n, ci, i] * weight[ci, co, t]
//
// with a row for each voxel (n, i), a column for each (co, t), and depth ci. Both operands already lie as the product wants them, rows
// or columns contiguous for each ci, so nothing is packed. A block owns 128 voxels x 128 columns and stages 16 input channels of
// both by cp.async while it multiplies the last 16. A thread owns 2 x 4 neighbouring voxels x 8 neighbouring columns: where the
// stride along w is 2, 4 voxels and 2 taps are 8 neighbouring outputs, written in two 16-byte stores.
#include "convt3d.cuh"
#include "convt3d/copy_async.cuh"

constexpr int TILE = 128, DEPTH = 16, THREADS = 256;

struct alignas(16) Vector {
  accum_t element[4];
};

// Row `voxel` of the product as an index of a tensor with the channels left out.
__device__ inline Voxel voxel_of_row(const Problem& problem, int row) { return voxel_at(row, 1, problem.input_size); }

// A tap and its channel, stepped along the columns.
struct Column {
  int co, d, h, w;
};

__device__ inline Column column_at(const Problem& problem, int column) {
  const int* kernel = problem.kernel_size;
  Column result;
  result.w = column % kernel[2];
  column /= kernel[2];
  result.h = column % kernel[1];
  column /= kernel[1];
  result.d = column % kernel[0];
  result.co = column / kernel[0];
  return result;
}

__device__ inline void step(Column& column, const Problem& problem, int by) {
  column.w += by;
  if (column.w < problem.kernel_size[2]) return;
  column.w = 0;
  if (++column.h < problem.kernel_size[1]) return;
  column.h = 0;
  if (++column.d < problem.kernel_size[0]) return;
  column.d = 0;
  ++column.co;
}

template <class T>
__device__ inline bool in_vectors(const View<T>& tensor) {
  bool whole = reinterpret_cast<index_t>(tensor.data) % 16 == 0 && tensor.stride[4] == 1;
  for (int i = 0; i < 4; ++i) whole = whole && tensor.stride[i] % 4 == 0;
  return whole;
}

// Copy DEPTH rows of TILE elements: this thread's one element of every other row, or its 4 of every eighth.
__device__ inline void stage(accum_t (&target)[DEPTH][TILE], const scalar_t* source, index_t next_channel, int channels,
                             bool live, bool vectors) {
  const int thread = static_cast<int>(threadIdx.x), width = vectors ? 4 : 1, row_threads = TILE / width;
#pragma unroll 1
  for (int k = thread / row_threads; k < DEPTH; k += THREADS / row_threads) {
    const bool inside = live && k < channels;
    const scalar_t* from = inside ? source + k * next_channel : source;
    accum_t* to = &target[k][thread % row_threads * width];
    if (vectors) {
      copy_async(reinterpret_cast<Vector*>(to), reinterpret_cast<const Vector*>(from), inside);
    } else {
      copy_async(to, from, inside);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    convt3d_fprop_patch(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                        const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxels, const int columns,
                        const int column_tiles) {
  __shared__ accum_t inputs[2][DEPTH][TILE];
  __shared__ accum_t weights[2][DEPTH][TILE];

  // blockIdx.x = (voxel tile * groups + group) * column_tiles + column tile
  const int thread = static_cast<int>(threadIdx.x), first_column = static_cast<int>(blockIdx.x % column_tiles) * TILE;
  const int group = static_cast<int>(blockIdx.x / column_tiles % problem.groups);
  const int first_voxel = static_cast<int>(blockIdx.x / column_tiles / problem.groups) * TILE;
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int* kernel = problem.kernel_size;

  const bool input_vectors = in_vectors(input) && problem.input_size[2] % 4 == 0;
  const int row = first_voxel + thread % (input_vectors ? 32 : TILE) * (input_vectors ? 4 : 1);
  const Voxel i = voxel_of_row(problem, row < voxels ? row : 0);
  const scalar_t* input_from = input.at(i.n, group * channels, i.d, i.h, i.w);
  const index_t taps = static_cast<index_t>(kernel[0]) * kernel[1] * kernel[2];
  const bool weight_vectors = reinterpret_cast<index_t>(weight.data) % 16 == 0 && columns % 4 == 0 &&
                              weight.stride[0] % 4 == 0 && weight.stride[1] == taps &&
                              weight.stride[2] == kernel[1] * kernel[2] && weight.stride[3] == kernel[2] &&
                              weight.stride[4] == 1;
  const int column = first_column + thread % (weight_vectors ? 32 : TILE) * (weight_vectors ? 4 : 1);
  const Column t = column_at(problem, column < columns ? column : 0);
  const scalar_t* weight_from = weight.at(group * channels, t.co, t.d, t.h, t.w);

  // Lanes 0 to 15 of a warp have neighbouring quads of voxels, and again half a tile further on.
  const int quad = thread % 16 * 4, thread_column = thread / 16 * 8;
  accum_t sums[2][4][8];
  Column start = column_at(problem, first_column + thread_column);
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const accum_t value = bias != nullptr && start.co < out_channels ? bias[group * out_channels + start.co] : accum_t(0);
    step(start, problem, 1);
#pragma unroll
    for (int v = 0; v < 8; ++v) sums[v / 4][v % 4][c] = value;
  }

  for (int first = 0, buffer = 0; first < channels + DEPTH; first += DEPTH, buffer ^= 1) {
    cp_async_wait_all();
    __syncthreads();  // the stage copied in the last round has landed, and the one before it has been read
    if (first < channels) {
      stage(inputs[buffer], input_from + first * input.stride[1], input.stride[1], channels - first, row < voxels,
            input_vectors);
      stage(weights[buffer], weight_from + first * weight.stride[0], weight.stride[0], channels - first, column < columns,
            weight_vectors);
    }
    if (first == 0) continue;
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
  }

  const bool output_vectors = in_vectors(output) && problem.input_size[2] % 4 == 0 && kernel[2] == 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int from = first_voxel + half * 64 + quad;
    Column at = column_at(problem, first_column + thread_column);
    if (output_vectors) {  // rows of voxels end on quads: all 4 are inside, or none
      if (from >= voxels) continue;
      const Voxel v = voxel_of_row(problem, from);
      scalar_t* corner = output.at(v.n, group * out_channels, v.d * kernel[0], v.h * kernel[1], v.w * 2);
#pragma unroll
      for (int c = 0; c < 8; c += 2, step(at, problem, 2)) {
        if (at.co >= out_channels) continue;
        const auto& s = sums[half];
        Vector* y =
            reinterpret_cast<Vector*>(corner + at.co * output.stride[1] + at.d * output.stride[2] + at.h * output.stride[3]);
        y[0] = {s[0][c], s[0][c + 1], s[1][c], s[1][c + 1]};
        y[1] = {s[2][c], s[2][c + 1], s[3][c], s[3][c + 1]};
      }
    } else {
      scalar_t* corner[4];
      for (int e = 0; e < 4; ++e) {
        const Voxel v = voxel_of_row(problem, from + e < voxels ? from + e : 0);
        corner[e] = output.at(v.n, group * out_channels, v.d * kernel[0], v.h * kernel[1], v.w * kernel[2]);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c, step(at, problem, 1)) {
        const index_t offset =
            at.co * output.stride[1] + at.d * output.stride[2] + at.h * output.stride[3] + at.w * output.stride[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (at.co < out_channels && from + e < voxels) corner[e][offset] = sums[half][e][c];
        }
      }
    }
  }
}
