"""`check`, the child process it works in, and the command line over it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.internal.conjecture.engine import ConjectureRunner, ExitReason
from selection import checked, some

from cupy_convt3d import cli, registry
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.errors import BackendError, CompileError, KernelError
from cupy_convt3d.kernel import ARCHITECTURES, Kernel
from cupy_convt3d.lab import strategies
from cupy_convt3d.lab.check import _Search, check, examples
from cupy_convt3d.lab.check.report import CheckReport
from cupy_convt3d.lab.check.shrink import shrink
from cupy_convt3d.lab.run.child import Child, summarize_report
from cupy_convt3d.lab.run.execution import Arrays, Executor, Failure, Work
from cupy_convt3d.lab.run.far import APART_LAYOUTS, far_problems
from cupy_convt3d.lab.run.verify import ALIKE, Outcome, _Example, _layouts_of, executor_on, verify
from cupy_convt3d.lab.run.worker import Worker
from cupy_convt3d.lab.tensors import KINDS, SPECIAL_KINDS, kinds_of
from cupy_convt3d.problem import Problem
from cupy_convt3d.source import Instance

SPECIMENS = Path(__file__).parent / "specimens"
TINY = Problem.parse("n1_c1to1_i1_k1")

# A plain CUDA file, no header of ours: a block for each output, products shared out over its threads, added up by shuffles
# in a warp, in static shared memory over warps, in dynamic shared memory over all, with an atomic at the end.
PLAIN = """/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[[launch]]
grid = "output_numel"
block = 64
shared_bytes = 256
*/
#define OFFSET(n, channels, c, D, H, W, d, h, w) ((((((long long)(n)) * (channels) + (c)) * (D) + (d)) * (H) + (h)) * (W) + (w))
extern "C" __global__ void plain(const float* __restrict__ input, const float* weight, const float* bias, float* output,
    int in_channels, int out_channels, int groups, int input_d, int input_h, int input_w, int output_d, int output_h,
    int output_w, int kernel_d, int kernel_h, int kernel_w, int stride_d, int stride_h, int stride_w, int padding_d,
    int padding_h, int padding_w, int dilation_d, int dilation_h, int dilation_w) {
  extern __shared__ float own[];
  __shared__ float warps[2], total;
  const int thread = threadIdx.x, taps = kernel_d * kernel_h * kernel_w;
  int rest = blockIdx.x;
  const int w = rest % output_w; rest /= output_w;
  const int h = rest % output_h; rest /= output_h;
  const int d = rest % output_d; rest /= output_d;
  const int co = rest % out_channels, n = rest / out_channels;
  const int inputs = in_channels / groups, outputs = out_channels / groups, first = co / outputs * inputs;
  if (thread == 0) total = bias ? bias[co] : 0.0f;
  own[thread] = 0;
  for (int i = thread; i < inputs * taps; i += 64) {
    const int ci = first + i / taps, t = i % taps;
    const int md = d + padding_d - t / (kernel_h * kernel_w) * dilation_d;
    const int mh = h + padding_h - t / kernel_w % kernel_h * dilation_h, mw = w + padding_w - t % kernel_w * dilation_w;
    if (md < 0 || mh < 0 || mw < 0 || md % stride_d || mh % stride_h || mw % stride_w) continue;
    if (md / stride_d >= input_d || mh / stride_h >= input_h || mw / stride_w >= input_w) continue;
    own[thread] += input[OFFSET(n, in_channels, ci, input_d, input_h, input_w, md / stride_d, mh / stride_h, mw / stride_w)] *
                   weight[((long long)ci * outputs + co % outputs) * taps + t];
  }
  __syncthreads();
  float sum = own[thread ^ 1];  // another thread's: the barrier matters
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xffffffffu, sum, step);
  if (thread % 32 == 0) warps[thread / 32] = sum;
  __syncthreads();
  if (thread < 2) atomicAdd(&total, warps[thread]);
  __syncthreads();
  if (thread == 0) output[blockIdx.x] = total;
}
"""


@pytest.fixture
def plain_file(tmp_path: Path) -> Path:
    path = tmp_path / "plain.cu"
    path.write_text(PLAIN.replace('dtypes = ["fp32"]', 'dtypes = ["fp32"]\ndeterministic = false'))
    return path


# `make search` takes every dtype and all problems, and draws more. CI has a new seed each time.
SEED, EXAMPLES = int(os.environ.get("SEED") or 0), int(os.environ.get("SEARCH_EXAMPLES") or 0)


@pytest.mark.parametrize("name", registry.kernels())
def test_shipped_kernels_pass(name: str) -> None:
    """The quick check; the slow tests have the whole one."""
    dtypes = registry.kernel(name).dtypes if EXAMPLES else (checked(registry.kernel(name)),)
    report = check(name, backend="host", dtypes=dtypes, examples=EXAMPLES or 60, seed=SEED, quick=not EXAMPLES)
    assert report.passed, str(report)
    assert report.dtypes == dtypes
    assert set(report.features) | set(report.not_applicable) == set(strategies.FEATURES)
    if not registry.kernel(name).restrictions:
        assert not report.not_applicable
        assert report.examples >= (EXAMPLES or 60) + len(strategies.EDGE_PROBLEMS) * 2 * len(report.dtypes)
    assert 0 < report.worst_ratio == max(report.ratios) <= 1
    assert not any("spreads NaN" in reason for reason in report.untried.get("named problems", ())), str(report)
    assert report.verdict == "passed", "past 2^32 elements too"
    tried, untried = report.tried.get("far problems", 0), report.untried.get("far problems", {})
    assert tried + sum(untried.values()) == len(far_problems(registry.kernel(name).pass_name))
    if registry.kernel(name).architectures == ARCHITECTURES:  # else blocks stay, and only strides are far
        # fprop_col2im takes few voxels alone, and of the far problems that have few the one with as many groups
        assert tried >= (1 if name == "fprop_col2im" else 4), str(report)
    assert report.tried["problems with far strides"] >= APART_LAYOUTS


@pytest.mark.slow
@pytest.mark.parametrize("name", registry.kernels())
def test_shipped_kernels_pass_in_another_dtype(name: str) -> None:
    """The whole check in one of the dtypes that the quick tests have less of, another for the next seed. `make search` has them all."""
    kernel = registry.kernel(name)
    others = [dtype for dtype in kernel.dtypes if dtype != checked(kernel)] or kernel.dtypes
    report = check(name, backend="host", dtypes=[others[SEED % len(others)]], examples=60, seed=SEED)
    assert report.passed, str(report)


def test_a_quick_check_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    name = "fprop_tiled"
    tried = examples.configurations(registry.kernel(name), low_grid=True)
    whole = sum(len(examples.tails(one, "fp32")) + len(examples.layouts(one, "fp32")) for one in tried)
    report = check(name, backend="host", examples=1, dtypes=["fp32"], quick=True)
    assert report.passed, str(report)
    (left,) = (count for reason, count in report.untried["problems of tiles and layouts"].items() if "quick check" in reason)
    assert 0.9 * whole < left < 0.95 * whole
    assert "quick check" in str(report.untried["problems at corners of the declaration"])
    assert "problems of values to search" not in report.tried and "quick check" in str(report.untried["problems of values to search"])
    assert cli.main(["check", name, "--backend", "host", "--examples", "1", "--dtype", "fp32", "--quick", "--seed", "5"]) == 0
    assert "a quick check leaves them out" in capsys.readouterr().out


@pytest.mark.usefixtures("few_problems")
@pytest.mark.parametrize("sanitize", [None, "address", "undefined", "thread"])
def test_plain_cuda_file_passes(plain_file: Path, sanitize: str | None) -> None:
    report = check(plain_file, backend="host", examples=0 if sanitize else 15, sanitize=sanitize)
    assert report.passed, str(report)
    assert report.untried.keys() <= {"far problems", "problems of tiles and layouts", "second runs", "drawn problems"}


def yardstick_s() -> float:
    """Seconds of some work like the check's own; .1 where the bound was set, up to twice that on a core that others share."""
    start, array = time.perf_counter(), np.ones(8)
    for i in range(50_000):
        array = np.maximum(array * 0.5, float(i % 7)).reshape(2, 4).reshape(-1)
    return time.perf_counter() - start


@pytest.mark.alone
def test_tiny_examples_are_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 examples of a naive kernel a second on one worker, compile included, where the yardstick takes .1 s; best of up to five."""
    rates = []
    for attempt in range(5):
        monkeypatch.setenv("CONVT3D_CACHE", str(tmp_path / str(attempt)))
        before, start = yardstick_s(), time.perf_counter()
        report = check("fprop_gather", backend="host", examples=100, dtypes=["fp32"])
        seconds = time.perf_counter() - start
        rates.append(report.examples / seconds * max(1.0, (before + yardstick_s()) / 2 / 0.1))
        assert report.passed
        assert list((tmp_path / str(attempt)).rglob("*.so")), "nothing was compiled"
        if rates[-1] >= 300:
            break
    assert max(rates) >= 300, rates


class Card(HostBackend):
    """A backend that says it is on a GPU of sm_86, which gives a block less than many a kernel asks for; nothing is compiled."""

    arch, multiprocessors, shared_limit = "sm_86", 82, 40 << 10

    def build(self, instance: Instance) -> None:
        raise CompileError("is the child's to say")


class Ran:
    """In place of a child process: it runs what the card can do and must be asked for nothing else."""

    backend, sanitizer = "cuda", None

    def __init__(self, kernel: Kernel, card: Card) -> None:
        self.kernel, self.card, self.examples = kernel, card, 0

    def ask(self, problem: Problem, dtype: str, kind: str, seed: int) -> Callable[[], Outcome]:
        assert self.card.why_not(self.kernel, problem, dtype) is None
        self.examples += 1
        return lambda: Outcome(True)


class Loads(Executor):
    """It notes what a child would load for what it is to run, and runs nothing."""

    def __init__(self, card: Card) -> None:
        self.name, self.arch, self.limits = "cuda", card.arch, card.limits
        self.loaded = dict[Instance, None]()

    def start(self, work: Work, runs: int, arrays: Arrays, kernel: Kernel, *arguments: Any) -> None:
        problem, dtype, *_, numbers = arguments
        self.loaded[Instance.of_plan(kernel, dtype, kernel.plan(problem, dtype, self.multiprocessors, numbers.output_layout))] = None

    def finish(self) -> Arrays:
        raise Failure("nothing was run")


class Loading(Ran):
    """It has what it runs loaded."""

    def __init__(self, kernel: Kernel, card: Card) -> None:
        super().__init__(kernel, card)
        self.executor = Loads(card)

    def ask(self, problem: Problem, dtype: str, kind: str, seed: int) -> Callable[[], Outcome]:
        with pytest.raises(Failure):
            verify(self.executor, self.kernel, problem, dtype, kind, seed)
        return super().ask(problem, dtype, kind, seed)


@pytest.mark.parametrize(("name", "dtype"), [("fprop_patch_wgmma", "tf32"), ("fprop_rolling_wgmma", "bf16")])
def test_what_a_gpu_compiles_is_compiled_on_all_cores_in_the_order_in_which_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    """All that the known problems need, in the layouts that they get, and half of the drawn ones at least."""

    class Hopper(Card):
        arch, multiprocessors, shared_limit = "sm_90a", 132, 227 << 10
        built: ClassVar[list[Instance]] = []

        def build(self, instance: Instance) -> None:
            self.built.append(instance)
            super().build(instance)

    monkeypatch.setattr("cupy_convt3d.backends.cuda.CudaBackend", Hopper)
    kernel, card, said = registry.kernel(name), Hopper(), []
    search = _Search(kernel, "cuda", [dtype], None, None, lambda done, total, text: said.append(text))
    with ThreadPoolExecutor(1) as search.compiler:
        search.precompile(None, 100, 0, alone=False)
    assert said == [f"{name}: compiling for {len(Hopper.built)} kinds of problems"]
    search.worker = worker = Loading(kernel, card)  # type: ignore[assignment]
    search.run_all(0, 0)
    known = list(worker.executor.loaded)
    assert Hopper.built[: len(known)] == known and len(known) > 20
    search.run_random(100, 0)
    drawn = list(worker.executor.loaded)[len(known) :]
    assert len(set(drawn) & set(Hopper.built)) >= len(drawn) / 2 and len(set(Hopper.built)) == len(Hopper.built) > len(known)
    Hopper.built.clear()
    search.precompile(None, 100, 0, alone=True)
    assert not Hopper.built


def test_nothing_is_run_that_the_gpu_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card()
    monkeypatch.setattr("cupy_convt3d.backends.cuda.CudaBackend", lambda: card)
    for name, tried in (("fprop_implicit_gemm_mma", True), ("fprop_rolling_wgmma", False)):
        kernel = registry.kernel(name)
        search = _Search(kernel, "cuda", ["tf32x3"], None, None, None)
        search.worker = ran = Ran(kernel, card)  # type: ignore[assignment]
        with ThreadPoolExecutor(1) as search.compiler:
            search.precompile(None, 10, 0, alone=False)
        search.run_all(10, 0)
        search.judge_coverage()
        assert (ran.examples > 0) is tried and search.report.examples == ran.examples
        reason = "of shared memory, this GPU gives it 40960" if tried else "fprop_rolling_wgmma is for sm_90a, not for sm_86"
        left_out = [skipped for reasons in search.report.untried.values() for skipped in reasons]
        assert any(reason in skipped for skipped in left_out), left_out
        assert not search.report.missing, "what the GPU refuses is not the check's to reach"


def test_the_command_line_leaves_out_what_is_for_other_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("cupy_convt3d.backends.cuda.CudaBackend", Card)
    monkeypatch.setattr("cupy_convt3d.lab.check.check", lambda kernel, **_: CheckReport(kernel.name, "cuda", kernel.dtypes))
    assert cli.main(["check", "--backend", "cuda"]) == 0
    out = capsys.readouterr().out
    assert "fprop_rolling_wgmma on cuda: not checked: fprop_rolling_wgmma is for sm_90a, not for sm_86\n" in out
    able = [name for name, kernel in registry.kernels().items() if kernel.why_not_on("sm_86") is None]
    assert out.endswith(f"{len(able)} of {len(able)} kernels passed\n") and 0 < len(able) < len(registry.kernels())
    assert cli.main(["fuzz", "fprop_rolling_wgmma", "--backend", "cuda", "--findings", str(tmp_path / "found.jsonl")]) == 2
    assert "error: fprop_rolling_wgmma is for sm_90a, not for sm_86\n" in capsys.readouterr().err


@pytest.mark.usefixtures("few_problems")
def test_same_seed_same_report() -> None:
    first, second, other = (check("fprop_gather", backend="host", dtypes=["fp32"], examples=40, seed=s) for s in (5, 5, 6))
    assert first.ratios == second.ratios != other.ratios


# A gather with two tunables of which `tune` tries several values; WRONG is what is added to an output.
SEARCHED = registry.kernel("fprop_gather").source
SEARCHED = SEARCHED.replace("[[launch]]", "[search]\nROUNDS = [1, 2, 4]\nWIDTH = [2, 8]\n[[launch]]", 1)
DEFAULTS = "#ifndef ROUNDS\n#define ROUNDS 2\n#endif\n#ifndef WIDTH\n#define WIDTH 2\n#endif\n"
SEARCHED = SEARCHED.replace('#include "', f'{DEFAULTS}#include "', 1)


@pytest.mark.usefixtures("few_problems")
@pytest.mark.parametrize(("wrong", "value"), [("ROUNDS == 1", 1), ("ROUNDS * WIDTH == 32", 4)])
def test_what_is_wrong_at_a_value_to_search_alone_is_found(wrong: str, value: int) -> None:
    source = SEARCHED.replace("finish(sum)", f"finish({wrong} ? sum + 1 : sum)")
    assert source != SEARCHED
    report = check(Kernel.from_source(source, "searched"), backend="host", examples=5)
    assert report.counterexample is not None and dict(report.counterexample.tunables)["ROUNDS"] == value
    assert f"--tunable ROUNDS={value} " in str(report.reproduce)


@pytest.mark.usefixtures("few_problems")
def test_values_that_do_not_compile_are_left_out() -> None:
    source = SEARCHED.replace('#include "', '#if ROUNDS == 4\n#error "four"\n#endif\n#include "', 1)
    report = check(Kernel.from_source(source, "searched"), backend="host", dtypes=["fp32"], examples=5)
    assert report.passed, str(report)
    assert report.tried["problems of values to search"] >= 20
    assert any(reason.startswith("ROUNDS=4, WIDTH=8: searched[fp32]: ") for reason in report.untried["problems of values to search"])


def test_values_to_search_are_the_smallest_and_the_largest_that_leave_problems() -> None:
    def of(source: str) -> list[dict[str, int]]:
        return [dict(kernel.changed_tunables) for kernel in examples.searched(Kernel.from_source(source, "searched"))]

    rule = '[restrictions]\n"ROUNDS * WIDTH * groups <= 16" = "too many"\n[search]'
    assert of(SEARCHED) == [{"ROUNDS": 1}, {"ROUNDS": 4, "WIDTH": 8}]
    assert of(SEARCHED.replace("[search]", rule)) == [{"ROUNDS": 1}, {"ROUNDS": 4}]
    assert of(SEARCHED.replace("[1, 2, 4]", "[2]")) == [{"WIDTH": 8}], "the shipped values are checked anyway"
    forced = registry.kernel("fprop_patch_mma")
    assert all(one.tunables["TILE"] in (1, 5) for one in examples.searched(forced))
    assert not examples.searched(registry.kernel("fprop_gather"))


def test_what_is_wrong_near_a_mode_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another padding; the mode itself is right."""
    mode = Problem.parse("n1_c2to4_i2x2x1_k1x60x1_p0x30x0_g2")
    monkeypatch.setattr("cupy_convt3d.lab.check.tails", lambda *_: [])
    monkeypatch.setattr("cupy_convt3d.lab.check.layouts", lambda *_: [(mode, 0)])
    source = registry.kernel("fprop_gather").source
    wrong = "finish(problem.kernel_size[1] >= 59 && problem.padding[1] != 30 ? sum + 1 : sum)"
    report = check(Kernel.from_source(source.replace("finish(sum)", wrong), "near"), backend="host", dtypes=["fp32"], examples=200)
    assert report.counterexample is not None and report.counterexample.problem.kernel_size[1] >= 59, str(report)


TINY_ONLY = '[restrictions]\n"input_numel * weight_numel * output_numel == 1" = "too large"\n[[launch]]'
NOT_DRAWN = "there was no other to draw, or the kernel refuses nearly all"


class Asked:
    """In place of a child process: it keeps what it is asked for."""

    backend, sanitizer = "host", None

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.examples = kernel, list[tuple[Problem, str, str, int]]()

    def ask(self, *example: Any) -> Callable[[], Outcome]:
        self.examples.append(example)
        return lambda: Outcome(True)


@pytest.mark.parametrize("name", ["fprop_gather", "fprop_window_mma", "dgrad_gather"])
def test_larger_problems_have_nan_and_infinities_once_each_in_some_dtype(name: str) -> None:
    search = _Search(registry.kernel(name), "host", None, None, None, None)
    search.worker = asked = Asked(search.kernel)  # type: ignore[assignment]
    search.run_each(search.tail_examples(search.configurations[:1]))
    larger = {problem for dtype in search.kernel.dtypes for problem, _ in examples.layouts(search.kernel, dtype)}
    few = {problem for problem, *_ in asked.examples} & larger - set(examples.tails(search.kernel, search.kernel.dtypes[0]))
    assert len(few) > 50
    for kind in ("nan", "inf"):
        spoilt = [(problem, dtype) for problem, dtype, kind_, _ in asked.examples if kind_ == kind]
        assert {problem for problem, _ in spoilt} >= few and len({problem for problem, _ in spoilt}) == len(spoilt)
        counts = [sum(dtype == one for _, dtype in spoilt) for one in search.kernel.dtypes]
        assert min(counts) > 10, counts


@pytest.mark.usefixtures("few_problems")
def test_missed_feature_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(strategies.FEATURES, "stride > 1000", lambda problem: max(problem.stride) > 1000)
    report = check("fprop_gather", backend="host", dtypes=["fp32"], examples=5)
    assert not report.passed
    assert report.missing == ["stride > 1000"]
    assert report.counterexample is None
    assert "MISSED: stride > 1000" in str(report)


@pytest.mark.usefixtures("few_problems")
def test_refused_feature_is_not_applicable() -> None:
    source = registry.kernel("fprop_gather").source
    rules = "[restrictions]\n'groups == 1' = 'groups are not done'\n'in_channels % 8 == 0' = 'needs channels by eights'\n"
    kernel = Kernel.from_source(source.replace("[[launch]]", rules + "[[launch]]", 1), "picky")
    report = check(kernel, backend="host", dtypes=["fp32"], examples=20)
    assert report.passed, str(report)
    assert set(report.not_applicable) == {"depthwise", "channel multiplier", "groups 1 < g < C"}
    assert "size-1 axis" in report.features  # with eight channels
    assert "groups are not done" in report.untried["drawn problems"]
    assert "  not tried: " in str(report) and "named problems: groups are not done" in str(report)


@pytest.mark.usefixtures("few_problems")
def test_a_pass_says_that_no_far_problem_could_be_tried(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """By a restriction that is declared or by the type of a parameter: a call would get that error, so no result is wrong."""
    rule = "[restrictions]\n'max(input_numel, output_numel, weight_numel) < 2 * 1024 * 1024 * 1024' = 'it counts in 32 bits'\n[[launch]]"
    counted = PLAIN.replace("int in_channels", "int input_numel, int output_numel, int weight_numel, int in_channels")
    for text, reason in ((PLAIN.replace("[[launch]]", rule), "it counts in 32 bits"), (counted, "does not fit its parameter type int32")):
        path = tmp_path / "counts.cu"
        path.write_text(text.replace('dtypes = ["fp32"]', 'dtypes = ["fp32"]\ndeterministic = false'))
        assert cli.main(["check", str(path), "--backend", "host", "--examples", "0", "--kind", "exact", "--kind", "far"]) == 0
        notice, first, *rest = capsys.readouterr().out.splitlines()
        assert "--sandbox" in notice
        assert "passed, but no far problem could be tried: " in first and reason in "".join([first, *rest])
        assert all("far problems: " in line for line in rest if reason in line)
        assert cli.main(["check", str(path), "--backend", "host", "--kind", "far"]) == 1
        assert "nothing was run" in capsys.readouterr().out


@pytest.mark.usefixtures("few_problems")
def test_a_pass_says_so_where_only_strides_were_far() -> None:
    rule = "[restrictions]\n'max(input_numel, output_numel, weight_numel) < 1000000' = 'it is for small tensors'\n[[launch]]"
    small = Kernel.from_source(registry.kernel("fprop_gather").source.replace("[[launch]]", rule, 1), "small")
    report = check(small, backend="host", dtypes=["fp32"], examples=0, kinds=["exact", "far"])
    assert report.passed and report.tried["problems with far strides"] >= APART_LAYOUTS
    assert report.verdict == "passed, but no far problem could be tried: it is for small tensors"


def test_32_bit_indices_of_a_plain_kernel_are_found() -> None:
    """Its grid has a block for each output, which is refused past 2^31; fewer outputs than inputs are not."""
    report = check(Kernel.from_source(PLAIN.replace("(long long)", ""), "narrow"), backend="host", examples=0, kinds=["far"])
    assert report.counterexample is not None and "32 bits" in report.counterexample.message, str(report)


@pytest.mark.usefixtures("few_problems")
def test_an_addition_that_is_not_atomic_is_a_race_where_sums_come_in_any_order() -> None:
    """On one core threads take turns, so it loses nothing there: only the thread sanitizer sees it."""
    scatter = registry.kernel("fprop_scatter")
    wrong = scatter.source.replace("atomicAdd(sum, x * to_accum(*w));", "*sum += x * to_accum(*w);")
    assert wrong != scatter.source
    report = check(Kernel.from_source(wrong, "scatter"), backend="host", dtypes=["fp32"], examples=20)
    assert report.counterexample is not None and "data race" in report.counterexample.message, str(report)
    assert "--sanitize thread" in report.reproduce
    report = check(Kernel.from_source(scatter.source, "scatter"), backend="host", dtypes=["fp32"], examples=20)
    assert report.passed and report.tried["problems under the thread sanitizer"] > 4, str(report)


@pytest.mark.usefixtures("few_problems")
def test_an_addition_that_is_not_atomic_is_a_race_where_the_declaration_says_nothing_of_it() -> None:
    """Exact sums are the same in any order, so two runs do not differ."""
    scatter = registry.kernel("fprop_scatter").source.replace("deterministic = false", "")
    add = "atomicAdd(sum, x * to_accum(*w));"
    wrong = scatter.replace(add, f"if (problem.stride[2] >= problem.kernel_size[2]) *sum += x * to_accum(*w);\nelse {add}")
    assert wrong != scatter
    for source, passes in ((scatter, True), (wrong, False)):
        report = check(Kernel.from_source(source, "scatter"), backend="host", dtypes=["fp32"], examples=5, kinds=["exact"])
        assert report.passed == passes and report.tried["problems under the thread sanitizer"] > 0, str(report)
    assert report.counterexample is not None and "data race" in report.counterexample.message
    assert not examples.calls_atomics(Kernel.from_source(wrong.replace("atomicAdd(", "/* atomicAdd( */ add("), "add"))


@pytest.mark.usefixtures("few_problems")
def test_what_depends_on_where_a_tensor_begins_is_no_race() -> None:
    """In the second run tensors begin with their pages."""
    source = registry.kernel("fprop_gather").source
    begins = "reinterpret_cast<unsigned long long>(input.at(0, 0, 0, 0, 0)) % 4096 == 0"
    changed = source.replace("finish(sum)", f"finish({begins} ? sum + 1 : sum)")
    report = check(Kernel.from_source(changed, "placed"), backend="host", dtypes=["fp32"], examples=0)
    assert report.counterexample is not None
    assert "where tensors begin at other addresses" in report.counterexample.message, str(report)
    assert "race" not in report.counterexample.message


def test_a_race_that_shows_in_the_first_order_is_called_one() -> None:
    path = SPECIMENS / "race_reused_tile.cu"
    report = check(path, backend="host", problem=Problem.parse("n1_c33to1_i1_k1x1x2"), kinds=["exact"])
    assert report.counterexample is not None and "threads race" in report.counterexample.message, str(report)
    report = check(SPECIMENS / "tail_of_channels.cu", backend="host", problem=Problem.parse("n1_c5to1_i1_k1"), kinds=["exact"])
    assert report.counterexample is not None and "race" not in report.counterexample.message, str(report)


def test_what_another_order_says_of_a_failure_is_its_diagnosis() -> None:
    """Outputs are wrong in any order; where another thread than the first comes first, it alone waits at a barrier."""
    wrong = PLAIN.replace(
        "  if (thread == 0) output[blockIdx.x] = total;",
        """  __shared__ int arrived;
  if (thread == 0) arrived = 0;
  __syncthreads();
  if (atomicAdd(&arrived, 1) == 0 && thread != 0) {
    __syncthreads();
    total += 1;
  }
  __syncthreads();
  if (thread == 0) output[blockIdx.x] = total + 1;""",
    )
    assert wrong != PLAIN
    report = check(Kernel.from_source(wrong, "late"), backend="host", problem=TINY, kinds=["exact"])
    assert report.counterexample is not None and "__syncthreads" in report.counterexample.message, str(report)


# A gather whose grid stops growing at a number that no tiny problem gets to.
CUT = registry.kernel("fprop_gather").source.replace(
    'grid = "ceil_div(output_numel, BLOCK_THREADS)"', 'grid = "min(ceil_div(output_numel, BLOCK_THREADS), 65535)"'
)


def test_a_grid_that_stops_growing_is_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (path := tmp_path / "cut.cu").write_text(CUT)
    report = check(path, backend="host", dtypes=["fp32"], examples=0, kinds=["exact"])
    assert report.counterexample is not None and "no more blocks than 2" in report.counterexample.message, str(report)
    assert report.reproduce is not None
    line = report.reproduce.split()
    assert line[:2] == ["convt3d", "check"] and "--grid-limit 2" in report.reproduce
    assert cli.main(line[1:]) == 1 and "FAILED" in capsys.readouterr().out
    limit = line.index("--grid-limit")
    assert cli.main([*line[1:limit], *line[limit + 2 :]]) == 0, "as it is the problem is too small"


def test_a_number_that_more_than_a_grid_goes_by_stays() -> None:
    def grids(source: str) -> list[object]:
        return [launch.grid[0] for launch in examples.limit_grid(Kernel.from_source(source, "cut")).launches]

    assert grids(CUT) == ["min(ceil_div(output_numel, BLOCK_THREADS), 2)"]
    text = "min(ceil_div(output_numel, BLOCK_THREADS), 65535)"
    named = CUT.replace(text, "blocks").replace("[[launch]]", f'[constants]\nblocks = "{text}"\n[[launch]]', 1)
    low = examples.limit_grid(Kernel.from_source(named, "cut"))
    assert low.constants["blocks"] == "min(ceil_div(output_numel, BLOCK_THREADS), 2)" and examples.has_low_grid(low)
    for same in (
        CUT.replace("[[launch]]", '[restrictions]\n"output_numel <= 65535 * BLOCK_THREADS" = "few blocks"\n[[launch]]'),
        CUT.replace('#include "', '#define MOST 65535\n#include "', 1),
        CUT.replace("min(ceil_div(output_numel, BLOCK_THREADS), 65535)", "ceil_div(output_numel, min(BLOCK_THREADS, 65535))"),
        registry.kernel("fprop_gather").source,
    ):
        known = Kernel.from_source(same, "cut")
        assert examples.limit_grid(known) is known and not examples.has_low_grid(known)
    of_fuzz = examples.configurations(Kernel.from_source(CUT, "cut"))
    assert not any(map(examples.has_low_grid, of_fuzz)), "it repeats tunables alone"


@pytest.mark.usefixtures("few_problems")
def test_a_report_names_what_went_one_way_only() -> None:
    cut = CUT.replace("BLOCK_THREADS), 65535)", "BLOCK_THREADS), multiprocessors * 30000)")
    report = check(Kernel.from_source(cut, "cut"), backend="host", dtypes=["fp32"], examples=0, kinds=["exact"])
    assert report.one_way == ["min(ceil_div(output_numel, BLOCK_THREADS), multiprocessors * 30000)"]
    assert f"only one way was tried of {report.one_way[0]}" in str(report)


@pytest.mark.usefixtures("few_problems")
def test_values_to_search_meet_each_dtype_that_the_declaration_tells_apart() -> None:
    text = SEARCHED.replace("[search]", '[constants]\nparts = "1 + itemsize // 8"\n[search]')
    text = text.replace('dtypes = ["fp64", "fp32", "fp16", "bf16"]', 'dtypes = ["fp16", "fp64", "bf16"]')
    searched = Kernel.from_source(text, "searched")
    assert examples.evaluated_otherwise(searched, searched.dtypes, ("fp16", "bf16")) == ["fp64"]
    assert not examples.evaluated_otherwise(Kernel.from_source(SEARCHED, "searched"), ("fp64", "fp32", "bf16"), ("fp64", "bf16"))
    wrong = text.replace("finish(sum)", "finish(ROUNDS != 2 && sizeof(scalar_t) == 8 ? sum + 1 : sum)")
    report = check(Kernel.from_source(wrong, "searched"), backend="host", examples=1)
    assert report.counterexample is not None and report.counterexample.dtype == "fp64", str(report)


def test_values_to_search_meet_tensors_of_one_layout() -> None:
    searched = Kernel.from_source(SEARCHED, "searched")
    drawn = _Search(searched, "host", None, None, None, None).searched_drawn(searched, "fp32", 0)
    assert len({problem for problem, _ in drawn}) > 15 and sum(seed in examples.CHANNELS_LAST_SEEDS for _, seed in drawn) == len(drawn) // 2


@pytest.mark.slow
def test_as_many_examples_are_drawn_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the steps towards the largest error end early; what cannot be drawn is told."""
    monkeypatch.setattr(ConjectureRunner, "optimise_targets", lambda self, **_: self.exit_with(ExitReason.max_iterations))
    kernel = registry.kernel("fprop_gather")
    for source, enough in ((kernel.source, True), (kernel.source.replace("[[launch]]", TINY_ONLY, 1), False)):
        if not enough:
            monkeypatch.setattr("cupy_convt3d.lab.check._SEEDS", st.just(0))
        search = _Search(Kernel.from_source(source, "drawn"), "host", ["fp32"], ["random"], None, None)
        search.worker = asked = Asked(search.kernel)  # type: ignore[assignment]
        search.run_random(300, 0)
        missing = search.report.untried.get("drawn problems", {}).get(NOT_DRAWN, 0)
        assert len(asked.examples) + missing == 300 and (missing == 0) == enough


FAR_PROBLEM = "n1_c65535to65535_i1x1024x66_k1x1x2_g65535"  # of other kinds 17 gigabytes would be touched
KIND_ARGUMENTS: list[list[str]] = [
    ["--problem", "n1_c2to2_i2_k3_p1"],
    ["--examples", "0"],
    ["--in-process", "--examples", "1"],
    ["--sanitize", "undefined", "--examples", "0"],
    ["--dtype", "fp16", "--examples", "1"],
]
KINDS_ALONE = [(kind, arguments) for kind in (*KINDS, *SPECIAL_KINDS, "far") for arguments in KIND_ARGUMENTS]


@pytest.mark.usefixtures("few_problems")
@pytest.mark.parametrize(("kind", "arguments"), some([("far", ["--problem", FAR_PROBLEM]), *KINDS_ALONE], 2), ids=str)
def test_each_kind_alone(kind: str, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["check", "fprop_gather", "--backend", "host", "--kind", kind, *arguments])
    done = capsys.readouterr()
    if kind == "far" and "--sanitize" in arguments:
        assert code == 2 and "without a sanitizer" in done.err
    elif kind == "exact_wide" and "fp16" in arguments:
        assert code == 1 and "do not keep wide integers" in done.out
    elif kind == "largest" and "fp16" in arguments:
        assert code == 1 and "largest: is for fp32 and tf32x3, not for fp16" in done.out
    else:
        assert code == 0, done


@pytest.mark.usefixtures("few_problems")
def test_kernel_that_refuses_everything_fails() -> None:
    source = registry.kernel("fprop_gather").source
    kernel = Kernel.from_source(source.replace("[[launch]]", "[restrictions]\n'stride_w > 999' = 'no'\n[[launch]]", 1), "never")
    report = check(kernel, backend="host", dtypes=["fp32"], examples=5)
    assert not report.passed
    assert "nothing was run" in str(report)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_verify_sees_one_wrong_voxel_in_any_layout(kind: str, seed: int) -> None:
    source = registry.kernel("fprop_gather").source
    wrong = source.replace(
        "finish(sum);", "finish(o.c == 1 && o.n == 1 && o.w == 2 ? sum * accum_t(1.01) + 1 : sum);"
    )
    assert wrong != source
    problem = Problem.parse("n2_c2to2_i1x1x3_k1")
    right = verify(HostBackend(), Kernel.from_source(source), problem, "fp32", kind, seed)
    assert right.ok, right
    outcome = verify(HostBackend(), Kernel.from_source(wrong), problem, "fp32", kind, seed)
    assert not outcome.ok
    assert outcome.index == (1, 1, 0, 0, 2)
    assert outcome.expected is not None and outcome.got is not None
    assert outcome.got == pytest.approx(np.float32(outcome.expected) * 1.01 + 1, rel=1e-5)


def test_some_seeds_draw_one_layout_for_all_tensors() -> None:
    """Three of sixteen; and 0 is contiguous."""
    problem, gather = Problem.parse("n2_c3to4_i4x5x6_k2x3x4"), registry.kernel("fprop_gather")

    def layouts(seed: int) -> list[tuple[int, ...]]:
        example = _Example(executor_on(HostBackend()), gather, problem, "fp32", "exact", seed)
        generator = _layouts_of(seed) if seed else None
        shapes = [shape for shape in problem.shapes("fprop")[0].values() if len(shape) == 5]
        names = ("input", "output", "input")
        strides = [example.place(name, shape, 0, generator).strides for name, shape in zip(names, shapes, strict=True)]
        return [tuple(sorted(range(5), key=lambda axis: -steps[axis])) for steps in strides]

    assert layouts(0) == [(0, 1, 2, 3, 4)] * 3
    alike = [seed for seed in range(1, 321) if len(set(layouts(seed))) == 1]
    assert {seed for seed in range(1, 321) if seed % 16 in ALIKE} <= set(alike) and len(ALIKE) == 3
    assert {layouts(seed)[0] for seed in alike} >= {(0, 1, 2, 3, 4), (0, 2, 3, 4, 1)}
    assert len(alike) < 160, "others have one for each"
    for seed in examples.CHANNELS_LAST_SEEDS:
        assert seed % 16 in ALIKE and layouts(seed) == [(0, 2, 3, 4, 1)] * 3


@pytest.mark.usefixtures("few_problems")
def test_nan_that_is_multiplied_by_zero_is_seen() -> None:
    """A kernel that reads some input where no tap leads to one, and takes it times zero, is right on numbers alone."""
    source = registry.kernel("fprop_gather").source
    zero_times = source.replace("if (iw < 0) continue;", "").replace("id, ih, iw)", "id, ih, iw < 0 ? 0 : iw)")
    zero_times = zero_times.replace("* to_accum(*w);", "* to_accum(*w) * accum_t(iw >= 0);")
    for text, passes in ((source, True), (zero_times, False)):
        report = check(Kernel.from_source(text), backend="host", dtypes=["fp32"], examples=0, kinds=["nan"])
        assert report.passed == passes, str(report)
    assert "NaN: wrong value (a NaN among the tensors" in str(report)
    assert check(Kernel.from_source(zero_times), backend="host", dtypes=["fp32"], examples=0, kinds=["exact"]).passed


PADDED = (  # what is beyond the input is zero, and multiplied too
    ("const int iw = input_index(problem, 2, o.w, tw);", "const int iw = input_index(problem, 2, o.w, tw), in_w = max(iw, 0);"),
    ("if (iw < 0) continue;", "if (iw < 0 && (o.w + problem.padding[2] - tw * problem.dilation[2]) % problem.stride[2] != 0) continue;"),
    ("id, ih, iw)", "id, ih, in_w)"),
    ("to_accum(*x) * to_accum(*w);", "(iw < 0 ? accum_t(0) : to_accum(*x)) * to_accum(*w);"),
)


@pytest.mark.usefixtures("few_problems")
def test_a_kernel_says_that_it_multiplies_padding() -> None:
    """That allows a NaN among the weights to reach outputs whose tap lies beyond the input, and nothing more."""
    source = registry.kernel("fprop_gather").source
    for old, new in PADDED:
        assert old in source
        source = source.replace(old, new)
    declared = source.replace('pass = "fprop"', 'pass = "fprop"\nmultiplies_padding = true')
    worse = declared.replace("(iw < 0 ? accum_t(0) : to_accum(*x)) *", "accum_t(iw >= 0) * to_accum(*x) *")
    for text, passes in ((source, False), (declared, True), (worse, False)):
        report = check(Kernel.from_source(text), backend="host", dtypes=["fp32"], examples=50, kinds=["nan", "inf"])
        assert report.passed == passes, str(report)


def test_a_kernel_says_where_it_spreads_nan() -> None:
    source = registry.kernel("fprop_gather").source
    spreads = source.replace("finish(sum)", "finish(sum + 0 * to_accum(*input.at(o.n, 0, 0, 0, 0)))")
    told = spreads.replace("[[launch]]", '[spreads_nan]\n"kernel_w > 1" = "of a reason"\n[[launch]]', 1)
    alone, pair = Problem.parse("n1_c1to1_i1x1x3_k1"), Problem.parse("n1_c1to1_i1x1x3_k1x1x2")
    for text, problem, passes in ((spreads, pair, False), (told, pair, True), (told, alone, False)):
        found = [verify(HostBackend(), Kernel.from_source(text), problem, "fp32", "nan", seed) for seed in range(9)]
        assert all(outcome.ok for outcome in found) == passes
    assert verify(HostBackend(), Kernel.from_source(told), pair, "fp32", "inf", 0).message == "it spreads NaN: of a reason"


def test_lost_nan_and_unwritten_elements_are_told_apart() -> None:
    problem = Problem.parse("n1_c1to1_i1x1x3_k1")
    source = registry.kernel("fprop_gather").source
    lost = source.replace("finish(sum)", "finish(sum != sum ? accum_t(0) : sum)")
    outcomes = (verify(HostBackend(), Kernel.from_source(lost), problem, "fp32", "nan", seed) for seed in range(9))
    outcome = next(outcome for outcome in outcomes if not outcome.ok)
    assert outcome.message.startswith("NaN: wrong value") and outcome.got == 0
    unwritten = source.replace("*output.at", "if (o.w != 1) *output.at")
    outcome = verify(HostBackend(), Kernel.from_source(unwritten), problem, "fp32", "nan", 0)
    assert outcome.message.startswith("never written")


def test_written_input_is_seen() -> None:
    source = PLAIN.replace("const float* weight", "float* weight").replace(
        "  own[thread] = 0;", "  own[thread] = 0; weight[0] += 0.5f;"
    )
    outcome = verify(HostBackend(), Kernel.from_source(source), TINY, "fp32", "exact", 0)
    assert "weight was written to" in outcome.message


def test_worker_survives_crash_hang_and_a_lost_child() -> None:
    stride = Problem.parse("n1_c1to1_i1_k1x1x2_s1x1x2")
    with Worker(Kernel.from_file(SPECIMENS / "hang.cu"), "host", time_limit_s=0.5) as worker:
        assert worker.verify(TINY, "fp32", "exact", 0).ok
        assert "hang" in worker.verify(stride, "fp32", "exact", 13).message
        assert worker.verify(TINY, "fp32", "exact", 0).ok
        os.kill(worker._pid, signal.SIGTERM)
        assert "SIGTERM" in worker.verify(TINY, "fp32", "exact", 0).message
        assert worker.verify(TINY, "fp32", "exact", 0).ok
        assert worker.restarts == 2
        os.kill(worker._pid, signal.SIGTERM)
        worker.restart()  # of a child that is gone
        assert worker.verify(TINY, "fp32", "exact", 0).ok
        os.kill(worker._process.pid, signal.SIGKILL)  # as the system does when memory is short: the example is run again
        assert worker.verify(TINY, "fp32", "exact", 0).ok
        assert worker.restarts == 4
    with Worker(Kernel.from_file(SPECIMENS / "crash.cu"), "host") as worker:
        for _ in range(3):
            assert "SIGSEGV" in worker.verify(Problem.parse("n1_c1to1_i1_k1_bias"), "fp32", "exact", 1).message
            assert worker.verify(TINY, "fp32", "exact", 0).ok
    assert worker._process.poll() is not None


def test_what_is_asked_for_ahead_of_a_failure_is_run_only_for_who_waits() -> None:
    stride = Problem.parse("n1_c1to1_i1_k1x1x2_s1x1x2")
    with Worker(Kernel.from_file(SPECIMENS / "hang.cu"), "host", time_limit_s=0.5) as worker:
        first, hangs, ahead, again = [worker.ask(problem, "fp32", "exact", 0) for problem in (TINY, stride, stride, TINY)]
        assert first().ok and "hang" in hangs().message and worker.restarts == 1
        assert again().ok and worker.restarts == 1
        assert "hang" in ahead().message and worker.restarts == 2
        lost = [worker.ask(TINY, "fp32", "exact", seed) for seed in range(3)]
        os.kill(worker._process.pid, signal.SIGKILL)
        assert all(outcome().ok for outcome in lost) and worker.restarts == 3
        worker.ask(stride, "fp32", "exact", 0)
        worker.restart()
        assert worker.restarts == 4 and worker.verify(TINY, "fp32", "exact", 0).ok


def test_printf_does_not_break_the_protocol() -> None:
    source = PLAIN.replace("  own[thread] = 0;", '  own[thread] = 0; printf("%d says hello to the parent\\n", thread);')
    with Worker(Kernel.from_source(source), "host") as worker:
        assert worker.verify(TINY, "fp32", "exact", 0).ok
        assert worker.verify(TINY, "fp32", "random", 0).ok


@pytest.mark.sanitizer
@pytest.mark.usefixtures("few_problems")
def test_blocks_too_large_for_the_thread_sanitizer_are_not_tried(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "examples" / "my_gather.cu").read_text()
    text = text.replace("128)", "WIDTH)", 1).replace("128LL", "WIDTH * 1LL")
    text = text.replace("block = 128", 'block = "WIDTH"').replace("[[launch]]", "[search]\nWIDTH = [128, 384]\n[[launch]]")
    path = tmp_path / "wide.cu"
    path.write_text(text.replace('#include "convt3d.cuh"', '#include "convt3d.cuh"\n#ifndef WIDTH\n#define WIDTH 128\n#endif'))
    report = check(Kernel.from_file(path), backend="host", sanitize="thread", examples=5, dtypes=("fp32",))
    assert report.passed and any("blocks of more than 256 threads" in line for line in str(report).splitlines()), str(report)


def test_sanitizer_reports_are_summarized() -> None:
    assert summarize_report("nothing of note") is None
    log = "WARNING: ThreadSanitizer: data race (pid=7)\n  Write of size 4\n    #0 k /a/b.cu:12 (x.so)\n    #0 k /a/b.cu:14 (x.so)\n"
    assert summarize_report(log) == "ThreadSanitizer: data race at /a/b.cu:12, /a/b.cu:14"


@pytest.mark.parametrize("repeated", ["a", "a.cu", "a.cu:1", "a.cu:1: runtime error: ", "ERROR: a", "ERROR: ASanitizer: "])
def test_a_long_report_is_read_in_time(repeated: str) -> None:
    log = repeated * (240_000 // len(repeated))
    begun = time.process_time()
    summarize_report(log)
    summarize_report(f"ERROR: ASanitizer: b\n{log}")
    assert time.process_time() - begun < 2


def test_shrinking_ends_at_the_guilty_fields() -> None:
    large = Problem.parse("n2_c4to8_i3x4x5_k3x2x4_s2x3x2_p1_op1_d1x2x3_g2_bias")
    assert str(shrink(large, lambda p: max(p.stride) > 1 and p.groups > 1)) == "n1_c2to2_i1_k1_s1x1x2_g2"
    assert str(shrink(large, lambda p: p.bias)) == "n1_c1to1_i1_k1_bias"
    assert shrink(TINY, lambda p: True) == TINY


def test_syntax_error_shows_numbered_lines(plain_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain_file.write_text(PLAIN.replace("int rest = blockIdx.x;", "int rest = blockIdx.x"))
    with pytest.raises(CompileError, match=r">\s+\d+ \| "):
        check(plain_file, backend="host")
    assert cli.main(["check", str(plain_file), "--backend", "host"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("convt3d: error: plain[fp32]")
    assert "| " in error and "int w = rest % output_w" in error


def test_no_compiler_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BackendError, match="apt install g"):
        check("fprop_gather", backend="host")
    assert cli.main(["check", "fprop_gather", "--backend", "host"]) == 2
    assert "needs a C++17 compiler" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuchkernel"], "not registered"),
        (["nosuchfile.cu"], "cannot be read"),
        (["fprop_gather", "--sanitize", "thread", "--backend", "cuda"], "only the host backend has sanitizers"),
    ],
)
def test_command_line_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_bad_options_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["check", "--problem", "n1"], ["check", "--dtype", "fp8"], ["check", "--seed", "-1"], []):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 2
    assert "must look like n2_c8to16" in capsys.readouterr().err


def test_unknown_dtype_and_kind_are_refused() -> None:
    with pytest.raises(KernelError, match="no fp16 instance"):
        check(SPECIMENS / "crash.cu", backend="host", dtypes=["fp16"])
    with pytest.raises(KernelError, match="must be one of exact"):
        check("fprop_gather", backend="host", kinds=["precise"])


def test_command_line_reports_a_failure_that_its_own_line_reproduces(capsys: pytest.CaptureFixture[str]) -> None:
    file = SPECIMENS / "s000_batch_index.cu"
    assert cli.main(["check", str(file), "--backend", "host"]) == 1
    output = capsys.readouterr().out
    assert "FAILED" in output and "n2_c1to1_i1_k1" in output and "first wrong element [1, 0, 0, 0, 0]" in output
    line = next(line for line in output.splitlines() if "reproduce: " in line).partition("convt3d ")[2]
    assert cli.main(line.split()) == 1
    assert "n2_c1to1_i1_k1" in capsys.readouterr().out


def test_command_line_as_a_process() -> None:
    command = [
        sys.executable,
        "-m",
        "cupy_convt3d",
        "check",
        "fprop_gather",
        "--backend",
        "host",
        "--examples",
        "5",
        "--dtype",
        "fp32",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fprop_gather on host (fp32): passed" in done.stdout
    assert done.stderr == ""  # no progress bar where there is no terminal


def test_info_says_what_is_there_and_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--why", "n1_c1to2_i3_k3_s2"]) == 0
    output = capsys.readouterr().out
    assert f"numpy:       {np.__version__}" in output
    assert all(name in output for name in registry.kernels())
    assert "n1_c1to2_i3_k3_s2 fp32: yes" in output


def test_given_problems_are_all_that_is_checked() -> None:
    problems = [TINY, Problem(2, 4, 2, (2, 3, 4), 3, 2, 1), Problem(1, 4, 4, 3, 2, 2, groups=2)]
    told: list[tuple[int, int, str]] = []
    report = check("fprop_tiled", backend="host", dtypes=["fp32"], problems=problems, progress=lambda *given: told.append(given))
    assert report.passed and report.distinct_problems == 3 and report.examples == 3 * len(kinds_of("fp32")) and report.missing == []
    assert told[-1][:2] == (report.examples, report.examples)
    wrong = check(SPECIMENS / "s000_groups_ignored.cu", backend="host", problems=problems)
    assert not wrong.passed and wrong.counterexample is not None and wrong.counterexample.problem.groups > 1
    refused = check("fprop_depthwise", backend="host", dtypes=["fp32"], problems=problems[1:])
    left_out = sum(count for reasons in refused.untried.values() for count in reasons.values())
    assert not refused.passed and refused.examples == 0 and left_out == 2 * len(kinds_of("fp32"))


def test_a_system_that_shows_no_open_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: str) -> list[str]:
        raise FileNotFoundError(2, "No such file or directory", path)

    monkeypatch.setattr(os, "listdir", fails)
    child = Child(("host", None, True))
    with pytest.raises(BackendError, match=r"could not run:\nthe system does not show which files are open \(.*mount /proc$"):
        child.begin()
