"""`check`: is a kernel right for every combination of parameters, and if not, what is the smallest problem that shows it."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from .. import registry
from ..errors import BackendError, KernelError
from ..kernel import Kernel
from ..problem import Problem
from ..source import Instance
from . import strategies
from .check_report import CheckReport, Counterexample
from .shrink import shrink
from .tensors import KINDS, WIDE
from .verify import Outcome
from .worker import InProcess, Worker

__all__ = ["CheckReport", "Counterexample", "check", "default_backend", "resolve"]

Progress = Callable[[int, int, str], None]
# The tunables of a kernel that are tile sizes, and the quantity whose tails they have.
_TILES = {
    "TILE_VOXELS": "output_voxels",
    "TILE_CHANNELS": "out_channels_per_group",
    "TILE_DEPTH": "in_channels_per_group",
    "SPLIT_VOXELS": "input_voxels",
}
_LARGEST_TILE = 256  # its tails must be tiny problems still
_CHANNEL_FACTORS = (1, 2, 4, 8, 16, 32)


class _Found(BaseException):
    """An example failed. Not an Exception, so that it leaves Hypothesis's engine at once, which would replay and shrink."""


def resolve(kernel: Kernel | str | Path) -> Kernel:
    """Return the kernel that is meant: one already, a path to FILE.cu, or a registered name.

    Raises:
        KernelError: there is none such, or the file's declaration is wrong.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, Path) or str(kernel).endswith(".cu"):
        return Kernel.from_file(kernel)
    return registry.kernel(kernel)


def default_backend() -> str:
    """Return "cuda" where CuPy sees a GPU, else "host"."""
    from ..backends.cuda import available

    return "cuda" if available() else "host"


def check(
    kernel: Kernel | str | Path,
    *,
    backend: str | None = None,
    examples: int = 200,
    dtypes: Sequence[str] | None = None,
    seed: int = 0,
    sanitize: str | None = None,
    progress: Progress | None = None,
    time_limit_s: float = 10.0,
    problem: Problem | None = None,
    kinds: Sequence[str] | None = None,
    in_process: bool = False,
) -> CheckReport:
    """Check a kernel against the NumPy reference, in a child process, and shrink what fails.

    First come the smallest problems of every named class of the parameter space, integers with exact results before rounding
    errors, then `examples` drawn ones, steered towards the largest error.

    Args:
        kernel: a Kernel, the name of a registered one, or the path of a `.cu` file.
        backend: "cuda" or "host"; None: cuda where there is a GPU.
        examples: how many are drawn at random, over all dtypes.
        dtypes: of the kernel's; None: all of them.
        seed: of the random search; the same seed draws the same examples.
        sanitize: "address" (with "undefined"), "undefined" or "thread"; host only.
        progress: called with (examples done, examples in all, what is being done).
        time_limit_s: an example that takes longer is a hang.
        problem: check only this one, with this seed.
        kinds: of `tensors.KINDS`; None: all of them.
        in_process: no child process, for tools that watch one (compute-sanitizer, ncu, a debugger); without `sanitize`.

    Raises:
        KernelError, CompileError, BackendError: the kernel, its dtype or the backend cannot be had at all.
    """
    search = _Search(resolve(kernel), backend or default_backend(), dtypes, kinds, sanitize, progress)
    start = time.perf_counter()
    if in_process and sanitize:
        raise BackendError(f"sanitize={sanitize!r}, in_process=True: a sanitizer's runtime needs a process of its own")
    name = search.report.backend
    with InProcess(search.kernel, name) if in_process else Worker(search.kernel, name, sanitize, time_limit_s) as search.worker:
        search.precompile(sanitize)
        try:
            if problem is not None:
                search.run_one(problem, seed)
            else:
                search.run_edges(examples)
                search.run_random(examples, seed)
        except _Found:
            search.minimize()
    if problem is None:
        search.judge_coverage()
    report = search.report
    report.passed = report.counterexample is None and not report.missing and report.examples > 0
    report.elapsed_s = time.perf_counter() - start
    return report


class _Search:
    """The state of one `check`."""

    worker: Worker | InProcess

    def __init__(
        self,
        kernel: Kernel,
        backend: str,
        dtypes: Sequence[str] | None,
        kinds: Sequence[str] | None,
        sanitize: str | None,
        progress: Progress | None,
    ) -> None:
        if backend not in ("cuda", "host"):
            raise BackendError(f"backend={backend!r}: must be cuda or host")
        if sanitize is not None and backend != "host":
            raise BackendError(f"sanitize={sanitize!r}: only the host backend has sanitizers, not {backend}")
        for dtype in dtypes or ():
            if dtype not in kernel.dtypes:
                raise KernelError(f"{kernel.name} has no {dtype} instance (it has {', '.join(kernel.dtypes)})")
        if unknown := set(kinds or ()) - set(KINDS):
            raise KernelError(f"kind={sorted(unknown)[0]!r}: must be one of {', '.join(KINDS)}")
        self.kernel, self.sanitize, self.progress = kernel, sanitize, progress
        self.kinds = [kind for kind in KINDS if kind in (kinds or KINDS)]
        self.report = CheckReport(kernel.name, backend, tuple(dtypes or kernel.dtypes))
        self.problems: set[Problem] = set()
        self.skipped: Counter[str] = Counter()
        self.total = 0
        self.failure: tuple[Problem, str, str, int, Outcome] | None = None

    def precompile(self, sanitize: str | None) -> None:
        """Compile while the child is still importing; it then finds the binaries in the cache."""
        if self.report.backend == "host":
            from ..backends.host import HostBackend

            backend = HostBackend(sanitize)
            for dtype in self.report.dtypes[:1]:  # the others wait: a wrong kernel seldom gets to them
                backend.library(Instance(self.kernel, dtype))

    def combinations(self) -> list[tuple[str, str]]:
        """Return (kind, dtype), exact before random; only some dtypes keep wide integers."""
        pairs = [(kind, dtype) for kind in self.kinds for dtype in self.report.dtypes]
        return [(kind, dtype) for kind, dtype in pairs if kind != "exact_wide" or dtype in WIDE]

    def run(self, problem: Problem, dtype: str, kind: str, seed: int) -> Outcome:
        """Run one example and count it.

        Raises:
            _Found: it failed; `failure` has it.
        """
        outcome = self.worker.verify(problem, dtype, kind, seed)
        self.problems.add(problem)
        report = self.report
        report.examples, report.distinct_problems = report.examples + 1, len(self.problems)
        if not outcome.ok:
            self.failure = (problem, dtype, kind, seed, outcome)
            raise _Found
        if kind == "random":
            report.ratios.append(outcome.ratio)
            report.worst_ratio = max(report.worst_ratio, outcome.ratio)
        if self.progress is not None:
            self.progress(report.examples, max(self.total, report.examples), f"{self.kernel.name} {dtype} {kind}")
        return outcome

    def accepts(self, problem: Problem, dtype: str) -> bool:
        return self.kernel.why_not(problem, dtype) is None

    def skip(self, problem: Problem, dtype: str) -> None:
        self.skipped[self.kernel.why_not(problem, dtype) or ""] += 1
        self.report.skipped = dict(self.skipped)

    def run_one(self, problem: Problem, seed: int) -> None:
        for kind, dtype in self.combinations():
            if self.accepts(problem, dtype):
                self.run(problem, dtype, kind, seed)
            else:
                self.skip(problem, dtype)

    def edges(self) -> list[Problem]:
        """Return the smallest problem of each class that the kernel can do: the class's own, or one with more channels."""
        chosen = dict.fromkeys(p for p in strategies.EDGE_PROBLEMS if any(self.accepts(p, d) for d in self.report.dtypes))
        for holds in strategies.FEATURES.values():
            if not any(map(holds, chosen)):
                chosen.update(dict.fromkeys(self.allowed(filter(holds, strategies.EDGE_PROBLEMS), holds)))
        return list(chosen)

    def allowed(self, problems: Iterable[Problem], holds: Callable[[Problem], bool]) -> list[Problem]:
        """Return the first of the problems and their variants that the kernel can do, or nothing."""
        for problem in problems:
            for candidate in filter(holds, _variants(problem)):
                if any(self.accepts(candidate, dtype) for dtype in self.report.dtypes):
                    return [candidate]
        return []

    def run_edges(self, examples: int) -> None:
        edges, pairs = self.edges(), self.combinations()
        self.total = len(edges) * len(pairs) + examples
        for kind, dtype in pairs:
            for number, problem in enumerate(edges):
                if self.accepts(problem, dtype):
                    self.run(problem, dtype, kind, number)  # the seed draws the layout too: 0 is contiguous
                else:
                    self.skip(problem, dtype)

    def run_random(self, examples: int, seed: int) -> None:
        if examples == 0:
            return
        sizes = {n: v for n, v in self.kernel.tunables.items() if n in _TILES and v <= _LARGEST_TILE}
        drawn = strategies.problems(self.kernel.pass_name, tiles={_TILES[name]: size for name, size in sizes.items()})

        def example(problem: Problem, pair: tuple[str, str], number: int) -> None:
            kind, dtype = pair
            fitting = next((p for p in _variants(problem) if self.accepts(p, dtype)), None)
            if fitting is None:
                self.skip(problem, dtype)
                hypothesis.reject()
            outcome = self.run(fitting, dtype, kind, number)
            if kind == "random":
                hypothesis.target(min(outcome.ratio, 1e6), label="error / bound")

        given = hypothesis.given(drawn, st.sampled_from(self.combinations()), st.integers(0, 2**16))(example)
        settings = hypothesis.settings(
            max_examples=examples,
            database=None,
            derandomize=False,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.target),
        )
        with contextlib.suppress(Unsatisfiable):  # the kernel refuses all that is drawn; `skipped` says why
            hypothesis.seed(seed)(settings(given))()

    def minimize(self) -> None:
        """Replace the failure by the smallest one near it."""
        assert self.failure is not None
        problem, dtype, kind, seed, outcome = self.failure
        if self.progress is not None:
            self.progress(self.report.examples, max(self.total, 1), f"{self.kernel.name}: shrinking {problem}")
        seeds = list(dict.fromkeys((0, seed, 1))) if self.sanitize is None else [seed]
        best = (outcome, seed)
        if "hang" in outcome.message:  # each try of another that hangs costs the whole limit
            seeds, self.worker.time_limit_s = [seed], min(self.worker.time_limit_s, 0.5)

        def fails(candidate: Problem) -> bool:
            nonlocal best
            if not self.accepts(candidate, dtype):
                return False
            for number in seeds:
                tried = self.worker.verify(candidate, dtype, kind, number)
                if not tried.ok:
                    best = (tried, number)
                    return True
            return False

        for simpler in self.kinds[: self.kinds.index(kind)]:  # integers make the better counterexample
            failed_as, kind = kind, simpler
            if (simpler, dtype) in self.combinations() and fails(problem):
                break
            kind = failed_as
        smallest = shrink(problem, fails)
        found, number = best
        self.report.counterexample = Counterexample(
            smallest, dtype, kind, number, found.message, found.index, found.expected, found.got
        )
        self.report.reproduce = self.reproduce(smallest, dtype, kind, number)

    def reproduce(self, problem: Problem, dtype: str, kind: str, seed: int) -> str:
        """Return the shell line that runs one example again."""
        shipped = registry.kernels().get(self.kernel.name)
        path = self.kernel.path
        what = self.kernel.name if path is None or (shipped is not None and shipped.path == path) else str(path)
        sanitize = f" --sanitize {self.sanitize}" if self.sanitize else ""
        return (
            f"convt3d check {shlex.quote(what)} --backend {self.report.backend}{sanitize} "
            f"--problem {problem} --dtype {dtype} --kind {kind} --seed {seed}"
        )

    def judge_coverage(self) -> None:
        """Count the named classes; a class of which no known problem is allowed is not the check's to reach."""
        report = self.report
        report.features = dict(strategies.covered(self.problems))
        for name, holds in strategies.FEATURES.items():
            if name in report.features or report.counterexample is not None:
                continue
            known = [p for p in strategies.EDGE_PROBLEMS if holds(p)]
            refused = known and not self.allowed(known, holds)
            (report.not_applicable if refused else report.missing).append(name)


def _variants(problem: Problem) -> Iterator[Problem]:
    """Yield the problem, then the same with more channels in each group, for kernels that ask for multiples of a tile."""
    for factor in _CHANNEL_FACTORS:
        yield replace(problem, in_channels=problem.in_channels * factor, out_channels=problem.out_channels * factor)
