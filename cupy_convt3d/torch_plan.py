"""One pass on torch tensors: the plan of a call (who computes it, its launches, the result's layout) is kept for calls like it.

Nothing here waits for the GPU, and no address, stream or setting of torch's is kept in a plan: a call can be captured in a CUDA graph,
and several threads and streams may use one plan.
"""

from __future__ import annotations

import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch

from . import registry, torch_library, trials
from .arrays import Array, TorchLibrary, check_alike, check_storage
from .backends.base import Prepared, TensorRef
from .choice import Choice, backend_for, decide
from .errors import ProblemError
from .kernel import TENSORS, Kernel
from .packs import PackedWeight
from .plans import keep, plans
from .problem import Problem, Triple

Geometry = tuple[Triple, Triple, Triple, int, Triple]  # stride, padding, output_padding, groups, dilation
Settings = tuple[Any, str | None, str | None]  # algorithm, fp32_precision, backend

ALIGNMENT = 512  # bytes, of what torch's allocator for CUDA returns

is_benchmarking = torch._C._get_cudnn_benchmark  # `torch.backends.cudnn.benchmark`, sooner
_user_kernels: WeakValueDictionary[str, Kernel] = WeakValueDictionary()


def algorithm_name(algorithm: Any) -> Any:
    """Return what stands for `algorithm` in an operator's arguments: a name as it is, and for a `Kernel` one that finds it again."""
    if not isinstance(algorithm, Kernel):
        return algorithm
    name = f"{algorithm.name}@{id(algorithm):x}"
    _user_kernels[name] = algorithm
    return name


def settings_of_others(settings: Settings) -> Settings:
    """Return the settings of the gradients of a pass: a named kernel computes its own pass alone."""
    return settings if settings[0] == "library" else ("auto", *settings[1:])


class PassPlan(ABC):
    """Who computes a pass on tensors of one description: a kernel of ours, or torch.

    Attributes:
        is_torchs: whether torch computes it as it would by itself, by the process's own settings.
        kernel: ours; None where torch computes it, or nothing is to be computed.
        packs: whether a packed weight can be kept.
        memory_bytes: what a call allocates, as far as we know.
        gradients: fprop's: the plans of the gradients, by what else they depend on.
    """

    is_torchs = False
    kernel: Kernel | None = None
    packs = False
    memory_bytes = 0

    def __init__(self) -> None:
        self.gradients: dict[tuple[Any, ...], tuple[PassPlan | None, PassPlan | None]] = {}

    @abstractmethod
    def __call__(
        self, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None = None, packed: PackedWeight | None = None
    ) -> torch.Tensor:
        """Return the result of the pass; `packed` keeps a packed weight for the next call."""


def run(
    pass_name: str,
    first: torch.Tensor,
    second: torch.Tensor,
    bias: torch.Tensor | None,
    shape: tuple[int, ...] | None,
    geometry: Geometry,
    settings: Settings,
) -> torch.Tensor:
    """Return the result of one pass on 5-D tensors; autograd does not see it.

    Args:
        first, second: input and weight (fprop), grad_output and weight (dgrad), input and grad_output (wgrad).
        shape: of the gradient; None for fprop.
        settings: algorithm, fp32_precision, backend.

    Raises:
        ProblemError, KernelError, BackendError: as `cupy_convt3d.conv_transpose3d`.
        RuntimeError: the kernel is not deterministic and `torch.use_deterministic_algorithms` is on.
    """
    key = (*_described(pass_name, first, second, bias), shape, geometry, settings)
    plan = plans.get(key)
    if plan is None:
        plan = keep(key, make_plan(pass_name, first, second, bias, shape, geometry, settings, False))
    return plan(first, second, bias)


def layer_gradients(
    plan: PassPlan,
    gradient: torch.Tensor,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    shapes: tuple[torch.Size, torch.Size],
    geometry: Geometry,
    settings: Settings,
    needs: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients by input, weight and bias that are needed; autograd does not see it.

    Args:
        plan: fprop's.
        input, weight: None where no gradient that is needed reads them.
        shapes: theirs.
    """
    key = (gradient.stride(), needs, _precision(gradient), registry.revision, is_benchmarking())
    found = plan.gradients.get(key)
    if found is None:
        more = (geometry, settings_of_others(settings), False)
        dgrad = make_plan("dgrad", gradient, weight, None, shapes[0], *more) if needs[0] else None
        wgrad = make_plan("wgrad", input, gradient, None, shapes[1], *more) if needs[1] else None
        found = plan.gradients[key] = (dgrad, wgrad)
    dgrad, wgrad = found
    return (
        None if dgrad is None else dgrad(gradient, weight),  # type: ignore[arg-type]
        None if wgrad is None else wgrad(input, gradient),  # type: ignore[arg-type]
        gradient.sum((0, 2, 3, 4)) if needs[2] else None,
    )


def passes_of(needs: tuple[bool, ...]) -> list[str]:
    """Return the passes of a layer: fprop, and those of the gradients that are needed."""
    return ["fprop", *(name for name, needed in zip(("dgrad", "wgrad"), needs, strict=False) if needed)]


def leaves_to_torch(
    passes: Sequence[str],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: Geometry,
    settings: Settings,
) -> bool:
    """Whether torch computes each of these passes of a layer, as it would by itself; grad_output has the output's layout.

    The tensors may be a trace's: a size that varies counts with what it was traced with.
    """
    if input.dim() == 4:
        input = input.unsqueeze(0)
    known: Any = [_known(axis) if isinstance(axis, tuple) else axis for axis in geometry]
    sizes = [_known(size) for tensor in (input, weight) for size in (tensor.shape, tensor.stride())]
    if None in sizes or None in known:
        return False
    like = [torch.empty_strided(*sizes[at : at + 2], dtype=input.dtype, device="meta") for at in (0, 2)]  # type: ignore[arg-type]
    tensors = dict(zip(("input", "weight"), like, strict=True))
    problem = problem_of("fprop", tensors | ({} if bias is None else {"bias": bias}), None, tuple(known))
    layout = torch.channels_last_3d if keeps_channels_last("fprop", *like) else torch.contiguous_format
    tensors["grad_output"] = torch.empty(problem.output_shape, dtype=input.dtype, device="meta", memory_format=layout)
    device = TorchLibrary().describe("input", input).device
    arrays = {name: replace(array, device=device) for name, array in _arrays(tensors).items()}
    return all(_is_torchs(name, problem, arrays, settings) for name in passes) and not torch_library.is_stricter(settings[1], input)


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


def refuse_meta(pass_name: str, first: Any, *others: Any) -> None:
    """Raise ProblemError for a meta tensor beside a first one with memory: the result would have memory too, and nothing in it."""
    for name, tensor in zip(TENSORS[pass_name][1:], others, strict=False):
        if tensor is not None and tensor.is_meta and not first.is_meta:
            raise ProblemError(f"{name}.device=meta: must be {first.device}, as {TENSORS[pass_name][0]}'s")


def keeps_channels_last(pass_name: str, first: Any, second: Any) -> bool:
    """Whether a pass's result has channels_last_3d strides: a volume's does if one of the operands has them."""
    refs = (TensorRef(0, tuple(tensor.shape), tuple(tensor.stride())) for tensor in (first, second))
    return pass_name != "wgrad" and any(ref.is_channels_last for ref in refs)


def _described(pass_name: str, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None) -> tuple[Any, ...]:
    """Return what a plan depends on besides the call's own arguments."""
    described = None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.device)
    return (
        *(pass_name, first.shape, first.stride(), first.dtype, first.device),
        *(second.shape, second.stride(), second.dtype, second.device),
        *(described, _precision(first), registry.revision, is_benchmarking()),
    )


def _precision(tensor: torch.Tensor) -> str | None:
    # `torch.backends.cudnn.conv.fp32_precision`, 1 us sooner
    return torch._C._get_fp32_precision_getter("cuda", "conv") if tensor.dtype is torch.float32 else None


def _is_torchs(pass_name: str, problem: Problem, arrays: dict[str, Array], settings: Settings) -> bool:
    algorithm, fp32_precision, backend = settings if pass_name == "fprop" else settings_of_others(settings)
    operands = {name: arrays[name] for name in TENSORS[pass_name][:2]}
    problem = problem if pass_name == "fprop" else replace(problem, bias=False)
    return decide(pass_name, problem, operands, _algorithm(algorithm), fp32_precision, backend).kernel is None


def _algorithm(name: Any) -> Any:
    """Return the kernel that stands behind a name which `algorithm_name` gave, else the name."""
    return _user_kernels.get(name, name) if isinstance(name, str) else name


def _known(sizes: Any) -> tuple[int, ...] | None:
    """Return sizes as integers; None if one of them depends on data."""
    hints = [size.node.hint if isinstance(size, torch.SymInt) else int(size) for size in sizes]
    return None if None in hints else tuple(hints)


def _arrays(tensors: dict[str, torch.Tensor]) -> dict[str, Array]:
    library = TorchLibrary()
    return {name: library.describe(name, tensor) for name, tensor in tensors.items()}



def make_plan(
    pass_name: str,
    first: Any,
    second: Any,
    bias: torch.Tensor | None,
    shape: tuple[int, ...] | None,
    geometry: Geometry,
    settings: Settings,
    frozen: bool,
    margin_ms: float = 0.0,
) -> PassPlan:
    """Return the plan of a pass on tensors like these.

    Args:
        first, second, shape, geometry, settings: as for `run`.
        frozen: the packed weight is kept.
        margin_ms: what a kernel has to save to be taken in place of torch's operator.
    """
    given = dict(zip(TENSORS[pass_name], (first, second, bias), strict=False))
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None and name != TENSORS[pass_name][-1]}
    arrays = _arrays(tensors)
    check_alike(arrays)
    problem = problem_of(pass_name, tensors, shape, geometry)
    algorithm, fp32_precision, backend = settings
    decided = decide(pass_name, problem, arrays, _algorithm(algorithm), fp32_precision, backend, packed=frozen, margin_ms=margin_ms)
    layout = torch.channels_last_3d if keeps_channels_last(pass_name, first, second) else torch.contiguous_format
    shapes, written = problem.shapes(pass_name)
    result = TensorRef(0, shapes[written], torch.empty(shapes[written], device="meta", memory_format=layout).stride())
    itemsize = next(iter(tensors.values())).element_size()

    def planned(choice: Choice) -> PassPlan:
        if choice.kernel is None:
            stricter = torch_library.is_stricter(fp32_precision, first)
            return _TorchPlan(pass_name, problem, result, itemsize, stricter)
        if problem.batch == 0:
            return _EmptyPlan(result)
        return _KernelPlan(choice.kernel, choice, problem, arrays, result, itemsize)

    def build(choice: Choice) -> None:
        assert choice.kernel is not None
        runs_on = backend_for(choice.backend, next(iter(arrays.values())).device.index)
        plan = choice.kernel.plan(choice.problem or problem, choice.instance, runs_on.multiprocessors, result.layout)
        runs_on.build(runs_on.instance(choice.kernel, choice.instance, plan))

    if decided.trial is not None and problem.batch and trials.may_be_held(first):
        winner = trials.hold(decided.trial, planned, build, (first, second, bias), packed=frozen, margin_ms=margin_ms)
        if winner is not None:
            return winner
    return planned(decided)


class _TorchPlan(PassPlan):
    """torch's own operator."""

    def __init__(self, pass_name: str, problem: Problem, result: TensorRef, itemsize: int, stricter: bool) -> None:
        super().__init__()
        self.is_torchs = not stricter
        self.memory_bytes = math.prod(result.shape) * itemsize
        self._call = (pass_name, problem, stricter)
        self._strides = result.strides

    def __call__(
        self, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None = None, packed: PackedWeight | None = None
    ) -> torch.Tensor:
        result = torch_library.run(*self._call, first, second, bias)
        return result if result.stride() == self._strides else _restride(result, self._strides)


class _EmptyPlan(PassPlan):
    """A batch of 0: no launch, and a sum over nothing."""

    def __init__(self, result: TensorRef) -> None:
        super().__init__()
        self._result = result

    def __call__(
        self, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None = None, packed: PackedWeight | None = None
    ) -> torch.Tensor:
        return first.new_empty_strided(self._result.shape, self._result.strides).zero_()


class _KernelPlan(PassPlan):
    """Launches one of our kernels on whatever tensors have the layouts it was made for."""

    def __init__(
        self, kernel: Kernel, choice: Choice, problem: Problem, arrays: dict[str, Array], result: TensorRef, itemsize: int
    ) -> None:
        super().__init__()
        first = next(iter(arrays.values()))
        refs = {name: array.ref for name, array in arrays.items()} | {kernel.written: result}
        self._live_weight: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
        if choice.problem is not None:
            refs["weight"], ahead = refs["weight"].with_taps(problem.live_taps)
            self._live_weight = (refs["weight"].shape, refs["weight"].strides, ahead)
        copied = {name for name, ref in refs.items() if not (kernel.takes_strides(name) or ref.is_contiguous)}
        refs |= {name: TensorRef(0, refs[name].shape, _row_major(refs[name].shape)) for name in copied}
        self.kernel: Kernel = kernel
        self._copied = tuple(name in copied for name in arrays) if copied else ()
        self._adapts = not kernel.deterministic or self._live_weight is not None or bool(copied)
        self._result, self._written = result, refs[kernel.written]
        self._memory = (self._written.shape, self._written.strides)
        self._device = first.device.index if first.device.kind == "cuda" else None
        self._backend = backend_for(choice.backend, first.device.index)
        self._prepared = Prepared(self._backend, kernel, choice.problem or problem, choice.instance, refs)
        # All workspaces in one piece of memory, each at the alignment of an allocation of its own.
        ends = tuple(itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in self._prepared.workspace.values()))
        *self._starts, self._workspace_bytes = (0, *ends)
        self.packs = bool(self._prepared.packs)
        allocated = [kernel.written, *copied]  # a result that goes through a copy is there twice
        self.memory_bytes = sum(math.prod(refs[name].shape) for name in allocated) * itemsize + self._workspace_bytes
        self._names = (*arrays, kernel.written, *self._prepared.workspace)

    def __call__(
        self, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None = None, packed: PackedWeight | None = None
    ) -> torch.Tensor:
        operands = (first, second) if bias is None else (first, second, bias)
        if self._adapts:
            operands = self._adapted(operands)
        written = first.new_empty_strided(*self._memory)
        # Asked for at every call: a kept stream is not the one that a CUDA graph captures.
        stream = 0 if self._device is None else torch._C._cuda_getCurrentRawStream(self._device)
        addresses = [tensor.data_ptr() for tensor in (*operands, written)]
        if self._device is None or 0 in addresses:  # a GPU's own check would take as long as the rest of the call
            self._check(operands)
        if packed is not None and self._prepared.packs and not self._backend.is_capturing(stream):
            self._launch_keeping(packed, second, first, addresses, stream)
        else:
            if self._starts:
                # The allocator hands the memory out again only to work queued after these launches.
                workspace = first.new_empty_strided((self._workspace_bytes,), (1,), dtype=torch.uint8)
                base = workspace.data_ptr()
                addresses += [base + start for start in self._starts]
            self._prepared.launch(dict(zip(self._names, addresses, strict=True)), stream)
        if self._written is self._result:
            return written
        return written.new_empty_strided(self._result.shape, self._result.strides).copy_(written)

    def _launch_keeping(self, packed: PackedWeight, weight: torch.Tensor, first: torch.Tensor, addresses: list[int], stream: int) -> None:
        """Launch with the workspaces that are kept, or keep those that are made."""
        kept = packed.find(weight, self, stream, self._device)
        sizes = self._prepared.workspace
        made = {name: kept[name] if name in kept else first.new_empty(size, dtype=torch.uint8) for name, size in sizes.items()}
        addresses += [workspace.data_ptr() for workspace in made.values()]
        self._prepared.launch(dict(zip(self._names, addresses, strict=True)), stream, packed=bool(kept))
        if not kept:
            packed.keep(weight, self, stream, {name: made[name] for name in self._prepared.packs})

    def _adapted(self, operands: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Return the operands as the kernel takes them: the weight without dead taps, copies of what it takes no strides of."""
        if not self.kernel.deterministic:
            _alert_not_deterministic(self.kernel)
        if self._live_weight is not None:
            first, weight, *more = operands
            shape, strides, ahead = self._live_weight
            operands = (first, weight.as_strided(shape, strides, weight.storage_offset() + ahead), *more)
        if self._copied:
            self._check(operands)
            pairs = zip(operands, self._copied, strict=True)
            operands = tuple(tensor.contiguous() if copied else tensor for tensor, copied in pairs)
        return operands

    def _check(self, operands: Sequence[torch.Tensor]) -> None:
        for name, tensor in zip(self._names, operands, strict=False):
            check_storage(name, tensor)


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
