"""The judge's side of the kernel's process: it starts and ends it, and reads what it says as nobody's word but a stranger's."""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import re
import select
import sys
import time
import traceback
from typing import Any

from ...errors import BackendError, printable
from ...kernel import ANY_STRIDES, Kernel, Limits, Numbers
from ...problem import Problem
from ...source import Instance
from . import process, runner, talk
from .arena import Arena, GuardedArena, Slot
from .execution import Arrays, Executor, Failure, Work

START_LIMIT_S = 120.0  # CUDA's initialisation
COMPILE_LIMIT_S = 600.0
_LOAD_LIMIT_S = 10.0  # of a library that is compiled already: its static objects run code
_TICK_S = 0.05  # how often a silent process is looked at
_END_LIMIT_S = 2.0  # from the end of its talk to its own: a sanitizer writes its report
# What the host's runtime prints before it ends, see host/faults.h.
_FAULT = re.compile(
    r"convt3d fault: (?P<what>read|write|access|misaligned access|stack overflow|index (?P<index>-?\d{1,20} of [^\n]{1,310}?))"
    r"(?P<shared> beside shared memory)?(?: at (?P<address>0x[0-9a-f]{1,16}))?(?: at (?P<place>[^\n]{1,410}?:\d{1,9}))? "
    r"by (?P<who>thread \([\d, ]{7,40}\) of block \([\d, ]{7,40}\))"
)
_LOG_BYTES = 1 << 16  # that are kept of the beginning of what it prints, and as many of the end


class Child(Executor):
    """Runs work in a process forked from this one, which is started again whenever a kernel has ended it.

    Attributes:
        pid: of the process; 0: there is none now.
        restarts: how often one was ended by a kernel, or at a request.
        has_run: whether a stranger's code was loaded, which may have changed what this process has.
        time_limit_s: longer work counts as a hang.

    Args:
        setup: as `runner.backend_of` takes it.
    """

    def __init__(self, setup: tuple[str, str | None, bool]) -> None:
        self.name, self.sanitizer = setup[0], setup[1]
        self.pid, self.restarts, self.time_limit_s, self.has_run = 0, 0, 10.0, False
        self._limits: process.Limits | None = None  # of this process, before any kernel
        self._setup, self._arena = setup, Arena()
        if self.name == "host" and self.sanitizer is None:  # a sanitizer has its own ways, and no room for so many addresses
            with contextlib.suppress(OSError):  # then guards are bands of values
                self._arena = GuardedArena()
                self.page = mmap.PAGESIZE
        self._loaded: dict[Instance, int] = {}  # what the process has loaded, by its numbers
        self._serial = 0
        self._own_family = process.Children(os.getpid())
        self._slots: dict[str, Slot] = {}
        self._views: Arrays = {}
        self._left = 0  # runs whose end it has not reported

    def start(self, work: Work, runs: int, arrays: Arrays, kernel: Kernel, *arguments: Any) -> None:
        with contextlib.suppress(Failure, *runner.ERRORS.values()):
            while self._left:  # nobody has asked for them
                self.finish()
        layout = arguments[-1].output_layout if isinstance(arguments[-1], Numbers) else ANY_STRIDES
        problem, dtype = arguments[:2]
        number = self.load(kernel, problem, dtype, layout)
        self._arena.tidy()
        self._slots, self._views = self._arena.lay_out(arrays)
        self._send(work, self._slots, number, *arguments)
        self._left = runs

    def finish(self) -> Arrays:
        self._left -= 1
        self._answer(self.time_limit_s * (6 if self.sanitizer == "thread" else 1))
        if not self._left and self.name == "host" and (self._family.list() or self._own_family.list() not in ([], [self.pid])):
            raise self._failure("crash: the kernel has started a process; it was ended")
        return self._views

    def load(self, kernel: Kernel, problem: Problem, dtype: str, output_layout: int = ANY_STRIDES) -> int:
        """Have a kernel ready to launch on such an output, and return its number."""
        self.begin()
        instance = Instance(kernel, dtype)
        if self.arch:  # a GPU's binary is made for the plan
            instance = Instance.of_plan(kernel, dtype, kernel.plan(problem, dtype, self.multiprocessors, output_layout))
        if instance not in self._loaded:
            process.kill_children(self._own_family, self.pid)  # what a compiler has left is not the kernel's
            self.has_run = True
            self._send("load", kernel, problem, dtype, output_layout)
            self._answer(_LOAD_LIMIT_S if self.name == "host" else COMPILE_LIMIT_S)
            self._loaded[instance] = len(self._loaded)
        return self._loaded[instance]

    def begin(self) -> None:
        """Start the process if there is none.

        Raises:
            BackendError: the backend cannot be had.
        """
        if self.pid:
            return
        if self._limits is None:
            self._limits = process.limits()
        process.set_limits(self._limits)
        ours = []
        theirs = []
        for reads in (False, True, True):  # requests, replies, what it prints
            ends = os.pipe()
            ours.append(ends[0 if reads else 1])
            theirs.append(ends[1 if reads else 0])
        sys.stderr.flush()
        judge = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                runner.main(judge, theirs[0], theirs[1], theirs[2], self._arena, self._setup)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(1)
        with contextlib.suppress(OSError):  # it does so itself, or has ended
            os.setpgid(self.pid, self.pid)
        for descriptor in theirs:
            os.close(descriptor)
        self._family = process.Children(self.pid)
        self._requests, self._replies, self._log_end = self._pipes = ours
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)
        self._poll.register(self._log_end, select.POLLIN)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._log_end, False)
        self._log, self._said, self._serial = bytearray(), bytearray(), 0
        try:
            hello = self._answer(START_LIMIT_S)
        except Exception:  # whatever it is: a process that has not said what it can do is of no use
            self.end()
            raise
        self.arch = hello.get("arch")
        self.limits = Limits(*hello["limits"]) if hello.get("limits") else None

    @property
    def limits_are_ours(self) -> bool:
        """Whether this process has the limits that it began with: a kernel can change them."""
        return self._limits is None or process.limits() == self._limits

    def end(self) -> int | None:
        """End the process and all that it has started; return its wait status, None where it does not end."""
        if not self.pid:
            return None
        process.kill(self.pid)
        status = process.reap(self.pid)
        process.kill_children(self._own_family)
        self._family.close()
        self._drain()
        for descriptor in self._pipes:
            os.close(descriptor)
        self.pid = self._left = 0
        self._loaded.clear()
        self._arena.tidy()
        self.restarts += 1
        return status

    def _send(self, *request: Any) -> None:
        self._drain()
        self._log.clear()
        with contextlib.suppress(talk.Ended):  # the answer says why
            try:
                talk.write(self._requests, pickle.dumps((self._serial, *request)), time.monotonic() + _LOAD_LIMIT_S)
            except talk.Late:
                raise self._failure("hang: the kernel's process takes no more requests") from None

    def _answer(self, limit_s: float) -> dict[str, Any]:
        """Return the process's reply to the last request.

        Raises:
            Failure: it has said that it failed, or there is no such reply; the process is ended then.
            KernelError, CompileError, BackendError: it could not be launched, says a process that runs no stranger's code.
        """
        try:
            said = self._reply(limit_s)
            if said == talk.done(self._serial):  # the common one, as text; any other is read
                self._serial += 1
                return {}
            reply = talk.decode(said)
            if reply.get("serial") != self._serial:
                raise talk.Garbled("it answers what was not asked")
        except talk.Late:
            raise self._failure(f"hang: did not end within {limit_s:g} s") from None
        except talk.Garbled as garbled:
            raise self._failure(f"crash: the kernel has broken into the talk with its process ({garbled})") from None
        except talk.Ended:
            raise self._died() from None
        self._serial += 1
        if "error" not in reply:
            return reply
        self._left = 0
        error, text = str(reply["error"]), printable(str(reply.get("text", "")), 2000)
        # On a GPU a kernel's code is not in that process, on the host it is from the first load on.
        if error in runner.ERRORS and (self.name == "cuda" or not (self._loaded or self._serial > 1)):
            raise runner.ERRORS[error](str(reply.get("text", "")))
        if error == "LaunchError" and self.name == "host":
            raise Failure(text)
        # After an error a CUDA context may be lost, and on the host nothing else is expected.
        raise self._failure(text if error == "LaunchError" else f"crash: the kernel's process failed: {error} {text[-1000:]}")

    def _reply(self, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        while (whole := talk.take(self._said)) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise talk.Late
            ready = dict(self._poll.poll(min(remaining, _TICK_S) * 1e3))
            if self._log_end in ready and not self._drain(once=True):
                self._poll.unregister(self._log_end)  # it has closed what it prints to
            if self._replies in ready:
                piece = os.read(self._replies, 1 << 16)
                if not piece:
                    raise talk.Ended
                self._said += piece
            if not ready and self._has_ended():
                raise talk.Ended  # a process that it has started keeps the pipe open
        return whole

    def _drain(self, once: bool = False) -> bool:
        """Read what it has printed; False where there will be no more."""
        try:
            while piece := os.read(self._log_end, 1 << 16):
                self._log += piece
                if len(self._log) > 4 * _LOG_BYTES:
                    del self._log[_LOG_BYTES:-_LOG_BYTES]
                if once:
                    return True
        except BlockingIOError:
            return True
        return False

    def _has_ended(self) -> bool:
        """Whether it has, without taking its wait status."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _died(self) -> Exception:
        deadline = time.monotonic() + _END_LIMIT_S
        while not self._has_ended():
            if time.monotonic() > deadline:
                return self._failure("crash: the kernel has closed the files of its process")
            self._drain()
            time.sleep(0.001)
        started = self._serial > 0
        status = self.end()
        log = bytes(self._log).decode(errors="replace")
        if not started:
            return BackendError(f"the child process could not run:\n{log[-2000:]}")
        return Failure(self._cause_of_death(status, log))

    def _cause_of_death(self, status: int | None, log: str) -> str:
        report = summarize_report(log)
        if report is not None:
            return report
        if status is None:
            return "crash: the kernel's process cannot be ended"
        if os.WIFSIGNALED(status):
            ended = f"crash: the kernel's process was ended by {process.signal_name(os.WTERMSIG(status))}"
            fault = _FAULT.search(log)
            if fault is None:
                return ended
            if fault["place"]:
                what = "misaligned access: an address is no multiple of what its type asks for"
                if fault["index"]:
                    what = f"out of bounds: index {printable(fault['index'], 330)}, past the end of an array"
                return f"{what}, at {printable(fault['place'], 420)} by {fault['who']}; {ended}"
            near = fault["shared"] or self._arena.neighbour(int(fault["address"], 16), self._slots)
            if near is None or fault["what"] == "stack overflow":
                return f"{ended} ({fault['what']} at {fault['address']}, by {fault['who']})"
            return f"out of bounds: {fault['what']} {near.strip()}, by {fault['who']}; {ended}"
        tail = log.strip().splitlines()[-1:] or ["no message"]
        return f"crash: the kernel's process ended with exit code {os.WEXITSTATUS(status)} ({printable(tail[0], 300)})"

    def _failure(self, message: str) -> Failure:
        self.end()
        return Failure(message)


def summarize_report(log: str) -> str | None:
    """Return one line for a sanitizer's report: the kind of error and the lines of the kernel it names; None if there is none."""
    kinds = (  # words are read from their beginning, each once
        r"(?:ERROR|WARNING): (?P<tool>\w+Sanitizer): (?P<what>[\w-]+(?: race)?)",
        r"(?<![^\s:])(?P<place>[^\s:]+\.cuh?:\d+):\d+: runtime error: (?P<error>[^\n]*)",
    )
    for pattern in kinds:
        match = re.search(pattern, log)
        if match is None:
            continue
        found = match.groupdict()
        rest = log[match.start() :]
        places = list(dict.fromkeys(re.findall(r"(?<![^\s():])[^\s():]+\.cuh?:\d+", rest)))[:3]
        access = re.search(r"\b(READ|WRITE) of size \d+", rest)
        what = found.get("error") or " ".join(filter(None, (found.get("what"), access and f"({access[0]})")))
        tool = found.get("tool") or "UndefinedBehaviorSanitizer"
        return printable(f"{tool}: {what} at {', '.join(places) or 'an unknown place'}", 1000)
    return None
