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
# # Five kernels and their minimal counterexamples
# Each of five tries at a custom CUDA kernel for `nn.ConvTranspose3d` (systems 000 to 004 of the README) has mistakes that a
# test on one shape can miss. Each *mistake* was rebuilt here as a small kernel that is right in everything else: a
# **specimen**. This notebook runs the check on them. For each it finds a failing problem and shrinks it until nothing can be
# made smaller; what is left points at the mistake.

# %%
import re
from pathlib import Path

import cupy_convt3d as ct

SPECIMENS = Path("../tests/specimens")


def mistake(name):
    return (SPECIMENS / f"{name}.cu").read_text().splitlines()[0].removeprefix("// Mistake: ")


def counterexample(name):
    report = ct.check(SPECIMENS / f"{name}.cu", backend="host", examples=100)
    assert not report.passed, f"{name} slipped through"
    print(mistake(name))
    print(report)


# %% [markdown]
# ## One shape proves little
# Systems 000 and 001 ask for a layer with stride 1, no padding and as many output as input channels. On such a layer these
# three wrong kernels give the exact result:

# %%
own = ct.Problem(batch=1, in_channels=2, out_channels=2, input_size=3, kernel_size=3)
for name in ("s000_truncating_index", "s000_weight_stride", "s001_input_index"):
    print(name, "passes on", own, ct.check(SPECIMENS / f"{name}.cu", backend="host", problem=own).passed)

# %% [markdown]
# ## System 000: rounding where it must skip
# Input `i` and tap `t` feed output `o = i*stride - padding + t*dilation`. Solved for `i` that is a division, and where it is
# not exact, the tap does not reach the output. This kernel divides and rounds towards zero instead. And in the same line it
# counts the padding twice.

# %%
counterexample("s000_truncating_index")

# %% [markdown]
# Read the name of the problem: `n1_c1to1` is one volume and one channel, `i..` the input's size, `k..` the kernel's, `s..` the
# stride; what is not named has its least value. Everything that does not matter has shrunk away. What is left is one input,
# three taps on one axis and a padding of 1: the smallest layer in which a padding counted twice picks the wrong tap. The
# missing test of divisibility needs a stride. On a layer with stride 2 and *no* padding the error map shows it alone: outputs
# between the lattice points collect products that are not theirs. Red is out of bound.

# %%
ct.plots.error_map(SPECIMENS / "s000_truncating_index.cu", ct.Problem.parse("n1_c1to1_i3x6x8_k3_s2"), backend="host")

# %% [markdown]
# The same system multiplies the wrong channel count into the weight's offset. It shows as soon as the numbers of input and
# output channels differ, whatever the stride, and the counterexample says exactly that. It also ignores `groups`:

# %%
counterexample("s000_weight_stride")

# %%
counterexample("s000_groups_ignored")

# %% [markdown]
# And its first version computed the batch index from the block's own size, so that all volumes but the first are left as they
# were. Tests that fill the output with zeros beforehand may take that for a small error; ours fill it with NaN.

# %%
counterexample("s000_batch_index")

# %% [markdown]
# ## System 001: a bias that is not there
# The index makes the same slip with the padding, and subtracts `output_padding` where it has no place; the check again finds
# the padding first. The other mistake is of a kind that no test in fp32 can see: a kernel for fp64 reads its bias as fp32. It
# takes a bias and another element type to fail.

# %%
counterexample("s001_input_index")

# %%
counterexample("s001_fp32_bias")

# %% [markdown]
# ## System 002: a corner of the output
# One block index serves for depth, height and width at once, and the number of blocks is divided by 8 once for each axis.
# Blocks of 8 voxels on a side then lie along the diagonal of the volume, too few of them, and most of the output is never
# written. On the map below NaN (pink) is memory that the kernel did not touch.

# %%
counterexample("s002_same_block_index")

# %%
ct.plots.error_map(SPECIMENS / "s002_same_block_index.cu", ct.Problem.parse("n1_c1to1_i2x18x26_k3"), backend="host")

# %% [markdown]
# Its other mistake is that the weight is read as (out, in, ...), the layout of an ordinary convolution. A transposed
# convolution keeps the *input* channels first, (in, out / groups, kD, kH, kW), because it is the transpose of the convolution
# that owns the weight.

# %%
counterexample("s002_weight_layout")

# %% [markdown]
# ## System 003: groups
# The layer has four groups and different sizes on every axis. The number of output channels is taken from the weight's second
# dimension, which holds only those of one group:

# %%
counterexample("s003_out_channels")

# %% [markdown]
# ## System 004: one index, moved
# The input index is computed once for an output and then moved by `t*dilation - padding` from tap to tap. The tap is added
# where it must be subtracted, as in an ordinary convolution. Two taps on one axis are enough to see it. The second mistake
# takes the output channel from a block index that also tiles the height:

# %%
counterexample("s004_index_moved")

# %%
counterexample("s004_channel_from_y")

# %% [markdown]
# ## Mistakes without a wrong formula
# A missing barrier, a race, a read one past the end: these can give right results by luck. On the host the threads of a block
# run a second time in a shuffled order, tensors lie between guard bands of NaN, and a kernel that hangs or crashes does so in a
# child process.

# %%
for name in ("missing_barrier", "race", "read_outside", "write_outside", "hang", "crash"):
    report = ct.check(SPECIMENS / f"{name}.cu", backend="host", examples=50, time_limit_s=1.0)
    assert not report.passed
    print(f"{name:16} {report.counterexample.problem}: {report.counterexample.message}")

# %% [markdown]
# ## All of them
# Every specimen, its mistake, and the smallest problem that shows it:

# %%
rows = []
for file in sorted(SPECIMENS.glob("s00*.cu")):
    report = ct.check(file, backend="host", examples=100)
    assert not report.passed
    rows.append((file.stem, str(report.counterexample.problem), re.sub(r" \(system \d+\)\.", "", mistake(file.stem))))
width = max(len(name) for name, _, _ in rows)
for name, problem, text in rows:
    print(f"{name:{width}}  {problem:34}  {text}")

# %% [markdown]
# Two habits follow. Test over *all* parameters, since each mistake hides where its parameter has its default. And let the
# failing case shrink: `n1_c1to2` with everything else at one says "channel counts" louder than any stack trace.
#
# Next: `03_ladder` looks at what makes right kernels quick or slow; `04_your_own_kernel` lets you write one.
