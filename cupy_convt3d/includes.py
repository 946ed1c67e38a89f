"""Which headers a source includes, through other headers too. No compiler is asked: what is included on some condition counts."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath

from . import scratch
from .errors import KernelError, printable

VARIABLE = "CONVT3D_INCLUDE"  # folders that kernels may include from, besides their own

QUOTED = re.compile(r'^(?P<before>[ \t]*#[ \t]*include[ \t]*)"(?P<name>[^"\n\0]+)"', re.MULTILINE)
_BLANK = r"[ \t\v\f\0]"
# Comments may stand between the words. One that holds another `/*` is refused there: so each is read once, whatever a text is made of.
_COMMENT_END = r"(?:(?!\*/|/\*).)*\*/"
_SPACE = rf"(?:{_BLANK}|/\*{_COMMENT_END})*"
_OPEN = rf"/\*(?!{_COMMENT_END})"
# One that holds a whole directive counts as one: a file too many does no harm. A match ends before the `#`: more may begin behind it.
_HASH = rf"(?:^|\*/)(?={_BLANK}*(?:#|%:|\?\?=){_SPACE}"
_NAME = r'(?:"(?P<quoted>[^"\n]+)"|<(?P<angled>[^<>\n]+)>'
_DIRECTIVE = re.compile(rf"{_HASH}(?:include_next|include|import|embed){_SPACE}{_NAME}|(?P<macro>\S{{0,200}})))", re.MULTILINE | re.DOTALL)
_ASKED = re.compile(rf"__has_(?:include|embed)(?=(?:_next)?(?:{_SPACE}\({_SPACE}{_NAME}))?)", re.DOTALL)
# What stands before one that asks for no file, only whether the compiler has such a thing.
_WHETHER = re.compile(rf"{_SPACE}(?:#|%:|\?\?=){_SPACE}(?:ifn?def{_SPACE}|(?:el)?if\b.*\bdefined{_SPACE}\(?{_SPACE})", re.DOTALL)
# With the name of a file: a compiler's messages would quote its lines. The operands of `#line` may be macros, those of `# 1` not.
_RENAMED = re.compile(
    rf"{_HASH}(?:line\b(?!{_SPACE}\d+{_SPACE}(?:\n|\Z|//))|\d[\w'.]*(?![\w'.]){_SPACE}(?:\w*\"|{_OPEN})))", re.MULTILINE | re.DOTALL
)
_UNREAD = re.compile(rf"{_HASH}{_OPEN})", re.MULTILINE | re.DOTALL)
_LONE_RETURN = re.compile(r"\r(?!\n)")
_SPLICE = re.compile(r"\\[ \t\v\f\0]*\n")  # of two lines, in the middle of a word too
_STAND_INS = {True: "convt3d/host/shim", False: "convt3d/standard"}  # for the headers of CUDA and C++, on the host and for NVRTC
_HOST = "convt3d/host/"

Names = tuple[tuple[str, bool], ...]


def headers(texts: Iterable[str], root: Path, overlay: Mapping[str, str], host: bool) -> dict[str, str]:
    """Return the texts of the headers under `root` that sources include, by their names under it, in order.

    Where one includes what is not there, such as a header of CUDA's, all stand-ins for such headers count: it may include them in turn.
    Where the name is a macro every file counts.

    Args:
        texts: of the sources.
        root: the include directory.
        overlay: texts in the place of files under `root`, or beside them.
        host: for the host's compiler. NVRTC never sees what the headers under `root` include from `convt3d/host`.
    """
    found: dict[str, str] = {}
    folder = str(root)
    waiting: list[tuple[str | None, str]] = [(None, text) for text in texts]

    def take(name: str) -> bool:
        if name in found:
            return True
        text = overlay[name] if name in overlay else _text(f"{folder}/{name}")
        if text is not None:
            found[name] = text
            waiting.append((name, text))
        return text is not None

    stand_ins_count = False
    while waiting:
        file, text = waiting.pop()
        names, by_macro = _names(text)
        for name, is_quoted in names:
            places = _places(file if is_quoted else None, name, _STAND_INS[host])
            if not host and file is not None and not file.startswith(_HOST) and any(place.startswith(_HOST) for place in places):
                continue
            if not any(map(take, places)) and not stand_ins_count:
                stand_ins_count = True  # once: most sources include several headers that are not there
                for other in _files(root / _STAND_INS[host]):
                    take(str(other.relative_to(root)))
        for other in _files(root) if by_macro else ():
            take(str(other.relative_to(root)))
    return dict(sorted(found.items()))


@lru_cache(maxsize=1024)
def _places(beside: str | None, name: str, stand_ins: str) -> list[str]:
    """Return where a name may be: beside the file that includes it in quotes, among all headers, among the stand-ins."""
    first = [str(PurePosixPath(beside).parent / name)] if beside is not None else []
    return [os.path.normpath(place) for place in (*first, name, f"{stand_ins}/{name}")]


@contextlib.contextmanager
def tree(root: Path, overlay: Mapping[str, str]) -> Iterator[Path]:
    """Give an include directory that has the overlay's files in the place of those of `root`: links to the others, for a while."""
    if not overlay:
        yield root
        return
    with scratch.directory("include-") as directory:
        copy = Path(directory)
        for file in _files(root):
            if (name := str(file.relative_to(root))) not in overlay:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                (copy / name).symlink_to(file)
        for name, text in overlay.items():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_text(text, encoding="utf-8", errors="surrogateescape")
        yield copy


@lru_cache(maxsize=1024)
def _names(text: str) -> tuple[Names, bool]:
    """Return what a text includes, each name with whether it stands in quotes, and whether it includes by a macro's name."""
    found = _directives(text)
    names = dict.fromkeys((m["quoted"] or m["angled"], m["quoted"] is not None) for m in found if m["quoted"] or m["angled"])
    return tuple(names), any(m.groupdict().get("macro") is not None for m in found)


def _directives(text: str) -> list[re.Match[str]]:
    joined = _joined(text)
    return [*_DIRECTIVE.finditer(joined), *(m for m in _ASKED.finditer(joined) if m["quoted"] or m["angled"])]


def _joined(text: str) -> str:
    return _SPLICE.sub("", text.replace("\r\n", "\n"))


def require_inside(text: str, shown: str, file: Path | None = None, folder: Path | None = None) -> None:
    """Check that a stranger's text includes nothing but what lies in the kernel's folder, and names that include directories have.

    `VARIABLE` allows other folders. What is included on some condition counts, and what stands in a comment. Nor may it give its lines
    another file's name, or end them in a way that compilers read differently.

    Args:
        text: of the file.
        shown: what errors call it.
        file: where it is; None: a string, which has no place.
        folder: the kernel's.

    Raises:
        KernelError: it includes something else; names file, line, and how to allow it.
    """
    where, joined = printable(shown, 200), _joined(text)
    if lone := _LONE_RETURN.search(text):
        raise KernelError(f"{where}:{_line(text, lone)}: a carriage return with no newline behind it; end lines with a newline")
    if renamed := _RENAMED.search(joined):
        raise KernelError(f"{where}:{_line(joined, renamed)}: a #line may have a number alone, not a file's name or a macro")
    if unread := _UNREAD.search(joined):
        raise KernelError(f"{where}:{_line(joined, unread)}: a comment behind a # must end, and hold no other /*")
    for asked in _ASKED.finditer(joined):
        before = joined[joined.rfind("\n", 0, asked.start()) + 1 : asked.start()]
        if not (asked["quoted"] or asked["angled"] or _WHETHER.fullmatch(before)):
            raise KernelError(f"{where}:{_line(joined, asked)}: __has_include could be of any file; write the file's own name behind it")
    allowed: set[tuple[str, bool]] = set()
    for match in _directives(text):
        name, in_quotes, macro = match["quoted"] or match["angled"], match["quoted"] is not None, match.groupdict().get("macro")
        if macro is not None:
            what = f"#include of {printable(macro, 200)} by a macro could be any file; write the file's own name"
            raise KernelError(f"{where}:{_line(joined, match)}: {what}")
        if (name, in_quotes) not in allowed and (why := _outside(name, in_quotes, file, folder)) is not None:
            line = next((number for number, row in enumerate(text.split("\n"), 1) if name in row and "define" not in row), 1)
            raise KernelError(f"{where}:{line}: #include of {printable(name, 200)} {why}")
        allowed.add((name, in_quotes))


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.end()) + 1


def _outside(name: str, in_quotes: bool, file: Path | None, folder: Path | None) -> str | None:
    """Return why a name may not be included, None if it may."""
    place = file.parent / name if file is not None and in_quotes else Path(name)
    try:
        found = os.path.isabs(name) or (file is not None and in_quotes and os.path.lexists(place))
    except ValueError:  # no file can have that name
        return None
    if not found:  # one of an include directory's, or of none
        return "leads out of the folders of headers" if ".." in PurePosixPath(name).parts else None
    allowed = [Path(other) for other in os.environ.get(VARIABLE, "").split(os.pathsep) if other] + ([folder] if folder else [])
    real = Path(os.path.realpath(place))
    if not any(real.is_relative_to(os.path.realpath(other)) for other in allowed):
        whose = f"the kernel's folder {printable(str(folder), 200)}" if folder is not None else "the package, and a string has no folder"
        return f"lies outside of {whose}; set {VARIABLE} to the folders that kernels may include from as well"
    return None if os.path.isfile(real) else "is no regular file"


def _text(path: str) -> str | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return _read(path, status.st_mtime_ns, status.st_size) if stat.S_ISREG(status.st_mode) else None


@lru_cache(maxsize=1024)
def _read(path: str, mtime_ns: int, size: int) -> str:
    return Path(path).read_text(encoding="utf-8", errors="surrogateescape")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
