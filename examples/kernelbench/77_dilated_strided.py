"""KernelBench level 1, problem 77: dilated and strided; system 004 asks for it with a bias, all in one kernel.

The kernel is `fprop_tiled`. Output o gets input i through tap t where o = i*stride - padding + t*dilation, so outputs that share
(o + padding) mod stride share their taps: within such a residue class the layer is a dense product of a weight matrix (channels
out x channels in, one for each tap) with shifted inputs. A block owns a tile of one class's voxels x output channels, brings inputs
and weights into shared memory in turn, and keeps its sums in registers.
What saves time here: stride and dilation are both 2, so every tap falls into the same residue class, and seven of the eight classes
are the bias alone: the kernel stores it and reads nothing. The bias of the others is added as the sums are stored.
"""

import torch
from torch import nn

import cupy_convt3d as ct


class Model(nn.Module):
    """The baseline: torch's module."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride, padding, bias=bias, dilation=dilation
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose3d(x)


class ModelNew(nn.Module):
    """The same, computed by a kernel of this package; it loads `Model`'s state_dict and trains."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose3d = ct.nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride, padding, bias=bias, dilation=dilation, algorithm="tiled"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose3d(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(16, 32, 16, 32, 32)]


def get_init_inputs() -> list[object]:
    return [32, 64, 3, 2, 1, 2]
