// Cells: 16 bytes of neighbouring channels of an operand, as tensor cores read them, and what packing reads to make them.
#pragma once

#include "convt3d/core/advanced.cuh"
#include "convt3d/ptx/mma.cuh"
#include "convt3d/ptx/split_tf32.cuh"
#include "convt3d/core/vector.cuh"
#include "convt3d/core/view.cuh"

constexpr int VECTOR = 16 / sizeof(scalar_t);  // channels of a cell
typedef Words<4> Cell;

// The cell of some channels: fp32 is rounded to TF32 by `round`, 16 bits are as they are. In tf32x3 `low` has what `high` leaves over.
template <unsigned (*round)(float) = nearest_tf32, class T>
__device__ __forceinline__ void make_cell(const T (&values)[VECTOR], Cell& high, [[maybe_unused]] Cell& low) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "tensor cores take TF32 and 16 bits; fp64 has no cells");
#pragma unroll
  for (int v = 0; v < VECTOR; v += 4 / static_cast<int>(sizeof(T))) {
    if constexpr (sizeof(T) == 2) {
      high.element[v / 2] = values[v].bits | static_cast<unsigned>(values[v + 1].bits) << 16;
    } else if constexpr (PARTS == 2) {
      split_tf32(values[v], high.element[v], low.element[v]);
    } else {
      high.element[v] = round(values[v]);
    }
  }
}

template <class T>
__device__ __forceinline__ Cell cell_of(const T (&values)[VECTOR]) {
  static_assert(sizeof(T) == 2 || PARTS == 1, "the low part of tf32x3 would be lost: make_cell makes both");
  Cell cell;
  make_cell(values, cell, cell);
  return cell;
}

// Of the input channels of one tap and output channel from ci on, those numbered begin to end - 1; zero in place of the others.
template <int COUNT>
__device__ __forceinline__ void load_weight_cell(scalar_t (&values)[COUNT], const View<const scalar_t>& weight, int ci, int co,
                                                 int d, int h, int w, int end, int begin = 0) {
  const scalar_t* source = begin < end ? weight.at(ci, co, d, h, w) : weight.data;
#pragma unroll
  for (int v = 0; v < COUNT; ++v) {
    values[v] = begin <= v && v < end ? *source : to_scalar(accum_t(0));
    if (v + 1 < end) source = advanced(source, weight.stride[0] * static_cast<index_t>(sizeof(scalar_t)));
  }
}
