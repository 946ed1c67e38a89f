"""KernelBench level 1, problem 70: a transposed 3D convolution of a large cube, and system 002, which also trains.

The kernel is `fprop_tiled`. Output o gets input i through tap t where o = i*stride - padding + t*dilation, so outputs that share
(o + padding) mod stride share their taps: within such a residue class the layer is a dense product of a weight matrix (channels
out x channels in, one for each tap) with shifted inputs. A block owns a tile of one class's voxels x output channels, brings inputs
and weights into shared memory in turn, and keeps its sums in registers.
What saves time here: the 98 x 98 x 98 output has 23 million elements to fill the GPU with, and 64-bit bases with 32-bit offsets
inside a tile keep the address arithmetic out of the inner loop. The gradients are passes of their own (`dgrad`, `wgrad`): the
gradient of the input is an ordinary strided convolution of the output's, that of the weight a reduction over all voxels.
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
        output_padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation
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
        output_padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose3d = ct.nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation, algorithm="tiled"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose3d(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(8, 48, 96, 96, 96)]


def get_init_inputs() -> list[object]:
    return [48, 24, 3]
