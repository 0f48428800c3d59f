"""The moments at which state that still leaves when a step is over lets go of its memory on the device.

A layer that the plan names lets go of its share just before its forward, on the stream that computes there; all of it
goes where a forward without gradients begins, and where any forward of the model is over. See NOTE [late state] in
techniques/offload/optimizer/late_departures.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.overrides import OwnHook, keep_copies_clean

if TYPE_CHECKING:
    from memscale._execute.attachment import Attachment
    from memscale.techniques.offload.optimizer.late_departures import LateDepartures


def watch(to: Attachment) -> None:
    """Let state leave late as the plan says, until undone; nothing where no state waits, or where the compiler would
    trace our hooks. See NOTE [around compiled code] in overrides.py."""
    adoption, layers = to.users.get("optimizer"), [*map(to.find_module, to.late)]
    if not layers or adoption is None or any(map(private.is_compiled, (to.model, *layers))):
        return
    late: LateDepartures = adoption.late
    late.expect({action.module_fqn: action.num_bytes for action in to.late})
    to.undo.callback(late.expect, {})
    for module in (to.model, *layers):
        keep_copies_clean(module, to.undo)
    for action, layer in zip(to.late, layers, strict=True):
        to.undo.callback(layer.register_forward_pre_hook(_Reach(late, action.module_fqn)).remove)
    to.undo.callback(to.model.register_forward_pre_hook(_Begin(late)).remove)
    to.undo.callback(to.model.register_forward_hook(_End(late), always_call=True).remove)


class _Reach(OwnHook):
    """The forward of a layer begins; what is computed again in backward is none."""

    def __init__(self, late: LateDepartures, module_fqn: str) -> None:
        self._late, self._module_fqn = late, module_fqn

    def __call__(self, module: nn.Module, args: Any) -> None:
        if private.graph_task_id() < 0:
            self._late.reach(self._module_fqn)


class _Begin(OwnHook):
    """A forward of the model begins. One that keeps nothing for backward is not what the plan has made room for."""

    def __init__(self, late: LateDepartures) -> None:
        self._late = late

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            self._late.let_go_all()


class _End(OwnHook):
    """A forward of the model is over, whichever layers it came to."""

    def __init__(self, late: LateDepartures) -> None:
        self._late = late

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._late.let_go_all()
