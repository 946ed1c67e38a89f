// Keeping a loop's constants out of registers.
#pragma once

// Read memory anew from here on: the compiler would keep what it has read from shared memory in registers throughout a loop, and spill it.
__device__ __forceinline__ void forget_memory() { asm volatile("" ::: "memory"); }
