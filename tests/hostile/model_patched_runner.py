"""wrong result: a runner that hands nothing over."""

from model_reference import Model

from cupy_convt3d.lab.kernelbench import child as kernelbench_child

kernelbench_child.store = lambda *arguments: None


class ModelNew(Model):
    def forward(self, x):
        return self.conv_transpose3d(x)
