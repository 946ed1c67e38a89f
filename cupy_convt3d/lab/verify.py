"""One example: a kernel run on drawn tensors between guard bands, and what is wrong with what it wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import reference
from ..backends.base import Backend, Prepared, TensorRef
from ..dtypes import DTYPES
from ..errors import LaunchError
from ..kernel import Kernel
from ..problem import Problem
from .tensors import NAN, draw_tensors

Array = np.ndarray[Any, np.dtype[Any]]
LAYOUTS = ("contiguous", "channels_last", "padded")
# Seeds from here on: one axis, 0 to 4, of channels_last, then of contiguous tensors, lies otherwise; see `_apart`. With eight of an
# axis only that axis is not aligned.
APART = 2**16 + 1
_GAPS, _LATE = (7, 1, 1, 0, 14, 0), (2, 3)
_GUARD = 2048  # elements on either side; a multiple of every vector load's alignment
# Bit patterns by element type. UNWRITTEN fills the output, STRAY the guards and gaps, OUTSIDE all that must not be read:
# quiet NaNs with payloads of their own, since arithmetic hands the payload of an operand on.
_UNWRITTEN = {"fp64": 2**64 - 1, "fp32": 2**32 - 1, "fp16": 2**16 - 1, "bf16": 2**16 - 1}
_REFILLED = {"fp64": 0x4009200000000000, "fp32": 0x40490000, "fp16": 0x4248, "bf16": 0x4049}  # 3.140625, to tell adding apart
_STRAY = {"fp64": 0x7FF8A5A5A5A5A5A5, "fp32": 0x7FC0A5A5, "fp16": 0x7EA5, "bf16": 0x7FE5}
_OUTSIDE = {"fp64": 0x7FF85A5A5A5A5A5A, "fp32": 0x7FC05A5A, "fp16": 0x7E5A, "bf16": 0x7FDA}
_NAMES = {np.dtype(np.float64): "fp64", np.dtype(np.float32): "fp32"}


@dataclass
class Outcome:
    """What became of one example.

    Attributes:
        ok: nothing was found.
        ratio: worst error over its bound for kind "random"; 0 for the exact kinds.
        message: what was found, in one sentence.
        index, expected, got: the first wrong element of the written tensor.
    """

    ok: bool
    ratio: float = 0.0
    message: str = ""
    index: tuple[int, ...] | None = None
    expected: float | None = None
    got: float | None = None


class _HostMemory:
    """Tensors of the host backend are NumPy's own."""

    def put(self, array: Array) -> Any:
        return array

    def get(self, handle: Any) -> Array:
        return np.asarray(handle)

    def pointer(self, handle: Any) -> int:
        return int(handle.__array_interface__["data"][0])  # four times as fast as .ctypes.data


class _DeviceMemory:
    """Tensors of the CUDA backend are CuPy's; copies wait for the launches before them."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def put(self, array: Array) -> Any:
        return self._cupy.asarray(array)

    def get(self, handle: Any) -> Array:
        return np.asarray(self._cupy.asnumpy(handle))

    def pointer(self, handle: Any) -> int:
        return int(handle.data.ptr)


@dataclass
class _Placed:
    """A tensor inside a larger buffer of unsigned integers: where it starts, its strides, and where the buffer is."""

    bits: Array  # the host's copy
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    handle: Any = None

    def view(self, bits: Array) -> Array:
        size = bits.itemsize
        return np.ndarray(self.shape, bits.dtype, bits, self.start * size, tuple(step * size for step in self.strides))


@dataclass
class _Example:
    """What every run of one example shares."""

    backend: Backend
    kernel: Kernel
    problem: Problem
    dtype: str
    kind: str
    seed: int
    memory: _HostMemory | _DeviceMemory = field(init=False)
    guard: int = field(init=False)
    prepared: Prepared | None = field(init=False, default=None)  # by the first run

    def __post_init__(self) -> None:
        self.memory = _HostMemory() if self.backend.name == "host" else _DeviceMemory()
        # The address sanitizer's own red zones begin right at the end of an allocation.
        self.guard = 0 if getattr(self.backend, "sanitizer", None) == "address" else _GUARD

    @property
    def element(self) -> str:
        return DTYPES[self.dtype].element

    def place(self, name: str, shape: tuple[int, ...], fill: int, generator: np.random.Generator | None) -> _Placed:
        layout = "contiguous"
        if generator is not None and len(shape) == 5 and self.kernel.takes_strides(name):
            layout = LAYOUTS[int(generator.integers(len(LAYOUTS)))] if self.seed < APART else "apart"
        number = (self.seed - APART) % (10 * len(_GAPS))
        strides, span = _strides(shape, layout, generator) if layout != "apart" else _apart(shape, number)
        late = int(layout == "apart" and number // 10 in _LATE)
        unsigned = np.dtype(f"u{DTYPES[self.dtype].itemsize}")
        return _Placed(np.full(span + late + 2 * self.guard, fill, unsigned), self.guard + late, shape, strides)


def _strides(shape: tuple[int, ...], layout: str, generator: np.random.Generator | None) -> tuple[tuple[int, ...], int]:
    """Return strides in elements, and how many elements from the first to the last."""
    order, gaps = list(range(len(shape))), [0] * len(shape)
    if layout == "channels_last":
        order = [0, 2, 3, 4, 1]
    elif layout == "padded" and generator is not None:
        order = [int(a) for a in generator.permutation(len(shape))]
        gaps = [int(g) for g in generator.integers(0, 3, len(shape))]
    return _steps(shape, order, gaps)


def _apart(shape: tuple[int, ...], number: int) -> tuple[tuple[int, ...], int]:
    """Return the same for the layouts of `APART`: ten each of a gap of 7 elements, of 1, of 1 and a tensor that begins an element late,
    of no gap and late, of a gap of 14, and of an axis that is taken out from between the others, which stay as far apart as they were.
    """
    kind, axis = number // 10, number % 5
    order = [0, 2, 3, 4, 1] if number % 10 < 5 else [0, 1, 2, 3, 4]
    gaps = [0] * len(shape)
    gaps[axis] = min(_GAPS[kind], 1) if order[-1] == axis else _GAPS[kind]
    strides, span = _steps(shape, order, gaps)
    if kind < len(_GAPS) - 1:
        return strides, span
    pulled = tuple(span if a == axis else step for a, step in enumerate(strides))
    return pulled, _span(shape, pulled)


def _steps(shape: tuple[int, ...], order: list[int], gaps: list[int]) -> tuple[tuple[int, ...], int]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        step += gaps[axis]
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides), _span(shape, strides)


def _span(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def verify(
    backend: Backend, kernel: Kernel, problem: Problem, dtype: str, kind: str, seed: int, *, once: bool = False
) -> Outcome:
    """Run one example twice (on the host the second time in a shuffled order of threads) and judge both.

    Args:
        backend: where to run.
        kernel: must be able to do the problem.
        problem: the geometry.
        dtype: "fp64", "fp32", "fp16" or "bf16".
        kind: "exact" and "exact_wide" ask for the reference rounded once, "nan" besides for its NaN and no others, "random" for
            `reference.error_bound`.
        seed: of the values, of the layouts where the kernel takes strides (0: contiguous), and of the shuffled order.
        once: leave out the second run, as under the thread sanitizer.

    Raises:
        KernelError, CompileError, LaunchError, BackendError: as `backends.base.run`.
    """
    example = _Example(backend, kernel, problem, dtype, kind, seed)
    values = draw_tensors(kernel.pass_name, problem, dtype, kind, seed)
    layouts = np.random.Generator(np.random.PCG64([seed, 1])) if seed else None
    read = {}
    for name, value in values.items():
        read[name] = placed = example.place(name, value.shape, _OUTSIDE[example.element], layouts)
        placed.view(placed.bits)[...] = value.view(placed.bits.dtype)
    shape = problem.shapes(kernel.pass_name)[0][kernel.written]
    written = example.place(kernel.written, shape, _STRAY[example.element], layouts)
    ref = reference.run(kernel.pass_name, problem, values)
    with np.errstate(over="ignore"):
        expected = ref.astype(DTYPES[dtype].numpy)
    bound = _bound(kernel, problem, dtype, values, ref) if kind == "random" else None

    # Where a NaN may be right, an element that was never written must not be one.
    fills = (_UNWRITTEN[example.element], _REFILLED[example.element])
    fill, other = reversed(fills) if kind == NAN else fills
    bits = _execute(example, read, written, fill, 0)
    outcome = bits if isinstance(bits, Outcome) else _judge(example, bits, ref, expected, bound)
    if isinstance(bits, Outcome) or not outcome.ok:
        return _explained(example, read, written, bits, outcome, fill, other)
    if once or getattr(backend, "sanitizer", None) == "thread":
        return outcome  # that sanitizer sees a race in any order, and is slow
    again = _execute(example, read, written, fill, 2 * seed + 1)
    second = again if isinstance(again, Outcome) else _judge(example, again, ref, expected, bound)
    if isinstance(again, Outcome) or not second.ok:
        order = "with threads in a shuffled order" if backend.name == "host" else "in a second run"
        second.message += f"; only {order}: a barrier is missing, or threads race"
        return second
    if kernel.deterministic and not np.array_equal(bits, again):
        return _element(example, np.not_equal(bits, again), bits, again, "two runs differ, yet the kernel is deterministic")
    return outcome


def output(backend: Backend, kernel: Kernel, problem: Problem, dtype: str, kind: str, seed: int) -> tuple[Array, Array, Array | None]:
    """Return what a kernel writes on the contiguous tensors of one example (fp64; NaN: never written), the reference, and the
    error bound for kind "random".

    Arguments are those of `verify`; guards and shuffled orders are left to it.

    Raises:
        KernelError, CompileError, LaunchError, BackendError: as `backends.base.run`.
    """
    example = _Example(backend, kernel, problem, dtype, kind, 0)
    values = draw_tensors(kernel.pass_name, problem, dtype, kind, seed)
    read = {name: example.place(name, value.shape, _OUTSIDE[example.element], None) for name, value in values.items()}
    for name, placed in read.items():
        placed.view(placed.bits)[...] = values[name].view(placed.bits.dtype)
    written = example.place(kernel.written, problem.shapes(kernel.pass_name)[0][kernel.written], _STRAY[example.element], None)
    bits = _execute(example, read, written, _UNWRITTEN[example.element], 0)
    if isinstance(bits, Outcome):
        raise LaunchError(f"{kernel.name}: {bits.message}")
    ref = reference.run(kernel.pass_name, problem, values)
    bound = _bound(kernel, problem, dtype, values, ref) if kind == "random" else None
    return bits.view(DTYPES[dtype].numpy).astype(np.float64), ref.astype(np.float64), bound


def _bound(kernel: Kernel, problem: Problem, dtype: str, values: Mapping[str, Array], ref: Array) -> Array:
    return reference.error_bound(kernel.pass_name, problem, values, reference.precision(dtype), reference=ref)


def _execute(example: _Example, read: Mapping[str, _Placed], written: _Placed, fill: int, order: int) -> Array | Outcome:
    """Return the bits the kernel wrote, or what it did outside of them. `order` is the host's shuffle seed, 0 for none."""
    memory, dtype = example.memory, example.dtype
    fresh = written.bits.copy()
    written.view(fresh)[...] = fill
    placed = {**read, example.kernel.written: written}
    for tensor in placed.values():
        tensor.handle = memory.put(fresh if tensor is written else tensor.bits.copy())
    refs = {n: TensorRef(memory.pointer(t.handle) + t.start * t.bits.itemsize, t.shape, t.strides) for n, t in placed.items()}
    if example.prepared is None:
        example.prepared = Prepared(example.backend, example.kernel, example.problem, dtype, refs)
    workspace = example.prepared.workspace
    addresses = {**dict.fromkeys(workspace, 0), **{n: ref.pointer for n, ref in refs.items()}}  # 0: an empty one, as in `run`
    spaces: list[tuple[Any, int]] = []
    name = _NAMES[DTYPES[dtype].accumulate]
    unsigned = np.dtype(f"u{DTYPES[name].itemsize}")
    for space, size in workspace.items():
        if size == 0:
            continue
        count = -(-size // unsigned.itemsize)
        handle = memory.put(np.full(count + 2 * example.guard, _OUTSIDE[name], unsigned))
        spaces.append((handle, count))
        addresses[space] = memory.pointer(handle) + example.guard * unsigned.itemsize
    example.prepared.launch(addresses, seed=order if example.backend.name == "host" else 0)
    example.backend.synchronize()
    bits = memory.get(written.handle)
    result = written.view(bits).copy()
    return _damage(example, read, written, bits, spaces) or result


def _damage(
    example: _Example, read: Mapping[str, _Placed], written: _Placed, bits: Array, spaces: list[tuple[Any, int]]
) -> Outcome | None:
    """Return what the kernel wrote where nothing may be written."""
    name, guard = example.kernel.written, example.guard
    outside = bits != _STRAY[example.element]
    written.view(outside)[...] = False
    if outside.any():
        stray = np.flatnonzero(outside)
        offset = int(stray[0]) - written.start
        where = f"{-offset} elements before its start" if offset < 0 else f"element offset {offset}"
        return Outcome(
            False, message=f"{name} was overrun: {stray.size} elements outside of it were written, the first {where}"
        )
    for tensor_name, tensor in read.items():
        if not np.array_equal(example.memory.get(tensor.handle), tensor.bits):
            return Outcome(False, message=f"{tensor_name} was written to; a kernel must leave what it reads as it is")
    for handle, count in spaces:
        space = example.memory.get(handle)
        pattern = _OUTSIDE[_NAMES[DTYPES[example.dtype].accumulate]]
        if (space[:guard] != pattern).any() or (space[guard + count :] != pattern).any():
            return Outcome(False, message=f"a workspace of {count} elements was overrun")
    return None


def _judge(example: _Example, bits: Array, ref: Array, expected: Array, bound: Array | None) -> Outcome:
    got = bits.view(DTYPES[example.dtype].numpy)
    if bound is None:
        wrong = ~(got == expected)  # -0 equals 0; a NaN equals nothing
        if not wrong.any():
            return Outcome(True)
        if example.kind != NAN:
            return _element(example, wrong, expected, got, "wrong value (integers: the result must be exact)")
        wrong &= ~(np.isnan(got) & np.isnan(expected))
        what = "wrong value (a NaN among the inputs must reach what its taps lead to, and nothing else)"
        return _element(example, wrong, expected, got, what) if wrong.any() else Outcome(True)
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - ref)
        ratios = error / bound
    worst = float(np.max(ratios, initial=0.0))
    if worst <= 1.0:  # False for NaN
        return Outcome(True, worst)
    outcome = _element(example, ~(error <= bound), expected, got, "rounding error beyond its bound")
    outcome.ratio = worst if np.isfinite(worst) else float("inf")
    return outcome


def _element(example: _Example, wrong: Array, expected: Array, got: Array, what: str) -> Outcome:
    index = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    dtype = DTYPES[example.dtype].numpy
    wanted, found = float(expected.view(dtype)[index]), float(got.view(dtype)[index])
    if np.isnan(found) and example.kind != NAN:
        what = "NaN: the kernel read outside a tensor (guard bands hold NaN), or memory that nothing was written to"
    count = f"{int(wrong.sum())} of {wrong.size} elements"
    return Outcome(False, 0.0, f"{what}; {count}", tuple(int(i) for i in index), wanted, found)


def _explained(
    example: _Example, read: Mapping[str, _Placed], written: _Placed, bits: Array | Outcome, outcome: Outcome, fill: int, other: int
) -> Outcome:
    """Tell elements that were never written from those whose value came by arithmetic: only the former keep another filling."""
    if isinstance(bits, Outcome):
        return bits
    again = _execute(example, read, written, other, 0)
    if isinstance(again, Outcome):
        return outcome
    untouched = (bits == fill) & (again == other)
    if untouched.any() and outcome.index is not None and untouched[outcome.index]:
        outcome.message = f"never written; {int(untouched.sum())} of {untouched.size} elements"
    elif outcome.index is not None and outcome.got is not None and not np.array_equal(bits, again):
        outcome.message += "; what was in the output before shows through (atomics onto it, or elements left out)"
    return outcome
