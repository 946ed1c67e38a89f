"""A sweep over drawn layers: what each kernel, in a few of its configurations, and torch's own operator take on one card."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ... import records
from ...cost import Card, check_card
from ...dtypes import DTYPES, allowed_instances
from ...errors import BackendError, DataError, KernelError, LaunchError, ProblemError
from ...kernel import MOST_TUNABLE, Kernel
from ...problem import LAYOUTS, PASSES, Problem
from ...tuning import LIBRARY, LONGEST_MS, SHIPPED, SHORTEST_MS, Database, configured
from ..bench.measure import Bench, measure_ceilings
from ..bench.provenance import write_json
from ..bench.rivals import as_tensor, torch_call, torch_settings
from ..population import population
from ..progress import Progress

FORMAT = 1
AHEAD = 12  # layers that are compiled for at a time; nothing is timed meanwhile: compilers would hold up the host
FEW, MORE, MOST = 3, 5, 6  # configurations of a kernel that is compiled for each geometry, of one that is not, of one that was named
SLOW_MS = 30.0  # what takes longer is timed once, and what is bound to take longer not at all
SEARCH_MS = 300.0  # torch's operator, where it takes longer, is not searched for a quicker algorithm
REPEATS = 7
SAVE_S = 15.0


@dataclass(frozen=True)
class Sample:
    """What one configuration took; `kernel` is "library" for torch's own operator, and `instance` then the precision.

    Attributes:
        ms, packed_ms: medians, with the weight packed in each call, and kept packed.
    """

    pass_name: str
    problem: str
    layout: str
    kernel: str
    instance: str
    tunables: Mapping[str, int]
    ms: float
    packed_ms: float


@dataclass(frozen=True)
class Sweep:
    """A card and its samples."""

    card: Card
    samples: tuple[Sample, ...]

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Return the sweep of a file.

        Raises:
            FileNotFoundError: there is no file.
            DataError: it is damaged or foreign; the message names the field.
        """
        where = f"sweep {str(path)!r}"
        data = records.of_format(records.read(path, where), where, FORMAT)
        card = records.make(Card, data.get("card"), f"{where}: card")
        check_card(card, f"{where}: card")
        rows = records.sequence(data.get("samples"), f"{where}: samples")
        return cls(card, tuple(_sample(row, f"{where}: sample {n}") for n, row in enumerate(rows, 1)))


def _sample(given: object, where: str) -> Sample:
    """Return a sample whose fields are of known names and in their range; raises DataError for any other."""
    found = records.make(Sample, given, where)
    for name, known in (("pass_name", PASSES), ("layout", LAYOUTS), ("instance", DTYPES)):
        records.one_of(getattr(found, name), known, f"{where}: {name}")
    for name in ("ms", "packed_ms"):
        records.within(getattr(found, name), SHORTEST_MS, LONGEST_MS, f"{where}: {name}")
    for name, number in found.tunables.items():
        records.within(number, 0, MOST_TUNABLE, f"{where}: tunables.{name}")
    try:
        Problem.parse(found.problem)
    except ProblemError as error:
        raise DataError(f"{where}: problem: {error}") from None
    return found


def configurations(kernel: Kernel, instance: str, most: int) -> list[Kernel]:
    """Return the configurations that are timed: the default, those that the database has most often for the instance, then for others
    of its size, then any.
    """
    entries = [entry for entry in Database.load(SHIPPED).entries() if entry.kernel == kernel.name]
    known: list[tuple[tuple[str, int], ...]] = []
    for like in (
        [entry for entry in entries if entry.instance == instance],
        [entry for entry in entries if DTYPES[entry.instance].itemsize == DTYPES[instance].itemsize],
    ):
        values = (sorted((name, value) for name, value in entry.tunables.items() if value in kernel.search.get(name, ())) for entry in like)
        known += [one for one, _ in Counter(map(tuple, values)).most_common()]
    drawn = random.Random(kernel.name)
    found = [kernel, *(_with(kernel, dict(values)) for values in known)]
    if kernel.search:
        found += [_with(kernel, {name: drawn.choice(values) for name, values in kernel.search.items()}) for _ in range(50)]
    return list(dict.fromkeys(found))[:most]


def _with(kernel: Kernel, values: Mapping[str, int]) -> Kernel:
    return configured(kernel, tuple(sorted({**kernel.tunables, **values}.items())))


def sweep(
    bench: Bench,
    kernels: Sequence[Kernel],
    out: Path,
    *,
    seed: int,
    count: int,
    pass_name: str = "fprop",
    precisions: Sequence[str] = ("fp32", "tf32", "tf32x3", "bf16", "fp16"),
    minutes: float | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
    problems: Sequence[Problem] | None = None,
    library: bool = True,
) -> Sweep:
    """Time drawn layers, layer by layer, until they or the minutes are over; the file is written as it goes.

    fp16 is timed for torch alone: kernels have the same code for it as for bf16.

    Args:
        bench: times.
        kernels: of the pass.
        out: the file.
        seed, count: of the population.
        problems: these instead.
        library: whether torch's own operator is timed too; else the layers are those that one of the kernels can do.
    """
    run = _Sweep(bench, kernels, out, pass_name, precisions, library, clock)
    wanted = None if library else run.can_do
    layers = list(problems) if problems is not None else [layer.problem for layer in population(seed, count, wanted)]
    ends = None if minutes is None else clock() + 60 * minutes
    for start in range(0, len(layers), AHEAD):
        batch = [(problem, list(run.candidates(problem))) for problem in layers[start : start + AHEAD]]
        bench.build(
            (kernel, problem, instance, layout)
            for problem, candidates in batch
            for kernel, instance in candidates
            for layout in LAYOUTS
        )
        for number, (problem, candidates) in enumerate(batch, start):
            if ends is not None and clock() >= ends:
                run.save()
                return run.found()
            if progress is not None:
                progress(number, len(layers), str(problem))
            run.layer(problem, candidates)
    run.save()
    return run.found()


class _Sweep:
    def __init__(
        self,
        bench: Bench,
        kernels: Sequence[Kernel],
        out: Path,
        pass_name: str,
        precisions: Sequence[str],
        library: bool,
        clock: Callable[[], float],
    ) -> None:
        self.bench, self.kernels, self.out, self.pass_name, self.clock = bench, kernels, out, pass_name, clock
        self.library = library
        self.precisions = precisions
        self.samples: list[Sample] = []
        self.rates: dict[tuple[str, str], float] = {}  # FLOP a ms, the best of a kernel's instance so far
        self.saved = clock()
        self.configurations = {
            (kernel, instance): configurations(kernel, instance, MOST if not library else FEW if kernel.specialize else MORE)
            for kernel in kernels
            for instance in self.instances()
            if instance in kernel.dtypes and kernel.deterministic
        }
        self.card = _card(bench, precisions)

    def instances(self) -> list[str]:
        found = dict.fromkeys(one for precision in self.precisions for one in allowed_instances(precision))
        return [instance for instance in found if instance != "fp16"]

    def candidates(self, problem: Problem) -> Iterator[tuple[Kernel, str]]:
        for (_, instance), found in self.configurations.items():
            for one in found:
                if self.bench.backend.why_not(one, problem, instance) is None:
                    yield one, instance

    def can_do(self, problem: Problem) -> bool:
        return next(self.candidates(problem), None) is not None

    def layer(self, problem: Problem, candidates: Sequence[tuple[Kernel, str]]) -> None:
        for element in dict.fromkeys(DTYPES[precision].element for precision in self.precisions):
            for layout in LAYOUTS:
                try:
                    arrays = self.bench.arrays(problem, self.pass_name, element, layout)
                    if self.library:
                        self._torch(problem, element, layout, arrays)
                    self._kernels(problem, candidates, element, layout, arrays)
                except (MemoryError, RuntimeError) as error:
                    print(f"{problem} {element} {layout}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                arrays = {}
                if self.bench.backend.name == "cuda":
                    self.bench.xp.get_default_memory_pool().free_all_blocks()
        if self.bench.backend.name == "cuda" and self.bench.torch is not None:
            self.bench.torch.cuda.empty_cache()
        if self.clock() - self.saved > SAVE_S:
            self.save()

    def _torch(self, problem: Problem, element: str, layout: str, arrays: Mapping[str, Any]) -> None:
        torch = self.bench.torch
        if torch is None:
            return
        tensors = {name: as_tensor(torch, array, element) for name, array in arrays.items()}
        if layout == "channels_last":
            for name in tensors.keys() & {"weight", "grad_weight"}:
                tensors[name] = tensors[name].contiguous(memory_format=torch.channels_last_3d)
        call = torch_call(torch, problem, self.pass_name, tensors)
        for precision in self.precisions:
            if DTYPES[precision].element != element or precision == "tf32x3":
                continue
            try:
                with torch_settings(torch, precision, benchmark=False, deterministic=True):
                    self.bench.first(call)
                    once, _ = self.bench.first(call)
                with torch_settings(torch, precision, benchmark=once < SEARCH_MS):
                    self.bench.first(call)
                    ms = self._time(call)
            except RuntimeError as error:
                print(f"torch {problem} {precision} {layout}: {str(error)[:200]}", flush=True)
                continue
            self.samples.append(Sample(self.pass_name, str(problem), layout, LIBRARY, precision, {}, ms, ms))

    def _kernels(
        self, problem: Problem, candidates: Sequence[tuple[Kernel, str]], element: str, layout: str, arrays: Mapping[str, Any]
    ) -> None:
        for kernel, instance in candidates:
            key = kernel.name, instance
            if DTYPES[instance].element != element or problem.flop > SLOW_MS * self.rates.get(key, float("inf")):
                continue
            try:
                both = self.bench.prepared(kernel, problem, instance, arrays)
                self.bench.first(both)
                ms = packed_ms = self._time(both)
                if any(step.packs for step in self.bench.plan(kernel, problem, instance).launches):
                    packed_ms = min(ms, self._time(self.bench.prepared(kernel, problem, instance, arrays, packed=True)))
            except (KernelError, BackendError, LaunchError, MemoryError) as error:
                print(f"{kernel.name} {instance} {problem}: {str(error).splitlines()[0][:300]}", flush=True)
                self.bench.backend.synchronize()
                continue
            self.rates[key] = max(self.rates.get(key, 0.0), problem.flop / ms)
            tunables = {name: kernel.tunables[name] for name in kernel.search}
            self.samples.append(Sample(self.pass_name, str(problem), layout, kernel.name, instance, tunables, ms, packed_ms))

    def _time(self, call: Callable[[], object]) -> float:
        """Return the median of a few calls, or the one of a slow one."""
        times = self.bench.backend.time(call, 1)
        if times[0] < SLOW_MS:
            times += self.bench.backend.time(call, REPEATS - 1 if times[0] < 2.0 else 2)
        return statistics.median(times)

    def found(self) -> Sweep:
        return Sweep(self.card, tuple(self.samples))

    def save(self) -> None:
        self.saved = self.clock()
        write_json(self.out, {"format": FORMAT, "card": asdict(self.card), "samples": [asdict(one) for one in self.samples]})


def _card(bench: Bench, precisions: Sequence[str]) -> Card:
    backend = bench.backend
    ceilings = measure_ceilings(bench, precisions)
    where = (backend.device_name, backend.arch or "host", backend.multiprocessors, backend.clock_hz, backend.memory_bytes_per_s)
    if ceilings is None:  # the host, where nothing is predicted: any rates do
        return Card(*where, 1e10, {"fp32": 1e10})
    return Card(*where, ceilings.copy_bytes_per_s, dict(ceilings.gemm_flop_per_s))
