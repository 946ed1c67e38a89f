"""What is drawn to test a kernel: Hypothesis strategies for problems, and named classes of the parameter space."""

from __future__ import annotations

import contextlib
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ..errors import ProblemError
from ..problem import PASSES, Problem

Array = np.ndarray[Any, np.dtype[Any]]
Range = tuple[int, int]


def _on_any_axis(rule: Callable[[int, int, int, int, int, int], bool]) -> Callable[[Problem], bool]:
    """Make a predicate of problems from one of (size, kernel, stride, padding, output_padding, dilation): some axis has it."""

    def holds(problem: Problem) -> bool:
        fields = (problem.input_size, problem.kernel_size, problem.stride)
        return any(map(rule, *fields, problem.padding, problem.output_padding, problem.dilation))

    return holds


def _has_class(rule: Callable[[int, int], bool]) -> Callable[[Problem], bool]:
    return lambda p: any(rule(taps, outputs) for taps, outputs in p.class_sizes)


def _clips(p: Problem) -> bool:
    return any(p.live_pairs(a) < p.input_size[a] * p.kernel_size[a] for a in range(3))


def _is_asymmetric(p: Problem) -> bool:
    return any(len(set(field)) > 1 for field in (p.kernel_size, p.stride, p.padding, p.output_padding, p.dilation))


# Named classes of the parameter space, each with its predicate and the smallest problem in which the class matters.
_FEATURES: dict[str, tuple[Callable[[Problem], bool], str]] = {
    "kernel 1": (lambda p: p.kernel_size == (1, 1, 1), "n1_c1to1_i1_k1"),
    "size-1 axis": (lambda p: min(p.input_size) == 1, "n1_c1to1_i1_k1"),
    "no clipped tap": (lambda p: not _clips(p), "n1_c1to1_i1_k1"),
    "bias": (lambda p: p.bias, "n1_c1to1_i1_k1_bias"),
    "batch > 1": (lambda p: p.batch > 1, "n2_c1to1_i1_k1"),
    "batch 0": (lambda p: p.batch == 0, "n0_c1to1_i1_k1"),
    "in_channels != out_channels": (lambda p: p.in_channels != p.out_channels, "n1_c1to2_i1_k1"),
    "depthwise": (lambda p: 1 < p.groups == p.in_channels == p.out_channels, "n1_c2to2_i1_k1_g2"),
    "channel multiplier": (lambda p: 1 < p.groups == p.in_channels < p.out_channels, "n1_c2to4_i1_k1_g2"),
    "groups 1 < g < C": (lambda p: 1 < p.groups < p.in_channels, "n1_c4to4_i1_k1_g2"),
    "kernel > input": (_on_any_axis(lambda i, k, s, p, o, d: k > i), "n1_c1to1_i1_k1x1x2"),
    "asymmetric": (_is_asymmetric, "n1_c1to1_i1x2x3_k3x1x2"),
    "clipped taps": (_clips, "n1_c1to1_i2_k3_p1"),
    "padding = dilation*(kernel-1)": (
        _on_any_axis(lambda i, k, s, p, o, d: p == d * (k - 1) > 0),
        "n1_c1to1_i1x1x2_k1x1x2_p0x0x1",
    ),
    "padding > dilation*(kernel-1)": (_on_any_axis(lambda i, k, s, p, o, d: p > d * (k - 1)), "n1_c1to1_i1x1x3_k1_p0x0x1"),
    "stride": (lambda p: max(p.stride) > 1, "n1_c1to1_i1x1x2_k1x1x2_s1x1x2"),
    "stride on every axis": (lambda p: min(p.stride) > 1, "n1_c1to1_i2_k3_s2_p1_op1"),
    "kernel = stride": (lambda p: p.kernel_size == p.stride != (1, 1, 1), "n1_c1to1_i1x1x2_k1x1x2_s1x1x2"),
    "stride > kernel": (_on_any_axis(lambda i, k, s, p, o, d: s > k), "n1_c1to1_i1x1x2_k1_s1x1x2"),
    "kernel not a multiple of stride": (
        _on_any_axis(lambda i, k, s, p, o, d: 1 < s < k and k % s > 0),
        "n1_c1to1_i1x1x2_k1x1x3_s1x1x2",
    ),
    "classes with no tap": (_has_class(lambda taps, outputs: taps == 0 < outputs), "n1_c1to1_i1x1x2_k1_s1x1x2"),
    "classes with no output": (_has_class(lambda taps, outputs: outputs == 0), "n1_c1to1_i1_k1_s1x1x2"),
    "dilation": (_on_any_axis(lambda i, k, s, p, o, d: d > 1 and k > 1), "n1_c1to1_i1_k1x1x2_d1x1x2"),
    "gcd(stride, dilation) > 1": (
        _on_any_axis(lambda i, k, s, p, o, d: k > 1 < math.gcd(s, d)),
        "n1_c1to1_i1x1x2_k1x1x2_s1x1x2_d1x1x2",
    ),
    "output_padding": (lambda p: max(p.output_padding) > 0, "n1_c1to1_i1_k1_s1x1x2_op0x0x1"),
    "output_padding >= stride": (_on_any_axis(lambda i, k, s, p, o, d: o >= s), "n1_c1to1_i1_k1x1x2_op0x0x2_d1x1x3"),
}
FEATURES: dict[str, Callable[[Problem], bool]] = {name: predicate for name, (predicate, _) in _FEATURES.items()}
EDGE_PROBLEMS: list[Problem] = list(dict.fromkeys(Problem.parse(name) for _, name in _FEATURES.values()))


def covered(problems: Iterable[Problem]) -> Counter[str]:
    """Return how many of `problems` lie in each class of `FEATURES`; a class that was missed is absent."""
    return Counter(name for problem in problems for name, holds in FEATURES.items() if holds(problem))


@dataclass
class _Axis:
    """What has been drawn of one axis so far."""

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    output_padding: int = 0
    size: int = 1
    padding: int = 0
    wanted_size: int = 0  # inputs, or outputs of the largest residue class, that a tile's tail asks for; 0: none
    wanted_of_class: bool = False

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1)

    @property
    def extent(self) -> int:
        return (self.size - 1) * self.stride + self.reach + self.output_padding + 1

    def padding_range(self) -> Range:
        """Return the paddings that leave an output, or exactly the outputs wanted."""
        if not self.wanted_of_class:
            return 0, (self.extent - 1) // 2
        surplus = self.extent - self.wanted_size * self.stride
        return max(0, -(-surplus // 2)), (surplus + self.stride - 1) // 2


def _unsteered(axis: _Axis) -> Range:
    return 0, 99


# A steering draws some field of one axis (of every axis for the last three) from a narrower range that may depend on the fields
# already drawn: kernel, stride, dilation, output_padding, size, padding. Each class that even draws would seldom reach has one.
# NOTE: a steering makes as many choices as "", which comes first, and of the same values: so shrinking can replace it by "" and
# keep the rest. A choice left out, or made by index, would leave the counterexample with the fields that only steering needed.
_STEERINGS: dict[str, dict[str, Callable[[_Axis], Range]]] = {
    "": {},
    "stride > kernel": {"kernel": lambda a: (1, 2), "stride": lambda a: (3, 4)},
    "gcd(stride, dilation) > 1": {"kernel": lambda a: (2, 4), "stride": lambda a: (2, 2), "dilation": lambda a: (2, 2)},
    "output_padding >= stride": {
        "stride": lambda a: (1, 2),
        "dilation": lambda a: (3, 3),
        "output_padding": lambda a: (a.stride, 2),
    },
    "padding = dilation*(kernel-1)": {
        "kernel": lambda a: (2, 3),
        "dilation": lambda a: (1, 2),
        "size": lambda a: (1 + -(-max(0, a.reach - a.output_padding) // a.stride), 6),
        "padding": lambda a: (a.reach, a.reach),
    },
    "padding > dilation*(kernel-1)": {
        "kernel": lambda a: (1, 2),
        "dilation": lambda a: (1, 2),
        "size": lambda a: (1 + -(-max(0, a.reach + 2 - a.output_padding) // a.stride), 6),
        "padding": lambda a: (a.reach + 1, 99),
    },
    "classes with no output": {
        "kernel": lambda a: (1, 2),
        "stride": lambda a: (4, 4),
        "dilation": lambda a: (1, 1),
        "output_padding": lambda a: (0, 0),
        "size": lambda a: (1, 1),
    },
    "kernel = stride": {"kernel": lambda a: (1, 3), "stride": lambda a: (a.kernel, a.kernel), "dilation": lambda a: (1, 1)},
    "kernel 1": {"kernel": lambda a: (1, 1)},
    "no clipped tap": {"padding": lambda a: (0, 0)},
}
_EVERY_AXIS = ("kernel = stride", "kernel 1", "no clipped tap")
_GROUPINGS: dict[str, dict[str, Range]] = {
    "": {},
    "groups 1 < g < C": {"groups": (2, 2), "in_channels_per_group": (2, 99)},
    "depthwise": {"groups": (2, 99), "in_channels_per_group": (1, 1), "out_channels_per_group": (1, 1)},
    "channel multiplier": {"groups": (2, 99), "in_channels_per_group": (1, 1), "out_channels_per_group": (2, 99)},
}
TILE_QUANTITIES = ("output_voxels", "input_voxels", "in_channels_per_group", "out_channels_per_group", "groups", "batch")


_AXIS_STEPS = ("padding", "output_padding", "dilation", "stride", "input_size", "kernel_size")
_STEPS = (*_AXIS_STEPS, "padding", "batch", "groups", "ins", "outs", "outs", "bias")  # what a neighbour differs in; some are drawn twice

Choose = Callable[[int, int], int]  # draws an integer between two, both included


@lru_cache(maxsize=4096)
def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low, high)  # a problem takes some thirty, the same as others


@st.composite
def problems(draw: st.DrawFn, pass_name: str = "fprop", **limits: Any) -> Problem:
    """Strategy for what `draw_problem` draws, with the same arguments."""
    return draw_problem(lambda low, high: draw(_integers(low, high)), pass_name, **limits)


def draw_problem(
    choose: Choose,
    pass_name: str = "fprop",
    *,
    max_multiply_adds: int = 40_000,
    max_kernel: int = 5,
    max_stride: int = 4,
    max_dilation: int = 3,
    max_size: int = 6,
    max_channels: int = 4,
    tiles: Mapping[str, int] | None = None,
) -> Problem:
    """Draw a valid problem, small and biased towards `FEATURES`; nothing is filtered, so no draw is thrown away.

    Args:
        choose: makes each choice: Hypothesis, or `random.Random.randint` where twenty times the speed counts for more than
            shrinking.
        pass_name: only "fprop" draws a bias.
        max_multiply_adds: most useful multiply-adds of one example (half its `Problem.flop`).
        max_kernel, max_stride, max_dilation, max_size: largest value on an axis.
        max_channels: largest number of channels of a group, and of groups.
        tiles: tile sizes of a kernel; a third of the draws each land on `n*tile - 1`, `n*tile` or `n*tile + 1` with n = 1 or 2.
            Of `TILE_QUANTITIES`, "output_voxels" are those of the largest residue class, `Problem.names["residue_voxels"]`;
            the others are as in `Problem.names`. A tail passes the limits above, but `max_multiply_adds` only if it alone does.

    Raises:
        ProblemError: `pass_name` or a quantity in `tiles` is unknown.
    """
    if unknown := set(tiles or ()) - set(TILE_QUANTITIES):
        raise ProblemError(f"tiles={dict(tiles or {})!r}: {', '.join(unknown)} is not one of {', '.join(TILE_QUANTITIES)}")
    if pass_name not in PASSES:
        raise ProblemError(f"pass={pass_name!r}: must be one of {', '.join(PASSES)}")

    def pick(values: Sequence[Any]) -> Any:
        return values[choose(0, len(values) - 1)]

    maxima = {"kernel": max_kernel, "stride": max_stride, "dilation": max_dilation}
    steering = pick([*_STEERINGS, "kernel = stride"])  # twice, for (1, 1, 1) does not count as one
    grouping = _GROUPINGS[pick(["", *_GROUPINGS])]
    cubic = choose(0, 2) == 2
    first = choose(0, 2)
    axes = [_Axis(), _Axis(), _Axis()]
    order = [axes[first], axes[first - 1], axes[first - 2]]
    targets, budget = _draw_targets(choose, tiles or {}, order, max_multiply_adds)
    rules = [_STEERINGS[steering if n == 0 or cubic or steering in _EVERY_AXIS else ""] for n in range(3)]

    budget //= _draw_windows(choose, order, rules, maxima, cubic, min(64, budget))
    budget //= _draw_sizes(choose, order, rules, max_size, max(1, budget // 8))
    counts = {}
    for name in ("groups", "in_channels_per_group", "out_channels_per_group"):
        natural = (1, 1, *range(1, max_channels + 1)) if name == "groups" else range(1, max_channels + 1)
        counts[name] = _draw_from(choose, natural, budget, grouping.get(name, (1, 99)))
        budget = budget if name in targets else budget // counts[name]
    batch = pick([n for n in (1, 2, 1, 2, 3) if n <= max(1, budget)] + [0])
    counts = {"batch": batch} | counts | targets
    bias = choose(0, 1) == 1 and pass_name == "fprop"
    for axis, rule in zip(order, rules, strict=True):  # last, so that its range leaves nothing to filter
        low, high = axis.padding_range()
        axis.padding = _draw_within(choose, (low, high), rule.get("padding", _unsteered)(axis))
        if cubic and axis is not order[0]:
            axis.padding = max(low, min(high, order[0].padding))
    return Problem(
        batch=counts["batch"],
        in_channels=counts["groups"] * counts["in_channels_per_group"],
        out_channels=counts["groups"] * counts["out_channels_per_group"],
        groups=counts["groups"],
        bias=bias,
        input_size=(axes[0].size, axes[1].size, axes[2].size),
        kernel_size=(axes[0].kernel, axes[1].kernel, axes[2].kernel),
        stride=(axes[0].stride, axes[1].stride, axes[2].stride),
        padding=(axes[0].padding, axes[1].padding, axes[2].padding),
        output_padding=(axes[0].output_padding, axes[1].output_padding, axes[2].output_padding),
        dilation=(axes[0].dilation, axes[1].dilation, axes[2].dilation),
    )


@st.composite
def neighbours(draw: st.DrawFn, known: Sequence[Problem], pass_name: str = "fprop") -> Problem:
    """Strategy for what `draw_neighbour` draws near one of the known problems."""
    return draw_neighbour(lambda low, high: draw(_integers(low, high)), draw(st.sampled_from(known)), pass_name)


def draw_neighbour(choose: Choose, problem: Problem, pass_name: str = "fprop") -> Problem:
    """Draw a problem that one or two steps lead to: another padding, stride, batch and so on, or a channel more or less.

    A step that leads to no problem, or to one of more than twice the multiply-adds and outputs, is left out.
    """
    most = 2 * _work(problem) + 40_000
    for _ in range(choose(1, 2)):
        with contextlib.suppress(ProblemError):
            changed = replace(problem, **_draw_step(choose, problem, pass_name))
            problem = changed if _work(changed) <= most else problem
    return problem


def _work(problem: Problem) -> int:
    return problem.flop // 2 + math.prod(problem.output_shape)


def _draw_step(choose: Choose, problem: Problem, pass_name: str) -> dict[str, Any]:
    """Draw what is changed: a field of one axis or of all, or a number of volumes, groups or channels of a group, or the bias."""
    name = _STEPS[choose(0, len(_STEPS) - 1)]
    if name == "bias":
        return {"bias": pass_name == "fprop" and not problem.bias}
    move = choose(0, 3)
    if name in _AXIS_STEPS:
        axis, least = choose(0, 3), 0 if "padding" in name else 1
        sizes = getattr(problem, name)
        return {name: tuple(_moved(n, least, move) if axis in (a, 3) else n for a, n in enumerate(sizes))}
    groups = problem.groups
    counts = {"batch": problem.batch, "groups": groups, "ins": problem.in_channels // groups, "outs": problem.out_channels // groups}
    counts[name] = _moved(counts[name], 1, move)
    groups = counts["groups"]
    channels = {"in_channels": groups * counts["ins"], "out_channels": groups * counts["outs"]}
    return {"batch": counts["batch"], "groups": groups, **channels}


def _moved(number: int, least: int, move: int) -> int:
    return (least, least + 1, max(least, number - 1), number + 1)[move]


def draw_long_life(choose: Choose, pass_name: str = "fprop", most: int = 17_000) -> Problem:
    """Draw a problem of few outputs whose sums, or of few multiprocessors whose blocks, go on for hundreds of stages or many tiles.

    One of input channels, output channels, voxels and volumes is long, up to `most`; all else is tiny, so that the host has little to do.
    """
    long = choose(0, 3)
    length = choose(most // 16, most)
    kernel = choose(1, 2)
    few = choose(1, 2)
    if long == 3:
        length //= 8  # a volume costs more than a voxel
    size = (1, 1, length) if long == 2 else (1, 1, few)
    return Problem(
        batch=length if long == 3 else 1,
        in_channels=length if long == 0 else few,
        out_channels=length if long == 1 else 3 - few,
        input_size=size,
        kernel_size=(1, 1, kernel),
        stride=(1, 1, choose(1, kernel)),
        bias=choose(0, 1) == 1 and pass_name == "fprop",
    )


def half_as_long(problem: Problem) -> Problem:
    """Return a problem of `draw_long_life` with half of what it has most of."""
    name = max(("batch", "in_channels", "out_channels"), key=lambda field: int(getattr(problem, field)))
    if problem.input_size[2] > getattr(problem, name):
        return replace(problem, input_size=(1, 1, -(-problem.input_size[2] // 2)))
    return replace(problem, **{name: -(-getattr(problem, name) // 2)})


def _draw_within(choose: Choose, allowed: Range, wanted: Range) -> int:
    """Draw from the part of `wanted` that is allowed, or from all that is allowed if there is none."""
    (low, high), (least, most) = allowed, wanted
    if least <= high and most >= low:
        low, high = least if least > low else low, most if most < high else high
    return choose(low, high)


def _draw_from(choose: Choose, values: Sequence[int], limit: int, wanted: Range = (1, 99)) -> int:
    """Draw one of `values`, which ascend from 1, up to `limit` and within `wanted` if that can be."""
    allowed = bisect_right(values, max(1, limit)) - 1
    return values[_draw_within(choose, (0, allowed), (bisect_left(values, wanted[0]), bisect_right(values, wanted[1]) - 1))]


def _draw_targets(choose: Choose, tiles: Mapping[str, int], order: Sequence[_Axis], budget: int) -> tuple[dict[str, int], int]:
    """Draw which quantities land on the tail of their tile, and return them with what is left of the budget.

    Voxels are split over the axes here. As many choices are made for a quantity that is not wanted as for one that is.
    """
    targets: dict[str, int] = {}
    for quantity, tile in tiles.items():
        wanted = choose(0, 2) == 2
        target = max(1, choose(1, 2) * tile + (-1, 0, 1)[choose(0, 2)])
        sizes = _draw_split(choose, target) if quantity.endswith("voxels") else ()
        if not wanted or (targets and target > budget) or (sizes and order[0].wanted_size):
            continue
        targets[quantity] = target
        budget = max(1, budget // target)
        for axis, size in zip(order, sizes, strict=False):
            axis.wanted_size = size
            axis.wanted_of_class = quantity == "output_voxels"
    return targets, budget


def _draw_split(choose: Choose, voxels: int) -> tuple[int, int, int]:
    sizes = []
    for _ in range(2):
        divisors = [n for n in range(1, voxels + 1) if voxels % n == 0]
        sizes.append(divisors[choose(0, len(divisors) - 1)])
        voxels //= sizes[-1]
    return voxels, sizes[0], sizes[1]


def _draw_windows(
    choose: Choose,
    axes: Sequence[_Axis],
    rules: Sequence[Mapping[str, Callable[[_Axis], Range]]],
    maxima: Mapping[str, int],
    cubic: bool,
    max_taps: int,
) -> int:
    """Draw kernel, stride, dilation and output_padding of every axis; return the number of taps."""
    taps = 1
    for axis, rule in zip(axes, rules, strict=True):
        wanted = {field: rule.get(field, _unsteered) for field in ("kernel", "stride", "dilation", "output_padding")}
        largest = math.floor(max_taps ** (1 / 3) + 1e-9) if cubic else max_taps // taps
        axis.kernel = _draw_within(choose, (1, min(maxima["kernel"], largest)), wanted["kernel"](axis))
        axis.stride = _draw_within(choose, (1, maxima["stride"]), wanted["stride"](axis))
        axis.dilation = _draw_within(choose, (1, maxima["dilation"]), wanted["dilation"](axis))
        axis.output_padding = _draw_within(choose, (0, max(axis.stride, axis.dilation) - 1), wanted["output_padding"](axis))
        if cubic:
            axis.kernel, axis.stride, axis.dilation = axes[0].kernel, axes[0].stride, axes[0].dilation
            axis.output_padding = axes[0].output_padding
        taps *= axis.kernel
    return taps


def _draw_sizes(
    choose: Choose,
    axes: Sequence[_Axis],
    rules: Sequence[Mapping[str, Callable[[_Axis], Range]]],
    max_size: int,
    max_voxels: int,
) -> int:
    """Draw the input size of every axis; return the input voxels that no target has paid for."""
    voxels = 1
    for axis, rule in zip(axes, rules, strict=True):
        if not axis.wanted_size:
            allowed = (1, max(1, min(max_size, max_voxels // voxels)))
            axis.size = _draw_within(choose, allowed, rule.get("size", _unsteered)(axis))
            voxels *= axis.size
        elif not axis.wanted_of_class:
            axis.size = choose(axis.wanted_size, axis.wanted_size)
        else:
            fewest = max(1, axis.wanted_size + 1 - -(-(axis.reach + axis.output_padding + 1) // axis.stride))
            axis.size = choose(fewest, fewest + 1)
            low, high = axis.padding_range()
            axis.size += low > high  # only with stride 1, where every second size leaves an odd surplus
    return voxels
