"""crash: closes all files."""

import os

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        os.closerange(3, 256)
        return self.conv_transpose3d(x)
