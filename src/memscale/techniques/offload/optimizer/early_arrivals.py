"""State that is asked for before the optimizer steps: it arrives beside backward, and the step finds it there.

    early = EarlyArrivals(visits)
    early.fetch(optimizer.state, buckets, limit_bytes)      # as many buckets as the limit has room for, in their order
    arrival = early.take(optimizer.state, bucket)           # in the step; None: it is fetched then, like any other
    early.drop()                                            # the memory is free; nothing else has changed

NOTE [early state]: what lies on the next tier stays there and stays valid while a copy of it is on its way, so a copy
can be dropped at any time for nothing but the time that it took. It is dropped when another forward begins (of a step
that has more batches, or after one that was skipped), when a checkpoint is loaded, and when the plan is taken off. In
the step it is used only where the bucket still waits where it was fetched from: whoever has looked into the state since
has it on the host, and the step takes it from there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memscale.techniques.offload.optimizer.bucket_transfers import Entries, Visits, has_waiting
from memscale.techniques.offload.optimizer.buckets import Bucket
from memscale.techniques.offload.transfer.transfers import Arrival


class EarlyArrivals:
    """The buckets of one optimizer whose state was asked for before the step. See NOTE [early state]."""

    def __init__(self, visits: Visits) -> None:
        self._visits = visits
        self._arrivals: dict[int, tuple[Bucket, Arrival]] = {}

    @property
    def num_bytes(self) -> int:
        """What it takes on the device."""
        return sum(bucket.num_bytes for bucket, _ in self._arrivals.values())

    def fetch(self, entries: Entries, buckets: Iterable[Bucket], limit_bytes: int) -> None:
        """Ask for the state of the first buckets that come as a whole, as far as the limit goes."""
        if not self._visits.is_asynchronous:
            return
        left_bytes = limit_bytes - self.num_bytes
        for bucket in buckets:
            if id(bucket) in self._arrivals or not can_come_early(bucket) or not has_waiting(entries, bucket):
                continue
            if bucket.num_bytes > left_bytes:
                return
            arrival = self._visits.start(entries, bucket)
            if arrival is not None:
                self._arrivals[id(bucket)] = bucket, arrival
                left_bytes -= bucket.num_bytes
                self._visits.stats.num_early += 1

    def holds(self, bucket: Bucket) -> bool:
        """Whether the bucket's state was asked for."""
        return id(bucket) in self._arrivals

    def take(self, entries: Entries, bucket: Bucket) -> Arrival | None:
        """What was asked for of this bucket, if it can still be used."""
        _, arrival = self._arrivals.pop(id(bucket), (bucket, None))
        if arrival is None:
            return None
        is_same = bucket.ticket is arrival.ticket and has_waiting(entries, bucket)
        # What another stream has allocated would be handed out again in that stream's order, not in this one's.
        if not is_same or arrival.stream not in (None, torch.accelerator.current_stream(bucket.device)):
            arrival.give_up()
            return None
        return arrival

    def drop(self) -> None:
        """Free the memory of what was asked for and not used."""
        while self._arrivals:
            _, (_, arrival) = self._arrivals.popitem()
            arrival.give_up()


def can_come_early(bucket: Bucket) -> bool:
    """Whether its state moves, and moves as a whole: stretches of a parameter come one after the other."""
    return bucket.moves and not bucket.stretches
