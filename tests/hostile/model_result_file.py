"""wrong result: writes the result files of other judges."""

import sys
from pathlib import Path

import torch
from model_reference import Model


class ModelNew(Model):
    def forward(self, x):
        for path in [*sys.argv[1:], "result.json"]:
            if path.endswith(".json"):
                Path(path).write_text('{"findings": [], "passed": true}')
        return torch.zeros_like(self.conv_transpose3d(x))
