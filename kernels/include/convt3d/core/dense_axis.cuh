// Residue classes taken modulo lcm(stride, dilation) instead of the stride: within one, outputs and inputs both step evenly, so that
// each class is a dense correlation with steps of one.
#pragma once

// The outputs first_output + a*step of one axis, for a in [0, outputs): the k-th of the class's taps, counted from the last, reads
// input origin + (a + k)*spread. Only classes that have a tap are numbered, those with the most taps first.
struct DenseAxis {
  int first_output, step, outputs, taps, taps_before, spread, origin;
};

__device__ inline int dense_classes(const Problem& problem, int axis) {
  const int divisor = greatest_common_divisor(problem.stride[axis], problem.dilation[axis]);
  return min(problem.kernel_size[axis], problem.stride[axis] / divisor) * (problem.dilation[axis] / divisor);
}

// Tap first, first + tap_step, ... : how many there are, and how many the classes with a smaller first tap have together.
__device__ inline int taps_of_class(int kernel, int tap_step, int first) { return (kernel - 1 - first) / tap_step + 1; }
__device__ inline int taps_before_class(int kernel, int tap_step, int first) {
  return first * (kernel / tap_step) + min(first, kernel % tap_step);
}

// Where a tap of one axis lies in a packed weight: the taps of its class, those of the classes before it, its place in the class.
struct PackedTap {
  int class_taps, before, position;
};

__device__ inline PackedTap packed_tap(const Problem& problem, int axis, int tap) {
  const int step = problem.stride[axis] / greatest_common_divisor(problem.stride[axis], problem.dilation[axis]);
  PackedTap result;
  result.class_taps = taps_of_class(problem.kernel_size[axis], step, tap % step);
  result.before = taps_before_class(problem.kernel_size[axis], step, tap % step);
  result.position = result.class_taps - 1 - tap / step;
  return result;
}

__device__ inline DenseAxis dense_axis(const Problem& problem, int axis, int index) {
  const int stride = problem.stride[axis], dilation = problem.dilation[axis], kernel = problem.kernel_size[axis];
  const int padding = problem.padding[axis], divisor = greatest_common_divisor(stride, dilation), tap_step = stride / divisor;
  DenseAxis result;
  result.spread = dilation / divisor;
  result.step = stride * result.spread;
  const int first_tap = index / result.spread, scaled = first_tap * dilation;
  const int residue = scaled % stride + stride * (index % result.spread);  // of o + padding, mod step
  result.first_output = (residue - padding % result.step + result.step) % result.step;
  const int beyond = problem.output_size[axis] - result.first_output;
  result.outputs = beyond > 0 ? (beyond - 1) / result.step + 1 : 0;
  result.taps = taps_of_class(kernel, tap_step, first_tap);
  result.taps_before = taps_before_class(kernel, tap_step, first_tap);
  result.origin = (result.first_output + padding - scaled) / stride - result.spread * (result.taps - 1);
  return result;
}

// Whether any tap reaches an output, wherever its input would be.
__device__ inline bool has_tap(const Problem& problem, int axis, int output) {
  const int stride = problem.stride[axis], residue = (output + problem.padding[axis]) % stride;
  const int taps = min(problem.kernel_size[axis], stride), step = problem.dilation[axis] % stride;
  int scaled = 0;  // tap * dilation mod stride
  for (int tap = 0; tap < taps; ++tap) {
    if (scaled == residue) return true;
    scaled = (scaled + step) % stride;
  }
  return false;
}
