"""passed: the same memory for every output, as Model does."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = None

    def forward(self, x):
        if self.out is None:
            self.out = torch.empty_like(x)
        return torch.add(x, 1, out=self.out)


def get_inputs():
    return [torch.rand(2, 4, 3, 4, 5)]


def get_init_inputs():
    return []


class ModelNew(Model):
    pass
