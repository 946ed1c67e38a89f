"""One pass on torch tensors: the plan of a call (who computes it, its launches, the result's layout) is kept for calls like it.

Nothing here waits for the GPU, and no address, stream or setting of torch's is kept in a plan: a call can be captured in a CUDA graph,
and several threads and streams may use one plan. Packed weights are kept apart, in `packs`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch

from . import packs, registry, torch_library
from .arrays import Array, TorchLibrary
from .backends.base import Prepared, TensorRef
from .choice import Choice, backend_for, decide
from .errors import ProblemError
from .kernel import TENSORS, Kernel
from .ops import check_alike
from .problem import Problem, Triple

Geometry = tuple[Triple, Triple, Triple, int, Triple]  # stride, padding, output_padding, groups, dilation
Plan = Callable[..., torch.Tensor]

_MOST_PLANS = 1024
_plans: dict[tuple[Any, ...], Plan] = {}
_user_kernels: WeakValueDictionary[str, Kernel] = WeakValueDictionary()


def algorithm_name(algorithm: Any) -> Any:
    """Return what stands for `algorithm` in an operator's arguments: a name as it is, and for a `Kernel` one that finds it again."""
    if not isinstance(algorithm, Kernel):
        return algorithm
    name = f"{algorithm.name}@{id(algorithm):x}"
    _user_kernels[name] = algorithm
    return name


def run(
    pass_name: str,
    first: torch.Tensor,
    second: torch.Tensor,
    bias: torch.Tensor | None,
    shape: tuple[int, ...] | None,
    geometry: Geometry,
    algorithm: str,
    fp32_precision: str | None,
    backend: str | None,
    keep: bool = False,
) -> torch.Tensor:
    """Return the result of one pass on 5-D tensors; autograd does not see it.

    Args:
        first, second: input and weight (fprop), grad_output and weight (dgrad), input and grad_output (wgrad).
        shape: of the gradient; None for fprop.
        keep: whether a packed weight may be used again, and kept for the next call.

    Raises:
        ProblemError, KernelError, BackendError: as `cupy_convt3d.conv_transpose3d`.
        RuntimeError: the kernel is not deterministic and `torch.use_deterministic_algorithms` is on.
    """
    if fp32_precision is None and first.dtype is torch.float32:
        fp32_precision = torch._C._get_fp32_precision_getter("cuda", "conv")  # `torch.backends.cudnn.conv`, 1 us sooner
    described = None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device)
    key = (
        *(pass_name, first.shape, first.stride(), first.dtype, first.device),
        *(second.shape, second.stride(), second.dtype, second.device),
        *(described, shape, geometry, algorithm, fp32_precision, backend, keep, registry.revision),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _make(pass_name, first, second, bias, shape, geometry, algorithm, fp32_precision, backend, keep)
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan(keep, first, second) if bias is None else plan(keep, first, second, bias)


def problem_of(
    pass_name: str,
    tensors: dict[str, Any],
    shape: tuple[int, ...] | None,
    geometry: Geometry,
) -> Problem:
    """Return the problem of one pass; `tensors` are by name, as `kernel.TENSORS` has them.

    Raises:
        ProblemError: the tensors or the parameters do not fit together.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if shape is not None:
        shapes["input" if pass_name == "dgrad" else "weight"] = tuple(shape)
    problem = Problem.from_shapes(shapes["input"], shapes["weight"], shapes.get("bias"), *geometry)
    if shapes.get("grad_output", problem.output_shape) != problem.output_shape:
        raise ProblemError(f"grad_output.shape={shapes['grad_output']}: must be {problem.output_shape} for this problem")
    return problem


def keeps_channels_last(pass_name: str, first: Any, second: Any) -> bool:
    """Whether a pass's result has channels_last_3d strides: a volume's does if one of the operands has them."""
    refs = (TensorRef(0, tuple(tensor.shape), tuple(tensor.stride())) for tensor in (first, second))
    return pass_name != "wgrad" and any(ref.is_channels_last for ref in refs)


def _make(
    pass_name: str,
    first: torch.Tensor,
    second: torch.Tensor,
    bias: torch.Tensor | None,
    shape: tuple[int, ...] | None,
    geometry: Geometry,
    algorithm: str,
    fp32_precision: str | None,
    backend: str | None,
    keep: bool,
) -> Plan:
    given = dict(zip(TENSORS[pass_name], (first, second, bias), strict=False))
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None and name != TENSORS[pass_name][-1]}
    library = TorchLibrary()
    arrays = {name: library.describe(name, tensor) for name, tensor in tensors.items()}
    check_alike(arrays)
    problem = problem_of(pass_name, tensors, shape, geometry)
    chosen: Any = _user_kernels.get(algorithm, algorithm)
    choice = decide(pass_name, problem, arrays, chosen, fp32_precision, backend, packed=keep)
    layout = torch.channels_last_3d if keeps_channels_last(pass_name, first, second) else torch.contiguous_format
    shapes, written = problem.shapes(pass_name)
    strides = torch.empty(shapes[written], device="meta", memory_format=layout).stride()
    if choice.kernel is None:

        def call_library(keep: bool, *operands: torch.Tensor) -> torch.Tensor:
            result = torch_library.run(pass_name, problem, choice.precision, *operands)
            return result if result.stride() == strides else _restride(result, strides)

        return call_library
    if problem.batch == 0:  # no launch, and a sum over nothing

        def call_nothing(keep: bool, first: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
            return first.new_empty_strided(shapes[written], strides).zero_()

        return call_nothing
    return _KernelPlan(choice.kernel, choice, problem, arrays, TensorRef(0, shapes[written], strides))


class _KernelPlan:
    """Launches one of our kernels on whatever tensors have the layouts it was made for."""

    def __init__(self, kernel: Kernel, choice: Choice, problem: Problem, arrays: dict[str, Array], result: TensorRef) -> None:
        first = next(iter(arrays.values()))
        refs = {name: array.ref for name, array in arrays.items()} | {kernel.written: result}
        copied = {name for name, ref in refs.items() if not (kernel.takes_strides(name) or ref.is_contiguous)}
        refs |= {name: TensorRef(0, refs[name].shape, _row_major(refs[name].shape)) for name in copied}
        self._kernel = kernel
        self._names = tuple(arrays)
        self._copied = tuple(name in copied for name in arrays) if copied else ()
        self._result, self._written = result, refs[kernel.written]
        self._device = first.device.index if first.device.kind == "cuda" else None
        self._backend = backend_for(choice.backend, first.device.index)
        self._prepared = Prepared(self._backend, kernel, problem, choice.instance, refs)
        self._workspace = tuple(self._prepared.workspace.items())

    def __call__(self, keep: bool, *operands: torch.Tensor) -> torch.Tensor:
        if not self._kernel.deterministic:
            _alert_not_deterministic(self._kernel)
        weight = operands[1]  # where a weight is packed
        if self._copied:
            pairs = zip(operands, self._copied, strict=True)
            operands = tuple(tensor.contiguous() if copied else tensor for tensor, copied in pairs)
        written = operands[0].new_empty_strided(self._written.shape, self._written.strides)
        addresses = {name: tensor.data_ptr() for name, tensor in zip(self._names, operands, strict=True)}
        addresses[self._kernel.written] = written.data_ptr()
        # Asked for at every call: a kept stream is not the one that a CUDA graph captures.
        stream = 0 if self._device is None else torch._C._cuda_getCurrentRawStream(self._device)
        # An inference tensor has no version.
        keep = keep and bool(self._prepared.packs) and not weight.is_inference() and not self._backend.is_capturing(stream)
        version = weight._version if keep else 0  # as it is before it is packed: whoever changes it meanwhile is not missed
        packed = packs.find(weight, self, version, stream, self._device) if keep else {}
        # The allocator hands a workspace out again only to work queued after these launches.
        workspaces = {
            name: packed[name] if name in packed else operands[0].new_empty(size, dtype=torch.uint8) for name, size in self._workspace
        }
        for name, workspace in workspaces.items():
            addresses[name] = workspace.data_ptr()
        self._prepared.launch(addresses, stream, packed=packed)
        if keep and not packed:
            packs.keep(weight, self, version, stream, {name: workspaces[name] for name in self._prepared.packs})
        if self._written is self._result:
            return written
        return written.new_empty_strided(self._result.shape, self._result.strides).copy_(written)


def _restride(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    steps = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if all(have == wanted or size == 1 for size, have, wanted in steps):  # the same memory: an axis of size 1 has any stride
        return tensor.as_strided(tensor.shape, strides)
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _alert_not_deterministic(kernel: Kernel) -> None:
    if not torch.are_deterministic_algorithms_enabled():
        return
    message = (
        f"{kernel.name} is not deterministic, and `torch.use_deterministic_algorithms(True)` is set; "
        "algorithm='auto' takes deterministic kernels only"
    )
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(message)
    warnings.warn(message, UserWarning, stacklevel=3)
