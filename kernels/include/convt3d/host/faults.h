// Where a kernel touches pages that it must not: who it was, and at which address. The process ends by the signal all the same.
#pragma once

#include "block.h"

#include <csignal>
#include <unistd.h>
#if defined(__x86_64__) && defined(__linux__)
#include <ucontext.h>
#endif

namespace convt3d_host {

CONVT3D_RUNTIME inline const char* kind_of_access(const void* context) {
#if defined(__x86_64__) && defined(__linux__)
  return (static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0 ? "write" : "read";
#else
  (void)context;
  return "access";
#endif
}

CONVT3D_RUNTIME inline bool has_overflown(const void* address) {
  const char* place = static_cast<const char*>(address);
  return running_fiber != nullptr && running_fiber != &launcher && place < running_fiber->stack &&
         place >= running_fiber->stack - guard_bytes;
}

CONVT3D_RUNTIME inline bool is_beside_shared(const void* address) {
  const char* place = static_cast<const char*>(address);
  return state.arena != nullptr && place >= state.arena - arena_guard && place < state.arena + arena_bytes + arena_guard;
}

CONVT3D_RUNTIME inline void report_fault(int number, siginfo_t* fault, void* context) {
  char text[200];
  const char* what = number == SIGILL                ? "misaligned access"  // the one thing that is compiled to trap
                     : has_overflown(fault->si_addr) ? "stack overflow"
                                                     : kind_of_access(context);
  const int length = snprintf(text, sizeof text, "\nconvt3d fault: %s%s at %p by thread (%u, %u, %u) of block (%u, %u, %u)\n",
                              what, is_beside_shared(fault->si_addr) ? " beside shared memory" : "", fault->si_addr,
                              threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
  if (write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) _exit(1);
  signal(number, SIG_DFL);  // the same access comes again, and ends the process
}

// On a stack of its own: a fiber's may be what has overflown.
CONVT3D_RUNTIME inline void report_faults() {
  static char stack[64 * 1024];
  stack_t place{};
  place.ss_sp = stack;
  place.ss_size = sizeof stack;
  sigaltstack(&place, nullptr);
  struct sigaction action{};
  action.sa_sigaction = report_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
  sigaction(SIGILL, &action, nullptr);
}

}  // namespace convt3d_host
