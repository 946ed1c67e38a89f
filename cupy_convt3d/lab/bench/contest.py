"""One problem, pass, precision and layout, and the rows of whoever computes it there."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ... import reference
from ...dtypes import DTYPES
from ...errors import BackendError, KernelError, LaunchError
from ...kernel import Kernel
from ...problem import Problem
from ..accuracy import Sample, sample
from .measure import SLOW_MS, Bench, Ceilings, Row, layout_of, poison
from .rivals import RIVALS, as_tensor, torch_call, torch_settings

_MUCH_TOO_SLOW_MS = 10 * SLOW_MS  # even a first call, with all it sets up, says enough


class Contest:
    """Tensors made once, and what is known of the right result.

    Args:
        bench: times.
        case: the problem's name in the rows.
        problem, pass_name: what is computed.
        dtype: of `dtypes.DTYPES`: the element type, and the loosest arithmetic allowed.
        ceilings: of this run; None: no floors.
        layout: "ncdhw" or "channels_last".
    """

    def __init__(
        self,
        bench: Bench,
        case: str,
        problem: Problem,
        pass_name: str,
        dtype: str,
        ceilings: Ceilings | None = None,
        layout: str = "ncdhw",
    ) -> None:
        self.bench, self.problem, self.pass_name, self.dtype, self.layout = bench, problem, pass_name, dtype, layout
        self.arrays = bench.arrays(problem, pass_name, dtype, layout)
        self.written = problem.shapes(pass_name)[1]
        self._rival_ms: float | None = None
        self._rival_result: Any = None
        self._blank = Row(
            case,
            str(problem),
            pass_name,
            contender="",
            is_rival=False,
            dtype=dtype,
            flop=problem.flop,
            floor_ms=None if ceilings is None else ceilings.floor_ms(problem, pass_name, dtype),
            bytes_moved=problem.compulsory_bytes(DTYPES[dtype].itemsize, pass_name),
            layout=layout,
        )

    def kernel(self, kernel: Kernel, instance: str | None = None) -> Row:
        """Return a kernel's row; `instance` is the dtype it is compiled for, None the contest's."""
        instance = instance or self.dtype
        row = replace(self._blank, contender=kernel.name, instance=instance)
        bench, problem = self.bench, self.problem
        poison(self.arrays[self.written])
        try:
            plan = bench.plan(kernel, problem, instance, layout_of(self.arrays))
            compiled = bench.backend.instance(kernel, instance, plan)
            load_ms, _ = bench.first(lambda: bench.backend.compile(compiled))
            compile_ms = bench.build_ms.pop(compiled, 0.0) + load_ms
            first_ms, _ = bench.first(lambda: bench.prepared(kernel, problem, instance, self.arrays)())
            row = self._judged(row, self.arrays[self.written])
            words = sum(plan.workspace.values())
            row = replace(
                row,
                compile_ms=compile_ms,
                first_call_ms=compile_ms + first_ms,
                workspace_bytes=words * DTYPES[instance].accumulate.itemsize,
            )
            packed = bench.prepared(kernel, problem, instance, self.arrays, packed=True)
            if any(step.packs for step in plan.launches):
                both, packing = (make(kernel, problem, instance, self.arrays) for make in (bench.prepared, bench.packing))
                times, both_times = [[first_ms]] * 2 if _skips(first_ms) else bench.milliseconds_in_turn(packed, both)
                row = _timed(row, times)
                pack_ms = statistics.median(bench.milliseconds(packing))
                row = replace(row, with_packing_ms=statistics.median(both_times), pack_ms=pack_ms)
            else:
                row = _timed(row, self._times(packed, first_ms))
                row = replace(row, with_packing_ms=row.median_ms, pack_ms=0.0)
        except (KernelError, BackendError, LaunchError, MemoryError) as error:
            return replace(self._blank, contender=kernel.name, instance=instance, note=str(error).splitlines()[0])
        return replace(row, speedup=None if self._rival_ms is None or row.median_ms is None else self._rival_ms / row.median_ms)

    def rival(self, name: str) -> Row:
        """Return the row of a rival of `rivals.RIVALS`, and keep its time and its result for the kernels' rows."""
        bench, torch = self.bench, self.bench.torch
        row = replace(self._blank, contender=RIVALS[bench.backend.name][name], is_rival=True, instance=self.dtype)
        tensors = {key: as_tensor(torch, array, self.dtype) for key, array in self.arrays.items()}
        if self.layout == "channels_last":  # its own layout throughout, or its time would hold a conversion
            for key in tensors.keys() & {"weight", "grad_weight"}:
                tensors[key] = tensors[key].contiguous(memory_format=torch.channels_last_3d)
        call = torch_call(torch, self.problem, self.pass_name, tensors)
        try:
            row, result = self._rival_row(row, call, name)
            row = self._judged(row, result)
        except RuntimeError as error:  # it has no way to do it, or the memory is short
            return replace(row, note=str(error).splitlines()[0])
        if self._rival_ms is None:
            self._rival_ms, self._rival_result = row.median_ms, result
        return row

    def _rival_row(self, row: Row, call: Callable[[], Any], name: str) -> tuple[Row, Any]:
        bench, torch = self.bench, self.bench.torch
        search = name == "cudnn" and self._can_search(call)
        cudnn = name == "cudnn" or bench.backend.name == "host"
        with torch_settings(torch, self.dtype, benchmark=search, cudnn=cudnn):
            first_ms, result = bench.first(call)  # the search is in it
            row = _timed(replace(row, first_call_ms=first_ms), self._times(call, 0.0 if search else first_ms))
            if name == "cudnn" and not search:
                row = replace(row, note="over a second a call: not searched for a quicker algorithm")
            if bench.backend.name == "cuda":
                row = replace(row, workspace_bytes=_torch_workspace(torch, call))
        return row, result

    def _can_search(self, call: Callable[[], Any]) -> bool:
        """Whether a call takes less than a second: the search tries up to ten algorithms, some far slower than the first.

        NOTE: torch keeps the first algorithm it used for a problem, searched for or not, and never searches again. Only the key of
        deterministic algorithms is another one, so the trial asks for these.
        """
        with torch_settings(self.bench.torch, self.dtype, benchmark=False, deterministic=True):
            try:
                first_ms, _ = self.bench.first(call)
                if SLOW_MS < first_ms < _MUCH_TOO_SLOW_MS:  # the library may have been loading
                    first_ms, _ = self.bench.first(call)
            except RuntimeError:  # it has no deterministic one
                return True
        return first_ms <= SLOW_MS

    def _times(self, call: Callable[[], object], first_ms: float) -> list[float]:
        return [first_ms] if _skips(first_ms) else self.bench.milliseconds(call)

    def _judged(self, row: Row, result: Any) -> Row:
        """Return the row with the result's errors: over the whole tensor against the expected one, and of the sample."""
        wide = _chosen(result, self._truth.index, self.dtype)
        return replace(row, error=self._truth.error(wide), difference=None if row.is_rival else self._difference(result))

    def _difference(self, result: Any) -> float | None:
        if self.bench.backend.name == "host":
            wide = result.astype(np.float64)
            return float(np.abs(wide - self._expected).max() / max(np.abs(self._expected).max(), np.finfo(np.float32).tiny))
        if self._rival_result is None and self.bench.torch is not None:
            self._rival_result = self._library_result()
        if self._rival_result is None:
            return None
        tensor = as_tensor(self.bench.torch, result, self.dtype)
        return float((tensor - self._rival_result).abs().max().double() / self._rival_result.abs().max().double())

    def _library_result(self) -> Any:
        """Return torch's result where no rival has been timed; None where torch cannot do it."""
        torch = self.bench.torch
        tensors = {key: as_tensor(torch, array, self.dtype) for key, array in self.arrays.items()}
        with torch_settings(torch, self.dtype, benchmark=False, deterministic=True):  # a later search is then still made
            try:
                return torch_call(torch, self.problem, self.pass_name, tensors)()
            except RuntimeError:
                return None

    @cached_property
    def _expected(self) -> Any:
        return reference.run(self.pass_name, self.problem, self.arrays)

    @cached_property
    def _truth(self) -> Sample:
        return _truth(self.bench, self.problem, self.pass_name, DTYPES[self.dtype].element)


@lru_cache(maxsize=4)
def _truth(bench: Bench, problem: Problem, pass_name: str, element: str) -> Sample:
    """The same in both layouts, and for every arithmetic of one element type."""
    return sample(problem, pass_name, bench.pick(problem, pass_name, element))


def _chosen(result: Any, index: tuple[Any, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Return the indexed elements of a NumPy, CuPy or torch result as fp64."""
    if isinstance(result, np.ndarray):
        return result[index].astype(np.float64)
    if hasattr(result, "get"):  # CuPy's, whose bf16 are the integers of its bits
        import cupy

        chosen = result[tuple(cupy.asarray(i) for i in index)].get()
        return (chosen.view(DTYPES["bf16"].numpy) if dtype == "bf16" else chosen).astype(np.float64)
    import torch

    return result[tuple(torch.from_numpy(i).to(result.device) for i in index)].double().cpu().numpy()


def _torch_workspace(torch: Any, call: Callable[[], Any]) -> int:
    """Return the bytes a call of torch's takes for a moment, its result not counted."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - result.untyped_storage().nbytes())


def _skips(first_ms: float) -> bool:
    """Whether a first call took so long that it is the measurement."""
    return first_ms > _MUCH_TOO_SLOW_MS


def _timed(row: Row, times: list[float]) -> Row:
    median = statistics.median(times)
    share = None if row.floor_ms is None else row.floor_ms / median
    return replace(row, repeats=len(times), median_ms=median, low_ms=min(times), high_ms=max(times), share_of_floor=share)


def compare(
    bench: Bench,
    case: str,
    problem: Problem,
    pass_name: str,
    kernels: Sequence[Kernel],
    dtype: str,
    ceilings: Ceilings | None = None,
    layout: str = "ncdhw",
) -> list[Row]:
    """Return a row for each rival of `bench` and one for each kernel of `pass_name`; the arguments are `Contest`'s."""
    contest = Contest(bench, case, problem, pass_name, dtype, ceilings, layout)
    return [contest.rival(name) for name in bench.against] + [contest.kernel(kernel) for kernel in kernels]
