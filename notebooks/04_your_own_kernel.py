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
# # Write your own kernel in a cell
# `%%convt3d NAME` compiles a cell as a CUDA kernel, checks it against the reference in a child process, times it, and says what
# changed since the last run. If the check passes the kernel is registered and can be used like any other. With a GPU it runs
# there; without one the same source runs on the CPU.

# %%
# %load_ext cupy_convt3d

# %%
import numpy as np

import cupy_convt3d as ct

# %% [markdown]
# ## A first try
# The first comment declares what the kernel computes and how it is launched; README has the table of keys. Parameters are bound
# by name: `input`, `weight`, `bias` (null if there is none) and `output` are the tensors, `stride_d`, `output_w` and the like
# are the problem's numbers. This kernel has one thread for each output voxel. It has a typing error.

# %% tags=["active-ipynb"]
# %%convt3d one_thread_per_voxel --backend host
# /* convt3d
# pass = "fprop"
# [[launch]]
# grid = "ceil_div(output_numel, 128)"
# block = 128
# */
# #include "convt3d.cuh"
#
# extern "C" __global__ void one_thread_per_voxel(const Problem problem, const float* input, const float* weight,
#                                                 const float* bias, float* output, long long output_numel) {
#   const long long index = blockIdx.x * 128LL + threadIdx.x;
#   if (index >= output_numel) return;
#   const Voxel o = voxel_at(index, problem.out_channels, problem.output_size);
#   float sum = bias ? bias[o.c] : 0.0f;
#   output[index] = summ;
# }

# %% [markdown]
# The compiler's message carries the cell's own line number, counted from the `%%convt3d` line. Now the whole thing. On each
# axis the input that tap `t` reads is `(o + padding - t*dilation) / stride`, if it is inside the input.

# %% tags=["active-ipynb"]
# %%convt3d one_thread_per_voxel --backend host
# /* convt3d
# pass = "fprop"
# [[launch]]
# grid = "ceil_div(output_numel, 128)"
# block = 128
# */
# #include "convt3d.cuh"
#
# extern "C" __global__ void one_thread_per_voxel(const Problem problem, const float* input, const float* weight,
#                                                 const float* bias, float* output, long long output_numel,
#                                                 int in_channels_per_group, int out_channels_per_group) {
#   const long long index = blockIdx.x * 128LL + threadIdx.x;
#   if (index >= output_numel) return;
#   const Voxel o = voxel_at(index, problem.out_channels, problem.output_size);
#   float sum = bias ? bias[o.c] : 0.0f;
#   for (int ci = 0; ci < in_channels_per_group; ++ci) {
#     const long long c = o.c / out_channels_per_group * in_channels_per_group + ci;
#     const float* tap = weight + (c * out_channels_per_group + o.c % out_channels_per_group) *
#                                     problem.kernel_size[0] * problem.kernel_size[1] * problem.kernel_size[2];
#     for (int td = 0; td < problem.kernel_size[0]; ++td) {
#       for (int th = 0; th < problem.kernel_size[1]; ++th) {
#         for (int tw = 0; tw < problem.kernel_size[2]; ++tw, ++tap) {
#           const int d = (o.d + problem.padding[0] - td * problem.dilation[0]) / problem.stride[0];
#           const int h = (o.h + problem.padding[1] - th * problem.dilation[1]) / problem.stride[1];
#           const int w = (o.w + problem.padding[2] - tw * problem.dilation[2]) / problem.stride[2];
#           if (d < 0 || h < 0 || w < 0) continue;
#           if (d >= problem.input_size[0] || h >= problem.input_size[1] || w >= problem.input_size[2]) continue;
#           const long long plane = (o.n * static_cast<long long>(problem.in_channels) + c) * problem.input_size[0] + d;
#           sum += input[(plane * problem.input_size[1] + h) * problem.input_size[2] + w] * *tap;
#         }
#       }
#     }
#   }
#   output[index] = sum;
# }

# %% [markdown]
# It compiles, and it is wrong. The smallest failing problem names the culprit: everything is one except the stride (or, in C, a
# negative number that rounds *up* to zero). The cell did not harm the notebook; the check ran elsewhere, and nothing was
# registered. The variable `one_thread_per_voxel` is still the kernel, to be looked at:

# %%
assert "one_thread_per_voxel" not in ct.kernels()
ct.plots.error_map(one_thread_per_voxel, ct.Problem(1, 1, 1, (3, 6, 8), 3, stride=2), backend="host")  # noqa: F821

# %% [markdown]
# ## Right
# `input_index` of the header does the division, tests that it is exact and inside, and returns -1 where it is not.

# %% tags=["active-ipynb"]
# %%convt3d one_thread_per_voxel --against cudnn,fprop_gather
# /* convt3d
# pass = "fprop"
# [[launch]]
# grid = "ceil_div(output_numel, 128)"
# block = 128
# */
# #include "convt3d.cuh"
#
# extern "C" __global__ void one_thread_per_voxel(const Problem problem, const float* input, const float* weight,
#                                                 const float* bias, float* output, long long output_numel,
#                                                 int in_channels_per_group, int out_channels_per_group) {
#   const long long index = blockIdx.x * 128LL + threadIdx.x;
#   if (index >= output_numel) return;
#   const Voxel o = voxel_at(index, problem.out_channels, problem.output_size);
#   float sum = bias ? bias[o.c] : 0.0f;
#   for (int ci = 0; ci < in_channels_per_group; ++ci) {
#     const long long c = o.c / out_channels_per_group * in_channels_per_group + ci;
#     const float* tap = weight + (c * out_channels_per_group + o.c % out_channels_per_group) *
#                                     problem.kernel_size[0] * problem.kernel_size[1] * problem.kernel_size[2];
#     for (int td = 0; td < problem.kernel_size[0]; ++td) {
#       for (int th = 0; th < problem.kernel_size[1]; ++th) {
#         for (int tw = 0; tw < problem.kernel_size[2]; ++tw, ++tap) {
#           const int d = input_index(problem, 0, o.d, td);
#           const int h = input_index(problem, 1, o.h, th);
#           const int w = input_index(problem, 2, o.w, tw);
#           if (d < 0 || h < 0 || w < 0) continue;
#           const long long plane = (o.n * static_cast<long long>(problem.in_channels) + c) * problem.input_size[0] + d;
#           sum += input[(plane * problem.input_size[1] + h) * problem.input_size[2] + w] * *tap;
#         }
#       }
#     }
#   }
#   output[index] = sum;
# }

# %% [markdown]
# Registered. The rivals are `cudnn` (torch's own operator; on the host that is torch on one CPU thread) and any registered
# kernel. Registers, spills and shared memory are the compiler's own figures for a GPU; without a GPU they are for `sm_90a`, and
# need CuPy's NVRTC.
#
# ## Better, by how much?
# The loop over taps recomputes the depth and height indices for every tap of the width, and for every input channel. Moving
# them out of the inner loops changes no result. The name is taken now, so the cell says `--replace`; the right-hand column
# compares with the last run.

# %% tags=["active-ipynb"]
# %%convt3d one_thread_per_voxel --against fprop_gather --replace
# /* convt3d
# pass = "fprop"
# [[launch]]
# grid = "ceil_div(output_numel, 128)"
# block = 128
# */
# #include "convt3d.cuh"
#
# extern "C" __global__ void one_thread_per_voxel(const Problem problem, const float* input, const float* weight,
#                                                 const float* bias, float* output, long long output_numel,
#                                                 int in_channels_per_group, int out_channels_per_group) {
#   const long long index = blockIdx.x * 128LL + threadIdx.x;
#   if (index >= output_numel) return;
#   const Voxel o = voxel_at(index, problem.out_channels, problem.output_size);
#   const int taps = problem.kernel_size[0] * problem.kernel_size[1] * problem.kernel_size[2];
#   const long long first = o.c / out_channels_per_group * in_channels_per_group;
#   const float* filter = weight + (first * out_channels_per_group + o.c % out_channels_per_group) * taps;
#   const long long volume = 1LL * problem.input_size[0] * problem.input_size[1] * problem.input_size[2];
#   const float* source = input + (o.n * static_cast<long long>(problem.in_channels) + first) * volume;
#   float sum = bias ? bias[o.c] : 0.0f;
#   for (int td = 0; td < problem.kernel_size[0]; ++td) {
#     const int d = input_index(problem, 0, o.d, td);
#     if (d < 0) continue;
#     for (int th = 0; th < problem.kernel_size[1]; ++th) {
#       const int h = input_index(problem, 1, o.h, th);
#       if (h < 0) continue;
#       for (int tw = 0; tw < problem.kernel_size[2]; ++tw) {
#         const int w = input_index(problem, 2, o.w, tw);
#         if (w < 0) continue;
#         const float* in = source + (1LL * d * problem.input_size[1] + h) * problem.input_size[2] + w;
#         const float* tap = filter + (td * problem.kernel_size[1] + th) * problem.kernel_size[2] + tw;
#         for (int ci = 0; ci < in_channels_per_group; ++ci) {
#           sum += in[ci * volume] * tap[1LL * ci * out_channels_per_group * taps];
#         }
#       }
#     }
#   }
#   output[index] = sum;
# }

# %% [markdown]
# ## Use it
# A registered kernel is an `algorithm` by its name, for arrays of any library. On a GPU pass CuPy or torch CUDA tensors.

# %%
assert "one_thread_per_voxel" in ct.kernels("fprop")
generator = np.random.default_rng(0)
x = generator.standard_normal((1, 8, 6, 7, 8), dtype=np.float32)
w = generator.standard_normal((8, 4, 3, 3, 3), dtype=np.float32)
mine = ct.conv_transpose3d(x, w, stride=2, padding=1, algorithm="one_thread_per_voxel")
shipped = ct.conv_transpose3d(x, w, stride=2, padding=1)
print(mine.shape, f"largest difference to the shipped kernel: {np.abs(mine - shipped).max():.1e}")
assert np.allclose(mine, shipped, atol=1e-4)

# %% [markdown]
# ## Where it is still slow
# `--case` names another problem, of the suite or one of your own such as `n1_c16to8_i12_k4_s2_p1`. Try a depthwise one
# (`n1_c32to32_i16_k3_g32`) and a strided one (`kb73`). The next rungs are in `03_ladder`: stay within one residue class so that
# no tap is asked in vain, then share loads between the threads of a block. To keep a kernel, save the cell without its first
# line as `NAME.cu`, and run `convt3d check NAME.cu` for the full check and `--sanitize thread` for races.
