"""A child of `convt3d kernelbench`: runs the `Model` or the `ModelNew` of a file on the inputs that the judge hands it.

A file's code runs here and may change all of this process. So nothing is decided here: there is no clock, no comparison and no other
model. What the judge takes from a child is what lies in the shared memory when the judge reads it.
"""

from __future__ import annotations

import ast
import copy
import importlib.machinery
import inspect
import random
import symtable
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Set
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...errors import printable
from .channel import Channel, Gone, Message
from .memory import Unfit, flatten, map_region, size_of, store, unflatten

_OF_THE_REFERENCE = frozenset({"Model", "get_inputs", "get_init_inputs"})
_SEED = 0  # of the parameters


def serve(channel: Channel) -> None:
    """Answer the judge until it goes away."""
    subject = Subject()
    while True:
        try:
            request = channel.receive()
            number, do = request.pop("number"), request.pop("do")
            channel.send(_attempt(subject, channel, do, request) | {"number": number})
        except Gone:
            return


def _attempt(subject: Subject, channel: Channel, do: str, request: Message) -> Message:
    try:
        if do == "map":
            subject.memory[request["name"]] = map_region(channel, request)
            return {}
        return getattr(subject, f"do_{do}")(**request)  # type: ignore[no-any-return]
    except Exception as error:
        traceback.print_exc()
        text = f"{printable(type(error).__name__, 100)}: {printable(' '.join(str(error).split()), 500)}"
        return {"error": text, "unfit": isinstance(error, Unfit)}


class Subject:
    """A model, and what it returned last. Each `do_...` is what the judge may ask for; its arguments are the message's."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}
        self._device = "cpu"
        self._last: Any = None
        self._module = ModuleType("none")

    def do_load(self, path: str, reference: str, name: str, device: str, part: bool) -> Message:
        """Execute a file, or the part that `Model` needs; return what the constructor takes, and whether as single numbers."""
        self._device = device
        self._module = load(path, f"kernelbench_{name}", _OF_THE_REFERENCE if part else None)
        self._class = getattr(self._module, name)
        if not hasattr(self._module, "get_init_inputs"):
            self._module = load(reference, "kernelbench_arguments")
        parameters = inspect.signature(self._class.__init__).parameters
        return {"parameters": {name: _is_scalar(parameter) for name, parameter in parameters.items()}}

    def do_inputs(self, seed: int) -> Message:
        _seed(seed)
        return self._hand_over(list(self._module.get_inputs()))

    def do_build(self, keywords: dict[str, Any] | None) -> Message:
        """Make the model of the file's arguments, or of these."""
        self._keywords = keywords
        self._model = self._built()
        return {}

    def _built(self) -> Any:
        _seed(_SEED)
        if self._keywords is None:
            model = self._class(*self._module.get_init_inputs())
        else:
            model = self._class(**{name: tuple(value) if isinstance(value, list) else value for name, value in self._keywords.items()})
        return model.to(self._device)

    def _copy(self) -> Any:
        """Return a copy of the model; of one that has what cannot be copied (a lock, a tensor with a graph) another with its state."""
        try:
            return copy.deepcopy(self._model)
        except Exception:
            model = self._built()
            model.load_state_dict(self._model.state_dict())
            return model

    def do_state(self) -> Message:
        return self._hand_over(dict(sorted(self._model.state_dict().items())))

    def do_set_state(self, tree: Message) -> Message:
        self._model.load_state_dict(unflatten(tree, self.memory["in"]), strict=True)
        return {}

    def do_call(
        self, tree: Message, seed: int, copied: bool = False, double: bool = False, fill: bool = False, own: bool = False
    ) -> Message:
        """Call the model, and hand over what its output holds when the call returns.

        Args:
            seed: of what the model draws itself.
            copied: call a copy of the model, so that its state stays.
            double: call a copy in fp64.
            fill: new memory is NaN.
            own: on copies of the inputs.
        """
        memory = self.memory["in"].to(self._device)  # it is there, or came through the host's memory
        inputs = unflatten(tree, memory)
        model = self._copy() if copied or double else self._model
        if double:
            model, inputs = model.double(), [t.double() if _is_real(t) else t for t in inputs]
        if own:
            inputs = [t.clone() if isinstance(t, torch.Tensor) else t for t in inputs]
        _ieee()
        _seed(seed)
        with torch.no_grad():
            if fill:
                _poison(self._device, self._last)
            with _filled() if fill else nullcontext():
                return self._hand_over(model(*inputs), memory)

    def do_again(self, after_s: float = 0.0) -> Message:
        """Hand over the same once more, as it is then."""
        time.sleep(after_s)
        return self._hand_over(self._last)

    def do_keep(self) -> Message:
        self._kept = self._last
        return {}

    def do_kept(self) -> Message:
        return self._hand_over(self._kept)

    def do_echo(self, tree: Message, seed: int) -> Message:
        """All of a call but the model's."""
        memory = self.memory["in"].to(self._device)
        unflatten(tree, memory)
        _ieee()
        _seed(seed)
        return self._hand_over(self._last, memory)

    def _hand_over(self, value: Any, inputs: torch.Tensor | None = None) -> Message:
        self._last = value
        tree, tensors = flatten(value)
        if size_of(tree) <= len(self.memory.get("out", ())):
            store(tensors, tree, self.memory["out"])
        if inputs is not None and inputs.device != self.memory["in"].device:
            self.memory["in"].copy_(inputs)  # what the model has done to them
        if self._device == "cuda":
            torch.cuda.synchronize()
        return {"tree": tree}


def load(path: str, name: str, only: Set[str] | None = None) -> ModuleType:
    """Execute a file as a module of that name, or only the statements that define some names and what these name in turn."""
    tree = ast.parse(Path(path).read_bytes(), path)
    if only is not None:
        tree.body = _needed(tree.body, only)
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # torch.compile and pickle look it up there
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.append(folder)  # at the end: no file beside it takes the place of a module of ours
    own = importlib.machinery.PathFinder.find_spec(Path(path).stem)
    if only is not None and own is not None and own.origin is not None and Path(own.origin).resolve() == Path(path).resolve():
        sys.modules[Path(path).stem] = None  # type: ignore[assignment]  # the rest of the file would run too
    exec(compile(tree, path, "exec"), module.__dict__)
    return module


_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)


def _needed(body: list[ast.stmt], names: Set[str]) -> list[ast.stmt]:
    """Return the imports, definitions and assignments that give these names a value, and those that they name in turn."""
    body = _split(body)
    defined = {statement.name for statement in body if isinstance(statement, _DEFINITIONS)}
    parts = {id(part): (part, around) for part, around in _parts(body) if _is_plain(part)}
    bound = {key: _bound(part) - (set() if isinstance(part, _DEFINITIONS) else defined) for key, (part, _) in parts.items()}
    wanted, kept = set(names), set()
    while more := {key for key in parts if key not in kept and ("*" in bound[key] or wanted & bound[key])}:
        kept |= more
        for part, around in map(parts.__getitem__, more):
            wanted |= _globals(symtable.symtable(ast.unparse(part), "<statement>", "exec"))
            wanted |= {node.id for one in around for node in _heading(one) if isinstance(node, ast.Name)}
    return _only(body, kept)


def _split(block: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements, their imports one name at a time."""
    found: list[ast.stmt] = []
    for statement in block:
        if isinstance(statement, _IMPORTS):
            for alias in statement.names:
                one = copy.copy(statement)
                one.names = [alias]
                found.append(one)
            continue
        for field, inner in _blocks(statement):
            setattr(statement, field, _split(inner))
        found.append(statement)
    return found


def _blocks(node: ast.AST) -> list[tuple[str, list[Any]]]:
    """Return the statements in an if, a with or a try, and its handlers."""
    if not isinstance(node, (ast.If, ast.With, ast.Try, ast.ExceptHandler)):
        return []
    return [(field, getattr(node, field)) for field in ("body", "handlers", "orelse", "finalbody") if getattr(node, field, None)]


def _parts(block: list[Any], around: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.stmt, tuple[ast.AST, ...]]]:
    """Yield the statements that can be kept without those beside them, each with what it is in."""
    for node in block:
        inner = _blocks(node)
        if not inner:
            yield node, around
        for _, statements in inner:
            yield from _parts(statements, (*around, node))


def _heading(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a compound statement but not in its blocks."""
    for field, value in ast.iter_fields(node):
        if field not in ("body", "orelse", "finalbody"):
            for one in value if isinstance(value, list) else [value]:
                yield from _heading(one) if isinstance(one, ast.ExceptHandler) else ast.walk(one) if isinstance(one, ast.AST) else ()


def _is_plain(statement: ast.stmt) -> bool:
    """Whether it only gives names of the module a value."""
    if isinstance(statement, (ast.For, ast.While)):
        inner = [*statement.body, *statement.orelse]
        return all(_is_plain(one) or isinstance(one, (ast.Pass, ast.Break, ast.Continue)) for one in inner)
    if isinstance(statement, _ASSIGNMENTS):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return not any(isinstance(node, (ast.Attribute, ast.Subscript)) for target in targets for node in ast.walk(target))
    return isinstance(statement, (*_DEFINITIONS, *_IMPORTS)) or type(statement).__name__ == "TypeAlias"  # which Python 3.12 brought


def _only(block: list[Any], kept: Set[int]) -> list[Any]:
    """Return the statements whose parts are kept, without the others."""
    found = []
    for node in block:
        if id(node) in kept:
            found.append(node)
        elif any(id(part) in kept for part, _ in _parts([node]) if _blocks(node)):
            for field, inner in _blocks(node):
                left = _only(inner, kept)
                setattr(node, field, left or [ast.copy_location(ast.Pass(), node)])
            found.append(node)
        elif isinstance(node, ast.ExceptHandler):
            node.body = [ast.copy_location(ast.Pass(), node)]
            found.append(node)
    return found


def _globals(table: symtable.SymbolTable) -> set[str]:
    """Return the names of the module that a statement reads, not the local ones of its functions."""
    top = table.get_type() == "module"
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and (top or symbol.is_global())}
    return names.union(*map(_globals, table.get_children()))


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module gives a value; "*" if that cannot be told."""
    names: set[str] = set()
    for node in [statement] if isinstance(statement, _DEFINITIONS) else ast.walk(statement):
        if isinstance(node, _DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
            names.add("*")
        elif isinstance(node, _IMPORTS):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _is_scalar(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    if annotation in (int, "int"):
        return True
    return annotation is inspect.Parameter.empty and isinstance(parameter.default, int)


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _ieee() -> None:
    """Set before every call, so that a file that changes it gains nothing."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def _seed(seed: int) -> None:
    """Seed torch's generators, and Python's and NumPy's global ones."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def _poison(device: str, last: Any) -> None:
    """Leave NaN in freed blocks of the last output's sizes, for allocators that do not obey torch's switch."""
    if device == "cpu":
        return
    for like in flatten(last)[1]:
        for _ in range(2 * like.is_floating_point()):
            torch.full_like(like, float("nan"))
        if cupy := sys.modules.get("cupy"):
            cupy.full(like.numel() * like.element_size() // 4, cupy.nan, cupy.float32)
    torch.cuda.synchronize()


@contextmanager
def _filled() -> Iterator[None]:
    """Make torch.empty, called from C++ too, fill its memory with NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._C._set_deterministic_algorithms(True, warn_only=True)  # the public function also imports the compiler, for seconds
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch._C._set_deterministic_algorithms(before[0])
            torch.utils.deterministic.fill_uninitialized_memory = before[1]
