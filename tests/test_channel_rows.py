"""The block of rows of channels alone: whether an input lies in whole vectors already, and the rows it is laid out as, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.choice import backend_for
from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem

Array = np.ndarray[Any, np.dtype[Any]]
HEADER = "convt3d/pipe/channel_rows.cuh"
TEXT = (Path(__file__).parents[1] / "kernels" / "include" / HEADER).read_text()
TRIAL = """/* convt3d
pass = "fprop"
dtypes = ["fp32", "bf16", "fp16", "fp64"]
[constants]
vector = "16 // itemsize"
row_channels = "ceil_div(in_channels_per_group, vector) * vector"
voxels = "batch * input_voxels"
row_vectors = "voxels * groups * row_channels // vector"
[[launch]]
grid = "ceil_div(row_vectors, 32)"
block = 32
*/
#include "convt3d.cuh"
#include "convt3d/pipe/channel_rows.cuh"
// The rows, and behind them whether the input lay so.
extern "C" __global__ void trial(const Problem problem, const View<const scalar_t> input, scalar_t* output, const int voxels,
                                 const int row_channels, const int row_vectors) {
  const int index = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  if (index >= row_vectors) return;
  lay_in_rows(problem, input, reinterpret_cast<RowVector*>(output), index, voxels, row_channels);
  if (index == 0) output[row_vectors * ROW_VECTOR] = to_scalar(accum_t(lies_in_rows(problem, input)));
}
"""
SHAPES = {"a channel": (1, 1, (2, 1, 3), 1), "odd": (2, 5, (3, 2, 2), 1), "odd groups": (2, 27, (1, 2, 3), 3)} | {
    "whole vectors": (2, 16, (2, 3, 1), 1),
    "groups of whole vectors": (3, 32, (1, 2, 2), 2),
    "groups share vectors": (2, 24, (2, 1, 2), 2),  # in 16 bits
    "a voxel an image": (7, 24, (1, 1, 1), 1),
    "an image": (1, 40, (2, 2, 3), 1),
}
# The axes, the outermost first; where the first element lies; by how much a stride is too long.
LAYOUTS: dict[str, tuple[tuple[int, ...], int, dict[int, int]]] = {
    "ncdhw": ((0, 1, 2, 3, 4), 0, {}),
    "channels_last": ((0, 2, 3, 4, 1), 0, {}),
    "one element on": ((0, 2, 3, 4, 1), 1, {}),
    "a vector on": ((0, 2, 3, 4, 1), 8, {}),
    "vectors between voxels": ((0, 2, 3, 4, 1), 0, {4: 8, 3: 16, 2: 8, 0: 24}),
    **{f"a gap along {axis}": ((0, 2, 3, 4, 1), 0, {number: 1}) for number, axis in ((0, "n"), (2, "d"), (3, "h"), (4, "w"))},
    "channels a vector apart": ((0, 2, 3, 4, 1), 0, {1: 7}),
    "images innermost": ((2, 3, 4, 1, 0), 0, {}),
    "voxels of an image apart": ((0, 1, 2, 3, 4), 3, {1: 5, 4: 1}),
}


def laid_out(kernel: Kernel, backend: str, dtype: str, shape: str, layout: str) -> tuple[Array, Array, bool, bool]:
    """Return the rows as a kernel lays them and as NumPy does, whether the kernel says that they lay so, and whether they did."""
    batch, channels, size, groups = SHAPES[shape]
    order, first, longer = LAYOUTS[layout]
    element, sizes = DTYPES[dtype].numpy, (batch, channels, *size)
    strides, step = [0] * 5, 1
    for axis in reversed(order):
        strides[axis] = step + longer.get(axis, 0)
        step = strides[axis] * sizes[axis]
    vector = 16 // np.dtype(element).itemsize
    own = channels // groups
    padded = -(-own // vector) * vector
    values = np.random.default_rng(1).integers(1, 120, sizes)
    places = first + np.tensordot(strides, np.indices(sizes), 1)
    memory = np.full(int(places.max()) + 4096, 125).astype(element)
    memory[places] = values.astype(element)
    rows = np.zeros((groups, batch * size[0] * size[1] * size[2], padded))
    by_voxel = np.moveaxis(values.reshape(batch, groups, own, *size), (1, 2), (0, 5))
    rows[..., :own] = by_voxel.reshape(groups, -1, own)
    output = np.full(rows.size + 1, 126).astype(element)
    arrays: dict[str, Any] = {"input": memory, "output": output}
    if backend == "cuda":
        import cupy

        arrays = {name: cupy.asarray(array.view(f"u{array.itemsize}")) for name, array in arrays.items()}
    pointers = {name: array.data.ptr if backend == "cuda" else array.ctypes.data for name, array in arrays.items()}
    assert not any(pointer % 16 for pointer in pointers.values())
    tensors = {
        "input": TensorRef(pointers["input"] + first * memory.itemsize, sizes, tuple(strides)),
        "output": TensorRef(pointers["output"], output.shape, (1,)),
    }
    problem = Problem(batch, channels, groups, size, 1, groups=groups)
    run(backend_for(backend), kernel, problem, dtype, tensors, lambda name, size: 0)
    if backend == "cuda":
        output = arrays["output"].get().view(element)
    lies = own % vector == 0 and strides[1] == 1 and not np.any(places[:, ::vector] % vector)
    return output[:-1].astype(np.float64).reshape(rows.shape), rows, bool(output[-1]), lies


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_rows_are_those_of_numpy(backend: str, dtype: str, shape: str) -> None:
    kernel = Kernel.from_source(TRIAL, "trial")
    for layout in LAYOUTS:
        found, expected, said, lies = laid_out(kernel, backend, dtype, shape, layout)
        np.testing.assert_array_equal(found, expected, err_msg=layout)
        assert said == lies, layout


@pytest.mark.parametrize(
    ("dtype", "lying"),
    [
        ("fp32", {"whole vectors", "groups of whole vectors", "groups share vectors", "a voxel an image", "an image"}),
        ("bf16", {"whole vectors", "groups of whole vectors", "a voxel an image", "an image"}),
    ],
)
def test_dense_channels_last_lies_in_rows_where_vectors_are_whole(dtype: str, lying: set[str]) -> None:
    kernel = Kernel.from_source(TRIAL, "trial")
    assert {shape for shape in SHAPES if laid_out(kernel, "host", dtype, shape, "channels_last")[2]} == lying


@pytest.mark.parametrize(
    ("text", "broken"),
    [  # nothing that writes outside of the rows: the tests' process goes on
        ("problem.in_channels / problem.groups % ROW_VECTOR == 0 &&", "problem.in_channels % ROW_VECTOR == 0 &&"),
        ("reinterpret_cast<unsigned long long>(input.data) % 16 == 0", "input.data != nullptr"),
        ("(problem.batch == 1 || input.stride[0] % ROW_VECTOR == 0)", "true"),
        ("for (int a = 0; a < 3; ++a) rows", "for (int a = 1; a < 3; ++a) rows"),
        ("problem.input_size[a] == 1 || ", ""),
        ("bool rows = input.stride[1] == 1 && ", "bool rows = "),
        ("first + e < channels ? *from", "first + e <= channels ? *from"),
        ("voxels_first ? index / voxels % cells", "voxels_first ? index % cells"),
        ("group * channels + first,", "group * row_channels + first,"),
        ("row / size[2] % size[1], row % size[2])", "row % size[1], row / size[1] % size[2])"),
        ("(static_cast<index_t>(group) * voxels + row)", "(static_cast<index_t>(row) * problem.groups + group)"),
    ],
)
def test_a_broken_block_is_seen(text: str, broken: str) -> None:
    assert TEXT.count(text) == 1
    kernel = Kernel.from_source(TRIAL, "trial").replace_headers({HEADER: TEXT.replace(text, broken)})
    seen = []
    for shape in SHAPES:
        for layout in LAYOUTS:
            found, expected, said, lies = laid_out(kernel, "host", "bf16", shape, layout)
            seen.append(said != lies or not np.array_equal(found, expected))
    assert any(seen)
