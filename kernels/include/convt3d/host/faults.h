// Where a kernel touches pages that it must not, or indexes past the end of an array: who it was, and where. The process ends by a signal
// all the same.
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

// Say `what` with `place` and thread, and leave the signal to end the process.
CONVT3D_RUNTIME inline void say_fault(int number, const char* what, const char* place) {
  char text[1000];
  const int length = snprintf(text, sizeof text, "\nconvt3d fault: %s%s by thread (%u, %u, %u) of block (%u, %u, %u)\n", what,
                              place, threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
  if (length < 0 || write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) _exit(1);
  signal(number, SIG_DFL);  // the same access comes again, and ends the process
}

CONVT3D_RUNTIME inline void report_fault(int number, siginfo_t* fault, void* context) {
  char place[64];
  snprintf(place, sizeof place, "%s at %p", is_beside_shared(fault->si_addr) ? " beside shared memory" : "", fault->si_addr);
  say_fault(number, has_overflown(fault->si_addr) ? "stack overflow" : kind_of_access(context), place);
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
}

#if defined(CONVT3D_OWN_REPORTS)
// What -fsanitize=alignment,bounds hands to its reports, as the compilers lay it out (compiler-rt's ubsan_value.h and ubsan_handlers.h).
struct ReportedType {
  unsigned short kind, info;  // of an integer: whether it is signed, and twice the logarithm of its bits
  char name[1];               // in quotes
};

struct Report {
  const char* file;
  unsigned line, column;
  const ReportedType* type;   // of the array, or of what is misaligned
  const ReportedType* index;  // of an array's index
};

[[noreturn]] CONVT3D_RUNTIME inline void end_by_report(const char* what, const char* place) {
  say_fault(SIGILL, what, place);
  __builtin_trap();
}
#endif

}  // namespace convt3d_host

#if defined(CONVT3D_OWN_REPORTS)
#define CONVT3D_REPORT(name) extern "C" [[noreturn]] __attribute__((used, cold)) CONVT3D_RUNTIME inline void name

CONVT3D_REPORT(__ubsan_handle_out_of_bounds_abort)(void* data, void* value) {
  const auto& report = *static_cast<const convt3d_host::Report*>(data);
  const unsigned unused = 64 - (1u << (report.index->info >> 1));
  const int64_t index = static_cast<int64_t>(reinterpret_cast<uint64_t>(value) << unused) >> unused;
  char place[800];
  snprintf(place, sizeof place, " %lld of %.300s at %.400s:%u", static_cast<long long>(index), report.type->name, report.file,
           report.line);
  convt3d_host::end_by_report("index", place);
}

CONVT3D_REPORT(__ubsan_handle_type_mismatch_v1_abort)(void* data, void* address) {
  const auto& report = *static_cast<const convt3d_host::Report*>(data);
  char place[500];
  snprintf(place, sizeof place, " at %p at %.400s:%u", address, report.file, report.line);
  convt3d_host::end_by_report("misaligned access", place);
}
#endif
