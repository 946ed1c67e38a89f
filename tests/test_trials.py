"""Trials at the first call: who is timed, who wins, what is remembered, when there is none. The GPU is the host, its clock a list."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cupy_convt3d as ct
from cupy_convt3d import choice, registry, trials, tuning
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.errors import CacheWarning, LaunchError
from cupy_convt3d.kernel import Kernel, Plan
from cupy_convt3d.source import Instance
from cupy_convt3d.tuning import LIBRARY, Database

torch = pytest.importorskip("torch")
from cupy_convt3d import torch_plan  # noqa: E402
from cupy_convt3d.torch_layer import CAST_MS, RECORDING_CAST_MS, RECORDING_MS  # noqa: E402
from cupy_convt3d.torch_plan import _KernelPlan  # noqa: E402

LAYER = {"stride": 2, "padding": 1}
OPERANDS = torch.linspace(-1, 1, 32 * 6 * 8 * 8).reshape(1, 32, 6, 8, 8), torch.linspace(-1, 1, 32 * 32 * 27).reshape(32, 32, 3, 3, 3)


class Gpu(HostBackend):
    """The host, by the name and the architecture of an H100."""

    device_name, arch, multiprocessors, shared_limit = "NVIDIA H100 80GB HBM3", "sm_90a", 132, 227 << 10
    clock_hz, memory_bytes_per_s = 1.98e9, 3.35e12

    def instance(self, kernel: ct.Kernel, dtype: str, plan: Plan) -> Instance:
        return Instance(kernel, dtype)


class Clock:
    """Says what each contestant takes, by its kernel's name ("library": torch's own operator), and counts the calls that it timed."""

    def __init__(self) -> None:
        self.ms: dict[str | ct.Kernel, float] = {}  # by its kernel, too
        self.timed: list[str] = []

    def __call__(self, call: Any) -> float:
        kernel = call.func.kernel
        self.timed.append(LIBRARY if kernel is None else kernel.name)
        call()
        return self.ms.get(kernel, self.ms.get(self.timed[-1], 1.0))


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_plans: None, ieee: None) -> Iterator[Clock]:
    """torch's CPU tensors are given to `Gpu`, trials may be held, and this is their clock."""
    gpu, clock = Gpu(), Clock()
    monkeypatch.setenv("CONVT3D_TUNING", str(tmp_path / "tuning.json"))
    for module in ("choice", "torch_plan"):
        monkeypatch.setattr(f"cupy_convt3d.{module}.backend_for", lambda *_: gpu)
    place = choice._choose_backend
    monkeypatch.setattr(
        choice, "_choose_backend", lambda *asked: "host" if asked[:2] == (None, "auto") else place(*asked)
    )
    monkeypatch.setattr(trials, "MOST_ROUNDS", 2)
    monkeypatch.setattr(trials, "may_be_held", lambda _: True)
    monkeypatch.setattr(trials, "_event_clock", lambda _: clock)
    monkeypatch.setattr(tuning, "_unsaved", Database())
    yield clock
    ct.registry.revise()


def compute(**more: Any) -> torch.Tensor:
    ct.registry.revise()  # as another process would
    return ct.conv_transpose3d(*OPERANDS, **LAYER, **more)


def right(result: torch.Tensor) -> bool:
    expected = torch.nn.functional.conv_transpose3d(*OPERANDS, **LAYER)
    error = 1e-5 if result.dtype is torch.float32 else 5e-3
    return bool((result.float() - expected).norm() < error * expected.norm())


def contestants(precision: str) -> tuple[choice.Candidate, ...]:
    problem = ct.Problem.from_shapes(tuple(OPERANDS[0].shape), tuple(OPERANDS[1].shape), None, **LAYER)
    return choice.choose(Gpu(), "fprop", problem, precision).rivals


def rivals(precision: str = "fp32") -> list[str]:
    return [one.kernel.name for one in contestants(precision)]


def remembered() -> dict[str, float]:
    return {entry.kernel: entry.with_packing_ms for entry in Database.read(tuning.user_path()).entries()}


@pytest.mark.parametrize("place", [0, 1, -1])
def test_the_quickest_contestant_computes_from_then_on(clock: Clock, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [LIBRARY, *rivals()]
    assert 3 <= len(set(names)) <= len(names) <= 1 + choice.MOST_RIVALS
    clock.ms = {names[place]: 0.5}
    assert right(compute())
    assert set(clock.timed) == set(names)
    assert remembered() == {name: clock.ms.get(name, 1.0) for name in names}
    timed, ran = len(clock.timed), []
    for module in ("torch_plan._KernelPlan", "torch_plan._TorchPlan"):
        monkeypatch.setattr(f"cupy_convt3d.{module}.__call__", lambda plan, *_: ran.append(plan.kernel.name) or OPERANDS[0])
    compute()
    assert ran == ([] if names[place] == LIBRARY else [names[place]]), "torch's own call is nothing of ours"
    assert len(clock.timed) == timed, "it is known"


def test_a_trial_is_of_two_kernels_and_of_the_most_promising_configurations() -> None:
    first, second, third = (registry.kernel(f"fprop_{name}") for name in ("tiled", "gather", "scatter"))

    def candidate(kernel: Kernel, *ms: float) -> choice.Candidate:
        return choice.Candidate(kernel, "fp32", ms[0], True, tuple(choice.Candidate(kernel, "fp32", one, True) for one in ms[1:]))

    def tried(library_ms: float, *candidates: choice.Candidate) -> list[tuple[str, float | None]]:
        found = choice.Automatic(candidates[0].kernel, "fp32", candidates=candidates, library=(library_ms, library_ms))
        return [(one.kernel.name[6:], one.ms) for one in found.rivals]

    alike = candidate(first, 1.0, 1.1, 1.2, 1.3, 1.4)
    assert tried(1.0, alike, candidate(second, 1.9), candidate(third, 1.15)) == [
        ("tiled", 1.0), ("gather", 1.9), ("tiled", 1.1), ("scatter", 1.15)
    ]  # fmt: skip
    assert tried(1.0, alike, candidate(second, 2.1, 2.2)) == [("tiled", 1.0), ("tiled", 1.1), ("tiled", 1.2), ("tiled", 1.3)]
    assert tried(0.55, alike, candidate(second, 1.15)) == [("tiled", 1.0), ("tiled", 1.1)], "torch's operator is the best"
    assert tried(0.4, alike) == []


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_kernel_is_tried_in_several_configurations(clock: Clock, place: int) -> None:
    own = [one.kernel for one in contestants("bf16") if one.kernel.name == contestants("bf16")[0].kernel.name]
    assert len(own) == len({tuple(one.tunables.items()) for one in own}) == 3
    quick = own[place]
    clock.ms = {quick: 0.5}
    assert right(ct.conv_transpose3d(*(tensor.bfloat16() for tensor in OPERANDS), **LAYER))
    (entry,) = [entry for entry in Database.read(tuning.user_path()).entries() if entry.kernel == quick.name]
    assert entry.with_packing_ms == 0.5 and entry.tunables == {name: quick.tunables[name] for name in quick.search}


@pytest.mark.parametrize(("saved", "taken"), [(0.7, {"recorded": False, "alone": True}), (1.5, {"recorded": True, "alone": True})])
@pytest.mark.parametrize("first", ["recorded", "alone"])
@pytest.mark.parametrize(("precision", "margin_ms"), [("fp32", RECORDING_MS), ("bf16", RECORDING_CAST_MS)])
def test_where_torch_records_a_kernel_has_to_save_what_it_costs_the_host(
    clock: Clock, saved: float, taken: dict[str, bool], first: str, precision: str, margin_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in the trial and by what is known from it; in bf16 under autocast."""
    name, *_ = names = rivals(precision)
    clock.ms = {name: 1 - saved * margin_ms}
    input, weight = OPERANDS[0], OPERANDS[1].clone().requires_grad_()
    ran: list[str] = []
    run = _KernelPlan.__call__

    def watched(plan: _KernelPlan, *operands: Any) -> Any:
        ran.append(plan.kernel.name)
        return run(plan, *operands)

    for way in (first, *taken.keys() - {first}):
        for _ in range(2):  # the first holds the trial
            monkeypatch.setattr(_KernelPlan, "__call__", run)
            with torch.set_grad_enabled(way == "recorded"), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                ct.conv_transpose3d(input, weight, **LAYER)
                monkeypatch.setattr(_KernelPlan, "__call__", watched)
                ran.clear()
                result = ct.conv_transpose3d(input, weight, **LAYER)
            assert ran == ([name] if taken[way] else []), way
            assert right(result.detach()) and (result.grad_fn is not None) == (way == "recorded")
    assert set(remembered()) == {LIBRARY, *names} and rivals(precision) == [], "one trial answers both"


@pytest.mark.parametrize(("saved", "taken"), [(0.7, False), (1.5, True)])
def test_under_autocast_a_kernel_has_to_save_what_its_casts_cost_the_host(
    clock: Clock, saved: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.ms = {rivals("bf16")[0]: 1 - saved * CAST_MS}
    ran: list[str] = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ct.conv_transpose3d(*OPERANDS, **LAYER)
        monkeypatch.setattr(_KernelPlan, "__call__", lambda plan, *_: ran.append(plan.kernel.name) or OPERANDS[0])
        ct.conv_transpose3d(*OPERANDS, **LAYER)
    assert bool(ran) == taken


def test_a_frozen_weight_is_timed_as_it_is_used(clock: Clock) -> None:
    """What packs in each call loses; with the packed weight kept it wins."""
    layer = ct.nn.ConvTranspose3d(32, 32, 3, **LAYER, bias=False, device="cpu")
    kept: list[bool] = []

    def timed(call: Any) -> float:
        kept.append(len(call.args) == 4)
        return 0.1 if kept[-1] else 1.0 if call.func.kernel else 0.5

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(trials, "_event_clock", lambda _: timed)
        patch.setattr("cupy_convt3d.torch_plan._KernelPlan.packs", True, raising=False)
        layer(OPERANDS[0])
        assert {True, False} == set(kept)
        entries = Database.read(tuning.user_path()).entries()
        packing = [entry for entry in entries if entry.median_ms < entry.with_packing_ms]
        assert packing and all((entry.median_ms, entry.with_packing_ms) == (0.1, 1.0) for entry in packing)


def test_versions_are_part_of_what_is_known(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    compute()
    timed = len(clock.timed)
    compute()
    assert len(clock.timed) == timed
    monkeypatch.setattr(tuning, "_versions", lambda: "torch 99, cuDNN 99")
    compute()
    assert len(clock.timed) == 2 * timed
    assert {entry.versions for entry in Database.read(tuning.user_path()).entries()} == {"torch 99, cuDNN 99"}


def test_a_search_does_not_take_a_trial_for_its_own(clock: Clock) -> None:
    compute()
    database = Database.read(tuning.user_path())
    for entry in database.entries():
        if entry.kernel != LIBRARY:
            assert database.find(entry.question, ct.Problem.parse(entry.problem), ct.kernels()[entry.kernel]) is None


def test_where_the_database_cannot_be_written_this_process_knows(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CONVT3D_TUNING", str(tmp_path / "file" / "tuning.json"))
    with pytest.warns(CacheWarning, match="what was measured at the first call is kept in this process alone"):
        compute()
    timed = len(clock.timed)
    compute()
    assert len(clock.timed) == timed > 0


def test_a_contestant_that_fails_is_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = rivals()
    run = ct.torch_plan._KernelPlan.__call__

    def fail(plan: Any, *operands: Any) -> Any:
        if plan.kernel.name == first:
            raise LaunchError("no")
        return run(plan, *operands)

    monkeypatch.setattr("cupy_convt3d.torch_plan._KernelPlan.__call__", fail)
    clock.ms = {others[0]: 0.5}
    assert right(compute())
    assert first not in clock.timed and first not in remembered()


def spoil(monkeypatch: pytest.MonkeyPatch, names: list[str], change: Callable[[torch.Tensor], Any]) -> None:
    """Let these kernels' results be changed before anybody sees them."""
    run = torch_plan._KernelPlan.__call__

    def spoiled(plan: Any, *operands: Any) -> Any:
        result = run(plan, *operands)
        if plan.kernel.name in names:
            change(result)
        return result

    monkeypatch.setattr(torch_plan._KernelPlan, "__call__", spoiled)


@pytest.mark.parametrize("index", [(0, 31, 5, 7, 9), (0, slice(None), slice(None), slice(None), -1), ...])
@pytest.mark.parametrize("value", [9e3, float("nan"), float("inf")])
def test_a_wrong_contestant_is_told_and_out(clock: Clock, index: Any, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = rivals()
    spoil(monkeypatch, [first], lambda result: result.__setitem__(index, value))
    clock.ms = {first: 0.1, others[0]: 0.5}
    with pytest.warns(RuntimeWarning, match=f"{first} .* its result differs from that of torch's operator"):
        assert right(compute())
    assert first not in clock.timed and first not in remembered() and others[0] in remembered()


def test_where_all_kernels_are_wrong_torch_computes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process tries, and tells, again."""
    spoil(monkeypatch, rivals(), torch.Tensor.neg_)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="by 2 of the largest value"):
            assert right(compute())
        assert list(remembered()) == [LIBRARY]


def test_what_a_kernel_leaves_unwritten_is_no_earlier_result(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a result is given to the next one as torch's CUDA allocator does."""
    kept = [torch.empty(0)]
    first, *_ = rivals()

    def keep(plan: Any, *operands: Any) -> Any:
        kept[0] = torch_library_run(plan, *operands)
        return kept[0]

    torch_library_run = torch_plan._TorchPlan.__call__
    monkeypatch.setattr(torch_plan._TorchPlan, "__call__", keep)
    spoil(monkeypatch, [first], lambda result: result.copy_(kept[0]))  # it wrote nothing
    with pytest.warns(RuntimeWarning, match=f"{first} .* by inf of the largest value"):
        assert right(compute())


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), 0.0])
def test_numbers_that_are_none_accuse_nobody(clock: Clock, spoiled: float, recwarn: pytest.WarningsRecorder) -> None:
    names, input = {LIBRARY, *rivals()}, OPERANDS[0].clone()
    input[0, 3, 2] = spoiled
    input = input * spoiled if spoiled == 0 else input
    ct.conv_transpose3d(input, OPERANDS[1], **LAYER)
    assert set(remembered()) == names and not [one for one in recwarn if one.category is RuntimeWarning]


@pytest.mark.parametrize("cores", [1, 16])
def test_torch_searches_while_kernels_are_compiled(clock: Clock, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the compilers leave no core free; all are through before anything is timed."""
    order: list[str] = []
    torch_is_through, build, run = threading.Event(), Gpu.build, torch_plan._TorchPlan.__call__

    def slow(gpu: Gpu, instance: Instance) -> None:
        if cores > 1:
            assert torch_is_through.wait(60)
        build(gpu, instance)
        order.append("compiled")

    def searches(plan: Any, *operands: Any) -> Any:
        result = run(plan, *operands)
        order.append("torch")
        torch_is_through.set()
        return result

    monkeypatch.setattr(Gpu, "build", slow)
    monkeypatch.setattr(torch_plan._TorchPlan, "__call__", searches)
    monkeypatch.setattr(trials, "cores", lambda: cores)
    compiled = ["compiled"] * len(rivals())
    assert right(compute())
    first_run = order[: 1 + len(compiled)]
    assert first_run == (["torch", *compiled] if cores > 1 else [*compiled, "torch"]) and clock.timed


def test_what_needs_too_much_memory_is_out(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result and its workspaces take at most half of what is free."""
    monkeypatch.setattr(trials, "_free_bytes", lambda _: 2.0)
    assert right(compute())
    assert clock.timed == [] and not tuning.user_path().exists(), "the prediction is taken"


def test_where_memory_runs_out_the_prediction_is_taken(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(_: object) -> float:
        raise torch.OutOfMemoryError("no")

    for name, value in (("_event_clock", out_of_memory), ("_event_clock", lambda _: out_of_memory)):
        monkeypatch.setattr(trials, name, value)
        assert right(compute())
        assert not tuning.user_path().exists()


def test_a_call_that_asks_for_a_backend_or_a_kernel_is_not_tried(clock: Clock) -> None:
    for asked in ({"backend": "host"}, {"algorithm": "gather"}, {"algorithm": "library"}, {"backend": "torch"}):
        compute(**asked)
    assert clock.timed == []


def test_gradients_are_right_after_a_trial(clock: Clock) -> None:
    clock.ms = {rivals()[0]: 0.5}
    x, w = (tensor.clone().requires_grad_() for tensor in OPERANDS)
    ct.conv_transpose3d(x, w, **LAYER).square().sum().backward()
    assert clock.timed, "no gradient is recorded of a trial"
    expected = [tensor.clone().requires_grad_() for tensor in OPERANDS]
    torch.nn.functional.conv_transpose3d(*expected, **LAYER).square().sum().backward()
    for got, wanted in zip((x, w), expected, strict=True):
        assert torch.allclose(got.grad, wanted.grad, rtol=1e-3, atol=1e-2)


def test_rounds_are_taken_in_turn_and_end() -> None:
    taken: list[str] = []

    def says(times: dict[str, float]) -> Callable[[Any], float]:
        return lambda call: taken.append(call()) or times[taken[-1]]  # type: ignore[func-returns-value]

    calls = {name: (lambda name=name: name) for name in "abc"}
    found = trials.timed(calls, says({"a": 1.0, "b": 1.2, "c": 1.4}), calls)
    assert found == {"a": 1.0, "b": 1.2, "c": 1.4}
    assert taken == [*"abcabc", *"ab" * (trials.MOST_ROUNDS - 2)], "c is hopeless"
    taken.clear()
    trials.timed(calls, says(dict.fromkeys(calls, trials.MOST_MS)), calls)
    assert taken == list("abc"), "no round begins after so long a time"
    taken.clear()
    trials.timed(calls, says({"a": 1.0, "b": 9.0, "c": 9.0}), calls)
    assert taken == list("abcabc"), "nothing is open"
    noise = itertools.chain([9.0], itertools.repeat(1.0))  # one time alone may be a hiccup's
    assert trials.timed({"a": lambda: "a", "b": lambda: "b"}, lambda call: next(noise), ["a", "b"]) == {"a": 1.0, "b": 1.0}


class FakeCuda:
    """torch and its GPU, which takes a microsecond for a write and reaches an event once it has done what was queued before."""

    def __init__(self, host_us: float) -> None:
        self.cuda, self.uint8, self.host_us, self.queued, self.written = self, "uint8", host_us, 0.0, []  # type: ignore[var-annotated]

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(L2_cache_size=1)

    def empty(self, size: int, dtype: str, device: Any) -> Any:
        return SimpleNamespace(zero_=self.write)

    def write(self) -> None:
        self.queued += 1.0
        self.written[-1] += 1

    def device(self, device: Any) -> Any:
        self.written.append(0)
        return nullcontext()

    def Event(self, enable_timing: bool) -> Any:
        return SimpleNamespace(record=lambda: None, query=self.query, synchronize=self.synchronize, elapsed_time=lambda end: 7.0)

    def query(self) -> bool:
        return self.queued < self.host_us

    def synchronize(self) -> None:
        self.queued = 0.0


@pytest.mark.parametrize(("host_us", "written"), [(3.0, [4, 4]), (9.0, [4 + 8 + 16, 16]), (1e9, [4 + 8 + 16 + 32 + 64, 64])])
def test_a_call_that_the_gpu_waited_for_is_timed_again(monkeypatch: pytest.MonkeyPatch, host_us: float, written: list[int]) -> None:
    fake = FakeCuda(host_us)
    clock = trials._event_clock
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    timed = clock("cuda")
    assert [timed(lambda: None), timed(lambda: None)] == [7.0, 7.0]
    assert fake.written == written, "a busy host is remembered"


class OnGpu:
    is_cuda = True


@pytest.fixture
def set_cudnn() -> Iterator[Callable[[str, bool], None]]:
    """Sets cuDNN's flags; `torch.backends.cudnn` refuses to once some of torch's testing modules have been imported."""
    setters = {name: getattr(torch._C, f"_set_cudnn_{name}") for name in ("benchmark", "enabled", "deterministic")}
    before = {name: getattr(torch.backends.cudnn, name) for name in setters}
    yield lambda name, value: setters[name](value)
    for name, value in before.items():
        setters[name](value)


def test_when_trials_are_held(set_cudnn: Callable[[str, bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.delenv("CONVT3D_TRIALS", raising=False)
    set_cudnn("benchmark", True)
    assert trials.may_be_held(OnGpu())
    assert not trials.may_be_held(torch.ones(1)), "the CPU"
    with ct.no_trials():
        assert not trials.may_be_held(OnGpu())
    assert trials.may_be_held(OnGpu())
    for name, value in (("benchmark", False), ("enabled", False), ("deterministic", True)):
        set_cudnn(name, value)
        assert not trials.may_be_held(OnGpu())
        set_cudnn(name, not value)
    assert trials.may_be_held(OnGpu())
    torch.use_deterministic_algorithms(True)
    try:
        assert not trials.may_be_held(OnGpu())
    finally:
        torch.use_deterministic_algorithms(False)
    with monkeypatch.context() as patch:
        patch.setenv("CONVT3D_TRIALS", "0")
        assert not trials.may_be_held(OnGpu())
    capturing = True
    assert not trials.may_be_held(OnGpu())


def test_no_trial_in_a_trace(clock: Clock) -> None:
    """A compiler and an export see shapes; the database and the predictions decide there."""
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # as recurrent layers have it: torch's export asks for one
    layer = ct.nn.ConvTranspose3d(32, 32, 3, **LAYER)
    torch.export.export(layer, (OPERANDS[0],))
    with torch._subclasses.FakeTensorMode() as mode:
        ct.conv_transpose3d(*(mode.from_tensor(tensor) for tensor in OPERANDS), **LAYER)
    assert clock.timed == []


def test_the_flag_is_part_of_what_a_plan_depends_on(
    clock: Clock, set_cudnn: Callable[[str, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "may_be_held", lambda _: torch.backends.cudnn.benchmark)
    ct.conv_transpose3d(*OPERANDS, **LAYER)
    assert clock.timed == []
    set_cudnn("benchmark", True)
    ct.conv_transpose3d(*OPERANDS, **LAYER)
    assert clock.timed


@pytest.mark.gpu
def test_a_trial_on_a_gpu(
    tmp_path: Path, new_plans: None, set_cudnn: Callable[[str, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What wins is remembered with the time of torch's operator; a second call tries nothing, and neither does a capture."""
    monkeypatch.setenv("CONVT3D_TUNING", str(tmp_path / "tuning.json"))
    set_cudnn("benchmark", True)
    held: list[float] = []
    timed = trials.timed
    monkeypatch.setattr(trials, "timed", lambda *given: held.append(1.0) or timed(*given))
    x = torch.randn(2, 24, 9, 11, 13, device="cuda", dtype=torch.bfloat16)
    layer = ct.nn.ConvTranspose3d(24, 40, 3, 2, 1, device="cuda", dtype=torch.bfloat16)
    expected = torch.nn.functional.conv_transpose3d(x.float(), layer.weight.float(), layer.bias.float(), 2, 1).detach()
    for _ in range(2):
        result = layer(x).detach().float()
        assert float((result - expected).norm() / expected.norm()) < 0.01
        ct.registry.revise()
    assert len(held) == 1
    entries = Database.read(tuning.user_path()).entries()
    assert LIBRARY in {entry.kernel for entry in entries} and len(entries) >= 2
    assert all(entry.versions == tuning.versions() and entry.median_ms <= 1.5 * entry.with_packing_ms for entry in entries)
    other, stream = ct.nn.ConvTranspose3d(24, 48, 3, 2, 1, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()
    with ct.no_trials(), torch.cuda.stream(stream), torch.no_grad():
        other(x)  # what is compiled is compiled
    with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        other(x)
    assert len(held) == 1
