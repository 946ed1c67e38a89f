"""Vectors of neighbours: how they lie, on the host, and that what memory cannot access at once does not compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.backends.nvrtc import compile_cubin
from cupy_convt3d.choice import backend_for
from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.errors import CompileError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem
from cupy_convt3d.source import Instance

Array = np.ndarray[Any, np.dtype[Any]]
RULES = (Path(__file__).parents[1] / "kernels" / "include" / "convt3d" / "core" / "vector.cuh").read_text()
SIZES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
TRIAL = """/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
[[launch]]
grid = 1
block = 1
*/
#include "convt3d.cuh"
#include "convt3d/core/vector.cuh"
template <int COUNT>
__device__ void tell(int*& at) {
  Vector<COUNT> vector{};
  Words<COUNT> words[2]{};
  *at++ = static_cast<int>(sizeof vector);
  *at++ = static_cast<int>(alignof(Vector<COUNT>));
  *at++ = static_cast<int>(reinterpret_cast<char*>(&vector.element[COUNT - 1]) - reinterpret_cast<char*>(&vector));
  *at++ = static_cast<int>(reinterpret_cast<char*>(&words[1]) - reinterpret_cast<char*>(&words[0]));
  *at++ = static_cast<int>(alignof(Words<COUNT>));
}
extern "C" __global__ void trial(scalar_t* output) {
  int* at = reinterpret_cast<int*>(output);
  tell<1>(at);
  tell<2>(at);
  tell<4>(at);
  tell<8>(at);
}
"""


def told(kernel: Kernel, backend: str, dtype: str) -> Array:
    """Return what a kernel tells: for each count the size, alignment and last place of vectors, the step and alignment of words."""
    found = np.full(20, -1, np.int32)
    array: Any = found
    if backend == "cuda":
        import cupy

        array = cupy.asarray(found)
    pointer = array.data.ptr if backend == "cuda" else array.ctypes.data
    tensors = {"output": TensorRef(pointer, (found.nbytes // SIZES[dtype],), (1,))}
    run(backend_for(backend), kernel, Problem(1, 1, 1, 4, 1), dtype, tensors, lambda name, size: 0)
    return np.asarray(array.get() if backend == "cuda" else found).reshape(4, 5)


@pytest.mark.parametrize("dtype", SIZES)
def test_vectors_lie_at_a_multiple_of_their_size(backend: str, dtype: str) -> None:
    size = SIZES[dtype]
    found = told(Kernel.from_source(TRIAL, "trial"), backend, dtype)
    assert found.tolist() == [[n * size, n * size, (n - 1) * size, n * 4, n * 4] for n in (1, 2, 4, 8)]


@pytest.mark.parametrize("compiler", ["host", pytest.param("nvrtc", marks=pytest.mark.nvrtc)])
def test_three_neighbours_do_not_compile(compiler: str) -> None:
    kernel = Kernel.from_source(TRIAL.replace("tell<4>", "tell<3>"), "trial")
    with pytest.raises(CompileError, match="neighbours that move together are a power of two"):
        if compiler == "host":
            told(kernel, "host", "fp32")
        else:
            compile_cubin(Instance(kernel, "fp32"), "sm_90a")


ALIGNED = """/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
[[launch]]
grid = 1
block = 1
*/
#include "convt3d.cuh"
#include "convt3d/core/vector.cuh"
// For w and for channels: whether vectors of 2, 4 and 8.
extern "C" __global__ void trial(const View<const scalar_t> input, scalar_t* output) {
  for (int i = 0; i < 6; ++i) output[i] = to_scalar(accum_t(made_of_vectors(input, i < 3 ? 4 : 1, 2 << i % 3)));
}
"""
VIEWS = [
    ((64, 32, 16, 8, 1), 0),
    ((64, 32, 16, 4, 1), 0),
    ((64, 32, 2, 8, 1), 0),
    ((64, 33, 16, 8, 1), 0),
    ((60, 32, 16, 8, 1), 0),
    ((64, 32, 16, 8, 2), 0),
    ((64, 32, 16, 8, 1), 1),
    ((64, 32, 16, 8, 1), 4),
    ((64, 1, 16, 8, 32), 0),
    ((64, 1, 16, 8, 12), 0),
    ((64, 1, 16, 8, 32), 2),
    ((64, 1, 3, 8, 32), 8),
]


def made(kernel: Kernel, dtype: str, strides: tuple[int, ...], first: int) -> list[bool]:
    """Return what the host's kernel says of vectors of 2, 4 and 8 along w, and of channels."""
    element = DTYPES[dtype].numpy
    memory, output = np.zeros(64, np.float64), np.full(6, 9).astype(element)
    place = -(-memory.ctypes.data // 64) * 64
    tensors = {
        "input": TensorRef(place + first * SIZES[dtype], (1, 1, 1, 1, 1), strides),
        "output": TensorRef(output.ctypes.data, (6,), (1,)),
    }
    run(backend_for("host"), kernel, Problem(1, 1, 1, 4, 1), dtype, tensors, lambda name, size: 0)
    return [bool(said) for said in output.astype(np.float64)]


@pytest.mark.parametrize("dtype", SIZES)
def test_vectors_are_where_all_places_are_their_multiples(dtype: str) -> None:
    kernel = Kernel.from_source(ALIGNED, "trial")
    for strides, first in VIEWS:
        expected = [
            strides[axis] == 1 and not any(place % length for a, place in enumerate((*strides, first)) if a != axis)
            for axis in (4, 1)
            for length in (2, 4, 8)
        ]
        assert made(kernel, dtype, strides, first) == expected, (strides, first)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("static_cast<index_t>(length * sizeof(T)) == 0", "static_cast<index_t>(sizeof(T)) == 0"),
        ("axis < 5; ++axis", "axis < 4; ++axis"),
        ("int axis = 0; axis < 5", "int axis = 1; axis < 5"),
        ("axis == along || ", ""),
        ("made && view.stride[along] == 1", "made"),
    ],
)
def test_a_broken_rule_is_seen(text: str, broken: str) -> None:
    assert RULES.count(text) == 1
    right = Kernel.from_source(ALIGNED, "trial")
    wrong = right.replace_headers({"convt3d/core/vector.cuh": RULES.replace(text, broken)})
    assert any(made(right, "fp32", *view) != made(wrong, "fp32", *view) for view in VIEWS)
