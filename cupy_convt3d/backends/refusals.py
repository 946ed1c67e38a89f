"""What a kernel file may hold that a compiler here cannot take: each named by one sentence, with file and line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_COPIES = "asynchronous copies and their barriers run on a GPU alone (convt3d/pipe/pipeline.cuh has some for both)"
_LIBRARY = "the cuda:: library's barriers, pipelines and atomics run on a GPU alone (convt3d/pipe/pipeline.cuh has barriers for both)"
_PRODUCTS = "nvcuda::wmma runs on a GPU alone (convt3d/ptx/mma.cuh has products of the tensor cores for both)"
_SMALL_FLOATS = "the 8-bit and smaller floating types are a GPU's alone"
_TEMPLATES = "Thrust, CUB and CUTLASS run on a GPU alone"
_TEXTURES = "textures and surfaces are a GPU's alone"
_RUNTIME = "a kernel cannot call the CUDA runtime on the host, and its file needs no calls: the declaration says how it is launched"

_LIBRARY_NAMES = "barrier|pipeline|latch|semaphore|counting_semaphore|memcpy_async|thread_scope\\w*|device|ptx|atomic|atomic_ref"
# In what the preprocessor left of a kernel: a name, and why the host cannot run it.
_NAMES = tuple(
    (re.compile(pattern), why)
    for pattern, why in (
        (r'\b(?:asm|__asm__|__asm)\b(?!\s*(?:volatile|__volatile__)?\s*\(\s*"")', "inline PTX (asm) runs on a GPU alone"),
        (r"\b__managed__\b", "__managed__ memory is for programs with a host side of their own, which a kernel file has not"),
        (r"<<<|\bcudaLaunch\w*|\bcudaGetParameterBuffer", "a kernel cannot launch another one on the host"),
        (r"\bcuda[A-Z]\w*\s*\(", _RUNTIME),
        (r"\b(?:tex(?:1D|2D|3D|Cubemap)\w*|surf(?:1D|2D|3D|Cubemap)\w*|cuda(?:Texture|Surface)Object_t)\b|\btexture\s*<", _TEXTURES),
        (r"\b(?:nvcuda|wmma)\s*::", _PRODUCTS),
        (r"\bCUtensorMap\b|\bcp_async_bulk\w*", "copies by tensor maps (TMA) run on a GPU alone"),
        (rf"\bcuda\s*::\s*(?:{_LIBRARY_NAMES})\b", _LIBRARY),
        (r"\b__(?:pipeline|mbarrier)_\w+", _COPIES),
        (r"\b(?:thrust|cub|cutlass|cute)\s*::", _TEMPLATES),
        (r"\b(?:cluster_group|this_cluster|__cluster_\w+|clusterDim|clusterIdx)\b", "clusters of blocks run on a GPU alone"),
        (r"\b__nv_fp[468]\w*|\b__nv_cvt_\w+_to_fp8\w*", _SMALL_FLOATS),
    )
)
_HEADERS = tuple(
    (re.compile(pattern), why)
    for pattern, why in (
        (r"mma\.h", _PRODUCTS),
        (r"cuda/std/.*", "of the cuda::std library the host has <cuda/std/cstdint>, cmath, limits, type_traits and their kin alone"),
        (r"cuda/.*", _LIBRARY),
        (r"cuda_pipeline.*|cuda_awbarrier.*|cooperative_groups/memcpy_async\.h", _COPIES),
        (r"(?:thrust|cub|cutlass|cute)/.*", _TEMPLATES),
        (r"(?:texture|surface|cuda_texture|cuda_surface)_.*", _TEXTURES),
        (r"cuda_fp[468]\.h", _SMALL_FLOATS),
        (r"curand.*|cufft.*|cublas.*|cusparse.*|cuComplex\.h", "CUDA's other libraries run on a GPU alone"),
    )
)
_ADVICE = "; keep such code under #if defined(__CUDA_ARCH__), with other code for the host beside it"
_AT = r"^(?P<file>[^:\n]+):(?P<line>\d+):\d+: "
_MISSING = re.compile(_AT + r"fatal error: '?(?P<name>[^'\n:]+?)'?(?:: No such file| file not found)", re.MULTILINE)
_MARKED = re.compile(_AT + r"error: call to .* declared with (?:attribute error|'error' attribute): (?P<why>.+)$", re.MULTILINE)
_UNDEFINED = re.compile(r"(?:undefined reference to|undefined symbol:?|Undefined symbols[^\"]*) [`'‘\"]?(?P<name>[^'’\"\n]+)")
_LINE_MARKER = re.compile(r'# (?P<line>\d+) "(?P<file>.*?)"')

Place = tuple[str, int]


def missing_header(name: str, has_folder: bool) -> str:
    """Return the sentence for a header of the user's own that was not found."""
    if has_folder:
        return f"no header {name!r} lies beside this file, nor among those of the package"
    return f"no header {name!r} in the package, and a kernel made from a string has no folder: Kernel.from_file has its file's"


def preprocessed(text: str) -> Iterator[tuple[Place, str]]:
    """Yield the lines that a preprocessor left, each with the file and line it came from."""
    file, number = "", 0
    for line in text.splitlines():
        if marker := _LINE_MARKER.match(line):
            file, number = marker["file"], int(marker["line"])
            continue
        yield (file, number), line
        number += 1


def from_log(log: str, has_folder: bool) -> tuple[Place, str] | None:
    """Return what a C++ compiler's log tells of a header or function that the host lacks: place and sentence."""
    if missing := _MISSING.search(log):
        name = missing["name"]
        why = next((why for pattern, why in _HEADERS if pattern.fullmatch(name)), None)
        return (missing["file"], int(missing["line"])), f"#include of {name}: {why}{_ADVICE}" if why else missing_header(name, has_folder)
    if marked := _MARKED.search(log):
        return (marked["file"], int(marked["line"])), marked["why"].strip() + _ADVICE
    return None


def from_lines(lines: Iterable[tuple[Place, str]], files: set[str]) -> tuple[Place, str] | None:
    """Return the first place in `files` that holds what the host cannot run, and the sentence."""
    for place, line in lines:
        if place[0] not in files:
            continue
        code = re.sub(r'"(?:\\.|[^"\\])+"', '" "', line)
        for pattern, why in _NAMES:
            if pattern.search(code):
                return place, why + _ADVICE
    return None


def undefined_name(log: str) -> str | None:
    """Return the function that a linker or loader did not find, without its parameters."""
    found = _UNDEFINED.search(log)
    return found["name"].partition("(")[0].strip() if found else None
