"""Draws other constructor arguments and shapes for a KernelBench-style file, as far as the signature of its `Model` has them."""

from __future__ import annotations

import inspect
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck

from ..problem import Problem
from .kernelbench_child import Report, Subject, Wrong, check_unwritten
from .strategies import problems

_GEOMETRY = ("kernel_size", "stride", "padding", "output_padding", "dilation")


def fuzz(report: Report, model: Any, model_new: Any, device: str, examples: int, seed: int) -> None:
    """Draw other constructor arguments and shapes, as far as `Model`'s signature has them, and shrink what fails."""
    parameters = inspect.signature(model.__init__).parameters
    missing = {"in_channels", "out_channels", "kernel_size"} - set(parameters)
    if missing:
        report.content["notes"].append(f"nothing drawn: Model's constructor has no {', '.join(sorted(missing))}")
        return
    count = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, database=None, deadline=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(problems())
    def search(drawn: Problem) -> None:
        nonlocal count
        problem, keywords = expressible(drawn, parameters)
        hypothesis.assume(problem is not None and problem.batch > 0)
        assert problem is not None
        count += 1
        report.doing(f"computing {problem}: {keywords}")
        torch.manual_seed(seed)
        inputs = [torch.randn(problem.input_shape, device=device)]
        subject = Subject(model, model_new, (), keywords, device)
        try:
            subject.compare(inputs, f"Model({_spelled(keywords)}) on {list(problem.input_shape)}")
            check_unwritten(subject, inputs)
        except Wrong:
            raise
        except Exception as error:
            raise Wrong("error", f"{type(error).__name__} on {problem}, Model({_spelled(keywords)}): {str(error)[:300]}") from error

    try:
        report.attempt("drawing other problems", search)
    finally:
        report.content["fuzzed"] = count


def _spelled(keywords: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in keywords.items())


def expressible(drawn: Problem, parameters: Any) -> tuple[Problem | None, dict[str, Any]]:
    """Return the nearest problem that a constructor with these parameters can express, and its arguments."""
    fields: dict[str, Any] = {}
    for name in _GEOMETRY:
        value = getattr(drawn, name)
        if name not in parameters:
            value = (0, 0, 0) if name in ("padding", "output_padding") else (1, 1, 1)
        elif _is_scalar(parameters[name]):
            value = (value[0],) * 3
        fields[name] = value
    steps = zip(fields["output_padding"], fields["stride"], fields["dilation"], strict=True)
    fields["output_padding"] = tuple(min(o, max(s, d) - 1) for o, s, d in steps)
    if "output_padding" in parameters and _is_scalar(parameters["output_padding"]):
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
        if _is_scalar(parameters[name]):
            keywords[name] = keywords[name][0]
    return problem, keywords


def _is_scalar(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    if annotation in (int, "int"):
        return True
    return annotation is inspect.Parameter.empty and isinstance(parameter.default, int)
