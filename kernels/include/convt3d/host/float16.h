// fp16 and bf16 as CUDA's headers have them: types that convert and calculate, and pairs of them. Each result is rounded once to nearest.
// cuda_fp16.h and cuda_bf16.h of the shim folder give these their names.
#pragma once

#include "runtime.h"

namespace convt3d_host {

// A float of 16 bits with so many for the fraction, its exponent reaching from `lowest` (of the least normal number) to 1 - lowest.
template <int fraction_bits, int lowest>
struct Float16 {
  unsigned short bits;

  Float16() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  Float16(T value) : bits(narrowed(static_cast<double>(value), FE_TONEAREST)) {}

  operator float() const { return static_cast<float>(wide()); }
  template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
  explicit operator T() const {
    if constexpr (std::is_same_v<T, bool>) return (bits & 0x7fffu) != 0;
    return to_integer<T>(static_cast<float>(wide()), FE_TOWARDZERO);
  }

  static Float16 of_bits(unsigned bits) {
    Float16 result;
    result.bits = static_cast<unsigned short>(bits);
    return result;
  }
  static Float16 of(double value, int mode) { return of_bits(narrowed(value, mode)); }

  Float16& operator+=(Float16 other) { return *this = *this + other; }
  Float16& operator-=(Float16 other) { return *this = *this - other; }
  Float16& operator*=(Float16 other) { return *this = *this * other; }
  Float16& operator/=(Float16 other) { return *this = *this / other; }

  double wide() const {
    const int exponent = (bits & 0x7fff) >> fraction_bits, fraction = bits & ((1 << fraction_bits) - 1);
    double value;
    if (exponent == (0x7fff >> fraction_bits)) {
      value = fraction != 0 ? NAN : HUGE_VAL;
    } else if (exponent == 0) {
      value = std::ldexp(fraction, lowest - fraction_bits);
    } else {  // the same fraction under the exponent of a float
      value = same_bits<float>(static_cast<unsigned>(exponent + lowest + 126) << 23 | static_cast<unsigned>(fraction)
                                                                                          << (23 - fraction_bits));
    }
    return bits & 0x8000u ? -value : value;
  }

 private:
  static unsigned short narrowed(double value, int mode) {
    constexpr unsigned infinity = 0x7fffu >> fraction_bits << fraction_bits;
    if (value != value) return 0x7fff;
    const unsigned sign = std::signbit(value) ? 0x8000u : 0u;
    if (std::isinf(value)) return static_cast<unsigned short>(sign | infinity);
    if (value == 0.0) return static_cast<unsigned short>(sign);
    int exponent;
    std::frexp(value, &exponent);  // |value| is in [2^(exponent-1), 2^exponent)
    const int place = (exponent - 1 < lowest ? lowest : exponent - 1) - fraction_bits;  // of the last bit kept
    const double steps =
        std::fabs(to_integral(std::ldexp(value, -place), mode));  // a carry runs into the exponent as it should
    const long long magnitude =
        static_cast<long long>(steps) + (static_cast<long long>(place + fraction_bits - lowest) << fraction_bits);
    const bool towards_zero = mode == FE_TOWARDZERO || mode == (sign ? FE_UPWARD : FE_DOWNWARD);
    const unsigned most = towards_zero ? infinity - 1 : infinity;
    return static_cast<unsigned short>(sign | (magnitude > most ? most : static_cast<unsigned>(magnitude)));
  }
};

template <class T>
constexpr bool is_float16 = false;
template <int fraction_bits, int lowest>
constexpr bool is_float16<Float16<fraction_bits, lowest>> = true;
template <int fraction_bits, int lowest>
constexpr bool is_shuffled<Float16<fraction_bits, lowest>> = true;

// The sum is rounded to double with its last bit set where it is inexact: rounding once more, to 16 bits, is then right.
template <class F>
F fused(F a, F b, F c) {
  const double product = a.wide() * b.wide(), addend = c.wide(), sum = product + addend;  // the product is exact
  const double back = sum - product, error = (product - (sum - back)) + (addend - back);
  if (error == 0.0 || !std::isfinite(sum) || (same_bits<uint64_t>(sum) & 1u)) return F::of(sum, FE_TONEAREST);
  return F::of(std::nextafter(sum, error > 0.0 ? HUGE_VAL : -HUGE_VAL), FE_TONEAREST);
}

template <class F>
F saturated16(F value) {
  return value.wide() > 0.0 ? value.wide() < 1.0 ? value : F(1.0f) : F(0.0f);
}

// Two of them in 32 bits.
template <class F>
struct alignas(4) Pair16 {
  F x, y;
  Pair16() = default;
  Pair16(F x_, F y_) : x(x_), y(y_) {}
};
template <class F>
constexpr bool is_shuffled<Pair16<F>> = true;

template <class F, class Operation>
Pair16<F> each16(Operation operation, Pair16<F> a) {
  return {operation(a.x), operation(a.y)};
}
template <class F, class Operation>
Pair16<F> each16(Operation operation, Pair16<F> a, Pair16<F> b) {
  return {operation(a.x, b.x), operation(a.y, b.y)};
}

// ---- operators; of a 16-bit float with another number as with the float it converts to ----

#define CONVT3D_OPERATOR16(op)                                            \
  template <int f, int l>                                                 \
  Float16<f, l> operator op(Float16<f, l> a, Float16<f, l> b) {           \
    return Float16<f, l>(static_cast<float>(a) op static_cast<float>(b)); \
  }                                                                       \
  template <class F>                                                      \
  Pair16<F> operator op(Pair16<F> a, Pair16<F> b) {                       \
    return {a.x op b.x, a.y op b.y};                                      \
  }                                                                       \
  template <class F>                                                      \
  Pair16<F>& operator op## = (Pair16<F> & a, Pair16<F> b) {               \
    return a = a op b;                                                    \
  }
CONVT3D_OPERATOR16(+)
CONVT3D_OPERATOR16(-)
CONVT3D_OPERATOR16(*)
CONVT3D_OPERATOR16(/)
#undef CONVT3D_OPERATOR16

#define CONVT3D_COMPARISON16(op)                           \
  template <int f, int l>                                  \
  bool operator op(Float16<f, l> a, Float16<f, l> b) {     \
    return static_cast<float>(a) op static_cast<float>(b); \
  }                                                        \
  template <class F>                                       \
  bool operator op(Pair16<F> a, Pair16<F> b) {             \
    return a.x op b.x && a.y op b.y;                       \
  }
CONVT3D_COMPARISON16(==)
CONVT3D_COMPARISON16(!=)
CONVT3D_COMPARISON16(<)
CONVT3D_COMPARISON16(<=)
CONVT3D_COMPARISON16(>)
CONVT3D_COMPARISON16(>=)
#undef CONVT3D_COMPARISON16

template <int f, int l>
Float16<f, l> operator-(Float16<f, l> a) {
  return Float16<f, l>::of_bits(a.bits ^ 0x8000u);
}
template <int f, int l>
Float16<f, l> operator+(Float16<f, l> a) {
  return a;
}
template <class F>
Pair16<F> operator-(Pair16<F> a) {
  return {-a.x, -a.y};
}
template <int f, int l>
Float16<f, l>& operator++(Float16<f, l>& a) {
  return a = a + Float16<f, l>(1);
}
template <int f, int l>
Float16<f, l>& operator--(Float16<f, l>& a) {
  return a = a - Float16<f, l>(1);
}

}  // namespace convt3d_host

// ---- functions that have one name for both types, and their twins for pairs ----

#define CONVT3D_ALL16 int f, int l
#define CONVT3D_F16 convt3d_host::Float16<f, l>
#define CONVT3D_P16 convt3d_host::Pair16<CONVT3D_F16>

// A function and its twin for pairs.
#define CONVT3D_UNARY16(name, pair_name, expression)                                      \
  template <CONVT3D_ALL16>                                                                \
  CONVT3D_F16 name(CONVT3D_F16 a) {                                                       \
    return expression;                                                                    \
  }                                                                                       \
  template <CONVT3D_ALL16>                                                                \
  CONVT3D_P16 pair_name(CONVT3D_P16 a) {                                                  \
    return convt3d_host::each16([](CONVT3D_F16 x) -> CONVT3D_F16 { return name(x); }, a); \
  }
#define CONVT3D_BINARY16(name, pair_name, expression)                                                          \
  template <CONVT3D_ALL16>                                                                                     \
  CONVT3D_F16 name(CONVT3D_F16 a, CONVT3D_F16 b) {                                                             \
    return expression;                                                                                         \
  }                                                                                                            \
  template <CONVT3D_ALL16, class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>                         \
  CONVT3D_F16 name(CONVT3D_F16 a, T b) {                                                                       \
    return name(a, CONVT3D_F16(b));                                                                            \
  }                                                                                                            \
  template <CONVT3D_ALL16, class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>                         \
  CONVT3D_F16 name(T a, CONVT3D_F16 b) {                                                                       \
    return name(CONVT3D_F16(a), b);                                                                            \
  }                                                                                                            \
  template <CONVT3D_ALL16>                                                                                     \
  CONVT3D_P16 pair_name(CONVT3D_P16 a, CONVT3D_P16 b) {                                                        \
    return convt3d_host::each16([](CONVT3D_F16 x, CONVT3D_F16 y) -> CONVT3D_F16 { return name(x, y); }, a, b); \
  }
CONVT3D_BINARY16(__hadd, __hadd2, a + b)
CONVT3D_BINARY16(__hsub, __hsub2, a - b)
CONVT3D_BINARY16(__hmul, __hmul2, a* b)
CONVT3D_BINARY16(__hdiv, __h2div, a / b)
CONVT3D_BINARY16(__hadd_rn, __hadd2_rn, a + b)
CONVT3D_BINARY16(__hsub_rn, __hsub2_rn, a - b)
CONVT3D_BINARY16(__hmul_rn, __hmul2_rn, a* b)
CONVT3D_BINARY16(__hadd_sat, __hadd2_sat, convt3d_host::saturated16(a + b))
CONVT3D_BINARY16(__hsub_sat, __hsub2_sat, convt3d_host::saturated16(a - b))
CONVT3D_BINARY16(__hmul_sat, __hmul2_sat, convt3d_host::saturated16(a* b))
CONVT3D_BINARY16(__hmax, __hmax2, CONVT3D_F16(fmaxf(a, b)))
CONVT3D_BINARY16(__hmin, __hmin2, CONVT3D_F16(fminf(a, b)))
CONVT3D_BINARY16(__hmax_nan, __hmax2_nan, isnan(float(a)) || isnan(float(b)) ? CONVT3D_F16(NAN) : CONVT3D_F16(fmaxf(a, b)))
CONVT3D_BINARY16(__hmin_nan, __hmin2_nan, isnan(float(a)) || isnan(float(b)) ? CONVT3D_F16(NAN) : CONVT3D_F16(fminf(a, b)))
CONVT3D_UNARY16(__hneg, __hneg2, -a)
CONVT3D_UNARY16(__habs, __habs2, CONVT3D_F16::of_bits(a.bits & 0x7fffu))
CONVT3D_UNARY16(hsqrt, h2sqrt, CONVT3D_F16(sqrt(a.wide())))
CONVT3D_UNARY16(hrsqrt, h2rsqrt, CONVT3D_F16(1.0 / sqrt(a.wide())))
CONVT3D_UNARY16(hrcp, h2rcp, CONVT3D_F16(1.0 / a.wide()))
CONVT3D_UNARY16(hexp, h2exp, CONVT3D_F16(exp(a.wide())))
CONVT3D_UNARY16(hexp2, h2exp2, CONVT3D_F16(exp2(a.wide())))
CONVT3D_UNARY16(hexp10, h2exp10, CONVT3D_F16(pow(10.0, a.wide())))
CONVT3D_UNARY16(hlog, h2log, CONVT3D_F16(log(a.wide())))
CONVT3D_UNARY16(hlog2, h2log2, CONVT3D_F16(log2(a.wide())))
CONVT3D_UNARY16(hlog10, h2log10, CONVT3D_F16(log10(a.wide())))
CONVT3D_UNARY16(hsin, h2sin, CONVT3D_F16(sin(a.wide())))
CONVT3D_UNARY16(hcos, h2cos, CONVT3D_F16(cos(a.wide())))
CONVT3D_UNARY16(htanh, h2tanh, CONVT3D_F16(tanh(a.wide())))
CONVT3D_UNARY16(hceil, h2ceil, CONVT3D_F16(ceil(a.wide())))
CONVT3D_UNARY16(hfloor, h2floor, CONVT3D_F16(floor(a.wide())))
CONVT3D_UNARY16(htrunc, h2trunc, CONVT3D_F16(trunc(a.wide())))
CONVT3D_UNARY16(hrint, h2rint, CONVT3D_F16(rint(a.wide())))

#define CONVT3D_FUSED16(name, pair_name, expression)                   \
  template <CONVT3D_ALL16>                                             \
  CONVT3D_F16 name(CONVT3D_F16 a, CONVT3D_F16 b, CONVT3D_F16 c) {      \
    const CONVT3D_F16 sum = convt3d_host::fused(a, b, c);              \
    return expression;                                                 \
  }                                                                    \
  template <CONVT3D_ALL16>                                             \
  CONVT3D_P16 pair_name(CONVT3D_P16 a, CONVT3D_P16 b, CONVT3D_P16 c) { \
    return {name(a.x, b.x, c.x), name(a.y, b.y, c.y)};                 \
  }
CONVT3D_FUSED16(__hfma, __hfma2, sum)
CONVT3D_FUSED16(__hfma_sat, __hfma2_sat, convt3d_host::saturated16(sum))
CONVT3D_FUSED16(__hfma_relu, __hfma2_relu, sum.bits & 0x8000u && !isnan(float(sum)) ? CONVT3D_F16(0.0f) : sum)

template <CONVT3D_ALL16>
bool __hisnan(CONVT3D_F16 a) {
  return isnan(static_cast<float>(a));
}
template <CONVT3D_ALL16>
int __hisinf(CONVT3D_F16 a) {
  return isinf(static_cast<float>(a)) ? (a.bits & 0x8000u ? -1 : 1) : 0;
}
template <CONVT3D_ALL16>
CONVT3D_P16 __hisnan2(CONVT3D_P16 a) {
  return {CONVT3D_F16(__hisnan(a.x)), CONVT3D_F16(__hisnan(a.y))};
}

// Comparisons: of NaN false, the ones that end in u true; pairs give 1 and 0, all bits (_mask), or whether both hold (__hb).
#define CONVT3D_COMPARED16(name, op)                                                        \
  template <CONVT3D_ALL16>                                                                  \
  bool __h##name(CONVT3D_F16 a, CONVT3D_F16 b) {                                            \
    return static_cast<float>(a) op static_cast<float>(b) && !__hisnan(a) && !__hisnan(b);  \
  }                                                                                         \
  template <CONVT3D_ALL16>                                                                  \
  bool __h##name##u(CONVT3D_F16 a, CONVT3D_F16 b) {                                         \
    return static_cast<float>(a) op static_cast<float>(b) || __hisnan(a) || __hisnan(b);    \
  }                                                                                         \
  template <CONVT3D_ALL16>                                                                  \
  CONVT3D_P16 __h##name##2(CONVT3D_P16 a, CONVT3D_P16 b) {                                  \
    return {CONVT3D_F16(__h##name(a.x, b.x)), CONVT3D_F16(__h##name(a.y, b.y))};            \
  }                                                                                         \
  template <CONVT3D_ALL16>                                                                  \
  unsigned __h##name##2_mask(CONVT3D_P16 a, CONVT3D_P16 b) {                                \
    return (__h##name(a.x, b.x) ? 0xffffu : 0u) | (__h##name(a.y, b.y) ? 0xffff0000u : 0u); \
  }                                                                                         \
  template <CONVT3D_ALL16>                                                                  \
  bool __hb##name##2(CONVT3D_P16 a, CONVT3D_P16 b) {                                        \
    return __h##name(a.x, b.x) && __h##name(a.y, b.y);                                      \
  }
CONVT3D_COMPARED16(eq, ==)
CONVT3D_COMPARED16(ne, !=)
CONVT3D_COMPARED16(lt, <)
CONVT3D_COMPARED16(le, <=)
CONVT3D_COMPARED16(gt, >)
CONVT3D_COMPARED16(ge, >=)

template <CONVT3D_ALL16>
float __low2float(CONVT3D_P16 a) {
  return a.x;
}
template <CONVT3D_ALL16>
float __high2float(CONVT3D_P16 a) {
  return a.y;
}

template <CONVT3D_ALL16>
CONVT3D_F16 atomicAdd(CONVT3D_F16* address, CONVT3D_F16 value) {
  return convt3d_host::atomic_update<uint16_t>(address, [=](CONVT3D_F16 before) { return before + value; });
}
template <CONVT3D_ALL16>
CONVT3D_P16 atomicAdd(CONVT3D_P16* address, CONVT3D_P16 value) {
  return convt3d_host::atomic_update<uint32_t>(address, [=](CONVT3D_P16 before) { return before + value; });
}

// ---- names with the type in them: name16 is the type's word in function names, pair16 that of its pair ----

#define CONVT3D_NARROWED16(suffix, mode, type, word)                                                                      \
  inline type __float2##word##_##suffix(float value) { return type::of(value, mode); }                                    \
  inline type __int2##word##_##suffix(int value) { return type::of(value, mode); }                                        \
  inline type __uint2##word##_##suffix(unsigned value) { return type::of(value, mode); }                                  \
  inline type __short2##word##_##suffix(short value) { return type::of(value, mode); }                                    \
  inline type __ushort2##word##_##suffix(unsigned short value) { return type::of(value, mode); }                          \
  inline int __##word##2int_##suffix(type value) { return convt3d_host::to_integer<int>(float(value), mode); }            \
  inline unsigned __##word##2uint_##suffix(type value) { return convt3d_host::to_integer<unsigned>(float(value), mode); } \
  inline short __##word##2short_##suffix(type value) { return convt3d_host::to_integer<short>(float(value), mode); }      \
  inline unsigned short __##word##2ushort_##suffix(type value) {                                                          \
    return convt3d_host::to_integer<unsigned short>(float(value), mode);                                                  \
  }

#define CONVT3D_NAMED16(type, pair, word, pair_word)                                                     \
  CONVT3D_IN_EACH_MODE(CONVT3D_NARROWED16, type, word)                                                   \
  inline float __##word##2float(type value) { return value; }                                            \
  inline type __float2##word(float value) { return type(value); }                                        \
  inline type __double2##word(double value) { return type(value); }                                      \
  inline short __##word##_as_short(type value) { return static_cast<short>(value.bits); }                \
  inline unsigned short __##word##_as_ushort(type value) { return value.bits; }                          \
  inline type __short_as_##word(short bits) { return type::of_bits(static_cast<unsigned short>(bits)); } \
  inline type __ushort_as_##word(unsigned short bits) { return type::of_bits(bits); }                    \
  inline pair make_##pair_word(type x, type y) { return {x, y}; }                                        \
  inline pair __halves2##pair_word(type x, type y) { return {x, y}; }                                    \
  inline pair __##word##2##pair_word(type x) { return {x, x}; }                                          \
  inline pair __float2##pair_word##_rn(float x) { return {type(x), type(x)}; }                           \
  inline pair __floats2##pair_word##_rn(float x, float y) { return {type(x), type(y)}; }                 \
  inline pair __float22##pair_word##_rn(float2 a) { return {type(a.x), type(a.y)}; }                     \
  inline float2 __##pair_word##2float2(pair a) { return {a.x, a.y}; }                                    \
  inline type __low2##word(pair a) { return a.x; }                                                       \
  inline type __high2##word(pair a) { return a.y; }                                                      \
  inline pair __low2##pair_word(pair a) { return {a.x, a.x}; }                                           \
  inline pair __high2##pair_word(pair a) { return {a.y, a.y}; }                                          \
  inline pair __lows2##pair_word(pair a, pair b) { return {a.x, b.x}; }                                  \
  inline pair __highs2##pair_word(pair a, pair b) { return {a.y, b.y}; }
