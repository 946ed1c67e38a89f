"""The blocks of index arithmetic alone: axes, residue classes, taps and quotients, against o = i*stride - padding + t*dilation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from mistakes import mistaken
from trial import Array, around, as_given, broken, told

from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem


class Axis(NamedTuple):
    input: int
    kernel: int
    stride: int
    dilation: int
    padding: int
    output_padding: int

    @property
    def output(self) -> int:
        return (self.input - 1) * self.stride - 2 * self.padding + self.dilation * (self.kernel - 1) + self.output_padding + 1

    def reaches(self, output: int, tap: int) -> int | None:
        """Return the input that feeds an output through a tap, inside or not; None where there is none."""
        input, rest = divmod(output + self.padding - tap * self.dilation, self.stride)
        return None if rest else input


def _axes() -> list[Axis]:
    """Return axes of all small numbers that leave an output, as many as make whole problems."""
    numbers = itertools.product((1, 4), (1, 2, 3, 6), (1, 2, 3, 4), (1, 2, 3, 4), (0, 1, 5))
    axes = [Axis(*n, (n[0] + n[1]) % max(n[2], n[3])) for n in numbers]
    axes = [axis for axis in axes if axis.output - axis.output_padding > 0]
    return axes[: len(axes) // 3 * 3]


AXES = _axes()


def problem_of(axes: tuple[Axis, ...]) -> Problem:
    """Return the problem of one channel that has these axes."""
    input, kernel, stride, dilation, padding, more = zip(*axes, strict=True)
    return Problem(1, 1, 1, input, kernel, stride, padding, more, dilation)


GIVEN = as_given([problem_of(tuple(AXES[i : i + 3])) for i in range(0, len(AXES), 3)])


def of_each_axis(header: str, body: str) -> Kernel:
    """Return a kernel whose first thread runs a body for the axis `a` of `axes`, one after the other; it tells at `at`."""
    each = f"""int* at = told;
  if (thread == 0) for (int number = 0; number < {len(AXES)}; ++number) {{
    const Problem& axes = reinterpret_cast<const Problem*>(given)[number / 3];
    const int a = number % 3;
    {body}
  }}"""
    return around(header, each)


INDICES = of_each_axis(
    "core/geometry",
    """*at++ = greatest_common_divisor(axes.stride[a], axes.dilation[a]);
    for (int t = 0; t < axes.kernel_size[a]; ++t) {
      for (int o = 0; o < axes.output_size[a]; ++o) *at++ = input_index(axes, a, o, t);
      for (int i = 0; i < axes.input_size[a]; ++i) *at++ = max(-1, output_index(axes, a, i, t));
    }""",
)
CLASSES = of_each_axis(
    "core/geometry",
    """for (int r = 0; r < axes.stride[a]; ++r, at += 7) {
      const AxisClass c = axis_class(axes, a, r);
      const int numbers[7] = {c.first_output, c.outputs, c.first_tap, c.tap_step, c.taps, c.first_offset, c.offset_step};
      for (int i = 0; i < 7; ++i) at[i] = numbers[i];
    }""",
)
DENSE = of_each_axis(
    "core/dense_axis",
    """const int classes = dense_classes(axes, a);
    *at++ = classes;
    for (int i = 0; i < classes; ++i, at += 7) {
      const DenseAxis c = dense_axis(axes, a, i);
      const int numbers[7] = {c.first_output, c.step, c.outputs, c.taps, c.taps_before, c.spread, c.origin};
      for (int k = 0; k < 7; ++k) at[k] = numbers[k];
    }
    for (int t = 0; t < axes.kernel_size[a]; ++t) {
      const PackedTap tap = packed_tap(axes, a, t);
      *at++ = tap.class_taps;
      *at++ = tap.before;
      *at++ = tap.position;
    }
    for (int o = 0; o < axes.output_size[a]; ++o) *at++ = has_tap(axes, a, o);""",
)


def indices_are_right(kernel: Kernel, backend: str) -> bool:
    """Whether inputs of outputs and outputs of inputs are those of the formula, -1 where they are not inside."""
    expected: list[int] = []
    for axis in AXES:
        expected.append(int(np.gcd(axis.stride, axis.dilation)))
        for tap in range(axis.kernel):
            inputs = [axis.reaches(o, tap) for o in range(axis.output)]
            expected += [i if i is not None and 0 <= i < axis.input else -1 for i in inputs]
            expected += [inputs.index(i) if i in inputs else -1 for i in range(axis.input)]
    return told(kernel, backend, len(expected), GIVEN) == expected


def classes_are_right(kernel: Kernel, backend: str) -> bool:
    """Whether each residue class has its outputs, and the taps and inputs of them all."""
    numbers = iter(told(kernel, backend, 7 * sum(axis.stride for axis in AXES), GIVEN))
    for axis in AXES:
        for residue in range(axis.stride):
            first_output, outputs, first_tap, tap_step, taps, first_offset, offset_step = itertools.islice(numbers, 7)
            own = [o for o in range(axis.output) if (o + axis.padding) % axis.stride == residue]
            if [first_output + i * axis.stride for i in range(outputs)] != own:
                return False
            said = [(first_tap + j * tap_step, first_offset + j * offset_step) for j in range(taps)]
            for o in own:
                inputs = [(t, axis.reaches(o, t)) for t in range(axis.kernel)]
                if [(t, (o + axis.padding) // axis.stride - offset) for t, offset in said] != [(t, i) for t, i in inputs if i is not None]:
                    return False
    return True


def dense_axis_is_right(axis: Axis, numbers: Iterator[int]) -> bool:
    """Whether the classes that have taps, modulo lcm(stride, dilation), share the outputs that taps reach, and pack the taps."""
    live = {o: [t for t in range(axis.kernel) if axis.reaches(o, t) is not None] for o in range(axis.output)}
    step = int(np.lcm(axis.stride, axis.dilation))
    # The taps that outputs share: those of equal t * dilation mod stride, the classes in the order of their first taps.
    alike = [[t for t in range(axis.kernel) if (t - first) * axis.dilation % axis.stride == 0] for first in range(axis.kernel)]
    shared = [taps for first, taps in enumerate(alike) if taps[0] == first]
    before = {tuple(taps): sum(len(earlier) for earlier in shared[:i]) for i, taps in enumerate(shared)}
    seen: list[int] = []
    counts = []
    for _ in range(next(numbers)):
        first_output, own_step, outputs, count, taps_before, spread, origin = itertools.islice(numbers, 7)
        own = [first_output + a * own_step for a in range(outputs)]
        counts.append(count)
        seen += own
        if own_step != step or spread * axis.stride != step or first_output >= step:
            return False
        for a, o in enumerate(own):
            taps = live.get(o, [])
            if count != len(taps) or taps_before != before[tuple(taps)]:
                return False
            if [origin + (a + k) * spread for k in range(count)] != [axis.reaches(o, t) for t in reversed(taps)]:
                return False
    packed = [number for taps in alike for number in (len(taps), before[tuple(taps)])]
    places = [[next(numbers) for _ in range(3)] for _ in range(axis.kernel)]
    return (
        sorted(seen) == [o for o, taps in live.items() if taps]
        and counts == sorted(counts, reverse=True)
        and [number for place in places for number in place[:2]] == packed
        and [place[2] for place in places] == [taps[::-1].index(t) for t, taps in enumerate(alike)]
        and [next(numbers) for _ in live] == [len(taps) > 0 for taps in live.values()]
    )


def dense_axes_are_right(kernel: Kernel, backend: str) -> bool:
    classes = [min(axis.kernel, axis.stride // int(g)) * (axis.dilation // int(g)) for axis in AXES for g in [np.gcd(*axis[2:4])]]
    count = sum(1 + 7 * classes[i] + 3 * axis.kernel + axis.output for i, axis in enumerate(AXES))
    numbers = told(kernel, backend, count, GIVEN)
    left = iter(numbers)
    return all(dense_axis_is_right(axis, left) for axis in AXES) and next(left, None) is None


def test_inputs_of_outputs_and_outputs_of_inputs(backend: str) -> None:
    assert indices_are_right(INDICES, backend)


def test_residue_classes_have_their_outputs_and_taps(backend: str) -> None:
    assert classes_are_right(CLASSES, backend)


def test_dense_classes_share_the_outputs_that_taps_reach(backend: str) -> None:
    assert dense_axes_are_right(DENSE, backend)


@broken(
    ("if (scaled < 0 || ", "if ("),
    ("return input < problem.input_size[axis] ?", "return input <= problem.input_size[axis] ?"),
    ("return output < problem.output_size[axis] ?", "return output <= problem.output_size[axis] ?"),
)
def test_a_broken_index_is_seen(right: str, wrong: str) -> None:
    assert not indices_are_right(mistaken(INDICES, right, wrong), "host")


@broken(
    ("result.offset_step = dilation / divisor;", "result.offset_step = dilation;"),
    ("(kernel - 1 - tap) / result.tap_step + 1 : 0;", "(kernel - tap) / result.tap_step + 1 : 0;"),
    ("(beyond - 1) / stride + 1 : 0;", "beyond / stride + 1 : 0;"),
)
def test_a_broken_class_is_seen(right: str, wrong: str) -> None:
    assert not classes_are_right(mistaken(CLASSES, right, wrong), "host")


@broken(
    ("- result.spread * (result.taps - 1);", "- (result.taps - 1);"),
    ("min(first, kernel % tap_step);", "min(first, tap_step);"),
    ("result.class_taps - 1 - tap / step;", "tap / step;"),
    ("const int taps = min(problem.kernel_size[axis], stride)", "const int taps = min(problem.kernel_size[axis], stride - 1)"),
)
def test_a_broken_dense_class_is_seen(right: str, wrong: str) -> None:
    assert not dense_axes_are_right(mistaken(DENSE, right, wrong), "host")


VOXELS = around(
    "core/geometry",
    """const int size[3] = {3, 4, 5};
  for (int i = thread; i < 120; i += 32) {
    const Voxel v = voxel_at(i, 2, size), far = voxel_at((1LL << 33) * 120 / 32 + i, 1 << 30, size);
    const int numbers[7] = {v.n, v.c, v.d, v.h, v.w, far.n, far.c};
    for (int k = 0; k < 7; ++k) told[7 * i + k] = numbers[k];
  }""",
)


def voxels_of(kernel: Kernel, backend: str) -> tuple[Array, Array]:
    """Return the voxels that a kernel finds at places in memory, the last two numbers of places past 2^31; and those of NumPy."""
    near = np.stack(np.unravel_index(np.arange(120), (1, 2, 3, 4, 5)), 1)
    far = np.stack(np.unravel_index(np.arange(120) + (1 << 33) * 120 // 32, (2, 1 << 30, 3, 4, 5)), 1)
    return np.array(told(kernel, backend, 840)).reshape(120, 7), np.concatenate([near, far[:, :2]], 1)


def test_voxels_are_where_numpy_finds_them(backend: str) -> None:
    np.testing.assert_array_equal(*voxels_of(VOXELS, backend))


@broken(("index % size[1]", "index % size[0]"), ("index / channels", "index % channels"))
def test_a_broken_voxel_is_seen(right: str, wrong: str) -> None:
    assert not np.array_equal(*voxels_of(mistaken(VOXELS, right, wrong), "host"))


RUN, BELOW = 3, (-4, 12)  # the offsets below q that are tried
TAPS = [(k, s, d, p) for k in (1, 2, 3, 5) for s in (1, 2, 3, 4) for d in (1, 2, 3) for p in range(7)]
TOLD_OF_TAPS = around(
    "core/taps",
    f"""int* at = told;
  if (thread == 0) for (int number = 0; number < {len(TAPS)}; ++number) {{
    const int* const given_taps = given + 4 * number;
    const Taps taps{{given_taps[0], given_taps[1], given_taps[2], given_taps[3], {RUN}}};
    *at++ = taps.first();
    *at++ = taps.nearest();
    *at++ = taps.reach();
    *at++ = taps.inputs();
    for (int offset = {BELOW[0]}; offset < {BELOW[1]}; ++offset) {{
      for (int r = 0; r < taps.stride; ++r) *at++ = taps.tap(offset, r);
    }}
  }}""",
)


def taps_are_right(kernel: Kernel, backend: str) -> bool:
    """Whether a run's taps are those that lead from inputs to its outputs, and no input lies outside of what it says it reads."""
    expected: list[int] = []
    for k, s, d, p in TAPS:
        q = 20  # of the outputs q*s + r, away from the border
        # Below q lies input q + first - offset; of the taps that lead to an output there is one for each input.
        taps = {
            (q + p // s - (q * s + r + p - t * d) // s, r): t for r in range(s) for t in range(k) if (q * s + r + p - t * d) % s == 0
        }
        offsets = [offset for offset, _ in taps]
        expected += [p // s, min(offsets), max(offsets), RUN + max(offsets) - min(offsets)]
        expected += [taps.get((offset, r), -1) for offset in range(*BELOW) for r in range(s)]
    return told(kernel, backend, len(expected), [number for four in TAPS for number in four]) == expected


def test_a_run_has_its_taps(backend: str) -> None:
    assert taps_are_right(TOLD_OF_TAPS, backend)


@broken(
    ("return lead() > 0 ? -1 : 0;", "return 0;"),
    ("- lead() + stride) / stride - 1;", "+ stride) / stride - 1;"),
    ("scaled % dilation == 0 && ", ""),
    ("scaled / dilation < kernel ?", "scaled / dilation <= kernel ?"),
)
def test_a_broken_tap_is_seen(right: str, wrong: str) -> None:
    assert not taps_are_right(mistaken(TOLD_OF_TAPS, right, wrong), "host")


DIVISORS = [1, 2, 3, 5, 6, 7, 10, 641, 65535, 65536, 65537, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 2, 2**31 - 1]
NUMBERS = sorted(
    {n for v in DIVISORS for m in (1, 2, 3, (2**31 - 1) // v) for n in (m * v - 1, m * v, m * v + 1) if 0 <= n < 2**31}
    | {0, *(int(n) for n in np.random.default_rng(1).integers(0, 2**31, 50))}
)
QUOTIENTS = around(
    "core/divisor",
    f"""const int values = {len(DIVISORS)}, numbers = {len(NUMBERS)};
  for (int i = thread; i < values * numbers; i += 32) {{
    told[i] = divisor_of(given[i / numbers]).quotient(given[values + i % numbers]);
  }}""",
)


def quotients_of(kernel: Kernel, backend: str) -> list[int]:
    """Return the quotients of all numbers by all divisors."""
    return told(kernel, backend, len(DIVISORS) * len(NUMBERS), [*DIVISORS, *NUMBERS])


RADICES = (3, 1, 7, 1 << 20)
DIGITS = around(
    "core/digits",
    f"""for (int i = thread; i < {len(NUMBERS)}; i += 32) {{
    Digits index{{static_cast<unsigned>(given[{len(RADICES)} + i])}};
    for (int k = 0; k < {len(RADICES)}; ++k) told[{len(RADICES) + 1} * i + k] = index.next(given[k]);
    told[{len(RADICES) + 1} * i + {len(RADICES)}] = index.last();
  }}""",
)


def digits_are_right(kernel: Kernel, backend: str) -> bool:
    """Whether the digits of all numbers, the lowest first, and what they leave make the numbers again, each below its radix."""
    found = np.reshape(told(kernel, backend, len(NUMBERS) * (len(RADICES) + 1), [*RADICES, *NUMBERS]), (len(NUMBERS), -1))
    values = np.cumprod([1, *RADICES], dtype=np.int64)
    return bool((found[:, :-1] < RADICES).all() and (found.astype(np.int64) @ values == NUMBERS).all())


def test_digits_make_the_number(backend: str) -> None:
    assert digits_are_right(DIGITS, backend)


@broken(("rest % count;", "rest % (count + 1);"), ("rest /= count;", "rest /= count + 1;"), ("static_cast<int>(rest); }", "0; }"))
def test_broken_digits_are_seen(right: str, wrong: str) -> None:
    assert not digits_are_right(mistaken(DIGITS, right, wrong), "host")


def test_quotients_are_those_of_a_division(backend: str) -> None:
    assert quotients_of(QUOTIENTS, backend) == [n // value for value in DIVISORS for n in NUMBERS]


@broken(("63 - __clz(value - 1)", "62 - __clz(value - 1)"), ("+ value - 1) / value", ") / value"))
def test_a_broken_divisor_is_seen(right: str, wrong: str) -> None:
    assert quotients_of(mistaken(QUOTIENTS, right, wrong), "host") != [n // value for value in DIVISORS for n in NUMBERS]
