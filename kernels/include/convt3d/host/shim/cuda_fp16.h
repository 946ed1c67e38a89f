// The part of CUDA's fp16 header that kernels with fp32 accumulation use.
#pragma once
#include "../../dtypes.cuh"

typedef half_t __half;
typedef half_t half;
inline float __half2float(half_t value) { return to_accum(value); }
inline half_t __float2half(float value) {
  half_t narrow;
  round_to(value, narrow);
  return narrow;
}
inline half_t __float2half_rn(float value) { return __float2half(value); }
