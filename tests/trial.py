"""Kernels of a few lines around one device block, and what they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.choice import backend_for
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem, c_values

Array = np.ndarray[Any, np.dtype[Any]]
NCDHW, CHANNELS_LAST = (0, 1, 2, 3, 4), (0, 2, 3, 4, 1)
# The axes, the outermost first; where the first element lies; by how much a stride is too long.
Layout = tuple[tuple[int, ...], int, dict[int, int]]
POINT = Problem(1, 1, 1, 1, 1)
UNTOLD = -7
TEXT = """/* convt3d
pass = "fprop"
dtypes = {dtypes}
{declared}[[launch]]
grid = 1
block = {threads}
shared_bytes = {shared}
*/
#include "convt3d.cuh"
{includes}
extern "C" __global__ void trial(const Problem problem, const View<const scalar_t> input, const View<const scalar_t> weight,
                                 const scalar_t* bias, const View<scalar_t> output) {{
  const int* const given = reinterpret_cast<const int*>(weight.data);
  int* const told = reinterpret_cast<int*>(output.data);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  {body}
}}
"""


def around(
    headers: str, body: str, dtypes: Sequence[str] = ("fp32",), threads: int = 32, shared: int = 0, declared: str = ""
) -> Kernel:
    """Return a kernel of one block around headers; its body knows `given` and `told`, numbers at `weight` and `output`, and `lane`."""
    includes = "\n".join(f'#include "convt3d/{header}.cuh"' for header in headers.split())
    listed = str(list(dtypes)).replace("'", '"')
    text = TEXT.format(includes=includes, body=body, dtypes=listed, threads=threads, shared=shared, declared=declared)
    return Kernel.from_source(text, "trial")


def _aligned(array: Array) -> Array:
    """Return a copy whose memory begins at a multiple of 64 bytes, as a GPU's does."""
    room = np.empty(array.nbytes + 64, np.uint8)
    ahead = -room.ctypes.data % 64
    copy = room[ahead : ahead + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def written(
    kernel: Kernel,
    backend: str,
    arrays: Mapping[str, Array],
    dtype: str = "fp32",
    problem: Problem = POINT,
    views: Mapping[str, tuple[int, Sequence[int], Sequence[int]]] | None = None,
    seed: int = 0,
) -> Array:
    """Run a kernel and return all of `output`'s memory.

    Args:
        arrays: the memory of each tensor, one-dimensional.
        views: a tensor's first element, shape and strides, where it is no view of its whole memory.
        seed: of the host's order of threads.
    """
    memory: dict[str, Any] = {name: _aligned(array) for name, array in arrays.items()}
    element = memory["output"].dtype
    if backend == "cuda":
        import cupy

        memory = {name: cupy.asarray(array.view(f"u{array.itemsize}")) for name, array in memory.items()}
    tensors = {}
    for name, array in memory.items():
        first, shape, strides = (views or {}).get(name, (0, (1, 1, 1, 1, array.size), (0, 0, 0, 0, 1)))
        shape, strides = ((array.size,), (1,)) if name == "bias" else (tuple(shape), tuple(strides))
        pointer = array.data.ptr if backend == "cuda" else array.ctypes.data
        tensors[name] = TensorRef(pointer + first * array.itemsize, shape, strides)
    run(backend_for(backend), kernel, problem, dtype, tensors, lambda name, size: 0, seed=seed)
    return np.asarray(memory["output"].get().view(element) if backend == "cuda" else memory["output"])


def told(kernel: Kernel, backend: str, count: int, given: Sequence[int] = (0,), dtype: str = "fp32", seed: int = 0) -> list[int]:
    """Return the numbers that a kernel writes to `told`, UNTOLD where it wrote none."""
    arrays = {"weight": np.array(given, np.int32), "output": np.full(count, UNTOLD, np.int32)}
    return [int(number) for number in written(kernel, backend, arrays, dtype, seed=seed)]


def as_given(problems: Sequence[Problem]) -> list[int]:
    """Return problems as `given` has them: the structs of C, one behind the other."""
    return [value for problem in problems for value in c_values(problem)]


def broken(*cases: tuple[str, str]) -> pytest.MarkDecorator:
    """Give a test (right, wrong): mistakes to put into a block. Each is compiled anew, so that `make test-rest` has them."""
    return pytest.mark.parametrize(("right", "wrong"), [pytest.param(*case, marks=pytest.mark.slow) for case in cases])


def laid(
    shape: Sequence[int], order: Sequence[int], first: int = 0, longer: Mapping[int, int] | None = None
) -> tuple[tuple[int, Sequence[int], Sequence[int]], Array]:
    """Lay out a tensor in memory.

    Args:
        order: its axes, the outermost first.
        first: where its first element lies.
        longer: by how much an axis's stride is too long.

    Returns:
        The view, as `written` takes it, and where each element lies.
    """
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step + (longer or {}).get(axis, 0)
        step = strides[axis] * shape[axis]
    return (first, shape, strides), first + np.tensordot(strides, np.indices(shape), 1)
