"""A drop-in for `torch.nn.ConvTranspose3d`; `convert` puts it into a model in place of torch's, `freeze` keeps its packed weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ProblemTypeError, require
from .kernel import Kernel

require("torch", "cupy_convt3d.nn", "torch")

import torch  # noqa: E402

from .choice import check_names  # noqa: E402
from .ops import load_torch_layer  # noqa: E402
from .packs import PackedWeight  # noqa: E402
from .torch_layer import TorchsOwn, conv_transpose3d, described, in_eager_mode, is_eager  # noqa: E402
from .torch_plan import algorithm_name  # noqa: E402

__all__ = ["Conversion", "ConvTranspose3d", "Frozen", "convert", "freeze", "revert"]

load_torch_layer()  # before torch.compile may follow a call to where it is loaded
torch.fx.wrap("conv_transpose3d")  # one node in a symbolic trace


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` computed by this package: same arguments, parameters, state_dict and results.

    Args:
        algorithm: as for `cupy_convt3d.conv_transpose3d`; a named kernel computes the forward pass, the gradients take "auto".
        backend: as for `cupy_convt3d.conv_transpose3d`, for all passes.

    Raises:
        ProblemError: an option is of the wrong type, or names nothing that there is.
    """

    _packed: PackedWeight | None = None  # of a frozen module
    _own: TorchsOwn | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        algorithm: str | Kernel = "auto",
        backend: str | None = None,
    ) -> None:
        check_names(algorithm, backend)
        sizes = (kernel_size, stride, padding, output_padding)
        super().__init__(in_channels, out_channels, *sizes, groups, bias, dilation, padding_mode, device, dtype)
        self.algorithm = algorithm
        self.backend = backend
        self._own = TorchsOwn()

    def forward(self, input: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        """Return the transposed convolution of `input` (N, Cin, D, H, W) or (Cin, D, H, W).

        Args:
            output_size: the (oD, oH, oW) wanted, also with N and Cout in front; it replaces `output_padding`.

        Raises:
            ValueError: no output padding gives `output_size`.
            ProblemTypeError: `input` is no tensor.
            ProblemError, KernelError, BackendError: as `cupy_convt3d.conv_transpose3d`.
        """
        own = self._own
        if output_size is None and own is not None and is_eager(input):
            geometry: Any = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
            settings = (algorithm_name(self.algorithm), None, self.backend)
            if own.last is not None and own.last == described(input, *settings):
                return torch.nn.functional.conv_transpose3d(input, self.weight, self.bias, *geometry)
            return in_eager_mode(input, self.weight, self.bias, geometry, settings, self._packed, own)
        if not isinstance(input, torch.Tensor) and not hasattr(type(input), "__torch_function__"):
            raise ProblemTypeError(f"input: is a {type(input).__name__}; must be a torch.Tensor")
        output_padding: Any = self.output_padding
        if output_size is not None:
            sizes = (self.stride, self.padding, self.kernel_size, 3, self.dilation)
            output_padding = tuple(self._output_padding(input, list(output_size), *sizes))  # type: ignore[arg-type]
        packed = self._packed if isinstance(input, torch.Tensor) else None  # nothing for a symbolic trace to hold
        geometry = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        return conv_transpose3d(
            input, self.weight, self.bias, *geometry, algorithm=self.algorithm, backend=self.backend, packed=packed
        )


@dataclass(frozen=True)
class Conversion:
    """What `convert` did, by the modules' names in the model ("" is the model itself).

    Attributes:
        swapped: the modules that are ours now.
        left: the other transposed 3D convolutions, each with the reason why it stays torch's.
    """

    swapped: tuple[str, ...]
    left: Mapping[str, str]


def convert(model: torch.nn.Module, *, algorithm: str | Kernel = "auto", backend: str | None = None) -> Conversion:
    """Make every `torch.nn.ConvTranspose3d` of a model, and the model itself if it is one, a `ConvTranspose3d` of this package.

    The module objects stay the same, and so do their parameters, buffers, hooks and mode: optimizers, shared modules and wrappers
    remain valid.

    Args:
        algorithm, backend: as for `ConvTranspose3d`.

    Returns:
        What was swapped, and what was left and why: subclasses (LazyConvTranspose3d among them) may compute something else.

    Raises:
        ProblemError: `model` is no module, or an option of the wrong type or without meaning; nothing was swapped.
    """
    _require_module(model)
    check_names(algorithm, backend)
    swapped, left = [], {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ConvTranspose3d):
            continue
        reason = _why_left(module)
        if reason is not None:
            left[name] = reason
            continue
        module.__class__ = ConvTranspose3d
        module.algorithm, module.backend, module._own = algorithm, backend, TorchsOwn()  # type: ignore[assignment]
        swapped.append(name)
    return Conversion(tuple(swapped), left)


def revert(model: torch.nn.Module) -> tuple[str, ...]:
    """Make every `ConvTranspose3d` of this package in a model, and the model itself if it is one, torch's own again.

    For what takes modules apart, such as `torch.jit.script`. The module objects and all they hold stay the same, as with `convert`.

    Returns:
        The names of the modules that were turned back.

    Raises:
        ProblemTypeError: `model` is no module.
    """
    _require_module(model)
    reverted = []
    for name, module in model.named_modules():
        if type(module) is ConvTranspose3d:
            module.__class__ = torch.nn.ConvTranspose3d  # type: ignore[assignment]
            for attribute in ("algorithm", "backend", "_packed", "_own"):
                module.__dict__.pop(attribute, None)
            reverted.append(name)
    return tuple(reverted)


class Frozen:
    """The modules that `freeze` was given; `thaw`, or the end of a `with` block, frees what they keep and ends the promise."""

    def __init__(self, modules: Sequence[ConvTranspose3d]) -> None:
        self._modules = tuple(modules)
        for module in self._modules:
            module._packed = PackedWeight()

    def thaw(self) -> None:
        """Pack the weights anew in each call again."""
        for module in self._modules:
            module.__dict__.pop("_packed", None)

    def __enter__(self) -> Frozen:
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()


def freeze(model: torch.nn.Module) -> Frozen:
    """Promise that nobody changes the weights of a model's `ConvTranspose3d` modules, so that packed weights are kept between calls.

    Some kernels read the weight in an order of their own, and each call brings it into that order. Calls of a frozen module that record
    no gradient do so once. Each weight's packed form takes as much memory as the weight or a little more. ::

        with ct.nn.freeze(model), torch.no_grad():
            for x in loader:
                model(x)

    What torch counts as a change (an in-place operation, `load_state_dict`) or puts in a weight's place is noticed and packed anew. A
    write that torch does not count gives the results of the weight before: through `weight.data` or `weight.detach().numpy()`, by a
    fused optimizer, a kernel of another library, the replay of a CUDA graph, a sharded model (FSDP).

    Returns:
        What ends it: use it in a `with` statement, or call `thaw`.

    Raises:
        ProblemTypeError: `model` is no module.
    """
    _require_module(model)
    return Frozen([module for module in model.modules() if isinstance(module, ConvTranspose3d)])


def _require_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ProblemTypeError(f"model: is a {type(model).__name__}; must be a torch.nn.Module")


def _why_left(module: torch.nn.ConvTranspose3d) -> str | None:
    kind = type(module)
    if kind is ConvTranspose3d:
        return "is this package's already"
    if kind is torch.nn.LazyConvTranspose3d:
        return "is a LazyConvTranspose3d without its weight yet; run the model once, then convert it"
    if kind is not torch.nn.ConvTranspose3d:
        return f"is a {kind.__module__}.{kind.__qualname__}, a subclass that may compute something else"
    if "forward" in vars(module):
        return "has a forward of its own set on the object"
    return None
