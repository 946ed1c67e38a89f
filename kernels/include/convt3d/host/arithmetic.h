// CUDA's functions on float and double: bits, conversions and roundings, fast intrinsics, and what <math.h> lacks.
#pragma once

#include <cfenv>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <math.h>  // for sqrt, isnan and their kin without std::, of a float a float
#include <type_traits>

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}

// ---- loads and stores with a hint for the caches ----

#define CONVT3D_CACHE_HINTS(load) \
  template <class T>              \
  T load(const T* address) {      \
    return *address;              \
  }
CONVT3D_CACHE_HINTS(__ldg)
CONVT3D_CACHE_HINTS(__ldca)
CONVT3D_CACHE_HINTS(__ldcg)
CONVT3D_CACHE_HINTS(__ldcs)
CONVT3D_CACHE_HINTS(__ldlu)
CONVT3D_CACHE_HINTS(__ldcv)
#undef CONVT3D_CACHE_HINTS
#define CONVT3D_CACHE_HINTS(store)                                  \
  template <class T>                                                \
  void store(T* address, std::remove_reference_t<const T&> value) { \
    *address = value;                                               \
  }
CONVT3D_CACHE_HINTS(__stwb)
CONVT3D_CACHE_HINTS(__stcg)
CONVT3D_CACHE_HINTS(__stcs)
CONVT3D_CACHE_HINTS(__stwt)
#undef CONVT3D_CACHE_HINTS

// ---- bits ----

namespace convt3d_host {

// Inlined into the runtime too, which no sanitizer watches: else each is a call there.
template <class To, class From>
__attribute__((always_inline)) inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as many bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace convt3d_host

__attribute__((always_inline)) inline float __uint_as_float(unsigned bits) { return convt3d_host::same_bits<float>(bits); }
__attribute__((always_inline)) inline unsigned __float_as_uint(float value) { return convt3d_host::same_bits<unsigned>(value); }
inline float __int_as_float(int bits) { return convt3d_host::same_bits<float>(bits); }
inline int __float_as_int(float value) { return convt3d_host::same_bits<int>(value); }
inline double __longlong_as_double(long long bits) { return convt3d_host::same_bits<double>(bits); }
inline long long __double_as_longlong(double value) { return convt3d_host::same_bits<long long>(value); }
inline int __double2hiint(double value) { return static_cast<int>(__double_as_longlong(value) >> 32); }
inline int __double2loint(double value) { return static_cast<int>(__double_as_longlong(value)); }
inline double __hiloint2double(int high, int low) {
  return __longlong_as_double(static_cast<long long>(static_cast<uint64_t>(high) << 32 | static_cast<unsigned>(low)));
}

// ---- directed rounding ----

namespace convt3d_host {

// The operands are volatile, so that the operation is not done at compile time or moved out of the rounding mode.
template <class Result, class Operation, class... Operands>
__attribute__((noinline)) Result rounded(int mode, Operation operation, Operands... operands) {
  const int before = fegetround();
  fesetround(mode);
  volatile Result result = operation(static_cast<volatile Operands&>(operands)...);
  fesetround(before);
  return result;
}

template <class Float>
Float to_integral(Float value, int mode) {
  return mode == FE_DOWNWARD     ? std::floor(value)
         : mode == FE_UPWARD     ? std::ceil(value)
         : mode == FE_TOWARDZERO ? std::trunc(value)
                                 : std::rint(value);
}

// A number outside the integer's range becomes its nearest end. NaN becomes 0, or the top bit alone where one of the types has 64 bits
// (PTX ISA, "cvt").
template <class Integer, class Float>
Integer to_integer(Float value, int mode) {
  constexpr bool wide = sizeof(Float) == 8 || sizeof(Integer) == 8;
  if (value != value) return wide ? static_cast<Integer>(uint64_t{1} << (8 * sizeof(Integer) - 1)) : Integer{0};
  const Float integral = to_integral(value, mode), limit = std::ldexp(Float{1}, std::numeric_limits<Integer>::digits);
  if (integral >= limit) return std::numeric_limits<Integer>::max();
  if (integral < (std::is_signed_v<Integer> ? -limit : Float{0})) return std::numeric_limits<Integer>::min();
  return static_cast<Integer>(integral);
}

}  // namespace convt3d_host

#define CONVT3D_IN_EACH_MODE(define, ...)                                                                         \
  define(rn, FE_TONEAREST, __VA_ARGS__) define(rz, FE_TOWARDZERO, __VA_ARGS__) define(ru, FE_UPWARD, __VA_ARGS__) \
      define(rd, FE_DOWNWARD, __VA_ARGS__)

#define CONVT3D_ROUNDED_2(suffix, mode, name, type, operation)                                                        \
  template <class = void>                                                                                             \
  inline type name##_##suffix(type a, type b) {                                                                       \
    if constexpr (mode == FE_TONEAREST) return a operation b;                                                         \
    return convt3d_host::rounded<type>(mode, [](volatile type& x, volatile type& y) { return x operation y; }, a, b); \
  }
CONVT3D_IN_EACH_MODE(CONVT3D_ROUNDED_2, __fadd, float, +)
CONVT3D_IN_EACH_MODE(CONVT3D_ROUNDED_2, __fsub, float, -)
CONVT3D_IN_EACH_MODE(CONVT3D_ROUNDED_2, __fmul, float, *)
CONVT3D_IN_EACH_MODE(CONVT3D_ROUNDED_2, __fdiv, float, /)
CONVT3D_IN_EACH_MODE(CONVT3D_ROUNDED_2, __dadd, double, +)
CONVT3D_IN_EACH_MODE(CONVT3D_ROUNDED_2, __dsub, double, -)
CONVT3D_IN_EACH_MODE(CONVT3D_ROUNDED_2, __dmul, double, *)
CONVT3D_IN_EACH_MODE(CONVT3D_ROUNDED_2, __ddiv, double, /)

#define CONVT3D_ROUNDED_OTHERS(suffix, mode, letter, type, fma_name)                                               \
  template <class = void>                                                                                          \
  inline type fma_name##_##suffix(type a, type b, type c) {                                                        \
    if constexpr (mode == FE_TONEAREST) return std::fma(a, b, c);                                                  \
    return convt3d_host::rounded<type>(                                                                            \
        mode,                                                                                                      \
        [](volatile type& x, volatile type& y, volatile type& z) {                                                 \
          return std::fma(static_cast<type>(x), static_cast<type>(y), static_cast<type>(z));                       \
        },                                                                                                         \
        a, b, c);                                                                                                  \
  }                                                                                                                \
  template <class = void>                                                                                          \
  inline type __##letter##sqrt_##suffix(type a) {                                                                  \
    return convt3d_host::rounded<type>(mode, [](volatile type& x) { return std::sqrt(static_cast<type>(x)); }, a); \
  }                                                                                                                \
  template <class = void>                                                                                          \
  inline type __##letter##rcp_##suffix(type a) {                                                                   \
    return __##letter##div_##suffix(type{1}, a);                                                                   \
  }
CONVT3D_IN_EACH_MODE(CONVT3D_ROUNDED_OTHERS, f, float, __fmaf)
CONVT3D_IN_EACH_MODE(CONVT3D_ROUNDED_OTHERS, d, double, __fma)

#define CONVT3D_TO_INTEGER(suffix, mode, name, type, integer) \
  template <class = void>                                     \
  inline integer name##_##suffix(type value) {                \
    return convt3d_host::to_integer<integer>(value, mode);    \
  }
CONVT3D_IN_EACH_MODE(CONVT3D_TO_INTEGER, __float2int, float, int)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_INTEGER, __float2uint, float, unsigned)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_INTEGER, __float2ll, float, long long)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_INTEGER, __float2ull, float, unsigned long long)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_INTEGER, __double2int, double, int)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_INTEGER, __double2uint, double, unsigned)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_INTEGER, __double2ll, double, long long)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_INTEGER, __double2ull, double, unsigned long long)

#define CONVT3D_TO_FLOAT(suffix, mode, name, from, to)                                                  \
  template <class = void>                                                                               \
  inline to name##_##suffix(from value) {                                                               \
    return convt3d_host::rounded<to>(mode, [](volatile from& x) { return static_cast<to>(x); }, value); \
  }
CONVT3D_IN_EACH_MODE(CONVT3D_TO_FLOAT, __int2float, int, float)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_FLOAT, __uint2float, unsigned, float)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_FLOAT, __ll2float, long long, float)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_FLOAT, __ull2float, unsigned long long, float)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_FLOAT, __ll2double, long long, double)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_FLOAT, __ull2double, unsigned long long, double)
CONVT3D_IN_EACH_MODE(CONVT3D_TO_FLOAT, __double2float, double, float)
inline double __int2double_rn(int value) { return value; }
inline double __uint2double_rn(unsigned value) { return value; }

// ---- fast intrinsics: as exact here as the host's own functions, but NaN, 0 and infinity come where they come on a GPU ----

inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
inline float __tanhf(float x) { return std::tanh(x); }
inline void __sincosf(float x, float* sine, float* cosine) { *sine = std::sin(x), *cosine = std::cos(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __powf(float x, float y) { return std::exp2(y * std::log2(x)); }
inline float __fdividef(float x, float y) { return std::fabs(y) > 0x1p126f && !std::isinf(y) ? x * 0.0f : x / y; }
inline float __saturatef(float x) { return x > 0.0f ? x < 1.0f ? x : 1.0f : 0.0f; }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }

// ---- what <math.h> lacks ----

#define CONVT3D_MATH(type, suffix)                                                               \
  template <class = void>                                                                        \
  inline type rcbrt##suffix(type x) {                                                            \
    return type{1} / std::cbrt(x);                                                               \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type rhypot##suffix(type x, type y) {                                                   \
    return type{1} / std::hypot(x, y);                                                           \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type norm3d##suffix(type x, type y, type z) {                                           \
    return std::hypot(x, y, z);                                                                  \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type rnorm3d##suffix(type x, type y, type z) {                                          \
    return type{1} / std::hypot(x, y, z);                                                        \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type norm4d##suffix(type x, type y, type z, type w) {                                   \
    return std::hypot(std::hypot(x, y), std::hypot(z, w));                                       \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type rnorm4d##suffix(type x, type y, type z, type w) {                                  \
    return type{1} / norm4d##suffix(x, y, z, w);                                                 \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type norm##suffix(int count, const type* x) {                                           \
    type length = 0;                                                                             \
    for (int i = 0; i < count; ++i) length = std::hypot(length, x[i]);                           \
    return length;                                                                               \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type rnorm##suffix(int count, const type* x) {                                          \
    return type{1} / norm##suffix(count, x);                                                     \
  }                                                                                              \
  template <class = void>                                                                        \
  inline void sincospi##suffix(type x, type* sine, type* cosine) {                               \
    *sine = sinpi##suffix(x), *cosine = cospi##suffix(x);                                        \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type normcdf##suffix(type x) {                                                          \
    return static_cast<type>(0.5 * std::erfc(-0.70710678118654752 * x));                         \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type erfcx##suffix(type x) {                                                            \
    return static_cast<type>(convt3d_host::scaled_erfc(x));                                      \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type erfcinv##suffix(type y) {                                                          \
    return static_cast<type>(convt3d_host::inverse_erfc(y));                                     \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type erfinv##suffix(type x) {                                                           \
    const double positive = convt3d_host::inverse_erfc(1.0 - std::fabs(static_cast<double>(x))); \
    return static_cast<type>(x < 0 ? -positive : positive);                                      \
  }                                                                                              \
  template <class = void>                                                                        \
  inline type normcdfinv##suffix(type p) {                                                       \
    return static_cast<type>(-1.4142135623730950 * convt3d_host::inverse_erfc(2.0 * p));         \
  }

namespace convt3d_host {

constexpr double pi = 3.14159265358979323846;

// x is brought near 0, where sin(pi*x) has no error of its own: a whole number gives exactly 0.
inline double sine_of_pi(double x) {
  const double rest = std::remainder(x, 2.0);  // in [-1, 1]
  const double folded = rest > 0.5 ? 1.0 - rest : rest < -0.5 ? -1.0 - rest : rest;
  return std::sin(pi * folded);
}

inline double cosine_of_pi(double x) { return sine_of_pi(std::fabs(std::remainder(x, 2.0)) + 0.5); }

// exp(x*x) * erfc(x); past 25 erfc is too small for a double, and the first terms of its asymptotic series are exact enough.
inline double scaled_erfc(double x) {
  if (x < 25.0) return std::exp(x * x) * std::erfc(x);
  const double inverse = 0.5 / (x * x);
  return (1.0 - inverse * (1.0 - 3.0 * inverse * (1.0 - 5.0 * inverse))) / (x * std::sqrt(pi));
}

// Newton's method with Halley's correction on erfc(x) = y, from the leading term of its tail or from its slope at 0.
inline double inverse_erfc(double y) {
  if (!(y > 0.0 && y < 2.0)) return y == 0.0 ? HUGE_VAL : y == 2.0 ? -HUGE_VAL : NAN;
  const double tail = y < 1.0 ? y : 2.0 - y;
  double x = tail < 0.3 ? std::sqrt(-std::log(tail * std::sqrt(-std::log(tail)))) : (1.0 - tail) * 0.8862269254527580;
  for (int i = 0; i < 6; ++i) {
    const double step = (std::erfc(x) - tail) / (-1.1283791670955126 * std::exp(-x * x));
    x -= step / (1.0 + x * step);
  }
  return y < 1.0 ? x : -x;
}

}  // namespace convt3d_host

// glibc has had sinpi and cospi since 2.41, rsqrt since 2.42.
#if !defined(__GLIBC_PREREQ)
#define __GLIBC_PREREQ(major, minor) 0
#endif
#if !__GLIBC_PREREQ(2, 41)
inline float sinpif(float x) { return static_cast<float>(convt3d_host::sine_of_pi(x)); }
inline double sinpi(double x) { return convt3d_host::sine_of_pi(x); }
inline float cospif(float x) { return static_cast<float>(convt3d_host::cosine_of_pi(x)); }
inline double cospi(double x) { return convt3d_host::cosine_of_pi(x); }
#endif
#if !__GLIBC_PREREQ(2, 42)
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }
#endif
CONVT3D_MATH(float, f)
CONVT3D_MATH(double, )
inline float rsqrt(float x) { return rsqrtf(x); }
inline float rcbrt(float x) { return rcbrtf(x); }
inline float sinpi(float x) { return sinpif(x); }
inline float cospi(float x) { return cospif(x); }
inline float fdividef(float x, float y) { return __fdividef(x, y); }
#if !defined(__GLIBC__)
inline float exp10f(float x) { return __exp10f(x); }
inline double exp10(double x) { return std::pow(10.0, x); }
inline void sincosf(float x, float* sine, float* cosine) { *sine = std::sin(x), *cosine = std::cos(x); }
inline void sincos(double x, double* sine, double* cosine) { *sine = std::sin(x), *cosine = std::cos(x); }
#endif
inline float exp10(float x) { return exp10f(x); }
