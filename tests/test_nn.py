"""The module: torch's own module and operator databases, state_dict both ways, and convert()."""

from __future__ import annotations

import copy
import io
import pickle
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import cupy_convt3d as ct

torch = pytest.importorskip("torch")
pytest.importorskip("expecttest")  # what torch's databases import

nn = torch.nn
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@lru_cache(maxsize=1)
def databases() -> tuple[Any, Any]:
    """Return what torch's databases have of its module and of its operator; they take seconds to import."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

    torch.backends.__allow_nonbracketed_mutation_flag = True  # which those forbid to all of the process
    module = next(info for info in module_db if info.module_cls is nn.ConvTranspose3d)
    return module, next(info for info in op_db if info.name == "nn.functional.conv_transpose3d")


def cases(dtype: torch.dtype = torch.float64, grad: bool = False) -> list[tuple[Any, Any, Any, Any]]:
    """Torch's own cases as (torch's module, ours with its state, args, kwargs)."""
    torch.manual_seed(0)
    made = []
    module, _ = databases()
    for case in module.module_inputs_func(module, device="cpu", dtype=dtype, requires_grad=grad, training=True):
        args, kwargs = case.constructor_input.args, case.constructor_input.kwargs
        theirs = nn.ConvTranspose3d(*args, **kwargs).to(dtype)
        ours = ct.nn.ConvTranspose3d(*args, **kwargs, backend="host").to(dtype)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        made.append((theirs, ours, case.forward_input.args, case.forward_input.kwargs))
    assert made
    return made


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Ours against the fp64 result of the same inputs: one rounding to its dtype, and fp32 sums of terms that add up to `magnitude`."""
    info = torch.finfo(found.dtype)
    sums = 0 if found.dtype == torch.float64 else 64 * 2.0**-24
    limit = exact.abs() * info.eps / 2 * 1.01 + magnitude * (sums + 1e-13) + info.smallest_normal
    assert bool(((found.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_of_torchs_module_database(dtype: torch.dtype) -> None:
    for theirs, ours, args, kwargs in cases(dtype):
        found = ours(*args, **kwargs)
        assert found.dtype == theirs(*args, **kwargs).dtype
        exact = theirs.double()(args[0].double(), **kwargs)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.abs_()
        assert_rounded_once(found, exact, theirs(args[0].double().abs(), **kwargs))


def test_gradients_of_torchs_module_database() -> None:
    for theirs, ours, args, kwargs in cases(grad=True):
        found, wanted = ours(*args, **kwargs), theirs(*args, **kwargs)
        gradient = torch.randn_like(wanted)
        operands = [(args[0], *module.parameters()) for module in (ours, theirs)]
        found, wanted = (torch.autograd.grad(y, o, gradient) for y, o in zip((found, wanted), operands, strict=True))
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_gradcheck_of_torchs_module_database() -> None:
    for _, ours, args, kwargs in cases(grad=True):
        names, parameters = zip(*ours.named_parameters(), strict=True)

        def call(x: Any, *values: Any, ours: Any = ours, names: Any = names, kwargs: Any = kwargs) -> Any:
            return torch.func.functional_call(ours, dict(zip(names, values, strict=True)), (x,), kwargs)

        assert torch.autograd.gradcheck(call, (args[0], *parameters), fast_mode=True)
        assert torch.autograd.gradgradcheck(call, (args[0], *parameters), fast_mode=True)


def test_memory_formats_of_torchs_module_database() -> None:
    for theirs, ours, args, kwargs in cases():
        if args[0].dim() != 5:
            continue
        for module in (theirs, ours):
            module.to(memory_format=torch.channels_last_3d)
        x = args[0].to(memory_format=torch.channels_last_3d)
        torch.testing.assert_close(ours(x, **kwargs), theirs(x, **kwargs))
        assert ours(x, **kwargs).is_contiguous(memory_format=torch.channels_last_3d)


def test_copies_of_torchs_module_database() -> None:
    for theirs, ours, args, kwargs in cases():
        assert repr(ours) == repr(theirs)
        buffer = io.BytesIO()
        torch.save(ours, buffer)
        buffer.seek(0)
        clones = (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(buffer, weights_only=False))
        for clone in clones:
            assert clone.backend == "host"
            torch.testing.assert_close(clone(*args, **kwargs), theirs(*args, **kwargs))
        with torch.device("meta"):
            assert ours.to("meta")(args[0].to("meta"), **kwargs).shape == theirs(*args, **kwargs).shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_operator_database(dtype: torch.dtype) -> None:
    _, operator = databases()
    torch.manual_seed(0)
    samples = list(operator.sample_inputs("cpu", dtype, requires_grad=dtype == torch.float64))
    assert len(samples) >= 5
    for sample in samples:
        given = (sample.input, *sample.args)
        wanted = operator.op(*given, **sample.kwargs)
        torch.testing.assert_close(ct.conv_transpose3d(*given, **sample.kwargs, backend="torch"), wanted)
        found = ct.conv_transpose3d(*given, **sample.kwargs, backend="host")
        doubles = [value.double() if isinstance(value, torch.Tensor) else value for value in given]
        magnitudes = [value.abs() if isinstance(value, torch.Tensor) else value for value in doubles]
        assert_rounded_once(found, *(operator.op(*values, **sample.kwargs) for values in (doubles, magnitudes)))
        if dtype == torch.float64:
            operands = [value for value in given if isinstance(value, torch.Tensor)]
            found, expected = (torch.autograd.grad(y.square().sum(), operands, retain_graph=True) for y in (found, wanted))
            torch.testing.assert_close(found, expected)


def test_noncontiguous_samples_of_torchs_operator_database() -> None:
    _, operator = databases()
    for sample in operator.sample_inputs("cpu", torch.float64, requires_grad=False):
        apart = sample.noncontiguous()
        found = ct.conv_transpose3d(apart.input, *apart.args, **apart.kwargs, backend="host")
        torch.testing.assert_close(found, operator.op(sample.input, *sample.args, **sample.kwargs))


def test_errors_of_torchs_operator_database() -> None:
    _, operator = databases()
    if operator.error_inputs_func is None:
        pytest.skip("this torch has no error inputs for conv_transpose3d")
    for error in operator.error_inputs("cpu"):
        sample = error.sample_input
        with pytest.raises(error.error_type):
            ct.conv_transpose3d(sample.input, *sample.args, **sample.kwargs, backend="host")


def test_constructor_is_torchs() -> None:
    for bad in ({"in_channels": 3, "groups": 2}, {"padding_mode": "reflect"}, {"groups": 0}):
        arguments: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "kernel_size": 3, **bad}
        with pytest.raises(ValueError, match=r".+") as theirs:
            nn.ConvTranspose3d(**arguments)
        with pytest.raises(ValueError, match=r".+") as ours:
            ct.nn.ConvTranspose3d(**arguments)
        assert str(ours.value) == str(theirs.value)
    torch.manual_seed(0)
    theirs = nn.ConvTranspose3d(4, 6, 3, bias=False, dtype=torch.float64)
    torch.manual_seed(0)
    ours = ct.nn.ConvTranspose3d(4, 6, 3, bias=False, dtype=torch.float64)
    assert torch.equal(theirs.weight, ours.weight)
    assert ours.bias is None


def test_state_dict_loads_both_ways() -> None:
    theirs, ours = nn.ConvTranspose3d(4, 6, 3, stride=2), ct.nn.ConvTranspose3d(4, 6, 3, stride=2, backend="host")
    assert list(theirs.state_dict()) == list(ours.state_dict())
    ours.load_state_dict(theirs.state_dict(), strict=True)
    again = nn.ConvTranspose3d(4, 6, 3, stride=2)
    again.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(1, 4, 3, 3, 3)
    torch.testing.assert_close(ours(x), again(x))


@pytest.mark.parametrize("size", [(6, 7, 8), (1, 6, 6, 7, 8), [7, 6, 6]])
def test_output_size(size: Any) -> None:
    theirs, ours = nn.ConvTranspose3d(4, 6, 3, 2, 1), ct.nn.ConvTranspose3d(4, 6, 3, 2, 1, backend="host")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(1, 4, 3, 4, 4)
    try:
        wanted = theirs(x, output_size=size)
    except ValueError as error:
        with pytest.raises(ValueError, match="requested an output size"):
            ours(x, output_size=size)
        assert "requested" in str(error)
    else:
        torch.testing.assert_close(ours(x, output_size=size), wanted)


def model() -> Any:
    class Named(nn.ConvTranspose3d): ...

    torch.manual_seed(0)
    shared = nn.ConvTranspose3d(4, 4, 2)
    return nn.ModuleDict(
        {
            "up": nn.ConvTranspose3d(4, 4, 3, 2, 1, bias=False),
            "block": nn.Sequential(shared, nn.ReLU(), shared, nn.ConvTranspose2d(1, 1, 1)),
            "lazy": nn.LazyConvTranspose3d(4, 3),
            "named": Named(4, 4, 2),
            "ours": ct.nn.ConvTranspose3d(4, 4, 2),
        }
    )


def test_convert_swaps_in_place_and_says_what_it_left() -> None:
    net = model()
    before = {name: (id(p), p.detach().clone()) for name, p in net.named_parameters() if not name.startswith("lazy")}
    optimizer = torch.optim.SGD([p for name, p in net.named_parameters() if not name.startswith("lazy")], lr=0.1)
    seen = []
    net["up"].register_forward_hook(lambda module, args, output: seen.append(output.shape))
    net["up"].eval()
    x = torch.randn(1, 4, 3, 3, 3)
    wanted = net["up"](x)
    done = ct.nn.convert(net, backend="host", algorithm="residue")
    assert done.swapped == ("up", "block.0")  # block.2 is the same module
    assert list(done.left) == ["lazy", "named", "ours"]
    assert "LazyConvTranspose3d" in done.left["lazy"]
    assert "Named, a subclass" in done.left["named"]
    assert "already" in done.left["ours"]
    assert type(net["block"][2]) is ct.nn.ConvTranspose3d
    for name, (identity, value) in before.items():
        parameter = net.get_parameter(name)
        assert id(parameter) == identity
        assert torch.equal(parameter, value)
    torch.testing.assert_close(net["up"](x), wanted)
    assert len(seen) == 2
    assert not net["up"].training
    assert (net["up"].backend, net["up"].algorithm) == ("host", "residue")
    net["up"](x).sum().backward()
    weight = net["up"].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, net["up"].weight)


def test_convert_of_a_lone_module_and_of_a_lazy_one_after_its_first_call() -> None:
    lone = nn.ConvTranspose3d(4, 4, 2)
    assert ct.nn.convert(lone).swapped == ("",)
    assert type(lone) is ct.nn.ConvTranspose3d
    lazy = nn.Sequential(nn.LazyConvTranspose3d(4, 3))
    assert not ct.nn.convert(lazy).swapped
    lazy(torch.randn(1, 2, 3, 3, 3))
    assert ct.nn.convert(lazy).swapped == ("0",)


def test_a_module_that_knows_its_call_as_torchs_own_sees_every_change() -> None:
    """What follows the first calls is torch's function alone, until something that decides has changed."""
    theirs, ours = nn.ConvTranspose3d(4, 6, 3, 2, 1), ct.nn.ConvTranspose3d(4, 6, 3, 2, 1)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 4, 3, 4, 5)
    for _ in range(3):
        assert torch.equal(ours(x), theirs(x))
    assert ours._own.last is not None
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("conv_transpose3d", "in_eager_mode"):
            patch.setattr(f"cupy_convt3d.nn.{name}", lambda *_, **__: calls.append("ours"))
        ours(x)
        assert calls == [], "known"
        for change in (lambda: ours(x[:1]), lambda: ours(x.double()), lambda: ours(x.transpose(2, 3)), lambda: ours(x, [6, 8, 10])):
            change()
            assert calls.pop() == "ours"
        with torch.no_grad():
            ours(x)
        assert calls.pop() == "ours"
        with torch.autocast("cpu", torch.bfloat16):
            ours(x)
        assert calls.pop() == "ours"
        ours.backend = "host"
        ours(x)
        assert calls.pop() == "ours"
    torch.testing.assert_close(ours(x), theirs(x))
    ours.backend = None
    for weight in (torch.nn.Parameter(torch.ones(4, 2, 3, 3, 3)), theirs.weight):
        ours.weight, ours.bias = weight, None
        torch.testing.assert_close(ours(x), torch.nn.functional.conv_transpose3d(x, weight, None, 2, 1))


def test_convert_leaves_a_replaced_forward() -> None:
    patched = nn.ConvTranspose3d(4, 4, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert "forward of its own" in ct.nn.convert(patched).left[""]


def test_convert_keeps_parametrizations() -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.ConvTranspose3d(4, 4, 2))
    assert "subclass" in ct.nn.convert(nn.Sequential(normed)).left["0"]


@pytest.mark.parametrize("model", [5, None, "model", [], torch.nn.ConvTranspose3d])
def test_what_is_no_module_is_not_converted(model: object) -> None:
    with pytest.raises(ct.ProblemTypeError, match=r"model: is a \w+; must be a torch.nn.Module"):
        ct.nn.convert(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"algorithm": []}, {"algorithm": None}, {"backend": 5}, {"algorithm": "x"}, {"backend": "x"}])
def test_options_that_cannot_be_are_named(options: dict[str, object]) -> None:
    model = torch.nn.Sequential(torch.nn.ConvTranspose3d(1, 1, 1))
    with pytest.raises(ct.ProblemError, match=f"{next(iter(options))}="):
        ct.nn.convert(model, **options)  # type: ignore[arg-type]
    assert type(model[0]) is torch.nn.ConvTranspose3d, "nothing was swapped"
    with pytest.raises(ct.ProblemError, match=f"{next(iter(options))}="):
        ct.nn.ConvTranspose3d(1, 1, 1, **options)


@pytest.mark.parametrize("given", [np.ones((1, 1, 2, 2, 2), np.float32), None, [1]])
@pytest.mark.parametrize("size", [None, (2, 2, 2)])
def test_an_input_that_is_no_tensor_is_named(given: object, size: tuple[int, ...] | None) -> None:
    with pytest.raises(TypeError, match=r"input: is a \w+; must be a torch.Tensor"):
        ct.nn.ConvTranspose3d(1, 1, 1)(given, size)


@pytest.mark.parametrize("backend", [None, "host"])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_weight_without_memory_is_refused(backend: str | None, recorded: bool) -> None:
    x, w = torch.ones(1, 1, 2, 2, 2), torch.ones(1, 1, 1, 1, 1, device="meta", requires_grad=recorded)
    calls = {
        "weight": (
            lambda: ct.conv_transpose3d(x, w, backend=backend),
            lambda: ct.conv_transpose3d_grad_input(x, w, x.shape, backend=backend),
        ),
        "bias": (lambda: ct.conv_transpose3d(x, torch.ones(1, 1, 1, 1, 1), w.flatten(), backend=backend),),
        "grad_output": (lambda: ct.conv_transpose3d_grad_weight(x, x.to("meta"), w.shape, backend=backend),),
    }
    for name, each in calls.items():
        for call in each:
            with pytest.raises(ct.ProblemError, match=f"{name}.device=meta: must be cpu"):
                call()
