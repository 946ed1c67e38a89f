"""The command line: `convt3d check`, `fuzz`, `mutants`, `info`, `report`, `bench`, `tune`, `kernelbench`."""

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
from .errors import BackendError, FindingsError, KernelError, ProblemError
from .kernel import Kernel
from .problem import PASSES, Problem

if TYPE_CHECKING:
    from .lab.check import Progress

_PASSED, _FAILED, _USAGE = 0, 1, 2  # exit codes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 if a kernel failed, 2 if the command itself could not be done."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (KernelError, BackendError, ProblemError, FindingsError, FileNotFoundError) as error:
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
    check.add_argument("--kind", action="append", choices=("exact", "exact_wide", "random", "nan", "far"), help="default: all but nan")
    check.add_argument("--tunable", action="append", type=_tunable, metavar="NAME=VALUE", help="in place of the source's default")
    check.add_argument("--in-process", action="store_true", help="no child process, for compute-sanitizer, ncu or a debugger")
    check.set_defaults(command=_check)

    fuzz = commands.add_parser("fuzz", help="run random examples without end, in child processes, and keep what fails in a file")
    fuzz.add_argument("kernels", nargs="*", metavar="NAME|FILE.cu", help="registered kernels or files; none: all registered")
    fuzz.add_argument("--backend", choices=("cuda", "host"), help="default: cuda where there is a GPU")
    fuzz.add_argument("--minutes", type=_positive, help="stop after so long; default: at Ctrl-C")
    fuzz.add_argument("--examples", type=_count, help="stop after so many")
    fuzz.add_argument("--workers", type=_positive_count, help="child processes; default: one to a core, one on a GPU")
    fuzz.add_argument("--sanitize", choices=("address", "undefined", "thread"), help="host backend only")
    fuzz.add_argument(
        "--findings", type=Path, default=Path("findings.jsonl"), metavar="FILE", help="go on with this file (default findings.jsonl)"
    )
    fuzz.add_argument("--replay", action="store_true", help="run what the file holds once more, and stop")
    fuzz.set_defaults(command=_fuzz)

    mutants = commands.add_parser("mutants", help="change one thing at a time in kernels, and see whether the check notices")
    mutants.add_argument("kernels", nargs="*", metavar="NAME|FILE.cu", help="registered kernels or files; none: all registered")
    mutants.add_argument("--workers", type=_positive_count, help="child processes; default: one to a core")
    mutants.add_argument("--sample", type=_positive_count, metavar="N", help="about so many of each kernel, spread over the file")
    mutants.add_argument("--explained", type=Path, metavar="FILE", help="why some mutants need not be killed (TOML)")
    mutants.add_argument("--kept", type=Path, metavar="FILE.jsonl", help="keep verdicts here, and judge only what is new")
    mutants.add_argument("--kept-only", action="store_true", help="judge nothing: report what --kept has")
    mutants.add_argument("--page", type=Path, metavar="FILE", help="write the results to this file, in Markdown")
    mutants.set_defaults(command=_mutants)

    info = commands.add_parser("info", help="versions, devices, cache directory, registered kernels")
    info.add_argument("--why", type=_problem, metavar="PROBLEM", help="say for each kernel whether it can do this problem")
    info.set_defaults(command=_info)

    report = commands.add_parser("report", help="check, run and time every kernel, and write a report")
    report.add_argument("--out", type=Path, default=Path("report"), metavar="DIR", help="where to write it (default: report)")
    report.set_defaults(command=_report)

    bench = commands.add_parser("bench", help="time kernels against cuDNN on named problems, and write JSON")
    _add_measured(bench)
    bench.add_argument("--against", type=_names, metavar="RIVAL,...", help="cudnn, torch (its own CUDA kernels); '': none")
    bench.add_argument("--out", type=Path, metavar="FILE.json", help="where to write the results; rewritten after each problem")
    bench.set_defaults(command=_bench)

    tune = commands.add_parser("tune", help="search kernels' configurations, and keep the best for algorithm='auto'")
    _add_measured(tune)
    tune.add_argument("--again", action="store_true", help="search what the database has, too")
    tune.add_argument(
        "--known-only",
        action="store_true",
        help="time the defaults and what is known of other devices and layouts, search nothing (--again searches later)",
    )
    tune.add_argument("--out", type=Path, metavar="FILE.json", help="the database (default: your own, where 'auto' looks)")
    tune.set_defaults(command=_tune)

    kernelbench = commands.add_parser("kernelbench", help="check and time KernelBench-style files: ModelNew against Model")
    kernelbench.add_argument("files", nargs="+", type=Path, metavar="FILE", help="with Model, ModelNew, get_inputs, get_init_inputs")
    kernelbench.add_argument("--fuzz", type=_count, nargs="?", const=200, default=0, metavar="N", help="draw N other problems (200)")
    kernelbench.add_argument("--seed", type=_count, default=0, help="of the fresh inputs and the draws (default 0)")
    kernelbench.add_argument("--time-limit", type=float, default=600.0, metavar="S", help="seconds for each file (default 600)")
    kernelbench.set_defaults(command=_kernelbench)
    return parser


def _add_measured(parser: argparse.ArgumentParser) -> None:
    """Add what is measured: comma-separated lists, every combination of them."""
    tuning = parser.prog.endswith("tune")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--suite", type=_names, default=["named"], metavar="NAME,...", help="default: named, which has all but few_channels")
    what.add_argument("--problem", type=_names, metavar="NAME,...", help="one of the suites, or such as n1_c1to2_i3_k3_s2")
    parser.add_argument("--pass", type=_names, dest="passes", default=["fprop"], metavar="PASS,...", help="default: fprop")
    parser.add_argument("--precision", type=_names, default=["fp32"], metavar="NAME,...", help=f"of {', '.join(DTYPES)}; ieee is fp32")
    parser.add_argument("--layout", type=_names, default=["ncdhw"] if tuning else None, metavar="NAME,...", help="ncdhw, channels_last")
    every, text = ("all", "default: all") if tuning else ("auto", "or all; default: auto, what algorithm='auto' takes")
    parser.add_argument("--kernels", type=_names, default=[every], metavar="NAME|FILE.cu,...", help=text)
    parser.add_argument("--backend", choices=("cuda", "host"), help="default: cuda where there is a GPU")


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in text.split(",") if name))


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0")
    return number


def _tunable(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not value.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=VALUE with a whole number")
    return name, int(value)


def _positive_count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return number


def _positive(text: str) -> float:
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}: must be above 0")
    return number


def _problem(text: str) -> Problem:
    try:
        return Problem.parse(text)
    except ProblemError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check(options: argparse.Namespace) -> int:
    from .lab.check import check, default_backend, resolve  # imports Hypothesis

    tunables = dict(options.tunable or ())
    kernels = [resolve(name).replace_tunables(**tunables) for name in options.kernels or registry.kernels()]
    backend = options.backend or ("host" if options.sanitize else default_backend())
    failed = []
    for kernel in kernels:
        if options.dtype and not options.kernels and not set(options.dtype) & set(kernel.dtypes):
            continue  # of all the registered kernels, those that have the type
        with progress_bar() as progress:
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
def progress_bar() -> Iterator[Progress | None]:
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


def _fuzz(options: argparse.Namespace) -> int:
    from .lab import fuzz_command  # imports Hypothesis

    return int(fuzz_command.main(options))


def _mutants(options: argparse.Namespace) -> int:
    from .lab import mutants_command  # imports Hypothesis

    return int(mutants_command.main(options))


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
    if options.why is not None:
        for line in _why_auto(options.why):
            print(line)
    return _PASSED


def _why_auto(problem: Problem) -> Iterator[str]:
    """Yield what "auto" takes in each pass and precision where kernels would run here, and under it how that was found."""
    from .choice import choose
    from .lab.measure import LAYOUTS
    from .lab.provenance import backend_named

    backend = backend_named(None)
    yield f'algorithm="auto" on {backend.device_name} ({backend.arch or backend.name}):'
    for pass_name in PASSES:
        for precision in DTYPES:
            answers = {}
            for layout in LAYOUTS:
                try:
                    taken = choose(backend, pass_name, problem, precision, layout)
                except KernelError as error:
                    answers[layout] = [f"no kernel: {error}"]
                else:
                    assert taken.kernel is not None
                    answers[layout] = [f"{taken.kernel.name} [{taken.instance}]", *taken.steps]
                    if reason := taken.left_to_torch:
                        answers[layout].append(f'torch\'s CUDA tensors, unless backend="cuda": torch\'s own operator, {reason}')
            if len(set(map(tuple, answers.values()))) == 1:
                answers = {"": answers["ncdhw"]}
            for layout, (found, *steps) in answers.items():
                yield f"  {pass_name} {precision}{layout and ' '}{layout}: {found}"
                yield from (f"    {step}" for step in steps)


def _facts() -> Iterator[tuple[str, str]]:
    from . import cache, tuning
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
    for path in (tuning.SHIPPED, tuning.user_path()):
        entries = tuning.Database.load(path).entries()
        yield "tuning", f"{len(entries)} entries in {path}, {tuning.stale(entries)} of them of code that has changed"


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


def _bench(options: argparse.Namespace) -> int:
    from .lab.bench import Plan, bench
    from .lab.measure import LAYOUTS

    problems, kernels = _measured(options)
    layouts = options.layout or list(LAYOUTS)
    plan = Plan(problems, options.passes, options.precision, layouts, kernels, options.against)
    with progress_bar() as progress:
        data = bench(plan, options.out, backend=options.backend, progress=progress)
    if options.out is not None:
        print(f"Written: {options.out}")
    return _FAILED if data["wrong"] else _PASSED


def _tune(options: argparse.Namespace) -> int:
    from .lab.measure import Bench
    from .lab.provenance import backend_named
    from .lab.tune import tune
    from .tuning import user_path

    problems, wanted = _measured(options)
    if wanted == "auto":
        raise KernelError("--kernels auto: is what tuning decides; name kernels, or all")
    kernels = registry.kernels() if isinstance(wanted, str) else {kernel.name: kernel for kernel in wanted}
    path = options.out or user_path()
    meter = Bench(backend_named(options.backend), budget_ms=50.0)
    with progress_bar() as progress:
        tune(
            meter,
            problems,
            kernels,
            path,
            passes=options.passes,
            precisions=options.precision,
            layouts=options.layout,
            again=options.again,
            known_only=options.known_only,
            progress=progress,
        )
    print(f"Written: {path}")
    return _PASSED


def _measured(options: argparse.Namespace) -> tuple[dict[str, Problem], str | list[Kernel]]:
    """Return the problems and kernels that are meant, and leave only known names in the other lists.

    Raises:
        ProblemError, KernelError: a name is unknown; the message lists those there are.
    """
    from .lab.check import resolve
    from .lab.measure import LAYOUTS
    from .lab.suites import named_problem, suite

    options.precision = list(dict.fromkeys("fp32" if name == "ieee" else name for name in options.precision))
    for option, given, known in (
        ("pass", options.passes, PASSES),
        ("precision", options.precision, tuple(DTYPES)),
        ("layout", options.layout or LAYOUTS, LAYOUTS),
    ):
        if not given:
            raise ProblemError(f"--{option}: names none; must be of {', '.join(known)}")
        if unknown := [name for name in given if name not in known]:
            raise ProblemError(f"--{option} {unknown[0]}: must be of {', '.join(known)}")
    if options.problem:
        problems = {name: named_problem(name) for name in options.problem}
    else:
        problems = {key: problem for name in options.suite for key, problem in suite(name).items()}
    if options.kernels in (["all"], ["auto"]):
        return problems, options.kernels[0]
    return problems, [resolve(name) for name in options.kernels]


def _kernelbench(options: argparse.Namespace) -> int:
    from .lab import kernelbench

    verdicts = []
    for reference, candidate in kernelbench.pair(options.files):
        print(f"{candidate}: running its code as it is, with your rights, in a child process for at most {options.time_limit:g} s")
        verdict = kernelbench.examine(
            reference, candidate, time_limit_s=options.time_limit, fuzz=options.fuzz, seed=options.seed
        )
        print(verdict, flush=True)
        verdicts.append(verdict)
    return _PASSED if all(verdict.passed for verdict in verdicts) else _FAILED
