// Stores of outputs, which are written once and not read again: L2 evicts them first, and keeps the inputs and weights that other blocks read.
// PTX ISA, "st": `.cs`, cache streaming.
#pragma once

#include "convt3d/core/dtypes.cuh"

// Store a value of 4 or 8 bytes, or of a multiple of 16, at a multiple of its size.
template <class T>
__device__ __forceinline__ void store_streaming(T* target, const T& value) {
#if defined(__CUDACC__)
  const auto store = [&](auto piece, int ahead) {
    memcpy(&piece, reinterpret_cast<const char*>(&value) + ahead, sizeof piece);
    __stcs(reinterpret_cast<decltype(piece)*>(reinterpret_cast<char*>(target) + ahead), piece);
  };
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) % 16 == 0, "whole words, pairs or fours of them");
  if constexpr (sizeof(T) == 4)
    store(0u, 0);
  else if constexpr (sizeof(T) == 8)
    store(uint2(), 0);
  else {
#pragma unroll
    for (int ahead = 0; ahead < static_cast<int>(sizeof(T)); ahead += 16) store(uint4(), ahead);
  }
#else
  *target = value;
#endif
}
