// wgmma on the host. Each thread computes its own fragment of D, and not before it waits for it: a wait that is missing, or an
// operand that was overwritten too early, gives wrong numbers here as it would on a GPU. Descriptors are read bit by bit.
#pragma once

#include "convt3d/host/pipeline.h"

namespace convt3d_host {

struct PendingProduct {
  uint64_t a, b;  // descriptors
  bool m_major, n_major;
  float* d;
  int columns;
  bool accumulate;
  unsigned group;
};

struct ProductQueue {
  unsigned block_serial, committed, count, taken;
  PendingProduct products[256];
};

inline ProductQueue product_queues[max_threads]{};

CONVT3D_RUNTIME inline ProductQueue& product_queue() {
  ProductQueue& queue = product_queues[current - state.threads];
  if (queue.block_serial != state.block_serial) queue = {state.block_serial, 0, 0, 0, {}};
  return queue;
}

#if defined(CONVT3D_FP16)
typedef half_t operand_t;
#elif defined(CONVT3D_BF16)
typedef bfloat16_t operand_t;
#else
typedef float operand_t;
#endif
constexpr int operand_k = 32 / static_cast<int>(sizeof(operand_t));

inline float operand_value(float value) { return __uint_as_float(__float_as_uint(value) & 0xffffe000u); }  // as TF32 is read
template <class T>
inline float operand_value(T value) {
  return to_accum(value);
}

// One row of A, or one column of B, as its descriptor places it; convt3d/wgmma.cuh quotes the rule.
inline void load_operand(uint64_t descriptor, bool mn_major, int row, float (&values)[operand_k]) {
  const size_t start = (descriptor & 0x3fffu) << 4, leading = (descriptor >> 16 & 0x3fffu) << 4,
               stride = (descriptor >> 32 & 0x3fffu) << 4;
  for (int k = 0; k < operand_k; ++k) {
    // A core's cell and the element in it: a row's k, or a k's row.
    const size_t across = static_cast<size_t>(mn_major ? row : k), cell = static_cast<size_t>(mn_major ? k : row) % 8;
    const size_t row_core = static_cast<size_t>(row) / 8, k_core = static_cast<size_t>(k) * sizeof(operand_t) / 16;
    const char* place =
        state.arena + start + row_core * stride + k_core * leading + cell * 16 + across * sizeof(operand_t) % 16;
    values[k] = operand_value(*reinterpret_cast<const operand_t*>(place));
  }
}

inline void multiply(const PendingProduct& product) {
  const int thread = static_cast<int>(current - state.threads) % 128, lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  float a[2][operand_k], b[operand_k];
  load_operand(product.a, product.m_major, row, a[0]);
  load_operand(product.a, product.m_major, row + 8, a[1]);
  for (int tile = 0; tile < product.columns / 8; ++tile) {
    for (int column = 0; column < 2; ++column) {
      load_operand(product.b, product.n_major, tile * 8 + lane % 4 * 2 + column, b);
      for (int half = 0; half < 2; ++half) {
        double sum = product.accumulate ? product.d[tile * 4 + half * 2 + column] : 0.0f;
        for (int k = 0; k < operand_k; ++k) sum += static_cast<double>(a[half][k]) * b[k];
        product.d[tile * 4 + half * 2 + column] = static_cast<float>(sum);
      }
    }
  }
}

CONVT3D_RUNTIME inline void enqueue_product(const PendingProduct& product) {
  ProductQueue& queue = product_queue();
  if (queue.count == sizeof queue.products / sizeof *queue.products) {
    describe_failure("more than %u wgmma without a wait", queue.count);
    abandon_block();
  }
  queue.products[queue.count] = product;
  queue.products[queue.count++].group = queue.committed;
}

// Take the oldest product whose group is older than the latest `pending` from the queue.
CONVT3D_RUNTIME inline bool dequeue_product(unsigned pending, PendingProduct& product) {
  ProductQueue& queue = product_queue();
  if (queue.taken == queue.count || queue.products[queue.taken].group + pending >= queue.committed) {
    for (unsigned i = queue.taken; i < queue.count; ++i) queue.products[i - queue.taken] = queue.products[i];
    queue.count -= queue.taken;
    queue.taken = 0;
    return false;
  }
  product = queue.products[queue.taken++];
  return true;
}

CONVT3D_RUNTIME inline void commit_products() { ++product_queue().committed; }

}  // namespace convt3d_host

inline void wgmma(float* d, unsigned a, unsigned b, unsigned accumulate, int columns) {
  constexpr uint64_t row_step = 128ull >> 4 << 32;
  convt3d_host::enqueue_product({row_step | a, row_step | b, false, false, d, columns, accumulate != 0, 0});
}

template <bool m_major>
inline void wgmma_n_major(float* d, unsigned long long a, unsigned long long b, unsigned accumulate, int columns) {
  convt3d_host::enqueue_product({a, b, m_major, true, d, columns, accumulate != 0, 0});
}

// `.sync.aligned`: the lanes of a warp meet, and one that is elsewhere is reported.
inline void wgmma_fence(CONVT3D_HERE) { convt3d_host::vote(0xffffffffu, true, {file, line, "wgmma_fence"}); }
inline void wgmma_commit() { convt3d_host::commit_products(); }

template <int pending>
inline void wgmma_wait(CONVT3D_HERE) {
  convt3d_host::PendingProduct product;
  while (convt3d_host::dequeue_product(pending, product)) convt3d_host::multiply(product);
  convt3d_host::vote(0xffffffffu, true, {file, line, "wgmma_wait"});  // done for the warp when it is done for each lane
}
