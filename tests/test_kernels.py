"""Every kernel x backend x kind of tensors: edge problems and random ones, against the NumPy scatter."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_convt3d.backends.base import Backend
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.lab.strategies import EDGE_PROBLEMS, problems
from cupy_convt3d.lab.tensors import WIDE
from cupy_convt3d.lab.verify import verify
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels

BACKENDS: dict[str, Backend] = {}
CASES = [(name, dtype) for name, kernel in kernels().items() for dtype in kernel.dtypes]
KINDS = dict.fromkeys(WIDE, ("exact", "exact_wide", "random"))

# Where peers have failed; those that fit on the host.
PEERS = {
    "cuDNN illegal instruction (Paddle#70838)": "n9_c9to1_i9_k8_s4x3x1_p8x0x8_d2x1x2",
    "seven of eight classes get no tap (MedNeXt)": "n1_c4to4_i5_k1_s2",
    "out_pad >= stride under dilation (pytorch#56328)": "n1_c2to3_i4_k3_op2_d3",
    "channel multiplier (Paddle#79504)": "n1_c6to12_i5_k3_s2_g6",
    "depthwise (pytorch#37406), fewer channels": "n1_c16to16_i4_k7_s2_p3_g16",
    "pad = k - 1 (VideoGPT)": "n1_c3to4_i4_k4_s2_p3",
    "one voxel more than one tap (mxnet#13135)": "n1_c1to1_i2_k3_p1",
    "k(1,3,3) s(1,2,2) p(0,1,1) (pytorch#70518), fewer channels": "n2_c4to4_i6x5x5_k1x3x3_s1x2x2_p0x1x1",
}


@pytest.fixture
def device(backend: str) -> Backend:
    """The backend of that name; one for all tests, so that an instance is loaded once."""
    if backend not in BACKENDS:
        from cupy_convt3d.backends.cuda import CudaBackend

        BACKENDS[backend] = HostBackend() if backend == "host" else CudaBackend()
    return BACKENDS[backend]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_edges(name: str, dtype: str, device: Backend) -> None:
    kernel = kernels()[name]
    for problem in EDGE_PROBLEMS:
        for kind in KINDS.get(dtype, ("exact", "random")):
            outcome = verify(device, kernel, problem, dtype, kind, seed=1)
            assert outcome.ok, f"{name} {problem} {dtype} {kind}: {outcome.message}"


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_random_problems(name: str, dtype: str, device: Backend) -> None:
    kernel = kernels()[name]

    @settings(max_examples=25, deadline=None)
    @given(problems(kernel.pass_name), st.sampled_from(KINDS.get(dtype, ("exact", "random"))), st.integers(0, 2**20))
    def run(problem: Problem, kind: str, seed: int) -> None:
        outcome = verify(device, kernel, problem, dtype, kind, seed)
        assert outcome.ok, f"{name} {problem} {dtype} {kind} seed {seed}: {outcome.message}"

    run()


@pytest.mark.parametrize("name", kernels())
@pytest.mark.parametrize("peer", PEERS)
def test_where_peers_failed(name: str, peer: str, device: Backend) -> None:
    problem = Problem.parse(PEERS[peer])
    outcome = verify(device, kernels()[name], problem, "fp32", "exact", seed=2)
    assert outcome.ok, outcome.message


@pytest.mark.parametrize("voxels", [127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("channels", [31, 32, 33])
def test_tile_tails(voxels: int, channels: int, device: Backend) -> None:
    problem = Problem(1, 9, channels, (1, 1, voxels), (1, 1, 1))
    outcome = verify(device, kernels()["fprop_tiled"], problem, "fp32", "exact", seed=3)
    assert outcome.ok, outcome.message


@pytest.mark.parametrize("name", kernels())
@pytest.mark.parametrize("batch", [65536, 65537])
def test_many_volumes(batch: int, name: str, device: Backend) -> None:
    """More volumes than a grid's y and z can count."""
    problem = Problem(batch, 1, 1, (1, 1, 1), (1, 1, 1), stride=(2, 1, 1), output_padding=(1, 0, 0))
    outcome = verify(device, kernels()[name], problem, "fp32", "exact", seed=4)
    assert outcome.ok, outcome.message


@pytest.mark.parametrize("name", [name for name, kernel in kernels().items() if not kernel.deterministic])
def test_only_the_scatter_is_not_deterministic(name: str) -> None:
    assert name == "fprop_scatter"


def test_peers_names_parse() -> None:
    assert all(str(Problem.parse(name)) == name for name in PEERS.values())
