"""Draws other constructor arguments and shapes for a KernelBench-style file, as far as the signature of its `Model` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck

from ...problem import Problem
from ..strategies import problems
from .judge import check_unwritten
from .match import Match
from .memory import flatten, size_of, store
from .player import Values
from .rules import Wrong

_GEOMETRY = ("kernel_size", "stride", "padding", "output_padding", "dilation")


class _OutOfTime(BaseException):
    """Ends the search: Hypothesis goes on after an exception."""


def search(match: Match, examples: int, seed: int) -> None:
    """Draw other constructor arguments and shapes, as far as `Model`'s signature has them, and shrink what fails."""
    report = match.report
    missing = {"in_channels", "out_channels", "kernel_size"} - set(match.parameters)
    if missing:
        report.note(f"nothing drawn: Model's constructor has no {', '.join(sorted(missing))}")
        return

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, database=None, deadline=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(problems())
    def draw(drawn: Problem) -> None:
        problem, keywords = expressible(drawn, match.parameters)
        hypothesis.assume(problem is not None and problem.batch > 0)
        assert problem is not None
        report.fuzzed += 1
        spelled = ", ".join(f"{name}={value}" for name, value in keywords.items())
        report.doing = f"computing Model({spelled}) on {list(problem.input_shape)}"
        try:
            match.build(keywords)
            inputs = _inputs(problem, match.device, seed)
            match.compare(inputs, f"Model({spelled}) on {list(problem.input_shape)}")
            check_unwritten(match, inputs)
        except Wrong as wrong:
            if wrong.kind == "hang":
                raise _OutOfTime(wrong) from None
            for player in (match.reference, match.candidate):
                if not player.alive:
                    match.start(player)
            raise

    try:
        report.attempt("drawing other problems", draw)
    except _OutOfTime as late:
        report.find(late.args[0])
    except Wrong:  # a crash: found, and the child is there again
        pass


def _inputs(problem: Problem, device: str, seed: int) -> Values:
    generator = torch.Generator(device).manual_seed(seed)
    tree, tensors = flatten([torch.randn(problem.input_shape, generator=generator, device=device)])
    memory = torch.zeros(size_of(tree), dtype=torch.uint8, device=device)
    store(tensors, tree, memory)
    return Values(tree, memory)


def expressible(drawn: Problem, parameters: Mapping[str, bool]) -> tuple[Problem | None, dict[str, Any]]:
    """Return the nearest problem that a constructor with these parameters can express, and its arguments.

    Args:
        parameters: the constructor's, and whether each is a single number.
    """
    fields: dict[str, Any] = {}
    for name in _GEOMETRY:
        value = getattr(drawn, name)
        if name not in parameters:
            value = (0, 0, 0) if name in ("padding", "output_padding") else (1, 1, 1)
        elif parameters[name]:
            value = (value[0],) * 3
        fields[name] = value
    steps = zip(fields["output_padding"], fields["stride"], fields["dilation"], strict=True)
    fields["output_padding"] = tuple(min(o, max(s, d) - 1) for o, s, d in steps)
    if parameters.get("output_padding"):
        fields["output_padding"] = (min(fields["output_padding"]),) * 3
    groups = drawn.groups if "groups" in parameters else 1
    channels: dict[str, Any] = {"in_channels": drawn.in_channels, "out_channels": drawn.out_channels}
    has_bias = "bias" in parameters and drawn.bias
    try:
        problem = Problem(batch=drawn.batch, **channels, input_size=drawn.input_size, **fields, groups=groups, bias=has_bias)
    except ValueError:  # the padding that was drawn leaves nothing of this volume
        return None, {}
    keywords: dict[str, Any] = {**channels, **{name: getattr(problem, name) for name in _GEOMETRY}, "groups": groups, "bias": has_bias}
    keywords = {name: value for name, value in keywords.items() if name in parameters}
    for name in set(_GEOMETRY) & set(keywords):
        if parameters[name]:
            keywords[name] = keywords[name][0]
    return problem, keywords
