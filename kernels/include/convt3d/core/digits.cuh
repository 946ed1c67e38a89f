// The digits of a number in a mixed radix, the lowest first: what a block's or a thread's index is made of.
#pragma once

struct Digits {
  unsigned rest;  // what the digits that were taken leave

  __device__ __forceinline__ int next(int count) {
    const unsigned digit = rest % count;
    rest /= count;
    return static_cast<int>(digit);
  }
  __device__ __forceinline__ int last() const { return static_cast<int>(rest); }
};
