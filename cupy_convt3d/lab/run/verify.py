"""One example: a kernel run on drawn tensors between guard bands, and what is wrong with what it wrote."""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ... import reference
from ...backends.base import Backend, TensorRef
from ...dtypes import DTYPES
from ...errors import KernelError, LaunchError
from ...kernel import ANY_STRIDES, HOST_MULTIPROCESSORS, Kernel, Limits, Numbers
from ...problem import Problem
from ..tensors import KINDS, SPOILT, as_multiplied, draw_tensors
from .execution import Executor, Failure, Layout, Local, launch, of_run

Array = np.ndarray[Any, np.dtype[Any]]
LAYOUTS = ("contiguous", "channels_last", "padded")
# Seeds but 0 draw a layout for each tensor. Those that leave one of these, divided by 16, draw one for all of them: padded ones then have
# the same order of axes and the same gaps.
ALIKE, _ALIKE_OF = (7, 10, 12), 16
# Seeds from here to LATE: one axis, 0 to 4, of channels_last, then of contiguous tensors, lies otherwise; see `_apart`. With eight of an
# axis only that axis is not aligned.
APART = 2**16 + 1
_MOST_PULLED = 2**22  # elements of a tensor with such an axis: of thousands of channels it would have the square of them
_GAPS, _LATE = (7, 1, 1, 0, 14, 0), (2, 3)
# Seeds from here on: as many layouts as below `APART`, and every tensor and bias begins at any multiple of its element's size.
LATE = 2**17
SEEDS = LATE + 2**17  # what is drawn at random stays below
_GUARD = 2048  # elements on either side where no pages guard them; a multiple of every vector load's alignment
_VECTOR_BYTES, _ALLOCATED_BYTES = 16, 256  # alignment of tensors that begin on time, and of workspaces
# Bit patterns by element type. UNWRITTEN fills the output, STRAY the guards and gaps, OUTSIDE all that must not be read:
# quiet NaNs with payloads of their own, since arithmetic hands the payload of an operand on.
_UNWRITTEN = {"fp64": 2**64 - 1, "fp32": 2**32 - 1, "fp16": 2**16 - 1, "bf16": 2**16 - 1}
_REFILLED = {"fp64": 0x4009200000000000, "fp32": 0x40490000, "fp16": 0x4248, "bf16": 0x4049}  # 3.140625, to tell adding apart
_STRAY = {"fp64": 0x7FF8A5A5A5A5A5A5, "fp32": 0x7FC0A5A5, "fp16": 0x7EA5, "bf16": 0x7FE5}
_OUTSIDE = {"fp64": 0x7FF85A5A5A5A5A5A, "fp32": 0x7FC05A5A, "fp16": 0x7E5A, "bf16": 0x7FDA}
_EXACT = "wrong value (integers: the result must be exact)"
_WRONG = {
    "exact": _EXACT,
    "exact_wide": _EXACT,
    "nan": "NaN: wrong value (a NaN among the tensors must reach what its taps lead to, and nothing else)",
    "inf": "infinity: wrong value (an infinity among the tensors must reach what its taps lead to, and nothing else; times zero it is NaN)",
    "overflow": "overflow: wrong value (a result past the largest number must be infinite, and no other)",
    "cancel": "rounding: wrong value (integers: a sum is exact until it is rounded, once)",
}
BOUNDED = ("random", "largest")  # kinds that are judged by `reference.error_bound`
# A failing example that is so quick, in seconds, is run in these orders of threads too.
_QUICK_S, _OTHER_ORDERS = 0.2, (3, 5, 7, 9)
_RACE = "a barrier is missing, or threads race"
_ELSEWHERE = "where tensors begin at other addresses, with threads in the same order"
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (2, 4, 8)}
_NO_NUMBERS = Numbers((), {}, ())
_SMALL_BYTES = 1 << 20
_MORE = Limits(shared_bytes=1 << 62, multiprocessors=7)  # a prime
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


@dataclass
class _Placed:
    """A tensor inside larger arrays of unsigned integers, one for each run: where it starts in them, and its strides."""

    bits: list[Array]  # the host's copies, or the same one for all runs
    starts: list[int]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    span: int  # elements from the first to the last

    @property
    def layout(self) -> Layout:
        return self.shape, self.strides

    @cached_property
    def _steps(self) -> tuple[int, ...]:
        size = self.bits[0].itemsize
        return tuple([step * size for step in self.strides])

    def view(self, bits: Array, run: int) -> Array:
        return np.ndarray(self.shape, bits.dtype, bits, self.starts[run] * bits.itemsize, self._steps)


@dataclass
class _Example:
    """What every run of one example shares."""

    executor: Executor
    kernel: Kernel
    problem: Problem
    dtype: str
    kind: str
    seed: int
    runs: int = 1
    values: Mapping[str, Array] = field(default_factory=dict)
    numbers: Numbers = _NO_NUMBERS
    guard: int = field(init=False)

    def __post_init__(self) -> None:
        # The address sanitizer's own red zones begin right at the end of an allocation.
        self.guard = 0 if self.executor.sanitizer == "address" else _GUARD

    @property
    def element(self) -> str:
        return DTYPES[self.dtype].element

    @cached_property
    def padded(self) -> Array:
        return reference.padded(self.problem, self.values)

    @cached_property
    def infinite(self) -> Array:
        """The reference where what is infinite in TF32 is so in tf32x3 too, which kernels may find."""
        return reference.run(self.kernel.pass_name, self.problem, as_multiplied(self.dtype, self.values))

    def place(self, name: str, shape: tuple[int, ...], fill: int, generator: np.random.Generator | None) -> _Placed:
        layout = "contiguous"
        if generator is not None and len(shape) == 5 and self.kernel.takes_strides(name):
            if self.seed % _ALIKE_OF in ALIKE:
                generator = _layouts_of(self.seed)
            layout = "apart" if APART <= self.seed < LATE else LAYOUTS[int(generator.integers(len(LAYOUTS)))]
        number = (self.seed - APART) % (10 * len(_GAPS))
        strides, span = _strides(shape, layout, generator) if layout != "apart" else _apart(shape, number)
        unsigned = _UNSIGNED[DTYPES[self.dtype].itemsize]
        late = self._late(name, span, unsigned.itemsize)
        if layout == "apart":
            late = int(number // 10 in _LATE)
        rooms = [self.room(span, unsigned.itemsize, run, late) for run in range(self.runs)]
        bits = [_filled(rooms[0][0], fill, unsigned)] * self.runs
        if rooms[0] != rooms[-1]:
            bits = [bits[0], *(_filled(count, fill, unsigned) for count, _ in rooms[1:])]
        return _Placed(bits, [start for _, start in rooms], shape, strides, span)

    def _late(self, name: str, span: int, size: int) -> int:
        """Return how many elements behind a whole vector a tensor begins: any, or for half of them such that it ends as one does."""
        if self.seed < LATE:
            return 0
        drawn, each = zlib.crc32(f"{self.seed} {name}".encode()), _VECTOR_BYTES // size
        return -span % each if drawn % 2 else drawn // 2 % each

    def room(self, span: int, size: int, run: int, late: int = 0, alignment: int = _VECTOR_BYTES) -> tuple[int, int]:
        """Return how many elements an array has, and where in it begins what has `span` of them, of `size` bytes each.

        It begins so late behind a multiple of the alignment. Where pages guard arrays it ends with its pages in the first run, and
        begins with them in the second one, but for what alignment asks for: there, as between bands, values are the guard.
        """
        page = self.executor.page
        if not page:
            return span + late + 2 * self.guard, self.guard + late
        if not span:
            return 0, 0
        before, count = late * size, span * size
        whole = -(-(before + count) // page) * page
        begin = before + (whole - count - before) // alignment * alignment if run % 2 == 0 else before
        return whole // size, begin // size


def _filled(count: int, fill: int, dtype: np.dtype[Any]) -> Array:
    array = np.empty(count, dtype)
    array.fill(fill)  # a third of `np.full`, where there are so few
    return array


def _layouts_of(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, 1]))


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
    if kind < len(_GAPS) - 1 or span * shape[axis] > _MOST_PULLED:
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


def executor_on(backend: Backend | Executor) -> Executor:
    """Return what runs examples on a backend in this process, or the executor itself."""
    return backend if isinstance(backend, Executor) else Local(backend)


def verify(
    backend: Backend | Executor,
    kernel: Kernel,
    problem: Problem,
    dtype: str,
    kind: str,
    seed: int,
    *,
    once: bool = False,
    numbers: Numbers | None = None,
) -> Outcome:
    """Run one example twice (on the host the second time in a shuffled order of threads) and judge both.

    Args:
        backend: where to run; a backend runs in this process.
        kernel: must be able to do the problem.
        problem: the geometry.
        dtype: "fp64", "fp32", "fp16" or "bf16".
        kind: all but `BOUNDED` ask for the reference rounded once, with its NaN and infinities and no others, those for
            `reference.error_bound`. Where a kernel says that it spreads what is not finite, such kinds are left out, and where it
            multiplies padding, `reference.padded` may be NaN too.
        seed: of the values, of the layouts where the kernel takes strides (0: contiguous; `ALIKE`: one for all tensors), and of the
            shuffled order.
        once: leave out the second run, as under the thread sanitizer.
        numbers: of the kernel's plan, where somebody who is trusted has asked whether it can do the problem.

    Raises:
        KernelError, CompileError, LaunchError, BackendError: as `backends.base.run`.
    """
    if kind in SPOILT and (why := kernel.why_spreads_nan(problem, dtype)):
        return Outcome(True, message=why)
    executor = executor_on(backend)
    # The thread sanitizer sees a race in any order, and is slow.
    orders = (0,) if once or executor.sanitizer == "thread" else (0, 2 * seed + 1)
    values = draw_tensors(kernel.pass_name, problem, dtype, kind, seed)
    numbers = numbers or numbers_of(kernel, problem, dtype, seed, executor)
    example = _Example(executor, kernel, problem, dtype, kind, seed, len(orders), values, numbers)
    read, written = _place(example, values, _layouts_of(seed) if seed else None)
    # Where a NaN may be right, an element that was never written must not be one.
    fills = (_UNWRITTEN[example.element], _REFILLED[example.element])
    fill, other = reversed(fills) if kind in SPOILT else fills
    runs = _Runs(example, read, written, fill, orders)
    ref = reference.run(kernel.pass_name, problem, values)  # while the kernel runs, where that is another process
    with np.errstate(over="ignore", invalid="ignore"):
        expected = ref.astype(DTYPES[dtype].numpy)
    bound = _bound(kernel, problem, dtype, values, ref) if kind in BOUNDED else None
    bits = runs.finish()
    outcome = bits if isinstance(bits, Outcome) else _judge(example, bits, ref, expected, bound)
    if isinstance(bits, Outcome) or not outcome.ok:
        return _explained(example, read, written, bits, outcome, fill, other)
    if len(orders) == 1:
        return outcome
    again = runs.finish()
    second = again if isinstance(again, Outcome) else _judge(example, again, ref, expected, bound)
    if isinstance(again, Outcome) or not second.ok:
        if _differs_by_place(example, read, written, fill, bits):
            second.message += f"; only {_ELSEWHERE}"
        else:
            order = "with threads in a shuffled order" if example.executor.name == "host" else "in a second run"
            second.message += f"; only {order}: {_RACE}"
        return second
    if kernel.deterministic and not (bits == again).all():
        why = f"two runs differ {_ELSEWHERE}" if _differs_by_place(example, read, written, fill, bits) else "two runs differ"
        return _element(example, np.not_equal(bits, again), bits, again, f"{why}, yet the kernel is deterministic")
    return outcome


def output(
    backend: Backend | Executor, kernel: Kernel, problem: Problem, dtype: str, kind: str, seed: int
) -> tuple[Array, Array, Array | None]:
    """Return what a kernel writes on the contiguous tensors of one example (fp64; NaN: never written), the reference, and the
    error bound for kind "random".

    Arguments are those of `verify`; guards and shuffled orders are left to it.

    Raises:
        KernelError, CompileError, LaunchError, BackendError: as `backends.base.run`.
    """
    executor = executor_on(backend)
    example = _Example(executor, kernel, problem, dtype, kind, 0, numbers=numbers_of(kernel, problem, dtype, 0, executor))
    values = draw_tensors(kernel.pass_name, problem, dtype, kind, seed)
    read, written = _place(example, values, None)
    bits = _Runs(example, read, written, _UNWRITTEN[example.element], (0,)).finish()
    if isinstance(bits, Outcome):
        raise LaunchError(f"{kernel.name}: {bits.message}")
    ref = reference.run(kernel.pass_name, problem, values)
    bound = _bound(kernel, problem, dtype, values, ref) if kind in BOUNDED else None
    return bits.view(DTYPES[dtype].numpy).astype(np.float64), ref.astype(np.float64), bound


def numbers_of(kernel: Kernel, problem: Problem, dtype: str, seed: int, executor: Executor | None = None) -> Numbers:
    """Return the numbers of the plan of one example; without an executor on the host.

    Raises:
        KernelError: the kernel cannot do the problem.
    """
    if reason := kernel.why_not(problem, dtype) if executor is None else executor.why_not(kernel, problem, dtype):
        raise KernelError(reason)
    return kernel.numbers(kernel.plan(problem, dtype, _multiprocessors(kernel, problem, dtype, seed, executor)))


def _multiprocessors(kernel: Kernel, problem: Problem, dtype: str, seed: int, executor: Executor | None) -> int:
    """Return how many a plan is made for: the GPU's; on the host few, and for a quarter of the seeds so many that teams leave some over."""
    if executor is not None and executor.limits is not None:
        return executor.multiprocessors
    more = seed % 4 == 3 and kernel.knows_multiprocessors and kernel.why_not(problem, dtype, None, _MORE) is None
    return _MORE.multiprocessors if more else HOST_MULTIPROCESSORS


def output_layout(kernel: Kernel, problem: Problem, dtype: str, kind: str, seed: int, backend: Backend | Executor) -> int:
    """Return what a binary may rely on of the output of an example (`TensorRef.layout`): the same in all runs, else `ANY_STRIDES`."""
    if not kernel.knows_layout:
        return ANY_STRIDES
    values = draw_tensors(kernel.pass_name, problem, dtype, kind, seed)
    example = _Example(executor_on(backend), kernel, problem, dtype, kind, seed, 2, values)
    return _layout_of(example, _place(example, values, _layouts_of(seed) if seed else None)[1])


def _layout_of(example: _Example, written: _Placed) -> int:
    size = DTYPES[example.dtype].itemsize
    layouts = {TensorRef(start * size, *written.layout).layout for start in written.starts}
    return layouts.pop() if len(layouts) == 1 else ANY_STRIDES


def _numbers_for(example: _Example, written: _Placed) -> Numbers:
    """Return the numbers of a plan for the output's layout."""
    kernel, problem, dtype = example.kernel, example.problem, example.dtype
    if not kernel.knows_layout or (layout := _layout_of(example, written)) == ANY_STRIDES:
        return example.numbers
    multiprocessors = _multiprocessors(kernel, problem, dtype, example.seed, example.executor)
    return kernel.numbers(kernel.plan(problem, dtype, multiprocessors, layout))


def _bound(kernel: Kernel, problem: Problem, dtype: str, values: Mapping[str, Array], ref: Array) -> Array:
    return reference.error_bound(kernel.pass_name, problem, values, reference.precision(dtype), reference=ref)


def _place(
    example: _Example, values: Mapping[str, Array], layouts: np.random.Generator | None
) -> tuple[dict[str, _Placed], _Placed]:
    """Return the tensors that are read, with their values, and the one that is written."""
    read = {}
    for name, value in values.items():
        read[name] = placed = example.place(name, value.shape, _OUTSIDE[example.element], layouts)
        first, start, span = placed.bits[0], placed.starts[0], placed.span
        placed.view(first, 0)[...] = value.view(first.dtype)
        for bits, other in zip(placed.bits, placed.starts, strict=True):
            if bits is not first:
                bits[other : other + span] = first[start : start + span]
    kernel = example.kernel
    shape = example.problem.shapes(kernel.pass_name)[0][kernel.written]
    return read, example.place(kernel.written, shape, _STRAY[example.element], layouts)


class _Runs:
    """Runs of an example, begun at once, one for each of the host's shuffle seeds in `orders`; 0 is none."""

    def __init__(
        self, example: _Example, read: Mapping[str, _Placed], written: _Placed, fill: int, orders: tuple[int, ...]
    ) -> None:
        self._example, self._read, self._written, self._done = example, read, written, 0
        kernel, problem, dtype, executor = example.kernel, example.problem, example.dtype, example.executor
        placed = {**read, kernel.written: written}
        self._workspace = {name: size for name, size in example.numbers.workspace.items() if size}
        accumulate = _NAMES[DTYPES[dtype].accumulate]
        unsigned = _UNSIGNED[DTYPES[accumulate].itemsize]
        arrays: dict[str, Array] = {}
        self._starts: list[dict[str, int]] = []
        for run in range(len(orders)):
            for name, tensor in read.items():
                arrays[name if tensor.bits[0] is tensor.bits[-1] else of_run(run, name)] = tensor.bits[run]
            arrays[of_run(run, kernel.written)] = fresh = written.bits[run].copy()
            written.view(fresh, run)[...] = fill
            self._starts.append({name: tensor.starts[run] for name, tensor in placed.items()})
            for name, size in self._workspace.items():
                count, self._starts[run][name] = example.room(size, unsigned.itemsize, run, alignment=_ALLOCATED_BYTES)
                arrays[of_run(run, name)] = _filled(count, _OUTSIDE[accumulate], unsigned)
        layouts = {name: tensor.layout for name, tensor in placed.items()}
        numbers = _numbers_for(example, written)
        executor.start(launch, len(orders), arrays, kernel, problem, dtype, layouts, self._starts, orders, numbers)

    def finish(self) -> Array | Outcome:
        """Return the bits the kernel wrote in the next run, or what it did outside of them."""
        after, run = self._example.executor.finish(), self._done
        bits = after[of_run(run, self._example.kernel.written)].copy()  # a thread of the kernel's may go on writing
        tensor = self._written.view(bits, run)
        result = tensor.copy()
        tensor[...] = _STRAY[self._example.element]  # as around it, if nothing was written there
        outcome = self._damage(run, bits, after)
        self._done += 1
        return outcome or result

    def _damage(self, run: int, bits: Array, after: Mapping[str, Array]) -> Outcome | None:
        """Return what the kernel wrote where nothing may be written; `bits` are those around the tensor that is written."""
        example, written = self._example, self._written
        name = example.kernel.written
        if not _same(bits, written.bits[run]):
            stray = np.flatnonzero(bits != _STRAY[example.element])
            offset = int(stray[0]) - written.starts[run]
            where = f"{-offset} elements before its start" if offset < 0 else f"element offset {offset}"
            return _out_of_bounds(f"{name} was overrun: {stray.size} elements outside of it were written, the first {where}")
        for tensor_name, tensor in self._read.items():
            key = tensor_name if tensor_name in after else of_run(run, tensor_name)
            if not _same(after[key], tensor.bits[run]):
                return Outcome(False, message=f"{tensor_name} was written to; a kernel must leave what it reads as it is")
        for space_name, count in self._workspace.items():
            space, start = after[of_run(run, space_name)], self._starts[run][space_name]
            pattern = _OUTSIDE[_NAMES[DTYPES[example.dtype].accumulate]]
            if (space[:start] != pattern).any() or (space[start + count :] != pattern).any():
                return _out_of_bounds(f"a workspace of {count} elements was overrun")
        return None


def _same(array: Array, other: Array) -> bool:
    if array.nbytes > _SMALL_BYTES:
        return bool((array == other).all())
    return array.tobytes() == other.tobytes()  # copies, in a third of the time where there are so few


def _out_of_bounds(message: str) -> Outcome:
    return Outcome(False, message=f"out of bounds: {message}")


def _judge(example: _Example, bits: Array, ref: Array, expected: Array, bound: Array | None) -> Outcome:
    got = bits.view(DTYPES[example.dtype].numpy)
    if bound is None:
        right = got == expected  # -0 equals 0; a NaN equals nothing
        if right.all():
            return Outcome(True)
        wrong = ~right
        if example.kind in SPOILT:
            wrong &= ~(np.isnan(got) & np.isnan(expected))
            if example.kernel.multiplies_padding and wrong.any():
                wrong &= ~(np.isnan(got) & np.isnan(example.padded))
        return _element(example, wrong, expected, got, _WRONG[example.kind]) if wrong.any() else Outcome(True)
    with np.errstate(invalid="ignore"):
        error = np.abs(got.astype(np.float64) - ref)
        if not np.isfinite(got).all() and example.kind == "largest":
            infinite = example.infinite.astype(got.dtype)
            error[~np.isfinite(infinite) & ((got == infinite) | (np.isnan(got) & np.isnan(infinite)))] = 0.0
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
    if np.isnan(found) and example.kind in KINDS:
        what = (
            "NaN: the kernel read outside a tensor (out of bounds: around tensors lies NaN), memory that nothing was written to, or what "
            "had not come yet (missing wait)"
        )
    count = f"{int(wrong.sum())} of {wrong.size} elements"
    return Outcome(False, 0.0, f"{what}; {count}", tuple(int(i) for i in index), wanted, found)


def _explained(
    example: _Example, read: Mapping[str, _Placed], written: _Placed, bits: Array | Outcome, outcome: Outcome, fill: int, other: int
) -> Outcome:
    """Tell elements that were never written from those whose value came by arithmetic: only the former keep another filling."""
    if isinstance(bits, Outcome):
        return bits
    start = time.monotonic()
    again = _Runs(example, read, written, other, (0,)).finish()
    if isinstance(again, Outcome):
        return outcome
    untouched = (bits == fill) & (again == other)
    if untouched.any() and outcome.index is not None and untouched[outcome.index]:
        outcome.message = f"never written; {int(untouched.sum())} of {untouched.size} elements"
    elif outcome.index is not None and outcome.got is not None and not np.array_equal(bits, again):
        outcome.message += "; what was in the output before shows through (atomics onto it, or elements left out)"
    quick = time.monotonic() - start < _QUICK_S
    return _in_other_orders(example, read, written, bits, outcome, fill) if quick and example.executor.name == "host" else outcome


def _in_other_orders(
    example: _Example, read: Mapping[str, _Placed], written: _Placed, bits: Array, outcome: Outcome, fill: int
) -> Outcome:
    """Return a failure that shows in the first order of threads, or what is known of it by others.

    Where sums may come in any order, only exact ones must be the same.
    """
    if example.runs == 1 or (example.kind in BOUNDED and not example.kernel.deterministic):
        return outcome
    differs = False
    for order in _OTHER_ORDERS:
        try:
            other = _Runs(example, read, written, fill, (order,)).finish()
        except LaunchError as error:  # what the host says of it: a stage that is not there yet, a wait that is missing
            return Outcome(False, message=str(error))
        except Failure:
            differs = True
            break
        differs |= isinstance(other, Outcome) or not np.array_equal(bits, other)
    if differs:
        outcome.message += f"; otherwise with threads in another order: {_RACE}"
    return outcome


def _differs_by_place(example: _Example, read: Mapping[str, _Placed], written: _Placed, fill: int, bits: Array) -> bool:
    """Whether a run writes something else than `bits` where the second run's tensors lie, with threads in the first one's order."""
    if example.executor.name != "host":
        return False
    runs = _Runs(example, read, written, fill, (0, 0))
    try:
        runs.finish()
        again = runs.finish()
    except (LaunchError, Failure):
        return True
    return isinstance(again, Outcome) or not np.array_equal(bits, again)
