"""Real models: MONAI's U-Net trained with and without `convert`, and DistributedDataParallel."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

import cupy_convt3d as ct

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow
STEPS = 4


def unet(device: str) -> Any:
    networks = pytest.importorskip("monai.networks.nets")
    torch.manual_seed(0)
    return networks.UNet(
        spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, norm="BATCH"
    ).to(device)


def train(model: Any, x: torch.Tensor, target: torch.Tensor, cast: Callable[[], Any] | None = None) -> list[float]:
    """Return the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if cast is None:
            loss = torch.nn.functional.cross_entropy(model(x), target)
        else:
            with cast():
                loss = torch.nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


CASES = [
    pytest.param("cpu", "host", id="host"),
    pytest.param("cuda", "cuda", marks=pytest.mark.gpu, id="cuda"),
    pytest.param("cuda", None, marks=pytest.mark.gpu, id="auto"),
]


@pytest.mark.parametrize(("device", "backend"), CASES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=["ncdhw", "channels_last_3d"])
def test_monai_unet_learns_the_same(device: str, backend: str | None, layout: torch.memory_format, ieee: None) -> None:
    size = 16 if device == "cpu" else 32
    theirs = unet(device).to(memory_format=layout)
    ours = copy.deepcopy(theirs)
    done = ct.nn.convert(ours, backend=backend)
    assert len(done.swapped) == 2, done
    assert not done.left
    torch.manual_seed(1)
    x = torch.randn(2, 1, size, size, size, device=device).to(memory_format=layout)
    target = (x[:, 0] > 0.3).long()
    wanted, found = train(theirs, x, target), train(ours, x, target)
    assert wanted[-1] < 0.95 * wanted[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("device", "backend"), CASES)
def test_monai_unet_learns_the_same_under_autocast(device: str, backend: str | None) -> None:
    theirs = unet(device)
    ours = copy.deepcopy(theirs)
    ct.nn.convert(ours, backend=backend)
    torch.manual_seed(1)
    x = torch.randn(2, 1, 16, 16, 16, device=device)
    target = (x[:, 0] > 0.3).long()
    wanted, found = (train(model, x, target, lambda: torch.autocast(device, torch.bfloat16)) for model in (theirs, ours))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=2e-2, atol=0)


def net() -> Any:
    torch.manual_seed(0)
    layers = (torch.nn.ConvTranspose3d(2, 4, 3, stride=2), torch.nn.ReLU(), torch.nn.ConvTranspose3d(4, 1, 2, bias=False))
    model = torch.nn.Sequential(*layers).double()
    assert ct.nn.convert(model, backend="host").swapped == ("0", "2")
    return model


def batch() -> torch.Tensor:
    return torch.randn(4, 2, 3, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def member(rank: int, port: int, results: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(net())
    model(batch()[2 * rank : 2 * rank + 2]).square().mean().backward()
    results[rank] = [parameter.grad.tolist() for parameter in model.parameters()]
    torch.distributed.destroy_process_group()


def test_two_processes_have_the_gradients_of_one() -> None:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with torch.multiprocessing.get_context("spawn").Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.spawn(member, (port, results), nprocs=2)
        both = [results[rank] for rank in range(2)]
    alone = net()
    alone(batch()).square().mean().backward()
    for gradients in both:
        for found, parameter in zip(gradients, alone.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), parameter.grad)
