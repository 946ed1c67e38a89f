// Tensor-core products of a warp (ldmatrix, mma.sync) and copies into shared memory that land later (cp.async): sm_80 and newer.
// On a GPU each function is one PTX instruction; its twin on the host does what the instruction does and checks what it asks.
//
// A fragment is one warp's share of a small matrix, 32-bit registers of all 32 lanes. With g = lane / 4, t = lane % 4, and
// E = 1 (tf32) or 2 (16-bit) elements a register:
//   A (16 x 8E, row-major)   a[r] = A[g + 8*(r % 2)][4E*(r / 2) + E*t ..]
//   B (8E x 8, column-major) b[r] = B[4E*r + E*t ..][g]
//   C (16 x 8, fp32)         c[r] = C[g + 8*(r / 2)][2*t + r % 2]
// ldmatrix reads 8x8 matrices of 16 bits, that is 8 rows of 16 bytes. So a tile kept as rows of 16-byte cells, whatever the
// element, is an A fragment (rows are voxels) or a B fragment (rows are output channels) after one instruction.
#pragma once

#if defined(__CUDACC__)

typedef unsigned shared_address_t;

__device__ inline shared_address_t shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Four matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void ldmatrix_x4(unsigned (&fragment)[4], shared_address_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row));
}

// Two matrices; the addresses of lanes 0 to 15 count.
__device__ inline void ldmatrix_x2(unsigned (&fragment)[2], shared_address_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(fragment[0]), "=r"(fragment[1]) : "r"(row));
}

#define CONVT3D_MMA(name, shape_and_types)                                                                     \
  __device__ inline void name(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {               \
    asm("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                       \
  }

// c += a * b. The tensor cores ignore the low 13 bits of a tf32 operand and cut off, rather than round, what they add.
CONVT3D_MMA(mma_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
CONVT3D_MMA(mma_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
CONVT3D_MMA(mma_fp16, "m16n8k16.row.col.f32.f16.f16.f32")
#undef CONVT3D_MMA

// To the nearest TF32 number, ties away from zero: fp32 bits whose low 13 are zero.
__device__ inline unsigned round_to_tf32(float value) {
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// Copy `bytes` (4, 8 or 16, both addresses multiples of it) to shared memory: `source_bytes` from the source, the rest zeros.
// It has landed for this thread after a wait for its group, for the others after a barrier that follows.
template <int bytes>
__device__ inline void cp_async(shared_address_t target, const void* source, int source_bytes = bytes) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16, "cp.async copies 4, 8 or 16 bytes");
  if (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(source_bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(target), "l"(source), "n"(bytes), "r"(source_bytes)
                 : "memory");
  }
}

// Close the group of this thread's copies since the last commit; an empty group counts too.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most `pending` of this thread's latest groups are under way.
template <int pending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

#else
#include "convt3d/host/mma.h"
#endif
