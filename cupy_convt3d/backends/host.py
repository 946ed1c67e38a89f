"""The host backend: the same `.cu` files, compiled by the host's C++ compiler and run as fibers on one CPU thread."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import hashlib
import math
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from .. import architecture, cache, scratch
from ..errors import BackendError, CompileError, LaunchError, shown
from ..files import read_bytes
from ..includes import headers, tree
from ..kernel import MAX_THREADS, PlannedLaunch, without_comments
from ..limits import cores
from ..source import Instance, headers_of, include_directory, shown_places
from . import refusals
from .base import Arguments, Backend, Module, Packed
from .host_compiler import environment_of_compiler, run_compiler, wrote_too_much
from .host_source import host_unit

# --sanitize NAME: compiler flags, the runtime to preload into Python, and the options that make it stop and say so.
SANITIZERS = {
    "address": (("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1"), "libasan.so"),
    "undefined": (("-fsanitize=undefined", "-fno-sanitize-recover=all", "-O1"), "libubsan.so"),
    "thread": (("-fsanitize=thread", "-O1"), "libtsan.so"),
}
_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wno-unknown-pragmas")
# What host/faults.h reports, without a sanitizer's runtime. Short loops are unrolled: then their indices are known to be inside.
_REPORTS = ("-fsanitize=alignment,bounds", "-fno-sanitize-recover=all", "-DCONVT3D_OWN_REPORTS", "-fpeel-loops")
_UNOPTIMIZED = ("-O0", "-g0")  # come after the others and win
_ANY_KERNEL = '#include "convt3d/host/runtime.h"\n'
# What the kernel's own code calls is optimized all the same, and once: products of the tensor cores take longest. (clang ignores it.)
_EVERY_KERNELS = """\
#pragma GCC push_options
#pragma GCC optimize("O2")
#include "convt3d/host/runtime.h"
#include "convt3d/host/mma.h"
#include "convt3d/host/wgmma.h"
#pragma GCC pop_options
#include "convt3d.cuh"
"""
MOST_RACED = 256  # threads of a block, under the thread sanitizer
_LOCK = threading.Lock()  # ctypes releases the GIL, and the fiber runtime has one launch at a time
if hasattr(os, "register_at_fork"):  # a fork waits for another thread's launch: its half could never be ended in the child
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
_MOST_STACKS = 24 * 1024  # of the modules that a backend keeps; each has two of the 65530 mappings that Linux lets a process have


def compiler() -> str:
    """Return the path of the C++ compiler: `CXX`, else g++, else clang++.

    Raises:
        BackendError: there is none; the message says what to install.
    """
    for candidate in filter(None, (os.environ.get("CXX"), "g++", "clang++")):
        found = shutil.which(candidate)
        if found:
            return found
    raise BackendError(
        "the host backend needs a C++17 compiler and found none (CXX, g++, clang++): install one, "
        "for example `apt install g++`, `dnf install gcc-c++` or `xcode-select --install`"
    )


@lru_cache(maxsize=4)
def _compiler_version(path: str) -> str:
    asked = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, env=environment_of_compiler())
    return asked.stdout.partition("\n")[0]


def check_sanitizer(name: object) -> None:
    """Raise BackendError unless `name` is None or that of a sanitizer."""
    if name is not None and (not isinstance(name, str) or name not in SANITIZERS):
        raise BackendError(f"sanitize={shown(name)}: must be None or one of {', '.join(SANITIZERS)}")


def sanitizer_environment(sanitizer: str) -> dict[str, str]:
    """Return the environment variables with which a Python process can load kernels built under a sanitizer.

    Raises:
        BackendError: there is no such sanitizer, or the compiler has no runtime of it.
    """
    check_sanitizer(sanitizer)
    library = SANITIZERS[sanitizer][1]
    path = subprocess.run([compiler(), f"-print-file-name={library}"], capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(path):
        raise BackendError(f"sanitizer {sanitizer!r}: {compiler()} has no {library}; install g++ with its sanitizer libraries")
    return {
        "LD_PRELOAD": os.path.realpath(path),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:exitcode=66:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:exitcode=66",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:ignore_noninstrumented_modules=1:report_thread_leaks=0:history_size=4",
    }


def _run_compiler(instance: Instance, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the compiler on an instance's unit in a folder of its own: what lies in the current one is no part of a kernel."""
    with scratch.directory() as folder, tree(include_directory(), instance.kernel.overlay) as own:
        unit = host_unit(instance, instance.kernel.launches, Path(folder))
        defines = [f"-D{define}" for define in instance.defines]
        if set(_REPORTS) <= set(arguments):
            defines += _without_runtime(Path(folder))
        places = [f"-fdebug-prefix-map={folder}={os.getcwd()}"]  # sanitizers complete a relative path
        if own != include_directory():  # a copy's place is no part of the code, nor of what a kernel says
            places.append(f"-fmacro-prefix-map={own}={include_directory()}")
        command = [compiler(), *arguments, *defines, *_include_flags(own), *places, "-x", "c++", "-"]
        return run_compiler(command, unit, str(instance), Path(folder))


def _without_runtime(folder: Path) -> list[str]:
    """Return the flags by which the linker takes no sanitizer's runtime."""
    if "clang" in _compiler_version(compiler()):
        return ["-fno-sanitize-link-runtime"]
    (folder / "libubsan.a").write_bytes(b"!<arch>\n")  # g++ asks for one all the same: it is empty
    return [f"-L{folder}"]


def _include_flags(own: Path) -> list[str]:
    return [f"-I{own}", f"-I{own / 'convt3d/host/shim'}"]


def compile_unit(instance: Instance, output: Path, more_flags: Sequence[str] = ()) -> None:
    """Compile an instance to a shared library.

    Raises:
        CompileError: the compiler refused it.
        BackendError: there is no compiler.
    """
    # Whatever is declared and defined nowhere is the linker's error; a sanitizer's own functions come with its runtime.
    sanitized = any("-fsanitize" in flag for flag in set(more_flags).difference(_REPORTS))
    strict = [] if sys.platform != "linux" or sanitized else ["-Wl,-z,defs"]
    done = _run_compiler(instance, *_FLAGS, *more_flags, *strict, "-o", str(output.absolute()))
    if done.returncode != 0:
        raise _compile_error(instance, done.stderr)


def compiled_places(instance: Instance) -> set[tuple[str, int]]:
    """Return the lines of which something is left after the preprocessor: file and number.

    The file is "" for the kernel's source, a header's name among the package's, or the path of one of the kernel's own.

    Raises:
        CompileError: the preprocessor refused it.
    """
    done = _run_compiler(instance, "-std=c++17", "-E")
    if done.returncode != 0:
        raise _compile_error(instance, done.stderr)
    lines = [(place, text) for place, text in refusals.preprocessed(done.stdout) if text.strip()]
    package = {f"/{name}": name for name in headers_of(instance.kernel, host=True)}

    def known(file: str) -> str:
        return "" if file == instance.file_name else next((name for end, name in package.items() if file.endswith(end)), file)

    names = {file: known(file) for (file, _), _ in lines}
    return {(names[file], number) for (file, number), _ in lines}


def _release(library: ctypes.CDLL) -> None:
    """Give back the stacks of a library that is not launching; its next launch makes new ones."""
    if _LOCK.acquire(blocking=False):  # a collection may come in the middle of a launch
        try:
            library.convt3d_release()
        finally:
            _LOCK.release()


class HostModule(Module):
    """A loaded library; its launches run to the end before they return. With the module go the stacks of its threads.

    Attributes:
        stacks: at most so many, as far as it was launched; before that, and under sanitizers, as many as any block has threads.
    """

    def __init__(self, path: Path, instance: Instance, sanitizer: str | None, reports_faults: bool = False) -> None:
        self._name = str(instance)
        self._sanitizer, self._reports_faults = sanitizer, reports_faults
        self.stacks, self._launched = MAX_THREADS, 0
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise _load_error(instance, error) from None
        try:
            self._bind(instance)
        except AttributeError:
            _ctypes.dlclose(self._library._handle)  # else the loader gives the same one for whatever comes to lie at its path
            raise
        weakref.finalize(self, _release, self._library).atexit = False

    def _bind(self, instance: Instance) -> None:
        """Find the library's functions; AttributeError if it has them not."""
        self._library.convt3d_message.restype = self._library.convt3d_own_instruction.restype = ctypes.c_char_p
        self._targets = instance.kernel.architectures
        self._library.convt3d_argument_sizes.restype = ctypes.c_size_t
        self._library.convt3d_static_shared_bytes.restype = ctypes.c_size_t
        self._launch = self._library.convt3d_launch
        self._launch.argtypes = (ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, *[ctypes.c_uint64] * 3)
        if instance.kernel.specialize:
            self._specialize = self._library.convt3d_specialize
        if instance.kernel.waits_for_packing:
            self._hold_back = self._library.convt3d_hold_back
            self._hold_back.argtypes, self._hold_back.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_size_t
        self._numbers = {launch.symbol: number for number, launch in enumerate(instance.kernel.launches)}
        self._sizes = {symbol: self._argument_sizes(number) for symbol, number in self._numbers.items()}

    def _argument_sizes(self, number: int) -> list[int]:
        sizes = (ctypes.c_size_t * self._library.convt3d_argument_sizes(number, None))()
        self._library.convt3d_argument_sizes(number, sizes)
        return list(sizes)

    def launch(
        self,
        launch: PlannedLaunch,
        arguments: Arguments,
        stream: int = 0,
        seed: int = 0,
        beside: Packed | None = None,
        first_block: int = 0,
        blocks: int | None = None,
    ) -> None:
        """Launch one function, or only the `blocks` blocks of its grid from `first_block` on, x fastest.

        Raises:
            LaunchError: a barrier diverges, threads wait for ever, or the launch passes a limit.
        """
        if arguments.sizes != self._sizes[launch.symbol]:
            raise LaunchError(f"{launch.symbol}: takes arguments of {self._sizes[launch.symbol]} bytes, was given {arguments.sizes}")
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        if self._sanitizer == "thread" and threads > MOST_RACED:
            raise LaunchError(f"{launch.symbol}: {threads} threads a block; the thread sanitizer takes at most {MOST_RACED}")
        if self._sanitizer is None:
            self.stacks = self._launched = max(self._launched, threads)
        count = math.prod(launch.grid) if blocks is None else blocks
        grid, block = (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(*launch.block)
        with _LOCK:
            number, shared = self._numbers[launch.symbol], launch.shared_bytes
            if self._reports_faults:
                self._library.convt3d_report_faults()  # anew: another library reports its own threads
            if launch.specialized:
                self._specialize((ctypes.c_int * len(launch.specialized))(*launch.specialized))
            if beside is not None:  # what is prepared is held back until the kernel waits for it
                packed = ctypes.create_string_buffer(ctypes.string_at(beside.address, beside.size), beside.size)
                self._hold_back(beside.address, packed, beside.size // 4)
            failed = self._launch(number, grid, block, shared, arguments.address, seed, first_block, count)
            left = self._hold_back(None, None, 0) if beside is not None else 0
            if failed:
                raise LaunchError(f"{self._name}: {self._library.convt3d_message().decode(errors='replace')}")
            own = self._library.convt3d_own_instruction().decode(errors="replace")
            if own and not all(target.endswith("a") for target in self._targets):
                raise LaunchError(
                    f"{self._name}: architectures: {own} is only there for a target such as sm_90a, and the kernel is declared for "
                    f"{architecture.described(self._targets)}"
                )
            if left:
                raise LaunchError(f"{self._name}: {launch.symbol} has not waited for the launch before it (wait_for_packing)")

    def attributes(self, symbol: str) -> dict[str, int]:
        return {"shared_bytes": self._library.convt3d_static_shared_bytes()}


class HostBackend(Backend):
    """Runs kernels on the CPU.

    Args:
        sanitizer: None, "address" (with "undefined"), "undefined" or "thread"; such kernels load only into a process that was
            started with `sanitizer_environment`.
        optimize: False: compile in a fraction of the time, for examples so small that a compile takes longer than they do.
    """

    name = "host"

    def __init__(self, sanitizer: str | None = None, optimize: bool = True) -> None:
        check_sanitizer(sanitizer)
        self.sanitizer, self.optimize = sanitizer, optimize
        self.device_name = _processor()
        self._modules: dict[Instance, HostModule] = {}

    def compile(self, instance: Instance) -> HostModule:
        known = self._modules.pop(instance, None) or self._loaded(instance)
        self._modules[instance] = known  # the newest comes last
        while len(self._modules) > 1 and sum(module.stacks for module in self._modules.values()) > _MOST_STACKS:
            del self._modules[next(iter(self._modules))]
        return known

    def _loaded(self, instance: Instance) -> HostModule:
        path = self.library(instance)
        try:
            return HostModule(path, instance, self.sanitizer, self.reports_faults)
        except (OSError, AttributeError) as error:  # whole, yet no library of ours
            cache.ignore(path, f"is no library of a kernel ({error})")
        path = self.library(instance)
        try:
            return HostModule(path, instance, self.sanitizer, self.reports_faults)
        except (OSError, AttributeError) as error:
            raise BackendError(
                f"{instance}: its library {str(path)!r} cannot be loaded ({error}); set {cache.VARIABLE} to a directory that programs may "
                "be run from"
            ) from None

    def build(self, instance: Instance) -> None:
        self.library(instance)

    def library(self, instance: Instance) -> Path:
        """Return the path of the compiled library, from the cache where it is there and whole."""
        path = compiler()
        sanitize = SANITIZERS[self.sanitizer][0] if self.sanitizer else _REPORTS
        sanitize = sanitize if self.optimize else (*sanitize, *_UNOPTIMIZED)
        flags = (*_FLAGS, *sanitize)
        prelude = _ANY_KERNEL if self.optimize else _EVERY_KERNELS
        name = f"{instance.kernel.name}-{instance.key('host', path, _compiler_version(path), *flags, prelude=prelude)}.so"
        if (found := cache.find(name)) is not None:
            return found
        cache.require_compiling(f"{instance} for the CPU", name)
        with cache.making(name), scratch.directory() as directory:
            if (found := cache.find(name)) is not None:  # another process has made it meanwhile
                return found
            output = Path(directory) / "kernel.so"
            header = _precompiled(instance, flags, prelude)
            if header is None:
                header = Path(directory) / "all.h"
                header.write_text(prelude)
            compile_unit(instance, output, (*sanitize, "-include", str(header)))
            return cache.store(name, output.read_bytes())

    def capabilities(self) -> dict[str, str]:
        path = compiler()
        return {
            "backend": "host",
            "device": self.device_name,
            "compiler": _compiler_version(path),
            "cores": str(cores()),
        }

    def synchronize(self) -> None:
        """Host launches are done when they return."""

    def time(self, call: Callable[[], object], repeats: int) -> list[float]:
        call()
        elapsed_ms = []
        for _ in range(repeats):
            start = time.perf_counter()
            call()
            elapsed_ms.append((time.perf_counter() - start) * 1e3)
        return elapsed_ms


def _precompiled(instance: Instance, flags: Sequence[str], text: str) -> Path | None:
    """Return a header with what every kernel includes; the compiler finds its precompiled form beside it.

    None: there is no room, or the kernel has other headers than the rest.
    """
    path, define = compiler(), () if text == _ANY_KERNEL else (f"-DCONVT3D_{instance.dtype.upper()}",)
    included = headers([text], include_directory(), {}, host=True)
    if included.keys() & instance.kernel.overlay.keys():
        return None
    files = (part for name_and_text in included.items() for part in name_and_text)
    parts = (path, _compiler_version(path), *files, *define, text, *flags)
    key = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:32]
    folder = cache.cache_directory().absolute() / f"headers-{key}"
    header = folder / "all.h"
    with cache.making(folder.name):
        if not _is_whole(header, text):
            scratch.remove(folder)
            begun = f".new-{folder.name}-"
            for killed in folder.parent.glob(f"{begun}*"):  # whoever has the lock is the only one
                scratch.remove(killed)
            with contextlib.suppress(OSError), scratch.directory(begun, folder.parent) as temporary:
                draft = Path(temporary) / "all.h"
                draft.write_text(text)
                more = [*define, *_include_flags(include_directory())]
                command = [path, *flags, *more, "-x", "c++-header", str(draft), "-o", f"{draft}.gch"]
                run_compiler(command, what="the headers that every kernel includes")  # without it the header itself is taken
                os.rename(temporary, folder)
    return header if _is_whole(header, text) else None


def _is_whole(header: Path, text: str) -> bool:
    """Whether a header has that text, and its precompiled form is a regular file where there is one: a compiler would wait for a pipe."""
    compiled = Path(f"{header}.gch")
    try:
        is_regular = stat.S_ISREG(header.lstat().st_mode) and (not os.path.lexists(compiled) or stat.S_ISREG(compiled.lstat().st_mode))
        return is_regular and read_bytes(header) == text.encode()
    except OSError:
        return False


@lru_cache(maxsize=1)
def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _compile_error(instance: Instance, log: str) -> CompileError:
    """Return the error for a compiler's log: one sentence where the host lacks what the kernel asks for, else the compiler's words."""
    if (why := wrote_too_much(log)) is not None:
        return CompileError(f"{instance}: {why}\n{log.strip()[:8000]}")
    files = set(instance.texts)
    found = refusals.from_log(log, instance.kernel.path is not None)
    if found is None or found[0][0] not in files:
        with contextlib.suppress(CompileError):  # the unit is too long to be read
            found = refusals.from_lines(refusals.preprocessed(_run_compiler(instance, "-std=c++17", "-E").stdout), files) or found
    found = found or _undefined(instance, log)
    if found is not None:
        place, why = found
        return CompileError(f"{instance}: {place[0]}:{place[1]}: {why}\n{shown_places(instance, [place])}")
    places = [(m["file"], int(m["line"])) for m in re.finditer(r"^(?P<file>[^:\n]+):(?P<line>\d+):", log, re.MULTILINE)]
    return CompileError(f"{instance}: {compiler()} refused it\n{shown_places(instance, places)}\n{log.strip()[:8000]}")


def _undefined(instance: Instance, log: str) -> tuple[tuple[str, int], str] | None:
    """Return the place and the sentence for a function that is declared and called but defined nowhere."""
    name = refusals.undefined_name(log)
    if name is None:
        return None
    word = re.compile(rf"\b{re.escape(name.rpartition('::')[2])}\b")
    texts = instance.texts
    lines = ((file, number, line) for file, text in texts.items() for number, line in enumerate(without_comments(text).splitlines(), 1))
    place = next(((file, number) for file, number, line in lines if word.search(line)), (instance.file_name, 1))
    return place, f"{name} is declared but defined nowhere that the host has"


def _load_error(instance: Instance, error: OSError) -> CompileError | OSError:
    """Return the error for a function that is defined nowhere, by which the library cannot be loaded; else what the loader says."""
    name = refusals.undefined_name(str(error))
    if name is not None and shutil.which("c++filt"):
        plain = subprocess.run(["c++filt", name], capture_output=True, text=True, check=False).stdout.strip()
        name = plain.partition("(")[0] or name
    found = _undefined(instance, f"undefined symbol: {name}") if name is not None else None
    if found is None:
        return error
    return CompileError(f"{instance}: {found[0][0]}:{found[0][1]}: {found[1]}\n{shown_places(instance, [found[0]])}")
