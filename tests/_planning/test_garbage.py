"""While a plan is made, Python sweeps its oldest generation less often; afterwards all is as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from memscale._planning.garbage import few_collections

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def thresholds_kept() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_the_oldest_generation_is_left_alone_and_the_young_ones_are_not() -> None:
    before = gc.get_threshold()
    with few_collections():
        assert gc.get_threshold()[:2] == before[:2]
        assert gc.get_threshold()[2] > 1000 * before[2]
        with few_collections():
            inside = gc.get_threshold()
        assert gc.get_threshold() == inside
    assert gc.get_threshold() == before


def test_an_error_leaves_nothing_behind() -> None:
    before = gc.get_threshold()
    with pytest.raises(ValueError, match="planning"), few_collections():
        raise ValueError("planning")
    assert gc.get_threshold() == before


def test_what_others_set_meanwhile_stays() -> None:
    with few_collections():
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == (500, 5, 5)
