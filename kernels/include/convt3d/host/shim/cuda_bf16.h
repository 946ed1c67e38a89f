// The part of CUDA's bf16 header that kernels with fp32 accumulation use.
#pragma once
#include "../../dtypes.cuh"

typedef bfloat16_t __nv_bfloat16;
inline float __bfloat162float(bfloat16_t value) { return to_accum(value); }
inline bfloat16_t __float2bfloat16(float value) {
  bfloat16_t narrow;
  round_to(value, narrow);
  return narrow;
}
inline bfloat16_t __float2bfloat16_rn(float value) { return __float2bfloat16(value); }
