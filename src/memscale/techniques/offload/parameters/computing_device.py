"""A streamed model reports the device on which it computes, although some of its parameters are at home on the host.

    computing_device.attach(model, homes, undo)
    batch.to(model.device)           # what programs write, and what `generate()` does

Models of `transformers` and others have a property `device` that looks at their first parameter. While a model is
streamed, that property returns, for the model and for its parts, the device on which the model computes. Where the user
has moved it elsewhere since, that is where its next forward will be. For all other models of the same class it looks at
the first parameter as before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from memscale._torch.interception import intercept
from memscale._torch.overrides import undo_with
from memscale.techniques.offload.parameters.parameter_homes import Homes


def attach(model: nn.Module, homes: Homes, undo: contextlib.ExitStack) -> None:
    """Let the model's `device` be the device that it computes on, until undone or until the model is gone."""
    parts = _Parts(model, homes)
    for owner in {owner for module in model.modules() if (owner := _owner_of_property(type(module))) is not None}:
        undo_with(model, intercept(owner, "device", parts.answer), undo)


class _Parts:
    """The parts of one streamed model. This object does not keep them alive."""

    def __init__(self, model: nn.Module, homes: Homes) -> None:
        # Modules are compared by id, because a user's module may define its own equality.
        self._modules = {id(module): weakref.ref(module) for module in model.modules()}
        self._homes = homes

    def answer(self, pass_on: Callable[[Any], Any], instance: Any) -> Any:
        found = self._modules.get(id(instance))
        is_part = found is not None and found() is instance
        return self._homes.sent_to or self._homes.device if is_part else pass_on(instance)


def _owner_of_property(kind: type) -> type | None:
    return next((owner for owner in kind.__mro__ if isinstance(vars(owner).get("device"), property)), None)
