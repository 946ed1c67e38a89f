/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "bf16", "fp16"]
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
LEAD_D = "padding_d % stride_d"
LEAD_H = "padding_h % stride_h"
LEAD_W = "lead_w"
SHIFT_W = "shift_w"
IN_CHANNELS = "in_channels_per_group"
OUT_CHANNELS = "out_channels_per_group"
# In 4-byte types registers do not suffice for channels that are known to lie together.
OUTPUT_LAYOUT = "0 if output_layout == 2 and itemsize == 4 else output_layout"
[constants]
lead_w = "padding_w % stride_w"
last_offset = "((kernel_w - 1) * dilation_w - lead_w) // stride_w"
offsets = "last_offset + (2 if lead_w > 0 else 1)"
shift_w = "(padding_w // stride_w - last_offset) % 4"
steps = "ceil_div(offsets * itemsize, 4)"
octets = "2 if stride_w == 1 and out_channels_per_group > 8 else 1"
row_tiles = "ceil_div(octets * stride_w, 2)"
channel_tiles = "ceil_div(out_channels_per_group, 8 * octets)"
quads_w = "ceil_div(output_w, 4 * stride_w)"
quads = "ceil_div(output_d, stride_d) * ceil_div(output_h, stride_h) * quads_w"
tiles = "ceil_div(quads, 8 * BLOCK_WARPS)"
block_tiles = "max(1, min(BLOCK_TILES, batch * groups * channel_tiles * tiles // (16 // BLOCK_WARPS * multiprocessors)))"
runs = "ceil_div(tiles, block_tiles)"
weight_bytes = "512 * (1 + split) * kernel_d * kernel_h * ceil_div(in_channels_per_group, 8) * steps * row_tiles"
shared_bytes = "weight_bytes + 2 * 8 * (BLOCK_WARPS * 32 * stride_w + 2) * itemsize"
[restrictions]
"in_channels_per_group <= 16 and out_channels_per_group <= 16" = "it is for groups of at most 16 channels: an input is read again for every 8 output channels"
"stride_d * stride_h * row_tiles <= 4" = "a warp keeps the sums of all residues in registers: the strides' product must be at most 8, and 4 where that along w is 1"
"offsets <= 8" = "the taps of a row must reach over at most 8 inputs, which a thread keeps in registers"
"shared_bytes <= 96 * 1024" = "the weights of 8 output channels must fit the 99 KiB of shared memory that every GPU has"
"quads <= 500000000" = "it counts the positions of a volume in 32 bits"
[search]
BLOCK_WARPS = [4, 8]
BLOCK_TILES = [4, 8, 16]
[cost]
steps = "block_tiles * ceil_div(in_channels_per_group, 8) * kernel_d * kernel_h"
products = "BLOCK_WARPS * 4096 * row_tiles * steps"
bytes = "BLOCK_WARPS * 64 * (4 + offsets) * itemsize"
[[launch]]
grid = "batch * runs * groups * channel_tiles"
block = "32 * BLOCK_WARPS"
shared_bytes = "shared_bytes"
*/
// Groups of few channels on tensor cores, without staging. Such a layer is bound by its stores: what counts is that these are whole pieces
// of rows, and that little else has to be done for each.
//
// On each axis o = q*stride + r, so that pieces of a row begin where the row does, and tap t feeds o through input
// q + padding/stride - offset with offset = (t*dilation - r - padding%stride)/stride. A warp owns all r of its positions (d, h, w): an input
// is read once for every output that it feeds there. The taps along w of one (kd, kh) are one product:
//
//   rows:    output channels (8) x residues r of w, two of these octets a fragment
//   depth:   input channels (8) x offsets: 1 in tf32, 2 in 16 bits; where a residue has no tap at an offset the weight is zero
//   columns: 8 positions q
//
// A warp has 8 quads of 4 neighbouring q, counted over rows and planes alike; column n of its product t is the t-th q of quad n. So a
// lane reads neighbours of its channel as they lie in memory, 16 or 8 bytes at once where rows are aligned: in 16 bits two
// neighbours are two offsets and need no turning. The sums of 8 channels pass through shared memory, for the block's quads together, and
// a warp stores all that the block has of a channel: where two warps store a part of a sector each, memory first reads it.
//
// Zero weights stand for taps that are none: an input that is infinite or no number also spoils outputs beside those it feeds. Where a sum
// of a block is NaN, what is NaN among its outputs is computed anew, by the definition.
#include "convt3d.cuh"
#include "convt3d/core/advanced.cuh"
#include "convt3d/core/divisor.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/gathered.cuh"
#include "convt3d/core/layout.cuh"
#include "convt3d/ptx/mma.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/ptx/split_tf32.cuh"
#include "convt3d/core/vector.cuh"

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 4
#endif
static_assert(BLOCK_WARPS % 2 == 0 && 8 % BLOCK_WARPS == 0, "a warp stores every so many of 8 channels");
#ifndef BLOCK_TILES
#define BLOCK_TILES 8
#endif

constexpr int EACH = 4 / sizeof(scalar_t);  // elements of a register
constexpr int MOST_WORDS = 16 / EACH;       // of a window: 3 elements before it, 4 + 8 in it, one after it
constexpr int BLOCK_QUADS = 8 * BLOCK_WARPS;
constexpr int MOST_TILES = 4;                                            // of sums: row tiles of all residues of d and h
constexpr int NOWHERE = 0x40000000;                                      // a coordinate outside every tensor
constexpr bool LONG_ROWS = (KERNEL_W - 1) * DILATION_W >= 3 * STRIDE_W;  // of taps: a window takes more registers
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int MOST_WARPS = 12;  // with 16, and 128 registers a thread, the compiler spills some
#else
constexpr int MOST_WARPS = 16;
#endif
constexpr int RESIDENT_WARPS = PARTS == 2 ? 8 : LONG_ROWS || STRIDE_W > 2 ? 12 : MOST_WARPS;

union Word {
  unsigned bits;
  scalar_t element[EACH];
};

struct alignas(16) Fragment {
  unsigned a[4];
};

// How many bytes a quad's first output in the first channel lies behind the tensor's first, how many outputs of its row there are from
// there on, and what of it is inside.
struct alignas(16) Place {
  index_t bytes;
  int live;
  int flags;  // bit r_d * stride_h + r_h: that residue is inside; and:
};
constexpr int BEGINS = 1 << 8, ENDS = 1 << 9;  // what the block has of a row

// Which tap feeds an output through the input `offset` before its position's.
struct AxisTaps {
  int kernel, stride, dilation, lead;
  __device__ int first() const { return lead > 0 ? -1 : 0; }
  __device__ int last() const { return ((kernel - 1) * dilation - lead + stride) / stride - 1; }
  __device__ int tap(int offset, int residue) const {  // or -1
    const int scaled = offset * stride + residue + lead;
    return scaled >= 0 && scaled % dilation == 0 && scaled / dilation < kernel ? scaled / dilation : -1;
  }
};

struct Taps {
  AxisTaps d, h, w;
  int shift, in_octets, octets;  // of the block's output channels
  __device__ int steps() const { return (w.last() - w.first() + EACH) / EACH; }
  __device__ int elements() const { return shift + 3 + EACH * steps(); }  // from the quad on in which a quad's window begins
  __device__ int row_tiles() const { return (octets * w.stride + 1) / 2; }
  // Of the fragments of one (kd, kh) and one octet of input channels: [step][row tile][part][lane].
  __device__ int fragments() const { return steps() * row_tiles() * PARTS * 32; }
};

__device__ inline Taps taps_of(const Problem& problem, int shift, int in_channels, int octets) {
  return {{SPECIALIZED(KERNEL_D, problem.kernel_size[0]), SPECIALIZED(STRIDE_D, problem.stride[0]),
           SPECIALIZED(DILATION_D, problem.dilation[0]), SPECIALIZED(LEAD_D, problem.padding[0] % problem.stride[0])},
          {SPECIALIZED(KERNEL_H, problem.kernel_size[1]), SPECIALIZED(STRIDE_H, problem.stride[1]),
           SPECIALIZED(DILATION_H, problem.dilation[1]), SPECIALIZED(LEAD_H, problem.padding[1] % problem.stride[1])},
          {SPECIALIZED(KERNEL_W, problem.kernel_size[2]), SPECIALIZED(STRIDE_W, problem.stride[2]),
           SPECIALIZED(DILATION_W, problem.dilation[2]), SPECIALIZED(LEAD_W, problem.padding[2] % problem.stride[2])},
          SPECIALIZED(SHIFT_W, shift),
          (in_channels + 7) / 8,
          octets};
}

// The inputs of one channel that a quad's positions meet: `column` is the first one's, a multiple of four; those outside are zero.
__device__ __forceinline__ void load_window(unsigned (&words)[MOST_WORDS], const scalar_t* from, int column, int width,
                                            bool inside, bool quads, index_t step, const Taps& taps) {
#pragma unroll
  for (int i = 0; i < MOST_WORDS; ++i) words[i] = 0;
  if (quads) {
#pragma unroll
    for (int first = 0; first < taps.elements(); first += 4) {
      if (!inside || static_cast<unsigned>(column + first) >= static_cast<unsigned>(width)) continue;
      if (taps.elements() - first <= EACH) {
        words[first / EACH] = *reinterpret_cast<const unsigned*>(from + first);
      } else {
        const Words<4 / EACH> loaded = *reinterpret_cast<const Words<4 / EACH>*>(from + first);
#pragma unroll
        for (int i = 0; i < 4 / EACH; ++i) words[first / EACH + i] = loaded.element[i];
      }
    }
  } else {
#pragma unroll
    for (int i = taps.shift / EACH; i * EACH < taps.elements(); ++i) {
      Word word{0};
#pragma unroll
      for (int e = 0; e < EACH; ++e) {
        const int at = i * EACH + e;
        if (inside && static_cast<unsigned>(column + at) < static_cast<unsigned>(width)) word.element[e] = from[at * step];
      }
      words[i] = word.bits;
    }
  }
}

// The register that begins with element `at` of a window.
__device__ __forceinline__ unsigned register_at(const unsigned (&words)[MOST_WORDS], int at) {
  if (at % EACH == 0) return words[at / EACH];
  return words[at / EACH] >> 16 | words[at / EACH + 1] << 16;
}

// The block's weights as fragments: [kd][kh][octet of input channels], then as Taps::fragments has it.
__device__ inline void gather_weights(Fragment* fragments, const Problem& problem, const View<const scalar_t>& weight,
                                      int group, int first_out, const Taps& taps) {
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int row_tiles = taps.row_tiles(), steps = taps.steps();
  const int count = taps.d.kernel * taps.h.kernel * taps.in_octets * steps * row_tiles * 128;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32 * BLOCK_WARPS) {
    const int r = i % 4, lane = i / 4 % 32, fragment = i / 128, step = fragment / row_tiles % steps;
    const int octet = fragment / row_tiles / steps % taps.in_octets, tap = fragment / row_tiles / steps / taps.in_octets;
    const int half = fragment % row_tiles * 2 + r % 2, co = first_out + half / taps.w.stride * 8 + lane / 4;
    const int ci = octet * 8 + r / 2 * 4 + lane % 4;
    const bool live = half < taps.octets * taps.w.stride && co < out_channels && ci < channels;
    Word word{0};
    for (int e = 0; e < EACH; ++e) {
      const int kw = taps.w.tap(taps.w.last() - step * EACH - e, half % taps.w.stride);
      if (live && kw >= 0)
        word.element[e] = *weight.at(group * channels + ci, co, tap / taps.h.kernel, tap % taps.h.kernel, kw);
    }
    const int to = fragment * PARTS * 32 + lane;
    if (EACH == 1) {
      const float value = __uint_as_float(word.bits);
      if (PARTS == 2) {
        split_tf32(value, word.bits, fragments[to + 32].a[r]);
      } else {
        word.bits = nearest_tf32(value);
      }
    }
    fragments[to].a[r] = word.bits;
  }
}

// The products of the taps along w of one (kd, kh) with the inputs of one octet of channels.
__device__ __forceinline__ void multiply_window(float (*sums)[4][4], const unsigned (&words)[2][MOST_WORDS],
                                                const Fragment* fragment, const Taps& taps) {
#pragma unroll
  for (int step = 0; step < taps.steps(); ++step) {
#pragma unroll
    for (int m = 0; m < taps.row_tiles(); ++m, fragment += PARTS * 32) {
      const Fragment high = fragment[0], low = fragment[(PARTS - 1) * 32];
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        unsigned b[2], rest[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          b[k] = register_at(words[k], taps.shift + t + EACH * step);
          if (EACH == 1) {
            const float value = __uint_as_float(b[k]);
            if (PARTS == 2) {
              split_tf32(value, b[k], rest[k]);
            } else {
              b[k] = nearest_tf32(value);
            }
          }
        }
        if (PARTS == 1) {
          CONVT3D_MULTIPLY(sums[m][t], high.a, b[0], b[1]);
        } else {
          // Tensor cores cut off what they add, so a step begins at zero and is added here.
          float part[4] = {};
          CONVT3D_MULTIPLY(part, low.a, b[0], b[1]);
          CONVT3D_MULTIPLY(part, high.a, rest[0], rest[1]);
          CONVT3D_MULTIPLY(part, high.a, b[0], b[1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[m][t][e] += part[e];
        }
      }
    }
  }
}

// Store this warp's share of the block's outputs of up to 8 channels for one residue of d and of h, which are `offset` behind
// the places: `sums` as [channel][output of the block].
__device__ __forceinline__ void store_residue(const scalar_t* sums, int pitch, const Place* places, int stride, int residue,
                                              int channels, const View<scalar_t>& output, index_t offset, int warp, int lane) {
  const int quad_outputs = 4 * stride, outputs = BLOCK_QUADS * quad_outputs;
  if (output.stride[4] != 1) {
    // Neighbouring lanes have neighbouring channels.
    const int c = lane % 8;
#pragma unroll 4
    for (int i = warp * 4 + lane / 8; i < outputs; i += BLOCK_WARPS * 4) {
      const Place place = places[i / quad_outputs];
      const int at = i % quad_outputs;
      if (c < channels && at < place.live && (place.flags >> residue & 1) != 0)
        *advanced(output.data + (offset + c * output.stride[1] + at * output.stride[4]), place.bytes) = sums[c * pitch + i];
    }
    return;
  }
  const index_t step = BLOCK_WARPS * output.stride[1] * static_cast<index_t>(sizeof(scalar_t));
  // BLOCK_WARPS is a multiple of EACH, so that a block's outputs are whole runs.
  const int run = 32 * EACH, first = lane * EACH, first_quad = first / quad_outputs, first_at = first % quad_outputs;
  const bool whole_quads = run % quad_outputs == 0;  // are stored at once, so that a lane keeps its place in them
  scalar_t* const data = output.data + (offset + warp * output.stride[1]);
  const scalar_t* const own = sums + (warp * pitch + first);
#pragma unroll 8
  for (int k = 0; k < outputs / run; ++k) {
    const int quad = whole_quads ? first_quad + run / quad_outputs * k : (first + run * k) / quad_outputs;
    const int at = whole_quads ? first_at : (first + run * k) % quad_outputs;
    const Place place = places[quad];
    const int live = (place.flags & 1 << residue) != 0 ? place.live - at : 0;
    scalar_t* y = advanced(data + at, place.bytes);
    const scalar_t* const from = own + run * k;
    if (EACH == 1) {
#pragma unroll
      for (int c = 0; c < 8; c += BLOCK_WARPS, y = advanced(y, step)) {
        if (live > 0 && (channels == 8 || c + warp < channels)) *y = from[c * pitch];
      }
      continue;
    }
    // Two of 16 bits at an address that is a multiple of four bytes: this lane's, or its second and the next lane's first, which leaves
    // those at the ends of what the block has of a row. All channels of a warp are aligned alike.
    const int odd = static_cast<int>(reinterpret_cast<index_t>(y) / 2 % 2);
    const bool paired = odd == 0 ? live > 1 : live > 2 && !((place.flags & ENDS) != 0 && at + 2 == quad_outputs);
    const bool last = !paired && live > odd, first_too = odd != 0 && live > 0 && (place.flags & BEGINS) != 0 && at == 0;
    y += odd;
#pragma unroll
    for (int c = 0; c < 8; c += BLOCK_WARPS, y = advanced(y, step)) {
      if (channels < 8 && c + warp >= channels) break;
      const unsigned* const words = reinterpret_cast<const unsigned*>(from + c * pitch);
      const Word now{words[0]};
      const Word word{static_cast<unsigned>((static_cast<unsigned long long>(words[1]) << 32 | now.bits) >> (16 * odd))};
      if (paired) *reinterpret_cast<unsigned*>(y) = word.bits;
      if (last) y[0] = word.element[0];
      if (first_too) y[-1] = now.element[0];
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, RESIDENT_WARPS / BLOCK_WARPS)
    convt3d_fprop_grouped_mma(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                              const scalar_t* __restrict__ bias, View<scalar_t> output, const int shift_w, const int octets,
                              const int channel_tiles, const int quads_w, const int quads, const int runs,
                              const int block_tiles, const int weight_bytes) {
  lay_out(problem, output, OUTPUT_LAYOUT ? SPECIALIZED(OUTPUT_LAYOUT, layout_of(problem, output)) : 0);
  const Epilogue epilogue{bias};
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Place place_tables[2][BLOCK_QUADS];
  const int channels = SPECIALIZED(IN_CHANNELS, problem.in_channels / problem.groups);
  const int out_channels = SPECIALIZED(OUT_CHANNELS, problem.out_channels / problem.groups);
  const Taps taps = taps_of(problem, shift_w, channels, SPECIALIZED(STRIDE_W == 1 && OUT_CHANNELS > 8 ? 2 : 1, octets));
  const int pitch = BLOCK_QUADS * 4 * taps.w.stride + 2, row_tiles = taps.row_tiles();

  // blockIdx.x = (((n * groups + group) * channel_tiles + tile) * runs + run). Where channels lie together, so are the groups of a place.
  unsigned rest = blockIdx.x;
  const auto next = [&rest](int count) {
    const unsigned index = rest % count;
    rest /= count;
    return static_cast<int>(index);
  };
  int run = output.stride[1] == 1 ? 0 : next(runs);
  const int first_out = next(channel_tiles) * 8 * taps.octets, group = next(problem.groups);
  if (output.stride[1] == 1) run = next(runs);
  const int n = static_cast<int>(rest);
  gather_weights(reinterpret_cast<Fragment*>(shared), problem, weight, group, first_out, taps);
  __syncthreads();

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const Fragment* const fragments = reinterpret_cast<const Fragment*>(shared) + lane;
  const index_t strides = input.stride[0] | input.stride[1] | input.stride[2] | input.stride[3];
  const bool input_quads = input.stride[4] == 1 && problem.input_size[2] % 4 == 0 && strides % 4 == 0 &&
                           reinterpret_cast<index_t>(input.data) % (4 * sizeof(scalar_t)) == 0;
  int buffer = 0;
  const Divisor per_row = divisor_of(quads_w), rows = divisor_of((problem.output_size[1] + taps.h.stride - 1) / taps.h.stride);
  const int before_d = problem.padding[0] / taps.d.stride, before_h = problem.padding[1] / taps.h.stride;
  const int first_column = problem.padding[2] / taps.w.stride - taps.w.last() - taps.shift;
  bool spoilt = false;  // some sum was NaN
  // Blocks that are at work together have neighbouring tiles: what they write is contiguous, as memory likes it.
#pragma unroll 1
  for (int tile = 0; tile < block_tiles; ++tile) {
    const int first = (tile * runs + run) * BLOCK_QUADS, quad = first + warp * 8 + lane / 4;
    if (first >= quads) break;
    const int line = per_row.quotient(quad), q_d = rows.quotient(line), q_h = line - q_d * rows.value;
    const int q_w = 4 * (quad - line * quads_w), column = q_w + first_column;
    const int at_d = quad < quads ? q_d + before_d : -NOWHERE, at_h = q_h + before_h;
    const scalar_t* const from = input.at(n, group * channels + lane % 4, at_d, at_h, column);
    Place* const places = place_tables[tile % 2];  // other warps may be storing the last tile
    if (lane % 4 == 0) {
      const int d = q_d * taps.d.stride, h = q_h * taps.h.stride, w = q_w * taps.w.stride, *size = problem.output_size;
      int flags =
          (q_w == 0 || quad == first ? BEGINS : 0) | (q_w + 4 >= 4 * quads_w || quad + 1 == first + BLOCK_QUADS ? ENDS : 0);
#pragma unroll
      for (int r = 0; r < taps.d.stride * taps.h.stride; ++r)
        flags |= (d + r / taps.h.stride < size[0] && h + r % taps.h.stride < size[1] ? 1 : 0) << r;
      const scalar_t* const corner = output.at(n, group * out_channels + first_out, d, h, w);
      places[quad - first] = {(corner - output.data) * static_cast<index_t>(sizeof(scalar_t)), quad < quads ? size[2] - w : 0,
                              flags};
    }

    float sums[MOST_TILES][4][4];
#pragma unroll
    for (int i = 0; i < taps.d.stride * taps.h.stride * row_tiles * 16; ++i) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
#pragma unroll 1
    for (int offset_d = taps.d.first(); offset_d <= taps.d.last(); ++offset_d) {
#pragma unroll(LONG_ROWS ? 1 : 16)
      for (int offset_h = taps.h.first(); offset_h <= taps.h.last(); ++offset_h) {
        const bool inside = static_cast<unsigned>(at_d - offset_d) < static_cast<unsigned>(problem.input_size[0]) &&
                            static_cast<unsigned>(at_h - offset_h) < static_cast<unsigned>(problem.input_size[1]);
        const index_t below = offset_d * input.stride[2] + offset_h * input.stride[3];
#pragma unroll 1
        for (int octet = 0; octet < taps.in_octets; ++octet) {
          // Else the compiler for sm_100 and newer makes two or three copies of this loop, and spills.
          forget_memory();
          unsigned words[2][MOST_WORDS];  // of this lane's two channels
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int ci = octet * 8 + k * 4;
            load_window(words[k], from + (ci * input.stride[1] - below), column, problem.input_size[2],
                        inside && ci + lane % 4 < channels, input_quads, input.stride[4], taps);
          }
#pragma unroll
          for (int r_d = 0; r_d < taps.d.stride; ++r_d) {
            const int kd = taps.d.tap(offset_d, r_d);
            if (kd < 0) continue;
#pragma unroll
            for (int r_h = 0; r_h < taps.h.stride; ++r_h) {
              const int kh = taps.h.tap(offset_h, r_h);
              if (kh < 0) continue;
              multiply_window(sums + (r_d * taps.h.stride + r_h) * row_tiles, words,
                              fragments + ((kd * taps.h.kernel + kh) * taps.in_octets + octet) * taps.fragments(), taps);
            }
          }
        }
      }
    }

    // Registers are for sums: what follows from the thread's number is not kept.
    const int again = static_cast<int>(computed_anew(threadIdx.x)), own = again % 32;
#pragma unroll
    for (int octet = 0; octet < taps.octets; ++octet) {
      const int co = first_out + octet * 8 + own / 4;
      const int live = SPECIALIZED(OUT_CHANNELS % 8 == 0, false) ? 8 : out_channels - first_out - octet * 8;
      const float start = epilogue.start(group * out_channels + co, co < out_channels);
#pragma unroll
      for (int r_d = 0; r_d < taps.d.stride; ++r_d) {
#pragma unroll
        for (int r_h = 0; r_h < taps.h.stride; ++r_h) {
          scalar_t* const stage = reinterpret_cast<scalar_t*>(shared + weight_bytes) + buffer * 8 * pitch;
          buffer ^= 1;
          // Lane l has channel l / 4 of the quads 2*(l % 4) and the next.
          const auto sum = [&](int residue, int t, int e) {
            const int half = octet * taps.w.stride + residue;
            const float product = sums[(r_d * taps.h.stride + r_h) * row_tiles + half / 2][t][half % 2 * 2 + e];
            spoilt = spoilt || product != product;
            return epilogue.finish(product, start);
          };
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            scalar_t* const to = stage + own / 4 * pitch + (again / 32 * 32 + own % 4 * 8 + i) * taps.w.stride;
#pragma unroll
            for (int r = 0; r < taps.w.stride; ++r) {
              if (taps.w.stride % 2 == 1) {
                to[r] = sum(r, i % 4, i / 4);
              } else if (r % 2 == 0) {
                *reinterpret_cast<Vector<2>*>(to + r) = {{sum(r, i % 4, i / 4), sum(r + 1, i % 4, i / 4)}};
              }
            }
          }
          __syncthreads();  // all sums and places are there, and the buffer before this one has been read
          const index_t offset = octet * 8 * output.stride[1] + r_d * output.stride[2] + r_h * output.stride[3];
          store_residue(stage, pitch, places, taps.w.stride, r_d * taps.h.stride + r_h, live, output, offset, again / 32, own);
        }
      }
    }
  }

  if (__syncthreads_or(spoilt) == 0) return;
  const int columns = 4 * taps.w.stride, residues = taps.d.stride * taps.h.stride;
  const int tile_outputs = BLOCK_QUADS * columns * residues, live = min(taps.octets * 8, out_channels - first_out);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < block_tiles * tile_outputs; i += 32 * BLOCK_WARPS) {
    const int quad = (i / tile_outputs * runs + run) * BLOCK_QUADS + i / columns % BLOCK_QUADS;
    const int residue = i / columns / BLOCK_QUADS % residues, line = per_row.quotient(quad), q_d = rows.quotient(line);
    const int d = q_d * taps.d.stride + residue / taps.h.stride;
    const int h = (line - q_d * rows.value) * taps.h.stride + residue % taps.h.stride;
    const int w = (quad - line * quads_w) * columns + i % columns;
    if (quad >= quads || h >= problem.output_size[1] || d >= problem.output_size[0] || w >= problem.output_size[2]) continue;
#pragma unroll 1
    for (int co = first_out; co < first_out + live; ++co) {
      scalar_t* const y = output.at(n, group * out_channels + co, d, h, w);
      if (to_accum(*y) != to_accum(*y)) {
        const int first_ci = group * (problem.in_channels / problem.groups);
        *y = gathered(problem, input, weight, epilogue, n, group * (problem.out_channels / problem.groups) + co, co, first_ci,
                      d, h, w);
      }
    }
  }
}
