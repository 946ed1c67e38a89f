"""Measures what a call costs besides the kernel, and the memory it takes, against torch's own functional and module, on a GPU.

    python benchmarks/torch_overhead.py [RESULT.json]

Overhead: host time of one call on a tiny problem under no_grad, over many calls queued without a wait. Small problems: the time of a
call until the GPU is done, with what `algorithm="auto"` takes and with torch's own operator; where "auto" is not the slower, the limits
of what is launch-bound (`choice.is_launch_bound`) are right. Memory: the peak of a forward and backward pass above what is allocated
before it. All as medians, written with the machine, the versions and the commit.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cupy_convt3d as ct
from cupy_convt3d import torch_library
from cupy_convt3d.backends.cuda import CudaBackend
from cupy_convt3d.choice import is_launch_bound
from cupy_convt3d.lab.measure import Bench
from cupy_convt3d.lab.provenance import provenance
from cupy_convt3d.lab.rivals import torch_call
from cupy_convt3d.lab.suites import suite
from cupy_convt3d.problem import Problem

CALLS, REPEATS = 200, 20
SMALL = (
    *("n1_c4to4_i4_k3", "n1_c16to16_i4_k3_s2", "n1_c1to1_i32_k3", "n2_c16to16_i8_k2_s2", "n1_c128to8_i4_k2_s2"),
    *("n1_c16to16_i8_k3_s2", "n1_c32to32_i8_k3_s2"),  # above the limits
)
F = torch.nn.functional


def overhead_us(call: Callable[[], object], wait: bool = False) -> dict[str, float]:
    """Return the median, least and largest mean host time of `CALLS` calls in microseconds; `wait`: until the GPU is done with them."""
    times = []
    with torch.no_grad():
        for _ in range(CALLS):
            call()
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if wait:
                torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return {"median": statistics.median(times), "low": min(times), "high": max(times)}


def gpu_us(call: Callable[[], object]) -> float:
    """Return the GPU's time for one call in microseconds, without the host's: that of a CUDA graph of `CALLS` calls."""
    with torch.no_grad():
        call()
        torch.cuda.synchronize()
        graph, times = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        for _ in range(REPEATS):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / CALLS * 1e3)
    return statistics.median(times)


def small_problems() -> dict[str, dict[str, object]]:
    """Time every pass of problems below, at and above the limits, as `SMALL` has them, in each precision."""
    found: dict[str, dict[str, object]] = {}
    for name in SMALL:
        p = Problem.parse(name)
        geometry = (p.stride, p.padding, p.output_padding, p.groups, p.dilation)
        for precision in ("ieee", "tf32", "bf16"):
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            torch.backends.cudnn.conv.fp32_precision = "tf32" if precision == "tf32" else "ieee"
            x, w, g = (torch.randn(s, device="cuda", dtype=dtype) for s in (p.input_shape, p.weight_shape, p.output_shape))
            ours = {
                "fprop": lambda x=x, w=w, a=geometry: ct.conv_transpose3d(x, w, None, *a),
                "dgrad": lambda g=g, w=w, x=x, a=geometry: ct.conv_transpose3d_grad_input(g, w, x.shape, *a),
                "wgrad": lambda x=x, g=g, w=w, a=geometry: ct.conv_transpose3d_grad_weight(x, g, w.shape, *a),
            }
            for pass_name, call in ours.items():
                tensors = {"input": x, "weight": w, "grad_output": g}
                theirs = torch_call(torch, p, pass_name, tensors)
                found[f"{name} {pass_name} {precision}"] = {
                    "launch-bound": is_launch_bound(p, pass_name, x.itemsize),
                    "auto": overhead_us(call, wait=True)["median"],
                    "torch": overhead_us(theirs, wait=True)["median"],
                    "auto, GPU": gpu_us(call),
                    "torch, GPU": gpu_us(theirs),
                }
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    return found


def overheads() -> dict[str, dict[str, float]]:
    x, w = torch.randn(1, 4, 4, 4, 4, device="cuda"), torch.randn(4, 4, 3, 3, 3, device="cuda")
    b = torch.randn(4, device="cuda")
    theirs = torch.nn.ConvTranspose3d(4, 4, 3, device="cuda")
    modules = {name: ct.nn.ConvTranspose3d(4, 4, 3, device="cuda", backend=name) for name in ("cuda", None)}
    operator = torch.ops.cupy_convt3d.conv_transpose3d.default
    problem = Problem(1, 4, 4, 4, 3, bias=True)

    def deterministic() -> torch.Tensor:
        return torch_library.run("fprop", problem, "ieee", x, w, b)

    one, zero = (1, 1, 1), (0, 0, 0)
    return {
        "torch functional": overhead_us(lambda: F.conv_transpose3d(x, w, b)),
        "torch module": overhead_us(lambda: theirs(x)),
        "ours functional, our kernel": overhead_us(lambda: ct.conv_transpose3d(x, w, b, backend="cuda")),
        "ours module, our kernel": overhead_us(lambda: modules["cuda"](x)),
        "ours functional, auto": overhead_us(lambda: ct.conv_transpose3d(x, w, b)),
        "ours module, auto": overhead_us(lambda: modules[None](x)),
        "torch, deterministic as we ask it": overhead_us(deterministic),
        "ours functional, torch's operator": overhead_us(lambda: ct.conv_transpose3d(x, w, b, backend="torch")),
        "ours operator through the dispatcher": overhead_us(lambda: operator(x, w, b, one, zero, zero, 1, one, "auto", None, "cuda")),
    }


def peak_bytes(module: Any, x: torch.Tensor) -> int:
    """Return the most memory that a forward and backward pass takes above what is there before it."""

    def step() -> None:
        torch.autograd.grad(module(x).sum(), (x, *module.parameters()))

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def memory() -> dict[str, dict[str, int]]:
    found = {}
    cases = {**suite("layers"), "kb72": suite("kernelbench")["kb72"], "kb77": suite("kernelbench")["kb77"]}
    for name, p in cases.items():
        arguments = (p.in_channels, p.out_channels, p.kernel_size, p.stride, p.padding, p.output_padding, p.groups, True, p.dilation)
        x = torch.randn(p.input_shape, device="cuda", requires_grad=True)
        makers = {
            "torch": lambda arguments=arguments: torch.nn.ConvTranspose3d(*arguments, device="cuda"),
            "ours, our kernels": lambda arguments=arguments: ct.nn.ConvTranspose3d(*arguments, device="cuda", backend="cuda"),
            "ours, auto": lambda arguments=arguments: ct.nn.ConvTranspose3d(*arguments, device="cuda"),
        }
        found[name] = {who: peak_bytes(make(), x) for who, make in makers.items()}
        found[name]["packed weights"] = 2 * 4 * torch.Size(p.weight_shape).numel()
        torch.cuda.empty_cache()
    return found


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("torch_overhead: needs a CUDA GPU")
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    result = {
        "provenance": provenance(Bench(CudaBackend())),
        "overhead_us": overheads(),
        "small_problems_us": small_problems(),
        "peak_bytes": memory(),
    }
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results" / "torch-overhead.json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name, times in result["overhead_us"].items():
        print(f"{name:40s} {times['median']:7.1f} us  ({times['low']:.1f} to {times['high']:.1f})")
    for name, times in result["small_problems_us"].items():
        print(f"{name:40s} " + ", ".join(f"{who} {t if isinstance(t, bool) else format(t, '.1f')}" for who, t in times.items()))
    for name, peaks in result["peak_bytes"].items():
        print(f"{name:40s} " + ", ".join(f"{who} {size / 2**20:.1f} MiB" for who, size in peaks.items()))


if __name__ == "__main__":
    main()
