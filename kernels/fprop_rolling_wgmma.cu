/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "bf16", "fp16"]
architectures = ["sm_90a"]
multiplies_padding = true

[search]
TILES_M = [1, 2]
CHUNK_CELLS = [2, 4, 6]
LAY_OUT = [0, 1]

[specialize]
SLOTS = "slots"
STEP = "step"
MERGED_W = "merged_w"
CLASSES_W = "classes_w"
SLOT_TILES = "slot_tiles"
WGMMA_TILES = "products * slot_tiles"
M_TILES = "thread_tiles"
CELLS = "chunk_cells"
CELLS_LAUNCH = "cells_launch"
KERNEL_W = "kernel_w"
STRIDE_W = "stride_w"
DILATION_W = "dilation_w"
PHASE_W = "phase_w"
ROW_SLABS = "row_slabs"
RESIDENT = "resident"
FILLED = "filled"
ROW_STORES = "row_stores"
COMPOSED = "composed8"
WHOLE_TILES = "whole_tiles"
OUTPUT_LAYOUT = "output_layout"
PAIRS = "pairs"
LANE_EIGHTS = "lane_eights"
CHANNEL_RUNS = "channel_runs"

[constants]
slots = "kernel_d"
step = "stride_d // gcd(stride_d, dilation_d)"
merged_w = "stride_w if dilation_w == 1 and kernel_w % stride_w == 0 and slots * stride_w <= 32 else 1"
classes_h = "min(stride_h // gcd(stride_h, dilation_h), kernel_h)"
classes_w = "stride_w // gcd(stride_w, dilation_w) // merged_w"
# The stride_w outputs of a position begin at a multiple of the stride: residues below `phase_w` are those of the next position.
phase_w = "padding_w % stride_w if merged_w == 1 else 0"
next_w = "min(phase_w, 1)"
parts = "1 + split"

# Columns of a product come in eights: `products` of them for each eight output channels.
products = "slots * merged_w"
out_tiles = "ceil_div(out_channels_per_group, 8)"
cells_launch = "0 if LAY_OUT == 0 or classes_h == 1 and products * out_tiles <= 24 and 4 * parts * products * classes_w * out_tiles <= 144 else 1"
# Where taps leave out whole rows or planes, a block fills them too.
filled = "1 if gcd(stride_d, dilation_d) > 1 or classes_h < stride_h else 0"
# Rows of an odd length with a stride of 2 are no aligned pairs: they pass through shared memory.
odd_rows = "1 if stride_w == 2 and output_w % 2 == 1 else 0"
gaps = "1 if filled and (classes_w * merged_w < stride_w or step > slots) else 0"
# What is stored at once, one more than `pairs_of` says; 0: of any strides.
even_columns = "stride_w % 2 == 0 and output_w % 2 == 0 and (phase_w - padding_w) % 2 == 0 and gaps == 0"
pairs = "0 if output_layout == 0 else 3 if output_layout == 2 and out_channels_per_group % 2 == 0 else 2 if output_layout == 1 and even_columns else 1"
# Where channels lie together, eights of columns of which a lane has neighbouring channels: at most 16 bytes. An odd number of channels
# of 16 bits begins anywhere; few are stored one by one as quickly.
channel_runs = "1 if output_layout == 2 and itemsize == 2 and out_channels_per_group % 2 and out_channels_per_group > 10 else 0"
lane_eights = "gcd(gcd(slot_tiles, 8 // itemsize), 4 if channel_runs else out_channels_per_group // 2) if pairs == 3 or channel_runs else 1"
accumulators = "192 if cells_launch and not odd_rows and not filled else 144"
fit_1 = "max(1, min(accumulators // (4 * parts * products * classes_w), (32 if cells_launch else 24) // products))"
fit_2 = "max(1, min(accumulators // (8 * parts * products * classes_w), (32 if cells_launch else 24) // products))"
tiles_1 = "fit_1 if out_tiles % fit_1 == 0 else fit_1 - 1 if fit_1 > 1 and out_tiles % (fit_1 - 1) == 0 else fit_1 - 2 if fit_1 > 2 and out_tiles % (fit_1 - 2) == 0 else ceil_div(out_tiles, ceil_div(out_tiles, fit_1))"
tiles_2 = "fit_2 if out_tiles % fit_2 == 0 else fit_2 - 1 if fit_2 > 1 and out_tiles % (fit_2 - 1) == 0 else fit_2 - 2 if fit_2 > 2 and out_tiles % (fit_2 - 2) == 0 else ceil_div(out_tiles, ceil_div(out_tiles, fit_2))"
# What of the time of its products a block reads rows (4 / eights of columns) and gets weights, in thousandths.
cost_1 = "(500 + 4000 // (products * tiles_1) + 375) * tiles_1 * ceil_div(out_tiles, tiles_1)"
cost_2 = "(500 + 4000 // (products * tiles_2) + 188) * tiles_2 * ceil_div(out_tiles, tiles_2)"
fits_2 = "8 * parts * products * classes_w * tiles_2 <= accumulators"
thread_tiles = "TILES_M if TILES_M > 0 else 2 if fits_2 and cost_2 < cost_1 else 1"
slot_tiles = "tiles_2 if thread_tiles == 2 else tiles_1"
channel_tiles = "ceil_div(out_tiles, slot_tiles)"
whole_tiles = "1 if out_channels_per_group % (8 * slot_tiles) == 0 else 0"
tile_m = "CONSUMERS * thread_tiles * 64"

# Cells of 16 bytes: a chunk has an even number of them, two for each step of a product.
all_cells = "2 * ceil_div(in_channels_per_group * itemsize, 32)"
chunk_cells = "CHUNK_CELLS if CHUNK_CELLS > 0 else all_cells if all_cells <= 6 else 6 if all_cells % 6 == 0 and all_cells % 4 != 0 else 4"
chunks = "ceil_div(all_cells, chunk_cells)"

offset_h = "(kernel_h - 1) * dilation_h // stride_h"
offset_w = "(kernel_w - 1) * dilation_w // stride_w"
first_h = "padding_h // stride_h"
first_w = "padding_w // stride_w"
last_h = "(output_h - 1 + padding_h) // stride_h"
last_w = "(output_w - 1 + padding_w - phase_w) // stride_w"
rows = "max(input_h, input_h + offset_h - first_h, last_h + 1, last_h + 1 - first_h)"
pitch = "max(input_w, input_w + offset_w - first_w, last_w + 1 + next_w)"
m_first = "first_h * pitch + first_w"
m_count = "((batch - 1) * rows + last_h) * pitch + last_w + 1 - m_first"
m_tiles = "ceil_div(max(m_count, 1), tile_m)"
positions = "8 * ceil_div(tile_m + offset_h * pitch + offset_w + next_w, 8)"
span = "(m_tiles - 1) * tile_m + positions"
chains = "dilation_d // gcd(stride_d, dilation_d)"
first_step = "-1 if (chains - 1) * stride_d + gcd(stride_d, dilation_d) > padding_d + dilation_d else 0"
steps = "ceil_div(output_d + padding_d, chains * stride_d) - first_step"
row_taps = "kernel_w // merged_w"
period_h = "stride_h // gcd(stride_h, dilation_h)"
offset_step_h = "dilation_h // gcd(stride_h, dilation_h)"

tap_bytes = "128 * chunk_cells * products * slot_tiles * parts"
stage_bytes = "16 * chunk_cells * positions * parts"
# Rows of 16-bit copies are an odd number of 16 bytes: ldmatrix reads eight of them at once.
raw_length = "positions + 4 * (16 // itemsize) + (8 if itemsize == 2 and positions % 16 == 0 else 0)"
raw_places = "raw_length + 32 if raws else 0"
raw_bytes = "16 * chunk_cells * raw_length"
# Where all rows with taps are of one class of h, the outputs of a tile lie together in each channel of a plane: they are composed in shared
# memory, in two buffers of `composed8` eights of channels, behind their barriers and zeros, and stored in bulk from 32 bytes on, a `line`.
line = "32 // itemsize"
plane_pitch = "line * ceil_div(output_h * output_w + line - 1, line)"
composed_length = "ceil_div(tile_m, pitch) * stride_h * output_w + 2 * line * (tile_m // (rows * pitch) + 2)"
composed_pitch = "(16 + 32 * ceil_div(composed_length * itemsize - 16, 32)) // itemsize"
zeros_bytes = "32 + composed_pitch * itemsize"
copied_bytes = "2 * stage_bytes + (2 * raw_bytes if not cells_launch and rows * pitch >= positions else 0) + min(3, kernel_h * chunks) * row_taps * tap_bytes"
fit8 = "min(ceil_div(slot_tiles, 2), max(0, 231424 - 4 * (raw_length + 32) - 2048 * CONSUMERS - copied_bytes - zeros_bytes) // (16 * composed_pitch * itemsize)) if filled and classes_h == 1 else 0"
composed8 = "ceil_div(slot_tiles, ceil_div(slot_tiles, fit8)) if fit8 > 0 else 0"
composed_bytes = "zeros_bytes + 16 * composed8 * composed_pitch * itemsize if composed8 else 0"
row_stores = "1 if odd_rows and composed8 == 0 else 0"
row_store_bytes = "row_stores * CONSUMERS * 4 * (1152 if itemsize == 4 else 640)"
shared_limit = "231424 - 4 * (raw_length + 32) - 2048 * CONSUMERS - row_store_bytes - composed_bytes"
stages = "4 if cells_launch and 4 * stage_bytes + 4 * tap_bytes <= shared_limit else 2"
raws = "2 if not cells_launch and rows * pitch >= positions and stages * stage_bytes + 2 * raw_bytes + 4 * tap_bytes <= shared_limit else 0"
slab_memory = "shared_limit - stages * stage_bytes - raws * raw_bytes"
# A slab is a tap, or a row of taps where three of these fit. (tf32x3 sums nine steps at most before it rounds.)
row_slabs = "1 if row_taps <= (18 // chunk_cells if split else 8) and slab_memory >= min(3, kernel_h * chunks) * row_taps * tap_bytes else 0"
slab_bytes = "tap_bytes * (row_taps if row_slabs else 1)"
tile_slabs = "kernel_h * chunks * (1 if row_slabs else row_taps)"
slabs = "min(58, tile_slabs, slab_memory // slab_bytes)"
resident = "1 if slabs == tile_slabs else 0"
composed_at = "1024 + stages * stage_bytes + slabs * slab_bytes + raws * raw_bytes"
rows_at = "composed_at + composed_bytes"
columns = "groups * channel_tiles * m_tiles * chains"
producers = "1 if cells_launch else PRODUCERS"

[restrictions]
"slots <= 32 and 4 * parts * products * classes_w * thread_tiles * slot_tiles <= accumulators and products * slot_tiles <= 32" = "kernel_d and stride_w ask for more sums than a thread has registers"
"slabs >= min(2, tile_slabs)" = "a tile of the input and its weights pass the shared memory"
"m_count <= 1000000000 and columns * steps * kernel_h <= 2147483647 and input_d * groups * chunks * parts * chunk_cells <= 1000000000 and filled * output_h * output_w <= 2147483647" = "the volume passes its 32-bit tile offsets"

[cost]
steps = "row_taps * chunks * (columns // multiprocessors * steps * kernel_h + (0 if columns % multiprocessors == 0 else ceil_div(kernel_h, classes_h) * min(steps * classes_h, ceil_div(columns % multiprocessors * steps * kernel_h, multiprocessors * ceil_div(kernel_h, classes_h)) + (kernel_d - 1) // step)))"
products = "tile_m * 8 * products * slot_tiles * chunk_cells * (16 // itemsize)"
bytes = "stage_bytes // row_taps + (0 if resident else tap_bytes)"

[workspace]
packed_weight = "groups * channel_tiles * kernel_h * row_taps * chunks * tap_bytes // 4"
input_cells = "cells_launch * groups * chunks * parts * chunk_cells * input_d * span * 4"

[[launch]]
symbol = "convt3d_pack_rolling_weight"
packs = "packed_weight"
grid = "groups * channel_tiles * kernel_h * row_taps * chunks * ceil_div(chunk_cells * slots * merged_w * slot_tiles * 8, 256)"
block = 256

[[launch]]
symbol = "convt3d_lay_out_cells"
general = true
when = "cells_launch"
prepares = "input_cells"
grid = "input_d * groups * chunks * ceil_div(span, 256) if batch > 0 else 0"
block = 256

[[launch]]
symbol = "convt3d_fprop_rolling_wgmma"
grid = "min(multiprocessors, columns * steps * kernel_h) if batch > 0 else 0"
block = "(CONSUMERS + producers) * 128"
shared_bytes = "rows_at + 2048 * CONSUMERS + row_store_bytes + 4 * raw_places"
*/
// The transposed convolution as matrix products of Hopper's warpgroups, rolling along the depth.
//
// GEMM rows are positions q of a plane, flattened over (n, h, w) with a pitch that leaves zeros between rows and between
// volumes: tap (th, tw) of a residue class reads row `q - offset`, which in shared memory is nothing but another start address.
// GEMM columns are SLOTS = kernel_d output planes x the channels of a tile: the planes that one input plane feeds. After an input
// plane the first STEP slots are complete; they are stored, the others move up. So each input plane is loaded once for all taps
// in depth, and few output channels still make wide products. The residue classes of w have sums of their own in the same thread,
// so that whole output rows are written; those of h are columns of work of their own.
// A position's outputs begin at a multiple of the stride, so that two of them may be one aligned store: residues below `phase_w` are those
// of the next position. Where taps leave out whole rows or planes the warpgroup that stores the sums of a row fills this row, and those
// without taps that follow it, with the bias first. Rows of an odd length pass through shared memory, so that a warp stores 32 neighbours at once.
// If there is one class of h only, and rows follow each other in memory, nothing is stored twice: a warp fills a buffer with the bias, the
// warpgroups put their sums in, and the warp stores each channel's outputs in bulk, a buffer while sums are put into the other.
//
// A block stays on its multiprocessor and walks down columns of the output: whole ones first, then its share of the rest. Two
// warpgroups multiply; the others feed them. One warp copies stretches of input planes in bulk, a chunk of channels at a time; most
// warps round them and turn them into 16-byte cells [channel / 4][position][channel % 4] (16-bit types: 8 channels, by ldmatrix); where planes
// cannot be copied in bulk (channels_last, odd sizes) they read the input themselves. Where it pays (LAY_OUT), an input that is read
// several times, for several tiles of channels or classes of h, is laid out as cells by a launch of its own, and then one warp copies
// it and none turns it. The last warp copies slabs of packed weights, a tap or a row of taps x one chunk of channels each. If all slabs of a tile fit in
// shared memory they are copied once, until the block turns to another tile.
#include "convt3d.cuh"
#include "convt3d/core/advanced.cuh"
#include "convt3d/ptx/beside_packing.cuh"
#include "convt3d/ptx/bulk_store.cuh"
#include "convt3d/core/cell.cuh"
#include "convt3d/core/column_order.cuh"
#include "convt3d/core/constant.cuh"
#include "convt3d/core/dense_axis.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/epilogue/fill_output.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/integers.cuh"
#include "convt3d/core/layout.cuh"
#include "convt3d/pipe/ring.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/epilogue/store_piece.cuh"
#include "convt3d/ptx/wgmma.cuh"

// Cells of 16 bytes in a chunk, and tiles of 64 rows a warpgroup has; 0: by the problem.
#ifndef CHUNK_CELLS
#define CHUNK_CELLS 0
#endif
#ifndef TILES_M
#define TILES_M 0
#endif
#ifndef CONSUMERS
#define CONSUMERS 2
#endif
#ifndef PRODUCERS
#define PRODUCERS 2
#endif
// Whether a launch of its own lays out an input that is read several times.
#ifndef LAY_OUT
#define LAY_OUT 1
#endif

#if defined(__CUDACC__)
#define SUMS (CLASSES_W * M_TILES * WGMMA_TILES * 4)
constexpr int MOST_TILES = M_TILES;
// Registers of a thread that loads, and of one that multiplies.
constexpr int LOADING = CELLS_LAUNCH && !COMPOSED ? 40 : 64, MULTIPLYING = !CELLS_LAUNCH ? 192 : COMPOSED ? 216 : 232;
#else
#define SUMS 192
constexpr int MOST_TILES = 2, LOADING = 64, MULTIPLYING = 192;
#endif

constexpr int LINE = 2 * VECTOR;  // outputs in the 32 bytes that bulk stores begin on

__device__ inline scalar_t zero_scalar() { return to_scalar(accum_t(0)); }

// Tap `first + i*period` of an axis with stride s and dilation d reads `first*d/s + i*d/gcd` inputs back.
struct ClassTaps {
  int period, offset_step;
  __device__ int count(int kernel, int first) const { return first < kernel ? taps_of_class(kernel, period, first) : 0; }
};

__device__ inline ClassTaps class_taps(int stride, int dilation) {
  const int divisor = greatest_common_divisor(stride, dilation);
  return {stride / divisor, dilation / divisor};
}

// ---- packing: taps [group][channel tile][h class][chunk][tap h][w class][tap w] of cells [part][cell][slot, w class, channel].
// Where every class of w has as many taps, all at the same offsets, the classes are columns of one product instead. ----

extern "C" __global__ void convt3d_pack_rolling_weight(const Problem problem, const View<const scalar_t> weight,
                                                       accum_t* __restrict__ packed_weight, const int channel_tiles,
                                                       const int chunks, const int slots, const int merged_w,
                                                       const int slot_tiles, const int chunk_cells) {
  let_next_begin();
  const int kernel_h = problem.kernel_size[1], taps = problem.kernel_size[2] / merged_w;  // of w, in slabs of their own
  const int in_channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int channels = slot_tiles * 8, columns = slots * merged_w * channels;
  const int parts = ceil_div(chunk_cells * columns, 256), slabs = kernel_h * taps * chunks;
  const int number = static_cast<int>(blockIdx.x) / parts,
            i = static_cast<int>(blockIdx.x) % parts * 256 + static_cast<int>(threadIdx.x);
  if (i >= chunk_cells * columns) return;
  const int tile = number / slabs % channel_tiles, group = number / slabs / channel_tiles;
  const ClassTaps taps_h = class_taps(problem.stride[1], problem.dilation[1]),
                  taps_w = class_taps(problem.stride[2], problem.dilation[2]);
  int rest = number % slabs, first_h = 0, first_w = 0;
  while (rest >= taps_h.count(kernel_h, first_h) * taps * chunks) rest -= taps_h.count(kernel_h, first_h++) * taps * chunks;
  const int in_chunk = taps_h.count(kernel_h, first_h) * taps;
  const int chunk = rest / in_chunk, th = first_h + rest % in_chunk / taps * taps_h.period;
  rest = rest % taps;
  while (merged_w == 1 && rest >= taps_w.count(taps, first_w)) rest -= taps_w.count(taps, first_w++);

  Cell* slab = reinterpret_cast<Cell*>(packed_weight) + static_cast<index_t>(number) * (PARTS * chunk_cells * columns);
  const int ci = (chunk * chunk_cells + i / columns) * VECTOR,
            co = tile * channels + channel_of_column(i % channels, SPECIALIZED(LANE_EIGHTS, 1));
  const int slot = i % columns / (merged_w * channels), tw = first_w + i / channels % merged_w + rest * taps_w.period;
  scalar_t values[VECTOR];
  load_weight_cell(values, weight, group * in_channels + ci, co, slot, th, tw, co < out_channels ? in_channels - ci : 0);
  Cell low;
  make_cell<round_to_tf32>(values, slab[i], low);
  if (PARTS == 2) slab[chunk_cells * columns + i] = low;
}

// ---- the product: who does what, and where the input lies ----

// A run of steps of one column: what a block does before it turns to another tile.
struct Segment {
  int column, chain, class_h;
  int first, begin, end;  // steps from `first` on fill the slots, those from `begin` on are stored
};

// Where a row of products goes: its first w, its offset in the output at channel 0 of the tile and plane 0, and where composed
// outputs have it.
struct alignas(16) RowPlace {
  index_t offset;
  int w, composed;
};

// An output of a plane: `at` = h * width + w of volume n.
struct Mark {
  int n, at;
};

// Where a column lies.
struct Place {
  int group, channel_tile, m_tile;
};

// What all roles walk through alike. A column costs as many units as it has steps and taps in h. As long as there is a column for
// every block they take whole ones, neighbours at the same time, so that what their tiles share is read from L2. The rest is cut into
// equal shares; a block owns the steps that begin in its own.
struct Walk {
  const Problem& problem;
  const ClassTaps taps_h;
  const int columns, channel_tiles, m_tiles, chains, steps, warm_up;
  int round, unit, end;

  __device__ Walk(const Problem& problem_, ClassTaps taps_h_, int columns_, int channel_tiles_, int m_tiles_, int chains_,
                  int steps_, int warm_up_)
      : problem(problem_),
        taps_h(taps_h_),
        columns(columns_),
        channel_tiles(channel_tiles_),
        m_tiles(m_tiles_),
        chains(chains_),
        steps(steps_),
        warm_up(warm_up_),
        round(0),
        unit(0),
        end(0) {}

  __device__ bool next_share() {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x),
              in_column = steps * problem.kernel_size[1];
    const int rounds = columns / blocks;
    if (round > rounds) return false;
    if (round < rounds) {
      unit = (round * blocks + block) * in_column;
      end = unit + in_column;
    } else {
      const int first = rounds * blocks * in_column, rest = (columns - rounds * blocks) * in_column;
      unit = first + rest / blocks * block + rest % blocks * block / blocks;
      end = first + rest / blocks * (block + 1) + rest % blocks * (block + 1) / blocks;
    }
    ++round;
    return true;
  }

  __device__ bool next(Segment& segment) {
    while (unit < end || next_share()) {
      if (unit >= end) continue;
      const int in_column = steps * problem.kernel_size[1];
      const int column = unit / in_column;
      int begin = column * in_column;
      segment.class_h = 0;
      int cost = taps_h.count(problem.kernel_size[1], 0);
      while (unit - begin >= steps * cost) {
        begin += steps * cost;
        cost = taps_h.count(problem.kernel_size[1], ++segment.class_h);
      }
      segment.column = column;
      segment.chain = column % chains;
      segment.begin = (unit - begin + cost - 1) / cost;
      segment.end = min((end - begin + cost - 1) / cost, steps);
      segment.first = segment.begin > warm_up ? segment.begin - warm_up : 0;
      unit = begin + steps * cost;
      if (segment.begin < segment.end) return true;
    }
    return false;
  }

  // Taps in h of the classes before one.
  __device__ int rows_before(int class_h) const {
    int rows = 0;
    for (int c = 0; c < class_h; ++c) rows += taps_h.count(problem.kernel_size[1], c);
    return rows;
  }

  // Group * channel_tiles + channel tile.
  __device__ int tile(int column) const { return column / chains / m_tiles; }

  __device__ Place place(int column) const {
    column /= chains;
    return {column / m_tiles / channel_tiles, column / m_tiles % channel_tiles, column % m_tiles};
  }
};

// Which elements of a plane the positions [origin, origin + positions) hold: [first, first + count) of volume n, then
// [0, next) of volume n + 1. Ends are rounded outwards to 16 bytes.
struct PlaneRange {
  int n, first, count, next;

  __device__ PlaneRange(const Problem& problem, int origin, int positions, int rows, int pitch) {
    const int volume = rows * pitch, begin = origin > 0 ? origin : 0;
    n = begin / volume;
    first = before(problem, begin - n * volume, pitch) / VECTOR * VECTOR;
    const int end = origin + positions - n * volume;
    count = n < problem.batch ? whole_cells(before(problem, end < volume ? end : volume, pitch) - first) : 0;
    next = end > volume && n + 1 < problem.batch ? whole_cells(before(problem, end - volume, pitch)) : 0;
  }

  // How many elements of the plane lie before a position.
  __device__ static int before(const Problem& problem, int position, int pitch) {
    const int row = position / pitch, w = position % pitch, width = problem.input_size[2];
    return row < problem.input_size[1] ? row * width + (w < width ? w : width) : problem.input_size[1] * width;
  }

  __device__ static int whole_cells(int elements) { return ceil_div(elements, VECTOR) * VECTOR; }
};

// What a position is: zeros between rows and volumes are not `inside`.
struct Position {
  int n, h, w;
  bool inside;

  __device__ Position(const Problem& problem, int position, int rows, int pitch) {
    const int row = position / pitch;
    w = position % pitch;
    n = row / rows;
    h = row % rows;
    inside = position >= 0 && n < problem.batch && h < problem.input_size[1] && w < problem.input_size[2];
  }
};

// Rows without gaps and planes that begin and end on 16 bytes: the input can be copied in bulk.
__device__ inline bool takes_whole_planes(const Problem& problem, const View<const scalar_t>& input) {
  const index_t width = problem.input_size[2];
  return input.stride[4] == 1 && input.stride[3] == width && problem.input_size[1] * width % VECTOR == 0 &&
         input.stride[0] % VECTOR == 0 && input.stride[1] % VECTOR == 0 && input.stride[2] % VECTOR == 0 &&
         reinterpret_cast<unsigned long long>(input.data) % 16 == 0;
}

// Four or eight consecutive channels of one position each.
__device__ inline bool takes_whole_cells(const Problem& problem, const View<const scalar_t>& input) {
  return input.stride[1] == 1 && problem.in_channels / problem.groups % VECTOR == 0 && input.stride[0] % VECTOR == 0 &&
         input.stride[2] % VECTOR == 0 && input.stride[3] % VECTOR == 0 && input.stride[4] % VECTOR == 0 &&
         reinterpret_cast<unsigned long long>(input.data) % 16 == 0;
}

// Where a loader finds the input: copied in bulk to shared memory, or in global memory as whole cells or anyhow.
enum Source { RAW_COPY, WHOLE_CELLS, ANY_STRIDES };

// Turn `live` channels of one position into its `count` cells, zeros where it is not `inside`; the cells lie `next` apart.
template <Source kind, class Next, class Step>
__device__ __forceinline__ void fill_cells(Cell* cells, int count, Next next, const scalar_t* source, Step channel_step,
                                           bool inside, int live) {
  constexpr int BATCH = kind == WHOLE_CELLS ? 4 / PARTS : PARTS == 2 || sizeof(scalar_t) == 2 ? 1 : 2;  // loads in flight
#pragma unroll(kind == RAW_COPY && BATCH == 2 ? CELLS / 2 : 1)
  for (int first = 0; first < count; first += BATCH) {
    scalar_t values[BATCH][VECTOR];
#pragma unroll
    for (int cell = 0; cell < BATCH; ++cell) {
      if (kind == WHOLE_CELLS) {
        Cell loaded = {};
        const int c = (first + cell) * VECTOR;
        if (inside && c < live) loaded = *reinterpret_cast<const Cell*>(source + c);
        memcpy(values[cell], &loaded, 16);
      } else {
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
          const int c = (first + cell) * VECTOR + v;
          values[cell][v] = inside && c < live ? source[c * channel_step] : zero_scalar();
        }
      }
    }
#pragma unroll
    for (int cell = 0; cell < BATCH; ++cell) {
      if (first + cell >= count) break;
      Cell high, low;
      make_cell<round_to_tf32>(values[cell], high, low);
      cells[(first + cell) * next] = high;
      if (PARTS == 2) cells[(count + first + cell) * next] = low;
    }
  }
}

// 32 elements of 16 bits of all channels of a chunk, from a copy to their cells: `transposed` reads eight channels of each, of which a
// lane gets two of four elements. Where `places` is negative no cell takes an element.
__device__ __forceinline__ void fill_cells_transposed(Cell* cells, int count, int next, const scalar_t* source,
                                                      int channel_step, const int (&places)[4], int live, int lane) {
  unsigned* const words = reinterpret_cast<unsigned*>(cells) + lane % 4;
#pragma unroll 2
  for (int cell = 0; cell < count; ++cell) {
    unsigned pairs[4];
    ldmatrix_x4_transposed(pairs, shared_address(source + (cell * 8 + lane % 8) * channel_step));
    const int left = live - cell * 8 - lane % 4 * 2;  // channels from this lane's first on
    const unsigned mask = left > 1 ? ~0u : left == 1 ? 0xffffu : 0u;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if (places[m] >= 0) words[(cell * next + places[m]) * 4] = pairs[m] & mask;
    }
  }
}

// ---- a launch for inputs that are read several times: their cells [plane][group][chunk][part][cell][position of all tiles] ----

extern "C" __global__ void convt3d_lay_out_cells(const Problem problem, const View<const scalar_t> input,
                                                 accum_t* __restrict__ input_cells, const int rows, const int pitch,
                                                 const int m_first, const int offset_h, const int offset_w, const int span,
                                                 const int chunks, const int chunk_cells) {
  let_next_begin();
  if (threadIdx.x == 0) wait_for_packing();  // so that who waits for this launch waits for both
  const int tiles = ceil_div(span, 256), in_channels = problem.in_channels / problem.groups;
  unsigned block = blockIdx.x;  // ((plane * groups + group) * chunks + chunk) * tiles + tile
  const int index = static_cast<int>(block % tiles) * 256 + static_cast<int>(threadIdx.x);
  block /= tiles;
  if (index >= span) return;
  Cell* cells = reinterpret_cast<Cell*>(input_cells) + static_cast<index_t>(block) * (PARTS * chunk_cells) * span + index;
  const int channel = static_cast<int>(block % chunks) * chunk_cells * VECTOR;
  block /= chunks;
  const int group = static_cast<int>(block % problem.groups), plane = static_cast<int>(block / problem.groups);
  const int f = m_first - (offset_h * pitch + offset_w) + index, row = f / pitch, w = f % pitch, n = row / rows, h = row % rows;
  const bool inside = f >= 0 && n < problem.batch && h < problem.input_size[1] && w < problem.input_size[2];
  const scalar_t* source = inside ? input.at(n, group * in_channels + channel, plane, h, w) : input.data;
  if (takes_whole_cells(problem, input)) {
    fill_cells<WHOLE_CELLS>(cells, chunk_cells, span, source, input.stride[1], inside, in_channels - channel);
  } else {
    fill_cells<ANY_STRIDES>(cells, chunk_cells, span, source, input.stride[1], inside, in_channels - channel);
  }
}

// What is stored at once: outputs side by side in memory that begin on twice their size.
enum Pairs { NO_PAIRS, OF_COLUMNS, OF_CHANNELS };

// `first_w`: where a position's outputs begin, up to multiples of two.
__device__ inline Pairs pairs_of(const Problem& problem, const View<scalar_t>& output, int first_w, bool has_gaps) {
  const bool even = reinterpret_cast<index_t>(output.data) % (2 * sizeof(scalar_t)) == 0 &&
                    (output.stride[0] | output.stride[2] | output.stride[3]) % 2 == 0;
  if (even && output.stride[1] == 1 && output.stride[4] % 2 == 0 && problem.out_channels / problem.groups % 2 == 0) {
    return OF_CHANNELS;
  }
  return even && output.stride[1] % 2 == 0 && output.stride[4] == 1 && problem.stride[2] % 2 == 0 &&
                 problem.output_size[2] % 2 == 0 && first_w % 2 == 0 && !has_gaps
             ? OF_COLUMNS
             : NO_PAIRS;
}

// Two neighbours in shared memory.
__device__ __forceinline__ void store_shared_pair(float* shared, float a, float b) {
  *reinterpret_cast<float2*>(shared) = make_float2(a, b);
}
template <class Half>
__device__ __forceinline__ void store_shared_pair(Half* shared, Half a, Half b) {
  *reinterpret_cast<unsigned*>(shared) = a.bits | static_cast<unsigned>(b.bits) << 16;
}

// Store `count` outputs from where they lie the same in 16 bytes: one of two lanes all whole 32 bytes, in bulk, and what comes before
// them, the other what comes behind.
__device__ __forceinline__ void store_in_bulk(scalar_t* target, const scalar_t* source, int count, bool is_first) {
  const int before = static_cast<int>(0 - reinterpret_cast<unsigned long long>(target) / sizeof(scalar_t)) & (LINE - 1);
  const int head = min(before, count), tail = (count - head) & (LINE - 1), between = count - head - tail;
  if (is_first && between > 0) {
    bulk_store(target + head, shared_address(source + head), static_cast<unsigned>(between) * sizeof(scalar_t));
  }
  if (before > count) {  // the middle of 32 bytes
    for (int e = 0; is_first && e < count; ++e) target[e] = source[e];
    return;
  }
  // Pieces of 1, 2, 4 (and 8) outputs, the largest beside the 32 bytes.
  const int left = is_first ? head : tail;
  const auto store_piece = [&](auto piece) {
    constexpr int size = sizeof(piece) / sizeof(scalar_t);
    if ((left & size) == 0) return;
    const int at = is_first ? left & (size - 1) : count - (left & (2 * size - 1));
    *reinterpret_cast<decltype(piece)*>(target + at) = *reinterpret_cast<const decltype(piece)*>(source + at);
  };
  if (sizeof(scalar_t) == 2) store_piece(scalar_t());
  store_piece(0u);
  store_piece(uint2());
  store_piece(uint4());
}

// A warp fills `count` elements, whole 16 bytes, with one value.
__device__ __forceinline__ void fill_shared(scalar_t* shared, int count, scalar_t value, int lane) {
  Cell cell;
  scalar_t values[VECTOR];
#pragma unroll
  for (int v = 0; v < VECTOR; ++v) values[v] = value;
  memcpy(&cell, values, 16);
  Cell* const cells = reinterpret_cast<Cell*>(shared) + lane;
  const int left = count / VECTOR - lane;
#pragma unroll 1
  for (int first = 0; first < left; first += 256) {
#pragma unroll
    for (int i = 0; i < 256; i += 32) {
      if (first + i < left) cells[first + i] = cell;
    }
  }
}

// ---- the product of a block ----

extern "C" __global__ void __launch_bounds__((CONSUMERS + (CELLS_LAUNCH ? 1 : PRODUCERS)) * 128, 1) convt3d_fprop_rolling_wgmma(
    const Problem problem, const View<const scalar_t> input, const accum_t* __restrict__ packed_weight,
    const accum_t* __restrict__ input_cells, const scalar_t* __restrict__ bias, View<scalar_t> output,
    const int in_channels_per_group, const int out_channels_per_group, const int slots, const int step, const int merged_w,
    const int classes_w, const int slot_tiles, const int thread_tiles, const int chunk_cells, const int cells_launch,
    const int row_taps, const int phase_w, const int row_slabs, const int resident, const int filled, const int period_h,
    const int offset_step_h, const int rows, const int pitch, const int m_first, const int m_tiles, const int positions,
    const int span, const int offset_h, const int offset_w, const int chains, const int first_step, const int steps,
    const int columns, const int classes_h, const int channel_tiles, const int chunks, const int producers, const int stages,
    const int slabs, const int raws, const int tap_bytes, const int tile_slabs, const int slab_bytes, const int stage_bytes,
    const int raw_length, const int rows_at, const int row_stores, const int composed8, const int composed_at,
    const int composed_pitch, const int plane_pitch) {
  lay_out(problem, output, OUTPUT_LAYOUT ? SPECIALIZED(OUTPUT_LAYOUT, layout_of(problem, output)) : 0);
  const Epilogue epilogue{bias};
  extern __shared__ __align__(1024) unsigned char shared[];
  const int slot_count = SPECIALIZED(SLOTS, slots), flush = SPECIALIZED(STEP, step);
  const int merged = SPECIALIZED(MERGED_W, merged_w), class_count = SPECIALIZED(CLASSES_W, classes_w);
  const int channels8 = SPECIALIZED(SLOT_TILES, slot_tiles), slot8 = merged * channels8;
  const int tiles = SPECIALIZED(M_TILES, thread_tiles), cell_count = SPECIALIZED(CELLS, chunk_cells),
            chunk_size = cell_count * VECTOR;
  const bool from_cells = SPECIALIZED(CELLS_LAUNCH, cells_launch);
  const int feeders = SPECIALIZED(CELLS_LAUNCH ? 1 : PRODUCERS, producers) * 128;
  const int round8 = SPECIALIZED(COMPOSED, composed8);
  const int composers = round8 == 0 ? 0 : from_cells || feeders > 128 ? 2 : 1;  // warps
  const int loaders = from_cells ? 0 : feeders - 64 - composers * 32;           // threads; the last warps copy and compose
  const int columns8 = slot_count * slot8;                                      // of 8 columns each
  const bool by_rows = SPECIALIZED(ROW_SLABS, row_slabs);
  const int kernel_h = problem.kernel_size[1], row_slab_count = by_rows ? 1 : row_taps;  // slabs of a row of taps
  const int in_channels = in_channels_per_group, out_channels = out_channels_per_group;

  unsigned char* const stage_memory = shared + 1024;
  unsigned char* const slab_memory = stage_memory + stages * stage_bytes;
  scalar_t* const raw_memory = reinterpret_cast<scalar_t*>(slab_memory + slabs * slab_bytes);
  // [warpgroup][its row], for the stores
  RowPlace* const row_places = reinterpret_cast<RowPlace*>(shared + rows_at);
  // [warp][channel of 8][output]: 32 neighbouring outputs, stored by a warp at once
  constexpr int staged_pitch = sizeof(scalar_t) == 4 ? 36 : 40;
  const bool stores_rows = SPECIALIZED(ROW_STORES, row_stores);
  scalar_t* const staged_rows = reinterpret_cast<scalar_t*>(row_places + CONSUMERS * 128);
  int* const raw_index = reinterpret_cast<int*>(staged_rows + (stores_rows ? CONSUMERS * 4 * 8 * staged_pitch : 0));
  const unsigned base = computed_anew(shared_address(shared)),
                 slab_base = base + 1024 + static_cast<unsigned>(stages * stage_bytes);
  Ring stage(base, stages), slab(base + 16 * static_cast<unsigned>(stages), slabs);
  Ring raw(base + 16 * static_cast<unsigned>(stages + slabs), raws);
  // Two buffers: full of the bias; empty of places for sums.
  Ring composing(base + static_cast<unsigned>(composed_at), 2);
  const bool whole_planes = raws > 0 && takes_whole_planes(problem, input);
  const bool composes = round8 > 0 && output.stride[4] == 1 && output.stride[3] == problem.output_size[2];
  scalar_t* const zeros = reinterpret_cast<scalar_t*>(shared + composed_at + 32);
  scalar_t* const composed = zeros + composed_pitch;
  // All weights of a tile fit: they are copied when it begins and stay.
  const bool stays = SPECIALIZED(RESIDENT, resident);

  const int warpgroup = static_cast<int>(threadIdx.x) / 128, lane = static_cast<int>(threadIdx.x) % 32;
  if (round8 > 0 && threadIdx.x / 32 == 1) {
    fill_shared(zeros, composed_pitch, zero_scalar(), lane);
    fence_async();
  }
  if (threadIdx.x == 0) {
    if (round8 > 0) {
      for (unsigned i = 0; i < 2; ++i) {
        mbarrier_init(composing.full() + i * 8, 32);  // each thread for what it has written
        mbarrier_init(composing.empty() + i * 8, CONSUMERS * 128);
      }
    }
    for (unsigned i = 0; i < static_cast<unsigned>(stages + slabs + raws); ++i) {
      const bool is_stage = i < static_cast<unsigned>(stages), is_raw = i >= static_cast<unsigned>(stages + slabs);
      const unsigned size = static_cast<unsigned>(is_stage ? stages : is_raw ? raws : slabs);
      const unsigned first = is_stage ? 0 : static_cast<unsigned>(is_raw ? stages + slabs : stages);
      const unsigned full = base + first * 16 + (i - first) * 8;
      mbarrier_init(full, is_stage && !from_cells ? loaders / 32 : 1);
      mbarrier_init(full + size * 8, is_raw ? loaders : CONSUMERS * 4);
    }
    mbarrier_fence_init();
  }
  __syncthreads();

  const int tile_rows = CONSUMERS * tiles * 64, warm_up = (slot_count - 1) / flush;
  const ClassTaps taps_h = {period_h, offset_step_h};
  Segment segment;

  // Where the outputs of a position begin that is the first of a tile. What lies past a row's end belongs to the row that comes next.
  const auto tile_begin = [&](int position) -> Mark {
    const int row = position / pitch, n = row / rows, height = problem.output_size[1], width = problem.output_size[2];
    if (n >= problem.batch || position >= m_first + m_tiles * tile_rows) return {problem.batch - 1, height * width};
    const int w =
        position % pitch * SPECIALIZED(STRIDE_W, problem.stride[2]) + SPECIALIZED(PHASE_W, phase_w) - problem.padding[2];
    const int h = row % rows * problem.stride[1] - problem.padding[1] + (w < width ? 0 : problem.stride[1]);
    return {n, h < 0 ? 0 : h < height ? h * width + (w > 0 && w < width ? w : 0) : height * width};
  };
  // Where volume n begins among the composed outputs of a tile, but for what its address is past a multiple of 32 bytes.
  const auto composed_volume = [&](const Mark& begin, int n) { return (n - begin.n) * plane_pitch - begin.at / LINE * LINE; };

  if (warpgroup >= CONSUMERS) {
#if CONSUMERS == 2
    give_registers<LOADING>();
#endif
    const int loader = static_cast<int>(threadIdx.x) - CONSUMERS * 128;
    if (loader < loaders) {
      Walk walk(problem, taps_h, columns, channel_tiles, m_tiles, chains, steps, warm_up);
      const auto load = [&](auto tag) {
        constexpr Source kind = decltype(tag)::value;
        constexpr bool transposes = kind == RAW_COPY && sizeof(scalar_t) == 2;
        const int warp = loader / 32, warps = loaders / 32;
        while (walk.next(segment)) {
          const Place place = walk.place(segment.column);
          const int origin = m_first + place.m_tile * tile_rows - (offset_h * pitch + offset_w);
          const PlaneRange range(problem, origin, positions, rows, pitch);
          // Where a position lies in the copy, or an element of the copy among the positions: the same for all planes and chunks.
          if (transposes) {
            for (int element = loader; element - lane < range.count + range.next; element += loaders) {
              const int next = element - range.count, in_plane = next < 0 ? range.first + element : next;
              const int h = in_plane / problem.input_size[2], w = in_plane % problem.input_size[2];
              const int position = ((range.n + (next < 0 ? 0 : 1)) * rows + h) * pitch + w - origin;
              const bool inside = next < range.next && h < problem.input_size[1] && position >= 0 && position < positions;
              raw_index[element] = inside ? position : -1;
            }
            __syncwarp();
          } else if (kind == RAW_COPY) {
            for (int position = loader; position < positions; position += loaders) {
              const Position at(problem, origin + position, rows, pitch);
              const int element = at.h * problem.input_size[2] + at.w;
              raw_index[position] = !at.inside ? -1 : at.n == range.n ? element - range.first : range.count + element;
            }
          }
          int unfilled = stages;  // stages whose cells without an element are not zero yet
          for (int s = segment.first; s < segment.end; ++s) {
            const int plane = segment.chain + (first_step + s) * chains;
            if (plane < 0 || plane >= problem.input_size[0]) continue;
            for (int chunk = 0; chunk < chunks; ++chunk) {
              const int live = in_channels - chunk * chunk_size;
              if (kind == RAW_COPY) mbarrier_wait_patiently(raw.full(), raw.parity);
              mbarrier_wait_patiently(stage.empty(), stage.parity ^ 1u);
              Cell* cells = reinterpret_cast<Cell*>(stage_memory + stage.slot * stage_bytes);
              const scalar_t* copy = raw_memory + raw.slot * chunk_size * raw_length;
              for (int first = warp * 32; transposes && first < range.count + range.next; first += warps * 32) {
                int places[4];
#pragma unroll
                for (int m = 0; m < 4; ++m) places[m] = raw_index[first + m * 8 + lane / 4];
                fill_cells_transposed(cells, cell_count, positions, copy + min(first + lane / 8 * 8, raw_length - 8),
                                      raw_length, places, live, lane);
              }
              for (int position = loader; transposes && unfilled > 0 && position < positions; position += loaders) {
                if (Position(problem, origin + position, rows, pitch).inside) continue;
                for (int cell = 0; cell < cell_count; ++cell) cells[cell * positions + position] = {};
              }
              --unfilled;
              for (int position = loader; !transposes && position < positions; position += loaders) {
                if (kind == RAW_COPY) {
                  const int index = raw_index[position];
                  fill_cells<kind>(cells + position, cell_count, positions, copy + index, raw_length, index >= 0, live);
                } else {
                  const Position at(problem, origin + position, rows, pitch);
                  fill_cells<kind>(cells + position, cell_count, positions,
                                   input.at(at.n, place.group * in_channels + chunk * chunk_size, plane, at.h, at.w),
                                   input.stride[1], at.inside, live);
                }
              }
              if (kind == RAW_COPY) mbarrier_arrive(raw.empty());  // each lane for what it has read
              fence_async();
              __syncwarp();
              if (lane == 0) mbarrier_arrive(stage.full());
              stage.advance();
              if (kind == RAW_COPY) raw.advance();
            }
          }
        }
      };
      if (whole_planes) {
        load(Constant<RAW_COPY>{});
      } else if (takes_whole_cells(problem, input)) {
        load(Constant<WHOLE_CELLS>{});
      } else {
        load(Constant<ANY_STRIDES>{});
      }
    } else if (loader < loaders + 32 && from_cells) {
      wait_for_packing();
      Walk walk(problem, taps_h, columns, channel_tiles, m_tiles, chains, steps, warm_up);
      const unsigned cell_bytes = static_cast<unsigned>(positions) * 16;
      const int cell_rows = PARTS * cell_count;
      while (walk.next(segment)) {
        const Place place = walk.place(segment.column);
        for (int s = segment.first; s < segment.end; ++s) {
          const int plane = segment.chain + (first_step + s) * chains;
          if (plane < 0 || plane >= problem.input_size[0]) continue;
          const int row = (plane * problem.groups + place.group) * chunks * cell_rows + lane;
          const Cell* source =
              reinterpret_cast<const Cell*>(input_cells) + row * static_cast<index_t>(span) + place.m_tile * tile_rows;
          for (int chunk = 0; chunk < chunks; ++chunk, source += cell_rows * static_cast<index_t>(span)) {
            mbarrier_wait_patiently(stage.empty(), stage.parity ^ 1u);
            if (lane == 0) mbarrier_arrive_expect(stage.full(), static_cast<unsigned>(stage_bytes));
            __syncwarp();
            if (lane < cell_rows) {
              bulk_copy(
                  base + 1024 + static_cast<unsigned>(stage.slot * stage_bytes) + static_cast<unsigned>(lane) * cell_bytes,
                  source, cell_bytes, stage.full());
            }
            stage.advance();
          }
        }
      }
    } else if (loader < loaders + 32) {
      Walk walk(problem, taps_h, columns, channel_tiles, m_tiles, chains, steps, warm_up);
      while (whole_planes && walk.next(segment)) {
        const Place place = walk.place(segment.column);
        const int origin = m_first + place.m_tile * tile_rows - (offset_h * pitch + offset_w);
        const PlaneRange range(problem, origin, positions, rows, pitch);
        for (int s = segment.first; s < segment.end; ++s) {
          const int plane = segment.chain + (first_step + s) * chains;
          if (plane < 0 || plane >= problem.input_size[0]) continue;
          for (int chunk = 0; chunk < chunks; ++chunk) {
            const int live = in_channels - chunk * chunk_size < chunk_size ? in_channels - chunk * chunk_size : chunk_size;
            mbarrier_wait_patiently(raw.empty(), raw.parity ^ 1u);
            if (lane == 0) {
              mbarrier_arrive_expect(raw.full(), static_cast<unsigned>(live * (range.count + range.next)) * sizeof(scalar_t));
            }
            __syncwarp();
            for (int channel = lane; channel < live; channel += 32) {
              const scalar_t* source = input.at(range.n, place.group * in_channels + chunk * chunk_size + channel, plane, 0, 0);
              const unsigned target = slab_base + static_cast<unsigned>(slabs * slab_bytes) +
                                      static_cast<unsigned>((raw.slot * chunk_size + channel) * raw_length) * sizeof(scalar_t);
              const unsigned bytes = static_cast<unsigned>(range.count) * sizeof(scalar_t);
              if (range.count > 0) bulk_copy(target, source + range.first, bytes, raw.full());
              if (range.next > 0) {
                bulk_copy(target + bytes, source + input.stride[0], static_cast<unsigned>(range.next) * sizeof(scalar_t),
                          raw.full());
              }
            }
            raw.advance();
          }
        }
      }
    } else if (loader < loaders + 64 && lane == 0) {
      wait_for_packing();
      Walk walk(problem, taps_h, columns, channel_tiles, m_tiles, chains, steps, warm_up);
      int held = -1;
      while (walk.next(segment)) {
        const int tile = walk.tile(segment.column);
        const int first = stays ? 0 : walk.rows_before(segment.class_h) * row_slab_count * chunks;
        const int count = stays ? slabs : walk.taps_h.count(kernel_h, segment.class_h) * row_slab_count * chunks;
        const unsigned char* source = reinterpret_cast<const unsigned char*>(packed_weight) +
                                      (static_cast<index_t>(tile) * tile_slabs + first) * slab_bytes;
        for (int s = segment.first; s < segment.end; ++s) {
          const int plane = segment.chain + (first_step + s) * chains;
          if (plane < 0 || plane >= problem.input_size[0] || (stays && held == tile)) continue;
          held = tile;
          for (int i = 0; i < count; ++i) {
            mbarrier_wait_patiently(slab.empty(), slab.parity ^ 1u);
            mbarrier_arrive_expect(slab.full(), static_cast<unsigned>(slab_bytes));
            bulk_copy(slab_base + static_cast<unsigned>(slab.slot * slab_bytes), source + static_cast<index_t>(i) * slab_bytes,
                      static_cast<unsigned>(slab_bytes), slab.full());
            slab.advance();
          }
        }
      }
      // A block must not end before its copies have landed, also of slabs that its classes had no use for.
      for (int i = 0; stays && held != -1 && i < slabs; ++i) {
        mbarrier_wait_patiently(slab.barriers + static_cast<unsigned>(i) * 8, slab.parity ^ 1u);
      }
    } else if (loader >= loaders + 64 && loader < loaders + 64 + composers * 32 && composes) {
      const int rounds = ceil_div(channels8, round8), composer = (loader - loaders - 64) / 32;
      Walk walk(problem, taps_h, columns, channel_tiles, m_tiles, chains, steps, warm_up);
      while (walk.next(segment)) {
        const Place place = walk.place(segment.column);
        const int first_position = m_first + place.m_tile * tile_rows;
        const Mark begin = tile_begin(first_position), end = tile_begin(first_position + tile_rows);
#pragma unroll 1
        for (int i = segment.begin * flush * rounds; i < segment.end * flush * rounds; ++i, composing.advance()) {
          if (composers == 2 && composing.slot != composer) continue;
          const int d = (segment.chain + (first_step + i / rounds / flush) * chains) * problem.stride[0] - problem.padding[0] +
                        i / rounds % flush * problem.dilation[0];
          const int tile_channel = (place.channel_tile * channels8 + i % rounds * round8) * 8;
          const int channels = min(min(round8, channels8 - i % rounds * round8) * 8, out_channels - tile_channel);
          const int channel = place.group * out_channels + tile_channel;
          scalar_t* const buffer = composed + composing.slot * (round8 * 8 * composed_pitch);
          bulk_wait_read<0>();
          __syncwarp();
          if (!epilogue.changes_sums()) {
            fill_shared(buffer, channels * composed_pitch, zero_scalar(), lane);
          } else {
            for (int c = 0; c < channels; ++c) {
              fill_shared(buffer + c * composed_pitch, composed_pitch, epilogue.untouched(channel + c), lane);
            }
          }
          fence_async();
          __syncwarp();
          if (!epilogue.changes_sums()) mbarrier_arrive(composing.full());
          // First what lies behind the plane with taps, which is the bias alone; zeros need not be read before sums are put in.
#pragma unroll 1
          for (int left = problem.dilation[0] / chains - 1; left >= 0; --left) {
            if (left == 0) {
              bulk_commit();
              if (epilogue.changes_sums()) {
                bulk_wait_read<0>();
                mbarrier_arrive(composing.full());
              }
              mbarrier_wait(composing.empty(), composing.parity);
            }
            if (d + left < 0 || d + left >= problem.output_size[0]) continue;
#pragma unroll 1
            for (int n = begin.n; n <= end.n; ++n) {
              const int first = n == begin.n ? begin.at : 0;
              const int count = (n == end.n ? end.at : problem.output_size[1] * problem.output_size[2]) - first;
#pragma unroll 1
              for (int item = lane; item < channels * 2; item += 32) {  // an end of a channel
                scalar_t* const target = output.at(n, channel + item / 2, d + left, 0, 0) + first;
                const int past = static_cast<int>(reinterpret_cast<unsigned long long>(target) / sizeof(scalar_t));
                const scalar_t* source = zeros + (past & (LINE - 1));
                if (epilogue.changes_sums() || left == 0) {
                  source =
                      buffer + (item / 2 * composed_pitch + composed_volume(begin, n) + first + ((past - first) & (LINE - 1)));
                }
                store_in_bulk(target, source, count, item % 2 == 0);
              }
            }
          }
          bulk_commit();
        }
      }
      bulk_wait_read<0>();
    }
    return;
  }

#if CONSUMERS == 2
  take_registers<MULTIPLYING>();
#endif
  float sums[SUMS];
#if defined(CONVT3D_TF32X3)
  float parts[SUMS];  // of a few taps
#else
  float (&parts)[SUMS] = sums;
#endif
  const int stored_w = class_count * merged;  // residues of w that have taps
  const int sum_count = class_count * tiles * columns8 * 4;
  const bool has_gaps = SPECIALIZED(FILLED, filled) && (stored_w < problem.stride[2] || flush > slot_count);
  const Pairs found = pairs_of(problem, output, phase_w - problem.padding[2], has_gaps);
  const Pairs pairs = PAIRS ? static_cast<Pairs>(SPECIALIZED(PAIRS - 1, found)) : found;
  // What all blocks fill in a step is, in 4-byte types, more than L2 keeps until the sums are stored into it: there planes with taps are
  // filled after the products. (Two parts of TF32 leave no registers for it.)
  constexpr bool fills_late = sizeof(scalar_t) == 4 && PARTS == 1;
  const unsigned slab_k_step = static_cast<unsigned>(columns8) * 128, stage_k_step = static_cast<unsigned>(positions) * 16;
  // Descriptors count in 16 bytes.
  const unsigned slab_k = slab_k_step >> 4, stage_k = stage_k_step >> 4;
  const unsigned first_slab = wgmma_operand(slab_base, slab_k_step);
  const unsigned first_stage = wgmma_operand(base + 1024, stage_k_step) + static_cast<unsigned>(warpgroup * tiles * 64);
  const int stride_w = SPECIALIZED(STRIDE_W, problem.stride[2]), dilation_w = SPECIALIZED(DILATION_W, problem.dilation[2]);
  const ClassTaps taps_w = {class_count, dilation_w * class_count * merged / stride_w};  // of the columns of a product
  const int phase = SPECIALIZED(PHASE_W, phase_w);
  const int column_taps = SPECIALIZED(KERNEL_W, problem.kernel_size[2]) / merged;  // of w
  const unsigned tap_operand = static_cast<unsigned>(tap_bytes) >> 4;
  Walk walk(problem, taps_h, columns, channel_tiles, m_tiles, chains, steps, warm_up);
  int held = -1;
  bool fresh = false;             // the resident slabs of this class have not been waited for yet
  unsigned resident_parity = 1u;  // of the load they came with

  while (walk.next(segment)) {
    const int tile = walk.tile(segment.column);
#pragma unroll
    for (int i = 0; i < sum_count; ++i) sums[i] = 0.0f;
    const int class_taps_h = walk.taps_h.count(kernel_h, segment.class_h);
    const int class_offset_h = segment.class_h * problem.dilation[1] / problem.stride[1];
    const int class_slot = walk.rows_before(segment.class_h) * row_slab_count * chunks;
    fresh = true;
    __syncwarp();  // the last stores have read their rows
    if (lane < tiles * 16) {
      const int f = m_first + walk.place(segment.column).m_tile * tile_rows + warpgroup * tiles * 64 + lane / 16 * 64 +
                    static_cast<int>(threadIdx.x) % 128 / 32 * 16 + lane % 16;
      const int row = f / pitch, n = row / rows, residue_h = segment.class_h * problem.dilation[1] % problem.stride[1];
      const int h = row % rows * problem.stride[1] + residue_h - problem.padding[1];
      const bool live = n < problem.batch && h >= 0 && h < problem.output_size[1];
      const int w = live ? f % pitch * stride_w + phase - problem.padding[2] : problem.output_size[2];  // or no output at all
      const int channel = tile / channel_tiles * out_channels + tile % channel_tiles * channels8 * 8;
      const index_t offset = n * output.stride[0] + channel * output.stride[1] + h * output.stride[3] + w * output.stride[4];
      int composed_place = 0;
      if (composes && live) {
        const int first = m_first + walk.place(segment.column).m_tile * tile_rows;
        composed_place = composed_volume(tile_begin(first), n) + h * problem.output_size[2] + w;
      }
      row_places[static_cast<int>(threadIdx.x) / 32 * 32 + lane] = {live ? offset : 0, w, composed_place};
    }
    __syncwarp();

    for (int s = segment.first; s < segment.end; ++s) {
      const int plane = segment.chain + (first_step + s) * chains;
      // Of this step's outputs from this warpgroup's first position to the next one's, with the rows without taps behind each, `planes` from
      // `skipped_d` behind the one with taps on.
      const auto fill = [&](int skipped_d, int planes) {
        const Place place = walk.place(computed_anew(segment.column));
        const int thread = static_cast<int>(computed_anew(threadIdx.x)), width = problem.output_size[2];
        const int channel = place.channel_tile * channels8 * 8, channels = min(channels8 * 8, out_channels - channel);
        const int first = m_first + (place.m_tile * CONSUMERS + thread / 128) * tiles * 64, end = first + tiles * 64;
        const int end_row = end < m_first + m_tiles * tile_rows ? end / pitch : problem.batch * rows;
        const int first_h = computed_anew(segment.class_h) * problem.dilation[1] % problem.stride[1] - problem.padding[1];
        int rows_h = 1;  // up to the next that has taps
        while (rows_h < problem.stride[1] && !has_tap(problem, 1, first_h + rows_h)) ++rows_h;
        const auto output_at = [&](int row, int skipped, int position) {
          const int h = row % rows * problem.stride[1] + first_h + skipped,
                    w = position * stride_w + phase - problem.padding[2];
          const index_t at = static_cast<index_t>(h) * width + min(max(w, 0), width);
          return static_cast<int>(min(max(at, index_t(0)), static_cast<index_t>(problem.output_size[1]) * width));
        };
        for (int row = first / pitch, next; row <= end_row && row < problem.batch * rows; row = next) {
          const int n = row / rows;
          next = rows_h < problem.stride[1] ? row + 1 : (n + 1) * rows;  // one behind another
          const int from = output_at(row, 0, row == first / pitch ? first % pitch : 0);
          const int to = next > end_row ? output_at(end_row, 0, end % pitch) : output_at(next - 1, rows_h, 0);
          for (int t = 0; t < flush; ++t) {
            const int d = plane * problem.stride[0] - problem.padding[0] + t * problem.dilation[0] + skipped_d;
            fill_outputs(problem, epilogue, output, n, place.group * out_channels + channel, channels, d, d + planes, from, to,
                         thread / 32 % 4, 4);
          }
        }
      };
      if (SPECIALIZED(FILLED, filled) && !composes && s >= segment.begin) {
        constexpr int skipped = fills_late ? 1 : 0;
        fill(skipped, problem.dilation[0] / chains - skipped);  // on their way while the products run
      }
      if (plane >= 0 && plane < problem.input_size[0]) {
        int slot = class_slot;  // of resident slabs
        if (stays) {
          if (held != tile) {
            if (held != -1) {
              for (int i = 0; i < slabs; ++i) mbarrier_wait(slab.barriers + static_cast<unsigned>(i) * 8, resident_parity);
              __syncwarp();  // all of this warp know that also those it had no use for have come
              if (lane == 0) {
                for (int i = 0; i < slabs; ++i) mbarrier_arrive(slab.barriers + static_cast<unsigned>(slabs + i) * 8);
              }
            }
            held = tile;
            resident_parity ^= 1u;
          }
        }
        // What the products before the newest ones have read is given back: a slab each time, a stage with its last slab.
        unsigned read_slab = 0, read_stage = 0;
        for (int chunk = 0; chunk < chunks; ++chunk) {
          mbarrier_wait(stage.full(), stage.parity);
          const auto begin_slab = [&] {
            if (!stays) {
              mbarrier_wait(slab.full(), slab.parity);
            } else if (fresh) {
              mbarrier_wait(slab.barriers + static_cast<unsigned>(slot) * 8, resident_parity);
            }
            wgmma_fence();
            return first_slab + static_cast<unsigned>((stays ? slot : slab.slot) * slab_bytes >> 4);
          };
          const auto end_slab = [&] {
            wgmma_commit();
            wgmma_wait<1>();
            if (lane == 0) {
              if (read_slab != 0) mbarrier_arrive(read_slab);
              if (read_stage != 0) mbarrier_arrive(read_stage);
            }
            read_stage = 0;
            if (stays) {
              ++slot;
            } else {
              read_slab = slab.empty();
              slab.advance();
            }
          };
          const unsigned stage_operand = first_stage + static_cast<unsigned>(stage.slot * stage_bytes >> 4);
          for (int jh = 0; jh < class_taps_h; ++jh) {
            const int row_offset = (offset_h - class_offset_h - jh * walk.taps_h.offset_step) * pitch;
            const unsigned row_operand = stage_operand + static_cast<unsigned>(row_offset + offset_w);
            // One tap: all its steps along the channels; of two parts `pass` 1 are the products with a low one, 0 those of the high ones.
            const auto multiply = [&](int jw, int i, int pass, unsigned a, unsigned b) {
#pragma unroll
              for (int k = 0; k < cell_count / 2; ++k) {
#pragma unroll
                for (int part = 2 * pass; part >= pass; --part) {  // low x high, high x low; high x high
                  const unsigned a_part = part == 2 ? stage_k * static_cast<unsigned>(cell_count) : 0,
                                 b_part = part == 1 ? slab_k * static_cast<unsigned>(cell_count) : 0;
#pragma unroll
                  for (int m = 0; m < tiles; ++m) {
                    wgmma(parts + (jw * tiles + m) * columns8 * 4,
                          a + a_part + static_cast<unsigned>(m) * 64 + static_cast<unsigned>(k) * 2 * stage_k,
                          b + b_part + static_cast<unsigned>(k) * 2 * slab_k, PARTS == 1 || i + k > 0 || part < 2,
                          columns8 * 8);
                  }
                }
              }
            };
            // Where a class of w begins to read, in positions back: those of the next position one later.
            const auto class_offset_w = [&](int jw) {
              return static_cast<unsigned>(jw * dilation_w / stride_w - (jw * dilation_w % stride_w < phase ? 1 : 0));
            };
            const unsigned tap_step = static_cast<unsigned>(taps_w.offset_step);
            // Tensor cores cut off what they add, so sums of a few taps move to where additions are rounded.
            const auto round_parts = [&](int jw) {
              if (PARTS == 1) return;
              wgmma_wait<0>();
#pragma unroll
              for (int i = jw * tiles * columns8 * 4; i < (jw + 1) * tiles * columns8 * 4; ++i) sums[i] += parts[i];
            };
            if (by_rows) {
              const unsigned b = begin_slab();
              // Low parts of all taps come first: they meet small sums, of which little is cut off. Loops over all a class might have: where
              // the class of a tap has to be found, the compiler takes up to half as long again.
#pragma unroll
              for (int pass = PARTS - 1; pass >= 0; --pass) {
#pragma unroll
                for (int jw = 0; jw < class_count; ++jw) {
#pragma unroll
                  for (int i = 0; i < column_taps; ++i) {
                    if (i >= taps_w.count(column_taps, jw)) continue;
                    const int tap = taps_before_class(column_taps, taps_w.period, jw) + i;
                    multiply(jw, i, pass, row_operand - class_offset_w(jw) - static_cast<unsigned>(i) * tap_step,
                             b + static_cast<unsigned>(tap) * tap_operand);
                  }
                }
              }
              end_slab();
            } else {
#pragma unroll
              for (int jw = 0; jw < class_count; ++jw) {
                unsigned a = row_operand - class_offset_w(jw);
                const int class_taps_w = taps_w.count(column_taps, jw), few = max(8 / cell_count, 1);
#pragma unroll 1
                for (int i = 0; i < class_taps_w; ++i, a -= tap_step) {
                  const unsigned b = begin_slab();
#pragma unroll
                  for (int pass = PARTS - 1; pass >= 0; --pass) multiply(jw, i % few, pass, a, b);
                  end_slab();
                  if ((i + 1) % few == 0 && i + 1 < class_taps_w) round_parts(jw);
                }
              }
            }
#pragma unroll
            for (int jw = 0; jw < class_count; ++jw) {
              if (taps_w.count(column_taps, jw) > 0) round_parts(jw);
            }
          }
          read_stage = stage.empty();
          stage.advance();
        }
        fresh = false;
        wgmma_wait<0>();
        if (lane == 0) {
          if (read_slab != 0) mbarrier_arrive(read_slab);
          mbarrier_arrive(read_stage);
        }
      }
      if (s >= segment.begin) {
        if (SPECIALIZED(FILLED, filled) && !composes) {
          if (fills_late) fill(0, 1);
          sync_warpgroup(warpgroup);  // each warp has filled what others store sums into
        }
        // Worked out here and not before the loop, where they would take registers from the sums.
        const int thread = static_cast<int>(computed_anew(threadIdx.x)), stored_tile = walk.tile(computed_anew(segment.column));
        const int first_plane = plane * problem.stride[0] - problem.padding[0];
        const RowPlace* const own_rows = row_places + thread / 32 * 32;
        const int lane_eights = SPECIALIZED(LANE_EIGHTS, 1),
                  first = channel_of_column(thread % 4 * 2, lane_eights);  // of this thread's channels in the tile
        const int tile_channels = WHOLE_TILES ? channels8 * 8 : out_channels - stored_tile % channel_tiles * channels8 * 8;
        const Epilogue of_tile{epilogue.changes_sums() ? epilogue.bias + stored_tile / channel_tiles * out_channels +
                                                             stored_tile % channel_tiles * channels8 * 8 + first
                                                       : nullptr};
        // The output `e` of position `r` in channel `i`: a sum, or the bias where no tap reaches.
        const auto value = [&](const Epilogue& of_tile, int t, int i, int r, int e) {
          int channel = channel_of_column(i / 2 * 8 + i % 2, lane_eights);
          if (SPECIALIZED(CHANNEL_RUNS, 0)) channel = min(channel, tile_channels - 1 - first);  // those behind are not stored
          accum_t sum = epilogue.changes_sums() ? of_tile.added(channel) : 0.0f;
#pragma unroll
          for (int jw = 0; jw < stored_w; ++jw) {
            if (t < slot_count && jw * dilation_w % stride_w == (e + phase) % stride_w) {
              const int product = jw / merged * tiles + r / 2, column8 = t * slot8 + jw % merged * channels8 + i / 2;
              sum += sums[(product * columns8 + column8) * 4 + r % 2 * 2 + i % 2];
            }
          }
          return epilogue.finish(sum);
        };
        if (composes) {
          int place[2 * MOST_TILES], past[2 * MOST_TILES], w[2 * MOST_TILES];
#pragma unroll
          for (int r = 0; r < 2 * tiles; ++r) {
            const RowPlace row = own_rows[r / 2 * 16 + r % 2 * 8 + thread % 32 / 4];
            place[r] = row.composed;
            w[r] = row.w;
            past[r] = static_cast<int>(reinterpret_cast<unsigned long long>(output.data) / sizeof(scalar_t) +
                                       static_cast<unsigned long long>(row.offset - row.composed + first * output.stride[1] +
                                                                       first_plane * output.stride[2]));
          }
          const int channel_step = static_cast<int>(output.stride[1]), in_round = max(round8, 1);
#pragma unroll
          for (int t = 0; t < flush; ++t) {
            const int plane_step = t * problem.dilation[0] * static_cast<int>(output.stride[2]);
#pragma unroll
            for (int c8 = 0; c8 < channels8; ++c8) {
              scalar_t* const buffer = composed + composing.slot * (round8 * 8 * composed_pitch);
              if (c8 % in_round == 0) mbarrier_wait(composing.full(), composing.parity);
#pragma unroll
              for (int q = 0; q < 2; ++q) {
                if (!WHOLE_TILES && c8 * 8 + first + q >= tile_channels) continue;
                scalar_t* const row = buffer + (c8 % in_round * 8 + first + q) * composed_pitch;
                const int moved = (c8 * 8 + q) * channel_step + plane_step;
#pragma unroll
                for (int r = 0; r < 2 * tiles; ++r) {
                  scalar_t* const y = row + (place[r] + ((past[r] + moved) & (LINE - 1)));
#pragma unroll
                  for (int e = 0; e < stride_w; ++e) {
                    const bool has_taps = t < slot_count && (e + phase) % stride_w % (stride_w / stored_w) == 0;
                    if (!has_taps || static_cast<unsigned>(w[r] + e) >= static_cast<unsigned>(problem.output_size[2])) continue;
                    y[e] = value(of_tile, t, c8 * 2 + q, r, e);
                  }
                }
              }
              if (c8 % in_round == in_round - 1 || c8 == channels8 - 1) {
                fence_async();
                mbarrier_arrive(composing.empty());
                composing.advance();
              }
            }
          }
        } else if (stores_rows && output.stride[4] == 1) {
          // 16 positions of 8 channels at a time: two outputs of each, side by side, and then lane by lane along the row.
          scalar_t* const staged = staged_rows + thread / 32 * (8 * staged_pitch);
#pragma unroll
          for (int m = 0; m < tiles; ++m) {
            const RowPlace row = own_rows[m * 16 + thread % 32 / 2];
            const Epilogue once_more{of_tile.bias + computed_anew(0)};  // read once more, not kept
            const bool inside = static_cast<unsigned>(row.w + thread % 2) < static_cast<unsigned>(problem.output_size[2]);
            scalar_t* const along = output.data + (row.offset + first_plane * output.stride[2] + thread % 2);
#pragma unroll
            for (int t = 0; t < flush; ++t) {
              const int d = first_plane + t * problem.dilation[0];
              if (d < 0 || d >= problem.output_size[0]) continue;
              scalar_t* y = along + t * problem.dilation[0] * output.stride[2];
#pragma unroll
              for (int c8 = 0; c8 < channels8; ++c8) {
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                  if (!WHOLE_TILES && c8 * 8 + first + q % 2 >= tile_channels) continue;
                  scalar_t* const pair = staged + (first + q % 2) * staged_pitch + (q / 2 * 8 + thread % 32 / 4) * 2;
                  store_shared_pair(pair, value(once_more, t, c8 * 2 + q % 2, m * 2 + q / 2, 0),
                                    value(once_more, t, c8 * 2 + q % 2, m * 2 + q / 2, 1));
                }
                __syncwarp();
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                  if (inside && (WHOLE_TILES || c8 * 8 + c < tile_channels)) *y = staged[c * staged_pitch + thread % 32];
                  y = advanced(y, output.stride[1] * static_cast<index_t>(sizeof(scalar_t)));
                }
                __syncwarp();  // what is staged has been read
              }
            }
          }
        } else if (SPECIALIZED(CHANNEL_RUNS, 0)) {
#pragma unroll
          for (int r = 0; r < 2 * tiles; ++r) {
            const RowPlace row = own_rows[r / 2 * 16 + r % 2 * 8 + thread % 32 / 4];
            scalar_t* const corner = output.data + (row.offset + first_plane * output.stride[2] + first * output.stride[1]);
#pragma unroll
            for (int t = 0; t < flush; ++t) {
              const int d = first_plane + t * problem.dilation[0];
              if (d < 0 || d >= problem.output_size[0]) continue;
#pragma unroll
              for (int e = 0; e < stride_w; ++e) {
                const bool has_taps = t < slot_count && (e + phase) % stride_w % (stride_w / stored_w) == 0;
                if (SPECIALIZED(FILLED, filled) && !has_taps) continue;
                const auto channels_of = [&](int eight) {
                  LaneChannels channels;
#pragma unroll
                  for (int n = 0; n < lane_eights; ++n) {
                    const int i = (eight + n) * 2;
                    channels.element[n] = {value(of_tile, t, i, r, e), value(of_tile, t, i + 1, r, e)};
                  }
                  return channels;
                };
                const bool live = static_cast<unsigned>(row.w + e) < static_cast<unsigned>(problem.output_size[2]);
                const int left = live ? min(channels8 * 8, tile_channels) - first : 0;
                scalar_t* const y = corner + (t * problem.dilation[0] * output.stride[2] + e * output.stride[4]);
                LaneChannels own = channels_of(0), later = own;
#pragma unroll
                for (int eight = 0; eight < channels8; eight += lane_eights) {
                  if (eight + lane_eights < channels8) later = channels_of(eight + lane_eights);
                  store_lane_channels_anywhere(y + eight * 8, own, later, left - eight * 8, first + eight == 0, thread % 32,
                                               lane_eights);
                  own = later;
                }
              }
            }
          }
        } else {
          // The rows of this thread, side by side so that many stores are on their way.
          scalar_t* target[2 * MOST_TILES];
          int w[2 * MOST_TILES];
#pragma unroll
          for (int r = 0; r < 2 * tiles; ++r) {
            const RowPlace row = own_rows[r / 2 * 16 + r % 2 * 8 + thread % 32 / 4];
            w[r] = row.w;
            target[r] = output.data + (row.offset + first_plane * output.stride[2] + first * output.stride[1]);
          }
          const auto store = [&](auto tag) {
            constexpr Pairs kind = decltype(tag)::value;
#pragma unroll
            for (int t = 0; t < flush; ++t) {
              const int d = first_plane + t * problem.dilation[0];
              const bool live = d >= 0 && d < problem.output_size[0];
#pragma unroll
              for (int i = 0; i < channels8 * 2; i += kind == OF_CHANNELS ? 2 * lane_eights : 1) {
                const int channel = channel_of_column(i / 2 * 8 + i % 2, lane_eights);  // from the thread's first
                const index_t offset = channel * output.stride[1] + t * problem.dilation[0] * output.stride[2];
                if (!live || (!WHOLE_TILES && first + channel >= tile_channels)) continue;
#pragma unroll
                for (int r = 0; r < 2 * tiles; ++r) {
#pragma unroll
                  for (int e = 0; e < stride_w; e += kind == OF_COLUMNS ? 2 : 1) {
                    const bool has_taps = t < slot_count && (e + phase) % stride_w % (stride_w / stored_w) == 0;
                    if (kind != OF_COLUMNS && SPECIALIZED(FILLED, filled) && !has_taps) continue;
                    if (static_cast<unsigned>(w[r] + e) >= static_cast<unsigned>(problem.output_size[2])) continue;
                    scalar_t* const y = target[r] + (offset + e * output.stride[4]);
                    if (kind == OF_CHANNELS && lane_eights > 1) {
                      LaneChannels channels;
#pragma unroll
                      for (int n = 0; n < lane_eights; ++n) {
                        channels.element[n] = {value(of_tile, t, i + 2 * n, r, e), value(of_tile, t, i + 2 * n + 1, r, e)};
                      }
                      store_lane_channels(y, channels, lane_eights);
                    } else if (kind == OF_CHANNELS) {
                      store_pair(y, value(of_tile, t, i, r, e), value(of_tile, t, i + 1, r, e));
                    } else if (kind == OF_COLUMNS) {
                      store_pair(y, value(of_tile, t, i, r, e), value(of_tile, t, i, r, e + 1));
                    } else {
                      *y = value(of_tile, t, i, r, e);
                    }
                  }
                }
              }
            }
          };
          if (stride_w % 2 == 0 && pairs == OF_COLUMNS) {
            store(Constant<OF_COLUMNS>{});
          } else if (pairs == OF_CHANNELS) {
            store(Constant<OF_CHANNELS>{});
          } else {
            store(Constant<NO_PAIRS>{});
          }
        }
      }
#pragma unroll
      for (int i = 0; i < class_count * tiles; ++i) {
#pragma unroll
        for (int j = 0; j < columns8 * 4; ++j) {
          const int from = j + flush * slot8 * 4;
          sums[i * columns8 * 4 + j] = from < columns8 * 4 ? sums[i * columns8 * 4 + from] : 0.0f;
        }
      }
    }
  }
}
