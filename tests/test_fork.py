"""Forks beside launches, and tensors whose memory is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import cupy_convt3d as ct

X = np.random.default_rng(0).standard_normal((1, 4, 6, 6, 6), dtype=np.float32)
W = np.random.default_rng(1).standard_normal((4, 4, 3, 3, 3), dtype=np.float32)


def call() -> np.ndarray:
    return ct.conv_transpose3d(X, W, algorithm="gather", backend="host")


def ends_well(body: Callable[[], bool], limit_s: float = 60.0) -> bool:
    """Fork, run `body` in the child, and say whether it ended in time and with True."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if body() else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Python 3.12, on forks of processes with threads
def test_a_fork_beside_launching_threads_can_launch() -> None:
    expected, stopped = call(), threading.Event()

    def launch() -> None:
        while not stopped.is_set():
            call()

    threads = [threading.Thread(target=launch) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert all(ends_well(lambda: np.array_equal(call(), expected)) for _ in range(25))
    finally:
        stopped.set()
        for thread in threads:
            thread.join()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_beside_a_prepared_call_can_use_it() -> None:
    """The lock of what was prepared is held by a thread that the child does not have."""
    torch = pytest.importorskip("torch")
    x, w = torch.from_numpy(X), torch.from_numpy(W)
    expected = ct.conv_transpose3d(x, w, algorithm="gather", backend="host")
    from cupy_convt3d.backends import base

    held = [prepared._lock for prepared in base._all_prepared]
    for lock in held:
        lock.acquire()
    try:
        child = ends_well(lambda: torch.equal(ct.conv_transpose3d(x, w, algorithm="gather", backend="host"), expected))
    finally:
        for lock in held:
            lock.release()
    assert held and child


def freed(torch: object, x: object) -> object:
    x.untyped_storage().resize_(0)  # type: ignore[attr-defined]
    return x


def shrunk(torch: object, x: object) -> object:
    x.untyped_storage().resize_(8)  # type: ignore[attr-defined]
    return x


def zero(torch: object, x: object) -> object:
    return torch._efficientzerotensor(x.shape)  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [freed, shrunk, zero])
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("which", ["input", "weight"])
def test_memory_that_is_gone_is_an_error(make: Callable[..., object], with_out: bool, which: str) -> None:
    torch = pytest.importorskip("torch")
    x, w = torch.from_numpy(X.copy()), torch.from_numpy(W.copy())
    out = ct.conv_transpose3d(x, w, backend="host") if with_out else None
    x, w = (make(torch, x.clone()), w) if which == "input" else (x, make(torch, w.clone()))
    with pytest.raises(ct.ProblemError, match=f"{which}: (its storage was resized|is a ZeroTensor)"):
        ct.conv_transpose3d(x, w, backend="host", out=out)
