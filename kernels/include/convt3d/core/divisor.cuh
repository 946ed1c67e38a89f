// Division by a number known only at run time, without the twenty instructions of a division.
#pragma once

// n / value = n * ceil(2^shift / value) >> shift for 0 <= n < 2^31: shift is 31 + ceil(log2(value)), so that the multiplier fits 32 bits
// and what rounding it up adds to the quotient stays below 1 / value.
struct Divisor {
  int value, shift;
  unsigned multiplier;

  __device__ int quotient(int n) const {
    return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(n)) * multiplier >> shift);
  }
};

__device__ inline Divisor divisor_of(int value) {
  const int shift = 63 - __clz(value - 1);
  return {value, shift, static_cast<unsigned>(((1ULL << shift) + value - 1) / value)};
}
