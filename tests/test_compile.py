"""Calls recorded, what they take compiled ahead, and a process that may not compile."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_convt3d as ct
from cupy_convt3d import cache, calls, cli, registry
from cupy_convt3d.backends.base import output_layout
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.calls import Call
from cupy_convt3d.errors import BackendError, DataError
from cupy_convt3d.kernel import Limits
from cupy_convt3d.lab.population import population
from cupy_convt3d.problem import LAYOUTS
from cupy_convt3d.source import Instance

X, W = np.ones((1, 2, 3, 4, 5), np.float32), np.ones((2, 3, 2, 2, 2), np.float32)
PATCH = Call("fprop", "n1_c40to8_i32_k2_s2", "fp32")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_plans: None) -> Path:
    """An empty cache; what the process has loaded is forgotten."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(cache.BUILT_VARIABLE, raising=False)
    forget(monkeypatch)
    return tmp_path / "cache"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a backend that has loaded nothing, as another process has."""
    backend = HostBackend()
    monkeypatch.setattr("cupy_convt3d.ops.backend_for", lambda *_: backend)
    ct.registry.revise()


def test_calls_are_recorded_once_with_their_gradients(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(1, 4, 3, 3, 3, requires_grad=True)
    layer = ct.nn.ConvTranspose3d(4, 6, 3, 2, 1, backend="host")
    layer(x)  # its plan is kept
    with ct.recorded_calls(tmp_path / "calls.json"):
        for _ in range(2):
            layer(x).sum().backward()
        ct.conv_transpose3d(X, W, algorithm="gather")
    found = calls.read(tmp_path / "calls.json")
    assert sorted((call.pass_name, call.problem, call.layout) for call in found) == [
        ("dgrad", "n1_c4to6_i3_k3_s2_p1", "ncdhw"),
        ("fprop", "n1_c4to6_i3_k3_s2_p1_bias", "ncdhw"),
        ("wgrad", "n1_c4to6_i3_k3_s2_p1", "ncdhw"),
    ], "a named kernel is no question"
    ct.conv_transpose3d(X, W)
    assert calls.read(tmp_path / "calls.json") == found, "the context has ended"


def test_the_layout_and_frozen_weights_are_recorded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(2, 4, 3, 3, 3).to(memory_format=torch.channels_last_3d)
    layer = ct.nn.ConvTranspose3d(4, 6, 3, 2, bias=False, backend="host")
    with ct.recorded_calls(tmp_path / "calls.json"), torch.no_grad(), ct.nn.freeze(layer):
        layer(x)
    (call,) = calls.read(tmp_path / "calls.json")
    assert (call.layout, call.packed, call.pass_name) == ("channels_last", True, "fprop")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"problem": "n1_c2"}, "call 1: problem: "),
        ({"precision": "fp8"}, "call 1: precision='fp8': must be one of "),
        ({"layout": "nhwc"}, "call 1: layout='nhwc'"),
        ({"pass_name": 3}, "call 1: pass_name=3: must be text"),
        ({"packed": "false"}, "call 1: packed='false': must be true or false"),
    ],
)
def test_damaged_calls_are_refused(changes: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calls.json"
    with ct.recorded_calls(path):
        calls.note("fprop", ct.Problem(1, 2, 2, 3, 2), "fp32", "ncdhw", False)
    (good,) = calls.read(path)
    text = path.read_text()
    for name, value in changes.items():
        old, new = (f'"{name}":{json.dumps(v)}' for v in (getattr(good, name), value))
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        calls.read(path)
    assert words in str(caught.value) and str(path) in str(caught.value)
    assert cli.main(["compile", str(path), "--device", "H100"]) == 2
    assert words in capsys.readouterr().err


def test_who_may_not_compile_says_what_is_missing(empty: Path) -> None:
    missing = r"fprop_\w+\[fp32\] for the CPU: is not compiled \(no fprop_.*\.so in .*cache"
    with ct.no_compiling(), pytest.raises(BackendError, match=missing) as caught:
        ct.conv_transpose3d(X, W)
    assert "compiling is switched off (no_compiling, CONVT3D_COMPILE=0); `convt3d compile` builds ahead" in str(caught.value)
    right = ct.conv_transpose3d(X, W)
    with ct.no_compiling():
        assert (ct.conv_transpose3d(X, W) == right).all(), "it is compiled"


def test_the_environment_forbids_it_too(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVT3D_COMPILE", "0")
    with pytest.raises(BackendError, match="compiling is switched off"):
        ct.conv_transpose3d(X, W)


def test_what_was_built_ahead_is_read_from_a_folder_of_its_own(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ct.conv_transpose3d(X, W)
    shutil.move(empty, tmp_path / "built")
    monkeypatch.setenv(cache.BUILT_VARIABLE, str(tmp_path / "built"))
    forget(monkeypatch)
    with ct.no_compiling():
        assert (ct.conv_transpose3d(X, W) == right).all()
    assert not list(empty.glob("*.so")), "it is only read"


def test_a_folder_that_others_can_write_to_is_refused(empty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "built").mkdir()
    os.chmod(tmp_path / "built", 0o777)
    monkeypatch.setenv(cache.BUILT_VARIABLE, str(tmp_path / "built"))
    with pytest.raises(BackendError, match=r"CONVT3D_BUILT='.*built': compiled code is run from it, so it must be yours or root's"):
        ct.conv_transpose3d(X, W)
    monkeypatch.setenv(cache.BUILT_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(BackendError, match=r"CONVT3D_BUILT='.*nowhere': cannot be read"):
        ct.conv_transpose3d(X, W)


@pytest.mark.nvrtc
def test_calls_are_compiled_for_a_card_that_is_not_here(empty: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    from cupy_convt3d.backends.nvrtc import compile_cubin
    from cupy_convt3d.lab.compile import compile_calls, gpu

    tiny = Call("fprop", "n1_c1to2_i3_k3_s2", "fp32")
    card = gpu("h100")
    lines: list[str] = []
    built = compile_calls([PATCH, PATCH, tiny, replace(tiny, pass_name="wgrad")], card, 2, tell=lines.append)
    assert [one.instance is None for one in built] == [False, False, True, True] and not any(one.failed for one in built)
    assert built[0].elapsed_s > 0 == built[1].elapsed_s, "once"
    assert lines[0].startswith(f"{PATCH.problem} fprop fp32 ncdhw: fprop_") and "torch's own operator" in lines[2]
    with ct.no_compiling():
        assert compile_cubin(built[0].instance, card.arch)[0].startswith(b"\x7fELF")
        with pytest.raises(BackendError, match=r"for sm_80: is not compiled \(no .*\.cubin in "):
            compile_cubin(built[0].instance, "sm_80")
    with ct.recorded_calls(tmp_path / "calls.json"):
        calls.note("fprop", ct.Problem.parse(PATCH.problem), "fp32", "ncdhw", False)
    assert cli.main(["compile", str(tmp_path / "calls.json"), "--device", "H100", "--out", str(tmp_path / "built")]) == 0
    assert "1 calls: 1 instances compiled, 0 calls need none, 0 failed" in capsys.readouterr().out
    assert len(list((tmp_path / "built").glob("*.cubin"))) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "sundial", "--problem", "n1_c1to2_i3_k3_s2"], "--device sundial: must name one of NVIDIA H100 80GB HBM3"),
        (["--kernels", "fprop_gather", "--device", "H100"], "what 'auto' takes on a GPU is compiled, no other"),
        (["nowhere.json", "--device", "H100"], "nowhere.json"),
    ],
)
def test_bad_commands_say_so(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", *words]) == 2
    assert said in capsys.readouterr().err


# Kernels that have more binaries for a layer than `A_FEW`: `fprop_toeplitz_mma` knows how far apart the rows and columns of a block's
# inputs lie.
A_FEW, MANY_BINARIES = 10, {"fprop_toeplitz_mma"}


@pytest.mark.slow
def test_new_volumes_and_batches_have_few_binaries() -> None:
    """Of a layer that is met with many volumes and batches, in one layout: numbers of `[specialize]` and functions that are launched."""
    generator = random.Random(1)
    most: dict[str, int] = {}
    for layer in (*population(5, 40), *population(5, 4, lambda problem: problem.groups == problem.in_channels > 1)):
        met = [layer.problem]
        for _ in range(10):
            size = [max(1, int(s * 2 ** generator.uniform(-1.5, 1.5))) for s in layer.problem.input_size]
            met.append(replace(layer.problem, batch=generator.choice((1, 2, 3, 8, 32)), input_size=tuple(size)))
        for name, kernel in registry.kernels("fprop").items():
            for dtype in kernel.dtypes:
                able = [p for p in met if kernel.why_not(p, dtype, "sm_90a", Limits(227 << 10, 132)) is None]
                for layout in LAYOUTS:
                    plans = (kernel.plan(p, dtype, 132, output_layout(p, layout)) for p in able)
                    most[name] = max(most.get(name, 0), len({Instance.of_plan(kernel, dtype, plan) for plan in plans}))
    assert all(most.values()) and set(most) == set(registry.kernels("fprop"))
    assert {name for name, count in most.items() if count > A_FEW} <= MANY_BINARIES, most
    assert sum(count == 1 for count in most.values()) >= 10, "most know nothing of volumes"
