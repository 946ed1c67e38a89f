"""Which of many cases that are alike `make test` runs; the others are marked slow, and `make test-rest` runs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from cupy_convt3d.kernel import Kernel


def some(cases: Iterable[Any], every: int = 3) -> list[Any]:
    """Return all cases, of which one in `every` is for the quick tests."""
    several = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=[] if number % every == 0 else pytest.mark.slow) for number, case in enumerate(several)]


def checked(kernel: Kernel) -> str:
    """Return the dtype of which the quick tests have a kernel's whole check, its last one.

    Of its other dtypes a third, taken over all kernels, have problems with numbers that are not finite and drawn ones.
    """
    return kernel.dtypes[-1]


def in_turn(firsts: Sequence[Any], seconds: Sequence[Any]) -> list[Any]:
    """Return all pairs, of which the quick tests have every other of the firsts once, with the seconds in turn."""
    return [
        pytest.param(first, second, marks=[] if number % 2 == 0 and number // 2 % len(seconds) == turn else pytest.mark.slow)
        for number, first in enumerate(firsts)
        for turn, second in enumerate(seconds)
    ]
