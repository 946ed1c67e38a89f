// The taps of an axis for a thread that owns a run of neighbouring q and all residues of its outputs.
#pragma once

// Outputs are cut from their first on: o = q*stride + r, and the rest of the padding goes into the taps.
struct Taps {
  int kernel, stride, dilation, padding, run;

  // o + padding - first() * stride = q*stride + r + lead(), for the q of the outputs counted from 0.
  __device__ constexpr int lead() const { return padding % stride; }
  __device__ constexpr int first() const { return padding / stride; }
  // Inputs from nearest() to reach() below q have taps.
  __device__ constexpr int nearest() const { return lead() > 0 ? -1 : 0; }
  __device__ constexpr int reach() const { return ((kernel - 1) * dilation - lead() + stride) / stride - 1; }
  __device__ constexpr int inputs() const { return run + reach() - nearest(); }  // that a run reads
  // The tap that leads from an input `offset` below q to residue r, or -1.
  __device__ int tap(int offset, int r) const {
    const int scaled = offset * stride + r + lead();
    return scaled >= 0 && scaled % dilation == 0 && scaled / dilation < kernel ? scaled / dilation : -1;
  }
};

// `made_of_vectors` of vector.cuh along w. In another order of conditions these kernels would be other machine code than was measured.
template <class T>
__device__ bool made_of_vectors(const View<T>& view, int length) {
  bool made = view.stride[4] == 1 && reinterpret_cast<index_t>(view.data) % (length * sizeof(T)) == 0;
  for (int a = 0; a < 4; ++a) made = made && view.stride[a] % length == 0;
  return made;
}
