// CUDA's cooperative groups on one block and its warps: thread_block, tiles, coalesced threads, and what they exchange.
#pragma once

#include "../runtime.h"

namespace cooperative_groups {

// Threads that wait for each other: the whole block, or the lanes of `mask` in the calling thread's warp.
class thread_group {
 public:
  unsigned long long num_threads() const { return mask_ == 0 ? threads_of_block() : static_cast<unsigned>(__popc(mask_)); }
  unsigned long long size() const { return num_threads(); }
  unsigned long long thread_rank() const {
    return mask_ == 0 ? rank_in_block() : static_cast<unsigned>(__popc(mask_ & ((1u << lane()) - 1u)));
  }
  void sync(CONVT3D_HERE) const {
    if (mask_ == 0) return convt3d_host::barrier({file, line, "thread_group::sync"});
    convt3d_host::vote(mask_, true, {file, line, "thread_group::sync"});
  }
  static unsigned rank_in_block() { return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x; }

 protected:
  explicit thread_group(unsigned mask) : mask_(mask) {}
  static unsigned lane() { return rank_in_block() % 32u; }
  static unsigned threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }
  // The lanes from this thread's on in steps of `size`: its tile of the warp.
  static unsigned tile_mask(unsigned size) {
    const unsigned tile = size == 32u ? ~0u : (1u << size) - 1u, first = lane() / size * size, here = rank_in_block() - lane();
    const unsigned present = threads_of_block() - here >= 32u ? ~0u : (1u << (threads_of_block() - here)) - 1u;
    return tile << first & present;
  }
  unsigned mask_;  // 0: the block

 public:
  // Of a size known at run time.
  static thread_group tile(unsigned size) { return thread_group(tile_mask(size)); }
};

class thread_block : public thread_group {
 public:
  thread_block() : thread_group(0) {}
  static void sync(CONVT3D_HERE) { convt3d_host::barrier({file, line, "thread_block::sync"}); }
  static unsigned thread_rank() { return rank_in_block(); }
  static unsigned num_threads() { return threads_of_block(); }
  static unsigned size() { return threads_of_block(); }
  static dim3 group_index() { return dim3(blockIdx); }
  static dim3 thread_index() { return dim3(threadIdx); }
  static dim3 group_dim() { return dim3(blockDim); }
  static dim3 dim_threads() { return dim3(blockDim); }
};

inline thread_block this_thread_block() { return {}; }

class grid_group {
 public:
  static unsigned long long num_blocks() { return 1ull * gridDim.x * gridDim.y * gridDim.z; }
  static unsigned long long num_threads() { return num_blocks() * thread_block::num_threads(); }
  static unsigned long long size() { return num_threads(); }
  static unsigned long long block_rank() { return (1ull * blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; }
  static unsigned long long thread_rank() { return block_rank() * thread_block::num_threads() + thread_block::thread_rank(); }
  static dim3 dim_blocks() { return dim3(gridDim); }
  static dim3 group_dim() { return dim3(gridDim); }
  static dim3 block_index() { return dim3(blockIdx); }
  static bool is_valid() { return false; }
  __attribute__((
      error("a barrier of the whole grid waits for all blocks at once, and the host runs them one after another"))) void
  sync() const;
};

inline grid_group this_grid() { return {}; }

// What lanes of one warp exchange; `Group` gives them their mask and ranks.
template <class Group>
class warp_group {
 public:
  template <class T>
  T shfl(T value, int rank, CONVT3D_HERE) const {
    return take(value, rank, {file, line, "shfl"});
  }
  template <class T>
  T shfl_up(T value, unsigned by, CONVT3D_HERE) const {
    return take(value, static_cast<int>(self().thread_rank()) - static_cast<int>(by), {file, line, "shfl_up"});
  }
  template <class T>
  T shfl_down(T value, unsigned by, CONVT3D_HERE) const {
    return take(value, static_cast<int>(self().thread_rank() + by), {file, line, "shfl_down"});
  }
  template <class T>
  T shfl_xor(T value, unsigned by, CONVT3D_HERE) const {
    return take(value, static_cast<int>(self().thread_rank() ^ by), {file, line, "shfl_xor"});
  }
  int any(int predicate, CONVT3D_HERE) const { return vote(predicate, {file, line, "any"}).ballot != 0; }
  int all(int predicate, CONVT3D_HERE) const {
    const convt3d_host::VoteSlot found = vote(predicate, {file, line, "all"});
    return found.ballot == found.members;
  }
  unsigned ballot(int predicate, CONVT3D_HERE) const { return ranks_of(vote(predicate, {file, line, "ballot"}).ballot); }
  template <class T>
  unsigned match_any(T value, CONVT3D_HERE) const {
    return ranks_of(__match_any_sync(self().mask(), value, file, line));
  }
  template <class T>
  unsigned match_all(T value, int& all, CONVT3D_HERE) const {
    return ranks_of(__match_all_sync(self().mask(), value, &all, file, line));
  }

 private:
  const Group& self() const { return static_cast<const Group&>(*this); }
  convt3d_host::VoteSlot vote(int predicate, convt3d_host::Site site) const {
    return convt3d_host::vote(self().mask(), predicate != 0, site);
  }
  // A rank outside the group gives the thread's own value.
  template <class T>
  T take(T value, int rank, convt3d_host::Site site) const {
    static_assert(sizeof(T) <= 32, "a group exchanges values of at most 32 bytes");
    const unsigned mask = self().mask();
    const int source = rank < 0 || rank >= __popc(mask) ? -1 : static_cast<int>(__fns(mask, 0, rank + 1));
    return convt3d_host::shuffle(mask, value, source, site);
  }
  unsigned ranks_of(unsigned lanes) const {
    unsigned ranks = 0;
    const int count = __popc(self().mask());
    for (int rank = 0; rank < count; ++rank) ranks |= (lanes >> __fns(self().mask(), 0, rank + 1) & 1u) << rank;
    return ranks;
  }
};

class coalesced_group : public thread_group, public warp_group<coalesced_group> {
 public:
  explicit coalesced_group(unsigned mask) : thread_group(mask) {}
  unsigned mask() const { return mask_; }
};

inline coalesced_group coalesced_threads(CONVT3D_HERE) {
  return coalesced_group(convt3d_host::active_mask({file, line, "coalesced_threads"}));
}

template <unsigned Size, class Parent = void>
class thread_block_tile : public thread_group, public warp_group<thread_block_tile<Size, Parent>> {
  static_assert(Size <= 32 && (Size & (Size - 1)) == 0, "a tile has 1, 2, 4, 8, 16 or 32 threads on the host");

 public:
  thread_block_tile(unsigned rank, unsigned size) : thread_group(tile_mask(Size)), meta_rank_(rank), meta_size_(size) {}
  template <class Other>
  thread_block_tile(const thread_block_tile<Size, Other>& other)
      : thread_block_tile(other.meta_group_rank(), other.meta_group_size()) {}
  unsigned mask() const { return mask_; }
  static constexpr unsigned num_threads() { return Size; }
  static constexpr unsigned size() { return Size; }
  unsigned thread_rank() const { return lane() % Size; }
  unsigned meta_group_rank() const { return meta_rank_; }
  unsigned meta_group_size() const { return meta_size_; }

 private:
  unsigned meta_rank_, meta_size_;
};

template <unsigned Size, class Parent>
thread_block_tile<Size, Parent> tiled_partition(const Parent& parent) {
  return {static_cast<unsigned>(parent.thread_rank()) / Size, (static_cast<unsigned>(parent.size()) + Size - 1) / Size};
}

inline thread_group tiled_partition(const thread_group&, unsigned size) { return thread_group::tile(size); }

// The lanes of a group with the same label, or the same answer.
template <class Group>
coalesced_group labeled_partition(const Group& group, int label, CONVT3D_HERE) {
  return coalesced_group(__match_any_sync(group.mask(), label, file, line));
}
template <class Group>
coalesced_group binary_partition(const Group& group, bool answer, CONVT3D_HERE) {
  return coalesced_group(__match_any_sync(group.mask(), static_cast<int>(answer), file, line));
}

template <class Group>
void sync(const Group& group, CONVT3D_HERE) {
  group.sync(file, line);
}
template <class Group>
auto thread_rank(const Group& group) {
  return group.thread_rank();
}
template <class Group>
auto group_size(const Group& group) {
  return group.size();
}

}  // namespace cooperative_groups
