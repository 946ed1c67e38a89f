"""The wheel and the sdist carry the kernels, and an installed wheel works outside the source tree; the import is light;
README's examples run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = sorted(str(f.relative_to(ROOT)) for f in (ROOT / "kernels").rglob("*") if f.suffix in (".cu", ".cuh", ".h"))


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Return what a command prints; it must succeed, and it does not see the source tree."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CONVT3D_KERNELS")}
    done = subprocess.run(command, cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel built from it."""
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT), cwd=target)
    return next(target.glob("*.tar.gz")), next(target.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel unpacked by pip, without its dependencies."""
    target = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(distributions[1]), cwd=target)
    return target


@pytest.mark.slow
def test_the_sdist_carries_kernels_and_tests(distributions: tuple[Path, Path]) -> None:
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    others = {"pyproject.toml", "LICENSE", "tests/conftest.py", "tests/test_packaging.py", "notebooks/00_quickstart.ipynb"}
    missing = {*SHIPPED, *others} - names
    assert not missing, f"the sdist lacks {sorted(missing)}"


@pytest.mark.slow
def test_the_wheel_carries_kernels(distributions: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(distributions[1]) as archive:
        names = set(archive.namelist())
    missing = {f"cupy_convt3d/{name}" for name in SHIPPED} | {"cupy_convt3d/tuning.json"}
    missing -= names
    assert not missing, f"the wheel lacks {sorted(missing)}"
    foreign = {name for name in names if not name.startswith(("cupy_convt3d/", "cupy_convt3d-"))}
    assert not foreign, f"the wheel would also install {sorted(foreign)}"


@pytest.mark.slow
def test_an_installed_wheel_checks_a_kernel_outside_the_source_tree(installed: Path, tmp_path: Path) -> None:
    origin = "import cupy_convt3d, cupy_convt3d.source as s; print(cupy_convt3d.__file__); print(s.kernel_directory())"
    for path in run(sys.executable, "-c", origin, cwd=tmp_path, PYTHONPATH=str(installed)).split():
        assert Path(path).is_relative_to(installed), f"{path} is not from the installed wheel {installed}"
    command = ("-m", "cupy_convt3d", "check", "fprop_gather", "--backend", "host", "--examples", "20")
    run(sys.executable, *command, cwd=tmp_path, PYTHONPATH=str(installed), CONVT3D_CACHE=str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.alone
def test_the_import_takes_under_50_ms_and_the_first_use_little_beside_numpys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # compiling sources is no part of an import
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    # Processor time, and the least of several: other processes on the same cores only ever add.
    timed = """
from time import process_time as now
times = [now()]
import cupy_convt3d
times.append(now())
import numpy
times.append(now())
cupy_convt3d.conv_transpose3d
times.append(now())
print(*(after - before for before, after in zip(times, times[1:])))
"""
    runs = [[float(seconds) for seconds in run(sys.executable, "-c", timed, cwd=ROOT).split()] for _ in range(7)]
    ours, numpys, first_use = map(min, zip(*runs, strict=True))
    assert ours < 0.05, f"import cupy_convt3d took {ours * 1e3:.0f} ms"
    assert first_use < 1.5 * numpys, f"the first use took {first_use * 1e3:.0f} ms; NumPy's import {numpys * 1e3:.0f} ms"


def test_the_import_brings_neither_torch_nor_cupy() -> None:
    heavy = "import sys, cupy_convt3d; print(*[m for m in ('torch', 'cupy', 'jax', 'matplotlib', 'hypothesis') if m in sys.modules])"
    assert run(sys.executable, "-c", heavy, cwd=ROOT).strip() == ""


def test_conv_transpose3d_on_numpy_brings_neither_torch_nor_cupy() -> None:
    call = (
        "import sys, numpy as np, cupy_convt3d as ct\n"
        "y = ct.conv_transpose3d(np.ones((1, 2, 3, 3, 3), np.float32), np.ones((2, 2, 3, 3, 3), np.float32), stride=2)\n"
        "assert y.shape == (1, 2, 7, 7, 7) and type(y) is np.ndarray\n"
        "print(*[m for m in ('torch', 'cupy', 'jax') if m in sys.modules])"
    )
    assert run(sys.executable, "-c", call, cwd=ROOT).strip() == ""


def test_the_problem_header_is_the_generated_one() -> None:
    generated = run(sys.executable, "-m", "cupy_convt3d.problem", cwd=ROOT)
    assert (ROOT / "kernels/include/convt3d/core/problem.cuh").read_text() == generated, (
        "kernels/include/convt3d/core/problem.cuh is stale: python -m cupy_convt3d.problem > kernels/include/convt3d/core/problem.cuh"
    )


@pytest.mark.slow
def test_the_tour_of_the_readme_runs() -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tour,) = (text for language, text in blocks if language == "python")
    printed = run(sys.executable, "-c", tour, cwd=ROOT, PYTHONPATH=str(ROOT))
    assert "n1_c8to4_i5x6x7_k3_s2_p1" in printed and printed.splitlines()[-1] == "None", printed
