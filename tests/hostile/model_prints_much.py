"""passed: prints a megabyte at each call."""

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        print("x" * 1_000_000, flush=True)
        return self.conv_transpose3d(x)
