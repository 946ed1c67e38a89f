"""What kernels are instantiated for: an element type, and for fp32 the arithmetic of its products.

"fp32" is IEEE fp32. "tf32" rounds the operands of each product to TF32, "tf32x3" splits them into two TF32 numbers and adds three
products; both read and write fp32 tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class DType:
    """One instantiation: `element` names the type of the tensors, `accumulate` is the NumPy type of sums and workspaces."""

    name: str
    element: str
    numpy: np.dtype
    accumulate: np.dtype

    @property
    def itemsize(self) -> int:
        return self.numpy.itemsize


DTYPES = {
    name: DType(name, element, np.dtype(scalar), np.dtype(accumulate))
    for name, element, scalar, accumulate in (
        ("fp64", "fp64", np.float64, np.float64),
        ("fp32", "fp32", np.float32, np.float32),
        ("fp16", "fp16", np.float16, np.float32),
        ("bf16", "bf16", ml_dtypes.bfloat16, np.float32),
        ("tf32", "fp32", np.float32, np.float32),
        ("tf32x3", "fp32", np.float32, np.float32),
    )
}


# What may stand in where a precision is the loosest arithmetic allowed: itself, then the stricter ones.
_STRICTER = {"tf32": ("tf32", "tf32x3", "fp32"), "tf32x3": ("tf32x3", "fp32")}


def allowed_instances(precision: str) -> tuple[str, ...]:
    """Return the dtypes a kernel may be compiled for where `precision` is the loosest arithmetic allowed, loosest first."""
    return _STRICTER.get(precision, (precision,))


def dtype_name(dtype: object) -> str | None:
    """Return "fp64", "fp32", "fp16" or "bf16" for a NumPy dtype (bf16 as ml_dtypes has it), None for any other."""
    return next((known.element for known in DTYPES.values() if known.numpy == dtype), None)
