"""Examines KernelBench-style files: a stranger's `ModelNew` against the file's `Model`, in a child process with a time limit.

A file gives `Model`, `ModelNew` or both, and with `Model` come `get_inputs` and `get_init_inputs`. The parent only reads a file's
text; the child, `kernelbench_child`, runs it.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import KernelError

TIME_LIMIT_S = 600.0


@dataclass(frozen=True)
class Finding:
    """What is wrong with a candidate: `kind` names the mistake or cheat, `detail` says what was seen."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True)
class Verdict:
    """What the child found.

    Attributes:
        findings: none means that it passed.
        notes: what is worth knowing and no failure.
        times_ms: medians of `Model` and `ModelNew`, the L2 flushed before each call; empty where the candidate is wrong.
        fuzzed: how many other problems were drawn for it.
    """

    candidate: Path
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    times_ms: dict[str, float] = field(default_factory=dict)
    device: str = ""
    fuzzed: int = 0

    @property
    def passed(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        lines = [f"{self.candidate}: {'passed' if self.passed else 'FAILED'}"]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [f"  note: {note}" for note in self.notes]
        if self.fuzzed:
            lines.append(f"  {self.fuzzed} other problems drawn")
        if self.times_ms:
            reference, candidate = self.times_ms["Model"], self.times_ms["ModelNew"]
            lines.append(
                f"  Model {reference:.3f} ms, ModelNew {candidate:.3f} ms, {reference / candidate:.2f}x "
                f"(medians, caches flushed before each call, {self.device})"
            )
        return "\n".join(lines)


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
            raise KernelError(f"{path}: has neither a class Model nor a class ModelNew")
        if "ModelNew" not in names:
            continue
        if "Model" not in names and len(references) != 1:
            raise KernelError(f"{path}: has no class Model, and {len(references)} of the other files have one alone; give exactly one")
        pairs.append((path if "Model" in names else references[0], path))
    if not pairs:
        raise KernelError(f"{', '.join(map(str, files))}: none has a class ModelNew")
    return pairs


def _classes(path: Path) -> set[str]:
    try:
        tree = ast.parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise KernelError(f"{path}: cannot be read: {error}") from None
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def examine(reference: Path, candidate: Path, *, time_limit_s: float = TIME_LIMIT_S, fuzz: int = 0, seed: int = 0) -> Verdict:
    """Return what a child process finds about a candidate; one that crashes or hangs fails.

    Args:
        fuzz: how many problems with other constructor arguments and shapes to draw, where `Model`'s signature allows.
        seed: of the fresh inputs and of the draws.

    Raises:
        KernelError: the file builds with nvcc, and there is none.
    """
    _require_nvcc(candidate)
    with tempfile.TemporaryDirectory(prefix="convt3d-kernelbench-") as directory:
        result, log = Path(directory) / "result.json", Path(directory) / "log"
        job = {"reference": str(reference.resolve()), "candidate": str(candidate.resolve()), "fuzz": fuzz, "seed": seed}
        command = [sys.executable, "-m", "cupy_convt3d.lab.kernelbench_child", json.dumps(job), str(result)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [_root(), os.environ.get("PYTHONPATH")]))}
        with log.open("wb") as output:
            child = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
            try:
                code = child.wait(time_limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:  # it may have started processes of its own
                _kill_group(child)
        found: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        tail = "\n    ".join(log.read_text(errors="replace").strip().splitlines()[-8:])
    findings = [Finding(**finding) for finding in found.pop("findings", [])]
    if code is None:
        findings.append(Finding("hang", f"not done after {time_limit_s:g} s; killed while {found.pop('doing', 'starting')}"))
    elif code != 0:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        findings.append(Finding("crash", f"{how} while {found.pop('doing', 'starting')}\n    {tail}"))
    found.pop("doing", None)
    return Verdict(candidate, tuple(findings), tuple(found.pop("notes", ())), **found)


def _root() -> str:
    return str(Path(__file__).parents[2])


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        child.wait()


def _require_nvcc(candidate: Path) -> None:
    text = candidate.read_text()
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    has_nvcc = shutil.which("nvcc") or (home and (Path(home) / "bin" / "nvcc").exists()) or Path("/usr/local/cuda/bin/nvcc").exists()
    if "cpp_extension" in text and ("cuda_sources" in text or ".cu" in text) and not has_nvcc:
        raise KernelError(
            f"{candidate}: builds CUDA code with torch.utils.cpp_extension (load_inline), which needs nvcc, and there is none on PATH, "
            "in CUDA_HOME or in /usr/local/cuda; install the CUDA toolkit, or make the kernel a .cu file for `convt3d check`"
        )
