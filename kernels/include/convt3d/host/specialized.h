// The numbers of [specialize]: a GPU's binary is compiled for them, the host's has those of each launch and compares them with what they
// stand for.
#pragma once

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

}  // namespace convt3d_host
