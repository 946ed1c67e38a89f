"""What a process may switch off: by a variable of the environment, or within a context, then in all of its threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Switch:
    """On unless its variable is "0", or a context has it off."""

    def __init__(self, variable: str) -> None:
        self.variable = variable
        self._contexts = 0
        self._lock = threading.Lock()

    @property
    def is_off(self) -> bool:
        return self._contexts > 0 or os.environ.get(self.variable) == "0"

    @contextmanager
    def off(self) -> Iterator[None]:
        """Have it off until the context ends."""
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def _add(self, number: int) -> None:
        with self._lock:
            self._contexts += number


TRIALS = Switch("CONVT3D_TRIALS")
COMPILING = Switch("CONVT3D_COMPILE")


@contextmanager
def no_compiling() -> Iterator[None]:
    """Within this context, in all threads of the process, a call that would have to compile raises `BackendError`, which names what is
    missing; `CONVT3D_COMPILE=0` in the environment does so for the whole process. `convt3d compile` builds ahead.
    """
    with COMPILING.off():
        yield
