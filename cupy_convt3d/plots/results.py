"""Pictures of what was measured: speed, roofline, errors, a volume before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from ..errors import ProblemError
from ..problem import LAYOUTS, PASSES
from .style import BAD, COLORS, GRID, INK, RIVAL, Picture, literal, must_be, style

if TYPE_CHECKING:
    from ..lab.bench.calls import CallRow
    from ..lab.bench.measure import Ceilings, Row

_EXACT = 1e-6  # where an error of 0 is drawn on a logarithmic axis


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    names = dict.fromkeys(row.contender for row in rows if not row.is_rival)
    colors = {name: COLORS[position % len(COLORS)] for position, name in enumerate(names)}
    return colors | {row.contender: RIVAL for row in rows if row.is_rival}


def _check_rows(rows: object, kind: type[Row] | None = None) -> None:
    from ..lab.bench.measure import Row

    must_be("rows", rows, Sequence, "a list of rows")
    for row in rows:  # type: ignore[attr-defined]
        must_be("rows", row, kind or Row, "a list of rows")


def speed_bars(rows: Sequence[Row]) -> Figure:
    """Draw useful GFLOP/s of every kernel and of torch for each problem, a panel a pass; the rate's axis is logarithmic.

    Where ceilings were measured, a line across a problem's bars is the rate at its floor, which no kernel passes by much.

    Args:
        rows: as `Bench.compare` returns them, or as `lab.results.load` reads them from a report.
    """
    _check_rows(rows)
    timed = [row for row in rows if row.median_ms and row.flop]
    passes = [name for name in PASSES if any(row.pass_name == name for row in timed)]
    colors = _colors(timed)
    cases = {name: list(dict.fromkeys(r.case for r in timed if r.pass_name == name)) for name in passes}
    contenders = {name: list(dict.fromkeys(r.contender for r in timed if r.pass_name == name)) for name in passes}
    heights = [len(cases[name]) * (0.13 * len(contenders[name]) + 0.09) + 0.5 for name in passes] or [1.0]
    figure = Picture(figsize=(7.2, sum(heights) + 0.9), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, name in zip(panels, passes, strict=False):
        width = 0.84 / len(contenders[name])
        for place, contender in enumerate(contenders[name]):
            own = {r.case: r.flop / (r.median_ms or math.inf) / 1e6 for r in timed if (r.pass_name, r.contender) == (name, contender)}
            positions = [cases[name].index(case) + (place - (len(contenders[name]) - 1) / 2) * width for case in own]
            axes.barh(positions, list(own.values()), width * 0.92, color=colors[contender], label=literal(contender))
        floors = {r.case: r.flop / r.floor_ms / 1e6 for r in timed if r.pass_name == name and r.floor_ms}
        if floors:
            places = np.array([cases[name].index(case) for case in floors])
            axes.vlines(list(floors.values()), places - 0.44, places + 0.44, color=BAD, linewidth=1.6, label="floor")
        axes.set_yticks(range(len(cases[name])), [literal(case) for case in cases[name]])
        axes.set_ylim(len(cases[name]) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:.10g}")
        narrow = np.log10(np.divide(*axes.get_xlim()[::-1])) < 2.2  # too few powers of ten to read a bar by
        axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.xaxis.set_minor_formatter("{x:g}" if narrow else NullFormatter())
        axes.grid(axis="x", color=GRID, linewidth=0.7)
        axes.tick_params(labelbottom=True)
        style(axes, name)
    panels[-1].set_xlabel("useful GFLOP/s (logarithmic)", fontsize=8, color=INK)
    entries: dict[str, Any] = {}
    for axes in panels:
        entries |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if entries:
        if "floor" in entries:
            entries["floor"] = entries.pop("floor")  # last
        figure.legend(entries.values(), entries, loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    return figure


def roofline(rows: Sequence[Row], ceilings: Ceilings, dtype: str = "fp32") -> Figure:
    """Draw rate against arithmetic intensity (useful FLOP / compulsory byte) under the ceilings measured in the same run.

    Args:
        rows, ceilings: of one run, from `Bench.compare` and `measure_ceilings`, or from a report by `lab.results.load`.
        dtype: whose rows and GEMM ceiling are drawn.

    Raises:
        ProblemError: an argument is of the wrong type, or no GEMM of that dtype was measured.
    """
    from ..lab.bench.measure import Ceilings

    _check_rows(rows)
    must_be("ceilings", ceilings, Ceilings, "the ceilings of a run on a GPU")
    must_be("dtype", dtype, str, "the name of one")
    if dtype not in ceilings.gemm_flop_per_s:
        raise ProblemError(f"dtype={dtype!r}: no GEMM of it was measured; there are {', '.join(ceilings.gemm_flop_per_s) or 'none'}")
    timed = [row for row in rows if row.median_ms and row.flop and row.dtype == dtype]
    peak, bandwidth = ceilings.gemm_flop_per_s[dtype], ceilings.copy_bytes_per_s
    figure = Picture(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    ridge = peak / bandwidth
    intensities = [row.flop / row.bytes_moved for row in timed] or [ridge]
    low, high = min(*intensities, ridge) / 2, max(*intensities, ridge) * 2
    line = np.geomspace(low, high, 200)
    axes.plot(line, np.minimum(peak, line * bandwidth) / 1e12, color=INK, linewidth=1.4)
    note: Any = {"textcoords": "offset points", "fontsize": 8}
    axes.annotate(f"GEMM, {dtype}: {peak / 1e12:.1f} TFLOP/s", (high, peak / 1e12), (0, 4), ha="right", **note)
    axes.annotate(f"copy: {bandwidth / 1e12:.2f} TB/s", (low, low * bandwidth / 1e12), (4, 0), va="top", **note)
    marks = dict(zip(PASSES, "os^", strict=True))
    for contender, color in _colors(timed).items():
        passes = {row.pass_name for row in timed if row.contender == contender}
        for name in PASSES:
            own = [row for row in timed if (row.contender, row.pass_name) == (contender, name)]
            if own:
                rates = [row.flop / (row.median_ms or math.inf) / 1e9 for row in own]
                label = literal(f"{contender} ({name})" if len(passes) > 1 else contender)
                where, drawn = [row.flop / row.bytes_moved for row in own], 2 if own[0].is_rival else 3  # kernels over rivals
                axes.scatter(where, rates, 22, color=color, marker=marks[name], alpha=0.85, label=label, zorder=drawn)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("useful FLOP / compulsory byte", fontsize=8, color=INK)
    axes.set_ylabel("useful TFLOP/s", fontsize=8, color=INK)
    axes.grid(color=GRID, linewidth=0.6)
    style(axes)
    if timed:
        figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    return figure


def ratio_distribution(rows: Sequence[CallRow]) -> Figure:
    """Draw how torch / auto is distributed over the layers of a survey: a panel a layout, a curve a precision.

    A curve rises by a layer's share at its ratio, so what lies left of the line at 1 is the share of layers that auto is slower on.

    Args:
        rows: as `lab.survey` measures them; passes are told apart by the line's dashes.

    Raises:
        ProblemTypeError: `rows` is no list of these.
    """
    from ..lab.bench.calls import CallRow
    from ..lab.bench.survey_summary import verdicts

    _check_rows(rows, CallRow)
    found = [verdict for verdict in verdicts(rows) if verdict.ratio is not None]
    layouts = [name for name in LAYOUTS if any(v.auto.layout == name for v in found)] or ["ncdhw"]
    keys = list(dict.fromkeys((v.auto.pass_name, v.auto.dtype) for v in found))
    colors = dict(zip(dict.fromkeys(dtype for _, dtype in keys), COLORS, strict=False))
    figure = Picture(figsize=(7.2, 3.8), layout="constrained")
    panels = figure.subplots(1, len(layouts), sharex=True, sharey=True, squeeze=False)[0]
    for axes, layout in zip(panels, layouts, strict=True):
        for pass_name, dtype in keys:
            own = [v.ratio or 1.0 for v in found if (v.auto.pass_name, v.auto.dtype, v.auto.layout) == (pass_name, dtype, layout)]
            if own:
                dashes = ("-", "--", ":")[PASSES.index(pass_name)]
                label = dtype if pass_name == "fprop" else f"{dtype} ({pass_name})"
                axes.ecdf(own, color=colors[dtype], linestyle=dashes, linewidth=1.4, label=label)
        axes.axvline(1.0, color=INK, linewidth=1.0)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_xlabel("torch / auto (logarithmic; black: as quick)", fontsize=8, color=INK)
        count = len({v.auto.case for v in found if v.auto.layout == layout})
        style(axes, f"{layout}, {count} layers")
    panels[0].set_ylabel("share of layers up to this ratio", fontsize=8, color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, loc="outside upper left", ncols=5, frameon=False, fontsize=8)
    return figure


def error_histogram(ratios: Mapping[str, Sequence[float]]) -> Figure:
    """Draw how far errors stay below the derived bound, kernel by kernel; exact results stand in the bin at the left edge.

    Args:
        ratios: error over its bound of each random example, by kernel: `CheckReport.ratios`.

    Raises:
        ProblemError: `ratios` is of another type, or has a number that is negative or NaN.
    """
    must_be("ratios", ratios, Mapping, "lists of numbers by the names of kernels")
    for name, values in ratios.items():
        must_be("ratios", name, str, "lists of numbers by the names of kernels")
        must_be(f"ratios[{name!r}]", values, (Sequence, np.ndarray), "a list of numbers")
        for value in values:
            must_be(f"ratios[{name!r}]", value, (int, float, np.integer, np.floating), "a list of numbers")
            if not value >= 0:
                raise ProblemError(f"ratios[{name!r}]: {value}: must be at least 0")
    figure = Picture(figsize=(7.2, 0.75 * max(1, len(ratios)) + 0.8), layout="constrained")
    panels = figure.subplots(max(1, len(ratios)), 1, sharex=True, squeeze=False)[:, 0]
    finite = {name: [r for r in values if math.isfinite(r)] for name, values in ratios.items()}
    top = max(10.0, *(2 * max(values, default=0.0) for values in finite.values())) if finite else 10.0
    bins = np.geomspace(_EXACT, top, 57)
    for position, (axes, (name, values)) in enumerate(zip(panels, finite.items(), strict=False)):
        axes.hist(np.maximum(values, _EXACT * 1.01), bins=bins, color=COLORS[position % len(COLORS)])
        axes.axvline(1.0, color=BAD, linewidth=1.2)
        label = f"{name}  ({len(values)} results" + (f", worst {max(values):.2g})" if values else ")")
        style(axes)
        axes.set_title(literal(label), loc="left", fontsize=8, color=INK, pad=2)
        axes.set(xscale="log", xlim=(_EXACT, top), yticks=[])
        axes.spines["left"].set_visible(False)
    panels[-1].set_xlabel("error / bound (logarithmic; red: the bound; left edge: exact)", fontsize=8, color=INK)
    return figure


def volume_slices(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> Figure:
    """Draw the middle slice across the first axis before and after upsampling, whole, and a part of it enlarged.

    Args:
        before: (depth, height, width).
        after: (2*depth, 2*height, 2*width).
    """
    for name, volume in (("before", before), ("after", after)):
        must_be(name, volume, np.ndarray, "an array (depth, height, width) of numbers")
        if volume.ndim != 3 or volume.shape[0] < 1 or min(volume.shape[1:]) < 4 or volume.dtype.kind not in "iuf":
            raise ProblemError(f"{name}: {volume.shape}, {volume.dtype}: must be (depth, height, width) of numbers, a plane at least 4x4")
    figure = Picture(figsize=(7.2, 6.0), layout="constrained", facecolor="white")
    panels = figure.subplots(2, 2)
    high = float(np.percentile(before, 99.5)) or 1.0
    for column, (volume, title) in enumerate(((before, "before"), (after, "after"))):
        image = volume[volume.shape[0] // 2]
        rows, columns = image.shape
        part = image[3 * rows // 8 : 5 * rows // 8, 3 * columns // 8 : 5 * columns // 8]
        size = "x".join(map(str, volume.shape))
        for axes, shown, text in ((panels[0, column], image, f"{title}, {size}"), (panels[1, column], part, f"{title}, enlarged")):
            axes.imshow(shown, cmap="gray", vmin=0, vmax=high, interpolation="nearest", origin="lower")
            axes.set_title(text, loc="left", fontsize=9, color=INK)
            axes.set_axis_off()
    return figure
