/* convt3d
pass = "fprop"
dtypes = ["tf32", "bf16", "fp16"]
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
PADDING_D = "padding_d"
PADDING_H = "padding_h"
PADDING_W = "padding_w"
IN_CHANNELS = "in_channels_per_group"
CHUNK_CELLS = "chunk_cells"
HALVES = "halves"
JOINED_H = "joined_h"
JOINED_W = "joined_w"
TILES = "tiles"
UNIT_W = "unit_w"
WINDOW_D = "window_d"
WINDOW_H = "window_h"
WINDOW_W = "window_w"
OUTPUT_LAYOUT = "output_layout"
STORE = "store"
[constants]
# Cells of 16 bytes of channels, two for each product, and so many of them at a time in shared memory; halves of a tile of 16 output channels.
vector = "16 // itemsize"
cells = "2 * ceil_div(in_channels_per_group, 2 * vector)"
chunk_cells = "2 * ceil_div(cells, 2 * ceil_div(cells, 8))"
chunks = "ceil_div(cells, chunk_cells)"
halves = "1 if out_channels_per_group <= 8 else 2"
channel_tiles = "ceil_div(out_channels_per_group, 16)"
q_d = "ceil_div(output_d, stride_d)"
q_h = "ceil_div(output_h, stride_h)"
q_w = "ceil_div(output_w, stride_w)"
# How many inputs beside its own the positions of an axis meet.
halo_d = "((kernel_d - 1) * dilation_d - padding_d % stride_d + stride_d) // stride_d - (0 if padding_d % stride_d else 1)"
halo_h = "((kernel_h - 1) * dilation_h - padding_h % stride_h + stride_h) // stride_h - (0 if padding_h % stride_h else 1)"
halo_w = "((kernel_w - 1) * dilation_w - padding_w % stride_w + stride_w) // stride_w - (0 if padding_w % stride_w else 1)"
# Few channels leave rows of a product to several residues of h and w.
joined_w = "2 if out_channels_per_group <= 8 and stride_w == 2 else 1"
joined_h = "2 if out_channels_per_group <= 4 and joined_w == 2 and stride_h == 2 else 1"
rows_h = "halo_h + 1 if joined_h == 2 else kernel_h"
rows_w = "halo_w + 1 if joined_w == 2 else kernel_w"
# A warp's unit: so many tiles of 8 positions as its sums allow, in rows of 8 or 16.
residues = "stride_h // joined_h * (stride_w // joined_w)"
tiles = "8 if residues == 1 else 4 if residues <= 4 else 2"
unit_w = "8 if q_w <= 8 else 16"
unit_h = "8 * tiles // unit_w"
# A block's box of units.
box_w = "unit_w if ceil_div(q_w, unit_w) * unit_w < ceil_div(q_w, 2 * unit_w) * 2 * unit_w else 2 * unit_w"
# In several chunks each warp has one unit, so that nothing is loaded twice.
positions = "POSITIONS if chunks == 1 else max(box_w * unit_h, 32 * tiles // stride_d)"
box_h = "unit_h * max(1, min(ceil_div(q_h, unit_h), positions // (min(q_d, 2) * box_w * unit_h)))"
box_d = "max(1, min(q_d, positions // (box_w * box_h)))"
boxes_d = "ceil_div(q_d, box_d)"
boxes_h = "ceil_div(q_h, box_h)"
boxes_w = "ceil_div(q_w, box_w)"
window_d = "box_d + halo_d"
window_h = "box_h + halo_h"
window_w = "box_w + halo_w"
# How outputs are stored, where their layout is known: see Store.
row_pieces = "1 if output_w % (4 if stride_w == 2 or unit_w == 16 else 2) == 0 else 2 if output_w % 2 == 0 else 3"
channel_vectors = "out_channels % (2 if halves == 1 else 4) == 0 and out_channels_per_group % (2 if halves == 1 else 4) == 0"
store = "row_pieces if output_layout == 1 else (4 if channel_vectors and itemsize == 2 else 5) if output_layout == 2 else 0"
shared_bytes = "16 * (chunk_cells + 1) * window_d * window_h * window_w"
products_of_tile = "kernel_d * rows_h * rows_w * (cells // 2)"
fragments = "groups * channel_tiles * products_of_tile * 32"
[restrictions]
"stride_w <= 2 and residues <= 8" = "a warp keeps the sums of all residues of h and w in registers: a stride of at most 2 along w, and few residues"
"kernel_w <= 5 and kernel_h * kernel_w <= 25" = "the taps of a plane are unrolled, and those of a row in registers: at most 25, and 5"
"out_channels_per_group <= 32" = "inputs are loaded again for every 16 output channels: at most 32"
"shared_bytes <= 98 * 1024" = "the inputs that a block's positions meet must fit the 99 KiB of shared memory that every GPU has, some channels of them"
"max(batch * groups * channel_tiles * boxes_d * boxes_h * boxes_w, fragments) <= 2000000000" = "it counts its blocks in 32 bits"
[search]
POSITIONS = [128, 256, 512]
RESIDENT = [3, 4, 5]
[cost]
steps = "products_of_tile"
products = "box_d * box_h * box_w * 16 * 2 * vector"
bytes = "ceil_div(shared_bytes * chunks, products_of_tile)"
[workspace]
packed_weight = "4 * fragments"
[[launch]]
symbol = "convt3d_window_mma_pack"
general = true
packs = "packed_weight"
grid = "ceil_div(fragments, 128)"
block = 128
[[launch]]
symbol = "convt3d_fprop_window_mma"
grid = "batch * groups * channel_tiles * boxes_d * boxes_h * boxes_w"
block = 128
shared_bytes = "shared_bytes"
*/
// Few channels on tensor cores, where outputs are many: the last layers of decoders. Such a layer is bound by memory, so what counts is that
// inputs are read once, that stores are whole pieces of rows, and that little else is done for each.
//
// On each axis o + padding % stride = q*stride + r, and tap t feeds o through input q + padding / stride - offset (`Taps`). A block has a
// box of positions q, and all inputs that they meet in shared memory, channels together, in cells of 16 bytes. A warp takes units of
// neighbouring positions and one residue of d, and has the sums of all residues of h and w:
//
//   rows:    16 output channels, those of a tap's weight, which packing has laid out as fragments
//   depth:   two cells of channels
//   columns: 8 positions, whose cells ldmatrix reads wherever they lie: once for all taps that meet there
//
// A lane has neighbouring outputs of a row: 4 of them go to memory from registers, and four lanes' are 32 or 64 bytes in a row. Rows that
// begin at an odd element of 16 bits take their pairs from the lane before. Where channels lie together in the output, pairs are
// transposed by movmatrix, and a lane has 4 neighbouring channels.
#include "convt3d.cuh"
#include "convt3d/core/cell.cuh"
#include "convt3d/core/digits.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/gathered.cuh"
#include "convt3d/core/layout.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/core/taps.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/epilogue/store_vector.cuh"

// Positions of a block, about.
#ifndef POSITIONS
#define POSITIONS 256
#endif
// Blocks of a multiprocessor, as far as registers allow.
#ifndef RESIDENT
#define RESIDENT 4
#endif

constexpr int SIZE = static_cast<int>(sizeof(scalar_t)), EACH = 4 / SIZE;  // elements of a register
constexpr int THREADS = 128, WARPS = THREADS / 32;
// With 64 sums a thread, or where it looks at strides, it needs more registers than four blocks leave it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool FEW_REGISTERS = false;
#else
constexpr bool FEW_REGISTERS = SIZE == 2;
#endif
constexpr int FITTING = OUTPUT_LAYOUT == 0 ? 2 : HALVES == 1 ? 5 : FEW_REGISTERS ? 4 : 3;
constexpr int BLOCKS = RESIDENT < FITTING ? RESIDENT : FITTING;
constexpr int MOST_SUMS = 16, MOST_TILES = 8;  // of a warp

// A lane's share of 16 output channels x two cells of a tap's weight.
struct alignas(16) Fragment {
  unsigned a[4];
};

// What the 16 rows of a product are: output channels, and residues where channels are few.
struct Rows {
  int halves, joined_h, joined_w;

  // In 16 bits a lane gets four neighbouring channels by transposing both halves of the rows.
  __device__ int channel(int row) const {
    if (joined_w == 2) return joined_h == 2 ? row % 4 : row % 8;
    return SIZE == 2 && halves > 1 ? row % 8 / 2 * 4 + row / 8 * 2 + row % 2 : row;
  }
  __device__ int residue_h(int row) const { return joined_h == 2 ? row % 8 / 4 : 0; }
  __device__ int residue_w(int row) const { return joined_w == 2 ? row / 8 : 0; }
};

__device__ inline Taps taps_of(const Problem& problem, int axis) {
  return {problem.kernel_size[axis], problem.stride[axis], problem.dilation[axis], problem.padding[axis], 1};
}

// Fragments [group][channel tile][tap of d][of h][of w][pair of cells][lane]. Where residues share a product the taps are
// those of each at an input so far below, from the nearest on, and zero where it has none.
extern "C" __global__ void __launch_bounds__(128)
    convt3d_window_mma_pack(const Problem problem, const View<const scalar_t> weight, Fragment* __restrict__ packed_weight,
                            const int cells, const int halves, const int joined_h, const int joined_w, const int rows_h,
                            const int rows_w, const int channel_tiles, const int fragments) {
  Digits index{blockIdx.x * 128 + threadIdx.x};
  if (index.rest >= static_cast<unsigned>(fragments)) return;
  Fragment& to = packed_weight[index.rest];
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int lane = index.next(32), pair = index.next(cells / 2);
  const int at_w = index.next(rows_w), at_h = index.next(rows_h), kd = index.next(problem.kernel_size[0]);
  const int first_out = index.next(channel_tiles) * 16, group = index.last();
  const Rows rows = {halves, joined_h, joined_w};
  const Taps th = taps_of(problem, 1), tw = taps_of(problem, 2);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const int row = lane / 4 + 8 * (r % 2), co = first_out + rows.channel(row);
    const int ci = (pair * 2 + r / 2) * VECTOR + lane % 4 * EACH;
    const int kh = joined_h == 2 ? th.tap(th.nearest() + at_h, rows.residue_h(row)) : at_h;
    const int kw = joined_w == 2 ? tw.tap(tw.nearest() + at_w, rows.residue_w(row)) : at_w;
    scalar_t own[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const bool live = co < out_channels && ci + e < channels && kh >= 0 && kw >= 0;
      own[e] = live ? *weight.at(group * channels + ci + e, co, kd, kh, kw) : scalar_t();
    }
    unsigned word;
    memcpy(&word, own, sizeof word);
    to.a[r] = SIZE == 4 ? nearest_tf32(__uint_as_float(word)) : word;
  }
}

// What all of a block's work has in common; numbers that a GPU's binary is compiled for.
struct Shape {
  Taps d, h, w;
  Rows rows;
  int channels, chunk_cells, tiles, unit_w, window_d, window_h, window_w;

  __device__ int cells() const { return (channels + 2 * VECTOR - 1) / (2 * VECTOR) * 2; }
  __device__ int unit_h() const { return tiles * 8 / unit_w; }
  // Units of the block's box.
  __device__ int box_d() const { return window_d - d.inputs() + 1; }
  __device__ int units_h() const { return (window_h - h.inputs() + 1) / unit_h(); }
  __device__ int units_w() const { return (window_w - w.inputs() + 1) / unit_w; }
  // Two tiles' columns take turns, so that a lane has 4 neighbouring outputs of them.
  __device__ bool turns() const { return w.stride == 1 && unit_w == 16; }
  __device__ int run() const { return turns() ? 4 : 2 * w.stride; }  // neighbouring outputs of a lane
  // Where column n of a tile lies in its row of the unit.
  __device__ int column(int tile, int n) const {
    const int second = tile % (unit_w / 8);
    return turns() ? n / 2 * 4 + second * 2 + n % 2 : second * 8 + n;
  }
  // Bytes of a position: an odd number of cells, so that positions meet all banks.
  __device__ int pitch() const { return 16 * (chunk_cells + 1); }
  // Residues that have products of their own, and what a product's weights are counted by.
  __device__ int residues_h() const { return h.stride / rows.joined_h; }
  __device__ int residues_w() const { return w.stride / rows.joined_w; }
  __device__ int rows_h() const { return rows.joined_h == 2 ? h.inputs() : h.kernel; }
  __device__ int rows_w() const { return rows.joined_w == 2 ? w.inputs() : w.kernel; }
  __device__ int fragments() const { return rows_h() * rows_w() * (cells() / 2) * 32; }  // of a tap of d
  __device__ int sum(int r_h, int r_w, int tile) const { return (r_h * residues_w() + r_w) * tiles + tile; }
};

// Cells from `first_cell` on of all inputs that the block's positions meet, from `first` on; zeros for what lies outside. A copy may land
// later, before `cp_async_wait_all`.
__device__ inline void load_window(unsigned char* window, const Shape& shape, const Problem& problem,
                                   const View<const scalar_t>& input, int n, int group, const int (&first)[3], int first_cell) {
  const int positions = shape.window_d * shape.window_h * shape.window_w, cells = shape.chunk_cells;
  const bool whole = shape.channels % VECTOR == 0 && made_of_vectors(input, 1, VECTOR);  // cells lie in memory
  const int first_channel = first_cell * VECTOR, channels = shape.channels - first_channel;
  const scalar_t* const corner = input.at(n, group * shape.channels + first_channel, first[0], first[1], first[2]);
  const int thread = static_cast<int>(threadIdx.x), each = whole ? cells : 1;  // threads for a position
  if (thread >= THREADS / each * each) return;
#pragma unroll 1
  for (int position = thread / each; position < positions; position += THREADS / each) {
    const int d = position / (shape.window_h * shape.window_w), h = position / shape.window_w % shape.window_h;
    const int w = position % shape.window_w;
    const bool inside = static_cast<unsigned>(first[0] + d) < static_cast<unsigned>(problem.input_size[0]) &&
                        static_cast<unsigned>(first[1] + h) < static_cast<unsigned>(problem.input_size[1]) &&
                        static_cast<unsigned>(first[2] + w) < static_cast<unsigned>(problem.input_size[2]);
    const scalar_t* from = corner + (d * input.stride[2] + h * input.stride[3] + w * input.stride[4]);
    unsigned char* const to = window + position * shape.pitch();
    if (whole) {
      const int channel = thread % each * VECTOR;
      const bool live = inside && channel < channels;
      cp_async<16>(shared_address(to + thread % each * 16), live ? from + channel : input.data, live ? 16 : 0);
      continue;
    }
#pragma unroll 2
    for (int cell = 0; cell < cells; ++cell) {
      Vector<VECTOR> values{};
#pragma unroll
      for (int v = 0; v < VECTOR; ++v, from = advanced(from, input.stride[1] * SIZE)) {
        if (inside && cell * VECTOR + v < channels) values.element[v] = *from;
      }
      *reinterpret_cast<Vector<VECTOR>*>(to + cell * 16) = values;
    }
  }
}

// All products of a chunk of channels of a unit with the taps of h and w in one plane. `row` is where this lane's row of matrices lies, for the farthest offsets.
__device__ __forceinline__ void multiply(float (&sums)[MOST_SUMS][4], const Shape& shape, unsigned row,
                                         const Fragment* fragments, int pairs) {
  const Taps &th = shape.h, &tw = shape.w;
  const int next_tap = shape.cells() / 2 * 32;
#pragma unroll 1
  for (int pair = 0; pair < pairs; ++pair, row += 32, fragments += 32) {
#pragma unroll
    for (int below_h = th.reach(); below_h >= th.nearest(); --below_h) {
      forget_memory();  // or the weights of all rows of taps are read before the first product, and spilled
#pragma unroll
      for (int below_w = tw.reach(); below_w >= tw.nearest(); --below_w) {
        unsigned b[MOST_TILES][2];
#pragma unroll
        for (int two = 0; two < shape.tiles; two += 2) {
          unsigned cells[4];
          const int down = th.reach() - below_h + (shape.unit_w == 16 ? two / 2 : two);
          ldmatrix_x4(cells, row + (down * shape.window_w + tw.reach() - below_w) * shape.pitch());
#pragma unroll
          for (int k = 0; k < 4; ++k) b[two + k / 2][k % 2] = SIZE == 4 ? nearest_tf32(__uint_as_float(cells[k])) : cells[k];
        }
#pragma unroll
        for (int r = 0; r < shape.residues_h() * shape.residues_w(); ++r) {
          const int r_h = r / shape.residues_w(), r_w = r % shape.residues_w();
          const int at_h = shape.rows.joined_h == 2 ? below_h - th.nearest() : th.tap(below_h, r_h);
          const int at_w = shape.rows.joined_w == 2 ? below_w - tw.nearest() : tw.tap(below_w, r_w);
          if (at_h < 0 || at_w < 0) continue;
          const Fragment weights = fragments[(at_h * shape.rows_w() + at_w) * next_tap];
#pragma unroll
          for (int t = 0; t < shape.tiles; ++t) CONVT3D_MULTIPLY(sums[shape.sum(r_h, r_w, t)], weights.a, b[t][0], b[t][1]);
        }
      }
    }
  }
}

// How outputs are stored: in rows, by vectors of a lane's run, by pairs, or by pairs that begin anywhere; with channels together, by vectors
// of a lane's, or one by one.
enum class Store { unknown, row_vectors, row_pairs, rows, channel_vectors, channels, elements };

__device__ __forceinline__ unsigned bits_of(const Vector<2>& pair) {
  unsigned word;
  memcpy(&word, &pair, sizeof word);  // all of it in 16 bits
  return word;
}

// Store a lane's neighbouring outputs of a row, which has `rest` of them from there on. Four lanes have neighbouring runs, which end inside
// the row where it is `inside`. All lanes call it.
__device__ __forceinline__ void store_run(const float (&sums)[4], int run, const Epilogue& epilogue, scalar_t* y, index_t step,
                                          int rest, bool inside, Store store, int lane) {
  Vector<2> pairs[2];
#pragma unroll
  for (int i = 0; i < run / 2; ++i) pairs[i] = epilogue.finish_pair(sums[2 * i], sums[2 * i + 1]);
  if (store == Store::row_vectors) {
    const scalar_t four[4] = {pairs[0].element[0], pairs[0].element[1], pairs[1].element[0], pairs[1].element[1]};
    if (run == 4 && rest > 0) store_vector(y, four);
    if (run == 2 && rest > 0) *reinterpret_cast<Vector<2>*>(y) = pairs[0];
  } else if (store == Store::row_pairs) {
#pragma unroll
    for (int i = 0; i < run / 2; ++i) {
      if (2 * i < rest) *reinterpret_cast<Vector<2>*>(y + 2 * i) = pairs[i];
    }
  } else if (SIZE == 4 || store != Store::rows || !inside) {
#pragma unroll
    for (int e = 0; e < run; ++e, y = advanced(y, step)) {
      if (e < rest) *y = pairs[e / 2].element[e % 2];
    }
  } else {
    // Where it begins amid a word of memory its pairs are those of the element before, which the lane before has, on. The first of four
    // lanes stores its first element by itself, the last one its last.
    const int odd = static_cast<int>(reinterpret_cast<index_t>(y) / 2 % 2), last = run / 2 - 1;
    const unsigned before = __shfl_up_sync(0xffffffffu, bits_of(pairs[last]), 1, 4);
    const bool begins = odd != 0 && lane % 4 == 0, ends = odd != 0 && lane % 4 == 3;
#pragma unroll
    for (int i = 0; i <= last; ++i) {
      const unsigned own = bits_of(pairs[i]), behind = i == 0 ? before : bits_of(pairs[0]);
      const unsigned word = odd != 0 ? own << 16 | behind >> 16 : own;
      if (rest > 0 && !(begins && i == 0)) *reinterpret_cast<unsigned*>(y + (2 * i - odd)) = word;
    }
    if (rest > 0 && (begins || ends)) y[begins ? 0 : run - 1] = begins ? pairs[0].element[0] : pairs[last].element[1];
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convt3d_fprop_window_mma(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                             const Fragment* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                             View<scalar_t> output, const int in_channels_per_group, const int chunk_cells, const int halves,
                             const int joined_h, const int joined_w, const int tiles, const int unit_w, const int window_d,
                             const int window_h, const int window_w, const int boxes_d, const int boxes_h, const int boxes_w,
                             const int channel_tiles) {
  lay_out(problem, output, OUTPUT_LAYOUT ? SPECIALIZED(OUTPUT_LAYOUT, layout_of(problem, output)) : 0);
  extern __shared__ __align__(16) unsigned char shared[];
  const Epilogue epilogue{bias};
  const Shape shape = {{SPECIALIZED(KERNEL_D, problem.kernel_size[0]), SPECIALIZED(STRIDE_D, problem.stride[0]),
                        SPECIALIZED(DILATION_D, problem.dilation[0]), SPECIALIZED(PADDING_D, problem.padding[0]), 1},
                       {SPECIALIZED(KERNEL_H, problem.kernel_size[1]), SPECIALIZED(STRIDE_H, problem.stride[1]),
                        SPECIALIZED(DILATION_H, problem.dilation[1]), SPECIALIZED(PADDING_H, problem.padding[1]), 1},
                       {SPECIALIZED(KERNEL_W, problem.kernel_size[2]), SPECIALIZED(STRIDE_W, problem.stride[2]),
                        SPECIALIZED(DILATION_W, problem.dilation[2]), SPECIALIZED(PADDING_W, problem.padding[2]), 1},
                       {SPECIALIZED(HALVES, halves), SPECIALIZED(JOINED_H, joined_h), SPECIALIZED(JOINED_W, joined_w)},
                       SPECIALIZED(IN_CHANNELS, in_channels_per_group),
                       SPECIALIZED(CHUNK_CELLS, chunk_cells),
                       SPECIALIZED(TILES, tiles),
                       SPECIALIZED(UNIT_W, unit_w),
                       SPECIALIZED(WINDOW_D, window_d),
                       SPECIALIZED(WINDOW_H, window_h),
                       SPECIALIZED(WINDOW_W, window_w)};
  const Taps &td = shape.d, &th = shape.h, &tw = shape.w;

  // blockIdx.x = ((((n * groups + group) * boxes_d + d) * boxes_h + h) * boxes_w + w) * channel_tiles + channel tile
  Digits index{blockIdx.x};
  const int channel_tile = index.next(channel_tiles), first_w = index.next(boxes_w) * shape.units_w() * shape.unit_w;
  const int first_h = index.next(boxes_h) * shape.units_h() * shape.unit_h(), first_d = index.next(boxes_d) * shape.box_d();
  const int group = index.next(problem.groups), n = index.last();
  const int origin[3] = {td.first() - td.reach() + first_d, th.first() - th.reach() + first_h,
                         tw.first() - tw.reach() + first_w};
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int out_channels = problem.out_channels / problem.groups, first_out = channel_tile * 16;
  const int first_channel = group * out_channels + first_out;
  const Fragment* const fragments =
      packed_weight + (static_cast<index_t>(group) * channel_tiles + channel_tile) * td.kernel * shape.fragments() + lane;
  // Lane l gives the address of row l % 8: of cell l / 8 % 2, of tile l / 16 of the first two.
  const int second = lane / 16, down = shape.unit_w == 16 ? 0 : second;
  const unsigned lanes_row =
      shared_address(shared) + (down * shape.window_w + shape.column(second, lane % 8)) * shape.pitch() + lane / 8 % 2 * 16;

  const int of_lane = shape.rows.halves == 1 ? 2 : 4;  // channels that lie together
  const auto made_of = [&](int along, int size, int length) {
    return size % length == 0 && made_of_vectors(output, along, length);
  };
  Store found = Store::elements;
  if (output.stride[4] == 1) {
    const int width = problem.output_size[2];
    found = made_of(4, width, shape.run()) ? Store::row_vectors : made_of(4, width, 2) ? Store::row_pairs : Store::rows;
  } else if (output.stride[1] == 1) {
    found = SIZE == 2 && made_of(1, out_channels, of_lane) ? Store::channel_vectors : Store::channels;
  }
  const Store store = STORE ? static_cast<Store>(SPECIALIZED(STORE, static_cast<int>(found))) : found;
  const bool transposes = SIZE == 2 && (store == Store::channel_vectors || store == Store::channels);
  float start[2];  // of this lane's rows of a product
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int co = shape.rows.channel(half * 8 + lane / 4);
    start[half] = epilogue.start(first_channel + co, first_out + co < out_channels);
  }
  const bool joins_h = shape.rows.joined_h == 2, joins_w = shape.rows.joined_w == 2;
  bool spoilt = false;  // some sum was NaN

#pragma unroll 1
  for (int first_item = 0; first_item < shape.box_d() * shape.units_h() * shape.units_w() * td.stride; first_item += WARPS) {
    const int item = first_item + warp;
    const int r_d = item % td.stride, unit = item / td.stride, w = unit % shape.units_w() * shape.unit_w;
    const int h = unit / shape.units_w() % shape.units_h() * shape.unit_h(), d = unit / shape.units_w() / shape.units_h();
    const int o_d = (first_d + d) * td.stride + r_d, o_h = (first_h + h) * th.stride, o_w = (first_w + w) * tw.stride;
    const bool live =
        d < shape.box_d() && o_d < problem.output_size[0] && o_h < problem.output_size[1] && o_w < problem.output_size[2];

    float sums[MOST_SUMS][4];
    const int all_sums = shape.residues_h() * shape.residues_w() * shape.tiles * 4;
#pragma unroll
    for (int i = 0; i < all_sums; ++i) sums[i / 4][i % 4] = start[i % 4 / 2];
#pragma unroll 1
    for (int first_cell = 0; first_cell < shape.cells(); first_cell += shape.chunk_cells) {
      if (shape.chunk_cells < shape.cells() || first_item == 0) {
        if (first_item > 0 || first_cell > 0) __syncthreads();  // the chunk before has been read
        load_window(shared, shape, problem, input, n, group, origin, first_cell);
        cp_async_wait_all();
        __syncthreads();
      }
      if (!live) continue;
      const int pairs = min(shape.chunk_cells, shape.cells() - first_cell) / 2;
#pragma unroll 1
      for (int below = td.reach(); below >= td.nearest(); --below) {
        const int kd = td.tap(below, r_d), plane = d + td.reach() - below;
        if (kd < 0) continue;
        multiply(sums, shape, lanes_row + ((plane * shape.window_h + h) * shape.window_w + w) * shape.pitch(),
                 fragments + kd * shape.fragments() + first_cell / 2 * 32, pairs);
      }
    }
    if (!live) continue;
    if (joins_w) {
#pragma unroll
      for (int i = 0; i < all_sums; ++i) spoilt = spoilt || sums[i / 4][i % 4] != sums[i / 4][i % 4];
    }

    // The unit's rows of outputs follow one another. A lane may have every second one.
    const int own_row = !joins_h ? 0 : transposes ? lane % 4 / 2 : lane / 16, rows = problem.output_size[1] - o_h;
    const int own_w = o_w + shape.column(0, transposes ? lane / 4 : lane % 4 * 2) * tw.stride, of_row = shape.unit_w / 8;
    const bool whole = o_w + shape.unit_w * tw.stride <= problem.output_size[2];
    scalar_t* line = output.at(n, first_channel, o_d, o_h + own_row, own_w);
#pragma unroll
    for (int i = 0; i < shape.unit_h() * shape.residues_h(); ++i) {
      const int row = i * shape.rows.joined_h, r_h = i % shape.residues_h(), first_tile = i / shape.residues_h() * of_row;
      if (row >= rows) break;
      const int width = row + own_row < rows ? problem.output_size[2] - own_w : 0;
      if (transposes) {
        const int co = joins_h ? lane % 2 * 2 : lane % 4 * of_lane, left = out_channels - first_out - co;
#pragma unroll
        for (int at = 0; at < of_row * tw.stride; ++at) {
          const int t = at / tw.stride, r_w = at % tw.stride;
          const int behind = (shape.column(t, 0) - shape.column(0, 0)) * tw.stride + r_w;
          const float (&sum)[4] = sums[shape.sum(r_h, joins_w ? 0 : r_w, first_tile + t)];
          unsigned words[2];
#pragma unroll
          for (int e = 0; e < of_lane / 2; ++e) {
            const int first = joins_w ? r_w * 2 : e * 2;
            words[e] = transposed_matrix(bits_of(epilogue.finish_pair(sum[first], sum[first + 1])));
          }
          scalar_t own[4];
          memcpy(own, words, sizeof words);
          scalar_t* const y = line + (co + behind * output.stride[4]);
          if (store == Store::channel_vectors) {
            if (behind < width && left > 0 && of_lane == 4) store_vector(y, own);
            if (behind < width && left > 0 && of_lane == 2) *reinterpret_cast<unsigned*>(y) = words[0];
          } else {
#pragma unroll
            for (int c = 0; c < of_lane; ++c) {
              if (behind < width && c < left) y[c] = own[c];
            }
          }
        }
      } else {
#pragma unroll
        for (int half = 0; half < (joins_w ? 1 : shape.rows.halves); ++half) {
          const int co = shape.rows.channel(half * 8 + lane / 4);
          scalar_t* const of_channel = line + co * output.stride[1];
          const int there = first_out + co < out_channels ? width : 0;
#pragma unroll
          for (int t = 0; t < of_row; t += shape.turns() ? 2 : 1) {
            float run[4];
#pragma unroll
            for (int e = 0; e < shape.run(); ++e) {
              const int tile = first_tile + (shape.turns() ? e / 2 : t), r_w = e % tw.stride, column = e / tw.stride % 2;
              run[e] = joins_w ? sums[shape.sum(r_h, 0, tile)][r_w * 2 + column]
                               : sums[shape.sum(r_h, r_w, tile)][half * 2 + column];
            }
            const int behind = t * 8 * tw.stride;
            store_run(run, shape.run(), epilogue, of_channel + behind * output.stride[4], output.stride[4] * SIZE,
                      there - behind, whole, store, lane);
          }
        }
      }
      line = advanced(line, shape.rows.joined_h * output.stride[3] * SIZE);
    }
  }

  // Zero weights stand for taps that are none: an input that is infinite or no number also spoils outputs beside those it feeds.
  if (!joins_w || __syncthreads_or(spoilt) == 0) return;
  const int box_h = shape.units_h() * shape.unit_h() * th.stride, box_w = shape.units_w() * shape.unit_w * tw.stride;
  const int first_ci = group * shape.channels;
#pragma unroll 1
  for (int i = thread; i < out_channels * shape.box_d() * td.stride * box_h * box_w; i += THREADS) {
    const int o_w = first_w * tw.stride + i % box_w, o_h = first_h * th.stride + i / box_w % box_h;
    const int plane = i / box_w / box_h, co = plane / (shape.box_d() * td.stride);
    const int o_d = first_d * td.stride + plane % (shape.box_d() * td.stride);
    if (o_d >= problem.output_size[0] || o_h >= problem.output_size[1] || o_w >= problem.output_size[2]) continue;
    scalar_t* const y = output.at(n, first_channel + co, o_d, o_h, o_w);
    if (to_accum(*y) != to_accum(*y))
      *y = gathered(problem, input, weight, epilogue, n, first_channel + co, co, first_ci, o_d, o_h, o_w);
  }
}
