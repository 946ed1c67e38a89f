// Whole elements copied by cp.async, or zeros in their place.
#pragma once

#include "convt3d/ptx/shared_memory.cuh"

// Copy one element of 4, 8 or 16 bytes, or write zeros where it is not live; the source must be a legal address either way.
template <class T>
__device__ inline void copy_async(T* shared, const T* global, bool live) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "cp.async moves 4, 8 or 16 bytes");
#if defined(__CUDACC__)  // not by cp_async: fprop_patch then spills on sm_80
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int bytes = live ? sizeof(T) : 0;
  if constexpr (sizeof(T) == 16) {  // past L1: what is copied whole is used once
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(global), "n"(sizeof(T)), "r"(bytes)
                 : "memory");
  }
#else
  cp_async<sizeof(T)>(shared_address(shared), global, live ? sizeof(T) : 0);
#endif
}
