"""`convt3d compile`: what "auto" takes for known calls is compiled before they are made, with or without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ... import architecture, cost
from ...backends.base import output_layout
from ...backends.nvrtc import compile_parts
from ...calls import Call
from ...choice import asked_of_kernels, automatic, given_to
from ...errors import BackendError
from ...kernel import Limits
from ...problem import Problem
from ...source import Instance
from ...tuning import Question
from ..progress import Progress
from ..threads import share


@dataclass(frozen=True)
class Gpu:
    """A card to compile for.

    Attributes:
        device, arch: as `Backend` has them.
        limits: shared memory, multiprocessors, clock and bandwidth.
    """

    device: str
    arch: str
    limits: Limits


@dataclass(frozen=True)
class Built:
    """What became of a call.

    Attributes:
        call: it.
        instance: what it takes; None where torch's operator takes it, or no kernel can.
        elapsed_s: of compiling, or of finding it in the cache; 0 where a call before has the instance.
        note: why there is no instance, or what the compiler said.
        failed: whether it could not be compiled.
    """

    call: Call
    instance: Instance | None = None
    elapsed_s: float = 0.0
    note: str = ""
    failed: bool = False

    def __str__(self) -> str:
        call = self.call
        asked = f"{call.problem} {call.pass_name} {call.precision} {call.layout}{' packed' * call.packed}"
        took = f" in {self.elapsed_s:.2f} s" if self.elapsed_s else ""
        return f"{asked}: {self.instance or 'torch'}{took}{self.note and ': '}{self.note}"


def gpu(name: str | None) -> Gpu:
    """Return the GPU of this machine, or the card of that name, or part of a name, among those whose costs are known.

    Raises:
        BackendError: there is no such card, or no GPU here.
    """
    from ...backends.cuda import CudaBackend, available

    cards = [known.card for known in cost.known().cards]
    known = ", ".join(card.device for card in cards)
    if name is None:
        if not available():
            raise BackendError(f"there is no GPU here to compile for; name a card: --device, one of {known}")
        here = CudaBackend()
        assert here.limits is not None
        return Gpu(here.device_name, here.arch, here.limits)
    found = [card for card in cards if name.lower() in card.device.lower()]
    if len(found) != 1:
        raise BackendError(f"--device {name}: must name one of {known}; for another card compile on a machine that has it")
    (card,) = found
    shared = architecture.shared_bytes(card.arch)
    return Gpu(card.device, card.arch, Limits(shared, card.multiprocessors, card.clock_hz, card.memory_bytes_per_s))


def compile_calls(
    calls: Iterable[Call], card: Gpu, workers: int, *, progress: Progress | None = None, tell: Callable[[str], None] = print
) -> list[Built]:
    """Compile into the cache what "auto" takes for each call; those that it leaves to torch's operator need nothing.

    Args:
        calls: on torch's CUDA tensors.
        card: where they will be made.
        workers: compilers at a time.
        progress: called with (instances done, instances in all, what is being done).
        tell: gets a line for each call.

    Raises:
        BackendError: CuPy or NVRTC is missing.
    """
    taken = [(call, *_taken(call, card)) for call in calls]
    wanted = list(dict.fromkeys(instance for _, instance, _ in taken if instance is not None))
    done: dict[Instance, tuple[float, str]] = {}

    def work(left: Iterable[Instance]) -> None:
        for instance in left:
            if progress is not None:
                progress(len(done), len(wanted), str(instance))
            start, said = time.perf_counter(), ""
            try:
                compile_parts(instance, card.arch)
            except BackendError as error:
                said = str(error)
            done[instance] = time.perf_counter() - start, said

    share(wanted, workers, work)
    built, seen = [], set()
    for call, instance, note in taken:
        elapsed_s, said = (0.0, "") if instance is None else done[instance]
        built.append(Built(call, instance, 0.0 if instance in seen else elapsed_s, note or said, bool(said)))
        seen.add(instance)
        tell(str(built[-1]))
    return built


def _taken(call: Call, card: Gpu) -> tuple[Instance | None, str]:
    question = Question(card.device, call.pass_name, call.precision, call.layout)
    problem = Problem.parse(call.problem)
    found = automatic(question, asked_of_kernels(problem, call.pass_name), call.packed, card.arch, card.limits).for_torch
    if found.kernel is None:
        return None, "; ".join(found.passed_over) or f"no {call.pass_name} kernel is registered"
    if found.left_to_torch is not None:
        return None, f"torch's own operator, {found.left_to_torch}"
    given = given_to(found.kernel, found.instance, problem, call.pass_name, card.arch, card.limits)
    plan = found.kernel.plan(given, found.instance, card.limits.multiprocessors, output_layout(given, call.layout))
    return Instance(found.kernel, found.instance, plan.specialization), ""  # all functions: for other volumes of the layer too
