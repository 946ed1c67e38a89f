"""What a survey's rows come to: ratios of torch to auto and to our kernels, shares of the floor, regret, first calls; and as tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from ...errors import printable
from ...problem import LAYOUTS, PASSES
from .calls import AUTO, SEARCHED, TORCH, CallRow
from .summary import MEASURABLE_FLOOR_MS, geometric_mean, rows_of

EITHER = "either"  # in place of a layout: the quicker of both, on each side
WORST = 5


@dataclass(frozen=True)
class Verdict:
    """One layer, pass, precision and layout; times are of the contenders whose result is right, None where there is none.

    Attributes:
        auto: its row, of which `auto_ms` is the time if it is right.
        kernel_ms: of the quickest of our kernels.
        torch_ms, better_torch_ms: in the same layout, and in the better of both (None where only one was tried).
        regret: auto's time over the best of the kernels, the searched configuration and torch's operator; None without a search.
    """

    auto: CallRow
    auto_ms: float | None
    kernel_ms: float | None
    torch_ms: float | None
    better_torch_ms: float | None
    regret: float | None

    @property
    def ratio(self) -> float | None:
        """Return torch / auto in the same layout."""
        return _over(self.torch_ms, self.auto_ms)


def call_rows(data: Mapping[str, Any], where: str = "results") -> list[CallRow]:
    """Return the rows of a results file.

    Raises:
        DataError: a row is damaged; the message names its number and the field.
    """
    return rows_of(data, where, CallRow)


def verdicts(rows: Iterable[CallRow]) -> list[Verdict]:
    """Return one for each layer, pass, precision and layout that auto was asked for."""
    groups: dict[tuple[str, str, str], dict[str, list[CallRow]]] = {}
    for row in rows:
        groups.setdefault((row.case, row.pass_name, row.dtype), {}).setdefault(row.layout, []).append(row)
    found = []
    for layouts in groups.values():
        rivals = [_quickest(own, lambda row: row.is_rival) for own in layouts.values()]
        known = [ms for ms in rivals if ms is not None]
        better = min(known) if len(layouts) == len(LAYOUTS) and len(known) == len(LAYOUTS) else None
        found += [_verdict(own, better) for own in layouts.values() if any(row.contender == AUTO for row in own)]
    return found


def _verdict(rows: Sequence[CallRow], better_torch_ms: float | None) -> Verdict:
    auto = next(row for row in rows if row.contender == AUTO)
    auto_ms = _quickest([auto], lambda row: True)
    kernel_ms = _quickest(rows, lambda row: row.contender not in (TORCH, AUTO, SEARCHED))
    torch_ms = _quickest(rows, lambda row: row.is_rival)
    searched = next((row for row in rows if row.contender == SEARCHED), None)
    regret = None
    if searched is not None and auto_ms is not None:  # the search was timed beside auto once more: its own ratio
        beside = None if searched.wrong else searched.speedup
        regret = max((ratio for ratio in (beside, _over(auto_ms, kernel_ms), _over(auto_ms, torch_ms)) if ratio), default=None)
    return Verdict(auto, auto_ms, kernel_ms, torch_ms, better_torch_ms, regret)


def _quickest(rows: Iterable[CallRow], counts: Any) -> float | None:
    return min((row.median_ms for row in rows if counts(row) and row.median_ms is not None and not row.wrong), default=None)


def summary(rows: Iterable[CallRow]) -> list[dict[str, Any]]:
    """Return an entry for each pass, precision and layout, and one for the better layout of each side."""
    groups: dict[tuple[str, str, str], list[Verdict]] = {}
    for verdict in verdicts(rows):
        row = verdict.auto
        groups.setdefault((row.pass_name, row.dtype, row.layout), []).append(verdict)
    keys = sorted(groups, key=lambda key: PASSES.index(key[0]))
    entries = []
    for pass_name, precision in dict.fromkeys(key[:2] for key in keys):
        own = {layout: groups[pass_name, precision, layout] for layout in LAYOUTS if (pass_name, precision, layout) in groups}
        if len(own) == len(LAYOUTS):
            own[EITHER] = _either(own)
        entries += [{"pass_name": pass_name, "dtype": precision, "layout": layout} | _entry(v) for layout, v in own.items()]
    return entries


def _either(layouts: Mapping[str, Sequence[Verdict]]) -> list[Verdict]:
    """Return each layer once: auto and our kernels in the better layout of each, against torch in its better one."""
    first, second = ({verdict.auto.case: verdict for verdict in own} for own in layouts.values())
    found = []
    for case in (case for case in first if case in second):
        pair = sorted((first[case], second[case]), key=lambda verdict: verdict.auto_ms or math.inf)
        kernel_ms = min((v.kernel_ms for v in pair if v.kernel_ms is not None), default=None)
        best = pair[0]
        found.append(Verdict(best.auto, best.auto_ms, kernel_ms, best.better_torch_ms, best.better_torch_ms, None))
    return found


def _entry(own: Sequence[Verdict]) -> dict[str, Any]:
    rated = sorted((v for v in own if v.ratio is not None), key=lambda v: v.ratio or 0.0)
    families: dict[str, list[float]] = {}
    for verdict in rated:
        families.setdefault(verdict.auto.family, []).append(verdict.ratio or 0.0)
    firsts = [v.auto.first_call_ms for v in own if v.auto.first_call_ms is not None]
    regrets = [v.regret for v in own if v.regret is not None]
    return {
        "layers": len(own),
        "auto": _spread([v.ratio for v in own]),
        "auto_against_better": _spread([_over(v.better_torch_ms, v.auto_ms) for v in own]),
        "kernel": _spread([_over(v.torch_ms, v.kernel_ms) for v in own]),
        "kernel_against_better": _spread([_over(v.better_torch_ms, v.kernel_ms) for v in own]),
        "auto_floor": _mean_share(own, lambda v: v.auto_ms),
        "kernel_floor": _mean_share(own, lambda v: v.kernel_ms),
        "regret": {"layers": len(regrets), "mean": geometric_mean(regrets), "p95": _percentile(regrets, 95)},
        "first_call_ms": {"median": statistics.median(firsts) if firsts else None, "worst": max(firsts, default=None)},
        "slower": sum((v.ratio or 0.0) < 1 for v in rated),
        "worst": [_named(v) for v in rated[:WORST]],
        "missing": [v.auto.case for v in own if v.ratio is None],
        "families": {
            name: {"layers": len(ratios), "mean": geometric_mean(ratios), "worst": ratios[0]} for name, ratios in sorted(families.items())
        },
    }


def _named(verdict: Verdict) -> dict[str, Any]:
    row = verdict.auto
    what = {"case": row.case, "problem": row.problem, "layout": row.layout, "ran": row.ran}
    return what | {"ratio": verdict.ratio, "auto_ms": verdict.auto_ms, "torch_ms": verdict.torch_ms, "kernel_ms": verdict.kernel_ms}


def _spread(ratios: Iterable[float | None]) -> dict[str, Any]:
    known = [ratio for ratio in ratios if ratio is not None]
    ends = {"p5": _percentile(known, 5), "worst": min(known, default=None)}
    return {"layers": len(known), "mean": geometric_mean(known), **ends}


def _mean_share(own: Sequence[Verdict], time: Any) -> dict[str, Any]:
    """Return the mean share of the floors that are long enough to measure by."""
    floors = [(v.auto.floor_ms, time(v)) for v in own if v.auto.floor_ms is not None and v.auto.floor_ms >= MEASURABLE_FLOOR_MS]
    shares = [floor / ms for floor, ms in floors if ms is not None]
    return {"layers": len(shares), "mean": geometric_mean(shares)}


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return math.exp(float(np.percentile(np.log(values), percent))) if values else None


def _over(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def print_head(console: Console, data: Mapping[str, Any]) -> None:
    machine, ceilings = data["machine"], data["ceilings"]
    layers = "named layers" if data["seed"] is None else f"population of seed {data['seed']}"
    _say(console, f"{machine['device']}, {machine['backend']}; {layers}, against torch")
    if data["scaled_down"]:
        _say(console, f"Layers scaled down to {data['flop_limit'] / 1e6:.3g} MFLOP: these times say nothing of a GPU.")
    elif ceilings is not None:
        rates = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in ceilings["gemm_flop_per_s"].items())
        _say(console, f"copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s; GEMM TFLOP/s: {rates}")
    if data["rows"]:
        _say(console, f"going on with {len(data['rows'])} rows")


def print_row(console: Console, rows: Sequence[CallRow]) -> None:
    """Print one layer, precision and layout."""
    row = rows[0]
    torch_ms = _quickest(rows, lambda one: one.is_rival)
    parts = [f"torch {_ms(torch_ms)}"] if torch_ms is not None else []
    for one in rows:
        if one.wrong:
            parts.append(f"{one.contender} ({one.ran}) is WRONG: difference {one.difference:.1e}, error {one.error:.1e}")
        elif one.median_ms is None:
            parts.append(f"{one.contender}: {one.note}")
        elif not one.is_rival:
            ratio = _over(torch_ms, one.median_ms)
            share = "" if one.share_of_floor is None else f", {one.share_of_floor:.0%} of floor"
            parts.append(f"{one.contender} {_ms(one.median_ms)}{'' if ratio is None else f' = {ratio:.2f}x'} by {one.ran}{share}")
    _say(console, f"{row.case} {row.problem} {row.pass_name} {row.dtype} {row.layout}: {'; '.join(parts)}")


def print_summary(console: Console, data: Mapping[str, Any], rows: Sequence[CallRow]) -> None:
    """Print the tables of a results file."""
    columns = "{:7} {:5} {:14} {:>6} {:>20} {:>20} {:>20} {:>12} {:>14} {:>16}"
    _say(console, "\nGeometric mean / 5th percentile / worst of torch over ours; shares of floors >= 0.02 ms, auto and kernel")
    heads = ("dtype", "pass", "layout", "layers", "auto, same layout", "auto, better", "kernel, better")
    _say(console, columns.format(*heads, "floor", "regret, p95", "first call, worst"))
    for e in data["summary"]:
        spreads = ("auto", "auto_against_better", "kernel_against_better")
        floor = f"{_percent(e['auto_floor']['mean'])} {_percent(e['kernel_floor']['mean'])}"
        regret = f"{_times(e['regret']['mean'])} {_times(e['regret']['p95'])}"
        first = f"{_ms(e['first_call_ms']['median'])} {_ms(e['first_call_ms']['worst'])} ms"
        cells = (e["dtype"], e["pass_name"], e["layout"], e["layers"], *(_spread_text(e[name]) for name in spreads), floor, regret, first)
        _say(console, columns.format(*cells))
    for e in data["summary"]:
        if e["layout"] == EITHER:
            continue
        _say(console, f"\n{e['dtype']} {e['pass_name']} {e['layout']}: {e['slower']} of {e['auto']['layers']} slower than torch; worst:")
        for one in e["worst"]:
            times = f"auto {_ms(one['auto_ms'])} ms by {one['ran']}, torch {_ms(one['torch_ms'])}, kernel {_ms(one['kernel_ms'])}"
            _say(console, f"  {one['ratio']:.2f}x {one['case']} {one['problem']}: {times}")
        families = (f"{name} {_times(f['mean'])} ({f['layers']}, worst {_times(f['worst'])})" for name, f in e["families"].items())
        _say(console, f"  families: {', '.join(families)}")
        if e["missing"]:
            _say(console, f"  without a ratio: {', '.join(e['missing'])}")
    wrong = [row for row in rows if row.wrong]
    for row in wrong:
        _say(console, f"WRONG: {row.case} {row.problem} {row.pass_name} {row.dtype} {row.layout}: {row.contender} by {row.ran}")
    state = "complete" if data["complete"] else "not complete: the same command goes on with the file"
    _say(console, f"{len(data['rows'])} rows in {data['elapsed_s']:.0f} s, {state}; {len(wrong)} wrong")


def _say(console: Console, text: str) -> None:
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _spread_text(spread: Mapping[str, Any]) -> str:
    return f"{_times(spread['mean'])} {_times(spread['p5'])} {_times(spread['worst'])}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.4f}"
