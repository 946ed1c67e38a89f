"""The cache of compiled kernels: one file an entry, complete or absent, in a directory only its user can write.

What cannot be used does not stop anybody: a damaged entry is ignored, and where the directory cannot be made or written a private
temporary one takes its place until the process ends; a `CacheWarning` says so. Only a directory that others could write to is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from . import scratch
from .errors import BackendError, CacheWarning, shown
from .files import locked, read_bytes, write_whole
from .switches import COMPILING

VARIABLE = "CONVT3D_CACHE"
BUILT_VARIABLE = "CONVT3D_BUILT"  # a directory of entries that were built ahead: read, never written
_MAGIC = b"convt3d\n"
_TRAILER_BYTES = 32 + len(_MAGIC)
_TOLD: set[str] = set()  # directories that a warning has named
_private: Path | None = None  # the temporary directory; what was forked meanwhile uses it too


def cache_directory() -> Path:
    """Return the cache directory, `CONVT3D_CACHE` or the user's own, made if need be; a temporary one where it cannot be.

    Raises:
        BackendError: it belongs to somebody else or others can write to it; compiled code is run from it.
    """
    try:
        directory = _wanted()
    except RuntimeError as error:  # no HOME, and no such user
        return _temporary(Path("~/.cache/convt3d"), f"cannot be made: {error}")
    if _private is not None and str(directory) in _TOLD:
        return _temporary(directory, "")
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except (OSError, ValueError) as error:  # a file in its place, a loop, no right to make it
        return _temporary(directory, f"cannot be made: {error}")
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise BackendError(
            f"cache directory {str(directory)!r}: compiled code is run from it, so it must be yours and writable by you alone "
            f"(owner {status.st_uid}, mode {stat.filemode(status.st_mode)}); fix it with chmod, or set {VARIABLE}"
        )
    return directory


def load(name: str, begins: bytes = b"") -> bytes | None:
    """Return the payload stored under `name`, None if there is none; a damaged entry is ignored with a `CacheWarning`.

    Args:
        begins: what the payload must begin with, such as the first bytes of an ELF file.
    """
    found = _find(name, begins)
    return None if found is None else found[1]


def find(name: str) -> Path | None:
    """Return the path of the entry that `load` would return, None if there is none."""
    found = _find(name, b"")
    return None if found is None else found[0]


def store(name: str, payload: bytes) -> Path:
    """Store a payload under `name` and return its path; other processes see the whole entry or none.

    A digest follows the payload in the file (ELF files may have bytes after their end, so a library still loads).

    Raises:
        BackendError: it can be written neither into the cache nor into a temporary directory.
    """
    _check_name(name)
    content, directory = payload + hashlib.sha256(payload).digest() + _MAGIC, cache_directory()
    try:
        write_whole(directory / name, content, 0o700)
        return directory / name
    except OSError as error:  # full, read-only, a directory in the entry's place
        other = _temporary(directory, f"cannot be written: {error}")
    try:
        write_whole(other / name, content, 0o700)
        return other / name
    except OSError as error:
        raise BackendError(
            f"cache entry {name!r}: cannot be written into {str(other)!r} either ({error}); set {VARIABLE} and TMPDIR to directories "
            "with room"
        ) from None


def ignore(path: Path, why: str) -> None:
    """Remove an entry that is whole, yet of no use, with a `CacheWarning`."""
    warnings.warn(f"cache entry {str(path)!r} {why}; it was ignored", CacheWarning, stacklevel=3)
    with contextlib.suppress(OSError):
        os.unlink(path)


@contextlib.contextmanager
def making(name: str) -> Iterator[None]:
    """Hold the lock of an entry while it is made: of several processes that want it one makes it, and the others wait.

    Where there can be no lock each makes its own.
    """
    _check_name(name)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            held.enter_context(locked(cache_directory() / f"{name}.lock"))
        yield


def _wanted() -> Path:
    return Path(os.environ.get(VARIABLE) or platformdirs.user_cache_path("convt3d"))


def _find(name: str, begins: bytes) -> tuple[Path, bytes] | None:
    _check_name(name)
    directories = [cache_directory()]
    if directories[0] == _private:  # what cannot be written may be read
        with contextlib.suppress(RuntimeError):
            directories += filter(os.path.isdir, [_wanted()])
    if built := os.environ.get(BUILT_VARIABLE):
        directories.append(_built(Path(built)))
    for directory in directories:
        payload = _load(directory / name, begins)
        if payload is not None:
            return directory / name, payload
    return None


def _built(directory: Path) -> Path:
    """Return a directory of entries built ahead.

    Raises:
        BackendError: there is none, or others than this user and root could have written to it.
    """
    try:
        status = directory.stat()
    except OSError as error:
        raise BackendError(f"{BUILT_VARIABLE}={str(directory)!r}: cannot be read: {error}") from None
    if hasattr(os, "getuid") and (status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        raise BackendError(
            f"{BUILT_VARIABLE}={str(directory)!r}: compiled code is run from it, so it must be yours or root's and writable by the owner "
            f"alone (owner {status.st_uid}, mode {stat.filemode(status.st_mode)})"
        )
    return directory


def require_compiling(what: str, name: str) -> None:
    """Raise BackendError if compiling is switched off.

    Args:
        what: what would be compiled.
        name: its entry in the cache.
    """
    if COMPILING.is_off:
        looked = [str(cache_directory()), *filter(None, (os.environ.get(BUILT_VARIABLE),))]
        raise BackendError(
            f"{what}: is not compiled (no {name} in {' or '.join(looked)}), and compiling is switched off (no_compiling, "
            f"{COMPILING.variable}=0); `convt3d compile` builds ahead what calls need"
        )


def _load(path: Path, begins: bytes = b"") -> bytes | None:
    try:
        content = read_bytes(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # a directory, a pipe, a loop, no right to read it
        warnings.warn(f"cache entry {str(path)!r} was ignored: {error}", CacheWarning, stacklevel=3)
        return None
    payload, trailer = content[:-_TRAILER_BYTES], content[-_TRAILER_BYTES:]
    if trailer != hashlib.sha256(payload).digest() + _MAGIC or not payload.startswith(begins):
        warnings.warn(f"cache entry {str(path)!r} is damaged and was ignored", CacheWarning, stacklevel=3)
        return None
    return payload


def _temporary(directory: Path, why: str) -> Path:
    """Return this process's private directory, which goes with it; warn once of the one that it stands for."""
    global _private
    if str(directory) not in _TOLD:
        _TOLD.add(str(directory))
        warnings.warn(
            f"cache directory {shown(str(directory))} {why}; compiled kernels are kept in a temporary directory, for this process only "
            f"(set {VARIABLE} to a directory of yours)",
            CacheWarning,
            stacklevel=4,
        )
    if _private is None or not _private.is_dir():
        try:
            _private = Path(tempfile.mkdtemp(prefix="cache-", dir=scratch.folder()))
        except OSError as error:
            raise BackendError(
                f"cache directory {str(directory)!r} {why}, and there can be no temporary one ({error}); set {VARIABLE} or TMPDIR"
            ) from None
    return _private


def _check_name(name: str) -> None:
    """An entry is a file of the cache directory, never a path that leads out of it."""
    if not name or os.path.basename(name) != name or name.startswith(".") or not name.isprintable() or len(os.fsencode(name)) > 250:
        raise BackendError(f"cache entry {shown(name)}: must be the name of a file of at most 250 bytes, without a directory")
