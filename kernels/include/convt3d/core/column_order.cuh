// Which output channel a column of wgmma's product is. A lane has two of every eight columns: as they are, pairs of channels; where channels
// lie together in memory, it is to have neighbours that one store takes.
#pragma once

#include "convt3d/core/constant.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/core/unaligned.cuh"
#include "convt3d/core/vector.cuh"

#ifndef LANE_EIGHTS  // set by the problem: eights of columns of which a lane's are neighbouring channels
#define LANE_EIGHTS 1
#endif
static_assert(LANE_EIGHTS == 1 || LANE_EIGHTS == 2 || LANE_EIGHTS == 4, "a lane stores at most 16 bytes at once");
#if defined(__CUDACC__)
typedef Vector<LANE_EIGHTS, Vector<2>> LaneChannels;
#else
typedef Vector<4, Vector<2>> LaneChannels;  // the most there can be
#endif

__device__ constexpr int channel_of_column(int column, int lane_eights) {
  const int together = 8 * lane_eights;
  return lane_eights == 1
             ? column
             : column / together * together + column % 8 / 2 * (2 * lane_eights) + column % together / 8 * 2 + column % 2;
}

__device__ __forceinline__ void store_lane_channels(scalar_t* y, const LaneChannels& channels,
                                                    [[maybe_unused]] int lane_eights) {
#if defined(__CUDACC__)
  *reinterpret_cast<LaneChannels*>(y) = channels;
#else
  if (lane_eights == 4) *reinterpret_cast<LaneChannels*>(y) = channels;
  if (lane_eights == 2) *reinterpret_cast<Vector<2, Vector<2>>*>(y) = {channels.element[0], channels.element[1]};
  if (lane_eights == 1) *reinterpret_cast<Vector<2>*>(y) = channels.element[0];
#endif
}

// The same where a voxel's channels begin anywhere, by all lanes of a warp: four have a voxel's in turn, `own` and then `later`. `live`: of the
// tile's channels those from the lane's first on; `is_first`: it has the tile's first.
__device__ __forceinline__ void store_lane_channels_anywhere(scalar_t* y, const LaneChannels& own, const LaneChannels& later,
                                                             int live, bool is_first, int lane,
                                                             [[maybe_unused]] int lane_eights) {
  const auto store = [&](auto eights) {
    constexpr int WORDS = decltype(eights)::value * static_cast<int>(sizeof(Vector<2>)) / 4;
    if constexpr (WORDS <= 4) {
      unsigned mine[WORDS], then[WORDS], next[WORDS];
      memcpy(mine, &own, sizeof mine);
      memcpy(then, &later, sizeof then);
      take_from_behind(next, mine, then, lane);
      store_unaligned(y, mine, next, live, is_first);
    }
  };
#if defined(__CUDACC__)
  store(Constant<LANE_EIGHTS>());
#else
  if (lane_eights == 4) store(Constant<4>());
  if (lane_eights == 2) store(Constant<2>());
  if (lane_eights == 1) store(Constant<1>());
#endif
}
