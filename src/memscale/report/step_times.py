"""`StepTimes`: what a training step does when, on the device, both ways of the link and the host. Data to be drawn."""

from __future__ import annotations

import dataclasses
from typing import Literal

Lane = Literal["compute", "link in", "link out", "host"]
LANES: tuple[Lane, ...] = ("compute", "link in", "link out", "host")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One lane at work."""

    lane: Lane
    start_ms: float
    end_ms: float
    phase: str
    """"forward", "backward" or "optimizer"."""
    module_fqn: str = ""
    """The block, or "" between blocks."""
    num_bytes: int | None = None
    """What travels; None: nothing does."""

    @property
    def ms(self) -> float:
        return self.end_ms - self.start_ms


@dataclasses.dataclass(frozen=True, slots=True)
class StepTimes:
    """One training step. Times are those of the time model."""

    spans: tuple[Span, ...]
    total_ms: float

    def busy_ms(self, lane: Lane) -> float:
        """How long a lane is at work."""
        return sum(span.ms for span in self.spans if span.lane == lane)

    def moved_bytes(self, lane: Lane) -> int:
        """What travels in a lane."""
        return sum(span.num_bytes or 0 for span in self.spans if span.lane == lane)
