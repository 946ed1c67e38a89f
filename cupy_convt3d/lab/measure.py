"""How long a kernel, and torch on the same problem in the same run, take; and on a GPU what part of the hardware's limit that is."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .. import reference
from ..backends.base import Arguments, Backend, TensorRef
from ..dtypes import DTYPES
from ..errors import BackendError, KernelError, LaunchError
from ..kernel import Kernel
from ..problem import Problem

SLOW_MS = 1000.0  # whatever takes longer a call is timed once
REPEATS = (3, 30)
# Of the largest value. A timed result further off is a wrong one; what is wrong by less is `check`'s to find, this is not the oracle.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "fp16": 2e-2}
_PATTERN = 1_000_003  # a prime, so that the repeated random numbers fall in step with no tensor's pitch
_COPY_BYTES = 1 << 30
_GEMM_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reached in this run: a copy's bytes (read + written) a second, and a GEMM's FLOP a second by dtype."""

    copy_bytes_per_s: float
    gemm_flop_per_s: Mapping[str, float]

    def floor_ms(self, problem: Problem, pass_name: str, dtype: str) -> float:
        """Return max(useful FLOP / GEMM ceiling, compulsory bytes / copy ceiling) in ms: no kernel runs much faster."""
        moved = problem.compulsory_bytes(DTYPES[dtype].itemsize, pass_name)
        return 1e3 * max(problem.flop / self.gemm_flop_per_s[dtype], moved / self.copy_bytes_per_s)


@dataclass(frozen=True)
class Row:
    """One kernel, or torch, on one problem. Times are None where it could not run; `note` says why.

    Attributes:
        low_ms, high_ms: fastest and slowest of `repeats` calls.
        share_of_floor: floor / median; None off the GPU, where no ceiling is measured.
        speedup: torch's median / this median, same run and device; None for torch itself and where there is no torch.
        difference: largest difference from torch's result (GPU) or the NumPy reference's (host), over the largest value there.
    """

    case: str
    problem: str
    pass_name: str
    contender: str
    is_rival: bool
    dtype: str
    flop: int
    repeats: int = 0
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    floor_ms: float | None = None
    share_of_floor: float | None = None
    bytes_moved: int = 0
    speedup: float | None = None
    difference: float | None = None
    note: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it ran and its result is not the expected one (unwritten elements are NaN, and so wrong)."""
        return self.difference is not None and not self.difference <= TOLERANCE[self.dtype]


def torch_module(backend: Backend) -> Any | None:
    """Return torch where it is installed and can use the backend's device, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if backend.name == "host" or torch.cuda.is_available() else None


class Bench:
    """Times contenders on one backend; arrays are made once for a problem and dtype.

    Args:
        backend: where kernels run; torch runs on the same device, on the host with one thread because our kernels have one.
        budget_ms: about how long the repeats of one measurement may take.
        seed: of the numbers in the arrays; standard normal, and NaN in the tensor that is to be written.
    """

    def __init__(self, backend: Backend, budget_ms: float = 500.0, seed: int = 0) -> None:
        self.backend = backend
        self.budget_ms = budget_ms
        self.torch: Any = torch_module(backend)
        self.rival_name = "torch CPU, 1 thread" if backend.name == "host" else "cuDNN (torch)"
        self._pattern = np.random.default_rng(seed).standard_normal(_PATTERN, np.float32)
        if backend.name == "host":
            self.xp: Any = np
        else:
            import cupy

            self.xp = cupy

    def arrays(self, problem: Problem, pass_name: str, dtype: str) -> dict[str, Any]:
        """Return the tensors of a pass, NumPy or CuPy by backend; the written one is all NaN."""
        shapes, written = problem.shapes(pass_name)
        pattern = self.xp.asarray(self._pattern.astype(DTYPES[dtype].numpy))
        arrays = {}
        for position, (name, shape) in enumerate(shapes.items()):
            if name == written:
                arrays[name] = self.xp.full(shape, np.nan, pattern.dtype)
                continue
            numel = int(np.prod(shape))
            start = 1009 * position  # not the same numbers in every tensor
            arrays[name] = self.xp.tile(pattern, (start + numel) // _PATTERN + 1)[start : start + numel].reshape(shape)
        return arrays

    def prepared(self, kernel: Kernel, problem: Problem, dtype: str, arrays: Mapping[str, Any]) -> Callable[[], None]:
        """Return a call that launches the kernel and does nothing else: planned, compiled and allocated here.

        Raises:
            KernelError: the kernel cannot do the problem; the text is `Kernel.why_not`'s.
        """
        kernel.require(problem, dtype, self.backend.arch)
        plan = kernel.plan(problem, dtype, self.backend.multiprocessors)
        module = self.backend.compile(self.backend.instance(kernel, dtype, plan))
        workspace = {name: self.xp.empty(numel, DTYPES[dtype].accumulate) for name, numel in plan.workspace.items()}
        tensors = {name: _reference(array) for name, array in {**arrays, **workspace}.items()}
        launches = [(step, Arguments(step, problem, tensors)) for step in plan.launches if 0 not in step.grid]

        def call(keep: object = workspace) -> None:  # the workspace lives as long as the call
            for step, arguments in launches:
                module.launch(step, arguments, 0, 0)

        return call

    def milliseconds(self, call: Callable[[], object]) -> list[float]:
        """Return the times of repeated calls, or of one call if that takes over a second; a first call never counts."""
        once = self.backend.time(call, 1)
        if once[0] > SLOW_MS:
            return once
        low, high = REPEATS
        return self.backend.time(call, min(high, max(low, int(self.budget_ms / max(once[0], 1e-3)))))

    def compare(
        self, case: str, problem: Problem, pass_name: str, kernels: Sequence[Kernel], dtype: str, ceilings: Ceilings | None = None
    ) -> list[Row]:
        """Return a row for torch, where there is torch, and one for each kernel of `pass_name`."""
        arrays = self.arrays(problem, pass_name, dtype)
        written = problem.shapes(pass_name)[1]
        blank = Row(case, str(problem), pass_name, self.rival_name, True, dtype, problem.flop)
        blank = replace(blank, bytes_moved=problem.compulsory_bytes(DTYPES[dtype].itemsize, pass_name))
        if ceilings is not None:
            blank = replace(blank, floor_ms=ceilings.floor_ms(problem, pass_name, dtype))
        rows, expected, rival_ms = [], None, None
        if self.torch is not None:
            row, expected = self._rival(blank, problem, arrays)
            rows.append(row)
            rival_ms = row.median_ms
        if self.backend.name == "host":
            expected = reference.run(pass_name, problem, arrays)
        for kernel in kernels:
            row = replace(blank, contender=kernel.name, is_rival=False)
            arrays[written].fill(np.nan)
            try:
                times = self.milliseconds(self.prepared(kernel, problem, dtype, arrays))
                row = _timed(row, times, rival_ms)
                rows.append(replace(row, difference=self._difference(arrays[written], expected)))
            except (KernelError, BackendError, LaunchError) as error:
                rows.append(replace(row, note=str(error).splitlines()[0]))
        return rows

    def _rival(self, row: Row, problem: Problem, arrays: Mapping[str, Any]) -> tuple[Row, Any]:
        torch = self.torch
        convert = torch.from_numpy if self.backend.name == "host" else torch.from_dlpack
        tensors = {name: convert(array) for name, array in arrays.items()}
        call = _torch_call(torch, problem, row.pass_name, tensors)
        with ieee_torch(torch):
            try:
                expected = call()
                return _timed(row, self.milliseconds(call), None), expected
            except RuntimeError as error:  # cuDNN has no plan for it, or the memory is short
                return replace(row, note=str(error).splitlines()[0]), None

    def _difference(self, result: Any, expected: Any) -> float | None:
        if expected is None:
            return None
        if self.backend.name == "host":
            wide = result.astype(np.float64)
            return float(np.abs(wide - expected).max() / max(np.abs(expected).max(), np.finfo(np.float32).tiny))
        result = self.torch.from_dlpack(result)
        return float((result - expected).abs().max().float() / expected.abs().max().float())


@contextmanager
def ieee_torch(torch: Any) -> Iterator[None]:
    """Make torch use one CPU thread, search for its best cuDNN algorithm, and leave fp32 products unrounded; then put it back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), _ieee_cudnn(torch) if torch.cuda.is_available() else nullcontext():
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _ieee_cudnn(torch: Any) -> Iterator[None]:
    settings = (torch.backends.cudnn.conv, torch.backends.cuda.matmul)
    before, benchmark = [setting.fp32_precision for setting in settings], torch.backends.cudnn.benchmark
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        torch.backends.cudnn.benchmark = True
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
        torch.backends.cudnn.benchmark = benchmark


def measure_ceilings(bench: Bench, dtypes: Sequence[str] = ("fp32",)) -> Ceilings | None:
    """Return what a large copy and an 8192-cubed GEMM reach on the GPU now; None on the host, which gets no ceilings."""
    if bench.backend.name == "host":
        return None
    xp = bench.xp
    source = xp.random.randint(0, 256, _COPY_BYTES, dtype=np.uint8)
    target = xp.empty_like(source)
    copy_ms = statistics.median(bench.backend.time(lambda: xp.copyto(target, source), 20))
    rates = {}
    for dtype in dtypes:
        # Random values: constant operands switch fewer transistors and can run faster than any real problem.
        a, b = (xp.random.standard_normal((_GEMM_SIZE, _GEMM_SIZE)).astype(DTYPES[dtype].numpy) for _ in range(2))
        if bench.torch is None:
            # NOTE: CuPy rounds fp32 to TF32 only where CUPY_TF32=1 asks for it; the report records that variable.
            gemm_ms = statistics.median(bench.backend.time(partial(xp.matmul, a, b), 10))
        else:
            left, right = bench.torch.from_dlpack(a), bench.torch.from_dlpack(b)
            with ieee_torch(bench.torch):
                gemm_ms = statistics.median(bench.backend.time(partial(bench.torch.matmul, left, right), 10))
        rates[dtype] = 2 * _GEMM_SIZE**3 / gemm_ms * 1e3
    return Ceilings(2 * _COPY_BYTES / copy_ms * 1e3, rates)


def _timed(row: Row, times: list[float], rival_ms: float | None) -> Row:
    median = statistics.median(times)
    share = None if row.floor_ms is None else row.floor_ms / median
    row = replace(row, repeats=len(times), median_ms=median, low_ms=min(times), high_ms=max(times), share_of_floor=share)
    return replace(row, speedup=None if rival_ms is None else rival_ms / median)


def _reference(array: Any) -> TensorRef:
    pointer = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return TensorRef(pointer, array.shape, tuple(step // array.itemsize for step in array.strides))


def _torch_call(torch: Any, problem: Problem, pass_name: str, tensors: Mapping[str, Any]) -> Callable[[], Any]:
    p = problem
    if pass_name == "fprop":
        arguments = (tensors["input"], tensors["weight"], tensors.get("bias"), p.stride, p.padding, p.output_padding, p.groups)
        return lambda: torch.nn.functional.conv_transpose3d(*arguments, p.dilation)
    # One gradient at a time, as the kernels compute them. The tensor that only lends its shape is the (NaN) written one.
    gradient = tensors["grad_output"]
    source, weight = tensors.get("input", tensors.get("grad_input")), tensors.get("weight", tensors.get("grad_weight"))
    mask = [pass_name == "dgrad", pass_name == "wgrad", False]
    geometry = (p.stride, p.padding, p.dilation, True, p.output_padding, p.groups, mask)
    return lambda: torch.ops.aten.convolution_backward(gradient, source, weight, None, *geometry)[mask.index(True)]
