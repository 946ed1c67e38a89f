"""Coefficients of `cost` from a sweep, and how well they choose for layers that they were not fitted to.

Terms get coefficients of at least 0 that make the logarithm of the prediction's error small; then boosted regression trees take what is
left. What is much slower than the best at its layer counts for less: nobody will choose it. For torch's operator a Gaussian process does
what trees do for kernels; its scales are those under which the layers that were timed are likeliest.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ... import cost
from ...cost import DEPTH, Array, CardCosts, Coefficients, KernelCost, LibraryCost, LibraryCosts, LibraryRow, Process, Trees
from ...dtypes import DTYPES, allowed_instances
from ...errors import KernelError, require
from ...kernel import Kernel
from ...problem import LAYOUTS, Problem
from ...tuning import LIBRARY, configured
from .samples import Sample, Sweep

PRECISIONS = ("fp32", "tf32", "tf32x3", "bf16", "fp16")
TREES, RATE, LEAST_ROWS = 24, 0.3, 8  # of an ensemble: how many, by what each counts, samples of a leaf
SHARE_OF_ROWS, SHARE_OF_TRAITS = 0.5, 0.4  # that each tree is grown from
START_SCALE, SCALES = 5.0, (0.3, 100.0)  # of a trait, in its standard deviations
MOST_SEARCHED = 300  # layers that scales are searched on: the search goes with the cube of their number
FEWEST, FEWEST_OF_LIBRARY = 4, 20  # layers that a kernel's instance, and torch's operator, are fitted to
FOLDS = 6
ROUNDS = 6  # of reweighting
HUBER = 0.3  # errors of the logarithm beyond which a sample counts for less
LOW = 0.15  # of held-out layers torch's operator is quicker than `LibraryCost.low` says
SMALL = 1e-4  # coefficients below it are left out
MOST_CONFIGURATIONS, GAIN = 6, 0.005  # of an instance that are kept; what one more has to bring, of the logarithm of the time
TRIED_GAIN = 0.02  # what a second one has to bring that predictions do not tell from the first, where a first call tries both


# By precision, layout and layer: the regret of the kernel taken, what auto takes (below 0: torch's operator), torch's operator, in ms.
_Found = dict[tuple[str, str, str], tuple[float, float, float | None]]


class Row(NamedTuple):
    """A sample with what it is predicted from."""

    device: str
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


def fit(sweeps: Sequence[Sweep], kernels: Mapping[str, Kernel], scales: LibraryCosts | None = None) -> CardCosts:
    """Return the costs of each kernel's instance and of torch's operator, as far as there are layers enough.

    They are said of the first sweep's card. Sweeps of other cards help: each sample's terms are those of its own card.

    Args:
        scales: where traits' scales for torch's operator are known; else they are searched, which takes some ten seconds a question.
    """
    rows = [row for sweep in sweeps for row in _rows(sweep, kernels)]
    relevance = _relevance(rows)
    grouped = _by_kernel(rows)
    costs = [_kernel_cost(group, own, relevance) for group, own in grouped.items() if _layers(own) >= FEWEST]
    return CardCosts(sweeps[0].card, tuple(costs), _library(sweeps, scales or LibraryCosts()))


def held_out(
    sweeps: Sequence[Sweep], kernels: Mapping[str, Kernel], found_of_all: CardCosts, precisions: Sequence[str] = PRECISIONS
) -> list[HeldOut]:
    """Return how "auto" would have chosen for each of the first sweep's layers by coefficients that were fitted without it.

    Whole layers are held out; the scales of traits for torch's operator are those of all. A precision and layout of which the sweep has
    nothing is left out.
    """
    fold = _folds(sample.problem for sweep in sweeps for sample in sweep.samples)
    found: _Found = {}
    for held in range(FOLDS):
        others = [replace(one, samples=tuple(own for own in one.samples if fold[own.problem] != held)) for one in sweeps]
        own = replace(sweeps[0], samples=tuple(one for one in sweeps[0].samples if fold[one.problem] == held))
        _judge(fit(others, kernels, found_of_all.library), own, kernels, precisions, found)
    return [_summary(*key, found) for key in itertools.product(precisions, LAYOUTS) if any(one[:2] == key for one in found)]


def _folds(problems: Iterable[str]) -> dict[str, int]:
    layers = sorted(set(problems))
    order = np.random.default_rng(0).permutation(len(layers))
    return {layers[number]: place % FOLDS for place, number in enumerate(order)}


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
    library = {
        (one.precision, one.layout): (one, Process(one, cost.library_rows(costs.library, one))) for one in costs.library.questions
    }
    torch = {(one.problem, one.instance, one.layout): one for one in sweep.samples if one.kernel == LIBRARY}
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
            known_of = library.get((_rival(precision), layout))
            torch_ms = None
            ours = taken.sample.ms
            if rival is not None and known_of is not None:
                torch_ms = rival.ms
                of_torch, process = known_of
                parsed = Problem.parse(problem)
                terms = cost.library_terms(of_torch.pass_name, parsed, of_torch.precision, layout, sweep.card)
                traits = cost.library_traits(parsed, of_torch.precision, layout, terms)
                expected, deviation = process.predicted(terms, traits)
                if ms >= expected * math.exp(of_torch.low * deviation):
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
        traits = cost.kernel_traits(one, problem, sample.instance, sample.layout, terms)
        yield Row(sweep.card.device, sample, problem, terms, traits)


def _by_kernel(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.sample.kernel, row.sample.instance), []).append(row)
    return found


def _library(sweeps: Sequence[Sweep], scales: LibraryCosts) -> LibraryCosts:
    """Return what torch's own operator took in all sweeps, and how it is predicted, as far as there are layers enough."""
    times: dict[tuple[str, str, str], dict[tuple[int, str], float]] = {}
    for number, sweep in enumerate(sweeps):
        for sample in sweep.samples:
            if sample.kernel == LIBRARY:
                key = sample.pass_name, sample.instance, sample.layout
                times.setdefault(key, {})[number, sample.problem] = sample.ms
    times = {key: own for key, own in times.items() if len(own) >= FEWEST_OF_LIBRARY}
    layers = sorted({layer for own in times.values() for layer in own})
    cards = tuple(sweep.card for sweep in sweeps)
    asked = LibraryCosts(cards, tuple(problem for _, problem in layers), tuple(number for number, _ in layers))
    known = {(one.pass_name, one.precision, one.layout): one for one in scales.questions}
    questions = (_library_cost(asked, key, tuple(map(own.get, layers)), known.get(key)) for key, own in times.items())
    return replace(asked, questions=tuple(questions)) if times else LibraryCosts()


def _library_cost(
    asked: LibraryCosts, key: tuple[str, str, str], ms: tuple[float | None, ...], known: LibraryCost | None
) -> LibraryCost:
    unknown = LibraryCost(*key, {}, {}, 1.0, 1.0, 0.0, ms)
    rows = cost.library_rows(asked, unknown)
    if known is not None:
        return _with_terms(replace(known, ms=ms), rows)
    fold = _folds(row.problem for row in rows)
    found = _library_fit(unknown, rows)
    deviations = []
    for held in range(FOLDS):
        others = [row for row in rows if fold[row.problem] != held]
        process = Process(_with_terms(found, others), others)  # the scales are those of all: finding them takes long
        for row in rows:
            if fold[row.problem] == held:
                predicted, deviation = process.predicted(row.terms, row.traits)
                deviations.append(math.log(row.ms / predicted) / deviation)
    return replace(found, low=min(0.0, float(np.quantile(deviations, LOW))))


def _library_fit(unknown: LibraryCost, rows: Sequence[LibraryRow]) -> LibraryCost:
    """Return the cost with the scales and variances under which what was timed, or a part of it, is likeliest.

    Raises:
        MissingPackageError: scikit-learn is not installed.
    """
    require("calibrate", "fitting costs", "sklearn")
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    found = _with_terms(unknown, rows)
    some = np.random.default_rng(0).permutation(len(rows))[:MOST_SEARCHED]
    rows = [rows[int(number)] for number in some]
    table = np.array([[row.traits[name] for name in sorted(rows[0].traits)] for row in rows])
    spread = table.std(0)
    varies = spread > 1e-9
    left = np.log([row.ms / cost.base_ms(found.terms, row.terms) for row in rows])
    variance = max(float(left.var()), 1e-4)
    matern = Matern(np.full(int(varies.sum()), START_SCALE), SCALES, nu=1.5)
    noise = WhiteKernel(0.1 * variance, (1e-3 * variance, variance))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scales at their limits are traits that tell nothing
        fitted = GaussianProcessRegressor(ConstantKernel(variance, (0.1 * variance, 100 * variance)) * matern + noise)
        fitted.fit(table[:, varies] / spread[varies], left - left.mean())
    kernel = fitted.kernel_
    names = [name for name, one in zip(sorted(rows[0].traits), varies, strict=True) if one]
    lengths = np.atleast_1d(kernel.k1.k2.length_scale)
    scales = {name: float(f"{length * one:.4g}") for name, length, one in zip(names, lengths, spread[varies], strict=True)}
    return replace(found, scales=scales, signal=float(kernel.k1.k1.constant_value), noise=float(kernel.k2.noise_level))


def _with_terms(found: LibraryCost, rows: Sequence[LibraryRow]) -> LibraryCost:
    return replace(found, terms=_terms(rows, [row.ms for row in rows], np.ones(len(rows)), cost.TERMS["library"]))


def _relevance(rows: Sequence[Row]) -> dict[int, float]:
    """Return by what each row counts: the square root of the best time of any that could stand in for it over its own."""
    best: dict[tuple[str, str, str, str], float] = {}
    for row in rows:
        for precision in DTYPES:
            if row.sample.instance in allowed_instances(precision):
                key = (row.device, row.sample.problem, row.sample.layout, precision)
                best[key] = min(best.get(key, math.inf), row.sample.ms)
    return {
        id(row): max(
            (best[row.device, row.sample.problem, row.sample.layout, precision] / row.sample.ms) ** 0.5
            for precision in DTYPES
            if row.sample.instance in allowed_instances(precision)
        )
        for row in rows
    }


def _layers(rows: Sequence[Row]) -> int:
    return len({row.sample.problem for row in rows})


def _kernel_cost(group: tuple[str, str], rows: Sequence[Row], relevance: Mapping[int, float]) -> KernelCost:
    weights = np.array([relevance[id(row)] for row in rows])
    kept = _kept(rows, _held_out_ms(rows, weights))
    return KernelCost(*group, _fitted(rows, weights), tuple(dict(one) for one in sorted(kept)))


def _held_out_ms(rows: Sequence[Row], weights: Array) -> Array:
    """Return what each row is predicted to take by coefficients fitted without its layer and others."""
    fold = _folds(row.sample.problem for row in rows)
    found = np.zeros(len(rows))
    for held in sorted(set(fold.values())):
        others = np.array([fold[row.sample.problem] != held for row in rows])
        coefficients = _fitted([row for row, other in zip(rows, others, strict=True) if other], weights[others])
        for number in np.flatnonzero(~others):
            row = rows[int(number)]
            found[number] = coefficients.milliseconds(row.terms, row.traits)
    return found


def _kept(rows: Sequence[Row], predicted: Array) -> list[tuple[tuple[str, int], ...]]:
    """Return the few configurations from which predictions of held-out layers choose best: what is slow where nobody expects it is none.

    Where that is one, a second for trials: the one with which the quicker of both takes the least in the mean.
    """
    times: dict[tuple[tuple[str, int], ...], dict[tuple[str, ...], tuple[float, float]]] = {}
    for row, ms in zip(rows, predicted, strict=True):
        times.setdefault(row.configuration, {})[row.device, row.sample.problem, row.sample.layout] = float(ms), row.sample.ms
    never = math.inf, max(row.sample.ms for row in rows)
    questions = sorted({question for own in times.values() for question in own})
    kept: list[tuple[tuple[str, int], ...]] = []
    taken = [never for _ in questions]
    while len(kept) < min(MOST_CONFIGURATIONS, len(times)):
        found = {
            one: [min(now, own.get(question, never)) for now, question in zip(taken, questions, strict=True)]
            for one, own in sorted(times.items())
            if one not in kept
        }
        means = {one: _mean_log(ms for _, ms in choices) for one, choices in found.items()}
        best = min(means, key=means.__getitem__)
        if kept and _mean_log(ms for _, ms in taken) - means[best] < GAIN:
            break
        kept.append(best)
        taken = found[best]
    if len(kept) == 1 and len(times) > 1:

        def tried(one: tuple[tuple[str, int], ...]) -> float:
            own = times[one]
            return _mean_log(min(ms, own.get(question, never)[1]) for (_, ms), question in zip(taken, questions, strict=True))

        second = min((one for one in sorted(times) if one not in kept), key=tried)
        if _mean_log(ms for _, ms in taken) - tried(second) >= TRIED_GAIN:
            kept.append(second)
    return kept


def _mean_log(times: Iterable[float]) -> float:
    return float(np.mean([math.log(ms) for ms in times]))


def _predicted(known: Mapping[tuple[str, str], KernelCost], row: Row) -> float | None:
    found = known.get((row.sample.kernel, row.sample.instance))
    if found is None or row.sample.tunables not in found.configurations:
        return None
    return found.coefficients.milliseconds(row.terms, row.traits)


def _fitted(rows: Sequence[Row], weights: Array) -> Coefficients:
    """Return coefficients of the terms, and trees for what these leave."""
    measured = [row.sample.ms for row in rows]
    found = _terms(rows, measured, weights, cost.TERMS["kernel"])
    left = np.log([row.sample.ms / cost.base_ms(found, row.terms) for row in rows])
    return Coefficients(found, _grown([row.traits for row in rows], left, weights))


def _terms(
    rows: Sequence[Row] | Sequence[LibraryRow], measured: Sequence[float], weights: Array, names: Iterable[str]
) -> dict[str, float]:
    terms = sorted(names)
    amounts = np.array([[row.terms[name] for name in terms] for row in rows])
    values = _least_squares(amounts, np.array(measured), weights)
    return {name: float(value) for name, value in zip(terms, values, strict=True) if value > SMALL}


def _grown(rows: Sequence[Mapping[str, float]], wanted: Array, weights: Array) -> Trees:
    """Return trees whose sum is near to what is wanted.

    Raises:
        MissingPackageError: scikit-learn is not installed.
    """
    require("calibrate", "fitting costs", "sklearn")
    from sklearn.ensemble import GradientBoostingRegressor

    names = sorted(rows[0])
    table = np.array([[row[name] for name in names] for row in rows])
    grower = GradientBoostingRegressor(
        init="zero",
        n_estimators=TREES,
        learning_rate=RATE,
        max_depth=DEPTH,
        min_samples_leaf=min(LEAST_ROWS, max(1, len(rows) // 8)),
        subsample=SHARE_OF_ROWS,
        max_features=SHARE_OF_TRAITS,
        random_state=0,
    )
    grower.fit(table, wanted, sample_weight=weights)
    splits: list[int] = []
    thresholds: list[float] = []
    leaves: list[int] = []
    for (one,) in grower.estimators_:
        tree, level = one.tree_, [0]
        for _ in range(DEPTH):
            below = []
            for node in level:
                is_leaf = tree.children_left[node] < 0
                splits.append(0 if is_leaf else int(tree.feature[node]))
                thresholds.append(0.0 if is_leaf else float(f"{tree.threshold[node]:.4g}"))
                below += [node, node] if is_leaf else [int(tree.children_left[node]), int(tree.children_right[node])]
            level = below
        leaves += [round(1000 * RATE * float(tree.value[node].item())) for node in level]
    used = sorted({*splits})
    return Trees(tuple(names[place] for place in used), tuple(used.index(one) for one in splits), tuple(thresholds), tuple(leaves))


def _least_squares(amounts: Array, measured: Array, weights: Array) -> Array:
    """Return the coefficients of at least 0 for which the logarithm's weighted errors are small; far ones count for less.

    Raises:
        MissingPackageError: scikit-learn, which brings SciPy, is not installed.
    """
    require("calibrate", "fitting costs", "scipy")
    from scipy.optimize import nnls

    found: Array = nnls(amounts * (weights / measured)[:, None], weights)[0]
    for _ in range(ROUNDS):
        predicted = np.maximum(amounts @ found, 1e-6)
        scale = weights / np.sqrt(measured * predicted * (1 + np.abs(np.log(predicted / measured)) / HUBER))
        found = nnls(amounts * scale[:, None], measured * scale)[0]
    return found
