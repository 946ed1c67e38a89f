"""The mutation engine, and a sample of the mutants of each kernel; `make mutants` judges them all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cupy_convt3d import cli
from cupy_convt3d.backends.host import compiled_places
from cupy_convt3d.errors import DataError, FindingsError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.mutants import MutationReport, Verdict, _changed, _Kept, blocks, explanations, judge_mutants, machine_code
from cupy_convt3d.lab.mutants.command import keep, page, score, scores, summary
from cupy_convt3d.lab.mutants.mutation import Mutant, mutants
from cupy_convt3d.registry import kernel, kernels
from cupy_convt3d.source import Instance

ROOT = Path(__file__).parents[1]
EXPLAINED = ROOT / "docs" / "mutation.toml"
SCORES = scores(ROOT / "docs" / "mutation_scores.json")
ALL_JUDGED = {name: found for name, found in SCORES.items() if found.judged == found.mutants}
MUTANT = Mutant("sign", 1, "a + b", "+", "-", 0, "a - b")

SMALL = """/* convt3d
pass = "fprop"
[[launch]]
grid = "ceil_div(output_numel, 4 + 4)"
block = 8
*/
#include "convt3d.cuh"
#define EIGHT 8
static_assert(EIGHT < 9, "x < y");
extern "C" __global__ void small(const float* input, float* output, int batch) {
  // a < b stays
  const index_t i = blockIdx.x * 8 + threadIdx.x;
  if (i >= batch && i != 7) return;
  __syncthreads();
  accum_t sum = i > 2 ? input[i] : 0.5f;
  for (int t = 0; t < f(i, batch); ++t) sum += t % 2;
  output[i] = sum;
}
"""


def test_every_operator_changes_one_place_of_the_code() -> None:
    found = mutants(SMALL)
    for mutant in found:
        assert mutant.source != SMALL
        changed = [(a, b) for a, b in zip(SMALL.splitlines(), mutant.source.splitlines(), strict=True) if a != b]
        assert [a.strip() for a, _ in changed] == [mutant.text]
        assert SMALL.splitlines()[mutant.line - 1].strip() == mutant.text
    assert {m.operator for m in found} == {
        *("bound", "equality", "sign", "stride", "modulo", "assignment", "logic", "step", "constant", "barrier", "guard"),
        *("choice", "accumulator", "index type", "grid", "arguments"),
    }
    assert len({m.key for m in found}) == len(found)
    changes = {(m.operator, m.before.strip(), m.after.strip()) for m in found}
    assert {
        ("grid", "ceil_div(output_numel, 4 + 4)", "((output_numel) // (4 + 4))"),
        ("bound", ">=", ">"),
        ("arguments", "i, batch", "batch, i"),
        ("choice", "?", "&& false ?"),
        ("modulo", "%", "/"),
    } <= changes
    declared = SMALL.replace("[[launch]]", '[cost]\nsteps = "ceil_div(taps, 2)"\nproducts = "ceil_div(batch, 2)"\n\n[[launch]]', 1)
    assert declared != SMALL and [m.key for m in mutants(declared)] == [m.key for m in found], "a cost changes no result"
    untouched = [n for n, line in enumerate(SMALL.splitlines(), 1) if line.startswith(("#", "static", "extern", "  //"))]
    assert not {m.line for m in found} & set(untouched)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_JUDGED)
def test_a_sample_of_mutants_is_killed(name: str) -> None:
    headers = ALL_JUDGED[name].of != "kernel"
    report = judge_mutants(kernel(name), sample=5, explanations=EXPLAINED, headers=headers)
    assert len(report.verdicts) <= 5
    assert not report.unexplained, summary(report)
    assert report.counts["killed"] >= 2


def test_no_explanation_is_stale_and_the_scores_are_of_these_sources() -> None:
    report = judge_mutants(kernel("fprop_gather"), sample=1, explanations=EXPLAINED)
    assert not report.stale
    assert SCORES.keys() <= kernels().keys() and ALL_JUDGED
    for name, found in ALL_JUDGED.items():
        changed = [mutants(kernel(name).source)]
        if found.of != "kernel":
            changed += [mutants(text, file) for file, text in blocks(kernel(name)).items()]
        assert sum(map(len, changed)) == found.mutants, f"run `make mutants` for {name}"
    for found in SCORES.values():
        assert found.judged == found.killed + found.survived + found.equivalent + found.invalid + found.not_compiled


def test_every_reason_names_a_mutant_that_there_is() -> None:
    """By the text of its line, in the kernel or header that it names."""
    reasons = explanations(EXPLAINED)
    files = {**{name: known.source for name, known in kernels().items()}}
    files |= {name: text for known in kernels().values() for name, text in blocks(known).items()}
    for where in sorted({key[0] for key in reasons}):
        known = {mutant.key[1:] for mutant in mutants(files[where], where)} | {mutant.key[1:] for mutant in mutants(files[where])}
        assert not [key for key in reasons if key[0] == where and key[1:] not in known]
    text = page(SCORES, reasons)
    assert text.count("| equivalent |") + text.count("| survived |") == len(reasons) + 2  # and the table's head
    assert "| fprop_gather | kernel" in text and "## fprop_patch\n" in text


def test_scores_are_kept_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    report = MutationReport("k", [Verdict(MUTANT, "killed", "")], [], 1.0, 1)
    keep(path, [report])
    keep(path, [replace(report, kernel="j", total=9)])
    assert [(name, str(found)) for name, found in scores(path).items()] == [("j", "100.0% (20.7% to 100.0%)"), ("k", "100.0%")]
    path.write_text(path.read_text().replace('"judged": 1', '"judged": "x"'))
    with pytest.raises(DataError, match=r"scores '.*scores.json': j: judged"):
        scores(path)


def test_mutants_follow_includes_into_the_package() -> None:
    """A header changed for one kernel is compiled for it, is judged by it, and other kernels have the file as it is."""
    gather = kernel("fprop_gather")
    files = blocks(gather)
    assert {"convt3d/core/geometry.cuh", "convt3d/core/view.cuh"} <= files.keys()
    assert not [file for file in blocks(kernel("fprop_rolling_wgmma")) if "host/" in file or "standard/" in file]
    text = files["convt3d/core/geometry.cuh"]
    chosen = next(m for m in mutants(text, "convt3d/core/geometry.cuh") if m.operator == "modulo" and "scaled" in m.text)
    assert str(chosen).startswith("convt3d/core/geometry.cuh line ") and chosen.key[0] == chosen.file
    places = compiled_places(Instance(gather, "fp32"))
    assert chosen.place in places and ("", gather.source.splitlines().index('#include "convt3d.cuh"') + 1) not in places
    assert machine_code(_changed(gather, chosen), "fp32") != machine_code(gather, "fp32")


def test_a_header_of_which_a_kernel_calls_nothing_is_the_same_code_wherever_its_copy_lies() -> None:
    """What a kernel says of a copy names a header's file (convt3d/ptx/copy_async.cuh), which is the package's."""
    file = "convt3d/core/dtypes.cuh"
    changed = next(m for m in mutants(blocks(kernel("fprop_grouped"))[file], file) if "bfloat16_t value" in m.text)
    assert machine_code(_changed(kernel("fprop_grouped"), changed), "fp32") == machine_code(kernel("fprop_grouped"), "fp32")


@pytest.mark.slow
def test_mutants_of_a_header_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    file = "convt3d/core/geometry.cuh"
    monkeypatch.setattr("cupy_convt3d.lab.mutants.mutants", lambda source, name="": mutants(source, name) if name == file else [])
    report = judge_mutants(kernel("fprop_gather"), sample=4, workers=1)
    assert {verdict.mutant.file for verdict in report.verdicts} == {file}
    assert report.counts["killed"] >= 1 and report.counts["equivalent"] >= 1, summary(report)


@pytest.mark.slow
def test_a_check_that_lets_mutants_through_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_convt3d.lab.mutants.first_failure", lambda *args, **options: None)
    report = judge_mutants(kernel("fprop_gather"), sample=5)
    assert report.score == 0 and report.unexplained
    assert "SURVIVED " in summary(report)


def test_machine_code_tells_what_comments_do_not() -> None:
    source = kernel("fprop_gather").source
    same = Kernel.from_source(source.replace("accum_t sum", "float sum"), "fprop_gather")
    other = Kernel.from_source(source.replace("finish(sum)", "finish(-sum)"), "fprop_gather")
    code = machine_code(Kernel.from_source(source, "fprop_gather"), "fp32")
    assert machine_code(same, "fp32") == code != machine_code(other, "fp32")


@pytest.mark.slow
def test_explanations_go_stale_with_their_line(tmp_path: Path) -> None:
    mutant = mutants(kernel("fprop_gather").source)[5]
    row = json.dumps(["fprop_gather", *mutant.key[1:]])
    path = tmp_path / "explained.toml"
    path.write_text(f'[[reason]]\nverdict = "equivalent"\nreason = "because"\nmutants = [{row}]\n')
    assert not judge_mutants(kernel("fprop_gather"), sample=1, explanations=path).stale
    path.write_text(path.read_text().replace("const", "constant"))
    report = judge_mutants(kernel("fprop_gather"), sample=1, explanations=path)
    assert len(report.stale) == 1 and "STALE" in summary(report)
    path.write_text(path.read_text().replace("because", ""))
    with pytest.raises(FindingsError, match="with a reason"):
        judge_mutants(kernel("fprop_gather"), sample=1, explanations=path)
    path.write_text(path.read_text().replace('["fprop_gather", ', "["))
    with pytest.raises(FindingsError, match="must be five texts and a number"):
        judge_mutants(kernel("fprop_gather"), sample=1, explanations=path)
    with pytest.raises(FindingsError, match="No such file"):
        judge_mutants(kernel("fprop_gather"), sample=1, explanations=path.with_name("none.toml"))


def test_score_leaves_out_what_says_nothing_of_the_check() -> None:
    kinds = ["killed"] * 19 + ["survived", "equivalent", "invalid", "not compiled"]
    report = MutationReport("k", [Verdict(MUTANT, kind, "why") for kind in kinds], [], 1.0, len(kinds))
    assert report.score == 0.95 and not report.unexplained and report.interval is None
    assert "(" not in summary(report).split("score")[1]


def test_a_sample_has_wilsons_interval() -> None:
    report = MutationReport("k", [Verdict(MUTANT, "killed", "")] * 95 + [Verdict(MUTANT, "survived", "why")] * 5, [], 1.0, 1000)
    assert report.interval == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert "100 of 1000 mutants" in summary(report) and str(score(report)) == "95.0% (88.8% to 97.8%)"


def test_what_the_host_does_not_compile_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    source = kernel("fprop_gather").source
    place = source.index("{", source.index("__global__")) + 1
    branch = "\n#if defined(__CUDACC__)\n  const int unused = 1 + 2;\n#endif\n"
    within = Kernel.from_source(source[:place] + branch + source[place:], "fprop_gather")
    number = source[:place].count("\n") + 3
    assert within.source.splitlines()[number - 1].strip() == "const int unused = 1 + 2;"
    lines = {line for file, line in compiled_places(Instance(within, "fp32")) if not file}
    assert number not in lines and {number - 2, number + 3} <= lines
    there = "cupy_convt3d.lab.mutants.mutants"
    monkeypatch.setattr(there, lambda source, file="": [m for m in mutants(source, file) if m.place == ("", number)])
    report = judge_mutants(within)
    assert report.counts["not compiled"] == len(report.verdicts) >= 3


def test_verdicts_are_kept_but_not_survivors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, gather = tmp_path / "kept.jsonl", kernel("fprop_gather")
    first = judge_mutants(gather, sample=1, kept=kept)
    monkeypatch.setattr("cupy_convt3d.lab.mutants.Worker", None)  # nothing is judged again
    assert judge_mutants(gather, kept=kept, kept_only=True).verdicts == judge_mutants(gather, sample=1, kept=kept).verdicts
    assert len(first.verdicts) == len(kept.read_text().splitlines()) == 1
    kept.write_text(kept.read_text().replace('"killed"', '"survived"'))
    assert judge_mutants(gather, kept=kept, kept_only=True).counts["survived"] == 1
    with pytest.raises(TypeError):  # it asks for a worker
        judge_mutants(gather, sample=1, kept=kept)
    kept.write_text("not JSON\n")
    with pytest.raises(FindingsError, match="line 1: is no JSON"):
        judge_mutants(gather, sample=1, kept=kept)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "docs" / "scores.json"
    assert cli.main(["mutants", "fprop_gather", "--sample", "1", "--workers", "1", "--scores", str(path)]) == 0
    total = sum(len(mutants(text, file)) for file, text in {"": kernel("fprop_gather").source, **blocks(kernel("fprop_gather"))}.items())
    assert f"fprop_gather: 1 of {total} mutants, 1 killed" in capsys.readouterr().out
    found = scores(path)["fprop_gather"]
    assert (found.mutants, found.judged, found.killed, found.of) == (total, 1, 1, "kernel and headers")
    assert cli.main(["mutants", "nothing"]) == 2


def test_the_line_that_a_killed_run_was_writing_is_forgotten(tmp_path: Path) -> None:
    gather, path = kernel("fprop_gather"), tmp_path / "kept.jsonl"
    mutant = mutants(gather.source)[0]
    _Kept(path, gather).add(Verdict(mutant, "killed", "why"))
    whole = path.read_bytes()
    for torn in (whole[:-9], whole[:-1], b"", whole + whole[:5]):
        path.write_bytes(torn)
        kept = _Kept(path, gather)
        assert kept.has(mutant) == (torn.startswith(whole))
        kept.add(Verdict(mutant, "killed", "why"))
        assert _Kept(path, gather).has(mutant) and path.read_bytes().endswith(whole)
