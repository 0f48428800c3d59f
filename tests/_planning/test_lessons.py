"""What rehearsals of plans that do not fit teach about others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memscale._decide.choice import Choice, RunOptions
from memscale._planning.taught import Taught
from memscale._profile import CHECKPOINT, OFFLOAD, Treatment

pytestmark = pytest.mark.unit

BUDGET_BYTES = 1000


def choice_of(treatment: Treatment) -> Choice:
    return Choice((("block", treatment),), RunOptions())


def shown(peak_bytes: int, reserved_bytes: int | None) -> Any:
    return SimpleNamespace(
        predicted_peak_bytes=peak_bytes, predicted_reserved_bytes=reserved_bytes, budget_bytes=BUDGET_BYTES
    )


@pytest.mark.parametrize(
    ("peak_bytes", "reserved_bytes", "reserve_bytes"),
    [
        pytest.param(900, 1100, 200, id="what is live would fit"),
        pytest.param(1600, 2000, 200, id="it does not: those that do are half as high, and hold half as much above"),
        pytest.param(1100, None, 50, id="nobody knows what is held"),
        pytest.param(1000, 1010, 50, id="more was expected"),
    ],
)
def test_one_rehearsal_teaches_what_is_live_and_what_is_held(
    peak_bytes: int, reserved_bytes: int | None, reserve_bytes: int
) -> None:
    taught = Taught(50)
    choice = choice_of(OFFLOAD)
    taught.by(choice, shown(peak_bytes, reserved_bytes), shown(peak_bytes - 70, None), is_last=False)
    assert taught.reserve_bytes == reserve_bytes
    assert taught.margins == {frozenset({OFFLOAD}): 70}
    assert taught.needed()[choice] > BUDGET_BYTES - reserve_bytes, "it is not chosen again"


@pytest.mark.parametrize(
    ("peak_bytes", "reserved_bytes", "expected"),
    [(900, 1100, (BUDGET_BYTES, 0)), (1100, 1200, (50, BUDGET_BYTES)), (1100, None, (50, BUDGET_BYTES))],
)
def test_the_last_try_is_the_lowest_or_one_that_was_traced_as_a_whole(
    peak_bytes: int, reserved_bytes: int | None, expected: tuple[int, int]
) -> None:
    taught = Taught(50)
    taught.by(choice_of(CHECKPOINT), shown(peak_bytes, reserved_bytes), shown(peak_bytes, None), is_last=True)
    assert (taught.reserve_bytes, taught.margin_bytes) == expected
