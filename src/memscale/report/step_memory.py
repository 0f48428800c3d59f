"""`StepMemory`: what the device holds over one training step, moment by moment. Data, which a report draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

KINDS = ("parameters", "optimizer state", "gradients", "activations", "temporaries", "inputs")
"""What live bytes are, in the order in which they are stacked."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moment:
    """What is held just after something was allocated."""

    phase: str
    """"forward", "backward" or "optimizer"."""
    module_fqn: str
    """The block or other piece of the model that is at work; "": none of them."""
    live_bytes: tuple[int, ...]
    """One for each of `KINDS`."""
    allocated_bytes: int | None = None
    """What the caching allocator has handed out, and below what it holds; None where there is none, as on a CPU."""
    reserved_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """Live bytes of all kinds."""
        return sum(self.live_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class StepMemory:
    """One training step."""

    moments: tuple[Moment, ...]
    source: str
    """Where the figures come from: "predicted", or where they were measured."""
    earlier_peak_bytes: int = 0
    """The highest live bytes of the steps before it: the first makes the optimizer's state."""

    @property
    def peak_bytes(self) -> int:
        """The highest live bytes."""
        return max((moment.total_bytes for moment in self.moments), default=0)

    def thinned(self, most: int) -> StepMemory:
        """The same with about `most` moments: of each stretch the highest, in live and in reserved bytes."""
        if len(self.moments) <= most:
            return self
        size = -(-2 * len(self.moments) // most)
        stretches = (self.moments[start : start + size] for start in range(0, len(self.moments), size))
        kept = [moment for stretch in stretches for moment in _highest(stretch)]
        return dataclasses.replace(self, moments=tuple(kept))


def _highest(stretch: Sequence[Moment]) -> Iterable[Moment]:
    numbers = range(len(stretch))
    live = max(numbers, key=lambda number: stretch[number].total_bytes)
    reserved = max(numbers, key=lambda number: stretch[number].reserved_bytes or 0)
    return (stretch[number] for number in sorted({live, reserved}))
