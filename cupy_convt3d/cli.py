"""The command line: `convt3d check`, `fuzz`, `mutants`, `info`, `report`, `bench`, `tune`, `calibrate`, `kernelbench`."""

from __future__ import annotations

import argparse
import io
import itertools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from . import architecture, registry
from .dtypes import DTYPES
from .errors import BackendError, DataError, KernelError, ProblemError, printable, require
from .kernel import Kernel
from .lab.progress import progress_bar
from .limits import MOST_SECONDS, cores, named_limit
from .problem import LAYOUTS, PASSES, Problem
from .tuning import Question, measured

if TYPE_CHECKING:
    from .backends.base import Backend
    from .lab.check import CheckReport

_PASSED, _FAILED, _USAGE = 0, 1, 2  # exit codes
_KINDS = ("exact", "exact_wide", "random", "nan", "inf", "overflow", "cancel", "largest", "far")  # of `lab.tensors`, which imports more
POPULATION, COUNT = "population", 150  # the suite that is drawn, and how many of its layers
CHECK_FLOP = 400_000  # useful FLOP that a check scales a layer down to
_TIME_LIMIT = "seconds after which an example is a hang; a large one has more (default 10)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 if a kernel failed, 2 if the command itself could not be done."""
    _open_closed_files()
    try:
        return _run(arguments)
    finally:
        try:
            sys.stderr.flush()
        except OSError:  # full: what is left unwritten would change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def program() -> int:
    """Run `main` as a program of its own: a warning is one line, as an error is, and is said once."""
    said: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        if (text := printable(str(message))) not in said:
            said.add(text)
            _say(f"warning: {text}")

    warnings.showwarning = show
    return main()


def _say(text: str) -> None:
    with suppress(OSError):  # the exit code says it still
        print(f"convt3d: {text}", file=sys.stderr)


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    received: list[int] = []
    try:
        with _ended_by_signals(received):
            return int(options.command(options))
    except BrokenPipeError:  # whoever read the output, such as `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PASSED
    except (KernelError, BackendError, ProblemError, DataError, OSError) as error:  # OSError: a file cannot be read or written
        limit = named_limit(error) if isinstance(error, OSError) else ""
        _say(f"error: {printable(_gone() or f'{error}{limit}')}")
        return _USAGE
    except KeyboardInterrupt:
        _say("interrupted")
        return 128 + (received or [signal.SIGINT])[0]


def _gone() -> str | None:
    """Return what is said where the working directory was deleted; None where it is there."""
    try:
        os.getcwd()
    except OSError:
        return "the working directory is not there any more; change to another one"
    return None


@contextmanager
def _ended_by_signals(received: list[int]) -> Iterator[None]:
    """Have SIGTERM and SIGHUP end a command as Ctrl-C does: with all that it has started and its temporary files."""

    def end(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only that one may
        yield
        return
    taken = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, end)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _open_closed_files() -> None:
    """Give standard files that the shell has closed (`2>&-`) the null device: else files opened later get their numbers.

    What the terminal's encoding has no character for is written as its escape.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115  it is open to the end
    for file in (sys.stdout, sys.stderr):
        if isinstance(file, io.TextIOWrapper):
            file.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="convt3d", description="Raw CUDA kernels for 3D transposed convolution.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser("check", help="check kernels against the NumPy reference on drawn problems")
    check.add_argument("kernels", nargs="*", metavar="NAME|FILE.cu", help="registered kernels or files; none: all registered")
    check.add_argument("--backend", choices=("cuda", "host"), help="default: cuda where there is a GPU")
    check.add_argument("--examples", type=_count, default=200, help="examples drawn at random for each kernel (default 200)")
    check.add_argument("--dtype", action="append", choices=tuple(DTYPES), help="may be repeated; default: all of the kernel's")
    check.add_argument("--seed", type=_count, default=0, help="of the search, the one example of --problem, or the population (default 0)")
    check.add_argument("--sanitize", choices=("address", "undefined", "thread"), help="host backend only")
    only = check.add_mutually_exclusive_group()
    only.add_argument("--problem", type=_problem, metavar="NAME", help="check this one only, such as n1_c1to2_i3_k3_s2")
    only.add_argument("--suite", choices=(POPULATION,), help="check drawn layers only, scaled down for the NumPy reference")
    check.add_argument("--count", type=_positive_count, default=COUNT, help=f"layers of the population (default {COUNT})")
    check.add_argument("--kind", action="append", choices=_KINDS, help="default: all")
    check.add_argument("--tunable", action="append", type=_tunable, metavar="NAME=VALUE", help="in place of the source's default")
    check.add_argument("--grid-limit", type=_positive_count, metavar="N", help="for larger numbers that cut a launch's grid")
    check.add_argument("--time-limit", type=_seconds, default=10.0, metavar="S", help=_TIME_LIMIT)
    check.add_argument("--quick", action="store_true", help="a twelfth of problems of tiles and layouts, no corners, no values to search")
    check.add_argument("--in-process", action="store_true", help="no child process, for compute-sanitizer, ncu or a debugger")
    _add_sandbox(check)
    check.set_defaults(command=_check)

    fuzz = commands.add_parser("fuzz", help="run random examples without end, in child processes, and keep what fails in a file")
    fuzz.add_argument("kernels", nargs="*", metavar="NAME|FILE.cu", help="registered kernels or files; none: all registered")
    fuzz.add_argument("--backend", choices=("cuda", "host"), help="default: cuda where there is a GPU")
    fuzz.add_argument("--minutes", type=_positive, help="stop after so long; default: at Ctrl-C")
    fuzz.add_argument("--examples", type=_count, help="stop after so many")
    fuzz.add_argument("--time-limit", type=_seconds, default=10.0, metavar="S", help=_TIME_LIMIT)
    fuzz.add_argument("--workers", type=_positive_count, help="child processes; default: one to a core, one on a GPU")
    fuzz.add_argument("--sanitize", choices=("address", "undefined", "thread"), help="host backend only")
    fuzz.add_argument(
        "--findings", type=Path, default=Path("findings.jsonl"), metavar="FILE", help="go on with this file (default findings.jsonl)"
    )
    fuzz.add_argument("--replay", action="store_true", help="run what the file holds once more, and stop")
    _add_sandbox(fuzz)
    fuzz.set_defaults(command=_fuzz)

    mutants = commands.add_parser("mutants", help="change one thing at a time in kernels, and see whether the check notices")
    mutants.add_argument("kernels", nargs="*", metavar="NAME|FILE.cu", help="registered kernels or files; none: all registered")
    mutants.add_argument("--workers", type=_positive_count, help="child processes; default: one to a core")
    mutants.add_argument("--sample", type=_positive_count, metavar="N", help="about so many of each kernel, spread over the file")
    mutants.add_argument("--explained", type=Path, metavar="FILE", help="why some mutants need not be killed (TOML)")
    mutants.add_argument("--kept", type=Path, metavar="FILE.jsonl", help="keep verdicts here, and judge only what is new")
    mutants.add_argument("--kept-only", action="store_true", help="judge nothing: report what --kept has")
    mutants.add_argument("--scores", type=Path, metavar="FILE.json", help="put the scores into this file, beside other kernels'")
    mutants.add_argument("--plants", type=Path, metavar="FOLDER", help="judge the mistakes described there instead, by the whole check")
    mutants.set_defaults(command=_mutants)

    info = commands.add_parser("info", help="versions, devices, cache directory, registered kernels")
    info.add_argument("--why", type=_problem, metavar="PROBLEM", help="say for each kernel whether it can do this problem")
    info.set_defaults(command=_info)

    report = commands.add_parser("report", help="check, run and time every kernel, and write a report")
    report.add_argument("--out", type=_folder, default=Path("report"), metavar="DIR", help="where to write it (default: report)")
    report.set_defaults(command=_report)

    bench = commands.add_parser("bench", help="time kernels against cuDNN on named problems, and write JSON")
    _add_measured(bench)
    bench.add_argument("--against", type=_names, metavar="RIVAL,...", help="cudnn, torch (its own CUDA kernels); '': none")
    bench.add_argument("--out", type=_file, metavar="FILE.json", help="of the results; until they are complete FILE.json.partial")
    bench.add_argument("--calls", action="store_true", help="time calls on torch tensors as a user makes them, as --suite population does")
    bench.add_argument("--minutes", type=_positive, help="of calls: begin nothing new after so long; the same command goes on")
    bench.add_argument("--regret", type=_count, default=0, metavar="K", help="of calls: search all kernels for the first K layers")
    bench.add_argument("--no-trials", action="store_true", help="of calls: 'auto' measures nothing at its first call")
    bench.set_defaults(command=_bench)

    tune = commands.add_parser("tune", help="search kernels' configurations, and keep the best for algorithm='auto'")
    _add_measured(tune)
    tune.add_argument("--again", action="store_true", help="search what the database has, too")
    tune.add_argument(
        "--known-only",
        action="store_true",
        help="time the defaults and what is known of other devices and layouts, search nothing (--again searches later)",
    )
    tune.add_argument("--out", type=_file, metavar="FILE.json", help="the database (default: your own, where 'auto' looks)")
    tune.add_argument(
        "--carry-on",
        metavar="REVISION",
        help="measure nothing: entries that were of this git revision (or folder) hold on where the machine code is the same; of the "
        "shipped database and your own, or of --out",
    )
    tune.add_argument("--workers", type=_positive_count, help="of --carry-on: compilers at a time; default: one to a core")
    tune.set_defaults(command=_tune)

    calibrate = commands.add_parser(
        "calibrate", help="time kernels and torch on drawn layers, and fit what 'auto' predicts times by"
    )
    calibrate.add_argument("sweeps", nargs="*", type=Path, metavar="FILE.json", help="fit these sweeps, measure nothing")
    calibrate.add_argument("--kernels", type=_names, default=["all"], metavar="NAME|FILE.cu,...", help="default: all")
    calibrate.add_argument("--pass", choices=PASSES, dest="pass_name", default="fprop", help="default: fprop")
    calibrate.add_argument("--seed", type=_count, default=1, help="of the drawn layers (default 1)")
    calibrate.add_argument("--count", type=_positive_count, default=COUNT, help=f"of them (default {COUNT})")
    calibrate.add_argument("--minutes", type=_positive, help="fit what has been measured after so long")
    calibrate.add_argument(
        "--keep", type=Path, default=Path("sweep.json"), metavar="FILE.json", help="of what is measured (default sweep.json)"
    )
    calibrate.add_argument("--backend", choices=("cuda", "host"), help="default: cuda where there is a GPU")
    calibrate.add_argument("--out", type=Path, metavar="FILE.json", help="the costs (default: your own, where 'auto' looks)")
    calibrate.set_defaults(command=_calibrate)

    ahead = commands.add_parser("compile", help="compile what 'auto' takes for recorded calls or a suite, before they are made")
    ahead.add_argument("calls", nargs="?", type=Path, metavar="CALLS.json", help="as `recorded_calls` writes them; else the problems named")
    _add_measured(ahead)
    ahead.add_argument("--device", metavar="NAME", help="a card that is not here, such as H100 (default: the GPU of this machine)")
    ahead.add_argument("--out", type=Path, metavar="FOLDER", help="where binaries go, for CONVT3D_BUILT (default: the cache)")
    ahead.add_argument("--workers", type=_positive_count, help="compilers at a time (default: one to a core)")
    ahead.set_defaults(command=_compile)

    kernelbench = commands.add_parser("kernelbench", help="check and time KernelBench-style files: ModelNew against Model")
    kernelbench.add_argument("files", nargs="+", type=Path, metavar="FILE", help="with Model, ModelNew, get_inputs, get_init_inputs")
    kernelbench.add_argument("--fuzz", type=_count, nargs="?", const=200, default=0, metavar="N", help="draw N other problems (200)")
    kernelbench.add_argument("--seed", type=_count, default=0, help="of the fresh inputs and the draws (default 0)")
    kernelbench.add_argument("--time-limit", type=_seconds, default=600.0, metavar="S", help="seconds for each file (default 600)")
    kernelbench.set_defaults(command=_kernelbench)
    return parser


def _add_sandbox(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sandbox", action="store_true", help="no network, home directory or other processes for a kernel's host code")


def _add_measured(parser: argparse.ArgumentParser) -> None:
    """Add what is measured: comma-separated lists, every combination of them."""
    tuning = parser.prog.endswith("tune")
    what = parser.add_mutually_exclusive_group()
    suites = "default: named, which has all but few_channels and ordinary; population: drawn layers"
    what.add_argument("--suite", type=_names, default=["named"], metavar="NAME,...", help=suites)
    what.add_argument("--problem", type=_names, metavar="NAME,...", help="one of the suites, or such as n1_c1to2_i3_k3_s2")
    parser.add_argument("--seed", type=_count, default=0, help="of --suite population, drawn layers (default 0)")
    parser.add_argument("--count", type=_positive_count, default=COUNT, help=f"of its layers (default {COUNT})")
    parser.add_argument("--pass", type=_names, dest="passes", default=["fprop"], metavar="PASS,...", help="default: fprop")
    parser.add_argument("--precision", type=_names, default=["fp32"], metavar="NAME,...", help=f"of {', '.join(DTYPES)}; ieee is fp32")
    parser.add_argument("--layout", type=_names, default=["ncdhw"] if tuning else None, metavar="NAME,...", help="ncdhw, channels_last")
    every, text = ("all", "default: all") if tuning else ("auto", "or all; default: auto, what algorithm='auto' takes")
    parser.add_argument("--kernels", type=_names, default=[every], metavar="NAME|FILE.cu,...", help=text)
    parser.add_argument("--backend", choices=("cuda", "host"), help="default: cuda where there is a GPU")


def _names(text: str) -> list[str]:
    if not (names := list(dict.fromkeys(name for name in text.split(",") if name))):
        raise argparse.ArgumentTypeError(f"{text!r}: must be at least one name")
    return names


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
    if not 0 < (number := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be above 0, and finite")
    return number


def _seconds(text: str) -> float:
    if (number := _positive(text)) > MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text}: must be at most {MOST_SECONDS} seconds")
    return number


def _file(text: str) -> Path:
    path = Path(text)
    if not path.name or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: must be the name of a file")
    _folder(str(path.parent))
    return path


def _folder(text: str) -> Path:
    """Return the path of a folder that is there or can be made."""
    path = Path(text)
    there = next((one for one in (path, *path.parents) if one.exists()), path)
    if not text or not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: must be the name of a folder")
    return path


def _problem(text: str) -> Problem:
    try:
        return Problem.parse(text)
    except ProblemError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _check(options: argparse.Namespace) -> int:
    from .lab.check import check, default_backend, limit_grid, other_gpu, resolve  # imports Hypothesis
    from .lab.run.sandbox import notice

    tunables = dict(options.tunable or ())
    problems = _scaled_population(options) if options.suite else []
    kernels = [resolve(name).replace_tunables(**tunables) for name in options.kernels or registry.kernels()]
    if options.grid_limit:
        kernels = [limit_grid(kernel, options.grid_limit) for kernel in kernels]
    backend = options.backend or ("host" if options.sanitize else default_backend())
    failed, elsewhere = [], 0
    for kernel in kernels:
        if options.dtype and not options.kernels and not set(options.dtype) & set(kernel.dtypes):
            continue  # of all the registered kernels, those that have the type
        if not options.kernels and (reason := other_gpu(kernel, backend)):
            print(f"{kernel.name} on {backend}: not checked: {reason}")
            elsewhere += 1
            continue
        if backend == "host" and (said := notice(kernel, options.sandbox)):
            print(said, flush=True)
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
                problems=problems,
                kinds=options.kind,
                in_process=options.in_process,
                time_limit_s=options.time_limit,
                sandbox=options.sandbox,
                quick=options.quick,
            )
        # plain print: rich would read [brackets] in a kernel's name or message as markup, and wrap the line to be pasted
        print(printable(str(report)), flush=True)
        failed += [] if report.passed or _is_refused(options, report) else [kernel.name]
    if len(kernels) > 1:
        checked = len(kernels) - elsewhere
        print(f"{checked - len(failed)} of {checked} kernels passed{'; failed: ' * bool(failed)}{', '.join(failed)}")
    return _FAILED if failed else _PASSED


def _scaled_population(options: argparse.Namespace) -> list[Problem]:
    from .lab.population import population
    from .lab.suites import scaled_down

    layers = population(options.seed, options.count)
    small = f"channels, volumes and batches scaled down to {CHECK_FLOP / 1e6:g} MFLOP"
    print(f"{len(layers)} layers of seed {options.seed}; {small}", flush=True)
    return list(dict.fromkeys(scaled_down(layer.problem, CHECK_FLOP) for layer in layers))


def _is_refused(options: argparse.Namespace, report: CheckReport) -> bool:
    """Whether problems, or some kinds, were given for all kernels, and this kernel can do nothing of it."""
    given = options.problem or options.kind or options.suite
    return not options.kernels and bool(given) and not report.examples and bool(report.untried)


def _fuzz(options: argparse.Namespace) -> int:
    from .lab.fuzz import command as fuzz_command  # imports Hypothesis

    return int(fuzz_command.main(options))


def _mutants(options: argparse.Namespace) -> int:
    from .lab.mutants import command as mutants_command  # imports Hypothesis
    from .lab.mutants import plants_command

    return int((mutants_command if options.plants is None else plants_command).main(options))


def _info(options: argparse.Namespace) -> int:
    from .lab.bench.provenance import backend_named

    for name, value in _facts():
        print(f"{name + ':':12s} {value}")
    print("kernels:")
    known = registry.kernels()
    backend = None if options.why is None else backend_named(None)  # where kernels would run here
    for name, kernel in known.items():
        determinism = "deterministic" if kernel.deterministic else "not deterministic"
        gpus = architecture.described(kernel.architectures)
        print(f"  {name:{max(map(len, known))}s}  {kernel.pass_name}  {', '.join(kernel.dtypes)}  {gpus}  {determinism}")
        for rule, why in kernel.spreads_nan.items():
            print(f"    spreads NaN where {rule}: {why}")
        if kernel.multiplies_padding:
            print("    a weight that is not finite also makes NaN of outputs whose tap lies beyond the input")
        if backend is not None:
            for dtype in kernel.dtypes:
                print(f"    {options.why} {dtype}: {backend.why_not(kernel, options.why, dtype) or 'yes'}")
    if backend is not None:
        for line in _why_auto(options.why, backend):
            print(line)
    return _PASSED


def _why_auto(asked: Problem, backend: Backend) -> Iterator[str]:
    """Yield what "auto" takes in each pass and precision on a backend, and under it how that was found."""
    from .choice import asked_of_kernels, choose

    yield f'algorithm="auto" on {backend.device_name} ({backend.arch or backend.name}):'
    for pass_name in PASSES:
        problem = asked_of_kernels(asked, pass_name)
        if problem is not asked:
            yield f"  {pass_name}: as {problem}, without the taps that lead nowhere"
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
                    answers[layout] += _candidates(
                        problem, backend, Question(backend.device_name, pass_name, precision, layout)
                    )
                    torchs = taken.for_torch
                    reason = torchs.left_to_torch
                    if reason or torchs.kernel is not taken.kernel:
                        instead = f"torch's own operator, {reason}" if reason else torchs.candidates[0]
                        answers[layout].append(f'torch\'s CUDA tensors, unless backend="cuda": {instead}')
            if len(set(map(tuple, answers.values()))) == 1:
                answers = {"": answers["ncdhw"]}
            for layout, (found, *steps) in answers.items():
                yield f"  {pass_name} {precision}{layout and ' '}{layout}: {found}"
                yield from (f"    {step}" for step in steps)


def _candidates(problem: Problem, backend: Backend, question: Question) -> Iterator[str]:
    """Yield what each kernel that can do a problem is predicted to take, and what it took where it was measured."""
    from .choice import candidates

    known = measured(question, problem, False, backend.arch)
    for one in candidates(question, problem, False, backend.arch, backend.limits):
        took, device = known.get(one.kernel.name, (None, ""))
        yield f"{one}{'' if took is None else f', at its best {took:.4g} ms measured on {device}'}"


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
    if available():
        gpu = CudaBackend()
        block = f"{(gpu.shared_limit or 0) >> 10} KiB of shared memory for a block"
        yield "GPU", f"{gpu.device_name} ({gpu.arch}), {gpu.multiprocessors} multiprocessors, {block}"
    else:
        yield "GPU", "none"
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
    from .lab.bench import Selection, bench

    problems, kernels = _measured(options)
    layouts = options.layout or list(LAYOUTS)
    if options.calls or (not options.problem and POPULATION in options.suite):
        return _survey(options, layouts, kernels, problems)
    if options.minutes is not None or options.regret or options.no_trials:
        raise ProblemError("--minutes, --regret, --no-trials: are of --calls and --suite population")
    plan = Selection(problems, options.passes, options.precision, layouts, kernels, options.against)
    with progress_bar() as progress:
        data = bench(plan, options.out, backend=options.backend, progress=progress)
    if options.out is not None:
        print(f"Written: {options.out}")
    return _FAILED if data["wrong"] else _PASSED


def _survey(options: argparse.Namespace, layouts: list[str], kernels: str | list[Kernel], problems: dict[str, Problem]) -> int:
    from .lab.bench.survey import Survey, survey

    drawn = not options.problem and POPULATION in options.suite
    if drawn and options.suite != [POPULATION]:
        raise ProblemError(f"--suite {','.join(options.suite)}: a population has a file of its own; name it alone")
    if options.against is not None:
        raise ProblemError("--against: calls are measured against torch as it is by default")
    measured = (options.passes, options.precision, layouts, kernels, options.regret, options.minutes, not options.no_trials)
    plan = Survey(options.seed, options.count, *measured, None if drawn else problems)
    with progress_bar() as progress:
        data = survey(plan, options.out, backend=options.backend, progress=progress)
    if options.out is not None:
        print(f"Written: {options.out}")
    return _FAILED if data["wrong"] else _PASSED


def _tune(options: argparse.Namespace) -> int:
    from .lab.bench.measure import Bench
    from .lab.bench.provenance import backend_named
    from .lab.tune import tune
    from .tuning import user_path

    if options.carry_on is not None:
        return _carry_on(options)
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


def _compile(options: argparse.Namespace) -> int:
    from .cache import VARIABLE
    from .calls import Call, read
    from .lab.compile import compile_calls, gpu
    from .lab.environment import variable

    if options.calls is not None:
        calls = read(options.calls)
    else:
        problems, kernels = _measured(options)
        if kernels != "auto" or options.backend == "host":
            raise ProblemError("--kernels, --backend host: what 'auto' takes on a GPU is compiled, no other")
        every = itertools.product(problems.values(), options.passes, options.precision, options.layout or LAYOUTS)
        calls = [Call(pass_name, str(problem), precision, layout) for problem, pass_name, precision, layout in every]
    card = gpu(options.device)
    place: AbstractContextManager[None] = nullcontext()
    if options.out is not None:
        options.out.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = variable(VARIABLE, str(options.out))
    print(f"for {card.device} ({card.arch}):", flush=True)
    with place, progress_bar() as progress:
        built = compile_calls(calls, card, options.workers or cores(), progress=progress)
    found = {one.instance for one in built if one.instance is not None and not one.failed}
    left = sum(one.instance is None for one in built)
    print(f"{len(built)} calls: {len(found)} instances compiled, {left} calls need none, {sum(one.failed for one in built)} failed")
    return _FAILED if any(one.failed for one in built) else _PASSED


def _calibrate(options: argparse.Namespace) -> int:
    from .cost import user_path
    from .lab.bench.measure import Bench
    from .lab.bench.provenance import backend_named
    from .lab.calibrate import Sweep, calibrate, held_out, joined, line, sweep
    from .lab.check import resolve

    require("calibrate", "convt3d calibrate", "sklearn")  # before the minutes that a sweep takes
    named = [] if options.kernels == ["all"] else [resolve(name) for name in options.kernels]
    kernels = {kernel.name: kernel for kernel in named} or registry.kernels(options.pass_name)
    path = options.out or user_path()
    if options.sweeps:
        sweeps = [Sweep.read(file) for file in options.sweeps]
    else:
        meter = Bench(backend_named(options.backend), budget_ms=20.0)
        settings = {"seed": options.seed, "count": options.count, "pass_name": options.pass_name, "minutes": options.minutes}
        with progress_bar() as progress:
            sweeps = [sweep(meter, list(kernels.values()), options.keep, progress=progress, library=not named, **settings)]
        print(f"Written: {options.keep}")
    found = calibrate(sweeps, kernels, path, library=not named)
    cases = len(found.library.questions)
    print(f"{printable(found.card.device)}: {len(found.kernels)} instances of kernels, torch's operator in {cases} cases. Held out:")
    for one in held_out(joined(sweeps), kernels, found):
        print(line(one))
    print(f"Written: {path}")
    return _PASSED


def _carry_on(options: argparse.Namespace) -> int:
    """Carry entries of the tuning database on to the code as it is; some that cannot be are a failure."""
    from .lab.tune import carry
    from .tuning import SHIPPED, user_path

    paths = [options.out] if options.out is not None else [path for path in (SHIPPED, user_path()) if path.exists()]
    with progress_bar() as progress:
        found = carry.carry_on(options.carry_on, paths, workers=options.workers, progress=progress)
    print(printable(carry.summary(found)))
    return _FAILED if found.left else _PASSED


def _measured(options: argparse.Namespace) -> tuple[dict[str, Problem], str | list[Kernel]]:
    """Return the problems and kernels that are meant, and leave only known names in the other lists.

    Raises:
        ProblemError, KernelError: a name is unknown; the message lists those there are.
    """
    from .lab.check import resolve
    from .lab.population import population
    from .lab.suites import named_problem, suite

    options.precision = list(dict.fromkeys("fp32" if name == "ieee" else name for name in options.precision))
    for option, given, known in (
        ("pass", options.passes, PASSES),
        ("precision", options.precision, tuple(DTYPES)),
        ("layout", options.layout or LAYOUTS, LAYOUTS),
    ):
        if unknown := [name for name in given if name not in known]:
            raise ProblemError(f"--{option} {unknown[0]}: must be of {', '.join(known)}")
    if options.problem:
        problems = {name: named_problem(name) for name in options.problem}
    else:
        problems = {key: problem for name in options.suite if name != POPULATION for key, problem in suite(name).items()}
        if POPULATION in options.suite:
            problems |= {layer.name: layer.problem for layer in population(options.seed, options.count)}
    if options.kernels in (["all"], ["auto"]):
        return problems, options.kernels[0]
    return problems, [resolve(name) for name in options.kernels]


def _kernelbench(options: argparse.Namespace) -> int:
    from .lab import kernelbench

    verdicts = []
    pairs = kernelbench.pair(options.files)
    with kernelbench.Supervisor() as supervisor:
        for reference, candidate in pairs:
            name = printable(str(candidate))
            limit = f"for at most {options.time_limit:g} s"
            print(f"{name}: running its code as it is, with your rights, in a child process {limit}", flush=True)
            verdict = kernelbench.examine(
                reference, candidate, time_limit_s=options.time_limit, fuzz=options.fuzz, seed=options.seed, supervisor=supervisor
            )
            print(printable(str(verdict)), flush=True)
            verdicts.append(verdict)
    if any(verdict.failed for verdict in verdicts):
        return _FAILED
    return _PASSED if all(verdict.passed for verdict in verdicts) else _USAGE
