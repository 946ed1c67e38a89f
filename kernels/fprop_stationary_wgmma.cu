/* convt3d
pass = "fprop"
dtypes = ["tf32", "bf16", "fp16"]
architectures = ["sm_90a"]
multiplies_padding = true

[search]
COLUMNS = [16, 32, 64, 128]
CHUNK_CELLS = [2, 4, 8]
MERGE_GROUPS = [0, 1]

[specialize]
WGMMA_TILES = "tile8"
CELLS = "chunk_cells"
PATCH_W = "patch_w"
KERNEL_D = "kernel_d"
KERNEL_H = "kernel_h"
KERNEL_W = "kernel_w"
STRIDE_D = "stride_d"
STRIDE_H = "stride_h"
STRIDE_W = "stride_w"
PADDING_D = "padding_d"
PADDING_H = "padding_h"
PADDING_W = "padding_w"
DILATION_D = "dilation_d"
DILATION_H = "dilation_h"
DILATION_W = "dilation_w"
OUTPUT_LAYOUT = "output_layout if in_rows or lane_eights > 1 or channel_runs else 0"
LANE_EIGHTS = "lane_eights"
CHANNEL_RUNS = "channel_runs"

[constants]
# Small groups may be put together as one of more channels, whose weights from group to group are zero.
merged = "gcd(groups, max(1, COLUMNS // out_channels_per_group)) if MERGE_GROUPS else 1"
group_sets = "groups // merged"
set_inputs = "merged * in_channels_per_group"
set_outputs = "merged * out_channels_per_group"
# Residue classes that taps reach, and the output channels of a tile, in eights: a thread has the sums of all these classes, and shared
# memory the weights, beside two stages of the input.
classes_d = "min(kernel_d, stride_d // gcd(stride_d, dilation_d))"
classes_h = "min(kernel_h, stride_h // gcd(stride_h, dilation_h))"
classes_w = "min(kernel_w, stride_w // gcd(stride_w, dilation_w))"
classes = "classes_d * classes_h * classes_w"
out_tiles = "ceil_div(set_outputs, 8)"
channel_tiles = "ceil_div(out_tiles, max(1, min(COLUMNS // 8, 32 // classes, (231424 - 2 * stage_bytes) // (tap_bytes + CONSUMERS * eight_runs))))"
tile8 = "ceil_div(out_tiles, channel_tiles)"
sets = "group_sets * channel_tiles"
# Where channels lie together, eights of columns of which a lane has neighbouring channels: at most 16 bytes. An odd number of channels
# of 16 bits begins anywhere; few are stored one by one as quickly.
channel_runs = "1 if output_layout == 2 and itemsize == 2 and set_outputs % 2 and set_outputs > 8 else 0"
lane_eights = "1 if output_layout != 2 or set_outputs % 2 > channel_runs else gcd(gcd(tile8, 8 // itemsize), 4 if channel_runs else set_outputs // 2)"
# Cells of 16 bytes: a chunk has an even number of them, two for each step of a product.
all_cells = "2 * ceil_div(set_inputs * itemsize, 32)"
chunks = "ceil_div(all_cells, CHUNK_CELLS)"
chunk_cells = "2 * ceil_div(all_cells, 2 * chunks)"

# Tap t reads the input (padding - t*dilation) / stride, rounded up, ahead of the output block; the last tap the lowest.
lowest_d = "-(((kernel_d - 1) * dilation_d - padding_d) // stride_d)"
lowest_h = "-(((kernel_h - 1) * dilation_h - padding_h) // stride_h)"
lowest_w = "-(((kernel_w - 1) * dilation_w - padding_w) // stride_w)"
window_d = "CONSUMERS + ceil_div(padding_d, stride_d) - lowest_d"
more_h = "ceil_div(padding_h, stride_h) - lowest_h"
more_w = "ceil_div(padding_w, stride_w) - lowest_w"
tap_bytes = "kernel_d * kernel_h * kernel_w * chunks * chunk_cells * 128"

# Output blocks of stride_d x stride_h x stride_w. A warpgroup has a patch of 64: 8 x 8, or whole rows or 64 blocks of one, which are stored as
# runs. Runs cost more than pairs that fill pieces of 32 bytes, and less than what 8 x 8 stores where rows are odd or begin amid such a piece.
blocks_d = "ceil_div(output_d, stride_d)"
blocks_h = "ceil_div(output_h, stride_h)"
blocks_w = "ceil_div(output_w, stride_w)"
row_w = "16 if blocks_w <= 16 else 32 if blocks_w <= 32 else 64"
row_h = "64 // row_w"
row_tiles = "ceil_div(blocks_w, row_w) * ceil_div(blocks_h, row_h)"
row_bytes = "32 * chunk_cells * (window_d * (row_h + more_h) * (row_w + more_w) + 1) + CONSUMERS * 8 * (64 * stride_w * itemsize + 16 * row_h)"
torn = "stride_w == 2 and (output_w % 2 == 1 or row_w == 64 and output_w * itemsize % 32 > 0)"
worth = "5 if torn else 4 if row_w == 64 or stride_w != 2 else 3"  # quarters of the tiles of 8 x 8 that rows may need
in_rows = "4 * row_tiles <= worth * ceil_div(blocks_w, 8) * ceil_div(blocks_h, 8) and tap_bytes + row_bytes <= 231424"
patch_w = "row_w if in_rows else 8"
patch_h = "64 // patch_w"
tiles_d = "ceil_div(blocks_d, CONSUMERS)"
tiles_h = "ceil_div(blocks_h, patch_h)"
tiles_w = "ceil_div(blocks_w, patch_w)"
units = "sets * batch * tiles_d * tiles_h * tiles_w"
# Where blocks have many tiles, the launch begins behind the one that packs, not beside it.
beside = "1 if units <= 16 * multiprocessors else 0"

positions = "window_d * (patch_h + more_h) * (patch_w + more_w) // 2 * 2 + 1"
weight_bytes = "tap_bytes * tile8"
stage_bytes = "16 * chunk_cells * positions"
# Outputs on their way: a patch's rows of each channel, and room for each to begin anywhere in 16 bytes.
eight_runs = "8 * (64 * stride_w * itemsize + 16 * patch_h) if in_rows else 0"
run_bytes = "eight_runs * tile8"
runs = "2 if 1024 + weight_bytes + 2 * stage_bytes + 2 * CONSUMERS * run_bytes <= 232448 else 1"
memory = "231424 - weight_bytes - CONSUMERS * runs * run_bytes"
stages = "min(4, memory // stage_bytes)"

[restrictions]
"max(stride_d, stride_h, stride_w) <= 8 and max(kernel_d, kernel_h, kernel_w) <= 16" = "it has tables for strides of at most 8 and kernels of at most 16"
"COLUMNS <= 128" = "a thread has no registers for a product of more columns"
"classes * tile8 <= 32" = "a thread has no registers for the sums of all residue classes"
"kernel_h * kernel_w * chunk_cells <= 256 and kernel_d * kernel_h * kernel_w * chunk_cells <= 512" = "its taps are too many to be written out one by one"
"memory >= 2 * stage_bytes" = "the weights of a tile of channels pass the shared memory"
"max(units, sets * chunks * chunk_cells * tile8 * 8 * kernel_d * kernel_h * kernel_w) <= 1000000000" = "the volume passes its 32-bit tile offsets"

[cost]
steps = "ceil_div(units, multiprocessors) * chunks * taps"
products = "CONSUMERS * 64 * tile8 * 8 * chunk_cells * (16 // itemsize)"
bytes = "stage_bytes // taps"
first_bytes = "weight_bytes"

[workspace]
packed_weight = "sets * weight_bytes // 4"

[[launch]]
symbol = "convt3d_pack_stationary_weight"
packs = "packed_weight"
grid = "sets * kernel_d * kernel_h * kernel_w * chunks * ceil_div(chunk_cells * tile8 * 8, 128)"
block = 128

[[launch]]
symbol = "convt3d_fprop_stationary_wgmma"
grid = "min(multiprocessors, units)"
block = "CONSUMERS * 256"
shared_bytes = "1024 + weight_bytes + stages * stage_bytes + CONSUMERS * runs * run_bytes"
*/
// The transposed convolution as matrix products of Hopper's warpgroups, all residue classes of an output block at once, by weights that stay.
//
// Outputs come in blocks of stride_d x stride_h x stride_w, whose places are the residue classes. GEMM rows are 64 output blocks, columns the
// channels of a tile for each class that taps reach: a warpgroup has the sums of all outputs of its blocks in registers. What a tap reads
// lies at the same offset from every block: a warp reads an input of its rows once, into registers, for all taps that meet there. Taps are written out one by one, as a binary's constants.
//
// The weights of a tile of channels are loaded once and stay, and the input streams through: as many warpgroups load as multiply, and turn
// channels into cells of 16 bytes. Small groups may be put together as one, whose weights from group to group are zero: what that makes NaN is
// computed anew, by the definition.
//
// In NCDHW rows of 16, 32 or 64 blocks are put together in shared memory for each channel, at the place in 16 bytes that they have in the
// output, and stored 16 bytes a thread whatever they begin at. Their ends share 32 bytes with neighbours: such a piece must be made whole soon, or the cache
// writes it to memory twice. So blocks of threads take neighbouring tiles at the same time, and stores keep the order they are written in.

#include "convt3d.cuh"
#include "convt3d/core/advanced.cuh"
#include "convt3d/ptx/beside_packing.cuh"
#include "convt3d/core/cell.cuh"
#include "convt3d/core/column_order.cuh"
#include "convt3d/core/constant.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/gathered.cuh"
#include "convt3d/core/integers.cuh"
#include "convt3d/core/layout.cuh"
#include "convt3d/ptx/mma.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/core/warp.cuh"
#include "convt3d/ptx/wgmma_registers.cuh"

// At most so many output channels in a tile, and cells of 16 bytes in a chunk of input channels.
#ifndef COLUMNS
#define COLUMNS 32
#endif
#ifndef CHUNK_CELLS
#define CHUNK_CELLS 4
#endif
// Whether groups are put together up to so many output channels.
#ifndef MERGE_GROUPS
#define MERGE_GROUPS 0
#endif
// Warpgroups that multiply, and as many that load.
#ifndef CONSUMERS
#define CONSUMERS 2
#endif

constexpr int HEADER = 1024;  // bytes in shared memory: barriers
constexpr int MOST_TAPS = 16, MOST_PLACES = 8;

// The taps of one axis. Tap t adds the input `ahead[t]` of an output block to the block's place `place[t]`.
struct AxisTaps {
  int count, classes;  // taps, and places that any of them reaches
  int place[MOST_TAPS], ahead[MOST_TAPS];
  int rank[MOST_PLACES];  // of a place among those that taps reach, -1 for the others
  int steps;              // inputs that differ; taps that share one follow each other
  int step_first[MOST_TAPS], step_taps[MOST_TAPS];
};

__device__ constexpr AxisTaps axis_taps(int kernel, int stride, int padding, int dilation) {
  AxisTaps taps = {};
  taps.count = kernel;
  for (int e = 0; e < MOST_PLACES; ++e) taps.rank[e] = -1;
  for (int t = 0; t < kernel; ++t) {
    const int place = ((t * dilation - padding) % stride + stride) % stride;
    taps.place[t] = place;
    taps.ahead[t] = (place + padding - t * dilation) / stride;
    taps.rank[place] = 0;
    if (t == 0 || taps.ahead[t] != taps.ahead[t - 1]) taps.step_first[taps.steps++] = t;
    ++taps.step_taps[taps.steps - 1];
  }
  for (int e = 0; e < stride; ++e) {
    if (taps.rank[e] == 0) taps.rank[e] = taps.classes++;
  }
  return taps;
}

// Loops that a GPU's binary has written out: `body` is called with each number below `count`, on a GPU constants.
#if defined(__CUDACC__)
template <int count, int at = 0, class Body>
__device__ __forceinline__ void for_each(const Body& body) {
  if constexpr (at < count) {
    body(Constant<at>{});
    for_each<count, at + 1>(body);
  }
}
constexpr AxisTaps TAPS_D = axis_taps(KERNEL_D, STRIDE_D, PADDING_D, DILATION_D),
                   TAPS_H = axis_taps(KERNEL_H, STRIDE_H, PADDING_H, DILATION_H),
                   TAPS_W = axis_taps(KERNEL_W, STRIDE_W, PADDING_W, DILATION_W);
#define CONSTANT constexpr
#define NUMBER(name) decltype(name)::value
#define FOR_EACH(count) for_each<(count)>
#else
struct ForEach {
  int count;
  template <class Body>
  void operator()(const Body& body) const {
    for (int at = 0; at < count; ++at) body(at);
  }
};
#define CONSTANT const
#define NUMBER(name) name
#define FOR_EACH(count) \
  ForEach { count }
#endif

// ---- packing: [group set][channel tile][chunk][tap] of cells [cell][column] ----

extern "C" __global__ void convt3d_pack_stationary_weight(const Problem problem, const View<const scalar_t> weight,
                                                          accum_t* __restrict__ packed_weight, const int set_inputs,
                                                          const int set_outputs, const int channel_tiles, const int tile8,
                                                          const int chunks, const int chunk_cells, const int beside) {
  // Beside packing large layers lose, it seems because blocks that begin late store far from their neighbours in time.
  if (beside) let_next_begin();
  const int kernel_h = problem.kernel_size[1], kernel_w = problem.kernel_size[2],
            taps = problem.kernel_size[0] * kernel_h * kernel_w;
  const int columns = tile8 * 8, parts = ceil_div(chunk_cells * columns, 128);
  const int number = static_cast<int>(blockIdx.x) / parts,
            i = static_cast<int>(blockIdx.x) % parts * 128 + static_cast<int>(threadIdx.x);
  if (i >= chunk_cells * columns) return;
  const int tap = number % taps, chunk = number / taps % chunks, set = number / taps / chunks;
  const int tile = set % channel_tiles, first_input = set / channel_tiles * set_inputs;
  const int in_channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int first = (chunk * chunk_cells + i / columns) * VECTOR,
            co = tile * columns + channel_of_column(i % columns, SPECIALIZED(LANE_EIGHTS, 1));
  // Of all the set's channels, those of the output channel's group.
  const int begin = co / out_channels * in_channels - first;
  const int end = co < set_outputs ? begin + in_channels : begin;
  scalar_t values[VECTOR];
  load_weight_cell(values, weight, first_input + first, co % out_channels, tap / kernel_w / kernel_h, tap / kernel_w % kernel_h,
                   tap % kernel_w, end, begin);
  reinterpret_cast<Cell*>(packed_weight)[static_cast<index_t>(number) * chunk_cells * columns + i] = cell_of(values);
}

// ---- the product ----

// A tile of output blocks for a set of groups and a tile of their channels.
struct Unit {
  int set, n, d, h, w;
};

// The unit of a number: w first, then h, d, n and the set.
__device__ inline Unit unit_of(int number, int batch, int tiles_d, int tiles_h, int tiles_w) {
  Unit unit;
  unit.w = number % tiles_w, number /= tiles_w;
  unit.h = number % tiles_h, number /= tiles_h;
  unit.d = number % tiles_d, number /= tiles_d;
  unit.n = number % batch, unit.set = number / batch;
  return unit;
}

// The unit that is so many behind.
__device__ __forceinline__ void advance(Unit& unit, const Unit& step, int batch, int tiles_d, int tiles_h, int tiles_w) {
  const auto add = [](int& digit, int& next, int step, int size) {
    digit += step;
    if (digit >= size) digit -= size, ++next;
  };
  add(unit.w, unit.h, step.w, tiles_w);
  add(unit.h, unit.d, step.h, tiles_h);
  add(unit.d, unit.n, step.d, tiles_d);
  add(unit.n, unit.set, step.n, batch);
  unit.set += step.set;
}

// Channels of one position that lie together, whole cells of them on 16 bytes.
__device__ inline bool takes_whole_cells(const Problem& problem, const View<const scalar_t>& input) {
  bool whole = input.stride[1] == 1 && input.stride[0] % VECTOR == 0 && problem.in_channels % VECTOR == 0 &&
               reinterpret_cast<unsigned long long>(input.data) % 16 == 0;
#pragma unroll
  for (int axis = 2; axis < 5; ++axis) whole = whole && input.stride[axis] % VECTOR == 0;
  return whole;
}

// These 16 bytes, or those that begin an element behind: the next lane has the next ones.
__device__ __forceinline__ Cell moved_cell(const Cell& cell, bool behind) {
  const unsigned next = __shfl_down_sync(0xffffffffu, cell.element[0], 1);
  Cell moved;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const unsigned second = word < 3 ? cell.element[word + 1] : next;
#if defined(CONVT3D_BF16) || defined(CONVT3D_FP16)
    moved.element[word] =
        static_cast<unsigned>((static_cast<unsigned long long>(second) << 32 | cell.element[word]) >> (behind ? 16 : 0));
#else
    moved.element[word] = behind ? second : cell.element[word];
#endif
  }
  return moved;
}

// Evicted first, as it is written once; and the compiler keeps the order of these stores and those around them.
__device__ __forceinline__ void store_in_order(scalar_t* target, const Cell& cell) {
#if defined(__CUDACC__)
  asm volatile("st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(target)), "r"(cell.element[0]),
               "r"(cell.element[1]), "r"(cell.element[2]), "r"(cell.element[3])
               : "memory");
#else
  *reinterpret_cast<Cell*>(target) = cell;
#endif
}

extern "C" __global__ void __launch_bounds__(CONSUMERS * 256, 1)
    convt3d_fprop_stationary_wgmma(const Problem problem, const View<const scalar_t> input,
                                   const accum_t* __restrict__ packed_weight, const scalar_t* __restrict__ bias,
                                   View<scalar_t> output, const int set_inputs, const int set_outputs, const int channel_tiles,
                                   const int tile8, const int chunks, const int chunk_cells, const int patch_w,
                                   const int tiles_d, const int tiles_h, const int tiles_w, const int weight_bytes,
                                   const int run_bytes, const int runs, const int stages, const int sets, const int units,
                                   const View<const scalar_t> weight) {
  lay_out(problem, output, OUTPUT_LAYOUT ? SPECIALIZED(OUTPUT_LAYOUT, layout_of(problem, output)) : 0);
  const Epilogue epilogue{bias};
  extern __shared__ __align__(1024) unsigned char shared[];
#if !defined(__CUDACC__)
  const auto taps_of = [&](int axis) {
    return axis_taps(problem.kernel_size[axis], problem.stride[axis], problem.padding[axis], problem.dilation[axis]);
  };
  const AxisTaps TAPS_D = taps_of(0), TAPS_H = taps_of(1), TAPS_W = taps_of(2);
#endif
  CONSTANT int cells = SPECIALIZED(CELLS, chunk_cells), columns = SPECIALIZED(WGMMA_TILES, tile8) * 8;
  CONSTANT int row_blocks = SPECIALIZED(PATCH_W, patch_w), patch_h = 64 / row_blocks;
  CONSTANT int stride_d = SPECIALIZED(STRIDE_D, problem.stride[0]), stride_h = SPECIALIZED(STRIDE_H, problem.stride[1]),
               stride_w = SPECIALIZED(STRIDE_W, problem.stride[2]);
  CONSTANT int lowest_d = TAPS_D.ahead[TAPS_D.count - 1], lowest_h = TAPS_H.ahead[TAPS_H.count - 1],
               lowest_w = TAPS_W.ahead[TAPS_W.count - 1];
  CONSTANT int window_d = CONSUMERS + TAPS_D.ahead[0] - lowest_d, window_h = patch_h + TAPS_H.ahead[0] - lowest_h,
               window_w = row_blocks + TAPS_W.ahead[0] - lowest_w;
  CONSTANT int window = window_d * window_h * window_w, positions = window / 2 * 2 + 1, stage_bytes = cells * positions * 16;
  CONSTANT int class_sums = columns / 2,
               classes = TAPS_D.classes * TAPS_H.classes * TAPS_W.classes;  // sums a thread has of each class
  const int thread = static_cast<int>(threadIdx.x), warp = of_warp(thread / 32), lane = thread % 32;
  const unsigned base = shared_address(shared), weight_base = base + HEADER,
                 stage_base = weight_base + static_cast<unsigned>(weight_bytes);
  const unsigned weights_full = base, weights_empty = base + 8, full = base + 16,
                 empty = full + static_cast<unsigned>(stages) * 8;
  if (thread == 0) {
    mbarrier_init(weights_full, 1);
    mbarrier_init(weights_empty, CONSUMERS * 4);
    for (unsigned i = 0; i < static_cast<unsigned>(stages); ++i) {
      mbarrier_init(full + i * 8, CONSUMERS * 128);
      mbarrier_init(empty + i * 8, CONSUMERS * 128);
    }
    mbarrier_fence_init();
  }
  __syncthreads();

  // Each team of blocks has a share of the units, of one set where sets are few, and its blocks take them in turns.
  const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
  const int members = max(1, blocks / sets), teams = blocks / members, team = block / members;
  const int first_unit = units / teams * team + min(team, units % teams) + block % members;
  const int end_unit = units / teams * (team + 1) + min(team + 1, units % teams);
  const int count = team < teams ? max(0, ceil_div(end_unit - first_unit, members)) : 0;
  const Unit begin = unit_of(first_unit, problem.batch, tiles_d, tiles_h, tiles_w);
  Unit unit = begin;
  const Unit step = unit_of(members, problem.batch, tiles_d, tiles_h, tiles_w);
  int slot = 0;
  unsigned parity = 0, weights_parity = 0;
  const auto next_slot = [&] {
    if (++slot == stages) slot = 0, parity ^= 1u;
  };

  if (warp >= CONSUMERS * 4) {
#if CONSUMERS == 2
    give_registers<80>();
#endif
    const int me = warp - CONSUMERS * 4, warps = CONSUMERS * 4;
    if (me == 0 && lane == 0) wait_for_packing();
    const int size_d = problem.input_size[0], size_h = problem.input_size[1], size_w = problem.input_size[2];
    const bool whole_cells = takes_whole_cells(problem, input) && set_inputs % VECTOR == 0;
    // Cells of a position that a thread has on their way: 32 channels.
    constexpr int BATCH = SPECIALIZED(CELLS < 32 / VECTOR ? CELLS : 32 / VECTOR, 32 / VECTOR);
    for (int i = 0, set = -1; i < count; ++i, advance(unit, step, problem.batch, tiles_d, tiles_h, tiles_w)) {
      if (unit.set != set) {
        set = unit.set;
        if (me == 0 && lane == 0) {
          mbarrier_wait_patiently(weights_empty, weights_parity ^ 1u);
          mbarrier_arrive_expect(weights_full, static_cast<unsigned>(weight_bytes));
          const unsigned char* const source =
              reinterpret_cast<const unsigned char*>(packed_weight) + static_cast<index_t>(set) * weight_bytes;
          for (int at = 0; at < weight_bytes; at += 16384) {
            bulk_copy(weight_base + static_cast<unsigned>(at), source + at,
                      static_cast<unsigned>(min(16384, weight_bytes - at)), weights_full);
          }
        }
        weights_parity ^= 1u;
      }
      const int from_d = unit.d * CONSUMERS + lowest_d, from_h = unit.h * patch_h + lowest_h,
                from_w = unit.w * row_blocks + lowest_w;
      const int first_channel = unit.set / channel_tiles * set_inputs;
      for (int chunk = 0; chunk < chunks; ++chunk, next_slot()) {
        mbarrier_wait_patiently(empty + static_cast<unsigned>(slot) * 8, parity ^ 1u);
        Cell* const target = reinterpret_cast<Cell*>(shared + HEADER + weight_bytes + slot * stage_bytes);
        const int parts = ceil_div(cells, BATCH);
#pragma unroll 1
        for (int item = me; item < ceil_div(window, 32) * parts; item += warps) {
          const int position = item / parts * 32 + lane, cell = item % parts * BATCH;
          if (position >= window) continue;
          const int w = from_w + position % window_w, h = from_h + position / window_w % window_h,
                    d = from_d + position / window_w / window_h;
          const bool inside = static_cast<unsigned>(d) < static_cast<unsigned>(size_d) &&
                              static_cast<unsigned>(h) < static_cast<unsigned>(size_h) &&
                              static_cast<unsigned>(w) < static_cast<unsigned>(size_w);
          const int ahead = (chunk * cells + cell) * VECTOR, live = inside ? set_inputs - ahead : 0;
          const scalar_t* const source = live > 0 ? input.at(unit.n, first_channel + ahead, d, h, w) : input.data;
          if (whole_cells) {
            Cell loaded[BATCH];
#pragma unroll
            for (int c = 0; c < BATCH; ++c) {
              const bool there = c * VECTOR < live && cell + c < cells;
              loaded[c] = there ? reinterpret_cast<const Cell*>(source)[c] : Cell{{0, 0, 0, 0}};
            }
#pragma unroll
            for (int c = 0; c < BATCH; ++c) {
              scalar_t values[VECTOR];
              memcpy(values, &loaded[c], sizeof values);
              if (cells % BATCH == 0 || cell + c < cells) target[(cell + c) * positions + position] = cell_of(values);
            }
          } else {
            scalar_t values[BATCH][VECTOR];
            if (set_inputs - ahead >= BATCH * VECTOR) {
              // No condition for each: a lane whose position lies outside reads one element again and again, and drops it.
              const index_t step = inside ? input.stride[1] * static_cast<index_t>(sizeof(scalar_t)) : 0;
              const scalar_t* next = source;
#pragma unroll
              for (int v = 0; v < BATCH * VECTOR; ++v, next = advanced(next, step)) values[v / VECTOR][v % VECTOR] = *next;
#pragma unroll
              for (int v = 0; v < BATCH * VECTOR; ++v) {
                if (!inside) values[v / VECTOR][v % VECTOR] = to_scalar(accum_t(0));
              }
            } else {
#pragma unroll
              for (int v = 0; v < BATCH * VECTOR; ++v) {
                values[v / VECTOR][v % VECTOR] = v < live ? source[v * input.stride[1]] : to_scalar(accum_t(0));
              }
            }
#pragma unroll
            for (int c = 0; c < BATCH; ++c) {
              if (cells % BATCH == 0 || cell + c < cells) target[(cell + c) * positions + position] = cell_of(values[c]);
            }
          }
        }
        mbarrier_arrive(full + static_cast<unsigned>(slot) * 8);
      }
    }
    return;
  }

#if CONSUMERS == 2
  take_registers<176>();
#endif
  const int warpgroup = warp / 4;
  float sums[SPECIALIZED(classes * class_sums, 128)];
  // How outputs are stored: rows of 16 blocks and more through shared memory, pairs of neighbours along w, pairs of channels, or one by one.
  CONSTANT int lane_eights = SPECIALIZED(LANE_EIGHTS, 1);
  CONSTANT bool channel_runs = SPECIALIZED(CHANNEL_RUNS, 0) != 0;
  const bool in_runs = !channel_runs && lane_eights == 1 && row_blocks > 8 && output.stride[4] == 1;
  const bool even_rows = stride_w == 2 && made_of_vectors(output, 4, 2) && problem.output_size[2] % 2 == 0,
             even_channels = set_outputs % 2 == 0 && made_of_vectors(output, 1, 2);
  CONSTANT bool in_pairs = stride_w == 2;
  CONSTANT int run_pitch = row_blocks * stride_w + VECTOR;
  scalar_t* const own_runs =
      reinterpret_cast<scalar_t*>(shared + HEADER + weight_bytes + stages * stage_bytes + warpgroup * runs * run_bytes);
  int turn = 0;
  // The 16 bytes that a lane names of a warp's 16 rows and two cells, at the lowest input.
  const int named_row = warp % 4 * 16 + lane % 16, named_position = named_row / row_blocks * window_w + named_row % row_blocks;
  const unsigned first_rows =
      stage_base + static_cast<unsigned>(warpgroup * window_h * window_w + named_position + lane / 16 * positions) * 16;
  constexpr int STEPS_K =
      SPECIALIZED(classes * class_sums <= 64 ? 2 : 1, 2);  // of 32 bytes of channels, whose rows a lane has at a time
  unsigned rows[2][STEPS_K][4];
  const unsigned first_weight = wgmma_operand(weight_base, static_cast<unsigned>(columns) * 16);
  bool spoilt = false;  // some sum of groups that are put together was NaN

  for (int i = 0, set = -1; i < count; ++i, advance(unit, step, problem.batch, tiles_d, tiles_h, tiles_w)) {
    if (unit.set != set) {
      if (set >= 0 && lane == 0) mbarrier_arrive(weights_empty);
      set = unit.set;
      mbarrier_wait(weights_full, weights_parity);
      weights_parity ^= 1u;
    }
    const int first_channel = unit.set % channel_tiles * columns, group_channel = unit.set / channel_tiles * set_outputs;
    int quad = computed_anew(lane) % 4;
    const auto start_of = [&](int eight, int c) {
      const int channel = first_channel + channel_of_column(eight * 8 + quad * 2 + c, lane_eights);
      return epilogue.start(group_channel + channel, channel < set_outputs);
    };
    FOR_EACH(columns / 8)([&](auto eight) {
      const float start[2] = {start_of(NUMBER(eight), 0), start_of(NUMBER(eight), 1)};
#pragma unroll
      for (int s = 0; s < classes; ++s) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[s * class_sums + NUMBER(eight) * 4 + e] = start[e % 2];
      }
    });
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk, next_slot()) {
      mbarrier_wait(full + static_cast<unsigned>(slot) * 8, parity);
      const unsigned a_chunk = first_rows + static_cast<unsigned>(slot * stage_bytes);
      const unsigned b_chunk =
          first_weight + static_cast<unsigned>(chunk * TAPS_D.count * TAPS_H.count * TAPS_W.count * cells * columns);
      CONSTANT int batches = (cells / 2 + STEPS_K - 1) / STEPS_K;
      // An input's rows are read once for all taps that meet there, while those of the input before are multiplied. (One loop over all
      // inputs and one over their taps: nested loops take the compiler longer.)
      FOR_EACH(TAPS_D.steps * TAPS_H.steps * TAPS_W.steps * batches)([&](auto at) {
        CONSTANT int number = NUMBER(at), at_w = number / batches % TAPS_W.steps,
                     at_h = number / batches / TAPS_W.steps % TAPS_H.steps,
                     at_d = number / batches / TAPS_W.steps / TAPS_H.steps;
        CONSTANT int first_d = TAPS_D.step_first[at_d], first_h = TAPS_H.step_first[at_h], first_w = TAPS_W.step_first[at_w];
        CONSTANT int place = ((TAPS_D.ahead[first_d] - lowest_d) * window_h + TAPS_H.ahead[first_h] - lowest_h) * window_w +
                             TAPS_W.ahead[first_w] - lowest_w;
        CONSTANT int first_k = number % batches * STEPS_K;
        auto& own = rows[number % 2];
#pragma unroll
        for (int k = 0; k < STEPS_K; ++k) {
          if ((first_k + k) * 2 < cells) {
            ldmatrix_x4(own[k], a_chunk + static_cast<unsigned>((place + (first_k + k) * 2 * positions) * 16));
          }
        }
        CONSTANT int more_h = TAPS_H.step_taps[at_h], more_w = TAPS_W.step_taps[at_w];
        wgmma_fence();
        FOR_EACH(TAPS_D.step_taps[at_d] * more_h * more_w)([&](auto more) {
          CONSTANT int td = first_d + NUMBER(more) / more_w / more_h, th = first_h + NUMBER(more) / more_w % more_h,
                       tw = first_w + NUMBER(more) % more_w;
          CONSTANT int rank_d = TAPS_D.rank[TAPS_D.place[td]], rank_h = TAPS_H.rank[TAPS_H.place[th]],
                       rank_w = TAPS_W.rank[TAPS_W.place[tw]];
          CONSTANT int first = ((rank_d * TAPS_H.classes + rank_h) * TAPS_W.classes + rank_w) * class_sums;
          CONSTANT int tap = (td * TAPS_H.count + th) * TAPS_W.count + tw;
          const unsigned b = b_chunk + static_cast<unsigned>(tap * cells * columns);
#pragma unroll
          for (int k = 0; k < STEPS_K; ++k) {
            if ((first_k + k) * 2 < cells) {
              wgmma_registers(&sums[first], own[k], b + static_cast<unsigned>((first_k + k) * 2 * columns), 1u, columns);
            }
          }
        });
        wgmma_commit();
        wgmma_wait<1>();  // the other rows have been multiplied
      });
      mbarrier_arrive(empty + static_cast<unsigned>(slot) * 8);
      if (TAPS_D.steps * TAPS_H.steps * TAPS_W.steps * batches % 2 != 0)
        wgmma_wait<0>();  // else the next chunk begins with the other rows
    }
    wgmma_wait<0>();

    // Rows lane / 4 and lane / 4 + 8 of a warp's 16: of a row of blocks, or of two neighbouring rows of 8.
    const int block_d = unit.d * CONSUMERS + warpgroup, block_h = unit.h * patch_h, block_w = unit.w * row_blocks;
    FOR_EACH(stride_d * stride_h)([&](auto e) {
      CONSTANT int ed = NUMBER(e) / stride_h, eh = NUMBER(e) % stride_h;
      forget_memory();
      const int thread_now = computed_anew(thread) % 128, row = thread_now / 32 * 16 + thread_now % 32 / 4;
      quad = thread_now % 4;
      // The output of a place `ew` of w: with no taps, the bias.
      const auto sum_of = [&](auto ew, int eight, int half, int c) {
        CONSTANT int rank_d = TAPS_D.rank[ed], rank_h = TAPS_H.rank[eh], rank_w = TAPS_W.rank[NUMBER(ew)];
        CONSTANT bool reached = rank_d >= 0 && rank_h >= 0 && rank_w >= 0;
        CONSTANT int first = ((rank_d * TAPS_H.classes + rank_h) * TAPS_W.classes + rank_w) * class_sums;
        const float sum = reached ? sums[reached ? first + eight * 4 + half * 2 + c : 0] : start_of(eight, c);
        if (MERGE_GROUPS) spoilt = spoilt || sum != sum;
        return sum;
      };
      const auto pair_of = [&](int eight, int half, int c) {
        float sums_of_pair[2];
        FOR_EACH(2)([&](auto ew) { sums_of_pair[NUMBER(ew)] = sum_of(ew, eight, half, c); });
        return epilogue.finish_pair(sums_of_pair[0], sums_of_pair[1]);
      };
      const int d = block_d * stride_d + ed;
      if (in_runs) {
        const int h = block_h * stride_h + eh, w = block_w * stride_w;
        const index_t origin = unit.n * output.stride[0] + (group_channel + first_channel) * output.stride[1] +
                               d * output.stride[2] + h * output.stride[3] + w * output.stride[4];
        scalar_t* const run = own_runs + turn * (run_bytes / static_cast<int>(sizeof(scalar_t)));
        if (++turn == runs) turn = 0;
        if (runs == 1) sync_warpgroup(warpgroup);  // what it held has been stored; of two runs, a barrier ago
        // A column's elements begin at the place in 16 bytes that they have in the output; pairs of them at an even one, perhaps one
        // behind. Columns that are VECTOR apart begin at the same place.
        const unsigned first_element =
            static_cast<unsigned>(reinterpret_cast<unsigned long long>(output.data) / sizeof(scalar_t)) +
            static_cast<unsigned>(origin);
        const index_t next_row = stride_h * output.stride[3];
        const auto shift_of = [&](unsigned column, int patch_row) {
          return (first_element + column * static_cast<unsigned>(output.stride[1]) +
                  static_cast<unsigned>(patch_row) * static_cast<unsigned>(next_row)) %
                 VECTOR;
        };
        const auto begin_of = [&](unsigned column, unsigned shift) {
          return column * run_pitch + (in_pairs ? shift + shift % 2 : shift);
        };
#pragma unroll
        for (unsigned c = 0; c < 2; ++c) {
          const unsigned first = static_cast<unsigned>(quad) * 2 + c;
          const int patch_row = row / row_blocks;
          scalar_t* const begin =
              run + patch_row * columns * run_pitch + begin_of(first, shift_of(first, patch_row)) + row % row_blocks * stride_w;
#pragma unroll
          for (int eight = 0; eight < columns / 8; ++eight) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              scalar_t* const place = begin + eight * 8 * run_pitch + half * 8 * stride_w;
              if (in_pairs) {
                *reinterpret_cast<Vector<2>*>(place) = pair_of(eight, half, static_cast<int>(c));
              } else {
                FOR_EACH(stride_w)(
                    [&](auto ew) { place[NUMBER(ew)] = epilogue.finish(sum_of(ew, eight, half, static_cast<int>(c))); });
              }
            }
          }
        }
        sync_warpgroup(warpgroup);
        if (d >= problem.output_size[0]) return;
        // So many threads for a column and every other that begins at the same place: each stores 16 bytes, and perhaps an element before
        // or behind all of these.
        CONSTANT unsigned row_cells = row_blocks * stride_w / VECTOR, threads = in_pairs && row_cells > 16 ? row_cells : 16;
        CONSTANT int apart = 128 / static_cast<int>(threads);
        const unsigned length = static_cast<unsigned>(min(row_blocks * stride_w, problem.output_size[2] - w));
        const unsigned cell = static_cast<unsigned>(thread_now) % threads, column = static_cast<unsigned>(thread_now) / threads;
        const index_t ahead = apart * output.stride[1] * static_cast<index_t>(sizeof(scalar_t));
        const int left = set_outputs - first_channel - static_cast<int>(column);
#pragma unroll
        for (int patch_row = 0; patch_row < patch_h; ++patch_row) {
          if (h + patch_row * stride_h >= problem.output_size[1]) return;
          const scalar_t* const line = run + patch_row * columns * run_pitch;
          scalar_t* const target = output.data + origin + patch_row * next_row;
          const unsigned shift = shift_of(column, patch_row), head = min((0u - shift) % VECTOR, length),
                         whole = (length - head) / VECTOR;
          const unsigned edge = cell < VECTOR ? cell : head + (whole - 1) * VECTOR + cell;
          const bool has_edge = edge < (cell < VECTOR ? head : length);
          const scalar_t* const from_edge = has_edge ? line + begin_of(column, shift) + edge : line;
          const Cell* const from_cell = reinterpret_cast<const Cell*>(line + column * run_pitch + (shift == 0 ? 0u : VECTOR));
          scalar_t* to_edge = target + (column * output.stride[1] + edge);
          scalar_t* to_cell = target + (column * output.stride[1] + (head + cell * VECTOR));
#pragma unroll
          for (int at = 0; at < columns; at += apart) {
            if (has_edge && at < left) *to_edge = from_edge[at * run_pitch];
#pragma unroll
            for (unsigned more = 0; more < row_cells; more += threads) {
              Cell kept = from_cell[at * run_pitch / VECTOR + min(cell + more, row_cells - 1)];
              if (in_pairs) kept = moved_cell(kept, shift % 2 != 0);
              if (cell + more < whole && at < left) store_in_order(to_cell + more * VECTOR, kept);
            }
            to_edge = advanced(to_edge, ahead), to_cell = advanced(to_cell, ahead);
          }
        }
        return;
      }
      if (channel_runs) {
        const int column = channel_of_column(quad * 2, lane_eights),
                  left = d < problem.output_size[0] ? min(columns, set_outputs - first_channel) - column : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int m = row + half * 8, h = (block_h + m / row_blocks) * stride_h + eh,
                    w = (block_w + m % row_blocks) * stride_w;
          scalar_t* target = output.at(unit.n, group_channel + first_channel + column, d, h, w);
          FOR_EACH(stride_w)([&](auto ew) {
            const auto channels_of = [&](int eight) {
              LaneChannels channels;
#pragma unroll
              for (int e = 0; e < lane_eights; ++e) {
                channels.element[e] = epilogue.finish_pair(sum_of(ew, eight + e, half, 0), sum_of(ew, eight + e, half, 1));
              }
              return channels;
            };
            const bool live = h < problem.output_size[1] && w + NUMBER(ew) < problem.output_size[2];
            LaneChannels own = channels_of(0), later = own;
#pragma unroll
            for (int eight = 0; eight < columns / 8; eight += lane_eights) {
              if (eight + lane_eights < columns / 8) later = channels_of(eight + lane_eights);
              store_lane_channels_anywhere(target + eight * 8, own, later, live ? left - eight * 8 : 0, eight == 0 && quad == 0,
                                           thread_now % 32, lane_eights);
              own = later;
            }
            target = advanced(target, output.stride[4] * static_cast<index_t>(sizeof(scalar_t)));
          });
        }
        return;
      }
      if (lane_eights > 1 && even_channels) {  // they are; without looking, the compiler spills a number
        const int left =
            d < problem.output_size[0] ? set_outputs - first_channel - channel_of_column(quad * 2, lane_eights) : 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int m = row + half * 8, h = (block_h + m / row_blocks) * stride_h + eh,
                    w = (block_w + m % row_blocks) * stride_w;
          scalar_t* target =
              output.at(unit.n, group_channel + first_channel + channel_of_column(quad * 2, lane_eights), d, h, w);
          FOR_EACH(stride_w)([&](auto ew) {
            const bool live = h < problem.output_size[1] && w + NUMBER(ew) < problem.output_size[2];
#pragma unroll
            for (int eight = 0; eight < columns / 8; eight += lane_eights) {
              LaneChannels channels;
#pragma unroll
              for (int e = 0; e < lane_eights; ++e) {
                channels.element[e] = epilogue.finish_pair(sum_of(ew, eight + e, half, 0), sum_of(ew, eight + e, half, 1));
              }
              if (live && left > eight * 8) store_lane_channels(target + eight * 8, channels, lane_eights);
            }
            target = advanced(target, output.stride[4] * static_cast<index_t>(sizeof(scalar_t)));
          });
        }
        return;
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int m = row + half * 8, h = (block_h + m / row_blocks) * stride_h + eh, w = (block_w + m % row_blocks) * stride_w;
        const bool live = d < problem.output_size[0] && h < problem.output_size[1];
        scalar_t* target = output.at(unit.n, group_channel + first_channel + quad * 2, d, h, w);
#pragma unroll
        for (int eight = 0; eight < columns / 8; ++eight, target += 8 * output.stride[1]) {
          const int left = set_outputs - first_channel - eight * 8 - quad * 2;
          if (even_channels) {
            FOR_EACH(stride_w)([&](auto ew) {
              const Vector<2> pair = epilogue.finish_pair(sum_of(ew, eight, half, 0), sum_of(ew, eight, half, 1));
              if (live && w + NUMBER(ew) < problem.output_size[2] && left > 0) {
                *reinterpret_cast<Vector<2>*>(target + NUMBER(ew) * output.stride[4]) = pair;
              }
            });
            continue;
          }
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            scalar_t* const place = target + c * output.stride[1];
            if (even_rows) {
              const Vector<2> pair = pair_of(eight, half, c);
              if (live && w < problem.output_size[2] && left > c) *reinterpret_cast<Vector<2>*>(place) = pair;
              continue;
            }
            FOR_EACH(stride_w)([&](auto ew) {
              const scalar_t sum = epilogue.finish(sum_of(ew, eight, half, c));
              if (live && w + NUMBER(ew) < problem.output_size[2] && left > c) place[NUMBER(ew) * output.stride[4]] = sum;
            });
          }
        }
      }
    });
  }

  if (!MERGE_GROUPS) return;
  int* const spoilt_warps = reinterpret_cast<int*>(shared + HEADER) - CONSUMERS * 4;
  const bool any = __any_sync(~0u, spoilt);
  if (lane == 0) spoilt_warps[warp] = any;
  sync_warpgroup(warpgroup);  // all outputs are stored
  const int* const own = spoilt_warps + warpgroup * 4;
  if ((own[0] | own[1] | own[2] | own[3]) == 0) return;
  const int inputs = problem.in_channels / problem.groups, outputs = problem.out_channels / problem.groups;
  const int height = patch_h * stride_h, width = row_blocks * stride_w;
  unit = begin;
#pragma unroll 1
  for (int i = 0; i < count; ++i, advance(unit, step, problem.batch, tiles_d, tiles_h, tiles_w)) {
    const int first_channel = unit.set % channel_tiles * columns, channels = min(columns, set_outputs - first_channel);
#pragma unroll 1
    for (int at = thread % 128; at < channels * stride_d * height * width; at += 128) {
      const int w = unit.w * width + at % width, h = unit.h * height + at / width % height,
                d = (unit.d * CONSUMERS + warpgroup) * stride_d + at / width / height % stride_d;
      const int channel = unit.set / channel_tiles * set_outputs + first_channel + at / width / height / stride_d;
      if (d >= problem.output_size[0] || h >= problem.output_size[1] || w >= problem.output_size[2]) continue;
      scalar_t* const y = output.at(unit.n, channel, d, h, w);
      if (to_accum(*y) != to_accum(*y)) {
        *y =
            gathered(problem, input, weight, epilogue, unit.n, channel, channel % outputs, channel / outputs * inputs, d, h, w);
      }
    }
  }
}
