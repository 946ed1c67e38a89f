"""wrong result: indices and signs that rounding decides, computed in bfloat16."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(128, 128))

    def forward(self, x):
        y = x @ self.weight
        return y > 0, y.sort(1)[1]


def get_inputs():
    return [torch.randn(128, 128)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, x):
        y = x.bfloat16() @ self.weight.bfloat16()
        return y > 0, y.sort(1)[1]
