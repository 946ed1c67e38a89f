"""passed: sums of which some are near 0, added in another order."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return tuple(x.sum(1))


def get_inputs():
    return [torch.randn(100, 64)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, x):
        return tuple(x[:, ::2].sum(1) + x[:, 1::2].sum(1))
