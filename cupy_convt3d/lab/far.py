"""Tensors past 2^32 elements on the host: only the last blocks of each launch run, over memory that is reserved and not touched.

A far problem is many copies of a near one, along the batch, the groups or the depth. All is zero but the last copy, so the result
there is that of the near problem, and a 32-bit index on the way shows: it ends in pages that must not be touched, or writes nothing.

Where the strides are what passes 2^32, a tiny problem does: its elements lie that far apart, and nothing between them may be touched.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from .. import reference
from ..backends.base import Arguments, TensorRef, run
from ..backends.host import HostBackend
from ..dtypes import DTYPES
from ..kernel import Kernel
from ..problem import Problem
from ..source import Instance
from .tensors import draw_tensors
from .verify import Outcome

Array = np.ndarray[Any, np.dtype[Any]]
FAR = "far"  # the kind of such an example, beside `tensors.KINDS`
_PROBE_COPIES = 40
# How many copies' blocks may be what computes the last copy: a block may have several volumes, or lie behind blocks that do nothing.
_SHARES = (1, 16)
# Elements between neighbours: either half of it, taken alone, leads to another page.
_APART = 2**32 + 2**13
_MOST_BYTES = 2**44  # from the first element of a tensor to the last
APART_LAYOUTS = 3  # by the seed: all elements are apart, or only rows, or only voxels
_NORESERVE = 0x4000  # of Linux; 3.13's mmap has it


def far_problems(pass_name: str) -> list[Problem]:
    """Return the problems whose input and output have a little more than 2^32 elements, or whose weight has more than 2^35.

    One passes it by the batch, one by batch and channels with as many planes, four by the groups (two of them with volumes of few voxels
    and several channels, which a tile has whole: such that are no whole vectors, and such that are), one by the depth of a volume.
    NOTE: past 2^31 alone an index that is unsigned on the way would still come out right.
    """
    copies = 2**22 + 1024
    deep = Problem(2, 1, 1, (copies, 32, 32), (1, 1, 1 if pass_name == "wgrad" else 2))
    if pass_name == "wgrad":  # one weight element: a block sums a range of voxels, and only the last range is not zero
        return [Problem(copies, 1, 1, (4, 8, 32), (1, 1, 1)), deep]
    problems = [
        Problem(copies, 2, 2, (4, 8, 16), (1, 1, 2)),
        Problem(copies, 1024, 1024, (1, 1, 1), (1, 1, 2), groups=1024),
        Problem(1, copies, copies, (4, 8, 32), (1, 1, 2), groups=copies),
        Problem(1, 16 * copies, 16 * copies, (1, 1, 1), (1, 4, 8), groups=copies),
        Problem(1, 32 * copies, 32 * copies, (1, 5, 7), (1, 1, 2), groups=copies),
        Problem(1, 20 * copies, 20 * copies, (1, 4, 16), (1, 1, 2), groups=copies),
        deep,
    ]
    return [replace(problem, bias=pass_name == "fprop") for problem in problems]


def apart_problem() -> Problem:
    """Return the problem whose elements `verify_far` puts 2^32 elements apart, for kernels that can do no other a multiple of it."""
    return Problem(1, 2, 2, (2, 2, 3), (2, 2, 2), (1, 1, 2), (0, 0, 1))


def apart_vectors() -> Problem:
    """Return another such problem, large enough for rows and channels to be read as vectors where they lie together."""
    return Problem(1, 16, 8, (2, 2, 8), (1, 2, 2), (1, 2, 2), (0, 0, 1))


def with_copies(problem: Problem, copies: int) -> Problem:
    """Return the near problem of a far one, that many times (of a deep one that many slices of each volume)."""
    largest = max(problem.batch, problem.groups, problem.input_size[0])
    if largest == problem.batch:
        return replace(problem, batch=copies)
    if largest == problem.groups:
        ins, outs = problem.in_channels // problem.groups, problem.out_channels // problem.groups
        return replace(problem, in_channels=ins * copies, out_channels=outs * copies, groups=copies)
    return replace(problem, batch=1 if copies == 1 else problem.batch, input_size=(copies, *problem.input_size[1:]))


def verify_far(backend: HostBackend, kernel: Kernel, problem: Problem, dtype: str, seed: int) -> Outcome:
    """Run the last blocks of a far problem of `far_problems`, or a tiny problem whose elements are far apart.

    The outcome is ok with a message where nothing can be said: the kernel's last blocks do not compute the last copy, or there is
    no address space.
    """
    near = with_copies(problem, 1)
    try:
        if max(map(math.prod, (problem.input_shape, problem.output_shape, problem.weight_shape))) < 2**31:
            return _run_apart(backend, kernel, problem, dtype, seed)
        for shares in _SHARES:
            if _run_last_blocks(backend, kernel, with_copies(problem, _PROBE_COPIES), near, dtype, seed, shares).ok:
                return _run_last_blocks(backend, kernel, problem, near, dtype, seed, shares)
        return Outcome(True, message="its last blocks do not compute the last volume, so large problems cannot be tried")
    except MemoryError as error:
        return Outcome(True, message=f"large problems cannot be tried: {error}")


def _run_last_blocks(
    backend: HostBackend, kernel: Kernel, far: Problem, near: Problem, dtype: str, seed: int, shares: int
) -> Outcome:
    values = draw_tensors(kernel.pass_name, near, dtype, "exact", seed)
    shapes, written = far.shapes(kernel.pass_name)
    copies = math.prod(shapes[written]) // math.prod(near.shapes(kernel.pass_name)[0][written])
    if kernel.pass_name == "wgrad":
        copies = far.batch * math.prod(far.input_size) // math.prod(near.input_size)
    itemsize = DTYPES[dtype].itemsize
    plan = kernel.plan(far, dtype)
    module = backend.compile(Instance(kernel, dtype))
    with ExitStack() as stack:
        refs, last = {}, {}
        for name, shape in shapes.items():
            address = stack.enter_context(_reserved(math.prod(shape) * itemsize))
            refs[name] = TensorRef(address, shape, _contiguous(shape))
            size = math.prod(near.shapes(kernel.pass_name)[0][name])
            last[name] = _array(address + (math.prod(shape) - size) * itemsize, size, dtype)
            if name != written:
                last[name][:] = values[name].ravel()
        for name, numel in plan.workspace.items():
            address = stack.enter_context(_reserved(numel * DTYPES[dtype].accumulate.itemsize))
            refs[name] = TensorRef(address, (numel,), (1,))
        for launch in plan.launches:
            blocks = math.prod(launch.grid)
            count = min(blocks, -(-blocks * shares // copies) + 1)
            module.launch(launch, Arguments(launch, far, refs), first_block=blocks - count, blocks=count)
        got = last[written].copy()
    expected = reference.run(kernel.pass_name, near, values).astype(DTYPES[dtype].numpy).ravel()
    wrong = ~(got == expected)
    if not wrong.any():
        return Outcome(True)
    index = int(np.argmax(wrong))
    message = f"wrong value in the last volume of {copies}, past 2^32 elements; {int(wrong.sum())} of {wrong.size} elements"
    return Outcome(False, 0.0, message, (index,), float(expected[index]), float(got[index]))


def _run_apart(backend: HostBackend, kernel: Kernel, problem: Problem, dtype: str, seed: int) -> Outcome:
    values = draw_tensors(kernel.pass_name, problem, dtype, "exact", seed)
    shapes, written = problem.shapes(kernel.pass_name)
    spaces: list[Array] = []

    def allocate(_: str, size: int) -> int:
        spaces.append(np.zeros(size, np.uint8))
        return int(spaces[-1].ctypes.data)

    with ExitStack() as stack:
        refs, views = {}, {}
        for name, shape in shapes.items():
            strides = _apart(shape, seed) if len(shape) == 5 and kernel.takes_strides(name) else _contiguous(shape)
            views[name] = stack.enter_context(_scattered(shape, strides, dtype))
            refs[name] = TensorRef(int(views[name].ctypes.data), shape, strides)
            if name != written:
                views[name][...] = values[name]
        run(backend, kernel, problem, dtype, refs, allocate)
        got = views[written].copy()
    expected = reference.run(kernel.pass_name, problem, values).astype(DTYPES[dtype].numpy)
    wrong = ~(got == expected)
    if not wrong.any():
        return Outcome(True)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    message = f"wrong value where elements lie 2^32 elements apart; {int(wrong.sum())} of {wrong.size} elements"
    return Outcome(False, 0.0, message, index, float(expected[index]), float(got[index]))


def _apart(shape: tuple[int, ...], seed: int) -> tuple[int, ...]:
    layout = seed % APART_LAYOUTS
    strides, step = [0] * len(shape), _APART
    for axis in ([4, 3, 2, 1, 0], [3, 2, 1, 0], [4, 3, 2, 0])[layout]:
        strides[axis] = step
        step *= max(1, shape[axis])
    if layout:
        strides[(4, 1)[layout - 1]] = 1
    return tuple(strides)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _array(address: int, count: int, dtype: str) -> Array:
    size = DTYPES[dtype].itemsize
    memory = memoryview((ctypes.c_ubyte * (count * size)).from_address(address))
    return np.ndarray((count,), DTYPES[dtype].numpy, memory)


@contextmanager
def _reserved(size: int) -> Iterator[int]:
    """Yield the address of that many zero bytes, with pages on both sides, as far as a 32-bit index reaches, that fault.

    Raises:
        MemoryError: the system does not give that much address space.
    """
    page = mmap.PAGESIZE
    inside = -(-max(size, 1) // page) * page
    with _faulting(inside) as (start, allow):
        allow(start, inside)
        yield start + (inside - size) // 16 * 16  # the end lies at a page that faults, but for alignment


@contextmanager
def _scattered(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Iterator[Array]:
    """Yield a tensor in memory of which only the pages that hold its elements do not fault.

    Raises:
        MemoryError: the system does not give that much address space.
    """
    kind, page = DTYPES[dtype].numpy, mmap.PAGESIZE
    last = sum(step * (count - 1) for step, count in zip(strides, shape, strict=True))
    size = 0 if 0 in shape else (last + 1) * kind.itemsize
    if size > _MOST_BYTES:
        raise MemoryError(f"a tensor of {size} bytes from its first element to the last")
    offsets = sum(np.arange(count)[(...,) + (None,) * (len(shape) - a - 1)] * strides[a] for a, count in enumerate(shape))
    with _faulting(-(-size // page) * page) as (start, allow):
        for number in np.unique(np.asarray(offsets) * kind.itemsize // page):
            allow(start + int(number) * page, page)
        memory = memoryview((ctypes.c_ubyte * size).from_address(start))
        yield np.ndarray(shape, kind, memory, 0, tuple(step * kind.itemsize for step in strides))


@contextmanager
def _faulting(size: int) -> Iterator[tuple[int, Callable[[int, int], None]]]:
    """Yield the address of that many bytes that fault, as what surrounds them does, and a function that allows some of them."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    guard = 2**32 * 8

    def allow(address: int, count: int) -> None:
        if library.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(count), mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"no memory for {count} bytes")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        start = library.mmap(None, size + 2 * guard, 0, flags, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"no address space for {size} bytes")
        try:
            yield start + guard, allow
        finally:
            library.munmap(ctypes.c_void_p(start), ctypes.c_size_t(size + 2 * guard))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
