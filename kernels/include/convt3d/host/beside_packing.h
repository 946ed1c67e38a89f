// Beside packing on the host: what was packed is held back until a thread waits for it, so that reading it before finds the poison.
#pragma once

#include "block.h"
#include "cuda_language.h"

namespace convt3d_host {

struct HeldBack {
  uint32_t* target;
  const uint32_t* packed;
  size_t words;
};

inline HeldBack held_back{};

}  // namespace convt3d_host

CONVT3D_RUNTIME inline void wait_for_packing() {
  using namespace convt3d_host;
  // Not by memcpy, which the thread sanitizer would look at.
  for (volatile uint32_t* word = held_back.target; held_back.words != 0; --held_back.words) *word++ = *held_back.packed++;
}

inline void let_next_begin() {}

// For the launch that comes next; returns how much of what was held back before nobody has waited for.
extern "C" CONVT3D_EXPORTED CONVT3D_RUNTIME size_t convt3d_hold_back(uint32_t* target, const uint32_t* packed, size_t words) {
  const size_t left = convt3d_host::held_back.words;
  convt3d_host::held_back = {target, packed, words};
  return left;
}
