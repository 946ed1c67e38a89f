// What kernels for kernel = stride share: how volumes are copied in vectors, and where a voxel lies.
#pragma once

#include "convt3d/core/geometry.cuh"
#include "convt3d/core/vector.cuh"

template <class T>
__device__ inline bool aligned(const View<T>& tensor, index_t strides, int elements) {
  return reinterpret_cast<index_t>(tensor.data) % (elements * static_cast<int>(sizeof(scalar_t))) == 0 &&
         strides % elements == 0;
}

// Whether the volume is made of aligned pieces of so many neighbours in memory, counted from its first voxel on.
template <class T>
__device__ inline bool made_of(const View<T>& tensor, const int (&size)[3], int elements) {
  const index_t* stride = tensor.stride;
  const index_t plane = stride[3] * size[1], outer = stride[0] | stride[1];
  const bool rows = size[2] % elements == 0 && aligned(tensor, outer | stride[2] | stride[3], elements);
  const bool volumes = stride[3] == size[2] && stride[2] == plane && plane * size[0] % elements == 0;
  return stride[4] == 1 && (rows || (volumes && aligned(tensor, outer, elements)));
}

// How a warp's inputs are copied and staged: 16 bytes of neighbouring voxels, 16 bytes of neighbouring channels, or elements one by one;
// [voxel][channel] the second, [channel][voxel] the others.
enum Copies { VOXEL_VECTORS, CHANNEL_VECTORS, ELEMENTS };

__device__ inline Copies copies_of(const View<const scalar_t>& input, const int (&size)[3], int channels) {
  constexpr int VECTOR = 16 / static_cast<int>(sizeof(scalar_t));
  const index_t* stride = input.stride;
  if (made_of(input, size, VECTOR)) return VOXEL_VECTORS;
  const bool last = stride[1] == 1 && channels % VECTOR == 0;
  return last && aligned(input, stride[0] | stride[2] | stride[3] | stride[4], VECTOR) ? CHANNEL_VECTORS : ELEMENTS;
}

// Where voxel `index` of all volumes begins in the input and in the output, from the channels on, -1 past the last one.
struct Place {
  index_t input, output;
};

__device__ inline Place place_of(const Problem& problem, int index, int voxels, const View<const scalar_t>& input,
                                 const View<scalar_t>& output, int in_channel, int out_channel, int kernel_d, int kernel_h,
                                 int kernel_w) {
  if (index >= voxels) return {-1, -1};
  const int* const size = problem.input_size;
  const int line = index / size[2], plane = line / size[1], n = plane / size[0];
  const int w = index - line * size[2], h = line - plane * size[1], d = plane - n * size[0];
  return {input.at(n, in_channel, d, h, w) - input.data,
          output.at(n, out_channel, d * kernel_d, h * kernel_h, w * kernel_w) - output.data};
}
