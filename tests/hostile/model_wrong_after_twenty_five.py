"""wrong result: right for 25 calls."""

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return self.conv_transpose3d(x) * (self.calls <= 25)
