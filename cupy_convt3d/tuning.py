"""The tuning database: which kernel, in which configuration, was quickest for a problem on a device.

A JSON file with one entry a line: a kernel's best configuration for a problem on a device, with the digest of the kernel's code and
its times. What ships with the package is `tuning.json` beside this module; `convt3d tune` and trials at a first call (`trials`) keep
the user's own in the cache directory, or in `CONVT3D_TUNING`. An entry counts only while the kernel's code is what was measured.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from . import cache, records, registry
from .dtypes import DTYPES, allowed_instances
from .errors import CacheWarning, DataError, KernelError, ProblemError
from .files import locked, read_text, write_whole
from .kernel import MOST_TUNABLE, Kernel, Limits
from .problem import LAYOUTS, PASSES, Problem
from .source import code_digest

FORMAT = 1
SHORTEST_MS, LONGEST_MS = 1e-6, 1e9
SHIPPED = Path(__file__).parent / "tuning.json"
LIBRARY = "library"  # in place of a kernel: torch's own operator, measured beside ours
# Cards that were measured, by architecture: what is known of one serves the others of its kind until they are measured themselves. Not
# those of other architectures, however near: sm_86 has other ratios of memory, CUDA cores and tensor cores than sm_80.
MEASURED = {"sm_90a": ("NVIDIA H100 80GB HBM3", "NVIDIA H200")}


class Question(NamedTuple):
    """What an entry answers.

    Attributes:
        device: `Backend.device_name`.
        pass_name: "fprop", "dgrad" or "wgrad".
        precision: the loosest arithmetic allowed, of `dtypes.DTYPES`.
        layout: "ncdhw" or "channels_last".
    """

    device: str
    pass_name: str
    precision: str
    layout: str


@dataclass(frozen=True)
class Entry:
    """A kernel's best configuration for one problem, as it was measured.

    Attributes:
        device, pass_name, precision, layout: as in `Question`.
        problem: its short name.
        kernel, digest: its name, and its `source.code_digest` when it was timed; "library" for torch's own operator, without one.
        instance: the dtype it is compiled for; it may be stricter than `precision`.
        tunables: those that are searched; the others are the source's defaults or follow from the problem.
        median_ms, with_packing_ms: with the packed weight kept, and packed in each call.
        versions: what `versions` said, of what was measured in a trial at the first call: it holds for these alone. Else empty.
    """

    device: str
    pass_name: str
    problem: str
    precision: str
    layout: str
    kernel: str
    digest: str
    instance: str
    tunables: Mapping[str, int]
    median_ms: float
    with_packing_ms: float
    versions: str = ""

    @property
    def question(self) -> Question:
        return Question(self.device, self.pass_name, self.precision, self.layout)

    def milliseconds(self, packed: bool) -> float:
        return self.median_ms if packed else self.with_packing_ms


@dataclass(frozen=True)
class Tuned:
    """What the database proposes: a kernel with its tunables set, the dtype to compile it for, and on what grounds."""

    kernel: Kernel
    instance: str
    device: str  # that it was measured on
    elapsed_ms: float
    library_ms: float | None = None  # of torch's own operator, measured beside it


class Database:
    """Entries, at most one for each question, problem and kernel."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[tuple[Question, str, str], Entry] = {}
        self._recorded: set[tuple[Question, str, str]] = set()  # since the file was read
        for entry in entries:
            self.record(entry)

    @classmethod
    def load(cls, path: Path) -> Database:
        """Return the database of a file: empty if there is none; a damaged or foreign one is ignored with a `CacheWarning`."""
        try:
            return cls.read(path)
        except DataError as error:
            warnings.warn(f"{error}; the database was ignored", CacheWarning, stacklevel=2)
            return cls()

    @classmethod
    def read(cls, path: Path) -> Database:
        """Return the database of a file: empty if there is none.

        Raises:
            DataError: it is damaged or foreign; the message names file, line and field.
        """
        where = f"tuning database {str(path)!r}"
        try:
            text = read_text(path)
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise DataError(f"{where}: cannot be read: {error}") from None
        data = records.of_format(records.parse(text, where), where, FORMAT)
        entries = records.sequence(data.get("entries"), f"{where}: entries")
        an_entry_a_line = text.count("\n") == len(entries) + 2
        names = (f"line {number + 1}" if an_entry_a_line else f"entry {number}" for number in range(1, len(entries) + 1))
        database = cls(_entry(entry, f"{where}, {name}") for entry, name in zip(entries, names, strict=True))
        database._recorded.clear()
        return database

    def save(self, path: Path) -> None:
        """Write the file; other processes see all of it or none.

        Raises:
            OSError: it cannot be written; what was there is still there.
        """
        entries = (asdict(self._entries[key]) for key in sorted(self._entries))
        lines = [json.dumps(_written(entry), sort_keys=True, separators=(",", ":")) for entry in entries]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, f'{{"format": {FORMAT}, "entries": [\n' + ",\n".join(lines) + "\n]}\n")
        registry.revise()

    def merge(self, path: Path) -> None:
        """Put what was recorded here since it was read into the file as it is now, and take in what others have put there.

        Raises:
            DataError: the file has been damaged meanwhile, or cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.with_name(path.name + ".lock")):
                there = Database.read(path)
                for key in self._recorded:
                    there._entries[key] = self._entries[key]
                there.save(path)
        except OSError as error:
            raise DataError(f"tuning database {str(path)!r}: cannot be written: {error}") from None
        self._entries = there._entries
        self._recorded.clear()

    def record(self, entry: Entry) -> None:
        """Add an entry; it takes the place of the same kernel's for that question and problem."""
        key = entry.question, entry.problem, entry.kernel
        self._entries[key] = entry
        self._recorded.add(key)

    def find(self, question: Question, problem: Problem, kernel: Kernel) -> Entry | None:
        """Return what a search has found of this kernel for this very problem, None if its code has changed since."""
        entry = self._entries.get((question, str(problem), kernel.name))
        return entry if entry is not None and not entry.versions and entry.digest == code_digest(kernel) else None

    def of(self, question: Question, problem: Problem) -> list[Entry]:
        """Return what was measured for a question on this very problem; stale entries too."""
        name = str(problem)
        return [entry for (asked, measured, _), entry in self._entries.items() if measured == name and asked == question]

    def entries(self, question: Question | None = None) -> list[Entry]:
        """Return the entries that answer a question, or all of them; stale ones too."""
        return [entry for entry in self._entries.values() if question in (None, entry.question)]


_unsaved: Database = Database()  # what `remember` could not write


def lookup(
    question: Question,
    problem: Problem,
    *,
    packed: bool = False,
    arch: str | None = None,
    limits: Limits | None = None,
    deterministic: bool = True,
    kernels: Mapping[str, Kernel] | None = None,
) -> Tuned | None:
    """Return the quickest configuration that was measured on this very problem, on the device or on another card of its architecture
    (`MEASURED`), else None.

    Configurations that spread NaN are left out: torch's operator does not.

    Cheap enough for every call: the files are read again only when they have changed, and answers are kept.

    Args:
        question: device, pass, precision, layout.
        problem: what is to be computed.
        packed: whether the packed weight is kept, so that packing is not in the time.
        arch, limits: the GPU's, as `Kernel.why_not` takes them; kernels that cannot run on it are left out.
        deterministic: whether kernels that may give other bits the second time are left out.
        kernels: the candidates; None: the registered ones of the pass.
    """
    known = registry.kernels(question.pass_name) if kernels is None else kernels
    kernels_and_files = tuple(known.values()), state()
    devices = dict.fromkeys((question.device, *MEASURED.get(arch or "", ())))
    asked = (question._replace(device=device) for device in devices)
    here = versions(), registry.revision
    answers = (_lookup(one, problem, packed, arch, limits, deterministic, *kernels_and_files, *here) for one in asked)
    return next((answer for answer in answers if answer is not None), None)


def measured(question: Question, problem: Problem, packed: bool, arch: str | None) -> dict[str, tuple[float, str]]:
    """Return what each kernel took at its best for this very problem, in ms, and on which card: this, or another of its architecture."""
    found: dict[str, tuple[float, str]] = {}
    for device in dict.fromkeys((question.device, *MEASURED.get(arch or "", ()))):
        for path, mark in state():
            for entry in _loaded(path, mark).of(question._replace(device=device), problem):
                found.setdefault(entry.kernel, (entry.milliseconds(packed), device))
    return found


def remember(entries: Sequence[Entry]) -> None:
    """Put what a trial has measured into the user's database; where that cannot be written, it counts in this process alone."""
    try:
        Database(entries).merge(user_path())
    except DataError as error:
        warnings.warn(f"{error}; what was measured at the first call is kept in this process alone", CacheWarning, stacklevel=2)
        for entry in entries:
            _unsaved.record(entry)
        registry.revise()


def versions() -> str:
    """Return the versions that a trial's entries hold for: torch's and cuDNN's; empty while torch is not loaded."""
    return _versions() if "torch" in sys.modules else ""


@lru_cache(maxsize=1)
def _versions() -> str:
    torch = sys.modules["torch"]
    return f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}"


def state() -> tuple[tuple[str, tuple[int, int] | None], ...]:
    """Return the database's files with their times and sizes: while it is the same, so are the answers."""
    return tuple((path, stamp(path)) for path in (_user_path(*_variables()), str(SHIPPED)))


def user_path() -> Path:
    """Return the file of the user's own results: `CONVT3D_TUNING`, else `tuning.json` in the cache directory."""
    return Path(_user_path(*_variables()))


@lru_cache(maxsize=1024)
def configured(kernel: Kernel, tunables: tuple[tuple[str, int], ...]) -> Kernel:
    """Return the kernel with these tunables: the same object each time, by which backends know what they have compiled.

    Raises:
        KernelError: a name is none of the kernel's tunables.
    """
    values = dict(tunables)
    return kernel if values == dict(kernel.tunables) else kernel.replace_tunables(**values)


def fitted(kernel: Kernel, entry: Entry) -> Kernel:
    """Return the kernel in the configuration that an entry found quickest.

    Macros that follow from the problem keep their defaults: whatever an entry says of them is not used.

    Raises:
        KernelError: it is no configuration that `convt3d tune` could have found: a name or value that the kernel does not list, or an
            instance that it does not have.
    """
    if entry.instance not in kernel.dtypes or entry.instance not in allowed_instances(entry.precision):
        raise KernelError(f"instance={entry.instance!r}: {kernel.name} has {', '.join(kernel.dtypes)} for {entry.precision}")
    values = {name: value for name, value in entry.tunables.items() if name not in kernel.specialize}
    for name, value in values.items():
        listed = (*kernel.search.get(name, ()), kernel.tunables.get(name))
        if value not in listed:
            raise KernelError(f"tunables.{name}={value}: must be one of {', '.join(map(str, listed))} for {kernel.name}")
    return configured(kernel, tuple(sorted(values.items())))


def stale(entries: Iterable[Entry]) -> int:
    """Return how many entries no longer count: their kernel has changed or is gone."""
    digests = {name: code_digest(kernel) for name, kernel in registry.kernels().items()}
    return sum(entry.kernel != LIBRARY and digests.get(entry.kernel) != entry.digest for entry in entries)


def _entry(value: object, where: str) -> Entry:
    """Return an entry whose every field is of its type and in its range; raises DataError for any other."""
    entry = records.make(Entry, value, where)
    for name, known in (("pass_name", PASSES), ("precision", DTYPES), ("layout", LAYOUTS)):
        records.one_of(getattr(entry, name), known, f"{where}: {name}")
    records.one_of(entry.instance, allowed_instances(entry.precision), f"{where}: instance")
    for name, number in entry.tunables.items():
        records.within(number, 0, MOST_TUNABLE, f"{where}: tunables.{name}")
    for name in ("median_ms", "with_packing_ms"):
        records.within(getattr(entry, name), SHORTEST_MS, LONGEST_MS, f"{where}: {name}")
    try:
        Problem.parse(entry.problem)
    except ProblemError as error:
        raise DataError(f"{where}: problem: {error}") from None
    return entry


def _variables() -> tuple[str | None, str | None]:
    return os.environ.get("CONVT3D_TUNING"), os.environ.get("CONVT3D_CACHE")


@lru_cache(maxsize=8)
def _user_path(given: str | None, cache_variable: str | None) -> str:
    return given or str(cache.cache_directory() / "tuning.json")


def stamp(path: str) -> tuple[int, int] | None:
    """Return what changes with a file: its time and size; None: there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _loaded(path: str, stamp: tuple[int, int] | None) -> Database:
    return Database() if stamp is None else Database.load(Path(path))


@lru_cache(maxsize=4096)
def _lookup(
    question: Question,
    problem: Problem,
    packed: bool,
    arch: str | None,
    limits: Limits | None,
    deterministic: bool,
    kernels: tuple[Kernel, ...],
    stamps: tuple[tuple[str, tuple[int, int] | None], ...],
    versions: str,
    revision: int,  # grows with what is `_unsaved`
) -> Tuned | None:
    known = {kernel.name: kernel for kernel in kernels if kernel.deterministic or not deterministic}
    databases = (_unsaved, *(_loaded(path, mark) for path, mark in stamps))
    entries = [one for database in databases for one in database.of(question, problem) if one.versions in ("", versions)]
    library_ms = next((entry.milliseconds(packed) for entry in entries if entry.kernel == LIBRARY), None)
    for entry in sorted(entries, key=lambda entry: entry.milliseconds(packed)):
        kernel = known.get(entry.kernel)
        if kernel is None or entry.digest != code_digest(kernel):
            continue
        try:
            kernel = fitted(kernel, entry)
        except KernelError as error:
            warnings.warn(f"an entry of the tuning database for {entry.problem} was ignored: {error}", CacheWarning, stacklevel=2)
            continue
        if kernel.why_not(problem, entry.instance, arch, limits) or kernel.why_spreads_nan(problem, entry.instance):
            continue
        return Tuned(kernel, entry.instance, question.device, entry.milliseconds(packed), library_ms)
    return None


def _written(entry: Mapping[str, object]) -> dict[str, object]:
    """Return an entry's fields as a file has them: times to five digits, and no versions where there are none."""
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) else value
        for name, value in entry.items()
        if (name, value) != ("versions", "")
    }
