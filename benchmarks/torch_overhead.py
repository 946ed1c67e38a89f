"""Measures what a call costs besides the kernel, and the memory it takes, against torch's own functional and module, on a GPU.

    python benchmarks/torch_overhead.py [RESULT.json]

Overhead: host time of one call on a tiny problem under no_grad, over many calls queued without a wait. Memory: the peak of a forward
and backward pass above what is allocated before it. Both as medians, written with the machine, the versions and the commit.
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
from cupy_convt3d.backends.cuda import CudaBackend
from cupy_convt3d.lab.measure import Bench
from cupy_convt3d.lab.provenance import provenance
from cupy_convt3d.lab.suites import suite

CALLS, REPEATS = 200, 50
F = torch.nn.functional


def overhead_us(call: Callable[[], object]) -> dict[str, float]:
    """Return the median, least and largest mean host time of `CALLS` calls in microseconds."""
    times = []
    with torch.no_grad():
        for _ in range(CALLS):
            call()
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times.append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return {"median": statistics.median(times), "low": min(times), "high": max(times)}


def overheads() -> dict[str, dict[str, float]]:
    x, w = torch.randn(1, 4, 4, 4, 4, device="cuda"), torch.randn(4, 4, 3, 3, 3, device="cuda")
    b = torch.randn(4, device="cuda")
    theirs = torch.nn.ConvTranspose3d(4, 4, 3, device="cuda")
    modules = {name: ct.nn.ConvTranspose3d(4, 4, 3, device="cuda", backend=name) for name in ("cuda", None)}
    operator = torch.ops.cupy_convt3d.conv_transpose3d.default
    one, zero = (1, 1, 1), (0, 0, 0)
    return {
        "torch functional": overhead_us(lambda: F.conv_transpose3d(x, w, b)),
        "torch module": overhead_us(lambda: theirs(x)),
        "ours functional, our kernel": overhead_us(lambda: ct.conv_transpose3d(x, w, b, backend="cuda")),
        "ours module, our kernel": overhead_us(lambda: modules["cuda"](x)),
        "ours functional, auto": overhead_us(lambda: ct.conv_transpose3d(x, w, b)),
        "ours module, auto": overhead_us(lambda: modules[None](x)),
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
        "peak_bytes": memory(),
    }
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results" / "torch-overhead.json")
    path.write_text(json.dumps(result, indent=1) + "\n")
    for name, times in result["overhead_us"].items():
        print(f"{name:40s} {times['median']:7.1f} us  ({times['low']:.1f} to {times['high']:.1f})")
    for name, peaks in result["peak_bytes"].items():
        print(f"{name:40s} " + ", ".join(f"{who} {size / 2**20:.1f} MiB" for who, size in peaks.items()))


if __name__ == "__main__":
    main()
