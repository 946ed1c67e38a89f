"""What is predicted: coefficients found again from planted ones, the smallest prediction taken, files that are refused."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_choice import WIDE, card, given, on

import cupy_convt3d as ct
from cupy_convt3d import cli, cost, registry, tuning
from cupy_convt3d.arrays import TorchLibrary
from cupy_convt3d.backends.host import HostBackend
from cupy_convt3d.choice import candidates, choose, decide
from cupy_convt3d.cost import Card, CardCosts, Coefficients, Costs, KernelCost, LibraryCost, LibraryCosts, Trees
from cupy_convt3d.errors import CacheWarning, DataError
from cupy_convt3d.kernel import Kernel, Limits
from cupy_convt3d.lab.bench.measure import Bench
from cupy_convt3d.lab.calibrate import Sample, Sweep, calibrate, fit, held_out, joined, sweep
from cupy_convt3d.lab.population import population
from cupy_convt3d.problem import LAYOUTS, Problem
from cupy_convt3d.source import code_digest
from cupy_convt3d.tuning import Question

CARD = Card("GPU sm_90a", "sm_90a", 132, 2e9, 3e12, 2.5e12, {"fp32": 5e13, "tf32": 4e14, "tf32x3": 1.3e14, "bf16": 8e14})
QUESTION = Question("GPU sm_90a", "fprop", "fp32", "ncdhw")
LIMITS = Limits(227 << 10, 132)
MINE = (
    '/* convt3d\npass = "fprop"\ndtypes = ["fp32"]\n{cost}[[launch]]\ngrid = "ceil_div(output_numel, 128)"\nblock = 128\n*/\n'
)
BODY = "__global__ void mine(const float* input, const float* weight, const float* bias, float* output, Problem problem) {}\n"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Costs of our own, none at first, and nothing that ships."""
    monkeypatch.setenv("CONVT3D_TUNING", str(tmp_path / "own.json"))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path / "shipped.json")
    monkeypatch.setattr(cost, "SHIPPED", tmp_path / "shipped_costs.json")
    monkeypatch.setattr(registry, "_own", {})
    yield tmp_path / "costs.json"


def planted(kernel: str, call: float, instance: str = "fp32", **offsets: float) -> KernelCost:
    """A kernel that takes `call` x 3 us, whatever it does; `offsets` name one or two values of its first listed tunable, the smaller first,
    and the logarithm by which the time then differs."""
    search = next(iter(registry.kernel(kernel).search), "")
    values = [int(value[1:]) for value in offsets]
    low, high = (*offsets.values(), 0.0)[0], (*offsets.values(), 0.0)[len(offsets) > 1]
    trees = stump(f"tunables.{search}", values[-1] - 0.5, low, high) if offsets else Trees()
    return KernelCost(kernel, instance, Coefficients({"call": call}, trees), tuple({search: value} for value in values) or ({},))


def stump(trait: str, threshold: float, left: float, right: float) -> Trees:
    """One tree that looks at one trait, in its root."""
    leaves = [round(1000 * left)] * 4 + [round(1000 * right)] * 4
    return Trees((trait,), (0,) * 7, (threshold, *([0.0] * 6)), tuple(leaves))


def library(call: float, low: float = 1.0, precision: str = "fp32", pass_name: str = "fprop") -> LibraryCosts:
    """torch's operator at `call` x 3 us, and at `low` of it if it is quick: what was timed lies far from all layers."""
    cost_of = LibraryCost(pass_name, precision, "ncdhw", {"call": call}, {"batch": 1e-6}, 0.5, 0.5, math.log(low), (call * cost.CALL_MS,))
    return LibraryCosts((CARD,), (str(Problem(999, 1, 1, 1, 1)),), (0,), (cost_of,))


def mine(declared: str = "") -> Kernel:
    return Kernel.from_source(MINE.replace("{cost}", declared) + BODY, "fprop_mine")


def test_the_smallest_prediction_is_taken_with_its_tunables(own: Path) -> None:
    Costs((CardCosts(CARD, (planted("fprop_gather", 4), planted("fprop_tiled", 3, _64=0.5, _256=-0.5))),)).save(own)
    found = choose(on("sm_90a"), "fprop", WIDE, "fp32")
    assert found.kernel is not None and found.kernel.name == "fprop_tiled" and found.kernel.tunables["TILE_VOXELS"] == 256
    first, second, *rest = found.candidates
    assert (first.kernel, first.instance, first.swept) == (found.kernel, "fp32", True)
    assert first.ms == pytest.approx(3 * cost.CALL_MS * math.exp(-0.5)) and second.ms == pytest.approx(4 * cost.CALL_MS)
    assert second.kernel.name == "fprop_gather" and not any(one.swept for one in rest) and rest
    assert len({one.kernel.name for one in found.candidates}) == len(found.candidates), "of distinct kernels"
    Costs((CardCosts(CARD, (planted("fprop_gather", 1), planted("fprop_tiled", 3))),)).save(own)
    assert choose(on("sm_90a"), "fprop", WIDE, "fp32").kernel is registry.kernel("fprop_gather"), "the file is read again"


def test_candidates_are_what_a_trial_is_asked_for(own: Path) -> None:
    Costs((CardCosts(CARD, (planted("fprop_gather", 4), planted("fprop_tiled", 3))),)).save(own)
    asked = candidates(QUESTION, WIDE, False, "sm_90a", LIMITS)
    assert [one.kernel.name for one in asked[:2]] == ["fprop_tiled", "fprop_gather"]
    assert [one.ms for one in asked] == sorted(one.ms or 0.0 for one in asked)
    assert all(one.kernel.deterministic and one.kernel.why_not(WIDE, one.instance, "sm_90a", LIMITS) is None for one in asked)
    on_host = candidates(QUESTION, WIDE, False, None, None)
    assert [one.kernel.name for one in on_host] == ["fprop_implicit_gemm_simt", "fprop_tiled", "fprop_residue", "fprop_gather"]
    assert {one.ms for one in on_host} == {None}, "nothing is predicted on a CPU"
    own.unlink()
    assert [one.kernel.name for one in candidates(QUESTION, WIDE, False, "sm_90a", LIMITS)] == [
        one.kernel.name for one in on_host
    ]


def test_a_configuration_that_spreads_nan_is_no_candidate(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.parse("n4_c32to32_i8x16x32_k3_s2_p1_g4")
    quicker_merged = Coefficients({"call": 1.0}, stump("tunables.MERGE_GROUPS", 0.5, 0.0, -1.0))
    known = KernelCost("fprop_stationary_wgmma", "bf16", quicker_merged, ({"MERGE_GROUPS": 1}, {"MERGE_GROUPS": 0}))
    Costs((CardCosts(CARD, (known,)),)).save(own)
    found = choose(on("sm_90a"), "fprop", problem, "bf16").kernel
    assert found is not None and (found.name, found.tunables["MERGE_GROUPS"]) == ("fprop_stationary_wgmma", 1)
    monkeypatch.setattr(Kernel, "why_spreads_nan", lambda self, *_: "so" if self.tunables.get("MERGE_GROUPS") else None)
    Costs((CardCosts(replace(CARD, multiprocessors=CARD.multiprocessors + 1), (known,)),)).save(own)  # else the choice is kept
    found = choose(on("sm_90a"), "fprop", problem, "bf16").kernel
    assert found is not None and (found.name, found.tunables["MERGE_GROUPS"]) == ("fprop_stationary_wgmma", 0)


@pytest.mark.parametrize(("call", "low", "left"), [(2.0, 0.6, False), (2.0, 0.4, True), (0.9, 1.0, True)])
def test_torchs_tensors_get_a_kernel_that_beats_a_quick_call_of_torchs(
    call: float, low: float, left: bool, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("cupy_convt3d.choice.backend_for", lambda *_: on("sm_90a"))
    Costs((CardCosts(CARD, (planted("fprop_tiled", 1.0),), library(call, low)),)).save(own)

    def kernel() -> Kernel | None:
        return decide("fprop", WIDE, given(TorchLibrary(), "cuda"), "auto", "ieee", None).kernel

    assert (kernel() is None) == left
    found = choose(on("sm_90a"), "fprop", WIDE, "fp32")
    assert found.library == pytest.approx((call * cost.CALL_MS, call * low * cost.CALL_MS), rel=1e-4)
    for arch in ("sm_80", "sm_120"):
        assert choose(on(arch), "fprop", WIDE, "fp32").left_to_torch, "no card of that architecture was swept"


def test_a_users_kernel_takes_part(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = [planted(name, 1e5) for name, kernel in registry.kernels("fprop").items() if "fp32" in kernel.dtypes]
    Costs((CardCosts(CARD, tuple(slow), library(1e5)),)).save(own)
    registry.register(mine())
    found = choose(on("sm_90a"), "fprop", WIDE, "fp32")
    assert found.kernel is registry.kernel("fprop_mine") and not found.candidates[0].swept
    assert "no measurement of this kernel" in (found.left_to_torch or "")
    guessed = found.candidates[0].ms
    registry.register(mine('[cost]\nsteps = "in_channels * taps"\nproducts = "128"\n'), replace=True)
    declared = choose(on("sm_90a"), "fprop", WIDE, "fp32").candidates[0].ms
    assert guessed is not None and declared is not None and declared < guessed, "its own words make it less of a guess"
    Costs(
        (
            CardCosts(
                CARD,
                (*slow, KernelCost("fprop_mine", "fp32", Coefficients({"call": 1.0}), ({},))),
                library(9.0),
            ),
        )
    ).save(own)
    found = choose(on("sm_90a"), "fprop", WIDE, "fp32")
    assert found.kernel is registry.kernel("fprop_mine") and found.left_to_torch is None


def test_a_guess_does_not_hide_a_kernel_that_beats_torch(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("cupy_convt3d.choice.backend_for", lambda *_: on("sm_90a"))
    Costs((CardCosts(CARD, (planted("fprop_tiled", 1e4),), library(1e6)),)).save(own)
    registry.register(mine('[cost]\nsteps = "1"\nproducts = "1"\n'))
    found = choose(on("sm_90a"), "fprop", WIDE, "fp32")
    assert found.kernel is registry.kernel("fprop_mine") and not found.candidates[0].swept
    assert "no measurement of this kernel" in (found.left_to_torch or "")
    taken = decide("fprop", WIDE, given(TorchLibrary(), "cuda"), "auto", "ieee", None).kernel
    assert taken is registry.kernel("fprop_tiled"), "which was swept, and takes a hundredth of torch's time"
    assert found.for_torch.for_torch == found.for_torch


def test_the_users_costs_come_before_those_that_ship(own: Path) -> None:
    Costs((CardCosts(CARD, (planted("fprop_tiled", 1.0), planted("fprop_gather", 2.0))),)).save(cost.SHIPPED)
    assert choose(on("sm_90a"), "fprop", WIDE, "fp32").kernel is registry.kernel("fprop_tiled")
    Costs((CardCosts(CARD, (planted("fprop_tiled", 3.0),)),)).save(own)
    found = choose(on("sm_90a"), "fprop", WIDE, "fp32")
    assert [(one.kernel.name, one.ms) for one in found.candidates[:2]] == [
        ("fprop_gather", 0.006),
        ("fprop_tiled", pytest.approx(0.009)),
    ]


def test_a_measurement_comes_before_a_prediction(own: Path) -> None:
    from test_choice import entry

    Costs((CardCosts(CARD, (planted("fprop_tiled", 1.0),)),)).save(own)
    tuning.Database([entry("fprop_residue", precision="fp32")]).save(own.with_name("own.json"))
    found = choose(on("sm_90a"), "fprop", WIDE, "fp32")
    assert found.kernel is registry.kernel("fprop_residue") and found.tuned is not None and not found.candidates


def test_terms_follow_the_card() -> None:
    """Twice the multiprocessors, half the clock and three times the bandwidth."""
    kernel = registry.kernel("fprop_gather")
    terms = cost.kernel_terms(kernel, WIDE, "fp32", "ncdhw", CARD, False)
    other = cost.kernel_terms(kernel, WIDE, "fp32", "ncdhw", CARD.scaled(Limits(0, 264, 1e9, 9e12)), False)
    assert other["flop"] == pytest.approx(terms["flop"]) and other["output"] == pytest.approx(terms["output"] / 3)
    assert other["call"] == terms["call"], "a launch takes as long on any card"
    unknown = CARD.scaled(Limits(0, 264))
    assert unknown.copy_bytes_per_s == pytest.approx(2 * CARD.copy_bytes_per_s), (
        "what the driver does not tell goes with their number"
    )
    assert unknown.gemm_flop_per_s["fp32"] == pytest.approx(2 * CARD.gemm_flop_per_s["fp32"])
    assert CARD.scaled(None) is CARD
    library_ms = [cost.library_terms("fprop", WIDE, "fp32", "ncdhw", one)["flop"] for one in (CARD, unknown)]
    assert library_ms[1] == pytest.approx(library_ms[0] / 2)


def test_a_card_that_was_not_swept_takes_the_costs_of_its_kind(own: Path) -> None:
    ampere = replace(CARD, device="an A100", arch="sm_80")
    Costs(
        (
            CardCosts(ampere, (planted("fprop_tiled", 1.0),)),
            CardCosts(replace(CARD, device="an H100"), (planted("fprop_gather", 1.0),)),
        )
    ).save(own)
    known = cost.known()
    assert (
        known.near("an H200", "sm_90a") == [1, 0]
        and known.near("an A100", "sm_80") == [0, 1]
        and known.near("an H100", "sm_80") == [1, 0]
    )


def test_packing_is_in_the_time_unless_the_packed_weight_is_kept() -> None:
    kernel = registry.kernel("fprop_rolling_wgmma")
    packed, packing = (cost.kernel_terms(kernel, WIDE, "tf32", "ncdhw", CARD, kept) for kept in (True, False))
    assert packed["packing"] == 0 < packing["packing"] and packed["launches"] < packing["launches"]
    assert packed["products"] == packing["products"] > 0


def test_every_term_and_trait_is_known_by_its_name() -> None:
    for name, kernel in registry.kernels().items():
        dtype = kernel.dtypes[0]
        problem = next(
            one
            for one in (WIDE, Problem(2, 64, 64, 16, 2, 2), Problem(1, 8, 8, 8, 3, groups=8))
            if kernel.why_not(one, dtype) is None
        )
        terms = cost.kernel_terms(kernel, problem, dtype, "channels_last", CARD, False)
        assert set(terms) == cost.TERMS["kernel"] and all(0 <= value < 1e3 for value in terms.values()), name
        traits = cost.kernel_traits(kernel, problem, dtype, "ncdhw", terms)
        assert {one for one in traits if not one.startswith("tunables.")} == cost.TRAITS["kernel"]
        assert {f"tunables.{one}" for one in kernel.search} <= set(traits)
    for pass_name in ("fprop", "dgrad", "wgrad"):
        terms = cost.library_terms(pass_name, WIDE, "bf16", "ncdhw", CARD)
        assert set(terms) == cost.TERMS["library"]
        assert set(cost.library_traits(WIDE, "bf16", "ncdhw", terms)) == cost.TRAITS["library"]


def planted_sweep(noise: float = 0.0, count: int = 30) -> Sweep:
    """What two kernels and torch's operator would take on drawn layers by these coefficients."""
    generator, samples = np.random.default_rng(0), []
    for layer in population(3, count):
        for layout in LAYOUTS:

            def add(kernel: str, instance: str, ms: float, tunables: dict[str, int], where: tuple[str, str]) -> None:
                ms *= math.exp(noise * generator.standard_normal())
                samples.append(Sample("fprop", *where, kernel, instance, tunables, ms, ms))

            where = (str(layer.problem), layout)
            for name, slope, depth in (("fprop_gather", 40.0, 3.0), ("fprop_tiled", 4.0, 2.0)):
                kernel = registry.kernel(name)
                terms = cost.kernel_terms(kernel, layer.problem, "fp32", layout, CARD, False)
                ms = 2 * terms["call"] + slope * terms["products"] + depth * terms["output"]
                add(name, "fp32", ms, {key: kernel.tunables[key] for key in kernel.search}, where)
            terms = cost.library_terms("fprop", layer.problem, "fp32", layout, CARD)
            add("library", "fp32", 3 * terms["call"] + 2 * terms["flop"] + 5 * terms["input"], {}, where)
    return Sweep(CARD, tuple(samples))


def test_fitting_finds_planted_coefficients() -> None:
    data = planted_sweep(count=40)
    found = fit([data], registry.kernels("fprop"))
    assert len(found.library.questions) == 2
    for one in found.library.questions:
        assert [one.terms[name] for name in ("call", "flop", "input")] == pytest.approx([3, 2, 5], rel=0.02)
        assert sum(one.terms.values()) == pytest.approx(10, rel=0.02), "and no others"
    assert {one.kernel for one in found.kernels} == {"fprop_gather", "fprop_tiled"}
    for held in held_out([data], registry.kernels("fprop"), found):
        assert held.layers == 40 and held.regret < 1.01 and held.losses == 0


def test_a_kernels_time_is_found_though_its_terms_go_together() -> None:
    """What a block multiplies and its steps are in proportion here, so any share of either explains the time."""
    data = planted_sweep()
    Costs((fit([data], registry.kernels("fprop")),)).save(cost.user_path())
    for sample in data.samples[::7]:
        if sample.kernel != "library":
            question = QUESTION._replace(layout=sample.layout)
            kernel, problem = registry.kernel(sample.kernel), Problem.parse(sample.problem)
            (found,) = cost.known().predictions(kernel, problem, "fp32", question, False, "sm_90a", None)
            assert found.ms == pytest.approx(sample.ms, rel=0.1) and found.swept


def test_trees_learn_what_no_term_says() -> None:
    """A configuration that takes twice as long where channels are many, and half as long where they are few."""
    data = planted_sweep(count=60)

    def ms(sample: Sample) -> float:
        if sample.tunables.get("TILE_VOXELS") != 256:
            return sample.ms
        return sample.ms * (2.0 if Problem.parse(sample.problem).in_channels > 64 else 0.5)

    both = [
        replace(one, tunables={**one.tunables, "TILE_VOXELS": value}) if one.kernel == "fprop_tiled" else one
        for one in data.samples
        for value in ((64, 256) if one.kernel == "fprop_tiled" else (0,))
    ]
    slowed = Sweep(CARD, tuple(replace(one, ms=ms(one)) for one in both))
    costs = Costs((fit([slowed], registry.kernels("fprop")),))
    kernel = registry.kernel("fprop_tiled")
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for layer in population(3, 60):
        predictions = costs.predictions(kernel, layer.problem, "fp32", QUESTION, False, "sm_90a", None)
        found = {one.kernel.tunables["TILE_VOXELS"]: one.ms for one in predictions}
        ratios[layer.problem.in_channels > 64].append(found[256] / found[64])
    many, few = (float(np.exp(np.log(ratios[side]).mean())) for side in (True, False))
    assert many > 1.5 and few < 0.75, "drawn towards one, as there are few layers"


@pytest.mark.parametrize(("factor", "kept"), [(2.0, 2), (1.01, 1)])
def test_a_second_configuration_is_kept_for_trials_where_nothing_tells_which_is_quicker(factor: float, kept: int) -> None:
    data, samples = planted_sweep(count=40), []
    generator = np.random.default_rng(1)
    for one in data.samples:
        if one.kernel == "fprop_tiled":
            slower = int(generator.integers(2))
            for side, value in enumerate((64, 256)):
                ms = one.ms * (factor if side == slower else 1.0)
                samples.append(replace(one, tunables={**one.tunables, "TILE_VOXELS": value}, ms=ms))
    (found,) = fit([Sweep(CARD, tuple(samples))], registry.kernels("fprop")).kernels
    assert len(found.configurations) == kept


def torch_ms(found: CardCosts, problem: Problem) -> tuple[float, float]:
    known = Costs((found,)).library_ms(QUESTION, problem, "sm_90a", None)
    assert known is not None
    return known


def test_noise_makes_torch_a_harder_rival() -> None:
    layer = next(iter(population(4, 1))).problem
    quick = [low / ms for ms, low in (torch_ms(fit([planted_sweep(noise)], {}), layer) for noise in (0.0, 0.5))]
    assert 0.1 < quick[1] < 0.7 < 0.9 < quick[0]


def test_torchs_operator_is_surer_where_it_was_timed() -> None:
    """Twice the time for dilated layers, which no term here says: seen of like layers, not of others."""
    data = planted_sweep()

    def ms(sample: Sample) -> float:
        return sample.ms * (4.0 if Problem.parse(sample.problem).kernel_size[2] > 3 else 1.0)

    found = fit([Sweep(CARD, tuple(replace(one, ms=ms(one)) for one in data.samples))], {})
    timed = [one for one in data.samples if one.kernel == "library" and one.layout == "ncdhw"]
    for sample in timed[::9]:
        predicted, low = torch_ms(found, Problem.parse(sample.problem))
        assert predicted == pytest.approx(ms(sample), rel=0.3) and low > 0.5 * predicted
    far = torch_ms(found, Problem(1, 4096, 4096, (1, 1, 400), (9, 9, 9), (3, 3, 3)))
    near = torch_ms(found, Problem.parse(timed[0].problem))
    assert far[1] / far[0] < near[1] / near[0], "of a layer that is like none"


def test_sweeps_of_one_card_are_one(own: Path) -> None:
    sample = Sample("fprop", str(WIDE), "ncdhw", "fprop_gather", "fp32", {}, 2.0, 2.0)
    one, other = Sweep(CARD, (sample,)), Sweep(CARD, (replace(sample, ms=1.0), replace(sample, layout="channels_last")))
    second = Sweep(replace(CARD, device="B"), (sample,))
    found = joined([one, second, other])
    assert [(one.card.device, len(one.samples)) for one in found] == [("GPU sm_90a", 2), ("B", 1)]
    assert [(one.layout, one.ms) for one in found[0].samples] == [("ncdhw", 1.0), ("channels_last", 2.0)]


def test_layers_of_another_card_help() -> None:
    """Twice the multiprocessors, half the time: terms are each card's own, so both say the same."""
    data, quick = planted_sweep(), CARD.scaled(Limits(0, 264, CARD.clock_hz, 2 * CARD.memory_bytes_per_s))
    half = [sample for sample in data.samples if sample.kernel == "library"]
    other = Sweep(replace(quick, device="B"), tuple(replace(one, ms=cost_on(quick, one)) for one in half))
    found = fit([data, other], {})
    assert found.card == CARD and {known.device for known in found.library.cards} == {"GPU sm_90a", "B"}
    for one in found.library.questions:
        assert [one.terms[name] for name in ("call", "flop", "input")] == pytest.approx([3, 2, 5], rel=0.02)


def cost_on(card: Card, sample: Sample) -> float:
    terms = cost.library_terms("fprop", Problem.parse(sample.problem), "fp32", sample.layout, card)
    return 3 * terms["call"] + 2 * terms["flop"] + 5 * terms["input"]


def test_a_kernel_can_be_calibrated_alone(own: Path) -> None:
    everything = planted_sweep()
    calibrate([everything], registry.kernels("fprop"), own)
    before = Costs.read(own).cards[0]
    assert [one.kernel for one in before.kernels] == ["fprop_gather", "fprop_tiled"]
    twice = replace(everything, samples=tuple(replace(one, ms=2 * one.ms) for one in everything.samples))
    calibrate([twice], {"fprop_tiled": registry.kernel("fprop_tiled")}, own, library=False)
    after = Costs.read(own).cards[0]
    assert after.kernels[0] == before.kernels[0] and after.library == before.library
    kernel, problem = registry.kernel("fprop_tiled"), Problem.parse(everything.samples[0].problem)
    old, new = (
        next(Costs((one,)).predictions(kernel, problem, "fp32", QUESTION, False, "sm_90a", None)).ms for one in (before, after)
    )
    assert new == pytest.approx(2 * old, rel=0.1)
    few = {problem for problem, _ in zip(dict.fromkeys(one.problem for one in everything.samples), range(10), strict=False)}
    small = fit([Sweep(CARD, tuple(one for one in everything.samples if one.problem in few))], registry.kernels("fprop"))
    assert len(small.kernels) == 2 and not small.library.questions, "ten layers tell too little of torch's operator"


def test_a_sweep_on_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str], own: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "sweep.json"
    kernels = [registry.kernel("fprop_gather"), registry.kernel("fprop_scatter")]
    found = sweep(
        Bench(HostBackend(), 5.0), kernels, file, seed=1, count=1, precisions=("fp32",), problems=[Problem(1, 2, 2, 3, 3)]
    )
    assert {(one.kernel, one.layout) for one in found.samples} == {
        (name, layout) for name in ("library", "fprop_gather") for layout in LAYOUTS
    }, "scatter is not deterministic"
    assert all(one.ms > 0 for one in found.samples)
    read = Sweep.read(file)
    assert [(one.kernel, one.tunables) for one in read.samples] == [(one.kernel, one.tunables) for one in found.samples]
    clock = iter(range(0, 10000, 100))
    cut = sweep(
        Bench(HostBackend(), 5.0), kernels, file, seed=1, count=1, minutes=1, clock=lambda: next(clock), problems=[WIDE]
    )
    assert cut.samples == (), "the time was over"
    alone = sweep(Bench(HostBackend(), 5.0), kernels, file, seed=1, count=1, problems=[Problem(1, 2, 2, 3, 3)], library=False)
    assert {one.kernel for one in alone.samples} == {"fprop_gather"}


def test_the_command_fits_and_says_how_well(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = planted_sweep()
    file = tmp_path / "planted.json"
    file.write_text(json.dumps({"format": 1, "card": asdict(CARD), "samples": [asdict(one) for one in data.samples]}))
    assert cli.main(["calibrate", str(file)]) == 0
    out = capsys.readouterr().out
    assert "GPU sm_90a: 2 instances of kernels, torch's operator in 2 cases" in out and f"Written: {own}" in out
    assert "fp32    ncdhw           30 layers  regret 1.0" in out
    assert cost.known().cards[0].card == CARD
    assert cli.main(["calibrate", str(tmp_path / "none.json")]) == 2
    file.write_text('{"format": 2}')
    assert cli.main(["calibrate", str(file)]) == 2 and "format=2: must be 1" in capsys.readouterr().err


def test_without_scikit_learn_the_command_says_so_before_it_measures(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setattr("cupy_convt3d.lab.calibrate.sweep", lambda *_, **__: pytest.fail("measured"))
    assert cli.main(["calibrate", "--backend", "host"]) == 2
    said = capsys.readouterr().err
    assert "convt3d calibrate needs sklearn" in said and "cupy-convt3d[calibrate]" in said and not own.exists()


def test_info_says_why(own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from test_choice import entry

    monkeypatch.setattr("cupy_convt3d.lab.bench.provenance.backend_named", lambda _: card("sm_90a"))
    Costs((CardCosts(CARD, (planted("fprop_tiled", 1.0, _256=0.0), planted("fprop_gather", 2.0)), library(1.1, 0.5)),)).save(
        own
    )
    measured = entry("fprop_gather", precision="fp32", problem=str(WIDE), device="NVIDIA H200")
    tuning.Database([measured]).save(own.with_name("own.json"))
    assert cli.main(["info", "--why", str(WIDE)]) == 0
    out = capsys.readouterr().out
    shown = out[out.index("fprop fp32 ncdhw:") :].partition("fprop fp32 channels_last:")[0]
    assert "database: the quickest on this very problem, 3 ms on NVIDIA H200" in shown
    assert "fprop_tiled [fp32] TILE_VOXELS=256: 0.003 ms predicted\n" in shown
    assert "fprop_gather [fp32]: 0.006 ms predicted, at its best 3 ms measured on NVIDIA H200\n" in shown
    assert "of a kernel that was never swept" in shown
    tuning.Database().save(own.with_name("own.json"))
    assert cli.main(["info", "--why", str(WIDE)]) == 0
    out = capsys.readouterr().out
    shown = out[out.index("fprop fp32 ncdhw:") :].partition("fprop fp32 channels_last:")[0]
    assert "database: nothing for this problem" in shown and "measured on" not in shown
    assert "torch's own operator, predicted at 0.0033 ms, and at 0.00165 ms if it is quick for its kind" in shown


SHORT = {"traits": ["taps"], "splits": [0], "thresholds": [0.5], "leaves": [0] * 8}  # one tree, with one node


def _changed(path: tuple[Any, ...], value: Any) -> Any:
    known = CardCosts(CARD, (planted("fprop_tiled", 1.0),), library(2.0, 0.5))
    data = json.loads(json.dumps({"format": 2, "cards": [asdict(known)]}))
    place = data
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("format",), 1, "format=1: must be 2"),
        (("cards",), {}, "cards={}: must be a list"),
        (("cards", 0, "card"), KeyError, "field 'card' is missing"),
        (("cards", 0, "more"), 1, "unknown field 'more'"),
        (("cards", 0, "card", "multiprocessors"), 0, "multiprocessors=0: must be from 1"),
        (("cards", 0, "card", "copy_bytes_per_s"), 0, "copy_bytes_per_s=0.0: must be from 1"),
        (("cards", 0, "card", "gemm_flop_per_s"), {}, "gemm_flop_per_s: has no fp32"),
        (("cards", 0, "kernels", 0, "instance"), "fp8", "instance='fp8': must be one of"),
        (("cards", 0, "kernels", 0, "coefficients", "terms"), {"magic": 1.0}, "terms='magic': must be one of"),
        (("cards", 0, "kernels", 0, "coefficients", "terms"), {"call": -1.0}, "terms.call=-1.0: must be from 0"),
        (("cards", 0, "kernels", 0, "coefficients", "trees", "leaves"), [1, 2], "number of leaves=2: must be from 0 to 0"),
        (("cards", 0, "kernels", 0, "coefficients", "trees", "traits"), ["magic"], "traits='magic': must be one of"),
        (("cards", 0, "kernels", 0, "coefficients", "trees"), SHORT, "number of splits=1: must be from 7 to 7"),
        (
            ("cards", 0, "kernels", 0, "coefficients", "trees"),
            {**SHORT, "splits": [1] * 7, "thresholds": [0.5] * 7},
            "splits=1: must be from 0 to 0",
        ),
        (
            ("cards", 0, "kernels", 0, "coefficients", "trees"),
            {**SHORT, "splits": [0] * 7, "thresholds": [float("nan")] * 7},
            "thresholds=nan: must be from",
        ),
        (("cards", 0, "kernels", 0, "configurations"), [{"X": 1.5}], "configurations[0].X=1.5: must be a whole number"),
        (("cards", 0, "library", "questions", 0, "low"), 1.5, "low=1.5: must be from -10 to 0"),
        (("cards", 0, "library", "questions", 0, "layout"), "nhwc", "layout='nhwc': must be one of"),
        (("cards", 0, "library", "questions", 0, "noise"), 0.0, "noise=0.0: must be from"),
        (("cards", 0, "library", "questions", 0, "scales"), {"batch": 0.0}, "scales.batch=0.0: must be from"),
        (("cards", 0, "library", "questions", 0, "scales"), {"magic": 1.0}, "scales='magic': must be one of"),
        (("cards", 0, "library", "questions", 0, "ms"), [], "number of ms=0: must be from 1 to 1"),
        (("cards", 0, "library", "questions", 0, "ms"), [None], "number of times=0: must be from 1"),
        (("cards", 0, "library", "questions", 0, "ms"), [-1.0], "ms=-1.0: must be from"),
        (("cards", 0, "library", "problems"), ["n1"], "problems: "),
        (("cards", 0, "library", "timed_on"), [1], "timed_on=1: must be from 0 to 0"),
        (("cards", 0, "library", "timed_on"), [], "number of timed_on=0: must be from 1 to 1"),
        (("cards", 0, "library", "cards", 0, "copy_bytes_per_s"), 0, "copy_bytes_per_s=0.0: must be from 1"),
    ],
)
def test_a_damaged_file_is_refused_and_said(path: tuple[Any, ...], value: Any, said: str, own: Path) -> None:
    own.write_text(json.dumps(_changed(path, value)))
    with pytest.raises(DataError) as error:
        Costs.read(own)
    assert said in str(error.value) and str(own) in str(error.value)
    with pytest.warns(CacheWarning, match="the costs were ignored"):
        assert Costs.load(own).cards == ()


def test_a_file_is_read_as_it_was_written(own: Path) -> None:
    written = Costs((CardCosts(CARD, (planted("fprop_tiled", 1.0, _64=0.25),), library(2.0, math.exp(-0.5))),))
    written.save(own)
    assert Costs.read(own).cards == written.cards
    assert Costs.read(own.with_name("none")).cards == ()


def test_the_costs_that_ship_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    cards = Costs.read(cost.SHIPPED).cards
    h100, *others = sorted(cards, key=lambda known: known.card.device != tuning.MEASURED["sm_90a"][0])
    assert h100.card.device == tuning.MEASURED["sm_90a"][0] and [known.card.device for known in others] == ["NVIDIA H200"]
    swept = [one for known in cards for one in known.kernels]
    assert {one.kernel for one in swept} <= set(registry.kernels("fprop"))
    assert {(one.precision, one.layout) for known in cards for one in known.library.questions} == {
        (precision, layout) for precision in ("fp32", "tf32", "bf16") for layout in LAYOUTS
    }
    for one in swept:
        kernel = registry.kernel(one.kernel)
        assert one.instance in kernel.dtypes and one.configurations
        for configuration in one.configurations:
            assert all(value in (*kernel.search[name], kernel.tunables[name]) for name, value in configuration.items())


def test_blocks_are_the_last_launchs_unless_a_cost_says_how_many() -> None:
    lines = '[cost]\nsteps = "taps"\nproducts = "out_channels"\n'
    one, two = (cost.kernel_terms(mine(text), WIDE, "fp32", "ncdhw", CARD, False) for text in (lines, lines + 'blocks = "66 * 132"\n'))
    assert two["products"] == pytest.approx(66 * two["block_products"]) and one["products"] != two["products"]


def test_a_declared_cost_is_no_code() -> None:
    """It changes no digest, so what was measured counts on."""
    declared = mine('[cost]\nsteps = "taps"\nproducts = "out_channels"\nbytes = "16"\nfirst_bytes = "8"\n')
    assert code_digest(declared) == code_digest(mine()) and dict(declared.cost)["products"] == "out_channels"
    for wrong, said in (
        ('[cost]\nmagic = "1"\n', r"unknown keys \['magic'\]"),
        ('[cost]\nproducts = "1"\n', "give steps and the products of a step"),
        ('[cost]\nsteps = "kernel_size"\nproducts = "1"\n', "must be a number, and is a tuple"),
        ("cost = 3\n", "must be a table"),
    ):
        with pytest.raises(ct.KernelError, match=said):
            mine(wrong)
