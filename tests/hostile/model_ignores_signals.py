"""passed: ignores signals, and leaves a thread that never ends."""

import signal
import threading
import time

from model_reference import Model

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
threading.Thread(target=time.sleep, args=(1000,)).start()


class ModelNew(Model):
    def forward(self, x):
        return self.conv_transpose3d(x)
