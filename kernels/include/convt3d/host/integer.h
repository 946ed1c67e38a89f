// CUDA's integer functions: bits, wide products, sums of differences, and 2 or 4 small integers in one word.
#pragma once

#include <cstdint>

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline int __clzll(long long bits) { return bits == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(bits)); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline unsigned long long __brevll(unsigned long long bits) {
  unsigned long long reversed = 0;
  for (int i = 0; i < 64; ++i) reversed |= (bits >> i & 1u) << (63 - i);
  return reversed;
}
inline unsigned __brev(unsigned bits) { return static_cast<unsigned>(__brevll(bits) >> 32); }

// Position of the `offset`-th set bit from `base` on (upwards for a positive offset, downwards for a negative one), or ~0.
inline unsigned __fns(unsigned mask, unsigned base, int offset) {
  if (offset == 0) return mask >> base & 1u ? base : ~0u;
  const int step = offset > 0 ? 1 : -1;
  int left = offset > 0 ? offset : -offset;
  for (int bit = static_cast<int>(base); bit >= 0 && bit < 32; bit += step) {
    if ((mask >> bit & 1u) && --left == 0) return static_cast<unsigned>(bit);
  }
  return ~0u;
}

inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
__extension__ inline long long __mul64hi(long long a, long long b) {
  return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
__extension__ inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
// The product's low 32 bits, of the factors' low 24 bits.
inline unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffffu) * (b & 0xffffffu); }
inline int __mul24(int a, int b) {
  const int64_t wide = static_cast<int64_t>(static_cast<int>(static_cast<unsigned>(a) << 8) >> 8) *
                       (static_cast<int>(static_cast<unsigned>(b) << 8) >> 8);
  return static_cast<int>(static_cast<unsigned>(wide));
}

inline unsigned __sad(int a, int b, unsigned sum) {
  return sum +
         (a < b ? static_cast<unsigned>(b) - static_cast<unsigned>(a) : static_cast<unsigned>(a) - static_cast<unsigned>(b));
}
inline unsigned __usad(unsigned a, unsigned b, unsigned sum) { return sum + (a < b ? b - a : a - b); }
inline int __hadd(int a, int b) { return static_cast<int>((static_cast<int64_t>(a) + b) >> 1); }
inline int __rhadd(int a, int b) { return static_cast<int>((static_cast<int64_t>(a) + b + 1) >> 1); }
inline unsigned __uhadd(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) + b) >> 1); }
inline unsigned __urhadd(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) + b + 1) >> 1); }

// 32 bits of high:low, shifted by shift modulo 32, or by at most 32 in the c twins.
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31u));
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32u ? low : __funnelshift_l(low, high, shift);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return shift >= 32u ? high : __funnelshift_r(low, high, shift);
}

// Each of four bytes by a digit of the selector, from eight: those of x, then those of y.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> i * 4 & 7) * 8 & 0xff) << i * 8;
  return result;
}

// ---- 2 or 4 small integers in a word: __vadd2, __vmaxs4, ... ----

namespace convt3d_host {

template <class Lane>
Lane lane_of(unsigned word, int i) {
  return static_cast<Lane>(word >> i * 8 * static_cast<int>(sizeof(Lane)));
}

// Each lane's result, an int, is cut to the lane.
template <class Lane, class Operation>
unsigned each_lane(unsigned a, unsigned b, Operation operation) {
  const int bits = 8 * static_cast<int>(sizeof(Lane));
  unsigned result = 0;
  for (int i = 0; i * bits < 32; ++i) {
    const int lane = operation(static_cast<int>(lane_of<Lane>(a, i)), static_cast<int>(lane_of<Lane>(b, i)));
    result |= (static_cast<unsigned>(lane) & (bits == 8 ? 0xffu : 0xffffu)) << i * bits;
  }
  return result;
}

template <class Lane>
int saturated(int value) {
  constexpr int least = Lane(-1) < Lane(0) ? -(1 << (8 * sizeof(Lane) - 1)) : 0, most = least + (1 << 8 * sizeof(Lane)) - 1;
  return value < least ? least : value > most ? most : value;
}

template <class A, class B>
int dot_of_lanes(unsigned a, unsigned b, int lanes, int first) {
  int sum = 0;
  for (int i = 0; i < lanes; ++i) sum += static_cast<int>(lane_of<A>(a, i)) * static_cast<int>(lane_of<B>(b, first + i));
  return sum;
}

}  // namespace convt3d_host

#define CONVT3D_LANES(name, lane, expression)                                                \
  template <class = void>                                                                    \
  inline unsigned name(unsigned a_, unsigned b_) {                                           \
    return convt3d_host::each_lane<lane>(a_, b_, [](int a, int b) { return (expression); }); \
  }
#define CONVT3D_LANES_OF_ONE(name, lane, expression)                                      \
  template <class = void>                                                                 \
  inline unsigned name(unsigned a_) {                                                     \
    return convt3d_host::each_lane<lane>(a_, 0, [](int a, int) { return (expression); }); \
  }
#define CONVT3D_COMPARED(number, suffix, lane, relation)             \
  CONVT3D_LANES(__vcmp##suffix##number, lane, a relation b ? -1 : 0) \
  CONVT3D_LANES(__vset##suffix##number, lane, a relation b ? 1 : 0)
#define CONVT3D_SIMD(number, signed_lane, unsigned_lane)                                                    \
  CONVT3D_LANES(__vadd##number, unsigned_lane, a + b)                                                       \
  CONVT3D_LANES(__vsub##number, unsigned_lane, a - b)                                                       \
  CONVT3D_LANES(__vaddss##number, signed_lane, convt3d_host::saturated<signed_lane>(a + b))                 \
  CONVT3D_LANES(__vsubss##number, signed_lane, convt3d_host::saturated<signed_lane>(a - b))                 \
  CONVT3D_LANES(__vaddus##number, unsigned_lane, convt3d_host::saturated<unsigned_lane>(a + b))             \
  CONVT3D_LANES(__vsubus##number, unsigned_lane, convt3d_host::saturated<unsigned_lane>(a - b))             \
  CONVT3D_LANES(__vmaxs##number, signed_lane, a > b ? a : b)                                                \
  CONVT3D_LANES(__vmins##number, signed_lane, a < b ? a : b)                                                \
  CONVT3D_LANES(__vmaxu##number, unsigned_lane, a > b ? a : b)                                              \
  CONVT3D_LANES(__vminu##number, unsigned_lane, a < b ? a : b)                                              \
  CONVT3D_LANES(__vavgs##number, signed_lane, (a + b + (a + b >= 0 ? 1 : 0)) >> 1)                          \
  CONVT3D_LANES(__vavgu##number, unsigned_lane, (a + b + 1) / 2)                                            \
  CONVT3D_LANES(__vhaddu##number, unsigned_lane, (a + b) / 2)                                               \
  CONVT3D_LANES(__vabsdiffs##number, signed_lane, a > b ? a - b : b - a)                                    \
  CONVT3D_LANES(__vabsdiffu##number, unsigned_lane, a > b ? a - b : b - a)                                  \
  CONVT3D_LANES_OF_ONE(__vabs##number, signed_lane, a < 0 ? -a : a)                                         \
  CONVT3D_LANES_OF_ONE(__vabsss##number, signed_lane, convt3d_host::saturated<signed_lane>(a < 0 ? -a : a)) \
  CONVT3D_LANES_OF_ONE(__vneg##number, signed_lane, -a)                                                     \
  CONVT3D_LANES_OF_ONE(__vnegss##number, signed_lane, convt3d_host::saturated<signed_lane>(-a))             \
  CONVT3D_COMPARED(number, eq, unsigned_lane, ==)                                                           \
  CONVT3D_COMPARED(number, ne, unsigned_lane, !=)                                                           \
  CONVT3D_COMPARED(number, gts, signed_lane, >)                                                             \
  CONVT3D_COMPARED(number, ges, signed_lane, >=)                                                            \
  CONVT3D_COMPARED(number, lts, signed_lane, <)                                                             \
  CONVT3D_COMPARED(number, les, signed_lane, <=)                                                            \
  CONVT3D_COMPARED(number, gtu, unsigned_lane, >)                                                           \
  CONVT3D_COMPARED(number, geu, unsigned_lane, >=)                                                          \
  CONVT3D_COMPARED(number, ltu, unsigned_lane, <)                                                           \
  CONVT3D_COMPARED(number, leu, unsigned_lane, <=)                                                          \
  template <class = void>                                                                                   \
  inline unsigned __vsads##number(unsigned a, unsigned b) {                                                 \
    const unsigned differences = __vabsdiffs##number(a, b);                                                 \
    return static_cast<unsigned>(convt3d_host::dot_of_lanes<unsigned_lane, unsigned_lane>(                  \
        differences, sizeof(unsigned_lane) == 1 ? 0x01010101u : 0x00010001u, number, 0));                   \
  }                                                                                                         \
  template <class = void>                                                                                   \
  inline unsigned __vsadu##number(unsigned a, unsigned b) {                                                 \
    const unsigned differences = __vabsdiffu##number(a, b);                                                 \
    return static_cast<unsigned>(convt3d_host::dot_of_lanes<unsigned_lane, unsigned_lane>(                  \
        differences, sizeof(unsigned_lane) == 1 ? 0x01010101u : 0x00010001u, number, 0));                   \
  }

CONVT3D_SIMD(2, int16_t, uint16_t)
CONVT3D_SIMD(4, int8_t, uint8_t)

inline int __dp4a(int a, int b, int sum) {
  return sum + convt3d_host::dot_of_lanes<int8_t, int8_t>(static_cast<unsigned>(a), static_cast<unsigned>(b), 4, 0);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  return sum + static_cast<unsigned>(convt3d_host::dot_of_lanes<uint8_t, uint8_t>(a, b, 4, 0));
}
// Two 16-bit integers by the low or the high two bytes.
#define CONVT3D_DP2A(half, first)                                                                                           \
  inline int __dp2a_##half(int a, int b, int sum) {                                                                         \
    return sum + convt3d_host::dot_of_lanes<int16_t, int8_t>(static_cast<unsigned>(a), static_cast<unsigned>(b), 2, first); \
  }                                                                                                                         \
  inline unsigned __dp2a_##half(unsigned a, unsigned b, unsigned sum) {                                                     \
    return sum + static_cast<unsigned>(convt3d_host::dot_of_lanes<uint16_t, uint8_t>(a, b, 2, first));                      \
  }
CONVT3D_DP2A(lo, 0)
CONVT3D_DP2A(hi, 2)
