"""torch's own operator for the three passes, by the process's settings (cuDNN's flags, memory format), as torch itself calls it."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from .problem import Problem

_LOCK = threading.Lock()


def run(pass_name: str, problem: Problem, stricter: bool, first: Any, second: Any, bias: Any = None) -> Any:
    """Return the result of one pass on 5-D torch tensors, in the strides that torch gives it.

    Args:
        stricter: cuDNN may not round fp32 operands to TF32, although the process's setting lets it.
        first, second: input and weight (fprop), grad_output and weight (dgrad), input and grad_output (wgrad).
    """
    torch, p = sys.modules["torch"], problem
    with _without_tf32(torch, stricter):
        if pass_name == "fprop":
            return torch.convolution(first, second, bias, p.stride, p.padding, p.dilation, True, p.output_padding, p.groups)
        if pass_name == "wgrad":
            operands = (second, first, first.new_empty(1).expand(p.weight_shape), None)  # of the weight its shape alone is read
            geometry = (p.stride, p.padding, p.dilation, True, p.output_padding, p.groups)
            return torch.ops.aten.convolution_backward.default(*operands, *geometry, (False, True, False))[1]
        # The gradient of the input is an ordinary convolution of grad_output.
        result = torch.convolution(first, second, None, p.stride, p.padding, p.dilation, False, (0, 0, 0), p.groups)
    # An output padding of a stride or more makes it longer; the input ends before.
    return result if result.shape[2:] == p.input_size else result[:, :, : p.input_size[0], : p.input_size[1], : p.input_size[2]]


def is_stricter(fp32_precision: str | None, tensor: Any) -> bool:
    """Whether a call asks for more precise fp32 products than torch's operator gives by the process's settings."""
    torch = sys.modules["torch"]
    if fp32_precision in (None, "tf32") or tensor.dtype is not torch.float32:
        return False
    if tensor.is_cuda:
        return torch.backends.cudnn.conv.fp32_precision == "tf32"
    setting = torch.backends.mkldnn.conv.fp32_precision
    if setting in ("tf32", "bf16"):
        _warn_of_mkldnn(setting, str(fp32_precision))
    return False


@lru_cache(maxsize=8)
def _warn_of_mkldnn(setting: str, fp32_precision: str) -> None:
    message = (
        f"fp32_precision={fp32_precision!r}: on the CPU torch's operator follows torch.backends.mkldnn.conv.fp32_precision={setting!r}; "
        "backend='host' computes as asked"
    )
    warnings.warn(message, UserWarning, stacklevel=2)


@contextmanager
def _without_tf32(torch: Any, stricter: bool) -> Iterator[None]:
    """For one call make torch's convolutions stricter than they are set; another thread's in that instant is no less right."""
    if not stricter:
        yield
        return
    conv = torch.backends.cudnn.conv
    with _LOCK:
        before = conv.fp32_precision
        conv.fp32_precision = "ieee"
        try:
            yield
        finally:
            conv.fp32_precision = before
