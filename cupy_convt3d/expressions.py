"""The arithmetic a kernel's declaration may use for grids, sizes and restrictions: integers, names, min, max, gcd, ceil_div."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any

from .errors import KernelError

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "all": all,
    "any": any,
    "gcd": math.gcd,
    "ceil_div": lambda a, b: -(-a // b),
}

_ALLOWED = (
    *(ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Tuple, ast.Subscript, ast.IfExp, ast.Call),
    *(ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.UnaryOp, ast.USub, ast.Not),
    *(ast.BoolOp, ast.And, ast.Or, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn),
)


@lru_cache(maxsize=4096)
def _compile(text: str) -> CodeType:
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError as error:
        raise KernelError(f"expression {text!r}: {error.msg}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            raise KernelError(f"expression {text!r}: {type(node).__name__} is not allowed; use integers, names, + - * // %, "
                              f"comparisons and {', '.join(FUNCTIONS)}")
        if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS):
            raise KernelError(f"expression {text!r}: only {', '.join(FUNCTIONS)} can be called")
    return compile(tree, "<kernel declaration>", "eval")


def evaluate(text: str | int, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression such as `"ceil_div(output_numel, 256)"`.

    Raises:
        KernelError: the text is no such expression, uses a name that is not in `names`, or divides by zero.
    """
    if isinstance(text, int):
        return text
    try:
        return eval(_compile(text), {"__builtins__": {}, **FUNCTIONS}, names)  # only the nodes in _ALLOWED get here
    except NameError as error:
        raise KernelError(f"expression {text!r}: unknown name {error.name!r}; known: {', '.join(sorted(names))}") from None
    except (TypeError, ZeroDivisionError, IndexError) as error:
        raise KernelError(f"expression {text!r}: {error}") from None
