"""Python's and NumPy's global random state, watched for the price of a few copied kilobytes.

Nearly no layer draws from these generators, so what every layer pays in every step is only a look at whether it did:
raw bytes of the two Mersenne Twisters, before and after. The full states, tens of microseconds each, are taken for
layers that draw.

NOTE [raw bytes]: NumPy documents the address (`BitGenerator.ctypes`). Python does not, so the place is checked against
`random.getstate()` once; where it does not hold, the full state serves. The bytes do not show the spare number that
NumPy's `normal` keeps for its next call.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import pickle
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any, TypeAlias

PythonState: TypeAlias = tuple[Any, ...]
"""A state of Python's generator, as `random.getstate()` gives it."""
_NUM_KEY_WORDS = 624
_MT19937_BYTES = 4 * (_NUM_KEY_WORDS + 1)
_PYTHON_STATE_VERSION = 3
_POSITION_BYTES = 16
"""The position, which every draw moves, and three words of the key beside it, which change when the position wraps."""


_GENERATOR: Any = random.getstate.__self__  # type: ignore[attr-defined]
"""The instance behind the module's functions."""


class Fingerprint:
    """Tells whether somebody has drawn from Python's or NumPy's generator since it was taken."""

    __slots__ = ("_positions", "_python")

    def __init__(self) -> None:
        self._positions = _positions()
        position = self._positions[0]
        self._python = _words(position) if isinstance(position, bytes) else position

    def moved(self) -> bool:
        return _positions() != self._positions

    def numpy_moved(self) -> bool:
        return _numpy_position() != self._positions[2]

    def python_state(self) -> PythonState:
        if not isinstance(self._python, bytes):
            return self._python
        position, *key = struct.unpack(f"={_NUM_KEY_WORDS + 1}I", self._python)
        return _PYTHON_STATE_VERSION, (*key, position), self._positions[1]


class HostRng:
    """The random state of one moment."""

    __slots__ = ("_numpy", "_taken")

    def __init__(self, python: PythonState | None = None) -> None:
        """Take the state of now; of Python's generator, an earlier one if it is given."""
        self._taken = Fingerprint() if python is None else python
        self._numpy = _numpy_state()

    @property
    def _python(self) -> PythonState:
        return self._taken.python_state() if isinstance(self._taken, Fingerprint) else self._taken

    def moved(self) -> bool:
        """Whether somebody has drawn since that moment."""
        return self._python != random.getstate() or pickle.dumps(self._numpy) != pickle.dumps(_numpy_state())

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Draw again what was drawn after that moment; afterwards the state is as before."""
        now = HostRng()
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


def _positions() -> tuple[bytes | PythonState, float | None, bytes | None]:
    """What any draw changes: of Python's generator, its spare number beside it, and of NumPy's."""
    view = _python_position()
    python = random.getstate() if view is None else view.tobytes()
    return python, _GENERATOR.gauss_next, _numpy_position()


@functools.cache
def _python_position() -> memoryview | None:
    view = _python_view()
    return None if view is None else view[:_POSITION_BYTES]


@functools.cache
def _python_view() -> memoryview | None:
    """Python's generator where it lies, position and key; None where that is not known. See NOTE [raw bytes]."""
    if type(_GENERATOR) is not random.Random or sys.implementation.name != "cpython":
        return None
    view = _view(id(_GENERATOR) + object.__basicsize__)
    *key, position = _GENERATOR.getstate()[1]
    return view if view == struct.pack(f"={_NUM_KEY_WORDS + 1}I", position, *key) else None


@functools.lru_cache(maxsize=1)  # as long as nobody draws, one copy serves all
def _words(position: bytes) -> bytes:
    """Python's whole generator, which is at this position."""
    view = _python_view()
    assert view is not None
    return bytes(view)


def _numpy_position() -> bytes | None:
    """What any draw from NumPy's generator changes; of one that is no Mersenne Twister, its whole state."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator = numpy.random.get_bit_generator()
    view = _view_of(generator)
    return pickle.dumps(generator.state) if view is None else bytes(view[-_POSITION_BYTES:])


@functools.lru_cache(maxsize=1)  # NumPy has one global generator at a time
def _view_of(generator: Any) -> memoryview | None:
    return _view(generator.ctypes.state_address) if type(generator).__name__ == "MT19937" else None


def _view(address: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * _MT19937_BYTES).from_address(address)).cast("B")


def _numpy_state() -> Any:
    """NumPy's state with its spare number; None while nobody has imported NumPy: then nobody has drawn from it."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state(legacy=False)
