// wgmma on the host. Each thread computes its own fragment of D, and not before it waits for it: a wait that is missing, or an
// operand that was overwritten too early, gives wrong numbers here as it would on a GPU. Descriptors are read bit by bit.
// Registers of products in flight are poison, and what is written to registers reaches wgmma by a `wgmma_fence` alone.
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

// What an element is read as: TF32 without its low bits.
__forceinline__ float operand_value(const operand_t& element) {
  if constexpr (sizeof(operand_t) == 2) {
    unsigned short bits;
    memcpy(&bits, &element, sizeof bits);
    return values16<operand_t>.of[bits];
  } else {
    return Tf32Element::value(same_bits<unsigned>(element), 0);
  }
}

// Registers of a thread that products use, as wgmma has them: what they held at the thread's last fence, and while products are in flight
// the sums so far.
struct Registers {
  unsigned* place;
  unsigned count, in_flight;
  unsigned seen[128];
};

struct PendingProduct {
  unsigned a, b;
  unsigned sums;  // a number among the thread's registers
  int columns;
  bool accumulate;
  unsigned group, row_step;
  // A in registers: where this thread has its own, what they held, and the thread's rows put together from its neighbours'.
  const unsigned* registers;
  unsigned held[4], fragment;
  operand_t rows[2][operand_k];
  Digest digest;  // of what it reads of shared memory; a warpgroup's first thread has it
  Site site;
};

struct ProductQueue {
  unsigned block_serial, committed, count, finished;
  PendingProduct products[256];
  bool is_fenced;  // at all
  Registers* registers;
  unsigned used, capacity;
};

inline ProductQueue product_queues[max_threads]{};

// Whose sums never came may have been read all the same.
CONVT3D_RUNTIME inline void require_no_products() {
  for (unsigned i = 0; i < state.count; ++i) {
    const ProductQueue& queue = product_queues[i];
    if (queue.block_serial != state.block_serial || queue.count == 0) continue;
    const Index3 index = state.threads[i].index;
    const Site site = queue.products[0].site;
    describe_failure(
        "missing wait: thread (%u, %u, %u) ended with %u products in flight, the first of %s at %s:%d (wgmma_wait)", index.x,
        index.y, index.z, queue.count, site.what, site.file, site.line);
    return;
  }
}

CONVT3D_RUNTIME inline ProductQueue& product_queue() {
  ProductQueue& queue = product_queues[current - state.threads];
  if (queue.block_serial != state.block_serial) {
    queue.block_serial = state.block_serial;
    queue.committed = queue.count = queue.finished = queue.used = 0;
    queue.is_fenced = false;
    state.at_end[2] = require_no_products;
  }
  return queue;
}

[[noreturn]] CONVT3D_RUNTIME inline void refuse_product(const char* kind, Site site, const char* why) {
  describe_failure("%s: %s at %s:%d %s", kind, site.what, site.file, site.line, why);
  abandon_block();
}

// Whether registers hold what wgmma has of them. Not by memcmp: they may be of a function that has returned.
CONVT3D_RUNTIME inline bool holds_what_is_seen(const Registers& registers) {
  const volatile unsigned* place = registers.place;
  for (unsigned i = 0; i < registers.count; ++i) {
    if (place[i] != registers.seen[i]) return false;
  }
  return true;
}

CONVT3D_RUNTIME inline void see(Registers& registers) {
  const volatile unsigned* place = registers.place;
  for (unsigned i = 0; i < registers.count; ++i) registers.seen[i] = place[i];
}

// The number of these registers, for a product that uses them now. What is written to them before they are first used any fence makes
// seen, for it is not known yet that they are a product's; later a fence does that comes behind.
CONVT3D_RUNTIME inline unsigned use_registers(ProductQueue& queue, const void* at, unsigned count, Site site) {
  unsigned* const place = static_cast<unsigned*>(const_cast<void*>(at));
  unsigned number = queue.used;
  bool known = false;
  for (unsigned i = 0; i < queue.used && !known; ++i) {
    Registers& other = queue.registers[i];
    known = other.place == place && other.count == count;
    if (!known && (other.place >= place + count || place >= other.place + other.count)) continue;
    if (!known && other.in_flight != 0) refuse_product("product in flight", site, "uses registers of another product");
    if (!known) other.count = 0;
    number = i;
  }
  if (number == queue.capacity) {
    queue.capacity = 2 * queue.capacity + 8;
    queue.registers = static_cast<Registers*>(realloc(queue.registers, queue.capacity * sizeof(Registers)));
  }
  if (number == queue.used) ++queue.used;
  Registers& registers = queue.registers[number];
  if (!known) {
    registers.place = place;
    registers.count = count;
    registers.in_flight = 0;
    see(registers);
  }
  if (registers.in_flight++ == 0 && (!queue.is_fenced || !holds_what_is_seen(registers))) {
    refuse_product("missing fence", site, "uses registers that were written with no wgmma_fence behind");
  }
  return number;
}

CONVT3D_RUNTIME inline void fence_registers() {
  ProductQueue& queue = product_queue();
  queue.is_fenced = true;
  for (unsigned i = 0; i < queue.used; ++i) {
    if (queue.registers[i].in_flight == 0) see(queue.registers[i]);
  }
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

// Where an operand's cores lie: `rows` / 8 of them, `row_step` apart, and so many again for the second half of K.
template <class Action>
CONVT3D_RUNTIME void for_cores(unsigned descriptor, size_t row_step, int rows, Action action) {
  const size_t start = (descriptor & 0x3fffu) << 4, k_step = (descriptor >> 16 & 0x3fffu) << 4;
  const int together = row_step == 128 ? rows / 8 : 1;
  for (size_t half = 0; half < 2; ++half) {
    for (int core = 0; core < rows / 8; core += together) {
      const size_t at = start + half * k_step + static_cast<size_t>(core) * row_step,
                   bytes = static_cast<size_t>(together) * 128;
      if (at + bytes <= arena_bytes) action(state.arena + at, bytes);
    }
  }
}

template <class Action>
CONVT3D_RUNTIME void for_operands(const PendingProduct& product, Action action) {
  if (product.registers == nullptr) for_cores(product.a, product.row_step, 64, action);
  for_cores(product.b, 128, product.columns, action);
}

CONVT3D_RUNTIME inline Digest digest_of(const PendingProduct& product) {
  Digest digest{};
  for_operands(product, [&](const char* place, size_t bytes) { digest.add(place, bytes); });
  return digest;
}

// Where the sums belong when this was the last product in flight that makes them.
CONVT3D_RUNTIME inline float* end_product(const PendingProduct& product) {
  ProductQueue& queue = product_queue();
  if (product.registers != nullptr) --queue.registers[product.fragment].in_flight;
  Registers& registers = queue.registers[product.sums];
  return --registers.in_flight == 0 ? reinterpret_cast<float*>(registers.place) : nullptr;
}

// How many columns a lane has, a quarter of a product's, in whole vectors.
CONVT3D_RUNTIME inline int padded_width(const PendingProduct& product) { return (product.columns / 4 + 3) / 4 * 4; }

// A lane's rows of A times its columns of B, added to its sums: of every eight columns two, first of the upper row, then of the lower.
CONVT3D_RUNTIME inline void add_to_sums(unsigned* seen, const PendingProduct& product, const float* a, const float* b) {
  const unsigned width = static_cast<unsigned>(product.columns) / 4, quads = static_cast<unsigned>(padded_width(product)) / 4;
  Doubles4 wide[2 * 16];
  double* const sums = reinterpret_cast<double*>(wide);
  for (unsigned half = 0; half < 2; ++half) {
    double* const own = sums + half * quads * 4;
    for (unsigned i = 0; i < quads * 4; ++i) {
      own[i] = product.accumulate && i < width ? __uint_as_float(seen[i / 2 * 4 + half * 2 + i % 2]) : 0.0f;
    }
  }
  add_products<2>(wide, a, operand_k, b, quads);
  for (unsigned half = 0; half < 2; ++half) {
    const double* const own = sums + half * quads * 4;
    for (unsigned i = 0; i < width; ++i) seen[i / 2 * 4 + half * 2 + i % 2] = __float_as_uint(cut_off(own[i]));
  }
}

// Columns of B as the first lane of a warp found them that came to wait for a product: the others are to wait for it at the same time.
// Of every eight columns two are a lane's; those of one kind of lanes lie together, filled up to vectors.
struct OperandColumns {
  unsigned block_serial, number, descriptor;
  int columns;
  float values[operand_k * 256];
};
inline OperandColumns* operand_columns[max_threads / warp_threads][sizeof(ProductQueue::products) / sizeof(PendingProduct)];

// The lanes share these, so only reading the operand is for the sanitizers to see.
CONVT3D_RUNTIME inline const float* columns_of(const PendingProduct& product, unsigned warp, unsigned number) {
  OperandColumns*& kept = operand_columns[warp][number % (sizeof operand_columns[0] / sizeof kept)];
  if (kept == nullptr) kept = static_cast<OperandColumns*>(calloc(1, sizeof *kept));
  OperandColumns& own = *kept;
  if (own.block_serial == state.block_serial && own.number == number && own.descriptor == product.b &&
      own.columns == product.columns) {
    return own.values;
  }
  own.block_serial = state.block_serial, own.number = number, own.descriptor = product.b, own.columns = product.columns;
  const int width = padded_width(product);
  for (int column = 0; column < product.columns; ++column) {
    float values[operand_k];
    load_operand(product.b, 128, column, values);
    for (int k = 0; k < operand_k; ++k) {
      own.values[(column % 8 / 2 * operand_k + k) * width + column / 8 * 2 + column % 2] = values[k];
    }
  }
  return own.values;
}

// The sums with this product's; where it was the last in flight that makes them, they go to where they belong. Queues are of one block
// after another, which the thread sanitizer sees no order between.
CONVT3D_RUNTIME inline void take_product(const PendingProduct& product, unsigned warp, int lane, const float* a) {
  ProductQueue& queue = product_queue();
  const float* const b = columns_of(product, warp, queue.finished++);
  unsigned* const seen = queue.registers[product.sums].seen;
  add_to_sums(seen, product, a, b + lane % 4 * operand_k * padded_width(product));
  float* const d = end_product(product);
  if (d == nullptr) return;
  for (int i = 0; i < product.columns / 2; ++i) {
    if (__float_as_uint(d[i]) != ~0u) {
      refuse_product("product in flight", product.site, "has sums that were touched before they had been waited for");
    }
    memcpy(&d[i], &seen[i], sizeof d[i]);
  }
}

inline void multiply(const PendingProduct& product) {
  const unsigned number = static_cast<unsigned>(current - state.threads);
  const int thread = static_cast<int>(number % 128), lane = thread % 32;
  const int row = thread / 32 * 16 + lane / 4;
  float a[2][operand_k];
  if (product.registers == nullptr) {
    load_operand(product.a, product.row_step, row, a[0]);
    load_operand(product.a, product.row_step, row + 8, a[1]);
  } else {
    for (int half = 0; half < 2; ++half) {
      for (int k = 0; k < operand_k; ++k) a[half][k] = operand_value(product.rows[half][k]);
    }
    if (memcmp(product.registers, product.held, sizeof product.held) != 0) {
      describe_failure("product in flight: registers that a product at %s:%d reads were changed before it ended",
                       product.site.file, product.site.line);
      abandon_block();
    }
  }
  if (thread == 0 && digest_of(product) != product.digest) {
    refuse_product("stale stage", product.site, "reads shared memory that was written over before it had ended");
  }
  take_product(product, number / warp_threads, lane, a[0]);
}

// A product may begin once a warp's lanes have come, so the bulk copies that write its operand must have been waited for.
CONVT3D_RUNTIME inline void require_landed(unsigned descriptor, size_t row_step, int rows, Site site) {
  const size_t start = (descriptor & 0x3fffu) << 4, k_step = (descriptor >> 16 & 0x3fffu) << 4,
               bytes = static_cast<size_t>(rows / 8 - 1) * row_step + 128;
  for (unsigned i = 0; copy_queue.block_serial == state.block_serial && i < copy_queue.count; ++i) {
    const PendingCopy& copy = copy_queue.copies[i];
    const size_t begin = static_cast<size_t>(static_cast<char*>(copy.target) - state.arena), end = begin + copy.bytes;
    for (size_t half = 0; half < 2; ++half) {
      if (start + half * k_step >= end || start + half * k_step + bytes <= begin) continue;
      describe_failure("wgmma at %s:%d reads shared memory that a bulk copy writes, which nobody has waited for", site.file,
                       site.line);
      abandon_block();
    }
  }
}

// Take a place in the queue.
CONVT3D_RUNTIME inline PendingProduct& queue_product(float* d, unsigned a, unsigned b, bool accumulate, int columns,
                                                     unsigned row_step, const unsigned* registers, Site site) {
  use_own_instruction(site);
  ProductQueue& queue = product_queue();
  const unsigned number = static_cast<unsigned>(current - state.threads);
  if (number % warp_threads == 0) {  // for all lanes: whichever of them waits, the warp does
    if (registers == nullptr) require_landed(a, row_step, 64, site);
    require_landed(b, 128, columns, site);
  }
  if (queue.count == sizeof queue.products / sizeof *queue.products) {
    describe_failure("more than %u wgmma without a wait", queue.count);
    abandon_block();
  }
  PendingProduct& product = queue.products[queue.count];
  product = {a, b, 0, columns, accumulate, queue.committed, row_step, registers, {}, 0, {}, {}, site};
  if (number % 128 == 0) {
    for_operands(product, [&](const char* place, size_t bytes) { require_fenced(place, bytes, site); });
    product.digest = digest_of(product);
  }
  if (registers != nullptr) product.fragment = use_registers(queue, registers, 4, site);
  product.sums = use_registers(queue, d, static_cast<unsigned>(columns) / 2, site);
  ++queue.count;
  const Registers& sums = queue.registers[product.sums];
  volatile unsigned* place = sums.place;
  for (unsigned i = 0; sums.in_flight == 1 && i < sums.count; ++i) place[i] = ~0u;
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

inline void wgmma_rows(float* d, unsigned a, unsigned row_step, unsigned b, unsigned accumulate, int columns, CONVT3D_HERE) {
  convt3d_host::queue_product(d, a, b, accumulate != 0, columns, row_step, nullptr, {file, line, "wgmma"});
}

inline void wgmma(float* d, unsigned a, unsigned b, unsigned accumulate, int columns, CONVT3D_HERE) {
  wgmma_rows(d, a, 128, b, accumulate, columns, file, line);
}

CONVT3D_RUNTIME inline void wgmma_registers(float* d, const unsigned (&a)[4], unsigned b, unsigned accumulate, int columns,
                                            CONVT3D_HERE) {
  using namespace convt3d_host;
  PendingProduct& product = queue_product(d, 0, b, accumulate != 0, columns, 128, a, {file, line, "wgmma_registers"});
  memcpy(product.held, a, sizeof product.held);
  warp_collective(0xffffffffu, &product, combine_rows, product.site);
}

// `.sync.aligned`: the lanes of a warp meet, and one that is elsewhere is reported.
inline void wgmma_fence(CONVT3D_HERE) {
  convt3d_host::fence_registers();
  convt3d_host::vote(0xffffffffu, true, {file, line, "wgmma_fence"});
}
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
