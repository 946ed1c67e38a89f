"""Small blocks alone: a ring of buffers, what a warp has in common, numbers as types or computed anew, quotients rounded up."""

from __future__ import annotations

import pytest
from trial import around, told


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_ring_goes_round_and_changes_its_parity(size: int) -> None:
    body = f"""if (lane == 0) {{
    Ring ring(640, {size});
    for (int i = 0; i < 10; ++i, ring.advance()) {{
      told[4 * i] = ring.slot;
      told[4 * i + 1] = static_cast<int>(ring.full());
      told[4 * i + 2] = static_cast<int>(ring.empty());
      told[4 * i + 3] = static_cast<int>(ring.parity);
    }}
  }}"""
    found = told(around("pipe/ring", body, declared='architectures = ["sm_90a"]\n'), "host", 40)
    assert found == [n for i in range(10) for n in (i % size, 640 + 8 * (i % size), 640 + 8 * (size + i % size), i // size % 2)]


def test_all_lanes_have_the_first_ones_value(backend: str) -> None:
    assert told(around("core/warp", "told[lane] = of_warp(lane + 5);"), backend, 32) == [5] * 32


def test_a_constant_is_a_number_that_a_lambda_is_compiled_for(backend: str) -> None:
    body = """const auto tell = [&](auto number) {
    constexpr int count = decltype(number)::value;
    int values[count + 1] = {};
    values[count] = count;
    if (lane == 0) told[count] = values[count] + 10;
  };
  tell(Constant<0>{});
  tell(Constant<3>{});"""
    assert told(around("core/constant", body), backend, 4) == [10, -7, -7, 13]


def test_a_quotient_is_rounded_up(backend: str) -> None:
    body = "if (lane < 12) told[lane] = ceil_div(lane, 1 + lane % 4);"
    assert told(around("core/integers", body), backend, 12) == [-(-lane // (1 + lane % 4)) for lane in range(12)]


def test_what_is_computed_anew_is_the_same_and_memory_is_read_anew(backend: str) -> None:
    body = """__shared__ int shared[32];
  shared[lane] = lane;
  __syncwarp();
  const int before = shared[lane ^ 1];
  __syncwarp();
  shared[lane] = computed_anew(10 * lane);
  __syncwarp();
  forget_memory();
  told[lane] = before + shared[lane ^ 1] + static_cast<int>(computed_anew(1000u));"""
    assert told(around("core/forget_memory", body), backend, 32) == [1000 + 11 * (lane ^ 1) for lane in range(32)]
