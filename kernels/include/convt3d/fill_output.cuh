// Where no tap reaches some outputs they are the bias alone. All of the output is filled with it before the sums are stored: the rows and
// columns left out between others are no whole sectors of memory, and to write these twice costs less than to write parts of them.
#pragma once

// A warp fills `count` neighbours, 16 bytes a lane between the first and the last whole ones.
__device__ inline void fill_run(scalar_t* run, index_t count, scalar_t value, int lane) {
  constexpr int LENGTH = 16 / sizeof(scalar_t);
  struct alignas(16) Piece {
    scalar_t element[LENGTH];
  };
  const index_t before = static_cast<index_t>(0 - reinterpret_cast<unsigned long long>(run) / sizeof(scalar_t)) & (LENGTH - 1);
  const index_t head = before < count ? before : count, pieces = (count - head) / LENGTH, tail = head + pieces * LENGTH + lane;
  Piece piece;
  for (int i = 0; i < LENGTH; ++i) piece.element[i] = value;
  if (lane < head) run[lane] = value;
#pragma unroll 4
  for (index_t i = lane; i < pieces; i += 32) reinterpret_cast<Piece*>(run + head)[i] = piece;
  if (tail < count) run[tail] = value;
}

// Fill one plane of 8 channels with 256 threads: blockIdx.x = (n * ceil_div(out_channels, 8) + channel tile) * output_d + d
__device__ inline void fill_output(const Problem& problem, const scalar_t* bias, const View<scalar_t>& output) {
  const int channel_tiles = (problem.out_channels + 7) / 8, block = static_cast<int>(blockIdx.x);
  const int d = block % problem.output_size[0], tile = block / problem.output_size[0];
  const int height = problem.output_size[1], width = problem.output_size[2];
  // A warp takes a channel; where the channels lie side by side it takes rows, eight channels of four voxels at a time.
  const bool channels_last = output.stride[1] == 1;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int channel = tile % channel_tiles * 8 + (channels_last ? lane % 8 : warp);
  if (channel >= problem.out_channels) return;
  const scalar_t value = bias == nullptr ? to_scalar(accum_t(0)) : bias[channel];
  scalar_t* const plane = output.at(tile / channel_tiles, channel, d, 0, 0);
  if (!channels_last && output.stride[4] == 1 && output.stride[3] == width) {
    fill_run(plane, static_cast<index_t>(height) * width, value, lane);
    return;
  }
  for (int h = channels_last ? warp : 0; h < height; h += channels_last ? 8 : 1) {
    scalar_t* const row = plane + h * output.stride[3];
    if (!channels_last && output.stride[4] == 1) {
      fill_run(row, width, value, lane);
    } else {
      for (int w = channels_last ? lane / 8 : lane; w < width; w += channels_last ? 4 : 32) row[w * output.stride[4]] = value;
    }
  }
}
