// The host twins of convt3d/ptx/mma.cuh. A fragment operation is a collective of all 32 lanes, so divergence is reported.
#pragma once

#include "convt3d/core/dtypes.cuh"

namespace convt3d_host {

CONVT3D_RUNTIME inline void require_all_lanes(void* const (&slots)[warp_threads], const char* what) {
  for (const void* slot : slots) {
    if (slot != nullptr) continue;
    describe_failure("%s needs all 32 lanes of the warp; one has ended or the block has no such thread", what);
    abandon_block();
  }
}

// ---- ldmatrix ----

struct MatrixSlot {
  unsigned row[4];  // 16 bytes, read by the lane that gives their address
  unsigned fragment[4];
};

CONVT3D_RUNTIME inline void combine_ldmatrix(void* const (&slots)[warp_threads]) {
  require_all_lanes(slots, "ldmatrix");
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      const MatrixSlot* source = static_cast<const MatrixSlot*>(slots[matrix * 8 + lane / 4]);
      static_cast<MatrixSlot*>(slots[lane])->fragment[matrix] = source->row[lane % 4];
    }
  }
}

CONVT3D_RUNTIME inline void combine_ldmatrix_transposed(void* const (&slots)[warp_threads]) {
  require_all_lanes(slots, "ldmatrix");
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    const unsigned column = lane / 4, word = column / 2, shift = column % 2 * 16;
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      unsigned pair = 0;
      for (unsigned e = 0; e < 2; ++e) {
        const MatrixSlot* source = static_cast<const MatrixSlot*>(slots[matrix * 8 + lane % 4 * 2 + e]);
        pair |= (source->row[word] >> shift & 0xffffu) << (16 * e);
      }
      static_cast<MatrixSlot*>(slots[lane])->fragment[matrix] = pair;
    }
  }
}

template <unsigned matrices>
void ldmatrix(unsigned (&fragment)[matrices], const char* row, Site site, Combine combine = combine_ldmatrix) {
  MatrixSlot slot{};
  if (static_cast<unsigned>(lane_of_current()) < 8 * matrices) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
      describe_failure("ldmatrix at %s:%d: the address of a row is no multiple of 16 bytes", site.file, site.line);
      abandon_block();
    }
    memcpy(slot.row, row, sizeof slot.row);
  }
  warp_collective(0xffffffffu, &slot, combine, site);
  for (unsigned r = 0; r < matrices; ++r) fragment[r] = slot.fragment[r];
}

// ---- movmatrix ----

struct PairSlot {
  unsigned pair, transposed;
};

CONVT3D_RUNTIME inline void combine_movmatrix(void* const (&slots)[warp_threads]) {
  require_all_lanes(slots, "movmatrix");
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    const unsigned column = lane / 4;
    unsigned both = 0;
    for (unsigned e = 0; e < 2; ++e) {
      const unsigned row = lane % 4 * 2 + e;
      const unsigned pair = static_cast<const PairSlot*>(slots[row * 4 + column / 2])->pair;
      both |= (pair >> (column % 2 * 16) & 0xffffu) << (16 * e);
    }
    static_cast<PairSlot*>(slots[lane])->transposed = both;
  }
}

inline unsigned movmatrix(unsigned pair, Site site) {
  PairSlot slot{pair, 0};
  warp_collective(0xffffffffu, &slot, combine_movmatrix, site);
  return slot.transposed;
}

// ---- mma ----

// What 16 bits are as a number, by a table: to_accum would be much of a product's time.
template <class T>
struct Values16 {
  float of[65536];
  Values16() {
    for (unsigned bits = 0; bits < 65536; ++bits) of[bits] = to_accum(T{static_cast<unsigned short>(bits)});
  }
};
template <class T>
inline const Values16<T> values16;

struct Tf32Element {
  static constexpr unsigned per_register = 1;
  CONVT3D_RUNTIME __attribute__((always_inline)) static float value(unsigned bits, unsigned) {
    return __uint_as_float(bits & ~0x1fffu);
  }
};

template <class T>
struct NarrowElement {
  static constexpr unsigned per_register = 2;
  CONVT3D_RUNTIME __attribute__((always_inline)) static float value(unsigned bits, unsigned element) {
    return values16<T>.of[bits >> (16 * element) & 0xffffu];
  }
};

struct MmaSlot {
  const unsigned* a;
  const unsigned* b;
  float* c;
};

// fp32 by cutting off, as the tensor cores' adders do.
CONVT3D_RUNTIME __attribute__((always_inline)) inline float cut_off(double exact) {
  unsigned long long bits;
  memcpy(&bits, &exact, sizeof bits);
  bits &= ~0x1fffffffull;  // what a double's significand has beyond that of fp32
  memcpy(&exact, &bits, sizeof bits);
  return static_cast<float>(exact);
}

typedef float Floats4 __attribute__((vector_size(16)));
typedef double Doubles4 __attribute__((vector_size(32)));

// sums[row][column] += a[row][k] * b[k][column], one k after the other, in double: of so many rows, and 4 x `quads` columns.
template <unsigned rows>
CONVT3D_RUNTIME void add_products(Doubles4* sums, const float* a, unsigned depth, const float* b, unsigned quads) {
  for (unsigned quad = 0; quad < quads; ++quad) {
    Doubles4 own[rows];
    for (unsigned row = 0; row < rows; ++row) own[row] = sums[row * quads + quad];
    for (unsigned k = 0; k < depth; ++k) {
      Floats4 narrow;
      memcpy(&narrow, b + (k * quads + quad) * 4, sizeof narrow);
      const Doubles4 columns = __builtin_convertvector(narrow, Doubles4);
      for (unsigned row = 0; row < rows; ++row) own[row] += static_cast<double>(a[row * depth + k]) * columns;
    }
    for (unsigned row = 0; row < rows; ++row) sums[row * quads + quad] = own[row];
  }
}

template <class Element>
CONVT3D_RUNTIME void combine_mma(void* const (&slots)[warp_threads]) {
  require_all_lanes(slots, "mma.sync");
  constexpr unsigned each = Element::per_register, depth = 8 * each;
  float a[16 * depth], b[depth * 8];
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    const MmaSlot* slot = static_cast<const MmaSlot*>(slots[lane]);
    const unsigned g = lane / 4, t = lane % 4;
    for (unsigned e = 0; e < each; ++e) {
      for (unsigned r = 0; r < 4; ++r) {
        a[(g + 8 * (r % 2)) * depth + 4 * each * (r / 2) + each * t + e] = Element::value(slot->a[r], e);
      }
      for (unsigned r = 0; r < 2; ++r) b[(4 * each * r + each * t + e) * 8 + g] = Element::value(slot->b[r], e);
    }
  }
  Doubles4 sums[16][2] = {};
  for (unsigned row = 0; row < 16; row += 2) add_products<2>(sums[row], a + row * depth, depth, b, 2);
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    float* c = static_cast<const MmaSlot*>(slots[lane])->c;
    for (unsigned r = 0; r < 4; ++r) {
      const unsigned column = 2 * (lane % 4) + r % 2;
      c[r] = cut_off(c[r] + sums[lane / 4 + 8 * (r / 2)][column / 4][column % 4]);
    }
  }
}

template <class Element>
void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Site site) {
  const unsigned b[2] = {b0, b1};
  MmaSlot slot{a, b, c};
  warp_collective(0xffffffffu, &slot, combine_mma<Element>, site);
}

}  // namespace convt3d_host

inline void ldmatrix_x4(unsigned (&fragment)[4], unsigned row, CONVT3D_HERE) {
  convt3d_host::ldmatrix(fragment, convt3d_host::state.arena + row, {file, line, "ldmatrix"});
}

inline void ldmatrix_x4_transposed(unsigned (&fragment)[4], unsigned row, CONVT3D_HERE) {
  convt3d_host::ldmatrix(fragment, convt3d_host::state.arena + row, {file, line, "ldmatrix.trans"},
                         convt3d_host::combine_ldmatrix_transposed);
}

inline void ldmatrix_x2(unsigned (&fragment)[2], unsigned row, CONVT3D_HERE) {
  convt3d_host::ldmatrix(fragment, convt3d_host::state.arena + row, {file, line, "ldmatrix"});
}

inline unsigned transposed_matrix(unsigned pair, CONVT3D_HERE) {
  return convt3d_host::movmatrix(pair, {file, line, "movmatrix"});
}

inline void mma_tf32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, CONVT3D_HERE) {
  convt3d_host::mma<convt3d_host::Tf32Element>(c, a, b0, b1, {file, line, "mma.sync"});
}

inline void mma_bf16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, CONVT3D_HERE) {
  convt3d_host::mma<convt3d_host::NarrowElement<bfloat16_t>>(c, a, b0, b1, {file, line, "mma.sync"});
}

inline void mma_fp16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, CONVT3D_HERE) {
  convt3d_host::mma<convt3d_host::NarrowElement<half_t>>(c, a, b0, b1, {file, line, "mma.sync"});
}
