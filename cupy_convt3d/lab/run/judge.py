"""The process that judges kernels and runs none: it owns the inputs' values, the reference, the guards and the verdict.

`main` runs in a Python of its own (`process.python`), imports everything once and forks the process in which kernels run (`child`,
`runner`), again whenever one has ended it, which takes milliseconds. It compares what lies in the memory that both share. A kernel
that kills the judge itself is an outcome too: `worker`, in the caller's process, sees it.
"""

from __future__ import annotations

import errno
import gc
import math
import os
import pickle
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from ... import limits
from ...errors import BackendError, CompileError, KernelError, LaunchError, printable
from ...kernel import CONTIGUOUS, Kernel, Numbers
from ...problem import Problem
from ...source import Instance
from . import process, talk
from .child import Child
from .execution import Failure, dry_run
from .far import FAR, verify_far
from .runner import backend_of
from .verify import Outcome, output, verify

_COLLECTED = 20_000  # new objects between two collections, here and in the kernel's process; an example has hundreds
_STATM = Path("/proc/self/statm")  # begins with the pages of addresses


class Judge:
    """Answers the requests of a `Worker`, each with a reply and perhaps with arrays that follow it.

    Args:
        setup: as `runner.backend_of` takes it.
    """

    def __init__(self, setup: tuple[str, str | None, bool]) -> None:
        self.child = Child(setup)
        self._host = backend_of(*setup) if setup[0] == "host" else None
        self._instances: list[tuple[Kernel, str]] = []
        self._failures = 0

    def answer(self, request: str, limit_s: float, failures: int, *arguments: Any) -> tuple[dict[str, Any], list[bytes]]:
        """Return the reply to one request; a failure of the kernel's is an outcome.

        `failures` are those that its asker knew of: an example that was asked for ahead of the last one, which may hang too, is not run.
        """
        self.child.time_limit_s = limit_s
        reply: dict[str, Any] = {"lost": True}
        arrays: list[bytes] = []
        if failures == self._failures:
            reply, arrays = self._answer(request, *arguments)
            self._failures += "outcome" in reply and not reply["outcome"]["ok"]
        return reply | {"pid": self.child.pid, "restarts": self.child.restarts, "failures": self._failures}, arrays

    def _answer(self, request: str, *arguments: Any) -> tuple[dict[str, Any], list[bytes]]:
        try:
            return getattr(self, f"_{request}")(*arguments)  # type: ignore[no-any-return]
        except Failure as failure:
            return _reply(Outcome(False, message=str(failure)))
        except LaunchError as error:
            return _reply(Outcome(False, message=str(error)))
        except (KernelError, CompileError) as error:
            return {"error": type(error).__name__, "text": str(error)}, []
        except (MemoryError, OSError) as error:
            if isinstance(error, MemoryError) and request != "load" and self._asks_for_much(*arguments[:2]):
                return _reply(Outcome(False, message=f"out of memory: {error}"))
            if self._host is None or self.child.limits_are_ours:  # else a kernel has changed them
                return {"error": "BackendError", "text": _too_little(error)}, []
            sys.exit(_in_one_line(error))
        except Exception as error:
            if self._host is not None and self.child.has_run:  # the kernel's doing, perhaps: the caller tries once more with another judge
                sys.exit(_in_one_line(error))
            if isinstance(error, BackendError):
                return {"error": "BackendError", "text": str(error)}, []
            return {"error": "RuntimeError", "text": traceback.format_exc()}, []  # a mistake of ours

    def _asks_for_much(self, number: int, problem: Problem) -> bool:
        """Whether a kernel's workspaces have more elements than the tensors: what they cost is its own doing."""
        kernel, dtype = self._instances[number]
        tensors = sum(map(math.prod, (problem.input_shape, problem.weight_shape, problem.output_shape)))
        return sum(kernel.plan(problem, dtype).workspace.values()) > tensors

    def _load(self, kernel: Kernel, dtype: str, problem: Problem) -> tuple[dict[str, Any], list[bytes]]:
        """Compile a kernel, here, so that what the compiler says is not the kernel's to say; on a GPU the child does."""
        if self._host is not None:
            self._host.build(Instance(kernel, dtype))
        number = len(self._instances)
        self._instances.append((kernel, dtype))
        self.child.load(kernel, problem, dtype, CONTIGUOUS)  # as most tensors are; on a GPU a binary for others is compiled for them
        return {"number": number}, []

    def _verify(
        self, number: int, problem: Problem, kind: str, seed: int, once: bool, numbers: Numbers | None
    ) -> tuple[dict[str, Any], list[bytes]]:
        kernel, dtype = self._instances[number]
        self.child.begin()  # from here on its limits are known
        if kind == FAR:
            return _reply(verify_far(self.child, kernel, problem, dtype, seed))
        return _reply(verify(self.child, kernel, problem, dtype, kind, seed, once=once, numbers=numbers))

    def _output(self, number: int, problem: Problem, kind: str, seed: int) -> tuple[dict[str, Any], list[bytes]]:
        kernel, dtype = self._instances[number]
        self.child.begin()
        got, expected, bound = output(self.child, kernel, problem, dtype, kind, seed)
        arrays = [got, expected] if bound is None else [got, expected, np.broadcast_to(bound, expected.shape)]
        return {"shape": expected.shape, "arrays": len(arrays)}, [np.ascontiguousarray(a, np.float64).tobytes() for a in arrays]

    def _dry_run(self, number: int, problem: Problem) -> tuple[dict[str, Any], list[bytes]]:
        kernel, dtype = self._instances[number]
        self.child.start(dry_run, 1, {}, kernel, problem, dtype)
        self.child.finish()
        return _reply(Outcome(True))

    def _restart(self) -> tuple[dict[str, Any], list[bytes]]:
        self.child.end()
        return {}, []


def _too_little(error: MemoryError | OSError) -> str:
    """Return what is said where the system, or the user, gives the judge too little."""
    if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        return f"the judge's process has no memory for this example ({error}); its limit (ulimit -v, or half of the memory) is {most} bytes"
    return f"the judge's process cannot work: {error}{limits.named_limit(error)}"


def _in_one_line(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return printable(f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})", 1000)


def _reply(outcome: Outcome) -> tuple[dict[str, Any], list[bytes]]:
    return {"outcome": {"ok": True, "ratio": outcome.ratio} if outcome.ok and not outcome.message else vars(outcome)}, []


def main() -> int:
    """Answer requests until the parent goes away, and leave nothing behind."""
    source, target = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    gc.freeze()  # what was imported stays: to look at it again and again took a twentieth of the time
    gc.set_threshold(_COLLECTED)
    asked = talk.Reader(source)
    parent, memory, *setup = pickle.loads(asked.read())
    if parent:
        process.die_with_parent(parent)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the caller has had enough
    process.adopt_orphans()
    process.set_inspectable(False)
    try:
        judge = Judge((setup[0], setup[1], setup[2]))
        if setup[0] == "host" and setup[1] is None:  # sanitizers and CUDA reserve more addresses than there is memory
            _limit_memory(memory)
        talk.write(target, talk.encode({"ready": True}))
    except BackendError as error:
        talk.write(target, talk.encode({"error": type(error).__name__, "text": str(error)}))
        return 1
    try:
        while True:
            reply, arrays = judge.answer(*pickle.loads(asked.read()))  # our own process wrote it
            talk.write(target, talk.encode(reply))
            for array in arrays:
                talk.write(target, array)
    except talk.Ended:
        return 0
    finally:
        judge.child.end()


def _limit_memory(most: int) -> None:
    """So much for this process beside what it has now, mostly addresses of libraries, and as much for the kernel's."""
    limit = most + os.sysconf("SC_PAGE_SIZE") * int(_STATM.read_text().split()[0] if _STATM.exists() else 0)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
