"""The judge's side of one child: what it is asked, the memory shared with it, and the clock.

The clock starts before the judge writes a call's inputs where the child sees them, and stops when the judge has copied the output to
memory of its own. So whatever a file's code changes in its process, work that it puts off or does beforehand is no gain: values that
it has not seen come in, and what is not there when they are copied out never comes.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from ...errors import printable
from .channel import Broken, Gone, Late, Message
from .memory import Region, Tree, leaves, size_of, view
from .processes import Child, Supervisor
from .rules import Output, Wrong


class Values:
    """A tree of inputs or of a state, and its tensors in memory of the judge's own."""

    def __init__(self, tree: Tree, memory: torch.Tensor) -> None:
        self.tree, self.memory = tree, memory

    def clone(self) -> Values:
        return Values(self.tree, self.memory.clone())

    def tensors(self) -> list[torch.Tensor]:
        """Those that may get other values: floats of Python are arguments such as a rate or an epsilon."""
        return [view(self.memory, leaf) for _, leaf in leaves(self.tree) if leaf["type"] != "float"]

    def differences(self, other: torch.Tensor) -> dict[str, int]:
        """Return how many elements of which tensors have other bits in another memory."""
        if torch.equal(self.memory, other):
            return {}
        found = {}
        for name, leaf in leaves(self.tree):
            if math.prod(leaf["shape"]):
                bits = [view(memory, leaf).reshape(-1, 1).view(torch.uint8) for memory in (self.memory, other)]
                found[name] = int((bits[0] != bits[1]).any(-1).sum())
        return {name: count for name, count in found.items() if count}


class Player:
    """A child that has a `Model` or a `ModelNew`.

    Attributes:
        memory_device: where the shared memory lies.
        alive: whether the child is there, as far as is known.
        output_size: how many bytes a call's output takes, as the reference's does; None for the reference, which takes what it needs.
    """

    def __init__(self, supervisor: Supervisor, name: str, device: str, deadline: float, doing: Callable[[], str]) -> None:
        self.name, self.device, self.memory_device = name, device, device
        self.output_size: int | None = None
        self.alive = False
        self._supervisor, self._deadline, self._doing = supervisor, deadline, doing
        self._numbers = itertools.count()
        self._regions: dict[str, Region] = {}

    def start(self) -> None:
        """Start the child, a new one where it has gone."""
        self.close()
        self._child: Child = self._supervisor.fork()
        self.alive = True

    def close(self) -> None:
        for region in self._regions.values():
            region.close()
        self._regions.clear()

    def ask(self, do: str, **arguments: Any) -> Message:
        """Return the child's answer.

        Raises:
            Wrong: the model raised, or the child crashed, hung or broke the talk.
        """
        number = next(self._numbers)
        try:
            self._child.channel.send({"do": do, "number": number, **arguments}, deadline=self._deadline)
            return self._answer(number)
        except (Gone, Late, Broken) as error:
            raise self._lost(error) from None

    def _answer(self, number: int) -> Message:
        reply = self._child.channel.receive(self._deadline)
        if reply.get("number") != number:
            raise Broken(f"answer {printable(str(reply.get('number')), 20)} to question {number}")
        if "error" in reply:
            kind = "problem" if reply.get("unfit") is True and self.name == "Model" else "error"  # what Model has is no fault of ModelNew
            raise Wrong(kind, f"{self.name} while {self._doing()}: {printable(str(reply['error']), 600)}")
        return reply

    def _lost(self, error: Exception) -> Wrong:
        self.alive = False
        if isinstance(error, Late):
            return Wrong("hang", f"{self.name} killed while {self._doing()}", fatal=True)
        if isinstance(error, Broken):
            return Wrong("crash", f"{self.name} breaks the talk with the judge while {self._doing()}: {error}", fatal=True)
        how = self._supervisor.status(self._child)
        log = "\n".join(["", *(printable(line, 400) for line in self._child.channel.drain().strip().splitlines()[-8:])])
        return Wrong("crash", f"{self.name}: {how} while {self._doing()}{log}", fatal=True)

    def map(self, name: str, size: int) -> None:
        """Have at least so much memory in common."""
        if name in self._regions and len(self._regions[name].bytes) >= size:
            return
        region = Region(size, self.memory_device)
        number = next(self._numbers)
        try:
            region.send(self._child.channel, name, number, self._deadline)
            self._answer(number)
        except (Gone, Late, Broken) as error:
            region.close()
            raise self._lost(error) from None
        if name in self._regions:
            self._regions[name].close()
        self._regions[name] = region

    def take(self, do: str, size: int | None = None, **arguments: Any) -> Output:
        """Ask for a value, of another size than a call's output."""
        return self._timed(None, do, arguments, size)

    def call(self, inputs: Values, *, do: str = "call", seed: int = 0, **how: bool) -> Output:
        """Have the model called, and take the time."""
        self.map("in", len(inputs.memory))
        return self._timed(inputs, do, {"tree": inputs.tree, "seed": seed, **how}, self.output_size)

    def set_state(self, state: Values) -> None:
        self.map("in", len(state.memory))
        self._regions["in"].bytes[: len(state.memory)].copy_(state.memory)
        self._synchronize()
        self.ask("set_state", tree=state.tree)

    def _timed(self, inputs: Values | None, do: str, arguments: Message, size: int | None) -> Output:
        self.map("out", size or 1)
        self._regions["out"].bytes.fill_(255)  # NaN: what is not written is seen
        self._synchronize()
        start = time.perf_counter()
        if inputs is not None:
            self._regions["in"].bytes[: len(inputs.memory)].copy_(inputs.memory)
            self._synchronize()
        tree = self.ask(do, **arguments).get("tree", {})
        if size is None:
            size = size_of(tree)
            if size > len(self._regions["out"].bytes):
                self.map("out", size)
                tree = self.ask("again")["tree"]
        memory = self._regions["out"].bytes[:size].to(self.device, copy=True)
        self._synchronize()
        elapsed_ms = (time.perf_counter() - start) * 1e3
        changed: dict[str, int] = {}
        if inputs is not None:
            changed = inputs.differences(self._regions["in"].bytes[: len(inputs.memory)].to(self.device))
        return Output(tree, memory, elapsed_ms, changed)

    def _synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
