"""The cache of compiled kernels: one file an entry, complete or absent, in a directory only its user can write."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

import platformdirs

from .errors import BackendError, CacheWarning

_MAGIC = b"convt3d\n"
_TRAILER_BYTES = 32 + len(_MAGIC)


def cache_directory() -> Path:
    """Return the cache directory, `CONVT3D_CACHE` or the user's own, made if need be.

    Raises:
        BackendError: it belongs to somebody else or others can write to it; compiled code is run from it.
    """
    directory = Path(os.environ.get("CONVT3D_CACHE") or platformdirs.user_cache_path("convt3d"))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise BackendError(
            f"cache directory {str(directory)!r}: compiled code is run from it, so it must be yours and writable by you alone "
            f"(owner {status.st_uid}, mode {stat.filemode(status.st_mode)}); fix it with chmod, or set CONVT3D_CACHE"
        )
    return directory


def load(name: str) -> bytes | None:
    """Return the payload stored under `name`, None if there is none; a damaged entry is ignored with a `CacheWarning`."""
    path = cache_directory() / name
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    payload, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    if trailer != hashlib.sha256(payload).digest() + _MAGIC:
        warnings.warn(f"cache entry {str(path)!r} is damaged and was ignored", CacheWarning, stacklevel=2)
        return None
    return payload


def store(name: str, payload: bytes) -> Path:
    """Store a payload under `name` and return its path; other processes see the whole entry or none.

    A digest follows the payload in the file (ELF files may have bytes after their end, so a library still loads).
    """
    directory = cache_directory()
    descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(payload + hashlib.sha256(payload).digest() + _MAGIC)
        os.chmod(temporary, 0o700)
        os.replace(temporary, directory / name)
    except BaseException:
        os.unlink(temporary)
        raise
    return directory / name
