"""Pieces of a step that add up: stretches of its timeline, and what a treatment changes beside them. No torch."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """Adjacent segments of one owner, added up."""

    peak_bytes: int = 0
    net_bytes: int = 0
    ms: float = 0.0

    def then(self, other: Stretch) -> Stretch:
        peak = max(self.peak_bytes, self.net_bytes + other.peak_bytes)
        return Stretch(peak, self.net_bytes + other.net_bytes, self.ms + other.ms)

    def without_gradients(self, gradient_bytes: int, step_bytes: int) -> Stretch:
        """The gradients that it makes are used up when it ends, by a step that takes so much beside them."""
        if not gradient_bytes:
            return self
        peak = max(self.peak_bytes, self.net_bytes + step_bytes)
        return Stretch(peak, self.net_bytes - gradient_bytes, self.ms)

    def towards(self, other: Stretch, position: float) -> Stretch:
        """The stretch between this one (position 0) and the other (position 1), interpolated; bytes are rounded up."""
        return Stretch(
            self.peak_bytes + math.ceil((other.peak_bytes - self.peak_bytes) * position),
            self.net_bytes + math.ceil((other.net_bytes - self.net_bytes) * position),
            self.ms + (other.ms - self.ms) * position,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Spent:
    """What a stretch leaves behind, how long it computes, and what crosses the link for it."""

    net_bytes: int = 0
    busy_ms: float = 0.0
    out_bytes: float = 0.0
    in_bytes: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Extras:
    """What a treatment of a block changes besides its own stretches."""

    static_bytes: int = 0
    streamed_bytes: int = 0
    """Trainable bytes whose optimizer state is on the host."""
    host_bytes: int = 0
    movable_bytes: int = 0
    ms: float = 0.0

    def plus(self, other: Extras) -> Extras:
        return Extras(
            self.static_bytes + other.static_bytes,
            self.streamed_bytes + other.streamed_bytes,
            self.host_bytes + other.host_bytes,
            self.movable_bytes + other.movable_bytes,
            self.ms + other.ms,
        )
