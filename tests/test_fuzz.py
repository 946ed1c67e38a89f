"""`fuzz`: what crashes, hangs and eats memory is found, written down, resumed and replayed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from cupy_convt3d import cli
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.errors import BackendError, CompileError, FindingsError, KernelError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.check import resolve
from cupy_convt3d.lab.check.examples import Example, configurations, draw_example, layouts, tails, tiles
from cupy_convt3d.lab.fuzz import FuzzReport, _begin, findings, fuzz, replay
from cupy_convt3d.lab.fuzz.findings import Finding, Journal, load
from cupy_convt3d.lab.run.verify import APART, Outcome, _Example, executor_on, verify
from cupy_convt3d.lab.run.worker import Worker
from cupy_convt3d.problem import Problem
from cupy_convt3d.registry import kernel, kernels

SPECIMENS = Path(__file__).parent / "specimens"


def specimen(name: str) -> Kernel:
    return Kernel.from_file(SPECIMENS / f"{name}.cu")


def run(path: Path, *kernels: Kernel, **options: object) -> FuzzReport:
    return fuzz(kernels, backend="host", findings=path, **{"workers": 1, "seed": "test", **options})  # type: ignore[arg-type]


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_a_right_kernel_gives_no_findings_and_its_coverage_grows(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    first = run(path, kernel("fprop_gather"), examples=100, workers=2)
    assert not first.findings and not first.restarts
    before = first.coverage["fprop_gather"]
    again = run(path, kernel("fprop_gather"), kernel("dgrad_gather"), examples=300)
    after = again.coverage["fprop_gather"]
    assert 100 <= first.examples <= 101 and again.examples == 300
    assert after.examples + again.coverage["dgrad_gather"].examples == first.examples + 300
    assert before.pairs & after.pairs == before.pairs != after.pairs
    assert len(after.classes) > 20
    assert events(path) == ["run", "run"]


def test_crashes_hangs_and_memory_are_survived(tmp_path: Path) -> None:
    broken = [specimen(name) for name in ("crash", "hang", "out_of_memory", "s000_groups_ignored")]
    path = tmp_path / "f.jsonl"
    report = run(path, *broken, kernel("fprop_gather"), examples=150, workers=2, time_limit_s=0.5)
    found = {finding.kernel: finding for finding in report.findings}
    assert set(found) == {k.name for k in broken}
    assert "SIGSEGV" in found["crash"].message and found["crash"].problem == "n1_c1to1_i1_k1_bias"
    assert "hang" in found["hang"].message
    assert "out of memory" in found["out_of_memory"].message
    assert found["s000_groups_ignored"].problem == "n1_c2to2_i1_k1_g2"
    assert report.restarts > 2
    assert report.coverage["fprop_gather"].failures == 0 < report.coverage["fprop_gather"].examples
    assert len(load(path)[0]) == len(report.findings) and not load(path)[1]


def test_the_same_finding_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    first = run(path, specimen("s000_groups_ignored"), examples=150)
    second = run(path, specimen("s000_groups_ignored"), examples=150)
    assert first.coverage["s000_groups_ignored"].failures > 20
    assert second.coverage["s000_groups_ignored"].failures > first.coverage["s000_groups_ignored"].failures
    assert first.new == 1 and second.new == 0 and len(second.findings) == 1
    failures = second.coverage["s000_groups_ignored"].failures
    assert events(path).count("failure") == events(path).count("shrunk") < failures / 2


@pytest.mark.parametrize("name", ["s000_groups_ignored", "race"])
def test_the_line_it_prints_is_an_example_of_pytest(name: str, tmp_path: Path) -> None:
    finding = run(tmp_path / "f.jsonl", specimen(name), examples=60).findings[0]
    decorator = eval(finding.example_line().removeprefix("@"), {"example": example, "Problem": Problem})

    @decorator
    @settings(phases=[Phase.explicit])
    @given(**dict.fromkeys(("kernel", "problem", "dtype", "kind", "seed", "tunables"), st.none()))
    def pinned(kernel: str, problem: Problem, dtype: str, kind: str, seed: int, tunables: dict[str, int]) -> None:
        assert str(problem) == finding.problem
        outcome = verify(HostBackend(), resolve(kernel).replace_tunables(**tunables), problem, dtype, kind, seed)
        assert outcome.ok, outcome.message

    with pytest.raises(AssertionError, match=re.escape(finding.what)):
        pinned()


def test_replay_says_what_still_fails_and_what_has_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, copy = tmp_path / "f.jsonl", tmp_path / "mine.cu"
    copy.write_text((SPECIMENS / "s000_groups_ignored.cu").read_text())
    run(path, Kernel.from_file(copy), examples=60)
    (same,) = replay(path)
    assert same.outcome is not None and not same.outcome.ok and not same.warnings
    assert cli.main(["fuzz", "--replay", "--findings", str(path)]) == 1
    assert "still fails: wrong value" in capsys.readouterr().out

    right = (SPECIMENS / "unwritten.cu").read_text()  # groups are right in this one
    copy.write_text(right)
    path.write_text(path.read_text().replace('"numpy": "', '"numpy": "0.'))
    (changed,) = replay(path)
    assert changed.outcome is not None and changed.outcome.ok
    assert cli.main(["fuzz", "--replay", "--findings", str(path)]) == 0
    shown = capsys.readouterr()
    assert re.search(r"warning: .*numpy was 0\.\d.*, is \d", shown.err)
    assert re.search(r"warning: .*the source of mine was \w{16}, is \w{16}", shown.err)
    assert "passes now" in shown.out

    copy.unlink()
    assert replay(path)[0].outcome is None


def test_replay_goes_on_behind_what_cannot_be_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, example = tmp_path / "f.jsonl", Example(kernel("fprop_gather"), Problem(1, 1, 1, 1, 1), "fp32", "exact", 0)
    journal = Journal(path)
    for backend in ("cuda", "host"):
        journal.add("finding", Finding.of(example, Outcome(False, message=backend), backend, None, None))
    journal.close()

    def worker(kernel: Kernel, backend: str, *more: object) -> Worker:
        if backend == "cuda":
            raise BackendError("no GPU")
        return Worker(kernel, backend, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(findings, "Worker", worker)
    assert cli.main(["fuzz", "--replay", "--findings", str(path)]) == 2
    said = capsys.readouterr().out
    assert "not tried: no GPU" in said and "passes now" in said and "0 of 2 findings still fail, 1 not tried" in said


def test_kill_9_loses_at_most_the_example_in_flight(tmp_path: Path) -> None:
    path, progress = tmp_path / "f.jsonl", tmp_path / "f.jsonl.progress"
    command = [sys.executable, "-m", "cupy_convt3d", "fuzz", str(SPECIMENS / "race.cu"), "fprop_gather"]
    child = subprocess.Popen([*command, "--backend", "host", "--workers", "1", "--findings", str(path)], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (not path.exists() or "finding" not in events(path)):
            time.sleep(0.1)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    saved = json.loads(progress.read_text())
    done, examples = sum(saved["done"].values()), sum(entry[2] for entry in saved["coverage"].values())
    assert examples == done > 0
    found = load(path)[0]
    assert found
    report = run(path, specimen("race"), kernel("fprop_gather"), examples=20)
    assert sum(c.examples for c in report.coverage.values()) == examples + 20
    assert found == report.findings[: len(found)]
    after = json.loads(progress.read_text())
    assert after["seed"] == saved["seed"] and all(after["done"][name] >= number for name, number in saved["done"].items())
    assert not load(path)[1]  # what was being shrunk has been


def test_a_failure_that_was_not_shrunk_is_shrunk_by_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    raw = Finding("s000_groups_ignored", str(SPECIMENS / "s000_groups_ignored.cu"), "0", {}, "host", None,
                  "n2_c4to4_i3_k2_s2_g2_bias", "fp32", "random", 5, "wrong value")  # fmt: skip
    journal = Journal(path)
    journal.add("failure", raw)
    journal.close()
    assert load(path)[1] == [raw]
    report = run(path, specimen("s000_groups_ignored"), examples=1)
    assert "n1_c2to2_i1_k1_g2" in [finding.problem for finding in report.findings]
    assert not load(path)[1]


def test_a_torn_last_line_is_forgotten_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    run(path, specimen("s000_groups_ignored"), examples=30)
    whole = path.read_text()
    path.write_text(whole + '{"event": "finding", "kern')
    assert len(load(path)[0]) == 1
    run(path, specimen("s000_groups_ignored"), examples=1)
    assert events(path)  # every line is whole again
    path.write_text("not json\n" + whole)
    with pytest.raises(FindingsError, match="line 1"):
        run(path, specimen("s000_groups_ignored"), examples=1)
    path.write_text('{"event": "finding", "kernel": 3}\n')
    with pytest.raises(FindingsError, match="finding"):
        load(path)
    assert cli.main(["fuzz", "--replay", "--findings", str(tmp_path / "none.jsonl")]) == 2


def test_two_runs_cannot_share_a_file(tmp_path: Path) -> None:
    first = Journal(tmp_path / "f.jsonl")
    with pytest.raises(FindingsError, match="another run"):
        Journal(tmp_path / "f.jsonl")
    first.close()


def test_what_cannot_be_run_at_all_ends_the_run(tmp_path: Path) -> None:
    source = specimen("unwritten").source
    with pytest.raises(CompileError):
        run(tmp_path / "a", Kernel.from_source(source.replace("float sum", "flot sum"), "wrong"), examples=1)
    refusing = source.replace("[[launch]]", '[restrictions]\n"batch > 10000" = "large batches only"\n[[launch]]', 1)
    with pytest.raises(KernelError, match="refuses all"):
        run(tmp_path / "b", Kernel.from_source(refusing, "refusing"), examples=1)
    with pytest.raises(KernelError, match="none twice"):
        run(tmp_path / "c", specimen("crash"), specimen("crash"), examples=1)


def test_the_command_prints_what_it_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["fuzz", str(SPECIMENS / "s000_groups_ignored.cu"), "--backend", "host", "--examples", "40", "--workers", "1"]
    assert cli.main([*line, "--findings", str(tmp_path / "f.jsonl")]) == 1
    shown = capsys.readouterr().out
    assert "FOUND s000_groups_ignored on host: wrong value" in shown
    assert re.search(r"^@example\(kernel=.*Problem\.parse\('n1_c2to2_i1_k1_g2'\)", shown, re.MULTILINE)
    assert "1 findings in" in shown


def test_what_the_gpu_refuses_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = HostBackend()
    card.arch, card.multiprocessors, card.shared_limit = "sm_86", 82, 40 << 10
    monkeypatch.setattr("cupy_convt3d.backends.cuda.CudaBackend", lambda: card)
    known = kernel("fprop_implicit_gemm_mma")
    journal = Journal(tmp_path / "found.jsonl")
    run = _begin([known], "cuda", None, journal, 1.0, None, None, "seed")
    run.spent["0"] = [0.0] * len(run.kernels)
    drawn: list[bool] = []

    def verified(slot: str, example: Example, meanwhile: object) -> Outcome:
        drawn.append(card.why_not(example.kernel, example.problem, example.dtype) is None)
        return Outcome(True)

    monkeypatch.setattr(run, "verify", verified)
    for _ in range(100):
        run.step("0")
    journal.close()
    assert all(drawn) and 0 < len(drawn) < 95


@pytest.mark.sanitizer
@pytest.mark.slow
def test_sanitizers(tmp_path: Path) -> None:
    report = run(tmp_path / "f.jsonl", specimen("read_outside"), examples=20, sanitize="address")
    assert "AddressSanitizer: heap-buffer-overflow" in report.findings[0].message


def test_examples_are_drawn_the_same_and_reach_both_sides_of_a_split() -> None:
    shipped, short = configurations(kernel("wgrad_reduce"))
    assert short.changed_tunables == {"SPLIT_VOXELS": 8, "BLOCK_THREADS": 4} and not shipped.changed_tunables
    assert tiles(short) == {"input_voxels": 8} and configurations(kernel("fprop_tiled")) == [kernel("fprop_tiled")]
    drawn = [draw_example(short, f"{n}") for n in range(200)]
    assert drawn == [draw_example(short, f"{n}") for n in range(200)]
    splits = {short.plan(e.problem, e.dtype).workspace["partial"] // e.problem.names["weight_numel"] for e in drawn if e}
    assert {1, 2, 3} <= splits
    sizes = {problem.names["input_voxels"] for problem in tails(short, "fp32")}
    assert {7, 8, 9, 17} <= sizes


def test_the_second_stage_of_wgrad_reduce_is_checked() -> None:
    """Shipped, no tiny problem has a second range; `check` makes the ranges short, and has one problem of more voxels than a range."""
    from cupy_convt3d.lab.check import check

    shipped = kernel("wgrad_reduce").source
    broken = shipped.replace("for (int split = 0; split < splits; ++split)", "for (int split = 0; split < 1; ++split)")
    assert broken != shipped
    one_split, tiny = Kernel.from_source(broken, "one_split"), Problem.parse("n1_c1to1_i1x1x9_k1")
    assert check(one_split, backend="host", dtypes=["fp32"]).counterexample is not None
    assert 8 in [c.tunables["SPLIT_VOXELS"] for c in configurations(kernel("wgrad_reduce"))]
    for voxels, right in ((one_split.tunables["SPLIT_VOXELS"], True), (8, False)):
        ranges = one_split.replace_tunables(SPLIT_VOXELS=voxels)
        assert check(ranges, backend="host", problem=tiny, dtypes=["fp32"], kinds=["exact"]).passed == right


@pytest.mark.parametrize("name", kernels())
def test_kernels_with_restrictions_get_tails_and_layouts_too(name: str) -> None:
    for dtype in {kernel(name).dtypes[0], kernel(name).dtypes[-1]}:
        problems = [*tails(kernel(name), dtype), *(problem for problem, _ in layouts(kernel(name), dtype))]
        assert len(set(problems)) >= 12
        assert {sum(size > 1 for size in problem.kernel_size) for problem in problems} >= {1, 3}


def test_the_ways_that_tiny_problems_do_not_take_are_configurations() -> None:
    tile = [c.changed_tunables for c in configurations(kernel("fprop_patch_mma"))]
    assert tile == [{}, *({"TILE": n} for n in (1, 2, 3, 4, 5))]
    low = [c.changed_tunables for c in configurations(kernel("fprop_implicit_gemm_mma"))]
    assert low == [{}, {"MAX_HALO": 4}, {"STAGE_TAPS": 2}]
    high = [c.changed_tunables for c in configurations(kernel("fprop_patch_wgmma"))]
    assert high == [{}, {"COLUMNS": 256}, {"ROWS": 1}]


def test_the_layouts_of_the_larger_problems() -> None:
    """Each tensor is channels_last for some seed, and from `APART` on only one axis is not aligned."""
    shape, seen = (2, 16, 2, 8, 8), set()
    for problem, seed in layouts(kernel("fprop_implicit_gemm_mma"), "fp16"):
        example = _Example(executor_on(HostBackend()), kernel("fprop_implicit_gemm_mma"), problem, "fp16", "random", seed)
        generator = np.random.Generator(np.random.PCG64([seed, 1])) if seed else None
        strides = [example.place(name, shape, 0, generator).strides for name in ("input", "weight", "output")]
        seen |= {(name, s[1] == 1 and s[4] == 16) for name, s in zip(("input", "weight", "output"), strides, strict=True)}
        if seed == APART + 3:
            assert [s % 8 for s in strides[0]] == [0, 1, 0, 7, 0]
    assert seen == {(name, last) for name in ("input", "weight", "output") for last in (True, False)}
