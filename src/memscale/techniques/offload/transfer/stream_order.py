"""Stream order: the only way in which a stream or a thread waits for another, and counts of what transfers cost.

Write `stream_order.order(...)`, never the bare name: tests replace it here to leave out a wait by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch


def order(waiter: torch.Stream | None, event: torch.Event, why: str) -> None:
    """Let `waiter` (a stream, or this thread if None) go on only after the event. See NOTE [stream order]."""
    if waiter is None:
        event.synchronize()
    else:
        waiter.wait_event(event)


def record(stream: torch.Stream) -> torch.Event:
    """Return an event of what the stream has been given.

    If none can be recorded, nobody could wait for what is under way: this thread does so, before the error is raised.
    """
    try:
        return stream.record_event()
    except BaseException:
        stream.synchronize()
        raise


@dataclasses.dataclass(slots=True)
class TransferStats:
    """The bytes that moved, and the time that it cost."""

    num_sends: int = 0
    num_fetches: int = 0
    bytes_sent: int = 0
    bytes_fetched: int = 0
    num_hits: int = 0
    """The number of arrivals that were there when they were waited for."""
    host_waited_s: float = 0.0
    """The time for which the calling thread was blocked. Waits between streams block no thread and are not counted."""

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_fetches if self.num_fetches else 0.0

    @contextlib.contextmanager
    def blocking(self) -> Iterator[None]:
        """Count the time of this context as time waited by the calling thread."""
        start = time.perf_counter()
        yield
        self.host_waited_s += time.perf_counter() - start
