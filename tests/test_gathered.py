"""fprop_gathered_simt: tails of tiles, of the depth and of classes, shares that begin and end anywhere, and how they fill a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.choice import backend_for
from cupy_convt3d.lab.run.verify import output, verify
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels

NAME = "fprop_gathered_simt"
TAILS = {
    # Tiles of 64 to 512 rows: outputs of a class one fewer, as many and one more; images that end within a tile.
    "rows": [f"n{n}_c9to3_i1_k1" for n in (63, 64, 65, 127, 128, 129, 511, 512, 513)] + ["n5_c8to4_i3x4x5_k2_s1", "n65_c8to8_i1x1x2_k2_s2"],
    "columns": [f"n3_c9to{c}_i1x2x2_k1x2x2_p0x1x1_bias" for c in (1, 8, 9, 16, 17, 31, 33, 47, 64, 65, 79, 96, 129, 130)],
    # Stages of 8 channels, in rows of whole vectors and not.
    "depth": [f"n2_c{c}to8_i2_k2_s1" for c in (1, 3, 4, 7, 8, 9, 12, 16, 65, 257)],
    # Taps that lead outside for all rows of a tile, for some, and for none; classes without a tap, of one tap, and of several.
    "taps": ["n70_c8to8_i1_k3_p1_bias", "n3_c8to8_i1x1x9_k1x1x5_p0x0x2", "n9_c8to8_i4x1x3_k3x4x2_p1x1x0", "n2_c8to8_i3_k5_p4_d2_bias"],
    "classes": ["n7_c8to9_i2_k3_s2_p1_op1", "n2_c9to8_i2_k1_s3_bias", "n3_c8to8_i2x3x1_k4x2x3_s4x1x3_p2x0x1_d1x3x2", "n1_c4to4_i2_k2_s4"],
    "groups": ["n3_c24to12_i2_k2_s2_g3_bias", "n4_c18to6_i1x2x3_k3x1x3_p1x0x1_g2", "n2_c16to16_i2_k2_g16"],
}
TUNABLES: tuple[dict[str, int], ...] = (
    *({}, {"LEAST_STAGES": 1}, {"TILE_THREADS": 64, "MOST_COLUMNS": 64, "LEAST_STAGES": 3}),
    *({"STAGES": 2, "LEAST_STAGES": 5}, {"MOST_COLUMNS": 64, "STAGES": 3}),
)


@pytest.mark.parametrize("tunables", TUNABLES, ids=str)
@pytest.mark.parametrize("what", TAILS)
def test_tails(what: str, tunables: dict[str, int], backend: str) -> None:
    kernel = kernels()[NAME].replace_tunables(**tunables)
    for problem in map(Problem.parse, TAILS[what]):
        for seed in (0, 1, 5):  # contiguous tensors, then drawn layouts
            outcome = verify(backend_for(backend), kernel, problem, "fp32", "exact", seed)
            assert outcome.ok, f"{problem} seed {seed}: {outcome.message}"


@pytest.mark.parametrize("least", [1, 2, 3, 7, 20])
def test_sums_do_not_depend_on_where_shares_begin(least: int) -> None:
    """Blocks of so many stages at least begin anywhere in a tile; on whole numbers the sums are the same, and with others near."""
    problem = Problem.parse("n3_c40to20_i2x3x2_k3_s2_p1_op1_bias")
    shared, whole = (
        output(HostBackend(), kernels()[NAME].replace_tunables(LEAST_STAGES=count), problem, "fp32", "random", 3)[0]
        for count in (least, 1 << 20)
    )
    np.testing.assert_allclose(shared, whole, rtol=1e-5, atol=1e-5)


def test_how_shares_fill_the_gpu() -> None:
    """As many blocks as run at once; where tiles are many each has whole ones, and no launch adds up."""
    kernel = kernels()[NAME]
    for name, threads, blocks, parts in (
        ("n64_c128to128_i4_k3_p1", (16, 8, 16), 264, True),
        ("n64_c80to160_i4_k3_s2_p1", (16, 10, 8), 396, True),  # sixteen columns a thread would be five threads
        ("n1_c1024to16_i1_k4", (64, 2, 8), 528, True),
        ("n2_c24to8_i4_k3_s2_p1", (64, 1, 8), 10, True),
        ("n64_c128to128_i16_k2_s2", (16, 8, 16), 264, False),
    ):
        plan = kernel.plan(Problem.parse(name), "fp32", multiprocessors=132)
        found = tuple(number for _, number in plan.specialization)
        assert (found, plan.launches[2].grid[0], len(plan.launches) == 4) == (threads, blocks, parts), name
        assert plan.launches[2].shared_bytes <= 99 * 1024 or threads[0] == 64, name
    assert "at most 64 residue classes" in (kernel.why_not(Problem.parse("n1_c8to8_i2_k3_s5"), "fp32") or "")
