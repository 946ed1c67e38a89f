"""Pictures of trials: where a kernel's output is wrong, and how the time of a kernel depends on its tunables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap, LogNorm
from matplotlib.figure import Figure

from ..errors import KernelError, shown
from ..kernel import Kernel
from ..problem import Problem
from .style import BAD, GRID, INK, RIVAL, Picture, literal, must_be, style

_EXAMPLE = Problem(1, 2, 2, (4, 6, 8), (3, 3, 3), (2, 2, 2), (1, 1, 1))
_LOWEST = 1e-3  # error / bound that is drawn as none


def error_map(
    kernel: Kernel | str | Path, problem: Problem | None = None, *, dtype: str | None = None, seed: int = 0, backend: str | None = None
) -> Figure:
    """Draw one plane (the last two axes) of what a kernel writes, beside the reference and the error over its bound.

    The kernel runs once in a child process on normal deviates. The plane is the one with the most elements out of bound.

    Args:
        kernel: a Kernel, the name of a registered one, or the path of a `.cu` file.
        problem: None is a small one with stride 2.
        dtype: of the kernel's; None is its first.
        seed: of the tensors.
        backend: "cuda" or "host"; None: cuda where there is a GPU.

    Raises:
        KernelError: the kernel cannot do the problem.
        LaunchError: it crashed, hung or wrote outside its tensor, so that there is nothing to draw.
        CompileError, BackendError: it cannot be compiled, or the backend cannot be had.
    """
    from ..lab.check import default_backend, resolve
    from ..lab.run.worker import Worker

    kernel, problem = resolve(kernel), _EXAMPLE if problem is None else problem
    must_be("problem", problem, Problem, "None or a Problem")
    must_be("seed", seed, int, "a whole number")
    if seed < 0 or backend not in (None, "cuda", "host"):
        raise KernelError(f"seed={seed}, backend={shown(backend)}: must be at least 0, and None, cuda or host")
    dtype = kernel.dtypes[0] if dtype is None else dtype
    if (reason := kernel.why_not(problem, dtype)) is not None:
        raise KernelError(reason)
    with Worker(kernel, backend or default_backend()) as worker:
        got, expected, bound = worker.output(problem, dtype, "random", seed)
    ratio = np.abs(got - expected) / bound
    wrong = ~(ratio <= 1.0)  # NaN too
    n, c, d = np.unravel_index(int(wrong.sum((3, 4)).argmax()), got.shape[:3])
    figure = Picture(figsize=(7.2, 1.2 + min(4.2, 2.2 * got.shape[3] / got.shape[4])), layout="constrained")
    panels = figure.subplots(1, 3)
    top = float(np.abs(expected[n, c, d]).max()) or 1.0
    for axes, plane, title in ((panels[0], expected[n, c, d], "reference"), (panels[1], got[n, c, d], kernel.name)):
        shades = axes.imshow(np.ma.masked_invalid(plane), cmap="RdBu_r", vmin=-top, vmax=top, interpolation="nearest")
        _bar(figure, axes, shades, "value")
        style(axes, title)
    _ratio_panel(figure, panels[2], ratio[n, c, d])
    for axes, plane in zip(panels, (expected, got, ratio), strict=True):
        _mark_nan(axes, plane[n, c, d])
        axes.spines[["left", "bottom"]].set_visible(False)
    place = f"{kernel.written}[{n}, {c}, {d}]: {int(wrong[n, c, d].sum())} of {wrong[n, c, d].size} elements out of bound"
    figure.suptitle(literal(f"{place}; {int(wrong.sum())} of {wrong.size} in all"), x=0.01, ha="left", fontsize=9, color=INK)
    return figure


def _ratio_panel(figure: Figure, axes: Any, ratio: np.ndarray[Any, Any]) -> None:
    """Blue below the bound, red above; logarithmic, and 1 is where the colour turns."""
    reach = max(10.0, float(np.nanmax(np.where(np.isfinite(ratio), ratio, 0.0), initial=0.0)))
    reach = min(reach, 1e6)
    below, above = round(-math.log10(_LOWEST) * 60), max(1, round(math.log10(reach) * 60))
    blues = matplotlib.colormaps["Blues"](np.linspace(0.05, 0.65, below))
    reds = matplotlib.colormaps["Reds"](np.linspace(0.5, 0.95, above))
    shades = axes.imshow(
        np.ma.masked_invalid(np.clip(ratio, _LOWEST, reach)),
        cmap=ListedColormap(np.concatenate([blues, reds])),
        norm=LogNorm(_LOWEST, reach),
        interpolation="nearest",
    )
    _bar(figure, axes, shades, "red: above 1; pink: NaN")
    style(axes, "error / bound")


def _bar(figure: Figure, axes: Any, shades: Any, label: str) -> None:
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.get_major_locator().set_params(integer=True)
    bar = figure.colorbar(shades, ax=axes, location="bottom", shrink=0.9)
    bar.set_label(label, fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=7, colors=INK, length=0, which="both")
    bar.outline.set_visible(False)


def _mark_nan(axes: Any, plane: np.ndarray[Any, Any]) -> None:
    rows, columns = np.nonzero(~np.isfinite(plane))
    axes.set_facecolor("#fbeceb")
    for row, column in zip(rows, columns, strict=True) if rows.size <= 400 else ():
        axes.text(column, row, "NaN", ha="center", va="center", fontsize=5, color=BAD)


def tuning_landscape(trials: Sequence[tuple[Mapping[str, int], float | None]], tunables: Sequence[str] | None = None) -> Figure:
    """Draw how the time depends on two tunables (the best over the others), and all configurations from quickest to slowest.

    Args:
        trials: (configuration, milliseconds) of each configuration that was tried; None where it failed or was refused.
        tunables: two names, for the rows and the columns; None takes those whose best times vary most.

    Raises:
        KernelError: there are no trials, one has no time above 0, or a name is no tunable of theirs.
        ProblemTypeError: an argument is no list.
    """
    must_be("trials", trials, Sequence, "a list of (configuration, milliseconds or None)")
    for trial in trials:
        must_be("trials", trial, Sequence, "a list of (configuration, milliseconds or None)")
        if len(trial) != 2 or not isinstance(trial[0], Mapping) or not isinstance(trial[1], (int, float, type(None))):
            raise KernelError(f"trials: {shown(trial)}: must be (configuration, milliseconds or None)")
        if trial[1] is not None and not 0 < trial[1] < math.inf:
            raise KernelError(f"trials: {shown(trial)}: its milliseconds must be a number above 0")
    must_be("tunables", tunables, (Sequence, type(None)), "None or a list of names")
    names = list(dict.fromkeys(name for configuration, _ in trials for name in configuration))
    if not names:
        raise KernelError("trials: there are none, or they have no tunables")
    if unknown := [name for name in tunables or () if not isinstance(name, str) or name not in names]:
        raise KernelError(f"tunables: {shown(unknown[0])} is none of {', '.join(names)}")
    if partial := [configuration for configuration, _ in trials if len(configuration) != len(names)]:
        raise KernelError(f"trials: {shown(dict(partial[0]))}: must be of {', '.join(map(str, names))}, as the others are")
    if tunables is not None and len(tunables) not in (1, 2):
        raise KernelError(f"tunables={shown(tunables)}: must be one name or two")
    chosen = list(tunables or sorted(names, key=lambda name: -_spread(trials, name))[:2])
    figure = Picture(figsize=(7.2, 3.4), layout="constrained")
    grid, curve = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.25, 1]})
    _best_of_pair(grid, trials, chosen if len(chosen) == 2 else [*chosen, chosen[0]])
    times = sorted(ms for _, ms in trials if ms is not None)
    curve.plot(range(1, len(times) + 1), times, color=INK, linewidth=1.2, marker="o", markersize=3)
    curve.set_xlabel(f"configurations, quickest first ({len(trials) - len(times)} failed)", fontsize=8, color=INK)
    curve.set_ylabel("ms", fontsize=8, color=INK)
    curve.set_ylim(bottom=0)
    curve.grid(axis="y", color=GRID, linewidth=0.6)
    style(curve, "all configurations")
    return figure


def _spread(trials: Sequence[tuple[Mapping[str, int], float | None]], name: str) -> float:
    """Return the ratio of the worst to the best of the best times at each value of a tunable."""
    best: dict[int, float] = {}
    for configuration, ms in trials:
        if ms is not None and name in configuration:
            best[configuration[name]] = min(ms, best.get(configuration[name], math.inf))
    return max(best.values()) / min(best.values()) if best else 0.0


def _best_of_pair(axes: Any, trials: Sequence[tuple[Mapping[str, int], float | None]], pair: Sequence[str]) -> None:
    rows, columns = (sorted({c[name] for c, _ in trials if name in c}) for name in pair)
    if pair[0] == pair[1]:
        rows = rows[:1]
    best = np.full((len(rows), len(columns)), np.nan)
    tried = np.zeros(best.shape, bool)
    for configuration, ms in trials:
        column = columns.index(configuration[pair[1]])
        row = 0 if pair[0] == pair[1] else rows.index(configuration[pair[0]])
        tried[row, column] = True
        if ms is not None:
            best[row, column] = np.nanmin([best[row, column], ms])
    axes.imshow(np.ma.masked_invalid(best), cmap="YlGnBu_r", aspect="auto", interpolation="nearest")
    quickest, slowest = (float(f(best)) if np.isfinite(best).any() else 0.0 for f in (np.nanmin, np.nanmax))
    for (row, column), ms in np.ndenumerate(best):
        text = f"{ms:.3g}" if np.isfinite(ms) else ("failed" if tried[row, column] else "")
        dark = np.isfinite(ms) and ms < quickest + 0.45 * (slowest - quickest)
        weight = "bold" if ms == quickest else "normal"
        color = "white" if dark else INK if np.isfinite(ms) else RIVAL
        axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color, fontweight=weight)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows if pair[0] != pair[1] else [""])
    axes.set_xlabel(literal(pair[1]), fontsize=8, color=INK)
    if pair[0] != pair[1]:
        axes.set_ylabel(literal(pair[0]), fontsize=8, color=INK)
    style(axes, "best ms of each pair")
    axes.spines[["left", "bottom"]].set_visible(False)
