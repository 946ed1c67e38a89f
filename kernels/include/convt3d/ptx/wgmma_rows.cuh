// wgmma with both operands in shared memory as in wgmma.cuh, but the cores of A (8 rows of it) any other distance apart: so its 64 rows may
// be a patch of a plane, eight neighbours each of eight rows.
#pragma once

#include "convt3d/ptx/wgmma.cuh"

#if defined(__CUDACC__)

// D = A * B, plus D if `accumulate`, for N = 8 * WGMMA_TILES columns; `row_step` bytes, a multiple of 16, from 8 rows of A to the next.
__device__ __forceinline__ void wgmma_rows(float* d, unsigned a, unsigned row_step, unsigned b, unsigned accumulate, int) {
  constexpr unsigned long long ROW_STEP = 128ull >> 4 << 32;
  asm volatile(WGMMA_JOIN(WGMMA_HEAD_, WGMMA_TILES) WGMMA_KIND " {" WGMMA_JOIN(WGMMA_LIST_, WGMMA_TILES)
                   WGMMA_JOIN(WGMMA_ENDS_, WGMMA_TILES) WGMMA_TAIL
               : WGMMA_JOIN(WGMMA_FLOATS_, WGMMA_TILES)
               : "l"(static_cast<unsigned long long>(row_step >> 4) << 32 | a), "l"(ROW_STEP | b), "r"(accumulate));
}

#endif
