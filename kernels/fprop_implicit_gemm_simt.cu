/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32"]
[constants]
step_d = "stride_d // gcd(stride_d, dilation_d)"
step_h = "stride_h // gcd(stride_h, dilation_h)"
step_w = "stride_w // gcd(stride_w, dilation_w)"
spread_d = "dilation_d // gcd(stride_d, dilation_d)"
spread_h = "dilation_h // gcd(stride_h, dilation_h)"
spread_w = "dilation_w // gcd(stride_w, dilation_w)"
classes = "min(kernel_d, step_d) * spread_d * min(kernel_h, step_h) * spread_h * min(kernel_w, step_w) * spread_w"
dead_outputs = "kernel_d < stride_d or kernel_h < stride_h or kernel_w < stride_w or step_d * step_h * step_w < residues"
taps_d = "ceil_div(kernel_d, step_d)"
taps_h = "ceil_div(kernel_h, step_h)"
taps_w = "ceil_div(kernel_w, step_w)"
outputs_d = "ceil_div(output_d, stride_d * spread_d)"
outputs_h = "ceil_div(output_h, stride_h * spread_h)"
outputs_w = "ceil_div(output_w, stride_w * spread_w)"
thread_channels = "4 if out_channels_per_group <= 4 else 8"
thread_tiles = "ceil_div(out_channels_per_group, thread_channels)"
channel_warps = "4 if thread_tiles % 4 == 0 else 3 if thread_tiles % 3 == 0 else 2 if thread_tiles % 2 == 0 else 1"
channel_tiles = "thread_tiles // channel_warps"
position_warps = "min(4, BLOCK_WARPS // channel_warps)"
threads = "32 * channel_warps * position_warps"
tile_quads = "32 * position_warps * (THREAD_QUADS if itemsize == 4 else 1)"
quads_w = "ceil_div(outputs_w + 16 // itemsize - 1, 4)"
tiles = "ceil_div(outputs_d * outputs_h * quads_w, tile_quads)"
least_h = "max(1, output_h // (stride_h * spread_h))"
least_quads = "max(1, ceil_div(output_w // (stride_w * spread_w), 4))"
tile_rows = "min(ceil_div(tile_quads - 1, least_quads) + 1, outputs_d * outputs_h)"
tile_span = "tile_rows + min(ceil_div(tile_rows - 1, least_h), outputs_d - 1) * (taps_h - 1) + taps_h - 1"
rows = "(taps_d - 1) * min(outputs_h + taps_h - 1, tile_span) + tile_span"
pitch = "ceil_div(4 * quads_w + taps_w - 1, 4) * 4"
channel_elements = "rows * pitch + taps_d * taps_h * taps_w * thread_channels * channel_warps"
stage_elements = "max(channel_elements, min(in_channels_per_group * channel_elements, STAGE_BYTES * threads // 192 // itemsize // 4 * 4))"
row_slots = "ceil_div(rows, 2) * 2"
block_bytes = "8 * row_slots + 2 * stage_elements * itemsize"
[restrictions]
"max(stride_d * spread_d, stride_h * spread_h, stride_w * spread_w) < 2 * 1024 * 1024 * 1024" = "the least common multiple of stride and dilation must be below 2^31 on each axis"
"block_bytes <= 98 * 1024" = "one channel's input rows and weights, twice, must fit the 99 KiB of shared memory that every GPU has"
[workspace]
packed_weight = "in_channels * taps * thread_tiles * thread_channels"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt_pack"
grid = "ceil_div(in_channels * taps * thread_tiles * thread_channels, 256)"
block = 256
packs = "packed_weight"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt_untouched"
when = "dead_outputs"
grid = "batch * out_channels * output_d"
block = 256
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt_c8"
when = "thread_channels == 8"
grid = "classes * batch * groups * tiles * channel_tiles"
block = "threads"
shared_bytes = "block_bytes"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt_c4"
when = "thread_channels == 4"
grid = "classes * batch * groups * tiles * channel_tiles"
block = "threads"
shared_bytes = "block_bytes"
*/
// Implicit GEMM on the CUDA cores. The outputs with equal (o + padding) mod lcm(stride, dilation) are one dense correlation, with
// steps of one in both, of every (dilation/gcd)-th input with every (stride/gcd)-th tap (see DenseAxis):
//
//   output[first + a*lcm] = bias + sum over ci and k of input[origin + (a + k)*spread] * weight[the class's k-th tap from its end]
//
// A block owns a tile of quads (4 neighbouring a along w) of one such class, counted over d, h and w without regard to rows or
// planes, so that only the last tile has a tail (see RowTile), times channel_warps * CHANNELS output channels. For a chunk of input
// channels it stages every input row the tile needs, halo and zeros included, and the packed weights; all taps then read from
// shared memory. While one stage is multiplied, cp.async fills the other.
//
// A thread owns THREAD_QUADS quads x CHANNELS channels. For one row of taps it reads 8 inputs of each quad (two 16-byte loads) and,
// for each tap, the weights, which all lanes share (16-byte broadcasts): 10 loads for 192 multiply-adds at 3 taps. Twelve warps a
// multiprocessor leave a thread 168 registers; at 128 the compiler spills.
#include "convt3d.cuh"
#include "convt3d/copy_async.cuh"
#include "convt3d/dense_axis.cuh"
#include "convt3d/row_tile.cuh"

#ifndef THREAD_QUADS
#define THREAD_QUADS 2
#endif
#ifndef BLOCK_WARPS
#define BLOCK_WARPS 6
#endif
#ifndef STAGE_BYTES
#define STAGE_BYTES 45056
#endif

constexpr int QUADS = sizeof(accum_t) == 4 ? THREAD_QUADS : 1;  // fp64 sums take two registers each
static_assert(BLOCK_WARPS >= 4, "up to 4 warps share the channels");

// packed_weight[group][thread tile][class's taps before][ci][the class's taps from the last][channel of the thread tile], zero beyond
// the last channel: what a warp multiplies by in one stage is one contiguous piece of it.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_fprop_implicit_gemm_simt_pack(const Problem problem, const View<const scalar_t> weight,
                                          accum_t* __restrict__ packed_weight, const int thread_tiles,
                                          const int thread_channels) {
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int* kernel = problem.kernel_size;
  const index_t taps = static_cast<index_t>(kernel[0]) * kernel[1] * kernel[2];
  index_t index = blockIdx.x * 256LL + threadIdx.x;
  if (index >= problem.in_channels * taps * thread_tiles * thread_channels) return;
  const int lane = static_cast<int>(index % thread_channels);
  index /= thread_channels;
  int tap[3];
  PackedTap place[3];
  for (int a = 2; a >= 0; --a) {
    tap[a] = static_cast<int>(index % kernel[a]);
    index /= kernel[a];
    place[a] = packed_tap(problem, a, tap[a]);
  }
  const int ci = static_cast<int>(index % channels);
  const index_t tile = index / channels;  // group * thread_tiles + thread tile
  const int co = static_cast<int>(tile % thread_tiles) * thread_channels + lane, group = static_cast<int>(tile / thread_tiles);
  const index_t taps_before =
      (static_cast<index_t>(place[0].before) * kernel[1] + place[0].class_taps * place[1].before) * kernel[2] +
      place[0].class_taps * place[1].class_taps * place[2].before;
  const index_t row = (tile * taps + taps_before) * channels +
                      static_cast<index_t>(ci) * place[0].class_taps * place[1].class_taps * place[2].class_taps +
                      (place[0].position * place[1].class_taps + place[1].position) * place[2].class_taps + place[2].position;
  packed_weight[row * thread_channels + lane] =
      co < out_channels ? to_accum(*weight.at(group * channels + ci, co, tap[0], tap[1], tap[2])) : accum_t(0);
}

// Outputs that no tap reaches are the bias. A block owns one plane (n, d, co).
extern "C" __global__ void __launch_bounds__(256)
    convt3d_fprop_implicit_gemm_simt_untouched(const Problem problem, const scalar_t* __restrict__ bias,
                                               const View<scalar_t> output) {
  __shared__ bool row_has_tap[256];
  const int thread = static_cast<int>(threadIdx.x), rows = problem.output_size[1], columns = problem.output_size[2];
  const int co = static_cast<int>(blockIdx.x % problem.out_channels);
  const int d = static_cast<int>(blockIdx.x / problem.out_channels % problem.output_size[0]);
  const int n = static_cast<int>(blockIdx.x / problem.out_channels / problem.output_size[0]);
  const scalar_t value = bias != nullptr ? bias[co] : to_scalar(accum_t(0));
  const bool plane_has_tap = has_tap(problem, 0, d);
  if (!plane_has_tap && output.stride[3] == columns * output.stride[4]) {  // a line
    scalar_t* y = output.at(n, co, d, 0, 0);
    const index_t numel = static_cast<index_t>(rows) * columns;
#pragma unroll 4
    for (index_t i = thread; i < numel; i += 256) y[i * output.stride[4]] = value;
    return;
  }
  const int threads_w = min(columns, 256), threads_h = 256 / threads_w, thread_h = thread / threads_w;
  for (int first = 0; first < rows; first += 256) {
    __syncthreads();
    row_has_tap[thread] = plane_has_tap && first + thread < rows && has_tap(problem, 1, first + thread);
    __syncthreads();
    for (int w = thread % threads_w; w < (thread_h < threads_h ? columns : 0); w += threads_w) {
      const bool column_has_tap = has_tap(problem, 2, w);
      scalar_t* y = output.at(n, co, d, first + thread_h, w);
      for (int h = thread_h; h < min(256, rows - first); h += threads_h, y += threads_h * output.stride[3]) {
        if (!(column_has_tap && row_has_tap[h])) *y = value;
      }
    }
  }
}

// The rows of taps a stage holds, and steps in elements through its inputs (from row to row, then on to the next kd, then on to the
// next channel) and its weights (from row to row, then on to the next channel).
struct StageShape {
  int taps_d, taps_h, pitch, next_kd, next_channel, weight_row, next_channel_weights;
};

// sums += TAPS neighbouring taps of each row of taps, for all channels of a stage.
template <int TAPS, int CHANNELS>
__device__ __forceinline__ void multiply(accum_t (&sums)[QUADS][4][CHANNELS], const accum_t* inputs, const int (&quad)[QUADS],
                                         const accum_t* weights, int channels, const StageShape& shape) {
  constexpr int WIDTH = TAPS == 1 ? 4 : 8;
  const accum_t* row[QUADS];
  for (int q = 0; q < QUADS; ++q) row[q] = inputs + quad[q];
#pragma unroll 1
  for (int ci = 0; ci < channels; ++ci) {
#pragma unroll 1
    for (int kd = 0; kd < shape.taps_d; ++kd) {
#pragma unroll 1
      for (int kh = 0; kh < shape.taps_h; ++kh) {
        accum_t x[QUADS][WIDTH];
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
#pragma unroll
          for (int i = 0; i < WIDTH; i += VECTOR) {
            const Vector loaded = *reinterpret_cast<const Vector*>(row[q] + i);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) x[q][i + e] = loaded.element[e];
          }
          row[q] += shape.pitch;
        }
#pragma unroll
        for (int t = 0; t < TAPS; ++t) {
#pragma unroll
          for (int c = 0; c < CHANNELS; c += VECTOR) {
            const Vector w = *reinterpret_cast<const Vector*>(weights + t * CHANNELS + c);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
#pragma unroll
              for (int q = 0; q < QUADS; ++q) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[q][i][c + e] += x[q][i + t] * w.element[e];
              }
            }
          }
        }
        weights += shape.weight_row;
      }
      for (int q = 0; q < QUADS; ++q) row[q] += shape.next_kd;
    }
    for (int q = 0; q < QUADS; ++q) row[q] += shape.next_channel;
    weights += shape.next_channel_weights;
  }
}

// What a block works on. Kept in shared memory: registers are for the sums.
struct Tile : RowTile {
  int n, group, thread_tile, chunk;
  StageShape shape;
  int channel_weights, weights_at;  // elements of a channel's weights in a thread tile, and where the first tile's are staged
  index_t volume, weights,
      tile_weights;  // the block's first input and packed weight, and from one thread tile's on to the next
};

__device__ inline void find_tile(Tile& tile, const Problem& problem, const View<const scalar_t>& input, int tile_quads,
                                 int thread_channels, int channel_warps, int stage_elements, int tiles, int thread_tiles) {
  // blockIdx.x = (((class * batch + n) * groups + group) * tiles + tile) * channel tiles + channel tile
  const int channel_tiles = thread_tiles / channel_warps;
  unsigned block = blockIdx.x;
  tile.thread_tile = static_cast<int>(block % channel_tiles) * channel_warps;
  block /= channel_tiles;
  tile.first_quad = static_cast<int>(block % tiles) * tile_quads;
  block /= tiles;
  tile.group = static_cast<int>(block % problem.groups);
  block /= problem.groups;
  tile.n = static_cast<int>(block % problem.batch);
  block /= problem.batch;
  for (int a = 2; a >= 0; --a) {
    const int classes = dense_classes(problem, a);
    tile.axis[a] = dense_axis(problem, a, static_cast<int>(block % classes));
    block /= classes;
  }
  lay_out(tile, problem, input, tile_quads);
  if (tile.first_quad >= tile.end_quad) return;

  const DenseAxis &d = tile.axis[0], &h = tile.axis[1], &w = tile.axis[2];
  const int channels = problem.in_channels / problem.groups, *kernel = problem.kernel_size;
  const int row = w.taps * thread_channels, segment = tile.segment * tile.pitch;
  tile.channel_weights = d.taps * h.taps * row;
  tile.tile_weights = static_cast<index_t>(kernel[0]) * kernel[1] * kernel[2] * channels * thread_channels;
  tile.chunk = min(channels, stage_elements / (tile.plane + tile.channel_weights * channel_warps));
  tile.weights_at = tile.chunk * tile.plane;
  tile.shape = {tile.taps_d,
                h.taps,
                tile.pitch,
                segment - h.taps * tile.pitch,
                tile.plane - tile.taps_d * segment,
                row,
                tile.channel_weights - tile.taps_d * h.taps * row};
  tile.volume = tile.n * input.stride[0] + static_cast<index_t>(tile.group) * channels * input.stride[1];
  const index_t taps_before =
      (static_cast<index_t>(d.taps_before) * kernel[1] + d.taps * h.taps_before) * kernel[2] + d.taps * h.taps * w.taps_before;
  const index_t thread_tile = static_cast<index_t>(tile.group) * thread_tiles + tile.thread_tile;
  tile.weights = thread_tile * tile.tile_weights + taps_before * channels * thread_channels;
}

template <int CHANNELS>
__device__ __forceinline__ void implicit_gemm(const Problem& problem, const View<const scalar_t>& input,
                                              const accum_t* packed_weight, const scalar_t* bias, const View<scalar_t>& output,
                                              int channel_warps, int stage_elements, int row_slots, int tiles,
                                              int thread_tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Tile tile;
  index_t* row_offset = reinterpret_cast<index_t*>(shared);
  accum_t* stages = reinterpret_cast<accum_t*>(shared + 8 * row_slots);
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int position_threads = threads / channel_warps;
  if (thread == 0) {
    find_tile(tile, problem, input, position_threads * QUADS, CHANNELS, channel_warps, stage_elements, tiles, thread_tiles);
  }
  __syncthreads();
  if (tile.first_quad >= tile.end_quad) return;  // the whole block: classes differ in size

  find_rows(tile, problem, input, row_offset);

  // A thread has its position's quad, and the same again position_threads further on; past the end it computes the first one again.
  const int position = thread % position_threads, channel_warp = thread / position_threads;
  int quad[QUADS];
  for (int q = 0; q < QUADS; ++q) {
    const int number = tile.first_quad + q * position_threads + position;
    quad[q] = staged_quad(tile, number < tile.end_quad ? number : tile.first_quad);
  }
  const int out_channels = problem.out_channels / problem.groups, first_out = (tile.thread_tile + channel_warp) * CHANNELS;
  accum_t sums[QUADS][4][CHANNELS];
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) {
    const bool has_bias = bias != nullptr && first_out + c < out_channels;
    const accum_t start = has_bias ? to_accum(bias[tile.group * out_channels + first_out + c]) : accum_t(0);
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[q][i][c] = start;
    }
  }

  const int channels = problem.in_channels / problem.groups;
  int buffer = 0;
  for (int first = 0; first < channels + tile.chunk; first += tile.chunk, buffer ^= 1) {
    cp_async_wait_all();
    __syncthreads();  // the stage copied in the last round has landed, and the one before it has been read
    const int chunk = tile.chunk, weights_at = tile.weights_at + channel_warp * chunk * tile.channel_weights;
    if (first < channels) {
      accum_t* stage = stages + buffer * stage_elements;
      const int count = min(chunk, channels - first);
      const scalar_t* volume = input.data + tile.volume + first * input.stride[1];
      stage_rows(tile, problem, input, volume, row_offset, count, stage);
      Vector* weights = reinterpret_cast<Vector*>(stage + weights_at);
      const index_t source =
          tile.weights + channel_warp * tile.tile_weights + static_cast<index_t>(first) * tile.channel_weights;
      const Vector* packed = reinterpret_cast<const Vector*>(packed_weight + source);
#pragma unroll 1
      for (int i = position; i < count * tile.channel_weights / VECTOR; i += position_threads)
        copy_async(weights + i, packed + i, true);
    }
    if (first == 0) continue;
    const accum_t* stage = stages + (buffer ^ 1) * stage_elements;
    const int count = min(chunk, channels - first + chunk);
    const int taps_w = tile.axis[2].taps;
    for (int tap = 0; tap < taps_w; tap += 4) {
      const accum_t* weights = stage + weights_at + tile.first_kd * tile.shape.taps_h * tile.shape.weight_row + tap * CHANNELS;
      switch (min(4, taps_w - tap)) {
        case 1:
          multiply<1>(sums, stage + tap, quad, weights, count, tile.shape);
          break;
        case 2:
          multiply<2>(sums, stage + tap, quad, weights, count, tile.shape);
          break;
        case 3:
          multiply<3>(sums, stage + tap, quad, weights, count, tile.shape);
          break;
        default:
          multiply<4>(sums, stage + tap, quad, weights, count, tile.shape);
      }
    }
  }

#pragma unroll
  for (int q = 0; q < QUADS; ++q) {
    const int index = tile.first_quad + q * position_threads + position;
    if (index >= tile.end_quad) continue;
    const int row = index / tile.quads_w, first_w = index % tile.quads_w * 4 - tile.shift;
    const int d = tile.axis[0].first_output + row / tile.axis[1].outputs * tile.axis[0].step;
    const int h = tile.axis[1].first_output + row % tile.axis[1].outputs * tile.axis[1].step;
    const index_t w = tile.axis[2].first_output + static_cast<index_t>(first_w) * tile.axis[2].step;
    const index_t step = tile.axis[2].step * output.stride[4];
    scalar_t* y = output.at(tile.n, tile.group * out_channels + first_out, d, h, w);
    const int outputs_w = tile.axis[2].outputs, last_c = out_channels - first_out;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c, y += output.stride[1]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first_w + i >= 0 && first_w + i < outputs_w && c < last_c) y[i * step] = to_scalar(sums[q][i][c]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, 2)
    convt3d_fprop_implicit_gemm_simt_c8(const Problem problem, const View<const scalar_t> input,
                                        const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                        const View<scalar_t> output, const int channel_warps, const int stage_elements,
                                        const int row_slots, const int tiles, const int thread_tiles) {
  implicit_gemm<8>(problem, input, packed_weight, bias, output, channel_warps, stage_elements, row_slots, tiles, thread_tiles);
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, 2)
    convt3d_fprop_implicit_gemm_simt_c4(const Problem problem, const View<const scalar_t> input,
                                        const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                        const View<scalar_t> output, const int channel_warps, const int stage_elements,
                                        const int row_slots, const int tiles, const int thread_tiles) {
  implicit_gemm<4>(problem, input, packed_weight, bias, output, channel_warps, stage_elements, row_slots, tiles, thread_tiles);
}
