// A number as a type: an argument that a generic lambda is compiled for.
#pragma once

template <auto VALUE>
struct Constant {
  static constexpr auto value = VALUE;
};
