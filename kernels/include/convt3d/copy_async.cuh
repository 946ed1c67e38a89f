// Whole elements copied by cp.async, or zeros in their place.
#pragma once

#include "convt3d/shared_memory.cuh"

// Copy one element of 4, 8 or 16 bytes, or write zeros where it is not live; the source must be a legal address either way.
template <class T>
__device__ inline void copy_async(T* shared, const T* global, bool live) {
  cp_async<sizeof(T)>(shared_address(shared), global, live ? static_cast<int>(sizeof(T)) : 0);
}

// Wait until all of this thread's copies have landed; a barrier then shows them to the block.
__device__ inline void wait_for_copies() {
  cp_async_commit();
  cp_async_wait<0>();
}
