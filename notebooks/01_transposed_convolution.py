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
# # What a transposed convolution is
# A strided convolution makes a volume smaller. A transposed convolution goes the other way: it is the linear map whose matrix
# is the transpose of a convolution's matrix. It is *not* the inverse; it restores the size, not the values. This notebook
# builds it up from one dimension, by hand and in pictures. No GPU is needed.

# %%
import numpy as np

import cupy_convt3d as ct
from cupy_convt3d import reference

# %% [markdown]
# ## The definition: scatter
# Input `i` and tap `t` (one position of the weight) feed output
#
# $$o = i \cdot \text{stride} - \text{padding} + t \cdot \text{dilation}.$$
#
# That is all. Each input is multiplied by the whole weight and added to the output; where the copies overlap, they add up. On
# one axis:

# %%


def scatter(x, w, stride=1, padding=0, output_padding=0, dilation=1):
    size = (len(x) - 1) * stride - 2 * padding + dilation * (len(w) - 1) + output_padding + 1
    y = np.zeros(size, x.dtype)
    for i in range(len(x)):
        for t in range(len(w)):
            o = i * stride - padding + t * dilation
            if 0 <= o < size:  # padding removes outputs at both ends
                y[o] += x[i] * w[t]
    return y


x, w = np.array([1, 2, 3, 4]), np.array([1, 10, 100])
scatter(x, w, stride=2)

# %% [markdown]
# The copies of the weight stand two apart and are three long, so every second output gets two products: `100 + 2` is the last
# tap of input 0 and the first tap of input 1. In three dimensions the same rule holds on each axis. There the volume has
# channels too: output channel `co` sums over the input channels of its group. `reference.fprop` is this loop in NumPy, exact
# for integers, and it judges every kernel of this package.

# %%
line = ct.Problem(batch=1, in_channels=1, out_channels=1, input_size=(1, 1, 4), kernel_size=(1, 1, 3), stride=(1, 1, 2))
reference.fprop(line, x.reshape(line.input_shape), w.reshape(line.weight_shape)).ravel()

# %% [markdown]
# ## Why "transposed"
# A convolution with the same stride, padding and dilation, in the sense of deep learning (a cross-correlation), is $u_i =
# \sum_t w_t \, v_{i \cdot \text{stride} - \text{padding} + t \cdot \text{dilation}}$. It is linear, so it has a matrix $C$ with
# $C_{i,o} = w_t$. Scattering has $C^\mathsf{T}$. Column `i` of it is the weight, shifted by `i*stride`:

# %%
transposed = np.stack([scatter(unit, w, stride=2) for unit in np.eye(4, dtype=int)], axis=1)
print(transposed)
assert (transposed @ x == scatter(x, w, stride=2)).all()

# %% [markdown]
# So the transposed convolution is what backpropagation through a convolution computes, its gradient by the input, and the other
# way round. This is why libraries name them crosswise: what we call *fprop* of the transposed convolution runs in cuDNN and
# CUTLASS under the name *dgrad*.
#
# It also gives a law that needs no reference: $\langle C^\mathsf{T} x, y \rangle = \langle x, C y \rangle$ for all $x$ and $y$.
# `reference.dgrad` is the gradient by the input of the transposed convolution, that is $C$ itself. With integers both sides are
# equal to the last digit:

# %%
problem = ct.Problem(
    batch=2, in_channels=4, out_channels=6, input_size=(2, 3, 4), kernel_size=3, stride=2, padding=1, dilation=2, groups=2
)
generator = np.random.default_rng(0)
x3, w3, y3 = (generator.integers(-8, 9, shape) for shape in (problem.input_shape, problem.weight_shape, problem.output_shape))
left = (reference.fprop(problem, x3, w3) * y3).sum()
right = (x3 * reference.dgrad(problem, y3, w3)).sum()
print(left, right)
assert left == right

# %% [markdown]
# ## The same sum, seen from an output: gather
# A GPU thread that owns an *output* asks the question backwards: which inputs reach me? Solve the rule for the input:
#
# $$i = \frac{o + \text{padding} - t \cdot \text{dilation}}{\text{stride}}$$
#
# and this counts **only if the division is exact** and $0 \le i < \text{in}$. Most wrong kernels are wrong just here: they
# round where they must skip. The picture shows one output of a layer with kernel 3, stride 2, padding 1, and what feeds it.

# %%
layer = ct.Problem(batch=1, in_channels=1, out_channels=1, input_size=(3, 4, 5), kernel_size=3, stride=2, padding=1)
ct.plots.tap_map(layer, dimensions=1)

# %% [markdown]
# Its neighbour is fed by one tap only. Neither kind ever uses the taps of the other.

# %%
ct.plots.tap_map(layer, (1, 3, 4), dimensions=1)

# %% [markdown]
# In a plane the taps of the two axes combine, and in the volume those of all three:

# %%
ct.plots.tap_map(layer, dimensions=2)

# %%
ct.plots.tap_map(layer, dimensions=3)

# %% [markdown]
# In Jupyter with `ipywidgets` the next cell has sliders for the output voxel.

# %% tags=["remove-output"]
ct.plots.explore_taps(layer)

# %% [markdown]
# ## Residue classes
# Which taps reach an output depends only on $(o + \text{padding}) \bmod \text{stride}$: with $q = \lfloor (o + \text{padding})
# / \text{stride} \rfloor$ and $r$ the remainder, tap $t$ counts if $t \cdot \text{dilation} \equiv r \pmod{\text{stride}}$, and
# then reads input $q - (t \cdot \text{dilation} - r) / \text{stride}$. All outputs with the same remainders form a **residue
# class**. Within one class the transposed convolution is an ordinary dense stride-1 correlation, with no division and no test
# left in it. A kernel that works class by class wastes nothing.

# %%
ct.plots.residue_classes(layer)

# %% [markdown]
# The number in a cell is how many taps of the plane feed it. With stride 2 on three axes there are eight classes:

# %%
for residue_class in layer.residue_classes():
    residues = tuple(axis.residue for axis in residue_class.axes)
    print(f"residues {residues}: {residue_class.taps} taps, {residue_class.voxels} voxels")

# %% [markdown]
# When stride and dilation share a factor $g$, only remainders divisible by $g$ get any tap. With stride 2 and dilation 2 seven
# of the eight classes are the bias alone, and a kernel that knows that spends a store on them and nothing else:

# %%
dilated = ct.Problem(batch=1, in_channels=1, out_channels=1, input_size=(3, 4, 5), kernel_size=3, stride=2, padding=1, dilation=2)
ct.plots.residue_classes(dilated)

# %% [markdown]
# ## Checkerboards
# Classes with more taps sum more products. Where the kernel size is no multiple of the stride the sums are uneven, and a
# network that upsamples so tends to print a grid into its output (Odena, Dumoulin and Olah, *Deconvolution and Checkerboard
# Artifacts*, Distill, 2016). Kernel 3 with stride 2 has voxels with 1 to 8 products; kernel 4 with stride 2 has 8 everywhere
# inside:

# %%
uneven = ct.Problem.parse("n1_c1to1_i3x5x5_k3_s2_p1")  # a problem's short name, as str(problem) writes it
even = ct.Problem.parse("n1_c1to1_i3x5x5_k4_s2_p1")
ct.plots.contribution_count(uneven, even)

# %% [markdown]
# The same thing with numbers: a constant volume of ones and a weight of ones give the counts themselves.

# %%
ones = reference.fprop(layer, np.ones(layer.input_shape, int), np.ones(layer.weight_shape, int))
print(np.unique(ones, return_counts=True))
assert (ones == reference.terms("fprop", layer)).all()

# %% [markdown]
# ## Sizes, and what `output_padding` is for
# The output's size on an axis is
#
# $$\text{out} = (\text{in} - 1) \cdot \text{stride} - 2 \cdot \text{padding} + \text{dilation} \cdot (k - 1)
# + \text{output padding} + 1.$$
#
# `padding` *removes* outputs on both sides: it is the padding of the convolution whose transpose this is. A strided convolution
# maps several input sizes to one output size, so going back is ambiguous; `output_padding` says which of them is meant. It adds
# outputs at the end only. They are ordinary outputs: taps may reach them, and they are not zeros.

# %%
for output_padding in (0, 1):
    p = ct.Problem(
        batch=1, in_channels=1, out_channels=1, input_size=4, kernel_size=3, stride=2, padding=1, output_padding=output_padding
    )
    size = p.output_size[0]
    print(f"output_padding {output_padding}: 4 -> {size}; the convolution takes {size} -> {(size + 2 - 3) // 2 + 1}")

# %% [markdown]
# ## Two other views
# **Zero-stuffing.** Put `stride - 1` zeros between the inputs, pad, and convolve with the flipped weight: the same result. It
# is a fine way to think and a bad way to compute: with stride 2 about seven of eight products in a volume are with those zeros.

# %%
stuffed = np.zeros(2 * len(x) - 1, x.dtype)
stuffed[::2] = x
assert (np.convolve(stuffed, w) == scatter(x, w, stride=2)).all()  # np.convolve flips the weight
np.convolve(stuffed, w)

# %% [markdown]
# **Kernel size = stride.** Then no two copies overlap and each input owns a block of outputs: a matrix product, followed by a
# reshuffle. Decoders of 3D U-Nets use kernel 2 with stride 2.

# %%
ct.plots.tap_map(ct.Problem.parse("n1_c1to1_i1x3x5_k2_s2"), dimensions=1)

# %% [markdown]
# ## Try it
# 1. Which of kernel 3, 4, 5, 6 give a checkerboard with stride 3? Guess, then look: `ct.plots.contribution_count(...)`.
# 2. Find a problem in which a whole residue class gets no tap although the dilation is 1.
# 3. How many inputs does an axis need so that kernel 4 with stride 2 and padding 3 leaves any output at all?
#
# Next: `02_counterexamples` shows what happens to kernels that round where they must skip.
