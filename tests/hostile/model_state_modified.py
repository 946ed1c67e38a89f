"""inputs modified: the weight, after it was used."""

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        y = self.conv_transpose3d(x)
        self.conv_transpose3d.weight.zero_()
        return y
