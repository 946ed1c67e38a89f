"""Every kernel x backend x kind of tensors: edge problems and random ones, against the NumPy scatter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import lru_cache

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import checked, some

import cupy_convt3d as ct
from cupy_convt3d import reference
from cupy_convt3d.backends.base import Backend
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.check import check
from cupy_convt3d.lab.run.verify import output, verify
from cupy_convt3d.lab.strategies import EDGE_PROBLEMS, problems
from cupy_convt3d.lab.tensors import SPECIAL_KINDS, WIDE, kinds_of
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels

BACKENDS: dict[str, Backend] = {}
CASES = [(name, dtype) for name, kernel in kernels().items() for dtype in kernel.dtypes]
# On the host the check of every kernel in `test_check.py` begins with the edge problems and ends with drawn ones.
BESIDE_THE_CHECK = [
    *some(("host", name, dtype) for name, dtype in CASES if dtype != checked(kernels()[name])),
    *(pytest.param("cuda", name, dtype, marks=pytest.mark.gpu) for name, dtype in CASES),
]
KINDS = dict.fromkeys(WIDE, ("exact", "exact_wide", "random"))

# Where peers have failed; those that fit on the host.
PEERS = {
    "cuDNN illegal instruction (Paddle#70838)": "n9_c9to1_i9_k8_s4x3x1_p8x0x8_d2x1x2",
    "seven of eight classes get no tap (MedNeXt)": "n1_c4to4_i5_k1_s2",
    "out_pad >= stride under dilation (pytorch#56328)": "n1_c2to3_i4_k3_op2_d3",
    "channel multiplier (Paddle#79504)": "n1_c6to12_i5_k3_s2_g6",
    "depthwise (pytorch#37406), fewer channels": "n1_c16to16_i4_k7_s2_p3_g16",
    "pad = k - 1 (VideoGPT)": "n1_c3to4_i4_k4_s2_p3",
    "one voxel more than one tap (mxnet#13135)": "n1_c1to1_i2_k3_p1",
    "k(1,3,3) s(1,2,2) p(0,1,1) (pytorch#70518), fewer channels": "n2_c4to4_i6x5x5_k1x3x3_s1x2x2_p0x1x1",
}


@pytest.fixture
def device(backend: str) -> Backend:
    """The backend of that name; one for all tests, so that an instance is loaded once."""
    if backend not in BACKENDS:
        from cupy_convt3d.backends.cuda import CudaBackend

        BACKENDS[backend] = HostBackend() if backend == "host" else CudaBackend()
    return BACKENDS[backend]


def refused(name: str, problem: Problem, dtype: str) -> str | None:
    """Why a kernel that declares restrictions leaves a problem to others; a kernel without any must take every problem."""
    kernel = kernels()[name]
    return kernel.why_not(problem, dtype) if kernel.restrictions else None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda"])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_edges(name: str, dtype: str, device: Backend) -> None:
    kernel = kernels()[name]
    taken = [problem for problem in EDGE_PROBLEMS if refused(name, problem, dtype) is None]
    assert taken
    for problem in taken:
        for kind in KINDS.get(dtype, ("exact", "random")):
            outcome = verify(device, kernel, problem, dtype, kind, seed=1)
            assert outcome.ok, f"{name} {problem} {dtype} {kind}: {outcome.message}"


@pytest.mark.parametrize(("backend", "name", "dtype"), BESIDE_THE_CHECK)
def test_what_is_not_finite_reaches_what_its_taps_lead_to_alone(name: str, dtype: str, device: Backend) -> None:
    """Some kernels multiply weights with padding too, and say so; docs/how/error_bound.md lists them."""
    kernel = kernels()[name]
    taken = [problem for problem in EDGE_PROBLEMS if refused(name, problem, dtype) is None]
    kinds = [kind for kind in kinds_of(dtype) if kind in SPECIAL_KINDS]
    for (number, problem), kind in itertools.product(enumerate(taken), kinds):
        outcome = verify(device, kernel, problem, dtype, kind, number)
        assert outcome.ok and not outcome.message, f"{name} {problem} {dtype} {kind} seed {number}: {outcome.message}"


@pytest.mark.parametrize("name", [name for name, kernel in kernels().items() if "tf32x3" in kernel.dtypes])
def test_an_infinity_stays_one_in_two_parts(name: str) -> None:
    """Its high part would meet the low part of the other operand, which is zero, or of the other sign."""
    kernel = kernels()[name]
    problem = Problem(1, 8, 8, (1, 1, 4), (1, 1, 2), stride=(1, 1, 2))
    low = 1 + 2.0**-12  # both parts of it count, of one sign and of the other
    for value, other in itertools.product((np.inf, -np.inf, np.nan), (1.0, low, 2 - low, np.inf, 0.0)):
        for spoilt in ("input", "weight"):
            tensors = {n: np.full(problem.shapes("fprop")[0][n], other, np.float32) for n in ("input", "weight")}
            tensors[spoilt][...] = value
            options = {"algorithm": kernel, "fp32_precision": "tf32x3", "backend": "host"}
            output = ct.conv_transpose3d(*tensors.values(), stride=problem.stride, **options)
            np.testing.assert_array_equal(output, reference.fprop(problem, **tensors), f"{value} x {other} in {spoilt}")


@pytest.mark.parametrize(("backend", "name", "dtype"), BESIDE_THE_CHECK)
def test_random_problems(name: str, dtype: str, device: Backend) -> None:
    kernel = kernels()[name]

    @settings(max_examples=25, deadline=None)
    @given(problems(kernel.pass_name), st.sampled_from(KINDS.get(dtype, ("exact", "random"))), st.integers(0, 2**20))
    def run(problem: Problem, kind: str, seed: int) -> None:
        if refused(name, problem, dtype):
            return
        outcome = verify(device, kernel, problem, dtype, kind, seed)
        assert outcome.ok, f"{name} {problem} {dtype} {kind} seed {seed}: {outcome.message}"

    run()


@pytest.mark.parametrize(
    ("name", "peer"),
    some((name, peer) for name in kernels() for peer in PEERS if refused(name, Problem.parse(PEERS[peer]), "fp32") is None),
)
def test_where_peers_failed(name: str, peer: str, device: Backend) -> None:
    problem = Problem.parse(PEERS[peer])
    outcome = verify(device, kernels()[name], problem, "fp32", "exact", seed=2)
    assert outcome.ok, outcome.message


@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
@pytest.mark.parametrize(
    "name", ["n1_c1to1_i1x4x16_k1x1x3_s1x1x2_p0x0x1", "n1_c9to3_i1x2x9_k1x3x3_s1x2x2_p0x1x1", "n1_c1to5_i2x1x5_k3_s2_p1"]
)
def test_one_input_that_is_not_finite_is_noticed_wherever_it_lies(name: str, dtype: str) -> None:
    """In whichever tile of a warp: sums that zero weights made NaN are computed anew where any lane saw one."""
    problem, kernel = Problem.parse(name), kernels()["fprop_window_mma"]
    generator = np.random.default_rng(0)
    element = np.float32 if dtype == "tf32" else ml_dtypes.bfloat16
    tensors = {n: generator.integers(1, 4, problem.shapes("fprop")[0][n]).astype(element) for n in ("input", "weight")}
    geometry = {"stride": problem.stride, "padding": problem.padding, "algorithm": kernel, "backend": "host", "fp32_precision": "tf32"}
    for place in np.ndindex(*problem.input_size):
        spoilt = {**tensors, "input": tensors["input"].copy()}
        spoilt["input"][(0, -1, *place)] = np.inf
        wanted = reference.fprop(problem, **{n: one.astype(np.float32) for n, one in spoilt.items()})
        got = ct.conv_transpose3d(*spoilt.values(), **geometry)
        np.testing.assert_array_equal(got.astype(np.float32), wanted, f"infinity at {place}")


@pytest.mark.parametrize("voxels", [127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("channels", [31, 32, 33])
def test_tile_tails(voxels: int, channels: int, device: Backend) -> None:
    problem = Problem(1, 9, channels, (1, 1, voxels), (1, 1, 1))
    outcome = verify(device, kernels()["fprop_tiled"], problem, "fp32", "exact", seed=3)
    assert outcome.ok, outcome.message


# One and two tiles of quads (4 outputs along w), of output channels and of staged input channels, each with its neighbours.
SIMT_TAILS = {
    "quads": [f"n1_c2to8_i1x1x{w}_k1x1x3_p0x0x1" for w in (1, 3, 4, 5, 1023, 1024, 1025, 2047, 2049)],
    "rows": [f"n1_c2to8_i{d}x9x{w}_k2x3x3_p1" for d in (7, 8, 9) for w in (28, 29, 32)],
    "channels": [f"n1_c3to{c}_i2x3x5_k3_s2_p1" for c in (1, 3, 4, 5, 7, 8, 9, 16, 17, 24, 33, 40)],
    "stages": [f"n2_c{c}to8_i3x6x20_k3_p1" for c in (1, 6, 7, 8, 13, 14, 15, 29)],
    "taps along w": [f"n1_c2to8_i2x3x16_k2x2x{k}_p1x1x0" for k in range(1, 10)],
    "whole vectors": [f"n1_c2to8_i2x5x{w}_k3_p1x1x{p}" for w in (64, 68) for p in (0, 1, 2, 3)],
    "lcm(stride, dilation)": ["n1_c2to3_i9_k3_s2_d3", "n1_c2to3_i7_k4_s3_p2_d2", "n1_c2to3_i9x8x12_k3_p2_d3", "n1_c2to8_i5_k3_s4_d2"],
    "planes outside": ["n1_c2to8_i3x4x4_k7x1x1", "n1_c2to8_i2x4x4_k3x1x1_d4x1x1", "n1_c1to8_i1x2x2_k2x1x1_op3x0x0_d4x1x1"],
}
# Runs of positions, four images or parts of the depth at a time, and what of them begins between two of those.
FLATTENED_TAILS = {
    "positions": [f"n4_c2to8_i1x1x{w}_k1x1x3_p0x0x1" for w in (1, 31, 32, 33, 127, 128, 383, 384, 385, 769)],
    "segments": [f"n{n}_c2to3_i{d}x3x4_k3_p1" for n in (1, 2, 3, 4, 6, 8) for d in (1, 2, 3, 4, 5, 9)],
    "strided depth": [f"n{n}_c2to3_i{d}x3x4_k{k}_s{s}_p1" for n in (1, 2, 4) for d in (1, 3, 4) for k, s in ((3, 2), (4, 2), (4, 3))],
    "channels": [f"n1_c3to{c}_i2x3x5_k3_p1" for c in (1, 7, 8, 9, 12, 16, 17, 24, 36, 48, 64)],
    "channels of pairs": [f"n2_c3to{c}_i2x3x5_k3_s2_p1" for c in (1, 7, 8, 9, 16, 24, 40)],
    "stages": [f"n2_c{c}to8_i3x6x20_k3_p1" for c in (1, 6, 7, 8, 13, 29, 61)],
    "taps along w": [f"n1_c2to8_i2x3x16_k2x2x{k}_s1x1x{s}_p1x1x{p}" for k in range(1, 10) for s in (1, 2, 3) for p in (0, 1)],
    "zeros shared": [f"n1_c2to3_i3x{h}x{w}_k5x{k}x{k}_p{p}" for h, w in ((1, 2), (4, 3)) for k, p in ((1, 0), (4, 1), (7, 0), (7, 3))],
    "wide spread": ["n1_c2to3_i9_k3_s2_d3", "n2_c2to3_i7_k4_s3_p2_d2", "n1_c2to3_i9x8x12_k3_p2_d3", "n1_c2to8_i5_k3_s4_d2"],
    "no tap": ["n1_c2to2_i3_k1_s2_bias", "n5_c2to2_i3_k1x2x1_s3x4x4_bias", "n4_c2to9_i4_k3_s2_d2_bias", "n1_c2to2_i4_k3_s2_p1_d2_bias"],
    "planes outside": ["n1_c2to8_i3x4x4_k7x1x1", "n4_c2to8_i2x4x4_k3x1x1_d4x1x1", "n1_c1to8_i1x2x2_k2x1x1_op3x0x0_d4x1x1"],
}
GROUPED_TAILS = {
    "positions": [f"n1_c8to8_i1x1x{w}_k1x1x3_s1x1x2_p0x0x1_g2" for w in (1, 2, 31, 32, 33, 511, 512, 513, 1025)],
    "tiles of a block": ["n2_c4to4_i9x20x30_k3_p1_g4", "n1_c4to4_i1x1x8191_k1x1x3_p0x0x1_g2"],
    "rows": [f"n2_c4to4_i{d}x5x33_k3_s2_p1_op1_g4" for d in (3, 4, 5)],
    "runs": [f"n1_c4to4_i2x2x{w}_k1x1x3_s1x1x{s}_p0x0x1_g2" for w in (124, 125, 127, 128, 129, 256) for s in (1, 2, 3)],
    "rows without a gap": [f"n1_c4to4_i2x33x{w}_k1_g2" for w in (4, 5, 7, 8, 12)],
    "channels": [f"n1_c{2 * c}to{2 * o}_i2x3x5_k3_s2_p1_g2" for c, o in ((1, 1), (3, 7), (4, 8), (8, 8), (5, 9), (16, 16), (2, 15))],
    "taps along w": [f"n1_c4to4_i2x3x16_k3x3x{k}_s2x1x{s}_p1_g{g}" for k in (2, 3, 5, 7, 8, 9) for s in (1, 2) for g in (2, 4)],
    "pairs": [f"n1_c4to8_i2x5x{w}_k4_s1x1x{s}_p1x1x{p}_g4" for w in (8, 9) for s in (1, 2, 3, 4) for p in (0, 1, 2, 3)],
    "no tap": ["n1_c4to4_i3_k1_s2_g2_bias", "n1_c4to4_i3_k1x2x1_s3x4x4_g2_bias", "n1_c4to4_i4_k3_s2_d2_g2_bias"],
    "lcm(stride, dilation)": [f"n1_c4to4_i5x4x9_k3_s{s}_p2_d{d}_g2" for s, d in ((2, 3), (3, 2), (4, 2), (4, 3))],
}
WINDOW_TAILS = {
    "windows": [f"n1_c8to8_i2x3x{w}_k2x2x{k}_s1x1x{s}_p0x0x{p}_g2" for w in (8, 9) for k in (2, 5, 8) for s in (1, 2, 4) for p in (0, 1)],
    "quads of a warp": [f"n1_c8to8_i2x3x{w}_k3_s2_p1_g2" for w in (3, 4, 5, 8, 27, 28, 32, 60, 64)],
}
DEPTHWISE_TAILS = {
    "positions": [f"n1_c2to4_i1x1x{w}_k1x1x3_s1x1x{s}_p0x0x1_g2" for w in (1, 31, 32, 33, 127, 128, 129, 257) for s in (1, 2)],
    "runs": [f"n2_c3to3_i2x{h}x5_k3_s1x{s}x1_p1_g3" for h in (1, 3, 4, 5, 7, 8, 9) for s in (1, 2, 3, 4)],
    "rows": [f"n2_c3to3_i{d}x5x33_k3_s2_p1_op1_g3" for d in (3, 4, 5)],
    "channels of a block": [f"n1_c{c}to{c}_i2x3x5_k3_s2_p1_g{c}" for c in (2, 7, 8, 9, 17)],
    "multiplier": [f"n1_c3to{3 * m}_i2x3x5_k3_s2_p1_g3_bias" for m in (1, 2, 3, 4)],
    "taps along w": [f"n1_c2to2_i2x3x16_k3x3x{k}_s2x1x{s}_p1_g2" for k in (2, 3, 5, 7, 8, 9) for s in (1, 2)],
    "pairs": [f"n1_c2to2_i2x5x{w}_k4_s1x2x{s}_p1x1x{p}_g2" for w in (8, 9) for s in (1, 2, 3, 4) for p in (0, 1, 2, 3)],
    "no tap": ["n1_c2to2_i3_k1_s2_g2_bias", "n1_c2to2_i3_k1x2x1_s3x4x4_g2_bias", "n1_c2to2_i4_k3_s2_d2_g2_bias"],
    "lcm(stride, dilation)": [f"n1_c2to2_i5x4x9_k3_s{s}_p2_d{d}_g2" for s, d in ((2, 3), (3, 2), (4, 2), (4, 3))],
}
DIRECT_TAILS = {
    "regions beyond the input": ["n1_c2to2_i4x4x64_k2_s2_op1_g2", "n1_c2to2_i4x8x64_k2_s2_op1_g2", "n1_c2to2_i12x2x100_k2_s2_op1_g2"],
    "parts of the channels": [f"n1_c{c}to2_i3x4x5_k3_p1" for c in (2, 3, 5, 8, 9)],
}
# Positions, runs and tiles of a block; parts of the channels, and four of them at once; weights of more channels than a block has room for.
FEW_TAILS = {
    "positions": [f"n1_c8to2_i1x1x{w}_k1x1x3_s1x1x{s}_p0x0x1" for w in (1, 3, 4, 5, 127, 128, 129, 255, 512, 513) for s in (1, 2)],
    "runs": [f"n2_c4to3_i2x{h}x5_k3_s1x{s}x1_p1" for h in (1, 2, 3, 4, 5, 8, 9) for s in (1, 2, 3)],
    "rows": [f"n2_c3to2_i{d}x5x33_k3_s2_p1_op1" for d in (3, 4, 5)],
    "parts": [f"n1_c{c}to3_i2x3x8_k3_p1_bias" for c in (1, 3, 4, 7, 8, 12, 16, 20, 31, 32, 36, 63, 64, 100)],
    "output channels": [f"n1_c16to{c}_i2x3x8_k4_s2_p1_bias" for c in range(1, 8)],
    "chunks of channels": ["n1_c150to7_i1x2x4_k3_p1", "n1_c96to5_i2x3x4_k5x3x3_p1", "n1_c203to7_i1x2x4_k3_p1"],
    "taps along w": [f"n1_c8to2_i2x3x16_k3x3x{k}_s2x1x{s}_p1" for k in (2, 3, 5, 7, 8, 9) for s in (1, 2)],
    "vectors": [f"n1_c2to1_i2x5x{w}_k{k}_s1x1x{s}_p1x1x{p}" for w in (6, 8, 9) for k, s in ((3, 1), (4, 2)) for p in (0, 1, 2)],
    "tiles of a block": ["n1_c4to1_i40x50x64_k1x1x3_p0x0x1", "n1_c8to2_i30x40x33_k1x3x1"],
    "no tap": ["n1_c2to2_i3_k1_s2_bias", "n1_c4to4_i3_k1x2x1_s3x2x2_bias", "n1_c4to1_i4_k3_s2_d2_bias"],
    "lcm(stride, dilation)": [f"n1_c4to1_i5x4x9_k3_s{s}_p2_d{d}" for s, d in ((2, 3), (3, 2), (4, 2), (4, 3))],
    "groups": ["n2_c16to8_i2x3x8_k3_p1_g4_bias", "n1_c6to12_i2x3x4_k4_s2_p1_g3"],
}
PATCH_TAILS = {
    "voxels": [f"n1_c3to8_i1x1x{w}_k2_s2" for w in (1, 3, 4, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)],
    "columns": [f"n2_c3to{c}_i1x2x3_k1x2x2_s1x2x2" for c in (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 65)],
    "depth": [f"n1_c{c}to4_i2x3x4_k2_s2" for c in (1, 15, 16, 17, 31, 32, 33, 127, 128, 129, 257, 513)],
    "stride along w": [f"n1_c5to6_i2x3x{w}_k1x2x{k}_s1x2x{k}" for k in (1, 2, 3, 4) for w in (4, 6, 8)],
    "groups": ["n2_c6to8_i2x3x4_k2_s2_g2", "n1_c4to4_i2x2x8_k2_s2_g4_bias"],
}
TAILS = [
    (name, what, problem)
    for name, tails in (
        ("fprop_implicit_gemm_simt", SIMT_TAILS),
        ("fprop_flattened_simt", FLATTENED_TAILS),
        ("fprop_grouped", GROUPED_TAILS),
        ("fprop_window_mma", GROUPED_TAILS | WINDOW_TAILS | FEW_TAILS),
        ("fprop_depthwise", DEPTHWISE_TAILS),
        ("fprop_direct", DEPTHWISE_TAILS | FEW_TAILS | DIRECT_TAILS),
        ("fprop_toeplitz_mma", DEPTHWISE_TAILS | GROUPED_TAILS),
        ("fprop_grouped_channels_last", DEPTHWISE_TAILS | GROUPED_TAILS),
        ("fprop_few_outputs", FEW_TAILS),
        ("fprop_patch", PATCH_TAILS),
    )
    for what, problems_of in tails.items()
    for problem in problems_of
]


@pytest.mark.parametrize(("name", "what"), some(dict.fromkeys((name, what) for name, what, _ in TAILS)))
def test_tails(name: str, what: str, device: Backend) -> None:
    kernel, ran = kernels()[name], 0
    for dtype in ("fp32",) if "fp32" in kernel.dtypes else ("tf32", "bf16"):
        for problem in [Problem.parse(p) for n, w, p in TAILS if (n, w) == (name, what)]:
            if kernel.why_not(problem, dtype) is None:
                ran += 1
                for seed in (0, 5):  # contiguous tensors, then drawn layouts
                    outcome = verify(device, kernel, problem, dtype, "exact", seed)
                    assert outcome.ok, f"{name} {problem} {dtype} seed {seed}: {outcome.message}"
    assert ran > 0


@pytest.mark.parametrize("what", PATCH_TAILS)
@pytest.mark.parametrize(
    "tunables", [{"TILE": 1}, {"TILE": 2}, {"TILE": 2, "MEDIUM_PARTS": 4}, {"TILE": 3}, {"TILE": 3, "STAGES": 2}], ids=str
)
def test_patch_tails(tunables: dict[str, int], what: str, device: Backend) -> None:
    kernel = kernels()["fprop_patch"].replace_tunables(**tunables)
    for problem in PATCH_TAILS[what]:
        for seed in (0, 5):
            outcome = verify(device, kernel, Problem.parse(problem), "fp32", "exact", seed)
            assert outcome.ok, f"{problem} seed {seed}: {outcome.message}"


@pytest.mark.parametrize("what", some(["positions", "segments", "channels", "channels of pairs", "stages", "no tap"], 2))
@pytest.mark.parametrize(
    "tunables",
    [{"THREAD_QUADS": 1}, {"THREAD_QUADS": 2}, {"MOST_CHANNELS": 8, "BLOCK_WARPS": 8, "CHANNEL_WARPS": 4}, {"STAGES": 2}, {"STAGES": 6}],
    ids=str,
)
def test_flattened_tails(tunables: dict[str, int], what: str, device: Backend) -> None:
    kernel = kernels()["fprop_flattened_simt"].replace_tunables(**tunables)
    for problem in FLATTENED_TAILS[what]:
        for seed in (0, 5):
            outcome = verify(device, kernel, Problem.parse(problem), "fp32", "exact", seed)
            assert outcome.ok, f"{problem} seed {seed}: {outcome.message}"


# Enough channels that the ring goes round more than once, a first position that some classes have not, images that are no multiple of four.
FLATTENED = ["n1_c40to8_i3x6x20_k3_p1", "n4_c20to24_i5x4x7_k3_s2_p1_bias", "n6_c3to9_i4_k4_s2_p1", "n2_c30to3_i5_k3_s2_p1_d2_bias"]
FLATTENED_MISTAKES = {
    "copies not waited for": ("    mbarrier_wait(full, parity);\n", ""),
    "a stage filled again before it is read": ("    mbarrier_wait(full + static_cast<unsigned>(stages) * 8, (turn & 1u) ^ 1u);\n", ""),
    "a stage never given back": ("mbarrier_arrive(full + static_cast<unsigned>(stages) * 8);", "{\n    }"),
    "a stage given back once half of the lanes have read it": ("(stages + i) * 8, 32 * warps)", "(stages + i) * 8, 16 * warps)"),
    "weights announced without their bytes": (" + static_cast<unsigned>(channel_warps) * weight_bytes);", ");"),
    "the ring never turns": ("      parity ^= 1u;\n", ""),
    "packing not waited for": ("  if (thread == 0) wait_for_packing();\n", ""),
    "the input not waited for by who lays it out": ("  if (threadIdx.x == 0) wait_for_packing();", "  "),
    "the first stages asked for twice": ("copy_stage(number + ahead)", "copy_stage(number)"),
    "a row's operands in place of the next channel's": ("(turn ? next.channel : 0)", "0"),
    "planes of another part of the depth": ("reach_d + s / images * part_d", "reach_d + s / images"),
    "a class that begins one plane early": ("(d.start + d.first_cell) * plane", "d.first_cell * plane"),
    "a depth that taps do not reach": ("min(begin, tile.first_kd)", "max(begin, tile.first_kd)"),
    "images mixed": ("output.at(tile.n + s % images", "output.at(tile.n + s % 1"),
    "residues of w exchanged": ("(taps - 1 - k + lead) % 2", "(taps - k + lead) % 2"),
    "the ring overwritten before it is read": ("    __syncthreads();  // the ring has been read\n", ""),
    "the second of a pair past the row": ("live && (r == 0 || w + 1 < problem.output_size[2])", "live"),
    "residues of w exchanged where they are staged": ("sums[r * quads + q][s][c]", "sums[(1 - r) * quads + q][s][c]"),
    "channels stored past the last": ("stage, again % 32, 1, own_channels, last_c,", "stage, again % 32, 1, own_channels, ROOM,"),
    "channels stored as pieces that are none": ("channels_are_pieces(output, out_channels)", "true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", FLATTENED_MISTAKES)
def test_mistakes_in_what_is_flattened_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    tried = [(seed, problem) for problem in map(Problem.parse, FLATTENED) for seed in (0, 1, 5, 8)]
    assert_found(kernels()["fprop_flattened_simt"], *FLATTENED_MISTAKES[mistake], tried, CHANNEL_WARPS=1)


# Vectors of one to four channels, windows as a whole and row by row, with and without sums of several planes, runs of d, parts of the
# channels, tiles past the edge along h and w, outputs that no tap reaches.
TOGETHER = {
    "channels": [f"n2_c{c}to{c}_i3x4x5_k3_p1_g{c}_bias" for c in (2, 3, 4, 6, 8, 40, 66, 104)],
    "multiplier": [f"n1_c{c}to{c * m}_i2x3x5_k3_s2_p1_g{c}_bias" for c in (5, 8) for m in (2, 3, 4)],
    "rows and columns": [f"n1_c4to4_i2x{h}x{w}_k3_p1_g4" for h in (1, 2, 3, 9) for w in (1, 4, 5, 33)],
    "large kernels": [f"n1_c4to4_i4x7x9_k{k}_s{s}_p{k // 2}_g4" for k in (5, 7) for s in (1, 2, 3, 4)] + ["n1_c2to2_i5x9x9_k3x8x8_p2_g2"],
    "runs of d": [
        f"n1_c64to64_i{d}x2x3_k{k}x3x3_s{s}x1x1_p{p}x1x1_g64" for d in (3, 17) for k, s, p in ((1, 1, 0), (3, 1, 1), (4, 2, 3), (2, 3, 1))
    ],
    "no tap": ["n1_c2to2_i3_k1_s2_g2_bias", "n1_c4to4_i3_k1x2x1_s3x4x4_g4_bias", "n1_c4to4_i4_k3_s2_d2_g4_bias"],
    "dilation": [f"n1_c4to4_i6x5x9_k3_s{s}_p{p}_d{d}_g4" for s, d in ((1, 2), (2, 3), (3, 2), (4, 3)) for p in (0, 2)],
    "output padding": ["n2_c4to4_i3_k3_s2_p1_op1_g4", "n1_c4to4_i3_k2_s3_p1_op2_g4_bias"],
    "small groups": [
        f"n2_c{2 * c}to{2 * o}_i3x4x5_k3_s2_p1_g2_bias" for c, o in ((2, 1), (2, 2), (3, 3), (1, 5), (4, 8), (8, 6), (32, 32))
    ],
}


def together(kernel: Kernel, problem: Problem, dtype: type, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What a kernel makes, on the host, of small integers whose channels lie together, and what the reference makes of them."""
    generator = np.random.default_rng(seed)
    shapes = problem.shapes("fprop")[0]
    tensors = {n: generator.integers(-3, 4, shapes[n]).astype(dtype) for n in ("input", "weight", "bias") if n in shapes}
    tensors["input"] = np.moveaxis(np.ascontiguousarray(np.moveaxis(tensors["input"], 1, -1)), -1, 1)
    geometry = {n: getattr(problem, n) for n in ("stride", "padding", "output_padding", "groups", "dilation")}
    output = ct.conv_transpose3d(*tensors.values(), **geometry, algorithm=kernel, backend="host")
    assert output.strides[1] == output.itemsize or problem.out_channels == 1
    return output, reference.fprop(problem, **tensors)


@pytest.mark.parametrize("what", TOGETHER)
@pytest.mark.parametrize(
    "tunables",
    [{}, {"CHANNELS": 4}, {"SUMS": 96, "BLOCK_THREADS": 128}, {"CHANNELS": 4, "SUMS": 96, "AHEAD": 1, "BLOCKS": 16}],
    ids=str,
)
def test_depthwise_where_channels_lie_together(tunables: dict[str, int], what: str) -> None:
    kernel = kernels()["fprop_grouped_channels_last"].replace_tunables(**tunables)
    for number, problem in enumerate(map(Problem.parse, TOGETHER[what])):
        for dtype in (np.float32, np.float16):
            np.testing.assert_array_equal(*together(kernel, problem, dtype, number), f"{problem} {dtype.__name__}")


TOGETHER_MISTAKES = {
    "planes that do not move up": ("const int from = s + stride_d * plane;", "const int from = s;"),
    "a run that begins a plane late": ("max(0, own.begin - (kernel_d - 1)", "max(0, own.begin - (kernel_d - 2)"),
    "columns past the input": ("live && static_cast<unsigned>(place.w + column)", "live || static_cast<unsigned>(place.w + column)"),
    "a row of the window not loaded": ("row == a + th.run ||", "row == a + th.run + 1 ||"),
    "columns past the output": ("row >= rows || column >= columns", "row >= rows || column > columns"),
    "the next channels' weights": ("weights += own_channel", "weights += own_channel / 2"),
    "planes of another run": ("number * run_d;", "number * (run_d - 1);"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", TOGETHER_MISTAKES)
def test_mistakes_where_channels_lie_together_are_found(mistake: str) -> None:
    source = kernels()["fprop_grouped_channels_last"].source
    assert source.count(TOGETHER_MISTAKES[mistake][0]) == 1
    mistaken = Kernel.from_source(source.replace(*TOGETHER_MISTAKES[mistake]), "mistaken").replace_tunables(AHEAD=1)
    report = check(mistaken, backend="host", examples=40, dtypes=["fp32"], kinds=["exact"], seed=1)
    assert report.counterexample is not None


# Enough positions that a block has several tiles, channels that come in fours and such that do not, more of them than a stage has room for.
FEW = ["n1_c20to1_i33x40x64_k1x1x3_p0x0x1", "n1_c32to3_i3x5x8_k4_s2_p1_bias", "n2_c18to2_i3x4x12_k3_p1", "n1_c203to7_i1x2x4_k3_p1"]
FEW_MISTAKES = {
    "weights gathered before the last are read": ("        __syncthreads();  // the weights before have been read\n", ""),
    "weights read before they are there": ("gather_weights(first, count);\n        __syncthreads();", "gather_weights(first, count);"),
    "weights of the first channels for all": ("first_in + first + ci, co", "first_in + ci, co"),
    "sums staged before the last are read": ("      __syncthreads();  // what was staged before has been read\n", ""),
    "sums read before they are staged": ("sums[row * row_sums + s];\n      __syncthreads();", "sums[row * row_sums + s];"),
    "a part left out": ("for (int p = 0; p < all_parts; ++p)", "for (int p = 1; p < all_parts; ++p)"),
    "the next channel's inputs in place of this one's": ("x[i] = next[i]", "x[i] = next[(i + 1) % (rows * columns)]"),
    "columns past the row": ("inside = live && static_cast<unsigned>(w + j) < static_cast<unsigned>(width);", "inside = live;"),
    "tiles of the block beside it": ("stream * block_tiles, last", "stream * (block_tiles - 1), last"),
    "positions past the class": ("first.d < block.d.outputs ? ", "true ? "),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", FEW_MISTAKES)
def test_mistakes_with_few_outputs_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    tried = [(seed, problem) for problem in map(Problem.parse, FEW) for seed in (0, 1, 5)]
    assert_found(kernels()["fprop_few_outputs"], *FEW_MISTAKES[mistake], tried)


def test_vectors_that_begin_anywhere_are_found() -> None:
    """In a process of their own: a misaligned access ends it."""
    source = kernels()["fprop_few_outputs"].source
    right = "tw.run > 1 && problem.input_size[2] % tw.run == 0 && made_of_vectors(input, tw.run)"
    mistaken = Kernel.from_source(source.replace(right, "tw.run > 1"), "mistaken")
    report = check(mistaken, backend="host", problems=[Problem.parse(problem) for problem in FEW], kinds=["exact"], seed=1)
    assert report.counterexample is not None and "misaligned access" in report.counterexample.message


@pytest.mark.parametrize("tunables", [{"CHANNEL_PARTS": 16}, {"CHANNEL_PARTS": 1, "RUN_H": 4}, {"RUN_W": 2}, {"RUN_W": 1}], ids=str)
def test_few_outputs_in_other_runs_and_parts(tunables: dict[str, int], device: Backend) -> None:
    kernel = kernels()["fprop_few_outputs"].replace_tunables(**tunables)
    for what in ("positions", "parts", "vectors", "no tap"):
        for problem in FEW_TAILS[what]:
            for seed in (0, 5):
                outcome = verify(device, kernel, Problem.parse(problem), "fp32", "exact", seed)
                assert outcome.ok, f"{problem} seed {seed}: {outcome.message}"


def test_what_cannot_be_flattened_says_why() -> None:
    kernel = kernels()["fprop_flattened_simt"]
    for trial, problem, reason in (
        (kernel.replace_tunables(STAGES=9), Problem(1, 8, 8, (3, 3, 3), (3, 3, 3)), "barriers of eight stages"),
        (kernel, Problem(1, 8, 8, (1, 9, 9000), (1, 3, 3)), "must fit 220 KiB"),
    ):
        assert reason in (trial.why_not(problem, "fp32") or "")
    assert "not for sm_80" in (kernel.why_not(Problem(1, 8, 8, (3, 3, 3), (3, 3, 3)), "fp32", "sm_80") or "")


def test_what_is_flattened_has_no_more_zeros_than_its_taps_need() -> None:
    """Rows of 64 for three taps are 66 cells apart, two of them zeros for both neighbours; four images lie side by side."""
    for name, pitch, rows, images in (
        ("n8_c48to48_i64_k3", 66, 66, 4),
        ("n2_c48to48_i64_k3_p1", 65, 65, 2),
        ("n1_c8to8_i9x9x16_k3_s2_p1_op1", 17, 10, 1),
    ):
        problem = Problem.parse(name)
        plan = kernels()["fprop_flattened_simt"].plan(problem, "fp32", multiprocessors=132)
        planes = math.ceil(problem.output_size[0] / problem.stride[0] / (4 // images))
        cells = plan.workspace["input_cells"] // 4 // (problem.batch // images * problem.in_channels)
        run = 32 * 4 * 3  # positions of a block: its warps and their quads
        assert rows * pitch * planes <= cells < rows * pitch * (planes + 3) + run + 3 * pitch


def test_a_patch_tile_fills_the_gpu() -> None:
    """The largest tile of which each multiprocessor gets a few; the smaller ones where that is none."""
    for name, symbol, blocks in (
        ("n2_c64to32_i64_k2_s2", "128", 2048),
        ("n1_c320to320_i8x10x12_k2_s2", "64x64", 600),
        ("n1_c192to96_i12_k2_s2", "64x64", 324),
        ("n1_c384to192_i6_k2_s2", "32x32", 336),
        ("n1_c768to384_i3_k2_s2", "32x32", 96),
    ):
        (launch,) = kernels()["fprop_patch"].plan(Problem.parse(name), "fp32", multiprocessors=132).launches
        assert launch.symbol.endswith(f"_{symbol}") and launch.grid == (blocks, 1, 1)
        assert launch.shared_bytes <= 99 * 1024  # what sm_120 has


MANY_VOLUMES = Problem(65537, 1, 1, (1, 1, 1), (1, 1, 1), stride=(2, 1, 1), output_padding=(1, 0, 0))


@pytest.mark.parametrize("backend", [pytest.param("host", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", [name for name in kernels() if refused(name, MANY_VOLUMES, "fp32") is None])
def test_many_volumes(name: str, device: Backend) -> None:
    """More volumes than a grid's y and z can count; a check's far problems have the last blocks of such a grid."""
    outcome = verify(device, kernels()[name], MANY_VOLUMES, "fp32", "exact", seed=4)
    assert outcome.ok, outcome.message


# Many products in a sum: rows of 7 taps and of 8, with classes of w, and many channels.
LONG_SUMS = (
    *("n1_c32to16_i2x6x24_k3x5x7", "n1_c24to8_i2x5x24_k1x3x8", "n1_c32to8_i3x6x8_k3x5x7_s2_p1x2x3_op1_g4"),
    *("n1_c64to32_i2x2x8_k2_s2", "n1_c256to16_i2x2x8_k2_s2"),
)


@lru_cache
def root_mean_square_error(device: Backend, name: str, problem: Problem, dtype: str) -> float:
    got, right, _ = output(device, kernels()[name], problem, dtype, "random", 0)
    return float(np.sqrt(np.mean((got - right) ** 2)))


@pytest.mark.parametrize("name", some([name for name, kernel in kernels().items() if "tf32x3" in kernel.dtypes], 2))
def test_tf32x3_is_no_less_exact_than_fp32(name: str, device: Backend) -> None:
    """Tensor cores cut off what they add, so a kernel rounds the sums of a few products. fp32: one product after another."""
    done = 0
    for problem in map(Problem.parse, LONG_SUMS):
        if refused(name, problem, "tf32x3") or device.why_not(kernels()[name], problem, "tf32x3"):
            continue
        error = root_mean_square_error(device, name, problem, "tf32x3")
        fp32 = root_mean_square_error(device, "fprop_gather", problem, "fp32")
        assert 0 < error <= fp32, f"{problem}: {error} for {fp32}"
        done += 1
    assert done or device.name == "cuda"


@pytest.mark.parametrize("name", [name for name, kernel in kernels().items() if not kernel.deterministic])
def test_only_the_scatter_is_not_deterministic(name: str) -> None:
    assert name == "fprop_scatter"


def test_peers_names_parse() -> None:
    assert all(str(Problem.parse(name)) == name for name in PEERS.values())
