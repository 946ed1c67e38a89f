"""Arguments of `check`, `fuzz` and commands: what cannot be is said before anything runs, with the name, the value and the rule."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import cupy_convt3d as ct
from cupy_convt3d import cli, scratch
from cupy_convt3d.errors import DataError, KernelError, ProblemError, shown
from cupy_convt3d.lab.fuzz import fuzz


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
    ],
    ids=lambda given: next(iter(given)),
)
def test_arguments_of_check(given: dict[str, Any]) -> None:
    with pytest.raises((KernelError, ProblemError), match=f"{next(iter(given))}=.*must be"):
        ct.check("fprop_gather", backend="host", **given)


@pytest.mark.parametrize("given", [{"kernels": [1]}, {"kernels": 1}, {"time_limit_s": 1e30}])
def test_arguments_of_fuzz(tmp_path: Path, given: dict[str, Any]) -> None:
    kernels = [ct.kernels()["fprop_gather"]] if isinstance(ct.kernels(), dict) else []
    with pytest.raises(KernelError, match=f"{next(iter(given))}=.*must be"):
        fuzz(**{"kernels": kernels, "backend": "host", "findings": tmp_path / "f", **given})


@pytest.mark.parametrize("path", ["", "\ud800", ".", "/nowhere/at/all.json", 5])
def test_the_file_of_recorded_calls_is_looked_at_first(path: Any) -> None:
    with pytest.raises(DataError, match=r"path=.*must be the path of a file"), ct.recorded_calls(path):
        raise AssertionError("it began")


@pytest.mark.parametrize("value", [b"x", bytearray(b"x"), memoryview(b"x")])
def test_bytes_are_no_numbers(value: Any) -> None:
    with pytest.raises(ProblemError, match="dilation="):
        ct.Problem(1, 1, 1, (1, 1, 1), (1, 1, 1), dilation=value)


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
