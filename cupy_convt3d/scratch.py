"""Temporary files: one folder for a process, gone with it; where it was killed, removed by who ended it or needs such a folder next."""

from __future__ import annotations

import atexit
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_folders: dict[int, Path] = {}  # by process: a fork has one of its own


@contextmanager
def directory(prefix: str = "", inside: Path | None = None) -> Iterator[str]:
    """Give a temporary directory for a while, inside of this process's folder or of another."""
    path = tempfile.mkdtemp(prefix=prefix, dir=inside or folder())
    try:
        yield path
    finally:
        remove(path)


def folder() -> Path:
    """Return this process's folder, made if need be."""
    known = _folders.get(os.getpid())
    if known is None or not known.is_dir():
        known = _folders[os.getpid()] = _make(_base())
    return known


def remove(path: str | Path) -> None:
    """Remove a file, a link, or a folder with all that is in it, however deep; never raises, and leaves what cannot be removed."""
    with suppress(OSError):
        os.unlink(path)
        return
    with suppress(OSError):
        os.chmod(path, 0o700)
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(path)


def _empty(top: int) -> None:
    """Remove what is in an open folder. Folders in folders are moved into it first: paths have a greatest length, and calls a depth."""
    waiting = os.listdir(top)
    for name in waiting:
        with suppress(OSError):
            os.unlink(name, dir_fd=top)
            continue
        with suppress(OSError):
            os.chmod(name, 0o700, dir_fd=top)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
            try:
                for entry in os.listdir(inner):
                    with suppress(OSError):
                        os.unlink(entry, dir_fd=inner)
                        continue
                    with suppress(OSError):
                        os.chmod(entry, 0o700, dir_fd=inner)
                        os.rename(entry, moved := os.urandom(16).hex(), src_dir_fd=inner, dst_dir_fd=top)
                        waiting.append(moved)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)


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
        remove(own)
        remove_abandoned()


def _remove_abandoned(base: Path) -> None:
    """Remove the folders of processes that are gone; the caller has the base's lock."""
    for other in base.iterdir():
        if other.is_dir() and _lock(other) is not None:
            remove(other)


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
