"""Who holds what a call has left for later calls: the last call whose graph still lives."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Generic, TypeVar

_Holder = TypeVar("_Holder")
_FEW_KEYS = 64


class Holders(Generic[_Holder]):
    """Calls by key, in order, held weakly. Where the graph of the last one is thrown away, the one before is last."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, list[weakref.ref[_Holder]]] = {}
        self._most_keys = _FEW_KEYS

    def __len__(self) -> int:
        self._sweep()
        return len(self._calls)

    def last(self, key: Hashable) -> _Holder | None:
        calls = self._calls.get(key, [])
        while calls:
            holder = calls[-1]()
            if holder is not None:
                return holder
            calls.pop()
        return None

    def add(self, key: Hashable, holder: _Holder) -> None:
        alive = [call for call in self._calls.get(key, []) if call() is not None]
        self._calls[key] = [*alive, weakref.ref(holder)]
        if len(self._calls) > self._most_keys:
            self._sweep()
            self._most_keys = max(_FEW_KEYS, 2 * len(self._calls))

    def _sweep(self) -> None:
        """Forget keys whose calls have all gone."""
        self._calls = {key: calls for key, calls in self._calls.items() if any(call() is not None for call in calls)}
