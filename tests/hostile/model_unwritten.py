"""output not fully written: a plane keeps what was in memory."""

import torch
from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.conv_transpose3d(x)
        out = torch.empty_like(y)
        out[:, :, :-1] = y[:, :, :-1]
        return out
