"""The pictures: they draw for any problem, what they show is what the reference computes, and bad arguments are named."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from cupy_convt3d import plots, reference, registry
from cupy_convt3d.errors import KernelError, LaunchError, ProblemError
from cupy_convt3d.lab import strategies
from cupy_convt3d.lab.bench import results
from cupy_convt3d.lab.bench.calls import CallRow
from cupy_convt3d.lab.bench.measure import Ceilings, Row
from cupy_convt3d.plots import geometry, style
from cupy_convt3d.problem import Problem

ROOT = Path(__file__).parents[1]
SPECIMENS = ROOT / "tests" / "specimens"
NO_TAP = Problem(1, 1, 1, 3, 1, 2)


def texts(figure: Figure) -> list[str]:
    figure.draw_without_rendering()
    return [text.get_text() for axes in figure.axes for text in (*axes.texts, axes.title, axes._left_title)]


@given(strategies.problems(), st.integers(0, 2))
@settings(max_examples=60)
def test_reach_is_the_definition(problem: Problem, a: int) -> None:
    by_definition: dict[int, set[tuple[int, int]]] = {}
    for i in range(problem.input_size[a]):
        for t in range(problem.kernel_size[a]):
            by_definition.setdefault(i * problem.stride[a] - problem.padding[a] + t * problem.dilation[a], set()).add((t, i))
    for output in range(problem.output_size[a]):
        line = geometry._Line(problem, a, output)
        assert set(line.pairs) == by_definition.get(output, set())
        assert output in line.outputs and {i for _, i in line.pairs} <= set(line.inputs)


@given(strategies.problems(), st.sampled_from((1, 2, 3)))
@settings(max_examples=6)
def test_geometry_draws_for_any_problem(problem: Problem, dimensions: int) -> None:
    for figure in (
        plots.tap_map(problem, dimensions=dimensions),
        plots.contribution_count(problem),
        plots.residue_classes(problem),
    ):
        figure.draw_without_rendering()
        assert figure.axes


def test_tap_map_colours_what_feeds_the_voxel() -> None:
    figure = plots.tap_map(geometry.EXAMPLE, (1, 3, 5))  # odd outputs: taps 0 and 2 on either axis
    white, grid = to_hex("white"), {}
    for axes in figure.axes:
        patches = [p for p in axes.patches if to_hex(p.get_facecolor()) != white]
        grid[axes._left_title.get_text()] = {(round(p.get_y() + 0.5), round(p.get_x() + 0.5)) for p in patches}
    assert grid["taps"] == {(0, 0), (0, 2), (2, 0), (2, 2)}
    assert grid["input, by tap"] == {(1, 2), (1, 3), (2, 2), (2, 3)}
    assert grid["output, voxel (3, 5)"] == {(3, 5)}


def test_tap_map_says_where_nothing_reaches() -> None:
    assert "bias alone" in " ".join(texts(plots.tap_map(NO_TAP, (1, 1, 1), dimensions=1)))
    assert "bias alone" in " ".join(texts(plots.residue_classes(NO_TAP)))


def test_contribution_count_is_the_references() -> None:
    problem = Problem(2, 4, 6, (3, 4, 5), 3, 2, 1, groups=2, bias=True)
    image = plots.contribution_count(problem).axes[0].images[0].get_array()
    assert image.shape == problem.output_size[1:] and set(image.ravel()) == {2, 4, 8}
    single = Problem(1, 1, 1, (3, 4, 5), 3, 2, 1)
    assert (image == reference.terms("fprop", single)[0, 0, 3]).all()
    assert len(plots.contribution_count(single, NO_TAP).axes) == 2


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"output": (0, 0, 99)}, "output"),
        ({"output": (0, 0)}, "output"),
        ({"output": (-1, 0, 0)}, "output"),
        ({"dimensions": 4}, "dimensions"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ProblemError, match=named):
        plots.tap_map(**arguments)


def test_sliders_in_jupyter_and_a_picture_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(plots.explore_taps(), Figure)
    widgets = pytest.importorskip("ipywidgets")
    monkeypatch.setattr("IPython.get_ipython", MagicMock)
    box = plots.explore_taps(dimensions=1)
    assert isinstance(box, widgets.VBox)
    assert [(slider.description, slider.max) for slider in box.children[:-1]] == [("w", geometry.EXAMPLE.output_size[2] - 1)]


def test_a_notebook_shows_a_figure_without_pyplot() -> None:
    picture = plots.tap_map()
    assert isinstance(picture, style.Picture)
    data, size = picture._repr_png_()
    assert data.startswith(b"\x89PNG") and size["width"] == int(7.2 * 96)


def test_error_map_tells_wrong_from_right(backend: str) -> None:
    right = plots.error_map("fprop_gather", backend=backend)
    assert "0 of" in right.get_suptitle()
    wrong = plots.error_map(SPECIMENS / "s000_truncating_index.cu", backend=backend)
    assert wrong.get_suptitle().endswith("2310 of 2310 in all")
    unwritten = plots.error_map(SPECIMENS / "s002_same_block_index.cu", Problem(1, 1, 1, (2, 9, 9), 3), backend=backend)
    assert "NaN" in texts(unwritten)


@pytest.mark.parametrize("dtype", sorted(registry.kernel("fprop_gather").dtypes))
def test_error_map_draws_every_dtype(dtype: str) -> None:
    assert "0 of" in plots.error_map("fprop_gather", dtype=dtype, backend="host").get_suptitle()


def test_error_map_draws_products_in_tf32(tmp_path: Path) -> None:
    """An fp32 kernel that says tf32: the tensors' type and the instance's name differ."""
    source = (SPECIMENS / "s002_same_block_index.cu").read_text()
    (tmp_path / "half_tf32.cu").write_text(source.replace('dtypes = ["fp32"]', 'dtypes = ["tf32"]'))
    figure = plots.error_map(tmp_path / "half_tf32.cu", Problem(1, 1, 1, (2, 9, 9), 3), backend="host")
    assert "NaN" in texts(figure) and "0 of" not in figure.get_suptitle()


def test_error_map_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(LaunchError, match="crash"):
        plots.error_map(SPECIMENS / "crash.cu", Problem(1, 1, 1, 2, 1, bias=True), backend="host")
    with pytest.raises(KernelError, match="fp16"):
        plots.error_map(SPECIMENS / "crash.cu", dtype="fp16", backend="host")


def test_tuning_landscape_takes_the_two_that_matter() -> None:
    settings = itertools.product((1, 2), repeat=3)
    trials = [({"A": a, "B": b, "C": c}, None if a == b == 2 else a + 0.01 * b + 5 * c) for a, b, c in settings]
    figure = plots.tuning_landscape(trials)
    shown = texts(figure)
    assert {figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()} == {"A", "C"}
    assert "6.01" in shown and "2 failed" in figure.axes[1].get_xlabel()
    assert "failed" in texts(plots.tuning_landscape(trials, ("A", "B")))
    plots.tuning_landscape([({"A": 1}, 2.0), ({"A": 2}, 1.0)]).draw_without_rendering()
    plots.tuning_landscape([({"A": 1}, None)]).draw_without_rendering()
    with pytest.raises(KernelError, match="'D'"):
        plots.tuning_landscape(trials, ("A", "D"))
    with pytest.raises(KernelError, match="none"):
        plots.tuning_landscape([])


def test_speed_bars_show_the_floor_where_it_was_measured() -> None:
    blank = Row("kb61", "n1_c1to1_i3_k3", "fprop", "fprop_gather", False, "fp32", 10**9, 5, 2.0, 1.9, 2.1)
    with_floor = Row(**{**asdict(blank), "floor_ms": 0.5})
    labels = [text.get_text() for text in plots.speed_bars([with_floor]).legends[0].get_texts()]
    assert labels == ["fprop_gather", "floor"]
    assert [text.get_text() for text in plots.speed_bars([blank]).legends[0].get_texts()] == ["fprop_gather"]


def test_recorded_results_are_read_back(tmp_path: Path) -> None:
    recorded = next((ROOT / "benchmarks" / "results").glob("h100-named-*.json"))
    read = results.load(recorded)
    data = json.loads(recorded.read_text())
    assert len(read.rows) == len(data["rows"]) and read.machine["device"] == data["machine"]["device"]
    assert read.ceilings is not None
    plots.roofline(read.rows, read.ceilings).savefig(io.BytesIO(), format="svg")
    (tmp_path / "read.json").write_text(recorded.read_text())
    (tmp_path / "host.json").write_text(json.dumps(data | {"ceilings": None, "created": "2999"}))
    (tmp_path / "other.json").write_text('{"rows": 3}')
    for path in (tmp_path / "other.json", tmp_path / "missing.json", tmp_path):
        with pytest.raises(KernelError, match=r"cannot be read"):
            results.load(path)
    (tmp_path / "population.json").write_text(json.dumps(data | {"kind": "population", "created": "2999"}))
    with pytest.raises(KernelError, match=r"has calls over a population"):
        results.load(tmp_path / "population.json")
    assert results.newest(tmp_path) == read
    assert results.newest(tmp_path, "fp32") == read
    with pytest.raises(KernelError, match="no report of fp64 that"):
        results.newest(tmp_path, "fp64")
    with pytest.raises(KernelError, match="no report that"):
        results.newest(tmp_path / "missing")


@pytest.mark.parametrize("layouts", [["ncdhw"], ["ncdhw", "channels_last"]])
def test_ratio_distribution_has_a_curve_a_precision_and_a_panel_a_layout(layouts: list[str]) -> None:
    rows = []
    for number, dtype, layout in itertools.product(range(1, 9), ("fp32", "bf16"), layouts):
        blank = CallRow(f"layer{number}", "n1_c1to1_i3_k3", "fprop", "torch", True, dtype, 10**6, 5, layout=layout)
        torch_ms = number / (4 if dtype == "bf16" else 2)
        rows += [replace(blank, median_ms=torch_ms), replace(blank, contender="auto", is_rival=False, median_ms=1.0)]
    figure = plots.ratio_distribution(rows)
    assert texts(figure) == [title for layout in layouts for title in ("", f"{layout}, 8 layers")]
    for axes in figure.axes:
        assert axes.get_xscale() == "log"
        curves = {line.get_label(): line.get_xdata() for line in axes.lines}
        assert max(curves["fp32"]) == 4 and max(curves["bf16"]) == 2, "torch / auto"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fp32", "bf16"]


def test_ratio_distribution_of_nothing_is_empty() -> None:
    assert texts(plots.ratio_distribution([])) == ["", "ncdhw, 0 layers"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.tap_map(5),
        lambda: plots.tap_map(output="abc"),
        lambda: plots.tap_map(output=(1, 2)),
        lambda: plots.tap_map(output=(1, 2, 1.5)),
        lambda: plots.tap_map(dimensions=[]),
        lambda: plots.tap_map(dimensions="2"),
        lambda: plots.tap_map(Problem(1, 1, 1, (1, 1, 1), (1, 1, 2**30))),
        lambda: plots.explore_taps(None),
        lambda: plots.explore_taps(dimensions=4),
        lambda: plots.contribution_count(5),
        lambda: plots.contribution_count(Problem(1, 1, 1, 2**9, 2)),
        lambda: plots.residue_classes("n1"),
        lambda: plots.residue_classes(Problem(1, 1, 1, 2, 3, 900)),
        lambda: plots.speed_bars(5),
        lambda: plots.speed_bars([5]),
        lambda: plots.roofline([], None),
        lambda: plots.roofline([], {}, "fp32"),
        lambda: plots.roofline([], Ceilings(1e12, {"fp32": 1e13}), "int8"),
        lambda: plots.roofline([], Ceilings(1e12, {"fp32": 1e13}), []),
        lambda: plots.ratio_distribution(None),
        lambda: plots.ratio_distribution([1]),
        lambda: plots.ratio_distribution([Row("", "", "", "", False, "", 0)]),
        lambda: plots.error_histogram(5),
        lambda: plots.error_histogram({"a": [-1.0]}),
        lambda: plots.error_histogram({"a": [float("nan")]}),
        lambda: plots.error_histogram({"a": [np.complex64(1)]}),
        lambda: plots.error_histogram({"a": 5}),
        lambda: plots.error_histogram({"a": ["b"]}),
        lambda: plots.error_histogram({5: [1.0]}),
        lambda: plots.volume_slices(5, 5),
        lambda: plots.volume_slices(np.zeros((4, 4)), np.zeros((8, 8))),
        lambda: plots.volume_slices(np.zeros((0, 4, 4)), np.zeros((0, 8, 8))),
        lambda: plots.volume_slices(np.full((4, 4, 4), "a"), np.zeros((8, 8, 8))),
        lambda: plots.tuning_landscape(5),
        lambda: plots.tuning_landscape([5]),
        lambda: plots.tuning_landscape([({"A": 1}, "fast")]),
        lambda: plots.tuning_landscape([({"A": 1}, -1.0)]),
        lambda: plots.tuning_landscape([({"A": 1}, float("nan"))]),
        lambda: plots.tuning_landscape([({"A": 1}, 1.0)], [[]]),
        lambda: plots.tuning_landscape([({"A": 1}, 1.0)], 5),
        lambda: plots.tuning_landscape([({"A": 1, "B": 1, "C": 1}, 1.0)], ["A", "B", "C"]),
        lambda: plots.tuning_landscape([({"A": 1}, 1.0), ({"B": 1}, 1.0)]),
        lambda: plots.error_map(5),
        lambda: plots.error_map([]),
        lambda: plots.error_map("fprop_gather", 5),
        lambda: plots.error_map("fprop_gather", dtype=[]),
        lambda: plots.error_map("fprop_gather", seed="0"),
        lambda: plots.error_map("fprop_gather", seed=-1),
        lambda: plots.error_map("fprop_gather", backend=[]),
    ],
)
def test_arguments_of_a_wrong_type_are_named(draw: Callable[[], object]) -> None:
    with pytest.raises((ProblemError, KernelError), match=r"must be|cannot be drawn|are not counted|was measured|none of|has no"):
        draw()
