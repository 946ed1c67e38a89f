"""torch's own operator for the three passes: deterministic, and at the precision asked for.

torch's `convolution` takes these settings from the process; `_convolution`, which it calls, takes them as arguments. The gradient of
the input is an ordinary convolution of grad_output, so only the weight's gradient depends on the process's settings.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .problem import Problem

_LOCK = threading.Lock()


def run(pass_name: str, problem: Problem, precision: str, first: Any, second: Any, bias: Any = None) -> Any:
    """Return the result of one pass on 5-D torch tensors, in the strides that torch gives it.

    Args:
        precision: "tf32" allows cuDNN to round fp32 operands to TF32; anything else does not.
        first, second: input and weight (fprop), grad_output and weight (dgrad), input and grad_output (wgrad).
    """
    torch, p = sys.modules["torch"], problem
    cudnn = (torch._C._get_cudnn_benchmark(), True, torch._C._get_cudnn_enabled(), precision == "tf32")
    if pass_name == "fprop":
        geometry = (p.stride, p.padding, p.dilation, True, p.output_padding, p.groups)
        result = torch._convolution(first, second, bias, *geometry, *cudnn)
    elif pass_name == "dgrad":
        geometry = (p.stride, p.padding, p.dilation, False, (0, 0, 0), p.groups)
        result = torch._convolution(first, second, None, *geometry, *cudnn)
        if result.shape[2:] != p.input_size:  # an output padding of a stride or more makes it longer; the input ends before
            result = result[:, :, : p.input_size[0], : p.input_size[1], : p.input_size[2]]
    else:
        shape_alone = first.new_empty(1).expand(p.weight_shape)
        geometry = (p.stride, p.padding, p.dilation, True, p.output_padding, p.groups)
        with _settings(torch, first, precision):
            operands = (second, first, shape_alone, None)
            result = torch.ops.aten.convolution_backward.default(*operands, *geometry, (False, True, False))[1]
    return result


@contextmanager
def _settings(torch: Any, tensor: Any, precision: str) -> Iterator[None]:
    """Make cuDNN deterministic, and as precise as asked, for one call; then put back what was set.

    Both are made stricter only, so another thread's convolution in that instant is no less right.
    """
    if not tensor.is_cuda:
        yield
        return
    conv = torch.backends.cudnn.conv
    with _LOCK:
        deterministic, allowed = torch._C._get_cudnn_deterministic(), conv.fp32_precision
        tightens = allowed == "tf32" and precision != "tf32"
        torch._C._set_cudnn_deterministic(True)
        if tightens:
            conv.fp32_precision = "ieee"
        try:
            yield
        finally:
            torch._C._set_cudnn_deterministic(deterministic)
            if tightens:
                conv.fp32_precision = allowed
