"""wrong result: the last of many integers is forgotten."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return x.bincount(minlength=64)


def get_inputs():
    return [torch.randint(0, 64, (4096,))]


def get_init_inputs():
    return []


class ModelNew(Model):
    def forward(self, x):
        return x[:-1].bincount(minlength=64)
