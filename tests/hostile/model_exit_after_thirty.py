"""crash: right for thirty calls, then the process ends with 0."""

import os

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 30:
            os._exit(0)
        return self.conv_transpose3d(x)
