"""The wheel and the sdist carry the kernels, and an installed wheel works outside the source tree; the import is light;
README's examples run."""

from __future__ import annotations

import os
import re
import statistics
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
def test_the_import_takes_under_300_ms() -> None:
    # Processor time, not the clock's: other tests run on the same cores, and waiting for them is not the import's doing.
    timed = "import time; start = time.process_time(); import cupy_convt3d; print(time.process_time() - start)"
    seconds = [float(run(sys.executable, "-c", timed, cwd=ROOT)) for _ in range(7)]
    assert statistics.median(seconds) < 0.3, f"import cupy_convt3d took {[f'{s * 1e3:.0f} ms' for s in seconds]}"


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
    assert (ROOT / "kernels/include/convt3d/problem.cuh").read_text() == generated, (
        "kernels/include/convt3d/problem.cuh is stale: python -m cupy_convt3d.problem > kernels/include/convt3d/problem.cuh"
    )


@pytest.mark.slow
def test_the_tour_of_the_readme_runs_with_its_kernel(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (cuda,) = (text for language, text in blocks if language == "cuda")
    (tour,) = (text for language, text in blocks if language == "python")
    (tmp_path / "my_gather.cu").write_text(cuda)
    printed = run(sys.executable, "-c", tour, cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert "n1_c8to4_i5x6x7_k3_s2_p1" in printed and printed.splitlines()[-1] == "None", printed
