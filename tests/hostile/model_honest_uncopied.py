"""passed: a model that cannot be copied: a lock, a weight in parts, a tensor that was computed of parameters."""

import threading

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.utils.weight_norm(nn.ConvTranspose3d(4, 3, 3, 2, 1))
        self.lock = threading.Lock()
        self.scale = self.layer.bias.square().sum() + 1
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        with self.lock:
            self.calls += 1
            return self.layer(x) * self.scale + self.calls


def get_inputs():
    return [torch.rand(2, 4, 3, 4, 5)]


def get_init_inputs():
    return []


class ModelNew(Model):
    pass
