"""Pictures of a problem's geometry: which inputs and taps feed an output, how many do, and which outputs share them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .. import reference
from ..errors import ProblemError
from ..problem import AXES, AxisClass, Problem, triple
from .style import CELL_COLORS, COLORS, EMPTY, FAINT, GRID, INK, MOST_TAPS, SOFT, Picture, drawable, must_be, style

EXAMPLE = Problem(1, 1, 1, (3, 4, 5), (3, 3, 3), (2, 2, 2), (1, 1, 1))
_WINDOW = {1: 16, 2: 14, 3: 8}  # outputs of an axis that are shown around the chosen one, by dimensions of the picture
_MOST_TEXTS = 400  # cells; more would not be read
_MOST_VOXELS = 10**7


@dataclass(frozen=True)
class _Line:
    """One axis of a problem, and one output on it with the (tap, input) pairs that feed it."""

    problem: Problem
    a: int
    output: int
    window: int = _WINDOW[2]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return self.reach(self.output)

    def reach(self, output: int) -> list[tuple[int, int]]:
        """Return the (tap, input) pairs of `output = input*stride - padding + tap*dilation`."""
        p, a = self.problem, self.a
        scaled = [(t, output + p.padding[a] - t * p.dilation[a]) for t in range(p.kernel_size[a])]
        return [(t, q // p.stride[a]) for t, q in scaled if q % p.stride[a] == 0 and 0 <= q // p.stride[a] < p.input_size[a]]

    @property
    def outputs(self) -> range:
        """The outputs that are shown."""
        size = self.problem.output_size[self.a]
        first = min(max(0, self.output - self.window // 2), max(0, size - self.window))
        return range(first, min(size, first + self.window))

    @property
    def inputs(self) -> range:
        """The inputs that are shown: all of a small problem, else those that feed the output and two more on either side."""
        size = self.problem.input_size[self.a]
        fed = [i for _, i in self.pairs] or [min(size - 1, self.output // self.problem.stride[self.a])]
        return range(size) if size <= self.window else range(max(0, min(fed) - 2), min(size, max(fed) + 3))


def _middle(problem: Problem, a: int) -> int:
    """Return the output near the middle of an axis that the most taps reach."""
    middle = problem.output_size[a] // 2
    nearby = range(middle, min(problem.output_size[a], middle + problem.stride[a]))
    return max(nearby, key=lambda o: len(_Line(problem, a, o).pairs))


def tap_map(problem: Problem = EXAMPLE, output: Sequence[int] | None = None, *, dimensions: int = 2) -> Figure:
    """Draw which inputs feed one output voxel, and through which taps.

    Input `i` and tap `t` feed output `o = i*stride - padding + t*dilation` on each axis; so for a given `o` a tap counts only where
    the division `(o + padding - t*dilation) / stride` is exact and its result lies in the input.

    Args:
        problem: the geometry; of a large one the part around the output is shown.
        output: the voxel (d, h, w); None is the one in the middle that the most taps reach.
        dimensions: 1 draws the last axis as arrows, 2 a plane (height, width) with the weight's taps, 3 the whole volume.

    Raises:
        ProblemError: `output` is outside the output, `dimensions` is not 1, 2 or 3, or the problem is too large to be drawn.
    """
    drawable(problem)
    must_be("dimensions", dimensions, int, "1, 2 or 3")
    voxel = tuple(_middle(problem, a) for a in range(3)) if output is None else triple("output", output)
    if not all(0 <= o < size for o, size in zip(voxel, problem.output_size, strict=True)):
        raise ProblemError(f"output={voxel}: must be three indices inside {problem.output_size}")
    if dimensions not in (1, 2, 3):
        raise ProblemError(f"dimensions={dimensions!r}: must be 1, 2 or 3")
    lines = [_Line(problem, a, voxel[a], _WINDOW[dimensions]) for a in range(3)]
    if dimensions == 1:
        return _map_1d(lines[2])
    return _map_2d(lines[1], lines[2]) if dimensions == 2 else _map_3d(lines)


def explore_taps(problem: Problem = EXAMPLE, *, dimensions: int = 2) -> Any:
    """Return `tap_map` with a slider for each index of the output voxel, or the plain Figure where there is no Jupyter or ipywidgets."""
    drawable(problem)
    if dimensions not in (1, 2, 3):
        raise ProblemError(f"dimensions={dimensions!r}: must be 1, 2 or 3")
    try:
        import ipywidgets
        from IPython import get_ipython
    except ImportError:
        return tap_map(problem, dimensions=dimensions)
    if getattr(get_ipython(), "kernel", None) is None:  # type: ignore[no-untyped-call]
        return tap_map(problem, dimensions=dimensions)
    sliders = {
        axis: ipywidgets.IntSlider(_middle(problem, a), 0, problem.output_size[a] - 1, description=axis) for a, axis in enumerate(AXES)
    }
    shown = dict(list(sliders.items())[3 - dimensions :])

    def draw(**moved: int) -> None:
        from IPython.display import display

        voxel = [moved.get(axis, sliders[axis].value) for axis in AXES]
        display(tap_map(problem, voxel, dimensions=dimensions))  # type: ignore[no-untyped-call]

    return ipywidgets.VBox([*shown.values(), ipywidgets.interactive_output(draw, shown)])


def _map_1d(line: _Line) -> Figure:
    p, a = line.problem, line.a
    figure = Picture(figsize=(7.2, 2.6), layout="constrained")
    axes = figure.subplots()
    width = {False: 0.8, True: 2.0}
    fed = dict(line.pairs)
    positions = {i: i * p.stride[a] - p.padding[a] + p.dilation[a] * (p.kernel_size[a] - 1) / 2 for i in line.inputs}
    for tap, i in itertools.product(range(p.kernel_size[a]), line.inputs):
        o = i * p.stride[a] - p.padding[a] + tap * p.dilation[a]
        if o not in line.outputs:
            continue
        chosen = o == line.output
        color = COLORS[tap % len(COLORS)] if chosen else GRID
        axes.plot([positions[i], o], [0.93, 0.08], color=color, linewidth=width[chosen], zorder=3 if chosen else 1)
        if chosen:
            x, y = 0.62 * positions[i] + 0.38 * o, 0.62
            axes.text(x, y, f"tap {tap}", color=color, fontsize=8, ha="center", va="center", zorder=4, bbox=_halo())
    _dots(axes, list(positions.values()), 1.0, [f"{i}" for i in line.inputs], [i in fed.values() for i in line.inputs], 0.13)
    _dots(axes, list(line.outputs), 0.0, [f"{o}" for o in line.outputs], [o == line.output for o in line.outputs], -0.15)
    axes.set(ylim=(-0.3, 1.3), yticks=[0, 1], yticklabels=["output", "input"], xticks=[])
    axes.set_xlabel("output = input · stride - padding + tap · dilation", fontsize=8, color=SOFT)
    style(axes, f"output {line.output}{_equation(line)}")
    axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def _halo() -> dict[str, Any]:
    return {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}


def _dots(axes: Any, xs: Sequence[float], y: float, labels: Sequence[str], chosen: Sequence[bool], offset: float) -> None:
    colors = [INK if c else "#ffffff" for c in chosen]
    axes.scatter(xs, [y] * len(xs), 70, color=colors, edgecolors=[INK if c else SOFT for c in chosen], linewidths=1.0, zorder=5)
    for x, label in zip(xs, labels, strict=True):
        axes.text(x, y + offset, label, ha="center", va="center", fontsize=8, color=INK)


def _equation(line: _Line) -> str:
    """Return how the output is reached: the input times the stride, and so on, or that nothing reaches it."""
    p, a = line.problem, line.a
    if not line.pairs:
        return ": no tap reaches it, bias alone"
    sums = [f"{i}·{p.stride[a]} - {p.padding[a]} + {t}·{p.dilation[a]}" for t, i in line.pairs]
    return "".join(f" = {text}" for text in sums[:3]) + " = ..." * (len(sums) > 3)


def _map_2d(h: _Line, w: _Line) -> Figure:
    p = h.problem
    kernel = (range(p.kernel_size[1]), range(p.kernel_size[2]))
    grids = [(h.inputs, w.inputs), kernel, (h.outputs, w.outputs)]
    columns = sum(max(3, len(grid[1])) for grid in grids)
    height = max(len(grid[0]) for grid in grids) * 6.2 / columns + 0.9
    figure = Picture(figsize=(7.2, min(7.0, height)), layout="constrained")
    panels = figure.subplots(1, 3, gridspec_kw={"width_ratios": [max(3, len(grid[1])) for grid in grids]})
    feeding = {(ih, iw): (th, tw) for th, ih in h.pairs for tw, iw in w.pairs}
    used = sorted(feeding.values())
    color = dict(zip(used, _distinct_colors(len(used)), strict=True))
    taps = {(th, tw): f"{th},{tw}" for th, tw in itertools.product(*kernel)}
    font = 7 * min(1.0, 24 / columns) if columns <= 42 else 0
    _cells(panels[0], *grids[0], {i: color[t] for i, t in feeding.items()}, {i: taps[t] for i, t in feeding.items()}, font)
    _cells(panels[1], *kernel, color, taps, font)
    _cells(panels[2], *grids[2], {(h.output, w.output): INK}, {}, 0)
    for axes, title in zip(panels, ("input, by tap", "taps", f"output, voxel ({h.output}, {w.output})"), strict=True):
        style(axes, title)
        axes.spines[["left", "bottom"]].set_visible(False)
    return figure


def _distinct_colors(count: int) -> list[Any]:
    if count <= len(CELL_COLORS):
        return list(CELL_COLORS[:count])
    return [matplotlib.colormaps["Spectral"](0.1 + 0.8 * n / (count - 1)) for n in range(count)]


def _cells(axes: Any, rows: range, columns: range, colors: dict[Any, Any], texts: dict[Any, str], font: float) -> None:
    """Draw a grid of squares, the first row at the top; some of them coloured, some with text (font size 0: none)."""
    for row, column in itertools.product(rows, columns):
        face = colors.get((row, column), "white")
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=face, edgecolor=GRID, linewidth=0.8))
        if font and (text := texts.get((row, column))):
            ink = INK if (row, column) in colors else FAINT
            axes.text(column, row, text, ha="center", va="center", fontsize=font, color=ink)
    axes.set(xlim=(columns[0] - 0.55, columns[-1] + 0.55), ylim=(rows[-1] + 0.55, rows[0] - 0.55), aspect="equal")
    axes.set(xticks=_ticks(columns), yticks=_ticks(rows), anchor="NW")


def _ticks(indices: range) -> list[int]:
    return list(indices)[:: max(1, len(indices) // 6)]


def _map_3d(lines: Sequence[_Line]) -> Figure:
    p = lines[0].problem
    figure = Picture(figsize=(7.2, 3.7), layout="constrained")
    panels = [figure.add_subplot(1, 2, n, projection="3d") for n in (1, 2)]
    feeding = dict(zip(itertools.product(*([i for _, i in line.pairs] for line in lines)),
                       itertools.product(*([t for t, _ in line.pairs] for line in lines)), strict=True))
    depth_taps = sorted({t[0] for t in feeding.values()})
    colors = {i: CELL_COLORS[depth_taps.index(t[0]) % len(CELL_COLORS)] for i, t in feeding.items()}
    front = min((d for d, _, _ in feeding), default=0)
    texts = {i: ",".join(map(str, t)) for i, t in feeding.items() if i[0] == front and len(feeding) <= 12}
    _cubes(panels[0], [line.inputs for line in lines], colors, texts)
    _cubes(panels[1], [line.outputs for line in lines], {tuple(line.output for line in lines): INK}, {})
    count = f"{len(feeding)} of {np.prod(p.kernel_size)} taps"
    panels[0].set_title(f"input: {count} feed", loc="left", fontsize=10, color=INK, fontweight="bold")
    panels[1].set_title(f"output voxel {tuple(line.output for line in lines)}", loc="left", fontsize=10, color=INK, fontweight="bold")
    return figure


def _cubes(axes: Any, ranges: Sequence[range], colors: dict[Any, str], texts: dict[Any, str]) -> None:
    """Draw a lattice of dots with some voxels as cubes; depth runs to the back, height down, width to the right."""
    depths, heights, widths = ranges
    dots = np.array([(w, d, h) for d, h, w in itertools.product(depths, heights, widths) if (d, h, w) not in colors]).reshape(-1, 3)
    axes.computed_zorder = False  # a cube over the dots; among the cubes the farthest comes first
    axes.scatter(*dots.T, s=5, color=FAINT, depthshade=False, alpha=0.5, zorder=1)
    for (d, h, w), color in sorted(colors.items(), key=lambda item: (-item[0][0], item[0][2], -item[0][1])):
        axes.bar3d(w - 0.4, d - 0.4, h - 0.4, 0.8, 0.8, 0.8, color=color, edgecolor=INK, linewidth=0.4, shade=False, zorder=2)
        if (d, h, w) in texts:
            axes.text(w, d - 0.45, h, texts[d, h, w], ha="center", va="center", fontsize=7, color=INK, zorder=10)
    axes.set_xlabel("width", fontsize=8, labelpad=-6)
    axes.set_ylabel("depth", fontsize=8, labelpad=-6)
    axes.set_zlabel("height", fontsize=8, labelpad=-8)
    axes.set(xticks=_ticks(widths), yticks=_ticks(depths), zticks=_ticks(heights))
    axes.set_zlim(heights[-1] + 0.6, heights[0] - 0.6)
    axes.tick_params(labelsize=7, colors=INK, pad=-2)
    axes.set_box_aspect([max(len(widths), 2), max(len(depths), 2), max(len(heights), 2)], zoom=0.85)
    axes.view_init(elev=22, azim=-62)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.pane.set_facecolor("white")
        axis._axinfo["grid"]["color"] = GRID


def contribution_count(*problems: Problem) -> Figure:
    """Draw how many products each output voxel of a plane (height, width) sums up for one input channel, a panel a problem.

    Where kernel_size is no multiple of the stride the counts differ from voxel to voxel: the checkerboard of transposed convolutions
    (Odena, Dumoulin and Olah, "Deconvolution and Checkerboard Artifacts", Distill 2016). The plane is the one in the middle with the most.

    Args:
        problems: one or more; none is `EXAMPLE`.
    """
    problems = problems or (EXAMPLE,)
    for problem in problems:
        drawable(problem)
        if math.prod(problem.output_size) > _MOST_VOXELS:
            raise ProblemError(f"output_size={problem.output_size}: more than {_MOST_VOXELS} voxels are not counted")
    sizes = [p.output_size for p in problems]
    height = max(size[1] / size[2] for size in sizes) * 5.6 / len(problems) + 1.2
    figure = Picture(figsize=(7.2, min(6.0, max(2.6, height))), layout="constrained")
    panels = figure.subplots(1, len(problems), squeeze=False)[0]
    counts = [_plane_terms(p) for p in problems]
    most = max(int(count.max()) for count in counts)
    shades = ListedColormap(["#ffffff", *_blues(most)])
    for axes, problem, count in zip(panels, problems, counts, strict=True):
        axes.imshow(count, cmap=shades, vmin=-0.5, vmax=most + 0.5, interpolation="nearest")
        if count.size <= _MOST_TEXTS / len(problems):
            for (row, column), value in np.ndenumerate(count):
                dark = value > 0.6 * most
                axes.text(column, row, str(value), ha="center", va="center", fontsize=7, color="white" if dark else INK)
        axes.set(xticks=_ticks(range(count.shape[1])), yticks=_ticks(range(count.shape[0])))
        style(axes, _short(problem))
        axes.spines[["left", "bottom"]].set_visible(False)
        low, high = int(count.min()), int(count.max())
        told = f"{low}" if low == high else f"{low} to {high}"
        axes.set_xlabel(f"plane d = {_middle(problem, 0)}: {told} products a voxel", fontsize=8, color=INK)
    return figure


def _blues(count: int) -> list[Any]:
    return [matplotlib.colormaps["Blues"](0.15 + 0.8 * n / max(1, count)) for n in range(1, count + 1)] or ["#ffffff"]


def _plane_terms(problem: Problem) -> np.ndarray[Any, Any]:
    single = replace(problem, batch=1, in_channels=1, out_channels=1, groups=1, bias=False)
    return np.asarray(reference.terms("fprop", single)[0, 0, _middle(problem, 0)])


def _short(problem: Problem) -> str:
    return "_".join(part for part in str(problem).split("_")[3:] if part != "bias" and part[0] != "g")


def residue_classes(problem: Problem = EXAMPLE) -> Figure:
    """Draw the residue classes of the outputs of a plane (height, width), each in its colour, with the taps that feed it.

    All outputs with the same `(o + padding) mod stride` are fed by the same taps. A class without taps is bias alone.
    """
    drawable(problem)
    if math.prod(problem.stride[1:]) > MOST_TAPS:
        raise ProblemError(f"stride={problem.stride}: more than {MOST_TAPS} classes of a plane cannot be drawn")
    lines = [_Line(problem, a, _middle(problem, a)) for a in (1, 2)]
    classes = list(itertools.product(problem.axis_classes(1), problem.axis_classes(2)))
    height = max(4.0 * len(lines[0].outputs) / len(lines[1].outputs), 0.28 * len(classes) + 0.6)
    figure = Picture(figsize=(7.2, min(5.0, height) + 0.6), layout="compressed")
    axes, legend = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.35, 1]})
    colors = _distinct_colors(len(classes))
    texts, faces = {}, {}
    entries = []
    for color, (h, w) in zip(colors, classes, strict=True):
        taps = len(h.taps) * len(w.taps)
        for row, column in itertools.product(_members(problem, 1, h, lines[0].outputs), _members(problem, 2, w, lines[1].outputs)):
            faces[row, column] = color if taps else EMPTY
            texts[row, column] = str(taps)
        entries.append((color if taps else EMPTY, _class_text(h, w)))
    _cells(axes, lines[0].outputs, lines[1].outputs, faces, texts, 7)
    style(axes, f"outputs of {_short(problem)}")
    axes.spines[["left", "bottom"]].set_visible(False)
    legend.set(xlim=(0, 1), ylim=(max(len(entries), 5) + 0.2, -0.9))
    legend.set_axis_off()
    legend.text(0.0, -0.5, "residues (h, w): taps of h × taps of w", fontsize=8, color=INK, fontweight="bold", va="center")
    for place, (color, text) in enumerate(entries):
        legend.add_patch(Rectangle((0.0, place + 0.2), 0.07, 0.6, facecolor=color, edgecolor=GRID))
        legend.text(0.11, place + 0.5, text, fontsize=8, color=INK, va="center")
    return figure


def _members(problem: Problem, a: int, axis_class: AxisClass, shown: range) -> list[int]:
    return [o for o in shown if (o + problem.padding[a]) % problem.stride[a] == axis_class.residue]


def _class_text(h: AxisClass, w: AxisClass) -> str:
    if not h.taps or not w.taps:
        return f"({h.residue}, {w.residue}): no tap, bias alone"
    taps = " × ".join("{" + ", ".join(map(str, axis.taps)) + "}" for axis in (h, w))
    return f"({h.residue}, {w.residue}): {taps}"
