"""Waits: the one way in which a stream or a thread waits for another, and the books of what transfers cost.

Write `waits.order(...)`, never the bare name: tests leave out each wait by its name, here, for everyone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch


def order(waiter: torch.Stream | None, event: torch.Event, why: str) -> None:
    """What `waiter` (a stream, or this thread if None) does next happens after the event. See NOTE [stream order]."""
    if waiter is None:
        event.synchronize()
    else:
        waiter.wait_event(event)


@dataclasses.dataclass(slots=True)
class TransferStats:
    """What moved, and what it cost."""

    num_sends: int = 0
    num_fetches: int = 0
    bytes_sent: int = 0
    bytes_fetched: int = 0
    num_hits: int = 0
    """Arrivals that were there when they were waited for."""
    host_waited_s: float = 0.0
    """Time in which the calling thread was blocked. Waits between streams block no thread and are not in it."""

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_fetches if self.num_fetches else 0.0

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """The calling thread waits here."""
        start = time.perf_counter()
        yield
        self.host_waited_s += time.perf_counter() - start
