"""The host's twins of Hopper's pipeline: what a wrong wait, parity, arrival or descriptor does on a GPU, it does here too."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from mistakes import mistaken
from selection import in_turn, some

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.backends.nvrtc import compiler_options, device_source
from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.errors import CompileError, LaunchError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.check import MOST_HOST_THREADS
from cupy_convt3d.lab.check.examples import layouts
from cupy_convt3d.lab.run.verify import verify
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels
from cupy_convt3d.source import Instance

SMALL = {"CONSUMERS": 1, "PRODUCERS": 1, "TILES_M": 1}  # 256 threads
# Several tiles, planes, chunks and slabs: rings go round, blocks cut columns, the input is copied in bulk (planes of whole cells).
BUSY = Problem.parse("n2_c28to8_i5x8x12_k3_p1_bias")
BUSY_GAPS = Problem.parse("n2_c8to8_i3x5x6_k3_s2_p1_d2_bias")  # rows and planes without taps
BUSY_ZEROS = Problem.parse("n2_c8to8_i15x5x6_k3_s2_p1_d2")  # which are zeros, in several steps of a block
BUSY_FILLS = Problem.parse("n1_c8to8_i3x5x6_k3_s4x4x2_p1_d2_bias")  # in two classes of rows
BUSY_CELLS = Problem.parse("n2_c20to8_i5x8x12_k3_s2_p1_bias")  # with the input laid out as cells by a launch of its own
PRODUCT = """/* convt3d
pass = "fprop"
dtypes = ["tf32", "bf16"]
architectures = ["sm_90a"]
[[launch]]
grid = 1
block = 128
*/
#define WGMMA_TILES 3
#include "convt3d.cuh"
#include "convt3d/ptx/wgmma.cuh"
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


REGISTERS = """/* convt3d
pass = "fprop"
dtypes = ["tf32"]
architectures = ["sm_90a"]
[[launch]]
grid = 1
block = 384
*/
#include "convt3d.cuh"
#include "convt3d/pipe/pipeline.cuh"
extern "C" __global__ void __launch_bounds__(384, 1) product(const scalar_t* input, const scalar_t* weight, scalar_t* output) {
  if (threadIdx.x < 128) give_registers<40>();
  else take_registers<232>();
  output[threadIdx.x] = to_scalar(0.0f);
}
"""


def test_setmaxnreg_gets_no_more_registers_than_the_block_has() -> None:
    def launched(old: str = "", new: str = "") -> None:
        assert old in REGISTERS
        multiplied(REGISTERS.replace(old, new), np.zeros((64, 8)), np.zeros((24, 8)), "tf32")

    launched()
    says = "setmaxnreg asks for 66560 in all, and the block was launched with 64512, 168 for each of 384 threads"
    with pytest.raises(LaunchError, match=says):
        launched("take_registers<232>", "take_registers<240>")
    with pytest.raises(LaunchError, match="was launched with 49152, 128 for each of 384 threads"):
        launched("(384, 1)", "(512, 1)")
    with pytest.raises(LaunchError, match="threads 0 and 96 are of one warpgroup, setmaxnreg has left them 40 and 232 registers"):
        launched("< 128", "< 96")
    with pytest.raises(CompileError, match="a multiple of 8 from 24 to 256"):
        launched("<40>", "<20>")


@pytest.mark.parametrize("source", [PRODUCT, REGISTERS], ids=["wgmma", "setmaxnreg"])
def test_instructions_of_one_architecture_ask_for_its_declaration(source: str) -> None:
    a, b = np.zeros((64, 8)), np.zeros((24, 8))
    multiplied(source, a, b, "tf32")
    says = r"architectures: .* at product.cu:\d+ is only there for a target such as sm_90a, and the kernel is declared for sm_90 and"
    with pytest.raises(LaunchError, match=says):
        multiplied(source.replace("sm_90a", "sm_90"), a, b, "tf32")


def multiplied(source: str, a: np.ndarray, b: np.ndarray, dtype: str) -> np.ndarray:
    """Return what the kernel makes of a[64][K] and b[24][K]."""
    element = DTYPES[dtype].numpy
    arrays = {"input": a.astype(element), "weight": b.astype(element), "output": np.zeros((64, 24), element)}
    refs = {name: TensorRef(array.__array_interface__["data"][0], (array.size,), (1,)) for name, array in arrays.items()}
    problem = Problem(1, 1, 1, (1, 1, 1), (1, 1, 1))
    run(HostBackend(), Kernel.from_source(source, "product"), problem, dtype, refs, lambda name, size: 0)
    return arrays["output"]


def product(source: str, dtype: str) -> bool:
    """Whether the product of small integers comes out right."""
    generator = np.random.default_rng(1)
    a, b = (generator.integers(-8, 9, (rows, 8 if dtype == "tf32" else 16)) for rows in (64, 24))
    return bool((multiplied(source, a, b, dtype) == (a @ b.T).astype(DTYPES[dtype].numpy)).all())


def test_products_are_cut_off() -> None:
    """1 + 0.75 ulp stays 1, as with `mma.sync`."""
    a, b = np.zeros((64, 8), np.float32), np.zeros((24, 8), np.float32)
    a[:, 0], a[:, 1], b[:, :2] = 1, 0.75 * 2.0**-23, 1
    np.testing.assert_array_equal(multiplied(PRODUCT, a, b, "tf32"), 1.0)


@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_product_reads_descriptors_and_places_fragments(dtype: str) -> None:
    assert product(PRODUCT, dtype)
    assert not product(PRODUCT.replace("+ 3, wgmma_operand", "+ 2, wgmma_operand"), dtype), "another start address, other rows"
    for unfinished in (PRODUCT.replace("  wgmma_wait<0>();\n", ""), PRODUCT.replace("  wgmma_commit();\n", "")):
        with pytest.raises(LaunchError, match="missing wait"):  # sums arrive with the wait, and only those of committed groups
            product(unfinished, dtype)


def test_lanes_meet_at_a_wait() -> None:
    with pytest.raises(LaunchError, match=r"divergent warp|deadlock"):
        product(PRODUCT.replace("  wgmma_wait<0>();\n", "  if (threadIdx.x != 5) wgmma_wait<0>();\n  else __syncwarp();\n"), "tf32")


# The same with nine rows of 16 bytes from one core of A to the next.
APART = (
    PRODUCT.replace("wgmma.cuh", "wgmma_rows.cuh")
    .replace("a[2][70][CELL]", "a[2][78][CELL]")
    .replace("[i / K + 3]", "[i / K / 8 * 9 + i / K % 8 + 3]")
    .replace("  wgmma(d,", "  wgmma_rows(d,")
    .replace("+ 3, wgmma_operand", "+ 3, 144, wgmma_operand")
)


@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_product_of_rows_apart(dtype: str) -> None:
    assert APART.count("144") == 1 and product(APART, dtype)
    assert not product(APART.replace("144", "128"), dtype), "the distance of cores along M"


# The same with A as each warp's fragments, of the rows that its 16 rows of D have.
IN_REGISTERS = PRODUCT.replace("wgmma.cuh", "wgmma_registers.cuh").replace(
    "  wgmma(d, wgmma_operand(shared_address(a), sizeof a[0]) + 3, wgmma_operand(shared_address(b), sizeof b[0]), 1, 24);\n",
    """  unsigned fragment[4];
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4 * (4 / sizeof(scalar_t));
  for (int r = 0; r < 4; ++r) {
    fragment[r] = *reinterpret_cast<const unsigned*>(&a[r / 2][threadIdx.x / 32 * 16 + g + r % 2 * 8 + 3][t]);
  }
  wgmma_registers(d, fragment, wgmma_operand(shared_address(b), sizeof b[0]), 1, 24);
""",
)


@pytest.mark.parametrize("dtype", ["tf32", "bf16"])
def test_product_of_registers(dtype: str) -> None:
    assert IN_REGISTERS != PRODUCT and product(IN_REGISTERS, dtype)
    assert not product(IN_REGISTERS.replace("r % 2 * 8", "r / 2 * 8"), dtype), "the order of a fragment's registers"
    with pytest.raises(LaunchError, match="missing wait"):
        product(IN_REGISTERS.replace("  wgmma_wait<0>();\n", ""), dtype)
    early = IN_REGISTERS.replace("  wgmma_commit();\n", "  fragment[2] ^= 0x10000u;\n  wgmma_commit();\n")
    with pytest.raises(LaunchError, match=r"registers that a product at .* reads were changed before it ended"):
        product(early, dtype)


# Several tiles a warpgroup, several of columns, stages that go round, channels that fill no chunk, rows that are no whole pieces.
PATCHES = (
    *("n2_c40to24_i5x8x12_k2_s2_bias", "n1_c70to10_i3x5x7_k2_s2", "n3_c16to32_i4x4x8_k1x2x2_s1x2x2_bias", "n1_c33to9_i2x9x6_k2_s2_g3"),
    *("n2_c64to16_i1x16x40_k2_s2", "n1_c24to40_i7x9x10_k3x1x2_s3x1x2_bias", "n1_c20to6_i3x5x7_k1x2x4_s1x2x4_bias"),
)


PATCH_TUNABLES = [{}, {"ROWS": 1, "COLUMNS": 32}, {"ROWS": 1, "COLUMNS": 256}, {"WARPGROUPS": 1, "COLUMNS": 96, "STAGES": 6}]


@pytest.mark.parametrize(("tunables", "dtype"), in_turn(PATCH_TUNABLES, kernels()["fprop_patch_wgmma"].dtypes))
def test_patches(tunables: dict[str, int], dtype: str) -> None:
    kernel = kernels()["fprop_patch_wgmma"].replace_tunables(**tunables)
    for problem in map(Problem.parse, PATCHES):
        for seed in (0, 3, 4):  # contiguous tensors, then drawn layouts
            outcome = verify(HostBackend(), kernel, problem, dtype, "exact", seed)
            assert outcome.ok, f"{problem} seed {seed}: {outcome.message}"


def test_how_patches_are_shared_out() -> None:
    """As many columns as fit with all their channels, in equal tiles; then a block for each multiprocessor."""
    kernel = kernels()["fprop_patch_wgmma"]
    for name, dtype, tile_columns, grid in (
        ("n2_c320to256_i16_k2_s2", "tf32", 128, 128),  # 16 tiles of 128 columns, 8 streams of voxels
        ("n1_c512to64_i16_k2_s2", "tf32", 80, 112),  # 2 KiB a column; 32 tiles of voxels for 2 warpgroups of 16 streams
        ("n1_c64to32_i64x80x96_k2_s2", "bf16", 128, 132),
    ):
        launch = kernel.plan(Problem.parse(name), dtype, multiprocessors=132).launches[-1]
        assert (launch.scalars["tile_columns"], launch.grid) == (tile_columns, (grid, 1, 1)), name
    assert "an even kernel along w" in (kernel.why_not(Problem.parse("n1_c8to8_i8_k3_s3"), "tf32") or "")
    launch = kernel.plan(Problem.parse("n1_c64to64_i32_k2_s2"), "tf32x3").launches[-1]
    assert launch.scalars["tile_columns"] == 64, "two halves of sums and fragments of two rows: 255 registers"
    assert "not for sm_80" in (kernel.why_not(Problem.parse("n1_c8to8_i8_k2_s2"), "tf32", "sm_80") or "")
    with pytest.raises(CompileError, match="stages in pairs"):
        verify(HostBackend(), kernel.replace_tunables(STAGES=3), Problem.parse(PATCHES[0]), "tf32", "exact", 0)


# Of convt3d/pipe/patch_wgmma.cuh, which both kernels have.
SHARED_MISTAKES = {
    "stage read before it is there": ("      cp_async_wait<STAGES - 2>();\n", ""),
    "one stage too few is waited for": ("cp_async_wait<STAGES - 2>()", "cp_async_wait<STAGES - 1>()"),
    "weights not waited for": ("if (odd == 0 && weights.fresh) mbarrier_wait", "if (odd == 2) mbarrier_wait"),
    "weights waited for after their first products": ("if (odd == 0 && weights.fresh) mbarrier", "if (odd == 1 && weights.fresh) mbarrier"),
    "weights announced without their bytes": (
        "mbarrier_arrive_expect(barrier, static_cast<unsigned>(chunk_bytes()))",
        "mbarrier_arrive(barrier)",
    ),
    "fragments overwritten": ("wgmma_wait<1>();", ""),
    "copied to where inputs wait": ("odd == 0 ? ring.before + STAGE_BYTES : ring.pair", "odd == 0 ? ring.pair + STAGE_BYTES : ring.before"),
    "sums stored before they are there": ("  weights.fresh = false;\n  wgmma_wait<0>();\n", "  weights.fresh = false;\n"),
    "sums of the tile before": ("multiply(sums, odd, 0, 0, chunk + odd == 0);", "multiply(sums, odd, 0, 0, false);"),
    "rows and columns of a fragment": ("word = i % 2 * 2 + q % 2", "word = q % 2 * 2 + i % 2"),
}
# The same where each operand is the sum of two TF32 numbers.
SPLIT_MISTAKES = {
    "weights of the other part": ("multiply(chunk_sums, odd, 0, 1, false);", "multiply(chunk_sums, odd, 0, 0, false);"),
    "inputs of the other part": ("multiply(chunk_sums, odd, 1, 0, odd == 0);", "multiply(chunk_sums, odd, 0, 0, odd == 0);"),
    "inputs of the other half": ("multiply(chunk_sums, 1, 0, 0, false);", "multiply(chunk_sums, 0, 0, 0, false);"),
    "weights of the other half": ("weight_part * 128 + half * 64", "weight_part * 128 + odd * 64"),
    "parts of a chunk lie in another's place": ("number / 8 * 8 * (PARTS - 1)", "number * (PARTS - 1)"),
    "sums of a chunk read before they are there": ("      wgmma_wait<0>();\n#pragma unroll\n", "#pragma unroll\n"),
    "sums of the chunk before": ("multiply(chunk_sums, odd, 1, 0, odd == 0);", "multiply(chunk_sums, odd, 1, 0, chunk + odd == 0);"),
    "sums of the tile before": ("for (int i = 0; i < SUMS; ++i) sums[r][i] = 0.0f;", "for (int i = 1; i < SUMS; ++i) sums[r][i] = 0.0f;"),
}

PATCH_MISTAKES = SHARED_MISTAKES | {
    "other lanes' copies not waited for": ("    __syncwarp();  // all lanes' copies have landed", "    //"),
    "the first chunk's channels again": ("(copied_chunk * 2 + half) * STAGED", "half * STAGED"),
    "channels in other places than they are read from": ("stage + staged(k, lane % COUNT)", "stage + k * COUNT + lane % COUNT"),
    "no bias where runs are whole": (
        "(epilogue.changes_sums()) {\n      store(Constant<true>{}, Constant<true>{});",
        "(epilogue.changes_sums()) {\n      store(Constant<true>{}, Constant<false>{});",
    ),
    "pairs in the first taps' place": ("tap % kernel_w * output.stride[4]", "tap % 2 * output.stride[4]"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "right", "wrong", "problem"),
    [
        ("fprop_patch_wgmma", "ceil_div(block_tiles, WARPGROUPS)", "block_tiles + 1", "n1_c72to2_i1x1x136_k1x1x2_s1x1x2"),
        ("fprop_patch_channels_last", "ceil_div(block_tiles, WARPGROUPS)", "block_tiles + 1", "n1_c72to2_i1x1x72_k1x1x2_s1x1x2"),
        ("fprop_rolling_wgmma", "stays && held != -1 && i < slabs", "false", "n1_c1to1_i1_k1x2x1_s1x2x1"),
    ],
)
def test_a_block_that_ends_before_its_copies_have_landed(name: str, right: str, wrong: str, problem: str) -> None:
    kernel = kernels()[name]
    assert verify(HostBackend(), kernel, Problem.parse(problem), "tf32", "exact", 0).ok
    with pytest.raises(LaunchError, match=r"ended before \d+ bulk copies had landed, the first of \d+ bytes from .*\.cuh?:\d+"):
        verify(HostBackend(), mistaken(kernel, right, wrong), Problem.parse(problem), "tf32", "exact", 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kernel in kernels().items() if kernel.waits_for_packing])
def test_who_does_not_wait_for_the_packing_is_found(name: str) -> None:
    """A launch that may begin beside the one that packs, or lays out, has to wait for it; nobody else is launched so."""
    kernel, dtype = kernels()[name], kernels()[name].dtypes[0]
    problem = Problem.parse("n4_c16to8_i4x16x16_k2_s2_g2_bias")
    launches = kernel.plan(problem, dtype).launches
    assert launches[0].prepares is not None
    assert [launch.beside for launch in launches] == [place > 0 for place in range(len(launches))]
    assert verify(HostBackend(), kernel, problem, dtype, "exact", 0).ok
    wait = "wait_for_launch_before();" if "wait_for_launch_before();" in kernel.source else "wait_for_packing();"
    trial = mistaken(kernel, wait, ";", everywhere=True)
    with pytest.raises(LaunchError, match=r"has not waited for the launch before|missing wait: .* what the launch before"):
        verify(HostBackend(optimize=False), trial, problem, dtype, "exact", 0)
    trial = mistaken(kernel, wait, f"blockIdx.x != 0 ? {wait.rstrip(';')} : void();", everywhere=True)
    assert launches[-1].grid[0] > 1
    with pytest.raises(LaunchError, match=r"missing wait: thread .* copies by (bulk_copy|cp.async) at .* what the launch before .* fills"):
        verify(HostBackend(optimize=False), trial, problem, dtype, "exact", 0)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", PATCH_MISTAKES)
def test_mistakes_in_patches_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    assert_found(kernels()["fprop_patch_wgmma"], *PATCH_MISTAKES[mistake], enumerate(map(Problem.parse, PATCHES)))


# Kernel = stride in rows of channels: whole vectors and not, taps whose channels fill no vector, groups, several tiles and streams.
ROWS = (
    *("n2_c40to24_i5x8x12_k2_s2_bias", "n1_c70to10_i3x5x7_k2_s2", "n3_c16to32_i4x4x8_k1x3x2_s1x3x2_bias", "n1_c33to9_i2x9x6_k2_s2_g3"),
    *("n2_c64to16_i1x16x40_k2x2x4_s2x2x4", "n1_c24to40_i7x9x10_k1_bias", "n1_c131to9_i2x3x5_k1x2x2_s1x2x2"),
)


ROWS_TUNABLES = [{}, {"ROWS": 2, "COLUMNS": 64}, {"COLUMNS": 256, "STAGES": 4}, {"WARPGROUPS": 3, "STAGES": 6}]


@pytest.mark.parametrize(("tunables", "dtype"), in_turn(ROWS_TUNABLES, kernels()["fprop_patch_channels_last"].dtypes))
def test_rows_of_channels(tunables: dict[str, int], dtype: str) -> None:
    kernel = kernels()["fprop_patch_channels_last"].replace_tunables(**tunables)
    for problem in map(Problem.parse, ROWS):
        for seed in (0, 1, 3, 4):  # contiguous, channels_last, drawn layouts
            outcome = verify(HostBackend(), kernel, problem, dtype, "exact", seed)
            assert outcome.ok, f"{problem} seed {seed}: {outcome.message}"


def test_how_rows_of_channels_are_shared_out() -> None:
    kernel = kernels()["fprop_patch_channels_last"].replace_tunables(COLUMNS=256)
    for name, dtype, tile_columns, grid in (
        ("n2_c320to256_i16_k2_s2", "bf16", 256, 128),  # 8 tiles of 256 columns, 16 streams of voxels
        ("n2_c256to128_i16x20x24_k2_s2", "tf32", 160, 126),  # 1 KiB a column
        ("n1_c48to20_i48_k2_s2", "bf16", 192, 132),  # taps of 24 columns, 20 of them live
    ):
        launch = kernel.plan(Problem.parse(name), dtype, multiprocessors=132).launches[-1]
        assert (launch.scalars["tile_columns"], launch.grid) == (tile_columns, (grid, 1, 1)), name
    assert "kernel = stride" in (kernel.why_not(Problem.parse("n1_c8to8_i8_k3_s2"), "tf32") or "")
    launch = kernel.replace_tunables(WARPGROUPS=3).plan(Problem.parse("n1_c64to64_i32_k2_s2"), "tf32x3").launches[-1]
    assert launch.scalars["tile_columns"] == 64, "168 registers"
    assert "not for sm_80" in (kernel.why_not(Problem.parse("n1_c8to8_i8_k2_s2"), "tf32", "sm_80") or "")
    with pytest.raises(CompileError, match="stages in pairs"):
        verify(HostBackend(), kernel.replace_tunables(STAGES=3), Problem.parse(ROWS[0]), "tf32", "exact", 0)


ROWS_MISTAKES = SHARED_MISTAKES | {
    "the first chunk's channels again": ("if (goes_on) from[q] = advanced(from[q], 2 * STAGED * SIZE);", ""),
    "the second half's channels again": ("from[q] + (inside ? half * STAGED : 0)", "from[q]"),
    "other lanes' copies not waited for": ("    if (copier.of_elements()) __syncwarp();  // all lanes' copies have landed", "    //"),
    "the first chunk's neighbours again": ("copy_pieces<8>(target, from[q] + begin", "copy_pieces<8>(target, from[q] + half * STAGED"),
    "another group's vectors behind": ("          own[q] = later[q];\n", ""),
    "another voxel's channels": ("__shfl_sync(0xffffffffu, place, row)", "__shfl_sync(0xffffffffu, place, i)"),
    "weights in another order than columns": (
        "column % VECTOR / 2 * 8 + column % GROUP / VECTOR * 2",
        "column % VECTOR / 2 * 2 + column % GROUP / VECTOR * VECTOR",
    ),
    "weights in another order than inputs": ("v / EACH * VECTOR + cell % 4 * EACH", "v / EACH * EACH + cell % 4 * VECTOR"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ROWS_MISTAKES)
def test_mistakes_in_rows_of_channels_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    assert_found(kernels()["fprop_patch_channels_last"], *ROWS_MISTAKES[mistake], enumerate(map(Problem.parse, ROWS)))


@pytest.mark.slow
@pytest.mark.parametrize("mistake", SPLIT_MISTAKES)
def test_mistakes_in_parts_of_operands_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    kernel = kernels()["fprop_patch_channels_last"]
    assert_found(kernel, *SPLIT_MISTAKES[mistake], enumerate(map(Problem.parse, ROWS)), "tf32x3")


def test_tf32_operands_lose_their_low_bits() -> None:
    right, wrong = "high.element[v] = round(values[v]);", "high.element[v] = __float_as_uint(values[v]);"
    trial = mistaken(kernels()["fprop_rolling_wgmma"], right, wrong).replace_tunables(**SMALL)
    outcome = verify(HostBackend(), trial, Problem.parse("n2_c1to1_i8_k1"), "tf32", "random", 0)
    assert not outcome.ok and "beyond its bound" in outcome.message, "cut off, not rounded"


@pytest.mark.parametrize(("dtype", "kind"), in_turn(kernels()["fprop_rolling_wgmma"].dtypes, ("exact", "random")))
def test_small_instance(dtype: str, kind: str) -> None:
    kernel = kernels()["fprop_rolling_wgmma"].replace_tunables(**SMALL)
    for name in (str(BUSY), "n2_c20to17_i4x5x6_k4_s2_p1", "n1_c8to8_i6_k3_s2_p1_d2_bias", "n3_c4to6_i3x4x5_k2_s2_g2"):
        outcome = verify(HostBackend(), kernel, Problem.parse(name), dtype, kind, seed=0)
        assert outcome.ok, f"{name}: {outcome.message}"


@pytest.mark.parametrize("dtype", kernels()["fprop_rolling_wgmma"].dtypes)
def test_the_check_meets_what_the_problem_decides(dtype: str) -> None:
    """Whether weights stay, whether a slab has a row of taps, where a position's outputs begin, planes copied in bulk, fills."""
    kernel = kernels()["fprop_rolling_wgmma"]
    slabs, phases, copied, filled = set(), set(), set(), set()
    for problem in dict.fromkeys(problem for problem, _ in layouts(kernel, dtype)):
        launches = kernel.plan(problem, dtype).launches
        if sum(math.prod(launch.grid) * math.prod(launch.block) for launch in launches) > MOST_HOST_THREADS:
            continue  # not run on the host
        n = launches[-1].scalars
        slabs.add((n["resident"], n["row_slabs"], n["classes_h"] > 1))
        phases.add((problem.stride[2] if n["phase_w"] else 0, n["row_slabs"]))
        last_chunk = n["in_channels_per_group"] % (n["chunk_cells"] * 16 // DTYPES[dtype].itemsize)
        copied |= {(n["chunks"] > 1, last_chunk > 0, problem.batch > 1, n["phase_w"] > 0)} if n["raws"] else set()
        filled.add((n["filled"], problem.bias))
    assert slabs >= {(1, 1, False), (1, 1, True), (1, 0, False), (0, 1, False), (0, 0, True)}
    assert phases >= {(2, 1), (3, 1), (4, 1), (4, 0)}
    assert copied >= {(True, True, True, False), (False, True, True, True)}
    assert filled == {(0, False), (0, True), (1, False), (1, True)}


MISTAKES = {
    "stage never announced": ("              if (lane == 0) mbarrier_arrive(stage.full());\n", ""),
    "stage never given back": ("          mbarrier_arrive(read_stage);\n", ""),
    "slab given back before it is read": ("            wgmma_wait<1>();\n", ""),
    "slab announced without its bytes": (
        "mbarrier_arrive_expect(slab.full(), static_cast<unsigned>(slab_bytes))",
        "mbarrier_arrive(slab.full())",
    ),
    "loader does not wait for an empty stage": (
        "mbarrier_wait_patiently(stage.empty(), stage.parity ^ 1u);\n              Cell* cells",
        "Cell* cells",
    ),
    "copier of cells does not wait for an empty stage": (
        "mbarrier_wait_patiently(stage.empty(), stage.parity ^ 1u);\n            if (lane == 0)",
        "if (lane == 0)",
    ),
    "cells announced without their bytes": (
        "mbarrier_arrive_expect(stage.full(), static_cast<unsigned>(stage_bytes))",
        "mbarrier_arrive(stage.full())",
    ),
    "consumer does not wait for its stage": ("          mbarrier_wait(stage.full(), stage.parity);\n", ""),
    "wrong parity": ("mbarrier_wait(stage.full(), stage.parity)", "mbarrier_wait(stage.full(), stage.parity ^ 1u)"),
    "sums touched before they are there": ("        fresh = false;\n        wgmma_wait<0>();\n", "        fresh = false;\n"),
    "raw copy never given back": ("              if (kind == RAW_COPY) mbarrier_arrive(raw.empty());", ""),
    "tap offset": ("- static_cast<unsigned>(i) * tap_step", "+ static_cast<unsigned>(i) * tap_step"),
    "sums stored before all is filled": ("          sync_warpgroup(warpgroup);  // each warp has filled", "          //"),
    "sums put in before the bias is there": (
        "              if (c8 % in_round == 0) mbarrier_wait(composing.full(), composing.parity);\n",
        "",
    ),
    "composed outputs stored before their sums are there": ("              mbarrier_wait(composing.empty(), composing.parity);\n", ""),
    "bias filled in before composed outputs are read": (
        "          bulk_wait_read<0>();\n          __syncwarp();\n          if (!epilogue",
        "          if (!epilogue",
    ),
    "sums put in before the bias is read": (
        "                bulk_wait_read<0>();\n                mbarrier_arrive",
        "                mbarrier_arrive",
    ),
    "block ends before composed outputs are read": ("      bulk_wait_read<0>();\n    }\n    return;", "    }\n    return;"),
    "row stored before it is staged": (
        "                }\n                __syncwarp();\n#pragma unroll\n                for (int c = 0; c < 8; ++c) {",
        "                }\n#pragma unroll\n                for (int c = 0; c < 8; ++c) {",
    ),
    "staged row overwritten": ("                __syncwarp();  // what is staged has been read\n", ""),
    "cut column starts cold": ("segment.first = segment.begin > warm_up ? segment.begin - warm_up : 0;", "segment.first = segment.begin;"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_pipeline_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    tried = [(seed, (BUSY, BUSY_GAPS, BUSY_ZEROS, BUSY_FILLS, BUSY_CELLS)[seed % 5]) for seed in range(20)]
    assert_found(kernels()["fprop_rolling_wgmma"], *MISTAKES[mistake], tried, **SMALL)


# Outputs composed in shared memory: tiles that begin within rows, behind them and late in a volume, that hold several volumes; rounds
# of channels, the last of fewer, of tiles of which the last is not full; rows and planes without taps, or one of them, one and two
# behind each; planes that begin anywhere and channels whole lines apart; a stride that leaves rows of two classes is not composed.
COMPOSED = (
    *("n2_c32to64_i3x16x32_k3_s2_p1_d2_bias", "n3_c8to64_i3x2x3_k3_s2_p1_d2_bias", "n1_c8to20_i3x7x9_k3_s2x1x1_p1_d2x1x1"),
    *("n1_c8to24_i3x7x9_k3_s3x2x1_p1_d3x2x1_bias", "n2_c8to40_i3x7x40_k3x2x3_s3x4x2_p2x0x1_d2x4x1_bias"),
    *("n2_c8to88_i2x3x16_k3x1x1_s2x2x1_p1x0x0_d2x1x1", "n1_c1to8_i1x16x20_k1_s1x2x1_p0x0x2"),
    *("n9_c8to12_i2x3x2_k3x1x2_s3x2x1_p1x0x0_d3x1x1_g2",),
)


COMPOSED_TUNABLES = [{}, {"TILES_M": 2, "CHUNK_CELLS": 2}, {"TILES_M": 1, "LAY_OUT": 0}, SMALL]


@pytest.mark.parametrize(("tunables", "dtype"), in_turn(COMPOSED_TUNABLES, kernels()["fprop_rolling_wgmma"].dtypes))
def test_outputs_are_composed(tunables: dict[str, int], dtype: str) -> None:
    kernel, composed = kernels()["fprop_rolling_wgmma"].replace_tunables(**tunables), 0
    for name in COMPOSED:
        problem = Problem.parse(name)
        if kernel.why_not(problem, dtype) is None:
            composed += kernel.plan(problem, dtype).launches[-1].scalars["composed8"] > 0
            for seed in (0, 1):
                outcome = verify(HostBackend(), kernel, problem, dtype, "exact", seed)
                assert outcome.ok, f"{name}: {outcome.message}"
    assert composed > len(COMPOSED) / 2


# A stride of 2 with whole runs and without, several tiles on each axis and of columns, channels that stay and that come class by class,
# one position more or less than a tile, classes without taps, groups, strides beyond 2 and none, a dilation.
CLASSES = (
    *("n2_c24to16_i3x9x10_k3_s2_p1_op1_bias", "n1_c16to72_i2x7x9_k4_s2_p1", "n1_c10to9_i5x8x8_k3_s2_p1"),
    *("n1_c40to8_i2x4x17_k3x2x5_s2_p1x0x2_bias", "n1_c12to20_i3x4x6_k2x1x2_s3x1x2_op1x0x0_g2_bias"),
    *("n2_c8to24_i3x8x33_k3_p1", "n1_c8to8_i3x5x7_k3_s2x1x4_p1_d3x2x1_bias"),
    *("n1_c300to8_i2x3x8_k3x4x4_s2_p1_op1x0x0_bias", "n1_c64to8_i1x8x16_k1_s2x2x1_op1x1x0_bias"),
    *("n2_c8to104_i3x4x8_k3_s2_p1_op1_bias", "n1_c9to8_i2x3x16_k4_s2_p1", "n1_c543to8_i1x2x3_k1"),
    *("n1_c120to8_i1x8x32_k1_s2x2x1_op1x1x0_bias", "n1_c530to8_i2x3x8_k3_s2_p1_op1"),
    *("n1_c64to8_i1x11x32_k3_s2_p1", "n1_c16to8_i1x2x200_k3_s2_p1"),  # laid out in bands of rows, of tiles
    "n3_c8to168_i1x4x4_k1x1x2_s1x1x2",  # a window that stays for two tiles of channels, as many volumes as blocks
)


CLASS_TUNABLES: list[dict[str, int]] = [
    *({}, {"TILES_M": 1, "LAY_OUT": 0}, {"TILES_M": 4, "COLUMNS": 64, "CHUNK_CELLS": 4}),
    {"TILES_M": 1, "COLUMNS": 256, "STAGES": 2},
    {"COLUMNS": 256},  # in TF32 one class of w after the other, where there are so many channels
    {"CONSUMERS": 1, "TILES_M": 2, "COLUMNS": 64, "LAY_OUT": 0, "CHUNK_CELLS": 4},
    {"LAID_THREADS": 32},  # few rows of h for each block that lays out
]


@pytest.mark.parametrize(("tunables", "dtype"), in_turn(CLASS_TUNABLES, kernels()["fprop_implicit_gemm_wgmma"].dtypes))
def test_classes(tunables: dict[str, int], dtype: str) -> None:
    kernel = kernels()["fprop_implicit_gemm_wgmma"].replace_tunables(**tunables)
    seeds = (0, 1, 4)  # contiguous, channels_last, a drawn layout: all of them by default, else in turn
    for number, problem in enumerate(map(Problem.parse, CLASSES)):
        for seed in seeds[number % 3 : number % 3 + 1] if tunables else seeds:
            outcome = verify(HostBackend(), kernel, problem, dtype, "exact", seed)
            assert outcome.ok, f"{problem} seed {seed}: {outcome.message}"


@pytest.mark.parametrize("dtype", some(["bf16", "tf32"]))
def test_wide_rows_are_laid_out_in_parts(dtype: str) -> None:
    kernel = kernels()["fprop_implicit_gemm_wgmma"].replace_tunables(LAID_THREADS=64)
    for problem in map(Problem.parse, ("n1_c20to16_i1x9x300_k3_s2_p1_op1", "n1_c8to8_i2x3x264_k4_s2x1x2_p1_bias")):
        for seed in (0, 1, 4):
            outcome = verify(HostBackend(), kernel, problem, dtype, "exact", seed)
            assert outcome.ok, f"{problem} seed {seed}: {outcome.message}"


def test_how_classes_are_shared_out() -> None:
    """All channels of a window stay where they fit; whole tiles for each block where that costs an eighth at most."""
    kernel = kernels()["fprop_implicit_gemm_wgmma"]
    for name, tunables, resident, stages, whole, grid in (
        ("n1_c128to128_i16x64x64_k3_s2_p1_op1", {}, 1, 2, True, 132),  # 256 tiles for 132 blocks
        ("n1_c64to64_i12x16x32_k3_s2_p1_op1", {"TILES_M": 1}, 1, 1, False, 132),  # 48 tiles
        ("n16_c256to128_i16_k4_s2_p1", {}, 0, 2, True, 132),
        ("n1_c16to8_i1x2x3_k3_s2_p1", {}, 1, 1, False, 4),  # each unit a block
    ):
        trial = kernel.replace_tunables(**tunables)
        launch = trial.plan(Problem.parse(name), "bf16", multiprocessors=132).launches[-1]
        n = launch.scalars
        assert (n["resident"], n["stages"], n["granule"] > 1, launch.grid[0]) == (resident, stages, whole, grid), name
    assert "strides of at most 8" in (kernel.why_not(Problem.parse("n1_c8to8_i8_k3_s9x1x1"), "bf16") or "")
    assert "no registers" in (kernel.replace_tunables(TILES_M=64).why_not(Problem.parse("n1_c8to32_i8_k3"), "bf16") or "")
    assert "pass the shared memory" in (kernel.why_not(Problem.parse("n1_c512to64_i8_k3_d30"), "bf16") or "")
    assert "not for sm_80" in (kernel.why_not(Problem.parse("n1_c8to8_i8_k3_s2"), "bf16", "sm_80") or "")
    assert "has no tf32x3 instance" in (kernel.why_not(Problem.parse("n1_c8to8_i8_k3_s2"), "tf32x3") or "")


def test_how_bands_are_laid_out() -> None:
    """About a run a thread, all rows and tiles where they are so few; shared memory fits without asking, however far taps reach."""
    kernel = kernels()["fprop_implicit_gemm_wgmma"]
    for name, dtype, rows, tiles, grid in (
        ("n1_c128to128_i16x64x64_k3_s2_p1_op1", "bf16", 4, 4, 544),  # 32 planes, 65 rows
        ("n1_c128to128_i16x64x64_k3_s2_p1_op1", "tf32", 2, 4, 2112),
        ("n16_c256to128_i16_k4_s2_p1", "bf16", 19, 1, 1024),  # 16 rows of the input
        ("n1_c16to8_i1x2x200_k3_s2_p1", "bf16", 9, 7, 2),
        ("n1_c16to8_i1x1x999_k1x1x9_d1x1x20", "bf16", 8, 1, 73),
    ):
        launch = kernel.plan(Problem.parse(name), dtype, multiprocessors=132).launches[1]
        n = launch.scalars
        assert (n["band_rows"], n["band_tiles"], launch.grid[0]) == (rows, tiles, grid), name
        assert launch.shared_bytes <= 40960, name


CLASS_MISTAKES = {
    "window not waited for": ("        mbarrier_wait(at.full(), at.parity);\n", ""),
    "window never given back": ("        if (releases) read_stage = at.empty();\n", ""),
    "window given back before it is read": (
        "if (releases) read_stage = at.empty();",
        "if (releases && lane == 0) mbarrier_arrive(at.empty());",
    ),
    "window given back before all lanes have seen it": ("        if (!has_taps) __syncwarp();  // all lanes have seen it full\n", ""),
    "next window copied over this one": ("            mbarrier_wait_patiently(stage.empty(), stage.parity ^ 1u);\n", ""),
    "window announced without its bytes": (
        "mbarrier_arrive_expect(at.full(), static_cast<unsigned>(copies) * bytes)",
        "mbarrier_arrive(at.full())",
    ),
    "planes beyond the input": ("if (static_cast<unsigned>(d) < static_cast<unsigned>(problem.input_size[0])) {", "{"),
    "planes of zeros left as they were": ("laid_out[i] = Cell{};", ";"),
    "a tile without what its taps reach": ("((tiles - 1) * 8 + rows_w) * TILES_M)", "tiles * 8 * TILES_M)"),
    "tiles of another band": ("((first_tile + tile) * TILES_M + part)", "(tile * TILES_M + part)"),
    "channels of one position kept elsewhere": ("kept_at(cell * cell_pitch + place)", "kept_at(place)"),
    "rows of another tile": ("((from.w - lowest_w) / 8 + part)", "part"),
    "cells laid out before all of a band are there": ("  __syncthreads();  // all cells of the band are kept\n", ""),
    "cells read where they are not kept": ("kept[kept_at(cell * cell_pitch + from)]", "kept[cell * cell_pitch + from]"),
    "what lies beyond the input laid out as its first cell": ("inside ? value : Cell{}", "value"),
    "a band's rows read from its first in the output": ("const int read_h = max(first_h, 0)", "const int read_h = max(first_row, 0)"),
    "slab not waited for": ("              mbarrier_wait(slab.full(), slab.parity);\n", ""),
    "slab given back before it is read": ("              wgmma_wait<1>();\n", ""),
    "slab announced without its bytes": (
        "mbarrier_arrive_expect(slab.full(), static_cast<unsigned>(slab_bytes))",
        "mbarrier_arrive(slab.full())",
    ),
    "the last slab of a class not passed on": ("        if (keeps && (chunk + 1 == chunks || releases)) pass(), keeps = false;\n", ""),
    "sums stored before they are there": ("      wgmma_wait<0>();\n      __syncwarp();", "      __syncwarp();"),
    "sums of the class before": ("      for (int s = 0; s < at_once * TILES_M * SUMS; ++s) sums[s / SUMS][s % SUMS] = 0.0f;\n", ""),
    "taps the other way round": ("ahead -= apart_w)", "ahead += apart_w)"),
    "parts of a window": ("(ahead + m) % TILES_M", "m % TILES_M"),
    "the pair's halves": ("swapped ? 0x1054u : 0x5410u", "0x5410u"),
    "slabs in another order than windows": ("both ? turn % 2 : class_w(turn / chunks)", "both ? turn % 2 : turn / chunks"),
    "half of the runs never stored": ("  while (HELD > 1 && late_pieces > 0) store_late();\n}", "}"),
    "late runs overwritten": ("        while (late_pieces > 0) store_late();\n", "        late_pieces = 0;\n"),
    "late runs of other channels": ("constexpr int FIRST = decltype(piece)::value * PIECE;", "constexpr int FIRST = 0;"),
    "channels traded with another lane": ("bit < 4; bit *= 2", "bit < 2; bit *= 2"),
    "a share ends where the next has begun": ("granules / blocks * number + min(number, granules % blocks)", "granules / blocks * number"),
    "a tile too many in turns": ("ceil_div(costs / granule - block, blocks)", "ceil_div(costs / granule, blocks)"),
    "turns that carry nothing": ("digit += ahead + carry * one;", "digit += ahead;"),
    "a turn of one tile": ("(in_turns ? blocks : 1) * classes", "classes"),
    "turns though a window stays for other channels": ("granule > 1 && (channel_tiles == 1 || !stays)", "granule > 1"),
    "a tile ends with the last class, wherever it began": (
        "(unit->eh + 1) % problem.stride[1] == first_eh",
        "unit->eh + 1 == problem.stride[1]",
    ),
}
# Mistakes in windows that are not laid out.
WINDOW_MISTAKES = {
    "next window loaded over this one": ("        mbarrier_wait(fresh.empty(), fresh.parity ^ 1u);\n", ""),
    "copies not waited for": ("    cp_async_wait_all();\n", ""),
    "a run too few": ("ceil_div(from.w - first_w + width, VECTOR)", "ceil_div(width, VECTOR)"),
    "channels of a run": ("i % 2 == 0 ? (even & 0xffffu) | odd << 16", "i % 2 == 0 ? (odd & 0xffffu) | even << 16"),
    "a run's end": ("if (kept >= 0 && kept < width)", "if (kept >= 0 && kept + 1 < width)"),
}
# Mistakes where both classes of w are multiplied together, in TF32.
BOTH_MISTAKES = {
    "classes of w swapped": ("sums[e * (at_once - 1) * TILES_M + m]", "sums[(1 - e) * (at_once - 1) * TILES_M + m]"),
    "taps of the first class for both": ("ew = both ? turn % 2 : class_w(turn / chunks)", "ew = both ? 0 : class_w(turn / chunks)"),
    "sums of one class alone": ("i < at_once * 2 * TILES_M", "i < 2 * TILES_M"),
    "a plane too few": ("CONSUMERS + (taps[unit->ed].count - 1) * apart_d", "CONSUMERS"),
    "channels of a pair": ("finish(sums[i / 2][j * 4 + r * 2 + c], start[c])", "finish(sums[i / 2][j * 4 + r * 2], start[c])"),
}


TWICE = "n1_c120to8_i1x8x32_k1_s2x2x1_op1x1x0_bias"  # a block has two tiles, whose windows follow one another, and classes without taps


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [*CLASS_MISTAKES, *WINDOW_MISTAKES, *BOTH_MISTAKES])
def test_mistakes_in_classes_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    tried = [(seed, problem) for problem in map(Problem.parse, CLASSES) for seed in (0, 1)]
    tried += [(seed, Problem.parse(TWICE)) for seed in range(2, 40)]  # who runs when decides
    kernel, right, wrong = kernels()["fprop_implicit_gemm_wgmma"], *{**CLASS_MISTAKES, **WINDOW_MISTAKES, **BOTH_MISTAKES}[mistake]
    if mistake in BOTH_MISTAKES:
        assert_found(kernel, right, wrong, tried, "tf32", TILES_M=1)
    else:
        assert_found(kernel, right, wrong, tried, "bf16", LAY_OUT=int(mistake in CLASS_MISTAKES), LAID_THREADS=32)


# Rows of 64 blocks and patches of 8 x 8, some beyond the end of the output; rows that begin at any place in 16 bytes; several tiles of
# columns, chunks of channels and sets of groups; places of a block without taps; strides beyond 2 and none; a dilation.
BLOCKS = (
    *("n2_c24to40_i3x2x66_k3_s2_p1_bias", "n1_c16to16_i2x1x129_k4x3x3_s2_p1_g4", "n1_c8to8_i5x9x10_k3_s2_p1_op1_bias"),
    *("n3_c6to12_i2x1x40_k2x3x5_s1x2x3_p0x1x2_g3_bias", "n1_c40to8_i2x3x70_k3_p1", "n1_c8to24_i2x9x9_k3_s2_p1_d2_bias"),
    *("n1_c8to8_i3x1x65_k1x2x1_s4x3x2_op1x1x1_bias", "n1_c70to72_i1x2x33_k3_s2_p1_op1"),
)


BLOCK_TUNABLES: list[dict[str, int]] = [
    *({}, {"COLUMNS": 16, "CHUNK_CELLS": 2, "MERGE_GROUPS": 1}),
    {"CONSUMERS": 1, "COLUMNS": 64, "CHUNK_CELLS": 8, "MERGE_GROUPS": 1},
]


@pytest.mark.parametrize(("tunables", "dtype"), in_turn(BLOCK_TUNABLES, kernels()["fprop_stationary_wgmma"].dtypes))
def test_blocks(tunables: dict[str, int], dtype: str) -> None:
    kernel = kernels()["fprop_stationary_wgmma"].replace_tunables(**tunables)
    done = 0
    for problem in map(Problem.parse, BLOCKS):
        for seed in (0, 1, 4):  # contiguous, channels_last, a drawn layout
            if kernel.why_not(problem, dtype) is None:
                outcome = verify(HostBackend(), kernel, problem, dtype, "exact", seed)
                assert outcome.ok, f"{problem} seed {seed}: {outcome.message}"
                done += 1
    assert done >= 3 * (len(BLOCKS) - 1), "one stage of 128 blocks along w and 8 cells may be too large"


def test_how_blocks_are_shared_out() -> None:
    """Small groups go together, weights leave room for two stages of a window, rows are whole where that wastes no more."""
    kernel = kernels()["fprop_stationary_wgmma"].replace_tunables(MERGE_GROUPS=1)
    for name, dtype, merged, sets, patch, stages, grid in (
        ("n4_c32to32_i32x64x128_k3_s2_p1_g4", "bf16", 4, 1, 64, 4, 132),
        ("n4_c32to32_i32x64x128_k3_s2_p1_g2", "tf32", 2, 1, 64, 2, 132),
        ("n1_c64to64_i12x16x32_k3_s2_p1_op1", "bf16", 1, 2, 8, 4, 96),  # 2 tiles of channels, 6 x 2 x 4 of blocks
        ("n1_c16to16_i12x16x32_k3_s2_p1_op1_g2", "bf16", 2, 1, 8, 4, 48),
        ("n1_c64to32_i24x32x64_k3_s2_p1_op1", "tf32", 1, 2, 64, 3, 132),  # half the columns fit
    ):
        launch = kernel.plan(Problem.parse(name), dtype, multiprocessors=132).launches[-1]
        n = launch.scalars
        assert (n["sets"], n["patch_w"], n["stages"], launch.grid[0]) == (sets, patch, stages, grid), name
        assert n["set_inputs"] == Problem.parse(name).in_channels // Problem.parse(name).groups * merged, name
    assert "tables for strides" in (kernel.why_not(Problem.parse("n1_c8to8_i8_k3_s9x1x1"), "bf16") or "")
    wide = kernel.replace_tunables(COLUMNS=256)  # of 232 columns ptxas refuses the product
    assert "of more columns" in (wide.why_not(Problem.parse("n1_c8to232_i8_k1"), "bf16") or "")
    assert "no registers" in (kernel.why_not(Problem.parse("n1_c8to8_i8_k4_s4"), "bf16") or "")
    assert "too many to be written out" in (kernel.why_not(Problem.parse("n1_c32to8_i8_k7"), "bf16") or "")
    assert "pass the shared memory" in (kernel.why_not(Problem.parse("n1_c512to32_i8_k3_s2"), "bf16") or "")
    assert "not for sm_80" in (kernel.why_not(Problem.parse("n1_c8to8_i8_k3_s2"), "bf16", "sm_80") or "")


BLOCK_MISTAKES = {
    "window not waited for": ("      mbarrier_wait(full + static_cast<unsigned>(slot) * 8, parity);\n", ""),
    "window never given back": ("      mbarrier_arrive(empty + static_cast<unsigned>(slot) * 8);\n", ""),
    "rows read over those that are multiplied": ("        wgmma_wait<1>();  // the other rows have been multiplied\n", ""),
    "rows of an odd number of steps": ("batches % 2 != 0)", "batches < 0)"),
    "taps of another input": ("td = first_d + NUMBER(more) /", "td = NUMBER(more) /"),
    "next window loaded over this one": (
        "        mbarrier_wait_patiently(empty + static_cast<unsigned>(slot) * 8, parity ^ 1u);\n",
        "",
    ),
    "weights not waited for": ("      mbarrier_wait(weights_full, weights_parity);\n", ""),
    "weights of the next set over these": ("          mbarrier_wait_patiently(weights_empty, weights_parity ^ 1u);\n", ""),
    "weights announced without their bytes": (
        "mbarrier_arrive_expect(weights_full, static_cast<unsigned>(weight_bytes))",
        "mbarrier_arrive(weights_full)",
    ),
    "sums stored before they are there": ("    wgmma_wait<0>();\n", ""),
    "runs stored before they are there": ("        sync_warpgroup(warpgroup);\n        if (d >=", "        if (d >="),
    "a run one element off": ("shift % 2 != 0", "false"),
    "ends of runs left out": ("const bool has_edge = edge <", "const bool has_edge = false && edge <"),
    "groups mixed": ("tap % kernel_w, end, begin)", "tap % kernel_w, end)"),
    "a team's blocks take the same unit": ("min(team, units % teams) + block % members", "min(team, units % teams)"),
    "bias of another channel": ("eight * 8 + quad * 2 + c", "eight * 8 + quad * 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", BLOCK_MISTAKES)
def test_mistakes_in_blocks_are_found(mistake: str, assert_found: Callable[..., None]) -> None:
    tried = [(seed, problem) for problem in map(Problem.parse, BLOCKS[:6]) for seed in (0, 1)]
    assert_found(kernels()["fprop_stationary_wgmma"], *BLOCK_MISTAKES[mistake], tried, MERGE_GROUPS=1)


@pytest.mark.parametrize("name", ["n1_c16to8_i4x8x16_k3_s2_p1", "n1_c512to8_i4x8x16_k4_s2_p1"])
def test_the_fence_of_a_window_is_in_the_binary(name: str) -> None:
    kernel, problem = kernels()["fprop_implicit_gemm_wgmma"].replace_tunables(LAY_OUT=0), Problem.parse(name)
    assert ptx_of(kernel, "bf16", problem).count("fence.proxy.async") == 1


@pytest.mark.parametrize("dtype", kernels()["fprop_rolling_wgmma"].dtypes)
def test_every_fence_is_in_the_binary(dtype: str) -> None:
    """A compiler once left one out of the three ways to read the input, which no host can notice: it races on a GPU only."""
    kernel = kernels()["fprop_rolling_wgmma"]
    assert ptx_of(kernel, dtype, Problem(2, 32, 32, (8, 16, 32), (3, 3, 3))).count("fence.proxy.async") == 3


def ptx_of(kernel: Kernel, dtype: str, problem: Problem) -> str:
    nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    instance = Instance(kernel, dtype, kernel.plan(problem, dtype).specialization)
    try:
        program = nvrtc.createProgram(device_source(instance), "kernel.cu", (), ())
    except Exception as error:
        pytest.skip(f"NVRTC is not there: {error}")
    nvrtc.compileProgram(program, compiler_options(instance, "compute_90a"))
    ptx = nvrtc.getPTX(program)
    return ptx.decode() if isinstance(ptx, bytes) else ptx
