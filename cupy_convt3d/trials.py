"""First-call trials: under `torch.backends.cudnn.benchmark = True` torch's tensors of a problem that was not measured yet are given to
the most promising kernels and to torch's own operator, and the quickest of them computes such calls from then on.

What was measured goes into the user's tuning database, with the versions of torch and cuDNN, so another process tries nothing. A trial
takes a bounded time and memory, its results are thrown away, and there is none while a CUDA graph is captured, in a trace (which has no
memory to try on), or where the process asks for deterministic algorithms. `no_trials` and `CONVT3D_TRIALS=0` switch them off.

Each kernel's result is held against that of torch's operator, so none that is grossly wrong is taken.
"""

from __future__ import annotations

import statistics
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from . import registry, tuning
from .choice import Choice, Trial
from .errors import BackendError, KernelError, LaunchError
from .limits import cores
from .packs import PackedWeight
from .source import code_digest
from .switches import TRIALS
from .tuning import LIBRARY, Entry

Key = TypeVar("Key")
Clock = Callable[[Callable[[], object]], float]  # runs a call and returns the milliseconds that it took

MOST_ROUNDS, MOST_MS = 9, 100.0  # a trial's timed calls: so many of each contestant, and no further round once all took so long
HOPELESS = 1.3  # times the quickest: what was slower in each of two rounds and more is timed no more
MEMORY_SHARE = 0.5  # of what is free, that a contestant may take
# Before each timed call, of twice the L2 cache: an H100 takes 40 us for one, and the host queues the call meanwhile. Where it did not
# (a busy host, a call of many launches), the GPU waited, and the call is timed again behind twice as many, up to the most.
WRITES, MOST_WRITES = 4, 64

# A result is wrong where it differs from that of torch's operator by so much of the largest value: far more than rounding, in any type.
WRONG = 0.1
COMPARED = 1 << 18  # elements of a result, spread over all of it

_LOCK = threading.Lock()  # two trials would time each other


class Plan(Protocol):
    """What a contestant's calls are made by: a `torch_plan.PassPlan`."""

    packs: bool  # whether it can keep a packed weight
    memory_bytes: int

    def __call__(self, first: Any, second: Any, bias: Any = None, packed: PackedWeight | None = None) -> Any: ...


P = TypeVar("P", bound=Plan)


@contextmanager
def no_trials() -> Iterator[None]:
    """Within this context, in all threads of the process, no first call is timed: "auto" goes by the database and by predictions alone.

    `CONVT3D_TRIALS=0` in the environment does so for the whole process.
    """
    try:
        with TRIALS.off():
            yield
    finally:
        registry.revise()  # what was decided within is decided anew


def may_be_held(tensor: Any) -> bool:
    """Whether the process wants trials, and one with this torch tensor disturbs nothing."""
    torch = sys.modules["torch"]
    cudnn = torch.backends.cudnn
    return bool(
        tensor.is_cuda
        and cudnn.benchmark
        and cudnn.enabled
        and not cudnn.deterministic
        and not torch.are_deterministic_algorithms_enabled()
        and not TRIALS.is_off
        and not torch.cuda.is_current_stream_capturing()
    )


def hold(
    trial: Trial,
    planned: Callable[[Choice], P],
    build: Callable[[Choice], object],
    operands: tuple[Any, Any, Any],
    *,
    packed: bool,
    margin_ms: float = 0.0,
) -> P | None:
    """Time a trial's contestants and return the quickest one's plan; None where there was nothing to compare.

    Args:
        planned: makes a contestant's plan.
        build: fills the cache of compiled kernels with what that plan takes of one.
        operands: the call's tensors; the last is the bias, or None.
        packed: whether the packed weight is kept, so that packing is not in the time.
        margin_ms: what a kernel has to save to be taken in place of torch's operator.
    """
    torch = sys.modules["torch"]
    device = operands[0].device
    try:
        with _LOCK, torch.no_grad(), _building(trial.contestants, build) as wait_for:
            clock = _event_clock(device)
            plans, calls, wrong = _able(trial, planned, operands, _free_bytes(device) * MEMORY_SHARE, wait_for)
            if len(plans) + wrong < 2 or all(contestant.kernel is not None for contestant in plans):
                return None
            judged = {contestant: (contestant, packed and plan.packs) for contestant, plan in plans.items()}
            times = timed(calls, clock, judged.values())
    except torch.OutOfMemoryError:  # of what is not a contestant's own, or somebody else has taken the memory meanwhile
        return None
    tuning.remember(_entries(trial, times, packed))
    return plans[min(plans, key=lambda contestant: times[judged[contestant]] + (margin_ms if contestant.kernel is not None else 0.0))]


def _able(
    trial: Trial,
    planned: Callable[[Choice], P],
    operands: tuple[Any, Any, Any],
    room: float,
    wait_for: Callable[[Choice], object],
) -> tuple[dict[Choice, P], dict[tuple[Choice, bool], Callable[[], object]], int]:
    """Return the plans of the contestants that do not fail in a first run, their calls, without and with a packed weight kept, and how
    many were wrong.

    Args:
        room: bytes that a contestant may take.
        wait_for: returns when a contestant can be run.
    """
    torch = sys.modules["torch"]
    plans: dict[Choice, P] = {}
    calls: dict[tuple[Choice, bool], Callable[[], object]] = {}
    wanted, wrong = None, 0  # some of what torch's operator, the first contestant, computes
    for contestant in trial.contestants:
        wait_for(contestant)
        with suppress(KernelError, BackendError, LaunchError, torch.OutOfMemoryError):
            plan = planned(contestant)
            if plan.memory_bytes > room:
                continue
            ways = {False: partial(plan, *operands)}
            if plan.packs:
                ways[True] = partial(plan, *operands, PackedWeight())
            results = [_sample(way()) for way in ways.values()]
            if contestant.kernel is None:
                wanted = results[0]
            elif wanted is not None and (far := max(_distance(result, wanted) for result in results)) > WRONG:
                wrong += 1
                name = contestant.kernel.name
                warnings.warn(
                    f"{name} [{contestant.instance}] on {trial.problem}: its result differs from that of torch's operator by {far:.2g} of "
                    f"the largest value, so it is not taken; `convt3d check {name}` tells more",
                    RuntimeWarning,
                    stacklevel=2,
                )
                continue
            plans[contestant] = plan
            calls |= {(contestant, kept): way for kept, way in ways.items()}
    return plans, calls, wrong


def _sample(result: Any) -> Any:
    """Return elements spread over a result's memory, which is then filled with NaN: the next result may get it, and leave it as it is."""
    flat = result.as_strided((result.numel(),), (1,))  # results are dense, and all of one trial have the same strides
    sample = flat[:: max(1, flat.numel() // COMPARED) | 1].clone()
    flat.fill_(float("nan"))
    return sample


def _distance(result: Any, wanted: Any) -> float:
    """Return the largest difference where what is wanted is finite, over the largest value there; infinite where the result is not."""
    wanted = wanted.double()
    known = wanted.isfinite()
    off, largest = (result.double() - wanted)[known].abs(), float(wanted[known].abs().max()) if known.any() else 0.0
    if not len(off) or not off.any():
        return 0.0
    return float((off / largest).nan_to_num(float("inf")).max()) if largest else float("inf")


def timed(calls: Mapping[Key, Callable[[], object]], clock: Clock, judged: Iterable[Key]) -> dict[Key, float]:
    """Return the median milliseconds of each call, all of them taken in turn; those that fall behind the best `judged` one drop out."""
    times: dict[Key, list[float]] = {key: [] for key in calls}
    judged, left, spent = set(judged), list(calls), 0.0
    for number in range(MOST_ROUNDS):
        for key in left:
            times[key].append(clock(calls[key]))
            spent += times[key][-1]
        best = min(statistics.median(times[key]) for key in judged)
        if number:  # one time alone may be a hiccup's
            left = [key for key in left if min(times[key]) <= HOPELESS * best]
        if spent > MOST_MS or len(left) == 1:
            break
    return {key: statistics.median(taken) for key, taken in times.items()}


def _entries(trial: Trial, times: Mapping[tuple[Choice, bool], float], packed: bool) -> list[Entry]:
    """Return what was measured of each kernel, in the quicker of its configurations."""
    device, pass_name, precision, layout = trial.question
    entries: list[Entry] = []
    for (contestant, kept), ms in times.items():
        if kept:
            continue
        kernel = contestant.kernel
        which = (LIBRARY, "", precision) if kernel is None else (kernel.name, code_digest(kernel), contestant.instance)
        tunables = {} if kernel is None else {name: value for name, value in kernel.tunables.items() if name in kernel.search}
        both = (times.get((contestant, True), ms), ms)
        entries.append(Entry(device, pass_name, str(trial.problem), precision, layout, *which, tunables, *both, tuning.versions()))
    slowest_first = sorted(entries, key=lambda entry: entry.milliseconds(packed), reverse=True)
    return list({entry.kernel: entry for entry in slowest_first}.values())


@contextmanager
def _building(contestants: Sequence[Choice], build: Callable[[Choice], object]) -> Iterator[Callable[[Choice], object]]:
    """Fill the cache of compiled kernels with the contestants, side by side; what cannot be compiled is left for its own turn to say.

    What is given waits until a contestant can be run: a kernel when it has been compiled, torch's operator at once, so that its search
    of algorithms is made meanwhile. Where the compilers leave no core free, which would disturb that search, it waits for all of them.
    """

    def attempt(choice: Choice) -> None:
        with suppress(KernelError, BackendError):
            build(choice)

    kernels = [choice for choice in contestants if choice.kernel is not None]
    with ThreadPoolExecutor(len(kernels)) as pool:
        builds = {choice: pool.submit(attempt, choice) for choice in kernels}
        ahead = [] if cores() > len(kernels) else [*builds.values()]
        yield lambda choice: wait([builds[choice]] if choice in builds else ahead)


def _event_clock(device: Any) -> Clock:
    """Return a clock of CUDA events on the current stream. Before each call writes fill the L2 cache, so that operands come from
    memory, and keep the GPU busy until the host has queued the call: what is timed is the GPU's part alone. Before these the call runs
    once uncounted: behind another's, some calls of torch's took 1.16 times as long as behind their own."""
    torch = sys.modules["torch"]
    flush = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.uint8, device=device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    writes = WRITES

    def clock(call: Callable[[], object]) -> float:
        nonlocal writes
        with torch.cuda.device(device):
            call()
            while True:
                for _ in range(writes):
                    flush.zero_()
                start.record()
                call()
                end.record()
                waited = start.query()  # the GPU has begun before the host was through
                end.synchronize()
                if not waited or writes >= MOST_WRITES:
                    return max(float(start.elapsed_time(end)), tuning.SHORTEST_MS)
                writes *= 2

    return clock


def _free_bytes(device: Any) -> float:
    """Return what torch could still allocate on a device; no limit on a CPU."""
    torch = sys.modules["torch"]
    if device.type != "cuda":
        return float("inf")
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(torch.cuda.mem_get_info(device)[0] + kept)
