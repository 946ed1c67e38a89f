// Beside packing on the host: the launch before ends as late as it can, in each block anew. What it packs is poison until a thread waits
// for it, and whoever waits goes on only when all others have come as far as they can without.
#pragma once

#include "block.h"
#include "cuda_language.h"

namespace convt3d_host {

struct HeldBack {
  uint32_t* target;
  const uint32_t* packed;
  size_t words;
  bool shown, waited;  // now; by any thread of the launch
  size_t left;         // how many words may still be held back, for blocks are many
};

inline HeldBack held_back{};

// Not by memcpy, which the thread sanitizer would look at.
CONVT3D_RUNTIME inline void show_packed(bool shown) {
  volatile uint32_t* target = held_back.target;
  for (size_t i = 0; i < held_back.words; ++i) target[i] = shown ? held_back.packed[i] : ~0u;
  held_back.shown = shown;
}

CONVT3D_RUNTIME inline void hold_back_again() {
  if (!held_back.shown || held_back.left < held_back.words) return;
  held_back.left -= held_back.words;
  show_packed(false);
}

}  // namespace convt3d_host

CONVT3D_RUNTIME inline void wait_for_packing() {
  using namespace convt3d_host;
  Thread* self = current;
  if (state.held_begin == nullptr || self->is_behind) return;
  char orders_nothing;
  self->sync = &orders_nothing;
  self->state = State::at_packing;
  park();
  self->is_behind = held_back.waited = true;
  if (!held_back.shown) show_packed(true);
}

inline void let_next_begin() {}

// For the launch that comes next; returns whether nobody has waited for what was held back before.
extern "C" CONVT3D_EXPORTED CONVT3D_RUNTIME size_t convt3d_hold_back(uint32_t* target, const uint32_t* packed, size_t words) {
  using namespace convt3d_host;
  const bool unused = held_back.words != 0 && !held_back.waited;
  if (!held_back.shown) show_packed(true);
  held_back = {target, packed, words, true, false, words + (size_t{1} << 20)};
  state.held_begin = words == 0 ? nullptr : reinterpret_cast<const char*>(target);
  state.held_end = reinterpret_cast<const char*>(target + words);
  state.at_begin[0] = hold_back_again;
  return unused;
}
