"""Raw CUDA kernels for 3D transposed convolution, run on a GPU or, the very same files, on the CPU."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from .errors import BackendError, CacheWarning, CompileError, KernelError, LaunchError, ProblemError, ProblemTypeError
from .kernel import Kernel
from .ops import conv_transpose3d, conv_transpose3d_grad_input, conv_transpose3d_grad_weight
from .packs import forget_packed_weights
from .problem import Problem
from .registry import kernels

try:
    __version__ = metadata.version("cupy-convt3d")
except metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0+source"

# Name: (module, attribute; None is the module itself). They bring torch, hypothesis and more, so they load at first use.
_LAZY: dict[str, tuple[str, str | None]] = {
    "check": ("cupy_convt3d.lab.check", "check"),
    "nn": ("cupy_convt3d.nn", None),
    "plots": ("cupy_convt3d.plots", None),
    "suites": ("cupy_convt3d.lab.suites", None),
}

__all__ = [
    "BackendError",
    "CacheWarning",
    "CompileError",
    "Kernel",
    "KernelError",
    "LaunchError",
    "Problem",
    "ProblemError",
    "ProblemTypeError",
    "__version__",
    "check",
    "conv_transpose3d",
    "conv_transpose3d_grad_input",
    "conv_transpose3d_grad_weight",
    "forget_packed_weights",
    "kernels",
    "nn",
    "plots",
    "suites",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module_name, attribute = _LAZY[name]
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook the cell magic `%%convt3d`; called by `%load_ext cupy_convt3d`."""
    from .magic import Convt3dMagics

    shell.register_magics(Convt3dMagics)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
