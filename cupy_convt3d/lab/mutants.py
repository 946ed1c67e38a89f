"""`mutants`: does the check reject every wrong copy of a kernel? Each mutant is compiled for the host and checked.

Most mutants fall to a few problems, and compiling takes longest. So all is compiled without optimization, and each mutant first
gets the problems that killed the last ones, then the check's problems with exact results in one element type. What is left gets
them in the other types, one wide and one narrow type under a sanitizer, and drawn problems.
"""

from __future__ import annotations

import hashlib
import json
import math
import queue
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..backends.host import compiled_lines
from ..errors import CompileError, FindingsError, KernelError
from ..kernel import Kernel, tomllib
from ..source import Instance, code_digest
from .check import first_failure
from .examples import Example
from .mutation import Key, Mutant, mutants
from .verify import Outcome
from .worker import Worker

VERDICTS = ("killed", "survived", "equivalent", "invalid", "not compiled")
_TIME_LIMIT_S = 4.0  # of one tiny example; those of a right kernel take milliseconds on an idle machine
_SAME_CODE = "the compiler makes the same machine code of it"
_NOT_COMPILED = "the host's preprocessor leaves its line out"
_EXACT = ["exact", "exact_wide"]  # of `tensors.KINDS`: any error shows
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
        judged = self.counts["killed"] + self.counts["survived"]
        if len(self.verdicts) >= self.total or judged == 0:
            return None
        z2 = 1.96**2
        middle, half = self.score + z2 / (2 * judged), math.sqrt(z2 * (self.score * (1 - self.score) + z2 / (4 * judged)) / judged)
        return (middle - half) / (1 + z2 / judged), (middle + half) / (1 + z2 / judged)

    @property
    def unexplained(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.verdict == "survived" and not verdict.reason]


Progress = Callable[[int, int, str], None]


def judge_mutants(
    kernel: Kernel,
    *,
    workers: int = 2,
    sample: int | None = None,
    explanations: Path | None = None,
    progress: Progress | None = None,
    kept: Path | None = None,
    kept_only: bool = False,
) -> MutationReport:
    """Check every mutant of a kernel on the host, or about `sample` of them spread evenly over the file.

    Args:
        kernel: a right one.
        workers: child processes.
        sample: how many; None: all.
        explanations: a TOML file of `[[mutant]]` tables with kernel, text, operator, before, after, number (`Mutant.key`),
            verdict ("equivalent" or "survived") and reason.
        progress: called with (mutants done, mutants in all, what is being done).
        kept: a JSON-lines file that each verdict is appended to. Those that it already has of this very source and these headers
            are taken from it, but not survivors: the check may have learnt since.
        kept_only: judge nothing, and report what is kept.

    Raises:
        FindingsError: the explanations or the kept verdicts cannot be read.
        KernelError, CompileError, BackendError: the kernel itself cannot be compiled.
    """
    start = time.perf_counter()
    everything = mutants(kernel.source)
    chosen = everything if sample is None else everything[:: max(1, -(-len(everything) // sample))]
    explained = _explanations(explanations, kernel.name)
    known_verdicts = _Kept(kept, kernel)
    if kept_only:
        chosen = [mutant for mutant in everything if known_verdicts.has(mutant)]
    verdicts = {number: found for number, mutant in enumerate(chosen) if (found := known_verdicts.get(mutant, kept_only))}
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in sorted(range(len(chosen)), key=lambda number: known_verdicts.has(chosen[number])):  # new ones first
        if number not in verdicts:
            waiting.put(number)
    errors: list[BaseException] = []
    compiled = {} if waiting.empty() else {dtype: compiled_lines(Instance(kernel, dtype)) for dtype in kernel.dtypes}

    def work(cache: Path) -> None:
        try:
            with _Judge(kernel, compiled, cache) as judge:
                while not errors:
                    number = waiting.get_nowait()
                    verdicts[number] = judge(chosen[number])
                    known_verdicts.add(verdicts[number])
                    if progress is not None:
                        progress(len(verdicts), len(chosen), f"{kernel.name}: {verdicts[number].verdict}, {chosen[number]}")
        except queue.Empty:
            pass
        except BaseException as error:
            errors.append(error)

    with tempfile.TemporaryDirectory(prefix="convt3d-mutants-") as directory:
        threads = [threading.Thread(target=work, args=(Path(directory),)) for _ in range(0 if waiting.empty() else workers)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt as error:
            errors.append(error)
            for thread in threads:
                thread.join()
    if errors:
        raise errors[0]
    known = {mutant.key for mutant in everything}
    stale = [f"{key[1]}: `{key[2]}` becomes `{key[3]}` in `{key[0]}`" for key in explained if key not in known]
    explained_verdicts = [_explain(verdicts[number], explained) for number in range(len(chosen))]
    return MutationReport(kernel.name, explained_verdicts, stale, time.perf_counter() - start, len(everything))


class _Judge:
    """What one thread judges a kernel's mutants with."""

    def __init__(self, kernel: Kernel, compiled: Mapping[str, set[int]], cache: Path) -> None:
        self.kernel, self.compiled, self.cache = kernel, compiled, cache
        self.worker = Worker(kernel, "host", None, _TIME_LIMIT_S, cache, optimize=False)
        self.killers: list[Example] = []  # the last one first
        self.codes: dict[str, bytes] = {}
        self.right: set[str] = set()

    def __enter__(self) -> _Judge:
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.close()

    def __call__(self, mutant: Mutant) -> Verdict:
        declared = mutant.operator == "grid"  # the preprocessor does not see the declaration
        dtypes = [dtype for dtype in self.kernel.dtypes if declared or mutant.line in self.compiled[dtype]]
        if not dtypes:
            return Verdict(mutant, "not compiled", _NOT_COMPILED)
        self.require_right(dtypes[0])
        try:
            changed = replace(Kernel.from_source(mutant.source, self.kernel.name), path=self.kernel.path)
            failed = self.kill_quickly(changed, dtypes[0])
            if failed is None:
                if not declared and all(machine_code(changed, dtype) == self.code(dtype) for dtype in dtypes):
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
        with Worker(changed, "host", sanitizer, 10 * _TIME_LIMIT_S, self.cache, optimize=False, once=True) as watched:
            return first_failure(watched, changed, examples=0, dtypes=dtypes, kinds=_EXACT)

    def code(self, dtype: str) -> bytes:
        """Return the right kernel's machine code."""
        if dtype not in self.codes:
            self.codes[dtype] = machine_code(self.kernel, dtype)
        return self.codes[dtype]


def _explain(verdict: Verdict, explained: Mapping[Key, tuple[str, str]]) -> Verdict:
    known = explained.get(verdict.mutant.key) if verdict.verdict == "survived" else None
    return verdict if known is None else Verdict(verdict.mutant, *known)


class _Kept:
    """The verdicts in a file, by what they are of."""

    def __init__(self, path: Path | None, kernel: Kernel) -> None:
        self.path, self.kernel = path, kernel.name
        self.digest = hashlib.sha256(f"{kernel.source}\0{code_digest(kernel)}".encode()).hexdigest()[:16]
        self.known: dict[Key, tuple[str, str]] = {}
        try:
            lines = path.read_text().splitlines() if path is not None and path.exists() else []
            for entry in map(json.loads, lines):
                if (entry["kernel"], entry["digest"]) == (self.kernel, self.digest):
                    self.known[tuple(entry["mutant"])] = (entry["verdict"], entry["reason"])  # type: ignore[index]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FindingsError(f"kept verdicts {str(path)!r}: cannot be read: {error!r}") from None

    def get(self, mutant: Mutant, survivors: bool) -> Verdict | None:
        verdict = self.known.get(mutant.key)
        return None if verdict is None or (verdict[0] == "survived" and not survivors) else Verdict(mutant, *verdict)

    def has(self, mutant: Mutant) -> bool:
        return mutant.key in self.known

    def add(self, verdict: Verdict) -> None:
        if self.path is None:
            return
        entry = {"kernel": self.kernel, "digest": self.digest, "mutant": verdict.mutant.key}
        with self.path.open("a") as file:
            file.write(json.dumps({**entry, "verdict": verdict.verdict, "reason": verdict.reason}) + "\n")


def machine_code(kernel: Kernel, dtype: str) -> bytes:
    """Return what the host compiler makes of a kernel, without line numbers."""
    from ..backends.host import compile_unit

    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "kernel.so"
        compile_unit(Instance(kernel, dtype), output, ("-g0", "-O1"))
        stripped = subprocess.run(["strip", "-o", "/dev/stdout", str(output)], capture_output=True, check=False)
        return stripped.stdout or output.read_bytes()


def _explanations(path: Path | None, kernel: str) -> dict[Key, tuple[str, str]]:
    if path is None or not path.exists():
        return {}
    try:
        entries = tomllib.loads(path.read_text()).get("mutant", [])
        keys = ("text", "operator", "before", "after", "number")
        known = {tuple(entry[key] for key in keys): (entry["verdict"], entry["reason"]) for entry in entries if entry["kernel"] == kernel}
    except (OSError, tomllib.TOMLDecodeError, KeyError, AttributeError, TypeError) as error:
        raise FindingsError(f"explanations {str(path)!r}: cannot be read: {error!r}") from None
    for verdict, reason in known.values():
        if verdict not in ("equivalent", "survived") or not reason:
            raise FindingsError(f"explanations {str(path)!r}: verdict={verdict!r}: must be equivalent or survived, with a reason")
    return known  # type: ignore[return-value]
