// Sums whose depth several blocks share: each part has memory of its own, and another launch adds the parts up, always in the same order.
#pragma once

#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/epilogue/store_channels_last.cuh"

// The sums of a part, as outputs of a tensor of their own: by channels or by rows, as the result lies.
__device__ inline View<accum_t> part_of(const View<scalar_t>& result, const Problem& problem, accum_t* partial_sums, int part) {
  const index_t channels = problem.out_channels, w = problem.output_size[2], plane = problem.output_size[1] * w;
  const index_t volume = problem.output_size[0] * plane;
  accum_t* const sums = partial_sums + part * problem.batch * channels * volume;
  if (channels_lie_together(result)) return {sums, {volume * channels, 1, plane * channels, w * channels, channels}};
  return {sums, {volume * channels, volume, plane, w, 1}};
}

// Store the output of a thread of blocks of 256: the sum of its parts, part after part, and the bias.
__device__ inline void add_partial_sums(const Problem& problem, const accum_t* __restrict__ partial_sums,
                                        const Epilogue& epilogue, const View<scalar_t>& output, int parts) {
  const index_t volume = static_cast<index_t>(problem.output_size[0]) * problem.output_size[1] * problem.output_size[2];
  const index_t channels = problem.out_channels, count = problem.batch * channels * volume,
                index = blockIdx.x * 256LL + threadIdx.x;
  if (index >= count) return;
  accum_t sum = accum_t(0);
#pragma unroll 4
  for (int part = 0; part < parts; ++part) sum += partial_sums[part * count + index];
  const bool by_channels = channels_lie_together(output);
  const int co = static_cast<int>((by_channels ? index : index / volume) % channels);
  const index_t n = index / (channels * volume);
  index_t place = (by_channels ? index / channels : index) % volume;
  const index_t w = place % problem.output_size[2];
  place /= problem.output_size[2];
  *output.at(n, co, place / problem.output_size[1], place % problem.output_size[1], w) =
      epilogue.finish(sum, epilogue.start(co));
}
