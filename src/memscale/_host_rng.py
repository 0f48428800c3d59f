"""Python's and NumPy's global random state, remembered and repeated cheaply.

NumPy's `get_state` takes tens of microseconds, too much for once a layer a step; the bytes of its default generator
can be copied for less than one. See `BitGenerator.ctypes` in NumPy's documentation. What these bytes do not hold is
the spare number that NumPy's `normal` keeps for its next call: it is remembered for those who draw from NumPy at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import random
import sys
from collections.abc import Iterator
from typing import Any

_MT19937_BYTES = 624 * 4 + 4
"""Key and position of the Mersenne Twister that NumPy's global functions draw from."""


class HostRng:
    """The random state of the moment when it was made."""

    __slots__ = ("_numpy", "_python")

    def __init__(self, *, draws_from_numpy: bool = True) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state() if draws_from_numpy else _numpy_bytes()

    def numpy_moved(self) -> bool:
        """Whether somebody has drawn from NumPy since that moment."""
        if isinstance(self._numpy, bytes):
            return bool(_numpy_bytes() != self._numpy)
        return pickle.dumps(_numpy_state()) != pickle.dumps(self._numpy)

    @contextlib.contextmanager
    def repeated(self) -> Iterator[None]:
        """Draw again what was drawn after that moment; afterwards the state is as before."""
        now = HostRng(draws_from_numpy=not isinstance(self._numpy, bytes))
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def restore(self) -> None:
        random.setstate(self._python)
        if self._numpy is not None:
            _set_numpy_state(self._numpy)


def _numpy_state() -> Any:
    """The bytes and the spare number; None while nobody has imported NumPy: then nobody has drawn from it."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state(legacy=False)


def _numpy_bytes() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    generator = numpy.random.get_bit_generator()
    if type(generator).__name__ != "MT19937":
        return _numpy_state()
    with generator.lock:
        return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _set_numpy_state(state: Any) -> None:
    numpy_random = sys.modules["numpy"].random
    if not isinstance(state, bytes):
        numpy_random.set_state(state)
        return
    generator = numpy_random.get_bit_generator()
    with generator.lock:
        ctypes.memmove(generator.ctypes.state_address, state, _MT19937_BYTES)
