"""What must be waited for, fenced or kept until it has been read: small kernels that are right, and what the host says of each mistake."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.errors import LaunchError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem

POINT = Problem(1, 1, 1, (1, 1, 1), (1, 1, 1))
SEEDS = range(12)  # 0: the plain order
BEGIN = """/* convt3d
pass = "fprop"
dtypes = ["tf32"]
{declared}[[launch]]
grid = {blocks}
block = {threads}
*/
#define WGMMA_TILES 1
#include "convt3d.cuh"
"""
# Two stages of A[64][8] and B[8][8], stored by one warpgroup and multiplied by the other; output[64][8] = 4 * stages * input * weight.
STAGES = (
    BEGIN.format(declared='architectures = ["sm_90a"]\n', blocks=1, threads=256)
    + """#include "convt3d/ptx/wgmma_registers.cuh"
__global__ void staged(const scalar_t* input, const scalar_t* weight, scalar_t* output) {
  __shared__ __align__(1024) float a[2][2][64][4], b[2][2][8][4];
  __shared__ __align__(16) unsigned long long barriers[4];
  const unsigned full = shared_address(barriers), empty = full + 16;
  const int thread = threadIdx.x % 128, rounds = 4;
  if (threadIdx.x == 0) {
    for (unsigned i = 0; i < 4; ++i) mbarrier_init(full + i * 8, 128);
    mbarrier_fence_init();
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    for (int s = 0; s < rounds; ++s) {
      mbarrier_wait(empty + s % 2 * 8, s / 2 % 2 ^ 1);
      for (int i = thread; i < 64 * 8; i += 128) a[s % 2][i % 8 / 4][i / 8][i % 4] = (s + 1) * input[i];
      if (thread < 64) b[s % 2][thread % 8 / 4][thread / 8][thread % 4] = weight[thread];
      fence_async();
      mbarrier_arrive(full + s % 2 * 8);
    }
    return;
  }
  float d[4] = {}, sums[4] = {};
  for (int s = 0; s < rounds; ++s) {
    mbarrier_wait(full + s % 2 * 8, s / 2 % 2);
    for (int i = 0; i < 4; ++i) d[i] = -1.0f;
    wgmma_fence();
    wgmma(d, wgmma_operand(shared_address(a[s % 2]), 1024), wgmma_operand(shared_address(b[s % 2]), 128), 1, 8);
    wgmma_commit();
    wgmma_wait<0>();
    mbarrier_arrive(empty + s % 2 * 8);
    for (int i = 0; i < 4; ++i) sums[i] += d[i] + 1.0f;
  }
  const int row = thread / 32 * 16 + thread % 32 / 4;
  for (int i = 0; i < 4; ++i) output[(row + i / 2 * 8) * 8 + thread % 4 * 2 + i % 2] = to_scalar(sums[i]);
}
"""
)
# output[64] = the sum of four stages of input[4][64], two of them on their way.
COPIES = (
    BEGIN.format(declared="", blocks=1, threads=64)
    + """#include "convt3d/pipe/pipeline.cuh"
__global__ void copied(const scalar_t* input, const scalar_t* weight, scalar_t* output) {
  __shared__ __align__(16) float stage[2][64];
  const int thread = threadIdx.x;
  const auto copy = [&](int s) {
    if (s < 4) cp_async<4>(shared_address(&stage[s % 2][thread]), input + s * 64 + thread);
    cp_async_commit();
  };
  copy(0);
  copy(1);
  float sum = 0.0f;
  for (int s = 0; s < 4; ++s) {
    cp_async_wait<1>();
    __syncthreads();
    sum += stage[s % 2][thread ^ 1];
    __syncthreads();
    copy(s + 2);
  }
  output[thread ^ 1] = sum;
}
"""
)
# The same in bulk, by the first thread.
IN_BULK = (
    BEGIN.format(declared="", blocks=1, threads=64)
    + """#include "convt3d/pipe/pipeline.cuh"
__global__ void copied(const scalar_t* input, const scalar_t* weight, scalar_t* output) {
  __shared__ __align__(16) float stage[2][64];
  __shared__ __align__(16) unsigned long long barriers[4];
  const unsigned full = shared_address(barriers), empty = full + 16;
  const int thread = threadIdx.x;
  if (thread == 0) {
    for (unsigned i = 0; i < 2; ++i) mbarrier_init(full + i * 8, 1), mbarrier_init(empty + i * 8, 32);
    mbarrier_fence_init();
  }
  __syncthreads();
  if (thread >= 32) {
    for (int s = 0; thread == 32 && s < 4; ++s) {
      mbarrier_wait(empty + s % 2 * 8, s / 2 % 2 ^ 1);
      mbarrier_arrive_expect(full + s % 2 * 8, 256);
      bulk_copy(shared_address(stage[s % 2]), input + s * 64, 256, full + s % 2 * 8);
    }
    return;
  }
  float sums[2] = {};
  for (int s = 0; s < 4; ++s) {
    mbarrier_wait(full + s % 2 * 8, s / 2 % 2);
    for (int i = 0; i < 2; ++i) sums[i] += stage[s % 2][thread * 2 + i];
    mbarrier_arrive(empty + s % 2 * 8);
  }
  for (int i = 0; i < 2; ++i) output[thread * 2 + i] = sums[i];
}
"""
)
# output[64] = input[64], through shared memory and stored in bulk, twice.
STORED = (
    BEGIN.format(declared="", blocks=2, threads=32)
    + """#include "convt3d/ptx/bulk_store.cuh"
#include "convt3d/pipe/pipeline.cuh"
__global__ void stored(const scalar_t* input, const scalar_t* weight, scalar_t* output) {
  __shared__ __align__(16) float row[32];
  for (int i = 0; i < 2; ++i) {
    row[threadIdx.x] = input[i * 32 + threadIdx.x];
    fence_async();
    __syncwarp();
    if (threadIdx.x == 0) {
      bulk_store(output + i * 32, shared_address(row), 128);
      bulk_commit();
      bulk_wait_read<0>();
    }
    __syncwarp();
  }
}
"""
)
# The first launch fills; in the second two warps read that, each in its way: output[64] = input[64].
FILLED = """/* convt3d
pass = "fprop"
dtypes = ["tf32"]
[workspace]
filled = 64
[[launch]]
symbol = "fill"
prepares = "filled"
grid = 1
block = 64
[[launch]]
symbol = "dependent"
grid = 2
block = 64
*/
#include "convt3d.cuh"
#include "convt3d/ptx/beside_packing.cuh"
#include "convt3d/pipe/pipeline.cuh"
extern "C" __global__ void fill(const scalar_t* input, accum_t* filled) {
  let_next_begin();
  filled[threadIdx.x] = input[threadIdx.x];
}
extern "C" __global__ void dependent(const scalar_t* weight, const accum_t* filled, scalar_t* output) {
  __shared__ __align__(16) float row[32];
  const int thread = threadIdx.x;
  if (thread < 32) {
    wait_for_packing();  // the first warp
    output[thread] = filled[thread];
  } else {
    wait_for_packing();  // the second
    READ
  }
}
"""
BY_LOAD = FILLED.replace("READ", "output[thread] = filled[thread];")
BY_COPY = FILLED.replace(
    "READ",
    "cp_async<4>(shared_address(&row[thread - 32]), filled + thread); cp_async_wait_all(); output[thread] = row[thread - 32];",
)
# By the names that kernels for older cards know.
OLDER = BY_LOAD.replace("let_next_begin", "begin_next").replace("wait_for_packing", "wait_for_launch_before")
OLDER = OLDER.replace('#include "convt3d/pipe', '#include "convt3d/ptx/beside_launches.cuh"\n#include "convt3d/pipe')


def launched(source: str, seed: int) -> bool:
    """Whether the output of a kernel above, in an order of threads, is right."""
    generator = np.random.default_rng(3)
    arrays = {"input": generator.integers(-4, 5, 512), "weight": generator.integers(-4, 5, 64), "output": np.full(512, np.nan)}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    a, b, out = arrays.values()
    expected = out.copy()
    if "void staged" in source:
        expected[:] = (10 * a.reshape(64, 8) @ b.reshape(8, 8).T).ravel()
    else:
        expected[:64] = a[:256].reshape(4, 64).sum(axis=0) if "void copied" in source else a[:64]
    refs = {name: TensorRef(array.__array_interface__["data"][0], (array.size,), (1,)) for name, array in arrays.items()}
    kept = []

    def allocate(name: str, size: int) -> int:
        kept.append(np.zeros(size, np.uint8))
        return int(kept[-1].__array_interface__["data"][0])

    run(HostBackend(optimize=False), Kernel.from_source(source, "small"), POINT, "tf32", refs, allocate, seed=seed)
    return bool(np.array_equal(out, expected, equal_nan=True))


def said_of(source: str) -> list[str]:
    """Return what comes of a kernel in each order: "right", "wrong" or what stopped it."""
    said = []
    for seed in SEEDS:
        try:
            said.append("right" if launched(source, seed) else "wrong")
        except LaunchError as error:
            said.append(str(error))
    return said


RIGHT = {"stages": STAGES, "copies": COPIES, "in bulk": IN_BULK, "stored": STORED, "by load": BY_LOAD, "by copy": BY_COPY}
RIGHT["on older cards"] = OLDER


@pytest.mark.parametrize("source", RIGHT.values(), ids=list(RIGHT))
def test_right_kernels_are_right_in_every_order(source: str) -> None:
    assert said_of(source) == ["right"] * len(SEEDS)


COMMITTED = "    wgmma_commit();\n    wgmma_wait<0>();\n"
MISTAKES = {
    "no wgmma_fence at all": (
        STAGES,
        "    wgmma_fence();\n",
        "",
        "missing fence: wgmma .* registers that were written with no wgmma_fence",
    ),
    "only before the first product": (
        STAGES,
        "    wgmma_fence();\n",
        "    if (s == 0) wgmma_fence();\n",
        "missing fence: wgmma .* registers that were written with no wgmma_fence",
    ),
    "a fence before the registers are written": (
        STAGES,
        "    for (int i = 0; i < 4; ++i) d[i] = -1.0f;\n    wgmma_fence();\n",
        "    wgmma_fence();\n    for (int i = 0; i < 4; ++i) d[i] = -1.0f - s;\n",
        "missing fence: wgmma .* registers that were written with no wgmma_fence",
    ),
    "sums written while the product is in flight": (
        STAGES,
        "    wgmma_commit();\n",
        "    wgmma_commit();\n    d[1] = 0.0f;\n",
        "product in flight: wgmma .* sums that were touched",
    ),
    "sums read while the product is in flight": (
        STAGES,
        "    wgmma_wait<0>();\n    mbarrier_arrive(empty + s % 2 * 8);\n    for (int i = 0; i < 4; ++i) sums[i] += d[i] + 1.0f;\n",
        "    for (int i = 0; i < 4; ++i) sums[i] += d[i] + 1.0f;\n    wgmma_wait<0>();\n    mbarrier_arrive(empty + s % 2 * 8);\n",
        "wrong",
    ),
    "sums of one product overlap another's": (
        STAGES.replace("#define WGMMA_TILES 1", "#define WGMMA_TILES 2").replace("float d[4] = {}", "float d[16] = {}"),
        COMMITTED,
        "    wgmma(d + 2, wgmma_operand(shared_address(a[0]), 1024), wgmma_operand(shared_address(b[0]), 128), 1, 8);\n"
        + COMMITTED,
        "product in flight: wgmma .* registers of another product",
    ),
    "nobody waits for the last product": (
        STAGES,
        "    wgmma_wait<0>();\n",
        "    if (s < 3) wgmma_wait<0>();\n",
        "missing wait: .*wgmma",
    ),
    "operands overwritten in flight": (
        STAGES,
        "    wgmma_commit();\n",
        "    wgmma_commit();\n    if (thread == 0) a[s % 2][0][5][0] += 1.0f;\n",
        "stale stage: wgmma .* was written over before it had ended",
    ),
    "a stage given back before its product is waited for": (
        STAGES,
        "    wgmma_wait<0>();\n    mbarrier_arrive(empty + s % 2 * 8);\n",
        "    mbarrier_arrive(empty + s % 2 * 8);\n    wgmma_wait<0>();\n",
        "stale stage",
    ),
    "no fence_async behind the stores": (STAGES, "      fence_async();\n", "", "missing fence: wgmma .*fence_async"),
    "fence_async for the first stages alone": (
        STAGES,
        "      fence_async();\n",
        "      if (s < 2) fence_async();\n",
        "missing fence: wgmma .*fence_async",
    ),
    "fence_async before the stores": (
        STAGES.replace("      fence_async();\n", ""),
        "      for (int i = thread; i < 64 * 8",
        "      fence_async();\n      for (int i = thread; i < 64 * 8",
        "missing fence: wgmma .*fence_async",
    ),
    "one warp of four without fence_async": (
        STAGES,
        "      fence_async();\n",
        "      if (thread >= 32) fence_async();\n",
        "missing fence: wgmma .*fence_async",
    ),
    "a group of copies too early": (COPIES, "cp_async_wait<1>", "cp_async_wait<2>", "wrong"),
    "copies that nobody waits for": (COPIES, "    cp_async_wait<1>();\n", "", "wrong"),
    "no barrier behind the wait": (
        COPIES,
        "    cp_async_wait<1>();\n    __syncthreads();\n",
        "    cp_async_wait<1>();\n",
        "wrong",
    ),
    "a stage copied over before it is read": (
        COPIES,
        "    __syncthreads();\n    copy(s + 2);\n",
        "    copy(s + 2);\n",
        "wrong",
    ),
    "a bulk copy that nobody waits for": (
        IN_BULK,
        "    mbarrier_wait(full + s % 2 * 8, s / 2 % 2);\n",
        "",
        "wrong|bulk copies",
    ),
    "the other phase of a bulk copy": (IN_BULK, "full + s % 2 * 8, s / 2 % 2)", "full + s % 2 * 8, s / 2 % 2 ^ 1)", "deadlock"),
    "a stage given back before it is read": (
        IN_BULK,
        "    for (int i = 0; i < 2; ++i) sums[i] += stage[s % 2][thread * 2 + i];\n    mbarrier_arrive(empty + s % 2 * 8);\n",
        "    mbarrier_arrive(empty + s % 2 * 8);\n    for (int i = 0; i < 2; ++i) sums[i] += stage[s % 2][thread * 2 + i];\n",
        "wrong",
    ),
    "mbarriers with no fence behind": (
        IN_BULK,
        "    mbarrier_fence_init();\n",
        "",
        "missing fence: bulk copy .*mbarrier_fence_init",
    ),
    "a bulk store with no fence_async": (STORED, "    fence_async();\n", "", "missing fence: bulk_store .*fence_async"),
    "a source written over while it is stored": (
        STORED,
        "      bulk_wait_read<0>();\n",
        "      if (i == 1) bulk_wait_read<0>();\n",
        "stale stage: what the bulk store",
    ),
    "a launch that does not wait": (BY_LOAD, "    wait_for_packing();  // the second\n", "", "wrong"),
    "on older cards a launch that does not wait": (OLDER, "    wait_for_launch_before();  // the second\n", "", "wrong"),
    "a copy that does not wait": (BY_COPY, "    wait_for_packing();  // the second\n", "", "missing wait: .*cp.async"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_said_of_a_mistake(mistake: str) -> None:
    source, right, wrong, says = MISTAKES[mistake]
    assert source.count(right) == 1
    said = said_of(source.replace(right, wrong))
    assert any(re.search(says, one) for one in said), said


def test_an_order_is_replayed_by_its_seed() -> None:
    mistaken = IN_BULK.replace("s / 2 % 2);", "s / 2 % 2 ^ (s == 3));")
    assert said_of(mistaken) == said_of(mistaken)


def test_who_learns_from_another_that_the_launch_before_has_ended_may_read() -> None:
    """One thread waits, and the others meet it at a barrier; where they don't, they read too early."""
    nobody = BY_COPY.replace("    wait_for_packing();  // the first warp\n", "").replace(
        "    wait_for_packing();  // the second\n", ""
    )
    begins = "  if (thread < 32) {"
    assert nobody.count(begins) == 1 and "wait_for" not in nobody
    one = f"  if (thread == 40) wait_for_packing();\n{begins}"
    assert said_of(nobody.replace(begins, one.replace(";\n", ";\n  __syncthreads();\n"))) == ["right"] * len(SEEDS)
    assert all("missing wait" in said or said == "wrong" for said in said_of(nobody.replace(begins, one)))
