// wgmma: the warpgroup's matrix product of Hopper (sm_90a), D[64][N] += A[64][K] * B[K][N], both operands in shared memory.
// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions". K is 32 bytes of the element type: 8 for TF32, 16 for fp16 and bf16.
//
// Operands lie in shared memory as cores of 8 rows x 16 bytes, rows 16 bytes apart (no swizzle). `k_step` is the distance of
// the two cores along K; neighbouring cores along M or N lie 128 bytes apart. Any 16-byte aligned start is legal, so that a
// convolution's tap is nothing but another start address.
#pragma once

#include "convt3d/pipe/pipeline.cuh"

// The low word of an operand's descriptor; `+ n` moves its start by n * 16 bytes. The high word holds `row_step`, always 128.
__device__ inline unsigned wgmma_operand(unsigned shared_address, unsigned k_step) {
  return (shared_address >> 4 & 0x3fffu) | (k_step >> 4) << 16;
}

#if defined(__CUDACC__)

// Accumulator lists for N = 8, 16, ... 256: "%0, %1, ..." and the operands they stand for, four floats for each 8 columns.
// clang-format off
#define WGMMA_LIST_1 "%0, %1, %2, %3"
#define WGMMA_LIST_2 WGMMA_LIST_1 ", %4, %5, %6, %7"
#define WGMMA_LIST_3 WGMMA_LIST_2 ", %8, %9, %10, %11"
#define WGMMA_LIST_4 WGMMA_LIST_3 ", %12, %13, %14, %15"
#define WGMMA_LIST_5 WGMMA_LIST_4 ", %16, %17, %18, %19"
#define WGMMA_LIST_6 WGMMA_LIST_5 ", %20, %21, %22, %23"
#define WGMMA_LIST_7 WGMMA_LIST_6 ", %24, %25, %26, %27"
#define WGMMA_LIST_8 WGMMA_LIST_7 ", %28, %29, %30, %31"
#define WGMMA_LIST_9 WGMMA_LIST_8 ", %32, %33, %34, %35"
#define WGMMA_LIST_10 WGMMA_LIST_9 ", %36, %37, %38, %39"
#define WGMMA_LIST_11 WGMMA_LIST_10 ", %40, %41, %42, %43"
#define WGMMA_LIST_12 WGMMA_LIST_11 ", %44, %45, %46, %47"
#define WGMMA_LIST_13 WGMMA_LIST_12 ", %48, %49, %50, %51"
#define WGMMA_LIST_14 WGMMA_LIST_13 ", %52, %53, %54, %55"
#define WGMMA_LIST_15 WGMMA_LIST_14 ", %56, %57, %58, %59"
#define WGMMA_LIST_16 WGMMA_LIST_15 ", %60, %61, %62, %63"
#define WGMMA_LIST_17 WGMMA_LIST_16 ", %64, %65, %66, %67"
#define WGMMA_LIST_18 WGMMA_LIST_17 ", %68, %69, %70, %71"
#define WGMMA_LIST_19 WGMMA_LIST_18 ", %72, %73, %74, %75"
#define WGMMA_LIST_20 WGMMA_LIST_19 ", %76, %77, %78, %79"
#define WGMMA_LIST_21 WGMMA_LIST_20 ", %80, %81, %82, %83"
#define WGMMA_LIST_22 WGMMA_LIST_21 ", %84, %85, %86, %87"
#define WGMMA_LIST_23 WGMMA_LIST_22 ", %88, %89, %90, %91"
#define WGMMA_LIST_24 WGMMA_LIST_23 ", %92, %93, %94, %95"
#define WGMMA_LIST_25 WGMMA_LIST_24 ", %96, %97, %98, %99"
#define WGMMA_LIST_26 WGMMA_LIST_25 ", %100, %101, %102, %103"
#define WGMMA_LIST_27 WGMMA_LIST_26 ", %104, %105, %106, %107"
#define WGMMA_LIST_28 WGMMA_LIST_27 ", %108, %109, %110, %111"
#define WGMMA_LIST_29 WGMMA_LIST_28 ", %112, %113, %114, %115"
#define WGMMA_LIST_30 WGMMA_LIST_29 ", %116, %117, %118, %119"
#define WGMMA_LIST_31 WGMMA_LIST_30 ", %120, %121, %122, %123"
#define WGMMA_LIST_32 WGMMA_LIST_31 ", %124, %125, %126, %127"
#define WGMMA_FLOATS_1 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_FLOATS_2 WGMMA_FLOATS_1, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define WGMMA_FLOATS_3 WGMMA_FLOATS_2, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define WGMMA_FLOATS_4 WGMMA_FLOATS_3, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define WGMMA_FLOATS_5 WGMMA_FLOATS_4, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define WGMMA_FLOATS_6 WGMMA_FLOATS_5, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define WGMMA_FLOATS_7 WGMMA_FLOATS_6, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define WGMMA_FLOATS_8 WGMMA_FLOATS_7, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define WGMMA_FLOATS_9 WGMMA_FLOATS_8, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define WGMMA_FLOATS_10 WGMMA_FLOATS_9, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define WGMMA_FLOATS_11 WGMMA_FLOATS_10, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define WGMMA_FLOATS_12 WGMMA_FLOATS_11, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define WGMMA_FLOATS_13 WGMMA_FLOATS_12, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define WGMMA_FLOATS_14 WGMMA_FLOATS_13, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define WGMMA_FLOATS_15 WGMMA_FLOATS_14, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define WGMMA_FLOATS_16 WGMMA_FLOATS_15, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define WGMMA_FLOATS_17 WGMMA_FLOATS_16, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define WGMMA_FLOATS_18 WGMMA_FLOATS_17, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define WGMMA_FLOATS_19 WGMMA_FLOATS_18, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define WGMMA_FLOATS_20 WGMMA_FLOATS_19, "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79])
#define WGMMA_FLOATS_21 WGMMA_FLOATS_20, "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83])
#define WGMMA_FLOATS_22 WGMMA_FLOATS_21, "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87])
#define WGMMA_FLOATS_23 WGMMA_FLOATS_22, "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), "+f"(d[91])
#define WGMMA_FLOATS_24 WGMMA_FLOATS_23, "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95])
#define WGMMA_FLOATS_25 WGMMA_FLOATS_24, "+f"(d[96]), "+f"(d[97]), "+f"(d[98]), "+f"(d[99])
#define WGMMA_FLOATS_26 WGMMA_FLOATS_25, "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103])
#define WGMMA_FLOATS_27 WGMMA_FLOATS_26, "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107])
#define WGMMA_FLOATS_28 WGMMA_FLOATS_27, "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111])
#define WGMMA_FLOATS_29 WGMMA_FLOATS_28, "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115])
#define WGMMA_FLOATS_30 WGMMA_FLOATS_29, "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119])
#define WGMMA_FLOATS_31 WGMMA_FLOATS_30, "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123])
#define WGMMA_FLOATS_32 WGMMA_FLOATS_31, "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
#define WGMMA_ENDS_1 "}, %4, %5, p, 1, 1"
#define WGMMA_HEAD_1 "{.reg .pred p; setp.ne.u32 p, %6, 0; wgmma.mma_async.sync.aligned.m64n8"
#define WGMMA_ENDS_2 "}, %8, %9, p, 1, 1"
#define WGMMA_HEAD_2 "{.reg .pred p; setp.ne.u32 p, %10, 0; wgmma.mma_async.sync.aligned.m64n16"
#define WGMMA_ENDS_3 "}, %12, %13, p, 1, 1"
#define WGMMA_HEAD_3 "{.reg .pred p; setp.ne.u32 p, %14, 0; wgmma.mma_async.sync.aligned.m64n24"
#define WGMMA_ENDS_4 "}, %16, %17, p, 1, 1"
#define WGMMA_HEAD_4 "{.reg .pred p; setp.ne.u32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32"
#define WGMMA_ENDS_5 "}, %20, %21, p, 1, 1"
#define WGMMA_HEAD_5 "{.reg .pred p; setp.ne.u32 p, %22, 0; wgmma.mma_async.sync.aligned.m64n40"
#define WGMMA_ENDS_6 "}, %24, %25, p, 1, 1"
#define WGMMA_HEAD_6 "{.reg .pred p; setp.ne.u32 p, %26, 0; wgmma.mma_async.sync.aligned.m64n48"
#define WGMMA_ENDS_7 "}, %28, %29, p, 1, 1"
#define WGMMA_HEAD_7 "{.reg .pred p; setp.ne.u32 p, %30, 0; wgmma.mma_async.sync.aligned.m64n56"
#define WGMMA_ENDS_8 "}, %32, %33, p, 1, 1"
#define WGMMA_HEAD_8 "{.reg .pred p; setp.ne.u32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64"
#define WGMMA_ENDS_9 "}, %36, %37, p, 1, 1"
#define WGMMA_HEAD_9 "{.reg .pred p; setp.ne.u32 p, %38, 0; wgmma.mma_async.sync.aligned.m64n72"
#define WGMMA_ENDS_10 "}, %40, %41, p, 1, 1"
#define WGMMA_HEAD_10 "{.reg .pred p; setp.ne.u32 p, %42, 0; wgmma.mma_async.sync.aligned.m64n80"
#define WGMMA_ENDS_11 "}, %44, %45, p, 1, 1"
#define WGMMA_HEAD_11 "{.reg .pred p; setp.ne.u32 p, %46, 0; wgmma.mma_async.sync.aligned.m64n88"
#define WGMMA_ENDS_12 "}, %48, %49, p, 1, 1"
#define WGMMA_HEAD_12 "{.reg .pred p; setp.ne.u32 p, %50, 0; wgmma.mma_async.sync.aligned.m64n96"
#define WGMMA_ENDS_13 "}, %52, %53, p, 1, 1"
#define WGMMA_HEAD_13 "{.reg .pred p; setp.ne.u32 p, %54, 0; wgmma.mma_async.sync.aligned.m64n104"
#define WGMMA_ENDS_14 "}, %56, %57, p, 1, 1"
#define WGMMA_HEAD_14 "{.reg .pred p; setp.ne.u32 p, %58, 0; wgmma.mma_async.sync.aligned.m64n112"
#define WGMMA_ENDS_15 "}, %60, %61, p, 1, 1"
#define WGMMA_HEAD_15 "{.reg .pred p; setp.ne.u32 p, %62, 0; wgmma.mma_async.sync.aligned.m64n120"
#define WGMMA_ENDS_16 "}, %64, %65, p, 1, 1"
#define WGMMA_HEAD_16 "{.reg .pred p; setp.ne.u32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128"
#define WGMMA_ENDS_17 "}, %68, %69, p, 1, 1"
#define WGMMA_HEAD_17 "{.reg .pred p; setp.ne.u32 p, %70, 0; wgmma.mma_async.sync.aligned.m64n136"
#define WGMMA_ENDS_18 "}, %72, %73, p, 1, 1"
#define WGMMA_HEAD_18 "{.reg .pred p; setp.ne.u32 p, %74, 0; wgmma.mma_async.sync.aligned.m64n144"
#define WGMMA_ENDS_19 "}, %76, %77, p, 1, 1"
#define WGMMA_HEAD_19 "{.reg .pred p; setp.ne.u32 p, %78, 0; wgmma.mma_async.sync.aligned.m64n152"
#define WGMMA_ENDS_20 "}, %80, %81, p, 1, 1"
#define WGMMA_HEAD_20 "{.reg .pred p; setp.ne.u32 p, %82, 0; wgmma.mma_async.sync.aligned.m64n160"
#define WGMMA_ENDS_21 "}, %84, %85, p, 1, 1"
#define WGMMA_HEAD_21 "{.reg .pred p; setp.ne.u32 p, %86, 0; wgmma.mma_async.sync.aligned.m64n168"
#define WGMMA_ENDS_22 "}, %88, %89, p, 1, 1"
#define WGMMA_HEAD_22 "{.reg .pred p; setp.ne.u32 p, %90, 0; wgmma.mma_async.sync.aligned.m64n176"
#define WGMMA_ENDS_23 "}, %92, %93, p, 1, 1"
#define WGMMA_HEAD_23 "{.reg .pred p; setp.ne.u32 p, %94, 0; wgmma.mma_async.sync.aligned.m64n184"
#define WGMMA_ENDS_24 "}, %96, %97, p, 1, 1"
#define WGMMA_HEAD_24 "{.reg .pred p; setp.ne.u32 p, %98, 0; wgmma.mma_async.sync.aligned.m64n192"
#define WGMMA_ENDS_25 "}, %100, %101, p, 1, 1"
#define WGMMA_HEAD_25 "{.reg .pred p; setp.ne.u32 p, %102, 0; wgmma.mma_async.sync.aligned.m64n200"
#define WGMMA_ENDS_26 "}, %104, %105, p, 1, 1"
#define WGMMA_HEAD_26 "{.reg .pred p; setp.ne.u32 p, %106, 0; wgmma.mma_async.sync.aligned.m64n208"
#define WGMMA_ENDS_27 "}, %108, %109, p, 1, 1"
#define WGMMA_HEAD_27 "{.reg .pred p; setp.ne.u32 p, %110, 0; wgmma.mma_async.sync.aligned.m64n216"
#define WGMMA_ENDS_28 "}, %112, %113, p, 1, 1"
#define WGMMA_HEAD_28 "{.reg .pred p; setp.ne.u32 p, %114, 0; wgmma.mma_async.sync.aligned.m64n224"
#define WGMMA_ENDS_29 "}, %116, %117, p, 1, 1"
#define WGMMA_HEAD_29 "{.reg .pred p; setp.ne.u32 p, %118, 0; wgmma.mma_async.sync.aligned.m64n232"
#define WGMMA_ENDS_30 "}, %120, %121, p, 1, 1"
#define WGMMA_HEAD_30 "{.reg .pred p; setp.ne.u32 p, %122, 0; wgmma.mma_async.sync.aligned.m64n240"
#define WGMMA_ENDS_31 "}, %124, %125, p, 1, 1"
#define WGMMA_HEAD_31 "{.reg .pred p; setp.ne.u32 p, %126, 0; wgmma.mma_async.sync.aligned.m64n248"
#define WGMMA_ENDS_32 "}, %128, %129, p, 1, 1"
#define WGMMA_HEAD_32 "{.reg .pred p; setp.ne.u32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256"
#define WGMMA_JOIN_(a, b) a##b
#define WGMMA_JOIN(a, b) WGMMA_JOIN_(a, b)
// clang-format on

#if defined(CONVT3D_FP16)
#define WGMMA_KIND "k16.f32.f16.f16"
#define WGMMA_TAIL ", 0, 0;}"
#elif defined(CONVT3D_BF16)
#define WGMMA_KIND "k16.f32.bf16.bf16"
#define WGMMA_TAIL ", 0, 0;}"
#else
#define WGMMA_KIND "k8.f32.tf32.tf32"
#define WGMMA_TAIL ";}"
#endif

// D = A * B, plus D if `accumulate`, for N = 8 * WGMMA_TILES columns. The sums arrive with `wgmma_wait`; until then they may not
// be touched.
__device__ __forceinline__ void wgmma(float* d, unsigned a, unsigned b, unsigned accumulate, int) {
  constexpr unsigned long long ROW_STEP = 128ull >> 4 << 32;
  asm volatile(WGMMA_JOIN(WGMMA_HEAD_, WGMMA_TILES) WGMMA_KIND " {" WGMMA_JOIN(WGMMA_LIST_, WGMMA_TILES)
                   WGMMA_JOIN(WGMMA_ENDS_, WGMMA_TILES) WGMMA_TAIL
               : WGMMA_JOIN(WGMMA_FLOATS_, WGMMA_TILES)
               : "l"(ROW_STEP | a), "l"(ROW_STEP | b), "r"(accumulate));
}

// Before the first wgmma after the accumulators were touched by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most `pending` of this warpgroup's committed groups are still running.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#else

#include "convt3d/host/wgmma.h"

#endif
