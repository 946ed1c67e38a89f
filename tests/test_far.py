"""Problems past 2^32 elements: the shipped kernels' last blocks, and what is said where they cannot be tried."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.kernel import ARCHITECTURES, Kernel
from cupy_convt3d.lab.examples import fitting
from cupy_convt3d.lab.far import APART_LAYOUTS, FAR, apart_problem, apart_vectors, far_problems, verify_far, with_copies
from cupy_convt3d.lab.worker import Worker
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernel, kernels

BACKEND = HostBackend()


@pytest.mark.parametrize("name", [name for name, known in kernels().items() if known.architectures == ARCHITECTURES])
def test_shipped_kernels_pass_2_to_the_32(name: str) -> None:
    tried = [p for p in far_problems(kernel(name).pass_name) if kernel(name).why_not(p, "fp16") is None]
    if kernel(name).is_persistent or not tried:
        pytest.skip("its last blocks do not compute the last volume alone, or it refuses such problems")
    assert len(tried) >= 2 or kernel(name).restrictions
    for problem in tried:
        outcome = verify_far(BACKEND, kernel(name), problem, "fp16", 1)
        assert outcome.ok, outcome.message
        assert not outcome.message or kernel(name).restrictions, outcome.message


@pytest.mark.parametrize("pass_name", ["fprop", "dgrad", "wgrad"])
def test_far_problems_are_far_and_their_copies_near(pass_name: str) -> None:
    for problem in far_problems(pass_name):
        volumes = min(math.prod(problem.input_shape), math.prod(problem.output_shape))
        assert volumes > 2**32 or math.prod(problem.weight_shape) > 2**35
        assert math.prod(with_copies(problem, 1).output_shape) <= 4096
        assert math.prod(with_copies(problem, 40).output_shape) > math.prod(with_copies(problem, 1).output_shape)


@pytest.mark.parametrize("name", [name for name, known in kernels().items() if not known.is_persistent])
def test_shipped_kernels_pass_strides_past_2_to_the_32(name: str) -> None:
    dtype = min(kernel(name).dtypes, key=lambda known: DTYPES[known].itemsize)
    few = {"out_channels": 4} if name == "fprop_few_outputs" else {}  # not the eight of a vector of 16 bits
    for near in (apart_problem(), replace(apart_vectors(), **few)):
        problem = fitting(kernel(name), near, dtype)
        if problem is None:
            assert (name, near) == ("fprop_depthwise", apart_vectors())  # a multiplier of 8
            continue
        for seed in range(APART_LAYOUTS):
            outcome = verify_far(BACKEND, kernel(name), problem, dtype, seed)
            assert outcome.ok and not outcome.message, outcome.message


def test_tensors_without_elements_have_no_far_strides() -> None:
    """`check --kind far` runs the edge problems so too."""
    for seed in range(APART_LAYOUTS):
        outcome = verify_far(BACKEND, kernel("fprop_gather"), Problem.parse("n0_c2to2_i2_k2_s2"), "fp16", seed)
        assert outcome.ok, outcome.message


def test_a_32_bit_offset_of_a_groups_channels_is_found() -> None:
    """Of volumes that are no whole vectors, whose channels are copied in one piece, and of such that are."""
    known = kernel("fprop_patch_split_k")
    for right, wrong in (
        ("static_cast<index_t>(group * channels + first) * tile.volume", "(group * channels + first) * tile.volume"),
        ("const index_t other = ", "const int other = "),
    ):
        narrow = Kernel.from_source(known.source.replace(right, wrong), "narrow")
        assert narrow.source != known.source
        with Worker(narrow, "host") as worker:
            patches = [replace(problem, stride=problem.kernel_size) for problem in far_problems("fprop")]
            tried = [problem for problem in patches if narrow.why_not(problem, "fp16") is None]
            assert not all(worker.verify(problem, "fp16", FAR, 0).ok for problem in tried), right


def test_a_32_bit_stride_is_found() -> None:
    source = kernel("fprop_grouped").source
    narrow = Kernel.from_source(source.replace("index_t output_step_d", "int output_step_d"), "narrow")
    assert narrow.source != source
    problem = fitting(narrow, apart_problem(), "fp16")
    assert problem is not None
    with Worker(narrow, "host") as worker:
        assert not worker.verify(problem, "fp16", FAR, 0).ok


def test_a_kernel_whose_blocks_go_in_another_order_is_not_judged() -> None:
    source = kernel("fprop_gather").source
    backwards = source.replace("static_cast<index_t>(blockIdx.x)", "static_cast<index_t>(gridDim.x - 1 - blockIdx.x)")
    assert backwards != source
    outcome = verify_far(BACKEND, Kernel.from_source(backwards, "backwards"), far_problems("fprop")[0], "fp16", 1)
    assert outcome.ok and "cannot be tried" in outcome.message


def test_a_32_bit_index_is_found() -> None:
    source = kernel("fprop_gather").source
    narrow = source.replace("const index_t index = static_cast<index_t>(blockIdx.x)", "const int index = static_cast<int>(blockIdx.x)")
    assert narrow != source
    outcome = verify_far(BACKEND, Kernel.from_source(narrow, "narrow"), far_problems("fprop")[0], "fp16", 1)
    assert not outcome.ok and "past 2^32 elements" in outcome.message
