// A launch as the driver's own: grid, block, dynamic shared bytes and an array of pointers to the arguments.
#pragma once

#include "block.h"
#include "faults.h"

#include <type_traits>
#include <utility>

namespace convt3d_host {

struct Entry {
  void (*invoke)(void**);
  const size_t* sizes;
  size_t count;
};

template <auto kernel>
struct Export;

template <class... Arguments, void (*kernel)(Arguments...)>
struct Export<kernel> {
  template <size_t... position>
  CONVT3D_RUNTIME static void unpack(void** arguments, std::index_sequence<position...>) {
    kernel(*static_cast<std::remove_cv_t<Arguments>*>(arguments[position])...);
  }
  CONVT3D_RUNTIME static void invoke(void** arguments) { unpack(arguments, std::index_sequence_for<Arguments...>{}); }
  static constexpr size_t sizes[] = {sizeof(Arguments)..., 0};
  static constexpr Entry entry{invoke, sizes, sizeof...(Arguments)};
};

CONVT3D_RUNTIME inline uint64_t greatest_common_divisor(uint64_t a, uint64_t b) {
  return b == 0 ? a : greatest_common_divisor(b, a % b);
}

CONVT3D_RUNTIME inline void lay_out_threads(Index3 block) {
  state.block = block;
  state.count = block.x * block.y * block.z;
  for (unsigned i = 0; i < state.count; ++i) {
    state.threads[i].index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
  }
}

CONVT3D_RUNTIME inline void lay_out_shared(size_t dynamic_bytes) {
  if (state.arena == nullptr) {
    char* pages = map_pages(arena_bytes + 2 * arena_guard);
    mprotect(pages, arena_guard, PROT_NONE);
    mprotect(pages + arena_guard + arena_bytes, arena_guard, PROT_NONE);
    state.arena = pages + arena_guard;
    state.arena_used = arena_bytes;
  }
#if !defined(CONVT3D_ASAN)
  volatile uint64_t* arena = reinterpret_cast<volatile uint64_t*>(state.arena);  // NaN past a variable's end, too
  for (size_t i = 0; i < (state.arena_used + 7) / 8; ++i) arena[i] = ~uint64_t{0};
#endif
  ++state.generation;
  state.arena_used = state.static_used = state.shared_count = 0;
  state.dynamic_bytes = dynamic_bytes;
#if defined(CONVT3D_ASAN)
  __asan_poison_memory_region(state.arena, arena_bytes);
#endif
  state.dynamic = place_shared(dynamic_bytes, 1024, "dynamic shared memory");
}

// Run `blocks` blocks from number `first` on, x fastest; with a seed, blocks, threads and wake-ups go in an order drawn from it.
// Returns 0, or 1 with a message.
CONVT3D_RUNTIME inline int run_grid(const Entry& entry, const unsigned* grid, const unsigned* block, size_t dynamic_bytes,
                                    void** arguments, uint64_t seed, uint64_t first, uint64_t blocks) {
  state.failed = false;
  state.random = seed;
  state.most_threads = 0;
  state.invoke = entry.invoke;
  state.arguments = arguments;
  state.grid = gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  lay_out_threads(blockDim);
  lay_out_shared(dynamic_bytes);
  tsan_release(&state.begin_sync);
  state.fresh = state.idle_count = 0;
  uint64_t step = 1, offset = 0;
  if (seed != 0 && blocks > 1) {
    offset = draw(static_cast<unsigned>(blocks > 0xffffffffu ? 0xffffffffu : blocks));
    do step = 1 + draw(0x7fffffffu);
    while (greatest_common_divisor(step, blocks) != 1);
    step %= blocks;
  }
  for (uint64_t number = 0, position = offset; number < blocks && !state.failed; ++number) {
    const uint64_t block_number = first + position;
    blockIdx = {static_cast<unsigned>(block_number % grid[0]), static_cast<unsigned>(block_number / grid[0] % grid[1]),
                static_cast<unsigned>(block_number / (uint64_t{grid[0]} * grid[1]))};
    run_block(block_number);
    position += step;
    if (position >= blocks) position -= blocks;
  }
  look_at_red_zones(true);
  if (state.failed) state.arena_used = arena_bytes;  // whatever was written there, the next launch finds none of it
  tsan_acquire(&state.launch_sync);
  return state.failed ? 1 : 0;
}

}  // namespace convt3d_host

#define CONVT3D_EXPORTED extern "C" __attribute__((visibility("default")))

#define CONVT3D_HOST_KERNELS(...)                                                                                            \
  static const convt3d_host::Entry convt3d_entries[] = {__VA_ARGS__};                                                        \
  CONVT3D_EXPORTED size_t convt3d_argument_sizes(unsigned kernel, size_t* sizes) {                                           \
    for (size_t i = 0; sizes != nullptr && i < convt3d_entries[kernel].count; ++i)                                           \
      sizes[i] = convt3d_entries[kernel].sizes[i];                                                                           \
    return convt3d_entries[kernel].count;                                                                                    \
  }                                                                                                                          \
  CONVT3D_EXPORTED const char* convt3d_own_instruction() { return convt3d_host::state.own_instruction; }                     \
  CONVT3D_EXPORTED const char* convt3d_message() { return convt3d_host::state.message; }                                     \
  CONVT3D_EXPORTED CONVT3D_RUNTIME void convt3d_report_faults() { convt3d_host::report_faults(); }                           \
  CONVT3D_EXPORTED CONVT3D_RUNTIME void convt3d_release() { convt3d_host::release_fibers(); }                                \
  CONVT3D_EXPORTED size_t convt3d_static_shared_bytes() { return convt3d_host::state.static_used; }                          \
  CONVT3D_EXPORTED CONVT3D_RUNTIME int convt3d_launch(unsigned kernel, const unsigned* grid, const unsigned* block,          \
                                                      size_t dynamic_bytes, void** arguments, uint64_t seed, uint64_t first, \
                                                      uint64_t blocks) {                                                     \
    return convt3d_host::run_grid(convt3d_entries[kernel], grid, block, dynamic_bytes, arguments, seed, first, blocks);      \
  }

#define CONVT3D_HOST_KERNEL(symbol) convt3d_host::Export<&symbol>::entry
