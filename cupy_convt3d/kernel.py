"""A kernel: its source, and the declaration in the source's first comment that says what it computes and how to launch it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .dtypes import DTYPES
from .errors import KernelError
from .expressions import evaluate
from .problem import INT32_MAX, PASSES, Problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120")
HOST_MULTIPROCESSORS = 3  # so that work is cut where a GPU would cut it, on small problems too
MAX_THREADS = 1024
MAX_GRID = (INT32_MAX, 65535, 65535)
TENSORS = {
    "fprop": ("input", "weight", "bias", "output"),
    "dgrad": ("grad_output", "weight", "grad_input"),
    "wgrad": ("input", "grad_output", "grad_weight"),
}
SCALARS: dict[str, np.dtype] = {
    **dict.fromkeys(("int", "int32_t"), np.dtype(np.int32)),
    **dict.fromkeys(("unsigned", "unsigned int", "uint32_t"), np.dtype(np.uint32)),
    **dict.fromkeys(("long long", "long long int", "long", "int64_t", "ptrdiff_t", "index_t"), np.dtype(np.int64)),
    **dict.fromkeys(("unsigned long long", "unsigned long", "uint64_t", "size_t"), np.dtype(np.uint64)),
    "bool": np.dtype(np.bool_),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}

_DECLARATION = re.compile(r"/\*\s*convt3d[ \t]*\n(?P<toml>.*?)\*/", re.DOTALL)
_GLOBAL = re.compile(
    r"__global__\s+(?:static\s+)?void\s+(?:__launch_bounds__\s*\([^;{]*?\)\s*)?(?P<symbol>\w+)\s*\((?P<parameters>[^)]*)\)"
)
_TUNABLE = re.compile(r"^#ifndef (?P<name>[A-Z][A-Z0-9_]*)\n#define (?P=name) (?P<value>\d+)\n#endif", re.MULTILINE)
_KEYS = {
    *("pass", "dtypes", "architectures", "deterministic", "specialize", "constants", "restrictions", "workspace", "search"),
    "launch",
}
_TENSOR_KINDS = ("pointer", "view")
_LAUNCH_KEYS = {"symbol", "grid", "block", "shared_bytes", "when", "packs", "prepares"}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a `__global__` function: a tensor (`pointer` or `view`), the `problem`, or a `scalar`."""

    name: str
    kind: str
    scalar: np.dtype | None = None


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its function, its parameters by name, and expressions for its geometry.

    `packs` names the workspace that it fills from the weight alone: whoever has kept that workspace skips the launch. `prepares` names
    the workspace that it fills, from whatever: the launch behind it may begin meanwhile, and waits before it reads that.
    """

    symbol: str
    parameters: tuple[Parameter, ...]
    grid: tuple[str | int, ...]
    block: tuple[str | int, ...]
    shared_bytes: str | int = 0
    when: str | None = None
    packs: str | None = None
    prepares: str | None = None


@dataclass(frozen=True)
class PlannedLaunch:
    """A launch with its numbers: what a backend is handed."""

    symbol: str
    parameters: tuple[Parameter, ...]
    scalars: dict[str, Any]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    packs: str | None = None
    prepares: str | None = None
    beside: bool = False  # it may begin while the launch before it, which prepares a workspace, still runs


@dataclass(frozen=True)
class Plan:
    """All launches of one call, the workspaces (elements of the accumulation type) they share, and the macros they are compiled with."""

    launches: tuple[PlannedLaunch, ...]
    workspace: dict[str, int]
    specialization: tuple[tuple[str, int], ...] = ()


class Limits(NamedTuple):
    """What a GPU has, beyond its architecture: dynamic shared memory for one block in bytes, and multiprocessors."""

    shared_bytes: int
    multiprocessors: int


@dataclass(frozen=True, eq=False)
class Kernel:
    """A raw CUDA kernel: shipped in `kernels/`, or a user's own made by `Kernel.from_file` or `Kernel.from_source`.

    Attributes:
        pass_name: "fprop", "dgrad" or "wgrad".
        dtypes: what it can be instantiated for, of `dtypes.DTYPES`.
        architectures: the GPUs it compiles for; the host runs every kernel.
        deterministic: whether two runs give the same bits.
        tunables: the upper-case macros the source gives a default by `#ifndef`, and their values; `replace_tunables` makes another
            configuration.
        specialize: macros whose values follow from the problem: a GPU's binary is compiled for them, the host's is not.
        restrictions: expression that must hold, and the sentence that says why.
        search: the values that `convt3d tune` tries, by tunable.
    """

    name: str
    source: str
    pass_name: str
    dtypes: tuple[str, ...]
    launches: tuple[Launch, ...]
    path: Path | None = None
    architectures: tuple[str, ...] = ARCHITECTURES
    deterministic: bool = True
    tunables: Mapping[str, int] = field(default_factory=dict)
    specialize: Mapping[str, str | int] = field(default_factory=dict)
    constants: Mapping[str, str | int] = field(default_factory=dict)
    restrictions: Mapping[str, str] = field(default_factory=dict)
    workspace: Mapping[str, str | int] = field(default_factory=dict)
    search: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path) -> Kernel:
        """Read a kernel from a `.cu` file; its name is the file's.

        Raises:
            KernelError: the file cannot be read, or its declaration is wrong.
        """
        path = Path(path)
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise KernelError(f"kernel file {str(path)!r}: cannot be read: {error}") from None
        return replace(cls.from_source(text, path.stem), path=path)

    @classmethod
    def from_source(cls, source: str, name: str = "kernel") -> Kernel:
        """Make a kernel from CUDA source that begins with its declaration, a TOML comment::

            /* convt3d
            pass = "fprop"
            dtypes = ["fp32"]
            [[launch]]
            grid = "ceil_div(output_numel, 256)"
            block = 256
            */

        The parameters of each `__global__` function are bound by name: tensors (`input`, `weight`, `bias`, `output`,
        `grad_input`, ...), `Problem problem`, and integers named as in `Problem.names` or in the declaration's constants.

        Raises:
            KernelError: the declaration is missing or wrong; the message names the key and the rule.
        """
        match = _DECLARATION.search(source)
        if match is None:
            raise KernelError(f"kernel {name!r}: no declaration; begin the file with a comment /* convt3d ... */ that gives at "
                              "least pass, dtypes and one [[launch]] with grid and block")
        try:
            declared = tomllib.loads("\n" * source.count("\n", 0, match.start("toml")) + match["toml"])  # the file's own line numbers
        except tomllib.TOMLDecodeError as error:
            raise KernelError(f"kernel {name!r}: its declaration is no valid TOML: {error}") from None
        return _from_declaration(name, source, declared)

    def replace_tunables(self, **tunables: int) -> Kernel:
        """Return the same kernel with other values for some tunables.

        Raises:
            KernelError: a name is none of the kernel's tunables.
        """
        unknown = set(tunables) - set(self.tunables)
        if unknown:
            raise KernelError(f"kernel {self.name!r}: has no tunable {sorted(unknown)}; it has {sorted(self.tunables)}")
        return replace(self, tunables={**self.tunables, **tunables})

    @property
    def changed_tunables(self) -> dict[str, int]:
        """The tunables whose value is not the source's default."""
        return {name: value for name, value in self.tunables.items() if value != _defaults(self.source)[name]}

    @property
    def written(self) -> str:
        """The tensor the kernel writes."""
        return TENSORS[self.pass_name][-1]

    @property
    def is_persistent(self) -> bool:
        """Whether some launch has as many blocks as the GPU has multiprocessors, each with a share of all the work."""
        return any("multiprocessors" in str(size) for launch in self.launches for size in launch.grid)

    @property
    def waits_for_packing(self) -> bool:
        """Whether what reads a packed weight, or another prepared workspace, waits for it, so that it may begin before."""
        return '"convt3d/beside_packing.cuh"' in self.source

    def takes_strides(self, tensor: str) -> bool:
        """Whether a tensor is passed as a `View`, so that it need not be contiguous."""
        kinds = [p.kind for launch in self.launches for p in launch.parameters if p.name == tensor]
        return bool(kinds) and all(kind == "view" for kind in kinds)

    def why_not(
        self, problem: Problem, dtype: str, arch: str | None = None, limits: Limits | None = None
    ) -> str | None:
        """Return the one sentence that says why this kernel cannot do a problem (on that GPU), or None if it can."""
        if arch is not None and arch not in self.architectures:
            return f"{self.name} is for {', '.join(self.architectures)}, not for {arch}"
        if dtype not in self.dtypes:
            return f"{self.name} has no {dtype} instance (it has {', '.join(self.dtypes)})"
        multiprocessors = HOST_MULTIPROCESSORS if limits is None else limits.multiprocessors
        names = self._names(problem, dtype, multiprocessors)
        for rule, reason in self.restrictions.items():
            if not evaluate(rule, names):
                return f"{self.name}: {reason}"
        try:
            plan = self.plan(problem, dtype, multiprocessors)
        except KernelError as error:
            return str(error)
        needed = max((launch.shared_bytes for launch in plan.launches), default=0)
        if limits is not None and needed > limits.shared_bytes:
            return f"{self.name}: a block needs {needed} bytes of shared memory, this GPU gives it {limits.shared_bytes}"
        return None

    def require(self, problem: Problem, dtype: str, arch: str | None = None) -> None:
        """Raise `why_not`'s sentence as a KernelError."""
        if reason := self.why_not(problem, dtype, arch):
            raise KernelError(reason)

    @lru_cache(maxsize=256)  # noqa: B019, a kernel is hashed by identity and small: a run asks for its plan several times
    def plan(self, problem: Problem, dtype: str, multiprocessors: int = HOST_MULTIPROCESSORS) -> Plan:
        """Return the launches for one problem with grids, blocks and scalar arguments filled in.

        `multiprocessors` is the GPU's number of them, for kernels whose blocks stay and take work in turn.

        Raises:
            KernelError: a launch would pass a limit of the hardware or of an argument's type.
        """
        names = self._names(problem, dtype, multiprocessors)
        launches: list[PlannedLaunch] = []
        for launch in self.launches:
            if launch.when is not None and not evaluate(launch.when, names):
                continue
            grid = _three(self.name, "grid", launch.grid, names, MAX_GRID)
            block = _three(self.name, "block", launch.block, names, (MAX_THREADS, MAX_THREADS, 64))
            threads = block[0] * block[1] * block[2]
            if threads > MAX_THREADS:
                raise KernelError(f"{self.name}: block {block} has {threads} threads, the limit is {MAX_THREADS}")
            scalars = {p.name: self._scalar(p, names) for p in launch.parameters if p.kind == "scalar"}
            launches.append(
                PlannedLaunch(
                    launch.symbol,
                    launch.parameters,
                    scalars,
                    grid,
                    block,
                    int(evaluate(launch.shared_bytes, names)),
                    launch.packs,
                    launch.prepares,
                    self.waits_for_packing and bool(launches) and launches[-1].prepares is not None and launch.packs is None,
                )
            )
        workspace = {name: int(evaluate(size, names)) for name, size in self.workspace.items()}
        return Plan(tuple(launches), workspace, tuple((name, int(names[name])) for name in self.specialize))

    @lru_cache(maxsize=256)  # noqa: B019, as `plan`
    def _names(self, problem: Problem, dtype: str, multiprocessors: int) -> dict[str, Any]:
        known = {**problem.names, **self.tunables, **_device_names(dtype, multiprocessors)}
        names = _Names(known, {**self.specialize, **self.constants})
        for declared in (*self.specialize, *self.constants):
            names[declared]
        return names

    def _scalar(self, parameter: Parameter, names: Mapping[str, Any]) -> Any:
        value, scalar = names[parameter.name], parameter.scalar
        assert scalar is not None
        if scalar.kind in "iu" and not np.iinfo(scalar).min <= value <= np.iinfo(scalar).max:
            raise KernelError(f"{self.name}: {parameter.name}={value} does not fit its parameter type {scalar.name}")
        return value


class _Names(dict[str, Any]):
    """Names with their values; those that are declared by expressions get theirs when they are first asked for, in any order."""

    def __init__(self, known: Mapping[str, Any], expressions: Mapping[str, str | int]) -> None:
        super().__init__((name, value) for name, value in known.items() if name not in expressions)
        self._pending = dict(expressions)

    def __missing__(self, name: str) -> Any:
        expression = self._pending.pop(name)  # a circle finds nothing the second time: an unknown name
        value = self[name] = evaluate(expression, self)
        return value


def _device_names(dtype: str, multiprocessors: int) -> dict[str, int]:
    """Return what expressions know besides the problem: `split` is 1 for an instance that splits each operand in two."""
    return {"itemsize": DTYPES[dtype].itemsize, "split": int(dtype == "tf32x3"), "multiprocessors": multiprocessors}


def _three(
    kernel: str, what: str, expressions: tuple[str | int, ...], names: Mapping[str, Any], limits: tuple[int, int, int]
) -> tuple[int, int, int]:
    values = [int(evaluate(e, names)) for e in expressions] + [1] * (3 - len(expressions))
    for value, limit, axis in zip(values, limits, "xyz", strict=True):
        if not 0 <= value <= limit or (what == "block" and value == 0):
            raise KernelError(f"{kernel}: {what}.{axis}={value} is outside the hardware's limit of {limit}")
    return values[0], values[1], values[2]


def _from_declaration(name: str, source: str, declared: dict[str, Any]) -> Kernel:
    def fail(message: str) -> KernelError:
        return KernelError(f"kernel {name!r}: {message}")

    unknown = set(declared) - _KEYS
    if unknown:
        raise fail(f"its declaration has unknown keys {sorted(unknown)}; known: {sorted(_KEYS)}")
    if declared.get("pass") not in PASSES:
        raise fail(f"pass={declared.get('pass')!r}: must be one of {', '.join(PASSES)}")
    dtypes = declared.get("dtypes", ["fp32"])
    if not isinstance(dtypes, list) or not dtypes or set(dtypes) - set(DTYPES):
        raise fail(f"dtypes={dtypes!r}: must be a list of {', '.join(DTYPES)}")
    architectures = declared.get("architectures", list(ARCHITECTURES))
    if not isinstance(architectures, list) or not architectures or set(architectures) - set(ARCHITECTURES):
        raise fail(f"architectures={architectures!r}: must be a list of {', '.join(ARCHITECTURES)}")
    for table in ("specialize", "constants", "restrictions", "workspace"):
        if not isinstance(declared.get(table, {}), dict):
            raise fail(f"{table}: must be a table")
    launches = declared.get("launch")
    if not isinstance(launches, list) or not launches:
        raise fail("no [[launch]]: give at least one with grid and block")
    tunables = dict(_defaults(source))
    search = declared.get("search", {})
    if not isinstance(search, dict) or not all(isinstance(v, list) and v and all(type(n) is int for n in v) for v in search.values()):
        raise fail(f"search={search!r}: must be a table of tunable = [integers]")
    if unknown := set(search) - set(tunables):
        raise fail(f"search: {sorted(unknown)} are no tunables; there are {sorted(tunables)}")
    tensors = (*TENSORS[declared["pass"]], *declared.get("workspace", {}))
    declared_scalars = (*declared.get("specialize", {}), *declared.get("constants", {}), *tunables)
    scalars = {*Problem(1, 1, 1, (1, 1, 1), (1, 1, 1)).names, *declared_scalars, *_device_names("fp32", 1)}
    functions = {m["symbol"]: m["parameters"] for m in _GLOBAL.finditer(without_comments(source))}
    if not functions:
        raise fail("the source has no `__global__ void` function (templates cannot be launched by name)")
    return Kernel(
        name=name,
        source=source,
        pass_name=declared["pass"],
        dtypes=tuple(dtypes),
        architectures=tuple(architectures),
        deterministic=bool(declared.get("deterministic", True)),
        tunables=tunables,
        specialize=declared.get("specialize", {}),
        constants=declared.get("constants", {}),
        restrictions=declared.get("restrictions", {}),
        workspace=declared.get("workspace", {}),
        search={name: tuple(values) for name, values in search.items()},
        launches=tuple(_launch(fail, entry, functions, tensors, scalars) for entry in launches),
    )


def _launch(fail: Any, entry: dict[str, Any], functions: dict[str, str], tensors: tuple[str, ...], scalars: set[str]) -> Launch:
    unknown = set(entry) - _LAUNCH_KEYS
    if unknown:
        raise fail(f"[[launch]] has unknown keys {sorted(unknown)}; known: {sorted(_LAUNCH_KEYS)}")
    symbol = entry.get("symbol", next(iter(functions)) if len(functions) == 1 else None)
    if symbol is None:
        raise fail(f"[[launch]] needs a symbol: the source has {', '.join(functions)}")
    if symbol not in functions:
        raise fail(f"symbol={symbol!r}: no such `__global__ void` function; the source has {', '.join(functions)}")
    for key in ("grid", "block"):
        if key not in entry:
            raise fail(f"[[launch]] needs a {key}: one to three integers or expressions")
    sizes = {key: tuple(entry[key]) if isinstance(entry[key], list) else (entry[key],) for key in ("grid", "block")}
    for key, values in sizes.items():
        if not 1 <= len(values) <= 3 or not all(isinstance(v, (str, int)) for v in values):
            raise fail(f"{key}={entry[key]!r}: must be one to three integers or expressions")
    parameters = tuple(_parameter(fail, symbol, text, tensors, scalars) for text in split_top_level(functions[symbol]))
    packs = entry.get("packs")
    if packs is not None and (packs not in tensors or {p.name for p in parameters if p.kind in _TENSOR_KINDS} != {"weight", packs}):
        raise fail(f"packs={packs!r}: must name a workspace, and {symbol} may take no other tensor than it and the weight")
    prepares = entry.get("prepares", packs)
    if prepares is not None and (prepares not in tensors or prepares not in {p.name for p in parameters}):
        raise fail(f"prepares={prepares!r}: must name a workspace that {symbol} takes")
    geometry = (sizes["grid"], sizes["block"], entry.get("shared_bytes", 0))
    return Launch(symbol, parameters, *geometry, entry.get("when"), packs, prepares)


def _parameter(fail: Any, symbol: str, text: str, tensors: tuple[str, ...], scalars: set[str]) -> Parameter:
    words = re.sub(r"\b(const|volatile|__restrict__|__restrict|__grid_constant__)\b", " ", text)
    match = re.fullmatch(r"\s*(?P<type>.+?)\s*\b(?P<name>\w+)\s*", words, re.DOTALL)
    if match is None:
        raise fail(f"{symbol}: cannot read its parameter {text.strip()!r}")
    kind, name = " ".join(match["type"].split()), match["name"]
    if "*" in kind or "View<" in kind:
        if name not in tensors:
            raise fail(f"{symbol}: parameter {name!r} is a tensor and must be named one of {', '.join(tensors)}")
        return Parameter(name, "view" if "View<" in kind else "pointer")
    if kind == "Problem":
        return Parameter(name, "problem")
    if kind not in SCALARS:
        raise fail(f"{symbol}: parameter {name!r} has type {kind!r}; scalars are {', '.join(SCALARS)}")
    if name not in scalars:
        raise fail(f"{symbol}: no value is known by the name of parameter {name!r}; name it as in Problem "
                   f"({', '.join(sorted(scalars))}) or give it in [constants]")
    return Parameter(name, "scalar", SCALARS[kind])


@lru_cache(maxsize=64)
def _defaults(source: str) -> Mapping[str, int]:
    return {m["name"]: int(m["value"]) for m in _TUNABLE.finditer(source)}


def without_comments(source: str) -> str:
    """Return the source with comments and string contents blanked, every character and line in its place."""
    pattern = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source)


def split_top_level(text: str) -> list[str]:
    """Split at the commas that stand in no bracket of any kind."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()]
