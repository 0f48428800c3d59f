"""`SpotJobs`: what threads do with the bytes of one waiting tensor, of all of them or of parts.

    jobs = ticket.spot_jobs             # a ticket and the tickets of its parts have it in common
    jobs.using((0, 4096))               # not done yet, and these bytes are among those that they read or write
    jobs.writes_of((0, 4096))           # what must have succeeded before these bytes are read

A place is a stretch of bytes: from, and up to. There are no locks in this file. `Transfers`, which has one, notes the
jobs. A thread notes what it could not write, in `rescued`, which is therefore never replaced by another dict.
"""

from __future__ import annotations

import concurrent.futures

import torch

Job = concurrent.futures.Future[None]
Place = tuple[int, int]


class SpotJobs:
    """The jobs of threads on one spot, and the bytes that they failed to write there."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Place, Job]] = []
        self._writes: dict[Place, Job] = {}
        """The last write of each place, under way or done."""
        self.rescued: dict[Place, torch.Tensor] = {}
        """The bytes, on the host, of places that could not be written: an error loses nothing."""

    def add(self, place: Place, job: Job) -> None:
        """Note a job that reads or writes these bytes."""
        self._under_way = [(where, one) for where, one in self._under_way if not one.done()]
        self._under_way.append((place, job))

    def using(self, place: Place) -> list[Job]:
        """Return the jobs that are not done and that use any of these bytes."""
        return [job for where, job in self._under_way if _overlap(where, place) and not job.done()]

    def write_anew(self, place: Place) -> None:
        """Forget earlier writes of these bytes, and what was rescued of them: they are written again."""
        for noted in (self._writes, self.rescued):
            for where in [*noted]:
                if _is_inside(where, place):
                    noted.pop(where, None)

    def add_write(self, place: Place, job: Job) -> None:
        """Note a job that writes these bytes."""
        self.add(place, job)
        self._writes[place] = job

    def writes_of(self, place: Place) -> list[Job]:
        """Return the last writes of any of these bytes, whether done or not."""
        return [job for where, job in self._writes.items() if _overlap(where, place)]


def _overlap(one: Place, other: Place) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _is_inside(one: Place, other: Place) -> bool:
    return other[0] <= one[0] and one[1] <= other[1]
