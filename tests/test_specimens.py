"""Every broken kernel in `specimens/` is rejected on the host within seconds, with the smallest problem that shows its mistake."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from selection import some

from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.check import check
from cupy_convt3d.lab.strategies import EDGE_PROBLEMS
from cupy_convt3d.problem import Problem

SPECIMENS = Path(__file__).parent / "specimens"
LIMIT_S = 10.0

_FAR_CHANNELS, _FAR_DEPTH = "n1_c65535to65535_i1x1024x66_k1x1x2_g65535_bias", "n1_c1to1_i4200x1024x1024_k1x1x2_bias"
_PAST = r"(wrong value in what lies last|SIGSEGV).*; past 2\^32 elements of a tensor: look for an index, or a product in one, of 32 bits"
# Specimen, sanitizer, the counterexample that shrinking ends at, and what its message says.
PINNED = [
    ("s000_truncating_index", None, "n1_c1to1_i1_k1x1x3_p0x0x1", "wrong value"),
    ("s000_weight_stride", None, "n1_c2to1_i1_k1", "outside a tensor"),
    ("s000_out_channels", None, "n1_c1to2_i1_k1", "never written; 1 of 2"),
    ("s000_groups_ignored", None, "n1_c2to2_i1_k1_g2", "wrong value"),
    ("s000_batch_index", None, "n2_c1to1_i1_k1", "never written; 1 of 2"),
    ("s000_atomic_store", None, "n1_c1to1_i1_k1", "what was in the output before shows through"),
    ("s001_input_index", None, "n1_c1to1_i1_k1x1x3_p0x0x1", "wrong value"),
    ("s001_fp32_bias", None, "n1_c1to1_i1_k1_bias", "wrong value"),
    ("s002_same_block_index", None, "n1_c1to1_i1x1x5_k1_s1x1x2", "never written; 1 of 9"),
    ("s002_input_index", None, "n1_c1to1_i1_k1x1x3_p0x0x1", "wrong value"),
    ("s002_weight_layout", None, "n1_c2to2_i1_k1", "wrong value"),
    ("s003_input_index", None, "n1_c1to1_i1_k1x1x2_s1x1x2", "wrong value"),
    ("s003_weight_offset", None, "n1_c2to2_i1_k1", "wrong value"),
    ("s003_out_channels", None, "n1_c2to2_i1_k1_g2", "never written; 1 of 2"),
    ("s004_only_batch_0", None, "n2_c1to1_i1_k1", "never written; 1 of 2"),
    ("s004_channel_from_y", None, "n1_c1to2_i1_k1", "never written; 1 of 2"),
    ("s004_index_moved", None, "n1_c1to1_i1_k1x1x2", "wrong value"),
    ("s004_weight_layout", None, "n1_c2to2_i1_k1", "wrong value"),
    ("read_outside", None, "n1_c1to1_i1_k1x1x2", "outside a tensor"),
    ("read_outside", "address", "n1_c1to1_i1_k1x1x2", r"AddressSanitizer: heap-buffer-overflow \(READ of size 4\) at .*:41"),
    ("write_outside", None, "n1_c1to1_i1_k1", "output was overrun: 1 elements"),
    ("write_outside", "address", "n1_c1to1_i1_k1", r"AddressSanitizer: heap-buffer-overflow \(WRITE of size 4\) at .*:27"),
    ("shared_outside", "undefined", "n1_c1to1_i1_k1", r"index 63 out of bounds for type 'float \[63\]' at .*:33"),
    ("unwritten", None, "n1_c1to1_i1_k1_s1x1x2_op0x0x1", "never written; 1 of 2"),
    ("race", None, "n1_c1to1_i1x2x2_k1x2x2", "two runs differ"),
    ("race", "thread", "n1_c1to1_i1_k1", r"ThreadSanitizer: data race at .*race.cu:35"),
    ("missing_barrier", None, "n1_c1to1_i1_k1", "NaN"),
    ("missing_barrier_order", None, "n1_c1to1_i1_k1", "only with threads in a shuffled order"),
    ("missing_barrier_order", "thread", "n1_c1to1_i1_k1", r"ThreadSanitizer: data race at .*missing_barrier_order.cu:3\d"),
    ("missing_barrier", "thread", "n1_c1to1_i1_k1", r"ThreadSanitizer: data race at .*missing_barrier.cu:33, .*:35"),
    ("divergent_barrier", None, "n1_c1to1_i1_k1", r"divergent barrier: thread \(\d+, 0, 0\) reached __syncthreads at .*:3\d"),
    ("race_warp_synchronous", None, "n1_c1to1_i1x1x2_k2x2x1", "only with threads in a shuffled order"),
    ("race_warp_synchronous", "thread", "n1_c1to1_i1_k1", r"ThreadSanitizer: data race at .*:37"),
    ("race_reused_tile", None, "n1_c33to1_i1_k1x1x2", "wrong value"),
    ("race_between_blocks", "thread", "n1_c1to1_i1_k1", r"ThreadSanitizer: data race at .*:48"),
    ("race_atomic_order", None, "n1_c1to1_i1x2x2_k1x2x2", "two runs differ"),
    ("tail_dropped", None, "n2_c1to1_i1x1x33_k1_s1x1x2", "never written; 2 of 130"),
    ("tail_overrun", None, "n1_c1to1_i1_k1", "output was overrun: 1 elements outside of it were written, the first element offset 1"),
    ("tail_of_channels", None, "n1_c5to1_i1_k1", "wrong value"),
    ("tail_stale_tile", None, "n1_c33to1_i1_k1x1x2", "wrong value"),
    ("group_offset_input", None, "n1_c2to4_i1_k1_g2", "wrong value"),
    ("group_offset_weight", None, "n1_c2to2_i1_k1_g2", "wrong value"),
    ("group_offset_bias", None, "n1_c2to2_i1_k1_g2_bias", "wrong value"),
    ("s001_int32_index", None, _FAR_CHANNELS, _PAST),
    ("overflow_input", None, _FAR_CHANNELS, _PAST),
    ("overflow_channel", None, _FAR_CHANNELS, _PAST),
    ("overflow_depth", None, _FAR_DEPTH, _PAST),
    ("overflow_grid_output", None, _FAR_CHANNELS, _PAST),
    ("overflow_grid_input", None, _FAR_CHANNELS, _PAST),
    ("overflow_grid_plane", None, _FAR_DEPTH, _PAST),
    ("crash", None, "n1_c1to1_i1_k1_bias", "crash: .*SIGSEGV"),
    ("out_of_memory", None, "n1_c1to1_i1_k1", "out of memory"),
    ("hang", None, "n1_c1to1_i1_k1x1x2_s1x1x2", "hang: did not end"),
]


@pytest.mark.parametrize(("name", "sanitize", "smallest", "says"), some(PINNED, 2), ids=[f"{p[0]}-{p[1]}" for p in PINNED])
def test_specimen_is_rejected_with_its_smallest_problem(
    name: str, sanitize: str | None, smallest: str, says: str, request: pytest.FixtureRequest
) -> None:
    if says == _PAST:  # what is wrong far away alone passes all problems of tiles
        request.getfixturevalue("few_problems")
    start = time.perf_counter()
    report = check(SPECIMENS / f"{name}.cu", backend="host", sanitize=sanitize, time_limit_s=2)
    elapsed_s = time.perf_counter() - start
    assert not report.passed
    assert report.counterexample is not None
    assert str(report.counterexample.problem) == smallest
    assert re.search(says, report.counterexample.message), report.counterexample.message
    assert elapsed_s < LIMIT_S


def test_every_specimen_is_pinned_and_says_its_mistake() -> None:
    files = {file.stem: file for file in SPECIMENS.glob("*.cu")}
    assert set(files) == {name for name, *_ in PINNED}
    for file in files.values():
        assert file.read_text().startswith("// Mistake: "), file


def test_the_64_bit_twin_of_a_kernel_with_channel_and_batch_in_its_grid_passes() -> None:
    narrow = (SPECIMENS / "overflow_grid_output.cu").read_text()
    wide = narrow.replace("const int y = (((n *", "const long long y = (((1LL * n *")
    assert wide != narrow
    report = check(Kernel.from_source(wide, "twin"), backend="host", examples=0, kinds=["exact", "far"])
    assert report.passed and report.verdict == "passed", str(report)
    assert report.tried["far problems"] >= 12
    assert any(reason.startswith("grid.z=") for reason in report.untried["far problems"])


def test_systems_000_and_001_are_right_for_their_own_problems() -> None:
    """Why random parameters matter: with stride 1, no padding and Cin = Cout their mistakes do not show."""
    own = Problem.parse("n1_c2to2_i3_k3")
    assert own not in EDGE_PROBLEMS
    for name in ("s000_truncating_index", "s000_weight_stride", "s000_out_channels", "s000_groups_ignored", "s001_input_index"):
        report = check(SPECIMENS / f"{name}.cu", backend="host", problem=own, kinds=["exact"])
        assert report.passed, f"{name}: {report}"


def test_the_reproduce_line_reproduces() -> None:
    found = check(SPECIMENS / "s000_groups_ignored.cu", backend="host").counterexample
    assert found is not None
    again = check(
        SPECIMENS / "s000_groups_ignored.cu",
        backend="host",
        problem=found.problem,
        dtypes=[found.dtype],
        kinds=[found.kind],
        seed=found.seed,
    ).counterexample
    assert again == found
