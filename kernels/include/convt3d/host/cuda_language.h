// CUDA C++ for the host compiler: qualifiers, built-in variables and types, barriers, shuffles, atomics, arithmetic.
#pragma once

#include "block.h"

#include <cassert>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// `__shared__ T name[..];` and `extern __shared__ T name[];` are rewritten to these before compiling: the variable becomes
// a reference into the block's arena, which is poisoned, bounded and seen by the sanitizers.
#define CONVT3D_SHARED(name, ...)                                                   \
  using name##_shared_type = __VA_ARGS__;                                           \
  static convt3d_host::SharedSite name##_shared_site;                               \
  name##_shared_type& name = *static_cast<name##_shared_type*>(                     \
      convt3d_host::shared_variable(name##_shared_site, sizeof(name##_shared_type), \
                                    alignof(name##_shared_type) < 16 ? 16 : alignof(name##_shared_type), #name, __LINE__))
#define CONVT3D_DYNAMIC_SHARED(name, ...) __VA_ARGS__* name = reinterpret_cast<__VA_ARGS__*>(convt3d_host::state.dynamic)

constexpr int warpSize = 32;

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define CONVT3D_VECTOR_TYPES(scalar, name)                                                          \
  struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };                                      \
  struct name##3 { scalar x, y, z; };                                                               \
  struct alignas(4 * sizeof(scalar) > 16 ? 16 : 4 * sizeof(scalar)) name##4 { scalar x, y, z, w; }; \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                              \
  inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; }                 \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

CONVT3D_VECTOR_TYPES(float, float)
CONVT3D_VECTOR_TYPES(double, double)
CONVT3D_VECTOR_TYPES(int, int)
CONVT3D_VECTOR_TYPES(short, short)
CONVT3D_VECTOR_TYPES(unsigned short, ushort)
CONVT3D_VECTOR_TYPES(unsigned char, uchar)
CONVT3D_VECTOR_TYPES(long long, longlong)
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- barriers and warp collectives: the default arguments are evaluated where the kernel calls ----

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  convt3d_host::barrier({file, line, "__syncthreads"});
}

// One host thread runs everything in program order, so fences have nothing to do.
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace convt3d_host {

template <class T>
struct ShuffleSlot {
  T value;
  int source;  // lane to read, or -1 for its own value
  T result;
};

template <class T>
CONVT3D_RUNTIME void combine_shuffle(void* const (&slots)[warp_threads]) {
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    ShuffleSlot<T>* self = static_cast<ShuffleSlot<T>*>(slots[lane]);
    if (self == nullptr) continue;
    const ShuffleSlot<T>* source = self->source < 0 ? self : static_cast<ShuffleSlot<T>*>(slots[self->source]);
    if (source != nullptr) {
      self->result = source->value;
    } else {  // a lane that takes no part: undefined on a GPU, poison here
      unsigned char* bytes = reinterpret_cast<unsigned char*>(&self->result);
      for (size_t i = 0; i < sizeof(T); ++i) bytes[i] = 0xff;
    }
  }
}

template <class T>
CONVT3D_RUNTIME T shuffle(unsigned mask, T value, int source, Site site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes, as on a GPU");
  ShuffleSlot<T> slot{value, source, value};
  warp_collective(mask, &slot, combine_shuffle<T>, site);
  return slot.result;
}

CONVT3D_RUNTIME inline int lane_of_current() {
  return static_cast<int>(current - state.threads) % static_cast<int>(warp_threads);
}

struct VoteSlot {
  bool predicate;
  unsigned ballot;
  unsigned members;
};

CONVT3D_RUNTIME inline void combine_vote(void* const (&slots)[warp_threads]) {
  unsigned ballot = 0, members = 0;
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    if (slots[lane] == nullptr) continue;
    members |= 1u << lane;
    if (static_cast<VoteSlot*>(slots[lane])->predicate) ballot |= 1u << lane;
  }
  for (void* slot : slots) {
    if (slot == nullptr) continue;
    static_cast<VoteSlot*>(slot)->ballot = ballot;
    static_cast<VoteSlot*>(slot)->members = members;
  }
}

CONVT3D_RUNTIME inline VoteSlot vote(unsigned mask, bool predicate, Site site) {
  VoteSlot slot{predicate, 0, 0};
  warp_collective(mask, &slot, combine_vote, site);
  return slot;
}

}  // namespace convt3d_host

#define CONVT3D_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CONVT3D_HERE) {
  const int lane = convt3d_host::lane_of_current();
  return convt3d_host::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), {file, line, "__shfl_sync"});
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, CONVT3D_HERE) {
  const int lane = convt3d_host::lane_of_current(), source = lane - static_cast<int>(delta);
  return convt3d_host::shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : -1, {file, line, "__shfl_up_sync"});
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CONVT3D_HERE) {
  const int lane = convt3d_host::lane_of_current(), source = lane + static_cast<int>(delta);
  return convt3d_host::shuffle(mask, value, source <= (lane | (width - 1)) ? source : -1, {file, line, "__shfl_down_sync"});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, CONVT3D_HERE) {
  const int lane = convt3d_host::lane_of_current(), source = lane ^ lanes;
  return convt3d_host::shuffle(mask, value, source <= (lane | (width - 1)) ? source : -1, {file, line, "__shfl_xor_sync"});
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CONVT3D_HERE) {
  return convt3d_host::vote(mask, predicate != 0, {file, line, "__ballot_sync"}).ballot;
}

inline int __any_sync(unsigned mask, int predicate, CONVT3D_HERE) {
  return convt3d_host::vote(mask, predicate != 0, {file, line, "__any_sync"}).ballot != 0;
}

inline int __all_sync(unsigned mask, int predicate, CONVT3D_HERE) {
  const convt3d_host::VoteSlot slot = convt3d_host::vote(mask, predicate != 0, {file, line, "__all_sync"});
  return slot.ballot == slot.members;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, CONVT3D_HERE) {
  convt3d_host::vote(mask, true, {file, line, "__syncwarp"});
}

// ---- atomics: real ones, so that the thread sanitizer knows them from plain accesses ----

namespace convt3d_host {

template <class Bits, class T, class Change>
T atomic_update(T* address, Change change) {
  static_assert(sizeof(Bits) == sizeof(T), "the integer that carries the value has its size");
  Bits* cell = reinterpret_cast<Bits*>(address);
  Bits expected = __atomic_load_n(cell, __ATOMIC_RELAXED);
  for (;;) {
    T before, after;
    memcpy(&before, &expected, sizeof before);
    after = change(before);
    Bits desired;
    memcpy(&desired, &after, sizeof desired);
    if (__atomic_compare_exchange_n(cell, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return before;
  }
}

}  // namespace convt3d_host

inline float atomicAdd(float* address, float value) {
  return convt3d_host::atomic_update<uint32_t>(address, [=](float before) { return before + value; });
}
inline double atomicAdd(double* address, double value) {
  return convt3d_host::atomic_update<uint64_t>(address, [=](double before) { return before + value; });
}

#define CONVT3D_INTEGER_ATOMICS(type)                                                                                 \
  inline type atomicAdd(type* address, type value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); }   \
  inline type atomicExch(type* address, type value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); } \
  inline type atomicMax(type* address, type value) {                                                                  \
    return convt3d_host::atomic_update<type>(address, [=](type before) { return before > value ? before : value; });  \
  }                                                                                                                   \
  inline type atomicMin(type* address, type value) {                                                                  \
    return convt3d_host::atomic_update<type>(address, [=](type before) { return before < value ? before : value; });  \
  }                                                                                                                   \
  inline type atomicCAS(type* address, type expected, type desired) {                                                 \
    __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);              \
    return expected;                                                                                                  \
  }

CONVT3D_INTEGER_ATOMICS(int)
CONVT3D_INTEGER_ATOMICS(unsigned)
CONVT3D_INTEGER_ATOMICS(unsigned long long)

// ---- arithmetic ----

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
template <class T>
T __ldg(const T* address) {
  return *address;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<unsigned>(bits)); }
// Each of four bytes by a digit of the selector, from eight: those of x, then those of y.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<unsigned>(bytes >> (selector >> i * 4 & 7) * 8 & 0xff) << i * 8;
  return result;
}
inline int __float_as_int(float value) { return static_cast<int>(__float_as_uint(value)); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(static_cast<unsigned>(bits)); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __mul24(int a, int b) { return a * b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
