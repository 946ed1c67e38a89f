"""wrong result: a runner that hands over zeros as inputs."""

from model_reference import Model

from cupy_convt3d.lab.kernelbench import child as kernelbench_child

unflatten = kernelbench_child.unflatten
kernelbench_child.unflatten = lambda tree, memory: [t * 0 if hasattr(t, "mul") else t for t in unflatten(tree, memory)]


class ModelNew(Model):
    def forward(self, x):
        return self.conv_transpose3d(x)
