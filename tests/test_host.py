"""The host backend: CUDA's language on a CPU, and what it says of kernels that would hang, race or overrun."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupy_convt3d.backends.base import TensorRef, run
from cupy_convt3d.backends.host import _FLAGS, HostBackend, compiler, sanitizer_environment
from cupy_convt3d.backends.host_source import rewrite_launch_bounds, rewrite_shared, rewrite_specialized
from cupy_convt3d.errors import BackendError, CompileError, KernelError, LaunchError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.problem import Problem

HEADER = '/* convt3d\npass = "fprop"\n[[launch]]\ngrid = {grid}\nblock = {block}\nshared_bytes = {shared}\n*/\n'


def kernel(body: str, name: str = "trial", grid: int = 1, block: int = 64, shared: int = 0) -> Kernel:
    text = HEADER.format(grid=grid, block=block, shared=shared)
    return Kernel.from_source(f"{text}__global__ void trial(const float* input, float* output) {{\n{body}\n}}\n", name)


def launch(body: str, seed: int = 0, backend: HostBackend | None = None, **declared: int) -> np.ndarray:
    """Run a body with `input` 0..63 and `output` NaN; return the 64 outputs."""
    values, output = np.arange(64, dtype=np.float32), np.full(64, np.nan, np.float32)
    tensors = {n: TensorRef(a.ctypes.data, a.shape, (1,)) for n, a in (("input", values), ("output", output))}
    run(backend or HostBackend(), kernel(body, **declared), Problem(1, 1, 1, 4, 1), "fp32", tensors, lambda size: 0, seed=seed)
    return output


REVERSE = """
  __shared__ float tile[64];
  tile[threadIdx.x] = input[threadIdx.x];
  __syncthreads();
  output[threadIdx.x] = tile[63 - threadIdx.x];
"""


@pytest.mark.parametrize("seed", range(6))
def test_barrier(seed: int) -> None:
    np.testing.assert_array_equal(launch(REVERSE, seed), np.arange(64)[::-1])


def test_missing_barrier_reads_poison() -> None:
    assert np.isnan(launch(REVERSE.replace("__syncthreads();", ""))).any()


def test_poison_is_fresh_in_every_block() -> None:
    body = """
  __shared__ float kept;
  if (threadIdx.x == 0) {
    output[blockIdx.x] = kept;
    kept = 1.0f;
  }"""
    assert np.isnan(launch(body, grid=4)[:4]).all()


def test_dynamic_and_several_static() -> None:
    body = """
  extern __shared__ float dynamic[];
  __shared__ float first[64], second[2][32];
  __shared__ struct { float sum; } third;
  const int t = threadIdx.x;
  dynamic[t] = input[t];
  first[t] = 2 * input[t];
  second[t / 32][t % 32] = 3 * input[t];
  if (t == 0) third.sum = 4;
  __syncthreads();
  output[t] = dynamic[63 - t] + first[63 - t] + second[(63 - t) / 32][(63 - t) % 32] + third.sum;"""
    np.testing.assert_array_equal(launch(body, 3, shared=256), 6 * np.arange(64)[::-1] + 4)


@pytest.mark.parametrize("seed", range(4))
def test_shuffles_and_votes(seed: int) -> None:
    body = """
  const unsigned all = 0xffffffffu;
  float sum = input[threadIdx.x];
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(all, sum, lanes);
  const float before = __shfl_up_sync(all, input[threadIdx.x], 1), after = __shfl_down_sync(all, input[threadIdx.x], 1, 8);
  const float third = __shfl_sync(all, input[threadIdx.x], 3);
  const unsigned odd = __ballot_sync(all, threadIdx.x & 1);
  output[threadIdx.x] = threadIdx.x < 32 ? sum + third : before * 1000 + after + (odd == 0xaaaaaaaau ? 0.5f : 0.0f);"""
    lanes = np.arange(64)
    before = np.where(lanes % 32 == 0, lanes, lanes - 1)
    after = np.where(lanes % 8 == 7, lanes, lanes + 1)
    expected = np.where(lanes < 32, 496 + 3, before * 1000 + after + 0.5)
    np.testing.assert_array_equal(launch(body, seed), expected.astype(np.float32))


def test_atomics() -> None:
    body = """
  __shared__ int count;
  if (threadIdx.x == 0) count = 0, output[1] = 0;
  __syncthreads();
  atomicAdd(&count, 2);
  atomicAdd(&output[1], 0.5f);
  __syncthreads();
  if (threadIdx.x == 0) output[0] = count;"""
    assert list(launch(body, 5)[:2]) == [128, 32]


def test_threads_that_exit_do_not_hold_up_a_barrier() -> None:
    body = "  if (threadIdx.x >= 32) return;\n  __syncthreads();\n  output[threadIdx.x] = 1;"
    assert np.nansum(launch(body, 2)) == 32


def test_divergent_barrier_names_threads_and_lines() -> None:
    body = "  if (threadIdx.x < 32)\n    __syncthreads();\n  else\n    __syncthreads();"
    with pytest.raises(LaunchError, match=r"block \(0, 0, 0\).*divergent barrier.*thread \(\d+, 0, 0\).*trial.cu:1[02]"):
        launch(body)


def test_deadlock_names_who_waits() -> None:
    body = "  if (threadIdx.x < 32) __syncthreads();\n  else __shfl_sync(0xffffffffu, 1.0f, 0), __syncthreads();"
    with pytest.raises(LaunchError, match=r"(deadlock|divergent).*trial.cu:\d+"):
        launch(body)


def test_warp_divergence() -> None:
    odd, even = "output[0] = __shfl_sync(0xffffffffu, 1.0f, 0);", "output[1] = __ballot_sync(0xffffffffu, 1);"
    body = f"  if (threadIdx.x & 1)\n    {odd}\n  else\n    {even}"
    with pytest.raises(LaunchError, match="divergent warp"):
        launch(body)


def test_mask_without_the_caller() -> None:
    with pytest.raises(LaunchError, match="leaves itself out"):
        launch("  output[0] = __shfl_sync(1u, input[threadIdx.x], 0);")


def test_a_launch_after_a_failure_is_unharmed() -> None:
    backend = HostBackend()
    with pytest.raises(LaunchError):
        launch("  if (threadIdx.x < 3) __syncthreads(); else __any_sync(0xffffffffu, 1);", backend=backend)
    np.testing.assert_array_equal(launch(REVERSE, backend=backend), np.arange(64)[::-1])


@pytest.mark.parametrize("bounds", ["2 * 16", "FEW ? 32 : 64, 1", "of<32, 2>()"])
def test_a_block_larger_than_its_launch_bounds_is_refused(bounds: str) -> None:
    begin = "#define FEW 1\ntemplate <int a, int b>\nconstexpr int of() { return a; }\n__global__ void"
    right = kernel("output[threadIdx.x] = 0;", block=32).source.replace("__global__ void", f"{begin} __launch_bounds__({bounds})")
    wrong = right.replace("block = 32", "block = 64")
    output = np.full(64, np.nan, np.float32)
    tensors = {name: TensorRef(output.ctypes.data, output.shape, (1,)) for name in ("input", "output")}
    problem = Problem(1, 1, 1, 4, 1)
    run(HostBackend(), Kernel.from_source(right, "trial"), problem, "fp32", tensors, lambda name, size: 0)
    assert (output[:32] == 0).all()
    with pytest.raises(LaunchError, match=r"launch bounds: a block has 64 threads, and __launch_bounds__ at trial.cu:\d+ allows 32"):
        run(HostBackend(), Kernel.from_source(wrong, "trial"), problem, "fp32", tensors, lambda name, size: 0)


def test_rewriting_of_launch_bounds_keeps_lines_and_leaves_declarations_and_macros() -> None:
    source = (
        "#define K __launch_bounds__(1)\nvoid __launch_bounds__(2) g();\n"
        "// __launch_bounds__(3)\nvoid __launch_bounds__(A,\n 1)\nf(int a)\n{}\n"
    )
    expected = source.replace("\n{", "\n{ convt3d_host::keep_launch_bounds(convt3d_number_A, 1);")
    assert rewrite_launch_bounds(source, ("A",)) == expected


def test_too_much_shared_memory() -> None:
    with pytest.raises(LaunchError, match=r"__shared__ big at line 9: 60000 bytes"):
        launch("  __shared__ float big[15000];\n  big[0] = 1;")


def test_compile_error_shows_numbered_source() -> None:
    with pytest.raises(CompileError, match=r">\s+9 \|.*nonsense"):
        launch("  nonsense();")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendError, match="apt install g"):
        compiler()


def test_rewriting_keeps_lines_and_leaves_comments() -> None:
    source = "void f() {\n  // __shared__ int a;\n  __shared__\n    int b[4];\n  char* s = \"__shared__ int c;\";\n}\n"
    rewritten = rewrite_shared(source, "f.cu")
    assert rewritten.count("\n") == source.count("\n")
    assert "CONVT3D_SHARED(b, int[4]);" in rewritten
    assert "// __shared__ int a;" in rewritten and '"__shared__ int c;"' in rewritten


def test_shared_outside_a_function() -> None:
    with pytest.raises(KernelError, match=r"f.cu:2: __shared__ outside a function"):
        rewrite_shared("int x;\nextern __shared__ float tile[];\n", "f.cu")


def test_rewriting_of_specialized_numbers_keeps_lines_and_leaves_what_is_no_macro() -> None:
    source = (
        "// SPECIALIZED(A, a)\nint x = SPECIALIZED(\n    A == 1 && B > 8 ? 2 : 1, of(a, b)), y = SPECIALIZED(B, false), "
        "z = SPECIALIZED(C, c);\n"
    )
    rewritten = rewrite_specialized(source, ("A", "B"), "f.cu")
    assert rewritten.count("\n") == source.count("\n") and rewritten.startswith("// SPECIALIZED(A, a)\n")
    assert "specialized(convt3d_number_A == 1 && convt3d_number_B > 8 ? 2 : 1, of(a, b), " in rewritten
    assert "y = (convt3d_number_B), z = SPECIALIZED(C, c);" in rewritten
    assert rewrite_specialized(source, (), "f.cu") == source
    constant = "int a = 0; constexpr int SIZE = SPECIALIZED(A, 8); int b = "
    assert rewrite_specialized(constant + "SPECIALIZED(A, 4 / a)", ("A",), "f.cu").startswith(constant + "convt3d_host::specialized(")
    with pytest.raises(KernelError, match=r"f.cu:2: SPECIALIZED takes a macro and its value, was given 3 arguments"):
        rewrite_specialized("\nSPECIALIZED(A, f(a, b), c)", ("A",), "f.cu")


def test_a_macro_that_chooses_a_way_by_itself_has_its_number() -> None:
    source = "__launch_bounds__(A ? 1 : 2) void f() {\n#if A || 1\n  x = A ? 1 : 2;\n  y = c && (A || d), z = !A && e;\n#endif\n"
    kept = "  if constexpr (A && B) g();\n  int s[A + 1], t = A * 2;\n}\n"
    expected = source.replace("= A ?", "= convt3d_number_A ?").replace("(A ||", "(convt3d_number_A ||").replace("!A", "!convt3d_number_A")
    assert rewrite_specialized(source + kept, ("A",), "f.cu") == expected + kept


CONSTANTS = """
/* convt3d
pass = "fprop"
[specialize]
KERNEL = "kernel_d"
[[launch]]
grid = 1
block = 1
*/
#include "convt3d/core/problem.cuh"
#ifndef KERNEL
#define KERNEL 3
#endif
struct Taps {
  int count, last;
};
__device__ constexpr Taps taps_of(int kernel) { return {kernel, kernel - 1}; }
#if defined(__CUDACC__)
constexpr Taps TAPS = taps_of(KERNEL);
constexpr int TWICE = KERNEL * 2;
#endif
__global__ void trial(const Problem problem, const float* input, float* output) {
#if !defined(__CUDACC__)
  const Taps TAPS = taps_of(problem.kernel_size[0]);
  const int TWICE = 2 * problem.kernel_size[0];
#endif
  output[0] = TAPS.last + TWICE;
}
"""


def test_constants_that_a_gpu_has_from_macros_are_compared() -> None:
    backend, output = HostBackend(optimize=False), np.zeros(1, np.float32)
    tensors = {name: TensorRef(output.ctypes.data, (1,), (1,)) for name in ("input", "output")}
    other = Problem(1, 1, 1, 4, (2, 3, 3))
    run(backend, Kernel.from_source(CONSTANTS, "trial"), other, "fp32", tensors, lambda name, size: 0)
    assert output[0] == 5
    wrong = Kernel.from_source(CONSTANTS.replace('KERNEL = "kernel_d"', 'KERNEL = "kernel_h"'), "trial")
    run(backend, wrong, Problem(1, 1, 1, 4, 3), "fp32", tensors, lambda name, size: 0)
    with pytest.raises(LaunchError, match=r"specialization: TAPS at .*trial.cu:\d+ is another with the numbers of \[specialize\]"):
        run(backend, wrong, other, "fp32", tensors, lambda name, size: 0)


SPECIALIZED = """
/* convt3d
pass = "fprop"
[specialize]
STRIDE = "stride_h"
EVEN = "stride_w % 2 == 0"
[[launch]]
grid = 1
block = 1
*/
#include "convt3d/core/problem.cuh"
#include "convt3d/core/specialized.cuh"
#ifndef STRIDE
#define STRIDE 7
#define EVEN 0
#endif
__global__ void trial(const Problem problem, const float* input, float* output) {
  output[0] = SPECIALIZED(STRIDE * 10, problem.stride[1] * 10) + SPECIALIZED(EVEN, false);
}
"""


def test_the_host_has_the_numbers_that_a_gpus_binary_is_compiled_for() -> None:
    backend, output = HostBackend(optimize=False), np.zeros(1, np.float32)
    tensors = {name: TensorRef(output.ctypes.data, (1,), (1,)) for name in ("input", "output")}
    for stride, expected in (((1, 2, 4), 21), ((1, 3, 5), 30)):
        run(backend, Kernel.from_source(SPECIALIZED, "trial"), Problem(1, 1, 1, 4, 1, stride=stride), "fp32", tensors, lambda name, size: 0)
        assert output[0] == expected
    wrong = Kernel.from_source(SPECIALIZED.replace('STRIDE = "stride_h"', 'STRIDE = "stride_w"'), "trial")
    same, other = (Problem(1, 1, 1, 4, 1, stride=stride) for stride in (2, (1, 2, 3)))
    run(backend, wrong, same, "fp32", tensors, lambda name, size: 0)
    with pytest.raises(LaunchError, match=r"specialization: STRIDE \* 10 is 30 at .*trial.cu:\d+, and stands for 20 there"):
        run(backend, wrong, other, "fp32", tensors, lambda name, size: 0)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts mappings as Linux shows them")
@pytest.mark.parametrize("one_backend", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_stacks_of_kernels_that_are_not_kept_are_given_back(one_backend: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux lets a process have 65530 mappings, and each thread's stack with its guard is two."""
    monkeypatch.setattr("cupy_convt3d.backends.host._MOST_STACKS", 2 * 512)
    shared, counts = HostBackend(optimize=False), []
    for number in (*range(6), 0):
        backend, name = shared if one_backend else HostBackend(optimize=False), f"trial_{one_backend}_{number}"
        launch(f"if (threadIdx.x < 64) output[threadIdx.x] = {number};", backend=backend, block=512, name=name)
        gc.collect()
        counts.append(len(Path("/proc/self/maps").read_text().splitlines()))
    kept = 2 if one_backend else 0
    assert max(counts) - counts[0] < kept * 1024 + 200, counts


def test_ucontext_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fallback for other processors gives the same results as the assembly."""
    monkeypatch.setattr("cupy_convt3d.backends.host._FLAGS", (*_FLAGS, "-DCONVT3D_UCONTEXT"))
    np.testing.assert_array_equal(launch(REVERSE, 4), np.arange(64)[::-1])


SANITIZED = """
import sys
from tests.test_host import launch
from cupy_convt3d.backends.host import HostBackend
print(launch(sys.argv[2], backend=HostBackend(sys.argv[1]), grid=2, shared=256)[:4])
"""


def sanitized(sanitizer: str, body: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, **sanitizer_environment(sanitizer), "PYTHONPATH": root}
    command = [sys.executable, "-c", SANITIZED, sanitizer, body]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


RACES = {
    "missing barrier": (REVERSE.replace("__syncthreads();", ""), "data race"),
    "missing second barrier": (
        "__shared__ float s[64];\nfor (int i = 0; i < 3; ++i) {\ns[threadIdx.x] = i;\n__syncthreads();\n"
        "if (blockIdx.x == 0) output[threadIdx.x] = s[63 - threadIdx.x];\n}",
        "data race",
    ),
    "two blocks, one output": ("output[threadIdx.x] = input[threadIdx.x];", "data race"),
    "a plain += of all threads": ("if (blockIdx.x == 0) output[0] += input[threadIdx.x];", "data race"),
}
OVERRUNS = {
    "output": ("if (blockIdx.x == 0) output[threadIdx.x + 10] = 1;", "heap-buffer-overflow"),
    "input": ("if (blockIdx.x == 0) output[threadIdx.x] = input[static_cast<int>(threadIdx.x) - 1];", "heap-buffer-overflow"),
    "static shared": ("__shared__ float s[63];\ns[threadIdx.x] = 1;", "out of bounds"),
    "dynamic shared": ("extern __shared__ float s[];\ns[threadIdx.x + 1] = 1;", "use-after-poison"),
}
GOOD = "if (blockIdx.x == 1) return;\n" + REVERSE


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.parametrize("case", RACES)
def test_thread_sanitizer_finds(case: str) -> None:
    body, words = RACES[case]
    done = sanitized("thread", body)
    assert done.returncode == 66 and words in done.stderr and "trial.cu:" in done.stderr, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.parametrize("case", OVERRUNS)
def test_address_sanitizer_finds(case: str) -> None:
    body, words = OVERRUNS[case]
    done = sanitized("address", body)
    assert done.returncode == 66 and words in done.stderr and "trial.cu:" in done.stderr, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.sanitizer
@pytest.mark.parametrize("sanitizer", ["thread", "address", "undefined"])
def test_sanitizers_are_silent_on_a_right_kernel(sanitizer: str) -> None:
    done = sanitized(sanitizer, GOOD)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "[63. 62. 61. 60.]" in done.stdout
