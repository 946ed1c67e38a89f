"""How a process that decides is started; what keeps others out of it, and lets nothing of a kernel's outlive its run.

The latter are Linux's `prctl`, groups, orphans.

Elsewhere than on Linux a process that a kernel has started, and that has left its group, is not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_DEATH_SIGNAL, _IS_DUMPABLE, _DUMPABLE, _SUBREAPER = 1, 3, 4, 36  # PR_SET_*, and PR_GET_DUMPABLE
_BOUNDING, _NO_NEW_PRIVILEGES, _CAPABILITIES = 24, 38, 64  # PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, numbers of capabilities
_KEPT = 0b1110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER: files are root's as before
_VERSION_3 = 0x20080522  # of capget and capset: 64 bits
_ROOT = Path(__file__).resolve().parents[3]  # this very package is there
_SWEEP_LIMIT_S, _REAP_LIMIT_S = 2.0, 10.0
_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
_hiding = threading.RLock()  # a collection may call `show` in the middle of `hide`
_hidden, _was_inspectable = 0, 0

Limits = dict[int, tuple[int, int]]  # soft and hard, by the number of the resource


def python(statement: str, root: Path = _ROOT, last: Iterable[str] = ()) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a Python that imports the package of `root` and executes a statement.

    Nothing comes before the standard library: not the current folder, nor those of `PYTHONPATH`, which follow the package.

    Args:
        last: folders after all others.
    """
    own = [str(root), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    first, last = ([os.path.abspath(path) for path in paths] for paths in (own, last))
    paths = f"sys.path = [*filter(None, sys.path), *{first!a}]; import site; site.main(); sys.path += {last!a}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return [sys.executable, "-S", "-c", f"import sys; {paths}; {statement}"], environment


def _prctl(option: int, value: int = 0) -> int:
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        return int(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3))
    return 0


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends."""
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of what this process's descendants leave behind."""
    _prctl(_SUBREAPER, 1)


def set_inspectable(allowed: bool) -> None:
    """Let other processes of the user trace this one, write to its memory and open its files, or not; root may, with its privileges."""
    _prctl(_DUMPABLE, int(allowed))


def give_up_privileges() -> None:
    """Give up for good what root may do to others, but for files: among it to inspect processes that hide. Who is not root gains nothing
    by programs that set a user."""
    for number in range(_CAPABILITIES):
        if not _KEPT >> number & 1:
            _prctl(_BOUNDING, number)
    _prctl(_NO_NEW_PRIVILEGES, 1)
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        library, words = ctypes.CDLL(None), (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; the low words first
        who = (ctypes.c_uint32 * 2)(_VERSION_3, 0)
        if library.capget(who, words) == 0:
            library.capset(who, (ctypes.c_uint32 * 6)(*(word & _KEPT if place < 2 else 0 for place, word in enumerate(words))))


def hide() -> None:
    """Let no other process of the user inspect this one until `show` was called as often."""
    global _hidden, _was_inspectable
    with _hiding:
        if not _hidden:
            _was_inspectable = _prctl(_IS_DUMPABLE)
            set_inspectable(False)
        _hidden += 1


def show() -> None:
    """End what `hide` began."""
    global _hidden
    with _hiding:
        _hidden -= 1
        if not _hidden and _was_inspectable == 1:
            set_inspectable(True)


def limits() -> Limits:
    """Return what the system lets this process have."""
    return {number: resource.getrlimit(number) for number in _LIMITS}


def set_limits(wanted: Limits) -> None:
    """Set those that differ, as far as this user may: another process of the user's can change them."""
    for number, limit in wanted.items():
        if resource.getrlimit(number) != limit:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, limit)


class Children:
    """What a process has started, by any of its threads or by what it has taken over, and is its child still."""

    def __init__(self, pid: int) -> None:
        self._files: tuple[int, ...] = ()  # the folder of its threads, and what its first one has started
        with contextlib.suppress(OSError):  # it has ended, or the system has no such files
            folder = os.open(f"/proc/{pid}/task", os.O_RDONLY)
            self._files = (folder,)
            self._files = (folder, os.open(f"{pid}/children", os.O_RDONLY, dir_fd=folder))

    def list(self) -> list[int]:
        """Return their process numbers."""
        if len(self._files) < 2:
            return []
        folder, first = self._files
        try:
            if os.fstat(folder).st_nlink == 3:  # one thread, mostly
                return _numbers(first)
            threads = os.listdir(folder)
        except OSError:
            return []
        found = []
        for thread in threads:
            with contextlib.suppress(OSError):  # that thread has ended; another has its children now
                file = os.open(f"{thread}/children", os.O_RDONLY, dir_fd=folder)
                try:
                    found += _numbers(file)
                finally:
                    os.close(file)
        return found

    def close(self) -> None:
        """Forget the process."""
        for file in self._files:
            os.close(file)
        self._files = ()


def _numbers(file: int) -> list[int]:
    return [int(pid) for pid in os.pread(file, 1 << 16, 0).split()]


def kill(pid: int) -> None:
    """Kill a process and its group, which bears its number."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)


def reap(pid: int, limit_s: float = _REAP_LIMIT_S) -> int | None:
    """Return the wait status of a child, None where it has not ended in time."""
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(ChildProcessError):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return status
        if time.monotonic() > deadline:
            return None
        time.sleep(0.001)


def kill_children(own: Children, spared: int = 0) -> None:
    """Kill all children of this process but one, and theirs, which become its own by `adopt_orphans`."""
    deadline = time.monotonic() + _SWEEP_LIMIT_S
    while (left := [pid for pid in own.list() if pid != spared]) and time.monotonic() < deadline:
        for pid in left:
            kill(pid)
        for pid in left:
            reap(pid, 0.1)


def signal_name(number: int) -> str:
    """Return a signal's name, for example SIGKILL; real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
