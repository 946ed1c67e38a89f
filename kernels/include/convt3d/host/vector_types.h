// CUDA's vector types and their make functions, aligned as on a GPU.
#pragma once

#include "block.h"

using uint3 = convt3d_host::Index3;

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 size) : x(size.x), y(size.y), z(size.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

// Two and four elements are aligned as one, up to 16 bytes; three are not.
#define CONVT3D_VECTOR_TYPES_BUT_3(scalar, name)                                                    \
  struct name##1 { scalar x; };                                                                     \
  struct alignas(2 * sizeof(scalar)) name##2 { scalar x, y; };                                      \
  struct alignas(4 * sizeof(scalar) > 16 ? 16 : 4 * sizeof(scalar)) name##4 { scalar x, y, z, w; }; \
  inline name##1 make_##name##1(scalar x) { return {x}; }                                           \
  inline name##2 make_##name##2(scalar x, scalar y) { return {x, y}; }                              \
  inline name##3 make_##name##3(scalar x, scalar y, scalar z) { return {x, y, z}; }                 \
  inline name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }

#define CONVT3D_VECTOR_TYPES(scalar, name) \
  struct name##3 { scalar x, y, z; };      \
  CONVT3D_VECTOR_TYPES_BUT_3(scalar, name)

CONVT3D_VECTOR_TYPES(signed char, char)
CONVT3D_VECTOR_TYPES(unsigned char, uchar)
CONVT3D_VECTOR_TYPES(short, short)
CONVT3D_VECTOR_TYPES(unsigned short, ushort)
CONVT3D_VECTOR_TYPES(int, int)
CONVT3D_VECTOR_TYPES_BUT_3(unsigned, uint)
CONVT3D_VECTOR_TYPES(long, long)
CONVT3D_VECTOR_TYPES(unsigned long, ulong)
CONVT3D_VECTOR_TYPES(long long, longlong)
CONVT3D_VECTOR_TYPES(unsigned long long, ulonglong)
CONVT3D_VECTOR_TYPES(float, float)
CONVT3D_VECTOR_TYPES(double, double)
