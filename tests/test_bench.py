"""What is timed and how it is judged: layouts, packing, rivals, rows, means, the JSON file, the command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cupy_convt3d import cli, registry
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.choice import choose
from cupy_convt3d.dtypes import DTYPES
from cupy_convt3d.errors import BackendError, DataError, KernelError, ProblemError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.bench import Selection, bench, contest
from cupy_convt3d.lab.bench.contest import Contest
from cupy_convt3d.lab.bench.measure import Bench, Ceilings, Row
from cupy_convt3d.lab.bench.rivals import torch_settings
from cupy_convt3d.lab.bench.summary import comparisons, geometric_mean, rows_of, summary
from cupy_convt3d.problem import PASSES, Problem
from cupy_convt3d.source import Instance

PROBLEM = Problem(2, 4, 6, (3, 4, 5), 3, 2, 1, 1, groups=2)
# The weight is copied first; a kept copy shows as one launch less.
PACKED = """/* convt3d
pass = "fprop"
dtypes = ["fp32", "tf32"]
[workspace]
packed = "weight_numel"
[[launch]]
symbol = "pack"
grid = "ceil_div(weight_numel, 64)"
block = 64
packs = "packed"
[[launch]]
symbol = "compute"
grid = "ceil_div(output_numel, 64)"
block = 64
*/
#include "convt3d.cuh"
extern "C" __global__ void pack(const View<const scalar_t> weight, float* packed, long long weight_numel) {
  const long long i = blockIdx.x * 64LL + threadIdx.x;
  if (i < weight_numel) packed[i] = weight.data[i];
}
extern "C" __global__ void compute(const Problem problem, const float* input, const float* packed, float* output,
                                   long long output_numel, int in_channels_per_group, int out_channels_per_group) {
  const long long index = blockIdx.x * 64LL + threadIdx.x;
  if (index >= output_numel) return;
  const Voxel o = voxel_at(index, problem.out_channels, problem.output_size);
  float sum = 0.0f;
  for (int ci = 0; ci < in_channels_per_group; ++ci) {
    const long long c = o.c / out_channels_per_group * in_channels_per_group + ci;
    const float* tap = packed + (c * out_channels_per_group + o.c % out_channels_per_group) * problem.kernel_size[0] *
                                    problem.kernel_size[1] * problem.kernel_size[2];
    for (int td = 0; td < problem.kernel_size[0]; ++td)
      for (int th = 0; th < problem.kernel_size[1]; ++th)
        for (int tw = 0; tw < problem.kernel_size[2]; ++tw, ++tap) {
          const int d = input_index(problem, 0, o.d, td), h = input_index(problem, 1, o.h, th),
                    w = input_index(problem, 2, o.w, tw);
          if (d < 0 || h < 0 || w < 0) continue;
          const long long plane = (o.n * static_cast<long long>(problem.in_channels) + c) * problem.input_size[0] + d;
          sum += input[(plane * problem.input_size[1] + h) * problem.input_size[2] + w] * *tap;
        }
  }
  output[index] = sum;
}
"""


@pytest.fixture(scope="module")
def meter() -> Bench:
    return Bench(HostBackend(), budget_ms=1.0)


@pytest.fixture(scope="module")
def packed() -> Kernel:
    return Kernel.from_source(PACKED, "packed")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pass_name", PASSES)
def test_layouts_hold_the_same_values(meter: Bench, pass_name: str, dtype: str) -> None:
    plain = meter.arrays(PROBLEM, pass_name, dtype)
    last = meter.arrays(PROBLEM, pass_name, dtype, "channels_last")
    written = PROBLEM.shapes(pass_name)[1]
    pick = meter.pick(PROBLEM, pass_name, dtype)
    for name, array in plain.items():
        assert array.flags.c_contiguous
        assert last[name].flags.c_contiguous == ("weight" in name), "the weight stays as torch makes it"
        if name == written:
            assert np.isnan(array.astype(np.float64)).all() and np.isnan(last[name].astype(np.float64)).all()
        else:
            np.testing.assert_array_equal(last[name].astype(np.float64), array.astype(np.float64))
            np.testing.assert_array_equal(pick(name, np.arange(array.size)), array.ravel().astype(np.float64))
    if pass_name != "wgrad":
        assert last[written].transpose(0, 2, 3, 4, 1).flags.c_contiguous


def launches(meter: Bench, monkeypatch: pytest.MonkeyPatch, kernel: Kernel, packed: bool) -> tuple[list[str], list[str]]:
    """The symbols that are launched while a call is prepared, and by the call."""
    module = meter.backend.compile(Instance(kernel, "fp32"))
    seen: list[str] = []
    original = type(module).launch
    monkeypatch.setattr(type(module), "launch", lambda *given: (seen.append(given[1].symbol), original(*given))[1])
    call = meter.prepared(kernel, PROBLEM, "fp32", meter.arrays(PROBLEM, "fprop", "fp32"), packed)
    before = seen.copy()
    seen.clear()
    call()
    return before, seen


def test_packing_is_in_the_call_or_before_it(meter: Bench, packed: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launches(meter, monkeypatch, packed, packed=True) == (["pack"], ["compute"])
    assert launches(meter, monkeypatch, packed, packed=False) == ([], ["pack", "compute"])


@pytest.mark.parametrize("layout", ["ncdhw", "channels_last"])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "tf32x3", "fp64", "fp16", "bf16"])
def test_rows_of_every_precision_and_layout(meter: Bench, dtype: str, layout: str) -> None:
    pytest.importorskip("torch")
    made = Contest(meter, "small", PROBLEM, "fprop", dtype, None, layout)
    rival = made.rival("torch")
    row = made.kernel(registry.kernel("fprop_gather"), "fp32" if dtype.startswith("tf32") else dtype)
    assert rival.is_rival and rival.median_ms and rival.error is not None and not rival.wrong, rival
    assert row.median_ms and row.low_ms <= row.median_ms <= row.high_ms and not row.wrong, row
    assert row.speedup == rival.median_ms / row.median_ms
    assert row.with_packing_ms == row.median_ms and row.pack_ms == 0 and row.workspace_bytes == 0
    assert row.first_call_ms >= row.compile_ms >= 0 and row.layout == layout
    assert row.error <= {"bf16": 4e-3, "fp16": 5e-4, "fp64": 1e-15}.get(dtype, 1e-6)


def test_a_packing_kernels_two_times_and_its_memory(meter: Bench, packed: Kernel) -> None:
    row = Contest(meter, "small", PROBLEM, "fprop", "tf32").kernel(packed)
    assert not row.wrong and row.note == ""
    assert row.pack_ms > 0 and row.with_packing_ms > 0 and row.with_packing_ms != row.median_ms
    assert row.workspace_bytes == 4 * int(np.prod(PROBLEM.weight_shape))


def test_a_pointer_kernel_says_that_it_needs_contiguous_tensors(meter: Bench, packed: Kernel) -> None:
    row = Contest(meter, "small", PROBLEM, "fprop", "fp32", None, "channels_last").kernel(packed)
    assert row.median_ms is None and "must be contiguous" in row.note and not row.wrong


def test_a_wrong_result_is_called_wrong(meter: Bench) -> None:
    off = Kernel.from_source(PACKED.replace("output[index] = sum;", "if (index != 7) output[index] = sum;"), "hole")
    row = Contest(meter, "small", PROBLEM, "fprop", "fp32").kernel(off)
    assert row.wrong and row.median_ms is not None and not row.difference <= 1
    little = Kernel.from_source(PACKED.replace("output[index] = sum;", "output[index] = sum * 1.01f;"), "off")
    assert Contest(meter, "small", PROBLEM, "fprop", "fp32").kernel(little).error == pytest.approx(0.01, rel=1e-3)


def test_either_measure_can_call_it_wrong() -> None:
    good = row("kb61", 1.0, difference=1e-4, error=1e-4)
    assert not good.wrong and not replace(good, difference=None, error=None).wrong
    for bad in (0.1, float("nan"), float("inf")):
        assert replace(good, difference=bad).wrong and replace(good, error=bad).wrong


def test_a_rival_that_is_much_too_slow_is_called_once(meter: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(contest, "_MUCH_TOO_SLOW_MS", -1.0)
    monkeypatch.setattr(contest, "SLOW_MS", 0.0)
    calls: list[int] = []
    original = contest.torch_call
    monkeypatch.setattr(contest, "torch_call", lambda *given: lambda: (calls.append(1), original(*given)())[1])
    row = Contest(meter, "small", PROBLEM, "fprop", "fp32").rival("torch")
    assert len(calls) == 1 and row.repeats == 1 and row.median_ms == row.first_call_ms


def test_rivals_are_named(meter: Bench) -> None:
    with pytest.raises(BackendError, match="against='cudnn': on host there is torch"):
        Bench(HostBackend(), against=("cudnn",))
    assert Bench(HostBackend(), against=()).rival_name is None


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("dtype", "precision"), [("fp32", "ieee"), ("tf32", "tf32"), ("tf32x3", "ieee"), ("bf16", "ieee")])
def test_torch_is_set_up_and_put_back(dtype: str, precision: str, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where importing torch.testing._internal has frozen cuDNN's flags. A torch without CUDA has the settings too."""
    torch = pytest.importorskip("torch")
    cudnn, conv, matmul = torch.backends.cudnn, torch.backends.cudnn.conv, torch.backends.cuda.matmul
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", not frozen)
    assert torch.backends.flags_frozen() == frozen

    def state() -> tuple[Any, ...]:
        flags = (cudnn.benchmark, cudnn.deterministic, cudnn.enabled)
        return (conv.fp32_precision, matmul.fp32_precision, *flags, torch.get_num_threads(), torch.is_grad_enabled())

    before = state()
    with torch_settings(torch, dtype) as settings:
        assert state() == (precision, precision, True, False, True, 1, False)
        assert settings["cudnn.conv.fp32_precision"] == precision and settings["cudnn.benchmark"] is True
    assert state() == before
    with torch_settings(torch, dtype, benchmark=False, cudnn=False, deterministic=True):
        assert state() == (precision, precision, False, True, False, 1, False)
    assert state() == before


def row(case: str, median_ms: float | None, **changes: Any) -> Row:
    blank = Row(case, str(PROBLEM), "fprop", "ours", False, "tf32", 10**9, 5, median_ms, floor_ms=0.1, with_packing_ms=median_ms)
    return replace(blank, **changes)


def rival(case: str, median_ms: float | None, layout: str = "ncdhw", **changes: Any) -> Row:
    return row(case, median_ms, contender="cuDNN", is_rival=True, layout=layout, with_packing_ms=None, **changes)


def test_means() -> None:
    rows = [
        *(rival("kb61", 4.0), rival("kb61", 2.0, "channels_last"), row("kb61", 1.0, with_packing_ms=2.0)),
        row("kb61", 0.5, contender="quicker but wrong", error=1.0),
        *(rival("kb70", 1.0), rival("kb70", None, "channels_last"), row("kb70", 4.0, floor_ms=0.01)),
        *(rival("else", 2.0), rival("else", 2.0, "channels_last"), row("else", 0.5)),
    ]
    found = {(e["layout"], e["layers"], e["frozen"]): e for e in summary(rows)}
    core = found["ncdhw", "core", False]
    assert core["against_rival"] == pytest.approx((2 * 0.25) ** 0.5) and core["against_rival_layers"] == 2, "packing is in the time"
    assert core["against_better_layout"] == pytest.approx((1 * 0.25) ** 0.5)
    assert core["share_of_floor"] == pytest.approx(0.05) and core["share_of_floor_layers"] == 1, "0.01 ms is no floor to measure by"
    assert core["slower"] == {"kb70": 0.25} and core["count"] == 2 and core["expected"] == 11
    assert found["ncdhw", "core", True]["against_rival"] == pytest.approx((4 * 0.25) ** 0.5)
    assert found["ncdhw", "all", False]["against_better_layout"] == pytest.approx((1 * 0.25 * 4) ** (1 / 3))
    assert found["channels_last", "all", False]["missing"] == ["kb61", "kb70", "else"]
    assert geometric_mean([]) is None


def test_one_layout_has_no_better_one() -> None:
    (comparison,) = comparisons([rival("kb61", 4.0), row("kb61", 1.0)])
    assert comparison.ratio() == 4 and comparison.ratio(better=True) is None


def test_a_file_has_of_a_row_what_is_not_by_default() -> None:
    row = Row("one", str(PROBLEM), "fprop", "ours", False, "fp32", 10**9, 5, 0.5, layout="channels_last", difference=0.0)
    wrong = replace(row, difference=9.0)
    assert {"median_ms", "layout", "difference"} <= row.recorded.keys() and not {"note", "error", "wrong"} & row.recorded.keys()
    assert wrong.recorded["wrong"] and rows_of({"rows": [row.recorded, wrong.recorded]}) == [row, wrong]


def test_rows_are_read_back_with_nan(tmp_path: Path) -> None:
    from dataclasses import asdict

    from cupy_convt3d.lab.bench.provenance import write_json

    bad = row("kb61", 1.0, error=float("nan"))
    write_json(tmp_path / "r.json", {"rows": [asdict(bad) | {"unknown": 1}]})
    data = json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert len((tmp_path / "r.json").read_text().splitlines()) == 5, "a row a line"
    (back,) = rows_of(data)
    assert back.wrong and replace(back, error=None) == replace(bad, error=None)


def run(tmp_path: Path, plan: Selection, **options: Any) -> tuple[dict[str, Any], str]:
    console = Console(file=io.StringIO(), width=200)
    out = tmp_path / "sub" / "bench.json"
    data = bench(plan, out, backend="host", budget_ms=1.0, flop_limit=20_000, console=console, **options)
    written = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert {key: written[key] for key in ("complete", "wrong")} == {key: data[key] for key in ("complete", "wrong")}
    return written, console.file.getvalue()  # type: ignore[attr-defined]


def test_a_run_is_written_down(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    problems = {"kb61": Problem(1, 4, 4, 6, 3), "k2s2": Problem(1, 4, 4, 3, 2, 2)}
    told: list[tuple[int, int, str]] = []
    gather = registry.kernel("fprop_gather")
    plan = Selection(problems, ("fprop",), ("fp32", "tf32"), kernels=[gather])
    data, text = run(tmp_path, plan, progress=lambda *given: told.append(given))
    assert data["complete"] and data["wrong"] == 0 and data["kind"] == "bench" and data["scaled_down"]
    assert set(data["tf32"]) == {"fp32", "tf32"} and data["tf32"]["tf32"]["kernels"] == "tf32"
    assert {"machine", "versions", "commit", "created", "ceilings", "against"} <= set(data)
    rows = rows_of(data)
    assert len(rows) == 2 * 2 * 2 * 2, "problems, precisions, layouts; a rival and a kernel"
    assert {row.instance for row in rows if not row.is_rival} == {"fp32"}, "the loosest it has"
    assert len(told) == 10 and told[0] == (0, 8, "compiling for fp32")
    assert "kb61 fprop tf32 channels_last: fprop_gather[fp32]" in text and "Geometric means" in text
    assert {(entry["dtype"], entry["layers"]) for entry in data["summary"]} >= {("tf32", "core"), ("fp32", "all")}


def test_what_is_cut_off_is_kept(tmp_path: Path) -> None:
    def stop(done: int, *_: Any) -> None:
        if done == 1:
            raise KeyboardInterrupt

    problems = {"one": Problem(1, 1, 1, 3, 3), "two": Problem(1, 2, 1, 3, 3)}
    plan = Selection(problems, layouts=("ncdhw",), kernels=[registry.kernel("fprop_gather")])
    out, partial = tmp_path / "b.json", tmp_path / "b.json.partial"
    out.write_text("of an earlier run")
    with pytest.raises(KeyboardInterrupt):
        bench(plan, out, backend="host", budget_ms=1.0, console=Console(file=io.StringIO()), progress=stop)
    data = json.loads(partial.read_text())
    assert not data["complete"] and {row["case"] for row in data["rows"]} == {"one"}
    assert out.read_text() == "of an earlier run", "a run that was cut off takes nothing away"
    bench(plan, out, backend="host", budget_ms=1.0, console=Console(file=io.StringIO()))
    assert len(json.loads(out.read_text())["rows"]) >= 2 and not partial.exists()


def test_auto_is_what_the_function_takes(tmp_path: Path) -> None:
    plan = Selection({"one": PROBLEM}, PASSES, ("fp16",), ("ncdhw",), against=())
    data, _ = run(tmp_path, plan)
    taken = [choose(HostBackend(), p, PROBLEM, "fp16").kernel for p in PASSES]
    assert [row["contender"] for row in data["rows"]] == [kernel.name for kernel in taken if kernel is not None]


def test_all_kernels_of_the_pass(tmp_path: Path) -> None:
    data, _ = run(tmp_path, Selection({"one": PROBLEM}, ("dgrad",), ("fp32",), ("ncdhw",), "all", against=()))
    assert {row["contender"] for row in data["rows"]} == set(registry.kernels("dgrad"))


def test_a_batch_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="batch=0: there is nothing to time in none"):
        bench(Selection({"none": Problem(0, 1, 1, 3, 3)}), backend="host")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    flags = ["--backend", "host", "--problem", "kb77,n1_c2to3_i3_k3_s2", "--precision", "ieee", "--layout", "ncdhw"]
    assert cli.main(["bench", *flags, "--pass", "fprop,wgrad", "--out", str(out)]) == 0
    assert {row["dtype"] for row in json.loads(out.read_text())["rows"]} == {"fp32"}
    assert {row["case"] for row in json.loads(out.read_text())["rows"]} == {"kb77", "n1_c2to3_i3_k3_s2"}
    assert "Written" in capsys.readouterr().out
    wrong = tmp_path / "off.cu"
    wrong.write_text(PACKED.replace("output[index] = sum;", "output[index] = sum + 1.0f;"))
    assert cli.main(["bench", *flags, "--kernels", str(wrong)]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--suite", "nemad", "suite='nemad': must be one of"),
        ("--precision", "fp31", "--precision fp31: must be of fp64, fp32"),
        ("--pass", "gprop", "--pass gprop: must be of fprop"),
        ("--layout", "nhwc", "--layout nhwc: must be of ncdhw, channels_last"),
        ("--kernels", "nobody", "kernel 'nobody': not registered"),
        ("--against", "cudnn", "against='cudnn': on host there is torch"),
        ("--problem", "kb99", "name='kb99': must look like"),
    ],
)
def test_unknown_names_are_usage_errors(flag: str, value: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--backend", "host", flag, value]) == 2
    assert words in capsys.readouterr().err


def test_ceilings_without_a_dtype_give_no_floor() -> None:
    assert Ceilings(1e12, {"fp32": 1e13}).floor_ms(PROBLEM, "fprop", "bf16") is None


def test_a_kernel_that_cannot_says_why(meter: Bench) -> None:
    with pytest.raises(KernelError, match="no fp64 instance"):
        Kernel.from_source(PACKED, "packed").require(PROBLEM, "fp64")
    noted = Contest(meter, "small", PROBLEM, "fprop", "fp64").kernel(Kernel.from_source(PACKED, "packed"))
    assert "no fp64 instance" in noted.note and noted.median_ms is None


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    problems = {"kb61": Problem(1, 8, 8, 16, 3), "k2s2": Problem(1, 16, 8, 8, 2, 2)}
    plan = Selection(problems, PASSES, ("fp32", "tf32", "tf32x3", "bf16", "fp16", "fp64"))
    data = bench(plan, tmp_path / "b.json", backend="cuda", budget_ms=1.0, console=Console(file=io.StringIO()))
    assert data["wrong"] == 0 and set(data["ceilings"]["gemm_flop_per_s"]) == set(plan.precisions)
    for made in rows_of(data):
        assert made.median_ms and made.error is not None and not made.wrong and made.share_of_floor, made
    if data["against"]:
        assert data["tf32"]["fp32"]["cudnn.conv.fp32_precision"] == "ieee"
        assert data["tf32"]["tf32"]["cudnn.conv.fp32_precision"] == "tf32"
        assert all(made.workspace_bytes is not None for made in rows_of(data))


def test_rows_may_be_kept_as_columns() -> None:
    one = {"case": "a", "problem": "n1_c1to2_i3_k3_s2", "pass_name": "fprop", "contender": "x", "is_rival": False, "dtype": "fp32"}
    rows = [{**one, "flop": 8, "repeats": 3, "median_ms": 0.5}, {**one, "flop": 8, "repeats": 3, "median_ms": 0.25, "speedup": 2.0}]
    names = list(rows[1])
    kept: dict[str, Any] = {"columns": names, "rows": [[*rows[0].values()], [*rows[1].values()]]}
    assert rows_of(kept) == rows_of({"rows": rows}) and rows_of(kept)[1].speedup == 2.0
    with pytest.raises(DataError, match=r"columns\[1\]=5: must be"):
        rows_of({**kept, "columns": ["case", 5]})
    with pytest.raises(DataError, match=r"rows\[1\]"):
        rows_of({"columns": names, "rows": [[], 7]})
