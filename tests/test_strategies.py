"""What is drawn: strategies reach every named class and tile tail, shrink to the guilty field, and exact tensors stay exact."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from selection import some

from cupy_convt3d import reference
from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.errors import ProblemError
from cupy_convt3d.lab import strategies
from cupy_convt3d.lab.strategies import EDGE_PROBLEMS, FEATURES, covered, problems
from cupy_convt3d.lab.tensors import (
    EXACT_LIMIT,
    KINDS,
    LARGEST,
    NARROW,
    NARROW_KINDS,
    SPOILT,
    WIDE,
    as_multiplied,
    draw_tensors,
    most_terms,
)
from cupy_convt3d.problem import PASSES, Problem

TILES = {"output_voxels": 64, "in_channels_per_group": 16, "out_channels_per_group": 32}
QUIET: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


def sample(strategy: st.SearchStrategy[Problem], count: int, seed: int | None = None) -> list[Problem]:
    """Return what Hypothesis would test: derandomized without a seed, as on CI, else what that seed gives."""
    drawn: list[Problem] = []

    def collect(problem: Problem) -> None:
        drawn.append(problem)

    test = settings(max_examples=count, derandomize=seed is None, phases=[Phase.generate], **QUIET)(given(strategy)(collect))
    (test if seed is None else hypothesis.seed(seed)(test))()
    return drawn


def minimal(strategy: st.SearchStrategy[Problem], fails: Callable[[Problem], bool], seed: int) -> Problem:
    return find(strategy, fails, settings=settings(max_examples=3000, **QUIET), random=random.Random(seed))


def up_to_axis_order(problem: Problem) -> tuple[Any, ...]:
    p = problem
    axes = zip(p.input_size, p.kernel_size, p.stride, p.padding, p.output_padding, p.dilation, strict=True)
    return p.batch, p.in_channels, p.out_channels, p.groups, p.bias, sorted(axes)


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_200_examples_reach_every_feature(seed: int | None) -> None:
    reached = covered(sample(problems(), 200, seed))
    assert [name for name in FEATURES if not reached[name]] == []


@pytest.mark.parametrize("pass_name", ["dgrad", "wgrad"])
def test_gradients_reach_every_feature_but_bias(pass_name: str) -> None:
    reached = covered(sample(problems(pass_name), 200))
    assert [name for name in FEATURES if not reached[name]] == ["bias"]


def test_neighbours_are_one_or_two_steps_away_and_take_every_step() -> None:
    generator, changed = random.Random(0), Counter[str]()
    begin = Problem.parse("n2_c6to9_i2x3x4_k3x2x3_s2x1x2_p1x0x1_g3_bias")
    fields = ("batch", "in_channels", "out_channels", "groups", "bias", *strategies._AXIS_STEPS)
    for _ in range(1000):
        near = strategies.draw_neighbour(generator.randint, begin)
        differ = [name for name in fields if getattr(near, name) != getattr(begin, name)]
        changed.update(differ)
        assert len(set(differ) - {"in_channels", "out_channels"}) <= 2
        assert near.flop <= 8 * begin.flop + 2 * 120_000
    assert all(changed[name] > 20 for name in fields), changed
    assert not any(strategies.draw_neighbour(generator.randint, replace(begin, bias=False), "dgrad").bias for _ in range(200))


def test_a_neighbour_may_be_drawn_by_hypothesis() -> None:
    known = [Problem.parse("n1_c2to4_i2x2x1_k1x60x1_p0x30x0_g2"), Problem.parse("n1_c1to1_i1_k1")]
    assert {problem.kernel_size[1] > 50 for problem in sample(strategies.neighbours(known), 40)} == {True, False}


@pytest.mark.parametrize("name", FEATURES)
def test_edge_problems_reach_every_feature(name: str) -> None:
    assert covered(EDGE_PROBLEMS)[name]


@pytest.mark.parametrize("name", FEATURES)
def test_no_feature_is_true_of_every_problem(name: str) -> None:
    assert not all(map(FEATURES[name], EDGE_PROBLEMS))


@pytest.mark.parametrize("name", [name for name in strategies._STEERINGS if name])
def test_steering_leads_to_its_feature(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {key: strategies._STEERINGS[name] if key else {} for key in strategies._STEERINGS}
    every_axis = tuple(filter(None, others)) if name in strategies._EVERY_AXIS else ()
    monkeypatch.setattr(strategies, "_STEERINGS", others)
    monkeypatch.setattr(strategies, "_EVERY_AXIS", every_axis)
    drawn = sample(problems(), 100, seed=1)
    assert covered(drawn)[name] >= 0.6 * len(drawn)


def test_edge_problems_are_tiny_and_different() -> None:
    assert len(set(EDGE_PROBLEMS)) == len(EDGE_PROBLEMS)
    assert max(p.flop for p in EDGE_PROBLEMS) <= 2 * 8 * 27
    assert max(math.prod(p.output_shape) for p in EDGE_PROBLEMS) <= 64


def test_covered_counts_problems() -> None:
    counts = covered([Problem.parse("n1_c1to1_i1_k1_bias"), Problem.parse("n2_c1to1_i1_k1_bias")])
    assert counts == Counter({"bias": 2, "batch > 1": 1, "kernel 1": 2, "size-1 axis": 2, "no clipped tap": 2})


@settings(deadline=None, max_examples=300)
@given(problems(max_multiply_adds=3000, max_kernel=4, max_stride=3, max_dilation=2, max_size=5, max_channels=3))
def test_limits_are_kept(problem: Problem) -> None:
    assert problem.flop <= 2 * 3000
    assert max(problem.kernel_size) <= 4 and max(problem.stride) <= 3 and max(problem.dilation) <= 2
    assert max(problem.input_size) <= 5 and problem.groups <= 3
    assert max(problem.in_channels, problem.out_channels) <= 3 * problem.groups


def test_nothing_is_thrown_away() -> None:
    tries = Counter[str]()

    @st.composite
    def counted(draw: st.DrawFn) -> Problem:
        tries["begun"] += 1
        problem = draw(problems(tiles=TILES))
        tries["finished"] += 1
        return problem

    for seed in (1, 2, 3):
        tries["tested"] += len(sample(counted(), 150, seed))
    assert tries["begun"] == tries["finished"] == tries["tested"]


@pytest.mark.parametrize(
    ("quantity", "counted"),
    [
        ("output_voxels", "residue_voxels"),
        ("input_voxels", "input_voxels"),
        ("in_channels_per_group", "in_channels_per_group"),
        ("out_channels_per_group", "out_channels_per_group"),
        ("groups", "groups"),
        ("batch", "batch"),
    ],
)
@pytest.mark.parametrize("tile", some([8, 64]))
def test_tails_of_a_tile_are_reached(quantity: str, counted: str, tile: int) -> None:
    seen = Counter(p.names[counted] for p in sample(problems(tiles={quantity: tile}), 400, seed=1))
    for n in (1, 2):
        for tail in (n * tile - 1, n * tile, n * tile + 1):
            assert seen[tail], f"{counted} = {tail} was not drawn"


def test_tails_of_voxels_meet_every_window_feature() -> None:
    tails = [p for p in sample(problems(tiles=TILES), 1000, seed=1) if p.names["residue_voxels"] in (63, 64, 65, 127, 128, 129)]
    reached = covered(tails)
    assert len(tails) > 200
    # A tail fixes the size and the padding, and with them these.
    fixed = {"padding = dilation*(kernel-1)", "padding > dilation*(kernel-1)", "classes with no output"}
    assert [name for name in FEATURES if not reached[name] and name not in fixed] == []


def test_tails_stay_within_the_budget() -> None:
    drawn = sample(problems(tiles=TILES, max_multiply_adds=40_000), 300, seed=2)
    assert max(p.flop for p in drawn) <= 2 * 40_000


def test_wrong_arguments_are_named() -> None:
    tiny = Problem.parse("n1_c1to1_i1_k1")
    for call, fragment in [
        (lambda: sample(problems(tiles={"voxels": 8}), 1), "voxels is not one of"),
        (lambda: sample(problems("forward"), 1), "pass='forward'"),
        (lambda: draw_tensors("forward", tiny, "fp32", "exact", 0), "pass='forward'"),
        (lambda: draw_tensors("fprop", tiny, "fp8", "exact", 0), "dtype='fp8'"),
        (lambda: draw_tensors("fprop", tiny, "fp32", "uniform", 0), "kind='uniform'"),
        (lambda: draw_tensors("fprop", tiny, "bf16", "exact_wide", 0), "exact_wide only with"),
    ]:
        with pytest.raises(ProblemError, match=fragment):
            call()


# What a kernel gets wrong, and the smallest problem that shows it: ones, and the guilty field.
SHRINKS: dict[str, tuple[Callable[[Problem], bool], set[str]]] = {
    "anything": (lambda p: True, {"n1_c1to1_i1_k1"}),
    "bias": (lambda p: p.bias, {"n1_c1to1_i1_k1_bias"}),
    "batch": (lambda p: p.batch > 1, {"n2_c1to1_i1_k1"}),
    "batch 0": (lambda p: p.batch == 0, {"n0_c1to1_i1_k1"}),
    "dilation": (lambda p: max(p.dilation) > 1, {"n1_c1to1_i1_k1_d1x1x2"}),
    "dilation that matters": (FEATURES["dilation"], {"n1_c1to1_i1_k1x1x2_d1x1x2"}),
    "stride": (lambda p: max(p.stride) > 1, {"n1_c1to1_i1_k1_s1x1x2"}),
    "stride on every axis": (lambda p: min(p.stride) > 1, {"n1_c1to1_i1_k1_s2"}),
    "groups": (lambda p: p.groups > 1, {"n1_c2to2_i1_k1_g2"}),
    "groups of several channels": (FEATURES["groups 1 < g < C"], {"n1_c4to2_i1_k1_g2"}),
    "channel multiplier": (FEATURES["channel multiplier"], {"n1_c2to4_i1_k1_g2"}),
    "weight layout": (FEATURES["in_channels != out_channels"], {"n1_c1to2_i1_k1", "n1_c2to1_i1_k1"}),
    "gcd": (FEATURES["gcd(stride, dilation) > 1"], {"n1_c1to1_i1_k1x1x2_s1x1x2_d1x1x2"}),
    "output_padding": (FEATURES["output_padding"], {"n1_c1to1_i1_k1_op0x0x1_d1x1x2", "n1_c1to1_i1_k1_s1x1x2_op0x0x1"}),
    "output_padding >= stride": (FEATURES["output_padding >= stride"], {"n1_c1to1_i1_k1_op0x0x1_d1x1x2"}),
    "output_padding >= stride and bias": (
        lambda p: p.bias and FEATURES["output_padding >= stride"](p),
        {"n1_c1to1_i1_k1_op0x0x1_d1x1x2_bias"},
    ),
    "kernel = stride": (FEATURES["kernel = stride"], {"n1_c1to1_i1_k1x1x2_s1x1x2"}),
    "depthwise with dilation": (
        lambda p: FEATURES["depthwise"](p) and FEATURES["dilation"](p),
        {"n1_c2to2_i1_k1x1x2_d1x1x2_g2"},
    ),
    "stride 3 and two taps": (
        lambda p: any(s == 3 and k > 1 for s, k in zip(p.stride, p.kernel_size, strict=True)),
        {"n1_c1to1_i1_k1x1x2_s1x1x3"},
    ),
}


@pytest.mark.parametrize("name", some(SHRINKS, 2))
def test_counterexamples_shrink_to_ones_and_the_guilty_field(name: str) -> None:
    fails, expected = SHRINKS[name]
    assert up_to_axis_order(minimal(problems(), fails, 0)) in [up_to_axis_order(Problem.parse(e)) for e in expected]


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (lambda p: p.out_channels // p.groups == 33, "n1_c1to33_i1_k1"),
        (lambda p: p.in_channels // p.groups >= 15 and max(p.stride) > 1, "n1_c15to1_i1_k1_s1x1x2"),
        (lambda p: p.names["residue_voxels"] == 129, "n1_c1to1_i1x1x129_k1"),
    ],
)
def test_tails_shrink_too(fails: Callable[[Problem], bool], expected: str) -> None:
    assert up_to_axis_order(minimal(problems(tiles=TILES), fails, 0)) == up_to_axis_order(Problem.parse(expected))


LONG_SUMS = [Problem.parse(name) for name in ("n1_c3000to1_i1_k1_bias", "n2_c64to64_i2_k5", "n8_c1to1_i64x64x32_k1")]


def assert_exact(pass_name: str, problem: Problem, dtype_name: str, kind: str, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    tensors = draw_tensors(pass_name, problem, dtype_name, kind, seed)
    shapes, written = problem.shapes(pass_name)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: s for n, s in shapes.items() if n != written}
    assert {tensor.dtype for tensor in tensors.values()} == {DTYPES[dtype_name].numpy}
    for tensor in tensors.values():
        assert (tensor.astype(np.float64) % 1 == 0).all()
    assert reference.magnitude(pass_name, problem, tensors).max(initial=0) < EXACT_LIMIT[dtype_name]
    return tensors


@settings(deadline=None, max_examples=300)
@given(
    problems(tiles={"in_channels_per_group": 256}),
    st.integers(0, 2**32),
    st.sampled_from(PASSES),
    st.sampled_from(list(EXACT_LIMIT)),
)
def test_exact_tensors_keep_every_sum_exact(problem: Problem, seed: int, pass_name: str, dtype_name: str) -> None:
    tensors = assert_exact(pass_name, problem, dtype_name, "exact", seed)
    for tensor in tensors.values():
        assert np.abs(tensor.astype(np.float64)).max(initial=0) <= 8
        assert (tensor != 0).all()
    if dtype_name in ("fp32", "fp64"):
        assert_exact(pass_name, problem, dtype_name, "exact_wide", seed)


@pytest.mark.parametrize("dtype_name", EXACT_LIMIT)
@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("problem", LONG_SUMS, ids=str)
def test_long_sums_stay_exact_too(problem: Problem, pass_name: str, dtype_name: str) -> None:
    for kind in ("exact", "exact_wide") if dtype_name in WIDE else ("exact",):
        tensors = assert_exact(pass_name, problem, dtype_name, kind, 1)
        assert np.abs(reference.run(pass_name, problem, tensors)).max() > 0


@settings(deadline=None, max_examples=100)
@given(problems(), st.integers(0, 2**32), st.sampled_from(PASSES), st.sampled_from(["fp32", "fp64"]))
def test_wide_tensors_need_more_bits_than_a_cheaper_format_has(
    problem: Problem, seed: int, pass_name: str, dtype_name: str
) -> None:
    tensors = draw_tensors(pass_name, problem, dtype_name, "exact_wide", seed)
    operands = [tensor for name, tensor in tensors.items() if name != "bias"]
    wide, narrow = operands[seed % 2], operands[1 - seed % 2]
    fewest, most = (13, 16) if dtype_name == "fp32" else (26, 32)
    magnitude = np.abs(wide)
    assert ((2.0 ** (fewest - 1) < magnitude) & (magnitude < 2.0**most) & (magnitude % 2 == 1)).all()
    assert (np.abs(narrow) <= 3).all() and (narrow != 0).all()


@settings(deadline=None, max_examples=200)
@given(problems(), st.sampled_from(PASSES))
def test_most_terms_is_an_upper_bound(problem: Problem, pass_name: str) -> None:
    assert most_terms(pass_name, problem) >= reference.terms(pass_name, problem).max(initial=1)


def test_most_terms_is_reached() -> None:
    problem = Problem.parse("n2_c4to6_i8_k5_s3_d2_g2_bias")
    for pass_name in ("fprop", "dgrad", "wgrad"):
        assert most_terms(pass_name, problem) == reference.terms(pass_name, problem).max()


def test_long_sums_narrow_the_range_before_they_thin_out() -> None:
    problem = Problem.parse("n2_c64to64_i2_k5")  # 8000 terms in dgrad
    for tensor in draw_tensors("dgrad", problem, "fp16", "exact", 0).values():
        assert np.abs(tensor).max() == 2 and (tensor != 0).all()


@pytest.mark.parametrize("kind", SPOILT)
@pytest.mark.parametrize("pass_name", PASSES)
def test_what_is_not_finite_is_in_one_tensor(kind: str, pass_name: str) -> None:
    """In each in its turn: in all channels of a quarter of the voxels, or in up to three elements; some outputs stay finite."""
    problem = Problem.parse("n2_c4to6_i3_k3_s2_bias")
    reached, whole, finite = set(), 0, 0
    for seed in range(60):
        tensors = draw_tensors(pass_name, problem, "bf16", kind, seed)
        spoilt = {name: ~np.isfinite(tensor.astype(np.float64)) for name, tensor in tensors.items()}
        (name,) = (name for name, places in spoilt.items() if places.any())
        assert np.isnan(tensors[name].astype(np.float64)).any() == (kind == "nan")
        if spoilt[name].sum() > 3:
            voxels = spoilt[name].any(1)
            assert voxels.sum() <= -(-voxels.size // 4) and (voxels == spoilt[name].all(1)).all()
            whole += 1
        reached.add(name)
        finite += np.isfinite(reference.run(pass_name, problem, tensors)).any()
    assert reached == tensors.keys() and whole > 10 and finite > 5


@pytest.mark.parametrize("kind", NARROW_KINDS)
@pytest.mark.parametrize("dtype_name", NARROW)
@pytest.mark.parametrize("name", ["n1_c1to2_i1_k1_bias", "n2_c4to6_i3_k3_s2_p1_bias", "n1_c64to8_i3_k3", "n1_c8500to2_i1x1x2_k1"])
def test_tensors_of_narrow_kinds_are_finite_and_what_they_overflow_is_certain(kind: str, dtype_name: str, name: str) -> None:
    problem, infinite, finite = Problem.parse(name), 0, 0
    for seed in range(20):
        tensors = draw_tensors("fprop", problem, dtype_name, kind, seed)
        assert all(np.isfinite(tensor.astype(np.float64)).all() for tensor in tensors.values())
        exact = reference.fprop(problem, **tensors)
        if kind == "overflow":  # no sign changes a partial sum's mind
            np.testing.assert_array_equal(np.abs(exact), reference.magnitude("fprop", problem, tensors))
        with np.errstate(over="ignore"):
            rounded = exact.astype(DTYPES[dtype_name].numpy).astype(np.float64)
        infinite, finite = infinite + np.isinf(rounded).sum(), finite + np.isfinite(rounded).sum()
    assert infinite > 0 if kind == "overflow" else finite > 0


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype_name", NARROW)
def test_sums_that_cancel_need_more_than_an_operand_keeps(dtype_name: str) -> None:
    problem, dtype = Problem.parse("n1_c8to8_i3_k3"), DTYPES[dtype_name].numpy
    tensors = draw_tensors("fprop", problem, dtype_name, "cancel", 0)
    halves = (slice(0, 4), slice(4, 8))  # of the channels, each rounded before they are added
    parts = [reference.fprop(replace(problem, in_channels=4), tensors["input"][:, h], tensors["weight"][h]) for h in halves]
    early = sum(part.astype(dtype).astype(np.float64) for part in parts)
    assert (early.astype(dtype) != reference.fprop(problem, **tensors).astype(dtype)).mean() > 0.1


def test_tensors_depend_on_the_seed_alone() -> None:
    problem = Problem.parse("n2_c4to6_i3_k3_s2_bias")
    for kind in KINDS:
        one, same, other = (draw_tensors("fprop", problem, "fp32", kind, seed) for seed in (2, 2, 3))
        for name in one:
            np.testing.assert_array_equal(one[name], same[name])
            assert (one[name] != other[name]).any()


@pytest.mark.parametrize("dtype_name", EXACT_LIMIT)
def test_random_tensors_are_standard_normal(dtype_name: str) -> None:
    tensors = draw_tensors("dgrad", Problem.parse("n4_c16to16_i4_k4"), dtype_name, "random", 0)
    for tensor in tensors.values():
        assert tensor.dtype == DTYPES[dtype_name].numpy
        values = tensor.astype(np.float64)
        assert abs(values.mean()) < 0.05 and abs(values.std() - 1) < 0.05
        assert np.unique(values).size > 300


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_largest_numbers_have_finite_sums(dtype: str) -> None:
    """What rounds to infinity in TF32 stands in few places, and not always: there tf32x3 may find infinities."""
    problem, infinite = Problem.parse("n2_c3to4_i3_k3_s2_p1_bias"), 0
    for seed in range(20):
        tensors = draw_tensors("fprop", problem, dtype, "largest", seed)
        sums = reference.run("fprop", problem, tensors)
        assert np.isfinite(sums).all() and np.abs(sums).max() < np.finfo(np.float32).max / 2
        assert np.abs(tensors["input"]).min() >= np.finfo(np.float32).max * 0.49
        seen = as_multiplied(dtype, tensors)
        assert all(np.isfinite(array).all() for name, array in seen.items() if name != "input")
        infinite += int(np.isinf(seen["input"]).sum())
    assert (infinite > 0) == (dtype == "tf32x3") and infinite < 20 * 5
