"""The exceptions of the package; every message names the argument, its value and the rule."""


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


class CompileError(BackendError):
    """The compiler refused a kernel; the message holds the numbered source lines and the compiler's own words."""


class LaunchError(RuntimeError):
    """A launch failed: a divergent barrier, a deadlock, too much shared memory, a CUDA error."""


class FindingsError(ValueError):
    """A file of findings is damaged, or in use by another run."""


class CacheWarning(UserWarning):
    """A cache entry was damaged or foreign and has been ignored."""
