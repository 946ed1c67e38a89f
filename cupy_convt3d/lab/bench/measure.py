"""How long a kernel, and torch on the same problem in the same run, take; and on a GPU what part of the hardware's limit that is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from ...backends.base import Arguments, Backend, Step, TensorRef, in_order, output_layout
from ...dtypes import DTYPES
from ...errors import BackendError, KernelError
from ...kernel import ANY_STRIDES, Kernel, Plan
from ...limits import cores
from ...problem import Problem
from ...source import Instance
from .rivals import RIVALS, check_rivals, torch_module, torch_settings

SLOW_MS = 1000.0  # whatever takes longer a call is timed once
REPEATS = (3, 50)
TURN = 5  # calls timed before it is another's turn
# A timed result further off is a wrong one; what is wrong by less is `check`'s to find, this is not the oracle.
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-3, "tf32x3": 1e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 5e-2}  # of the largest value
ERROR_LIMIT = {"fp64": 1e-10, "fp32": 1e-3, "tf32x3": 1e-3, "tf32": 5e-3, "fp16": 1e-2, "bf16": 5e-2}  # root mean square
_PATTERN = 1_000_003  # a prime, so that the repeated random numbers fall in step with no tensor's pitch
_COPY_BYTES = 1 << 30
_GEMM_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """What this GPU reached in this run: a copy's bytes (read + written) a second, and a GEMM's FLOP a second by dtype."""

    copy_bytes_per_s: float
    gemm_flop_per_s: Mapping[str, float]

    def floor_ms(self, problem: Problem, pass_name: str, dtype: str) -> float | None:
        """Return max(useful FLOP / GEMM ceiling, compulsory bytes / copy ceiling) in ms: no kernel runs much faster.

        None where no GEMM of that dtype was measured.
        """
        if dtype not in self.gemm_flop_per_s:
            return None
        moved = problem.compulsory_bytes(DTYPES[dtype].itemsize, pass_name)
        return 1e3 * max(problem.flop / self.gemm_flop_per_s[dtype], moved / self.copy_bytes_per_s)


@dataclass(frozen=True)
class Row:
    """One kernel, or a rival, on one problem. Times are None where it could not run; `note` says why.

    Attributes:
        dtype: the precision that was asked for; `instance` is the kernel's own, which may be stricter.
        median_ms: of `repeats` calls, the packed weight kept from an earlier call where the kernel packs it.
        low_ms, high_ms: fastest and slowest of these calls.
        share_of_floor: floor / median; None off the GPU, where no ceiling is measured.
        speedup: the first rival's median / this median, same run, device and layout; None for rivals and where there is none.
        difference: largest difference from the rival's result (GPU) or the NumPy reference's (host), over the largest value there.
        layout: "ncdhw", or "channels_last" (3d) for the tensors that are not the weight; a rival's weight follows them.
        with_packing_ms: median of calls that pack the weight too.
        compile_ms, pack_ms, first_call_ms: once, apart from the above: to compile and load the kernel (next to nothing where an
            earlier problem or run had), to pack the weight, and from nothing to the first result, compiling or searching included.
        workspace_bytes: memory besides the tensors of the pass.
        error: ||result - truth|| / ||truth|| over a sample of the result, the truth in fp64 from the same tensors.
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
    layout: str = "ncdhw"
    instance: str = ""
    with_packing_ms: float | None = None
    compile_ms: float | None = None
    pack_ms: float | None = None
    first_call_ms: float | None = None
    workspace_bytes: int | None = None
    error: float | None = None

    @property
    def recorded(self) -> dict[str, Any]:
        """What a results file has of it, for people too: `wrong` where it is, and no field that has its default."""
        found = {one.name: value for one in fields(self) if (value := getattr(self, one.name)) != one.default}
        return found | ({"wrong": True} if self.wrong else {})

    @property
    def wrong(self) -> bool:
        """Whether it ran and its result is not the expected one (unwritten elements are NaN, and so wrong)."""
        far = self.difference is not None and not self.difference <= TOLERANCE[self.dtype]
        return far or (self.error is not None and not self.error <= ERROR_LIMIT[self.dtype])


class Bench:
    """Times contenders on one backend.

    Args:
        backend: where kernels run; torch runs on the same device, on the host with one thread because our kernels have one.
        budget_ms: about how long the repeats of one measurement may take.
        seed: of the numbers in the arrays; standard normal, and NaN in the tensor that is to be written.
        against: rivals, of `rivals.RIVALS[backend]`; None takes the first where there is torch.

    Raises:
        BackendError: there is no such rival.
    """

    def __init__(
        self, backend: Backend, budget_ms: float = 500.0, seed: int = 0, against: Sequence[str] | None = None
    ) -> None:
        self.backend = backend
        self.budget_ms = budget_ms
        self.torch: Any = torch_module(backend)
        self.against = tuple(RIVALS[backend.name])[:1] if against is None else tuple(against)
        check_rivals(backend.name, self.against)
        if self.torch is None:
            self.against = ()
        self.build_ms: dict[Instance, float] = {}  # what compiling took, beside others on the other cores
        self._pattern = np.random.default_rng(seed).standard_normal(_PATTERN, np.float32)
        if backend.name == "host":
            self.xp: Any = np
        else:
            import cupy

            self.xp = cupy

    @property
    def rival_name(self) -> str | None:
        """What results call the first rival, or None."""
        return RIVALS[self.backend.name][self.against[0]] if self.against else None

    def plan(self, kernel: Kernel, problem: Problem, dtype: str, layout: int = ANY_STRIDES) -> Plan:
        """Return the kernel's launches on this backend.

        Args:
            layout: of the output, as `Kernel.plan` takes it.

        Raises:
            KernelError: the kernel cannot do the problem; the text is `Kernel.why_not`'s.
        """
        if reason := self.backend.why_not(kernel, problem, dtype):
            raise KernelError(reason)
        return kernel.plan(problem, dtype, self.backend.multiprocessors, layout)

    def build(self, contenders: Iterable[tuple[Kernel, Problem, str, str]]) -> None:
        """Fill the cache of compiled kernels, several at a time; what cannot be compiled is left for its own turn to say.

        Args:
            contenders: kernel, problem, instance, and "ncdhw" or "channels_last".
        """
        instances = []
        for kernel, problem, dtype, layout in contenders:
            with suppress(KernelError):
                plan = self.plan(kernel, problem, dtype, output_layout(problem, layout))
                instances.append(self.backend.instance(kernel, dtype, plan))

        def timed(instance: Instance) -> float:
            start = time.perf_counter()
            with suppress(BackendError):
                self.backend.build(instance)
            return (time.perf_counter() - start) * 1e3

        new = [instance for instance in dict.fromkeys(instances) if instance not in self.build_ms]
        with ThreadPoolExecutor(cores()) as pool:
            self.build_ms.update(zip(new, pool.map(timed, new), strict=True))

    def arrays(self, problem: Problem, pass_name: str, dtype: str, layout: str = "ncdhw") -> dict[str, Any]:
        """Return the tensors of a pass, NumPy or CuPy by backend; the written one is all NaN.

        The values are the same in each layout; the weight is contiguous in both. CuPy gets bf16 as the 16-bit integers of its bits.
        """
        shapes, written = problem.shapes(pass_name)
        pattern = self._pattern.astype(DTYPES[dtype].numpy)
        if dtype == "bf16" and self.xp is not np:
            pattern = pattern.view(np.int16)
        pattern = self.xp.asarray(pattern)
        arrays = {}
        for position, (name, shape) in enumerate(shapes.items()):
            if name == written:
                array = self.xp.empty(shape, pattern.dtype)
            else:
                numel, start = int(np.prod(shape)), _start(position)
                array = self.xp.tile(pattern, (start + numel) // _PATTERN + 1)[start : start + numel].reshape(shape)
            if layout == "channels_last" and len(shape) == 5 and "weight" not in name:
                array = self.xp.ascontiguousarray(array.transpose(0, 2, 3, 4, 1)).transpose(0, 4, 1, 2, 3)
            arrays[name] = array
        poison(arrays[written])
        return arrays

    def pick(self, problem: Problem, pass_name: str, dtype: str) -> Callable[[str, Any], Any]:
        """Return what `accuracy.sample` asks for the values of `arrays`."""
        pattern = self._pattern.astype(DTYPES[dtype].numpy).astype(np.float64)
        starts = {name: _start(position) for position, name in enumerate(problem.shapes(pass_name)[0])}
        return lambda name, offsets: pattern[(starts[name] + offsets) % _PATTERN]

    def prepared(
        self, kernel: Kernel, problem: Problem, dtype: str, arrays: Mapping[str, Any], packed: bool = False
    ) -> Callable[[], None]:
        """Return a call that launches the kernel and does nothing else: planned, compiled and allocated here.

        Args:
            packed: whether the weight is packed here, once, so that the call finds it packed.

        Raises:
            KernelError: the kernel cannot do the problem; the text is `Kernel.why_not`'s.
        """
        packing, rest, both = self._launches(kernel, problem, dtype, arrays)
        if packed:
            packing()
            return rest
        return both

    def packing(self, kernel: Kernel, problem: Problem, dtype: str, arrays: Mapping[str, Any]) -> Callable[[], None]:
        """Return a call that packs the weight and does nothing else."""
        return self._launches(kernel, problem, dtype, arrays)[0]

    def _launches(
        self, kernel: Kernel, problem: Problem, dtype: str, arrays: Mapping[str, Any]
    ) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
        """Return the call that packs the weight, the one that does the rest, and both in one; they share the workspaces."""
        plan = self.plan(kernel, problem, dtype, layout_of(arrays))
        module = self.backend.compile(self.backend.instance(kernel, dtype, plan))
        workspace = {name: self.xp.empty(numel, DTYPES[dtype].accumulate) for name, numel in plan.workspace.items()}
        tensors = {name: _reference(array) for name, array in {**arrays, **workspace}.items()}
        launches = [(step, Arguments(step, problem, tensors)) for step in plan.launches if 0 not in step.grid]
        addresses, sizes = {n: tensors[n].pointer for n in workspace}, {n: array.nbytes for n, array in workspace.items()}

        def call(steps: Sequence[Step], keep: object = (arrays, workspace)) -> None:  # alive as the call is
            module.launch_all(steps, addresses, 0, 0)

        return (
            partial(call, in_order((one for one in launches if one[0].packs), sizes)),
            partial(call, in_order((one for one in launches if not one[0].packs), sizes)),
            partial(call, in_order(launches, sizes)),
        )

    def milliseconds(self, call: Callable[[], object]) -> list[float]:
        """Return the times of repeated calls, or of one call if that takes over a second; a first call never counts."""
        once = self.backend.time(call, 1)
        if once[0] > SLOW_MS:
            return once
        return self.backend.time(call, self._repeats(once[0]))

    def milliseconds_in_turn(self, *calls: Callable[[], object]) -> list[list[float]]:
        """Return the times of each of several calls, a few of one after a few of the other: a card that grows warm slows all alike.

        Together they take as long as `milliseconds` for one call: in a longer run the power limit slows a card.
        """
        once = [self.backend.time(call, 1)[0] for call in calls]
        if max(once) > SLOW_MS:
            return [[elapsed] for elapsed in once]
        found: list[list[float]] = [[] for _ in calls]
        repeats = self._repeats(sum(once))
        for done in range(0, repeats, TURN):
            for times, call in zip(found, calls, strict=True):
                times += self.backend.time(call, min(TURN, repeats - done))
        return found

    def _repeats(self, elapsed_ms: float) -> int:
        low, high = REPEATS
        return min(high, max(low, int(self.budget_ms / max(elapsed_ms, 1e-3))))

    def is_alive(self) -> bool:
        """Whether the GPU still computes for this process: a kernel that reads where no memory is ends that."""
        try:
            self.backend.synchronize()
        except Exception:  # each library has its own
            return False
        return True

    def first(self, call: Callable[[], object]) -> tuple[float, Any]:
        """Return the milliseconds one call takes until its work is done, by the clock on the wall, and its result."""
        self.backend.synchronize()
        start = time.perf_counter()
        result = call()
        self.backend.synchronize()
        return (time.perf_counter() - start) * 1e3, result


def measure_ceilings(bench: Bench, dtypes: Sequence[str] = ("fp32",)) -> Ceilings | None:
    """Return what a large copy and an 8192-cubed GEMM reach on the GPU now; None on the host, which gets no ceilings.

    "tf32x3" gets a third of TF32's rate: it makes three such products of each. Without torch only CuPy's own types are measured.
    """
    if bench.backend.name == "host":
        return None
    xp = bench.xp
    source = xp.random.randint(0, 256, _COPY_BYTES, dtype=np.uint8)
    target = xp.empty_like(source)
    copy_ms = statistics.median(bench.backend.time(lambda: xp.copyto(target, source), 20))
    rates = {dtype: rate for dtype in dict.fromkeys(dtypes) if (rate := _gemm_flop_per_s(bench, dtype)) is not None}
    return Ceilings(2 * _COPY_BYTES / copy_ms * 1e3, rates)


def _gemm_flop_per_s(bench: Bench, dtype: str) -> float | None:
    if dtype == "tf32x3":
        single = _gemm_flop_per_s(bench, "tf32")
        return None if single is None else single / 3
    # Random values: constant operands switch fewer transistors and can run faster than any real problem.
    shape, torch = (_GEMM_SIZE, _GEMM_SIZE), bench.torch
    if torch is not None:
        names = {"fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}
        a, b = (torch.randn(shape, device="cuda").to(getattr(torch, names.get(dtype, "float32"))) for _ in range(2))
        with torch_settings(torch, dtype):
            elapsed_ms = bench.backend.time(partial(torch.matmul, a, b), 10)
    elif dtype in ("fp64", "fp32", "fp16"):
        # NOTE: CuPy rounds fp32 to TF32 only where CUPY_TF32=1 asks for it; the results record that variable.
        a, b = (bench.xp.random.standard_normal(shape).astype(DTYPES[dtype].numpy) for _ in range(2))
        elapsed_ms = bench.backend.time(partial(bench.xp.matmul, a, b), 10)
    else:
        return None
    return 2 * _GEMM_SIZE**3 / statistics.median(elapsed_ms) * 1e3


def poison(array: Any) -> None:
    """Fill an array with NaN; the integers that stand for bf16 with the bits of one."""
    array.fill(-1 if array.dtype.kind == "i" else np.nan)


def _start(position: int) -> int:
    """Where in the pattern a tensor begins: not the same numbers in every one, but memory as aligned as an allocator's."""
    return 1024 * position


def layout_of(arrays: Mapping[str, Any]) -> int:
    """Return what `Kernel.plan` is told of the tensors of a pass."""
    return _reference(arrays["output"]).layout if "output" in arrays else ANY_STRIDES


def _reference(array: Any) -> TensorRef:
    pointer = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return TensorRef(pointer, array.shape, tuple(step // array.itemsize for step in array.strides))
