"""A traced step is held against the device's budget, the host's and the disk's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from memscale._decide.budget import Budget
from memscale._decide.choice import Choice
from memscale._planning.admission import Admission
from memscale._profile import Segment, StepTrace

pytestmark = pytest.mark.unit

TRACE = StepTrace((Segment("forward", "", 90, 10, 0, 0, 0),))


def peak_of(trace: StepTrace, choice: Choice, optimizer: Any, streamed_bytes: int) -> int:
    """A model of a step whose optimizer takes 20 bytes, and whose streamed parameters are not there."""
    assert (choice, optimizer) == (Choice(), "adamw")
    return trace.peak_bytes + 20 - streamed_bytes


def admission(budget: Budget, host_bytes: int = 0, movable_bytes: int = 0) -> Admission:
    model: Any = SimpleNamespace(peak_of=peak_of)
    optimizer: Any = "adamw"
    return Admission(model, Choice(), optimizer, 5, budget, host_bytes, movable_bytes)


def test_the_peak_is_that_of_the_model_with_its_optimizer() -> None:
    assert admission(Budget(0, 0, 0)).peak_bytes(TRACE) == 105


@pytest.mark.parametrize(
    ("budget", "host_bytes", "movable_bytes", "is_admitted"),
    [
        (Budget(105, 0, 0), 0, 0, True),
        (Budget(104, 0, 0), 0, 0, False),
        (Budget(105, 8, 0), 8, 0, True),
        (Budget(105, 7, 9), 8, 0, False),
        (Budget(105, 8, 2), 4, 6, True),
        (Budget(105, 8, 1), 4, 6, False),
    ],
)
def test_live_bytes_and_what_waits_must_fit(
    budget: Budget, host_bytes: int, movable_bytes: int, is_admitted: bool
) -> None:
    assert admission(budget, host_bytes, movable_bytes).admits(TRACE) is is_admitted
