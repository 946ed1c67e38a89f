"""Problems at the corners of a kernel's own declaration: what its comparisons, min, max and divisions do not do for tiny problems.

Constants, launches, restrictions and workspaces are evaluated for thousands of problems, which costs no run, and for each operation in
them is noted which way it went: below, at or above what it compares with, the first or the second of a min, a quotient of none, one or
more, with a rest or without. Problems that go a new way, or two ways that did not yet meet, are changed further. Of all that were
found those are run that have the most of what is rarest.
"""

from __future__ import annotations

import ast
import contextlib
import heapq
import math
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from ...errors import KernelError, ProblemError
from ...expressions import FUNCTIONS, evaluate
from ...kernel import HOST_MULTIPROCESSORS, Kernel, device_names
from ...problem import Problem

Array = np.ndarray[Any, np.dtype[Any]]
Way = tuple[int, Any]  # the number of an operation, and how it went
_MOST_WAYS, _MOST_PATHS = 2000, 8000
_MOST_TRIED, _LEAST_TRIED, _TRIED_OF_EACH = 3000, 600, 40  # problems that are looked at: so many for each operation
_LEAST_RUN, _MOST_RUN, _RUN_OF_EACH = 4, 64, 5
# What the host can do in a moment.
_MOST_MULTIPLY_ADDS, _MOST_ELEMENTS, _MOST_THREADS = 400_000, 2**15, 2**14
# Problems to begin with, beside those that are known: windows longer than tiny problems have, of which some taps lead nowhere.
_BEGIN = (
    *("n1_c2to2_i1x1x2_k1x1x16_p0x0x5", "n1_c1to1_i1x2x1_k1x12x1_s1x2x1_p0x4x0", "n1_c3to1_i2x1x1_k16x1x1_s2x1x1_p7x0x0"),
    *("n2_c1to2_i1x3x5_k1x4x8_s1x2x2_p0x2x3_op0x1x0", "n1_c1to3_i1x1x3_k1x1x5_p0x0x8_d1x1x5", "n1_c2to1_i2_k4x5x8_p2x2x3"),
)
_NOTE = "note_"
_AXES = ("input_size", "kernel_size", "stride", "padding", "output_padding", "dilation")
_FOUND: dict[tuple[object, ...], tuple[list[Problem], list[str]]] = {}
_MOST_FOUND = 256


def corner_problems(kernel: Kernel, dtype: str, known: Iterable[Problem] = ()) -> list[Problem]:
    """Return problems that the kernel can do, and that go ways of its declaration which the known ones do not."""
    texts = declared(kernel)
    asked = (kernel.dtypes, tuple(kernel.tunables.items()), texts, dtype)  # mutants of a kernel ask again and again
    if asked not in _FOUND:
        if len(_FOUND) >= _MOST_FOUND:
            _FOUND.clear()
        search = _Search(kernel, dtype, texts)
        _FOUND[asked] = (search.run(known), search.one_way())
    return _FOUND[asked][0]


def one_way(kernel: Kernel, dtype: str) -> list[str]:
    """Return the comparisons, `min` and `max` of the declaration that went one way for all that `corner_problems` looked at.

    Those of restrictions are left out, and those that no problem has an influence on.
    """
    return _FOUND[kernel.dtypes, tuple(kernel.tunables.items()), declared(kernel), dtype][1]


def declared(kernel: Kernel) -> tuple[str, ...]:
    """Return the expressions that say what a kernel does with a problem."""
    launches = [
        size
        for launch in kernel.launches
        for size in (*launch.grid, *launch.block, launch.shared_bytes, *([] if launch.when is None else [launch.when]))
    ]
    return tuple(
        text
        for text in (*kernel.constants.values(), *kernel.restrictions, *kernel.workspace.values(), *launches)
        if isinstance(text, str)
    )


class _Noting(ast.NodeTransformer):
    """Puts a call of a function of its kind around each operation, with the operation's number and its operands."""

    def __init__(self, first: int) -> None:
        self.count, self.texts = first, dict[int, str]()
        self.text = ""

    def visit(self, node: ast.AST) -> ast.AST:
        outer, self.text = self.text, ast.unparse(node)
        changed: ast.AST = super().visit(node)
        self.text = outer
        return changed

    def _noted(self, kind: str, node: ast.expr, operands: list[ast.expr]) -> ast.expr:
        number, self.count = self.count, self.count + 1
        if kind in ("compare", "choice"):
            self.texts[number] = self.text
        return ast.Call(ast.Name(_NOTE + kind, ast.Load()), [ast.Constant(number), node, *operands], [])

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        node = self.generic_visit(node)  # type: ignore[assignment]
        plain = len(node.ops) == 1 and not isinstance(node.ops[0], (ast.In, ast.NotIn))
        return self._noted("compare" if plain else "truth", node, [node.left, *node.comparators] if plain else [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        node = self.generic_visit(node)  # type: ignore[assignment]
        if not isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            return node
        return self._noted("rest" if isinstance(node.op, ast.Mod) else "quotient", node, [node.left, node.right])

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        node = self.generic_visit(node)  # type: ignore[assignment]
        return ast.IfExp(self._noted("truth", node.test, []), node.body, node.orelse)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        node = self.generic_visit(node)  # type: ignore[assignment]
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in ("min", "max") and len(node.args) > 1:
            return self._noted("choice", node, node.args)
        if name == "ceil_div":
            return self._noted("quotient", node, node.args)
        return self._noted("value", node, []) if name == "gcd" else node


@lru_cache(maxsize=256)
def _compiled(declared: tuple[str, ...]) -> tuple[list[CodeType], list[int], dict[int, str]]:
    """Return the expressions' code that notes how its operations go, for each operation the number of its expression, and texts of some."""
    codes: list[CodeType] = []
    places: list[int] = []
    texts: dict[int, str] = {}
    for text in declared:
        noting = _Noting(len(places))
        tree = noting.visit(ast.parse(text.strip(), mode="eval"))
        places += [len(codes)] * (noting.count - len(places))
        assert isinstance(tree, ast.Expression)
        codes.append(compile(ast.fix_missing_locations(tree), "<kernel declaration>", "eval"))
        texts |= noting.texts
    return codes, places, texts


def _compared(value: Any, a: Any, b: Any) -> Any:
    if isinstance(a, tuple):
        return bool(value)
    near = a == b or (min(a, b) > 0 and max(a, b) <= 2 * min(a, b))  # within a factor of two
    return max(-3 + near, min(3 - near, a - b))


_WAYS: dict[str, Callable[..., Any]] = {
    "compare": _compared,
    "choice": lambda value, *operands: (operands.index(value), operands.count(value) > 1),
    "value": lambda value: min(value, 2),
    "quotient": lambda value, a, b: (max(-1, min(2, a // b)), min(2, a % b)) if b > 0 else bool(value),
    "rest": lambda value, a, b: min(2, a % b) if b > 0 else bool(value),
    "truth": bool,
}


def ways(declared: tuple[str, ...], names: Mapping[str, Any]) -> list[frozenset[Way]]:
    """Return how the operations of each expression go for one problem, those that are evaluated."""
    found: set[Way] = set()

    def noting(way: Callable[..., Any]) -> Callable[..., Any]:
        def note(number: int, value: Any, *operands: Any) -> Any:
            found.add((number, way(value, *operands)))
            return value

        return note

    known = {"__builtins__": {}, **FUNCTIONS, **{_NOTE + kind: noting(way) for kind, way in _WAYS.items()}}
    all_found = []
    for code in _compiled(declared)[0]:
        eval(code, known, names)  # `Kernel` has refused whatever is no arithmetic
        all_found.append(frozenset(found))
        found.clear()
    return all_found


def _between(one: Problem, other: Problem) -> Problem | None:
    """Return the problem in the middle of two; None: there is none, or it is no problem."""
    values: dict[str, Any] = {name: tuple(map(_middle, getattr(one, name), getattr(other, name))) for name in _AXES}
    ins, outs = ((p.in_channels // p.groups, p.out_channels // p.groups) for p in (one, other))
    groups = values["groups"] = _middle(one.groups, other.groups)
    values["batch"] = _middle(one.batch, other.batch)
    values["in_channels"], values["out_channels"] = (groups * count for count in map(_middle, ins, outs))
    with contextlib.suppress(ProblemError):
        found = replace(one, **values)
        return None if found in (one, other) else found
    return None


def _middle(a: int, b: int) -> int:
    return a + (b - a) // 2 if b > a else a - (a - b) // 2


def _numbers(known: dict[Any, int], found: Iterable[Any], most: int) -> Array:
    """Return the numbers of what was found, those that are new behind the others as long as there are not too many."""
    return np.array(sorted({known.setdefault(one, len(known)) for one in found if one in known or len(known) < most}), np.intp)


class _Search:
    """The problems that were looked at for one kernel, and the ways they go."""

    def __init__(self, kernel: Kernel, dtype: str, declared: tuple[str, ...]) -> None:
        self.kernel, self.dtype, self.declared = kernel, dtype, declared
        self.places = _compiled(declared)[1]
        self.operations = len(self.places)
        # Expressions whose numbers a launch is given, what its code goes by; and those that one is made of.
        given = {kernel.constants.get(p.name) for launch in kernel.launches for p in launch.parameters if p.kind == "scalar"}
        self.given = [text in given for text in declared]
        words = [set(re.findall(r"[a-z_]\w*", text)) for text in declared]
        names = {str(text): name for name, text in kernel.constants.items()}
        self.made_of = np.array([[names.get(part, "") in word for part in declared] for word in words])
        # A number that something is compared with, or cut by, is one to be near to.
        written = {int(number) for text in declared for number in re.findall(r"(?<![\w.])\d{1,4}(?!\w)", text)}
        self.numbers = sorted(number for number in written | set(kernel.tunables.values()) if 1 < number <= 1024) or [2]
        self.ids: dict[Way, int] = {}
        self.met: list[int] = []  # for each way those that some problem goes too, a bit for each
        self.looked: list[Array] = []  # for each problem the ways that it goes
        self.pool: list[tuple[Problem, Array, Array, float]] = []  # with the ways and paths that each goes, and what it costs
        self.first: list[Problem] = []  # of the pool, those that were the first to go a way, or all ways of an expression
        self.paths: dict[frozenset[Way], int] = {}  # all ways of one expression together: their numbers
        self.path_times = np.zeros(_MOST_PATHS, np.int32)
        self.generator = random.Random(0)

    def run(self, known: Iterable[Problem]) -> list[Problem]:
        if not self.operations:
            return []
        for problem in map(Problem.parse, _BEGIN):
            self.look(problem)
        ran, ran_paths = np.zeros((_MOST_WAYS, _MOST_WAYS), bool), np.zeros(_MOST_PATHS, bool)
        simple = list(dict.fromkeys(known)) or [Problem(1, 1, 1, (1, 1, 1), (1, 1, 1))]
        for problem in simple:
            if (looked := self.look(problem)) is not None:
                ran[np.ix_(looked[0], looked[0])] = True
                ran_paths[looked[1]] = True
        for _ in range(min(_MOST_TRIED, _LEAST_TRIED + _TRIED_OF_EACH * self.operations)):
            if self.first:
                kind = self.generator.random()
                problem = self.generator.choice(self.first if kind < 0.4 else simple) if kind < 0.6 else self.generator.choice(self.pool)[0]
                if (changed := self.changed(problem)) is not None and self.look(changed) is None:
                    self.look(self.last_accepted(problem, changed))
        return self.chosen(ran, ran_paths)

    def one_way(self) -> list[str]:
        sides: dict[int, set[Any]] = {}
        for number, way in self.ids:
            side = way[0] if isinstance(way, tuple) else way if isinstance(way, bool) else (way > 0) - (way < 0)
            sides.setdefault(number, set()).update((side, ~side) if isinstance(way, tuple) and way[1] else (side,))
        texts = _compiled(self.declared)[2]
        restricted = {number for number, place in enumerate(self.places) if self.declared[place] in self.kernel.restrictions}
        fixed = {*self.kernel.tunables, *device_names(self.dtype, HOST_MULTIPROCESSORS), *FUNCTIONS, "output_layout"}

        def varies(text: str) -> bool:
            words = set(re.findall(r"[A-Za-z_]\w*", text)) - fixed - {"if", "else", "and", "or", "not", "in"}
            return any(varies(str(self.kernel.constants[word])) if word in self.kernel.constants else True for word in words)

        found = [text for number, text in texts.items() if len(sides.get(number, ())) < 2 and number not in restricted and varies(text)]
        return sorted(dict.fromkeys(found), key=lambda text: not text.startswith(("min(", "max(")))

    def look(self, problem: Problem | None) -> tuple[Array, Array] | None:
        """Return the numbers of the ways and paths that a problem goes, and keep it if some two of the ways did not meet yet."""
        if problem is None or (cost := self.cost(problem)) is None:
            return None
        found = ways(self.declared, self.kernel.names(problem, self.dtype, HOST_MULTIPROCESSORS))
        known = len(self.paths)
        paths = _numbers(self.paths, filter(None, found), _MOST_PATHS)
        if len(self.paths) > known:
            self.first.append(problem)
        way = _numbers(self.ids, frozenset().union(*found), _MOST_WAYS)
        meet = self.meet(way)
        if len(self.paths) > known or meet:
            self.pool.append((problem, way, paths, cost))
        self.looked.append(way)
        self.path_times[paths] += 1
        return way, paths

    def meet(self, way: Array) -> bool:
        """Note that these ways meet, each with itself too; whether some two did not yet."""
        self.met += [0] * (len(self.ids) - len(self.met))
        numbers = way.tolist()
        bits = sum(1 << number for number in numbers)
        new = [number for number in numbers if bits & ~self.met[number]]
        for number in new:
            self.met[number] |= bits
        return bool(new)

    def cost(self, problem: Problem) -> float | None:
        """Return about how many milliseconds the host takes for a problem; None: too many, or the kernel refuses it."""
        work = problem.flop // 2
        elements = max(map(math.prod, (problem.input_shape, problem.output_shape, problem.weight_shape)))
        if not 0 < work <= _MOST_MULTIPLY_ADDS or elements > _MOST_ELEMENTS:
            return None
        try:
            if self.kernel.why_not(problem, self.dtype) is not None:
                return None
            launches = self.kernel.plan(problem, self.dtype).launches
        except KernelError:
            return None
        threads = sum(math.prod(launch.grid) * math.prod(launch.block) for launch in launches)
        # Multiply-adds of whole tiles, which are padding for the most part: the twins of matrix instructions do all of them. Kernels that
        # have TF32, or 16 bits alone, are made of such instructions.
        tiles = 0.0
        if self.kernel.cost and ("fp32" not in self.kernel.dtypes or "tf32" in self.kernel.dtypes):
            names = self.kernel.names(problem, self.dtype, HOST_MULTIPROCESSORS)
            steps, products = (float(evaluate(self.kernel.cost[name], names)) for name in ("steps", "products"))
            tiles = steps * products * math.prod(launches[-1].grid)
        return None if threads > _MOST_THREADS else 2 + threads / 500 + work / 20_000 + tiles / 80_000

    def changed(self, problem: Problem) -> Problem | None:
        """Return a problem with one to three of its numbers changed; None: it would be none."""
        choice, chance = self.generator.choice, self.generator.random
        for _ in range(choice((1, 1, 2, 3))):
            values: dict[str, Any] = {}
            if chance() < 0.6:
                name, axis = choice(_AXES), choice((0, 1, 2))
                sizes = list(getattr(problem, name))
                least = 0 if "padding" in name else 1
                sizes[axis] = self.near(sizes[axis], least, 8 if name in ("stride", "output_padding") else 300)
                if chance() < 0.1:
                    sizes = [sizes[axis]] * 3
                values[name] = tuple(sizes)
            else:
                ins, outs = problem.in_channels // problem.groups, problem.out_channels // problem.groups
                counts = {"batch": problem.batch, "groups": problem.groups, "ins": ins, "outs": outs}
                name = choice(("batch", "groups", "ins", "ins", "outs", "outs"))
                counts[name] = self.near(counts[name], 1, 64 if name in ("batch", "groups") else 4096)
                values["batch"], values["groups"] = counts["batch"], counts["groups"]
                values["in_channels"], values["out_channels"] = counts["groups"] * counts["ins"], counts["groups"] * counts["outs"]
            try:
                problem = replace(problem, **values)
            except ProblemError:
                return None
        return problem

    def last_accepted(self, problem: Problem, refused: Problem) -> Problem | None:
        """Return the last problem that can be done on the way from one to one that cannot; None: there is none between."""
        found = None
        while (between := _between(found or problem, refused)) is not None:
            if self.cost(between) is None:
                refused = between
            else:
                found = between
        return found

    def near(self, value: int, least: int, most: int) -> int:
        """Return another number: the next one, twice or half of it, a small one, or one near to a number of the declaration."""
        choice = self.generator.choice
        named = choice(self.numbers)
        number = choice((
            value + choice((-1, 1)), value * 2, value * 2 + choice((-1, 1)), value // 2, choice((1, 2, 3, 4, 5)), value * choice((3, 4, 8)),
            named, named + 1, named * choice((1, 2, 3)) + choice((-1, 0, 1)),
        ))  # fmt: skip
        return max(least, min(most, number))

    def chosen(self, ran: Array, ran_paths: Array) -> list[Problem]:
        """Return the problems to run, those with the most that did not run yet, the rarer the more, for what they cost.

        One half is chosen by the paths that they go, the other by the ways that meet.
        """
        count = min(_MOST_RUN, max(_LEAST_RUN, _RUN_OF_EACH * self.operations))
        known = len(self.ids)
        goes = np.zeros((len(self.looked), known), np.float32)
        for number, way in enumerate(self.looked):
            goes[number, way] = 1
        times = goes.T @ goes  # how many problems go both ways, in the diagonal one
        of_pair = np.where(ran[:known, :known], 0.0, 1.0 / np.maximum(times, 1)) * self.weights()
        of_path = np.where(ran_paths, 0.0, 1.0 / np.maximum(self.path_times, 1))
        taken: dict[int, None] = {}

        def take(count: int, worth: Callable[[Array, Array], float]) -> None:
            def score(number: int) -> float:
                _, way, paths, cost = self.pool[number]
                return worth(way, paths) / math.sqrt(cost)

            # A score only falls: who leads with one that is of now is the best.
            waiting = [(-score(number), number, len(taken)) for number in range(len(self.pool)) if number not in taken]
            heapq.heapify(waiting)
            while len(taken) < count and waiting and waiting[0][0] < 0:
                _, number, of = heapq.heappop(waiting)
                if of < len(taken):
                    heapq.heappush(waiting, (-score(number), number, len(taken)))
                    continue
                taken[number] = None
                _, way, paths, _ = self.pool[number]
                of_pair[np.ix_(way, way)] = 0
                of_path[paths] = 0

        take(count // 2, lambda _, paths: float(of_path[paths].sum()))
        take(count, lambda way, _: float(of_pair[np.ix_(way, way)].sum()))
        return [self.pool[number][0] for number in taken]

    def weights(self) -> Array:
        """Return how much it says that two ways meet: most in one expression, more between numbers that launches are given."""
        places = np.array([self.places[number] for number, _ in self.ids], np.intp)
        given = np.array(self.given)[places]
        weights = np.where(given[:, None] & given, 5.0, 1.0)
        weights[(self.made_of | self.made_of.T)[places[:, None], places]] = 10.0
        weights[places[:, None] == places] = 20.0
        np.fill_diagonal(weights, 50.0)
        return weights
