"""The cell magic `%%convt3d`: a notebook cell is compiled as a kernel, checked in a child process, timed, and registered."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from . import registry
from .backends.host import HostBackend
from .backends.nvrtc import compile_parts, log_attributes
from .errors import BackendError, CompileError, KernelError, LaunchError, ProblemError
from .kernel import CONTIGUOUS, Kernel
from .lab.bench.contest import compare
from .lab.bench.measure import Bench, Ceilings, Row, measure_ceilings
from .lab.bench.rivals import RIVALS
from .lab.check import check, default_backend
from .lab.run.worker import Worker
from .lab.suites import HOST_FLOP_LIMIT, named_problem, scaled_down, suite
from .problem import Problem
from .source import Instance

EXAMPLES = 100  # drawn at random, after the smallest problem of each named class
EXAMPLE_LIMIT_S = 3.0  # a longer one counts as a hang
DRY_RUN_LIMIT_S = 60.0
HOST_BUDGET_MS, CUDA_BUDGET_MS = 100.0, 500.0
OFFLINE_ARCHITECTURE = "sm_90a"  # what registers are told for where there is no GPU but NVRTC


@dataclass(frozen=True)
class Figures:
    """What two runs of a name are compared by; None where it could not be had. Times only of the same `timed_on`."""

    timed_on: str
    error_over_bound: float
    median_ms: float | None = None
    share_of_floor: float | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None


# Field of Figures: (what it is called, how it is written).
_SHOWN = {
    "error_over_bound": ("worst error / bound", "{:.3f}"),
    "median_ms": ("median ms", "{:.4g}"),
    "share_of_floor": ("share of the floor", "{:.1%}"),
    "registers": ("registers a thread", "{:d}"),
    "spill_bytes": ("spilled bytes a thread", "{:d}"),
    "shared_bytes": ("shared bytes a block", "{:d}"),
}


@dataclass(frozen=True)
class _Cell:
    """One run of the magic: the kernel, where it runs, and what it is timed on and against."""

    kernel: Kernel
    backend: str
    case: str
    problem: Problem
    kernels: tuple[Kernel, ...]
    rivals: tuple[str, ...]

    @property
    def dtype(self) -> str:
        return "fp32" if "fp32" in self.kernel.dtypes else self.kernel.dtypes[0]

    @property
    def timed_on(self) -> str:
        name = self.case if self.case == str(self.problem) else f"{self.case} = {self.problem}"
        return f"{name}, {self.dtype}, {self.backend}"


@magics_class
class Convt3dMagics(Magics):
    """Holds what lasts from cell to cell: backends with their ceilings, and each name's last figures."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self._variables: dict[str, Any] = shell.user_ns
        self._last: dict[str, Figures] = {}
        self._benches: dict[tuple[str, tuple[str, ...]], Bench] = {}
        self._ceilings: dict[str, Ceilings] = {}

    @magic_arguments()
    @argument("name", help="of the kernel: a Python name; the notebook gets a variable of that name, a Kernel")
    @argument("--case", default="kb61", help="what it is timed on: a named problem or one such as n1_c8to4_i8_k3_s2 (default kb61)")
    @argument("--against", default="cudnn", help="what it is timed against, by commas: cudnn (torch's operator), torch, registered kernels")
    @argument("--backend", choices=("cuda", "host"), help="default: cuda where there is a GPU")
    @argument("--replace", action="store_true", help="take the place of the registered kernel of that name")
    @cell_magic
    def convt3d(self, line: str, cell: str) -> None:
        """Compile the cell as a kernel, check it, time it, and register it if it passed.

        The cell is a `.cu` file: a declaration `/* convt3d ... */`, then CUDA. Compiler errors name the cell's own lines, the magic's
        line being the first. The check runs in a child process; a kernel that crashes or hangs there is reported and goes no further.
        """
        options = parse_argstring(self.convt3d, line)
        self._refuse_name(options.name, options.replace)
        try:
            backend = options.backend or default_backend()
            kernel = Kernel.from_source("\n" + cell, options.name)  # the magic's own line is the cell's line 1
            run = _Cell(kernel, backend, options.case, _case(options.case, backend), *_rivals(options.against, kernel, backend))
            self._variables[options.name] = kernel
            passed = self._run(run)
        except (KernelError, CompileError, BackendError, LaunchError) as error:
            print(error, file=sys.stderr)
            passed = False
        if passed:
            registry.register(kernel, replace=True)
            print(f"Registered: {kernel.name} ({kernel.pass_name}; {', '.join(kernel.dtypes)}).")
        elif options.name in registry.kernels():
            print(f"Not registered; {options.name!r} stays what it was.", file=sys.stderr)
        else:
            print("Not registered.", file=sys.stderr)

    def _refuse_name(self, name: str, replace: bool) -> None:
        if not name.isidentifier():
            raise UsageError(f"name {name!r}: must be a Python name")
        if name in registry.kernels() and not replace:
            raise UsageError(f"kernel {name!r} is registered already; --replace takes its place")
        if name in self._variables and not isinstance(self._variables[name], Kernel):
            raise UsageError(f"name {name!r}: is a variable of this notebook; choose another")

    def _run(self, cell: _Cell) -> bool:
        """Check and time; print as it goes. Return whether the kernel may be registered."""
        report = check(cell.kernel, backend=cell.backend, examples=EXAMPLES, time_limit_s=EXAMPLE_LIMIT_S)
        found = report.counterexample
        if found is not None:
            report.reproduce = (
                f"ct.check({cell.kernel.name}, backend={cell.backend!r}, problem=ct.Problem.parse({str(found.problem)!r}), "
                f"dtypes=[{found.dtype!r}], kinds=[{found.kind!r}], seed={found.seed})"
            )
        print(report, flush=True)
        if not report.passed:
            return False
        figures = Figures(cell.timed_on, report.worst_ratio)
        refusal = self._bench(cell).backend.why_not(cell.kernel, cell.problem, cell.dtype)
        if refusal is not None:
            print(f"Not timed on {cell.timed_on}: {refusal}")
        else:
            row = self._time(cell)
            if row is None:
                return False
            figures = replace(figures, median_ms=row.median_ms, share_of_floor=row.share_of_floor, **self._resources(cell))  # type: ignore[arg-type]
        for text in compared(figures, self._last.get(cell.kernel.name)):
            print(text)
        self._last[cell.kernel.name] = figures
        return True

    def _time(self, cell: _Cell) -> Row | None:
        """Return the kernel's own row, None if it failed or was wrong on live arrays."""
        with Worker(cell.kernel, cell.backend, time_limit_s=DRY_RUN_LIMIT_S) as worker:
            outcome = worker.dry_run(cell.problem, cell.dtype)
        if not outcome.ok:
            print(f"{cell.kernel.name} passed on small problems, but on {cell.timed_on}: {outcome.message}", file=sys.stderr)
            return None
        bench = self._bench(cell)
        if cell.backend == "cuda" and cell.dtype not in self._ceilings:
            self._ceilings[cell.dtype] = measure_ceilings(bench, (cell.dtype,))  # type: ignore[assignment]
        ceilings = self._ceilings.get(cell.dtype) if cell.backend == "cuda" else None
        contenders = [cell.kernel, *cell.kernels]
        rows = compare(bench, cell.case, cell.problem, cell.kernel.pass_name, contenders, cell.dtype, ceilings)
        own = next(row for row in rows if not row.is_rival)
        print(f"Timed on {cell.timed_on}, {cell.problem.flop / 1e6:.3g} MFLOP" + "; says nothing of a GPU" * (cell.backend == "host"))
        width = max(len(row.contender) for row in rows)
        for row in [own, *(row for row in rows if row is not own)]:
            print(f"  {row.contender:{width}}  {_time_cell(row, own)}")
        return None if own.median_ms is None or own.wrong else own

    def _bench(self, cell: _Cell) -> Bench:
        key = (cell.backend, cell.rivals)
        if key not in self._benches:
            if cell.backend == "host":
                self._benches[key] = Bench(HostBackend(), HOST_BUDGET_MS, against=cell.rivals)
            else:
                from .backends.cuda import CudaBackend

                self._benches[key] = Bench(CudaBackend(), CUDA_BUDGET_MS, against=cell.rivals)
        return self._benches[key]

    def _resources(self, cell: _Cell) -> dict[str, int]:
        """Return registers, spills and shared memory, the most of all launches; nothing where there is no NVRTC."""
        backend = self._bench(cell).backend
        plan = cell.kernel.plan(cell.problem, cell.dtype, backend.multiprocessors, CONTIGUOUS)
        try:
            if cell.backend == "cuda":
                module = backend.compile(backend.instance(cell.kernel, cell.dtype, plan))
                each = {launch.symbol: dict(module.attributes(launch.symbol)) for launch in plan.launches}
            else:
                arch = OFFLINE_ARCHITECTURE if cell.kernel.why_not_on(OFFLINE_ARCHITECTURE) is None else cell.kernel.architectures[0]
                parts = compile_parts(Instance.of_plan(cell.kernel, cell.dtype, plan), arch)
                log = {symbol: found for *_, said in parts for symbol, found in log_attributes(said).items()}
                each = {launch.symbol: dict(log[launch.symbol]) for launch in plan.launches}
        except BackendError:
            return {}
        except CompileError as error:
            print(f"It runs on the host, but not on a GPU:\n{error}", file=sys.stderr)
            return {}
        for launch in plan.launches:
            each[launch.symbol]["shared_bytes"] += launch.shared_bytes
        names = ("registers", "spill_bytes", "shared_bytes")
        return {name: max((numbers.get(name, 0) for numbers in each.values()), default=0) for name in names}


def compared(now: Figures, before: Figures | None) -> Iterator[str]:
    """Yield the lines of the table of figures; beside each the last run's, where there was one."""
    comparable = before is not None and before.timed_on == now.timed_on
    yield f"  {'':24}{'now':>12}" + (f"{'last run':>12}{'change':>10}" if before is not None else "")
    for field, (label, form) in _SHOWN.items():
        value, old = getattr(now, field), getattr(before, field, None)
        if field in ("median_ms", "share_of_floor") and not comparable:
            old = None
        text = f"  {label:24}{'-' if value is None else form.format(value):>12}"
        if before is not None:
            text += f"{'-' if old is None else form.format(old):>12}{_change(value, old):>10}"
        yield text
    if before is not None and not comparable:
        yield f"  (the last run was timed on {before.timed_on})"


def _change(value: float | None, old: float | None) -> str:
    if value is None or old is None:
        return ""
    if value == old:
        return "same"
    return f"{value / old - 1:+.0%}" if old else "new"


def _time_cell(row: Row, own: Row) -> str:
    if row.median_ms is None:
        return row.note
    text = f"{row.median_ms:10.4g} ms  ({row.low_ms:.4g} to {row.high_ms:.4g}, {row.repeats} calls)"
    if row is not own and own.median_ms:
        text += f"  {row.median_ms / own.median_ms:.3g}x the time of {own.contender}"
    return text + "  WRONG on live arrays" * row.wrong


def _case(name: str, backend: str) -> Problem:
    """Return the problem of a suite's name or of a problem's own; on the host scaled down to what one core does in an instant."""
    try:
        problem = named_problem(name)
    except ProblemError as error:
        raise UsageError(f"--case {name}: none of {', '.join(suite('named') | suite('few_channels'))}, nor a problem ({error})") from None
    return scaled_down(problem, HOST_FLOP_LIMIT) if backend == "host" else problem


def _rivals(against: str, kernel: Kernel, backend: str) -> tuple[tuple[Kernel, ...], tuple[str, ...]]:
    """Return the registered kernels that are named, and the others as `Bench` names them; "cudnn" is torch on the host."""
    names = [name for name in against.split(",") if name]
    known = registry.kernels(kernel.pass_name)
    for name in names:
        if name not in RIVALS["cuda"] and name not in known:
            others = ", ".join(known)
            raise UsageError(f"--against {name}: must be cudnn, torch or a registered {kernel.pass_name} kernel ({others})")
    rivals = [name if name in RIVALS[backend] else "torch" for name in names if name in RIVALS["cuda"]]
    return tuple(known[name] for name in names if name in known), tuple(dict.fromkeys(rivals))
