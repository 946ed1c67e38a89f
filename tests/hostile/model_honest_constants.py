"""passed: names, functions and conditions that Model needs."""

import torch
from torch import nn

CHANNELS, SIZE = 4, (3, 4, 5)
try:
    SCALE = torch.scale
except AttributeError:
    SCALE = 3.0


def layer(channels):
    return nn.ConvTranspose3d(channels, 3, 3)


class Model(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.layer = layer(channels)

    def forward(self, x):
        return self.layer(x) * SCALE


def get_inputs():
    return [torch.rand(2, CHANNELS, *SIZE)]


def get_init_inputs():
    return [CHANNELS]


class ModelNew(Model):
    pass
