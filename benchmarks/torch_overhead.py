"""Measures what a call costs besides the kernel, and the memory it takes, against torch's own functional and module, on a GPU.

    python benchmarks/torch_overhead.py [RESULT.json [overhead_us,in_a_model_us,small_problems_us,peak_bytes]]

Overhead: host time of one call on a tiny problem, over many calls queued without a wait. In a model: of one forward of a layer that
auto takes a kernel for, with a training step of other layers before each, which leaves the caches cold. Small problems: the time of a
call until the GPU is done, with what `algorithm="auto"` takes and with torch's own operator. Memory: the peak of a forward and backward
pass above what is allocated before it. All as medians, written with the machine, the versions and the commit.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import cupy_convt3d as ct
from cupy_convt3d.backends.cuda import CudaBackend
from cupy_convt3d.choice import is_launch_bound
from cupy_convt3d.lab.bench.measure import Bench
from cupy_convt3d.lab.bench.provenance import provenance, write_json
from cupy_convt3d.lab.bench.rivals import torch_call
from cupy_convt3d.lab.suites import suite
from cupy_convt3d.problem import Problem

CALLS, REPEATS = 200, 20
SMALL = (
    *("n1_c4to4_i4_k3", "n1_c16to16_i4_k3_s2", "n1_c1to1_i32_k3", "n2_c16to16_i8_k2_s2", "n1_c128to8_i4_k2_s2"),
    *("n1_c16to16_i8_k3_s2", "n1_c32to32_i8_k3_s2"),  # above the limits
)
F = torch.nn.functional


def overhead_us(calls: dict[str, Callable[[], object]], wait: bool = False, recorded: bool = False) -> dict[str, dict[str, float]]:
    """Return the median, least and largest mean host time of `CALLS` calls of each in microseconds; `wait`: until the GPU is done.

    They take turns, so that a busy host slows all alike; so does who begins.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.set_grad_enabled(recorded):
        for call in calls.values():
            for _ in range(CALLS):
                call()
        for number in range(REPEATS):
            order = list(calls) if number % 2 == 0 else list(reversed(calls))
            for name in order:
                call = calls[name]
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                if wait:
                    torch.cuda.synchronize()
                times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    torch.cuda.synchronize()
    return {name: {"median": statistics.median(own), "low": min(own), "high": max(own)} for name, own in times.items()}


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
                waited = overhead_us({"auto": call, "torch": theirs}, wait=True)
                found[f"{name} {pass_name} {precision}"] = {
                    "launch-bound": is_launch_bound(p, pass_name, x.itemsize),
                    **{who: times["median"] for who, times in waited.items()},
                    "auto, GPU": gpu_us(call),
                    "torch, GPU": gpu_us(theirs),
                }
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    return found


def overheads() -> dict[str, dict[str, float]]:
    """Time every way to call a tiny layer: forward without a gradient, and forward and backward, in fp32 and under bf16 autocast."""
    shape = (1, 4, 4, 4, 4)
    theirs = torch.nn.ConvTranspose3d(4, 4, 3, device="cuda")
    layers = {"torch": theirs}
    for name, backend in (("auto", None), ("our kernels", "cuda")):
        layers[name] = ct.nn.ConvTranspose3d(4, 4, 3, device="cuda", backend=backend)
    found: dict[str, dict[str, float]] = {}
    for cast in (False, True):
        context = partial(torch.autocast, "cuda", torch.bfloat16) if cast else nullcontext
        gradient = torch.randn(1, 4, 6, 6, 6, device="cuda", dtype=torch.bfloat16 if cast else torch.float32)
        for way in ("functional", "module", "compiled"):
            forwards: dict[str, Callable[[], object]] = {}
            steps: dict[str, Callable[[], object]] = {}
            for name, layer in layers.items():
                call: Any = layer
                if way == "compiled":
                    call = torch.compile(layer, fullgraph=True)
                elif way == "functional":
                    ours = partial(ct.conv_transpose3d, backend=getattr(layer, "backend", None))
                    function = F.conv_transpose3d if name == "torch" else ours
                    call = partial(lambda x, f, m: f(x, m.weight, m.bias), f=function, m=layer)
                x = torch.randn(shape, device="cuda")
                leaf = x.clone().requires_grad_()

                def forward(call: Any = call, x: torch.Tensor = x, context: Any = context) -> None:
                    with torch.no_grad(), context():
                        call(x)

                def step(call: Any = call, x: torch.Tensor = leaf, context: Any = context, g: torch.Tensor = gradient) -> None:
                    with context():
                        y = call(x)
                    y.backward(g)

                label = f"{name}, {way}{', autocast' if cast else ''}"
                forwards[f"forward: {label}"], steps[f"forward and backward: {label}"] = forward, step
            found |= overhead_us(forwards) | overhead_us(steps, recorded=True)
    return found


def in_a_model() -> dict[str, dict[str, float]]:
    """Time forwards of torch's layer and ours, recorded and not, in turn, each behind a training step of convolutions, norms and ReLUs."""
    blocks = [(torch.nn.Conv3d(16, 16, 3, padding=1), torch.nn.BatchNorm3d(16), torch.nn.ReLU()) for _ in range(6)]
    others = torch.nn.Sequential(*(layer for block in blocks for layer in block)).cuda()
    optimizer, volume = torch.optim.SGD(others.parameters(), lr=1e-6), torch.randn(1, 16, 16, 16, 16, device="cuda")
    x = torch.randn(2, 128, 24, 24, 24, device="cuda")
    layers = {"torch": torch.nn.ConvTranspose3d(128, 64, 4, 2, 1).cuda(), "auto": ct.nn.ConvTranspose3d(128, 64, 4, 2, 1).cuda()}
    found = {}
    benchmark, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    for precision in ("tf32", "bf16"):
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        context = partial(torch.autocast, "cuda", torch.bfloat16) if precision == "bf16" else nullcontext
        times: dict[str, list[float]] = {f"{way}: {name}, {precision}": [] for way in ("recorded", "alone") for name in layers}
        for number in range(5 + REPEATS * 5):
            for label in times if number % 2 else reversed(times):
                way, name = label.split(",")[0].split(": ")
                optimizer.zero_grad()
                others(volume).square().mean().backward()
                optimizer.step()
                torch.cuda.synchronize()
                with torch.set_grad_enabled(way == "recorded"), context():
                    start = time.perf_counter()
                    layers[name](x)
                    times[label].append((time.perf_counter() - start) * 1e6)
        kept = {label: own[5:] for label, own in times.items()}
        found |= {label: {"median": statistics.median(own), "low": min(own), "high": max(own)} for label, own in kept.items()}
    torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.benchmark = "ieee", benchmark
    return found


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
    path = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "results" / "torch-overhead.json")
    parts = {"overhead_us": overheads, "in_a_model_us": in_a_model, "small_problems_us": small_problems, "peak_bytes": memory}
    chosen = sys.argv[2].split(",") if len(sys.argv) > 2 else list(parts)
    result: dict[str, Any] = {"provenance": provenance(Bench(CudaBackend()))} | {name: {} for name in parts}
    result |= {name: parts[name]() for name in chosen}
    write_json(path, result)
    for name, times in (result["overhead_us"] | result["in_a_model_us"]).items():
        print(f"{name:60s} {times['median']:7.1f} us  ({times['low']:.1f} to {times['high']:.1f})")
    for name, times in result["small_problems_us"].items():
        print(f"{name:40s} " + ", ".join(f"{who} {t if isinstance(t, bool) else format(t, '.1f')}" for who, t in times.items()))
    for name, peaks in result["peak_bytes"].items():
        print(f"{name:40s} " + ", ".join(f"{who} {size / 2**20:.1f} MiB" for who, size in peaks.items()))


if __name__ == "__main__":
    main()
