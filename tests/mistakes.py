"""Kernels with one mistake in them."""

from __future__ import annotations

from cupy_convt3d.kernel import Kernel
from cupy_convt3d.source import headers_of


def mistaken(kernel: Kernel, right: str, wrong: str, *, everywhere: bool = False) -> Kernel:
    """Return a kernel, named "mistaken", with `wrong` in the place of `right`: in its source, or else in the header that has it.

    There it is once, unless it is meant to be replaced everywhere: in the source and in each header.
    """
    texts = {"": kernel.source, **headers_of(kernel, host=False)}
    places = [place for place, text in texts.items() if right in text]
    assert places
    if not everywhere:
        assert places[0] == "" or len(places) == 1
        assert texts[places[0]].count(right) == 1
        places = places[:1]
    changed = {place: texts[place].replace(right, wrong) for place in places}
    return Kernel.from_source(changed.pop("", kernel.source), "mistaken").replace_headers(changed)
