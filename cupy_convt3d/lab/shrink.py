"""From a problem that fails to the smallest one near it that still does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, permutations, product
from typing import Any

from ..errors import ProblemError
from ..problem import Problem

# The fields of an axis and the value that says nothing; padding and output_padding last, as they are bounded by the others.
_AXIS_FIELDS = {"input_size": 1, "kernel_size": 1, "stride": 1, "dilation": 1, "output_padding": 0, "padding": 0}


def measure(problem: Problem) -> tuple[Any, ...]:
    """Return how large a problem is, for comparing: the sum of all that is not the default, then where it is (last axis best)."""
    axes = [sum(abs(getattr(problem, name)[a] - least) for name, least in _AXIS_FIELDS.items()) for a in range(3)]
    counts = abs(problem.batch - 1) + problem.in_channels + problem.out_channels + problem.groups - 3 + problem.bias
    return (counts + sum(axes), counts, *axes, str(problem))


def shrink(problem: Problem, fails: Callable[[Problem], bool], limit_s: float = 5.0) -> Problem:
    """Return the smallest problem that greedy steps reach with `fails` true for each step.

    It takes the smallest failing neighbour until none fails, so the end is the same each time unless the time runs out.
    """
    deadline = time.monotonic() + limit_s
    passed: set[Problem] = set()
    while True:
        for candidate in sorted(set(_smaller(problem)) - passed, key=measure):
            if time.monotonic() > deadline:
                return problem
            if fails(candidate):
                problem = candidate
                break
            passed.add(candidate)
        else:
            return problem


def _smaller(problem: Problem) -> Iterator[Problem]:
    size = measure(problem)
    for changes in _changes(problem):
        try:
            candidate = replace(problem, **changes)
        except ProblemError:
            continue
        if measure(candidate) < size:
            yield candidate


def _changes(problem: Problem) -> Iterator[dict[str, Any]]:
    yield {"bias": False}
    yield {"batch": 1}
    yield {"batch": problem.batch // 2}
    yield {"batch": problem.batch - 1}
    per_group = (problem.in_channels // problem.groups, problem.out_channels // problem.groups)
    groups_tried = sorted({1, 2, problem.groups})
    for groups, inputs, outputs in product(groups_tried, *({1, 2, n - 1, n} - {0} for n in per_group)):
        yield {"groups": groups, "in_channels": groups * inputs, "out_channels": groups * outputs}
    yield {"in_channels": 1, "out_channels": 1, "groups": 1, "batch": 1, "bias": False}
    for order in permutations(range(3)):
        yield {name: tuple(getattr(problem, name)[a] for a in order) for name in _AXIS_FIELDS}
    for axis in range(3):
        yield from _axis_changes(problem, axis)
    yield from _whole_axes(problem)


def _axis_changes(problem: Problem, axis: int) -> Iterator[dict[str, Any]]:
    """Yield every way to lower one field of an axis, or two at once (a smaller size may need a smaller padding)."""
    lower = []
    for name, least in _AXIS_FIELDS.items():
        value = getattr(problem, name)[axis]
        lower += [(name, v) for v in sorted({least, least + 1, (value + least) // 2, value - 1}) if least <= v < value]
    steps: list[tuple[tuple[str, int], ...]] = [(step,) for step in lower]
    steps += [pair for pair in combinations(lower, 2) if pair[0][0] != pair[1][0]]
    for step in steps:
        yield {name: _with(getattr(problem, name), axis, value) for name, value in step}


def _whole_axes(problem: Problem) -> Iterator[dict[str, Any]]:
    for count in (1, 2, 3):
        for axes in combinations(range(3), count):
            yield {
                name: tuple(least if a in axes else getattr(problem, name)[a] for a in range(3))
                for name, least in _AXIS_FIELDS.items()
            }


def _with(values: tuple[int, int, int], axis: int, value: int) -> tuple[int, ...]:
    return tuple(value if a == axis else v for a, v in enumerate(values))
