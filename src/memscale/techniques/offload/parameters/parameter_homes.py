"""Homes: where streamed parameters live between their visits to the device.

The `Parameter` objects stay the same; only their data moves. For asynchronous copies a home is pinned memory.

NOTE [a storage of its own]: homes share pinned segments (see NOTE [pinned rounding] in host.py). A parameter must not
be a window of a larger storage: saving it would save the whole, and safetensors refuses it. So each home is a storage
over its own stretch of the segment. It keeps the segment alive, whoever else holds it, and returns the stretch when it
is freed.

NOTE [from plan to plan]: between two plans that both stream, the device may have no room for the parameters that both
of them keep at home. So homes are handed over: `restore` leaves at home what the next plan streams too, brings home
what the next plan adds, and only then moves the rest to the device. The next `move_in` continues from there.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memscale._errors import OffloadError, StoreFullError
from memscale._torch import private
from memscale._torch.overrides import MethodOverride
from memscale._units import round_up, show_bytes
from memscale.techniques.offload.store.host import HostStore
from memscale.techniques.offload.store.stores import PART_BYTES, Layout, Store, Ticket

CPU = torch.device("cpu")
LARGEST_SEGMENT_BYTES = 1 << 30
Place = tuple[int, str]
"""A module's id and the name of a tensor in it."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place in a module where a parameter or a buffer is kept. It does not keep the module alive."""

    module: weakref.ref[nn.Module]
    name: str
    is_buffer: bool = False

    def table(self) -> dict[str, Any]:
        module = self.module()
        if module is None:
            return {}
        return module._buffers if self.is_buffer else module._parameters

    def get(self) -> Any:
        return self.table().get(self.name)

    @property
    def place(self) -> Place:
        """What two slots of the same place agree in."""
        return id(self.module()), self.name


def slots_of(modules: Iterable[nn.Module], *, buffers: bool = False) -> list[Slot]:
    return [
        Slot(weakref.ref(module), name, is_buffer)
        for module in modules
        for is_buffer, table in ((False, module._parameters), (True, module._buffers))[: 2 if buffers else 1]
        for name, value in table.items()
        if value is not None
    ]


def parameters_in(slots: Iterable[Slot]) -> list[torch.Tensor]:
    """Return the current parameters, once each; `load_state_dict(assign=True)` may have replaced them."""
    return list({id(p): p for slot in slots if (p := slot.get()) is not None}.values())


def overlapping(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tensors in groups that share memory; most groups have one member. Groups come in the order of their
    first members: addresses would put them into another one in each process, and memory that is filled in it."""
    once = {id(tensor): tensor for tensor in tensors}
    spans: list[tuple[int, int, int, torch.Tensor]] = []
    for tensor in once.values():
        is_strided = tensor.layout is torch.strided
        start = int(tensor.storage_offset()) * tensor.dtype.itemsize if is_strided else 0
        span = Layout.of(tensor).span * tensor.dtype.itemsize if is_strided else 0
        key = private.storage_key(tensor.untyped_storage()) if span else id(tensor)
        spans.append((key, start, start + span, tensor))
    spans.sort(key=lambda entry: entry[:3])
    groups: list[list[torch.Tensor]] = []
    last_key, last_end = -1, 0
    for key, start, end, tensor in spans:
        if key == last_key and start < last_end:
            groups[-1].append(tensor)
            last_end = max(last_end, end)
        else:
            groups.append([tensor])
            last_key, last_end = key, end
    position = {number: index for index, number in enumerate(once)}
    return sorted(groups, key=lambda group: min(position[id(tensor)] for tensor in group))


class Homes:
    """Moves the streamed parameters of one model home and everything else to the device, until `restore`."""

    def __init__(self, device: torch.device, store: Store | None, placed_from: torch.device | None = None) -> None:
        self.device = device
        self._placed_from = placed_from
        """Where the model was before the plan before had it on the device. See NOTE [placed from plan to plan]."""
        self.store = store
        """The pinned memory for homes. None means plain memory; a store without bytes is for fake tensors."""
        self._tickets: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()  # by address
        self._devices: list[tuple[Slot, torch.device]] = []
        self._replaced: dict[int, torch.Tensor] = {}
        self._streamed: set[int] = set()
        """The ids of the parameters that are home."""
        self._next: set[int] | None = None
        """The ids of the parameters that the next plan streams; None means that there is no next plan."""
        self._streamed_places: set[Place] = set()
        self._sent_to: dict[Place, torch.device] = {}
        """Where the user has moved streamed parameters meanwhile. See NOTE [moved while streamed]."""
        self.host = CPU

    # -------------------------------------------------------------------------------------------------- moving in

    def move_in(self, model: nn.Module, streamed: set[int]) -> bool:
        """Move the parameters with the ids `streamed` home. `restore` undoes it, even if it failed half-way.

        False: just these were home already, handed over by the plan before.
        """
        is_move, self._streamed = streamed != self._streamed, set(streamed)
        slots = slots_of(model.modules(), buffers=True)
        came_from = {id(slot.get()): device for slot, device in self._devices}  # see NOTE [from plan to plan]
        self._devices = [(slot, came_from.get(id(slot.get()), self._origin(slot.get()))) for slot in slots]
        self._next = None
        self._streamed_places = {slot.place for slot in slots if id(slot.get()) in streamed}
        parameters = [slot.get() for slot in slots if not slot.is_buffer]
        staying = [parameter for parameter in parameters if id(parameter) in streamed]
        if any(private.is_fake(parameter) for parameter in staying):
            self.host = torch.device("meta") if self.device.type == "cpu" else CPU
            self._fake_in(slots, streamed)
            return is_move
        others = [slot.get() for slot in slots if id(slot.get()) not in streamed]
        is_there = all(p.device == CPU for p in staying) and all(p.device == self.device for p in others)
        if not is_move and is_there:
            return False
        self.presize([p for p in staying if self.ticket_of(p) is None])
        for group in sorted(overlapping(staying), key=lambda group: -group[0].nbytes):  # large first fills best
            self._bring_home(group)
        for group in overlapping(others):
            _relocate(group, self.device)
        return True

    def _origin(self, tensor: torch.Tensor) -> torch.device:
        """Where a tensor goes back to that no plan before has moved home."""
        if self._placed_from is None or tensor.device != self.device:
            return tensor.device
        return self._placed_from

    def admit(self, streamed: Iterable[Slot], others: Iterable[Slot]) -> None:
        """Give homes to what has come into these slots since `move_in`, and move the others to the device.

        `restore` puts what has come where the streamed parameters came from: it was made beside one of them.
        """
        streamed, others = list(streamed), list(others)
        beside = next((device for slot, device in self._devices if slot.place in self._streamed_places), self.device)
        self._devices = [(slot, device) for slot, device in self._devices if slot.get() is not None]
        known = {slot.place for slot, _ in self._devices}
        came_from = {id(slot.get()): device for slot, device in self._devices}
        new = [slot for slot in (*streamed, *others) if slot.place not in known]
        self._devices += [(slot, came_from.get(id(slot.get()), beside)) for slot in new]
        self._streamed |= {id(slot.get()) for slot in streamed}
        self._streamed_places |= {slot.place for slot in streamed}
        for group in overlapping(slot.get() for slot in streamed):
            self._bring_home(group)
        for group in overlapping(slot.get() for slot in others):
            _relocate(group, self.device)

    def _bring_home(self, group: list[torch.Tensor]) -> None:
        if len(group) == 1 and self.store is not None:
            parameter = group[0]
            if self.ticket_of(parameter) is None:
                _put(parameter, self.at_home(parameter.detach()))
            _move_gradient(parameter, CPU)
        else:
            _relocate(group, CPU)

    def at_home(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same values and strides in memory that asynchronous copies can read."""
        layout = dataclasses.replace(Layout.of(tensor), device=self.device)
        if self.store is None or layout.has_gaps or not layout.num_bytes:
            return tensor.to(CPU)
        ticket = self.store.reserve(layout)
        memory = ticket.store.memory_of(ticket)
        if len(memory) > 1:
            self.store.free(ticket)
            raise StoreFullError(
                f"host memory for a parameter of {show_bytes(layout.num_bytes)} is left only in pieces; "
                "raise max_cpu_offload_gb or stream fewer layers"
            )
        home = tensor_over(memory[0], ticket, layout)
        home.copy_(tensor)
        self._tickets[home.data_ptr()] = ticket
        return home

    def ticket_of(self, parameter: torch.Tensor) -> Ticket | None:
        """Return the ticket of a parameter's home, if the parameter is there, with its dtype, shape and strides."""
        if private.is_fake(parameter):
            assert self.store is not None
            return self.store.reserve(dataclasses.replace(Layout.of(parameter), device=self.device))
        ticket = self._tickets.get(parameter.data_ptr())
        if ticket is None or parameter.device.type != "cpu":
            return None
        layout = ticket.layout
        same = (layout.dtype, layout.shape, layout.stride) == (
            parameter.dtype,
            tuple(parameter.shape),
            tuple(parameter.stride()),
        )
        return ticket if same else None

    def presize(self, tensors: list[torch.Tensor], max_bytes: int | None = None) -> None:
        """Take large segments for tensors of these sizes in advance, so that little of them is wasted: for all of them,
        or for those that are there at once if these are never more than `max_bytes`."""
        if not isinstance(self.store, HostStore):
            return
        sizes = [round_up(p.nbytes, PART_BYTES) for p in {id(p): p for p in tensors}.values()]
        with contextlib.ExitStack() as undo:
            for num_bytes in _segment_sizes(sizes, self.store.segment_bytes, max_bytes):
                layout = Layout(torch.uint8, (num_bytes,), (1,), CPU, num_bytes, False)
                undo.callback(self.store.free, self.store.reserve(layout))

    def _fake_in(self, slots: list[Slot], streamed: set[int]) -> None:
        """Put stand-ins in place of fake parameters, whose data cannot change its device."""
        stand_ins: dict[int, nn.Parameter] = {}
        for slot in slots:
            parameter = slot.get()
            if id(parameter) not in streamed:
                continue
            if id(parameter) not in stand_ins:
                fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self.host)
                stand_ins[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                self._replaced[id(stand_ins[id(parameter)])] = parameter
            slot.table()[slot.name] = stand_ins[id(parameter)]

    # ------------------------------------------------------------------------------------------------- moving out

    @property
    def are_handed_over(self) -> bool:
        return self._next is not None

    def hand_over(self, streamed: set[int]) -> None:
        """Let the next `restore` prepare for a plan that streams the parameters with these ids. `keep` revokes it."""
        self._next = streamed

    def keep(self) -> None:
        self._next = None

    def restore(self) -> None:
        """Move everything back to the device that it came from, or that the user has moved it to meanwhile.

        What does not fit stays home, and that is raised.
        """
        if self._next is not None:
            self._rearrange(self._next)
            return
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for slot, device in self._devices:
            tensor = slot.get()
            if id(tensor) in self._replaced:
                slot.table()[slot.name] = self._replaced[id(tensor)]
            elif tensor is not None and not private.is_fake(tensor):
                by_device.setdefault(self.destination(slot, tensor, device), []).append(tensor)
        self._devices, self._replaced, self._streamed = [], {}, set()
        self._streamed_places, self._sent_to = set(), {}
        # What belongs on the host moves first, because that makes room on the device.
        for device, tensors in sorted(by_device.items(), key=lambda item: item[0].type != "cpu"):
            self._move_out(tensors, device)

    def displaced(self) -> list[tuple[Slot, torch.device]]:
        """The places of tensors that `restore` would move to another device now, and where those came from."""
        there = [(slot, device, tensor) for slot, device in self._devices if (tensor := slot.get()) is not None]
        return [
            (slot, came_from)
            for slot, came_from, tensor in there
            if not private.is_fake(tensor) and self.destination(slot, tensor, came_from) != tensor.device
        ]

    def gradients_at_home(self) -> set[int]:
        """The ids of the gradients of streamed parameters that are on the host."""
        places = (slot for slot, _ in self._devices if slot.place in self._streamed_places)
        gradients = (p.grad for slot in places if (p := slot.get()) is not None and p.is_leaf)
        return {id(g) for g in gradients if g is not None and g.device != self.device and not private.is_fake(g)}

    def goes_to(self, tensor: torch.Tensor) -> torch.device | None:
        """The other device to which `restore` would move this tensor; None: it stays, or is none of the model's."""
        for slot, came_from in self._devices:
            if slot.get() is tensor:
                device = self.destination(slot, tensor, came_from)
                return None if private.is_fake(tensor) or device == tensor.device else device
        return None

    @property
    def sent_to(self) -> torch.device | None:
        """Where the user has moved the model since it is streamed; None: nowhere. See NOTE [moved while streamed]."""
        devices = set(self._sent_to.values())
        is_all = bool(self._streamed_places) and self._streamed_places <= self._sent_to.keys()
        return devices.pop() if is_all and len(devices) == 1 else None

    def destination(self, slot: Slot, tensor: torch.Tensor, came_from: torch.device) -> torch.device:
        """Where `restore` would put this tensor."""
        if slot.place in self._streamed_places:
            return self._sent_to.get(slot.place, came_from)
        return came_from if tensor.device == self.device else tensor.device

    def note_move(self, slots: Iterable[Slot], device: torch.device) -> None:
        """The user moves the module of these slots to `device`.

        NOTE [moved while streamed]: `model.cpu()` leaves streamed parameters where they are, and says where they are to
        be once they are not streamed (Lightning does this before it tells callbacks that a fit is over). A move to the
        device that computes says nothing new: a model that was too large for it came from elsewhere.
        """
        for slot in slots:
            if device == self.device:
                self._sent_to.pop(slot.place, None)
            else:
                self._sent_to[slot.place] = device

    def _rearrange(self, streamed: set[int]) -> None:
        """Bring home what the next plan streams, and move the rest out. See NOTE [from plan to plan]."""
        if streamed == self._streamed:
            return
        parameters = {id(p): p for slot, _ in self._devices if not slot.is_buffer and (p := slot.get()) is not None}
        going = [p for number, p in parameters.items() if number in streamed]
        self._streamed_places |= {slot.place for slot, _ in self._devices if id(slot.get()) in streamed}
        # If the host has no room yet, it has when the others have left: `move_in` then brings what is missing.
        with contextlib.suppress(StoreFullError):
            for group in sorted(overlapping(going), key=lambda group: -group[0].nbytes):
                self._bring_home(group)
        self._move_out([p for number, p in parameters.items() if number not in streamed], self.device)

    def _move_out(self, tensors: list[torch.Tensor], device: torch.device) -> None:
        moving = [t for t in tensors if t.device != device or t.data_ptr() in self._tickets]
        try:
            for group in overlapping(moving):
                _relocate(group, device, anew=True)
        except torch.OutOfMemoryError as error:
            left = sum(tensor.nbytes for tensor in moving if tensor.device != device)
            raise OffloadError(
                f"{show_bytes(left)} of parameters do not fit back on {device} and stay on the host; "
                "free device memory and move the model there with .to()"
            ) from error


def _segment_sizes(sizes: list[int], largest: int, max_bytes: int | None = None) -> Iterator[int]:
    """Return powers of two that hold tensors of these sizes, or `max_bytes` of them; the last ones are small."""
    left = sum(sizes) if max_bytes is None else min(sum(sizes), max_bytes)
    for size in sorted(sizes, reverse=True):
        while left >= size > 0:
            segment = min(1 << (left.bit_length() - 1), largest)
            if segment < size:
                break
            yield segment
            left -= segment


def tensor_over(memory: torch.Tensor, ticket: Ticket, layout: Layout) -> torch.Tensor:
    """Return a tensor whose storage is exactly this memory. See NOTE [a storage of its own]."""
    buffer = (ctypes.c_uint8 * memory.numel()).from_address(memory.data_ptr())
    weakref.finalize(buffer, _let_go, memory, ticket).atexit = False
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return private.tensor_over(storage, layout.dtype, CPU, 0, layout.shape, layout.stride)


def _let_go(memory: torch.Tensor, ticket: Ticket) -> None:
    """Drop the references. That suffices: a store frees tickets that nobody holds."""


def unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory that is no view, which a custom autograd function may return as its own."""
    return private.tensor_over(
        tensor.untyped_storage(),
        tensor.dtype,
        tensor.device,
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
    )


def _relocate(group: list[torch.Tensor], device: torch.device, *, anew: bool = False) -> None:
    """Move tensors that share memory, and their gradients."""
    if not anew and all(tensor.device == device for tensor in group):
        return
    relocate(group, device)
    for tensor in group:
        _move_gradient(tensor, device)


def relocate(group: list[torch.Tensor], device: torch.device) -> None:
    """Move tensors that share memory together, so that the same objects still share it afterwards."""
    if group[0].layout is not torch.strided:
        _put(group[0], group[0].detach().to(device))
    elif len(group) == 1 and not is_expanded(group[0]):
        tensor = group[0]
        fresh = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        _put(tensor, fresh.copy_(tensor.detach()))
    else:
        _relocate_shared(group, device)


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements of the tensor have the same place in memory."""
    return any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _relocate_shared(group: list[torch.Tensor], device: torch.device) -> None:
    starts = [int(tensor.storage_offset()) * tensor.dtype.itemsize for tensor in group]
    ends = [s + Layout.of(t).span * t.dtype.itemsize for s, t in zip(starts, group, strict=True)]
    first, num_bytes = min(starts), max(ends) - min(starts)
    source = private.tensor_over(group[0].untyped_storage(), torch.uint8, group[0].device, first, (num_bytes,), (1,))
    line = torch.empty(num_bytes, dtype=torch.uint8, device=device).copy_(source)
    for tensor, start in zip(group, starts, strict=True):
        offset = (start - first) // tensor.dtype.itemsize
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        _put(tensor, private.tensor_over(line.untyped_storage(), tensor.dtype, device, offset, shape, stride))


def _put(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


def _move_gradient(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.is_leaf and tensor.grad is not None and tensor.grad.device != device:
        tensor.grad.data = tensor.grad.data.to(device)


class StayHome(MethodOverride):
    """A module's `_apply`: `model.to()` leaves its streamed parameters at home, but changes their dtype."""

    method = "_apply"

    def __init__(self, module: nn.Module, homes: Homes, streamed: Iterable[Slot]) -> None:
        super().__init__(module)
        self._homes = homes
        self._slots = list(streamed)

    def call(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        parameters = [parameter for slot in self._slots if (parameter := slot.get()) is not None]
        staying = {id(parameter) for parameter in parameters}
        staying_gradients = {id(parameter.grad) for parameter in parameters if parameter.grad is not None}
        self._homes.note_move(self._slots, fn(torch.empty((), device=self._homes.device)).device)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in staying:
                moved = _changed_at_home(fn, tensor)
                return moved if moved is tensor else self._homes.at_home(moved)
            if id(tensor) in staying_gradients:
                return _changed_at_home(fn, tensor)
            return fn(tensor)

        return self.inner()(keep, recurse)


def _changed_at_home(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return what `fn` makes of the tensor, on the tensor's own device."""
    probe = fn(torch.empty((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device))
    if probe.device == tensor.device:
        return fn(tensor)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = torch.preserve_format if probe.is_contiguous() else formats.get(tensor.dim(), torch.preserve_format)
    moved = tensor.detach().to(probe.dtype, memory_format=wanted)
    return tensor if moved.dtype == tensor.dtype and moved.stride() == tensor.stride() else moved
