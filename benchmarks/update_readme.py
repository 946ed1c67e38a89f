"""Rewrites README's table of results, between its two markers, from the newest GPU report in `benchmarks/results/`.

    python benchmarks/update_readme.py [RESULTS.json]

A results file is the `report.json` of `convt3d report` on a GPU. Where there is none, nothing is changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cupy_convt3d.lab.report import comparisons

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def newest(directory: Path) -> Path | None:
    """Return the GPU results file made last, or None; host results are skipped, they are no speed to show."""
    made = {}
    for path in directory.glob("*.json"):
        data = json.loads(path.read_text())
        if "rows" in data and not data.get("scaled_down", True):
            made[path] = data["created"]
    return max(made, key=lambda path: made[path], default=None)


def section(data: dict[str, Any], source: str) -> str:
    """Return the Markdown that stands between the markers."""
    machine, versions = data["machine"], data["versions"]
    shown = [f"{name} {versions[name]}" for name in ("torch", "torch CUDA", "cuDNN", "cupy-cuda13x", "cupy-cuda12x") if name in versions]
    ceilings = data["ceilings"]
    lines = [
        f"{machine['device']}, driver {machine.get('driver', 'unknown')}, {', '.join(shown)}, {data['created'][:10]} "
        f"(`{source}`, commit `{(data['commit'] or 'unknown')[:10]}`). "
        "fp32, TF32 off, medians, torch with `cudnn.benchmark` in the same run.",
    ]
    if ceilings:
        lines.append(
            f"Ceilings measured in that run: copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
            f"GEMM fp32 {ceilings['gemm_flop_per_s']['fp32'] / 1e12:.1f} TFLOP/s; floor = the larger of FLOP and bytes over them."
        )
    lines += ["", "| problem | pass | quickest kernel | ms | cuDNN ms | cuDNN / kernel | share of floor |", "|---|---|---|---|---|---|---|"]
    for entry in comparisons([row for row in data["rows"] if row["dtype"] == "fp32"]):
        best, rival = entry["best"], entry["rival"]
        if best is None:
            lines.append(f"| {entry['case']} | {entry['pass_name']} | none | - | {_number(rival and rival['median_ms'])} | - | - |")
            continue
        share = "-" if best["share_of_floor"] is None else f"{best['share_of_floor']:.0%}"
        speedup = "-" if best["speedup"] is None else f"{best['speedup']:.2f}x"
        cells = (_number(best["median_ms"]), _number(rival and rival["median_ms"]), speedup, share)
        lines.append(f"| {entry['case']} | {entry['pass_name']} | {best['contender']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def rewritten(readme: str, body: str) -> str:
    """Return the README with `body` between the markers.

    Raises:
        ValueError: the markers are not there once each, in their order.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README must have {BEGIN} and then {END}, once each")
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n{body}\n{END}{rest.split(END)[1]}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Rewrite the README of `root`; return 1 if it has no markers."""
    parser = argparse.ArgumentParser(description="Rewrite README's table of results.")
    parser.add_argument("results", type=Path, nargs="?", help="a report.json made on a GPU; default: the newest in benchmarks/results/")
    path = parser.parse_args(arguments).results or newest(root / "benchmarks" / "results")
    if path is None:
        print("benchmarks/results/ has no results from a GPU; README is left as it is.")
        return 0
    readme = root / "README.md"
    resolved = path.resolve()
    source = str(resolved.relative_to(root)) if resolved.is_relative_to(root) else path.name
    try:
        readme.write_text(rewritten(readme.read_text(), section(json.loads(path.read_text()), source)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"README's table written from {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
