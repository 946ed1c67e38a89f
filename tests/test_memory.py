"""Accesses outside of tensors, workspaces and shared memory end an example of the default check, which names their class."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from selection import some

from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.check.examples import draw_example
from cupy_convt3d.lab.run.verify import APART, LATE
from cupy_convt3d.lab.run.worker import Worker
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernel

SPECIMENS = Path(__file__).parent / "specimens"
_GATHER = (SPECIMENS / "read_outside.cu").read_text()
_GATHER = _GATHER.replace("return moved / stride;", "return moved / stride < size ? moved / stride : -1;")
_SHARED = (SPECIMENS / "shared_outside.cu").read_text().replace("partial[63]", "partial[64]")
_SPACE = _GATHER.replace("[[launch]]", '[workspace]\nspace = "64"\n[[launch]]').replace("float* output,", "float* output, float* space,")
_SUM, _STORE, _PARTIAL = "float sum = bias", "  output[((1LL * n", "  partial[thread] = sum;"
_HALVED = _SHARED.replace("partial[64]", "whole[32]").replace(_PARTIAL, f"  float* const partial = whole;\n{_PARTIAL}")


def _reads(place: str) -> tuple[str, str]:
    return _SUM, f"float sum = {place} == 12345.0f ? 1.0f : bias"


def _index(value: int, array: str) -> str:
    return rf"out of bounds: index {value} of '{array}', past the end of an array, at planted.cu:\d+ by thread \(\d+, 0, 0\)"


def _writes(statement: str) -> tuple[str, str]:
    return _STORE, f"  if (number == 0) {statement};\n{_STORE}"


_VECTOR = _SUM, "const float2 two = *reinterpret_cast<const float2*>(weight);\n  float sum = two.x + two.y == 12345.0f ? 1.0f : bias"
# Source, what is planted (the text and what comes in its place), and what the message says.
CASES = {
    "read before": (_GATHER, _reads("input[-1]"), r"out of bounds: read \d+ bytes before the first page of input"),
    "read behind": (_GATHER, _reads("input[4LL * batch * in_channels]"), r"out of bounds: read \d+ bytes behind the last page of input"),
    "bias behind": (_GATHER, _reads("bias[out_channels]"), r"out of bounds: read \d+ bytes behind the last page of bias"),
    "read far outside": (_GATHER, _reads("weight[1 << 28]"), r"out of bounds: read 107\d{7} bytes behind the last page of weight"),
    "write before": (_GATHER, _writes("output[-1] = 3"), r"out of bounds: .*output"),
    "write far outside": (_GATHER, _writes("output[-(1 << 26)] = 3"), r"out of bounds: write \d+ bytes before the first page of output"),
    "misaligned vector": (_GATHER, _VECTOR, r"misaligned access: .* at planted.cu:\d+ by thread \(0, 0, 0\) of block \(0, 0, 0\)"),
    "workspace behind": (_SPACE, _writes("space[64] = 3"), r"out of bounds: .*(space|workspace)"),
    "workspace index": (_SPACE, _writes("space[static_cast<int>(3u << 30)] = 3"), r"out of bounds: write \d+ bytes before .* of space"),
    "shared, halved": (_HALVED, (_PARTIAL, _PARTIAL), "out of bounds: shared memory was written 0 bytes behind .* whole"),
    "shared, far": (_SHARED, (_PARTIAL, f"{_PARTIAL} (&partial[0])[1 << 17] = 1;"), "out of bounds: write beside shared memory"),
    "shared, index": (_SHARED, ("partial[64]", "partial[32]"), _index(32, "float \\[32\\]")),
    "array, read": (_GATHER, (_SUM, "float x[2][3] = {}, sum = x[0][batch + 1]; sum += bias"), _index(3, "float \\[3\\]")),
    "array, below": (_GATHER, (_SUM, "int x[4] = {}; float sum = x[kernel_d - 2]; sum += bias"), _index(-1, "int \\[4\\]")),
    "member array": (
        _GATHER,
        (_SUM, "struct { int x[4], y; } s = {}; s.x[kernel_d + 3] = 1; float sum = s.y; sum += bias"),
        _index(4, "int \\[4\\]"),
    ),
    "dynamic shared": (
        _SHARED.replace("block = 64", "block = 64\nshared_bytes = 128"),
        ("__shared__ float partial[64]", "extern __shared__ float partial[]"),
        "behind the end of dynamic shared memory, which has 128",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some(CASES, 2))
def test_what_lies_outside_is_caught_with_its_class(name: str) -> None:
    right, (old, new), says = CASES[name]
    assert old in right
    problem, messages = Problem.parse("n2_c2to2_i1x2x2_k1_bias"), []
    with Worker(Kernel.from_source(right.replace(old, new), "planted"), "host", optimize=False) as worker:
        for seed in (0, *range(LATE, LATE + 24)):
            outcome = worker.verify(problem, "fp32", "exact", seed)
            messages.append(outcome.message)
            if re.search(says, outcome.message):
                return
    raise AssertionError(messages)


@pytest.mark.parametrize("source", [_GATHER, _SHARED, _SPACE], ids=["tensors", "shared", "workspace"])
def test_the_same_kernels_without_a_plant_pass(source: str) -> None:
    with Worker(Kernel.from_source(source, "right"), "host", optimize=False) as worker:
        for seed in (0, *range(LATE, LATE + 24)):
            outcome = worker.verify(Problem.parse("n2_c2to2_i1x2x2_k1_bias"), "fp32", "exact", seed)
            assert outcome.ok, outcome.message
        assert worker.restarts == 0


def test_an_example_of_many_pages_keeps_them_until_it_has_run() -> None:
    """Its output has 100 MB: planes taken out from between the others."""
    problem = Problem.parse("n1_c1to32_i43x3x3_k5x1x1_s3x1x4_p2x1x0_op1x0x3_d1x1x3_bias")
    with Worker(kernel("fprop_gather"), "host") as worker:
        outcome = worker.verify(problem, "fp64", "exact_wide", 118449)
    assert outcome.ok, outcome.message


def test_random_seeds_are_of_every_kind_of_layout() -> None:
    drawn = [draw_example(kernel("fprop_gather"), f"seeds/{number}") for number in range(100)]
    seeds = [example.seed for example in drawn if example is not None]
    for first, end in ((0, APART), (APART, LATE), (LATE, 2 * LATE)):
        assert sum(first <= seed < end for seed in seeds) >= 10, (first, end)
