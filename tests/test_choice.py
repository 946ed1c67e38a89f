"""Which kernel "auto" takes: the database's, else what is predicted to be the quickest, on every architecture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selection import some
from test_architecture import CARDS, FUTURE

import cupy_convt3d as ct
from cupy_convt3d import choice, cost, registry, tuning
from cupy_convt3d.arrays import Array, CupyLibrary, Device, Library, NumpyLibrary
from cupy_convt3d.backends.base import TensorRef
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.choice import ORDER, choose, decide, is_launch_bound
from cupy_convt3d.cli import main
from cupy_convt3d.dtypes import DTYPES, allowed_instances
from cupy_convt3d.lab.suites import suite
from cupy_convt3d.problem import PASSES, Problem
from cupy_convt3d.source import code_digest
from cupy_convt3d.tuning import Database, Entry

SMALL = Problem(1, 2, 2, 3, 3)
WIDE = Problem(2, 64, 64, 16, 3, padding=1)
LAYERS = {
    "depthwise": Problem(2, 64, 64, 16, 3, padding=1, groups=64),
    "grouped": Problem(2, 32, 32, 16, 3, padding=1, groups=4),
    "patch": Problem(2, 64, 32, 8, 2, 2),
    "one out": Problem(2, 64, 1, 16, 4, 2, 1),
    "few out": Problem(2, 64, 3, 16, 3, padding=1),
    "few out of a patch": Problem(2, 32, 4, 32, 2, 2),
    "few in": Problem(2, 3, 64, 16, 4, 2, 1),
    "few": Problem(2, 16, 8, 16, 3, padding=1),
    "wide": WIDE,
    "large": Problem(4, 48, 48, 48, 3),
}


def on(arch: str | None, shared_limit: int | None = None) -> HostBackend:
    """A backend that says it is on that GPU; nothing is compiled."""
    backend = HostBackend()
    backend.arch, backend.device_name, backend.shared_limit = arch, f"GPU {arch}", shared_limit
    return backend


def card(arch: str) -> HostBackend:
    """The backend on a card of that architecture, with its multiprocessors and its shared memory; one of the future has an H100's."""
    multiprocessors, shared_kib = CARDS.get(arch, CARDS["sm_90a"])
    backend = on(arch, shared_kib << 10)
    backend.multiprocessors = multiprocessors
    return backend


def taken(arch: str | None, problem: Problem, precision: str, pass_name: str = "fprop", limit: int | None = None) -> tuple[str, str]:
    found = choose(on(arch, limit), pass_name, problem, precision)
    assert found.kernel is not None
    return found.kernel.name, found.instance


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of our own, empty, and none that is shipped."""
    monkeypatch.setenv("CONVT3D_TUNING", str(tmp_path / "own.json"))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped.json")
    return tmp_path / "own.json"


def entry(kernel: str, arch: str = "sm_90a", problem: Problem = WIDE, **changes: Any) -> Entry:
    known = registry.kernel(kernel)
    made = Entry(
        f"GPU {arch}", "fprop", str(problem), "tf32", "ncdhw", kernel, code_digest(known), "fp32", dict(known.tunables), 2.0, 3.0
    )
    return replace(made, **changes)


@pytest.mark.parametrize(
    ("layer", "precision", "arch", "instance"),
    [
        ("depthwise", "tf32", "sm_90a", "fp32"),
        ("patch", "bf16", "sm_90a", "bf16"),
        ("wide", "tf32", "sm_90a", "tf32"),
        ("wide", "tf32x3", "sm_90a", "tf32x3"),
        ("wide", "tf32", "sm_120", "tf32"),
        ("wide", "fp16", "sm_80", "fp16"),
        ("large", "fp32", "sm_90a", "fp32"),
        ("large", "fp64", "sm_80", "fp64"),
    ],
)
def test_the_instance_is_the_quickest_that_is_allowed(layer: str, precision: str, arch: str, instance: str) -> None:
    assert taken(arch, LAYERS[layer], precision)[1] == instance


def test_large_layers_get_the_kernels_that_were_written_for_them() -> None:
    """By the costs that ship; no plain kernel comes near to these."""
    plain = {f"fprop_{name}" for name in ("tiled", "residue", "gather")}
    for layer, problem in LAYERS.items():
        for precision in ("fp32", "tf32", "tf32x3", "bf16", "fp16"):
            for arch in ("sm_80", "sm_90a"):
                assert taken(arch, problem, precision)[0] not in plain, f"{layer} {precision} {arch}"
    for precision in ("tf32", "bf16", "fp16"):
        assert taken("sm_90a", LAYERS["wide"], precision)[0].endswith("_wgmma")


def test_the_host_takes_what_is_cheap_to_run_there() -> None:
    assert taken(None, LAYERS["wide"], "tf32") == ("fprop_implicit_gemm_simt", "fp32")
    assert taken(None, LAYERS["wide"], "bf16") == ("fprop_tiled", "bf16")
    assert taken(None, LAYERS["patch"], "fp32") == ("fprop_patch", "fp32")
    for pass_name, names in ORDER.items():
        assert set(names) <= set(registry.kernels(pass_name))


@pytest.mark.parametrize("arch", some([None, *CARDS, FUTURE]))
@pytest.mark.parametrize("pass_name", PASSES)
def test_every_named_problem_gets_a_deterministic_kernel_in_an_allowed_instance(pass_name: str, arch: str | None) -> None:
    backend = on(arch) if arch is None else card(arch)
    for problem in suite("named").values():
        for precision in DTYPES:
            found = choose(backend, pass_name, problem, precision)
            assert found.kernel is not None and found.kernel.deterministic
            assert found.instance in allowed_instances(precision)
            assert backend.why_not(found.kernel, problem, found.instance) is None


@pytest.mark.parametrize("arch", CARDS)
def test_nothing_asks_for_more_shared_memory_than_the_card_gives_a_block(arch: str) -> None:
    backend, refused = card(arch), 0
    assert backend.shared_limit is not None
    for kernel in registry.kernels().values():
        for problem in (suite("named") | suite("few_channels")).values():
            for dtype in kernel.dtypes:
                reason = backend.why_not(kernel, problem, dtype)
                if reason is None:
                    plan = kernel.plan(problem, dtype, backend.multiprocessors)
                    needed = max(launch.shared_bytes for launch in plan.launches) + kernel.static_shared_bytes
                    assert needed <= backend.shared_limit, f"{kernel.name} {problem} {dtype}"
                refused += "of shared memory, this GPU gives it" in (reason or "")
    assert (refused > 0) == (backend.shared_limit < 227 << 10), "some kernels were written for what an H100 gives"


def test_the_last_bytes_are_for_static_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launch asks for is all that an A100 gives a block; the kernel's `__shared__` variables take 96 bytes more."""
    problem, kernel = suite("named")["swinunetr_192to96_n1"], registry.kernel("fprop_implicit_gemm_mma")
    assert max(launch.shared_bytes for launch in kernel.plan(problem, "bf16", 108).launches) == 163 << 10
    monkeypatch.setattr(choice, "backend_for", lambda *_: card("sm_80"))
    with pytest.raises(ct.KernelError, match="a block needs 167008 bytes of shared memory, this GPU gives it 166912"):
        decide("fprop", problem, given(NumpyLibrary(), "cpu", problem=problem), kernel.name, "tf32", "host")


@pytest.mark.parametrize("arch", ["sm_86", "sm_89"])
def test_a_card_takes_what_those_before_it_take(arch: str) -> None:
    for layer in LAYERS.values():
        for precision in DTYPES:
            assert taken(arch, layer, precision) == taken("sm_80", layer, precision)


def test_what_the_order_ends_with_takes_every_problem() -> None:
    odd = Problem(1, 3, 3, (2, 3, 2), (1, 2, 3), (3, 5, 1), (0, 1, 2), dilation=(7, 1, 3))
    for names in ORDER.values():
        assert all(registry.kernel(names[-1]).why_not(odd, dtype) is None for dtype in ("fp64", "fp32", "fp16", "bf16"))


def test_shared_memory_that_the_gpu_has_not_is_held_against_every_candidate() -> None:
    large = choose(on("sm_90a", 227 << 10), "fprop", WIDE, "tf32")
    small = choose(on("sm_90a", 99 << 10), "fprop", WIDE, "tf32")
    left_out = {one.kernel.name for one in large.candidates} - {one.kernel.name for one in small.candidates}
    assert "fprop_rolling_wgmma" in left_out
    assert taken("sm_90a", WIDE, "tf32", limit=1 << 10)[0] in ("fprop_tiled", "fprop_residue", "fprop_gather")


def test_the_limit_is_held_against_the_plan_for_this_gpus_multiprocessors() -> None:
    """Their number decides the tile."""
    patch, problem = registry.kernel("fprop_patch_mma"), LAYERS["patch"]
    needed = {count: max(launch.shared_bytes for launch in patch.plan(problem, "tf32", count).launches) for count in (3, 1000)}
    assert needed[3] < needed[1000]
    backend = on("sm_80", needed[3])
    assert backend.why_not(patch, problem, "tf32") is None
    backend.multiprocessors = 1000
    assert f"a block needs {needed[1000]} bytes" in (backend.why_not(patch, problem, "tf32") or "")
    assert choose(backend, "fprop", problem, "tf32").kernel is not patch


def test_the_limit_holds_for_the_database_and_for_a_kernel_by_name(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Database([entry("fprop_rolling_wgmma", instance="tf32")]).save(own)
    assert choose(on("sm_90a"), "fprop", WIDE, "tf32").tuned is not None
    assert choose(on("sm_90a", 99 << 10), "fprop", WIDE, "tf32").tuned is None
    monkeypatch.setattr(choice, "backend_for", lambda *_: on("sm_90a", 99 << 10))
    with pytest.raises(ct.KernelError, match="this GPU gives it 101376"):
        decide("fprop", WIDE, given(NumpyLibrary(), "cpu"), "rolling_wgmma", "tf32", "host")


def test_what_was_measured_comes_first_and_at_once(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = replace(WIDE, batch=4)
    assert taken("sm_90a", WIDE, "tf32")[0] != "fprop_tiled"
    Database([entry("fprop_tiled", tunables={**registry.kernel("fprop_tiled").tunables, "TILE_DEPTH": 16})]).save(own)
    found = choose(on("sm_90a"), "fprop", WIDE, "tf32")
    assert found.kernel is not None and (found.kernel.name, found.instance) == ("fprop_tiled", "fp32")
    assert found.kernel.tunables["TILE_DEPTH"] == 16
    assert found.steps == ("database: the quickest on this very problem, 3 ms on GPU sm_90a",), "packing is in the time"
    assert choose(on("sm_90a"), "fprop", WIDE, "tf32", packed=True).steps[0].endswith("2 ms on GPU sm_90a")
    assert choose(on("sm_90a"), "fprop", near, "tf32").tuned is None, "a measurement is of its very problem"
    for other in (("sm_80", "tf32", "ncdhw"), ("sm_90a", "bf16", "ncdhw"), ("sm_90a", "tf32", "channels_last")):
        assert choose(on(other[0]), "fprop", WIDE, *other[1:]).tuned is None
    Database([entry("fprop_residue", device=HostBackend().device_name, problem=str(SMALL))]).save(own)
    assert main(["info", "--why", str(SMALL)]) == 0
    out = capsys.readouterr().out
    if f'algorithm="auto" on {HostBackend().device_name} (host):' in out:  # where there is no GPU
        assert "fprop tf32 ncdhw: fprop_residue [fp32]\n    database: the quickest on this very problem, 3 ms" in out
        assert "fprop tf32 channels_last: fprop_gather [fp32]\n    database: nothing" in out


def test_info_asks_the_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cupy_convt3d.lab.bench.provenance.backend_named", lambda _: card("sm_86"))
    monkeypatch.setattr("cupy_convt3d.backends.cuda.available", lambda: True)
    monkeypatch.setattr("cupy_convt3d.backends.cuda.CudaBackend", lambda: card("sm_86"))
    problem = suite("named")["kb61"]
    assert main(["info", "--why", str(problem)]) == 0
    out = capsys.readouterr().out
    assert "GPU:         GPU sm_86 (sm_86), 82 multiprocessors, 99 KiB of shared memory for a block\n" in out
    assert "fprop  tf32, tf32x3, bf16, fp16  sm_80 and newer  deterministic" in out and "bf16, fp16  sm_90a  deterministic" in out
    assert f"    {problem} tf32: yes\n    {problem} tf32x3: fprop_implicit_gemm_mma: a block needs 112128 bytes of shared memory" in out
    assert f"    {problem} tf32: fprop_rolling_wgmma is for sm_90a, not for sm_86\n" in out
    assert 'algorithm="auto" on GPU sm_86 (sm_86):' in out


def test_a_card_that_was_not_measured_takes_what_is_known_of_its_kind(own: Path) -> None:
    h100, h200 = tuning.MEASURED["sm_90a"]
    on_h200 = entry("fprop_tiled", device=h200)
    Database([on_h200]).save(own)
    for arch, device in (("sm_90a", h200), ("sm_80", None), ("sm_100a", None)):
        tuned = choose(on(arch), "fprop", WIDE, "tf32").tuned
        assert (tuned.device if tuned else None) == device
    Database([on_h200, entry("fprop_gather", device=h100)]).save(own)
    assert taken("sm_90a", WIDE, "tf32")[0] == "fprop_gather", "the first of them that knows"
    Database([on_h200, entry("fprop_gather", device=h100), entry("fprop_residue")]).save(own)
    assert taken("sm_90a", WIDE, "tf32")[0] == "fprop_residue", "the card's own comes first"


def test_a_seen_problem_is_one_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = on("sm_90a")
    first = choose(backend, "fprop", WIDE, "tf32")
    monkeypatch.setattr(registry, "kernels", None)
    monkeypatch.setattr(tuning, "lookup", None)
    assert choose(on("sm_90a"), "fprop", Problem.parse(str(WIDE)), "tf32") is first


def test_a_kernel_registered_in_this_process_is_taken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_own", {})
    found = choose(on("sm_80"), "fprop", WIDE, "fp32")
    before = found.kernel
    assert before is not None
    mine = ct.Kernel.from_source(registry.kernel(before.name).source, before.name)
    registry.register(mine, replace=True)
    after = choose(on("sm_80"), "fprop", WIDE, "fp32").kernel
    assert after is not None and after.name == before.name and after.tunables == before.tunables
    assert after is mine or after.source is mine.source
    assert after is not before
    atomic = ct.Kernel.from_source(registry.kernel("fprop_scatter").source, before.name)
    registry.register(atomic, replace=True)
    assert taken("sm_80", WIDE, "fp32")[0] == found.candidates[1].kernel.name, "not deterministic"


def given(library: Library, device: str, layout: str = "ncdhw", problem: Problem = WIDE) -> dict[str, Array]:
    """Arrays of a problem that have no memory."""
    shapes = {"input": problem.input_shape, "weight": problem.weight_shape}
    arrays = {}
    for name, shape in shapes.items():
        strides = [1] * 5
        axes = (1, 4, 3, 2, 0) if layout == "channels_last" and name == "input" else (4, 3, 2, 1, 0)
        step = 1
        for axis in axes:
            strides[axis], step = step, step * shape[axis]
        arrays[name] = Array(name, None, TensorRef(0, shape, tuple(strides)), "fp32", Device(device), library)
    return arrays


def test_the_layout_and_whether_packing_counts_follow_the_arrays(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    assert torch
    Database([
        entry("fprop_tiled", median_ms=1.0, with_packing_ms=9.0),
        entry("fprop_residue", median_ms=8.0, with_packing_ms=2.0),
        entry("fprop_gather", layout="channels_last"),
    ]).save(own)  # fmt: skip
    monkeypatch.setattr(choice, "backend_for", lambda *_: on("sm_90a"))

    def name(library: Library, layout: str, packed: bool = False) -> str:
        kernel = decide("fprop", WIDE, given(library, "cuda", layout), "auto", "tf32", "cuda", packed).kernel
        assert kernel is not None
        return kernel.name

    assert name(ct.arrays.TorchLibrary(), "ncdhw", packed=True) == "fprop_tiled", "the packed weight is kept"
    assert name(ct.arrays.TorchLibrary(), "ncdhw") == name(CupyLibrary(), "ncdhw") == "fprop_residue", "packed in each call"
    assert name(CupyLibrary(), "channels_last") == "fprop_gather"


def test_torchs_plans_follow_what_is_tuned_and_registered_in_this_process(
    own: Path, monkeypatch: pytest.MonkeyPatch, new_plans: None
) -> None:
    torch = pytest.importorskip("torch")
    from cupy_convt3d import torch_plan

    planned: list[ct.Kernel] = []
    init = torch_plan._KernelPlan.__init__

    def spy(plan: Any, kernel: ct.Kernel, *rest: Any) -> None:
        planned.append(kernel)
        init(plan, kernel, *rest)

    monkeypatch.setattr(torch_plan._KernelPlan, "__init__", spy)
    monkeypatch.setattr(registry, "_own", {})
    x, w = torch.ones(SMALL.input_shape, dtype=torch.float16), torch.ones(SMALL.weight_shape, dtype=torch.float16)

    def kernel(**options: Any) -> ct.Kernel:
        for _ in range(2):
            ct.conv_transpose3d(x, w, backend="host", **options)
        (made,) = planned
        planned.clear()
        return made

    assert kernel().name == "fprop_gather"
    Database([entry("fprop_residue", device=HostBackend().device_name, problem=str(SMALL), precision="fp16", instance="fp16")]).save(own)
    assert kernel().name == "fprop_residue"
    assert kernel(algorithm="gather").name == "fprop_gather"
    mine = ct.Kernel.from_source(registry.kernel("fprop_gather").source, "fprop_gather")
    registry.register(mine, replace=True)
    assert kernel(algorithm="gather") is mine


LAUNCH_BOUND = Problem(1, 4, 4, 4, 3)


@pytest.mark.parametrize(
    ("problem", "pass_name", "itemsize", "small"),
    [
        (LAUNCH_BOUND, "fprop", 4, True),
        (LAUNCH_BOUND, "dgrad", 8, True),
        (LAUNCH_BOUND, "wgrad", 8, False),
        (Problem(1, 16, 16, 8, 2, 2), "fprop", 4, True),  # 2**21 FLOP
        (Problem(2, 16, 16, 8, 2, 2), "fprop", 2, True),  # 2**22 FLOP
        (Problem(3, 16, 16, 8, 2, 2), "fprop", 2, False),  # FLOP
        (Problem(1, 1, 1, 63, 1), "fprop", 2, True),
        (Problem(1, 1, 1, 65, 1), "fprop", 2, False),  # bytes
        (Problem(1, 1, 1, 63, 1), "fprop", 4, False),  # bytes
        (Problem(1, 128, 2, 1, 1), "fprop", 4, True),
        (Problem(1, 129, 2, 1, 1), "fprop", 4, False),  # products a sum
        (Problem(1, 129, 2, 1, 1), "dgrad", 4, True),
        (Problem(1, 2, 129, 1, 1), "dgrad", 4, False),  # products a sum
        (WIDE, "fprop", 4, False),
    ],
)
def test_what_is_launch_bound(problem: Problem, pass_name: str, itemsize: int, small: bool) -> None:
    assert is_launch_bound(problem, pass_name, itemsize) == small


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("pass_name", ["fprop", "dgrad"])
def test_a_launch_bound_problem_gets_a_plain_kernel(pass_name: str, precision: str) -> None:
    found = choose(on("sm_90a"), pass_name, LAUNCH_BOUND, precision)
    assert found.kernel is not None and found.launch_bound
    plan = found.kernel.plan(LAUNCH_BOUND, found.instance)
    assert len(plan.launches) == 1
    assert not any(launch.packs for launch in plan.launches) and not plan.specialization
    larger = Problem(1, 8, 8, 8, 2, 2)
    assert choose(on("sm_90a"), pass_name, larger, precision).launch_bound
    assert not choose(on(None), pass_name, larger, precision).launch_bound, "a CPU computes this far longer than it launches"
    assert choose(on(None), pass_name, Problem(1, 2, 2, 4, 3, 2), precision).launch_bound
    deep = Problem(1, 256, 256, 1, 1)
    assert choose(on(None), pass_name, deep, precision).launch_bound and not choose(on("sm_90a"), pass_name, deep, precision).launch_bound


def test_a_launch_bound_problem_of_torchs_tensors_is_left_to_torch(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A call of torch's costs the host less than one of ours."""
    pytest.importorskip("torch")
    gpu = on("sm_90a")
    monkeypatch.setattr(choice, "backend_for", lambda *_: gpu)
    monkeypatch.setattr("cupy_convt3d.lab.bench.provenance.backend_named", lambda _: gpu)

    def chosen(library: Library) -> ct.Kernel | None:
        return decide("fprop", LAUNCH_BOUND, given(library, "cuda", problem=LAUNCH_BOUND), "auto", "tf32", None).kernel

    assert chosen(ct.arrays.TorchLibrary()) is None
    assert chosen(CupyLibrary()) is registry.kernel("fprop_gather")
    assert main(["info", "--why", str(LAUNCH_BOUND)]) == 0
    why = capsys.readouterr().out.split("  fprop tf32 ncdhw: ")[1].split("  fprop tf32 channels_last: ")[0]
    assert "costs its launch and little more: at most 4194304 FLOP (262144 on a CPU), 1048576 bytes and on a GPU 128 products a sum" in why
    assert "torch's own operator" in why and "queueing torch's operator costs the host no more" in why
    measured = entry("fprop_tiled", problem=LAUNCH_BOUND, median_ms=0.01, with_packing_ms=0.01)
    library = replace(measured, kernel="library", digest="", median_ms=0.02, with_packing_ms=0.02)
    Database([measured, library]).save(own)
    assert chosen(ct.arrays.TorchLibrary()) is registry.kernel("fprop_tiled"), "what was measured counts for more"


@pytest.mark.parametrize(("library_ms", "left"), [(None, True), (0.5, True), (2.0, False)])
@pytest.mark.parametrize("pass_name", PASSES)
def test_torchs_cuda_tensors_get_a_kernel_where_it_was_measured_to_be_quicker(
    pass_name: str, library_ms: float | None, left: bool, own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    gpu = on("sm_90a")
    monkeypatch.setattr(choice, "backend_for", lambda *_: gpu)
    monkeypatch.setattr(cost, "SHIPPED", own.with_name("no costs.json"))
    ours = registry.kernel(ORDER[pass_name][-1])

    def chosen(library: Library, backend: str | None, algorithm: str = "auto") -> ct.Kernel | None:
        return decide(pass_name, WIDE, given(library, "cuda"), algorithm, "ieee", backend).kernel

    assert chosen(ct.arrays.TorchLibrary(), None) is None, "nothing was measured"
    assert chosen(ct.arrays.TorchLibrary(), "cuda") is not None
    described = {"device": gpu.device_name, "pass_name": pass_name, "problem": str(WIDE), "precision": "fp32", "instance": "fp32"}
    entries = [entry(ours.name, **described, median_ms=1.0, with_packing_ms=1.0)]
    if library_ms is not None:
        entries.append(replace(entries[0], kernel="library", digest="", median_ms=library_ms, with_packing_ms=library_ms))
    Database(entries).save(own)
    assert chosen(ct.arrays.TorchLibrary(), None) is (None if left else ours)
    assert chosen(ct.arrays.TorchLibrary(), "torch") is None
    for library, backend in ((ct.arrays.TorchLibrary(), "cuda"), (CupyLibrary(), None)):
        assert chosen(library, backend) is ours
    assert chosen(ct.arrays.TorchLibrary(), None, ours.name) is ours


def test_torchs_tensors_fall_back_on_torch_where_no_kernel_can(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(choice, "backend_for", lambda *_: on("sm_75"))
    fallen = decide("fprop", WIDE, given(ct.arrays.TorchLibrary(), "cuda"), "auto", "ieee", None)
    assert (fallen.kernel, fallen.backend) == (None, "torch")
    for library, backend in ((ct.arrays.TorchLibrary(), "cuda"), (CupyLibrary(), None)):
        with pytest.raises(ct.KernelError, match=r"fprop_gather is for sm_80 and newer, not for sm_75"):
            decide("fprop", WIDE, given(library, "cuda"), "auto", "ieee", backend)


def test_fp32_precision_follows_torch() -> None:
    torch = pytest.importorskip("torch")
    array = ct.arrays.read("input", torch.zeros(1))
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        for setting, meaning in (("none", "ieee"), ("ieee", "ieee"), ("tf32", "tf32")):
            torch.backends.cudnn.conv.fp32_precision = setting
            assert choice._fp32_precision(None, array) == meaning
            assert choice._fp32_precision("tf32x3", array) == "tf32x3"
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def test_nvidias_switch_for_tf32_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA_TF32_OVERRIDE=0 keeps NVIDIA's libraries from TF32, whatever a program sets."""
    torch = pytest.importorskip("torch")
    array = ct.arrays.read("input", torch.zeros(1))
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        assert choice._fp32_precision(None, array) == "tf32"
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        assert choice._fp32_precision(None, array) == "ieee"
        assert choice._fp32_precision("tf32", array) == "tf32", "asked for by the call"
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def test_the_refusal_of_a_kernel_by_name_is_of_the_instance_it_has() -> None:
    arrays = given(NumpyLibrary(), "cpu")
    with pytest.raises(ct.KernelError, match="it is for kernel = stride"):
        decide("fprop", WIDE, arrays, "patch", "tf32", None)
    with pytest.raises(ct.KernelError, match="has no fp32 instance"):
        decide("fprop", WIDE, arrays, "implicit_gemm_mma", "ieee", None)
    assert decide("fprop", WIDE, arrays, "implicit_gemm_mma", "tf32x3", None).instance == "tf32x3"
    assert decide("fprop", WIDE, arrays, "gather", "tf32", None).instance == "fp32"


def test_what_spreads_nan_is_left_to_others(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that does was measured to be the quickest, for a problem and in a heuristic alike; another one counts."""
    kernel, problem = registry.kernel("fprop_stationary_wgmma"), Problem.parse("n4_c32to32_i8x16x32_k3_s2_p1_g4")
    assert kernel.replace_tunables(MERGE_GROUPS=1).why_spreads_nan(problem, "bf16") is None, "no kernel that ships does"
    monkeypatch.setattr(ct.Kernel, "why_spreads_nan", lambda self, *_: "so" if self.tunables.get("MERGE_GROUPS") else None)
    backend = on("sm_90a")
    key = (backend.device_name, "fprop", str(problem), "bf16", "ncdhw", kernel.name, tuning.code_digest(kernel), "bf16")
    database = tuning.Database()
    database.record(tuning.Entry(*key, {"MERGE_GROUPS": 1}, 1e-3, 1e-3))
    database.save(own)
    assert choose(backend, "fprop", problem, "bf16").tuned is None
    database.record(tuning.Entry(*key, {"MERGE_GROUPS": 0}, 1e-3, 1e-3))
    database.save(own)
    tuned = choose(backend, "fprop", problem, "bf16").tuned
    assert tuned is not None and tuned.kernel.name == kernel.name
    monkeypatch.undo()
    source = registry.kernel("fprop_gather").source
    spreading = ct.Kernel.from_source(source.replace("[[launch]]", '[spreads_nan]\n"1" = "so"\n[[launch]]', 1))
    assert spreading.why_spreads_nan(problem, "fp32") == "it spreads NaN: so"


@pytest.mark.parametrize(("of_weight", "expected"), [("contiguous_format", "ncdhw"), ("channels_last_3d", "channels_last")])
def test_the_weight_tells_the_layout_where_a_volume_has_both(
    monkeypatch: pytest.MonkeyPatch, of_weight: str, expected: str
) -> None:
    """One voxel an image, as the first layer of a generator has it: its strides are those of either layout."""
    torch = pytest.importorskip("torch")
    asked: list[str] = []
    choose = choice.choose
    monkeypatch.setattr(choice, "choose", lambda *given, **more: asked.append(given[4]) or choose(*given, **more))
    x = torch.ones(2, 8, 1, 1, 1)
    w = torch.ones(8, 4, 4, 4, 4).contiguous(memory_format=getattr(torch, of_weight))
    y = ct.conv_transpose3d(x, w, backend="host")
    assert asked == [expected]
    assert y.is_contiguous(memory_format=getattr(torch, of_weight))
