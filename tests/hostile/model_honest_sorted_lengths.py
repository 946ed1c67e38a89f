"""passed: integers that must be in order."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, lengths):
        return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)[0]


def get_inputs():
    return [torch.rand(4, 9, 3), torch.tensor([9, 7, 4, 2])]


def get_init_inputs():
    return []


class ModelNew(Model):
    pass
