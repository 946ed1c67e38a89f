"""Vectors of neighbours: how they lie, on the host, and that what memory cannot access at once does not compile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.backends.nvrtc import compile_cubin
from cupy_convt3d.choice import backend_for
from cupy_convt3d.errors import CompileError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem
from cupy_convt3d.source import Instance

Array = np.ndarray[Any, np.dtype[Any]]
SIZES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
TRIAL = """/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
[[launch]]
grid = 1
block = 1
*/
#include "convt3d.cuh"
#include "convt3d/vector.cuh"
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
