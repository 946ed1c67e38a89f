"""Packed weights: by default nothing is kept, so nothing can be stale; a frozen module keeps one while its weight looks the same."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cupy_convt3d as ct
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
    with torch.no_grad():
        yield made


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in (X, W))


def module(algorithm: str = "implicit_gemm_simt", **options: Any) -> Any:
    x, w = tensors(options.pop("dtype", torch.float32))
    options = {"bias": False, "algorithm": algorithm, "backend": "host"} | options
    layer = ct.nn.ConvTranspose3d(W[0], W[1], W[2:], dtype=x.dtype, **options)
    layer.weight.copy_(w)
    return x, layer


def agrees(layer: Any, x: torch.Tensor) -> None:
    tolerance = 1e-4 if x.dtype is torch.float32 else 2e-2
    geometry = (layer.stride, layer.padding, 0, 1, layer.dilation)
    expected = F.conv_transpose3d(x.double(), layer.weight.double(), None, *geometry).to(x.dtype)  # torch's sums of bf16 are less exact
    torch.testing.assert_close(layer(x), expected, rtol=tolerance, atol=tolerance)


def ema(layer: Any) -> None:
    for parameter in layer.parameters():
        parameter.data.mul_(0.9).add_(torch.ones(W), alpha=0.1)


def swap(layer: Any) -> None:
    torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(torch.ones(W)))


def load_by_swap(layer: Any) -> None:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict({"weight": torch.ones(W)})
        layer.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# What torch does not count as a change of the weight.
SILENT: dict[str, Callable[[Any], Any]] = {
    "data, in place": lambda layer: layer.weight.data.zero_(),
    "NumPy": lambda layer: layer.weight.detach().numpy().fill(1),
    "an EMA by data": ema,
    "a kernel of another library": lambda layer: ct.conv_transpose3d(
        torch.ones(4, 1, 1, 1, 1).numpy(), torch.ones(1, *W[1:]).numpy(), algorithm="gather", out=layer.weight.detach().numpy()
    ),
    "a fused optimizer": lambda layer: (
        setattr(layer.weight, "grad", torch.ones(W)), torch.optim.Adam(layer.parameters(), lr=0.1, fused=True).step()
    ),
    "swap_tensors": swap,
    "swap on conversion": load_by_swap,
    "storage": lambda layer: layer.weight.untyped_storage().copy_(torch.ones(W).untyped_storage()),
}  # fmt: skip

# What it counts, or what puts another tensor in the weight's place.
NOTICED: dict[str, Callable[[Any], Any]] = {
    "in place": lambda layer: layer.weight.mul_(2),
    "through a view": lambda layer: layer.weight[1].add_(1),
    "through detach": lambda layer: layer.weight.detach().add_(1),
    "one element": lambda layer: layer.weight.__setitem__((0, 0, 0, 0, 0), 7.0),
    "out=": lambda layer: torch.mul(layer.weight, 3, out=layer.weight),
    "our own out=": lambda layer: ct.conv_transpose3d(
        torch.ones(4, 1, 1, 1, 1), torch.ones(1, *W[1:]), algorithm="gather", out=layer.weight
    ),
    "inference mode": lambda layer: torch.inference_mode()(layer.weight.add_)(1),
    "new memory": lambda layer: setattr(layer.weight, "data", torch.ones(W)),
    "new memory, other strides": lambda layer: layer.to(memory_format=torch.channels_last_3d),
    "the same memory, other strides": lambda layer: setattr(layer.weight, "data", layer.weight.data.transpose(2, 4)),
    "set_": lambda layer: layer.weight.set_(torch.ones(W)),
    "initialised": lambda layer: torch.nn.init.uniform_(layer.weight),
    "another parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.ones(W))),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": torch.ones(W)}),
    "load_state_dict, assigned": lambda layer: layer.load_state_dict({"weight": torch.ones(W)}, assign=True),
    "swap_tensors": swap,
    "swap on conversion": load_by_swap,
}  # fmt: skip


@pytest.mark.parametrize("change", [*SILENT, *(name for name in NOTICED if name not in SILENT)])
def test_by_default_no_change_of_a_weight_is_missed(change: str, packings: list[str]) -> None:
    x, layer = module()
    agrees(layer, x)
    before = layer.weight.clone()
    (SILENT | NOTICED)[change](layer)
    assert not torch.equal(layer.weight, before) or "memory" in change
    agrees(layer, x)
    assert len(packings) == 2


def test_by_default_nothing_is_kept(packings: list[str]) -> None:
    x, layer = module()
    for _ in range(3):
        agrees(layer, x)
    assert len(packings) == 3
    alive = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("algorithm", "dtype"), [("implicit_gemm_simt", torch.float32), ("implicit_gemm_mma", torch.bfloat16), ("auto", torch.float32)]
)
def test_a_frozen_weight_is_packed_once(algorithm: str, dtype: torch.dtype, packings: list[str]) -> None:
    x, layer = module(algorithm, dtype=dtype, stride=2, padding=1)
    x = x.repeat(16, 1, 1, 1, 1)  # too large for a kernel that packs nothing
    with ct.nn.freeze(layer):
        for _ in range(3):
            agrees(layer, x)
            agrees(layer, x + 1)
        assert len(packings) == 1
    agrees(layer, x)
    agrees(layer, x)
    assert len(packings) == 3, "thawed"


@pytest.mark.parametrize("change", NOTICED)
def test_a_frozen_weight_that_looks_changed_is_packed_anew(change: str, packings: list[str]) -> None:
    x, layer = module()
    ct.nn.freeze(layer)
    agrees(layer, x)
    NOTICED[change](layer)
    agrees(layer, x)
    agrees(layer, x)
    assert len(packings) == 2


def test_freeze_takes_a_model_and_leaves_the_rest(packings: list[str]) -> None:
    x, layer = module()
    model = torch.nn.Sequential(torch.nn.Identity(), layer, torch.nn.ConvTranspose3d(6, 2, 1))
    state = list(model.state_dict())
    frozen = ct.nn.freeze(model)
    assert list(model.state_dict()) == state
    wanted = model(x)
    assert torch.equal(model(x), wanted) and len(packings) == 1
    frozen.thaw()
    frozen.thaw()
    model(x)
    assert len(packings) == 2
    for bad in (None, 5, layer.weight):
        with pytest.raises(ct.ProblemTypeError, match=r"model: is a (NoneType|int|Parameter); must be a torch.nn.Module"):
            ct.nn.freeze(bad)


def test_only_frozen_modules_leave_packing_out_of_the_time(monkeypatch: pytest.MonkeyPatch, new_plans: None) -> None:
    """ "auto" goes by the time that packing is in, where it is."""
    asked: list[bool] = []
    decide = torch_plan.decide

    def spy(*arguments: Any, packed: bool = False, **more: Any) -> Any:
        asked.extend([packed] * (arguments[0] == "fprop"))
        return decide(*arguments, packed=packed, **more)

    monkeypatch.setattr(torch_plan, "decide", spy)
    x, layer = module("auto")
    layer(x)
    with ct.nn.freeze(layer):
        layer(x)
        with torch.enable_grad():
            layer(x)
    assert asked == [False, True, False]


def test_training_a_frozen_module_packs_in_each_step(packings: list[str]) -> None:
    x, layer = module()
    with ct.nn.freeze(layer), torch.enable_grad():
        for step in range(2):
            layer(x).sum().backward()
            assert len(packings) == step + 1


def test_copies_of_a_frozen_module_keep_their_own(packings: list[str]) -> None:
    x, layer = module()
    with ct.nn.freeze(layer):
        agrees(layer, x)
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            other.weight.add_(1)
            packings.clear()
            agrees(other, x)
            agrees(other, x)
            assert len(packings) == 1
            agrees(layer, x)


def test_plans_take_turns(packings: list[str]) -> None:
    """One packed weight a module: that of another input size takes its place."""
    x, layer = module()
    with ct.nn.freeze(layer):
        for _ in range(2):
            agrees(layer, x)
            agrees(layer, x[:1])
    assert len(packings) == 4


def test_the_old_pack_is_freed_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    x, layer = module()
    ct.nn.freeze(layer)
    agrees(layer, x)
    alive = weakref.ref(*layer._packed._kept.workspaces.values())
    seen = []
    launch = torch_plan.Prepared.launch
    monkeypatch.setattr(torch_plan.Prepared, "launch", lambda *a, **k: (seen.append(alive()), launch(*a, **k))[1])
    layer.weight.add_(1)
    agrees(layer, x)
    assert seen == [None]


def test_an_inference_tensor_has_no_version_and_is_not_kept(packings: list[str]) -> None:
    with torch.inference_mode():
        x, layer = module()
        ct.nn.freeze(layer)
        agrees(layer, x)
        agrees(layer, x)
    assert len(packings) == 2
    x, layer = module()
    ct.nn.freeze(layer)
    with torch.inference_mode():
        agrees(layer, x)
        agrees(layer, x)
    assert len(packings) == 3, "a weight made outside has one"


def test_a_frozen_module_is_traced_and_compiled() -> None:
    x, layer = module()
    torch._dynamo.reset()
    with ct.nn.freeze(layer):
        wanted = layer(x)
        for traced in (
            torch.fx.symbolic_trace(torch.nn.Sequential(layer)),
            torch.compile(layer, backend="aot_eager", fullgraph=True),
            torch.export.export(layer, (x,)).module(),
        ):
            torch.testing.assert_close(traced(x), wanted)
    torch._dynamo.reset()


def test_threads() -> None:
    x, layer = module()
    wrong, expected = [], layer(x)

    def work() -> None:
        with torch.no_grad():
            for _ in range(30):
                if not torch.equal(layer(x), expected):
                    wrong.append(1)

    with ct.nn.freeze(layer):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            ct.nn.freeze(layer)
        for thread in threads:
            thread.join()
    assert not wrong


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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, new_plans: None) -> FakeGpu:
    return FakeGpu(monkeypatch)


def test_another_stream_waits_for_the_packing_once(gpu: FakeGpu, packings: list[str]) -> None:
    x, layer = module()
    ct.nn.freeze(layer)
    agrees(layer, x)
    agrees(layer, x)
    assert gpu.log == [], "one stream orders its own work"
    gpu.stream = 22
    agrees(layer, x)
    agrees(layer, x)
    assert gpu.log == ["record on 11", "22 waits", "memory waits for 22"]
    gpu.stream = 11
    agrees(layer, x)
    assert len(gpu.log) == 3 and len(packings) == 1
    gpu.stream = 22
    layer.weight.add_(1)
    agrees(layer, x)
    assert len(gpu.log) == 3 and len(packings) == 2, "packed on 22 itself"


def test_a_capture_packs_in_its_graph_and_keeps_nothing(gpu: FakeGpu, packings: list[str]) -> None:
    x, layer = module()
    ct.nn.freeze(layer)
    agrees(layer, x)
    before = layer._packed._kept
    gpu.capturing = True
    agrees(layer, x)
    agrees(layer, x)
    assert len(packings) == 3 and layer._packed._kept is before
    gpu.capturing = False
    agrees(layer, x)
    assert len(packings) == 3
    ct.nn.freeze(layer)
    gpu.capturing = True
    agrees(layer, x)
    assert layer._packed._kept is None


def on_gpu() -> Any:
    x, layer = module(backend="cuda")
    return x.cuda(), layer.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", [False, True])
def test_a_replayed_graph_packs_the_weight_as_it_is_then(frozen: bool, ieee: None) -> None:
    x, layer = on_gpu()
    if frozen:
        ct.nn.freeze(layer)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for factor in (1, 2, 3):
        layer.weight.mul_(factor)
        graph.replay()
        torch.testing.assert_close(y, F.conv_transpose3d(x, layer.weight), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(layer(x), y)


@pytest.mark.gpu
def test_a_graph_that_writes_the_weight_is_noticed(ieee: None) -> None:
    """Its replay changes the weight and not its version."""
    x, layer = on_gpu()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.weight.mul_(2)
    for _ in range(3):
        graph.replay()
        agrees(layer, x)


@pytest.mark.gpu
def test_streams_share_a_pack_on_a_gpu(ieee: None) -> None:
    x, layer = on_gpu()
    ct.nn.freeze(layer)
    for turn in range(20):
        layer.weight.copy_(torch.randn(W))
        expected = F.conv_transpose3d(x, layer.weight)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        ys = []
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if number == turn % 3:
                    torch.cuda._sleep(2_000_000)
                ys.append(layer(x))
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

    torchs = peak(lambda: F.conv_transpose3d(x, w))
    whole = ct.kernels()["fprop_implicit_gemm_simt"].replace_tunables(DEPTH_PARTS=1)  # parts of the depth have sums in memory, too
    mine = peak(lambda: ct.conv_transpose3d(x, w, algorithm=whole, backend="cuda"))
    assert mine <= torchs + 1.1 * w.nbytes
