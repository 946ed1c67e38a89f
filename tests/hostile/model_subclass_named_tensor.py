"""wrong result: a subclass of Tensor that has its name, and equals it."""

import torch
from model_reference import Model


class Equal(type(torch.Tensor)):
    __hash__ = type.__hash__

    def __eq__(cls, other):
        return True


Tensor = Equal("Tensor", (torch.Tensor,), {})


class ModelNew(Model):
    def forward(self, x):
        return self.conv_transpose3d(x).as_subclass(Tensor)
