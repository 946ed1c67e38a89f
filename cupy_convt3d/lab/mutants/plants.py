"""Plants: mistakes that engineers make, several tokens and one idea wrong, put into shipped kernels. A check worth its name finds them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from ... import registry
from ...errors import CompileError, FindingsError, KernelError, shown
from ...kernel import Kernel, tomllib
from ...source import include_directory
from ..check import check
from ..progress import Progress

_KEYS = {"name", "kernel", "idea", "changes"}
_MOST_MESSAGE = 120  # letters that are kept


@dataclass(frozen=True)
class Plant:
    """A mistake.

    Attributes:
        kind: the class of mistakes that it belongs to.
        name: what is wrong, in a few words; no other plant has it.
        kernel: the registered kernel that it is judged with.
        idea: why somebody would write it so.
        changes: pairs of a text and what stands there instead. Blanks and line ends of the text count alike.
        file: the header that is changed, by its name among the package's; "": the kernel's source.
    """

    kind: str
    name: str
    kernel: str
    idea: str
    changes: tuple[tuple[str, str], ...]
    file: str = ""

    def __str__(self) -> str:
        return f"plant {self.name!r} ({self.kind}, {self.kernel}{f', {self.file}' if self.file else ''})"


@dataclass(frozen=True)
class Judgement:
    """What the check, as it is by default, made of a plant.

    Attributes:
        kind, name, kernel: of the plant.
        caught: whether the check found a problem that the planted kernel fails.
        elapsed_s: how long the check took.
        problem, dtype, tensors, message: the smallest such problem that it found, with which element type and kind of tensors, and
            the beginning of what it said; "" if it found none.
    """

    kind: str
    name: str
    kernel: str
    caught: bool
    elapsed_s: float
    problem: str = ""
    dtype: str = ""
    tensors: str = ""
    message: str = ""


def plants(folder: Path) -> list[Plant]:
    """Return the plants of a folder's TOML files, of which each is named for a class: `[[plant]]` tables with the fields of `Plant`.

    Raises:
        FindingsError: there are none, or a file cannot be read; the message names it.
    """
    found = [plant for path in sorted(folder.glob("*.toml")) for plant in _read(path)]
    names = [plant.name for plant in found]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise FindingsError(f"plants {str(folder)!r}: name={min(repeated)!r}: is that of two plants")
    if not found:
        raise FindingsError(f"plants {str(folder)!r}: has no plant in a TOML file")
    return found


def _read(path: Path) -> list[Plant]:
    try:
        entries = tomllib.loads(path.read_text()).get("plant", [])
        for entry in entries:
            if not _KEYS <= entry.keys() <= _KEYS | {"file"} or not entry["changes"]:
                raise ValueError(f"{shown(entry.get('name'))}: must have {', '.join(sorted(_KEYS))}, may have file, and nothing else")
        return [
            Plant(**{**entry, "kind": path.stem.replace("_", " "), "changes": tuple((old, new) for old, new in entry["changes"])})
            for entry in entries
        ]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise FindingsError(f"plants {str(path)!r}: cannot be read: {error}") from None


def planted(plant: Plant) -> Kernel:
    """Return the kernel with the mistake.

    Raises:
        FindingsError: the plant does not apply any more: a text of it is not there, or more than once.
        KernelError: there is no such kernel.
    """
    kernel = registry.kernel(plant.kernel)
    path = include_directory() / plant.file
    if plant.file and not path.is_file():
        raise FindingsError(f"{plant}: file={plant.file!r}: is no header of the package")
    text = path.read_text() if plant.file else kernel.source
    for old, new in plant.changes:
        pattern = r"\s+".join(map(re.escape, old.split()))
        if (count := len(re.findall(pattern, text))) != 1:
            raise FindingsError(f"{plant}: {shown(old)} is there {count} times, and must be once: mend the plant")
        text = re.sub(pattern, lambda _, new=new: new, text)  # type: ignore[misc]
    return kernel.replace_headers({plant.file: text}) if plant.file else kernel.replace_source(text)


def judge(plant: Plant) -> Judgement:
    """Check a planted kernel on the host with the check's defaults.

    Raises:
        FindingsError: it does not apply or compile, so that it says nothing of the check.
    """
    kernel, start = planted(plant), time.perf_counter()
    try:
        report = check(kernel, backend="host")
    except (KernelError, CompileError) as error:
        raise FindingsError(f"{plant}: {error}") from None
    elapsed_s = round(time.perf_counter() - start, 1)
    found = report.counterexample
    if found is None:
        return Judgement(plant.kind, plant.name, plant.kernel, False, elapsed_s)
    of = (plant.kind, plant.name, plant.kernel, True, elapsed_s)
    return Judgement(*of, str(found.problem), found.dtype, found.kind, _without_folders(found.message)[:_MOST_MESSAGE])


def _without_folders(message: str) -> str:
    """Return a message with the package's files named from its folder on, the same wherever that lies."""
    return message.replace(f"{include_directory().parent.parent}/", "")


def judge_plants(
    chosen: Sequence[Plant], *, workers: int = 1, progress: Progress | None = None, done: Callable[[Judgement], None] | None = None
) -> list[Judgement]:
    """Judge plants, in as many processes as there are workers, and return what came of each, in their order.

    `progress` and `done` are called after each.

    Raises:
        FindingsError: as in `judge`, before any is judged where one does not apply.
    """
    for plant in chosen:
        planted(plant)
    judgements: dict[str, Judgement] = {}
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting = [pool.submit(judge, plant) for plant in chosen]
        try:
            for future in as_completed(waiting):
                judgement = future.result()
                judgements[judgement.name] = judgement
                if done is not None:
                    done(judgement)
                if progress is not None:
                    verdict = "caught" if judgement.caught else "not caught"
                    progress(len(judgements), len(chosen), f"{judgement.kernel}: {verdict}, {judgement.name}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [judgements[plant.name] for plant in chosen]
