// CUDA's fp16: __half and __half2 with what calculates and converts them.
#pragma once

#include "../float16.h"

using __half = convt3d_host::Float16<10, -14>;
using __half2 = convt3d_host::Pair16<__half>;
using half = __half;
using half2 = __half2;
using __half_raw = __half;
using nv_half = __half;
using nv_half2 = __half2;

CONVT3D_NAMED16(__half, __half2, half, half2)
inline __half2 __lowhigh2highlow(__half2 a) { return {a.y, a.x}; }

#define CUDART_INF_FP16 __ushort_as_half(0x7c00u)
#define CUDART_NAN_FP16 __ushort_as_half(0x7fffu)
#define CUDART_MIN_DENORM_FP16 __ushort_as_half(0x0001u)
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half(0x7bffu)
#define CUDART_NEG_ZERO_FP16 __ushort_as_half(0x8000u)
#define CUDART_ZERO_FP16 __ushort_as_half(0x0000u)
#define CUDART_ONE_FP16 __ushort_as_half(0x3c00u)
