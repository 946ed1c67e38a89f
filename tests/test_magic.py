"""The cell magic in a real IPython shell: what it prints, what it registers, and that a bad cell leaves the shell alive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("IPython")

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from cupy_convt3d import registry
from cupy_convt3d.errors import KernelError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.bench.measure import Row
from cupy_convt3d.lab.run.verify import Outcome
from cupy_convt3d.lab.run.worker import Worker
from cupy_convt3d.magic import Convt3dMagics, Figures, compared
from cupy_convt3d.problem import Problem

GATHER = (Path(__file__).parents[1] / "examples" / "my_gather.cu").read_text()
QUICK = "--case n1_c1to2_i3_k3_s2 --against fprop_gather"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, few_problems: None) -> Iterator[InteractiveShell]:
    monkeypatch.setattr(registry, "_own", {})
    monkeypatch.setattr("cupy_convt3d.magic.EXAMPLES", 10)
    monkeypatch.setattr("cupy_convt3d.magic.HOST_BUDGET_MS", 5.0)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # the shell puts its own there; spawned processes read it
    shell = InteractiveShell()
    yield shell
    shell.reset()


@pytest.fixture
def run(shell: InteractiveShell, capsys: pytest.CaptureFixture[str], backend: str) -> Callable[[str, str], tuple[str, str, Any]]:
    """A cell with a magic line and a source; returns what was printed on both channels, and the exception if there was one."""
    shell.run_cell("%load_ext cupy_convt3d")

    def run_cell(line: str, source: str) -> tuple[str, str, Any]:
        capsys.readouterr()
        result = shell.run_cell(f"%%convt3d {line} --backend {backend}\n{source}")
        assert shell.run_cell("1 + 1").result == 2
        printed = capsys.readouterr()
        return printed.out, printed.err, result.error_in_exec

    return run_cell


def test_a_right_kernel_is_timed_compared_and_registered(run: Any, shell: InteractiveShell) -> None:
    out, err, error = run(f"mine {QUICK}", GATHER)
    assert error is None and not err
    assert "mine on" in out and "passed" in out and "fprop_gather" in out and "last run" not in out
    assert registry.kernel("mine") is shell.user_ns["mine"]

    _, _, error = run(f"mine {QUICK}", GATHER)
    assert isinstance(error, UsageError) and "--replace" in str(error)

    out, _, _ = run(f"mine {QUICK} --replace", GATHER.replace("128", "64"))
    assert "last run" in out and "change" in out
    for figure in ("worst error / bound", "median ms", "share of the floor", "registers", "spilled", "shared"):
        assert figure in out
    assert "block = 64" in registry.kernel("mine").source


def test_a_compiler_error_has_the_cells_own_line(run: Any) -> None:
    source = GATHER.replace("float sum = bias", "floatt sum = bias")
    number = source.splitlines().index(next(s for s in source.splitlines() if "floatt" in s)) + 2  # the magic's line is line 1
    _, err, error = run(f"mine {QUICK}", source)
    assert error is None and f">{number:5d} |   floatt sum" in err and "floatt" in err
    assert "Not registered." in err and "mine" not in registry.kernels()


def test_a_declaration_error_has_the_cells_own_line(run: Any) -> None:
    _, err, _ = run("mine", GATHER.replace("block = 128", "block : 128"))
    assert "line 7" in err and "Not registered." in err


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("input_index(problem, 1, o.h, th)", "o.h", "wrong value"),
        ("float sum =", "for (volatile int i = 0; i >= 0; i = 1) {} float sum =", "hang"),
        ("output[index] =", "output[index + 3] =", "output was overrun"),
        ("output[index] =", "*(volatile int*)8 = 1; output[index] =", "crash"),
    ],
)
def test_a_bad_kernel_is_reported_and_not_registered(run: Any, shell: InteractiveShell, old: str, new: str, said: str) -> None:
    assert old in GATHER
    out, err, error = run(f"mine {QUICK}", GATHER.replace(old, new))
    assert error is None and "FAILED" in out and "smallest failing problem" in out
    assert said in out or (said == "crash" and "illegal memory access" in out), out  # CUDA's own words
    assert "Not registered." in err and "mine" not in registry.kernels()
    assert "Timed on" not in out, "only a kernel that passed touches live arrays"
    assert isinstance(shell.user_ns["mine"], Kernel), "so that its failure can be looked at"


def test_the_line_that_reproduces_a_failure_runs(run: Any, shell: InteractiveShell) -> None:
    out, _, _ = run(f"mine {QUICK}", GATHER.replace("input_index(problem, 1, o.h, th)", "o.h"))
    line = out.split("reproduce: ")[1].splitlines()[0]
    shell.run_cell("import cupy_convt3d as ct")
    assert not shell.run_cell(line).result.passed


def test_a_failed_replacement_leaves_the_registered_kernel(run: Any) -> None:
    run(f"mine {QUICK}", GATHER)
    before = registry.kernel("mine")
    _, err, _ = run(f"mine {QUICK} --replace", GATHER.replace("sum +=", "sum -="))
    assert registry.kernel("mine") is before and "stays what it was" in err


def test_a_kernel_that_fails_only_at_full_size_does_so_in_the_child(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_convt3d.magic.DRY_RUN_LIMIT_S", 1.0)
    source = GATHER.replace("if (index >=", "for (volatile int i = 0; output_numel == 216000; i = 1) {} if (index >=")
    out, err, _ = run("mine --case n1_c1to1_i60_k1 --against fprop_gather", source)
    assert ": passed;" in out and "Timed on" not in out
    assert "passed on small problems, but on n1_c1to1_i60_k1" in err and "mine" not in registry.kernels()


def test_a_wrong_result_on_live_arrays_is_not_registered(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Row, "wrong", property(lambda row: not row.is_rival))
    out, err, _ = run(f"mine {QUICK}", GATHER)
    assert "WRONG on live arrays" in out and "Not registered." in err


def test_a_case_the_kernel_refuses_is_not_timed(run: Any) -> None:
    source = GATHER.replace('dtypes = ["fp32"]', 'dtypes = ["fp32"]\n[restrictions]\n"stride_d <= 2" = "small strides only"')
    out, err, _ = run("mine --case n1_c1to1_i3_k4_s3", source)
    assert "Not timed on n1_c1to1_i3_k4_s3" in out and "small strides only" in out and not err
    assert "mine" in registry.kernels()


@pytest.mark.parametrize(
    "line, said",
    [
        ("3x", "Python name"),
        ("fprop_gather", "--replace"),
        ("mine --case kb99", "kb99"),
        ("mine --against nobody", "nobody"),
        ("mine --against dgrad_gather", "fprop kernel"),
        ("taken", "variable"),
        ("", "required"),
    ],
)
def test_wrong_options_are_usage_errors(run: Any, shell: InteractiveShell, line: str, said: str) -> None:
    shell.user_ns["taken"] = 3
    _, _, error = run(line, GATHER)
    assert isinstance(error, UsageError) and said in str(error)
    assert shell.user_ns["taken"] == 3


def test_the_magic_is_documented(shell: InteractiveShell) -> None:
    shell.run_cell("%load_ext cupy_convt3d")
    text = Convt3dMagics.convt3d.__doc__
    assert text is not None and all(option in text for option in ("--case", "--against", "--backend", "--replace"))


def test_figures_are_compared_only_where_they_can_be() -> None:
    before = Figures("kb61", 0.2, 2.0, 0.1, 40, 0, 1024)
    lines = {line.strip().split("  ")[0]: line for line in compared(replace(before, median_ms=1.0, spill_bytes=8), before)}
    assert lines["median ms"].split()[2:] == ["1", "2", "-50%"]
    assert lines["spilled bytes a thread"].split()[-3:] == ["8", "0", "new"]
    assert lines["registers a thread"].endswith("same")
    elsewhere = list(compared(replace(before, timed_on="kb73"), before))
    assert "kb61" in elsewhere[-1] and next(line for line in elsewhere if "median" in line).split()[-1] == "-"
    assert all("last run" not in line for line in compared(before, None))


def test_a_kernel_is_registered_once() -> None:
    gather = registry.kernel("fprop_gather")
    with pytest.raises(KernelError, match="registered already"):
        registry.register(gather)


def test_worker_returns_what_a_kernel_wrote(backend: str) -> None:
    problem = Problem(1, 1, 2, (2, 3, 4), 3, 2, 1)
    half = GATHER.replace("output[index] = sum;", "if (index % 2) output[index] = sum;")
    with Worker(Kernel.from_source(half, "half"), backend) as worker:
        got, expected, bound = worker.output(problem, "fp32", "random", 0)
        assert worker.dry_run(problem, "fp32") == Outcome(True)
    assert got.shape == expected.shape == bound.shape == problem.output_shape
    flat, ref, limit = got.ravel(), expected.ravel(), bound.ravel()
    assert all((abs(flat - ref) <= limit)[1::2]) and all(flat[::2] != flat[::2]), "what is not written reads as NaN"
