// One store of 16 bytes, or of 8 in 16 bits; in PTX, because the compiler may make four of it where other code stores the same elements
// one by one.
#pragma once

#if defined(__CUDACC__)
__device__ __forceinline__ void store_vector(float* y, const float (&x)[4]) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(y)), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3])
               : "memory");
}
__device__ __forceinline__ void store_vector(double* y, const double (&x)[2]) {
  asm volatile("st.global.v2.f64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(y)), "d"(x[0]), "d"(x[1]) : "memory");
}
template <class T>
__device__ __forceinline__ void store_vector(T* y, const T (&x)[4]) {
  static_assert(sizeof(T) == 2, "neighbours of 16 bits are stored by fours");
  unsigned words[2];
  memcpy(words, x, sizeof words);
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(y)), "r"(words[0]), "r"(words[1]) : "memory");
}
#else
template <class T>
inline void store_vector(T* y, const T (&x)[4]) {
  static_assert(sizeof(T) == 2, "neighbours of 16 bits are stored by fours");
  *reinterpret_cast<uint2*>(y) = *reinterpret_cast<const uint2*>(x);
}
inline void store_vector(float* y, const float (&x)[4]) { *reinterpret_cast<float4*>(y) = make_float4(x[0], x[1], x[2], x[3]); }
inline void store_vector(double* y, const double (&x)[2]) { *reinterpret_cast<double2*>(y) = make_double2(x[0], x[1]); }
#endif
