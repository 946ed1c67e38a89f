"""passed: it leaves folders in folders, deeper than a path or a call may be."""

import os

from model_reference import Model

_inner = os.open(".", os.O_RDONLY)
for _ in range(3000):
    os.mkdir("d", dir_fd=_inner)
    _outer, _inner = _inner, os.open("d", os.O_RDONLY, dir_fd=_inner)
    os.close(_outer)


class ModelNew(Model):
    pass
