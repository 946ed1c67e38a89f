"""Cells alone: what packing reads of a weight, and the exact bits that it makes of it, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trial import written

from cupy_convt3d.backends.nvrtc import compile_cubin
from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.errors import CompileError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem
from cupy_convt3d.source import Instance

Array = np.ndarray[Any, np.dtype[Any]]
HEADER = "convt3d/core/cell.cuh"
TEXT = (Path(__file__).parents[1] / "kernels" / "include" / HEADER).read_text()
CELLS = 3
TRIAL = """/* convt3d
pass = "fprop"
dtypes = ["tf32", "tf32x3", "bf16", "fp16"]
[[launch]]
grid = 1
block = 3
*/
#include "convt3d.cuh"
#include "convt3d/core/cell.cuh"
// A thread's cell, without channel 0: rounded by default, its low part, rounded with ties away from zero, and as the only one.
extern "C" __global__ void trial(const Problem problem, const View<const scalar_t> weight, scalar_t* output) {
  const int ci = static_cast<int>(threadIdx.x) * VECTOR;
  scalar_t values[VECTOR];
  load_weight_cell(values, weight, ci, 1, 0, 0, 1, problem.in_channels - ci, ci == 0 ? 1 : 0);
  Cell* const cells = reinterpret_cast<Cell*>(output) + threadIdx.x * 4;
  Cell low{};
  make_cell(values, cells[0], cells[1]);
  make_cell<round_to_tf32>(values, cells[2], low);
  if constexpr (PARTS == 1) cells[3] = cell_of(values);
}
"""
# The last bits kept and lost; ties, past the largest TF32 number, subnormal, no number.
BITS = (0x3F801000, 0x3F801001, 0x3F800FFF, 0xBF803000, 0xC2F6E979, 0x7F7FFFFF, 0xFF7FE000, 0x00001000, 0x80000001, 0x7F800000)


def tf32(values: Array, even: bool) -> Array:
    """Round fp32 numbers to TF32, ties away from zero or to even; what is not finite stays."""
    bits = values.astype(np.float32).view(np.uint32)
    half = 0xFFF + (bits >> 13 & 1) if even else np.uint32(0x1000)
    return np.where(np.isfinite(values), (bits + half) & 0xFFFFE000, bits).astype(np.uint32)


def cells_of(kernel: Kernel, backend: str, dtype: str) -> tuple[Array, Array]:
    """Return the words of the cells that a kernel makes, and those of NumPy."""
    element = DTYPES[dtype].numpy
    vector = 16 // np.dtype(element).itemsize
    channels, even = 2 * vector + 1, False
    weight = np.random.default_rng(1).standard_normal((channels, 2, 1, 1, 2)).astype(np.float32)
    weight.view(np.uint32)[1:, 1, 0, 0, 1] = np.resize(np.array(BITS if vector == 4 else BITS[:5], np.uint32), channels - 1)
    weight = weight.astype(element)
    if backend == "cuda":
        import cupy

        even = int(cupy.cuda.Device().compute_capability) >= 90
    arrays = {"weight": weight.view(f"u{weight.itemsize}").ravel(), "output": np.full(CELLS * 16, 0x55555555, np.uint32)}
    views = {"weight": (0, weight.shape, (4, 2, 2, 2, 1))}
    output = written(kernel, backend, arrays, dtype, Problem(1, channels, 2, 1, (1, 1, 2)), views)
    values = np.zeros(CELLS * vector, element)
    values[1:channels] = weight[1:, 1, 0, 0, 1]
    expected = np.full((4, CELLS, 4), 0x55555555, np.uint32)
    if vector == 8:
        expected[[0, 2, 3]] = values.view(np.uint32).reshape(CELLS, 4)
    elif dtype == "tf32":
        expected[[0, 2, 3]] = np.stack([tf32(values, even), tf32(values, False), tf32(values, even)]).reshape(3, CELLS, 4)
    else:
        high = tf32(values, even)
        high = np.where(np.isfinite(high.view(np.float32)), high, high & np.uint32(0xBFFFFFFF))
        with np.errstate(over="ignore"):
            expected[[0, 2]] = high.reshape(CELLS, 4)
            expected[1] = tf32(values - high.view(np.float32), even).reshape(CELLS, 4)
    return output.reshape(CELLS, 4, 4), expected.transpose(1, 0, 2)


@pytest.mark.parametrize("dtype", ["tf32", "tf32x3", "bf16", "fp16"])
def test_cells_are_those_of_numpy(backend: str, dtype: str) -> None:
    found, expected = cells_of(Kernel.from_source(TRIAL, "trial"), backend, dtype)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("text", "broken", "dtype"),
    [
        ("values[v].bits | static_cast<unsigned>(values[v + 1]", "values[v + 1].bits | static_cast<unsigned>(values[v]", "bf16"),
        ("high.element[v] = round(values[v]);", "high.element[v] = __float_as_uint(values[v]);", "tf32"),
        ("split_tf32(values[v], high.element[v], low.element[v]);", "split_tf32(values[v], low.element[v], high.element[v]);", "tf32x3"),
        ("begin <= v && v < end ? *source", "v < end ? *source", "fp16"),
        ("begin <= v && v < end ? *source", "begin <= v && v <= end ? *source", "tf32"),
        ("weight.at(ci, co, d, h, w)", "weight.at(ci, co, d, h, 0)", "fp16"),
        ("weight.stride[0] * static_cast", "weight.stride[1] * static_cast", "fp16"),
    ],
)
def test_a_broken_cell_is_seen(text: str, broken: str, dtype: str) -> None:
    assert TEXT.count(text) == 1
    kernel = Kernel.from_source(TRIAL, "trial").replace_headers({HEADER: TEXT.replace(text, broken)})
    assert not np.array_equal(*cells_of(kernel, "host", dtype))


@pytest.mark.parametrize("compiler", ["host", pytest.param("nvrtc", marks=pytest.mark.nvrtc)])
@pytest.mark.parametrize(
    ("text", "wrong", "dtype", "why"),
    [
        ("if constexpr (PARTS == 1) ", "", "tf32x3", "the low part of tf32x3 would be lost"),
        ('"fp16"', '"fp16", "fp64"', "fp64", "fp64 has no cells"),
    ],
)
def test_what_no_cell_can_hold_does_not_compile(compiler: str, text: str, wrong: str, dtype: str, why: str) -> None:
    kernel = Kernel.from_source(TRIAL.replace(text, wrong), "trial")
    with pytest.raises(CompileError, match=why):
        if compiler == "host":
            cells_of(kernel, "host", dtype)
        else:
            compile_cubin(Instance(kernel, dtype), "sm_90a")
