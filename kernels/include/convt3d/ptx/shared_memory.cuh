// Addresses of shared memory as PTX takes them, copies into it that land later (cp.async, sm_80 and newer), and rounding to TF32.
#pragma once

#if defined(__CUDACC__)

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// To the nearest TF32 number, ties away from zero: fp32 bits whose low 13 are zero.
__device__ inline unsigned round_to_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// The same but for ties, which sm_90 and newer round to even, in one instruction in place of three.
__device__ inline unsigned nearest_tf32(float value) {
#if __CUDA_ARCH__ >= 900
  unsigned bits;
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
#else
  return round_to_tf32(value);
#endif
}

// Copy `bytes` (4, 8 or 16, both addresses multiples of it) to shared memory: `source_bytes` from the source, the rest zeros.
// It has landed for this thread after a wait for its group, for the others after a barrier that follows.
template <int bytes>
__device__ __forceinline__ void cp_async(unsigned target, const void* source, int source_bytes = bytes) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if constexpr (bytes == 16) {  // past L1: what is copied whole is used once
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(source_bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(bytes), "r"(source_bytes)
                 : "memory");
  }
}

// Close the group of this thread's copies since the last commit; an empty group counts too.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `pending` of this thread's latest groups are under way.
template <int pending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Wait for all of this thread's copies, committed or not.
__device__ inline void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#else
#include "convt3d/host/shared_memory.h"
#endif
