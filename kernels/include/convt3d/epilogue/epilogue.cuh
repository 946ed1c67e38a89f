// What becomes of a sum between the product and memory: its channel's bias is added, and it is rounded once to scalar_t. Outputs that no
// tap reaches are the sum 0, and go the same way. What else is to happen to outputs belongs here: no kernel adds or rounds by itself.
#pragma once

#include "convt3d/core/vector.cuh"
#include "convt3d/core/view.cuh"

template <class T>
struct IsSum {
  enum { value = false };
};
template <>
struct IsSum<accum_t> {
  enum { value = true };
};

struct Epilogue {
  const scalar_t* bias;  // of each channel; null where there is none

  // Whether anything but rounding happens to sums.
  __device__ __forceinline__ bool changes_sums() const { return bias != nullptr; }

  // What belongs to each sum of a channel, fetched once: the sum begins with it, or `finish` adds it. Nothing is read of a channel that is
  // not `there`.
  __device__ __forceinline__ accum_t start(index_t channel, bool there = true) const {
    return bias != nullptr && there ? added(channel) : accum_t(0);
  }

  // `start` where it is known that sums are changed.
  __device__ __forceinline__ accum_t added(index_t channel) const { return to_accum(bias[channel]); }

  // The output of a sum that began with `start`.
  template <class Sum>
  __device__ __forceinline__ scalar_t finish(Sum sum) const {
    static_assert(IsSum<Sum>::value, "a sum is finished as accum_t: one that was rounded before would be rounded twice");
    return to_scalar(sum);
  }

  // The output of a sum that began with 0.
  template <class Sum>
  __device__ __forceinline__ scalar_t finish(Sum sum, accum_t start) const {
    static_assert(IsSum<Sum>::value, "a sum is finished as accum_t: one that was rounded before would be rounded twice");
    return finish(start + sum);
  }

  // The outputs of two sums that began with `start`.
  template <class Sum>
  __device__ __forceinline__ Vector<2> finish_pair(Sum first, Sum second) const {
    static_assert(IsSum<Sum>::value, "a sum is finished as accum_t: one that was rounded before would be rounded twice");
#if defined(__CUDACC__) && (defined(CONVT3D_FP16) || defined(CONVT3D_BF16))
    unsigned word;
#if defined(CONVT3D_FP16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
#endif
    Vector<2> pair;
    memcpy(&pair, &word, sizeof pair);
    return pair;
#else
    return {{finish(first), finish(second)}};
#endif
  }

  // The output of a channel where no tap reaches. The bias is already an element, and is stored as it is.
  __device__ __forceinline__ scalar_t untouched(index_t channel) const {
    return bias == nullptr ? to_scalar(accum_t(0)) : bias[channel];
  }
};
