"""Packed weights that are kept between calls on torch tensors: used while the weight is the same, and never a call longer."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cupy_convt3d as ct
from cupy_convt3d import packs
from cupy_convt3d.backends.host import HostBackend, HostModule

torch = pytest.importorskip("torch")
from cupy_convt3d import torch_plan  # noqa: E402

F = torch.nn.functional
X, W = (2, 4, 3, 4, 5), (4, 6, 3, 3, 3)


@pytest.fixture(autouse=True)
def packings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The launches that pack a weight, as they are made."""
    made: list[str] = []
    launch = HostModule.launch

    def spy(self: HostModule, step: Any, *rest: Any) -> None:
        made.extend([step.symbol] * (step.packs is not None))
        launch(self, step, *rest)

    monkeypatch.setattr(HostModule, "launch", spy)
    ct.forget_packed_weights()
    with torch.no_grad():
        yield made
    ct.forget_packed_weights()


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in (X, W))


def ours(x: torch.Tensor, w: torch.Tensor, algorithm: str = "implicit_gemm_simt", **geometry: Any) -> torch.Tensor:
    return ct.conv_transpose3d(x, w, **geometry, algorithm=algorithm, backend="host")


def agrees(x: torch.Tensor, w: torch.Tensor, algorithm: str = "implicit_gemm_simt", **geometry: Any) -> None:
    tolerance = 1e-4 if x.dtype is torch.float32 else 2e-2
    expected = F.conv_transpose3d(x.double(), w.double(), **geometry).to(x.dtype)  # torch's own sums of bf16 are less exact on some CPUs
    torch.testing.assert_close(ours(x, w, algorithm, **geometry), expected, rtol=tolerance, atol=tolerance)


def test_only_calls_that_keep_the_packed_weight_leave_packing_out_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training step packs in each call: "auto" goes by the time that packing is in."""
    asked: list[bool] = []
    decide = torch_plan.decide

    def spy(*arguments: Any, packed: bool) -> Any:
        asked.append(packed)
        return decide(*arguments, packed=packed)

    monkeypatch.setattr(torch_plan, "decide", spy)
    monkeypatch.setattr(torch_plan, "_plans", {})
    x, w = tensors()
    ours(x, w, "auto")
    with torch.enable_grad():
        ours(x, w.requires_grad_(), "auto")
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("algorithm", "dtype"), [("implicit_gemm_simt", torch.float32), ("implicit_gemm_mma", torch.bfloat16), ("auto", torch.float32)]
)
def test_an_unchanged_weight_is_packed_once(algorithm: str, dtype: torch.dtype, packings: list[str]) -> None:
    x, w = tensors(dtype)
    for _ in range(3):
        agrees(x, w, algorithm, stride=2, padding=1)
        agrees(x + 1, w, algorithm, stride=2, padding=1)
    assert len(packings) == 1


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda w: w.mul_(2),
    "through a view": lambda w: w[1].add_(1),
    "through detach": lambda w: w.detach().add_(1),
    "one element": lambda w: w.__setitem__((0, 0, 0, 0, 0), 7.0),
    "copy_": lambda w: w.copy_(torch.ones(W)),
    "out=": lambda w: torch.mul(w, 3, out=w),
    "our own out=": lambda w: ct.conv_transpose3d(torch.ones(4, 1, 1, 1, 1), torch.ones(1, *W[1:]), algorithm="gather", out=w),
    "inference mode": lambda w: torch.inference_mode()(w.add_)(1),
    "foreach": lambda w: torch._foreach_add_([w], 1),
    "new memory": lambda w: setattr(w, "data", torch.ones(W)),
    "new memory, other strides": lambda w: setattr(w, "data", torch.randn(W).to(memory_format=torch.channels_last_3d)),
    "the same memory, other strides": lambda w: setattr(w, "data", w.data.transpose(2, 4)),
    "set_": lambda w: w.set_(torch.ones(W)),
    "initialised": lambda w: torch.nn.init.uniform_(w),
    "module": lambda w: torch.nn.utils.vector_to_parameters(torch.ones(w.numel()), [w]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_weight_is_packed_anew(change: str, packings: list[str]) -> None:
    x, w = tensors()
    w = torch.nn.Parameter(w)
    agrees(x, w)
    CHANGES[change](w)
    agrees(x, w)
    agrees(x, w)
    assert len(packings) == 2 and len(packs._packs) == 1


def test_another_part_of_the_same_memory_is_another_weight() -> None:
    x, w = tensors()
    both = torch.stack([w, -w])
    weight = torch.nn.Parameter(both[0])
    agrees(x, weight)
    weight.data = both[1]
    agrees(x, weight)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=["fused", "foreach", "plain"])
def test_an_optimizers_step_is_noticed(options: dict[str, bool], packings: list[str]) -> None:
    """A fused step changes the weight and not its version."""
    x, w = tensors()
    w = torch.nn.Parameter(w)
    optimizer = torch.optim.Adam([w], lr=0.1, **options)
    for step in range(3):
        agrees(x, w)
        agrees(x, w)
        w.grad = torch.ones_like(w)
        optimizer.step()
        assert len(packings) == step + 1
    agrees(x, w)


def test_a_frozen_weight_outlasts_the_steps_of_others(packings: list[str]) -> None:
    x, w = tensors()
    agrees(x, w)
    other = torch.nn.Parameter(torch.zeros(3))
    other.grad = torch.ones(3)
    torch.optim.SGD([other]).step()
    agrees(x, w)
    assert len(packings) == 1


def test_a_compiled_optimizer_is_traced_whole() -> None:
    x, w = tensors()
    w = torch.nn.Parameter(w)
    agrees(x, w)
    optimizer = torch.optim.SGD([w], lr=0.1, foreach=True)
    w.grad = torch.ones_like(w)
    torch._dynamo.reset()
    torch.compile(optimizer.step, backend="aot_eager")()
    agrees(x, w)
    torch._dynamo.reset()


def test_training_keeps_nothing_and_packs_in_each_step(packings: list[str]) -> None:
    x, w = tensors()
    w = torch.nn.Parameter(w)
    with torch.enable_grad():
        for step in range(2):
            ours(x, w).sum().backward()
            assert len(packings) == step + 1 and not packs._packs


def test_what_torch_does_not_count_needs_to_be_told(packings: list[str]) -> None:
    x, w = tensors()
    agrees(x, w)
    stale = ours(x, w)
    w.data.mul_(2)
    assert torch.equal(ours(x, w), stale), "this is the documented limit"
    ct.forget_packed_weights()
    agrees(x, w)
    w.detach().numpy()[:] = 1
    ct.forget_packed_weights()
    agrees(x, w)


def test_aliases_that_count_for_themselves_are_not_mistaken(packings: list[str]) -> None:
    """Each `w.data` is a new tensor of version 0 over the same memory, and often at the same address."""
    x, w = tensors()
    for _ in range(3):
        agrees(x, w.data)
        w.mul_(2)
    assert len(packings) == 3 and not packs._packs


def test_views_of_one_memory_each_have_their_own() -> None:
    x, w = tensors()
    both = torch.stack([w, -w])
    first, second = both[0], both[1]
    turned = both[0].transpose(2, 4)
    for _ in range(2):
        for view in (first, second, turned):
            agrees(x, view)
    both.add_(1)
    for view in (first, second, turned):
        agrees(x, view)


def test_plans_take_turns(packings: list[str]) -> None:
    """One pack a weight: that of another kernel, geometry or size takes its place."""
    x, w = tensors()
    for _ in range(2):
        agrees(x, w)
        agrees(x, w, stride=2)
        agrees(x[:1], w)
        assert len(packs._packs) == 1
    assert len(packings) == 6


def test_a_pack_goes_with_its_weight() -> None:
    x, w = tensors()
    agrees(x, w)
    assert len(packs._packs) == 1
    del w
    gc.collect()
    assert not packs._packs
    for _ in range(20):  # addresses come back
        agrees(x, torch.randn(W))
    gc.collect()
    assert not packs._packs


def test_a_pack_goes_with_its_weights_memory() -> None:
    x, w = tensors()
    agrees(x, w)
    w.data = torch.ones(W)
    assert not packs._packs


def test_the_old_pack_is_freed_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    x, w = tensors()
    agrees(x, w)
    (kept,) = packs._packs.values()
    alive = weakref.ref(*kept.workspaces.values())
    del kept
    seen = []
    launch = torch_plan.Prepared.launch
    monkeypatch.setattr(torch_plan.Prepared, "launch", lambda *a, **k: (seen.append(alive()), launch(*a, **k))[1])
    w.add_(1)
    agrees(x, w)
    assert seen == [None]


def test_an_inference_tensor_has_no_version_and_is_not_kept(packings: list[str]) -> None:
    with torch.inference_mode():
        x, w = tensors()
        agrees(x, w)
        agrees(x, w)
        assert len(packings) == 2 and not packs._packs
    x, w = tensors()
    with torch.inference_mode():
        agrees(x, w)
        agrees(x, w)
    assert len(packings) == 3, "a weight made outside has one"


def test_threads(packings: list[str]) -> None:
    x, w = tensors()
    wrong, expected = [], F.conv_transpose3d(x, w)

    def work() -> None:
        with torch.no_grad():
            for number in range(30):
                if number % 5 == 0:
                    ct.forget_packed_weights()
                own = w.clone()
                wrong.extend(tensor for tensor in (w, own) if not torch.allclose(ours(x, tensor), expected, atol=1e-5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong and len(packs._packs) <= 1


class FakeGpu:
    """A GPU's streams in names: what is recorded and awaited is written down, and launches run on the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.stream, self.capturing = 11, False
        log = self.log

        class Event:
            def record(self, stream: int) -> None:
                log.append(f"record on {stream}")

        class Current:
            def __init__(self, handle: int) -> None:
                self.handle = handle

            def wait_event(self, event: Event) -> None:
                log.append(f"{self.handle} waits")

        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: self.stream, raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Current(self.stream))
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: log.append(f"memory waits for {stream.handle}"))
        monkeypatch.setattr(HostBackend, "is_capturing", lambda backend, stream: self.capturing)
        init = torch_plan._KernelPlan.__init__

        def on_a_gpu(plan: Any, *arguments: Any) -> None:
            init(plan, *arguments)
            plan._device = 0

        monkeypatch.setattr(torch_plan._KernelPlan, "__init__", on_a_gpu)
        monkeypatch.setattr(torch_plan, "_plans", {})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def test_another_stream_waits_for_the_packing_once(gpu: FakeGpu, packings: list[str]) -> None:
    x, w = tensors()
    agrees(x, w)
    agrees(x, w)
    assert gpu.log == [], "one stream orders its own work"
    gpu.stream = 22
    agrees(x, w)
    agrees(x, w)
    assert gpu.log == ["record on 11", "22 waits", "memory waits for 22"]
    gpu.stream = 11
    agrees(x, w)
    assert len(gpu.log) == 3 and len(packings) == 1
    gpu.stream = 22
    w.add_(1)
    agrees(x, w)
    assert len(gpu.log) == 3 and len(packings) == 2, "packed on 22 itself"


def test_a_capture_packs_in_its_graph_and_keeps_nothing(gpu: FakeGpu, packings: list[str]) -> None:
    x, w = tensors()
    agrees(x, w)
    (before,) = packs._packs.values()
    gpu.capturing = True
    agrees(x, w)
    agrees(x, w)
    assert len(packings) == 3 and list(packs._packs.values()) == [before]
    gpu.capturing = False
    agrees(x, w)
    assert len(packings) == 3
    ct.forget_packed_weights()
    gpu.capturing = True
    agrees(x, w)
    assert not packs._packs


@pytest.mark.gpu
def test_a_replayed_graph_packs_the_weight_as_it_is_then(ieee: None) -> None:
    x, w = (tensor.cuda() for tensor in tensors())

    def call() -> torch.Tensor:
        return ct.conv_transpose3d(x, w, algorithm="implicit_gemm_simt", backend="cuda")

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for factor in (1, 2, 3):
        w.mul_(factor)
        graph.replay()
        torch.testing.assert_close(y, F.conv_transpose3d(x, w), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(call(), y)


@pytest.mark.gpu
def test_streams_share_a_pack_on_a_gpu(ieee: None) -> None:
    x, w = (tensor.cuda() for tensor in tensors())
    for turn in range(20):
        w.copy_(torch.randn(W))
        expected = F.conv_transpose3d(x, w)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        ys = []
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if number == turn % 3:
                    torch.cuda._sleep(2_000_000)
                ys.append(ct.conv_transpose3d(x, w, algorithm="implicit_gemm_simt", backend="cuda"))
        torch.cuda.synchronize()
        for y in ys:
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_memory_is_torchs_and_the_packed_weight() -> None:
    x, w = torch.randn(1, 64, 8, 8, 8, device="cuda"), torch.randn(64, 64, 3, 3, 3, device="cuda")

    def peak(call: Callable[[], object]) -> int:
        for _ in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            call()
        return int(torch.cuda.max_memory_allocated())

    with torch.no_grad():
        torchs = peak(lambda: F.conv_transpose3d(x, w))
        mine = peak(lambda: ct.conv_transpose3d(x, w, algorithm="implicit_gemm_simt", backend="cuda"))
    assert mine <= torchs + 1.1 * w.nbytes
