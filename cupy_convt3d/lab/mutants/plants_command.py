"""`convt3d mutants --plants FOLDER` at the terminal, the judgements it keeps, and the table that the docs make of them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from ... import records
from ...errors import FindingsError, printable
from ...files import write_whole
from ...limits import cores
from ..check import resolve
from ..progress import progress_bar
from .plants import Judgement, Plant, judge_plants, plants

LEAST_CAUGHT = 0.95


def main(options: argparse.Namespace) -> int:
    """Judge the plants; return 1 if the check catches fewer than 95% of them."""
    given = {"--explained": options.explained, "--kept": options.kept, "--kept-only": options.kept_only}
    if unused := [name for name, value in given.items() if value]:
        raise FindingsError(f"{unused[0]}: is for mutants, not for --plants")
    everything = plants(options.plants)
    kernels = {resolve(name).name for name in options.kernels} or {plant.kernel for plant in everything}
    chosen = [plant for plant in everything if plant.kernel in kernels]
    if not chosen:
        raise FindingsError(f"--plants {options.plants}: has none for {', '.join(sorted(kernels))}")
    if options.sample is not None:
        chosen = chosen[:: max(1, -(-len(chosen) // options.sample))]

    def keep_one(judgement: Judgement) -> None:
        if options.scores is not None:
            keep(options.scores, everything, [judgement])

    with progress_bar() as progress:
        done = judge_plants(chosen, workers=options.workers or cores(), progress=progress, done=keep_one)
    print(printable(summary(done)))
    return int(sum(judgement.caught for judgement in done) < LEAST_CAUGHT * len(done))


def summary(judgements: Sequence[Judgement]) -> str:
    """Return what is printed: a line for each class, what was caught by what, and what was not."""
    lines = [" ".join(map(str, row)) for row in _rows(judgements)]
    for judgement in judgements:
        what = f"{judgement.kernel} ({judgement.kind}): {judgement.name}"
        found = f"{judgement.problem} {judgement.dtype} {judgement.tensors}: {judgement.message}"
        lines.append(f"  {judgement.elapsed_s:.1f} s, {what}; {found}" if judgement.caught else f"  NOT CAUGHT {what}")
    return "\n".join(lines)


def keep(path: Path, everything: Sequence[Plant], judgements: Sequence[Judgement]) -> None:
    """Put judgements into a file, one a line in the order of the plants; those of plants that are gone leave it.

    Raises:
        DataError: the file that is there is damaged.
    """
    known = {judgement.name: judgement for judgement in (*kept(path), *judgements)}
    lines = [f"  {json.dumps(asdict(known[plant.name]), separators=(',', ':'))}" for plant in everything if plant.name in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "[\n" + ",\n".join(lines) + "\n]\n")


def kept(path: Path) -> list[Judgement]:
    """Return the judgements in a file, none if there is no file.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    where = f"judgements {str(path)!r}"
    if not path.exists():
        return []
    entries = records.sequence(records.read(path, where), where)
    return [records.make(Judgement, entry, f"{where}: number {number}") for number, entry in enumerate(entries)]


def page(everything: Sequence[Plant], judgements: Sequence[Judgement]) -> str:
    """Return what the docs show, in Markdown: how many of each class are caught in how many seconds, and which are not."""
    kernels = len({plant.kernel for plant in everything})
    lines = [f"There are {len(everything)} plants in {kernels} kernels, of which {len(judgements)} were judged.", ""]
    lines += ["| class | plants | caught | median | slowest |", "|---|---|---|---|---|"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in _rows(judgements)]
    ideas = {plant.name: plant.idea for plant in everything}
    if missed := [judgement for judgement in judgements if not judgement.caught]:
        lines += ["", "Not caught:", "", "| class | kernel | plant | idea |", "|---|---|---|---|"]
        lines += [f"| {one.kind} | {one.kernel} | {one.name} | {ideas[one.name]} |" for one in missed]
    return "\n".join(lines) + "\n"


def _rows(judgements: Sequence[Judgement]) -> list[tuple[str, int, int, str, str]]:
    """Return a row for each class, and one for all: class, plants, caught, and the seconds that took."""
    kinds = dict.fromkeys(judgement.kind for judgement in judgements)
    groups = [(kind, [judgement for judgement in judgements if judgement.kind == kind]) for kind in kinds]
    return [_row(kind, group) for kind, group in [*groups, ("all", list(judgements))] if group]


def _row(kind: str, group: Sequence[Judgement]) -> tuple[str, int, int, str, str]:
    seconds = [judgement.elapsed_s for judgement in group if judgement.caught]
    taken = (f"{median(seconds):.1f} s", f"{max(seconds):.1f} s") if seconds else ("", "")
    return kind, len(group), len(seconds), *taken
