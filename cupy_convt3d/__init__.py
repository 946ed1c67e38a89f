"""Raw CUDA kernels for 3D transposed convolution, run on a GPU or, the very same files, on the CPU."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import nn, plots
    from .calls import recorded_calls
    from .errors import BackendError, CacheWarning, CompileError, KernelError, LaunchError, ProblemError, ProblemTypeError
    from .kernel import Kernel
    from .lab import suites
    from .lab.check import check
    from .ops import conv_transpose3d, conv_transpose3d_grad_input, conv_transpose3d_grad_weight
    from .problem import Problem
    from .registry import kernels
    from .switches import no_compiling
    from .trials import no_trials

# Name: (module, attribute; None is the module itself). Everything loads at first use, so the import itself brings not even NumPy.
_LAZY: dict[str, tuple[str, str | None]] = {
    **{name: ("errors", name) for name in ("BackendError", "CacheWarning", "CompileError", "KernelError", "LaunchError")},
    **{name: ("errors", name) for name in ("ProblemError", "ProblemTypeError")},
    **{f"conv_transpose3d{which}": ("ops", f"conv_transpose3d{which}") for which in ("", "_grad_input", "_grad_weight")},
    "Kernel": ("kernel", "Kernel"),
    "Problem": ("problem", "Problem"),
    "check": ("lab.check", "check"),
    "kernels": ("registry", "kernels"),
    "nn": ("nn", None),
    "no_compiling": ("switches", "no_compiling"),
    "no_trials": ("trials", "no_trials"),
    "plots": ("plots", None),
    "recorded_calls": ("calls", "recorded_calls"),
    "suites": ("lab.suites", None),
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
    "kernels",
    "nn",
    "no_compiling",
    "no_trials",
    "plots",
    "recorded_calls",
    "suites",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _LAZY:
        module_name, attribute = _LAZY[name]
        module = importlib.import_module(f"{__name__}.{module_name}")
        value = module if attribute is None else getattr(module, attribute)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _version() -> str:
    from importlib import metadata  # a third of an import, with all it brings

    try:
        return metadata.version("cupy-convt3d")
    except metadata.PackageNotFoundError:  # a source tree that was never installed
        return "0.0.0+source"


def load_ipython_extension(shell: Any) -> None:
    """Give a notebook the cell magic `%%convt3d`; called by `%load_ext cupy_convt3d`."""
    from .magic import Convt3dMagics

    shell.register_magics(Convt3dMagics)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
