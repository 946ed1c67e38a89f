"""crash: reads address 0."""

import ctypes

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        ctypes.string_at(0)
