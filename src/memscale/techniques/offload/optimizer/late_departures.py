"""State that still leaves when a step is over: it goes beside the next forward, which lets go of it layer by layer.

    late = LateDepartures()
    late.expect({"blocks.0": 1 << 20, "blocks.1": 1 << 20})     # so many bytes may be late, and who lets go of them
    late.add(turn, num_bytes)       # in the step: its state is being sent
    late.reach("blocks.0")          # a forward comes to this layer: only the others' bytes may still be held
    late.let_go_all()               # or all of it goes now

NOTE [late state]: the last buckets of a step are sent like all others, and what waits elsewhere is valid as soon as the
copy is made: whoever reads it waits for that copy. Only their memory on the device is kept a little longer, until the
stream that stepped them can wait for the copy at no cost. So there is nothing to lose: it may go at any time, and goes
when a step, an evaluation or a load of a checkpoint begins, when the plan is taken off or parked, and when a forward is
over. Parameters that visit the device for the step are at home when it ends, so theirs are never among these buckets,
which come last: nothing else waits behind them on the link.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Protocol


class Leaving(Protocol):
    """What is on its way out."""

    def let_go(self) -> None: ...


class LateDepartures:
    """What one model's optimizers have sent and still keep. See NOTE [late state]."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._reached: set[str] = set()
        self._held: collections.deque[tuple[Leaving, int]] = collections.deque()
        self.num_bytes = 0
        """What it takes on the device."""

    @property
    def room_bytes(self) -> int:
        """How much more may be late."""
        return max(0, sum(self._sizes.values()) - self.num_bytes)

    def expect(self, sizes: Mapping[str, int]) -> None:
        """From here on no more than these bytes are late, of which each layer's forward lets go of its own."""
        self.let_go_all()
        self._sizes = dict(sizes)

    def begin_step(self) -> None:
        """An optimizer steps: what is there goes first."""
        self.let_go_all()
        self._reached.clear()

    def add(self, leaving: Leaving, num_bytes: int) -> None:
        """Keep this, which was sent last."""
        self._held.append((leaving, num_bytes))
        self.num_bytes += num_bytes

    def reach(self, module_fqn: str) -> None:
        """A forward comes to this layer."""
        if self._held:
            self._reached.add(module_fqn)
            self._let_go(sum(size for fqn, size in self._sizes.items() if fqn not in self._reached))

    def let_go_all(self) -> None:
        """Free the memory of all of it."""
        self._let_go(0)

    def _let_go(self, but_bytes: int) -> None:
        while self._held and self.num_bytes > but_bytes:
            leaving, num_bytes = self._held[0]
            leaving.let_go()  # where this fails, it is held still
            self._held.popleft()
            self.num_bytes -= num_bytes
