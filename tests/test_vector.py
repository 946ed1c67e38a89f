"""Vectors of neighbours: how they lie, on the host, and that what memory cannot access at once does not compile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trial import UNTOLD, around, told, written

from cupy_convt3d.backends.nvrtc import compile_cubin
from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.errors import CompileError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.source import Instance

RULES = (Path(__file__).parents[1] / "kernels" / "include" / "convt3d" / "core" / "vector.cuh").read_text()
SIZES = {"fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2}
# For each count the size, alignment and last place of vectors, the step and alignment of words.
TELL = """int* at = told;
  const auto tell = [&](auto number) {{
    constexpr int COUNT = decltype(number)::value;
    Vector<COUNT> vector{{}};
    Words<COUNT> words[2]{{}};
    *at++ = static_cast<int>(sizeof vector);
    *at++ = static_cast<int>(alignof(Vector<COUNT>));
    *at++ = static_cast<int>(reinterpret_cast<char*>(&vector.element[COUNT - 1]) - reinterpret_cast<char*>(&vector));
    *at++ = static_cast<int>(reinterpret_cast<char*>(&words[1]) - reinterpret_cast<char*>(&words[0]));
    *at++ = static_cast<int>(alignof(Words<COUNT>));
  }};
  tell(Constant<1>{{}});
  tell(Constant<2>{{}});
  tell(Constant<{third}>{{}});
  tell(Constant<8>{{}});"""


def telling(third: int) -> Kernel:
    return around("core/constant core/vector", TELL.format(third=third), tuple(SIZES), threads=1)


@pytest.mark.parametrize("dtype", SIZES)
def test_vectors_lie_at_a_multiple_of_their_size(backend: str, dtype: str) -> None:
    size = SIZES[dtype]
    found = told(telling(4), backend, 20, dtype=dtype)
    assert found == [number for n in (1, 2, 4, 8) for number in (n * size, n * size, (n - 1) * size, n * 4, n * 4)]


@pytest.mark.parametrize("compiler", ["host", pytest.param("nvrtc", marks=pytest.mark.nvrtc)])
def test_three_neighbours_do_not_compile(compiler: str) -> None:
    kernel = telling(3)
    with pytest.raises(CompileError, match="neighbours that move together are a power of two"):
        if compiler == "host":
            told(kernel, "host", 20)
        else:
            compile_cubin(Instance(kernel, "fp32"), "sm_90a")


# For w and for channels: whether vectors of 2, 4 and 8.
ALIGNED = "for (int i = 0; i < 6; ++i) told[i] = made_of_vectors(input, i < 3 ? 4 : 1, 2 << i % 3);"
VIEWS = [
    ((64, 32, 16, 8, 1), 0),
    ((64, 32, 16, 4, 1), 0),
    ((64, 32, 2, 8, 1), 0),
    ((64, 33, 16, 8, 1), 0),
    ((60, 32, 16, 8, 1), 0),
    ((64, 32, 16, 8, 2), 0),
    ((64, 32, 16, 8, 1), 1),
    ((64, 32, 16, 8, 1), 4),
    ((64, 1, 16, 8, 32), 0),
    ((64, 1, 16, 8, 12), 0),
    ((64, 1, 16, 8, 32), 2),
    ((64, 1, 3, 8, 32), 8),
]


def aligned() -> Kernel:
    return around("core/vector", ALIGNED, tuple(SIZES), threads=1)


def made(kernel: Kernel, dtype: str, strides: tuple[int, ...], first: int) -> list[bool]:
    """Return what the host's kernel says of vectors of 2, 4 and 8 along w, and of channels."""
    arrays = {"input": np.zeros(16, DTYPES[dtype].numpy), "output": np.full(6, UNTOLD, np.int32)}
    said = written(kernel, "host", arrays, dtype, views={"input": (first, (1, 1, 1, 1, 1), strides)}).tolist()
    assert set(said) <= {0, 1}
    return [bool(one) for one in said]


@pytest.mark.parametrize("dtype", SIZES)
def test_vectors_are_where_all_places_are_their_multiples(dtype: str) -> None:
    kernel = aligned()
    for strides, first in VIEWS:
        expected = [
            strides[axis] == 1 and not any(place % length for a, place in enumerate((*strides, first)) if a != axis)
            for axis in (4, 1)
            for length in (2, 4, 8)
        ]
        assert made(kernel, dtype, strides, first) == expected, (strides, first)


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("static_cast<index_t>(length * sizeof(T)) == 0", "static_cast<index_t>(sizeof(T)) == 0"),
        ("axis < 5; ++axis", "axis < 4; ++axis"),
        ("int axis = 0; axis < 5", "int axis = 1; axis < 5"),
        ("axis == along || ", ""),
        ("made && view.stride[along] == 1", "made"),
    ],
)
def test_a_broken_rule_is_seen(text: str, broken: str) -> None:
    assert RULES.count(text) == 1
    right = aligned()
    wrong = right.replace_headers({"convt3d/core/vector.cuh": RULES.replace(text, broken)})
    assert any(made(right, "fp32", *view) != made(wrong, "fp32", *view) for view in VIEWS)
