"""passed: every other call takes longer."""

import itertools
import time

from model_reference import Model


class ModelNew(Model):
    calls = itertools.count()

    def forward(self, x):
        time.sleep(0.02 * (next(self.calls) % 2))
        return self.conv_transpose3d(x)
