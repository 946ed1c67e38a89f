"""What is computed: the frozen geometry of one 3D transposed convolution, its residue classes, FLOP and bytes."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .errors import ProblemError, ProblemTypeError, shown

Triple = tuple[int, int, int]
PASSES = ("fprop", "dgrad", "wgrad")
LAYOUTS = ("ncdhw", "channels_last")
AXES = ("d", "h", "w")
INT32_MAX = 2**31 - 1


def _integer(name: str, value: object, minimum: int) -> int:
    if type(value) is int and minimum <= value <= INT32_MAX:
        return value
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ProblemTypeError(f"{name}={shown(value)}: must be an integer") from None
    if isinstance(value, bool):
        raise ProblemTypeError(f"{name}={value!r}: must be an integer, not a bool")
    if not minimum <= number <= INT32_MAX:
        raise ProblemError(f"{name}={shown(number)}: must be between {minimum} and 2**31 - 1")
    return number


def triple(name: str, value: object, minimum: int = 0) -> Triple:
    """Return `value` (an int, or a sequence of one or three ints, each at least `minimum`) as three ints.

    Raises:
        ProblemError: `value` is anything else; torch's string paddings ("same", "valid") and modes are refused here too.
    """
    if type(value) is tuple and len(value) == 3 and all(type(v) is int and minimum <= v <= INT32_MAX for v in value):
        return value
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        raise ProblemTypeError(f"{name}={shown(value)}: must be integers; a transposed convolution has zero padding only")
    given: Any = value
    listed = isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1
    if listed and len(given) not in (1, 3):
        raise ProblemError(f"{name}={shown(value)}: must be one integer or three, got {len(given)}")
    values = list(given.tolist() if hasattr(given, "tolist") else given) if listed else [given]
    numbers = [_integer(f"{name}[{axis}]" if len(values) == 3 else name, v, minimum) for axis, v in enumerate(values)]
    return (numbers[0], numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1], numbers[2])


def _sizes(name: str, shape: Any) -> tuple[int, ...]:
    try:
        given = tuple(shape)
    except TypeError:
        raise ProblemTypeError(f"{name}_shape={shown(shape)}: must be a sequence of integers") from None
    return tuple(_integer(f"{name}.shape[{axis}]", size, 0) for axis, size in enumerate(given))


@dataclass(frozen=True)
class AxisClass:
    """The outputs `o` of one axis with `(o + padding) % stride == residue`, and the taps that feed all of them.

    With `q = (o + padding) // stride`, tap `taps[j]` reads input `q - input_offsets[j]` where that lies in `[0, input)`.
    """

    residue: int
    first_output: int
    count: int
    taps: tuple[int, ...]
    input_offsets: tuple[int, ...]


@dataclass(frozen=True)
class ResidueClass:
    """One residue on each axis: a dense stride-1 correlation of the input with a fixed list of taps."""

    axes: tuple[AxisClass, AxisClass, AxisClass]

    @property
    def voxels(self) -> int:
        """Number of output voxels of the class, per batch entry and channel."""
        return math.prod(axis.count for axis in self.axes)

    @property
    def taps(self) -> int:
        """Number of (kd, kh, kw) positions that feed the class; 0 means its outputs are bias alone."""
        return math.prod(len(axis.taps) for axis in self.axes)


@dataclass(frozen=True)
class Problem:
    """The geometry of `conv_transpose3d`, without tensors and dtypes.

    Shapes are `input (batch, in_channels, *input_size)`, `weight (in_channels, out_channels / groups, *kernel_size)`,
    `output (batch, out_channels, *output_size)`. Input `i` and tap `t` feed output `i*stride - padding + t*dilation`.

    Args:
        batch: number of volumes; 0 is allowed.
        in_channels, out_channels: at least 1, both divisible by `groups`.
        input_size: int or (depth, height, width), each at least 1.
        kernel_size, stride, dilation: int or three, each at least 1.
        padding: int or three, each at least 0; removes outputs on both sides.
        output_padding: int or three, `0 <= output_padding < max(stride, dilation)` on each axis.
        groups: at least 1.
        bias: whether a bias (out_channels,) is added.

    Raises:
        ProblemError: any rule above is broken, the output would be empty, or an extent passes 2**31 - 1.
    """

    batch: int
    in_channels: int
    out_channels: int
    input_size: Triple
    kernel_size: Triple
    stride: Triple = (1, 1, 1)
    padding: Triple = (0, 0, 0)
    output_padding: Triple = (0, 0, 0)
    dilation: Triple = (1, 1, 1)
    groups: int = 1
    bias: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (("batch", 0), ("in_channels", 1), ("out_channels", 1), ("groups", 1)):
            object.__setattr__(self, name, _integer(name, getattr(self, name), minimum))
        for name in ("input_size", "kernel_size", "stride", "dilation"):
            object.__setattr__(self, name, triple(name, getattr(self, name), 1))
        for name in ("padding", "output_padding"):
            object.__setattr__(self, name, triple(name, getattr(self, name), 0))
        if not isinstance(self.bias, bool) and getattr(getattr(self.bias, "dtype", None), "kind", None) != "b":
            raise ProblemTypeError(f"bias={shown(self.bias)}: must be True or False, whether a bias is added")
        object.__setattr__(self, "bias", bool(self.bias))
        for name in ("in_channels", "out_channels"):
            if getattr(self, name) % self.groups:
                raise ProblemError(f"groups={self.groups}: must divide {name}={getattr(self, name)}")
        for a, axis in enumerate(AXES):
            limit = max(self.stride[a], self.dilation[a])
            if self.output_padding[a] >= limit:
                raise ProblemError(
                    f"output_padding[{a}]={self.output_padding[a]}: must be below max(stride, dilation)={limit} on axis {axis}"
                )
            extent = self._extent(a)
            if extent > INT32_MAX or self.padding[a] > INT32_MAX // 2:
                raise ProblemError(
                    f"kernel_size[{a}]={self.kernel_size[a]}, stride[{a}]={self.stride[a]}, dilation[{a}]={self.dilation[a]}, "
                    f"padding[{a}]={self.padding[a]}: axis {axis} would span {extent} positions, the limit is 2**31 - 1"
                )
            if extent <= 2 * self.padding[a]:
                raise ProblemError(
                    f"padding[{a}]={self.padding[a]}: leaves an empty output on axis {axis} "
                    f"(size {extent - 2 * self.padding[a]}); it must be at most {(extent - 1) // 2}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}  # not what is computed from them, and kept

    def _extent(self, a: int) -> int:
        reach = (self.input_size[a] - 1) * self.stride[a] + self.dilation[a] * (self.kernel_size[a] - 1)
        return reach + self.output_padding[a] + 1

    @classmethod
    def from_shapes(
        cls,
        input_shape: Sequence[int],
        weight_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        output_padding: int | Sequence[int] = 0,
        groups: int = 1,
        dilation: int | Sequence[int] = 1,
    ) -> Problem:
        """Make the problem of `conv_transpose3d(input, weight, bias, ...)`; a 4-D `input_shape` counts as batch 1.

        Raises:
            ProblemError: the shapes do not fit each other, or `Problem` refuses the geometry.
        """
        input_shape, weight_shape = _sizes("input", input_shape), _sizes("weight", weight_shape)
        bias_shape = None if bias_shape is None else _sizes("bias", bias_shape)
        if len(input_shape) not in (4, 5):
            raise ProblemError(f"input.shape={input_shape}: must be (N, C, D, H, W) or (C, D, H, W)")
        if len(weight_shape) != 5:
            raise ProblemError(f"weight.shape={weight_shape}: must be (in_channels, out_channels / groups, kD, kH, kW)")
        batched = input_shape if len(input_shape) == 5 else (1, *input_shape)
        if batched[1] != weight_shape[0]:
            raise ProblemError(
                f"weight.shape={weight_shape}: its first size must be the input's {batched[1]} channels (input.shape={input_shape})"
            )
        groups = _integer("groups", groups, 1)
        out_channels = weight_shape[1] * groups
        if bias_shape is not None and bias_shape != (out_channels,):
            raise ProblemError(f"bias.shape={bias_shape}: must be ({out_channels},), one value for each output channel")
        for name, shape in (("input", batched[1:]), ("weight", weight_shape)):
            if 0 in shape:
                raise ProblemError(f"{name}.shape={shape}: only the batch may be 0")
        return cls(
            batch=batched[0],
            in_channels=batched[1],
            out_channels=out_channels,
            input_size=triple("input_size", batched[2:], 1),
            kernel_size=triple("kernel_size", weight_shape[2:], 1),
            stride=triple("stride", stride, 1),
            padding=triple("padding", padding),
            output_padding=triple("output_padding", output_padding),
            dilation=triple("dilation", dilation, 1),
            groups=groups,
            bias=bias_shape is not None,
        )

    @cached_property
    def output_size(self) -> Triple:
        """`(in - 1)*stride - 2*padding + dilation*(kernel - 1) + output_padding + 1` on each axis (torch's formula)."""
        d, h, w = (self._extent(a) - 2 * self.padding[a] for a in range(3))
        return (d, h, w)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.in_channels, *self.input_size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.in_channels, self.out_channels // self.groups, *self.kernel_size)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.batch, self.out_channels, *self.output_size)

    def shapes(self, pass_name: str) -> tuple[dict[str, tuple[int, ...]], str]:
        """Return the tensors a pass reads, name to shape, and the name of the one it writes.

        `bias` is among them only for fprop with `bias=True`; the written tensor is in the dict too, last.
        """
        if pass_name == "fprop":
            bias = {"bias": (self.out_channels,)} if self.bias else {}
            return {"input": self.input_shape, "weight": self.weight_shape, **bias, "output": self.output_shape}, "output"
        if pass_name == "dgrad":
            return {
                "grad_output": self.output_shape,
                "weight": self.weight_shape,
                "grad_input": self.input_shape,
            }, "grad_input"
        if pass_name == "wgrad":
            return {
                "input": self.input_shape,
                "grad_output": self.output_shape,
                "grad_weight": self.weight_shape,
            }, "grad_weight"
        raise ProblemError(f"pass={shown(pass_name)}: must be one of {', '.join(PASSES)}")

    def axis_classes(self, a: int) -> list[AxisClass]:
        """Return the `stride[a]` residue classes of axis `a`, some of them without taps or without outputs."""
        stride, padding, dilation, out = self.stride[a], self.padding[a], self.dilation[a], self.output_size[a]
        classes = []
        for residue in range(stride):
            taps = tuple(t for t in range(self.kernel_size[a]) if t * dilation % stride == residue)
            first = (residue - padding) % stride
            classes.append(
                AxisClass(
                    residue=residue,
                    first_output=first,
                    count=max(0, -(-(out - first) // stride)),
                    taps=taps,
                    input_offsets=tuple((t * dilation - residue) // stride for t in taps),
                )
            )
        return classes

    @cached_property
    def class_sizes(self) -> tuple[tuple[int, int], ...]:
        """How many taps, and how many outputs, each residue class of each axis has, as `axis_classes` lists them."""
        sizes = []
        for stride, padding, dilation, kernel, out in zip(
            self.stride, self.padding, self.dilation, self.kernel_size, self.output_size, strict=True
        ):
            taps = [t * dilation % stride for t in range(kernel)]
            for residue in range(stride):
                sizes.append((taps.count(residue), max(0, -(-(out - (residue - padding) % stride) // stride))))
        return tuple(sizes)

    def residue_classes(self) -> list[ResidueClass]:
        """Return all `prod(stride)` residue classes, depth slowest; together they cover each output voxel once."""
        d, h, w = (self.axis_classes(a) for a in range(3))
        return [ResidueClass((i, j, k)) for i in d for j in h for k in w]

    def live_pairs(self, a: int) -> int:
        """Return how many (input, tap) pairs of axis `a` land inside the output; the clipped ones are not counted."""
        return self._live_pairs[a]

    @cached_property
    def _live_pairs(self) -> tuple[int, ...]:
        return tuple(
            _pairs_up_to(padding + size - 1, *steps) - _pairs_up_to(padding - 1, *steps)
            for padding, size, *steps in zip(
                self.padding, self.output_size, self.stride, self.input_size, self.dilation, self.kernel_size, strict=True
            )
        )

    def _live_taps(self, a: int) -> tuple[int, int, int, int]:
        """Return the first live tap of axis `a`, the one behind the last, and the paddings of the problem that has these alone."""
        size, out, kernel = self.input_size[a], self.output_size[a], self.kernel_size[a]
        stride, padding, dilation = self.stride[a], self.padding[a], self.dilation[a]
        least = -(-(padding - (size - 1) * stride) // dilation)  # the first tap that leads the last input behind the border
        first = max(0, min(least, padding // dilation))  # and the padding not below 0
        end = min(kernel, (out - 1 + padding) // dilation + 1)
        for low, high in ((first, end), (0, end), (first, kernel)):
            left = padding - low * dilation
            more = out - ((size - 1) * stride - 2 * left + dilation * (high - low - 1) + 1)
            if low < high and 0 <= more < max(stride, dilation):
                return low, high, left, more
        return 0, kernel, padding, self.output_padding[a]

    @cached_property
    def live_taps(self) -> tuple[slice, slice, slice]:
        """The taps of each axis that lead from some input to some output, as far as they and those between are a problem's own.

        Volumes of few voxels along an axis have others: of a 3x3x3 kernel with padding 1 on flat volumes only the middle plane is live.
        """
        d, h, w = (slice(*self._live_taps(a)[:2]) for a in range(3))
        return (d, h, w)

    @cached_property
    def without_dead_taps(self) -> Problem:
        """The problem of the same input and output that has `weight[:, :, *live_taps]` as its weight; itself where all taps are live."""
        low, high, padding, more = zip(*(self._live_taps(a) for a in range(3)), strict=True)
        kernel = tuple(end - first for first, end in zip(low, high, strict=True))
        if kernel == self.kernel_size:
            return self
        return replace(self, kernel_size=kernel, padding=padding, output_padding=more)

    @cached_property
    def flop(self) -> int:
        """Useful floating-point operations, 2 for each multiply-add whose tap is not clipped; the same for all passes."""
        return 2 * self.batch * self.in_channels * (self.out_channels // self.groups) * math.prod(self._live_pairs)

    def compulsory_bytes(self, itemsize: int, pass_name: str = "fprop") -> int:
        """Return the fewest bytes any kernel moves: each tensor of the pass read or written once.

        Raises:
            ProblemError: `itemsize` is no whole number from 1 on, or there is no such pass.
        """
        return _integer("itemsize", itemsize, 1) * sum(math.prod(shape) for shape in self.shapes(pass_name)[0].values())

    @property
    def fits_int32_offsets(self) -> bool:
        """Whether every element of every tensor has an offset below 2**31."""
        return max(math.prod(s) for s in (self.input_shape, self.weight_shape, self.output_shape)) <= INT32_MAX

    @cached_property
    def names(self) -> dict[str, object]:
        """What a kernel's declaration may use: every field, its three axes (`stride_d`), and the counts derived from them."""
        names: dict[str, object] = self.__getstate__() | {"output_size": self.output_size}
        for name in ("input_size", "output_size", "kernel_size", "stride", "padding", "output_padding", "dilation"):
            prefix = name.removesuffix("_size")
            names |= {f"{prefix}_{axis}": value for axis, value in zip(AXES, names[name], strict=True)}  # type: ignore[call-overload]
        return names | {
            "has_bias": int(self.bias),
            "in_channels_per_group": self.in_channels // self.groups,
            "out_channels_per_group": self.out_channels // self.groups,
            "input_voxels": math.prod(self.input_size),
            "output_voxels": math.prod(self.output_size),
            "taps": math.prod(self.kernel_size),
            "residues": math.prod(self.stride),
            "residue_voxels": math.prod(-(-out // s) for out, s in zip(self.output_size, self.stride, strict=True)),
            "input_numel": math.prod(self.input_shape),
            "weight_numel": math.prod(self.weight_shape),
            "output_numel": math.prod(self.output_shape),
        }

    def __str__(self) -> str:
        """A short name, such as `n2_c8to16_i6x7x8_k3_s2_p1`, that `Problem.parse` reads back; defaults are left out."""

        def size(value: Triple) -> str:
            return str(value[0]) if len(set(value)) == 1 else "x".join(map(str, value))

        parts = [f"n{self.batch}", f"c{self.in_channels}to{self.out_channels}", f"i{size(self.input_size)}"]
        parts.append(f"k{size(self.kernel_size)}")
        for letters, name in _OPTIONAL.items():
            value = getattr(self, name)
            if value != Problem.__dataclass_fields__[name].default:
                parts.append(f"{letters}{value if name == 'groups' else size(value)}")
        return "_".join(parts + ["bias"] * self.bias)

    @classmethod
    def parse(cls, name: str) -> Problem:
        """Return the problem a short name stands for; the inverse of `str`.

        Raises:
            ProblemError: the name does not follow `n2_c8to16_i6x7x8_k3[_s2][_p1][_op1][_d2][_g4][_bias]`.
        """
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise ProblemError(f"name={shown(name)}: must look like n2_c8to16_i6x7x8_k3_s2_p1_op1_d2_g4_bias")
        given = {key: value for key, value in match.groupdict().items() if value is not None}
        values: dict[str, object] = {
            key: int(v) if key in _SCALARS else triple(key, [int(x) for x in v.split("x")])
            for key, v in given.items()
            if key != "bias"
        }
        return cls(**values, bias="bias" in given)  # type: ignore[arg-type]


def _pairs_up_to(most: int, stride: int, inputs: int, dilation: int, taps: int) -> int:
    """Return how many (input i, tap t) have `i*stride + t*dilation <= most`, in a time that hardly depends on the sizes."""
    reached = min(taps, most // dilation + 1)  # taps that input 0 has
    whole = max(0, min(reached, (most - (inputs - 1) * stride) // dilation + 1))  # taps that every input has
    count = max(0, reached - whole)
    lowest = most - (reached - 1) * dilation
    return whole * inputs + count + _floor_sum(count, stride, dilation, lowest)


def _floor_sum(count: int, divisor: int, step: int, start: int) -> int:
    """Return the sum of `(step*n + start) // divisor` over `n < count`, nothing negative, by Euclid's algorithm.

    Graham, Knuth and Patashnik, "Concrete Mathematics", section 3.5: the lattice points under a line are counted by rows in place of
    columns, which takes the divisor's place by the step's remainder.
    """
    total = 0
    while count > 0:
        total += step // divisor * (count * (count - 1) // 2) + start // divisor * count
        step, start = step % divisor, start % divisor
        count, start = divmod(step * count + start, divisor)
        divisor, step = step, divisor  # with a step of 0 there are no more rows
    return total


_SCALARS = ("batch", "in_channels", "out_channels", "groups")
_OPTIONAL = {"s": "stride", "p": "padding", "op": "output_padding", "d": "dilation", "g": "groups"}
_COUNT = "[0-9]{1,10}"
_SIZE = rf"{_COUNT}(?:x{_COUNT}x{_COUNT})?"
_NAME = re.compile(
    rf"n(?P<batch>{_COUNT})_c(?P<in_channels>{_COUNT})to(?P<out_channels>{_COUNT})_i(?P<input_size>{_SIZE})_k(?P<kernel_size>{_SIZE})"
    rf"(?:_s(?P<stride>{_SIZE}))?(?:_p(?P<padding>{_SIZE}))?(?:_op(?P<output_padding>{_SIZE}))?"
    rf"(?:_d(?P<dilation>{_SIZE}))?(?:_g(?P<groups>{_COUNT}))?(?P<bias>_bias)?"
)

# The C twin: (name, how many ints). `c_struct` writes it, `c_values` fills it, so neither is typed twice.
_C_FIELDS = (
    *((name, 1) for name in _SCALARS),
    *((name, 3) for name in ("input_size", "output_size", "kernel_size", "stride", "padding", "dilation")),
)


def c_struct() -> str:
    """Return the C declaration of `Problem`, the text of `kernels/include/convt3d/core/problem.cuh`."""
    members = "\n".join(f"  int {name}{f'[{count}]' if count > 1 else ''};" for name, count in _C_FIELDS)
    return (
        "// The geometry a kernel is given. Generated by `python -m cupy_convt3d.problem`; do not edit.\n"
        f"#pragma once\n\nstruct Problem {{\n{members}\n}};\n"
    )


def c_values(problem: Problem) -> list[int]:
    """Return the ints of the C struct, in its order."""
    values: list[int] = []
    for name, count in _C_FIELDS:
        value = getattr(problem, name)
        values += [value] if count == 1 else list(value)
    return values


if __name__ == "__main__":
    print(c_struct(), end="")
