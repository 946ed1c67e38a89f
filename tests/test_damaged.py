"""Data is never code: damaged files are refused by name, place and field, and what is taken of them computes right values."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damage import damaged, damaged_toml
from rich.console import Console

import cupy_convt3d as ct
from cupy_convt3d import calls, cli, reference, registry, tuning
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.cost import Card
from cupy_convt3d.dtypes import allowed_instances
from cupy_convt3d.errors import CacheWarning, DataError, FindingsError, KernelError
from cupy_convt3d.lab.bench import results
from cupy_convt3d.lab.bench.calls import CallRow
from cupy_convt3d.lab.bench.measure import Row
from cupy_convt3d.lab.bench.summary import comparisons, summary
from cupy_convt3d.lab.bench.survey import begun
from cupy_convt3d.lab.bench.survey_summary import call_rows, print_head, print_summary
from cupy_convt3d.lab.bench.survey_summary import summary as summary_of_calls
from cupy_convt3d.lab.calibrate import Sweep, fit, joined
from cupy_convt3d.lab.calibrate.samples import Sample
from cupy_convt3d.lab.fuzz import findings
from cupy_convt3d.lab.fuzz.findings import Finding, Journal, source_digest
from cupy_convt3d.lab.mutants import _Kept, explanations
from cupy_convt3d.lab.mutants.command import Score, page, scores
from cupy_convt3d.problem import Problem
from cupy_convt3d.source import Instance, code_digest
from cupy_convt3d.tuning import Database, Entry

PROBLEM = Problem(1, 4, 4, 3, 3, 2, 1)
INPUT = np.random.default_rng(0).integers(-4, 5, PROBLEM.input_shape).astype(np.float32)
WEIGHT = np.random.default_rng(1).integers(-4, 5, PROBLEM.weight_shape).astype(np.float32)
EXPECTED = reference.run("fprop", PROBLEM, {"input": INPUT, "weight": WEIGHT}).astype(np.float32)


def entry(name: str = "fprop_tiled", **changes: Any) -> Entry:
    kernel = registry.kernel(name)
    fields: dict[str, Any] = {
        "device": HostBackend().device_name,
        "pass_name": "fprop",
        "problem": str(PROBLEM),
        "precision": "fp32",
        "layout": "ncdhw",
        "kernel": name,
        "digest": code_digest(kernel),
        "instance": "fp32",
        "tunables": dict(kernel.tunables),
        "median_ms": 1.0,
        "with_packing_ms": 2.0,
    }
    return Entry(**{**fields, **changes})


def finding(**changes: Any) -> Finding:
    kernel = registry.kernel("fprop_tiled")
    fields: dict[str, Any] = {
        "kernel": kernel.name,
        "path": None,
        "source": source_digest(kernel),
        "tunables": {"TILE_DEPTH": 16},
        "backend": "host",
        "sanitize": None,
        "problem": "n1_c1to1_i1_k1",
        "dtype": "fp32",
        "kind": "exact",
        "seed": 3,
        "message": "wrong value; 1 of 1 elements",
        "index": (0, 0, 0, 0, 0),
        "expected": 1.0,
        "got": 2.0,
    }
    return Finding(**{**fields, **changes})


def database_text(*entries: Entry) -> str:
    lines = [json.dumps(asdict(one)) for one in entries or (entry(), entry("fprop_gather", median_ms=3.0))]
    return '{"format": 1, "entries": [\n' + ",\n".join(lines) + "\n]}\n"


def lines_text(*events: tuple[str, dict[str, Any]]) -> str:
    return "".join(json.dumps({"event": event, **fields}) + "\n" for event, fields in events)


def findings_text() -> str:
    pending = asdict(finding(seed=4, sanitize="address"))
    return lines_text(
        ("run", {"surroundings": {"numpy": "2"}, "kernels": ["fprop_tiled"], "backend": "host", "sanitize": None, "seed": "a"}),
        ("failure", pending),
        ("finding", asdict(finding())),
        ("finding", asdict(finding(problem="n1_c2to2_i1_k1", path="/nowhere/own.cu"))),
        ("shrunk", pending),
    )


def report_text() -> str:
    row = Row("one", str(PROBLEM), "fprop", "fprop_tiled", False, "fp32", PROBLEM.flop, 3, 1.0, 0.9, 1.1, 0.5, 0.5, 100, 2.0, 1e-7)
    rival = Row("one", str(PROBLEM), "fprop", "cuDNN", True, "fp32", PROBLEM.flop, 3, 2.0, 1.9, 2.1, 0.5, 0.25, 100)
    ceilings = {"copy_bytes_per_s": 3e12, "gemm_flop_per_s": {"fp32": 5e13}}
    data = {"format": 1, "machine": {"device": "GPU Z"}, "created": "2026-01-01T00:00:00+00:00", "ceilings": ceilings}
    return json.dumps({**data, "rows": [{**asdict(r), "wrong": r.wrong} for r in (row, rival)]})


def use_database(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVT3D_TUNING", str(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        result = ct.conv_transpose3d(INPUT, WEIGHT, stride=2, padding=1, backend="host")
        np.testing.assert_array_equal(result, EXPECTED)
        for one in Database.load(path).entries():
            assert one.instance in allowed_instances(one.precision)
            assert all(type(value) is int for value in one.tunables.values())
    try:
        Database.read(path)
    except DataError as error:
        assert str(path) in str(error)


def use_findings(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        found, pending, _ = findings.load(path)
    except FindingsError as error:
        assert str(path) in str(error)
        return
    for one in [*found, *pending]:
        kernel = findings.current_kernel(one)
        try:
            if kernel is not None:
                assert all(isinstance(d, str) for d in Instance(one.example(kernel).kernel, one.dtype).defines)
        except KernelError:
            continue


def use_progress(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = path.with_suffix(".jsonl")
    own.write_text(findings_text())
    path.rename(own.with_name(own.name + ".progress"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        journal = Journal(own)
    journal.close()
    for figures in journal.progress.get("coverage", {}).values():
        assert int(figures[1], 16) >= 0 and all(type(n) is int for n in figures[2:])


def use_report(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        loaded = results.load(path)
    except KernelError as error:
        assert str(path) in str(error)
        return
    summary(loaded.rows)
    for one in comparisons(loaded.rows):
        one.ratio()
    for row in loaded.rows:
        assert row.wrong in (True, False)


def use_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        _Kept(path, registry.kernel("fprop_gather"))
    except FindingsError as error:
        assert str(path) in str(error)


def kept_text() -> str:
    kept = _Kept(None, registry.kernel("fprop_gather"))
    line = {"kernel": kept.kernel, "digest": kept.digest, "mutant": ["a < b", "bound", "<", "<=", 0], "verdict": "killed", "reason": "x"}
    return (json.dumps(line) + "\n") * 3


def calls_text() -> str:
    lines = [json.dumps(asdict(calls.Call("fprop", str(PROBLEM), precision))) for precision in ("fp32", "tf32")]
    return '{"format": 1, "calls": [\n' + ",\n".join(lines) + "\n]}\n"


def use_calls(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        found = calls.read(path)
    except DataError as error:
        assert str(path) in str(error)
        return
    for call in found:
        Problem.parse(call.problem)
        assert allowed_instances(call.precision) and call.packed in (True, False)


def survey_text() -> str:
    rows = [
        CallRow("one", str(PROBLEM), "fprop", name, name == "torch", "fp32", PROBLEM.flop, 3, ms, family="k3s2", ran="torch").recorded
        for name, ms in (("torch", 1.0), ("auto", 2.0), ("fprop_gather", 3.0), ("searched", 2.5))
    ]
    rows[3] |= {"speedup": 1.1, "difference": "nan", "wrong": True}
    data = {"format": 1, "kind": "population", "created": "2026-01-01T00:00:00+00:00", "machine": {"device": "GPU Z", "backend": "cuda"}}
    data |= {"tf32": {"fp32": {"kernels": "ieee"}}, "seed": 0, "kernels": "auto", "scaled_down": False, "trials": True}
    data |= {"ceilings": {"copy_bytes_per_s": 3e12, "gemm_flop_per_s": {"fp32": 5e13}}, "elapsed_s": 1.5, "complete": False}
    return json.dumps({**data, "layers": {"one": {"family": "k3s2", "problem": str(PROBLEM)}}, "rows": rows})


def use_survey(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        data = begun(path)
    except DataError as error:
        assert str(path) in str(error)
        return
    rows, written = call_rows(data), io.StringIO()
    known = {name: data[name] for name in ("machine", "ceilings", "rows", "elapsed_s")}
    known |= {"machine": {"backend": "cuda"} | data["machine"], "seed": 0, "scaled_down": False, "complete": False}
    print_head(Console(file=written), known)
    print_summary(Console(file=written), known | {"summary": summary_of_calls(rows)}, rows)
    assert "\x1b" not in written.getvalue()


def sweep_text() -> str:
    card = Card("GPU Z", "sm_90", 132, 1.7e9, 3e12, 2.5e12, {"fp32": 5e13})
    samples = [
        Sample("fprop", f"n{batch}_c4to4_i8_k3_s2_p1", "ncdhw", kernel, "fp32", {}, batch * ms, batch * ms)
        for batch in (1, 2, 3)
        for kernel, ms in (("fprop_gather", 2.0), ("library", 1.0))
    ]
    return json.dumps({"format": 1, "card": asdict(card), "samples": [asdict(one) for one in samples]})


def use_sweep(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        found = Sweep.read(path)
    except DataError as error:
        assert str(path) in str(error)
        return
    fit(joined([found]), {"fprop_gather": registry.kernel("fprop_gather")})


def scores_text() -> str:
    return json.dumps({"fprop_gather": asdict(Score(20, 10, 8, 1, 1, 0, 0, "kernel and headers", "a host"))})


def use_scores(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        found = scores(path)
    except DataError as error:
        assert str(path) in str(error)
        return
    page(found, {})


def explained_text() -> str:
    mutants = json.dumps([["fprop_gather", "a < b", "bound", "<", "<=", 0]])
    return f'[[reason]]\nverdict = "equivalent"\nreason = "no difference"\nmutants = {mutants}\n'


def use_explained(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        found = explanations(path)
    except FindingsError as error:
        assert str(path) in str(error)
        return
    page({}, found)


PROGRESS = '{"seed": "a", "done": {"0/fprop_tiled/{}": 7}, "coverage": {"fprop_tiled": ["fprop", "0x1f", 7, 1, 3]}}'
Use = Callable[[Path, pytest.MonkeyPatch], None]
FILES: dict[str, tuple[Callable[[], str], Use, bool]] = {
    "tuning": (database_text, use_database, False),
    "findings": (findings_text, use_findings, True),
    "progress": (lambda: PROGRESS, use_progress, False),
    "report": (report_text, use_report, False),
    "kept": (kept_text, use_kept, True),
    "calls": (calls_text, use_calls, False),
    "survey": (survey_text, use_survey, False),
    "sweep": (sweep_text, use_sweep, False),
    "scores": (scores_text, use_scores, False),
    "explained": (explained_text, use_explained, False),
}


def run_damaged(kind: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, use, lines = FILES[kind]
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "none.json")
    whole = text()
    damage = damaged_toml if kind == "explained" else damaged
    for seed in range(count):
        path = tmp_path / f"{kind}{seed}"
        path.write_bytes(damage(whole, seed, lines))
        try:
            use(path, monkeypatch)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {damage(whole, seed, lines)[:1000]!r}") from error


@pytest.mark.parametrize("kind", FILES)
def test_whole_files_are_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else damage would show nothing."""
    text, use, _ = FILES[kind]
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "none.json")
    (path := tmp_path / kind).write_text(text())
    use(path, monkeypatch)
    if kind == "tuning":
        assert len(Database.read(path).entries()) == 2
    if kind == "findings":
        assert [len(found) for found in findings.load(path)[:2]] == [2, 0]
    if kind == "report":
        assert len(results.load(path).rows) == 2


@pytest.mark.parametrize("kind", ["survey", "sweep", "scores", "explained"])
def test_a_pipe_is_not_waited_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / kind)
    FILES[kind][1](tmp_path / kind, monkeypatch)


@pytest.mark.parametrize("changes", [{"mutants": -1}, {"killed": 10**400}])
def test_a_score_is_a_number_of_mutants(tmp_path: Path, changes: dict[str, int]) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"k": {**json.loads(scores_text())["fprop_gather"], **changes}}))
    with pytest.raises(DataError, match=f"k: {next(iter(changes))}=.*must be from 0 to"):
        scores(path)


@pytest.mark.parametrize("kind", FILES)
def test_damaged_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_damaged(kind, 30, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FILES)
def test_many_damaged_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_damaged(kind, 600, tmp_path, monkeypatch)


CODE = '1);} static int x = system("touch pwned"); int f() { return (1'


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tunables": {"TILE_DEPTH": CODE}}, "tunables.TILE_DEPTH='1.*must be a whole number"),
        ({"tunables": {"TILE_DEPTH": 16.0}}, "tunables.TILE_DEPTH=16.0: must be a whole number"),
        ({"tunables": {"TILE_DEPTH": True}}, "tunables.TILE_DEPTH=True: must be a whole number"),
        ({"tunables": {"TILE_DEPTH": -1}}, "tunables.TILE_DEPTH=-1: must be from 0"),
        ({"instance": "fp16"}, "instance='fp16': must be one of fp32"),
        ({"precision": "int8"}, "precision='int8': must be one of"),
        ({"median_ms": float("nan")}, "median_ms=nan: must be from"),
        ({"median_ms": 0}, "median_ms=0.0: must be from"),
        ({"problem": "n1"}, "problem: name='n1'"),
        ({"kernel": 5}, "kernel=5: must be text"),
        ({"layout": "nhwc"}, "layout='nhwc': must be one of ncdhw, channels_last"),
    ],
)
def test_an_entry_is_refused_by_line_and_field(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(database_text(entry("fprop_gather"), entry(**changes)))
    with pytest.raises(DataError, match=f"{path}', line 3: {words}"):
        Database.read(path)
    with pytest.warns(CacheWarning, match="line 3"):
        assert Database.load(path).entries() == []


@pytest.mark.parametrize("tunables", [{"TILE_DEPTH": 15}, {"NOBODY": 1}, {"TILE_DEPTH; x": 8}])
def test_a_configuration_that_is_not_listed_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tunables: dict[str, int]) -> None:
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "none.json")
    monkeypatch.setenv("CONVT3D_TUNING", str(tmp_path / "t.json"))
    (tmp_path / "t.json").write_text(database_text(entry(tunables=tunables)))
    with pytest.warns(CacheWarning, match="was ignored: .*(must be one of|tunables)"):
        result = ct.conv_transpose3d(INPUT, WEIGHT, stride=2, padding=1, backend="host")
    np.testing.assert_array_equal(result, EXPECTED)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tunables": {"TILE_DEPTH": CODE}}, "tunables.TILE_DEPTH='1.*must be a whole number"),
        ({"dtype": "int8"}, "dtype='int8': must be one of"),
        ({"kind": "any"}, "kind='any': must be one of"),
        ({"backend": "sh"}, "backend='sh': must be one of host, cuda"),
        ({"sanitize": "2"}, "sanitize='2': must be one of"),
        ({"path": "/dev/stdin"}, "path='/dev/stdin': must end with .cu"),
        ({"seed": -1}, "seed=-1: must be from 0"),
        ({"problem": "n1"}, "problem: name='n1'"),
        ({"index": "1"}, "index='1': must be a list"),
    ],
)
def test_a_finding_is_refused_by_line_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
) -> None:
    path = tmp_path / "f.jsonl"
    wrong = {**asdict(finding()), **changes}
    path.write_text(lines_text(("finding", asdict(finding())), ("finding", wrong), ("run", {"surroundings": {}})))
    with pytest.raises(FindingsError, match=f"{path}', line 2: {words}"):
        findings.load(path)
    assert cli.main(["fuzz", "--replay", "--findings", str(path)]) == 2
    assert f"{path}', line 2" in capsys.readouterr().err


@pytest.mark.parametrize("value", [CODE, 1.5, True, None, -1, 2**31, [1]])
def test_only_whole_numbers_are_tunables(value: Any) -> None:
    kernel = registry.kernel("fprop_tiled")
    with pytest.raises(KernelError, match=r"TILE_DEPTH=.*must be a whole number"):
        kernel.replace_tunables(TILE_DEPTH=value)
    if type(value) is not int:
        from dataclasses import replace

        with pytest.raises(KernelError, match="macro 'TILE_DEPTH'="):
            _ = Instance(replace(kernel, tunables={"TILE_DEPTH": value}), "fp32").defines
    with pytest.raises(KernelError, match="no 'int8' instance"):
        _ = Instance(kernel, "int8").defines


def add_entries(path: str, name: str, numbers: range) -> None:
    database = Database.read(Path(path))
    for number in numbers:
        database.record(entry(device=f"{name} {number}"))
        database.merge(Path(path))


def test_two_runs_on_one_database_lose_nothing(tmp_path: Path) -> None:
    import multiprocessing

    path = str(tmp_path / "t.json")
    context = multiprocessing.get_context("spawn")
    runs = [context.Process(target=add_entries, args=(path, name, range(16))) for name in ("a", "b")]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert len(Database.read(Path(path)).entries()) == 32
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_a_damaged_database_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    path.write_text(database_text()[:-20])
    before = path.read_bytes()
    assert cli.main(["tune", "--backend", "host", "--problem", "n1_c1to1_i3_k1", "--kernels", "fprop_gather", "--out", str(path)]) == 2
    assert f"{path}': is no JSON" in capsys.readouterr().err and path.read_bytes() == before
