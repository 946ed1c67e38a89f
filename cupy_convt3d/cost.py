"""What a kernel, or torch's own operator, is predicted to take: terms that a call's time is made of, by coefficients fitted for a card.

A kernel's prediction is `sum(coefficient * term) * exp(trees)`. A term is a time in ms at what the card reaches at best: the useful FLOP
at the rate of a large GEMM, a tensor's bytes at that of a large copy, what the busiest multiprocessor does as if all did as much. So a
coefficient says how many times that long it takes, and is the same for every card of a kind; the terms follow the card. Regression trees
over traits (channels, sizes, taps, tunables, the terms' logarithms) correct what the sum leaves, within bounds. What a block does is read
from the kernel's declaration: its launches, its workspaces, and `[cost]` where it has one.

torch's operator switches between algorithms that nobody declares. What its own terms leave is a Gaussian process over the same traits: the
layers that were timed are kept, and a layer that is like them is predicted more surely than one that is not.

Coefficients are fitted by `convt3d calibrate`. `costs.json` beside this module has those of the kernels that ship; a user's own are in
`costs.json` beside the user's tuning database, and come first.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import records, registry, tuning
from .dtypes import DTYPES
from .errors import CacheWarning, DataError, KernelError, ProblemError
from .expressions import evaluate
from .files import write_whole
from .kernel import Kernel, Limits
from .problem import LAYOUTS, PASSES, Problem
from .tuning import configured

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

FORMAT = 2
SHIPPED = Path(__file__).parent / "costs.json"
MOST = 1e6  # of a coefficient, or of a threshold
CALL_MS, LAUNCH_MS, STEP_MS = 0.003, 0.002, 0.001  # a first launch, one more, a step of a block's main loop
DEPTH = 3  # of a regression tree
MOST_CORRECTION = 1.5  # of the logarithm
CELL = 32  # channels that cuDNN's tiles are filled up to
ALIKE = {"fp16": "bf16", "fp64": "fp32"}  # whose coefficients serve where an instance was not swept
# A kernel that was never swept: pessimistic, so that it is taken only where others do badly. With a `[cost]` of its own it is taken at an
# eighth of the GEMM rate, without one as the plainest kernels are, whatever the dtype.
_UNKNOWN = {"call": 2.0, "launches": 1.5, "input": 4.0, "output": 4.0, "weight": 4.0, "workspace": 4.0, "packing": 4.0}
_UNKNOWN_PRODUCTS, _PLAIN_PRODUCTS = 8.0, 300.0


@dataclass(frozen=True)
class Card:
    """What a card is known by, and what it reached in the sweep.

    Attributes:
        device, arch: `Backend.device_name`, and its architecture.
        multiprocessors, clock_hz, memory_bytes_per_s: as its driver says; 0 where it does not.
        copy_bytes_per_s: of a large copy, read and written.
        gemm_flop_per_s: of a large GEMM, by dtype.
    """

    device: str
    arch: str
    multiprocessors: int
    clock_hz: float
    memory_bytes_per_s: float
    copy_bytes_per_s: float
    gemm_flop_per_s: Mapping[str, float]

    def scaled(self, limits: Limits | None) -> Card:
        """Return the same for another card: more multiprocessors, another clock and bandwidth."""
        if limits is None:
            return self
        counts = limits.multiprocessors / self.multiprocessors
        clocks = limits.clock_hz / self.clock_hz if limits.clock_hz and self.clock_hz else 1.0
        known = limits.memory_bytes_per_s and self.memory_bytes_per_s
        memory = limits.memory_bytes_per_s / self.memory_bytes_per_s if known else counts
        rates = {name: rate * counts * clocks for name, rate in self.gemm_flop_per_s.items()}
        return replace(
            self, multiprocessors=limits.multiprocessors, copy_bytes_per_s=self.copy_bytes_per_s * memory, gemm_flop_per_s=rates
        )

    def ms(self, nbytes: float) -> float:
        return 1e3 * nbytes / self.copy_bytes_per_s

    def flop_ms(self, flop: float, dtype: str) -> float:
        return 1e3 * flop / self.gemm_flop_per_s[dtype if dtype in self.gemm_flop_per_s else "fp32"]


@dataclass(frozen=True)
class Trees:
    """Gradient-boosted regression trees (Friedman, "Greedy function approximation", 2001) for the logarithm of measured / predicted.

    Every tree is whole: DEPTH levels of inner nodes, one level after the other, then as many leaves as the next would have.

    Attributes:
        traits: names of those that are looked at.
        splits, thresholds: of each inner node, which trait goes on to the right where it is larger than what.
        leaves: thousandths of the logarithm, added up over all trees.
    """

    traits: tuple[str, ...] = ()
    splits: tuple[int, ...] = ()
    thresholds: tuple[float, ...] = ()
    leaves: tuple[int, ...] = ()

    def value(self, traits: Mapping[str, float]) -> float:
        values = [traits.get(name, 0.0) for name in self.traits]  # a kernel may have lost a tunable since
        inner, outer, found = 2**DEPTH - 1, 2**DEPTH, 0
        for tree in range(len(self.leaves) // outer):
            node, first = 0, tree * inner
            while node < inner:
                node = 2 * node + (2 if values[self.splits[first + node]] > self.thresholds[first + node] else 1)
            found += self.leaves[tree * outer + node - inner]
        return found / 1000


def base_ms(coefficients: Mapping[str, float], terms: Mapping[str, float]) -> float:
    """Return the sum of terms by their coefficients, which is what trees or a process then correct; at least a microsecond."""
    return max(sum(value * terms[name] for name, value in coefficients.items()), 1e-3)


@dataclass(frozen=True)
class Coefficients:
    """What terms are multiplied with, those that are left out by 0, and what corrects their sum."""

    terms: Mapping[str, float]
    trees: Trees = Trees()

    def milliseconds(self, terms: Mapping[str, float], traits: Mapping[str, float]) -> float:
        return base_ms(self.terms, terms) * math.exp(min(MOST_CORRECTION, max(-MOST_CORRECTION, self.trees.value(traits))))


@dataclass(frozen=True)
class KernelCost:
    """A kernel's instance on a card, and the tunables of the configurations that are worth a prediction."""

    kernel: str
    instance: str
    coefficients: Coefficients
    configurations: tuple[Mapping[str, int], ...]


@dataclass(frozen=True)
class LibraryCost:
    """torch's own operator in a pass, precision and layout: coefficients of terms, and a Gaussian process for what these leave of the
    logarithm (Rasmussen and Williams, "Gaussian Processes for Machine Learning", 2006, algorithm 2.1; Matern's covariance of order 3/2).

    Attributes:
        scales: by trait, how much of a difference is a large one.
        signal, noise: variances, of what depends on the traits and of what does not.
        low: in 17 of 20 held-out layers it took longer than exp(low x standard deviation) times the prediction: a kernel has to beat
            quick algorithms.
        ms: what it took, in the order of `LibraryCosts.problems`; None where that was not timed.
    """

    pass_name: str
    precision: str
    layout: str
    terms: Mapping[str, float]
    scales: Mapping[str, float]
    signal: float
    noise: float
    low: float
    ms: tuple[float | None, ...]


@dataclass(frozen=True)
class LibraryCosts:
    """What torch's own operator took on drawn layers, and what follows for others.

    Attributes:
        cards: that layers were timed on.
        problems, timed_on: each layer, and the number of its card.
        questions: by pass, precision and layout.
    """

    cards: tuple[Card, ...] = ()
    problems: tuple[str, ...] = ()
    timed_on: tuple[int, ...] = ()
    questions: tuple[LibraryCost, ...] = ()


@dataclass(frozen=True)
class CardCosts:
    """All that is known of a card."""

    card: Card
    kernels: tuple[KernelCost, ...] = ()
    library: LibraryCosts = LibraryCosts()


class Prediction(NamedTuple):
    """A configuration of a kernel, the dtype to compile it for, and what it is predicted to take; `swept`: by coefficients of its own."""

    kernel: Kernel
    instance: str
    ms: float
    swept: bool


def kernel_terms(kernel: Kernel, problem: Problem, instance: str, layout: str, card: Card, packed: bool) -> dict[str, float]:
    """Return the terms of a kernel's call, in ms.

    Raises:
        KernelError: it cannot do the problem.
    """
    itemsize, multiprocessors = DTYPES[instance].itemsize, card.multiprocessors
    names, plan = kernel.names(problem, instance, multiprocessors), kernel.plan(problem, instance, multiprocessors)
    launches = [step for step in plan.launches if 0 not in step.grid]
    packs = {step.packs for step in launches if step.packs is not None}
    if packed:
        launches = [step for step in launches if step.packs is None]
    cost = {name: evaluate(expression, names) for name, expression in kernel.cost.items()}
    blocks = max(1, cost.get("blocks", math.prod(launches[-1].grid) if launches else 1))
    rounds = -(-blocks // multiprocessors)  # blocks of the busiest multiprocessor
    flop_ms = card.flop_ms(problem.flop, instance)
    steps = cost.get("steps", 0)
    block_ms = flop_ms / blocks * multiprocessors
    if "products" in cost:
        block_ms = card.flop_ms(2.0 * steps * cost["products"] * multiprocessors, instance)
    block_bytes = steps * cost.get("bytes", 0) + cost.get("first_bytes", 0)
    block_bytes_ms = card.ms(0.5 * block_bytes * multiprocessors)
    accumulator = DTYPES[instance].accumulate.itemsize
    workspace = sum(numel * accumulator for name, numel in plan.workspace.items() if name not in packs)
    packing = 0 if packed else sum(numel * accumulator for name, numel in plan.workspace.items() if name in packs)
    reads, writes, weight = (card.ms(itemsize * numel) for numel in _numels(kernel.pass_name, problem))
    last, vector = layout == "channels_last", 16 // itemsize
    odd_rows = not last and problem.output_size[2] * itemsize % 8 != 0
    odd_volumes = not last and names["input_voxels"] * itemsize % 16 != 0
    return {
        "call": CALL_MS,
        "launches": LAUNCH_MS * (len(launches) - 1),
        "products": block_ms * rounds,
        "block_products": block_ms,
        "steps": STEP_MS * steps * rounds,
        "block_steps": STEP_MS * steps,
        "bytes": block_bytes_ms * rounds,
        "flop": flop_ms,
        "input": reads,
        "output": writes,
        "weight": weight,
        "workspace": card.ms(workspace),
        "packing": 0.0 if packed else card.ms(packing) + weight,
        "odd_rows": writes * odd_rows,
        "odd_volumes": reads * odd_volumes,
        "short_rows": writes * (not last) * 8 / min(64, problem.output_size[2]),
        "wide_strides": writes * (not last) * max(0, problem.stride[2] - 2),
        "output_last": writes * last,
        "input_last": reads * last,
        "odd_out_channels": writes * (last and names["out_channels_per_group"] % vector != 0),
        "odd_in_channels": reads * (last and names["in_channels_per_group"] % vector != 0),
        "products_last": block_ms * rounds * last,
        "bytes_last": block_bytes_ms * rounds * last,
        "bytes_odd_volumes": block_bytes_ms * rounds * odd_volumes,
    }


def layer_traits(problem: Problem, dtype: str, layout: str) -> dict[str, float]:
    """Return what a layer is, as trees look at it: sizes by their logarithms, and what is left over of a tile or a vector."""
    ins, outs, vector = problem.in_channels // problem.groups, problem.out_channels // problem.groups, 16 // DTYPES[dtype].itemsize
    found = {
        "last": float(layout == "channels_last"),
        "in_channels": math.log(ins),
        "out_channels": math.log(outs),
        "groups": math.log(problem.groups),
        "batch": math.log(max(1, problem.batch)),
        "taps": math.log(math.prod(problem.kernel_size)),
        "residues": math.log(math.prod(problem.stride)),
        "voxels": math.log(max(1, problem.batch) * math.prod(problem.input_size)),
        "outputs": math.log(max(1, problem.batch) * math.prod(problem.output_size)),
        "in_over_32": float(ins % CELL),
        "out_over_32": float(outs % CELL),
        "in_over_vector": float(ins % vector),
        "out_over_vector": float(outs % vector),
        "input_row_over_vector": float(problem.input_size[2] % vector),
        "output_row_over_vector": float(problem.output_size[2] % vector),
        "patch": float(problem.kernel_size == problem.stride),
        "dilation": float(max(problem.dilation)),
    }
    for axis, name in enumerate("dhw"):
        found[f"input_{name}"] = math.log(problem.input_size[axis])
        found[f"kernel_{name}"] = float(problem.kernel_size[axis])
        found[f"stride_{name}"] = float(problem.stride[axis])
        found[f"padding_{name}"] = float(problem.padding[axis])
    return found


def term_traits(terms: Mapping[str, float]) -> dict[str, float]:
    """Return the logarithms of terms; those that are 0 are as if a tenth of a microsecond."""
    return {f"terms.{name}": math.log(value + 1e-4) for name, value in terms.items()}


def kernel_traits(
    kernel: Kernel, problem: Problem, instance: str, layout: str, terms: Mapping[str, float]
) -> dict[str, float]:
    """Return what corrects a kernel's prediction."""
    tunables = {f"tunables.{name}": float(value) for name, value in kernel.tunables.items()}
    return layer_traits(problem, instance, layout) | term_traits(terms) | tunables


def library_terms(pass_name: str, problem: Problem, precision: str, layout: str, card: Card) -> dict[str, float]:
    """Return the terms of a call of torch's own operator, in ms. It multiplies clipped taps too, in tiles of channels."""
    itemsize = DTYPES[precision].itemsize
    ins, outs = problem.in_channels // problem.groups, problem.out_channels // problem.groups
    taps = problem.batch * math.prod(problem.input_size) * math.prod(problem.kernel_size)
    flop = card.flop_ms(2.0 * taps * problem.in_channels * outs, precision)
    filled = (-(-ins // CELL) * CELL / ins) * (-(-outs // CELL) * CELL / outs)
    reads, writes, weight = (card.ms(itemsize * numel) for numel in _numels(pass_name, problem))
    vector, grouped = 16 // itemsize, problem.groups > 1
    return {
        "call": CALL_MS,
        "flop": flop,
        "filled_flop": flop * filled,
        "depthwise_flop": flop * (grouped and ins == 1),
        "grouped_flop": flop * grouped,
        "patch_flop": flop * (problem.kernel_size == problem.stride),
        "dense_flop": flop * (problem.stride == (1, 1, 1)),
        "dilated_flop": flop * (max(problem.dilation) > 1),
        "sum": 1e-5 * ins * math.prod(problem.kernel_size) / math.prod(problem.stride),
        "input": reads,
        "output": writes,
        "weight": weight,
        "odd_rows": writes * (problem.output_size[2] * itemsize % 8 != 0),
        "odd_out_channels": writes * (outs % vector != 0),
        "odd_in_channels": reads * (ins % vector != 0),
    }


def library_traits(problem: Problem, precision: str, layout: str, terms: Mapping[str, float]) -> dict[str, float]:
    """Return what corrects the prediction of torch's own operator."""
    return layer_traits(problem, precision, layout) | term_traits(terms)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TERMS = {  # the names that a file may have
    "kernel": _names(
        "call launches products block_products steps block_steps bytes flop input output weight workspace packing odd_rows odd_volumes "
        "short_rows wide_strides output_last input_last odd_out_channels odd_in_channels products_last bytes_last bytes_odd_volumes"
    ),
    "library": _names(
        "call flop filled_flop depthwise_flop grouped_flop patch_flop dense_flop dilated_flop sum input output weight odd_rows "
        "odd_out_channels odd_in_channels"
    ),
}
TRAITS = {  # besides a kernel's tunables
    name: frozenset(layer_traits(Problem(1, 1, 1, (1, 1, 1), (1, 1, 1)), "fp32", "ncdhw")) | {f"terms.{term}" for term in terms}
    for name, terms in TERMS.items()
}


def _numels(pass_name: str, problem: Problem) -> tuple[int, int, int]:
    """Return the elements of the tensor that is read, of the one that is written, and of the weight (of wgrad: the other one read)."""
    shapes, written = problem.shapes(pass_name)
    sizes = {name: math.prod(shape) for name, shape in shapes.items() if name != "bias"}
    weight = "weight" if "weight" in sizes else "grad_output"
    read = next(name for name in sizes if name not in (written, weight))
    return sizes[read], sizes[written], sizes[weight]


class Costs:
    """The costs that are known, of several cards, those that come first before the others."""

    def __init__(self, cards: tuple[CardCosts, ...] = ()) -> None:
        self.cards = cards
        self._kernels = [{(one.kernel, one.instance): one for one in known.kernels} for known in cards]
        self._library = [
            {(one.pass_name, one.precision, one.layout): one for one in known.library.questions} for known in cards
        ]
        self._processes: dict[tuple[int, tuple[str, str, str]], Process] = {}

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Return the costs of a file: none if there is no file; a damaged or foreign one is ignored with a `CacheWarning`."""
        try:
            return cls.read(path)
        except DataError as error:
            warnings.warn(f"{error}; the costs were ignored", CacheWarning, stacklevel=2)
            return cls()

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Return the costs of a file; none if there is no file.

        Raises:
            DataError: it is damaged or foreign; the message names the field.
        """
        where = f"costs {str(path)!r}"
        try:
            data = records.of_format(records.read(path, where), where, FORMAT)
        except FileNotFoundError:
            return cls()
        cards = records.sequence(data.get("cards"), f"{where}: cards")
        return cls(tuple(_card_costs(card, f"{where}, card {number}") for number, card in enumerate(cards, 1)))

    def save(self, path: Path) -> None:
        """Write the file; other processes see all of it or none.

        Raises:
            OSError: it cannot be written; what was there is still there.
        """
        lines = []
        for known in self.cards:
            head = f'{{"card":{_json(asdict(known.card))}'
            library = asdict(known.library)
            questions = library.pop("questions")
            kernels, asked = (",\n".join(map(_json, rows)) for rows in (map(asdict, known.kernels), questions))
            lines.append(f'{head},\n"kernels":[\n{kernels}\n],\n"library":{_json(library)[:-1]},"questions":[\n{asked}\n]}}}}')
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f'{{"format": {FORMAT}, "cards": [\n' + ",\n".join(lines) + "\n]}\n")
        registry.revise()

    def merged(self, new: CardCosts) -> Costs:
        """Return these with what a sweep has found of a card in the place of what they had of the same kernels and precisions."""
        old = next((known for known in self.cards if known.card.device == new.card.device), CardCosts(new.card))
        kernels = {(one.kernel, one.instance): one for one in (*old.kernels, *new.kernels)}
        rest = tuple(known for known in self.cards if known.card.device != new.card.device)
        library = new.library if new.library.questions else old.library
        return Costs((CardCosts(new.card, tuple(kernels.values()), library), *rest))

    def near(self, device: str, arch: str | None) -> list[int]:
        """Return the cards that speak for a device: itself, then others of its architecture, then all others."""
        order = [(known.card.device != device, known.card.arch != arch, number) for number, known in enumerate(self.cards)]
        return [number for *_, number in sorted(order)]

    def predictions(
        self,
        kernel: Kernel,
        problem: Problem,
        instance: str,
        question: tuning.Question,
        packed: bool,
        arch: str | None,
        limits: Limits | None,
    ) -> Iterator[Prediction]:
        """Yield each configuration of a kernel's instance that is known and can do a problem, with its prediction."""
        wanted = [(kernel.name, instance), *([(kernel.name, ALIKE[instance])] if instance in ALIKE else [])]
        near = self.near(question.device, arch)
        found = next(((n, self._kernels[n][key]) for key in wanted for n in near if key in self._kernels[n]), None)
        if found is None:
            if near and kernel.why_not(problem, instance, arch, limits) is None:
                card = self.cards[near[0]].card.scaled(limits)
                terms = kernel_terms(kernel, problem, instance, question.layout, card, packed)
                plain = _PLAIN_PRODUCTS * card.flop_ms(1.0, "fp32") / card.flop_ms(1.0, instance)
                unknown = Coefficients(_UNKNOWN | {"products": _UNKNOWN_PRODUCTS if kernel.cost else plain})
                yield Prediction(kernel, instance, unknown.milliseconds(terms, {}), False)
            return
        number, cost = found
        card = self.cards[number].card.scaled(limits)
        for configuration in cost.configurations:
            try:
                one = _fitted(kernel, configuration)
            except KernelError:  # the kernel has changed
                continue
            if one.why_not(problem, instance, arch, limits) is not None:
                continue
            terms = kernel_terms(one, problem, instance, question.layout, card, packed)
            traits = kernel_traits(one, problem, instance, question.layout, terms)
            yield Prediction(one, instance, cost.coefficients.milliseconds(terms, traits), True)

    def library_ms(
        self, question: tuning.Question, problem: Problem, arch: str | None, limits: Limits | None
    ) -> tuple[float, float] | None:
        """Return what torch's own operator is predicted to take and what it takes when it is quick.

        None where no card of the architecture was swept: other cards have other algorithms. tf32x3 is compared with fp32.
        """
        precision = "fp32" if question.precision == "tf32x3" else question.precision
        for number in self.near(question.device, arch):
            if self.cards[number].card.arch != arch:
                continue
            for one in (precision, ALIKE.get(precision, precision)):
                key = (question.pass_name, one, question.layout)
                if key not in self._library[number]:
                    continue
                cost = self._library[number][key]
                if (process := self._processes.get((number, key))) is None:
                    process = self._processes[number, key] = Process(cost, library_rows(self.cards[number].library, cost))
                card = self.cards[number].card.scaled(limits)
                terms = library_terms(question.pass_name, problem, precision, question.layout, card)
                traits = library_traits(problem, precision, question.layout, terms)
                ms, deviation = process.predicted(terms, traits)
                return ms, ms * math.exp(cost.low * deviation)
        return None


class LibraryRow(NamedTuple):
    """A layer that torch's own operator was timed on."""

    problem: str
    terms: Mapping[str, float]
    traits: Mapping[str, float]
    ms: float


def library_rows(known: LibraryCosts, cost: LibraryCost) -> list[LibraryRow]:
    """Return the layers that were timed for a question."""
    found = []
    for text, number, ms in zip(known.problems, known.timed_on, cost.ms, strict=True):
        if ms is not None:
            problem = Problem.parse(text)
            terms = library_terms(cost.pass_name, problem, cost.precision, cost.layout, known.cards[number])
            found.append(LibraryRow(text, terms, library_traits(problem, cost.precision, cost.layout, terms), ms))
    return found


class Process:
    """A question's Gaussian process, with what was timed brought into the form that a prediction takes."""

    def __init__(self, cost: LibraryCost, rows: Sequence[LibraryRow]) -> None:
        self.cost, self.names = cost, sorted(cost.scales)
        self.scales = np.array([cost.scales[name] for name in self.names])
        self.table = np.array([[row.traits[name] for name in self.names] for row in rows]) / self.scales
        left = np.array([math.log(row.ms / base_ms(cost.terms, row.terms)) for row in rows])
        self.mean = float(left.mean())
        self.inverse = np.linalg.inv(self._covariance(self.table) + cost.noise * np.eye(len(rows)))
        self.weights = self.inverse @ (left - self.mean)

    def predicted(self, terms: Mapping[str, float], traits: Mapping[str, float]) -> tuple[float, float]:
        """Return the time in ms, and the standard deviation of its logarithm."""
        near = self._covariance(np.array([[traits[name] for name in self.names]]) / self.scales)[0]
        variance = max(0.0, self.cost.signal - float(near @ self.inverse @ near)) + self.cost.noise
        return base_ms(self.cost.terms, terms) * math.exp(self.mean + float(near @ self.weights)), math.sqrt(variance)

    def _covariance(self, points: Array) -> Array:
        squares = (points**2).sum(1)[:, None] + (self.table**2).sum(1)[None, :] - 2 * points @ self.table.T
        distance = np.sqrt(3 * np.maximum(squares, 0.0))
        return self.cost.signal * (1 + distance) * np.exp(-distance)


def known() -> Costs:
    """Return the user's own costs and those that ship, the own first; read again only where a file has changed."""
    return _known(state())


def state() -> tuple[tuple[str, tuple[int, int] | None], ...]:
    """Return the files with their times and sizes: while it is the same, so are the costs."""
    return tuple((path, tuning.stamp(path)) for path in (str(user_path()), str(SHIPPED)))


def user_path() -> Path:
    """Return the file of the user's own costs, beside the user's tuning database."""
    return tuning.user_path().with_name("costs.json")


@lru_cache(maxsize=8)
def _known(stamps: tuple[tuple[str, tuple[int, int] | None], ...]) -> Costs:
    return Costs(tuple(card for path, stamp in stamps if stamp is not None for card in Costs.load(Path(path)).cards))


def _fitted(kernel: Kernel, tunables: Mapping[str, int]) -> Kernel:
    """Return the kernel in a configuration; raises KernelError where it does not list a name or value."""
    for name, value in tunables.items():
        if value not in (*kernel.search.get(name, ()), kernel.tunables.get(name)):
            raise KernelError(f"tunables.{name}={value}: is no value of {kernel.name}")
    return configured(kernel, tuple(sorted({**kernel.tunables, **tunables}.items())))


def _json(value: object) -> str:
    return json.dumps(_rounded(value), separators=(",", ":"), sort_keys=True)


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _card_costs(value: object, where: str) -> CardCosts:
    """Return a card's costs with every field of its type and in its range; raises DataError for any other."""
    found = records.make(CardCosts, value, where)
    check_card(found.card, f"{where}: card")
    for number, one in enumerate(found.kernels):
        place = f"{where}: kernels[{number}]"
        records.one_of(one.instance, DTYPES, f"{place}: instance")
        _check(one.coefficients, f"{place}: coefficients")
    _check_library(found.library, f"{where}: library")
    return found


def check_card(card: Card, where: str) -> None:
    """Raise DataError unless the numbers are in their range."""
    records.within(card.multiprocessors, 1, 10**6, f"{where}: multiprocessors")
    if "fp32" not in card.gemm_flop_per_s:
        raise DataError(f"{where}: gemm_flop_per_s: has no fp32")
    rates = {f"gemm_flop_per_s.{name}": rate for name, rate in card.gemm_flop_per_s.items()}
    for name, rate in {"copy_bytes_per_s": card.copy_bytes_per_s, **rates}.items():
        records.within(rate, 1.0, 1e20, f"{where}: {name}")
    for name, rate in (("clock_hz", card.clock_hz), ("memory_bytes_per_s", card.memory_bytes_per_s)):
        records.within(rate, 0.0, 1e20, f"{where}: {name}")


def _check(found: Coefficients, where: str) -> None:
    """Raise DataError unless terms and traits are known, the trees whole, and the numbers in their range."""
    for name, number in found.terms.items():
        records.one_of(name, TERMS["kernel"], f"{where}: terms")
        records.within(number, 0.0, MOST, f"{where}: terms.{name}")
    trees = found.trees
    for name in trees.traits:
        if not name.startswith("tunables."):
            records.one_of(name, TRAITS["kernel"], f"{where}: trees: traits")
    count = len(trees.leaves) // 2**DEPTH
    for field_name, length in (("splits", count * (2**DEPTH - 1)), ("thresholds", count * (2**DEPTH - 1)), ("leaves", count * 2**DEPTH)):
        records.within(len(getattr(trees, field_name)), length, length, f"{where}: trees: number of {field_name}")
    for field_name, low, high in (("splits", 0, len(trees.traits) - 1), ("thresholds", -MOST, MOST), ("leaves", -MOST, MOST)):
        records.all_within(getattr(trees, field_name), low, high, f"{where}: trees: {field_name}")


def _check_library(found: LibraryCosts, where: str) -> None:
    """Raise DataError unless each question has a time or none for every layer, and the numbers are in their range."""
    for number, card in enumerate(found.cards):
        check_card(card, f"{where}: cards[{number}]")
    records.within(len(found.timed_on), len(found.problems), len(found.problems), f"{where}: number of timed_on")
    for number, problem in zip(found.timed_on, found.problems, strict=True):
        records.within(number, 0, len(found.cards) - 1, f"{where}: timed_on")
        try:
            Problem.parse(problem)
        except ProblemError as error:
            raise DataError(f"{where}: problems: {error}") from None
    for number, one in enumerate(found.questions):
        place = f"{where}: questions[{number}]"
        for name, known_names in (("pass_name", PASSES), ("precision", DTYPES), ("layout", LAYOUTS)):
            records.one_of(getattr(one, name), known_names, f"{place}: {name}")
        for table, low, names in (("terms", 0.0, TERMS["library"]), ("scales", 1e-6, TRAITS["library"])):
            for name, value in getattr(one, table).items():
                records.one_of(name, names, f"{place}: {table}")
                records.within(value, low, MOST, f"{place}: {table}.{name}")
        for name, low, high in (("signal", 1e-9, MOST), ("noise", 1e-9, MOST), ("low", -10.0, 0.0)):
            records.within(getattr(one, name), low, high, f"{place}: {name}")
        records.within(len(one.ms), len(found.problems), len(found.problems), f"{place}: number of ms")
        records.within(sum(ms is not None for ms in one.ms), 1, MOST, f"{place}: number of times")
        records.all_within([ms for ms in one.ms if ms is not None], 1e-6, 1e6, f"{place}: ms")
