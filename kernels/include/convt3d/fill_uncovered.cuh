// Outputs that no tap reaches: they are the bias alone, and cost a store.
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

// What a block of 256 threads fills: one plane of 8 channels. blockIdx.x = (n * ceil_div(out_channels, 8) + channel tile) * output_d + d
struct PlaneOfChannels {
  int n, first_channel, d;
};

__device__ inline PlaneOfChannels plane_of_channels(const Problem& problem) {
  const int channel_tiles = (problem.out_channels + 7) / 8, block = static_cast<int>(blockIdx.x);
  const int rest = block / problem.output_size[0];
  return {rest / channel_tiles, rest % channel_tiles * 8, block % problem.output_size[0]};
}

// Fill the rows without a tap, all of them if `whole_plane`; if `columns`, also the columns without a tap of all other rows.
__device__ inline void fill_uncovered(const Problem& problem, const scalar_t* bias, const View<scalar_t>& output,
                                      const PlaneOfChannels& place, bool whole_plane, bool columns) {
  const int height = problem.output_size[1], width = problem.output_size[2];
  // A warp takes a channel; where the channels lie side by side it takes rows, eight channels of four voxels at a time.
  const bool channels_last = output.stride[1] == 1;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int channel = place.first_channel + (channels_last ? lane % 8 : warp);
  const bool live = channel < problem.out_channels;
  const int first_w = channels_last ? lane / 8 : lane, step_w = channels_last ? 4 : 32;
  const scalar_t value = bias == nullptr || !live ? to_scalar(accum_t(0)) : bias[channel];
  scalar_t* plane = output.at(place.n, live ? channel : 0, place.d, 0, 0);
  if (whole_plane && !channels_last && output.stride[4] == 1 && output.stride[3] == width) {
    if (live) fill_run(plane, static_cast<index_t>(height) * width, value, lane);
    return;
  }
  for (int h = channels_last ? warp * 32 : 0; h < height; h += channels_last ? 256 : 32) {
    const bool inside = h + lane < height, covered = !whole_plane && inside && has_tap(problem, 1, h + lane);
    const unsigned rows = __ballot_sync(~0u, inside && !covered), others = __ballot_sync(~0u, covered);
    if (!live) continue;
    for (unsigned left = rows; left != 0; left &= left - 1) {
      scalar_t* row = plane + (h + __ffs(static_cast<int>(left)) - 1) * output.stride[3];
      if (!channels_last && output.stride[4] == 1) {
        fill_run(row, width, value, lane);
      } else {
        for (int w = first_w; w < width; w += step_w) row[w * output.stride[4]] = value;
      }
    }
    if (!columns || others == 0) continue;
    for (int w = first_w; w < width; w += step_w) {
      if (has_tap(problem, 2, w)) continue;
      for (unsigned left = others; left != 0; left &= left - 1) {
        plane[(h + __ffs(static_cast<int>(left)) - 1) * output.stride[3] + w * output.stride[4]] = value;
      }
    }
  }
}
