"""Colours, and what all pictures share. Figures are made without pyplot, so they need no display and share no state."""

from __future__ import annotations

import io
from typing import Any

from matplotlib.figure import Figure

from ..errors import ProblemError, ProblemTypeError, shown
from ..problem import Problem

_CSS_DPI, _SCREEN_DPI = 96, 192  # pictures are saved with two pixels for each of CSS's
INK, GRID, SOFT, FAINT = "#1f2933", "#d9dee3", "#5b6772", "#8a949e"
RIVAL, BAD, EMPTY = "#a3adb8", "#b8433c", "#eef1f4"
COLORS = ("#2f6f9f", "#d9822b", "#3f8f5f", "#8e5ea2", "#b8433c", "#6b7a2a", "#2a8c8c", "#c25b8a")
# For cells that carry text: light, and told apart by lightness too.
CELL_COLORS = ("#8ab8dc", "#f3bd7e", "#9fd0a8", "#cdb3dd", "#eda9a2", "#cfd48a", "#9ad6d6", "#f0b8d0")


MOST_TAPS = 1000  # of an axis, and outputs between two inputs: more are not drawn


def must_be(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Raise ProblemTypeError unless a value is of a kind."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise ProblemTypeError(f"{name}={shown(value)}: must be {what}")


def drawable(problem: object) -> None:
    """Raise ProblemError unless this is a problem of a size that can be drawn."""
    must_be("problem", problem, Problem, "a Problem")
    assert isinstance(problem, Problem)
    for name in ("kernel_size", "stride"):
        if max(getattr(problem, name)) > MOST_TAPS:
            raise ProblemError(f"{name}={getattr(problem, name)}: more than {MOST_TAPS} cannot be drawn")


def literal(text: str) -> str:
    """Keep matplotlib from reading a name as mathematics."""
    return text.replace("$", r"\$")


def style(axes: Any, title: str = "") -> None:
    """Give axes the look of all pictures: no box, no ticks, a bold title at the left."""
    axes.set_title(literal(title), loc="left", fontsize=10, color=INK, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=INK, labelsize=8, length=0, which="both")
    axes.set_axisbelow(True)


class Picture(Figure):
    """A matplotlib Figure that a notebook shows even where pyplot was never imported."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        stream = io.BytesIO()
        self.savefig(stream, format="png", dpi=_SCREEN_DPI, facecolor="white")
        width, height = (int(inches * _CSS_DPI) for inches in self.get_size_inches())
        return stream.getvalue(), {"width": width, "height": height}
