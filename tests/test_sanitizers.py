"""The sanitizers are silent on each kernel, in an instance of at most 256 threads a block; the thread sanitizer finds planted races."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_convt3d.backends.host import sanitizer_environment
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels

# Those that have more threads by default.
SMALL = {
    "fprop_implicit_gemm_wgmma": {"CONSUMERS": 1},
    "fprop_rolling_wgmma": {"CONSUMERS": 1, "PRODUCERS": 1, "TILES_M": 1},
    "fprop_stationary_wgmma": {"CONSUMERS": 1},
}
# Several taps, classes, chunks of channels and tiles; depthwise; kernel = stride.
PROBLEMS = (
    *("n2_c40to16_i2x5x9_k3_s2_p1_op1_bias", "n1_c8to8_i3x6x20_k3_p1", "n1_c9to12_i2x3x16_k4_s2_p1"),
    *("n2_c8to8_i3x5x7_k3_p1_g8", "n2_c8to16_i3x5x7_k3_s2_p1_g4", "n1_c16to72_i2x3x9_k1x2x2_s1x2x2"),
    "n2_c72to8_i2x3x8_k2_s2_bias",
)
# What is taken out of a kernel, once, where its threads load for one another.
RACES = {
    "fprop_implicit_gemm_wgmma": "        mbarrier_wait(at.full(), at.parity);\n",
    "fprop_rolling_wgmma": "          mbarrier_wait(stage.full(), stage.parity);\n",
    "fprop_stationary_wgmma": "      mbarrier_wait(full + static_cast<unsigned>(slot) * 8, parity);\n",
    "fprop_patch_wgmma": "  __syncthreads();\n",
    "fprop_tiled": "          __syncthreads();  // the last step's tiles have been read\n",
}
RUN = """
import json, sys
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.run.verify import verify
from cupy_convt3d.problem import Problem

sanitizer, path, tunables, problems = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), sys.argv[4:]
kernel, backend = Kernel.from_file(path).replace_tunables(**tunables), HostBackend(sanitizer)
for name in problems:
    outcome = verify(backend, kernel, Problem.parse(name), kernel.dtypes[-1], "exact", 0)
    print(name, "right" if outcome.ok else outcome.message)
"""


def sanitized(sanitizer: str, path: Path, tunables: dict[str, int], problems: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **sanitizer_environment(sanitizer), "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", RUN, sanitizer, str(path), json.dumps(tunables), *problems]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
@pytest.mark.parametrize("name", kernels())
def test_silent_on_a_right_kernel(name: str, sanitizer: str) -> None:
    tunables = SMALL.get(name, {})
    kernel = kernels()[name].replace_tunables(**tunables)
    problems = [p for p in PROBLEMS if kernel.why_not(Problem.parse(p), kernel.dtypes[-1]) is None]
    assert problems
    done = sanitized(sanitizer, kernel.path, tunables, problems)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{problem} right" for problem in problems]


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.parametrize("name", RACES)
def test_a_wait_that_is_missing_is_a_race(name: str, tmp_path: Path) -> None:
    kernel = kernels()[name].replace_tunables(**SMALL.get(name, {}))
    if "LAY_OUT" in kernel.tunables:
        kernel = kernel.replace_tunables(LAY_OUT=0)
    problem = next(p for p in PROBLEMS if kernel.why_not(Problem.parse(p), kernel.dtypes[-1]) is None)
    assert RACES[name] in kernel.source
    path = tmp_path / f"{name}.cu"
    path.write_text(kernel.source.replace(RACES[name], "", 1))
    done = sanitized("thread", path, kernel.tunables, [problem])
    assert done.returncode != 0
    assert "data race" in done.stderr
