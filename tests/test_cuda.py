"""The CUDA backend: NVRTC for every architecture with no GPU; loading, launching and attributes on one."""

from __future__ import annotations

import contextlib
import itertools
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from selection import some
from test_architecture import CARDS

import cupy_convt3d as ct
from cupy_convt3d import cache
from cupy_convt3d.architecture import capability
from cupy_convt3d.errors import BackendError, CompileError, KernelError
from cupy_convt3d.kernel import ANY_STRIDES, CHANNELS_LAST, CONTIGUOUS, Kernel
from cupy_convt3d.lab.population import population
from cupy_convt3d.lab.run.verify import verify
from cupy_convt3d.lab.suites import suite
from cupy_convt3d.lab.tune.carry_child import sections
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernels
from cupy_convt3d.source import Instance
from cupy_convt3d.switches import no_compiling

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


# Cards of one family have one code generator: of the others each kernel has one instance compiled.
LAYOUTS = (ANY_STRIDES, CONTIGUOUS, CHANNELS_LAST)
FIRST_OF_THEIR_FAMILY = ("sm_80", "sm_90a", "sm_100a", "sm_120a")


def instances(kernel: Kernel) -> list[Instance]:
    """One for each dtype; of a kernel specialized by problem those of four named problems, or of the first four that it can do (of
    few channels too, where it can do one named problem or none). One that is made for the output's layout is compiled for each."""
    if not kernel.specialize:
        return [Instance(kernel, dtype) for dtype in kernel.dtypes]
    found = list[Instance]()
    for dtype in kernel.dtypes:
        able = {name: p for name, p in suite("named").items() if kernel.why_not(p, dtype) is None}
        if len(able) < 2:
            able |= {name: p for name, p in suite("few_channels").items() if kernel.why_not(p, dtype) is None}
        chosen = [able[name] for name in ("kb58", "kb61", "gan_4s2p1", "vae_3s2") if name in able] or list(able.values())[:4]
        assert chosen
        found += [Instance(kernel, dtype, kernel.plan(p, dtype, output_layout=one).specialization) for p in chosen for one in LAYOUTS]
    return list(dict.fromkeys(found))


@lru_cache(maxsize=64)
def most_dynamic(kernel: Kernel) -> dict[str, int]:
    """The most bytes of shared memory that each function is launched with for a named problem."""
    found = {launch.symbol: 0 for launch in kernel.launches}
    for problem in (suite("named") | suite("few_channels")).values():
        for dtype in kernel.dtypes:
            if kernel.why_not(problem, dtype) is None:
                for launch in kernel.plan(problem, dtype).launches:
                    found[launch.symbol] = max(found[launch.symbol], launch.shared_bytes)
    return found


def assert_compiles(instance: Instance, arch: str) -> None:
    """An instance compiles for a card to machine code that spills nothing and takes no more shared memory than is counted."""
    kernel = instance.kernel
    if capability(arch) not in nvrtc._nvrtc().getSupportedArchs():
        pytest.skip(f"NVRTC {nvrtc.version()} does not know {arch}: install that of a newer CUDA")
    cubin, log = nvrtc.compile_cubin(instance, arch)
    attributes = nvrtc.log_attributes(log)
    assert cubin[:4] == b"\x7fELF"
    assert "warning" not in log and "C75" not in log  # C7510 and its kin: wgmma serialised, setmaxnreg ignored
    assert set(attributes) == {launch.symbol for launch in kernel.launches}
    for symbol, found in attributes.items():
        assert found["spill_bytes"] == 0 and found["stack_bytes"] == 0, f"{symbol} {instance} {arch}: {found}"
        assert found["registers"] > 0
        if found["shared_bytes"] > kernel.static_shared_bytes:  # it is not counted, so there must be room on every card
            assert found["shared_bytes"] + most_dynamic(kernel)[symbol] <= 99 << 10, f"{symbol} {instance} {arch}: {found}"


@pytest.mark.slow
@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", CARDS)
@pytest.mark.parametrize("name", kernels())
def test_every_instance_compiles_without_spills(name: str, arch: str) -> None:
    kernel = kernels()[name]
    if kernel.why_not_on(arch) is not None:
        with pytest.raises(KernelError, match=f"not for {arch}"):
            kernel.require(Problem(1, 1, 1, (1, 1, 1), (1, 1, 1)), kernel.dtypes[0], arch)
        return
    every = list(instances(kernel))
    for instance in every if arch in FIRST_OF_THEIR_FAMILY else every[-1:]:
        assert_compiles(instance, arch)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "arch", [arch if arch in FIRST_OF_THEIR_FAMILY else pytest.param(arch, marks=pytest.mark.slow) for arch in CARDS]
)
def test_one_kernel_of_each_kind_compiles_for_every_card(arch: str) -> None:
    """On CUDA cores and, with copies that land later, on tensor cores; the rest is for the slow test above."""
    for name in ("fprop_gather", "fprop_patch_mma"):
        assert_compiles(Instance(kernels()[name], kernels()[name].dtypes[-1]), arch)


def make_older(monkeypatch: pytest.MonkeyPatch, newest: int) -> None:
    """Have NVRTC say that it knows no newer GPU."""
    real = nvrtc._nvrtc()

    class Older:
        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def getSupportedArchs(self) -> tuple[int, ...]:
            return tuple(n for n in real.getSupportedArchs() if n <= newest)

    monkeypatch.setattr(nvrtc, "_nvrtc", Older)


@pytest.fixture
def older_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC says that it knows no GPU newer than sm_90."""
    make_older(monkeypatch, 90)


@pytest.mark.nvrtc
@pytest.mark.parametrize("declared", [["sm_80"], ["sm_90"], ["sm_80", "sm_120a"]])
def test_a_card_that_nvrtc_does_not_know_gets_ptx(declared: list[str], older_nvrtc: None) -> None:
    kernel = Kernel.from_source(PLAIN.replace('"fprop"', f'"fprop"\narchitectures = {declared}'), "plain")
    assert [nvrtc.target(kernel, arch) for arch in ("sm_90a", "sm_120a")] == ["sm_90a", "compute_90"]
    code, log = nvrtc.compile_cubin(Instance(kernel, "fp32"), "sm_120a")
    assert b".target sm_90\n" in code and b".entry plain" in code
    assert nvrtc.log_attributes(log) == {}


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["fprop_flattened_simt", "fprop_patch_mma"])
def test_shipped_kernels_compile_to_ptx(name: str, older_nvrtc: None) -> None:
    kernel = kernels()[name]
    code, _ = nvrtc.compile_cubin(Instance(kernel, kernel.dtypes[0]), "sm_121a")
    assert all(b".entry %s(" % launch.symbol.encode() in code for launch in kernel.launches)


@pytest.mark.nvrtc
@pytest.mark.parametrize("declared", ["sm_100", "sm_120a"])
def test_what_an_older_nvrtc_cannot_compile_says_what_to_install(declared: str, older_nvrtc: None) -> None:
    kernel = Kernel.from_source(PLAIN.replace('"fprop"', f'"fprop"\narchitectures = ["{declared}"]'), "plain")
    for_them = "sm_100 and newer" if declared == "sm_100" else declared
    words = f"plain is for {for_them}, and NVRTC {nvrtc.version()}, which knows sm_\\d+ to sm_90, cannot compile it for this GPU, sm_120a"
    with pytest.raises(BackendError, match=words + ": install a CUDA toolkit, or nvidia-cuda-nvrtc, that knows sm_120a"):
        nvrtc.compile_cubin(Instance(kernel, "fp32"), "sm_120a")


SEVERAL = """/* convt3d
pass = "fprop"
[[launch]]
symbol = "copy"
when = "batch == 1"
grid = 1
block = 1
[[launch]]
symbol = "twice"
when = "batch > 1"
grid = 1
block = 1
*/
template <int N>
__device__ void scaled(const float* input, float* output) { output[0] = N * input[0]; }
extern "C" __global__ void copy(const float* input, float* output);  // __global__ void twice(
extern "C" __global__ void __launch_bounds__(32 * (1 + 1)) copy(const float* input, float* output) { scaled<1>(input, output); }
#define AFTER /* a line that */ 1
__global__ void twice(const float* input, float* output) { scaled<2>(input, output); }
__global__ void undeclared(float* output) { output[0] = 3; }
"""


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been compiled: a binary of all functions would serve for one of a few."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))


@pytest.mark.nvrtc
def test_a_binary_has_only_what_a_plan_launches(empty_cache: None) -> None:
    kernel = Kernel.from_source(SEVERAL, "several")
    found = {}
    for batch in (1, 2, 3):
        instance = Instance.of_plan(kernel, "fp32", kernel.plan(Problem(batch, 1, 1, (1, 1, 1), (1, 1, 1)), "fp32"))
        assert nvrtc.device_source(instance).count("\n") == SEVERAL.count("\n"), "errors name a line by its number"
        found[batch] = set(nvrtc.log_attributes(nvrtc.compile_cubin(instance, "sm_90a")[1]))
    assert found == {1: {"copy", "undeclared"}, 2: {"twice", "undeclared"}, 3: {"twice", "undeclared"}}
    everything = set(nvrtc.log_attributes(nvrtc.compile_cubin(Instance(kernel, "fp32"), "sm_90a")[1]))
    assert everything == {"copy", "twice", "undeclared"}


@pytest.mark.nvrtc
def test_a_binary_of_all_functions_serves_for_a_few(empty_cache: None) -> None:
    """What was compiled ahead for one volume of a layer is there for the others, also where nothing may be compiled."""
    kernel = Kernel.from_source(SEVERAL, "several")
    few, other = (Instance(kernel, "fp32", launched=(symbol,)) for symbol in ("copy", "twice"))
    nvrtc.compile_cubin(few, "sm_90a")
    with no_compiling():
        nvrtc.compile_cubin(few, "sm_90a")
        with pytest.raises(BackendError, match="compiling is switched off"):
            nvrtc.compile_cubin(other, "sm_90a")
    every = nvrtc.compile_cubin(Instance(kernel, "fp32"), "sm_90a")
    with no_compiling():
        assert nvrtc.compile_cubin(other, "sm_90a") == every


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('extern "C" __global__ void copy(', 'extern "C" {}\nextern "C" __global__ void copy('),
        ("1\n__global__ void twice", "1\nstatic\n__global__ void twice"),
    ],
)
def test_where_no_template_may_stand_all_is_compiled(before: str, after: str) -> None:
    assert "template <int>" in nvrtc.device_source(Instance(Kernel.from_source(SEVERAL, "several"), "fp32", launched=("copy",)))
    kernel = Kernel.from_source(SEVERAL.replace(before, after), "several")
    assert "template <int>" not in nvrtc.device_source(Instance(kernel, "fp32", launched=("copy",)))


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", some(["fprop_patch", "fprop_implicit_gemm_mma", "fprop_col2im", "fprop_rolling_wgmma"], 2))
def test_what_a_plan_launches_is_the_same_code_in_a_binary_of_its_own(name: str, empty_cache: None) -> None:
    """So what was measured with either holds for the other."""
    kernel = kernels()[name]
    dtype = kernel.dtypes[0]
    plans = (kernel.plan(p, dtype, 132) for p in suite("named").values() if kernel.why_not(p, dtype) is None)
    plan = next(plan for plan in plans if len(plan.launches) < len(kernel.launches))
    few, every = Instance.of_plan(kernel, dtype, plan), Instance(kernel, dtype, plan.specialization)
    assert few.key("cuda") != every.key("cuda")
    code, more = (sections(nvrtc.compile_cubin(instance, "sm_90a")[0]) for instance in (few, every))
    texts = {section for section in code if section.startswith(".text.")}
    assert texts == {f".text.{launch.symbol}" for launch in plan.launches}
    # The rest are notes: functions by their numbers in the table of symbols.
    assert all(code[section] == more[section] for section in code if not section.startswith((".nv.info", ".rel")))


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", [name for name, kernel in kernels().items() if kernel.functions[1]])
def test_general_functions_have_one_binary(name: str) -> None:
    """It is the same for all problems, layouts and tunables: what was compiled for one of them would be the same code."""
    kernel = kernels()[name]
    _, general = kernel.functions
    dtype = kernel.dtypes[-1]
    changed = kernel.replace_tunables(**{tunable: values[-1] for tunable, values in list(kernel.search.items())[:1]})
    drawn = [layer.problem for layer in population(5, 40)]  # kernels of other sizes than those that macros have by default, among others
    able = [p for p in (*suite("named").values(), *suite("few_channels").values(), *drawn) if changed.why_not(p, dtype) is None]
    different = {p.kernel_size + p.stride + (p.groups > 1,): p for p in able}  # the last of each
    plans = [changed.plan(p, dtype, 132, layout) for p in list(different.values())[-4:] for layout in (CONTIGUOUS, CHANNELS_LAST)]
    found = [Instance(changed, dtype, plan.specialization) for plan in plans]
    *_, part = found[0].parts
    assert part.launched == general and part.key("cuda") == Instance(kernel, dtype, launched=general).key("cuda")
    few = sections(nvrtc.compile_cubin(part, "sm_90a")[0])
    texts = [f".text.{symbol}" for symbol in general]
    assert sorted(section for section in few if section.startswith(".text.")) == sorted(texts)
    for instance in dict.fromkeys(found):
        own = sections(nvrtc.compile_cubin(replace(instance, launched=general), "sm_90a")[0])
        assert [few[text] for text in texts] == [own[text] for text in texts], str(instance)


@pytest.mark.nvrtc
def test_the_parts_of_an_instance_are_compiled_alone(empty_cache: None) -> None:
    general = SEVERAL.replace('symbol = "copy"', 'symbol = "copy"\ngeneral = true')
    kernel = Kernel.from_source(general, "several")
    instance = Instance(kernel, "fp32")
    assert [one.launched for one in instance.parts] == [("twice",), ("copy",)] and instance.whole is None
    found = {part.launched: set(nvrtc.log_attributes(log)) for part, _, log in nvrtc.compile_parts(instance, "sm_90a")}
    assert found == {("twice",): {"twice", "undeclared"}, ("copy",): {"copy", "undeclared"}}
    with no_compiling():
        assert len(nvrtc.compile_parts(replace(instance, launched=("twice",)), "sm_90a")) == 1
        assert len(nvrtc.compile_parts(replace(instance, launched=("copy",)), "sm_90a")) == 1
    assert Instance(Kernel.from_source(SEVERAL, "several"), "fp32").parts[0].launched == ()


@pytest.mark.slow
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
@pytest.mark.parametrize("name", ["fprop_gather", "fprop_implicit_gemm_mma"])
def test_a_gpu_runs_ptx(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy_convt3d.backends.cuda import CudaBackend

    backend, kernel = CudaBackend(), kernels()[name]
    make_older(monkeypatch, capability(backend.arch) - 1)
    if capability(backend.arch) == 80:
        pytest.skip(f"{backend.arch} is the oldest architecture: PTX of none before it will do")
    assert nvrtc.target(kernel, backend.arch).startswith("compute_")
    outcome = verify(backend, kernel, Problem(2, 5, 9, 4, 3, 2, 1), kernel.dtypes[0], "exact", 1)
    assert outcome.ok, outcome.message


# Channels of 2^20 and 2^21 voxels: elements that are a power of two of bytes apart, as far as an instruction's own offset reaches and more.
VOLUMES = [
    Problem(1, 16, 16, (128, 128, 128), 3, 1, 1, bias=True),
    Problem(1, 16, 8, (64, 128, 128), 3, 2, 1, 1),
    Problem(1, 8, 16, (64, 128, 128), 2, 2),
    Problem(1, 8, 8, (128, 128, 128), 3, 1, 1, groups=8),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernels("fprop"))
def test_volumes_of_real_sizes(name: str) -> None:
    """Against torch's operator; the check's own volumes are small."""
    torch = pytest.importorskip("torch")
    ran = 0
    for problem, layout in itertools.product(VOLUMES, (torch.contiguous_format, torch.channels_last_3d)):
        shapes, _ = problem.shapes("fprop")
        torch.manual_seed(0)
        input, weight, *bias = (torch.randn(shape, device="cuda") for name, shape in shapes.items() if name != "output")
        how = {"stride": problem.stride, "padding": problem.padding, "output_padding": problem.output_padding, "groups": problem.groups}
        for dtype, precision, error in (("float32", "ieee", 1e-5), ("float32", "tf32", 1e-2), ("bfloat16", None, 2e-2)):
            given = [tensor.to(getattr(torch, dtype)) for tensor in (input, weight, *bias)]
            given[:2] = [tensor.contiguous(memory_format=layout) for tensor in given[:2]]
            with contextlib.suppress(KernelError):
                found = ct.conv_transpose3d(*given, **how, algorithm=name, fp32_precision=precision)
                with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
                    expected = torch.nn.functional.conv_transpose3d(*(tensor.float() for tensor in given), **how)
                assert float((found - expected).norm() / expected.norm()) < error, f"{problem} {dtype} {precision} {layout}"
                ran += 1
    assert ran, "the kernel can do none of them"


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernels())
def test_attributes(name: str) -> None:
    from cupy_convt3d.backends.cuda import CudaBackend

    kernel, backend = kernels()[name], CudaBackend()
    if reason := kernel.why_not_on(backend.arch):
        pytest.skip(reason)
    module = backend.compile(instances(kernel)[0])
    for launch in kernel.launches:
        found = module.attributes(launch.symbol)
        assert found["registers"] > 0 and found["local_bytes"] == 0 and found["spill_bytes"] == 0


@pytest.mark.gpu
def test_the_hosts_part_of_a_call_is_not_timed() -> None:
    """A host that takes half a millisecond to queue a call of nothing, behind a flush of a tenth."""
    from cupy_convt3d.backends.cuda import CudaBackend

    backend = CudaBackend()
    assert max(backend.time(lambda: time.sleep(5e-4), 3)) < 0.1
