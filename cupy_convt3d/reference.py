"""The oracle: fprop, dgrad and wgrad as a pure NumPy scatter, and the bound that a kernel's rounding error must keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from .errors import ProblemError
from .problem import Problem, Triple

Array = np.ndarray[Any, np.dtype[Any]]
Slices = tuple[slice, slice, slice]

# `c` of the error bound. Each of the K roundings of one accumulation is off by at most u*B, so an error above t*sqrt(K)*u*B
# has a chance below 2*exp(-t**2/2) if they are independent (Hoeffding), and that counts every partial sum as if it were already
# B: real ones grow from 0 to B and give a third of it (measured with fp32, K = 64..768: 0.30). So 4 is twelve of the deviations
# seen, and up to K = 16, where 4*sqrt(K) >= K, it is the worst case itself: no correct kernel can fail there.
ACCUMULATION_FACTOR = 4.0
_MOST_AT_ONCE = 2**14  # elements of the products of all taps with all voxels


@dataclass(frozen=True)
class Precision:
    """What a kernel's arithmetic rounds, as unit roundoffs (half the distance from 1 to the next number).

    Attributes:
        name: as in `dtypes.DTYPES`.
        unit_in: rounding of the operands *inside* the kernel; 0 where the reference is given the rounded tensors.
        unit_accumulate: rounding of each addition.
        unit_out: rounding of the result to the dtype of the written tensor.
        tiny: absolute error allowed for flushed and subnormal numbers.
    """

    name: str
    unit_in: float
    unit_accumulate: float
    unit_out: float
    tiny: float


# Tensor cores cut sums off where CUDA cores round them, hence 2**-23 for all that may run on them. Below 2**-126 fp32 and bf16
# may be flushed, once for each of up to 2**26 terms. The fp16 epilogue rounds subnormals to multiples of 2**-24.
# NOTE: fp64 counts its additions twice, because the reference is fp64 too and as far from the truth as the kernel.
_PRECISIONS = {
    "fp64": Precision("fp64", 0.0, 2.0**-52, 2.0**-53, 2.0**-996),
    "fp32": Precision("fp32", 0.0, 2.0**-24, 2.0**-24, 2.0**-100),
    "tf32": Precision("tf32", 2.0**-11, 2.0**-23, 2.0**-24, 2.0**-100),
    "tf32x3": Precision("tf32x3", 2.0**-22, 2.0**-23, 2.0**-24, 2.0**-100),
    "fp16": Precision("fp16", 0.0, 2.0**-23, 2.0**-11, 2.0**-24),
    "bf16": Precision("bf16", 0.0, 2.0**-23, 2.0**-8, 2.0**-100),
}


def precision(dtype_name: str) -> Precision:
    """Return the roundoffs of `dtype_name`, one of `dtypes.DTYPES`; all but fp64 accumulate in fp32.

    "tf32" is for operands rounded to nearest; a kernel that truncates them is off by up to twice as much and fails.

    Raises:
        ProblemError: the name is not one of these.
    """
    if dtype_name not in _PRECISIONS:
        raise ProblemError(f"dtype={dtype_name!r}: must be one of {', '.join(_PRECISIONS)}")
    return _PRECISIONS[dtype_name]


def fprop(problem: Problem, input: Array, weight: Array, bias: Array | None = None) -> Array:
    """Return `conv_transpose3d(input, weight, bias)`: `output[i*stride - padding + t*dilation] += input[i] * weight[t]`.

    Args:
        problem: the geometry; says whether there is a bias.
        input: `(batch, in_channels, *input_size)`, integers or floats (bfloat16 of ml_dtypes too).
        weight: `(in_channels, out_channels / groups, *kernel_size)`.
        bias: (out_channels,) where `problem.bias`, else None.

    Returns:
        `(batch, out_channels, *output_size)` in int64 if every tensor holds integers, then exact; else in fp64.

    Raises:
        ProblemError: a shape does not fit the problem, or a dtype holds no real numbers.
    """
    return run("fprop", problem, {"input": input, "weight": weight} | ({} if bias is None else {"bias": bias}))


def dgrad(problem: Problem, grad_output: Array, weight: Array) -> Array:
    """Return the gradient of the input `(batch, in_channels, *input_size)`: the adjoint of `fprop` in its input.

    Shapes are those of `problem.shapes("dgrad")`; dtypes and errors as in `fprop`.
    """
    return run("dgrad", problem, {"grad_output": grad_output, "weight": weight})


def wgrad(problem: Problem, input: Array, grad_output: Array) -> Array:
    """Return the gradient of the weight `(in_channels, out_channels / groups, *kernel_size)`: the adjoint of `fprop` in it.

    Shapes are those of `problem.shapes("wgrad")`; dtypes and errors as in `fprop`.
    """
    return run("wgrad", problem, {"input": input, "grad_output": grad_output})


def grad_bias(problem: Problem, grad_output: Array) -> Array:
    """Return the gradient of the bias (out_channels,): the sum over all but channels. Dtypes and errors as in `fprop`."""
    gradient = _operands({"grad_output": problem.output_shape}, {"grad_output": grad_output})["grad_output"]
    return np.asarray(gradient.sum((0, 2, 3, 4)))


def run(pass_name: str, problem: Problem, tensors: Mapping[str, Array]) -> Array:
    """Return what a pass writes, given the tensors it reads under their names in `problem.shapes(pass_name)`.

    Other names, such as that of the written tensor, are ignored except for a `bias` that the problem does not have.

    Raises:
        ProblemError: a tensor is missing, or as in `fprop`.
    """
    shapes, written = problem.shapes(pass_name)
    shapes.pop(written)
    if pass_name == "fprop" and "bias" in tensors and not problem.bias:
        raise ProblemError("bias: is given, but the problem has bias=False")
    operands = _operands(shapes, tensors)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf are legal values here
        if pass_name == "fprop":
            return _fprop(problem, operands["input"], operands["weight"], operands.get("bias"))
        if pass_name == "dgrad":
            return _dgrad(problem, operands["grad_output"], operands["weight"])
        return _wgrad(problem, operands["input"], operands["grad_output"])


def padded(problem: Problem, tensors: Mapping[str, Array]) -> Array:
    """Return what fprop writes if the input lies among zeros that weights are multiplied with too, as matrix products of tiles do.

    It is that of `run`, but for elements of a weight that are not finite: these make NaN of all outputs whose residue class has the tap.

    Raises:
        ProblemError: as in `run`.
    """
    reach = zip(problem.kernel_size, problem.stride, problem.padding, problem.dilation, problem.output_padding, strict=True)
    d, h, w = (-(-(dilation * (kernel - 1) + padding + extra) // stride) for kernel, stride, padding, dilation, extra in reach)
    (size_d, size_h, size_w), (p_d, p_h, p_w), (s_d, s_h, s_w) = problem.input_size, problem.padding, problem.stride
    wider = replace(
        problem,
        input_size=(size_d + 2 * d, size_h + 2 * h, size_w + 2 * w),
        padding=(p_d + d * s_d, p_h + h * s_h, p_w + w * s_w),
    )
    zeros = ((0, 0), (0, 0), (d, d), (h, h), (w, w))
    return run("fprop", wider, {**tensors, "input": np.pad(_real("input", tensors["input"]), zeros)})


def magnitude(pass_name: str, problem: Problem, tensors: Mapping[str, Array]) -> Array:
    """Return B of the error bound: the same pass over absolute values, so `B = convT(|x|, |w|) + |bias|` for fprop.

    Shape of the written tensor; dtypes and errors as in `run`. While B < 2**24 fp32 accumulates integers exactly.
    """
    return run(pass_name, problem, {name: np.abs(_real(name, tensor)) for name, tensor in tensors.items()})


def terms(pass_name: str, problem: Problem) -> Array:
    """Return K of the error bound: how many products (and bias) are added up in each element of the written tensor.

    This is the same pass over tensors of ones. It depends on the geometry alone and is a product over the axes, so it is
    computed as one. int64, a read-only view in the shape of the written tensor; 0 where no tap reaches.
    """
    shape = problem.shapes(pass_name)[0][problem.shapes(pass_name)[1]]
    constant = {"fprop": problem.in_channels, "dgrad": problem.out_channels, "wgrad": problem.batch * problem.groups}[pass_name]
    constant //= problem.groups
    counts = [_axis_terms(pass_name, problem, a) for a in range(3)]
    volume = constant * counts[0][:, None, None] * counts[1][:, None] * counts[2]
    return np.broadcast_to(volume + (pass_name == "fprop" and problem.bias), shape)


def error_bound(
    pass_name: str,
    problem: Problem,
    tensors: Mapping[str, Array],
    precision: Precision,
    *,
    reference: Array | None = None,
    strict: bool = False,
) -> Array:
    """Return how far each written element may be from the reference: `c*sqrt(K)*u_acc*B + 2*u_in*B + u_out*|ref| + tiny`.

    The first term is the probabilistic form of the standard bound `K*u*B` of a sum of products (Higham, Accuracy and Stability
    of Numerical Algorithms, 3.1; Higham and Mary 2019 for the square root), the second the rounding of both operands.

    Args:
        pass_name: "fprop", "dgrad" or "wgrad".
        problem: the geometry.
        tensors: what the pass reads, as the kernel got them (already rounded to their dtype).
        precision: see `precision`.
        reference: `run(pass_name, problem, tensors)`, if at hand.
        strict: K in place of sqrt(K): what no correct kernel can pass, even with all its roundings on one side.

    Returns:
        fp64, in the shape of the written tensor.

    Raises:
        ProblemError: as in `run`.
    """
    ref = run(pass_name, problem, tensors) if reference is None else reference
    count = terms(pass_name, problem)
    growth = ACCUMULATION_FACTOR * precision.unit_accumulate * (count if strict else np.sqrt(count))
    bound: Array = (growth + 2 * precision.unit_in) * magnitude(pass_name, problem, tensors)
    return bound + precision.unit_out * np.abs(ref) + precision.tiny


def _real(name: str, tensor: Array) -> Array:
    array = np.asarray(tensor)
    if array.dtype.kind in "biu":
        return array.astype(np.int64, copy=False)
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        return array.astype(np.float64, copy=False)
    raise ProblemError(f"{name}.dtype={array.dtype}: must be an integer or a real floating-point dtype")


def _operands(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Array]) -> dict[str, Array]:
    if missing := shapes.keys() - tensors.keys():
        raise ProblemError(f"{', '.join(sorted(missing))}: missing; the pass reads {', '.join(shapes)}")
    operands = {name: _real(name, tensors[name]) for name in shapes}
    for name, shape in shapes.items():
        if operands[name].shape != shape:
            raise ProblemError(f"{name}.shape={operands[name].shape}: must be {shape}")
    common = np.result_type(*operands.values())
    return {name: operand.astype(common, copy=False) for name, operand in operands.items()}


def _live_range(problem: Problem, a: int, tap: int) -> tuple[slice, slice]:
    """Return the inputs of axis `a` that `tap` sends into the output (none: empty), and the outputs they land on."""
    stride, shift = problem.stride[a], tap * problem.dilation[a] - problem.padding[a]  # input i lands on i*stride + shift
    first = max(0, -(shift // stride))
    stop = max(first, min(problem.input_size[a], (problem.output_size[a] - 1 - shift) // stride + 1))
    return slice(first, stop), slice(first * stride + shift, stop * stride + shift, stride)


@lru_cache(maxsize=64)
def _live_axes(problem: Problem) -> list[list[tuple[int, slice, slice]]]:
    """Return for each axis the taps that land inside, with their inputs and the outputs that these land on."""
    axes = []
    for a in range(3):
        ranges = ((tap, *_live_range(problem, a, tap)) for tap in range(problem.kernel_size[a]))
        axes.append([entry for entry in ranges if entry[1].stop > entry[1].start])
    return axes


def _live_taps(problem: Problem) -> Iterator[tuple[Triple, Slices, Slices]]:
    """Yield each tap that lands inside, with its inputs and the outputs they land on; both slices have the same shape."""
    axes = _live_axes(problem)
    for tap_d, in_d, out_d in axes[0]:
        for tap_h, in_h, out_h in axes[1]:
            for tap_w, in_w, out_w in axes[2]:
                yield (tap_d, tap_h, tap_w), (in_d, in_h, in_w), (out_d, out_h, out_w)


def _axis_terms(pass_name: str, problem: Problem, a: int) -> Array:
    size = {"fprop": problem.output_size, "dgrad": problem.input_size, "wgrad": problem.kernel_size}[pass_name][a]
    counts = np.zeros(size, np.int64)
    for tap, inputs, outputs in _live_axes(problem)[a]:
        if pass_name == "wgrad":
            counts[tap] = inputs.stop - inputs.start
        else:
            counts[inputs if pass_name == "dgrad" else outputs] += 1
    return counts


# Inside, tensors are (groups, channels / groups, batch, D, H, W) and weights (kD, kH, kW, groups, in / groups, out / groups):
# then one matrix product for each tap does all of its multiply-adds.
def _group(problem: Problem, tensor: Array) -> Array:
    batch, channels, *size = tensor.shape
    split = tensor.reshape(batch, problem.groups, channels // problem.groups, *size)
    return np.ascontiguousarray(split.transpose(1, 2, 0, 3, 4, 5))


def _ungroup(grouped: Array) -> Array:
    groups, channels, batch, *size = grouped.shape
    return grouped.transpose(2, 0, 1, 3, 4, 5).reshape(batch, groups * channels, *size)


def _taps_first(problem: Problem, weight: Array) -> Array:
    channels, *rest = weight.shape
    split = weight.reshape(problem.groups, channels // problem.groups, *rest)
    return np.ascontiguousarray(split.transpose(3, 4, 5, 0, 1, 2))


def _zeros(problem: Problem, channels: int, size: Triple, like: Array) -> Array:
    return np.zeros((problem.groups, channels // problem.groups, problem.batch, *size), like.dtype)


def _matrix(voxels: Array) -> Array:
    return voxels.reshape(*voxels.shape[:2], math.prod(voxels.shape[2:]))


def _products(taps: Array, source: Array) -> Callable[[Triple, Slices], Array]:
    """Return what gives the product of a tap with a part of the voxels: of few, it is cut out of that of all taps with all voxels."""
    if taps[..., 0].size * source[0, 0].size <= _MOST_AT_ONCE:
        every = (taps @ _matrix(source)).reshape(*taps.shape[:-1], *source.shape[2:])
        return lambda tap, part: every[(*tap, ..., *part)]

    def product(tap: Triple, part: Slices) -> Array:
        voxels = source[(..., *part)]
        return (taps[tap] @ _matrix(voxels)).reshape(*taps.shape[3:-1], *voxels.shape[2:])

    return product


def _fprop(problem: Problem, input: Array, weight: Array, bias: Array | None) -> Array:
    source = _group(problem, input)
    product = _products(_taps_first(problem, weight).swapaxes(4, 5), source)
    output = _zeros(problem, problem.out_channels, problem.output_size, source)
    for tap, inputs, outputs in _live_taps(problem):
        output[(..., *outputs)] += product(tap, inputs)
    result = _ungroup(output)
    return result if bias is None else result + bias[:, None, None, None]


def _dgrad(problem: Problem, grad_output: Array, weight: Array) -> Array:
    source = _group(problem, grad_output)
    product = _products(_taps_first(problem, weight), source)
    grad_input = _zeros(problem, problem.in_channels, problem.input_size, source)
    for tap, inputs, outputs in _live_taps(problem):
        grad_input[(..., *inputs)] += product(tap, outputs)
    return _ungroup(grad_input)


def _wgrad(problem: Problem, input: Array, grad_output: Array) -> Array:
    source, gradient = _group(problem, input), _group(problem, grad_output)
    shape = (problem.groups, problem.in_channels // problem.groups, problem.out_channels // problem.groups)
    taps = np.zeros((*problem.kernel_size, *shape), source.dtype)
    for tap, inputs, outputs in _live_taps(problem):
        taps[tap] = _matrix(source[(..., *inputs)]) @ _matrix(gradient[(..., *outputs)]).swapaxes(1, 2)
    return np.ascontiguousarray(taps.transpose(3, 4, 5, 0, 1, 2)).reshape(problem.weight_shape)
