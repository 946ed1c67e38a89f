"""wrong result: looks for Model in frames and among all objects."""

import gc
import sys

import torch
from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        for value in gc.get_objects():
            if type(value).__name__ == "Model" and isinstance(value, torch.nn.Module):
                return value(x)
        frame = sys._getframe()
        while frame is not None:
            if "reference" in frame.f_locals:
                return frame.f_locals["reference"](x)
            frame = frame.f_back
        return torch.zeros_like(self.conv_transpose3d(x))
