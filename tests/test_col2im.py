"""fprop_col2im: tiles of whole volumes and of boxes, parts of the depth, rows of the weight that are no vectors, and mistakes in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from selection import in_turn, some

from cupy_convt3d.choice import backend_for, given_to
from cupy_convt3d.lab.run.verify import APART, verify
from cupy_convt3d.lab.tensors import draw_tensors
from cupy_convt3d.ops import conv_transpose3d
from cupy_convt3d.problem import Problem
from cupy_convt3d.reference import fprop
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


@pytest.mark.parametrize("tunables", some(TUNABLES))
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
        ("n8_c512to3_i4_k4_s2_p1", (64, 64, 2, 64), 64),  # a weight (in, taps, out) has 4 tiles, one (in, out, taps) 3
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
        "static_cast<index_t>(in_channels) + first_chunk * chunk_channels;",
        "static_cast<index_t>(in_channels);",
    ),
    "a box's outputs begin at zero": ("share.first = box == 0 ? 0 :", "share.first = true ? 0 :"),
    "one box an output": ("if (!overlap) return {last, last + 1};", "return {last, last + 1};"),
    "the bias by the tile's channel": ("tile.first_co = group * out_channels + first_co;", "tile.first_co = first_co;"),
    "columns that begin before the tile": (
        "return together ? shift - first_tap :",
        "return together ? -first_tap :",
    ),
}


# What a weight with channels in a row adds: classes of outputs on all axes, on one, of a divisor of the stride, with dilation, without
# outputs, and with more taps than the tile has live ones; channels that are vectors, pairs and neither; a last tile that is not full.
CLASSES = (
    *("n2_c24to40_i1_k4_bias", "n3_c40to32_i2_k4_s2_p1", "n2_c24to48_i1x2x2_k3x4x4_s1x2x2_p1_bias", "n2_c16to20_i1_k8_p2"),
    *("n2_c8to16_i3x2x2_k6x1x1_s4x1x1_p1x0x0", "n1_c16to16_i8x8x3_k4_s2_p1"),
    *("n1_c16to16_i2_k4_s2_p1_d3_bias", "n2_c8to12_i1x3x3_k4x2x2_s3_d3x1x1", "n2_c16to40_i3x2x2_k2_s4_op1_g2_bias", "n2_c8to6_i2_k4_s2_p1"),
    *("n2_c8to3_i2_k4_s2_p1_bias", "n2_c12to8_i1_k3_p1_bias", "n2_c8to16_i5x6x5_k2_s2"),
)
CLASS_MISTAKES = {
    "a tap's distance": ('tap_step_h = "kernel_w // split_w * tap_step_w"', 'tap_step_h = "kernel_w * tap_step_w"'),
    "the distance of products": (
        'class_step_h = "(stride_h // split_h * tap_step_h - ',
        'class_step_h = "(stride_h * tap_step_h - ',
    ),
    "the next tap of a class": ("(row % local_h * splits.h + numbers.h)", "(row % local_h + numbers.h)"),
    "classes by the tap alone": ("number * (problem.dilation[axis] % split) % split", "number"),
    "outputs of all classes": ("w = own[2].first + w * splits.w;", "w = own[2].first + w;"),
    "planes that have no live tap": ("return first_tap / classes();", "return first_tap;"),
    "channels of the next tap": ("(together || column % class_channels < channels)", "true"),
    "vectors of a weight that begins anywhere": ("* SIZE |\n        reinterpret_cast<unsigned long long>(weight.data);", "* SIZE;"),
    "what begins a class": ("  const int lead = number *", "  const int lead = (number + 1) *"),
}


def _layouts(w: Any) -> dict[str, Any]:
    """The same weight in other places: contiguous, with channels in a row, that beginning an element later, and between others."""
    last = np.ascontiguousarray(w.transpose(0, 2, 3, 4, 1)).transpose(0, 4, 1, 2, 3)
    late = np.empty(w.size + 1, w.dtype)[1:].reshape(last.transpose(0, 2, 3, 4, 1).shape).transpose(0, 4, 1, 2, 3)
    apart = np.empty((*w.shape[:1], *w.shape[2:], w.shape[1] + 2), w.dtype)[..., : w.shape[1]].transpose(0, 4, 1, 2, 3)
    rows = np.empty((w.shape[0], w.shape[1] + 1, *w.shape[2:]), w.dtype)[:, 1:]
    planes = np.empty((*w.shape[:2], w.shape[2] + 1, *w.shape[3:]), w.dtype)[:, :, 1:]
    for there in (late, apart, rows, planes):
        there[...] = w
    return {"contiguous": w, "last": last, "late": late, "apart": apart, "rows": rows, "planes": planes, "turned": w.copy("F")}


WEIGHT_TUNABLES: list[dict[str, int]] = [
    {},
    {"TILE_COLUMNS": 128, "DEPTH_PARTS": 2},
    {"TILE_ROWS": 16, "TILE_COLUMNS": 256, "STAGES": 2},
]


@pytest.mark.parametrize(("dtype", "tunables"), in_turn(kernels()["fprop_col2im"].dtypes, WEIGHT_TUNABLES))
def test_a_weight_is_read_as_it_lies(dtype: str, tunables: dict[str, int]) -> None:
    """The results are right, and bit for bit the same in every layout."""
    kernel = kernels()["fprop_col2im"].replace_tunables(**tunables)
    precision = dtype if dtype.startswith("tf32") else None
    for problem in map(Problem.parse, (*CLASSES, *WHOLE[:6], *BOXES[:4])):
        for kind in ("exact", "random"):
            drawn = draw_tensors("fprop", problem, dtype, kind, 0)
            settings = (drawn.get("bias"), problem.stride, problem.padding, problem.output_padding, problem.groups, problem.dilation)
            results = {
                name: conv_transpose3d(
                    drawn["input"], weight, *settings, algorithm=kernel, backend="host", fp32_precision=precision
                )
                for name, weight in _layouts(drawn["weight"]).items()
            }
            right = results["contiguous"]
            if kind == "exact":
                right = fprop(problem, *drawn.values()).astype(right.dtype)
            for name, result in results.items():
                assert np.array_equal(np.asarray(result, np.float64), np.asarray(right, np.float64)), f"{problem} {kind} {name}"


def test_it_is_given_taps_that_lead_nowhere_too() -> None:
    problem = Problem.parse("n2_c24to48_i1x2x2_k3x4x4_s1x2x2_p1")
    assert given_to(kernels()["fprop_col2im"], "fp32", problem, "fprop", None, None) is problem
    assert given_to(kernels()["fprop_gather"], "fp32", problem, "fprop", None, None).kernel_size == (1, 4, 4)


def test_channels_in_a_row_are_read_in_runs() -> None:
    """Of a weight (in, taps, out) a tile reads whole sectors where taps divide into classes, and all tiles have blocks."""
    kernel = kernels()["fprop_col2im"]
    for name, dtype, splits, channels in (
        ("n4_c1024to256_i2_k4_s2_p1", "fp32", (2, 2, 2), 8),
        ("n2_c944to472_i1_k4_bias", "fp32", (4, 4, 1), 32),
        ("n64_c952to476_i1x2x2_k3x4x4_s1x2x2_p1", "fp32", (1, 2, 2), 32),
        ("n32_c960to960_i2_k4_s2_p1", "fp32", (2, 2, 2), 16),
        ("n4_c1024to256_i2_k4_s2_p1", "bf16", (2, 2, 2), 8),
        ("n4_c512to256_i4_k3_s2_p1_op1", "bf16", (1, 1, 1), 4),
        ("n8_c512to3_i4_k4_s2_p1", "tf32", (2, 2, 1), 4),
    ):
        problem = Problem.parse(name)
        launch = kernel.plan(problem, dtype, multiprocessors=132).launches[1]
        found = tuple(launch.scalars[f"split_{axis}"] for axis in "dhw")
        assert (found, launch.scalars["class_channels"]) == (splits, channels), name
        blocks = launch.scalars["row_tiles"] * launch.scalars["parts"] * launch.scalars["class_tiles"] * math.prod(splits)
        assert launch.grid[0] >= blocks, name


@pytest.mark.slow
@pytest.mark.parametrize("mistake", CLASS_MISTAKES)
def test_mistakes_in_columns_of_channels_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    tried = [(seed, Problem.parse(name)) for name in CLASSES for seed in (*range(1, 9), APART + 31, APART + 33)]
    assert_found(kernels()["fprop_col2im"], *CLASS_MISTAKES[mistake], tried, "bf16", STAGES=3)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    tried = [(seed, Problem.parse(name)) for name in (*WHOLE, *BOXES, "n2_c40to16_i3_k3_s2_p1") for seed in (0, 1)]
    assert_found(kernels()["fprop_col2im"], *MISTAKES[mistake], tried, "bf16", STAGES=3, DEPTH_PARTS=2)
