"""Layers as published networks have them, drawn by a seed: the population that figures are given over, in place of a list.

A family is drawn by its share, then one of its forms (kernel, stride, padding, output padding, dilation), then sizes: log-uniform in
the family's range, then rounded as such networks do. Sizes are drawn anew until the layer is one that a GPU is asked to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ..errors import ProblemError, shown
from ..problem import Problem, Triple, triple
from .bench.measure import Ceilings

MOST_BYTES = 2 * 10**9  # of a layer's tensors in fp32
FLOORS_MS = (1e-3, 20.0)  # the shortest and the longest that a layer's floor may be, in fp32
H100 = Ceilings(3.0e12, {"fp32": 51.5e12})  # what these floors are reckoned with, on any card
MOST_BATCH = 64

# What networks cut their volumes into, and the fields that they get as they are: brains, the atmosphere, the sea, scans. A layer sees
# one of them halved a few times.
PATCHES: tuple[Triple, ...] = (
    *((96, 96, 96), (128, 128, 128), (160, 160, 160), (80, 80, 80), (160, 192, 64), (128, 160, 192), (96, 160, 160)),
    *((112, 112, 80), (48, 192, 192), (16, 320, 320), (192, 256, 512), (16, 224, 224), (32, 160, 160), (200, 200, 16)),
)
FIELDS: tuple[Triple, ...] = (
    *((91, 109, 91), (181, 217, 181), (13, 181, 360), (13, 721, 1440), (55, 47, 55), (10, 55, 47), (155, 240, 240), (61, 73, 61)),
)


@dataclass(frozen=True)
class Form:
    """A kernel and how it moves, with its weight among the forms of a family; `single` forms take volumes of one voxel."""

    kernel_size: Triple
    stride: Triple
    padding: Triple
    output_padding: Triple
    dilation: Triple
    weight: float
    single: bool = False


@dataclass(frozen=True)
class Family:
    """Layers of one kind.

    Attributes:
        share: of the population, in percent.
        channels: the fewest and most that go in.
        edges: the least and the greatest geometric mean of an input volume's sizes, before rounding.
        outputs: weights of how many channels come out: half as many as go in, as many, a quarter, twice as many, any number in
            `channels`, a head's 1 to 4.
        grouping: "dense", "depthwise" or "grouped" (2 to 32 channels a group).
    """

    name: str
    share: int
    channels: tuple[int, int]
    edges: tuple[int, int]
    forms: tuple[Form, ...]
    outputs: tuple[float, ...] = (0.45, 0.2, 0.05, 0.05, 0.15, 0.1)
    grouping: str = "dense"


@dataclass(frozen=True)
class Layer:
    """A drawn layer; its name says seed, number and family."""

    name: str
    family: str
    problem: Problem


def _form(weight: float, k: object, s: object = 1, p: object = 0, op: object = 0, d: object = 1, *, single: bool = False) -> Form:
    return Form(triple("k", k), triple("s", s), triple("p", p), triple("op", op), triple("d", d), weight, single)


def _patch(weight: float, size: object) -> Form:
    return _form(weight, size, size)


FAMILIES = (
    Family(
        *("patch", 25, (8, 768), (2, 160)),
        (
            *(_patch(0.45, 2), _patch(0.2, (1, 2, 2)), _patch(0.07, (2, 2, 1))),
            *(_patch(0.1, 4), _patch(0.1, (2, 4, 4)), _patch(0.08, (4, 2, 2))),
        ),
        (0.45, 0.15, 0.05, 0.0, 0.2, 0.15),
    ),
    Family("k3s2_even", 15, (8, 512), (3, 128), (_form(0.85, 3, 2, 1, 1), _form(0.15, 3, (1, 2, 2), 1, (0, 1, 1)))),
    Family("k3s2_odd", 10, (3, 512), (3, 128), (_form(0.85, 3, 2, 1), _form(0.15, 3, (1, 2, 2), 1))),
    Family(
        *("k4s2", 20, (8, 1024), (1, 96)),
        (
            *(_form(0.5, 4, 2, 1), _form(0.08, 4, 2), _form(0.06, 4, 2, 3), _form(0.1, (1, 4, 4), (1, 2, 2), (0, 1, 1))),
            *(_form(0.12, (3, 4, 4), (1, 2, 2), 1), _form(0.14, 4, 1, single=True)),
        ),
    ),
    Family(
        *("k5k6", 5, (4, 384), (3, 96)),
        (
            *(_form(0.25, 5, 2, 2, 1), _form(0.25, 5, 2, 2), _form(0.25, 6, 2, 2)),
            *(_form(0.08, 5, 3, 1), _form(0.07, 5, 3, 2, 2), _form(0.1, 6, 3, 2, 1)),
        ),
    ),
    Family(
        *("stride1", 10, (4, 512), (3, 128)),
        (
            *(_form(0.15, 1), _form(0.3, 3, 1, 1), _form(0.15, 3), _form(0.1, 5, 1, 2), _form(0.05, 5)),
            *(_form(0.05, (1, 3, 3), 1, (0, 1, 1)), _form(0.05, (3, 1, 1), 1, (1, 0, 0)), _form(0.05, (3, 5, 7))),
            *(_form(0.05, (3, 5, 5), 1, (1, 2, 2)), _form(0.05, (1, 5, 5), 1, (0, 2, 2))),
        ),
        (0.2, 0.4, 0.05, 0.05, 0.2, 0.1),
    ),
    Family(
        *("dilated", 5, (8, 384), (4, 96)),
        (
            *(_form(0.3, 3, 1, 2, 0, 2), _form(0.15, 3, 1, 3, 0, 3), _form(0.15, 3, 1, 0, 0, 2)),
            *(_form(0.15, 3, 2, 1, 0, 2), _form(0.15, 3, 2, 2, 1, 2), _form(0.1, 3, 2, 3, 1, 3)),
        ),
        (0.3, 0.4, 0.05, 0.05, 0.2, 0.0),
    ),
    Family(
        *("depthwise", 5, (32, 512), (4, 128)),
        (
            *(_form(0.2, 3, 1, 1), _form(0.15, 5, 1, 2), _form(0.1, 7, 1, 3), _form(0.15, 3, 2, 1), _form(0.1, 3, 2, 1, 1)),
            *(_form(0.15, 5, 2, 2), _form(0.05, 5, 2, 2, 1), _form(0.1, 7, 2, 3)),
        ),
        grouping="depthwise",
    ),
    Family(
        *("grouped", 5, (32, 512), (4, 96)),
        (
            *(_form(0.3, 3, 2, 1, 1), _form(0.2, 3, 2, 1), _form(0.2, 4, 2, 1)),
            *(_form(0.15, 2, 2), _form(0.15, 3, 1, 1)),
        ),
        grouping="grouped",
    ),
)  # fmt: skip


def population(seed: int, count: int, wanted: Callable[[Problem], bool] | None = None) -> list[Layer]:
    """Return the first `count` layers of a seed, all of them different; a layer is the same whatever `count` is.

    Args:
        wanted: says which layers count, of the first `100 * count`; None: all.

    Raises:
        ProblemError: `seed` is no number from 0 on, or `count` none from 1 on.
    """
    for name, number, least in (("seed", seed, 0), ("count", count, 1)):
        if type(number) is not int or number < least:
            raise ProblemError(f"{name}={shown(number)}: must be at least {least}, and whole")
    if wanted is None:
        return list(islice(_layers(seed), count))
    return list(islice((layer for layer in islice(_layers(seed), 100 * count) if wanted(layer.problem)), count))


def is_asked_for(problem: Problem) -> bool:
    """Whether a layer has the bytes and the floor, in fp32, of one that a GPU is asked to do."""
    shortest, longest = FLOORS_MS
    return problem.compulsory_bytes(4) <= MOST_BYTES and shortest <= (H100.floor_ms(problem, "fprop", "fp32") or 0.0) <= longest


def _layers(seed: int) -> Iterator[Layer]:
    seen: set[Problem] = set()
    shares = np.array([family.share for family in FAMILIES], float)
    for number in range(2**31):
        generator = np.random.Generator(np.random.PCG64([seed, number]))
        family = FAMILIES[_index(generator, shares)]
        form = family.forms[_index(generator, np.array([form.weight for form in family.forms]))]
        problem = None
        while problem is None or problem in seen or not is_asked_for(problem):
            problem = _draw(generator, family, form)
        seen.add(problem)
        yield Layer(f"p{seed}_{number}_{family.name}", family.name, problem)


def _draw(generator: np.random.Generator, family: Family, form: Form) -> Problem | None:
    """Return a problem of a form; None where its padding leaves nothing of the volume."""
    ins, outs, groups = _channels(generator, family)
    size: Triple = (1, 1, 1) if form.single else _volume(generator, *family.edges)
    batch = _power_of_two(generator, MOST_BATCH) if generator.random() < 0.8 else round(_log_uniform(generator, 1, MOST_BATCH))
    geometry = (form.kernel_size, form.stride, form.padding, form.output_padding, form.dilation)
    try:
        return Problem(batch, ins, outs, size, *geometry, groups, bias=bool(generator.random() < 0.5))
    except ProblemError:
        return None


def _channels(generator: np.random.Generator, family: Family) -> tuple[int, int, int]:
    """Return how many channels go in and out, and in how many groups."""
    least, most = family.channels
    multiple = (16, 8, 1)[_index(generator, np.array([0.6, 0.3, 0.1]))]  # a network's habit, for both of its numbers

    def any_number() -> int:
        return min(most, max(least, multiple * max(1, round(_log_uniform(generator, least, most) / multiple))))

    ins = any_number()
    if family.grouping == "depthwise":
        return ins, ins, ins
    if family.grouping == "grouped":
        each = 2 * _power_of_two(generator, 16)
        groups = max(2, round(ins / each))
        return groups * each, groups * max(1, (each, each // 2, 2 * each)[_index(generator, np.array([0.6, 0.25, 0.15]))]), groups
    choices = (ins // 2, ins, ins // 4, 2 * ins, any_number(), int(generator.integers(1, 5)))
    outs = choices[_index(generator, np.array(family.outputs))]
    return ins, max(1, min(most, outs)), 1


def _volume(generator: np.random.Generator, least: int, most: int) -> Triple:
    """Return an input volume: four in ten powers of two, as many patches, a quarter of odd sizes (fields, and any at all)."""
    edge = _log_uniform(generator, least, most)
    kind = _index(generator, np.array([0.4, 0.35, 0.125, 0.125]))
    if kind in (1, 2):
        whole = (PATCHES, FIELDS)[kind - 1]
        return _halved(whole[generator.integers(len(whole))], edge)
    sizes = [edge, edge, edge] if kind == 0 else [edge * 2 ** generator.uniform(-1, 1) for _ in range(3)]
    if generator.random() < 0.4:  # flat: frames of a video, thick slices, and now and then short rows
        sizes[_index(generator, np.array([0.7, 0.1, 0.2]))] /= 2 ** generator.uniform(0.5, 3.5)
    rounded = [max(1, 2 ** round(math.log2(size)) if kind == 0 else round(size)) for size in sizes]
    return (rounded[0], rounded[1], rounded[2])


def _halved(whole: Triple, edge: float) -> Triple:
    """Return what is left of a volume after as many halvings, each rounded up, as bring its geometric mean nearest to `edge`."""
    halvings = max(0, round(math.log2(math.prod(whole) ** (1 / 3) / edge)))
    d, h, w = (-(-size // 2**halvings) for size in whole)
    return (d, h, w)


def _power_of_two(generator: np.random.Generator, most: int) -> int:
    return int(2 ** generator.integers(0, most.bit_length()))


def _log_uniform(generator: np.random.Generator, least: float, most: float) -> float:
    return math.exp(generator.uniform(math.log(least), math.log(most)))


def _index(generator: np.random.Generator, weights: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
    """Return an index, as often as its weight says."""
    return int(np.searchsorted(np.cumsum(weights), generator.random() * weights.sum(), side="right"))
