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

CONVT3D_RUNTIME inline bool is_same_place(Site left, Site right) {
  return left.line == right.line && (left.file == right.file || strcmp(left.file, right.file) == 0);
}

constexpr unsigned max_threads = 1024;
constexpr unsigned warp_threads = 32;
constexpr size_t static_shared_limit = 48 * 1024;
constexpr size_t shared_limit = 227 * 1024;  // an H100 block's; the arena is larger for red zones
constexpr size_t arena_bytes = 512 * 1024;
constexpr size_t red_zone = 128;
constexpr size_t arena_guard = 1 << 20;  // on either side of the arena, of pages without access
constexpr unsigned most_shared = 256;    // variables whose ends are looked at
// TSan knows a thread by its fiber and takes a millisecond to make one, so fibers are kept, in sets: each block runs on one set, and
// blocks of different sets have no order. What it misses is a race whose blocks all fell into one set.
constexpr unsigned tsan_fibers = 256, most_sets = 8;

enum class State : uint8_t { unstarted, running, at_barrier, at_warp, at_mbarrier, at_active_mask, at_packing, exited };

struct Thread {
  Index3 index;
  Fiber* fiber;
  State state;
  bool is_behind;  // the launch before this one has ended, as it knows itself or from who waited for that; see beside_packing.h
  Site site;       // where it waits
  unsigned mask;   // of the warp collective it waits at, or what __activemask found
  void* slot;      // its operands, on its parked stack
  char* sync;      // what TSan releases and acquires at this wait
};

// Operands of the lanes that take part, null for the others.
using Combine = void (*)(void* const (&slots)[warp_threads]);

// A variable in shared memory, from the arena's start.
struct SharedPlace {
  size_t start, end;
  const char* name;
};

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
  unsigned fiber_count, idle_count, fresh;  // made; idle; the next to begin anew
  Site barrier_site;
  unsigned barrier_round;
  unsigned barrier_arrived[2], barrier_votes[2];  // of this round and the next, for __syncthreads_count and its kin
  unsigned lanes_alive[max_threads / warp_threads], lanes_waiting[max_threads / warp_threads];  // of each warp; in a collective
  unsigned set;                                                                                 // of fibers, for this block
  char barrier_sync[most_sets][2];
  char warp_sync[most_sets][max_threads / warp_threads][2];
  unsigned warp_round[max_threads / warp_threads];
  char begin_sync, launch_sync;

  char* arena;
  size_t arena_used, static_used;
  SharedPlace shared[most_shared];
  unsigned shared_count;
  char* dynamic;
  // What a block does that uses more than barriers, where it begins and where it has ended: bulk copies, bulk stores, products; its view.
  void (*at_begin[2])();
  void (*at_end[4])();
  unsigned block_serial;  // counts blocks run, so that what one leaves unfinished is not taken for the next one's
  unsigned generation;    // counts launches, so that shared variables are placed anew in each

  unsigned most_threads, least_blocks;  // __launch_bounds__ of the function; no threads: it has none
  char own_instruction[500];            // of one architecture alone, that was used, and where

  const char *held_begin, *held_end;  // what the launch before this one fills, while that may still run; null: nothing
  uint64_t random;                    // 0: natural order
  // Who is woken goes on at once, so that producers are as far ahead as they can be; drawn for a block with mbarriers. Where in the queue
  // those begin that are woken together.
  bool is_eager;
  unsigned woken_from;
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

// Make a thread ready: when the order is shuffled at a random place of the queue, or of those that are woken with it and go on first.
CONVT3D_RUNTIME inline void wake(unsigned number) {
  state.ready[state.ready_count] = number;
  if (state.random != 0) {
    const unsigned other = state.woken_from + draw(state.ready_count + 1 - state.woken_from);
    const unsigned swapped = state.ready[other];
    state.ready[other] = number;
    state.ready[state.ready_count] = swapped;
  }
  ++state.ready_count;
}

CONVT3D_RUNTIME inline void begin_waking() { state.woken_from = state.is_eager ? state.ready_count : 0; }

// When nothing else can run, the launch before this one ends for all who wait for that.
CONVT3D_RUNTIME __attribute__((noinline, cold)) inline bool end_launch_before() {
  bool any = false;
  begin_waking();
  for (unsigned i = 0; i < state.count; ++i) {
    if (state.threads[i].state != State::at_packing) continue;
    state.threads[i].state = State::running;
    wake(i);
    any = true;
  }
  return any;
}

// When nothing else can run, the lanes of a warp that stand in the same __activemask are the active ones.
CONVT3D_RUNTIME __attribute__((noinline, cold)) inline bool settle_active_mask() {
  unsigned first = 0;
  while (first < state.count && state.threads[first].state != State::at_active_mask) ++first;
  if (first == state.count) return false;
  const unsigned begin = first / warp_threads * warp_threads;
  const Site site = state.threads[first].site;
  unsigned mask = 0;
  begin_waking();
  for (unsigned i = begin; i < begin + warp_threads && i < state.count; ++i) {
    Thread& thread = state.threads[i];
    if (thread.state != State::at_active_mask || !is_same_place(thread.site, site)) continue;
    mask |= 1u << (i - begin);
    thread.state = State::running;
    wake(i);
  }
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    if (mask >> lane & 1u) state.threads[begin + lane].mask = mask;
  }
  return true;
}

CONVT3D_RUNTIME inline void fiber_main();

CONVT3D_RUNTIME inline void make_fibers(unsigned needed) {
  while (state.fiber_count < needed) {
    Fiber* fiber = state.fibers[state.fiber_count++] = new_fiber();
#if defined(CONVT3D_TSAN)
    fiber->tsan = __tsan_create_fiber(0);
#else
    (void)fiber;
#endif
  }
}

// Begin fiber `number` anew, whatever it was doing. A stack that no launch has needed yet costs nothing.
CONVT3D_RUNTIME inline Fiber* fresh_fiber(unsigned number) {
  make_fibers(number + 1);
  start_fiber(state.fibers[number], fiber_main);
  return state.fibers[number];
}

// A fiber for a thread that has not begun: one whose thread has ended, else the next of this block's (TSan) or launch's.
CONVT3D_RUNTIME inline Fiber* next_fiber() {
  return state.idle_count != 0 ? state.idle[--state.idle_count] : fresh_fiber(state.fresh++);
}

// Leave `from` for whatever can run: a woken thread, a thread that has not begun, or the launcher.
CONVT3D_RUNTIME inline void dispatch(Fiber* from) {
  Fiber* to;
  if (!state.failed && state.ready_count == 0 && state.next == state.count && state.live != 0 && !settle_active_mask() &&
      !end_launch_before()) {
    describe_deadlock();
  }
  if (state.failed) {
    to = &launcher;
  } else if (state.ready_count != 0) {
    to = state.threads[state.ready[--state.ready_count]].fiber;
  } else if (state.next < state.count) {
    to = next_fiber();
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

// In a shuffled order others may go on here, as on a GPU they may anywhere: what this thread has just given away they take at once.
CONVT3D_RUNTIME inline void give_way() {
  if (state.random == 0 || draw(2) != 0) return;
  Thread* self = current;
  const bool begins = state.next < state.count && draw(state.ready_count + 1) == 0;
  begin_waking();
  wake(static_cast<unsigned>(self - state.threads));
  if (state.is_eager) {  // the last one of all
    for (unsigned i = state.ready_count - 1; i > 0; --i) state.ready[i] = state.ready[i - 1];
    state.ready[0] = static_cast<unsigned>(self - state.threads);
  }
  if (begins) {
    switch_fiber(self->fiber, next_fiber());
  } else {
    dispatch(self->fiber);
  }
  current = self;
  threadIdx = self->index;
}

CONVT3D_RUNTIME inline void open_barrier(const Thread* last) {
  bool behind = false;  // threads that meet all know what one of them does
  for (unsigned i = 0; state.held_begin != nullptr && i < state.count; ++i) {
    behind = behind || (state.threads[i].state == State::at_barrier && state.threads[i].is_behind);
  }
  begin_waking();
  for (unsigned i = 0; i < state.count; ++i) {
    if (behind && state.threads[i].state == State::at_barrier) state.threads[i].is_behind = true;
    if (&state.threads[i] != last && state.threads[i].state == State::at_barrier) wake(i);
  }
  state.waiting = 0;
  ++state.barrier_round;
  const unsigned slot = state.barrier_round & 1u;  // who voted in it, two rounds ago, has read the result
  state.barrier_arrived[slot] = state.barrier_votes[slot] = 0;
}

CONVT3D_RUNTIME inline void barrier(Site site) {
  Thread* self = current;
  if (state.waiting != 0 && !is_same_place(site, state.barrier_site)) {
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

struct Votes {
  unsigned arrived, votes;
};

// A barrier at which each thread votes.
CONVT3D_RUNTIME inline Votes voting_barrier(bool vote, Site site) {
  const unsigned slot = state.barrier_round & 1u;
  ++state.barrier_arrived[slot];
  state.barrier_votes[slot] += vote;
  barrier(site);
  return {state.barrier_arrived[slot], state.barrier_votes[slot]};
}

// The lanes of the calling thread's warp that are at the same place: all others go on as far as they can before that is told.
CONVT3D_RUNTIME inline unsigned active_mask(Site site) {
  Thread* self = current;
  char orders_nothing;
  self->site = site;
  self->sync = &orders_nothing;
  self->state = State::at_active_mask;
  park();
  return self->mask;
}

[[noreturn]] CONVT3D_RUNTIME inline void stop_block(const char* why, const char* file, int line) {
  const Index3 index = current->index;
  describe_failure("thread (%u, %u, %u): %s at %s:%d", index.x, index.y, index.z, why, file, line);
  abandon_block();
}

// What a function with __launch_bounds__ begins with. A GPU refuses such a launch.
CONVT3D_RUNTIME inline void keep_launch_bounds(unsigned threads, unsigned blocks = 1, unsigned = 1,
                                               const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  state.most_threads = threads;
  state.least_blocks = blocks;
  if (state.count <= threads) return;
  describe_failure("launch bounds: a block has %u threads, and __launch_bounds__ at %s:%d allows %u: a GPU refuses the launch",
                   state.count, file, line, threads);
  abandon_block();
}

CONVT3D_RUNTIME inline void use_own_instruction(Site site) {
  if (state.own_instruction[0] != 0) return;
  snprintf(state.own_instruction, sizeof state.own_instruction, "%s at %s:%d", site.what, site.file, site.line);
}

// A copy from what the launch before fills, by a thread that cannot know that this has ended.
CONVT3D_RUNTIME inline void require_filled(const void* source, size_t bytes, Site site) {
  const char* from = static_cast<const char*>(source);
  if (state.held_begin == nullptr || current->is_behind || from >= state.held_end || from + bytes <= state.held_begin) return;
  const Index3 index = current->index;
  describe_failure(
      "missing wait: thread (%u, %u, %u) copies by %s at %s:%d what the launch before this one fills, and has not waited for "
      "it "
      "(wait_for_packing)",
      index.x, index.y, index.z, site.what, site.file, site.line);
  abandon_block();
}

// Finish the collective of `mask` if every lane in it that still lives has arrived; `last` is not woken, it is running.
CONVT3D_RUNTIME inline bool finish_collective(unsigned warp, unsigned mask, const Thread* last, Combine combine) {
  if (mask == 0xffffffffu && state.lanes_waiting[warp] < state.lanes_alive[warp]) return false;
  void* slots[warp_threads] = {};
  const Thread* first = nullptr;
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    const unsigned number = warp * warp_threads + lane;
    if (!(mask >> lane & 1u) || number >= state.count) continue;
    Thread& thread = state.threads[number];
    if (thread.state == State::exited) continue;
    if (thread.state != State::at_warp) return false;
    if (first == nullptr) first = &thread;
    if (thread.mask != mask || !is_same_place(thread.site, first->site)) {
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
  for (const void* slot : slots) state.lanes_waiting[warp] -= slot != nullptr;
  ++state.warp_round[warp];
  begin_waking();
  bool behind = false;
  for (unsigned lane = 0; state.held_begin != nullptr && lane < warp_threads; ++lane) {
    behind = behind || (slots[lane] != nullptr && state.threads[warp * warp_threads + lane].is_behind);
  }
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    const unsigned number = warp * warp_threads + lane;
    if (slots[lane] != nullptr && behind) state.threads[number].is_behind = true;
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
  ++state.lanes_waiting[warp];
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
  --state.lanes_alive[warp];
  if (state.lanes_waiting[warp] == 0) return;
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

// Whether nothing was written to this part of the arena, which no variable has.
CONVT3D_RUNTIME inline bool is_untouched(size_t begin, size_t end) {
  const char* place = state.arena + begin;
  return begin >= end || (*place == static_cast<char>(0xff) && memcmp(place, place + 1, end - begin - 1) == 0);
}

// Look at the red zones around the variables, and as far behind the last one as all of them reach where a launch ends.
CONVT3D_RUNTIME inline void look_at_red_zones(bool launch_ends) {
#if !defined(CONVT3D_ASAN) && !defined(CONVT3D_TSAN)  // the one looks itself, to the other the runtime's reads would be races
  const size_t behind = state.arena_used + (launch_ends ? state.arena_used : red_zone);
  if (state.failed) return;
  for (unsigned i = 0; i <= state.shared_count; ++i) {
    size_t begin = i == 0 ? 0 : state.shared[i - 1].end;
    const size_t end = i < state.shared_count ? state.shared[i].start : behind < arena_bytes ? behind : arena_bytes;
    if (is_untouched(begin, end)) continue;
    while (state.arena[begin] == static_cast<char>(0xff)) ++begin;
    if (i == 0) {
      describe_failure("out of bounds: shared memory was written %zu bytes before the first variable", end - begin);
    } else {
      const SharedPlace& place = state.shared[i - 1];
      describe_failure("out of bounds: shared memory was written %zu bytes behind the end of %s, which has %zu bytes",
                       begin - place.end, place.name, place.end - place.start);
    }
    return;
  }
#else
  (void)launch_ends;
#endif
}

CONVT3D_RUNTIME inline char* place_shared(size_t bytes, size_t alignment, const char* name) {
  const size_t start = (state.arena_used + red_zone + alignment - 1) / alignment * alignment;
  state.arena_used = start + bytes;
#if defined(CONVT3D_ASAN)
  __asan_unpoison_memory_region(state.arena + start, bytes);
#endif
  volatile char* fresh = state.arena + start;
  for (size_t i = 0; i < bytes; ++i) fresh[i] = static_cast<char>(0xff);
  if (state.shared_count < most_shared) state.shared[state.shared_count++] = {start, start + bytes, name};
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
    site.address = place_shared(bytes, alignment, name);
    site.generation = state.generation;
  }
  return site.address;
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
  state.fresh = state.set * state.count;
  make_fibers(state.fresh + state.count);  // here: for TSan, what makes a fiber comes before all that the fiber does
  launcher.tsan = __tsan_get_current_fiber();
#else
  (void)block_number;
#endif
}

CONVT3D_RUNTIME inline void run_block(uint64_t block_number) {
  ++state.block_serial;
  state.is_eager = false;
  state.woken_from = 0;
  state.live = state.count;
  state.next = state.waiting = state.ready_count = state.barrier_round = 0;
  for (unsigned warp = 0; warp * warp_threads < state.count; ++warp) {
    const unsigned lanes = state.count - warp * warp_threads;
    state.lanes_alive[warp] = lanes < warp_threads ? lanes : warp_threads;
    state.lanes_waiting[warp] = 0;
  }
  for (unsigned slot = 0; slot < 2; ++slot) state.barrier_arrived[slot] = state.barrier_votes[slot] = 0;
  for (unsigned i = 0; i < state.count; ++i) {
    state.threads[i].state = State::unstarted;
    state.threads[i].is_behind = false;
    state.order[i] = i;
  }
  for (unsigned i = state.count; state.random != 0 && i > 1; --i) {
    const unsigned other = draw(i), swapped = state.order[i - 1];
    state.order[i - 1] = state.order[other];
    state.order[other] = swapped;
  }
  poison_arena();
  for (void (*const begin)() : state.at_begin) {
    if (begin != nullptr) begin();
  }
  choose_set(block_number);
  switch_fiber(&launcher, next_fiber());
  for (void (*const look)() : state.at_end) {
    if (look != nullptr) look();
  }
  look_at_red_zones(false);
}

}  // namespace convt3d_host
