"""Threads that read and write a disk beside compute. Jobs on one spot run in order, and no error of a write is lost.

    threads = IoThreads(2, stats)
    threads.submit_write(ticket, function, *args)   # after earlier jobs on the same spot
    threads.submit_read(ticket, function, *args)    # and only if its write succeeded
    writes = threads.finish()                       # no thread is busy; `job.result()` raises what the job raised
    threads.close()

There are no locks in this file; `Transfers` has one.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
from collections.abc import Callable
from typing import Any

from memscale.techniques.offload.store.spot_jobs import Job
from memscale.techniques.offload.store.stores import Ticket
from memscale.techniques.offload.transfer.stream_order import TransferStats


class IoThreads:
    """The jobs of one `Transfers`. With no threads (`num_threads=0`) there is nothing to submit, finish or close."""

    def __init__(self, num_threads: int, stats: TransferStats) -> None:
        self._stats = stats
        self._writes: collections.deque[Job] = collections.deque()
        """The writes that are not done, or that failed and whose errors were not asked for."""
        self._reads: set[Job] = set()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        if num_threads:
            self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, thread_name_prefix="memscale-io")

    def submit_write(self, ticket: Ticket, function: Callable[..., None], *args: Any) -> Job:
        job = self._submit(ticket, [], function, *args)
        ticket.spot_jobs.add_write(ticket.place, job)
        while self._writes and self._writes[0].done() and self._writes[0].exception() is None:
            self._writes.popleft()
        self._writes.append(job)
        return job

    def submit_read(self, ticket: Ticket, function: Callable[..., None], *args: Any) -> Job:
        job = self._submit(ticket, ticket.write_jobs, function, *args)
        ticket.spot_jobs.add(ticket.place, job)
        self._reads.add(job)
        job.add_done_callback(self._reads.discard)
        return job

    def _submit(self, ticket: Ticket, needed: list[Job], function: Callable[..., None], *args: Any) -> Job:
        """Run a job in a thread after the earlier jobs on its spot. Jobs start in order; none waits for a later one."""
        assert self._pool is not None
        return self._pool.submit(_run_after, ticket.jobs, needed, function, *args)

    def wait_for_a_write(self) -> bool:
        """Block until the oldest write that is under way is done; False if there is none."""
        pending = next((job for job in self._writes if not job.done()), None)
        if pending is None:
            return False
        with self._stats.blocking():
            concurrent.futures.wait([pending])
        return True

    def forget_write(self, ticket: Ticket) -> None:
        """Forget a ticket's writes; their errors will not be asked for."""
        for job in ticket.write_jobs:
            with contextlib.suppress(ValueError):
                self._writes.remove(job)

    def finish(self) -> list[Job]:
        """Block until no thread is busy. Return the writes; the caller deals with their errors."""
        writes, self._writes = [*self._writes], collections.deque()
        with self._stats.blocking():
            concurrent.futures.wait([*writes, *self._reads])
        return writes

    def close(self) -> None:
        """Stop the threads. Errors will not be asked for."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._writes.clear()


def _run_after(earlier: list[Job], needed: list[Job], function: Callable[..., None], *args: Any) -> None:
    concurrent.futures.wait(earlier)
    for job in needed:
        job.result()  # data that was never written must not be read
    function(*args)
