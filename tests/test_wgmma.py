"""The host's twins of Hopper's pipeline: what a wrong wait, parity, arrival or descriptor does on a GPU, it does here too."""

from __future__ import annotations

import numpy as np
import pytest

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.backends.nvrtc import _cuda_includes, device_source
from cupy_convt3d.choice import backend_for
from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.errors import LaunchError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.verify import verify
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels
from cupy_convt3d.source import Instance, include_directory

SMALL = {"CONSUMERS": 1, "PRODUCERS": 1, "TILES_M": 1}  # 256 threads
# Several tiles, planes and slabs: rings go round, blocks cut columns, the input is copied in bulk (planes of whole cells).
BUSY = Problem.parse("n2_c20to8_i5x8x12_k3_p1_bias")
PRODUCT = """/* convt3d
pass = "fprop"
dtypes = ["tf32", "bf16"]
[[launch]]
grid = 1
block = 128
*/
#define WGMMA_TILES 3
#include "convt3d.cuh"
#include "convt3d/wgmma.cuh"
constexpr int K = 32 / sizeof(scalar_t), CELL = 16 / sizeof(scalar_t);
// output[64][24] = input[64][K] * weight[24][K]
__global__ void product(const scalar_t* input, const scalar_t* weight, scalar_t* output) {
  __shared__ __align__(16) scalar_t a[2][70][CELL];
  __shared__ __align__(16) scalar_t b[2][24][CELL];
  for (int i = threadIdx.x; i < 64 * K; i += 128) a[i % K / CELL][i / K + 3][i % CELL] = input[i];
  for (int i = threadIdx.x; i < 24 * K; i += 128) b[i % K / CELL][i / K][i % CELL] = weight[i];
  fence_async();
  __syncthreads();
  float d[12];
  for (int i = 0; i < 12; ++i) d[i] = 0.0f;
  wgmma_fence();
  wgmma(d, wgmma_operand(shared_address(a), sizeof a[0]) + 3, wgmma_operand(shared_address(b), sizeof b[0]), 1, 24);
  wgmma_commit();
  wgmma_wait<0>();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < 12; ++i) output[(row + i % 4 / 2 * 8) * 24 + i / 4 * 8 + lane % 4 * 2 + i % 2] = to_scalar(d[i]);
}
"""

# The same with B as it lies in memory, [K][24], and A as [K][64] or [64][K]; rows and cores lie apart by odd numbers of cells.
N_MAJOR = """/* convt3d
pass = "fprop"
dtypes = ["bf16", "fp16"]
[[launch]]
grid = 1
block = 128
*/
#define WGMMA_TILES 3
#include "convt3d.cuh"
#include "convt3d/wgmma.cuh"
// output[64][24] = input[64][16] * weight[24][16]
__global__ void product(const scalar_t* input, const scalar_t* weight, scalar_t* output) {
  __shared__ __align__(16) scalar_t a[8][19][8];  // M-major: [row / 8][k][row % 8], the second eight k a cell further
  __shared__ __align__(16) scalar_t k_major[2][67][8];  // [k / 8][row][k % 8]
  __shared__ __align__(16) scalar_t b[3][17][8];
  for (int i = threadIdx.x; i < 64 * 16; i += 128) {
    const int row = i / 16, k = i % 16;
    a[row / 8][k + k / 8][row % 8] = k_major[k / 8][row][k % 8] = input[i];
  }
  for (int i = threadIdx.x; i < 24 * 16; i += 128) b[i / 16 / 8][i % 16][i / 16 % 8] = weight[i];
  fence_async();
  __syncthreads();
  float d[12];
  for (int i = 0; i < 12; ++i) d[i] = 0.0f;
  const unsigned long long columns = wgmma_descriptor(shared_address(b), 128, sizeof b[0]);
  wgmma_fence();
  if (M_MAJOR) {
    wgmma_n_major<true>(d, wgmma_descriptor(shared_address(a), 144, sizeof a[0]), columns, 1, 24);
  } else {
    wgmma_n_major<false>(d, wgmma_descriptor(shared_address(k_major), sizeof k_major[0], 128), columns, 1, 24);
  }
  wgmma_commit();
  wgmma_wait<0>();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < 12; ++i) output[(row + i % 4 / 2 * 8) * 24 + i / 4 * 8 + lane % 4 * 2 + i % 2] = to_scalar(d[i]);
}
"""


def product(source: str, dtype: str) -> bool:
    """Whether the product of small integers comes out right."""
    kernel = Kernel.from_source(source, "product")
    k = 8 if dtype == "tf32" else 16
    generator = np.random.default_rng(1)
    a, b = (generator.integers(-8, 9, (rows, k)) for rows in (64, 24))
    element = DTYPES[dtype].numpy
    arrays = {"input": a.astype(element), "weight": b.astype(element), "output": np.zeros((64, 24), element)}
    refs = {name: TensorRef(array.__array_interface__["data"][0], (array.size,), (1,)) for name, array in arrays.items()}
    run(HostBackend(), kernel, Problem(1, 1, 1, (1, 1, 1), (1, 1, 1)), dtype, refs, lambda name, size: 0)
    return bool((arrays["output"] == (a @ b.T).astype(element)).all())


@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_product_reads_descriptors_and_places_fragments(dtype: str) -> None:
    assert product(PRODUCT, dtype)
    assert not product(PRODUCT.replace("+ 3, wgmma_operand", "+ 2, wgmma_operand"), dtype), "another start address, other rows"
    assert not product(PRODUCT.replace("  wgmma_wait<0>();\n", ""), dtype), "sums arrive with the wait"
    assert not product(PRODUCT.replace("  wgmma_commit();\n", ""), dtype), "and only those of committed groups"


@pytest.mark.parametrize("m_major", ["true", "false"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_transposed_operands(dtype: str, m_major: str) -> None:
    source = N_MAJOR.replace("M_MAJOR", m_major)
    assert product(source, dtype)
    assert not product(source.replace("128, sizeof b[0])", "sizeof b[0], 128)"), dtype), "the steps along K and N are not exchanged"
    assert not product(source.replace("wgmma_n_major<true>", "wgmma_n_major<false>"), dtype) or m_major == "false"
    assert not product(source.replace("144, sizeof a[0]", "128, sizeof a[0]"), dtype) or m_major == "false"


def test_lanes_meet_at_a_wait() -> None:
    with pytest.raises(LaunchError, match=r"divergent warp|deadlock"):
        product(PRODUCT.replace("  wgmma_wait<0>();\n", "  if (threadIdx.x != 5) wgmma_wait<0>();\n  else __syncwarp();\n"), "tf32")


def test_tf32_operands_lose_their_low_bits() -> None:
    kernel = kernels()["fprop_rolling_wgmma"]
    unrounded = kernel.source.replace("high.words[v] = round_to_tf32(values[v]);", "high.words[v] = __float_as_uint(values[v]);")
    assert unrounded != kernel.source
    trial = Kernel.from_source(unrounded, "unrounded").replace_tunables(**SMALL)
    outcome = verify(HostBackend(), trial, Problem.parse("n2_c1to1_i8_k1"), "tf32", "random", 0)
    assert not outcome.ok and "beyond its bound" in outcome.message, "cut off, not rounded"


@pytest.mark.parametrize("dtype", kernels()["fprop_rolling_wgmma"].dtypes)
@pytest.mark.parametrize("kind", ["exact", "random"])
def test_small_instance(dtype: str, kind: str) -> None:
    kernel = kernels()["fprop_rolling_wgmma"].replace_tunables(**SMALL)
    for name in (str(BUSY), "n2_c20to17_i4x5x6_k4_s2_p1", "n1_c8to8_i6_k3_s2_p1_d2_bias", "n3_c4to6_i3x4x5_k2_s2_g2"):
        outcome = verify(HostBackend(), kernel, Problem.parse(name), dtype, kind, seed=0)
        assert outcome.ok, f"{name}: {outcome.message}"


MISTAKES = {
    "stage never announced": ("                mbarrier_arrive(stage.full());\n", ""),
    "stage never given back": ("          mbarrier_arrive(read_stage);\n", ""),
    "slab given back before it is read": ("                wgmma_wait<1>();\n", ""),
    "slab announced without its bytes": (
        "mbarrier_arrive_expect(slab.full(), static_cast<unsigned>(slab_bytes))",
        "mbarrier_arrive(slab.full())",
    ),
    "loader does not wait for an empty stage": ("mbarrier_wait_patiently(stage.empty(), stage.parity ^ 1u);", ""),
    "consumer does not wait for its stage": ("          mbarrier_wait(stage.full(), stage.parity);\n", ""),
    "wrong parity": ("mbarrier_wait(stage.full(), stage.parity)", "mbarrier_wait(stage.full(), stage.parity ^ 1u)"),
    "sums touched before they are there": ("        fresh = false;\n        wgmma_wait<0>();\n", "        fresh = false;\n"),
    "raw copy never given back": ("                if (kind == RAW_COPY) mbarrier_arrive(raw.empty());\n", ""),
    "tap offset": ("a -= static_cast<unsigned>(taps_w.offset_step)", "a += static_cast<unsigned>(taps_w.offset_step)"),
    "cut column starts cold": ("segment.first = segment.begin > warm_up ? segment.begin - warm_up : 0;", "segment.first = segment.begin;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_pipeline_are_found(mistake: str) -> None:
    right, wrong = MISTAKES[mistake]
    kernel = kernels()["fprop_rolling_wgmma"]
    assert kernel.source.count(right) == 1
    trial = Kernel.from_source(kernel.source.replace(right, wrong), "mistaken").replace_tunables(**SMALL)
    found = []
    for seed in range(4):
        try:
            outcome = verify(HostBackend(), trial, BUSY, "tf32", "exact", seed)
            found += [] if outcome.ok else [outcome.message]
        except LaunchError as error:
            found.append(str(error))
    assert found, mistake


@pytest.mark.parametrize("dtype", kernels()["fprop_rolling_wgmma"].dtypes)
def test_every_fence_is_in_the_binary(dtype: str) -> None:
    """A compiler once left one out of the three ways to read the input, which no host can notice: it races on a GPU only."""
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    kernel = kernels()["fprop_rolling_wgmma"]
    problem = Problem(2, 32, 32, (8, 16, 32), (3, 3, 3))
    instance = Instance(kernel, dtype, kernel.plan(problem, dtype).specialization)
    try:
        program = nvrtc.createProgram(device_source(instance), "kernel.cu", (), ())
    except Exception as error:
        pytest.skip(f"NVRTC is not there: {error}")
    defines = [f"-D{define}" for define in instance.defines]
    nvrtc.compileProgram(program, ("-arch=compute_90a", "--std=c++17", f"-I{include_directory()}", *_cuda_includes(), *defines,
                                   "--device-as-default-execution-space"))
    ptx = nvrtc.getPTX(program)
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert text.count("fence.proxy.async") == 3


# One and two of each tile's voxels (64, 128, 256), columns (64, 128, 256) and channels, each with its neighbours.
PATCHES = {
    "voxels": [f"n1_c3to8_i1x1x{w}_k2_s2" for w in (15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)],
    "columns": [f"n1_c3to{c}_i1x2x3_k1x2x2_s1x2x2_bias" for c in (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)],
    "depth": [f"n1_c{c}to4_i1x2x4_k2_s2" for c in (1, 15, 16, 17, 48, 49, 63, 64, 65, 80, 128, 129)],
    "stages": ["n1_c300to33_i3x8x8_k2_s2_bias", "n2_c200to64_i3x7x8_k1x2x2_s1x2x2"],
    "stride along w": [f"n1_c5to6_i1x3x{w}_k1x2x{k}_s1x2x{k}_bias" for k in (1, 2, 3, 4) for w in (4, 7)],
    "cells across rows": ["n2_c16to16_i2x2x6_k2_s2_bias", "n2_c8to16_i8x3x3_k2_s2"],
    "groups": ["n2_c6to8_i2x3x4_k2_s2_g2", "n1_c32to64_i2x2x8_k2_s2_g2_bias"],
    "no voxels": ["n0_c8to8_i2x2x8_k2_s2"],
}


@pytest.mark.parametrize("what", PATCHES)
@pytest.mark.parametrize("tile", [1, 2, 3, 4, 5])
def test_patch_tails(tile: int, what: str, backend: str) -> None:
    kernel = kernels()["fprop_patch_wgmma"].replace_tunables(TILE=tile)
    for problem in PATCHES[what]:
        for seed, dtype in ((0, "bf16"), (2, "fp16"), (5, "bf16")):  # contiguous tensors, then drawn layouts
            outcome = verify(backend_for(backend), kernel, Problem.parse(problem), dtype, "exact", seed)
            assert outcome.ok, f"{problem} {dtype} seed {seed}: {outcome.message}"


@pytest.mark.parametrize("ring", [3, 6])
def test_patch_rings(ring: int, backend: str) -> None:
    kernel = kernels()["fprop_patch_wgmma"].replace_tunables(RING=ring, TILE=3)
    for problem in ("n2_c300to32_i4x8x12_k2_s2_bias", "n1_c16to48_i4x8x10_k2_s2"):
        outcome = verify(backend_for(backend), kernel, Problem.parse(problem), "bf16", "random", seed=0)
        assert outcome.ok, f"{problem}: {outcome.message}"


def test_a_patch_tile_fills_the_gpu() -> None:
    """The largest tile of which each multiprocessor gets one, as many stages as its channels and the shared memory want."""
    kernel = kernels()["fprop_patch_wgmma"]
    for name, tile_voxels, tile_columns, blocks, depth in (
        ("n2_c64to32_i64_k2_s2", 128, 256, 132, 64),
        ("n2_c320to160_i16_k2_s2", 128, 256, 132, 64),
        ("n1_c96to48_i24_k2_s2", 256, 128, 132, 48),
        ("n1_c320to320_i8x10x12_k2_s2", 128, 128, 132, 64),
        ("n1_c384to192_i6_k2_s2", 64, 128, 48, 64),
        ("n1_c32to8_i64_k2_s2", 128, 64, 264, 32),
    ):
        plan = kernel.plan(Problem.parse(name), "bf16", multiprocessors=132)
        made = dict(plan.specialization)
        assert (made["CONSUMERS"] * made["M_TILES"] * 64, made["WGMMA_TILES"] * 8) == (tile_voxels, tile_columns), name
        assert plan.launches[0].grid == (blocks, 1, 1) and made["DEPTH"] == depth and made["STAGES"] >= 3, name
        assert plan.launches[0].shared_bytes * made["BLOCKS"] <= (228 - made["BLOCKS"]) * 1024, name


MANY_STAGES, CHANNELS_LAST = "n2_c300to32_i4x8x12_k2_s2_bias", "n1_c16to8_i2x2x8_k2_s2_bias"
PATCH_MISTAKES = {  # and problems and seeds whose layouts take that way: 13 draws channels_last for all tensors
    "channels copied": ("inputs + table[v] + cell * 8", "inputs + table[v]", CHANNELS_LAST, (1, 13)),
    "channels stored": ("column_offset(first + eight * 8, output)", "column_offset(first, output)", CHANNELS_LAST, (13,)),
    "channels' bias": ("while (channel >= out_channels) channel -= out_channels;", "", CHANNELS_LAST, (6, 13)),
    "cores of channels": ("2 * row_cells", "row_cells", "n1_c64to32_i4x8x8_k2_s2_bias", (1,)),
    "rows stored": ("column_offset(first + pair * 2, output)) = cell", "column_offset(first, output)) = cell", MANY_STAGES, (0,)),
    "announced early": ("if (++pending > lag) {", "if (++pending > lag - 1) {", MANY_STAGES, (1, 2)),
    "filled too early": ("      mbarrier_wait(slot.empty(), slot.parity ^ 1u);\n", "", MANY_STAGES, (0,)),
    "read before it is full": ("      mbarrier_wait(slot.full(), slot.parity);\n", "", MANY_STAGES, (0,)),
    "table not written": ("    mbarrier_wait(base + 128, round);\n", "", MANY_STAGES, (0,)),
    "released while it is read": ("      wgmma_wait<1>();\n", "", MANY_STAGES, (0,)),
    "words overwritten": ("      __syncwarp();  // the words before these have been stored\n", "", MANY_STAGES, (0,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PATCH_MISTAKES)
def test_mistakes_in_patches_are_found(mistake: str) -> None:
    right, wrong, problem, seeds = PATCH_MISTAKES[mistake]
    kernel = kernels()["fprop_patch_wgmma"]
    assert kernel.source.count(right) == 1
    trial = Kernel.from_source(kernel.source.replace(right, wrong), "mistaken")
    found = []
    for seed in seeds:
        try:
            outcome = verify(HostBackend(), trial, Problem.parse(problem), "bf16", "exact", seed)
            found += [] if outcome.ok else [outcome.message]
        except LaunchError as error:
            found.append(str(error))
    assert found, mistake
