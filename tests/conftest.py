"""Shared set-up of the tests: hypothesis profiles, a cache of their own, the backends, and what is skipped where."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from mistakes import mistaken

_SLOW_TO_DRAW = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW_TO_DRAW)
settings.register_profile(
    "ci", deadline=None, suppress_health_check=_SLOW_TO_DRAW, derandomize=True, database=None, print_blob=True
)
settings.register_profile(
    "nightly", deadline=None, suppress_health_check=_SLOW_TO_DRAW, derandomize=False, max_examples=2000, print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

_shared = pytest.StashKey[Path]()


@lru_cache(maxsize=1)
def has_gpu() -> bool:
    """Whether CuPy is installed and sees a CUDA device."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # no CuPy, no driver, no device: CuPy has an exception of its own for each
        return False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--large", action="store_true", help="run the tests marked large: they need tens of gigabytes of memory")


def pytest_configure(config: pytest.Config) -> None:
    # A cache of the tests' own, kept from run to run: entries are named by all that they were compiled from. `make clean` empties it.
    # pytest-xdist's workers inherit the variable.
    os.environ.setdefault("CONVT3D_CACHE", str(Path(__file__).parents[1] / "build" / "test-cache"))
    if config.getoption("numprocesses", None):  # a worker for each core: threads of NumPy's and torch's would wait by spinning
        for library in ("OMP", "OPENBLAS"):
            os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    config.stash[_shared] = Path(os.environ["CONVT3D_CACHE"])
    config.stash[_shared].mkdir(parents=True, exist_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test marked `alone` begins when the other workers have ended theirs, which begin no other before it has ended."""
    mode = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    directory = item.config.stash[_shared]
    with (directory / "gate.lock").open("w") as gate, (directory / "room.lock").open("w") as room:
        fcntl.flock(gate, mode)  # who waits for the room keeps the gate: no test that shares it overtakes one that does not
        fcntl.flock(room, mode)
        fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    wants_large = item.config.getoption("--large") or "large" in item.config.getoption("markexpr").replace("not large", "")
    if item.get_closest_marker("large") and not wants_large:
        pytest.skip("needs --large")
    if item.get_closest_marker("gpu") and not has_gpu():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each backend in turn; "cuda" is skipped where there is no GPU."""
    return request.param


@pytest.fixture
def new_plans() -> Iterator[None]:
    """Plans are made anew, and none of this test's is left to the next."""
    from cupy_convt3d.plans import plans

    plans.clear()
    yield
    plans.clear()


@pytest.fixture
def few_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check has its named problems and those that it draws; `test_check.test_shipped_kernels_pass` has those of tiles and layouts too."""
    monkeypatch.setattr("cupy_convt3d.lab.check.tails", lambda *_: [])
    monkeypatch.setattr("cupy_convt3d.lab.check.layouts", lambda *_: [])


@pytest.fixture
def ieee() -> Iterator[None]:
    """torch's convolutions do not round fp32 to TF32, their default on a GPU."""
    conv = pytest.importorskip("torch").backends.cudnn.conv
    before, conv.fp32_precision = conv.fp32_precision, "ieee"
    yield
    conv.fp32_precision = before


@pytest.fixture(scope="session")
def _worker() -> Iterator[Any]:
    """What runs mistaken kernels, which may end their process."""
    from cupy_convt3d.lab.run.worker import Worker
    from cupy_convt3d.registry import kernels

    with Worker(kernels()["fprop_gather"], "host", optimize=False) as worker:
        yield worker


@pytest.fixture
def assert_found(_worker: Any) -> Callable[..., None]:
    """assert_found(kernel, right, wrong, tried, dtype, **tunables): with `wrong` in place of `right` the kernel fails one of the pairs of a
    seed (0: contiguous tensors) and a problem on the host, on exact integers; in TF32, or else its first dtype, if none is given.
    """
    from cupy_convt3d.kernel import Kernel
    from cupy_convt3d.problem import Problem

    def found(
        kernel: Kernel, right: str, wrong: str, tried: Iterable[tuple[int, Problem]], dtype: str | None = None, **tunables: int
    ) -> None:
        _worker.kernel = mistaken(kernel, right, wrong).replace_tunables(**tunables)
        dtype = dtype or ("tf32" if "tf32" in kernel.dtypes else kernel.dtypes[0])
        if all(_worker.verify(problem, dtype, "exact", seed).ok for seed, problem in tried):
            pytest.fail(f"{right!r} replaced by {wrong!r} is not noticed")

    return found
