"""The report: its files, what it escapes, its exit code, the real input, its pictures, and README's table made from it."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytest.importorskip("nibabel")

from cupy_convt3d import plots, registry
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab import report
from cupy_convt3d.lab.bench.measure import Bench, Ceilings, Row, measure_ceilings
from cupy_convt3d.lab.mri import trilinear
from cupy_convt3d.problem import Problem

HOSTILE = "<script>alert(1)</script>[bold]$x_$"
WRONG = """/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = "ceil_div(output_numel, 64)"
block = 64
*/
extern "C" __global__ void zeros(float* output, long long output_numel) {
  long long i = blockIdx.x * 64LL + threadIdx.x;
  if (i < output_numel) output[i] = 0.0f;
}
"""


class Tags(HTMLParser):
    """Collects what a browser would run or fetch."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sources: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def run(out: Path, kernels: dict[str, Kernel]) -> tuple[int, dict[str, Any], str, str]:
    console = Console(file=io.StringIO(), width=160)
    code = report.main(out, 4, backend="host", flop_limit=20_000, budget_ms=1.0, registered=kernels, console=console)
    data = json.loads((out / "report.json").read_text(), parse_constant=pytest.fail)
    return code, data, (out / "report.html").read_text(), console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str, str]:
    gather = registry.kernel("fprop_gather")
    kernels = {gather.name: gather, "dgrad_gather": registry.kernel("dgrad_gather")}
    with pytest.MonkeyPatch.context() as patch:  # as the fixture `few_problems`
        patch.setattr("cupy_convt3d.lab.check.tails", lambda *_: [])
        patch.setattr("cupy_convt3d.lab.check.layouts", lambda *_: [])
        return run(tmp_path_factory.mktemp("report"), kernels)


def test_json_says_what_was_run_and_where(made: tuple[int, dict[str, Any], str, str]) -> None:
    code, data, _, _ = made
    assert code == 0 and data["passed"]
    assert data["machine"]["backend"] == "host" and data["machine"]["device"]
    assert {"python", "numpy"} <= set(data["versions"])
    assert data["scaled_down"] is True and data["ceilings"] is None
    assert data["tf32"]["kernels"] == "ieee" and "commit" in data and data["created"]
    assert [entry["kernel"] for entry in data["checks"]] == ["fprop_gather", "dgrad_gather"]
    assert len({row["case"] for row in data["rows"]}) == 12
    for row in data["rows"]:
        assert row["median_ms"] > 0 and row["low_ms"] <= row["median_ms"] <= row["high_ms"]
        assert row["share_of_floor"] is None, "no ceilings are pretended on the host"
        assert not row["wrong"]


def test_page_is_self_contained_and_labelled(made: tuple[int, dict[str, Any], str, str]) -> None:
    _, data, page, terminal = made
    tags = Tags(page)
    assert len(tags.sources) == 3 and all(source.startswith("data:image/") for source in tags.sources)
    assert "script" not in tags.names and "link" not in tags.names
    assert "scaled down" in page and "scaled down" in terminal.lower()
    assert data["machine"]["device"] in page


def test_a_terminal_of_80_columns_shows_every_kernel(made: tuple[int, dict[str, Any], str, str]) -> None:
    data = dict(made[1])
    row = next(one for one in data["rows"] if one["contender"] == "fprop_gather")
    names = [name for name in registry.kernels() if name.startswith("fprop_")]
    others = [{**row, "contender": name, "median_ms": row["median_ms"] * (n + 2), "speedup": 0.5} for n, name in enumerate(names)]
    wrong = {**row, "contender": "fprop_none", "median_ms": 1e-6, "difference": 9.0}
    data["rows"] = [*data["rows"], *others, wrong]
    data["checks"] = [{**data["checks"][0], "kernel": name} for name in registry.kernels()]
    console = Console(file=io.StringIO(), width=80)

    report._print_results(console, data)

    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80 and len(lines) < 110
    for name in registry.kernels():
        assert any(name in line for line in lines), name
    assert any(line.startswith(f"│ {row['case']} ") and "gather" in line for line in lines), "the quickest is named"
    assert f"WRONG fprop_none on {row['case']}" in lines


def test_real_input_is_equal_inside(made: tuple[int, dict[str, Any], str, str]) -> None:
    assert [row["kernel"] for row in made[1]["real_input"]["rows"]] == ["fprop_gather"]
    assert made[1]["real_input"]["rows"][0]["difference"] <= 16 * 2.0**-24
    assert made[1]["real_input"]["shape"] == [24, 96, 128]


def test_trilinear_without_torch_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    volume = np.random.default_rng(0).integers(0, 1000, (3, 4, 5)).astype(np.float32)
    by_torch = trilinear(volume)
    monkeypatch.setitem(sys.modules, "torch", None)
    np.testing.assert_allclose(trilinear(volume), by_torch, rtol=1e-6)


def test_hostile_names_are_escaped(made: tuple[int, dict[str, Any], str, str]) -> None:
    _, data, _, _ = made
    data = json.loads(json.dumps(data))
    data["machine"]["device"] = data["checks"][0]["kernel"] = data["checks"][0]["text"] = HOSTILE
    data["checks"][0]["passed"] = False
    data["rows"][1]["contender"] = data["rows"][0]["case"] = data["real_input"]["rows"][0]["kernel"] = HOSTILE
    page = report.html(data, {"errors": "data:image/png;base64,"})
    assert "script" not in Tags(page).names
    assert page.count("&lt;script&gt;alert(1)") >= 6


def test_a_wrong_kernel_fails_the_report(tmp_path: Path) -> None:
    name = "<b>zeros[red]$x_$"
    code, data, page, terminal = run(tmp_path, {name: Kernel.from_source(WRONG, "zeros")})
    assert code == 1 and not data["passed"]
    assert data["checks"][0]["counterexample"] and data["checks"][0]["reproduce"]
    assert not data["real_input"]["rows"][0]["passed"]
    assert all(row["wrong"] for row in data["rows"] if not row["is_rival"])
    assert "FAILED" in page and "WRONG" in page and "b" not in Tags(page).names
    assert name in terminal


def row(**changes: Any) -> Row:
    blank = Row("kb61", "n1_c1to1_i3_k3", "fprop", "fprop_gather", False, "fp32", 10**9, 5, 2.0, 1.9, 2.1, 0.5, 0.25, 10**7, 3.0, 0.0)
    return replace(blank, **changes)


def test_floor_is_the_larger_limit() -> None:
    ceilings = Ceilings(1e12, {"fp32": 1e13})
    problem = Problem(1, 64, 64, 16, 3)
    assert ceilings.floor_ms(problem, "fprop", "fp32") == pytest.approx(problem.flop / 1e10)
    thin = Problem(1, 1, 1, 64, 1)
    assert ceilings.floor_ms(thin, "fprop", "fp32") == pytest.approx(thin.compulsory_bytes(4) / 1e9)
    assert measure_ceilings(Bench(HostBackend())) is None


def test_a_call_over_a_second_is_timed_once() -> None:
    bench, asked = Bench(HostBackend()), []
    bench.backend.time = lambda call, repeats: asked.append(repeats) or [1500.0] * repeats  # type: ignore[method-assign]
    assert bench.milliseconds(lambda: None) == [1500.0] and asked == [1]


@pytest.mark.parametrize("rows", [[], [row(contender="$x_$"), row(contender="torch", is_rival=True), row(median_ms=None)]])
def test_pictures_draw_with_any_rows(rows: list[Row]) -> None:
    ratios: dict[str, list[float]] = {"$x_$": [0.0, 0.2, float("inf")], "none": []} if rows else {}
    volume = np.zeros((2, 4, 4), np.float32)
    for figure in (
        plots.speed_bars(rows),
        plots.roofline(rows, Ceilings(3e12, {"fp32": 5e13})),
        plots.error_histogram(ratios),
        plots.volume_slices(volume, volume.repeat(2, 0)),
    ):
        picture = io.BytesIO()
        figure.savefig(picture, format="svg")
        assert b"</svg>" in picture.getvalue()


def update_results() -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "update_results.py"
    spec = importlib.util.spec_from_file_location("update_results", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


def test_measured_tables_are_rewritten_between_their_markers(tmp_path: Path, made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module, results = update_results(), tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    readme, page = tmp_path / "README.md", tmp_path / "docs" / "measured.md"
    page.parent.mkdir()
    before = f"top\n{module.BEGIN}\nold\n{module.END}\nend\n"
    for one in (readme, page):
        one.write_text(before)
    (results / "host.json").write_text(json.dumps(made[1]))
    assert module.main([], tmp_path) == 0
    assert readme.read_text() == page.read_text() == before and "no results" in capsys.readouterr().out

    rival = row(contender="cuDNN (torch)", is_rival=True, median_ms=6.0, speedup=None)
    rows = [asdict(r) | {"wrong": r.wrong} for r in (rival, row(), row(contender="quicker but wrong", median_ms=1.0, difference=1.0))]
    machine = {"backend": "cuda", "device": "GPU Z", "driver": "13.0"}
    ceilings = {"copy_bytes_per_s": 3e12, "gemm_flop_per_s": {"fp32": 5e13}}
    gpu = made[1] | {"machine": machine, "scaled_down": False, "ceilings": ceilings, "rows": rows}
    (results / "gpu_z.json").write_text(json.dumps(gpu))
    (results / "population.json").write_text(json.dumps(gpu | {"kind": "population", "created": "2999-01-01", "rows": rows[:1]}))
    assert module.main([], tmp_path) == 0
    text = readme.read_text()
    assert text.startswith(f"top\n{module.BEGIN}\nThe quickest kernel against cuDNN on one GPU Z") and text.endswith(f"{module.END}\nend\n")
    assert "| fp32 (ieee) | 3.00x (3.00x) | - | - |" in text and "old" not in text
    text = page.read_text()
    assert text.startswith(f"top\n{module.BEGIN}\nGPU Z. Medians") and text.endswith(f"{module.END}\nend\n")
    assert "| kb61 | fprop | fprop_gather | 2.000 | 2.000 | 6.000 | - | 3.00x | - | 25% | - | - |" in text and "old" not in text
    assert "| fp32 (ieee) | 3.00x (3.00x) | - | 25% (25%) | - |" in text and "CUDA driver 13.0" in text
    assert {path.name for path in (tmp_path / "benchmarks/plots").iterdir()} == {"speed-fp32.png", "roofline-fp32.png"}

    newer = [asdict(replace(r, dtype="tf32", with_packing_ms=r.median_ms)) for r in (rival, row())]
    newer += [asdict(replace(r, layout="channels_last", median_ms=4.0)) for r in (replace(rival, dtype="tf32"),)]
    ceilings = {"copy_bytes_per_s": 3e12, "gemm_flop_per_s": {"tf32": 3e14}}
    later = gpu | {"created": "2999-01-01", "ceilings": ceilings, "rows": newer, "commit": "0123456789abcdef-dirty"}
    (results / "tf32.json").write_text(json.dumps(later))
    (results / "other_gpu.json").write_text(json.dumps(gpu | {"machine": machine | {"device": "GPU Y"}}))
    assert module.main([], tmp_path) == 0
    assert "| tf32 | 3.00x (3.00x) | 2.00x (2.00x) | - |" in readme.read_text() and "GPU Y" not in readme.read_text()
    text = page.read_text()
    assert "| tf32 | 3.00x (3.00x) | 2.00x (2.00x) | 25% (25%) | 2.00x (2.00x) |" in text and "| fp32 (ieee) | 3.00x (3.00x) | -" in text
    assert "| kb61 | fprop | fprop_gather | 2.000 | 2.000 | 6.000 | 4.000 | 3.00x | 2.00x | 25% | - | - |" in text
    assert "`0123456789-dirty`" in text and text.count("GPU Y") == 1
    assert "| fp32 (ieee) | 3.00x (3.00x) | -" in text.split("The same on GPU Y.")[1].split("<details>")[0]
    assert (tmp_path / "benchmarks/plots/roofline-tf32.png").stat().st_size > 5000

    for one in (readme, page):
        kept, other = one.read_text(), (page if one is readme else readme).read_text()
        one.write_text("no markers")
        assert module.main([], tmp_path) == 1
        assert {readme.read_text(), page.read_text()} == {"no markers", other}
        one.write_text(kept)
