"""Coefficients of `cost` from a sweep, and how well they choose for layers that they were not fitted to.

Terms get coefficients of at least 0 that make the logarithm of the prediction's error small; then a ridge regression on the traits, and
on which configuration it is, takes what is left. What is much slower than the best at its layer counts for less: nobody will choose it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ... import cost
from ...cost import CardCosts, Coefficients, Configuration, KernelCost, LibraryCost
from ...dtypes import DTYPES, allowed_instances
from ...errors import KernelError
from ...kernel import Kernel
from ...problem import LAYOUTS, Problem
from ...tuning import LIBRARY, configured
from .samples import Sample, Sweep

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

PRECISIONS = ("fp32", "tf32", "tf32x3", "bf16", "fp16")
RIDGE = 20.0
FEWEST, FEWEST_OF_LIBRARY = 4, 20  # layers that a kernel's instance, and torch's operator, are fitted to
FOLDS = 6
ROUNDS = 6  # of reweighting
HUBER = 0.3  # errors of the logarithm beyond which a sample counts for less
LOW = 0.1  # of held-out layers torch's operator is quicker than `LibraryCost.low` says
STRANGE = (
    3.5  # times as long in NCDHW as in channels_last: a stall of the host was timed, or an algorithm that nobody can rely on
)
SMALL = 1e-4  # coefficients below it are left out
MOST_CONFIGURATIONS, GAIN = 4, 0.01  # of an instance that are kept; what one more has to bring, of the logarithm of the time


# By precision, layout and layer: the regret of the kernel taken, what auto takes (below 0: torch's operator), torch's operator, in ms.
_Found = dict[tuple[str, str, str], tuple[float, float, float | None]]


class Row(NamedTuple):
    """A sample with what it is predicted from."""

    sample: Sample
    problem: Problem
    terms: Mapping[str, float]
    traits: Mapping[str, float]

    @property
    def configuration(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(self.sample.tunables.items()))


@dataclass(frozen=True)
class HeldOut:
    """How choices by coefficients fitted to other layers did, over the layers of one precision and layout.

    Attributes:
        layers: how many.
        regret, regret_95: of the kernel and configuration taken, over the best that was swept: geometric mean, 95th percentile.
        speedup, worst, losses: torch / auto: geometric mean, least, and the share of layers below 0.95.
    """

    precision: str
    layout: str
    layers: int
    regret: float
    regret_95: float
    speedup: float
    worst: float
    losses: float


def fit(sweep: Sweep, kernels: Mapping[str, Kernel]) -> CardCosts:
    """Return the costs of a sweep's card: of each kernel's instance and of torch's operator, as far as there are layers enough."""
    rows = list(_rows(sweep, kernels))
    relevance = _relevance(rows)
    grouped = _by_kernel(rows)
    costs = [_kernel_cost(group, own, relevance) for group, own in grouped.items() if _layers(own) >= FEWEST]
    library = []
    for key, own in _by_question(sweep).items():
        if _layers(own) >= FEWEST_OF_LIBRARY:
            found = np.log([held for _, held in _library_held_out(own)])
            library.append(LibraryCost(*key, _library_fit(own), float(min(1.0, math.exp(np.quantile(found, LOW))))))
    return CardCosts(sweep.card, tuple(costs), tuple(library))


def held_out(sweep: Sweep, kernels: Mapping[str, Kernel], precisions: Sequence[str] = PRECISIONS) -> list[HeldOut]:
    """Return how "auto" would have chosen for each layer by coefficients that were fitted without it; whole layers are held out.

    A precision and layout of which the sweep has nothing is left out.
    """
    layers = sorted({sample.problem for sample in sweep.samples})
    order = np.random.default_rng(0).permutation(len(layers))
    fold = {layers[number]: place % FOLDS for place, number in enumerate(order)}
    found: _Found = {}
    for held in range(FOLDS):
        others = replace(sweep, samples=tuple(one for one in sweep.samples if fold[one.problem] != held))
        own = replace(sweep, samples=tuple(one for one in sweep.samples if fold[one.problem] == held))
        _judge(fit(others, kernels), own, kernels, precisions, found)
    return [_summary(*key, found) for key in itertools.product(precisions, LAYOUTS) if any(one[:2] == key for one in found)]


def _judge(
    costs: CardCosts,
    sweep: Sweep,
    kernels: Mapping[str, Kernel],
    precisions: Sequence[str],
    found: _Found,
) -> None:
    """Add, for each question and layer, the time of what is taken, of the best, and torch's; by precision, layout and layer."""
    known = {(one.kernel, one.instance): one for one in costs.kernels}
    rows = list(_rows(sweep, kernels))
    predicted = [(row, ms) for row in rows if (ms := _predicted(known, row)) is not None]
    swept: dict[tuple[str, str], list[Sample]] = {}
    for row in rows:
        swept.setdefault((row.sample.problem, row.sample.layout), []).append(row.sample)
    library = {(one.precision, one.layout): one for one in costs.library}
    torch = {(row.sample.problem, *key[1:]): row for key, rows in _by_question(sweep).items() for row in rows}
    by_layer: dict[tuple[str, str], list[tuple[Row, float]]] = {}
    for row, ms in predicted:
        by_layer.setdefault((row.sample.problem, row.sample.layout), []).append((row, ms))
    for (problem, layout), candidates in by_layer.items():
        for precision in precisions:
            able = [(row, ms) for row, ms in candidates if row.sample.instance in allowed_instances(precision)]
            if not able:
                continue
            taken, ms = min(able, key=lambda pair: pair[1])
            best = min(one.ms for one in swept[problem, layout] if one.instance in allowed_instances(precision))
            rival = torch.get((problem, _rival(precision), layout))
            cost_of = library.get((_rival(precision), layout))
            torch_ms = None
            ours = taken.sample.ms
            if rival is not None and cost_of is not None:
                torch_ms = rival.sample.ms
                low = cost_of.low * cost_of.coefficients.milliseconds(
                    rival.terms, rival.traits, cost.MOST_CORRECTION["library"]
                )
                if ms >= low:
                    ours = -torch_ms  # left to torch
            found[precision, layout, problem] = (taken.sample.ms / best, ours, torch_ms)


def _summary(precision: str, layout: str, found: _Found) -> HeldOut:
    own = [one for key, one in found.items() if key[:2] == (precision, layout)]
    regrets = np.array([regret for regret, _, _ in own])
    ratios = np.array([torch / abs(ours) for _, ours, torch in own if torch is not None])
    losses = float((ratios < 0.95).mean()) if len(ratios) else 0.0
    worst = float(ratios.min()) if len(ratios) else 1.0
    return HeldOut(precision, layout, len(own), _mean(regrets), float(np.quantile(regrets, 0.95)), _mean(ratios), worst, losses)


def _mean(values: Array) -> float:
    return float(np.exp(np.log(values).mean())) if len(values) else 1.0


def _rival(precision: str) -> str:
    return "fp32" if precision == "tf32x3" else precision


def _rows(sweep: Sweep, kernels: Mapping[str, Kernel]) -> Iterator[Row]:
    for sample in sweep.samples:
        kernel = kernels.get(sample.kernel)
        if sample.kernel == LIBRARY or kernel is None:
            continue
        problem = Problem.parse(sample.problem)
        try:
            one = configured(kernel, tuple(sorted({**kernel.tunables, **sample.tunables}.items())))
            terms = cost.kernel_terms(one, problem, sample.instance, sample.layout, sweep.card, False)
        except KernelError:  # its code has changed since
            continue
        yield Row(sample, problem, terms, cost.kernel_traits(problem, sample.layout, terms))


def _by_kernel(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.sample.kernel, row.sample.instance), []).append(row)
    return found


def _by_question(sweep: Sweep) -> dict[tuple[str, str, str], list[Row]]:
    """Return the rows of torch's operator by pass, precision and layout."""
    last = {
        (one.problem, one.instance): one.ms for one in sweep.samples if one.kernel == LIBRARY and one.layout == "channels_last"
    }
    found: dict[tuple[str, str, str], list[Row]] = {}
    for sample in sweep.samples:
        if sample.kernel != LIBRARY:
            continue
        if DTYPES[sample.instance].itemsize > 2 and sample.ms > STRANGE * last.get((sample.problem, sample.instance), math.inf):
            continue
        problem = Problem.parse(sample.problem)
        terms = cost.library_terms(sample.pass_name, problem, sample.instance, sample.layout, sweep.card)
        row = Row(sample, problem, terms, cost.library_traits(problem, sample.instance, terms))
        found.setdefault((sample.pass_name, sample.instance, sample.layout), []).append(row)
    return found


def _relevance(rows: Sequence[Row]) -> dict[int, float]:
    """Return by what each row counts: the square root of the best time of any that could stand in for it over its own."""
    best: dict[tuple[str, str, str], float] = {}
    for row in rows:
        for precision in DTYPES:
            if row.sample.instance in allowed_instances(precision):
                key = (row.sample.problem, row.sample.layout, precision)
                best[key] = min(best.get(key, math.inf), row.sample.ms)
    return {
        id(row): max(
            (best[row.sample.problem, row.sample.layout, precision] / row.sample.ms) ** 0.5
            for precision in DTYPES
            if row.sample.instance in allowed_instances(precision)
        )
        for row in rows
    }


def _layers(rows: Sequence[Row]) -> int:
    return len({row.sample.problem for row in rows})


def _kernel_cost(group: tuple[str, str], rows: Sequence[Row], relevance: Mapping[int, float]) -> KernelCost:
    listed = sorted({row.configuration for row in rows})
    weights = np.array([relevance[id(row)] for row in rows])
    each = np.array([[float(row.configuration == one) for one in listed] for row in rows])
    coefficients, offsets = _fitted(rows, weights, each, cost.TERMS["kernel"], cost.TRAITS["kernel"])
    kept = _kept(rows)
    found = (Configuration(dict(one), offset) for one, offset in zip(listed, offsets, strict=True) if one in kept)
    return KernelCost(*group, coefficients, tuple(found))


def _kept(rows: Sequence[Row]) -> set[tuple[tuple[str, int], ...]]:
    """Return the few configurations whose best comes near to the best of all."""
    times: dict[tuple[tuple[str, int], ...], dict[tuple[str, str], float]] = {}
    for row in rows:
        times.setdefault(row.configuration, {})[row.sample.problem, row.sample.layout] = row.sample.ms
    slowest = max(ms for own in times.values() for ms in own.values())
    questions = sorted({question for own in times.values() for question in own})
    logs = {one: np.log([own.get(question, slowest) for question in questions]) for one, own in times.items()}
    kept: list[tuple[tuple[str, int], ...]] = []
    best = np.full(len(questions), math.inf)
    while len(kept) < min(MOST_CONFIGURATIONS, len(logs)):
        one = min(sorted(logs.keys() - set(kept)), key=lambda one: float(np.minimum(best, logs[one]).mean()))
        if kept and float(best.mean() - np.minimum(best, logs[one]).mean()) < GAIN:
            break
        kept.append(one)
        best = np.minimum(best, logs[one])
    return set(kept)


def _library_fit(rows: Sequence[Row]) -> Coefficients:
    return _fitted(rows, np.ones(len(rows)), np.zeros((len(rows), 0)), cost.TERMS["library"], cost.TRAITS["library"])[0]


def _library_held_out(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield each row with measured / predicted, by coefficients fitted without its fold."""
    for held in range(FOLDS):
        others = [row for number, row in enumerate(rows) if number % FOLDS != held]
        coefficients = _library_fit(others)
        for row in rows[held::FOLDS]:
            yield row, row.sample.ms / coefficients.milliseconds(row.terms, row.traits, cost.MOST_CORRECTION["library"])


def _predicted(known: Mapping[tuple[str, str], KernelCost], row: Row) -> float | None:
    found = known.get((row.sample.kernel, row.sample.instance))
    if found is None:
        return None
    offset = next(
        (one.offset for one in found.configurations if tuple(sorted(one.tunables.items())) == row.configuration), None
    )
    if offset is None:
        return None
    return found.coefficients.milliseconds(row.terms, row.traits, cost.MOST_CORRECTION["kernel"]) * math.exp(offset)


def _fitted(
    rows: Sequence[Row], weights: Array, each: Array, term_names: frozenset[str], trait_names: frozenset[str]
) -> tuple[Coefficients, list[float]]:
    """Return coefficients, and by what the logarithm differs for each column of `each`."""
    terms, traits = sorted(term_names), sorted(trait_names)
    amounts = np.array([[row.terms[name] for name in terms] for row in rows])
    measured = np.array([row.sample.ms for row in rows])
    values = _least_squares(amounts, measured, weights)
    left = np.log(measured) - np.log(np.maximum(amounts @ values, 1e-3))
    table = np.hstack([np.array([[row.traits[name] for name in traits] for row in rows]), each])
    slopes, constant = _ridge(table, left, weights**2)
    found = Coefficients(
        {name: float(value) for name, value in zip(terms, values, strict=True) if value > SMALL},
        {name: float(slope) for name, slope in zip(traits, slopes, strict=False) if slope != 0},
        constant,
    )
    return found, [float(slope) for slope in slopes[len(traits) :]]


def _least_squares(amounts: Array, measured: Array, weights: Array) -> Array:
    """Return the coefficients of at least 0 for which the logarithm's weighted errors are small; far ones count for less."""
    found = non_negative(amounts * (weights / measured)[:, None], weights.copy())
    for _ in range(ROUNDS):
        predicted = np.maximum(amounts @ found, 1e-6)
        scale = weights / np.sqrt(measured * predicted * (1 + np.abs(np.log(predicted / measured)) / HUBER))
        found = non_negative(amounts * scale[:, None], measured * scale)
    return found


def non_negative(matrix: Array, wanted: Array, rounds: int = 400) -> Array:
    """Return the x >= 0 for which |matrix x - wanted| is least, one coordinate at a time."""
    gram, right = matrix.T @ matrix, matrix.T @ wanted
    found = np.zeros(matrix.shape[1])
    for _ in range(rounds):
        moved = 0.0
        for column in range(len(found)):
            if gram[column, column] > 0:
                value = max(0.0, found[column] + (right[column] - gram[column] @ found) / gram[column, column])
                moved = max(moved, abs(value - found[column]) * math.sqrt(gram[column, column]))
                found[column] = value
        if moved < 1e-6:
            break
    return found


def _ridge(table: Array, wanted: Array, weights: Array) -> tuple[Array, float]:
    """Return slopes and a constant: least squares with a price on the slopes of standardized columns; constant columns get none."""
    share = weights / weights.sum()
    means, mean = share @ table, float(share @ wanted)
    spread = np.sqrt(share @ (table - means) ** 2)
    varies = spread > 1e-9
    scaled = (table - means)[:, varies] / spread[varies]
    gram = (scaled * weights[:, None]).T @ scaled + RIDGE * np.eye(scaled.shape[1])
    slopes = np.zeros(table.shape[1])
    slopes[varies] = np.linalg.solve(gram, (scaled * weights[:, None]).T @ (wanted - mean)) / spread[varies]
    return slopes, float(mean - means @ slopes)
