"""Transfers: tensors move between a device and a store beside compute, in a safe order.

    transfers = Transfers(device, store, asynchronous=True)
    ticket = transfers.send(tensor)         # on its way; the caller may drop the tensor, but must not write to it
    arrival = transfers.fetch(ticket)       # on its way back; ahead of its use this is a prefetch
    tensor = arrival.wait()                 # what is launched on the current stream from here on sees it
    transfers.free(ticket)
    transfers.settle()                      # everything sent is in the store; errors of threads are raised here
    transfers.close()                       # whoever made the store closes it afterwards

Four ways, one interface: an accelerator with a host store (side streams and events), an accelerator with a disk store
(a side stream to pinned staging memory, threads from there), the CPU with a disk store (threads), and any of them with
`asynchronous=False` (no stream, no thread, every call blocks). Use one `Transfers` for a store.

NOTE [stream order]: the current stream is read live, before a side stream is entered. Every wait goes through
`stream_order.order`, with its name, so that tests can leave out each of them.
 1. Out: packing happens on the compute stream; the out stream waits for it, copies, and records `ticket.written`.
 2. In: memory is allocated on the compute stream; the in stream waits for it (its former owner may still be running)
    and for `ticket.written`, copies, and records the arrival's event; compute waits for that before it reads.
 3. A source on its way out is kept alive in a window of `window_bytes` (in_flight.py). When that overflows, the stream
    that sent the oldest one waits for its copy, and only then is the memory dropped: the allocator hands it out again
    in stream order, without `record_stream`, and the peak does not depend on timing. On the CPU the calling thread
    waits.
 4. Host memory is written to only after the last copy out of it, and by the host itself only after the last copy into
    it. See NOTE [memory returns after its event].
 5. An arrival that is freed unread makes the stream that allocated it wait, for the same reason as in 3.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Iterator

import torch

from memscale._errors import OffloadError, StoreFullError
from memscale._units import show_bytes
from memscale.techniques.offload.store.disk import CHUNK_BYTES
from memscale.techniques.offload.store.host import HostStore, lay_over
from memscale.techniques.offload.store.spot_jobs import Job
from memscale.techniques.offload.store.stores import Fence, Layout, Process, Store, Ticket
from memscale.techniques.offload.transfer import stream_order
from memscale.techniques.offload.transfer.in_flight import Window
from memscale.techniques.offload.transfer.io_threads import IoThreads

WINDOW_BYTES = 64 * 1024 * 1024
STAGING_BYTES = 256 * 1024 * 1024


class Transfers:
    """Moves tensors to and from one store. See NOTE [stream order]."""

    def __init__(
        self,
        device: torch.device | str,
        store: Store,
        *,
        asynchronous: bool = True,
        num_streams: int = 2,
        window_bytes: int = WINDOW_BYTES,
        staging_bytes: int = STAGING_BYTES,
        num_threads: int = 2,
        debug: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.store = store
        self.can_overlap = asynchronous
        """Whether there are streams or threads for overlap, and memory that they can reach."""
        self.asynchronous = asynchronous
        self.window_bytes = window_bytes
        self.debug = debug and store.keeps_bytes
        """Whether to compare what comes back with what was sent, so that a missing wait raises."""
        self.stats = stream_order.TransferStats()
        on_accelerator = self.device.type != "cpu" and store.keeps_bytes
        self.staging = HostStore(staging_bytes, pinned=on_accelerator)
        self._window = Window(self.stats)
        self._lock = threading.RLock()
        self._orders = itertools.count()
        if asynchronous and on_accelerator:
            self._out_stream = torch.Stream(device=self.device)
            self._in_stream = torch.Stream(device=self.device) if num_streams > 1 else self._out_stream
        has_disk = any(leaf.keeps_bytes and not leaf.in_memory for leaf in store.leaves())
        self._threads = IoThreads(num_threads if asynchronous and has_disk else 0, self.stats)
        blocks = not asynchronous and all(leaf.survives_fork for leaf in store.leaves())
        self._process = Process("the tier that tensors wait on", survives_fork=blocks)
        """Threads and streams do not survive a fork either. See NOTE [fork] in stores.py."""

    def turn_to(self, asynchronous: bool, window_bytes: int) -> None:
        """Let calls overlap with compute, or block, from here on. Where nothing can overlap, they block."""
        asynchronous = asynchronous and self.can_overlap
        if (asynchronous, window_bytes) != (self.asynchronous, self.window_bytes):
            self.settle()
            self.asynchronous, self.window_bytes = asynchronous, window_bytes

    # ------------------------------------------------------------------------------------------------------ out

    def send(self, tensor: torch.Tensor, ticket: Ticket | None = None) -> Ticket:
        """Start moving a tensor to the store. A given `ticket` of the same layout is filled again instead of a new one.

        The tensor must not be written to before `wait_sent(ticket)`; dropping it is always safe.
        """
        self._process.require()
        with self._lock:
            layout = Layout.of(tensor)
            assert ticket is None or ticket.num_bytes == layout.num_bytes, "a ticket is refilled with its own layout"
            target = ticket if ticket is not None else self.store.reserve(layout)
            line = layout.flatten(tensor)
            target.digest = _digest(line) if self.debug else None
            try:
                self._start_send(target, line)
            except BaseException:
                if ticket is None:
                    self.store.free(target)
                raise
            self.stats.num_sends += 1
            self.stats.bytes_sent += target.num_bytes
            self._window.trim(self.window_bytes)
            return target

    def _start_send(self, ticket: Ticket, source: torch.Tensor) -> None:
        store, on_accelerator = ticket.store, source.device.type != "cpu"
        ticket.spot_jobs.write_anew(ticket.place)
        if not ticket.num_bytes:
            return
        if not store.keeps_bytes:
            self._window.keep(ticket, source)
        elif not self.asynchronous or (store.in_memory and not on_accelerator):
            self._send_now(ticket, source)
        elif store.in_memory:
            self._window.keep(ticket, source, self._compute(source), self._copy_out(source, ticket))
            store.counters.bytes_in += ticket.num_bytes
        elif on_accelerator:
            self._send_staged(ticket, source)
        else:
            job = self._threads.submit_write(ticket, _write, ticket, source)
            self._window.keep(ticket, source, job=job)

    def _copy_out(self, source: torch.Tensor, spot: Ticket) -> torch.Event:
        """Copy from the device into the spot's host memory, on the out stream."""
        compute, out = self._compute(source), self._out_stream
        stream_order.order(out, stream_order.record(compute), "out after compute")
        if spot.read is not None:
            stream_order.order(out, spot.read.event, "out after read")
        if spot.store.freed_read is not None:
            stream_order.order(out, spot.store.freed_read.event, "out after freed")
        try:
            with out:
                for memory, part in lay_over(spot.store.memory_of(spot), source):
                    memory.copy_(part, non_blocking=True)
        except BaseException:  # some of it may be on its way
            self._note_written(spot, compute, "reuse after failed copy")
            raise
        return self._note_written(spot)

    def _note_written(self, spot: Ticket, reuser: torch.Stream | None = None, why: str = "") -> torch.Event:
        """Record the end of the copies into the spot; a stream that will reuse their source waits for it."""
        event = stream_order.record(self._out_stream)
        spot.written = Fence(next(self._orders), event)
        if reuser is not None:
            stream_order.order(reuser, event, why)
        return event

    def _send_staged(self, ticket: Ticket, source: torch.Tensor) -> None:
        staged = self._stage(ticket)
        if staged is None:
            self._send_now(ticket, source)
            return
        event = self._copy_out(source, staged)
        self._window.keep(ticket, source, self._compute(source), event)
        self._threads.submit_write(ticket, self._write_staged, ticket, staged, event)

    def _write_staged(self, ticket: Ticket, staged: Ticket, event: torch.Event) -> None:
        try:
            stream_order.order(None, event, "thread after sent")
            ticket.store.write(ticket, self.staging.memory_of(staged))
        except BaseException:
            ticket.rescue(torch.cat(self.staging.memory_of(staged)))
            raise
        finally:
            self.staging.free(staged)

    def _send_now(self, ticket: Ticket, source: torch.Tensor) -> None:
        """Write and block. To disk it writes in chunks, so that a large tensor needs no host copy of its own size."""
        with self.stats.blocking():
            concurrent.futures.wait(ticket.jobs)
            in_memory = ticket.store.in_memory
            ticket.store.write(ticket, [source] if in_memory else (chunk.cpu() for chunk in source.split(CHUNK_BYTES)))
            ticket.written = None

    def wait_sent(self, ticket: Ticket) -> None:
        """Allow writes to the source from here on: the stream that sent it (or this thread) waits for the copy."""
        if not self._process.is_here():
            return
        with self._lock:
            self._window.release(ticket)

    def linger(self, ticket: Ticket) -> None:
        """Keep the source of what was just sent, beside the window, until `wait_sent`, `settle` or `close`."""
        with self._lock:
            self._window.linger(ticket)

    def release_unneeded(self) -> None:
        """Release the sources whose owner (`Sent.owner`) is gone, as `wait_sent` does for one."""
        if not self._process.is_here():
            return
        with self._lock:
            self._window.drop_unneeded()

    def release_sources(self) -> None:
        """Release every source, as `wait_sent` does for one."""
        if not self._process.is_here():
            return
        with self._lock:
            self._window.empty()

    # ------------------------------------------------------------------------------------------------------- in

    def fetch(self, ticket: Ticket, out: torch.Tensor | None = None) -> Arrival:
        """Start bringing a tensor back, into `out`'s memory (same bytes, no gaps) or into new memory.

        `out` must not be in use by anything but what the current stream has been given, and the current stream must
        have waited for what was sent from it (`wait_sent`).
        """
        self._process.require()
        with self._lock:
            line = ticket.layout.empty() if out is None else Layout.of(out).flatten(out).view(ticket.layout.dtype)
            arrival = Arrival(self, ticket, line)
            if ticket.num_bytes and ticket.store.keeps_bytes:
                self._start_fetch(ticket, arrival)
            self.stats.num_fetches += 1
            self.stats.bytes_fetched += ticket.num_bytes
            return arrival

    def _start_fetch(self, ticket: Ticket, arrival: Arrival) -> None:
        target, store = arrival.line.view(torch.uint8), ticket.store
        on_accelerator = target.device.type != "cpu"
        staged = self._stage(ticket) if self.asynchronous and on_accelerator and not store.in_memory else None
        if not self.asynchronous or (on_accelerator and not store.in_memory and staged is None):
            self._fetch_now(ticket, target)
        elif on_accelerator:
            arrival.stream = self._compute(target)
            arrival.allocated = stream_order.record(arrival.stream)
            if staged is None:
                self._copy_in(ticket, arrival)
                store.counters.bytes_out += ticket.num_bytes
            else:
                arrival.staged = staged
                arrival.job = self._threads.submit_read(ticket, self._read_staged, ticket, staged)
                staged.spot_jobs.add(staged.place, arrival.job)
        elif store.in_memory:
            self._fetch_now(ticket, target)
        else:
            arrival.job = self._threads.submit_read(ticket, store.read, ticket, [target])

    def _copy_in(self, spot: Ticket, arrival: Arrival) -> None:
        """Copy from the spot's host memory to the device, on the in stream."""
        stream = self._in_stream
        assert arrival.allocated is not None
        stream_order.order(stream, arrival.allocated, "in after compute")
        if spot.written is not None:
            stream_order.order(stream, spot.written.event, "in after written")
        try:
            with stream:
                for memory, part in lay_over(spot.store.memory_of(spot), arrival.line.view(torch.uint8)):
                    part.copy_(memory, non_blocking=True)
        finally:  # even after a failure, because some of it may be on its way
            arrival.event = stream_order.record(stream)
            spot.read = Fence(next(self._orders), arrival.event)

    def _read_staged(self, ticket: Ticket, staged: Ticket) -> None:
        for fence in (self.staging.freed_read, self.staging.freed_written):
            if fence is not None:
                stream_order.order(None, fence.event, "thread after freed")
        ticket.store.read(ticket, self.staging.memory_of(staged))

    def finish_staged(self, arrival: Arrival) -> None:
        """Copy what a thread has read to the device."""
        with self._lock:
            staged, arrival.staged = arrival.staged, None
            assert staged is not None
            try:
                self._copy_in(staged, arrival)
            finally:
                self.staging.free(staged)

    def _fetch_now(self, ticket: Ticket, target: torch.Tensor) -> None:
        with self.stats.blocking():
            ticket.wait_written()
            concurrent.futures.wait(ticket.jobs)
            ticket.store.read(ticket, [target] if ticket.store.in_memory else _host_parts(target))

    # ------------------------------------------------------------------------------------------------ the rest

    def require_room(self, num_bytes: int) -> None:
        """Raise `StoreFullError` unless this many bytes, those that wait already included, can wait in all."""
        held = sum(leaf.counters.held_bytes for leaf in self.store.leaves())
        self.store.require_room(max(0, num_bytes - held))

    def free(self, ticket: Ticket) -> None:
        """Free a tensor that is no longer needed. If writing it failed, the error is forgotten too."""
        if not self._process.is_here():
            return
        ticket.store.free(ticket)
        with self._lock:
            self._threads.forget_write(ticket)

    def settle(self) -> None:
        """Block until everything sent is in the store and no thread is busy. Raise what a write raised."""
        self._process.require()
        with self._lock:
            self._window.empty()
            writes = self._threads.finish()
            self.store.sweep()
        for job in writes:
            job.result()

    def close(self) -> None:
        """Release everything. Errors of threads are not raised, because their tensors are given up."""
        if not self._process.is_here():
            return
        with self._lock:
            self._window.empty()
            self._threads.close()
            self.staging.close()

    @property
    def is_own_process(self) -> bool:
        """Whether this is no forked child."""
        return self._process.is_here()

    def require_own_process(self) -> None:
        """Raise in a forked child. See NOTE [fork] in stores.py."""
        self._process.require()

    @property
    def in_flight_bytes(self) -> int:
        """The bytes of sources that are kept until they are copied, but for those that linger. At most `window_bytes`
        after every call."""
        return self._window.num_bytes

    def _compute(self, tensor: torch.Tensor) -> torch.Stream:
        return torch.accelerator.current_stream(tensor.device)

    def _stage(self, ticket: Ticket) -> Ticket | None:
        """Reserve pinned memory for a tensor on its way to or from the disk; None if it is too large for that."""
        layout = Layout.of(torch.empty(ticket.num_bytes, dtype=torch.uint8, device="meta"))
        while True:
            try:
                return self.staging.reserve(layout)
            except StoreFullError:
                if not self._threads.wait_for_a_write():
                    return None


def _digest(line: torch.Tensor) -> torch.Tensor:
    """Return a digest of a tensor's bytes, computed on its device in the order of the current stream."""
    wide = line.view(torch.int32) if line.numel() % 4 == 0 and line.storage_offset() % 4 == 0 else line
    return wide.sum(dtype=torch.int64)


def _write(ticket: Ticket, source: torch.Tensor) -> None:
    try:
        ticket.store.write(ticket, [source])
    except BaseException:
        ticket.rescue(source)
        raise


def _host_parts(target: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield host memory to read into, in chunks. Each is copied to the target before the next is asked for."""
    for chunk in target.split(CHUNK_BYTES):
        if chunk.device.type == "cpu":
            yield chunk
        else:
            host = torch.empty(chunk.numel(), dtype=torch.uint8, device="cpu")
            yield host
            chunk.copy_(host)


class Arrival:
    """A tensor on its way back."""

    def __init__(self, transfers: Transfers, ticket: Ticket, line: torch.Tensor) -> None:
        self.ticket = ticket
        self.line = line
        self.stream: torch.Stream | None = None
        self.allocated: torch.Event | None = None
        self.event: torch.Event | None = None
        self.job: Job | None = None
        self.staged: Ticket | None = None
        self._transfers = transfers
        self._waited = False

    @property
    def source(self) -> Ticket:
        """Where it comes from."""
        return self.ticket

    def is_here(self) -> bool:
        """Whether waiting would take no time."""
        return (self.job is None or self.job.done()) and (self.event is None or self.event.query())

    def wait(self) -> torch.Tensor:
        """Return the tensor for the current stream. Raise what its read raised."""
        self._transfers.require_own_process()
        if not self._waited:
            self._transfers.stats.num_hits += self.is_here()
        if self.job is not None:
            with self._transfers.stats.blocking():
                concurrent.futures.wait([self.job])
            self._check_read()
        if self.staged is not None:
            self._transfers.finish_staged(self)
        if self.event is not None:
            stream_order.order(torch.accelerator.current_stream(self.line.device), self.event, "compute after arrival")
        self._waited = True
        self._check_digest()
        return self.ticket.layout.rebuild(self.line)

    def give_up(self) -> None:
        """Let go of the memory of a tensor that nobody will wait for."""
        if self.event is not None and not self._waited:
            stream_order.order(self.stream, self.event, "reuse after unread arrival")
        self._waited = True
        staged, self.staged, self.line = self.staged, None, torch.empty(0, device="cpu")
        if staged is not None:
            self._transfers.staging.free(staged)

    def _check_digest(self) -> None:
        sent = self.ticket.digest
        if sent is not None and int(sent) != int(_digest(self.line.view(torch.uint8))):
            raise OffloadError(
                f"a tensor of {show_bytes(self.ticket.num_bytes)} came back from the {self.ticket.store.name} store "
                "changed: a transfer was overtaken by compute. Please report this; async_offload=False avoids it"
            )

    def _check_read(self) -> None:
        """Raise what the read raised. The traceback keeps this arrival alive, so the arrival lets go of its memory."""
        assert self.job is not None
        if self.job.exception() is not None:
            self.give_up()
        self.job.result()

    def __del__(self) -> None:
        if not getattr(self, "_waited", True) and self.event is not None:  # absent: Ctrl-C in the middle of `__init__`
            stream_order.order(self.stream, self.event, "reuse after unread arrival")
