"""The registered kernels: every `.cu` file of the kernel directory, and those that were registered in this process."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from .errors import KernelError, ProblemError, shown
from .kernel import Kernel
from .problem import PASSES
from .source import kernel_directory

_Stamps = tuple[tuple[str, int], ...]  # the files of a folder, each with its time of change
_own: dict[str, Kernel] = {}  # registered in this process; they come before the files of the same name
revision = 0  # grows with each `revise`


@lru_cache(maxsize=256)
def _shipped_one(path: Path, stamps: _Stamps) -> Kernel:
    return Kernel.from_file(path)


@lru_cache(maxsize=4)
def _shipped(directory: Path, stamps: _Stamps) -> dict[str, Kernel]:
    return {Path(name).stem: _shipped_one(directory / name, stamps) for name, _ in stamps if name.endswith(".cu")}


def _stamps(directory: Path) -> _Stamps:
    return tuple((f.name, f.stat().st_mtime_ns) for f in sorted(directory.iterdir()) if f.is_file())


def kernels(pass_name: str | None = None) -> dict[str, Kernel]:
    """Return the registered kernels by name, of one pass or of all.

    Raises:
        ProblemError: there is no such pass.
    """
    if pass_name not in (None, *PASSES):
        raise ProblemError(f"pass_name={shown(pass_name)}: must be None or one of {', '.join(PASSES)}")
    directory = kernel_directory()
    shipped = _shipped(directory, _stamps(directory))
    return {name: kernel for name, kernel in {**shipped, **_own}.items() if pass_name in (None, kernel.pass_name)}


def is_shipped(kernel: Kernel) -> bool:
    """Whether a kernel's code came with the package, whatever its tunables are set to."""
    directory = kernel_directory()
    known = _shipped(directory, _stamps(directory)).get(kernel.name)
    return known is not None and kernel.has_code_of(known)


def register(kernel: Kernel, *, replace: bool = False) -> None:
    """Register a kernel under its name until this process ends.

    Raises:
        KernelError: it is no Kernel, or the name is taken and `replace` is false.
    """
    if not isinstance(kernel, Kernel):
        raise KernelError(f"kernel={shown(kernel)}: must be a Kernel")
    if not replace and kernel.name in kernels():
        raise KernelError(f"kernel {kernel.name!r}: is registered already; replace it knowingly or choose another name")
    _own[kernel.name] = kernel
    revise()


def revise() -> None:
    """Make whoever keeps an answer to "which kernel" ask again; called for a new kernel and for new tuning results."""
    global revision
    revision += 1


def state() -> tuple[int, str | None]:
    """Return what changes with the answer to "which kernel". An edited file does not change it: too dear to ask at each call."""
    return revision, os.environ.get("CONVT3D_KERNELS")


def kernel(name: str) -> Kernel:
    """Return the registered kernel of that name.

    Raises:
        KernelError: there is none; the message lists those there are.
    """
    if not isinstance(name, str):
        raise KernelError(f"name={shown(name)}: must be the name of a kernel")
    directory = kernel_directory()
    stamps = _stamps(directory)
    if name not in _own and f"{name}.cu" in dict(stamps):  # alone: to read all of them takes a while
        return _shipped_one(directory / f"{name}.cu", stamps)
    known = kernels()
    if name not in known:
        raise KernelError(f"kernel {name!r}: not registered; there are {', '.join(known)}")
    return known[name]
