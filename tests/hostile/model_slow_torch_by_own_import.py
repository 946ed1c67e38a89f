"""passed, no gain: the file imports itself, and so all of it, beside torch."""

import time  # noqa: I001

import model_slow_torch_by_own_import, torch  # noqa: E401, F401
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)


def get_inputs():
    return [torch.rand(8)]


def get_init_inputs():
    return []


relu = torch.relu
if relu.__module__ != __name__:
    torch.relu = lambda x: time.sleep(0.05) or relu(x)


class ModelNew(nn.Module):
    def forward(self, x):
        return x.clamp(min=0)
