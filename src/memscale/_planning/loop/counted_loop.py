"""`CountedLoop`: what the loop itself holds on the device (a second model, say), and plans that count it."""

from __future__ import annotations

import logging

from torch import nn

from memscale._errors import DoesNotFitError
from memscale._planning.loop.demand import Weights
from memscale._planning.loop.loop_watch import Found, LoopWatch, words_of_loop
from memscale._planning.loop.observing import Observing
from memscale._planning.loop.plan_maker import PlanMaker
from memscale._profile.inputs import Inputs
from memscale._units import show_bytes

logger = logging.getLogger("memscale")


class CountedLoop:
    """Follows what the loop holds, and plans again where that is more than plans count."""

    def __init__(self, maker: PlanMaker, observing: Observing, watch: LoopWatch) -> None:
        self._maker = maker
        self._observing = observing
        self._watch = watch

    def look(self, model: nn.Module, inputs: Inputs, weights: Weights) -> Found | None:
        """What the loop holds beyond what plans count; None: nothing, or nothing that could be seen."""
        plan, job = self._maker.plans.now, self._maker.plans.job
        if plan is None or plan.provisional or self._observing.is_on or self._observing.is_needed:
            return None  # who observes sees it with the rest
        return self._watch.look(
            plan,
            inputs,
            weights,
            job.device(model),
            job.seen_loop,
            counts_all=job.config.memory_budget_gb is None,
            workspace_bytes=job.hardware.workspace_bytes,
        )

    def plan_for(self, model: nn.Module, inputs: Inputs, found: Found) -> bool:
        """Count from here on what the loop holds. Plans that have room for it promise more; for others new ones are
        made when they are needed. True: one was made for this batch."""
        plans, job = self._maker.plans, self._maker.plans.job
        earlier, known = job.loop, plans.known
        job.loop = job.seen_loop = found.loop
        plans.num_seen.clear()
        plans.known, in_force = known.holding(found.new_bytes, inputs, plans.now)
        if in_force is not None:
            plans.executor.plan = in_force
        what = words_of_loop(earlier, found.loop)
        if plans.find(model, inputs) is not None:
            logger.info("this loop %s (%s): plans count it from here on", what, show_bytes(found.new_bytes))
            return False
        logger.info("this loop %s (%s): planning again, to count it", what, show_bytes(found.new_bytes))
        try:
            self._maker.plan(model, inputs, inside=True)
        except DoesNotFitError as error:
            job.loop, plans.known = earlier, known
            logger.warning(
                "this loop %s (%s), and no plan that counts it fits the budget: the peak may be above the predicted "
                "one by that much. %s",
                what,
                show_bytes(found.new_bytes),
                str(error),
            )
            return False
        return True
