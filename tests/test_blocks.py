"""Small blocks alone: a ring of buffers, what a warp has in common, numbers as types, quotients rounded up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.choice import backend_for
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem

Array = np.ndarray[Any, np.dtype[Any]]
TEXT = """/* convt3d
pass = "fprop"
{architectures}
[[launch]]
grid = 1
block = 32
*/
#include "convt3d.cuh"
#include "convt3d/{header}.cuh"
extern "C" __global__ void trial(float* output) {{
  int* const told = reinterpret_cast<int*>(output);
  const int lane = static_cast<int>(threadIdx.x);
  {body}
}}
"""


def told(backend: str, header: str, body: str, count: int, architectures: str = "") -> list[int]:
    """Return the numbers that a body writes to `told`, -7 where it wrote none."""
    output: Any = np.full(count, -7, np.int32)
    if backend == "cuda":
        import cupy

        output = cupy.asarray(output)
    pointer = output.data.ptr if backend == "cuda" else output.ctypes.data
    kernel = Kernel.from_source(TEXT.format(header=header, body=body, architectures=architectures), "trial")
    tensors = {"output": TensorRef(pointer, (count,), (1,))}
    run(backend_for(backend), kernel, Problem(1, 1, 1, 4, 1), "fp32", tensors, lambda name, size: 0)
    return [int(number) for number in (output.get() if backend == "cuda" else output)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_ring_goes_round_and_changes_its_parity(size: int) -> None:
    body = f"""if (lane == 0) {{
    Ring ring(640, {size});
    for (int i = 0; i < 10; ++i, ring.advance()) {{
      told[4 * i] = ring.slot;
      told[4 * i + 1] = static_cast<int>(ring.full());
      told[4 * i + 2] = static_cast<int>(ring.empty());
      told[4 * i + 3] = static_cast<int>(ring.parity);
    }}
  }}"""
    found = told("host", "pipe/ring", body, 40, 'architectures = ["sm_90a"]')
    assert found == [n for i in range(10) for n in (i % size, 640 + 8 * (i % size), 640 + 8 * (size + i % size), i // size % 2)]


def test_all_lanes_have_the_first_ones_value(backend: str) -> None:
    assert told(backend, "core/warp", "told[lane] = of_warp(lane + 5);", 32) == [5] * 32


def test_a_constant_is_a_number_that_a_lambda_is_compiled_for(backend: str) -> None:
    body = """const auto tell = [&](auto number) {
    constexpr int count = decltype(number)::value;
    int values[count + 1] = {};
    values[count] = count;
    if (lane == 0) told[count] = values[count] + 10;
  };
  tell(Constant<0>{});
  tell(Constant<3>{});"""
    assert told(backend, "core/constant", body, 4) == [10, -7, -7, 13]


def test_a_quotient_is_rounded_up(backend: str) -> None:
    body = "if (lane < 12) told[lane] = ceil_div(lane, 1 + lane % 4);"
    assert told(backend, "core/integers", body, 12) == [-(-lane // (1 + lane % 4)) for lane in range(12)]
