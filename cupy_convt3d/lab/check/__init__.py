"""`check`: is a kernel right for every combination of parameters, and if not, what is the smallest problem that shows it."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from ... import limits, registry
from ...backends.base import Backend
from ...backends.host import MOST_RACED, HostBackend, check_sanitizer
from ...dtypes import DTYPES
from ...errors import BackendError, CompileError, KernelError, ProblemError, shown
from ...kernel import Kernel
from ...limits import cores
from ...problem import Problem
from ...source import Instance
from .. import strategies
from ..progress import Progress
from ..run.far import (
    APART_LAYOUTS,
    FAR,
    apart_problem,
    apart_vectors,
    far_problems,
    largest_accepted,
    largest_tensor,
    takes_far_strides,
    unmet,
)
from ..run.verify import APART, LATE, Outcome, output_layout
from ..run.worker import InProcess, Worker
from ..tensors import KINDS, NARROW_KINDS, ONLY, SPECIAL_KINDS, SPOILT, WIDE
from .arguments import check_arguments
from .corners import corner_problems, one_way
from .examples import (
    CHANNELS_LAST_SEEDS,
    MOST_HOST_THREADS,
    Example,
    calls_atomics,
    combinations,
    configurations,
    deep,
    drawn_combinations,
    evaluated_otherwise,
    fitting,
    has_low_grid,
    host_threads,
    is_forced,
    largest_block,
    layouts,
    limit_grid,
    modes,
    reproduce,
    searched,
    spoilt_seed,
    tails,
    tiles,
    variants,
)  # fmt: skip
from .report import (
    CORNERS,
    DRAWN,
    FAR_PROBLEMS,
    FAR_STRIDES,
    FAR_WORKSPACES,
    KIND,
    NAMED,
    RACES,
    SEARCHED,
    SECOND_RUNS,
    TILES,
    CheckReport,
    Counterexample,
)
from .shrink import shrink_example

__all__ = ["CheckReport", "Counterexample", "check", "default_backend", "limit_grid", "other_gpu", "resolve"]


_MOST_SANITIZED_THREADS = 2**14  # of a tail; a sanitizer takes some 10 us for each
_MOST_TARGETED = 200  # drawn problems of which some are steps towards the largest error
_SEARCHED_DRAWN = 20  # problems of each configuration that `tune` may choose
_MOST_OF_WORKSPACE = 3  # far problems that are tried for a workspace or a launch
_QUICK, _QUICK_SHARE = "a quick check leaves them out", 12
_HOST_ALONE = "the host backend alone runs them: a GPU would compile a binary for each"
_SEEDS = st.builds(int.__add__, st.sampled_from((0, APART, LATE, LATE)), st.integers(0, APART - 2))  # of every kind of layout


Asked = Iterator[Callable[[], Outcome]]  # examples that run once they are taken, as `_Search.ask` returns them


class _Found(BaseException):
    """An example failed. Not an Exception, so that it leaves Hypothesis's engine at once, which would replay and shrink."""


def resolve(kernel: Kernel | str | Path) -> Kernel:
    """Return the kernel that is meant: one already, a path to FILE.cu, or a registered name.

    Raises:
        KernelError: there is none such, or the file's declaration is wrong.
    """
    if isinstance(kernel, Kernel):
        return kernel
    if not isinstance(kernel, (str, Path)):
        raise KernelError(f"kernel={shown(kernel)}: must be a Kernel, a registered name or the path of FILE.cu")
    if isinstance(kernel, Path) or str(kernel).endswith(".cu"):
        return Kernel.from_file(kernel)
    return registry.kernel(kernel)


def default_backend() -> str:
    """Return "cuda" where CuPy sees a GPU, else "host"."""
    from ...backends.cuda import available

    return "cuda" if available() else "host"


def other_gpu(kernel: Kernel, backend: str) -> str | None:
    """Return the sentence that says that a kernel is for other GPUs than this one; None where it is not, and on the host."""
    return kernel.why_not_on(_gpu().arch) if backend == "cuda" else None


def _gpu() -> Backend:
    from ...backends.cuda import CudaBackend

    return CudaBackend()


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
    problems: Sequence[Problem] = (),
    kinds: Sequence[str] | None = None,
    in_process: bool = False,
    sandbox: bool = False,
    quick: bool = False,
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
        time_limit_s: an example that takes longer is a hang; a large one gets more (`limits.time_limit_s`).
        problem: check only this one, with this seed.
        problems: check only these, with this seed.
        kinds: of `tensors.KINDS`, `tensors.SPECIAL_KINDS`, or "far" (tensors past 2^32 elements, host only); None: all.
        in_process: no child process, for tools that watch one (compute-sanitizer, ncu, a debugger); without `sanitize`.
        sandbox: take network, home directory and other processes away from the kernel, see docs/containment.md; host only.
        quick: of the problems of tiles and layouts a twelfth, another for the next seed, and none of corners or with values to search.

    Raises:
        KernelError, CompileError, BackendError: the kernel, its dtype or the backend cannot be had at all.
        KernelError, ProblemTypeError: an argument is of another type or out of range; said before anything runs.
    """
    check_arguments(problem, problems, dtypes, kinds, seed, time_limit_s, examples, in_process, sandbox, quick, progress)
    backend = default_backend() if backend is None else backend
    search = _Search(resolve(kernel), backend, dtypes, kinds, sanitize, progress, time_limit_s)
    search.only = (*problems, *([] if problem is None else [problem]))
    search.quick = quick
    search.share = slice(seed % _QUICK_SHARE, None, _QUICK_SHARE) if quick else slice(None)
    start = time.perf_counter()
    if FAR in (kinds or ()) and (search.report.backend != "host" or sanitize):
        where = f"sanitize={sanitize!r}" if sanitize else f"backend={search.report.backend!r}"
        raise BackendError(f"kind={FAR!r}, {where}: tensors past 2^32 elements are for the host backend, without a sanitizer")
    if in_process and (sanitize or sandbox):
        raise BackendError(f"sanitize={sanitize!r}, sandbox={sandbox}, in_process=True: these need a process of their own")
    name = search.report.backend
    own = InProcess(search.kernel, name) if in_process else Worker(search.kernel, name, sanitize, time_limit_s, sandboxed=sandbox)
    search.sandbox = sandbox
    with own as search.worker, search.opened, _compilers(1 if name == "host" else cores()) as search.compiler:
        search.precompile(sanitize, examples, seed, alone=len(search.only) == 1)
        try:
            search.search(examples, seed)
        except _Found:
            search.compiler.shutdown(wait=False, cancel_futures=True)
            search.minimize()
    if not search.only and search.pairs:
        search.judge_coverage()
    report = search.report
    report.passed = report.counterexample is None and not report.missing and report.examples > 0
    report.elapsed_s = time.perf_counter() - start
    return report


@contextlib.contextmanager
def _compilers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that compile; what they have not begun by the end, somebody has no use for."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


class _Foreseen:
    """In place of a worker: it runs nothing, and notes what a GPU compiles for the examples that are asked for.

    Attributes:
        instances: in the order of the examples.
    """

    backend, sanitizer, time_limit_s = "cuda", None, 0.0

    def __init__(self, kernel: Kernel, gpu: Backend) -> None:
        self.kernel, self.gpu, self.instances = kernel, gpu, dict[Instance, None]()

    def ask(self, problem: Problem, dtype: str, kind: str, seed: int) -> Callable[[], Outcome]:
        layout = output_layout(self.kernel, problem, dtype, kind, seed, self.gpu)
        plan = self.kernel.plan(problem, dtype, self.gpu.multiprocessors, layout)
        self.instances[self.gpu.instance(self.kernel, dtype, plan)] = None
        return lambda: Outcome(True)


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
    search = _Search(kernel, worker.backend, dtypes, kinds, worker.sanitizer, None, worker.time_limit_s)
    search.worker, worker.kernel = worker, kernel
    try:
        with search.opened, _compilers(1) as search.compiler:
            (search.run_random if drawn_only else search.run_all)(examples, 0)
    except _Found:
        return search.failure
    finally:
        worker.time_limit_s = search.time_limit_s
    return None


class _Search:
    """The state of one `check`."""

    worker: Worker | InProcess
    compiler: ThreadPoolExecutor

    def __init__(
        self,
        kernel: Kernel,
        backend: str,
        dtypes: Sequence[str] | None,
        kinds: Sequence[str] | None,
        sanitize: str | None,
        progress: Progress | None,
        time_limit_s: float = 10.0,
    ) -> None:
        check_sanitizer(sanitize)
        if not 0 < time_limit_s < float("inf"):
            raise KernelError(f"time_limit_s={shown(time_limit_s)}: must be a number of seconds above 0")
        if backend not in ("cuda", "host"):
            raise BackendError(f"backend={shown(backend)}: must be cuda or host")
        if sanitize is not None and backend != "host":
            raise BackendError(f"sanitize={sanitize!r}: only the host backend has sanitizers, not {backend}")
        for dtype in dtypes or ():
            if dtype not in kernel.dtypes:
                raise KernelError(f"{kernel.name} has no {dtype} instance (it has {', '.join(kernel.dtypes)})")
        if unknown := set(kinds or ()) - {*KINDS, *SPECIAL_KINDS, FAR}:
            raise KernelError(f"kind={sorted(unknown)[0]!r}: must be one of {', '.join((*KINDS, *SPECIAL_KINDS, FAR))}")
        self.kernel, self.sanitize, self.progress, self.time_limit_s = kernel, sanitize, progress, time_limit_s
        self.report = CheckReport(kernel.name, backend, tuple(dtypes or kernel.dtypes))
        self.kinds, self.far_asked = kinds or (*KINDS, *SPECIAL_KINDS, FAR), FAR in (kinds or ())
        self.pairs = combinations(self.report.dtypes, [kind for kind in self.kinds if kind != FAR])
        if "exact_wide" in self.kinds and not set(self.report.dtypes) & set(WIDE):
            self.report.leave_out(KIND, f"exact_wide: the sums of {', '.join(self.report.dtypes)} do not keep wide integers")
        for kind in set(kinds or ()) & (ONLY.keys() - {"exact_wide"}):
            if not set(self.report.dtypes) & set(ONLY[kind]):
                self.report.leave_out(KIND, f"{kind}: is for {' and '.join(ONLY[kind])}, not for {', '.join(self.report.dtypes)}")
        self.configurations = configurations(kernel, low_grid=True)
        self.problems: set[Problem] = set()
        self.only: tuple[Problem, ...] = ()
        self.total = 0
        self.failure: tuple[Example, Outcome] | None = None
        self.sandbox, self.opened = False, contextlib.ExitStack()
        self.quick, self.share = False, slice(None)  # which of the problems of tiles and layouts, all at first

    def precompile(self, sanitize: str | None, examples: int, seed: int, alone: bool) -> None:
        """Compile while the child is still importing; it then finds the binaries in the cache.

        For a GPU many problems have a binary of their own. All cores compile them in the order in which the search will ask for them, so
        far as that does not depend on results: half of the drawn ones. `alone`: one problem is checked, whose binary the child compiles.
        """
        if self.report.backend == "host":
            host = HostBackend(sanitize)
            for dtype in self.report.dtypes[:1]:  # the others wait: a wrong kernel seldom gets to them
                host.library(Instance(self.kernel, dtype))
            return
        if alone:
            return
        ahead = _Search(self.kernel, "cuda", self.report.dtypes, self.kinds, None, None)
        foreseen = _Foreseen(self.kernel, self.gpu)
        ahead.worker = foreseen  # type: ignore[assignment]  # it is asked, and has no process
        ahead.only, ahead.quick, ahead.share, ahead.configurations = self.only, self.quick, self.share, self.configurations
        ahead.search(examples, seed)
        if self.progress is not None:
            self.progress(0, 1, f"{self.kernel.name}: compiling for {len(foreseen.instances)} kinds of problems")
        for instance in foreseen.instances:
            self.compiler.submit(self.gpu.build, instance)  # where that fails the child says so, at its turn

    def search(self, examples: int, seed: int) -> None:
        """Run what is asked for.

        Raises:
            _Found: an example failed; `failure` has it.
        """
        if self.only:
            self.run_only(seed)
        else:
            self.run_all(examples, seed)

    def run(self, group: str, problem: Problem, dtype: str, kind: str, seed: int) -> Outcome:
        """Run one example of the worker's kernel and count it, in one of the report's groups.

        Raises:
            _Found: it failed; `failure` has it.
        """
        return self.ask(group, problem, dtype, kind, seed)()

    def ask(self, group: str, problem: Problem, dtype: str, kind: str, seed: int) -> Callable[[], Outcome]:
        """Have one example of the worker's kernel run, and return what waits for it and does the rest of `run`."""
        # A far example is left out after the limit itself: it may have more to do than the host can in any.
        self.worker.time_limit_s = self.time_limit_s if kind == FAR else limits.time_limit_s(problem, self.time_limit_s)
        outcome = self.worker.ask(problem, dtype, kind, seed)
        return partial(self.count, group, Example(self.worker.kernel, problem, dtype, kind, seed), outcome)

    def run_each(self, asked: Asked) -> None:
        """Wait for each example, once the next one was asked for."""
        waiting: list[Callable[[], Outcome]] = []
        for one in asked:
            waiting.append(one)
            if len(waiting) > 1:
                waiting.pop(0)()
        for one in waiting:
            one()

    def count(self, group: str, example: Example, wait: Callable[[], Outcome]) -> Outcome:
        problem, dtype, kind = example.problem, example.dtype, example.kind
        report, outcome = self.report, wait()
        if kind == FAR and outcome.message.startswith("hang"):
            outcome = Outcome(True, message=outcome.message.partition(";")[0])
        if outcome.ok and outcome.message:
            report.leave_out(group, outcome.message)
            return outcome
        self.problems.add(problem)
        report.examples, report.distinct_problems = report.examples + 1, len(self.problems)
        report.tried[group] = report.tried.get(group, 0) + 1
        if not outcome.ok:
            self.failure = (example, outcome)
            raise _Found
        if kind == "random":
            report.ratios.append(outcome.ratio)
            report.worst_ratio = max(report.worst_ratio, outcome.ratio)
        if self.sanitize == "thread":
            report.leave_out(SECOND_RUNS, "the thread sanitizer sees a race in any order of threads")
        if self.progress is not None:
            self.progress(report.examples, max(self.total, report.examples), f"{self.kernel.name} {dtype} {kind}")
        return outcome

    @cached_property
    def gpu(self) -> Backend:
        return _gpu()

    def gpu_refuses(self, kernel: Kernel, problem: Problem, dtype: str) -> bool:
        """Whether this GPU, if kernels run on one, is none that a kernel is for, or has too little shared memory for the problem."""
        return self.report.backend == "cuda" and self.gpu.why_not(kernel, problem, dtype) is not None

    def refusal(self, kernel: Kernel, problem: Problem, dtype: str) -> str | None:
        return self.gpu.why_not(kernel, problem, dtype) if self.report.backend == "cuda" else kernel.why_not(problem, dtype)

    def accepts(self, problem: Problem, dtype: str) -> bool:
        return self.refusal(self.kernel, problem, dtype) is None

    def refused(self, group: str, problem: Problem, dtype: str, kernel: Kernel | None = None) -> None:
        self.report.leave_out(group, self.refusal(kernel or self.kernel, problem, dtype) or "")

    def run_all(self, examples: int, seed: int) -> None:
        if self.pairs:
            self.run_each(self.edge_examples(examples))
            self.run_each(self.tail_examples(self.configurations[:1]))
            compiled = self.compile_searched() if examples else []
            self.run_each(self.corner_examples())
            self.run_each(self.tail_examples(self.configurations[1:]))
            self.run_each(self.searched_examples(compiled, seed))
        if FAR in self.kinds:
            self.run_far()
        if self.pairs:
            self.run_random(examples, seed)
            self.run_races()

    def run_only(self, seed: int) -> None:
        pairs = (*self.pairs, *((FAR, dtype) for dtype in self.report.dtypes if self.far_asked))
        self.total = len(self.only) * len(pairs)
        for problem, (kind, dtype) in product(self.only, pairs):
            group = FAR_PROBLEMS if kind == FAR else NAMED
            if self.accepts(problem, dtype):
                self.run(group, problem, dtype, kind, seed)
            else:
                self.refused(group, problem, dtype)

    def edges(self) -> list[Problem]:
        """Return the smallest problem of each class that the kernel can do, or the one nearest to it, whatever its classes."""
        fits = ((fitting(self.kernel, p, dtype), dtype) for p in strategies.EDGE_PROBLEMS for dtype in self.report.dtypes)
        chosen = dict.fromkeys(fit for fit, dtype in fits if fit is not None and not self.gpu_refuses(self.kernel, fit, dtype))
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

    def edge_examples(self, examples: int) -> Asked:
        edges, pairs = self.edges(), self.pairs
        for problem, dtype in product(strategies.EDGE_PROBLEMS, self.report.dtypes):
            if fitting(self.kernel, problem, dtype) is None:
                self.refused(NAMED, problem, dtype)
        self.total = len(edges) * len(pairs) + examples
        for kind, dtype in pairs:
            first = LATE if kind == "random" else 0  # there tensors begin anywhere, not on whole vectors
            for number, problem in enumerate(edges, first):
                if self.accepts(problem, dtype):
                    yield self.ask(NAMED, problem, dtype, kind, number)  # the seed draws the layout too: 0 is contiguous
                else:
                    self.refused(NAMED, problem, dtype)

    def tail_dtypes(self, configuration: Kernel) -> list[str]:
        """Return the dtypes in which a configuration gets its tails: of one that `check` forces one wide and one narrow type."""
        dtypes = self.report.dtypes
        return list(dict.fromkeys((dtypes[0], dtypes[-1]))) if is_forced(configuration) else list(dtypes)

    def tail_examples(self, configurations: Sequence[Kernel]) -> Asked:
        """Ask for each with all exact kinds; and once with one of what is not finite or does not stay so, the larger ones with nan and inf.

        These come in one of the dtypes that a problem is for each, the next problem's in the next dtype.
        """
        for configuration in configurations:
            self.worker.kernel = configuration
            asked = {dtype: self.tail_problems(configuration, dtype) for dtype in self.tail_dtypes(configuration)}
            dtypes_of: dict[Problem, dict[str, None]] = {}
            for dtype, problems in asked.items():
                for problem in problems:
                    dtypes_of.setdefault(problem, {})[dtype] = None
            numbers = {problem: number for number, problem in enumerate(dtypes_of)}
            for dtype, problems in asked.items():
                kinds = self.exact_kinds(dtype)[: 1 if is_forced(configuration) else None]
                special = [kind for kind, instance in self.pairs if instance == dtype and kind in SPECIAL_KINDS]
                for problem, (seeds, every) in problems.items():
                    for seed, kind in product(seeds, kinds):
                        yield self.ask(TILES, problem, dtype, kind, seed)
                    number, of = numbers[problem], list(dtypes_of[problem])
                    if every:
                        wanted = [kind for kind in special if kind != NARROW_KINDS[number % 2]]
                    else:
                        wanted = special[number // len(of) % max(1, len(special)) :][:1]
                    for turn, kind in enumerate(wanted, number):
                        if of[turn % len(of)] == dtype:
                            yield self.ask(TILES, problem, dtype, kind, spoilt_seed(seeds[0], turn))

    def tail_problems(self, configuration: Kernel, dtype: str) -> dict[Problem, tuple[list[int], bool]]:
        """Return problems at tails, larger and deep ones that can be run, with their seeds and whether they are the larger ones of all."""
        refused = partial(self.refused, TILES, dtype=dtype)
        tail = [(problem, number, math.inf) for number, problem in enumerate(tails(configuration, dtype, refused))]
        larger = [(problem, seed, MOST_HOST_THREADS) for problem, seed in layouts(configuration, dtype, refused)]
        whole, tail, larger = len(tail) + len(larger), tail[self.share], larger[self.share]
        if left := whole - len(tail) - len(larger):
            self.report.leave_out(TILES, _QUICK, left)
        lives = [(problem, seed, math.inf) for problem, seed in deep(configuration, dtype, refused)]
        found: dict[Problem, tuple[list[int], bool]] = {}
        for problem, seed, most in tail + larger + lives:
            if self.can_run(TILES, configuration, problem, dtype, most if self.sanitize is None else _MOST_SANITIZED_THREADS):
                every = most == MOST_HOST_THREADS and not is_forced(configuration)
                found.setdefault(problem, ([], every))[0].append(seed)
        return found

    def exact_kinds(self, dtype: str) -> list[str]:
        """Return the exact kinds of a dtype, or what else of `KINDS` is asked for."""
        kinds = [kind for kind, instance in self.pairs if instance == dtype and kind in KINDS]
        return [kind for kind in kinds if kind != "random"] or kinds

    def can_run(self, group: str, kernel: Kernel, problem: Problem, dtype: str, most: float = MOST_HOST_THREADS) -> bool:
        """Whether the GPU takes a problem that the kernel can do, or the host has threads for it; where not, that is counted."""
        if self.gpu_refuses(kernel, problem, dtype):
            self.refused(group, problem, dtype, kernel)
            return False
        if self.worker.backend == "host" and host_threads(kernel, problem, dtype) > most:
            self.report.leave_out(group, f"more than {most} threads, too many for the host")
            return False
        if self.sanitize == "thread" and largest_block(kernel, problem, dtype) > MOST_RACED:
            self.report.leave_out(group, f"blocks of more than {MOST_RACED} threads, too many for the thread sanitizer")
            return False
        return True

    @cached_property
    def corners(self) -> list[Problem]:
        """Return what the declaration does and the other known problems do not, in the first dtype."""
        dtype = self.report.dtypes[0]
        known = [*self.edges(), *tails(self.kernel, dtype), *(problem for problem, _ in layouts(self.kernel, dtype))]
        return corner_problems(self.kernel, dtype, known)

    def corner_examples(self) -> Asked:
        """Ask for the problems at corners in the first dtype, with the first kind."""
        if self.worker.backend != "host":
            self.report.leave_out(CORNERS, _HOST_ALONE)
            return
        if self.quick:
            self.report.leave_out(CORNERS, _QUICK)
            return
        self.worker.kernel, dtype = self.kernel, self.report.dtypes[0]
        kinds = [kind for kind, instance in self.pairs if instance == dtype and kind in KINDS]
        corners = self.corners if kinds else []
        if kinds:
            self.report.one_way = one_way(self.kernel, dtype)  # of what the search for corners has looked at
        for number, problem in enumerate(corners):
            yield self.ask(CORNERS, problem, dtype, kinds[0], number if number % 3 == 2 else 0)  # every third in some other layout

    def compile_searched(self) -> list[tuple[Instance, Future[Path]]]:
        """Begin to compile the values that `tune` may choose, the smallest in the first dtype, the largest in the last.

        Behind these come both in each dtype whose numbers in the declaration neither has.
        """
        configurations, dtypes = searched(self.kernel), self.report.dtypes
        if configurations and self.quick:
            self.report.leave_out(SEARCHED, _QUICK)
            return []
        if configurations and self.worker.backend != "host":
            self.report.leave_out(SEARCHED, _HOST_ALONE)
            return []
        ends = (dtypes[0], dtypes[-1])
        more = product(configurations, evaluated_otherwise(self.kernel, dtypes, ends[: len(configurations)]))
        instances = [*map(Instance, configurations, ends), *(Instance(one, dtype) for one, dtype in more)]
        return [(one, self.compiler.submit(HostBackend(self.sanitize).library, one)) for one in instances]

    def searched_examples(self, compiled: Iterable[tuple[Instance, Future[Path]]], seed: int) -> Asked:
        """Ask for problems of modes, half of those at corners, and some that are drawn, with values that `tune` may choose.

        In further dtypes there are those of modes alone, each once.
        """
        whole = len(searched(self.kernel))
        for place, (instance, library) in enumerate(compiled):
            configuration, dtype = instance.kernel, instance.dtype
            kinds = self.exact_kinds(dtype)[:1]
            try:
                library.result()
            except CompileError as error:  # `tune` leaves such values out too
                values = ", ".join(f"{name}={value}" for name, value in configuration.changed_tunables.items())
                self.report.leave_out(SEARCHED, f"{values}: {str(error).splitlines()[0]}")
                continue
            self.worker.kernel = configuration
            asked, spoilt = modes(configuration, dtype), list[str]()
            if place < whole:
                spoilt = [kind for kind, instance in self.pairs if instance == dtype and kind in SPOILT]
                asked += [(problem, 0) for problem in self.corners[place::2]]
                asked += self.searched_drawn(configuration, dtype, seed)
            for turn, (problem, number) in enumerate(asked if kinds else ()):
                fit = fitting(configuration, problem, dtype)
                if fit is None:
                    self.refused(SEARCHED, problem, dtype, configuration)
                elif self.can_run(SEARCHED, configuration, fit, dtype):
                    yield self.ask(SEARCHED, fit, dtype, kinds[0], number)
                    if spoilt and turn % 2 == 0:
                        yield self.ask(SEARCHED, fit, dtype, spoilt[turn // 2 % len(spoilt)], spoilt_seed(number, turn))

    def searched_drawn(self, configuration: Kernel, dtype: str, seed: int) -> list[tuple[Problem, int]]:
        """Return problems that are drawn, each with two seeds: one for a layout of each tensor, and one for channels_last ones."""
        generator, found = random.Random(seed), list[tuple[Problem, int]]()
        for _ in range(3 * _SEARCHED_DRAWN):
            problem = strategies.draw_problem(generator.randint, self.kernel.pass_name, tiles=tiles(configuration))
            fit = fitting(configuration, problem, dtype)
            if fit is None:
                self.refused(SEARCHED, problem, dtype, configuration)
            elif len(found) < 2 * _SEARCHED_DRAWN:
                number = len(found) // 2
                found += [(fit, number), (fit, CHANNELS_LAST_SEEDS[number % len(CHANNELS_LAST_SEEDS)])]
        return found

    def run_far(self) -> None:
        """Run tensors past 2^31 elements in their last blocks, and with strides past 2^32, in the smallest of the dtypes."""
        if self.worker.backend != "host" or self.sanitize is not None:
            where = "a sanitizer has no room for them" if self.sanitize else "the host backend alone has memory for them (--backend host)"
            self.report.leave_out(FAR_PROBLEMS, where)
            return
        self.worker.kernel, dtype = self.kernel, min(self.report.dtypes, key=lambda name: DTYPES[name].itemsize)
        known, ran = far_problems(self.kernel.pass_name), list[Problem]()
        for problem in known:
            accepted = self.far_fit(problem, dtype)
            if accepted is None:
                self.refused(FAR_PROBLEMS, problem, dtype)
                continue
            outcome = self.run(FAR_PROBLEMS, accepted, dtype, FAR, 0)
            ran += [] if outcome.message else [accepted]
            if outcome.message.startswith("hang"):
                self.report.leave_out(FAR_PROBLEMS, "not begun, since the one before did not end")
                break
        else:
            self.run_far_workspaces(dtype, ran, known)
        for apart in (apart_problem(), apart_vectors()) if takes_far_strides(self.kernel) else ():
            fit = fitting(self.kernel, apart, dtype)
            if fit is None:
                self.refused(FAR_STRIDES, apart, dtype)
                continue
            for seed in range(APART_LAYOUTS):
                self.run(FAR_STRIDES, fit, dtype, FAR, seed)

    def run_far_workspaces(self, dtype: str, ran: list[Problem], known: list[Problem]) -> None:
        """Run a few further far problems for large workspaces, and for launches, that those which ran did not have."""
        fits = [fit for problem in known if (fit := self.far_fit(problem, dtype)) is not None]
        for what, problems in unmet(self.kernel, dtype, ran, list(dict.fromkeys((*fits, *known)))).items():
            if not problems:
                self.report.leave_out(FAR_WORKSPACES, f"none was found for which {what}")
            for problem in problems[:_MOST_OF_WORKSPACE]:
                message = self.run(FAR_WORKSPACES, problem, dtype, FAR, 0).message  # why it says nothing; `run` has told it
                if message.startswith("hang"):
                    self.report.leave_out(FAR_WORKSPACES, "not begun, since the one before did not end")
                    return
                if not message:
                    break

    def far_fit(self, problem: Problem, dtype: str) -> Problem | None:
        """Return a far problem, or the first variant of it, that the kernel can do."""
        patch = replace(problem, stride=problem.kernel_size)
        pairs = (1, max(1, math.prod(problem.kernel_size) // 2), 2)
        shapes = (problem, patch, replace(problem, kernel_size=pairs, stride=pairs))
        for near in shapes:
            if self.accepts(near, dtype):
                return near
        for near in shapes:
            if (largest := largest_accepted(near, partial(self.accepts, dtype=dtype))) is not None:
                return largest
        with contextlib.suppress(ProblemError):  # with more channels it would have more than 2^31 of them
            fit = fitting(self.kernel, problem, dtype)
            return fit if fit is not None and largest_tensor(fit) >= 2**31 else None
        return None

    def run_races(self) -> None:
        """Run the named problems under the thread sanitizer too, where threads may add to one output in any order.

        That is where the declaration says so, or the source calls atomic functions. On one core threads take turns, so an addition that is
        not atomic loses none there.
        """
        adds = not self.kernel.deterministic or calls_atomics(self.kernel)
        if not adds or self.sanitize is not None or not isinstance(self.worker, Worker):
            return
        if self.worker.backend != "host":
            self.report.leave_out(RACES, "the host backend alone has a thread sanitizer (--backend host)")
            return
        kinds = [kind for kind, _ in self.pairs if kind in KINDS]
        try:
            raced = Worker(self.kernel, "host", "thread", self.time_limit_s, sandboxed=self.sandbox)
        except BackendError as error:
            self.report.leave_out(RACES, str(error))
            return
        judged, self.worker = self.worker, self.opened.enter_context(raced)
        for problem, dtype in product(self.edges(), self.report.dtypes[:1]):
            if kinds and self.can_run(RACES, self.kernel, problem, dtype, _MOST_SANITIZED_THREADS) and self.accepts(problem, dtype):
                self.run(RACES, problem, dtype, kinds[0], 0)
        self.worker = judged

    def known(self) -> list[Problem]:
        """Return the problems that a share of the drawn ones is near to: those of modes, tails and corners."""
        dtype = self.report.dtypes[0]
        corners = self.corners if self.worker.backend == "host" else []
        larger = [problem for problem, _ in layouts(self.kernel, dtype)]
        return list(dict.fromkeys((*larger, *tails(self.kernel, dtype), *corners)))

    def run_random(self, examples: int, seed: int) -> None:
        if examples == 0:
            return
        ran = 0

        def example(configuration: Kernel, data: st.DataObject, pair: tuple[str, str], number: int) -> None:
            nonlocal ran
            problem = data.draw(drawn[configuration])
            kind, dtype = pair
            fitting_problem = fitting(configuration, problem, dtype)
            if fitting_problem is None:
                self.refused(DRAWN, problem, dtype, configuration)
                hypothesis.reject()
            if not self.can_run(DRAWN, configuration, fitting_problem, dtype):
                hypothesis.reject()
            self.worker.kernel, ran = configuration, ran + 1
            outcome = self.run(DRAWN, fitting_problem, dtype, kind, number)
            if kind == "random":
                hypothesis.target(min(outcome.ratio, 1e6), label="error / bound")

        known = self.known()
        drawn = {}
        for kernel in self.configurations:
            even = strategies.problems(kernel.pass_name, tiles=tiles(kernel))
            near = [strategies.neighbours(known, kernel.pass_name)] if known else []
            drawn[kernel] = st.one_of(*[even] * 4, *near)
        given = hypothesis.given(
            st.sampled_from(self.configurations), st.data(), st.sampled_from(drawn_combinations(self.pairs)), _SEEDS
        )
        # Steps towards the largest error end in what has been tried, and of many examples nearly all would be: the rest is drawn without.
        for again, phases in enumerate(((Phase.generate, Phase.target), (Phase.generate,))):
            if ran < examples and (ran or not again):
                settings = hypothesis.settings(
                    max_examples=examples - ran if again else min(examples, _MOST_TARGETED),
                    database=None,
                    derandomize=False,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                    phases=phases,
                )
                with contextlib.suppress(Unsatisfiable):  # the kernel refuses all that is drawn; `untried` says why
                    hypothesis.seed(f"{seed} again" if again else seed)(settings(given(example)))()
        if 0 < ran < examples:
            self.report.leave_out(DRAWN, "there was no other to draw, or the kernel refuses nearly all", examples - ran)

    def minimize(self) -> None:
        """Replace the failure by the smallest one near it."""
        assert self.failure is not None
        example = self.failure[0]
        if self.progress is not None:
            self.progress(self.report.examples, max(self.total, 1), f"{self.kernel.name}: shrinking {example.problem}")
        smallest, found = shrink_example(self.worker, example, self.failure[1], self.pairs)
        if has_low_grid(smallest.kernel):
            found.message += "; where the grid has no more blocks than 2: one that a number cuts must be gone over again and again"
        self.report.counterexample = Counterexample(
            smallest.problem, smallest.dtype, smallest.kind, smallest.seed, found.message, found.index, found.expected, found.got,
            tuple(smallest.kernel.changed_tunables.items()),
        )  # fmt: skip
        self.report.reproduce = reproduce(smallest, self.report.backend, self.worker.sanitizer)

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
