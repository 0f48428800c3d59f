"""What a value holds, at any depth, at one moment: objects, arrays and containers that code changes in place.

    before = HeldState(value, copies_tensors=True, may_be_large=False)
    ...                                     # whatever runs here may change it
    if before.is_changed():
        now = before.show()                 # the same objects, with what they held then
        ...
        hide(now)                           # and with what they held when `show` was called

The objects themselves stay: others may know them. A tensor is the exception, since autograd would notice that it was
written to: a copy stands in its place. What is looked into, and what is not, is said in state_beside.py; modules are
not, nor is code.

NOTE [what is as it was is not put back]: a set that is filled again with what it held may hold it in another order,
since that depends on what came first. With elements that are text, this happens in one process of several.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from memscale._torch.entries import Entry
from memscale._torch.snapshots import KeptTensor, version_of
from memscale._torch.state_beside import Beside, is_item, tensors_in

Hidden: TypeAlias = list[tuple[Entry, Any]]
"""What entries held while they show something else."""


class HeldState:
    """See the module's docstring. `copies_tensors`: those that are changed in place can be shown as they were."""

    def __init__(self, value: Any, *, copies_tensors: bool, may_be_large: bool) -> None:
        self._before = [(entry, entry.take()) for entry in Beside.inside([value]).entries]
        self._tensors: dict[int, KeptTensor] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        for tensor in tensors_in([taken for _, taken in self._before]):
            if copies_tensors:
                self._tensors.setdefault(id(tensor), KeptTensor(tensor, may_be_large=may_be_large))
            else:
                self._versions.append((tensor, version_of(tensor)))

    def is_changed(self) -> bool:
        return self.has_changed_tensors() or not all(entry.is_as(taken) for entry, taken in self._before)

    def has_changed_tensors(self) -> bool:
        return any(kept.is_changed for kept in self._tensors.values()) or self._has_unkept_changes()

    def is_lost(self) -> bool:
        """Whether a tensor was changed of which there is no copy."""
        return any(kept.is_lost for kept in self._tensors.values()) or self._has_unkept_changes()

    def _has_unkept_changes(self) -> bool:
        return any(version_of(tensor) != version for tensor, version in self._versions)

    def show(self) -> Hidden:
        """Let everything hold what it held. Returns what `hide` takes."""
        shown = {key: kept.stand_in() for key, kept in self._tensors.items() if kept.is_changed}
        hidden = [(entry, entry.take()) for entry, _ in self._before]
        for entry, taken in self._before:
            _put(entry, _replaced(taken, shown) if shown else taken)
        return hidden


def hide(hidden: Hidden) -> None:
    """Let everything hold what it held before `show`."""
    for entry, taken in reversed(hidden):
        _put(entry, taken)


def _put(entry: Entry, state: Any) -> None:
    """See NOTE [what is as it was is not put back]."""
    if not entry.is_as(state):
        entry.put(state)


def _replaced(state: Any, shown: dict[int, torch.Tensor]) -> Any:
    if isinstance(state, dict):
        return {name: shown.get(id(value), value) for name, value in state.items()}
    if not isinstance(state, list):
        return state
    return [
        (value[0], shown.get(id(value[1]), value[1])) if is_item(value) else shown.get(id(value), value)
        for value in state
    ]
