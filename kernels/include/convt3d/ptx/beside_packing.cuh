// A kernel that begins while the one before it, which packs its weight, still runs (programmatic dependent launch, sm_90).
// PTX ISA, "griddepcontrol". A source that includes this says so of each of its kernels that comes right behind one that packs.
#pragma once

#if defined(__CUDACC__)

// Whoever reads the packed weight waits for it first. Nothing to wait for, if it was packed for an earlier call.
__device__ __forceinline__ void wait_for_packing() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// In the kernel that packs: the next may begin as soon as all blocks of this one have.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#else

#include "convt3d/host/beside_packing.h"

#endif
