"""wrong result: one call in eight."""

import random

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        return self.conv_transpose3d(x) * (random.random() > 0.125)
