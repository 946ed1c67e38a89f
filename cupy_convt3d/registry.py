"""The registered kernels: every `.cu` file of the kernel directory, found by its declaration."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from .errors import KernelError
from .kernel import Kernel
from .source import kernel_directory


@lru_cache(maxsize=4)
def _shipped(directory: Path, stamps: tuple[tuple[str, int], ...]) -> dict[str, Kernel]:
    return {Path(name).stem: Kernel.from_file(directory / name) for name, _ in stamps}


def kernels(pass_name: str | None = None) -> dict[str, Kernel]:
    """Return the registered kernels by name, of one pass or of all."""
    directory = kernel_directory()
    shipped = _shipped(directory, tuple((f.name, f.stat().st_mtime_ns) for f in sorted(directory.glob("*.cu"))))
    return {name: kernel for name, kernel in shipped.items() if pass_name in (None, kernel.pass_name)}


def kernel(name: str) -> Kernel:
    """Return the registered kernel of that name.

    Raises:
        KernelError: there is none; the message lists those there are.
    """
    known = kernels()
    if name not in known:
        raise KernelError(f"kernel {name!r}: not registered; there are {', '.join(known)}")
    return known[name]
