"""Tensors past 2^32 elements on the host: only the last blocks of each launch run, over memory that is reserved and not touched.

All of a far problem's tensors is zero but their ends, so the result there is that of a near problem, and a 32-bit index on the way
shows: it ends in pages that must not be touched, or writes nothing.

Where the strides are what passes 2^32, a tiny problem does: its elements lie that far apart, and nothing between them may be touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ... import reference
from ...backends.base import Arguments, Backend, TensorRef, run
from ...dtypes import DTYPES
from ...kernel import HOST_MULTIPROCESSORS, Kernel, Plan
from ...problem import Problem
from ...source import Instance
from ..tensors import draw_tensors
from .execution import Arrays, Executor, Local
from .far_memory import array_at, require_space, reserved, scattered, span
from .verify import Outcome, executor_on

Array = np.ndarray[Any, np.dtype[Any]]
FAR = "far"  # the kind of such an example, beside `tensors.KINDS`
# How many times the blocks are run that the end of a tensor has if all are alike: a block may have several channels, or lie behind
# blocks that do nothing.
_SHARES = (1, 16)
_MOST_THREADS = 2**17  # that a launch runs
# With so many a block that stays has one piece of the work and no other: then its last blocks compute the end.
_MANY_MULTIPROCESSORS = 2**30
# Elements that a block computes, or sums up: with more of them it stays, and computes what lies anywhere.
_MOST_BLOCK_ELEMENTS = {"fprop": 2**17, "dgrad": 2**17, "wgrad": 2**20}
_MOST_TERMS = 2**28  # of all sums in the blocks of a launch
_NEAR_CHANNELS, _NEAR_VOXELS, _NEAR_WRITTEN = 64, 1024, 2048  # about as many of them are not zero
_MOST_PACKING = 2**15  # threads of a launch over no volumes, all blocks of which are run
_LARGE_VOLUME, _ROWS = 2**27, 1024  # voxels of one that has 2^31 bytes in cells of 16, and its rows
# Channels of a group, in place of a far problem's own: of tiles of each width, and so many that a sum may be split.
_OUTPUTS, _INPUTS = (1, 8, 24, 48, 64, 200), (64, 2048)
_VOLUMES = ("input", "output", "grad_input", "grad_output")
# Elements between neighbours: either half of it, taken alone, leads to another page.
_APART = 2**32 + 2**13
# Axes that lie together, by the seed: none, so that all elements are apart; rows; channels; channels of a row's voxels; volumes.
_TOGETHER = ((), (4,), (1,), (1, 4), (4, 3, 2))
APART_LAYOUTS = len(_TOGETHER)


def far_problems(pass_name: str) -> list[Problem]:
    """Return problems of which the input, the output or both have a little more than 2^32 elements, or the weight does.

    Every product of an index passes it in one of them: batch, channels, depth or rows times what lies behind them. One stops between
    2^31 and 2^32, for kernels that refuse the others and should not be signed.
    NOTE: past 2^31 alone an index that is unsigned on the way would still come out right.
    """
    problems = [*_of_ordinary_grids(pass_name), *_of_many_copies(pass_name)]
    return [replace(problem, bias=pass_name == "fprop") for problem in problems]


def _of_ordinary_grids(pass_name: str) -> list[Problem]:
    """Return those with batch, channels, depth and rows of at most 65535, and no more volumes: any of them may be a grid's y or z."""
    ones, pairs = (1, 1, 1), (1, 1, 2)
    depthwise = Problem(1, 65535, 65535, (1, 1024, 66), pairs, groups=65535)
    if pass_name == "wgrad":  # a block may sum up all that there is for a weight, and others lie after all ranges of the first one
        return [
            depthwise,
            Problem(1000, 65535, 65535, (1, 1, 66), pairs, groups=65535),
            Problem(1, 136, 1, (32767, 32, 32), ones),
            Problem(1, 2, 65535, (1, 1024, 66), pairs),
            Problem(65535, 1, 1, (1, 1024, 66), ones),
        ]
    problems = [
        depthwise,
        Problem(4095, 1024, 1024, (1, 16, 66), pairs, groups=1024),
        Problem(4095, 16, 16, (1, 1024, 66), pairs),
        Problem(65535, 1, 1, (1, 1024, 66), pairs),
        Problem(1, 136, 2, (32767, 32, 32), pairs),
        Problem(1, 2, 65535, (1, 1024, 66), pairs),
        Problem(65535, 64, 1, (1, 32, 33), pairs),
        Problem(1023, 1, 64, (1, 1024, 66), pairs),
        Problem(1, 1, 1, (4200, 1024, 1024), pairs),
        Problem(1, 1, 1, (1, 65535, 65600), pairs),
        Problem(1, 520, 65528, (1, 1, 1), (1, 8, 16)),
        Problem(32767, 2, 2, (1, 768, 66), pairs),
    ]
    if pass_name == "fprop":
        return problems
    return [replace(p, in_channels=p.out_channels, out_channels=p.in_channels) for p in problems]  # few of what is summed up


def _of_many_copies(pass_name: str) -> list[Problem]:
    """Return those with 2^22 volumes, groups or slices and more.

    One is for the batch, one for batch and channels with as many planes, four for the groups (two of them with volumes of few voxels
    and several channels, which a tile has whole: such that are no whole vectors, and such that are), one for the depth of a volume.
    """
    copies = 2**22 + 1024
    deep = Problem(2, 1, 1, (copies, 32, 32), (1, 1, 1 if pass_name == "wgrad" else 2))
    if pass_name == "wgrad":  # one weight element: a block sums a range of voxels, and only the last range is not zero
        return [Problem(copies, 1, 1, (4, 8, 32), (1, 1, 1)), deep]
    return [
        Problem(copies, 2, 2, (4, 8, 16), (1, 1, 2)),
        Problem(copies, 1024, 1024, (1, 1, 1), (1, 1, 2), groups=1024),
        Problem(1, copies, copies, (4, 8, 32), (1, 1, 2), groups=copies),
        Problem(1, 16 * copies, 16 * copies, (1, 1, 1), (1, 4, 8), groups=copies),
        Problem(1, 32 * copies, 32 * copies, (1, 5, 7), (1, 1, 2), groups=copies),
        Problem(1, 20 * copies, 20 * copies, (1, 4, 16), (1, 1, 2), groups=copies),
        deep,
    ]


def far_variants(problem: Problem) -> Iterator[Problem]:
    """Yield far problems near one, for workspaces that it does not fill and launches that it does not need.

    They have two classes of rows, rows that overlap, another number of output channels, or more channels to sum up.
    """
    d, _, w = problem.kernel_size
    groups = problem.groups
    rows = [problem, replace(problem, kernel_size=(d, 2, w), stride=(problem.stride[0], 2, problem.stride[2]))]
    for shape in (*rows, replace(problem, kernel_size=(d, 3, w), stride=(problem.stride[0], 1, problem.stride[2]))):
        yield shape
        for name, counts in (("out_channels", _OUTPUTS), ("in_channels", _INPUTS)):
            for count in counts:
                changed: dict[str, Any] = {name: groups * count}
                if groups * count < 2**31:
                    yield replace(shape, **changed)


def largest_accepted(problem: Problem, accepts: Callable[[Problem], bool]) -> Problem | None:
    """Return a far problem of as many voxels, in the largest volumes that are accepted; None: its volumes are not large, or none is.

    Their rows are long: a kernel may have idle blocks for each row, and those at the end are no more than the last ones that run.
    """
    volume = math.prod(problem.input_size)
    if problem.groups > 1 or volume < _LARGE_VOLUME:
        return None

    def of(width: int, batch: int = 1) -> Problem:
        return replace(problem, batch=batch, input_size=(1, _ROWS, width))

    least, most = 0, volume // _ROWS + 1  # the least is accepted, the most is not
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if accepts(of(middle)) else (least, middle)
    if least * _ROWS < _LARGE_VOLUME:
        return None
    found = of(least, -(-problem.batch * volume // (least * _ROWS)))
    while not accepts(found):
        found = replace(found, batch=found.batch // 2)
    return found if largest_tensor(found) >= 2**31 else None


def unmet(kernel: Kernel, dtype: str, ran: Sequence[Problem], known: Sequence[Problem]) -> dict[str, list[Problem]]:
    """Return what of a kernel no far problem that ran has met, each in words, with problems near the known ones that do, small ones first.

    That is each workspace of more than 2^31 units of 16 bytes, or of 2^31 elements where there is none such, and each launch that some
    problems alone need.
    """
    size = DTYPES[dtype].accumulate.itemsize
    plans = [kernel.plan(problem, dtype) for problem in ran]
    tried: list[tuple[Problem, Plan]] = []
    for problem in dict.fromkeys(near for one in known for near in far_variants(one)):
        if largest_tensor(problem) >= 2**31 and kernel.why_not(problem, dtype) is None:
            tried.append((problem, kernel.plan(problem, dtype)))
    tried.sort(key=lambda one: sum(map(math.prod, (one[0].input_shape, one[0].output_shape, one[0].weight_shape))))
    found: dict[str, list[Problem]] = {}
    for name in kernel.workspace:
        for least in (2**35 // size + 1, 2**31 + 1):
            if any(plan.workspace[name] >= least for plan in plans):
                break
            found[f"its workspace {name} has more than 2^31 elements"] = some = [p for p, plan in tried if plan.workspace[name] >= least]
            if some:
                break
    for launch in kernel.launches:
        of = [any(one.symbol == launch.symbol for one in plan.launches) for plan in (*plans, *(plan for _, plan in tried))]
        if launch.when is not None and not any(of[: len(plans)]):
            found[f"{launch.symbol} is launched"] = [p for (p, _), does in zip(tried, of[len(plans) :], strict=True) if does]
    return found


def apart_problem() -> Problem:
    """Return the problem whose elements `verify_far` puts 2^32 elements apart, for kernels that can do no other a multiple of it."""
    return Problem(1, 2, 2, (2, 2, 3), (2, 2, 2), (1, 1, 2), (0, 0, 1))


def apart_vectors() -> Problem:
    """Return another such problem, large enough for rows and channels to be read as vectors where they lie together."""
    return Problem(1, 16, 8, (2, 2, 8), (1, 2, 2), (1, 2, 2), (0, 0, 1))


def largest_tensor(problem: Problem) -> int:
    """Return the elements of the largest of a problem's tensors: past 2^31 `verify_far` runs its last blocks alone."""
    return max(map(math.prod, (problem.input_shape, problem.output_shape, problem.weight_shape)))


def takes_far_strides(kernel: Kernel) -> bool:
    """Whether a kernel takes some tensor with strides, so that its elements can lie far apart."""
    shapes = apart_problem().shapes(kernel.pass_name)[0]
    return any(len(shape) == 5 and kernel.takes_strides(name) for name, shape in shapes.items())


def near_problem(problem: Problem, pass_name: str) -> Problem:
    """Return the problem of what is not zero in a far one: the last volume, group, channels, planes, rows and columns.

    With tensors that are zero elsewhere, the last elements of what a pass writes are those of the near problem.
    """
    size, room = [0, 0, 0], _NEAR_VOXELS
    for a in (2, 1, 0):
        short = 2 * problem.padding[a] - problem.dilation[a] * (problem.kernel_size[a] - 1) - problem.output_padding[a]
        size[a] = min(problem.input_size[a], max(1, room, 1 + short))
        room //= size[a]
    ins, outs = (min(_NEAR_CHANNELS, c // problem.groups) for c in (problem.in_channels, problem.out_channels))
    near = replace(problem, batch=1, in_channels=ins, out_channels=outs, input_size=(size[0], size[1], size[2]), groups=1)
    if pass_name == "wgrad":
        return replace(near, in_channels=1, out_channels=1)
    written, voxels = ("out_channels", near.output_size) if pass_name == "fprop" else ("in_channels", near.input_size)
    if near.input_size != problem.input_size:  # the rest of a volume lies between what channels have of its end
        return replace(near, in_channels=1, out_channels=1)
    return replace(near, **{written: max(1, min(getattr(near, written), _NEAR_WRITTEN // math.prod(voxels)))})


def _smaller(problem: Problem, near: Problem) -> Problem:
    """Return the far problem with so much less of its slowest axis that all tensors have fewer than 2^31 elements."""
    step = -(-largest_tensor(problem) // 2**30)
    if problem.batch > step or (problem.batch > 1 and largest_tensor(replace(problem, batch=1)) < 2**31):
        return replace(problem, batch=max(1, problem.batch // step))
    if problem.groups > step:
        groups = problem.groups // step
        per_group = {name: getattr(problem, name) // problem.groups * groups for name in ("in_channels", "out_channels")}
        return replace(problem, groups=groups, **per_group)
    for name in ("out_channels", "in_channels"):
        if getattr(problem, name) > step * max(32, getattr(near, name)):
            return replace(problem, **{name: getattr(problem, name) // step // 32 * 32})
    size: list[int] = list(problem.input_size)
    longest = next((a for a in range(3) if size[a] > step * near.input_size[a]), size.index(max(size)))
    size[longest] = max(near.input_size[longest], size[longest] // step)
    return replace(problem, input_size=(size[0], size[1], size[2]))


def verify_far(backend: Backend | Executor, kernel: Kernel, problem: Problem, dtype: str, seed: int) -> Outcome:
    """Run the last blocks of a problem with more than 2^31 elements, or all of another one whose elements are far apart.

    The outcome is ok with a message where nothing can be said: the kernel's last blocks do not compute what lies last, it takes no
    strides, or there is no address space.
    """
    executor = executor_on(backend)
    try:
        if largest_tensor(problem) >= 2**31:
            require_space(_contiguous_sizes(kernel, problem, dtype))
            return _verify_end(executor, kernel, problem, dtype, seed)
        if not takes_far_strides(kernel):
            return Outcome(True, message="the kernel takes no strides, and no tensor of the problem has 2^31 elements")
        require_space(_scattered_sizes(kernel, problem, dtype, seed))
        return _verify_apart(executor, kernel, problem, dtype, seed)
    except MemoryError as error:
        return Outcome(True, message=f"the system gives too little memory: {error}")


def explained(problem: Problem, outcome: Outcome) -> Outcome:
    """Return a failure with what it is likely to come from."""
    largest = largest_tensor(problem)
    power = 32 if largest >= 2**32 else 31
    where = f"past 2^{power} elements of a tensor" if largest >= 2**31 else "where elements lie 2^32 elements apart"
    return replace(outcome, message=f"{outcome.message}; {where}: look for an index, or a product in one, of 32 bits")


def _verify_end(executor: Executor, kernel: Kernel, problem: Problem, dtype: str, seed: int) -> Outcome:
    """Run as many of the last blocks as compute the end; what comes out wrong is only wrong if a smaller problem's end is right."""
    near, most = near_problem(problem, kernel.pass_name), _MOST_BLOCK_ELEMENTS[kernel.pass_name]
    multiprocessors = HOST_MULTIPROCESSORS
    plan = kernel.plan(problem, dtype)
    if max(_block_elements(kernel, problem, plan)) > most:
        multiprocessors = _MANY_MULTIPROCESSORS
        plan = kernel.plan(problem, dtype, multiprocessors)
    each = _block_elements(kernel, problem, plan)
    if max(each) > most:
        return Outcome(True, message=f"each block computes or sums up {max(each)} elements, so that the last ones cannot be run alone")
    terms = {"fprop": problem.in_channels, "dgrad": problem.out_channels}.get(kernel.pass_name, 0) // problem.groups
    terms = max(1, terms * math.prod(problem.kernel_size))
    outcome, ran = Outcome(True, message="its last blocks have too much to do"), []
    for share in _SHARES:
        counts = _last_blocks(kernel, problem, near, plan, share)
        threads = max(count * math.prod(launch.block) for count, launch in zip(counts, plan.launches, strict=True))
        work = max(count * elements * terms for count, elements in zip(counts, each, strict=True))
        if threads <= _MOST_THREADS and work <= _MOST_TERMS:
            outcome, ran = _verify_last_blocks(executor, kernel, problem, near, dtype, seed, counts, multiprocessors), counts
            if outcome.ok:
                return _verify_beginning(executor, kernel, problem, near, dtype, seed, counts, multiprocessors)
    if outcome.ok:
        return outcome
    if _smaller_is_right(executor, kernel, problem, near, dtype, seed, ran, multiprocessors):
        return outcome
    return Outcome(True, message="its last blocks do not compute what lies last in memory")


def _verify_beginning(
    executor: Executor, kernel: Kernel, problem: Problem, near: Problem, dtype: str, seed: int, counts: list[int], multiprocessors: int
) -> Outcome:
    """Run as many of the first blocks, where a size of 32 bits may be negative, so that they have nothing to do.

    Those of tensors past 2^32 elements would be right by such a size: it is as small as what is past 2^32.
    """
    if kernel.pass_name == "wgrad" or largest_tensor(problem) >= 2**32:
        return Outcome(True)
    begin = partial(_verify_last_blocks, end=False)
    outcome = begin(executor, kernel, problem, near, dtype, seed, counts, multiprocessors)
    wrong = not outcome.ok and _smaller_is_right(executor, kernel, problem, near, dtype, seed, counts, multiprocessors, end=False)
    return outcome if wrong else Outcome(True)


def _smaller_is_right(
    executor: Executor, kernel: Kernel, problem: Problem, near: Problem, dtype: str, seed: int, counts: list[int], multiprocessors: int,
    *, end: bool = True,
) -> bool:  # fmt: skip
    """Whether a smaller problem comes out right with the same blocks, so that nothing but its size is another."""
    small = _smaller(problem, near)
    if kernel.why_not(small, dtype) is not None or len(kernel.plan(small, dtype, multiprocessors).launches) != len(counts):
        return False
    return _verify_last_blocks(executor, kernel, small, near, dtype, seed, counts, multiprocessors, end=end).ok


def _block_elements(kernel: Kernel, problem: Problem, plan: Plan) -> list[int]:
    """Return how many elements a block of each launch has to compute, for wgrad to sum up; 0 for launches over no volumes."""
    work = math.prod(problem.weight_shape) * problem.batch * math.prod(problem.input_size)
    if kernel.pass_name != "wgrad":
        work = math.prod(problem.shapes(kernel.pass_name)[0][kernel.written])
    takes = [any(parameter.name in _VOLUMES for parameter in launch.parameters) for launch in plan.launches]
    return [work // max(1, math.prod(launch.grid)) if over else 0 for launch, over in zip(plan.launches, takes, strict=True)]


def _last_blocks(kernel: Kernel, problem: Problem, near: Problem, plan: Plan, share: int) -> list[int]:
    """Return how many of the last blocks of each launch compute the end, if they share out what is written (or summed up) in order."""
    if kernel.pass_name == "wgrad":  # a weight has a block or more
        return [min(math.prod(launch.grid), share * math.prod(near.kernel_size) + 1) for launch in plan.launches]
    far, end = (p.output_shape if kernel.pass_name == "fprop" else p.input_shape for p in (problem, near))
    before = sum((size - last) * step for size, last, step in zip(far, end, _contiguous(far), strict=True))
    counts = []
    for launch in plan.launches:
        blocks, in_order = math.prod(launch.grid), any(parameter.name in _VOLUMES for parameter in launch.parameters)
        if in_order or blocks * math.prod(launch.block) > _MOST_PACKING:
            blocks = min(blocks, -(-blocks * share * (math.prod(far) - before) // math.prod(far)) + 1)
        counts.append(blocks)
    return counts


def _verify_last_blocks(
    executor: Executor, kernel: Kernel, far: Problem, near: Problem, dtype: str, seed: int, counts: list[int], multiprocessors: int,
    *, end: bool = True,
) -> Outcome:  # fmt: skip
    """Run the last blocks of a problem that ends in what is near, or the first ones of one that begins with it."""
    shapes, written = far.shapes(kernel.pass_name)
    some = near.shapes(kernel.pass_name)[0][written]
    first = tuple(size - of_end for size, of_end in zip(shapes[written], some, strict=True)) if end else (0,) * len(some)
    values = draw_tensors(kernel.pass_name, near, dtype, "exact", seed)
    arrays = {**values, written: _unwritten(kernel, near, dtype)}
    executor.start(run_last_blocks, 1, arrays, kernel, far, dtype, counts, multiprocessors, end)
    return _compared(executor, kernel, near, values, dtype, first, f"wrong value in what lies {'last' if end else 'first'}")


def _verify_apart(executor: Executor, kernel: Kernel, problem: Problem, dtype: str, seed: int) -> Outcome:
    values, written = draw_tensors(kernel.pass_name, problem, dtype, "exact", seed), _unwritten(kernel, problem, dtype)
    executor.start(run_apart, 1, {**values, kernel.written: written}, kernel, problem, dtype, seed)
    return _compared(executor, kernel, problem, values, dtype, (0,) * written.ndim, "wrong value")


def _unwritten(kernel: Kernel, problem: Problem, dtype: str) -> Array:
    return np.full(problem.shapes(kernel.pass_name)[0][kernel.written], np.nan, DTYPES[dtype].numpy)


def _compared(
    executor: Executor, kernel: Kernel, problem: Problem, values: dict[str, Array], dtype: str, first: tuple[int, ...], what: str
) -> Outcome:
    """Judge what was written by what has been started; its first element is that of index `first`."""
    expected = reference.run(kernel.pass_name, problem, values).astype(DTYPES[dtype].numpy)
    got = executor.finish()[kernel.written].copy()  # nobody writes to it while it is looked at
    wrong = ~(got == expected)
    if not wrong.any():
        return Outcome(True)
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    message = f"{what}; {int(wrong.sum())} of {wrong.size} elements"
    place = tuple(i + begin for i, begin in zip(index, first, strict=True))
    return Outcome(False, 0.0, message, place, float(expected[index]), float(got[index]))


def run_last_blocks(
    local: Local, arrays: Arrays, kernel: Kernel, far: Problem, dtype: str, counts: list[int], multiprocessors: int, end: bool = True
) -> Iterator[Arrays]:
    """Launch the last (or first) blocks of a far problem that ends in (begins with) these values, and yield that of what they wrote."""
    itemsize, plan = DTYPES[dtype].itemsize, kernel.plan(far, dtype, multiprocessors)
    module: Any = local.backend.compile(Instance(kernel, dtype))
    with ExitStack() as stack:
        refs, last = {}, {}
        for name, shape in far.shapes(kernel.pass_name)[0].items():
            address = stack.enter_context(reserved(math.prod(shape) * itemsize))
            refs[name] = TensorRef(address, shape, _contiguous(shape))
            last[name] = array_at(address, shape, dtype)[tuple(slice(-size, None) if end else slice(size) for size in arrays[name].shape)]
            if name != kernel.written:
                last[name][...] = arrays[name]
        for name, numel in plan.workspace.items():
            address = stack.enter_context(reserved(numel * DTYPES[dtype].accumulate.itemsize))
            refs[name] = TensorRef(address, (numel,), (1,))
        for launch, most in zip(plan.launches, counts, strict=True):
            count = min(most, math.prod(launch.grid))
            module.launch(launch, Arguments(launch, far, refs), first_block=end * (math.prod(launch.grid) - count), blocks=count)
        yield {kernel.written: last[kernel.written].copy()}


def run_apart(local: Local, arrays: Arrays, kernel: Kernel, problem: Problem, dtype: str, seed: int) -> Iterator[Arrays]:
    """Launch a kernel on tensors with these values whose elements are far apart, and yield what it wrote."""
    spaces: list[Array] = []

    def allocate(_: str, size: int) -> int:
        spaces.append(np.zeros(size, np.uint8))
        return int(spaces[-1].ctypes.data)

    with ExitStack() as stack:
        refs, views = {}, {}
        for name, shape in problem.shapes(kernel.pass_name)[0].items():
            strides = _strides(kernel, name, shape, seed)
            views[name] = stack.enter_context(scattered(shape, strides, dtype))
            refs[name] = TensorRef(int(views[name].ctypes.data), shape, strides)
            if name != kernel.written:
                views[name][...] = arrays[name]
        run(local.backend, kernel, problem, dtype, refs, allocate)
        yield {kernel.written: views[kernel.written].copy()}


def _contiguous_sizes(kernel: Kernel, problem: Problem, dtype: str) -> list[int]:
    tensors = [math.prod(shape) * DTYPES[dtype].itemsize for shape in problem.shapes(kernel.pass_name)[0].values()]
    return tensors + [numel * DTYPES[dtype].accumulate.itemsize for numel in kernel.plan(problem, dtype).workspace.values()]


def _scattered_sizes(kernel: Kernel, problem: Problem, dtype: str, seed: int) -> list[int]:
    shapes = problem.shapes(kernel.pass_name)[0]
    return [span(shape, _strides(kernel, name, shape, seed), dtype) for name, shape in shapes.items()]


def _strides(kernel: Kernel, name: str, shape: tuple[int, ...], seed: int) -> tuple[int, ...]:
    return _apart(shape, seed) if len(shape) == 5 and kernel.takes_strides(name) else _contiguous(shape)


def _apart(shape: tuple[int, ...], seed: int) -> tuple[int, ...]:
    strides, together = [0] * len(shape), _TOGETHER[seed % APART_LAYOUTS]
    step = 1
    for axis in together:
        strides[axis] = step
        step *= max(1, shape[axis])
    step = _APART
    for axis in (4, 3, 2, 1, 0):
        if axis not in together:
            strides[axis] = step
            step *= max(1, shape[axis])
    return tuple(strides)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
