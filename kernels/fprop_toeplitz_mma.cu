/* convt3d
pass = "fprop"
dtypes = ["bf16", "fp16"]
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
LEAD_D = "lead_d"
LEAD_H = "lead_h"
LEAD_W = "lead_w"
SHIFT_W = "shift_w"
IN_CHANNELS = "in_channels_per_group"
OUT_CHANNELS = "out_channels_per_group"
TILES = "tiles"
LENGTH_D = "length_d"
PLANE_CELLS = "plane_cells"
COLUMN_CELLS = "column_cells"
OUTPUT_LAYOUT = "output_layout"
[constants]
lead_d = "padding_d % stride_d"
lead_h = "padding_h % stride_h"
lead_w = "padding_w % stride_w"
# How many inputs beside its own q a q has taps for.
span_d = "((kernel_d - 1) * dilation_d - lead_d + stride_d) // stride_d - (0 if lead_d > 0 else 1)"
span_h = "((kernel_h - 1) * dilation_h - lead_h + stride_h) // stride_h - (0 if lead_h > 0 else 1)"
span_w = "((kernel_w - 1) * dilation_w - lead_w + stride_w) // stride_w - (0 if lead_w > 0 else 1)"
# Where the window of a tile's first q begins, before that q: such that vectors can be copied, as long ones as the window has room for.
reach_w = "span_w - (1 if lead_w > 0 else 0)"
most_shift = "7 if lead_w > 0 else 8"
before = "padding_w // stride_w - reach_w"
shift_w = "reach_w + (before % 8 if reach_w + before % 8 <= most_shift else before % 4 if reach_w + before % 4 <= most_shift else before % 2 if reach_w + before % 2 <= most_shift else 0)"
# What a warp has: tiles of 8 q beside each other along w, planes. Many fragments of weights leave registers for fewer sums.
tiles_w = "ceil_div(output_w, 8 * stride_w)"
parts_w = "ceil_div(tiles_w, max(1, min(4, 16 // stride_w)))"
tiles = "ceil_div(tiles_w, parts_w)"
all_d = "ceil_div(output_d, stride_d)"
all_h = "ceil_div(output_h, stride_h)"
most_sums = "16 if span_d <= 5 and (span_d + 1) * stride_w <= 8 else 12"
most_planes = "max(1, min(PLANES, ceil_div(all_d * all_h, 16), most_sums // (tiles * stride_w)))"
length_d = "max(1, ceil_div(all_d, max(1, ceil_div(all_d, most_planes))))"
# Of shared memory: the outputs of a warp, the weights and the inputs of a group. A cell is 16 bytes, 8 neighbours along w.
pitch = "tiles * stride_w // 2 * 2 + 1"
own_bytes = "BLOCK_WARPS * (256 * pitch + 256)"
weight_bytes = "ceil_div(kernel_d * kernel_h * stride_w * (span_w + 3) * in_channels_per_group * out_channels_per_group, 4) * 16"
limit = "SHARED_KIB * 1024 - own_bytes"
some_cells = "((length_d + span_d) * (min(all_h, 16) + span_h) + 3) // 8 * 8 + 4"
group_bytes = "weight_bytes + 16 * in_channels_per_group * (tiles + 1) * some_cells"
block_groups = "max(1, min(groups, ceil_div(CHANNELS, in_channels_per_group), limit // group_bytes))"
group_blocks = "ceil_div(groups, block_groups)"
# A block's region: rows of q along h, and along d so many times a warp's planes; 16 of both, or several times 16, fill a matrix.
room = "(limit - block_groups * weight_bytes) // (16 * block_groups * in_channels_per_group * (tiles + 1)) - 7"
steps_d = "ceil_div(all_d, length_d)"
most_h = "max(1, room // (length_d + span_d) - span_h)"
tall = "most_h // 16 * 16 if most_h >= 16 else most_h // 8 * 8 if most_h >= 8 else most_h"
two_steps = "2 * length_d + span_d"
low = "steps_d > 1 and ceil_div(all_h, 8) % 2 == 1 and (8 + span_h) * two_steps <= room and (all_h + span_h) * two_steps > room"
rows_h = "8 if low else all_h if all_h <= most_h else tall"
parts_h = "ceil_div(all_h, rows_h)"
fitting = "(room // (rows_h + span_h) - span_d) // length_d"
other_blocks = "max(1, batch * group_blocks * parts_h * parts_w)"
wanted = "max(1, steps_d * other_blocks // (2 * multiprocessors))"
most_d = "max(1, min(steps_d, fitting, wanted))"
block_d = "most_d // 2 * 2 if low and most_d > 1 else ceil_div(steps_d, ceil_div(steps_d, most_d))"
runs_d = "ceil_div(steps_d, block_d)"
plane_cells = "rows_h + span_h"
column_cells = "((block_d * length_d + span_d) * plane_cells + 3) // 8 * 8 + 4"
# Warps beside each other have output channels beside each other.
outputs = "block_groups * out_channels_per_group"
beside = "BLOCK_WARPS if outputs >= BLOCK_WARPS else 1 if outputs == 1 else 2 if outputs == 2 else 4 if outputs <= 4 else 8"
row_tiles = "ceil_div(rows_h * block_d, 16)"
rounds = "ceil_div(row_tiles * ceil_div(outputs, beside) * beside, BLOCK_WARPS)"
stage_bytes = "block_groups * in_channels_per_group * (tiles + 1) * column_cells * 16"
shared_bytes = "own_bytes + block_groups * weight_bytes + stage_bytes"
[restrictions]
"in_channels_per_group <= 8 and out_channels_per_group <= 8" = "it is for groups of at most 8 channels: each pair of an input and an output channel is a product of its own"
"stride_w <= 8" = "a warp keeps the sums of all residues of w in registers: a stride of at most 8"
"stride_d <= 8 and stride_h <= 8" = "a block goes through all residues of d and h: strides of at most 8"
"span_w <= 8" = "the taps of a row must reach over at most 9 inputs: with 8 neighbouring q they fill a window of 16"
"span_d <= 16" = "the taps along d must reach over at most 17 inputs"
"shared_bytes <= 98 * 1024" = "the weights and inputs of a group must fit the 99 KiB of shared memory that every GPU has"
"batch * group_blocks * parts_h * parts_w * runs_d <= 2000000000" = "it counts its blocks in 32 bits"
[search]
BLOCK_WARPS = [4, 8]
CHANNELS = [2, 4, 8, 16]
PLANES = [2, 4, 8]
SHARED_KIB = [48, 72, 96]
[cost]
steps = "rounds * in_channels_per_group * kernel_h"
products = "min(BLOCK_WARPS, row_tiles * outputs) * tiles * stride_w * length_d * kernel_d * 2048"
first_bytes = "stage_bytes"
[[launch]]
grid = "batch * group_blocks * runs_d * parts_h * parts_w"
block = "32 * BLOCK_WARPS"
shared_bytes = "shared_bytes"
*/
// Depthwise layers and groups of few channels on tensor cores. There no matrix has channels enough; but along w a correlation with few
// taps is a product with a Toeplitz matrix. On each axis o = q*stride + r, and tap t feeds o through input q - offset (convt3d/core/taps.cuh).
// For one input channel, output channel, residue of w, kd and kh:
//
//   rows:    16 positions (d, h)
//   depth:   16 neighbouring inputs along w, the window of:
//   columns: 8 neighbouring q; the weight in row k and column n is that of the tap at offset n + shift - k, or zero
//
// A block has some groups of one image and a region of q. Its inputs, zeros beyond the tensor, are in shared memory as
// [channel][cell of 8 neighbours along w][plane][row]: so ldmatrix takes 16 rows as they lie, without conflicts, and another tap of d or
// h is another address, the same step away for all. Where channels lie together in memory, 8 x 8 neighbours of channels and w are
// turned in registers on their way in and out.
//
// A warp has 16 rows of q for each of LENGTH_D planes, TILES windows beside each other and all residues of w, of one output channel. An
// input, loaded once for a tap of h, serves all taps of d and both windows that it lies in. Residues of d and h follow one another.
// The sums go through shared memory, so that stores are whole vectors of rows, or of channels.
//
// Zero weights stand for taps that are none: an input that is infinite or no number also spoils outputs beside those it feeds. Where a sum
// of a block is NaN, what is NaN among its outputs is computed anew, by the definition.
#include "convt3d.cuh"
#include "convt3d/core/advanced.cuh"
#include "convt3d/core/digits.cuh"
#include "convt3d/core/divisor.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/gathered.cuh"
#include "convt3d/core/layout.cuh"
#include "convt3d/ptx/mma.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/core/taps.cuh"
#include "convt3d/core/vector.cuh"

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 8
#endif
static_assert(BLOCK_WARPS == 4 || BLOCK_WARPS == 8, "16 warps on a multiprocessor are whole blocks");
// Input channels of a block, where shared memory has room for them.
#ifndef CHANNELS
#define CHANNELS 8
#endif
// Of a warp, at most.
#ifndef PLANES
#define PLANES 4
#endif
#ifndef SHARED_KIB
#define SHARED_KIB 96
#endif
#ifndef RESIDENT_WARPS
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
#define RESIDENT_WARPS 12  // the compiler takes a few registers more there
#else
#define RESIDENT_WARPS 16
#endif
#endif

constexpr int MOST_SUMS = 16, MOST_CELLS = 5;  // of a warp: tiles, and cells of a row
constexpr int MOST_WEIGHTS = 10;               // fragments of weights that a warp has at once
constexpr int CELL = 16;                       // bytes
constexpr index_t SIZE = sizeof(scalar_t);

// What a GPU's binary is compiled for.
struct Shape {
  Taps d, h, w;  // without what the padding is beyond the stride
  int shift, inputs, outputs, tiles, planes, plane_cells, column_cells;

  __device__ static int span(const Taps& taps) { return taps.reach() - taps.nearest(); }
  __device__ int words() const { return span(w) + 3; }  // of the weights of a row of taps, and a zero
  __device__ int row() const { return 8 * tiles * w.stride; }
  __device__ int pitch() const { return tiles * w.stride / 2 * 2 + 1; }  // cells of a row of outputs: odd, against conflicts
  __device__ int row_weights() const { return d.kernel * w.stride * words(); }
};

// The block's inputs in shared memory, and where in the tensor they begin.
struct Stage {
  int planes;
  int n, channel, channels, d, h, w;
};

// What all threads of a block have in common. In shared memory, because registers are for sums.
struct Block {
  int n, first_out, outs, length;  // output channels, and how many outputs are stored at once
  int d, h, w, live_w;             // where its outputs begin, and how many of a row are inside
  int rows;                        // of q, over all steps of d
  Divisor rows_h;
  bool spoilt[BLOCK_WARPS];  // some sum of the warp was NaN
};

// A row of outputs, for the first of the warp's planes: how far behind the tensor's first element, and which output of d and h it is.
struct alignas(16) Place {
  index_t bytes;
  int d, h;
};

__device__ __forceinline__ bool inside(int at, int size) { return static_cast<unsigned>(at) < static_cast<unsigned>(size); }

// How many neighbours along an axis may be accessed at once, 8 at most: their strides and address, and what must be a multiple of it.
template <class T>
__device__ int vector_length(const View<T>& view, int axis, int whole) {
  if (view.stride[axis] != 1) return 1;
  index_t all = static_cast<index_t>(reinterpret_cast<unsigned long long>(view.data) / sizeof(T)) | whole;
  for (int a = 0; a < 5; ++a) all |= a == axis ? 0 : view.stride[a];
  return all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1;
}

// Copy the inputs where rows lie together, LENGTH neighbours at once. A warp takes a plane of a channel, a lane the same place in every so
// many of its rows.
template <int LENGTH>
__device__ __forceinline__ void stage_rows(unsigned char* shared, const Problem& problem, const View<const scalar_t>& input,
                                           const Stage& stage, const Shape& shape, int warp, int lane) {
  constexpr int EACH = LENGTH == 1 ? 2 : LENGTH;
  const int pieces = (shape.tiles + 1) * 8 / EACH, at_once = 32 / pieces, first_row = lane / pieces;
  const int column = lane % pieces * EACH, channel_cells = (shape.tiles + 1) * shape.column_cells;
  const bool first = inside(stage.w + column, problem.input_size[2]);
  const bool second = inside(stage.w + column + 1, problem.input_size[2]);
  const int rows = first_row < at_once ? shape.plane_cells : 0;
  const scalar_t* channel = input.at(stage.n, stage.channel, stage.d, stage.h + first_row, stage.w + column);
  unsigned char* const target = shared + (column / 8 * shape.column_cells + first_row) * CELL + column % 8 * 2;
  const index_t step = at_once * input.stride[3];
#pragma unroll 1
  for (int c = 0; c < stage.channels; ++c, channel += input.stride[1]) {
#pragma unroll 1
    for (int plane = (warp + c) % BLOCK_WARPS; plane < stage.planes; plane += BLOCK_WARPS) {
      const bool live = inside(stage.d + plane, problem.input_size[0]);
      const scalar_t* x = channel + plane * input.stride[2];
      unsigned char* to = target + (c * channel_cells + plane * shape.plane_cells) * CELL;
#pragma unroll 4
      for (int row = first_row; row < rows; row += at_once, x += step, to += at_once * CELL) {
        const bool there = live && inside(stage.h + row, problem.input_size[1]);
        if constexpr (LENGTH > 1) {
          cp_async<2 * LENGTH>(shared_address(to), there && first ? x : input.data, there && first ? 2 * LENGTH : 0);
        } else {
          *reinterpret_cast<Vector<2>*>(to) = {{there && first ? x[0] : scalar_t{}, there && second ? x[1] : scalar_t{}}};
        }
      }
    }
  }
}

// Turn rows x 8 of 16 bits: from neighbours in words of each row to neighbours of the rows in words of each column.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void turn(const unsigned (&rows)[ROWS][COLUMNS / 2], unsigned (&columns)[COLUMNS][ROWS / 2]) {
#pragma unroll
  for (int r = 0; r < ROWS; r += 2) {
#pragma unroll
    for (int c = 0; c < COLUMNS; c += 2) {
      columns[c][r / 2] = __byte_perm(rows[r][c / 2], rows[r + 1][c / 2], 0x5410);
      columns[c + 1][r / 2] = __byte_perm(rows[r][c / 2], rows[r + 1][c / 2], 0x7632);
    }
  }
}

// LENGTH neighbouring channels into words, or zeros. As words: elements of 16 bits the compiler would take apart one by one. A single
// element is the lower or the upper half.
template <int LENGTH>
__device__ __forceinline__ void load_channels(unsigned* words, int upper, const scalar_t* from, bool there) {
  if constexpr (LENGTH == 1) {
    const unsigned bits = there ? from->bits : 0u;
    words[0] = upper != 0 ? words[0] | bits << 16 : bits;
  } else {
    const Words<LENGTH / 2> loaded = there ? *reinterpret_cast<const Words<LENGTH / 2>*>(from) : Words<LENGTH / 2>{};
#pragma unroll
    for (int i = 0; i < LENGTH / 2; ++i) words[i] = loaded.element[i];
  }
}

// Copy the inputs where channels lie together, LENGTH of them at once; with 1, for any strides. A thread takes 8 of them and a cell.
template <int LENGTH>
__device__ __forceinline__ void stage_channels(unsigned char* shared, const Problem& problem, const View<const scalar_t>& input,
                                               const Stage& stage, const Shape& shape, int warp, int lane) {
  const int octets = (stage.channels + 7) / 8, count = shape.plane_cells * (shape.tiles + 1);
  const Divisor rows = divisor_of(shape.plane_cells);
#pragma unroll 1
  for (int i = warp; i < octets * stage.planes; i += BLOCK_WARPS) {
    const int c = i % octets * 8, plane = i / octets, channels = stage.channels - c;
    const bool live = inside(stage.d + plane, problem.input_size[0]);
    const scalar_t* const from = input.at(stage.n, stage.channel + c, stage.d + plane, stage.h, stage.w);
    unsigned char* const to = shared + (c * (shape.tiles + 1) * shape.column_cells + plane * shape.plane_cells) * CELL;
#pragma unroll 1
    for (int k = lane; k < count; k += 32) {
      const int cell = rows.quotient(k), row = k - cell * shape.plane_cells;
      const bool row_live = live && inside(stage.h + row, problem.input_size[1]);
      const scalar_t* voxel = from + (row * input.stride[3] + cell * 8 * input.stride[4]);
      unsigned loaded[8][4], turned[8][4];
#pragma unroll
      for (int e = 0; e < 8; ++e, voxel = advanced(voxel, input.stride[4] * SIZE)) {
        const bool there = row_live && inside(stage.w + cell * 8 + e, problem.input_size[2]);
        const scalar_t* x = voxel;
#pragma unroll
        for (int j = 0; j < 8; j += LENGTH, x = advanced(x, LENGTH * input.stride[1] * SIZE))
          load_channels<LENGTH>(&loaded[e][j / 2], j % 2, x, there && j < channels);
      }
      turn<8, 8>(loaded, turned);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= channels) continue;
        *reinterpret_cast<uint4*>(to + ((j * (shape.tiles + 1) + cell) * shape.column_cells + row) * CELL) =
            make_uint4(turned[j][0], turned[j][1], turned[j][2], turned[j][3]);
      }
    }
  }
}

// The block's weights as pairs that begin with each offset along w: [output channel][input channel][kh][kd][residue of w][offset]. A thread
// takes the taps of a row.
__device__ __forceinline__ void stage_weights(unsigned* pairs, const Problem& problem, const View<const scalar_t>& weight,
                                              const Shape& shape, int first_out, int outs) {
  const int rows = outs * shape.inputs * shape.h.kernel * shape.d.kernel, length = shape.w.stride * shape.words();
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += 32 * BLOCK_WARPS) {
    const int kd = row % shape.d.kernel, kh = row / shape.d.kernel % shape.h.kernel,
              rest = row / shape.d.kernel / shape.h.kernel;
    const int co = first_out + rest / shape.inputs, group = co / shape.outputs;
    const scalar_t* const taps = weight.at(group * shape.inputs + rest % shape.inputs, co - group * shape.outputs, kd, kh, 0);
#pragma unroll
    for (int i = 0; i < length; ++i) {
      Vector<2> pair{};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int kw = shape.w.tap(i % shape.words() + shape.w.nearest() - e, i / shape.words());
        if (kw >= 0) pair.element[e] = taps[kw * weight.stride[4]];
      }
      *reinterpret_cast<Vector<2>*>(pairs + row * length + i) = pair;
    }
  }
}

// Which pairs of a row's weights a lane has of a Toeplitz matrix: those that begin with these offsets. The last pair of a row is zeros.
struct Band {
  int word[2];
};

// sums[(plane * tiles + tile) * columns + column] += the products of one input channel with the taps of one kh and of residue r_d. `cells` is
// where this lane's row begins for the farthest of the taps along d.
__device__ __forceinline__ void multiply(float (&sums)[MOST_SUMS][4], const Shape& shape, int r_d, unsigned cells,
                                         const unsigned* weights, const Band& band) {
  const int most = max(1, MOST_WEIGHTS / shape.w.stride);  // taps of d at once
#pragma unroll
  for (int first = shape.d.nearest(); first <= shape.d.reach(); first += most) {
    unsigned b[MOST_SUMS][2];
    const int last = min(first + most - 1, shape.d.reach());
#pragma unroll
    for (int offset = first; offset <= last; ++offset) {
      const int kd = shape.d.tap(offset, r_d);
#pragma unroll
      for (int column = 0; column < shape.w.stride; ++column) {
        if (kd < 0) continue;
        const unsigned* const from = weights + (kd * shape.w.stride + column) * shape.words();
#pragma unroll
        for (int k = 0; k < 2; ++k) b[(offset - first) * shape.w.stride + column][k] = from[band.word[k]];
      }
    }
#pragma unroll
    for (int plane = 0; plane < shape.planes + Shape::span(shape.d); ++plane) {
      bool used = false;
#pragma unroll
      for (int offset = first; offset <= last; ++offset)
        used = used || (shape.d.tap(offset, r_d) >= 0 && inside(plane - shape.d.reach() + offset, shape.planes));
      if (!used) continue;
      unsigned x[MOST_CELLS + 1][2];
#pragma unroll
      for (int cell = 0; cell <= shape.tiles; cell += 2) {
        const unsigned row = cells + (plane * shape.plane_cells + cell * shape.column_cells) * CELL;
        if (cell < shape.tiles) {
          unsigned four[4];
          ldmatrix_x4(four, row);
          x[cell][0] = four[0], x[cell][1] = four[1], x[cell + 1][0] = four[2], x[cell + 1][1] = four[3];
        } else {
          ldmatrix_x2(x[cell], row);
        }
      }
#pragma unroll
      for (int offset = first; offset <= last; ++offset) {
        const int to = plane - shape.d.reach() + offset;
        if (shape.d.tap(offset, r_d) < 0 || !inside(to, shape.planes)) continue;
#pragma unroll
        for (int tile = 0; tile < shape.tiles; ++tile) {
          const unsigned a[4] = {x[tile][0], x[tile][1], x[tile + 1][0], x[tile + 1][1]};
#pragma unroll
          for (int column = 0; column < shape.w.stride; ++column) {
            const unsigned (&weight)[2] = b[(offset - first) * shape.w.stride + column];
            CONVT3D_MULTIPLY(sums[(to * shape.tiles + tile) * shape.w.stride + column], a, weight[0], weight[1]);
          }
        }
      }
    }
  }
}

// Finish all sums, in half the registers: [plane][tile][upper and lower rows][residues of 2 q]. Whether one of them was NaN.
__device__ __forceinline__ bool finish(Vector<2> (&pairs)[2 * MOST_SUMS], const float (&sums)[MOST_SUMS][4], const Shape& shape,
                                       const Epilogue& epilogue) {
  bool spoilt = false;
  const int stride = shape.w.stride;
#pragma unroll
  for (int i = 0; i < shape.planes * shape.tiles * 2 * stride; ++i) {
    const auto sum = [&](int place) {
      return sums[i / (2 * stride) * stride + place % stride][i / stride % 2 * 2 + place / stride];
    };
    const float first = sum(i % stride * 2), second = sum(i % stride * 2 + 1);
    spoilt = spoilt || first != first || second != second;
    pairs[i] = epilogue.finish_pair(first, second);
  }
  return spoilt;
}

// What is finished of one plane into shared memory, as rows.
__device__ __forceinline__ void write_plane(scalar_t* own, const Vector<2>* pairs, const Shape& shape, int lane) {
  const int stride = shape.w.stride;
  scalar_t* const corner = own + lane / 4 * shape.pitch() * 8 + lane % 4 * 2 * stride;
#pragma unroll
  for (int i = 0; i < shape.tiles * 2 * stride; ++i) {
    const int tile = i / (2 * stride), half = i / stride % 2;
    *reinterpret_cast<Vector<2>*>(corner + (8 * half * shape.pitch() + tile * stride) * 8 + i % stride * 2) = pairs[i];
  }
}

// Store 16 rows of one channel, of which `live` outputs are inside, LENGTH neighbours at once. Where rows have no such vectors LENGTH is 2: a
// lane's two at a multiple of four bytes are its own, or its second and the next lane's first.
template <int LENGTH>
__device__ __forceinline__ void store_rows(const scalar_t* own, const Place* places, scalar_t* output, const Shape& shape,
                                           int end_d, int end_h, int live, int lane) {
  const int pieces = shape.row() / LENGTH, at_once = pieces < 32 ? 32 / pieces : 1;
#pragma unroll 1
  for (int piece = lane % pieces; piece < pieces && lane / pieces < at_once; piece += 32) {
    const int at = piece * LENGTH;
    const scalar_t* from = own + lane / pieces * shape.pitch() * 8 + at;
#pragma unroll 1
    for (int row = lane / pieces; row < 16; row += at_once, from += at_once * shape.pitch() * 8) {
      const Place place = places[row];
      if (place.d >= end_d || place.h >= end_h) continue;
      scalar_t* const y = advanced(output + at, place.bytes);
      if constexpr (LENGTH == 2) {
        const bool odd = reinterpret_cast<unsigned long long>(y) % 4 != 0, next = at + 2 < live && at + 2 < shape.row();
        const Vector<2> now = *reinterpret_cast<const Vector<2>*>(from);
        const scalar_t first = odd ? now.element[1] : now.element[0], second = odd ? from[next ? 2 : 0] : now.element[1];
        const bool paired = odd ? next : at + 1 < live;
        if (paired) *reinterpret_cast<Vector<2>*>(y + odd) = {{first, second}};
        if (!paired && at + odd < live) y[odd] = first;
        if (odd && at == 0) y[0] = now.element[0];
      } else if (at + LENGTH <= live) {
        *reinterpret_cast<Words<LENGTH / 2>*>(y) = *reinterpret_cast<const Words<LENGTH / 2>*>(from);
      } else {
#pragma unroll 1
        for (int e = 0; at + e < live; ++e) y[e] = from[e];
      }
    }
  }
}

// Store what all warps have, LENGTH neighbouring channels at once; with 1, for any strides. Warps beside each other have the rows of
// `beside` output channels, of which `channels` are there. A thread takes all of them and half a cell.
template <int LENGTH>
__device__ __forceinline__ void store_channels(const scalar_t* own, const Place* places, const View<scalar_t>& output,
                                               const Shape& shape, int beside, int channels, index_t offset, int end_d,
                                               int end_h, int live) {
  const int halves = shape.row() / 4, warp_outputs = 16 * shape.pitch() * 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < BLOCK_WARPS / beside * halves * 16; i += 32 * BLOCK_WARPS) {
    const int row = i % 16, at = i / 16 % halves * 4, warp = i / 16 / halves * beside;
    const Place place = places[warp * 16 + row];
    if (place.d >= end_d || place.h >= end_h) continue;
    const scalar_t* const from = own + warp * warp_outputs + row * shape.pitch() * 8 + at;
    unsigned sums[8][2], turned[4][4];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint2 words = *reinterpret_cast<const uint2*>(from + (c < channels ? c : 0) * warp_outputs);
      sums[c][0] = words.x, sums[c][1] = words.y;
    }
    turn<8, 4>(sums, turned);
    scalar_t* y = advanced(output.data + (offset + at * output.stride[4]), place.bytes);
#pragma unroll
    for (int e = 0; e < 4; ++e, y = advanced(y, output.stride[4] * SIZE)) {
      scalar_t* to = y;
#pragma unroll
      for (int c = 0; c < 8; c += LENGTH, to = advanced(to, LENGTH * output.stride[1] * SIZE)) {
        if (at + e >= live || c >= channels) continue;
        if constexpr (LENGTH == 1) {
          to->bits = static_cast<unsigned short>(turned[e][c / 2] >> 16 * (c % 2));
        } else {
          Words<LENGTH / 2> words;
#pragma unroll
          for (int i = 0; i < LENGTH / 2; ++i) words.element[i] = turned[e][c / 2 + i];
          *reinterpret_cast<Words<LENGTH / 2>*>(to) = words;
        }
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * BLOCK_WARPS, RESIDENT_WARPS / BLOCK_WARPS)
    convt3d_fprop_toeplitz_mma(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                               const scalar_t* __restrict__ bias, View<scalar_t> output, const int shift_w, const int tiles,
                               const int length_d, const int block_groups, const int group_blocks, const int runs_d,
                               const int block_d, const int parts_h, const int rows_h, const int parts_w, const int plane_cells,
                               const int column_cells, const int beside, const int own_bytes, const int stage_bytes) {
  lay_out(problem, output, OUTPUT_LAYOUT ? SPECIALIZED(OUTPUT_LAYOUT, layout_of(problem, output)) : 0);
  const Epilogue epilogue{bias};
  __shared__ Block block;
  extern __shared__ __align__(16) unsigned char shared[];
  const Shape shape = {
      {SPECIALIZED(KERNEL_D, problem.kernel_size[0]), SPECIALIZED(STRIDE_D, problem.stride[0]),
       SPECIALIZED(DILATION_D, problem.dilation[0]), SPECIALIZED(LEAD_D, problem.padding[0] % problem.stride[0]), 1},
      {SPECIALIZED(KERNEL_H, problem.kernel_size[1]), SPECIALIZED(STRIDE_H, problem.stride[1]),
       SPECIALIZED(DILATION_H, problem.dilation[1]), SPECIALIZED(LEAD_H, problem.padding[1] % problem.stride[1]), 1},
      {SPECIALIZED(KERNEL_W, problem.kernel_size[2]), SPECIALIZED(STRIDE_W, problem.stride[2]),
       SPECIALIZED(DILATION_W, problem.dilation[2]), SPECIALIZED(LEAD_W, problem.padding[2] % problem.stride[2]), 8},
      SPECIALIZED(SHIFT_W, shift_w),
      SPECIALIZED(IN_CHANNELS, problem.in_channels / problem.groups),
      SPECIALIZED(OUT_CHANNELS, problem.out_channels / problem.groups),
      SPECIALIZED(TILES, tiles),
      SPECIALIZED(LENGTH_D, length_d),
      SPECIALIZED(PLANE_CELLS, plane_cells),
      SPECIALIZED(COLUMN_CELLS, column_cells)};

  // blockIdx.x = (((n * group_blocks + group block) * runs_d + run of d) * parts_h + part of h) * parts_w + part of w. Where channels lie
  // together, so are the groups of a place.
  Digits index{blockIdx.x};
  const bool rows_lie_together = output.stride[4] == 1;
  int first_group = rows_lie_together ? 0 : index.next(group_blocks) * block_groups;
  const int q_w = index.next(parts_w) * shape.tiles * 8, q_h = index.next(parts_h) * rows_h,
            q_d = index.next(runs_d) * block_d * shape.planes;
  if (rows_lie_together) first_group = index.next(group_blocks) * block_groups;
  if (threadIdx.x == 0) {
    const int first_out = first_group * shape.outputs, outs = min(block_groups, problem.groups - first_group) * shape.outputs;
    const int d = q_d * shape.d.stride, w = q_w * shape.w.stride;
    const int steps = (problem.output_size[0] - d - 1) / (shape.planes * shape.d.stride) + 1;  // from there on
    block = {index.last(),
             first_out,
             outs,
             rows_lie_together ? vector_length(output, 4, 0) : vector_length(output, 1, first_out | outs | beside),
             d,
             q_h * shape.h.stride,
             w,
             min(problem.output_size[2] - w, shape.row()),
             min(block_d, steps) * rows_h,
             divisor_of(rows_h),
             {}};
  }
  __syncthreads();

  // Shared memory: inputs, then what each warp finishes and where it is stored, then weights.
  unsigned char* const after = shared + stage_bytes;
  Place* const places = reinterpret_cast<Place*>(after);
  scalar_t* const finished = reinterpret_cast<scalar_t*>(after + BLOCK_WARPS * 16 * sizeof(Place));
  unsigned* const weights = reinterpret_cast<unsigned*>(after + own_bytes);
  {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const Stage stage = {block_d * shape.planes + Shape::span(shape.d),
                         block.n,
                         block.first_out / shape.outputs * shape.inputs,
                         block.outs / shape.outputs * shape.inputs,
                         (problem.padding[0] + block.d) / shape.d.stride - shape.d.reach(),
                         (problem.padding[1] + block.h) / shape.h.stride - shape.h.reach(),
                         (problem.padding[2] + block.w) / shape.w.stride - shape.shift};
    if (input.stride[4] == 1) {
      const int length = vector_length(input, 4, problem.input_size[2] | stage.w);
      if (length == 8) stage_rows<8>(shared, problem, input, stage, shape, warp, lane);
      if (length == 4) stage_rows<4>(shared, problem, input, stage, shape, warp, lane);
      if (length == 2) stage_rows<2>(shared, problem, input, stage, shape, warp, lane);
      if (length == 1) stage_rows<1>(shared, problem, input, stage, shape, warp, lane);
    } else {
      const int length = vector_length(input, 1, stage.channel | stage.channels);
      if (length == 8) stage_channels<8>(shared, problem, input, stage, shape, warp, lane);
      if (length == 4) stage_channels<4>(shared, problem, input, stage, shape, warp, lane);
      if (length == 2) stage_channels<2>(shared, problem, input, stage, shape, warp, lane);
      if (length == 1) stage_channels<1>(shared, problem, input, stage, shape, warp, lane);
    }
  }
  forget_memory();
  stage_weights(weights, problem, weight, shape, block.first_out, block.outs);
  cp_async_wait_all();
  __syncthreads();

  // Where there are fewer output channels than warps, the others have the next rows.
  const auto multiply_and_store = [&](int first_tile, int first_channel) {
    // Registers are for sums: what follows from the thread's number is not kept.
    forget_memory();
    const int thread = static_cast<int>(computed_anew(threadIdx.x)), warp = thread / 32, lane = thread % 32;
    const int row_tile = first_tile + warp / beside, channel = first_channel + warp % beside;
    const bool live = row_tile * 16 < block.rows && channel < block.outs;
    // ldmatrix takes a row from each of 16 lanes, and the cells beside them from the others.
    const int row = row_tile * 16 + lane % 16, known_row = min(row, block.rows - 1);
    const int of_d = block.rows_h.quotient(known_row), of_h = known_row - of_d * rows_h;
    if (lane < 16) {
      const int d = block.d + of_d * shape.planes * shape.d.stride, h = block.h + of_h * shape.h.stride;
      const scalar_t* const y = output.at(block.n, block.first_out, d, h, block.w);
      places[warp * 16 + lane] = {(y - output.data) * SIZE, row == known_row ? d : problem.output_size[0], h};
    }
    const int first_input = channel / shape.outputs * shape.inputs;
    const unsigned cells =
        shared_address(shared) + lane / 16 * shape.column_cells * CELL +
        ((first_input * (shape.tiles + 1)) * shape.column_cells + of_d * shape.planes * shape.plane_cells + of_h) * CELL;
    Band band;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int word = lane / 4 + shape.shift - lane % 4 * 2 - 8 * k - shape.w.nearest();
      band.word[k] = inside(word, shape.words()) ? word : shape.words() - 1;
    }
#pragma unroll 1
    for (int residue = 0; residue < shape.d.stride * shape.h.stride; ++residue) {
      const int r_d = residue / shape.h.stride, r_h = residue % shape.h.stride;
      const float start = epilogue.start(block.first_out + channel, live);
      float sums[MOST_SUMS][4];
#pragma unroll
      for (int i = 0; i < MOST_SUMS * 4; ++i) sums[i / 4][i % 4] = start;
#pragma unroll 1
      for (int ci = 0; ci < (live ? shape.inputs : 0); ++ci) {
#pragma unroll 1
        for (int offset = shape.h.nearest(); offset <= shape.h.reach(); ++offset) {
          const int kh = shape.h.tap(offset, r_h);
          if (kh < 0) continue;
          const unsigned from = cells + (ci * (shape.tiles + 1) * shape.column_cells + shape.h.reach() - offset) * CELL;
          const unsigned* const row_weights =
              weights + ((channel * shape.inputs + ci) * shape.h.kernel + kh) * shape.row_weights();
#pragma unroll
          for (int r = 0; r < shape.d.stride; ++r) {
            if (r == r_d) multiply(sums, shape, r, from, row_weights, band);
          }
        }
      }
      Vector<2> pairs[2 * MOST_SUMS];
      if (live && __any_sync(~0u, finish(pairs, sums, shape, epilogue)) != 0 && lane == 0) block.spoilt[warp] = true;
#pragma unroll 1
      for (int plane = 0; plane < shape.planes; ++plane) {
        forget_memory();
        const int again = static_cast<int>(computed_anew(threadIdx.x)), own_lane = again % 32, own_warp = again / 32;
        scalar_t* const own = finished + own_warp * 16 * shape.pitch() * 8;
#pragma unroll
        for (int p = 0; p < shape.planes; ++p) {
          if (p == plane && live) write_plane(own, pairs + p * shape.tiles * 2 * shape.w.stride, shape, own_lane);
        }
        const int end_d = problem.output_size[0] - plane * shape.d.stride - r_d, end_h = problem.output_size[1] - r_h;
        const index_t offset = (plane * shape.d.stride + r_d) * output.stride[2] + r_h * output.stride[3];
        if (rows_lie_together) {
          __syncwarp();
          if (live) {
            scalar_t* const y = output.data + (offset + channel * output.stride[1]);
            const Place* const to = places + own_warp * 16;
            if (block.length == 8) store_rows<8>(own, to, y, shape, end_d, end_h, block.live_w, own_lane);
            if (block.length == 4) store_rows<4>(own, to, y, shape, end_d, end_h, block.live_w, own_lane);
            if (block.length <= 2) store_rows<2>(own, to, y, shape, end_d, end_h, block.live_w, own_lane);
          }
          __syncwarp();
        } else {
          __syncthreads();
          const int channels = min(beside, block.outs - first_channel);
          const int live_w = block.live_w, length = block.length;
          const index_t at = offset + first_channel * output.stride[1];
          if (length == 8) store_channels<8>(finished, places, output, shape, beside, channels, at, end_d, end_h, live_w);
          if (length == 4) store_channels<4>(finished, places, output, shape, beside, channels, at, end_d, end_h, live_w);
          if (length == 2) store_channels<2>(finished, places, output, shape, beside, channels, at, end_d, end_h, live_w);
          if (length == 1) store_channels<1>(finished, places, output, shape, beside, channels, at, end_d, end_h, live_w);
          __syncthreads();
        }
      }
    }
  };
#pragma unroll 1
  for (int first_tile = 0; first_tile * 16 < block.rows; first_tile += BLOCK_WARPS / beside) {
#pragma unroll 1
    for (int first = 0; first < block.outs; first += beside) multiply_and_store(first_tile, first);
  }

  __syncthreads();
  bool spoilt = false;
  for (int i = 0; i < BLOCK_WARPS; ++i) spoilt = spoilt || block.spoilt[i];
  if (!spoilt) return;
  const int width = block.live_w, height = min(rows_h * shape.h.stride, problem.output_size[1] - block.h);
  const int depth = min(block_d * shape.planes * shape.d.stride, problem.output_size[0] - block.d);
#pragma unroll 1
  for (int c = 0; c < block.outs; ++c) {
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < depth * height * width; i += 32 * BLOCK_WARPS) {
      const int channel = block.first_out + c;
      const int d = block.d + i / width / height, h = block.h + i / width % height, w = block.w + i % width;
      scalar_t* const y = output.at(block.n, channel, d, h, w);
      if (to_accum(*y) != to_accum(*y)) {
        const int inputs = problem.in_channels / problem.groups, outputs = problem.out_channels / problem.groups;
        *y = gathered(problem, input, weight, epilogue, block.n, channel, channel % outputs, channel / outputs * inputs, d, h,
                      w);
      }
    }
  }
}
