"""The page of cards is what the records say."""

from __future__ import annotations

import pytest

from tests.commands.verify.test_record import BUDGET, PLAIN, record_of
from tools import make_cards

pytestmark = pytest.mark.unit


def test_the_page_is_written_from_the_records() -> None:
    assert make_cards.PAGE.read_text() == make_cards.page(make_cards.records()), "run `python -m tools.make_cards`"


def test_real_cards_are_counted() -> None:
    text = make_cards.page([("rtx-3090.json", record_of(PLAIN, BUDGET))])
    assert "**1 of these records is from a real GPU.**" in text
    assert "[rtx-3090.json](rtx-3090.json)" in text
    assert "**None of these records is from a real GPU.**" in make_cards.page([])
