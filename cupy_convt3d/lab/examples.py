"""What of a kernel can be run as an example: its configurations, element types, kinds of tensors, and problems it can do."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .. import registry
from ..kernel import Kernel
from ..problem import Problem
from . import strategies
from .far import FAR
from .tensors import KINDS, WIDE

# The tunables of a kernel that are tile sizes, and the quantity whose tails they have.
_TILES = {
    "TILE_VOXELS": "output_voxels",
    "TILE_CHANNELS": "out_channels_per_group",
    "TILE_DEPTH": "in_channels_per_group",
    "SPLIT_VOXELS": "input_voxels",
}
_LARGEST_TILE = 256  # its tails must be tiny problems still
# Ranges that a sum is split into: any length is right, and no tiny problem has two ranges of the shipped one. With fewer threads
# than voxels in a range each of them takes more than one.
_SHORT_SPLITS = {"SPLIT_VOXELS": 8, "BLOCK_THREADS": 4}
# A kernel that declares no tile for a quantity may have one all the same, of a power of two.
_UNKNOWN_TILES = dict.fromkeys(("output_voxels", "in_channels_per_group", "out_channels_per_group"), (5, 9, 17, 33, 65, 129))
_CHANNEL_FACTORS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Example:
    """One run of a kernel: what `Worker.verify` takes."""

    kernel: Kernel
    problem: Problem
    dtype: str
    kind: str
    seed: int


def configurations(kernel: Kernel) -> list[Kernel]:
    """Return the kernel, and with it the same with short splits where its own are too long for a tiny problem to have two."""
    if kernel.tunables.get("SPLIT_VOXELS", 0) <= _LARGEST_TILE:
        return [kernel]
    return [kernel, kernel.replace_tunables(**{name: n for name, n in _SHORT_SPLITS.items() if name in kernel.tunables})]


def tiles(kernel: Kernel) -> dict[str, int]:
    """Return the kernel's tile sizes by the quantity that they cut, as `strategies.problems` takes them."""
    return {_TILES[name]: size for name, size in kernel.tunables.items() if name in _TILES and size <= _LARGEST_TILE}


def tails(kernel: Kernel, dtype: str) -> list[Problem]:
    """Return the smallest problems at the tails of the kernel's tiles that it can do: one less than a tile, one, one more, two.

    The voxels lie on the last axis, and once more on all three with a stride, where residue classes differ in size.
    """
    found: dict[Problem, None] = {}
    declared = {quantity: (tile - 1, tile, tile + 1, 2 * tile + 1) for quantity, tile in tiles(kernel).items()}
    for quantity, sizes in {**_UNKNOWN_TILES, **declared}.items():
        for size in sizes:
            if quantity.endswith("voxels"):
                one = Problem(1, 1, 1, (1, 1, max(1, size)), (1, 1, 2))
                drawn = [one, replace(one, stride=(1, 1, 2), kernel_size=(1, 1, 3), batch=2)]
            else:
                ins, outs = (size, 2) if quantity == "in_channels_per_group" else (2, size)
                one = Problem(1, max(1, ins), max(1, outs), (1, 1, 2), (1, 1, 2), bias=kernel.pass_name == "fprop")
                drawn = [one, replace(one, in_channels=2 * one.in_channels, out_channels=2 * one.out_channels, groups=2)]
            found |= dict.fromkeys(fit for problem in drawn if (fit := fitting(kernel, problem, dtype)))
    return list(found)


def combinations(dtypes: Sequence[str], kinds: Sequence[str] = KINDS) -> list[tuple[str, str]]:
    """Return (kind, dtype), exact before random; only some dtypes keep wide integers."""
    pairs = [(kind, dtype) for kind in (*KINDS, FAR) if kind in kinds for dtype in dtypes]
    return [(kind, dtype) for kind, dtype in pairs if kind != "exact_wide" or dtype in WIDE]


def variants(problem: Problem) -> Iterator[Problem]:
    """Yield the problem, then the same with more channels in each group, for kernels that ask for multiples of a tile."""
    for factor in _CHANNEL_FACTORS:
        yield replace(problem, in_channels=problem.in_channels * factor, out_channels=problem.out_channels * factor)


def fitting(kernel: Kernel, problem: Problem, dtype: str) -> Problem | None:
    """Return the first variant of the problem that the kernel can do, or None."""
    return next((variant for variant in variants(problem) if kernel.why_not(variant, dtype) is None), None)


def draw_example(kernel: Kernel, seed: str) -> Example | None:
    """Return the example that a seed stands for, the same for the same arguments; None: the kernel cannot do it."""
    generator = random.Random(seed)
    kind, dtype = generator.choice(combinations(kernel.dtypes))
    drawn = strategies.draw_problem(generator.randint, kernel.pass_name, tiles=tiles(kernel))
    problem = fitting(kernel, drawn, dtype)
    return None if problem is None else Example(kernel, problem, dtype, kind, generator.randrange(2**16))


def reproduce(example: Example, backend: str, sanitize: str | None) -> str:
    """Return the shell line that runs an example again."""
    kernel = example.kernel
    shipped = registry.kernels().get(kernel.name)
    what = kernel.name if kernel.path is None or (shipped is not None and shipped.path == kernel.path) else str(kernel.path)
    options = [f"--sanitize {sanitize}"] if sanitize else []
    options += [f"--tunable {name}={value}" for name, value in kernel.changed_tunables.items()]
    options += [f"--problem {example.problem} --dtype {example.dtype} --kind {example.kind} --seed {example.seed}"]
    return " ".join([f"convt3d check {shlex.quote(what)} --backend {backend}", *options])
