// scalar_t, the type of a tensor's elements, and accum_t, the type sums are kept in: fp64 and fp32 keep their own, the
// 16-bit types accumulate in fp32. An instance is chosen by defining one of CONVT3D_FP64, _FP32, _FP16, _BF16.
#pragma once

struct half_t {
  unsigned short bits;
};

struct bfloat16_t {
  unsigned short bits;
};

__device__ inline float to_accum(float value) { return value; }
__device__ inline double to_accum(double value) { return value; }

#if defined(__CUDACC__)

__device__ inline float to_accum(half_t value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}

__device__ inline float to_accum(bfloat16_t value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }

__device__ inline void round_to(float value, half_t& narrow) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value)); }

__device__ inline void round_to(float value, bfloat16_t& narrow) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(value));
}

#else

inline float to_accum(bfloat16_t value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }

inline float to_accum(half_t value) {
  const unsigned sign = (value.bits & 0x8000u) << 16, exponent = (value.bits >> 10) & 31u, fraction = value.bits & 0x3ffu;
  if (exponent == 31u) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0u) {  // zero or subnormal: fraction * 2^-24 is exact in fp32
    const float magnitude = static_cast<float>(fraction) * 5.9604644775390625e-8f;
    return sign ? -magnitude : magnitude;
  }
  return __uint_as_float(sign | (exponent + 112u) << 23 | fraction << 13);
}

// Round to nearest even by adding just under half of the last kept bit; the carry runs into the exponent as it should.
inline void round_to(float value, bfloat16_t& narrow) {
  const unsigned bits = __float_as_uint(value);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  narrow.bits = is_nan ? 0x7fffu : static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline void round_to(float value, half_t& narrow) {
  const unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  unsigned rounded;
  if (magnitude > 0x7f800000u) {
    rounded = 0x7fffu;  // NaN
  } else if (magnitude >= 0x47800000u) {
    rounded = 0x7c00u;  // 65536 and above
  } else if (magnitude < 0x38800000u) {
    // Below 2^-14 the last place is 2^-24, and 0.5f's last place at 2^-1 is 2^-24 too: the addition does the rounding.
    rounded = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    rounded = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  narrow.bits = static_cast<unsigned short>(sign | rounded);
}

#endif

__device__ inline void round_to(float value, float& same) { same = value; }
__device__ inline void round_to(double value, double& same) { same = value; }

#if defined(CONVT3D_FP64)
typedef double scalar_t;
typedef double accum_t;
#elif defined(CONVT3D_FP16)
typedef half_t scalar_t;
typedef float accum_t;
#elif defined(CONVT3D_BF16)
typedef bfloat16_t scalar_t;
typedef float accum_t;
#else
typedef float scalar_t;
typedef float accum_t;
#endif

// Round a sum once to the tensor's element type.
__device__ inline scalar_t to_scalar(accum_t value) {
  scalar_t narrow;
  round_to(value, narrow);
  return narrow;
}
