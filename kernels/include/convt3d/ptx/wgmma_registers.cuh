// wgmma with A in registers: D[64][N] += A[64][K] * B[K][N], where each warp brings 16 rows of A as the fragments of mma.cuh and B lies in
// shared memory as in wgmma.cuh. So rows may come from anywhere, and be rounded on their way.
#pragma once

#include "convt3d/ptx/wgmma.cuh"

#if defined(__CUDACC__)

// The operands behind the sums: four registers of A, the descriptor of B, whether to accumulate.
// clang-format off
#define WGMMA_REGISTERS_ENDS_1 "}, {%4, %5, %6, %7}, %8, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_1 "{.reg .pred p; setp.ne.u32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8"
#define WGMMA_REGISTERS_ENDS_2 "}, {%8, %9, %10, %11}, %12, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_2 "{.reg .pred p; setp.ne.u32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16"
#define WGMMA_REGISTERS_ENDS_3 "}, {%12, %13, %14, %15}, %16, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_3 "{.reg .pred p; setp.ne.u32 p, %17, 0; wgmma.mma_async.sync.aligned.m64n24"
#define WGMMA_REGISTERS_ENDS_4 "}, {%16, %17, %18, %19}, %20, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_4 "{.reg .pred p; setp.ne.u32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32"
#define WGMMA_REGISTERS_ENDS_5 "}, {%20, %21, %22, %23}, %24, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_5 "{.reg .pred p; setp.ne.u32 p, %25, 0; wgmma.mma_async.sync.aligned.m64n40"
#define WGMMA_REGISTERS_ENDS_6 "}, {%24, %25, %26, %27}, %28, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_6 "{.reg .pred p; setp.ne.u32 p, %29, 0; wgmma.mma_async.sync.aligned.m64n48"
#define WGMMA_REGISTERS_ENDS_7 "}, {%28, %29, %30, %31}, %32, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_7 "{.reg .pred p; setp.ne.u32 p, %33, 0; wgmma.mma_async.sync.aligned.m64n56"
#define WGMMA_REGISTERS_ENDS_8 "}, {%32, %33, %34, %35}, %36, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_8 "{.reg .pred p; setp.ne.u32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64"
#define WGMMA_REGISTERS_ENDS_9 "}, {%36, %37, %38, %39}, %40, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_9 "{.reg .pred p; setp.ne.u32 p, %41, 0; wgmma.mma_async.sync.aligned.m64n72"
#define WGMMA_REGISTERS_ENDS_10 "}, {%40, %41, %42, %43}, %44, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_10 "{.reg .pred p; setp.ne.u32 p, %45, 0; wgmma.mma_async.sync.aligned.m64n80"
#define WGMMA_REGISTERS_ENDS_11 "}, {%44, %45, %46, %47}, %48, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_11 "{.reg .pred p; setp.ne.u32 p, %49, 0; wgmma.mma_async.sync.aligned.m64n88"
#define WGMMA_REGISTERS_ENDS_12 "}, {%48, %49, %50, %51}, %52, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_12 "{.reg .pred p; setp.ne.u32 p, %53, 0; wgmma.mma_async.sync.aligned.m64n96"
#define WGMMA_REGISTERS_ENDS_13 "}, {%52, %53, %54, %55}, %56, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_13 "{.reg .pred p; setp.ne.u32 p, %57, 0; wgmma.mma_async.sync.aligned.m64n104"
#define WGMMA_REGISTERS_ENDS_14 "}, {%56, %57, %58, %59}, %60, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_14 "{.reg .pred p; setp.ne.u32 p, %61, 0; wgmma.mma_async.sync.aligned.m64n112"
#define WGMMA_REGISTERS_ENDS_15 "}, {%60, %61, %62, %63}, %64, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_15 "{.reg .pred p; setp.ne.u32 p, %65, 0; wgmma.mma_async.sync.aligned.m64n120"
#define WGMMA_REGISTERS_ENDS_16 "}, {%64, %65, %66, %67}, %68, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_16 "{.reg .pred p; setp.ne.u32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128"
#define WGMMA_REGISTERS_ENDS_17 "}, {%68, %69, %70, %71}, %72, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_17 "{.reg .pred p; setp.ne.u32 p, %73, 0; wgmma.mma_async.sync.aligned.m64n136"
#define WGMMA_REGISTERS_ENDS_18 "}, {%72, %73, %74, %75}, %76, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_18 "{.reg .pred p; setp.ne.u32 p, %77, 0; wgmma.mma_async.sync.aligned.m64n144"
#define WGMMA_REGISTERS_ENDS_19 "}, {%76, %77, %78, %79}, %80, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_19 "{.reg .pred p; setp.ne.u32 p, %81, 0; wgmma.mma_async.sync.aligned.m64n152"
#define WGMMA_REGISTERS_ENDS_20 "}, {%80, %81, %82, %83}, %84, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_20 "{.reg .pred p; setp.ne.u32 p, %85, 0; wgmma.mma_async.sync.aligned.m64n160"
#define WGMMA_REGISTERS_ENDS_21 "}, {%84, %85, %86, %87}, %88, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_21 "{.reg .pred p; setp.ne.u32 p, %89, 0; wgmma.mma_async.sync.aligned.m64n168"
#define WGMMA_REGISTERS_ENDS_22 "}, {%88, %89, %90, %91}, %92, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_22 "{.reg .pred p; setp.ne.u32 p, %93, 0; wgmma.mma_async.sync.aligned.m64n176"
#define WGMMA_REGISTERS_ENDS_23 "}, {%92, %93, %94, %95}, %96, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_23 "{.reg .pred p; setp.ne.u32 p, %97, 0; wgmma.mma_async.sync.aligned.m64n184"
#define WGMMA_REGISTERS_ENDS_24 "}, {%96, %97, %98, %99}, %100, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_24 "{.reg .pred p; setp.ne.u32 p, %101, 0; wgmma.mma_async.sync.aligned.m64n192"
#define WGMMA_REGISTERS_ENDS_25 "}, {%100, %101, %102, %103}, %104, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_25 "{.reg .pred p; setp.ne.u32 p, %105, 0; wgmma.mma_async.sync.aligned.m64n200"
#define WGMMA_REGISTERS_ENDS_26 "}, {%104, %105, %106, %107}, %108, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_26 "{.reg .pred p; setp.ne.u32 p, %109, 0; wgmma.mma_async.sync.aligned.m64n208"
#define WGMMA_REGISTERS_ENDS_27 "}, {%108, %109, %110, %111}, %112, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_27 "{.reg .pred p; setp.ne.u32 p, %113, 0; wgmma.mma_async.sync.aligned.m64n216"
#define WGMMA_REGISTERS_ENDS_28 "}, {%112, %113, %114, %115}, %116, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_28 "{.reg .pred p; setp.ne.u32 p, %117, 0; wgmma.mma_async.sync.aligned.m64n224"
#define WGMMA_REGISTERS_ENDS_29 "}, {%116, %117, %118, %119}, %120, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_29 "{.reg .pred p; setp.ne.u32 p, %121, 0; wgmma.mma_async.sync.aligned.m64n232"
#define WGMMA_REGISTERS_ENDS_30 "}, {%120, %121, %122, %123}, %124, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_30 "{.reg .pred p; setp.ne.u32 p, %125, 0; wgmma.mma_async.sync.aligned.m64n240"
#define WGMMA_REGISTERS_ENDS_31 "}, {%124, %125, %126, %127}, %128, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_31 "{.reg .pred p; setp.ne.u32 p, %129, 0; wgmma.mma_async.sync.aligned.m64n248"
#define WGMMA_REGISTERS_ENDS_32 "}, {%128, %129, %130, %131}, %132, p, 1, 1"
#define WGMMA_REGISTERS_HEAD_32 "{.reg .pred p; setp.ne.u32 p, %133, 0; wgmma.mma_async.sync.aligned.m64n256"
// clang-format on

#if defined(CONVT3D_FP16) || defined(CONVT3D_BF16)
#define WGMMA_REGISTERS_TAIL ", 0;}"
#else
#define WGMMA_REGISTERS_TAIL ";}"
#endif

// D = A * B, plus D if `accumulate`, for N = 8 * WGMMA_TILES columns. Until `wgmma_wait` neither the sums nor `a` may be touched.
__device__ __forceinline__ void wgmma_registers(float* d, const unsigned (&a)[4], unsigned b, unsigned accumulate, int) {
  constexpr unsigned long long ROW_STEP = 128ull >> 4 << 32;
  asm volatile(WGMMA_JOIN(WGMMA_REGISTERS_HEAD_, WGMMA_TILES) WGMMA_KIND " {" WGMMA_JOIN(WGMMA_LIST_, WGMMA_TILES)
                   WGMMA_JOIN(WGMMA_REGISTERS_ENDS_, WGMMA_TILES) WGMMA_REGISTERS_TAIL
               : WGMMA_JOIN(WGMMA_FLOATS_, WGMMA_TILES)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(ROW_STEP | b), "r"(accumulate));
}

#endif
