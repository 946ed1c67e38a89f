"""A drop-in for `torch.nn.ConvTranspose3d`, and `convert`, which puts it into a model in place of torch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .kernel import Kernel
from .torch_op import conv_transpose3d

__all__ = ["Conversion", "ConvTranspose3d", "convert"]

torch.fx.wrap("conv_transpose3d")  # one node in a symbolic trace


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` computed by this package: same arguments, parameters, state_dict and results.

    Args:
        algorithm: as for `cupy_convt3d.conv_transpose3d`; a named kernel computes the forward pass, the gradients take "auto".
        backend: as for `cupy_convt3d.conv_transpose3d`, for all passes.
    """

    def __init__(self, *args: Any, algorithm: str | Kernel = "auto", backend: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.algorithm = algorithm
        self.backend = backend

    def forward(self, input: torch.Tensor, output_size: Sequence[int] | None = None) -> torch.Tensor:
        """Return the transposed convolution of `input` (N, Cin, D, H, W) or (Cin, D, H, W).

        Args:
            output_size: the (oD, oH, oW) wanted, also with N and Cout in front; it replaces `output_padding`.

        Raises:
            ValueError: no output padding gives `output_size`.
            ProblemError, KernelError, BackendError: as `cupy_convt3d.conv_transpose3d`.
        """
        output_padding: Any = self.output_padding
        if output_size is not None:
            sizes = (self.stride, self.padding, self.kernel_size, 3, self.dilation)
            output_padding = tuple(self._output_padding(input, list(output_size), *sizes))  # type: ignore[arg-type]
        geometry = (self.stride, self.padding, output_padding, self.groups, self.dilation)
        return conv_transpose3d(input, self.weight, self.bias, *geometry, algorithm=self.algorithm, backend=self.backend)


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
    """
    swapped, left = [], {}
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ConvTranspose3d):
            continue
        reason = _why_left(module)
        if reason is not None:
            left[name] = reason
            continue
        module.__class__ = ConvTranspose3d
        module.algorithm, module.backend = algorithm, backend  # type: ignore[assignment]
        swapped.append(name)
    return Conversion(tuple(swapped), left)


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
