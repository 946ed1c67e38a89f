"""Every mistake that the tests make in a kernel is one in the text of today, also where the quick tests leave it out."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from cupy_convt3d.registry import kernels
from cupy_convt3d.source import headers_of

TABLES = [
    (path.stem, name)
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    for name in (line.split(" = ")[0] for line in path.read_text().splitlines() if "MISTAKES = " in line and line[0].isupper())
]


def texts() -> set[str]:
    return {text for kernel in kernels().values() for text in (kernel.source, *headers_of(kernel, host=False).values())}


@pytest.mark.parametrize(("module", "table"), TABLES, ids=lambda name: name.removeprefix("test_"))
def test_mistakes_are_in_todays_text(module: str, table: str) -> None:
    mistakes: dict[str, tuple[Any, ...]] = getattr(importlib.import_module(module), table)
    own = {mistake[0] for mistake in mistakes.values() if len(mistake) > 2}  # kernels of the tests
    assert mistakes
    for name, (*_, right, wrong) in ((name, mistake[: 3 if own else 2]) for name, mistake in mistakes.items()):
        assert right != wrong, name
        assert any(right in text for text in own or texts()), f"{name}: {right!r} is in no kernel"
