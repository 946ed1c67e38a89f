// Where no tap reaches some outputs they are what `Epilogue::untouched` says, the bias alone. Rows and columns left out between others
// are no whole sectors of memory, so they are stored by the block that stores the sums beside them, at about the same time: L2 makes
// whole sectors of both.
#pragma once

#include "convt3d/core/advanced.cuh"
#include "convt3d/epilogue/epilogue.cuh"
#include "convt3d/core/forget_memory.cuh"

// A warp fills `count` neighbours: 16 bytes a lane from the first multiple of 32 elements on, where lines or halves of them begin.
template <class Index>
__device__ inline void fill_run(scalar_t* run, Index count, scalar_t value, int lane) {
  constexpr int LENGTH = 16 / sizeof(scalar_t);
  const Index before = static_cast<Index>(0 - reinterpret_cast<unsigned long long>(run) / sizeof(scalar_t)) & 31;
  const Index head = before < count ? before : count, pieces = (count - head) / LENGTH, tail = head + pieces * LENGTH + lane;
  Vector<LENGTH> piece;
  for (int i = 0; i < LENGTH; ++i) piece.element[i] = value;
  if (lane < head) run[lane] = value;
  Vector<LENGTH>* at = reinterpret_cast<Vector<LENGTH>*>(run + head) + lane;
#pragma unroll 1
  for (Index i = lane; i < pieces; i += 128, at += 128) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (i + k * 32 < pieces) at[k * 32] = piece;
    }
  }
  if (tail < count) run[tail] = value;
}

// Fill, with `warps` warps, the outputs with begin <= h * width + w < end of some channels and of the planes in [first_d, end_d).
template <class Index>
__device__ inline void fill_outputs(const Problem& problem, const Epilogue& epilogue, const View<scalar_t>& output, int n,
                                    int first_channel, int channels, int first_d, int end_d, Index begin, Index end, int warp,
                                    int warps) {
  const int lane = computed_anew(static_cast<int>(threadIdx.x)) % 32, width = problem.output_size[2];
  const bool joined = output.stride[3] == width * output.stride[4];  // rows follow each other as their elements do
  // A warp takes a channel; where channels lie side by side it takes as many of them as it can.
  const bool channels_last = output.stride[1] == 1 && output.stride[4] != 1;
  int together = 32;
  while (together > channels) together /= 2;
  const int first_c = channels_last ? lane % together : warp, step_c = channels_last ? together : warps;
  const int first_i = channels_last ? (warp * 32 + lane) / together : lane, step_i = channels_last ? warps * 32 / together : 32;
  for (Index at = begin, stop; at < end; at = stop) {
    const int h = static_cast<int>(at / width), w = static_cast<int>(at % width);
    stop = joined ? end : at + min(end - at, static_cast<Index>(width - w));
    scalar_t* plane = output.at(n, first_channel + first_c, max(first_d, 0), h, w);
#pragma unroll 1
    for (int d = max(first_d, 0); d < min(end_d, problem.output_size[0]); ++d) {
      scalar_t* run = plane;
#pragma unroll 1
      for (int c = first_c; c < channels; c += step_c) {
        const scalar_t value = epilogue.untouched(first_channel + c);
        if (output.stride[4] == 1) {
          fill_run(run, stop - at, value, lane);
        } else {
          for (Index i = first_i; i < stop - at; i += step_i) run[i * output.stride[4]] = value;
        }
        run = advanced(run, step_c * output.stride[1] * static_cast<index_t>(sizeof(scalar_t)));
      }
      plane = advanced(plane, output.stride[2] * static_cast<index_t>(sizeof(scalar_t)));
    }
  }
}
