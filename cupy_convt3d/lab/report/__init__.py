"""`convt3d report`: check every registered kernel, run it on a real volume, time it, and write down what came out."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...backends.base import Backend
from ...errors import BackendError, require
from ...files import write_whole
from ...kernel import Kernel
from ...limits import cores
from ...plots import results as plots
from ...problem import PASSES, Problem
from ...registry import kernels
from ..bench.contest import compare
from ..bench.measure import Bench, Ceilings, Row, measure_ceilings
from ..bench.provenance import backend_named, provenance, write_json
from ..bench.summary import Comparison, as_called_ms, comparisons, rows_of
from ..check import CheckReport, check
from ..mri import VOLUME, mri_volume, trilinear, trilinear_weight
from ..suites import HOST_FLOP_LIMIT, scaled_down, suite
from ..threads import share

FORMAT = 1  # of report.json
EXAMPLES = 60
QUICKEST = 2  # kernels that the terminal names for each problem


@dataclass(frozen=True)
class RealInput:
    """One kernel's upsampling of the MRI volume: the largest difference inside, over the volume's largest value."""

    kernel: str
    elapsed_ms: float
    difference: float
    passed: bool


def main(
    out: Path | None = None,
    examples: int = EXAMPLES,
    *,
    backend: str | None = None,
    flop_limit: int = HOST_FLOP_LIMIT,
    budget_ms: float | None = None,
    registered: Mapping[str, Kernel] | None = None,
    console: Console | None = None,
) -> int:
    """Check, try on real input, and time every registered kernel; write `report.html` and `report.json`.

    Args:
        out: directory of the two files; None is `report/` in the current directory.
        examples: random problems a kernel is checked on.
        backend: "cuda" or "host"; None takes the GPU where there is one.
        flop_limit: the named problems are scaled down to this many useful FLOP on the host; a GPU runs them whole.
        budget_ms: time for the repeats of one measurement; None is 500 on a GPU and 20 on the host.
        registered: the kernels; None takes the shipped ones.
        console: where the terminal's text goes.

    Returns:
        0, or 1 if a kernel failed its check, its result on the real input, or a result that was timed.

    Raises:
        BackendError: there is no GPU where "cuda" was asked for, or no C++ compiler for the host.
    """
    started = time.perf_counter()
    require("report", "a report", "jinja2", "nibabel")  # before the hour that the rest takes
    console = console or Console()
    where = backend_named(backend)
    bench = Bench(where, budget_ms or (500.0 if where.name == "cuda" else 20.0))
    registered = kernels() if registered is None else registered
    data = {"format": FORMAT} | provenance(bench)
    _print_machine(console, data)
    columns = (TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        checks = _check_all(progress, registered, where, examples)
        volume, upsampled, real = _real_input(progress, registered, bench)
        ceilings = measure_ceilings(bench)
        rows = _time_all(progress, registered, bench, flop_limit, ceilings)
    passed = all(c.passed for c in checks.values()) and all(r.passed for r in real) and not any(r.wrong for r in rows)
    data |= {
        "passed": passed,
        "elapsed_s": round(time.perf_counter() - started, 1),
        "checks": [_check_entry(name, c) for name, c in checks.items()],
        "real_input": {"source": "nibabel " + "/".join(VOLUME), "shape": list(volume.shape), "rows": [asdict(r) for r in real]},
        "ceilings": None if ceilings is None else asdict(ceilings),
        "scaled_down": where.name == "host",
        "flop_limit": flop_limit if where.name == "host" else None,
        "rows": [{**asdict(row), "wrong": row.wrong} for row in rows],
    }
    _print_results(console, data)
    out = Path("report") if out is None else Path(out)
    write_json(out / "report.json", data)
    try:
        write_whole(out / "report.html", html(data, _pictures(checks, rows, ceilings, volume, upsampled)))
    except OSError as error:
        raise BackendError(f"{str(out / 'report.html')!r}: cannot be written: {error}") from None
    verdict = "Passed" if passed else "[bold red]FAILED[/]"
    console.print(f"{verdict} in {data['elapsed_s']:.0f} s. Written: {out / 'report.html'}, {out / 'report.json'}")
    return 0 if passed else 1


def html(data: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """Return the report as one self-contained page; every text in it is escaped, pictures are data URIs."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["ms"] = _ms
    template = environment.from_string(resources.files(__package__).joinpath("report.html.jinja").read_text(encoding="utf-8"))
    return template.render(**data, pictures=pictures, passes=_by_pass(rows_of(data)))


def _by_pass(rows: Sequence[Row]) -> dict[str, list[Comparison]]:
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons(rows):
        groups.setdefault(comparison.pass_name, []).append(comparison)
    return groups


def _upsampling(volume: np.ndarray[Any, Any]) -> Problem:
    d, h, w = volume.shape
    return Problem(1, 1, 1, (d, h, w), (4, 4, 4), (2, 2, 2), (1, 1, 1))


def upsample(bench: Bench, kernel: Kernel, volume: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], RealInput]:
    """Upsample a volume by 2 with a kernel and compare the inside with trilinear interpolation.

    The outermost voxels differ by definition: interpolation repeats the edge, a transposed convolution sees zeros beyond it.
    """
    problem = _upsampling(volume)
    output = bench.xp.full(problem.output_shape, np.nan, np.float32)
    arrays = {"input": bench.xp.asarray(volume[None, None]), "weight": bench.xp.asarray(trilinear_weight()), "output": output}
    times = bench.backend.time(bench.prepared(kernel, problem, "fp32", arrays), 1)
    result = (output if isinstance(output, np.ndarray) else output.get())[0, 0]
    inside = (slice(1, -1),) * 3
    difference = float(np.abs(result[inside] - trilinear(volume)[inside]).max() / np.abs(volume).max())
    # A sum of 8 products of magnitudes that add up to at most the largest value: 8 roundings on each side.
    passed = bool(difference <= 16 * 2.0**-24 and np.isfinite(result).all())
    return result, RealInput(kernel.name, times[0], difference, passed)


def _check_all(progress: Progress, registered: Mapping[str, Kernel], backend: Backend, examples: int) -> dict[str, CheckReport]:
    """Run the quick check of each kernel in the last of its dtypes, on all cores; the longest sources, which take longest, first."""
    reports: dict[str, CheckReport] = {}
    every = progress.add_task("check", total=len(registered))

    def work(left: Iterator[tuple[str, Kernel]]) -> None:
        for name, kernel in left:
            task = progress.add_task(f"check {_plain(name)}", total=None)

            def show(done: int, total: int, _: str, task: TaskID = task) -> None:
                progress.update(task, completed=done, total=total)

            reports[name] = check(kernel, backend=backend.name, examples=examples, dtypes=kernel.dtypes[-1:], progress=show, quick=True)
            progress.remove_task(task)
            progress.advance(every)

    longest_first = sorted(registered.items(), key=lambda item: len(item[1].source), reverse=True)
    share(longest_first, cores() if backend.name == "host" else 1, work)
    progress.remove_task(every)
    return {name: reports[name] for name in registered}


def _real_input(
    progress: Progress, registered: Mapping[str, Kernel], bench: Bench
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None, list[RealInput]]:
    volume = mri_volume()
    problem = _upsampling(volume)
    fprop = [kernel for kernel in registered.values() if kernel.pass_name == "fprop"]
    able = [kernel for kernel in fprop if bench.backend.why_not(kernel, problem, "fp32") is None]
    upsampled, rows = None, []
    for kernel in progress.track(able, description="upsample the MRI volume"):
        result, row = upsample(bench, kernel, volume)
        rows.append(row)
        if row.passed and upsampled is None:
            upsampled = result
    return volume, upsampled, rows


def _time_all(
    progress: Progress, registered: Mapping[str, Kernel], bench: Bench, flop_limit: int, ceilings: Ceilings | None
) -> list[Row]:
    problems = suite("kernelbench") | suite("layers")
    if bench.backend.name == "host":
        problems = {name: scaled_down(problem, flop_limit) for name, problem in problems.items()}
    task = progress.add_task("time", total=len(problems) * len(PASSES))
    rows: list[Row] = []
    for name, problem in problems.items():
        for pass_name in PASSES:
            progress.update(task, description=f"time {_plain(name)} {pass_name}")
            able = [kernel for kernel in registered.values() if kernel.pass_name == pass_name]
            if able:
                rows += compare(bench, name, problem, pass_name, able, "fp32", ceilings)
            progress.advance(task)
    return rows


def _check_entry(name: str, report: CheckReport) -> dict[str, Any]:
    counterexample = None if report.counterexample is None else str(report.counterexample)
    return {
        "kernel": name,
        "passed": report.passed,
        "examples": report.examples,
        "distinct_problems": report.distinct_problems,
        "features": report.features,
        "missing": report.missing,
        "verdict": report.verdict,
        "tried": report.tried,
        "untried": report.untried,
        "worst_ratio": report.worst_ratio,
        "elapsed_s": report.elapsed_s,
        "counterexample": counterexample,
        "reproduce": report.reproduce,
        "text": "" if report.passed else str(report),
    }


def _pictures(
    checks: Mapping[str, CheckReport],
    rows: Sequence[Row],
    ceilings: Ceilings | None,
    volume: np.ndarray[Any, Any],
    upsampled: np.ndarray[Any, Any] | None,
) -> dict[str, str]:
    pictures = {"errors": _data_uri(plots.error_histogram({name: list(c.ratios) for name, c in checks.items()}), "svg")}
    if any(row.median_ms for row in rows):
        pictures["speed"] = _data_uri(plots.speed_bars(rows), "svg")
    if ceilings is not None:
        pictures["roofline"] = _data_uri(plots.roofline(rows, ceilings), "svg")
    if upsampled is not None:
        pictures["volume"] = _data_uri(plots.volume_slices(volume, upsampled), "png")
    return pictures


def _data_uri(figure: Any, kind: str) -> str:
    stream = io.BytesIO()
    figure.savefig(stream, format=kind, dpi=150)
    mime = {"svg": "image/svg+xml", "png": "image/png"}[kind]
    return f"data:{mime};base64,{base64.b64encode(stream.getvalue()).decode()}"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def _print_machine(console: Console, data: Mapping[str, Any]) -> None:
    table = Table("machine", "", title="convt3d report", title_justify="left", show_header=False, box=None)
    for key, value in data["machine"].items():
        table.add_row(key, value)
    table.add_row("rival", data["rival"] or "none (torch is not installed)")
    console.print(table)
    if data["machine"]["backend"] == "host":
        console.print("No GPU in use: the CUDA sources run on the CPU, which shows that they are right, not how quick they are.")


def _print_results(console: Console, data: Mapping[str, Any]) -> None:
    checked = Table(title="Checked", title_justify="left")
    checked.add_column("kernel", no_wrap=True)
    for heading in ("check", "problems", "error / bound", "s", "MRI x2"):
        checked.add_column(heading)
    real = {row["kernel"]: row for row in data["real_input"]["rows"]}
    for entry in data["checks"]:
        row = real.get(entry["kernel"])
        inside = "" if row is None else "equal" if row["passed"] else f"[red]DIFFERS[/] by {row['difference']:.1e}"
        verdict = _plain(entry["verdict"]) if entry["passed"] else "[red]FAILED[/]"
        numbers = (str(entry["distinct_problems"]), f"{entry['worst_ratio']:.3g}", f"{entry['elapsed_s']:.1f}")
        checked.add_row(_plain(entry["kernel"]), verdict, *numbers, inside)
    console.print(checked)
    for entry in data["checks"]:
        if not entry["passed"]:
            console.print(entry["text"], markup=False, highlight=False)
    _print_timings(console, data)


def _print_timings(console: Console, data: Mapping[str, Any]) -> None:
    console.print("Timed: median ms of the quickest kernels, with packing; report.html has all", style="italic")
    if data["scaled_down"]:
        console.print(f"Scaled down to {data['flop_limit'] / 1e6:.3g} MFLOP a problem, host: no GPU numbers.", style="italic")
    for pass_name, own in _by_pass(rows_of(data)).items():
        count = min(QUICKEST, max(len(entry.kernels) for entry in own))
        table = Table("problem", title=f"{pass_name}, fp32", title_justify="left")
        for _ in range(count):
            table.add_column("kernel", overflow="fold")
            table.add_column("ms")
        if data["rival"]:
            table.add_column(data["rival"])
            table.add_column("rival / quickest")
        if data["ceilings"]:
            table.add_column("quickest, of floor")
        for entry in own:
            times = sorted((ms, row.contender) for row in entry.kernels if not row.wrong and (ms := as_called_ms(row)) is not None)
            cells = [cell for ms, name in times[:count] for cell in (_plain(name.removeprefix(f"{pass_name}_")), _ms(ms))]
            cells += ["-"] * (2 * count - len(cells))
            if data["rival"]:
                cells.append(_ms(entry.rival.median_ms) if entry.rival else "-")
                cells.append("-" if (ratio := entry.ratio()) is None else f"{ratio:.2g}x")
            if data["ceilings"]:
                cells.append("-" if entry.best is None else f"{entry.best.share_of_floor:.0%}")
            table.add_row(entry.case, *cells)
        console.print(table)
        for row in (row for entry in own for row in entry.kernels if row.wrong):
            console.print(f"[red]WRONG[/] {_plain(row.contender)} on {row.case}")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
