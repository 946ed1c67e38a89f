"""passed: fp16, which knows no fp64 inside."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ConvTranspose3d(4, 3, 3, 2, 1)
        self.half()

    def forward(self, x):
        return self.layer(x.half())


def get_inputs():
    return [torch.rand(2, 4, 3, 4, 5)]


def get_init_inputs():
    return []


class ModelNew(Model):
    pass
