"""The torch operators: gradients to any order, transforms, tracing, mixed precision and bad input, on both backends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import cupy_convt3d as ct
from cupy_convt3d.lab.strategies import problems
from cupy_convt3d.problem import Problem

torch = pytest.importorskip("torch")
import cupy_convt3d.torch_op  # noqa: E402, it registers the operators
from cupy_convt3d import plans, torch_plan  # noqa: E402

F = torch.nn.functional
OPERATORS = torch.ops.cupy_convt3d
GEOMETRY: dict[str, Any] = {
    "stride": (2, 1, 3), "padding": (1, 0, 2), "output_padding": (1, 0, 1), "groups": 2, "dilation": (1, 2, 1)
}  # fmt: skip
X, W, B = (3, 4, 2, 3, 2), (4, 3, 3, 2, 3), (6,)  # three volumes: a sum over the first two shows
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture(params=["cpu host", "cpu torch", *(pytest.param(f"cuda {name}", marks=pytest.mark.gpu) for name in ("cuda", "torch"))])
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each device with each `backend` that it has."""
    return dict(zip(("device", "backend"), request.param.split(), strict=True))


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64, device: str = "cpu", grad: bool = True) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes)
    return tuple(tensor.requires_grad_(grad) for tensor in made)


def ours(backend: str | None, **geometry: Any) -> Callable[..., torch.Tensor]:
    return lambda *operands: ct.conv_transpose3d(*operands, **(geometry or GEOMETRY), backend=backend)


def theirs(*operands: torch.Tensor) -> torch.Tensor:
    return F.conv_transpose3d(*operands, **GEOMETRY)


def of(problem: Problem) -> dict[str, Any]:
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    return {name: getattr(problem, name) for name in names}


def arguments(geometry: dict[str, Any], backend: str | None) -> tuple[Any, ...]:
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    return (*(geometry[name] for name in names), "auto", None, backend)


def small_problems() -> st.SearchStrategy[Problem]:
    """Problems whose numeric Jacobian takes a fraction of a second."""
    return problems(max_multiply_adds=2000).filter(lambda p: 0 < p.names["input_numel"] + p.names["weight_numel"] <= 200)  # type: ignore[operator]


@settings(max_examples=12)
@given(problem=small_problems(), data=st.data())
def test_gradcheck_on_random_problems(problem: Problem, data: st.DataObject) -> None:
    backend = data.draw(st.sampled_from(["host", "torch"]))
    assume(problem.names["output_numel"] <= 400)
    shapes = [problem.input_shape, problem.weight_shape] + [(problem.out_channels,)] * problem.bias
    operands, call = tensors(*shapes), ours(backend, **of(problem))
    assert torch.autograd.gradcheck(call, operands, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, operands, fast_mode=True)


def test_gradients_and_transforms(where: dict[str, Any]) -> None:
    operands, call = tensors(X, W, B, device=where["device"]), ours(where["backend"])
    # torch's own operator need not give the same bits twice.
    checks: dict[str, Any] = {"nondet_tol": 1e-12 if where["backend"] == "torch" else 0.0}
    batched = {"check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(call, operands, fast_mode=True, check_forward_ad=True, **batched, **checks)
    assert torch.autograd.gradgradcheck(call, operands, check_fwd_over_rev=True, fast_mode=True, **checks)


def test_first_and_second_derivatives_are_torchs(where: dict[str, Any]) -> None:
    operands = tensors(X, W, B, device=where["device"])
    found, wanted = [], []
    for call, results in ((ours(where["backend"]), found), (theirs, wanted)):
        y = call(*operands)
        grads = torch.autograd.grad(y.pow(2).sum(), operands, create_graph=True)
        results += [y, *grads, *torch.autograd.grad(sum(g.pow(2).sum() for g in grads), operands)]
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("name", ["conv_transpose3d", "conv_transpose3d_grad_input", "conv_transpose3d_grad_weight"])
@pytest.mark.parametrize("last", [False, True])
def test_opcheck(name: str, last: bool, where: dict[str, Any]) -> None:
    y = theirs(*tensors(X, W, B)).shape
    shapes, third = {
        "conv_transpose3d": ((X, W), tensors(B, device=where["device"])[0]),
        "conv_transpose3d_grad_input": ((y, W), list(X)),
        "conv_transpose3d_grad_weight": ((X, y), list(W)),
    }[name]
    layout = torch.channels_last_3d if last else torch.contiguous_format
    operands = [t.detach().to(memory_format=layout).requires_grad_() for t in tensors(*shapes, device=where["device"])]
    torch.library.opcheck(getattr(OPERATORS, name).default, (*operands, third, *arguments(GEOMETRY, where["backend"])))


@settings(max_examples=30)
@given(problem=problems(max_multiply_adds=5000), data=st.data())
def test_random_problems_agree_with_torch(problem: Problem, data: st.DataObject) -> None:
    backend = data.draw(st.sampled_from(["host", "torch"]))
    last = data.draw(st.tuples(st.booleans(), st.booleans()))
    shapes = [problem.input_shape, problem.weight_shape] + [(problem.out_channels,)] * problem.bias
    operands = list(tensors(*shapes, grad=False))
    for index, flag in enumerate(last):
        if flag:
            operands[index] = operands[index].to(memory_format=torch.channels_last_3d)
    operands = [tensor.requires_grad_() for tensor in operands]
    found, wanted = ours(backend, **of(problem))(*operands), F.conv_transpose3d(*operands, **of(problem))
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn_like(wanted)
    grads = (torch.autograd.grad(y, operands, gradient) for y in (found, wanted))
    torch.testing.assert_close(*grads)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "channels last": lambda t: t.to(memory_format=torch.channels_last_3d),
    "gaps": lambda t: torch.stack((t, torch.full_like(t, torch.nan)), -1)[..., 0],
    "late": lambda t: torch.cat((t.new_full((1,), torch.nan), t.reshape(-1)))[1:].view(t.shape),
    "transposed": lambda t: t.transpose(1, 4).contiguous().transpose(1, 4),
}


def module_call(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, geometry: dict[str, Any]) -> torch.Tensor:
    channels = (w.shape[0], w.shape[1] * geometry["groups"])
    module = ct.nn.ConvTranspose3d(*channels, tuple(w.shape[2:]), **geometry, backend="host", device="meta", dtype=w.dtype)
    return torch.func.functional_call(module, {"weight": w, "bias": b}, (x,))


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "function": lambda x, w, b, geometry: ours("host", **geometry)(x, w, b),
    "operator": lambda x, w, b, geometry: OPERATORS.conv_transpose3d(x, w, b, *arguments(geometry, "host")),
    "module": module_call,
}


@pytest.mark.parametrize("call", CALLS)
@settings(max_examples=10)
@given(problem=problems(max_multiply_adds=3000), batch=st.integers(3, 5), data=st.data())
def test_gradients_of_every_dtype_and_layout_are_exact(call: str, problem: Problem, batch: int, data: st.DataObject) -> None:
    """Of small integers every sum is exact: torch's fp64 result, rounded once. The second call may take what the first one left."""
    problem, generator = replace(problem, batch=batch, bias=True), torch.Generator().manual_seed(0)
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape, (problem.out_channels,))
    x, w, gradient, b = (torch.randint(-2, 3, shape, generator=generator).double() for shape in shapes)
    for _ in range(2):
        kinds = data.draw(st.tuples(*[st.sampled_from(list(LAYOUTS))] * 3))
        laid = [LAYOUTS[kind](t.to(dtype)) for kind, t in zip(kinds, (x, w, gradient), strict=True)]
        operands = [t.detach().requires_grad_() for t in (*laid[:2], b.to(dtype))]
        doubles = [t.clone().requires_grad_() for t in (x, w, b)]
        found = CALLS[call](*operands, of(problem))
        wanted = F.conv_transpose3d(*doubles, **of(problem))
        pairs = [(found, wanted)]
        grads = (torch.autograd.grad(found, operands, laid[2]), torch.autograd.grad(wanted, doubles, gradient))
        for left, right in [*pairs, *zip(*grads, strict=True)]:
            assert left.dtype == dtype and torch.equal(left, right.to(dtype)), f"{problem} {dtype} {kinds}"


@settings(max_examples=20)
@given(problem=problems(max_multiply_adds=3000), data=st.data())
def test_fake_strides_are_the_real_ones(problem: Problem, data: st.DataObject) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    backend = data.draw(st.sampled_from(["host", "torch"]))
    last = data.draw(st.tuples(st.booleans(), st.booleans()))
    shapes = {
        "conv_transpose3d": (problem.input_shape, problem.weight_shape, None),
        "conv_transpose3d_grad_input": (problem.output_shape, problem.weight_shape, problem.input_shape),
        "conv_transpose3d_grad_weight": (problem.input_shape, problem.output_shape, problem.weight_shape),
    }
    for name, (first, second, third) in shapes.items():
        layouts = [torch.channels_last_3d if flag else torch.contiguous_format for flag in last]
        operands = [torch.ones(s).to(memory_format=layout) for s, layout in zip((first, second), layouts, strict=True)]
        operator = getattr(OPERATORS, name)
        real = operator(*operands, third, *arguments(of(problem), backend))
        with FakeTensorMode() as mode:
            fake = operator(*map(mode.from_tensor, operands), third, *arguments(of(problem), backend))
        assert (fake.shape, fake.stride()) == (real.shape, real.stride())
        meta = operator(*(t.to("meta") for t in operands), third, *arguments(of(problem), backend))
        assert (meta.shape, meta.stride(), meta.device.type) == (real.shape, real.stride(), "meta")


def test_func_grad_and_vmap(where: dict[str, Any]) -> None:
    device, call = where["device"], ours(where["backend"])
    xs, ws, bs, x, w, b = tensors((3, *X), (3, *W), (3, *B), X, W, B, device=device, grad=False)
    for dims in ((0, None, None), (None, 0, None), (0, 0, None), (0, None, 0), (0, 0, 0)):
        operands = [many if dim == 0 else one for many, one, dim in zip((xs, ws, bs), (x, w, b), dims, strict=True)]
        wanted = torch.stack([theirs(*(t if d is None else t[i] for t, d in zip(operands, dims, strict=True))) for i in range(3)])
        torch.testing.assert_close(torch.vmap(call, dims)(*operands), wanted)
    torch.testing.assert_close(torch.vmap(call, (1, None, None))(xs.movedim(0, 1), w, b), torch.stack([theirs(t, w, b) for t in xs]))

    def loss(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda w, x: function(x, w, b).pow(2).sum()

    per_sample = torch.vmap(torch.func.grad(loss(call)), (None, 0))(w, xs)
    torch.testing.assert_close(per_sample, torch.stack([torch.func.grad(loss(theirs))(w, x) for x in xs]))
    tangents = torch.func.jvp(lambda b: call(x, w, b), (b,), (bs[0],))[1]
    torch.testing.assert_close(tangents, torch.func.jvp(lambda b: theirs(x, w, b), (b,), (bs[0],))[1])
    settings = arguments(GEOMETRY, where["backend"])
    by_operator = torch.vmap(lambda x, w: OPERATORS.conv_transpose3d(x, w, None, *settings))(xs, ws)
    torch.testing.assert_close(by_operator, torch.stack([theirs(*pair) for pair in zip(xs, ws, strict=True)]))
    unbatched = torch.vmap(call, (0, None, None))(x, w, b)
    torch.testing.assert_close(unbatched, theirs(x, w, b))


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], Tensors], Any]] = {
    "grad": lambda f, t: torch.func.grad(lambda *t: f(*t).pow(2).sum(), (0, 1))(*t),
    "grad of grad": lambda f, t: torch.func.grad(
        lambda b: torch.func.grad(lambda a: f(a, b).pow(3).sum())(t[0]).pow(2).sum()
    )(t[1]),
    "autograd of grad": lambda f, t: torch.autograd.grad(
        torch.func.grad(lambda a, b: f(a, b).pow(3).sum())(t[0], b := t[1].clone().requires_grad_()).pow(2).sum(), b
    ),
    "grad under no_grad": lambda f, t: torch.no_grad()(torch.func.grad(lambda a: f(a, t[1]).pow(2).sum()))(t[0]),
    "vmap of grad": lambda f, t: torch.vmap(torch.func.grad(lambda a, b: f(a, b).pow(2).sum()), (0, None))(torch.stack([t[0]] * 2), t[1]),
    "grad of vmap": lambda f, t: torch.func.grad(lambda b: torch.vmap(f, (0, None))(torch.stack([t[0]] * 2), b).pow(2).sum())(t[1]),
    "jvp": lambda f, t: torch.func.jvp(f, t, tuple(torch.cos(one) for one in t)),
    "jvp of grad": lambda f, t: torch.func.jvp(torch.func.grad(lambda b: f(t[0], b).pow(3).sum()), t[1:], (torch.cos(t[1]),)),
    "vjp": lambda f, t: torch.func.vjp(f, *t)[1](f(*t)),
}  # fmt: skip


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("pass_name", ["fprop", "dgrad", "wgrad"])
def test_the_operators_themselves_under_torch_func(pass_name: str, transform: str, where: dict[str, Any]) -> None:
    """The functions see a transform before the dispatcher does; gradcheck has them. torch's own has no derivative of some gradients."""
    x, w, _ = tensors(X, W, B, device=where["device"], grad=False)
    y, settings = theirs(x, w).detach(), arguments(GEOMETRY, where["backend"])
    options = GEOMETRY | {"backend": where["backend"]}
    operands, third, function, operator = {
        "fprop": ((x, w), None, theirs, OPERATORS.conv_transpose3d),
        "dgrad": ((y, w), X, lambda y, w: ct.conv_transpose3d_grad_input(y, w, X, **options), OPERATORS.conv_transpose3d_grad_input),
        "wgrad": ((x, y), W, lambda x, y: ct.conv_transpose3d_grad_weight(x, y, W, **options), OPERATORS.conv_transpose3d_grad_weight),
    }[pass_name]
    found = TRANSFORMS[transform](lambda first, second: operator(first, second, third, *settings), operands)
    torch.testing.assert_close(found, TRANSFORMS[transform](function, operands))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The passes that are run, as they are."""
    seen: list[str] = []
    call = torch_plan._KernelPlan.__call__

    def spy(self: Any, *rest: Any) -> Any:
        seen.append(self.kernel.pass_name)
        return call(self, *rest)

    monkeypatch.setattr(torch_plan._KernelPlan, "__call__", spy)
    return seen


@pytest.mark.parametrize(("needs", "expected"), [("x", ["dgrad"]), ("w", ["wgrad"]), ("b", []), ("xw", ["dgrad", "wgrad"])])
def test_only_the_gradients_that_are_needed_are_computed(needs: str, expected: list[str], passes: list[str]) -> None:
    x, w, b = tensors(X, W, B, grad=False)
    given = {"x": x, "w": w, "b": b}
    for name in needs:
        given[name].requires_grad_()
    y = ours("host")(x, w, b)
    kept = {t.data_ptr() for t in y.grad_fn.saved_tensors if t is not None}
    assert kept == ({w.data_ptr()} if "x" in needs else set()) | ({x.data_ptr()} if "w" in needs else set())
    y.sum().backward()
    assert passes == ["fprop", *expected]


def test_a_frozen_weight_keeps_no_input_alive() -> None:
    import weakref

    x, w, b = tensors(X, W, B, grad=False)
    y = ours("host")(x, w, b.requires_grad_())
    alive = weakref.ref(x)
    del x
    assert alive() is None
    y.sum().backward()
    assert b.grad is not None


def test_a_named_kernel_is_the_forwards_and_gradients_take_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    made = torch_plan._KernelPlan.__init__

    def note(self: Any, kernel: Any, *rest: Any) -> None:
        launched.append(kernel.name)
        made(self, kernel, *rest)

    monkeypatch.setattr(torch_plan._KernelPlan, "__init__", note)
    own = ct.Kernel.from_source(ct.kernels("fprop")["fprop_gather"].source, "my_gather")
    for algorithm, name in (("residue", "fprop_residue"), (own, "my_gather")):
        plans.plans.clear()
        launched.clear()
        operands = tensors(X, W, B)
        y = ct.conv_transpose3d(*operands, **GEOMETRY, algorithm=algorithm, backend="host")
        torch.testing.assert_close(y, theirs(*operands))
        grads = torch.autograd.grad(y.pow(2).sum(), operands)
        torch.testing.assert_close(grads, torch.autograd.grad(theirs(*operands).pow(2).sum(), operands))
        assert launched == [name, "dgrad_gather", "wgrad_reduce"]


def test_unbatched_and_batch_zero(where: dict[str, Any]) -> None:
    x, w, b = tensors(X, W, B, device=where["device"])
    call = ours(where["backend"])
    for volume in (x[0], x[:0]):
        y, wanted = call(volume, w, b), theirs(volume, w, b)
        torch.testing.assert_close(y, wanted)
        grads = torch.autograd.grad(y.pow(2).sum(), (x, w, b), retain_graph=True)
        torch.testing.assert_close(grads, torch.autograd.grad(wanted.pow(2).sum(), (x, w, b)))


@pytest.mark.parametrize("last", ["x", "w", "xw"])
def test_channels_last_3d(last: str, where: dict[str, Any]) -> None:
    x, w, b = tensors(X, W, B, device=where["device"], grad=False)
    x = x.to(memory_format=torch.channels_last_3d) if "x" in last else x
    w = w.to(memory_format=torch.channels_last_3d) if "w" in last else w
    y = ours(where["backend"])(x.requires_grad_(), w.requires_grad_(), b)
    wanted = theirs(x, w, b)
    torch.testing.assert_close(y, wanted)
    (grad,) = torch.autograd.grad(y.sum(), x)
    if where["backend"] == "torch":
        assert (y.stride(), grad.stride()) == (wanted.stride(), torch.autograd.grad(wanted.sum(), x)[0].stride())
    else:
        assert y.is_contiguous(memory_format=torch.channels_last_3d)
        assert grad.is_contiguous(memory_format=torch.channels_last_3d) == ("w" in last)


def test_channels_last_3d_module_on_a_gpu_has_torchs_strides(where: dict[str, Any]) -> None:
    x, w, b = tensors(X, W, B, device=where["device"], grad=False)
    for tensor in (x[:, :, :, 1:], x.transpose(2, 4).contiguous().transpose(2, 4), x[:1].expand(X)):
        torch.testing.assert_close(ours(where["backend"])(tensor, w, b), theirs(tensor, w, b))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype, where: dict[str, Any]) -> None:
    x, w, b = tensors(X, W, B, dtype=torch.float32, device=where["device"])
    with torch.autocast(where["device"], dtype=dtype):
        y, wanted = ours(where["backend"])(x, w, b), theirs(x, w, b)
        assert y.dtype == wanted.dtype == dtype
        doubles = [t.double() for t in (x, w, b)]
        assert ours(where["backend"])(*doubles).dtype == torch.float64
        torch.testing.assert_close(ours(where["backend"])(*doubles), theirs(*doubles))
    found = torch.autograd.grad(y.float().pow(2).sum(), (x, w, b))
    expected = torch.autograd.grad(wanted.float().pow(2).sum(), (x, w, b))
    assert {g.dtype for g in found} == {torch.float32}
    tolerance = 0.02 if dtype == torch.float16 else 0.1
    # Not element by element: cuDNN rounds before it adds the bias, which shows where the two cancel.
    for left, right in zip((y.float(), *found), (wanted.float(), *expected), strict=True):
        assert float((left - right).norm() / right.norm()) < tolerance


def test_a_nondeterministic_kernel_obeys_torchs_switch() -> None:
    x, w, b = tensors(X, W, B, grad=False)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(ours("host")(x, w, b), theirs(x, w, b))
        with pytest.raises(RuntimeError, match="fprop_scatter is not deterministic"):
            ct.conv_transpose3d(x, w, b, **GEOMETRY, algorithm="scatter", backend="host")
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="fprop_scatter is not deterministic"):
            ct.conv_transpose3d(x, w, b, **GEOMETRY, algorithm="scatter", backend="host")
    finally:
        torch.use_deterministic_algorithms(False)
    ct.conv_transpose3d(x, w, b, **GEOMETRY, algorithm="scatter", backend="host")


def test_threads_share_plans(where: dict[str, Any]) -> None:
    operands = [tensors(X, W, B, device=where["device"], grad=False) for _ in range(8)]
    operands = [(x + i, w, b) for i, (x, w, b) in enumerate(operands)]
    wanted = [theirs(*given) for given in operands]
    call, wrong = ours(where["backend"]), []

    def work(index: int) -> None:
        for _ in range(20):
            found = call(*operands[index])
            if not torch.allclose(found, wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_MOST", 3)
    plans.plans.clear()
    for size in range(1, 9):
        ct.conv_transpose3d(torch.ones(1, 1, size, 1, 1), torch.ones(1, 1, 1, 1, 1), backend="torch")
        assert len(plans.plans) <= 3


def test_lazily_negated_input_is_resolved() -> None:
    x, w, b = tensors(X, W, B, grad=False)
    negated = torch.complex(torch.zeros_like(x), x).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(ours("host")(negated, w, b), theirs(-x, w, b))


BAD: dict[str, Callable[[Callable[..., Any], torch.Tensor, torch.Tensor], Any]] = {
    "fractional stride": lambda f, x, w: f(x, w, stride=1.5),
    "fractional in a tuple": lambda f, x, w: f(x, w, stride=(1, 1.5, 1)),
    "padding mode": lambda f, x, w: f(x, w, padding="same"),
    "bool": lambda f, x, w: f(x, w, stride=True),
    "fractional groups": lambda f, x, w: f(x, w, groups=1.0),
    "negative padding": lambda f, x, w: f(x, w, padding=-1),
    "negative output_padding": lambda f, x, w: f(x, w, output_padding=-1),
    "large output_padding": lambda f, x, w: f(x, w, output_padding=1),
    "stride 0": lambda f, x, w: f(x, w, stride=0),
    "dilation 0": lambda f, x, w: f(x, w, dilation=0),
    "groups 0": lambda f, x, w: f(x, w, groups=0),
    "groups -1": lambda f, x, w: f(x, w, groups=-1),
    "groups 3": lambda f, x, w: f(x, w, groups=3),
    "two strides": lambda f, x, w: f(x, w, stride=(1, 2)),
    "four strides": lambda f, x, w: f(x, w, stride=(1, 2, 1, 1)),
    "channels": lambda f, x, w: f(x[:, :3], w),
    "no channels": lambda f, x, w: f(x[:, :0], w[:0]),
    "rank 3": lambda f, x, w: f(x[0, 0], w),
    "rank 6": lambda f, x, w: f(x[None], w),
    "weight rank": lambda f, x, w: f(x, w[0]),
    "bias length": lambda f, x, w: f(x, w, torch.zeros(4)),
    "bias rank": lambda f, x, w: f(x, w, torch.zeros(3, 1)),
    "weight dtype": lambda f, x, w: f(x, w.double()),
    "bias dtype": lambda f, x, w: f(x, w, torch.zeros(3).double()),
    "padding": lambda f, x, w: f(x, w, padding=3),
    "empty volume": lambda f, x, w: f(x[:, :, :0], w),
    "empty weight": lambda f, x, w: f(x, w[:, :, :0]),
    "no input": lambda f, x, w: f(None, w),
    "list": lambda f, x, w: f([1.0], w),
    "NumPy weight": lambda f, x, w: f(x, w.numpy()),
    "bias number": lambda f, x, w: f(x, w, 1.0),
    "sparse": lambda f, x, w: f(x.to_sparse(), w),
}


@pytest.mark.parametrize("backend", ["host", None])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_what_torch_rejects_is_rejected_alike(name: str, grad: bool, backend: str | None) -> None:
    x, w = tensors((2, 4, 3, 3, 3), (4, 3, 3, 2, 3), dtype=torch.float32, grad=False)
    if grad and name != "NumPy weight":
        w.requires_grad_()
    with pytest.raises(Exception) as torchs:
        BAD[name](F.conv_transpose3d, x, w)
    with pytest.raises(torchs.type) as caught:
        BAD[name](lambda *a, **k: ct.conv_transpose3d(*a, **k, backend=backend), x, w)
    assert len(str(caught.value)) > 20


def test_what_torch_accepts_is_accepted() -> None:
    import numpy as np

    x, w = tensors((2, 4, 3, 3, 3), (4, 3, 3, 2, 3), grad=False)
    for stride in ((2,), [2, 1, 2], np.int64(2), torch.tensor(2), tuple(np.array([2, 1, 2])), torch.Size([1, 2, 1])):
        torch.testing.assert_close(ct.conv_transpose3d(x, w, stride=stride, backend="host"), F.conv_transpose3d(x, w, stride=stride))
    for dtype in (torch.complex64, torch.complex128, torch.int64):
        torch.testing.assert_close(ct.conv_transpose3d(x.to(dtype), w.to(dtype)), F.conv_transpose3d(x.to(dtype), w.to(dtype)))
    z = x.to(torch.complex128).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: ct.conv_transpose3d(z, w.to(z.dtype)), (z,), fast_mode=True)


def test_a_dtype_without_a_kernel_is_named() -> None:
    x, w = (t.to(torch.complex64) for t in tensors((2, 4, 3, 3, 3), (4, 3, 3, 2, 3), grad=False))
    with pytest.raises(ct.KernelError, match=r"fprop_tiled has no complex64 instance \(it has fp64, fp32, fp16, bf16\)"):
        ct.conv_transpose3d(x, w, backend="host")


@pytest.mark.parametrize("options", [{"algorithm": "library"}, {"backend": "torch"}, {}, {"backend": "torch", "fp32_precision": "tf32"}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_call_that_is_left_to_torch_is_torchs_own(
    options: dict[str, Any], dtype: torch.dtype, passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very function with the very tensors: so it follows every setting of the process, and no copy is made."""
    operands = tensors(X, W, B, dtype=dtype)
    given: list[tuple[Any, ...]] = []
    conv = F.conv_transpose3d
    monkeypatch.setattr(F, "conv_transpose3d", lambda *arguments: (given.append(arguments), conv(*arguments))[1])
    for volume in (operands[0], operands[0][0], operands[0].to(memory_format=torch.channels_last_3d)):
        y = ct.conv_transpose3d(volume, *operands[1:], **GEOMETRY, **options)
        assert type(y.grad_fn).__name__ in ("ConvolutionBackward0", "SqueezeBackward1"), "torch's own autograd"
        wanted = conv(volume, *operands[1:], **GEOMETRY)
        assert torch.equal(y, wanted) and y.stride() == wanted.stride()
        seen = given.pop()
        assert all(mine is theirs for mine, theirs in zip(seen, (volume, *operands[1:]), strict=False))
        assert seen[3:] == tuple(GEOMETRY.values())
        for left, right in zip(torch.autograd.grad(y.sum(), operands), torch.autograd.grad(wanted.sum(), operands), strict=True):
            assert torch.equal(left, right)
    assert not given and not passes


def test_under_autocast_torchs_own_call_gets_what_torch_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = tensors(X, W, B, dtype=torch.float32)
    given: list[tuple[Any, ...]] = []
    conv = F.conv_transpose3d
    monkeypatch.setattr(F, "conv_transpose3d", lambda *arguments: (given.append(arguments), conv(*arguments))[1])
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = ct.conv_transpose3d(*operands, **GEOMETRY), conv(*operands, **GEOMETRY)
    assert all(mine is theirs for mine, theirs in zip(given[0], operands, strict=False))
    assert y.dtype == torch.bfloat16 and torch.equal(y, wanted)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("unbatched", [False, True])
def test_where_torch_has_the_gradients_it_records_the_call(
    unbatched: bool, cast: bool, passes: list[str], monkeypatch: pytest.MonkeyPatch, new_plans: None
) -> None:
    """fprop is ours, below torch's own autograd and autocast: no Python runs in the backward."""
    decide = torch_plan.decide

    def only_fprop(pass_name: str, problem: Any, arrays: Any, algorithm: Any, precision: Any, backend: Any, **more: Any) -> Any:
        return decide(pass_name, problem, arrays, algorithm, precision, backend if pass_name == "fprop" else "torch", **more)

    monkeypatch.setattr(torch_plan, "decide", only_fprop)
    for needs in ("x", "w", "xw", "wb", "xwb"):
        operands = dict(zip("xwb", tensors(X, W, B, dtype=torch.float32 if cast else torch.float64, grad=False), strict=True))
        if unbatched:
            operands["x"] = operands["x"][0]
        for name in needs:
            operands[name].requires_grad_()
        leaves = [operands[name] for name in needs]
        for _ in range(2):  # the first call makes the route
            passes.clear()
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                y, wanted = ours("host")(*operands.values()), theirs(*operands.values())
            assert passes == ["fprop"] and y.dtype == wanted.dtype
            node = y.grad_fn.next_functions[0][0] if unbatched else y.grad_fn
            assert type(node).__name__ == "ConvolutionBackward0"
            found = torch.autograd.grad(y.float().pow(2).sum(), leaves, create_graph=True)
            expected = torch.autograd.grad(wanted.float().pow(2).sum(), leaves, create_graph=True)
            assert passes == ["fprop"]
            tolerance = {"rtol": 0.1, "atol": 0.1} if cast else {}
            torch.testing.assert_close(found, expected, **tolerance)
            if not cast and needs != "w":
                seconds = (torch.autograd.grad(sum(g.pow(2).sum() for g in grads), leaves) for grads in (found, expected))
                torch.testing.assert_close(*seconds)


def test_more_precision_than_torch_is_set_to_is_asked_for_on_the_cpu_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_convt3d import torch_library

    x, w, b = tensors(X, W, B, dtype=torch.float32, grad=False)
    conv = torch.backends.mkldnn.conv
    before = conv.fp32_precision
    torch_library._warn_of_mkldnn.cache_clear()
    plans.plans.clear()
    try:
        conv.fp32_precision = "bf16"
        with pytest.warns(UserWarning, match=r"fp32_precision='ieee': .* follows torch.backends.mkldnn.conv.fp32_precision='bf16'"):
            ct.conv_transpose3d(x, w, b, **GEOMETRY, fp32_precision="ieee")
    finally:
        conv.fp32_precision = before


def test_inference_mode() -> None:
    operands = tensors(X, W, B, grad=False)
    with torch.inference_mode():
        y = ours("host")(*operands)
    assert y.is_inference()
    torch.testing.assert_close(y.clone(), theirs(*operands))


@pytest.mark.gpu
def test_a_cuda_tensor_without_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from cupy_convt3d import choice

    choice.backend_for.cache_clear()
    plans.plans.clear()
    monkeypatch.setitem(sys.modules, "cupy", None)
    x, w, b = tensors(X, W, B, device="cuda", grad=False)
    with pytest.raises(ct.BackendError, match="pip install 'cupy-convt3d"):
        ct.conv_transpose3d(x, w, b, **GEOMETRY, backend="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "cuda", None])
def test_fp32_precision_holds_against_torchs_setting_and_leaves_it(backend: str | None) -> None:
    shapes = ((2, 64, 6, 6, 6), (64, 64, 3, 3, 3))
    x, w = tensors(*shapes, dtype=torch.float32, device="cuda")
    exact = F.conv_transpose3d(x.double(), w.double())
    wanted = (exact, *torch.autograd.grad(exact.square().sum(), (x, w)))
    conv, before = torch.backends.cudnn.conv, torch.backends.cudnn.conv.fp32_precision
    deterministic = torch.backends.cudnn.deterministic
    conv.fp32_precision = "tf32"
    try:
        y = ct.conv_transpose3d(x, w, fp32_precision="ieee", backend=backend)
        found = (y, *torch.autograd.grad(y.square().sum(), (x, w)))
        assert conv.fp32_precision == "tf32"
        assert torch.backends.cudnn.deterministic == deterministic
    finally:
        conv.fp32_precision = before
    for ours_, exact_ in zip(found, wanted, strict=True):
        assert float((ours_.double() - exact_).norm() / exact_.norm()) < 2e-6  # TF32 products leave 2e-4
