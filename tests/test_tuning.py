"""The tuning database and the search that fills it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from cupy_convt3d import cli, registry, tuning
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.errors import CacheWarning, KernelError
from cupy_convt3d.kernel import Kernel
from cupy_convt3d.lab import tune as search
from cupy_convt3d.lab.bench.contest import Contest
from cupy_convt3d.lab.bench.measure import Bench, Row
from cupy_convt3d.lab.tune import tune
from cupy_convt3d.problem import Problem
from cupy_convt3d.source import code_digest
from cupy_convt3d.tuning import Database, Entry, Question, configured, lookup, stale

PROBLEM = Problem(2, 8, 8, 6, 3, 2, 1)
QUESTION = Question("GPU Z", "fprop", "tf32", "ncdhw")
# Quick with TILE = 8 and wrong with TILE = 16; a compiler refuses TILE = 24.
TILED = """/* convt3d
pass = "fprop"
dtypes = ["fp32"]
[search]
TILE = [4, 8, 16, 24]
[[launch]]
grid = "ceil_div(output_numel, 64)"
block = 64
*/
#include "convt3d.cuh"
#ifndef TILE
#define TILE 4
#endif
static_assert(TILE != 24, "no");
extern "C" __global__ void tiled(float* output, long long output_numel) {
  const long long i = blockIdx.x * 64LL + threadIdx.x;
  if (i < output_numel) output[i] = TILE == 16 ? 1.0f : 0.0f;
}
"""


def entry(kernel: str = "fprop_tiled", problem: Problem = PROBLEM, **changes: Any) -> Entry:
    made = Entry(
        *(*QUESTION[:2], str(problem), *QUESTION[2:]), kernel, code_digest(registry.kernel(kernel)), "fp32", {}, 2.0, 3.0
    )
    return replace(made, **{"tunables": dict(registry.kernel(kernel).tunables), **changes})


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's database, and none that is shipped."""
    monkeypatch.setenv("CONVT3D_TUNING", str(tmp_path / "own.json"))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped.json")
    return tmp_path / "own.json"


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    entries = [entry(), entry("fprop_gather"), entry(problem=Problem(1, 1, 1, 3, 3)), entry(layout="channels_last")]
    Database(entries).save(tmp_path / "sub" / "t.json")
    loaded = Database.load(tmp_path / "sub" / "t.json")
    assert all(saved in loaded.entries() for saved in entries) and len(loaded.entries()) == len(entries)
    assert len((tmp_path / "sub" / "t.json").read_text().splitlines()) == len(entries) + 2, "an entry a line"
    assert Database.load(tmp_path / "nothing.json").entries() == []


def test_a_new_measurement_takes_the_place_of_the_old() -> None:
    database = Database([entry(), entry(median_ms=1.0)])
    assert [e.median_ms for e in database.entries(QUESTION)] == [1.0]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99, "entries": []}', '{"format": 1, "entries": [{"kernel": 1}]}'])
def test_a_damaged_file_is_ignored_with_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.warns(CacheWarning, match="was ignored"):
        assert Database.load(tmp_path / "t.json").entries() == []


def test_the_shipped_database_is_whole() -> None:
    shipped = json.loads(tuning.SHIPPED.read_text())
    assert shipped["format"] == tuning.FORMAT
    entries = Database.load(tuning.SHIPPED).entries()
    assert len(entries) == len(shipped["entries"])
    assert stale(entries) == 0, "tune the kernels that have changed again (`convt3d tune --known-only`), or remove their entries"


def test_lookup_takes_the_quickest_that_can(own: Path) -> None:
    assert lookup(QUESTION, PROBLEM) is None
    quick = entry(median_ms=1.0, with_packing_ms=4.0, tunables={**registry.kernel("fprop_tiled").tunables, "TILE_DEPTH": 16})
    Database([quick, entry("fprop_gather", median_ms=0.5)]).save(own)
    gather = lookup(QUESTION, PROBLEM)
    assert gather is not None and gather.kernel.name == "fprop_gather" and gather.instance == "fp32"
    Database([quick, entry("fprop_gather")]).save(own)  # is read again
    found = lookup(QUESTION, PROBLEM, packed=True)
    assert found is not None and (found.kernel.name, found.elapsed_ms) == ("fprop_tiled", 1.0)
    assert found.kernel.tunables["TILE_DEPTH"] == 16
    assert lookup(QUESTION, PROBLEM, packed=True).kernel is found.kernel, "backends know what they compiled by the object"
    packing = lookup(QUESTION, PROBLEM)
    assert packing is not None and (packing.kernel.name, packing.elapsed_ms) == ("fprop_gather", 3.0)
    for other in (QUESTION._replace(device="GPU Y"), QUESTION._replace(layout="channels_last"), QUESTION._replace(precision="fp32")):
        assert lookup(other, PROBLEM) is None


def test_lookup_leaves_out_what_cannot_or_may_not(own: Path) -> None:
    base = registry.kernel("fprop_gather")
    loose = replace(base, deterministic=False)
    narrow = replace(base, architectures=("sm_90a",))
    refusing = replace(base, restrictions={"stride_d == 1": "stride 1 only"})
    Database([entry("fprop_gather", instance="fp32")]).save(own)
    for kernel, options in ((loose, {}), (narrow, {"arch": "sm_80"}), (refusing, {})):
        digest = code_digest(kernel)
        Database([entry("fprop_gather", instance="fp32", digest=digest)]).save(own)
        assert lookup(QUESTION, PROBLEM, kernels={kernel.name: kernel}, **options) is None
    assert lookup(QUESTION, PROBLEM, kernels={refusing.name: refusing}) is None
    Database([entry("fprop_gather", digest=code_digest(loose))]).save(own)
    assert lookup(QUESTION, PROBLEM, kernels={loose.name: loose}, deterministic=False) is not None


def test_an_entry_of_other_code_does_not_count(own: Path) -> None:
    Database([entry(digest="0" * 16), entry(kernel="fprop_gather", digest="1" * 16)]).save(own)
    assert lookup(QUESTION, PROBLEM) is None
    assert stale(Database.load(own).entries()) == 2 and stale([entry()]) == 0
    assert Database([entry(digest="0" * 16)]).find(QUESTION, PROBLEM, registry.kernel("fprop_tiled")) is None


def test_a_measurement_is_of_its_very_problem(own: Path) -> None:
    near = replace(PROBLEM, batch=4)
    Database([entry(problem=near)]).save(own)
    assert lookup(QUESTION, PROBLEM) is None
    found = lookup(QUESTION, near)
    assert found is not None and found.kernel.name == "fprop_tiled"


def test_the_users_and_the_shipped_results_count_together(own: Path) -> None:
    Database([entry("fprop_gather")]).save(tuning.SHIPPED)
    assert lookup(QUESTION, PROBLEM).kernel.name == "fprop_gather"
    Database([entry(median_ms=0.1)]).save(own)
    assert lookup(QUESTION, PROBLEM).kernel.name == "fprop_tiled"


def test_the_digest_is_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    source = registry.kernel("fprop_tiled").source
    digest = code_digest(registry.kernel("fprop_tiled"))

    def of(text: str) -> str:
        return code_digest(Kernel.from_source(text, "other_name"))

    assert of(source) == digest == of(source.replace("// blockIdx.x =", "//   and now blockIdx.x =")) == of(source + "\n\n")
    assert of(source.replace("TILE_DEPTH 8", "TILE_DEPTH 16")) != digest
    assert of(source.replace('grid = "batch', 'grid = "2 * batch')) != digest, "the declaration counts, though it is a comment"
    assert of(source.replace("[[launch]]", "[[launch]]\nshared_bytes = 0", 1)) == digest, "what is said and left out is the same"
    assert of(source + 'void f() { asm("mov; // no comment"); }') != of(source + 'void f() { asm("mov; // another"); }')
    shutil.copytree(registry.kernel("fprop_tiled").path.parent, tmp_path / "k")  # type: ignore[union-attr]
    monkeypatch.setenv("CONVT3D_KERNELS", str(tmp_path / "k"))
    assert of(source) == digest
    with (tmp_path / "k/include/convt3d/host/fiber.h").open("a") as file:
        file.write("\nint of_the_host;\n")
    assert of(source) == digest, "a GPU runs none of it"
    with (tmp_path / "k/include/convt3d/core/view.cuh").open("a") as file:
        file.write("\nint of_the_device();\n")
    assert of(source) != digest


def test_a_search_table_is_checked() -> None:
    assert Kernel.from_source(TILED).search == {"TILE": (4, 8, 16, 24)}
    for old, new, words in (
        ("TILE = [4, 8, 16, 24]", "TILES = [4]", "search: \\['TILES'\\] are no tunables"),
        ("TILE = [4, 8, 16, 24]", 'TILE = ["4"]', "must be a table of tunable"),
        ("TILE = [4, 8, 16, 24]", "TILE = []", "must be a table of tunable"),
    ):
        with pytest.raises(KernelError, match=words):
            Kernel.from_source(TILED.replace(old, new))


def test_configurations_are_one_object_each() -> None:
    kernel = registry.kernel("fprop_tiled")
    same = tuple(sorted(kernel.tunables.items()))
    other = tuple(sorted({**kernel.tunables, "TILE_DEPTH": 4}.items()))
    assert configured(kernel, same) is kernel
    assert configured(kernel, other) is configured(kernel, other) is not kernel


class FakeContest(Contest):
    """Gives each configuration a time of its own; TILE = 16 is quickest and wrong."""

    timed: list[str]

    def kernel(self, kernel: Kernel, instance: str | None = None) -> Row:
        row = super().kernel(kernel, instance)
        type(self).timed.append(f"{kernel.name} {kernel.tunables.get('TILE')}")
        if row.median_ms is None:
            return row
        elapsed_ms = {4: 3.0, 8: 2.0, 16: 1.0}.get(kernel.tunables.get("TILE", 0), 2.5)
        wrong = kernel.tunables.get("TILE") == 16
        return replace(row, median_ms=elapsed_ms, with_packing_ms=elapsed_ms, error=float(wrong), difference=0.0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeContest]:
    FakeContest.timed = []
    monkeypatch.setattr(search, "Contest", FakeContest)
    return FakeContest


def test_tuning_keeps_the_quickest_right_configuration_and_goes_on_where_it_ended(tmp_path: Path, fake: type[FakeContest]) -> None:
    bench, path = Bench(HostBackend(), budget_ms=1.0), tmp_path / "t.json"
    kernels = {"tiled": Kernel.from_source(TILED, "tiled"), "fprop_gather": registry.kernel("fprop_gather")}
    problems = {"small": Problem(1, 1, 2, 2, 2)}
    told: list[str] = []
    tune(bench, problems, kernels, path, tell=told.append)
    entries = {e.kernel: e for e in Database.load(path).entries()}
    assert entries["tiled"].tunables == {"TILE": 8} and entries["tiled"].median_ms == 2.0
    assert entries["fprop_gather"].median_ms == 2.5 and entries["tiled"].device == bench.backend.capabilities()["device"]
    assert sorted(fake.timed) == ["fprop_gather None", "tiled 16", "tiled 24", "tiled 4", "tiled 8"]
    assert any("tiled [fp32] 2 ms (4 tried; default 3 ms): TILE=8" in line for line in told)

    fake.timed.clear()
    tune(bench, problems, kernels, path, tell=told.append)
    assert fake.timed == [], "all of it is in the file"
    tune(bench, problems | {"new": Problem(1, 1, 2, 3, 2)}, kernels, path, tell=told.append, layouts=("ncdhw", "channels_last"))
    assert len(Database.load(path).entries()) == 6, "a pointer kernel takes no channels_last"
    fake.timed.clear()
    changed = replace(Kernel.from_source(TILED.replace("1.0f : 0.0f", "2.0f : 0.0f"), "tiled"), search={})
    tune(bench, problems, kernels | {"tiled": changed}, path, tell=told.append)
    assert fake.timed == ["tiled 4"], "only the kernel whose code is new"
    fake.timed.clear()
    tune(bench, problems, kernels, path, tell=told.append, again=True)
    assert len(fake.timed) == 5


def test_a_search_begins_at_what_is_known_of_other_devices(tmp_path: Path, fake: type[FakeContest]) -> None:
    path, problem = tmp_path / "t.json", Problem(1, 1, 2, 2, 2)
    tiled = Kernel.from_source(TILED, "tiled")

    def elsewhere(device: str, instance: str, **tunables: int) -> Entry:
        return Entry(device, "fprop", str(problem), instance, "ncdhw", "tiled", "an older one", instance, tunables, 1.0, 1.0)

    Database([elsewhere("one", "fp32", TILE=8, GONE=1), elsewhere("two", "tf32", TILE=5), elsewhere("three", "fp16", TILE=24)]).save(path)
    bench, told = Bench(HostBackend(), budget_ms=1.0), list[str]()
    tune(bench, {"small": problem}, {"tiled": tiled}, path, tell=told.append, known_only=True)
    assert fake.timed == ["tiled 4", "tiled 8"], "5 is no value of TILE any more, fp16 has another size"
    assert "tiled [fp32] 2 ms (2 tried; default 3 ms): TILE=8" in told[0]
    fake.timed.clear()
    tune(bench, {"small": problem}, {"tiled": tiled}, path, tell=told.append, again=True)
    assert fake.timed == ["tiled 4", "tiled 8", "tiled 16", "tiled 24"], "the search goes on from there"


def test_a_kernel_far_behind_is_not_searched(tmp_path: Path, fake: type[FakeContest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "HOPELESS", 1.1)
    kernels = {"tiled": Kernel.from_source(TILED, "tiled"), "fprop_gather": registry.kernel("fprop_gather")}
    tune(Bench(HostBackend(), budget_ms=1.0), {"small": Problem(1, 1, 1, 2, 2)}, kernels, tmp_path / "t.json", tell=lambda _: None)
    assert sorted(fake.timed) == ["fprop_gather None", "tiled 4"]


def test_a_large_space_is_searched_one_tunable_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "EXHAUSTIVE", 3)
    kernel = replace(registry.kernel("fprop_tiled"), search={"TILE_DEPTH": (4, 8), "TILE_CHANNELS": (16, 32)})
    rounds = search._rounds(kernel)
    assert next(rounds) == [{"TILE_DEPTH": 4}, {"TILE_DEPTH": 8}]
    assert rounds.send(True) == [{"TILE_CHANNELS": 16}, {"TILE_CHANNELS": 32}]
    assert rounds.send(False) == [{"TILE_DEPTH": 4}, {"TILE_DEPTH": 8}]
    with pytest.raises(StopIteration):
        rounds.send(False)


def test_the_command_and_what_finds_its_result(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "n1_c4to4_i3_k2_s2"
    flags = ["--backend", "host", "--problem", name, "--kernels", "fprop_gather,fprop_residue", "--precision", "tf32"]
    assert cli.main(["tune", *flags]) == 0
    assert f"Written: {own}" in capsys.readouterr().out
    device = HostBackend().capabilities()["device"]
    found = lookup(Question(device, "fprop", "tf32", "ncdhw"), Problem.parse(name))
    assert found is not None and found.instance == "fp32"
    assert cli.main(["tune", *flags[:-4], "--kernels", "auto"]) == 2
    assert "--kernels auto" in capsys.readouterr().err


def test_info_counts_the_entries(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Database([entry(), entry("fprop_gather", digest="0" * 16)]).save(own)
    assert cli.main(["info"]) == 0
    assert f"2 entries in {own}, 1 of them of code that has changed" in capsys.readouterr().out


def test_entries_are_plain_json() -> None:
    assert Entry(**json.loads(json.dumps(asdict(entry())))) == entry()


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    from cupy_convt3d.lab.bench.provenance import backend_named

    bench, path = Bench(backend_named("cuda"), budget_ms=1.0), tmp_path / "t.json"
    kernels, problem = {"wgrad_reduce": registry.kernel("wgrad_reduce")}, Problem(2, 16, 16, 16, 3, 2, 1)
    told: list[str] = []
    tune(bench, {"small": problem}, kernels, path, passes=("wgrad",), precisions=("tf32", "bf16"), tell=told.append)
    instances = {(e.kernel, e.instance) for e in Database.load(path).entries()}
    assert instances == {("wgrad_reduce", "fp32"), ("wgrad_reduce", "bf16"), ("library", "tf32"), ("library", "bf16")}
    assert ["(6 tried" in line for line in told] == [False, True] * 2, told
