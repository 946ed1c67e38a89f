"""`check`: is a kernel right for every combination of parameters, and if not, what is the smallest problem that shows it."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from .. import registry
from ..dtypes import DTYPES
from ..errors import BackendError, KernelError
from ..kernel import Kernel
from ..problem import Problem
from ..source import Instance
from . import strategies
from .check_report import CheckReport, Counterexample
from .examples import Example, combinations, configurations, fitting, is_forced, layouts, reproduce, tails, tiles, variants
from .far import APART_LAYOUTS, FAR, apart_problem, apart_vectors, far_problems
from .shrink import shrink_example
from .tensors import KINDS, NAN
from .verify import Outcome
from .worker import InProcess, Worker

__all__ = ["CheckReport", "Counterexample", "check", "default_backend", "resolve"]

Progress = Callable[[int, int, str], None]

_MOST_SANITIZED_THREADS = 2**14  # of a tail; a sanitizer takes some 10 us for each
_MOST_HOST_THREADS = 2**16  # of a larger problem: a wgrad kernel has a block for each weight


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
        kinds: of `tensors.KINDS`, or "nan"; None: all of the former.
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
        search.precompile(sanitize, alone=problem is not None)
        try:
            if problem is not None:
                search.run_one(problem, seed)
            else:
                search.run_all(examples, seed)
        except _Found:
            search.minimize()
    if problem is None:
        search.judge_coverage()
    report = search.report
    report.passed = report.counterexample is None and not report.missing and report.examples > 0
    report.elapsed_s = time.perf_counter() - start
    return report


def first_failure(
    worker: Worker,
    kernel: Kernel,
    *,
    examples: int = 200,
    dtypes: Sequence[str] | None = None,
    kinds: Sequence[str] | None = None,
    drawn_only: bool = False,
) -> tuple[Example, Outcome] | None:
    """Return the first example that fails in the same search as `check`'s, not shrunk, or None.

    `drawn_only` leaves out all but the `examples` that are drawn at random.

    Raises:
        KernelError, CompileError, BackendError: as `check`.
    """
    search = _Search(kernel, worker.backend, dtypes, kinds, worker.sanitizer, None)
    search.worker, worker.kernel = worker, kernel
    try:
        (search.run_random if drawn_only else search.run_all)(examples, 0)
    except _Found:
        return search.failure
    return None


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
        if unknown := set(kinds or ()) - {*KINDS, NAN, FAR}:
            raise KernelError(f"kind={sorted(unknown)[0]!r}: must be one of {', '.join(KINDS)}, {NAN}, {FAR}")
        self.kernel, self.sanitize, self.progress = kernel, sanitize, progress
        self.report = CheckReport(kernel.name, backend, tuple(dtypes or kernel.dtypes))
        self.pairs = combinations(self.report.dtypes, kinds or KINDS)
        self.configurations = configurations(kernel)
        self.problems: set[Problem] = set()
        self.skipped: Counter[str] = Counter()
        self.total = 0
        self.failure: tuple[Example, Outcome] | None = None

    def precompile(self, sanitize: str | None, alone: bool) -> None:
        """Compile while the child is still importing; it then finds the binaries in the cache.

        For a GPU many problems have a binary of their own: those of the problems that are known beforehand, on all cores. `alone`: one
        problem is checked, whose binary the child compiles.
        """
        if self.report.backend == "host":
            from ..backends.host import HostBackend

            host = HostBackend(sanitize)
            for dtype in self.report.dtypes[:1]:  # the others wait: a wrong kernel seldom gets to them
                host.library(Instance(self.kernel, dtype))
            return
        if alone:
            return
        from ..backends.cuda import CudaBackend

        backend = CudaBackend()

        def build(instance: Instance) -> None:
            with contextlib.suppress(BackendError):  # the child says so, at its turn
                backend.build(instance)

        instances = dict.fromkeys(
            backend.instance(kernel, dtype, kernel.plan(problem, dtype, backend.multiprocessors))
            for kernel, problem, dtype in self.known_problems()
            if backend.why_not(kernel, problem, dtype) is None
        )
        if self.progress is not None:
            self.progress(0, 1, f"{self.kernel.name}: compiling for {len(instances)} kinds of problems")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(build, instances))

    def known_problems(self) -> Iterator[tuple[Kernel, Problem, str]]:
        """Yield what `run_edges` and `run_tails` will run: kernel, problem, dtype."""
        edges = self.edges()
        for dtype in self.report.dtypes:
            for problem in edges:
                yield self.kernel, problem, dtype
        for configuration in self.configurations:
            for dtype in self.tail_dtypes(configuration):
                for problem in (*tails(configuration, dtype), *(problem for problem, _ in layouts(configuration, dtype))):
                    yield configuration, problem, dtype

    def run(self, problem: Problem, dtype: str, kind: str, seed: int) -> Outcome:
        """Run one example of the worker's kernel and count it.

        Raises:
            _Found: it failed; `failure` has it.
        """
        outcome = self.worker.verify(problem, dtype, kind, seed)
        self.problems.add(problem)
        report = self.report
        report.examples, report.distinct_problems = report.examples + 1, len(self.problems)
        if not outcome.ok:
            self.failure = (Example(self.worker.kernel, problem, dtype, kind, seed), outcome)
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

    def run_all(self, examples: int, seed: int) -> None:
        self.run_edges(examples)
        self.run_tails()
        self.run_far()
        self.run_random(examples, seed)

    def run_one(self, problem: Problem, seed: int) -> None:
        for kind, dtype in self.pairs:
            if self.accepts(problem, dtype):
                self.run(problem, dtype, kind, seed)
            else:
                self.skip(problem, dtype)

    def edges(self) -> list[Problem]:
        """Return the smallest problem of each class that the kernel can do, or the one nearest to it, whatever its classes."""
        fits = (fitting(self.kernel, p, dtype) for p in strategies.EDGE_PROBLEMS for dtype in self.report.dtypes)
        chosen = dict.fromkeys(fit for fit in fits if fit is not None)
        for holds in strategies.FEATURES.values():
            if not any(map(holds, chosen)):
                chosen.update(dict.fromkeys(self.allowed(filter(holds, strategies.EDGE_PROBLEMS), holds)))
        return list(chosen)

    def allowed(self, problems: Iterable[Problem], holds: Callable[[Problem], bool]) -> list[Problem]:
        """Return the first of the problems and their variants that the kernel can do, or nothing."""
        for problem in problems:
            for candidate in filter(holds, variants(problem)):
                if any(self.accepts(candidate, dtype) for dtype in self.report.dtypes):
                    return [candidate]
        return []

    def run_edges(self, examples: int) -> None:
        edges, pairs = self.edges(), self.pairs
        self.total = len(edges) * len(pairs) + examples
        for kind, dtype in pairs:
            for number, problem in enumerate(edges):
                if self.accepts(problem, dtype):
                    self.run(problem, dtype, kind, number)  # the seed draws the layout too: 0 is contiguous
                else:
                    self.skip(problem, dtype)

    def tail_dtypes(self, configuration: Kernel) -> list[str]:
        """Return the dtypes in which a configuration gets its tails: of one that `check` forces one wide and one narrow type."""
        some = (self.kernel.dtypes[0], self.kernel.dtypes[-1])
        return [dtype for dtype in self.report.dtypes if not is_forced(configuration) or dtype in some]

    def run_tails(self) -> None:
        for configuration in self.configurations:
            self.worker.kernel = configuration
            for dtype in self.tail_dtypes(configuration):
                kinds = [kind for kind, instance in self.pairs if instance == dtype and kind != "random"] or [self.pairs[0][0]]
                kinds = kinds[:1] if is_forced(configuration) else kinds
                tail = [(problem, number, math.inf) for number, problem in enumerate(tails(configuration, dtype))]
                larger = [(problem, seed, _MOST_HOST_THREADS) for problem, seed in layouts(configuration, dtype)]
                for problem, seed, most in tail + larger:
                    threads = sum(math.prod(n.grid) * math.prod(n.block) for n in configuration.plan(problem, dtype).launches)
                    most = most if self.sanitize is None else _MOST_SANITIZED_THREADS
                    for kind in kinds if self.worker.backend != "host" or threads <= most else ():
                        self.run(problem, dtype, kind, seed)

    def run_far(self) -> None:
        """Run tensors past 2^31 elements, and with strides past 2^32, in the smallest of the dtypes.

        The former run in their last blocks alone, so not where a block stays and computes what falls to it.
        """
        if self.worker.backend != "host" or self.sanitize is not None:
            return
        self.worker.kernel, dtype = self.kernel, min(self.report.dtypes, key=lambda name: DTYPES[name].itemsize)
        for problem in () if self.kernel.is_persistent else far_problems(self.kernel.pass_name):
            patch = replace(problem, stride=problem.kernel_size)
            pairs = (1, max(1, math.prod(problem.kernel_size) // 2), 2)
            near = (problem, patch, replace(problem, kernel_size=pairs, stride=pairs))
            if (accepted := next((one for one in near if self.accepts(one, dtype)), None)) is not None:
                message = self.run(accepted, dtype, FAR, 0).message
                self.skipped.update([message] if message else [])
        fits = [fitting(self.kernel, problem, dtype) for problem in (apart_problem(), apart_vectors())]
        for apart in filter(None, fits):
            for seed in range(APART_LAYOUTS):
                message = self.run(apart, dtype, FAR, seed).message
                self.skipped.update([message] if message else [])
        self.report.skipped = dict(self.skipped)

    def run_random(self, examples: int, seed: int) -> None:
        if examples == 0:
            return

        def example(configuration: Kernel, data: st.DataObject, pair: tuple[str, str], number: int) -> None:
            problem = data.draw(drawn[configuration])
            kind, dtype = pair
            fitting_problem = fitting(configuration, problem, dtype)
            if fitting_problem is None:
                self.skip(problem, dtype)
                hypothesis.reject()
            self.worker.kernel = configuration
            outcome = self.run(fitting_problem, dtype, kind, number)
            if kind == "random":
                hypothesis.target(min(outcome.ratio, 1e6), label="error / bound")

        drawn = {kernel: strategies.problems(kernel.pass_name, tiles=tiles(kernel)) for kernel in self.configurations}
        given = hypothesis.given(
            st.sampled_from(self.configurations), st.data(), st.sampled_from(self.pairs), st.integers(0, 2**16)
        )(example)
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
        example = self.failure[0]
        if self.progress is not None:
            self.progress(self.report.examples, max(self.total, 1), f"{self.kernel.name}: shrinking {example.problem}")
        smallest, found = shrink_example(self.worker, example, self.failure[1], self.pairs)
        self.report.counterexample = Counterexample(
            smallest.problem, smallest.dtype, smallest.kind, smallest.seed, found.message, found.index, found.expected, found.got,
            tuple(smallest.kernel.changed_tunables.items()),
        )  # fmt: skip
        self.report.reproduce = reproduce(smallest, self.report.backend, self.sanitize)

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
