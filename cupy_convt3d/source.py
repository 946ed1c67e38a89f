"""Where the `.cu` files and headers are, their digest, and instances: a kernel for one element type and configuration."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from . import includes
from .dtypes import DTYPES
from .errors import KernelError, shown
from .expressions import MOST_VALUE
from .kernel import Kernel, Launch, Plan, without_comments

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
    """Return a digest of the names and contents of all headers."""
    root = include_directory()
    files = sorted(f for f in root.rglob("*") if f.is_file())
    stamps = tuple((str(f.relative_to(root)), f.stat().st_mtime_ns, f.stat().st_size) for f in files)
    return _header_digest(root, stamps)


@lru_cache(maxsize=8)
def _header_digest(root: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, _, _ in stamps:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()


def headers_of(kernel: Kernel, *, host: bool, prelude: str = "") -> dict[str, str]:
    """Return the texts of the package's headers that a kernel includes, by their names, the kernel's overlay in their places.

    Args:
        host: as `includes.headers` takes it.
        prelude: what its compiler gets in front of it.
    """
    own = {kernel.path or Path(): kernel.source, **kernel.headers}
    texts = (kernel.including(text, file, str) for file, text in own.items())
    root = include_directory()
    found = includes.headers((prelude, *texts), root, kernel.overlay, host)
    return {name: text for name, text in found.items() if root / name not in kernel.headers} if kernel.headers else found


def code_digest(kernel: Kernel) -> str:
    """Return a digest of what a GPU runs: declaration, code and the headers it includes, but no comments, spaces and paths.

    It names what a measurement was made with, so it is the same on every machine and changes with whatever changes speed.
    """
    return _code_digest(kernel, tuple(headers_of(kernel, host=False).values()))


_DEFAULT = re.compile(r"^#ifndef (\w+)\n#define \1 .*\n#endif", re.MULTILINE)
_COMMENT_OR_STRING = re.compile(r"//[^\n]*|/\*.*?(?:\*/|\Z)|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)


@lru_cache(maxsize=1024)
def _code_digest(kernel: Kernel, headers: tuple[str, ...]) -> str:
    texts = [kernel.source, *headers, *kernel.headers.values()]
    tables = (kernel.specialize, kernel.constants, kernel.restrictions, kernel.workspace)
    # What is left at its default is left out, so that entries outlive a new key of the declaration; so is which binary has a function.
    keys = [f for f in fields(Launch) if f.name != "general"]
    launches = [{f.name: value for f in keys if (value := getattr(launch, f.name)) != f.default} for launch in kernel.launches]
    declared = (kernel.dtypes, launches, *map(dict, tables))
    code = [" ".join(code_alone(text).split()) for text in texts]
    return hashlib.sha256("\0".join([repr(declared), *code]).encode()).hexdigest()[:16]


@lru_cache(maxsize=1024)
def code_alone(text: str) -> str:
    """Return a text without its comments."""
    return _COMMENT_OR_STRING.sub(lambda m: " " if m[0][0] == "/" else m[0], text)


@dataclass(frozen=True)
class Instance:
    """A kernel with its element type and tunables fixed: what is compiled, once for each backend and architecture.

    Attributes:
        specialization: `Plan.specialization` on a GPU; nothing on the host.
        launched: the functions that a GPU's binary has of those that the declaration launches; nothing: all of them.
    """

    kernel: Kernel
    dtype: str
    specialization: tuple[tuple[str, int], ...] = ()
    launched: tuple[str, ...] = ()

    @classmethod
    def of_plan(cls, kernel: Kernel, dtype: str, plan: Plan) -> Instance:
        """Return what a GPU needs to launch a plan."""
        launched = tuple(dict.fromkeys(launch.symbol for launch in plan.launches))
        return cls(kernel, dtype, plan.specialization, () if len(launched) == len({one.symbol for one in kernel.launches}) else launched)

    @property
    def parts(self) -> tuple[Instance, ...]:
        """What a GPU has in binaries of their own: the functions that are compiled for the problem, and the general ones."""
        own, general = self.kernel.functions
        launched = self.launched or (*own, *general)
        if not set(launched) & set(general):
            return (self,)
        rest = tuple(symbol for symbol in launched if symbol in own)
        parts = (replace(self, launched=rest), Instance(self.kernel.with_default_tunables(), self.dtype, launched=general))
        return parts if rest else parts[1:]

    @property
    def whole(self) -> Instance | None:
        """The part with all functions that are compiled for the problem, if all that it has are such."""
        own, general = self.kernel.functions
        return replace(self, launched=own if general else ()) if self.launched and set(self.launched) <= set(own) else None

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros that compilers are given: the element type's, each tunable with its whole number, and those of `[specialize]`.

        Where no problem is known, on the host and for general functions, these are what the source says, else 1.

        Raises:
            KernelError: the kernel has no such dtype, or a macro is none: text would be code.
        """
        if self.dtype not in self.kernel.dtypes or self.dtype not in DTYPES:
            raise KernelError(f"{self.kernel.name} has no {shown(self.dtype)} instance (it has {', '.join(self.kernel.dtypes)})")
        macros = {**dict.fromkeys(self.kernel.specialize, 1), **self.kernel.tunables, **dict(self.specialization)}
        for name, value in macros.items():
            if type(value) is not int or abs(value) > MOST_VALUE or not (name.isidentifier() and name.isascii()):
                raise KernelError(f"{self.kernel.name}: macro {shown(name)}={shown(value)}: must be a name with a whole number")
        return (f"CONVT3D_{self.dtype.upper()}", *(f"{name}={value}" for name, value in macros.items()))

    @property
    def file_name(self) -> str:
        """What compilers and errors call the source: the file's path, or the name of a kernel made from a string."""
        path = str(self.kernel.path or "")
        plain = path.isprintable() and not set(path) & set("\"\\")  # else it could not stand between quotes in C
        return path if path and plain else f"{self.kernel.name}.cu"

    @property
    def texts(self) -> dict[str, str]:
        """The kernel's own files, by the names that compilers give them: its source and the headers beside it."""
        return {self.file_name: self.kernel.source, **{str(path): text for path, text in self.kernel.headers.items()}}

    def key(self, backend: str, *more: str, prelude: str = "") -> str:
        """Return the digest of all that shapes the binary: source, the headers included, the defines they use, and what is added.

        Args:
            backend: "host" or "cuda".
            more: what the backend adds, such as its compiler's version.
            prelude: as `headers_of` takes it.
        """
        headers = headers_of(self.kernel, host=backend == "host", prelude=prelude)
        used = _code_words("\n".join(self.texts.values())).union(*map(_words, headers.values()))
        defines = [define for define in self.defines if define.partition("=")[0] in used or "=" not in define]
        files = (part for name_and_text in (*self.texts.items(), *headers.items()) for part in name_and_text)
        parts = (backend, *files, *defines, prelude, *more, *self.launched)
        return hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]

    def __str__(self) -> str:
        macros = "".join(f", {name}={value}" for name, value in self.specialization)
        return f"{self.kernel.name}[{self.dtype}{macros}]"


@lru_cache(maxsize=1024)
def _code_words(source: str) -> frozenset[str]:
    """Return the words of a kernel's code, but not those that are only a tunable's default."""
    return _words(_DEFAULT.sub("", without_comments(source)))


@lru_cache(maxsize=1024)
def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


def shown_places(instance: Instance, places: Iterable[tuple[str, int]]) -> str:
    """Return the numbered lines of the kernel's file and of its headers near the places (file and line) that a compiler named."""
    texts = instance.texts
    lines: dict[str, list[int]] = {}
    for file, line in list(dict.fromkeys(place for place in places if place[0] in texts))[:5]:
        lines.setdefault(file, []).append(line)
    return "\n".join(
        (f"{file}:\n" if file != instance.file_name else "") + numbered(texts[file], around) for file, around in lines.items()
    )


def numbered(source: str, around: list[int], context: int = 3) -> str:
    """Return the source lines near the given line numbers, numbered, the named ones marked."""
    lines = source.splitlines()
    shown = sorted({n for line in around for n in range(line - context, line + context + 1) if 1 <= n <= len(lines)})
    return "\n".join(f"{'>' if n in around else ' '}{n:5d} | {lines[n - 1]}" for n in shown)
