"""The arithmetic a kernel's declaration may use for grids, sizes and restrictions: integers, names, min, max, gcd, ceil_div.

What an expression is, a number or a tuple of numbers, is known before it is evaluated: tuples are compared, searched and indexed, and
only numbers are reckoned with. A value, the length of an expression and the depth of its brackets are bounded, so that every
declaration is evaluated in next to no time and memory.
"""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from types import CodeType
from typing import Any

from .errors import KernelError, shown

MOST_VALUE = 2**63 - 1
MOST_CHARACTERS = 2000
MOST_DEPTH = 60
# The names of a problem that stand for three numbers.
TUPLES = frozenset(("input_size", "output_size", "kernel_size", "stride", "padding", "output_padding", "dilation"))

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "all": all,
    "any": any,
    "gcd": math.gcd,
    "ceil_div": lambda a, b: -(-a // b),
}
_GLOBALS = {"__builtins__": {}, **FUNCTIONS}  # no expression can change them
_BINARY = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class _Refused(Exception):
    """Why a text is no expression."""


@lru_cache(maxsize=4096)
def _compile(text: str) -> tuple[CodeType, str]:
    """Return the code of an expression, and whether it is an "int" or a "tuple"."""
    if len(text) > MOST_CHARACTERS:
        raise KernelError(f"expression {shown(text)}: has {len(text)} characters, the limit is {MOST_CHARACTERS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SyntaxWarning)  # such as "1if"
            tree = ast.parse(text.strip(), mode="eval")
        kind = _kind(tree.body, 0)
        return compile(tree, "<kernel declaration>", "eval"), kind
    except _Refused as error:
        raise KernelError(f"expression {text!r}: {error}") from None
    except SyntaxError as error:
        raise KernelError(f"expression {text!r}: {error.msg}") from None
    except (SyntaxWarning, ValueError, RecursionError, MemoryError):  # a character of no text; brackets in brackets
        raise KernelError(f"expression {text!r}: cannot be read") from None


def kind_of(text: str) -> str:
    """Return "int" or "tuple": what an expression's value is.

    Raises:
        KernelError: the text is no expression.
    """
    return _compile(text)[1]


def _kind(node: ast.expr, depth: int) -> str:
    """Return "int" or "tuple", and refuse whatever is not allowed."""
    if depth > MOST_DEPTH:
        raise _Refused(f"has more than {MOST_DEPTH} expressions in one another")

    def of(wanted: str, *nodes: ast.expr) -> None:
        for part in nodes:
            if _kind(part, depth + 1) != wanted:
                raise _Refused(f"`{ast.unparse(part)[:100]}` is {'a tuple' if wanted == 'int' else 'a number'}; must be the other")

    match node:
        case ast.Constant(value=value) if type(value) is int:
            if value > MOST_VALUE:
                raise _Refused(f"{shown(value)} is above 2**63 - 1")
        case ast.Name(id=name):
            if name in FUNCTIONS:
                raise _Refused(f"{name} is a function and no number")
            return "tuple" if name in TUPLES else "int"
        case ast.Tuple(elts=elements):
            of("int", *elements)
            return "tuple"
        case ast.Subscript(value=value, slice=index):
            of("tuple", value)
            of("int", index)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            of("int", test)
            kind = _kind(body, depth + 1)
            of(kind, orelse)
            return kind
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _BINARY):
            of("int", left, right)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            of("int", operand)
        case ast.BoolOp(values=values):
            of("int", *values)
        case ast.Compare(left=left, ops=ops, comparators=others):
            _check_comparison([left, *others], ops, depth)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            _check_call(name, arguments, of)
        case ast.Call():
            raise _Refused(f"only {', '.join(FUNCTIONS)} can be called, with arguments that have no names")
        case _:
            raise _Refused(
                f"{type(node).__name__} is not allowed; use integers, names, + - * // %, comparisons and {', '.join(FUNCTIONS)}"
            )
    return "int"


def _check_comparison(operands: list[ast.expr], operators: list[ast.cmpop], depth: int) -> None:
    kinds = [_kind(operand, depth + 1) for operand in operands]
    for operator, left, right in zip(operators, kinds, kinds[1:], strict=False):
        if isinstance(operator, (ast.In, ast.NotIn)):
            if (left, right) != ("int", "tuple"):
                raise _Refused("`in` takes a number and a tuple")
        elif not isinstance(operator, _COMPARISONS):
            raise _Refused(f"{type(operator).__name__} is not allowed")
        elif left != right:
            raise _Refused("a tuple and a number cannot be compared")


def _check_call(name: str, arguments: list[ast.expr], of: Callable[..., None]) -> None:
    if name in ("all", "any") or (name in ("min", "max") and len(arguments) == 1):
        if len(arguments) != 1:
            raise _Refused(f"{name} takes one tuple")
        of("tuple", *arguments)
        return
    if name == "ceil_div" and len(arguments) != 2:
        raise _Refused("ceil_div takes two numbers")
    if not arguments:
        raise _Refused(f"{name} takes numbers")
    of("int", *arguments)


def evaluate(text: str | int, names: Mapping[str, Any]) -> Any:
    """Return the value of an expression such as `"ceil_div(output_numel, 256)"`.

    Raises:
        KernelError: the text is no such expression, uses a name that is not in `names`, divides by zero, or its value is no number
            between -2**63 and 2**63.
    """
    if isinstance(text, int):
        return text
    if not isinstance(text, str):
        raise KernelError(f"expression {shown(text)}: must be an integer or text")
    code, kind = _compile(text)
    try:
        value = eval(code, _GLOBALS, names)  # only what `_kind` allows gets here
    except NameError as error:
        raise KernelError(f"expression {text!r}: unknown name {error.name!r}; known: {', '.join(sorted(names))}") from None
    except RecursionError:
        raise KernelError(f"expression {text!r}: is made of too many constants in one another") from None
    except (TypeError, ValueError, ZeroDivisionError, IndexError) as error:
        raise KernelError(f"expression {text!r}: {error}") from None
    if kind == "int" and not -MOST_VALUE <= value <= MOST_VALUE:
        raise KernelError(f"expression {text!r}: its value has {value.bit_length()} bits; must be between -2**63 and 2**63")
    return value


def evaluate_all(expressions: tuple[tuple[str, str | int], ...], known: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is known and the values of named expressions, which may be made of one another in any order.

    Raises:
        KernelError: as `evaluate`; also if an expression is made of itself.
    """
    program = _program(expressions)
    if program is not None:
        names = dict(known)
        try:
            exec(program, _GLOBALS, names)  # each expression is one that `_kind` allows
            return names
        except (NameError, TypeError, ValueError, ZeroDivisionError, IndexError):
            pass  # one after the other they say which of them it was
    names = _Names(known, dict(expressions))
    for name, _ in expressions:
        names[name]
    return names


@lru_cache(maxsize=512)
def _program(expressions: tuple[tuple[str, str | int], ...]) -> CodeType | None:
    """Return the code that reckons all of them, those first that others are made of; None: there is no such order."""
    kinds = {name: kind_of(str(text)) for name, text in expressions}  # refuses what is no expression
    trees = {name: ast.parse(str(text).strip(), mode="eval").body for name, text in expressions}
    made_of = {name: {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & trees.keys() for name, tree in trees.items()}
    bounds = [ast.Constant(value) for value in (-MOST_VALUE, MOST_VALUE)]
    steps: list[ast.stmt] = []
    try:
        for name in TopologicalSorter(made_of).static_order():
            steps.append(ast.Assign([ast.Name(name, ast.Store())], trees[name]))
            if kinds[name] == "int":  # 0 // inside: divides by zero where it is not
                inside = ast.Compare(bounds[0], [ast.LtE(), ast.LtE()], [ast.Name(name, ast.Load()), bounds[1]])
                steps.append(ast.Expr(ast.BinOp(ast.Constant(0), ast.FloorDiv(), inside)))
        return compile(ast.fix_missing_locations(ast.Module(steps, [])), "<kernel declaration>", "exec")
    except (CycleError, ValueError):  # None and its like are no names
        return None


class _Names(dict[str, Any]):
    """Names with their values; those that are declared by expressions get theirs when they are first asked for."""

    def __init__(self, known: Mapping[str, Any], expressions: Mapping[str, str | int]) -> None:
        super().__init__((name, value) for name, value in known.items() if name not in expressions)
        self._pending = dict(expressions)

    def __missing__(self, name: str) -> Any:
        expression = self._pending.pop(name)  # a circle finds nothing the second time: an unknown name
        value = self[name] = evaluate(expression, self)
        return value
