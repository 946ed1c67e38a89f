"""The drawn layers: their shares and sizes are those that are promised, and a seed gives the same layers for ever."""

from __future__ import annotations

import hashlib
import math
from collections import Counter

import numpy as np
import pytest

from cupy_convt3d.errors import ProblemError
from cupy_convt3d.lab.population import FAMILIES, H100, MOST_BATCH, Family, Layer, is_asked_for, population
from cupy_convt3d.lab.suites import suite
from cupy_convt3d.problem import Problem

COUNT = 2000
BY_NAME = {family.name: family for family in FAMILIES}
# Ordinary layers of networks, beside the suites'.
ORDINARY = (
    *("n8_c48to96_i16x40x40_k3_s2_p1", "n8_c24to48_i24_k5_s2_p2", "n64_c3to24_i12x28x28_k3_s2_p1", "n16_c384to192_i4_k4_s2_p1"),
    *("n4_c1024to256_i2_k4_s2_p1", "n32_c256to384_i1_k4", "n2_c320to256_i20x20x3_k3_s2_p1_op1", "n4_c12to2_i40_k1"),
    *("n1_c256to4_i8x120x240_k2x4x4_s2x4x4", "n2_c96to96_i40x48x40_k5_s2_p2_g96", "n2_c100to50_i30_k4_s2_p1"),
    *("n1_c72to40_i46x55x46_k2_s2", "n2_c128to64_i8x32x32_k3x4x4_s1x2x2_p1", "n16_c128to1_i32_k4_s2_p1"),
)


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return population(0, COUNT)


def form_of(problem: Problem, family: Family) -> object | None:
    fields = ("kernel_size", "stride", "padding", "output_padding", "dilation")
    return next((form for form in family.forms if all(getattr(form, name) == getattr(problem, name) for name in fields)), None)


def why_never(problem: Problem, family: Family) -> str | None:
    """Return what of a problem a family cannot draw: its own numbers have a chance wherever they lie in the family's ranges."""
    form, ins, outs = form_of(problem, family), problem.in_channels, problem.out_channels
    least, most = family.channels
    edge = math.prod(problem.input_size) ** (1 / 3)
    grouped = {"dense": problem.groups == 1, "depthwise": problem.groups == ins == outs}
    tests = {
        "form": form is not None,
        "single": form is None or not form.single or problem.input_size == (1, 1, 1),
        "groups": grouped.get(family.grouping, 1 < problem.groups < ins),
        "in_channels": least <= ins <= most,
        "out_channels": least <= outs <= most or outs <= 4 or outs >= ins // 4,
        "edge": family.edges[0] / 2 <= edge <= 2 * family.edges[1],  # rounding to powers of two, halving and flattening included
        "batch": 1 <= problem.batch <= MOST_BATCH,
        "asked for": is_asked_for(problem),
    }
    return next((name for name, holds in tests.items() if not holds), None)


def test_shares(layers: list[Layer]) -> None:
    assert sum(family.share for family in FAMILIES) == 100
    counts = Counter(layer.family for layer in layers)
    for family in FAMILIES:
        share = family.share / 100
        assert abs(counts[family.name] / COUNT - share) < 3.5 * math.sqrt(share * (1 - share) / COUNT), family.name


def test_every_form_is_drawn_by_its_weight(layers: list[Layer]) -> None:
    for family in FAMILIES:
        own = [layer.problem for layer in layers if layer.family == family.name]
        counts = Counter(form_of(problem, family) for problem in own)
        assert set(counts) == set(family.forms)
        for form in family.forms:
            share = form.weight / sum(one.weight for one in family.forms)
            assert abs(counts[form] - share * len(own)) < 4 * math.sqrt(share * len(own)), (family.name, form)


def test_bounds(layers: list[Layer]) -> None:
    for layer in layers:
        problem, family = layer.problem, BY_NAME[layer.family]
        least_ms = max(problem.flop / 51.5e12, problem.compulsory_bytes(4) / 3e12) * 1e3
        assert 1e-3 <= least_ms <= 20, layer
        assert problem.compulsory_bytes(4) <= 2e9
        if family.grouping == "grouped":
            assert 2 <= problem.in_channels // problem.groups <= 32 and problem.groups >= 2
        else:
            assert why_never(problem, family) is None, (layer, why_never(problem, family))


def test_sizes_are_rounded_as_networks_have_them(layers: list[Layer]) -> None:
    problems = [layer.problem for layer in layers]

    def share(holds: object) -> float:
        return float(np.mean([bool(holds(problem)) for problem in problems]))  # type: ignore[operator]

    assert 0.85 <= share(lambda p: p.in_channels % 8 == 0) <= 0.95, "a tenth has any number of channels"
    assert 0.5 <= share(lambda p: p.in_channels % 16 == 0) <= 0.8
    assert 0.3 <= share(lambda p: all(size.bit_count() == 1 for size in p.input_size)) <= 0.6, "powers of two"
    assert 0.12 <= share(lambda p: any(size % 2 and size > 1 for size in p.input_size)) <= 0.4, "odd sizes"
    assert share(lambda p: p.batch.bit_count() == 1) >= 0.75
    assert {p.batch for p in problems} >= {1, 2, 4, 8, 16, 32, 64}
    floors = np.log([H100.floor_ms(p, "fprop", "fp32") for p in problems])
    assert np.std(floors) > 1, "from launch-bound layers to slow ones"


def test_layers_are_distinct(layers: list[Layer]) -> None:
    assert len({layer.problem for layer in layers}) == len({layer.name for layer in layers}) == COUNT


def test_a_layer_does_not_depend_on_the_count(layers: list[Layer]) -> None:
    assert population(0, 70) == layers[:70] and population(0, 1) == layers[:1]
    assert not {layer.problem for layer in population(1, 70)} & {layer.problem for layer in layers[:70]}
    depthwise = [layer for layer in layers if layer.family == "depthwise"]
    assert population(0, 2, lambda problem: problem.groups == problem.in_channels > 1) == depthwise[:2]
    assert population(0, 2, lambda problem: False) == [], "it gives up"


def test_a_seed_gives_the_same_layers_for_ever() -> None:
    """Figures are quoted by seed. Whoever changes the draw changes every figure; then this digest, and the results, are made anew."""
    text = "\n".join(f"{layer.name} {layer.problem}" for layer in population(20261125, 150))
    assert population(20261125, 3)[0].name.startswith("p20261125_0_")
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "df37808ba4b5fe6b"


@pytest.mark.parametrize("name", [*ORDINARY, *suite("nnunet"), *suite("swinunetr"), *suite("psmnet"), *suite("layers")])
def test_published_layers_could_be_drawn(name: str) -> None:
    problem = {**suite("named")}.get(name) or Problem.parse(name)
    reasons = {family.name: why_never(problem, family) for family in FAMILIES}
    assert None in reasons.values(), reasons


def test_what_no_network_has_could_not_be_drawn() -> None:
    for name in ("n1_c16to16_i16_k3_s3", "n128_c16to16_i16_k2_s2", "n1_c1to1_i3_k2_s2", "n64_c512to512_i160_k2_s2"):
        assert all(why_never(Problem.parse(name), family) for family in FAMILIES), name


def test_torch_accepts_them(layers: list[Layer]) -> None:
    torch = pytest.importorskip("torch")
    for p in (layer.problem for layer in layers[:300]):
        x, w = torch.empty(p.input_shape, device="meta"), torch.empty(p.weight_shape, device="meta")
        bias = torch.empty(p.out_channels, device="meta") if p.bias else None
        geometry = (p.stride, p.padding, p.output_padding, p.groups, p.dilation)
        assert torch.nn.functional.conv_transpose3d(x, w, bias, *geometry).shape == p.output_shape


@pytest.mark.parametrize(("seed", "count", "words"), [(-1, 5, "seed=-1: must be at least 0"), (0, 0, "count=0: must be at least 1")])
def test_bad_arguments(seed: int, count: int, words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        population(seed, count)
