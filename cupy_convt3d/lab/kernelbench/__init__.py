"""Examines KernelBench-style files: a stranger's `ModelNew` against the file's `Model`, with a time limit.

A file gives `Model`, `ModelNew` or both, and with `Model` come `get_inputs` and `get_init_inputs`. Three processes take part: this one
is the judge (`kernelbench_judge`), which holds the clock and the comparison and only reads a file's text; one child runs `Model`, another
`ModelNew` (`kernelbench_child`). A fourth starts and ends the children (`kernelbench_processes`).
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import BackendError, KernelError, printable
from ...limits import MOST_SECONDS
from .processes import Supervisor

TIME_LIMIT_S = 600.0
_NVCC = Path("/usr/local/cuda/bin/nvcc")  # where torch looks too


@dataclass(frozen=True)
class Finding:
    """What is wrong with a candidate: `kind` names the mistake or cheat, `detail` says what was seen.

    The kind "problem" is no fault of the candidate: what it is to be held against cannot be judged here.
    """

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True)
class Verdict:
    """What the judge found.

    Attributes:
        findings: none means that it passed.
        notes: what is worth knowing and no failure.
        times_ms: medians of `Model` and `ModelNew`, each call on values of its own; empty where the candidate is wrong.
        handing_ms: what handing the tensors over takes, which is not in these.
        calls: how many of each were timed.
        fuzzed: how many other problems were drawn for it.
    """

    candidate: Path
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    times_ms: dict[str, float] = field(default_factory=dict)
    handing_ms: float = 0.0
    device: str = ""
    calls: int = 0
    fuzzed: int = 0

    @property
    def passed(self) -> bool:
        return not self.findings

    @property
    def failed(self) -> bool:
        """Whether the candidate is at fault; it neither passed nor failed where the problem cannot be judged."""
        return any(finding.kind != "problem" for finding in self.findings)

    def __str__(self) -> str:
        lines = [f"{self.candidate}: {'passed' if self.passed else 'FAILED' if self.failed else 'cannot be judged'}"]
        lines += [f"  {finding}".replace("\n", "\n    ") for finding in self.findings]
        lines += [f"  note: {note}".replace("\n", "\n    ") for note in self.notes]
        if self.fuzzed:
            lines.append(f"  {self.fuzzed} other problems drawn")
        if self.times_ms:
            reference, candidate, handing = self.times_ms["Model"], self.times_ms["ModelNew"], self.handing_ms
            ratio = f", {reference / candidate:.2f}x" if candidate else ""
            if handing > (candidate + handing) / 3:
                ratio += f", {(reference + handing) / (candidate + handing):.2f}x with the {handing:.3f} ms of handing over"
            lines.append(
                f"  Model {reference:.3f} ms, ModelNew {candidate:.3f} ms{ratio} "
                f"(medians of {self.calls} calls, each on new values, {self.device})"
            )
        return printable("\n".join(lines))


def pair(files: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Return (reference, candidate) for each file with a `ModelNew`; one without a `Model` of its own takes the other file's.

    Raises:
        KernelError: a file cannot be read or parsed, has neither class, or its `Model` is missing or ambiguous.
    """
    classes = {path: _classes(path) for path in files}
    references = [path for path, names in classes.items() if "Model" in names and "ModelNew" not in names]
    pairs = []
    for path, names in classes.items():
        if not names & {"Model", "ModelNew"}:
            raise KernelError(printable(f"{path}: has neither a class Model nor a class ModelNew"))
        if "ModelNew" not in names:
            continue
        if "Model" not in names and len(references) != 1:
            raise KernelError(
                printable(f"{path}: has no class Model, and {len(references)} of the other files have one alone; give exactly one")
            )
        pairs.append((path if "Model" in names else references[0], path))
    if not pairs:
        raise KernelError(printable(f"{', '.join(map(str, files))}: none has a class ModelNew"))
    return pairs


def _classes(path: Path) -> set[str]:
    try:
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes(), str(path))  # bytes: a byte order mark and a declared encoding count
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError | MemoryError) else str(error)  # Python's parser says no more
        raise KernelError(printable(f"{path}: cannot be read: {why}")) from None
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def examine(
    reference: Path,
    candidate: Path,
    *,
    time_limit_s: float = TIME_LIMIT_S,
    fuzz: int = 0,
    seed: int = 0,
    device: str | None = None,
    supervisor: Supervisor | None = None,
) -> Verdict:
    """Return what the judge finds about a candidate; one that crashes or hangs fails.

    Args:
        fuzz: how many problems with other constructor arguments and shapes to draw, where `Model`'s signature allows.
        seed: of the fresh inputs and of the draws; those of timed calls cannot be known.
        device: "cuda" or "cpu"; None: cuda where there is a GPU.
        supervisor: starts the children; one may serve many examinations. None: one for this.

    Raises:
        KernelError: the time limit is no positive finite number, or larger than a million.
        BackendError: PyTorch is missing, or the system is not Linux.
    """
    if not (0 < time_limit_s <= MOST_SECONDS):
        raise KernelError(f"time_limit_s is {time_limit_s}; must be a positive finite number of at most {MOST_SECONDS:g}")
    if _lacks_nvcc(candidate):
        detail = (
            "builds CUDA code with torch.utils.cpp_extension (load_inline), which needs nvcc, and there is none on PATH, in CUDA_HOME "
            "or in /usr/local/cuda; install the CUDA toolkit, or make the kernel a .cu file for `convt3d check`"
        )
        return Verdict(candidate, (Finding("problem", detail),))
    if supervisor is None:
        with Supervisor() as own:
            return examine(
                reference, candidate, time_limit_s=time_limit_s, fuzz=fuzz, seed=seed, device=device, supervisor=own
            )
    deadline = time.monotonic() + time_limit_s
    supervisor.start()  # which imports torch while we do
    torch = _torch()
    from . import judge as kernelbench_judge
    from .match import Match, Report
    from .rules import Wrong

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    report = Report()
    match = Match(report, supervisor, (reference, candidate), device, deadline)
    try:
        kernelbench_judge.examine(match, seed)
        if fuzz:
            from .fuzz import search  # imports Hypothesis

            search(match, fuzz, seed)
    except Wrong as wrong:
        report.find(wrong)
    except (KernelError, BackendError):
        raise
    except Exception as error:  # what this file did to the judge; other files are examined
        report.find(Wrong("error", f"the judge while {report.doing}: {printable(f'{type(error).__name__}: {error}', 600)}"))
    finally:
        supervisor.clear()
        match.close()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    findings = tuple(
        Finding(kind, f"not done after {time_limit_s:g} s; {detail}" if kind == "hang" else detail) for kind, detail in report.findings
    )
    times = {} if findings else report.times_ms
    return Verdict(
        candidate, findings, tuple(report.notes), times, report.handing_ms, name if times else "", report.calls, report.fuzzed
    )


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        raise BackendError("kernelbench needs PyTorch: `pip install 'cupy-convt3d[torch]'`") from None
    return torch


def _lacks_nvcc(candidate: Path) -> bool:
    """Whether a file builds CUDA code, and there is no nvcc; one that builds C++ alone needs none."""
    text = candidate.read_text(errors="replace")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    has_nvcc = shutil.which("nvcc") or (home and (Path(home) / "bin" / "nvcc").exists()) or _NVCC.exists()
    return "cpp_extension" in text and bool("cuda_sources" in text or re.search(r"\.cu[\"']", text)) and not has_nvcc
