"""Results that were written by `convt3d report`, read back: the same rows and ceilings as on the day they were measured."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import KernelError
from .measure import Ceilings, Row
from .summary import rows_of


@dataclass(frozen=True)
class Results:
    """A report's measurements.

    Attributes:
        machine: device, driver and compiler, as the report names them.
        created: when, ISO 8601, UTC.
        rows: every timed kernel and rival.
        ceilings: None where there was no GPU.
    """

    machine: Mapping[str, str]
    created: str
    rows: list[Row]
    ceilings: Ceilings | None


def load(path: str | Path) -> Results:
    """Read a report's JSON file.

    Raises:
        KernelError: the file cannot be read or is no report.
    """
    try:
        data: dict[str, Any] = json.loads(Path(path).read_text())
        rows = rows_of(data)
        ceilings = None if data["ceilings"] is None else Ceilings(**data["ceilings"])
        return Results(data["machine"], data["created"], rows, ceilings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KernelError(f"report {str(path)!r}: cannot be read as one: {type(error).__name__}: {error}") from None


def newest(directory: str | Path, dtype: str | None = None) -> Results:
    """Return the newest report in a directory that has ceilings, so one made on a GPU; files that are no reports are passed over.

    Args:
        dtype: one that it must have rows of.

    Raises:
        KernelError: there is none.
    """
    found = []
    for file in Path(directory).glob("*.json"):
        with contextlib.suppress(KernelError):
            found.append(load(file))
    measured = [
        results for results in found if results.ceilings is not None and any(dtype in (None, row.dtype) for row in results.rows)
    ]
    if not measured:
        raise KernelError(
            f"directory {str(directory)!r}: holds no report{f' of {dtype}' if dtype else ''} that was made on a GPU"
        )
    return max(measured, key=lambda results: results.created)
