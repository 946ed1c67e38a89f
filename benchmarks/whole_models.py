"""Times whole models as torch has them and after `ct.nn.convert`, inference and training, on a GPU.

    python benchmarks/whole_models.py [RESULT.json] [--models NAME,...] [--layout ncdhw,channels_last]

Both copies have the same parameters. They take turns, step by step, so that a warm card or a busy host slows both alike; each step is
timed by CUDA events around all of it, the host's part too. `cudnn.benchmark` is on. A training step is forward, loss, backward and SGD;
in bf16 forward and loss run under autocast. Figures are medians in milliseconds; `ratio` is converted / torch, with the 95% interval of
that median by resampling: steps are timed until it is narrower than 0.02, for 5 s at most. The outputs of both are compared before
anything is timed. Needs monai for two of the models.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cupy_convt3d as ct
from cupy_convt3d import plans, torch_layer
from cupy_convt3d.backends.cuda import CudaBackend
from cupy_convt3d.lab.bench.measure import Bench
from cupy_convt3d.lab.bench.provenance import provenance, write_json

WARM_UP, LEAST, MOST, BUDGET_MS = 4, 20, 600, 5000.0
NARROW = 0.02  # an interval of the ratio that is good enough
PRECISIONS = ("fp32", "tf32", "bf16")
nn = torch.nn


def gan_generator() -> tuple[nn.Module, tuple[int, ...]]:
    """The generator of 3D-GAN (Wu et al. 2016): 200 numbers to 64^3 voxels."""
    sizes = (200, 512, 256, 128, 64)
    layers: list[nn.Module] = []
    for number, (wide, narrow) in enumerate(itertools.pairwise(sizes)):
        stride, padding = (1, 0) if number == 0 else (2, 1)
        layers += [nn.ConvTranspose3d(wide, narrow, 4, stride, padding, bias=False), nn.BatchNorm3d(narrow), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose3d(64, 1, 4, 2, 1), nn.Sigmoid()), (32, 200, 1, 1, 1)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(), nn.Conv3d(channels, channels, 3, padding=1), nn.ReLU(), nn.Conv3d(channels, channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def vq_vae() -> tuple[nn.Module, tuple[int, ...]]:
    """An encoder and decoder as of VQ-VAE (van den Oord et al. 2017) in 3D, without the codebook."""
    down = [nn.Conv3d(1, 64, 4, 2, 1), nn.ReLU(), nn.Conv3d(64, 128, 4, 2, 1), Residual(128), Residual(128)]
    up = [Residual(128), Residual(128), nn.ReLU(), nn.ConvTranspose3d(128, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose3d(64, 1, 4, 2, 1)]
    return nn.Sequential(*down, *up), (2, 1, 96, 96, 96)


def unet() -> tuple[nn.Module, tuple[int, ...]]:
    """MONAI's U-Net in the size of its tutorials."""
    from monai.networks.nets import UNet

    sizes = {"channels": (16, 32, 64, 128, 256), "strides": (2, 2, 2, 2), "num_res_units": 2}
    return UNet(spatial_dims=3, in_channels=1, out_channels=2, norm="BATCH", **sizes), (2, 1, 96, 96, 96)


def vnet() -> tuple[nn.Module, tuple[int, ...]]:
    """MONAI's V-Net (Milletari et al. 2016)."""
    from monai.networks.nets import VNet

    return VNet(spatial_dims=3, in_channels=1, out_channels=2), (2, 1, 128, 128, 64)


def tiny() -> tuple[nn.Module, tuple[int, ...]]:
    """One layer that costs its launches: what a call costs the host."""
    return nn.Sequential(nn.ConvTranspose3d(4, 4, 3, 2, 1, 1)), (1, 4, 4, 4, 4)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "3D-GAN generator": gan_generator,
    "VQ-VAE": vq_vae,
    "MONAI UNet": unet,
    "MONAI VNet": vnet,
    "tiny layer": tiny,
}


def steps(model: nn.Module, x: torch.Tensor, precision: str, training: bool) -> Callable[[], torch.Tensor]:
    """Return a step of inference, or of training on the mean square of the output."""
    cast = (lambda: torch.autocast("cuda", torch.bfloat16)) if precision == "bf16" else nullcontext
    model.train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def infer() -> torch.Tensor:
        with torch.no_grad(), cast():
            return model(x)

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        with cast():
            y = model(x)
            loss = y.float().square().mean()
        loss.backward()
        optimizer.step()
        return y.detach()

    return train if training else infer


def in_turn_ms(calls: list[Callable[[], object]]) -> list[list[float]]:
    """Return the times of each call, all taking turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(WARM_UP):
        for call in calls:
            call()
    torch.cuda.synchronize()
    while not is_enough(times):
        for found, call in zip(times, calls, strict=True):
            torch.cuda.synchronize()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            stop.record()
            stop.synchronize()
            found.append(start.elapsed_time(stop))
    return times


def is_enough(times: list[list[float]]) -> bool:
    """Whether so many times of two calls say how they compare."""
    count = len(times[0])
    if count % LEAST or not count:
        return False
    low, high = interval(*times)
    return high - low < NARROW or count >= MOST or sum(map(sum, times)) >= BUDGET_MS


def interval(theirs: list[float], ours: list[float]) -> tuple[float, float]:
    """Return the 95% interval of the ratio of medians, by resampling."""
    generator = np.random.default_rng(0)
    draws = [np.median(generator.choice(values, (1000, len(values))), axis=1) for values in (ours, theirs)]
    return tuple(float(q) for q in np.quantile(draws[0] / draws[1], (0.025, 0.975)))  # type: ignore[return-value]


def row(name: str, precision: str, layout: str, training: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model, shape = MODELS[name]()
    memory_format = torch.channels_last_3d if layout == "channels_last" else torch.contiguous_format
    model = model.cuda().to(memory_format=memory_format)
    x = torch.randn(shape, device="cuda").to(memory_format=memory_format)
    converted = copy.deepcopy(model)
    swapped = ct.nn.convert(converted).swapped
    setting = "tf32" if precision == "tf32" else "ieee"
    torch.backends.cudnn.conv.fp32_precision = torch.backends.cuda.matmul.fp32_precision = setting
    calls = [steps(one, x, precision, training) for one in (model, converted)]
    outputs = []
    for call in calls:
        torch.manual_seed(1)  # of dropout
        outputs.append(call().float())
    wanted, found = outputs
    difference = float((found - wanted).norm() / wanted.norm())
    plans.plans.clear()
    calls[1]()
    made = [route.plan for route in plans.plans.values() if isinstance(route, torch_layer.Route) and route.plan is not None]
    ran = sorted(plan.kernel.name for plan in made if plan.kernel is not None)
    theirs, ours = in_turn_ms(calls)  # type: ignore[arg-type]
    medians = statistics.median(theirs), statistics.median(ours)
    return {
        **{"model": name, "input": list(shape), "layers": len(swapped), "precision": precision, "layout": layout},
        **{"mode": "training" if training else "inference", "torch_ms": medians[0], "converted_ms": medians[1]},
        **{"ratio": medians[1] / medians[0], "interval": interval(theirs, ours), "repeats": len(ours)},
        **{"difference": difference, "kernels": ran},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path(__file__).parent / "results" / "whole-models.json")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), metavar="NAME,...")
    parser.add_argument("--layout", type=lambda text: text.split(","), default=["ncdhw", "channels_last"], metavar="NAME,...")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("whole_models: needs a CUDA GPU")
    torch.backends.cudnn.benchmark = True
    result: dict[str, Any] = {"provenance": provenance(Bench(CudaBackend())), "rows": []}
    for name in options.models:
        for layout in options.layout:
            for precision in PRECISIONS:
                for training in (False, True):
                    found = row(name, precision, layout, training)
                    result["rows"].append(found)
                    write_json(options.out, result)
                    print(
                        f"{name:18s} {layout:14s} {precision:5s} {found['mode']:10s} {found['torch_ms']:8.3f} → "
                        f"{found['converted_ms']:8.3f} ms  {found['ratio']:.3f} ({found['interval'][0]:.3f} to "
                        f"{found['interval'][1]:.3f})  difference {found['difference']:.1e}  {', '.join(found['kernels'])}",
                        flush=True,
                    )
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
