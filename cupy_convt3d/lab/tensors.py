"""The numbers a kernel is tested on: exact integers, wide integers that fp32 still sums exactly, and normal deviates."""

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
NAN = "nan"  # the kind of such an example, beside these; a check runs it when asked for it
# Below this bound B every partial sum of integers is exact in the accumulator, and for fp16 the result does not overflow.
EXACT_LIMIT = {"fp64": 2**53, "fp32": 2**24, "fp16": 65504, "bf16": 2**24, "tf32": 2**24, "tf32x3": 2**24}
WIDE = ("fp64", "fp32", "tf32x3")  # whose products keep the bits of "exact_wide"


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
            stays below `EXACT_LIMIT[dtype_name]`. "nan": as "exact" with one NaN, the first element, the last, or any, of "input" or
            "grad_output" (where both are read, by the parity of the seed). "random": standard normal, rounded to the dtype.
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
    if kind not in (*KINDS, NAN) or (kind == "exact_wide" and dtype_name not in WIDE):
        raise ProblemError(f"kind={kind!r}: must be one of {', '.join(KINDS)}, {NAN}, and exact_wide only with {', '.join(WIDE)}")
    largest_term = (EXACT_LIMIT[dtype_name] - 1) / most_terms(pass_name, problem)  # what each term may come to
    if kind != "exact_wide":
        integers = _draw_small(generator, read, largest_term)
    else:
        wide = [name for name in read if name != "bias"][seed % 2]
        integers = _draw_wide(generator, read, largest_term, wide, (26, 32) if dtype_name == "fp64" else (13, 16))
    tensors = {name: array.astype(dtype) for name, array in integers.items()}
    if kind == NAN:
        values = [tensors[name] for name in ("input", "grad_output") if name in tensors]
        spoilt = values[seed % len(values)].reshape(-1)
        if spoilt.size:
            spoilt[(0, -1, generator.integers(spoilt.size))[generator.integers(3)]] = np.nan
    return tensors


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
