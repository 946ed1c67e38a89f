"""The mutation engine, and a sample of the mutants of each kernel; `make mutants` judges them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cupy_convt3d import cli
from cupy_convt3d.backends.host import compiled_lines
from cupy_convt3d.errors import FindingsError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab.mutants import MutationReport, Verdict, judge_mutants, machine_code
from cupy_convt3d.lab.mutants_command import page, summary
from cupy_convt3d.lab.mutation import Mutant, mutants
from cupy_convt3d.registry import kernel, kernels
from cupy_convt3d.source import Instance

ROOT = Path(__file__).parents[1]
EXPLAINED = ROOT / "docs" / "mutation.toml"
PAGE = (ROOT / "docs" / "mutation.md").read_text()
JUDGED = re.findall(r"^## (\w+)$", PAGE, re.MULTILINE)
ALL_JUDGED = re.findall(r"^\| (\w+) \| (?P<mutants>\d+) \| (?P=mutants) \|", PAGE, re.MULTILINE)

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
    untouched = [n for n, line in enumerate(SMALL.splitlines(), 1) if line.startswith(("#", "static", "extern", "  //"))]
    assert not {m.line for m in found} & set(untouched)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in ALL_JUDGED])
def test_a_sample_of_mutants_is_killed(name: str) -> None:
    report = judge_mutants(kernel(name), sample=5, explanations=EXPLAINED)
    assert len(report.verdicts) <= 5
    assert not report.unexplained, summary(report)
    assert report.counts["killed"] >= 2


def test_no_explanation_is_stale_and_the_page_is_of_these_sources() -> None:
    text = (ROOT / "docs" / "mutation.md").read_text()
    report = judge_mutants(kernel("fprop_gather"), sample=1, explanations=EXPLAINED)
    assert not report.stale
    assert set(JUDGED) <= set(kernels())
    assert ALL_JUDGED
    for name, judged in ALL_JUDGED:  # samples say what they are of
        assert len(mutants(kernel(name).source)) == int(judged), "run `make mutants`"
    assert "not explained" not in text


def test_a_check_that_lets_mutants_through_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_convt3d.lab.mutants.first_failure", lambda *args, **options: None)
    report = judge_mutants(kernel("fprop_gather"), sample=5)
    assert report.score == 0 and report.unexplained
    assert "SURVIVED line" in summary(report) and "**not explained**" in page([report])


def test_machine_code_tells_what_comments_do_not() -> None:
    source = kernel("fprop_gather").source
    same = Kernel.from_source(source.replace("accum_t(0)", "float(0)"), "fprop_gather")
    other = Kernel.from_source(source.replace("accum_t(0)", "accum_t(1)"), "fprop_gather")
    code = machine_code(Kernel.from_source(source, "fprop_gather"), "fp32")
    assert machine_code(same, "fp32") == code != machine_code(other, "fp32")


def test_explanations_go_stale_with_their_line(tmp_path: Path) -> None:
    mutant = mutants(kernel("fprop_gather").source)[5]
    entry = '[[mutant]]\nkernel = "fprop_gather"\ntext = """{}"""\noperator = "{}"\nbefore = "{}"\nafter = "{}"\nnumber = {}\n'
    path = tmp_path / "explained.toml"
    path.write_text(entry.format(*mutant.key) + 'verdict = "equivalent"\nreason = "because"\n')
    assert not judge_mutants(kernel("fprop_gather"), sample=1, explanations=path).stale
    path.write_text(path.read_text().replace("const", "constant"))
    report = judge_mutants(kernel("fprop_gather"), sample=1, explanations=path)
    assert len(report.stale) == 1 and "STALE" in summary(report)
    path.write_text(path.read_text().replace("because", ""))
    with pytest.raises(FindingsError, match="with a reason"):
        judge_mutants(kernel("fprop_gather"), sample=1, explanations=path)


def test_score_leaves_out_what_says_nothing_of_the_check() -> None:
    mutant = Mutant("sign", 1, "a + b", "+", "-", 0, "a - b")
    kinds = ["killed"] * 19 + ["survived", "equivalent", "invalid", "not compiled"]
    report = MutationReport("k", [Verdict(mutant, kind, "why") for kind in kinds], [], 1.0, len(kinds))
    assert report.score == 0.95 and not report.unexplained and report.interval is None
    assert "(" not in summary(report).split("score")[1]


def test_a_sample_has_wilsons_interval() -> None:
    mutant = Mutant("sign", 1, "a + b", "+", "-", 0, "a - b")
    report = MutationReport("k", [Verdict(mutant, "killed", "")] * 95 + [Verdict(mutant, "survived", "why")] * 5, [], 1.0, 1000)
    assert report.interval == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert "100 of 1000 mutants" in summary(report) and "95.0% (88.8% to 97.8%)" in page([report])


def test_what_the_host_does_not_compile_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    source = kernel("fprop_gather").source
    place = source.index("{", source.index("__global__")) + 1
    branch = "\n#if defined(__CUDACC__)\n  const int unused = 1 + 2;\n#endif\n"
    within = Kernel.from_source(source[:place] + branch + source[place:], "fprop_gather")
    number = source[:place].count("\n") + 3
    assert within.source.splitlines()[number - 1].strip() == "const int unused = 1 + 2;"
    lines = compiled_lines(Instance(within, "fp32"))
    assert number not in lines and {number - 2, number + 3} <= lines
    monkeypatch.setattr("cupy_convt3d.lab.mutants.mutants", lambda source: [m for m in mutants(source) if m.line == number])
    report = judge_mutants(within)
    assert report.counts["not compiled"] == len(report.verdicts) >= 3


def test_verdicts_are_kept_but_not_survivors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, gather = tmp_path / "kept.jsonl", kernel("fprop_gather")
    first = judge_mutants(gather, sample=2, kept=kept)
    monkeypatch.setattr("cupy_convt3d.lab.mutants.Worker", None)  # nothing is judged again
    assert judge_mutants(gather, kept=kept, kept_only=True).verdicts == judge_mutants(gather, sample=2, kept=kept).verdicts
    assert len(first.verdicts) == len(kept.read_text().splitlines()) == 2
    kept.write_text(kept.read_text().replace('"killed"', '"survived"'))
    assert judge_mutants(gather, kept=kept, kept_only=True).counts["survived"] == 2
    with pytest.raises(TypeError):  # it asks for a worker
        judge_mutants(gather, sample=2, kept=kept)
    kept.write_text("not JSON\n")
    with pytest.raises(FindingsError, match="cannot be read"):
        judge_mutants(gather, sample=2, kept=kept)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["mutants", "fprop_gather", "--sample", "2", "--workers", "1", "--page", str(tmp_path / "docs" / "m.md")]
    assert cli.main(line) == 0
    assert f"fprop_gather: 2 of {len(mutants(kernel('fprop_gather').source))} mutants, 2 killed" in capsys.readouterr().out
    assert "| 2 | 2 | 0 | 0 | 0 | 0 | 100.0% (34.2% to 100.0%) |" in (tmp_path / "docs" / "m.md").read_text()
    assert cli.main(["mutants", "nothing"]) == 2
