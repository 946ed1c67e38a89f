"""Results that were written by `convt3d report`, read back: the same rows and ceilings as on the day they were measured."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import records
from ...errors import DataError, KernelError
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
    where = f"report {str(path)!r}"
    try:
        data = records.mapping(records.read(Path(path), where), where)
        if data.get("kind") == "population":
            raise DataError(f"{where}: has calls over a population, which lab.bench.survey_summary reads")
        machine = records.typed(data.get("machine"), dict[str, str], f"{where}: machine")
        created = records.typed(data.get("created"), str, f"{where}: created")
        ceilings = None if data.get("ceilings", ...) is None else ceilings_of(data.get("ceilings"), f"{where}: ceilings")
        return Results(machine, created, rows_of(data, where), ceilings)
    except FileNotFoundError as error:
        raise KernelError(f"{where}: cannot be read as one: {error}") from None
    except DataError as error:
        raise KernelError(f"{error}; it cannot be read as a report") from None


def ceilings_of(given: object, where: str) -> Ceilings:
    """Return a file's ceilings; raises DataError where they are none."""
    ceilings = records.make(Ceilings, given, where)
    for name, rate in (("copy_bytes_per_s", ceilings.copy_bytes_per_s), *ceilings.gemm_flop_per_s.items()):
        records.within(rate, 1, 1e30, f"{where}: {name}")
    return ceilings


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
