"""Declarations: what a kernel file says of itself, and the sentence for each mistake in it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from test_architecture import CARDS, FUTURE

from cupy_convt3d import cache, source
from cupy_convt3d.backends.base import Prepared, TensorRef
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.errors import BackendError, CacheWarning, KernelError
from cupy_convt3d.expressions import evaluate
from cupy_convt3d.kernel import Kernel, Limits
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernel, kernels
from cupy_convt3d.source import Instance

TEXT = """/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[constants]
tiles = "ceil_div(output_numel, TILE)"
[restrictions]
"groups == 1" = "it has no groups"
[[launch]]
grid = "tiles"
block = "TILE"
*/
#ifndef TILE
#define TILE 64
#endif
__global__ void trial(const float* __restrict__ input, const float* weight, float* output, const int tiles, int stride_w) {}
"""


def test_a_declaration_is_read() -> None:
    trial = Kernel.from_source(TEXT, "trial")
    plan = trial.plan(Problem(1, 1, 1, 10, 1, stride=3), "fp32")
    assert trial.tunables == {"TILE": 64}
    assert plan.launches[0].grid == (-(-(28**3) // 64), 1, 1) and plan.launches[0].block == (64, 1, 1)
    assert plan.launches[0].scalars == {"tiles": -(-(28**3) // 64), "stride_w": 3}
    assert Instance(trial.replace_tunables(TILE=32), "fp32").defines == ("CONVT3D_FP32", "TILE=32")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("/* convt3d", "/* other", "no declaration"),
        ('pass = "fprop"', 'pass = "forward"', "pass='forward': must be one of fprop, dgrad, wgrad"),
        ('pass = "fprop"', "pass = fprop", "no valid TOML"),
        ('["fp32"]', '["float"]', "dtypes"),
        ("[[launch]]", "[launches]", "unknown keys"),
        ("grid =", "grids =", "unknown keys"),
        ('block = "TILE"', "", "needs a block"),
        ('block = "TILE"', "block = [1, 2, 3, 4]", "one to three"),
        ("float* output", "float* result", "must be named one of input, weight, bias, output"),
        ("int stride_w", "int strides", "no value is known by the name"),
        ("int stride_w", "char stride_w", "scalars are"),
        ("__global__ void", "void", "no `__global__ void` function"),
        ('block = "TILE"', 'block = "TILE"\nsymbol = "other"', "no such"),
    ],
)
def test_mistakes_are_named(old: str, new: str, words: str) -> None:
    with pytest.raises(KernelError, match=words.replace("(", r"\(")):
        Kernel.from_source(TEXT.replace(old, new), "trial")


def test_why_not() -> None:
    trial = Kernel.from_source(TEXT, "trial")
    assert trial.why_not(Problem(1, 1, 1, 3, 1), "fp32") is None
    assert trial.why_not(Problem(1, 2, 2, 3, 1, groups=2), "fp32") == "trial: it has no groups"
    assert "no fp64 instance" in (trial.why_not(Problem(1, 1, 1, 3, 1), "fp64") or "")
    wide = Kernel.from_source(TEXT.replace('block = "TILE"', "block = 2048"), "wide")
    assert "outside the hardware's limit" in (wide.why_not(Problem(1, 1, 1, 3, 1), "fp32") or "")
    int_count = Kernel.from_source(TEXT.replace("int stride_w", "int output_numel"), "trial")
    assert "does not fit" in (int_count.why_not(Problem(1, 1, 1, 1300, 1), "fp32") or "")


@pytest.mark.parametrize(
    "text", ["__import__('os')", "batch.real", "2 ** 9", "lambda: 1", "[x for x in stride]", "batch / 2", "nobody", "batch // 0"]
)
def test_expressions_are_arithmetic_only(text: str) -> None:
    with pytest.raises(KernelError, match="expression"):
        evaluate(text, {"batch": 2, "stride": (1, 1, 1)})


def test_registry() -> None:
    assert {"fprop_scatter", "fprop_gather", "fprop_residue", "fprop_tiled", "dgrad_gather", "wgrad_reduce"} <= set(kernels())
    assert set(kernels("dgrad")) == {"dgrad_gather"}
    with pytest.raises(KernelError, match="not registered; there are"):
        kernel("fprop_nothing")


def test_an_edited_header_makes_a_new_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the `.cu` did not change."""
    header = tmp_path / "include" / "convt3d.cuh"
    header.parent.mkdir()
    header.write_text("// one\n")
    monkeypatch.setenv("CONVT3D_KERNELS", str(tmp_path))
    text = TEXT.replace("*/", '*/\n#include "convt3d.cuh"\n', 1)
    before = Instance(Kernel.from_source(text, "trial"), "fp32").key("host")
    header.write_text("// two!\n")
    assert source.kernel_directory() == tmp_path.resolve()
    assert Instance(Kernel.from_source(text, "trial"), "fp32").key("host") != before


def test_cache_ignores_a_damaged_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVT3D_CACHE", str(tmp_path / "cache"))
    path = cache.store("entry.bin", b"payload")
    assert cache.load("entry.bin") == b"payload" and cache.load("other.bin") is None
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(CacheWarning, match="damaged"):
        assert cache.load("entry.bin") is None


def test_cache_refuses_a_directory_others_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "cache"
    directory.mkdir()
    os.chmod(directory, 0o777)
    monkeypatch.setenv("CONVT3D_CACHE", str(directory))
    with pytest.raises(BackendError, match="writable by you alone"):
        cache.load("entry.bin")


PACKING = """/* convt3d
pass = "fprop"
architectures = ["sm_90a"]
[workspace]
packed_weight = "weight_numel"
[[launch]]
symbol = "pack"
packs = "packed_weight"
grid = 1
block = 1
[[launch]]
symbol = "store"
grid = 1
block = 1
*/
__global__ void pack(const float* weight, float* packed_weight, int weight_numel) {
  for (int i = 0; i < weight_numel; ++i) packed_weight[i] = 2 * weight[i];
}
__global__ void store(const float* packed_weight, float* output) { output[0] = packed_weight[0]; }
"""


def test_packing_is_left_out_where_the_packed_weight_was_kept() -> None:
    kernel, problem = Kernel.from_source(PACKING, "packing"), Problem(1, 1, 1, (1, 1, 1), (1, 1, 1))
    output, weight, kept, space = (np.full(1, value, np.float32) for value in (0, 3, 5, 0))
    tensors = {name: TensorRef(0, (1, 1, 1, 1, 1), (1,) * 5) for name in ("weight", "output")}
    prepared = Prepared(HostBackend(), kernel, problem, "fp32", tensors)
    addresses = {"weight": weight.ctypes.data, "output": output.ctypes.data}
    prepared.launch({**addresses, "packed_weight": space.ctypes.data})
    assert output[0] == 6 and space[0] == 6
    prepared.launch({**addresses, "packed_weight": kept.ctypes.data}, packed=True)
    assert output[0] == 5


def test_packing_reads_the_weight_alone() -> None:
    with pytest.raises(KernelError, match="may take no other tensor than it and the weight"):
        Kernel.from_source(PACKING.replace("pack(const", "pack(const float* input, const"))
    with pytest.raises(KernelError, match="packs='packed': must name a workspace"):
        Kernel.from_source(PACKING.replace('packs = "packed_weight"', 'packs = "packed"'))
    with pytest.raises(KernelError, match="prepares='packed': must name a workspace that pack takes"):
        Kernel.from_source(PACKING.replace('packs = "packed_weight"', 'prepares = "packed"'))


def test_architectures() -> None:
    kernel, problem = Kernel.from_source(PACKING, "packing"), Problem(1, 1, 1, (1, 1, 1), (1, 1, 1))
    assert kernel.why_not(problem, "fp32") is None and kernel.why_not(problem, "fp32", "sm_90a") is None
    assert kernel.why_not(problem, "fp32", "sm_80") == "packing is for sm_90a, not for sm_80"
    assert kernel.why_not(problem, "fp32", "sm_103a") == "packing is for sm_90a, not for sm_103a"
    for wrong in ('["sm_70"]', '["sm_80", "sm_80a"]', "[]", "[80]", '"sm_80"'):
        with pytest.raises(KernelError, match=r"architectures=.*: must be a list of 'sm_80' or a later one \(that and newer\), 'sm_9"):
            Kernel.from_source(PACKING.replace('["sm_90a"]', wrong))


def test_a_kernel_runs_on_what_came_later_than_it_was_declared_for() -> None:
    problem = Problem(1, 1, 1, (1, 1, 1), (1, 1, 1))
    for declared, first in ((None, 0), ('["sm_86"]', 1), ('["sm_90"]', 4), ('["sm_90a", "sm_100"]', 4), ('["sm_80", "sm_90a"]', 0)):
        kernel = Kernel.from_source(PACKING.replace('architectures = ["sm_90a"]\n', f"architectures = {declared}\n" if declared else ""))
        able = [card for card in (*CARDS, FUTURE) if kernel.why_not(problem, "fp32", card) is None]
        assert able == [*CARDS, FUTURE][first:] and [card for card in (*CARDS, FUTURE) if kernel.why_not_on(card) is None] == able
    kernel = Kernel.from_source(PACKING.replace('["sm_90a"]', '["sm_90a", "sm_100"]'))
    assert kernel.why_not(problem, "fp32", "sm_89") == "kernel is for sm_90a, sm_100 and newer, not for sm_89"


def test_static_shared_memory_counts() -> None:
    problem = Problem(1, 1, 1, (1, 1, 1), (1, 1, 1))
    text = PACKING.replace("[workspace]", "static_shared_bytes = 96\n[workspace]").replace("grid = 1", "grid = 1\nshared_bytes = 1000")
    kernel = Kernel.from_source(text)
    assert kernel.why_not(problem, "fp32", None, Limits(1096, 1)) is None
    assert kernel.why_not(problem, "fp32", None, Limits(1095, 1)) == (
        "kernel: a block needs 1096 bytes of shared memory, this GPU gives it 1095"
    )
    for wrong in ("-1", '"96"', "true"):
        with pytest.raises(KernelError, match=r"static_shared_bytes=.*: must be a number of bytes"):
            Kernel.from_source(text.replace("static_shared_bytes = 96", f"static_shared_bytes = {wrong}"))
