"""The one rewriting a kernel needs to be C++: `__shared__` declarations become references into the block's arena."""

from __future__ import annotations

import re

from ..errors import KernelError
from ..kernel import Launch, split_top_level, without_comments
from ..source import Instance

# A declaration: qualifiers in any order around __shared__, a type, declarators with dimensions, up to the semicolon.
_SHARED = re.compile(
    r"(?P<before>(?:\b(?:extern|static|volatile|__align__\s*\(\s*\d+\s*\)|alignas\s*\(\s*\d+\s*\))\s+)*)"
    r"\b__shared__\b(?P<rest>[^;{}]*(?:\{[^{}]*\}[^;{}]*)?);"
)
_QUALIFIER = re.compile(r"\b(?:extern|static|volatile|__align__\s*\([^)]*\)|alignas\s*\([^)]*\))")
_DECLARATOR = re.compile(r"\s*(?P<name>\w+)\s*(?P<dimensions>(?:\[[^\]]*\]\s*)*)$", re.DOTALL)


def rewrite_shared(source: str, file_name: str) -> str:
    """Return the source with each `__shared__` declaration replaced by the host runtime's macro, lines kept.

    Raises:
        KernelError: a declaration stands outside any function, or has a form that is not understood.
    """
    blanked = without_comments(source)
    pieces, end = [], 0
    for match in _SHARED.finditer(blanked):
        line = blanked.count("\n", 0, match.start()) + 1
        if blanked.count("{", 0, match.start()) == blanked.count("}", 0, match.start()):
            raise KernelError(f"{file_name}:{line}: __shared__ outside a function; declare it where it is used")
        pieces += [source[end : match.start()], _macro(match, f"{file_name}:{line}"), "\n" * match[0].count("\n")]
        end = match.end()
    return "".join(pieces) + source[end:]


def _macro(match: re.Match[str], where: str) -> str:
    dynamic = "extern" in match["before"] or re.search(r"\bextern\b", match["rest"]) is not None
    declarators = split_top_level(_QUALIFIER.sub(" ", match["rest"]))
    first = re.fullmatch(r"\s*(?P<type>.*?[\w>*&}])\s*(?P<declarator>\b\w+\s*(?:\[[^\]]*\]\s*)*)", declarators[0], re.DOTALL)
    if first is None or not first["type"].strip():
        raise KernelError(f"{where}: cannot read this __shared__ declaration; write `__shared__ TYPE NAME[SIZE];`")
    kind = " ".join(first["type"].split())
    macros = []
    for text in [first["declarator"], *declarators[1:]]:
        declarator = _DECLARATOR.fullmatch(text)
        if declarator is None:
            raise KernelError(f"{where}: cannot read this __shared__ declaration; write one variable a line")
        dimensions = "".join(declarator["dimensions"].split())
        if dynamic:
            macros.append(f"CONVT3D_DYNAMIC_SHARED({declarator['name']}, {kind});")
        else:
            macros.append(f"CONVT3D_SHARED({declarator['name']}, {kind}{dimensions});")
    return " ".join(macros)


def host_unit(instance: Instance, launches: tuple[Launch, ...]) -> str:
    """Return the C++ the host compiler gets: runtime, the kernel's own source under its own name, and its entry points."""
    entries = ", ".join(f"CONVT3D_HOST_KERNEL({launch.symbol})" for launch in launches)
    body = rewrite_shared(instance.kernel.source, instance.file_name)
    return (
        f'#include "convt3d/host/runtime.h"\n#line 1 "{instance.file_name}"\n{body}\n'
        f'#line 1 "<host backend>"\nCONVT3D_HOST_KERNELS({entries})\n'
    )
