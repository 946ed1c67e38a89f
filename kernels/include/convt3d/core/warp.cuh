// What the lanes of a warp have in common.
#pragma once

// What all lanes have, so that the compiler knows it.
__device__ __forceinline__ int of_warp(int value) { return __shfl_sync(0xffffffffu, value, 0); }
