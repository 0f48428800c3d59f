"""Gradients of earlier batches that are there when a forward begins: how long they stay, and what a plan takes then.

    watch = GradientWatch()
    watch.look(model, has_stepped=True)     # when a training forward begins: "none", "forward" or "backward"
    counted_for(planner, plan, config)      # the same plan, with the numbers of the planner's loop

Two kinds of loops keep gradients through a forward. Those that add up the gradients of several batches keep them
through backward, too, where new ones are added to them. Others let go of them in between (`zero_grad()` just before
`backward()`, as Lightning does): their next gradients are new tensors. What a loop does is known for sure only when the
batch is over. Until then gradients that an optimizer has stepped with are taken to go before backward, and others to be
added to.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Literal

import torch
from torch import nn

from memscale._decide.choice import choice_of
from memscale._decide.eligible import Eligible
from memscale._plan import Plan
from memscale._planning.loop.shapes import look_into
from memscale._planning.planner import Planner
from memscale._torch.released_gradients import held_gradient

Stay = Literal["none", "forward", "backward"]
"""The part of a step up to whose end gradients of earlier batches are there."""


class GradientWatch:
    """Follows the gradients of one model from forward to forward."""

    def __init__(self, stay: Stay = "none") -> None:
        """`stay`: what is known of the loop before its first step."""
        self.stay: Stay = stay
        """What the loop has shown so far."""
        self._are_added = stay == "backward"
        """A later batch was added to gradients, as far as is known."""
        self._followed: tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]] | None = None
        """A parameter, and the gradient that it had when the last forward began."""

    def look(self, model: nn.Module, *, has_stepped: bool) -> Stay:
        """A training forward begins. `has_stepped`: an optimizer has, since the one before."""
        was_let_go = self._was_let_go()
        if was_let_go is False:
            self._are_added = True
        found = _one_with_gradient(model)
        self._followed = None if found is None else (weakref.ref(found[0]), weakref.ref(found[1]))
        if self._are_added:
            self.stay = "backward"
        elif was_let_go:
            self.stay = "forward"
        elif found is not None and self.stay == "none":
            self.stay = "forward" if has_stepped else "backward"
        return self.stay

    def _was_let_go(self) -> bool | None:
        """Whether the gradient that was followed was let go before a backward came; None: none was followed, or there.

        One that was added to is the same tensor until `zero_grad()`, after which there is none, or a new one that the
        loop made in its next batch, which began without.
        """
        if self._followed is None:
            return None
        parameter, gradient = (reference() for reference in self._followed)
        if parameter is None or parameter.grad is None:
            return None
        return parameter.grad is not gradient


def _one_with_gradient(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor] | None:
    for parameter in model.parameters():
        gradient = held_gradient(parameter) if parameter.is_leaf else None
        if gradient is not None:
            return parameter, gradient
    return None


def held_bytes(model: nn.Module) -> int:
    """The bytes of the gradients that are there."""
    leaves = [parameter for parameter in model.parameters() if parameter.is_leaf]  # others have none
    return sum(gradient.nbytes for gradient in map(held_gradient, leaves) if gradient is not None)


def counted_for(planner: Planner, plan: Plan, eligible: Eligible) -> Plan:
    """The plan, with what it takes of the planner's step and loop. `plan.fits` says whether that fits."""
    travel = eligible.travel_of(plan)
    way, eligible = planner.by(travel), eligible.by(travel)
    look_into(way, plan.actions, eligible)
    model = way.cost_model()
    expected = model.evaluate(choice_of(plan.actions, way.profile)).peak_bytes
    baseline = model.evaluate(choice_of((), way.profile)).peak_bytes
    expecting = dataclasses.replace(plan, predicted_peak_bytes=expected, baseline_peak_bytes=baseline)
    counted = way.confirm(expecting, eligible)
    held = None if counted.fits else way.held(plan.actions, eligible.config)
    return counted if held is None else dataclasses.replace(held.written_in(counted), allocator=plan.allocator)
