/* convt3d
pass = "fprop"
dtypes = ["fp32"]
multiplies_padding = true
[specialize]
KERNEL_H = "kernel_h"
KERNEL_W = "kernel_w"
STRIDE_H = "stride_h"
STRIDE_W = "stride_w"
DILATION_H = "dilation_h"
DILATION_W = "dilation_w"
PADDING_H = "padding_h"
PADDING_W = "padding_w"
OUT_CHANNELS = "out_channels_per_group"
LENGTH_H = "run_h"
LENGTH_W = "run_w"
PARTS = "parts"
FOURS = "fours"
[constants]
fours = "1 if in_channels_per_group % 4 == 0 else 0"
lead_h = "padding_h % stride_h"
lead_w = "padding_w % stride_w"
halo_h = "((kernel_h - 1) * dilation_h - lead_h) // stride_h + (1 if lead_h > 0 else 0)"
halo_w = "((kernel_w - 1) * dilation_w - lead_w) // stride_w + (1 if lead_w > 0 else 0)"
residues = "stride_h * stride_w * out_channels_per_group"
run_w = "4 if RUN_W >= 4 and 4 * residues <= SUMS else 2 if RUN_W >= 2 and 2 * residues <= SUMS else 1"
run_h = "max(1, min(RUN_H, SUMS // (residues * run_w), INPUTS // (run_w + halo_w) - halo_h))"
columns = "ceil_div(output_w, stride_w * run_w)"
runs = "ceil_div(output_h, stride_h * run_h)"
positions = "ceil_div(output_d, stride_d) * runs * columns"
quads = "ceil_div(in_channels_per_group, 4)"
taps_d = "ceil_div(kernel_d, stride_d // gcd(stride_d, dilation_d))"
taps_h = "ceil_div(kernel_h, stride_h // gcd(stride_h, dilation_h))"
taps_w = "ceil_div(kernel_w, stride_w // gcd(stride_w, dilation_w))"
# One after the other rounding errors of many products add up: a part has less than 500 of an output's, as long as it has four channels.
products = "in_channels_per_group * taps_d * taps_h * taps_w"
least_parts = "1 if products < 500 else 2 if products < 1000 else 4 if products < 2000 else 8 if products < 4000 else 16"
most_parts = "16 if quads >= 16 else 8 if quads >= 8 else 4 if quads >= 4 else 2 if quads >= 2 else 1"
parts = "min(most_parts, max(CHANNEL_PARTS, least_parts))"
block_positions = "THREADS // parts"
tiles = "ceil_div(positions, block_positions)"
quad_bytes = "16 * (taps_d * kernel_h * 4 * ceil_div(kernel_w * out_channels_per_group, 4) + 1)"
chunk_quads = "min(quads, parts * max(1, 48 * 1024 // (parts * quad_bytes)))"
row_sums = "run_w * stride_w * out_channels_per_group"
part_pitch = "block_positions * (row_sums // 2 * 2 + 1) + 4"
weight_bytes = "chunk_quads * quad_bytes"
stage_bytes = "16 * ceil_div(part_pitch * parts, 4)"
shared_bytes = "weight_bytes + stage_bytes + 16 * block_positions"
# A block has its weights for up to 64 tiles: so many that the blocks fill the GPU BLOCKS times, or evenly where that is not possible.
resident_blocks = "RESIDENT_WARPS * 32 // THREADS * multiprocessors"
volumes = "max(1, batch * groups * stride_d)"
filling = "BLOCKS * resident_blocks // volumes"
least_streams = "min(tiles, max(ceil_div(tiles, 64), filling if filling >= 4 else ceil_div(4 * resident_blocks, volumes)))"
block_tiles = "ceil_div(tiles, least_streams)"
streams = "ceil_div(tiles, block_tiles)"
[restrictions]
"out_channels_per_group <= 7" = "it is for at most 7 output channels a group: a thread has the sums of all of them"
"kernel_w * out_channels_per_group <= 64" = "the weights of a row of taps are in registers: at most 64, over all output channels"
"residues <= 64" = "a thread owns all residues of h and w: their strides' product must be at most 64 output channels"
"(run_h + halo_h) * (run_w + halo_w) <= 64" = "a plane's inputs are in registers: the taps of h and w must reach over few of them"
"shared_bytes <= 98 * 1024" = "the weights of 4 channels for each part must fit the 99 KiB of shared memory that every GPU has"
"positions <= 2000000000" = "it counts the outputs of a class in 32 bits"
[search]
CHANNEL_PARTS = [1, 2, 4, 8]
RUN_H = [2, 4]
RUN_W = [2, 4]
BLOCKS = [1, 2]
RESIDENT_WARPS = [8, 12, 16]
[cost]
steps = "block_tiles * ceil_div(in_channels_per_group, parts) * taps_d"
products = "min(THREADS, parts * positions) * run_h * run_w * kernel_h * kernel_w * out_channels_per_group"
bytes = "THREADS * (run_h + halo_h) * (run_w + halo_w) * itemsize"
[[launch]]
grid = "batch * groups * streams * stride_d"
block = "THREADS"
shared_bytes = "shared_bytes"
*/
// One to seven output channels. A matrix product's tile would be empty for the most part, and so would the GPU where outputs are few: here
// a thread has all output channels of neighbouring outputs, and a block's threads share the input channels.
//
// Along d o + padding = q*stride + r, and tap t feeds o through input q - (t*dilation - r)/stride; along h and w the same holds for
// o + padding % stride, so that runs of q begin where the output does. A block has one residue of d and a tile of positions (d, run of h,
// run of w); a thread has one of these, all residues of h and w and the output channels of it, and every PARTS-th input channel:
//
//   sums[o][co] = sum over its ci, kd, kh and kw of input[ci, ...] * weight[ci, co, kd, kh, kw]
//
// For a plane of a channel it reads the inputs of its run, halo and all, straight from memory (the L1 cache holds what its neighbours read
// again), and multiplies them by the weights of all taps of h and w, which are in shared memory: a block gathers them once, for many tiles.
//
// Where rows lie together in memory, neighbouring lanes have neighbouring positions and the same channel: they read rows by vectors, and
// weights by broadcast; the next channel's inputs are on their way while one is multiplied. Where channels lie together, neighbouring lanes
// have neighbouring channels of a position, four each. At the end the parts' sums pass through shared memory and are added in order, and
// neighbouring lanes store neighbouring outputs.
#include "convt3d.cuh"
#include "convt3d/core/advanced.cuh"
#include "convt3d/core/digits.cuh"
#include "convt3d/core/divisor.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/core/taps.cuh"
#include "convt3d/core/vector.cuh"

#ifndef THREADS
#define THREADS 128
#endif
// Parts of a block's threads that share the input channels: at least so many, where there are four channels for each.
#ifndef CHANNEL_PARTS
#define CHANNEL_PARTS 4
#endif
#ifndef SUMS
#define SUMS 64
#endif
#ifndef INPUTS
#define INPUTS 40
#endif
#ifndef RUN_H
#define RUN_H 2
#endif
#ifndef RUN_W
#define RUN_W 4
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
// Planes of a channel in one piece of code: with two the inputs of one are loaded while the other is multiplied, without moves.
#ifndef AHEAD
#define AHEAD 2
#endif
#ifndef RESIDENT_WARPS
#define RESIDENT_WARPS 8
#endif

static_assert(SUMS <= 128 && INPUTS <= 64, "a thread has registers for no more");
constexpr int MOST_SUMS = 128, MOST_INPUTS = 64, MOST_ROW = 64;  // of a thread; of a plane of a channel; of a row of taps

// How inputs are read: one by one, along a row, or four channels at once.
enum class Access { elements, rows, channels };

// What all threads of a block have in common. In shared memory, because registers are for inputs and sums.
struct Block {
  AxisClass d;
  int origin_d;  // the input of tap 0 and the class's first output; where the class has no tap, so that all lie outside
  Divisor columns, runs;
  bool rows, channels, output_channels;  // lie together in memory, aligned for vectors
};

// Where a thread's outputs begin, and how many rows and columns of them lie inside.
struct alignas(16) Place {
  index_t output;
  int rows, columns;
};

// Which input channels and which position of a tile are a thread's.
struct Share {
  int part, position;
};

// The d of a position, and its first q of h and w.
struct Run {
  int d, h, w;
};

// A class's weights of some input channels, in shared memory.
struct Weights {
  int taps_d, kernel_h, kernel_w, out_channels;

  // Elements of the taps of a row; of a channel where one is multiplied at a time, of four of them where four are.
  __device__ int row() const { return (kernel_w * out_channels + 3) / 4 * 4; }
  __device__ int channel() const { return taps_d * kernel_h * row(); }
  __device__ int four_channels() const { return 4 * (taps_d * kernel_h * kernel_w * out_channels / 2 * 2 + 1); }
  // Four channels lie side by side, and an odd number of such fours is a lane's: so neighbouring lanes read from different banks.
  __device__ int at(bool fours, int ci, int kd, int kh, int kw, int co) const {
    if (!fours) return ci * channel() + (kd * kernel_h + kh) * row() + kw * out_channels + co;
    return ci / 4 * four_channels() + (((kd * kernel_h + kh) * kernel_w + kw) * out_channels + co) * 4 + ci % 4;
  }
};

__device__ inline Taps taps_h(const Problem& problem, int run) {
  return {SPECIALIZED(KERNEL_H, problem.kernel_size[1]), SPECIALIZED(STRIDE_H, problem.stride[1]),
          SPECIALIZED(DILATION_H, problem.dilation[1]), SPECIALIZED(PADDING_H, problem.padding[1]), SPECIALIZED(LENGTH_H, run)};
}

__device__ inline Taps taps_w(const Problem& problem, int run) {
  return {SPECIALIZED(KERNEL_W, problem.kernel_size[2]), SPECIALIZED(STRIDE_W, problem.stride[2]),
          SPECIALIZED(DILATION_W, problem.dilation[2]), SPECIALIZED(PADDING_W, problem.padding[2]), SPECIALIZED(LENGTH_W, run)};
}

// A row of a plane: x[column * LENGTH + channel], zeros for what lies outside. `line` is its first input, in column w; steps are in bytes.
template <Access ACCESS, int LENGTH>
__device__ __forceinline__ void load_row(accum_t* x, const Taps& tw, const scalar_t* line, index_t step, bool live, int w,
                                         int width) {
  const int columns = tw.inputs();
  const scalar_t* from = line;
#pragma unroll
  for (int j = 0; j < columns; ++j, from = ACCESS == Access::rows ? from : advanced(from, step)) {
    // Column j is number `at` of a vector, which may lie among these columns as a whole.
    const int at = static_cast<unsigned>(tw.first() - tw.reach() + j) % tw.run;
    const bool whole = ACCESS == Access::rows && tw.run > 1 && j >= at && j - at + tw.run <= columns;
    const bool inside = live && static_cast<unsigned>(w + j) < static_cast<unsigned>(width);
    if (ACCESS == Access::channels || !whole) {
      const Vector<LENGTH> loaded =
          inside ? *reinterpret_cast<const Vector<LENGTH>*>(ACCESS == Access::rows ? line + j : from) : Vector<LENGTH>{};
#pragma unroll
      for (int c = 0; c < LENGTH; ++c) x[j * LENGTH + c] = loaded.element[c];
    } else if (at == 0 && tw.run == 4) {
      const Vector<4> loaded = inside ? *reinterpret_cast<const Vector<4>*>(line + j) : Vector<4>{};
#pragma unroll
      for (int e = 0; e < 4; ++e) x[j + e] = loaded.element[e];
    } else if (at == 0) {
      const Vector<2> loaded = inside ? *reinterpret_cast<const Vector<2>*>(line + j) : Vector<2>{};
#pragma unroll
      for (int e = 0; e < 2; ++e) x[j + e] = loaded.element[e];
    }
  }
}

// sums[q of w * stride + r][co] of one row of outputs += the products of a row of inputs and a row of taps. The weights are those of one
// channel, in registers, or of four, in shared memory.
template <int LENGTH>
__device__ __forceinline__ void multiply_row(accum_t* sums, const accum_t* x, const Taps& tw, int out_channels,
                                             const accum_t* weights) {
#pragma unroll
  for (int kw = 0; kw < tw.kernel; ++kw) {
    // Tap kw feeds residue r, at the first q from input `column` on.
    const int scaled = kw * tw.dilation - tw.lead() + tw.stride;
    const int r = scaled % tw.stride, column = tw.reach() + 1 - scaled / tw.stride;
#pragma unroll
    for (int co = 0; co < out_channels; ++co) {
      Vector<LENGTH> weight;
      if constexpr (LENGTH == 1) {
        weight.element[0] = weights[kw * out_channels + co];
      } else {
        weight = reinterpret_cast<const Vector<LENGTH>*>(weights)[kw * out_channels + co];
      }
#pragma unroll
      for (int q = 0; q < tw.run; ++q) {
#pragma unroll
        for (int c = 0; c < LENGTH; ++c)
          sums[(q * tw.stride + r) * out_channels + co] += x[(column + q) * LENGTH + c] * weight.element[c];
      }
    }
  }
}

// sums[((q of h * stride_h + r_h) * run_w + q of w) * stride_w + r_w][co] += the products of a part of `channels` input channels.
// `first` is the first input of the first channel's window, in the plane d that tap 0 leads to, row h and column w.
template <Access ACCESS>
__device__ __forceinline__ void multiply(accum_t (&sums)[MOST_SUMS], const Problem& problem, const Taps& th, const Taps& tw,
                                         const Weights& shape, const Block& block, const View<const scalar_t>& input,
                                         const scalar_t* first, int d, int h, int w, const accum_t* weights, int part,
                                         int parts, int channels) {
  constexpr int LENGTH = ACCESS == Access::channels ? 4 : 1;
  const int rows = th.inputs(), columns = tw.inputs(), out_channels = shape.out_channels;
  const int row_sums = tw.run * tw.stride * out_channels;
  constexpr index_t BYTES = sizeof(scalar_t);
  const index_t step_h = input.stride[3] * BYTES, step_w = input.stride[4] * BYTES;
  // Tap kh feeds residue scaled(kh) % stride, at the first q from input row first_row(kh) on.
  const auto scaled = [&](int kh) { return kh * th.dilation - th.lead() + th.stride; };
  const auto first_row = [&](int kh) { return th.reach() + 1 - scaled(kh) / th.stride; };
  const auto of_output = [&](int q, int kh) { return &sums[(q * th.stride + scaled(kh) % th.stride) * row_sums]; };
#pragma unroll 1
  for (int kd = 0; kd < block.d.taps; ++kd, d -= block.d.offset_step, first -= block.d.offset_step * input.stride[2]) {
    if (d < 0 || d >= problem.input_size[0]) continue;
    const scalar_t* line = first + part * LENGTH * input.stride[1];  // of the next row to be loaded
    const accum_t* taps = weights + shape.at(LENGTH == 4, part * LENGTH, kd, 0, 0, 0);
    const index_t next_channels = parts * LENGTH * input.stride[1] * BYTES, next_plane = next_channels - rows * step_h;
    const auto load = [&](int row, accum_t* x, bool more) {
      // What lies outside is worked out anew: registers are for sums.
      const int at_h = computed_anew(h) + row, at_w = computed_anew(w);
      const bool live = more && static_cast<unsigned>(at_h) < static_cast<unsigned>(problem.input_size[1]);
      load_row<ACCESS, LENGTH>(x, tw, line, step_w, live, at_w, problem.input_size[2]);
      line = advanced(line, row + 1 < rows ? step_h : step_h + next_plane);
    };
    if constexpr (LENGTH == 1) {
      accum_t next[MOST_INPUTS];
#pragma unroll
      for (int row = 0; row < rows; ++row) load(row, next + row * columns, part < channels);
#pragma unroll AHEAD
      for (int ci = part; ci < channels; ci += parts) {
        accum_t x[MOST_INPUTS];
#pragma unroll
        for (int i = 0; i < rows * columns; ++i) x[i] = next[i];
#pragma unroll
        for (int row = 0; row < rows; ++row) load(row, next + row * columns, ci + parts < channels);
#pragma unroll
        for (int kh = 0; kh < th.kernel; ++kh) {
          accum_t of_row[MOST_ROW];
#pragma unroll
          for (int i = 0; i < shape.row(); i += 4) {
            const Vector<4> four = *reinterpret_cast<const Vector<4>*>(taps + kh * shape.row() + i);
#pragma unroll
            for (int e = 0; e < 4; ++e) of_row[i + e] = four.element[e];
          }
#pragma unroll
          for (int q = 0; q < th.run; ++q)
            multiply_row<LENGTH>(of_output(q, kh), x + (first_row(kh) + q) * columns, tw, out_channels, of_row);
        }
        taps += parts * shape.channel();
      }
    } else {
      // Four channels of all rows would be too many registers: weights are read again for each row.
#pragma unroll 1
      for (int ci = part * LENGTH; ci < channels; ci += parts * LENGTH) {
#pragma unroll
        for (int row = 0; row < rows; ++row) {
          accum_t x[MOST_INPUTS * LENGTH];
          forget_memory();
          load(row, x, true);
#pragma unroll
          for (int kh = 0; kh < th.kernel; ++kh) {
            const int q = row - first_row(kh);
            if (q >= 0 && q < th.run)
              multiply_row<LENGTH>(of_output(q, kh), x, tw, out_channels, taps + kh * tw.kernel * out_channels * LENGTH);
          }
        }
        taps += parts * shape.four_channels();
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 32 * RESIDENT_WARPS / THREADS)
    convt3d_fprop_few_outputs(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                              const scalar_t* __restrict__ bias, const View<scalar_t> output, const int in_channels_per_group,
                              const int out_channels_per_group, const int run_h, const int run_w, const int parts,
                              const int columns, const int runs, const int tiles, const int streams, const int block_tiles,
                              const int chunk_quads, const int weight_bytes, const int stage_bytes, const int fours) {
  const Epilogue epilogue{bias};
  __shared__ Block block;
  extern __shared__ __align__(16) unsigned char shared[];
  accum_t* const weights = reinterpret_cast<accum_t*>(shared);
  accum_t* const stage = reinterpret_cast<accum_t*>(shared + weight_bytes);  // of sums
  Place* const places = reinterpret_cast<Place*>(shared + weight_bytes + stage_bytes);
  const Taps th = taps_h(problem, run_h), tw = taps_w(problem, run_w);
  const int out_channels = SPECIALIZED(OUT_CHANNELS, out_channels_per_group), all_parts = SPECIALIZED(PARTS, parts);
  const int positions = THREADS / all_parts, thread = static_cast<int>(threadIdx.x);

  // blockIdx.x = ((n * groups + group) * streams + stream) * stride_d + residue of d
  Digits index{blockIdx.x};
  const int residue = index.next(problem.stride[0]), stream = index.next(streams);
  const int group = index.next(problem.groups), n = index.last();
  if (thread == 0) {
    const AxisClass d = axis_class(problem, 0, residue);
    bool channels = SPECIALIZED(FOURS, fours) && input.stride[1] == 1;
    for (int a = 2; a < 5; ++a) channels = channels && input.stride[a] % 4 == 0;
    channels = channels && (problem.batch == 1 || input.stride[0] % 4 == 0) && reinterpret_cast<index_t>(input.data) % 16 == 0;
    block = {d,
             d.taps > 0 ? (d.first_output + problem.padding[0]) / problem.stride[0] - d.first_offset : -d.outputs,
             divisor_of(columns),
             divisor_of(runs),
             tw.run > 1 && problem.input_size[2] % tw.run == 0 && made_of_vectors(input, tw.run),
             channels,
             output.stride[1] == 1};
  }
  __syncthreads();

  // Lanes are neighbours along the output's rows, or along the input's channels.
  const bool by_channels = SPECIALIZED(FOURS, fours) && block.channels;
  const Weights shape = {block.d.taps, th.kernel, tw.kernel, out_channels};
  const int first_in = group * in_channels_per_group, first_out = group * out_channels;
  const int chunk = 4 * chunk_quads;
  const auto gather_weights = [&](int first, int count) {
    const int taps = th.kernel * tw.kernel;
#pragma unroll 1
    for (int kd = 0; kd < shape.taps_d; ++kd) {
#pragma unroll 4
      for (int i = thread; i < count * out_channels * taps; i += THREADS) {
        const int tap = i % taps, co = i / taps % out_channels, ci = i / taps / out_channels;
        const int kh = tap / tw.kernel, kw = tap % tw.kernel;
        weights[shape.at(by_channels, ci, kd, kh, kw, co)] =
            to_accum(*weight.at(first_in + first + ci, co, block.d.first_tap + kd * block.d.tap_step, kh, kw));
      }
    }
  };

  // Not kept: registers are for sums.
  const auto own_share = [&] {
    const int again = computed_anew(thread);
    return by_channels ? Share{again % all_parts, again / all_parts} : Share{again / positions, again % positions};
  };
  const auto run_of = [&](int position) {
    const int line = block.columns.quotient(position), of_d = block.runs.quotient(line);
    return Run{of_d, (line - of_d * runs) * th.run, (position - line * columns) * tw.run};
  };

#pragma unroll 1
  for (int tile = stream * block_tiles, last = min(tile + block_tiles, tiles); tile < last; ++tile) {
    const Share at = own_share();
    const Run run = run_of(tile * positions + at.position);
    const bool live = run.d < block.d.outputs;
    const int d = live ? block.origin_d + run.d : -1 - block.d.taps;
    const int h = th.first() - th.reach() + run.h, w = tw.first() - tw.reach() + run.w;

    accum_t sums[MOST_SUMS];
    const int length = tw.run * tw.stride, row_sums = length * out_channels, rows = th.run * th.stride;
#pragma unroll
    for (int s = 0; s < rows * row_sums; ++s) sums[s] = accum_t(0);
#pragma unroll 1
    for (int first = 0; first < in_channels_per_group; first += chunk) {
      const int count = min(chunk, in_channels_per_group - first);
      if (tile == stream * block_tiles || chunk < in_channels_per_group) {
        __syncthreads();  // the weights before have been read
        gather_weights(first, count);
        __syncthreads();
      }
      const scalar_t* from = input.at(n, first_in + first, d, h, w);
      if (by_channels) {
        multiply<Access::channels>(sums, problem, th, tw, shape, block, input, from, d, h, w, weights, at.part, all_parts,
                                   count);
      } else if (block.rows) {
        multiply<Access::rows>(sums, problem, th, tw, shape, block, input, from, d, h, w, weights, at.part, all_parts, count);
      } else {
        multiply<Access::elements>(sums, problem, th, tw, shape, block, input, from, d, h, w, weights, at.part, all_parts,
                                   count);
      }
    }

    // A row of the outputs of all positions after the other, as [part][position][output of the row][co]; an odd pitch meets all banks.
    const int pitch = row_sums / 2 * 2 + 1, part_pitch = positions * pitch + 4;
#pragma unroll
    for (int row = 0; row < rows; ++row) {
      __syncthreads();  // what was staged before has been read
      const Share own = own_share();
      if (row == 0 && own.part == 0) {
        const Run first = run_of(tile * positions + own.position);
        const int o_d = block.d.first_output + first.d * problem.stride[0];
        const int o_h = first.h * th.stride, o_w = first.w * tw.stride;
        places[own.position] = {output.at(n, first_out, o_d, o_h, o_w) - output.data,
                                first.d < block.d.outputs ? problem.output_size[1] - o_h : 0, problem.output_size[2] - o_w};
      }
      accum_t* const own_stage = stage + own.part * part_pitch + own.position * pitch;
#pragma unroll
      for (int s = 0; s < row_sums; ++s) own_stage[s] = sums[row * row_sums + s];
      __syncthreads();
#pragma unroll 1
      for (int item = computed_anew(thread); item < positions * row_sums; item += THREADS) {
        const bool last = block.output_channels;  // neighbours in memory are channels
        const int position = last ? item / row_sums : item / length % positions;
        const int e = last ? item % row_sums / out_channels : item % length;
        const int co = last ? item % out_channels : item / (length * positions);
        const Place place = places[position];
        if (row >= place.rows || e >= place.columns) continue;
        accum_t sum = epilogue.start(first_out + co);
        const accum_t* of_part = stage + position * pitch + e * out_channels + co;
#pragma unroll
        for (int p = 0; p < all_parts; ++p) sum += of_part[p * part_pitch];
        output.data[place.output + row * output.stride[3] + e * output.stride[4] + co * output.stride[1]] =
            epilogue.finish(sum);
      }
    }
  }
}
