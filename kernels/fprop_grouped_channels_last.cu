/* convt3d
pass = "fprop"
dtypes = ["fp32", "fp16", "bf16"]
multiplies_padding = true
[specialize]
KERNEL_D = "kernel_d"
KERNEL_H = "kernel_h"
KERNEL_W = "kernel_w"
STRIDE_D = "stride_d"
STRIDE_H = "stride_h"
STRIDE_W = "stride_w"
DILATION_D = "dilation_d"
DILATION_H = "dilation_h"
DILATION_W = "dilation_w"
PADDING_H = "padding_h"
PADDING_W = "padding_w"
IN_CHANNELS = "in_channels"
OUT_CHANNELS = "out_channels"
IN_GROUP = "in_channels_per_group"
OUT_GROUP = "out_channels_per_group"
VECTOR = "vector"
LENGTH_H = "run_h"
LENGTH_W = "run_w"
ROLLS = "rolls"
PITCH = "pitch"
THREADS = "threads"
[constants]
# Many taps have many weights to read: more sums for each.
sums = "SUMS if SUMS else 48 if taps <= 64 else 96"
# A thread's neighbouring output channels: part of a group's, or those of whole groups.
fours = "out_channels % CHANNELS == 0 and (out_channels_per_group % CHANNELS == 0 or CHANNELS % out_channels_per_group == 0)"
twos = "out_channels % 2 == 0 and (out_channels_per_group % 2 == 0 or out_channels_per_group == 1)"
vector = "CHANNELS if fours else 2 if twos else 3 if out_channels_per_group % 3 == 0 else 1"
reach_h = "(kernel_h - 1) * dilation_h // stride_h"
reach_w = "(kernel_w - 1) * dilation_w // stride_w"
run_w = "max(1, 4 // stride_w)"
# Sums of a thread for each q of h and each plane, and the planes that an input plane reaches from the first to the last.
row_sums = "stride_h * stride_w * run_w * vector"
planes = "max((kernel_d - 1) * dilation_d + 1, stride_d)"
rolls = "1 if planes * row_sums <= sums and taps * run_w * vector <= 2048 else 0"
most_h = "sums // (planes * row_sums) if rolls else sums * 2 // 3 // row_sums"
run_h = "max(1, min(4, most_h, (sums if reach_w <= 8 else 48) // ((run_w + reach_w) * vector), 2048 // (taps * run_w * vector) if rolls else 4))"
# Channels of a block: all, or parts of about a size, in units of 16 bytes (of 16 bits).
unit = "24 if vector == 3 else 8"
all_taps = "in_channels_per_group * taps"
most_channels = "max(unit, min(BLOCK_CHANNELS, 96 * 1024 // (4 * all_taps) - 4) // unit * unit)"
parts = "ceil_div(out_channels, most_channels)"
block_channels = "min(most_channels, ceil_div(ceil_div(out_channels, parts), unit) * unit)"
channel_blocks = "ceil_div(out_channels, block_channels)"
vectors = "ceil_div(min(block_channels, out_channels), vector)"
pitch = "ceil_div(vectors * vector, 4) * 4 + 4"
# Threads of a block beside each other along h and w.
columns = "ceil_div(output_w, stride_w * run_w)"
rows = "ceil_div(output_h, stride_h * run_h)"
# Small blocks where threads have many registers, or where there are few threads.
first_d = "padding_d // stride_d"
all_d = "(output_d - 1 + padding_d) // stride_d - first_d + 1"
small = "sums > 48 or batch * rows * columns * (out_channels // vector) * ceil_div(all_d, 4) < 262144"
threads = "BLOCK_THREADS if BLOCK_THREADS else 128 if small else 256"
tiles = "max(1, threads // vectors)"
some_columns = "min(columns, 4 if tiles >= 12 else 2 if tiles >= 4 else 1)"
most_rows = "min(rows, max(1, tiles // some_columns))"
block_rows = "ceil_div(rows, ceil_div(rows, most_rows))"
most_columns = "min(columns, max(1, tiles // block_rows))"
block_columns = "ceil_div(columns, ceil_div(columns, most_columns))"
regions_h = "ceil_div(rows, block_rows)"
regions_w = "ceil_div(columns, block_columns)"
regions = "regions_h * regions_w"
# Along d a block has a run of q: as long as there are so many blocks.
blocks = "batch * channel_blocks * regions"
least_d = "4 if blocks >= multiprocessors else 2 if blocks >= multiprocessors // 4 else 1"
run_d = "max(min(all_d, least_d), ceil_div(all_d, ceil_div(multiprocessors * BLOCKS, max(1, blocks))))"
runs_d = "ceil_div(all_d, run_d)"
[restrictions]
"in_channels_per_group <= 32 and out_channels_per_group <= 32" = "it is for small groups: at most 32 input channels and 32 output channels a group"
"in_channels_per_group == 1 or all_taps <= 1000" = "a thread adds at most 1000 products of an output one after the other, since rounding errors add up"
"stride_h <= 4 and stride_w <= 4" = "a thread owns all residues of h and w: strides of at most 4 along them"
"kernel_h * kernel_w <= 64 and reach_h <= 12 and reach_w <= 12" = "the inputs of a window lie in registers: at most 64 taps in a plane, which reach over at most 13 of them along h and w"
"4 * all_taps * pitch <= 98 * 1024" = "the weights of a block's channels must fit the 99 KiB of shared memory that every GPU has"
"blocks * runs_d <= 2000000000" = "it counts its blocks in 32 bits"
[search]
CHANNELS = [2, 4]
SUMS = [48, 96]
BLOCK_THREADS = [128, 256]
AHEAD = [0, 1]
BLOCKS = [2, 8, 16]
[cost]
steps = "(run_d + (kernel_d - 1) * dilation_d // stride_d) * in_channels_per_group"
products = "vectors * vector * block_rows * block_columns * run_h * run_w * taps"
bytes = "vectors * vector * block_rows * block_columns * (run_h + reach_h) * (run_w + reach_w) * itemsize"
[[launch]]
grid = "blocks * runs_d"
block = "ceil_div(vectors * block_rows * block_columns, 32) * 32"
shared_bytes = "4 * all_taps * pitch"
*/
// Depthwise layers and small groups where channels lie together in memory; right for any layout.
// Memory is the bound, or for kernels of 5 and 7 the multiply-adds: what counts is that inputs come from memory once and are read
// from L1 seldom, in whole vectors. Input channels of a group come one after the other, each with a window of its own.
//
// Neighbouring lanes have neighbouring vectors of channels, then neighbouring tiles: a thread owns a few channels and neighbouring q of h
// and w with all their residues (o = q*stride + r). Its window of inputs goes into registers once for each plane, and each weight, read
// from shared memory as a vector, is multiplied with all the thread has of the window. A block has tiles beside each other along h and w,
// so that their windows overlap in L1.
//
// Along d a thread goes from plane to plane of the input. Where sums for all planes of the output that an input plane reaches fit
// registers (ROLLS) each input is read once: input i adds to o + padding = i*stride + tap*dilation, then the first `stride` planes are
// done, are stored, and the others move up. Else the planes of the output are done one after the other, and read again what they share.
#include "convt3d.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/digits.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/core/taps.cuh"
#include "convt3d/core/vector.cuh"

// Neighbouring channels of a thread.
#ifndef CHANNELS
#define CHANNELS 2
#endif
// A thread's sums at most where it rolls, threads of a block; 0: by the number of taps.
#ifndef SUMS
#define SUMS 0
#endif
#ifndef BLOCK_THREADS
#define BLOCK_THREADS 0
#endif
#ifndef BLOCK_CHANNELS
#define BLOCK_CHANNELS 32
#endif
// Whether the window of the next plane is loaded before this one is multiplied, where a thread rolls and windows are small.
#ifndef AHEAD
#define AHEAD 0
#endif
// Blocks wanted for each multiprocessor, by cutting d.
#ifndef BLOCKS
#define BLOCKS 8
#endif

static_assert(SUMS <= 96 && CHANNELS <= 4, "sums are 96 at most, or four channels of 16 residues where nothing rolls");
static_assert(BLOCK_CHANNELS <= 64, "the smallest block has threads for all its vectors of channels");

constexpr int SIZE = static_cast<int>(sizeof(scalar_t)), MOST_SUMS = 96;
#if defined(__CUDACC__)
constexpr int MOST_ROWS = Taps{KERNEL_H, STRIDE_H, DILATION_H, PADDING_H, LENGTH_H}.inputs(), MOST_VECTOR = VECTOR;
constexpr int MOST_COLUMNS = Taps{KERNEL_W, STRIDE_W, DILATION_W, PADDING_W, LENGTH_W}.inputs();
constexpr int SINGLE = VECTOR % OUT_GROUP == 0 ? VECTOR / OUT_GROUP : 1, WORDS = (SINGLE * SIZE + 3) / 4;
// Warps on a multiprocessor that have registers for their sums, their window and about 30 beside.
constexpr int PLANES = (KERNEL_D - 1) * DILATION_D + 1 > STRIDE_D ? (KERNEL_D - 1) * DILATION_D + 1 : STRIDE_D;
constexpr int OWN_SUMS = (ROLLS ? PLANES : 1) * LENGTH_H * STRIDE_H * LENGTH_W * STRIDE_W * VECTOR;
constexpr bool WHOLE = MOST_ROWS * MOST_COLUMNS * SINGLE <= 48;
constexpr bool TWICE = AHEAD != 0 && ROLLS != 0 && WHOLE && WORDS == SINGLE;  // two windows: those of 16 bits are small
constexpr int OWN_ROWS = !WHOLE           ? (LENGTH_H + 2) * SINGLE
                         : WORDS < SINGLE ? MOST_ROWS * WORDS + LENGTH_H * SINGLE
                                          : MOST_ROWS * WORDS * (TWICE ? 2 : 1);
constexpr int BESIDE = 8 * VECTOR + 4 * LENGTH_H * STRIDE_H + (TWICE ? 16 : WHOLE ? 0 : 8) + (ROLLS ? 0 : 12);
constexpr int OWN = OWN_SUMS + OWN_ROWS * MOST_COLUMNS + BESIDE;
constexpr int EDGES = MOST_ROWS + MOST_COLUMNS;  // of the window, that are compared with the input's
constexpr bool MANY = OWN <= 120 && OWN_SUMS <= 48 && EDGES <= 16;
constexpr bool SOME = OWN <= (ROLLS ? 176 : 136) && OWN_SUMS <= (WHOLE ? 64 : 80) && EDGES <= 20;
constexpr int RESIDENT_WARPS = MANY ? 16 : SOME ? 12 : 8;
#else
constexpr int MOST_ROWS = 18, MOST_COLUMNS = 18, MOST_VECTOR = 4, WORDS = 4, RESIDENT_WARPS = 8;
#endif
constexpr int RESIDENT = RESIDENT_WARPS * 32 > THREADS ? RESIDENT_WARPS * 32 / THREADS : 1;  // blocks

// Input channels of one voxel as they lie in memory: of each of a thread's groups one.
struct Raw {
  unsigned word[WORDS];
};

// What all of a thread's work has in common; numbers that a GPU's binary is compiled for.
struct Shape {
  Taps h, w;
  int vector, in_group, out_group, pitch;

  __device__ int inputs() const { return vector % out_group == 0 ? vector / out_group : 1; }  // groups of a vector
  __device__ int input_of(int v) const { return v * inputs() / vector; }
  // Whether the whole window is in registers at once.
  __device__ bool whole() const { return h.inputs() * w.inputs() * inputs() <= 48; }
  __device__ int row() const { return w.run * w.stride; }
  __device__ int plane() const { return h.run * h.stride * row() * vector; }  // sums of an output plane
};

// Where a thread's window lies: the input of its first row and column, in plane 0.
struct Place {
  const scalar_t* first;
  int h, w;
  bool inside;  // all of it
};

template <int COUNT>
__device__ __forceinline__ void load_words(Raw& raw, const scalar_t* from, bool inside) {
  const Words<COUNT> words = inside ? *reinterpret_cast<const Words<COUNT>*>(from) : Words<COUNT>{};
#pragma unroll
  for (int i = 0; i < COUNT; ++i) raw.word[i] = words.element[i];
}

__device__ __forceinline__ unsigned bits_of(float value) { return __float_as_uint(value); }
template <class Half>
__device__ __forceinline__ unsigned bits_of(Half value) {
  return value.bits;
}

// Load `count` channels, `step` apart. What lies outside is zeros that were not read.
__device__ __forceinline__ void load(Raw& raw, const scalar_t* from, int count, int step, bool inside) {
  if (step > 1) {
#pragma unroll
    for (int c = 0; c < count; ++c) {
      const unsigned bits = inside ? bits_of(from[c * step]) : 0u;
      if (SIZE == 4) raw.word[c % WORDS] = bits;
      if (SIZE == 2) raw.word[c / 2 % WORDS] = c % 2 == 0 ? bits : raw.word[c / 2 % WORDS] | bits << 16;
    }
  } else if (count * SIZE == 4) {
    load_words<1>(raw, from, inside);
  } else if (WORDS >= 2 && count * SIZE == 8) {
    load_words<WORDS >= 2 ? 2 : 1>(raw, from, inside);
  } else if (WORDS >= 4 && count * SIZE == 16) {
    load_words<WORDS >= 4 ? 4 : 1>(raw, from, inside);
  } else {
    raw.word[0] = inside ? bits_of(*from) : 0u;  // one element of 16 bits
  }
}

__device__ __forceinline__ accum_t element(const Raw& raw, int v) {
#if defined(CONVT3D_FP16) || defined(CONVT3D_BF16)
  return to_accum(scalar_t{static_cast<unsigned short>(raw.word[v / 2] >> 16 * (v % 2))});
#else
  return __uint_as_float(raw.word[v]);
#endif
}

// A row of the window in the plane at `plane`, which lies inside. TESTED: not known to lie inside as a whole.
template <bool TESTED>
__device__ __forceinline__ void load_row(Raw (&raw)[MOST_COLUMNS], const Shape& shape, const Problem& problem,
                                         const View<const scalar_t>& input, const Place& place, const scalar_t* plane,
                                         int row) {
  const bool live = static_cast<unsigned>(place.h + row) < static_cast<unsigned>(problem.input_size[1]);
  const scalar_t* const line = plane + row * input.stride[3];
#pragma unroll
  for (int column = 0; column < shape.w.inputs(); ++column) {
    const bool inside = live && static_cast<unsigned>(place.w + column) < static_cast<unsigned>(problem.input_size[2]);
    load(raw[column], line + column * SPECIALIZED(IN_CHANNELS, problem.in_channels), shape.inputs(), shape.in_group,
         !TESTED || inside);
  }
}

// The whole window of a channel of each group.
__device__ __forceinline__ void load_window(Raw (&raw)[MOST_ROWS][MOST_COLUMNS], const Shape& shape, const Problem& problem,
                                            const View<const scalar_t>& input, const Place& place, int d, int channel) {
  const scalar_t* const plane = place.first + channel + d * input.stride[2];
  if (place.inside) {
#pragma unroll
    for (int row = 0; row < shape.h.inputs(); ++row) load_row<false>(raw[row], shape, problem, input, place, plane, row);
  } else {
#pragma unroll
    for (int row = 0; row < shape.h.inputs(); ++row) load_row<true>(raw[row], shape, problem, input, place, plane, row);
  }
}

__device__ __forceinline__ void read_weights(accum_t (&weight)[MOST_VECTOR], const accum_t* from, int vector) {
  if (vector == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    weight[0] = four.x, weight[1 % MOST_VECTOR] = four.y, weight[2 % MOST_VECTOR] = four.z, weight[3 % MOST_VECTOR] = four.w;
  } else if (vector == 2) {
    const float2 two = *reinterpret_cast<const float2*>(from);
    weight[0] = two.x, weight[1 % MOST_VECTOR] = two.y;
  } else {
#pragma unroll
    for (int v = 0; v < vector; ++v) weight[v] = from[v];
  }
}

// sums[plane of tap kd][row][column][v] += all products of an input plane with `taps_d` taps of d, `spread` planes of sums apart.
// `ready(row)` is called for each row of the window, one row before it is multiplied. Weights are [tap][channel].
template <class Ready>
__device__ __forceinline__ void multiply(accum_t (&sums)[MOST_SUMS], const Shape& shape, Raw (&raw)[MOST_ROWS][MOST_COLUMNS],
                                         int taps_d, int spread, const accum_t* weights, const Ready& ready) {
  const Taps &th = shape.h, &tw = shape.w;
  accum_t x[MOST_ROWS][MOST_COLUMNS][MOST_VECTOR];
#pragma unroll
  for (int a = 0; a <= th.inputs() - th.run; ++a) {
#pragma unroll
    for (int row = 0; row < th.inputs(); ++row) {
      if (row == a + th.run || (a == 0 && row < th.run)) ready(row);
    }
#pragma unroll
    for (int row = 0; row < th.inputs(); ++row) {
      if (row != a + th.run - 1 && (a > 0 || row >= th.run)) continue;
#pragma unroll
      for (int column = 0; column < tw.inputs(); ++column) {
#pragma unroll
        for (int v = 0; v < shape.inputs(); ++v) x[row][column][v] = element(raw[row][column], v);
      }
    }
#pragma unroll
    for (int b = 0; b <= tw.inputs() - tw.run; ++b) {
#pragma unroll
      for (int r = 0; r < th.stride * tw.stride; ++r) {
        const int r_h = r / tw.stride, r_w = r % tw.stride;
        const int tap_h = th.tap(th.reach() - a, r_h), tap_w = tw.tap(tw.reach() - b, r_w);
        if (tap_h < 0 || tap_w < 0) continue;
#pragma unroll
        for (int kd = 0; kd < taps_d; ++kd) {
          accum_t weight[MOST_VECTOR];
          read_weights(weight, weights + ((kd * th.kernel + tap_h) * tw.kernel + tap_w) * shape.pitch, shape.vector);
#pragma unroll
          for (int q = 0; q < th.run * tw.run; ++q) {
            const int q_h = q / tw.run, q_w = q % tw.run;
            const int at = (q_h * th.stride + r_h) * shape.row() + q_w * tw.stride + r_w;
#pragma unroll
            for (int v = 0; v < shape.vector; ++v) {
              sums[kd * spread * shape.plane() + at * shape.vector + v] += x[a + q_h][b + q_w][shape.input_of(v)] * weight[v];
            }
          }
        }
      }
    }
  }
}

// Store an output plane's sums from y on, of which so many rows and columns lie inside.
__device__ __forceinline__ void store_plane(const Epilogue& epilogue, const accum_t* sums, const Shape& shape, scalar_t* y,
                                            index_t step_h, int step_w, int rows, int columns) {
  const int second = 1 % MOST_VECTOR, third = 2 % MOST_VECTOR, fourth = 3 % MOST_VECTOR;
#pragma unroll
  for (int row = 0; row < shape.h.run * shape.h.stride; ++row) {
    scalar_t* const line = y + row * step_h;
#pragma unroll
    for (int column = 0; column < shape.row(); ++column) {
      if (row >= rows || column >= columns) continue;
      scalar_t* const to = line + column * step_w;
      const accum_t* const from = sums + (row * shape.row() + column) * shape.vector;
      unsigned bits[MOST_VECTOR];
#pragma unroll
      for (int v = 0; v < shape.vector; ++v) bits[v] = bits_of(epilogue.finish(from[v]));
      if (shape.vector == 4 && SIZE == 4) {
        *reinterpret_cast<uint4*>(to) = make_uint4(bits[0], bits[second], bits[third], bits[fourth]);
      } else if (shape.vector == 4) {
        *reinterpret_cast<uint2*>(to) = make_uint2(bits[0] | bits[second] << 16, bits[third] | bits[fourth] << 16);
      } else if (shape.vector == 2 && SIZE == 4) {
        *reinterpret_cast<uint2*>(to) = make_uint2(bits[0], bits[second]);
      } else if (shape.vector == 2) {
        *reinterpret_cast<unsigned*>(to) = bits[0] | bits[second] << 16;
      } else {
#pragma unroll
        for (int v = 0; v < shape.vector; ++v) to[v] = epilogue.finish(from[v]);
      }
    }
  }
}

// Whether a tensor's channels are packed in each voxel, voxels along w too, and vectors of `length` channels may be accessed at once.
template <class T>
__device__ bool packed(const View<T>& view, int channels, int length) {
  const index_t steps = view.stride[0] | view.stride[2] | view.stride[3] | view.stride[4];
  const bool vectors = length == 3 || (steps % length == 0 && reinterpret_cast<index_t>(view.data) % (length * SIZE) == 0);
  return view.stride[1] == 1 && view.stride[4] == channels && vectors;
}

// Where a thread's outputs lie: image, first channel, row and column, and how many of these lie inside.
struct Outputs {
  int n, co, h, w, rows, columns;
  int begin, end;  // q of d: of o + padding
};

// One after the other, from memory: for tensors whose channels lie otherwise.
__device__ inline void gather(const Problem& problem, const View<const scalar_t>& input, const View<scalar_t>& output,
                              const Epilogue& epilogue, const Shape& shape, const Outputs& own, const accum_t* weights) {
  const int rows = min(own.rows, shape.h.run * shape.h.stride), columns = min(own.columns, shape.row());
  const int outputs = rows * columns * shape.vector, first_d = own.begin * problem.stride[0] - problem.padding[0];
  const int end_d = min(own.end * problem.stride[0] - problem.padding[0], problem.output_size[0]);
#pragma unroll 1
  for (int o_d = max(0, first_d); o_d < end_d; ++o_d) {
#pragma unroll 1
    for (int item = 0; item < outputs; ++item) {
      const int v = item % shape.vector, position = item / shape.vector, co = own.co + v;
      const int o_w = own.w + position % columns, o_h = own.h + position / columns;
      accum_t sum = epilogue.start(co);
      const accum_t* tap = weights + v;
#pragma unroll 1
      for (int row = 0; row < shape.in_group * problem.kernel_size[0] * shape.h.kernel; ++row) {
        const int ci = co / shape.out_group * shape.in_group + row / (problem.kernel_size[0] * shape.h.kernel);
        const int d = input_index(problem, 0, o_d, row / shape.h.kernel % problem.kernel_size[0]);
        const int h = input_index(problem, 1, o_h, row % shape.h.kernel);
#pragma unroll 1
        for (int kw = 0; kw < shape.w.kernel; ++kw, tap += shape.pitch) {
          const int w = input_index(problem, 2, o_w, kw);
          if (d >= 0 && h >= 0 && w >= 0) sum += to_accum(*input.at(own.n, ci, d, h, w)) * *tap;
        }
      }
      *output.at(own.n, co, o_d, o_h, o_w) = epilogue.finish(sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    convt3d_fprop_grouped_channels_last(const Problem problem, const View<const scalar_t> input,
                                        const View<const scalar_t> weight, const scalar_t* __restrict__ bias,
                                        const View<scalar_t> output, const int vector, const int run_h, const int run_w,
                                        const int rolls, const int block_channels, const int channel_blocks, const int vectors,
                                        const int pitch, const int block_rows, const int block_columns, const int regions_h,
                                        const int regions_w, const int run_d, const int runs_d, const int in_channels_per_group,
                                        const int out_channels_per_group) {
  const Epilogue epilogue{bias};
  extern __shared__ __align__(16) unsigned char shared[];
  accum_t* weights = reinterpret_cast<accum_t*>(shared);  // [input channel of a group][tap][channel]
  const Shape shape = {
      {SPECIALIZED(KERNEL_H, problem.kernel_size[1]), SPECIALIZED(STRIDE_H, problem.stride[1]),
       SPECIALIZED(DILATION_H, problem.dilation[1]), SPECIALIZED(PADDING_H, problem.padding[1]), SPECIALIZED(LENGTH_H, run_h)},
      {SPECIALIZED(KERNEL_W, problem.kernel_size[2]), SPECIALIZED(STRIDE_W, problem.stride[2]),
       SPECIALIZED(DILATION_W, problem.dilation[2]), SPECIALIZED(PADDING_W, problem.padding[2]), SPECIALIZED(LENGTH_W, run_w)},
      SPECIALIZED(VECTOR, vector),
      SPECIALIZED(IN_GROUP, in_channels_per_group),
      SPECIALIZED(OUT_GROUP, out_channels_per_group),
      SPECIALIZED(PITCH, pitch)};
  const Taps &th = shape.h, &tw = shape.w;

  // blockIdx.x = (((n * runs_d + run) * regions_h + region of h) * regions_w + region of w) * channel_blocks + channel block
  Digits index{blockIdx.x};
  const int first_channel = index.next(channel_blocks) * block_channels, first_column = index.next(regions_w) * block_columns;
  const int first_row = index.next(regions_h) * block_rows, number = index.next(runs_d), n = index.last();
  const int last_d = (problem.output_size[0] - 1 + problem.padding[0]) / problem.stride[0];
  Outputs own;
  own.n = n;
  own.begin = problem.padding[0] / problem.stride[0] + number * run_d;
  own.end = min(own.begin + run_d, last_d + 1);

  const int taps_h = th.kernel, taps_w = tw.kernel;
  const int taps = SPECIALIZED(KERNEL_D, problem.kernel_size[0]) * taps_h * taps_w;
  const int all_taps = shape.in_group * taps, staged = min(block_channels, problem.out_channels - first_channel) * all_taps;
#pragma unroll 4
  for (int item = static_cast<int>(threadIdx.x); item < staged; item += static_cast<int>(blockDim.x)) {
    const int channel = item / all_taps, row = item % all_taps, tap = row % taps, co = first_channel + channel;
    const int ci = co / shape.out_group * shape.in_group + row / taps;
    weights[row * shape.pitch + channel] =
        to_accum(*weight.at(ci, co % shape.out_group, tap / (taps_h * taps_w), tap / taps_w % taps_h, tap % taps_w));
  }

  const int thread = static_cast<int>(threadIdx.x), tile = thread / vectors, own_channel = thread % vectors * shape.vector;
  const int h = (first_row + tile / block_columns) * th.run, w = (first_column + tile % block_columns) * tw.run;
  own.co = first_channel + own_channel;
  own.h = h * th.stride;
  own.w = w * tw.stride;
  own.rows = problem.output_size[1] - own.h;
  own.columns = problem.output_size[2] - own.w;
  const bool live = tile < block_rows * block_columns && own.co < problem.out_channels && own.rows > 0 && own.columns > 0;
  const bool vectors_lie_together = packed(input, problem.in_channels, shape.in_group > 1 ? 1 : shape.inputs()) &&
                                    packed(output, problem.out_channels, shape.vector);
  Place place;
  place.h = th.first() + h - th.reach();
  place.w = tw.first() + w - tw.reach();
  place.first = input.at(n, own.co / shape.out_group * shape.in_group, 0, place.h, place.w);
  place.inside = place.h >= 0 && place.h + th.inputs() <= problem.input_size[1] && place.w >= 0 &&
                 place.w + tw.inputs() <= problem.input_size[2];
  scalar_t* const y = output.at(n, own.co, 0, own.h, own.w);

  const int kernel_d = SPECIALIZED(KERNEL_D, problem.kernel_size[0]), stride_d = SPECIALIZED(STRIDE_D, problem.stride[0]);
  const int dilation_d = SPECIALIZED(DILATION_D, problem.dilation[0]), padding_d = problem.padding[0];
  const int depth = problem.input_size[0], plane = shape.plane();
  const bool rolling = SPECIALIZED(ROLLS, rolls) != 0, ahead = AHEAD != 0 && rolling && shape.whole();
  Raw raw[MOST_ROWS][MOST_COLUMNS];
  int i = max(0, own.begin - (kernel_d - 1) * dilation_d / stride_d);  // the first input plane that the run reads
  if (ahead && live && vectors_lie_together && i < depth) load_window(raw, shape, problem, input, place, i, 0);
  __syncthreads();  // the weights are there
  if (!live) return;
  weights += own_channel;
  if (!vectors_lie_together) {
    gather(problem, input, output, epilogue, shape, own, weights);
    return;
  }

  accum_t start[MOST_VECTOR], sums[MOST_SUMS];
#pragma unroll
  for (int v = 0; v < shape.vector; ++v) start[v] = epilogue.start(own.co + v);
  const auto multiply_plane = [&](int d, int taps_d, const accum_t* from) {
#pragma unroll 1
    for (int channel = 0; channel < shape.in_group; ++channel, from += taps * shape.pitch) {
      if (shape.whole()) {
        load_window(raw, shape, problem, input, place, d, channel);
        multiply(sums, shape, raw, taps_d, dilation_d, from, [](int) {});
      } else {
        const scalar_t* const at = place.first + channel + d * input.stride[2];
        multiply(sums, shape, raw, taps_d, dilation_d, from,
                 [&](int row) { load_row<true>(raw[row], shape, problem, input, place, at, row); });
      }
    }
  };
  const auto store = [&](const accum_t* from, int o) {
    if (o < 0 || o >= problem.output_size[0]) return;
    const int step = SPECIALIZED(OUT_CHANNELS, problem.out_channels);
    store_plane(epilogue, from, shape, y + o * output.stride[2], output.stride[3], step, own.rows, own.columns);
  };
  if (rolling) {
    const int planes = max((kernel_d - 1) * dilation_d + 1, stride_d), all = planes * plane;
#pragma unroll
    for (int s = 0; s < all; ++s) sums[s] = start[s % shape.vector];
#pragma unroll 1
    for (; i < own.end; ++i) {
      forget_memory();  // or weights are read before the loop, and spilled
      if (i < depth && !ahead) multiply_plane(i, kernel_d, weights);
#pragma unroll 1
      for (int channel = 0; channel < shape.in_group && i < depth && ahead; ++channel) {
        Raw loaded[MOST_ROWS][MOST_COLUMNS];
#pragma unroll
        for (int row = 0; row < th.inputs(); ++row) {
#pragma unroll
          for (int column = 0; column < tw.inputs(); ++column) loaded[row][column] = raw[row][column];
        }
        if (channel + 1 < shape.in_group) {
          load_window(raw, shape, problem, input, place, i, channel + 1);
        } else if (i + 1 < min(own.end, depth)) {
          load_window(raw, shape, problem, input, place, i + 1, 0);
        }
        multiply(sums, shape, loaded, kernel_d, dilation_d, weights + channel * taps * shape.pitch, [](int) {});
      }
#pragma unroll
      for (int r = 0; r < stride_d; ++r) {
        if (i >= own.begin) store(sums + r * plane, i * stride_d - padding_d + r);
      }
#pragma unroll
      for (int s = 0; s < all; ++s) {
        const int from = s + stride_d * plane;
        sums[s] = from < all ? sums[from < MOST_SUMS ? from : 0] : start[s % shape.vector];
      }
    }
  } else {
#pragma unroll 1
    for (int scaled = own.begin * stride_d; scaled < own.end * stride_d; ++scaled) {
      const int o = scaled - padding_d;
      if (o < 0 || o >= problem.output_size[0]) continue;
#pragma unroll
      for (int s = 0; s < plane; ++s) sums[s] = start[s % shape.vector];
#pragma unroll 1
      for (int kd = 0; kd < kernel_d; ++kd) {
        const int behind = scaled - kd * dilation_d;
        if (behind < 0 || behind % stride_d != 0 || behind / stride_d >= depth) continue;
        multiply_plane(behind / stride_d, 1, weights + kd * taps_h * taps_w * shape.pitch);
      }
      store(sums, o);
    }
  }
}
