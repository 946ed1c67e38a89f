// The host twins of convt3d/ptx/shared_memory.cuh. An address counts from the arena's start. A copy by cp.async lands at its thread's
// wait_group and is poison until then, so a missing wait or barrier shows.
#pragma once

#include "cuda_language.h"

#include <cstdlib>

namespace convt3d_host {

struct AsyncCopy {
  char* target;
  unsigned bytes, group;
  uint64_t data[2];
};

struct AsyncQueue {
  unsigned block;  // whose copies these are; what a block leaves behind never lands
  unsigned group, count, capacity;
  AsyncCopy* copies;
};

inline AsyncQueue async_queues[max_threads];

CONVT3D_RUNTIME inline AsyncQueue& own_queue() {
  AsyncQueue& queue = async_queues[current - state.threads];
  if (queue.block != state.block_serial) {
    queue.block = state.block_serial;
    queue.group = queue.count = 0;
  }
  return queue;
}

CONVT3D_RUNTIME inline void enqueue(char* target, unsigned bytes, uint64_t low, uint64_t high) {
  AsyncQueue& queue = own_queue();
  if (queue.count == queue.capacity) {
    queue.capacity = queue.capacity == 0 ? 16 : 2 * queue.capacity;
    queue.copies = static_cast<AsyncCopy*>(realloc(queue.copies, queue.capacity * sizeof(AsyncCopy)));
  }
  AsyncCopy& copy = queue.copies[queue.count++];
  copy.target = target;
  copy.bytes = bytes;
  copy.group = queue.group;
  copy.data[0] = low;
  copy.data[1] = high;
}

CONVT3D_RUNTIME inline void close_group() { ++own_queue().group; }

// Take a copy whose group is older than the latest `pending` from the queue.
CONVT3D_RUNTIME inline bool dequeue(unsigned pending, AsyncCopy& copy) {
  AsyncQueue& queue = own_queue();
  for (unsigned i = 0; i < queue.count; ++i) {
    const AsyncCopy& candidate = queue.copies[i];
    if (candidate.group + pending >= queue.group) continue;
    copy.target = candidate.target;
    copy.bytes = candidate.bytes;
    copy.data[0] = candidate.data[0];
    copy.data[1] = candidate.data[1];
    queue.copies[i] = queue.copies[--queue.count];
    return true;
  }
  return false;
}

CONVT3D_RUNTIME inline void require_copyable(const char* target, const void* source, int bytes, int source_bytes, Site site) {
  const char* broken = nullptr;
  if ((reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(source)) % static_cast<unsigned>(bytes) != 0) {
    broken = "an address is no multiple of the size";
  } else if (target < state.arena || target + bytes > state.arena + state.arena_used) {
    broken = "the target is not in shared memory";
  } else if (source_bytes < 0 || source_bytes > bytes) {
    broken = "it reads more than it writes";
  }
  if (broken == nullptr) return require_filled(source, static_cast<size_t>(source_bytes), site);
  describe_failure("cp.async of %d bytes at %s:%d: %s", bytes, site.file, site.line, broken);
  abandon_block();
}

}  // namespace convt3d_host

inline unsigned shared_address(const void* shared) {
  const char* place = static_cast<const char*>(shared);
  const bool inside = place >= convt3d_host::state.arena && place < convt3d_host::state.arena + convt3d_host::arena_bytes;
  return inside ? static_cast<unsigned>(place - convt3d_host::state.arena) : 0xfffffff0u;
}

inline unsigned round_to_tf32(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return (bits & 0x7fffffu) != 0 ? 0x7fffffffu : bits;
  return (bits + 0x1000u) & ~0x1fffu;
}

inline unsigned nearest_tf32(float value) { return round_to_tf32(value); }

template <int bytes>
inline void cp_async(unsigned address, const void* source, int source_bytes = bytes, CONVT3D_HERE) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  char* target = convt3d_host::state.arena + address;
  convt3d_host::require_copyable(target, source, bytes, source_bytes, {file, line, "cp.async"});
  uint64_t data[2] = {};
  memcpy(data, source, static_cast<size_t>(source_bytes));
  memset(target, 0xff, bytes);  // from here until the wait the contents are undefined
  convt3d_host::enqueue(target, bytes, data[0], data[1]);
}

inline void cp_async_commit() { convt3d_host::close_group(); }

template <int pending>
inline void cp_async_wait() {
  convt3d_host::AsyncCopy copy;
  while (convt3d_host::dequeue(pending, copy)) memcpy(copy.target, copy.data, copy.bytes);
}

inline void cp_async_wait_all() {
  cp_async_commit();
  cp_async_wait<0>();
}
