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

from memscale.techniques.offload.optimizer.bucket_transfers import Entries, StretchVisit, Visits, has_waiting
from memscale.techniques.offload.optimizer.buckets import Bucket, lies_as
from memscale.techniques.offload.store.stores import Stretch
from memscale.techniques.offload.transfer.transfers import Arrival

Early = Arrival | StretchVisit
"""The state of a bucket on its way, or of a stretch of its only parameter."""


class EarlyArrivals:
    """What of one optimizer's state was asked for before the step. See NOTE [early state]."""

    def __init__(self, visits: Visits) -> None:
        self._visits = visits
        self._held: dict[tuple[int, Stretch | None], tuple[Bucket, Early]] = {}

    @property
    def num_bytes(self) -> int:
        """What it takes on the device."""
        return sum(bucket.bytes_of(stretch) for (_, stretch), (bucket, _) in self._held.items())

    def fetch(self, entries: Entries, buckets: Iterable[Bucket], limit_bytes: int) -> None:
        """Ask for the state of the first buckets and stretches, as far as the limit goes."""
        left_bytes = limit_bytes - self.num_bytes
        for bucket in buckets if self._visits.is_asynchronous else ():
            if not bucket.moves or bucket.device.type == "cpu" or not has_waiting(entries, bucket):
                continue  # what is stepped on the host has no room on the device to come to
            for stretch in _pieces(bucket):
                if (id(bucket), stretch) in self._held:
                    continue
                left_bytes -= bucket.bytes_of(stretch)
                if left_bytes < 0:
                    return
                early = self._ask(entries, bucket, stretch)
                if early is not None:
                    self._held[id(bucket), stretch] = bucket, early
                    self._visits.stats.num_early += 1

    def _ask(self, entries: Entries, bucket: Bucket, stretch: Stretch | None) -> Early | None:
        if stretch is None:
            return self._visits.start(entries, bucket)
        return StretchVisit(self._visits, entries, bucket, stretch)

    def holds(self, bucket: Bucket, stretch: Stretch | None) -> bool:
        """Whether this was asked for."""
        return (id(bucket), stretch) in self._held

    def take(self, entries: Entries, bucket: Bucket, stretch: Stretch | None) -> Early | None:
        """What was asked for, if it can still be used."""
        _, early = self._held.pop((id(bucket), stretch), (bucket, None))
        if early is None:
            return None
        is_same = bucket.ticket is early.source and has_waiting(entries, bucket)
        # What another stream has allocated would be handed out again in that stream's order, not in this one's.
        if not is_same or early.stream not in (None, torch.accelerator.current_stream(bucket.device)):
            early.give_up()
            return None
        return early

    def drop_all_but(self, turns: Iterable[tuple[Bucket, Stretch | None]]) -> None:
        """Free the memory of what no turn of the step will take: its parameters have no gradient, or come whole."""
        taken = {(id(bucket), stretch) for bucket, stretch in turns}
        for key in [key for key in self._held if key not in taken]:
            self._held.pop(key)[1].give_up()

    def drop(self) -> None:
        """Free the memory of what was asked for and not used; in a forked child it is the parent's."""
        while self._held and self._visits.transfers.is_own_process:
            _, (_, early) = self._held.popitem()
            early.give_up()


def _pieces(bucket: Bucket) -> tuple[Stretch | None, ...]:
    """What of a bucket comes at a time: all of it, or stretches; nothing where it may be one or the other."""
    if not bucket.stretches:
        return (None,)
    parameter = bucket.parameters[0]
    is_cut = bucket.is_cut and all(lies_as(parameter, slot.shape, slot.stride) for slot in bucket.slots)
    return bucket.stretches if is_cut else ()
