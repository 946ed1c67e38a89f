// Launches that begin beside the ones before them where the card can (sm_90 and newer), in a kernel for older cards too.
#pragma once

#include "convt3d/ptx/beside_packing.cuh"

// The host runs both sides.
__device__ __forceinline__ void begin_next() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  let_next_begin();
#endif
}
__device__ __forceinline__ void wait_for_launch_before() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  wait_for_packing();
#endif
}
