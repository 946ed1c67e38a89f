"""Calls over a population: who is asked and timed, what is wrong, what a run that was cut off goes on with, and what the rows come to."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

pytest.importorskip("torch")

import torch

from cupy_convt3d import cli, ops, registry, switches, tuning
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.choice import Candidate
from cupy_convt3d.errors import BackendError, ProblemError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.bench import survey as survey_module
from cupy_convt3d.lab.bench.calls import CallContest, CallRow, LayerTensors, contenders
from cupy_convt3d.lab.bench.measure import Bench, Ceilings
from cupy_convt3d.lab.bench.survey import Survey, survey
from cupy_convt3d.lab.bench.survey_summary import EITHER, call_rows, summary, verdicts
from cupy_convt3d.lab.population import Layer, population
from cupy_convt3d.lab.suites import suite
from cupy_convt3d.problem import PASSES, Problem

PROBLEM = Problem(2, 4, 6, (3, 4, 5), 3, 2, 1, 1, 2, groups=2, bias=True)
LAYER = Layer("p0_0_grouped", "grouped", PROBLEM)
GATHER = registry.kernel("fprop_gather")
TIMES_MS = {"torch": 2.0, "auto": 1.0, "kernel": 4.0}  # what the fake clock says


def fake_time(_: HostBackend, call: Callable[[], object], repeats: int) -> list[float]:
    call()
    settings = call.keywords if isinstance(call, partial) else None
    who = "torch" if settings is None else "kernel" if "backend" in settings else "auto"
    return [TIMES_MS[who]] * repeats


@pytest.fixture
def fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostBackend, "time", fake_time)


@pytest.fixture(scope="module")
def meter() -> Bench:
    return Bench(HostBackend(), budget_ms=1.0, against=())


def run(out: Path | None, plan: Survey, **options: Any) -> tuple[dict[str, Any], str]:
    console = Console(file=io.StringIO(), width=200)
    settings = {"backend": "host", "budget_ms": 1.0, "flop_limit": 20_000, "console": console} | options
    data = survey(plan, out, **settings)
    return data, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", ["ncdhw", "channels_last"])
@pytest.mark.parametrize("precision", ["fp32", "tf32", "tf32x3", "fp16", "bf16", "fp64"])
def test_calls_of_every_precision_and_layout(meter: Bench, precision: str, layout: str) -> None:
    element = "fp32" if precision.startswith("tf32") else precision
    contest = CallContest(LAYER, LayerTensors(meter, PROBLEM, "fprop", element), precision, layout, Ceilings(1e12, {precision: 1e13}))
    assert contest.tensors["input"].is_contiguous() == contest.tensors["weight"].is_contiguous() == (layout == "ncdhw")
    rows = contest.rows(contenders(meter.backend, "auto", PROBLEM, "fprop", precision, layout))
    assert [row.contender for row in rows] == ["torch", "auto", "kernel"]
    assert [row.ran == "torch" for row in rows] == [True, True, False] and [row.is_rival for row in rows] == [True, False, False]
    for row in rows:
        assert row.median_ms and row.low_ms <= row.median_ms <= row.high_ms and row.first_call_ms, row
        assert row.error is not None and row.difference is not None and not row.wrong, row
        assert (row.family, row.layout, row.dtype, row.problem) == ("grouped", layout, precision, str(PROBLEM))
        assert row.share_of_floor == row.floor_ms / row.median_ms


@pytest.mark.parametrize("pass_name", PASSES)
def test_calls_of_every_pass(meter: Bench, pass_name: str) -> None:
    problem = replace(PROBLEM, bias=False)
    contest = CallContest(LAYER, LayerTensors(meter, problem, pass_name, "fp32"), "fp32", "ncdhw", None)
    wanted = "all" if pass_name != "fprop" else [GATHER, registry.kernel("fprop_tiled")]
    rows = contest.rows(contenders(meter.backend, wanted, problem, pass_name, "fp32", "ncdhw"))
    assert {row.contender for row in rows} > {"torch", "auto"} and len(rows) > 2
    assert not any(row.wrong for row in rows) and all(row.median_ms for row in rows), rows


def test_auto_is_called_as_a_user_calls_it(meter: Bench) -> None:
    (auto, kernel), (precise, _) = (contenders(meter.backend, "auto", PROBLEM, "fprop", dtype, "ncdhw") for dtype in ("fp32", "tf32x3"))
    assert auto.settings == {} and kernel.settings == {"backend": "host"}
    assert precise.settings == {"fp32_precision": "tf32x3"}, "torch has no name for it"
    every = contenders(meter.backend, "all", PROBLEM, "fprop", "fp32", "ncdhw")
    assert GATHER.name in [one.ran for one in every] and "fprop_patch" not in [one.ran for one in every], "which cannot do it"
    named = contenders(meter.backend, [GATHER, registry.kernel("dgrad_gather")], PROBLEM, "fprop", "fp32", "ncdhw")
    assert [one.name for one in named] == ["auto", GATHER.name]


def test_torch_settings_are_a_users(meter: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN searches, is not held to deterministic algorithms, and rounds to TF32 where that is asked for."""
    seen: list[tuple[Any, ...]] = []
    cudnn = torch.backends.cudnn

    def time(_: HostBackend, call: Callable[[], object], repeats: int) -> list[float]:
        seen.append((cudnn.benchmark, cudnn.deterministic, cudnn.enabled, cudnn.conv.fp32_precision, torch.is_grad_enabled()))
        return [1.0] * repeats

    monkeypatch.setattr(HostBackend, "time", time)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = LayerTensors(meter, PROBLEM, "fprop", "fp32")
    for precision, conv in (("tf32", "tf32"), ("fp32", "ieee")):
        seen.clear()
        CallContest(LAYER, made, precision, "ncdhw", None).rows(contenders(meter.backend, [], PROBLEM, "fprop", precision, "ncdhw"))
        assert set(seen) == {(True, False, True, conv, False)}


@pytest.mark.parametrize("with_trials", [True, False])
def test_trials_go_into_a_copy_of_the_users_database(
    with_trials: bool, tmp_path: Path, fake_clock: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, seen = tmp_path / "tuning.json", set()
    monkeypatch.setenv("CONVT3D_TUNING", str(user))
    tuning.Database().save(user)
    before, call = user.read_text(), CallContest._first

    def first(*given: Any) -> CallRow:
        seen.add((switches.TRIALS.is_off, tuning.user_path() == user, tuning.user_path().read_text() == before))
        return call(*given)

    monkeypatch.setattr(CallContest, "_first", first)
    data, _ = run(None, Survey(3, 1, layouts=("ncdhw",), trials=with_trials))
    assert data["trials"] is with_trials and seen == {(not with_trials, False, True)}
    assert tuning.user_path() == user


def test_a_trials_winner_is_named(meter: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What auto was expected to run is asked again once its first call has been made."""
    answers = iter([(GATHER, registry.kernel("fprop_tiled")), ()])

    class Taken(NamedTuple):
        kernel: Kernel
        instance: str
        rivals: tuple[Candidate, ...]
        left_to_torch: str | None = None

        @property
        def for_torch(self) -> Taken:
            return self

    def choose(*_: Any) -> Taken:
        kernels = next(answers)
        rivals = tuple(Candidate(kernel, "fp32") for kernel in kernels)
        return Taken(kernels[0] if kernels else registry.kernel("fprop_tiled"), "fp32", rivals)

    monkeypatch.setattr("cupy_convt3d.lab.bench.calls.choose", choose)
    monkeypatch.setattr(meter.backend, "name", "a GPU")
    asked = contenders(meter.backend, [], PROBLEM, "fprop", "fp32", "ncdhw", True)
    compiled = asked[0].compiled(PROBLEM, "fprop", meter.backend)
    assert asked[0].ran == GATHER.name and [kernel.name for kernel, *_ in compiled] == [GATHER.name, "fprop_tiled"]
    contest = CallContest(LAYER, LayerTensors(meter, PROBLEM, "fprop", "fp32"), "fp32", "ncdhw", None, True)
    assert contest.rows(asked)[1].ran == "fprop_tiled"


def test_a_rival_that_takes_seconds_is_not_searched_for(meter: Bench, fake_clock: None) -> None:
    made = LayerTensors(meter, PROBLEM, "fprop", "fp32")
    made.__dict__["expected"] = (made.expected[0], 1500.0)
    rival, *_ = CallContest(LAYER, made, "fp32", "ncdhw", None).rows([])
    assert "not searched" in rival.note and rival.median_ms == 2.0


def test_wrong_results_are_named(tmp_path: Path, fake_clock: None) -> None:
    wrong = Kernel.from_source(GATHER.source.replace("finish(sum)", "finish(sum + accum_t(1))"), "off")
    data, text = run(tmp_path / "w.json", Survey(0, 3, layouts=("ncdhw",), kernels=[wrong]))
    bad = [row for row in call_rows(data) if row.wrong]
    assert data["wrong"] == len(bad) > 0 and {row.contender for row in bad} == {wrong.name}
    assert f"WRONG: {bad[0].case} {bad[0].problem} fprop fp32 ncdhw: {wrong.name}" in text
    assert all(v.kernel_ms is None for v in verdicts(call_rows(data)) if v.auto.case in {row.case for row in bad}), "it wins nothing"


def test_a_result_in_stale_memory_is_not_taken_for_right(meter: Bench) -> None:
    """A call's memory is NaN before, so a kernel that writes nothing does not hand out an earlier contender's result."""
    made = LayerTensors(meter, PROBLEM, "fprop", "fp32")
    contest = CallContest(LAYER, made, "fp32", "ncdhw", None)
    assert not contest._first(contest.blank, lambda: made.expected[0], 0.0).wrong
    hole = made.expected[0].clone()
    hole.view(-1)[7] = float("nan")
    assert contest._first(contest.blank, lambda: hole, 0.0).wrong
    scaled = contest._first(contest.blank, lambda: made.expected[0] * 1.01, 0.0)
    assert scaled.wrong and scaled.error == pytest.approx(0.01, rel=1e-3) and scaled.difference == pytest.approx(0.01, rel=1e-3)


def test_a_run_is_written_down(tmp_path: Path, fake_clock: None) -> None:
    told: list[tuple[int, int, str]] = []
    out = tmp_path / "sub" / "p.json"
    plan = Survey(3, 4, precisions=("fp32", "bf16"))
    data, text = run(out, plan, progress=lambda *given: told.append(given))
    written = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert written == json.loads(json.dumps(data), parse_float=lambda text: float(f"{float(text):.7g}"))
    assert data["complete"] and data["kind"] == "population" and data["wrong"] == 0
    assert {"machine", "versions", "commit", "created", "ceilings", "seed", "count"} <= set(data)
    assert list(data["layers"]) == [layer.name for layer in population(3, 4)]
    assert len(data["rows"]) == 4 * 2 * 2 * 3, "layers, precisions, layouts; torch, auto and a kernel"
    assert told[0][2] == "compiling for 4 layers" and len(told) == 1 + 4 * 2 * 2
    entries = {(e["dtype"], e["layout"]): e for e in data["summary"]}
    assert set(entries) == {(d, layout) for d in ("fp32", "bf16") for layout in ("ncdhw", "channels_last", EITHER)}
    for entry in entries.values():
        assert entry["auto"] == {"layers": 4, "mean": pytest.approx(2), "p5": pytest.approx(2), "worst": 2}
        assert entry["kernel_against_better"]["mean"] == pytest.approx(0.5) and entry["slower"] == 0 and len(entry["worst"]) == 4
        assert sum(family["layers"] for family in entry["families"].values()) == 4
    for words in ("auto 1 = 2.00x by torch", "2.00x 2.00x 2.00x", "worst:", "families:", "complete; 0 wrong", "Layers scaled down"):
        assert words in text, words
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_what_was_cut_off_goes_on(tmp_path: Path, fake_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    out, ticks = tmp_path / "p.json", iter(range(10_000))
    plan = Survey(3, 5, layouts=("ncdhw",))
    first, text = run(out, replace(plan, minutes=0.1), clock=lambda: next(ticks))  # a second each time it is asked
    assert not first["complete"] and 0 < len(first["rows"]) < 5 * 3 and "goes on with the file" in text
    written = json.loads(out.read_text())
    made: list[str] = []
    original = LayerTensors.__init__
    monkeypatch.setattr(LayerTensors, "__init__", lambda self, *given: (made.append(str(given[1])), original(self, *given))[1])
    second, text = run(out, plan)
    kept = len(first["rows"])
    assert second["complete"] and second["rows"][:kept] == written["rows"][:kept] and len(second["rows"]) == 5 * 3
    assert len(made) == 5 - len(first["rows"]) // 3 and "going on with" in text
    assert second["elapsed_s"] >= first["elapsed_s"] and second["created"] == first["created"]
    made.clear()
    third, _ = run(out, replace(plan, count=6))
    assert len(made) == 1 and len(third["rows"]) == 6 * 3, "a larger count goes on too"
    written = json.loads(out.read_text())
    assert run(out, replace(plan, count=6))[0]["rows"] == written["rows"] and len(made) == 1


def test_a_file_of_something_else_is_refused(tmp_path: Path, fake_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "p.json"
    plan = Survey(3, 1, layouts=("ncdhw",))
    run(out, plan)
    with pytest.raises(ProblemError, match=r"is of seed 3, not 4; take another file"):
        run(out, replace(plan, seed=4))
    with pytest.raises(ProblemError, match=r"is of kernels auto, not all"):
        run(out, replace(plan, kernels="all"))
    known = json.loads(out.read_text())
    out.write_text(json.dumps(known | {"machine": known["machine"] | {"device": "a sundial"}}))
    with pytest.raises(ProblemError, match="was measured on a sundial"):
        run(out, plan)
    out.write_text(json.dumps(known | {"commit": "0123"}))
    with pytest.raises(ProblemError, match="is of commit 0123"):
        run(out, plan)
    out.write_text("{}")
    with pytest.raises(ProblemError, match=r"cannot be gone on with: survey .*: format=None: must be 1"):
        run(out, plan)


def test_regret_against_a_search(tmp_path: Path, fake_clock: None) -> None:
    plan = Survey(3, 2, layouts=("ncdhw",), kernels=[GATHER], regret=1)
    data, _ = run(tmp_path / "p.json", plan)
    (searched,) = [row for row in call_rows(data) if row.contender == "searched"]
    assert searched.ran == GATHER.name and searched.case == population(3, 1)[0].name and searched.speedup == 0.25, "auto 1 ms, it 4"
    (entry,) = data["summary"]
    assert entry["regret"] == {"layers": 1, "mean": pytest.approx(0.5), "p95": pytest.approx(0.5)}, "torch has the best time, 2 ms"
    assert data["complete"]


def test_without_torch_there_is_nothing_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_convt3d.lab.bench.measure.torch_module", lambda backend: None)
    with pytest.raises(BackendError, match="calls are measured on torch tensors"):
        run(None, Survey(0, 1))


def illegal(*_: Any) -> None:
    raise RuntimeError("illegal address")


def test_a_lost_context_ends_the_run_with_its_rows_written(tmp_path: Path, fake_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "p.json"
    monkeypatch.setattr(survey_module, "print_row", lambda *_: monkeypatch.setattr(HostBackend, "synchronize", illegal))
    with pytest.raises(BackendError, match="the GPU's context is lost"):
        run(out, Survey(3, 2, layouts=("ncdhw",)))
    assert len(json.loads(out.read_text())["rows"]) == 3


def test_who_cost_the_context_is_told_and_asked_no_more(tmp_path: Path, fake_clock: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run goes on behind it."""
    out, plan, call = tmp_path / "p.json", Survey(3, 2, layouts=("ncdhw",)), ops.conv_transpose3d
    first, second = population(3, 2)

    def lose(*operands: Any, **settings: Any) -> Any:
        bad.setattr(HostBackend, "synchronize", illegal)
        return call(*operands, **settings)

    with monkeypatch.context() as bad:
        bad.setattr(ops, "conv_transpose3d", lose)
        with pytest.raises(BackendError, match=f"{first.name} fprop fp32 ncdhw: the GPU's context is lost .auto: illegal address.; run"):
            run(out, plan)
    rows = json.loads(out.read_text())["rows"]
    left = "not called: a call before it has cost the GPU's context"
    assert [(row["contender"], row.get("note", "")) for row in rows] == [("torch", ""), ("auto", "illegal address"), ("kernel", left)]
    data, _ = run(out, plan)
    assert [row.case for row in call_rows(data)] == 3 * [first.name] + 3 * [second.name] and data["complete"]


def row(case: str, who: str, median_ms: float | None, layout: str = "ncdhw", **changes: Any) -> CallRow:
    blank = CallRow(case, str(PROBLEM), "fprop", who, who == "torch", "tf32", 10**9, 5, median_ms, floor_ms=0.1, layout=layout)
    return replace(blank, first_call_ms=10.0, family="patch", ran=who, **changes)


def test_what_rows_come_to() -> None:
    rows = []
    for number in range(21):  # torch / auto is 1.0, 1.1, ... 3.0
        case, floor = f"layer{number}", {"floor_ms": 0.2 if number else 0.01}
        rows += [row(case, "torch", 1 + number / 10, **floor), row(case, "auto", 1.0, **floor), row(case, "kernel", 0.5, **floor)]
        rows += [row(case, "torch", 0.5, "channels_last", **floor), row(case, "auto", 2.0, "channels_last", **floor)]
    rows += [row("layer0", "quick but wrong", 0.01, error=1.0)]
    found = {entry["layout"]: entry for entry in summary(rows)}
    same = found["ncdhw"]
    assert same["layers"] == 21 and same["auto"]["worst"] == 1.0 and same["auto"]["p5"] == pytest.approx(1.1)
    assert [one["case"] for one in same["worst"]] == [f"layer{n}" for n in range(5)] and same["slower"] == 0
    assert same["auto_against_better"]["mean"] == pytest.approx(0.5) and same["kernel_against_better"]["mean"] == pytest.approx(1.0)
    assert same["auto_floor"] == {"layers": 20, "mean": pytest.approx(0.2)}, "0.01 ms is no floor to measure by"
    assert same["kernel_floor"] == {"layers": 20, "mean": pytest.approx(0.4)}
    assert found["channels_last"]["slower"] == 21 and found["channels_last"]["kernel"]["mean"] is None
    either = found[EITHER]
    assert either["auto"]["mean"] == pytest.approx(0.5) and either["kernel"]["mean"] == pytest.approx(1.0)
    assert same["first_call_ms"] == {"median": 10.0, "worst": 10.0} and same["families"]["patch"]["layers"] == 21


def test_a_wrong_or_missing_auto_is_no_ratio() -> None:
    rows = [row("a", "torch", 2.0), row("a", "auto", 1.0, difference=float("nan"))]
    rows += [row("b", "torch", 2.0), row("b", "auto", None, note="refused"), row("c", "torch", 2.0), row("c", "auto", 1.0)]
    (entry,) = summary(rows)
    assert entry["missing"] == ["a", "b"] and entry["auto"] == {"layers": 1, "mean": 2.0, "p5": pytest.approx(2.0), "worst": 2.0}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey_module, "HOST_FLOP_LIMIT", 20_000)
    out = tmp_path / "p.json"
    words = ["--suite", "population", "--seed", "2", "--count", "1"]
    flags = ["--backend", "host", "--layout", "ncdhw", "--precision", "ieee", "--kernels", GATHER.name]
    assert cli.main(["bench", *words, *flags, "--out", str(out)]) == 0
    assert {row["case"] for row in json.loads(out.read_text())["rows"]} == {population(2, 1)[0].name}
    assert "complete; 0 wrong" in capsys.readouterr().out
    assert cli.main(["check", GATHER.name, *words, "--backend", "host", "--dtype", "fp32", "--kind", "exact"]) == 0
    told = capsys.readouterr().out
    assert "1 layers of seed 2; channels, volumes and batches scaled down" in told and "1 examples of 1 distinct problems" in told
    assert cli.main(["check", "fprop_depthwise", "--suite", "population", "--count", "1", "--backend", "host"]) == 1, "it can do none"


def test_named_layers_are_called_as_a_population_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "c.json"
    words = ["bench", "--calls", "--backend", "host", "--layout", "ncdhw", "--kernels", GATHER.name, "--out", str(out)]
    assert cli.main([*words, "--problem", "n1_c1to2_i3_k3_s2,n1_c2to2_i2_k2"]) == 0
    data = json.loads(out.read_text())
    assert list(data["layers"]) == ["n1_c1to2_i3_k3_s2", "n1_c2to2_i2_k2"] == list(dict.fromkeys(row["case"] for row in data["rows"]))
    assert data["complete"] and data["seed"] is None and {row["family"] for row in data["rows"]} == {"named"}
    assert "named layers, against torch" in capsys.readouterr().out
    assert cli.main([*words, "--suite", "population"]) == 2 and "is of seed None, not 0" in capsys.readouterr().err


def test_tune_takes_the_same_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr("cupy_convt3d.lab.tune.tune", lambda meter, problems, *_, **__: given.append(problems))
    words = ["--suite", "few_channels,population", "--seed", "9", "--count", "3", "--backend", "host"]
    assert cli.main(["tune", *words, "--out", str(tmp_path / "t.json")]) == 0
    assert given == [suite("few_channels") | {layer.name: layer.problem for layer in population(9, 3)}]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--suite", "population,core"], "--suite population,core: a population has a file of its own"),
        (["--suite", "population", "--against", "torch"], "--against: calls are measured against torch"),
        (["--suite", "core", "--minutes", "3"], "--minutes, --regret, --no-trials: are of --calls and --suite population"),
        (["--problem", "kb61", "--no-trials"], "--minutes, --regret, --no-trials: are of --calls and --suite population"),
        (["--problem", "kb61", "--regret", "3"], "--minutes, --regret, --no-trials: are of --calls and --suite population"),
    ],
)
def test_words_that_do_not_go_together(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--backend", "host", *flags]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    plan = Survey(0, 3, PASSES, ("fp32", "tf32", "tf32x3", "bf16", "fp16"), minutes=5)
    data, _ = run(tmp_path / "p.json", plan, backend="cuda", budget_ms=2.0)
    assert data["wrong"] == 0 and data["complete"] and not data["scaled_down"]
    assert all(made.share_of_floor and made.first_call_ms for made in call_rows(data))


@pytest.mark.gpu
def test_what_a_kernel_leaves_unwritten_is_not_an_earlier_result() -> None:
    from cupy_convt3d.backends.cuda import CudaBackend

    problem = Problem(1, 8, 8, 32, 1, 2)  # no tap reaches most outputs, and torch has written zeros there
    meter = Bench(CudaBackend(), budget_ms=1.0, against=())
    lazy = Kernel.from_file(Path(__file__).parent / "specimens" / "unwritten.cu")
    contest = CallContest(LAYER, LayerTensors(meter, problem, "fprop", "fp32"), "fp32", "ncdhw", None)
    rows = contest.rows(contenders(meter.backend, [lazy], problem, "fprop", "fp32", "ncdhw"))
    assert [row.wrong for row in rows] == [False, False, True]
