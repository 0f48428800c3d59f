"""Python state beside a model, from one training forward to the next, so that a forward can be run again exactly.

    beside = StepsBeside(model, attributes)
    taken = beside.before()             # at each training forward
    beside.after(taken)                 # when it is over
    ...
    beside.refuse_changes(taken)        # raises where what happened since cannot be known, or was not the forward
    beside.show_before(taken)
    with beside.ran() as check:         # the forward, again
        ...
    check()                             # raises where it used what cannot be compared
    beside.show_after(taken)

`Beside` finds what the model's code can reach by name, and what its attributes hold (state_beside.py). Looking at all
of it takes milliseconds, which is too long for every step. So it is looked at in the first forward, and then in ever
fewer: what has changed by then is noted in every forward that follows, which is nothing for most models. What is found
to have changed only when a step has failed may have been changed by that step, and the step is not run again.

NOTE [no work that grows]: what changes in every forward is noted before and after each, so it must be little: at most
`MOST_NOTED` elements. Where it is more (a list to which a forward appends its loss, after some thousand steps), nothing
is noted from then on, and steps of this model are not run again. What does not change is compared when it is looked
for and after a failure, never in between.

No tensor and no object is kept alive: they are held by weak references. One that is gone cannot be put back.

NOTE [what cannot be compared]: iterators, context variables, thread-locals, weak dictionaries, large containers. They
are looked for among the model's attributes, and among the names that code mentions which has really run: mere mentions
are too many. Code that ran and had not been found by its name is looked at in the same way.
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import ctypes
import dataclasses
import functools
import multiprocessing.sharedctypes
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from memscale._planning.recovery.reach import refuse_unknown
from memscale._planning.recovery.watched_run import NotComparable, Watch
from memscale._torch.entries import (
    CODE,
    FRESH_STATES,
    CachedCalls,
    Cell,
    Contents,
    ContextValue,
    Entry,
    TensorNote,
    Variables,
    cell_contents,
    holds_scalars,
    is_small_array,
)
from memscale._torch.messages import says_once
from memscale._torch.snapshots import ABSENT, version_of
from memscale._torch.state_beside import MAX_ELEMENTS, Beside

_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_OPAQUE = (
    collections.abc.Iterator, threading.local, weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary, weakref.WeakSet, queue.Queue, queue.SimpleQueue, ctypes._SimpleCData, ctypes.Array,
    ctypes.Structure, multiprocessing.sharedctypes.SynchronizedBase,
)  # fmt: skip
MOST_NOTED = 2_000
"""The most elements that are noted before and after every forward."""
_MANY = 64
"""From so many elements on, a container of scalars is compared in one go."""
_CONTAINERS = (list, dict, set, collections.deque, bytearray)
_SINGLE = (Cell, ContextValue)
_MAX_DEPTH = 4
_MAX_SEARCHED = 10_000
"""How deep, and how many values, are searched for tensors in a container that cannot be held weakly."""


class _Held:
    """A value, without keeping tensors and objects alive."""

    __slots__ = ("_is_weak", "_value", "_version")

    def __init__(self, value: Any) -> None:
        self._version = version_of(value)
        self._is_weak = not issubclass(type(value), (*_SCALARS, *CODE)) and value is not ABSENT
        if self._is_weak:
            try:
                value = weakref.ref(value)
            except TypeError:  # a builtin container, or an object with slots
                self._is_weak = False
                value = _LOST if _leads_to_tensors(value) else value
        self._value = value

    def get(self) -> Any:
        """The value; `_LOST` if it is gone."""
        if not self._is_weak:
            return self._value
        value = self._value()
        return _LOST if value is None or version_of(value) != self._version else value

    def is_now(self, value: Any) -> bool:
        held = self.get()
        if held is value or type(held) is not type(value) or not isinstance(held, _SCALARS):
            return held is value
        return bool(held == value) and (held != 0 or repr(held) == repr(value))  # there are two zeros


_LOST = object()


def _parts_of(value: Any) -> Iterable[Any]:
    if type(value) is types.CellType:
        value = cell_contents(value)
        return () if value is ABSENT else (value,)
    if issubclass(type(value), dict):
        return dict.values(value)
    if type(value) in (list, tuple, set, frozenset, collections.deque):
        return tuple(value)
    is_module = issubclass(type(value), nn.Module)  # lives as long as somebody trains it
    return () if is_module else getattr(value, "__dict__", {}).values()


def _leads_to_tensors(value: Any, known: frozenset[int] = frozenset()) -> bool:
    """Whether holding it would hold memory of a device: then it is not held. `known`: ids of tensors that are alive
    anyway, those of the model."""
    waiting, seen = [(value, 0)], 0
    while waiting:
        value, depth = waiting.pop()
        seen += 1
        is_tensor = issubclass(type(value), torch.Tensor) and id(value) not in known
        if seen > _MAX_SEARCHED or (is_tensor and value.device.type != "cpu"):
            return True
        if depth >= _MAX_DEPTH or issubclass(type(value), (*_SCALARS, *CODE)):
            continue
        waiting += [(each, depth + 1) for each in _parts_of(value)]
    return False


_Key: TypeAlias = tuple[type, int]


def _key(entry: Entry) -> _Key:
    return type(entry), id(entry.of)


class _State:
    """What one entry held at one moment."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        state = _taken(entry)
        self._is_plain = type(state) is list and len(state) > _MANY and holds_scalars(state)
        """They are scalars, and many: held as they are, and compared by what they are."""
        self._state = state if self._is_plain or isinstance(entry, FRESH_STATES) else _map(_Held, state)

    @property
    def num_elements(self) -> int:
        return len(self._state) if isinstance(self._state, list | dict) else 1

    def again(self) -> _State:
        """What it holds now."""
        return _State(self.entry)

    def leads_to_tensors(self, known: frozenset[int]) -> bool:
        owner = self.entry.of  # Python modules, whose variables are entries, live anyway
        is_alive_anyway = isinstance(owner, (*CODE, nn.Module)) or isinstance(self.entry, Variables)
        return not is_alive_anyway and _leads_to_tensors(owner, known)

    def is_now(self) -> bool:
        if isinstance(self.entry, FRESH_STATES):
            return self.entry.is_as(self._state)
        now = _taken(self.entry)
        if self._is_plain:
            is_equal = bool(now == self._state) and list(map(type, now)) == list(map(type, self._state))
            return is_equal and (0 not in now or repr(now) == repr(self._state))  # there are two zeros
        return _agree(self._state, now)

    def is_lost(self) -> bool:
        """Whether something that it held is gone, and cannot be put back."""
        if isinstance(self.entry, CachedCalls):
            return bool(self._state != CachedCalls.UNUSED)
        if _is_set(self.entry):
            return True
        if isinstance(self.entry, ContextValue) and self._state[0].get() is ABSENT:
            return True
        fresh = self._is_plain or isinstance(self.entry, FRESH_STATES)
        return not fresh and any(held.get() is _LOST for held in _leaves(self._state))

    def put(self) -> None:
        fresh = self._is_plain or isinstance(self.entry, FRESH_STATES)
        state = self._state if fresh else _map(_Held.get, self._state)
        self.entry.put(state[0] if isinstance(self.entry, _SINGLE) else state)


def _is_set(entry: Entry) -> bool:
    """The order of a set's elements depends on what was in it before, so one that has changed is not put back."""
    return isinstance(entry, Contents) and isinstance(entry.of, set)


def _taken(entry: Entry) -> Any:
    """What it holds now: several values, or a copy. A variable holds one value, which may be a container itself."""
    state = entry.take()
    return [state] if isinstance(entry, _SINGLE) else state


def _map(function: Callable[[Any], Any], state: Any) -> Any:
    if isinstance(state, dict):
        return {name: function(value) for name, value in state.items()}
    if isinstance(state, list):
        return [tuple(map(function, value)) if _is_pair(value) else function(value) for value in state]
    return function(state)


def _leaves(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [*state.values()]
    if isinstance(state, list):
        return [part for value in state for part in (value if _is_pair(value) else (value,))]
    return [state]


def _is_pair(value: Any) -> bool:
    """A key and its value: what a dictionary's contents are taken as."""
    return type(value) is tuple and len(value) == 2


def _agree(held: Any, now: Any) -> bool:
    if isinstance(held, dict) and held.keys() != now.keys():
        return False
    first = _leaves(held)
    second = [now[name] for name in held] if isinstance(held, dict) else _leaves(now)
    return len(first) == len(second) and all(map(_Held.is_now, first, second))


@dataclasses.dataclass
class Taken:
    """What one training forward found, and what it left, of the state that changes."""

    before: dict[_Key, _State]
    after: dict[_Key, _State] = dataclasses.field(default_factory=dict)


class StepsBeside:
    """See the module's docstring. `attributes` gives the values that the model's attributes hold now."""

    def __init__(self, model: nn.Module, attributes: Callable[[], Iterable[Any]]) -> None:
        self._model = weakref.ref(model)
        self._attributes = attributes
        self.forget()

    def forget(self) -> None:
        """Look again at the next forward."""
        self._first: dict[_Key, _State] = {}
        """What everything held at the first forward."""
        self._moving: set[_Key] = set()
        """What changes."""
        self._settled: dict[_Key, tuple[int, _State]] = {}
        """What of it held something else at the last look than at the one before: at which forward, and what."""
        self._tensors: dict[int, TensorNote] = {}
        """Tensors that were there at the first forward."""
        self._num_forwards = 0
        self._sayings: frozenset[types.CodeType] = frozenset()
        """The functions that say something once (messages.py)."""
        self._watch = Watch()

    def before(self) -> Taken:
        """To be called right before a training forward. `NotComparable` where too much changes from one to the next."""
        self._num_forwards += 1
        if self._num_forwards == 1:
            self._look()
            return Taken(dict(self._first))
        if self._num_forwards & (self._num_forwards - 1) == 0:
            self._moving.update(self._changed())
            self._drop_tensors()
            self._note_settled(self._moving)
        taken = Taken({key: self._first[key].again() for key in self._moving})
        num_elements = sum(state.num_elements for state in taken.before.values())
        if num_elements > MOST_NOTED:
            raise NotComparable(f"its forward changes Python containers that hold {num_elements:,} elements")
        return taken

    def after(self, taken: Taken) -> None:
        if self._num_forwards == 1:
            self._drop_tensors()
        changed = [key for key in (taken.before if self._num_forwards > 1 else self._changed()) if key in self._first]
        taken.after = {key: self._first[key].again() for key in changed}
        if self._num_forwards == 1:
            self._note_settled(changed)

    def _note_settled(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            if key in self._first and (key not in self._settled or not self._settled[key][1].is_now()):
                self._settled[key] = self._num_forwards, self._first[key].again()

    def _look(self) -> None:
        beside, inside = self._beside(), Beside.inside(self._attributes())
        found = [*self._entries_of(beside), *self._entries_of(inside)]
        self._tensors = {id(tensor): TensorNote(tensor) for tensor in (*beside.tensors, *inside.tensors)}
        self._first = {_key(entry): _State(entry) for entry in found}
        self._drop_tensors()

    def _entries_of(self, beside: Beside) -> list[Entry]:
        sayings = [cache for cache in beside.lru_caches if says_once(cache)]
        self._sayings = self._sayings.union(cache.__wrapped__.__code__ for cache in sayings)
        others = [cache for cache in beside.lru_caches if not any(cache is each for each in sayings)]
        return [*beside.entries, *map(CachedCalls, others)]

    def _beside(self) -> Beside:
        model = self._model()
        assert model is not None, "its step runs"
        return Beside.of_model(model)

    def _drop_tensors(self) -> None:
        """Do not hold what leads to memory of the device: a list to which a hook appends. See `refuse_changes`."""
        model = self._model()
        assert model is not None, "its step runs"
        known = frozenset(map(id, (*model.parameters(), *model.buffers())))
        held = [key for key, state in self._first.items() if state.leads_to_tensors(known)]
        for key in held:
            del self._first[key]
            self._moving.discard(key)

    def _changed(self) -> list[_Key]:
        return [key for key, state in self._first.items() if not state.is_now()]

    def refuse_changes(self, taken: Taken) -> None:
        """Raise `NotComparable` unless all is as the forward found it, or left it, or can be put back."""
        known = taken.after or taken.before
        strange = [key for key in self._changed() if key not in known]
        self._moving.update(strange)
        if strange:
            raise NotComparable("state beside the model changed in this step that had not changed before")
        if any(not state.is_now() for state in taken.after.values()):
            raise NotComparable("state beside the model changed after its forward")
        states = [*taken.before.values(), *taken.after.values()]
        if any(state.is_lost() for state in states if not state.is_now()):
            raise NotComparable("state beside the model held something that is gone")
        self._refuse_unknown()

    def refuse_moving(self, taken: Taken) -> None:
        """Raise `NotComparable` if anything beside the model changes from one forward to the next. What the first
        forward fills in is put back, if it is that one which failed, and has stayed as it was since, if it is not."""
        is_first = self._num_forwards == 1
        has_changed = not is_first and any(not state.is_now() for state in taken.before.values())
        if has_changed or not all(map(self._has_settled, self._moving)):
            raise NotComparable("Python state beside the model changes in its steps (see recover_from_oom=True)")

    def _has_settled(self, key: _Key) -> bool:
        number, state = self._settled.get(key, (self._num_forwards, None))
        return state is not None and number < self._num_forwards and state.is_now()

    @property
    def code_that_ran(self) -> dict[types.CodeType, dict[str, Any]]:
        """What is not PyTorch's, the standard library's or ours, while it was last watched, and its variables."""
        return self._watch.own

    def _refuse_unknown(self) -> None:
        inside = Beside.inside(self._attributes())
        if inside.is_cut or any(map(_is_opaque, inside.others)) or self._has_strange_module(inside.others):
            raise NotComparable(
                "an attribute of the model holds what cannot be compared: an iterator for example, a large array, or a "
                f"container of more than {MAX_ELEMENTS:,} elements"
            )
        found = [*self._entries_of(self._beside()), *self._entries_of(inside)]
        if any(_key(entry) not in self._first for entry in found):
            self.forget()
            raise NotComparable("there is state beside the model that holds tensors, or was not there at first")

    def _has_strange_module(self, values: Iterable[Any]) -> bool:
        """A module that is hidden from the model (in a list, in a global), whose tensors nobody has noted."""
        modules = [value for value in values if issubclass(type(value), nn.Module)]
        model = self._model()
        parts = set() if model is None else set(model.modules())
        return any(module not in parts and any(True for _ in module.parameters()) for module in modules)

    def caches(self) -> Callable[[], bool]:
        """Ask afterwards whether calls that functions remember are still remembered: planning may empty a cache."""
        states = [state.again() for state in self._first.values() if isinstance(state.entry, CachedCalls)]
        return lambda: all(state.is_now() for state in states)

    def show_before(self, taken: Taken) -> None:
        _put(taken.before)

    def show_after(self, taken: Taken) -> None:
        _put(taken.after)

    @contextlib.contextmanager
    def ran(self, backward_of: torch.device | None = None) -> Iterator[Callable[[], None]]:
        """Note which code runs inside; what is given raises `NotComparable` unless all that it used is known.

        `backward_of`: also in the thread in which autograd computes for this device, and together with the forward
        before: what is computed again there is called with objects that the forward has made.
        """
        watch = self._watch = Watch(self._sayings) if backward_of is None else self._watch
        with watch.here() if backward_of is None else watch.in_backward_of(backward_of):
            yield functools.partial(self._refuse_code, watch)

    def _refuse_code(self, watch: Watch) -> None:
        model = self._model()
        assert model is not None, "its step runs"
        sys.setprofile(None)
        refuse_unknown(watch, model, self._found)  # the watch is kept for the backward

    def _found(self, kind: type, owner: Any) -> Entry | None:
        if kind is TensorNote:
            note = self._tensors.get(id(owner))
            is_as_noted = note is not None and note.of is owner and note.is_as_noted()
            return cast(Entry, note) if is_as_noted else None
        state = self._first.get((kind, id(owner)))
        return None if state is None or state.entry.of is not owner else state.entry


def _put(states: dict[_Key, _State]) -> None:
    for state in states.values():
        if not state.is_now():
            if state.is_lost():
                raise NotComparable("state beside the model held something that is gone")
            state.put()


def _is_opaque(value: Any) -> bool:
    """See NOTE [what cannot be compared]."""
    kind = type(value)
    is_array = kind.__module__ == "numpy" and kind.__name__ == "ndarray"  # small ones are compared, and not asked for
    is_large = issubclass(kind, _CONTAINERS) and len(value) > MAX_ELEMENTS
    return issubclass(kind, _OPAQUE) or is_large or (is_array and not is_small_array(value))
