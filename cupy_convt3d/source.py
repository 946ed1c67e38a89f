"""Where the `.cu` files and headers are, their digest, and instances: a kernel for one element type and configuration."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from .kernel import Kernel, without_comments

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


def code_digest(kernel: Kernel) -> str:
    """Return a digest of what a GPU runs: declaration, code and the headers it includes, but no comments, spaces and paths.

    It names what a measurement was made with, so it is the same on every machine and changes with whatever changes speed.
    """
    return _code_digest(kernel, header_digest())


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_DEFAULT = re.compile(r"^#ifndef (\w+)\n#define \1 .*\n#endif", re.MULTILINE)
_COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)


@lru_cache(maxsize=1024)
def _code_digest(kernel: Kernel, headers: str) -> str:
    texts, waiting = [kernel.source], [(include_directory(), kernel.source)]
    seen: set[Path] = set()
    while waiting:
        folder, text = waiting.pop()
        for name in _INCLUDE.findall(text):
            path = next((p for p in (folder / name, include_directory() / name) if p.is_file()), None)
            if path is not None and path.resolve() not in seen and "host" not in path.parts[-3:]:
                seen.add(path.resolve())
                waiting.append((path.parent, path.read_text()))
    texts += [path.read_text() for path in sorted(seen)]
    tables = (kernel.specialize, kernel.constants, kernel.restrictions, kernel.workspace)
    # What is left at its default is left out, so that entries outlive a new key of the declaration.
    launches = [{f.name: value for f in fields(launch) if (value := getattr(launch, f.name)) != f.default} for launch in kernel.launches]
    declared = (kernel.dtypes, launches, *map(dict, tables))
    code = [" ".join(_COMMENT_OR_STRING.sub(lambda m: " " if m[0][0] == "/" else m[0], text).split()) for text in texts]
    return hashlib.sha256("\0".join([repr(declared), *code]).encode()).hexdigest()[:16]


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
        """Return the digest of all that shapes the binary: source, headers, the defines they use, and what the backend adds."""
        used = _words(self.kernel.source, header_digest())
        defines = [define for define in self.defines if define.partition("=")[0] in used or "=" not in define]
        parts = (self.file_name, self.kernel.source, *defines, header_digest(), *more)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def __str__(self) -> str:
        macros = "".join(f", {name}={value}" for name, value in self.specialization)
        return f"{self.kernel.name}[{self.dtype}{macros}]"


@lru_cache(maxsize=1024)
def _words(source: str, headers: str) -> frozenset[str]:
    """Return the words of a kernel's code and of the headers, but not those that are only a tunable's default."""
    code = _DEFAULT.sub("", without_comments(source))
    texts = [code, *(path.read_text() for path in include_directory().rglob("*.*h"))]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


def numbered(source: str, around: list[int], context: int = 3) -> str:
    """Return the source lines near the given line numbers, numbered, the named ones marked."""
    lines = source.splitlines()
    shown = sorted({n for line in around for n in range(line - context, line + context + 1) if 1 <= n <= len(lines)})
    return "\n".join(f"{'>' if n in around else ' '}{n:5d} | {lines[n - 1]}" for n in shown)
