"""What a backend is: it compiles instances and launches them; `run` turns one call of a kernel into its launches."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import DTYPES
from ..errors import KernelError
from ..kernel import (
    ANY_STRIDES,
    CHANNELS_LAST,
    CONTIGUOUS,
    HOST_MULTIPROCESSORS,
    Kernel,
    Limits,
    Parameter,
    Plan,
    PlannedLaunch,
)
from ..problem import Problem, c_values
from ..source import Instance

LAYOUT_ALIGNMENT = 16  # bytes, of a tensor whose layout a binary may be compiled for


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor is: address, shape, and strides in elements. Whoever makes one keeps the memory alive."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and step != expected and 0 not in self.shape:
                return False
            expected *= size
        return True

    @property
    def is_channels_last(self) -> bool:
        """Whether torch's `suggest_memory_format` says channels_last_3d (c10/core/MemoryFormat.h): ambiguous strides do not."""
        if len(self.shape) not in (4, 5) or 0 in self.shape:
            return False
        ref = self.with_batch()
        if ref.strides[1] == 0:
            return False
        smallest = 0
        for axis in (1, 4, 3, 2, 0):
            step = ref.strides[axis]
            if step < smallest or (axis == 0 and smallest == ref.strides[1]):
                return False
            smallest = step * max(1, ref.shape[axis])
        return True

    @property
    def layout(self) -> int:
        """Which strides and alignment a binary may rely on (`output_layout`), of axes of size 1 too.

        CONTIGUOUS and CHANNELS_LAST: the very strides that torch gives a new tensor of that format, and no others (channels of a
        contiguous tensor do not lie together, rows of the other do not), from a multiple of LAYOUT_ALIGNMENT on.
        """
        if len(self.shape) == 5 and 0 not in self.shape and self.pointer % LAYOUT_ALIGNMENT == 0:
            _, c, d, h, w = self.shape
            if self.strides == (c * d * h * w, d * h * w, h * w, w, 1) and d * h * w > 1:
                return CONTIGUOUS
            if self.strides == (c * d * h * w, 1, h * w * c, w * c, c) and c > 1:
                return CHANNELS_LAST
        return ANY_STRIDES

    def with_batch(self) -> TensorRef:
        """Return a volume with its batch: an unbatched one gets the stride that `torch.Tensor.unsqueeze(0)` gives it."""
        if len(self.shape) == 5:
            return self
        return TensorRef(self.pointer, (1, *self.shape), (self.shape[0] * self.strides[0], *self.strides))

    def with_taps(self, taps: tuple[slice, slice, slice]) -> tuple[TensorRef, int]:
        """Return the part of a weight that has these taps of each axis, at the same address, and how many elements before it lie there."""
        sizes = (tap.stop - tap.start for tap in taps)
        ahead = sum(tap.start * step for tap, step in zip(taps, self.strides[2:], strict=True))
        return TensorRef(self.pointer, (*self.shape[:2], *sizes), self.strides), ahead


def output_layout(problem: Problem, layout: str) -> int:
    """Return the layout of the output that torch gives a new tensor for a problem, "ncdhw" or "channels_last"."""
    n, c, d, h, w = problem.output_shape
    strides = (c * d * h * w, *((d * h * w, h * w, w, 1) if layout == "ncdhw" else (1, h * w * c, w * c, c)))
    return TensorRef(0, (n, c, d, h, w), strides).layout


@lru_cache(maxsize=64)
def _c_type(dtype: np.dtype[Any]) -> Any:
    return np.ctypeslib.as_ctypes_type(dtype)


class _View(ctypes.Structure):
    _fields_ = (("value", ctypes.c_void_p), ("stride", ctypes.c_longlong * 5))  # the address is `value`, as in c_void_p


class Arguments:
    """The arguments of one launch as `cuLaunchKernel` wants them: an array of pointers to values kept alive here.

    Attributes:
        config: what the backend keeps for this launch besides.
    """

    config: Any = None

    def __init__(self, launch: PlannedLaunch, problem: Problem, tensors: Mapping[str, TensorRef]) -> None:
        if launch.output_layout != ANY_STRIDES and tensors["output"].layout != launch.output_layout:
            raise KernelError(f"{launch.symbol}: is planned for an output of another layout, or one that is not aligned")
        self.values = [self._value(p, launch, problem, tensors.get(p.name)) for p in launch.parameters]
        self.sizes = [ctypes.sizeof(value) for value in self.values]
        self._pointers = (ctypes.c_void_p * max(1, len(self.values)))(*map(ctypes.addressof, self.values))
        self.address = ctypes.addressof(self._pointers)

    @staticmethod
    def _value(parameter: Parameter, launch: PlannedLaunch, problem: Problem, tensor: TensorRef | None) -> Any:
        if parameter.kind == "problem":
            values = c_values(problem)
            return (ctypes.c_int * len(values))(*values)
        if parameter.kind == "scalar":
            assert parameter.scalar is not None
            return _c_type(parameter.scalar)(launch.scalars[parameter.name])
        if parameter.kind == "view":
            strides = tensor.strides if tensor else (0,) * 5
            return _View(tensor.pointer if tensor else None, strides)
        if tensor is not None and not tensor.is_contiguous:
            raise KernelError(f"{launch.symbol}: {parameter.name} is passed as a pointer and must be contiguous (a View takes strides)")
        return ctypes.c_void_p(tensor.pointer if tensor else None)


class Packed(NamedTuple):
    """A workspace that a launch prepares: where it is, and its bytes."""

    address: int
    size: int


class Step(NamedTuple):
    """A launch of a call with its arguments; `beside` names the workspace that the launch before it prepares while this one begins, and
    says its bytes."""

    launch: PlannedLaunch
    arguments: Arguments
    beside: tuple[str, int] | None


def in_order(launches: Iterable[tuple[PlannedLaunch, Arguments]], sizes: Mapping[str, int]) -> tuple[Step, ...]:
    """Return launches that follow one another as the steps of a call; `sizes` are the workspaces' bytes."""
    steps: list[Step] = []
    for launch, arguments in launches:
        prepared = steps[-1].launch.prepares if steps and launch.beside else None
        steps.append(Step(launch, arguments, None if prepared is None else (prepared, sizes[prepared])))
    return tuple(steps)


class Module(ABC):
    """A compiled instance, ready to launch on one device."""

    @abstractmethod
    def launch(self, launch: PlannedLaunch, arguments: Arguments, stream: int, seed: int, beside: Packed | None = None) -> None:
        """Launch one function; asynchronous where the backend is.

        Args:
            beside: what the launch right before it in the stream prepares, where this one may begin meanwhile.
        """

    def launch_all(self, steps: Sequence[Step], addresses: Mapping[str, int], stream: int, seed: int) -> None:
        """Launch one step after another; `addresses` are the workspaces'."""
        for launch, arguments, beside in steps:
            self.launch(launch, arguments, stream, seed, None if beside is None else Packed(addresses[beside[0]], beside[1]))

    @abstractmethod
    def attributes(self, symbol: str) -> dict[str, int]:
        """Return what the compiler and the driver say of a function: registers, spill_bytes, shared_bytes."""


class Backend(ABC):
    """Where kernels run: `cuda` or `host`."""

    name: str
    device_name = "unknown"  # as results and the tuning database name it
    arch: Any = None  # str: the GPU's, such as "sm_90a"
    multiprocessors = HOST_MULTIPROCESSORS
    reports_faults = False  # before one ends the process: who touched which address
    shared_limit: int | None = None  # bytes of dynamic shared memory that a block may ask for; None: no limit is known
    clock_hz = memory_bytes_per_s = 0.0  # as the driver says; 0: unknown

    @abstractmethod
    def compile(self, instance: Instance) -> Module:
        """Compile an instance, or take it from the cache.

        Raises:
            CompileError: the compiler refused the source.
            BackendError: the compiler or the GPU is missing.
        """

    @abstractmethod
    def build(self, instance: Instance) -> None:
        """Have an instance compiled in the cache, without loading it; several threads may do so at once.

        Raises:
            CompileError, BackendError: as `compile`.
        """

    def instance(self, kernel: Kernel, dtype: str, plan: Plan) -> Instance:
        """Return what is to be compiled for a plan: on a GPU a binary of its own for each specialization, of what is launched alone."""
        return Instance.of_plan(kernel, dtype, plan) if self.arch else Instance(kernel, dtype)

    @property
    def limits(self) -> Limits | None:
        """What `Kernel.why_not` holds a plan against; None where no limit is known."""
        more = (self.multiprocessors, self.clock_hz, self.memory_bytes_per_s)
        return None if self.shared_limit is None else Limits(self.shared_limit, *more)

    def why_not(self, kernel: Kernel, problem: Problem, dtype: str) -> str | None:
        """Return the one sentence that says why a kernel cannot do a problem here, or None if it can."""
        return kernel.why_not(problem, dtype, self.arch, self.limits)

    @abstractmethod
    def capabilities(self) -> dict[str, str]:
        """Return what is there: device, compiler, versions; for reports."""

    def is_capturing(self, stream: int) -> bool:
        """Whether what is launched on a stream goes into a CUDA graph."""
        return False

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all launches; raises LaunchError if one of them failed."""

    @abstractmethod
    def time(self, call: Callable[[], object], repeats: int) -> list[float]:
        """Return the milliseconds of each of `repeats` calls after one that is not counted, caches flushed in between."""


class Prepared:
    """The launches of one call, compiled and with all their arguments but the addresses: what a call like it is launched from.

    Args:
        tensors: every tensor of the pass by name, `bias` only where there is one; their addresses are of no account here, but for the
            alignment that code may rely on: an output that has less is written by code for any strides, compiled when there is one.
        allowed: the caller has asked `why_not` itself.
        plan: the kernel's for this problem, if at hand.

    Attributes:
        workspace: bytes of each scratch tensor that the launches share, by name.
        packs: the workspaces among them that are filled from the weight alone, and can be kept for the next call with it.

    Raises:
        KernelError: the kernel cannot do the problem (the text of `Kernel.why_not`).
        CompileError, BackendError: as the backend says.
    """

    def __init__(
        self,
        backend: Backend,
        kernel: Kernel,
        problem: Problem,
        dtype: str,
        tensors: Mapping[str, TensorRef],
        allowed: bool = False,
        plan: Plan | None = None,
    ) -> None:
        if not allowed and (reason := backend.why_not(kernel, problem, dtype)):
            raise KernelError(reason)
        layout = tensors["output"].layout if "output" in tensors else ANY_STRIDES
        plan = plan or kernel.plan(problem, dtype, backend.multiprocessors, layout)
        self._relies_on_alignment = plan.output_layout != ANY_STRIDES
        self._for_any_strides: Callable[[], Prepared] = lru_cache(maxsize=1)(
            lambda: Prepared(backend, kernel, problem, dtype, tensors, True, kernel.plan(problem, dtype, backend.multiprocessors))
        )
        self._module = backend.compile(backend.instance(kernel, dtype, plan))
        itemsize = DTYPES[dtype].accumulate.itemsize
        self.workspace = {name: numel * itemsize for name, numel in plan.workspace.items()}
        refs = {**tensors, **{name: TensorRef(0, (numel,), (1,)) for name, numel in plan.workspace.items()}}
        launches = [(launch, Arguments(launch, problem, refs)) for launch in plan.launches if 0 not in launch.grid]
        self.packs = tuple(launch.packs for launch, _ in launches if launch.packs is not None)
        # By the workspaces that are kept from an earlier call.
        self._steps = {kept: in_order((one for one in launches if one[0].packs not in kept), self.workspace) for kept in {(), self.packs}}
        self._addresses = [
            (parameter.name, value)
            for launch, arguments in launches
            for parameter, value in zip(launch.parameters, arguments.values, strict=True)
            if parameter.name in refs
        ]
        self._lock = threading.Lock()
        _all_prepared.add(self)

    def launch(self, addresses: Mapping[str, int], stream: int = 0, seed: int = 0, packed: bool = False) -> None:
        """Launch on `stream` with the address of every tensor and workspace; several threads may call it.

        With `packed` all workspaces of `packs` hold what they are filled with, and the launches that do so are left out.

        Raises:
            LaunchError: as the backend says.
        """
        if self._relies_on_alignment and addresses["output"] % LAYOUT_ALIGNMENT:
            return self._for_any_strides().launch(addresses, stream, seed, packed)
        with self._lock:  # the arguments are shared; a launch has copied them when it returns
            for name, value in self._addresses:
                value.value = addresses[name]
            self._module.launch_all(self._steps[self.packs if packed else ()], addresses, stream, seed)


_all_prepared: weakref.WeakSet[Prepared] = weakref.WeakSet()


def _unlock_all() -> None:
    """Give everything prepared a lock of its own in a forked process: the thread that may have held it is not there."""
    for prepared in list(_all_prepared):
        prepared._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_all)


def run(
    backend: Backend,
    kernel: Kernel,
    problem: Problem,
    dtype: str,
    tensors: Mapping[str, TensorRef],
    allocate: Callable[[str, int], int],
    stream: int = 0,
    seed: int = 0,
) -> None:
    """Run a kernel on tensors: plan, compile, and launch on `stream`.

    Args:
        tensors: every tensor of the pass by name; `bias` only where there is one.
        allocate: returns the address of that many bytes for the workspace of that name, alive until the launches are done.
        stream: the CUDA stream's handle; the host backend has none.
        seed: not 0: the host backend runs blocks and threads in an order drawn from it.

    Raises:
        KernelError, CompileError, LaunchError, BackendError: as `Prepared` and its `launch` say.
    """
    prepared = Prepared(backend, kernel, problem, dtype, tensors)
    addresses = {name: ref.pointer for name, ref in tensors.items()}
    for name, size in prepared.workspace.items():
        addresses[name] = allocate(name, size) if size else 0
    prepared.launch(addresses, stream, seed)
