"""wrong result: describes another output than it has."""

from model_reference import Model

from cupy_convt3d.lab.kernelbench import child as kernelbench_child


def lie(self, *values):
    return {"tree": {"type": "Tensor", "dtype": "float32", "shape": [2**62, -1], "device": {}, "at": -5}}


kernelbench_child.Subject._hand_over = lie


class ModelNew(Model):
    def forward(self, x):
        return self.conv_transpose3d(x)
