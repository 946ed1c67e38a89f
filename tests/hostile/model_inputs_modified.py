"""inputs modified: after they were used."""

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.conv_transpose3d(x)
        x.relu_()
        return y
