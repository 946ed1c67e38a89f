"""Imports run one way, and what a process keeps is listed in CONTRIBUTING.md with what clears it."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "cupy_convt3d"
LAYERS = (  # each imports those before it; a module of the package that is named nowhere stands with "lab"
    ("errors", "files", "records", "scratch", "switches"),
    ("problem", "limits", "architecture", "includes", "dtypes", "expressions", "cache", "plans"),
    ("reference", "kernel"),
    ("registry", "source", "calls"),
    ("tuning", "cost", "backends"),
    ("arrays", "choice"),
    ("packs", "trials", "torch_library", "torch_rules", "torch_plan", "torch_op", "torch_layer", "ops", "nn"),
    ("lab", "plots"),
    ("magic", "cli", "__main__"),
)


def modules() -> dict[str, Path]:
    """Return the package's modules by name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the package's modules that a module imports, wherever in its code, but for what only type checkers read."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unread = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if node in unread or not isinstance(node, ast.ImportFrom):
            continue
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            whole = f"{module}.{alias.name}"
            if (found := whole if whole in known else module) in known and found != name:
                yield found


KNOWN = modules()


@lru_cache(maxsize=1)
def graph() -> dict[str, set[str]]:
    return {name: set(imports(name, path, KNOWN)) for name, path in KNOWN.items()}


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    try:
        graphlib.TopologicalSorter(graph()).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def layer(name: str) -> int:
    first = name.split(".")[1] if "." in name else ""
    return next((number for number, names in enumerate(LAYERS) if first in names), -1)


def test_a_module_imports_what_stands_below_it() -> None:
    assert {name for name in KNOWN if layer(name) < 0} == {PACKAGE}, "a new module needs its place in LAYERS and in CONTRIBUTING.md"
    upwards = [f"{name} -> {other}" for name, others in graph().items() for other in others if layer(other) > layer(name) >= 0]
    assert not upwards


def test_no_name_of_a_package_hides_a_module_of_it() -> None:
    for name in KNOWN:
        if name.endswith(".magic"):
            pytest.importorskip("IPython")
        module, parent = importlib.import_module(name), name.rpartition(".")[0]
        if parent and not name.endswith("__main__"):
            assert getattr(importlib.import_module(parent), name.rpartition(".")[2]) is module, name


def kept() -> Iterator[str]:
    """Yield what a process keeps: caches of functions and methods, and names at the top of a module that begin empty or are locks."""
    for name, path in KNOWN.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any("lru_cache" in ast.unparse(one) for one in node.decorator_list):
                yield f"{name.removeprefix(f'{PACKAGE}.')}.{node.name}"
        for node in tree.body:
            if isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
                value = ast.unparse(node.value)
                if value in ("{}", "[]", "None", "set()", "Database()") or re.fullmatch(r"(weakref\.)?Weak\w+(\[.*\])?\(\)", value):
                    yield f"{name.removeprefix(f'{PACKAGE}.')}.{node.target.id}"


def test_what_a_process_keeps_is_listed() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## What a process keeps")[2].partition("\n## ")[0]
    listed = {word for row in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for word in re.findall(r"`([\w.]+)`", row)}
    assert listed == set(kept())
