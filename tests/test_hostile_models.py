"""Files of `tests/hostile/`: what `convt3d kernelbench` says of each, and that nothing of it stays.

The first word of a file's docstring is the verdict: the kind of a finding, or "passed", after which may stand "no gain" (it must not seem
quicker than it is) or "20 ms" (it sleeps so long, whatever its clock says).
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from selection import some

from cupy_convt3d import scratch
from cupy_convt3d.cli import main
from cupy_convt3d.errors import KernelError
from cupy_convt3d.lab import kernelbench
from cupy_convt3d.lab.kernelbench import judge

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).parent / "hostile"
REFERENCE = FOLDER / "model_reference.py"
FILES = sorted(set(FOLDER.glob("model_*.py")) - {REFERENCE})
ON_A_GPU = [
    "bfloat16", "exit_in_forward", "honest_batch_norm", "honest_channels_last", "honest_dropout", "honest_half",
    "honest_in_place", "honest_nested", "honest_plain", "late_stream", "memo_memory", "memo_pointer", "memo_sample",
    "memo_weight", "rolled", "unwritten", "wrong_after_twenty_five",
]
LIMIT_S = {"hang": 4.0}  # others end by themselves


def descendants() -> set[int]:
    """Processes whose line of parents leads to this one; those of the supervisor, which adopts orphans, among them."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@pytest.fixture(scope="module")
def supervisor() -> Iterator[kernelbench.Supervisor]:
    """One for all: torch is imported once. One thread: other tests may run beside this one."""
    with pytest.MonkeyPatch.context() as patch, kernelbench.Supervisor() as one:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield one


def expected(path: Path) -> tuple[str, str]:
    """The verdict and what is said of the time."""
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    verdict, _, of_time = text.partition(":")[0].partition(", ")
    return verdict, of_time


def test_there_are_many() -> None:
    assert len(FILES) >= 100
    assert {expected(path)[0] for path in FILES} == {
        "passed",
        "crash",
        "hang",
        "error",
        "wrong result",
        "cached output",
        "unjoined work",
        "output not fully written",
        "precision lowered",
        "inputs modified",
        "problem",
    }


def examine(path: Path, device: str, supervisor: kernelbench.Supervisor) -> kernelbench.Verdict:
    """The verdict of a file, which is the expected one, with times only where it passed."""
    verdict, of_time = expected(path)
    ((reference, candidate),) = kernelbench.pair([path, REFERENCE])
    limit_s = LIMIT_S.get(verdict, 120.0)
    found = kernelbench.examine(reference, candidate, time_limit_s=limit_s, device=device, supervisor=supervisor)
    assert verdict in ([finding.kind for finding in found.findings] or ["passed"]), str(found)
    assert all(c.isprintable() or c == "\n" for c in str(found))
    assert all(line.startswith("  ") for line in str(found).splitlines()[1:])
    assert all(len(finding.detail) < 4000 for finding in found.findings)
    assert set(found.times_ms) == ({"Model", "ModelNew"} if found.passed else set())
    if of_time == "20 ms":
        assert found.times_ms["ModelNew"] > 15, str(found)
    elif of_time == "no gain":  # Model, on a few numbers, is not made slower by the 50 ms that a file has it sleep
        assert found.times_ms["Model"] < 40, str(found)
    return found


@pytest.mark.parametrize("path", some(FILES), ids=lambda path: path.stem)
def test_the_verdict(
    path: Path, supervisor: kernelbench.Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    supervisor.start()
    before = descendants()
    descriptors = len(os.listdir("/proc/self/fd"))
    examine(path, "cpu", supervisor)
    assert descendants() <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    kept = {str(path) for path in scratch.folder().glob("kernelbench-*")}
    assert kept <= {supervisor._folder} and not any(map(os.listdir, kept))
    assert not list(tmp_path.iterdir()), "it has no business in the folder of whoever calls"


def test_rounding_near_many_borders_is_no_wrong_result(supervisor: kernelbench.Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """For these values `Model` rounds each number as fp64 does, and four are so near a half that another order of the sum does not."""
    monkeypatch.setattr(judge, "secrets", SimpleNamespace(randbits=lambda bits: 243141361658750692, randbelow=lambda end: 0))
    examine(FOLDER / "model_honest_order_of_sums.py", "cpu", supervisor)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_A_GPU)
def test_the_verdict_on_a_gpu(name: str, supervisor: kernelbench.Supervisor) -> None:
    examine(FOLDER / f"model_{name}.py", "cuda", supervisor)


def test_what_values_do_not_tell_is_noted(supervisor: kernelbench.Supervisor) -> None:
    found = examine(FOLDER / "model_honest_constant.py", "cpu", supervisor)
    assert any("the same in all timed calls" in note for note in found.notes)
    found = examine(FOLDER / "model_honest_sorted_lengths.py", "cpu", supervisor)
    assert any("fresh integers the file's:" in note for note in found.notes)
    found = examine(FOLDER / "model_honest_uneven_times.py", "cpu", supervisor)
    assert any("ModelNew's times lie far apart" in note for note in found.notes)


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    """Exit codes and one line for each finding, of several files in one run."""
    files = [str(FOLDER / f"model_{name}.py") for name in ("reference", "exit_at_import", "control_characters")]
    assert main(["kernelbench", *files]) == 1
    printed, warned = capfd.readouterr()
    assert not warned
    assert "model_exit_at_import.py: FAILED\n  crash: ModelNew: exit code 0 while importing the file\n" in printed
    assert r"error: ModelNew while comparing on the file's inputs: ValueError: \x1b[2J\x1b]0;passed\x07 passed" in printed


@pytest.mark.parametrize("limit", ["0", "-1", "nan", "inf", "soon", "1e30"])
def test_a_time_limit_is_positive_and_finite(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    if limit != "1e30":
        with pytest.raises(SystemExit) as refused:
            main(["kernelbench", "--time-limit", limit, str(REFERENCE)])
        assert refused.value.code == 2
        assert "--time-limit" in capsys.readouterr().err
    if limit != "soon":
        with pytest.raises(KernelError, match="must be a positive finite number"):
            kernelbench.examine(REFERENCE, REFERENCE, time_limit_s=float(limit))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_killed_judge_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    mark = f"CONVT3D_TEST_MARK={os.getpid()}.{number}"
    files = [str(FOLDER / f"model_{name}.py") for name in ("reference", "busy_neighbour", "hang")]
    environment = os.environ | dict([mark.split("=")]) | {"TMPDIR": str(tmp_path)}
    judge = subprocess.Popen([sys.executable, "-m", "cupy_convt3d", "kernelbench", *files], env=environment, stdout=subprocess.PIPE)
    assert judge.stdout is not None
    for line in judge.stdout:  # the neighbour's verdict, then that the next file runs
        if b"hang.py: running" in line:
            break
    wait_until(lambda: len(marked(mark)) >= 4)  # judge, supervisor, Model, ModelNew
    time.sleep(1)
    judge.send_signal(number)
    judge.wait(30)
    judge.stdout.close()
    wait_until(lambda: not marked(mark))
    assert {path.name for path in tmp_path.rglob("*")} == {f"convt3d-{os.getuid()}", "lock"}


def marked(mark: str) -> list[int]:
    """Processes with a variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
