"""The torch operators `cupy_convt3d::conv_transpose3d`, `::conv_transpose3d_grad_input` and `::conv_transpose3d_grad_weight`.

The three passes are the partial derivatives of one trilinear form: T(input, weight, output) sums input * weight * output over every
input voxel, tap and output voxel that the tap joins. So each pass is linear in either operand, and the derivative of a pass by an
operand is again a pass: the one that writes that operand's role. One autograd function therefore serves all three, to any order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from . import dtypes
from .errors import ProblemError
from .problem import triple
from .torch_plan import (
    Geometry,
    Settings,
    algorithm_name,
    keeps_channels_last,
    leaves_to_torch,
    passes_of,
    problem_of,
    refuse_meta,
    run,
    settings_of_others,
)

_LIBRARY = torch.library.Library("cupy_convt3d", "DEF")
_SETTINGS = (
    "SymInt[3] stride, SymInt[3] padding, SymInt[3] output_padding, SymInt groups, SymInt[3] dilation, "
    "str algorithm, str? fp32_precision, str? backend"
)
_SCHEMAS = {
    "fprop": f"conv_transpose3d(Tensor input, Tensor weight, Tensor? bias, {_SETTINGS}) -> Tensor",
    "dgrad": f"conv_transpose3d_grad_input(Tensor grad_output, Tensor weight, SymInt[] input_shape, {_SETTINGS}) -> Tensor",
    "wgrad": f"conv_transpose3d_grad_weight(Tensor input, Tensor grad_output, SymInt[] weight_shape, {_SETTINGS}) -> Tensor",
}
# The roles of a pass's two operands and of its result in the trilinear form.
_ROLES = {"fprop": ("input", "weight", "output"), "dgrad": ("output", "weight", "input"), "wgrad": ("input", "output", "weight")}
_WRITES = {roles[-1]: pass_name for pass_name, roles in _ROLES.items()}
DTYPES = {getattr(torch, dtype.numpy.name) for dtype in dtypes.DTYPES.values()}  # that kernels have
_FRONT = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(eq=False)
class Call:
    """Everything of a call but its tensors; `shape` is that of the result, and None for fprop."""

    pass_name: str
    shape: tuple[int, ...] | None
    geometry: Geometry
    settings: Settings

    def writing(self, role: str, shape: Sequence[int]) -> Call:
        """Return the pass that gives the derivative by an operand. A named kernel computes its own pass alone."""
        pass_name = _WRITES[role]
        settings = self.settings if pass_name == self.pass_name else settings_of_others(self.settings)
        return replace(self, pass_name=pass_name, shape=None if pass_name == "fprop" else tuple(shape), settings=settings)

    def operator(self, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        third = bias if self.pass_name == "fprop" else self.shape
        return _OPERATORS[self.pass_name](first, second, third, *self.geometry, *self.settings)


class _Pass(torch.autograd.Function):
    """One pass, differentiable: reverse mode to any order, forward mode, `torch.func` and vmap over any operand."""

    @staticmethod
    def forward(first: Any, second: Any, bias: Any, call: Call) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            if not torch._C._are_functorch_transforms_active():
                return call.operator(first, second, bias)
            with torch.enable_grad(), _set_fwd_grad_enabled(True):  # an outer transform records too
                return call.operator(first, second, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        first, second, _, call = inputs
        ctx.call, ctx.shapes = call, (first.shape, second.shape, output.shape)
        save_operands(ctx, first, second)
        ctx.save_for_forward(first, second)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        first, second = ctx.saved_tensors
        return (*gradients(ctx.call, first, second, gradient, ctx.shapes, ctx.needs_input_grad), None)

    @staticmethod
    def jvp(ctx: Any, first_tangent: Any, second_tangent: Any, bias_tangent: Any, _: Any) -> Any:
        first, second = ctx.saved_tensors
        terms = []
        if first_tangent is not None:
            terms.append(_apply(ctx.call, first_tangent, second))
        if second_tangent is not None:
            terms.append(_apply(ctx.call, first, second_tangent))
        if bias_tangent is not None:
            terms.append(bias_tangent[:, None, None, None].expand(ctx.shapes[2]))
        return sum(terms[1:], terms[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], first: Any, second: Any, bias: Any, call: Call) -> tuple[Any, int]:
        return _batched(info.batch_size, in_dims, first, second, bias, call, _apply)


def save_operands(ctx: Any, first: Any, second: Any) -> None:
    """Keep what the gradients read: a weight that needs none keeps no input alive, and the other way round."""
    needs_first, needs_second = ctx.needs_input_grad[:2]
    ctx.save_for_backward(first if needs_second else None, second if needs_first else None)


def gradients(call: Call, first: Any, second: Any, gradient: Any, shapes: tuple[Any, ...], needs: tuple[bool, ...]) -> tuple[Any, ...]:
    """Return the derivatives of a pass by its operands and the bias, recorded where that is asked for."""
    first_role, second_role, role = _ROLES[call.pass_name]
    by_first = by_second = by_bias = None
    if needs[0]:
        by_first = _derive(call.writing(first_role, shapes[0]), {second_role: second, role: gradient})
    if needs[1]:
        by_second = _derive(call.writing(second_role, shapes[1]), {first_role: first, role: gradient})
    if needs[2]:
        by_bias = gradient.sum((0, 2, 3, 4))
    return by_first, by_second, by_bias


def _record(first: Any, second: Any, bias: Any, call: Call) -> Any:
    """Compute a pass and record it for autograd and the transforms of `torch.func`.

    An operator's Autograd kernel runs for one transform, with the dispatch to the outermost one behind it. `_Pass.apply` would
    begin that dispatch again and find no kernel; there the call is recorded for this one, and `forward` goes on to the next.
    """
    if not torch._C._are_functorch_transforms_active() or not torch._C._dispatch_tls_is_dispatch_key_excluded(_FRONT):
        return _Pass.apply(first, second, bias, call)
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, _Pass).apply(first, second, bias, call)


def _derive(call: Call, operands: dict[str, Any]) -> Any:
    first_role, second_role, _ = _ROLES[call.pass_name]
    return _apply(call, operands[first_role], operands[second_role])


def _apply(call: Call, first: Any, second: Any, bias: Any = None) -> Any:
    if _is_watched(first, second, bias):
        return _record(first, second, bias, call)
    return call.operator(first, second, bias)


def _is_watched(first: Any, second: Any, bias: Any) -> bool:
    """Whether autograd or a transform has to see the call."""
    if torch.is_grad_enabled() and (first.requires_grad or second.requires_grad or (bias is not None and bias.requires_grad)):
        return True
    return is_transformed()


def is_transformed() -> bool:
    """Whether the call lies within a transform: `torch.func`, vmap, forward-mode AD."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _batched(
    size: int, in_dims: tuple[Any, ...], first: Any, second: Any, bias: Any, call: Call, compute: Callable[..., Any]
) -> tuple[Any, int]:
    """The vmap rule: volumes with one weight become one larger batch; a weight for each becomes more groups."""
    pairs = ((first, in_dims[0]), (second, in_dims[1]))
    first, second = (tensor.movedim(dim, 0) if dim is not None else tensor for tensor, dim in pairs)
    roles = dict(zip(_ROLES[call.pass_name], (in_dims[0], in_dims[1], 0), strict=False))
    by_group = roles["weight"] is not None
    # The new axis goes into a volume's batch (0) or channels (1), and into a weight's first axis (0).
    folded = []
    for tensor, role, dim in zip((first, second), _ROLES[call.pass_name], in_dims, strict=False):
        if dim is None and (by_group or role != "weight"):
            tensor, dim = tensor.expand(size, *tensor.shape), 0
        axis = 1 if by_group and role != "weight" else 0
        folded.append(tensor if dim is None else tensor.movedim(0, axis).flatten(axis, axis + 1))
    written = _ROLES[call.pass_name][-1]
    axis = 1 if by_group and written != "weight" else 0
    if size == 0:  # no volumes and no groups: no pass takes that
        return _nothing(in_dims, first, second, call), 0
    shape = None if call.shape is None else tuple(n * size if a == axis else n for a, n in enumerate(call.shape))
    *paddings, groups, dilation = call.geometry
    geometry: Any = (*paddings, groups * size if by_group else groups, dilation)
    result = compute(replace(call, shape=shape, geometry=geometry), *folded)
    result = result.unflatten(axis, (size, result.shape[axis] // size)).movedim(axis, 0)
    if bias is not None:
        bias = bias[None] if in_dims[2] is None else bias.movedim(in_dims[2], 0)
        result = result + bias[:, None, :, None, None, None]
    return result, 0


def _nothing(in_dims: tuple[Any, ...], first: Any, second: Any, call: Call) -> Any:
    """Return the result of vmap over no examples; the operands that it goes over have that axis in front."""
    one, other = (t if dim is None else t.new_empty(t.shape[1:]) for t, dim in zip((first, second), in_dims, strict=False))
    return first.new_empty((0, *_written_shape(one, other, None, call)))


def _implementation(pass_name: str) -> tuple[Any, Any, Any, Any]:
    """Return what the dispatcher calls for a pass: on memory, on fake tensors, under autograd, under vmap."""

    def parse(*arguments: Any) -> tuple[Any, Any, Any, Call]:
        first, second, third, stride, padding, output_padding, groups, dilation, *settings = arguments
        geometry = (tuple(stride), tuple(padding), tuple(output_padding), groups, tuple(dilation))
        if pass_name == "fprop":
            bias, shape = third, None
        else:  # batch and channels are those of the tensors: DTensor gives a shard of them, and the shape of the whole
            sizes = (first.shape[0], second.shape[0]) if pass_name == "dgrad" else (first.shape[1], second.shape[1] // groups)
            bias, shape = None, (*sizes, *third[2:])
        return first, second, bias, Call(pass_name, shape, geometry, tuple(settings))

    def compute(*arguments: Any) -> Any:
        return _run(*parse(*arguments))

    def fake(*arguments: Any) -> Any:
        first, second, bias, call = parse(*arguments)
        refuse_meta(pass_name, first, second, bias)
        shape = _written_shape(first, second, bias, call)
        layout = torch.channels_last_3d if keeps_channels_last(pass_name, first, second) else torch.contiguous_format
        return torch.empty(shape, dtype=first.dtype, device=first.device, memory_format=layout)

    def differentiate(*arguments: Any) -> Any:
        first, second, bias, call = parse(*arguments)
        if pass_name == "fprop" and _is_lowered() and is_torchs_own(first, second, bias, call):
            return torch.nn.functional.conv_transpose3d(first, second, bias, *call.geometry)
        if _is_watched(first, second, bias):
            return _record(first, second, bias, call)
        if is_plain(first, second, bias):
            return _run(first, second, bias, call)
        with torch._C._AutoDispatchBelowAutograd():
            return call.operator(first, second, bias)

    def vectorize(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, int]:
        first, second, bias, call = parse(*arguments)
        dims = (in_dims[0], in_dims[1], in_dims[2] if bias is not None else None)
        return _batched(info.batch_size, dims, first, second, bias, call, lambda call, *folded: call.operator(*folded, None))

    return compute, fake, differentiate, vectorize


def _run(first: Any, second: Any, bias: Any, call: Call) -> Any:
    return run(call.pass_name, first, second, bias, call.shape, call.geometry, call.settings)


def _written_shape(first: Any, second: Any, bias: Any, call: Call) -> tuple[Any, ...]:
    names = {"input": "input", "weight": "weight", "output": "grad_output"}
    tensors = {names[role]: t for role, t in zip(_ROLES[call.pass_name], (first, second), strict=False)}
    tensors |= {} if bias is None else {"bias": bias}
    sizes = [size for tensor in tensors.values() for size in tensor.shape] + list(call.shape or ())
    if all(type(size) is int for size in sizes):
        shapes, written = problem_of(call.pass_name, tensors, call.shape, call.geometry).shapes(call.pass_name)
        return shapes[written]
    if call.shape is not None:  # of sizes not known yet only what the result needs is computed
        return call.shape
    torch._check(first.shape[1] == second.shape[0], lambda: f"weight.shape={second.shape}: must begin with the input's channels")
    stride, padding, output_padding, groups, dilation = call.geometry
    volume = (
        (size - 1) * stride[a] - 2 * padding[a] + dilation[a] * (taps - 1) + output_padding[a] + 1
        for a, (size, taps) in enumerate(zip(first.shape[2:], second.shape[2:], strict=True))
    )
    return (first.shape[0], second.shape[1] * groups, *volume)


def _register(pass_name: str, schema: str) -> Any:
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    name = schema.partition("(")[0]
    compute, fake, differentiate, vectorize = _implementation(pass_name)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, compute, key)
    _LIBRARY.impl(name, differentiate, "Autograd")
    torch.library.register_fake(f"cupy_convt3d::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"cupy_convt3d::{name}", vectorize, lib=_LIBRARY)
    return getattr(torch.ops.cupy_convt3d, name).default


_OPERATORS = {pass_name: _register(pass_name, schema) for pass_name, schema in _SCHEMAS.items()}

from .torch_rules import is_sharded  # noqa: E402, it names the operators


def _three(name: str, value: Any, minimum: int) -> Any:
    if type(value) is int:
        return (value, value, value)
    if type(value) is tuple and len(value) == 3 and type(value[0]) is type(value[1]) is type(value[2]) is int:
        return value
    if isinstance(value, (tuple, list)) and any(isinstance(size, torch.SymInt) for size in value):
        return tuple(value)  # sizes of a trace, which a look at their values would fix
    return triple(name, value, minimum)


def geometry_of(stride: Any, padding: Any, output_padding: Any, groups: Any, dilation: Any) -> Geometry:
    if type(groups) is not int:
        groups = triple("groups", groups, 1)[0]
    paddings = (_three("padding", padding, 0), _three("output_padding", output_padding, 0))
    return (_three("stride", stride, 1), *paddings, groups, _three("dilation", dilation, 1))


def dispatch(call: Call, first: Any, second: Any, bias: Any = None) -> Any:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return call.operator(first, second, bias)
    first, second, bias = map(without_subclass, (first, second, bias))
    if _is_watched(first, second, bias):
        return _Pass.apply(first, second, bias, call)
    if is_plain(first, second, bias):
        return _run(first, second, bias, call)  # what the dispatcher would come to, without its 5 us
    return call.operator(first, second, bias)


def is_plain(*tensors: Any) -> bool:
    """Whether tensors are memory and nothing else, and nobody but autograd has to see what becomes of them."""
    for tensor in tensors:
        if tensor is not None:
            usual = type(tensor) in PLAIN_TYPES and (tensor.is_cuda or tensor.is_cpu)
            if not usual or tensor.layout is not torch.strided or tensor.is_neg():
                return False
    return not torch._C._len_torch_dispatch_stack()


def _is_lowered() -> bool:
    """Whether a graph is being made of what lies below autograd, as compilers have it made."""
    functional = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return functional is not None or get_proxy_mode() is not None


def is_torchs_own(input: Any, weight: Any, bias: Any, call: Call) -> bool:
    """Whether a layer that a trace sees is left to torch. Not one under vmap or on a DTensor, where torch's has faults of its own:
    no examples in a batch, and sharded channels."""
    if is_transformed() or any(map(is_sharded, (input, weight))):
        return False
    recorded = torch.is_grad_enabled()
    needs = tuple(recorded and t is not None and t.requires_grad for t in (input, weight, bias))
    return leaves_to_torch(passes_of(needs), input, weight, bias, call.geometry, call.settings)


def without_subclass(tensor: Any) -> Any:
    """Return a tensor whose class only adds methods as torch's own class, so that none of them is called on the way."""
    if tensor is None or type(tensor) in PLAIN_TYPES or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return tensor
    return torch.Tensor.as_subclass(tensor, torch.Tensor)


def conv_transpose3d_grad_input(
    grad_output: torch.Tensor,
    weight: torch.Tensor,
    input_shape: Sequence[int],
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: Any = 1,
    dilation: Any = 1,
    *,
    algorithm: Any = "auto",
    fp32_precision: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`cupy_convt3d.conv_transpose3d_grad_input` on torch tensors, differentiable; see there for arguments and errors."""
    settings = (algorithm_name(algorithm), fp32_precision, backend)
    geometry = geometry_of(stride, padding, output_padding, groups, dilation)
    if len(input_shape) != grad_output.dim():
        raise ProblemError(f"input_shape={tuple(input_shape)}: must have as many sizes as grad_output, {grad_output.dim()}")
    if grad_output.dim() == 4:
        call = Call("dgrad", (1, *input_shape), geometry, settings)
        return dispatch(call, grad_output.unsqueeze(0), weight).squeeze(0)
    return dispatch(Call("dgrad", tuple(input_shape), geometry, settings), grad_output, weight)


def conv_transpose3d_grad_weight(
    input: torch.Tensor,
    grad_output: torch.Tensor,
    weight_shape: Sequence[int],
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: Any = 1,
    dilation: Any = 1,
    *,
    algorithm: Any = "auto",
    fp32_precision: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """`cupy_convt3d.conv_transpose3d_grad_weight` on torch tensors, differentiable; see there for arguments and errors."""
    settings = (algorithm_name(algorithm), fp32_precision, backend)
    call = Call("wgrad", tuple(weight_shape), geometry_of(stride, padding, output_padding, groups, dilation), settings)
    if input.dim() == grad_output.dim() == 4:
        input, grad_output = input.unsqueeze(0), grad_output.unsqueeze(0)
    return dispatch(call, input, grad_output)
