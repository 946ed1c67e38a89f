"""Problems of hundreds of stages or many tiles, whatever the kernel: a mistake that shows only then is found."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab import strategies
from cupy_convt3d.lab.check.examples import deep as deep_problems
from cupy_convt3d.lab.check.examples import draw_example
from cupy_convt3d.lab.run.verify import numbers_of
from cupy_convt3d.lab.run.worker import Worker
from cupy_convt3d.problem import PASSES, Problem
from cupy_convt3d.registry import kernels

_RIGHT = (Path(__file__).parent / "specimens" / "overflow_channel.cu").read_text()
_LOOP = "        for (int ci = first; ci < first + in_per_group; ++ci) {\n"
_STAGES = """        {} stage = 0;
        for (int done = 0; done < in_per_group; ++done) {{
          const int ci = first + stage * 16 + done % 16;
          if (done % 16 == 15) ++stage;
"""


@pytest.mark.parametrize(("counter", "passes"), [("unsigned char", False), ("int", True)])
def test_stages_counted_in_8_bits_are_found(counter: str, passes: bool) -> None:
    assert _LOOP in _RIGHT
    kernel = Kernel.from_source(_RIGHT.replace(_LOOP, _STAGES.format(counter)), "stages")
    deep = [(problem, seed) for problem, seed in deep_problems(kernel, "fp32") if problem.in_channels > 4096]
    with Worker(kernel, "host") as worker:
        outcomes = [worker.verify(problem, "fp32", "exact", seed) for problem, seed in deep]
    assert len(outcomes) == 2 and all(outcome.ok is passes for outcome in outcomes), outcomes


@pytest.mark.parametrize("kernel", kernels().values(), ids=lambda kernel: kernel.name)
def test_every_kernel_gets_as_many_channels_as_it_can_do(kernel: Kernel) -> None:
    """Also where other launches have a thread for each of them, and hundreds of tiles where blocks stay."""
    problems = [problem for problem, _ in deep_problems(kernel, kernel.dtypes[0])]
    assert all(kernel.why_not(problem, kernel.dtypes[0]) is None for problem in problems)
    if kernel.name in ("fprop_flattened_simt", "fprop_implicit_gemm_wgmma", "fprop_patch_channels_last_simt"):
        assert max(problem.in_channels for problem in problems) > 4096
    assert any(problem.batch == 800 for problem in problems) == kernel.is_persistent


def test_blocks_that_no_team_has_are_seen(assert_found: Callable[..., None]) -> None:
    """Three multiprocessors are never one more than whole teams for two sets of channels, seven are: a quarter of the seeds."""
    kernel, problem = kernels()["fprop_stationary_wgmma"], Problem.parse("n7_c2to2_i1_k3x1x1_g2")
    blocks = [kernel.planned(numbers_of(kernel, problem, "tf32", seed)).launches[-1].grid[0] for seed in range(8)]
    assert blocks == [3, 3, 3, 7, 3, 3, 3, 7]
    right = "const int count = team < teams ? max(0, ceil_div(end_unit - first_unit, members)) : 0;"
    assert_found(kernel, right, right.replace(": 0;", ": 1;"), [(seed, problem) for seed in (3, 7)])


@pytest.mark.parametrize("pass_name", PASSES)
def test_long_lives_are_long_along_each_quantity_and_cheap(pass_name: str) -> None:
    generator = random.Random(0)
    drawn = [strategies.draw_long_life(generator.randint, pass_name) for _ in range(200)]
    long = [{"in": p.in_channels, "out": p.out_channels, "voxels": p.input_size[2], "batch": 8 * p.batch} for p in drawn]
    assert {max(sizes, key=lambda name: sizes[name]) for sizes in long} == {"in", "out", "voxels", "batch"}
    assert all(max(sizes.values()) >= 1000 for sizes in long)
    assert max(p.flop for p in drawn) < 400_000


def test_fuzz_draws_a_share_of_long_lives() -> None:
    kernel = Kernel.from_source(_RIGHT, "right")
    drawn = [example.problem for n in range(640) if (example := draw_example(kernel, f"{n}")) is not None]
    assert 8 <= sum(max(p.in_channels, p.out_channels, p.input_size[2], 8 * p.batch) >= 1000 for p in drawn) <= 40


def test_two_plans_of_one_problem_are_two() -> None:
    """Examples that follow one another, of one problem and for more and for fewer multiprocessors: each is launched by its own plan."""
    kernel, problem = kernels()["fprop_implicit_gemm_simt"], Problem.parse("n1_c512to8_i1x1x4_k1")
    more, fewer = (numbers_of(kernel, problem, "fp32", seed) for seed in (323, 328))
    assert more.workspace["partial_sums"] > fewer.workspace["partial_sums"]
    with Worker(kernel, "host") as worker:
        for seed in (323, 328, 323):
            outcome = worker.verify(problem, "fp32", "exact", seed)
            assert outcome.ok, outcome.message
