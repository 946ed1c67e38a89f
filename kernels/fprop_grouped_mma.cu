/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "bf16", "fp16"]
[specialize]
KERNEL_W = "kernel_w"
STRIDE_W = "stride_w"
DILATION_W = "dilation_w"
LEAD_W = "lead_w"
SHIFT_W = "shift_w"
IN_OCTETS = "in_octets"
OUT_OCTETS = "out_octets"
[constants]
in_octets = "ceil_div(in_channels_per_group, 8)"
out_octets = "ceil_div(out_channels_per_group, 8)"
lead_w = "padding_w % stride_w"
last_offset = "((kernel_w - 1) * dilation_w - lead_w) // stride_w"
offsets = "last_offset + (2 if lead_w > 0 else 1)"
shift_w = "(padding_w // stride_w - last_offset) % 4"
steps = "ceil_div(offsets * itemsize, 4)"
row_tiles = "ceil_div(out_octets * stride_w, 2)"
classes = "stride_d * stride_h"
taps_d = "ceil_div(kernel_d, stride_d // gcd(stride_d, dilation_d))"
taps_h = "ceil_div(kernel_h, stride_h // gcd(stride_h, dilation_h))"
quads_w = "ceil_div(output_w, 4 * stride_w)"
quads = "ceil_div(output_d, stride_d) * ceil_div(output_h, stride_h) * quads_w"
units = "1 if split or row_tiles > 1 else UNITS"
tiles = "ceil_div(quads, 8 * units * BLOCK_WARPS)"
block_tiles = "max(1, min(BLOCK_TILES, batch * groups * classes * tiles // (16 * multiprocessors)))"
runs = "ceil_div(tiles, block_tiles)"
weight_bytes = "512 * (1 + split) * taps_d * taps_h * in_octets * steps * row_tiles"
shared_bytes = "weight_bytes + BLOCK_WARPS * 8 * (32 * stride_w + 2) * itemsize"
[restrictions]
"in_channels_per_group <= 16 and out_channels_per_group <= 16" = "it is for groups of at most 16 channels, whose sums a warp keeps in registers"
"row_tiles <= (2 if split else 3)" = "the stride along w times octets of output channels must be at most 6 (4 in tf32x3): a warp keeps the sums of all residues of w in registers"
"offsets <= 8" = "the taps of a row must reach over at most 8 inputs, which a thread keeps in registers"
"shared_bytes <= 96 * 1024" = "the weights of a class of residues must fit the 99 KiB of shared memory that every GPU has"
"quads <= 500000000" = "it counts the outputs of a class in 32 bits"
[search]
BLOCK_WARPS = [4, 8]
BLOCK_TILES = [4, 16]
UNITS = [1, 2]
[[launch]]
grid = "batch * runs * groups * classes"
block = "32 * BLOCK_WARPS"
shared_bytes = "shared_bytes"
*/
// Groups of few channels on tensor cores, without staging. Such a layer is bound by its stores: what counts is that these are whole pieces
// of rows, and that little else has to be done for each.
//
// Along d and h o + padding = q*stride + r, and tap t feeds o through input q - (t*dilation - r)/stride; a block has one r of each. Along
// w o = q*stride + r, so that pieces of a row begin where the row does, and tap t feeds o through input q + padding/stride - offset with
// offset = (t*dilation - r - padding%stride)/stride. One row of taps is one product:
//
//   rows:    output channels (8) x residues r of w, two of these octets a fragment
//   depth:   input channels (8) x offsets: 1 in tf32, 2 in 16 bits; where a residue has no tap at an offset the weight is zero
//   columns: 8 positions q
//
// A warp has `UNITS` times 8 quads of 4 neighbouring q, counted over rows and planes alike; column n of its product t is the t-th q
// of quad n. So a lane reads neighbours of its channel as they lie in memory, 16 or 8 bytes at once where rows are aligned: in 16 bits
// two neighbours are two offsets and need no turning. Every row is read again by other taps and residues; the L1 cache holds it.
// The sums of 8 channels pass through shared memory and leave it as pieces of 32 * stride outputs of a row.
//
// Zero weights stand for taps that are none: an input that is infinite or no number also spoils outputs beside those it feeds.
#include "convt3d.cuh"
#include "convt3d/divisor.cuh"
#include "convt3d/forget_memory.cuh"
#include "convt3d/mma.cuh"
#include "convt3d/specialized.cuh"
#include "convt3d/store_piece.cuh"

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 4
#endif
#ifndef BLOCK_TILES
#define BLOCK_TILES 16
#endif
#ifndef UNITS
#define UNITS 2
#endif
// Set by the problem; these are for a look at the compiler's output.
#ifndef KERNEL_W
#define KERNEL_W 3
#endif
#ifndef STRIDE_W
#define STRIDE_W 2
#endif
#ifndef DILATION_W
#define DILATION_W 1
#endif
#ifndef LEAD_W
#define LEAD_W 1
#endif
#ifndef SHIFT_W
#define SHIFT_W 0
#endif
#ifndef IN_OCTETS
#define IN_OCTETS 1
#endif
#ifndef OUT_OCTETS
#define OUT_OCTETS 1
#endif

#if defined(CONVT3D_TF32X3)
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif
#if defined(CONVT3D_BF16)
#define CONVT3D_MULTIPLY mma_bf16
#elif defined(CONVT3D_FP16)
#define CONVT3D_MULTIPLY mma_fp16
#else
#define CONVT3D_MULTIPLY mma_tf32
#endif

// More sums leave room for one unit, and for fewer warps.
constexpr int ROW_TILES = (OUT_OCTETS * STRIDE_W + 1) / 2, OWN_UNITS = PARTS == 2 || ROW_TILES > 1 ? 1 : UNITS;
constexpr int RESIDENT_WARPS = ROW_TILES > 1 || (KERNEL_W - 1) * DILATION_W >= 4 * STRIDE_W ? 8 : PARTS == 2 ? 12 : 16;
constexpr int EACH = 4 / sizeof(scalar_t);  // elements of a register
constexpr int MOST_WORDS = 16 / EACH;       // of a window: 3 elements before it, 4 + 8 in it, one after it
constexpr int MOST_ROW_TILES = 3;
constexpr int NOWHERE = 0x40000000;  // a w outside every row

union Word {
  unsigned bits;
  scalar_t element[EACH];
};

template <int WORDS>
struct alignas(4 * WORDS) Words {
  unsigned word[WORDS];
};

struct alignas(16) Fragment {
  unsigned a[4];
};

struct alignas(2 * sizeof(scalar_t)) Pair {
  scalar_t element[2];
};

// Where a quad's outputs of the first channel begin, and at which w.
struct alignas(16) Place {
  index_t output;
  int w;
};

// What all threads of a block have in common. In shared memory, because registers are for sums.
struct Block {
  AxisClass d, h;
  int origin_d, origin_h;  // the input of tap 0 and the class's first output
  Divisor quads_w, rows;
  int quads;
  index_t input, output;  // where the first channel begins
  bool input_quads;       // are read at once
};

// The constants of w.
struct RowTaps {
  int kernel, stride, dilation, lead, shift;
  __device__ int last_offset() const { return ((kernel - 1) * dilation - lead + stride) / stride - 1; }
  __device__ int steps() const { return (last_offset() + (lead > 0 ? 2 : 1) + EACH - 1) / EACH; }
  __device__ int elements() const { return shift + 3 + EACH * steps(); }  // from the quad on in which a quad's window begins
  __device__ int tap(int offset, int residue) const {                     // or -1
    const int scaled = offset * stride + residue + lead;
    return scaled >= 0 && scaled % dilation == 0 && scaled / dilation < kernel ? scaled / dilation : -1;
  }
};

__device__ inline RowTaps row_taps(const Problem& problem, int shift) {
  return {SPECIALIZED(KERNEL_W, problem.kernel_size[2]), SPECIALIZED(STRIDE_W, problem.stride[2]),
          SPECIALIZED(DILATION_W, problem.dilation[2]), SPECIALIZED(LEAD_W, problem.padding[2] % problem.stride[2]),
          SPECIALIZED(SHIFT_W, shift)};
}

// The inputs of one channel that a quad's positions meet: `column` is the first one's, a multiple of four; those outside are zero.
__device__ __forceinline__ void load_window(unsigned (&words)[MOST_WORDS], const scalar_t* from, int column, int width,
                                            bool inside, bool quads, index_t step, const RowTaps& row) {
#pragma unroll
  for (int i = 0; i < MOST_WORDS; ++i) words[i] = 0;
  if (quads) {
#pragma unroll
    for (int first = 0; first < row.elements(); first += 4) {
      if (!inside || static_cast<unsigned>(column + first) >= static_cast<unsigned>(width)) continue;
      if (row.elements() - first <= EACH) {
        words[first / EACH] = *reinterpret_cast<const unsigned*>(from + first);
      } else {
        const Words<4 / EACH> loaded = *reinterpret_cast<const Words<4 / EACH>*>(from + first);
#pragma unroll
        for (int i = 0; i < 4 / EACH; ++i) words[first / EACH + i] = loaded.word[i];
      }
    }
    return;
  }
#pragma unroll
  for (int i = row.shift / EACH; i * EACH < row.elements(); ++i) {
    Word word{0};
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int at = i * EACH + e;
      if (inside && static_cast<unsigned>(column + at) < static_cast<unsigned>(width)) word.element[e] = from[at * step];
    }
    words[i] = word.bits;
  }
}

// The register that begins with element `at` of a window.
__device__ __forceinline__ unsigned register_at(const unsigned (&words)[MOST_WORDS], int at) {
  if (at % EACH == 0) return words[at / EACH];
  return words[at / EACH] >> 16 | words[at / EACH + 1] << 16;
}

// Weights as fragments: [kd][kh][octet of input channels][step][row tile][part][lane].
__device__ inline void gather_weights(Fragment* fragments, const Problem& problem, const View<const scalar_t>& weight,
                                      const AxisClass& d, const AxisClass& h, int group, const RowTaps& row, int in_octets,
                                      int out_octets) {
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int steps = row.steps(), row_tiles = (out_octets * row.stride + 1) / 2;
  const int count = d.taps * h.taps * in_octets * steps * row_tiles * 128;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 32 * BLOCK_WARPS) {
    const int r = i % 4, lane = i / 4 % 32, fragment = i / 128, step = fragment / row_tiles % steps;
    const int octet = fragment / row_tiles / steps % in_octets, tap_row = fragment / row_tiles / steps / in_octets;
    const int kd = d.first_tap + tap_row / h.taps * d.tap_step, kh = h.first_tap + tap_row % h.taps * h.tap_step;
    const int half = fragment % row_tiles * 2 + r % 2, co = half / row.stride * 8 + lane / 4,
              ci = octet * 8 + r / 2 * 4 + lane % 4;
    Word word{0};
    for (int e = 0; e < EACH; ++e) {
      const int kw = row.tap(row.last_offset() - step * EACH - e, half % row.stride);
      if (kw >= 0 && co < out_channels && ci < channels) word.element[e] = *weight.at(group * channels + ci, co, kd, kh, kw);
    }
    const int to = fragment * PARTS * 32 + lane;
    if (EACH == 1) {
      const float value = __uint_as_float(word.bits);
      word.bits = nearest_tf32(value);
      if (PARTS == 2) fragments[to + 32].a[r] = nearest_tf32(value - __uint_as_float(word.bits));
    }
    fragments[to].a[r] = word.bits;
  }
}

// The products of a row of taps for one octet of input channels.
__device__ __forceinline__ void multiply_windows(float (&sums)[UNITS][MOST_ROW_TILES][4][4],
                                                 const unsigned (&words)[UNITS][2][MOST_WORDS], const Fragment* fragment,
                                                 int units, int row_tiles, int steps, int shift) {
#pragma unroll
  for (int step = 0; step < steps; ++step) {
    if (PARTS == 2) forget_memory();  // else the fragments of all steps are read first, into more registers than there are
    Fragment a[MOST_ROW_TILES][PARTS];
#pragma unroll
    for (int i = 0; i < row_tiles * PARTS; ++i) a[i / PARTS][i % PARTS] = fragment[(step * row_tiles * PARTS + i) * 32];
#pragma unroll
    for (int i = 0; i < units * 4; ++i) {
      const int u = i / 4, t = i % 4;
      unsigned b[PARTS][2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        b[0][k] = register_at(words[u][k], shift + t + EACH * step);
        if (EACH == 1) {
          const float value = __uint_as_float(b[0][k]);
          b[0][k] = nearest_tf32(value);
          if (PARTS == 2) b[PARTS - 1][k] = nearest_tf32(value - __uint_as_float(b[0][k]));
        }
      }
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
        if (PARTS == 1) {
          CONVT3D_MULTIPLY(sums[u][m][t], a[m][0].a, b[0][0], b[0][1]);
        } else {
          // Tensor cores cut off what they add, so a step begins at zero and is added here.
          float part[4] = {};
          CONVT3D_MULTIPLY(part, a[m][PARTS - 1].a, b[0][0], b[0][1]);
          CONVT3D_MULTIPLY(part, a[m][0].a, b[PARTS - 1][0], b[PARTS - 1][1]);
          CONVT3D_MULTIPLY(part, a[m][0].a, b[0][0], b[0][1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) sums[u][m][t][e] += part[e];
        }
      }
    }
  }
}

// Store 8 channels of one unit: `sums` as [channel][output of the unit], `places` those of its quads.
__device__ __forceinline__ void store_channels(const scalar_t* sums, int pitch, const Place* places, int stride, int width,
                                               int channels, const View<scalar_t>& output, index_t first_output, int lane) {
  if (output.stride[4] != 1) {
    // Neighbouring lanes have neighbouring channels.
    const int c = lane % 8;
#pragma unroll 4
    for (int i = lane / 8; i < 32 * stride; i += 4) {
      const Place place = places[i / (4 * stride)];
      const int at = i % (4 * stride);
      if (c < channels && place.w + at < width)
        output.data[first_output + place.output + c * output.stride[1] + at * output.stride[4]] = sums[c * pitch + i];
    }
    return;
  }
#pragma unroll
  for (int first = 0; first < 32 * stride; first += 32 * EACH) {
    const int i = first + lane * EACH, quad = i / (4 * stride), at = i % (4 * stride);
    if (quad >= 8) continue;
    const Place place = places[quad];
    const int w = place.w + at;
    scalar_t* y = output.data + (first_output + place.output + at);
    if (EACH == 1) {
      if (w >= width) continue;
#pragma unroll
      for (int c = 0; c < 8; ++c, y += output.stride[1]) {
        if (c < channels) *y = sums[c * pitch + i];
      }
      continue;
    }
    // Two of 16 bits at an address that is a multiple of four bytes: this lane's, or its second and the next lane's first.
    const bool ends =
        at + 2 == 4 * stride && (quad == 7 || places[quad < 7 ? quad + 1 : 7].w == 0);  // the row, as far as it is here
    const bool starts = at == 0 && (quad == 0 || w == 0);
#pragma unroll
    for (int c = 0; c < 8; ++c, y += output.stride[1]) {
      if (c >= channels || w >= width) break;
      const scalar_t* const from = sums + c * pitch + i;
      const int odd = static_cast<int>(reinterpret_cast<index_t>(y) / sizeof(scalar_t) % 2);
      if (odd && starts) y[0] = from[0];
      if (w + odd + 1 < width && !(odd && ends)) {
        store_pair(y + odd, from[odd], from[odd + 1]);
      } else if (w + odd < width) {
        y[odd] = from[odd];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, RESIDENT_WARPS / BLOCK_WARPS)
    convt3d_fprop_grouped_mma(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                              const scalar_t* __restrict__ bias, const View<scalar_t> output, const int shift_w,
                              const int in_octets, const int out_octets, const int units, const int quads_w, const int runs,
                              const int block_tiles, const int weight_bytes) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Block block;
  __shared__ Place places[BLOCK_WARPS][UNITS][8];
  const Fragment* const fragments = reinterpret_cast<const Fragment*>(shared);
  const RowTaps row = row_taps(problem, shift_w);
  const int octets = SPECIALIZED(IN_OCTETS, in_octets), output_octets = SPECIALIZED(OUT_OCTETS, out_octets);
  const int row_tiles = (output_octets * row.stride + 1) / 2, steps = row.steps(), pitch = 32 * row.stride + 2;
  const int own_units = SPECIALIZED(OWN_UNITS, units);
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;

  // blockIdx.x = ((n * groups + group) * runs + run) * classes + class: the classes of a place are at work at the same time, so that they
  // find its inputs in the L2 cache and fill its rows. Where channels lie together, so are the groups of a place.
  unsigned rest = blockIdx.x;
  const auto next = [&rest](int count) {
    const unsigned index = rest % count;
    rest /= count;
    return static_cast<int>(index);
  };
  const int residue_h = next(problem.stride[1]), residue_d = next(problem.stride[0]);
  int run = output.stride[1] == 1 ? 0 : next(runs);
  const int group = next(problem.groups);
  if (output.stride[1] == 1) run = next(runs);
  const int n = static_cast<int>(rest);
  {
    const AxisClass d = axis_class(problem, 0, residue_d), h = axis_class(problem, 1, residue_h);
    gather_weights(reinterpret_cast<Fragment*>(shared), problem, weight, d, h, group, row, octets, output_octets);
    if (threadIdx.x == 0) {
      block.d = d;
      block.h = h;
      block.origin_d = (d.first_output + problem.padding[0]) / problem.stride[0] - d.first_offset;
      block.origin_h = (h.first_output + problem.padding[1]) / problem.stride[1] - h.first_offset;
      block.quads_w = divisor_of(quads_w);
      block.rows = divisor_of(max(h.outputs, 1));
      block.quads = d.outputs * h.outputs * quads_w;
      block.input = input.at(n, group * channels, 0, 0, 0) - input.data;
      block.output = output.at(n, group * out_channels, d.first_output, h.first_output, 0) - output.data;
      const index_t steps_between = input.stride[0] | input.stride[1] | input.stride[2] | input.stride[3];
      block.input_quads = input.stride[4] == 1 && problem.input_size[2] % 4 == 0 && steps_between % 4 == 0 &&
                          reinterpret_cast<index_t>(input.data) % (4 * sizeof(scalar_t)) == 0;
    }
  }
  __syncthreads();

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  scalar_t* const stage = reinterpret_cast<scalar_t*>(shared + weight_bytes) + warp * 8 * pitch;
  const int first_column = problem.padding[2] / row.stride - row.last_offset() - row.shift;
  int first = (run * block_tiles * BLOCK_WARPS + warp) * 8 * own_units;
#pragma unroll 1
  for (int tile = 0; tile < block_tiles && first < block.quads; ++tile, first += BLOCK_WARPS * 8 * own_units) {
    const scalar_t* from[UNITS];
    int column[UNITS], at_d[UNITS], at_h[UNITS];
#pragma unroll
    for (int u = 0; u < own_units; ++u) {
      const int quad = first + u * 8 + lane / 4, line = block.quads_w.quotient(quad), d = block.rows.quotient(line);
      const int h = line - d * block.rows.value, q = 4 * (quad - line * block.quads_w.value);
      column[u] = q + first_column;
      at_d[u] = quad < block.quads ? block.origin_d + d : -NOWHERE;
      at_h[u] = block.origin_h + h;
      from[u] = input.data + (block.input + at_d[u] * input.stride[2] + at_h[u] * input.stride[3] +
                              column[u] * input.stride[4] + lane % 4 * input.stride[1]);
      if (lane % 4 == 0) {
        const index_t to = d * problem.stride[0] * output.stride[2] + h * problem.stride[1] * output.stride[3];
        const int w = quad < block.quads ? q * row.stride : NOWHERE;
        places[warp][u][lane / 4] = {to + w * output.stride[4], w};
      }
    }

    float sums[UNITS][MOST_ROW_TILES][4][4];
#pragma unroll
    for (int u = 0; u < own_units; ++u) {
#pragma unroll
      for (int m = 0; m < row_tiles; ++m) {
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[u][m][i / 4][i % 4] = 0.0f;
      }
    }
    const Fragment* fragment = fragments + lane;
#pragma unroll 1
    for (int kd = 0; kd < block.d.taps; ++kd) {
#pragma unroll 1
      for (int kh = 0; kh < block.h.taps; ++kh) {
        const int below_d = kd * block.d.offset_step, below_h = kh * block.h.offset_step;
        const index_t below = below_d * input.stride[2] + below_h * input.stride[3];
#pragma unroll 1
        for (int octet = 0; octet < octets; ++octet) {
          unsigned words[UNITS][2][MOST_WORDS];  // of this lane's two channels
#pragma unroll
          for (int u = 0; u < own_units; ++u) {
            const bool inside = static_cast<unsigned>(at_d[u] - below_d) < static_cast<unsigned>(problem.input_size[0]) &&
                                static_cast<unsigned>(at_h[u] - below_h) < static_cast<unsigned>(problem.input_size[1]);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const int ci = octet * 8 + k * 4;
              load_window(words[u][k], from[u] + (ci * input.stride[1] - below), column[u], problem.input_size[2],
                          inside && ci + lane % 4 < channels, block.input_quads, input.stride[4], row);
            }
          }
          multiply_windows(sums, words, fragment, own_units, row_tiles, steps, row.shift);
          fragment += steps * row_tiles * PARTS * 32;
        }
      }
    }

    __syncwarp();  // the places are written
#pragma unroll
    for (int u = 0; u < own_units; ++u) {
#pragma unroll
      for (int octet = 0; octet < output_octets; ++octet) {
        const int co = octet * 8 + lane / 4, first_channel = group * out_channels + octet * 8;
        const float start = bias != nullptr && co < out_channels ? to_accum(bias[first_channel + lane / 4]) : 0.0f;
        // Lane l has channel l / 4 of the quads 2*(l % 4) and the next.
        const auto sum = [&](int residue, int t, int e) {
          const int half = octet * row.stride + residue;
          return to_scalar(sums[u][half / 2][t][half % 2 * 2 + e] + start);
        };
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          scalar_t* const to = stage + lane / 4 * pitch + (lane % 4 * 8 + i) * row.stride;
#pragma unroll
          for (int r = 0; r < row.stride; ++r) {
            if (row.stride % 2 == 1) {
              to[r] = sum(r, i % 4, i / 4);
            } else if (r % 2 == 0) {
              *reinterpret_cast<Pair*>(to + r) = {{sum(r, i % 4, i / 4), sum(r + 1, i % 4, i / 4)}};
            }
          }
        }
        __syncwarp();
        store_channels(stage, pitch, places[warp][u], row.stride, problem.output_size[2], min(8, out_channels - octet * 8),
                       output, block.output + octet * 8 * output.stride[1], lane);
        __syncwarp();  // before the next sums, or places, come to the same memory
      }
    }
  }
}
