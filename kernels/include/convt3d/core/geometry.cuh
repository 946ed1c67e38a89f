// Index arithmetic of the transposed convolution. Input i and tap t feed output o = i*stride - padding + t*dilation.
// Every axis spans less than 2^31 positions (Problem refuses more), so one axis is 32-bit and products are 64-bit.
#pragma once

__device__ constexpr int greatest_common_divisor(int a, int b) {
  while (b != 0) {
    const int rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// One element of a (batch, channels, d, h, w) tensor.
struct Voxel {
  int n, c, d, h, w;
};

__device__ inline Voxel voxel_at(long long index, int channels, const int (&size)[3]) {
  Voxel voxel;
  voxel.w = static_cast<int>(index % size[2]);
  index /= size[2];
  voxel.h = static_cast<int>(index % size[1]);
  index /= size[1];
  voxel.d = static_cast<int>(index % size[0]);
  index /= size[0];
  voxel.c = static_cast<int>(index % channels);
  voxel.n = static_cast<int>(index / channels);
  return voxel;
}

// The input index that feeds `output` through tap `t`, or -1 where there is none.
__device__ inline int input_index(const Problem& problem, int axis, int output, int t) {
  const int scaled = output + problem.padding[axis] - t * problem.dilation[axis];
  if (scaled < 0 || scaled % problem.stride[axis] != 0) return -1;
  const int input = scaled / problem.stride[axis];
  return input < problem.input_size[axis] ? input : -1;
}

// The output index that `input` feeds through tap `t`, or -1 where it falls outside the output.
__device__ inline int output_index(const Problem& problem, int axis, int input, int t) {
  const int output = input * problem.stride[axis] - problem.padding[axis] + t * problem.dilation[axis];
  return output < problem.output_size[axis] ? output : -1;
}

// The outputs of one axis with (o + padding) % stride == residue. With q = (o + padding) / stride, tap
// `first_tap + j*tap_step` reads input `q - (first_offset + j*offset_step)`, for j in [0, taps).
struct AxisClass {
  int first_output, outputs;
  int first_tap, tap_step, taps;
  int first_offset, offset_step;
};

__device__ inline AxisClass axis_class(const Problem& problem, int axis, int residue) {
  const int stride = problem.stride[axis], dilation = problem.dilation[axis], kernel = problem.kernel_size[axis];
  AxisClass result;
  result.first_output = (residue - problem.padding[axis] % stride + stride) % stride;
  const int beyond = problem.output_size[axis] - result.first_output;
  result.outputs = beyond > 0 ? (beyond - 1) / stride + 1 : 0;

  const int divisor = greatest_common_divisor(stride, dilation);
  result.tap_step = stride / divisor;
  result.offset_step = dilation / divisor;
  // The residues of t*dilation repeat after tap_step taps, so a residue not met by then has no tap at all.
  const int period = result.tap_step < kernel ? result.tap_step : kernel;
  int tap = 0;
  while (tap < period && tap * dilation % stride != residue) ++tap;
  result.first_tap = tap;
  result.taps = tap < period ? (kernel - 1 - tap) / result.tap_step + 1 : 0;
  result.first_offset = (tap * dilation - residue) / stride;
  return result;
}
