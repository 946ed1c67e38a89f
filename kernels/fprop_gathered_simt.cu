/* convt3d
pass = "fprop"
dtypes = ["fp32"]
multiplies_padding = true
[specialize]
ROWS = "rows"
COLUMN_THREADS = "column_threads"
# Channels of the input that one copy brings where they lie together; 0: they do not.
WIDTH = "0 if output_layout == 1 else gcd(in_channels_per_group, 4)"
SPLIT = "is_split"
[constants]
most_taps = "ceil_div(kernel_d, stride_d) * ceil_div(kernel_h, stride_h) * ceil_div(kernel_w, stride_w)"
class_rows = "batch * ceil_div(output_d, stride_d) * ceil_div(output_h, stride_h) * ceil_div(output_w, stride_w)"
# Outputs of a thread: half as many where tiles of 128 would be emptier by a fifth.
rows = "4 if 5 * 64 * ceil_div(class_rows, 64) <= 4 * 128 * ceil_div(class_rows, 128) else 8"
row_tiles = "ceil_div(class_rows, 16 * rows)"
column_tiles = "ceil_div(out_channels_per_group, 128)"
column_threads = "2 * ceil_div(out_channels_per_group, 16 * column_tiles)"
columns = "8 * column_threads * column_tiles"
chunks = "ceil_div(in_channels_per_group, 16)"
# So many parts of the depth that the longest block takes at most a multiprocessor's share of all steps / SPREAD.
tiles = "groups * column_tiles * row_tiles"
parts = "max(1, min(ceil_div(SPREAD * multiprocessors * most_taps, max(1, tiles * taps)), most_taps * chunks // 8, 32)) if SPREAD else 1"
is_split = "1 if parts > 1 else 0"
stage_elements = "16 * rows * 20 + 16 * 8 * column_threads"
[restrictions]
"all((kernel_d >= stride_d, kernel_h >= stride_h, kernel_w >= stride_w, gcd(stride_d, dilation_d) * gcd(stride_h, dilation_h) * gcd(stride_w, dilation_w) == 1))" = "each output must have a tap"
"max(ceil_div(kernel_d, stride_d), ceil_div(kernel_h, stride_h), ceil_div(kernel_w, stride_w)) <= 21" = "a class has at most 21 taps on each axis: which of them lie inside the input is noted in 21 bits"
"out_channels_per_group > 16" = "a tile has at least 32 output channels"
"class_rows < 2 * 1024 * 1024 * 1024 - 128" = "the outputs of a class must be below 2^31"
[search]
SPREAD = [0, 1, 2, 4]
[cost]
steps = "16 * ceil_div(most_taps * chunks, parts)"
products = "16 * rows * 8 * column_threads"
bytes = "(16 * rows + 8 * column_threads) * itemsize"
blocks = "tiles * ceil_div(taps, most_taps) * parts"
[workspace]
packed_weight = "groups * taps * chunks * 16 * columns"
partial_sums = "parts * output_numel if is_split else 0"
[[launch]]
symbol = "convt3d_fprop_gathered_simt_pack"
general = true
packs = "packed_weight"
grid = "ceil_div(groups * taps * chunks * 16 * columns, 256)"
block = 256
[[launch]]
symbol = "convt3d_fprop_gathered_simt"
grid = "stride_d * stride_h * stride_w * parts * tiles"
block = "16 * column_threads"
shared_bytes = "24 * 16 * rows + 4 * 3 * stage_elements"
[[launch]]
symbol = "convt3d_fprop_gathered_simt_add"
general = true
when = "is_split"
grid = "ceil_div(output_numel, 256)"
block = 256
*/
// Implicit GEMM on the CUDA cores whose input rows are gathered, output by output: for layers of few voxels and many channels, where tiles
// of whole rows or planes are mostly empty.
//
// The outputs with the same (o + padding) mod stride on each axis are a class: they have the same taps (AxisClass), so each class is a matrix
// product with a row for each of its outputs in all images, a column for each output channel, and a depth of taps times input channels.
// A block has 16 * ROWS rows and 8 * COLUMN_THREADS columns of one class. A step is 16 channels of one tap: of each row the channels of the
// input that the tap leads to, zeros where it is outside, [row][channel], and the packed weights, [channel][column]; copies of the next two
// steps are on their way while one is multiplied. Of each row a table has the place of its input at offset 0, its output's place, and which
// taps lie inside the input.
//
// A warp has 16 rows x 2 columns of threads, and a thread ROWS outputs, 16 rows apart, of 8 neighbouring channels. It reads four channels of
// each of its rows at once: a row in shared memory is 16 bytes longer than its channels, so that eight of them meet all banks.
//
// Few tiles leave most multiprocessors idle. There each block multiplies a part of its class's steps and stores its sums in memory that
// the parts have each for themselves, in the output's order; a third launch adds them up, part after part, and the bias.
#include "convt3d.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/geometry.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/core/vector.cuh"
#include "convt3d/epilogue/partial_sums.cuh"
#include "convt3d/ptx/beside_launches.cuh"
#include "convt3d/ptx/copy_async.cuh"

// How many blocks at least a multiprocessor's share of the steps is cut into; 0: no block shares its depth.
#ifndef SPREAD
#define SPREAD 2
#endif
// Set by the problem; these are for a look at the compiler's output.
#ifndef ROWS
#define ROWS 8
#endif
#ifndef COLUMN_THREADS
#define COLUMN_THREADS 16
#endif
#ifndef WIDTH
#define WIDTH 4
#endif
#ifndef SPLIT
#define SPLIT 0
#endif

enum { DEPTH = 16, PITCH = DEPTH + 4, RING = 3, MOST_ROWS = 8, TAP_BITS = 21 };

// A row of the product: where the input of its output lies, as far as offsets are 0, and a bit for each tap of an axis that lies inside.
struct alignas(16) GatheredRow {
  index_t input;
  unsigned long long taps;
};

// packed_weight[group][tap][channel in, a multiple of DEPTH][channel out of all tiles], zeros beyond the last of both.
extern "C" __global__ void __launch_bounds__(256)
    convt3d_fprop_gathered_simt_pack(const Problem problem, const View<const scalar_t> weight,
                                     accum_t* __restrict__ packed_weight, const int chunks, const int columns) {
  begin_next();
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int taps = problem.kernel_size[0] * problem.kernel_size[1] * problem.kernel_size[2];
  const index_t place = blockIdx.x * 256LL + threadIdx.x;
  index_t index = place;
  if (index >= static_cast<index_t>(problem.groups) * taps * chunks * DEPTH * columns) return;
  const int co = static_cast<int>(index % columns);
  index /= columns;
  const int ci = static_cast<int>(index % (chunks * DEPTH));
  index /= chunks * DEPTH;
  const int tap = static_cast<int>(index % taps), group = static_cast<int>(index / taps);
  const int kw = tap % problem.kernel_size[2], line = tap / problem.kernel_size[2];
  const bool live = ci < channels && co < out_channels;
  packed_weight[place] =
      live ? *weight.at(group * channels + ci, co, line / problem.kernel_size[1], line % problem.kernel_size[1], kw)
           : accum_t(0);
}

extern "C" __global__ void __launch_bounds__(256)
    convt3d_fprop_gathered_simt_add(const Problem problem, const accum_t* __restrict__ partial_sums,
                                    const scalar_t* __restrict__ bias, const View<scalar_t> output, const int parts) {
  add_partial_sums(problem, partial_sums, {bias}, output, parts);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    convt3d_fprop_gathered_simt(const Problem problem, const View<const scalar_t> input,
                                const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                const View<scalar_t> output, const int rows, const int column_threads, const int row_tiles,
                                const int column_tiles, const int columns, const int chunks, accum_t* __restrict__ partial_sums,
                                const int is_split, const int parts) {
  extern __shared__ uint4 shared[];
  const int own_rows = SPECIALIZED(ROWS, rows), tile_rows = 16 * own_rows;
  const int threads = 16 * SPECIALIZED(COLUMN_THREADS, column_threads), tile_columns = threads / 2;
  GatheredRow* const table = reinterpret_cast<GatheredRow*>(shared);
  index_t* const places = reinterpret_cast<index_t*>(table + tile_rows);
  accum_t* const stages = reinterpret_cast<accum_t*>(places + tile_rows);
  const int stage_elements = tile_rows * PITCH + DEPTH * tile_columns;
  const int thread = static_cast<int>(threadIdx.x);

  // blockIdx.x = (((class * parts + part) * row tiles + row tile) * groups + group) * column tiles + column tile: long ones first.
  unsigned number = blockIdx.x;
  const int first_column = static_cast<int>(number % column_tiles) * tile_columns;
  number /= column_tiles;
  const int group = static_cast<int>(number % problem.groups);
  number /= problem.groups;
  const int first_row = static_cast<int>(number % row_tiles) * tile_rows;
  number /= row_tiles;
  const int part = static_cast<int>(number % parts);
  number /= parts;
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  // Registers are for sums.
  __shared__ AxisClass axis[3];
  __shared__ View<scalar_t> target;
  const bool split = SPECIALIZED(SPLIT, is_split) != 0;
  if (thread == 0) {
#pragma unroll 1
    for (int a = 2; a >= 0; --a) {
      // The class of the axis' tap of that number: no two of the first `stride` taps are in one.
      const index_t tap = number % problem.stride[a];
      axis[a] = axis_class(problem, a, static_cast<int>(tap * problem.dilation[a] % problem.stride[a]));
      number /= problem.stride[a];
    }
    target = split ? part_of(output, problem, partial_sums, part) : output;
  }
  __syncthreads();
  const index_t count = static_cast<index_t>(problem.batch) * axis[0].outputs * axis[1].outputs * axis[2].outputs;
  if (first_row >= count) return;  // the whole block: classes differ in size

#pragma unroll 1
  for (int row = thread; row < tile_rows; row += threads) {
    GatheredRow gathered{0, 0};
    index_t place = -1;
    if (first_row + row < count) {
      int rest = first_row + row;
      place = 0;
#pragma unroll
      for (int a = 2; a >= 0; --a) {
        const int o = axis[a].first_output + rest % axis[a].outputs * problem.stride[a];
        rest /= axis[a].outputs;
        const int q = static_cast<int>((static_cast<index_t>(o) + problem.padding[a]) / problem.stride[a]);
        gathered.input += q * input.stride[2 + a];
        place += o * target.stride[2 + a];
#pragma unroll 1
        for (int j = 0; j < axis[a].taps; ++j) {
          const int i = q - (axis[a].first_offset + j * axis[a].offset_step);
          if (i >= 0 && i < problem.input_size[a]) gathered.taps |= 1ULL << (TAP_BITS * a + j);
        }
      }
      gathered.input += rest * input.stride[0];
      place += rest * target.stride[0];
    }
    table[row] = gathered;
    places[row] = place;
  }
  __syncthreads();
  wait_for_launch_before();

  // Of the class's steps, tap by tap of each chunk of channels, those from `step` on are the block's.
  const int taps = axis[0].taps * axis[1].taps * axis[2].taps;
  const index_t steps = static_cast<index_t>(taps) * chunks;
  int left = static_cast<int>(steps * (part + 1) / parts - steps * part / parts);
  int next_tap = static_cast<int>(steps * part / parts % taps), next_chunk = static_cast<int>(steps * part / parts / taps);
  const auto comes_in = [&](int length) {
    return WIDTH >= length && channels % length == 0 && made_of_vectors(input, 1, length);
  };
  const int width = comes_in(4) ? 4 : comes_in(2) ? 2 : comes_in(1) ? 1 : 0;
  const scalar_t* const volumes = input.data + static_cast<index_t>(group) * channels * input.stride[1];
  const accum_t* const weights = packed_weight +
                                 static_cast<index_t>(group) * problem.kernel_size[0] * problem.kernel_size[1] *
                                     problem.kernel_size[2] * chunks * DEPTH * columns +
                                 first_column;
  const auto copy_next = [&](int slot) {
    accum_t* const stage = stages + slot * stage_elements;
    const int tap[3] = {next_tap / axis[2].taps / axis[1].taps, next_tap / axis[2].taps % axis[1].taps,
                        next_tap % axis[2].taps};
    const int first = next_chunk * DEPTH;
    index_t offset = first * input.stride[1], tap_number = 0;
    unsigned long long wanted = 0;
#pragma unroll
    for (int a = 0; a < 3; ++a) {
      offset -= (axis[a].first_offset + tap[a] * axis[a].offset_step) * input.stride[2 + a];
      tap_number = tap_number * problem.kernel_size[a] + axis[a].first_tap + tap[a] * axis[a].tap_step;
      wanted |= 1ULL << (TAP_BITS * a + tap[a]);
    }
    const scalar_t* const source = volumes + offset;
    // Four channels of a row, in pieces of `piece`.
    const auto copy = [&](int row, int k, auto piece) {
      typedef decltype(piece) Piece;
      constexpr int LENGTH = sizeof(Piece) / sizeof(scalar_t);
      const GatheredRow gathered = table[row];
      const bool inside = (gathered.taps & wanted) == wanted;
      const scalar_t* from = source + gathered.input + k * input.stride[1];
#pragma unroll
      for (int e = 0; e < 4; e += LENGTH) {
        const bool live = inside && first + k + e < channels;
        copy_async(reinterpret_cast<Piece*>(stage + row * PITCH + k + e),
                   reinterpret_cast<const Piece*>(live ? from + e * input.stride[1] : input.data), live);
      }
    };
    const int again = computed_anew(thread);
    if (WIDTH > 0 && width > 0) {  // neighbouring lanes have neighbouring channels
#pragma unroll 4
      for (int unit = again; unit < tile_rows * 4; unit += threads) {
        if (WIDTH == 4 && width == 4) {
          copy(unit / 4, unit % 4 * 4, Vector<4>());
        } else if (WIDTH >= 2 && width == 2) {
          copy(unit / 4, unit % 4 * 4, Vector<2>());
        } else {
          copy(unit / 4, unit % 4 * 4, Vector<1>());
        }
      }
    } else {  // neighbouring lanes have neighbouring rows
#pragma unroll 2
      for (int unit = again; unit < tile_rows * 4; unit += threads) copy(unit % tile_rows, unit / tile_rows * 4, Vector<1>());
    }
    const accum_t* const packed = weights + (tap_number * chunks * DEPTH + first) * columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int k = again / (tile_columns / 4) + half * (DEPTH / 2), column = again % (tile_columns / 4) * 4;
      copy_async(reinterpret_cast<Vector<4>*>(stage + tile_rows * PITCH + k * tile_columns + column),
                 reinterpret_cast<const Vector<4>*>(packed + k * columns + column), true);
    }
    if (++next_tap == taps) {
      next_tap = 0;
      ++next_chunk;
    }
  };

  accum_t sums[MOST_ROWS][8];
#pragma unroll
  for (int r = 0; r < own_rows; ++r) {
#pragma unroll
    for (int c = 0; c < 8; ++c) sums[r][c] = accum_t(0);
  }
  int waiting = left;  // steps that are not copied yet
#pragma unroll
  for (int s = 0; s + 1 < RING; ++s) {
    if (waiting > 0) copy_next(s);
    --waiting;
    cp_async_commit();
  }
  const int lane_row = thread % 16, own_columns = thread / 16 * 8;
#pragma unroll 1
  for (int slot = 0; left > 0; --left) {
    cp_async_wait<RING - 2>();
    __syncthreads();  // the step to be multiplied has landed, and the one before it has been read
    if (waiting-- > 0) copy_next(slot == 0 ? RING - 1 : slot - 1);
    cp_async_commit();
    const accum_t* const by_row = stages + slot * stage_elements + lane_row * PITCH;
    const accum_t* const by_channel = stages + slot * stage_elements + tile_rows * PITCH + own_columns;
    slot = slot + 1 == RING ? 0 : slot + 1;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 4) {
#pragma unroll
      for (int h = 0; h < own_rows; h += 4) {
        Vector<4> x[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) x[r] = *reinterpret_cast<const Vector<4>*>(by_row + (h + r) * 16 * PITCH + k);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Vector<4> w[2] = {*reinterpret_cast<const Vector<4>*>(by_channel + (k + e) * tile_columns),
                                  *reinterpret_cast<const Vector<4>*>(by_channel + (k + e) * tile_columns + 4)};
#pragma unroll
          for (int c = 0; c < 8; ++c) {
#pragma unroll
            for (int r = 0; r < 4; ++r) sums[h + r][c] += x[r].element[e] * w[c / 4].element[c % 4];
          }
        }
      }
    }
  }

  const Epilogue epilogue{split ? nullptr : bias};
  const int first_channel = first_column + own_columns;
  const bool vectors = target.stride[1] == 1 && out_channels % 4 == 0 && made_of_vectors(target, 1, 4);
  accum_t start[8];
#pragma unroll
  for (int c = 0; c < 8; ++c)
    start[c] = epilogue.start(static_cast<index_t>(group) * out_channels + first_channel + c, first_channel + c < out_channels);
#pragma unroll
  for (int r = 0; r < own_rows; ++r) {
    const index_t place = places[lane_row + 16 * r];
    if (place < 0) continue;
    scalar_t* const y = target.data + place + (static_cast<index_t>(group) * out_channels + first_channel) * target.stride[1];
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      if (vectors) {
        if (first_channel + half >= out_channels) continue;
        Vector<4> piece;
#pragma unroll
        for (int c = 0; c < 4; ++c) piece.element[c] = epilogue.finish(sums[r][half + c], start[half + c]);
        *reinterpret_cast<Vector<4>*>(y + half) = piece;
      } else {
#pragma unroll
        for (int c = half; c < half + 4; ++c) {
          if (first_channel + c < out_channels) y[c * target.stride[1]] = epilogue.finish(sums[r][c], start[c]);
        }
      }
    }
  }
}
