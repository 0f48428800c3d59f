"""`JointForwards`: loops that run the model several times before one backward.

NOTE [joint forwards]: a forward that comes while an earlier one awaits its backward follows the plan that is in force,
also where that was made for less. From the next step on every batch is planned for as if it were as large as the
largest of such a step, so that one plan holds for all of them.
"""

from __future__ import annotations

import logging

from torch import nn

from memscale._planning.loop.plans_in_force import PlansInForce
from memscale._planning.rank_meetings import Specs, enlarged, largest_of
from memscale._profile.inputs import Inputs
from memscale._torch import private

logger = logging.getLogger("memscale")


class JointForwards:
    """The largest sizes of batches that shared a step with others."""

    def __init__(self, plans: PlansInForce) -> None:
        self._plans = plans
        self._largest: Specs | None = None

    def note(self, model: nn.Module, inputs: Inputs) -> None:
        """A forward begins while an earlier one awaits its backward."""
        if self._plans.deciding.names or private.inside_functional_transform():
            return
        demand, plan = self._plans.demand(model, inputs), self._plans.now
        if any(known.plan is plan and known.demand.covers(demand) for known in self._plans.known):
            return
        joint = inputs.specs() if self._largest is None else largest_of([self._largest, inputs.specs()])
        if joint is not None and joint != self._largest:
            logger.info("this loop runs the model several times before backward: one plan will hold for all of them")
            self._largest = joint

    def enlarged(self, inputs: Inputs) -> Inputs:
        """A batch as large as those that may come before its backward."""
        if self._largest is None or self._plans.deciding.names:
            return inputs
        largest = largest_of([self._largest, inputs.specs()])
        return inputs if largest in (None, inputs.specs()) else enlarged(inputs, largest)
