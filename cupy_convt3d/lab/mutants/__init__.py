"""`mutants`: does the check reject every wrong copy of a kernel? Each mutant is compiled for the host and checked.

Most mutants fall to a few problems, and compiling takes longest. So all is compiled without optimization, and each mutant first
gets the problems that killed the last ones, then the check's problems with exact results in one element type. What is left gets
them in the other types, one wide and one narrow type under a sanitizer, and drawn problems.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ... import records, scratch
from ...backends.host import compiled_places
from ...errors import CompileError, DataError, FindingsError, KernelError, shown
from ...files import read_text, write_all
from ...kernel import Kernel, tomllib
from ...source import Instance, code_digest, headers_of
from ..check import first_failure
from ..check.examples import Example
from ..progress import Progress
from ..run.far import FAR
from ..run.verify import Outcome
from ..run.worker import Worker
from ..tensors import SPOILT
from ..threads import share
from .mutation import Key, Mutant, mutants

VERDICTS = ("killed", "survived", "equivalent", "invalid", "not compiled")
_TIME_LIMIT_S = 4.0  # of one tiny example; those of a right kernel take milliseconds on an idle machine
_SAME_CODE = "the compiler makes the same machine code of it"
_NOT_COMPILED = "the host's preprocessor leaves its line out"
_EXACT = ["exact", "exact_wide", FAR]  # any error shows
EXAMPLES = 40  # drawn at random
_KILLERS = 12  # examples that killed lately


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant.

    Attributes:
        verdict: "killed": the check rejected it; "survived": it did not; "equivalent": it computes the same for every problem;
            "invalid": it does not compile; "not compiled": it is in a branch that the preprocessor drops on the host.
        reason: what the check said, why it is equivalent, or why it was let through; "" for a survivor nobody has explained.
    """

    mutant: Mutant
    verdict: str
    reason: str


@dataclass
class MutationReport:
    """The verdicts on a kernel's mutants, of which there are `total`; `stale` are explanations that no longer name any mutant."""

    kernel: str
    verdicts: list[Verdict]
    stale: list[str]
    elapsed_s: float
    total: int = 0

    @property
    def counts(self) -> Counter[str]:
        return Counter(verdict.verdict for verdict in self.verdicts)

    @property
    def score(self) -> float:
        """Killed of all that are neither equivalent, invalid nor left out by the preprocessor."""
        counts = self.counts
        return counts["killed"] / max(1, counts["killed"] + counts["survived"])

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95% interval for the score of all mutants, None if all were judged."""
        return None if len(self.verdicts) >= self.total else interval(self.counts["killed"], self.counts["survived"])

    @property
    def unexplained(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.verdict == "survived" and not verdict.reason]




def interval(killed: int, survived: int) -> tuple[float, float] | None:
    """Return Wilson's 95% interval for killed / (killed + survived), None of nothing."""
    if (judged := killed + survived) == 0:
        return None
    z2, score = 1.96**2, killed / judged
    middle, half = score + z2 / (2 * judged), math.sqrt(z2 * (score * (1 - score) + z2 / (4 * judged)) / judged)
    return (middle - half) / (1 + z2 / judged), (middle + half) / (1 + z2 / judged)


def judge_mutants(
    kernel: Kernel,
    *,
    workers: int = 2,
    sample: int | None = None,
    explanations: Path | None = None,
    progress: Progress | None = None,
    kept: Path | None = None,
    kept_only: bool = False,
    headers: bool = True,
) -> MutationReport:
    """Check every mutant of a kernel and of the headers it includes on the host, or about `sample` of them spread evenly.

    Args:
        kernel: a right one.
        workers: child processes.
        sample: how many of those that the host compiles; None: all.
        explanations: a TOML file, see `explanations`.
        progress: called with (mutants done, mutants in all, what is being done).
        kept: a JSON-lines file that each verdict is appended to. Those that it already has of this very source and these headers
            are taken from it, but not survivors: the check may have learnt since.
        kept_only: judge nothing, and report what is kept.
        headers: change those that the kernel includes, too.

    Raises:
        FindingsError: the explanations or the kept verdicts cannot be read.
        KernelError, CompileError, BackendError: the kernel itself cannot be compiled.
    """
    start = time.perf_counter()
    included = blocks(kernel) if headers else {}
    chosen = everything = [*mutants(kernel.source), *(m for file, text in included.items() for m in mutants(text, file))]
    explained = _explained(explanations, kernel.name, included)
    known_verdicts = _Kept(kept, kernel)
    if kept_only:
        chosen = [mutant for mutant in everything if known_verdicts.has(mutant)]
    compiled = {} if kept_only else {dtype: compiled_places(Instance(kernel, dtype)) for dtype in kernel.dtypes}
    if sample is not None and not kept_only:
        somewhere = set().union(*compiled.values())
        possible = [mutant for mutant in everything if _is_declared(mutant) or mutant.place in somewhere]
        chosen = possible[:: max(1, -(-len(possible) // sample))]
    verdicts = {number: found for number, mutant in enumerate(chosen) if (found := known_verdicts.get(mutant, kept_only))}
    new_first = sorted(range(len(chosen)), key=lambda number: known_verdicts.has(chosen[number]))

    def work(cache: Path, numbers: Iterator[int]) -> None:
        with _Judge(kernel, compiled, cache, workers) as judge:
            for number in numbers:
                verdicts[number] = judge(chosen[number])
                known_verdicts.add(verdicts[number])
                if progress is not None:
                    progress(len(verdicts), len(chosen), f"{kernel.name}: {verdicts[number].verdict}, {chosen[number]}")

    with scratch.directory("mutants-") as directory:
        share([number for number in new_first if number not in verdicts], workers, partial(work, Path(directory)))
    known = {mutant.key for mutant in everything}
    stale = [f"{key[2]}: `{key[3]}` becomes `{key[4]}` in `{key[1]}`" for key in explained if key not in known]
    explained_verdicts = [_explain(verdicts[number], explained) for number in range(len(chosen))]
    return MutationReport(kernel.name, explained_verdicts, stale, time.perf_counter() - start, len(everything))


def blocks(kernel: Kernel) -> dict[str, str]:
    """Return the texts of the headers in which a kernel's code lies, by name: those that a GPU sees, and the kernel's own."""
    package = headers_of(kernel, host=False)
    own = {name: text for name, text in package.items() if not name.startswith(("convt3d/host/", "convt3d/standard/"))}
    return {**own, **{str(path): text for path, text in kernel.headers.items()}}


def _is_declared(mutant: Mutant) -> bool:
    """Whether it is in the declaration, which no preprocessor sees."""
    return mutant.operator == "grid"


def _changed(kernel: Kernel, mutant: Mutant) -> Kernel:
    """Return the kernel with a mutant in the place of one of its files."""
    if not mutant.file:
        return kernel.replace_source(mutant.source)
    if (path := Path(mutant.file)) in kernel.headers:
        return replace(kernel, headers={**kernel.headers, path: mutant.source})
    return kernel.replace_headers({mutant.file: mutant.source})


class _Judge:
    """What one thread judges a kernel's mutants with."""

    def __init__(self, kernel: Kernel, compiled: Mapping[str, set[tuple[str, int]]], cache: Path, workers: int) -> None:
        self.kernel, self.compiled, self.cache, self.workers = kernel, compiled, cache, workers
        self.worker = Worker(kernel, "host", None, _TIME_LIMIT_S, cache, optimize=False, workers=workers)
        self.killers: list[Example] = []  # the last one first
        self.codes: dict[str, bytes] = {}
        self.right: set[str] = set()

    def __enter__(self) -> _Judge:
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.close()

    def __call__(self, mutant: Mutant) -> Verdict:
        declared = _is_declared(mutant)
        dtypes = [dtype for dtype in self.kernel.dtypes if declared or mutant.place in self.compiled[dtype]]
        if not dtypes:
            return Verdict(mutant, "not compiled", _NOT_COMPILED)
        self.require_right(dtypes[0])
        try:
            changed = _changed(self.kernel, mutant)
            if mutant.file and self.same_code(changed, dtypes):  # first: a kernel does not call all that its headers have
                return Verdict(mutant, "equivalent", _SAME_CODE)
            failed = self.kill_quickly(changed, dtypes[0])
            if failed is None:
                if not declared and not mutant.file and self.same_code(changed, dtypes):
                    return Verdict(mutant, "equivalent", _SAME_CODE)
                sanitizer = "thread" if mutant.operator == "barrier" else "address"
                wide_and_narrow = list(dict.fromkeys((dtypes[0], dtypes[-1])))
                others = dtypes[1:-1][::-1]  # the last first: TF32x3, the second, takes twice the time
                failed = self.kill(changed, others) or self.watch(changed, wide_and_narrow, sanitizer)
        except (KernelError, CompileError) as error:
            return Verdict(mutant, "invalid", str(error).strip().splitlines()[-1])
        if failed is None:
            return Verdict(mutant, "survived", "")
        example, outcome = failed
        return Verdict(mutant, "killed", f"{example.problem} {example.dtype} {example.kind}: {outcome.message}")

    def require_right(self, dtype: str) -> None:
        """Raise a KernelError if the kernel itself fails what its mutants get first."""
        if dtype not in self.right:
            failed = first_failure(self.worker, self.kernel, examples=0, dtypes=[dtype], kinds=_EXACT)
            if failed is not None:
                raise KernelError(f"{self.kernel.name} is wrong itself: {failed[0].problem} {dtype}: {failed[1].message}")
            self.right.add(dtype)

    def kill_quickly(self, changed: Kernel, dtype: str) -> tuple[Example, Outcome] | None:
        """Return what shows that a mutant is wrong with one element type compiled."""
        self.worker.restart()  # the last mutant may have spoilt the child's memory
        return self.learn(
            self.try_killers(changed, [killer for killer in self.killers if killer.dtype == dtype])
            or first_failure(self.worker, changed, examples=0, dtypes=[dtype], kinds=_EXACT)
        )

    def kill(self, changed: Kernel, dtypes: list[str]) -> tuple[Example, Outcome] | None:
        """Return what shows that a mutant is wrong if `kill_quickly` found nothing: other element types, random problems."""
        return self.learn(
            self.try_killers(changed, [killer for killer in self.killers if killer.dtype in dtypes])
            or (first_failure(self.worker, changed, examples=0, dtypes=dtypes, kinds=_EXACT) if dtypes else None)
            or first_failure(self.worker, changed, examples=0, kinds=SPOILT)  # drawn ones are too few for each element type
            or first_failure(self.worker, changed, examples=EXAMPLES, drawn_only=True)
        )

    def learn(self, failed: tuple[Example, Outcome] | None) -> tuple[Example, Outcome] | None:
        """Keep what killed for the next mutants."""
        if failed is not None:
            example = failed[0]
            rest = [killer for killer in self.killers if replace(killer, kernel=example.kernel) != example]
            self.killers = [example, *rest][:_KILLERS]
        return failed

    def try_killers(self, changed: Kernel, killers: Sequence[Example]) -> tuple[Example, Outcome] | None:
        for killer in killers:
            same = changed.replace_tunables(**killer.kernel.changed_tunables)
            if same.why_not(killer.problem, killer.dtype) is None:
                self.worker.kernel = same
                outcome = self.worker.verify(killer.problem, killer.dtype, killer.kind, killer.seed)
                if not outcome.ok:
                    return replace(killer, kernel=same), outcome
        return None

    def watch(self, changed: Kernel, dtypes: list[str], sanitizer: str) -> tuple[Example, Outcome] | None:
        """As `kill`: what lies past a local array, or what a barrier orders, may come out right all the same."""
        limit_s, workers = 10 * _TIME_LIMIT_S, self.workers
        with Worker(changed, "host", sanitizer, limit_s, self.cache, optimize=False, once=True, workers=workers) as watched:
            return first_failure(watched, changed, examples=0, dtypes=dtypes, kinds=_EXACT)

    def same_code(self, changed: Kernel, dtypes: list[str]) -> bool:
        return all(machine_code(changed, dtype) == self.code(dtype) for dtype in dtypes)

    def code(self, dtype: str) -> bytes:
        """Return the right kernel's machine code."""
        if dtype not in self.codes:
            self.codes[dtype] = machine_code(self.kernel, dtype)
        return self.codes[dtype]


def _explain(verdict: Verdict, explained: Mapping[Key, tuple[str, str]]) -> Verdict:
    known = explained.get(verdict.mutant.key) if verdict.verdict == "survived" else None
    return verdict if known is None else Verdict(verdict.mutant, *known)


@dataclass(frozen=True)
class _Entry:
    """A line of the file of kept verdicts."""

    kernel: str
    digest: str
    mutant: tuple[object, ...]
    verdict: str
    reason: str


class _Kept:
    """The verdicts in a file, by what they are of."""

    def __init__(self, path: Path | None, kernel: Kernel) -> None:
        self.path, self.kernel = path, kernel.name
        self.digest = hashlib.sha256(f"{kernel.source}\0{code_digest(kernel)}".encode()).hexdigest()[:16]
        self.known: dict[Key, tuple[str, str]] = {}
        if path is None or not path.exists():
            return
        try:
            lines = read_text(path).split("\n")
            for number, line in enumerate(lines[:-1], 1):  # the last one is empty, or torn: a killed run was writing it
                where = f"kept verdicts {str(path)!r}, line {number}"
                entry = records.make(_Entry, records.parse(line, where), where)
                records.one_of(entry.verdict, VERDICTS, f"{where}: verdict")
                if [type(part) for part in entry.mutant] != [str, str, str, str, str, int]:
                    raise DataError(f"{where}: mutant={shown(entry.mutant)}: must be five texts and a number")
                if (entry.kernel, entry.digest) == (self.kernel, self.digest):
                    self.known[entry.mutant] = (entry.verdict, entry.reason)  # type: ignore[index]
        except (OSError, ValueError) as error:
            raise FindingsError(str(error) if isinstance(error, DataError) else f"kept verdicts {str(path)!r}: {error}") from None
        if lines[-1]:
            os.truncate(path, len("\n".join(lines[:-1]).encode()) + (len(lines) > 1))

    def get(self, mutant: Mutant, survivors: bool) -> Verdict | None:
        verdict = self.known.get(mutant.key)
        return None if verdict is None or (verdict[0] == "survived" and not survivors) else Verdict(mutant, *verdict)

    def has(self, mutant: Mutant) -> bool:
        return mutant.key in self.known

    def add(self, verdict: Verdict) -> None:
        if self.path is None:
            return
        entry = {"kernel": self.kernel, "digest": self.digest, "mutant": verdict.mutant.key}
        line = json.dumps({**entry, "verdict": verdict.verdict, "reason": verdict.reason}) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            write_all(descriptor, line.encode())
        finally:
            os.close(descriptor)


def machine_code(kernel: Kernel, dtype: str) -> bytes:
    """Return what the host compiler makes of a kernel, without line numbers."""
    from ...backends.host import compile_unit

    with scratch.directory() as directory:
        output = Path(directory) / "kernel.so"
        compile_unit(Instance(kernel, dtype), output, ("-g0", "-O1"))
        stripped = subprocess.run(["strip", "-o", "/dev/stdout", str(output)], capture_output=True, check=False)
        return stripped.stdout or output.read_bytes()


def _explained(path: Path | None, kernel: str, headers: Collection[str]) -> dict[Key, tuple[str, str]]:
    """Return verdict and reason of a kernel's mutants, and of those of its headers."""
    of_files = {kernel: "", **{name: name for name in headers}}
    known = {} if path is None else explanations(path)
    return {(of_files[where], *key): found for (where, *key), found in known.items() if where in of_files}  # type: ignore[misc]


def explanations(path: Path) -> dict[Key, tuple[str, str]]:
    """Return why mutants need not be killed: verdict and reason, by `Mutant.key` with the kernel's name in the place of "".

    The file is TOML: `[[reason]]` tables, each with a verdict ("equivalent" or "survived"), a reason, and `mutants`, a list of
    [kernel or header, text, operator, before, after, number].

    Raises:
        FindingsError: it cannot be read.
    """
    try:
        groups = tomllib.loads(read_text(path))["reason"]
        rows = [(tuple(row), group["verdict"], group["reason"]) for group in groups for row in group["mutants"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise FindingsError(f"explanations {str(path)!r}: cannot be read: {error!r}") from None
    for row, verdict, reason in rows:
        if [type(part) for part in row] != [str, str, str, str, str, int]:
            raise FindingsError(f"explanations {str(path)!r}: mutants={shown(row)}: must be five texts and a number")
        if verdict not in ("equivalent", "survived") or not isinstance(reason, str) or not reason:
            raise FindingsError(f"explanations {str(path)!r}: verdict={shown(verdict)}: must be equivalent or survived, with a reason")
    return {row: (verdict, reason) for row, verdict, reason in rows}  # type: ignore[misc]
