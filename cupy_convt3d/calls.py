"""Which calls a program makes: recorded while it runs, kept as JSON, so that what they need can be compiled ahead (`convt3d compile`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from . import records, registry
from .dtypes import DTYPES
from .errors import DataError, ProblemError, shown
from .files import write_whole
from .problem import LAYOUTS, PASSES, Problem

FORMAT = 1


@dataclass(frozen=True)
class Call:
    """What "auto" was asked for.

    Attributes:
        pass_name, problem: what is computed; the problem by its short name.
        precision, layout: of `dtypes.DTYPES`; "ncdhw" or "channels_last".
        packed: whether the packed weight is kept (`nn.freeze`).
    """

    pass_name: str
    problem: str
    precision: str
    layout: str = "ncdhw"
    packed: bool = False


_recordings: list[dict[Call, None]] = []


def note(pass_name: str, problem: Problem, precision: str, layout: str, packed: bool) -> None:
    """Tell those who record of a call."""
    for calls in _recordings:
        calls[Call(pass_name, str(problem), precision, layout, packed)] = None


@contextmanager
def recorded_calls(path: str | os.PathLike[str]) -> Iterator[None]:
    """Write to a JSON file which problems `algorithm="auto"` decides on within this context, in all threads: run a model once.

    Gradients are among them where they are asked for. `convt3d compile FILE.json` then compiles what these calls take.

    Raises:
        DataError: `path` can be no file's; said at once.
        OSError: the file cannot be written.
    """
    target = _target(path)
    calls: dict[Call, None] = {}
    _recordings.append(calls)
    registry.revise()  # a plan that was kept would be used and nothing said
    try:
        yield
    finally:
        _recordings.remove(calls)
    lines = [json.dumps(asdict(call), separators=(",", ":")) for call in calls]
    write_whole(target, f'{{"format": {FORMAT}, "calls": [\n' + ",\n".join(lines) + "\n]}\n")


def _target(path: object) -> Path:
    try:
        target = Path(os.fsdecode(os.fsencode(path)))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # no path, or half a character
        raise DataError(f"path={shown(path)}: must be the path of a file") from None
    if not target.name or "\0" in str(target) or target.is_dir() or not target.parent.is_dir():
        raise DataError(f"path={shown(path)}: must be the path of a file in a folder that is there")
    return target


def read(path: Path) -> list[Call]:
    """Return the calls of a file.

    Raises:
        FileNotFoundError: there is no file.
        DataError: it is damaged or foreign; the message names the field.
    """
    where = f"calls {str(path)!r}"
    data = records.of_format(records.read(path, where), where, FORMAT)
    return list(_checked(records.sequence(data.get("calls"), f"{where}: calls"), where))


def _checked(values: Iterable[object], where: str) -> Iterator[Call]:
    for number, value in enumerate(values, 1):
        place = f"{where}: call {number}"
        call = records.make(Call, value, place)
        for name, known in (("pass_name", PASSES), ("precision", DTYPES), ("layout", LAYOUTS)):
            records.one_of(getattr(call, name), known, f"{place}: {name}")
        try:
            Problem.parse(call.problem)
        except ProblemError as error:
            raise DataError(f"{place}: problem: {error}") from None
        yield call
