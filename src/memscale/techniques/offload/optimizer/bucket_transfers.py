"""A bucket's state visits its device: it is fetched ahead, unpacked for the step, packed and sent away again."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch

from memscale._errors import OffloadError
from memscale.techniques.offload.optimizer.buckets import Bucket, Slot, Waiting, own_copy, rounded
from memscale.techniques.offload.optimizer.separable import State
from memscale.techniques.offload.store.stores import PART_BYTES, Layout, Store, Stretch, Ticket, TieredStore
from memscale.techniques.offload.transfer.transfers import Arrival, Transfers

Entries = MutableMapping[Any, Any]
"""`optimizer.state`."""


@dataclasses.dataclass(slots=True)
class OptimizerStats:
    """What the adopted optimizers did. The time that they waited is in the statistics of the transfers."""

    num_optimizers: int = 0
    num_steps: int = 0
    num_buckets: int = 0
    """The number of buckets stepped, over all steps."""
    bytes_to_store: int = 0
    bytes_from_store: int = 0
    num_prefetched: int = 0
    """The number of buckets whose state was requested before it was needed."""
    num_hits: int = 0
    """How many of the prefetched buckets were there in time."""
    num_early: int = 0
    """The number of buckets whose state was requested before the step began."""
    num_late: int = 0
    """The number of buckets whose state still left when the step was over."""
    largest_bucket_bytes: int = 0
    """The state bytes of the largest bucket; the device holds at most twice as many."""
    waiting_bytes: int = 0
    """The bytes that lie in buckets between steps."""
    packed_bytes: int = 0
    """The part of `waiting_bytes` that is packed state. See NOTE [packed state]."""
    unpacked_bytes: int = 0
    """The bytes that the packed state would take unpacked."""


@dataclasses.dataclass(slots=True)
class Visit:
    """The state of a bucket's parameters on their device."""

    state: State
    memory: torch.Tensor | None = None
    """The memory of the part of the state that waits between steps."""
    views: dict[tuple[int, Any], torch.Tensor] = dataclasses.field(default_factory=dict)
    device: torch.device | None = None
    """Where the state is; None means where the bucket is stepped."""


class Visits:
    """Brings buckets to their device and back.

    NOTE [a failed write]: the bytes are still in memory. The entries become ordinary dicts again, on the host or the
    device, and the next step takes the state from them. The error is kept in `failures`.
    """

    def __init__(
        self, store: Store | None, transfers: Transfers | None, stats: OptimizerStats, host_has_room: bool = False
    ) -> None:
        self.store = store
        self._transfers = transfers
        self.stats = stats
        self.failures: list[OffloadError] = []
        disks = [leaf for leaf in store.leaves() if not leaf.in_memory] if store is not None else []
        self._below_host = TieredStore(*disks) if disks and not host_has_room else None

    @property
    def transfers(self) -> Transfers:
        assert self._transfers is not None, "only what has a ticket moves"
        return self._transfers

    @property
    def is_asynchronous(self) -> bool:
        return self._transfers is not None and self._transfers.asynchronous

    def tier_of(self, device: torch.device) -> Store | None:
        """Return the store in which state of this device waits. For state on the CPU, only a disk is another tier."""
        return self._below_host if device.type == "cpu" else self.store

    # ------------------------------------------------------------------------------------------------------- in

    def start(self, entries: Entries, bucket: Bucket) -> Arrival | None:
        """Start fetching the part of a bucket's state that waits."""
        self.recover(bucket)
        if not has_waiting(entries, bucket):
            return None
        assert bucket.ticket is not None
        self.stats.bytes_from_store += bucket.num_bytes
        return self.transfers.fetch(bucket.ticket, out=_empty(bucket.num_bytes, bucket.device))

    def bring(
        self, entries: Entries, bucket: Bucket, arrival: Arrival | None = None, *, is_ahead: bool = False
    ) -> Visit:
        """Return the bucket's state on its device: waiting state is unpacked, everything else is as it is."""
        if arrival is not None and is_ahead:
            self.stats.num_prefetched += 1
            self.stats.num_hits += arrival.is_here()
        arrival = arrival if arrival is not None else self.start(entries, bucket)
        memory = arrival.wait() if arrival is not None else bucket.memory
        views = {**bucket.views(memory), **bucket.unpacked(memory)} if memory is not None else {}
        state: State = {}
        for index, parameter in enumerate(bucket.parameters):
            entry = entries.get(parameter)
            if entry is None:
                continue
            if isinstance(entry, Waiting) and bucket.is_waiting(index, entry):
                state[parameter] = {name: views.get((index, name), value) for name, value in entry.kept.items()}
            else:
                state[parameter] = _at_home(bucket, index, entry)
        return Visit(state, memory, views)

    # ------------------------------------------------------------------------------------------------------ out

    def park(self, entries: Entries, bucket: Bucket, state: State, visit: Visit, *, exactly: bool = False) -> None:
        """Pack the state that the step left and send it away. `exactly` says that it may have been packed before."""
        slots = tuple(bucket.plan(state, visit.views))
        if slots != bucket.slots or visit.memory is None:
            self._lay_out(bucket, slots, visit)
        if visit.memory is None:
            _write_back(entries, state)
            return
        for slot in bucket.slots:
            value = state[bucket.parameters[slot.index]][slot.name]
            if slot.packing is not None:
                slot.pack(visit.memory, value, exactly=exactly)
                visit.views[slot.index, slot.name] = value
            elif visit.views[slot.index, slot.name] is not value:  # this step made a new tensor
                visit.views[slot.index, slot.name].copy_(value)
        try:
            if bucket.moves:
                self._send(bucket, visit.memory)
            else:
                bucket.memory = visit.memory
        except OffloadError as error:
            self.failures.append(error)
            self._keep(entries, bucket, state, visit)
            return
        for index, parameter in enumerate(bucket.parameters):
            if parameter in state:
                entries[parameter] = bucket.wait_for(index, state[parameter], entries.get(parameter))

    def _reserve(self, bucket: Bucket, slots: tuple[Slot, ...]) -> None:
        """Give the bucket these slots, and drop its ticket if they do not fit it: by their size, or their stretches."""
        num_bytes = sum(rounded(slot.span_bytes) for slot in slots)
        if num_bytes != bucket.num_bytes or (bucket.stretches and slots != bucket.slots):
            self.drop(bucket)
        self._count(bucket.slots, -1)
        self._count(slots, +1)
        bucket.slots, bucket.num_bytes = slots, num_bytes
        self.stats.largest_bucket_bytes = max(self.stats.largest_bucket_bytes, num_bytes)

    def _lay_out(self, bucket: Bucket, slots: tuple[Slot, ...], visit: Visit) -> None:
        """Give the bucket other slots than before, in new memory."""
        self._reserve(bucket, slots)
        visit.memory = _empty(bucket.num_bytes, visit.device or bucket.device) if slots else None
        visit.views = bucket.views(visit.memory) if visit.memory is not None else {}

    def lay_out_whole(self, bucket: Bucket, dtypes: Mapping[Any, torch.dtype]) -> None:
        """Reserve room for the state of a parameter that comes in stretches: tensors of its shape, by name."""
        parameter, slots, offset = bucket.parameters[0], [], 0
        for name, dtype in dtypes.items():
            num_bytes = parameter.numel() * dtype.itemsize
            slots.append(Slot(0, name, offset, dtype, tuple(parameter.shape), parameter.stride(), num_bytes))
            offset += rounded(num_bytes)
        self._reserve(bucket, tuple(slots))
        tier = self.tier_of(bucket.device)
        if slots and bucket.ticket is None:
            assert tier is not None
            layout = Layout(torch.uint8, (offset,), (1,), bucket.device, offset, False)
            bucket.ticket = tier.reserve(layout, bucket.cuts())

    def _count(self, slots: tuple[Slot, ...], sign: int) -> None:
        for slot in slots:
            self.stats.waiting_bytes += sign * slot.span_bytes
            if slot.packing is not None:
                self.stats.packed_bytes += sign * slot.span_bytes
                self.stats.unpacked_bytes += sign * math.prod(slot.shape) * slot.dtype.itemsize

    def _send(self, bucket: Bucket, memory: torch.Tensor) -> None:
        if bucket.ticket is None:
            tier = self.tier_of(bucket.device)
            assert tier is not None
            bucket.ticket = tier.reserve(Layout.of(memory), bucket.cuts())
        self.transfers.send(memory, bucket.ticket)
        self.stats.bytes_to_store += bucket.num_bytes

    def _keep(self, entries: Entries, bucket: Bucket, state: State, visit: Visit) -> None:
        """Keep the state on the device, in memory of its own. See NOTE [a failed write]."""
        for index, parameter in enumerate(bucket.parameters):
            if parameter in state:
                names = bucket.names_of(index)
                entries[parameter] = {
                    name: own_copy(visit.views[index, name]) if name in names else value
                    for name, value in state[parameter].items()
                }
        self.drop(bucket)

    def let_go(self, bucket: Bucket) -> None:
        """Free the memory that the bucket was sent from: its stream, or this thread, waits for the copy."""
        if bucket.ticket is not None:
            self.transfers.wait_sent(bucket.ticket)
            if any(job.done() for job in bucket.ticket.write_jobs):
                self.recover(bucket)

    def recover(self, bucket: Bucket) -> None:
        """Give the entries their state again if writing this bucket, or a part of it, failed.

        See NOTE [a failed write]. Of a bucket that comes in stretches, all have been stepped.
        """
        if bucket.ticket is None or not (bucket.ticket.write_jobs or bucket.ticket.spot_jobs.rescued):
            return
        self.transfers.require_own_process()
        jobs = bucket.ticket.write_jobs
        concurrent.futures.wait(jobs)
        failures = []
        for error in (job.exception() for job in jobs):
            if isinstance(error, OffloadError):
                failures.append(error)
            elif error is not None:
                raise error
        if failures or bucket.ticket.spot_jobs.rescued:
            bucket.check_out()
            self.failures += failures
            self.drop(bucket)

    # --------------------------------------------------------------------------------------------------- the end

    def restore(self, entries: Entries, buckets: Iterable[Bucket]) -> list[OffloadError]:
        """Make every entry an ordinary dict on its device. Return the errors of failed reads: that state is lost."""
        lost: list[OffloadError] = []
        for bucket in buckets:
            try:
                self._restore_one(entries, bucket)
            except OffloadError as error:
                lost.append(error)
                for index, parameter in enumerate(bucket.parameters):
                    if bucket.is_waiting(index, entries.get(parameter)):
                        del entries[parameter]
            self.drop(bucket)
        return lost

    def _restore_one(self, entries: Entries, bucket: Bucket) -> None:
        if bucket.has_guests:
            self._restore_guests(entries, bucket)
            return
        visit = self.bring(entries, bucket)
        for index, parameter in enumerate(bucket.parameters):
            entry = entries.get(parameter)
            if isinstance(entry, Waiting):
                values = visit.state[parameter]
                packed, device = bucket.packed_names_of(index), parameter.device
                tensors = {
                    name: (view if name in packed else own_copy(view)).to(device)
                    for (i, name), view in visit.views.items()
                    if i == index
                }
                if bucket.is_waiting(index, entry):
                    entry.fill(tensors)
                    values = {**values, **tensors}
                entries[parameter] = values

    def _restore_guests(self, entries: Entries, bucket: Bucket) -> None:
        """Move the state of guests straight to where they live, not by way of the device."""
        self.recover(bucket)
        if has_waiting(entries, bucket):
            bucket.check_out()
        for index, parameter in enumerate(bucket.parameters):
            entry, names = entries.get(parameter), bucket.names_of(index)
            if isinstance(entry, Waiting):
                entries[parameter] = {
                    name: value.to(parameter.device) if name in names else value for name, value in entry.items()
                }

    def dissolve(self, entries: Entries, bucket: Bucket) -> None:
        """Turn the bucket's entries into ordinary dicts."""
        self._restore_one(entries, bucket)
        self.drop(bucket)

    def drop(self, bucket: Bucket) -> None:
        """Free what the store has of a bucket."""
        if bucket.ticket is not None:
            self.transfers.wait_sent(bucket.ticket)
            self.transfers.free(bucket.ticket)
        bucket.memory = bucket.kept = None
        bucket.ticket = None  # the slots stay: they say which tensors belong on the device


def has_waiting(entries: Entries, bucket: Bucket) -> bool:
    """Whether any of the bucket's state lies where it waits: nobody has looked at it since."""
    return bucket.ticket is not None and any(
        bucket.is_waiting(index, entries.get(p)) for index, p in enumerate(bucket.parameters)
    )


class StretchVisit:
    """The state of a stretch of one parameter's elements on the device. See NOTE [stretches] in buckets.py.

    visit = StretchVisit(visits, entries, bucket, stretch)      # its state is on its way
    state = visit.bring()
    visit.park(stepped)                                         # and back again
    visit.let_go()
    """

    def __init__(self, visits: Visits, entries: Entries, bucket: Bucket, stretch: Stretch) -> None:
        self._visits, self._entries, self._bucket, self._stretch = visits, entries, bucket, stretch
        self._memory: torch.Tensor | None = None
        self._views: dict[Any, torch.Tensor] = {}
        self._parts: list[Ticket] = []
        self._arrivals: list[Arrival] = []
        self._source = bucket.ticket
        if stretch.start == 0:
            visits.recover(bucket)  # later, stretches of the step that is under way may have failed
        if has_waiting(entries, bucket):
            self._lay_out()
            self._arrivals = [self._fetch(slot) for slot in bucket.slots]

    @property
    def source(self) -> Ticket | None:
        """Where the state was fetched from."""
        return self._source

    @property
    def stream(self) -> torch.Stream | None:
        """The stream that has allocated the memory of what is coming."""
        return self._arrivals[0].stream if self._arrivals else None

    @property
    def sent(self) -> list[Ticket]:
        """What is on its way out."""
        return [*self._parts]

    def give_up(self) -> None:
        """Let go of what nobody will step."""
        while self._arrivals:
            self._arrivals.pop().give_up()
        self._memory, self._views = None, {}

    def _lay_out(self) -> None:
        count, offset = self._stretch.stop - self._stretch.start, 0
        sizes = [count * slot.dtype.itemsize for slot in self._bucket.slots]
        self._memory = _empty(sum(map(rounded, sizes)), self._bucket.device)
        for slot, size in zip(self._bucket.slots, sizes, strict=True):
            self._views[slot.name] = self._memory.narrow(0, offset, size).view(slot.dtype)
            offset += rounded(size)

    def _fetch(self, slot: Slot) -> Arrival:
        part, whole = self._bucket.part(slot, self._stretch), self._bucket.ticket
        assert whole is not None
        try:
            arrival = self._visits.transfers.fetch(part, out=self._views[slot.name])
        finally:  # a copy that failed may have begun
            whole.note_read(part)
        self._visits.stats.bytes_from_store += part.num_bytes
        return arrival

    def bring(self) -> State:
        """Return the existing state of this stretch; counters are copies."""
        parameter = self._bucket.parameters[0]
        entry = self._entries.get(parameter)
        if entry is None:
            return {}
        self._wait()
        if self._memory is not None:
            values = {name: self._views.get(name, value) for name, value in entry.kept.items()}
        else:
            values = {name: self._cut(value) for name, value in entry.items()}
        return {parameter: {name: _counter(value) for name, value in values.items()}}

    def _wait(self) -> None:
        try:
            while self._arrivals:
                self._arrivals.pop(0).wait()
        except BaseException:  # the traceback keeps this visit alive
            self.give_up()
            raise

    def _cut(self, value: Any) -> Any:
        is_whole = isinstance(value, torch.Tensor) and value.numel() == self._bucket.parameters[0].numel()
        return self._stretch.of(value).to(self._bucket.device) if is_whole and value.dim() else value

    def park(self, state: State) -> None:
        """Send the state that the step left of this stretch. After the last stretch the parameter's state waits."""
        bucket, parameter = self._bucket, self._bucket.parameters[0]
        values = state.get(parameter, {})
        made = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.dim()}
        if self._stretch.start == 0 and self._memory is None:
            self._reserve(made)
        if bucket.kept is not None:
            self._keep(bucket.kept, made, values)
            return
        if self._memory is None and bucket.slots:
            self._lay_out()
        for slot in bucket.slots:
            view = self._views[slot.name]
            if made[slot.name] is not view:
                view.copy_(made[slot.name])
            self._send(slot, view)
        self._memory, self._views = None, {}  # the transfers keep what has not left yet
        if self._stretch.stop < parameter.numel():
            return
        if bucket.slots:
            self._entries[parameter] = bucket.wait_for(0, values, self._entries.get(parameter))
            self._recover()
        else:
            _write_back(self._entries, state)

    def _reserve(self, made: Mapping[Any, torch.Tensor]) -> None:
        """Find room for the state of all stretches: in the store or, if that is full, where the parameter lives."""
        bucket, parameter = self._bucket, self._bucket.parameters[0]
        try:
            self._visits.lay_out_whole(bucket, {name: value.dtype for name, value in made.items()})
        except OffloadError as error:  # see NOTE [a failed write]
            self._visits.failures.append(error)
            self._visits.drop(bucket)
            bucket.kept = {name: torch.empty_like(parameter, dtype=value.dtype) for name, value in made.items()}

    def _keep(self, kept: dict[Any, torch.Tensor], made: Mapping[Any, torch.Tensor], values: dict[Any, Any]) -> None:
        """Put this stretch beside the others; after the last one the parameter has an ordinary entry."""
        for name, value in made.items():
            self._stretch.of(kept[name]).copy_(value)
        if self._stretch.stop == self._bucket.parameters[0].numel():
            self._bucket.kept = None
            _write_back(self._entries, {self._bucket.parameters[0]: {**values, **kept}})

    def _send(self, slot: Slot, view: torch.Tensor) -> None:
        part, whole = self._bucket.part(slot, self._stretch), self._bucket.ticket
        assert whole is not None
        try:
            self._visits.transfers.send(view, part)
        except OffloadError as error:  # the other stretches are stepped nevertheless; see NOTE [a failed write]
            self._visits.failures.append(error)
            part.rescue(Layout.of(view).flatten(view).to("cpu", copy=True))
            return
        finally:
            whole.note_written(part)
        self._parts.append(part)
        self._visits.stats.bytes_to_store += part.num_bytes

    def let_go(self) -> None:
        while self._parts:
            self._visits.transfers.wait_sent(self._parts.pop())
        if self._stretch.stop == self._bucket.parameters[0].numel():
            self._recover()

    def _recover(self) -> None:
        """Give the parameter an ordinary entry if a write of one of its stretches is known to have failed."""
        if self._bucket.ticket is not None and self._bucket.ticket.spot_jobs.rescued:
            self._visits.recover(self._bucket)


def _counter(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value


def _write_back(entries: Entries, state: State) -> None:
    """Write back state that does not wait. Its entries stay the same dicts, because others may hold on to them."""
    for parameter, values in state.items():
        entry = entries.get(parameter)
        if entry is None or isinstance(entry, Waiting):
            entries[parameter] = values
        elif entry is not values:
            entry.clear()
            entry.update(values)


def _empty(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return memory for a bucket. On the CPU it is block-aligned, so that a disk moves it without a copy in between."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    memory = torch.empty(num_bytes + PART_BYTES, dtype=torch.uint8, device="cpu")
    return memory.narrow(0, -memory.data_ptr() % PART_BYTES, num_bytes)


def _at_home(bucket: Bucket, index: int, entry: dict[Any, Any]) -> dict[Any, Any]:
    """Return an entry that does not wait. Tensors that are on the host because somebody looked at them go back."""
    names = bucket.names_of(index)
    return {
        name: value.to(bucket.device) if name in names and isinstance(value, torch.Tensor) else value
        for name, value in entry.items()
    }
