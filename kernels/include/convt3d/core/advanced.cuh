// Walking through memory by a step known only at run time.
#pragma once

// `pointer`, into global memory, and so many bytes, by one addition: of a walk through equal steps the compiler makes a product for each
// of its places.
template <typename T>
__device__ __forceinline__ T* advanced(T* pointer, index_t bytes) {
#if defined(__CUDACC__)
  unsigned long long address = __cvta_generic_to_global(pointer);
  asm("add.s64 %0, %1, %2;" : "=l"(address) : "l"(address), "l"(bytes));
  return static_cast<T*>(__cvta_global_to_generic(address));
#else
  return reinterpret_cast<T*>(reinterpret_cast<unsigned long long>(pointer) + static_cast<unsigned long long>(bytes));
#endif
}
