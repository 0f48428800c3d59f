"""What a module's forward reads and changes beside its arguments, kept so that a second run sees what the first saw.

    memory = state.before()            # then the forward
    state.after(memory)
    ...
    shown = state.show(memory)         # the module as that forward found it; then the second run
    state.hide(shown)                  # the module as it was, untouched

It runs once a layer a step, so it is written for speed: `python -m benchmarks.overhead`.

NOTE [changing state]: small vectors and numbers among the buffers are copied before every forward: kernels of batch
norms write to them without telling autograd, and that a forward left them alone says nothing of the next one (a layer
that was dropped, a mean that was zero). Which other buffers and attributes a forward changes is learned at the first
forward in each state of the training flags; from then on only those are copied, and of the others it is seen whether
they were replaced or, for tensors, changed. Buffers are compared by value at that first forward. Objects, arrays and
other containers that an attribute holds are looked into then, too (held_state.py); those that it changed show the
recompute what they held, and are the same objects all the time.

NOTE [silent writes]: what is saved for backward has, in backward, what was written to it since without autograd being
told (batch norms, `.data`), and plain PyTorch uses that. So when a recompute is over, the copies that it computed with
get what the buffers hold by now. Where autograd was told, plain PyTorch raises, and the copies stay as they are.

NOTE [tables]: everything lies in dictionaries: four for each part of the module, its attributes, parameters, buffers
and children. They are numbered and read in one go. Those of the parts are held; the module's own is not, since it
leads to us: a wrapped model dies with its last reference.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.carried_attributes import attributes_of
from memscale._torch.overrides import OWN_ATTRIBUTES
from memscale._torch.snapshots import (
    ABSENT,
    KeptTensor,
    clones_of,
    groups_sharing_memory,
    has_same_values,
    is_generator,
    is_small_vector,
    is_unchanged,
    may_change_silently,
    set_state,
    snapshot,
    stand_in_for,
    state_of,
    version_of,
    versions_of,
)
from memscale._torch.unversioned_steps import STEPS
from memscale.techniques.recompute import tensors_beside
from memscale.techniques.recompute.held_state import HeldState, Hidden, hide
from memscale.techniques.recompute.tensors_beside import KeptTensors, TensorsBeside

Table: TypeAlias = dict[str, Any]
Slot: TypeAlias = tuple[int, str]
"""The number of a table, and a name in it."""
Flags: TypeAlias = tuple[bool, ...]

RUN_AGAIN = "Run the step again: MemScale remembers it from now on. If it recurs, leave the layer out of checkpointing."
LARGEST_HOST_COPY_BYTES = 1 << 20
"""The largest buffer that is copied to the host before it is known to change."""
_NUM_TABLES = 4
"""How many tables each part of a model has: attributes, parameters, buffers, children."""
_COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) | OWN_ATTRIBUTES
_is = operator.is_


class Layout:
    """Where everything lies that a forward may read, at one moment."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        parts = list(module.modules())
        self._others: list[Table] = [table for part in parts for table in _tables_of(part)][1:]
        tables = self._tables()
        self._num_entries = sum(map(len, tables))
        numbers = range(0, len(tables), _NUM_TABLES)
        # A compiled module has no flag of its own, it asks the one inside.
        flags = [(n, "training") for n in numbers if "training" in tables[n]]
        attributes = [(n, name) for n in numbers for name in tables[n] if name not in _COMMON_ATTRIBUTES]
        parameters, self.buffer_slots, self._child_slots = (
            [(n, name) for n in range(kind, len(tables), _NUM_TABLES) for name in tables[n]] for kind in (1, 2, 3)
        )
        self.slots = [*flags, *attributes, *parameters, *self.buffer_slots]
        ends = len(flags), len(flags) + len(attributes), len(self.slots) - len(self.buffer_slots)
        self.flags, self.attributes = slice(ends[0]), slice(ends[0], ends[1])
        self.parameters, self.buffers = slice(ends[1], ends[2]), slice(ends[2], None)
        self._buffer_tables = tables[2::_NUM_TABLES]
        self._children = [tables[n][name] for n, name in self._child_slots]
        values = [tables[n][name] for n, name in attributes]
        self._types = list(map(type, values))
        self.tensors = [ends[0] + k for k, value in enumerate(values) if isinstance(value, torch.Tensor)]
        """Attributes that hold tensors, and those that hold random generators: their places among the slots."""
        self.generators = [ends[0] + k for k, value in enumerate(values) if is_generator(value)]
        self._getters = [
            (n, _getter([name for _, name in slots]))
            for n, slots in itertools.groupby(self.slots, lambda slot: slot[0])
        ]

    def _tables(self) -> list[Table]:
        module = self._module()
        assert module is not None, "a module's forward runs while the module lives"
        return [module.__dict__, *self._others]

    def forget_parts(self) -> None:
        self._others, self._children, self._buffer_tables = [], [], []

    def has_the_parts_of(self, other: Layout) -> bool:
        return len(self._others) == len(other._others) and all(map(_is, self._others, other._others))

    def read(self) -> list[Any] | None:
        """What the slots hold now; None if there are other slots, other parts, or tensors where there were none."""
        tables = self._tables()
        if sum(map(len, tables)) != self._num_entries:
            return None
        values: list[Any] = []
        try:
            for n, get in self._getters:
                values += get(tables[n])
            children = [tables[n][name] for n, name in self._child_slots]
        except KeyError:
            return None
        is_as_before = all(map(_is, children, self._children)) and all(
            map(_is, map(type, values[self.attributes]), self._types)
        )
        return values if is_as_before else None

    def read_buffers(self) -> list[Any]:
        """What the slots of buffers hold now."""
        tables = self._tables()
        return [tables[n].get(name, ABSENT) for n, name in self.buffer_slots]

    def table(self, number: int) -> Table:
        return self._others[number - 1] if number else self._tables()[0]

    def get(self, slot: Slot) -> Any:
        return self.table(slot[0]).get(slot[1], ABSENT)

    def num_buffers(self) -> int:
        return sum(map(len, self._buffer_tables))

    def slots_now(self) -> Iterator[Slot]:
        """All slots there are now, also those that came after this layout was made; without children."""
        for number, table in enumerate(self._tables()):
            kind = number % _NUM_TABLES
            names = [name for name in table if kind or name not in _COMMON_ATTRIBUTES] if kind != 3 else []
            yield from ((number, name) for name in names)

    def is_attribute(self, slot: Slot) -> bool:
        return slot[0] % _NUM_TABLES == 0

    def is_buffer(self, slot: Slot) -> bool:
        return slot[0] % _NUM_TABLES == 2

    def owner_of(self, slot: Slot) -> str:
        """The class of the part that a slot belongs to."""
        module = self._module()
        assert module is not None
        return type(list(module.modules())[slot[0] // _NUM_TABLES]).__name__


def _getter(names: list[str]) -> Callable[[Table], tuple[Any, ...]]:
    """All of these in one go."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    (name,) = names
    return lambda table: (table[name],)


def _tables_of(part: nn.Module) -> tuple[Table, Table, Table, Table]:
    return part.__dict__, part._parameters, part._buffers, part._modules


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """How a forward left a buffer. See NOTE [silent writes]."""

    buffer: torch.Tensor
    version: int
    address: int
    """Where its memory was then."""
    is_moved: bool
    """Whether that was elsewhere when the forward began."""

    @classmethod
    def now(cls, buffer: torch.Tensor, begun_at: int) -> Left:
        address = buffer.data_ptr()
        return cls(buffer, version_of(buffer), address, address != begun_at)


class Memory:
    """What one forward found."""

    __slots__ = (
        "attributes", "beside", "buffers", "copied", "copies", "flags", "generators", "held", "layout", "left",
        "num_steps", "shared", "tensors", "values", "versions",
    )  # fmt: skip

    def __init__(self, layout: Layout, values: list[Any]) -> None:
        self.layout = layout
        self.values = values
        self.flags: Flags = tuple(values[layout.flags])
        self.versions = versions_of(values[layout.parameters])
        self.num_steps = STEPS.count
        """How many steps had changed parameters without new versions."""
        self.buffers: Sequence[tuple[Slot, torch.Tensor | None, int]] = ()
        """Those that it left alone, with their versions."""
        self.copies: dict[Slot, Any] = {}
        """Earlier values of the buffers that it changed; None or `ABSENT` for those that it made."""
        self.copied: dict[Slot, tuple[torch.Tensor, int]] = {}
        """Those buffers and the addresses of their memory, until the forward is over."""
        self.left: dict[Slot, Left] = {}
        """How it left those buffers. See NOTE [silent writes]."""
        self.shared: frozenset[Slot] = frozenset()
        """Those of the copied buffers that share memory with another one."""
        self.tensors: Sequence[tuple[Slot, Any, int]] = ()
        """Attributes that hold tensors, with their versions."""
        self.attributes: dict[Slot, Any] = {}
        """Snapshots of the attributes that it changed."""
        self.generators: Sequence[tuple[Any, Any]] = ()
        """Random generators that the module holds, and their state."""
        self.held: dict[Slot, HeldState] = {}
        """What the attributes held that it changed inside."""
        self.beside: KeptTensors | None = None
        """Tensors that are not registered."""

    def storages(self) -> frozenset[int]:
        """The storages of all tensors of the module that it knows of."""
        tensors = [value for value in self.values if isinstance(value, torch.Tensor)]
        if self.beside is not None:
            tensors += [*(tensor for tensor, _ in self.beside.contents), *(tensor for tensor, _ in self.beside.large)]
            tensors += [tensor for tensor, *_ in (*self.beside.first, *self.beside.sums)]
        return frozenset(
            private.storage_key(tensor.untyped_storage()) for tensor in tensors if tensor.layout is torch.strided
        )


class Shown:
    """What the module really has while it shows a memory."""

    __slots__ = ("contents", "entries", "generators", "hidden", "stand_ins")

    def __init__(self) -> None:
        self.stand_ins: list[tuple[torch.Tensor, int, Left]] = []
        """Copies of buffers, the addresses of their memory, and how their forward left the buffers."""
        self.contents: tensors_beside.Contents = []
        self.hidden: list[Hidden] = []
        self.entries: list[tuple[Table, str, Any]] = []
        self.generators: list[tuple[Any, Any]] = []

    def put(self, layout: Layout, values: Iterable[tuple[Slot, Any]]) -> None:
        entries = []
        for (number, name), value in values:
            table = layout.table(number)
            self.entries.append((table, name, table.get(name, ABSENT)))
            entries.append((table, name, value))
        _put(entries)


def _put(entries: Iterable[tuple[Table, str, Any]]) -> None:
    for table, name, value in entries:
        if value is ABSENT:
            table.pop(name, None)
        else:
            table[name] = value


def _forget_parts(state_ref: weakref.ref[ModuleState], _: object) -> None:
    state = state_ref()
    if state is not None:
        state.forget_parts()


class ModuleState:
    """Everything about one module that its recompute must see as its forward saw it."""

    def __init__(self, module: nn.Module, *, on_host: bool = False) -> None:
        """`on_host`: copies of buffers are in host memory, for `restore`; else on their device, for `show`."""
        self._module = weakref.ref(module, functools.partial(_forget_parts, weakref.ref(self)))
        self._layout = Layout(module)
        self._on_host = on_host
        self.computes_with_copies = False
        """Whether the forward has copies of the parameters in their places, so that these do not change."""
        self._forget()

    def _forget(self) -> None:
        self._buffers, self._attributes, self._held = _Buffers(self._on_host), _Attributes(), _Held()
        self._beside = TensorsBeside()

    def forget_parts(self) -> None:
        """The module is gone: whoever still holds its executor does not hold the parameters of its parts."""
        self._layout.forget_parts()
        self._forget()

    def before(self) -> Memory:
        """Remember what is there; to be called right before the forward."""
        values = self._layout.read()
        if values is None:
            values = self._look_again()
        memory = Memory(self._layout, values)
        if self._layout.buffer_slots:
            self._buffers.before(memory)
        self._attributes.before(memory)
        self._held.before(memory)
        if not self._on_host:  # who restores a whole step looks beside the model himself
            parameters = () if self.computes_with_copies else values[self._layout.parameters]
            attributes = [values[k] for k in self._layout.tensors]
            memory.beside = self._beside.before(self._there(), attributes, parameters, memory.flags)
        return memory

    def _there(self) -> nn.Module:
        module = self._module()
        assert module is not None, "a module's forward runs while the module lives"
        return module

    def _look_again(self) -> list[Any]:
        """There is more or less than there was. All that was learned about other parts is forgotten."""
        layout = Layout(self._there())
        if not layout.has_the_parts_of(self._layout):
            self._forget()
        self._layout = layout
        values = layout.read()
        assert values is not None, "nothing has happened since"
        return values

    def after(self, memory: Memory) -> None:
        """To be called right after it; learns, and refuses what was learned wrongly."""
        if memory.layout.num_buffers() or memory.layout.buffer_slots:
            self._buffers.after(memory)
        if memory.flags not in self._attributes.changing:
            self._attributes.learn(memory)
            self._held.learn(memory)
        if memory.beside is not None:
            self._beside.after(memory.beside)

    def show(self, memory: Memory) -> Shown:
        """Let the module be as that forward found it. Refuses before it changes anything."""
        layout = memory.layout
        _refuse_changed_parameters(memory)
        if memory.tensors:
            self._attributes.refuse_changed(memory)
        if memory.held:
            self._held.refuse_lost(memory)
        shown = Shown()
        now = layout.read()
        if now is None or not all(map(_is, now, memory.values)):
            _show_others(memory, shown)
        # Stand-ins: a second recompute finds the copies untouched.
        if memory.copies:
            clones = clones_of(memory.copies, memory.shared)
            shown.put(layout, clones.items())
            shown.stand_ins = [(clones[slot], clones[slot].data_ptr(), left) for slot, left in memory.left.items()]
        if memory.attributes:
            shown.put(layout, [(slot, stand_in_for(value)) for slot, value in memory.attributes.items()])
        for generator, state in memory.generators:
            shown.generators.append((generator, state_of(generator)))
            set_state(generator, state)
        for held in memory.held.values():
            shown.hidden.append(held.show())
        if memory.beside is not None:
            shown.contents = tensors_beside.show(memory.beside)
        return shown

    def refuse_lost(self, memory: Memory) -> None:
        """Raise unless the module can be as that forward found it."""
        _refuse_changed_parameters(memory)
        for slot, value, version in memory.buffers:
            if version_of(value) != version and slot not in memory.copies:
                _refuse_buffer(memory.layout, slot)
        self._attributes.refuse_changed(memory)
        self._held.refuse_lost(memory)

    def restore(self, memory: Memory) -> None:
        """Let the module be as that forward found it, for good. Refuses before it changes anything."""
        layout = memory.layout
        self.refuse_lost(memory)
        _show_others(memory, Shown())
        before = dict(zip(layout.slots, memory.values, strict=True))
        for slot, copied in memory.copies.items():
            if isinstance(copied, torch.Tensor) and not _is_as_copied(copied, before[slot]):
                # Without a new version, as batch norms write to it: the graph of an earlier forward may have saved it.
                before[slot].data.copy_(copied)
        _put((layout.table(slot[0]), slot[1], before[slot]) for slot in memory.copies if slot in before)
        for slot, kept in memory.attributes.items():  # what objects and containers held is put back below
            value = kept.put_back() if isinstance(kept, KeptTensor) else before.get(slot, ABSENT)
            _put([(layout.table(slot[0]), slot[1], value)])
        for generator, state in memory.generators:
            set_state(generator, state)
        for held in memory.held.values():
            held.show()

    def hide(self, shown: Shown) -> None:
        """Let the module be as it was before `show`."""
        _let_silent_writes_through(shown.stand_ins)
        tensors_beside.hide(shown.contents)
        for hidden in reversed(shown.hidden):
            hide(hidden)
        _put(reversed(shown.entries))
        for generator, state in shown.generators:
            set_state(generator, state)


def _let_silent_writes_through(stand_ins: list[tuple[torch.Tensor, int, Left]]) -> None:
    """See NOTE [silent writes]. Where a buffer has other memory by now (`.data = ...`), so must its copy: what was
    saved of its views keeps the values of before, also where the recompute ended before it came to that."""
    known = [each for each in stand_ins if version_of(each[2].buffer) == each[2].version]
    in_place = [
        (copied, left.buffer)
        for copied, address, left in known
        if left.buffer.data_ptr() == left.address and (copied.data_ptr() != address) == left.is_moved
    ]
    written = {id(copied) for copied, _ in in_place}
    with private.real_tensors():
        if in_place:
            private.write_silently([copied for copied, _ in in_place], [buffer for _, buffer in in_place])
        for copied, _, left in known:
            if id(copied) not in written:
                copied.data = left.buffer.detach().clone()


def _show_others(memory: Memory, shown: Shown) -> None:
    """What was replaced, made or taken out since the forward began: by a later one than was learned from, by somebody
    between forward and backward (a rate, the training mode), or by `torch.func.functional_call`, which puts other
    tensors in place for the length of a forward."""
    layout = memory.layout
    before = dict(zip(layout.slots, memory.values, strict=True))
    slots = dict.fromkeys([*before, *layout.slots_now()])
    earlier = {slot: before.get(slot, ABSENT) for slot in slots if slot not in memory.copies | memory.attributes}
    shown.put(layout, [(slot, value) for slot, value in earlier.items() if layout.get(slot) is not value])


def _refuse_changed_parameters(memory: Memory) -> None:
    parameters = memory.values[memory.layout.parameters]
    if versions_of(parameters) == memory.versions and memory.num_steps == STEPS.count:
        return
    pairs = zip(memory.layout.slots[memory.layout.parameters], parameters, memory.versions, strict=True)
    for slot, value, version in pairs:
        if value is None or (version_of(value) == version and not STEPS.has_stepped(value, since=memory.num_steps)):
            continue
        raise RuntimeError(
            f"parameter {slot[1]!r} of shape {tuple(value.shape)} was changed in place between forward and backward, "
            "so computing its layer again would give other results. Call backward before the optimizer's step."
        )


class _Buffers:
    """Knows which buffers a forward changes. See NOTE [changing state]."""

    def __init__(self, on_host: bool) -> None:
        self._on_host = on_host
        self._changing: dict[Flags, set[Slot]] = {}
        self._looked_at: list[weakref.ref[Any]] = []
        self._small: frozenset[Slot] = frozenset()
        """Those that are copied before every forward, and all that share memory with one of them."""
        self._shared: frozenset[Slot] = frozenset()

    def before(self, memory: Memory) -> None:
        found = dict(zip(memory.layout.buffer_slots, memory.values[memory.layout.buffers], strict=True))
        self._look_at(found)
        known = self._changing.get(memory.flags)
        if known is None:
            # One that fails has taught nothing: what is small can be put back all the same.
            small = self._small if self._on_host else frozenset()
            copied = {
                slot: value
                for slot, value in found.items()
                if value is not None and (slot in small or self._may_change(value))
            }
        else:
            copied = {slot: found.pop(slot) for slot in [*self._small, *known.difference(self._small)] if slot in found}
        if found:
            memory.buffers = [(slot, value, version_of(value)) for slot, value in found.items()]
        if copied and self._on_host:
            memory.copies = {slot: _copied_to_host(value) for slot, value in copied.items()}
        elif copied:
            memory.shared = self._shared.intersection(copied)
            memory.copies = clones_of(copied, memory.shared)
            memory.copied = {slot: (value, value.data_ptr()) for slot, value in copied.items() if _may_be_saved(value)}

    def _may_change(self, value: torch.Tensor) -> bool:
        """Whether a value may change unseen; the versions of large ones that are written to as usual tell of it."""
        return may_change_silently(value) and not (self._on_host and value.nbytes > LARGEST_HOST_COPY_BYTES)

    def _look_at(self, found: dict[Slot, Any]) -> None:
        """What is small and what shares memory is looked for only when there are other tensors than last time: that
        takes time."""
        values = {slot: value for slot, value in found.items() if isinstance(value, torch.Tensor)}
        known = [ref() for ref in self._looked_at]
        if len(values) == len(known) and all(map(_is, values.values(), known)):
            return
        self._looked_at = [weakref.ref(value) for value in values.values()]
        groups = groups_sharing_memory(values)
        small = [group for group in groups if any(is_small_vector(values[slot]) for slot in group)]
        self._small = frozenset(slot for group in small for slot in group)
        self._shared = frozenset(slot for group in groups if len(group) > 1 for slot in group)

    def after(self, memory: Memory) -> None:
        layout = memory.layout
        touched: dict[Slot, Any] = {
            slot: value
            for slot, value, version in memory.buffers
            if layout.get(slot) is not value or version_of(value) != version
        }
        if layout.num_buffers() != len(layout.buffer_slots):
            there = frozenset(layout.buffer_slots)
            made = [slot for slot in layout.slots_now() if layout.is_buffer(slot) and slot not in there]
            touched |= dict.fromkeys(made, ABSENT)
        known = self._changing.get(memory.flags)
        if known is None:
            self._learn(memory, touched)
        elif touched:
            known.update(touched)
            _refuse_buffer(layout, next(iter(touched)))
        copied, memory.copied = memory.copied, {}
        memory.left = {slot: Left.now(*found) for slot, found in copied.items() if slot in memory.copies}

    def _learn(self, memory: Memory, touched: dict[Slot, Any]) -> None:
        changed = {
            slot
            for slot, value in memory.copies.items()
            if slot not in self._small and not _is_as_copied(value, memory.layout.get(slot))
        }
        known = self._changing[memory.flags] = changed.union(touched)
        for slot, value in touched.items():
            if slot not in memory.copies:  # made by this forward, or without values: then any copy will do
                memory.copies[slot] = value.clone() if isinstance(value, torch.Tensor) else value
        kept = known | self._small
        memory.copies = {slot: copied for slot, copied in memory.copies.items() if slot in kept}
        memory.buffers = [entry for entry in memory.buffers if entry[0] not in kept]


def _may_be_saved(value: Any) -> bool:
    """Whether autograd may save this buffer, whose values matter then. See NOTE [silent writes]."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not private.is_fake(value)


def _copied_to_host(value: Any) -> Any:
    """On its way, in the order of the current stream: nobody waits for it until it is needed."""
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        return value.clone() if isinstance(value, torch.Tensor) else value
    copy = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    return copy.copy_(value, non_blocking=True)


def _is_as_copied(copied: torch.Tensor, now: Any) -> bool:
    if not isinstance(now, torch.Tensor):
        return False
    if copied.device != now.device:
        torch.accelerator.current_stream(now.device).synchronize()
        now = now.cpu()
    return has_same_values(copied, now)


def _refuse_buffer(layout: Layout, slot: Slot) -> None:
    raise RuntimeError(
        f"buffer {slot[1]!r} of {layout.owner_of(slot)} was changed by this forward but not by earlier ones, so "
        f"computing the layer again in backward would give other results. {RUN_AGAIN}"
    )


class _Attributes:
    """Knows which Python attributes a forward changes."""

    def __init__(self) -> None:
        self.changing: dict[Flags, dict[Slot, None]] = {}

    def before(self, memory: Memory) -> None:
        layout, values = memory.layout, memory.values
        known = self.changing.get(memory.flags)
        if known is None:
            found = zip(layout.slots[layout.attributes], values[layout.attributes], strict=True)
            memory.attributes = {slot: snapshot(value, may_be_large=False) for slot, value in found}
        elif known:
            memory.attributes = {slot: snapshot(layout.get(slot)) for slot in known}
        if layout.tensors:
            memory.tensors = [(layout.slots[k], values[k], version_of(values[k])) for k in layout.tensors]
        if layout.generators:
            memory.generators = [(values[k], state_of(values[k])) for k in layout.generators]

    def learn(self, memory: Memory) -> None:
        """From the first forward. What later ones replace is seen when it matters, in `show`."""
        layout, before = memory.layout, memory.attributes
        slots = dict.fromkeys([*before, *filter(layout.is_attribute, layout.slots_now())])
        known = {slot: None for slot in slots if not is_unchanged(before.get(slot, ABSENT), layout.get(slot))}
        self.changing[memory.flags] = known
        memory.attributes = {slot: before.get(slot, ABSENT) for slot in known}
        for slot, value in memory.attributes.items():
            if isinstance(value, KeptTensor) and value.is_lost:
                _refuse_attribute(layout, slot)

    def refuse_changed(self, memory: Memory) -> None:
        """A tensor that was changed in place, and of which there is no copy; the next forward makes one."""
        for slot, value, version in memory.tensors:
            if version_of(value) != version and slot not in memory.attributes:
                self.changing.get(memory.flags, {})[slot] = None
                _refuse_attribute(memory.layout, slot)


class _Held:
    """Knows which attributes hold something that a forward changes inside: an object, an array, a `Counter`.

    A parameter's own attributes are among them: 8-bit weights of bitsandbytes hand what they hold to their layer.
    """

    def __init__(self) -> None:
        self._changing: dict[Flags, dict[Slot, bool]] = {}
        """What changes, and whether tensors in there are changed in place: then they are copied before."""

    def before(self, memory: Memory) -> None:
        layout, known = memory.layout, self._changing.get(memory.flags)
        if known is None:
            found = zip(layout.slots[layout.attributes], memory.values[layout.attributes], strict=True)
            holders = {slot: value for slot, value in found if _may_hold(value)}
            parameters = zip(layout.slots[layout.parameters], memory.values[layout.parameters], strict=True)
            carried = ((slot, attributes_of(parameter)) for slot, parameter in parameters if parameter is not None)
            holders |= {slot: attributes for slot, attributes in carried if attributes is not None}
            memory.held = _look_inside(holders)
        elif known:
            memory.held = {
                slot: HeldState(_holder(layout.get(slot)), copies_tensors=copies, may_be_large=True)
                for slot, copies in known.items()
            }

    def learn(self, memory: Memory) -> None:
        memory.held = {slot: held for slot, held in memory.held.items() if held.is_changed()}
        self._changing[memory.flags] = {slot: held.has_changed_tensors() for slot, held in memory.held.items()}

    def refuse_lost(self, memory: Memory) -> None:
        """A tensor was changed in place of which there is no copy; the next forward makes one."""
        for slot, held in memory.held.items():
            if held.is_lost():
                self._changing.get(memory.flags, {})[slot] = True
                _refuse_attribute(memory.layout, slot)


_HOLD_NOTHING = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, torch.Size)


def _may_hold(value: Any) -> bool:
    """Generators that an attribute holds itself have a place of their own, which is faster."""
    return type(value) not in _HOLD_NOTHING and not is_generator(value)


def _holder(value: Any) -> Any:
    return vars(value) if isinstance(value, torch.Tensor) else value


def _look_inside(values: dict[Slot, Any]) -> dict[Slot, HeldState]:
    """One look for every object: parts of a module share their configuration."""
    states: dict[int, HeldState] = {}
    held = {}
    for slot, value in values.items():
        if id(value) not in states:
            states[id(value)] = HeldState(value, copies_tensors=True, may_be_large=False)
            held[slot] = states[id(value)]
    return held


def _refuse_attribute(layout: Layout, slot: Slot) -> None:
    raise RuntimeError(
        f"attribute {slot[1]!r} of {layout.owner_of(slot)} was changed in place since this forward began, but not in "
        f"earlier steps, so computing the layer again in backward would give other results. {RUN_AGAIN}"
    )
