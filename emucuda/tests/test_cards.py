"""The table of cards: complete, and found by any spelling of their names."""

import pytest

import emucuda
from memscale._hardware.cards import KNOWN_CARDS


def test_every_card_that_memscale_knows_can_be_emulated():
    for known in KNOWN_CARDS:
        card = emucuda.find_card(known.name)
        assert f"sm_{card.major}{card.minor}" == known.architecture, known.name
        assert 0.9 * known.total_bytes < card.total_bytes < known.total_bytes, known.name


@pytest.mark.parametrize("name", ["RTX 3090", "rtx3090", "NVIDIA GeForce RTX 3090"])
def test_a_card_is_found_however_it_is_written(name):
    assert emucuda.find_card(name).device_name == "NVIDIA GeForce RTX 3090"


def test_cards_of_similar_names_are_not_mixed_up():
    assert emucuda.find_card("A100").total_bytes < 50e9 < emucuda.find_card("A100 80GB").total_bytes


def test_an_unknown_card_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no card named 'RTX 1'.*RTX 3090"):
        emucuda.find_card("RTX 1")
