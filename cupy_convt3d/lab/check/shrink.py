"""From a problem that fails to the smallest one near it that still does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, permutations, product
from typing import Any

from ...errors import KernelError, ProblemError
from ...problem import Problem
from ..run.far import FAR
from ..run.verify import Outcome
from ..run.worker import InProcess, Worker
from .examples import Example

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
        steps = (set(_smaller(problem, moves(problem))) - passed for moves in (_changes, _trades))
        for candidate in chain.from_iterable(sorted(step, key=measure) for step in steps):
            if time.monotonic() > deadline:
                return problem
            if fails(candidate):
                problem = candidate
                break
            passed.add(candidate)
        else:
            return problem


def shrink_example(
    worker: Worker | InProcess, example: Example, outcome: Outcome, pairs: Sequence[tuple[str, str]], limit_s: float = 5.0
) -> tuple[Example, Outcome]:
    """Return the smallest failing example near one that failed with `outcome`, and how it fails.

    Of the (kind, dtype) in `pairs` that come before the example's own, the first to fail takes its place: integers make the
    better counterexample.
    """
    worker.kernel = example.kernel
    if example.kind == FAR:
        return example, outcome
    seeds = list(dict.fromkeys((0, example.seed, 1))) if worker.sanitizer is None else [example.seed]
    time_limit_s = worker.time_limit_s
    if "hang" in outcome.message:  # each try of another that hangs costs the whole limit
        # a fresh child under a sanitizer needs longer than that for its first block
        seeds, worker.time_limit_s = [example.seed], min(time_limit_s, 0.5 if worker.sanitizer is None else 2.0)
    best = (example, outcome)

    def fails(problem: Problem, kind: str) -> bool:
        nonlocal best
        if example.kernel.why_not(problem, example.dtype) is not None:
            return False
        for seed in seeds:
            try:
                tried = worker.verify(problem, example.dtype, kind, seed)
            except KernelError:  # this GPU has too little shared memory for it
                return False
            if not tried.ok:
                best = (replace(example, problem=problem, kind=kind, seed=seed), tried)
                return True
        return False

    try:
        kinds = [kind for kind, dtype in pairs if dtype == example.dtype]
        kind = next((kind for kind in kinds[: kinds.index(example.kind)] if fails(example.problem, kind)), example.kind)
        shrink(example.problem, lambda problem: fails(problem, kind), limit_s)
    finally:
        worker.time_limit_s = time_limit_s
    return best


def _smaller(problem: Problem, moves: Iterable[dict[str, Any]]) -> Iterator[Problem]:
    size = measure(problem)
    for changes in moves:
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


def _trades(problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield every way to take back one field of an axis for another's rise by one: fewer fields then make up an extent."""
    for axis, (lowered, least), raised in product(range(3), _AXIS_FIELDS.items(), _AXIS_FIELDS):
        if lowered != raised and getattr(problem, lowered)[axis] > least + 1:
            rise = getattr(problem, raised)[axis] + 1
            yield {lowered: _with(getattr(problem, lowered), axis, least), raised: _with(getattr(problem, raised), axis, rise)}


def _whole_axes(problem: Problem) -> Iterator[dict[str, Any]]:
    for count in (1, 2, 3):
        for axes in combinations(range(3), count):
            yield {
                name: tuple(least if a in axes else getattr(problem, name)[a] for a in range(3))
                for name, least in _AXIS_FIELDS.items()
            }


def _with(values: tuple[int, int, int], axis: int, value: int) -> tuple[int, ...]:
    return tuple(value if a == axis else v for a, v in enumerate(values))
