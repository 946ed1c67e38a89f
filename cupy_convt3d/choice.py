"""Who computes a call: the backend, and with `algorithm="auto"` the kernel and the dtype it is compiled for.

"auto" takes what `convt3d tune` found quickest for this problem, or for one near it, on this device, else on another card of its
architecture. Where nothing was measured it takes the first kernel of `ORDER` that can do the problem, in the loosest arithmetic
allowed. What spreads NaN (`Kernel.spreads_nan`) is not taken, since torch's operator does not. torch's CUDA tensors, for which torch has
an operator of its own, go to a kernel only where it was measured to be the quicker. `convt3d info --why` shows these steps.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from . import architecture, registry, tuning
from .arrays import Array, require_cupy
from .backends.base import Backend
from .dtypes import DTYPES, allowed_instances
from .errors import BackendError, KernelError, ProblemError, ProblemTypeError, shown
from .kernel import Kernel, Limits
from .problem import Problem
from .tuning import Question, Tuned

BACKENDS = ("cuda", "host", "torch")
FP32_PRECISIONS = {"tf32": "tf32", "tf32x3": "tf32x3", "ieee": "fp32"}  # each with its instance, from loosest to strictest

# The heuristic: kernels in the order in which they are tried. A key is a target, as in a declaration: a GPU has the order of the newest
# that runs on it, so sm_86 and sm_120 have that of "sm_80", and "sm_90a" is Hopper's alone. The first that can do the problem is taken, in
# the loosest of its instances that the precision allows. All are deterministic, and the last of each list takes every problem.
_GROUPS = ("fprop_depthwise", "fprop_few_outputs", "fprop_grouped_mma", "fprop_grouped")
_FEW = ("fprop_patch_split_k", "fprop_col2im")
_PATCHES = ("fprop_patch_stationary", "fprop_patch_mma", "fprop_patch_channels_last_simt", "fprop_patch")
_CUDA_CORES = ("fprop_implicit_gemm_simt", "fprop_tiled", "fprop_residue", "fprop_gather")
_MMA = ("fprop_implicit_gemm_mma", *_CUDA_CORES)
_WGMMA = ("fprop_stationary_wgmma", "fprop_implicit_gemm_wgmma", "fprop_rolling_wgmma")
_FPROP = {
    "host": ("fprop_patch", *_CUDA_CORES),  # what is cheap to run on a CPU
    "sm_80": (*_GROUPS, *_FEW, *_PATCHES, *_MMA),
    "sm_90a": (
        *(*_GROUPS, *_FEW, "fprop_patch_channels_last", "fprop_patch_wgmma", *_PATCHES, *_WGMMA),
        *("fprop_implicit_gemm_mma", "fprop_flattened_simt", *_CUDA_CORES),
    ),
}
# Below it fprop_patch_split_k, on an H200 the quickest with 27 to 216 voxels (in channels_last below half of it: 27 and 54), and with
# 432 by a tenth where it is tuned. fprop_patch_wgmma fills shared memory with weights first.
FEW_VOXELS = 256
# Up to it, from so many channels of a group on, fprop_col2im is the quickest: on an H100 with 64 to 1024 voxels, not with 2400 or 4096.
FEW_WIDE_VOXELS, FEW_WIDE_CHANNELS = 1024, 64
# From so many channels on (in channels_last half as many in 16 bits) a stride of 2 is quicker by fprop_implicit_gemm_wgmma than by
# fprop_rolling_wgmma: on an H200 with 64, 128 and 256, not with 32 (in channels_last with 32 too; in TF32 with 128 and 256 on an H100).
WIDE_CHANNELS = 64
# With so many, fprop_stationary_wgmma is the quickest where it has room for the weights: on an H200 with 32 and 64, and with fewer out or
# in where no more than twice the least go in.
NARROW_CHANNELS = (16, 64)
# From so many FLOP on fprop_flattened_simt is quicker than fprop_implicit_gemm_simt: on an H100 with 2.6e10 and more, not with 5.5e9 and
# less. Its segments are images or parts of the depth, four of them.
FLATTENED_FLOP, FLATTENED_SEGMENTS = 10**10, 4
ORDER: dict[str, dict[str, tuple[str, ...]]] = {
    "fprop": _FPROP,
    "dgrad": dict.fromkeys(_FPROP, ("dgrad_gather",)),
    "wgrad": dict.fromkeys(_FPROP, ("wgrad_reduce",)),
}

# By how much a kernel has to beat torch's operator on a problem near to one that was never measured, to be taken for that one.
NEAR_MARGIN = 1.25

# What costs its launch and little more on a GPU: 2**22 FLOP take the slowest plain kernel 14 us on an H100 (0.3 TFLOP/s), 1 MiB lies in
# the L2 cache, and a sum may be one thread's work. Such a problem gets a kernel that packs nothing and is not compiled anew for each
# geometry, so the first call is quick too. torch's tensors go to torch's operator: a call of a tiny layer costs the host 33 us by
# torch's module and 46 by our kernel there, with the gradients 264 and 427. wgrad is not among them: its kernel is two launches, and
# on an H100 took 20 us where cuDNN took 10.
# On a CPU each thread of a block that meets a barrier gets a stack of its own; up to HOST_BOUND_FLOP a plain kernel, which has none, is
# through before that.
LAUNCH_BOUND_FLOP, LAUNCH_BOUND_BYTES, LAUNCH_BOUND_PRODUCTS = 2**22, 2**20, 2**10
HOST_BOUND_FLOP = 2**18
_LAUNCH_BOUND = {"fprop": ("fprop_gather",), "dgrad": ("dgrad_gather",)}


def check_options(algorithm: object, fp32_precision: object, backend: object) -> None:
    """Raise ProblemTypeError unless the options are of their types; what they name is looked up later."""
    if not isinstance(algorithm, (str, Kernel)):
        raise ProblemTypeError(f"algorithm={shown(algorithm)}: must be a name or a Kernel")
    if fp32_precision is not None and not isinstance(fp32_precision, str):
        raise ProblemTypeError(f"fp32_precision={shown(fp32_precision)}: must be None or a name")
    if backend is not None and not isinstance(backend, str):
        raise ProblemTypeError(f"backend={shown(backend)}: must be None or a name")


def is_launch_bound(problem: Problem, pass_name: str, itemsize: int, most_flop: int = LAUNCH_BOUND_FLOP) -> bool:
    """Whether a problem is so small that a pass takes no longer than its launch, given the FLOP of which that is so."""
    shapes, written = problem.shapes(pass_name)
    return (
        pass_name in _LAUNCH_BOUND
        and problem.flop <= most_flop
        and problem.compulsory_bytes(itemsize, pass_name) <= LAUNCH_BOUND_BYTES
        and problem.flop <= 2 * LAUNCH_BOUND_PRODUCTS * math.prod(shapes[written])
    )


@dataclass(frozen=True)
class Automatic:
    """What "auto" takes and why.

    Attributes:
        kernel, instance: what runs, and the dtype it is compiled for; None and "" where no kernel can, and `choose` then raises.
        tuned: the database's answer; None where it has none.
        launch_bound: whether the problem's smallness decided, else `ORDER` did; False where the database has an answer.
        passed_over: why each kernel that comes earlier in `ORDER` was not taken.
    """

    kernel: Kernel | None
    instance: str
    tuned: Tuned | None
    launch_bound: bool
    passed_over: tuple[str, ...]

    @property
    def left_to_torch(self) -> str | None:
        """Why torch's own operator takes the call where it can be had; None where the kernel is the quicker."""
        if self.launch_bound:
            return "queueing torch's operator costs the host no more than queueing a kernel"
        if self.tuned is None:
            return "no measurement on this device, or another of its architecture, says that a kernel is quicker"
        if self.tuned.library_ms is None:
            return "torch's operator was not measured beside the kernel"
        if self.tuned.library_ms < self.tuned.elapsed_ms:
            return f"measured at {self.tuned.library_ms:.4g} ms"
        if not self.tuned.exact and self.tuned.library_ms < NEAR_MARGIN * self.tuned.elapsed_ms:
            return f"measured at {self.tuned.library_ms:.4g} ms on a problem that is only near, where a kernel has to win by {NEAR_MARGIN}x"
        return None

    @property
    def steps(self) -> tuple[str, ...]:
        """What was looked up and tried, a line each."""
        if self.tuned is None:
            flop = f"{LAUNCH_BOUND_FLOP} FLOP ({HOST_BOUND_FLOP} on a CPU)"
            limits = f"at most {flop}, {LAUNCH_BOUND_BYTES} bytes and {LAUNCH_BOUND_PRODUCTS} products a sum"
            small = [f"costs its launch and little more: {limits}"] if self.launch_bound else []
            return ("database: nothing for this problem or one near it", *small, *self.passed_over)
        measured = "this very problem" if self.tuned.exact else f"the nearest that was measured, {self.tuned.measured_on}"
        return (f"database: the quickest on {measured}, {self.tuned.elapsed_ms:.4g} ms on {self.tuned.device}",)


@dataclass(frozen=True)
class Choice:
    """Who computes a call: a kernel's instance of that dtype on a backend, or torch's own operator (no kernel)."""

    kernel: Kernel | None
    instance: str
    backend: str
    precision: str


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
) -> Choice:
    """Return who computes a pass on these arrays; `packed`: the packed weight is kept, so that packing is not in the time.

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
        volumes = (array.ref for name, array in arrays.items() if name != "weight")
        layout = "channels_last" if any(ref.is_channels_last for ref in volumes) else "ncdhw"
        try:
            taken = choose(runs_on, pass_name, problem, precision, layout, packed=packed)
        except KernelError:
            if is_torch and backend is None:
                return Choice(None, first.dtype, "torch", fp32)
            raise
        if is_torch and backend is None and taken.left_to_torch:
            return Choice(None, first.dtype, "torch", fp32)
        return Choice(taken.kernel, taken.instance, where, fp32)
    kernel = _named(algorithm, pass_name)
    instance, reason = instance_for(kernel, problem, precision, runs_on)
    if instance is None:
        raise KernelError(reason)
    return Choice(kernel, instance, where, fp32)


def choose(
    backend: Backend, pass_name: str, problem: Problem, precision: str, layout: str = "ncdhw", *, packed: bool = False
) -> Automatic:
    """Return the kernel that "auto" takes for a problem on a backend, and why.

    Answers are kept; saving tuning results or registering a kernel makes them anew.

    Args:
        backend: where it is to run.
        precision: the loosest arithmetic allowed, of `dtypes.DTYPES`.
        layout: "ncdhw" or "channels_last".
        packed: whether the packed weight is kept, so that packing is not in the time.

    Raises:
        KernelError: no kernel can do the problem; says why of each.
    """
    question = Question(backend.device_name, pass_name, precision, layout)
    found = _choose(question, problem, packed, backend.arch, backend.limits, registry.state(), tuning.state())
    if found.kernel is None:
        raise KernelError("; ".join(found.passed_over) or f"no {pass_name} kernel is registered")
    return found


def instance_for(kernel: Kernel, problem: Problem, precision: str, backend: Backend) -> tuple[str | None, str]:
    """Return the loosest allowed dtype in which a kernel can do a problem on a backend, else None and the reason."""
    return _instance_for(kernel, problem, precision, backend.arch, backend.limits)


@lru_cache(maxsize=4096)
def _choose(
    question: Question,
    problem: Problem,
    packed: bool,
    arch: str | None,
    limits: Limits | None,
    *states: object,  # what the answer also depends on: the registered kernels and the database
) -> Automatic:
    known = registry.kernels(question.pass_name)
    tuned = tuning.lookup(question, problem, packed=packed, arch=arch, limits=limits, kernels=known)
    if tuned is not None and not tuned.exact:  # what is quick for a problem near it may not be for this one
        fit = {name: kernel for name, kernel in known.items() if _put_off(name, problem, question, arch) is None}
        tuned = tuning.lookup(question, problem, packed=packed, arch=arch, limits=limits, kernels=fit)
    if tuned is not None:
        return Automatic(tuned.kernel, tuned.instance, tuned, False, ())
    passed_over: list[str] = []
    most_flop = HOST_BOUND_FLOP if arch is None else LAUNCH_BOUND_FLOP
    dtype = DTYPES.get(question.precision)  # None for complex numbers: no kernel has them, and the reasons say so
    small = dtype is not None and is_launch_bound(problem, question.pass_name, dtype.itemsize, most_flop)
    for name in _LAUNCH_BOUND[question.pass_name] if small else order_on(arch, question.pass_name):
        if name in known and known[name].deterministic:
            instance, reason = _instance_for(known[name], problem, question.precision, arch, limits)
            put_off = _put_off(name, problem, question, arch)
            if instance is not None:
                put_off = put_off or known[name].why_spreads_nan(problem, instance)
            if instance is not None and put_off is None:
                return Automatic(known[name], instance, None, small, tuple(passed_over))
            passed_over.append(reason if instance is None else f"{name}: {put_off}")
    return Automatic(None, "", None, small, tuple(passed_over))


def order_on(arch: str | None, pass_name: str) -> tuple[str, ...]:
    """Return the kernels of a pass in the order in which they are tried on GPUs of that architecture; None: on the host."""
    order = ORDER[pass_name]
    return order["host" if arch is None else architecture.nearest(order.keys() - {"host"}, arch)]


def _put_off(name: str, problem: Problem, question: Question, arch: str | None) -> str | None:
    """Return why a kernel that can do a problem is not taken for it unless it was measured to be the quickest."""
    voxels = problem.batch * math.prod(problem.input_size)
    few = FEW_VOXELS // 2 if question.layout == "channels_last" else FEW_VOXELS
    if name == "fprop_few_outputs" and question.precision != "fp32":
        if problem.kernel_size == problem.stride:
            return "multiplies in fp32, so where kernel = stride tensor cores come first"
        if question.precision == "tf32" and arch == "sm_90a" and problem.out_channels > problem.groups:
            return "multiplies in fp32, so Hopper's tensor cores come first where a group has more than one output channel"
    if name == "fprop_grouped" and problem.groups == 1:
        if question.precision != "fp32":
            return "multiplies in fp32, so tensor cores come first where there is one group"
        if problem.kernel_size == problem.stride and question.layout == "channels_last":
            return "reads inputs again for every 8 output channels, so others come first where kernel = stride and channels lie together"
    if name == "fprop_grouped_mma" and problem.groups == 1 and (problem.kernel_size == problem.stride or arch == "sm_90a"):
        return "stages no inputs, so where there is one group others come first on Hopper, and where kernel = stride"
    if name == "fprop_patch_split_k" and voxels >= few:
        return f"reads its inputs once for every few columns, so others come first from {few} voxels on"
    if name == "fprop_col2im":
        if voxels > FEW_WIDE_VOXELS or problem.in_channels // problem.groups < FEW_WIDE_CHANNELS:
            return f"is for at most {FEW_WIDE_VOXELS} voxels of {FEW_WIDE_CHANNELS} channels and more, so others come first"
        if problem.kernel_size == problem.stride:
            return "adds up products of several taps, so where kernel = stride others come first"
        return None
    if name == "fprop_patch_channels_last":
        vector = 16 // DTYPES[question.precision].itemsize
        if question.layout != "channels_last":
            return "loads and stores one element at a time unless channels lie together, so others come first"
        if problem.in_channels // problem.groups % vector != 0 or problem.out_channels // problem.groups % vector != 0:
            return f"loads and stores one element at a time unless channels come in {vector}, so others come first"
        return None
    if name == "fprop_patch_channels_last_simt":
        if question.layout != "channels_last":
            return "loads and stores one element at a time unless channels lie together, so others come first"
        return None
    if name == "fprop_stationary_wgmma":
        least, most = NARROW_CHANNELS
        both = (problem.in_channels, problem.out_channels)
        strided = problem.stride == (2, 2, 2) and problem.dilation == (1, 1, 1)
        if not strided or problem.groups > 1 or (min(both) < least and problem.in_channels > 2 * least) or max(both) > most:
            return f"is the quicker where the stride is 2 and {least} to {most} channels are in one group, so others come first"
        return None
    if name == "fprop_implicit_gemm_wgmma":
        channels = min(problem.in_channels, problem.out_channels) // problem.groups
        narrow = question.layout == "channels_last" and DTYPES[question.precision].itemsize == 2
        least = WIDE_CHANNELS // 2 if narrow else WIDE_CHANNELS
        if problem.stride != (2, 2, 2) or problem.dilation != (1, 1, 1) or channels < least:
            return f"is the quicker where the stride is 2 and a group has {least} channels in and out, so others come first"
        return None
    if name == "fprop_flattened_simt":
        if problem.flop < FLATTENED_FLOP or min(problem.out_channels, problem.in_channels) // problem.groups < 8:
            return f"lays the input out first, so others come first below {FLATTENED_FLOP:.0e} FLOP or 8 channels in a group"
        if problem.batch * problem.output_size[0] < FLATTENED_SEGMENTS * problem.stride[0]:
            return "takes four images or parts of the depth at a time, so others come first where there are fewer"
        if question.layout == "channels_last":
            return "stores one element at a time where channels lie together, so others come first"
        return None
    if name != "fprop_patch_wgmma":
        return None
    if question.layout == "channels_last":
        return "loads and stores one element at a time where channels lie together, so others come first"
    volume, vector = math.prod(problem.input_size), 16 // DTYPES[question.precision].itemsize
    if voxels < FEW_VOXELS:
        return f"keeps its weights for many voxels, so others come first for less than {FEW_VOXELS}"
    if vector == 8 and volume % vector != 0 and problem.input_size[2] % vector != 0:
        return f"loads 16-bit volumes that are not made of {vector} neighbours one element at a time, so others come first"
    return None


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


def _choose_backend(backend: str | None, algorithm: str | Kernel, array: Array) -> str:
    is_torch, on_gpu = array.library.name == "torch", array.device.kind == "cuda"
    if backend is not None and backend not in BACKENDS:
        raise ProblemError(f"backend={backend!r}: must be None or one of {', '.join(BACKENDS)}")
    if isinstance(algorithm, str) and algorithm == "library":
        if backend not in (None, "torch"):
            raise ProblemError(
                f"algorithm='library', backend={backend!r}: 'library' is torch's own operator; the backend must be 'torch'"
            )
        backend = "torch"
    if backend is None:
        by_kernel = isinstance(algorithm, Kernel) or algorithm != "auto"
        backend = "cuda" if on_gpu else "torch" if is_torch and not by_kernel else "host"
    if backend == "torch" and not is_torch:
        raise ProblemError(
            f"backend='torch': is torch's own operator and takes torch tensors; {array.argument} is of {array.library.name}"
        )
    if backend == "torch" and algorithm not in ("auto", "library"):
        raise ProblemError(
            f"algorithm={algorithm!r}, backend='torch': must be 'auto' or 'library'; kernels run on 'cuda' and 'host'"
        )
    if backend != "torch" and (backend == "cuda") != on_gpu:
        where = "a CUDA device" if backend == "cuda" else "the CPU"
        raise ProblemError(f"backend={backend!r}: needs arrays on {where}; {array.argument} is on {array.device}")
    return backend
