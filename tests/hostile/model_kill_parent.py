"""crash: kills the process that started it."""

import os
import signal

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        os.kill(os.getppid(), signal.SIGKILL)
        return self.conv_transpose3d(x)
