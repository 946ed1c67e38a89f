"""What runs a stranger's kernel for a caller: what it crashes, hangs, corrupts or forges is an outcome, never the caller's own end.

Three processes take part. The caller's, with a `Worker`, asks and counts. The judge's (`judge`) draws the inputs, computes the
reference and compares; it runs no kernel. The kernel's (`runner`), a fork of the judge's, launches and no more.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ... import limits, registry, scratch
from ...cache import VARIABLE, cache_directory
from ...errors import BackendError, LaunchError, printable
from ...kernel import Kernel
from ...problem import Problem
from ...source import Instance
from ..threads import end_if_stopped
from . import process, sandbox, talk
from .child import COMPILE_LIMIT_S, START_LIMIT_S
from .far import FAR, explained, verify_far
from .runner import ERRORS, backend_of
from .verify import Outcome, numbers_of, verify

_JUDGING_LIMIT_S = 60.0  # of one example, beside its launches
_LAUNCHES = 3  # of one example at most
_CLOSE_LIMIT_S = 5.0
# glibc gives back what a tiny example has freed, and the next one faults it in again; these leave some megabytes with the process.
_KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": str(16 << 20), "MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TOP_PAD_": str(1 << 20)}


@dataclass(eq=False)
class _Asked:
    """A request to the judge: what `Worker._ask` takes, and the reply once it is there."""

    request: tuple[Any, ...] = ()
    limit_s: float = 0.0
    reply: dict[str, Any] | None = None


class Worker:
    """Runs examples of a kernel in a process that is started again whenever the kernel has ended it.

    Attributes:
        kernel: what runs next; may be set to another one at any time.

    Args:
        kernel: what to run first.
        backend: "host" or "cuda".
        sanitizer: as `HostBackend` takes it; host only.
        time_limit_s: a longer launch counts as a hang; under the thread sanitizer six times as long.
        cache: a directory for compiled kernels in place of the user's.
        optimize: as `HostBackend` takes it.
        once: as `verify.verify` takes it.
        sandboxed: take network, home directory and other processes away; host only.
        workers: how many run at once, and share half of the memory.

    Raises:
        BackendError: the sanitizer's runtime, or what makes a sandbox, is missing.
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
        sandboxed: bool = False,
        workers: int = 1,
    ) -> None:
        if sandboxed and backend != "host":
            raise BackendError(f"sandbox=True: only the host backend runs a kernel's code in a process, not {backend}")
        self.kernel = kernel
        self.once = once
        self.backend = backend
        self.sanitizer = sanitizer
        self.time_limit_s = time_limit_s
        self._memory = limits.share_of_memory(workers)
        self._setup, self._sandboxed = (backend, sanitizer, optimize), sandboxed
        self._command, environment = process.python("from cupy_convt3d.lab.run.judge import main; sys.exit(main())")
        self._environment = {**_KEEP_FREED, **environment, "OPENBLAS_NUM_THREADS": "1"}
        self._environment[VARIABLE] = str(cache or cache_directory())  # the private one too, in place of one that cannot be used
        if sanitizer is not None:
            from ...backends.host import sanitizer_environment

            self._environment |= sanitizer_environment(sanitizer)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        process.hide()  # whoever can open our files can answer in the judge's place
        self._hidden = weakref.finalize(self, process.show)
        self._last = kernel  # that was asked for
        self._shipped: dict[Kernel, bool] = {}
        self._ended, self._counted = 0, 0  # judges that a kernel has ended; processes of kernels that those before have ended
        self._start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def restarts(self) -> int:
        """How often a process was started again."""
        return self._ended + self._counted + self._restarts

    def close(self) -> None:
        """End the judge, and all that kernels have started."""
        self._end()
        self._log.close()
        self._hidden()

    def verify(self, problem: Problem, dtype: str, kind: str, seed: int) -> Outcome:
        """Run one example; a crash, a hang, a failed launch and a sanitizer's report are outcomes that are not ok.

        Raises:
            KernelError, CompileError, BackendError: the kernel cannot be compiled or cannot do the problem.
        """
        return self.ask(problem, dtype, kind, seed)()

    def ask(self, problem: Problem, dtype: str, kind: str, seed: int) -> Callable[[], Outcome]:
        """Have an example run, and return what waits for its outcome: meanwhile the caller can draw the next one, or ask for it.

        Raises:
            KernelError: the kernel cannot do the problem. What waits raises as `verify`.
        """
        numbers = None
        if self.backend == "host" and kind != FAR:  # here, where the plan is known already: whoever draws a problem asks for it
            numbers = numbers_of(self.kernel, problem, dtype, seed)
        asked = self._ask(self.kernel, self.time_limit_s, "verify", problem, dtype, kind, seed, self.once, numbers)
        return lambda: _explained(kind, problem, _outcome(self._answer(asked)))

    def output(self, problem: Problem, dtype: str, kind: str, seed: int) -> tuple[Any, Any, Any]:
        """Return what `verify.output` does.

        Raises:
            LaunchError: the kernel crashed, hung or wrote outside its tensor.
            KernelError, CompileError, BackendError: as `verify`.
        """
        reply = self._run("output", problem, dtype, kind, seed)
        if "outcome" in reply:
            raise LaunchError(f"{self.kernel.name}: {_outcome(reply).message}")
        arrays = [np.frombuffer(array, np.float64).reshape(reply["shape"]) for array in reply["read"]]
        return arrays[0], arrays[1], arrays[2] if len(arrays) > 2 else None

    def dry_run(self, problem: Problem, dtype: str) -> Outcome:
        """Launch the kernel once on arrays of the problem's full size, with no look at the result; outcomes as of `verify`."""
        return _outcome(self._run("dry_run", problem, dtype))

    def restart(self) -> None:
        """Start the kernel's process anew: nothing that a kernel did to its memory stays."""
        if self._waiting:  # for what nobody wants to know any more
            self._reply(self._waiting[-1])
        self._reply(self._send(_Asked(), START_LIMIT_S, self.time_limit_s, "restart"))

    def _run(self, request: str, problem: Problem, dtype: str, *more: Any) -> dict[str, Any]:
        return self._answer(self._ask(self.kernel, self.time_limit_s, request, problem, dtype, *more))

    def _ask(self, kernel: Kernel, time_limit_s: float, request: str, problem: Problem, dtype: str, *more: Any) -> _Asked:
        """Send a request for an instance of a kernel, which is loaded first where it is not yet.

        What a stranger's kernel has done to its process is no other kernel's: between two of them the process is started anew.
        """
        end_if_stopped()  # a check of many examples takes a minute
        last, self._last = self._last, kernel
        if self.backend == "host" and not kernel.has_code_of(last) and not (self._is_shipped(kernel) and self._is_shipped(last)):
            self.restart()
        instance = Instance(kernel, dtype)
        if self.backend == "cuda":
            instance = Instance.of_plan(kernel, dtype, kernel.plan(problem, dtype))
        asked = _Asked((kernel, time_limit_s, request, problem, dtype, *more))
        if instance not in self._loaded:
            if self._sandboxed:  # there the cache cannot be written to
                backend_of(*self._setup).build(Instance(kernel, dtype))
            loading = self._send(_Asked(), COMPILE_LIMIT_S, time_limit_s, "load", kernel, dtype, problem)
            reply = self._reply(loading)
            if "number" not in reply:
                asked.reply = reply
                return asked
            self._loaded[instance] = reply["number"]
        limit_s = _JUDGING_LIMIT_S + _LAUNCHES * time_limit_s * (6 if self.sanitizer == "thread" else 1)
        return self._send(asked, limit_s, time_limit_s, request, self._loaded[instance], problem, *more)

    def _is_shipped(self, kernel: Kernel) -> bool:
        if kernel not in self._shipped:
            self._shipped[kernel] = registry.is_shipped(kernel)
        return self._shipped[kernel]

    def _answer(self, asked: _Asked) -> dict[str, Any]:
        """Wait for what was asked; ask once more where the judge was lost over it, whom the system may have killed for memory."""
        tries = 2
        while "lost" in (reply := self._reply(asked)):
            tries -= "outcome" in reply  # else it was not run, for what became of a request before it
            if not tries:
                break
            asked = self._ask(*asked.request)
        if "error" in reply:
            raise ERRORS.get(reply["error"], RuntimeError)(reply["text"])
        return reply

    def _send(self, asked: _Asked, limit_s: float, time_limit_s: float, request: str, *arguments: Any) -> _Asked:
        self._await_start()
        asked.limit_s = limit_s
        with contextlib.suppress(talk.Late, talk.Ended):  # there will be no reply
            talk.write(self._input, pickle.dumps((request, time_limit_s, self._failures, *arguments)), time.monotonic() + limit_s)
        self._waiting.append(asked)
        return asked

    def _reply(self, asked: _Asked) -> dict[str, Any]:
        """Return the judge's reply; one with "lost" is that of a judge who did not answer and has been replaced."""
        while asked.reply is None:  # replies come in the order of the requests
            first = self._waiting.popleft()
            deadline = time.monotonic() + first.limit_s
            try:
                reply = talk.decode(self._output.read(talk.REPLY_LIMIT, deadline))
                reply["read"] = [self._output.read(None, deadline) for _ in range(reply.get("arrays", 0))]
            except (talk.Late, talk.Ended, talk.Garbled) as error:
                for other in self._waiting:
                    other.reply = {"lost": True}
                reply = self._replace(f"hang: it did not answer within {first.limit_s:g} s" if isinstance(error, talk.Late) else None)
            else:
                self._pid, self._restarts = reply["pid"], reply["restarts"]
                self._failures = reply["failures"]
            first.reply = reply
        return asked.reply

    def _start(self) -> None:
        command, environment, log_start = self._command, self._environment, os.fstat(self._log.fileno()).st_size
        if self._sandboxed:
            command, environment = sandbox.wrap(command, environment)
        self._end_of_talk, theirs = socket.socketpair()  # unlike a pipe's, nobody can open its ends anew in /proc
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._log,
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the caller, which then ends the judge
            )
        self._end_of_talk.setblocking(False)
        self._input = self._end_of_talk.fileno()
        self._output = talk.Reader(self._input)
        self._ready, self._log_start = False, log_start
        self._pid, self._restarts = 0, 0  # the kernel's process, as the judge last said, and how many of them were ended
        self._failures = 0  # of examples, as far as is known: what was asked for before the last one is not run
        self._loaded: dict[Instance, int] = {}  # instances by the judge's numbers
        self._waiting: deque[_Asked] = deque()  # for replies

    def _await_start(self) -> None:
        if self._ready:
            return
        deadline = time.monotonic() + START_LIMIT_S
        try:
            talk.write(self._input, pickle.dumps((0 if self._sandboxed else os.getpid(), self._memory, *self._setup)), deadline)
            reply = talk.decode(self._output.read(talk.REPLY_LIMIT, deadline))
        except (talk.Late, talk.Ended, talk.Garbled):
            self._log.seek(0)
            log = self._log.read(1 << 20).decode(errors="replace")
            raise BackendError(f"the child process could not run:\n{log[-2000:]}") from None
        if "error" in reply:
            raise BackendError(reply["text"])
        self._ready = True

    def _end(self) -> int:
        """End the judge and return its exit code."""
        if not self._sandboxed:  # whose end is that of all processes in it
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_CLOSE_LIMIT_S)
        self._process.kill()
        self._process.wait()
        self._end_of_talk.close()
        if self._pid and not self._sandboxed:  # of a judge that was killed
            process.kill(self._pid)
        scratch.remove_abandoned()
        return self._process.returncode

    def _replace(self, hang: str | None) -> dict[str, Any]:
        """Start another judge in place of one that is lost."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0 if hang else _CLOSE_LIMIT_S)
        ended = self._process.returncode
        lines = os.pread(self._log.fileno(), 1 << 16, self._log_start).decode(errors="replace").strip().splitlines()
        said = f": {printable(lines[-1], 500)}" if lines else ""
        self._end()
        self._ended, self._counted = self._ended + 1, self._counted + self._restarts
        self._start()
        cause = hang or (f"ended by {process.signal_name(-ended)}" if ended is not None and ended < 0 else f"exit code {ended}{said}")
        outcome = {"ok": False, "message": f"crash: the kernel has ended or stopped the process that judges it ({cause})"}
        return {"lost": True, "outcome": outcome}


class InProcess:
    """Runs examples in this very process, for tools that watch one: compute-sanitizer, ncu, a debugger. What the kernel crashes is us."""

    sanitizer = None
    time_limit_s = float("inf")
    restarts = 0

    def __init__(self, kernel: Kernel, backend: str) -> None:
        self.kernel, self.backend, self._device = kernel, backend, backend_of(backend, None, True)

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *error: object) -> None: ...

    def ask(self, problem: Problem, dtype: str, kind: str, seed: int) -> Callable[[], Outcome]:
        """As `Worker.ask`; the example is run by whoever waits for it."""
        kernel = self.kernel
        return lambda: self._verify(kernel, problem, dtype, kind, seed)

    def verify(self, problem: Problem, dtype: str, kind: str, seed: int) -> Outcome:
        """As `Worker.verify`, but a crash ends the process and a hang stays one."""
        return self._verify(self.kernel, problem, dtype, kind, seed)

    def _verify(self, kernel: Kernel, problem: Problem, dtype: str, kind: str, seed: int) -> Outcome:
        if kind == FAR:
            return _explained(kind, problem, verify_far(self._device, kernel, problem, dtype, seed))
        return verify(self._device, kernel, problem, dtype, kind, seed)


def _outcome(reply: dict[str, Any]) -> Outcome:
    fields = reply["outcome"]
    return Outcome(**{**fields, "index": tuple(fields["index"]) if fields.get("index") is not None else None})


def _explained(kind: str, problem: Problem, outcome: Outcome) -> Outcome:
    return explained(problem, outcome) if kind == FAR and not outcome.ok else outcome
