"""The block for neighbours that begin anywhere, alone: runs that four lanes store, and cells that a lane loads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from mistakes import mistaken
from trial import around, broken, written

from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.kernel import Kernel

UNTOUCHED, APART, ROOM = -7, 136, 8 * 136 + 40
# Eight rows, each a run of the numbers from 1, 2, ... on, of which four lanes have WORDS words in turn.
STORES = """constexpr int WORDS = {words}, COUNT = WORDS * 4 / static_cast<int>(sizeof(scalar_t));
  scalar_t* const row = output.data + given[0] + lane / 4 * given[2];
  const auto fill = [&](unsigned (&words)[WORDS], int first) {{
    scalar_t values[COUNT];
    for (int v = 0; v < COUNT; ++v) values[v] = to_scalar(accum_t(first + v + 1 + lane / 4));
    memcpy(words, values, sizeof values);
  }};
  unsigned own[WORDS], later[WORDS], next[WORDS];
  fill(own, lane % 4 * COUNT);
  for (int first = lane % 4 * COUNT; first < 128 && first - lane % 4 * COUNT < given[1]; first += 4 * COUNT) {{
    fill(later, first + 4 * COUNT);
    take_from_behind(next, own, later, lane);
    store_unaligned(row + first, own, next, given[1] - first, first == 0);
    memcpy(own, later, sizeof own);
  }}"""
CASES = [("bf16", 1), ("bf16", 2), ("bf16", 4), ("fp32", 2), ("fp32", 4), ("fp32", 1)]
LENGTHS = (1, 2, 3, 5, 7, 8, 9, 13, 16, 31, 33, 64, 71, 97)


def storing(words: int) -> Kernel:
    return around("core/unaligned", STORES.format(words=words), ["fp32", "bf16"])


def stored(kernel: Kernel, backend: str, dtype: str, first: int, length: int, apart: int = APART) -> bool:
    """Whether the rows have their numbers, and nothing else was written."""
    memory = np.full(ROOM, UNTOUCHED).astype(DTYPES[dtype].numpy)
    expected = np.full(ROOM, UNTOUCHED)
    for row in range(8):
        expected[first + row * apart :][:length] = row + np.arange(1, length + 1)
    arrays = {"weight": np.array([first, length, apart], np.int32), "output": memory}
    return bool((written(kernel, backend, arrays, dtype).astype(np.float64) == expected).all())


@pytest.mark.parametrize(("dtype", "words"), CASES)
def test_runs_begin_and_end_anywhere(backend: str, dtype: str, words: int) -> None:
    kernel = storing(words)
    for first, length in itertools.product(range(8), LENGTHS):
        assert stored(kernel, backend, dtype, first, length), (first, length)


@pytest.mark.parametrize(("dtype", "words"), CASES)
def test_rows_that_touch_keep_their_own(backend: str, dtype: str, words: int) -> None:
    kernel = storing(words)
    for first, length in itertools.product(range(4), (1, 3, 7, 13, 33, 71)):
        assert stored(kernel, backend, dtype, first, length, apart=length), (first, length)


@broken(
    ("is_first && at > live ? at % piece : at", "at"),
    ("left >= COUNT) store_front", "left > COUNT) store_front"),
    ("(rest & piece) != 0", "(rest & 2 * piece) != 0"),
    ("max(left, 0)", "max(left, 1)"),
    ("lane % 4 == 0 ? later[i]", "lane % 4 == 3 ? later[i]"),
    ("lane / 4 * 4 + (lane + 1) % 4", "(lane + 1) % 32"),
    ("drop ? 0x5432u", "drop ? 0x6543u"),
    ("bytes > 4 ? bytes / 4 : 1", "1"),
)
def test_a_broken_store_is_seen(right: str, wrong: str) -> None:
    kernel = mistaken(storing(4), right, wrong)
    assert not all(stored(kernel, "host", "bf16", *case) for case in itertools.product(range(8), (3, 7, 13, 33, 64)))


# 16 bytes from an element on, of a tensor that the memory begins and ends outside of.
LOADS = """const Cell cell = load_unaligned(input.data + given[0], given[1], {input.data + given[2], input.data + given[3]});
  if (thread == 0) memcpy(output.data, &cell, sizeof cell);"""
LOADING = around("core/unaligned", LOADS, ["fp32", "bf16"])


def loaded(kernel: Kernel, backend: str, dtype: str, first: int, live: int, begin: int, end: int) -> bool:
    count = 16 // DTYPES[dtype].itemsize
    memory = np.arange(1, 65).astype(DTYPES[dtype].numpy)
    expected = np.where(np.arange(count) < live, first + 1 + np.arange(count), 0)
    arrays = {
        "weight": np.array([first, live, begin, end], np.int32),
        "input": memory,
        "output": np.full(count, UNTOUCHED).astype(DTYPES[dtype].numpy),
    }
    return bool((written(kernel, backend, arrays, dtype).astype(np.float64) == expected).all())


LOADED = [(first, live, begin, end) for first in range(8, 17) for live in (-3, 0, 1, 2, 3, 5, 8, 40) for begin, end in ((0, 64), (9, 23))]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_cells_begin_anywhere(backend: str, dtype: str) -> None:
    for case in LOADED:
        assert loaded(LOADING, backend, dtype, *case), case


@broken(
    ("(before & static_cast<unsigned>(piece)) != 0);\n  } else", "(before & 1) != 0);\n  } else"),
    ("min(live, VECTOR) > VECTOR", "min(live, VECTOR) > VECTOR + 1"),
    ("there >= EACH ? words[i]", "there > 0 ? words[i]"),
    ("v < live ? source[v]", "v + 1 < live ? source[v]"),
)
def test_a_broken_load_is_seen(right: str, wrong: str) -> None:
    kernel = mistaken(LOADING, right, wrong)
    assert not all(loaded(kernel, "host", "bf16", *case) for case in LOADED)
