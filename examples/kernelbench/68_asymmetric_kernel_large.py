"""KernelBench level 1, problem 68: a transposed 3D convolution with a kernel of 3 x 5 x 5 and the most arithmetic of the seven.

The kernel is `fprop_tiled`. Output o gets input i through tap t where o = i*stride - padding + t*dilation, so outputs that share
(o + padding) mod stride share their taps: within such a residue class the layer is a dense product of a weight matrix (channels
out x channels in, one for each tap) with shifted inputs. A block owns a tile of one class's voxels x output channels, brings inputs
and weights into shared memory in turn, and keeps its sums in registers.
What saves time here: 1.3 TFLOP over 1.8 GB leave the arithmetic as the only limit, and a thread's sums stay in registers over all 75
taps, so an output is written once.
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
    return [torch.rand(16, 32, 64, 64, 64)]


def get_init_inputs() -> list[object]:
    return [32, 64, (3, 5, 5)]
