"""The blocks that bring inputs into shared memory alone: how tensors can be accessed, where voxels lie, tiles of rows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from mistakes import mistaken
from selection import some
from trial import CHANNELS_LAST, NCDHW, Array, Layout, around, broken, laid, written

from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem

LAYOUTS: dict[str, Layout] = {
    "ncdhw": (NCDHW, 0, {}),
    "channels_last": (CHANNELS_LAST, 0, {}),
    **{f"{first} on": (NCDHW, first, {}) for first in (1, 2, 4)},
    **{f"channels_last, {first} on": (CHANNELS_LAST, first, {}) for first in (1, 2, 4)},
    **{f"{by} longer along {axis}": (NCDHW, 0, {axis: by}) for axis in range(5) for by in (1, 2, 3, 8)},
    **{f"channels_last, {by} longer along {axis}": (CHANNELS_LAST, 0, {axis: by}) for axis in range(5) for by in (1, 2, 3, 8)},
}
SHAPES = [(2, 8, 2, 3, 4), (2, 4, 2, 3, 8), (2, 6, 2, 2, 3), (2, 16, 2, 2, 2), (2, 3, 2, 3, 5), (2, 8, 2, 2, 16)]
ACCESSES = around(
    "ptx/copy_async core/dense_axis core/taps epilogue/store_channels_last pipe/patch pipe/row_tile",
    """if (thread == 0) {
    const int (&size)[3] = problem.input_size, channels = problem.in_channels;
    const View<scalar_t> stored = {const_cast<scalar_t*>(input.data),
                                   {input.stride[0], input.stride[1], input.stride[2], input.stride[3], input.stride[4]}};
    told[0] = made_of_vectors(input, 4);
    told[1] = made_of(input, size, 4);
    told[2] = copies_of(input, size, channels);
    told[3] = rows_are_vectors(problem, input, 1);
    told[4] = rows_are_vectors(problem, input, 2);
    told[5] = channels_together(input, channels);
    told[6] = channels_lie_together(stored);
    told[7] = channels_are_pieces(stored, channels);
  }""",
    ["fp32", "bf16", "fp64"],
)


def in_pieces(places: Array, length: int) -> bool:
    """Whether the neighbours along the last axis are pieces of neighbours in memory, each at a multiple of its length."""
    if places.shape[-1] % length:
        return False
    pieces = places.reshape(-1, length)
    return bool(np.all(np.diff(pieces) == 1) and not np.any(pieces[:, 0] % length))


def accesses_are_right(kernel: Kernel, backend: str, dtype: str) -> bool:
    """Whether each layout is said to be accessed in what its elements' places allow."""
    itemsize = np.dtype(DTYPES[dtype].numpy).itemsize
    vector, of_sum = 16 // itemsize, 16 // max(4, itemsize)
    for shape, (order, first, longer) in itertools.product(SHAPES, LAYOUTS.values()):
        view, places = laid(shape, order, first, longer)
        channels = np.moveaxis(places, 1, -1)
        # Pieces of several rows are looked for where volumes have no gaps: those of whole planes that lie apart go the slower way.
        volumes = places.reshape(*shape[:2], -1) if np.all(np.diff(places.reshape(*shape[:2], -1)) == 1) else places
        first_of_row = places[..., :1] + np.arange(shape[-1])
        by_channels = in_pieces(channels, vector)
        expected = [
            np.array_equal(places, first_of_row) and not np.any(places[..., 0] % 4),
            in_pieces(places, 4) or in_pieces(volumes, 4),
            0 if in_pieces(places, vector) or in_pieces(volumes, vector) else 1 if by_channels else 2,
            in_pieces(places, of_sum),
            0,
            next(length for length in (4, 2, 1) if length == 1 or in_pieces(channels, length)),
            np.all(np.diff(channels) == 1) and not np.array_equal(places, first_of_row),
            shape[1] % vector == 0 and not np.any(places[:, 0] % vector),
        ]
        arrays = {"input": np.zeros(8, DTYPES[dtype].numpy), "output": np.full(8, -1, np.int32)}
        problem = Problem(shape[0], shape[1], 1, shape[2:], 1)
        if written(kernel, backend, arrays, dtype, problem, {"input": view}).tolist() != [int(said) for said in expected]:
            return False
    return True


@pytest.mark.parametrize("dtype", some(["fp32", "fp64", "bf16"], 2))
def test_tensors_are_accessed_in_what_their_places_allow(backend: str, dtype: str) -> None:
    assert accesses_are_right(ACCESSES, backend, dtype)


@broken(
    ("plane * size[0] % elements == 0;", "plane % elements == 0;"),
    ("for (int a = 0; a < 4; ++a) made", "for (int a = 0; a < 3; ++a) made"),
    ("const index_t plane = stride[3] * size[1]", "const index_t plane = stride[2]"),
    ("stride[0] | stride[2] | stride[3] | stride[4], VECTOR)", "stride[0] | stride[2] | stride[3], VECTOR)"),
    ("problem.input_size[2] % VECTOR == 0;", "true;"),
    ("&& input.stride[4] == 1 && spread == 1;", "&& input.stride[4] == 1;"),
    ("bool whole = input.stride[1] == 1 && channels % length == 0;", "bool whole = input.stride[1] == 1;"),
    ("bool whole = channels % PIECE_CHANNELS == 0 && ", "bool whole = "),
)
def test_a_broken_access_is_seen(right: str, wrong: str) -> None:
    assert not accesses_are_right(mistaken(ACCESSES, right, wrong), "host", "fp32")


PLACES = around(
    "pipe/patch",
    """for (int i = lane; i < 40; i += 32) {
    const Place place = place_of(problem, i, 36, input, output, 1, 2, 2, 3, 4);
    told[2 * i] = static_cast<int>(place.input);
    told[2 * i + 1] = static_cast<int>(place.output);
  }""",
)


def places_of(kernel: Kernel, backend: str) -> tuple[list[int], list[int]]:
    """Return where a kernel finds each voxel of the input and the output, and where NumPy does."""
    problem = Problem(2, 3, 4, (3, 2, 3), (2, 3, 4), (2, 3, 4))
    view, inputs = laid(problem.input_shape, (0, 4, 2, 3, 1), 0, {3: 1})
    target, outputs = laid(problem.output_shape, CHANNELS_LAST, 0, {4: 1})
    pairs = np.stack([inputs[:, 1].ravel(), outputs[:, 2, ::2, ::3, ::4].ravel()], 1)
    arrays = {"input": np.zeros(1, np.float32), "output": np.zeros(80, np.int32)}
    found = written(kernel, backend, arrays, "fp32", problem, {"input": view, "output": target})
    return found.tolist(), [*pairs.ravel().tolist(), *[-1] * 8]


def test_voxels_of_all_volumes_are_where_numpy_finds_them(backend: str) -> None:
    found, expected = places_of(PLACES, backend)
    assert found == expected


@broken(("d * kernel_d, h * kernel_h", "d * kernel_h, h * kernel_d"), ("if (index >= voxels)", "if (index > voxels)"))
def test_a_broken_place_is_seen(right: str, wrong: str) -> None:
    found, expected = places_of(mistaken(PLACES, right, wrong), "host")
    assert found != expected


COUNT = 4  # channels of a stage
HEAD = 20
# Stages a tile of given[3] to given[3] + given[4] quads of the class given[0..2], of the channels from 1 on of volume 1, and tells its
# numbers, then of each quad and channel each tap's inputs.
TILE = around(
    "ptx/copy_async core/dense_axis pipe/row_tile",
    """extern __shared__ __align__(16) unsigned char shared[];
  __shared__ RowTile tile;
  __shared__ index_t row_offset[128];
  accum_t* const stage = reinterpret_cast<accum_t*>(shared);
  if (thread == 0) {
    for (int a = 0; a < 3; ++a) tile.axis[a] = dense_axis(problem, a, given[a]);
    tile.first_quad = given[3];
    lay_out(tile, problem, input, given[4]);
    for (int a = 0; a < 3; ++a) {
      const DenseAxis& axis = tile.axis[a];
      const int numbers[4] = {axis.first_output, axis.step, axis.outputs, axis.taps};
      for (int i = 0; i < 4; ++i) told[4 * a + i] = numbers[i];
    }
    const int numbers[5] = {tile.end_quad, tile.quads_w, tile.shift, tile.first_kd, tile.taps_d};
    for (int i = 0; i < 5; ++i) told[12 + i] = numbers[i];
  }
  __syncthreads();
  if (tile.first_quad >= tile.end_quad) return;
  find_rows(tile, problem, input, row_offset);
  __syncthreads();
  const scalar_t* const volume = input.at(1, COUNT, 0, 0, 0);
  if (given[5] == 4) {
    stage_channels<4>(tile, problem, input, volume, row_offset, COUNT, stage);
  } else if (given[5] == 2) {
    stage_channels<2>(tile, problem, input, volume, row_offset, COUNT, stage);
  } else {
    stage_rows(tile, problem, input, volume, row_offset, COUNT, stage);
  }
  cp_async_wait_all();
  __syncthreads();
  if (thread > 0) return;
  int* at = told + HEAD;
  for (int quad = tile.first_quad; quad < tile.end_quad; ++quad) {
    for (int c = 0; c < COUNT; ++c) for (int kd = 0; kd < tile.taps_d; ++kd) for (int kh = 0; kh < tile.axis[1].taps; ++kh) {
      const accum_t* row = stage + c * tile.plane + staged_quad(tile, quad) + (kd * tile.segment + kh) * tile.pitch;
      for (int kw = 0; kw < tile.axis[2].taps; ++kw) for (int i = 0; i < 4; ++i) *at++ = static_cast<int>(row[kw + i]);
    }
  }""".replace("COUNT", str(COUNT)).replace("HEAD", str(HEAD)),
    ["fp32", "fp64", "bf16"],
    threads=64,
    shared=40 * 1024,
    declared='architectures = ["sm_80"]\n',
)
# Problems, and how many quads a tile has.
TILED = {
    "whole vectors": (Problem(2, 8, 1, (2, 3, 8), (2, 2, 6), 1, (0, 1, 4)), 5),
    "whole vectors, a short tile": (Problem(2, 8, 1, (3, 2, 4), (3, 1, 2), 1, (1, 0, 1)), 2),
    "stride and dilation": (Problem(2, 8, 1, (3, 2, 5), (2, 3, 3), (2, 1, 2), (1, 2, 0), (0, 1, 1), (1, 2, 3)), 4),
    "planes outside": (Problem(2, 8, 1, (1, 2, 3), (4, 2, 1), 1), 1),
    "rows shared": (Problem(2, 8, 1, (3, 4, 3), (3, 3, 2), 1, 1), 3),
}
STAGED_BY: dict[str, tuple[tuple[int, ...], dict[int, int], int]] = {
    "rows": (NCDHW, {}, 1),
    "rows apart": (NCDHW, {3: 3}, 1),
    "4 channels": (CHANNELS_LAST, {}, 4),
    "2 channels": (CHANNELS_LAST, {4: 2}, 2),
}
WAYS = [("fp32", "rows"), ("bf16", "rows apart"), ("fp32", "4 channels"), ("bf16", "2 channels")]


def tile_is_right(kernel: Kernel, backend: str, dtype: str, name: str, way: str) -> bool:
    """Whether all tiles of a problem's classes have all outputs that taps reach, and stage what each of their taps reads."""
    problem, tile_quads = TILED[name]
    order, longer, length = STAGED_BY[way]
    view, places = laid(problem.input_shape, order, 0, longer)
    x = np.random.default_rng(1).integers(1, 200, problem.input_shape)
    element: Any = DTYPES[dtype].numpy
    memory = np.full(int(places.max()) + 1, 255).astype(element)
    memory[places] = x.astype(element)
    # Inputs with zeros around them, as far as any tap reads.
    far = 24
    padded = np.pad(x[1, COUNT:], [(0, 0), *[(far, far)] * 3])
    axes = list(zip(problem.stride, problem.dilation, problem.kernel_size, problem.padding, strict=True))
    counts = [min(k, s // int(np.gcd(s, d))) * (d // int(np.gcd(s, d))) for s, d, k, _ in axes]
    reached: list[tuple[int, ...]] = []
    for own in itertools.product(*map(range, counts)):
        for first in itertools.count(0, tile_quads):
            arrays = {"input": memory, "weight": np.array([*own, first, tile_quads, length], np.int32)}
            numbers = written(kernel, backend, {**arrays, "output": np.full(20000, -1, np.int32)}, dtype, problem, {"input": view})
            first_o, step, outputs, taps = numbers[:12].reshape(3, 4).T.tolist()
            end, quads_w, shift, first_kd, taps_d = numbers[12:17].tolist()
            if first >= end:
                break
            shape = (end - first, COUNT, taps_d, taps[1], taps[2], 4)
            staged = numbers[HEAD : HEAD + int(np.prod(shape))].reshape(shape)
            for quad, i in itertools.product(range(first, end), range(4)):
                row, column = quad // quads_w, quad % quads_w * 4 + i - shift
                if not 0 <= column < outputs[2]:
                    continue
                o = [first_o[a] + at * step[a] for a, at in enumerate((row // outputs[1], row % outputs[1], column))]
                reached.append(tuple(o))
                reads = []
                for at, (s, d, k, p) in zip(o, axes, strict=True):
                    reads.append([far + (at + p - t * d) // s for t in reversed(range(k)) if (at + p - t * d) % s == 0])
                expected = padded[np.ix_(range(COUNT), *reads)]
                if expected[:, :first_kd].any() or expected[:, first_kd + taps_d :].any():
                    return False
                if not np.array_equal(staged[quad - first, ..., i], expected[:, first_kd : first_kd + taps_d]):
                    return False
    live = []
    for size, (s, d, k, p) in zip(problem.output_size, axes, strict=True):
        live.append([o for o in range(size) if any((o + p - t * d) % s == 0 for t in range(k))])
    return sorted(reached) == list(itertools.product(*live))


@pytest.mark.parametrize("name", TILED)
@pytest.mark.parametrize(("dtype", "way"), [*WAYS, pytest.param("fp64", "rows", marks=pytest.mark.slow)])
def test_a_tile_stages_what_its_taps_read(backend: str, dtype: str, way: str, name: str) -> None:
    assert tile_is_right(TILE, backend, dtype, name, way)


@broken(
    ("tile.first_plane_row + kd * (tile.plane_rows - tile.segment) + row;", "tile.first_plane_row + row;"),
    ("row % h - tile.first_plane_row) * tile.pitch", "row % h) * tile.pitch"),
    ("h >= 0 && h < problem.input_size[1];", "h < problem.input_size[1];"),
    ("inside[u] = unit >= 0 && ", "inside[u] = "),
    ("at >= 0 && at < problem.input_size[2]", "at >= 0"),
    ("from += LENGTH, to += LENGTH * tile.plane", "from += LENGTH, to += tile.plane"),
)
def test_a_broken_tile_is_seen(right: str, wrong: str) -> None:
    kernel = mistaken(TILE, right, wrong)
    ways = ["rows", "2 channels"]
    assert not all(tile_is_right(kernel, "host", "fp32", name, way) for name in TILED for way in ways)
