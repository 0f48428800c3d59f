"""Stores: where tensors wait. A store takes a tensor and gives it back, bit for bit, with its shape and strides.

    ticket = store.put(tensor)      # blocking; `transfers.Transfers` does the same beside compute
    tensor = store.get(ticket)      # on the device that it came from
    store.free(ticket)              # a ticket that dies unfreed is freed at the store's next operation

`HostStore` (host.py) keeps bytes in pinned memory, `DiskStore` (disk.py) in an unlinked file, `TieredStore` fills the
first tier up to its budget and then the next, `ShapeStore` keeps no bytes at all (rehearsals on fake tensors).

A ticket records dtype, shape and stride, and only the bytes that the tensor needs travel:

- dense memory in any order of dimensions travels as it lies, and comes back with the same strides;
- expanded dimensions (stride 0) travel once, and come back expanded;
- overlapping windows travel as the memory that they span;
- a view with gaps is packed first (one temporary of its own size on the device) and comes back with its strides, so
  it spans its gaps again. A caller with many views of one storage should send the storage once instead.

NOTE [fork]: a forked child has the parent's stores, but a file on disk is one file for both, and the parent's threads
do not exist in the child. What the child writes would silently overwrite the parent's data, and the child would wait
for ever for the work of a thread. So a store belongs to the process that made it. Using it in another process raises.
Releasing it there (finalizers do, when the child ends) does nothing, and takes no lock, because a thread that does not
exist may hold it. A fork copies memory, so stores in memory serve the child as its own.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch

from memscale._errors import OffloadError, StoreFullError
from memscale._units import show_bytes
from memscale.techniques.offload.pinned import PAGE_BYTES
from memscale.techniques.offload.store.spot_jobs import Job, SpotJobs

PART_BYTES = PAGE_BYTES
"""Bytes are moved in multiples of this, except at their end, because direct I/O moves whole blocks."""


def can_store(tensor: torch.Tensor) -> bool:
    """Whether a store can take a tensor: it has plain strided memory and is no subclass with tensors inside."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory, and how it is rebuilt from its bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    span: int
    """The number of elements from the first to the last in memory."""
    has_gaps: bool
    """Whether the tensor travels packed and is spread out again when it is back."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        span = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        return cls(tensor.dtype, shape, stride, tensor.device, span, span > math.prod(_collapsed(shape, stride)))

    @property
    def num_elements(self) -> int:
        """The number of elements that travel."""
        return math.prod(_collapsed(self.shape, self.stride)) if self.has_gaps else self.span

    @property
    def num_bytes(self) -> int:
        """The number of bytes that travel."""
        return self.num_elements * self.dtype.itemsize

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bytes that travel as one line of uint8, in the same memory unless there are gaps or lazy signs."""
        tensor = tensor.detach()
        if self.has_gaps:
            line = tensor.as_strided(_collapsed(self.shape, self.stride), self.stride).contiguous().view(-1)
        else:
            line = tensor.as_strided((self.span,), (1,))
        return line.resolve_conj().resolve_neg().view(torch.uint8)

    def empty(self, device: torch.device | None = None) -> torch.Tensor:
        """Return memory for the bytes that travel, as one line of this dtype."""
        return torch.empty(self.num_elements, dtype=self.dtype, device=self.device if device is None else device)

    def rebuild(self, line: torch.Tensor) -> torch.Tensor:
        """Return the tensor from its line of elements. It shares the line's memory unless it has gaps."""
        if not self.has_gaps:
            return line.as_strided(self.shape, self.stride)
        small = _collapsed(self.shape, self.stride)
        spread = torch.empty(self.span, dtype=self.dtype, device=line.device)
        spread.as_strided(small, self.stride).copy_(line.view(small))
        return spread.as_strided(self.shape, self.stride)


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """Some elements of a tensor without gaps, in the order in which they lie in memory."""

    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements, in the tensor's own memory."""
        line = tensor.detach().as_strided((tensor.numel(),), (1,))
        return line[self.start : self.stop]

    def layout(self, dtype: torch.dtype, device: torch.device) -> Layout:
        """Return the layout of a tensor that holds these elements alone."""
        count = self.stop - self.start
        return Layout(dtype, (count,), (1,), device, count, False)


def _collapsed(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with length 1 for every expanded dimension."""
    return tuple(1 if step == 0 and n > 1 else n for n, step in zip(shape, stride, strict=True))


EventType = TypeVar("EventType")


class Ticket:
    """The claim on one waiting tensor. Its leaf store owns it; `Transfers` keeps its events on it."""

    __slots__ = (
        "__weakref__",
        "digest",
        "freed",
        "layout",
        "num_bytes",
        "place",
        "read",
        "reads_of_parts",
        "sent",
        "spot",
        "spot_jobs",
        "store",
        "writes_of_parts",
        "written",
    )

    def __init__(self, store: Store, layout: Layout, spot: Any) -> None:
        self.store = store
        self.layout = layout
        self.num_bytes = layout.num_bytes
        self.digest: torch.Tensor | None = None
        """A digest of the bytes that were sent, on their device, with `debug`."""
        self.written: Fence | None = None
        """The last copy into the store; every reader waits for it, and so does a host that writes there."""
        self.read: Fence | None = None
        """The last copy out of the store; the next writer to the same memory waits for it."""
        self.spot_jobs = SpotJobs()
        """What threads do with its bytes; the tickets of its parts have it in common."""
        self.sent: Any = None
        """The source on its way to the store; `Transfers` keeps it alive."""
        self.place: tuple[int, int] = (0, layout.num_bytes)
        """The bytes of the whole that it stands for: from, and up to."""
        self.writes_of_parts: PartEvents[Fence] = PartEvents()
        self.reads_of_parts: PartEvents[Fence] = PartEvents()
        self.spot = spot
        self.freed = False  # last: until here, `__del__` leaves it alone

    def part(self, layout: Layout, offset: int, spot: Any) -> Ticket:
        """Return a ticket for a stretch of its bytes, which waits for copies of those bytes alone."""
        part = Ticket(self.store, layout, spot)
        part.freed, part.place = True, (offset, offset + layout.num_bytes)
        part.spot_jobs = self.spot_jobs
        part.written = self.writes_of_parts.of(part.place, self.written)
        part.read = self.reads_of_parts.of(part.place, self.read)
        return part

    def note_written(self, part: Ticket) -> None:
        """Note that a part, or the whole by itself, is being written. Does nothing if the copy was never begun."""
        if part is not self and part.written is not None and part.written.is_after(self.written):
            self.writes_of_parts.note(part.place, part.written)
            self.written = part.written

    def note_read(self, part: Ticket) -> None:
        """Note that a part, or the whole by itself, is being read. Does nothing if the copy was never begun."""
        if part is not self and part.read is not None and part.read.is_after(self.read):
            self.reads_of_parts.note(part.place, part.read)
            self.read = part.read

    @property
    def jobs(self) -> list[Job]:
        """The jobs of threads that still use any of its bytes."""
        return self.spot_jobs.using(self.place)

    @property
    def write_jobs(self) -> list[Job]:
        """The threaded writes of its bytes, done or not; every reader waits for them too."""
        return self.spot_jobs.writes_of(self.place)

    @property
    def rescued(self) -> torch.Tensor | None:
        """The bytes, on the host, after a write of them failed: an error loses nothing."""
        return self.spot_jobs.rescued.get(self.place)

    def rescue(self, line: torch.Tensor) -> None:
        """Keep its bytes, which could not be written."""
        self.spot_jobs.rescued[self.place] = line

    def wait_written(self) -> None:
        """Block until the bytes are in the store; raise what the write raised."""
        self.store.process.require()
        for job in self.write_jobs:
            job.result()
        if self.written is not None:
            self.written.event.synchronize()

    def __del__(self) -> None:
        # Garbage may be collected while one of our own locks is held, so this only leaves a note.
        if not getattr(self, "freed", True) and not self.store.closed:  # absent: Ctrl-C in the middle of `__init__`
            self.store.abandoned.append(self)


class PartEvents(Generic[EventType]):
    """The last events of the parts of a waiting tensor.

    Copies of one kind are on one stream, so the last of them stands for all that came before it. A part that waited for
    the last copy of any part would wait for copies that are no concern of its own, and the link would idle.
    """

    def __init__(self) -> None:
        self._latest: EventType | None = None
        self._before: EventType | None = None
        """The last event of the whole before the first of the parts."""
        self._by_place: dict[tuple[int, int], EventType] = {}

    def of(self, place: tuple[int, int], latest: EventType | None) -> EventType | None:
        """Return what a part must wait for; `latest` is the last event of the whole or of any part."""
        if latest is not self._latest:  # the whole was copied since
            self._latest = self._before = latest
            self._by_place.clear()
        if place in self._by_place:
            return self._by_place[place]
        return self._latest if self._is_cut_otherwise(place) else self._before

    def note(self, place: tuple[int, int], event: EventType) -> None:
        if place not in self._by_place and self._is_cut_otherwise(place):
            self._by_place.clear()
            self._before = event
        self._by_place[place] = self._latest = event

    def _is_cut_otherwise(self, place: tuple[int, int]) -> bool:
        """Whether this part overlaps with parts that it is not one of."""
        return any(start < place[1] and place[0] < stop for start, stop in self._by_place)


@dataclasses.dataclass(frozen=True, slots=True)
class Fence:
    """An event with its place in the order of its stream."""

    order: int
    event: torch.Event

    def is_after(self, other: Fence | None) -> bool:
        return other is None or self.order > other.order


@dataclasses.dataclass(slots=True)
class StoreCounters:
    """The bytes that one store moves and holds."""

    bytes_in: int = 0
    bytes_out: int = 0
    held_bytes: int = 0
    """The bytes in use now."""
    peak_held_bytes: int = 0
    allocated_bytes: int = 0
    """The bytes taken from the tier: memory as it is rounded, or the file's reserved length. Never above the budget."""
    peak_allocated_bytes: int = 0
    requested_bytes: int = 0
    """The bytes requested from the tier, before its rounding."""

    def hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_held_bytes = max(self.peak_held_bytes, self.held_bytes)

    def allocate(self, requested_bytes: int, allocated_bytes: int) -> None:
        self.requested_bytes += requested_bytes
        self.allocated_bytes += allocated_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)


class Process:
    """The process that made a store. See NOTE [fork]."""

    def __init__(self, what: str, *, survives_fork: bool = False) -> None:
        self._what = what
        self._pid = os.getpid()
        self._survives_fork = survives_fork

    def is_here(self) -> bool:
        return self._survives_fork or os.getpid() == self._pid

    def require(self) -> None:
        """Raise in any other process."""
        if not self.is_here():
            raise OffloadError(
                f"{self._what} belongs to process {self._pid}, and this is process {os.getpid()}, which was forked "
                "from it: what waits there is the parent's. Train in the parent, call memscale.detach(model) before "
                "the fork, or start the child with the 'spawn' method and wrap its model there"
            )


class Store:
    """What every tier has in common: tickets, counters and blocking moves.

    A tier says how to `_reserve` a spot, `_release` it, and `write`/`read` bytes of host memory at an offset of it.
    All methods may be called from any thread.
    """

    name = "store"
    in_memory = False
    """Whether its spots are host memory (`memory_of`), which a device can copy to and from directly."""
    keeps_bytes = True
    survives_fork = True
    """Whether a forked child has all of it as its own. See NOTE [fork]."""

    def __init__(self, budget_bytes: int | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.process = Process(f"this {self.name} store", survives_fork=self.survives_fork)
        self.counters = StoreCounters()
        self.closed = False
        self.abandoned: collections.deque[Ticket] = collections.deque()
        self.freed_read: Fence | None = None
        """The latest copy out of memory that has been freed. See NOTE [memory returns after its event]."""
        self.freed_written: Fence | None = None
        """The latest copy into memory that has been freed."""
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------------------- tickets

    def reserve(self, layout: Layout, cuts: Sequence[int] = ()) -> Ticket:
        """Reserve room for a tensor. Raise `StoreFullError` if there is none.

        `cuts`: the bytes, in ascending order, at which parts of it will begin or end (`part_of`).
        """
        self.process.require()
        self.sweep()
        with self._lock:
            assert not self.closed, f"the {self.name} store is closed"
            ticket = Ticket(self, layout, self._reserve(layout.num_bytes, cuts))
            self.counters.hold(ticket.num_bytes)
            return ticket

    def free(self, ticket: Ticket) -> None:
        """Return the room. A second call does nothing.

        NOTE [memory returns after its event]: memory may be freed while the last copy out of it, or into it, is still
        running. The latest ones are remembered. The next copy into this store's memory waits on its stream for the one
        out of it, and comes after the one into it on the same stream. A host that writes there waits for both.
        """
        if ticket.store is not self:
            ticket.store.free(ticket)
            return
        if not self.process.is_here():
            return
        concurrent.futures.wait(ticket.jobs)  # the room is free only when no thread reads or writes there
        with self._lock:
            if ticket.freed or self.closed:
                return
            ticket.freed = True
            if ticket.read is not None and ticket.read.is_after(self.freed_read):
                self.freed_read = ticket.read
            if ticket.written is not None and ticket.written.is_after(self.freed_written):
                self.freed_written = ticket.written
            self.counters.hold(-ticket.num_bytes)
            self._release(ticket.spot, ticket.num_bytes)

    def sweep(self) -> None:
        """Free the tickets that died unfreed."""
        while self.abandoned:
            self.free(self.abandoned.popleft())

    # -------------------------------------------------------------------------------------------- blocking moves

    def put(self, tensor: torch.Tensor) -> Ticket:
        """Store a tensor. Blocks until it is there."""
        layout = Layout.of(tensor)
        ticket = self.reserve(layout)
        try:
            self.fill(ticket, tensor)
        except BaseException:
            self.free(ticket)
            raise
        return ticket

    def fill(self, ticket: Ticket, tensor: torch.Tensor) -> None:
        """Replace the waiting tensor by another of the same layout."""
        ticket.store.write(ticket, [ticket.layout.flatten(tensor).cpu()])

    def get(
        self, ticket: Ticket, out: torch.Tensor | None = None, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return the tensor in `out`'s memory, or in new memory on `device` or on the device that it came from."""
        ticket.wait_written()
        line = ticket.layout.empty(torch.device("cpu"))
        ticket.store.read(ticket, [line.view(torch.uint8)])
        if out is not None:
            out.copy_(ticket.layout.rebuild(line))
            return out
        return ticket.layout.rebuild(line.to(ticket.layout.device if device is None else device))

    def write(self, ticket: Ticket, parts: Iterable[torch.Tensor]) -> None:
        """Write all of a tensor's bytes, from host memory, to the spot. Blocks.

        Parts are read one after another; all but the last have a length in multiples of `PART_BYTES`.
        """
        raise NotImplementedError

    def read(self, ticket: Ticket, parts: Iterable[torch.Tensor]) -> None:
        """Read the spot's bytes into parts of host memory, one after another. Blocks."""
        raise NotImplementedError

    def part_of(self, ticket: Ticket, layout: Layout, offset: int) -> Ticket:
        """Return a ticket for a stretch of a waiting tensor; only the whole is freed.

        On disk, parts begin and end where room for the tensor was reserved in pieces (`reserve(cuts=)`).
        """
        raise NotImplementedError

    def memory_of(self, ticket: Ticket) -> list[torch.Tensor]:
        """Return the spot's host memory in pieces (stores in memory only)."""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------- tiers

    def _reserve(self, num_bytes: int, cuts: Sequence[int]) -> Any:
        raise NotImplementedError

    def _release(self, spot: Any, num_bytes: int) -> None:
        raise NotImplementedError

    def room_bytes(self) -> int | None:
        """The bytes that it can still take; None if no limit is known."""
        return None if self.budget_bytes is None else self.budget_bytes - self.counters.held_bytes

    def require_room(self, num_bytes: int) -> None:
        """Raise unless there is room for this many bytes, so that a run fails before it starts."""
        room = self.room_bytes()
        if room is not None and num_bytes > room:
            raise StoreFullError(
                f"{show_bytes(num_bytes)} are to wait outside the device and the {self.name} store has room for "
                f"{show_bytes(room)}; raise max_cpu_offload_gb, or set offload_dir to a disk with more space"
            )

    def leaves(self) -> tuple[Store, ...]:
        """The tiers that hold bytes, first to last."""
        return (self,)

    def close(self) -> None:
        """Return everything to the tier. A second call does nothing."""
        with self._lock:
            self.closed = True
            self.abandoned.clear()


class TieredStore(Store):
    """A store that fills the first tier up to its budget and then the next."""

    name = "tiered"

    def __init__(self, *tiers: Store) -> None:
        super().__init__()
        self.tiers = tiers

    def reserve(self, layout: Layout, cuts: Sequence[int] = ()) -> Ticket:
        refusals = []
        for tier in self.tiers:
            try:
                return tier.reserve(layout, cuts)
            except StoreFullError as error:
                refusals.append(str(error))
        raise StoreFullError("; ".join(refusals))

    def sweep(self) -> None:
        for tier in self.tiers:
            tier.sweep()

    def room_bytes(self) -> int | None:
        rooms = [tier.room_bytes() for tier in self.tiers]
        return None if None in rooms else sum(room for room in rooms if room is not None)

    def leaves(self) -> tuple[Store, ...]:
        return tuple(leaf for tier in self.tiers for leaf in tier.leaves())

    def close(self) -> None:
        super().close()
        for tier in self.tiers:
            tier.close()


class ShapeStore(Store):
    """Keeps shapes, not bytes: for rehearsals on fake tensors, whose values do not exist."""

    name = "shape"
    keeps_bytes = False

    def _reserve(self, num_bytes: int, cuts: Sequence[int]) -> None:
        self.counters.bytes_in += num_bytes

    def _release(self, spot: None, num_bytes: int) -> None:
        pass
