"""Temporary files: one folder for a process, gone with it, and where it was killed removed by the next process that needs one."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

_folders: dict[int, Path] = {}  # by process: a fork has one of its own


def directory(prefix: str = "") -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory for a `with` statement, inside of this process's folder."""
    return tempfile.TemporaryDirectory(prefix=prefix, dir=folder())


def folder() -> Path:
    """Return this process's folder, made if need be."""
    known = _folders.get(os.getpid())
    if known is None or not known.is_dir():
        known = _folders[os.getpid()] = _make(Path(tempfile.gettempdir()) / f"convt3d-{os.getuid()}")
    return known


def _make(base: Path) -> Path:
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        return Path(tempfile.mkdtemp(prefix="convt3d-"))  # somebody else's: nothing of ours goes there
    with (base / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # nobody takes a folder for abandoned whose process has not locked it yet
        for other in base.iterdir():
            if other.is_dir() and _lock(other) is not None:
                shutil.rmtree(other, ignore_errors=True)
        own = Path(tempfile.mkdtemp(dir=base, prefix=f"{os.getpid()}-"))
        _lock(own, keep=True)
    pid = os.getpid()
    atexit.register(lambda: shutil.rmtree(own, ignore_errors=True) if os.getpid() == pid else None)
    return own


def _lock(path: Path, keep: bool = False) -> int | None:
    """Lock a folder for as long as this process lives, or try to; None where another process has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    if not keep:
        os.close(descriptor)
    return descriptor
