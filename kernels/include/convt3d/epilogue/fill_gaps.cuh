// A block's share of the outputs that no tap reaches.
#pragma once

#include "convt3d/core/dense_axis.cuh"
#include "convt3d/epilogue/fill_output.cuh"

// A warp fills what no tap reaches of some channels and of the rows in [first, end), counted over d and h: rows, and `columns` of the
// others.
__device__ inline void fill_gaps(const Problem& problem, const Epilogue& epilogue, const View<scalar_t>& output, int n,
                                 int first_channel, int channels, index_t first, index_t end, bool columns) {
  const index_t width = problem.output_size[2], height = problem.output_size[1];
  for (index_t row = first, next; row < end; row = next) {
    const int d = static_cast<int>(row / height), h = static_cast<int>(row % height);
    const bool is_plane = !has_tap(problem, 0, d);
    next = is_plane ? min(end, row - h + height) : row + 1;
    if (is_plane || !has_tap(problem, 1, h)) {
      fill_outputs(problem, epilogue, output, n, first_channel, channels, d, d + 1, h * width, (h + next - row) * width, 0, 1);
      continue;
    }
    // Lanes have neighbours along w; where channels lie side by side, as many of these as there are.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    int together = output.stride[1] == 1 && output.stride[4] != 1 ? 32 : 1;
    while (together > channels) together /= 2;
    for (int w = lane / together; columns && w < width; w += 32 / together) {
      for (int c = has_tap(problem, 2, w) ? channels : lane % together; c < channels; c += together) {
        *output.at(n, first_channel + c, d, h, w) = epilogue.untouched(first_channel + c);
      }
    }
  }
}
