"""passed: what Model needs stands in statements that hold more than that."""

import contextlib

try:
    import no_such_module
    from no_such_module import scale
except ImportError:
    no_such_module = None

    def scale(x):
        return x * SCALE


import torch

if torch.get_num_threads() > 0:
    torch.set_grad_enabled(True)
    SCALE, device = 2.0, "cpu"
else:
    raise RuntimeError("no threads")

with contextlib.suppress(ImportError):
    from torch import nn

SIZE = 0
for power in range(4):
    SIZE += 2**power


class Model(nn.Module):
    def forward(self, x):
        return scale(x) if no_such_module is None else x


def get_inputs():
    return [torch.rand(SIZE)]


def get_init_inputs():
    return []


class ModelNew(Model):
    pass
