/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "bf16", "fp16"]
[constants]
tile_voxels = "TILE_VOXELS // operand_parts"
widest_tile = "64 if operand_parts == 1 and (out_channels_per_group % 64 == 0 or out_channels_per_group % 48 != 0) else 48 if operand_parts == 1 or out_channels_per_group % 48 == 0 else 32"
narrow_tile = "8 if out_channels_per_group <= 8 else 16 if out_channels_per_group <= 16 else 24 if out_channels_per_group <= 24 else 32 if out_channels_per_group <= 32 else 48"
tile_channels = "narrow_tile if out_channels_per_group <= 48 else widest_tile"
channel_tiles = "ceil_div(out_channels_per_group, tile_channels)"
channel_chunks = "ceil_div(in_channels_per_group, 32 // itemsize)"
packed_cells = "groups * channel_tiles * channel_chunks * taps * operand_parts * 2 * tile_channels"
row_halo = "(kernel_w - 1) * dilation_w // stride_w"
column_halo = "(kernel_h - 1) * dilation_h // stride_h"
row_pitch = "ceil_div(output_w, stride_w) + row_halo"
plane_halo = "column_halo * row_pitch + row_halo"
rows_inside = "1 if plane_halo <= MAX_HALO and kernel_h * kernel_w <= MAX_TAPS else 0"
run = "tile_voxels + (plane_halo if rows_inside else row_halo)"
class_positions = "ceil_div(output_d, stride_d) * (ceil_div(output_h, stride_h) + (column_halo if rows_inside else 0)) * row_pitch"
voxel_tiles = "ceil_div(class_positions, tile_voxels)"
staged_taps = "min(STAGE_TAPS, kernel_h * kernel_w if rows_inside else kernel_w)"
shared_bytes = "16 * (operand_parts * (4 * run + STAGES * staged_taps * 2 * tile_channels) + run) + 8 * MAX_TAPS"
[restrictions]
"row_halo <= MAX_HALO" = "the taps of a row reach further than MAX_HALO inputs, so the staged tile does not fit in shared memory"
"kernel_w <= MAX_TAPS" = "a row has more than MAX_TAPS taps, the length of the tap table in shared memory"
"class_positions <= 1073741824" = "a residue class has more than 2^30 positions, past the 32-bit offsets inside it"
[workspace]
packed = "4 * packed_cells"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_mma_pack"
packs = "packed"
grid = "ceil_div(packed_cells, 256)"
block = 256
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_mma_8"
when = "tile_channels == 8"
grid = "batch * groups * voxel_tiles * residues * channel_tiles"
block = 256
shared_bytes = "shared_bytes"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_mma_16"
when = "tile_channels == 16"
grid = "batch * groups * voxel_tiles * residues * channel_tiles"
block = 256
shared_bytes = "shared_bytes"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_mma_24"
when = "tile_channels == 24"
grid = "batch * groups * voxel_tiles * residues * channel_tiles"
block = 256
shared_bytes = "shared_bytes"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_mma_32"
when = "tile_channels == 32"
grid = "batch * groups * voxel_tiles * residues * channel_tiles"
block = 256
shared_bytes = "shared_bytes"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_mma_48"
when = "tile_channels == 48"
grid = "batch * groups * voxel_tiles * residues * channel_tiles"
block = 256
shared_bytes = "shared_bytes"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_mma_64"
when = "tile_channels == 64"
grid = "batch * groups * voxel_tiles * residues * channel_tiles"
block = 256
shared_bytes = "shared_bytes"
*/
// Implicit GEMM on tensor cores by mma.sync. A residue class is a dense correlation, and its outputs are numbered so that a tap is
// one shift of a linear index: rows of `row_pitch` positions, planes of `plane_pitch` rows, long enough that a shift past the end
// of a row or plane meets zeros (or an output that is not stored). A block owns tile_voxels such positions of one class and
// N = tile_channels channels of one group. For each depth tap and each chunk of 32 bytes of input channels it
//   - stages the run of positions that all taps of the plane reach, tile_voxels + halo, once:
//       inputs  [part][half chunk][position] of 16-byte cells (4 tf32 or 8 16-bit channels), double-buffered;
//   - streams the packed weights through a ring of STAGES stages of up to STAGE_TAPS taps each:
//       weights [tap][part][half chunk][N] of the same cells, which are fragments after one ldmatrix;
//   - for each tap multiplies: 8 warps, each (tile_voxels / 8) x N sums, A from inputs at the tap's shift, B from weights.
// Inputs pass through registers (coalesced loads along w, rounded to TF32, stored as cells); 16-bit channels_last inputs are
// cells already and are copied by cp.async. tf32x3 splits x into hi + lo and adds hi*hi, hi*lo and lo*hi; the sums of hi*hi leave
// the tensor cores, which cut off what they add, for fp32 registers after each stage.
#include "convt3d.cuh"

#include "convt3d/mma.cuh"

#ifndef TILE_VOXELS
#define TILE_VOXELS 512
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef STAGE_TAPS
#define STAGE_TAPS 3
#endif
#ifndef MAX_HALO
#define MAX_HALO 384
#endif
#ifndef MAX_TAPS
#define MAX_TAPS 256
#endif

#if defined(CONVT3D_TF32X3)
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int VOXELS = TILE_VOXELS / PARTS, M_TILES = VOXELS / (16 * WARPS);
constexpr int CELL = 16 / static_cast<int>(sizeof(scalar_t)), CHUNK = 2 * CELL;  // channels
constexpr int PREFETCH = 2;  // positions that a thread holds in registers between load and store
static_assert(M_TILES * 16 * WARPS * PARTS == TILE_VOXELS, "each warp owns whole m16 tiles");
static_assert(STAGES >= 2, "a stage is filled while another is read");

#if defined(CONVT3D_BF16)
#define CONVT3D_MULTIPLY mma_bf16
#elif defined(CONVT3D_FP16)
#define CONVT3D_MULTIPLY mma_fp16
#else
#define CONVT3D_MULTIPLY mma_tf32
#endif

// The cells of `CELL` channels: one for each part.
__device__ inline void make_cells(const float (&x)[4], uint4 (&cells)[PARTS]) {
  cells[0] = make_uint4(round_to_tf32(x[0]), round_to_tf32(x[1]), round_to_tf32(x[2]), round_to_tf32(x[3]));
  if (PARTS == 1) return;
  const unsigned hi[4] = {cells[0].x, cells[0].y, cells[0].z, cells[0].w};
  unsigned lo[4];
  for (int i = 0; i < 4; ++i) lo[i] = round_to_tf32(x[i] - __uint_as_float(hi[i]));
  cells[PARTS - 1] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
}

template <class Narrow>
__device__ inline void make_cells(const Narrow (&x)[8], uint4 (&cells)[PARTS]) {
  unsigned pairs[4];
  for (int i = 0; i < 4; ++i) pairs[i] = x[2 * i].bits | static_cast<unsigned>(x[2 * i + 1].bits) << 16;
  cells[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// packed[group][channel tile][chunk][tap][part][half chunk][N]: a thread makes the cells of one (.., tap, .., half chunk, n).
extern "C" __global__ void convt3d_fprop_implicit_gemm_mma_pack(const Problem problem, const View<const scalar_t> weight,
                                                                uint4* __restrict__ packed, const int tile_channels,
                                                                const int channel_tiles, const int channel_chunks,
                                                                const int taps, const long long packed_cells) {
  const long long index = blockIdx.x * 256LL + threadIdx.x;
  if (index * PARTS >= packed_cells) return;
  long long rest = index;  // tap fastest, as the weight has it
  const int tap = static_cast<int>(rest % taps);
  rest /= taps;
  const int n = static_cast<int>(rest % tile_channels);
  rest /= tile_channels;
  const int half = static_cast<int>(rest % 2);
  rest /= 2;
  const int chunk = static_cast<int>(rest % channel_chunks);
  rest /= channel_chunks;
  const int channel_tile = static_cast<int>(rest % channel_tiles), group = static_cast<int>(rest / channel_tiles);

  const int channels = problem.in_channels / problem.groups, co = channel_tile * tile_channels + n;
  const int first = chunk * CHUNK + half * CELL;
  const int kw = tap % problem.kernel_size[2], kh = tap / problem.kernel_size[2] % problem.kernel_size[1],
            kd = tap / (problem.kernel_size[2] * problem.kernel_size[1]);
  const scalar_t* source = weight.at(group * channels + first, co, kd, kh, kw);
  scalar_t values[CELL];
  for (int i = 0; i < CELL; ++i) {
    const bool live = co < problem.out_channels / problem.groups && first + i < channels;
    values[i] = live ? source[i * weight.stride[0]] : scalar_t();
  }
  uint4 cells[PARTS];
  make_cells(values, cells);
  const long long slab = ((rest * channel_chunks + chunk) * taps + tap) * PARTS;
  for (int part = 0; part < PARTS; ++part) packed[((slab + part) * 2 + half) * tile_channels + n] = cells[part];
}

// Where a staged position lies in the input: its offset from (depth origin, row origin, 0), and depth and row from there.
struct alignas(16) Position {
  long long offset;
  int depth, row;
};

// Positions per row (or rows per plane) of a class: as few as keep what wraps around zero, where the reading output is stored.
__device__ inline int pitch_of(const AxisClass& axis, int first_q, int input_size) {
  if (axis.taps == 0) return axis.outputs;
  const int span = (axis.taps - 1) * axis.offset_step, last_offset = axis.first_offset + span;
  const long long inputs_end = static_cast<long long>(input_size) + last_offset - first_q;
  const long long reach = static_cast<long long>(first_q) + axis.outputs - axis.first_offset;
  const long long shared_zeros = max(static_cast<long long>(axis.outputs), max(inputs_end, reach));
  return static_cast<int>(min(static_cast<long long>(axis.outputs) + span, shared_zeros));
}

template <int N_TILES>
__device__ inline void add(float (&sums)[M_TILES][N_TILES][4], const float (&more)[M_TILES][N_TILES][4]) {
  for (int i = 0; i < M_TILES; ++i) {
    for (int j = 0; j < N_TILES; ++j) {
      for (int e = 0; e < 4; ++e) sums[i][j][e] += more[i][j][e];
    }
  }
}

// One warp's products of one tap: `inputs` and `weights` are the addresses of this lane's row for ldmatrix.
template <int N_TILES>
__device__ inline void multiply(float (&high)[M_TILES][N_TILES][4], float (&low)[M_TILES][N_TILES][4], shared_address_t inputs,
                                shared_address_t weights, int run) {
  unsigned a[PARTS][M_TILES][4];
  for (int part = 0; part < PARTS; ++part) {
    for (int i = 0; i < M_TILES; ++i) ldmatrix_x4(a[part][i], inputs + (part * 2 * run + i * 16) * 16);
  }
#pragma unroll
  for (int j = 0; j < N_TILES; j += 2) {
    unsigned b[PARTS][2][2];
    for (int part = 0; part < PARTS; ++part) {
      const shared_address_t row = weights + (part * 2 * N_TILES + j) * 8 * 16;
      if (j + 1 < N_TILES) {
        unsigned both[4];
        ldmatrix_x4(both, row);
        for (int r = 0; r < 4; ++r) b[part][r / 2][r % 2] = both[r];
      } else {
        ldmatrix_x2(b[part][0], row);
      }
    }
    for (int k = 0; k < 2 && j + k < N_TILES; ++k) {
      for (int i = 0; i < M_TILES; ++i) {
        if (PARTS == 2) {
          CONVT3D_MULTIPLY(low[i][j + k], a[PARTS - 1][i], b[0][k][0], b[0][k][1]);
          CONVT3D_MULTIPLY(low[i][j + k], a[0][i], b[PARTS - 1][k][0], b[PARTS - 1][k][1]);
        }
        CONVT3D_MULTIPLY(high[i][j + k], a[0][i], b[0][k][0], b[0][k][1]);
      }
    }
  }
}

// A place in the sequence of stages: depth taps (with rows outside the run: depth and row taps), chunks, taps of the run.
struct Cursor {
  int outer, chunk, tap;
};

template <int N>
__device__ inline void convolve(const Problem& problem, const View<const scalar_t>& input, const uint4* __restrict__ packed,
                                const scalar_t* __restrict__ bias, const View<scalar_t>& output, int voxel_tiles,
                                int channel_tiles, int run, int staged_taps, bool rows_inside) {
  constexpr int N_TILES = N / 8;
  constexpr int TAP_CELLS = PARTS * 2 * N;
  extern __shared__ uint4 shared[];
  uint4* const inputs = shared;                                // [2][PARTS][2][run]
  uint4* const weights = inputs + 2 * PARTS * 2 * run;         // [STAGES][staged_taps][TAP_CELLS]
  Position* const positions = reinterpret_cast<Position*>(weights + STAGES * staged_taps * TAP_CELLS);  // [run]
  int2* const taps = reinterpret_cast<int2*>(positions + run);                                          // shift, index in weight

  // blockIdx.x = (((n * groups + group) * voxel_tiles + voxel tile) * residues + residue) * channel_tiles + channel tile:
  // the classes of a voxel tile run side by side and share what they read and the memory sectors they write.
  unsigned block = blockIdx.x;
  const int channel_tile = static_cast<int>(block % channel_tiles);
  block /= channel_tiles;
  AxisClass axis[3];
  int first_q[3];
  for (int a = 2; a >= 0; --a) {
    axis[a] = axis_class(problem, a, static_cast<int>(block % problem.stride[a]));
    first_q[a] = (axis[a].first_output + problem.padding[a]) / problem.stride[a];
    block /= problem.stride[a];
  }
  const int first_position = static_cast<int>(block % voxel_tiles) * VOXELS;
  block /= voxel_tiles;
  const int group = static_cast<int>(block % problem.groups), n = static_cast<int>(block / problem.groups);
  const int row_pitch = pitch_of(axis[2], first_q[2], problem.input_size[2]);
  const int plane_pitch = rows_inside ? pitch_of(axis[1], first_q[1], problem.input_size[1]) : axis[1].outputs;
  if (axis[1].outputs == 0 || axis[2].outputs == 0 || first_position >= axis[0].outputs * plane_pitch * row_pitch) return;

  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int chunks = (channels + CHUNK - 1) / CHUNK, kernel_taps = problem.kernel_size[1] * problem.kernel_size[2];
  const int run_taps = (rows_inside ? axis[1].taps : 1) * axis[2].taps;
  const int outers = axis[0].taps * (rows_inside ? 1 : axis[1].taps);
  const bool has_taps = axis[0].taps * axis[1].taps * axis[2].taps != 0;
  const int class_positions = axis[0].outputs * plane_pitch * row_pitch;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;

  // The tables: where each staged position is in the input, and each tap's shift. Depth (and row) origins come with the outer tap.
  const int last_w = axis[2].first_offset + (axis[2].taps - 1) * axis[2].offset_step;
  for (int i = thread; i < run && has_taps; i += THREADS) {
    const int position = first_position + i, row = position / row_pitch, w = first_q[2] - last_w + position % row_pitch;
    Position entry;
    entry.depth = row / plane_pitch;
    entry.row = row % plane_pitch;
    entry.offset = entry.depth * input.stride[2] + entry.row * input.stride[3] + w * input.stride[4];
    if (w < 0 || w >= problem.input_size[2]) entry.depth = -(1 << 30);  // outside whatever the origin
    positions[i] = entry;
  }
  for (int i = thread; i < run_taps && has_taps; i += THREADS) {
    const int h = i / axis[2].taps, w = i % axis[2].taps;
    const int rows_before = rows_inside ? (axis[1].taps - 1 - h) * axis[1].offset_step : 0;
    taps[i] = {rows_before * row_pitch + (axis[2].taps - 1 - w) * axis[2].offset_step,
               (rows_inside ? axis[1].first_tap + h * axis[1].tap_step : 0) * problem.kernel_size[2] + axis[2].first_tap +
                   w * axis[2].tap_step};
  }

  float sums[M_TILES][N_TILES][4], low[M_TILES][N_TILES][4] = {};
  for (int j = 0; j < N_TILES; ++j) {
    for (int e = 0; e < 4; ++e) {
      const int co = channel_tile * N + j * 8 + lane % 4 * 2 + e % 2;
      const bool has_bias = bias != nullptr && co < out_channels;
      const float start = has_bias ? to_accum(bias[group * out_channels + co]) : 0.0f;
      for (int i = 0; i < M_TILES; ++i) sums[i][j][e] = start;
    }
  }

  const bool vector_cells = input.stride[1] == 1 && channels % CELL == 0 &&
                            (reinterpret_cast<unsigned long long>(input.data) | input.stride[0] * sizeof(scalar_t) |
                             input.stride[2] * sizeof(scalar_t) | input.stride[3] * sizeof(scalar_t) |
                             input.stride[4] * sizeof(scalar_t)) % 16 == 0;
  const bool copied = vector_cells && sizeof(scalar_t) == 2;
  const int units = (run + PREFETCH * THREADS - 1) / (PREFETCH * THREADS);
  scalar_t staged[PREFETCH][2][CELL];

  struct Origin {
    const scalar_t* data;
    int depth, row, channels;
  };
  const auto origin_of = [&](const Cursor& at) {
    const int tap_d = rows_inside ? at.outer : at.outer / axis[1].taps, tap_h = rows_inside ? axis[1].taps - 1 : at.outer % axis[1].taps;
    Origin origin;
    origin.depth = first_q[0] - axis[0].first_offset - tap_d * axis[0].offset_step;
    origin.row = first_q[1] - axis[1].first_offset - tap_h * axis[1].offset_step;
    origin.channels = channels - at.chunk * CHUNK;
    origin.data = input.at(n, group * channels + at.chunk * CHUNK, origin.depth, origin.row, 0);
    return origin;
  };
  const auto find = [&](const Origin& origin, int i, const scalar_t*& source) {
    if (i >= run) return false;
    const Position entry = positions[i];
    source = origin.data + entry.offset;
    return static_cast<unsigned>(entry.depth) + origin.depth < static_cast<unsigned>(problem.input_size[0]) &&
           static_cast<unsigned>(entry.row) + origin.row < static_cast<unsigned>(problem.input_size[1]);
  };
  const auto copy_inputs = [&](const Cursor& at, int buffer) {
    const Origin origin = origin_of(at);
    for (int i = thread; i < run; i += THREADS) {
      const scalar_t* source = input.data;
      const bool live = find(origin, i, source);
      for (int half = 0; half < 2; ++half) {
        const bool whole = live && half * CELL < origin.channels;
        cp_async<16>(shared_address(inputs + (buffer * PARTS * 2 + half) * run + i), whole ? source + half * CELL : input.data,
                     whole ? 16 : 0);
      }
    }
  };
  const auto load_inputs = [&](const Cursor& at, int unit) {
    const Origin origin = origin_of(at);
#pragma unroll
    for (int j = 0; j < PREFETCH; ++j) {
      const scalar_t* source = nullptr;
      const bool live = find(origin, (unit * PREFETCH + j) * THREADS + thread, source);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (sizeof(scalar_t) == 4 && vector_cells) {
          const bool whole = live && half * CELL < origin.channels;
          const uint4 cell = whole ? *reinterpret_cast<const uint4*>(source + half * CELL) : uint4();
          memcpy(staged[j][half], &cell, 16);
        } else {
#pragma unroll
          for (int c = 0; c < CELL; ++c) {
            const bool whole = live && half * CELL + c < origin.channels;
            staged[j][half][c] = whole ? source[(half * CELL + c) * input.stride[1]] : scalar_t();
          }
        }
      }
    }
  };
  const auto store_inputs = [&](int unit, int buffer) {
#pragma unroll
    for (int j = 0; j < PREFETCH; ++j) {
      const int i = (unit * PREFETCH + j) * THREADS + thread;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4 cells[PARTS];
        make_cells(staged[j][half], cells);
        if (i < run) {
          for (int part = 0; part < PARTS; ++part) inputs[((buffer * PARTS + part) * 2 + half) * run + i] = cells[part];
        }
      }
    }
  };

  const long long group_slab = static_cast<long long>(group * channel_tiles + channel_tile) * chunks;
  const auto copy_weights = [&](const Cursor& at, int stage) {
    const int tap_d = rows_inside ? at.outer : at.outer / axis[1].taps, tap_h = rows_inside ? 0 : at.outer % axis[1].taps;
    const int plane = (axis[0].first_tap + tap_d * axis[0].tap_step) * kernel_taps +
                      (rows_inside ? 0 : (axis[1].first_tap + tap_h * axis[1].tap_step) * problem.kernel_size[2]);
    const uint4* source = packed + ((group_slab + at.chunk) * problem.kernel_size[0] * kernel_taps + plane) * TAP_CELLS;
    const int cells = min(staged_taps, run_taps - at.tap) * TAP_CELLS;
    const shared_address_t target = shared_address(weights + stage * staged_taps * TAP_CELLS);
    for (int i = thread; i < cells; i += THREADS) {
      cp_async<16>(target + i * 16, source + taps[at.tap + i / TAP_CELLS].y * TAP_CELLS + i % TAP_CELLS);
    }
  };
  const auto advance = [&](Cursor& at) {
    at.tap += staged_taps;
    if (at.tap < run_taps) return;
    at.tap = 0;
    if (++at.chunk < chunks) return;
    at.chunk = 0;
    ++at.outer;
  };

  const int warp_position = first_position + warp * M_TILES * 16;
  const bool idle = warp_position >= class_positions;
  const shared_address_t lane_inputs =
      shared_address(inputs) + ((lane / 16) * run + warp * M_TILES * 16 + lane % 16) * 16;
  const shared_address_t lane_weights = shared_address(weights) + ((lane / 8 % 2) * N + lane / 16 * 8 + lane % 8) * 16;
  const int steps_per_chunk = has_taps ? (run_taps + staged_taps - 1) / staged_taps : 0;
  const int interval = max(1, run_taps / units);
  const bool early_wait = copied && steps_per_chunk < STAGES - 1;

  __syncthreads();  // the tables are written
  Cursor ahead{0, 0, 0}, next_chunk{0, 0, 0};
  if (has_taps) {
    if (copied) {
      copy_inputs(next_chunk, 0);
    } else {
      for (int unit = 0; unit < units; ++unit) {
        load_inputs(next_chunk, unit);
        store_inputs(unit, 0);
      }
    }
    for (int stage = 0; stage < STAGES - 1; ++stage) {
      if (ahead.outer < outers) {
        copy_weights(ahead, stage);
        advance(ahead);
      }
      cp_async_commit();
    }
  }

  int stage = 0;
  const int all_chunks = has_taps ? outers * chunks : 0;
  for (int chunk = 0; chunk < all_chunks; ++chunk) {
    const int buffer = chunk % 2;
    if (++next_chunk.chunk == chunks) {
      next_chunk.chunk = 0;
      ++next_chunk.outer;
    }
    const bool has_next = chunk + 1 < all_chunks;
    int loaded = 0;  // units of the next chunk; the last one may still be in registers
    bool held = false;
    for (int first_tap = 0; first_tap < run_taps; first_tap += staged_taps) {
      if (first_tap == 0 && early_wait) {
        cp_async_wait<0>();
      } else {
        cp_async_wait<STAGES - 2>();
      }
      __syncthreads();  // this stage has landed for all, and the one before has been read by all
      if (first_tap == 0 && has_next && copied) copy_inputs(next_chunk, 1 - buffer);
      const int filled = stage == 0 ? STAGES - 1 : stage - 1;
      if (ahead.outer < outers) {
        copy_weights(ahead, filled);
        advance(ahead);
      }
      cp_async_commit();

      float high[M_TILES][N_TILES][4] = {};
      const int stop = min(first_tap + staged_taps, run_taps);
      shared_address_t tap_weights = lane_weights + stage * staged_taps * TAP_CELLS * 16;
      for (int tap = first_tap; tap < stop; ++tap, tap_weights += TAP_CELLS * 16) {
        if (has_next && !copied && tap % interval == 0) {
          if (held) store_inputs(loaded - 1, 1 - buffer);
          held = loaded < units;
          if (held) load_inputs(next_chunk, loaded++);
        }
        const shared_address_t tap_inputs = lane_inputs + (buffer * PARTS * 2 * run + taps[tap].x) * 16;
        if (!idle) multiply(PARTS == 1 ? sums : high, low, tap_inputs, tap_weights, run);
      }
      if (PARTS == 2) add(sums, high);
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    if (held) store_inputs(loaded - 1, 1 - buffer);
    for (; has_next && !copied && loaded < units; ++loaded) {
      load_inputs(next_chunk, loaded);
      store_inputs(loaded, 1 - buffer);
    }
  }
  if (PARTS == 2) add(sums, low);

#pragma unroll
  for (int i = 0; i < M_TILES * 2; ++i) {
    const int position = warp_position + i * 8 + lane / 4;
    const int row = position / row_pitch, w = position % row_pitch, h = row % plane_pitch, d = row / plane_pitch;
    if (w >= axis[2].outputs || h >= axis[1].outputs || d >= axis[0].outputs) continue;
    const int first_co = channel_tile * N + lane % 4 * 2;
    scalar_t* y = output.at(n, group * out_channels + first_co, axis[0].first_output + d * problem.stride[0],
                            axis[1].first_output + h * problem.stride[1], axis[2].first_output + w * problem.stride[2]);
#pragma unroll
    for (int j = 0; j < N_TILES; ++j) {
      for (int e = 0; e < 2; ++e) {
        if (first_co + j * 8 + e < out_channels) y[(j * 8 + e) * output.stride[1]] = to_scalar(sums[i / 2][j][i % 2 * 2 + e]);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convt3d_fprop_implicit_gemm_mma_8(const Problem problem, const View<const scalar_t> input, const uint4* __restrict__ packed,
                                      const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                      const int channel_tiles, const int run, const int staged_taps, const int rows_inside) {
  convolve<8>(problem, input, packed, bias, output, voxel_tiles, channel_tiles, run, staged_taps, rows_inside != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convt3d_fprop_implicit_gemm_mma_16(const Problem problem, const View<const scalar_t> input, const uint4* __restrict__ packed,
                                       const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                       const int channel_tiles, const int run, const int staged_taps, const int rows_inside) {
  convolve<16>(problem, input, packed, bias, output, voxel_tiles, channel_tiles, run, staged_taps, rows_inside != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convt3d_fprop_implicit_gemm_mma_24(const Problem problem, const View<const scalar_t> input, const uint4* __restrict__ packed,
                                       const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                       const int channel_tiles, const int run, const int staged_taps, const int rows_inside) {
  convolve<24>(problem, input, packed, bias, output, voxel_tiles, channel_tiles, run, staged_taps, rows_inside != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convt3d_fprop_implicit_gemm_mma_32(const Problem problem, const View<const scalar_t> input, const uint4* __restrict__ packed,
                                       const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                       const int channel_tiles, const int run, const int staged_taps, const int rows_inside) {
  convolve<32>(problem, input, packed, bias, output, voxel_tiles, channel_tiles, run, staged_taps, rows_inside != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convt3d_fprop_implicit_gemm_mma_48(const Problem problem, const View<const scalar_t> input, const uint4* __restrict__ packed,
                                       const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                       const int channel_tiles, const int run, const int staged_taps, const int rows_inside) {
  convolve<48>(problem, input, packed, bias, output, voxel_tiles, channel_tiles, run, staged_taps, rows_inside != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    convt3d_fprop_implicit_gemm_mma_64(const Problem problem, const View<const scalar_t> input, const uint4* __restrict__ packed,
                                       const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                       const int channel_tiles, const int run, const int staged_taps, const int rows_inside) {
  convolve<64>(problem, input, packed, bias, output, voxel_tiles, channel_tiles, run, staged_taps, rows_inside != 0);
}
