// One CUDA block on one CPU thread: its threads run as fibers, one after another, until each waits or ends.
// Barriers and warp collectives compare who waits where, so a divergent barrier or a deadlock is an error with a place.
#pragma once

#include "fiber.h"

#include <cstdarg>
#include <cstring>

namespace convt3d_host {

struct Index3 {
  unsigned x, y, z;
};

struct Site {
  const char* file;
  int line;
  const char* what;
};

constexpr unsigned max_threads = 1024;
constexpr unsigned warp_threads = 32;
constexpr size_t static_shared_limit = 48 * 1024;
constexpr size_t shared_limit = 227 * 1024;  // an H100 block's; the arena is larger for red zones
constexpr size_t arena_bytes = 512 * 1024;
constexpr size_t red_zone = 128;
// TSan knows a thread by its fiber and takes a millisecond to make one, so fibers are kept, in sets: each block runs on one set, and
// blocks of different sets have no order. What it misses is a race whose blocks all fell into one set.
constexpr unsigned tsan_fibers = 256, most_sets = 8;

enum class State : uint8_t { unstarted, running, at_barrier, at_warp, at_mbarrier, exited };

struct Thread {
  Index3 index;
  Fiber* fiber;
  State state;
  Site site;      // where it waits
  unsigned mask;  // of the warp collective it waits at
  void* slot;     // its operands, on its parked stack
  char* sync;     // what TSan releases and acquires at this wait
};

// Operands of the lanes that take part, null for the others.
using Combine = void (*)(void* const (&slots)[warp_threads]);

struct Launch {
  Index3 grid, block;
  size_t dynamic_bytes;
  void (*invoke)(void**);
  void** arguments;

  unsigned count, live, next, waiting;
  Thread threads[max_threads];
  unsigned order[max_threads];
  unsigned ready[max_threads];
  unsigned ready_count;
  Fiber* fibers[max_threads];
  Fiber* idle[max_threads];
  unsigned fiber_count, idle_count;
  Site barrier_site;
  unsigned barrier_round;
  unsigned set;  // of fibers, for this block
  char barrier_sync[most_sets][2];
  char warp_sync[most_sets][max_threads / warp_threads][2];
  unsigned warp_round[max_threads / warp_threads];
  char begin_sync, launch_sync;

  char* arena;
  size_t arena_used, static_used;
  char* dynamic;
  void (*at_end[2])();    // what is looked at when a block has ended, by what it used: bulk copies, bulk stores
  unsigned block_serial;  // counts blocks run, so that what one leaves unfinished is not taken for the next one's
  unsigned generation;    // counts launches, so that shared variables are placed anew in each

  uint64_t random;  // 0: natural order
  bool failed;
  char message[1024];
};

inline Launch state{};
inline Fiber launcher{};
inline Thread* current = nullptr;

}  // namespace convt3d_host

// Plain globals, rewritten whenever another thread goes on (initial-exec thread-locals would not load into Python).
inline convt3d_host::Index3 threadIdx{}, blockIdx{}, blockDim{}, gridDim{};

namespace convt3d_host {

CONVT3D_RUNTIME inline unsigned draw(unsigned below) {
  state.random ^= state.random << 13;
  state.random ^= state.random >> 7;
  state.random ^= state.random << 17;
  return static_cast<unsigned>((state.random >> 32) * below >> 32);
}

CONVT3D_RUNTIME inline void tsan_release(char* address) {
#if defined(CONVT3D_TSAN)
  __tsan_release(address);
#else
  (void)address;
#endif
}

CONVT3D_RUNTIME inline void tsan_acquire(char* address) {
#if defined(CONVT3D_TSAN)
  __tsan_acquire(address);
#else
  (void)address;
#endif
}

// The message names the block always; the callers add threads and places.
CONVT3D_RUNTIME inline void describe_failure(const char* format, ...) {
  if (state.failed) return;
  state.failed = true;
  char text[800];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  snprintf(state.message, sizeof state.message, "block (%u, %u, %u): %s", blockIdx.x, blockIdx.y, blockIdx.z, text);
}

CONVT3D_RUNTIME inline void describe_deadlock() {
  char text[700];
  size_t used = 0;
  unsigned places = 0;
  for (unsigned i = 0; i < state.count && places < 4; ++i) {
    const Thread& thread = state.threads[i];
    if (thread.state < State::at_barrier || thread.state > State::at_mbarrier) continue;
    bool known = false;
    for (unsigned j = 0; j < i && !known; ++j) {
      const Thread& other = state.threads[j];
      known = other.state == thread.state && other.site.line == thread.site.line;
    }
    if (known) continue;
    ++places;
    used += static_cast<size_t>(snprintf(text + used, sizeof text - used, "; thread (%u, %u, %u) waits in %s at %s:%d",
                                         thread.index.x, thread.index.y, thread.index.z, thread.site.what, thread.site.file,
                                         thread.site.line));
    if (used >= sizeof text) break;
  }
  describe_failure("deadlock: no thread can go on%s", text);
}

// Leave `from` for whatever can run: a woken thread, a thread that has not begun, or the launcher.
CONVT3D_RUNTIME inline void dispatch(Fiber* from) {
  Fiber* to;
  if (!state.failed && state.ready_count == 0 && state.next == state.count && state.live != 0) describe_deadlock();
  if (state.failed) {
    to = &launcher;
  } else if (state.ready_count != 0) {
    to = state.threads[state.ready[--state.ready_count]].fiber;
  } else if (state.next < state.count) {
    to = state.idle[--state.idle_count];
  } else {
    to = &launcher;
  }
  if (to != from) switch_fiber(from, to);
}

[[noreturn]] CONVT3D_RUNTIME inline void abandon_block() {
  dispatch(current->fiber);
  abort();  // a failed block is never resumed
}

CONVT3D_RUNTIME inline void park() {
  Thread* self = current;
  tsan_release(self->sync);
  dispatch(self->fiber);
  tsan_acquire(self->sync);
  current = self;
  threadIdx = self->index;
  self->state = State::running;
}

// Make a thread ready, at a random place of the queue when the order is shuffled.
CONVT3D_RUNTIME inline void wake(unsigned number) {
  state.ready[state.ready_count] = number;
  if (state.random != 0) {
    const unsigned other = draw(state.ready_count + 1);
    const unsigned swapped = state.ready[other];
    state.ready[other] = number;
    state.ready[state.ready_count] = swapped;
  }
  ++state.ready_count;
}

CONVT3D_RUNTIME inline void open_barrier(const Thread* last) {
  for (unsigned i = 0; i < state.count; ++i) {
    if (&state.threads[i] != last && state.threads[i].state == State::at_barrier) wake(i);
  }
  state.waiting = 0;
  ++state.barrier_round;
}

CONVT3D_RUNTIME inline void barrier(Site site) {
  Thread* self = current;
  if (state.waiting != 0 && (site.line != state.barrier_site.line || strcmp(site.file, state.barrier_site.file) != 0)) {
    unsigned other = 0;
    while (state.threads[other].state != State::at_barrier) ++other;
    const Index3 index = state.threads[other].index;
    describe_failure(
        "divergent barrier: thread (%u, %u, %u) reached __syncthreads at %s:%d while thread (%u, %u, %u) "
        "waits in __syncthreads at %s:%d",
        self->index.x, self->index.y, self->index.z, site.file, site.line, index.x, index.y, index.z, state.barrier_site.file,
        state.barrier_site.line);
    abandon_block();
  }
  state.barrier_site = self->site = site;
  self->state = State::at_barrier;
  self->sync = &state.barrier_sync[state.set][state.barrier_round & 1u];
  if (++state.waiting == state.live) {
    char* sync = self->sync;
    open_barrier(self);
    tsan_release(sync);
    tsan_acquire(sync);
    self->state = State::running;
  } else {
    park();
  }
}

// Finish the collective of `mask` if every lane in it that still lives has arrived; `last` is not woken, it is running.
CONVT3D_RUNTIME inline bool finish_collective(unsigned warp, unsigned mask, const Thread* last, Combine combine) {
  void* slots[warp_threads] = {};
  const Thread* first = nullptr;
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    const unsigned number = warp * warp_threads + lane;
    if (!(mask >> lane & 1u) || number >= state.count) continue;
    Thread& thread = state.threads[number];
    if (thread.state == State::exited) continue;
    if (thread.state != State::at_warp) return false;
    if (first == nullptr) first = &thread;
    if (thread.mask != mask || thread.site.line != first->site.line || strcmp(thread.site.file, first->site.file) != 0) {
      describe_failure(
          "divergent warp: thread (%u, %u, %u) is in %s (mask %08x) at %s:%d while thread (%u, %u, %u) is in %s "
          "(mask %08x) at %s:%d",
          thread.index.x, thread.index.y, thread.index.z, thread.site.what, thread.mask, thread.site.file, thread.site.line,
          first->index.x, first->index.y, first->index.z, first->site.what, first->mask, first->site.file, first->site.line);
      abandon_block();
    }
    slots[lane] = thread.slot;
  }
  combine(slots);
  ++state.warp_round[warp];
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    const unsigned number = warp * warp_threads + lane;
    if (slots[lane] != nullptr && &state.threads[number] != last) {
      state.threads[number].state = State::running;
      wake(number);
    }
  }
  return true;
}

inline Combine pending_combine[max_threads / warp_threads][warp_threads];

// Every lane brings a slot; the last one to arrive runs `combine` over all of them.
CONVT3D_RUNTIME inline void warp_collective(unsigned mask, void* slot, Combine combine, Site site) {
  Thread* self = current;
  const unsigned number = static_cast<unsigned>(self - state.threads), warp = number / warp_threads;
  if (!(mask >> (number % warp_threads) & 1u)) {
    describe_failure("thread (%u, %u, %u) calls %s with mask %08x, which leaves itself out, at %s:%d", self->index.x,
                     self->index.y, self->index.z, site.what, mask, site.file, site.line);
    abandon_block();
  }
  self->site = site;
  self->mask = mask;
  self->slot = slot;
  self->sync = &state.warp_sync[state.set][warp][state.warp_round[warp] & 1u];
  self->state = State::at_warp;
  pending_combine[warp][number % warp_threads] = combine;
  if (finish_collective(warp, mask, self, combine)) {
    tsan_release(self->sync);
    tsan_acquire(self->sync);
    self->state = State::running;
  } else {
    park();
  }
}

// A thread that ends no longer holds up the others (since Volta barriers wait for the threads that have not exited).
CONVT3D_RUNTIME inline void finish_thread(Thread* thread) {
  thread->state = State::exited;
  --state.live;
  tsan_release(&state.launch_sync);
  if (state.waiting != 0 && state.waiting == state.live) open_barrier(nullptr);
  const unsigned number = static_cast<unsigned>(thread - state.threads), warp = number / warp_threads;
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    const unsigned other = warp * warp_threads + lane;
    if (other >= state.count) break;
    const Thread& waiting = state.threads[other];
    if (waiting.state == State::at_warp && (waiting.mask >> (number % warp_threads) & 1u)) {
      finish_collective(warp, waiting.mask, nullptr, pending_combine[warp][lane]);
    }
  }
}

CONVT3D_RUNTIME inline void fiber_main() {
  Fiber* self = running_fiber;
  arrive_on_fiber(self, left_fiber);
  for (;;) {
    while (!state.failed && state.next < state.count) {
      Thread* thread = &state.threads[state.order[state.next++]];
      thread->fiber = self;
      thread->state = State::running;
      current = thread;
      threadIdx = thread->index;
      tsan_acquire(&state.begin_sync);
      state.invoke(state.arguments);
      finish_thread(thread);
#if defined(CONVT3D_TSAN)
      break;  // TSan knows a thread by its fiber: each CUDA thread needs one of its own
#endif
    }
#if !defined(CONVT3D_TSAN)
    state.idle[state.idle_count++] = self;
#endif
    dispatch(self);
  }
}

CONVT3D_RUNTIME inline void poison_arena() {
#if defined(CONVT3D_TSAN)
  map_pages(arena_bytes, state.arena);  // what the last block did to this memory is no race with what this one does
#endif
  volatile uint64_t* words = reinterpret_cast<volatile uint64_t*>(state.arena);
  for (size_t i = 0; i < (state.arena_used + 7) / 8; ++i) words[i] = ~uint64_t{0};  // NaN in every float type
}

CONVT3D_RUNTIME inline char* place_shared(size_t bytes, size_t alignment) {
  const size_t start = (state.arena_used + red_zone + alignment - 1) / alignment * alignment;
  state.arena_used = start + bytes;
#if defined(CONVT3D_ASAN)
  __asan_unpoison_memory_region(state.arena + start, bytes);
#endif
  volatile char* fresh = state.arena + start;
  for (size_t i = 0; i < bytes; ++i) fresh[i] = static_cast<char>(0xff);
  return state.arena + start;
}

// One `__shared__` declaration; it gets its place when a thread first reaches it in a launch.
struct SharedSite {
  unsigned generation;
  char* address;
};

CONVT3D_RUNTIME inline void* shared_variable(SharedSite& site, size_t bytes, size_t alignment, const char* name, int line) {
  if (site.generation != state.generation) {
    state.static_used += bytes;
    if (state.static_used > static_shared_limit || state.static_used + state.dynamic_bytes > shared_limit) {
      describe_failure(
          "__shared__ %s at line %d: %zu bytes of static and %zu of dynamic shared memory, the limits are %zu static "
          "and %zu in all",
          name, line, state.static_used, state.dynamic_bytes, static_shared_limit, shared_limit);
      abandon_block();
    }
    site.address = place_shared(bytes, alignment);
    site.generation = state.generation;
  }
  return site.address;
}

CONVT3D_RUNTIME inline void prepare_fibers(unsigned first, unsigned needed) {
  while (state.fiber_count < first + needed) {
    Fiber* fiber = state.fibers[state.fiber_count++] = new_fiber();
#if defined(CONVT3D_TSAN)
    fiber->tsan = __tsan_create_fiber(0);
#else
    (void)fiber;
#endif
  }
  state.idle_count = 0;
  for (unsigned i = first + needed; i-- > first;) {
    start_fiber(state.fibers[i], fiber_main);
    state.idle[state.idle_count++] = state.fibers[i];
  }
}

// Between launches: give back the stacks, two mappings each of the 65530 that Linux lets a process have. The next launch makes new ones.
CONVT3D_RUNTIME inline void release_fibers() {
  while (state.fiber_count > 0) {
    Fiber* fiber = state.fibers[--state.fiber_count];
#if defined(CONVT3D_TSAN)
    __tsan_destroy_fiber(fiber->tsan);
#endif
    delete_fiber(fiber);
  }
}

// Which set of fibers a block gets: any, but the next block another one.
CONVT3D_RUNTIME inline void choose_set(uint64_t block_number) {
#if defined(CONVT3D_TSAN)
  const unsigned fitting = tsan_fibers / state.count, sets = fitting < 2 ? 2 : fitting < most_sets ? fitting : most_sets;
  const unsigned shift = 1 + static_cast<unsigned>((block_number * 0x9e3779b97f4a7c15ull) >> 40) % (sets - 1);
  state.set = (state.set + shift) % sets;
  prepare_fibers(state.set * state.count, state.count);
  launcher.tsan = __tsan_get_current_fiber();
#else
  (void)block_number;
#endif
}

CONVT3D_RUNTIME inline void run_block(uint64_t block_number) {
  ++state.block_serial;
  state.live = state.count;
  state.next = state.waiting = state.ready_count = state.barrier_round = 0;
  for (unsigned i = 0; i < state.count; ++i) {
    state.threads[i].state = State::unstarted;
    state.order[i] = i;
  }
  for (unsigned i = state.count; state.random != 0 && i > 1; --i) {
    const unsigned other = draw(i), swapped = state.order[i - 1];
    state.order[i - 1] = state.order[other];
    state.order[other] = swapped;
  }
  poison_arena();
  choose_set(block_number);
  switch_fiber(&launcher, state.idle[--state.idle_count]);
  for (void (*const look)() : state.at_end) {
    if (look != nullptr) look();
  }
}

}  // namespace convt3d_host
