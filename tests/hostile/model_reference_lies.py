"""error: Model describes an output that no memory holds."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        from cupy_convt3d.lab.kernelbench import child as kernelbench_child

        tree = {"type": "Tensor", "dtype": "no dtype", "shape": [8], "device": "cpu", "at": 0}
        kernelbench_child.flatten = lambda value: (tree, [])
        kernelbench_child.size_of = lambda tree: 1 << 60
        return torch.exp(x)


def get_inputs():
    return [torch.rand(8)]


def get_init_inputs():
    return []


class ModelNew(nn.Module):
    def forward(self, x):
        return torch.exp(x)
