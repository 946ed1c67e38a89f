"""Problems past 2^32 elements: what they are, and which mistakes they find. `test_check` has the shipped kernels' last blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.check import check
from cupy_convt3d.lab.check.examples import fitting
from cupy_convt3d.lab.run.far import (
    APART_LAYOUTS,
    FAR,
    apart_problem,
    explained,
    far_problems,
    largest_accepted,
    largest_tensor,
    near_problem,
    unmet,
    verify_far,
)
from cupy_convt3d.lab.run.worker import Worker
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernel

BACKEND = HostBackend()


@pytest.mark.parametrize("pass_name", ["fprop", "dgrad", "wgrad"])
def test_far_problems_are_far_and_what_is_not_zero_is_near(pass_name: str) -> None:
    for problem in far_problems(pass_name):
        near = near_problem(problem, pass_name)
        assert max(map(math.prod, (problem.input_shape, problem.output_shape, problem.weight_shape))) > 2**31
        assert math.prod(near.output_shape) <= 2**13 and math.prod(near.input_shape) <= 2**17


@pytest.mark.parametrize("pass_name", ["fprop", "dgrad", "wgrad"])
def test_every_product_of_an_index_passes_2_to_the_32_in_a_grid_of_any_axes(pass_name: str) -> None:
    """Batch, channels, planes and rows of at most 65535, and so many volumes, may all be a grid's y or z."""
    ordinary = [
        p
        for p in far_problems(pass_name)
        if max(p.batch, p.in_channels, p.out_channels, p.input_size[0], p.input_size[1]) <= 65535
        and (pass_name == "wgrad" or p.batch * min(p.in_channels, p.out_channels) <= 65535)
    ]
    for which in ("input_shape", "output_shape"):
        shapes = [getattr(p, which) for p in ordinary]
        assert any(math.prod(s[1:]) > 2**32 and s[1] > 1 for s in shapes), "channel times volume"
        assert any(math.prod(s) > 2**32 and s[0] > 1 for s in shapes), "batch times channels times volume"
        if pass_name != "wgrad":
            assert any(math.prod(s[2:]) > 2**32 and s[2] > 1 for s in shapes), "depth times plane"
            assert any(math.prod(s[3:]) > 2**32 for s in shapes), "row times width"
            small = "output_shape" if which == "input_shape" else "input_shape"
            assert any(math.prod(getattr(p, which)) > 2**32 and math.prod(getattr(p, small)) < 2**31 for p in ordinary)
            assert any(math.prod(p.weight_shape) > 2**32 for p in ordinary)
            assert any(2**31 < math.prod(s) < 2**32 for s in shapes)


def test_tensors_without_elements_have_no_far_strides() -> None:
    for seed in range(APART_LAYOUTS):
        outcome = verify_far(BACKEND, kernel("fprop_gather"), Problem.parse("n0_c2to2_i2_k2_s2"), "fp16", seed)
        assert outcome.ok, outcome.message


@pytest.mark.parametrize("line", ["  index_t input, output;", "  index_t output;"])
def test_a_32_bit_offset_of_a_tiles_rows_and_columns_is_found(line: str) -> None:
    """Of its voxels in either tensor, and of its channels."""
    known = kernel("fprop_patch_mma")
    assert line in known.source
    narrow = Kernel.from_source(known.source.replace(line, line.replace("index_t", "int")), "narrow")
    patches = [replace(problem, stride=problem.kernel_size) for problem in far_problems("fprop")]
    tried = [problem for problem in patches if narrow.why_not(problem, "fp16") is None]
    near = fitting(narrow, apart_problem(), "fp16")
    assert tried and near is not None
    with Worker(narrow, "host") as worker:
        examples = [*((near, seed) for seed in range(APART_LAYOUTS)), *((problem, 0) for problem in tried)]
        assert not all(worker.verify(problem, "fp16", FAR, seed).ok for problem, seed in examples)


def test_a_32_bit_stride_is_found() -> None:
    source = kernel("fprop_grouped").source
    narrow = Kernel.from_source(source.replace("index_t output_step_d", "int output_step_d"), "narrow")
    assert narrow.source != source
    problem = fitting(narrow, apart_problem(), "fp16")
    assert problem is not None
    with Worker(narrow, "host") as worker:
        assert not worker.verify(problem, "fp16", FAR, 0).ok


def test_a_size_that_32_bits_make_negative_is_found_in_the_first_blocks() -> None:
    source = kernel("dgrad_gather").source
    right = "index >= voxels * problem.batch * problem.in_channels"
    wrong = "int(index) >= int(voxels * problem.batch * problem.in_channels)"
    assert right in source
    problem = next(problem for problem in far_problems("dgrad") if largest_tensor(problem) < 2**32)
    assert verify_far(BACKEND, kernel("dgrad_gather"), problem, "fp16", 1).ok
    outcome = verify_far(BACKEND, Kernel.from_source(source.replace(right, wrong), "narrow"), problem, "fp16", 1)
    assert not outcome.ok and outcome.message.startswith("wrong value in what lies first")


def test_a_32_bit_step_between_planes_of_channels_that_lie_together_is_found() -> None:
    source = kernel("fprop_grouped_channels_last").source
    narrow = Kernel.from_source(source.replace("channel + d * input.stride[2]", "channel + d * int(input.stride[2])"), "narrow")
    assert narrow.source != source
    problem = fitting(narrow, apart_problem(), "fp32")
    assert problem is not None
    with Worker(narrow, "host") as worker:
        assert not all(worker.verify(problem, "fp32", FAR, seed).ok for seed in range(APART_LAYOUTS))


def with_rule(rule: str) -> Kernel:
    rules = f'[restrictions]\n"{rule}" = "no"\n[[launch]]'
    return Kernel.from_source(kernel("fprop_gather").source.replace("[[launch]]", rules, 1), "ruled")


def test_a_volume_that_is_refused_is_the_largest_one_that_is_not() -> None:
    """And as many of them as have the far problem's voxels, or as are accepted."""
    whole = Problem.parse("n1_c1to1_i4200x1024x1024_k1x1x2")
    for rule, batch in (("input_voxels <= 1073741824", 5), ("input_voxels <= 1073741824 and batch <= 3", 2)):
        ruled = with_rule(rule)
        found = largest_accepted(whole, lambda problem: ruled.why_not(problem, "fp16") is None)  # noqa: B023
        assert found == replace(whole, batch=batch, input_size=(1, 1024, 2**20))
    for problem, rule in ((whole, "input_voxels < 100000000"), (replace(whole, input_size=(1, 1024, 66)), "batch > 1")):
        assert largest_accepted(problem, lambda problem: with_rule(rule).why_not(problem, "fp16") is None) is None  # noqa: B023


def test_workspaces_and_launches_that_no_far_problem_met_are_named_with_such_as_do() -> None:
    """Rolling kernels lay cells out for two classes of rows alone."""
    rolling = kernel("fprop_rolling_wgmma")
    known = [problem for problem in far_problems("fprop") if rolling.why_not(problem, "bf16") is None]
    found = unmet(rolling, "bf16", [], known)
    cells = found["its workspace input_cells has more than 2^31 elements"]
    assert cells and all(rolling.plan(problem, "bf16").workspace["input_cells"] > 2**33 for problem in cells)
    launched = {what for what in found if what.endswith("is launched")}
    assert len(launched) == 1 and all(found[what] for what in launched)
    left = set(found) - launched - {"its workspace input_cells has more than 2^31 elements"}
    assert set(unmet(rolling, "bf16", cells[:1], known)) == left
    assert unmet(kernel("wgrad_reduce"), "fp16", [], far_problems("wgrad")) == {"its workspace partial has more than 2^31 elements": []}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "fprop_implicit_gemm_mma",
            "const long long volume = static_cast<long long>(problem.input_size[0])",
            "const int volume = problem.input_size[0]",
        ),
        ("fprop_rolling_wgmma", "row * static_cast<index_t>(span)", "static_cast<index_t>(row * span)"),
    ],
)
def test_32_bits_for_what_is_laid_out_are_found(name: str, right: str, wrong: str) -> None:
    """Of a volume, which is refused where it has as many elements as the far problems, and in a workspace that they do not fill."""
    source = kernel(name).source
    assert right in source
    report = check(Kernel.from_source(source.replace(right, wrong), "narrow"), backend="host", dtypes=["bf16"], examples=0, kinds=["far"])
    assert report.counterexample is not None and "32 bits" in report.counterexample.message, str(report)


def test_a_kernel_whose_blocks_go_in_another_order_is_not_judged() -> None:
    source = kernel("fprop_gather").source
    backwards = source.replace("static_cast<index_t>(blockIdx.x)", "static_cast<index_t>(gridDim.x - 1 - blockIdx.x)")
    assert backwards != source
    for problem in far_problems("fprop"):
        outcome = verify_far(BACKEND, Kernel.from_source(backwards, "backwards"), problem, "fp16", 1)
        assert outcome.ok and outcome.message.startswith("its last blocks"), (problem, outcome)


def test_a_32_bit_index_is_found() -> None:
    source = kernel("fprop_gather").source
    narrow = source.replace("const index_t index = static_cast<index_t>(blockIdx.x)", "const int index = static_cast<int>(blockIdx.x)")
    assert narrow != source
    outcome = verify_far(BACKEND, Kernel.from_source(narrow, "narrow"), far_problems("fprop")[0], "fp16", 1)
    assert not outcome.ok and "wrong value" in outcome.message
    assert explained(far_problems("fprop")[0], outcome).message.endswith("look for an index, or a product in one, of 32 bits")
