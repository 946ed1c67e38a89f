# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quick start
# A transposed convolution, a raw CUDA kernel for it, a check of that kernel over random problems, and the smallest problem that
# a broken kernel gets wrong. No GPU is needed: the same `.cu` files run on the CPU, compiled by the host's C++ compiler.

# %%
import numpy as np

import cupy_convt3d as ct

# %% [markdown]
# ## A problem
# A `Problem` is the geometry alone. Input `i` and tap `t` feed output `o = i*stride - padding + t*dilation`.

# %%
problem = ct.Problem(batch=1, in_channels=2, out_channels=3, input_size=(3, 4, 5), kernel_size=3, stride=2, padding=1, bias=True)
print(problem, "->", problem.output_shape, f"{problem.flop} useful FLOP")

# %% [markdown]
# With stride 2 the outputs fall into eight residue classes. All outputs of a class are fed by the same taps, so each class is a
# dense convolution with stride 1. The number of taps differs from class to class.

# %%
for residue_class in problem.residue_classes():
    residues = tuple(axis.residue for axis in residue_class.axes)
    print(f"residues {residues}: {residue_class.voxels:3d} voxels, {residue_class.taps} taps")

# %% [markdown]
# ## A kernel
# The registered kernels are the files of `kernels/`. `fprop_gather` is the plainest: a thread owns an output voxel.

# %%
for name, kernel in ct.kernels().items():
    print(f"{name:16} {kernel.pass_name}  {', '.join(kernel.dtypes)}")
print(ct.kernels()["fprop_gather"].source)

# %% [markdown]
# ## A call
# `ct.conv_transpose3d` takes what `torch.nn.functional.conv_transpose3d` takes. NumPy arrays run on the host backend.

# %%
generator = np.random.default_rng(0)
x = generator.standard_normal(problem.input_shape, dtype=np.float32)
w = generator.standard_normal(problem.weight_shape, dtype=np.float32)
b = generator.standard_normal(problem.out_channels, dtype=np.float32)
y = ct.conv_transpose3d(x, w, b, stride=2, padding=1)
print(type(y).__name__, y.dtype, y.shape)

# %% [markdown]
# ## A check
# Random problems over the whole parameter space: exact integers first, bit for bit, then the rounding bound.

# %%
report = ct.check("fprop_gather", backend="host", examples=100, dtypes=["fp32"])
print(report)
assert report.passed

# %% [markdown]
# ## A broken kernel
# This one divides without testing whether the division is exact, a common mistake. One shape with stride 1 would not show it;
# the check finds a failing problem and shrinks it.

# %%
BROKEN = r"""/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = "ceil_div(output_numel, 128)"
block = 128
*/
#include "convt3d.cuh"

extern "C" __global__ void no_divisibility_test(const Problem problem, const float* input, const float* weight,
                                                const float* bias, float* output, long long output_numel) {
  const long long index = blockIdx.x * 128LL + threadIdx.x;
  if (index >= output_numel) return;
  const Voxel o = voxel_at(index, problem.out_channels, problem.output_size);
  const int channels = problem.in_channels / problem.groups, out_channels = problem.out_channels / problem.groups;
  const int at[3] = {o.d, o.h, o.w};
  float sum = bias ? bias[o.c] : 0.0f;
  for (int c = 0; c < channels; ++c) {
    const long long channel = o.c / out_channels * channels + c;
    for (int t = 0; t < problem.kernel_size[0] * problem.kernel_size[1] * problem.kernel_size[2]; ++t) {
      const int tap[3] = {t / problem.kernel_size[2] / problem.kernel_size[1], t / problem.kernel_size[2] % problem.kernel_size[1],
                          t % problem.kernel_size[2]};
      long long from = o.n * problem.in_channels + channel;
      bool inside = true;
      for (int a = 0; a < 3; ++a) {
        const int scaled = at[a] + problem.padding[a] - tap[a] * problem.dilation[a];
        const int i = scaled / problem.stride[a];  // wrong: must be skipped where scaled % stride != 0
        inside = inside && scaled >= 0 && i < problem.input_size[a];
        from = from * problem.input_size[a] + i;
      }
      if (!inside) continue;
      const long long filter = channel * out_channels + o.c % out_channels;
      sum += input[from] * weight[filter * problem.kernel_size[0] * problem.kernel_size[1] * problem.kernel_size[2] + t];
    }
  }
  output[index] = sum;
}
"""
broken = ct.Kernel.from_source(BROKEN, name="no_divisibility_test")
report = ct.check(broken, backend="host")
print(report)
assert not report.passed

# %% [markdown]
# The counterexample is as small as the mistake allows: everything at its least value except what is needed to see it.

# %%
report.counterexample

# %% [markdown]
# ## torch, through DLPack
# A torch tensor goes in and a torch tensor comes out; on a GPU nothing is copied. For CPU tensors the default is torch's own
# operator; `backend="host"` runs our kernel instead.

# %%
import torch

x_torch, w_torch, b_torch = map(torch.from_numpy, (x, w, b))
y_torch = ct.conv_transpose3d(x_torch, w_torch, b_torch, stride=2, padding=1, backend="host")
expected = torch.nn.functional.conv_transpose3d(x_torch, w_torch, b_torch, stride=2, padding=1)
print(type(y_torch).__name__, tuple(y_torch.shape), f"largest difference to torch: {(y_torch - expected).abs().max():.1e}")
assert torch.allclose(y_torch, expected, atol=1e-5)
