// Keeping a loop's constants out of registers.
#pragma once

// Read memory anew from here on: the compiler would keep what it has read from shared memory in registers throughout a loop, and spill it.
__device__ __forceinline__ void forget_memory() { asm volatile("" ::: "memory"); }

// The same number, of which the compiler knows nothing: what follows from it is computed here, not before a loop and kept.
template <typename T>  // of 32 bits
__device__ __forceinline__ T computed_anew(T value) {
#if defined(__CUDACC__)
  asm volatile("" : "+r"(value));
#endif
  return value;
}
