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
    examples: int,
    in_process: bool,
    sandbox: bool,
    quick: bool,
    progress: object,
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
    if progress is not None and not callable(progress):
        raise KernelError(f"progress={shown(progress)}: must be None or a function")
    for name, number in (("seed", seed), ("examples", examples)):
        if type(number) is not int or number < 0:
            raise KernelError(f"{name}={shown(number)}: must be a whole number, at least 0")
    for name, switch in (("in_process", in_process), ("sandbox", sandbox), ("quick", quick)):
        if not isinstance(switch, bool):
            raise KernelError(f"{name}={shown(switch)}: must be True or False")


def _is_list(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes))
