// What one thread has of a row of the output: the residues of w at one position.
#pragma once

#include "convt3d/epilogue/epilogue.cuh"

// One store of two elements; in PTX, because the compiler may make two of it to save a move.
#if defined(__CUDACC__)
__device__ __forceinline__ void store_pair(float* y, float a, float b) {
  asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(y)), "f"(a), "f"(b) : "memory");
}
__device__ __forceinline__ void store_pair(double* y, double a, double b) {
  asm volatile("st.global.v2.f64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(y)), "d"(a), "d"(b) : "memory");
}
#else
inline void store_pair(float* y, float a, float b) { *reinterpret_cast<float2*>(y) = make_float2(a, b); }
inline void store_pair(double* y, double a, double b) { *reinterpret_cast<double2*>(y) = make_double2(a, b); }
#endif

template <class Half>
__device__ __forceinline__ void store_pair(Half* y, Half a, Half b) {
  *reinterpret_cast<unsigned*>(y) = a.bits | static_cast<unsigned>(b.bits) << 16;
}

// Whether a piece of `length` outputs from y on is made of aligned pairs.
__device__ __forceinline__ bool made_of_pairs(const scalar_t* y, int length, index_t step) {
  return length % 2 == 0 && step == 1 && reinterpret_cast<index_t>(y) % (2 * sizeof(scalar_t)) == 0;
}

// Finish and store `length` sums from y on, a step apart, of which `live` lie inside the row: in pairs where these are aligned, as in rows of even
// length. A warp's pairs are a whole piece of the row; single elements leave holes for the next store to fill.
__device__ __forceinline__ void store_piece(const Epilogue& epilogue, const accum_t* sums, int length, scalar_t* y,
                                            index_t step, int live, bool aligned) {
#pragma unroll
  for (int r = 0; r + 1 < length; r += 2) {
    const scalar_t first = epilogue.finish(sums[r]), second = epilogue.finish(sums[r + 1]);
    const bool paired = aligned && r + 1 < live;
    if (paired) store_pair(y + r, first, second);
    if (!paired && r < live) y[r * step] = first;
    if (!paired && r + 1 < live) y[(r + 1) * step] = second;
  }
  if (length % 2 == 1 && length - 1 < live) y[(length - 1) * step] = epilogue.finish(sums[length - 1]);
}
