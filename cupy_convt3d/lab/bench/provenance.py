"""Where and with what a result was made (machine, versions, commit, settings that change numbers), and the file it is kept in."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ...backends.base import Backend
from ...backends.cuda import CudaBackend, available
from ...backends.host import HostBackend
from ...errors import BackendError
from ...files import write_whole
from .measure import Bench
from .rivals import torch_settings


def backend_named(name: str | None) -> Backend:
    """Return the backend "cuda" or "host"; None takes the GPU where there is one.

    Raises:
        BackendError: there is no such backend, or what it needs is missing.
    """
    if name not in (None, "cuda", "host"):
        raise BackendError(f"backend={name!r}: must be cuda or host")
    return CudaBackend() if name == "cuda" or (name is None and available()) else HostBackend()


def provenance(bench: Bench) -> dict[str, Any]:
    """Return where and with what results are made: time, machine, versions, commit, TF32 state."""
    versions = package_versions(("cupy-convt3d", "numpy", "torch", "cupy-cuda12x", "cupy-cuda13x", "nibabel", "matplotlib"))
    torch = bench.torch
    if torch is not None and bench.backend.name == "cuda":
        versions |= {"torch CUDA": str(torch.version.cuda), "cuDNN": str(torch.backends.cudnn.version())}
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": bench.backend.capabilities() | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"},
        "versions": versions,
        "commit": commit(),
        "rival": bench.rival_name,
        "tf32": tf32_state(bench),
    }


def package_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    return {"python": platform.python_version(), **{name: v for name in packages if (v := _version(name))}}


def tf32_state(bench: Bench, dtype: str = "fp32") -> dict[str, str]:
    """Return what may round fp32 products to TF32, as read while torch is set up to be timed for that dtype."""
    state = {"kernels": "ieee" if dtype == "fp32" else dtype, "CUPY_TF32": os.environ.get("CUPY_TF32", "unset")}
    if bench.torch is not None:
        with torch_settings(bench.torch, dtype) as settings:
            state |= {name: str(value) for name, value in settings.items()}
    return state


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a results file, whole or not at all: a row a line, numbers to seven digits.

    NaN and infinities, for which JSON has no word, are text.

    Raises:
        BackendError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fields = (f"{_json(name)}:{_rows(value)}" for name, value in _plain(data).items())
        write_whole(path, "{\n" + ",\n".join(fields) + "\n}\n")
    except OSError as error:
        raise BackendError(f"results file {str(path)!r}: cannot be written: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(f"{value:.7g}") if math.isfinite(value) else str(float(value))
    return value


def _rows(value: Any) -> str:
    """Return JSON with a line for each object that a list or an object holds, so that a diff shows which of them changed."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "[\n" + ",\n".join(map(_json, value)) + "\n]"
    if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
        return "{\n" + ",\n".join(f"{_json(name)}:{_json(item)}" for name, item in value.items()) + "\n}"
    return _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


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
