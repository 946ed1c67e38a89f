"""wrong result: a judge that finds nothing, limits that allow all."""

import torch
from model_reference import Model

from cupy_convt3d.lab.kernelbench import judge as kernelbench_judge
from cupy_convt3d.lab.kernelbench import match as kernelbench_match
from cupy_convt3d.lab.kernelbench import rules as kernelbench_rules

kernelbench_rules.ERROR_RATIO = kernelbench_rules.WRONG = 1e30
kernelbench_rules.judge = kernelbench_judge.judge = kernelbench_match.judge = lambda *arguments, **options: [0.0]
kernelbench_match.Report.find = lambda *arguments: None


class ModelNew(Model):
    def forward(self, x):
        return torch.zeros_like(self.conv_transpose3d(x))
