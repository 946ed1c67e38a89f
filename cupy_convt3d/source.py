"""Where the `.cu` files and headers are, their digest, and instances: a kernel for one element type and configuration."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .kernel import Kernel

PACKAGE = Path(__file__).parent


def kernel_directory() -> Path:
    """Return the directory of the shipped kernels: `CONVT3D_KERNELS`, else a source tree's `kernels/`, else the package's.

    Raises:
        FileNotFoundError: none of them holds `include/convt3d.cuh`.
    """
    override = os.environ.get("CONVT3D_KERNELS")
    candidates = [Path(override)] if override else [PACKAGE.parent / "kernels", PACKAGE / "kernels"]
    for candidate in candidates:
        if (candidate / "include" / "convt3d.cuh").is_file():
            return candidate.resolve()
    raise FileNotFoundError(f"no kernels found (looked for include/convt3d.cuh in {', '.join(map(str, candidates))})")


def include_directory() -> Path:
    return kernel_directory() / "include"


def header_digest() -> str:
    """Return a digest of the names and contents of all headers: an edited header makes every binary a new one."""
    root = include_directory()
    stamps = tuple((str(f.relative_to(root)), f.stat().st_mtime_ns, f.stat().st_size) for f in sorted(root.rglob("*.*h")))
    return _header_digest(root, stamps)


@lru_cache(maxsize=8)
def _header_digest(root: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, _, _ in stamps:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class Instance:
    """A kernel with its element type and tunables fixed: what is compiled, once for each backend and architecture.

    `specialization` is `Plan.specialization` on a GPU and empty on the host.
    """

    kernel: Kernel
    dtype: str
    specialization: tuple[tuple[str, int], ...] = ()

    @property
    def defines(self) -> tuple[str, ...]:
        macros = {**self.kernel.tunables, **dict(self.specialization)}
        return (f"CONVT3D_{self.dtype.upper()}", *(f"{name}={value}" for name, value in macros.items()))

    @property
    def file_name(self) -> str:
        """What compilers and errors call the source: the file's path, or the name of a kernel made from a string."""
        return str(self.kernel.path) if self.kernel.path else f"{self.kernel.name}.cu"

    def key(self, *more: str) -> str:
        """Return the digest of all that shapes the binary: source, headers, defines, and what the backend adds."""
        parts = (self.file_name, self.kernel.source, *self.defines, header_digest(), *more)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def __str__(self) -> str:
        return f"{self.kernel.name}[{self.dtype}]"


def numbered(source: str, around: list[int], context: int = 3) -> str:
    """Return the source lines near the given line numbers, numbered, the named ones marked."""
    lines = source.splitlines()
    shown = sorted({n for line in around for n in range(line - context, line + context + 1) if 1 <= n <= len(lines)})
    return "\n".join(f"{'>' if n in around else ' '}{n:5d} | {lines[n - 1]}" for n in shown)
