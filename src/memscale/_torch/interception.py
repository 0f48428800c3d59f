"""Stand in front of a function that the whole process uses, for one thread or for one purpose; all others pass through.

    with replaced_in_this_thread(random, random=always_highest):
        rehearse()                       # other threads draw as ever

PyTorch's own modes come first: they are per thread by themselves. This is for what they do not reach: functions of
other libraries, and functions of PyTorch in a backward pass, which runs without the function modes of its caller.

NOTE [interceptions]: a function is replaced once, by a stand-in that asks whoever wants to be asked, the latest first;
each may answer or pass the call on. When the last of them leaves, the function is back, unless somebody else has put
something in front of the stand-in meanwhile: then the stand-in stays there, and passes every call on.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

Handler = Callable[..., Any]
"""Called with what passes the call on, and the arguments of the call."""


class _Interception:
    """The stand-in for one function of a module or class."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.handlers: dict[object, Handler] = {}
        self.original = getattr(owner, name)
        self._is_inherited = name not in vars(owner)
        self.stand_in = self._make_stand_in()

    def _make_stand_in(self) -> Any:
        @functools.wraps(self.original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            call = self.original
            for handler in list(self.handlers.values()):
                call = functools.partial(handler, call)
            return call(*args, **kwargs)

        return stand_in

    def is_in_front(self) -> bool:
        """Whether a call comes here first."""
        return vars(self.owner).get(self.name) is self.stand_in

    def put_in_front(self) -> None:
        if not self.is_in_front():
            setattr(self.owner, self.name, self.stand_in)

    def take_away(self) -> None:
        """Take the stand-in off, if it is in front: see NOTE [interceptions]."""
        if not self.is_in_front():
            return
        if self._is_inherited:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


class _PropertyInterception(_Interception):
    """The stand-in for one property of a class: reading it is what is asked about."""

    def _make_stand_in(self) -> Any:
        read: Any = self.original.fget

        @functools.wraps(read)
        def stand_in(instance: Any) -> Any:
            answer = read
            for handler in list(self.handlers.values()):
                answer = functools.partial(handler, answer)
            return answer(instance)

        return property(stand_in, self.original.fset, self.original.fdel, self.original.__doc__)


_LOCK = threading.RLock()
"""Taken again by the same thread where a garbage collection inside it lets go of another model: so each change below is
one operation on a dict."""
_IN_USE: dict[tuple[int, str], _Interception] = {}


def intercept(owner: Any, name: str, handler: Handler) -> Callable[[], None]:
    """Ask `handler(pass_on, *args, **kwargs)` at every call of this function. Returns what undoes that.

    Of a property of a class, reading is intercepted: `handler(pass_on, instance)`.
    """
    key, token = (id(owner), name), object()
    with _LOCK:
        found = _IN_USE.get(key)
        if found is None or not found.is_in_front():
            is_property = isinstance(vars(owner).get(name), property)
            found = _PropertyInterception(owner, name) if is_property else _Interception(owner, name)
        found.handlers[token] = handler
        _IN_USE[key] = found
        found.put_in_front()
    return functools.partial(_leave, found, token)


def _leave(interception: _Interception, token: object) -> None:
    with _LOCK:
        interception.handlers.pop(token, None)
        if interception.handlers:
            return
        interception.take_away()
        key = (id(interception.owner), interception.name)
        if _IN_USE.get(key) is interception:
            del _IN_USE[key]


@contextlib.contextmanager
def replaced_in_this_thread(owner: Any, /, **replacements: Callable[..., Any]) -> Iterator[None]:
    """This thread calls the replacements of these functions; every other thread calls what was there."""
    thread_id = threading.get_ident()
    with contextlib.ExitStack() as undo:
        for name, replacement in replacements.items():
            undo.callback(intercept(owner, name, _Replacement(replacement, thread_id)))
        yield


class _Replacement:
    """Answers the calls of one thread."""

    def __init__(self, function: Callable[..., Any], thread_id: int) -> None:
        self._function, self._thread_id = function, thread_id

    def __call__(self, pass_on: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        called = self._function if threading.get_ident() == self._thread_id else pass_on
        return called(*args, **kwargs)


class CallsUnderWay(threading.local):
    """Whether this thread is inside a function: `intercept(owner, name, calls.note)`, then `bool(calls)`."""

    _depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def note(self, pass_on: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            return pass_on(*args, **kwargs)
        finally:
            self._depth -= 1
