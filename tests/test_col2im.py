"""fprop_col2im: tiles of whole volumes and of boxes, parts of the depth, rows of the weight that are no vectors, and mistakes in them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cupy_convt3d.choice import backend_for
from cupy_convt3d.lab.run.verify import verify
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels

# Whole volumes: of one voxel, several to a tile, one that fills it; taps that lead nowhere; a tile's last channels; dilation and gaps.
WHOLE = (
    *("n17_c24to5_i1_k4_bias", "n3_c40to9_i1x4x4_k4_s2_p1_bias", "n2_c72to8_i4_k4_s2_p1", "n5_c20to6_i3_k3_s2_p1_op1_g2"),
    *("n2_c33to3_i2_k3_s1_p1_bias", "n1_c16to7_i2x3x2_k2_s3_op1_d2_bias", "n9_c8to16_i2_k4_s2_p1", "n2_c8to4_i3_k5_s2_p2"),
)
# Boxes that share outputs on one axis, on all, and on none; the last is shorter.
BOXES = (
    *("n1_c24to3_i5x6x5_k3_s2_p1_bias", "n2_c16to2_i2x9x9_k1x4x4_s1x2x2_p0x1x1", "n1_c8to2_i1x1x150_k1x1x4_s1x1x2_p0x0x1"),
    *("n1_c8to4_i6x6x5_k2_s2", "n1_c12to3_i1x12x12_k1x2x2_s1x3x3_op0x1x1_bias", "n1_c8to2_i6x5x5_k2x1x1_p3x0x0"),
)
TUNABLES: tuple[dict[str, int], ...] = (
    *({}, {"TILE_ROWS": 16}, {"TILE_ROWS": 128, "TILE_COLUMNS": 128}, {"TILE_COLUMNS": 256, "STAGES": 2}),
    *({"DEPTH_PARTS": 1}, {"DEPTH_PARTS": 3, "STAGE_CELLS": 4}, {"TILE_ROWS": 32, "TILE_COLUMNS": 128, "STAGE_CELLS": 8}),
)


@pytest.mark.parametrize("tunables", TUNABLES)
def test_tails_of_tiles_boxes_and_parts(tunables: dict[str, int], backend: str) -> None:
    kernel = kernels()["fprop_col2im"].replace_tunables(**tunables)
    for dtype in kernel.dtypes:
        for problem in map(Problem.parse, (*WHOLE, *BOXES)):
            for seed in (0, 1, 5):  # contiguous tensors, then drawn layouts
                outcome = verify(backend_for(backend), kernel, problem, dtype, "exact", seed)
                assert outcome.ok, f"{problem} {dtype} seed {seed}: {outcome.message}"


def test_how_tiles_fill_the_gpu() -> None:
    """Columns are as many as leave the multiprocessors work; the depth is cut where there are too few tiles all the same."""
    kernel = kernels()["fprop_col2im"]
    for name, tile, blocks in (
        ("n32_c256to384_i1_k4", (32, 128, 1, 64), 192),
        ("n4_c1024to256_i2_k4_s2_p1", (32, 64, 1, 64), 256),
        ("n45_c528to528_i1x4x4_k4_s2_p1", (128, 128, 1, 32), 792),  # half of the taps of the depth lead outside
        ("n8_c512to3_i4_k4_s2_p1", (64, 64, 2, 64), 48),
    ):
        plan = kernel.plan(Problem.parse(name), "bf16", multiprocessors=132)
        launch = plan.launches[1]
        found = tuple(launch.scalars[key] for key in ("tile_columns", "parts", "live_taps"))
        rows = dict(plan.specialization)["ROW_TILES"] * 16 * launch.scalars["warp_rows"]
        assert ((rows, *found), launch.grid) == (tile, (blocks, 1, 1)), name
        assert len(plan.launches) == (3 if launch.scalars["parts"] > 1 else 2), name
        assert launch.shared_bytes <= 99 * 1024, name
    assert "all taps of an output channel" in (kernel.why_not(Problem.parse("n1_c8to8_i2_k7"), "bf16") or "")


MISTAKES = {
    "copies not waited for": ("    cp_async_wait<STAGES - 2>();\n", ""),
    "a stage read before all have copied": ("    __syncthreads();  // this stage has landed for all", "    //"),
    "products on top of a stage that is read": ("  __syncthreads();  // all have read the last stage", "  //"),
    "the launch before is not waited for": ("  wait_for_launch_before();\n  Run* const tables", "  Run* const tables"),
    "channels past the last": (
        "const bool inside = first + k < live;\n        cp_async",
        "const bool inside = true;\n        cp_async",
    ),
    "every part begins with the first channels": (
        "first_chunk * chunk_channels) * columns.row_length",
        "0) * columns.row_length",
    ),
    "a box's outputs begin at zero": ("share.first = box == 0 ? 0 :", "share.first = true ? 0 :"),
    "one box an output": ("if (!overlap) return {last, last + 1};", "return {last, last + 1};"),
    "the bias by the tile's channel": ("tile.first_co = group * out_channels + first_co;", "tile.first_co = first_co;"),
    "columns that begin before the tile": (
        "tile.first_product = columns.shift - first_tap;",
        "tile.first_product = -first_tap;",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    tried = [(seed, Problem.parse(name)) for name in (*WHOLE, *BOXES, "n2_c40to16_i3_k3_s2_p1") for seed in (0, 1)]
    assert_found(kernels()["fprop_col2im"], *MISTAKES[mistake], tried, "bf16", STAGES=3, DEPTH_PARTS=2)
