// Neighbours in memory that move together.
#pragma once

#include "convt3d/dtypes.cuh"

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
