// Stores of whole stretches from shared to global memory (sm_90), which no thread waits for until it needs their source.
// PTX ISA, "cp.async.bulk" and "cp.async.bulk.commit_group".
#pragma once

#include "convt3d/ptx/shared_memory.cuh"

#if defined(__CUDACC__)

// Store `bytes`, a multiple of 16 between 16-byte aligned places; what `source` holds was written before a `fence_async`.
// Those whose targets begin on 32 bytes, a sector of L2, are quicker: see docs/performance/fprop_rolling_wgmma.md.
__device__ __forceinline__ void bulk_store(void* target, unsigned source, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes) : "memory");
}

// This thread's stores since the last time are a group.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until what all but the newest `groups` of this thread's groups store has been read, so that it may be written over.
template <int groups>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}

#else

#include "convt3d/host/bulk_store.h"

#endif
