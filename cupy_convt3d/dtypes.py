"""The element types kernels are instantiated for: their names, NumPy types and accumulation types."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """One element type; `accumulate` is the NumPy type kernels keep sums and workspaces in."""

    name: str
    numpy: np.dtype
    accumulate: np.dtype

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize


DTYPES = {
    name: DType(name, np.dtype(scalar), np.dtype(accumulate))
    for name, scalar, accumulate in (
        ("fp64", np.float64, np.float64),
        ("fp32", np.float32, np.float32),
        ("fp16", np.float16, np.float32),
        ("bf16", ml_dtypes.bfloat16, np.float32),
    )
}


def dtype_name(dtype: object) -> str | None:
    """Return "fp64", "fp32", "fp16" or "bf16" for a NumPy dtype (bf16 as ml_dtypes has it), None for any other."""
    for name, known in DTYPES.items():
        if known.numpy == dtype:
            return name
    return None
