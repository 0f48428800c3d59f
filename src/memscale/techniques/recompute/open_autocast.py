"""An autocast block that stays open while parameters change: refused where layers were recomputed in it.

NOTE [open blocks]: inside of one `with torch.autocast(...)`, PyTorch casts a parameter once and remembers the result.
Where parameters change in there and the loop goes on, plain training goes on with casts of the old ones. A recompute on
an accelerator runs in a thread of autograd's, and leaving its own autocast there empties what is remembered, so later
forwards would see the new parameters: other losses, without a word. On a CPU it runs in the thread that called
`backward()`, inside of the open block, and everything is as in plain training.

So when a backward pass ends that has recomputed layers inside of an open block, the lifetime of autocast's cache is
noted (`CastProbe`). A forward in the same lifetime, with parameters that have changed since, is refused.

Known limit: what two backward passes in one block share (a cast whose gradients plain PyTorch adds up in 16 bits,
where one pass comes between the forwards of another) is added up in 32 bits.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from memscale._errors import MemScaleError
from memscale._torch import private
from memscale._torch.unversioned_steps import STEPS
from memscale.techniques.recompute.module_state import Memory

Parameters = list[tuple[weakref.ref[torch.Tensor], int]]
"""Parameters that autocast casts, and their versions."""
Noted = tuple["Casts", tuple[str, ...], Parameters, int]
"""A layer that was recomputed, with the types of its devices, and what its forward found."""


@dataclasses.dataclass(slots=True)
class OpenBlock:
    """A life of autocast's cache in which a layer was recomputed, and its parameters then."""

    lifetime: Any
    parameters: Parameters
    num_steps: int
    """How many steps without new versions there had been."""

    def refuse_changed(self, module_fqn: str) -> bool:
        """Return whether the block is still open; raise if it is, and parameters have changed in it."""
        if _lifetime() is not self.lifetime:
            return False
        known = [
            (parameter, version) for reference, version in self.parameters if (parameter := reference()) is not None
        ]
        steps = self.num_steps
        if any(p._version != version or STEPS.has_stepped(p, since=steps) for p, version in known):
            raise MemScaleError(
                f"parameters of {module_fqn} were changed inside of an autocast block that is still open, where plain "
                "PyTorch would go on with casts of the old ones, and a layer that is computed again in backward would "
                "not: leave `with torch.autocast(...)` before the optimizer steps, and enter it anew for each step"
            )
        return True


class Casts:
    """What one layer knows of the autocast block that it computes in."""

    def __init__(self) -> None:
        self._open: OpenBlock | None = None

    def refuse_changed(self, module_fqn: str) -> None:
        """A forward begins. See NOTE [open blocks]."""
        if self._open is not None and not self._open.refuse_changed(module_fqn):
            self._open = None

    def note_recompute(self, begun_in: int, device_types: Iterable[str], memory: Memory) -> None:
        """A recompute begins of a forward that ran in this thread and found this."""
        if begun_in == threading.get_ident() or not _remembers(device_types):
            return
        pairs = zip(memory.values[memory.layout.parameters], memory.versions, strict=True)
        parameters = [(weakref.ref(value), version) for value, version in pairs if _is_cast(value)]
        _Pass.now().layers.append((self, tuple(device_types), parameters, memory.num_steps))

    def stay_in(self, block: OpenBlock) -> None:
        self._open = block


class _Pass:
    """One backward pass that recomputes layers under autocast."""

    def __init__(self) -> None:
        self.layers: list[Noted] = []

    @staticmethod
    def now() -> _Pass:
        task_id = private.graph_task_id()
        found = _PASSES.get(task_id)
        if found is None:
            found = _PASSES[task_id] = _Pass()
            private.at_end_of_backward(found.close)
        return found

    def close(self) -> None:
        """The pass is over; autocast is as it was for who called `backward()`."""
        layers, self.layers = self.layers, []
        lifetime = None
        for casts, device_types, parameters, num_steps in layers:
            if _remembers(device_types):
                lifetime = lifetime or _lifetime()
                casts.stay_in(OpenBlock(lifetime, parameters, num_steps))


_PASSES: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()
_PROBES: list[private.CastProbe] = []


def _lifetime() -> Any:
    if not _PROBES:
        _PROBES.append(private.CastProbe())
    return _PROBES[0].lifetime()


def _remembers(device_types: Iterable[str]) -> bool:
    """Whether autocast is on here and remembers casts."""
    return torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, device_types))


def _is_cast(value: Any) -> bool:
    """Whether autocast remembers its cast of this parameter."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.dtype is torch.float32 and value.is_leaf
