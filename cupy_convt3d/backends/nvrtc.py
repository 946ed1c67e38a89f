"""NVRTC: an instance and an architecture become machine code, with no GPU needed, cached with what the compiler said of it."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from .. import architecture, cache, scratch
from ..errors import BackendError, CompileError, printable
from ..includes import tree
from ..kernel import Kernel, global_symbol, without_comments
from ..limits import share_of_memory
from ..source import Instance, include_directory, shown_places
from .host_compiler import run_compiler
from .refusals import missing_header

_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)'(?P<body>.*?)(?=Compiling entry function|\Z)", re.DOTALL)
_MISSING = re.compile(r'^(?P<file>.+?)\((?P<line>\d+)\): catastrophic error: cannot open source file "(?P<name>.+?)"', re.MULTILINE)
_CUDAS_OWN = re.compile(r"cuda|cooperative_groups|crt/|mma\.h|cuComplex\.h|(?:device|vector|texture|surface|driver|host|sm_)\w*\.h")
_C_LINKAGE = re.compile(r'\bextern\s*("C"|   )\s*$')  # the contents of strings are blanked
_BLOCK_OF_C = re.compile(r'\bextern\s*("C"|   )\s*\{')
_NUMBERS = {
    "registers": re.compile(r"Used (\d+) registers"),
    "stack_bytes": re.compile(r"(\d+) bytes stack frame"),
    "spill_bytes": re.compile(r"(\d+) bytes spill stores"),
    "shared_bytes": re.compile(r"(\d+) bytes smem"),
}


def _nvrtc():  # type: ignore[no-untyped-def]  # CuPy has no type information
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            "the cuda backend needs CuPy with NVRTC: install cupy-convt3d[cuda12] or cupy-convt3d[cuda13], to match the driver "
            f"({error})"
        ) from None
    return nvrtc


def version() -> str:
    """Return NVRTC's version, such as "12.9".

    Raises:
        BackendError: CuPy or NVRTC is missing.
    """
    return ".".join(map(str, _nvrtc().getVersion()))


def target(kernel: Kernel, arch: str) -> str:
    """Return what a kernel is compiled for to run on `arch`: that, or PTX for a GPU that this NVRTC is too old to know.

    The PTX is for the newest architecture before it that NVRTC knows and the kernel is for; the driver makes machine code of it.

    Raises:
        BackendError: there is no such architecture; says what to install.
    """
    known, number = _nvrtc().getSupportedArchs(), architecture.capability(arch)
    if number in known:
        return arch
    older = [n for n in known if n < number and kernel.why_not_on(f"sm_{n}") is None]
    if not older:
        raise BackendError(
            f"{kernel.name} is for {architecture.described(kernel.architectures)}, and NVRTC {version()}, which knows sm_{min(known)} to "
            f"sm_{max(known)}, cannot compile it for this GPU, {arch}: install a CUDA toolkit, or nvidia-cuda-nvrtc, that knows {arch}"
        )
    return f"compute_{max(older)}"


@lru_cache(maxsize=1)
def cuda_headers() -> Path | None:
    """Return the folder of CUDA's own headers (cuda_fp16.h, cooperative_groups.h, ...) that fit NVRTC, None where there are none.

    They come with the CUDA toolkit and with the package nvidia-cuda-runtime; those of another major version do not compile.
    """
    import cupy
    from cuda.pathfinder import find_nvidia_header_directory  # type: ignore[import-untyped]

    root = cupy.cuda.get_cuda_path()
    folders = [Path(root) / "include"] if root else []
    folders += sorted(Path(cupy.__file__).parent.parent.glob("nvidia/*/include"))
    folders += [Path(found)] if (found := find_nvidia_header_directory("cudart")) else []
    return next((folder for folder in folders if _major_version(folder) == _nvrtc().getVersion()[0]), None)


def _major_version(headers: Path) -> int | None:
    try:
        found = re.search(r"#define CUDART_VERSION\s+(\d+)", (headers / "cuda_runtime_api.h").read_text(errors="replace"))
    except OSError:
        return None
    return int(found[1]) // 1000 if found else None


def _system_includes(own: Path) -> tuple[str, ...]:
    """CUDA's own headers where they are, the cuda::std library that CuPy brings, and stand-ins for the standard ones NVRTC lacks."""
    import cupy

    headers = cuda_headers()
    folders = [headers, headers / "cccl"] if headers else []
    folders += [Path(cupy.__file__).parent / "_core/include/cupy/_cccl/libcudacxx", own / "convt3d/standard"]
    return tuple(f"-I{folder}" for folder in folders if folder.is_dir())


def device_source(instance: Instance) -> str:
    """Return the source as NVRTC gets it: each `__global__` function has C linkage, so that its name is its symbol.

    Of those that the declaration launches, and this instance does not, templates are made: nobody calls them, so there is no code of them.
    """
    source, blanked, pieces, end = instance.kernel.source, without_comments(instance.kernel.source), [], 0
    left_out = {launch.symbol for launch in instance.kernel.launches} - set(instance.launched) if instance.launched else set()
    if _BLOCK_OF_C.search(blanked):  # where no template may stand
        left_out = set()
    for match in re.finditer(r"\b__global__\b", blanked):
        linkage = _C_LINKAGE.search(blanked[: match.start()])
        start = linkage.start() if linkage else match.start()
        if global_symbol(blanked, match.end()) in left_out and _begins(blanked[:start]):
            pieces += [source[end:start], "template <int> "]
            end = match.start()
        elif not linkage:
            pieces += [source[end:start], 'extern "C" ']
            end = start
    return instance.kernel.including("".join(pieces) + source[end:], instance.kernel.path or Path(), str)


def _begins(before: str) -> bool:
    """Whether a declaration begins behind a text without comments."""
    line = before.rstrip().rpartition("\n")[2].lstrip()
    return line.endswith((";", "}")) or not line or line.startswith("#")


def _own_headers(instance: Instance) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the texts of the kernel's own headers and the names by which they are included: their whole paths."""
    kernel = instance.kernel
    texts = (kernel.including(text, path, str) for path, text in kernel.headers.items())
    return tuple(texts), tuple(str(path) for path in kernel.headers)


def compiler_options(instance: Instance, arch: str, own: Path | None = None) -> tuple[str, ...]:
    """Return what NVRTC is told.

    Args:
        instance: what is compiled.
        arch: "sm_..." for a cubin, "compute_..." for PTX.
        own: where the package's headers are; None: in the package.
    """
    own = own or include_directory()
    return (
        f"-arch={arch}",
        "--std=c++17",
        "--device-as-default-execution-space",  # lambdas and helpers need no __device__
        "--ptxas-options=-v",
        "--generate-line-info",
        f"-I{own}",
        *_system_includes(own),
        *(["--no-cache"] if _nvrtc().getVersion() >= (12, 9) else []),  # what its own cache gives back comes without the log
        *(f"-D{define}" for define in instance.defines),
    )


def compile_cubin(instance: Instance, arch: str) -> tuple[bytes, str]:
    """Return the cubin of an instance for `arch` (such as "sm_90a") and the compiler's log; no GPU is needed.

    Where NVRTC is too old to know `arch` it is PTX, which the driver takes as well, and the log tells nothing of registers. A binary with
    all functions of the kernel, but general ones, that is in the cache (`convt3d compile` makes such) serves for one of a few.

    Raises:
        BackendError: CuPy or NVRTC is missing, or cannot compile for that GPU (`target`).
        CompileError: NVRTC refused the source; the message holds the numbered lines and NVRTC's own words.
    """
    compiled_for = target(instance.kernel, arch)
    options = compiler_options(instance, compiled_for)
    is_cubin = compiled_for.startswith("sm_")
    for one in filter(None, (instance.whole, instance)):
        name = f"{instance.kernel.name}-{compiled_for}-{one.key('cuda', version(), *options)}"
        if (found := _cached(name, is_cubin)) is not None:
            return found
    cache.require_compiling(f"{instance} for {arch}", f"{name}.cubin")
    with cache.making(f"{name}.cubin"):  # another process may have made it meanwhile
        return _cached(name, is_cubin) or _compile(instance, arch, name, compiled_for)


def compile_parts(instance: Instance, arch: str) -> list[tuple[Instance, bytes, str]]:
    """Return the parts of an instance with their cubins and logs, compiled side by side as `compile_cubin` does."""
    with ThreadPoolExecutor(len(instance.parts)) as pool:
        compiled = pool.map(lambda part: compile_cubin(part, arch), instance.parts)
        return [(part, *code) for part, code in zip(instance.parts, compiled, strict=True)]


def _cached(name: str, is_cubin: bool) -> tuple[bytes, str] | None:
    cubin, log = cache.load(f"{name}.cubin", begins=b"\x7fELF" if is_cubin else b""), cache.load(f"{name}.log")
    return None if cubin is None or log is None else (cubin, log.decode(errors="replace"))


def _compile(instance: Instance, arch: str, name: str, compiled_for: str) -> tuple[bytes, str]:
    code, log = _in_child(instance, arch, compiled_for)
    if code is None:
        raise _compile_error(instance, arch, log)
    cache.store(f"{name}.cubin", code)
    cache.store(f"{name}.log", log.encode())
    return code, log


def _in_child(instance: Instance, arch: str, compiled_for: str) -> tuple[bytes | None, str]:
    """Return what NVRTC makes of an instance, None where it refuses it, and its log; a process of its own has limits and no CuPy.

    Raises:
        CompileError: it ended without a word, or was ended.
    """
    with scratch.directory() as folder, tree(include_directory(), instance.kernel.overlay) as own:
        texts, names = _own_headers(instance)
        told = {
            "source": device_source(instance),
            "name": instance.file_name,
            "headers": texts,
            "names": names,
            "options": compiler_options(instance, compiled_for, own),
            "cubin": compiled_for.startswith("sm_"),
        }
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("nvrtc_child.py")), _library(), folder]
        done = run_compiler(command, json.dumps(told), f"{instance} for {arch}: NVRTC")
        log, code = (path.read_bytes() if (path := Path(folder) / file).exists() else None for file in ("log", "code"))
    text = (log or b"").decode(errors="replace").replace("\0", "")
    if log is None or (done.returncode == 0) != (code is not None):
        said = printable(done.stderr.strip()[-1000:], 1000)
        raise CompileError(
            f"{instance} for {arch}: NVRTC ended without a result (exit code {done.returncode}, {said or 'no message'}); it may use "
            f"{share_of_memory() >> 20} MiB of memory"
        )
    code = code.rstrip(b"\0") if code is not None and not told["cubin"] else code  # PTX is a C string
    return code, text or f"NVRTC error {done.returncode}"


@lru_cache(maxsize=1)
def _library() -> str:
    """Return the path of the NVRTC that CuPy has loaded; where the system does not tell, of the one that NVIDIA's packages bring.

    Raises:
        BackendError: there is none.
    """
    from cuda import pathfinder  # type: ignore[import-untyped]

    version()  # loads it
    maps = Path("/proc/self/maps")
    if maps.exists() and (found := re.search(r"/.*/libnvrtc\.so[^/\n]*$", maps.read_text(errors="surrogateescape"), re.MULTILINE)):
        return found[0]
    try:
        return str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path)
    except RuntimeError as error:
        raise BackendError(f"the cuda backend runs NVRTC in a process of its own and found no library of it ({error})") from None


def log_attributes(log: str) -> dict[str, dict[str, int]]:
    """Return registers, stack_bytes, spill_bytes and shared_bytes of each function, read from the compiler's log."""
    return {
        entry["symbol"]: {name: int(m[1]) if (m := pattern.search(entry["body"])) else 0 for name, pattern in _NUMBERS.items()}
        for entry in _ENTRY.finditer(log)
    }


def _compile_error(instance: Instance, arch: str, log: str) -> CompileError:
    places = [(file, int(line)) for file, line in re.findall(r"^(.+?)\((\d+)\): ", log, re.MULTILINE)]
    shown = shown_places(instance, places)
    if missing := _MISSING.search(log):
        name, where = missing["name"], f"{missing['file']}:{missing['line']}"
        if _CUDAS_OWN.match(name):
            version = _nvrtc().getVersion()[0]
            package = "nvidia-cuda-runtime" + (f"-cu{version}" if version < 13 else "")
            why = f"#include of {name}: CUDA's own headers for CUDA {version} are not here: install {package}, or the CUDA toolkit"
        else:
            why = missing_header(name, instance.kernel.path is not None)
        return CompileError(f"{instance} for {arch}: {where}: {why}\n{shown}")
    return CompileError(f"{instance} for {arch}: NVRTC refused it\n{shown}\n{log.strip()[:8000]}")
