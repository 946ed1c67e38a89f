// Producers and consumers in one block (sm_90): mbarriers, bulk copies from global to shared memory, and register shares.
// PTX ISA, "Asynchronous Barrier" and "cp.async.bulk". An mbarrier is 8 bytes of shared memory, named by its address; a phase of an mbarrier ends when its arrivals and its bytes are all in.
#pragma once

#include "convt3d/ptx/shared_memory.cuh"

#if defined(__CUDACC__)

__device__ __forceinline__ void mbarrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the inits, before the __syncthreads that shows them to the others: bulk copies signal through another proxy.
__device__ __forceinline__ void mbarrier_fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Wait for the end of the phase of that parity; one that lies before the first has ended.
__device__ __forceinline__ void mbarrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same for those who have time: asking again and again takes issue slots and shared memory from the others.
__device__ __forceinline__ void mbarrier_wait_patiently(unsigned barrier, unsigned parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra through;\n"
      "nanosleep.u32 200;\n"
      "bra again;\n"
      "through:}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Copy `bytes`, a multiple of 16 between 16-byte aligned places, and count them in at the barrier.
__device__ __forceinline__ void bulk_copy(unsigned target, const void* source, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Between ordinary stores to shared memory and the barrier that lets wgmma or a bulk copy at it.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// __syncthreads of the 128 threads of one warpgroup alone.
__device__ __forceinline__ void sync_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

template <int registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

#else

#include "convt3d/host/pipeline.h"

#endif
