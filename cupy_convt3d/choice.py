"""Who computes a call: the backend, and with `algorithm="auto"` the kernel, its configuration and the dtype it is compiled for.

"auto" takes what `convt3d tune` found quickest for this very problem on this device, else on another card of its architecture. Where
nothing was measured it takes what is predicted to be the quickest (`cost`), in the loosest arithmetic allowed. What spreads NaN
(`Kernel.spreads_nan`) is not taken, since torch's operator does not. torch's CUDA tensors, for which torch has an operator of its own,
go to a kernel only where it was measured to be the quicker, or is predicted to be so against a quick call of that operator; under
`cudnn.benchmark` a trial at the first call measures it (`trials`). `convt3d info --why` shows these steps.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from . import calls, cost, registry, tuning
from .arrays import Array, require_cupy
from .backends.base import Backend
from .dtypes import DTYPES, allowed_instances
from .errors import BackendError, KernelError, ProblemError, ProblemTypeError, shown
from .kernel import Kernel, Limits
from .problem import Problem
from .tuning import Question, Tuned

BACKENDS = ("cuda", "host", "torch")
FP32_PRECISIONS = {"tf32": "tf32", "tf32x3": "tf32x3", "ieee": "fp32"}  # each with its instance, from loosest to strictest

# On a CPU, and where no costs are known: the first of these that can do the problem. The last takes every problem.
ORDER = {
    "fprop": ("fprop_patch", "fprop_implicit_gemm_simt", "fprop_tiled", "fprop_residue", "fprop_gather"),
    "dgrad": ("dgrad_gather",),
    "wgrad": ("wgrad_reduce",),
}

# What costs its launch and little more on a GPU: 2**22 FLOP take the slowest plain kernel 14 us on an H100 (0.3 TFLOP/s), 1 MiB lies in
# the L2 cache, and a sum may be one thread's work, up to so many products (208 took it 50 us on an H200). Such a problem gets a kernel
# that packs nothing and is not compiled anew for each geometry, so the first call is quick too. torch's tensors go to torch's operator: a
# call of a tiny layer costs the host 33 us by torch's module and 46 by our kernel there, with the gradients 264 and 427. wgrad is not
# among them: its kernel is two launches, and on an H100 took 20 us where cuDNN took 10.
# On a CPU each thread of a block that meets a barrier gets a stack of its own; up to HOST_BOUND_FLOP a plain kernel, which has none, is
# through before that.
LAUNCH_BOUND_FLOP, LAUNCH_BOUND_BYTES, LAUNCH_BOUND_PRODUCTS = 2**22, 2**20, 2**7
HOST_BOUND_FLOP = 2**18
# What a first-call trial is worth: so many configurations, of those predicted to take no more than so many times what the best of them,
# or torch's operator, is predicted to take. Predictions often miss the quickest of a kernel's configurations, and now and then a kernel.
MOST_RIVALS, WORTH_A_TRIAL = 4, 2.0
_LAUNCH_BOUND = {"fprop": "fprop_gather", "dgrad": "dgrad_gather"}


def check_options(algorithm: object, fp32_precision: object, backend: object) -> None:
    """Raise ProblemTypeError unless the options are of their types; what they name is looked up later."""
    if not isinstance(algorithm, (str, Kernel)):
        raise ProblemTypeError(f"algorithm={shown(algorithm)}: must be a name or a Kernel")
    if fp32_precision is not None and not isinstance(fp32_precision, str):
        raise ProblemTypeError(f"fp32_precision={shown(fp32_precision)}: must be None or a name")
    if backend is not None and not isinstance(backend, str):
        raise ProblemTypeError(f"backend={shown(backend)}: must be None or a name")


def check_names(algorithm: object, backend: object) -> None:
    """Raise ProblemError unless the options of a layer are of their types, name what there is, and go together."""
    check_options(algorithm, None, backend)
    _check_pair(backend, algorithm)
    if algorithm not in ("auto", "library"):
        _named(algorithm, "fprop")  # type: ignore[arg-type]


def is_launch_bound(problem: Problem, pass_name: str, itemsize: int, on_gpu: bool = True) -> bool:
    """Whether a problem is so small that a pass takes no longer than its launch."""
    if pass_name not in _LAUNCH_BOUND or problem.compulsory_bytes(itemsize, pass_name) > LAUNCH_BOUND_BYTES:
        return False
    if not on_gpu:
        return problem.flop <= HOST_BOUND_FLOP
    shapes, written = problem.shapes(pass_name)
    return problem.flop <= min(LAUNCH_BOUND_FLOP, 2 * LAUNCH_BOUND_PRODUCTS * math.prod(shapes[written]))


class Candidate(NamedTuple):
    """A kernel in its most promising configuration.

    Attributes:
        kernel: with its tunables set.
        instance: the dtype it is compiled for.
        ms: what it is predicted to take; None where nothing is predicted.
        swept: whether the prediction's coefficients are the kernel's own.
        others: the same kernel in its other configurations, the most promising first.
    """

    kernel: Kernel
    instance: str
    ms: float | None = None
    swept: bool = False
    others: tuple[Candidate, ...] = ()

    def __str__(self) -> str:
        values = ", ".join(f"{name}={value}" for name, value in self.kernel.changed_tunables.items())
        guessed = "" if self.swept else ", of a kernel that was never swept"
        said = "" if self.ms is None else f": {self.ms:.4g} ms predicted{guessed}"
        return f"{self.kernel.name} [{self.instance}]{values and ' '}{values}{said}"


@dataclass(frozen=True)
class Automatic:
    """What "auto" takes and why.

    Attributes:
        kernel, instance: what runs, and the dtype it is compiled for; None and "" where no kernel can, and `choose` then raises.
        tuned: the database's answer; None where it has none.
        launch_bound: whether the problem's smallness decided; False where the database has an answer.
        candidates: the kernels that can do it, the most promising first; nothing where the database or smallness decided.
        library: what torch's own operator is predicted to take in ms, and what it takes where it is quick; None where that is not known.
        passed_over: why no kernel can do it.
    """

    kernel: Kernel | None
    instance: str
    tuned: Tuned | None = None
    launch_bound: bool = False
    candidates: tuple[Candidate, ...] = ()
    library: tuple[float, float] | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def for_torch(self) -> Automatic:
        """The same where torch's own operator can take the call: of kernels that were never swept nothing but a guess is known, so they
        are left out while there are others."""
        swept = tuple(one for one in self.candidates if one.swept)
        return replace(self, kernel=swept[0].kernel, instance=swept[0].instance, candidates=swept) if swept else self

    @property
    def left_to_torch(self) -> str | None:
        """Why torch's own operator takes the call where it can be had; None where the kernel is the quicker."""
        return self.why_torch(0.0)

    def why_torch(self, margin_ms: float) -> str | None:
        """Return why torch's own operator takes the call unless the kernel is quicker by more than a margin; None where it is."""
        if self.launch_bound:
            return "queueing torch's operator costs the host no more than queueing a kernel"
        if self.tuned is not None:
            if self.tuned.library_ms is None:
                return "torch's operator was not measured beside the kernel"
            if self.tuned.library_ms < self.tuned.elapsed_ms + margin_ms:
                return f"measured at {self.tuned.library_ms:.4g} ms"
            return None
        if self.library is None or not self.candidates or self.candidates[0].ms is None:
            return "no measurement on this device, or another of its architecture, says that a kernel is quicker"
        if not self.candidates[0].swept:
            return "no measurement of this kernel says that it is quicker: `convt3d calibrate` makes some"
        expected, low = self.library
        if self.candidates[0].ms + margin_ms >= low:
            return f"predicted at {expected:.4g} ms, and at {low:.4g} ms if it is quick for its kind"
        return None

    @property
    def rivals(self) -> tuple[Candidate, ...]:
        """What a trial beside torch's own operator may show to be the quickest: the two most promising kernels, and of all other
        configurations the most promising ones; none where that was measured."""
        if self.tuned is not None:
            return () if self.tuned.library_ms is not None else (Candidate(self.tuned.kernel, self.tuned.instance),)
        if not self.candidates or self.candidates[0].ms is None:
            return ()
        best = min([self.candidates[0].ms, *(() if self.library is None else self.library[:1])])
        further = (*self.candidates[2:], *(other for one in self.candidates for other in one.others))
        tried = (*self.candidates[:2], *sorted(further, key=lambda one: one.ms or 0.0))
        return tuple([one for one in tried if (one.ms or 0.0) <= WORTH_A_TRIAL * best][:MOST_RIVALS])

    @property
    def steps(self) -> tuple[str, ...]:
        """What was looked up and tried, a line each."""
        if self.tuned is not None:
            return (f"database: the quickest on this very problem, {self.tuned.elapsed_ms:.4g} ms on {self.tuned.device}",)
        flop = f"{LAUNCH_BOUND_FLOP} FLOP ({HOST_BOUND_FLOP} on a CPU)"
        limits = f"at most {flop}, {LAUNCH_BOUND_BYTES} bytes and on a GPU {LAUNCH_BOUND_PRODUCTS} products a sum"
        small = [f"costs its launch and little more: {limits}"] if self.launch_bound else []
        return ("database: nothing for this problem", *small)


@dataclass(frozen=True)
class Choice:
    """Who computes a call: a kernel's instance of that dtype on a backend, or torch's own operator (no kernel).

    Attributes:
        problem: what the kernel is given where that is less than was asked for: the problem without dead taps, and its part of the weight.
        trial: what a trial at the first call could tell; None where nothing is open.
    """

    kernel: Kernel | None
    instance: str
    backend: str
    precision: str
    problem: Problem | None = None
    trial: Trial | None = None


@dataclass(frozen=True)
class Trial:
    """What was not measured, and who is to be timed: torch's own operator and the most promising kernels, on that problem."""

    question: Question
    problem: Problem
    contestants: tuple[Choice, ...]


@lru_cache(maxsize=64)
def backend_for(name: str, device: int = 0) -> Backend:
    """Return the process's backend of that name for one device; it keeps what it has compiled.

    Raises:
        BackendError: no such backend, or what it needs is missing.
    """
    if name == "host":
        from .backends.host import HostBackend

        return HostBackend()
    if name == "cuda":
        require_cupy()
        from .backends.cuda import CudaBackend

        return CudaBackend(device)
    raise BackendError(f"backend={name!r}: has no kernels to launch; 'cuda' and 'host' have")


def decide(
    pass_name: str,
    problem: Problem,
    arrays: Mapping[str, Array],
    algorithm: str | Kernel,
    fp32_precision: str | None,
    backend: str | None,
    packed: bool = False,
    margin_ms: float = 0.0,
) -> Choice:
    """Return who computes a pass on these arrays.

    Args:
        packed: the packed weight is kept, so that packing is not in the time.
        margin_ms: what a kernel has to save to be taken in place of torch's operator.

    Raises:
        ProblemError, KernelError, BackendError: as `conv_transpose3d`.
    """
    if not isinstance(algorithm, (str, Kernel)):
        raise ProblemTypeError(f"algorithm={algorithm!r}: must be a kernel's name, a Kernel, 'auto' or 'library'")
    first = next(iter(arrays.values()))
    is_torch, automatic = first.library.name == "torch", isinstance(algorithm, str) and algorithm == "auto"
    fp32 = _fp32_precision(fp32_precision, first)
    where = _choose_backend(backend, algorithm, first)
    if where == "torch":
        return Choice(None, first.dtype, "torch", fp32)
    precision, runs_on = FP32_PRECISIONS[fp32] if first.dtype == "fp32" else first.dtype, backend_for(where, first.device.index)
    if automatic:
        # As the result's: where a volume of one voxel has the strides of either layout, the weight tells.
        layout = "channels_last" if any(array.ref.is_channels_last for array in arrays.values()) else "ncdhw"
        calls.note(pass_name, problem, precision, layout, packed)
        torchs, trial = Choice(None, first.dtype, "torch", fp32), None
        may_be_torchs = is_torch and backend is None
        is_cut = first.library.name != "JAX"  # where a slice is a copy in memory of its own
        given = asked_of_kernels(problem, pass_name) if is_cut else problem

        def as_given(kernel: Kernel, instance: str) -> Problem | None:
            found = given_to(kernel, instance, problem, pass_name, runs_on.arch, runs_on.limits) if is_cut else problem
            return None if found is problem else found

        try:
            taken = choose(runs_on, pass_name, given, precision, layout, packed=packed)
        except KernelError:
            if may_be_torchs:
                return torchs
            raise
        if may_be_torchs and taken.rivals:
            question = Question(runs_on.device_name, pass_name, precision, layout)
            rivals = (Choice(one.kernel, one.instance, where, fp32, as_given(one.kernel, one.instance)) for one in taken.rivals)
            trial = Trial(question, given, (torchs, *rivals))
        if may_be_torchs:
            taken = taken.for_torch
            if taken.why_torch(margin_ms):
                return replace(torchs, trial=trial)
        assert taken.kernel is not None
        return Choice(taken.kernel, taken.instance, where, fp32, as_given(taken.kernel, taken.instance), trial)
    kernel = _named(algorithm, pass_name)
    instance, reason = instance_for(kernel, problem, precision, runs_on)
    if instance is None:
        raise KernelError(reason)
    return Choice(kernel, instance, where, fp32)


def asked_of_kernels(problem: Problem, pass_name: str) -> Problem:
    """Return what "auto" asks of kernels in place of a problem: without the taps that lead nowhere, whose gradients wgrad has to give."""
    return problem if pass_name == "wgrad" else problem.without_dead_taps


def given_to(
    kernel: Kernel, instance: str, problem: Problem, pass_name: str, arch: str | None, limits: Limits | None
) -> Problem:
    """Return what "auto" gives a kernel that it takes: all of the problem if the kernel leaves out dead taps by itself, or takes no strides
    of the weight, so that a part of it would have to be copied, and can do the whole; else what it is asked for."""
    wants = kernel.skips_dead_taps or not kernel.takes_strides("weight")
    whole = wants and kernel.why_not(problem, instance, arch, limits) is None
    return problem if whole else asked_of_kernels(problem, pass_name)


def choose(
    backend: Backend, pass_name: str, problem: Problem, precision: str, layout: str = "ncdhw", *, packed: bool = False
) -> Automatic:
    """Return the kernel that "auto" takes for a problem on a backend, and why.

    Answers are kept; saving tuning results or costs, or registering a kernel, makes them anew.

    Args:
        backend: where it is to run.
        precision: the loosest arithmetic allowed, of `dtypes.DTYPES`.
        layout: "ncdhw" or "channels_last".
        packed: whether the packed weight is kept, so that packing is not in the time.

    Raises:
        KernelError: no kernel can do the problem; says why of each.
    """
    question = Question(backend.device_name, pass_name, precision, layout)
    found = automatic(question, problem, packed, backend.arch, backend.limits)
    if found.kernel is None:
        raise KernelError("; ".join(found.passed_over) or f"no {pass_name} kernel is registered")
    return found


def automatic(question: Question, problem: Problem, packed: bool, arch: str | None, limits: Limits | None) -> Automatic:
    """As `choose`, on a device that need not be here; where no kernel can, `kernel` is None.

    Args:
        question: device, pass, precision, layout.
        problem: what is to be computed.
        packed: whether the packed weight is kept, so that packing is not in the time.
        arch, limits: the GPU's, as `Kernel.why_not` takes them; `arch` None: the host.
    """
    states = (registry.state(), tuning.state(), tuning.versions(), cost.state())
    return _choose(question, problem, packed, arch, limits, *states)


def instance_for(kernel: Kernel, problem: Problem, precision: str, backend: Backend) -> tuple[str | None, str]:
    """Return the loosest allowed dtype in which a kernel can do a problem on a backend, else None and the reason."""
    return _instance_for(kernel, problem, precision, backend.arch, backend.limits)


def candidates(
    question: Question, problem: Problem, packed: bool, arch: str | None, limits: Limits | None
) -> tuple[Candidate, ...]:
    """Return the kernels that can do a problem, each in its most promising configuration, the most promising kernel first.

    Args:
        question: device, pass, precision, layout.
        problem: what is to be computed.
        packed: whether the packed weight is kept, so that packing is not in the time.
        arch, limits: the GPU's, as `Kernel.why_not` takes them; `arch` None: the host, where nothing is predicted.
    """
    return _candidates(question, problem, packed, arch, limits, registry.state(), cost.state())


@lru_cache(maxsize=1024)
def _candidates(
    question: Question, problem: Problem, packed: bool, arch: str | None, limits: Limits | None, *states: object
) -> tuple[Candidate, ...]:
    able = {name: kernel for name, kernel in registry.kernels(question.pass_name).items() if kernel.deterministic}
    costs = cost.known()
    found = []
    if arch is not None and costs.cards:
        for kernel in able.values():
            predictions = sorted(
                (
                    one
                    for instance in allowed_instances(question.precision)
                    if instance in kernel.dtypes
                    for one in costs.predictions(kernel, problem, instance, question, packed, arch, limits)
                    if one.kernel.why_spreads_nan(problem, instance) is None
                ),
                key=lambda one: one.ms,
            )
            if predictions:
                found.append(Candidate(*predictions[0], tuple(Candidate(*one) for one in predictions[1:])))
        return tuple(sorted(found, key=lambda one: one.ms or 0.0))
    for name in ORDER[question.pass_name]:
        if name in able:
            taken, _ = _instance_for(able[name], problem, question.precision, arch, limits)
            if taken is not None and able[name].why_spreads_nan(problem, taken) is None:
                found.append(Candidate(able[name], taken))
    return tuple(found)


@lru_cache(maxsize=4096)
def _choose(
    question: Question,
    problem: Problem,
    packed: bool,
    arch: str | None,
    limits: Limits | None,
    *states: object,  # what the answer also depends on: the registered kernels, the database, whose trials count, and the costs
) -> Automatic:
    known = registry.kernels(question.pass_name)
    tuned = tuning.lookup(question, problem, packed=packed, arch=arch, limits=limits, kernels=known)
    if tuned is not None:
        return Automatic(tuned.kernel, tuned.instance, tuned)
    dtype = DTYPES.get(question.precision)  # None for complex numbers: no kernel has them, and the reasons say so
    if dtype is not None and is_launch_bound(problem, question.pass_name, dtype.itemsize, on_gpu=arch is not None):
        kernel = known.get(_LAUNCH_BOUND[question.pass_name])
        instance = None if kernel is None else _instance_for(kernel, problem, question.precision, arch, limits)[0]
        if kernel is not None and instance is not None and kernel.deterministic:
            return Automatic(kernel, instance, launch_bound=True)
    found = candidates(question, problem, packed, arch, limits)
    if not found:
        reasons = (_instance_for(kernel, problem, question.precision, arch, limits)[1] for kernel in known.values())
        return Automatic(None, "", passed_over=tuple(filter(None, reasons)))
    library = None if arch is None else cost.known().library_ms(question, problem, arch, limits)
    return Automatic(found[0].kernel, found[0].instance, candidates=found, library=library)


@lru_cache(maxsize=4096)
def _instance_for(
    kernel: Kernel, problem: Problem, precision: str, arch: str | None, limits: Limits | None
) -> tuple[str | None, str]:
    allowed = allowed_instances(precision)
    reasons = []
    for instance in [own for own in allowed if own in kernel.dtypes] or allowed[:1]:
        reason = kernel.why_not(problem, instance, arch, limits)
        if reason is None:
            return instance, ""
        reasons.append(reason)
    return None, reasons[0]


def _named(algorithm: str | Kernel, pass_name: str) -> Kernel:
    if isinstance(algorithm, Kernel):
        if algorithm.pass_name != pass_name:
            raise ProblemError(f"algorithm={algorithm.name!r}: is a {algorithm.pass_name} kernel; must be one of {pass_name}")
        return algorithm
    known = registry.kernels(pass_name)
    name = algorithm if algorithm in known else f"{pass_name}_{algorithm}"
    if name not in known:
        short = [kernel.removeprefix(f"{pass_name}_") for kernel in known]
        raise ProblemError(f"algorithm={algorithm!r}: must be one of {', '.join(['auto', 'library', *short])}")
    return known[name]


def _fp32_precision(value: str | None, array: Array) -> str:
    if value is not None:
        if value not in FP32_PRECISIONS:
            raise ProblemError(f"fp32_precision={value!r}: must be None or one of {', '.join(FP32_PRECISIONS)}")
        return value
    # "none" is what torch says after a legacy `allow_tf32 = False`; `cudnn.allow_tf32` itself can raise, so it is never read.
    setting = sys.modules["torch"].backends.cudnn.conv.fp32_precision if array.library.name == "torch" else "ieee"
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":  # what keeps NVIDIA's own libraries from TF32
        return "ieee"
    return setting if setting in FP32_PRECISIONS else "ieee"


def _check_pair(backend: object, algorithm: object) -> None:
    if backend is not None and backend not in BACKENDS:
        raise ProblemError(f"backend={backend!r}: must be None or one of {', '.join(BACKENDS)}")
    if algorithm == "library" and backend not in (None, "torch"):
        raise ProblemError(
            f"algorithm='library', backend={backend!r}: 'library' is torch's own operator; the backend must be 'torch'"
        )
    if backend == "torch" and algorithm not in ("auto", "library"):
        raise ProblemError(
            f"algorithm={algorithm!r}, backend='torch': must be 'auto' or 'library'; kernels run on 'cuda' and 'host'"
        )


def _choose_backend(backend: str | None, algorithm: str | Kernel, array: Array) -> str:
    is_torch, on_gpu = array.library.name == "torch", array.device.kind == "cuda"
    _check_pair(backend, algorithm)
    if isinstance(algorithm, str) and algorithm == "library":
        backend = "torch"
    if backend is None:
        by_kernel = isinstance(algorithm, Kernel) or algorithm != "auto"
        backend = "cuda" if on_gpu else "torch" if is_torch and not by_kernel else "host"
    if backend == "torch" and not is_torch:
        raise ProblemError(
            f"backend='torch': is torch's own operator and takes torch tensors; {array.argument} is of {array.library.name}"
        )
    if backend != "torch" and (backend == "cuda") != on_gpu:
        where = "a CUDA device" if backend == "cuda" else "the CPU"
        raise ProblemError(f"backend={backend!r}: needs arrays on {where}; {array.argument} is on {array.device}")
    return backend
