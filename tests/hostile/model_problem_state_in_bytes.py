"""problem: Model has a state that is no tensor."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ConvTranspose3d(4, 3, 3, 2, 1)

    def forward(self, x):
        return self.layer(x)

    def get_extra_state(self):
        return b"state"

    def set_extra_state(self, state):
        pass


def get_inputs():
    return [torch.rand(2, 4, 3, 4, 5)]


def get_init_inputs():
    return []


class ModelNew(Model):
    pass
