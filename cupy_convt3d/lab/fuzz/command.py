"""`convt3d fuzz` at the terminal: a bar with the coverage as it grows, findings as they come, a summary at the end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ... import registry
from ...errors import KernelError, printable
from ..check import default_backend, other_gpu, resolve
from ..run.sandbox import notice
from . import FuzzReport, fuzz
from .findings import Finding, replay

_LINE_EVERY_S = 60.0  # where stderr is no terminal
Show = Callable[[FuzzReport, "Finding | None"], None]


def main(options: argparse.Namespace) -> int:
    """Fuzz, or replay; return 1 if the file holds a failure that is not known to be gone, 2 if one could not be tried here."""
    if options.replay:
        return _replay(options)
    kernels = [resolve(name) for name in options.kernels or registry.kernels()]
    backend = options.backend or ("host" if options.sanitize else default_backend())
    elsewhere = {kernel: reason for kernel in kernels if (reason := other_gpu(kernel, backend))}
    if options.kernels and elsewhere:
        raise KernelError("; ".join(elsewhere.values()))
    kernels = [kernel for kernel in kernels if kernel not in elsewhere]
    for kernel in kernels if backend == "host" else ():
        if said := notice(kernel, options.sandbox):
            print(said, flush=True)
    known: set[tuple[str, str, str]] = set()
    if options.findings.exists():
        print(f"going on with {options.findings}", file=sys.stderr)
    with _display(options.minutes, options.examples) as show:

        def progress(report: FuzzReport) -> None:
            while report.interrupted:
                found = report.interrupted.pop()
                warning = printable(f"{found.kernel}: {found.message}: {found.example_line()}")
                print(f"convt3d: warning: {warning}", file=sys.stderr, flush=True)
            for found in report.findings[len(known) :]:
                known.add(found.key)
                show(report, found)
            show(report, None)

        report = fuzz(
            kernels,
            backend=backend,
            findings=options.findings,
            minutes=options.minutes,
            examples=options.examples,
            workers=options.workers,
            sanitize=options.sanitize,
            time_limit_s=options.time_limit,
            progress=progress,
            sandbox=options.sandbox,
        )
        progress(report)
    print(summary(report, str(options.findings)), flush=True)
    return 1 if report.findings else 0


def summary(report: FuzzReport, path: str) -> str:
    """Return the closing lines: what was covered of each kernel, and what was found."""
    rate = report.examples / max(report.elapsed_s, 1e-9)
    lines = [f"{report.examples} examples in {report.elapsed_s:.1f} s ({rate:.0f} a second), {report.restarts} restarts"]
    for name, c in report.coverage.items():
        lines.append(
            f"  {name:16s} {c.examples:9d} examples  {c.failures:7d} failures  classes {len(c.classes)}/{c.applicable}  "
            f"pairs {c.pairs.bit_count()} (the last new one {c.examples - c.last_new} examples ago)"
        )
    lines.append(f"{len(report.findings)} findings in {path}, {report.new} of them new" if report.findings else "nothing found")
    return "\n".join(lines)


def describe(found: Finding) -> str:
    """Return a finding as it is printed: what failed, and the line that pins it."""
    return printable(f"FOUND {found.kernel} on {found.backend}: {found.message}\n{found.example_line()}")


def _status(report: FuzzReport) -> str:
    pairs = sum(c.pairs.bit_count() for c in report.coverage.values())
    classes = sum(len(c.classes) for c in report.coverage.values())
    applicable = sum(c.applicable for c in report.coverage.values())
    rate = report.examples / max(report.elapsed_s, 1e-9)
    return (
        f"{report.note or f'{rate:.0f}/s'} · classes {classes}/{applicable} · pairs {pairs} · "
        f"{len(report.findings)} found · {report.restarts} restarts"
    )


@contextmanager
def _display(minutes: float | None, examples: int | None) -> Iterator[Show]:
    """Yield what shows a report, and first a new finding if there is one."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    total = examples if examples is not None else None if minutes is None else 60 * minutes
    columns = (BarColumn(20), TextColumn("{task.fields[done]} examples"), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling", total=total, done=0)

        def show(report: FuzzReport, found: Finding | None) -> None:
            if found is not None:
                bar.console.file.write("\r\x1b[2K")
                print(describe(found), flush=True)
            completed = report.examples if examples is not None else report.elapsed_s
            bar.update(task, completed=completed, done=report.examples, description=escape(_status(report)))

        yield show


class _Lines:
    """Shows a line a minute."""

    def __init__(self) -> None:
        self.next = time.monotonic() + _LINE_EVERY_S

    def __call__(self, report: FuzzReport, found: Finding | None) -> None:
        if found is not None:
            print(describe(found), flush=True)
        if time.monotonic() >= self.next:
            self.next += _LINE_EVERY_S
            print(f"{report.elapsed_s:.0f} s, {report.examples} examples, {_status(report)}", file=sys.stderr, flush=True)


def _replay(options: argparse.Namespace) -> int:
    results = replay(options.findings, options.time_limit)
    warnings = dict.fromkeys(warning for result in results for warning in result.warnings)
    for warning in warnings:
        print(f"convt3d: warning: {printable(f'{options.findings}: {warning}')}", file=sys.stderr)
    for result in results:
        print(printable(f"{result}\n  {result.finding.example_line()}"), flush=True)
    failing = sum(result.outcome is not None and not result.outcome.ok for result in results)
    left = sum(result.not_tried is not None for result in results)
    print(f"{failing} of {len(results)} findings still fail{f', {left} not tried' if left else ''}")
    return 1 if failing else 2 if left else 0
