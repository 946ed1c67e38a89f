/* convt3d
pass = "fprop"
dtypes = ["fp32", "fp16", "bf16"]
multiplies_padding = true
[specialize]
KERNEL_W = "kernel_w"
STRIDE_W = "stride_w"
DILATION_W = "dilation_w"
LEAD_W = "padding_w % stride_w"
SHIFT_W = "shift_w"
IN_CHANNELS = "in_channels_per_group"
OUT_CHANNELS = "out_channels_per_group"
[constants]
channel_tiles = "ceil_div(out_channels_per_group, 8)"
classes = "stride_d * stride_h"
taps_d = "ceil_div(kernel_d, stride_d // gcd(stride_d, dilation_d))"
taps_h = "ceil_div(kernel_h, stride_h // gcd(stride_h, dilation_h))"
shift_w = "(padding_w // stride_w - ((kernel_w - 1) * dilation_w - padding_w % stride_w) // stride_w) % 4"
pieces_w = "ceil_div(output_w, stride_w * (4 if stride_w <= 2 else 2))"
pieces = "ceil_div(output_d, stride_d) * ceil_div(output_h, stride_h) * pieces_w"
tiles = "ceil_div(pieces, 32 * BLOCK_WARPS)"
block_tiles = "max(1, min(BLOCK_TILES, batch * groups * channel_tiles * classes * tiles // (32 // BLOCK_WARPS * multiprocessors)))"
runs = "ceil_div(tiles, block_tiles)"
weight_bytes = "taps_d * taps_h * in_channels_per_group * kernel_w * 8 * 4"
stage_bytes = "BLOCK_WARPS * 8 * 33 * 4 * itemsize"
place_bytes = "BLOCK_WARPS * 32 * 32"
[restrictions]
"in_channels_per_group <= 16 and out_channels_per_group <= 16 or in_channels_per_group <= 4" = "it is for groups of at most 16 channels, or 4 input channels: an input is read again for every 8 output channels"
"stride_w <= 4" = "a thread owns all residues of w: a stride of at most 4 along w"
"weight_bytes + stage_bytes + place_bytes <= 98 * 1024" = "the weights of a class of residues must fit the 99 KiB of shared memory that every GPU has"
"pieces <= 1000000000" = "it counts the outputs of a class in 32 bits"
[search]
BLOCK_WARPS = [4, 8]
BLOCK_TILES = [1, 2, 4, 8]
UNROLL = [1, 2]
[cost]
steps = "block_tiles * taps_d * taps_h * in_channels_per_group"
products = "min(32 * BLOCK_WARPS, pieces) * (4 if stride_w <= 2 else 2) * kernel_w * 8"
bytes = "32 * BLOCK_WARPS * ((4 if stride_w <= 2 else 2) + (kernel_w - 1) * dilation_w // stride_w) * itemsize"
[[launch]]
grid = "batch * runs * groups * channel_tiles * classes"
block = "32 * BLOCK_WARPS"
shared_bytes = "weight_bytes + stage_bytes"
*/
// Groups of few channels. Such a layer is bound by its stores: nothing is staged but weights, and no warp waits for another. A thread reads
// its inputs straight from memory and keeps the sums of all residues of w for 8 output channels.
//
// Along d and h o + padding = q*stride + r, and tap t feeds o through input q - (t*dilation - r)/stride; a block has one r of each. Along
// w o = q*stride + r, so that pieces of a row begin where the row does, and tap t feeds o through input
// q + padding/stride - (t*dilation - r - padding%stride)/stride; a thread has all r of a piece, 4 neighbouring q (2 where the stride is
// more than 2): one input feeds an output of each r that has a tap for it, at each of these q.
// Pieces are counted over rows and planes alike, so that short rows leave no lane idle, and neighbouring lanes have neighbouring
// pieces. Where rows are aligned a thread reads four neighbours at once. Every row is read again by other taps, channels and warps; the
// L1 cache holds it. Weights are in shared memory, as [kd][kh][ci][tap of w][8 channels]: all lanes read the same 16 bytes.
//
// The sums pass through shared memory, each warp's through its own. So a warp stores 32 pieces of a channel, often a whole row,
// one instruction after the other: where two warps store a part of a sector each, memory first reads it.
// Where channels lie together, neighbouring lanes store neighbouring channels; where one access can store all of an output, a lane does.
#include "convt3d.cuh"
#include "convt3d/core/advanced.cuh"
#include "convt3d/core/divisor.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/epilogue/store_channels_last.cuh"
#include "convt3d/core/vector.cuh"

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 4
#endif
#ifndef BLOCK_TILES
#define BLOCK_TILES 4
#endif
#ifndef RESIDENT_WARPS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
#define RESIDENT_WARPS 12  // the compiler takes a few registers more there
#else
#define RESIDENT_WARPS 16
#endif
#endif
#ifndef UNROLL
#define UNROLL 2
#endif
#ifndef UNROLLED_TAPS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define UNROLLED_TAPS 16  // eight channels in one piece of code spill there
#else
#define UNROLLED_TAPS 24
#endif
#endif

// Input channels in one piece of code, whose loads need no arithmetic: all of them where the instruction cache takes that.
constexpr int UNROLLED = IN_CHANNELS * KERNEL_W <= UNROLLED_TAPS ? IN_CHANNELS : UNROLL;
constexpr int OUTSIDE = -0x40000000;                       // of a column, a d
constexpr int CHANNELS = 8, POSITIONS = 4, MOST_SUMS = 8;  // of a channel
constexpr int PITCH = 33;                                  // of staged vectors: 32 lanes', and one for other banks

constexpr int IN_VECTOR = 4, OUT_VECTOR = 16 / sizeof(scalar_t);  // 8 inputs of 16 bits would take too many registers

struct alignas(16) Weights {
  accum_t channel[4];
};

// The q of one thread.
__device__ constexpr int positions_of(int stride) { return stride <= 2 ? POSITIONS : POSITIONS / 2; }

// How far before a position's input the last one lies that feeds an output of it.
__device__ constexpr int last_offset(int kernel, int dilation, int stride, int lead) {
  return ((kernel - 1) * dilation - lead + stride) / stride - 1;
}

// What all threads of a block have in common. In shared memory, because registers are for sums.
struct Block {
  AxisClass d, h;
  int origin_d, origin_h;  // the input of tap 0 and the class's first output
  Divisor per_row, rows;
  int first_column, pieces;
  index_t input, output;  // where the first channel begins
  index_t output_step_d, output_step_h;
  int live_channels;  // of the output
  bool input_vectors, input_lines, input_quads, output_vectors;
  accum_t start[CHANNELS];  // the bias
};

// A thread's piece. In shared memory for the same reason, and because other lanes store it.
struct alignas(16) Place {
  index_t input;   // the first that it meets with tap 0 of d and h, and
  int d, h;        // where that lies
  index_t output;  // the first, in bytes
  int column;      // of that input
  int live;        // outputs of the row from that output on; none where there is no such piece
};

// sums[position * stride + r][channel] += the products of all input channels with the taps of one (kd, kh). LENGTH neighbouring
// channels are loaded at once; LINES: neighbours along w lie together, so that their distance is a constant;
// QUADS: and four are loaded at once. `from` is the input in `column`, the first.
template <int LENGTH, bool LINES, bool QUADS>
__device__ __forceinline__ void multiply(accum_t (&sums)[MOST_SUMS][CHANNELS], const Problem& problem,
                                         const View<const scalar_t>& input, int channels, int shift, const scalar_t* from,
                                         int column, const Weights* weights) {
  const int kernel = SPECIALIZED(KERNEL_W, problem.kernel_size[2]), stride = SPECIALIZED(STRIDE_W, problem.stride[2]);
  const int dilation = SPECIALIZED(DILATION_W, problem.dilation[2]), positions = positions_of(stride);
  const int lead = SPECIALIZED(LEAD_W, problem.padding[2] % problem.stride[2]), width = problem.input_size[2];
  const int last = last_offset(kernel, dilation, stride, lead), inputs = positions + last + (lead > 0 ? 1 : 0);
  const index_t step = LINES ? 1 : input.stride[4], next_channel = input.stride[1];
  using Loaded = Vector<QUADS ? 4 : LENGTH>;
#pragma unroll(QUADS ? UNROLLED : LINES ? UNROLL : 1)
  for (int ci = 0; ci < channels; ci += LENGTH, from += LENGTH * next_channel, weights += LENGTH * kernel * 2) {
    // From the last input to the first: x[i] is what position i meets at the present offset.
    Vector<LENGTH> x[POSITIONS] = {};
    Loaded loaded;
#pragma unroll(LINES ? 64 : 1)
    for (int at = inputs - 1; at >= 0; --at) {
      const int of_quad = (at + shift) % 4, first = QUADS ? at - of_quad : at;
      if (!QUADS || at == inputs - 1 || of_quad == 3) {
        const bool inside = static_cast<unsigned>(column + first) < static_cast<unsigned>(width);
        loaded = inside ? *reinterpret_cast<const Loaded*>(from + first * step) : Loaded{};
      }
#pragma unroll
      for (int i = POSITIONS - 1; i > 0; --i) x[i] = x[i - 1];
#pragma unroll
      for (int e = 0; e < LENGTH; ++e) x[0].element[e] = loaded.element[QUADS ? of_quad : e];
#pragma unroll
      for (int r = 0; r < stride; ++r) {
        const int scaled = (last - at) * stride + r + lead, tap = scaled / dilation;
        if (scaled < 0 || scaled % dilation != 0 || tap >= kernel) continue;
#pragma unroll
        for (int e = 0; e < LENGTH; ++e) {
#pragma unroll
          for (int part = 0; part < 2; ++part) {
            const Weights w = weights[(e * kernel + tap) * 2 + part];
#pragma unroll
            for (int i = 0; i < positions; ++i) {
#pragma unroll
              for (int c = 0; c < 4; ++c) sums[i * stride + r][part * 4 + c] += to_accum(x[i].element[e]) * w.channel[c];
            }
          }
        }
      }
    }
  }
}

__device__ inline void gather_weights(accum_t* weights, const Problem& problem, const View<const scalar_t>& weight,
                                      const AxisClass& d, const AxisClass& h, int group, int channels, int first_out,
                                      int out_channels) {
  const int kernel = SPECIALIZED(KERNEL_W, problem.kernel_size[2]);
  const int count = d.taps * h.taps * channels * kernel * CHANNELS;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32 * BLOCK_WARPS) {
    const int c = i % CHANNELS, tap = i / CHANNELS % kernel, row = i / CHANNELS / kernel;
    const int ci = row % channels, kh = row / channels % h.taps, kd = row / channels / h.taps;
    const bool live = first_out + c < out_channels;
    const scalar_t* from =
        weight.at(group * channels + ci, first_out + c, d.first_tap + kd * d.tap_step, h.first_tap + kh * h.tap_step, tap);
    weights[i] = live ? to_accum(*from) : accum_t(0);
  }
}

// Whether `first` and all that lies a stride from it begin on LENGTH neighbouring channels, aligned for one access.
template <int LENGTH, class T>
__device__ inline bool channels_are_vectors(const View<T>& view, const scalar_t* first, int channels) {
  bool whole = view.stride[1] == 1 && channels % LENGTH == 0;
  for (int a = 2; a < 5; ++a) whole = whole && view.stride[a] % LENGTH == 0;
  return whole && reinterpret_cast<index_t>(first) % sizeof(Vector<LENGTH>) == 0;
}

// Store the channels of one output, no more than an access can.
__device__ __forceinline__ void store_vector(const Epilogue& epilogue, const accum_t (&sums)[CHANNELS], scalar_t* y) {
  Vector<OUT_VECTOR> out;
#pragma unroll
  for (int e = 0; e < OUT_VECTOR; ++e) out.element[e] = epilogue.finish(sums[e]);
  *reinterpret_cast<Vector<OUT_VECTOR>*>(y) = out;
}

// Store the sums of a warp's pieces, four channels at a time. They pass through `stage`, as [output of a piece][lane] of these four; then
// neighbouring lanes store neighbouring outputs.
__device__ __forceinline__ void store_pieces(const Epilogue& epilogue, const accum_t (&sums)[MOST_SUMS][CHANNELS],
                                             Vector<4>* stage, const Place* places, int outputs, int channels,
                                             const View<scalar_t>& output, int lane) {
  const index_t step = output.stride[1] * static_cast<index_t>(sizeof(scalar_t));
  const bool whole = 32 % outputs == 0;  // pieces are stored at once, so that a lane keeps its place in one
#pragma unroll
  for (int first = 0; first < CHANNELS; first += 4) {
    __syncwarp();  // what was staged before has been read
#pragma unroll
    for (int at = 0; at < outputs; ++at) {
      Vector<4> four;
#pragma unroll
      for (int c = 0; c < 4; ++c) four.element[c] = epilogue.finish(sums[at][first + c]);
      stage[at * PITCH + lane] = four;
    }
    __syncwarp();
    Vector<4> four[MOST_SUMS];
    scalar_t* y[MOST_SUMS];
    bool live[MOST_SUMS];
#pragma unroll
    for (int k = 0; k < outputs; ++k) {
      const int piece = whole ? lane / outputs + 32 / outputs * k : (lane + 32 * k) / outputs;
      const int at = whole ? lane % outputs : (lane + 32 * k) % outputs;
      const Place place = places[piece];
      four[k] = stage[at * PITCH + piece];
      live[k] = at < place.live;
      y[k] = advanced(output.data + (first * output.stride[1] + at * output.stride[4]), place.output);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int k = 0; k < outputs; ++k) {
        if (live[k] && first + c < channels) *y[k] = four[k].element[c];
      }
#pragma unroll
      for (int k = 0; k < outputs; ++k) y[k] = advanced(y[k], step);
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, RESIDENT_WARPS / BLOCK_WARPS)
    convt3d_fprop_grouped(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                          const scalar_t* __restrict__ bias, const View<scalar_t> output, const int channel_tiles,
                          const int pieces_w, const int shift_w, const int runs, const int block_tiles, const int weight_bytes,
                          const int in_channels_per_group, const int out_channels_per_group) {
  const Epilogue epilogue{bias};
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Block block;
  __shared__ Place places[32 * BLOCK_WARPS];
  accum_t* weights = reinterpret_cast<accum_t*>(shared);
  const int kernel = SPECIALIZED(KERNEL_W, problem.kernel_size[2]), stride = SPECIALIZED(STRIDE_W, problem.stride[2]);
  const int positions = positions_of(stride), shift = SPECIALIZED(SHIFT_W, shift_w);
  const int in_channels = SPECIALIZED(IN_CHANNELS, in_channels_per_group);

  // blockIdx.x = (((n * groups + group) * channel_tiles + channel tile) * runs + run) * classes + class: the classes of a place are at
  // work at the same time, so that they find its inputs in the L2 cache. Where channels lie together, so are the groups of a place.
  unsigned rest = blockIdx.x;
  const auto next = [&rest](int count) {
    const unsigned index = rest % count;
    rest /= count;
    return static_cast<int>(index);
  };
  const int residue_h = next(problem.stride[1]), residue_d = next(problem.stride[0]);
  int run = output.stride[1] == 1 ? 0 : next(runs);
  const int first_out = next(channel_tiles) * CHANNELS, group = next(problem.groups);
  if (output.stride[1] == 1) run = next(runs);
  const int n = static_cast<int>(rest);
  {
    const AxisClass d = axis_class(problem, 0, residue_d), h = axis_class(problem, 1, residue_h);
    gather_weights(weights, problem, weight, d, h, group, in_channels_per_group, first_out, out_channels_per_group);
    if (threadIdx.x == 0) {
      const int first_channel = group * out_channels_per_group + first_out;
      block.d = d;
      block.h = h;
      block.origin_d = (d.first_output + problem.padding[0]) / problem.stride[0] - d.first_offset;
      block.origin_h = (h.first_output + problem.padding[1]) / problem.stride[1] - h.first_offset;
      block.per_row = divisor_of(pieces_w);
      block.rows = divisor_of(max(h.outputs, 1));
      block.output_step_d = problem.stride[0] * output.stride[2];
      block.output_step_h = problem.stride[1] * output.stride[3];
      block.first_column =
          problem.padding[2] / stride - last_offset(kernel, problem.dilation[2], stride, problem.padding[2] % stride);
      block.pieces = d.outputs * h.outputs * pieces_w;
      block.input = input.at(n, group * in_channels_per_group, 0, 0, 0) - input.data;
      block.output = output.at(n, first_channel, d.first_output, h.first_output, 0) - output.data;
      for (int c = 0; c < CHANNELS; ++c) {
        block.start[c] = epilogue.start(first_channel + c, first_out + c < out_channels_per_group);
      }
      block.live_channels = min(CHANNELS, out_channels_per_group - first_out);
      // Where channels lie together, as in channels_last_3d, they are read and written as vectors.
      block.input_vectors = channels_are_vectors<IN_VECTOR>(input, input.data + block.input, in_channels_per_group);
      block.input_lines = input.stride[4] == 1;
      block.input_quads = positions == 4 && block.input_lines && problem.input_size[2] % 4 == 0 &&
                          (input.stride[1] | input.stride[2] | input.stride[3]) % 4 == 0 &&
                          reinterpret_cast<index_t>(input.data + block.input) % sizeof(Vector<4>) == 0;
      block.output_vectors = channels_are_vectors<OUT_VECTOR>(output, output.data + block.output, block.live_channels);
    }
  }
  __syncthreads();

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  // Blocks that are at work together have neighbouring tiles: what they write is contiguous, as memory likes it.
  int piece = (run * BLOCK_WARPS + warp) * 32 + lane;
#pragma unroll 1
  for (int tile = 0; tile < block_tiles && piece - lane < block.pieces; ++tile, piece += runs * BLOCK_WARPS * 32) {
    accum_t sums[MOST_SUMS][CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
      const unsigned start = __float_as_uint(block.start[c]);
#pragma unroll
      for (int i = 0; i < positions * stride; ++i)
        sums[i][c] = __uint_as_float(computed_anew(start));  // copied once, not once a branch
    }

    __syncwarp();  // the last tile's places have been read
    {
      // Piece n is the (n % pieces_w)-th of row n / pieces_w, and this row n / pieces_w % rows of d n / pieces_w / rows.
      const int row = block.per_row.quotient(piece), of_d = block.rows.quotient(row), of_h = row - of_d * block.rows.value;
      const int q = (piece - row * block.per_row.value) * positions, column = block.first_column + q;
      const int d = block.origin_d + of_d, h = block.origin_h + of_h, live = problem.output_size[2] - q * stride;
      const index_t from = d * input.stride[2] + h * input.stride[3] + column * input.stride[4];
      const index_t to = of_d * block.output_step_d + of_h * block.output_step_h + q * stride * output.stride[4];
      places[threadIdx.x] = {block.input + from,
                             piece < block.pieces ? d : OUTSIDE,
                             h,
                             (block.output + to) * static_cast<index_t>(sizeof(scalar_t)),
                             column,
                             piece < block.pieces ? live : 0};
    }

    const Weights* taps = reinterpret_cast<const Weights*>(weights);
    int kd = 0, kh = 0;
#pragma unroll 1
    for (int rows = block.d.taps * block.h.taps; rows > 0; --rows) {
      forget_memory();
      const int below_d = kd * block.d.offset_step, below_h = kh * block.h.offset_step;
      if (++kh == block.h.taps) kh = 0, ++kd;
      const Place place = places[threadIdx.x];
      const bool inside = static_cast<unsigned>(place.d - below_d) < static_cast<unsigned>(problem.input_size[0]) &&
                          static_cast<unsigned>(place.h - below_h) < static_cast<unsigned>(problem.input_size[1]);
      const int column = inside ? place.column : OUTSIDE;
      const scalar_t* const from = input.data + (place.input - (below_d * input.stride[2] + below_h * input.stride[3]));
      if (block.input_vectors) {
        multiply<IN_VECTOR, false, false>(sums, problem, input, in_channels, shift, from, column, taps);
      } else if (block.input_quads) {
        multiply<1, true, true>(sums, problem, input, in_channels, shift, from, column, taps);
      } else if (block.input_lines) {
        multiply<1, true, false>(sums, problem, input, in_channels, shift, from, column, taps);
      } else {
        multiply<1, false, false>(sums, problem, input, in_channels, shift, from, column, taps);
      }
      taps += in_channels * kernel * 2;
    }

    __syncwarp();  // all places are there
    if (block.output_vectors && block.live_channels == OUT_VECTOR) {
      const Place place = places[threadIdx.x];
#pragma unroll
      for (int at = 0; at < positions * stride; ++at) {
        if (at < place.live) store_vector(epilogue, sums[at], advanced(output.data + at * output.stride[4], place.output));
      }
    } else if (channels_lie_together(output) && block.live_channels > 1) {
      const int again = static_cast<int>(computed_anew(threadIdx.x));
      const Place place = places[again];
      const ChannelStage stage = channel_stage(shared + weight_bytes, again / 32, 1, CHANNELS);
#pragma unroll
      for (int at = 0; at < positions * stride; ++at) {
        store_channels_last(
            stage, again % 32, 1, CHANNELS, block.live_channels, block.output_vectors,
            [&](int) { return at < place.live ? advanced(output.data + at * output.stride[4], place.output) : nullptr; },
            [&](int, int c) { return epilogue.finish(sums[at][c]); });
      }
    } else {
      const int channels = SPECIALIZED(OUT_CHANNELS, out_channels_per_group) % CHANNELS == 0 ? CHANNELS : block.live_channels;
      // Registers are for sums: what follows from the thread's number is not kept.
      const unsigned again = computed_anew(threadIdx.x);
      Vector<4>* const stage = reinterpret_cast<Vector<4>*>(shared + weight_bytes) + again / 32 * MOST_SUMS * PITCH;
      const Place* const warp_places = places + again / 32 * 32;
      const int own = static_cast<int>(again % 32), outputs = positions * stride;
      store_pieces(epilogue, sums, stage, warp_places, outputs, channels, output, own);
    }
  }
}
