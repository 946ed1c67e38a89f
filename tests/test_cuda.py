"""The CUDA backend: NVRTC for every architecture with no GPU; loading, launching and attributes on one."""

from __future__ import annotations

import pytest

from cupy_convt3d.errors import CompileError, KernelError
from cupy_convt3d.kernel import ARCHITECTURES, Kernel
from cupy_convt3d.lab.suites import suite
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels
from cupy_convt3d.source import Instance

nvrtc = pytest.importorskip("cupy_convt3d.backends.nvrtc")
pytest.importorskip("cupy", reason="NVRTC comes with CuPy")

PLAIN = """/* convt3d
pass = "fprop"
[[launch]]
grid = 1
block = 1
*/
__global__ void plain(const float* input, float* output) {
  extern __shared__ float tile[];
  tile[0] = input[0];
  output[0] = tile[0];
}
"""


def instances(kernel: Kernel) -> list[Instance]:
    """One for each dtype; of a kernel specialized by problem those of four named problems, or of the first four that it can do (of
    few channels too, where it can do one named problem or none), and what `attributes` are asked of: its first dtype without a problem."""
    if not kernel.specialize:
        return [Instance(kernel, dtype) for dtype in kernel.dtypes]
    found = [Instance(kernel, kernel.dtypes[0])]
    for dtype in kernel.dtypes:
        able = {name: p for name, p in suite("named").items() if kernel.why_not(p, dtype) is None}
        if len(able) < 2:
            able |= {name: p for name, p in suite("few_channels").items() if kernel.why_not(p, dtype) is None}
        chosen = [able[name] for name in ("kb58", "kb61", "gan_4s2p1", "vae_3s2") if name in able] or list(able.values())[:4]
        assert chosen
        found += [Instance(kernel, dtype, kernel.plan(p, dtype).specialization) for p in chosen]
    return found


@pytest.mark.slow
@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", kernels())
def test_every_instance_compiles_without_spills(name: str, arch: str) -> None:
    kernel = kernels()[name]
    if arch not in kernel.architectures:
        with pytest.raises(KernelError, match=f"not for {arch}"):
            kernel.require(Problem(1, 1, 1, (1, 1, 1), (1, 1, 1)), kernel.dtypes[0], arch)
        return
    for instance in instances(kernel):
        cubin, log = nvrtc.compile_cubin(instance, arch)
        attributes = nvrtc.log_attributes(log)
        assert cubin[:4] == b"\x7fELF"
        assert "warning" not in log and "C75" not in log  # C7510 and its kin: wgmma serialised, setmaxnreg ignored
        assert set(attributes) == {launch.symbol for launch in kernel.launches}
        for symbol, found in attributes.items():
            assert found["spill_bytes"] == 0 and found["stack_bytes"] == 0, f"{symbol} {instance} {arch}: {found}"
            assert found["registers"] > 0


@pytest.mark.nvrtc
def test_a_spill_would_be_seen() -> None:
    kernel = kernels()["fprop_tiled"].replace_tunables(THREAD_VOXELS=32, TILE_CHANNELS=32, THREAD_CHANNELS=16)
    _, log = nvrtc.compile_cubin(Instance(kernel, "fp64"), "sm_90a")
    assert nvrtc.log_attributes(log)["convt3d_fprop_tiled"]["spill_bytes"] > 0


@pytest.mark.nvrtc
def test_plain_cuda_gets_c_linkage() -> None:
    _, log = nvrtc.compile_cubin(Instance(Kernel.from_source(PLAIN, "plain"), "fp32"), "sm_80")
    assert set(nvrtc.log_attributes(log)) == {"plain"}


@pytest.mark.nvrtc
def test_errors_show_the_numbered_source() -> None:
    broken = Kernel.from_source(PLAIN.replace("tile[0] = input[0]", "tile[0] = inputs[0]"), "broken")
    with pytest.raises(CompileError, match=r"(?s)>\s+9 \|   tile\[0\] = inputs\[0\].*identifier \"inputs\" is undefined"):
        nvrtc.compile_cubin(Instance(broken, "fp32"), "sm_80")


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernels())
def test_attributes(name: str) -> None:
    from cupy_convt3d.backends.cuda import CudaBackend

    kernel = kernels()[name]
    module = CudaBackend().compile(Instance(kernel, kernel.dtypes[0]))
    for launch in kernel.launches:
        found = module.attributes(launch.symbol)
        assert found["registers"] > 0 and found["local_bytes"] == 0 and found["spill_bytes"] == 0
