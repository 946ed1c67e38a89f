"""NVRTC: an instance and an architecture become a cubin, with no GPU needed, cached with what the compiler said of it."""

from __future__ import annotations

import re
from pathlib import Path

from .. import cache
from ..errors import BackendError, CompileError
from ..kernel import without_comments
from ..source import Instance, include_directory, numbered

_ENTRY = re.compile(r"Compiling entry function '(?P<symbol>\w+)'(?P<body>.*?)(?=Compiling entry function|\Z)", re.DOTALL)
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


def architecture(major: int, minor: int) -> str:
    """Return the target for a compute capability; Hopper gets sm_90a, which wgmma needs."""
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def _cuda_includes() -> list[str]:
    """CUDA's own headers where they are installed, for kernels that include cuda_fp16.h and the like."""
    import cupy

    root = cupy.cuda.get_cuda_path()
    folders = [Path(root) / "include"] if root else []
    folders += sorted(Path(cupy.__file__).parent.parent.glob("nvidia/*/include"))
    return [f"-I{folder}" for folder in folders if (folder / "cuda_fp16.h").is_file()]


def device_source(instance: Instance) -> str:
    """Return the source as NVRTC gets it: each `__global__` function has C linkage, so that its name is its symbol."""
    source, blanked, pieces, end = instance.kernel.source, without_comments(instance.kernel.source), [], 0
    for match in re.finditer(r"\b__global__\b", blanked):
        if not re.search(r'\bextern\s*("C"|   )\s*$', blanked[: match.start()]):
            pieces += [source[end : match.start()], 'extern "C" ']
            end = match.start()
    return "".join(pieces) + source[end:]


def compiler_options(instance: Instance, arch: str) -> tuple[str, ...]:
    """Return what NVRTC is told; `arch` is "sm_..." for a cubin, "compute_..." for PTX."""
    return (
        f"-arch={arch}",
        "--std=c++17",
        "--device-as-default-execution-space",  # lambdas and helpers need no __device__
        "--ptxas-options=-v",
        "--generate-line-info",
        f"-I{include_directory()}",
        *_cuda_includes(),
        *(["--no-cache"] if _nvrtc().getVersion() >= (12, 9) else []),  # what its own cache gives back comes without the log
        *(f"-D{define}" for define in instance.defines),
    )


def compile_cubin(instance: Instance, arch: str) -> tuple[bytes, str]:
    """Return the cubin of an instance for `arch` (such as "sm_90a") and the compiler's log; no GPU is needed.

    Raises:
        BackendError: CuPy or NVRTC is missing.
        CompileError: NVRTC refused the source; the message holds the numbered lines and NVRTC's own words.
    """
    nvrtc = _nvrtc()
    options = compiler_options(instance, arch)
    version = ".".join(map(str, nvrtc.getVersion()))
    name = f"{instance.kernel.name}-{arch}-{instance.key('cuda', version, *options)}"
    cubin, log = cache.load(f"{name}.cubin"), cache.load(f"{name}.log")
    if cubin is not None and log is not None:
        return cubin, log.decode()
    program = nvrtc.createProgram(device_source(instance), instance.file_name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        cubin = nvrtc.getCUBIN(program)
        text = nvrtc.getProgramLog(program).replace("\0", "")
    except nvrtc.NVRTCError as error:
        raise _compile_error(instance, arch, nvrtc.getProgramLog(program).replace("\0", "") or str(error)) from None
    finally:
        nvrtc.destroyProgram(program)
    cache.store(f"{name}.cubin", cubin)
    cache.store(f"{name}.log", text.encode())
    return cubin, text


def log_attributes(log: str) -> dict[str, dict[str, int]]:
    """Return registers, stack_bytes, spill_bytes and shared_bytes of each function, read from the compiler's log."""
    return {
        entry["symbol"]: {name: int(m[1]) if (m := pattern.search(entry["body"])) else 0 for name, pattern in _NUMBERS.items()}
        for entry in _ENTRY.finditer(log)
    }


def _compile_error(instance: Instance, arch: str, log: str) -> CompileError:
    lines = [int(n) for n in re.findall(re.escape(instance.file_name) + r"\((\d+)\)", log)]
    return CompileError(f"{instance} for {arch}: NVRTC refused it\n{numbered(instance.kernel.source, lines[:5])}\n{log.strip()[:8000]}")
