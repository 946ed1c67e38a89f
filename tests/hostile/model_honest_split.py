"""passed: sums in another order."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ConvTranspose3d(4, 3, 3, 2, 1)

    def forward(self, x):
        return self.layer(x)


def get_inputs():
    return [torch.rand(2, 4, 3, 4, 5)]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, x):
        weight = self.layer.weight
        halves = [nn.functional.conv_transpose3d(x[:, h], weight[h], None, 2, 1) for h in (slice(2), slice(2, 4))]
        return halves[1] + halves[0] + self.layer.bias.view(-1, 1, 1, 1)
