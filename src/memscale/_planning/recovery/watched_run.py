"""A run of a forward that is watched: whether all that it read, changed and called is known, so that it may run twice.

    watch = Watch()
    with watch.here():
        ...                                     # the forward, again
    refuse_unknown(watch, model, found)         # raises `NotComparable` unless all of it is known (reach.py)

The first run was not watched: watching takes too long for every step. What it did is known by this argument. The second
run began in the same state as the first, as far as that state is known. If everything that the second read was known,
both read the same, took the same way, called the same functions with the same values, and so changed the same. So it is
enough that the second run

- could reach no object but those that are known: those that were compared, or put back, before it began, those
  that cannot change, and those that it made itself (reach.py);
- ran no code that was not found from the model, and called nothing but what keeps nothing (harmless.py).

What is on none of the lists is a refusal. Nothing is guessed from what a class is called, and nothing that
somebody has frozen out of the garbage collector's sight is looked for there: objects are found from the code that ran.

NOTE [what own code is]: all but PyTorch, NumPy, the standard library and MemScale. Own code is read: the names that
it uses, and what they lead to. Of the others it is known which functions are harmless, when own code calls them.

NOTE [errors that are handled]: the first run may have caught an error that the second one did not meet. So code that
may catch an error for lack of memory is a refusal if memory was allocated while it ran, and so are context managers of
own classes. A `finally` ran in the failing run, too, perhaps with other values: it may assign, not call.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from memscale._torch import harmless
from memscale._torch.entries import is_own, is_plain_object, is_special
from memscale._torch.messages import is_said_by_plain_logger

OURS = frozenset({"memscale", "simgpu", "emucuda"})
_NEVER_MEMORY = harmless.words(
    "ImportError ModuleNotFoundError AttributeError KeyError IndexError LookupError TypeError ValueError "
    "StopIteration AssertionError ZeroDivisionError NameError UnicodeDecodeError OverflowError"
)


class NotComparable(RuntimeError):
    """Whether a forward, run again, sees what it saw cannot be said."""


# ---- what runs


class Watch:
    """Notes which code runs. It is a profile function (`sys.setprofile`) of one thread, or of several.

    `sayings`: functions that say something once. What goes on inside of them is not looked at (messages.py).
    """

    def __init__(self, sayings: frozenset[types.CodeType] = frozenset()) -> None:
        self._sayings = sayings
        self._saying: dict[int, types.FrameType] = {}
        """The frame of a message under way, by thread."""
        self.stored_by_call: set[str] = set()
        """Attributes that were stored, or deleted, by `setattr` and `delattr`."""
        self.set_by_any_name: set[type] = set()
        """The types of objects that store their attributes by names which are not in the code."""
        self.flagged: list[weakref.ref[torch.Tensor]] = []
        """Tensors that were told to need a gradient."""
        self.own: dict[types.CodeType, dict[str, Any]] = {}
        """Code that is not PyTorch's, NumPy's, the standard library's or ours, and its variables."""
        self.others: dict[types.CodeType, str] = {}
        """Code of these that ran, and its module."""
        self.reasons: list[str] = []
        """What was called that is not known to be harmless."""
        self._is_own: dict[int, tuple[bool, dict[str, Any]]] = {}
        self.stored_on_classes: frozenset[str] = frozenset()
        """Attributes that code stores to which a class was given."""
        self._entered: dict[int, int] = {}
        """Allocations of the device when a frame began that may handle errors."""

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Watch this thread."""
        self.begin()
        try:
            yield
        finally:
            if sys.getprofile() is self:
                sys.setprofile(None)

    @contextlib.contextmanager
    def in_backward_of(self, device: torch.device) -> Iterator[None]:
        """Watch this thread, and the one in which autograd computes for a device."""
        _in_thread_of(device, self.begin)
        try:
            with self.here():
                yield
        finally:
            _in_thread_of(device, functools.partial(sys.setprofile, None))

    def begin(self) -> None:
        if sys.getprofile() is not None:
            raise NotComparable("a profiler is at work (sys.setprofile), so it is not seen which code runs")
        sys.setprofile(self)

    def __call__(self, frame: types.FrameType, event: str, called: Any) -> None:
        if self._saying and threading.get_ident() in self._saying:
            if event == "return" and frame is self._saying[threading.get_ident()]:
                del self._saying[threading.get_ident()]
        elif event == "call" and frame.f_code in self._sayings and is_said_by_plain_logger(frame):
            self._saying[threading.get_ident()] = frame
        elif event == "call":
            caller = frame.f_back
            if self._owns(frame):
                self._note_own(frame)
            elif caller is not None:
                self._note_other(frame, self._owns(caller))
        elif event == "return" and self._entered.pop(id(frame), None) not in (None, _num_allocations()):
            self.reasons.append(f"{name_of(frame.f_code, frame.f_globals)} may handle errors itself")
        elif event == "c_call" and self._owns(frame) and not self._is_known(frame, called):
            self._refuse(frame, getattr(called, "__qualname__", called.__name__))

    def _is_known(self, frame: types.FrameType, called: Any) -> bool:
        return harmless.is_harmless_builtin(called) or self._is_noted(frame, called)

    def _is_noted(self, frame: types.FrameType, called: Any) -> bool:
        """Whether a call changes something that is looked at when all is over: an attribute, or a tensor's flag."""
        owner = called.__self__
        if called.__name__ == "requires_grad_" and isinstance(owner, torch.Tensor):
            self.flagged.append(weakref.ref(owner))
            return True
        if called is not setattr and called is not delattr:
            return False
        owner, name = _passed_on(frame) or (None, None)
        if not isinstance(name, str) or is_special(name) or name in harmless.STORED_FLAGS:
            return False
        if isinstance(owner, type | torch.Tensor) or not is_plain_object(owner):
            return False
        self.stored_by_call.add(name)
        return True

    def _note_own(self, frame: types.FrameType) -> None:
        uses = uses_of(frame.f_code)
        self.own.setdefault(frame.f_code, frame.f_globals)
        if uses.catches or uses.cleans_up:
            self._entered.setdefault(id(frame), _num_allocations())
        if uses.stored_attributes:
            if OF_SELF in uses.stored_attributes:
                self.set_by_any_name.add(type(_first_of(frame)))
            kinds = list(map(type, frame.f_locals.values()))
            if any(issubclass(kind, types.ModuleType) for kind in kinds):
                self.reasons.append(f"{name_of(frame.f_code, frame.f_globals)} is given a Python module")
            if any(issubclass(kind, type) for kind in kinds):
                self.stored_on_classes |= uses.stored_attributes

    def _note_other(self, frame: types.FrameType, is_called_by_own: bool) -> None:
        module, name = frame.f_globals.get("__name__") or "", frame.f_code.co_name
        self.others[frame.f_code] = module
        if module.partition(".")[0] in OURS:
            return
        if harmless.is_never_harmless(module, name) or (
            is_called_by_own and not _is_inner(name) and not harmless.is_harmless_python(module, name)
        ):
            self._refuse(frame.f_back, f"{module}.{name}")

    def _refuse(self, frame: types.FrameType | None, called: str) -> None:
        caller = "its code" if frame is None else name_of(frame.f_code, frame.f_globals)
        self.reasons.append(f"{caller} calls {called}, which is not known to change nothing else")

    def _owns(self, frame: types.FrameType) -> bool:
        found = self._is_own.get(id(frame.f_globals))
        if found is None:
            name = frame.f_globals.get("__name__")
            found = self._is_own[id(frame.f_globals)] = (name is None or is_own(name), frame.f_globals)
        return found[0]


def _passed_on(frame: types.FrameType) -> tuple[Any, Any] | None:
    """The object and the name which a frame hands to `setattr` or `delattr`; None where they are computed in the call
    itself."""
    steps = [step for step in dis.get_instructions(frame.f_code) if step.opname not in ("CACHE", "PRECALL")]
    place = next((k for k, step in enumerate(steps) if step.offset >= frame.f_lasti and _is_call(step)), 0)
    passed: list[Any] = []
    for step in reversed(steps[:place]):
        if step.opname == "LOAD_CONST":
            passed.insert(0, step.argval)
        elif step.opname.startswith(_LOADS):
            passed[:0] = [frame.f_locals.get(name) for name in _variables_of(step)]
        elif step.opname == "LOAD_GLOBAL" and step.argval in ("setattr", "delattr"):
            return (passed[0], passed[1]) if len(passed) == 2 + (step.argval == "setattr") else None
        elif step.opname != "PUSH_NULL":
            return None
    return None


def _is_call(step: dis.Instruction) -> bool:
    return step.opname in ("CALL", "CALL_FUNCTION")


def _num_allocations() -> int:
    """How often memory of the current device was allocated so far; another number each time where that is not known."""
    known = torch.accelerator.memory_stats().get("allocation.all.allocated")
    return next(_UNKNOWN) if known is None else int(known)


_UNKNOWN = itertools.count(-1, -1)


def _first_of(frame: types.FrameType) -> Any:
    """What a method was called on."""
    names = frame.f_code.co_varnames
    return frame.f_locals.get(names[0]) if names else None


def _is_inner(name: str) -> bool:
    """A lambda or a comprehension: what it belongs to is asked for itself."""
    return name.startswith("<") and name != "<module>"


def _in_thread_of(device: torch.device, call: Callable[[], Any]) -> None:
    """Call it in the thread in which autograd computes for a device."""
    failures: list[NotComparable] = []

    def reached(_: torch.Tensor) -> None:
        try:
            call()
        except NotComparable as error:
            failures.append(error)

    with torch.inference_mode(False), torch.enable_grad():
        start = torch.empty(0, device=device, requires_grad=True)
        end = start.view(0)
        end.register_hook(reached)
        torch.autograd.grad(end, start, torch.empty(0, device=device))
    if failures:
        raise failures[0]


def name_of(code: types.CodeType, namespace: dict[str, Any]) -> str:
    return f"{namespace.get('__name__')}.{code.co_name}"


# ---- what the code says


class Uses(NamedTuple):
    """The names in one piece of code."""

    globals: frozenset[str]
    attributes: frozenset[str]
    stored_globals: frozenset[str]
    stored_attributes: frozenset[str]
    stored_elsewhere: frozenset[str]
    """Attributes that it stores on something else than what it was given: on a Python module for example."""
    stored_around: frozenset[str]
    """Variables of functions around it."""
    imports: tuple[tuple[int, str, tuple[str, ...]], ...]
    """How many dots, the module, and the names that are taken from it; none where the module itself is."""
    texts: frozenset[str]
    called: frozenset[str]
    """Globals that it calls where it reads them, and does nothing else with: if it does, the call is seen."""
    catches: bool
    """See NOTE [errors that are handled]."""
    cleans_up: bool
    """A `finally` of it may do other things after a failure than without one."""
    chains: frozenset[tuple[str, ...]] = frozenset()
    """Globals that it reads, each with the attributes that it reads from it at once: `("torch", "nn", "Linear")`."""
    sets_any: bool = False
    """It calls a class's `__setattr__` or `__delattr__` itself, with a name that is not in the code."""
    writes_tables: bool = False
    """It has the dictionary of an object's attributes, and changes one."""


@functools.lru_cache(maxsize=4096)
def uses_of(code: types.CodeType) -> Uses:
    steps = list(dis.get_instructions(code))
    names: dict[str, set[str]] = {}
    for step in steps:
        kind = step.opname.partition("_")[2]
        if isinstance(step.argval, str):
            names.setdefault(step.opname, set()).add(step.argval)
            if kind in ("ATTR", "METHOD", "SUPER_ATTR", "FROM"):
                names.setdefault("attributes", set()).add(step.argval)
            elif kind in ("GLOBAL", "NAME", "FROM_DICT_OR_GLOBALS") and step.opname != "IMPORT_NAME":
                names.setdefault("globals", set()).add(step.argval)
    imports = tuple(
        (int(steps[place - 2].argval or 0), str(step.argval), tuple(steps[place - 1].argval or ()))
        for place, step in enumerate(steps)
        if step.opname == "IMPORT_NAME"
    )
    stored = {
        kind: frozenset(names.get(f"STORE_{kind}", set()) | names.get(f"DELETE_{kind}", set()))
        for kind in ("GLOBAL", "ATTR", "DEREF")
    }
    set_by_name = frozenset(name for name in _set_by_name(code, steps) if name is not None)
    return Uses(
        frozenset(names.get("globals", ())),
        frozenset(names.get("attributes", ())),
        stored["GLOBAL"],
        stored["ATTR"] | set_by_name,
        _stored_elsewhere(code, steps) | set_by_name,
        stored["DEREF"] & frozenset(code.co_freevars),
        imports,
        frozenset(_texts_in(code.co_consts)),
        _called(steps),
        _catches(steps),
        _cleans_up(steps),
        frozenset(_chains(steps)),
        None in _set_by_name(code, steps),
        bool({"__dict__", "vars"} & {step.argval for step in steps if isinstance(step.argval, str)})
        and any(step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") or step.argval in _WRITES for step in steps),
    )


def _chains(steps: list[dis.Instruction]) -> Iterator[tuple[str, ...]]:
    steps = [step for step in steps if step.opname != "CACHE"]
    for place, step in enumerate(steps):
        if step.opname.startswith("LOAD_") and step.opname.endswith(("GLOBAL", "NAME")):
            read = itertools.takewhile(lambda each: each.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[place + 1 :])
            yield (step.argval, *(each.argval for each in read))


def _set_by_name(code: types.CodeType, steps: list[dis.Instruction]) -> set[str | None]:
    """The names that it hands to a class's `__setattr__` or `__delattr__`; None among them for one that is not known.
    In methods of that name it may be the name that they were given: who stores an attribute has it in his code."""
    steps = [step for step in steps if step.opname not in ("CACHE", "PUSH_NULL")]
    found: set[str | None] = set()
    for place, step in enumerate(steps):
        if step.argval in SETTERS and step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            passed = list(
                itertools.takewhile(lambda each: each.opname.startswith(_LOADS), steps[place + 1 : place + 3])
            )
            constants = [each.argval for each in passed if each.opname == "LOAD_CONST"]
            variables = [name for each in passed if each.opname != "LOAD_CONST" for name in _variables_of(each)]
            own = list(code.co_varnames[:2])
            is_handed_on = code.co_name in SETTERS and (variables == own or variables[:1] == own[1:])
            if _is_of_super(steps, place) and not constants:
                found.add(OF_SELF)
            elif not is_handed_on:
                found.add(constants[0] if constants and isinstance(constants[0], str) else None)
    return found


def _is_of_super(steps: list[dis.Instruction], place: int) -> bool:
    """Whether an attribute is read of `super()`."""
    before = [step for step in steps[max(0, place - 3) : place] if step.opname != "PRECALL"][-2:]
    is_called = [step.opname for step in before] in (["LOAD_GLOBAL", "CALL"], ["LOAD_GLOBAL", "CALL_FUNCTION"])
    is_asked = is_called and before[0].argval == "super" and not before[1].arg
    return is_asked or steps[place].opname == "LOAD_SUPER_ATTR"


def _variables_of(step: dis.Instruction) -> list[Any]:
    return list(step.argval) if isinstance(step.argval, tuple) else [step.argval]


_WRITES = frozenset({"update", "setdefault", "pop", "popitem", "clear", "__setitem__", "__delitem__"})
SETTERS = ("__setattr__", "__delattr__")
OF_SELF = "any attribute of the object itself"
"""Stands for the name where `super().__setattr__(name, value)` stores it."""
_LOADS = ("LOAD_FAST", "LOAD_CONST", "LOAD_DEREF")


def _called(steps: list[dis.Instruction]) -> frozenset[str]:
    """Names that are read together with the empty place that a call needs: Python 3.11 and later say so."""
    reads = [step for step in steps if step.opname.startswith("LOAD_") and step.opname.endswith(("GLOBAL", "NAME"))]
    others = {step.argval for step in reads if step.opname != "LOAD_GLOBAL" or not (step.arg or 0) & 1}
    return frozenset() if sys.version_info < (3, 11) else frozenset(step.argval for step in reads) - others


def _stored_elsewhere(code: types.CodeType, steps: list[dis.Instruction]) -> frozenset[str]:
    rebound = {step.argval for step in steps if step.opname in ("STORE_FAST", "DELETE_FAST", "STORE_DEREF")}
    given = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - rebound
    found = set()
    for before, step in itertools.pairwise(steps):
        is_given = before.opname in ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK") and before.argval in given
        if step.opname in ("STORE_ATTR", "DELETE_ATTR") and not is_given:
            found.add(step.argval)
    return frozenset(found)


def _texts_in(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _texts_in(constant)


def _catches(steps: list[dis.Instruction]) -> bool:
    """Whether it may catch an error for lack of memory: by `except`, not by `with` or `finally`."""
    for place, step in enumerate(steps):
        if step.opname in ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH", "CHECK_EG_MATCH"):
            unknown = [name for name in _caught(steps, place) if name not in _NEVER_MEMORY]
            if unknown:
                return True
        if step.opname == "PUSH_EXC_INFO" and steps[place + 1].opname == "POP_TOP":
            return True
        if step.opname == "SETUP_FINALLY" and _is_bare(steps, step.argval):
            return True
    return False


def _caught(steps: list[dis.Instruction], place: int) -> list[str]:
    """The names of the errors that a handler is compared with at this place; one that is empty if it is not known."""
    last, first = steps[place - 1], place - 1
    if last.opname == "BUILD_TUPLE":
        first = place - 1 - int(last.arg or 0)
    named = steps[first : place - 1] if last.opname == "BUILD_TUPLE" else [last]
    return [str(each.argval) if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") else "" for each in named]


RESETS = "reset"
"""A `finally` may call a method of this name, if own code of this name only assigns: a context variable is reset."""


def _calls(step: dis.Instruction) -> bool:
    """Whether it prepares a call, but for that of a method that resets. Whatever is called is loaded before."""
    if step.opname in ("LOAD_METHOD", "LOAD_ATTR"):
        is_method = step.opname == "LOAD_METHOD" or (sys.version_info >= (3, 12) and bool((step.arg or 0) & 1))
        return is_method and step.argval != RESETS
    return step.opname == "PUSH_NULL" or (step.opname == "LOAD_GLOBAL" and _is_called(step))


def calls_something(code: types.CodeType) -> bool:
    """Whether a function does more than to assign, and to reset."""
    return any(step.opname in ("FOR_ITER", "SEND") or _calls(step) for step in dis.get_instructions(code))


def _is_called(step: dis.Instruction) -> bool:
    return sys.version_info < (3, 11) or bool((step.arg or 0) & 1)


def _cleans_up(steps: list[dis.Instruction]) -> bool:
    """Whether what a `finally` does after an error is more than assignments: it calls something."""
    starts = [place + 1 for place, step in enumerate(steps) if step.opname == "PUSH_EXC_INFO"]
    handlers = {step.argval for step in steps if step.opname == "SETUP_FINALLY"}  # of Python 3.10
    starts += [place for place, step in enumerate(steps) if step.offset in handlers and step.opname != "DUP_TOP"]
    ends = ("RERAISE", "CHECK_EXC_MATCH", "WITH_EXCEPT_START")
    for start in starts:
        body = itertools.takewhile(lambda step: step.opname not in ends, steps[start:])
        if any(step.opname in ("FOR_ITER", "SEND") or _calls(step) for step in body):
            return True
    return False


def _is_bare(steps: list[dis.Instruction], handler: int) -> bool:
    """Whether the handler of Python 3.10 that begins there is `except:`, which takes the error off first."""
    return any(step.offset == handler and step.opname == "POP_TOP" for step in steps)
