"""What `check` is given, before anything is done with it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ... import limits
from ...errors import KernelError, ProblemTypeError, shown
from ...problem import Problem


def check_arguments(
    problem: Problem | None,
    problems: Sequence[Problem],
    dtypes: Sequence[str] | None,
    kinds: Sequence[str] | None,
    seed: int,
    time_limit_s: float,
) -> None:
    """Raise KernelError or ProblemTypeError for an argument that is of another type than `check` declares."""
    limits.check_time_limit(time_limit_s)
    if problem is not None and not isinstance(problem, Problem):
        raise ProblemTypeError(f"problem={shown(problem)}: must be a Problem")
    if not isinstance(problems, Collection) or not all(isinstance(one, Problem) for one in problems):
        raise ProblemTypeError(f"problems={shown(problems)}: must be a list of Problems")
    for name, value in (("dtypes", dtypes), ("kinds", kinds)):
        if value is not None and not (_is_list(value) and all(isinstance(one, str) for one in value)):
            raise KernelError(f"{name}={shown(value)}: must be a list of names")
    if type(seed) is not int or seed < 0:
        raise KernelError(f"seed={shown(seed)}: must be a whole number, at least 0")


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes))
