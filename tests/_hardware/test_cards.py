"""The table of known cards."""

from __future__ import annotations

import pytest

from memscale._hardware.cards import KNOWN_CARDS, find_card

pytestmark = pytest.mark.unit
GIB = 1024**3


@pytest.mark.parametrize(
    ("name", "found"),
    [("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("NVIDIA H100 PCIe", "H100"), ("Tesla V100-SXM2-16GB", "V100")],
)
def test_cards_that_are_present_are_found_loosely(name: str, found: str) -> None:
    card = find_card(name, loosely=True)
    assert card is not None
    assert card.name == found


def test_the_table_is_sane() -> None:
    assert len({card.name for card in KNOWN_CARDS}) == len(KNOWN_CARDS)
    for card in KNOWN_CARDS:
        assert find_card(card.name) is card
        assert 4 * GIB <= card.total_bytes <= 200 * GIB
        assert 1e11 < card.memory_bytes_per_s < 1e13
        assert card.fp32_flops <= card.half_flops
        assert card.link_bytes_per_s < card.memory_bytes_per_s
