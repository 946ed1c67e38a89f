"""mma.sync, ldmatrix and cp.async: the same kernels on both backends against NumPy, and on the host what misuse is told as."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from selection import in_turn

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.choice import backend_for
from cupy_convt3d.errors import LaunchError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.run.verify import verify
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels

Array = np.ndarray[Any, np.dtype[Any]]
HEADER = """/* convt3d
pass = "fprop"
[[launch]]
grid = 1
block = {block}
*/
#include "convt3d.cuh"
#include "convt3d/ptx/mma.cuh"
extern "C" __global__ void trial(const float* input, float* output) {{
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
{body}
}}
"""


def launch(backend: str, body: str, values: Array, outputs: int, block: int = 32, seed: int = 0) -> Array:
    """Run a body over the words of `values`; return `outputs` words, NaN where nothing was written."""
    written = np.full(outputs, np.nan, np.float32)
    arrays: dict[str, Any] = {"input": np.ascontiguousarray(values).view(np.float32).ravel(), "output": written}
    if backend == "cuda":
        import cupy

        arrays = {name: cupy.asarray(array) for name, array in arrays.items()}
    pointers = {name: array.data.ptr if backend == "cuda" else array.ctypes.data for name, array in arrays.items()}
    tensors = {name: TensorRef(pointers[name], array.shape, (1,)) for name, array in arrays.items()}
    kernel = Kernel.from_source(HEADER.format(block=block, body=body), "trial")
    run(backend_for(backend), kernel, Problem(1, 1, 1, 4, 1), "fp32", tensors, lambda name, size: 0, seed=seed)
    return np.asarray(arrays["output"].get() if backend == "cuda" else written)


# Both operands lie in `input` as 16-byte cells: A as [2][16 rows], B as [2][8 columns], each cell half of a row's depth.
PRODUCT = """
  __shared__ uint4 cells[48];
  for (int i = lane; i < 48; i += 32) cells[i] = reinterpret_cast<const uint4*>(input)[i];
  __syncwarp();
  unsigned a[4], b[2];
  LOAD
  float c[4];
  for (int r = 0; r < 4; ++r) c[r] = 100.0f * (lane / 4 + 8 * (r / 2)) + (2 * (lane % 4) + r % 2);
  MULTIPLY(c, a, b[0], b[1]);
  for (int r = 0; r < 4; ++r) output[(lane / 4 + 8 * (r / 2)) * 8 + 2 * (lane % 4) + r % 2] = c[r];"""
LOADS = {
    "ldmatrix": """
  ldmatrix_x4(a, shared_address(cells + lane / 16 * 16 + lane % 16));
  ldmatrix_x2(b, shared_address(cells + 32 + lane / 8 % 2 * 8 + lane % 8));""",
    "by the layout": """
  const unsigned* words = reinterpret_cast<const unsigned*>(cells);
  for (int r = 0; r < 4; ++r) a[r] = words[(r / 2 * 16 + lane / 4 + 8 * (r % 2)) * 4 + lane % 4];
  for (int r = 0; r < 2; ++r) b[r] = words[(32 + r * 8 + lane / 4) * 4 + lane % 4];""",
}
TRANSPOSED = """
  unsigned short* a_rows = reinterpret_cast<unsigned short*>(storage);  // [depth][row of A], [depth][column of B]
  unsigned short* b_rows = a_rows + 16 * 24;
  const unsigned short* halves = reinterpret_cast<const unsigned short*>(input);
  for (int i = lane; i < 256; i += 32) a_rows[i % 8 * 24 + i / 128 * 192 + i / 8 % 16] = halves[i];
  for (int i = lane; i < 128; i += 32) b_rows[i % 8 * 8 + i / 64 * 64 + i / 8 % 8] = halves[256 + i];
  __syncwarp();
  unsigned b_and_more[4];
  ldmatrix_x4_transposed(a, shared_address(a_rows + (lane / 16 * 8 + lane % 8) * 24 + lane / 8 % 2 * 8));
  ldmatrix_x4_transposed(b_and_more, shared_address(b_rows + lane % 16 * 8));
  b[0] = b_and_more[0];
  b[1] = b_and_more[1];"""
TYPES = {"mma_tf32": np.dtype(np.float32), "mma_bf16": np.dtype(ml_dtypes.bfloat16), "mma_fp16": np.dtype(np.float16)}


def product_cells(a: Array, b: Array) -> Array:
    half = a.shape[1] // 2
    parts = [m[:, k : k + half] for m in (a, b.T) for k in (0, half)]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts])


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", TYPES)
def test_product(name: str, load: str, backend: str) -> None:
    depth = 32 // TYPES[name].itemsize
    generator = np.random.default_rng(1)
    a = generator.integers(-8, 9, (16, depth)).astype(TYPES[name])
    b = generator.integers(-8, 9, (depth, 8)).astype(TYPES[name])
    body = PRODUCT.replace("LOAD", LOADS[load]).replace("MULTIPLY", name)
    got = launch(backend, body, product_cells(a, b), 128).reshape(16, 8)
    start = 100 * np.arange(16)[:, None] + np.arange(8)
    np.testing.assert_array_equal(got, start + a.astype(np.float64) @ b.astype(np.float64))


@pytest.mark.parametrize("name", ["mma_bf16", "mma_fp16"])
def test_transposed_product(name: str, backend: str) -> None:
    generator = np.random.default_rng(3)
    a = generator.integers(-8, 9, (16, 16)).astype(TYPES[name])
    b = generator.integers(-8, 9, (16, 8)).astype(TYPES[name])
    body = "  __shared__ uint4 storage[64];" + PRODUCT.replace("LOAD", TRANSPOSED).replace("MULTIPLY", name)
    got = launch(backend, body, product_cells(a, b), 128).reshape(16, 8)
    start = 100 * np.arange(16)[:, None] + np.arange(8)
    np.testing.assert_array_equal(got, start + a.astype(np.float64) @ b.astype(np.float64))


def test_transposed_pairs(backend: str) -> None:
    """A lane has a pair of a row of 8 x 8 elements of 16 bits, and gets two of a column."""
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8) * 257 + 1
    body = "  reinterpret_cast<unsigned*>(output)[lane] = transposed_matrix(reinterpret_cast<const unsigned*>(input)[lane]);"
    got = launch(backend, body, matrix.view(np.float32).ravel(), 32)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(8, 8), matrix.T)


def test_tf32_ignores_low_bits(backend: str) -> None:
    a, b = np.zeros((16, 8), np.uint32), np.zeros((8, 8), np.float32)
    a[:, 0] = np.float32(1.0).view(np.uint32) + 0x1FFF
    b[0] = 1
    body = PRODUCT.replace("LOAD", LOADS["ldmatrix"]).replace("MULTIPLY", "mma_tf32").replace("100.0f * (lane", "0.0f * (lane")
    body = body.replace("+ (2 * (lane % 4) + r % 2);", ";")
    np.testing.assert_array_equal(launch(backend, body, product_cells(a.view(np.float32), b), 128), 1.0)


def test_sums_are_cut_off(backend: str) -> None:
    """1 + 0.75 ulp stays 1: the tensor cores do not round what they add."""
    a, b = np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32)
    a[:, 0], a[:, 1], b[:2] = 1, 0.75 * 2.0**-23, 1
    body = PRODUCT.replace("LOAD", LOADS["ldmatrix"]).replace("MULTIPLY", "mma_tf32").replace("100.0f * (lane", "0.0f * (lane")
    body = body.replace("+ (2 * (lane % 4) + r % 2);", ";")
    np.testing.assert_array_equal(launch(backend, body, product_cells(a, b), 128), 1.0)


def test_round_to_tf32(backend: str) -> None:
    values = np.random.default_rng(2).standard_normal(28).astype(np.float32)
    values = np.concatenate([values, np.float32([0, -np.inf, 2.0**100]), np.uint32([0x3F801000]).view(np.float32)])
    got = launch(backend, "  output[lane] = __uint_as_float(round_to_tf32(input[lane]));", values, 32)
    bits = values.view(np.uint32)
    nearest = np.where(np.isfinite(values), (bits + 0x1000) & 0xFFFFE000, bits).astype(np.uint32)  # a tie goes away from 0
    np.testing.assert_array_equal(got.view(np.uint32) & 0xFFFFE000, nearest)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_copy(size: int, backend: str) -> None:
    """Each thread copies `size` bytes, of which the first thread takes none and the second half, and reads its neighbour's."""
    words = size // 4
    body = f"""
  __shared__ uint4 storage[64];
  float* target = reinterpret_cast<float*>(storage);
  const int taken = thread == 0 ? 0 : thread == 1 ? {size // 2} : {size};
  cp_async<{size}>(shared_address(target + thread * {words}), input + thread * {words}, taken);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  for (int i = 0; i < {words}; ++i) output[thread * {words} + i] = target[(63 - thread) * {words} + i];"""
    values = np.arange(1, 64 * words + 1, dtype=np.float32)
    expected = values.copy()
    expected[:words] = 0
    expected[words + words // 2 : 2 * words] = 0
    if size == 4:
        expected[1] = np.frombuffer(values[1:2].tobytes()[:2] + b"\0\0", np.float32)[0]
    got = launch(backend, body, values, 64 * words, block=64, seed=5)
    np.testing.assert_array_equal(got, expected.reshape(64, words)[::-1].ravel())


RING = """
  __shared__ float ring[3][32];
  for (int i = 0; i < 2; ++i) {
    cp_async<4>(shared_address(&ring[i][lane]), input + 32 * i + lane);
    cp_async_commit();
  }
  for (int i = 0; i < 6; ++i) {
    cp_async_wait<1>();
    __syncthreads();
    if (i < 4) cp_async<4>(shared_address(&ring[(i + 2) % 3][lane]), input + 32 * (i + 2) + lane);
    cp_async_commit();
    output[32 * i + lane] = ring[i % 3][31 - lane];
  }"""
BROKEN = {
    "no wait": ("    cp_async_wait<1>();\n", ""),
    "waits for one group too few": ("cp_async_wait<1>", "cp_async_wait<2>"),
    "no barrier": ("    __syncthreads();\n", ""),
    "no commit": ("    cp_async_commit();\n    output", "    output"),
    "fills what is being read": ("ring[(i + 2) % 3]", "ring[i % 3]"),
}


@pytest.mark.parametrize("seed", range(4))
def test_ring(seed: int, backend: str) -> None:
    values = np.arange(192, dtype=np.float32)
    np.testing.assert_array_equal(launch(backend, RING, values, 192, seed=seed), values.reshape(6, 32)[:, ::-1].ravel())


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_ring_shows(case: str) -> None:
    before, after = BROKEN[case]
    assert before in RING
    values = np.arange(192, dtype=np.float32)
    got = launch("host", RING.replace(before, after), values, 192)
    assert not np.array_equal(got, values.reshape(6, 32)[:, ::-1].ravel())


def test_what_a_block_leaves_behind_never_lands() -> None:
    body = "  __shared__ float kept[32];\n  cp_async<4>(shared_address(kept + lane), input + lane);\n  cp_async_commit();"
    launch("host", body, np.zeros(32, np.float32), 32)
    body = "  __shared__ float kept[32];\n  cp_async_wait<0>();\n  output[lane] = kept[lane];"
    assert np.isnan(launch("host", body, np.zeros(32, np.float32), 32)).all()


ZEROS = "  unsigned a[4] = {}; float c[4] = {};\n"
MISUSE = {
    "divergent warp": f"{ZEROS}  if (lane < 16)\n    mma_tf32(c, a, 0, 0);\n  else\n    mma_tf32(c, a, 0, 0);",
    "needs all 32 lanes": f"{ZEROS}  if (lane == 7) return;\n  mma_tf32(c, a, 0, 0);",
    "no multiple of 16": "  __shared__ float s[64]; unsigned a[4];\n  ldmatrix_x4(a, shared_address(s + lane));",
    "no multiple of the size": "  __shared__ float s[64];\n  cp_async<8>(shared_address(s + lane), input);",
    "not in shared memory": "  float s = 0;\n  cp_async<4>(shared_address(&s), input);",
    "reads more than it writes": "  __shared__ float s[32];\n  cp_async<4>(shared_address(s + lane), input, 8);",
}


@pytest.mark.parametrize("words", MISUSE)
def test_misuse_is_told(words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        launch("host", MISUSE[words], np.zeros(64, np.float32), 1)


def test_a_block_of_less_than_a_warp() -> None:
    with pytest.raises(LaunchError, match="needs all 32 lanes"):
        launch("host", f"{ZEROS}  mma_bf16(c, a, 0, 0);", np.zeros(1, np.float32), 1, block=16)


@pytest.mark.parametrize("dtype", ["tf32", "tf32x3", "bf16"])
@pytest.mark.parametrize("voxels", [127, 128, 129, 255, 256, 257, 511, 512, 513])
def test_tile_tails(voxels: int, dtype: str, backend: str) -> None:
    for channels in (8, 9, 31, 33, 48, 49, 65):
        problem = Problem(1, 9, channels, (1, 1, voxels), (1, 1, 1))
        outcome = verify(backend_for(backend), kernels()["fprop_implicit_gemm_mma"], problem, dtype, "exact", seed=channels)
        assert outcome.ok, f"{problem}: {outcome.message}"


@pytest.mark.parametrize("name", ["n1_c9to5_i3x6x7_k2x3x3_bias", "n2_c4to6_i4x5x6_k3x4x3_s2_p1_g2", "n1_c20to8_i3x5x6_k3_p2_d2"])
def test_rows_outside_the_run(name: str, backend: str) -> None:
    """With a halo too long for shared memory each row of taps stages inputs of its own."""
    kernel = kernels()["fprop_implicit_gemm_mma"].replace_tunables(MAX_HALO=4)
    outcome = verify(backend_for(backend), kernel, Problem.parse(name), "tf32", "exact", seed=3)
    assert outcome.ok, outcome.message


def test_a_row_too_long_is_refused() -> None:
    problem = Problem(1, 1, 1, (1, 1, 3), (1, 1, 2), dilation=(1, 1, 400))
    assert "reach further" in (kernels()["fprop_implicit_gemm_mma"].why_not(problem, "tf32") or "")


# One and two of each tile's voxels (256 to 32), columns and staged channels, each with its neighbours.
PATCHES = {
    "voxels": [f"n1_c3to8_i1x1x{w}_k2_s2" for w in (31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)],
    "columns": [f"n1_c3to{c}_i1x2x3_k1x2x2_s1x2x2" for c in (1, 7, 8, 9, 15, 16, 17, 31, 32, 33)],
    "depth": [f"n1_c{c}to4_i1x2x4_k2_s2" for c in (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)],
    "stride along w": [f"n1_c5to6_i1x3x{w}_k1x2x{k}_s1x2x{k}_bias" for k in (1, 2, 3, 4, 8) for w in (4, 6, 8)],
    "whole vectors": ["n2_c16to32_i2x4x8_k2_s2_bias", "n1_c24to24_i3x5x8_k2x2x1_s2x2x1", "n1_c16to16_i1x8x8_k2x4x4_s2x4x4"],
    "vectors across rows": ["n2_c16to16_i2x2x6_k2_s2", "n2_c8to16_i8x3x3_k2_s2"],
    "groups": ["n2_c6to8_i2x3x4_k2_s2_g2", "n1_c32to64_i2x2x8_k2_s2_g2_bias"],
}


@pytest.mark.parametrize(("dtype", "tile"), in_turn(("tf32", "tf32x3", "bf16"), (1, 2, 3, 4, 5)))
@pytest.mark.parametrize("what", PATCHES)
def test_patch_tails(what: str, dtype: str, tile: int, backend: str) -> None:
    kernel = kernels()["fprop_patch_mma"].replace_tunables(TILE=tile)
    for problem in PATCHES[what]:
        for seed in (0, 2, 5, 7):  # contiguous tensors, then drawn layouts
            outcome = verify(backend_for(backend), kernel, Problem.parse(problem), dtype, "exact", seed)
            assert outcome.ok, f"{problem} seed {seed}: {outcome.message}"


PATCH_TUNABLES = [{"WIDE_WARPS": 1, "TILE": 1}, {"STAGES": 2}, {"STAGES": 3, "STAGE_STEPS": 4}]


@pytest.mark.parametrize(("tunables", "dtype"), in_turn(PATCH_TUNABLES, kernels()["fprop_patch_mma"].dtypes))
def test_patch_configurations(tunables: dict[str, int], dtype: str, backend: str) -> None:
    kernel = kernels()["fprop_patch_mma"].replace_tunables(**tunables)
    for problem in ("n2_c16to32_i2x4x8_k2_s2_bias", "n1_c257to9_i1x3x5_k1x2x3_s1x2x3"):
        outcome = verify(backend_for(backend), kernel, Problem.parse(problem), dtype, "random", seed=0)
        assert outcome.ok, f"{problem}: {outcome.message}"


@pytest.mark.parametrize("tunables", [{"VOXELS": 16, "COLUMNS": 32}, {"VOXELS": 32, "COLUMNS": 64}, {"VOXELS": 32}])
@pytest.mark.parametrize("what", PATCHES)
def test_stationary_tails(what: str, tunables: dict[str, int], backend: str) -> None:
    kernel = kernels()["fprop_patch_stationary"].replace_tunables(**tunables)
    for dtype in ("tf32", "tf32x3", "bf16"):
        for problem in map(Problem.parse, PATCHES[what]):
            if kernel.why_not(problem, dtype) is not None:
                continue
            for seed in (0, 2, 5, 7):  # contiguous tensors, then drawn layouts
                outcome = verify(backend_for(backend), kernel, problem, dtype, "exact", seed)
                assert outcome.ok, f"{problem} {dtype} seed {seed}: {outcome.message}"


def test_stationary_limits() -> None:
    """512 bytes of channels, kernels of 2 along w; as many blocks as are resident together."""
    kernel = kernels()["fprop_patch_stationary"]
    for name, dtype, reason in (
        ("n1_c128to8_i8_k2_s2", "tf32", None),
        ("n1_c129to8_i8_k2_s2", "tf32", "at most 512 bytes of channels"),
        ("n1_c256to8_i8_k2_s2", "bf16", None),
        ("n1_c257to8_i8_k2_s2", "bf16", "at most 512 bytes of channels"),
        ("n1_c8to8_i8_k2x2x4_s2x2x4", "bf16", "a kernel of 2 along w"),
    ):
        why = kernel.why_not(Problem.parse(name), dtype)
        assert why is None if reason is None else reason in (why or ""), name
    for name, dtype, grid in (
        ("n1_c64to32_i64x80x96_k2_s2", "tf32", 264),
        ("n1_c128to64_i32x40x48_k2_s2", "tf32", 132),
        ("n1_c96to48_i24_k2_s2", "bf16", 162),  # 54 times 8 warps' voxels, three tiles of columns
    ):
        (launch,) = kernel.plan(Problem.parse(name), dtype, multiprocessors=132).launches
        assert launch.grid == (grid, 1, 1), name


def test_a_patch_tile_fills_the_gpu() -> None:
    """The largest tile that gives each multiprocessor something to do."""
    kernel = kernels()["fprop_patch_mma"]
    for name, symbol, blocks in (
        ("n2_c64to32_i64_k2_s2", "128x128", 8192),
        ("n2_c320to256_i16_k2_s2", "256x128", 512),
        ("n1_c64to8_i64_k2_s2", "128x64", 2048),
        ("n1_c192to96_i12_k2_s2", "64x64", 324),
        ("n1_c768to384_i3_k2_s2", "32x32", 96),
    ):
        (launch,) = kernel.plan(Problem.parse(name), "tf32", multiprocessors=132).launches
        assert launch.symbol.endswith(f"_{symbol}") and launch.grid == (blocks, 1, 1)
        assert launch.shared_bytes <= 99 * 1024  # what sm_120 has
