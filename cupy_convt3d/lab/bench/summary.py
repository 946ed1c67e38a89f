"""What measured rows come to: the quickest right kernel of each problem, ratios to the rivals, geometric means over the layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ... import records
from ...dtypes import DTYPES
from ...problem import LAYOUTS, PASSES
from ...tuning import LONGEST_MS, SHORTEST_MS
from ..suites import SUITES
from .measure import Row

MEASURABLE_FLOOR_MS = 0.02  # below it a launch takes as long as the work, and a share of the floor says little
R = TypeVar("R", bound=Row)
_NUMBERS = ("difference", "error", "speedup", "share_of_floor")
_NO_NUMBERS = ("nan", "inf", "-inf")
LAYER_SETS = {"core": frozenset(SUITES["core"]), "all": None}  # None: whatever was measured


@dataclass(frozen=True)
class Comparison:
    """One problem, pass, precision and layout.

    Attributes:
        rival: the first rival's row, None where there is none.
        kernels: all kernels' rows.
        best: the quickest of them whose result is right, where each call packs the weight; None where there is none.
        best_frozen: the same where a frozen weight's packed form is kept.
        better_rival_ms: the first rival's median in the layout that suits it better; None where only one layout was tried.
    """

    case: str
    pass_name: str
    dtype: str
    layout: str
    rival: Row | None
    kernels: tuple[Row, ...]
    best: Row | None
    best_frozen: Row | None
    better_rival_ms: float | None

    def milliseconds(self, frozen: bool = False) -> float | None:
        """Return the best kernel's time: packing is in it unless the weight is frozen."""
        row = self.best_frozen if frozen else self.best
        return None if row is None else row.median_ms if frozen else as_called_ms(row)

    def ratio(self, better: bool = False, frozen: bool = False) -> float | None:
        """Return rival / kernel: the rival in the same layout, or in its better one."""
        ours = self.milliseconds(frozen)
        theirs = self.better_rival_ms if better else self.rival.median_ms if self.rival is not None else None
        return None if ours is None or theirs is None else theirs / ours

    def share_of_floor(self, frozen: bool = False) -> float | None:
        """Return floor / time, None where there is no floor or it is too short to say anything."""
        ours = self.milliseconds(frozen)
        floor_ms = None if self.best is None else self.best.floor_ms
        return None if ours is None or floor_ms is None or floor_ms < MEASURABLE_FLOOR_MS else floor_ms / ours


def rows_of(data: Mapping[str, Any], where: str = "results", kind: type[R] = Row) -> list[R]:  # type: ignore[assignment]
    """Return the rows of a results file; older files lack the newer fields, which then have their defaults.

    A file that is kept for long may have `columns`, the fields' names, and rows that are lists of their values; null: the default.

    Raises:
        DataError: a row is damaged; the message names its number and the field.
    """
    rows = records.sequence(data.get("rows"), f"{where}: rows")
    if "columns" in data:
        names = records.typed(data["columns"], tuple[str, ...], f"{where}: columns")
        given = [records.sequence(row, f"{where}: rows[{number}]") for number, row in enumerate(rows)]
        rows = [{name: value for name, value in zip(names, row, strict=False) if value is not None} for row in given]
    return [_row(row, f"{where}: rows[{number}]", kind) for number, row in enumerate(rows)]


def _row(given: object, where: str, kind: type[R]) -> R:
    fields = dict(records.mapping(given, where))
    for name in _NUMBERS:
        if fields.get(name) in _NO_NUMBERS:  # JSON has no words for them, so they are written as text
            fields[name] = float(fields[name])
    row = records.make(kind, fields, where, more=True)
    for name, known in (("pass_name", PASSES), ("dtype", DTYPES), ("layout", LAYOUTS)):
        records.one_of(getattr(row, name), known, f"{where}: {name}")
    for name in ("flop", "repeats", "bytes_moved", "workspace_bytes"):
        records.within(getattr(row, name), 0, 2**100, f"{where}: {name}")
    for name in ("median_ms", "low_ms", "high_ms", "floor_ms", "with_packing_ms"):
        records.within(getattr(row, name), SHORTEST_MS, LONGEST_MS, f"{where}: {name}")
    for name in ("compile_ms", "pack_ms", "first_call_ms"):
        records.within(getattr(row, name), 0, LONGEST_MS, f"{where}: {name}")
    for name in ("share_of_floor", "speedup"):
        records.within(getattr(row, name), 1e-30, 1e30, f"{where}: {name}")
    return row


def comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """Return one for each problem, pass, precision and layout, passes in their usual order, the rest as they come."""
    rows = list(rows)
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in sorted(rows, key=lambda row: PASSES.index(row.pass_name)):
        groups.setdefault((row.pass_name, row.dtype, row.case, row.layout), []).append(row)
    layouts = {row.layout for row in rows if row.is_rival}
    found = []
    for (pass_name, dtype, case, layout), own in groups.items():
        kernels = tuple(row for row in own if not row.is_rival)
        right = [row for row in kernels if row.median_ms is not None and not row.wrong]
        rival = next((row for row in own if row.is_rival), None)
        contests = [groups.get((pass_name, dtype, case, other), []) for other in layouts]
        known = [ms for ms in (_rival_ms(rows, rival) for rows in contests) if ms is not None]
        found.append(
            Comparison(
                case,
                pass_name,
                dtype,
                layout,
                rival,
                kernels,
                best=min(right, key=lambda row: as_called_ms(row) or math.inf, default=None),
                best_frozen=min(right, key=lambda row: row.median_ms or math.inf, default=None),
                better_rival_ms=min(known) if known and len(layouts) > 1 and all(contests) else None,
            )
        )
    return found


def as_called_ms(row: Row) -> float | None:
    """Return the time of a call as it is by default, with packing in it; the oldest files are of kernels that packed nothing."""
    return row.median_ms if row.with_packing_ms is None else row.with_packing_ms


def _rival_ms(rows: Sequence[Row], rival: Row | None) -> float | None:
    return next((row.median_ms for row in rows if rival is not None and row.contender == rival.contender), None)


def summary(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return geometric means for each precision, pass, layout and set of layers, with packing in the time and with frozen weights.

    Each entry says over how many of its `layers` the means go (`against_rival_layers`, ...), and which layers are missing or
    slower than the rival's better layout (or only layout), so that no mean hides one.
    """
    groups: dict[tuple[str, str, str], list[Comparison]] = {}
    for comparison in comparisons(rows):
        groups.setdefault((comparison.dtype, comparison.pass_name, comparison.layout), []).append(comparison)
    entries = []
    for (dtype, pass_name, layout), own in groups.items():
        for name, cases in LAYER_SETS.items():
            chosen = [c for c in own if cases is None or c.case in cases]
            for frozen in (False, True):
                if chosen:
                    entry = {"dtype": dtype, "pass_name": pass_name, "layout": layout, "layers": name, "frozen": frozen}
                    entries.append(entry | _means(chosen, frozen, len(chosen) if cases is None else len(cases)))
    return entries


def _means(chosen: Sequence[Comparison], frozen: bool, expected: int) -> dict[str, Any]:
    quantities = {
        "against_rival": [c.ratio(frozen=frozen) for c in chosen],
        "against_better_layout": [c.ratio(better=True, frozen=frozen) for c in chosen],
        "share_of_floor": [c.share_of_floor(frozen) for c in chosen],
    }
    means: dict[str, Any] = {"count": len(chosen), "expected": expected}
    for name, values in quantities.items():
        known = [value for value in values if value is not None]
        means |= {name: geometric_mean(known), f"{name}_layers": len(known)}
    strictest = [(c.case, c.ratio(True, frozen) or c.ratio(False, frozen)) for c in chosen]
    means["slower"] = {case: ratio for case, ratio in strictest if ratio is not None and ratio < 1}
    means["missing"] = [case for case, ratio in strictest if ratio is None]
    return means


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean; None of nothing."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None
