/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "bf16", "fp16"]
multiplies_padding = true
static_shared_bytes = 96
[constants]
operand_parts = "1 + split"
widest_tile = "64 if operand_parts == 1 and (out_channels_per_group % 64 == 0 or out_channels_per_group % 48 != 0) else 48 if operand_parts == 1 or out_channels_per_group % 48 == 0 else 32"
narrow_tile = "8 if out_channels_per_group <= 8 else 16 if out_channels_per_group <= 16 else 24 if out_channels_per_group <= 24 else 32 if out_channels_per_group <= 32 else 48"
tile_channels = "narrow_tile if out_channels_per_group <= 48 else widest_tile"
tile_voxels = "TILE_VOXELS // operand_parts // (2 if tile_channels % 32 == 0 and operand_parts == 1 else 1)"
channel_tiles = "ceil_div(out_channels_per_group, tile_channels)"
channel_chunks = "ceil_div(in_channels_per_group, 32 // itemsize)"
packed_cells = "groups * channel_tiles * channel_chunks * taps * operand_parts * 2 * tile_channels"
input_cell_count = "batch * groups * channel_chunks * operand_parts * 2 * input_voxels"
row_halo = "(kernel_w - 1) * dilation_w // stride_w"
column_halo = "(kernel_h - 1) * dilation_h // stride_h"
row_pitch = "ceil_div(output_w, stride_w) + row_halo"
plane_halo = "column_halo * row_pitch + row_halo"
rows_inside = "1 if plane_halo <= MAX_HALO else 0"
run = "tile_voxels + (plane_halo if rows_inside else row_halo)"
class_positions = "ceil_div(output_d, stride_d) * (ceil_div(output_h, stride_h) + (column_halo if rows_inside else 0)) * row_pitch"
voxel_tiles = "ceil_div(class_positions, tile_voxels)"
class_taps = "(ceil_div(kernel_h, stride_h) if rows_inside else 1) * ceil_div(kernel_w, stride_w)"
group_chunks = "max(1, min(channel_chunks, 4, 8 // class_taps))"
staged_taps = "min(STAGE_TAPS, group_chunks * (kernel_h * kernel_w if rows_inside else kernel_w))"
shared_bytes = "16 * (operand_parts * (4 * group_chunks * run + 4 * staged_taps * tile_channels) + run)"
[restrictions]
"row_halo <= MAX_HALO" = "the taps of a row reach further than MAX_HALO inputs, so the staged tile does not fit in shared memory"
"class_positions <= 1073741824" = "a residue class has more than 2^30 positions, past the 32-bit offsets inside it"
[cost]
steps = "channel_chunks * ceil_div(taps, residues)"
products = "tile_voxels * tile_channels * (32 // itemsize)"
bytes = "64 * run // ceil_div(taps, residues) + 64 * tile_channels"
[workspace]
packed = "4 * packed_cells"
input_cells = "4 * input_cell_count"
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_mma_pack"
general = true
packs = "packed"
grid = "ceil_div(packed_cells, 256)"
block = 256
[[launch]]
symbol = "convt3d_fprop_implicit_gemm_mma_cells"
general = true
grid = "ceil_div(batch * groups * channel_chunks * input_voxels, 256)"
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
// Implicit GEMM on tensor cores by mma.sync, in three launches. Two bring the operands into cells, 16 bytes that hold 4 tf32 or 8
// 16-bit input channels of one voxel or one weight: rounded to TF32 once, and for tf32x3 split into hi and lo parts.
//
// A residue class is a dense correlation, and its outputs are numbered so that a tap is one shift of a linear index: rows of
// `row_pitch` positions, planes of `plane_pitch` rows, long enough that a shift past the end of a row or plane meets zeros (or an
// output that is not stored). A block owns VOXELS such positions of one class and N output channels of one group. For each depth
// tap and each chunk of two cells of input channels it
//   - stages the run of positions that all taps of the plane reach, VOXELS + halo, once (a group of chunks where taps are few):
//       inputs  [2][chunk of the group][part][half chunk][position];
//   - streams the weights in stages of up to STAGE_TAPS taps:
//       weights [2][tap][part][half chunk][N];
//   - for each tap multiplies: 8 warps, each VOXELS / 8 x N sums, A from inputs at the tap's shift, B from weights.
// While one half of each buffer is read the other is filled by cp.async.
// A cell is a fragment row for ldmatrix, and a shift by whole cells keeps it aligned and free of bank conflicts. tf32x3
// adds hi*hi, hi*lo and lo*hi; the sums of hi*hi leave the tensor cores, which cut off what they add, for fp32
// registers every two taps.
#include "convt3d.cuh"
#include "convt3d/core/cell.cuh"
#include "convt3d/core/dense_axis.cuh"
#include "convt3d/epilogue/epilogue.cuh"

#ifndef TILE_VOXELS
#define TILE_VOXELS 512
#endif
#ifndef STAGE_TAPS
#define STAGE_TAPS 9
#endif
#ifndef MAX_HALO
#define MAX_HALO 384
#endif

constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int CHUNK = 2 * VECTOR;  // channels
static_assert(TILE_VOXELS % (2 * 16 * WARPS) == 0, "each warp owns whole m16 tiles");

// Whether the input's channels are cells already: 16-bit, channels last, whole chunks, aligned.
__device__ inline bool has_cells(const View<const scalar_t>& input, int channels) {
  const unsigned long long alignment =
      reinterpret_cast<unsigned long long>(input.data) |
      (input.stride[0] | input.stride[2] | input.stride[3] | input.stride[4]) * sizeof(scalar_t);
  return sizeof(scalar_t) == 2 && input.stride[1] == 1 && channels % CHUNK == 0 && alignment % 16 == 0;
}

// input_cells[n][group][chunk][part][half chunk][voxel]: a thread makes the cells of one chunk and voxel.
extern "C" __global__ void convt3d_fprop_implicit_gemm_mma_cells(const Problem problem, const View<const scalar_t> input,
                                                                 Cell* __restrict__ input_cells, const int channel_chunks,
                                                                 const long long input_voxels) {
  const int channels = problem.in_channels / problem.groups;
  if (has_cells(input, channels)) return;
  const long long index = blockIdx.x * 256LL + threadIdx.x, slab = index / input_voxels, voxel = index % input_voxels;
  if (slab >= static_cast<long long>(problem.batch) * problem.groups * channel_chunks) return;
  const int chunk = static_cast<int>(slab % channel_chunks), n = static_cast<int>(slab / channel_chunks / problem.groups),
            group = static_cast<int>(slab / channel_chunks % problem.groups);
  const scalar_t* source = input.at(n, group * channels + chunk * CHUNK, 0, 0, 0);
  const bool dense = input.stride[4] == 1 && input.stride[3] == problem.input_size[2] &&
                     input.stride[2] == static_cast<long long>(problem.input_size[1]) * problem.input_size[2];
  if (dense) {
    source += voxel;
  } else {
    const Voxel at = voxel_at(voxel, 1, problem.input_size);
    source += at.d * input.stride[2] + at.h * input.stride[3] + at.w * input.stride[4];
  }
  scalar_t values[2][VECTOR];
  for (int c = 0; c < CHUNK; ++c) {
    values[c / VECTOR][c % VECTOR] = chunk * CHUNK + c < channels ? source[c * input.stride[1]] : scalar_t();
  }
  for (int half = 0; half < 2; ++half) {
    Cell cells[PARTS];
    make_cell<round_to_tf32>(values[half], cells[0], cells[PARTS - 1]);
    for (int part = 0; part < PARTS; ++part)
      input_cells[((slab * PARTS + part) * 2 + half) * input_voxels + voxel] = cells[part];
  }
}

// Where a class begins in packed[group][channel tile][class][outer tap][chunk][run tap], counted in taps of one chunk.
__device__ inline int class_start(const AxisClass (&axis)[3], const int (&kernel_size)[3]) {
  const auto before = [&](int a) { return taps_before_class(kernel_size[a], axis[a].tap_step, axis[a].first_tap); };
  const int w = before(2), h = before(1);
  return (before(0) * kernel_size[1] + axis[0].taps * h) * kernel_size[2] + axis[0].taps * axis[1].taps * w;
}

// Each element of packed[..][run tap] is cells [part][half chunk][N]; a thread makes those of one half chunk and n.
extern "C" __global__ void convt3d_fprop_implicit_gemm_mma_pack(const Problem problem, const View<const scalar_t> weight,
                                                                Cell* __restrict__ packed, const int tile_channels,
                                                                const int channel_tiles, const int channel_chunks,
                                                                const int rows_inside, const long long packed_cells) {
  long long rest = blockIdx.x * 256LL + threadIdx.x;
  if (rest * PARTS >= packed_cells) return;
  int tap[3];  // fastest, as the weight has it
  AxisClass axis[3];
  for (int a = 2; a >= 0; --a) {
    tap[a] = static_cast<int>(rest % problem.kernel_size[a]);
    rest /= problem.kernel_size[a];
    axis[a] =
        axis_class(problem, a, static_cast<int>(static_cast<long long>(tap[a]) * problem.dilation[a] % problem.stride[a]));
  }
  const int n = static_cast<int>(rest % tile_channels);
  rest /= tile_channels;
  const int half = static_cast<int>(rest % 2);
  rest /= 2;
  const int chunk = static_cast<int>(rest % channel_chunks);
  rest /= channel_chunks;  // now group * channel_tiles + channel tile
  const int channel_tile = static_cast<int>(rest % channel_tiles), group = static_cast<int>(rest / channel_tiles);

  const int channels = problem.in_channels / problem.groups, co = channel_tile * tile_channels + n;
  const int first = chunk * CHUNK + half * VECTOR;
  const scalar_t* source = weight.at(group * channels + first, co, tap[0], tap[1], tap[2]);
  scalar_t values[VECTOR];
  for (int i = 0; i < VECTOR; ++i) {
    const bool live = co < problem.out_channels / problem.groups && first + i < channels;
    values[i] = live ? source[i * weight.stride[0]] : scalar_t();
  }
  Cell cells[PARTS];
  make_cell<round_to_tf32>(values, cells[0], cells[PARTS - 1]);

  const int d = tap[0] / axis[0].tap_step, h = tap[1] / axis[1].tap_step, w = tap[2] / axis[2].tap_step;
  const int outer = rows_inside ? d : d * axis[1].taps + h, inner = rows_inside ? h * axis[2].taps + w : w;
  const int run_taps = (rows_inside ? axis[1].taps : 1) * axis[2].taps;
  const long long taps = static_cast<long long>(problem.kernel_size[0]) * problem.kernel_size[1] * problem.kernel_size[2];
  const long long slab = (rest * taps + class_start(axis, problem.kernel_size)) * channel_chunks +
                         (static_cast<long long>(outer) * channel_chunks + chunk) * run_taps + inner;
  for (int part = 0; part < PARTS; ++part) packed[((slab * PARTS + part) * 2 + half) * tile_channels + n] = cells[part];
}

// Where a staged position lies in the input: its bytes from (depth origin, row origin, 0), and depth and row from there.
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

// More would spill at 128 registers a thread; for Hopper the compiler needs a few registers less.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int SUMS_OF_TWO_BLOCKS = 32;
#else
constexpr int SUMS_OF_TWO_BLOCKS = 64;
#endif

// What a block of n channels keeps in registers decides its voxels, how many blocks share a multiprocessor, and whether the
// fragments of the next tap are loaded while this one's multiply.
__device__ constexpr int voxels_of(int n) { return TILE_VOXELS / PARTS / (PARTS == 1 && n % 32 == 0 ? 2 : 1); }
__device__ constexpr int m_tiles_of(int n) { return voxels_of(n) / (16 * WARPS); }
__device__ constexpr int sums_of(int n) { return m_tiles_of(n) * (n / 8) * 4 * (PARTS == 2 ? 3 : 1); }
__device__ constexpr int blocks_of(int n) { return sums_of(n) <= SUMS_OF_TWO_BLOCKS ? 2 : 1; }
__device__ constexpr bool loads_ahead(int n) {
  return PARTS == 1 && sums_of(n) + 2 * (m_tiles_of(n) * 4 + n / 8 * 2) <= (blocks_of(n) == 2 ? 56 : 200);
}

// What a warp multiplies for one tap.
template <int M_TILES, int N_TILES>
struct Fragments {
  unsigned a[PARTS][M_TILES][4], b[PARTS][N_TILES][2];

  // Addresses are those of this lane's rows; `part_bytes` lie between the parts of the inputs. j is an even n8 tile.
  __device__ void load_inputs(unsigned inputs, int part_bytes) {
#pragma unroll
    for (int i = 0; i < PARTS * M_TILES; ++i) {
      ldmatrix_x4(a[i / M_TILES][i % M_TILES], inputs + i / M_TILES * part_bytes + i % M_TILES * 256);
    }
  }
  __device__ void load_weights(unsigned weights, int j) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const unsigned row = weights + (part * 2 * N_TILES + j) * 128;
      if (j + 1 < N_TILES) {
        unsigned both[4];
        ldmatrix_x4(both, row);
        for (int r = 0; r < 4; ++r) b[part][j + r / 2][r % 2] = both[r];
      } else {
        ldmatrix_x2(b[part][j], row);
      }
    }
  }
  __device__ void multiply(float (&high)[M_TILES][N_TILES][4], float (&low)[M_TILES][N_TILES][4], int pair) const {
#pragma unroll
    for (int j = pair; j < min(pair + 2, N_TILES); ++j) {
#pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        if (PARTS == 2) {
          CONVT3D_MULTIPLY(low[i][j], a[PARTS - 1][i], b[0][j][0], b[0][j][1]);
          CONVT3D_MULTIPLY(low[i][j], a[0][i], b[PARTS - 1][j][0], b[PARTS - 1][j][1]);
        }
        CONVT3D_MULTIPLY(high[i][j], a[0][i], b[0][j][0], b[0][j][1]);
      }
    }
  }
};

template <int M_TILES, int N_TILES>
__device__ inline void add(float (&sums)[M_TILES][N_TILES][4], const float (&more)[M_TILES][N_TILES][4]) {
  for (int i = 0; i < M_TILES; ++i) {
    for (int j = 0; j < N_TILES; ++j) {
      for (int e = 0; e < 4; ++e) sums[i][j][e] += more[i][j][e];
    }
  }
}

template <int N>
__device__ inline void convolve(const Problem& problem, const View<const scalar_t>& input, const Cell* __restrict__ input_cells,
                                const Cell* __restrict__ packed, const Epilogue& epilogue, const View<scalar_t>& output,
                                int voxel_tiles, int channel_tiles, int run, int staged_taps, int group_chunks,
                                bool rows_inside) {
  if (PARTS == 2 && N == 64) return;  // never launched: three sums for each output would not fit in registers
  constexpr int VOXELS = voxels_of(N), M_TILES = m_tiles_of(N), N_TILES = N / 8;
  constexpr int TAP_CELLS = PARTS * 2 * N;
  constexpr bool AHEAD = loads_ahead(N);
  extern __shared__ Cell shared[];
  Cell* const inputs = shared;                                        // [2][group_chunks][PARTS][2][run]
  Cell* const weights = inputs + 2 * group_chunks * PARTS * 2 * run;  // [2][staged_taps][TAP_CELLS]
  Position* const positions = reinterpret_cast<Position*>(weights + 2 * staged_taps * TAP_CELLS);  // [run]
  __shared__ AxisClass axis[3];  // what the loop seldom needs stays out of registers
  __shared__ int first_q[3];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;

  // blockIdx.x = (((n * groups + group) * voxel_tiles + voxel tile) * residues + residue) * channel_tiles + channel tile:
  // the classes of a voxel tile run side by side and share what they read and the memory sectors they write.
  unsigned block = blockIdx.x;
  const int channel_tile = static_cast<int>(block % channel_tiles);
  block /= channel_tiles;
  int residue[3];
  for (int a = 2; a >= 0; --a) {
    residue[a] = static_cast<int>(block % problem.stride[a]);
    block /= problem.stride[a];
  }
  const int first_position = static_cast<int>(block % voxel_tiles) * VOXELS;
  block /= voxel_tiles;
  const int group = static_cast<int>(block % problem.groups), n = static_cast<int>(block / problem.groups);
  for (int a = 0; a < 3; ++a) {  // a thread an axis: the divisions take long
    if (thread != a * 32) continue;
    axis[a] = axis_class(problem, a, residue[a]);
    first_q[a] = (axis[a].first_output + problem.padding[a]) / problem.stride[a];
  }
  __syncthreads();
  const int row_pitch = pitch_of(axis[2], first_q[2], problem.input_size[2]);
  const int plane_pitch = rows_inside ? pitch_of(axis[1], first_q[1], problem.input_size[1]) : axis[1].outputs;
  const int class_positions = axis[0].outputs * plane_pitch * row_pitch;
  if (axis[1].outputs == 0 || axis[2].outputs == 0 || first_position >= class_positions) return;

  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int row_taps = axis[2].taps, run_rows = rows_inside ? axis[1].taps : 1, run_taps = run_rows * row_taps;
  const int taps = axis[0].taps * axis[1].taps * axis[2].taps;
  const int channel_chunks = (channels + CHUNK - 1) / CHUNK, outer_taps = taps == 0 ? 0 : taps / run_taps;
  const int row_span = (axis[2].taps - 1) * axis[2].offset_step;
  const int last_shift = (run_rows - 1) * axis[1].offset_step * row_pitch + row_span;  // the first tap's
  const int staged = VOXELS + last_shift;

  // The cells, wherever they are: first cell of the volume, and bytes from voxel to voxel, half to half and so on.
  const bool direct = has_cells(input, channels);
  const long long volume = static_cast<long long>(problem.input_size[0]) * problem.input_size[1] * problem.input_size[2];
  const long long step_w = direct ? input.stride[4] * 2 : 16,
                  step_h = direct ? input.stride[3] * 2 : 16LL * problem.input_size[2],
                  step_d = direct ? input.stride[2] * 2 : 16LL * problem.input_size[1] * problem.input_size[2],
                  step_half = direct ? 16 : 16 * volume, step_chunk = PARTS * 2 * step_half;
  const char* const cells = direct ? reinterpret_cast<const char*>(input.at(n, group * channels, 0, 0, 0))
                                   : reinterpret_cast<const char*>(input_cells) +
                                         (static_cast<long long>(n) * problem.groups + group) * channel_chunks * step_chunk;

  if (outer_taps != 0) {
    int w = (first_position + thread) % row_pitch, h = (first_position + thread) / row_pitch % plane_pitch,
        d = (first_position + thread) / row_pitch / plane_pitch;
#pragma unroll 1
    for (int i = thread; i < staged; i += THREADS) {
      const int input_w = first_q[2] - axis[2].first_offset - row_span + w;
      const bool inside = input_w >= 0 && input_w < problem.input_size[2];  // if not, it is outside whatever the origin
      positions[i] = {d * step_d + h * step_h + input_w * step_w, inside ? d : -(1 << 30), h};
      for (w += THREADS; w >= row_pitch; w -= row_pitch) {
        if (++h == plane_pitch) {
          h = 0;
          ++d;
        }
      }
    }
  }

  float sums[M_TILES][N_TILES][4], low[M_TILES][N_TILES][4] = {};
  for (int j = 0; j < N_TILES; ++j) {
    for (int e = 0; e < 2; ++e) {
      const int co = channel_tile * N + j * 8 + lane % 4 * 2 + e;
      const float start = epilogue.start(group * out_channels + co, co < out_channels);
      for (int i = 0; i < M_TILES; ++i) sums[i][j][e] = sums[i][j][2 + e] = start;
    }
  }

  // What is copied next: a group of chunks of a depth tap (and row tap), and a stage of the stream of this class's weights.
  int inputs_left = outer_taps, tap_d = 0, tap_h = 0, input_chunk = 0, depth = 0, row = 0, copied_chunks = 0;
  const char* origin = nullptr;
  unsigned target = shared_address(inputs);
  const auto begin_inputs = [&](int buffer) {
    copied_chunks = inputs_left == 0 ? 0 : min(group_chunks, channel_chunks - input_chunk);
    depth = first_q[0] - axis[0].first_offset - tap_d * axis[0].offset_step;
    row = first_q[1] - axis[1].first_offset - (rows_inside ? run_rows - 1 : tap_h) * axis[1].offset_step;
    origin = cells + depth * step_d + row * step_h + input_chunk * step_chunk;
    target = shared_address(inputs + buffer * group_chunks * PARTS * 2 * run);
    input_chunk += group_chunks;
    if (input_chunk < channel_chunks) return;
    input_chunk = 0;
    if (rows_inside || ++tap_h == axis[1].taps) {
      tap_h = 0;
      ++tap_d;
    }
    --inputs_left;
  };
  const auto copy_inputs = [&](int i) {  // position i of each part and half
    if (copied_chunks == 0 || i >= staged) return;
    const Position entry = positions[i];
    const bool live = static_cast<unsigned>(entry.depth) + depth < static_cast<unsigned>(problem.input_size[0]) &&
                      static_cast<unsigned>(entry.row) + row < static_cast<unsigned>(problem.input_size[1]);
    const char* source = origin + entry.offset;  // not read where it is not live
    unsigned cell = target + i * 16;
#pragma unroll 1
    for (int chunk = 0; chunk < copied_chunks; ++chunk, source += step_chunk, cell += PARTS * 2 * run * 16) {
#pragma unroll
      for (int half = 0; half < PARTS * 2; ++half)
        cp_async<16>(cell + half * run * 16, source + half * step_half, live ? 16 : 0);
    }
  };

  const long long kernel_taps =
      static_cast<long long>(problem.kernel_size[0]) * problem.kernel_size[1] * problem.kernel_size[2];
  const Cell* stream =
      packed + ((group * channel_tiles + channel_tile) * kernel_taps + class_start(axis, problem.kernel_size)) *
                   channel_chunks * TAP_CELLS;
  const int group_taps = group_chunks * run_taps, last_group_taps = ((channel_chunks - 1) % group_chunks + 1) * run_taps;
  const int channel_groups = (channel_chunks + group_chunks - 1) / group_chunks;
  const int stage_bytes = staged_taps * TAP_CELLS * 16;
  int weights_left = outer_taps, weight_group = 0, weight_tap = 0;
  const auto copy_weights = [&](int buffer) {
    if (weights_left == 0) return;
    const int all = weight_group + 1 == channel_groups ? last_group_taps : group_taps;
    const int copied_cells = min(staged_taps, all - weight_tap) * TAP_CELLS;
#pragma unroll 1
    for (int i = thread; i < copied_cells; i += THREADS) {
      cp_async<16>(shared_address(weights) + buffer * stage_bytes + i * 16, stream + i);
    }
    stream += copied_cells;
    weight_tap += staged_taps;
    if (weight_tap < all) return;
    weight_tap = 0;
    if (++weight_group < channel_groups) return;
    weight_group = 0;
    --weights_left;
  };

  const bool idle = first_position + warp * M_TILES * 16 >= class_positions;
  const unsigned lane_inputs = shared_address(inputs) + (lane / 16 * run + warp * M_TILES * 16 + lane % 16) * 16;
  const unsigned lane_weights = shared_address(weights) + (lane / 8 % 2 * N + lane / 16 * 8 + lane % 8) * 16;
  const int part_bytes = 2 * run * 16;

  const int next_tap = axis[2].offset_step * 16;  // bytes by which the shift decreases
  const int next_row = (axis[1].offset_step * row_pitch - axis[2].taps * axis[2].offset_step) * 16;  // in addition

  __syncthreads();  // the positions are written
  begin_inputs(0);
#pragma unroll 1
  for (int i = thread; i < staged; i += THREADS) copy_inputs(i);
  copy_weights(0);
  cp_async_commit();
  int weight_buffer = 0, input_buffer = 0;
  for (int outer = 0; outer < outer_taps; ++outer) {
    for (int channel_group = 0; channel_group < channel_groups; ++channel_group, input_buffer ^= 1) {
      const int all = channel_group + 1 == channel_groups ? last_group_taps : group_taps;
      unsigned tap_inputs = lane_inputs + input_buffer * group_chunks * PARTS * part_bytes + last_shift * 16;
      int taps_of_row = row_taps, rows_of_chunk = run_rows;
      for (int first_tap = 0; first_tap < all; first_tap += staged_taps, weight_buffer ^= 1) {
        cp_async_wait<0>();
        __syncthreads();  // this stage has landed for all, and the one before has been read by all
        copy_weights(1 - weight_buffer);
        if (first_tap == 0) begin_inputs(1 - input_buffer);
        int copied = first_tap == 0 ? thread : staged;  // the next group's inputs, one position a tap
        const int stage_taps = idle ? 0 : min(staged_taps, all - first_tap);
        unsigned tap_weights = lane_weights + weight_buffer * stage_bytes;
        Fragments<M_TILES, N_TILES> fragments[AHEAD ? 2 : 1];
        const auto load = [&](Fragments<M_TILES, N_TILES>& of) {
          of.load_inputs(tap_inputs, part_bytes);
          if (AHEAD) {
#pragma unroll
            for (int j = 0; j < N_TILES; j += 2) of.load_weights(tap_weights, j);
            tap_weights += TAP_CELLS * 16;
          }
          tap_inputs -= next_tap;
          if (--taps_of_row == 0) {
            taps_of_row = row_taps;
            tap_inputs -= next_row;
            if (--rows_of_chunk == 0) {
              rows_of_chunk = run_rows;
              tap_inputs += PARTS * part_bytes + run_rows * axis[1].offset_step * row_pitch * 16;  // from past the last row
            }
          }
        };
        if (AHEAD && !idle) load(fragments[0]);
        for (int tap = 0; tap < stage_taps; tap += 2) {
          float high[M_TILES][N_TILES][4] = {};
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            if (tap + parity >= stage_taps) break;
            Fragments<M_TILES, N_TILES>& now = fragments[AHEAD ? parity : 0];
            if (!AHEAD) {
              load(now);
            } else if (tap + parity + 1 < stage_taps) {
              load(fragments[AHEAD ? 1 - parity : 0]);
            }
            copy_inputs(copied);
            copied += THREADS;
#pragma unroll
            for (int j = 0; j < N_TILES; j += 2) {
              if (!AHEAD) now.load_weights(tap_weights, j);
              now.multiply(PARTS == 1 ? sums : high, low, j);
            }
            if (!AHEAD) tap_weights += TAP_CELLS * 16;
          }
          if (PARTS == 2) add(sums, high);
        }
#pragma unroll 1
        for (; copied < staged; copied += THREADS) copy_inputs(copied);  // more positions than taps
        cp_async_commit();
      }
    }
  }
  if (PARTS == 2) add(sums, low);

  const int first_co = channel_tile * N + lane % 4 * 2, position = first_position + warp * M_TILES * 16 + lane / 4;
  scalar_t* const corner =
      output.at(n, group * out_channels + first_co, axis[0].first_output, axis[1].first_output, axis[2].first_output);
  int w = position % row_pitch, h = position / row_pitch % plane_pitch, d = position / row_pitch / plane_pitch;
#pragma unroll
  for (int i = 0; i < M_TILES * 2; ++i) {
    const bool stored = w < axis[2].outputs && h < axis[1].outputs && d < axis[0].outputs;
    scalar_t* y = corner + (d * problem.stride[0] * output.stride[2] + h * problem.stride[1] * output.stride[3] +
                            w * problem.stride[2] * output.stride[4]);
    for (w += 8; w >= row_pitch; w -= row_pitch) {
      if (++h == plane_pitch) {
        h = 0;
        ++d;
      }
    }
    const int stored_channels = stored ? out_channels - first_co : 0;
#pragma unroll
    for (int j = 0; j < N_TILES; ++j, y += 8 * output.stride[1]) {
      if (j * 8 < stored_channels) y[0] = epilogue.finish(sums[i / 2][j][i % 2 * 2]);
      if (j * 8 + 1 < stored_channels) y[output.stride[1]] = epilogue.finish(sums[i / 2][j][i % 2 * 2 + 1]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, blocks_of(8))
    convt3d_fprop_implicit_gemm_mma_8(const Problem problem, const View<const scalar_t> input,
                                      const Cell* __restrict__ input_cells, const Cell* __restrict__ packed,
                                      const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                      const int channel_tiles, const int run, const int staged_taps, const int group_chunks,
                                      const int rows_inside) {
  convolve<8>(problem, input, input_cells, packed, {bias}, output, voxel_tiles, channel_tiles, run, staged_taps, group_chunks,
              rows_inside != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, blocks_of(16))
    convt3d_fprop_implicit_gemm_mma_16(const Problem problem, const View<const scalar_t> input,
                                       const Cell* __restrict__ input_cells, const Cell* __restrict__ packed,
                                       const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                       const int channel_tiles, const int run, const int staged_taps, const int group_chunks,
                                       const int rows_inside) {
  convolve<16>(problem, input, input_cells, packed, {bias}, output, voxel_tiles, channel_tiles, run, staged_taps, group_chunks,
               rows_inside != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, blocks_of(24))
    convt3d_fprop_implicit_gemm_mma_24(const Problem problem, const View<const scalar_t> input,
                                       const Cell* __restrict__ input_cells, const Cell* __restrict__ packed,
                                       const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                       const int channel_tiles, const int run, const int staged_taps, const int group_chunks,
                                       const int rows_inside) {
  convolve<24>(problem, input, input_cells, packed, {bias}, output, voxel_tiles, channel_tiles, run, staged_taps, group_chunks,
               rows_inside != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, blocks_of(32))
    convt3d_fprop_implicit_gemm_mma_32(const Problem problem, const View<const scalar_t> input,
                                       const Cell* __restrict__ input_cells, const Cell* __restrict__ packed,
                                       const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                       const int channel_tiles, const int run, const int staged_taps, const int group_chunks,
                                       const int rows_inside) {
  convolve<32>(problem, input, input_cells, packed, {bias}, output, voxel_tiles, channel_tiles, run, staged_taps, group_chunks,
               rows_inside != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, blocks_of(48))
    convt3d_fprop_implicit_gemm_mma_48(const Problem problem, const View<const scalar_t> input,
                                       const Cell* __restrict__ input_cells, const Cell* __restrict__ packed,
                                       const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                       const int channel_tiles, const int run, const int staged_taps, const int group_chunks,
                                       const int rows_inside) {
  convolve<48>(problem, input, input_cells, packed, {bias}, output, voxel_tiles, channel_tiles, run, staged_taps, group_chunks,
               rows_inside != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS, blocks_of(64))
    convt3d_fprop_implicit_gemm_mma_64(const Problem problem, const View<const scalar_t> input,
                                       const Cell* __restrict__ input_cells, const Cell* __restrict__ packed,
                                       const scalar_t* __restrict__ bias, const View<scalar_t> output, const int voxel_tiles,
                                       const int channel_tiles, const int run, const int staged_taps, const int group_chunks,
                                       const int rows_inside) {
  convolve<64>(problem, input, input_cells, packed, {bias}, output, voxel_tiles, channel_tiles, run, staged_taps, group_chunks,
               rows_inside != 0);
}
