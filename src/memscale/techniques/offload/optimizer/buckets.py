"""Buckets: the state of a few parameters in one piece of memory, which travels and waits as one.

NOTE [what a bucket costs]: a bucket's parameters are on one device. Those of at most a sixteenth of `bucket_bytes` (of
parameters) share buckets of their own. The others come in the order of the optimizer's groups, and a bucket closes
before the parameter that would take it beyond `bucket_bytes`; a larger parameter has a bucket of its own, and is cut
into stretches where it can be. Its state bytes S are the sum of its state tensors above 4096 bytes, each rounded up to
512; smaller tensors stay on the device. The device holds at most this much of the state:

- during a step, S of one bucket, S of the next, which is being fetched, and S of the one before, which is leaving (one
  S if transfers are synchronous). A bucket begins when the one before the last has left;
- while a bucket's state is made, twice its S (as the optimizer makes it, and packed) and S of the one that is leaving;
  no other bucket is fetched then;
- while a bucket is stepped whose state stays on the device, S of two buckets that leave and S of the next.

Between steps it holds nothing of what travels. So the most is three times the largest S, beside the temporaries that
the optimizer's own step needs for one bucket.

NOTE [the order of a step]: arriving, stepping and leaving go on side by side, so the slowest of the three sets the
pace. Buckets whose state stays need the link for nothing: they are spread evenly between those that travel
(`step_order`), guests included, so that the link is in use while they are stepped.

NOTE [guests in a bucket]: guests, which live on the host and are stepped on the device, visit it with their gradients
and their state. All of their state waits in the bucket, whatever its size: between steps nothing of these parameters is
on the device but counters that the optimizer keeps there. Beside S the device then holds the bytes of the bucket's
parameters twice, and once on the way back, when the gradients are gone.

NOTE [stretches]: a parameter that is larger than a bucket visits the device a stretch of its elements at a time, or, if
it lives there, its state does. This is done where the optimizer updates an element from that element's values alone,
where the state waits unpacked, in host memory or on disk, and on every device but a CPU: a CPU's kernels round the last
elements of a thread's share otherwise (16-bit SGD does), and a stretch has other shares than the whole. A stretch costs
as much as a bucket of its size. Values that all elements share (counters) advance once: each stretch starts from the
values before the step. The bytes of a stretch that cannot be written stay in host memory (`Ticket.rescued`) until the
last stretch is stepped; then the parameter's state is put together there.

NOTE [packed state]: some tensors may wait in fewer bytes than they have (`Packing`). S then counts the bytes that wait,
and a step holds the unpacked state of one bucket beside them. Where there is no other tier, packed tensors wait in
memory of the bucket on their device, and the others stay as they are.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from memscale._torch.released_gradients import held_gradient
from memscale._units import round_up
from memscale.techniques.offload.store.stores import Layout, Stretch, Ticket, can_store

SMALL_BYTES = 4096
"""State tensors up to this size stay where they are: step counters, tables that all parameters share."""
SMALL_PARTS = 16
"""Parameters of at most this part of a bucket share buckets with one another."""
STRETCH_ELEMENTS = 1024
"""Stretches of a parameter begin at multiples of this."""
SLOT_BYTES = 512
"""Tensors in a bucket start at multiples of this, as an allocator would place them."""


def rounded(num_bytes: int) -> int:
    return round_up(num_bytes, SLOT_BYTES)


def split_into_buckets(sizes: Iterable[int], bucket_bytes: int) -> list[list[int]]:
    """Put parameters together until they would exceed the limit. Return the indices of each bucket.

    Small parameters would cut the sequence into buckets that are too small to keep the link busy. They share buckets.
    """
    buckets: list[list[int]] = []
    filled = {False: 0, True: 0}
    latest: dict[bool, list[int]] = {}
    for index, size in enumerate(sizes):
        is_small = size * SMALL_PARTS <= bucket_bytes
        if is_small not in latest or filled[is_small] + size > bucket_bytes:
            latest[is_small], filled[is_small] = [], 0
            buckets.append(latest[is_small])
        latest[is_small].append(index)
        filled[is_small] += size
    return buckets


def step_order(sizes: Sequence[int], travels: Sequence[bool]) -> list[int]:
    """Return the order in which to step, given the bytes of parameters of each turn. See NOTE [the order of a step].

    Turns that travel keep their order, and so do the others. One of the others comes first, while the first arrives.
    """
    places: list[tuple[float, bool, int]] = []
    for is_away in (False, True):
        turns = [index for index, away in enumerate(travels) if away == is_away]
        total, done = max(1, sum(sizes[index] for index in turns)), 0
        for index in turns:
            places.append(((done + is_away * sizes[index] / 2) / total, is_away, index))
            done += sizes[index]
    return [index for _, _, index in sorted(places)]


def last_turns(sizes: Sequence[int], limit_bytes: int) -> frozenset[int]:
    """Return the last turns whose state, of these sizes, is no more than the limit together; 0 is none of them."""
    found = []
    for index in reversed(range(len(sizes))):
        if sizes[index]:
            limit_bytes -= sizes[index]
            if limit_bytes < 0:
                break
            found.append(index)
    return frozenset(found)


def lies_as(parameter: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether these are the parameter's shape and strides; the stride of a dimension of length 1 means nothing."""
    if shape != tuple(parameter.shape):
        return False
    return all(
        ours == theirs for length, ours, theirs in zip(shape, stride, parameter.stride(), strict=True) if length > 1
    )


def stretches_of(parameter: torch.Tensor, bucket_bytes: int) -> tuple[Stretch, ...]:
    """Cut a parameter's elements into stretches of nearly equal size, none above the limit. See NOTE [stretches]."""
    count = parameter.numel()
    at_once = max(STRETCH_ELEMENTS, bucket_bytes // parameter.element_size() // STRETCH_ELEMENTS * STRETCH_ELEMENTS)
    num_stretches = -(-count // at_once)
    length = round_up(-(-count // num_stretches), STRETCH_ELEMENTS)
    return tuple(Stretch(start, min(start + length, count)) for start in range(0, count, length))


def choose_resident(sizes: Sequence[int], resident_share: float, bucket_bytes: int) -> list[bool]:
    """Say which buckets stay on the device, given their bytes of parameters: at most this share of all bytes.

    Parameters that are larger than `bucket_bytes` are chosen first, because a large one needs much room when it
    travels; where they come in stretches there are none. The others that stay are spread evenly over the sequence.
    """
    left = int(sum(sizes) * resident_share)
    stays = [False] * len(sizes)
    large = [index for index, size in enumerate(sizes) if size > bucket_bytes]
    for index in sorted(large, key=lambda index: (-sizes[index], index)):
        if sizes[index] <= left:
            stays[index], left = True, left - sizes[index]
    others = [index for index, size in enumerate(sizes) if size <= bucket_bytes]
    total, owed = sum(sizes[index] for index in others), 0
    for index in others:
        owed += sizes[index] * min(left, total)
        if owed >= sizes[index] * total > 0:
            stays[index], owed = True, owed - sizes[index] * total
    return stays


class Packing(Protocol):
    """A way to wait in fewer bytes. Of two equal packings, each reads what the other wrote."""

    def waiting_bytes(self, num_elements: int) -> int: ...
    def pack(self, values: torch.Tensor, memory: torch.Tensor, *, exactly: bool) -> None: ...
    def unpack(self, memory: torch.Tensor, values: torch.Tensor) -> None: ...


class Choose(Protocol):
    """Says how state waits."""

    def __call__(self, parameter: torch.Tensor, name: Any, value: torch.Tensor, /) -> Packing | None:
        """How this tensor of the parameter's state waits; None: as it is."""

    def packs(self, parameter: torch.Tensor, /) -> bool:
        """Whether anything of this parameter's state may wait packed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where one state tensor lies in its bucket."""

    index: int
    """The index of the tensor's parameter in the bucket."""
    name: Any
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    span_bytes: int
    packing: Packing | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, for a slot that is not packed."""
        line = memory.narrow(0, self.offset, self.span_bytes).view(self.dtype)
        return line.as_strided(self.shape, self.stride)

    def unpacked(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the unpacked tensor, in memory of its own, for a slot that is packed."""
        assert self.packing is not None
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=memory.device)
        self.packing.unpack(memory.narrow(0, self.offset, self.span_bytes), _line(tensor))
        return tensor

    def pack(self, memory: torch.Tensor, value: torch.Tensor, *, exactly: bool) -> None:
        """Pack a value. With `exactly`, a value that was unpacked before gets the same packed bytes again."""
        assert self.packing is not None
        self.packing.pack(_line(value), memory.narrow(0, self.offset, self.span_bytes), exactly=exactly)


class Bucket:
    """A few parameters, and the layout of their state while it waits."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        *,
        moves: bool,
        choose: Choose | None = None,
        stays: bool = False,
        device: torch.device | None = None,
        stretches: tuple[Stretch, ...] = (),
    ) -> None:
        self.parameters = tuple(parameters)
        self.stretches = stretches
        """The stretches in which its only parameter comes; () means as a whole. See NOTE [stretches]."""
        self.device = self.parameters[0].device if device is None else device
        """The device on which it is stepped."""
        self.has_guests = self.device != self.parameters[0].device
        """Whether its parameters live elsewhere. See NOTE [guests in a bucket]."""
        self.stays = stays
        """Whether its state stays on the device although there is another tier for it."""
        self.moves = moves
        """Whether its state leaves the device. If not, only packed state waits there; the step is done in buckets."""
        self.choose = choose
        self.memory: torch.Tensor | None = None
        """Packed state that waits on the device itself. See NOTE [packed state]."""
        self.slots: tuple[Slot, ...] = ()
        self.num_bytes = 0
        self.ticket: Ticket | None = None
        self.kept: dict[Any, torch.Tensor] | None = None
        """State that comes in stretches and that the store has no room for, while its stretches are stepped."""
        self._entries: list[weakref.ref[Waiting] | None] = [None] * len(self.parameters)

    # ------------------------------------------------------------------------------------------------- packing

    def plan(self, state: Mapping[torch.Tensor, Mapping[Any, Any]], given: Mapping[tuple[int, Any], Any]) -> list[Slot]:
        """Return the slots for this state. `given` holds the views of the bucket's memory on which the step was run."""
        tensors = {
            (index, name): value
            for index, parameter in enumerate(self.parameters)
            for name, value in state.get(parameter, {}).items()
            if given.get((index, name)) is value or self.takes(parameter, name, value)
        }
        owners = collections.Counter(tensor.data_ptr() for tensor in tensors.values())
        slots, offset = [], 0
        for (index, name), tensor in tensors.items():
            if owners[tensor.data_ptr()] > 1:
                continue  # two names for one tensor would no longer change together
            packing = self._packing(self.parameters[index], name, tensor)
            span_bytes = packing.waiting_bytes(tensor.numel()) if packing is not None else tensor.nbytes
            shape, stride = tuple(tensor.shape), tensor.stride()
            slots.append(Slot(index, name, offset, tensor.dtype, shape, stride, span_bytes, packing))
            offset += rounded(span_bytes)
        return slots

    def takes(self, parameter: torch.Tensor, name: Any, value: object) -> bool:
        """Whether a state tensor of one of its parameters waits here."""
        if not isinstance(value, torch.Tensor) or _is_alias(value, parameter):
            return False
        is_large = value.nbytes > SMALL_BYTES or (self.has_guests and value.dim() > 0)
        if not is_large or not can_move(value):
            return False
        return self.moves or self._packing(parameter, name, value) is not None

    def _packing(self, parameter: torch.Tensor, name: Any, tensor: torch.Tensor) -> Packing | None:
        if self.choose is None or Layout.of(tensor).span != tensor.numel():
            return None
        return self.choose(parameter, name, tensor)

    def views(self, memory: torch.Tensor) -> dict[tuple[int, Any], torch.Tensor]:
        """Return the tensors that wait as they are, as views of the memory."""
        return {(slot.index, slot.name): slot.view(memory) for slot in self.slots if slot.packing is None}

    def unpacked(self, memory: torch.Tensor) -> dict[tuple[int, Any], torch.Tensor]:
        """Return the tensors that wait packed, unpacked, each in memory of its own."""
        return {(slot.index, slot.name): slot.unpacked(memory) for slot in self.slots if slot.packing is not None}

    # ----------------------------------------------------------------------------------------------- stretches

    @property
    def is_cut(self) -> bool:
        """Whether every slot can be cut into the stretches. See NOTE [stretches]."""
        count = self.parameters[0].numel()
        return bool(self.stretches) and all(slot.num_elements == count for slot in self.slots)

    def bytes_of(self, stretch: Stretch | None) -> int:
        """The bytes that the waiting state takes on the device, or that of a stretch does."""
        if stretch is None:
            return self.num_bytes
        count = stretch.stop - stretch.start
        return sum(rounded(count * slot.dtype.itemsize) for slot in self.slots)

    def cuts(self) -> list[int]:
        """Return the bytes of the waiting state at which a stretch begins or ends."""
        if not self.is_cut:
            return []
        ends = [slot.offset + slot.span_bytes for slot in self.slots]
        return sorted({*ends, *(self._start(slot, one) for slot in self.slots for one in self.stretches)})

    def part(self, slot: Slot, stretch: Stretch) -> Ticket:
        """Return a ticket for a stretch of one state tensor."""
        assert self.ticket is not None
        layout = stretch.layout(slot.dtype, self.device)
        return self.ticket.store.part_of(self.ticket, layout, self._start(slot, stretch))

    def _start(self, slot: Slot, stretch: Stretch) -> int:
        return slot.offset + stretch.start * slot.dtype.itemsize

    # ------------------------------------------------------------------------------------------------- waiting

    def is_waiting(self, index: int, entry: object) -> bool:
        """Whether a parameter's entry in the optimizer's state is one whose tensors wait here."""
        return isinstance(entry, Waiting) and entry.bucket is self and entry.index == index

    def wait_for(self, index: int, values: Mapping[Any, Any], entry: object) -> Waiting:
        """Return the entry of a parameter whose slots are filled. `values` gives the order of names and what stays."""
        names = self.names_of(index)
        kept = {name: None if name in names else value for name, value in values.items()}
        if not (isinstance(entry, Waiting) and entry.index == index):
            entry = Waiting(index)
        entry.wait(self, kept)
        self._entries[index] = weakref.ref(entry)
        return entry

    def names_of(self, index: int) -> set[Any]:
        return {slot.name for slot in self.slots if slot.index == index}

    def packed_names_of(self, index: int) -> set[Any]:
        return {slot.name for slot in self.slots if slot.index == index and slot.packing is not None}

    def entries(self) -> list[Waiting]:
        found = [reference() for reference in self._entries if reference is not None]
        return [entry for entry in found if entry is not None and entry.bucket is self]

    def read(self) -> torch.Tensor:
        """Return the bucket's bytes, on the host."""
        if self.memory is not None:
            return self.memory.cpu()
        assert self.ticket is not None
        if self.ticket.rescued is not None:
            return self.ticket.rescued
        if self.is_cut:
            concurrent.futures.wait(self.ticket.write_jobs)
            if self.ticket.spot_jobs.rescued:
                return self._read_parts()
        return self.ticket.store.get(self.ticket, device="cpu")

    def _read_parts(self) -> torch.Tensor:
        """Return the bucket's bytes where some parts could not be written."""
        memory = torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")
        for slot, stretch in itertools.product(self.slots, self.stretches):
            part = self.part(slot, stretch)
            line = memory[slice(*part.place)]
            if part.rescued is not None:
                line.copy_(part.rescued)
            else:
                part.store.read(part, [line])
        return memory

    def tensors_of(self, index: int, memory: torch.Tensor) -> dict[Any, torch.Tensor]:
        """Return a parameter's state tensors out of the bucket's bytes, each with memory of its own."""
        return {
            slot.name: own_copy(slot.view(memory)) if slot.packing is None else slot.unpacked(memory)
            for slot in self.slots
            if slot.index == index
        }

    def check_out(self, memory: torch.Tensor | None = None) -> None:
        """Turn every entry into an ordinary dict because somebody looks; the next step takes the state from there."""
        memory = self.read() if memory is None else memory
        for entry in self.entries():
            entry.fill(self.tensors_of(entry.index, memory))


class Waiting(dict[Any, Any]):
    """A parameter's entry in `optimizer.state` while its tensors wait elsewhere.

    Looking inside brings the tensors of its bucket to the host, where they may be read and changed; the next step takes
    them from there. Copies and pickles are ordinary dicts.
    """

    __slots__ = ("__weakref__", "bucket", "index", "kept")

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.bucket: Bucket | None = None
        self.kept: dict[Any, Any] = {}

    def wait(self, bucket: Bucket, kept: dict[Any, Any]) -> None:
        """Note that the entry's tensors are in the bucket."""
        dict.clear(self)
        self.bucket, self.kept = bucket, kept

    def fill(self, tensors: Mapping[Any, torch.Tensor]) -> None:
        """Become an ordinary dict of these tensors and of the values that stayed."""
        self.bucket = None
        dict.update(self, {name: tensors.get(name, value) for name, value in self.kept.items()})

    def snapshot(self, memory: torch.Tensor) -> dict[Any, Any]:
        """Return a copy of the content as an ordinary dict, out of the bucket's bytes."""
        assert self.bucket is not None
        tensors = self.bucket.tensors_of(self.index, memory)
        kept = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in self.kept.items()}
        return {**kept, **tensors}

    def _look(self) -> None:
        if self.bucket is not None:
            self.bucket.check_out()

    def _plain(self) -> dict[Any, Any]:
        if self.bucket is not None:
            return self.snapshot(self.bucket.read())
        return dict(dict.items(self))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        plain, bucket = self._plain(), self.bucket
        if bucket is not None:  # a copied optimizer steps on its own, so its state is on the device
            device, names = bucket.parameters[self.index].device, bucket.names_of(self.index)
            plain = {name: value.to(device) if name in names else value for name, value in plain.items()}
        return dict, (plain,)

    def copy(self) -> dict[Any, Any]:
        return self._plain()


def values_here(entry: Any) -> dict[Any, Any]:
    """A parameter's entry in `optimizer.state` without what waits elsewhere; looks at it without bringing that here."""
    if isinstance(entry, Waiting) and entry.bucket is not None:
        return entry.kept
    return dict(dict.items(entry)) if isinstance(entry, dict) else {}


def _looking(name: str) -> Any:
    method = getattr(dict, name)

    def look(self: Waiting, *args: Any, **kwargs: Any) -> Any:
        self._look()
        return method(self, *args, **kwargs)

    look.__name__ = name
    return look


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__", "__len__", "__eq__"),
    *("__ne__", "__or__", "__ror__", "__ior__", "__repr__", "get", "keys", "values", "items", "pop", "popitem"),
    *("setdefault", "update", "clear"),
):
    setattr(Waiting, _name, _looking(_name))


def can_move(value: object) -> bool:
    """Whether a state tensor may wait in a bucket, whatever its size."""
    return (
        isinstance(value, torch.Tensor)
        and can_store(value)
        and not getattr(value, "is_paged", False)
        and not value.requires_grad
        and not Layout.of(value).has_gaps
        and value.untyped_storage().nbytes() == value.nbytes  # not a part of something shared
    )


def _is_alias(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state tensor shares memory with its parameter or with the gradient, and changes with it."""
    gradient = held_gradient(parameter)
    others = [parameter] if gradient is None else [parameter, gradient]
    return any(other.layout is torch.strided and other.data_ptr() == value.data_ptr() for other in others)


def _line(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements in the order in which they lie in memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def own_copy(view: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides and nothing else in its storage."""
    copy = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
    return copy.copy_(view)
