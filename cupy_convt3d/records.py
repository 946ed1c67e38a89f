"""Data files read back: JSON made into dataclasses, each field by its declared type, with the place of what does not fit."""

from __future__ import annotations

import collections.abc
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from .errors import DataError, shown
from .files import read_text

T = TypeVar("T")
_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def parse(text: str, where: str) -> Any:
    """Return what a JSON text says.

    Raises:
        DataError: it is no JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is no JSON: {error}") from None


def read(path: Path, where: str) -> Any:
    """Return what a JSON file says.

    Raises:
        FileNotFoundError: there is no file.
        DataError: it cannot be read, or is no JSON.
    """
    try:
        return parse(read_text(path), where)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise error if isinstance(error, DataError) else DataError(f"{where}: cannot be read: {error}") from None


def make(kind: type[T], value: object, where: str, *, more: bool = False) -> T:
    """Return a dataclass with the fields of a JSON object, each of the type that the class declares.

    Args:
        more: leave out fields that the class does not have; else they are refused.

    Raises:
        DataError: a field is missing, unknown, or of another type; the message names it and its value.
    """
    given = mapping(value, where)
    hints, needed = _fields(kind)  # type: ignore[arg-type]
    if not more and (unknown := given.keys() - hints.keys()):
        raise DataError(f"{where}: unknown field {shown(sorted(map(str, unknown))[0])}")
    if missing := needed - given.keys():
        raise DataError(f"{where}: field {sorted(missing)[0]!r} is missing")
    return kind(**{name: typed(given[name], hint, f"{where}: {name}") for name, hint in hints.items() if name in given})


def mapping(value: object, where: str) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object; raises DataError else."""
    if not isinstance(value, dict):
        raise DataError(f"{where}={shown(value)}: must be an object with named fields")
    return value


def of_format(value: object, where: str, known: int) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object whose `format` is the known one; raises DataError else."""
    data = mapping(value, where)
    if (found := data.get("format")) != known:
        raise DataError(f"{where}: format={shown(found)}: must be {known}")
    return data


def sequence(value: object, where: str) -> list[Any]:
    """Return `value` if it is a JSON list; raises DataError else."""
    if not isinstance(value, list):
        raise DataError(f"{where}={shown(value)}: must be a list")
    return value


def one_of(value: object, known: collections.abc.Collection[str], where: str) -> None:
    """Raise DataError unless `value` is one of the known names."""
    if not isinstance(value, str) or value not in known:
        raise DataError(f"{where}={shown(value)}: must be one of {', '.join(known)}")


def within(value: float | None, low: float, high: float, where: str) -> None:
    """Raise DataError unless `value` is None or a number from `low` to `high`."""
    if value is not None and not low <= value <= high:
        raise DataError(f"{where}={shown(value)}: must be from {low:g} to {high:g}")


def all_within(values: collections.abc.Sequence[float], low: float, high: float, where: str) -> None:
    """Raise DataError unless all values are numbers from `low` to `high`; names the first that is not."""
    for value in values:
        if not low <= value <= high:
            within(value, low, high, where)


def typed(value: Any, hint: Any, where: str) -> Any:
    """Return `value` if it is of a declared type: lists become tuples, whole numbers floats.

    Raises:
        DataError: it is not.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return typed(value, hint, where)
    if origin in (dict, collections.abc.Mapping):
        return {name: typed(item, arguments[1], f"{where}.{name}") for name, item in mapping(value, where).items()}
    if origin is tuple:
        if isinstance(value, list) and set(map(type, value)) == {arguments[0]} and arguments[0] in _WORDS:  # the most, and quick
            return tuple(value)
        return tuple(typed(item, arguments[0], f"{where}[{number}]") for number, item in enumerate(sequence(value, where)))
    if is_dataclass(hint):
        return make(hint, value, where)  # type: ignore[arg-type]
    if hint is object:
        return value
    if hint is float and type(value) is int and abs(value) < 2**1000:
        return float(value)
    if type(value) is not hint:
        raise DataError(f"{where}={shown(value)}: must be {_WORDS[hint]}")
    return value


@lru_cache(maxsize=32)
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of a dataclass's fields, and the names of those without a default."""
    hints = typing.get_type_hints(kind)
    own = fields(kind)
    needed = frozenset(f.name for f in own if f.default is MISSING and f.default_factory is MISSING)
    return {f.name: hints[f.name] for f in own}, needed
