"""Mutants: copies of a kernel, or of a header that it includes, with one thing changed, such as a bound, a sign or a barrier.

A check worth its name rejects them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from ...kernel import split_top_level, without_comments

Change = Callable[[re.Match[str]], list[str]]
Key = tuple[str, str, str, str, str, int]  # see `Mutant.key`


def _swap(*pairs: tuple[str, str]) -> Change:
    other = dict(pairs) | {b: a for a, b in pairs}
    return lambda match: [other[match[1]]]


# Operator: where (group 1 is replaced; binary operators stand between spaces, as clang-format leaves them), and by what.
_OPERATORS: dict[str, tuple[str, Change]] = {
    "bound": (r" (<=|>=|<|>) ", _swap(("<", "<="), (">", ">="))),
    "equality": (r" (==|!=) ", _swap(("==", "!="))),
    "sign": (r"(?<! [=(?:,]) ([+-]) ", _swap(("+", "-"))),
    "stride": (r" (\*) ", lambda match: ["+"]),
    "division": (r" (/) ", lambda match: ["*"]),
    "modulo": (r" (%) ", lambda match: ["/"]),
    "assignment": (r" (\+=|-=|\*=|/=) ", _swap(("+=", "-="), ("*=", "/="))),
    "logic": (r" (&&|\|\|) ", _swap(("&&", "||"))),
    "step": (r"(\+\+|--)(?=\w)", _swap(("++", "--"))),
    "constant": (r"(?<![\w.])(\d+)(?![\w.])", lambda match: [str(int(match[1]) + 1)]),
    "barrier": (r"(__syncthreads\(\)|__syncwarp\(\))", lambda match: ["(void)0"]),
    "guard": (r"\b(continue|return)(?=;)", lambda match: ["(void)0"]),
    "choice": (r"( \? )", lambda match: [" && false ? ", " || true ? "]),
    "accumulator": (r"\b(accum_t)\b", lambda match: ["float"]),
    "index type": (r"\b(index_t)\b", lambda match: ["int"]),
    "rounding": (r"\b(to_accum)\(", lambda match: ["(float)to_accum"]),
}
_CALL = re.compile(r"\b[a-z]\w*(?=\()")
_NO_CALLS = {"for", "if", "while", "switch", "return", "sizeof"}
_CEIL_DIV = re.compile(r"ceil_div\(")


@dataclass(frozen=True)
class Mutant:
    """One change of one place.

    Attributes:
        operator: what kind of change.
        line: the number, from 1, of the line it is in; `text` is that line.
        before, after: what stood there and what stands there now.
        number: how many earlier changes of the same line have the same operator, before and after.
        source: the whole file with the change.
        file: "" for the kernel's own; a header's name among the package's ("convt3d/core/taps.cuh"), or the path of one beside the kernel.
    """

    operator: str
    line: int
    text: str
    before: str
    after: str
    number: int
    source: str
    file: str = ""

    @property
    def key(self) -> Key:
        """What it is known by as long as its line stays as it is."""
        return self.file, self.text, self.operator, self.before, self.after, self.number

    @property
    def place(self) -> tuple[str, int]:
        return self.file, self.line

    def __str__(self) -> str:
        where = f"{self.file} line" if self.file else "line"
        return f"{where} {self.line}, {self.operator}: `{self.before.strip()}` becomes `{self.after.strip()}` in `{self.text}`"


_COST = re.compile(r"^\[cost\]\n(?:[^\[\n].*\n|\n)*", re.MULTILINE)


def mutants(source: str, file: str = "") -> list[Mutant]:
    """Return every mutant of a kernel's source, or of a header's, in the order of the places; some may not compile.

    Preprocessor lines, static_asserts, launch bounds and the parameters of functions stay as they are, and of the declaration
    only the rounding up of grids is changed, not what is said of the kernel's cost.
    """
    found: list[Mutant] = []
    seen: dict[tuple[str, str, str, str], int] = {}
    for start, end, operator, after in sorted(set(_changes(source, declared=not file))):
        line_start, line = source.rfind("\n", 0, start) + 1, source.count("\n", 0, start) + 1
        text = source[line_start : source.find("\n", start)].strip()
        key = (text, operator, source[start:end], after)
        seen[key] = seen.get(key, -1) + 1
        changed = source[:start] + after + source[end:]
        found.append(Mutant(operator, line, text, source[start:end], after, seen[key], changed, file))
    return found


def _changes(source: str, declared: bool) -> Iterator[tuple[int, int, str, str]]:
    """Yield (start, end, operator, replacement)."""
    code = _mutable(source)
    for operator, (pattern, change) in _OPERATORS.items():
        for match in re.finditer(pattern, code):
            for after in change(match):
                yield match.start(1), match.end(1), operator, after
    for match in _CALL.finditer(code):
        if match[0] not in _NO_CALLS:
            yield from _swapped_arguments(code, match.end())
    declaration = source[: source.find("*/")] if declared else ""
    declaration = _COST.sub(lambda table: " " * len(table[0]), declaration)
    for match in _CEIL_DIV.finditer(declaration):
        end = _closing(declaration, match.end() - 1)
        dividend, divisor = split_top_level(declaration[match.end() : end])
        yield match.start(), end + 1, "grid", f"(({dividend.strip()}) // ({divisor.strip()}))"


def _swapped_arguments(code: str, opening: int) -> Iterator[tuple[int, int, str, str]]:
    """Yield the swaps of neighbouring arguments of a call that differ."""
    arguments = split_top_level(code[opening + 1 : _closing(code, opening)].replace("->", "  "))
    start = opening + 1
    for first, second in pairwise(arguments):
        end = start + len(first) + 1 + len(second)
        one, other = code[start : start + len(first)], code[start + len(first) + 1 : end]
        if one.split() != other.split():
            yield start, end, "arguments", f"{other.strip()}, {one.strip()}"
        start += len(first) + 1


def _closing(text: str, opening: int) -> int:
    """Return where the bracket at `opening` closes."""
    depth = 0
    for position in range(opening, len(text)):
        depth += (text[position] == "(") - (text[position] == ")")
        if depth == 0:
            return position
    return len(text)


def _mutable(source: str) -> str:
    """Return the source with all that is not to be changed blanked, every character in its place."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    code = without_comments(source)
    code = re.sub(r"^[ \t]*#.*$|\bstatic_assert\b[^;]*;|__launch_bounds__\s*\([^;{]*?\)", blank, code, flags=re.MULTILINE)
    # A function's head: from its qualifiers to its opening brace.
    return re.sub(r"(?:\bextern\b|\b__global__\b|\b__device__\b|\btemplate\b)[^;{}]*(?=\{)", blank, code)
