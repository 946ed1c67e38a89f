"""`convt3d tune --carry-on`: entries of the tuning database outlive a change of sources that leaves the machine code as it was.

Both trees plan and compile each entry by their own package (`carry_child`). What was measured stands where the launches are the
same, and the cubins are, but for lines and symbols. Where the compiler is given the same text, nothing is compiled.
"""

from __future__ import annotations

import json
import operator
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ... import cache, includes, scratch, tuning
from ...backends.base import output_layout
from ...errors import BackendError, DataError, shown
from ...limits import cores
from ...problem import Problem
from ...source import PACKAGE, code_alone
from ...tuning import LIBRARY, Database, Entry
from ..progress import Progress
from ..run import process
from ..threads import share

_CHILD = Path(__file__).with_name("carry_child.py")
_MULTIPROCESSORS = {"NVIDIA H100 80GB HBM3": 132, "NVIDIA H200": 132}
_ABOUT = (".nv.info", ".nv.constant0")  # sections that list functions and their parameters
_BY_PLACE = re.compile(r"\b(?:__LINE__|__FILE__|assert|__builtin_LINE|source_location)\b")  # code in which lines count

Card = tuple[str, int]  # architecture and multiprocessors


@dataclass
class Carried:
    """What became of a database's entries.

    Attributes:
        carried: entries with the new digest, by kernel.
        current: how many had it already.
        stale: how many were of neither tree.
        left: entries whose code or launches are no longer those measured, each with the difference.
        compiled: how many instances had to be compiled, in each tree.
    """

    carried: Counter[str] = field(default_factory=Counter)
    current: int = 0
    stale: int = 0
    left: list[tuple[Entry, str]] = field(default_factory=list)
    compiled: int = 0


def carry_on(
    before: str,
    paths: Sequence[Path],
    *,
    after: Path = PACKAGE.parent,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Carried:
    """Give the entries of databases that were of the sources `before` the digest of those of `after`, as far as they still hold.

    Args:
        before: a revision of this clone, or a folder with the `cupy_convt3d` and `kernels` of one.
        paths: the databases.
        after: such a folder.
        workers: how many instances are compiled at a time; None: as many as cores.
        progress: called with (instances done, instances in all, what is being done).

    Raises:
        DataError: there is no such revision or folder, a database is damaged, or the two trees' compilers are not the same.
        BackendError: a tree's package cannot be asked.
    """
    databases = {path: Database.read(path) for path in paths}
    trees = _Trees(revision(before), after)
    old, new = trees.facts()
    if old["compiler"] != new["compiler"]:
        raise DataError(
            f"--carry-on {before}: machine code of NVRTC {old['compiler']} there cannot be compared with that of NVRTC "
            f"{new['compiler']} here; use one compiler for both"
        )
    found = Carried()
    jobs: dict[_Job, list[tuple[Path, Entry]]] = {}
    for path, database in databases.items():
        for entry in database.entries():
            was, now = old["digests"].get(entry.kernel), new["digests"].get(entry.kernel)
            if entry.kernel == LIBRARY or entry.digest == now:
                found.current += entry.kernel != LIBRARY
            elif entry.digest != was:
                found.stale += 1
            elif now is None:
                found.left.append((entry, "there is no such kernel any more"))
            elif (card := _card(entry.device)) is None:
                found.left.append((entry, f"machine code of {entry.device!r} cannot be made here: {_known_cards()}"))
            else:
                jobs.setdefault(_job(entry, card), []).append((path, entry))
    differences, found.compiled = _compared(trees, list(jobs), workers or cores(), progress)
    for job, entries in jobs.items():
        for path, entry in entries:
            if (difference := differences[job]) is not None:
                found.left.append((entry, difference))
            else:
                databases[path].record(replace(entry, digest=new["digests"][entry.kernel]))
                found.carried[entry.kernel] += 1
    for path, database in databases.items():
        database.merge(path)
    return found


def revision(name: str) -> Path:
    """Return the folder with a revision's package and kernels, kept in the cache so that its binaries are found again; or the folder.

    Raises:
        DataError: there is no such revision or folder.
    """
    if (Path(name) / "cupy_convt3d" / "__init__.py").is_file():
        return Path(name).resolve()
    git = ["git", "-C", str(PACKAGE.parent)]
    asked = [*git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"]
    try:
        commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise DataError(
            f"--carry-on {shown(name)}: is no revision of a clone at {PACKAGE.parent}, and no folder with cupy_convt3d"
        ) from None
    folder = cache.cache_directory().absolute() / f"revision-{commit}"
    with cache.making(folder.name):
        if not folder.is_dir():
            with scratch.directory(inside=folder.parent) as temporary:
                archive = subprocess.run([*git, "archive", commit, "cupy_convt3d", "kernels"], capture_output=True, check=False)
                if archive.returncode:
                    raise DataError(f"--carry-on {shown(name)}: git archive: {archive.stderr.decode(errors='replace').strip()}")
                subprocess.run(["tar", "-x", "-C", temporary], input=archive.stdout, check=True)
                os.chmod(temporary, 0o700)
                os.rename(temporary, folder)
    return folder


def summary(found: Carried) -> str:
    """Return what is printed: entries that were carried on, by kernel, and each that was not with the difference."""
    lines = [f"{kernel}: {count} carried on" for kernel, count in sorted(found.carried.items())]
    lines += [f"LEFT {e.kernel} [{e.instance}] {e.problem} {e.layout} on {e.device}: {why}" for e, why in found.left]
    counts = f"{found.carried.total()} entries carried on, {len(found.left)} left, {found.current} were current, {found.stale} stale before"
    return "\n".join([*lines, f"{counts}; {found.compiled} instances compiled twice"])


@dataclass(frozen=True)
class _Job:
    """What distinguishes instances, and their launches."""

    kernel: str
    instance: str
    tunables: tuple[tuple[str, int], ...]
    problem: str
    layout: str
    card: Card

    @property
    def asked(self) -> dict[str, Any]:
        arch, multiprocessors = self.card
        tunables = dict(self.tunables)
        layout = output_layout(Problem.parse(self.problem), self.layout)
        return {**vars(self), "tunables": tunables, "arch": arch, "multiprocessors": multiprocessors, "output_layout": layout}

    def __str__(self) -> str:
        return f"{self.kernel} [{self.instance}] {self.problem}"


def _job(entry: Entry, card: Card) -> _Job:
    return _Job(entry.kernel, entry.instance, tuple(sorted(entry.tunables.items())), entry.problem, entry.layout, card)


def _card(device: str) -> Card | None:
    for arch, names in tuning.MEASURED.items():
        if device in names:
            return arch, _MULTIPROCESSORS[device]
    here = _card_here()
    return here[1:] if here is not None and here[0] == device else None


def _card_here() -> tuple[str, str, int] | None:
    from ...backends.cuda import CudaBackend, available

    if not available():
        return None
    backend = CudaBackend()
    return backend.device_name, str(backend.arch), backend.multiprocessors


def _known_cards() -> str:
    here = _card_here()
    return f"known are {', '.join(_MULTIPROCESSORS)}; " + ("there is no GPU here" if here is None else f"the GPU here is {here[0]}")


class _Tree:
    """A package of some revision, asked in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command, environment = process.python(f"exec({_CHILD.read_text()!a}, {{'__name__': '__main__'}})", folder)
        environment.pop("CONVT3D_KERNELS", None)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
        )

    def ask(self, request: str, asked: object = None) -> dict[str, Any]:
        """Return the answer.

        Raises:
            BackendError: the process has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps((request, asked)), file=self._process.stdin, flush=True)
            answer = json.loads(self._process.stdout.readline())
        except (BrokenPipeError, ValueError):
            code = self._process.wait()
            raise BackendError(f"--carry-on: the package in {str(self.folder)!r} cannot be asked (exit code {code})") from None
        return dict(answer)

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


class _Trees:
    """The sources before and after."""

    def __init__(self, before: Path, after: Path) -> None:
        self.before, self.after = before, after
        self._same_text: dict[str, bool] = {}

    def open(self) -> tuple[_Tree, _Tree]:
        return _Tree(self.before), _Tree(self.after)

    def facts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        trees = self.open()
        try:
            answers = [tree.ask("facts") for tree in trees]
        finally:
            for tree in trees:
                tree.close()
        for tree, answer in zip(trees, answers, strict=True):
            if "error" in answer:
                raise BackendError(f"--carry-on: the package in {str(tree.folder)!r}: {answer['error']}")
        return answers[0], answers[1]

    def same_text(self, before: _Tree, after: _Tree, job: _Job) -> bool:
        """Whether the compiler gets the same code for a job's kernel, line by line but for comments and spaces."""
        if job.kernel not in self._same_text:
            texts = [_texts(tree, job) for tree in (before, after)]
            by_place = any(_BY_PLACE.search(text) for text in texts[1].values())
            same = [text if by_place else list(_inlined("", text, {})) for text in texts]
            self._same_text[job.kernel] = same[0] == same[1]
        return self._same_text[job.kernel]


def _texts(tree: _Tree, job: _Job) -> dict[str, str]:
    text = tree.ask("source", job.asked)["text"]
    return {"": text, **includes.headers([text], tree.folder / "kernels" / "include", {}, host=False)}


def _inlined(name: str, texts: Mapping[str, str], number: dict[str, int]) -> Iterator[list[str]]:
    """Yield the lines of a text with those of each header in the place where it is first included: it may lie elsewhere now."""
    for words in _lines(texts[name]):
        header = words[1].strip('"') if words[0] == "#include" and len(words) > 1 else ""
        if header not in texts or header == "":
            yield words
            continue
        first = header not in number
        yield ["#include", str(number.setdefault(header, len(number)))]
        if first:
            yield from _inlined(header, texts, number)


def _lines(text: str) -> list[list[str]]:
    return [words for line in code_alone(re.sub(r"\\[ \t]*\n", "", text)).splitlines() if (words := line.split())]


def _compared(trees: _Trees, jobs: Sequence[_Job], workers: int, progress: Progress | None) -> tuple[dict[_Job, str | None], int]:
    """Return for each job what differs, None where nothing does, and how many had to be compiled."""
    found: dict[_Job, tuple[str | None, bool]] = {}

    def work(mine: Iterator[_Job]) -> None:
        before, after = pair = trees.open()
        try:
            for job in mine:
                found[job] = _difference(trees, before, after, job)
                if progress is not None:
                    progress(len(found), len(jobs), f"{job}: {found[job][0] or 'the same'}")
        finally:
            for tree in pair:
                tree.close()

    share(jobs, workers, work)
    return {job: difference for job, (difference, _) in found.items()}, sum(compiled for _, compiled in found.values())


def _difference(trees: _Trees, before: _Tree, after: _Tree, job: _Job) -> tuple[str | None, bool]:
    """Return what differs between the trees, None if nothing does, and whether it was compiled to know."""
    plans = [tree.ask("plan", job.asked) for tree in (before, after)]
    for where, plan in zip(("before", "now"), plans, strict=True):
        if "error" in plan:
            return f"{where}: {plan['error']}", False
    for key, alike in (("launches", _are_alike), ("workspace", operator.eq)):
        if not alike(plans[0][key], plans[1][key]):
            return f"{key}: {_changed(plans[0][key], plans[1][key])}", False
    same_numbers = plans[0]["launches"] == plans[1]["launches"]
    if same_numbers and plans[0]["options"] == plans[1]["options"] and trees.same_text(before, after, job):
        return None, False
    texts = [tree.ask("assembly", job.asked) for tree in (before, after)]
    if texts[0] == texts[1] and "error" not in texts[0]:
        return None, True
    codes = [tree.ask("code", job.asked) for tree in (before, after)]
    for where, code in zip(("before", "now"), codes, strict=True):
        if "error" in code:
            return f"{where}: {code['error']}", True
    idle = {symbol for plan in plans for symbol in plan["idle"]}  # functions that are not launched
    for name in dict.fromkeys((*codes[0], *codes[1])):
        if name.rpartition(".")[2] in idle or ((idle or not same_numbers) and name.startswith(_ABOUT)):
            continue
        old, new = codes[0].get(name), codes[1].get(name)
        if old != new:
            sizes = [f"{code[0]} bytes" if code else "nothing" for code in (old, new)]
            return f"{name}: {sizes[0]} became " + ("others" if sizes[0] == sizes[1] else sizes[1]), True
    return None, True


def _are_alike(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> bool:
    """Whether launches are the same but for numbers behind all others: where the instructions are, too, nothing reads these."""
    pairs = list(zip(old, new, strict=False))
    numbers = [[list(launch["scalars"].items()) for launch in pair] for pair in pairs]
    return (
        len(old) == len(new)
        and all({**a, "scalars": None} == {**b, "scalars": None} for a, b in pairs)
        and all(few == more[: len(few)] for few, more in (sorted(pair, key=len) for pair in numbers))
    )


def _changed(old: Any, new: Any) -> str:
    """Return the parts of two plans that differ."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return ", ".join(_changed(a, b) for a, b in zip(old, new, strict=True) if a != b)
    if isinstance(old, dict) and isinstance(new, dict):
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return ", ".join(f"{name} {old.get(name)} became {new.get(name)}" for name in names)
    return f"{old} became {new}"
