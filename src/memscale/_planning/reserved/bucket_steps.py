"""An optimizer's step as a plan takes it, on the stage: whole, part by part, or in buckets whose state waits elsewhere.

    stepping = SteppedOptimizer(optimizer, ids, log, away, rules, forgets=True)
    stepping.step()             # what it allocates and frees is in the log, in the executor's order

A step of many buckets takes long even on fake tensors, and most are alike: one bucket of a kind is stepped, and the log
has the same again for the others.

The executor's own buckets (`techniques.offload.optimizer`) do not run on fake tensors, which have no addresses and no
values. What they allocate is small and in a fixed order, so that this order is gone through here: see
NOTE [what a bucket costs] in buckets.py and `AdoptedOptimizer._step_one`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from memscale._planning.reserved.allocation_log import Allocated, AllocationLog, Event, Freed
from memscale._profile.optimizer_twin import Stepping, host_counters, over_parameters
from memscale._torch import private
from memscale._torch.optimizer_steps import parameters_of
from memscale._torch.waiting_gradients import is_waiting
from memscale.techniques.offload.optimizer.buckets import last_turns
from memscale.techniques.optimizer8bit.blocks import CHUNK_ELEMENTS


@dataclasses.dataclass(frozen=True, slots=True)
class BucketRules:
    """How a plan lets an optimizer step."""

    stepping: Stepping
    window_bytes: int
    """More than this is never on its way to another tier."""
    block_size: int
    """How many elements of what waits in 8 bits share a scale."""
    resident_share: float = 0.0
    """The share that stays on the device, of the state that could wait elsewhere."""
    guests: Stepping | None = None
    """How streamed parameters visit the device to be stepped; None: they are stepped on the host."""
    early_bytes: int = 0
    """The most state that is asked for before the step begins."""
    late_bytes: int = 0
    """The most state that still leaves when the step is over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Beside:
    """What a step's events have in the step that happens beside other parts of training."""

    num_early: int = 0
    """The step begins with so many allocations that backward has made already: those of state that comes early."""
    num_late: int = 0
    """The step ends with so many releases that the next forward makes: those of state that leaves late."""


class SteppedOptimizer:
    """Steps on fake parameters.

    `ids` are those of the user's parameters, by the ids of their stand-ins; stand-ins that are `away` are streamed.
    Without `rules` the optimizer steps as a whole. `log` is that of the recorder that sees the steps, and reads any
    number in their place. `forgets`: counters, which are on the host in a real run, are counted here, and the log
    is to forget them. `known`: buckets that the same optimizer was seen to step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        ids: Mapping[int, int],
        log: AllocationLog,
        away: Collection[int] = (),
        rules: BucketRules | None = None,
        *,
        forgets: bool = False,
        known: KnownSteps | None = None,
    ) -> None:
        self._log = log
        self._forgets = forgets
        self._whole = optimizer if rules is None else None
        self._buckets = [] if rules is None else _split(optimizer, ids, away, rules)
        self._prefetches = rules is not None and rules.stepping.prefetches
        self._tables: torch.Tensor | None = None
        self._rules = rules
        self._known = {} if known is None else known

    def step(self) -> Beside:
        """Step once, with the gradients that there are."""
        if self._whole is not None:
            self._whole.step()
            self._forget_counters(self._whole)
            return Beside()
        start, early = self._log.num_events, self._start_early()
        num_early = self._log.num_events - start
        ordered = self._in_order([bucket for bucket in self._buckets if bucket.has_gradients])
        ordered.sort(key=lambda bucket: bucket not in early)
        late_bytes = 0 if self._rules is None else self._rules.late_bytes
        late = [ordered[index] for index in sorted(last_turns([one.late_bytes for one in ordered], late_bytes))]
        self._step_buckets([*(bucket for bucket in ordered if bucket not in late), *late], early, late)
        for bucket in early:
            if not bucket.has_gradients:
                bucket.free_memory()
        start = self._log.num_events
        for bucket in late:
            bucket.free_memory()
        return Beside(num_early, self._log.num_events - start)

    def _start_early(self) -> list[_Bucket]:
        """What is asked for in backward: see `EarlyArrivals.fetch`."""
        early, left_bytes = [], 0 if self._rules is None else self._rules.early_bytes
        for bucket in self._buckets:
            if bucket.waits_elsewhere:
                left_bytes -= bucket.num_bytes
                if left_bytes < 0:
                    break
                bucket.start()
                early.append(bucket)
        return early

    def _in_order(self, buckets: Sequence[_Bucket]) -> list[_Bucket]:
        if self._rules is None:
            return list(buckets)
        order = self._rules.stepping.order(
            [bucket.parameter_bytes for bucket in buckets], [bucket.travels for bucket in buckets]
        )
        return [buckets[index] for index in order]

    def _step_buckets(self, buckets: Sequence[_Bucket], early: Sequence[_Bucket], late: Sequence[_Bucket]) -> None:
        """Those that are `early` make room for others, and those that are `late` keep their memory."""
        stepped_early_bytes = 0
        self._make_tables(buckets)
        to_come, leaving = [bucket for bucket in buckets if bucket.travels], collections.deque[_Bucket]()
        for bucket in buckets:
            was_whole = bucket.is_laid_out or not bucket.moves
            bucket.bring(is_known=self._known.get(bucket.kind) is not None)
            bucket.welcome()
            if bucket.travels:
                to_come.remove(bucket)
            if bucket.moves:
                _let_go(leaving, but=1)
            stepped_early_bytes += bucket.num_bytes * (bucket in early)
            if to_come and self._prefetches and was_whole:
                to_come[0].start()
                to_come[0].invite()
                _start_more(to_come[1:], [one for one in to_come if one not in early], stepped_early_bytes)
            self._step_one(bucket)
            bucket.see_off()
            bucket.park()
            if bucket.moves and bucket not in late:
                leaving.append(bucket)
                self._trim(leaving)
        _let_go(leaving)

    def _trim(self, leaving: Sequence[_Bucket]) -> None:
        """No more state is on its way out than the window holds; the oldest is waited for first."""
        assert self._rules is not None
        for bucket in leaving:
            if sum(one.memory_bytes for one in leaving) > self._rules.window_bytes:
                bucket.free_memory()

    def _make_tables(self, buckets: Sequence[_Bucket]) -> None:
        """What packing keeps on the device from the first step on."""
        if self._rules is not None and buckets and self._tables is None:
            num_bytes = self._rules.stepping.tables_bytes(buckets[0].optimizer, "cuda")
            self._tables = torch.empty(num_bytes, dtype=torch.uint8, device=buckets[0].device)

    def _step_one(self, bucket: _Bucket) -> None:
        """Step a bucket as another of its kind was stepped, if one was."""
        kind = bucket.kind
        known = self._known.get(kind)
        if known is not None:
            known.again(bucket.optimizer, self._log)
        else:
            start = self._log.num_events
            bucket.optimizer.step()
            self._forget_counters(bucket.optimizer)
            if kind not in self._known:
                self._known[kind] = _KnownStep.of(bucket.optimizer, self._log, self._log.since(start))
        bucket.num_steps += 1

    def _forget_counters(self, optimizer: Optimizer) -> None:
        if self._forgets:
            counters = host_counters(optimizer)
            self._log.forget([private.storage_key(counter.untyped_storage()) for counter in counters])


@dataclasses.dataclass(frozen=True, slots=True)
class _Left:
    """A tensor that a step left in the optimizer's state. The tensor itself is not held here: it goes when it goes."""

    parameter: int
    """Which of the optimizer's."""
    name: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        parameter = parameters[self.parameter]
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=parameter.device)
        optimizer.state[parameter][self.name] = made


@dataclasses.dataclass(frozen=True, slots=True)
class _KnownStep:
    """What a step allocated and freed, and what it left in the optimizer's state."""

    events: tuple[Event, ...]
    left: Mapping[int, _Left]
    """What buckets have left, by their serial numbers."""
    beside: tuple[tuple[int, Any, Any], ...]
    """What is in the state and not in the log: by parameter and name, numbers, and counters that are on the host."""

    @classmethod
    def of(cls, optimizer: Optimizer, log: AllocationLog, events: list[Event]) -> _KnownStep | None:
        """None where something happened that cannot be told again."""
        allocated = {event.serial for event in events if isinstance(event, Allocated)}
        freed = {event.serial for event in events if isinstance(event, Freed)}
        left, beside = dict[int, _Left](), []
        for index, parameter in enumerate(parameters_of(optimizer)):
            for name, value in optimizer.state.get(parameter, {}).items():
                serial = _serial_of(value, log)
                if serial is None:
                    beside.append((index, name, value))
                elif serial in allocated:
                    left[serial] = _Left(index, name, value.shape, value.stride(), value.dtype)
        is_told = all(isinstance(event, Allocated | Freed) for event in events)
        is_whole = freed <= allocated and allocated - freed == set(left)
        return cls(tuple(events), left, tuple(beside)) if is_told and is_whole else None

    def again(self, optimizer: Optimizer, log: AllocationLog) -> None:
        """The same for an optimizer over parameters of the same kinds."""
        parameters = parameters_of(optimizer)
        for index, name, value in self.beside:
            optimizer.state[parameters[index]].setdefault(name, value)
        serials, passing = dict[int, int](), list[Event]()
        for event in self.events:
            if isinstance(event, Allocated) and event.serial in self.left:
                log.again(passing, serials)
                passing.clear()
                self.left[event.serial].make(optimizer, parameters)  # of which the log is told as of any other tensor
            else:
                passing.append(event)
        log.again(passing, serials)


KnownSteps = dict[Hashable, _KnownStep | None]
"""Steps of buckets that were tried, by what decides what they allocate; None where such a step cannot be told again."""


def _serial_of(value: object, log: AllocationLog) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return log.serial_of(private.storage_key(value.untyped_storage()))


@dataclasses.dataclass(frozen=True, slots=True)
class _Slot:
    """A state tensor, and how it waits in its bucket."""

    parameter: torch.Tensor
    name: Any
    offset: int
    waiting_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def is_packed(self) -> bool:
        return self.waiting_bytes < self.num_elements * self.dtype.itemsize


class _Bucket:
    """A few parameters, which are stepped together."""

    def __init__(
        self,
        optimizer: Optimizer,
        ids: Mapping[int, int],
        rules: BucketRules,
        *,
        stays: bool = False,
        guests: Stepping | None = None,
        cut: torch.Tensor | None = None,
    ) -> None:
        """`cut` is the parameter on the device of which the optimizer's only parameter is a stretch."""
        self.optimizer = optimizer
        self._cut = cut
        self._how = rules.stepping if guests is None else guests
        self.moves = self._how.moves and not stays
        self._stays = stays
        self.has_guests = guests is not None
        self._standing: list[torch.Tensor | None] = []
        self._weights: list[torch.Tensor] = []
        """What guests take on the device, coming, stepped or on their way out."""
        self._gradients: list[torch.Tensor] = []
        self._coming: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters whose gradients wait elsewhere, with what these take here."""
        self._ids = ids
        self._rules = rules
        self.num_steps = 0
        self._slots: tuple[_Slot, ...] | None = None
        self._num_bytes = 0
        self._memory: torch.Tensor | None = None
        """Whether it is on the device now: coming, stepped, or on its way out; between steps, where it waits there."""

    @property
    def kind(self) -> Hashable:
        """Buckets of one kind allocate the same in their next step."""
        members = [
            (
                index,
                parameter.shape,
                parameter.stride(),
                parameter.dtype,
                self.has_guests or self._cut is not None or parameter.grad is not None,
            )
            for index, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        ]
        return self.num_steps, tuple(members)

    @property
    def device(self) -> torch.device:
        return parameters_of(self.optimizer)[0].device

    @property
    def has_gradients(self) -> bool:
        parameters = parameters_of(self.optimizer) if self._cut is None else [self._cut]
        return self.has_guests or any(parameter.grad is not None for parameter in parameters)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of the parameters that are stepped."""
        parameters = parameters_of(self.optimizer)
        are_stepped = self.has_guests or self._cut is not None
        return sum(parameter.nbytes for parameter in parameters if are_stepped or parameter.grad is not None)

    @property
    def travels(self) -> bool:
        """Whether anything of it comes for its step: state, guests, or gradients that wait elsewhere."""
        return self.moves or self.brings_gradients

    @property
    def brings_gradients(self) -> bool:
        return bool(self._waiting)

    @property
    def _waiting(self) -> list[torch.Tensor]:
        """The parameters whose gradients wait elsewhere."""
        parameters = parameters_of(self.optimizer) if self._cut is None else [self._cut]
        return [parameter for parameter in parameters if is_waiting(parameter.grad)]

    @property
    def waits_elsewhere(self) -> bool:
        """Whether state of it waits elsewhere."""
        return self.moves and self.num_bytes > 0

    @property
    def num_bytes(self) -> int:
        """The bytes of state that wait between steps; 0 before the first."""
        return self._num_bytes

    @property
    def late_bytes(self) -> int:
        """What of it could still leave when a step is over. Guests are at home by then."""
        return self._num_bytes if self.moves and not self.has_guests and self._rules.stepping.prefetches else 0

    @property
    def memory_bytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def free_memory(self) -> None:
        self._memory = None

    @property
    def is_laid_out(self) -> bool:
        return self._slots is not None

    def start(self) -> None:
        """Allocate memory for what waits elsewhere."""
        if self._slots and self._memory is None:
            self._memory = torch.empty(self._num_bytes, dtype=torch.uint8, device=self.device)

    def invite(self) -> None:
        """Memory for guests and their gradients, and for gradients that wait elsewhere."""
        if not self.has_guests and not self._coming:
            stepped = parameters_of(self.optimizer) if self._cut is not None else self._waiting
            for parameter in stepped if self._waiting else ():
                self._coming.append((parameter, torch.empty_like(parameter, requires_grad=False)))
        if self.has_guests and not self._weights:
            for parameter in parameters_of(self.optimizer):
                self._weights.append(torch.empty_like(parameter, requires_grad=False))
                self._gradients.append(torch.empty_like(parameter, requires_grad=False))

    def welcome(self) -> None:
        """Guests are stepped: the fake parameters do not leave their place, so what they take here is beside them."""
        self.invite()
        self._standing = [parameter.grad for parameter, _ in self._coming]
        for parameter, gradient in self._coming:
            parameter.grad = gradient
        if self._cut is not None and self._cut.grad is not None and not self._coming:
            for parameter in parameters_of(self.optimizer):
                parameter.grad = _part(self._cut.grad, parameter.shape)
        for parameter, gradient in zip(parameters_of(self.optimizer), self._gradients, strict=self.has_guests):
            parameter.grad = gradient

    def see_off(self) -> None:
        """Guests leave, beside what follows as far as the window goes; their gradients do not go with them."""
        for (parameter, _), standing in zip(self._coming, self._standing, strict=True):
            parameter.grad = standing
        self._coming = []
        if self._cut is not None:
            for parameter in parameters_of(self.optimizer):
                parameter.grad = None
        if self.has_guests:
            for parameter in parameters_of(self.optimizer):
                parameter.grad = None
            self._gradients = []
            window_bytes = self._rules.window_bytes if self._rules.stepping.prefetches else 0
            while sum(weight.nbytes for weight in self._weights) > window_bytes:
                del self._weights[0]

    def bring(self, *, is_known: bool = False) -> None:
        """`is_known`: what the step allocates is known, and nobody looks at state that lies in the bucket's memory."""
        self.start()
        for slot in self._slots or ():
            if slot.is_packed or not is_known:
                self.optimizer.state[slot.parameter][slot.name] = self._brought(slot)

    def _brought(self, slot: _Slot) -> torch.Tensor:
        assert self._memory is not None
        if not slot.is_packed:
            # Views of views of the memory would show the same, and take a millisecond each: offsets are all different.
            storage, offset = self._memory.untyped_storage(), slot.offset // slot.dtype.itemsize
            return private.tensor_over(storage, slot.dtype, self._memory.device, offset, slot.shape, slot.stride)
        tensor = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device=self.device)
        for elements in _chunks(slot.num_elements):
            torch.empty(elements, dtype=torch.float32, device=self.device)
        return tensor

    def park(self) -> None:
        """Lay the state out, the first time; pack it, and let it wait."""
        if self._slots is None:
            self._lay_out()
        for slot in self._slots or ():
            if slot.is_packed:
                self._pack(slot)
            self.optimizer.state[slot.parameter].pop(slot.name, None)
        sent_at_once = not self._rules.stepping.prefetches or self._num_bytes > self._rules.window_bytes
        if self.moves and sent_at_once:
            self._memory = None

    def _lay_out(self) -> None:
        slots, offset = [], 0
        for parameter in parameters_of(self.optimizer):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                waiting_bytes = self._waiting_bytes(parameter, name, value)
                if waiting_bytes is not None:
                    shape, stride = tuple(value.shape), tuple(value.stride())
                    slots.append(_Slot(parameter, name, offset, waiting_bytes, value.dtype, shape, stride))
                    offset += waiting_bytes
        self._slots, self._num_bytes = tuple(slots), offset
        self.start()

    def _waiting_bytes(self, parameter: torch.Tensor, name: Any, value: object) -> int | None:
        if self._stays or not isinstance(value, torch.Tensor):
            return None
        return self._how.waiting_bytes(self.optimizer, self._ids[id(parameter)], name, value)

    def _pack(self, slot: _Slot) -> None:
        """What the kernel gives is copied into its place, chunk by chunk."""
        for elements in _chunks(slot.num_elements):
            codes = torch.empty(elements, dtype=torch.uint8, device=self.device)
            scales = torch.empty(-(-elements // self._rules.block_size), dtype=torch.float32, device=self.device)
            del codes, scales

    def let_go(self) -> None:
        """The bucket's memory has been copied out, and is freed."""
        if self.moves:
            self._memory = None
        self._weights = []


def _start_more(following: Sequence[_Bucket], not_early: Sequence[_Bucket], most_bytes: int) -> None:
    """What early state has made room for comes. See NOTE [room of early state] in adopted_optimizer.py."""
    for bucket in following:
        if bucket.memory_bytes or not bucket.is_laid_out:
            continue
        ahead_bytes = sum(one.memory_bytes for one in not_early) + bucket.num_bytes
        if bucket.has_guests or bucket.brings_gradients or ahead_bytes > most_bytes:
            return
        bucket.start()


def _let_go(leaving: collections.deque[_Bucket], but: int = 0) -> None:
    while len(leaving) > but:
        leaving.popleft().let_go()


def _chunks(num_elements: int) -> Iterator[int]:
    for start in range(0, num_elements, CHUNK_ELEMENTS):
        yield min(CHUNK_ELEMENTS, num_elements - start)


def _split(optimizer: Optimizer, ids: Mapping[int, int], away: Collection[int], rules: BucketRules) -> list[_Bucket]:
    """What is on the device, and then what is streamed, where that visits it."""
    resident = [parameter for parameter in parameters_of(optimizer) if id(parameter) not in away]
    members = [[resident[i] for i in indices] for indices in rules.stepping.split([p.nbytes for p in resident])]
    sizes = [sum(parameter.nbytes for parameter in inside) for inside in members]
    cuts = rules.stepping.cuts_for(optimizer)
    stays = rules.stepping.stays(sizes, rules.resident_share, cuts=cuts)
    buckets = []
    for inside, does_stay in zip(members, stays, strict=True):
        parts = [dict.fromkeys(inside)] if does_stay else _parts(optimizer, ids, rules.stepping, inside)
        buckets += [_resident(optimizer, ids, rules, part, stays=does_stay) for part in parts]
    return buckets if rules.guests is None else [*buckets, *_guests(optimizer, ids, away, rules, rules.guests)]


def _parts(
    optimizer: Optimizer, ids: Mapping[int, int], how: Stepping, together: Sequence[torch.Tensor]
) -> Sequence[Mapping[torch.Tensor, torch.Size | None]]:
    return how.stretches(optimizer, {ids[id(parameter)]: parameter for parameter in together})


def _resident(
    optimizer: Optimizer,
    ids: Mapping[int, int],
    rules: BucketRules,
    part: Mapping[torch.Tensor, torch.Size | None],
    *,
    stays: bool,
) -> _Bucket:
    """The bucket of some parameters on the device, or of a stretch of one."""
    places = {id(p): p if size is None else _stretch(p, size) for p, size in part.items()}
    own_ids = {id(place): ids[number] for number, place in places.items()}
    cut = next((p for p, size in part.items() if size is not None), None)
    return _Bucket(over_parameters(optimizer, places), own_ids, rules, stays=stays, cut=cut)


def _guests(
    optimizer: Optimizer, ids: Mapping[int, int], away: Collection[int], rules: BucketRules, how: Stepping
) -> Iterator[_Bucket]:
    streamed = [parameter for parameter in parameters_of(optimizer) if id(parameter) in away]
    for indices in how.split([parameter.nbytes for parameter in streamed]):
        together = [streamed[index] for index in indices if streamed[index].requires_grad]
        for part in _parts(optimizer, ids, how, together):
            places = {id(p): p if size is None else _stretch(p, size) for p, size in part.items()}
            own_ids = {id(place): ids[number] for number, place in places.items()}
            if places:
                yield _Bucket(over_parameters(optimizer, places), own_ids, rules, guests=how)


def _stretch(parameter: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """In the parameter's own memory, which is not on the device."""
    stretch = _part(parameter, size)
    stretch.requires_grad = True
    return stretch


def _part(tensor: torch.Tensor, size: torch.Size) -> torch.Tensor:
    """The beginning of a tensor's memory. A view would show the same, by several operators: there are many of these."""
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    return private.tensor_over(storage, tensor.dtype, tensor.device, offset, tuple(size), (1,))
