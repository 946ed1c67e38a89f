"""Kernels that are out for the process that checks them: each is one failed example, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from cupy_convt3d import cli, scratch
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.fuzz import fuzz
from cupy_convt3d.lab.run import arena, process, sandbox, worker
from cupy_convt3d.lab.run.judge import Judge
from cupy_convt3d.lab.run.worker import Worker
from cupy_convt3d.lab.tune import carry
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernel
from cupy_convt3d.source import PACKAGE, Instance

KERNELS = Path(__file__).parent / "hostile" / "kernels"
PROBLEM = Problem.parse("n1_c1to1_i1x1x2_k1")
# What is said of each, the start of it.
SAID = {
    "abort": "crash: the kernel's process was ended by SIGABRT",
    "allocate": "crash: the kernel's process was ended by SIGSEGV",
    "close_files": "crash: the kernel's process ended with exit code 1",
    "close_files_and_wait": "crash: the kernel has closed the files of its process",
    "corrupt_heap": "crash: the kernel's process was ended by SIG",
    "daemon": "crash: the kernel has started a process",
    "deep_json": "crash: the kernel has broken into the talk",
    "endless": "hang",
    "exit_0": "crash: the kernel's process ended with exit code 0",
    "exit_99": "crash: the kernel's process ended with exit code 99",
    "flood": "hang",
    "flood_and_pass_on": "crash: the kernel's process ended with exit code 3 (\\x1b]0;title\\x07 the last line)",
    "flood_error": "hang",
    "forge_pickle": "crash: the kernel has broken into the talk",
    "forge_replies": "crash: the kernel has broken into the talk",
    "forge_through_proc": "crash: the kernel has ended or stopped the process that judges it (hang: it did not answer within",
    "forge_verdicts": "crash: the kernel has broken into the talk",
    "fork_and_exit": "crash: the kernel's process ended with exit code 0",
    "fork_and_return": "crash: the kernel has started a process",
    "fork_and_sleep": "crash: the kernel has started a process",
    "fork_in_thread": "crash: the kernel has started a process",
    "garbage_on_files": "crash: the kernel has broken into the talk",
    "ignore_signals": "hang",
    "kill_group": "crash: the kernel's process was ended by SIGKILL",
    "kill_parent": "crash: the kernel has ended or stopped the process that judges it (ended by SIGKILL)",
    "lengthen_memory": "never written; 2 of 2 elements",
    "limit_parent": "crash: the kernel's process was ended by SIGABRT",
    "load_endless": "hang",
    "load_forks": "crash: the kernel has started a process",
    "longjmp": "crash: the kernel's process was ended by SIG",
    "open_memory": "crash: the kernel's process ended with exit code 40",
    "shorten_memory": "never written; 2 of 2 elements",
    "stop": "hang",
    "stop_parent": "crash: the kernel has ended or stopped the process that judges it (hang: it did not answer within",
    "terminate_parent": "crash: the kernel has ended or stopped the process that judges it",
    "throw_exception": "crash: the kernel's process was ended by SIGABRT",
    "write_everywhere": "out of bounds: ",
    "write_input": "input was written to",
}
# Data that is none, or that would be code: by the command that reads files of that name, and what is said behind the file's own.
DATA = Path(__file__).parent / "hostile" / "data"
READ_BY = {
    "calls": ["compile"],
    "database": ["tune", "--backend", "host", "--problem", "n1_c1to1_i3_k1", "--kernels", "fprop_gather", "--out"],
    "declaration": ["check", "--backend", "host", "--examples", "0"],
    "explained": ["mutants", "fprop_gather", "--explained"],
    "findings": ["fuzz", "--replay", "--findings"],
    "sweep": ["calibrate"],
}
SAID_OF_DATA = {
    "calls_precision_is_a_list.json": "': call 1: precision=['fp32']: must be text",
    "calls_problem_without_end.json": "': call 1: problem: name='n1_c4to4_i999",
    "database_code_in_tunables.json": "', line 2: tunables.TILE_DEPTH='1);} static int x",
    "database_cut_off.json": "': is no JSON: ",
    "database_instance_of_another_precision.json": "', line 2: instance='fp16': must be one of fp32",
    "database_time_is_no_number.json": "', line 2: median_ms=nan: must be from",
    "declaration_call_of_a_module.cu": "': grid: expression \"__import__('os').getpid()\": only min, max,",
    "declaration_includes_a_password_file.cu": ".cu:9: #include of /etc/passwd lies outside of the kernel's folder",
    "declaration_name_outside.cu": "': its declaration has unknown keys ['name']",
    "declaration_negative_shared_memory.cu": ": shared_bytes=-16: must be from 0 to",
    "declaration_number_as_text.cu": "': block: expression '1.5': Constant is not allowed",
    "declaration_power_without_end.cu": "': grid: expression '9 ** 9 ** 9 ** 9': BinOp is not allowed",
    "declaration_shared_memory_of_a_terabyte.cu": ": shared_bytes=1099511627776: must be from 0 to",
    "declaration_text_arithmetic.cu": "': grid: expression \"'9' * 1000000000\": Constant is not allowed",
    "declaration_too_deep.cu": ": has 6001 characters, the limit is 2000",
    "explained_verdict_is_code.toml": "': verdict=\"__import__('os').system('touch pwned')\": must be equivalent or survived",
    "findings_code_in_tunables.jsonl": "', line 2: tunables.TILE_DEPTH='1);} static int x",
    "findings_path_of_a_pipe.jsonl": "', line 1: path='/dev/stdin': must end with .cu",
    "findings_too_deep.jsonl": "', line 1: ",
    "findings_unknown_dtype.jsonl": "', line 1: dtype='int8': must be one of",
    "sweep_of_nothing.json": "': card=None: must be an object",
}
QUICK = (
    *("forge_replies", "garbage_on_files", "exit_99", "kill_parent", "fork_and_exit", "daemon"),
    *("flood_and_pass_on", "write_input", "fork_in_thread", "open_memory"),
)


def processes() -> set[int]:
    """Return this process's children, and the processes that this test's temporary directory is that of."""
    mark, found = f"TMPDIR={tempfile.gettempdir()}".encode(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or lets nobody look, as the judge does
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(entry.name))
            if mark in (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found - {os.getpid()}


def temporary_files() -> set[Path]:
    return {*scratch.folder().iterdir(), *Path(tempfile.gettempdir()).iterdir()}


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same processes and temporary files after the test as before, and nothing in the directory it runs in."""
    (tmp_path / "here").mkdir()
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(scratch, "_folders", {})
    files, before = temporary_files(), processes()
    yield
    deadline = time.monotonic() + 5
    while processes() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes() - before
    assert temporary_files() == files
    assert not list(Path().iterdir())


@dataclass
class Done:
    code: int
    out: str
    err: str


def run_alone(line: list[str]) -> Done:
    """Run the command line in a process that has no pipes but its own: a kernel that writes to all of its caller's meets no others."""
    patched = "worker._JUDGING_LIMIT_S, worker._CLOSE_LIMIT_S, shrink.shrink = -27.0, 1.0, lambda problem, *rest: problem"
    program = f"from cupy_convt3d.lab.run import worker; from cupy_convt3d.lab.check import shrink; {patched}"
    program += f"; import sys; from cupy_convt3d import cli; sys.exit(cli.main({line!r}))"
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
        done = subprocess.run(
            [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, timeout=120
        )
        out.seek(0), err.seek(0)
        return Done(done.returncode, out.read(), err.read())


def test_every_kernel_of_the_corpus_has_its_line() -> None:
    assert sorted(SAID) == sorted(path.stem for path in KERNELS.glob("*.cu"))


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in SAID])
def test_a_hostile_kernel_fails_in_one_line(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_convt3d.lab.check.shrink.shrink", lambda problem, *rest: problem)
    if name == "stop_parent":  # what a judge has to answer in beside the launches
        monkeypatch.setattr(worker, "_JUDGING_LIMIT_S", -27.0)
        monkeypatch.setattr(worker, "_CLOSE_LIMIT_S", 1.0)
    begun = time.monotonic()
    line = ["check", str(KERNELS / f"{name}.cu"), "--backend", "host", "--problem", str(PROBLEM), "--kind", "exact"]
    if name == "forge_through_proc":
        shown = run_alone(line)
    else:
        code = cli.main(line)
        shown = Done(code, *capsys.readouterr())
    assert shown.code == 1
    rights, verdict, problem, message, *rest = shown.out.splitlines()
    assert rights.startswith(f"{name}: running its code as it is, with your rights, in a child process")
    assert re.match(rf"{name} on host \(fp32\): FAILED; 1 examples of 1 distinct problems in \d", verdict)
    assert str(PROBLEM) in problem
    assert message.strip().startswith(SAID[name])
    assert rest[-1].strip().startswith("reproduce: ") and len(rest) <= 2
    assert shown.out.replace("\n", "").isprintable() and not shown.err
    assert time.monotonic() - begun < 90


def test_every_data_file_of_the_corpus_has_its_line() -> None:
    assert sorted(SAID_OF_DATA) == sorted(path.name for path in DATA.iterdir())


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", SAID_OF_DATA)
def test_hostile_data_is_refused_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, before = DATA / name, (DATA / name).read_bytes()
    code = cli.main([*READ_BY[name.partition("_")[0]], str(path)])
    shown = capsys.readouterr()
    if "_shared_memory" in name:  # its value is known when there is a problem
        assert code == 1 and not shown.err
        assert "nothing was run" in shown.out and SAID_OF_DATA[name] in shown.out
    else:
        assert code == 2
        (line,) = shown.err.splitlines()
        assert line.startswith("convt3d: error: ") and path.stem in line and SAID_OF_DATA[name] in line and line.isprintable()
        assert not shown.out
    assert path.read_bytes() == before


@pytest.mark.usefixtures("nothing_left")
def test_a_hostile_kernel_does_not_end_a_fuzz(tmp_path: Path) -> None:
    """The kernels of the others are checked on, and what failed is written down."""
    names = ("kill_parent", "exit_99", "garbage_on_files", "limit_parent")
    kernels = [*(Kernel.from_file(KERNELS / f"{name}.cu") for name in names), kernel("fprop_gather")]
    report = fuzz(kernels, backend="host", findings=tmp_path / "f.jsonl", examples=12, workers=1, seed="x", time_limit_s=1)
    assert {finding.kernel: finding.message[: len(SAID[finding.kernel])] for finding in report.findings} == {n: SAID[n] for n in names}
    assert report.coverage["fprop_gather"].failures == 0 < report.coverage["fprop_gather"].examples
    assert report.restarts >= 3
    assert json.loads((tmp_path / "f.jsonl.progress").read_text())["running"] == {}


@pytest.mark.usefixtures("nothing_left")
def test_what_a_kernel_did_to_its_process_is_no_other_kernels(tmp_path: Path) -> None:
    """Neither in a fuzz, which runs kernels by turns, nor for kernels of strangers; those that shipped share a process."""
    text = (KERNELS / "exit_0.cu").read_text()
    alarm = "signal(SIGALRM, SIG_DFL); itimerval soon = {{0, 3000}, {0, 3000}}; setitimer(ITIMER_REAL, &soon, nullptr); output[0] = 7;"
    late = Kernel.from_source("#include <csignal>\n#include <sys/time.h>\n".join(["", text.replace("_exit(0);", alarm)]), "late")
    report = fuzz([late, kernel("fprop_gather")], backend="host", findings=tmp_path / "f.jsonl", examples=30, workers=1, seed="x")
    assert report.coverage["fprop_gather"].failures == 0 < report.coverage["fprop_gather"].examples
    assert {finding.kernel for finding in report.findings} == {"late"}
    with Worker(kernel("fprop_gather"), "host") as worker:
        for shipped in ("fprop_gather", "fprop_tiled"):
            worker.kernel = kernel(shipped)
            assert worker.verify(PROBLEM, "fp32", "exact", 0).ok and worker.restarts == 0
        worker.kernel = late
        worker.verify(PROBLEM, "fp32", "exact", 0)
        restarts = worker.restarts
        worker.kernel = kernel("fprop_gather")
        assert restarts > 0 and worker.verify(PROBLEM, "fp32", "exact", 0).ok and worker.restarts > restarts


def test_nothing_takes_the_place_of_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what decides: the judge, what carries entries on, the command."""
    folder = tmp_path / "shadows"
    folder.mkdir()
    (folder / "json.py").write_text('open(__file__ + ".ran", "w")')
    monkeypatch.chdir(folder)
    path = os.pathsep.join(["", *map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), path]))
    with Worker(kernel("fprop_gather"), "host") as worker:
        assert worker.verify(PROBLEM, "fp32", "exact", 0).ok
    tree = carry._Tree(PACKAGE.parent)
    assert "error" in tree.ask("nothing")
    tree.close()
    statement = "import cupy_convt3d, os; print(cupy_convt3d.__file__, os.path.abspath('.') in sys.path)"
    found, environment = process.python(statement, last=["."])
    said = subprocess.run(found, env=environment, capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(PACKAGE / "__init__.py"), "True"]
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    subprocess.run([sys.executable, "-m", "cupy_convt3d", "check", "nobody"], capture_output=True, check=False)
    assert not (folder / "json.py.ran").exists()


def test_nobody_inspects_a_process_that_has_a_worker() -> None:
    """In a process of its own: other tests have workers too."""
    program = """
import gc
from cupy_convt3d.lab.run import process
from cupy_convt3d.lab.run.worker import Worker
from cupy_convt3d.registry import kernel

def inspectable():
    return process._prctl(process._IS_DUMPABLE) == 1

before = inspectable()
workers = [Worker(kernel("fprop_gather"), "host") for _ in range(3)]
workers.pop().close()
one_closed = inspectable()
workers.pop().close()
workers.pop()._end()  # and is forgotten
gc.collect()
print(before, one_closed, inspectable())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True"], done.stdout + done.stderr


def test_memory_that_was_made_longer_is_mapped_as_far_as_it_is_used() -> None:
    """Without guards, as under a sanitizer; with them it cannot be made longer."""
    plain, guarded = arena.Arena(), arena.GuardedArena()
    plain.lay_out({"first": np.zeros(8)})
    os.ftruncate(plain.descriptor, 1 << 62)
    _, views = plain.lay_out({"second": np.arange(1 << 20)})
    assert views["second"].sum() == np.arange(1 << 20).sum()
    with pytest.raises(PermissionError):
        os.ftruncate(guarded.descriptor, 1 << 62)


def _judge(error: Exception, monkeypatch: pytest.MonkeyPatch, has_run: bool = True) -> Judge:
    def fail(*arguments: object) -> None:
        raise error

    judge = Judge(("host", None, True))
    judge._instances.append((kernel("fprop_gather"), "fp32"))
    judge.child.has_run = has_run
    monkeypatch.setattr(judge, "_verify", fail)
    return judge


def test_a_judge_that_fails_behind_a_kernel_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=r"ZeroDivisionError: one \(test_hostile.py:\d+\)"):
        _judge(ZeroDivisionError("one"), monkeypatch).answer("verify", 1.0, 0)
    judge = _judge(OSError(24, "Too many open files"), monkeypatch)
    judge.child._limits = {**process.limits(), resource.RLIMIT_NOFILE: (5, 5)}
    with pytest.raises(SystemExit, match="Too many open files"):
        judge.answer("verify", 1.0, 0)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(24, "Too many open files"), r"Too many open files; its limit is \d+ \(ulimit -n\)"),
        (OSError(27, "File too large"), r"File too large; its limit is -?\d+ \(ulimit -f\)"),
        (MemoryError("no 3 GiB"), r"no memory for this example \(no 3 GiB\); its limit"),
    ],
)
def test_what_a_judge_lacks_is_no_verdict(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reply, _ = _judge(error, monkeypatch).answer("verify", 1.0, 0, 0, PROBLEM)
    assert reply["error"] == "BackendError" and re.search(words, reply["text"])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("limit", "number"), [("n", 14), ("f", 8)])
def test_a_limit_that_is_too_low_is_named(limit: str, number: int, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler's errors too, where nothing is in the cache."""
    if compiled:
        for dtype in kernel("fprop_gather").dtypes:
            HostBackend().library(Instance(kernel("fprop_gather"), dtype))
    else:
        monkeypatch.setenv("CONVT3D_CACHE", str(tmp_path / "empty"))
    line = f"ulimit -{limit} {number}; exec {sys.executable} -m cupy_convt3d check fprop_gather --backend host --problem {PROBLEM}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"(ulimit -{limit})" in done.stderr and "Traceback" not in done.stderr


def test_a_right_kernel_passes_with_little_memory() -> None:
    line = f"ulimit -v 1900000; exec {sys.executable} -m cupy_convt3d check fprop_gather --backend host --dtype fp32 --problem {PROBLEM}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("nothing_left")
def test_what_ran_when_fuzz_was_killed_is_named_and_the_second_time_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, source = tmp_path / "f.jsonl", tmp_path / "assassin.cu"
    text = (KERNELS / "endless.cu").read_text()
    HostBackend().library(_instance(Kernel.from_source(text, "assassin")))
    source.write_text(text)
    command = [sys.executable, "-m", "cupy_convt3d", "fuzz", str(source), "--backend", "host", "--workers", "1"]
    for _ in range(2):
        child = subprocess.Popen([*command, "--findings", str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        progress = tmp_path / "f.jsonl.progress"
        seen = progress.read_text() if progress.exists() else ""
        while time.monotonic() < deadline and (not progress.exists() or progress.read_text() in ("", seen)):
            time.sleep(0.05)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert cli.main([*command[3:], "--findings", str(path), "--examples", "0"]) == 1
    shown = capsys.readouterr()
    assert "warning: assassin: the run was killed twice while this ran: @example(" in shown.err
    assert "the run was killed twice while this ran" in path.read_text()


def _instance(known: Kernel) -> Instance:
    return Instance(known, known.dtypes[0])


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_takes_everything_with_it(number: signal.Signals, tmp_path: Path) -> None:
    """While it compiles; a process that is killed leaves its folder, which the next one removes."""
    slow = tmp_path / "slow.cu"
    text = (KERNELS / "exit_0.cu").read_text()
    nested = "template <int A, int B> struct Slow { static const long v = Slow<A - 1, B>::v + Slow<A - 1, B + (1 << A)>::v; };\n"
    nested += "template <int B> struct Slow<0, B> { static const long v = B; };\nstatic const long slow = Slow<22, 0>::v;\n"
    slow.write_text(text.replace('extern "C"', nested + 'extern "C"', 1))
    command = [sys.executable, "-m", "cupy_convt3d", "check", str(slow), "--backend", "host"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (compilers := _compilers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert compilers
    os.kill(child.pid, number)
    assert child.wait(30) == (-number if number == signal.SIGKILL else 128 + number)
    while _compilers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _compilers()
    subprocess.run([sys.executable, "-c", "from cupy_convt3d import scratch; scratch.folder()"], check=True)


def _compilers() -> set[int]:
    """Return the compilers that work in this test's temporary directory."""
    mark, found = tempfile.gettempdir().encode(), set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if b"cc1plus" in command and mark in command:
            found.add(int(entry.name))
    return found


PROBE = """
#include <arpa/inet.h>
#include <csignal>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
static int seen() {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(PORT);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool network = connect(socket(AF_INET, SOCK_STREAM, 0), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  const bool file = access("FILE", R_OK) == 0, other = kill(PID, 0) == 0, writes = access("/usr", W_OK) == 0;
  return 64 + network + 2 * file + 4 * other + 8 * writes;
}
"""


@pytest.mark.parametrize("tool", ["bwrap", "unshare"])
def test_a_sandbox_takes_network_home_and_processes_away(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not _offers(tool):
        pytest.skip(f"the system has no {tool}, or does not let it make namespaces")
    which = sandbox.shutil.which
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None if name == "bwrap" and tool != name else which(name))
    home = tmp_path / "home"
    home.mkdir()
    (home / "secret").write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    text = (KERNELS / "exit_0.cu").read_text().replace("_exit(0)", "_exit(seen())")
    with socket.create_server(("127.0.0.1", 0)) as server:
        names = {"PORT": str(server.getsockname()[1]), "FILE": str(home / "secret"), "PID": str(os.getpid())}
        probe = re.sub("PORT|FILE|PID", lambda found: names[found[0]], PROBE)
        hostile = Kernel.from_source(text.replace('extern "C"', probe + 'extern "C"', 1), "probe")
        codes = []
        for sandboxed in (False, True):
            with Worker(hostile, "host", sandboxed=sandboxed) as worker:
                message = worker.verify(PROBLEM, "fp32", "exact", 0).message
                codes.append(int(re.search(r"exit code (\d+)", message)[1]))  # type: ignore[index]
                worker.kernel = kernel("fprop_gather")
                assert worker.verify(PROBLEM, "fp32", "random", 0).ok
    assert codes[0] & 7 == 7 and codes[1] == 64, codes


def _offers(tool: str) -> bool:
    lines = {
        "bwrap": ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"],
        "unshare": ["unshare", "-Urmpn", "--fork", "--mount-proc", "true"],
    }
    try:
        return subprocess.run(lines[tool], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_a_sandbox_keeps_the_package_wherever_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it was cloned into a temporary directory, which is hidden."""
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: name if name == "bwrap" else None)
    command, _ = sandbox.wrap(["true"], {})
    kept = {command[at + 1] for at, word in enumerate(command) if word == "--ro-bind"}
    package = Path(sandbox.__file__).resolve().parents[2]
    assert {str(package), str(kernel("fprop_gather").path.resolve().parent)} <= kept and (package / "__init__.py").is_file()


def test_a_sandbox_that_cannot_be_had_is_said_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    assert cli.main(["check", "fprop_gather", "--backend", "host", "--sandbox", "--problem", str(PROBLEM)]) == 2
    assert "needs bubblewrap" in capsys.readouterr().err
