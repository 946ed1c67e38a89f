// CUDA C++ for the host compiler: qualifiers, built-in variables and types, barriers, warp collectives; with it comes all that needs
// no include on a GPU.
#pragma once

#include "arithmetic.h"
#include "atomics.h"
#include "block.h"
#include "integer.h"
#include "vector_types.h"

#include <cstdint>
#include <cstdio>
#include <ctime>

#include "shim/assert.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
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

// ---- barriers and warp collectives: the default arguments are evaluated where the kernel calls ----

inline void __syncthreads(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  convt3d_host::barrier({file, line, "__syncthreads"});
}

#define CONVT3D_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline int __syncthreads_count(int predicate, CONVT3D_HERE) {
  return static_cast<int>(convt3d_host::voting_barrier(predicate != 0, {file, line, "__syncthreads_count"}).votes);
}

inline int __syncthreads_or(int predicate, CONVT3D_HERE) {
  return convt3d_host::voting_barrier(predicate != 0, {file, line, "__syncthreads_or"}).votes != 0;
}

inline int __syncthreads_and(int predicate, CONVT3D_HERE) {
  const convt3d_host::Votes all = convt3d_host::voting_barrier(predicate != 0, {file, line, "__syncthreads_and"});
  return all.votes == all.arrived;
}

// One host thread runs everything in program order, so fences have nothing to do, nor has a pause.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}
inline void __brkpt() {}

[[noreturn]] inline void __trap(CONVT3D_HERE) { convt3d_host::stop_block("__trap()", file, line); }

// What a GPU's compiler may take for granted is looked at here.
#define __builtin_assume(condition) \
  ((condition) ? static_cast<void>(0) : convt3d_host::stop_block("not as assumed: " #condition, __FILE__, __LINE__))

// Nanoseconds in place of cycles.
inline long long clock64() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

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

// Types that a warp exchanges: numbers, small integers as int, and what the headers of half precision add.
template <class T>
constexpr bool is_shuffled = std::is_arithmetic_v<T>;
template <class T>
using Shuffled = std::conditional_t<std::is_integral_v<T> && sizeof(T) < 4, int, T>;

// Result of all lanes, or of those with the same value.
template <class T, class Reduce>
struct ReductionSlot {
  T value, result;
  unsigned same;  // lanes with this value
};

template <class T, class Reduce>
CONVT3D_RUNTIME void combine_reduction(void* const (&slots)[warp_threads]) {
  using Slot = ReductionSlot<T, Reduce>;
  bool begun = false;
  T all{};
  for (void* slot : slots) {
    if (slot == nullptr) continue;
    all = begun ? Reduce::combine(all, static_cast<Slot*>(slot)->value) : static_cast<Slot*>(slot)->value;
    begun = true;
  }
  for (void* slot : slots) {
    if (slot == nullptr) continue;
    static_cast<Slot*>(slot)->result = all;
    for (unsigned lane = 0; lane < warp_threads; ++lane) {
      const Slot* other = static_cast<Slot*>(slots[lane]);
      if (other != nullptr && memcmp(&other->value, &static_cast<Slot*>(slot)->value, sizeof(T)) == 0) {
        static_cast<Slot*>(slot)->same |= 1u << lane;
      }
    }
  }
}

template <class Reduce, class T>
CONVT3D_RUNTIME ReductionSlot<T, Reduce> reduction(unsigned mask, T value, Site site) {
  ReductionSlot<T, Reduce> slot{value, value, 0};
  warp_collective(mask, &slot, combine_reduction<T, Reduce>, site);
  return slot;
}

}  // namespace convt3d_host

#define CONVT3D_SHUFFLE(name, kind, source)                                                                \
  template <class T>                                                                                       \
  convt3d_host::Shuffled<T> name(unsigned mask, T value, kind by, int width = 32, CONVT3D_HERE) {          \
    static_assert(convt3d_host::is_shuffled<T>, "a shuffle moves one number, as on a GPU");                \
    const int lane = convt3d_host::lane_of_current(), last = lane | (width - 1), first = last - width + 1; \
    const convt3d_host::Shuffled<T> moved = value;                                                         \
    return convt3d_host::shuffle(mask, moved, source, {file, line, #name});                                \
  }
CONVT3D_SHUFFLE(__shfl_sync, int, first + (by & (last - first)))
CONVT3D_SHUFFLE(__shfl_up_sync, unsigned, lane - static_cast<int>(by) >= first ? lane - static_cast<int>(by) : -1)
CONVT3D_SHUFFLE(__shfl_down_sync, unsigned, lane + static_cast<int>(by) <= last ? lane + static_cast<int>(by) : -1)
CONVT3D_SHUFFLE(__shfl_xor_sync, int, (lane ^ by) <= last ? lane ^ by : -1)

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

inline unsigned __activemask(CONVT3D_HERE) { return convt3d_host::active_mask({file, line, "__activemask"}); }

#define CONVT3D_REDUCTION(name, type, expression)                                                        \
  inline type __reduce_##name##_sync(unsigned mask, type value, CONVT3D_HERE) {                          \
    struct Reduce {                                                                                      \
      static type combine(type a, type b) { return expression; }                                         \
    };                                                                                                   \
    return convt3d_host::reduction<Reduce>(mask, value, {file, line, "__reduce_" #name "_sync"}).result; \
  }
CONVT3D_REDUCTION(add, unsigned, a + b)
CONVT3D_REDUCTION(add, int, static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
CONVT3D_REDUCTION(min, unsigned, min(a, b))
CONVT3D_REDUCTION(min, int, min(a, b))
CONVT3D_REDUCTION(max, unsigned, max(a, b))
CONVT3D_REDUCTION(max, int, max(a, b))
CONVT3D_REDUCTION(and, unsigned, a& b)
CONVT3D_REDUCTION(or, unsigned, a | b)
CONVT3D_REDUCTION(xor, unsigned, a ^ b)

namespace convt3d_host {

struct TakeFirst {
  template <class T>
  static T combine(T a, T) {
    return a;
  }
};

}  // namespace convt3d_host

// The lanes whose value has the same bits.
template <class T>
unsigned __match_any_sync(unsigned mask, T value, CONVT3D_HERE) {
  return convt3d_host::reduction<convt3d_host::TakeFirst>(mask, value, {file, line, "__match_any_sync"}).same;
}

template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* all, CONVT3D_HERE) {
  const unsigned same = convt3d_host::reduction<convt3d_host::TakeFirst>(mask, value, {file, line, "__match_all_sync"}).same;
  const unsigned members = convt3d_host::vote(mask, true, {file, line, "__match_all_sync"}).members;
  *all = same == members;
  return *all ? members : 0;
}
