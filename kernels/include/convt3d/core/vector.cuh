// Neighbours in memory that move together.
#pragma once

#include "convt3d/core/dtypes.cuh"
#include "convt3d/core/view.cuh"

// They lie at a multiple of their size: so few of them are one access of 2 to 16 bytes, more are several of 16.
template <int COUNT, class T = scalar_t>
struct alignas(COUNT * sizeof(T)) Vector {
  static_assert((COUNT & (COUNT - 1)) == 0,
                "memory is accessed in 2, 4, 8 or 16 bytes: neighbours that move together are a power of two");
  T element[COUNT];
};

// Elements by their bits, one of 32 bits or two of 16 in each.
template <int COUNT>
using Words = Vector<COUNT, unsigned>;

// Whether a tensor's elements along an axis, from each multiple of `length` on, are vectors for one access: they are neighbours, and what
// lies a step along another axis from a multiple is one too. How long the axis is the caller knows.
template <class T>
__device__ inline bool made_of_vectors(const View<T>& view, int along, int length) {
  bool made = reinterpret_cast<index_t>(view.data) % static_cast<index_t>(length * sizeof(T)) == 0;
#pragma unroll
  for (int axis = 0; axis < 5; ++axis) made = made && (axis == along || view.stride[axis] % length == 0);
  return made && view.stride[along] == 1;
}
