// A number as the sum of two TF32 numbers, for three products in the place of one: low x high, high x low and high x high.
#pragma once

#include "convt3d/ptx/shared_memory.cuh"

// What is not finite, or past the largest TF32 number, is left to `low`, beside a `high` of its sign from 1 to 2: an infinite `high` would
// meet the other operand's `low`, which is zero, or of the other sign. So an infinity times a number is infinite, times zero it is NaN.
__device__ __forceinline__ void split_tf32(float value, unsigned& high, unsigned& low) {
  high = nearest_tf32(value);
  if (!(fabsf(__uint_as_float(high)) < __uint_as_float(0x7f800000u))) high &= 0xbfffffffu;
  low = nearest_tf32(value - __uint_as_float(high));
}
