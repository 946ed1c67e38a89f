"""The supervisor of `convt3d kernelbench`: a process that starts the judge's children, and leaves none of them or of theirs behind.

It imports torch once and forks, so that a child is there in milliseconds. No code of a file ever runs in it. It adopts what its
children leave behind (a subreaper), so that processes which have left their group are found too. Each child has a temporary
working directory: what it writes there is not the caller's. When the judge is gone, killed
included, it ends all and then itself.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from typing import Any, NoReturn

from ... import scratch
from ...errors import BackendError
from ..run import process
from .channel import Channel, Gone, Late

START_LIMIT_S = 120.0  # importing torch from a cold disk
_END_LIMIT_S = 10.0  # for ending all, of which the supervisor itself may have been stopped
_POLL_S = 1.0


class Child:
    """A child of the supervisor: its process group and the judge's end of the conversation with it."""

    def __init__(self, pid: int, channel: Channel) -> None:
        self.pid, self.channel = pid, channel


class Supervisor:
    """The judge's side: starts the process, has it fork children and end them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._channel: Channel | None = None
        self._children: list[Child] = []

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process, unless it runs."""
        if self._process is not None and self._process.poll() is not None:
            self.close()  # a file's code has killed it
        if self._channel is None:
            self._start()

    def fork(self) -> Child:
        """Start a child.

        Raises:
            BackendError: the supervisor does not start.
        """
        self.start()
        ours, theirs = socket.socketpair()
        log, printed = os.pipe()
        try:
            reply = self._ask({"do": "fork"}, theirs.fileno(), printed)
        except (Gone, Late):
            ours.close()
            os.close(log)
            raise BackendError("the process that starts the children of kernelbench did not start, or was ended by a file's code") from None
        finally:
            theirs.close()
            os.close(printed)
        self._children.append(Child(reply["pid"], Channel(ours, log)))
        return self._children[-1]

    def status(self, child: Child) -> str:
        """End a child that has closed its channel, and return how it ended."""
        try:
            code = self._ask({"do": "end", "pid": child.pid})["code"]
        except (Gone, Late):
            return "killed the process that started it, and ended"
        if code is None:
            return "it closed its channel to the judge"
        return f"signal {process.signal_name(-code)}" if code < 0 else f"exit code {code}"

    def clear(self) -> None:
        """End all children and whatever they have started."""
        with contextlib.suppress(Gone, Late):
            self._ask({"do": "clear"})
        for child in self._children:
            child.channel.close()
        self._children.clear()

    def close(self) -> None:
        """End all, and the supervisor."""
        if self._process is None or self._channel is None:
            return
        self._channel.close()  # which it takes as the judge's end
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode:  # it could not do it itself
            for child in self._children:
                process.kill(child.pid)
        self._process = self._channel = None
        self.clear()
        scratch.remove(self._folder)

    def _ask(self, request: dict[str, Any], *descriptors: int) -> dict[str, Any]:
        if self._channel is None:
            raise Gone
        try:
            self._channel.send(request, *descriptors)
            return self._channel.receive(time.monotonic() + (START_LIMIT_S if request["do"] == "fork" else 2 * _END_LIMIT_S))
        except BaseException:  # an interrupt too: its answer would be taken for the next one's
            self.close()
            raise

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        statement = f"from {__name__} import main; main({theirs.fileno()}, {os.getpid()})"
        command, environment = process.python(statement, last=["."])  # where a file finds its modules, whatever the working directory
        self._folder = tempfile.mkdtemp(prefix="kernelbench-", dir=scratch.folder())
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=environment,
            cwd=self._folder,
            start_new_session=True,  # a Ctrl-C is for the judge, which then ends the children
        )
        theirs.close()
        self._channel = Channel(ours)


class _Children:
    """The supervisor's own side. Those that have ended stay zombies until `clear`, so that no other process gets their numbers."""

    def __init__(self) -> None:
        self._pids: list[int] = []
        self._folder = os.getcwd()
        self._own = process.Children(os.getpid())

    def start(self, end: int, printed: int, control: Channel) -> int:
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_child(end, printed, supervisor)
        os.close(end)
        os.close(printed)
        self._pids.append(pid)
        return pid

    def end(self, pid: int) -> int | None:
        """Return the exit code of a child that has closed its channel, minus a signal's number; None if it did not end by itself."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            if ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            time.sleep(0.001)
        process.kill(pid)
        return None

    def clear(self) -> None:
        """Kill the groups, then whatever is our child, until there is none: what a dead one leaves becomes ours."""
        for pid in self._pids:
            process.kill(pid)
        self._pids.clear()
        deadline = time.monotonic() + _END_LIMIT_S
        while time.monotonic() < deadline:
            for pid in self._own.list():
                process.kill(pid)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                break
            time.sleep(0.001)
        scratch.remove(self._folder)

    def tidy(self) -> None:
        """Have an empty folder again, whatever a file's code has made of it."""
        os.mkdir(self._folder, 0o700)
        os.chdir(self._folder)


def _become_child(end: int, printed: int, supervisor: int) -> NoReturn:
    code = 98
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        process.die_with_parent(supervisor)
        os.mkdir(str(os.getpid()))
        os.chdir(str(os.getpid()))  # what it writes there goes with it
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        os.close(printed)
        from .child import serve

        serve(Channel(socket.socket(fileno=end)))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code & 255)  # without waiting for the threads of a file's code


def main(descriptor: int, judge: int) -> None:
    """Do what the judge asks until it goes away."""
    from . import child as kernelbench_child  # noqa: F401  with torch, for the children

    process.adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    children = _Children()
    control = Channel(socket.socket(fileno=descriptor))
    while os.getppid() == judge:
        try:
            request = control.receive(time.monotonic() + _POLL_S)
        except Late:
            continue
        except Gone:
            break
        if request["do"] == "fork":
            end, printed = control.receive_descriptors(2)
            control.send({"pid": children.start(end, printed, control)})
        elif request["do"] == "end":
            control.send({"code": children.end(request["pid"])})
        else:
            children.clear()
            children.tidy()
            control.send({})
    children.clear()
    scratch.remove_abandoned()  # the judge's, if it was killed
    os._exit(0)  # torch takes long to be unloaded
