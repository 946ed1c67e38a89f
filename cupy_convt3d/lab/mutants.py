"""`mutants`: does the check reject every wrong copy of a kernel? Each mutant is compiled for the host and checked."""

from __future__ import annotations

import queue
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import CompileError, FindingsError, KernelError
from ..kernel import Kernel, tomllib
from ..source import Instance
from .check import first_failure
from .mutation import Mutant, mutants
from .worker import Worker

VERDICTS = ("killed", "survived", "equivalent", "invalid")
_TIME_LIMIT_S = 2.0  # of one tiny example; those of a right kernel take milliseconds
_SAME_CODE = "the compiler makes the same machine code of it"


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant.

    Attributes:
        verdict: "killed": the check rejected it; "survived": it did not; "equivalent": it computes the same for every problem;
            "invalid": it does not compile.
        reason: what the check said, why it is equivalent, or why it was let through; "" for a survivor nobody has explained.
    """

    mutant: Mutant
    verdict: str
    reason: str


@dataclass
class MutationReport:
    """The verdicts on a kernel's mutants; `stale` are explanations that no longer name any mutant."""

    kernel: str
    verdicts: list[Verdict]
    stale: list[str]
    elapsed_s: float

    @property
    def counts(self) -> Counter[str]:
        return Counter(verdict.verdict for verdict in self.verdicts)

    @property
    def score(self) -> float:
        """Killed of all that are neither equivalent nor invalid."""
        counts = self.counts
        return counts["killed"] / max(1, counts["killed"] + counts["survived"])

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
) -> MutationReport:
    """Check every mutant of a kernel on the host, or `sample` of them spread evenly over the file.

    Args:
        kernel: a right one.
        workers: child processes.
        sample: how many; None: all.
        explanations: a TOML file of `[[mutant]]` tables with kernel, text, operator, before, after, number (`Mutant.key`),
            verdict ("equivalent" or "survived") and reason.
        progress: called with (mutants done, mutants in all, what is being done).

    Raises:
        FindingsError: the explanations cannot be read.
        KernelError, CompileError, BackendError: the kernel itself cannot be compiled.
    """
    start = time.perf_counter()
    everything = mutants(kernel.source)
    chosen = everything if sample is None else everything[:: max(1, -(-len(everything) // sample))]
    explained = _explanations(explanations, kernel.name)
    verdicts: dict[int, Verdict] = {}
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(chosen)):
        waiting.put(number)
    errors: list[BaseException] = []

    def work(cache: Path) -> None:
        try:
            with Worker(kernel, "host", None, _TIME_LIMIT_S, cache) as worker:
                while not errors:
                    number = waiting.get_nowait()
                    verdicts[number] = _judge(worker, kernel, chosen[number], explained.get(chosen[number].key), cache)
                    if progress is not None:
                        progress(len(verdicts), len(chosen), f"{kernel.name}: {verdicts[number].verdict}, {chosen[number]}")
        except queue.Empty:
            pass
        except BaseException as error:
            errors.append(error)

    with tempfile.TemporaryDirectory(prefix="convt3d-mutants-") as directory:
        threads = [threading.Thread(target=work, args=(Path(directory),)) for _ in range(workers)]
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
    return MutationReport(kernel.name, [verdicts[number] for number in range(len(chosen))], stale, time.perf_counter() - start)


def _judge(worker: Worker, kernel: Kernel, mutant: Mutant, explained: tuple[str, str] | None, cache: Path) -> Verdict:
    worker.restart()  # the last mutant may have spoilt the child's memory
    try:
        changed = replace(Kernel.from_source(mutant.source, kernel.name), path=kernel.path)
        failed = first_failure(worker, changed)
        if failed is None:  # what lies past a local array, or what a barrier orders, may come out right all the same
            sanitizer = "thread" if mutant.operator == "barrier" else "address"
            with Worker(changed, "host", sanitizer, 10 * _TIME_LIMIT_S, cache) as watched:
                failed = first_failure(watched, changed, examples=0, dtypes=kernel.dtypes[:1], kinds=["exact"])
    except (KernelError, CompileError) as error:
        return Verdict(mutant, "invalid", str(error).strip().splitlines()[-1])
    if failed is not None:
        example, outcome = failed
        return Verdict(mutant, "killed", f"{example.problem} {example.dtype} {example.kind}: {outcome.message}")
    if explained is not None:
        return Verdict(mutant, *explained)
    same_launches = mutant.operator != "grid"
    if same_launches and all(machine_code(changed, dtype) == machine_code(kernel, dtype) for dtype in kernel.dtypes):
        return Verdict(mutant, "equivalent", _SAME_CODE)
    return Verdict(mutant, "survived", "")


def machine_code(kernel: Kernel, dtype: str) -> bytes:
    """Return what the host compiler makes of a kernel, without line numbers."""
    from ..backends.host import compile_unit

    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "kernel.so"
        compile_unit(Instance(kernel, dtype), output, ("-g0",))
        stripped = subprocess.run(["strip", "-o", "/dev/stdout", str(output)], capture_output=True, check=False)
        return stripped.stdout or output.read_bytes()


def _explanations(path: Path | None, kernel: str) -> dict[tuple[str, str, str, str, int], tuple[str, str]]:
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
