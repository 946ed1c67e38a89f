// Shared memory as the async proxy sees it, which bulk copies write and wgmma and bulk stores read through: a view of its own, into which
// ordinary stores come by `fence_async` alone. PTX ISA, "Proxies" and "fence.proxy.async". Any thread's fence is taken for all stores before it.
#pragma once

#include "block.h"

namespace convt3d_host {

constexpr size_t view_block = 1024;  // bytes that a fence looks at together

struct AsyncView {
  char* bytes;  // as large as the arena; what it holds counts where it is looked at only
  unsigned block_serial, fences;
  void (*kernel)(void**);  // whose blocks of memory these are, which hold what threads store and the async proxy reads
  size_t dynamic_bytes;
  bool is_mixed[arena_bytes / view_block];
  unsigned mixed[arena_bytes / view_block], count;
};

inline AsyncView async_view{};

#if defined(CONVT3D_ASAN) || defined(CONVT3D_TSAN)  // to them the runtime's own reads would be out of bounds, or races

inline void show_async(const char*, size_t) {}
inline void show_stores() {}
inline void require_fenced(const char*, size_t, Site) {}

#else

inline void begin_view() {
  AsyncView& view = async_view;
  if (view.block_serial == state.block_serial) return;
  view.block_serial = state.block_serial;
  view.fences = 0;
  if (view.bytes == nullptr) view.bytes = map_pages(arena_bytes);
  memset(view.bytes, 0xff, state.arena_used);
  if (view.kernel == state.invoke && view.dynamic_bytes == state.dynamic_bytes) return;
  view.kernel = state.invoke;
  view.dynamic_bytes = state.dynamic_bytes;
  while (view.count > 0) view.is_mixed[view.mixed[--view.count]] = false;
}

// What the async proxy itself has written.
inline void show_async(const char* place, size_t bytes) {
  begin_view();
  const size_t begin = static_cast<size_t>(place - state.arena);
  if (begin + bytes <= arena_bytes) memcpy(async_view.bytes + begin, place, bytes);
}

// A fence: what was stored until now.
inline void show_stores() {
  begin_view();
  ++async_view.fences;
  for (unsigned i = 0; i < async_view.count; ++i) {
    const size_t at = async_view.mixed[i] * view_block;
    if (memcmp(async_view.bytes + at, state.arena + at, view_block) != 0)
      memcpy(async_view.bytes + at, state.arena + at, view_block);
  }
}

// For what the async proxy reads. Fences look at a block of memory from when it first was read so; until then any fence will do.
inline void require_fenced(const char* place, size_t bytes, Site site) {
  begin_view();
  AsyncView& view = async_view;
  const size_t begin = static_cast<size_t>(place - state.arena), end = begin + bytes;
  if (end > arena_bytes || memcmp(view.bytes + begin, place, bytes) == 0) return;
  for (size_t block = begin / view_block; block * view_block < end; ++block) {
    const size_t from = block * view_block < begin ? begin : block * view_block,
                 to = (block + 1) * view_block < end ? (block + 1) * view_block : end;
    if (memcmp(view.bytes + from, state.arena + from, to - from) == 0) continue;
    if (view.is_mixed[block] || view.fences == 0) {
      describe_failure(
          "missing fence: %s at %s:%d reads shared memory that threads have stored to, with no fence_async behind the stores",
          site.what, site.file, site.line);
      abandon_block();
    }
    view.is_mixed[block] = true;
    view.mixed[view.count++] = static_cast<unsigned>(block);
    memcpy(view.bytes + block * view_block, state.arena + block * view_block, view_block);
  }
}

#endif

// What an asynchronous operation reads, to tell whether it has changed when that ends.
struct Digest {
  uint64_t sum, sums;
  CONVT3D_RUNTIME void add(const char* place, size_t bytes) {
    const volatile uint64_t* words = reinterpret_cast<const volatile uint64_t*>(place);
    for (size_t i = 0; i < bytes / 8; ++i) {
      sum += words[i];
      sums += sum;
    }
  }
  bool operator!=(const Digest& other) const { return sum != other.sum || sums != other.sums; }
};

}  // namespace convt3d_host
