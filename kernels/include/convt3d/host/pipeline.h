// mbarriers and bulk copies on the host: a wait parks the fiber, a barrier that can never end its phase is a deadlock with a
// place. A bulk copy's target is poison from when it is issued; it is done by whoever waits for it, as late as it can be, or (in half of
// the blocks of a shuffled order) some of them at once.
#pragma once

#include "async_proxy.h"
#include "block.h"
#include "cuda_language.h"

struct alignas(8) Mbarrier {
  uint64_t arrivals : 12, missing : 12, phase : 1;
  uint64_t is_fenced : 1, is_behind : 1;  // the async proxy knows it; who arrived knew that the launch before has ended
  int64_t bytes : 37;
};
static_assert(sizeof(Mbarrier) == 8, "as large as a GPU's");

namespace convt3d_host {

struct PendingCopy {
  void* target;
  const void* source;
  unsigned bytes;
  Mbarrier* barrier;
  Site site;
};

struct CopyQueue {
  unsigned block_serial, count;
  PendingCopy copies[1024];
};

inline CopyQueue copy_queue{};

// mbarriers that a thread has initialised and not fenced yet.
struct FreshBarriers {
  unsigned block_serial, count;
  struct {
    Mbarrier* barrier;
    const Thread* thread;
  } fresh[1024];
};

inline FreshBarriers fresh_barriers{};

CONVT3D_RUNTIME inline void remember_barrier(Mbarrier* barrier) {
  state.is_eager = state.random != 0 && draw(2) == 0;
  FreshBarriers& all = fresh_barriers;
  if (all.block_serial != state.block_serial) all.count = 0;
  all.block_serial = state.block_serial;
  if (all.count < 1024) all.fresh[all.count++] = {barrier, current};
}

CONVT3D_RUNTIME inline void fence_barriers() {
  FreshBarriers& all = fresh_barriers;
  if (all.block_serial != state.block_serial) return;
  unsigned kept = 0;
  for (unsigned i = 0; i < all.count; ++i) {
    if (all.fresh[i].thread == current) {
      all.fresh[i].barrier->is_fenced = 1;
    } else {
      all.fresh[kept++] = all.fresh[i];
    }
  }
  all.count = kept;
}

// On a GPU such a copy would land in the shared memory of the block that comes next.
CONVT3D_RUNTIME inline void require_no_copies() {
  if (copy_queue.block_serial != state.block_serial || copy_queue.count == 0) return;
  const Site site = copy_queue.copies[0].site;
  describe_failure("ended before %u bulk copies had landed, the first of %u bytes from %s:%d: nobody has waited for them",
                   copy_queue.count, copy_queue.copies[0].bytes, site.file, site.line);
}

CONVT3D_RUNTIME inline void check_mbarrier(const Mbarrier* barrier, Site site) {
  if (barrier->arrivals != 0xfff && barrier->arrivals != 0) return;  // poison
  describe_failure("%s on an mbarrier that was not initialised, at %s:%d", site.what, site.file, site.line);
  abandon_block();
}

CONVT3D_RUNTIME inline void wake_waiters(const Mbarrier* barrier) {
  begin_waking();
  for (unsigned i = 0; i < state.count; ++i) {
    if (state.threads[i].state == State::at_mbarrier && state.threads[i].slot == barrier) {
      state.threads[i].state = State::running;
      wake(i);
    }
  }
}

CONVT3D_RUNTIME inline void end_phase_if_complete(Mbarrier* barrier) {
  if (barrier->missing != 0 || barrier->bytes != 0) return;
  barrier->phase ^= 1;
  barrier->missing = barrier->arrivals;
  wake_waiters(barrier);
}

CONVT3D_RUNTIME inline void arrive(Mbarrier* barrier, unsigned bytes, Site site) {
  check_mbarrier(barrier, site);
  if (barrier->missing == 0) {
    describe_failure("more arrivals than the mbarrier's %u in one phase, at %s:%d", static_cast<unsigned>(barrier->arrivals),
                     site.file, site.line);
    abandon_block();
  }
  tsan_release(reinterpret_cast<char*>(barrier));
  if (current->is_behind) barrier->is_behind = 1;
  barrier->bytes += bytes;
  barrier->missing -= 1;
  end_phase_if_complete(barrier);
  give_way();
}

// Not part of the runtime to the sanitizers: the bytes are the kernel's. What says where they lie is not: it is on the stack of whoever waits.
inline void copy_bytes(void* target, const void* source, unsigned bytes) {
  memcpy(target, source, bytes);
  show_async(static_cast<const char*>(target), bytes);
}

// To TSan the copy engine is a thread of its own: whoever waits and does its work here is not ordered before the others that wait.
CONVT3D_RUNTIME inline void copy_as_engine(const PendingCopy& copy) {
  char* const barrier = reinterpret_cast<char*>(copy.barrier);
#if defined(CONVT3D_TSAN)
  static void* engines[8];  // so that one barrier's copies hardly ever seem to come behind another's
  void*& engine = engines[reinterpret_cast<uintptr_t>(barrier) / sizeof(Mbarrier) % 8];
  if (engine == nullptr) engine = __tsan_create_fiber(0);
  void* const waits = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(engine, __tsan_switch_to_fiber_no_sync);
#endif
  tsan_acquire(barrier);
  copy_bytes(copy.target, copy.source, copy.bytes);
  tsan_release(barrier);
#if defined(CONVT3D_TSAN)
  __tsan_switch_to_fiber(waits, __tsan_switch_to_fiber_no_sync);
#endif
}

CONVT3D_RUNTIME inline void finish_copies(Mbarrier* barrier) {
  unsigned kept = 0;
  if (copy_queue.block_serial != state.block_serial) copy_queue.count = 0;
  for (unsigned i = 0; i < copy_queue.count; ++i) {
    const PendingCopy copy = copy_queue.copies[i];
    if (copy.barrier == barrier) {
      copy_as_engine(copy);
      if (barrier->bytes < copy.bytes) {
        describe_failure("a bulk copy of %u bytes for an mbarrier that expects %lld", copy.bytes,
                         static_cast<long long>(barrier->bytes));
        abandon_block();
      }
      barrier->bytes -= copy.bytes;
    } else {
      copy_queue.copies[kept++] = copy;
    }
  }
  const bool any = kept != copy_queue.count;
  copy_queue.count = kept;
  if (any) end_phase_if_complete(barrier);
}

CONVT3D_RUNTIME inline void wait_for_phase(Mbarrier* barrier, unsigned parity, Site site) {
  Thread* self = current;
  char orders_nothing;  // for those that come later: who waits gives nothing away
  check_mbarrier(barrier, site);
  // Copies of a later phase may have landed by now, or not.
  if (barrier->phase == parity || state.random == 0 || draw(2) == 0) finish_copies(barrier);
  while (barrier->phase == parity) {
    self->site = site;
    self->slot = barrier;
    self->sync = &orders_nothing;
    self->state = State::at_mbarrier;
    park();
    finish_copies(barrier);
  }
  tsan_acquire(reinterpret_cast<char*>(barrier));
  if (barrier->is_behind) self->is_behind = true;
}

inline Mbarrier* mbarrier_at(unsigned address) { return reinterpret_cast<Mbarrier*>(state.arena + address); }

}  // namespace convt3d_host

inline void mbarrier_init(unsigned barrier, int arrivals) {
  using namespace convt3d_host;
  Mbarrier& fresh = *mbarrier_at(barrier);
  fresh = {};
  fresh.arrivals = fresh.missing = static_cast<unsigned>(arrivals) & 0xfffu;
  remember_barrier(&fresh);
}
inline void mbarrier_fence_init() { convt3d_host::fence_barriers(); }
inline void mbarrier_arrive(unsigned barrier, CONVT3D_HERE) {
  convt3d_host::arrive(convt3d_host::mbarrier_at(barrier), 0, {file, line, "mbarrier_arrive"});
}
inline void mbarrier_arrive_expect(unsigned barrier, unsigned bytes, CONVT3D_HERE) {
  convt3d_host::arrive(convt3d_host::mbarrier_at(barrier), bytes, {file, line, "mbarrier_arrive_expect"});
}
inline void mbarrier_wait(unsigned barrier, unsigned parity, CONVT3D_HERE) {
  convt3d_host::wait_for_phase(convt3d_host::mbarrier_at(barrier), parity, {file, line, "mbarrier_wait"});
}
inline void mbarrier_wait_patiently(unsigned barrier, unsigned parity, CONVT3D_HERE) {
  convt3d_host::wait_for_phase(convt3d_host::mbarrier_at(barrier), parity, {file, line, "mbarrier_wait_patiently"});
}

CONVT3D_RUNTIME inline void bulk_copy(unsigned target, const void* source, unsigned bytes, unsigned barrier, CONVT3D_HERE) {
  using namespace convt3d_host;
  char* place = state.arena + target;
  Mbarrier* counter = mbarrier_at(barrier);
  const uintptr_t places = reinterpret_cast<uintptr_t>(place) | reinterpret_cast<uintptr_t>(source) | bytes;
  if (copy_queue.block_serial != state.block_serial) {
    copy_queue.block_serial = state.block_serial;
    copy_queue.count = 0;
    state.at_end[0] = require_no_copies;
  }
  if (places % 16 != 0 || bytes == 0 || copy_queue.count == 1024) {
    describe_failure("bulk copy of %u bytes at %s:%d: places and size must be multiples of 16 (or 1024 copies are waiting)",
                     bytes, file, line);
    abandon_block();
  }
  const Site site = {file, line, "bulk_copy"};
  check_mbarrier(counter, site);
  if (!counter->is_fenced) {
    describe_failure(
        "missing fence: bulk copy at %s:%d counts in at an mbarrier that was initialised with no mbarrier_fence_init behind",
        file, line);
    abandon_block();
  }
  require_filled(source, bytes, site);
  for (volatile uint64_t* word = reinterpret_cast<uint64_t*>(place); word < reinterpret_cast<uint64_t*>(place + bytes);) {
    *word++ = ~uint64_t{0};
  }
  show_async(place, bytes);
  tsan_release(reinterpret_cast<char*>(counter));
  copy_queue.copies[copy_queue.count++] = {place, source, bytes, counter, site};
  wake_waiters(counter);
  if (state.is_eager && counter->bytes >= bytes && draw(8) != 0) finish_copies(counter);  // it may be quick, too
}

// A barrier of 128 threads is an mbarrier at which all of them arrive and wait.
CONVT3D_RUNTIME inline void sync_warpgroup(int warpgroup, CONVT3D_HERE) {
  using namespace convt3d_host;
  static Mbarrier barriers[most_sets][max_threads / 128];
  static unsigned serials[most_sets][max_threads / 128];
  Mbarrier* const barrier = &barriers[state.set][warpgroup];
  if (serials[state.set][warpgroup] != state.block_serial) *barrier = {128, 128, 0, 1, 0, 0};
  serials[state.set][warpgroup] = state.block_serial;
  const unsigned parity = barrier->phase;
  arrive(barrier, 0, {file, line, "sync_warpgroup"});
  wait_for_phase(barrier, parity, {file, line, "sync_warpgroup"});
}

inline void fence_async() {
  convt3d_host::fence_barriers();
  convt3d_host::show_stores();
}

namespace convt3d_host {

// What setmaxnreg has left a thread.
struct OwnRegisters {
  unsigned block_serial, count;
};
inline OwnRegisters own_registers[max_threads];

// All warps of a warpgroup execute the same setmaxnreg, and it waits until the block's pool has as many registers (PTX ISA,
// "setmaxnreg"). The pool is what the block was launched with: as many a thread as launch bounds leave it of the 65536.
CONVT3D_RUNTIME inline void require_registers() {
  if (state.most_threads == 0) return;  // ptxas ignores setmaxnreg
  const unsigned blocks = state.least_blocks == 0 ? 1 : state.least_blocks,
                 fair = 65536 / (state.most_threads * blocks) / 8 * 8;
  const unsigned launched = fair < 256 ? fair : 256;
  unsigned held = 0;
  for (unsigned i = 0; i < state.count; ++i) {
    const auto count = [&](const OwnRegisters& own) { return own.block_serial == state.block_serial ? own.count : launched; };
    held += count(own_registers[i]);
    if (count(own_registers[i]) == count(own_registers[i / 128 * 128])) continue;
    describe_failure("registers: threads %u and %u are of one warpgroup, setmaxnreg has left them %u and %u registers",
                     i / 128 * 128, i, count(own_registers[i / 128 * 128]), count(own_registers[i]));
    return;
  }
  if (held <= launched * state.count) return;
  describe_failure(
      "registers: setmaxnreg asks for %u in all, and the block was launched with %u, %u for each of %u threads: "
      "a GPU waits for ever",
      held, launched * state.count, launched, state.count);
}

template <int registers>
CONVT3D_RUNTIME void set_registers(Site site) {
  static_assert(registers >= 24 && registers <= 256 && registers % 8 == 0, "setmaxnreg takes a multiple of 8 from 24 to 256");
  use_own_instruction(site);
  own_registers[current - state.threads] = {state.block_serial, registers};
  state.at_end[3] = require_registers;
}

}  // namespace convt3d_host

template <int registers>
inline void give_registers(CONVT3D_HERE) {
  convt3d_host::set_registers<registers>({file, line, "give_registers"});
}
template <int registers>
inline void take_registers(CONVT3D_HERE) {
  convt3d_host::set_registers<registers>({file, line, "take_registers"});
}
