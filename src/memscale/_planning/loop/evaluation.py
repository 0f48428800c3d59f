"""`Evaluation`: forwards in evaluation mode that record a graph for gradients.

Such a forward holds what one of training holds, and some programs train in that mode. So it follows a plan for
training, where there is one. What does not fit is not refused here: it may be an evaluation for which nobody has turned
gradients off.
"""

from __future__ import annotations

import logging

from torch import nn

from memscale._errors import DoesNotFitError, StaticProfileError
from memscale._planning.loop.demand import Demand
from memscale._planning.loop.plan_maker import PlanMaker
from memscale._profile.inputs import Inputs

logger = logging.getLogger("memscale")


class Evaluation:
    """Plans for what comes in evaluation mode, and what could not be planned for."""

    def __init__(self, maker: PlanMaker) -> None:
        self._maker = maker
        self._refused: list[Demand] = []

    def prepare(self, model: nn.Module, inputs: Inputs) -> None:
        """Put a plan in force that holds for the forward that begins, if there is one."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
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
