"""The host backend: the same `.cu` files, compiled by the host's C++ compiler and run as fibers on one CPU thread."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

from .. import cache
from ..errors import BackendError, CompileError, LaunchError
from ..kernel import PlannedLaunch
from ..source import Instance, header_digest, include_directory, numbered
from .base import Arguments, Backend, Module, Packed
from .host_source import host_unit

# --sanitize NAME: compiler flags, the runtime to preload into Python, and the options that make it stop and say so.
SANITIZERS = {
    "address": (("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1"), "libasan.so"),
    "undefined": (("-fsanitize=undefined", "-fno-sanitize-recover=all", "-O1"), "libubsan.so"),
    "thread": (("-fsanitize=thread", "-O1"), "libtsan.so"),
}
_FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing", "-Wno-unknown-pragmas")
_UNOPTIMIZED = ("-O0", "-g0")  # come after the others and win
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
_LOCK = threading.Lock()  # ctypes releases the GIL, and the fiber runtime has one launch at a time
_MOST_MODULES = 24  # that a backend keeps: a kernel of 1024 threads has 2048 of the 65530 mappings that Linux lets a process have


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
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()[0]


def sanitizer_environment(sanitizer: str) -> dict[str, str]:
    """Return the environment variables with which a Python process can load kernels built under a sanitizer.

    Raises:
        BackendError: the compiler has no such runtime.
    """
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


def compile_unit(instance: Instance, output: Path, more_flags: Sequence[str] = ()) -> None:
    """Compile an instance to a shared library.

    Raises:
        CompileError: the compiler refused it.
        BackendError: there is no compiler.
    """
    path = compiler()
    flags = (*_FLAGS, *more_flags, *(f"-D{define}" for define in instance.defines))
    includes = [f"-I{include_directory()}", f"-I{include_directory() / 'convt3d/host/shim'}"]
    command = [path, *flags, *includes, "-x", "c++", "-", "-o", str(output)]
    unit = host_unit(instance, instance.kernel.launches)
    done = subprocess.run(command, input=unit, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _compile_error(instance, path, done.stderr)


def compiled_lines(instance: Instance) -> set[int]:
    """Return the numbers of the source's lines of which something is left after the preprocessor.

    Raises:
        CompileError: the preprocessor refused it.
    """
    path = compiler()
    flags = ("-std=c++17", "-E", *(f"-D{define}" for define in instance.defines))
    includes = [f"-I{include_directory()}", f"-I{include_directory() / 'convt3d/host/shim'}"]
    unit = host_unit(instance, instance.kernel.launches)
    done = subprocess.run([path, *flags, *includes, "-x", "c++", "-"], input=unit, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _compile_error(instance, path, done.stderr)
    found, number, inside = set(), 0, False
    for line in done.stdout.splitlines():
        if marker := re.match(r'# (\d+) "(.*)"', line):
            number, inside = int(marker[1]), marker[2] == instance.file_name
            continue
        if inside and line.strip():
            found.add(number)
        number += 1
    return found


def _release(library: ctypes.CDLL) -> None:
    """Give back the stacks of a library that is not launching; its next launch makes new ones."""
    if _LOCK.acquire(blocking=False):  # a collection may come in the middle of a launch
        try:
            library.convt3d_release()
        finally:
            _LOCK.release()


class HostModule(Module):
    """A loaded library; its launches run to the end before they return. With the module go the stacks of its threads."""

    def __init__(self, path: Path, instance: Instance, sanitizer: str | None) -> None:
        self._name = str(instance)
        self._sanitizer = sanitizer
        self._library = ctypes.CDLL(str(path))
        self._library.convt3d_message.restype = ctypes.c_char_p
        self._library.convt3d_argument_sizes.restype = ctypes.c_size_t
        self._library.convt3d_static_shared_bytes.restype = ctypes.c_size_t
        weakref.finalize(self, _release, self._library).atexit = False
        self._launch = self._library.convt3d_launch
        self._launch.argtypes = (ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, *[ctypes.c_uint64] * 3)
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
        if self._sanitizer == "thread" and threads > 256:
            raise LaunchError(f"{launch.symbol}: {threads} threads a block; the thread sanitizer takes at most 256")
        count = math.prod(launch.grid) if blocks is None else blocks
        grid, block = (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(*launch.block)
        with _LOCK:
            number, shared = self._numbers[launch.symbol], launch.shared_bytes
            if beside is not None:  # what is prepared is held back until the kernel waits for it
                packed = ctypes.create_string_buffer(ctypes.string_at(beside.address, beside.size), beside.size)
                ctypes.memset(beside.address, 0xFF, beside.size)  # NaN in every float type
                self._hold_back(beside.address, packed, beside.size // 4)
            failed = self._launch(number, grid, block, shared, arguments.address, seed, first_block, count)
            left = self._hold_back(None, None, 0) if beside is not None else 0
            if failed:
                raise LaunchError(f"{self._name}: {self._library.convt3d_message().decode(errors='replace')}")
            if left:
                raise LaunchError(f"{self._name}: {launch.symbol} has not waited for the launch before it (wait_for_packing)")

    def attributes(self, symbol: str) -> dict[str, int]:
        return {"shared_bytes": self._library.convt3d_static_shared_bytes()}


class HostBackend(Backend):
    """Runs kernels on the CPU.

    Args:
        sanitizer: None, "address" (with "undefined"), "undefined" or "thread"; such kernels load only into a process that was
            started with `sanitizer_environment`.
        optimize: False: compile in a fraction of the time, against precompiled headers, for examples so small that a compile
            takes longer than they do.
    """

    name = "host"

    def __init__(self, sanitizer: str | None = None, optimize: bool = True) -> None:
        if sanitizer is not None and sanitizer not in SANITIZERS:
            raise BackendError(f"sanitize={sanitizer!r}: must be one of {', '.join(SANITIZERS)}")
        self.sanitizer, self.optimize = sanitizer, optimize
        self.device_name = _processor()
        self._modules: dict[Instance, HostModule] = {}

    def compile(self, instance: Instance) -> HostModule:
        known = self._modules.pop(instance, None) or HostModule(self.library(instance), instance, self.sanitizer)
        self._modules[instance] = known  # the newest comes last
        if len(self._modules) > _MOST_MODULES:
            del self._modules[next(iter(self._modules))]
        return known

    def build(self, instance: Instance) -> None:
        self.library(instance)

    def library(self, instance: Instance) -> Path:
        """Return the path of the compiled library, from the cache where it is there and whole."""
        path = compiler()
        sanitize = SANITIZERS[self.sanitizer][0] if self.sanitizer else ()
        sanitize = sanitize if self.optimize else (*sanitize, *_UNOPTIMIZED)
        flags = (*_FLAGS, *sanitize)
        name = f"{instance.kernel.name}-{instance.key('host', path, _compiler_version(path), *flags)}.so"
        if cache.load(name) is not None:
            return cache.cache_directory() / name
        with tempfile.TemporaryDirectory() as directory:
            output = Path(directory) / "kernel.so"
            more = sanitize if self.optimize else (*sanitize, "-include", str(_precompiled(instance.dtype, flags)))
            compile_unit(instance, output, more)
            return cache.store(name, output.read_bytes())

    def capabilities(self) -> dict[str, str]:
        path = compiler()
        return {
            "backend": "host",
            "device": self.device_name,
            "compiler": _compiler_version(path),
            "cores": str(os.cpu_count()),
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


def _precompiled(dtype: str, flags: Sequence[str]) -> Path:
    """Return a header with all that every kernel includes; the compiler finds its precompiled form beside it."""
    path, digest = compiler(), header_digest()
    define = f"-DCONVT3D_{dtype.upper()}"
    key = hashlib.sha256("\0".join((path, _compiler_version(path), digest, define, _EVERY_KERNELS, *flags)).encode()).hexdigest()[:32]
    folder = cache.cache_directory() / f"headers-{key}"
    header = folder / "all.h"
    if not header.exists():
        includes = [f"-I{include_directory()}", f"-I{include_directory() / 'convt3d/host/shim'}"]
        with tempfile.TemporaryDirectory(dir=cache.cache_directory()) as temporary:
            draft = Path(temporary) / "all.h"
            draft.write_text(_EVERY_KERNELS)
            command = [path, *flags, define, *includes, "-x", "c++-header", str(draft), "-o", f"{draft}.gch"]
            subprocess.run(command, capture_output=True, check=False)  # without it the header itself is taken
            with contextlib.suppress(OSError):  # somebody else was first
                os.rename(temporary, folder)
                os.mkdir(temporary)
    return header


@lru_cache(maxsize=1)
def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _compile_error(instance: Instance, path: str, log: str) -> CompileError:
    prefix = f"{instance.file_name}:"
    lines = [int(n) for line in log.splitlines() if line.startswith(prefix) and (n := line[len(prefix) :].split(":")[0]).isdigit()]
    return CompileError(f"{instance}: {path} refused it\n{numbered(instance.kernel.source, lines[:5])}\n{log.strip()[:8000]}")
