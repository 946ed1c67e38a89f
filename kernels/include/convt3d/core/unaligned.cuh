// Neighbours in memory that begin anywhere. Memory is accessed at multiples of an access's size, so what a thread has is moved to the next
// such place: what lies in between it has from the thread behind it, or from a second cell.
#pragma once

#include "convt3d/core/cell.cuh"

static_assert(sizeof(scalar_t) <= 4, "elements of words");

// Drop so many elements, a power of two that the compiler knows, from the front of a row of words.
template <int COUNT>
__device__ __forceinline__ void drop_front(unsigned (&words)[COUNT], int elements, bool drop) {
  const int bytes = elements * static_cast<int>(sizeof(scalar_t)), ahead = bytes > 4 ? bytes / 4 : 1;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const unsigned behind = i + ahead < COUNT ? words[(i + ahead) % COUNT] : 0u;
    words[i] = bytes == 2 ? __byte_perm(words[i], behind, drop ? 0x5432u : 0x3210u) : drop ? behind : words[i];
  }
}

// One store of so many elements, as above, that lie at a multiple of their size; in PTX, because the compiler makes a store of each element
// of it where other code stores them one by one.
template <int COUNT>
__device__ __forceinline__ void store_front(scalar_t* y, const unsigned (&words)[COUNT], int elements) {
  const int bytes = elements * static_cast<int>(sizeof(scalar_t));
#if defined(__CUDACC__)
  const unsigned long long to = __cvta_generic_to_global(y);
  if (bytes == 2) asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(static_cast<unsigned short>(words[0])) : "memory");
  if (bytes == 4) asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(words[0]) : "memory");
  if (bytes == 8) asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1 % COUNT]) : "memory");
  if (bytes == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1 % COUNT]),
                 "r"(words[2 % COUNT]), "r"(words[3 % COUNT])
                 : "memory");
  }
#else
  if (bytes == 2) *reinterpret_cast<unsigned short*>(y) = static_cast<unsigned short>(words[0]);
  if (bytes == 4) *reinterpret_cast<unsigned*>(y) = words[0];
  if (bytes == 8) *reinterpret_cast<Words<2>*>(y) = {words[0], words[1 % COUNT]};
  if (bytes == 16) *reinterpret_cast<Words<4>*>(y) = {words[0], words[1 % COUNT], words[2 % COUNT], words[3 % COUNT]};
#endif
}

// Store what a thread has of a run of neighbours: `own` from y on, and `next` is what the thread behind has. A thread stores as many bytes as
// it has, from the first multiple of so many on; who is first in the run also what lies before. `live`: elements of the run from y on, those
// behind too; below 1, the thread has none. No branches: a store that is not there is predicated.
template <int WORDS>
__device__ __forceinline__ void store_unaligned(scalar_t* y, const unsigned (&own)[WORDS], const unsigned (&next)[WORDS],
                                                int live, bool is_first) {
  constexpr int COUNT = WORDS * 4 / static_cast<int>(sizeof(scalar_t));
  unsigned both[2 * WORDS], words[WORDS];
#pragma unroll
  for (int i = 0; i < 2 * WORDS; ++i) both[i] = i < WORDS ? own[i % WORDS] : next[i % WORDS];
  // Elements before the first multiple, in pieces at multiples of their size; of a run that ends before it those that fit.
  int at = static_cast<int>((0u - static_cast<unsigned>(reinterpret_cast<unsigned long long>(y) / sizeof(scalar_t))) % COUNT);
#pragma unroll
  for (int piece = COUNT / 2; piece > 0; piece /= 2) at = is_first && at > live ? at % piece : at;
#pragma unroll
  for (int piece = 1; piece < COUNT; piece *= 2) {
    const bool there = (at & piece) != 0;
    if (is_first && there) store_front(y + at % piece, both, piece);
    drop_front(both, piece, there);
  }
#pragma unroll
  for (int i = 0; i < WORDS; ++i) words[i] = both[i];
  const int left = live - at;
  if (left >= COUNT) store_front(y + at, words, COUNT);
  const int rest = left >= COUNT ? 0 : max(left, 0);
#pragma unroll
  for (int piece = COUNT / 2; piece > 0; piece /= 2) {
    const bool there = (rest & piece) != 0;
    if (there) store_front(y + (at + rest / (2 * piece) * (2 * piece)), words, piece);
    drop_front(words, piece, there);
  }
}

// The words of the lane behind, where four lanes have neighbours: behind the last one's come the first one's `later` ones.
template <int WORDS>
__device__ __forceinline__ void take_from_behind(unsigned (&next)[WORDS], const unsigned (&own)[WORDS],
                                                 const unsigned (&later)[WORDS], int lane) {
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    next[i] = __shfl_sync(0xffffffffu, lane % 4 == 0 ? later[i] : own[i], lane / 4 * 4 + (lane + 1) % 4);
  }
}

// The elements that a tensor's lie among.
template <class T>
struct Extent {
  const T *begin, *end;
};

template <class T>
__device__ inline Extent<T> extent_of(const View<T>& view, int batch, int channels, const int (&size)[3]) {
  return {view.data, view.at(batch - 1, channels - 1, size[0] - 1, size[1] - 1, size[2] - 1) + 1};
}

// 16 bytes of neighbours from `source` on, of which `live` are there: zero from those on. Cells that pass the tensor's ends are not read.
__device__ __forceinline__ Cell load_unaligned(const scalar_t* source, int live, const Extent<const scalar_t>& tensor) {
  const unsigned before = static_cast<unsigned>(reinterpret_cast<unsigned long long>(source) / sizeof(scalar_t)) % VECTOR;
  const scalar_t* const first = source - before;
  const bool both = static_cast<int>(before) + min(live, VECTOR) > VECTOR;
  unsigned words[8] = {};
  if (live > 0 && tensor.begin <= first && first + (both ? 2 : 1) * VECTOR <= tensor.end) {
    const Cell low = *reinterpret_cast<const Cell*>(first),
               high = both ? *reinterpret_cast<const Cell*>(first + VECTOR) : Cell{};
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = low.element[i], words[4 + i] = high.element[i];
#pragma unroll
    for (int piece = 1; piece < VECTOR; piece *= 2) drop_front(words, piece, (before & static_cast<unsigned>(piece)) != 0);
  } else {
    scalar_t values[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) values[v] = v < live ? source[v] : scalar_t();
    memcpy(words, values, 16);
  }
  Cell cell;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    constexpr int EACH = 4 / static_cast<int>(sizeof(scalar_t));
    const int there = live - i * EACH;
    cell.element[i] = there >= EACH ? words[i] : there == 1 && EACH == 2 ? words[i] & 0xffffu : 0u;
  }
  return cell;
}
