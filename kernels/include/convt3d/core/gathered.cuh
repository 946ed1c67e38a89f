// One output, by the definition: for those few that a kernel's own way does not get right.
#pragma once

#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/geometry.cuh"

// Of `channel`, which is number `co` of its group; the group's input channels are those from `first_ci` on.
__device__ inline scalar_t gathered(const Problem& problem, const View<const scalar_t>& input,
                                    const View<const scalar_t>& weight, const Epilogue& epilogue, int n, int channel, int co,
                                    int first_ci, int d, int h, int w) {
  const int channels = problem.in_channels / problem.groups;
  accum_t sum = epilogue.start(channel);
#pragma unroll 1
  for (int tap = 0; tap < problem.kernel_size[0] * problem.kernel_size[1] * problem.kernel_size[2]; ++tap) {
    const int kw = tap % problem.kernel_size[2], kh = tap / problem.kernel_size[2] % problem.kernel_size[1];
    const int kd = tap / problem.kernel_size[2] / problem.kernel_size[1];
    const int id = input_index(problem, 0, d, kd), ih = input_index(problem, 1, h, kh), iw = input_index(problem, 2, w, kw);
    if (id < 0 || ih < 0 || iw < 0) continue;
#pragma unroll 1
    for (int ci = first_ci; ci < first_ci + channels; ++ci)
      sum += to_accum(*input.at(n, ci, id, ih, iw)) * to_accum(*weight.at(ci, co, kd, kh, kw));
  }
  return epilogue.finish(sum);
}
