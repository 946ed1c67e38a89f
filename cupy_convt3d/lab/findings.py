"""The file that a fuzzing run keeps: JSON lines that are only appended to, and beside them how far each worker has come."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import BackendError, FindingsError, KernelError
from ..kernel import Kernel
from ..problem import Problem
from ..source import header_digest
from .examples import Example
from .provenance import package_versions
from .verify import Outcome


@dataclass(frozen=True)
class Finding:
    """A failing example as the file has it; `message` to `got` are those of `Outcome`, `path` is that of a file of one's own."""

    kernel: str
    path: str | None
    source: str  # digest of the kernel's source
    tunables: dict[str, int]
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
        tunables = f", tunables={self.tunables}" if self.tunables else ", tunables={}"
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


def source_digest(kernel: Kernel) -> str:
    return hashlib.sha256(kernel.source.encode()).hexdigest()[:16]


def surroundings() -> dict[str, str]:
    """Return what a finding depends on besides the kernel's source: versions, the compiler, the headers."""
    from ..backends.host import HostBackend

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
    for event, fields in _lines(path):
        try:
            if event == "run":
                recorded = {str(name): str(value) for name, value in fields["surroundings"].items()}
            elif event in ("failure", "finding"):
                found = _finding(fields)
                Problem.parse(found.problem)
                if event == "failure":
                    pending.append(found)
                else:
                    findings.setdefault(found.key, found)
            elif event == "shrunk":
                pending.remove(_finding(fields))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise FindingsError(f"findings file {str(path)!r}: not a line of this version: {event} ({error})") from None
    return list(findings.values()), pending, recorded


def _finding(fields: dict[str, Any]) -> Finding:
    return Finding(**{**fields, "index": tuple(fields["index"]) if fields["index"] else None})


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise FindingsError(f"findings file {str(path)!r}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            event = fields.pop("event")
        except (ValueError, KeyError, AttributeError, TypeError):
            if number == len(lines):
                return  # the line that a killed run was writing
            raise FindingsError(f"findings file {str(path)!r}, line {number}: is no JSON object with an event") from None
        yield event, fields


class Journal:
    """Appends what a run finds, and keeps how far it is; a killed run loses nothing that was handed over.

    Attributes:
        findings: known ones by key.
        pending: failures that an earlier run did not get to shrink.
        progress: what the last call of `save` was given, of an earlier run too; {} for a new file.

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
            os.write(self._file, b"\n") if _is_json(path) else os.ftruncate(self._file, path.read_bytes().rfind(b"\n") + 1)
        self.progress: dict[str, Any] = {}
        saved = os.pread(self._progress, 1 << 20, 0)
        if size and saved.strip():
            try:
                self.progress = json.loads(saved)
            except ValueError:
                self.progress = {}  # the machine went down in the middle of a write

    def write(self, event: str, **fields: Any) -> None:
        """Append one line."""
        os.write(self._file, (json.dumps({"event": event, **fields}) + "\n").encode())

    def add(self, event: str, found: Finding) -> None:
        """Append a "failure" as it came, the "finding" it was shrunk to, and that the failure was "shrunk"."""
        self.write(event, **asdict(found))
        if event == "finding":
            self.findings[found.key] = found

    def save(self, progress: dict[str, Any]) -> None:
        """Replace the progress in one write, padded to cover the last one."""
        text = json.dumps(progress)
        os.pwrite(self._progress, text.ljust(-(-len(text) // 1024) * 1024).encode(), 0)

    def close(self) -> None:
        os.close(self._file)
        os.close(self._progress)


def _is_json(path: Path) -> bool:
    try:
        json.loads(path.read_text().rsplit("\n", 1)[-1])
    except ValueError:
        return False
    return True


def differences(recorded: dict[str, str], now: dict[str, str], found: Finding, kernel: Kernel | None) -> list[str]:
    """Return what has changed since a finding was recorded, one sentence a difference."""
    changed = [f"{n} was {recorded.get(n, 'none')}, is {now.get(n, 'none')}" for n in {**recorded, **now} if recorded.get(n) != now.get(n)]
    if kernel is not None and source_digest(kernel) != found.source:
        changed.append(f"the source of {found.kernel} was {found.source}, is {source_digest(kernel)}")
    return changed


def current_kernel(found: Finding) -> Kernel | None:
    """Return the kernel of that name or path as it is now, None if it is gone."""
    from .check import resolve

    try:
        return resolve(found.path or found.kernel)
    except KernelError:
        return None
