"""The sample of the result that is computed in fp64: it agrees with the whole reference, and notices what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupy_convt3d import reference
from cupy_convt3d.lab.accuracy import sample
from cupy_convt3d.lab.tensors import draw_tensors
from cupy_convt3d.problem import PASSES, Problem

PROBLEMS = (
    "n1_c1to1_i3_k1",
    "n2_c4to6_i3x4x5_k3x2x4_s2x1x3_p1x0x1_op1x0x2_g2_bias",
    "n3_c3to2_i4_k3_s2_p1_op1_d2",
    "n2_c4to4_i5x2x3_k2_s3_d2_g4",
    "n1_c2to8_i2x6x4_k1x3x5_s1x2x1_p0x1x2_bias",
)


def picker(tensors: dict[str, Any]) -> Any:
    return lambda name, offsets: tensors[name].ravel()[offsets].astype(np.float64)


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_sample_is_the_references(name: str, pass_name: str) -> None:
    problem = Problem.parse(name)
    tensors = draw_tensors(pass_name, problem, "fp64", "random", 1)
    expected = reference.run(pass_name, problem, tensors)
    chosen = sample(problem, pass_name, picker(tensors), seed=3)
    assert chosen.error(expected[chosen.index]) < 1e-14
    assert np.broadcast(*chosen.index).shape == chosen.values.shape


def test_nan_and_a_wrong_element_show() -> None:
    problem = Problem.parse(PROBLEMS[2])
    tensors = draw_tensors("fprop", problem, "fp64", "random", 1)
    chosen = sample(problem, "fprop", picker(tensors))
    result = chosen.values.copy()
    result[0, 0] = np.nan
    assert not chosen.error(result) <= 1e3
    assert chosen.error(chosen.values * 1.01) == pytest.approx(0.01)
    assert chosen.error(chosen.values) == 0


def test_the_sample_of_a_large_problem_is_quick() -> None:
    problem = Problem(8, 48, 24, 96, 3)  # 440 GFLOP
    pattern = np.random.default_rng(0).standard_normal(1009)
    for pass_name in PASSES:
        chosen = sample(problem, pass_name, lambda name, offsets: pattern[offsets % 1009])
        assert np.isfinite(chosen.values).all() and chosen.values.std() > 1
