"""`convt3d tune --carry-on`: which entries of the tuning database outlive a change of the sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cupy_convt3d import source
from cupy_convt3d.errors import BackendError, DataError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.tune import carry
from cupy_convt3d.lab.tune.carry_child import instructions, sections
from cupy_convt3d.source import PACKAGE, Instance, code_digest
from cupy_convt3d.tuning import LIBRARY, Database, Entry

SOURCE = """/* convt3d
pass = "fprop"
[specialize]
TAPS = "taps"
[[launch]]
symbol = "NAME"
grid = "ceil_div(output_numel, 64)"
block = 64
*/
#include "factor.cuh"
#ifndef TAPS
#define TAPS 1
#endif
extern "C" __global__ void NAME(const float* input, float* output, long long output_numel) {
  const long long i = blockIdx.x * 64LL + threadIdx.x;
  if (i < output_numel) output[i] = input[0] * (FACTOR * TAPS);
}
"""
HEADER = "#pragma once\n#define FACTOR 3.0f\n"
GRID = '"ceil_div(output_numel, 64)"'
LAUNCHED_NEVER = """[[launch]]
symbol = "never"
when = "taps > 99"
grid = 1
block = 1
*/
extern "C" __global__ void never(float* output) { output[0] = 1.0f; }
"""
# What becomes of a kernel's text, and what of its entries; None: they are carried on.
CHANGES: dict[str, tuple[tuple[str, str], str | None]] = {
    "comment": (("  const long long i", "  // the output's\n\n  const long long i"), None),
    "same_code": (("FACTOR * TAPS", "TAPS * FACTOR"), None),
    "table": (('#include "factor.cuh"', '#include "factor.cuh"\nconstexpr int TABLE[2] = {3, 4};'), None),
    "constant": (("FACTOR * TAPS", "FACTOR * (TAPS + 1)"), r"^\.text\.constant: \d+ bytes became others$"),
    "moved": (('"own.cuh"', '"core/own.cuh"'), None),
    "rule": (("[[launch]]", '[restrictions]\n"batch < 9" = "it is small"\n[[launch]]'), None),
    "grid": ((GRID, '"ceil_div(output_numel, 32)"'), r"^launches: grid \[21, 1, 1\] became \[42, 1, 1\]$"),
    "last_number": (("output_numel) {", "output_numel, int taps) {"), None),
    "read_number": (("output_numel) {", "output_numel, int taps) {\n  if (taps > 99) return;"), r"^\.text\.read_number: \d+ bytes became"),
    "first_number": (("const float* input,", "int taps, const float* input,"), r"^launches: scalars .* became \{'taps': 27, "),
    "idle": (("*/", LAUNCHED_NEVER), None),
    "refused": (("input[0]", "inputs[0]"), r"(?s)^now: CompileError: .*inputs"),
    "gone": (("", ""), r"^there is no such kernel any more$"),
}


def tree(folder: Path, kernels: Mapping[str, str], header: str = HEADER) -> Path:
    """Make a folder with this package and other kernels."""
    (folder / "kernels" / "include").mkdir(parents=True)
    (folder / "cupy_convt3d").symlink_to(PACKAGE)
    (folder / "kernels" / "include" / "convt3d.cuh").write_text("")
    (folder / "kernels" / "include" / "factor.cuh").write_text(header)
    for name, text in kernels.items():
        (folder / "kernels" / f"{name}.cu").write_text(text)
    return folder


def entries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """An entry of each kernel there, with the digest that it has there."""
    with monkeypatch.context() as there:
        there.setenv("CONVT3D_KERNELS", str(folder / "kernels"))
        kernels = [Kernel.from_file(path) for path in sorted((folder / "kernels").glob("*.cu"))]
        digests = {kernel.name: code_digest(kernel) for kernel in kernels}
    return [entry(name, digest) for name, digest in digests.items()]


def entry(kernel: str, digest: str) -> Entry:
    where = ("NVIDIA H100 80GB HBM3", "fprop", "n1_c1to1_i6_k3_s2_p1", "fp32", "ncdhw")
    return Entry(*where, kernel, digest, "fp32", {}, 1.0, 1.0)


@pytest.mark.nvrtc
def test_entries_outlive_what_changes_no_machine_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    texts = {name: SOURCE.replace("NAME", name) for name in CHANGES}
    texts["rule"] = texts["rule"].replace('#include "factor.cuh"', "#define FACTOR 3.0f")
    texts["moved"] = texts["moved"].replace("factor.cuh", "own.cuh")
    before = tree(tmp_path / "before", texts)
    (before / "kernels/include/own.cuh").write_text("// here\n" + HEADER)
    changed = {name: texts[name].replace(*change, 1) for name, (change, _) in CHANGES.items() if name != "gone"}
    after = tree(tmp_path / "after", changed, HEADER + "#define UNUSED 1\n")
    (after / "kernels/include/core").mkdir()
    (after / "kernels/include/core/own.cuh").write_text(HEADER + "// there")
    old = entries(before, monkeypatch)
    new = {e.kernel: e.digest for e in entries(after, monkeypatch)}
    foreign = replace(next(e for e in old if e.kernel == "grid"), device="GPU Z")
    others = [foreign, entry("stale", "0"), entry("grid", new["grid"]), entry(LIBRARY, "")]
    others[1:] = [replace(e, problem="n1_c1to1_i4_k3_s2") for e in others[1:]]
    path = tmp_path / "tuning.json"
    Database([*old, *others]).save(path)

    found = carry.carry_on(str(before), [path], after=after, workers=1)

    left = {e.kernel if e.device != "GPU Z" else e.device: why for e, why in found.left}
    for name, (_, why) in CHANGES.items():
        assert (name in found.carried) == (why is None), left.get(name)
        assert why is None or re.search(why, left.pop(name))
    assert list(left) == ["GPU Z"] and "known are NVIDIA H100 80GB HBM3, NVIDIA H200" in left["GPU Z"]
    assert (found.current, found.stale, found.compiled) == (1, 1, 8)  # not what has the same text or other launches
    kept = {(e.kernel, e.device, e.problem): e for e in Database.read(path).entries()}
    for e in [*old, *others]:
        digest = new[e.kernel] if e.kernel in found.carried else e.digest
        assert kept[e.kernel, e.device, e.problem] == replace(e, digest=digest)
    assert "LEFT constant [fp32]" in carry.summary(found)


def test_binaries_of_another_compiler_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    other, compiler = tmp_path / "cupy_convt3d", tmp_path / "cupy" / "cuda"
    for folder in (other, compiler):
        folder.mkdir(parents=True)
    for init in (other, compiler, compiler.parent):
        (init / "__init__.py").write_text("")
    (other / "registry.py").write_text("def kernels():\n    return {}\n")
    (other / "source.py").write_text("def code_digest(kernel):\n    return ''\n")
    (compiler / "nvrtc.py").write_text("def getVersion():\n    return 11, 8\n")
    with pytest.raises(DataError, match=r"machine code of NVRTC 11\.8 there cannot be compared with that of NVRTC \d"):
        carry.carry_on(str(tmp_path), [tmp_path / "tuning.json"])
    (other / "source.py").write_text("")
    with pytest.raises(BackendError, match="cannot import name 'code_digest'"):
        carry.carry_on(str(tmp_path), [tmp_path / "tuning.json"])
    with pytest.raises(DataError, match="'--version': is no revision of a clone"):
        carry.revision("--version")


@pytest.mark.nvrtc
def test_lines_are_no_machine_code() -> None:
    """Of a cubin with line numbers only what runs is compared."""
    nvrtc = pytest.importorskip("cupy_convt3d.backends.nvrtc")
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    text = SOURCE.replace("NAME", "lines").replace('#include "factor.cuh"', "#define FACTOR 3.0f")
    shifted = text.replace("  const", "\n\n  const")
    cubins = [nvrtc.compile_cubin(Instance(Kernel.from_source(t, "lines"), "fp32"), "sm_90a")[0] for t in (text, shifted)]
    assert cubins[0] != cubins[1] and sections(cubins[0]) == sections(cubins[1])
    assert {".text.lines", ".nv.constant0.lines"} <= sections(cubins[0]).keys()


def test_a_parameter_behind_all_others_that_nothing_names_is_no_instruction() -> None:
    body = ")\n{\n.loc 1 2\nld.param.u64 %rd1, [f_param_1];\nret;\n}"
    before = f".visible .entry f(\n.param .u32 f_param_0,\n.param .u64 f_param_1\n{body}"
    more = before.replace("f_param_1\n)", "f_param_1,\n.param .align 8 .b8 f_param_2[48],\n.param .u32 f_param_3\n)")
    assert instructions(before) == instructions(more) and ".param .u32 f_param_0" in instructions(before)
    named = more.replace("ret;", "ld.param.u32 %r1, [f_param_3];\nret;")
    assert instructions(named) != instructions(before)
    assert instructions(before.replace(".param .u32 f_param_0,\n", "")) != instructions(before), "what is ahead moves the others"


def test_a_revision_of_a_clone_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (PACKAGE.parent / ".git").exists():
        pytest.skip("no clone")
    monkeypatch.setenv("CONVT3D_CACHE", str(tmp_path))
    folder = carry.revision("HEAD")
    assert (folder / "cupy_convt3d" / "source.py").is_file() and (folder / "kernels" / "include" / "convt3d.cuh").is_file()
    assert carry.revision("HEAD") == folder and source.include_directory() != folder / "kernels" / "include"
