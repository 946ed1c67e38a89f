"""passed: leaves a process in a session of its own, whose parent has ended."""

import os
import time

from model_reference import Model

if not (child := os.fork()):
    os.setsid()
    if os.fork():
        os._exit(0)
    time.sleep(1000)
os.waitpid(child, 0)


class ModelNew(Model):
    def forward(self, x):
        return self.conv_transpose3d(x)
