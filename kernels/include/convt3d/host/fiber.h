// A fiber: a stack of its own and a place to go on from. One CUDA thread that waits is one parked fiber.
// The switch is a few instructions on x86-64 and aarch64 (ucontext, used elsewhere, makes two system calls each time).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CONVT3D_ASAN 1
#endif
#if __has_feature(thread_sanitizer)
#define CONVT3D_TSAN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define CONVT3D_ASAN 1
#endif
#if defined(__SANITIZE_THREAD__)
#define CONVT3D_TSAN 1
#endif

// The runtime moves between stacks and reads what others wrote: the sanitizers are to watch the kernel, not it.
#if defined(__clang__)
#define CONVT3D_RUNTIME __attribute__((no_sanitize("address", "thread", "undefined")))
#else
#define CONVT3D_RUNTIME __attribute__((no_sanitize("address,thread,undefined")))
#endif

#if defined(CONVT3D_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(CONVT3D_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

#if !defined(__x86_64__) && !defined(__aarch64__) && !defined(CONVT3D_UCONTEXT)
#define CONVT3D_UCONTEXT 1
#endif
#if defined(CONVT3D_UCONTEXT)
#include <ucontext.h>
#endif

namespace convt3d_host {

#if defined(CONVT3D_ASAN) || defined(CONVT3D_TSAN)
constexpr size_t stack_bytes = 256 * 1024;
#else
constexpr size_t stack_bytes = 64 * 1024;
#endif
constexpr size_t guard_bytes = 64 * 1024;  // a page on every machine; an overflow faults instead of spoiling a neighbour

struct Fiber {
  char* stack;  // lowest usable byte
  size_t bytes;
  void* fake_stack;  // ASan's
  void* tsan;
#if defined(CONVT3D_UCONTEXT)
  ucontext_t context;
#else
  void* stack_pointer;
#endif
};

#if defined(CONVT3D_UCONTEXT)

CONVT3D_RUNTIME inline void machine_switch(Fiber* from, Fiber* to) { swapcontext(&from->context, &to->context); }

CONVT3D_RUNTIME inline void machine_start(Fiber* fiber, void (*entry)()) {
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = fiber->bytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, entry, 0);
}

#else

// void convt3d_switch(void** save, void* load): keep the registers a call preserves, change stacks, return there.
extern "C" __attribute__((visibility("hidden"))) void convt3d_switch(void** save, void* load);

#if defined(__x86_64__)
asm(R"(
.text
.globl convt3d_switch
.hidden convt3d_switch
.type convt3d_switch, @function
convt3d_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size convt3d_switch, .-convt3d_switch
)");
#else
asm(R"(
.text
.globl convt3d_switch
.hidden convt3d_switch
.type convt3d_switch, %function
convt3d_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size convt3d_switch, .-convt3d_switch
)");
#endif

CONVT3D_RUNTIME inline void machine_switch(Fiber* from, Fiber* to) { convt3d_switch(&from->stack_pointer, to->stack_pointer); }

CONVT3D_RUNTIME inline void machine_start(Fiber* fiber, void (*entry)()) {
  uintptr_t* top = reinterpret_cast<uintptr_t*>(fiber->stack + fiber->bytes);
#if defined(__x86_64__)
  top[-2] = reinterpret_cast<uintptr_t>(entry);  // where `ret` goes; the stack is then 8 past a multiple of 16, as in a call
  fiber->stack_pointer = top - 2 - 6;
  for (int slot = 3; slot <= 8; ++slot) top[-slot] = 0;
#else
  for (int slot = 1; slot <= 20; ++slot) top[-slot] = 0;
  top[-20 + 11] = reinterpret_cast<uintptr_t>(entry);  // x30
  fiber->stack_pointer = top - 20;
#endif
}

#endif

CONVT3D_RUNTIME inline char* map_pages(size_t bytes, void* at = nullptr) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  void* pages = mmap(at, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (pages == MAP_FAILED) {
    fputs("convt3d host backend: out of memory for fiber stacks\n", stderr);
    abort();
  }
  return static_cast<char*>(pages);
}

CONVT3D_RUNTIME inline Fiber* new_fiber() {
  Fiber* fiber = static_cast<Fiber*>(calloc(1, sizeof(Fiber)));
  char* pages = map_pages(guard_bytes + stack_bytes);
  mprotect(pages, guard_bytes, PROT_NONE);
  fiber->stack = pages + guard_bytes;
  fiber->bytes = stack_bytes;
  return fiber;
}

CONVT3D_RUNTIME inline void delete_fiber(Fiber* fiber) {
#if defined(CONVT3D_ASAN)
  __asan_unpoison_memory_region(fiber->stack, fiber->bytes);
#endif
  munmap(fiber->stack - guard_bytes, guard_bytes + fiber->bytes);
  free(fiber);
}

// Make `fiber` begin at `entry` on an empty stack, whatever it was doing before.
CONVT3D_RUNTIME inline void start_fiber(Fiber* fiber, void (*entry)()) {
  fiber->fake_stack = nullptr;
#if defined(CONVT3D_ASAN)
  __asan_unpoison_memory_region(fiber->stack, fiber->bytes);
#endif
  machine_start(fiber, entry);
}

// Called first on a fiber's stack after each switch to it; `left` is the fiber that was running before.
CONVT3D_RUNTIME inline void arrive_on_fiber(Fiber* fiber, Fiber* left) {
#if defined(CONVT3D_ASAN)
  const void* bottom;
  size_t bytes;
  __sanitizer_finish_switch_fiber(fiber->fake_stack, &bottom, &bytes);
  left->stack = static_cast<char*>(const_cast<void*>(bottom));  // how the launcher's own stack becomes known
  left->bytes = bytes;
#else
  (void)fiber;
  (void)left;
#endif
}

inline Fiber* running_fiber = nullptr;
inline Fiber* left_fiber = nullptr;

CONVT3D_RUNTIME inline void switch_fiber(Fiber* from, Fiber* to) {
#if defined(CONVT3D_ASAN)
  __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->bytes);
#endif
#if defined(CONVT3D_TSAN)
  __tsan_switch_to_fiber(to->tsan, __tsan_switch_to_fiber_no_sync);
#endif
  left_fiber = from;
  running_fiber = to;
  machine_switch(from, to);
  arrive_on_fiber(from, left_fiber);
}

}  // namespace convt3d_host
