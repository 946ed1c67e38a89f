"""crash: ends its process politely with 0."""

import sys

from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        sys.exit(0)
