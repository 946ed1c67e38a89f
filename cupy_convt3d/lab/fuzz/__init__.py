"""`fuzz`: unending random examples of kernels, run by several child processes, with what fails shrunk and written down."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ... import limits
from ...backends.base import Backend
from ...backends.host import check_sanitizer
from ...errors import BackendError, KernelError, LaunchError, shown
from ...kernel import Kernel
from ...limits import cores
from ...problem import Problem
from ...source import Instance
from .. import strategies
from ..check.examples import Example, combinations, configurations, draw_example
from ..check.shrink import shrink_example
from ..run.verify import Outcome
from ..run.worker import Worker
from ..threads import together
from .findings import Finding, Journal, finding_of, surroundings
from .findings import replay as replay

_CLASSES = list(strategies.FEATURES)
_REFUSALS = 1000
_INTERRUPTED = "the run was killed while this ran"
_INTERRUPTED_AGAIN = "the run was killed twice while this ran"
_ALWAYS_SHRUNK = 4  # failures of one kind; after that every one whose number is a power of two


@dataclass
class Coverage:
    """What of the parameter space a kernel has been run on: pairs of named classes that one problem lies in."""

    pass_name: str
    pairs: int = 0  # bit i*n + j: a problem lay in classes i and j
    examples: int = 0
    failures: int = 0
    last_new: int = 0  # the example that was the last to reach a new pair

    def add(self, problem: Problem) -> None:
        self.examples += 1
        reached, held = self.pairs, 0  # bit i: it lies in class i
        for number, holds in reversed(list(enumerate(strategies.FEATURES.values()))):
            if holds(problem):
                held |= 1 << number
                reached |= held << number * len(_CLASSES)
        if reached != self.pairs:
            self.pairs, self.last_new = reached, self.examples

    @property
    def applicable(self) -> int:
        """How many classes there are for the pass: only fprop has a bias."""
        return len(_CLASSES) - (self.pass_name != "fprop")

    @property
    def classes(self) -> list[str]:
        """Names of the classes that were reached."""
        return [name for i, name in enumerate(_CLASSES) if self.pairs >> (i * len(_CLASSES) + i) & 1]


@dataclass
class FuzzReport:
    """What a run has done, earlier runs on the same file included; a copy is handed to `progress` as it grows.

    Attributes:
        coverage: by kernel.
        findings: all that the file holds.
        new: how many of them are this run's.
        restarts: of child processes, in this run.
        examples, elapsed_s: of this run.
        note: what is being done where it is not running examples.
        interrupted: examples that were running when the last run ended without a word, as it was killed: by a kernel, perhaps.
    """

    coverage: dict[str, Coverage]
    findings: list[Finding]
    new: int = 0
    restarts: int = 0
    examples: int = 0
    elapsed_s: float = 0.0
    note: str = ""
    interrupted: list[Finding] = field(default_factory=list)


Progress = Callable[[FuzzReport], None]


@dataclass
class _Run:
    """One run: what its threads, one to a child process, share."""

    kernels: list[Kernel]
    backend: str
    sanitize: str | None
    journal: Journal
    time_limit_s: float
    examples: int | None
    deadline: float
    report: FuzzReport
    seed: str
    done: Counter[str]  # how many examples each worker has done of each configuration; they are numbered
    paths: dict[str, Path | None]
    gpu: Backend | None  # where that is the backend
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)
    errors: list[BaseException] = field(default_factory=list)
    to_compile: queue.SimpleQueue[Instance] = field(default_factory=queue.SimpleQueue)
    workers: dict[str, Worker] = field(default_factory=dict)
    spent: dict[str, list[float]] = field(default_factory=dict)  # seconds, by worker and configuration
    drawn: dict[str, tuple[int, Example | None]] = field(default_factory=dict)  # by worker: its next example, and of which configuration
    running: dict[str, list[Any]] = field(default_factory=dict)  # by worker: stream, number, fields of its example
    sandbox: bool = False
    count: int = 1  # of workers
    seen: set[tuple[str, int]] = field(default_factory=set)  # stream and number of what was running when the last run was killed

    def work(self, slot: str) -> None:
        """Run examples until the run is over: the body of one thread."""
        try:
            self.workers[slot] = self.worker()
            self.spent[slot] = [0.0] * len(self.kernels)
            self.compile()
            self.shrink_pending(slot)
            while not self.over():
                self.step(slot)
        except BaseException as error:  # raised again by the thread that started the run
            self.errors.append(error)
        finally:
            self.stopped.set()
            if slot in self.workers:
                self.workers[slot].close()

    def worker(self) -> Worker:
        return Worker(self.kernels[0], self.backend, self.sanitize, self.time_limit_s, sandboxed=self.sandbox, workers=self.count)

    def over(self) -> bool:
        enough = self.examples is not None and self.report.examples >= self.examples
        return self.stopped.is_set() or enough or time.monotonic() > self.deadline

    def measure(self, start: float) -> None:
        self.report.elapsed_s = time.monotonic() - start
        self.report.restarts = sum(worker.restarts for worker in list(self.workers.values()))

    def compile(self) -> None:
        """Compile what nobody has compiled yet; the children then find it in the cache."""
        from ...backends.host import HostBackend

        backend = HostBackend(self.sanitize)
        with contextlib.suppress(queue.Empty):
            while not self.over():
                instance = self.to_compile.get_nowait()
                self.report.note = f"compiling {instance}"
                backend.library(instance)
        self.report.note = ""

    def step(self, slot: str) -> None:
        """Write down the worker's next example, and run it; meanwhile the one after it is drawn."""
        start = time.monotonic()
        number, example = self.drawn.pop(slot) if slot in self.drawn else self.draw(slot)
        kernel, stream = self.kernels[number], self.stream(slot, number)
        if example is not None:
            with self.lock:
                self.running[slot] = [stream, self.done[stream], self.in_flight(stream, example)]
                self.journal.save(self.progress())
            outcome = self.verify(slot, example, lambda: self.drawn.update({slot: self.draw(slot, number)}))
            with self.lock:
                coverage = self.report.coverage[example.kernel.name]
                coverage.add(example.problem)
                coverage.failures += not outcome.ok
                self.report.examples += 1
            if not outcome.ok:
                self.failed(slot, example, outcome)
        elif self.report.examples == 0 and self.done[stream] == _REFUSALS:
            raise KernelError(f"{kernel.name}: refuses all of {_REFUSALS} problems drawn; see its [restrictions]")
        self.spent[slot][number] += time.monotonic() - start
        with self.lock:
            self.done[stream] += 1
            self.running.pop(slot, None)

    def draw(self, slot: str, under_way: int | None = None) -> tuple[int, Example | None]:
        """Draw a worker's next example, None where it cannot be run, while one of the configuration `under_way` runs."""
        spent = list(self.spent[slot])
        if under_way is not None:  # it will take as long as those before it
            spent[under_way] *= 1 + 1 / max(1, self.done[self.stream(slot, under_way)])
        # Each configuration gets the same time, so that slow ones do not hold up the others.
        number = min(range(len(spent)), key=lambda number: (spent[number], number == under_way))
        kernel, stream = self.kernels[number], self.stream(slot, number)
        example = draw_example(kernel, f"{self.seed}/{stream}/{self.done[stream] + (number == under_way)}")
        if example is not None and self.gpu is not None and self.gpu.why_not(kernel, example.problem, example.dtype) is not None:
            return number, None  # this GPU has too little shared memory for it
        return number, example

    def stream(self, slot: str, number: int) -> str:
        kernel = self.kernels[number]
        return f"{slot}/{kernel.name}/{kernel.changed_tunables}"

    def progress(self) -> dict[str, Any]:
        coverage = {n: [c.pass_name, hex(c.pairs), c.examples, c.failures, c.last_new] for n, c in self.report.coverage.items()}
        return {"seed": self.seed, "done": self.done, "coverage": coverage, "running": self.running}

    def verify(self, slot: str, example: Example, meanwhile: Callable[[], None] = lambda: None) -> Outcome:
        """Run one example, and do something else meanwhile; an error of the check's own is an outcome too."""
        worker = self.workers[slot]
        worker.kernel, worker.time_limit_s = example.kernel, limits.time_limit_s(example.problem, self.time_limit_s)
        wait = worker.ask(example.problem, example.dtype, example.kind, example.seed)
        meanwhile()
        try:
            return wait()
        except (KernelError, BackendError, LaunchError):
            raise
        except RuntimeError as error:
            return Outcome(False, message=f"the check itself failed: {str(error).strip().splitlines()[-1]}")

    def in_flight(self, stream: str, example: Example) -> dict[str, Any]:
        message = _INTERRUPTED_AGAIN if (stream, self.done[stream]) in self.seen else _INTERRUPTED
        return vars(self.finding(example, Outcome(False, message=message)))

    def resume(self, running: dict[str, list[Any]]) -> None:
        """Name what was running when the last run was killed. What has been running at two such ends is a finding and not run again."""
        for stream, number, fields in running.values():
            found = finding_of(fields, "running")
            self.report.interrupted.append(found)
            self.seen.add((stream, number))
            if found.message == _INTERRUPTED_AGAIN and number == self.done[stream]:
                self.done[stream] += 1
                self.add(found)

    def finding(self, example: Example, outcome: Outcome) -> Finding:
        return Finding.of(example, outcome, self.backend, self.sanitize, self.paths[example.kernel.name])

    def failed(self, slot: str, example: Example, outcome: Outcome) -> None:
        """Write a failure down, then shrink it, unless there were many of its kind."""
        found = self.finding(example, outcome)
        with self.lock:
            self.kinds[found.kernel, found.what] += 1
            count = self.kinds[found.kernel, found.what]
        if count <= _ALWAYS_SHRUNK or count & (count - 1) == 0:
            with self.lock:
                self.journal.add("failure", found)
            self.shrink(slot, example, outcome)
            with self.lock:
                self.journal.add("shrunk", found)

    def shrink(self, slot: str, example: Example, outcome: Outcome) -> None:
        smallest, outcome = shrink_example(self.workers[slot], example, outcome, combinations(example.kernel.dtypes))
        with self.lock:
            self.add(self.finding(smallest, outcome))

    def add(self, found: Finding) -> None:
        if found.key not in self.journal.findings:
            self.journal.add("finding", found)
            self.report.findings.append(found)
            self.report.new += 1

    def shrink_pending(self, slot: str) -> None:
        """Shrink what an earlier run was killed over."""
        by_name = {kernel.name: kernel for kernel in reversed(self.kernels)}
        while not self.over():
            with self.lock:
                if not self.journal.pending:
                    return
                found = self.journal.pending.pop(0)
            if found.kernel not in by_name:
                continue  # a later run with that kernel will
            example = found.example(by_name[found.kernel])
            outcome = self.verify(slot, example)
            if not outcome.ok:
                self.shrink(slot, example, outcome)
            with self.lock:
                self.journal.add("shrunk", found)


def fuzz(
    kernels: Sequence[Kernel],
    *,
    backend: str,
    findings: str | Path,
    minutes: float | None = None,
    examples: int | None = None,
    workers: int | None = None,
    sanitize: str | None = None,
    time_limit_s: float = 10.0,
    seed: str | None = None,
    progress: Progress | None = None,
    sandbox: bool = False,
) -> FuzzReport:
    """Run random examples of `kernels` until a limit is reached or Ctrl-C is pressed.

    Args:
        kernels: what to run; names are told apart, so no two may have the same.
        backend: "cuda" or "host".
        findings: the JSON-lines file to go on with, or to begin. What it holds is not reported twice.
        minutes, examples: limits of this run; None: none.
        workers: child processes; None: one to a core, and one on a GPU.
        sanitize: as in `check`.
        time_limit_s: an example that takes longer is a hang; a large one gets more (`limits.time_limit_s`).
        seed: of a new file's examples; None: drawn. A file that is resumed keeps its own.
        progress: called about four times a second.
        sandbox: as in `check`.

    Raises:
        KernelError, CompileError, BackendError: a kernel or the backend cannot be had at all.
        FindingsError: the file is damaged, or another run has it open.
    """
    check_sanitizer(sanitize)
    limits.check_time_limit(time_limit_s)
    if not isinstance(kernels, Sequence) or not all(isinstance(kernel, Kernel) for kernel in kernels):
        raise KernelError(f"kernels={shown(kernels)}: must be a list of Kernels")
    names = Counter(kernel.name for kernel in kernels)
    if not names or max(names.values()) > 1:
        raise KernelError(f"kernels={[kernel.name for kernel in kernels]}: give at least one, and none twice")
    count = workers or (cores() if backend == "host" else 1)
    journal = Journal(Path(findings))
    try:
        run = _begin(list(kernels), backend, sanitize, journal, time_limit_s, examples, minutes, seed)
        run.sandbox, run.count = sandbox, count
        try:
            _drive(run, count, progress)
        finally:
            run.running.clear()
            journal.save(run.progress())
    finally:
        journal.close()
    return run.report


def _begin(
    kernels: list[Kernel],
    backend: str,
    sanitize: str | None,
    journal: Journal,
    time_limit_s: float,
    examples: int | None,
    minutes: float | None,
    seed: str | None,
) -> _Run:
    from ... import registry
    from ...backends.cuda import CudaBackend

    saved = journal.progress
    coverage = {n: Coverage(c[0], int(c[1], 16), *c[2:]) for n, c in saved.get("coverage", {}).items()}
    coverage |= {kernel.name: Coverage(kernel.pass_name) for kernel in kernels if kernel.name not in coverage}
    shipped = {kernel.path for kernel in registry.kernels().values()}
    run = _Run(
        kernels=[configuration for kernel in kernels for configuration in configurations(kernel)],
        backend=backend,
        sanitize=sanitize,
        journal=journal,
        time_limit_s=time_limit_s,
        examples=examples,
        deadline=float("inf") if minutes is None else time.monotonic() + 60 * minutes,
        report=FuzzReport(coverage, list(journal.findings.values())),
        seed=saved.get("seed") or seed or secrets.token_hex(8),
        done=Counter(saved.get("done", {})),
        paths={k.name: None if k.path is None or k.path in shipped else k.path.resolve() for k in kernels},
        gpu=CudaBackend() if backend == "cuda" else None,
    )
    if backend == "host":
        for kernel in run.kernels:
            for dtype in kernel.dtypes:
                run.to_compile.put(Instance(kernel, dtype))
    run.resume(saved.get("running", {}))
    journal.write("run", surroundings=surroundings(), kernels=list(coverage), backend=backend, sanitize=sanitize, seed=run.seed)
    return run


def _drive(run: _Run, count: int, progress: Progress | None) -> None:
    start = time.monotonic()

    def stop(error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            run.report.note = "interrupted"
        run.stopped.set()

    def meanwhile() -> None:
        run.measure(start)
        if progress is not None:
            progress(run.report)

    together([partial(run.work, str(number)) for number in range(count)], stop, meanwhile)
    run.measure(start)
    if run.errors:
        raise run.errors[0]
