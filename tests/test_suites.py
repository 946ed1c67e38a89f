"""The named problems are those of the measurements they are compared with, and scaling down keeps what makes them special."""

from __future__ import annotations

import pytest

from cupy_convt3d.errors import ProblemError
from cupy_convt3d.lab.suites import SUITES, named_problem, scaled_down, suite
from cupy_convt3d.problem import Problem

# The GFLOP column of the cuDNN measurements on an H100, to its printed digits.
GFLOP = {
    "kb58": 56.4, "kb61": 260.9, "kb68": 1288.5, "kb70": 440.3, "kb72": 5.5, "kb73": 14.0, "kb77": 26.6,
    "unet_up2": 10.7, "unet_up1": 17.2, "gan_4s2p1": 249.9, "vae_3s2": 56.2,
}  # fmt: skip
KEPT = ("kernel_size", "stride", "padding", "output_padding", "dilation", "groups", "bias")


@pytest.mark.parametrize("name", GFLOP)
def test_flop_is_the_published_count(name: str) -> None:
    assert round(suite("named")[name].flop / 1e9, 1) == GFLOP[name]


def test_kb73_g1_is_kb73_without_groups() -> None:
    problems = suite("kernelbench")
    assert set(problems) == {name for name in GFLOP if name.startswith("kb")} | {"kb73_g1"}
    assert problems["kb73_g1"].groups == 1
    assert problems["kb73_g1"].flop == 4 * problems["kb73"].flop
    assert problems["kb73_g1"].output_shape == problems["kb73"].output_shape


def test_core_is_what_cudnn_was_measured_on() -> None:
    assert set(suite("core")) == set(GFLOP)


def test_the_medical_networks_come_with_batch_1_and_2() -> None:
    problems = suite("named")
    for name in [*suite("nnunet"), *suite("swinunetr")]:
        assert problems[name].batch == int(name[-1]), name
    assert str(problems["nnunet_320to320_n1"]) == "n1_c320to320_i8x10x12_k2_s2"
    assert str(problems["nnunet_flat_64to32_n2"]) == "n2_c64to32_i16x128x128_k1x2x2_s1x2x2"
    assert str(problems["swinunetr_768to384_n2"]) == "n2_c768to384_i3_k2_s2"
    assert str(problems["psmnet_64to32"]) == "n1_c64to32_i24x32x64_k3_s2_p1_op1"
    assert str(problems["depthwise"]) == "n4_c128to128_i32_k4_s2_p1_g128"


def test_named_is_all_suites_but_few_channels_and_ordinary() -> None:
    everything = {name: problem for part in SUITES if part not in ("few_channels", "ordinary") for name, problem in suite(part).items()}
    assert suite("named") == everything and len(everything) == 35
    suite("named").clear()
    assert SUITES["named"], "suite() hands out its own copy"


def test_few_channels_have_one_to_seven_in_or_out() -> None:
    few = suite("few_channels")
    assert not few.keys() & suite("named").keys()
    assert all(1 <= min(p.in_channels, p.out_channels) <= 7 and p.groups == 1 for p in few.values())
    assert {p.in_channels for p in few.values()} >= {1, 3, 4, 5, 7} and {p.out_channels for p in few.values()} >= {1, 2, 3, 4, 5, 7}


def test_a_problem_by_its_name_or_spelled_out() -> None:
    assert named_problem("few_5to7_k3") is SUITES["few_channels"]["few_5to7_k3"]
    assert named_problem("n1_c1to2_i3_k3_s2") == Problem.parse("n1_c1to2_i3_k3_s2")
    with pytest.raises(ProblemError):
        named_problem("few_5to8")


def test_unknown_suite_is_named() -> None:
    with pytest.raises(ProblemError, match="suite='nemad'"):
        suite("nemad")


@pytest.mark.parametrize("limit", [10**9, 10**7, 10**6])
@pytest.mark.parametrize("name", SUITES["named"])
def test_scaled_down_keeps_the_features(name: str, limit: int) -> None:
    problem = suite("named")[name]
    small = scaled_down(problem, limit)
    assert small.flop <= limit
    assert small.flop > limit / 20, "no smaller than it has to be"
    assert {field: getattr(small, field) for field in KEPT} == {field: getattr(problem, field) for field in KEPT}
    assert all(size > 1 for size in small.input_size)


def test_scaled_down_leaves_a_small_problem_alone() -> None:
    problem = Problem(1, 2, 2, 3, 3)
    assert scaled_down(problem, 10**9) is problem


def test_scaled_down_ends_at_the_smallest_it_can_make() -> None:
    small = scaled_down(suite("named")["kb73"], 1)
    assert (small.batch, small.in_channels, small.out_channels, small.groups) == (1, 1, 1, 1)
    assert small.kernel_size == (3, 3, 3)
