"""Temporary files: one folder for a process, gone with it; where it was killed, removed by who ended it or needs such a folder next."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_folders: dict[int, Path] = {}  # by process: a fork has one of its own


def directory(prefix: str = "") -> tempfile.TemporaryDirectory[str]:
    """Return a temporary directory for a `with` statement, inside of this process's folder."""
    return tempfile.TemporaryDirectory(prefix=prefix, dir=folder())


def folder() -> Path:
    """Return this process's folder, made if need be."""
    known = _folders.get(os.getpid())
    if known is None or not known.is_dir():
        known = _folders[os.getpid()] = _make(_base())
    return known


def remove_abandoned() -> None:
    """Remove the folders of processes that are gone: for who has killed some."""
    base = _base()
    with suppress(OSError), _locked(base):
        _remove_abandoned(base)


def _base() -> Path:
    return Path(tempfile.gettempdir()) / f"convt3d-{os.getuid()}"


def _make(base: Path) -> Path:
    with suppress(FileExistsError):
        base.mkdir(mode=0o700)
    try:
        with _locked(base):  # nobody takes a folder for abandoned whose process has not locked it yet
            _remove_abandoned(base)
            own = Path(tempfile.mkdtemp(dir=base, prefix=f"{os.getpid()}-"))
            _lock(own, keep=True)
    except OSError:  # somebody else's, or no folder at all: nothing of ours goes there
        own = Path(tempfile.mkdtemp(prefix="convt3d-"))
    atexit.register(_leave, own, os.getpid())
    return own


@contextmanager
def _locked(base: Path) -> Iterator[None]:
    """Hold the base's lock; raises OSError where the base is not ours, or its lock no file."""
    if not _is_ours(base):
        raise OSError(f"{base}: is not this user's own folder")
    descriptor = os.open(base / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{base / 'lock'}: is no regular file")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_ours(base: Path) -> bool:
    """Whether it is a directory of this user's into which nobody else can write."""
    status = base.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _leave(own: Path, pid: int) -> None:
    """Remove a process's folder at its end, and those of the processes that it has killed; a fork's end is not its own."""
    if os.getpid() == pid:
        shutil.rmtree(own, ignore_errors=True)
        remove_abandoned()


def _remove_abandoned(base: Path) -> None:
    """Remove the folders of processes that are gone; the caller has the base's lock."""
    for other in base.iterdir():
        if other.is_dir() and _lock(other) is not None:
            shutil.rmtree(other, ignore_errors=True)


def _lock(path: Path, keep: bool = False) -> int | None:
    """Lock a folder for as long as this process lives, or try to; None where another process has, or has just removed it."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    if not keep:
        os.close(descriptor)
    return descriptor
