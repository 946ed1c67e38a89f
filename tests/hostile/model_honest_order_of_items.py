"""passed: a dictionary made in another order."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return {"a": x + 1, "b": [x * 2, x]}


def get_inputs():
    return [torch.rand(8)]


def get_init_inputs():
    return []


class ModelNew(nn.Module):
    def forward(self, x):
        return {"b": [x + x, x], "a": x + 1}
