"""passed: signs, indices and rounded numbers that the order of a sum decides."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, 512))

    def product(self, x):
        return x @ self.weight

    def forward(self, x):
        y = self.product(x)
        return y > 0, (y * 64).round().int(), y.topk(50, 1)[1], y.sort(1)[1], (y > 1).float()


def get_inputs():
    return [torch.randn(32, 512)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def product(self, x):
        return sum(x[:, i : i + 64] @ self.weight[i : i + 64] for i in range(0, 512, 64))
