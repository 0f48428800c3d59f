"""Buckets: the state of a few parameters in one piece of memory, which travels and waits as one.

NOTE [what a bucket costs]: a bucket's parameters are of one device, and neighbours among those in the optimizer's
groups; it closes before the parameter that would take it beyond `bucket_bytes` *of parameters* (a larger parameter has
one of its own). Its state bytes S are the sum of its state tensors above 4096 bytes, each rounded up to 512; smaller
ones stay on the device. Of this state the device holds at most

- S of a bucket and S of the next (being fetched) in a step, one alone if transfers are synchronous, and
- twice S of a bucket while its state is made (as the optimizer makes it, and packed), in which no other is fetched,
- S of a bucket that is leaving and S of the next, while one between them is stepped whose state stays here,

and nothing of what travels between steps: at most twice the largest S, beside what the optimizer's own step
needs for temporaries over one bucket.

NOTE [guests in a bucket]: where parameters at home on the host are stepped on the device, they and their gradients
visit it with their state, which waits in the bucket whatever its size: of such a bucket's parameters nothing is on the
device between steps but counters that the optimizer keeps there. Beside S the device then holds the bytes of its
parameters twice; once on the way back, when the gradients are gone.

NOTE [stretches]: a parameter that is larger than a bucket visits the device a stretch of its elements at a time, where
the optimizer's update of an element depends on nothing but this element's values and its state waits in host memory, as
it is. A stretch costs what a bucket of its size does. Values that all elements share (counters) advance once: each
stretch starts from those before the step.

NOTE [packed state]: some tensors may wait in fewer bytes than they have (`Packing`). Then S counts the bytes that wait,
and a step holds the unpacked state of one bucket beside them. Where there is no other tier, packed tensors wait in
memory of the bucket on their device, and the others stay as they are.
"""

from __future__ import annotations

import collections
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from memscale._units import round_up
from memscale.techniques.offload.store.stores import Layout, Stretch, Ticket, can_store

SMALL_BYTES = 4096
"""State tensors up to this stay where they are: step counters, tables that all parameters share."""
STRETCH_ELEMENTS = 1024
"""Stretches of a parameter begin at multiples of this."""
SLOT_BYTES = 512
"""Tensors in a bucket start at multiples of this, as an allocator would place them."""


def rounded(num_bytes: int) -> int:
    return round_up(num_bytes, SLOT_BYTES)


def split_into_buckets(sizes: Iterable[int], bucket_bytes: int) -> list[list[int]]:
    """Neighbours together until they would exceed the limit. Returns the indices of each bucket."""
    buckets: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not buckets or filled + size > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(index)
        filled += size
    return buckets


def stretches_of(parameter: torch.Tensor, bucket_bytes: int) -> tuple[Stretch, ...]:
    """A parameter's elements in stretches of nearly the same size, none above the limit. See NOTE [stretches]."""
    count = parameter.numel()
    at_once = max(STRETCH_ELEMENTS, bucket_bytes // parameter.element_size() // STRETCH_ELEMENTS * STRETCH_ELEMENTS)
    num_stretches = -(-count // at_once)
    length = round_up(-(-count // num_stretches), STRETCH_ELEMENTS)
    return tuple(Stretch(start, min(start + length, count)) for start in range(0, count, length))


def choose_resident(sizes: Sequence[int], resident_share: float, bucket_bytes: int) -> list[bool]:
    """Which buckets of these bytes of parameters stay on the device: no more than the share of all bytes.

    Parameters that are larger than a bucket come first, because one that travels needs room for itself; of the others
    every so many stays, so that the link has something to do all the time.
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
    """A way to wait in fewer bytes. Equal ones read what the other wrote."""

    def waiting_bytes(self, num_elements: int) -> int: ...
    def pack(self, values: torch.Tensor, memory: torch.Tensor, *, exactly: bool) -> None: ...
    def unpack(self, memory: torch.Tensor, values: torch.Tensor) -> None: ...


Choose = Callable[[torch.Tensor, Any, torch.Tensor], Packing | None]
"""From a parameter, the name and the value of a state tensor to how that waits; None: as it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where one state tensor lies in its bucket."""

    index: int
    """Of its parameter in the bucket."""
    name: Any
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    span_bytes: int
    packing: Packing | None = None

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor itself, where it waits as it is."""
        line = memory.narrow(0, self.offset, self.span_bytes).view(self.dtype)
        return line.as_strided(self.shape, self.stride)

    def unpacked(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor, in memory of its own, where it waits packed."""
        assert self.packing is not None
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=memory.device)
        self.packing.unpack(memory.narrow(0, self.offset, self.span_bytes), _line(tensor))
        return tensor

    def pack(self, memory: torch.Tensor, value: torch.Tensor, *, exactly: bool) -> None:
        """Put a value in. `exactly`: what was unpacked before waits as it did, to the last bit."""
        assert self.packing is not None
        self.packing.pack(_line(value), memory.narrow(0, self.offset, self.span_bytes), exactly=exactly)


class Bucket:
    """A few parameters, and how their state lies when it waits."""

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
        """In which its one parameter comes; (): as a whole. See NOTE [stretches]."""
        self.device = self.parameters[0].device if device is None else device
        """Where it is stepped."""
        self.has_guests = self.device != self.parameters[0].device
        """Its parameters live elsewhere. See NOTE [guests in a bucket]."""
        self.stays = stays
        """It is one of those whose state stays on the device though there is another tier for it."""
        self.moves = moves
        """Its state leaves the device; else only what is packed waits here, and the step's temporaries are bounded."""
        self.choose = choose
        self.memory: torch.Tensor | None = None
        """What waits on the device itself. See NOTE [packed state]."""
        self.slots: tuple[Slot, ...] = ()
        self.num_bytes = 0
        self.ticket: Ticket | None = None
        self._entries: list[weakref.ref[Waiting] | None] = [None] * len(self.parameters)

    # ------------------------------------------------------------------------------------------------- packing

    def plan(self, state: Mapping[torch.Tensor, Mapping[Any, Any]], given: Mapping[tuple[int, Any], Any]) -> list[Slot]:
        """The slots for this state. `given` are the views of the bucket's own memory that the step was run on."""
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
                continue  # two names for one tensor: apart they would no longer change together
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
        """The tensors that wait as they are."""
        return {(slot.index, slot.name): slot.view(memory) for slot in self.slots if slot.packing is None}

    def unpacked(self, memory: torch.Tensor) -> dict[tuple[int, Any], torch.Tensor]:
        """The tensors that wait packed, each in memory of its own."""
        return {(slot.index, slot.name): slot.unpacked(memory) for slot in self.slots if slot.packing is not None}

    # ------------------------------------------------------------------------------------------------- waiting

    def is_waiting(self, index: int, entry: object) -> bool:
        """Whether a parameter's entry in the optimizer's state is one whose tensors wait here."""
        return isinstance(entry, Waiting) and entry.bucket is self and entry.index == index

    def wait_for(self, index: int, values: Mapping[Any, Any], entry: object) -> Waiting:
        """The entry of a parameter whose slots have been filled; `values` gives the order and what stays."""
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
        """The bucket's bytes, on the host."""
        if self.memory is not None:
            return self.memory.cpu()
        assert self.ticket is not None
        if self.ticket.rescued is not None:
            return self.ticket.rescued
        return self.ticket.store.get(self.ticket, device="cpu")

    def tensors_of(self, index: int, memory: torch.Tensor) -> dict[Any, torch.Tensor]:
        """A parameter's state tensors out of the bucket's bytes, each with memory of its own."""
        return {
            slot.name: own_copy(slot.view(memory)) if slot.packing is None else slot.unpacked(memory)
            for slot in self.slots
            if slot.index == index
        }

    def check_out(self, memory: torch.Tensor | None = None) -> None:
        """Somebody looks: every entry becomes an ordinary dict, and what it holds is what counts from now on."""
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
        """Its tensors are in the bucket now."""
        dict.clear(self)
        self.bucket, self.kept = bucket, kept

    def fill(self, tensors: Mapping[Any, torch.Tensor]) -> None:
        """Become an ordinary dict of these tensors and what stayed."""
        self.bucket = None
        dict.update(self, {name: tensors.get(name, value) for name, value in self.kept.items()})

    def snapshot(self, memory: torch.Tensor) -> dict[Any, Any]:
        """A copy of the content as an ordinary dict, out of the bucket's bytes."""
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
        if bucket is not None:  # a copy of the whole optimizer is stepped by itself: tensors are where they would be
            device, names = bucket.parameters[self.index].device, bucket.names_of(self.index)
            plain = {name: value.to(device) if name in names else value for name, value in plain.items()}
        return dict, (plain,)

    def copy(self) -> dict[Any, Any]:
        return self._plain()


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
    """Whether a state tensor is the parameter's own memory or its gradient's, and changes with that."""
    others = [parameter] if parameter.grad is None else [parameter, parameter.grad]
    return any(other.layout is torch.strided and other.data_ptr() == value.data_ptr() for other in others)


def _line(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in the order in which they lie."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def own_copy(view: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides and nothing else in its memory."""
    copy = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device)
    return copy.copy_(view)
