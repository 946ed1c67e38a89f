"""Rewrites the measured tables, and the pictures beside them, from GPU results in `benchmarks/results/`.

    python benchmarks/update_results.py [RESULTS.json ...]

README gets the means of the device with the most rows, and the worst layers; `docs/measured.md` gets everything. Both are rewritten between
their two markers.

A results file is what `convt3d bench --out` wrote on a GPU (a `report.json` will do). Each precision of a device is shown from the
newest file that has it: problem by problem of the device with the most rows (of two with as many the one measured last), of others
the means. Where there is no such file, nothing is changed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image  # matplotlib brings it

from cupy_convt3d import plots
from cupy_convt3d.lab.bench.measure import Ceilings, Row
from cupy_convt3d.lab.bench.summary import Comparison, comparisons, rows_of, summary

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
PLOTS = Path("benchmarks/plots")
NAMES = {"fp32": "fp32 (ieee)"}


@dataclass(frozen=True)
class Shown:
    """One precision's rows, and the results file they come from."""

    dtype: str
    rows: list[Row]
    data: dict[str, Any]
    source: str

    @property
    def device(self) -> str:
        return str(self.data["machine"]["device"])

    @property
    def ceilings(self) -> Ceilings | None:
        return None if self.data["ceilings"] is None else Ceilings(**self.data["ceilings"])


def load(paths: Iterable[Path], root: Path) -> list[Shown]:
    """Return what is to be shown, the device with the most rows first, of two with as many the one measured last.

    Host results are skipped, they are no speed to show, and so are calls over a population, which are no problems with names.
    """
    files = []
    for path in paths:
        data = json.loads(path.read_text())
        if "rows" in data and not data.get("scaled_down", True) and data.get("kind") != "population":
            resolved = path.resolve()
            files.append((data, str(resolved.relative_to(root)) if resolved.is_relative_to(root) else path.name))
    files.sort(key=lambda file: file[0]["created"], reverse=True)
    shown: dict[tuple[str, str], Shown] = {}
    for data, source in files:
        rows = rows_of(data)
        for dtype in dict.fromkeys(row.dtype for row in rows):
            one = Shown(dtype, [row for row in rows if row.dtype == dtype], data, source)
            shown.setdefault((one.device, dtype), one)
    order = ("fp32", "tf32x3", "tf32", "bf16", "fp16", "fp64")
    measured: Counter[str] = Counter()
    for one in shown.values():
        measured[one.device] += len(one.rows)
    newest = list(measured)  # as the files were sorted
    return sorted(shown.values(), key=lambda one: (-measured[one.device], newest.index(one.device), order.index(one.dtype)))


def short(shown: Sequence[Shown]) -> str:
    """Return README's table: one device, means and worst layers."""
    shown = [one for one in shown if one.device == shown[0].device]
    problems = max(len({row.case for row in one.rows}) for one in shown)
    lines = [
        f"The quickest kernel against cuDNN on one {shown[0].device}, forward pass: geometric mean over {problems} layers, in brackets the "
        "worst layer. Packing the weight is in the time; the L2 is flushed before each call.",
        "",
        "| precision | NCDHW: cuDNN fed NCDHW | NCDHW: cuDNN's better layout | channels_last_3d: cuDNN's better layout |",
        "|---|---|---|---|",
    ]
    for one in shown:
        found = [c for c in comparisons(one.rows) if c.pass_name == "fprop"]
        cells = (
            _mean_and_worst([c.ratio(better=better) for c in found if c.layout == layout])
            for layout, better in (("ncdhw", False), ("ncdhw", True), ("channels_last", True))
        )
        lines.append(f"| {NAMES.get(one.dtype, one.dtype)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _origin(shown[0], with_ceilings=False), ""])


def _mean_and_worst(ratios: Sequence[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return "-"
    return f"{math.exp(sum(map(math.log, known)) / len(known)):.2f}x ({min(known):.2f}x)"


def section(shown: Sequence[Shown]) -> str:
    """Return what stands between the markers of `docs/measured.md`."""
    others = [one for one in shown if one.device != shown[0].device]
    shown = [one for one in shown if one.device == shown[0].device]
    lines = [
        f"{shown[0].device}. Medians in ms, the L2 flushed before each call; torch with `cudnn.benchmark` in the "
        "same run and precision (tf32x3 against cuDNN's fp32). Kernels get NCDHW tensors, and channels_last_3d ones in the last "
        "column; cuDNN's better layout is the quicker of NCDHW and channels_last_3d, its tensors already in it. floor = the larger "
        "of FLOP and bytes over the ceilings measured in the same run. Packing the weight is in the time, as it is by default; in brackets "
        "that of frozen weights (`ct.nn.freeze`). Geometric means, fprop, "
        "over the eleven problems of the suite `core`:",
        *_table_of_means(shown),
    ]
    for device in dict.fromkeys(one.device for one in others):
        own = [one for one in others if one.device == device]
        lines += ["", f"The same on {device}.", *_table_of_means(own), ""]
        for source in dict.fromkeys(one.source for one in own):
            of_file = [one for one in own if one.source == source]
            lines += [f"- {', '.join(NAMES.get(one.dtype, one.dtype) for one in of_file)}: {_origin(of_file[0])}"]
    for one in shown:
        lines += ["", f"<details><summary>{NAMES.get(one.dtype, one.dtype)}: every problem</summary>", "", _origin(one), ""]
        for kind in ("speed", "roofline"):
            lines += [f"![{kind}, {one.dtype}](../{PLOTS.as_posix()}/{kind}-{one.dtype}.png)", ""]
        lines += [*_table(one), "", "</details>"]
    return "\n".join(lines)


def _table_of_means(shown: Sequence[Shown]) -> list[str]:
    problems = max(len({row.case for row in one.rows}) for one in shown)
    every = f"all {problems}, better layout"
    heads = "| precision | against cuDNN, NCDHW | against its better layout | share of floors >= 0.02 ms |"
    return ["", f"{heads} {every} | channels_last_3d, {every} |", "|---|---|---|---|---|---|", *map(_means, shown)]


def _means(one: Shown) -> str:
    entries = {
        (entry["layout"], entry["layers"], entry["frozen"]): entry
        for entry in summary(one.rows)
        if entry["pass_name"] == "fprop"
    }

    def cell(layers: str, quantity: str, form: str, layout: str = "ncdhw") -> str:
        values = [entries.get((layout, layers, frozen), {}).get(quantity) for frozen in (False, True)]
        if values[0] is None:
            return "-"
        inside = "" if values[1] is None else f" ({form.format(values[1])})"
        return form.format(values[0]) + inside

    cells = (
        cell("core", "against_rival", "{:.2f}x"),
        cell("core", "against_better_layout", "{:.2f}x"),
        cell("core", "share_of_floor", "{:.0%}"),
        cell("all", "against_better_layout", "{:.2f}x"),
        cell("all", "against_better_layout", "{:.2f}x", "channels_last"),
    )
    return f"| {NAMES.get(one.dtype, one.dtype)} | {' | '.join(cells)} |"


def _origin(one: Shown, with_ceilings: bool = True) -> str:
    machine, versions, data = one.data["machine"], one.data["versions"], one.data
    known = [f"{name} {versions[name]}" for name in ("torch", "torch CUDA", "cuDNN", "cupy-cuda13x", "cupy-cuda12x") if name in versions]
    commit = data["commit"] or "unknown"
    text = (
        f"CUDA driver {machine.get('driver', 'unknown')}, {', '.join(known)}, {data['created'][:10]} (`{one.source}`, "
        f"commit `{commit[:10]}{'-dirty' * commit.endswith('-dirty')}`)."
    )
    if with_ceilings and one.ceilings is not None:
        rate = one.ceilings.gemm_flop_per_s.get(one.dtype)
        gemm = "" if rate is None else f", {one.dtype} GEMM {rate / 1e12:.1f} TFLOP/s" + " (a third of TF32's)" * (one.dtype == "tf32x3")
        text += f" Ceilings: copy {one.ceilings.copy_bytes_per_s / 1e12:.2f} TB/s{gemm}."
    return text


def _table(one: Shown) -> list[str]:
    heads = (
        *("problem", "pass", "kernel", "ms", "frozen", "cuDNN NCDHW", "cuDNN channels_last"),
        *("cuDNN / kernel", "better cuDNN / kernel", "share of floor", "error", "error of cuDNN"),
    )
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    found = comparisons(one.rows)
    other = {(c.pass_name, c.case): c.rival for c in found if c.layout == "channels_last"}
    for c in found:
        if c.layout != "ncdhw":
            continue
        best, rival, channels_last = c.best, c.rival, other.get((c.pass_name, c.case))
        elapsed_ms = c.milliseconds()
        share = None if best is None or best.floor_ms is None or elapsed_ms is None else best.floor_ms / elapsed_ms
        cells = (
            *(c.case, c.pass_name, "none" if best is None else best.contender),
            *(_number(ms) for ms in (c.milliseconds(False), c.milliseconds(True))),
            *(_number(row and row.median_ms) for row in (rival, channels_last)),
            *("-" if ratio is None else f"{ratio:.2f}x" for ratio in (c.ratio(), c.ratio(better=True))),
            "-" if share is None else f"{share:.0%}",
            *("-" if row is None or row.error is None else f"{row.error:.1e}" for row in (best, rival)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def draw(one: Shown, directory: Path) -> None:
    """Write the pictures of one precision: the quickest kernel of each problem beside cuDNN in both layouts."""
    rows = _contenders(comparisons(one.rows))
    directory.mkdir(parents=True, exist_ok=True)
    _save(plots.speed_bars(rows), directory / f"speed-{one.dtype}.png")
    if one.ceilings is not None and one.dtype in one.ceilings.gemm_flop_per_s:
        _save(plots.roofline(rows, one.ceilings, one.dtype), directory / f"roofline-{one.dtype}.png")


def _save(figure: Figure, path: Path) -> None:
    """Write a picture of 64 colours: a third of the size of a true-colour one."""
    drawn = BytesIO()
    figure.savefig(drawn, dpi=110)
    Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)


def _contenders(found: Sequence[Comparison]) -> list[Row]:
    rows = []
    for c in found:
        if c.best is not None and c.layout == "ncdhw":
            rows.append(replace(c.best, contender="cupy_convt3d", median_ms=c.milliseconds()))
        if c.rival is not None:
            shown = "cuDNN, NCDHW" if c.layout == "ncdhw" else "cuDNN, channels_last"
            rows.append(replace(c.rival, contender=shown, is_rival=c.layout == "ncdhw"))
    return sorted(rows, key=lambda row: ("cupy_convt3d", "cuDNN, NCDHW", "cuDNN, channels_last").index(row.contender))


def rewritten(page: str, body: str, name: str) -> str:
    """Return a page with `body` between its markers.

    Raises:
        ValueError: the markers are not there once each, in their order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"{name} must have {BEGIN} and then {END}, once each")
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{body}\n{END}{rest.split(END)[1]}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite the two pages of `root` and the pictures; return 1 if one has no markers."""
    parser = argparse.ArgumentParser(description="Rewrite the measured tables and pictures.")
    parser.add_argument("results", type=Path, nargs="*", help="files of `convt3d bench --out` on a GPU; default: benchmarks/results/*.json")
    given = parser.parse_args(arguments).results
    shown = load(given or sorted((root / "benchmarks" / "results").glob("*.json")), root)
    if not shown:
        print("benchmarks/results/ has no results from a GPU; the pages are left as they are.")
        return 0
    try:
        pages = {root / name: rewritten((root / name).read_text(), write(shown), name) for name, write in PAGES.items()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for page, text in pages.items():
        page.write_text(text)
    for one in shown:
        if one.device == shown[0].device:
            draw(one, root / PLOTS)
    print(f"Results written: {', '.join(f'{one.dtype} from {one.source}' for one in shown)}")
    return 0


PAGES = {"README.md": short, "docs/measured.md": section}

if __name__ == "__main__":
    sys.exit(main())
