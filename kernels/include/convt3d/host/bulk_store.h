// Bulk stores on the host: each is done when its thread waits for it, as late as it can be, so that what is written over its source
// early is stored.
#pragma once

#include "async_proxy.h"
#include "block.h"
#include "cuda_language.h"

namespace convt3d_host {

struct PendingStore {
  void* target;
  const void* source;
  unsigned bytes, groups;  // how often its thread has committed since
  const Thread* thread;
  Site site;
  Digest digest;  // of the source
};

struct StoreQueue {
  unsigned block_serial, count;
  PendingStore stores[4096];
};

inline StoreQueue store_queue{};

// On a GPU such a store may read the shared memory of the block that comes next.
CONVT3D_RUNTIME inline void require_no_stores() {
  if (store_queue.block_serial != state.block_serial || store_queue.count == 0) return;
  const Site site = store_queue.stores[0].site;
  describe_failure("ended before %u bulk stores were done, the first of %u bytes from %s:%d: nobody has waited for them",
                   store_queue.count, store_queue.stores[0].bytes, site.file, site.line);
}

// Not part of the runtime to the sanitizers: the bytes are the kernel's.
inline void store_bytes(const PendingStore& store) {
  Digest now{};
  now.add(static_cast<const char*>(store.source), store.bytes);
  if (now != store.digest) {
    describe_failure("stale stage: what the bulk store at %s:%d reads was written over before that was waited for",
                     store.site.file, store.site.line);
    abandon_block();
  }
  memcpy(store.target, store.source, store.bytes);
}

}  // namespace convt3d_host

CONVT3D_RUNTIME inline void bulk_store(void* target, unsigned source, unsigned bytes, CONVT3D_HERE) {
  using namespace convt3d_host;
  const char* from = state.arena + source;
  if (store_queue.block_serial != state.block_serial) {
    store_queue.block_serial = state.block_serial;
    store_queue.count = 0;
    state.at_end[1] = require_no_stores;
  }
  const uintptr_t places = reinterpret_cast<uintptr_t>(target) | reinterpret_cast<uintptr_t>(from) | bytes;
  if (places % 16 != 0 || bytes == 0 || store_queue.count == 4096) {
    describe_failure("bulk store of %u bytes at %s:%d: places and size must be multiples of 16 (or 4096 stores are waiting)",
                     bytes, file, line);
    abandon_block();
  }
  const Site site = {file, line, "bulk_store"};
  require_fenced(from, bytes, site);
  Digest digest{};
  digest.add(from, bytes);
  store_queue.stores[store_queue.count++] = {target, from, bytes, 0, current, site, digest};
}

CONVT3D_RUNTIME inline void bulk_commit() {
  using namespace convt3d_host;
  if (store_queue.block_serial != state.block_serial) return;
  for (unsigned i = 0; i < store_queue.count; ++i) store_queue.stores[i].groups += store_queue.stores[i].thread == current;
}

template <int groups>
CONVT3D_RUNTIME inline void bulk_wait_read() {
  using namespace convt3d_host;
  if (store_queue.block_serial != state.block_serial) return;
  unsigned kept = 0;
  for (unsigned i = 0; i < store_queue.count; ++i) {
    const PendingStore store = store_queue.stores[i];
    if (store.thread == current && store.groups > groups) {
      store_bytes(store);
    } else {
      store_queue.stores[kept++] = store;
    }
  }
  store_queue.count = kept;
}
