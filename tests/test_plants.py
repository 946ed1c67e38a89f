"""The plants of `plants/` apply, and the check catches a few of them; `make plants` judges them all."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from cupy_convt3d import cli
from cupy_convt3d.errors import DataError, FindingsError
from cupy_convt3d.lab.check.report import CheckReport
from cupy_convt3d.lab.mutants.plants import Judgement, Plant, judge, judge_plants, planted, plants
from cupy_convt3d.lab.mutants.plants_command import LEAST_CAUGHT, keep, kept, page, summary
from cupy_convt3d.registry import kernel, kernels

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / "plants"
PLANTS = {plant.name: plant for plant in plants(FOLDER)}
SCORES = ROOT / "docs" / "plant_scores.json"
# A few of each kind that is soon found, and what the check says of them.
PINNED = {
    "a class begins by the padding's other sign": "wrong value",
    "every group has the first one's bias": "wrong value",
    "the last warp sums without barriers": r".",
    "no barrier before the first step of a tap": r".",
    "a channel's group by the outputs of a group": r".",
    "the class without taps is not stored": "never written",
    "the stride along h is that along w": "specialization: STRIDE_H is",
}
ENTRY = '[[plant]]\nname = "{}"\nkernel = "fprop_gather"\nidea = "why"\nchanges = [["{}", "{}"]]\n'


def test_there_are_many_and_all_apply() -> None:
    assert len(PLANTS) >= 60
    names = {plant.kernel for plant in PLANTS.values()}
    assert len(names) >= 18
    assert {kernel(name).pass_name for name in names} == {"fprop", "dgrad", "wgrad"}
    for plant in PLANTS.values():
        changed, right = planted(plant), kernels()[plant.kernel]
        assert (changed.overlay == right.overlay) == (not plant.file)
        assert (changed.source == right.source) == bool(plant.file)


def test_a_text_may_be_broken_into_other_lines(tmp_path: Path) -> None:
    (tmp_path / "some_kind.toml").write_text(ENTRY.format("one", "if (id <\\n  0) continue;", "if (id < 1) continue;"))
    (plant,) = plants(tmp_path)
    assert plant.kind == "some kind"
    assert "if (id < 1) continue;" in planted(plant).source


@pytest.mark.parametrize(
    ("old", "file", "says"),
    [
        ("no such text", "", r"plant 'lost' .*'no such text' is there 0 times"),
        ("continue;", "", r"plant 'lost' .*'continue;' is there 3 times"),
        ("return", "convt3d/none.cuh", r"plant 'lost' .*file='convt3d/none.cuh': is no header"),
    ],
)
def test_a_plant_that_no_longer_applies_is_named(old: str, file: str, says: str) -> None:
    plant = Plant("kind", "lost", "fprop_gather", "why", ((old, "x"),), file)
    with pytest.raises(FindingsError, match=says):
        planted(plant)
    with pytest.raises(FindingsError, match=says):
        judge_plants([plant])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no plant"),
        ("[[plant]\n", "cannot be read"),
        ('[[plant]]\nname = "one"\n', "'one': must have changes, idea, kernel, name"),
        (ENTRY.format("one", "a", "b") + 'more = "x"\n', "'one': must have"),
        (ENTRY.format("one", "a", "b") * 2, "name='one': is that of two plants"),
        ("plant = 3\n", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "kind.toml").write_text(text)
    with pytest.raises(FindingsError, match=says):
        plants(tmp_path)


def test_one_that_does_not_compile_says_nothing_of_the_check() -> None:
    plant = Plant("kind", "no C", "fprop_gather", "why", (("accum_t sum =", "accum_t sum = nothing +"),))
    with pytest.raises(FindingsError, match=r"(?s)plant 'no C'.*nothing"):
        judge(plant)


def test_one_that_is_let_through_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupy_convt3d.lab.mutants.plants.check", lambda *_, **__: CheckReport("k", "host", ("fp32",)))
    found = judge(PLANTS["a tap that does not divide times zero"])
    assert not found.caught and found.problem == ""
    assert "NOT CAUGHT fprop_gather (not a number): a tap" in summary([found])
    table = page(list(PLANTS.values()), [found])
    assert "| not a number | 1 | 0 |  |  |" in table and "A mask in place of `continue`" in table


def test_judgements_are_kept_in_a_file(tmp_path: Path) -> None:
    path, both = tmp_path / "docs" / "scores.json", list(PLANTS.values())[:2]
    made = [Judgement(plant.kind, plant.name, plant.kernel, True, 1.0, "p", "fp32", "exact", "wrong") for plant in both]
    assert kept(path) == []
    keep(path, both, made[1:])
    keep(path, both, made[:1])
    assert kept(path) == made
    keep(path, both[:1], [])
    assert kept(path) == made[:1]
    path.write_text(path.read_text().replace('"caught":true', '"caught": 1'))
    with pytest.raises(DataError, match="number 0: caught"):
        kept(path)


def test_the_kept_judgements_are_of_these_plants() -> None:
    for found in kept(SCORES):
        plant = PLANTS.get(found.name)
        assert plant is not None and (plant.kind, plant.kernel) == (found.kind, found.kernel), "run `make plants`"


@pytest.mark.skipif(not SCORES.exists(), reason="the sdist has no docs")
def test_every_plant_is_judged_and_hardly_any_is_let_through() -> None:
    judged = kept(SCORES)
    assert {found.name for found in judged} == set(PLANTS), "run `make plants`"
    assert sum(found.caught for found in judged) >= LEAST_CAUGHT * len(judged)
    assert statistics.median(found.elapsed_s for found in judged) < 10
    assert all(found.message and found.problem for found in judged if found.caught)
    elsewhere = [found for found in judged if found.message.startswith("/") or " /home" in found.message]
    assert not elsewhere, "files are named from the package on"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "geometry.toml").write_text(ENTRY.format("signs", "epilogue.start(o.c)", "-epilogue.start(o.c)"))
    line = ["mutants", "--plants", str(tmp_path), "--workers", "1", "--scores", str(tmp_path / "scores.json")]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert "geometry 1 1" in out and "fprop_gather (geometry): signs; n1_c1to1_i1_k1_bias" in out
    assert [found.caught for found in kept(tmp_path / "scores.json")] == [True]
    assert cli.main([*line, "fprop_tiled"]) == 2
    assert cli.main([*line, "--kept-only"]) == 2


@pytest.mark.slow
def test_a_sample_is_caught() -> None:
    for name, says in PINNED.items():
        found = judge(PLANTS[name])
        assert found.caught and re.search(says, found.message), f"{name}: {found}"
        assert found.problem
