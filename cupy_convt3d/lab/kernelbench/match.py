"""`ModelNew` against `Model` in `convt3d kernelbench`: the two children, the values that they get, and one comparison.

For every call the candidate answers first, so that the reference's answer does not exist yet, and each call has values of its own.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .memory import size_of
from .player import Player, Values
from .processes import Supervisor
from .rules import ERROR_RATIO, Output, Wrong, check_alike, judge, modified

LATE_S = 0.3  # how long work that nobody waits for is given to show itself
_SHAKES = 8
_SAME, _REORDERED = "the file's", "the file's in another order"
_FLOATS = ("normal ones", "between the file's", _REORDERED, _SAME)  # what fresh inputs may be, the first that Model takes
_INTEGERS = ("any between the file's", _REORDERED, _SAME)


class Report:
    """What was found so far."""

    def __init__(self) -> None:
        self.findings: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.times_ms: dict[str, float] = {}
        self.calls = self.fuzzed = 0
        self.handing_ms = 0.0
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
        self._reference_file, self._candidate_file = (path.resolve() for path in files)
        self.in_one_file = self._reference_file == self._candidate_file
        self._truths = True  # Model runs in fp64
        self._floats, self._integers = _FLOATS[0], _INTEGERS[0]  # what fresh values are
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
        of_model = player is self.reference
        loaded = player.ask(
            "load",
            path=str(self._reference_file if of_model else self._candidate_file),
            reference=str(self._reference_file),
            name=player.name,
            device=self.device,
            part=of_model and self.in_one_file,
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
                judge(check_alike(other, first, "another seed"), first, None, "another seed")
        except Wrong:
            self._truths = False
            self.report.note(
                "Model draws random numbers: ModelNew must draw the same ones, "
                "from the generators that are seeded before each call (torch's, Python's and NumPy's)"
            )
        for self._floats, self._integers in itertools.product(_FLOATS, _INTEGERS):
            try:
                if self.reference.call(self.fresh(inputs, seed), copied=True).is_finite() or not first.is_finite():
                    break
            except Wrong as wrong:
                if wrong.kind == "hang":
                    raise
                self.start(self.reference)  # an index out of bounds leaves a GPU's process unusable
                self.reference.ask("build", keywords=None)
        if {self._floats, self._integers} & {_REORDERED, _SAME}:
            self.report.note(f"fresh floats are {self._floats}, fresh integers {self._integers}: Model fails or is not finite for others")

    def fresh(self, inputs: Values, seed: int) -> Values:
        """Return other values of the same shapes: standard normal ones, or where Model does not take these, more like the file's."""
        fresh = inputs.clone()
        generator = torch.Generator(self.device).manual_seed(seed)
        for tensor in filter(torch.Tensor.numel, fresh.tensors()):
            values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            values.copy_((self._fresh_floats if values.is_floating_point() else self._fresh_integers)(values, generator))
        return fresh

    def _fresh_floats(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        draw_type = values.dtype if values.dtype == torch.float64 else torch.float32
        if self._floats in (_REORDERED, _SAME):
            return _reordered(values, generator) if self._floats == _REORDERED else values
        if self._floats == _FLOATS[0]:
            return torch.randn(values.shape, generator=generator, dtype=draw_type, device=self.device)
        picks = torch.randint(values.numel(), (2, values.numel()), generator=generator, device=self.device)
        one, other = values.reshape(-1).to(draw_type)[picks]
        part = torch.rand(one.shape, generator=generator, dtype=draw_type, device=self.device)
        between = one + (other - one) * part
        return torch.where(between.isfinite(), between, one).view(values.shape)

    def _fresh_integers(self, values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        if self._integers in (_REORDERED, _SAME):
            return _reordered(values, generator) if self._integers == _REORDERED else values
        low, high = (int(bound) for bound in values.long().aminmax())
        end = min(high, torch.iinfo(torch.int64).max - 1) + 1
        return torch.randint(low, end, values.shape, generator=generator, device=self.device)

    def nudged(self, inputs: Values, seed: int) -> Values:
        """Return the same values but for one element of each tensor: a float becomes large, an integer another of the file's range."""
        nudged = inputs.clone()
        generator = torch.Generator().manual_seed(seed)
        for tensor in filter(torch.Tensor.numel, nudged.tensors()):
            index = int(torch.randint(tensor.numel(), (), generator=generator))
            flat = tensor.view(-1)
            if tensor.is_floating_point() and self._floats != _SAME:
                flat[index] = tensor.float().abs().max() * (8 if self._floats == _FLOATS[0] else 1)
            elif not tensor.is_floating_point() and not tensor.is_complex() and self._integers == _INTEGERS[0]:
                low, high = tensor.long().aminmax()
                flat[index] = low if flat[index].long() == high else high
        return nudged

    def shaken(self, inputs: Values, number: int) -> Values:
        """Return floats that are off by as much as `ERROR_RATIO` times their rounding: of two draws the second is the first's opposite.

        What is as near to a border as rounding is off crosses it in one of the two.
        """
        shaken = inputs.clone()
        generator = torch.Generator(self.device).manual_seed(number // 2)
        sign = 1 - 2 * (number % 2)
        for tensor in filter(torch.Tensor.is_floating_point, shaken.tensors()):
            part = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device=self.device) * 2 - 1
            tensor.copy_(tensor.double() * (1 + sign * part * min(ERROR_RATIO * torch.finfo(tensor.dtype).eps, 1 / 8)))
        return shaken

    def compare(self, inputs: Values, what: str, *, timed: bool = False) -> tuple[Output, Output]:
        """Call both, and raise Wrong unless the candidate is as near to the truth as the baseline, and has changed no input."""
        self.expect(inputs)
        seed = secrets.randbits(62)  # of what the models draw: another for each call, so that no draw can be kept
        found = self.candidate.call(inputs, seed=seed)
        truth = None if timed else self._truth(inputs, seed)
        expected = self.reference.call(inputs, seed=seed)
        if (size := size_of(expected.tree)) > len(found.memory):  # it depends on the values, and these have been seen now
            self.candidate.output_size = size
            return self.compare(self.fresh(inputs, secrets.randbits(62)), what, timed=timed)
        found = check_alike(found, expected, what)
        try:
            baselines = judge(found, expected, truth, what, self._baselines if timed else None)
            if not timed:
                self._baselines = [max(pair) for pair in zip(baselines, self._baselines or baselines, strict=True)]
        except Wrong as wrong:
            if not self._is_rounding(found, expected, inputs, truth, seed):
                raise self._named(wrong, found, expected) from None
        self._earlier = found, expected
        if told := modified("input", found.changed_inputs, expected.changed_inputs):
            raise Wrong("inputs modified", f"{what}: {told}")
        return found, expected

    def _is_rounding(self, found: Output, expected: Output, inputs: Values, truth: Output | None, seed: int) -> bool:
        """Whether what seems wrong is no more than rounding does for these values: a sum near 0, a sign, the order of equals.

        How far Model itself is off may be little by chance; so it is also computed, in fp64, for inputs that are slightly off,
        some in one draw and some in another.
        """
        if self.report.findings or (truth := truth or self._truth(inputs, seed)) is None:
            return False
        if not self.reference.call(inputs, seed=seed, copied=True).is_near(expected):  # it has a state, which is another now
            return False
        shaken: list[Output] = []
        for number in range(-1, _SHAKES):
            try:
                if number >= 0:
                    shaken.append(self.reference.call(self.shaken(inputs, number), seed=seed, double=True))
                judge(found, expected, truth, "", shaken=shaken)
                return True
            except Wrong as wrong:
                if wrong.fatal:
                    raise
        return False

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
        if wrong.kind != "wrong result":
            return wrong
        if self._earlier and found.is_near(self._earlier[0]) and not expected.is_near(self._earlier[1]):
            return Wrong("cached output", f"{wrong.detail} (it is the output before)")
        if self._asked_late:
            return wrong
        self._asked_late = True
        later = self.candidate.take("again", size=self.candidate.output_size, after_s=LATE_S)
        if later.tree == found.tree and not torch.equal(later.memory, found.memory):
            return Wrong("unjoined work", f"{wrong.detail} (it changed after the call: a side stream or thread that is not waited for)")
        return wrong


def _reordered(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    order = torch.randperm(values.numel(), generator=generator, device=values.device)
    return values.reshape(-1)[order].view(values.shape)
