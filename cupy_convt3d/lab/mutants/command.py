"""`convt3d mutants` at the terminal, the scores it keeps, and the page that the docs make of them."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import hypothesis

from ... import records, registry
from ...backends.host import HostBackend
from ...errors import DataError, printable
from ...files import read_text, write_whole
from ...limits import cores
from ..check import resolve
from ..progress import progress_bar
from . import VERDICTS, MutationReport, interval, judge_mutants
from .mutation import Key

LEAST_SCORE = 0.95
MOST_MUTANTS = 10**9  # of a kernel, that a file may say there are


@dataclass(frozen=True)
class Score:
    """What is kept of a kernel's report.

    Attributes:
        mutants, judged: how many there are and were judged.
        killed, survived, equivalent, invalid, not_compiled: how many got each of the verdicts.
        of: what was changed: "kernel and headers", or "kernel" alone as it once was.
        host: where they were judged.
    """

    mutants: int
    judged: int
    killed: int
    survived: int
    equivalent: int
    invalid: int
    not_compiled: int
    of: str
    host: str

    def __str__(self) -> str:
        score, within = self.killed / max(1, self.killed + self.survived), interval(self.killed, self.survived)
        if self.judged >= self.mutants or within is None:
            return f"{score:.1%}"
        return f"{score:.1%} ({within[0]:.1%} to {within[1]:.1%})"


def main(options: argparse.Namespace) -> int:
    """Judge the mutants; return 1 if a score is below 95%, a survivor is not explained, or an explanation is stale."""
    kernels = [resolve(name) for name in options.kernels or registry.kernels()]
    reports = []
    for kernel in kernels:
        with progress_bar() as progress:
            report = judge_mutants(
                kernel,
                workers=options.workers or cores(),
                sample=options.sample,
                explanations=options.explained,
                progress=progress,
                kept=options.kept,
                kept_only=options.kept_only,
            )
        if options.kept_only and not report.verdicts:
            continue
        reports.append(report)
        print(printable(summary(report)), flush=True)
    if options.scores is not None:
        keep(options.scores, reports)
    return int(any(report.score < LEAST_SCORE or report.unexplained or report.stale for report in reports))


def summary(report: MutationReport) -> str:
    """Return what is printed of one kernel."""
    counts = ", ".join(f"{report.counts[verdict]} {verdict}" for verdict in VERDICTS)
    judged = len(report.verdicts)
    of = "" if judged == report.total else f" of {report.total}"
    lines = [f"{report.kernel}: {judged}{of} mutants, {counts}; score {score(report)} in {report.elapsed_s:.0f} s"]
    lines += [f"  SURVIVED {verdict.mutant}" for verdict in report.unexplained]
    lines += [f"  STALE explanation: {stale}" for stale in report.stale]
    return "\n".join(lines)


def score(report: MutationReport) -> Score:
    """Return what is kept of a report."""
    facts = HostBackend().capabilities()
    host = f"{facts['device']}, {facts['compiler']}, Python {platform.python_version()}, Hypothesis {hypothesis.__version__}"
    counts = {verdict.replace(" ", "_"): report.counts[verdict] for verdict in VERDICTS}
    return Score(report.total, len(report.verdicts), **counts, of="kernel and headers", host=host)


def keep(path: Path, reports: Sequence[MutationReport]) -> None:
    """Put reports into a file of scores, a kernel a line.

    Raises:
        DataError: the file that is there is damaged.
    """
    known = scores(path) if path.exists() else {}
    known |= {report.kernel: score(report) for report in reports}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"  {json.dumps(name)}: {json.dumps(asdict(known[name]))}" for name in sorted(known)]
    write_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def scores(path: Path) -> dict[str, Score]:
    """Return the scores in a file, by kernel.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    where = f"scores {str(path)!r}"
    try:
        found = records.mapping(records.parse(read_text(path), where), where)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: cannot be read: {error}") from None
    return {name: _score(value, f"{where}: {name}") for name, value in found.items()}


def _score(given: object, where: str) -> Score:
    found = records.make(Score, given, where)
    for name, number in asdict(found).items():
        if isinstance(number, int):
            records.within(number, 0, MOST_MUTANTS, f"{where}: {name}")
    return found


def page(known: Mapping[str, Score], reasons: Mapping[Key, tuple[str, str]]) -> str:
    """Return what the docs show, in Markdown: the scores, and every mutant that is let through or argued away with its reason."""
    lines = [f"| kernel | mutants of | mutants | judged | {' | '.join(VERDICTS)} | score |", "|---" * (len(VERDICTS) + 5) + "|"]
    for name, found in known.items():
        numbers = [str(number) for number in asdict(found).values() if isinstance(number, int)]
        lines.append(f"| {name} | {found.of} | {' | '.join(numbers)} | {found} |")
    if missing := [name for name in registry.kernels() if name not in known]:
        lines += ["", f"Not judged: {', '.join(missing)}."]
    for host in dict.fromkeys(found.host for found in known.values()):
        lines += ["", f"On {host}: {', '.join(name for name, found in known.items() if found.host == host)}."]
    for where in sorted({key[0] for key in reasons}):
        lines += ["", f"## {where}", "| change | in | verdict | why |", "|---|---|---|---|"]
        for (file, text, operator, before, after, _), (verdict, reason) in reasons.items():
            if file == where:
                change = f"{operator}: `{before.strip()}` to `{after.strip()}`"
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (change, f"`{text}`", verdict, reason)) + " |")
    return "\n".join(lines) + "\n"
