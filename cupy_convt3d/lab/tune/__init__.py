"""`convt3d tune`: the quickest configuration of each kernel for each problem, into the tuning database.

docs/benchmarking.md says why this is not kernel-tuner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from ...choice import asked_of_kernels, instance_for
from ...dtypes import DTYPES
from ...kernel import Kernel
from ...problem import Problem
from ...source import code_digest
from ...tuning import LIBRARY, SHIPPED, Database, Entry, Question, configured
from ..bench.contest import Contest
from ..bench.measure import Bench, Row

EXHAUSTIVE = 40  # a space of more configurations is searched one tunable at a time
HOPELESS = 3.0  # a kernel whose default takes this many times the best one's time is not searched further


def tune(
    bench: Bench,
    problems: Mapping[str, Problem],
    kernels: Mapping[str, Kernel],
    path: Path,
    *,
    passes: Sequence[str] = ("fprop",),
    precisions: Sequence[str] = ("fp32",),
    layouts: Sequence[str] = ("ncdhw",),
    again: bool = False,
    known_only: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    tell: Callable[[str], None] = print,
) -> Database:
    """Search every kernel that can do a problem, and write the best configuration of each into the database at `path`.

    A search begins at the best of the kernel's default and what this database and the shipped one have for the same problem, on
    any device, in any layout and in element types of the same size, of older code too. On a GPU the bench's first rival, torch's own
    operator, is timed beside the kernels and written down too. Configurations that spread NaN are not timed: "auto" never takes them.

    After every problem what was found goes into the file, beside what other runs have put there meanwhile. What it already holds of a
    kernel whose code has not changed is not searched again: a run that was cut off goes on where it ended.

    Args:
        bench: measures; its `budget_ms` is what one configuration may take.
        problems: by name.
        kernels: the candidates, of any pass.
        path: of the database.
        passes, precisions, layouts: what the problems are tuned for, in every combination.
        again: search what the database has, too.
        known_only: time those beginnings, and search nothing.
        progress: called with (problems done, problems in all, what is being done).
        tell: gets a line for each kernel and problem.

    Raises:
        DataError: the file at `path` is damaged; it is left as it is.
    """
    database = Database.read(path)
    shipped = Database.load(SHIPPED).entries()
    device = bench.backend.device_name
    work = [
        (Question(device, pass_name, precision, layout), name, asked_of_kernels(problem, pass_name))
        for precision in precisions
        for pass_name in passes
        for layout in layouts
        for name, problem in problems.items()
    ]
    for number, (question, name, problem) in enumerate(work):
        text = f"{name} {question.pass_name} {question.precision} {question.layout}"
        if progress is not None:
            progress(number, len(work), text)
        own = [kernel for kernel in kernels.values() if kernel.pass_name == question.pass_name]
        known = (*shipped, *database.entries())
        here = [entry for entry in known if (entry.pass_name, entry.problem) == (question.pass_name, str(problem))]
        found = _tune_problem(bench, question, name, problem, own, database, here, again, known_only)
        for entry, line in found:
            tell(f"{text}: {line}")
            if entry is not None:
                database.record(entry)
        if found:
            database.merge(path)
    return database


def _tune_problem(
    bench: Bench,
    question: Question,
    name: str,
    problem: Problem,
    kernels: Sequence[Kernel],
    database: Database,
    known: Sequence[Entry],
    again: bool,
    known_only: bool,
) -> list[tuple[Entry | None, str]]:
    """Return each kernel's entry, None where it has none, and a line that says what was found."""
    have = {kernel.name: database.find(question, problem, kernel) for kernel in kernels}
    waiting = []
    for kernel in kernels:
        instance, _ = instance_for(kernel, problem, question.precision, bench.backend)
        if instance is not None and kernel.why_spreads_nan(problem, instance) is None and (again or have[kernel.name] is None):
            waiting.append((kernel, instance))
    if not waiting:
        return []
    contest = Contest(bench, name, problem, question.pass_name, question.precision, None, question.layout)
    found: list[tuple[Entry | None, str]] = []
    if bench.against and bench.backend.name == "cuda":
        rival_ms = contest.rival(bench.against[0]).median_ms
        if rival_ms is not None:
            key = (*question[:2], str(problem), *question[2:], LIBRARY, "", question.precision)
            found.append((Entry(*key, {}, rival_ms, rival_ms), f"{LIBRARY} {rival_ms:.4g} ms"))
    searches = [_Search(contest, kernel, instance, _beginnings(kernel, instance, known)) for kernel, instance in waiting]
    bench.build((candidate, problem, search.instance, question.layout) for search in searches for candidate in search.able)
    for search in searches:
        search.time()
    best_ms = min([search.best_ms for search in searches] + [entry.median_ms for entry in have.values() if entry is not None])
    for search in sorted(searches, key=lambda search: search.best_ms):
        kernel, instance = search.kernel, search.instance
        if search.best_ms <= HOPELESS * best_ms and not known_only:
            search.run()
            best_ms = min(best_ms, search.best_ms)
        row = search.rows[search.best]
        if row.median_ms is None or row.with_packing_ms is None or row.wrong:
            found.append((None, f"{kernel.name} left out: {row.note or 'a wrong result'}"))
            continue
        searched = {name: value for name, value in search.best.tunables.items() if name in kernel.search}
        values = ", ".join(f"{name}={value}" for name, value in searched.items()) or "no tunables"
        default_ms = _ms(search.rows[_with(kernel, {})])
        line = f"{kernel.name} [{instance}] {row.median_ms:.4g} ms ({len(search.rows)} tried; default {default_ms:.4g} ms): {values}"
        key = (*question[:2], str(problem), *question[2:], kernel.name, code_digest(kernel), instance)
        found.append((Entry(*key, searched, row.median_ms, row.with_packing_ms), line))
    return found


def _with(kernel: Kernel, values: Mapping[str, int]) -> Kernel:
    """Return the kernel with these values, the same object each time."""
    return configured(kernel, tuple(sorted({**kernel.tunables, **values}.items())))


def _beginnings(kernel: Kernel, instance: str, known: Sequence[Entry]) -> list[Kernel]:
    """Return the kernel, and its configurations among the entries as far as they are values that it lists still."""
    found = [_with(kernel, {})]
    for entry in known:
        if entry.kernel == kernel.name and DTYPES[entry.instance].itemsize == DTYPES[instance].itemsize:
            values = {name: value for name, value in entry.tunables.items() if value in kernel.search.get(name, ())}
            found.append(_with(kernel, values))
    return list(dict.fromkeys(found))


class _Search:
    """One kernel's configurations for one problem: those that were timed, and those to be timed next (`able`)."""

    def __init__(self, contest: Contest, kernel: Kernel, instance: str, beginnings: Sequence[Kernel]) -> None:
        self.contest, self.kernel, self.instance = contest, kernel, instance
        self.rows: dict[Kernel, Row] = {}
        self.best = kernel
        self.propose(beginnings)

    @property
    def best_ms(self) -> float:
        return _ms(self.rows[self.best]) if self.best in self.rows else math.inf

    def propose(self, candidates: Sequence[Kernel]) -> None:
        backend, problem, instance = self.contest.bench.backend, self.contest.problem, self.instance
        self.able = [
            c
            for c in candidates
            if c not in self.rows and backend.why_not(c, problem, instance) is None and c.why_spreads_nan(problem, instance) is None
        ]

    def time(self) -> bool:
        """Time what was proposed and is compiled; return whether it has the best configuration."""
        before = self.best
        for candidate in self.able:
            self.rows[candidate] = self.contest.kernel(candidate, self.instance)
            self.best = min(self.rows, key=lambda c: _ms(self.rows[c]))
        return self.best is not before

    def run(self) -> None:
        """Search from the best configuration on."""
        rounds = _rounds(self.kernel)
        values = next(rounds, None)
        while values is not None:
            self.propose([_with(self.kernel, {**self.best.tunables, **v}) for v in values])
            contest = self.contest
            contest.bench.build((candidate, contest.problem, self.instance, contest.layout) for candidate in self.able)
            try:
                values = rounds.send(self.time())
            except StopIteration:
                break


def _rounds(kernel: Kernel) -> Generator[list[dict[str, int]], bool, None]:
    """Yield what to change in the best configuration, a list to be tried at a time; told each time whether one was better.

    A small space is one list. A large one goes tunable by tunable until a whole turn has brought nothing.
    """
    space = kernel.search
    if math.prod(map(len, space.values())) <= EXHAUSTIVE:
        yield [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]
        return
    since = 0
    for name in itertools.cycle(space):
        if since >= len(space):
            return
        better = yield [{name: value} for value in space[name]]
        since = 0 if better else since + 1


def _ms(row: Row) -> float:
    return math.inf if row.median_ms is None or row.wrong else row.median_ms
