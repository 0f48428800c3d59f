"""`Observing`: a model that cannot be rehearsed, or whose steps took more than was promised, shows what it needs.

Its steps run under the careful plan, and the plan is made from what they showed (`observed_steps.py`).
"""

from __future__ import annotations

import logging

from torch import nn

from memscale._errors import DoesNotFitError, StaticProfileError
from memscale._plan import Plan
from memscale._planning.loop.demand import Demand
from memscale._planning.loop.observed_steps import ObservedSteps
from memscale._planning.loop.plans_in_force import PlansInForce
from memscale._planning.loop.step_watch import Excess
from memscale._profile.inputs import Inputs
from memscale._torch import private

logger = logging.getLogger("memscale")

_MAX_EXCEEDED = 2
"""How often steps are observed anew because one exceeded the budget."""


class Observing:
    """Whether a model's steps are observed, and what follows from what they showed."""

    def __init__(self, plans: PlansInForce) -> None:
        self._plans = plans
        self._steps: ObservedSteps | None = None
        self.is_needed = False
        """Rehearsals do not show what this model needs."""
        self._num_exceeded = 0
        """Steps above the budget."""

    @property
    def is_on(self) -> bool:
        """The plan in force is the careful one, or one that observed steps gave and that is still being checked."""
        return self._steps is not None

    @property
    def is_under_way(self) -> bool:
        """A step is being observed at this moment."""
        return self._steps is not None and self._steps.is_under_way

    def begin(self, model: nn.Module, inputs: Inputs, error: StaticProfileError, *, inside: bool) -> None:
        """Put the careful plan in force. `inside`: in a forward that has just begun, which is the first to be seen."""
        plans = self._plans
        if not self.is_needed:
            logger.info("%s Its first training steps are observed, and the plan is made from them.", error.what)
            self.is_needed = error.needs_values
        plans.deciding.names = frozenset()  # what was seen is what counts
        self._steps = ObservedSteps(model, plans.job.eligible, plans.job.costs(model))
        if self._num_exceeded > _MAX_EXCEEDED:
            self._steps.give_up("what they showed was exceeded by later ones, above the budget")
        plans.put_in_force(self._steps.careful, inputs if inside else None)
        if inside:
            self._open(model, inputs, plans.demand(model, inputs))

    def go_on(self, model: nn.Module, inputs: Inputs, demand: Demand, *, is_known: bool) -> bool:
        """Use what the last step has shown: a further one begins. True: it is another, for which a plan is wanted."""
        steps = self._steps
        assert steps is not None
        if steps.has_given_up:
            return False
        steps.close()
        if steps.plan is not None and not is_known:
            return True
        if steps.is_ready(demand):
            was_planned = steps.plan is not None
            plan = self._plan_from(model, steps)
            if plan is not None:
                for seen in steps.demands:
                    self._plans.remember(self._plans.of(seen, plan))
                self._plans.put_in_force(plan, inputs)
                self._plans.announce(plan)
            if was_planned and (plan is None or plan.rehearsed):
                self._steps = None
                return False
        self._open(model, inputs, demand)
        return False

    def _plan_from(self, model: nn.Module, steps: ObservedSteps) -> Plan | None:
        """A plan from what was seen; None: what is in force stays."""
        costs = self._plans.job.costs(model)
        try:
            return steps.make_plan(model, costs) if steps.plan is None else steps.check(model, costs)
        except DoesNotFitError as error:
            if not self._num_exceeded:
                raise
            steps.give_up(f"no plan fits what was seen: {error}")
            return None

    def _open(self, model: nn.Module, inputs: Inputs, demand: Demand) -> None:
        """Observe the step that begins; one that is being traced by others is let go by."""
        assert self._steps is not None
        if private.can_take_outermost_mode() and not self._steps.has_given_up:
            self._steps.open(model, inputs, demand, self._plans.executor.traffic)

    def answer(self, excess: Excess) -> None:
        """A step took more than was promised: say so. Above the budget the next steps are observed, and planned for
        anew; within it the number is mended.

        Where that has not helped, because large steps come when nobody observes, the careful plan stays.
        """
        observes = excess.is_over and self._plans.job.config.use_empirical_fallback
        what = ". The next steps are observed, and planned for anew." if observes else "; the promise is corrected"
        logger.warning("%s%s", excess.words, what)
        if observes:
            self._num_exceeded += 1
            self.is_needed = True
            self._plans.forget()
        else:
            self._plans.known = self._plans.known.promising(excess.plan, excess.corrected)

    def stop(self) -> None:
        """Let go of what was seen."""
        if self._steps is not None:
            self._steps.abandon()
            self._steps = None
