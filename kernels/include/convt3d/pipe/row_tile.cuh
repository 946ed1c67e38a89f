// A tile of a dense correlation (see DenseAxis) on quads, 4 neighbouring outputs along w, and its input rows in shared memory, halo
// and zeros included, so that every tap reads from there.
#pragma once

#include "convt3d/ptx/copy_async.cuh"
#include "convt3d/core/dense_axis.cuh"
#include "convt3d/core/forget_memory.cuh"
#include "convt3d/core/vector.cuh"

constexpr int VECTOR = 16 / sizeof(accum_t);  // elements of a 16-byte access to shared memory

typedef Vector<VECTOR, accum_t> SharedVector;
typedef Vector<VECTOR> SourceVector;

// Quads are counted over d, h and w without regard to rows and planes, so that only the last tile has a tail.
struct RowTile {
  DenseAxis axis[3];
  int first_quad, end_quad, quads_w;
  // Where input rows are whole vectors, quads begin `shift` outputs early, so that staged rows begin on a vector too.
  bool whole_vectors;
  int shift;
  int first_kd, taps_d;  // those that read any plane inside the input
  // Staged rows are counted through planes of h + halo rows. The rows that one kd reads are a segment; where segments would overlap
  // they share their rows. A plane is all staged rows of one channel.
  int plane_rows, first_plane_row, segment, rows, pitch, plane;
  int threads_w, threads_h;  // how threads share a staged plane: each has every threads_h-th row of every threads_w-th quad
};

__device__ inline bool rows_are_vectors(const Problem& problem, const View<const scalar_t>& input, int spread) {
  bool whole = reinterpret_cast<index_t>(input.data) % sizeof(SourceVector) == 0 && problem.input_size[2] % VECTOR == 0;
  for (int i = 0; i < 4; ++i) whole = whole && input.stride[i] % VECTOR == 0;
  return whole && input.stride[4] == 1 && spread == 1;
}

// Lay out the tile from first_quad on, its axes being set; leaves it empty (end_quad <= first_quad) past the class's end.
__device__ inline void lay_out(RowTile& tile, const Problem& problem, const View<const scalar_t>& input, int tile_quads) {
  const DenseAxis &d = tile.axis[0], &h = tile.axis[1], &w = tile.axis[2];
  tile.shift = (w.origin % VECTOR + VECTOR) % VECTOR;
  const int quads_w = (w.outputs + 3) / 4, shifted_quads = (w.outputs + tile.shift + 3) / 4;
  tile.whole_vectors = rows_are_vectors(problem, input, w.spread) && shifted_quads - quads_w <= quads_w / 16;
  if (!tile.whole_vectors) tile.shift = 0;
  tile.axis[2].origin -= tile.shift;
  tile.quads_w = tile.whole_vectors ? shifted_quads : quads_w;
  tile.end_quad = min(tile.first_quad + tile_quads, d.outputs * h.outputs * tile.quads_w);
  if (tile.first_quad >= tile.end_quad) return;

  const int first_row = tile.first_quad / tile.quads_w, last_row = (tile.end_quad - 1) / tile.quads_w;
  const int first_d = d.origin + d.spread * (first_row / h.outputs), last_d = d.origin + d.spread * (last_row / h.outputs);
  const int beyond = problem.input_size[0] - first_d;
  tile.first_kd = last_d < 0 ? min((-last_d + d.spread - 1) / d.spread, d.taps) : 0;
  tile.taps_d = max(0, min(beyond > 0 ? (beyond + d.spread - 1) / d.spread : 0, d.taps) - tile.first_kd);

  tile.plane_rows = h.outputs + h.taps - 1;
  tile.first_plane_row = first_row / h.outputs * tile.plane_rows + first_row % h.outputs;
  const int span = last_row / h.outputs * tile.plane_rows + last_row % h.outputs - tile.first_plane_row + h.taps;
  tile.segment = min(tile.plane_rows, span);
  tile.rows = tile.taps_d > 0 ? (tile.taps_d - 1) * tile.segment + span : 0;
  tile.pitch = (4 * tile.quads_w + w.taps + 2) / 4 * 4;
  tile.plane = tile.rows * tile.pitch;
  const int quads = tile.pitch / 4, passes = (quads + 31) / 32;
  tile.threads_w = (quads + passes - 1) / passes;
  tile.threads_h = static_cast<int>(blockDim.x) / tile.threads_w;
}

// Where in a staged channel the inputs of a quad begin, those of its first taps.
__device__ inline int staged_quad(const RowTile& tile, int quad) {
  const int row = quad / tile.quads_w, h = tile.axis[1].outputs;
  return (row / h * tile.plane_rows + row % h - tile.first_plane_row) * tile.pitch + quad % tile.quads_w * 4;
}

constexpr index_t NO_ROW = -0x7fffffffffffffffLL;

// Set where in a channel of the input each staged row is, NO_ROW where it lies outside.
__device__ inline void find_rows(const RowTile& tile, const Problem& problem, const View<const scalar_t>& input,
                                 index_t* row_offset) {
  for (int row = static_cast<int>(threadIdx.x); row < tile.rows; row += static_cast<int>(blockDim.x)) {
    const int kd = min(row / tile.segment, tile.taps_d - 1);
    const int padded = tile.first_plane_row + kd * (tile.plane_rows - tile.segment) + row;
    const int d = tile.axis[0].origin + tile.axis[0].spread * (padded / tile.plane_rows + tile.first_kd);
    const int h = tile.axis[1].origin + tile.axis[1].spread * (padded % tile.plane_rows);
    const bool live = d >= 0 && d < problem.input_size[0] && h >= 0 && h < problem.input_size[1];
    row_offset[row] = live ? d * input.stride[2] + h * input.stride[3] : NO_ROW;
  }
}

__device__ inline void stage_unit(accum_t* copy, const accum_t* source, bool live) { copy_async(copy, source, live); }
__device__ inline void stage_unit(SharedVector* copy, const SharedVector* source, bool live) { copy_async(copy, source, live); }

#if defined(CONVT3D_FP16) || defined(CONVT3D_BF16)
__device__ inline void stage_unit(accum_t* copy, const scalar_t* source, bool live) { *copy = live ? to_accum(*source) : 0; }
__device__ inline void stage_unit(SharedVector* copy, const SourceVector* source, bool live) {
  const SourceVector narrow = live ? *source : SourceVector{};
  SharedVector wide;
  for (int i = 0; i < VECTOR; ++i) wide.element[i] = to_accum(narrow.element[i]);
  *copy = wide;
}
#endif

// Copy the rows of `count` channels from `volume` on to a stage, in units of one element or of a vector.
template <class Unit, class SourceUnit>
__device__ inline void stage_units(const RowTile& tile, const Problem& problem, const View<const scalar_t>& input,
                                   const scalar_t* volume, const index_t* row_offset, int count, accum_t* stage) {
  constexpr int WIDTH = sizeof(Unit) / sizeof(accum_t), UNITS = 4 / WIDTH;
  constexpr int UNROLL = sizeof(scalar_t) == 2 ? 4 : 1;  // 16-bit types pass through registers: several loads in flight
  const int thread = computed_anew(static_cast<int>(threadIdx.x)), thread_h = thread / tile.threads_w,
            thread_w = thread % tile.threads_w;
  if (thread_h >= tile.threads_h) return;
  const int plane = tile.plane, rows = tile.rows, threads_h = tile.threads_h, next_row = threads_h * tile.pitch;
#pragma unroll 1
  for (int first = 4 * thread_w; first < tile.pitch; first += 4 * tile.threads_w) {
    const int w = tile.axis[2].origin + tile.axis[2].spread * first;
    const index_t next = tile.axis[2].spread * WIDTH * input.stride[4];
    bool inside[UNITS];
    for (int u = 0; u < UNITS; ++u) {
      const int unit = w + tile.axis[2].spread * WIDTH * u;
      inside[u] = unit >= 0 && unit < problem.input_size[2];
    }
    const scalar_t* column = volume + w * input.stride[4];
    accum_t* row_copy = stage + thread_h * tile.pitch + first;
#pragma unroll 1
    for (int row = thread_h; row < rows; row += threads_h, row_copy += next_row) {
      const index_t offset = row_offset[row];
      const bool live = offset != NO_ROW;
      const scalar_t* source = live ? column + offset : input.data;
      const index_t next_channel = live ? input.stride[1] : 0;
      accum_t* copy = row_copy;
#pragma unroll UNROLL
      for (int ci = 0; ci < count; ++ci, copy += plane, source += next_channel) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
          const scalar_t* unit = live && inside[u] ? source + u * next : input.data;
          stage_unit(reinterpret_cast<Unit*>(copy) + u, reinterpret_cast<const SourceUnit*>(unit), live && inside[u]);
        }
      }
    }
  }
}

// The same where channels lie together in memory, LENGTH of them aligned for one access: a thread reads LENGTH channels of 4 neighbouring
// voxels and writes 4 voxels of each channel.
template <int LENGTH>
__device__ inline void stage_channels(const RowTile& tile, const Problem& problem, const View<const scalar_t>& input,
                                      const scalar_t* volume, const index_t* row_offset, int count, accum_t* stage) {
  const int quads = tile.pitch / 4, units = tile.rows * quads;
#pragma unroll 1
  for (int unit = computed_anew(static_cast<int>(threadIdx.x)); unit < units; unit += static_cast<int>(blockDim.x)) {
    const int row = unit / quads, column = (unit - row * quads) * 4, w = tile.axis[2].origin + tile.axis[2].spread * column;
    const index_t offset = row_offset[row], next = tile.axis[2].spread * input.stride[4];
    const scalar_t* from = volume + offset + w * input.stride[4];
    accum_t* to = stage + row * tile.pitch + column;
#pragma unroll 1
    for (int ci = 0; ci < count; ci += LENGTH, from += LENGTH, to += LENGTH * tile.plane) {
      Vector<LENGTH> pieces[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = w + tile.axis[2].spread * i;
        const bool live = offset != NO_ROW && at >= 0 && at < problem.input_size[2];
        pieces[i] = live ? *reinterpret_cast<const Vector<LENGTH>*>(from + i * next) : Vector<LENGTH>{};
      }
#pragma unroll
      for (int c = 0; c < LENGTH; ++c) {
#pragma unroll
        for (int i = 0; i < 4; i += VECTOR) {
          SharedVector out;
#pragma unroll
          for (int e = 0; e < VECTOR; ++e) out.element[e] = to_accum(pieces[i + e].element[c]);
          *reinterpret_cast<SharedVector*>(to + c * tile.plane + i) = out;
        }
      }
    }
  }
}

// How many channels one access can read, wherever it begins at a multiple of so many.
__device__ inline int channels_together(const View<const scalar_t>& input, int channels) {
  for (int length = 4; length > 1; length /= 2) {
    bool whole = input.stride[1] == 1 && channels % length == 0;
    for (int a = 0; a < 5; ++a) whole = whole && (a == 1 || input.stride[a] % length == 0);
    if (whole && reinterpret_cast<index_t>(input.data) % (length * sizeof(scalar_t)) == 0) return length;
  }
  return 1;
}

__device__ inline void stage_rows(const RowTile& tile, const Problem& problem, const View<const scalar_t>& input,
                                  const scalar_t* volume, const index_t* row_offset, int count, accum_t* stage) {
  if (tile.whole_vectors) {
    stage_units<SharedVector, SourceVector>(tile, problem, input, volume, row_offset, count, stage);
  } else {
    stage_units<accum_t, scalar_t>(tile, problem, input, volume, row_offset, count, stage);
  }
}
