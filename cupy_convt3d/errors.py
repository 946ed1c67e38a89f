"""The exceptions of the package; every message names the argument, its value and the rule."""

from __future__ import annotations

import importlib


class ProblemError(ValueError, RuntimeError):
    """The arguments describe no valid convolution.

    It is both a `ValueError` (what NumPy users expect) and a `RuntimeError` (what torch raises for the same mistake).
    """


class ProblemTypeError(ProblemError, TypeError):
    """An argument is of the wrong type; a `TypeError` too, as torch raises for it."""


class KernelError(ValueError):
    """A kernel file's declaration is wrong, or a kernel was asked for something it cannot do."""


class BackendError(RuntimeError):
    """A backend is missing something it needs: a GPU, CuPy, a compiler."""


class MissingPackageError(BackendError, ImportError):
    """A part of this package needs another one that is not installed; the message names the extra that brings it."""


class CompileError(BackendError):
    """The compiler refused a kernel; the message holds the numbered source lines and the compiler's own words."""


class LaunchError(RuntimeError):
    """A launch failed: a divergent barrier, a deadlock, too much shared memory, a CUDA error."""


class DataError(ValueError):
    """A file of data (tuning database, findings, results) is damaged; the message names file, place and field."""


class FindingsError(DataError):
    """A file of findings is damaged, or in use by another run."""


class CacheWarning(UserWarning):
    """A cache entry was damaged or foreign and has been ignored."""


MOST_SHOWN = 200  # characters of a value in a message


def shown(value: object) -> str:
    """Return a value as messages have it, not longer than can be read."""
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits
        return f"<{type(value).__name__} of too many digits>"
    except Exception:  # its own, which may raise anything
        return f"<{type(value).__name__} that cannot be shown>"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def printable(text: str, limit: int | None = None) -> str:
    """Return a text as a terminal may have it: control characters, half characters and changes of direction as their escapes.

    With a limit it is one line: the ends of lines are escaped too, and no more characters of the text are left.
    """
    kept = "\n\t" if limit is None else ""
    shown = "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text[:limit])
    return shown if limit is None or len(text) <= limit else f"{shown} [...]"


def require(extra: str, what: str, *packages: str) -> None:
    """Raise MissingPackageError unless all packages can be imported; `what` needs them, `pip install cupy-convt3d[extra]` brings them."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise MissingPackageError(
                f"{what} needs {package}, which cannot be imported ({error}): `pip install 'cupy-convt3d[{extra}]'`"
            ) from None
