"""crash: a message nested 100,000 deep."""

import contextlib
import os

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        message = b"[" * 100_000
        for descriptor in range(3, 32):
            with contextlib.suppress(OSError):
                os.write(descriptor, len(message).to_bytes(4, "little") + message)
        return self.conv_transpose3d(x)
