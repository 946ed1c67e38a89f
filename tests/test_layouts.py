"""Binaries for the layout of the output: what is promised of which tensors, who is told, and what finds a promise that is not kept."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cupy_convt3d as ct
from cupy_convt3d import cost, registry, trials, tuning
from cupy_convt3d.backends.base import Prepared, TensorRef, output_layout
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.errors import KernelError, LaunchError
from cupy_convt3d.kernel import ANY_STRIDES, CHANNELS_LAST, CONTIGUOUS, Kernel, Plan
from cupy_convt3d.lab.population import population
from cupy_convt3d.problem import LAYOUTS, Problem
from cupy_convt3d.source import Instance

# It writes the layout that its binary is made for.
SOURCE = """/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[specialize]
OUTPUT_LAYOUT = "output_layout"
[[launch]]
grid = "ceil_div(output_numel, 64)"
block = 64
*/
#include "convt3d.cuh"
#include "convt3d/core/layout.cuh"
#include "convt3d/core/specialized.cuh"
extern "C" __global__ void trial(const Problem problem, View<scalar_t> output, const long long output_numel) {
  const int layout = OUTPUT_LAYOUT ? SPECIALIZED(OUTPUT_LAYOUT, layout_of(problem, output)) : 0;
  lay_out(problem, output, layout);
  const int (&size)[3] = problem.output_size;
  index_t i = blockIdx.x * 64LL + threadIdx.x;
  if (i >= output_numel) return;
  const index_t w = i % size[2], h = (i /= size[2]) % size[1], d = (i /= size[1]) % size[0], channel = i / size[0];
  *output.at(channel / problem.out_channels, channel % problem.out_channels, d, h, w) = layout;
}
"""
TRIAL = Kernel.from_source(SOURCE, "trial")
HOST = HostBackend()


def problem_with_output(shape: tuple[int, ...]) -> Problem:
    return Problem.from_shapes((shape[0], 1, *shape[2:]), (1, shape[1], 1, 1, 1))


def written(strides: tuple[int, ...], problem: Problem, late: int = 0, prepared: Prepared | None = None) -> set[float]:
    """Return what TRIAL writes to an output of these strides that begins so many elements late."""
    shape = problem.output_shape
    span = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    memory = np.full(span + 8, np.nan, np.float32)
    memory = memory[-memory.ctypes.data % 16 // 4 :]
    prepared = prepared or Prepared(HOST, TRIAL, problem, "fp32", {"output": TensorRef(0, shape, strides)})
    prepared.launch({"output": memory.ctypes.data + 4 * late})
    view = np.lib.stride_tricks.as_strided(memory[late:], shape, [4 * step for step in strides])
    return set(np.unique(view).tolist())


@st.composite
def outputs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes with axes of size 1, and strides: of torch's formats, of others, and of parts of larger tensors."""
    shape = tuple(draw(st.lists(st.sampled_from((1, 1, 2, 3, 4)), min_size=5, max_size=5)))
    order = draw(st.sampled_from(((0, 1, 2, 3, 4), (0, 2, 3, 4, 1))) | st.permutations(range(5)))
    gaps = draw(st.just([0] * 5) | st.lists(st.integers(0, 2), min_size=5, max_size=5))
    strides, step = [0] * 5, 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis] + gaps[axis]
    for axis in draw(st.sets(st.integers(0, 4), max_size=2)):
        if shape[axis] == 1:
            strides[axis] = draw(st.integers(1, 9))  # which is no matter for where elements are
    return shape, tuple(strides)


@given(outputs(), st.sampled_from((0, 4, 8, 12, 16, 256)))
def test_a_layout_is_that_of_torchs_new_tensors_and_no_other(output: tuple[tuple[int, ...], tuple[int, ...]], pointer: int) -> None:
    torch = pytest.importorskip("torch")
    shape, strides = output
    layout = TensorRef(pointer, shape, strides).layout
    new = {
        CONTIGUOUS: torch.empty(shape, device="meta").stride(),
        CHANNELS_LAST: torch.empty(shape, device="meta", memory_format=torch.channels_last_3d).stride(),
    }
    if layout == ANY_STRIDES:
        ambiguous = {CONTIGUOUS: math.prod(shape[2:]) == 1, CHANNELS_LAST: shape[1] == 1}
        assert pointer % 16 or all(ambiguous[one] or strides != like for one, like in new.items())
    else:
        assert pointer % 16 == 0 and strides == new[layout]
        assert (strides[4] == 1 and strides[1] != 1) == (layout == CONTIGUOUS)
        assert (strides[1] == 1 and strides[4] != 1) == (layout == CHANNELS_LAST)


@given(outputs(), st.sampled_from((0, 0, 1, 2)))
def test_a_kernel_finds_what_it_is_promised(output: tuple[tuple[int, ...], tuple[int, ...]], late: int) -> None:
    """The host compares; an output that is not aligned is written by code for any strides."""
    shape, strides = output
    layout = TensorRef(0, shape, strides).layout
    assert written(strides, problem_with_output(shape), late) == {ANY_STRIDES if late else layout}


def test_an_empty_output_and_one_of_another_rank_promise_nothing() -> None:
    assert TensorRef(0, (0, 2, 3, 4, 5), (120, 60, 20, 5, 1)).layout == ANY_STRIDES
    assert TensorRef(0, (2, 3, 4, 5), (60, 20, 5, 1)).layout == ANY_STRIDES


def test_what_torch_gives_is_known_beforehand() -> None:
    torch = pytest.importorskip("torch")
    formats = {"ncdhw": torch.contiguous_format, "channels_last": torch.channels_last_3d}
    for shape, (layout, format) in itertools.product(itertools.product((1, 2), repeat=5), formats.items()):
        new = torch.empty(shape, memory_format=format, device="meta")
        assert output_layout(problem_with_output(shape), layout) == TensorRef(0, shape, new.stride()).layout


@pytest.mark.parametrize("claimed", [CONTIGUOUS, CHANNELS_LAST])
def test_tensors_that_are_not_as_promised_are_refused(claimed: int) -> None:
    problem = problem_with_output((1, 4, 2, 2, 2))
    plan = TRIAL.plan(problem, "fp32", 3, claimed)
    for strides in ((32, 8, 4, 2, 1), (32, 1, 16, 8, 4), (64, 8, 4, 2, 1)):
        ref = TensorRef(0, problem.output_shape, strides)
        if ref.layout == claimed:
            assert Prepared(HOST, TRIAL, problem, "fp32", {"output": ref}, plan=plan)
        else:
            with pytest.raises(KernelError, match="planned for an output of another layout"):
                Prepared(HOST, TRIAL, problem, "fp32", {"output": ref}, plan=plan)


def test_one_plan_serves_outputs_that_are_aligned_and_others() -> None:
    problem = problem_with_output((1, 4, 2, 2, 2))
    strides = (32, 8, 4, 2, 1)
    prepared = Prepared(HOST, TRIAL, problem, "fp32", {"output": TensorRef(0, problem.output_shape, strides)})
    found = [written(strides, problem, late, prepared) for late in (0, 1, 4, 2, 0)]
    assert found == [{CONTIGUOUS}, {ANY_STRIDES}, {CONTIGUOUS}, {ANY_STRIDES}, {CONTIGUOUS}]


def test_the_host_finds_a_binary_for_the_wrong_layout() -> None:
    wrong = TRIAL.replace_source(SOURCE.replace('"output_layout"', '"3 - output_layout if output_layout else 0"'))
    problem = problem_with_output((1, 4, 2, 2, 2))
    refs = {"output": TensorRef(0, problem.output_shape, (32, 8, 4, 2, 1))}
    memory = np.empty(40, np.float32)
    with pytest.raises(LaunchError, match=r"OUTPUT_LAYOUT \? .*|OUTPUT_LAYOUT is 2 at .*trial.cu:\d+, and stands for 1 there"):
        Prepared(HOST, wrong, problem, "fp32", refs).launch({"output": memory.ctypes.data + -memory.ctypes.data % 16})


def test_only_specialize_knows_the_layout() -> None:
    problem = problem_with_output((1, 4, 2, 2, 2))
    by_constant = SOURCE.replace("block = 64", 'block = "32 * (1 + wide)"').replace(
        '"output_layout"\n', '"wide"\n[constants]\nwide = "output_layout"\n'
    )
    plans = [Kernel.from_source(by_constant, "trial").plan(problem, "fp32", 3, layout) for layout in range(3)]
    assert [dict(plan.specialization)["OUTPUT_LAYOUT"] for plan in plans] == [0, 1, 2]
    assert {launch.block for plan in plans for launch in plan.launches} == {(32, 1, 1)}
    with pytest.raises(KernelError, match="no value is known by the name of parameter 'output_layout'"):
        Kernel.from_source(SOURCE.replace("const long long output_numel", "const int output_layout"), "trial")


def test_a_plan_that_was_sent_promises_the_same() -> None:
    plan = TRIAL.plan(problem_with_output((1, 4, 2, 2, 2)), "fp32", 3, CHANNELS_LAST)
    again = TRIAL.planned(TRIAL.numbers(plan))
    assert again == plan and again.launches[0].output_layout == CHANNELS_LAST


class Gpu(HostBackend):
    """The host, by the name and the architecture of an H100; says what it was asked to compile."""

    device_name, arch, multiprocessors, shared_limit = "NVIDIA H100 80GB HBM3", "sm_90a", 132, 227 << 10
    clock_hz, memory_bytes_per_s = 1.98e9, 3.35e12

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Instance] = []

    def instance(self, kernel: Kernel, dtype: str, plan: Plan) -> Instance:
        self.asked.append(Instance.of_plan(kernel, dtype, plan))
        return Instance(kernel, dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(6, 8, 8), (24, 1, 24)])  # of the second one taps lead nowhere
def test_what_is_compiled_ahead_is_what_calls_take(
    layout: str, size: tuple[int, ...], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, new_plans: None, ieee: None
) -> None:
    """A trial has built what its contestants' plans then load, and `convt3d compile` makes a binary of the same numbers."""
    torch = pytest.importorskip("torch")
    from cupy_convt3d import choice
    from cupy_convt3d.calls import Call
    from cupy_convt3d.lab.compile import _taken, gpu

    card, geometry = Gpu(), dict[str, Any](stride=2, padding=1)
    x, w = torch.ones(1, 32, *size), torch.ones(32, 32, 3, 3, 3)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last_3d)
    monkeypatch.setenv("CONVT3D_TUNING", str(tmp_path / "tuning.json"))
    for module in ("choice", "torch_plan"):
        monkeypatch.setattr(f"cupy_convt3d.{module}.backend_for", lambda *_: card)
    monkeypatch.setattr(choice, "_choose_backend", lambda *_: "host")
    monkeypatch.setattr(trials, "MOST_ROUNDS", 1)
    monkeypatch.setattr(trials, "may_be_held", lambda _: True)
    monkeypatch.setattr(trials, "_event_clock", lambda _: lambda call: float(call() is not None))
    monkeypatch.setattr(tuning, "_unsaved", tuning.Database())
    monkeypatch.setattr(cost.Costs, "library_ms", lambda *_: (1e3, 1e3))  # torch's operator would take so small a layer
    ct.registry.revise()
    ct.conv_transpose3d(x, w, **geometry)
    counts = {one: card.asked.count(one) for one in card.asked}
    assert counts and set(counts.values()) == {2}, "built beside the others, then loaded"
    ct.registry.revise()
    problem = Problem.from_shapes(tuple(x.shape), tuple(w.shape), None, **geometry)
    ahead, _ = _taken(Call("fprop", str(problem), "fp32", layout), gpu("H100"))
    if size[1] == 1:
        wanted = output_layout(problem, layout)
        assert wanted in {dict(one.specialization).get("OUTPUT_LAYOUT") for one in counts}
    assert ahead is not None and any((one.kernel, one.specialization) == (ahead.kernel, ahead.specialization) for one in counts)
    ct.registry.revise()


def test_shipped_kernels_know_layouts() -> None:
    """Each has binaries of its own for either layout of some problem; its launches are the same for all, and of any strides it knows
    nothing."""
    knowing = [kernel for kernel in registry.kernels().values() if kernel.knows_layout]
    assert {"fprop_rolling_wgmma", "fprop_flattened_simt"} <= {kernel.name for kernel in knowing}
    problems = [layer.problem for layer in population(5, 40)] + [Problem.parse("n2_c64to64_i16_k3_s2_p1_g8")]
    for kernel in knowing:
        found = set()
        able = ((one, dtype) for one in problems for dtype in kernel.dtypes if kernel.why_not(one, dtype) is None)
        for problem, dtype in able:
            plans = [kernel.plan(problem, dtype, 132, layout) for layout in range(3)]
            numbers = tuple(dict(plan.specialization)["OUTPUT_LAYOUT"] for plan in plans)
            assert all(number in (0, layout) for layout, number in enumerate(numbers))
            launches = [[replace(one, specialized=(), output_layout=0) for one in plan.launches] for plan in plans]
            assert launches[0] == launches[1] == launches[2]
            found.add(numbers)
        assert (0, CONTIGUOUS, CHANNELS_LAST) in found, kernel.name
