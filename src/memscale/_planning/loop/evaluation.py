"""`Evaluation`: forwards in evaluation mode that record a graph for gradients.

Such a forward holds what one of training holds, and some programs train in that mode. So it follows a plan for
training, where there is one. What does not fit is not refused here: it may be an evaluation for which nobody has turned
gradients off.

Several such forwards before one backward hold several graphs, where their plan counts one. No plan is made for that: in
this mode nobody can tell a step from outputs that are kept. What a step takes is measured, though, and said once.
"""

from __future__ import annotations

import logging

from torch import nn

from memscale._errors import DoesNotFitError, StaticProfileError
from memscale._planning.loop.demand import Demand
from memscale._planning.loop.open_passes import OpenPasses
from memscale._planning.loop.plan_maker import PlanMaker
from memscale._planning.loop.step_watch import StepWatch
from memscale._profile.inputs import Inputs

logger = logging.getLogger("memscale")


class Evaluation:
    """Plans for what comes in evaluation mode, and what could not be planned for."""

    def __init__(self, maker: PlanMaker, model: nn.Module) -> None:
        self._maker = maker
        self._refused: list[Demand] = []
        self._passes = OpenPasses(model, in_training=False)
        self._watch = StepWatch(model)
        self._has_warned = False

    def stop(self) -> None:
        """Follow nothing any more."""
        self._passes.stop()
        self._watch.stop()

    def end_step(self) -> None:
        """A forward begins. If no earlier one awaits its backward, what those took is held against their plan."""
        if self._passes.are_open:
            return
        excess = self._watch.end()
        if excess is not None and excess.is_over and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "in evaluation mode %s. Several forwards before one backward hold several graphs, which plans count in "
                "training mode alone: call model.train(), or plan with a smaller memory_budget_gb",
                excess.words,
            )

    def prepare(self, model: nn.Module, inputs: Inputs) -> None:
        """Put a plan in force that holds for the forward that begins, if there is one, and watch what it takes."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        self._put_in_force(model, inputs)
        plan = self._maker.plans.now
        if plan is not None and not plan.provisional and not self._passes.are_open:
            self._passes.follow()
            self._watch.begin(
                plan, inputs, self._maker.plans.job.device(model), counts_held=self._maker.plans.job.holds
            )

    def _put_in_force(self, model: nn.Module, inputs: Inputs) -> None:
        plans = self._maker.plans
        demand = plans.demand(model, inputs)
        known = plans.known.find(demand)
        if known is not None:
            if known.plan is not plans.now:
                plans.put_in_force(known.plan, inputs)
            return
        if any(demand.covers(refused) for refused in self._refused):
            return
        try:
            self._maker.plan(model, inputs, inside=True)
        except (DoesNotFitError, StaticProfileError) as error:
            self._refused.append(demand)
            logger.warning(
                "a forward in evaluation mode that records a graph for gradients is not planned for: %s If this is an "
                "evaluation, torch.no_grad() around it takes far less",
                str(error),
            )
