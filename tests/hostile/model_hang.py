"""hang: never returns."""

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        while True:
            pass
