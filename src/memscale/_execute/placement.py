"""`Placement`: the model on the device where it computes, and back where it came from.

    placement = Placement(weakref.ref(model))
    placement.move_to(device)           # nothing where the model is there
    placement.end()                     # nothing where it was not moved

NOTE [placed from plan to plan]: a plan that takes the place of another finds the model where it is. If it were moved
back in between, all of it would travel twice, with the gradients of a step that has begun; and these would then lie
elsewhere than where they were found when the plan was made. So a placement ends with the executor, with
a plan for another device, or where parameters are streamed: what streams them is told where they came from.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import nn

from memscale._errors import PlanError
from memscale._progress import stage
from memscale.techniques.offload.parameters import state_following


class Placement:
    """Where one model was before it was moved to its device. It does not keep the model alive."""

    def __init__(self, model_ref: weakref.ref[nn.Module]) -> None:
        self._model = model_ref
        self._undo = contextlib.ExitStack()
        self.came_from: torch.device | None = None
        """None: the model was not moved."""

    def move_to(self, device: torch.device) -> None:
        """Move the model there, keeping its `Parameter` objects."""
        model = self._model()
        assert model is not None, "who attaches holds the model"
        found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        if {home.type for home in found} <= {device.type}:
            return
        if len(found) > 1:
            raise PlanError(f"the model lies on several devices ({', '.join(sorted(map(str, found)))}); move it to one")
        following = state_following.attach(model, self._undo)
        if self.came_from is None:
            self.came_from = found.pop()
            self._undo.callback(self._move_back)  # before the state stops following: it goes both ways
        with stage(f"moving {type(model).__name__} to {device}"):
            model.to(device)
            state_following.follow_all(following)

    def _move_back(self) -> None:
        model, device = self._model(), self.came_from
        if model is not None and device is not None:
            model.to(device)

    def end(self) -> None:
        """Move the model back. A second call does nothing."""
        try:
            self._undo.close()
        finally:
            self.came_from = None

    def hand_over(self) -> None:
        """Somebody else moves the model back."""
        self.came_from = None
        self._undo.close()
