// A 5-D tensor with any strides (in elements): NCDHW, channels_last_3d and slices alike. Offsets are 64-bit, so tensors
// past 2^31 elements are right; inner loops step pointers by `stride` and do no index arithmetic.
#pragma once

typedef long long index_t;

template <class T>
struct View {
  T* data;
  index_t stride[5];

  __device__ T* at(index_t i, index_t j, index_t d, index_t h, index_t w) const {
    return data + (i * stride[0] + j * stride[1] + d * stride[2] + h * stride[3] + w * stride[4]);
  }
};
