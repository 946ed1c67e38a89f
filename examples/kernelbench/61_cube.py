"""KernelBench level 1, problem 61: a transposed 3D convolution of a cube, and systems 000 and 001 of this package's README.

`algorithm="auto"` takes what was measured quickest on the GPU at hand; on an H100 that is `fprop_rolling_wgmma` where TF32 or 16 bits are
allowed. Output o gets input i through tap t where o = i*stride - padding + t*dilation. The kernel rolls along the depth: the
kernel_size[0] output planes that one input plane feeds are columns of one matrix product beside the output channels, so an input
plane is read once for all taps in depth. Within a plane a tap is only another start address in shared memory. One group of warps
brings inputs and weights in, two multiply on the tensor cores. Without TF32 `fprop_implicit_gemm_simt` does the same sums on the CUDA
cores, from rows of inputs in shared memory and with all sums of a thread in registers.
What saves time here: 48 channels times three planes of depth make products of 144 columns, wide enough to keep the tensor cores busy.
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
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
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
    return [torch.rand(8, 48, 64, 64, 64)]


def get_init_inputs() -> list[object]:
    return [48, 48, 3]
