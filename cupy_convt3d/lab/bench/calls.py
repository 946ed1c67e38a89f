"""A call as a user makes it, on torch tensors with default settings, beside torch's own operator on the same tensors."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ... import ops
from ...backends.base import Backend, output_layout
from ...choice import asked_of_kernels, choose, given_to, instance_for
from ...dtypes import DTYPES
from ...errors import BackendError, KernelError, LaunchError
from ...kernel import Kernel
from ...problem import Problem
from ...registry import kernels as registered
from ...trials import no_trials
from ..population import Layer
from .measure import SLOW_MS, Bench, Ceilings, Row
from .rivals import torch_call, torch_settings

TORCH, AUTO, KERNEL, SEARCHED = "torch", "auto", "kernel", "searched"
_TINY = 1e-30


@dataclass(frozen=True)
class CallRow(Row):
    """One contender's calls. `ran` is the kernel that computed them, or "torch"; of a "searched" one `speedup` is against auto.

    Contenders are "torch", "auto" (no argument but the layer's), "kernel" (what auto takes where torch's operator is ruled out),
    "searched" (the best that a search found), and kernels by name.
    """

    family: str = ""
    ran: str = ""


@dataclass(frozen=True)
class Contender:
    """Who is asked.

    Attributes:
        settings: the arguments of the call beside the layer's.
        kernel, instance: what computes it; None where torch does.
        rivals: what a trial at auto's first call times beside torch.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    kernel: Kernel | None = None
    instance: str = ""
    note: str = ""
    rivals: tuple[tuple[Kernel, str], ...] = ()

    @property
    def ran(self) -> str:
        return TORCH if self.kernel is None else self.kernel.name

    def compiled(self, problem: Problem, pass_name: str, backend: Backend) -> list[tuple[Kernel, Problem, str]]:
        """Return what the first call compiles, side by side: kernels, what they are given of the problem, and instances."""
        own = self.rivals or (() if self.kernel is None else ((self.kernel, self.instance),))
        if self.name not in (AUTO, KERNEL):  # a kernel that is named is given what it is asked
            return [(kernel, problem, instance) for kernel, instance in own]
        card = (backend.arch, backend.limits)
        return [(kernel, given_to(kernel, instance, problem, pass_name, *card), instance) for kernel, instance in own]


def contenders(
    backend: Backend,
    wanted: str | Sequence[Kernel],
    problem: Problem,
    pass_name: str,
    precision: str,
    layout: str,
    with_trial: bool = False,
) -> list[Contender]:
    """Return auto and the kernels that are measured beside it.

    Args:
        wanted: "auto" (what auto takes where torch's operator is ruled out), "all" (each kernel that can), or kernels.
        with_trial: whether auto's first call holds a trial where it has one to hold.
    """
    common = {"fp32_precision": precision} if precision == "tf32x3" else {}  # torch has no word for it
    where = {**common, "backend": backend.name}
    try:
        taken = choose(backend, pass_name, asked_of_kernels(problem, pass_name), precision, layout)
        kernel, instance, torchs = taken.kernel, taken.instance, taken.for_torch
        to_torch = backend.name == "host" or torchs.left_to_torch is not None
        own = (None, "") if to_torch else (torchs.kernel, torchs.instance)
        rivals = tuple((one.kernel, one.instance) for one in taken.rivals) if with_trial else ()
    except KernelError:
        kernel, instance, own, rivals = None, "", (None, ""), ()
    found = [Contender(AUTO, common, *own, rivals=rivals)]
    if wanted == AUTO:
        return found if kernel is None else [*found, Contender(KERNEL, where, kernel, instance)]
    named = registered(pass_name).values() if isinstance(wanted, str) else wanted
    for one in (one for one in named if one.pass_name == pass_name):
        can, _ = instance_for(one, problem, precision, backend)
        if can is not None:
            found.append(Contender(one.name, {**where, "algorithm": one}, one, can))
    return found


class LayerTensors:
    """The tensors of one layer, pass and element type, standard normal, on the backend's device; and what the pass should give."""

    def __init__(self, bench: Bench, problem: Problem, pass_name: str, element: str) -> None:
        self.bench, self.problem, self.pass_name, self.element = bench, problem, pass_name, element
        torch = bench.torch
        device = "cuda" if bench.backend.name == "cuda" else "cpu"
        names = {"fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}
        dtype = getattr(torch, names.get(element, "float32"))
        generator = torch.Generator(device).manual_seed(0)
        shapes, self.written = problem.shapes(pass_name)
        self.tensors = {
            name: torch.randn(shape, generator=generator, device=device).to(dtype)
            for name, shape in shapes.items()
            if name != "output"  # a gradient that is written lends torch its shape
        }

    def laid_out(self, layout: str) -> dict[str, Any]:
        """Return the tensors in a layout, the weight with them, as `module.to(memory_format=...)` has them."""
        if layout == "ncdhw":
            return self.tensors
        last = self.bench.torch.channels_last_3d
        return {name: t.contiguous(memory_format=last) if t.dim() == 5 else t for name, t in self.tensors.items()}

    @cached_property
    def expected(self) -> tuple[Any, float]:
        """torch's result in fp32 (of fp64 tensors in fp64), and the milliseconds of a call of it.

        NOTE: torch keeps the first algorithm it used for a problem. That of deterministic ones has a key of its own, so a search is
        still made when torch is timed.
        """
        torch = self.bench.torch
        wide = {name: t if self.element == "fp64" else t.float() for name, t in self.tensors.items()}
        call = torch_call(torch, self.problem, self.pass_name, wide)
        try:
            with torch_settings(torch, "fp32", benchmark=False, deterministic=True):
                elapsed_ms, result = self.bench.first(call)
                if elapsed_ms > SLOW_MS:  # the library may have been loading
                    elapsed_ms, result = self.bench.first(call)
        except RuntimeError:  # cuDNN has no deterministic one
            with torch_settings(torch, "fp32", cudnn=False):
                return call(), 0.0
        return result, elapsed_ms

    def errors(self, result: Any) -> tuple[float, float]:
        """Return the largest difference from the expected result over its largest value, and the norms' ratio; NaN shows."""
        expected, _ = self.expected
        norm = self.bench.torch.linalg.vector_norm
        off = result.to(expected.dtype) - expected
        return tuple(float(norm(off, p)) / max(float(norm(expected, p)), _TINY) for p in (float("inf"), 2))  # type: ignore[return-value]


class CallContest:
    """One layer, pass, precision and layout.

    Args:
        tensors: of the layer, in the precision's element type.
        precision, layout: as everywhere.
        ceilings: None: no floors.
        with_trial: whether auto's first call may hold a trial; else it goes by the database and by predictions.
    """

    def __init__(
        self, layer: Layer, tensors: LayerTensors, precision: str, layout: str, ceilings: Ceilings | None, with_trial: bool = False
    ) -> None:
        self.bench, self.made, self.precision, self.layout = tensors.bench, tensors, precision, layout
        self.problem, self.pass_name, self.with_trial = tensors.problem, tensors.pass_name, with_trial
        self.tensors = tensors.laid_out(layout)
        self.blank = CallRow(
            layer.name,
            str(self.problem),
            self.pass_name,
            contender="",
            is_rival=False,
            dtype=precision,
            flop=self.problem.flop,
            floor_ms=None if ceilings is None else ceilings.floor_ms(self.problem, self.pass_name, precision),
            bytes_moved=self.problem.compulsory_bytes(DTYPES[precision].itemsize, self.pass_name),
            layout=layout,
            family=layer.family,
        )

    def rows(self, asked: Sequence[Contender], with_torch: bool = True) -> list[CallRow]:
        """Return torch's row and one for each contender: each is called once and judged, then all are timed in turn."""
        bench = self.bench
        _, trial_ms = self.made.expected
        calls = {TORCH: torch_call(bench.torch, self.problem, self.pass_name, self.tensors)} if with_torch else {}
        calls |= {contender.name: self._ours(contender) for contender in asked}
        blanks = {one.name: replace(self.blank, contender=one.name, ran=one.ran, instance=one.instance, note=one.note) for one in asked}
        if with_torch:
            note = "" if trial_ms <= SLOW_MS else "over a second a call: not searched for a quicker algorithm"
            rival = replace(self.blank, contender=TORCH, is_rival=True, ran=TORCH, instance=self.precision, note=note)
            blanks = {TORCH: rival} | blanks
        compile_ms = {one.name: self._compile_ms(one) for one in asked}
        with (
            torch_settings(bench.torch, self.precision, benchmark=trial_ms <= SLOW_MS),
            nullcontext() if self.with_trial else no_trials(),
        ):
            rows = {}
            for name, call in calls.items():
                rows[name] = self._first(blanks[name], call, compile_ms.get(name, 0.0))
                if rows[name].first_call_ms is None and not bench.is_alive():
                    lost = "not called: a call before it has cost the GPU's context"
                    return [*rows.values(), *(replace(blanks[left], note=lost) for left in calls if left not in rows)]
            if AUTO in rows and any(one.rivals for one in asked):
                winner, *_ = contenders(bench.backend, AUTO, self.problem, self.pass_name, self.precision, self.layout)
                rows[AUTO] = replace(rows[AUTO], ran=winner.ran, instance=winner.instance)
            able = [name for name, row in rows.items() if row.first_call_ms is not None]
            times = bench.milliseconds_in_turn(*(calls[name] for name in able)) if able else []
        for name, found in zip(able, times, strict=True):
            rows[name] = _timed(rows[name], found)
        return list(rows.values())

    def _ours(self, contender: Contender) -> Callable[[], Any]:
        p, tensors = self.problem, self.tensors
        settings = {
            **{"stride": p.stride, "padding": p.padding, "output_padding": p.output_padding},
            **{"groups": p.groups, "dilation": p.dilation, **contender.settings},
        }
        if self.pass_name == "fprop":
            return partial(ops.conv_transpose3d, tensors["input"], tensors["weight"], tensors.get("bias"), **settings)
        if self.pass_name == "dgrad":
            return partial(ops.conv_transpose3d_grad_input, tensors["grad_output"], tensors["weight"], p.input_shape, **settings)
        return partial(ops.conv_transpose3d_grad_weight, tensors["input"], tensors["grad_output"], p.weight_shape, **settings)

    def _compile_ms(self, contender: Contender) -> float:
        """Return what compiling ahead took for a contender."""
        bench = self.bench
        compiled = contender.compiled(self.problem, self.pass_name, bench.backend)
        layout = output_layout(self.problem, self.layout)
        plans = ((kernel, instance, bench.plan(kernel, problem, instance, layout)) for kernel, problem, instance in compiled)
        return max((bench.build_ms.get(bench.backend.instance(*one), 0.0) for one in plans), default=0.0)

    def _first(self, row: CallRow, call: Callable[[], Any], compile_ms: float) -> CallRow:
        shapes, written = self.problem.shapes(self.pass_name)
        first = next(iter(self.tensors.values()))
        # The allocator hands this memory to the result: what is not written is NaN, not an earlier contender's.
        first.new_full(shapes[written], float("nan"))
        try:
            first_ms, result = self.bench.first(call)
        except (KernelError, BackendError, LaunchError, MemoryError, RuntimeError) as error:
            return replace(row, note=(str(error) or type(error).__name__).splitlines()[0])
        difference, error_norm = self.made.errors(result)
        first_ms += compile_ms
        return replace(row, first_call_ms=first_ms, compile_ms=compile_ms, difference=difference, error=error_norm)


def _timed(row: CallRow, times: Sequence[float]) -> CallRow:
    median = statistics.median(times)
    share = None if row.floor_ms is None else row.floor_ms / median
    return replace(row, repeats=len(times), median_ms=median, low_ms=min(times), high_ms=max(times), share_of_floor=share)
