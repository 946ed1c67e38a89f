"""Launches, also such as may begin before the one before them has ended: CuPy has no call for those.

CUDA Driver API, "Execution Control": `cuLaunchKernelEx` and the attribute of programmatic stream serialization.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Any

from ..kernel import PlannedLaunch
from .base import Arguments

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_ATTRIBUTE = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1, b"")


@lru_cache(maxsize=1)
def _launch_kernel() -> Any:
    library = ctypes.WinDLL("nvcuda.dll") if os.name == "nt" else ctypes.CDLL("libcuda.so.1")  # type: ignore[attr-defined]
    function = library.cuLaunchKernelEx
    function.argtypes = (ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return function


def launch(function: int, launch: PlannedLaunch, stream: int, arguments: Arguments, beside: bool) -> int:
    """Launch a function and return the driver's code, 0 for success.

    Args:
        beside: it may begin as soon as all blocks of the launch before it allow it, or have ended.
    """
    config = arguments.config
    if config is None:  # the arguments of one launch: who sets them holds a lock
        config = arguments.config = _Config(launch.grid, launch.block, launch.shared_bytes, stream, ctypes.pointer(_ATTRIBUTE), 0)
    config.stream, config.count = stream, beside
    return int(_launch_kernel()(config, function, arguments.address, None))
