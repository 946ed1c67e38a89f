"""The judge of `convt3d kernelbench`: looks for mistakes and cheats, and takes the times. No code of a file runs in this process.

The values of timed calls come of a seed that no one can know.
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable

import torch

from .match import Match
from .memory import size_of
from .player import Player, Values
from .rules import Output, Wrong, check_alike, judge, modified

SEEDS = 3
BUDGET_MS = 500.0
MOST_CALLS, LEAST_CALLS = 50, 3


def check_unwritten(match: Match, inputs: Values) -> None:
    """Memory that was never written: new memory is NaN, so whatever keeps it shows."""
    what = "with new memory filled with NaN"
    match.expect(inputs)
    found = match.candidate.call(inputs, fill=True)
    expected = match.reference.call(inputs, fill=True)
    found = check_alike(found, expected, what)
    for have, want in zip(found.tensors(), expected.tensors(), strict=True):
        if not have.dtype.is_floating_point:
            continue
        unwritten = have.double().isnan() & ~want.double().isnan()
        if bool(unwritten.any()):
            index = tuple(int(i) for i in unwritten.nonzero()[0])
            detail = f"{int(unwritten.sum())} of {unwritten.numel()} elements keep what was in memory before, the first at {index}"
            raise Wrong("output not fully written", detail)


def check_cached(match: Match, inputs: Values, seed: int) -> None:
    """An output kept from an earlier call, where only little is new: one element of the inputs, the parameters."""
    inputs = match.fresh(inputs, seed)
    match.compare(inputs, "fresh inputs")
    match.compare(match.nudged(inputs, seed), "inputs with one new element")
    if not (match.loads and match.state.tensors()):
        return
    match.compare(inputs, "fresh inputs again")
    state = match.state.clone()
    generator = torch.Generator(match.device).manual_seed(seed)
    for tensor in state.tensors():
        if tensor.is_floating_point() and tensor.numel():  # times 0.5 to 1.5: a variance stays positive
            tensor.mul_(torch.rand(tensor.shape, generator=generator, device=match.device).to(tensor.dtype) + 0.5)
    for player in (match.candidate, match.reference):
        player.set_state(state)
    match.compare(inputs, "new values in the parameters")


def check_kept(match: Match, inputs: Values, seed: int) -> None:
    """An output that the next call overwrites; one that is wrong may change for other reasons."""
    if match.report.findings:
        return
    if _overwrites(match, match.candidate, inputs, seed) and not _overwrites(match, match.reference, inputs, seed):
        raise Wrong("cached output", "the output of the first call is overwritten by the second: its memory is kept and used again")


def _overwrites(match: Match, player: Player, inputs: Values, seed: int) -> bool:
    size = player.output_size
    first = player.call(match.fresh(inputs, seed), own=True)
    player.ask("keep")
    player.call(match.fresh(inputs, seed + 1), own=True)
    kept = player.take("kept", size=size)
    return not torch.equal(kept.memory, first.memory)


def check_state(match: Match, inputs: Values) -> None:
    """State that a forward pass changes, and Model's does not."""
    if not match.loads:
        return
    size = size_of(match.state.tree)
    changed: dict[str, dict[str, int]] = {}
    after: dict[str, Output] = {}
    for player in (match.candidate, match.reference):
        player.set_state(match.state)
        player.call(inputs)
        state = after[player.name] = player.take("state", size=size)
        if state.tree != match.state.tree:  # ModelNew may keep its parameters in another type
            return
        changed[player.name] = match.state.differences(state.memory)
    if told := modified("the module's state", changed["ModelNew"], changed["Model"]):
        raise Wrong("inputs modified", f"{told} in a forward pass")
    try:
        judge(check_alike(after["ModelNew"], after["Model"], "state"), after["Model"], None, "state")
    except Wrong as wrong:
        match.report.note(f"after a call the state is not Model's: {wrong.detail}")


def take_times(match: Match, inputs: Values) -> None:
    """Take the times of calls in turn, each on new values, and compare each output."""
    echoes: list[float] = []
    models: list[float] = []
    news: list[float] = []
    first: Output | None = None
    constant = True
    more = secrets.randbelow(10)  # no file can count to the last call
    call = 0
    while call < LEAST_CALLS + more // 5 or (call < MOST_CALLS + more and sum(models) + sum(news) < 2 * BUDGET_MS):
        seed = secrets.randbits(62)
        values = match.fresh(inputs, seed)
        match.candidate.call(inputs, do="echo")  # so that both processes have just been awake; its time is not taken
        echo = match.reference.call(inputs, do="echo")
        found, expected = match.compare(values, f"timed call {call} (seed {seed})", timed=True)
        news.append(found.elapsed_ms)
        models.append(expected.elapsed_ms)
        echoes.append(echo.elapsed_ms)
        first = first or expected
        constant = constant and expected.same_bits(first)
        call += 1
    # What a candidate does beside the other's calls may slow them: the calls before its start count too.
    alone = match.alone_ms
    handing = min(statistics.median(echoes), alone["echo"])
    model = min(statistics.median(models), alone["call"])
    match.report.calls, match.report.handing_ms = call, handing
    if constant:
        match.report.note("Model's output is the same in all timed calls, so one that was kept would be right")
    match.report.times_ms = {"Model": max(model - handing, 0.0), "ModelNew": max(statistics.median(news) - handing, 0.0)}
    low, _, high = statistics.quantiles(echoes, n=4)
    if (least := min(match.report.times_ms.values())) < 3 * (high - low):
        match.report.note(
            f"{least:.3f} ms is little beside what handing the tensors over takes: {handing:.3f} ms, "
            f"half of all times within {high - low:.3f} ms"
        )
    for name, taken in (("Model", models), ("ModelNew", news)):
        low, _, high = statistics.quantiles(taken, n=4)
        if high > 2 * low:
            match.report.note(f"{name}'s times lie far apart, half of them between {low:.3f} and {high:.3f} ms: the ratio is no measure")


def take_times_alone(match: Match, inputs: Values) -> None:
    """Take Model's times before any of the candidate's code runs."""
    times: dict[str, list[float]] = {"call": [], "echo": []}
    while len(times["call"]) < LEAST_CALLS or (len(times["call"]) < 20 and sum(times["call"]) < BUDGET_MS / 2):
        values = match.fresh(inputs, secrets.randbits(62))
        for do, taken in times.items():
            taken.append(match.reference.call(values, do=do).elapsed_ms)
    match.alone_ms = {do: statistics.median(taken[1:]) for do, taken in times.items()}


def examine(match: Match, seed: int) -> None:
    """Look for every mistake and cheat on the file's own problem, then take the times of a candidate that has none."""
    report = match.report
    report.doing = "importing Model"
    try:
        match.start(match.reference)
        report.doing = "building Model"
        inputs = match.take_inputs(seed)
        match.reference.ask("build", keywords=None)
        match.learn(inputs, seed)
        report.doing = "timing Model"
        take_times_alone(match, inputs)
    except Wrong as wrong:
        if match.in_one_file and report.doing == "importing Model":  # the candidate's file cannot be read either
            raise
        how = f"{wrong.kind}: " if wrong.kind in ("crash", "hang") else ""
        raise Wrong("problem", how + wrong.detail, wrong.fatal) from None  # nothing of ModelNew has run
    report.doing = "importing the file"
    match.start(match.candidate)
    report.doing = "building ModelNew"
    match.build()
    checks: list[tuple[str, Callable[[], object]]] = [
        ("comparing on the file's inputs", lambda: match.compare(inputs, "the file's inputs")),
        *(
            ("comparing on fresh inputs", lambda number=number: match.compare(match.fresh(inputs, seed + 10 + number), "fresh inputs"))  # type: ignore[misc]
            for number in range(SEEDS)
        ),
        ("looking for memory that is not written", lambda: check_unwritten(match, inputs)),
        ("looking for cached outputs", lambda: check_cached(match, inputs, seed + 200)),
        ("looking for outputs that are overwritten", lambda: check_kept(match, inputs, seed + 300)),
        ("looking for changed state", lambda: check_state(match, match.fresh(inputs, seed + 1))),
        ("building ModelNew again", match.build),
    ]
    right = all([report.attempt(what, check) for what, check in checks])  # type: ignore[arg-type]
    if right:
        report.attempt("timing", lambda: take_times(match, inputs))
