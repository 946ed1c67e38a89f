"""A kernel: its source, and the declaration in the source's first comment that says what it computes and how to launch it."""

from __future__ import annotations

import os
import re
import string
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import architecture
from .dtypes import DTYPES
from .errors import KernelError, ProblemTypeError, printable, shown
from .expressions import MOST_VALUE, evaluate, evaluate_all, kind_of
from .files import read_text
from .includes import QUOTED, require_inside
from .problem import INT32_MAX, PASSES, Problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ARCHITECTURES = (architecture.OLDEST,)  # of a kernel that declares none
HOST_MULTIPROCESSORS = 3  # so that work is cut where a GPU would cut it, on small problems too
MAX_THREADS = 1024
MAX_GRID = (INT32_MAX, 65535, 65535)
MAX_SHARED_BYTES = 227 << 10  # of a block on sm_90 and sm_100; every other GPU gives less
MAX_WORKSPACE = 2**59  # elements: bytes that have a number
MOST_TUNABLE = INT32_MAX  # an int in the source
MOST_SOURCE = 2**20  # characters
MOST_NAMES = 400  # that a declaration may give, of a kind
_MOST_NAME_BYTES = 100
# What a binary may be compiled for of the output's strides (`backends.base.TensorRef.layout`): `output_layout` in [specialize].
ANY_STRIDES, CONTIGUOUS, CHANNELS_LAST = range(3)
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

_LEAST, _MOST = ({t: int(getattr(np.iinfo(t), end)) for t in SCALARS.values() if t.kind in "iu"} for end in ("min", "max"))
# Each of these takes time in proportion to the text: what may repeat is followed by what it cannot be.
_DECLARATION = re.compile(r"/\*\s*convt3d[ \t]*\n")
_BRACKETS = r"\((?:[^(){};]|\((?:[^(){};]|\((?:[^(){};]|\([^(){};]*\))*\))*\))*\)"
_QUALIFIERS = rf"(?:(?:static\b|inline\b|__(?:launch_bounds|maxnreg|cluster_dims)__\s*{_BRACKETS})\s*)*"
_FUNCTION = re.compile(rf"\s+{_QUALIFIERS}void\s+{_QUALIFIERS}(?P<symbol>\w+)\s*\((?P<parameters>[^)]*)\)")
_COMMENT_OR_TEXT = re.compile(
    r"//[^\n]*|/\*.*?(?:\*/|(?P<open>\Z))|\\.|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_KERNEL_NAME = re.compile(r"\w[\w .,+()@-]*")
_TUNABLE = re.compile(r"^#ifndef (?P<name>[A-Z][A-Z0-9_]*)\n#define (?P=name) (?P<value>[0-9]{1,12})\n#endif", re.MULTILINE)
_KEYS = {
    *("pass", "dtypes", "architectures", "deterministic", "specialize", "constants", "restrictions", "workspace", "search"),
    *("static_shared_bytes", "launch", "spreads_nan", "multiplies_padding", "skips_dead_taps", "cost"),
}
_COST_KEYS = ("steps", "products", "bytes", "first_bytes", "blocks")
_TENSOR_KINDS = ("pointer", "view")
_LAUNCH_KEYS = {"symbol", "grid", "block", "shared_bytes", "when", "packs", "prepares", "general"}


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
    the workspace that it fills, from whatever: the launch behind it may begin meanwhile, and waits before it reads that. A `general`
    function is the same code for all problems and tunables: a GPU has one binary of those of a kernel.
    """

    symbol: str
    parameters: tuple[Parameter, ...]
    grid: tuple[str | int, ...]
    block: tuple[str | int, ...]
    shared_bytes: str | int = 0
    when: str | None = None
    packs: str | None = None
    prepares: str | None = None
    general: bool = False


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
    specialized: tuple[int, ...] = ()  # the macros' values, in the order of the declaration
    output_layout: int = ANY_STRIDES  # what these values promise of the output


@dataclass(frozen=True)
class Plan:
    """All launches of one call, the workspaces (elements of the accumulation type) they share, and the macros they are compiled with."""

    launches: tuple[PlannedLaunch, ...]
    workspace: dict[str, int]
    specialization: tuple[tuple[str, int], ...] = ()
    output_layout: int = ANY_STRIDES  # what they promise of the output: tensors must have it


class Numbers(NamedTuple):
    """What a plan has beside what its kernel declares: short to send to a process that has the kernel; see `Kernel.numbers`."""

    launches: tuple[tuple[int, dict[str, Any], tuple[int, int, int], tuple[int, int, int], int, bool], ...]
    workspace: dict[str, int]
    specialization: tuple[tuple[str, int], ...]
    output_layout: int = ANY_STRIDES


class Limits(NamedTuple):
    """What a GPU has, beyond its architecture: shared memory for one block in bytes, multiprocessors, and as far as its driver tells
    (else 0) their clock and the memory's bandwidth."""

    shared_bytes: int
    multiprocessors: int
    clock_hz: float = 0.0
    memory_bytes_per_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Kernel:
    """A raw CUDA kernel: shipped in `kernels/`, or a user's own made by `Kernel.from_file` or `Kernel.from_source`.

    Attributes:
        pass_name: "fprop", "dgrad" or "wgrad".
        dtypes: what it can be instantiated for, of `dtypes.DTYPES`.
        architectures: the GPUs it is for: "sm_80" and newer, "sm_90a" alone (`architecture.runs_on`); the host runs every kernel.
        deterministic: whether two runs give the same bits.
        tunables: the upper-case macros the source gives a default by `#ifndef`, and their values; `replace_tunables` makes another
            configuration.
        specialize: macros whose values follow from the problem and the output's layout: a GPU's binary is compiled for them, the host's
            is not.
        restrictions: expression that must hold, and the sentence that says why.
        spreads_nan: expression under which a NaN or infinity among the inputs makes NaN of outputs that no tap leads to from it, and the
            sentence that says why; "auto" then leaves the problem to others.
        multiplies_padding: whether weights are multiplied with zeros beyond the input, so that one that is not finite makes NaN of all
            outputs whose residue class has its tap. Only for fprop.
        skips_dead_taps: whether it leaves out taps that lead nowhere by itself; "auto" then gives it all of the weight, not the part
            that has the others. Only for fprop and dgrad.
        static_shared_bytes: the most that a block's `__shared__` variables take beside what its launch asks for.
        search: the values that `convt3d tune` tries, by tunable.
        cost: what the busiest block of the last launch does, for predictions of its time: `steps` that follow one another, the
            multiply-adds of a step (`products`, tiles filled up), the `bytes` that a step reads, and those that are read once before.
        headers: the texts of the headers that the file includes by `#include "..."` and that lie beside it, or beside one of them.
        overlay: texts in the place of the package's headers, by their names there (such as "convt3d/core/taps.cuh"), for this kernel alone.
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
    spreads_nan: Mapping[str, str] = field(default_factory=dict)
    multiplies_padding: bool = False
    skips_dead_taps: bool = False
    static_shared_bytes: int = 0
    search: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cost: Mapping[str, str | int] = field(default_factory=dict)
    headers: Mapping[Path, str] = field(default_factory=dict)
    overlay: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _KERNEL_NAME.fullmatch(self.name) or len(self.name.encode()) > _MOST_NAME_BYTES:
            raise KernelError(
                f"kernel {shown(self.name)}: its name must be of letters, digits, spaces and _ . , + - ( ) @, must begin with a letter, "
                f"a digit or _, and have at most {_MOST_NAME_BYTES} bytes: files of the cache are named after it"
            )

    @classmethod
    def from_file(cls, path: str | Path) -> Kernel:
        """Read a kernel from a `.cu` file, with the headers beside it that it includes; its name is the file's.

        Raises:
            KernelError: the file or a header cannot be read or lies in no folder that is allowed, or its declaration is wrong.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise KernelError(f"path={shown(path)}: must be the path of a file")
        path = Path(path)
        text = _read(path, "kernel file")
        return replace(_from_text(text, path.stem, path), path=path, headers=_headers_beside(path, text))

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
        A string has no folder: it can include no headers of its own.

        Raises:
            KernelError: the declaration is missing or wrong; the message names the key and the rule. Or it includes what it may not.
        """
        kernel = _from_text(source, name)
        require_inside(kernel.source, f"{name}.cu")
        return kernel

    def replace_tunables(self, **tunables: int) -> Kernel:
        """Return the same kernel with other values for some tunables.

        Raises:
            KernelError: a name is none of the kernel's tunables, or a value no whole number from 0 to 2**31 - 1.
        """
        unknown = set(tunables) - set(self.tunables)
        if unknown:
            raise KernelError(f"kernel {self.name!r}: has no tunable {sorted(unknown)}; it has {sorted(self.tunables)}")
        for name, value in tunables.items():
            if type(value) is not int or not 0 <= value <= MOST_TUNABLE:
                raise KernelError(f"kernel {self.name!r}: {name}={shown(value)}: must be a whole number from 0 to 2**31 - 1")
        return replace(self, tunables={**self.tunables, **tunables})

    def replace_source(self, source: str) -> Kernel:
        """Return a kernel of the same name, place, headers and overlay, made from another source.

        Raises:
            KernelError: as `from_source` says.
        """
        _require_text(source, self.name)
        if self.path is None:
            return replace(Kernel.from_source(source, self.name), overlay=self.overlay)
        require_inside(source, str(self.path), self.path, self.path.parent)
        return replace(_from_text(source, self.name, self.path), path=self.path, headers=self.headers, overlay=self.overlay)

    def replace_headers(self, texts: Mapping[str, str]) -> Kernel:
        """Return the same kernel with other texts for some of the package's headers, by their names there ("convt3d/core/taps.cuh").

        Both backends compile it with these; other kernels, and the files themselves, stay as they are.

        Raises:
            KernelError: `texts` has anything but texts by names.
        """
        if not isinstance(texts, Mapping) or not all(isinstance(one, str) for pair in texts.items() for one in pair):
            raise KernelError(f"texts={shown(texts)}: must be texts by the names of headers")
        return replace(self, overlay={**self.overlay, **texts})

    def including(self, text: str, file: Path, name_of: Callable[[Path], str]) -> str:
        """Return the text of `file` with what `name_of` gives in the place of each header of this kernel that it includes."""
        return QUOTED.sub(lambda m: f'{m["before"]}"{name_of(p)}"' if (p := _beside(file, m["name"])) in self.headers else m[0], text)

    def with_default_tunables(self) -> Kernel:
        """Return the same kernel with the values that its source gives its tunables."""
        return replace(self, tunables=_defaults(self.source))

    def has_code_of(self, other: Kernel) -> bool:
        """Whether it is the same kernel as another, but for the values of tunables."""
        return (self.source, self.headers, self.overlay) == (other.source, other.headers, other.overlay)

    @property
    def changed_tunables(self) -> dict[str, int]:
        """The tunables whose value is not the source's default."""
        return {name: value for name, value in self.tunables.items() if value != _defaults(self.source)[name]}

    @property
    def functions(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The functions that it launches: those that are compiled for a problem and tunables, and the general ones."""
        general = {launch.symbol: launch.general for launch in self.launches}
        return tuple(s for s in general if not general[s]), tuple(s for s in general if general[s])

    @property
    def written(self) -> str:
        """The tensor the kernel writes."""
        return TENSORS[self.pass_name][-1]

    @property
    def is_persistent(self) -> bool:
        """Whether some launch has as many blocks as the GPU has multiprocessors, each with a share of all the work."""
        return any("multiprocessors" in str(size) for launch in self.launches for size in launch.grid)

    @property
    def knows_multiprocessors(self) -> bool:
        """Whether a plan may depend on how many multiprocessors there are: its declaration, or a comment, names them."""
        return "multiprocessors" in self.source

    @property
    def knows_layout(self) -> bool:
        """Whether its binaries are made for the layout of the output that they write."""
        expressions = (*self.specialize.values(), *self.constants.values())
        return self.takes_strides("output") and any("output_layout" in str(one) for one in expressions)

    @property
    def waits_for_packing(self) -> bool:
        """Whether what reads a packed weight, or another prepared workspace, waits for it, so that it may begin before."""
        return '"convt3d/ptx/beside_packing.cuh"' in self.source

    def takes_strides(self, tensor: str) -> bool:
        """Whether a tensor is passed as a `View`, so that it need not be contiguous."""
        kinds = [p.kind for launch in self.launches for p in launch.parameters if p.name == tensor]
        return bool(kinds) and all(kind == "view" for kind in kinds)

    def why_not_on(self, arch: str | None) -> str | None:
        """Return the one sentence that says that it is not for GPUs of that architecture, or None if it is; None is the host."""
        if arch is None or any(architecture.runs_on(target, arch) for target in self.architectures):
            return None
        return f"{self.name} is for {architecture.described(self.architectures)}, not for {arch}"

    def why_not(
        self, problem: Problem, dtype: str, arch: str | None = None, limits: Limits | None = None
    ) -> str | None:
        """Return the one sentence that says why this kernel cannot do a problem (on that GPU), or None if it can.

        Raises:
            ProblemTypeError: `problem` is no Problem.
        """
        if not isinstance(problem, Problem):
            raise ProblemTypeError(f"problem={shown(problem)}: must be a Problem")
        if reason := self.why_not_on(arch):
            return reason
        if dtype not in self.dtypes:
            return f"{self.name} has no {dtype} instance (it has {', '.join(self.dtypes)})"
        multiprocessors = HOST_MULTIPROCESSORS if limits is None else limits.multiprocessors
        names = self.names(problem, dtype, multiprocessors)
        for rule, reason in self.restrictions.items():
            if not evaluate(rule, names):
                return f"{self.name}: {reason}"
        try:
            plan = self.plan(problem, dtype, multiprocessors)
        except KernelError as error:
            return str(error)
        needed = max((launch.shared_bytes for launch in plan.launches), default=0) + self.static_shared_bytes
        if limits is not None and needed > limits.shared_bytes:
            return f"{self.name}: a block needs {needed} bytes of shared memory, this GPU gives it {limits.shared_bytes}"
        return None

    def why_spreads_nan(self, problem: Problem, dtype: str) -> str | None:
        """Return the one sentence that says why a NaN among the inputs reaches more than its taps lead to, or None if it does not."""
        if not self.spreads_nan:
            return None
        names = self.names(problem, dtype, HOST_MULTIPROCESSORS)
        return next((f"it spreads NaN: {why}" for rule, why in self.spreads_nan.items() if evaluate(rule, names)), None)

    def require(self, problem: Problem, dtype: str, arch: str | None = None) -> None:
        """Raise `why_not`'s sentence as a KernelError."""
        if reason := self.why_not(problem, dtype, arch):
            raise KernelError(reason)

    @lru_cache(maxsize=256)  # noqa: B019, a kernel is hashed by identity and small: a run asks for its plan several times
    def plan(
        self, problem: Problem, dtype: str, multiprocessors: int = HOST_MULTIPROCESSORS, output_layout: int = ANY_STRIDES
    ) -> Plan:
        """Return the launches for one problem with grids, blocks and scalar arguments filled in.

        Args:
            multiprocessors: the GPU's number of them, for kernels whose blocks stay and take work in turn.
            output_layout: of the output that will be written; only [specialize] knows it.

        Raises:
            KernelError: a launch would pass a limit of the hardware or of an argument's type, or there is no such dtype.
            ProblemTypeError: `problem` is no Problem.
        """
        names = self.names(problem, dtype, multiprocessors)
        specialization = tuple((name, int(names[name])) for name in self.specialize)
        promised = ANY_STRIDES
        if output_layout != ANY_STRIDES and self.knows_layout:
            known = self.names(problem, dtype, multiprocessors, output_layout)
            better = tuple((name, int(known[name])) for name in self.specialize)
            if better != specialization:
                specialization, promised = better, output_layout
        launches: list[PlannedLaunch] = []
        for launch in self.launches:
            if launch.when is not None and not evaluate(launch.when, names):
                continue
            grid = _three(self.name, "grid", launch.grid, names, MAX_GRID)
            block = _three(self.name, "block", launch.block, names, (MAX_THREADS, MAX_THREADS, 64))
            threads = block[0] * block[1] * block[2]
            if threads > MAX_THREADS:
                raise KernelError(f"{self.name}: block {block} has {threads} threads, the limit is {MAX_THREADS}")
            shared_bytes = int(evaluate(launch.shared_bytes, names))
            if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
                raise KernelError(f"{self.name}: shared_bytes={shared_bytes}: must be from 0 to {MAX_SHARED_BYTES}, the most a GPU gives")
            scalars = {p.name: self._scalar(p, names) for p in launch.parameters if p.kind == "scalar"}
            launches.append(
                PlannedLaunch(
                    launch.symbol,
                    launch.parameters,
                    scalars,
                    grid,
                    block,
                    shared_bytes,
                    launch.packs,
                    launch.prepares,
                    self.waits_for_packing and bool(launches) and launches[-1].prepares is not None and launch.packs is None,
                    tuple(value for _, value in specialization),
                    promised,
                )
            )
        workspace = {name: int(evaluate(size, names)) for name, size in self.workspace.items()}
        for name, size in workspace.items():
            if not 0 <= size <= MAX_WORKSPACE:
                raise KernelError(f"{self.name}: workspace {name}={size}: must be from 0 to {MAX_WORKSPACE} elements")
        return Plan(tuple(launches), workspace, specialization, promised)

    def numbers(self, plan: Plan) -> Numbers:
        """Return what `planned` makes one of its plans of again."""
        declared = [(one.symbol, one.parameters, one.packs, one.prepares) for one in self.launches]
        positions = [declared.index((one.symbol, one.parameters, one.packs, one.prepares)) for one in plan.launches]
        launches = tuple(
            (position, one.scalars, one.grid, one.block, one.shared_bytes, one.beside)
            for position, one in zip(positions, plan.launches, strict=True)
        )
        return Numbers(launches, plan.workspace, plan.specialization, plan.output_layout)

    def planned(self, numbers: Numbers) -> Plan:
        """Return the plan that `numbers` was asked about, in this process or another."""
        specialized = (tuple(value for _, value in numbers.specialization), numbers.output_layout)
        launches = []
        for position, scalars, grid, block, shared_bytes, beside in numbers.launches:
            one = self.launches[position]
            launches.append(
                PlannedLaunch(one.symbol, one.parameters, scalars, grid, block, shared_bytes, one.packs, one.prepares, beside, *specialized)
            )
        return Plan(tuple(launches), *numbers[1:])

    @lru_cache(maxsize=256)  # noqa: B019, as `plan`
    def names(
        self, problem: Problem, dtype: str, multiprocessors: int, output_layout: int = ANY_STRIDES
    ) -> Mapping[str, Any]:
        """Return what the declaration's expressions know for one problem on a GPU with so many multiprocessors.

        Grids, arguments and all but [specialize] go by the names of any strides.
        """
        if not isinstance(problem, Problem):
            raise ProblemTypeError(f"problem={shown(problem)}: must be a Problem")
        if dtype not in DTYPES:
            raise KernelError(f"dtype={shown(dtype)}: must be one of {', '.join(DTYPES)}")
        layout = {"output_layout": output_layout}
        known = {**problem.names, **self.tunables, **device_names(dtype, multiprocessors), **layout}
        return evaluate_all(self._named, known)

    @cached_property
    def _named(self) -> tuple[tuple[str, str | int], ...]:
        return tuple({**self.specialize, **self.constants}.items())

    def _scalar(self, parameter: Parameter, names: Mapping[str, Any]) -> Any:
        value, scalar = names[parameter.name], parameter.scalar
        assert scalar is not None
        if isinstance(value, tuple):
            raise KernelError(f"{self.name}: parameter {parameter.name}={value}: must be a number; pass its axes one by one")
        if scalar.kind in "iu" and not _LEAST[scalar] <= value <= _MOST[scalar]:
            raise KernelError(f"{self.name}: {parameter.name}={value} does not fit its parameter type {scalar.name}")
        return value


def _require_text(source: object, name: object) -> None:
    if not isinstance(source, str):
        raise KernelError(f"kernel {shown(name)}: source={shown(source)}: must be text")


def _from_text(source: str, name: str, path: Path | None = None) -> Kernel:
    _require_text(source, name)
    if len(source) > MOST_SOURCE:
        raise KernelError(f"kernel {name!r}: its source has {len(source)} characters, the limit is {MOST_SOURCE}")
    source = source.removeprefix("\ufeff").replace("\r\n", "\n")
    match = _DECLARATION.search(source)
    end = -1 if match is None else source.find("*/", match.end())
    if match is None or end < 0:
        raise KernelError(f"kernel {name!r}: no declaration; begin the file with a comment /* convt3d ... */ that gives at "
                          "least pass, dtypes and one [[launch]] with grid and block")
    try:
        text = "\n" * source.count("\n", 0, match.end()) + source[match.end() : end]  # the file's line numbers
        declared = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # an integer of too many digits is a plain ValueError
        raise KernelError(f"kernel {name!r}: its declaration is no valid TOML: {error}") from None

    def fail(message: str, launch: int = 0) -> KernelError:
        line = _line_of(message, text, launch)
        place = f" ({'line ' if path is None else printable(f'{path}:', 300)}{line})" if line else ""
        return KernelError(f"kernel {shown(name)}: {message}{place}")

    return _from_declaration(fail, name, source, declared)


def _line_of(message: str, declaration: str, launch: int) -> int:
    """Return the line of the first key, else table, that a message names, within the launch of that number if it is above 0; 0: none."""
    launches = [match.start() for match in re.finditer(r"^[ \t]*\[\[", declaration, re.MULTILINE)]
    start, end = (*launches, len(declaration))[launch - 1 : launch + 1] if 0 < launch <= len(launches) else (0, len(declaration))
    named = re.findall(r"[A-Za-z_][\w.]*", message.partition("; known:")[0])[:20]  # what is wrong is named first
    words = [re.escape(word.rpartition(".")[2]) for word in named]
    for form in (r'^[ \t]*"?{}"?[ \t]*=', r"^[ \t]*\[+[ \t]*{}[ \t]*\]"):
        for word in words:
            if (found := re.compile(form.format(word), re.MULTILINE).search(declaration, start, end)) is not None:
                return declaration.count("\n", 0, found.start()) + 1
    return 0


def _read(path: Path, what: str) -> str:
    try:
        return read_text(path).removeprefix("\ufeff").replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise KernelError(f"{what} {str(path)!r}: cannot be read: {error}") from None


def _beside(file: Path, name: str) -> Path:
    return Path(os.path.realpath(file.parent / name))


def _headers_beside(path: Path, text: str) -> dict[Path, str]:
    """Return the texts of all headers that are included by their place beside the file that includes them, and theirs."""
    found: dict[Path, str] = {}
    waiting = [(path, text)]
    while waiting:
        file, content = waiting.pop()
        require_inside(content, str(file), file, path.parent)
        for match in QUOTED.finditer(content):
            header = _beside(file, match["name"])
            if header not in found and os.path.isfile(header):  # False too for a name that no file can have
                found[header] = _read(header, f"{file.name}: header")
                waiting.append((header, found[header]))
    return dict(sorted(found.items()))


def device_names(dtype: str, multiprocessors: int) -> dict[str, int]:
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


def _from_declaration(fail: Any, name: str, source: str, declared: dict[str, Any]) -> Kernel:
    unknown = set(declared) - _KEYS
    if unknown:
        raise fail(f"its declaration has unknown keys {shown(sorted(unknown))}; known: {sorted(_KEYS)}")
    pass_name = declared.get("pass")
    if not isinstance(pass_name, str) or pass_name not in PASSES:
        raise fail(f"pass={shown(pass_name)}: must be one of {', '.join(PASSES)}")
    dtypes = _known_names(fail, "dtypes", declared.get("dtypes", ["fp32"]), tuple(DTYPES))
    architectures = _architectures(fail, declared.get("architectures", list(ARCHITECTURES)))
    deterministic = declared.get("deterministic", True)
    if not isinstance(deterministic, bool):
        raise fail(f"deterministic={shown(deterministic)}: must be true or false")
    padding = declared.get("multiplies_padding", False)
    if not isinstance(padding, bool) or (padding and pass_name != "fprop"):
        raise fail(f"multiplies_padding={shown(padding)}: must be true or false, and true only for fprop")
    skips = declared.get("skips_dead_taps", False)
    if not isinstance(skips, bool) or (skips and pass_name == "wgrad"):
        raise fail(f"skips_dead_taps={shown(skips)}: must be true or false, and true only for fprop and dgrad")
    static = declared.get("static_shared_bytes", 0)
    if type(static) is not int or not 0 <= static <= MAX_SHARED_BYTES:
        raise fail(f"static_shared_bytes={shown(static)}: must be a number of bytes, at most {MAX_SHARED_BYTES}")
    tables = {table: _expressions(fail, table, declared.get(table, {})) for table in ("specialize", "constants", "workspace", "cost")}
    if unknown := set(tables["cost"]) - set(_COST_KEYS):
        raise fail(f"cost: has unknown keys {shown(sorted(unknown))}; known: {list(_COST_KEYS)}")
    if tables["cost"] and not {"steps", "products"} <= set(tables["cost"]):
        raise fail("cost: give steps and the products of a step; bytes, first_bytes and blocks may be left out")
    if taken := set(tables["workspace"]) & set(TENSORS[pass_name]):
        raise fail(f"workspace: {sorted(taken)[0]!r} is a tensor of {pass_name}; choose another name")
    tunables = dict(_defaults(source))
    for tunable, value in tunables.items():
        if value > MOST_TUNABLE:
            raise fail(f"#define {tunable}: must be at most 2**31 - 1")
    launches = declared.get("launch")
    if not isinstance(launches, list) or not launches or not all(isinstance(launch, dict) for launch in launches):
        raise fail("no [[launch]]: give at least one with grid and block")
    if len(launches) > MOST_NAMES:
        raise fail(f"[[launch]]: there are {len(launches)}, the limit is {MOST_NAMES}")
    tensors = (*TENSORS[pass_name], *tables["workspace"])
    declared_scalars = (*tables["specialize"], *tables["constants"], *tunables)
    scalars = {*Problem(1, 1, 1, (1, 1, 1), (1, 1, 1)).names, *declared_scalars, *device_names("fp32", 1)}
    functions = _functions(fail, source)
    for entry in launches:
        if entry.get("general") is True and (numbers := _words_of(source, entry.get("symbol")) & {*tables["specialize"], *tunables}):
            raise fail(f"general: {entry['symbol']} reads {sorted(numbers)[0]}, a number that binaries of other functions are made for")
    return Kernel(
        name=name,
        source=source,
        pass_name=pass_name,
        dtypes=dtypes,
        architectures=architectures,
        deterministic=deterministic,
        tunables=tunables,
        restrictions=_reasons(fail, "restrictions", declared.get("restrictions", {})),
        spreads_nan=_reasons(fail, "spreads_nan", declared.get("spreads_nan", {})),
        multiplies_padding=padding,
        skips_dead_taps=skips,
        search=_search(fail, declared.get("search", {}), tunables),
        specialize=tables["specialize"],
        constants=tables["constants"],
        workspace=tables["workspace"],
        cost=tables["cost"],
        static_shared_bytes=static,
        launches=tuple(_launch(partial(fail, launch=n), one, functions, tensors, scalars) for n, one in enumerate(launches, 1)),
    )


def _known_names(fail: Any, key: str, given: object, known: tuple[str, ...]) -> tuple[str, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(name, str) and name in known for name in given):
        raise fail(f"{key}={shown(given)}: must be a list of {', '.join(known)}")
    return tuple(dict.fromkeys(given))


def _architectures(fail: Any, given: object) -> tuple[str, ...]:
    if not isinstance(given, list) or not given or not all(map(architecture.is_target, given)):
        raise fail(
            f"architectures={shown(given)}: must be a list of '{architecture.OLDEST}' or a later one (that and newer), "
            f"'{architecture.OLDEST_ALONE}' or a later one (that alone)"
        )
    return tuple(dict.fromkeys(given))


def _expressions(fail: Any, key: str, given: object) -> dict[str, str | int]:
    """Return a table of names and expressions, each of which can be read."""
    if not isinstance(given, dict) or len(given) > MOST_NAMES:
        raise fail(f"{key}: must be a table of at most {MOST_NAMES} names with expressions")
    for name, value in given.items():
        if not _NAME.fullmatch(name):
            raise fail(f"{key}: {shown(name)} must be a name of letters, digits and _")
        _expression(fail, f"{key}.{name}", value)
    return given


def _expression(fail: Any, key: str, value: object) -> None:
    if type(value) not in (int, str) or (isinstance(value, int) and abs(value) > MOST_VALUE):
        raise fail(f"{key}={shown(value)}: must be an integer or an expression in quotes")
    if isinstance(value, str):
        try:
            kind = kind_of(value)
        except KernelError as error:
            raise fail(f"{key}: {error}") from None
        if kind != "int":
            raise fail(f"{key}={shown(value)}: must be a number, and is a tuple")


def _reasons(fail: Any, key: str, given: object) -> dict[str, str]:
    if not isinstance(given, dict) or len(given) > MOST_NAMES:
        raise fail(f"{key}: must be a table of at most {MOST_NAMES} expressions, each with the sentence that says why")
    for rule, reason in given.items():
        _expression(fail, key, rule)
        if not isinstance(reason, str) or not reason:
            raise fail(f"{key}: {shown(rule)} = {shown(reason)}: must be the sentence that says why")
    return given


def _search(fail: Any, given: object, tunables: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    def listed(values: object) -> bool:
        return isinstance(values, list) and bool(values) and all(type(n) is int and 0 <= n <= MOST_TUNABLE for n in values)

    if not isinstance(given, dict) or not all(listed(values) for values in given.values()):
        raise fail(f"search={shown(given)}: must be a table of tunable = [integers from 0 to 2**31 - 1]")
    if unknown := set(given) - set(tunables):
        raise fail(f"search: {shown(sorted(unknown))} are no tunables; there are {shown(sorted(tunables))}")
    return {name: tuple(values) for name, values in given.items()}


def _functions(fail: Any, source: str) -> dict[str, str]:
    """Return the parameters of each `__global__` function, by its symbol."""
    if any(match["open"] is not None for match in _COMMENT_OR_TEXT.finditer(source)):
        raise fail("a comment /* of its source is never closed")
    pieces = re.split(r"\b__global__\b", without_comments(source))[1:]
    functions = {m["symbol"]: m["parameters"] for m in map(_FUNCTION.match, pieces) if m is not None}
    if not functions:
        raise fail("the source has no `__global__ void` function (templates cannot be launched by name)")
    return functions


def _words_of(source: str, symbol: object) -> set[str]:
    """Return the words of a `__global__` function's body."""
    for piece in re.split(r"\b__global__\b", without_comments(source))[1:]:
        if (match := _FUNCTION.match(piece)) is not None and match["symbol"] == symbol:
            body, depth = piece[piece.find("{") :], 0
            for place, letter in enumerate(body):
                depth += {"{": 1, "}": -1}.get(letter, 0)
                if depth == 0:
                    return set(re.findall(r"\w+", body[:place]))
    return set()


def _launch(fail: Any, entry: dict[str, Any], functions: dict[str, str], tensors: tuple[str, ...], scalars: set[str]) -> Launch:
    unknown = set(entry) - _LAUNCH_KEYS
    if unknown:
        raise fail(f"[[launch]] has unknown keys {shown(sorted(unknown))}; known: {sorted(_LAUNCH_KEYS)}")
    for key in ("symbol", "packs", "prepares"):
        if not isinstance(entry.get(key, ""), str):
            raise fail(f"{key}={shown(entry[key])}: must be a name in quotes")
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
        if not 1 <= len(values) <= 3 or not all(type(v) in (str, int) for v in values):
            raise fail(f"{key}={shown(entry[key])}: must be one to three integers or expressions")
        for value in values:
            _expression(fail, key, value)
    for key in ("shared_bytes", "when"):
        _expression(fail, key, entry.get(key, 0))
    parameters = tuple(_parameter(fail, symbol, text, tensors, scalars) for text in split_top_level(functions[symbol]))
    packs = entry.get("packs")
    if packs is not None and (packs not in tensors or {p.name for p in parameters if p.kind in _TENSOR_KINDS} != {"weight", packs}):
        raise fail(f"packs={packs!r}: must name a workspace, and {symbol} may take no other tensor than it and the weight")
    prepares = entry.get("prepares", packs)
    if prepares is not None and (prepares not in tensors or prepares not in {p.name for p in parameters}):
        raise fail(f"prepares={prepares!r}: must name a workspace that {symbol} takes")
    general = entry.get("general", False)
    if not isinstance(general, bool):
        raise fail(f"general={shown(general)}: must be true or false")
    geometry = (sizes["grid"], sizes["block"], entry.get("shared_bytes", 0))
    return Launch(symbol, parameters, *geometry, entry.get("when"), packs, prepares, general)


def _parameter(fail: Any, symbol: str, text: str, tensors: tuple[str, ...], scalars: set[str]) -> Parameter:
    words = " ".join(re.sub(r"\b(const|volatile|__restrict__|__restrict|__grid_constant__)\b", " ", text).split())
    kind = words.rstrip(f"{string.ascii_letters}{string.digits}_")
    name, kind = words[len(kind) :], kind.strip()
    if not kind or not _NAME.fullmatch(name):
        raise fail(f"{symbol}: cannot read its parameter {shown(text.strip())}")
    if "*" in kind or "View<" in kind:
        if name not in tensors:
            raise fail(f"{symbol}: parameter {name!r} is a tensor and must be named one of {', '.join(tensors)}")
        return Parameter(name, "view" if "View<" in kind else "pointer")
    if kind == "Problem":
        return Parameter(name, "problem")
    if kind not in SCALARS:
        raise fail(f"{symbol}: parameter {name!r} has type {shown(kind)}; scalars are {', '.join(SCALARS)}")
    if name not in scalars:
        raise fail(f"{symbol}: no value is known by the name of parameter {name!r}; name it as in Problem "
                   f"({', '.join(sorted(scalars))}) or give it in [constants]")
    return Parameter(name, "scalar", SCALARS[kind])


@lru_cache(maxsize=64)
def _defaults(source: str) -> Mapping[str, int]:
    return {m["name"]: int(m["value"]) for m in _TUNABLE.finditer(source)}


def without_comments(source: str) -> str:
    """Return the source with comments and string contents blanked, every character and line in its place."""
    return _COMMENT_OR_TEXT.sub(lambda match: match[0] if match[0][0] == "\\" else re.sub(r"[^\n]", " ", match[0]), source)


def global_symbol(blanked: str, position: int) -> str | None:
    """Return the name of the function whose `__global__` ends there, in a source without comments; None if it is no plain function."""
    found = _FUNCTION.match(blanked, position)
    return None if found is None else found["symbol"]


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
