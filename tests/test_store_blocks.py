"""The blocks that store outputs alone: fills where no tap reaches, pieces of rows, channels that lie together, whole vectors."""

from __future__ import annotations

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
    "one element on": (NCDHW, 1, {}),
    "rows apart": (NCDHW, 3, {3: 5}),
    "every second column": (NCDHW, 0, {4: 1}),
    "channels together, voxels apart": (CHANNELS_LAST, 2, {4: 3}),
    "planes innermost": ((0, 1, 3, 4, 2), 0, {}),
}
UNTOUCHED = 99


def filled(kernel: Kernel, backend: str, dtype: str, problem: Problem, layout: str, case: tuple[int, ...], reached: Array) -> bool:
    """Whether a kernel writes the bias of their channels to the outputs of a mask (n, c, d, h, w), and to no others."""
    view, places = laid(problem.output_shape, *LAYOUTS[layout])
    element: Any = DTYPES[dtype].numpy
    bias = np.arange(1, problem.out_channels + 1).astype(element)
    memory = np.full(int(places.max()) + 40, UNTOUCHED).astype(element)
    expected = memory.copy()
    expected[places[reached]] = np.broadcast_to(bias[:, None, None, None], reached.shape)[reached]
    arrays = {"weight": np.array(case, np.int32), "bias": bias, "output": memory}
    found = written(kernel, backend, arrays, dtype, problem, {"output": view})
    return np.array_equal(found.astype(np.float64), expected.astype(np.float64))


FILL = around(
    "epilogue/fill_output",
    """const int* c = given;
  fill_outputs(problem, Epilogue{bias}, output, c[0], c[1], c[2], c[3], c[4], c[5], c[6], thread / 32, 2);""",
    ["fp32", "bf16", "fp64"],
    threads=64,
)
VOLUMES = Problem(2, 7, 7, (3, 5, 130), 1)
# Volume, first channel, how many; planes from and to, of which some are not there; elements of a plane from and to.
FILLS = [
    (0, 0, 7, 0, 3, 0, 650),
    (1, 2, 3, 1, 2, 3, 649),
    (0, 6, 1, -2, 1, 130, 260),
    (1, 0, 6, 2, 9, 100, 140),
    (1, 1, 2, 0, 3, 131, 132),
    (0, 0, 7, 0, 3, 77, 77),
]


def fills_are_right(kernel: Kernel, backend: str, dtype: str) -> bool:
    """Whether two warps fill what they are to."""
    for layout in LAYOUTS:
        for case in FILLS:
            n, first_c, channels, first_d, end_d, begin, end = case
            reached = np.zeros(VOLUMES.output_shape, bool)
            planes = reached.reshape(2, 7, 3, 650)
            planes[n, first_c : first_c + channels, max(0, first_d) : end_d, begin:end] = True
            if not filled(kernel, backend, dtype, VOLUMES, layout, case, reached):
                return False
    return True


@pytest.mark.parametrize("dtype", some(["fp32", "fp64", "bf16"], 2))
def test_outputs_are_filled_with_the_bias(backend: str, dtype: str) -> None:
    assert fills_are_right(FILL, backend, dtype)


@broken(
    ("if (tail < count) run[tail] = value;", ""),
    ("if (lane < head) run[lane] = value;", ""),
    ("static_cast<Index>(width - w))", "static_cast<Index>(width))"),
    ("output.stride[3] == width * output.stride[4];", "output.stride[4] == 1;"),
    ("epilogue.untouched(first_channel + c);\n        if", "epilogue.untouched(c);\n        if"),
    ("(warp * 32 + lane) / together : lane", "lane / together : lane"),
)
def test_a_broken_fill_is_seen(right: str, wrong: str) -> None:
    assert not fills_are_right(mistaken(FILL, right, wrong), "host", "fp32")


GAPS = around(
    "core/dense_axis epilogue/fill_gaps",
    """const int* c = given;
  fill_gaps(problem, Epilogue{bias}, output, c[0], c[1], c[2], index_t(c[3]), index_t(c[4]), c[5] != 0);""",
    ["fp32", "bf16"],
)
WITH_GAPS = {
    "kernel < stride": Problem(2, 5, 5, (3, 3, 15), (1, 2, 1), (2, 3, 3), 0, (1, 0, 2)),
    "dilation meets stride": Problem(2, 5, 5, (2, 3, 20), (1, 3, 2), (1, 2, 2), (0, 1, 1), (0, 1, 0), (1, 2, 4)),
    "planes alone": Problem(2, 5, 5, (3, 2, 9), (1, 2, 2), (3, 2, 2)),
    "columns alone": Problem(2, 5, 5, (2, 2, 30), (2, 2, 1), (2, 2, 2)),
}


def gaps_are_right(kernel: Kernel, backend: str, dtype: str) -> bool:
    """Whether a warp fills what no tap reaches of its rows, the columns where it is told to."""
    for problem in WITH_GAPS.values():
        live = []
        names = ("output_size", "kernel_size", "stride", "padding", "dilation")
        for size, k, s, p, d in zip(*(getattr(problem, name) for name in names), strict=True):
            live.append(np.array([any((o + p - t * d) % s == 0 for t in range(k)) for o in range(size)]))
        height = problem.output_size[1]
        rows = problem.output_size[0] * height
        for case in [(0, 0, 5, 0, rows, 1), (1, 1, 3, height + 1, rows - 2, 1), (1, 4, 1, 2, rows, 0), (0, 0, 2, height, height + 1, 1)]:
            n, first_c, channels, first, end, columns = case
            reached = np.zeros(problem.output_shape, bool)
            dead = ~live[0][:, None, None] | ~live[1][:, None] | (~live[2] & bool(columns))
            dead &= ((np.arange(rows) >= first) & (np.arange(rows) < end)).reshape(*problem.output_size[:2], 1)
            reached[n, first_c : first_c + channels] = dead
            if not all(filled(kernel, backend, dtype, problem, layout, case, reached) for layout in LAYOUTS):
                return False
    return True


@pytest.mark.parametrize("dtype", some(["fp32", "bf16"]))
def test_gaps_are_filled_with_the_bias(backend: str, dtype: str) -> None:
    assert gaps_are_right(GAPS, backend, dtype)


@broken(
    ("min(end, row - h + height)", "min(end, row + height)"),
    ("(h + next - row) * width", "height * width"),
    ("is_plane || !has_tap(problem, 1, h)", "is_plane"),
    ("has_tap(problem, 2, w) ? channels : lane % together", "lane % together"),
    ("columns && w < width", "w < width"),
)
def test_a_broken_gap_is_seen(right: str, wrong: str) -> None:
    assert not gaps_are_right(mistaken(GAPS, right, wrong), "host", "fp32")


# Lengths, how many of them are inside, the step between them, and the first one's place.
PIECES = [(n, live, step, first) for n in range(1, 7) for live in range(n + 1) for step in (1, 3) for first in (0, 1, 2)]
ROOM = 32
PIECE = around(
    "epilogue/store_piece",
    f"""for (int i = lane; i < {len(PIECES)}; i += 32) {{
    const int length = given[4 * i], live = given[4 * i + 1], step = given[4 * i + 2];
    scalar_t* const y = output.data + {ROOM} * i + given[4 * i + 3];
    accum_t sums[8];
    for (int r = 0; r < 8; ++r) sums[r] = r + accum_t(4) / 3;
    const bool paired = made_of_pairs(y, length, step);
    store_piece(Epilogue{{bias}}, sums, length, y, step, live, paired);
    output.data[{ROOM} * i + {ROOM - 1}] = to_scalar(accum_t(paired));
  }}""",
    ["fp64", "fp32", "fp16", "bf16"],
)


def pieces_of(kernel: Kernel, backend: str, dtype: str) -> tuple[Array, Array]:
    """Return what a kernel stores piece after piece, behind each whether it is made of pairs; and what NumPy does."""
    element: Any = DTYPES[dtype].numpy
    sums = (np.arange(8) + (np.float64 if dtype == "fp64" else np.float32)(4) / 3).astype(element)
    expected = np.full((len(PIECES), ROOM), UNTOUCHED).astype(element)
    for row, (length, live, step, first) in zip(expected, PIECES, strict=True):
        row[first : first + step * live : step] = sums[:live]
        row[-1] = length % 2 == 0 and step == 1 and first % 2 == 0
    arrays = {"weight": np.array(PIECES, np.int32).ravel(), "output": np.full(expected.size, UNTOUCHED).astype(element)}
    return written(kernel, backend, arrays, dtype).astype(np.float64), expected.ravel().astype(np.float64)


@pytest.mark.parametrize("dtype", some(["fp32", "fp64", "bf16", "fp16"], 2))
def test_a_piece_of_a_row_is_stored_as_far_as_it_goes(backend: str, dtype: str) -> None:
    np.testing.assert_array_equal(*pieces_of(PIECE, backend, dtype))


@broken(
    ("aligned && r + 1 < live;", "aligned && r < live;"),
    ("a.bits | static_cast<unsigned>(b.bits)", "b.bits | static_cast<unsigned>(a.bits)"),
    ("length % 2 == 1 && length - 1 < live", "length % 2 == 1"),
    ("return length % 2 == 0 && ", "return "),
    ("y[(r + 1) * step] = second", "y[r * step + 1] = second"),
)
def test_a_broken_piece_is_seen(right: str, wrong: str) -> None:
    assert not np.array_equal(*pieces_of(mistaken(PIECE, right, wrong), "host", "bf16"))


@pytest.mark.parametrize("dtype", some(["fp32", "fp64"]))
def test_a_vector_is_stored_in_its_order(backend: str, dtype: str) -> None:
    body = """constexpr int LENGTH = 16 / sizeof(scalar_t);
  scalar_t x[LENGTH];
  for (int i = 0; i < LENGTH; ++i) x[i] = lane * LENGTH + i;
  if (lane < 3) store_vector(output.data + (2 * lane + 1) * LENGTH, x);"""
    element: Any = DTYPES[dtype].numpy
    length = 16 // np.dtype(element).itemsize
    arrays = {"output": np.full(7 * length, -1).astype(element)}
    found = written(around("epilogue/store_vector", body, ["fp64", "fp32"]), backend, arrays, dtype)
    expected = np.full((7, length), -1)
    expected[1::2] = np.arange(3 * length).reshape(3, length)
    np.testing.assert_array_equal(found, expected.ravel())


def test_values_of_whole_words_are_stored_past_the_cache(backend: str) -> None:
    body = """const auto store = [&](auto value, int first) {
    memcpy(&value, given + first, sizeof value);
    store_streaming(reinterpret_cast<decltype(value)*>(told + first), value);
  };
  if (lane == 0) {
    store(0u, 1);
    store(uint2(), 2);
    store(uint4(), 4);
    store(Words<8>(), 8);
    store(Vector<4, unsigned long long>(), 24);
  }"""
    kernel = around("core/vector epilogue/streaming_store", body)
    given = np.arange(100, 140, dtype=np.int32)
    expected = np.where((given == 100) | ((given >= 116) & (given < 124)) | (given >= 132), 0, given)
    found = written(kernel, backend, {"weight": given, "output": np.zeros(40, np.int32)})
    np.testing.assert_array_equal(found, expected)


PIECE_LESS = 99  # a whole piece is not there
# Outputs of a lane, pieces of channels of each, how many channels are not there, whether whole pieces are stored.
STAGED = [(1, 1, 0, 1), (1, 1, 1, 0), (2, 1, 0, 1), (3, 2, 0, 1), (3, 2, 1, 0), (2, 3, -5, 0), (4, 1, 0, 0)]
STAGED += [(2, 3, PIECE_LESS, 1), (1, 2, PIECE_LESS, 1)]
STORED = """extern __shared__ __align__(16) unsigned char shared[];
  scalar_t* to = output.data;
  for (int k = 0; k < COUNT; ++k) {
    const int outputs = given[4 * k], channels = given[4 * k + 1] * PIECE_CHANNELS, pitch = channels + PIECE_CHANNELS;
    const ChannelStage stage = channel_stage(shared, thread / 32, outputs, channels);
    for (int again = 0; again < 2; ++again, to += 64 * outputs * pitch) {
      const auto target = [&](int i) { return (lane * outputs + i) % 5 == 3 ? nullptr : to + (thread * outputs + i) * pitch; };
      const auto element = [&](int i, int c) { return to_scalar(accum_t((thread * 7 + i * 3 + c + again) % 98)); };
      store_channels_last(stage, lane, outputs, channels, channels - given[4 * k + 2], given[4 * k + 3] != 0, target, element);
    }
    __syncthreads();
  }"""
STAGE = around(
    "epilogue/store_channels_last",
    STORED.replace("COUNT", str(len(STAGED))),
    ["fp64", "fp32", "bf16"],
    threads=64,
    shared=64 * (8 * 4 + 16 * 7),
)


def staged(kernel: Kernel, backend: str, dtype: str, seed: int = 0) -> tuple[Array, Array]:
    """Return what two warps store through shared memory, and what they are to store."""
    element: Any = DTYPES[dtype].numpy
    piece = 16 // np.dtype(element).itemsize
    cases, expected = [], []
    for outputs, pieces, absent, whole in STAGED:
        missing = piece if absent == PIECE_LESS else absent
        cases += [outputs, pieces, missing, whole]
        channels = pieces * piece
        thread, i, c = np.indices((64, outputs, channels + piece))
        there = ((thread % 32 * outputs + i) % 5 != 3) & (c < min(channels, channels - missing))
        for again in range(2):
            expected.append(np.where(there, (thread * 7 + i * 3 + c + again) % 98, UNTOUCHED).ravel())
    wanted = np.concatenate(expected)
    arrays = {"weight": np.array(cases, np.int32), "output": np.full(wanted.size, UNTOUCHED).astype(element)}
    return written(kernel, backend, arrays, dtype, seed=seed).astype(np.float64), wanted


@pytest.mark.parametrize("dtype", some(["fp32", "fp64", "bf16"], 2))
def test_channels_that_lie_together_are_stored_through_shared_memory(backend: str, dtype: str) -> None:
    for seed in range(3):
        np.testing.assert_array_equal(*staged(STAGE, backend, dtype, seed))


@broken(
    ("if (y != nullptr && first < live)", "if (y != nullptr)"),
    ("  __syncwarp();  // what was staged before has been read\n", ""),
    ("output / outputs * stage.pitch + output % outputs * channels + first", "output / outputs * stage.pitch + first"),
    ("there = min(channels, live)", "there = channels"),
)
def test_a_broken_stage_is_seen(right: str, wrong: str) -> None:
    kernel = mistaken(STAGE, right, wrong)
    assert not all(np.array_equal(*staged(kernel, "host", "fp32", seed)) for seed in range(6))


# 64 columns of a product: lanes 0 to 3 have all of a row's, and store what channel they take each for.
ORDERED = """for (int first = 0; first < 64; first += 8 * LANE_EIGHTS) {
    if (lane >= 4) break;
    LaneChannels channels{};
    for (int n = 0; n < LANE_EIGHTS; ++n) {
      for (int c = 0; c < 2; ++c) {
        channels.element[n].element[c] = to_scalar(accum_t(channel_of_column(first + 8 * n + lane * 2 + c, LANE_EIGHTS)));
      }
    }
    store_lane_channels(output.data + channel_of_column(first + lane * 2, LANE_EIGHTS), channels, LANE_EIGHTS);
  }"""
COLUMNS = around("core/column_order", ORDERED, ["fp32", "bf16"])


def ordered(kernel: Kernel, backend: str, dtype: str, eights: int) -> bool:
    """Whether a lane's columns are neighbouring channels, and all channels are some column's."""
    kernel = kernel.replace_source(kernel.source.replace("#include", f"#define LANE_EIGHTS {eights}\n#include", 1))
    memory = np.full(70, UNTOUCHED).astype(DTYPES[dtype].numpy)
    found = written(kernel, backend, {"output": memory}, dtype).astype(int)
    return found.tolist() == [*range(64)] + [UNTOUCHED] * 6


@pytest.mark.parametrize(("dtype", "eights"), [("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2), ("bf16", 4)])
def test_a_lanes_columns_are_neighbouring_channels(backend: str, dtype: str, eights: int) -> None:
    assert ordered(COLUMNS, backend, dtype, eights)


@broken(
    ("column / together * together + column % 8 / 2", "column % 8 / 2"),
    ("column % together / 8 * 2 + column % 2", "column % together / 8 * 2"),
    ("lane_eights == 4) *", "lane_eights == 3) *"),
    ("{channels.element[0], channels.element[1]}", "{channels.element[0], channels.element[0]}"),
)
def test_a_broken_order_of_columns_is_seen(right: str, wrong: str) -> None:
    kernel = mistaken(COLUMNS, right, wrong)
    assert not all(ordered(kernel, "host", "bf16", eights) for eights in (2, 4))


PARTS = around(
    "core/geometry epilogue/partial_sums",
    """accum_t* const sums = reinterpret_cast<accum_t*>(const_cast<scalar_t*>(input.data));
  const int (&size)[3] = problem.output_size;
  for (int part = 0; part < 3; ++part) {
    const View<accum_t> own = part_of(output, problem, sums, part);
    for (int i = thread; i < problem.batch * problem.out_channels * size[0] * size[1] * size[2]; i += 256) {
      const Voxel o = voxel_at(i, problem.out_channels, size);
      *own.at(o.n, o.c, o.d, o.h, o.w) = accum_t((part + 1) * (i % 16));
    }
  }
  __syncthreads();
  add_partial_sums(problem, sums, Epilogue{bias}, output, 3);""",
    ["fp32", "bf16", "fp64"],
    threads=256,
)


def parts_are_added(kernel: Kernel, backend: str, dtype: str) -> bool:
    """Whether outputs are the sums of three parts, which multiples of a number are, and the bias of their channels."""
    problem = Problem(2, 3, 3, (2, 3, 5), 1)
    element: Any = DTYPES[dtype].numpy
    bias = np.arange(1, 4).astype(element)
    for layout in LAYOUTS:
        view, places = laid(problem.output_shape, *LAYOUTS[layout])
        memory = np.full(int(places.max()) + 40, UNTOUCHED).astype(element)
        expected = memory.copy()
        sums = 6 * (np.arange(places.size) % 16).reshape(places.shape)
        expected[places] = (sums + np.arange(1, 4)[:, None, None, None]).astype(element)
        arrays = {"weight": np.zeros(1, np.int32), "bias": bias, "output": memory, "input": np.zeros(6 * places.size, element)}
        found = written(kernel, backend, arrays, dtype, problem, {"output": view})
        if not np.array_equal(found.astype(np.float64), expected.astype(np.float64)):
            return False
    return True


@pytest.mark.parametrize("dtype", some(["fp32", "fp64", "bf16"], 2))
def test_parts_of_sums_are_added(backend: str, dtype: str) -> None:
    assert parts_are_added(PARTS, backend, dtype)


@broken(
    ("partial_sums + part * problem.batch", "partial_sums + problem.batch"),
    ("{volume * channels, 1, plane * channels, w * channels, channels}", "{volume * channels, 1, plane * channels, w, channels}"),
    ("part < parts; ++part", "part + 1 < parts; ++part"),
    ("by_channels ? index : index / volume", "index / volume"),
    ("epilogue.start(co)", "accum_t(0)"),
)
def test_parts_that_are_added_wrong_are_seen(right: str, wrong: str) -> None:
    assert not parts_are_added(mistaken(PARTS, right, wrong), "host", "fp32")
