"""Problems at the corners of a declaration: each operation in it is driven to its sides, and what is wrong there alone is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cupy_convt3d.kernel import HOST_MULTIPROCESSORS, Kernel
from cupy_convt3d.lab.check.corners import corner_problems, ways
from cupy_convt3d.lab.check.examples import fitting
from cupy_convt3d.lab.run.worker import Worker
from cupy_convt3d.lab.strategies import EDGE_PROBLEMS
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernel

SOURCE = """
/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[constants]
tiles = "ceil_div(ceil_div(output_h, stride_h), 8)"
chunk = "min(in_channels, 40)"
[restrictions]
"taps * chunk <= 96" = "its weights are in registers"
[[launch]]
grid = "tiles * batch"
block = 128
*/
#include "convt3d.cuh"
extern "C" __global__ void cornered(const Problem problem, const View<const scalar_t> input, const View<scalar_t> output) {}
"""
SIDES: list[Callable[[Problem], object]] = [
    lambda p: p.output_size[1] % (8 * p.stride[1]) == 0,
    lambda p: p.output_size[1] % p.stride[1] > 0 and p.output_size[1] // p.stride[1] % 8 == 0 and p.output_size[1] >= p.stride[1],
    lambda p: -(-p.output_size[1] // p.stride[1]) % 8 == 1 and p.output_size[1] > 8 * p.stride[1],
    lambda p: p.in_channels == 40,
    lambda p: p.in_channels > 40,
    lambda p: p.names["taps"] * min(p.in_channels, 40) == 96,  # type: ignore[operator]
]


def test_problems_lie_on_both_sides_of_what_is_declared_and_on_its_edge() -> None:
    cornered = Kernel.from_source(SOURCE, "cornered")
    found = corner_problems(cornered, "fp32", EDGE_PROBLEMS)
    assert all(cornered.why_not(problem, "fp32") is None for problem in found)
    assert [any(map(side, found)) for side in SIDES] == [True] * len(SIDES)
    again = Kernel.from_source(SOURCE + "// another\n", "cornered")
    assert corner_problems(again, "fp32", []) is found, "what is declared alike is not searched again"


def test_what_is_known_is_not_run_again() -> None:
    text = SOURCE.replace("[constants]", "[constants]\nother = \"taps // 3\"")
    first = corner_problems(Kernel.from_source(text, "cornered"), "fp32", [])
    rest = corner_problems(Kernel.from_source(text.replace("taps // 3", "taps // 3 "), "cornered"), "fp32", first)
    assert len(rest) < len(first) or not set(rest) & set(first)


def test_an_operations_way_is_its_side_and_what_is_left_over() -> None:
    def of(text: str, **names: int) -> set[object]:
        return {way for _, way in ways((text,), names)[0]}

    assert of("a <= b", a=7, b=7) == {0} and of("a <= b", a=6, b=7) == {-1}
    assert of("a <= b", a=4, b=7) == {-2} and of("a <= b", a=1, b=7) == {-3} and of("a <= b", a=20, b=7) == {3}
    assert of("min(a, b)", a=1, b=2) == {(0, False)} and of("min(a, b)", a=2, b=2) == {(0, True)}
    assert of("ceil_div(a, b)", a=8, b=8) == {(1, 0)} and of("ceil_div(a, b)", a=9, b=8) == {(1, 1)}
    assert of("a % b", a=15, b=8) == {2} and of("1 if a else 0", a=0) == {False}
    assert of("a // b if a > b else 5", a=1, b=4) == {-3, False}, "what is not evaluated goes no way"


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("fprop_grouped", 'runs = "ceil_div(tiles, block_tiles)"', 'runs = "max(1, tiles // block_tiles)"'),
        ("fprop_few_outputs", "lead_h) // stride_h + (1 if lead_h > 0 else 0)", "lead_h) // stride_h"),
        ("fprop_few_outputs", " || chunk < in_channels_per_group) {", ") {"),
    ],
)
def test_what_is_wrong_in_a_corner_is_found(name: str, right: str, wrong: str) -> None:
    source = kernel(name).source
    assert source.count(right) == 1
    planted = Kernel.from_source(source.replace(right, wrong), "planted")
    with Worker(planted, "host") as worker:
        found = corner_problems(planted, "fp32", [fit for p in EDGE_PROBLEMS if (fit := fitting(planted, p, "fp32")) is not None])
        assert not all(worker.verify(problem, "fp32", "exact", 0).ok for problem in found)


def test_problems_are_ones_that_the_host_does_in_a_moment() -> None:
    for name in ("fprop_gather", "dgrad_gather", "wgrad_reduce", "fprop_patch_stationary"):
        one = kernel(name)
        for problem in corner_problems(one, one.dtypes[0], []):
            launches = one.plan(problem, one.dtypes[0], HOST_MULTIPROCESSORS).launches
            assert sum(launch.grid[0] * launch.block[0] for launch in launches) <= 2**14
            assert problem.flop <= 800_000
