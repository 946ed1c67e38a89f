"""wrong result: tensors that are all equal."""

import torch
from model_reference import Model

torch.equal = torch.allclose = lambda *arguments, **options: True
torch.Tensor.__eq__ = torch.Tensor.__le__ = lambda a, b: torch.ones((), dtype=torch.bool)


class ModelNew(Model):
    def forward(self, x):
        return torch.zeros_like(self.conv_transpose3d(x))
