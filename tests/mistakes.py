"""Kernels with one mistake in them."""

from __future__ import annotations

from cupy_convt3d.kernel import Kernel
from cupy_convt3d.source import headers_of


def mistaken(kernel: Kernel, right: str, wrong: str, *, everywhere: bool = False) -> Kernel:
    """Return a kernel, named "mistaken", with `wrong` in the place of `right`: in its source, or else in the header that has it.

    There it is once, unless it is meant to be replaced everywhere.
    """
    texts = {"": kernel.source} if right in kernel.source else headers_of(kernel, host=False)
    ((place, text),) = ((place, text) for place, text in texts.items() if right in text)
    assert everywhere or text.count(right) == 1
    changed = text.replace(right, wrong)
    if not place:
        return Kernel.from_source(changed, "mistaken")
    return Kernel.from_source(kernel.source, "mistaken").replace_headers({place: changed})
