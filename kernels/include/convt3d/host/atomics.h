// CUDA's atomic functions: real ones, so that the thread sanitizer knows them from plain accesses.
#pragma once

#include "vector_types.h"

#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Each with its twins for one block and for the whole system: on the host all are the same.
#define CONVT3D_ATOMIC_SCOPES(name, type)                \
  template <class = void>                                \
  inline type name##_block(type* address, type value) {  \
    return name(address, value);                         \
  }                                                      \
  template <class = void>                                \
  inline type name##_system(type* address, type value) { \
    return name(address, value);                         \
  }

#define CONVT3D_ATOMIC(name, type, bits, expression)                                                      \
  template <class = void>                                                                                 \
  inline type name(type* address, type value) {                                                           \
    return convt3d_host::atomic_update<bits>(address, [=](type before) -> type { return (expression); }); \
  }                                                                                                       \
  CONVT3D_ATOMIC_SCOPES(name, type)

CONVT3D_ATOMIC(atomicAdd, float, uint32_t, before + value)
CONVT3D_ATOMIC(atomicAdd, double, uint64_t, before + value)

#define CONVT3D_BITWISE_ATOMICS(type)                                                                                        \
  inline type atomicExch(type* address, type value) { return __atomic_exchange_n(address, value, __ATOMIC_RELAXED); }        \
  inline type atomicCAS(type* address, type expected, type desired) {                                                        \
    __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);                     \
    return expected;                                                                                                         \
  }                                                                                                                          \
  inline type atomicCAS_block(type* address, type expected, type desired) { return atomicCAS(address, expected, desired); }  \
  inline type atomicCAS_system(type* address, type expected, type desired) { return atomicCAS(address, expected, desired); } \
  CONVT3D_ATOMIC_SCOPES(atomicExch, type)                                                                                    \
  CONVT3D_ATOMIC(atomicAnd, type, type, before& value)                                                                       \
  CONVT3D_ATOMIC(atomicOr, type, type, before | value)                                                                       \
  CONVT3D_ATOMIC(atomicXor, type, type, before ^ value)                                                                      \
  CONVT3D_ATOMIC(atomicMax, type, type, before > value ? before : value)                                                     \
  CONVT3D_ATOMIC(atomicMin, type, type, before < value ? before : value)

#define CONVT3D_INTEGER_ATOMICS(type)                                                                               \
  inline type atomicAdd(type* address, type value) { return __atomic_fetch_add(address, value, __ATOMIC_RELAXED); } \
  CONVT3D_ATOMIC_SCOPES(atomicAdd, type)                                                                            \
  CONVT3D_BITWISE_ATOMICS(type)

CONVT3D_INTEGER_ATOMICS(int)
CONVT3D_INTEGER_ATOMICS(unsigned)
CONVT3D_INTEGER_ATOMICS(unsigned long long)
CONVT3D_BITWISE_ATOMICS(long long)

// Each number of a vector by itself, as on a GPU.
inline float2 atomicAdd(float2* address, float2 value) {
  return {atomicAdd(&address->x, value.x), atomicAdd(&address->y, value.y)};
}
inline float4 atomicAdd(float4* address, float4 value) {
  return {atomicAdd(&address->x, value.x), atomicAdd(&address->y, value.y), atomicAdd(&address->z, value.z),
          atomicAdd(&address->w, value.w)};
}

inline float atomicExch(float* address, float value) {
  return convt3d_host::atomic_update<uint32_t>(address, [=](float) { return value; });
}
CONVT3D_ATOMIC_SCOPES(atomicExch, float)
inline unsigned short atomicCAS(unsigned short* address, unsigned short expected, unsigned short desired) {
  __atomic_compare_exchange_n(address, &expected, desired, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

CONVT3D_ATOMIC(atomicSub, int, int, static_cast<int>(static_cast<unsigned>(before) - static_cast<unsigned>(value)))
CONVT3D_ATOMIC(atomicSub, unsigned, unsigned, before - value)
CONVT3D_ATOMIC(atomicInc, unsigned, unsigned, before >= value ? 0u : before + 1u)
CONVT3D_ATOMIC(atomicDec, unsigned, unsigned, before == 0u || before > value ? value : before - 1u)
