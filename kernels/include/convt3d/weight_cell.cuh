// What packing reads: neighbouring input channels of one tap and output channel.
#pragma once
#include "advanced.cuh"
#include "view.cuh"

// Of the channels from ci on, those numbered begin to end - 1; zero in place of the others.
template <int COUNT>
__device__ __forceinline__ void load_weight_cell(scalar_t (&values)[COUNT], const View<const scalar_t>& weight, int ci, int co,
                                                 int d, int h, int w, int end, int begin = 0) {
  const scalar_t* source = begin < end ? weight.at(ci, co, d, h, w) : weight.data;
#pragma unroll
  for (int v = 0; v < COUNT; ++v) {
    values[v] = begin <= v && v < end ? *source : to_scalar(accum_t(0));
    if (v + 1 < end) source = advanced(source, weight.stride[0] * static_cast<index_t>(sizeof(scalar_t)));
  }
}
