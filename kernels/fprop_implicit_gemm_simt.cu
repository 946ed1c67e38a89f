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
thread_channels = "4 if out_channels_per_group <= 4 else 16 if min(ceil_div(out_channels_per_group, 12) * 12, ceil_div(out_channels_per_group, 8) * 8) >= ceil_div(out_channels_per_group, 16) * 16 else 12 if ceil_div(out_channels_per_group, 8) * 8 >= ceil_div(out_channels_per_group, 12) * 12 else 8"
thread_tiles = "ceil_div(out_channels_per_group, thread_channels)"
channel_warps = "4 if thread_tiles % 4 == 0 else 3 if thread_tiles % 3 == 0 else 2 if thread_tiles % 2 == 0 else 1 if thread_tiles == 1 else 3"
channel_tiles = "ceil_div(thread_tiles, channel_warps)"
tile_channels = "thread_channels * channel_warps"
position_warps = "BLOCK_WARPS // channel_warps"
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
channel_elements = "rows * pitch + taps_d * taps_h * taps_w * tile_channels"
stage_elements = "max(channel_elements, min(in_channels_per_group * channel_elements, STAGE_BYTES // itemsize // 4 * 4))"
row_slots = "ceil_div(rows, 2) * 2"
block_bytes = "8 * row_slots + 2 * stage_elements * itemsize"
[restrictions]
"max(stride_d * spread_d, stride_h * spread_h, stride_w * spread_w) < 2 * 1024 * 1024 * 1024" = "the least common multiple of stride and dilation must be below 2^31 on each axis"
"block_bytes <= 98 * 1024" = "one channel's input rows and weights, twice, must fit the 99 KiB of shared memory that every GPU has"
[workspace]
packed_weight = "in_channels * taps * channel_tiles * tile_channels"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt_pack"
grid = "ceil_div(in_channels * taps * channel_tiles * tile_channels, 256)"
block = 256
packs = "packed_weight"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt_untouched"
when = "dead_outputs"
grid = "batch * out_channels * output_d"
block = 256
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt_c16"
when = "thread_channels == 16"
grid = "classes * batch * groups * tiles * channel_tiles"
block = "threads"
shared_bytes = "block_bytes"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_simt_c12"
when = "thread_channels == 12"
grid = "classes * batch * groups * tiles * channel_tiles"
block = "threads"
shared_bytes = "block_bytes"
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
// A block owns TILE quads (4 neighbouring a along w) of one such class, counted over d, h and w without regard to rows or planes, so
// that only the last block has a tail, times channel_warps * THREAD_CHANNELS output channels. Channel by channel of the input it
// stages every input row the tile needs, halo and zeros included, and the packed weights; all taps then read from shared memory.
// While one stage is multiplied, cp.async fills the other.
//
// A thread owns THREAD_QUADS quads x THREAD_CHANNELS channels. For one row of taps it reads 8 inputs of each quad (two 16-byte
// loads) and, for each tap, the weights, which all lanes share (16-byte broadcasts): 16 loads for 384 multiply-adds at 3 taps.
#include "convt3d.cuh"
#include "convt3d/copy_async.cuh"

#ifndef THREAD_QUADS
#define THREAD_QUADS 2
#endif
#ifndef BLOCK_WARPS
#define BLOCK_WARPS 6
#endif
#ifndef STAGE_BYTES
#define STAGE_BYTES 32768
#endif

constexpr int QUADS = sizeof(accum_t) == 4 ? THREAD_QUADS : 1;  // fp64 sums take two registers each
constexpr int VECTOR = 16 / sizeof(accum_t);
static_assert(BLOCK_WARPS >= 4 && BLOCK_WARPS <= 8,
              "up to 4 warps share the channels, and the thread sanitizer takes 256 threads");

struct alignas(16) Vector {
  accum_t element[VECTOR];
};

// The outputs first_output + a*step of one axis, for a in [0, outputs): the k-th of the class's taps, counted from the last, reads
// input origin + (a + k)*spread. Classes are numbered by their first tap, those with the most taps first.
struct DenseAxis {
  int first_output, step, outputs, taps, taps_before, spread, origin;
};

__device__ inline int greatest_common_divisor(int a, int b) {
  while (b != 0) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

__device__ inline DenseAxis dense_axis(const Problem& problem, int axis, int index) {
  const int stride = problem.stride[axis], dilation = problem.dilation[axis], kernel = problem.kernel_size[axis];
  const int padding = problem.padding[axis], divisor = greatest_common_divisor(stride, dilation), tap_step = stride / divisor;
  DenseAxis result;
  result.spread = dilation / divisor;
  result.step = stride * result.spread;
  const int first_tap = index / result.spread, scaled = first_tap * dilation;
  const int residue = scaled % stride + stride * (index % result.spread);  // of o + padding, mod step
  result.first_output = (residue - padding % result.step + result.step) % result.step;
  const int beyond = problem.output_size[axis] - result.first_output;
  result.outputs = beyond > 0 ? (beyond - 1) / result.step + 1 : 0;
  result.taps = (kernel - 1 - first_tap) / tap_step + 1;
  result.taps_before =
      first_tap * (kernel / tap_step) + min(first_tap, kernel % tap_step);  // of the classes before, in the packing
  result.origin = (result.first_output + padding - scaled) / stride - result.spread * (result.taps - 1);
  return result;
}

// packed_weight[group][channel tile][class's taps before][ci][the class's taps from the last][channel of the tile], zero beyond the
// last channel. A block's stage is one contiguous piece of it.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_fprop_implicit_gemm_simt_pack(const Problem problem, const View<const scalar_t> weight,
                                          accum_t* __restrict__ packed_weight, const int channel_tiles,
                                          const int tile_channels) {
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int taps = problem.kernel_size[0] * problem.kernel_size[1] * problem.kernel_size[2];
  index_t index = blockIdx.x * 256LL + threadIdx.x;
  if (index >= static_cast<index_t>(problem.in_channels) * taps * channel_tiles * tile_channels) return;
  const int lane = static_cast<int>(index % tile_channels);
  index /= tile_channels;
  int tap[3], class_taps[3], before[3], position[3];
  for (int a = 2; a >= 0; --a) {
    const int kernel = problem.kernel_size[a];
    tap[a] = static_cast<int>(index % kernel);
    index /= kernel;
    const int step = problem.stride[a] / greatest_common_divisor(problem.stride[a], problem.dilation[a]), first = tap[a] % step;
    class_taps[a] = (kernel - 1 - first) / step + 1;
    before[a] = first * (kernel / step) + min(first, kernel % step);
    position[a] = class_taps[a] - 1 - tap[a] / step;
  }
  const int ci = static_cast<int>(index % channels);
  const index_t tile = index / channels;  // group * channel_tiles + channel tile
  const int co = static_cast<int>(tile % channel_tiles) * tile_channels + lane;
  const int group = static_cast<int>(tile / channel_tiles);
  const index_t taps_before =
      (static_cast<index_t>(before[0]) * problem.kernel_size[1] + class_taps[0] * before[1]) * problem.kernel_size[2] +
      class_taps[0] * class_taps[1] * before[2];
  const index_t row = (tile * taps + taps_before) * channels +
                      static_cast<index_t>(ci) * class_taps[0] * class_taps[1] * class_taps[2] +
                      (position[0] * class_taps[1] + position[1]) * class_taps[2] + position[2];
  packed_weight[row * tile_channels + lane] =
      co < out_channels ? to_accum(*weight.at(group * channels + ci, co, tap[0], tap[1], tap[2])) : accum_t(0);
}

__device__ inline bool has_tap(const Problem& problem, int axis, int output) {
  const int stride = problem.stride[axis], residue = (output + problem.padding[axis]) % stride;
  const int taps = min(problem.kernel_size[axis], stride);
  int scaled = 0;  // tap * dilation mod stride
  for (int tap = 0; tap < taps; ++tap, scaled = (scaled + problem.dilation[axis] % stride) % stride) {
    if (scaled == residue) return true;
  }
  return false;
}

// Outputs that no tap reaches are the bias. A block owns one plane (n, co, d).
extern "C" __global__ void __launch_bounds__(256)
    convt3d_fprop_implicit_gemm_simt_untouched(const Problem problem, const scalar_t* __restrict__ bias,
                                               const View<scalar_t> output) {
  const int d = static_cast<int>(blockIdx.x % problem.output_size[0]);
  const int co = static_cast<int>(blockIdx.x / problem.output_size[0] % problem.out_channels);
  const int n = static_cast<int>(blockIdx.x / problem.output_size[0] / problem.out_channels);
  const scalar_t value = bias != nullptr ? bias[co] : to_scalar(accum_t(0));
  const bool plane_has_tap = has_tap(problem, 0, d);
  const int rows = problem.output_size[1], columns = problem.output_size[2];
  const int threads_w = min(columns, 256), threads_h = 256 / threads_w;
  const int first_h = static_cast<int>(threadIdx.x) / threads_w;
  if (first_h >= threads_h) return;
  for (int w = static_cast<int>(threadIdx.x) % threads_w; w < columns; w += threads_w) {
    const bool column_has_tap = has_tap(problem, 2, w);
    for (int h = first_h; h < rows; h += threads_h) {
      if (!(plane_has_tap && column_has_tap && has_tap(problem, 1, h))) *output.at(n, co, d, h, w) = value;
    }
  }
}

// The taps of a class and the layout of a stage: elements of a staged row, from one kd and from one channel to the next.
struct StageShape {
  int taps_d, taps_h, taps_w, pitch, segment, plane, tile_channels;
};

// sums += TAPS neighbouring taps of each row of taps, for all channels of a stage.
template <int TAPS, int CHANNELS>
__device__ __forceinline__ void multiply(accum_t (&sums)[QUADS][4][CHANNELS], const accum_t* inputs, const int (&quad)[QUADS],
                                         const accum_t* weights, int channels, const StageShape& shape) {
  constexpr int WIDTH = TAPS == 1 ? 4 : 8;
  const int next_row = shape.taps_w * shape.tile_channels;
#pragma unroll 1
  for (int ci = 0; ci < channels; ++ci, inputs += shape.plane) {
#pragma unroll 1
    for (int kd = 0; kd < shape.taps_d; ++kd) {
      const accum_t* row = inputs + kd * shape.segment;
#pragma unroll 1
      for (int kh = 0; kh < shape.taps_h; ++kh, row += shape.pitch, weights += next_row) {
        accum_t x[QUADS][WIDTH];
#pragma unroll
        for (int q = 0; q < QUADS; ++q) {
#pragma unroll
          for (int i = 0; i < WIDTH; i += VECTOR) {
            const Vector loaded = *reinterpret_cast<const Vector*>(row + quad[q] + i);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) x[q][i + e] = loaded.element[e];
          }
        }
        const accum_t* tap = weights;
#pragma unroll
        for (int t = 0; t < TAPS; ++t, tap += shape.tile_channels) {
#pragma unroll
          for (int c = 0; c < CHANNELS; c += VECTOR) {
            const Vector w = *reinterpret_cast<const Vector*>(tap + c);
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
      }
    }
  }
}

// Which outputs a block owns, and the layout of its stages. Kept in shared memory: registers are for the sums.
struct Tile {
  DenseAxis axis[3];
  int n, group, channel_tile, first_quad, end_quad, quads_w;
  // Where input rows are whole 16-byte vectors, quads begin `shift` outputs early, so that staged rows begin on a vector too.
  bool whole_vectors;
  int shift;
  // Staged rows are counted through planes of h + halo rows. The rows that one kd reads are a segment; where segments would overlap
  // they share their rows.
  int plane_rows, first_plane_row, segment, rows, pitch, tap_elements, chunk;
  index_t volume, weights;  // the first elements of this block's input channels and packed weights
};

__device__ inline bool rows_are_vectors(const Problem& problem, const View<const scalar_t>& input, const DenseAxis& w) {
  bool whole = reinterpret_cast<index_t>(input.data) % 16 == 0 && problem.input_size[2] % VECTOR == 0;
  for (int i = 0; i < 4; ++i) whole = whole && input.stride[i] % VECTOR == 0;
  return whole && input.stride[4] == 1 && w.spread == 1;
}

__device__ inline void find_tile(Tile& tile, const Problem& problem, const View<const scalar_t>& input, int tile_quads,
                                 int tile_channels, int stage_elements, int tiles, int channel_tiles) {
  // blockIdx.x = (((class * batch + n) * groups + group) * tiles + tile) * channel_tiles + channel tile
  unsigned block = blockIdx.x;
  tile.channel_tile = static_cast<int>(block % channel_tiles);
  block /= channel_tiles;
  tile.first_quad = static_cast<int>(block % tiles) * tile_quads;
  block /= tiles;
  tile.group = static_cast<int>(block % problem.groups);
  block /= problem.groups;
  tile.n = static_cast<int>(block % problem.batch);
  block /= problem.batch;
  for (int a = 2; a >= 0; --a) {
    const int divisor = greatest_common_divisor(problem.stride[a], problem.dilation[a]);
    const int classes = min(problem.kernel_size[a], problem.stride[a] / divisor) * (problem.dilation[a] / divisor);
    tile.axis[a] = dense_axis(problem, a, static_cast<int>(block % classes));
    block /= classes;
  }
  const DenseAxis &d = tile.axis[0], &h = tile.axis[1], &w = tile.axis[2];
  tile.shift = (w.origin % VECTOR + VECTOR) % VECTOR;
  const int quads_w = (w.outputs + 3) / 4, shifted_quads = (w.outputs + tile.shift + 3) / 4;
  tile.whole_vectors = rows_are_vectors(problem, input, w) && shifted_quads - quads_w <= quads_w / 16;
  if (!tile.whole_vectors) tile.shift = 0;
  tile.axis[2].origin -= tile.shift;
  tile.quads_w = tile.whole_vectors ? shifted_quads : quads_w;
  tile.end_quad = min(tile.first_quad + tile_quads, d.outputs * h.outputs * tile.quads_w);
  if (tile.first_quad >= tile.end_quad) return;

  const int first_row = tile.first_quad / tile.quads_w, last_row = (tile.end_quad - 1) / tile.quads_w;
  tile.plane_rows = h.outputs + h.taps - 1;
  tile.first_plane_row = first_row / h.outputs * tile.plane_rows + first_row % h.outputs;
  const int span = last_row / h.outputs * tile.plane_rows + last_row % h.outputs - tile.first_plane_row + h.taps;
  tile.segment = min(tile.plane_rows, span);
  tile.rows = (d.taps - 1) * tile.segment + span;
  tile.pitch = (4 * tile.quads_w + w.taps + 2) / 4 * 4;
  const int channels = problem.in_channels / problem.groups;
  tile.tap_elements = d.taps * h.taps * w.taps * tile_channels;
  tile.chunk = min(channels, stage_elements / (tile.rows * tile.pitch + tile.tap_elements));
  tile.volume = tile.n * input.stride[0] + static_cast<index_t>(tile.group) * channels * input.stride[1];

  const int* kernel = problem.kernel_size;
  const index_t taps_before =
      (static_cast<index_t>(d.taps_before) * kernel[1] + d.taps * h.taps_before) * kernel[2] + d.taps * h.taps * w.taps_before;
  const index_t channel_tile = static_cast<index_t>(tile.group) * channel_tiles + tile.channel_tile;
  tile.weights = (channel_tile * kernel[0] * kernel[1] * kernel[2] + taps_before) * channels * tile_channels;
}

constexpr index_t NO_ROW = -0x7fffffffffffffffLL;

// Copy the input rows of `count` channels, a Unit (one element, or 16 bytes of them) at a time. Threads share the columns of a row
// in equal passes of at most 32.
template <class Unit>
__device__ inline void stage_rows(const Tile& tile, const Problem& problem, const View<const scalar_t>& input,
                                  const index_t* row_offset, int first_channel, int count, accum_t* stage) {
  constexpr int WIDTH = sizeof(Unit) / sizeof(accum_t);
  const int units = tile.pitch / WIDTH, passes = (units + 31) / 32, threads_w = (units + passes - 1) / passes;
  const int threads_h = static_cast<int>(blockDim.x) / threads_w, thread_h = static_cast<int>(threadIdx.x) / threads_w;
  if (thread_h >= threads_h) return;
  const int plane = tile.rows * tile.pitch;
  const scalar_t* volume = input.data + tile.volume + first_channel * input.stride[1];
  for (int unit = static_cast<int>(threadIdx.x) - thread_h * threads_w; unit < units; unit += threads_w) {
    const int w = tile.axis[2].origin + tile.axis[2].spread * unit * WIDTH;
    const bool inside = w >= 0 && w < problem.input_size[2];
    const index_t column = w * input.stride[4];
    accum_t* row_copy = stage + thread_h * tile.pitch + unit * WIDTH;
#pragma unroll 1
    for (int row = thread_h; row < tile.rows; row += threads_h, row_copy += threads_h * tile.pitch) {
      const index_t offset = row_offset[row];
      const bool live = inside && offset != NO_ROW;
      const scalar_t* source = live ? volume + (offset + column) : input.data;
      accum_t* copy = row_copy;
#pragma unroll 1
      for (int ci = 0; ci < count; ++ci, copy += plane, source += live ? input.stride[1] : 0) {
        copy_async(reinterpret_cast<Unit*>(copy), reinterpret_cast<const Unit*>(source), live);
      }
    }
  }
}

// Copy what of up to `chunk` channels the tile needs: input rows, then packed weights.
__device__ inline void stage_channels(const Tile& tile, const Problem& problem, const View<const scalar_t>& input,
                                      const accum_t* packed_weight, const index_t* row_offset, int first_channel,
                                      accum_t* stage) {
  const int count = min(tile.chunk, problem.in_channels / problem.groups - first_channel);
  if (tile.whole_vectors) {
    stage_rows<Vector>(tile, problem, input, row_offset, first_channel, count, stage);
  } else {
    stage_rows<accum_t>(tile, problem, input, row_offset, first_channel, count, stage);
  }
  Vector* weights = reinterpret_cast<Vector*>(stage + tile.chunk * tile.rows * tile.pitch);
  const Vector* source =
      reinterpret_cast<const Vector*>(packed_weight + tile.weights + static_cast<index_t>(first_channel) * tile.tap_elements);
  const int vectors = count * tile.tap_elements / VECTOR;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < vectors; i += static_cast<int>(blockDim.x))
    copy_async(weights + i, source + i, true);
}

template <int CHANNELS>
__device__ __forceinline__ void implicit_gemm(const Problem& problem, const View<const scalar_t>& input,
                                              const accum_t* packed_weight, const scalar_t* bias, const View<scalar_t>& output,
                                              int channel_warps, int stage_elements, int row_slots, int tiles,
                                              int channel_tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Tile tile;
  index_t* row_offset = reinterpret_cast<index_t*>(shared);
  accum_t* stages = reinterpret_cast<accum_t*>(shared + 8 * row_slots);
  const int threads = static_cast<int>(blockDim.x), position_threads = threads / channel_warps;
  const int tile_channels = CHANNELS * channel_warps;
  if (threadIdx.x == 0) {
    find_tile(tile, problem, input, position_threads * QUADS, tile_channels, stage_elements, tiles, channel_tiles);
  }
  __syncthreads();
  if (tile.first_quad >= tile.end_quad) return;  // the whole block: classes differ in size

  for (int row = static_cast<int>(threadIdx.x); row < tile.rows; row += threads) {
    const int kd = min(row / tile.segment, tile.axis[0].taps - 1);
    const int padded = tile.first_plane_row + kd * (tile.plane_rows - tile.segment) + row;
    const int d = tile.axis[0].origin + tile.axis[0].spread * (padded / tile.plane_rows);
    const int h = tile.axis[1].origin + tile.axis[1].spread * (padded % tile.plane_rows);
    const bool live = d >= 0 && d < problem.input_size[0] && h >= 0 && h < problem.input_size[1];
    row_offset[row] = live ? d * input.stride[2] + h * input.stride[3] : NO_ROW;
  }

  // A warp has 32 quads, and the same again position_threads further on; quads past the end compute the first one again.
  const int warp = static_cast<int>(threadIdx.x) / 32, position_warps = position_threads / 32;
  const int position = warp % position_warps * 32 + static_cast<int>(threadIdx.x) % 32,
            thread_channel = warp / position_warps * CHANNELS;
  int quad[QUADS];
  for (int q = 0; q < QUADS; ++q) {
    const int number = tile.first_quad + q * position_threads + position,
              index = number < tile.end_quad ? number : tile.first_quad;
    const int row = index / tile.quads_w, h = tile.axis[1].outputs;
    quad[q] = (row / h * tile.plane_rows + row % h - tile.first_plane_row) * tile.pitch + index % tile.quads_w * 4;
  }
  const int out_channels = problem.out_channels / problem.groups,
            first_out = tile.channel_tile * tile_channels + thread_channel;
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

  const int channels = problem.in_channels / problem.groups, chunk = tile.chunk, plane = tile.rows * tile.pitch;
  const StageShape shape = {
      tile.axis[0].taps, tile.axis[1].taps, tile.axis[2].taps, tile.pitch, tile.segment * tile.pitch, plane, tile_channels};
  for (int first = 0; first < channels + chunk; first += chunk) {
    accum_t* filled = stages + first / chunk % 2 * stage_elements;
    const accum_t* landed = stages + (first / chunk + 1) % 2 * stage_elements;
    wait_for_copies();
    __syncthreads();  // the stage copied in the last round has landed, and the one before it has been read
    if (first < channels) stage_channels(tile, problem, input, packed_weight, row_offset, first, filled);
    if (first == 0) continue;
    const int count = min(chunk, channels - first + chunk);
    for (int tap = 0; tap < shape.taps_w; tap += 4) {
      const accum_t *inputs = landed + tap, *weights = landed + chunk * plane + tap * tile_channels + thread_channel;
      switch (min(4, shape.taps_w - tap)) {
        case 1:
          multiply<1>(sums, inputs, quad, weights, count, shape);
          break;
        case 2:
          multiply<2>(sums, inputs, quad, weights, count, shape);
          break;
        case 3:
          multiply<3>(sums, inputs, quad, weights, count, shape);
          break;
        default:
          multiply<4>(sums, inputs, quad, weights, count, shape);
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
    convt3d_fprop_implicit_gemm_simt_c16(const Problem problem, const View<const scalar_t> input,
                                         const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                         const View<scalar_t> output, const int channel_warps, const int stage_elements,
                                         const int row_slots, const int tiles, const int channel_tiles) {
  implicit_gemm<16>(problem, input, packed_weight, bias, output, channel_warps, stage_elements, row_slots, tiles,
                    channel_tiles);
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, 2)
    convt3d_fprop_implicit_gemm_simt_c12(const Problem problem, const View<const scalar_t> input,
                                         const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                         const View<scalar_t> output, const int channel_warps, const int stage_elements,
                                         const int row_slots, const int tiles, const int channel_tiles) {
  implicit_gemm<12>(problem, input, packed_weight, bias, output, channel_warps, stage_elements, row_slots, tiles,
                    channel_tiles);
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, 2)
    convt3d_fprop_implicit_gemm_simt_c8(const Problem problem, const View<const scalar_t> input,
                                        const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                        const View<scalar_t> output, const int channel_warps, const int stage_elements,
                                        const int row_slots, const int tiles, const int channel_tiles) {
  implicit_gemm<8>(problem, input, packed_weight, bias, output, channel_warps, stage_elements, row_slots, tiles, channel_tiles);
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, 2)
    convt3d_fprop_implicit_gemm_simt_c4(const Problem problem, const View<const scalar_t> input,
                                        const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                        const View<scalar_t> output, const int channel_warps, const int stage_elements,
                                        const int row_slots, const int tiles, const int channel_tiles) {
  implicit_gemm<4>(problem, input, packed_weight, bias, output, channel_warps, stage_elements, row_slots, tiles, channel_tiles);
}
