"""The child process that runs a stranger's kernel: what it crashes, hangs or corrupts is the child, never the caller.

`python -m cupy_convt3d.lab.worker` imports everything once and then forks: the fork runs examples, and when a kernel has killed
it the next one is there in milliseconds. On the host it may use half of the machine's memory. Both talk to the parent in
length-prefixed pickles over the original stdin and stdout; file descriptor 1 is then stderr, so that a kernel's printf cannot
break into the protocol.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any

from ..errors import BackendError, CompileError, KernelError, LaunchError
from ..kernel import Kernel
from ..problem import Problem
from .far import FAR, verify_far
from .verify import Outcome, output, verify

START_LIMIT_S = 120.0  # imports, CUDA initialisation
COMPILE_LIMIT_S = 600.0
_SANITIZER_EXIT = 66
_EXCEPTIONS = {kind.__name__: kind for kind in (KernelError, CompileError, BackendError, LaunchError)}
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_SETUP = b"convt3d setup" + bytes(range(192, 208))  # begins the talk with a fork; no text in UTF-8 has these bytes


class _Gone(Exception):
    """The child ended, with this wait status."""


class _Late(Exception):
    """The child did not answer in time."""


def _read(descriptor: int, deadline: float | None = None) -> Any:
    header = _read_bytes(descriptor, 8, deadline)
    return pickle.loads(_read_bytes(descriptor, int.from_bytes(header, "little"), deadline))  # our own process wrote it


def _read_bytes(descriptor: int, count: int, deadline: float | None) -> bytes:
    data = b""
    while len(data) < count:
        if deadline is not None and not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise _Late
        piece = os.read(descriptor, count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _write(descriptor: int, value: Any) -> None:
    data = pickle.dumps(value)
    data = len(data).to_bytes(8, "little") + data
    while data:
        data = data[os.write(descriptor, data) :]


class Worker:
    """Runs examples of a kernel in a child process, which is started again whenever the kernel has ended it.

    Attributes:
        kernel: what runs next; may be set to another one at any time.
        restarts: how often the child was started again.

    Args:
        kernel: what to run first.
        backend: "host" or "cuda".
        sanitizer: as `HostBackend` takes it; host only.
        time_limit_s: a longer example counts as a hang; under the thread sanitizer six times as long.
        cache: a directory for compiled kernels in place of the user's.
        optimize: as `HostBackend` takes it.
        once: as `verify.verify` takes it.

    Raises:
        BackendError: the sanitizer's runtime is missing.
    """

    def __init__(
        self,
        kernel: Kernel,
        backend: str,
        sanitizer: str | None = None,
        time_limit_s: float = 10.0,
        cache: Path | None = None,
        optimize: bool = True,
        once: bool = False,
    ) -> None:
        self.kernel = kernel
        self.once = once
        self.backend = backend
        self.sanitizer = sanitizer
        self.time_limit_s = time_limit_s
        self.restarts = 0
        self._setup = (backend, sanitizer, optimize)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": _import_path()}
        if cache is not None:
            environment["CONVT3D_CACHE"] = str(cache)
        if sanitizer is not None:
            from ..backends.host import sanitizer_environment

            environment |= sanitizer_environment(sanitizer)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # a Ctrl-C is for the parent, which then closes the child
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._pid = 0  # of the fork; 0: it has not reported yet
        self._compiled: dict[tuple[object, ...], int] = {}  # instances the child has loaded, by its numbers

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child."""
        for pid in (self._pid, self._process.pid):
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.communicate()
        self._log.close()

    def verify(self, problem: Problem, dtype: str, kind: str, seed: int) -> Outcome:
        """Run one example; a crash, a hang, a failed launch and a sanitizer's report are outcomes that are not ok.

        Raises:
            KernelError, CompileError, BackendError: the kernel cannot be compiled or cannot do the problem.
        """
        reply = self._run("verify", problem, dtype, kind, seed, self.once)
        assert isinstance(reply, Outcome)
        return reply

    def output(self, problem: Problem, dtype: str, kind: str, seed: int) -> tuple[Any, Any, Any]:
        """Return what `verify.output` does.

        Raises:
            LaunchError: the kernel crashed, hung or wrote outside its tensor.
            KernelError, CompileError, BackendError: as `verify`.
        """
        reply = self._run("output", problem, dtype, kind, seed)
        if isinstance(reply, Outcome):
            raise LaunchError(f"{self.kernel.name}: {reply.message}")
        return reply  # type: ignore[no-any-return]

    def dry_run(self, problem: Problem, dtype: str) -> Outcome:
        """Launch the kernel once on arrays of the problem's full size, with no look at the result; outcomes as of `verify`."""
        reply = self._run("dry_run", problem, dtype)
        assert isinstance(reply, Outcome)
        return reply

    def _run(self, request: str, problem: Problem, dtype: str, *more: Any) -> Any:
        specialization = self.kernel.plan(problem, dtype).specialization if self.backend == "cuda" else ()
        instance = (self.kernel, dtype, specialization)
        if instance not in self._compiled:
            failed = self._request("compile", self.kernel, dtype, problem, limit_s=COMPILE_LIMIT_S)
            if failed is not None:  # loading it has ended the child
                return failed
            self._compiled[instance] = len(self._compiled)
        limit_s = self.time_limit_s * (6 if self.sanitizer == "thread" else 1)
        return self._request(request, self._compiled[instance], problem, *more, limit_s=limit_s)

    def restart(self) -> None:
        """Start the child anew: nothing that a kernel did to its memory stays."""
        if self._pid:
            with contextlib.suppress(ProcessLookupError):  # it has died by itself
                os.kill(self._pid, signal.SIGKILL)
            # The report of that death, perhaps after an answer that came just too late.
            while _read(self._output, time.monotonic() + START_LIMIT_S)[0] != "died":
                pass
            self._forget()

    def _request(self, *request: Any, limit_s: float) -> Any:
        self._log.seek(0, os.SEEK_END)
        begin = self._log.tell()
        try:
            if not self._pid:
                self._await_start()
            _write(self._input, request)
            status, value = _read(self._output, time.monotonic() + limit_s)
            if status == "died":
                raise _Gone(value)
        except _Late:
            self.restart()
            return Outcome(False, message=f"hang: did not end within {limit_s:g} s")
        except _Gone as gone:
            self._forget()
            return Outcome(False, message=_cause_of_death(gone.args[0], self._read_log(begin)))
        except (EOFError, BrokenPipeError):
            raise BackendError(f"the child process could not run:\n{self._read_log(0)[-2000:]}") from None
        if status == "last":  # it leaves because the CUDA context is lost
            _read(self._output, time.monotonic() + START_LIMIT_S)
            self._forget()
        if status == "error":
            raise _EXCEPTIONS.get(value[0], RuntimeError)(value[1])
        return value

    def _await_start(self) -> None:
        _, pid = _read(self._output, time.monotonic() + START_LIMIT_S)
        os.write(self._input, _SETUP)
        _write(self._input, self._setup)
        self._pid = pid

    def _forget(self) -> None:
        self._pid = 0
        self._compiled.clear()
        self.restarts += 1

    def _read_log(self, begin: int) -> str:
        self._log.seek(begin)
        return self._log.read(1 << 20).decode(errors="replace")


class InProcess:
    """Runs examples in this very process, for tools that watch one: compute-sanitizer, ncu, a debugger. What the kernel crashes is us."""

    sanitizer = None
    time_limit_s = float("inf")
    restarts = 0

    def __init__(self, kernel: Kernel, backend: str) -> None:
        self.kernel, self.backend, self._device = kernel, backend, _backend(backend, None, True)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None: ...

    def verify(self, problem: Problem, dtype: str, kind: str, seed: int) -> Outcome:
        """As `Worker.verify`, but a crash ends the process and a hang stays one."""
        return _verify(self._device, self.kernel, problem, dtype, kind, seed)


def _import_path() -> str:
    """Return a PYTHONPATH under which the child finds this very package."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


def _cause_of_death(status: int, log: str) -> str:
    report = summarize_report(log)
    if report is not None:
        return report
    if os.WIFSIGNALED(status):
        return f"crash: the kernel's process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    tail = log.strip().splitlines()[-1:] or ["no message"]
    return f"crash: the kernel's process ended with exit code {os.WEXITSTATUS(status)} ({tail[0][:300]})"


def summarize_report(log: str) -> str | None:
    """Return one line for a sanitizer's report: the kind of error and the lines of the kernel it names; None if there is none."""
    kinds = (
        r"(?:ERROR|WARNING): (?P<tool>\w+Sanitizer): (?P<what>[\w-]+(?: race)?)",
        r"(?P<place>[^\s:]+\.cuh?:\d+):\d+: runtime error: (?P<error>[^\n]*)",
    )
    for pattern in kinds:
        match = re.search(pattern, log)
        if match is None:
            continue
        found = match.groupdict()
        rest = log[match.start() :]
        places = list(dict.fromkeys(re.findall(r"([^\s():]+\.cuh?:\d+)", rest)))[:3]
        access = re.search(r"\b(READ|WRITE) of size \d+", rest)
        what = found.get("error") or " ".join(filter(None, (found.get("what"), access and f"({access[0]})")))
        tool = found.get("tool") or "UndefinedBehaviorSanitizer"
        return f"{tool}: {what} at {', '.join(places) or 'an unknown place'}"
    return None


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere a lost parent leaves a spinning child
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def _serve(source: int, target: int) -> None:
    """Answer requests until the parent goes away."""
    _write(target, ("started", os.getpid()))
    skipped = b""
    while not skipped.endswith(_SETUP):  # what the last fork has left of a request, read in part or not at all
        skipped = skipped[1 - len(_SETUP) :] + _read_bytes(source, 1, None)
    backend_name, sanitizer, optimize = _read(source)
    if backend_name == "host" and sanitizer is None:  # sanitizers and CUDA reserve more addresses than there is memory
        limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    backend: Any = None
    instances: list[tuple[Kernel, str]] = []
    while True:
        request, *arguments = _read(source)
        try:
            if backend is None:
                backend = _backend(backend_name, sanitizer, optimize)
            if request == "compile":
                kernel, dtype, problem = arguments
                backend.compile(backend.instance(kernel, dtype, kernel.plan(problem, dtype)))
                instances.append((kernel, dtype))
                _write(target, ("ok", None))
            else:
                number, problem, *more = arguments
                kernel, dtype = instances[number]
                _write(target, ("ok", _REQUESTS[request](backend, kernel, problem, dtype, *more)))
        except MemoryError as error:
            _write(target, ("ok", Outcome(False, message=f"out of memory: {error}")))
        except LaunchError as error:
            lost = backend_name == "cuda"
            _write(target, ("last" if lost else "ok", Outcome(False, message=str(error))))
            if lost:
                os._exit(0)
        except tuple(_EXCEPTIONS.values()) as error:
            _write(target, ("error", (type(error).__name__, str(error))))
        except Exception as error:
            lost = backend_name == "cuda" and "cupy" in type(error).__module__
            if lost:  # an illegal access poisons the context: every later call would fail too
                _write(target, ("last", Outcome(False, message=f"CUDA error: {error}")))
                os._exit(0)
            _write(target, ("error", ("RuntimeError", traceback.format_exc())))


def _verify(backend: Any, kernel: Kernel, problem: Problem, dtype: str, kind: str, seed: int, once: bool = False) -> Outcome:
    if kind == FAR:
        return verify_far(backend, kernel, problem, dtype, seed)
    return verify(backend, kernel, problem, dtype, kind, seed, once=once)


def _dry_run(backend: Any, kernel: Kernel, problem: Problem, dtype: str) -> Outcome:
    from .measure import Bench

    bench = Bench(backend, against=())
    bench.prepared(kernel, problem, dtype, bench.arrays(problem, kernel.pass_name, dtype))()
    backend.synchronize()
    return Outcome(True)


_REQUESTS: dict[str, Any] = {"verify": _verify, "output": output, "dry_run": _dry_run}


def _backend(name: str, sanitizer: str | None, optimize: bool) -> Any:
    if name == "host":
        from ..backends.host import HostBackend

        return HostBackend(sanitizer, optimize)
    from ..backends.cuda import CudaBackend

    return CudaBackend()


def main() -> int:
    """Fork a process that serves, and another one whenever that has died of something other than the parent's end."""
    source, target = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    _die_with_parent()
    while True:
        pid = os.fork()
        if pid == 0:
            _die_with_parent()
            try:
                _serve(source, target)
            except (EOFError, BrokenPipeError):
                os._exit(99)
            except BaseException:
                traceback.print_exc()
            os._exit(98)
        status = os.waitpid(pid, 0)[1]
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 99:
            return 0
        _write(target, ("died", status))


if __name__ == "__main__":
    sys.exit(main())
