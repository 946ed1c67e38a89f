// Reductions of cooperative groups: every thread of the group gets the result.
#pragma once

#include "../cooperative_groups.h"

namespace cooperative_groups {

#define CONVT3D_OPERATION(name, expression)                           \
  template <class T>                                                  \
  struct name {                                                       \
    T operator()(const T& a, const T& b) const { return expression; } \
  };
CONVT3D_OPERATION(plus, a + b)
CONVT3D_OPERATION(less, b < a ? b : a)
CONVT3D_OPERATION(greater, a < b ? b : a)
CONVT3D_OPERATION(bit_and, a& b)
CONVT3D_OPERATION(bit_or, a | b)
CONVT3D_OPERATION(bit_xor, a ^ b)
#undef CONVT3D_OPERATION

// As a tree: at each step a thread adds what the one `by` ranks above has.
template <class Group, class T, class Operation>
T reduce(const Group& group, T value, Operation operation, CONVT3D_HERE) {
  const unsigned size = static_cast<unsigned>(group.size()), rank = static_cast<unsigned>(group.thread_rank());
  for (unsigned by = 1; by < size; by *= 2) {
    const T other = group.shfl_down(value, by, file, line);
    if (rank % (2 * by) == 0 && rank + by < size) value = operation(value, other);
  }
  return group.shfl(value, 0, file, line);
}

}  // namespace cooperative_groups
