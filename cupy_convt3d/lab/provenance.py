"""Where and with what a result was made: machine, versions, commit, settings that change numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from .measure import Bench, ieee_torch


def provenance(bench: Bench) -> dict[str, Any]:
    """Return where and with what a report is made: time, machine, versions, commit, TF32 state."""
    packages = ("cupy-convt3d", "numpy", "torch", "cupy-cuda12x", "cupy-cuda13x", "nibabel", "matplotlib")
    versions = {"python": platform.python_version(), **{name: v for name in packages if (v := _version(name))}}
    torch = bench.torch
    if torch is not None and bench.backend.name == "cuda":
        versions |= {"torch CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": bench.backend.capabilities() | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"},
        "versions": versions,
        "commit": commit(),
        "rival": None if torch is None else bench.rival_name,
        "tf32": tf32_state(bench),
    }


def tf32_state(bench: Bench) -> dict[str, str]:
    """Return what may round fp32 products to TF32, as read while torch is set up to be timed."""
    state = {"kernels": "ieee", "CUPY_TF32": os.environ.get("CUPY_TF32", "unset")}
    if bench.torch is not None and bench.backend.name == "cuda":
        with ieee_torch(bench.torch):
            backends = bench.torch.backends
            state |= {"cudnn.conv": backends.cudnn.conv.fp32_precision, "cuda.matmul": backends.cuda.matmul.fp32_precision}
    return state


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the source tree's commit, with "-dirty" where files differ; `CONVT3D_COMMIT` speaks for a copy without git."""
    if given := os.environ.get("CONVT3D_COMMIT"):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
