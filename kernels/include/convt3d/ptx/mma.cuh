// Tensor-core products of a warp (ldmatrix, mma.sync): sm_80 and newer.
// On a GPU each function is one PTX instruction; its twin on the host does what the instruction does and checks what it asks.
//
// A fragment is one warp's share of a small matrix, 32-bit registers of all 32 lanes. With g = lane / 4, t = lane % 4, and
// E = 1 (tf32) or 2 (16-bit) elements a register:
//   A (16 x 8E, row-major)   a[r] = A[g + 8*(r % 2)][4E*(r / 2) + E*t ..]
//   B (8E x 8, column-major) b[r] = B[4E*r + E*t ..][g]
//   C (16 x 8, fp32)         c[r] = C[g + 8*(r / 2)][2*t + r % 2]
// ldmatrix reads 8x8 matrices of 16 bits, that is 8 rows of 16 bytes. So a tile kept as rows of 16-byte cells, whatever the
// element, is an A fragment (rows are voxels) or a B fragment (rows are output channels) after one instruction.
// Transposed, for 16-bit elements, lane l gets rows 2*(l % 4) and 2*(l % 4) + 1 of column l / 4 of each matrix: so a tile whose rows
// are the depth, with neighbouring voxels or output channels in a row, becomes fragments too.
#pragma once

#include "convt3d/ptx/shared_memory.cuh"

#if defined(__CUDACC__)

// Four matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void ldmatrix_x4(unsigned (&fragment)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row));
}

// Four matrices, each transposed on the way.
__device__ inline void ldmatrix_x4_transposed(unsigned (&fragment)[4], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row));
}

// Two matrices; the addresses of lanes 0 to 15 count.
__device__ inline void ldmatrix_x2(unsigned (&fragment)[2], unsigned row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(fragment[0]), "=r"(fragment[1]) : "r"(row));
}

// A matrix of 8 x 8 elements of 16 bits, of which lane l has the pair l % 4 of row l / 4, transposed: lane l gets two of column l / 4.
__device__ inline unsigned transposed_matrix(unsigned pair) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
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

#else
#include "convt3d/host/mma.h"
#endif

// By the element type: the product, and how many parts an operand has; in tf32x3 it is the sum of two TF32 numbers.
#if defined(CONVT3D_TF32X3)
constexpr int PARTS = 2;
#else
constexpr int PARTS = 1;
#endif
#if defined(CONVT3D_BF16)
#define CONVT3D_MULTIPLY mma_bf16
#elif defined(CONVT3D_FP16)
#define CONVT3D_MULTIPLY mma_fp16
#else
#define CONVT3D_MULTIPLY mma_tf32
#endif
