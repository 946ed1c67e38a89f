"""KernelBench level 1, problem 73: a strided, padded, grouped transposed 3D convolution.

NOTE: the problem's reference takes `output_padding` and never uses it, and its arguments put the 4 of "4 groups" in that place, so
it runs with one group. A drop-in has to do the same.

The kernel is `fprop_tiled`. Output o gets input i through tap t where o = i*stride - padding + t*dilation, so outputs that share
(o + padding) mod stride share their taps: within such a residue class the layer is a dense product of a weight matrix (channels
out x channels in, one for each tap) with shifted inputs. A block owns a tile of one class's voxels x output channels, brings inputs
and weights into shared memory in turn, and keeps its sums in registers.
What saves time here: stride 2 makes eight residue classes of 1 to 8 taps, so all 27 taps together cost what a dense 3 x 3 x 3
convolution of the small input would.
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
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=bias
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
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose3d = ct.nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=bias, algorithm="tiled"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose3d(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(4, 32, 32, 64, 128)]


def get_init_inputs() -> list[object]:
    return [32, 32, 3, 2, 1, 4]
