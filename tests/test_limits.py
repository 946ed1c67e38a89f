"""Limits of memory and time: what cgroups and the process itself set counts, and large problems have more time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cupy_convt3d import limits
from cupy_convt3d.lab import check as lab_check
from cupy_convt3d.lab.run.verify import Outcome
from cupy_convt3d.limits import memory_bytes, share_of_memory, time_limit_s
from cupy_convt3d.problem import Problem


def cgroups(monkeypatch: pytest.MonkeyPatch, root: Path, own: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "own").write_text(own)
    monkeypatch.setattr(limits, "_CGROUPS", root)
    monkeypatch.setattr(limits, "_OWN_CGROUP", root / "own")


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "3000000\n"}, 3_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "2000000\n"}, 2_000_000),
        ("0::/\n", {"memory.max": "1000000\n"}, 1_000_000),
        ("4:cpu,memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "5000000\n"}, 5_000_000),
        ("4:cpu:/x\n", {"memory/x/memory.limit_in_bytes": "5000000\n"}, None),
        ("0::/a\n", {"a/memory.max": "max\n"}, None),
        ("", {}, None),
    ],
)
def test_cgroups_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: dict[str, str], expected: int | None) -> None:
    cgroups(monkeypatch, tmp_path, "", {})
    without = memory_bytes()
    cgroups(monkeypatch, tmp_path, own, files)
    assert memory_bytes() == (without if expected is None else expected)
    assert share_of_memory(4) == memory_bytes() // 8


def test_a_hard_limit_of_the_process_counts() -> None:
    code = "from cupy_convt3d.limits import memory_bytes; print(memory_bytes())"
    command = ["sh", "-c", f'ulimit -v 4000000; exec {sys.executable} -c "{code}"']
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert int(done.stdout) == min(4_000_000 * 1024, memory_bytes())


def test_time_follows_the_work() -> None:
    tiny, large = Problem(1, 1, 1, 1, 1), Problem(1, 64, 64, 32, 3, 2, 1)
    assert 10.0 <= time_limit_s(tiny, 10.0) < 10.1 and time_limit_s(tiny, 0.5) < 0.6
    assert time_limit_s(large, 10.0) > 10.0 + large.flop / 1e8


def test_check_gives_each_example_its_time() -> None:
    class Recorder:
        sanitizer, backend, kernel = None, "host", None
        time_limit_s = 0.0

        def ask(self, problem: Problem, dtype: str, kind: str, seed: int) -> Callable[[], Outcome]:
            return lambda: Outcome(True)

    from cupy_convt3d import registry

    search = lab_check._Search(registry.kernel("fprop_gather"), "host", None, None, None, None, 7.0)
    search.worker = worker = Recorder()  # type: ignore[assignment]
    problem = Problem(1, 16, 16, 16, 3)
    search.run("named", problem, "fp32", "exact", 0)
    assert worker.time_limit_s == time_limit_s(problem, 7.0) > 7.0
    search.run("far", problem, "fp32", "far", 0)
    assert worker.time_limit_s == 7.0, "a far example would have days"
