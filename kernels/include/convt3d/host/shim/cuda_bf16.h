// CUDA's bf16: __nv_bfloat16 and __nv_bfloat162 with what calculates and converts them.
#pragma once

#include "../float16.h"

using __nv_bfloat16 = convt3d_host::Float16<7, -126>;
using __nv_bfloat162 = convt3d_host::Pair16<__nv_bfloat16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

CONVT3D_NAMED16(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat162)
inline __nv_bfloat162 __lowhigh2highlow(__nv_bfloat162 a) { return {a.y, a.x}; }

#define CUDART_INF_BF16 __ushort_as_bfloat16(0x7f80u)
#define CUDART_NAN_BF16 __ushort_as_bfloat16(0x7fffu)
#define CUDART_MIN_DENORM_BF16 __ushort_as_bfloat16(0x0001u)
#define CUDART_MAX_NORMAL_BF16 __ushort_as_bfloat16(0x7f7fu)
#define CUDART_NEG_ZERO_BF16 __ushort_as_bfloat16(0x8000u)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16(0x0000u)
#define CUDART_ONE_BF16 __ushort_as_bfloat16(0x3f80u)
