"""cached output: the memory of one output for all."""

import torch
from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.conv_transpose3d(x)
        out = self.__dict__.setdefault("out", torch.empty_like(y))
        return out.copy_(y)
