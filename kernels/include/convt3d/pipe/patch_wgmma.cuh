// Kernel = stride on warpgroups: packed weights that stay in a block's shared memory, and the products of a tile of voxels with them.
// A kernel defines ROWS, tiles of 64 voxels, and STAGES, of the input, before it includes this.
#pragma once

#include "convt3d/ptx/beside_packing.cuh"
#include "convt3d/core/cell.cuh"
#include "convt3d/core/constant.cuh"
#include "convt3d/pipe/patch.cuh"
#include "convt3d/core/specialized.cuh"
#include "convt3d/ptx/wgmma_registers.cuh"

static_assert((ROWS == 1 || ROWS == 2) && STAGES % 2 == 0, "one or two tiles, and stages in pairs");
#if defined(__CUDACC__)
#define SUMS (WGMMA_TILES * 4)
#else
#define SUMS 128
#endif

constexpr int SIZE = static_cast<int>(sizeof(scalar_t));
constexpr int STAGED = 64 / SIZE;                            // channels of a stage, which is half a chunk
constexpr int COUNT = 16 * ROWS, STAGE_BYTES = 1024 * ROWS;  // a warp's voxels, and its inputs of a stage

// Packed weights: [group][column tile][chunk][part] of [cell][column]; a chunk is eight cells, `number` counts those of all chunks.
__device__ inline void pack_cell(const scalar_t (&values)[VECTOR], accum_t* packed_weight, index_t number, int tile_columns,
                                 int column) {
  Cell parts[PARTS];
  make_cell(values, parts[0], parts[PARTS - 1]);
  Cell* const cell = reinterpret_cast<Cell*>(packed_weight) + (number + number / 8 * 8 * (PARTS - 1)) * tile_columns + column;
  for (int p = 0; p < PARTS; ++p) cell[p * 8 * tile_columns] = parts[p];
}

// A block's weights in shared memory. Each chunk has a barrier, since the first products begin before the last chunk is there.
struct Weights {
  unsigned at, barriers;
  int chunks, tile_columns;
  bool fresh = true;  // they have not been waited for

  __device__ __forceinline__ int chunk_bytes() const { return PARTS * 128 * tile_columns; }

  // One thread asks for them; `tile` counts column tiles of all groups.
  __device__ __forceinline__ void copy(const accum_t* packed_weight, int tile) const {
    for (int c = 0; c < chunks; ++c) mbarrier_init(barriers + static_cast<unsigned>(c) * 8, 1);
    mbarrier_fence_init();
    wait_for_packing();
    const char* const packed =
        reinterpret_cast<const char*>(packed_weight) + static_cast<index_t>(tile) * chunks * chunk_bytes();
    for (int c = 0; c < chunks; ++c) {
      const unsigned barrier = barriers + static_cast<unsigned>(c) * 8;
      mbarrier_arrive_expect(barrier, static_cast<unsigned>(chunk_bytes()));
      bulk_copy(at + static_cast<unsigned>(c * chunk_bytes()), packed + static_cast<index_t>(c) * chunk_bytes(),
                static_cast<unsigned>(chunk_bytes()), barrier);
    }
  }
};

// A warp's ring of stages: the two of a chunk, and those read before them.
struct Ring {
  unsigned char *const first, *pair = first, *before = first + (STAGES - 2) * STAGE_BYTES;

  __device__ __forceinline__ void advance() {
    before = pair;
    pair = pair + 2 * STAGE_BYTES == first + STAGES * STAGE_BYTES ? first : pair + 2 * STAGE_BYTES;
  }
};

// Two steps of a product of a lane's rows: row q is row lane / 4 + q % 2 * 8 of tile q / 2. Word i of four is a lane's of step i / 2.
struct Fragments {
  unsigned part[PARTS][2][ROWS][4];

  __device__ __forceinline__ void set(int i, int q, unsigned bits) {
    const int s = i / 2, r = q / 2, word = i % 2 * 2 + q % 2;
    if constexpr (PARTS == 2) {
      split_tf32(__uint_as_float(bits), part[0][s][r][word], part[1][s][r][word]);
    } else {
      part[0][s][r][word] = SIZE == 4 ? nearest_tf32(__uint_as_float(bits)) : bits;
    }
  }
};

// The sums of a warpgroup's tile. `load(stage, fragments)` reads what has landed; `copy(stage, half)` asks for what comes next to where
// the inputs of the products before were.
template <class Load, class Copy>
__device__ __forceinline__ void multiply_tile(float (&sums)[ROWS][SUMS], Weights& weights, Ring& ring, const Load& load,
                                              const Copy& copy) {
  Fragments fragments[2];
  // Tensor cores cut off what they add. So in tf32x3 a chunk has sums of its own, which join the others by a rounded addition, and products
  // with a low part come first: they meet small sums, of which little is cut off.
  float chunk_sums[PARTS == 2 ? ROWS : 1][PARTS == 2 ? SUMS : 1];
  if constexpr (PARTS == 2) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[r][i] = 0.0f;
    }
  }
  const unsigned operand = wgmma_operand(weights.at, static_cast<unsigned>(weights.tile_columns) * 16);
#pragma unroll 1
  for (int chunk = 0; chunk < weights.chunks; ++chunk) {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      cp_async_wait<STAGES - 2>();
      load(ring.pair + odd * STAGE_BYTES, fragments[odd]);
      if (odd == 0 && weights.fresh) mbarrier_wait(weights.barriers + static_cast<unsigned>(chunk) * 8, 0);
      wgmma_fence();
      // One part of the inputs of a half of the chunk by one of the weights.
      const auto multiply = [&](auto& into, int half, int input_part, int weight_part, bool fresh) {
        const unsigned b =
            operand +
            static_cast<unsigned>(chunk * weights.chunk_bytes() + (weight_part * 128 + half * 64) * weights.tile_columns) / 16;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            wgmma_registers(into[r], fragments[half].part[input_part][s][r],
                            b + static_cast<unsigned>(s * weights.tile_columns * 2), !fresh || s > 0, weights.tile_columns);
          }
        }
      };
      if constexpr (PARTS == 2) {
        multiply(chunk_sums, odd, 1, 0, odd == 0);
        multiply(chunk_sums, odd, 0, 1, false);
        if (odd == 1) {
          multiply(chunk_sums, 0, 0, 0, false);
          multiply(chunk_sums, 1, 0, 0, false);
        }
      } else {
        multiply(sums, odd, 0, 0, chunk + odd == 0);
      }
      wgmma_commit();
      copy(odd == 0 ? ring.before + STAGE_BYTES : ring.pair, 1 - odd);  // while they run
      wgmma_wait<1>();                                                  // the other fragments have been read
    }
    ring.advance();
    if constexpr (PARTS == 2) {
      wgmma_wait<0>();
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int i = 0; i < SUMS && i < weights.tile_columns / 2; ++i) {
          sums[r][i] += chunk_sums[r][i];
        }
      }
    }
  }
  weights.fresh = false;
  wgmma_wait<0>();
}
