"""The layer on torch tensors: a call takes the shortest way that serves it, and keeps it for calls like it.

- torch's own call, where torch computes every pass: nothing of ours is in it.
- In eager mode, on plain memory, a plan that launches our kernel. Where torch computes the gradients, torch records the call too, and
  we come in below its autograd; else one autograd function has all the gradients.
- Elsewhere (transforms, traces, subclasses) the operator, which all of torch can see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from . import registry
from .choice import check_options
from .packs import PackedWeight
from .plans import keep, plans
from .torch_op import (
    DTYPES,
    PLAIN_TYPES,
    Call,
    conv_transpose3d_grad_input,
    conv_transpose3d_grad_weight,
    dispatch,
    geometry_of,
    gradients,
    is_plain,
    is_torchs_own,
    is_transformed,
    save_operands,
    without_subclass,
)
from .torch_plan import (
    PassPlan,
    Settings,
    algorithm_name,
    is_benchmarking,
    layer_gradients,
    leaves_to_torch,
    make_plan,
    passes_of,
    refuse_meta,
)

__all__ = ["conv_transpose3d", "conv_transpose3d_grad_input", "conv_transpose3d_grad_weight"]

# What a kernel has to save of the GPU's time. A step that keeps the GPU waiting has nothing of that, and pays for what a call of ours costs
# the host beyond torch's own: below torch's autograd, and for autocast's casts, which torch does on its way (docs/benchmarking.md).
RECORDING_MS, RECORDING_CAST_MS, CAST_MS = 0.3, 0.5, 0.05

_CONVOLUTION = torch.ops.aten.convolution.default
# Looked up once: each way through a module of torch's takes time in every call.
_is_compiling, _is_tracing, _is_grad_enabled = torch.compiler.is_compiling, torch._C._is_tracing, torch.is_grad_enabled
_are_transforms_active, _is_any_autocast_enabled = torch._C._are_functorch_transforms_active, torch._C._is_any_autocast_enabled
_fp32_precision = torch._C._get_fp32_precision_getter


class _Forward(TorchDispatchMode):
    """Computes the convolution within `F.conv_transpose3d` by a plan: autograd, above it, stays torch's own."""

    def __init__(self, plan: PassPlan) -> None:
        super().__init__()
        self.plan = plan

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else each call goes through a wrapper, which takes 2 us; nothing here is reached from a trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _CONVOLUTION:
            return self.plan(args[0], args[1], args[2])
        return func(*args, **(kwargs or {}))


class _Layer(torch.autograd.Function):
    """fprop in eager mode; its backward computes all gradients at once, and goes by the operators only where it is itself recorded."""

    @staticmethod
    def forward(ctx: Any, input: Any, weight: Any, bias: Any, call: Call, plan: PassPlan) -> Any:
        ctx.call, ctx.plan, ctx.shapes = call, plan, (input.shape, weight.shape)
        save_operands(ctx, input, weight)
        return plan(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        call, needs = ctx.call, ctx.needs_input_grad[:3]
        input, weight = ctx.saved_tensors
        batched = torch._C._functorch.is_legacy_batchedtensor(gradient)  # by `is_grads_batched`
        if torch.is_grad_enabled() or is_transformed() or batched or not is_plain(gradient, input, weight):
            return (*gradients(call, input, weight, gradient, ctx.shapes, needs), None, None)
        found = layer_gradients(ctx.plan, gradient, input, weight, ctx.shapes, call.geometry, call.settings, needs)
        return (*found, None, None)


# Not `_Layer.apply`, which looks for the transforms of `torch.func` first.
_apply_layer = super(torch.autograd.Function, _Layer).apply


class Route(NamedTuple):
    """How calls of one description are computed.

    Attributes:
        call: their arguments.
        plan: of fprop; None where the call is torch's own.
        forward: where torch records the call.
        recorded: whether gradients will be asked for.
        cast: whether autocast is on.
    """

    call: Call
    plan: PassPlan | None
    forward: _Forward | None = None
    recorded: bool = False
    cast: bool = False


class TorchsOwn:
    """Remembers a module's last call that was torch's own: one like it then costs the host what torch's module costs.

    It looks at the input and the settings alone. That is enough: torch's operator is right for any weight.

    Attributes:
        last: what that call is known by; None: the last call was not torch's own.
    """

    def __init__(self) -> None:
        self.last: tuple[Any, ...] | None = None

    def __reduce__(self) -> tuple[type[TorchsOwn], tuple[()]]:
        return TorchsOwn, ()


def is_eager(input: Any) -> bool:
    """Whether neither a trace nor a transform has to see a module's call."""
    return type(input) in PLAIN_TYPES and not (_is_compiling() or _is_tracing() or _are_transforms_active())


def described(input: torch.Tensor, *settings: Any) -> tuple[Any, ...]:
    """Return what `TorchsOwn` knows a call by."""
    shape, layout, recorded = input.shape, input.stride(), _is_grad_enabled()
    return (
        *(shape, layout, input.dtype, input.device, recorded, _is_any_autocast_enabled(), _fp32_precision("cuda", "conv")),
        *(is_benchmarking(), registry.revision, settings),
    )


def conv_transpose3d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: Any = 1,
    dilation: Any = 1,
    *,
    algorithm: Any = "auto",
    fp32_precision: str | None = None,
    backend: str | None = None,
    packed: PackedWeight | None = None,
) -> torch.Tensor:
    """`cupy_convt3d.conv_transpose3d` on torch tensors, differentiable; see there for arguments and errors.

    Args:
        packed: keeps the packed weight of calls that record no gradient.
    """
    settings = (algorithm_name(algorithm), fp32_precision, backend)
    if is_eager(input):
        return in_eager_mode(input, weight, bias, (stride, padding, output_padding, groups, dilation), settings, packed)
    call = Call("fprop", None, geometry_of(stride, padding, output_padding, groups, dilation), settings)
    return _in_trace(input, weight, bias, call) if _is_compiling() or _is_tracing() else _first(None, input, weight, bias, call, packed)


def in_eager_mode(
    input: Any,
    weight: Any,
    bias: Any,
    geometry: tuple[Any, ...],
    settings: Settings,
    packed: PackedWeight | None,
    own: TorchsOwn | None = None,
) -> torch.Tensor:
    """Compute a call that `is_eager`.

    Args:
        geometry: stride, padding, output_padding, groups, dilation.
        packed: keeps the packed weight of calls that record no gradient.
        own: where it is noted whether the call was torch's own.
    """
    key = None
    if type(weight) in PLAIN_TYPES and forward_ad._current_level < 0:
        try:
            dtype = input.dtype
            key = (
                *(input.shape, input.stride(), dtype, input.device, weight.shape, weight.stride(), weight.dtype, weight.device),
                None if bias is None else (type(bias), bias.shape, bias.stride(), bias.dtype, bias.device, bias.is_neg()),
                *(geometry, settings, packed is None),
                _is_grad_enabled() and (input.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad),
                _is_any_autocast_enabled() and _autocast_dtype(input),
                dtype is torch.float32 and _fp32_precision("cuda", "conv"),
                *(is_benchmarking(), registry.revision),
            )
            route = plans.get(key)
        except (AttributeError, RuntimeError, TypeError):  # no tensor for a bias, no strides, a list of sizes
            key = route = None
        if route is not None:
            if own is not None:
                own.last = described(input, *settings) if route.plan is None else None
            if route.plan is None:
                return torch.nn.functional.conv_transpose3d(input, weight, bias, *geometry)
            if not (input.is_neg() or weight.is_neg() or torch._C._len_torch_dispatch_stack()):
                return _compute(route, input, weight, bias, packed)
    return _first(key, input, weight, bias, Call("fprop", None, geometry_of(*geometry), settings), packed)


def _first(key: Any, input: Any, weight: Any, bias: Any, call: Call, packed: PackedWeight | None) -> Any:
    """Compute a call that has no route yet, or cannot have one."""
    check_options(*call.settings)
    if torch.overrides.has_torch_function((input, weight, bias)):
        algorithm, fp32_precision, backend = call.settings
        options = {"algorithm": algorithm, "fp32_precision": fp32_precision, "backend": backend, "packed": packed}
        given = (input, weight, bias)
        return torch.overrides.handle_torch_function(conv_transpose3d, given, *given, *call.geometry, **options)
    input, weight, bias = map(without_subclass, (input, weight, bias))
    refuse_meta("fprop", input, weight, bias)
    if not is_plain(input, weight, bias) or is_transformed():
        first, second, third = _cast_as_asked(input, weight, bias)
        if _is_torchs_alone(input, call) or is_torchs_own(first, second, third, call):
            return torch.nn.functional.conv_transpose3d(input, weight, bias, *call.geometry)
        return _by_operator(input, weight, bias, call)
    route = _route(input, weight, bias, call, packed is not None)
    if key is not None:
        keep(key, route)
    if route.plan is None:
        return torch.nn.functional.conv_transpose3d(input, weight, bias, *call.geometry)
    return _compute(route, input, weight, bias, packed)


def _route(input: Any, weight: Any, bias: Any, call: Call, frozen: bool) -> Route:
    """Decide how a call on plain tensors is computed."""
    if _is_torchs_alone(input, call):
        return Route(call, None)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (input, weight, bias))
    recorded, cast = any(needs), bool(_autocast_dtype(input))
    with torch.no_grad():
        volume, weight, bias = _cast_as_asked(input if input.dim() != 4 else input.unsqueeze(0), weight, bias)
    passes = passes_of(needs)[1:]
    by_torch = leaves_to_torch(passes, volume, weight, bias, call.geometry, call.settings)
    torch_records = by_torch and bool(passes)
    margin_ms = (RECORDING_CAST_MS if cast else RECORDING_MS) if torch_records else CAST_MS if cast else 0.0
    plan = make_plan("fprop", volume, weight, bias, None, call.geometry, call.settings, frozen and not recorded, margin_ms)
    if by_torch and plan.is_torchs:
        return Route(call, None)
    return Route(call, plan, _Forward(plan) if torch_records else None, recorded, cast)


def _compute(route: Route, input: Any, weight: Any, bias: Any, packed: PackedWeight | None) -> Any:
    """Compute a call on plain tensors by our plan."""
    call, plan, forward, recorded, cast = route
    assert plan is not None
    if cast:
        input, weight, bias = _cast(input, weight, bias)
    if forward is not None:
        torch._C._push_on_torch_dispatch_stack(forward)  # what `with forward` comes to, 5 us sooner and for many threads
        try:
            return torch.nn.functional.conv_transpose3d(input, weight, bias, *call.geometry)
        finally:
            torch._C._pop_torch_dispatch_stack(None)
    unbatched = input.dim() == 4
    volume = input.unsqueeze(0) if unbatched else input
    result = _apply_layer(volume, weight, bias, call, plan) if recorded else plan(volume, weight, bias, packed)
    return result.squeeze(0) if unbatched else result


def _in_trace(input: Any, weight: Any, bias: Any, call: Call) -> Any:
    algorithm, fp32_precision, backend = call.settings
    asked_for = fp32_precision is None and (backend == "torch" or algorithm == "library")
    # ONNX knows torch's operator alone.
    if asked_for or _is_torchs_alone(input, call) or torch.onnx.is_in_onnx_export():
        return torch.nn.functional.conv_transpose3d(input, weight, bias, *call.geometry)
    return _by_operator(input, weight, bias, call)


def _by_operator(input: Any, weight: Any, bias: Any, call: Call) -> Any:
    """Compute fprop where a trace or a transform has to see it."""
    input, weight, bias = _cast_as_asked(input, weight, bias)
    if input.dim() == 4:
        return dispatch(call, input.unsqueeze(0), weight, bias).squeeze(0)
    return dispatch(call, input, weight, bias)


def _is_torchs_alone(input: Any, call: Call) -> bool:
    """Whether a call is of a dtype (complex, integers) that no kernel has and torch's operator may have."""
    algorithm, _, backend = call.settings
    return input.dtype not in DTYPES and algorithm in ("auto", "library") and backend in (None, "torch")


def _autocast_dtype(tensor: Any) -> torch.dtype | None:
    """Return the dtype that autocast gives a convolution of this tensor; None where it is off."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def _cast(*tensors: Any) -> tuple[Any, ...]:
    """Return tensors in autocast's dtype, as autocast casts them for torch's own convolution."""
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors
    )


def _cast_as_asked(*tensors: Any) -> tuple[Any, ...]:
    return _cast(*tensors) if _autocast_dtype(tensors[0]) else tensors
