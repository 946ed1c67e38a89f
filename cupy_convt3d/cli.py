"""The command line: `convt3d check`, `convt3d info`, `convt3d report`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from . import registry
from .dtypes import DTYPES
from .errors import BackendError, KernelError, ProblemError
from .problem import Problem

if TYPE_CHECKING:
    from .lab.check import Progress

_PASSED, _FAILED, _USAGE = 0, 1, 2  # exit codes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 if a kernel failed, 2 if the command itself could not be done."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (KernelError, BackendError, ProblemError, FileNotFoundError) as error:
        print(f"convt3d: error: {error}", file=sys.stderr)
        return _USAGE
    except BrokenPipeError:  # whoever read the output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PASSED
    except KeyboardInterrupt:
        print("convt3d: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="convt3d", description="Raw CUDA kernels for 3D transposed convolution.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser("check", help="check kernels against the NumPy reference on drawn problems")
    check.add_argument("kernels", nargs="*", metavar="NAME|FILE.cu", help="registered kernels or files; none: all registered")
    check.add_argument("--backend", choices=("cuda", "host"), help="default: cuda where there is a GPU")
    check.add_argument("--examples", type=_count, default=200, help="examples drawn at random for each kernel (default 200)")
    check.add_argument("--dtype", action="append", choices=tuple(DTYPES), help="may be repeated; default: all of the kernel's")
    check.add_argument("--seed", type=_count, default=0, help="of the search, or of the one example of --problem (default 0)")
    check.add_argument("--sanitize", choices=("address", "undefined", "thread"), help="host backend only")
    check.add_argument("--problem", type=_problem, metavar="NAME", help="check this one only, such as n1_c1to2_i3_k3_s2")
    check.add_argument("--kind", action="append", choices=("exact", "exact_wide", "random"), help="default: all")
    check.add_argument("--in-process", action="store_true", help="no child process, for compute-sanitizer, ncu or a debugger")
    check.set_defaults(command=_check)

    info = commands.add_parser("info", help="versions, devices, cache directory, registered kernels")
    info.add_argument("--why", type=_problem, metavar="PROBLEM", help="say for each kernel whether it can do this problem")
    info.set_defaults(command=_info)

    report = commands.add_parser("report", help="check, run and time every kernel, and write a report")
    report.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="where to write it (default: report)")
    report.set_defaults(command=_report)
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0")
    return number


def _problem(text: str) -> Problem:
    try:
        return Problem.parse(text)
    except ProblemError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check(options: argparse.Namespace) -> int:
    from .lab.check import check, default_backend, resolve  # imports Hypothesis

    kernels = [resolve(name) for name in options.kernels or registry.kernels()]
    backend = options.backend or ("host" if options.sanitize else default_backend())
    failed = []
    for kernel in kernels:
        if options.dtype and not options.kernels and not set(options.dtype) & set(kernel.dtypes):
            continue  # of all the registered kernels, those that have the type
        with _progress_bar() as progress:
            report = check(
                kernel,
                backend=backend,
                examples=options.examples,
                dtypes=options.dtype,
                seed=options.seed,
                sanitize=options.sanitize,
                progress=progress,
                problem=options.problem,
                kinds=options.kind,
                in_process=options.in_process,
            )
        # plain print: rich would read [brackets] in a kernel's name or message as markup, and wrap the line to be pasted
        print(report, flush=True)
        failed += [] if report.passed or _is_refused(options, report.skipped) else [kernel.name]
    if len(kernels) > 1:
        print(f"{len(kernels) - len(failed)} of {len(kernels)} kernels passed{'; failed: ' * bool(failed)}{', '.join(failed)}")
    return _FAILED if failed else _PASSED


def _is_refused(options: argparse.Namespace, skipped: dict[str, int]) -> bool:
    """Whether one problem was given for all kernels, and this kernel cannot do it."""
    return options.problem is not None and not options.kernels and bool(skipped)


@contextmanager
def _progress_bar() -> Iterator[Progress | None]:
    """Yield what `check` calls with its progress; nothing is shown where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling", total=None)
        yield lambda done, total, text: bar.update(task, completed=done, total=total, description=escape(text))


def _info(options: argparse.Namespace) -> int:
    for name, value in _facts():
        print(f"{name + ':':12s} {value}")
    print("kernels:")
    for name, kernel in registry.kernels().items():
        determinism = "deterministic" if kernel.deterministic else "not deterministic"
        print(f"  {name:16s} {kernel.pass_name}  {', '.join(kernel.dtypes)}  {determinism}")
        if options.why is not None:
            for dtype in kernel.dtypes:
                print(f"    {options.why} {dtype}: {kernel.why_not(options.why, dtype) or 'yes'}")
    return _PASSED


def _facts() -> Iterator[tuple[str, str]]:
    from . import cache
    from .backends.cuda import CudaBackend, available
    from .backends.host import HostBackend

    for label, names in (
        ("convt3d", ("cupy-convt3d", "cupy_convt3d")),
        ("numpy", ("numpy",)),
        ("cupy", ("cupy-cuda12x", "cupy-cuda13x", "cupy")),
        ("torch", ("torch",)),
    ):
        yield label, _version(names)
    yield "python", sys.version.split()[0]
    yield "GPU", CudaBackend().capabilities().get("device", "unknown") if available() else "none"
    try:
        host = HostBackend().capabilities()
        yield "CPU", f"{host['device']}, {host['cores']} cores"
        yield "compiler", host["compiler"]
    except BackendError as error:
        yield "compiler", f"none: {error}"
    yield "cache", str(cache.cache_directory())


def _version(names: Sequence[str]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _report(options: argparse.Namespace) -> int:
    from .lab import report  # plots, torch, the MRI volume

    return int(report.main(options.out))
