"""wrong result: one of them."""

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.conv_transpose3d(x)
        y[-1, -1, -1, -1, -1] += 1
        return y
