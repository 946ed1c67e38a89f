"""The blocks of element types and memory alone: rounding, views, copies that land later, and how tensors can be accessed."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from mistakes import mistaken
from trial import Array, around, broken, laid, told, written

from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.errors import CompileError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem

# What rounds up and down and ties of TF32, the largest numbers and the least, and what is no number.
WORDS = np.array(
    [
        *(0, 0x3F800FFF, 0x3F801000, 0x3F801001, 0x3F803000, 0x40490FDB, 0x477FEFFF, 0x7F7FEFFF, 0x7F7FF000, 0x7F7FFFFF, 0x7F800000),
        *(0x00000FFF, 0x00001000, 0x007FF000, 0x00800000, 0x7FC00000, 0x3DCCCCCD, 0x33800001, 0x477FE000, 0x47800000, 0x38801FFF),
    ],
    np.uint32,
)
WORDS = np.concatenate([WORDS, WORDS | np.uint32(0x80000000), np.random.default_rng(1).integers(0, 2**32, 200, np.uint32)])
SPLIT = around(
    "ptx/split_tf32",
    f"""for (int i = lane; i < {WORDS.size}; i += 32) {{
    const float value = __uint_as_float(given[i]);
    unsigned* const to = reinterpret_cast<unsigned*>(told) + 4 * i;
    to[0] = round_to_tf32(value);
    to[1] = nearest_tf32(value);
    split_tf32(value, to[2], to[3]);
  }}""",
)


def in_tf32(value: float, even: bool) -> float:
    """Return the TF32 number nearest to an fp32 number, of two that are as near the even one or the larger; none is past 2^128."""
    if np.isinf(value):
        return value
    step = Fraction(2) ** (max(-126, int(np.frexp(value)[1]) - 1) - 10)
    steps, rest = divmod(abs(Fraction(value)), step)
    rounded = float((steps + (rest * 2 > step or (rest * 2 == step and (not even or steps % 2 == 1)))) * step)
    return float(np.copysign(rounded if rounded < 2.0**128 else np.inf, value))


def splits_are_right(kernel: Kernel, backend: str) -> bool:
    """Whether numbers are rounded to the nearest TF32 number, and split into two that add up to them."""
    even = False
    if backend == "cuda":
        import cupy

        even = int(cupy.cuda.Device().compute_capability) >= 90
    arrays = {"weight": WORDS.view(np.int32), "output": np.zeros(4 * WORDS.size, np.uint32)}
    bits = written(kernel, backend, arrays).reshape(-1, 4)
    with np.errstate(invalid="ignore"):
        words, results = WORDS.view(np.float32).astype(np.float64), bits.view(np.float32).astype(np.float64)
    for value, (away, nearest, high, low), parts in zip(words, results, bits, strict=True):
        if np.isnan(value):
            right = np.isnan([away, nearest, low]).all() and np.isfinite(high)
        else:
            right = away == in_tf32(value, False) and nearest == in_tf32(value, even) and not (parts & 0x1FFF).any()
            # Past the largest number `high` is from 1 to 2, and `low` has the rest.
            right &= high == nearest if np.isfinite(nearest) else np.sign(high) == np.sign(value) and 1 <= abs(high) < 2
            right &= low == in_tf32(float(np.float32(value - high)), even)
        if not right:
            return False
    return True


def test_numbers_are_rounded_and_split_in_tf32(backend: str) -> None:
    assert splits_are_right(SPLIT, backend)


@broken(
    ("low = nearest_tf32(value - __uint_as_float(high));", "low = __float_as_uint(value - __uint_as_float(high));"),
    ("high &= 0xbfffffffu;", "high &= 0xffffffffu;"),
    ("nearest_tf32(value);", "__float_as_uint(value);"),
)
def test_a_broken_split_is_seen(right: str, wrong: str) -> None:
    assert not splits_are_right(mistaken(SPLIT, right, wrong), "host")


WIDE = "for (int i = lane; i < 65536; i += 32) {{ {0} value; value.bits = i; reinterpret_cast<float*>(told)[i] = to_accum(value); }}"
NARROW = """for (int i = lane; i < COUNT; i += 32) {{
    {0} narrow;
    round_to(__uint_as_float(given[i]), narrow);
    told[i] = narrow.bits;
  }}"""


@pytest.mark.parametrize(("name", "dtype"), [("half_t", "fp16"), ("bfloat16_t", "bf16")])
def test_sixteen_bits_are_widened_exactly_and_rounded_once(backend: str, name: str, dtype: str) -> None:
    element: Any = DTYPES[dtype].numpy
    every = np.arange(65536).astype(np.uint16).view(element).astype(np.float32)
    found = written(around("core/dtypes", WIDE.format(name)), backend, {"output": np.zeros(65536, np.float32)})
    np.testing.assert_array_equal(found, every)
    np.testing.assert_array_equal(np.signbit(found[every == 0]), [False, True])
    # Halfway between each number and the next, and just beside; what is not finite stays.
    halves = np.sort(every[np.isfinite(every)]).astype(np.float64)
    halves = ((halves[1:] + halves[:-1]) / 2).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = np.concatenate([every, halves, np.nextafter(halves, np.inf), np.nextafter(halves, -np.inf), WORDS.view(np.float32)])
        expected = numbers.astype(element)
    kernel = around("core/dtypes", NARROW.format(name).replace("COUNT", str(numbers.size)))
    bits = written(kernel, backend, {"weight": numbers.view(np.int32), "output": np.zeros(numbers.size, np.int32)})
    narrow = bits.astype(np.uint16).view(element)
    np.testing.assert_array_equal(narrow.astype(np.float64), expected.astype(np.float64))
    real = ~np.isnan(numbers)
    np.testing.assert_array_equal(np.signbit(narrow.astype(np.float64))[real], np.signbit(numbers)[real])


def test_places_past_2_31_elements_and_steps_of_many_bytes(backend: str) -> None:
    body = """if (lane < 4) {
    const View<const double> view = {nullptr, {1LL << 40, 1LL << 33, -(1LL << 32), 70000, 3}};
    const double* const place = view.at(lane, 2, 1 + lane, 50000, 7);
    told[2 * lane] = static_cast<int>(reinterpret_cast<index_t>(place) / 8 >> 31);
    told[2 * lane + 1] = static_cast<int>(reinterpret_cast<index_t>(place) / 8 & 0x7fffffff);
    const index_t step = (lane - 1) * (3LL << 33) + 4 * lane;
    told[8 + lane] = advanced(reinterpret_cast<const char*>(given), step) == reinterpret_cast<const char*>(given) + step;
  }"""
    places = [lane * 2**40 + 2 * 2**33 - (1 + lane) * 2**32 + 50000 * 70000 + 7 * 3 for lane in range(4)]
    expected = [number for place in places for number in (place >> 31, place & 0x7FFFFFFF)] + [1] * 4
    assert told(around("core/advanced", body), backend, 12) == expected


# Each lane copies an element of 4, 8 and 16 bytes, every third none; another lane reads it, before it has landed and after.
COPIED = around(
    "core/vector ptx/copy_async",
    """__shared__ __align__(16) int shared[3][32][4];
  const int live = lane % 3 != 1, other = lane ^ 5;
  for (int i = 0; i < 3; ++i) for (int k = 0; k < 4; ++k) shared[i][lane][k] = -1;
  __syncwarp();
  const int* const from = given + (live ? 4 * lane : 0);
  copy_async(shared[0][lane], from, live);
  copy_async(reinterpret_cast<Words<2>*>(shared[1][lane]), reinterpret_cast<const Words<2>*>(from), live);
  copy_async(reinterpret_cast<Words<4>*>(shared[2][lane]), reinterpret_cast<const Words<4>*>(from), live);
  cp_async_wait_all();
  __syncwarp();
  for (int i = 0; i < 3; ++i) for (int k = 0; k < 4; ++k) told[(lane * 3 + i) * 4 + k] = shared[i][other][k];""",
    declared='architectures = ["sm_80"]\n',
)


def copies_are_right(kernel: Kernel, backend: str) -> bool:
    """Whether whole elements are copied, or zeros in their place, and nothing beside them."""
    expected = np.full((32, 3, 4), -1)
    for lane, (i, count) in itertools.product(range(32), enumerate((1, 2, 4))):
        other = lane ^ 5
        expected[lane, i, :count] = 1000 + 4 * other + np.arange(count) if other % 3 != 1 else 0
    given = [1000 + i for i in range(128)]
    return told(kernel, backend, 384, given) == expected.ravel().tolist()


def test_whole_elements_are_copied_or_zeros(backend: str) -> None:
    assert copies_are_right(COPIED, backend)


@broken(
    ("global, live ? sizeof(T) : 0);", "global, sizeof(T));"),
    ("  cp_async<sizeof(T)>(shared_address(shared), global,", "  cp_async<4>(shared_address(shared), global, live ? 4 : 0); //"),
)
def test_a_broken_copy_is_seen(right: str, wrong: str) -> None:
    assert not copies_are_right(mistaken(COPIED, right, wrong), "host")


def test_a_copy_that_nobody_waits_for_has_not_landed() -> None:
    assert not copies_are_right(mistaken(COPIED, "  cp_async_wait_all();\n", ""), "host")


def test_an_element_of_two_bytes_is_not_copied() -> None:
    kernel = around("ptx/copy_async", "__shared__ short shared[1]; copy_async(shared, reinterpret_cast<const short*>(given), true);")
    with pytest.raises(CompileError, match=r"cp\.async moves 4, 8 or 16 bytes"):
        told(kernel, "host", 1)


# A voxel-by-voxel convolution of two groups.
GROUPED = Problem(2, 6, 4, (2, 3, 4), (2, 2, 4), (2, 1, 3), (1, 0, 2), (1, 0, 1), (1, 1, 2), groups=2, bias=True)
GATHERED = around(
    "core/gathered",
    """const int (&size)[3] = problem.output_size;
  const int outputs = problem.out_channels * size[0] * size[1] * size[2];
  for (int i = thread; i < problem.batch * outputs; i += 64) {
    const Voxel v = voxel_at(i, problem.out_channels, size);
    *output.at(v.n, v.c, v.d, v.h, v.w) =
        gathered(problem, input, weight, Epilogue{bias}, v.n, v.c, v.c % 2, v.c / 2 * 3, v.d, v.h, v.w);
  }""",
    threads=64,
)


def gathered(kernel: Kernel, backend: str) -> tuple[Array, Array]:
    """Return the outputs of a kernel, and those that every input and tap add to."""
    generator = np.random.default_rng(1)
    p = GROUPED
    x, weight, bias = (generator.integers(-9, 10, shape) for shape in (p.input_shape, p.weight_shape, (p.out_channels,)))
    expected = np.zeros(p.output_shape)
    expected[:] = bias[:, None, None, None]
    for i in np.ndindex(*p.input_size):
        for t in np.ndindex(*p.kernel_size):
            o = tuple(i[a] * p.stride[a] - p.padding[a] + t[a] * p.dilation[a] for a in range(3))
            if all(0 <= o[a] < p.output_size[a] for a in range(3)):
                values = x[(..., *i)].reshape(2, 2, 3), weight[(..., *t)].reshape(2, 3, 2)
                expected[(..., *o)] += np.einsum("ngc,gco->ngo", *values).reshape(2, 4)
    views, arrays = {}, {"bias": bias.astype(np.float32), "output": np.full(expected.size, 999, np.float32)}
    for name, values_of, order in (("input", x, (0, 2, 4, 3, 1)), ("weight", weight, (4, 1, 0, 2, 3))):
        views[name], places = laid(values_of.shape, order, 3, {order[-1]: 1})
        arrays[name] = np.full(int(places.max()) + 1, 77, np.float32)
        arrays[name][places] = values_of
    views["output"], _ = laid(p.output_shape, range(5))
    return written(kernel, backend, arrays, "fp32", p, views), expected.ravel()


def test_an_output_is_gathered_by_the_definition(backend: str) -> None:
    np.testing.assert_array_equal(*gathered(GATHERED, backend))


@broken(
    ("weight.at(ci, co, kd, kh, kw)", "weight.at(ci, co, kd, kh, 0)"),
    ("tap / problem.kernel_size[2] % problem.kernel_size[1];", "tap % problem.kernel_size[1];"),
    ("ci < first_ci + channels", "ci < channels"),
    ("epilogue.start(channel)", "epilogue.start(co)"),
)
def test_a_broken_gather_is_seen(right: str, wrong: str) -> None:
    assert not np.array_equal(*gathered(mistaken(GATHERED, right, wrong), "host"))
