"""wrong result: one call in eight, by torch's generator, which is seeded before each call."""

import torch
from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        return self.conv_transpose3d(x) * (torch.rand(()) > 0.125)
