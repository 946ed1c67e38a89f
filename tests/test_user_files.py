"""A kernel in a file of the user's own: byte order mark, headers beside it, and what the host cannot run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from selection import some

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.errors import CompileError, KernelError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.check import check
from cupy_convt3d.lab.fuzz.findings import source_digest
from cupy_convt3d.lab.kernelbench import pair
from cupy_convt3d.problem import Problem
from cupy_convt3d.source import Instance, code_digest

DECLARATION = '/* convt3d\npass = "fprop"\n[[launch]]\ngrid = 1\nblock = 32\n*/\n'
MINE = DECLARATION + """#include "more/mine.cuh"
__global__ void mine(const float* input, float* output) { output[threadIdx.x] = twice(input[threadIdx.x]); }
"""
HEADER = """#pragma once
#include "deeper.cuh"
__device__ float twice(float value) {
  __shared__ float kept[32];
  kept[threadIdx.x] = value;
  __syncthreads();
  return FACTOR * kept[threadIdx.x];
}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A kernel's file with a header in a folder beside it, which includes one beside itself."""
    (tmp_path / "more").mkdir()
    (tmp_path / "mine.cu").write_text(MINE)
    (tmp_path / "more" / "mine.cuh").write_text(HEADER)
    (tmp_path / "more" / "deeper.cuh").write_text("#define FACTOR 2.0f\n")
    return tmp_path / "mine.cu"


def result(kernel: Kernel) -> float:
    """Return what a kernel of 32 threads gives for an input of ones, in its first thread."""
    values, output = np.ones(32, np.float32), np.full(32, np.nan, np.float32)
    tensors = {n: TensorRef(a.ctypes.data, a.shape, (1,)) for n, a in (("input", values), ("output", output))}
    run(HostBackend(optimize=False), kernel, Problem(1, 1, 1, 4, 1), "fp32", tensors, lambda name, size: 0)
    return float(output[0])


def test_headers_beside_the_file(mine: Path) -> None:
    kernel = Kernel.from_file(mine)
    assert [header.name for header in kernel.headers] == ["deeper.cuh", "mine.cuh"]
    assert result(kernel) == 2


def test_an_edited_header_is_another_kernel(mine: Path) -> None:
    before = Kernel.from_file(mine)
    (mine.parent / "more" / "deeper.cuh").write_text("#define FACTOR 3.0f\n")
    after = Kernel.from_file(mine)
    assert (result(before), result(after)) == (2, 3)
    assert Instance(before, "fp32").key("host") != Instance(after, "fp32").key("host")
    assert code_digest(before) != code_digest(after) and source_digest(before) != source_digest(after)
    (mine.parent / "more" / "deeper.cuh").write_text("// a comment\n#define FACTOR 3.0f\n")
    assert code_digest(Kernel.from_file(mine)) == code_digest(after)


def test_an_error_in_a_header_is_told_at_its_line(mine: Path) -> None:
    header = mine.parent / "more" / "mine.cuh"
    header.write_text(HEADER.replace("return FACTOR", "return FACTORS"))
    with pytest.raises(CompileError, match=r"(?s)more/mine.cuh:\n.*>\s+7 \|   return FACTORS.*mine.cuh:7:\d+: error"):
        HostBackend().compile(Instance(Kernel.from_file(mine), "fp32"))


@pytest.mark.nvrtc
def test_nvrtc_takes_the_headers_and_tells_their_lines(mine: Path) -> None:
    nvrtc = pytest.importorskip("cupy_convt3d.backends.nvrtc")
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    cubin, _ = nvrtc.compile_cubin(Instance(Kernel.from_file(mine), "fp32"), "sm_80")
    header = mine.parent / "more" / "deeper.cuh"
    header.write_text("#define FACTOR 3.0f\n")
    assert nvrtc.compile_cubin(Instance(Kernel.from_file(mine), "fp32"), "sm_80")[0] != cubin
    header.write_text("\n#define FACTOR 3.0f\nfloat wrong() { return nowhere; }\n")
    with pytest.raises(CompileError, match=r'(?s)more/deeper.cuh:\n.*>\s+3 \| float wrong.*deeper.cuh\(3\): error: identifier "nowhere"'):
        nvrtc.compile_cubin(Instance(Kernel.from_file(mine), "fp32"), "sm_80")


def test_a_string_has_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "mine.cuh").write_text(HEADER.replace('#include "deeper.cuh"', "#define FACTOR 2.0f"))
    monkeypatch.chdir(tmp_path)  # what lies in the current folder is no part of it
    with pytest.raises(CompileError, match=r"mine.cu:7: no header 'more/mine.cuh'.* made from a string has no folder"):
        HostBackend().compile(Instance(Kernel.from_source(MINE, "mine"), "fp32"))


def test_a_header_that_is_not_there(mine: Path) -> None:
    (mine.parent / "more" / "deeper.cuh").unlink()
    with pytest.raises(CompileError, match=r"more/mine.cuh:2: no header 'deeper.cuh' lies beside this file"):
        HostBackend().compile(Instance(Kernel.from_file(mine), "fp32"))


@pytest.mark.nvrtc
def test_nvrtc_names_the_missing_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc = pytest.importorskip("cupy_convt3d.backends.nvrtc")
    pytest.importorskip("cupy", reason="NVRTC comes with CuPy")
    with pytest.raises(CompileError, match=r"mine.cu:7: no header 'more/mine.cuh'.* made from a string has no folder"):
        nvrtc.compile_cubin(Instance(Kernel.from_source(MINE, "mine"), "fp32"), "sm_80")
    monkeypatch.setattr(nvrtc, "_system_includes", lambda own: ())
    half = Kernel.from_source(MINE.replace('"more/mine.cuh"', "<cuda_fp16.h>").replace("twice", ""), "mine")
    with pytest.raises(CompileError, match=r"mine.cu:7: #include of cuda_fp16.h: .* install nvidia-cuda-runtime"):
        nvrtc.compile_cubin(Instance(half, "fp32"), "sm_80")


def test_a_byte_order_mark_and_windows_line_ends(mine: Path) -> None:
    for file in (mine, mine.parent / "more" / "mine.cuh", mine.parent / "more" / "deeper.cuh"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
    assert result(Kernel.from_file(mine)) == 2
    plain = MINE.replace('#include "more/mine.cuh"', "").replace("twice", "2 * ")
    assert result(Kernel.from_source("\ufeff" + plain.replace("\n", "\r\n"), "mine")) == 2


def test_a_byte_order_mark_in_a_model_file(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_bytes(b"\xef\xbb\xbfclass Model: pass\nclass ModelNew: pass\n")
    assert pair([file]) == [(file, file)]


def test_a_header_that_is_no_text(mine: Path) -> None:
    (mine.parent / "more" / "deeper.cuh").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KernelError, match=r"mine.cuh: header '.*deeper.cuh': cannot be read"):
        Kernel.from_file(mine)


def trial(code: str, before: str = "") -> Kernel:
    return Kernel.from_source(f"{DECLARATION}{before}\n__global__ void trial(const float* input, float* output) {{\n{code}\n}}\n", "trial")


REFUSED = {
    "asm": ("", 'asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));', 9, "inline PTX"),
    "asm in a macro": ('#define LANE(x) asm volatile("mov.u32 %0, %%laneid;" : "=r"(x))', "unsigned a; LANE(a);", 9, "inline PTX"),
    "managed": ("__managed__ int counter;", "output[0] = counter;", 7, "__managed__"),
    "launch": ("", "child<<<1, 1>>>(output);", 9, "cannot launch another"),
    "runtime": ("", "cudaDeviceSynchronize();", 9, "CUDA runtime"),
    "texture": ("", "output[0] = tex2D<float>(0, 1, 2);", 9, "textures"),
    "texture object": ("__device__ cudaTextureObject_t object;", "", 7, "textures"),
    "wmma": ("", "nvcuda::wmma::fragment<int> a;", 9, "wmma"),
    "wmma header": ("#include <mma.h>", "", 7, "wmma"),
    "barrier": ("", "cuda::barrier<cuda::thread_scope_block> b;", 9, "cuda:: library"),
    "barrier header": ("#include <cuda/barrier>", "", 7, "cuda:: library"),
    "pipeline header": ("#include <cuda_pipeline.h>", "", 7, "asynchronous copies"),
    "thrust": ("#include <thrust/reduce.h>", "", 7, "Thrust"),
    "cub": ("", "cub::BlockReduce<float, 32> reduce;", 9, "CUB"),
    "tensor map": ("", "const CUtensorMap* map;", 9, "TMA"),
    "fp8": ("#include <cuda_fp8.h>", "", 7, "8-bit"),
    "grid barrier": ("#include <cooperative_groups.h>", "cooperative_groups::this_grid().sync();", 9, "barrier of the whole grid"),
    "cluster": ("", "auto c = cooperative_groups::this_cluster();", 9, "clusters"),
    "undefined": ("__device__ float elsewhere(float);", "output[0] = elsewhere(input[0]);", 7, "elsewhere is declared but defined nowhere"),
    "undefined C": ('extern "C" __device__ float __nv_sinf(float);', "output[0] = __nv_sinf(input[0]);", 7, "__nv_sinf is declared but"),
}  # fmt: skip


@pytest.mark.parametrize("optimize", some([False, True]))
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_host_cannot_run_is_named(case: str, optimize: bool) -> None:
    before, code, line, words = REFUSED[case]
    with pytest.raises(CompileError) as raised:
        HostBackend(optimize=optimize).compile(Instance(trial(code, before), "fp32"))
    first, _, rest = str(raised.value).partition("\n")
    assert first.startswith(f"trial[fp32]: trial.cu:{line}: ") and words in first
    assert f">{line:5d} | " in rest and "error:" not in rest


def test_what_the_host_does_not_compile_is_not_refused() -> None:
    code = """
  // asm("nothing"); tex2D(a); cuda::barrier
  const char* text = "asm(1) __managed__ <<<>>>";
#if defined(__CUDA_ARCH__)
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  nvcuda::wmma::fragment<int> a;
#endif
  asm volatile("" ::: "memory");
  output[threadIdx.x] = input[threadIdx.x] + (text != nullptr);"""
    assert result(trial(code)) == 2


def test_a_library_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the linker lets it pass, as under a sanitizer."""
    monkeypatch.setattr("cupy_convt3d.backends.host.sys.platform", "other")
    before, code, line, words = REFUSED["undefined"]
    with pytest.raises(CompileError, match=f"trial.cu:{line}: {words}"):
        HostBackend().compile(Instance(trial("  " + code, before), "fp32"))


HALVES = """/* convt3d
pass = "fprop"
dtypes = ["fp16"]
[[launch]]
grid = "ceil_div(output_numel, 128)"
block = 128
*/
#include <cuda_fp16.h>
#include "convt3d.cuh"

__global__ void halves(const Problem problem, const __half* input, const __half* weight, const __half* bias, __half* output,
                       long long output_numel, int in_channels_per_group, int out_channels_per_group) {
  const long long index = blockIdx.x * 128LL + threadIdx.x;
  if (index >= output_numel) return;
  const Voxel o = voxel_at(index, problem.out_channels, problem.output_size);
  const int taps = problem.kernel_size[0] * problem.kernel_size[1] * problem.kernel_size[2];
  float sum = bias != nullptr ? __half2float(bias[o.c]) : 0.0f;
  for (int ci = 0; ci < in_channels_per_group; ++ci) {
    const long long c = o.c / out_channels_per_group * in_channels_per_group + ci;
    for (int tap = 0; tap < taps; ++tap) {
      const int d = input_index(problem, 0, o.d, tap / problem.kernel_size[2] / problem.kernel_size[1]);
      const int h = input_index(problem, 1, o.h, tap / problem.kernel_size[2] % problem.kernel_size[1]);
      const int w = input_index(problem, 2, o.w, tap % problem.kernel_size[2]);
      if (d < 0 || h < 0 || w < 0) continue;
      const long long plane = (o.n * static_cast<long long>(problem.in_channels) + c) * problem.input_size[0] + d;
      const __half value = input[(plane * problem.input_size[1] + h) * problem.input_size[2] + w];
      sum += float(value) * float(weight[(c * out_channels_per_group + o.c % out_channels_per_group) * taps + tap]);
    }
  }
  output[index] = __float2half_rn(sum);
}
"""


@pytest.mark.usefixtures("few_problems")
def test_a_kernel_on_cudas_own_halves_passes_the_check() -> None:
    report = check(Kernel.from_source(HALVES, "halves"), backend="host", examples=12)
    assert report.passed, str(report)


@pytest.mark.parametrize(
    "start",
    [
        "__global__ void __launch_bounds__(32)",
        "__global__ __launch_bounds__(32) void",
        "__global__ static void __launch_bounds__(8 * (2 + 2), 1)",
        'extern "C" __global__ void',
    ],
)
def test_ways_to_declare_a_kernel(start: str) -> None:
    body = "(const float* input, float* output) { output[threadIdx.x] = 2 * input[threadIdx.x]; }\n"
    assert result(Kernel.from_source(f"{DECLARATION}{start} mine{body}", "mine")) == 2
