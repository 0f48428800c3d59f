"""`PlansByShape`: each shape of batch gets a plan that does no more than it needs. See NOTE [plans by shape]."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from memscale._errors import DoesNotFitError
from memscale._plan import Plan
from memscale._planning.loop.known_plans import Known
from memscale._planning.loop.observing import Observing
from memscale._planning.loop.plan_maker import PlanMaker
from memscale._planning.loop.shapes import bucket_below, largest_that_fits, misfit_of, shape_text
from memscale._profile.inputs import Inputs

logger = logging.getLogger("memscale")

_TIMES_SEEN = 2
"""Shapes that are smaller than what was planned for get a plan of their own when they come so often."""


class PlansByShape:
    """Plans for the shapes that are known before the first step, and for those that come again and again."""

    def __init__(self, maker: PlanMaker, observing: Observing) -> None:
        self._maker = maker
        self._observing = observing

    def plan(self, model: nn.Module, samples: Sequence[Inputs], *, is_guess: bool = False) -> None:
        """Plan before the first step for all of these batches, of which the largest comes first."""
        try:
            self._maker.plan(model, samples[0], is_guess=is_guess)
        except DoesNotFitError as error:
            if len(samples) == 1:
                raise
            found = largest_that_fits(samples, lambda sample: self._maker.fits(model, sample))
            raise misfit_of(samples[0], found, error) from error
        if self._observing.is_on:
            return  # what fake tensors cannot show is seen as the batches come
        for sample in samples[1:]:
            known = self._maker.plans.find(model, sample)
            if known is None:
                self._maker.plan(model, sample)
            else:
                self.loosened(model, sample, known, times_seen=1)

    def loosened(self, model: nn.Module, inputs: Inputs, known: Known, *, times_seen: int = _TIMES_SEEN) -> Known:
        """What holds for this batch and slows it less, if its shape has come before and is well below `known`."""
        plans = self._maker.plans
        goes_low = plans.job.config.force_optimize  # as low as the mode allows, with every batch
        if not known.is_worth_loosening or goes_low or plans.deciding.names:
            return known
        largest = bucket_below(inputs, known.demand)
        if largest is None:
            return known
        plans.num_seen[largest.specs()] += 1
        if plans.num_seen[largest.specs()] != times_seen:
            return known
        return self._loosened_plan(model, largest, known.plan) or known

    def _loosened_plan(self, model: nn.Module, largest: Inputs, plan: Plan) -> Known | None:
        plans = self._maker.plans
        found = plans.job.loosened_plan(model, largest, plan)
        if found is None:
            return None
        looser, plain = found
        new = plans.of(plans.demand(model, largest), looser, plain)
        plans.remember(new)
        logger.info(
            "batches up to %s get a plan of their own, with %d of the %d actions of the plan for larger ones",
            shape_text(largest),
            len(looser.actions),
            len(plan.actions),
        )
        return new
