"""Recorded steps of loops in which gradients of earlier batches are there when a forward begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memscale import Config, Hardware
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.reserved.allocation_log import Allocated, AllocationLog, Event, Freed
from memscale._planning.reserved.allocations import reserved_of
from memscale._profile import LoopHolds
from memscale._profile.inputs import Inputs

WIDTH, ROWS = 512, 64
QUIET = Config(enable_logging=False, async_offload=False)


def steps(*, holds: bool, clears_late: bool = False) -> AllocationLog:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))).train()
    loop = LoopHolds(clears_late=clears_late)
    job = Job(model, QUIET, Hardware.from_name("RTX 3090"), "sgd", holds_gradients=holds, loop=loop)
    return Planner(job, Inputs((torch.zeros(ROWS, WIDTH),), {})).steps((), QUIET)


class Books:
    """What lives, by serial."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def play(self, events: list[Event]) -> int:
        """How high live bytes rise."""
        peak = 0
        for event in events:
            if isinstance(event, Allocated):
                assert event.serial not in self.sizes
                self.sizes[event.serial] = event.num_bytes
            elif isinstance(event, Freed):
                del self.sizes[event.serial]
            peak = max(peak, self.live_bytes)
        return peak

    @property
    def live_bytes(self) -> int:
        return sum(self.sizes.values())


GRADIENT_BYTES = 3 * 4 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("clears_late", [False, True])
def test_every_step_finds_what_the_one_before_has_left(clears_late: bool) -> None:
    log = steps(holds=True, clears_late=clears_late)
    books = Books()
    before, *played = log.played(4)
    books.play(before)
    base_bytes = books.live_bytes
    for events in played:
        books.play(events)
        assert books.live_bytes - base_bytes == (GRADIENT_BYTES if clears_late else 0)


def test_gradients_that_are_left_go_before_backward() -> None:
    log = steps(holds=True, clears_late=True)
    books = Books()
    books.play(log.before)
    books.play(log.steps[0])
    left = {serial for serial, size in books.sizes.items() if size in (4 * WIDTH * WIDTH, 4 * WIDTH)}
    events = log.steps[1]
    gone = [number for number, event in enumerate(events) if isinstance(event, Freed) and event.serial in left]
    new = [
        number
        for number, event in enumerate(events)
        if isinstance(event, Allocated) and event.place is not None and event.place.phase == "backward"
    ]
    assert len(gone) == 6
    assert max(gone) < min(new)


def test_peaks_of_the_three_kinds_of_loops() -> None:
    """Gradients that are added to are there beside all activations and a new gradient; those that go before backward
    beside all activations alone."""
    peaks = [
        reserved_of(steps(holds=holds, clears_late=late), workspace_bytes=0).requested_peak_bytes
        for holds, late in ((False, False), (True, True), (True, False))
    ]
    cleared, left, added = peaks
    assert cleared < left < added <= cleared + GRADIENT_BYTES
