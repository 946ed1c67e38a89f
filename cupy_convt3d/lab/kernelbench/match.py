"""`ModelNew` against `Model` in `convt3d kernelbench`: the two children, the values that they get, and one comparison.

For every call the candidate answers first, so that the reference's answer does not exist yet, and each call has values of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .memory import size_of
from .player import Player, Values
from .processes import Supervisor
from .rules import Output, Wrong, judge, modified

LATE_S = 0.3  # how long work that nobody waits for is given to show itself


class Report:
    """What was found so far."""

    def __init__(self) -> None:
        self.findings: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.times_ms: dict[str, float] = {}
        self.calls = self.fuzzed = 0
        self.doing = "starting"

    def attempt(self, what: str, check: Callable[[], None]) -> bool:
        """Run one check; whether it found nothing.

        Raises:
            Wrong: it has ended a child.
        """
        self.doing = what
        try:
            check()
            return True
        except Wrong as wrong:
            self.find(wrong)
            if wrong.fatal:
                raise
            return False

    def find(self, wrong: Wrong) -> None:
        if wrong.kind not in [kind for kind, _ in self.findings]:
            self.findings.append((wrong.kind, wrong.detail))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class Match:
    """`ModelNew` against `Model`, each in a child."""

    def __init__(self, report: Report, supervisor: Supervisor, files: tuple[Path, Path], device: str, deadline: float) -> None:
        self.report, self.device = report, device
        self._files = files
        self._truths = True  # Model runs in fp64
        self._shuffled = False  # fresh values are those of the file in another order
        self.loads = False  # ModelNew has Model's state
        self._asked_late = False  # whether a wrong result was looked at again, which takes a while
        self._baselines: list[float] = []
        self._earlier: tuple[Output, Output] | None = None
        self.reference, self.candidate = (
            Player(supervisor, name, device, deadline, lambda: report.doing) for name in ("Model", "ModelNew")
        )
        self.alone_ms: dict[str, float] = {}  # medians before the candidate was started
        self.parameters: dict[str, bool] = {}  # of Model's constructor, and whether each is a single number

    def close(self) -> None:
        for player in (self.reference, self.candidate):
            player.close()

    def start(self, player: Player) -> None:
        """Start a child, again where one has gone, and have it execute its file."""
        player.start()
        reference, candidate = (str(path.resolve()) for path in self._files)
        of_model = player is self.reference
        loaded = player.ask(
            "load",
            path=reference if of_model else candidate,
            reference=reference,
            name=player.name,
            device=self.device,
            part=of_model and reference == candidate,
        )
        if of_model:
            self.parameters = loaded["parameters"]
            self._choose_memory()

    def _choose_memory(self) -> None:
        """Share memory of the GPU, or where that cannot be done the host's."""
        if self.device == "cpu":
            return
        try:
            self.reference.map("probe", 1)
        except (Wrong, RuntimeError) as error:
            if isinstance(error, Wrong) and error.fatal:
                raise
            self.reference.memory_device = self.candidate.memory_device = "cpu"
            self.report.note(f"no CUDA IPC, so tensors go through the host's memory and times are coarse ({str(error)[:200]})")

    def take_inputs(self, seed: int) -> Values:
        """Return the file's own inputs."""
        taken = self.reference.take("inputs", seed=seed)
        return Values(taken.tree, taken.memory)

    def build(self, keywords: dict[str, Any] | None = None) -> None:
        """Make both models of the file's arguments or of these, with the same state."""
        self.reference.ask("build", keywords=keywords)
        self.candidate.ask("build", keywords=keywords)
        self._earlier = None
        if keywords is not None:
            self._baselines, self.candidate.output_size = [], None
        state = self.reference.take("state")
        self.state = Values(state.tree, state.memory)
        self.loads = True
        try:
            self.candidate.set_state(self.state)
        except Wrong as wrong:
            if wrong.kind != "error":
                raise
            self.loads = False
            reason = wrong.detail.partition(": ")[2][:200]
            self.report.note(f"ModelNew does not load Model's state_dict; compared as both were initialised from one seed ({reason})")

    def learn(self, inputs: Values, seed: int) -> None:
        """See how Model behaves: how large its output is, whether it draws random numbers, whether it takes any values."""
        first = self.reference.call(inputs, copied=True)
        other = self.reference.call(inputs, copied=True, seed=1)
        try:
            if not other.same_bits(first):
                judge(other, first, None, "another seed")
        except Wrong:
            self._truths = False
            self.report.note("Model draws random numbers: ModelNew must draw the same ones from torch's generator, seeded before each call")
        drawn = self.reference.call(self.fresh(inputs, seed), copied=True)
        self._shuffled = first.is_finite() and not drawn.is_finite()

    def fresh(self, inputs: Values, seed: int) -> Values:
        """Return other values of the same shapes: standard normal ones, or where that makes no sense the same ones in another order."""
        fresh = inputs.clone()
        generator = torch.Generator(self.device).manual_seed(seed)
        for tensor in fresh.tensors():
            if tensor.is_floating_point() and not self._shuffled:
                draw_type = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=draw_type, device=self.device))
            elif tensor.numel():
                order = torch.randperm(tensor.numel(), generator=generator, device=self.device)
                tensor.copy_(tensor.reshape(-1)[order].view(tensor.shape))
        return fresh

    def nudged(self, inputs: Values, seed: int) -> Values:
        """Return the same values but for one element of each tensor, which becomes large."""
        nudged = inputs.clone()
        generator = torch.Generator().manual_seed(seed)
        for tensor in nudged.tensors():
            if tensor.is_floating_point() and tensor.numel():
                index = int(torch.randint(tensor.numel(), (), generator=generator))
                tensor.view(-1)[index] = tensor.float().abs().max() * (1 if self._shuffled else 8)
        return nudged

    def compare(self, inputs: Values, what: str, *, seed: int = 0, timed: bool = False) -> tuple[Output, Output]:
        """Call both, and raise Wrong unless the candidate is as near to the truth as the baseline, and has changed no input."""
        self.expect(inputs)
        found = self.candidate.call(inputs, seed=seed)
        truth = None if timed else self._truth(inputs, seed)
        expected = self.reference.call(inputs, seed=seed)
        try:
            baselines = judge(found, expected, truth, what, self._baselines if timed else None)
        except Wrong as wrong:
            raise self._named(wrong, found, expected) from None
        if not timed:
            self._baselines = [max(pair) for pair in zip(baselines, self._baselines or baselines, strict=True)]
        self._earlier = found, expected
        if told := modified("input", found.changed_inputs, expected.changed_inputs):
            raise Wrong("inputs modified", f"{what}: {told}")
        return found, expected

    def expect(self, inputs: Values) -> None:
        """Let the candidate's output take what the reference's takes, which a call of other inputs has shown."""
        if self.candidate.output_size is None:
            self.candidate.output_size = size_of(self.reference.call(inputs, copied=True).tree)

    def _truth(self, inputs: Values, seed: int) -> Output | None:
        """Return what a copy of Model in fp64 gives, before the call that may change Model's state."""
        if not self._truths:
            return None
        try:
            return self.reference.call(inputs, seed=seed, double=True)
        except Wrong as wrong:
            if wrong.fatal:
                raise
            self._truths = False
            self.report.note(f"Model does not run in fp64, so its own result is the truth ({wrong.detail[:200]})")
            return None

    def _named(self, wrong: Wrong, found: Output, expected: Output) -> Wrong:
        """Return the finding by the name of its cause, where that can be told."""
        if wrong.kind != "wrong result" or found.tree != expected.tree:
            return wrong
        if self._earlier and found.is_near(self._earlier[0]) and not expected.is_near(self._earlier[1]):
            return Wrong("cached output", f"{wrong.detail} (it is the output before)")
        if self._asked_late:
            return wrong
        self._asked_late = True
        later = self.candidate.take("again", size=self.candidate.output_size, after_s=LATE_S)
        if later.tree == found.tree and not later.same_bits(found):
            return Wrong("unjoined work", f"{wrong.detail} (it changed after the call: a side stream or thread that is not waited for)")
        return wrong
