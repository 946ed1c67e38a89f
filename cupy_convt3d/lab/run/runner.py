"""The kernel's process: it does what its judge asks for, and says when it is done. What it says decides nothing."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import traceback
from typing import Any

from ...backends.base import Backend
from ...errors import BackendError, CompileError, KernelError, LaunchError
from ...kernel import Kernel
from . import process, talk
from .arena import Arena
from .execution import Local

_TEXT = 20_000  # characters of a message that are passed on
ERRORS = {kind.__name__: kind for kind in (KernelError, CompileError, BackendError)}


def backend_of(name: str, sanitizer: str | None, optimize: bool) -> Backend:
    """Return a backend by its name.

    Raises:
        BackendError: it cannot be had.
    """
    if name == "host":
        from ...backends.host import HostBackend

        return HostBackend(sanitizer, optimize)
    from ...backends.cuda import CudaBackend

    return CudaBackend()


def main(judge: int, requests: int, replies: int, log: int, arena: Arena, setup: tuple[str, str | None, bool]) -> None:
    """Serve until the judge goes away: the body of a process just forked, which keeps these descriptors alone."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    process.die_with_parent(judge)
    process.set_inspectable(True)
    if setup[0] == "host":  # else no code of a kernel's runs in this process
        process.give_up_privileges()
    os.setpgid(0, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        names = os.listdir("/dev/fd")
    except OSError as error:
        os.write(2, f"the system does not show which files are open ({error}); mount /proc".encode())
        return
    for name in names:
        if int(name) > 2 and int(name) not in (requests, replies, arena.descriptor):
            with contextlib.suppress(OSError):
                os.close(int(name))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(talk.Ended):
        _serve(requests, replies, arena, setup)


def _serve(requests: int, replies: int, arena: Arena, setup: tuple[str, str | None, bool]) -> None:
    own = os.getpid()

    def say(serial: int, **reply: Any) -> None:
        if os.getpid() != own:
            os._exit(0)  # the kernel has forked, and this is the copy
        talk.write(replies, talk.encode({"serial": serial, **reply}) if reply else talk.done(serial))

    try:
        local = Local(backend_of(*setup), shared=True)
        local.backend.reports_faults = local.sanitizer is None
    except BackendError as error:
        return say(0, error=type(error).__name__, text=str(error))
    say(0, arch=local.arch, limits=local.limits and [local.limits.shared_bytes, local.limits.multiprocessors])
    kernels: list[Kernel] = []
    asked = talk.Reader(requests)
    while True:
        serial, request, *arguments = pickle.loads(asked.read())  # the judge wrote it
        try:
            if request == "load":
                kernel, problem, dtype, layout = arguments
                plan = kernel.plan(problem, dtype, local.multiprocessors, layout)
                local.backend.compile(local.backend.instance(kernel, dtype, plan))
                kernels.append(kernel)
                say(serial)
                continue
            slots, number, *more = arguments
            arena.expose(slots.values())
            arrays = {name: arena.view(slot) for name, slot in slots.items()}
            for results in request(local, arrays, kernels[number], *more):
                for name, after in results.items():
                    if after is not arrays[name]:
                        arrays[name][...] = after
                say(serial)
                serial += 1
        except MemoryError as error:
            say(serial, error="LaunchError", text=f"out of memory: {error}")
        except (LaunchError, *ERRORS.values()) as error:
            say(serial, error=type(error).__name__, text=str(error)[:_TEXT])
        except Exception as error:  # CuPy's, and mistakes of ours: the judge is to hear of each, and ends this process
            cuda = "cupy" in type(error).__module__
            text = f"CUDA error: {error}" if cuda else traceback.format_exc()
            say(serial, error="LaunchError" if cuda else "", text=text[-_TEXT:])
