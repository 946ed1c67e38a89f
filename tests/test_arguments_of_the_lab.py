"""Arguments of `check`, `fuzz` and commands: what cannot be is said before anything runs, with the name, the value and the rule."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cupy_convt3d as ct
from cupy_convt3d import cli, registry, scratch
from cupy_convt3d.errors import BackendError, DataError, KernelError, ProblemError, shown
from cupy_convt3d.lab.fuzz import fuzz
from cupy_convt3d.lab.population import population
from cupy_convt3d.lab.suites import named_problem, scaled_down, suite

PROBLEM = ct.Problem(1, 1, 1, 1, 1)
GATHER = ct.kernels()["fprop_gather"]


class Nasty:
    def __repr__(self) -> str:
        raise RuntimeError("repr")


@pytest.mark.parametrize(
    "given",
    [
        {"problem": (1, 2)},
        {"problems": [1]},
        {"dtypes": lambda: 0},
        {"dtypes": "fp32"},
        {"kinds": 1.5},
        {"seed": [1]},
        {"seed": -1},
        {"time_limit_s": 1e30},
        {"time_limit_s": Nasty()},
        {"time_limit_s": True},
        {"time_limit_s": 10**400},
        {"examples": -1},
        {"examples": "1"},
        {"progress": 5},
        {"in_process": "no"},
        {"quick": 1},
        {"sandbox": ""},
        {"backend": 0},
        {"backend": ""},
    ],
    ids=lambda given: next(iter(given)),
)
def test_arguments_of_check(given: dict[str, Any]) -> None:
    with pytest.raises((KernelError, ProblemError, BackendError), match=f"{next(iter(given))}=.*must be"):
        ct.check("fprop_gather", **{"backend": "host", "problem": PROBLEM, **given})


@pytest.mark.parametrize("given", [{"kernels": [1]}, {"kernels": 1}, {"time_limit_s": 1e30}])
def test_arguments_of_fuzz(tmp_path: Path, given: dict[str, Any]) -> None:
    kernels = [ct.kernels()["fprop_gather"]] if isinstance(ct.kernels(), dict) else []
    with pytest.raises(KernelError, match=f"{next(iter(given))}=.*must be"):
        fuzz(**{"kernels": kernels, "backend": "host", "findings": tmp_path / "f", **given})


@pytest.mark.parametrize("path", ["", "\ud800", ".", "/nowhere/at/all.json", 5, "a\0b"])
def test_the_file_of_recorded_calls_is_looked_at_first(path: Any) -> None:
    with pytest.raises(DataError, match=r"path=.*must be the path of a file"), ct.recorded_calls(path):
        raise AssertionError("it began")


@pytest.mark.parametrize("value", [b"x", bytearray(b"x"), memoryview(b"x")])
def test_bytes_are_no_numbers(value: Any) -> None:
    with pytest.raises(ProblemError, match="dilation="):
        ct.Problem(1, 1, 1, (1, 1, 1), (1, 1, 1), dilation=value)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("path", lambda: ct.Kernel.from_file(None)),  # type: ignore[arg-type]
        ("source", lambda: ct.Kernel.from_source([])),  # type: ignore[arg-type]
        ("source", lambda: ct.Kernel.from_source(b"")),  # type: ignore[arg-type]
        ("source", lambda: GATHER.replace_source(None)),  # type: ignore[arg-type]
        ("texts", lambda: GATHER.replace_headers(1)),  # type: ignore[arg-type]
        ("texts", lambda: GATHER.replace_headers({"a": b""})),  # type: ignore[dict-item]
        ("problem", lambda: GATHER.why_not(None, "fp32")),  # type: ignore[arg-type]
        ("problem", lambda: GATHER.plan(1, "fp32")),  # type: ignore[arg-type]
        ("dtype", lambda: GATHER.plan(PROBLEM, "int8")),
        ("kernel", lambda: registry.register(None)),  # type: ignore[arg-type]
        ("name", lambda: registry.kernel([])),  # type: ignore[arg-type]
        ("pass_name", lambda: ct.kernels("x")),
        ("suite", lambda: suite([])),  # type: ignore[arg-type]
        ("name", lambda: named_problem([])),  # type: ignore[arg-type]
        ("problem", lambda: scaled_down(None, 1)),  # type: ignore[arg-type]
        ("flop_limit", lambda: scaled_down(PROBLEM, "1")),  # type: ignore[arg-type]
        ("seed", lambda: population("1", 1)),  # type: ignore[arg-type]
        ("count", lambda: population(0, 1.5)),  # type: ignore[arg-type]
        ("input_shape", lambda: ct.Problem.from_shapes(1, 1)),  # type: ignore[arg-type]
        ("weight.shape", lambda: ct.Problem.from_shapes((1,) * 5, (1, None, 1, 1, 1))),  # type: ignore[arg-type]
        ("bias_shape", lambda: ct.Problem.from_shapes((1,) * 5, (1,) * 5, 1)),  # type: ignore[arg-type]
        ("itemsize", lambda: PROBLEM.compulsory_bytes("ab")),  # type: ignore[arg-type]
    ],
)
def test_what_is_of_another_type(name: str, call: Callable[[], object]) -> None:
    with pytest.raises((KernelError, ProblemError), match=rf"{name}\S*=.*must (be|look)"):
        call()


def test_a_value_that_cannot_be_shown() -> None:
    assert shown(Nasty()) == "<Nasty that cannot be shown>"


@pytest.mark.parametrize(
    "words",
    [
        "check fprop_gather --backend host --time-limit 1e30",
        "fuzz fprop_gather --backend host --time-limit 1e30",
        "bench --backend host --problem n1_c1to1_i1_k1 --out /",
        "bench --backend host --problem n1_c1to1_i1_k1 --out /dev/null/x.json",
        "report --out /dev/null",
        "report --out=",
        "tune --backend host --problem=",
    ],
)
def test_commands_refuse_it_first(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(words.split())
    assert ": must be " in capsys.readouterr().err


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    os.rmdir(tmp_path / "gone")
    assert cli.main(["check", "none.cu", "--backend", "host"]) == 2
    assert "the working directory is not there any more" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["file", "link", "pipe"])
def test_temporary_files_where_their_folder_is_none(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_folders", {})
    base = tmp_path / f"convt3d-{os.getuid()}"
    if what == "file":
        base.write_text("")
    elif what == "link":
        base.symlink_to("nothing")
    else:
        base.mkdir(mode=0o700)
        os.mkfifo(base / "lock")
    assert scratch.folder().is_dir() and scratch.folder().parent == tmp_path
    scratch.remove_abandoned()
