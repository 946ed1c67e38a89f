"""How far a result is from the truth: a few voxels of the written tensor computed in fp64, at any size of problem."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..problem import Problem

Array = np.ndarray[Any, np.dtype[Any]]
Pick = Callable[[str, Array], Array]  # (tensor, offsets into its contiguous elements) -> the elements as fp64

VOXELS = 64  # of fprop and dgrad, each with all of its channels
_WGRAD_PRODUCTS = 20_000_000  # of the sums of all sampled elements together, which number 4 to 64


@dataclass(frozen=True)
class Sample:
    """Elements of the written tensor: index arrays (one an axis, broadcast together) and the fp64 values there."""

    index: tuple[Array, ...]
    values: Array

    def error(self, result: Array) -> float:
        """Return ||result - values|| / ||values|| over the sample; NaN where an element is NaN."""
        norm = float(np.linalg.norm(self.values)) or 1.0
        return float(np.linalg.norm(np.asarray(result, np.float64) - self.values)) / norm


def sample(problem: Problem, pass_name: str, pick: Pick, seed: int = 0) -> Sample:
    """Return a random sample of what a pass computes, in fp64 from the tensors as they are stored.

    Args:
        problem: the geometry, with a batch of at least 1.
        pass_name: "fprop", "dgrad" or "wgrad".
        pick: gives elements of the tensors that are read.
        seed: of the choice of elements.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    return _weight_sample(problem, pick, generator) if pass_name == "wgrad" else _voxel_sample(problem, pass_name, pick, generator)


def _voxel_sample(p: Problem, pass_name: str, pick: Pick, generator: np.random.Generator) -> Sample:
    """Gather: written voxel and tap name the one voxel that is read; then it is one matrix product for each group."""
    fprop = pass_name == "fprop"
    source, source_size, written_size = (
        ("input", p.input_size, p.output_size) if fprop else ("grad_output", p.output_size, p.input_size)
    )
    n = generator.integers(p.batch, size=VOXELS)
    at = [generator.integers(size, size=VOXELS) for size in written_size]
    read, live = [], []
    for a in range(3):
        reach = np.arange(p.kernel_size[a]) * p.dilation[a]
        if fprop:
            position, remainder = np.divmod(at[a][:, None] + p.padding[a] - reach, p.stride[a])
            exact = remainder == 0
        else:
            position = at[a][:, None] * p.stride[a] - p.padding[a] + reach
            exact = np.bool_(True)
        read.append(position)
        live.append(exact & (position >= 0) & (position < source_size[a]))
    inside = live[0][:, :, None, None] & live[1][:, None, :, None] & live[2][:, None, None, :]
    _, height, width = source_size
    voxel = (read[0][:, :, None, None] * height + read[1][:, None, :, None]) * width + read[2][:, None, None, :]
    voxel, inside = np.where(inside, voxel, 0).reshape(VOXELS, -1), inside.reshape(VOXELS, -1)

    ins, outs, taps = p.in_channels // p.groups, p.out_channels // p.groups, math.prod(p.kernel_size)
    weight = pick("weight", np.arange(math.prod(p.weight_shape))).reshape(p.groups, ins, outs, taps)
    weight = weight.transpose((0, 3, 1, 2) if fprop else (0, 3, 2, 1))  # group, tap, channel read, channel written
    channels = np.arange(p.groups * weight.shape[2])
    offsets = (n[:, None, None] * channels.size + channels) * math.prod(source_size) + voxel[:, :, None]
    values = pick(source, offsets) * inside[:, :, None]  # voxel, tap, channel
    values = values.reshape(VOXELS, taps, p.groups, -1).transpose(2, 0, 1, 3).reshape(p.groups, VOXELS, -1)
    products = values @ weight.reshape(p.groups, -1, weight.shape[3])  # group, voxel, channel written
    result = products.transpose(1, 0, 2).reshape(VOXELS, -1)
    if fprop and p.bias:
        result = result + pick("bias", np.arange(p.out_channels))
    index = (n[:, None], np.arange(result.shape[1])[None], *(axis[:, None] for axis in at))
    return Sample(tuple(np.asarray(i) for i in index), result)


def _weight_sample(p: Problem, pick: Pick, generator: np.random.Generator) -> Sample:
    """Sum input times grad_output over the batch and the inputs whose output lies inside, one weight element at a time."""
    terms = p.batch * math.prod(p.input_size)
    count = max(4, min(64, _WGRAD_PRODUCTS // max(1, terms)))
    index = tuple(generator.integers(size, size=count) for size in p.weight_shape)
    values = np.zeros(count)
    for number, (ci, co, *tap) in enumerate(zip(*index, strict=True)):
        group = ci // (p.in_channels // p.groups)
        channel = group * (p.out_channels // p.groups) + co
        inputs, outputs = [], []
        for a in range(3):
            i = np.arange(p.input_size[a])
            o = i * p.stride[a] - p.padding[a] + tap[a] * p.dilation[a]
            live = (o >= 0) & (o < p.output_size[a])
            inputs.append(i[live])
            outputs.append(o[live])
        x = pick("input", _offsets(p.batch, p.in_channels, ci, p.input_size, inputs))
        g = pick("grad_output", _offsets(p.batch, p.out_channels, channel, p.output_size, outputs))
        values[number] = np.sum(x * g)
    return Sample(index, values)


def _offsets(batch: int, channels: int, channel: int, size: tuple[int, int, int], at: list[Array]) -> Array:
    n = np.arange(batch)[:, None, None, None]
    d, h, w = at[0][:, None, None], at[1][:, None], at[2]
    return (((n * channels + channel) * size[0] + d) * size[1] + h) * size[2] + w
