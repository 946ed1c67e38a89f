"""Kernels with one mistake in them."""

from __future__ import annotations

from cupy_convt3d.kernel import Kernel
from cupy_convt3d.source import headers_of


def mistaken(kernel: Kernel, right: str, wrong: str, *, everywhere: bool = False) -> Kernel:
    """Return a kernel, named "mistaken", with `wrong` in the place of `right`: in its source, or else in the header that has it.

    There it is once, unless it is meant to be replaced everywhere: in the source and in each header.
    """
    texts = {"": kernel.source, **headers_of(kernel, host=False)}
    changed = {place: text.replace(right, wrong) for place, text in texts.items() if right in text}
    if not everywhere:
        place = "" if "" in changed else next(iter(changed))
        assert len(changed) == 1 or place == ""
        assert texts[place].count(right) == 1
        changed = {place: changed[place]}
    assert changed
    source = changed.pop("", kernel.source)
    return Kernel.from_source(source, "mistaken").replace_headers(changed)
