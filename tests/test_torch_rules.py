"""What torch's tools do with our layer: FLOP counts, DTensor, ONNX, scripting, subclasses, deferred initialisation."""

from __future__ import annotations

import io
import os
import socket
from typing import Any

import pytest

import cupy_convt3d as ct

torch = pytest.importorskip("torch")

F = torch.nn.functional


def pair(backend: str | None = "host", **options: Any) -> tuple[Any, Any]:
    """Ours and torch's, with the same parameters."""
    theirs = torch.nn.ConvTranspose3d(4, 6, 3, **options)
    ours = ct.nn.ConvTranspose3d(4, 6, 3, **options, backend=backend)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("backend", ["host", "torch", None])
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"groups": 2}], ids=str)
def test_flop_counts_are_torchs(backend: str | None, options: dict[str, Any]) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(2, 4, 3, 4, 5, requires_grad=True)
    counts = []
    for layer in pair(backend, **options):
        for trained in (None, False, True):  # fprop alone, with dgrad, with both gradients
            layer.requires_grad_(bool(trained))
            with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trained is not None):
                y = layer(x)
                if trained is not None:
                    y.sum().backward()
            counts.append(counter.get_total_flops())
    if options.get("groups", 1) == 1:  # with groups torch counts wgrad as many times too often
        assert counts[:3] == counts[3:]
    assert counts[:2] == counts[3:5] and counts[0] > 0
    if backend == "host":
        assert counts[1:3] == [2 * counts[0], 3 * counts[0]]


@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["host", None])
def test_onnx_exporters_write_a_conv_transpose(dynamo: bool, backend: str | None) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    ours, theirs = pair(backend, stride=2, padding=1, output_padding=1)
    x, file = torch.randn(2, 4, 3, 4, 5), io.BytesIO()
    if dynamo:
        model = torch.onnx.export(ours, (x,), dynamo=True, verbose=False).model_proto
    else:
        torch.onnx.export(ours, (x,), file, dynamo=False)
        model = onnx.load_from_string(file.getvalue())
    assert [(node.domain, node.op_type) for node in model.graph.node] == [("", "ConvTranspose")]
    attributes = {a.name: list(a.ints) or a.i for a in model.graph.node[0].attribute}
    assert attributes["strides"] == [2, 2, 2] and attributes["output_padding"] == [1, 1, 1] and attributes["group"] == 1
    (found,) = ReferenceEvaluator(model).run(None, {model.graph.input[0].name: x.numpy()})
    assert found.shape == tuple(theirs(x).shape)


def test_revert_gives_torchs_modules_back() -> None:
    model = torch.nn.Sequential(torch.nn.ConvTranspose3d(4, 6, 3), torch.nn.ReLU(), torch.nn.ConvTranspose3d(6, 2, 2, stride=2))
    x = torch.randn(1, 4, 3, 3, 3)
    wanted, parameters = model(x), [id(p) for p in model.parameters()]
    ct.nn.convert(model, backend="host")
    ct.nn.freeze(model)
    torch.testing.assert_close(model(x), wanted)
    assert ct.nn.revert(model) == ("0", "2")
    assert ct.nn.revert(model) == ()
    assert type(model[0]) is torch.nn.ConvTranspose3d and not set(vars(model[0])) & {"algorithm", "backend", "_packed", "_own"}
    assert [id(p) for p in model.parameters()] == parameters
    torch.testing.assert_close(torch.jit.script(model)(x), wanted)
    with pytest.raises(ct.ProblemTypeError, match=r"model: is a int; must be a torch\.nn\.Module"):
        ct.nn.revert(5)
    with pytest.raises(ct.ProblemTypeError, match=r"model: is a int; must be a torch\.nn\.Module"):
        ct.nn.convert(5)


def test_skip_init() -> None:
    layer = torch.nn.utils.skip_init(ct.nn.ConvTranspose3d, 4, 6, 3, stride=2, backend="host", dtype=torch.float64)
    assert layer.weight.shape == (4, 6, 3, 3, 3) and layer.weight.dtype == torch.float64 and layer.stride == (2, 2, 2)


@pytest.mark.parametrize("backend", ["host", "torch", None])
def test_a_subclass_that_adds_methods_comes_back_and_none_is_called_inside(backend: str | None) -> None:
    class Labelled(torch.Tensor):
        def new_empty(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("an overridable method was called inside the operator")

        new_empty_strided = contiguous = unsqueeze = squeeze = sum = to = expand = detach = new_empty  # type: ignore[assignment]

    ours, theirs = pair(backend, stride=2)
    base = torch.randn(2, 4, 3, 4, 5)
    gradient = torch.ones_like(theirs(base))
    for volume in (base, base[0], base.transpose(2, 3)):
        x = volume.detach().clone().as_subclass(Labelled).requires_grad_()
        y = ours(x)
        assert type(y) is Labelled
        torch.testing.assert_close(y.as_subclass(torch.Tensor), theirs(volume))
        grads = torch.autograd.grad(y, (x, ours.weight), gradient[: len(y)].reshape(y.shape) if y.dim() == 5 else gradient[0])
        assert all(g is not None for g in grads)
        with torch.no_grad():
            assert type(ours(x)) is Labelled


def test_monais_meta_tensor() -> None:
    data = pytest.importorskip("monai.data")
    ours, theirs = pair("host", stride=2)
    x = data.MetaTensor(torch.randn(2, 4, 3, 4, 5), meta={"name": "scan"})
    y = ours(x)
    assert type(y) is data.MetaTensor and y.meta["name"] == "scan"
    torch.testing.assert_close(y.as_tensor(), theirs(x.as_tensor()))
    y.sum().backward()
    assert ours.weight.grad is not None


def test_a_parameter_of_a_class_of_its_own() -> None:
    class Own(torch.nn.Parameter): ...

    ours, theirs = pair("host")
    ours.weight = Own(theirs.weight.detach().clone())
    x = torch.randn(2, 4, 3, 4, 5)
    y = ours(x)
    torch.testing.assert_close(y, theirs(x))
    y.sum().backward()
    theirs(x).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_a_default_device_is_no_matter() -> None:
    ours, theirs = pair("host")
    x = torch.randn(2, 4, 3, 4, 5)
    with torch.device("meta"):
        torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (0, 0, None), (0, 0, 0), (None, None, 0)])
@pytest.mark.parametrize("backend", ["host", None])
def test_vmap_over_no_examples(backend: str | None, dims: tuple[Any, ...]) -> None:
    shapes = ((2, 4, 3, 3, 3), (4, 6, 3, 3, 3), (6,))
    operands = [torch.randn((0, *shape) if dim == 0 else shape) for shape, dim in zip(shapes, dims, strict=True)]

    def call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ct.conv_transpose3d(x, w, b, stride=2, backend=backend)

    assert torch.vmap(call, dims)(*operands).shape == (0, 2, 6, 7, 7, 7)
    grads = torch.func.grad(lambda x, w, b: torch.vmap(call, dims)(x, w, b).sum(), (0, 1, 2))(*operands)
    assert all(not g.any() and g.shape == t.shape for g, t in zip(grads, operands, strict=True))


def member(rank: int, port: int, failures: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh, whole = init_device_mesh("cpu", (2,)), Replicate()
    torch.manual_seed(0)
    shapes = ((2, 4, 3, 4, 5), (4, 6, 3, 3, 3), (6,))
    plain = [torch.randn(shape, requires_grad=True) for shape in shapes]
    layouts = {
        "batch": ((Shard(0), whole, whole), Shard(0)),
        "output channels": ((whole, Shard(1), Shard(0)), Shard(1)),
        "input channels": ((Shard(1), Shard(0), whole), None),
        "nothing": ((whole, whole, whole), whole),
    }
    for backend in ("host", None):
        for name, (places, result) in layouts.items():
            for groups in (1, 2):
                for biased in (False, True):
                    x, w, b = plain
                    w = w if groups == 1 else w[:, :3].detach().requires_grad_()
                    sharded = [distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in zip((x, w, b), places, strict=True)]
                    bias = sharded[2] if biased else None
                    y = ct.conv_transpose3d(*sharded[:2], bias, 2, groups=groups, backend=backend)
                    wanted = F.conv_transpose3d(x, w, b if biased else None, 2, groups=groups)
                    grads = torch.autograd.grad(y.pow(2).sum(), sharded[: 2 + biased])
                    expected = torch.autograd.grad(wanted.pow(2).sum(), (x, w, b)[: 2 + biased])
                    right = torch.allclose(y.full_tensor(), wanted, atol=1e-4) and all(
                        torch.allclose(g.full_tensor(), e, rtol=1e-3, atol=1e-2) for g, e in zip(grads, expected, strict=True)
                    )
                    if groups == 1 and result is not None:  # no needless communication
                        right = right and y.placements == (result,)
                    if not right:
                        failures.append((rank, backend, name, groups, biased, str(y.placements)))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_dtensor_shards_batch_and_channels() -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        failures = manager.list()
        torch.multiprocessing.spawn(member, (port, failures), nprocs=2)
        assert not list(failures)
