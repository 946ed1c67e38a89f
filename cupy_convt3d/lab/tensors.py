"""The numbers a kernel is tested on: integers that are summed exactly, normal deviates, and what is not finite or does not stay so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..dtypes import DTYPES
from ..errors import ProblemError
from ..problem import Problem

Array = np.ndarray[Any, np.dtype[Any]]

KINDS = ("exact", "exact_wide", "random")
SPOILT = ("nan", "inf")  # kinds with numbers that are not finite
NARROW_KINDS = ("overflow", "cancel")  # kinds for `NARROW` dtypes
LARGEST = ("fp32", "tf32x3")  # dtypes of kind "largest"
SPECIAL_KINDS = (*SPOILT, *NARROW_KINDS, "largest")  # beside `KINDS`: a share of a check's examples
NARROW = ("fp16", "bf16")
_INFINITE_IN_TF32 = np.uint32(0x7F7FF000).view(np.float32)  # from here on
# Below this bound B every partial sum of integers is exact in the accumulator, and for fp16 the result does not overflow.
EXACT_LIMIT = {"fp64": 2**53, "fp32": 2**24, "fp16": 65504, "bf16": 2**24, "tf32": 2**24, "tf32x3": 2**24}
WIDE = ("fp64", "fp32", "tf32x3")  # whose products keep the bits of "exact_wide"
ONLY = {"exact_wide": WIDE, "largest": LARGEST, **dict.fromkeys(NARROW_KINDS, NARROW)}  # dtypes of the kinds that not all have
_WIDE_BITS = {"fp64": (26, 32), "fp16": (11, 11), "bf16": (8, 8)}  # the 16-bit types': all that they keep
_OVERFLOW = {"fp16": 18, "bf16": 130}  # the power of 2 of the largest sums: four times as much as is finite
_MEAN_PRODUCT = 20  # of two integers from 1 to 8


def most_terms(pass_name: str, problem: Problem) -> int:
    """Return an upper bound of `reference.terms` that needs no array: what a voxel sums if no tap is clipped; at least 1."""
    if pass_name == "dgrad":
        return problem.out_channels // problem.groups * math.prod(problem.kernel_size)
    if pass_name == "wgrad":
        return max(1, problem.batch * math.prod(problem.input_size))
    taps = 1
    for size, k, s, d in zip(problem.input_size, problem.kernel_size, problem.stride, problem.dilation, strict=True):
        taps *= min(size, -(-k // (s // math.gcd(s, d))))  # every s/gcd(s, d)-th tap has the same residue
    return problem.in_channels // problem.groups * taps + problem.bias


def draw_tensors(pass_name: str, problem: Problem, dtype_name: str, kind: str, seed: int) -> dict[str, Array]:
    """Return the tensors that a pass reads, under their names in `problem.shapes`, the same for the same arguments.

    Args:
        pass_name: "fprop", "dgrad" or "wgrad".
        problem: the geometry.
        dtype_name: of `DTYPES`: "fp64", "fp32", "fp16", "bf16" (ml_dtypes), or "tf32" and "tf32x3" (fp32 tensors).
        kind: "exact": integers in [-8, 8] but 0. "exact_wide": odd integers of 13 to 16 bits in one operand and +-1..3 in the other,
            swapped by the parity of the seed, `WIDE` dtypes only; for fp64 they have 26 to 32 bits, so that a detour through
            fp32 shows too. Both narrow the range, and for very long sums thin out an operand, so that `reference.magnitude`
            stays below `EXACT_LIMIT[dtype_name]`. "random": standard normal, rounded to the dtype.
            "nan" and "inf": as "exact" with such numbers in one tensor, see `_spoil`; with infinities all signs are alike in most
            examples, so that only a product with zero makes NaN. "overflow" and "cancel" are for `NARROW` dtypes: integers of one
            sign times a power of two, with sums around the largest number; and as "exact_wide", of all the bits that an operand has,
            so that partial sums need more, and those that cancel show each bit that was lost. "largest" is for `LARGEST` dtypes: one
            operand up to the largest number, which TF32 rounds to infinity (`as_multiplied`), and others so small that sums stay finite.
        seed: any integer from 0.

    Raises:
        ProblemError: a name is unknown, or "exact_wide" was asked of another dtype than `WIDE`.
    """
    if dtype_name not in DTYPES:
        raise ProblemError(f"dtype={dtype_name!r}: must be one of {', '.join(DTYPES)}")
    dtype = DTYPES[dtype_name].numpy
    shapes, written = problem.shapes(pass_name)
    read = {name: shape for name, shape in shapes.items() if name != written}
    generator = np.random.Generator(np.random.PCG64(seed))
    if kind == "random":
        precise: type = np.float64 if dtype_name == "fp64" else np.float32
        return {name: generator.standard_normal(shape, precise).astype(dtype, copy=False) for name, shape in read.items()}
    if kind == "largest" and dtype_name in LARGEST:
        return _draw_largest(generator, read, most_terms(pass_name, problem))
    if kind not in kinds_of(dtype_name):
        raise ProblemError(
            f"kind={kind!r}: must be one of {', '.join((*KINDS, *SPECIAL_KINDS))}, exact_wide only with {', '.join(WIDE)}, "
            f"{' and '.join(NARROW_KINDS)} only with {', '.join(NARROW)}, largest only with {', '.join(LARGEST)}"
        )
    limit = EXACT_LIMIT[dtype_name if kind not in NARROW_KINDS else "bf16"]  # an fp16 result may overflow there
    largest_term = (limit - 1) / most_terms(pass_name, problem)  # what each term may come to
    if kind in ("exact_wide", "cancel"):
        wide = [name for name in read if name != "bias"][seed % 2]
        integers = _draw_wide(generator, read, largest_term, wide, _WIDE_BITS.get(dtype_name, (13, 16)))
    else:
        integers = _draw_small(generator, read, largest_term)
    tensors = {name: array.astype(dtype) for name, array in integers.items()}
    if kind in SPOILT:
        _spoil(generator, tensors, np.nan if kind == "nan" else np.inf)
    elif kind == "overflow":
        _enlarge(generator, tensors, _OVERFLOW[dtype_name] - math.log2(_MEAN_PRODUCT * most_terms(pass_name, problem)))
    return tensors


def kinds_of(dtype_name: str) -> tuple[str, ...]:
    """Return the kinds of tensors that there are in a dtype."""
    return tuple(kind for kind in (*KINDS, *SPECIAL_KINDS) if dtype_name in ONLY.get(kind, DTYPES))


def as_multiplied(dtype_name: str, tensors: Mapping[str, Array]) -> Mapping[str, Array]:
    """Return the tensors of an example as its products have them: in tf32x3 what rounds to infinity in TF32 is infinite."""
    if dtype_name != "tf32x3":
        return tensors
    infinite = {name: np.abs(array) >= _INFINITE_IN_TF32 for name, array in tensors.items() if name != "bias"}
    return {
        name: np.where(infinite[name], np.copysign(np.float32(np.inf), array), array) if name in infinite else array
        for name, array in tensors.items()
    }


def _draw_largest(generator: np.random.Generator, read: Mapping[str, tuple[int, ...]], terms: int) -> dict[str, Array]:
    """Draw the first tensor up to the largest number, which stands in a few places, and others so small that no sum passes half of it."""
    most = np.finfo(np.float32).max
    first, *others = read
    arrays = {first: generator.uniform(0.5, 1, read[first]) * most * (1 - 2.0**-11)}  # finite in TF32 too
    if arrays[first].size:
        arrays[first].reshape(-1)[_some(generator, arrays[first].size, int(generator.integers(0, 4)))] = most
    for name in others:
        arrays[name] = generator.uniform(0.25, 0.5, read[name]) / terms * (most if name == "bias" else 1)
    return {
        name: (array * np.where(generator.integers(0, 2, array.shape, np.int8), 1, -1)).astype(np.float32) for name, array in arrays.items()
    }


def _spoil(generator: np.random.Generator, tensors: dict[str, Array], value: float) -> None:
    """Put NaN or infinities into one tensor: into all channels of a quarter of the voxels, or into one element or a few.

    The other operand has zeros in some examples, of which each makes NaN with an infinity.
    """
    volumes = [name for name in tensors if name in ("input", "grad_output")]
    names = [*volumes * 2, *tensors] if len(volumes) == 1 else volumes
    name = names[generator.integers(len(names))]
    array = tensors[name]
    if not array.size:
        return
    if np.isinf(value) and generator.integers(4):
        for operand in tensors.values():
            np.abs(operand, out=operand)
        value *= 1 - 2 * int(generator.integers(2))
    if not generator.integers(4):
        for other in tensors.keys() - {name, "bias"}:
            tensors[other][generator.random(tensors[other].shape) < 0.25] = 0
    if name in volumes and generator.integers(3):
        by_voxel = np.moveaxis(array, 1, -1).reshape(-1, array.shape[1])  # a copy
        by_voxel[_some(generator, len(by_voxel), -(-len(by_voxel) // 4))] = value
        array[...] = np.moveaxis(by_voxel.reshape(*array.shape[:1], *array.shape[2:], array.shape[1]), -1, 1)
    else:
        array.reshape(-1)[_some(generator, array.size, int(generator.integers(1, 4)))] = value


def _some(generator: np.random.Generator, size: int, count: int) -> Array | slice:
    """Return so many places: the first ones, the last ones, neighbours anywhere, or any."""
    start = (0, size - count, int(generator.integers(size)))[where] if (where := generator.integers(4)) < 3 else None
    return generator.integers(0, size, count) if start is None else slice(max(0, start), start + count)


def _enlarge(generator: np.random.Generator, tensors: dict[str, Array], exponent: float) -> None:
    """Make products of the integers about 2**exponent times as large, and all of one sign, so that no partial sum passes the last one."""
    for array in tensors.values():
        np.abs(array, out=array)
    sign = 1 - 2 * int(generator.integers(2))
    first, *others = tensors
    half = math.floor(exponent) // 2
    tensors[first] *= tensors[first].dtype.type(2.0**half)
    for name in others:
        power = math.floor(exponent) - (half if name != "bias" else 0)
        tensors[name] *= tensors[name].dtype.type(sign * 2.0**power)


def _draw_small(generator: np.random.Generator, read: Mapping[str, tuple[int, ...]], largest_term: float) -> dict[str, Array]:
    largest = max(1, min(8, math.isqrt(int(largest_term))))
    arrays: dict[str, Array] = {name: generator.integers(-largest, largest, shape, np.int8) for name, shape in read.items()}
    for array in arrays.values():
        array += array >= 0  # no zeros: a tensor of one element would otherwise test nothing now and then
    _thin_out(generator, next(iter(arrays.values())), largest_term / largest**2)
    return arrays


def _draw_wide(
    generator: np.random.Generator, read: Mapping[str, tuple[int, ...]], largest_term: float, wide: str, bits: tuple[int, int]
) -> dict[str, Array]:
    fewest, most = 2 ** (bits[0] - 1), 2 ** bits[1]
    small = next((n for n in (3, 2) if largest_term / n >= 2 * fewest), 1)
    widest = max(2 * fewest, min(most, int(largest_term / small)))
    arrays = {}
    for name, shape in read.items():
        if name in (wide, "bias"):
            magnitude = 2 * generator.integers(fewest // 2, widest // 2, shape) + 1  # odd: its last bit is lost if any is
        else:
            magnitude = generator.integers(1, small + 1, shape)
            _thin_out(generator, magnitude, largest_term / (small * widest))
        arrays[name] = np.where(generator.integers(0, 2, shape, np.int8), magnitude, -magnitude)
    return arrays


def _thin_out(generator: np.random.Generator, array: Array, density: float) -> None:
    if density < 1:  # halved, since the number that stays deviates, by far less than that for sums this long
        array[generator.random(array.shape, np.float32) >= density / 2] = 0
