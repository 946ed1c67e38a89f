"""Where an example is run: in this process, or through `child` in one of the kernel's own. What it wrote is judged elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...backends.base import Backend, Prepared, TensorRef
from ...kernel import HOST_MULTIPROCESSORS, Kernel, Limits, Numbers
from ...problem import Problem

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Array]
# Called with a `Local`, the arrays, the kernel and further arguments; yields the arrays as each run leaves them, or some of them.
Work = Callable[..., Iterator[Arrays]]
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # of a tensor: shape, strides in elements


class Failure(Exception):
    """What became of the kernel's process, in one sentence: it crashed, hung, reported an error, or broke the rules of the talk."""


class Executor(ABC):
    """Runs one piece of work at a time.

    Attributes:
        name: of the backend.
        sanitizer: as `HostBackend` takes it.
        arch, limits: of the GPU, as `Kernel.why_not` takes them.
        page: bytes of the pages around each array that must not be touched, where arrays of whole pages have such; else 0.
    """

    name: str
    sanitizer: str | None = None
    arch: str | None = None
    limits: Limits | None = None
    page = 0

    @property
    def multiprocessors(self) -> int:
        return HOST_MULTIPROCESSORS if self.limits is None else self.limits.multiprocessors

    def why_not(self, kernel: Kernel, problem: Problem, dtype: str) -> str | None:
        """Return the one sentence that says why a kernel cannot do a problem here, or None if it can."""
        return kernel.why_not(problem, dtype, self.arch, self.limits)

    @abstractmethod
    def start(self, work: Work, runs: int, arrays: Arrays, kernel: Kernel, *arguments: Any) -> None:
        """Hand over work of so many runs; `finish` follows for each that is of interest. The arrays are left as they are."""

    @abstractmethod
    def finish(self) -> Arrays:
        """Return what has become of the arrays in the next run.

        Raises:
            KernelError, CompileError, LaunchError, BackendError: as `backends.base.run`.
            Failure: the process that ran it is no longer.
        """


class Local(Executor):
    """Runs work in this very process.

    Args:
        backend: what launches.
        shared: the arrays are the kernel's to write to, where they lie in memory that it can use.
    """

    def __init__(self, backend: Backend, shared: bool = False) -> None:
        self.backend, self.name, self.sanitizer = backend, backend.name, getattr(backend, "sanitizer", None)
        self.arch, self.limits = backend.arch, backend.limits
        if backend.name == "host":
            # A sanitizer knows where an allocation of its own ends, and nothing of an array inside of another.
            self.memory: _HostMemory | _DeviceMemory = _HostMemory(copies=not shared or self.sanitizer is not None)
        else:
            self.memory = _DeviceMemory()
        self._runs: Iterator[Arrays] = iter(())
        self._prepared: tuple[tuple[Any, ...], Prepared] | None = None

    def start(self, work: Work, runs: int, arrays: Arrays, kernel: Kernel, *arguments: Any) -> None:
        self._runs = work(self, arrays, kernel, *arguments)

    def finish(self) -> Arrays:
        return next(self._runs)

    def prepared(self, kernel: Kernel, problem: Problem, dtype: str, layouts: Mapping[str, Layout], numbers: Numbers) -> Prepared:
        """Return the launches of an example that the kernel can do, those of the last one where it had the same numbers."""
        key = (kernel, problem, dtype, layouts, numbers)
        if self._prepared is None or self._prepared[0] != key:
            refs = {name: TensorRef(0, shape, strides) for name, (shape, strides) in layouts.items()}
            self._prepared = (key, Prepared(self.backend, kernel, problem, dtype, refs, allowed=True, plan=kernel.planned(numbers)))
        return self._prepared[1]


class _HostMemory:
    """Tensors of the host backend are NumPy's own."""

    def __init__(self, copies: bool) -> None:
        self.put: Callable[[Array], Any] = np.ndarray.copy if copies else lambda array: array

    def get(self, handle: Any) -> Array:
        return np.asarray(handle)

    def pointer(self, handle: Any) -> int:
        return int(handle.__array_interface__["data"][0])  # four times as fast as .ctypes.data


class _DeviceMemory:
    """Tensors of the CUDA backend are CuPy's; copies wait for the launches before them."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy

    def put(self, array: Array) -> Any:
        return self._cupy.asarray(array)

    def get(self, handle: Any) -> Array:
        return np.asarray(self._cupy.asnumpy(handle))

    def pointer(self, handle: Any) -> int:
        return int(handle.data.ptr)


def launch(
    local: Local,
    arrays: Arrays,
    kernel: Kernel,
    problem: Problem,
    dtype: str,
    layouts: Mapping[str, Layout],
    starts: Sequence[Mapping[str, int]],
    orders: Sequence[int],
    numbers: Numbers,
) -> Iterator[Arrays]:
    """Launch a kernel on arrays of bits, once in each order of threads.

    Args:
        arrays: of the tensors and of the workspaces, named by `of_run`; one that all runs have in common has the tensor's own name.
        layouts: of each tensor.
        starts: for each run the element at which each tensor, and each workspace of the plan, starts in its array; a workspace that is
            empty has none.
        orders: the host's shuffle seeds, 0 for none.
        numbers: of the kernel's plan.
    """
    memory = local.memory
    prepared = local.prepared(kernel, problem, dtype, layouts, numbers)
    for run, order in enumerate(orders):
        addresses, handles = dict.fromkeys(prepared.workspace, 0), {}  # 0: an empty one, as in `backends.base.run`
        for name, start in starts[run].items():
            key = of_run(run, name) if of_run(run, name) in arrays else name
            handles[key] = memory.put(arrays[key])
            addresses[name] = memory.pointer(handles[key]) + start * arrays[key].itemsize
        prepared.launch(addresses, seed=order if local.name == "host" else 0)
        local.backend.synchronize()
        yield {name: memory.get(handle) for name, handle in handles.items()}


def of_run(run: int, name: str) -> str:
    """Return the name of an array that each run of an example has for itself."""
    return f"{name} {run}"


def dry_run(local: Local, arrays: Arrays, kernel: Kernel, problem: Problem, dtype: str) -> Iterator[Arrays]:
    """Launch a kernel once on arrays of the problem's full size."""
    from ..bench.measure import Bench

    bench = Bench(local.backend, against=())
    bench.prepared(kernel, problem, dtype, bench.arrays(problem, kernel.pass_name, dtype))()
    local.backend.synchronize()
    yield {}
