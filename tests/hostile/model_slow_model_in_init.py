"""passed, no gain: Model is made slower when ModelNew is built."""

import time

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_transpose3d = nn.ConvTranspose3d(4, 3, 3, 2, 1)

    def forward(self, x):
        return self.conv_transpose3d(x)


def get_inputs():
    return [torch.rand(2, 4, 3, 4, 5)]


def get_init_inputs():
    return []


forward = Model.forward


def slowed(self, x):
    time.sleep(0.05)
    return forward(self, x)


class ModelNew(Model):
    def __init__(self):
        super().__init__()
        Model.forward = slowed

    def forward(self, x):
        return forward(self, x)
