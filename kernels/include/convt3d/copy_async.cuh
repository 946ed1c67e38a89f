// Copies from global to shared memory that pass no register and run while the thread goes on: cp.async, on the host a plain copy.
#pragma once

// Copy one element of 4, 8 or 16 bytes, or write zeros where it is not live; the source must be a legal address either way.
template <class T>
__device__ inline void copy_async(T* shared, const T* global, bool live) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "cp.async moves 4, 8 or 16 bytes");
#if defined(__CUDACC__)
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int bytes = live ? sizeof(T) : 0;
  if constexpr (sizeof(T) == 16) {  // past L1: what is copied whole is used once
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global), "n"(sizeof(T)), "r"(bytes)
                 : "memory");
  }
#else
  *shared = live ? *global : T{};
#endif
}

// Wait until all of this thread's copies have landed; a barrier then shows them to the block.
__device__ inline void wait_for_copies() {
#if defined(__CUDACC__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
