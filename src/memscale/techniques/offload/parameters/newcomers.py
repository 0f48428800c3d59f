"""Tensors that come into a streamed layer, or change their places in it, while it is streamed.

`parametrize.register_parametrization`, `weight_norm`, `spectral_norm` and adapters (PEFT) may be applied to a model
after it was wrapped. They put parameters into other places, and make new tensors beside those that they find, which are
on the host in a streamed layer. At the layer's next forward, parameters on the host are streamed from their new places,
and buffers, and parameters that cannot be streamed, move to the device like those that were there at first.

Whether a layer has changed is asked before each of its forwards, so it is asked of the names and the children of its
modules alone. A parameter that replaces another in the same place needs none of this: slots read their places anew.

Known limit: what is drawn when such a tensor is made (the vectors of `spectral_norm`) comes from the host's generator.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable

from torch import nn

from memscale.techniques.offload.parameters.parameter_homes import CPU, Homes, Slot, StayHome, slots_of

_Arrangement = list[tuple[weakref.ref[nn.Module], tuple[str, ...], tuple[str, ...], tuple[int, ...]]]


class Arrangement:
    """The modules of a layer, and the names that each of them has for its tensors."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._parts: _Arrangement = []
        self.note()

    def note(self) -> None:
        """Take the layer as it is now for the one to compare with."""
        module = self._module()
        assert module is not None
        self._parts = [(weakref.ref(part), *_names(part)) for part in module.modules()]

    def has_changed(self) -> bool:
        for reference, *known in self._parts:
            part = reference()
            if part is None or known != [*_names(part)]:
                return True
        return False


def _names(part: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...]]:
    return (*part._parameters,), (*part._buffers,), (*map(id, part._modules.values()),)


Streamable = Callable[[nn.Module, Iterable[nn.Module]], set[int]]
"""Returns the ids of the parameters of a model that may live on the host while these of its modules are streamed."""


class Newcomers:
    """Puts the tensors of changed layers of one model where they belong, until undone."""

    def __init__(
        self,
        model: nn.Module,
        modules: Iterable[nn.Module],
        homes: Homes,
        streamable: Streamable,
        undo: contextlib.ExitStack,
    ) -> None:
        self._model = weakref.ref(model)
        self._modules = [weakref.ref(module) for module in modules]
        self._homes = homes
        self._streamable = streamable
        self._undo = undo.enter_context(contextlib.ExitStack())

    def settle(self, module: nn.Module, before: list[Slot]) -> list[Slot]:
        """Return the slots of a changed layer that are streamed from now on; `before` are those of before."""
        model = self._model()
        assert model is not None
        can_stream = self._streamable(model, [found for each in self._modules if (found := each()) is not None])
        slots = slots_of(module.modules(), buffers=True)
        streamed = [s for s in slots if not s.is_buffer and s.get().device == CPU and id(s.get()) in can_stream]
        places = {slot.place for slot in streamed}
        self._homes.admit(streamed, [slot for slot in slots if slot.place not in places])
        known = {slot.place for slot in before}
        guard([slot for slot in streamed if slot.place not in known], self._homes, self._undo)
        return streamed


def guard(slots: Iterable[Slot], homes: Homes, undo: contextlib.ExitStack) -> None:
    """Let `model.to()` leave the parameters in these slots at home."""
    by_module: dict[int, list[Slot]] = {}
    for slot in slots:
        by_module.setdefault(id(slot.module()), []).append(slot)
    for group in by_module.values():
        module = group[0].module()
        assert module is not None
        StayHome(module, homes, group).attach(undo)
