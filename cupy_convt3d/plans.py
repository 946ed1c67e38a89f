"""The plans of calls, of all array libraries: who computes a call, and what is compiled for it, is kept for calls like it.

A key holds all that a plan depends on, `registry.revision` among it. No plan holds an array's address, a stream or a setting.
"""

from __future__ import annotations

from typing import Any

_MOST = 1024
plans: dict[tuple[Any, ...], Any] = {}


def keep(key: tuple[Any, ...], plan: Any) -> Any:
    """Keep a plan for the next call; returns it."""
    if len(plans) >= _MOST:
        plans.clear()
    plans[key] = plan
    return plan
