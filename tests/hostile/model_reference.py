"""The `Model` that the files beside this one are held against, where they have none of their own."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, stride, padding, bias=False)

    def forward(self, x):
        return self.conv_transpose3d(x)


def get_inputs():
    return [torch.rand(2, 4, 3, 4, 5)]


def get_init_inputs():
    return [4, 3, 3, 2, 1]
