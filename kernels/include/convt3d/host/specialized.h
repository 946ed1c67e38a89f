// The numbers of [specialize]: a GPU's binary is compiled for them, the host's has those of each launch and compares them with what they
// stand for.
#pragma once

#include <cstring>
#include <type_traits>

#include "block.h"

namespace convt3d_host {

template <class Value>
CONVT3D_RUNTIME inline Value specialized(long long number, Value value, const char* macro, const char* file, int line) {
  if (number != static_cast<long long>(value)) {
    describe_failure(
        "specialization: %s is %lld at %s:%d, and stands for %lld there: a GPU's binary is compiled for a wrong number", macro,
        number, file, line, static_cast<long long>(value));
    abandon_block();
  }
  return value;
}

// A constant as a GPU's binary has it, and as the host does. What has gaps between its members is not compared.
template <class OnGpu, class Here>
CONVT3D_RUNTIME inline void same_constant(const OnGpu& on_gpu, const Here& here, const char* name, const char* file, int line) {
  bool same = true;
  if constexpr (std::is_arithmetic_v<OnGpu> && std::is_arithmetic_v<Here>) {
    same = static_cast<Here>(on_gpu) == here;
  } else if constexpr (std::is_same_v<OnGpu, Here> && std::has_unique_object_representations_v<Here>) {
    same = memcmp(&on_gpu, &here, sizeof here) == 0;
  }
  if (same) return;
  describe_failure(
      "specialization: %s at %s:%d is another with the numbers of [specialize]: a GPU's binary is compiled for a wrong number",
      name, file, line);
  abandon_block();
}

}  // namespace convt3d_host
