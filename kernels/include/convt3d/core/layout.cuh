// What a GPU's binary is compiled for of the output's strides: `output_layout` of [specialize] promises them, see docs/kernels.md. A kernel
// begins with `lay_out`, and the compiler decides what looks at these strides.
#pragma once

#include "convt3d/core/problem.cuh"
#include "convt3d/core/view.cuh"

#ifndef OUTPUT_LAYOUT
#define OUTPUT_LAYOUT 0
#endif

enum class Layout { any, contiguous, channels_last };

// The layout that an output has, as `TensorRef.layout` (backends/base.py) says it.
template <class T>
__device__ inline int layout_of(const Problem& problem, const View<T>& output) {
  const index_t c = problem.out_channels, w = problem.output_size[2], hw = problem.output_size[1] * w,
                dhw = problem.output_size[0] * hw;
  const index_t contiguous[5] = {c * dhw, dhw, hw, w, 1}, channels_last[5] = {c * dhw, 1, hw * c, w * c, c};
  bool is_contiguous = dhw > 1, is_channels_last = c > 1;
  for (int a = 0; a < 5; ++a) {
    is_contiguous = is_contiguous && output.stride[a] == contiguous[a];
    is_channels_last = is_channels_last && output.stride[a] == channels_last[a];
  }
  const bool aligned = reinterpret_cast<unsigned long long>(output.data) % 16 == 0;
  return static_cast<int>(!aligned           ? Layout::any
                          : is_contiguous    ? Layout::contiguous
                          : is_channels_last ? Layout::channels_last
                                             : Layout::any);
}

// Have the compiler know what a layout promises.
template <class T>
__device__ __forceinline__ void lay_out([[maybe_unused]] const Problem& problem, [[maybe_unused]] View<T>& output,
                                        [[maybe_unused]] int layout) {
#if defined(__CUDACC__)
  if (layout == static_cast<int>(Layout::contiguous)) {
    output.stride[4] = 1;
    output.stride[3] = problem.output_size[2];
    __builtin_assume(output.stride[1] != 1);
  } else if (layout == static_cast<int>(Layout::channels_last)) {
    output.stride[1] = 1;
    __builtin_assume(output.stride[4] != 1);
  }
#endif
}
