"""Files that are read and written whole: regular ones only, complete or absent, one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

MOST_BYTES = 1 << 30  # that are read of one file
_NEW = ".new-convt3d-"  # begins the name of a file that is being written


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it cannot be read, is none (a pipe would be waited for without end), or is larger than `MOST_BYTES`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"is no regular file ({stat.filemode(status.st_mode)})")
        if status.st_size > MOST_BYTES:
            raise OSError(f"has {status.st_size} bytes, the limit is {MOST_BYTES}")
        with os.fdopen(descriptor, "rb", closefd=False) as file:  # it would refuse a directory, by the descriptor's number
            return file.read(status.st_size)  # what is asked for is allocated, however little there is
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """Return the text of a regular UTF-8 file.

    Raises:
        OSError: as `read_bytes`.
        UnicodeDecodeError: it is no UTF-8.
    """
    return read_bytes(path).decode()


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`: one `os.write` may take only a part of it."""
    while data:
        data = data[os.write(descriptor, data) :]


def write_whole(path: Path, data: bytes | str, mode: int = 0o644) -> None:
    """Write a file, made beside its place and moved there once it is known to be complete: others see all of it or what was there.

    What a killed process has left of such a file in the same folder is removed.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    content = data.encode() if isinstance(data, str) else data
    _remove_abandoned(path.parent)
    descriptor, temporary = _begun(path.parent)
    try:
        write_all(descriptor, content)
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)  # a full or failing disk says so here, and not to whoever reads the file
        if (written := os.fstat(descriptor).st_size) != len(content):
            raise OSError(f"only {written} of {len(content)} bytes were written")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)  # and with it the lock: unlocked before it has its place the file would be taken for abandoned


def _begun(folder: Path) -> tuple[int, str]:
    """Return a new file, open for writing and locked for as long as it is, and its path."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=_NEW)
        with contextlib.suppress(OSError):  # a file system without locks, where nobody takes it for abandoned either
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # it was taken for abandoned before it was locked


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"{_NEW}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where its writer is alive
                os.unlink(path)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`, waiting for other processes and threads that hold it; it goes with its last holder.

    Raises:
        OSError: there can be no such file, or its file system has no locks.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder removed it before this one had it
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor too
        os.close(descriptor)
