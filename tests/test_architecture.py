"""Which cards a declared target stands for, and what the cards are that tests go through."""

from __future__ import annotations

import pytest

from cupy_convt3d.architecture import described, is_target, nearest, of_device, runs_on

# One card of each architecture: multiprocessors, and KiB of shared memory that a block may ask for (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
CARDS = {
    "sm_80": (108, 163),  # A100
    "sm_86": (82, 99),  # GeForce RTX 3090
    "sm_87": (16, 163),  # Jetson AGX Orin
    "sm_89": (128, 99),  # GeForce RTX 4090
    "sm_90a": (132, 227),  # H100
    "sm_100a": (148, 227),  # B200
    "sm_103a": (148, 227),  # B300
    "sm_120a": (170, 99),  # GeForce RTX 5090
    "sm_121a": (48, 99),  # DGX Spark
}
FUTURE = "sm_130a"


def test_a_card_is_named_by_the_target_that_has_all_its_instructions() -> None:
    capabilities = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
    assert [of_device(*each) for each in capabilities] == list(CARDS)
    assert (of_device(7, 5), of_device(13, 0)) == ("sm_75", FUTURE)


def test_a_target_is_for_its_card_and_newer_ones_or_for_one_alone() -> None:
    cards = ["sm_75", *CARDS, FUTURE]
    assert [card for card in cards if runs_on("sm_80", card)] == cards[1:]
    assert [card for card in cards if runs_on("sm_89", card)] == cards[4:]
    assert [card for card in cards if runs_on("sm_90", card)] == cards[5:]
    assert [card for card in cards if runs_on("sm_100", card)] == cards[6:]
    assert [card for card in cards if runs_on("sm_90a", card)] == ["sm_90a"]
    assert [card for card in cards if runs_on("sm_120a", card)] == ["sm_120a"]
    assert not runs_on("sm_90a", "sm_90"), "PTX for all of 9.0 and newer has none of its own instructions"


def test_the_nearest_target_is_the_newest_that_runs() -> None:
    targets = ("sm_120", "sm_90a", "sm_80", "sm_90")  # in any order
    expected = {"sm_75": "sm_80", "sm_80": "sm_80", "sm_89": "sm_80", "sm_90a": "sm_90a", "sm_103a": "sm_90", "sm_121a": "sm_120"}
    assert {card: nearest(targets, card) for card in expected} == expected
    assert nearest(targets, FUTURE) == "sm_120"
    assert nearest(("sm_80", "sm_90a"), FUTURE) == "sm_80"


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_121a", "sm_130"])
def test_targets(name: str) -> None:
    assert is_target(name)


@pytest.mark.parametrize("name", ["sm_75", "sm_80a", "sm_89a", "sm_100f", "sm_8", "compute_80", "sm_80 ", "SM_80", "80", 80, None])
def test_no_targets(name: object) -> None:
    assert not is_target(name)


def test_targets_in_a_sentence() -> None:
    assert described(("sm_90a", "sm_100")) == "sm_90a, sm_100 and newer"
