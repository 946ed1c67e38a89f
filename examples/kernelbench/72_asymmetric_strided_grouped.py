"""KernelBench level 1, problem 72: everything asymmetric, strided, padded and grouped; system 003.

The kernel is `fprop_tiled`. Output o gets input i through tap t where o = i*stride - padding + t*dilation, so outputs that share
(o + padding) mod stride share their taps: within such a residue class the layer is a dense product of a weight matrix (channels
out x channels in, one for each tap) with shifted inputs. A block owns a tile of one class's voxels x output channels, brings inputs
and weights into shared memory in turn, and keeps its sums in registers.
What saves time here: with stride 2 only one tap in eight reaches an output. The eight residue classes make that exact: no block tests a
division or multiplies by a zero. A group is 8 channels, so its weights for one tap fit in a corner of shared memory.
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
        kernel_size: tuple[int, int, int],
        stride: tuple[int, int, int] = (1, 1, 1),
        padding: tuple[int, int, int] = (0, 0, 0),
        output_padding: tuple[int, int, int] = (0, 0, 0),
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose3d(x)


class ModelNew(nn.Module):
    """The same, computed by a kernel of this package; it loads `Model`'s state_dict and trains."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int, int],
        stride: tuple[int, int, int] = (1, 1, 1),
        padding: tuple[int, int, int] = (0, 0, 0),
        output_padding: tuple[int, int, int] = (0, 0, 0),
        groups: int = 1,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.conv_transpose3d = ct.nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, algorithm="tiled"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose3d(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(8, 32, 12, 24, 48)]


def get_init_inputs() -> list[object]:
    return [32, 32, (3, 5, 7), (2, 2, 2), (1, 2, 3), (1, 1, 1), 4]
