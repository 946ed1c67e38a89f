"""Tensors past 2^31 elements and sizes where peers have failed: exact integers, checked without a reference of that size.

Chosen voxels are gathered one by one, the last ones among them, and every channel's sum is compared: by linearity it is a sum over
taps of boxes of the input, so a tile left out or written twice anywhere shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import cupy_convt3d as ct
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.large]

CASES = {
    "im2col past int32 (pytorch#32866, #39198)": "n1_c64to128_i8x128x172_k5_s2_p2_op1",
    "large volume, one channel (pytorch#4344)": "n1_c8to1_i128x512x512_k4_s2_p1",
    "output past 2^31 elements": "n1_c8to9_i128x512x512_k4_s2_p1",
    "input of 2^31 elements (pytorch#87354)": "n1_c32to1_i512x512x256_k3_p1",
    "depthwise (pytorch#37406)": "n1_c512to512_i8_k7_s2_p3_g512",
    "flat kernel (pytorch#70518)": "n4_c64to64_i32x16x16_k1x3x3_s1x2x2_p0x1x1",
}
PASSES = {name: kernel.pass_name for name, kernel in kernels().items() if "fp32" in kernel.dtypes}


def draw(shape: tuple[int, ...], seed: int, density: float = 1.0) -> Any:
    """Return +-1 and +-2 (and zeros, for a density below 1) as fp32 on the GPU, hashed from the index: no second array."""
    import cupy

    body = """
      unsigned long long h = (i + 1 + (seed << 40)) * 0x9E3779B97F4A7C15ull;
      h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9ull;
      h ^= h >> 32;
      const float magnitude = (h & 1) ? 1.0f : 2.0f;
      y = (h >> 8 & 0xffff) >= kept ? 0.0f : (h & 2) ? magnitude : -magnitude;
    """
    fill = cupy.ElementwiseKernel("uint64 seed, uint32 kept", "float32 y", body, "convt3d_test_draw")
    return fill(seed, int(density * 65536), cupy.empty(shape, np.float32))


def taps(p: Problem) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]]:
    """Yield each tap, the inputs whose product with it lands in the output, and where it lands."""
    for tap in product(*map(range, p.kernel_size)):
        source, target = [], []
        for a, t in enumerate(tap):
            shift = t * p.dilation[a] - p.padding[a]  # o = i*stride + shift
            first = max(0, -(shift // p.stride[a]))
            last = min(p.input_size[a] - 1, (p.output_size[a] - 1 - shift) // p.stride[a])
            source.append(slice(first, last + 1))
            target.append(slice(first * p.stride[a] + shift, last * p.stride[a] + shift + 1, p.stride[a]))
        yield tap, tuple(source), tuple(target)


def by_group(p: Problem, ci: int) -> slice:
    """The output channels of an input channel's group."""
    size = p.out_channels // p.groups
    group = ci // (p.in_channels // p.groups)
    return slice(group * size, (group + 1) * size)


def channel_sums(array: Any) -> Any:
    """Return the sum over the volume of each batch entry and channel, exact in fp64."""
    sums = np.empty(array.shape[:2])
    for n, c in np.ndindex(*sums.shape):
        sums[n, c] = float(array[n, c].sum(dtype=np.float64))
    return sums


def box_sums(array: Any, boxes: list[tuple[slice, ...]]) -> Any:
    """Return [box, n, c]: sums over a box of the volume. Equal boxes are summed once."""
    known: dict[str, Any] = {}
    for box in boxes:
        if str(box) not in known:
            known[str(box)] = array[(..., *box)].sum(axis=(2, 3, 4), dtype=np.float64).get()
    return np.stack([known[str(box)] for box in boxes])


def grouped_sum(p: Problem, weight: Any, boxes: Any, sums: Any, transposed: bool) -> Any:
    for index, (tap, _, _) in enumerate(taps(p)):
        for ci in range(p.in_channels):
            own, w = by_group(p, ci), weight[(ci, slice(None), *tap)].astype(np.float64)
            if transposed:
                sums[:, ci] += boxes[index][:, own] @ w
            else:
                sums[:, own] += boxes[index][:, ci : ci + 1] * w
    return sums


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name, pass_name in PASSES.items() if pass_name == "fprop"])
def test_fprop(name: str, case: str) -> None:
    p = Problem.parse(CASES[case])
    if reason := kernels()[name].why_not(p, "fp32"):
        pytest.skip(reason)
    x, w = draw(p.input_shape, 1), draw(p.weight_shape, 2)
    y = ct.conv_transpose3d(x, w, None, p.stride, p.padding, p.output_padding, p.groups, p.dilation, algorithm=name)
    assert y.shape == p.output_shape
    weight = w.get()
    boxes = box_sums(x, [source for _, source, _ in taps(p)])
    np.testing.assert_array_equal(channel_sums(y), grouped_sum(p, weight, boxes, np.zeros(y.shape[:2]), False))
    generator = np.random.default_rng(3)
    corners = [tuple(size - 1 for size in y.shape), (0,) * 5]
    for n, co, *o in corners + [tuple(int(generator.integers(size)) for size in y.shape) for _ in range(20)]:
        assert float(y[(n, co, *o)]) == gathered(p, x, weight, n, co, o), (n, co, *o)


def gathered(p: Problem, x: Any, weight: Any, n: int, co: int, o: list[int]) -> float:
    size, channels = p.out_channels // p.groups, p.in_channels // p.groups
    group = slice(co // size * channels, (co // size + 1) * channels)
    total = 0.0
    for tap in product(*map(range, p.kernel_size)):
        numerators = [o[a] + p.padding[a] - t * p.dilation[a] for a, t in enumerate(tap)]
        i = [m // s for m, s in zip(numerators, p.stride, strict=True)]
        if all(m % s == 0 and 0 <= j < size for m, s, j, size in zip(numerators, p.stride, i, p.input_size, strict=True)):
            total += float(x[(n, group, *i)].get().astype(np.float64) @ weight[(group, co % size, *tap)])
    return total


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name, pass_name in PASSES.items() if pass_name == "dgrad"])
def test_dgrad(name: str, case: str) -> None:
    p = Problem.parse(CASES[case])
    g, w = draw(p.output_shape, 1), draw(p.weight_shape, 2)
    geometry = (p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    dx = ct.conv_transpose3d_grad_input(g, w, p.input_shape, *geometry, algorithm=name)
    boxes = box_sums(g, [target for _, _, target in taps(p)])
    np.testing.assert_array_equal(channel_sums(dx), grouped_sum(p, w.get(), boxes, np.zeros(dx.shape[:2]), True))


@pytest.mark.parametrize("case", ["output past 2^31 elements", "input of 2^31 elements (pytorch#87354)"])
@pytest.mark.parametrize("name", [name for name, pass_name in PASSES.items() if pass_name == "wgrad"])
def test_wgrad(name: str, case: str) -> None:
    p = Problem.parse(CASES[case])
    x, g = draw(p.input_shape, 1, 0.1), draw(p.output_shape, 4)  # 0.1: the sums of absolute products stay below 2^24
    geometry = (p.stride, p.padding, p.output_padding, p.groups, p.dilation)
    dw = ct.conv_transpose3d_grad_weight(x, g, p.weight_shape, *geometry, algorithm=name).get()
    known = {tap: (source, target) for tap, source, target in taps(p)}
    generator = np.random.default_rng(5)
    last = tuple(size - 1 for size in dw.shape)
    for ci, co, *tap in [last, (0,) * 5, *(tuple(int(generator.integers(size)) for size in dw.shape) for _ in range(6))]:
        source, target = known[tuple(tap)]
        products = x[(0, ci, *source)] * g[(0, co, *target)]
        assert float(dw[(ci, co, *tap)]) == float(products.sum(dtype=np.float64)), (ci, co, *tap)


@pytest.mark.parametrize("name", [name for name, kernel in kernels().items() if kernel.deterministic and name in PASSES])
def test_a_hundred_runs_give_the_same_bits(name: str) -> None:
    """pytorch#137970."""
    import cupy

    p = Problem.parse("n1_c32to16_i32x32x10_k4_s2_p1")
    if reason := kernels()[name].why_not(p, "fp32"):
        pytest.skip(reason)
    generator = cupy.random.default_rng(6)
    x, w, g = (generator.standard_normal(s, dtype=np.float32) for s in (p.input_shape, p.weight_shape, p.output_shape))
    geometry = (p.stride, p.padding, p.output_padding, p.groups, p.dilation)

    def call() -> Any:
        if PASSES[name] == "fprop":
            return ct.conv_transpose3d(x, w, None, *geometry, algorithm=name)
        if PASSES[name] == "dgrad":
            return ct.conv_transpose3d_grad_input(g, w, p.input_shape, *geometry, algorithm=name)
        return ct.conv_transpose3d_grad_weight(x, g, p.weight_shape, *geometry, algorithm=name)

    first = call().view(np.uint32)
    assert all(bool((call().view(np.uint32) == first).all()) for _ in range(99))
