// wgmma on the host. Each thread computes its own fragment of D, and not before it waits for it: a wait that is missing, or an
// operand that was overwritten too early, gives wrong numbers here as it would on a GPU. Descriptors are read bit by bit.
#pragma once

#include "convt3d/host/mma.h"
#include "convt3d/host/pipeline.h"

namespace convt3d_host {

#if defined(CONVT3D_FP16)
typedef half_t operand_t;
#elif defined(CONVT3D_BF16)
typedef bfloat16_t operand_t;
#else
typedef float operand_t;
#endif
constexpr int operand_k = 32 / static_cast<int>(sizeof(operand_t));

// What an element is read as: TF32 without its low bits, 16 bits by a table, for to_accum is much of a product's time.
struct OperandValues {
  float of[sizeof(operand_t) == 2 ? 65536 : 1];
  OperandValues() {
    operand_t element{};
    for (unsigned bits = 0; sizeof element == 2 && bits < 65536; ++bits) {
      memcpy(&element, &bits, sizeof element);
      of[bits] = to_accum(element);
    }
  }
};
inline const OperandValues operand_values;

__forceinline__ float operand_value(const operand_t& element) {
  unsigned bits = 0;
  memcpy(&bits, &element, sizeof element);
  if (sizeof(operand_t) == 2) return operand_values.of[bits];
  bits &= 0xffffe000u;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

struct PendingProduct {
  unsigned a, b;
  float* d;
  int columns;
  bool accumulate;
  unsigned group, row_step;
  // A in registers: where this thread has its own, what they held, and the thread's rows put together from its neighbours'.
  const unsigned* registers;
  unsigned held[4];
  operand_t rows[2][operand_k];
  Site site;
};

struct ProductQueue {
  unsigned block_serial, committed, count;
  PendingProduct products[256];
};

inline ProductQueue product_queues[max_threads]{};

CONVT3D_RUNTIME inline ProductQueue& product_queue() {
  ProductQueue& queue = product_queues[current - state.threads];
  if (queue.block_serial != state.block_serial) {
    queue.block_serial = state.block_serial;
    queue.committed = queue.count = 0;
  }
  return queue;
}

// One row of A, or one column of B, as its descriptor places it.
inline void load_operand(unsigned descriptor, size_t row_step, int row, float (&values)[operand_k]) {
  const size_t start = (descriptor & 0x3fffu) << 4, k_step = (descriptor >> 16 & 0x3fffu) << 4;
  constexpr int cell = 16 / static_cast<int>(sizeof(operand_t));
  const char* place = state.arena + start + static_cast<size_t>(row / 8) * row_step + static_cast<size_t>(row % 8) * 16;
  for (int k = 0; k < operand_k; k += cell, place += k_step) {
    operand_t elements[cell];
    memcpy(elements, place, sizeof elements);
    for (int i = 0; i < cell; ++i) values[k + i] = operand_value(elements[i]);
  }
}

typedef double Pair __attribute__((vector_size(16)));  // of two rows

inline void multiply(const PendingProduct& product) {
  const int thread = static_cast<int>(current - state.threads) % 128, lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  float a[2][operand_k], b[2][operand_k];
  if (product.registers == nullptr) {
    load_operand(product.a, product.row_step, row, a[0]);
    load_operand(product.a, product.row_step, row + 8, a[1]);
  } else {
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < operand_k; ++k) a[half][k] = operand_value(product.rows[half][k]);
    }
    if (memcmp(product.registers, product.held, sizeof product.held) != 0) {
      describe_failure("registers that a product at %s:%d reads were changed before it ended", product.site.file,
                       product.site.line);
      abandon_block();
    }
  }
  Pair rows[operand_k];
  for (int k = 0; k < operand_k; ++k) rows[k] = Pair{a[0][k], a[1][k]};
  for (int tile = 0; tile < product.columns / 8; ++tile) {
    float* d = product.d + tile * 4;
    load_operand(product.b, 128, tile * 8 + lane % 4 * 2, b[0]);
    load_operand(product.b, 128, tile * 8 + lane % 4 * 2 + 1, b[1]);
    Pair left{}, right{};
    if (product.accumulate) left = Pair{d[0], d[2]}, right = Pair{d[1], d[3]};
    for (int k = 0; k < operand_k; ++k) {
      left += rows[k] * static_cast<double>(b[0][k]);
      right += rows[k] * static_cast<double>(b[1][k]);
    }
    for (int half = 0; half < 2; ++half) {
      d[half * 2] = cut_off(left[half]);
      d[half * 2 + 1] = cut_off(right[half]);
    }
  }
}

// A product may begin at once, so the bulk copies that write its operand must have been waited for.
CONVT3D_RUNTIME inline void require_landed(unsigned descriptor, size_t row_step, int rows, Site site) {
  const size_t start = (descriptor & 0x3fffu) << 4, k_step = (descriptor >> 16 & 0x3fffu) << 4,
               bytes = static_cast<size_t>(rows / 8 - 1) * row_step + 128;
  for (unsigned i = 0; copy_queue.block_serial == state.block_serial && i < copy_queue.count; ++i) {
    const PendingCopy& copy = copy_queue.copies[i];
    const size_t begin = static_cast<size_t>(static_cast<char*>(copy.target) - state.arena), end = begin + copy.bytes;
    for (const size_t cells : {start, start + k_step}) {
      if (cells >= end || cells + bytes <= begin) continue;
      describe_failure("wgmma at %s:%d reads shared memory that a bulk copy writes, which nobody has waited for", site.file,
                       site.line);
      abandon_block();
    }
  }
}

// Take a place in the queue.
CONVT3D_RUNTIME inline PendingProduct& queue_product(float* d, unsigned a, unsigned b, bool accumulate, int columns,
                                                     unsigned row_step, Site site) {
  ProductQueue& queue = product_queue();
  require_landed(b, 128, columns, site);
  if (queue.count == sizeof queue.products / sizeof *queue.products) {
    describe_failure("more than %u wgmma without a wait", queue.count);
    abandon_block();
  }
  PendingProduct& product = queue.products[queue.count++];
  product = {a, b, d, columns, accumulate, queue.committed, row_step, nullptr, {}, {}, site};
  return product;
}

// The rows of A that a lane computes sums of, from the fragments of the four lanes that hold them.
CONVT3D_RUNTIME inline void combine_rows(void* const (&slots)[warp_threads]) {
  constexpr int each = 4 / static_cast<int>(sizeof(operand_t));
  for (const void* slot : slots) {
    if (slot != nullptr) continue;
    describe_failure("wgmma needs all 32 lanes of the warp; one has ended");
    abandon_block();
  }
  for (unsigned lane = 0; lane < warp_threads; ++lane) {
    PendingProduct* own = static_cast<PendingProduct*>(slots[lane]);
    for (int from = 0; from < 4; ++from) {
      const PendingProduct* other = static_cast<const PendingProduct*>(slots[lane / 4 * 4 + static_cast<unsigned>(from)]);
      operand_t elements[4][each];
      memcpy(elements, other->held, sizeof elements);
      for (int r = 0; r < 4; ++r) {
        for (int e = 0; e < each; ++e) own->rows[r % 2][(r / 2 * 4 + from) * each + e] = elements[r][e];
      }
    }
  }
}

}  // namespace convt3d_host

CONVT3D_RUNTIME inline void wgmma_rows(float* d, unsigned a, unsigned row_step, unsigned b, unsigned accumulate, int columns,
                                       CONVT3D_HERE) {
  const convt3d_host::Site site = {file, line, "wgmma"};
  convt3d_host::require_landed(a, row_step, 64, site);
  convt3d_host::queue_product(d, a, b, accumulate != 0, columns, row_step, site);
}

CONVT3D_RUNTIME inline void wgmma(float* d, unsigned a, unsigned b, unsigned accumulate, int columns, CONVT3D_HERE) {
  wgmma_rows(d, a, 128, b, accumulate, columns, file, line);
}

CONVT3D_RUNTIME inline void wgmma_registers(float* d, const unsigned (&a)[4], unsigned b, unsigned accumulate, int columns,
                                            CONVT3D_HERE) {
  using namespace convt3d_host;
  PendingProduct& product = queue_product(d, 0, b, accumulate != 0, columns, 128, {file, line, "wgmma_registers"});
  product.registers = a;
  memcpy(product.held, a, sizeof product.held);
  warp_collective(0xffffffffu, &product, combine_rows, product.site);
}

// `.sync.aligned`: the lanes of a warp meet, and one that is elsewhere is reported.
inline void wgmma_fence(CONVT3D_HERE) { convt3d_host::vote(0xffffffffu, true, {file, line, "wgmma_fence"}); }
CONVT3D_RUNTIME inline void wgmma_commit() { ++convt3d_host::product_queue().committed; }

template <int pending>
CONVT3D_RUNTIME inline void wgmma_wait(CONVT3D_HERE) {
  convt3d_host::ProductQueue& queue = convt3d_host::product_queue();
  unsigned done = 0;
  while (done < queue.count && queue.products[done].group + pending < queue.committed) {
    convt3d_host::multiply(queue.products[done++]);
  }
  for (unsigned i = done; i < queue.count; ++i) queue.products[i - done] = queue.products[i];
  queue.count -= done;
  convt3d_host::vote(0xffffffffu, true, {file, line, "wgmma_wait"});  // done for the warp when it is done for each lane
}
