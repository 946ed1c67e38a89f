"""The file that a fuzzing run keeps: JSON lines that are only appended to, and beside them how far each worker has come."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ... import limits, records
from ...backends.host import SANITIZERS
from ...dtypes import DTYPES
from ...errors import BackendError, CacheWarning, DataError, FindingsError, KernelError, ProblemError, shown
from ...files import read_text, write_all
from ...kernel import MOST_TUNABLE, Kernel
from ...problem import PASSES, Problem
from ...source import header_digest
from ..bench.provenance import package_versions
from ..check.examples import Example
from ..run.far import FAR
from ..run.verify import Outcome
from ..run.worker import Worker
from ..tensors import KINDS, SPECIAL_KINDS

_MOST_COUNT = 2**63 - 1


@dataclass(frozen=True)
class Finding:
    """A failing example as the file has it; `message` to `got` are those of `Outcome`, `path` is that of a file of one's own."""

    kernel: str
    path: str | None
    source: str  # digest of the kernel's source
    tunables: Mapping[str, int]
    backend: str
    sanitize: str | None
    problem: str
    dtype: str
    kind: str
    seed: int
    message: str
    index: tuple[int, ...] | None = None
    expected: float | None = None
    got: float | None = None

    @classmethod
    def of(cls, example: Example, outcome: Outcome, backend: str, sanitize: str | None, path: Path | None) -> Finding:
        return cls(
            example.kernel.name, None if path is None else str(path), source_digest(example.kernel),
            example.kernel.changed_tunables, backend, sanitize, str(example.problem), example.dtype, example.kind, example.seed,
            outcome.message, outcome.index, outcome.expected, outcome.got,
        )  # fmt: skip

    @property
    def what(self) -> str:
        """The kind of failure: the message without its numbers and places."""
        return re.sub(r"\d+", "#", re.split(r"[;(]| at ", self.message)[0]).strip()

    @property
    def key(self) -> tuple[str, str, str]:
        """Findings with the same key are the same: kernel, kind of failure, smallest problem."""
        return self.kernel, self.what, self.problem

    def example_line(self) -> str:
        """Return the line that pins the finding as an example of `tests/test_findings.py`."""
        tunables = f", tunables={dict(self.tunables)}" if self.tunables else ", tunables={}"
        return (
            f"@example(kernel={self.path or self.kernel!r}, problem=Problem.parse({self.problem!r}), dtype={self.dtype!r}, "
            f"kind={self.kind!r}, seed={self.seed}{tunables})"
        )

    def example(self, kernel: Kernel) -> Example:
        """Return what to run again.

        Raises:
            KernelError: the kernel no longer has a tunable.
        """
        configured = kernel.replace_tunables(**self.tunables)
        return Example(configured, Problem.parse(self.problem), self.dtype, self.kind, self.seed)


@lru_cache(maxsize=64)
def source_digest(kernel: Kernel) -> str:
    return hashlib.sha256("\0".join((kernel.source, *kernel.headers.values())).encode()).hexdigest()[:16]


def surroundings() -> dict[str, str]:
    """Return what a finding depends on besides the kernel's source: versions, the compiler, the headers."""
    from ...backends.host import HostBackend

    try:
        compiler = HostBackend().capabilities()["compiler"]
    except BackendError:
        compiler = "none"
    return {**package_versions(("cupy-convt3d", "numpy", "ml_dtypes")), "compiler": compiler, "headers": header_digest()[:16]}


def load(path: Path) -> tuple[list[Finding], list[Finding], dict[str, str]]:
    """Return the findings, the failures a killed run did not get to shrink, and the last run's surroundings.

    Raises:
        FindingsError: the file cannot be read, or a line other than a torn last one is none of its own.
    """
    findings: dict[tuple[str, str, str], Finding] = {}
    pending: list[Finding] = []
    recorded: dict[str, str] = {}
    for where, event, fields in _lines(path):
        try:
            if event == "run":
                recorded = records.typed(fields.get("surroundings"), dict[str, str], f"{where}: surroundings")
            elif event == "failure":
                pending.append(finding_of(fields, where))
            elif event == "finding":
                found = finding_of(fields, where)
                findings.setdefault(found.key, found)
            elif event == "shrunk":
                pending.remove(finding_of(fields, where))
        except DataError as error:
            raise FindingsError(str(error)) from None
        except ValueError:
            raise FindingsError(f"{where}: shrunk: is no failure of the lines above") from None
    return list(findings.values()), pending, recorded


def finding_of(fields: object, where: str) -> Finding:
    """Return a finding whose every field is of its type and in its range; raises DataError for any other."""
    found = records.make(Finding, fields, where)
    for name, known in (("backend", ("host", "cuda")), ("dtype", DTYPES), ("kind", (*KINDS, *SPECIAL_KINDS, FAR))):
        records.one_of(getattr(found, name), known, f"{where}: {name}")
    if found.sanitize is not None:
        records.one_of(found.sanitize, SANITIZERS, f"{where}: sanitize")
    if found.path is not None and not found.path.endswith(".cu"):
        raise DataError(f"{where}: path={shown(found.path)}: must end with .cu")
    for name, number in found.tunables.items():
        records.within(number, 0, MOST_TUNABLE, f"{where}: tunables.{name}")
    records.within(found.seed, 0, _MOST_COUNT, f"{where}: seed")
    try:
        Problem.parse(found.problem)
    except ProblemError as error:
        raise DataError(f"{where}: problem: {error}") from None
    return found


def _lines(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield where each line is, its event, and its other fields."""
    file = f"findings file {str(path)!r}"
    try:
        lines = read_text(path).split("\n")
    except (OSError, ValueError) as error:
        raise FindingsError(f"{file}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            fields = dict(records.mapping(records.parse(line, where), where))
            event = records.typed(fields.pop("event", None), str, f"{where}: event")
        except DataError as error:
            if number == len(lines):
                return  # the line that a killed run was writing
            raise FindingsError(str(error)) from None
        yield where, event, fields


def _progress(saved: bytes, where: str) -> dict[str, Any]:
    """Return what `fuzz` saved: its seed, how many examples it did of each configuration, five figures of each kernel, what was running.

    Raises:
        DataError: it is damaged.
    """
    try:
        data = dict(records.mapping(records.parse(saved.decode(), where), where))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: {error}") from None
    records.typed(data.get("seed"), str, f"{where}: seed")
    done = records.typed(data.get("done"), dict[str, int], f"{where}: done")
    counts = {f"done.{name}": count for name, count in done.items()}
    for name, entry in records.mapping(data.get("coverage"), f"{where}: coverage").items():
        place = f"coverage.{name}"
        if len(records.sequence(entry, f"{where}: {place}")) != 5:
            raise DataError(f"{where}: {place}={shown(entry)}: must be five figures")
        pass_name, pairs, *figures = entry
        records.one_of(pass_name, PASSES, f"{where}: {place}[0]")
        if not re.fullmatch("0x[0-9a-f]{1,2000}", records.typed(pairs, str, f"{where}: {place}[1]")):
            raise DataError(f"{where}: {place}[1]={shown(pairs)}: must be a hexadecimal number")
        counts |= {f"{place}[{number}]": records.typed(n, int, f"{where}: {place}[{number}]") for number, n in enumerate(figures, 2)}
    for slot, entry in records.mapping(data.get("running", {}), f"{where}: running").items():
        place = f"{where}: running.{slot}"
        if len(records.sequence(entry, place)) != 3:
            raise DataError(f"{place}={shown(entry)}: must be a stream, a number and a finding")
        records.typed(entry[0], str, f"{place}[0]")
        counts[f"running.{slot}[1]"] = records.typed(entry[1], int, f"{place}[1]")
        finding_of(entry[2], f"{place}[2]")
    for name, count in counts.items():
        records.within(count, 0, _MOST_COUNT, f"{where}: {name}")
    return data


class Journal:
    """Appends what a run finds, and keeps how far it is; a killed run loses nothing that was handed over.

    Attributes:
        findings: known ones by key.
        pending: failures that an earlier run did not get to shrink.
        progress: what the last call of `save` was given, of an earlier run too; {} for a new file, or where it is damaged.

    Raises:
        FindingsError: the file is damaged, or another run has it open.
    """

    def __init__(self, path: Path) -> None:
        found, self.pending, _ = load(path) if path.exists() else ([], [], {})
        self.findings = {finding.key: finding for finding in found}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            self._progress = os.open(path.with_name(path.name + ".progress"), os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise FindingsError(f"findings file {str(path)!r}: cannot be written: {error}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise FindingsError(f"findings file {str(path)!r}: another run has it open") from None
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            write_all(self._file, b"\n") if _is_json(path) else os.ftruncate(self._file, path.read_bytes().rfind(b"\n") + 1)
        self._saved = os.fstat(self._progress).st_size
        self.progress: dict[str, Any] = {}
        saved = os.pread(self._progress, self._saved, 0)
        if size and saved.strip():
            try:
                self.progress = _progress(saved, f"progress of {str(path)!r}")
            except DataError as error:  # the machine went down in the middle of a write
                warnings.warn(f"{error}; the examples begin anew", CacheWarning, stacklevel=2)

    def write(self, event: str, **fields: Any) -> None:
        """Append one line."""
        write_all(self._file, (json.dumps({"event": event, **fields}) + "\n").encode())

    def add(self, event: str, found: Finding) -> None:
        """Append a "failure" as it came, the "finding" it was shrunk to, and that the failure was "shrunk"."""
        self.write(event, **asdict(found))
        if event == "finding":
            self.findings[found.key] = found

    def save(self, progress: dict[str, Any]) -> None:
        """Replace the progress in one write, padded to cover the last one."""
        text = json.dumps(progress)
        self._saved = max(self._saved, -(-len(text) // 1024) * 1024)
        data = text.ljust(self._saved).encode()
        if (written := os.pwrite(self._progress, data, 0)) != len(data):
            raise FindingsError(f"progress: only {written} of {len(data)} bytes could be written; the disk is full")

    def close(self) -> None:
        os.close(self._file)
        os.close(self._progress)


def _is_json(path: Path) -> bool:
    try:
        return isinstance(records.parse(read_text(path).rsplit("\n", 1)[-1], ""), dict)
    except DataError:
        return False


def differences(recorded: dict[str, str], now: dict[str, str], found: Finding, kernel: Kernel | None) -> list[str]:
    """Return what has changed since a finding was recorded, one sentence a difference."""
    changed = [f"{n} was {recorded.get(n, 'none')}, is {now.get(n, 'none')}" for n in {**recorded, **now} if recorded.get(n) != now.get(n)]
    if kernel is not None and source_digest(kernel) != found.source:
        changed.append(f"the source of {found.kernel} was {found.source}, is {source_digest(kernel)}")
    return changed


@dataclass
class Replayed:
    """One finding run again.

    Attributes:
        outcome: None where it was not run.
        warnings: what changed.
        not_tried: why it could not be run here: no GPU, no compiler, too little memory; None also where the kernel is gone or refuses it.
    """

    finding: Finding
    outcome: Outcome | None
    warnings: list[str]
    not_tried: str | None = None

    def __str__(self) -> str:
        if self.not_tried is not None:
            return f"{self.finding.kernel}: not tried: {self.not_tried}"
        if self.outcome is None:
            return f"{self.finding.kernel}: cannot be run any more"
        return f"{self.finding.kernel}: {'passes now' if self.outcome.ok else f'still fails: {self.outcome.message}'}"


def replay(findings: str | Path, time_limit_s: float = 10.0) -> list[Replayed]:
    """Run every finding of a file once more, on the backend and under the sanitizer it was found with, if these can be had.

    Raises:
        KernelError: `time_limit_s` is no number of seconds.
        FindingsError: the file is missing or damaged.
    """
    limits.check_time_limit(time_limit_s)
    found, pending, recorded = load(Path(findings))
    now, results = surroundings(), []
    for finding in [*found, *pending]:
        kernel, outcome, not_tried = current_kernel(finding), None, None
        try:
            if kernel is not None:
                example = finding.example(kernel)
                with Worker(example.kernel, finding.backend, finding.sanitize, time_limit_s) as worker:
                    if example.kind != FAR:  # which has more to do than fits into any limit
                        worker.time_limit_s = limits.time_limit_s(example.problem, time_limit_s)
                    outcome = worker.verify(example.problem, example.dtype, example.kind, example.seed)
        except BackendError as error:
            not_tried = str(error)
        except KernelError:
            pass
        results.append(Replayed(finding, outcome, differences(recorded, now, finding, kernel), not_tried))
    return results


def current_kernel(found: Finding) -> Kernel | None:
    """Return the kernel of that name or path as it is now, None if it is gone."""
    from ..check import resolve

    try:
        return resolve(found.path or found.kernel)
    except KernelError:
        return None
