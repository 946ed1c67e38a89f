"""passed: its own parameter."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3))

    def forward(self, x):
        return self.weight


def get_inputs():
    return [torch.rand(2, 4, 3, 4, 5)]


def get_init_inputs():
    return []


class ModelNew(Model):
    pass
