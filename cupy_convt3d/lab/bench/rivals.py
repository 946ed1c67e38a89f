"""What kernels are raced against: torch's own operator through cuDNN, or without it, set up to be fair."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import numpy as np

from ...backends.base import Backend
from ...errors import BackendError
from ...problem import Problem

# By backend: the names and what results call them. The first is raced against where none is named.
RIVALS = {
    "host": {"torch": "torch CPU, 1 thread"},
    "cuda": {"cudnn": "cuDNN (torch)", "torch": "torch without cuDNN"},
}


def torch_module(backend: Backend) -> Any | None:
    """Return torch where it is installed and can use the backend's device, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if backend.name == "host" or torch.cuda.is_available() else None


def check_rivals(backend: str, names: tuple[str, ...]) -> None:
    """Raise BackendError for a rival that this backend ("cuda" or "host") does not have."""
    for name in names:
        if name not in RIVALS[backend]:
            raise BackendError(f"against={name!r}: on {backend} there is {', '.join(RIVALS[backend])}")


def as_tensor(torch: Any, array: Any, dtype: str) -> Any:
    """Return a torch tensor over the memory of a NumPy or CuPy array; bf16 comes as 16-bit integers, which both can pass on."""
    if isinstance(array, np.ndarray):
        tensor = torch.from_numpy(array.view(np.int16) if dtype == "bf16" else array)
    else:
        tensor = torch.from_dlpack(array)
    return tensor.view(torch.bfloat16) if dtype == "bf16" else tensor


@contextmanager
def torch_settings(
    torch: Any, dtype: str = "fp32", *, benchmark: bool = True, cudnn: bool = True, deterministic: bool = False
) -> Iterator[dict[str, Any]]:
    """Set torch up to be timed, and put everything back afterwards.

    One CPU thread, as our host kernels have one; no gradients; fp32 products rounded to TF32 for "tf32" and for nothing else.

    Args:
        dtype: of `dtypes.DTYPES`; "tf32x3" is raced against plain fp32.
        benchmark: whether cuDNN searches for its quickest algorithm.
        cudnn: False leaves torch's own CUDA kernels.
        deterministic: whether cuDNN may take deterministic algorithms alone.

    Yields:
        what torch now says of the settings that change its speed and its rounding.
    """
    precision = "tf32" if dtype == "tf32" else "ieee"
    wanted: dict[str, Any] = {}
    if torch.cuda.is_available():
        wanted = {
            "cudnn.conv.fp32_precision": precision,
            "cuda.matmul.fp32_precision": precision,
            "cudnn.benchmark": benchmark,
            "cudnn.deterministic": deterministic,
            "cudnn.enabled": cudnn,
        }
    before = {name: attrgetter(name)(torch.backends) for name in wanted}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, value in wanted.items():
            _set(torch, name, value)
        with torch.no_grad():
            yield {name: attrgetter(name)(torch.backends) for name in wanted}
    finally:
        for name, value in before.items():
            _set(torch, name, value)
        torch.set_num_threads(threads)


def _set(torch: Any, name: str, value: Any) -> None:
    """Set `torch.backends.<name>`, also in a process where torch refuses to: its own test helpers freeze cuDNN's flags."""
    owner, _, attribute = name.rpartition(".")
    if owner == "cudnn":
        getattr(torch._C, f"_set_cudnn_{attribute}")(value)
    else:
        setattr(attrgetter(owner)(torch.backends), attribute, value)


def torch_call(torch: Any, problem: Problem, pass_name: str, tensors: Mapping[str, Any]) -> Callable[[], Any]:
    """Return a call of torch's operator for one pass: one gradient at a time, as the kernels compute them."""
    p = problem
    if pass_name == "fprop":
        arguments = (tensors["input"], tensors["weight"], tensors.get("bias"), p.stride, p.padding, p.output_padding, p.groups)
        return lambda: torch.nn.functional.conv_transpose3d(*arguments, p.dilation)
    # The tensor that only lends its shape is the (NaN) written one.
    gradient = tensors["grad_output"]
    source, weight = tensors.get("input", tensors.get("grad_input")), tensors.get("weight", tensors.get("grad_weight"))
    mask = [pass_name == "dgrad", pass_name == "wgrad", False]
    geometry = (p.stride, p.padding, p.dilation, True, p.output_padding, p.groups, mask)
    return lambda: torch.ops.aten.convolution_backward(gradient, source, weight, None, *geometry)[mask.index(True)]
