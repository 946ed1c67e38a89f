"""Commands that are ended at a random moment: no process is left, no temporary file, and what was recorded is whole."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MODELS = [str(Path(__file__).parent / "hostile" / f"model_{name}.py") for name in ("reference", "honest_plain", "honest_tuple")]
PROBLEM = ["--problem", "n1_c1to2_i3_k3_s2"]
COMMANDS = {
    "bench": ["bench", *PROBLEM, "--kernels", "fprop_gather", "--backend", "host", "--out", "results.json"],
    "check": ["check", "fprop_gather", "--backend", "host"],
    "fuzz": ["fuzz", "fprop_gather", "--backend", "host", "--workers", "2", "--findings", "findings.jsonl"],
    "kernelbench": ["kernelbench", *MODELS, "--fuzz", "50"],
    "mutants": ["mutants", "fprop_gather", "--sample", "4", "--workers", "2", "--kept", "kept.jsonl"],
    "report": ["report", "--out", "report"],
    "tune": ["tune", *PROBLEM, "--kernels", "fprop_gather", "--backend", "host", "--out", "tuning.json"],
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
LATEST_S = 5.0
SEED = random.SystemRandom().randrange(10**6)


def left(temporary: Path) -> set[int]:
    """Return the processes whose temporary directory is this one."""
    mark, found = f"TMPDIR={temporary}\0".encode(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if mark in (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found


def recorded(folder: Path) -> dict[str, list[object]]:
    """Return what the files of data hold, line by line where they are lines; each must be whole but for a last line that was begun."""
    held: dict[str, list[object]] = {}
    for path in folder.glob("*.json*"):
        text = path.read_text()
        if path.suffix == ".jsonl":
            held[path.name] = [json.loads(line) for line in text.split("\n")[:-1]]
        elif text:
            document = json.loads(text)
            held[path.name] = next((value for value in document.values() if isinstance(value, list)), []) if document else []
    return held


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_random_kill_leaves_nothing_and_loses_nothing(name: str, tmp_path: Path) -> None:
    if name == "kernelbench":
        pytest.importorskip("torch")
    generator = random.Random(f"{SEED} {name}")
    temporary, here = tmp_path / "temporary", tmp_path / "here"
    temporary.mkdir()
    here.mkdir()
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": paths}
    before: dict[str, list[object]] = {}
    for number in SIGNALS:
        moment = generator.uniform(0.1, LATEST_S) if number != signal.SIGKILL else generator.uniform(1.0, LATEST_S)
        what = f"seed {SEED}: {name}, {number.name} after {moment:.2f} s"
        log = tmp_path / "log"
        with log.open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "cupy_convt3d", *COMMANDS[name]], cwd=here, env=environment, stdout=said, stderr=said,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what a shell runs in the background ignores it
            )  # fmt: skip
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(moment)
            process.send_signal(number)
            process.wait(30)
        deadline = time.monotonic() + 10
        while left(temporary) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left(temporary), what
        if number == signal.SIGKILL:  # the next process that needs a folder removes this one's
            command = [sys.executable, "-c", "from cupy_convt3d import scratch; scratch.folder()"]
            subprocess.run(command, cwd=here, env=environment, check=True)
        folders = {path.name for path in temporary.rglob("*")} - {"lock", f"convt3d-{os.getuid()}"}
        assert not folders, f"{what}: {sorted(folders)}\n{log.read_text()[-2000:]}"
        after = recorded(here)
        for file, entries in before.items():
            missing = [entry for entry in entries if entry not in after.get(file, [])]
            assert file.endswith(".progress") or not missing, f"{what}: {file} has lost {missing[:2]}"
        before = after


def test_a_ctrl_c_is_answered_when_all_threads_have_ended() -> None:
    """Python 3.11's `Thread.join` takes a thread for ended once a Ctrl-C has interrupted it."""
    program = """
import os, signal, time
from cupy_convt3d.lab.threads import share

def work(jobs):
    for job in jobs:
        if job == 0:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.write(1, f"ended {job}\\n".encode())  # as a whole: threads' prints run into one another

try:
    share(range(9), 3, work)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    *ended, last = done.stdout.splitlines()
    assert sorted(ended[:3]) == ["ended 0", "ended 1", "ended 2"] and len(ended) <= 6 and last == "interrupted", done.stdout


def test_a_ctrl_c_ends_a_check_in_its_middle() -> None:
    """Of a check in a thread of `share` no more examples are run; it would take minutes."""
    program = """
import os, signal, time
from cupy_convt3d import check
from cupy_convt3d.lab.threads import share

done = []

def show(count, total, what):
    done.append(count)
    if count == 20:
        os.kill(os.getpid(), signal.SIGINT)

def work(jobs):
    for job in jobs:
        check(job, backend="host", dtypes=["fp32"], examples=2000, progress=show)

try:
    share(["fprop_gather", "fprop_tiled"], 1, work)
except KeyboardInterrupt:
    print("interrupted", len(done), flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    word, count = done.stdout.split()
    assert word == "interrupted" and 20 <= int(count) < 2000, done.stdout + done.stderr
