"""KernelBench level 1, problem 72: everything asymmetric, strided, padded and grouped; system 003.

`algorithm="auto"` takes what was measured quickest on the GPU at hand; on an H100 that is `fprop_rolling_wgmma` where TF32 or 16 bits are
allowed. Output o gets input i through tap t where o = i*stride - padding + t*dilation. The kernel rolls along the depth: the
kernel_size[0] output planes that one input plane feeds are columns of one matrix product beside the output channels, so an input
plane is read once for all taps in depth. Within a plane a tap is only another start address in shared memory. One group of warps
brings inputs and weights in, two multiply on the tensor cores. Without TF32 `fprop_implicit_gemm_simt` does the same sums on the CUDA
cores, from rows of inputs in shared memory and with all sums of a thread in registers.
What saves time here: with stride 2 only one tap in eight reaches an output; the residue classes make that exact, no block tests a
division or multiplies by a zero. Both classes of w have their sums in one thread, so whole output rows are written.
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
            in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv_transpose3d(x)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(8, 32, 12, 24, 48)]


def get_init_inputs() -> list[object]:
    return [32, 32, (3, 5, 7), (2, 2, 2), (1, 2, 3), (1, 1, 1), 4]
