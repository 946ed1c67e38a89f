"""`convt3d mutants` at the terminal, and the page of results it writes."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import hypothesis

from .. import registry
from ..backends.host import HostBackend
from ..cli import progress_bar
from .check import resolve
from .mutants import EXAMPLES, VERDICTS, MutationReport, judge_mutants

LEAST_SCORE = 0.95
_PAGE = """\
# Does the check bite?
`convt3d mutants` changes one thing at a time in a kernel's source: a bound, a sign, a stride, a modulo, the order of indices, a
barrier, a term, the limit of a loop, the type of a sum or of an index. Each mutant is compiled for the host, without optimization
for that is quicker, and given to the problems of `convt3d check`: those that killed the last mutants, then all its edge problems and
tails in one element type. What passes gets them in the other types, {examples} problems drawn at random, and the edge problems and tails
in the first and the last type under a sanitizer. It is **killed** if the check rejects it, by a wrong value, an overrun, a crash, a
hang or a race. The kernel itself passes the same first.
**Survived**: the check let it through. **Equivalent**: it computes the same for every problem, as far as the machine code says or
as argued below; what changes only speed is among these. **Invalid**: it does not compile. **Not compiled**: its line is in a branch
that the host's preprocessor drops (`#if defined(__CUDACC__)`, or another value of a tunable), so it says nothing of the check. The
score is killed / (killed + survived). Where not all mutants were judged but every so many of the file, the score has Wilson's 95%
interval.

What only a GPU's compiler sees is not judged: launch bounds, unrolling, and macros that are specialized for a problem there.

Written by `convt3d mutants --explained docs/mutation.toml --kept FILE.jsonl --page docs/mutation.md`, `make mutants` in short, on
{host}.
The reasons are kept in `docs/mutation.toml` by the text of their line: when the line changes they no longer count, and the command
says so.

"""


def main(options: argparse.Namespace) -> int:
    """Judge the mutants; return 1 if a score is below 95%, a survivor is not explained, or an explanation is stale."""
    kernels = [resolve(name) for name in options.kernels or registry.kernels()]
    reports = []
    for kernel in kernels:
        with progress_bar() as progress:
            report = judge_mutants(
                kernel,
                workers=options.workers or len(os.sched_getaffinity(0)),
                sample=options.sample,
                explanations=options.explained,
                progress=progress,
                kept=options.kept,
                kept_only=options.kept_only,
            )
        if options.kept_only and not report.verdicts:
            continue
        reports.append(report)
        print(summary(report), flush=True)
    if options.page is not None:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        Path(options.page).write_text(page(reports))
    return int(any(report.score < LEAST_SCORE or report.unexplained or report.stale for report in reports))


def summary(report: MutationReport) -> str:
    """Return what is printed of one kernel."""
    counts = ", ".join(f"{report.counts[verdict]} {verdict}" for verdict in VERDICTS)
    judged = len(report.verdicts)
    of = "" if judged == report.total else f" of {report.total}"
    lines = [f"{report.kernel}: {judged}{of} mutants, {counts}; score {_score(report)} in {report.elapsed_s:.0f} s"]
    lines += [f"  SURVIVED {verdict.mutant}" for verdict in report.unexplained]
    lines += [f"  STALE explanation: {stale}" for stale in report.stale]
    return "\n".join(lines)


def page(reports: Sequence[MutationReport]) -> str:
    """Return the page of the docs: the scores, and every mutant that is not killed with its reason."""
    lines = [f"| kernel | mutants | judged | {' | '.join(VERDICTS)} | score |", "|---" * (len(VERDICTS) + 4) + "|"]
    for report in reports:
        counts = [str(report.counts[verdict]) for verdict in VERDICTS]
        lines.append(f"| {report.kernel} | {report.total} | {len(report.verdicts)} | {' | '.join(counts)} | {_score(report)} |")
    judged = {report.kernel for report in reports}
    if missing := [name for name in registry.kernels() if name not in judged]:
        lines += ["", f"Not judged: {', '.join(missing)}."]
    for report in reports:
        lines += ["", f"## {report.kernel}", *_not_killed(report)]
    facts = HostBackend().capabilities()
    host = f"{facts['device']}, {facts['compiler']}, Python {platform.python_version()}, Hypothesis {hypothesis.__version__}"
    return _PAGE.format(examples=EXAMPLES, host=host) + "\n".join(lines) + "\n"


def _score(report: MutationReport) -> str:
    if report.interval is None:
        return f"{report.score:.1%}"
    low, high = report.interval
    return f"{report.score:.1%} ({low:.1%} to {high:.1%})"


def _not_killed(report: MutationReport) -> list[str]:
    listed = [verdict for verdict in report.verdicts if verdict.verdict in ("survived", "equivalent")]
    if not listed:
        return ["Every mutant is killed."]
    lines = ["| line | change | in | verdict | why |", "|---|---|---|---|---|"]
    for verdict in listed:
        mutant = verdict.mutant
        change = f"{mutant.operator}: `{mutant.before.strip()}` to `{mutant.after.strip()}`"
        cells = [str(mutant.line), change, f"`{mutant.text}`", verdict.verdict, verdict.reason or "**not explained**"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return lines
