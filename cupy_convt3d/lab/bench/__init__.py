"""`convt3d bench`: kernels against cuDNN on named problems, every precision and layout in one run, written as JSON."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from ...backends.base import Backend
from ...choice import choose, instance_for
from ...dtypes import allowed_instances
from ...errors import KernelError, ProblemError
from ...kernel import Kernel
from ...problem import LAYOUTS, Problem
from ...registry import kernels as registered
from ..progress import Progress
from ..suites import HOST_FLOP_LIMIT, scaled_down
from . import provenance, summary
from .contest import Contest
from .measure import Bench, Ceilings, Row, measure_ceilings
from .provenance import backend_named, tf32_state, write_json
from .rivals import RIVALS
from .summary import Comparison, comparisons

FORMAT = 1  # of the JSON file
AUTO, ALL = "auto", "all"



@dataclass(frozen=True)
class Selection:
    """What is to be measured: every combination.

    Attributes:
        problems: by name; on the host they are scaled down.
        passes, precisions, layouts: of `problem.PASSES`, `dtypes.DTYPES`, `problem.LAYOUTS`.
        kernels: "auto" (what `algorithm="auto"` takes), "all" (every registered kernel of the pass), or kernels.
        against: rivals, of `rivals.RIVALS`; None: the backend's first.
    """

    problems: Mapping[str, Problem]
    passes: Sequence[str] = ("fprop",)
    precisions: Sequence[str] = ("fp32",)
    layouts: Sequence[str] = LAYOUTS
    kernels: str | Sequence[Kernel] = AUTO
    against: Sequence[str] | None = None


def bench(
    plan: Selection,
    out: Path | None = None,
    *,
    backend: str | None = None,
    budget_ms: float | None = None,
    flop_limit: int = HOST_FLOP_LIMIT,
    console: Console | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure a plan and return its results, the content of the JSON file.

    Args:
        plan: what is measured.
        out: the JSON file. Until the run is complete its results lie beside it, in `FILE.json.partial`, written after each problem: a
            run that is cut off leaves what it has there ("complete": false), and the file as it was.
        backend: "cuda" or "host"; None takes the GPU where there is one.
        budget_ms: time for the repeats of one measurement; None is 100 on a GPU and 20 on the host.
        flop_limit: useful FLOP that a problem is scaled down to on the host.
        console: gets a line for each contest and the table of means.
        progress: called with (contests done, contests in all, what is being measured).

    Raises:
        BackendError: a backend, or a rival, is not there.
        ProblemError: a problem with nothing to time.
    """
    started = time.perf_counter()
    console = console or Console()
    where = backend_named(backend)
    on_host = where.name == "host"
    if empty := [name for name, problem in plan.problems.items() if problem.batch == 0]:
        raise ProblemError(f"batch=0: there is nothing to time in {', '.join(empty)}")
    meter = Bench(where, budget_ms or (20.0 if on_host else 100.0), against=plan.against)
    data: dict[str, Any] = {"format": FORMAT, "kind": "bench"} | provenance.provenance(meter)
    data["tf32"] = {precision: tf32_state(meter, precision) for precision in plan.precisions}
    ceilings = measure_ceilings(meter, plan.precisions)
    data |= {
        "ceilings": None if ceilings is None else asdict(ceilings),
        "scaled_down": on_host,
        "flop_limit": flop_limit if on_host else None,
        "budget_ms": meter.budget_ms,
        "against": [RIVALS[where.name][name] for name in meter.against],
        "kernels": plan.kernels if isinstance(plan.kernels, str) else [kernel.name for kernel in plan.kernels],
        "complete": False,
        "rows": [],
        "summary": [],
        "wrong": 0,
        "elapsed_s": 0.0,
    }
    _print_head(console, data)
    rows: list[Row] = []
    work = [
        (precision, pass_name, case, layout)
        for precision in plan.precisions
        for pass_name in plan.passes
        for case in plan.problems
        for layout in plan.layouts
    ]
    problems = {name: scaled_down(p, flop_limit) if on_host else p for name, p in plan.problems.items()}
    built = ""
    for number, (precision, pass_name, case, layout) in enumerate(work):
        if precision != built:
            built = precision
            _build(meter, plan, problems, precision, progress, number, len(work))
        if progress is not None:
            progress(number, len(work), f"{case} {pass_name} {precision} {layout}")
        new = _measure(meter, plan, case, problems[case], pass_name, precision, layout, ceilings)
        rows += new
        for comparison in comparisons(new):
            console.print(_line(comparison), markup=False, highlight=False, soft_wrap=True)
        _release(meter)
        if number == len(work) - 1 or layout == plan.layouts[-1]:
            data |= {
                "rows": [row.recorded for row in rows],
                "summary": summary.summary(rows),
                "wrong": sum(row.wrong for row in rows if not row.is_rival),
                "elapsed_s": round(time.perf_counter() - started, 1),
                "complete": number == len(work) - 1,
            }
            if out is not None:
                partial = out.with_name(f"{out.name}.partial")
                write_json(out if data["complete"] else partial, data)
                if data["complete"]:
                    partial.unlink(missing_ok=True)
    _print_means(console, data)
    return data


def _build(
    meter: Bench, plan: Selection, problems: Mapping[str, Problem], precision: str, progress: Progress | None, done: int, total: int
) -> None:
    """Compile on all cores what the contests of one precision will load."""
    contenders = []
    for pass_name, layout, problem in itertools.product(plan.passes, plan.layouts, problems.values()):
        with suppress(KernelError):
            found = _contenders(plan.kernels, problem, pass_name, precision, layout, meter.backend)
            contenders += [(kernel, problem, instance, layout) for kernel, instance in found]
    if progress is not None:
        progress(done, total, f"compiling for {precision}")
    meter.build(contenders)


def _measure(
    meter: Bench,
    plan: Selection,
    case: str,
    problem: Problem,
    pass_name: str,
    precision: str,
    layout: str,
    ceilings: Ceilings | None,
) -> list[Row]:
    contest = Contest(meter, case, problem, pass_name, precision, ceilings, layout)
    rows = [contest.rival(name) for name in meter.against]
    try:
        contenders = _contenders(plan.kernels, problem, pass_name, precision, layout, meter.backend)
    except KernelError as error:  # "auto" has nothing for it
        return [*rows, replace(rows[0], contender=AUTO, is_rival=False, note=str(error))] if rows else rows
    return rows + [contest.kernel(kernel, instance) for kernel, instance in contenders]


def _contenders(
    wanted: str | Sequence[Kernel], problem: Problem, pass_name: str, precision: str, layout: str, backend: Backend
) -> list[tuple[Kernel, str]]:
    """Return kernels and the dtypes they are compiled for; the loosest that is allowed where a kernel cannot do the problem."""
    if wanted == AUTO:
        found = []
        for packed in (False, True):  # what it takes by default, packing in the time, and for a frozen weight
            taken = choose(backend, pass_name, problem, precision, layout, packed=packed)
            assert taken.kernel is not None
            found.append((taken.kernel, taken.instance))
        return list(dict.fromkeys(found))
    kernels = registered(pass_name).values() if isinstance(wanted, str) else wanted
    allowed = allowed_instances(precision)
    own = [kernel for kernel in kernels if kernel.pass_name == pass_name and set(allowed) & set(kernel.dtypes)]
    first = {kernel.name: next(i for i in allowed if i in kernel.dtypes) for kernel in own}
    return [(kernel, instance_for(kernel, problem, precision, backend)[0] or first[kernel.name]) for kernel in own]


def _release(meter: Bench) -> None:
    """Give back the memory that CuPy and torch keep for themselves: the next tensors are of other sizes."""
    if meter.backend.name == "cuda":
        meter.xp.get_default_memory_pool().free_all_blocks()
        if meter.torch is not None:
            meter.torch.cuda.empty_cache()


def _print_head(console: Console, data: Mapping[str, Any]) -> None:
    machine = data["machine"]
    console.print(f"{machine['device']}, {machine['backend']}; against {', '.join(data['against']) or 'nobody'}", markup=False)
    if data["scaled_down"]:
        console.print(f"Problems scaled down to {data['flop_limit'] / 1e6:.3g} MFLOP: these times say nothing of a GPU.")
    else:
        rates = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in data["ceilings"]["gemm_flop_per_s"].items())
        console.print(f"copy {data['ceilings']['copy_bytes_per_s'] / 1e12:.2f} TB/s; GEMM TFLOP/s: {rates}", highlight=False)


def _line(c: Comparison) -> str:
    head = f"{c.case} {c.pass_name} {c.dtype} {c.layout}: "
    rival = "-" if c.rival is None else f"{c.rival.contender} {_ms(c.rival.median_ms)}"
    if c.rival is not None and c.rival.note:
        rival += f" ({c.rival.note})"
    row = c.best
    if row is None:
        reasons = [f"{k.contender}: {'WRONG' if k.wrong else k.note}" for k in c.kernels]
        return f"{head}{'; '.join(reasons) or 'no kernel'}; {rival}"
    ratio = "" if c.ratio() is None else f" = {c.ratio():.2f}x"
    elapsed_ms, other = c.milliseconds(), c.best_frozen
    share = "" if row.floor_ms is None or elapsed_ms is None else f", {row.floor_ms / elapsed_ms:.0%} of floor"
    by = "" if other is None or other.contender == row.contender else f" by {other.contender}"
    frozen = "" if not row.pack_ms else f" ({_ms(c.milliseconds(frozen=True))} frozen{by})"
    wrong = "".join(f"; {k.contender} is WRONG" for k in c.kernels if k.wrong)
    return f"{head}{row.contender}[{row.instance}] {_ms(elapsed_ms)} ms{frozen}, {rival}{ratio}{share}, error {row.error:.1e}{wrong}"


def _print_means(console: Console, data: Mapping[str, Any]) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def cell(entry: Mapping[str, Any], name: str, form: str) -> str:
        return "-" if entry[name] is None else f"{form.format(entry[name])} ({entry[name + '_layers']})"

    say("\nGeometric means of rival / kernel; in brackets over how many layers")
    columns = "{:7} {:5} {:14} {:17} {:12} {:13} {:14} {:14}"
    heads = ("dtype", "pass", "layout", "layers", "packing", "same layout", "better layout", "share of floor")
    say(columns.format(*heads).rstrip())
    for entry in data["summary"]:
        layers = f"{entry['layers']} ({entry['count']} of {entry['expected']})"
        packing = "frozen" if entry["frozen"] else "in the time"
        ratios = [cell(entry, "against_rival", "{:.2f}x"), cell(entry, "against_better_layout", "{:.2f}x")]
        share = cell(entry, "share_of_floor", "{:.0%}")
        say(columns.format(entry["dtype"], entry["pass_name"], entry["layout"], layers, packing, *ratios, share).rstrip())
    for entry in data["summary"]:
        if entry["layers"] == "all" and not entry["frozen"] and entry["slower"] and not data["scaled_down"]:
            slower = ", ".join(f"{case} {ratio:.2f}x" for case, ratio in entry["slower"].items())
            say(f"slower than the rival: {entry['dtype']} {entry['pass_name']} {entry['layout']}: {slower}")
    say(f"{len(data['rows'])} rows in {data['elapsed_s']:.0f} s")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.4f}"
