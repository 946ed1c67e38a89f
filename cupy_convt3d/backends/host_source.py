"""What is rewritten of a kernel so that it is C++ and can be checked.

`__shared__` declarations become references into the block's arena, a function says its launch bounds when it begins, and
`SPECIALIZED(macro, value)` has the number that the launch gives the macro.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from ..errors import KernelError
from ..kernel import Launch, split_top_level, without_comments
from ..source import Instance

# A declaration: qualifiers in any order around __shared__, a type, declarators with dimensions, up to the semicolon.
_SHARED = re.compile(
    r"(?P<before>(?:\b(?:extern|static|volatile|__align__\s*\(\s*\d+\s*\)|alignas\s*\(\s*\d+\s*\))\s+)*)"
    r"\b__shared__\b(?P<rest>[^;{}]*(?:\{[^{}]*\}[^;{}]*)?);"
)
_QUALIFIER = re.compile(r"\b(?:extern|static|volatile|__align__\s*\([^)]*\)|alignas\s*\([^)]*\))")
_SPECIALIZED = re.compile(r"\bSPECIALIZED\s*\(")
_GPU_ONLY = re.compile(r"^#if defined\(__CUDACC__\)\n(.*?)^#(?:else|elif|endif)", re.MULTILINE | re.DOTALL)
_HOST_ONLY = re.compile(r"^#if !defined\(__CUDACC__\)\n(.*?)^#(?:else|elif|endif)", re.MULTILINE | re.DOTALL)
_LAUNCH_BOUNDS = re.compile(r"\b__launch_bounds__\s*\(")
_NUMBER = "convt3d_number_"  # and the macro's name: the variable that holds its number
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


def rewrite_launch_bounds(source: str, macros: Collection[str]) -> str:
    """Return the source where each function with `__launch_bounds__` begins with them, those of `macros` as the launch's numbers."""
    blanked = without_comments(source)
    pieces, end = [], 0
    for match in _LAUNCH_BOUNDS.finditer(blanked):
        close, _ = _arguments(blanked, match.end())
        body = re.compile(r"[^;{}]*\{").match(blanked, close)
        line = blanked[blanked.rfind("\n", 0, match.start()) + 1 : match.start()]
        if body is None or line.lstrip().startswith("#"):  # a declaration, or a macro for one
            continue
        bounds = " ".join(blanked[match.end() : close].split())
        if macros:
            bounds = _word_of(macros).sub(rf"{_NUMBER}\1", bounds)
        pieces += [source[end : body.end()], f" convt3d_host::keep_launch_bounds({bounds});"]
        end = body.end()
    return "".join(pieces) + source[end:]


def _word_of(macros: Collection[str]) -> re.Pattern[str]:
    return re.compile(rf"\b({'|'.join(map(re.escape, macros))})\b")


def rewrite_specialized(source: str, macros: Collection[str], file_name: str) -> str:
    """Return the source with each `SPECIALIZED(macro, value)` in which one of `macros` stands replaced, lines kept.

    Where the value is a literal, a choice between two ways, the macro's number takes its place; else the two are compared. In a
    declaration that begins with `constexpr` the value stays: the number is known at a launch only.

    Raises:
        KernelError: it has not two arguments.
    """
    if not macros:
        return source
    word = _word_of(macros)
    blanked = without_comments(source)
    pieces, end = [], 0
    for match in _SPECIALIZED.finditer(blanked):
        close, commas = _arguments(blanked, match.end())
        if len(commas) != 1:
            line = blanked.count("\n", 0, match.start()) + 1
            raise KernelError(f"{file_name}:{line}: SPECIALIZED takes a macro and its value, was given {len(commas) + 1} arguments")
        macro, value = blanked[match.end() : commas[0]].strip(), blanked[commas[0] + 1 : close].strip()
        number, found = word.subn(rf"{_NUMBER}\1", macro)
        if not found or re.search(r"\bconstexpr\b[^;{}]*$", blanked[: match.start()]):
            continue
        literal = re.fullmatch(r"true|false|\d+", value)
        text = f"({number})" if literal else f'convt3d_host::specialized({number}, {value}, "{macro}", __FILE__, __LINE__)'
        pieces += [source[end : match.start()], text, "\n" * (blanked.count("\n", match.start(), close) - text.count("\n"))]
        end = close + 1
    return _compare_constants(_choose_ways("".join(pieces) + source[end:], word), word)


def _choose_ways(source: str, word: re.Pattern[str]) -> str:
    """Return the source with the number of each macro that chooses a way by itself, as in `MACRO ? a : b`, `MACRO || a`, in its place.

    Preprocessor lines and what begins with `constexpr` keep it.
    """
    blanked = without_comments(source)
    pieces, end = [], 0
    for match in re.finditer(rf"{word.pattern}(?=\s*(?:\?|\|\||&&))", blanked):
        line = blanked[blanked.rfind("\n", 0, match.start()) + 1 : match.start()]
        if blanked.count("{", 0, match.start()) == blanked.count("}", 0, match.start()):
            continue  # such as launch bounds
        operand = re.search(r"(?:[(=,;{}?:]|\|\||&&|\breturn)\s*!?\s*$", blanked[: match.start()])
        if operand and not line.lstrip().startswith("#") and not re.search(r"\bconstexpr\b[^;{}]*$", blanked[: match.start()]):
            pieces += [source[end : match.start()], f"{_NUMBER}{match[1]}"]
            end = match.end()
    return "".join(pieces) + source[end:]


def _compare_constants(source: str, word: re.Pattern[str]) -> str:
    """Return the source with a comparison behind each constant of the host that is another expression of macros on a GPU.

    That is one which a function has under `#if !defined(__CUDACC__)`, where `#if defined(__CUDACC__)` has a `constexpr` of its name.
    """
    blanked = without_comments(source)
    of_gpu: dict[str, str] = {}
    for block in _GPU_ONLY.finditer(blanked):
        for declared in re.finditer(r"\bconstexpr\s+[\w:]+\s+(?P<all>\w+\s*=[^;]*);", block[1]):
            for part in split_top_level(declared["all"]):
                name, _, value = part.partition("=")
                if word.search(value):
                    of_gpu[name.strip()] = word.sub(rf"{_NUMBER}\1", " ".join(value.split()))
    pieces, end = [], 0
    for block in _HOST_ONLY.finditer(blanked) if of_gpu else ():
        if blanked.count("{", 0, block.start()) == blanked.count("}", 0, block.start()):
            continue
        for declared in re.finditer(r"\bconst\s+[\w:]+\s+(?P<all>\w+\s*=[^;]*);", block[1]):
            names = [part.partition("=")[0].strip() for part in split_top_level(declared["all"])]
            at = block.start(1) + declared.end()
            compared = "".join(
                f' convt3d_host::same_constant({of_gpu[name]}, {name}, "{name}", __FILE__, __LINE__);' for name in names if name in of_gpu
            )
            pieces += [source[end:at], compared]
            end = at
    return "".join(pieces) + source[end:]


def _arguments(text: str, start: int) -> tuple[int, list[int]]:
    """Return where a macro's arguments end, from behind its parenthesis on, and the commas between them."""
    depth = 1
    commas: list[int] = []
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place, commas
        if depth == 1 and text[place] == ",":
            commas.append(place)
    return len(text), commas


def _numbers(macros: Sequence[str]) -> str:
    """Return the variables that hold the macros' numbers, and the function by which a launch sets them."""
    if not macros:
        return ""
    variables = ", ".join(_NUMBER + macro for macro in macros)
    taken = " ".join(f"{_NUMBER}{macro} = numbers[{place}];" for place, macro in enumerate(macros))
    return f"static int {variables};\nCONVT3D_EXPORTED CONVT3D_RUNTIME void convt3d_specialize(const int* numbers) {{ {taken} }}\n"


def host_unit(instance: Instance, launches: tuple[Launch, ...], folder: Path) -> str:
    """Return the C++ the host compiler gets: runtime, the kernel's own source under its own name, and its entry points.

    The kernel's own headers are rewritten as its source is, into `folder`, and say where they came from.
    """
    kernel = instance.kernel
    macros = tuple(kernel.specialize)
    copies = {header: folder / f"{number}_{header.name}" for number, header in enumerate(kernel.headers)}

    def rewritten(text: str, file: Path, name: str) -> str:
        text = kernel.including(text, file, lambda header: str(copies[header]))
        text = rewrite_launch_bounds(rewrite_shared(text, name), macros)
        return f'#line 1 "{name}"\n{rewrite_specialized(text, macros, name)}\n'

    for header, copy in copies.items():
        text = kernel.headers[header]
        copy.write_text(rewritten(text, header, str(header)), encoding="utf-8")
    entries = ", ".join(f"CONVT3D_HOST_KERNEL({launch.symbol})" for launch in launches)
    return (
        f'#include "convt3d/host/runtime.h"\n{_numbers(macros)}{rewritten(kernel.source, kernel.path or Path(), instance.file_name)}'
        f'#line 1 "<host backend>"\nCONVT3D_HOST_KERNELS({entries})\n'
    )
