"""`convt3d bench --calls`: auto as a user calls it, and our kernels apart, against torch over drawn or named layers, as JSON."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ... import cost, records
from ...backends.base import Backend
from ...dtypes import DTYPES
from ...errors import BackendError, DataError, ProblemError, printable
from ...kernel import Kernel
from ...problem import LAYOUTS, Problem
from ...registry import kernels as registered
from ...registry import revise
from ...tuning import LIBRARY, configured, user_path
from ..environment import variable
from ..population import Layer, population
from ..progress import Progress
from ..suites import HOST_FLOP_LIMIT, scaled_down
from ..tune import tune
from .calls import AUTO, SEARCHED, CallContest, CallRow, Contender, LayerTensors, contenders
from .measure import Bench, Ceilings, measure_ceilings
from .provenance import backend_named, provenance, tf32_state, write_json
from .results import ceilings_of
from .survey_summary import call_rows, print_head, print_row, print_summary, summary

FORMAT = 1  # of the JSON file
AHEAD = 16  # layers that are compiled for at a time

Question = tuple[Layer, str, str, str]  # layer, pass, precision, layout


@dataclass(frozen=True)
class Survey:
    """What is to be measured: every combination, layer by layer, so that what a cut-off run has is a smaller population.

    Attributes:
        seed, count: the layers, as `population.population` draws them.
        passes, precisions, layouts: of `problem.PASSES`, `dtypes.DTYPES`, `problem.LAYOUTS`.
        kernels: what is measured beside auto: "auto" (the kernel that it takes where torch is ruled out), "all", or kernels.
        regret: for so many layers, the first ones, the best configuration of all kernels, or of those given, is searched, too.
        minutes: after so long nothing new is begun; None: no limit.
        trials: whether auto's first call times its rivals, as it does under `cudnn.benchmark` (`trials`); else it goes by the database
            and by predictions alone.
        problems: named layers in place of drawn ones.
    """

    seed: int = 0
    count: int = 150
    passes: Sequence[str] = ("fprop",)
    precisions: Sequence[str] = ("fp32",)
    layouts: Sequence[str] = LAYOUTS
    kernels: str | Sequence[Kernel] = AUTO
    regret: int = 0
    minutes: float | None = None
    trials: bool = True
    problems: Mapping[str, Problem] | None = None

    @property
    def layers(self) -> list[Layer]:
        """Return what is measured, in order."""
        if self.problems is None:
            return population(self.seed, self.count)
        return [Layer(name, "named", problem) for name, problem in self.problems.items()]


def survey(
    plan: Survey,
    out: Path | None = None,
    *,
    backend: str | None = None,
    budget_ms: float | None = None,
    flop_limit: int = HOST_FLOP_LIMIT,
    console: Console | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Measure calls and return their results, the content of the JSON file.

    Args:
        plan: what is measured.
        out: the JSON file, written after each layer. What it holds already, of the same seed, device and commit, is not measured again.
        backend: "cuda" or "host"; None takes the GPU where there is one.
        budget_ms: time for the repeats of one layer's contenders together; None is 60 on a GPU and 20 on the host.
        flop_limit: useful FLOP that a layer is scaled down to on the host.
        console: gets a line for each layer, precision and layout, and the tables.
        progress: called with (measured, to be measured in all, what is being done).
        clock: seconds, of the time limit.

    Raises:
        BackendError: a backend, or torch, is not there.
        ProblemError: a bad seed or count, or the file is of another seed, device or commit.
    """
    run = _Run(plan, out, backend_named(backend), budget_ms, flop_limit, console or Console(), progress, clock)
    with _a_database_of_its_own():
        run.measure()
    run.finish()
    return run.data


@contextmanager
def _a_database_of_its_own() -> Iterator[None]:
    """What trials measure goes into a copy of the user's database."""
    with tempfile.TemporaryDirectory() as directory:
        for file in (user_path(), cost.user_path()):  # the costs lie beside the database
            with suppress(FileNotFoundError):
                shutil.copy(file, directory)
        try:
            with variable("CONVT3D_TUNING", str(Path(directory) / user_path().name)):
                yield
        finally:
            revise()


def begun(path: Path) -> dict[str, Any]:
    """Return the content of a survey's file, where everything that a run takes of it is sound.

    Raises:
        DataError: it cannot be read, or is damaged; the message names the field.
    """
    where = f"survey {str(path)!r}"
    data = dict(records.of_format(records.read(path, where), where, FORMAT))
    for name, hint in (
        ("created", str),
        ("machine", dict[str, str]),
        ("elapsed_s", float),
        ("tf32", dict[str, dict[str, str]]),
        ("layers", dict[str, dict[str, str]]),
    ):
        data[name] = records.typed(data.get(name), hint, f"{where}: {name}")
    records.within(data["elapsed_s"], 0, 1e12, f"{where}: elapsed_s")
    if "device" not in data["machine"]:
        raise DataError(f"{where}: machine: field 'device' is missing")
    if data.get("ceilings", ...) is not None:
        ceilings_of(data.get("ceilings"), f"{where}: ceilings")
    call_rows(data, where)
    return data


class _Run:
    """The state of one survey."""

    def __init__(
        self,
        plan: Survey,
        out: Path | None,
        backend: Backend,
        budget_ms: float | None,
        flop_limit: int,
        console: Console,
        progress: Progress | None,
        clock: Callable[[], float],
    ) -> None:
        self.plan, self.out, self.console, self.progress, self.clock = plan, out, console, progress, clock
        self.on_host = backend.name == "host"
        self.bench = Bench(backend, budget_ms or (20.0 if self.on_host else 60.0), against=())
        if self.bench.torch is None:
            raise BackendError("calls are measured on torch tensors, and there is no torch that has the device")
        self.layers = plan.layers
        self.flop_limit = flop_limit
        self.problems = {one.name: scaled_down(one.problem, flop_limit) if self.on_host else one.problem for one in self.layers}
        self.started = clock()
        self.data = self._begun()
        self.rows = call_rows(self.data)
        self.before_s = self.data["elapsed_s"]
        self.ceilings = self._ceilings()
        print_head(console, self.data)

    def _begun(self) -> dict[str, Any]:
        """Return the file's content, or that of a run in which nothing has been measured."""
        plan = self.plan
        kernels = plan.kernels if isinstance(plan.kernels, str) else [kernel.name for kernel in plan.kernels]
        seed = plan.seed if plan.problems is None else None
        what = {"seed": seed, "kernels": kernels, "scaled_down": self.on_host, "trials": plan.trials}
        fresh: dict[str, Any] = {"format": FORMAT, "kind": "population"} | provenance(self.bench) | what
        fresh |= {"flop_limit": self.flop_limit if self.on_host else None, "budget_ms": self.bench.budget_ms, "ceilings": None}
        fresh["tf32"] = {precision: tf32_state(self.bench, precision) for precision in plan.precisions}
        fresh |= {"complete": False, "layers": {}, "rows": [], "summary": [], "wrong": 0, "elapsed_s": 0.0}
        if self.out is None or not self.out.exists():
            return fresh
        try:
            known = begun(self.out)
        except DataError as error:
            raise ProblemError(f"out={str(self.out)!r}: cannot be gone on with: {error}") from None
        for name in ("kind", "format", "commit", *what):
            if known.get(name) != fresh[name]:
                found = printable(str(known.get(name)), 200)
                raise ProblemError(f"out={str(self.out)!r}: is of {name} {found}, not {fresh[name]}; take another file")
        if known["machine"]["device"] != fresh["machine"]["device"]:
            raise ProblemError(f"out={str(self.out)!r}: was measured on {printable(known['machine']['device'], 200)}; take another file")
        kept = {name: known[name] for name in ("created", "ceilings", "layers", "rows", "elapsed_s")}
        return fresh | kept | {"tf32": known["tf32"] | fresh["tf32"]}

    def _ceilings(self) -> Ceilings | None:
        known = self.data["ceilings"]
        if known is None or not set(self.plan.precisions) <= set(known["gemm_flop_per_s"]):
            measured = measure_ceilings(self.bench, tuple(dict.fromkeys((*self._precisions_known(), *self.plan.precisions))))
            self.data["ceilings"] = known = None if measured is None else asdict(measured)
        return None if known is None else Ceilings(**known)

    def _precisions_known(self) -> list[str]:
        return [] if self.data["ceilings"] is None else list(self.data["ceilings"]["gemm_flop_per_s"])

    @property
    def is_over(self) -> bool:
        return self.plan.minutes is not None and self.clock() - self.started > 60 * self.plan.minutes

    def questions(self, layers: Sequence[Layer], contender: str) -> list[Question]:
        """Return what the file has no row of a contender for; precisions of one element type come together."""
        have = {(row.case, row.pass_name, row.dtype, row.layout) for row in self.rows if row.contender == contender}
        precisions = sorted(self.plan.precisions, key=lambda name: DTYPES[name].element)
        every = itertools.product(layers, self.plan.passes, precisions, self.plan.layouts)
        return [(layer, *rest) for layer, *rest in every if (layer.name, *rest) not in have]  # type: ignore[misc]

    def measure(self) -> None:
        """Measure what is missing, until it is done or the time is over."""
        total, done = len(self.questions(self.layers, AUTO)), 0
        for start in range(0, len(self.layers), AHEAD):
            waiting = self.questions(self.layers[start : start + AHEAD], AUTO)
            if not waiting:
                continue
            if self.is_over:
                return
            self.tell(done, total, f"compiling for {len({layer.name for layer, *_ in waiting})} layers")
            asked = {question: self._contenders(question) for question in waiting}
            self.bench.build(
                (*one, layout)
                for (layer, pass_name, _, layout), found in asked.items()
                for contender in found
                for one in contender.compiled(self.problems[layer.name], pass_name, self.bench.backend)
            )
            for question, contest in self._contests(waiting):
                self.tell(done, total, " ".join((question[0].name, *question[1:])))
                self._record(question, contest.rows(asked[question]))
                done += 1
        searched = self.questions(self.layers[: self.plan.regret], SEARCHED)
        for number, (question, contest) in enumerate(self._contests(searched)):
            self.tell(number, len(searched), " ".join(("searching", question[0].name, *question[1:])))
            self._record(question, self._search(question, contest))

    def _contests(self, questions: Sequence[Question]) -> Iterator[tuple[Question, CallContest]]:
        """Yield each question with its tensors, and write the file behind each layer; stop when the time is over."""
        for layer, own in itertools.groupby(questions, key=lambda question: question[0]):
            made: LayerTensors | None = None
            for question in own:
                if self.is_over:
                    self._save()
                    return
                _, pass_name, precision, layout = question
                element = DTYPES[precision].element
                if made is None or (made.pass_name, made.element) != (pass_name, element):
                    made = None  # the old tensors' memory first
                    made = LayerTensors(self.bench, self.problems[layer.name], pass_name, element)
                yield question, CallContest(layer, made, precision, layout, self.ceilings, self.plan.trials)
            del made
            self._save()
            if not self.on_host:
                self.bench.xp.get_default_memory_pool().free_all_blocks()
                self.bench.torch.cuda.empty_cache()

    def _contenders(self, question: Question) -> list[Contender]:
        layer, pass_name, precision, layout = question
        where = (self.problems[layer.name], pass_name, precision, layout, self.plan.trials)
        return contenders(self.bench.backend, self.plan.kernels, *where)

    def _record(self, question: Question, rows: Sequence[CallRow]) -> None:
        self.rows += rows
        print_row(self.console, rows)
        if not self.bench.is_alive():  # nothing more can run in this process, which the next goes on from
            self._save()
            why = next((f"{row.contender}: {row.note}" for row in rows if row.first_call_ms is None), "timing")
            name = " ".join((question[0].name, *question[1:]))
            raise BackendError(f"{name}: the GPU's context is lost ({printable(why, 300)}); run it again to go on")

    def _search(self, question: Question, contest: CallContest) -> list[CallRow]:
        """Return the row of the best configuration of all kernels, as a user would call it, timed beside auto."""
        layer, pass_name, precision, layout = question
        problem = self.problems[layer.name]
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "searched.json"
            wanted = self.plan.kernels
            kernels = registered(pass_name) if isinstance(wanted, str) else {kernel.name: kernel for kernel in wanted}
            settings: Mapping[str, Any] = {"passes": (pass_name,), "precisions": (precision,), "layouts": (layout,)}
            found = tune(self.bench, {layer.name: problem}, kernels, path, **settings, tell=lambda text: None).entries()
        best = min((e for e in found if e.kernel != LIBRARY), key=lambda entry: entry.with_packing_ms, default=None)
        auto, *_ = self._contenders(question)
        if best is None:
            return [replace(contest.blank, contender=SEARCHED, note="no kernel can do it")]
        kernel = configured(kernels[best.kernel], tuple(sorted({**kernels[best.kernel].tunables, **best.tunables}.items())))
        where = {**auto.settings, "backend": self.bench.backend.name, "algorithm": kernel}
        values = ", ".join(f"{name}={value}" for name, value in best.tunables.items() if name in kernel.search)
        beside, row = contest.rows([auto, Contender(SEARCHED, where, kernel, best.instance, values)], with_torch=False)
        ratio = None if beside.median_ms is None or row.median_ms is None else beside.median_ms / row.median_ms
        return [replace(row, speedup=ratio)]

    def _save(self) -> None:
        self.data |= {
            "count": len(self.layers),
            "layers": {one.name: {"family": one.family, "problem": str(self.problems[one.name])} for one in self.layers},
            "rows": [row.recorded for row in self.rows],
            "summary": summary(self.rows),
            "wrong": sum(row.wrong for row in self.rows),
            "elapsed_s": round(self.before_s + self.clock() - self.started, 1),
            "complete": not self.questions(self.layers, AUTO) and not self.questions(self.layers[: self.plan.regret], SEARCHED),
        }
        if self.out is not None:
            write_json(self.out, self.data)

    def finish(self) -> None:
        """Print what was found, and draw it beside the file."""
        self._save()
        print_summary(self.console, self.data, self.rows)
        if self.out is not None:
            try:
                from ...plots import ratio_distribution
            except ImportError:
                self.console.print("No picture: matplotlib is not installed.")
                return
            ratio_distribution(self.rows).savefig(self.out.with_suffix(".png"), dpi=192, facecolor="white")

    def tell(self, done: int, total: int, text: str) -> None:
        if self.progress is not None:
            self.progress(done, total, text)
