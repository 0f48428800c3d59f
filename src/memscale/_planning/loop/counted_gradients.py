"""`CountedGradients`: a loop keeps gradients from batch to batch, and plans count them from then on."""

from __future__ import annotations

import logging
import warnings

from torch import nn

from memscale._errors import DoesNotFitError
from memscale._hardware import Hardware
from memscale._plan import Plan
from memscale._planning.loop.held_gradients import GradientWatch, held_bytes
from memscale._planning.loop.known_plans import Known
from memscale._planning.loop.observing import Observing
from memscale._planning.loop.plan_maker import PlanMaker
from memscale._profile.inputs import Inputs
from memscale._units import show_bytes

logger = logging.getLogger("memscale")


class CountedGradients:
    """The loop adds up gradients over several batches, or keeps them during forward: plans are to count them."""

    def __init__(self, maker: PlanMaker, observing: Observing) -> None:
        self._maker = maker
        self._observing = observing
        self._watch = GradientWatch("backward" if maker.plans.job.holds_gradients else "none")
        self._are_ignored = False
        """No plan that counts gradients of earlier batches fits."""

    def look(self, model: nn.Module, *, has_stepped: bool) -> None:
        """A training forward begins. `has_stepped`: an optimizer has, since the one before."""
        self._watch.look(model, has_stepped=has_stepped)

    def are_missing_in(self, known: Known) -> bool:
        """Whether this plan counts another part of a step than the one that they are there for."""
        is_settled = self._are_ignored or self._maker.plans.job.ranks.keeps_gradients
        return known.stay != self._watch.stay and not is_settled

    def count(self, model: nn.Module, inputs: Inputs, known: Known, *, is_largest: bool) -> None:
        """Count them in the plan that is in force where it fits then; else plan again. `is_largest`: these inputs are
        as large as those that were planned for."""
        if not is_largest and known.is_bound:
            return
        plans, job = self._maker.plans, self._maker.plans.job
        earlier = job.holds_gradients, job.loop, plans.known
        job.hold_until(self._watch.stay)
        counted = self._counting(model, inputs, known, is_largest=is_largest)
        if counted.plan.fits:
            logger.info("this loop keeps gradients between batches: the plan's numbers count them from here on")
            plans.promise(counted, known, inputs)
            return
        logger.info("this loop keeps gradients between batches: planning again, so that the plan counts them")
        plans.forget()
        try:
            self._maker.plan(model, inputs, inside=True)
        except DoesNotFitError as error:
            job.holds_gradients, job.loop, plans.known = earlier
            why = f"this loop keeps gradients between batches ({show_bytes(held_bytes(model))}), for which the current"
            if not could_hold(job.hardware, counted.plan):
                misfit = DoesNotFitError(f"{why} plan has no room, and the device would run out of memory. {error}")
                misfit.batch_size = error.batch_size
                raise misfit from error
            self._are_ignored = True
            plans.promise(counted, known, inputs)
            warnings.warn(
                f"{why} plan has no room, and no plan that counts them fits the budget: the peak will be above it. "
                f"{error}",
                stacklevel=2,
            )

    def _counting(self, model: nn.Module, inputs: Inputs, known: Known, *, is_largest: bool) -> Known:
        """What was planned for, with gradients of earlier batches in its numbers."""
        if is_largest and not self._observing.is_needed and known.plan.rehearsed:
            plan = self._maker.plans.job.counted_plan(model, inputs, known.plan)
            if plan is not None:
                return self._maker.plans.of(known.demand, plan, known.plain)
        more = 0 if known.stay == "backward" else held_bytes(model)
        return known.bounded(more)


def could_hold(hardware: Hardware, plan: Plan) -> bool:
    """Whether the device has as much as the plan says, above the budget as it may be. RAM is not so strict."""
    needed_bytes = max(plan.predicted_peak_bytes, plan.predicted_allocated_bytes or 0)
    return hardware.device_type == "cpu" or needed_bytes <= hardware.free_bytes
