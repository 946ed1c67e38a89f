// Stores of a warp whose lanes each have some channels of some outputs, where channels lie together in memory. A lane's own stores would be
// as far from its neighbours' as outputs are, each a part of a sector. So the sums pass through shared memory, each warp's through its
// own: then neighbouring lanes have neighbouring channels, and what one instruction stores of an output is contiguous.
#pragma once

#include "convt3d/core/vector.cuh"
#include "convt3d/core/view.cuh"

constexpr int PIECE_CHANNELS = 16 / sizeof(scalar_t);
typedef Vector<PIECE_CHANNELS> ChannelPiece;

// Whether channels lie together and outputs further apart: of one channel both may be said.
__device__ inline bool channels_lie_together(const View<scalar_t>& output) {
  return output.stride[1] == 1 && output.stride[4] != 1;
}

// Whether channels that lie together are whole pieces, from each multiple of PIECE_CHANNELS on.
__device__ inline bool channels_are_pieces(const View<scalar_t>& output, int channels) {
  bool whole = channels % PIECE_CHANNELS == 0 && reinterpret_cast<unsigned long long>(output.data) % sizeof(ChannelPiece) == 0;
  for (int a = 0; a < 5; ++a) whole = whole && (a == 1 || output.stride[a] % PIECE_CHANNELS == 0);
  return whole;
}

// A warp's room in shared memory for `outputs` outputs of `channels` channels a lane, a multiple of PIECE_CHANNELS. A lane's are an odd
// number of pieces, so that lanes meet all banks. It takes 32 * (8 * outputs + pitch * itemsize) bytes.
struct ChannelStage {
  scalar_t** targets;
  scalar_t* elements;
  int pitch;
};

__device__ __forceinline__ ChannelStage channel_stage(unsigned char* shared, int warp, int outputs, int channels) {
  const int pitch = (outputs * channels / PIECE_CHANNELS | 1) * PIECE_CHANNELS;
  unsigned char* own = shared + warp * 32 * (8 * outputs + pitch * static_cast<int>(sizeof(scalar_t)));
  return {reinterpret_cast<scalar_t**>(own), reinterpret_cast<scalar_t*>(own + 32 * 8 * outputs), pitch};
}

// Store element(output, channel) of each lane's outputs, of which the first channel goes to target(output): null where there is no such
// output. All lanes call it; `live` of the channels are there; `pieces`: they are stored 16 bytes at a time.
template <class Target, class Element>
__device__ __forceinline__ void store_channels_last(const ChannelStage& stage, int lane, int outputs, int channels, int live,
                                                    bool pieces, const Target& target, const Element& element) {
  __syncwarp();  // what was staged before has been read
#pragma unroll
  for (int i = 0; i < outputs; ++i) {
    stage.targets[lane * outputs + i] = target(i);
#pragma unroll
    for (int first = 0; first < channels; first += PIECE_CHANNELS) {
      ChannelPiece piece;
#pragma unroll
      for (int c = 0; c < PIECE_CHANNELS; ++c) piece.element[c] = element(i, first + c);
      *reinterpret_cast<ChannelPiece*>(stage.elements + (lane * stage.pitch + i * channels + first)) = piece;
    }
  }
  __syncwarp();
  if (pieces) {
    const int of_output = channels / PIECE_CHANNELS;
#pragma unroll
    for (int k = 0; k < outputs * of_output; ++k) {
      const int number = k * 32 + lane, output = number / of_output, first = number % of_output * PIECE_CHANNELS;
      const scalar_t* from = stage.elements + (output / outputs * stage.pitch + output % outputs * channels + first);
      const ChannelPiece piece = *reinterpret_cast<const ChannelPiece*>(from);
      scalar_t* const y = stage.targets[output];
      if (y != nullptr && first < live) *reinterpret_cast<ChannelPiece*>(y + first) = piece;
    }
  } else {
#pragma unroll 1
    for (int number = lane, there = min(channels, live); number < 32 * outputs * there; number += 32) {
      const int output = number / there, c = number - output * there;
      scalar_t* const y = stage.targets[output];
      if (y != nullptr) y[c] = stage.elements[output / outputs * stage.pitch + output % outputs * channels + c];
    }
  }
}
