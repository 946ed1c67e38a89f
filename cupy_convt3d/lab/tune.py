"""`convt3d tune`: the quickest configuration of each kernel for each problem, into the tuning database.

docs/benchmarking.md says why this is not kernel-tuner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from ..choice import instance_for
from ..kernel import Kernel
from ..problem import Problem
from ..source import code_digest
from ..tuning import LIBRARY, Database, Entry, Question, configured
from .contest import Contest
from .measure import Bench, Row

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
    progress: Callable[[int, int, str], None] | None = None,
    tell: Callable[[str], None] = print,
) -> Database:
    """Search every kernel that can do a problem, and write the best configuration of each into the database at `path`.

    On a GPU the bench's first rival, torch's own operator, is timed beside them and written down too.

    The file is written after every problem, and what it already holds of a kernel whose code has not changed is not searched again:
    a run that was cut off goes on where it ended.

    Args:
        bench: measures; its `budget_ms` is what one configuration may take.
        problems: by name.
        kernels: the candidates, of any pass.
        path: of the database.
        passes, precisions, layouts: what the problems are tuned for, in every combination.
        again: search what the database has, too.
        progress: called with (problems done, problems in all, what is being done).
        tell: gets a line for each kernel and problem.
    """
    database = Database.load(path)
    device = bench.backend.device_name
    work = [
        (Question(device, pass_name, precision, layout), name, problem)
        for precision in precisions
        for pass_name in passes
        for layout in layouts
        for name, problem in problems.items()
    ]
    for number, (question, name, problem) in enumerate(work):
        text = f"{name} {question.pass_name} {question.precision} {question.layout}"
        if progress is not None:
            progress(number, len(work), text)
        found = _tune_problem(bench, question, name, problem, kernels, database, again)
        for entry, line in found:
            tell(f"{text}: {line}")
            if entry is not None:
                database.record(entry)
        if found:
            database.save(path)
    return database


def _tune_problem(
    bench: Bench,
    question: Question,
    name: str,
    problem: Problem,
    kernels: Mapping[str, Kernel],
    database: Database,
    again: bool,
) -> list[tuple[Entry | None, str]]:
    """Return each kernel's entry, None where it has none, and a line that says what was found."""
    own = [kernel for kernel in kernels.values() if kernel.pass_name == question.pass_name]
    known = {kernel.name: database.find(question, problem, kernel) for kernel in own}
    waiting = []
    for kernel in own:
        instance, _ = instance_for(kernel, problem, question.precision, bench.backend)
        if instance is not None and (again or known[kernel.name] is None):
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
    bench.build((kernel, problem, instance) for kernel, instance in waiting)
    defaults = {kernel.name: contest.kernel(kernel, instance) for kernel, instance in waiting}
    best_ms = min([_ms(row) for row in defaults.values()] + [entry.median_ms for entry in known.values() if entry is not None])
    for kernel, instance in sorted(waiting, key=lambda pair: _ms(defaults[pair[0].name])):
        row = defaults[kernel.name]
        tried, best, best_row = 1, kernel, row
        if _ms(row) <= HOPELESS * best_ms:
            best, best_row, tried = _search(contest, kernel, instance, row)
            best_ms = min(best_ms, _ms(best_row))
        if best_row.median_ms is None or best_row.with_packing_ms is None or best_row.wrong:
            found.append((None, f"{kernel.name} left out: {best_row.note or 'a wrong result'}"))
            continue
        values = ", ".join(f"{key}={value}" for key, value in best.tunables.items() if key in kernel.search) or "no tunables"
        line = f"{kernel.name} [{instance}] {best_row.median_ms:.4g} ms ({tried} tried; default {_ms(row):.4g} ms): {values}"
        key = (*question[:2], str(problem), *question[2:], kernel.name, code_digest(kernel), instance)
        found.append((Entry(*key, dict(best.tunables), best_row.median_ms, best_row.with_packing_ms), line))
    return found


def _search(contest: Contest, kernel: Kernel, instance: str, default: Row) -> tuple[Kernel, Row, int]:
    """Return the quickest right configuration, its row, and how many were tried."""
    rows = {configured(kernel, tuple(sorted(kernel.tunables.items()))): default}
    best = next(iter(rows))
    rounds = _rounds(kernel)
    values = next(rounds, None)
    while values is not None:
        candidates = [configured(kernel, tuple(sorted({**best.tunables, **v}.items()))) for v in values]
        able = [c for c in candidates if c not in rows and contest.bench.backend.why_not(c, contest.problem, instance) is None]
        contest.bench.build((candidate, contest.problem, instance) for candidate in able)
        before = best
        for candidate in able:
            rows[candidate] = contest.kernel(candidate, instance)
            best = min(best, candidate, key=lambda c: _ms(rows[c]))
        try:
            values = rounds.send(best is not before)
        except StopIteration:
            break
    return best, rows[best], len(rows)


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
