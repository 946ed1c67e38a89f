"""GPU architectures: which cards the targets in a kernel's declaration stand for.

A target is named as NVRTC names it. "sm_80" stands for compute capability 8.0 and all that came later; "sm_90a", which has
instructions of that architecture alone (wgmma, setmaxnreg), for 9.0 and no other. A card has the name that its code is compiled for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

OLDEST, OLDEST_ALONE = "sm_80", "sm_90a"
# KiB of shared memory that a block may ask for, by compute capability times ten (CUDA C++ Programming Guide, "Compute Capabilities").
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
_TARGET = re.compile(r"sm_(\d{2,3})(a?)")


def of_device(major: int, minor: int) -> str:
    """Return what code for a card of that compute capability is compiled for.

    From 9.0 on that is the target with all its instructions: a cubin is compiled on the card that it runs on.
    """
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def capability(name: str) -> int:
    """Return the compute capability of a target or a card, times ten."""
    match = _TARGET.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def shared_bytes(card: str) -> int:
    """Return the shared memory that a block may ask for on a card; of one that is not known, what the smallest has."""
    return _SHARED_KIB.get(capability(card), min(_SHARED_KIB.values())) << 10


def is_target(name: object) -> bool:
    """Whether a declaration may name it: "sm_80" or later, "sm_90a" or later."""
    match = _TARGET.fullmatch(name) if isinstance(name, str) else None
    return match is not None and int(match[1]) >= capability(OLDEST_ALONE if match[2] else OLDEST)


def runs_on(target: str, card: str) -> bool:
    """Whether what is for a target runs on a card."""
    return target == card if target.endswith("a") else capability(target) <= capability(card)


def nearest(targets: Iterable[str], card: str) -> str:
    """Return the newest of the targets that runs on a card, the card's own where it is among them; the oldest where none does."""
    known = sorted(targets, key=lambda target: (capability(target), target))
    return next((target for target in reversed(known) if runs_on(target, card)), known[0])


def described(targets: Iterable[str]) -> str:
    """Return the targets as a sentence has them: "sm_90a, sm_100 and newer"."""
    return ", ".join(target if target.endswith("a") else f"{target} and newer" for target in targets)
