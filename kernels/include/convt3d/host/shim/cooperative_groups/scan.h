// Scans of cooperative groups: a thread gets the result of all ranks up to its own, or below it.
#pragma once

#include "reduce.h"

namespace cooperative_groups {

template <class Group, class T, class Operation = plus<T>>
T inclusive_scan(const Group& group, T value, Operation operation = {}, CONVT3D_HERE) {
  const unsigned rank = static_cast<unsigned>(group.thread_rank());
  for (unsigned by = 1; by < group.size(); by *= 2) {
    const T other = group.shfl_up(value, by, file, line);
    if (rank >= by) value = operation(other, value);
  }
  return value;
}

template <class Group, class T, class Operation = plus<T>>
T exclusive_scan(const Group& group, T value, Operation operation = {}, CONVT3D_HERE) {
  const T below = group.shfl_up(inclusive_scan(group, value, operation, file, line), 1, file, line);
  return group.thread_rank() == 0 ? T{} : below;
}

}  // namespace cooperative_groups
