"""`PlanMaker`: a plan for a model in training, from the cache, from a rehearsal, or from observed steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from memscale._errors import DoesNotFitError, StaticProfileError
from memscale._plan import Plan
from memscale._planning.loop.observing import Observing
from memscale._planning.loop.plans_in_force import PlansInForce
from memscale._planning.saved import plan_cache
from memscale._profile import Profile
from memscale._profile.inputs import Inputs
from memscale._profile.ranks import refuse_flat_parameters

logger = logging.getLogger("memscale")


class PlanMaker:
    """Makes plans and puts them in force."""

    def __init__(self, plans: PlansInForce, observing: Observing) -> None:
        self.plans = plans
        self._observing = observing
        self._budget_before: dict[str, Any] | None = None
        """The budget before a step ran out of memory (`tighten`)."""

    def plan(
        self,
        model: nn.Module,
        inputs: Inputs,
        *,
        inside: bool = False,
        is_guess: bool = False,
        begun: Inputs | None = None,
    ) -> None:
        """Plan for this batch. `inside`: in the first moment of a forward, which is to follow the plan already;
        `begun`: with which it was called, where the plan is for more. `is_guess`: the inputs were derived, not given,
        so an error about them is no error of the user's."""
        plans, job = self.plans, self.plans.job
        refuse_flat_parameters(model)
        if inside:  # else it is being wrapped, and its hardware was looked at a moment ago
            plans.turn_to(job.device(model))
        is_untouched = plans.now is None and not self._observing.is_needed
        slot = plan_cache.slot_for(job.of(model), inputs) if is_untouched else None
        try:
            plan, profile = self._within_budget(model, inputs, slot)
        except StaticProfileError as error:
            is_sample, is_evaluation = not inside and not is_guess, inside and not model.training
            may_observe = job.config.use_empirical_fallback and not is_evaluation  # which may have no backward
            if not may_observe or (is_sample and not error.needs_values):
                raise
            self._observing.begin(model, begun or inputs, error, inside=inside)
            return
        plain = None  # of a plan that was kept: it is for steps where no value of an input decides anything
        if profile is not None:
            plain = profile.plain
            plans.deciding.add(profile.deciding_inputs)
        plans.remember(plans.known.widened(plans.of(plans.demand(model, inputs), plan, plain)))
        plans.put_in_force(plan, (begun or inputs) if inside else None)
        plans.note_batch(inputs)
        plans.begin_afresh()
        plans.announce(plan)

    def _within_budget(
        self, model: nn.Module, inputs: Inputs, slot: plan_cache.PlanSlot | None
    ) -> tuple[Plan, Profile | None]:
        """A plan. A batch that is larger than the one for which the budget was lowered may need the one before."""
        try:
            return self._kept_or_made(model, inputs, slot)
        except DoesNotFitError:
            if self._budget_before is None:
                raise
        job, before, self._budget_before = self.plans.job, self._budget_before, None
        job.eligible = job.eligible.replace(**before)
        return self._kept_or_made(model, inputs, slot)

    def _kept_or_made(
        self, model: nn.Module, inputs: Inputs, slot: plan_cache.PlanSlot | None
    ) -> tuple[Plan, Profile | None]:
        """The plan that the cache has; or one that is made now, and kept for next time, with its profile."""
        kept = None if slot is None else slot.read()
        if kept is not None:
            logger.info("the plan that was made for this before is used; MEMSCALE_CACHE=0 would plan anew")
            return kept, None
        profiles: list[Profile] = []
        plan = self._rehearsed(model, inputs, profiles.append)
        profile = profiles[-1] if profiles else None
        if slot is not None and profile is not None and not profile.deciding_inputs:
            slot.write(plan)
        return plan, profile

    def fits(self, model: nn.Module, sample: Inputs) -> bool:
        """Whether a plan for this batch fits; it is not put in force."""
        try:
            self._rehearsed(model, sample, lambda profile: None)
        except DoesNotFitError:
            return False
        return True

    def _rehearsed(self, model: nn.Module, inputs: Inputs, on_profile: Callable[[Profile], None]) -> Plan:
        if self._observing.is_needed:
            # A variable for it would hold this frame, and by those around it the model's output, until garbage is
            # collected.
            raise StaticProfileError(f"{type(model).__name__} could not be rehearsed before", needs_values=True)
        return self.plans.job.rehearsed_plan(model, inputs, on_profile)

    def tighten(self, model: nn.Module, inputs: Inputs, budget_bytes: int, *, inside: bool) -> None:
        """Plan for this batch, and for all that come, within a smaller budget. If nothing fits, all stays as it is."""
        plans, job = self.plans, self.plans.job
        earlier, before = (job.eligible, plans.known), self._budget_before
        wishes = {name: getattr(job.eligible.config, name) for name in ("memory_budget_gb", "force_optimize")}
        self._budget_before = None
        job.eligible = job.eligible.replace(memory_budget_gb=budget_bytes / 1e9, force_optimize=False)
        plans.forget()
        try:
            self.plan(model, inputs, inside=inside)
        except BaseException:
            (job.eligible, plans.known), self._budget_before = earlier, before
            raise
        self._budget_before = before or wishes
