// A ring of buffers in shared memory that some threads fill and others read (sm_90).
#pragma once

#include "convt3d/pipe/pipeline.cuh"

// The buffer that comes next: where its `full` and `empty` mbarriers are, and the parity of how often the ring has gone round.
struct Ring {
  unsigned barriers;
  int size, slot;
  unsigned parity;
  __device__ Ring(unsigned barriers_, int size_) : barriers(barriers_), size(size_), slot(0), parity(0) {}
  __device__ unsigned full() const { return barriers + static_cast<unsigned>(slot) * 8; }
  __device__ unsigned empty() const { return barriers + static_cast<unsigned>(size + slot) * 8; }
  __device__ void advance() {
    if (++slot == size) {
      slot = 0;
      parity ^= 1u;
    }
  }
};
