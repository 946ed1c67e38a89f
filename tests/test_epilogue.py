"""The epilogue block alone: sums of every element type with a bias and without, against NumPy, which rounds once."""

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
HEADER = "convt3d/epilogue/epilogue.cuh"
TEXT = (Path(__file__).parents[1] / "kernels" / "include" / HEADER).read_text()
WAYS = 6
TRIAL = """/* convt3d
pass = "fprop"
dtypes = ["fp64", "fp32", "fp16", "bf16"]
[[launch]]
grid = 1
block = "output_numel"
*/
#include "convt3d.cuh"
#include "convt3d/epilogue/epilogue.cuh"
// A thread has a channel, and the sums of this one and the next; what becomes of them lies in `output` way after way.
extern "C" __global__ void trial(const Problem problem, const accum_t* input, const scalar_t* bias, scalar_t* output) {
  const Epilogue epilogue{bias};
  const int c = static_cast<int>(threadIdx.x), channels = problem.out_channels;
  const accum_t sum = input[c], next = input[(c + 1) % channels], start = epilogue.start(c);
  const Vector<2> pair = epilogue.finish_pair(sum, next);
  output[c] = epilogue.finish(epilogue.start(c) + sum);
  output[channels + c] = epilogue.finish(sum, start);
  output[2 * channels + c] = pair.element[0];
  output[3 * channels + c] = pair.element[1];
  output[4 * channels + c] = epilogue.untouched(c);
  output[5 * channels + c] = epilogue.finish(epilogue.start(c == 0 ? c : 1 << 30, c == 0));  // others are not read
}
"""
# Sums that are rounded up alone and down with their bias, numbers past the largest and below the smallest, what has no value.
SUMS = (1.0, 1 + 3 * 2**-9, 1 + 3 * 2**-12, 3 + 3 * 2**-8, -(1 + 2**-9 + 2**-20), 65519.0, 65520.0, -1e5, 3e38, 6e-8, 1e-40, 0.0, -0.0)
SPECIAL = (float("inf"), float("-inf"), float("nan"))
BIASES = (0.25, -(2**-9), -(2**-12), -0.5, 2**-9, 1.0, -1.0, 7.0, -3e4, 0.0, 1e-3, -0.0, 0.0, 1.0, 1.0, 1.0)


def finished(kernel: Kernel, backend: str, dtype: str, biased: bool) -> tuple[Array, Array]:
    """Return what a kernel makes of the sums, way after way, and what NumPy makes of them."""
    element = DTYPES[dtype].numpy
    accumulated = np.dtype(np.float64 if dtype == "fp64" else np.float32)
    sums, bias = np.array(SUMS + SPECIAL, accumulated), np.array(BIASES).astype(element)
    output = np.full(WAYS * sums.size, 99, element)
    arrays: dict[str, Any] = {"input": sums, "output": output, **({"bias": bias} if biased else {})}
    if backend == "cuda":
        import cupy

        arrays = {name: cupy.asarray(array.view(f"u{array.itemsize}")) for name, array in arrays.items()}
    pointers = {name: array.data.ptr if backend == "cuda" else array.ctypes.data for name, array in arrays.items()}
    tensors = {name: TensorRef(pointers[name], array.shape, (1,)) for name, array in arrays.items()}
    problem = Problem(1, 1, sums.size, 1, 1)
    run(backend_for(backend), kernel, problem, dtype, tensors, lambda name, size: 0)
    if backend == "cuda":
        output = arrays["output"].get().view(element)
    with np.errstate(over="ignore"):
        start = bias.astype(accumulated) if biased else np.zeros_like(sums)
        added, alone = (start + sums).astype(element), sums.astype(element)
        first = np.where(np.arange(sums.size) == 0, start, 0).astype(element)
    expected = [added, added, alone, np.roll(alone, -1), start.astype(element), first]
    return output, np.concatenate(expected)


def same(found: Array, expected: Array) -> bool:
    """Whether both have the same numbers, and zeros of the same sign, and NaN in the same places."""
    one, other = found.astype(np.float64), expected.astype(np.float64)
    return np.array_equal(one, other, equal_nan=True) and not np.any((np.signbit(one) != np.signbit(other)) & ~np.isnan(one))


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
def test_a_sum_gets_its_bias_and_is_rounded_once(backend: str, dtype: str, biased: bool) -> None:
    assert same(*finished(Kernel.from_source(TRIAL, "trial"), backend, dtype, biased))


@pytest.mark.parametrize(
    ("text", "broken", "biased"),
    [
        ("return finish(start + sum);", "return finish(to_accum(to_scalar(sum)) + start);", True),
        ("return finish(start + sum);", "return finish(sum);", True),
        ("{{finish(first), finish(second)}}", "{{finish(second), finish(first)}}", False),
        ("to_scalar(accum_t(0)) : bias[channel]", "to_scalar(accum_t(0)) : to_scalar(accum_t(0))", True),
        ("added(channel) : accum_t(0);", "added(channel) : accum_t(1);", False),
        ("return to_accum(bias[channel]);", "return to_accum(bias[0]);", True),
    ],
    ids=["rounded twice", "no bias", "the pair's other order", "nothing where no tap reaches", "begins with 1", "the first bias"],
)
def test_a_broken_epilogue_is_seen(text: str, broken: str, biased: bool) -> None:
    assert TEXT.count(text) == 1
    kernel = Kernel.from_source(TRIAL, "trial").replace_headers({HEADER: TEXT.replace(text, broken)})
    assert not same(*finished(kernel, "host", "bf16", biased))


WRONG = [
    ("finish(to_scalar(sum))", "fp16"),
    ("finish(to_scalar(sum), start)", "bf16"),
    ("finish_pair(to_scalar(sum), to_scalar(next)).element[0]", "fp16"),
    ("finish(1)", "fp32"),
    ("finish(1.0f)", "fp64"),
]


@pytest.mark.parametrize(("wrong", "dtype"), WRONG)
@pytest.mark.parametrize("compiler", ["host", pytest.param("nvrtc", marks=pytest.mark.nvrtc)])
def test_what_is_no_sum_is_not_finished(compiler: str, wrong: str, dtype: str) -> None:
    kernel = Kernel.from_source(TRIAL.replace("epilogue.finish(sum, start)", f"epilogue.{wrong}"), "trial")
    with pytest.raises(CompileError, match="a sum is finished as accum_t: one that was rounded before would be rounded twice"):
        if compiler == "host":
            finished(kernel, "host", dtype, True)
        else:
            compile_cubin(Instance(kernel, dtype), "sm_90a")
