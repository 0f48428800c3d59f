"""`AgreedPlans`: ranks that train together agree on their first plan. How they meet is in `rank_meetings.py`."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from memscale._errors import DoesNotFitError
from memscale._plan import Plan
from memscale._planning.loop.plan_maker import PlanMaker
from memscale._planning.loop.standing_job import StandingJob
from memscale._planning.rank_meetings import Meeting, Need, NobodyCameError, enlarged, largest_of, meets, plan_in
from memscale._profile.inputs import Inputs
from memscale._profile.ranks import ALONE, Group, find_group
from memscale._progress import stage
from memscale.report import console

logger = logging.getLogger("memscale")


@contextlib.contextmanager
def _shown(job: StandingJob, what: str) -> Iterator[None]:
    with console.progress(job.config.enable_logging), stage(what):
        yield


class AgreedPlans:
    """One rank's side of the agreement."""

    def __init__(self, maker: PlanMaker, replica: nn.Module | None = None) -> None:
        """`replica`: the DDP around the model, where it was there before."""
        self._maker = maker
        self._replica = None if replica is None else weakref.ref(replica)
        self._has_met = False
        """The other ranks. See NOTE [no collective] in `rank_meetings.py`."""

    def group_of(self, model: nn.Module) -> Group | None:
        """The ranks that train this model; None: there is but this one."""
        return find_group(model, None if self._replica is None else self._replica())

    def prepare(self, model: nn.Module, inputs: Inputs) -> bool:
        """Count what the ranks share, and meet them at the first training forward. True: a plan is in force."""
        group = self.group_of(model)
        self._maker.plans.job.train_with(ALONE if group is None else group.ranks)
        if group is None or not meets(group) or self._has_met:
            return False
        self._has_met = True
        return self._meet(model, inputs, group)

    def _meet(self, model: nn.Module, inputs: Inputs, group: Group) -> bool:
        """Agree with the other ranks on a plan for the largest of their batches. False: each goes on by itself."""
        plans, job = self._maker.plans, self._maker.plans.job
        plans.turn_to(job.device(model))
        meeting = Meeting(group, type(model).__name__)
        try:
            with _shown(job, "waiting for the other ranks, to plan together"):
                needs = meeting.gather(Need(inputs.specs(), job.eligible.budget.device_bytes))
            largest = largest_of([need.specs for need in needs])
            if largest is None:
                logger.info("the batches of the ranks are of different kinds: each rank plans by itself")
                return False
            common = enlarged(inputs, largest)
            if meeting.leads(needs, largest):
                return self._lead(model, common, inputs, min(need.budget_bytes for need in needs), meeting)
            with _shown(job, "waiting for the plan of the rank that has the largest batch"):
                answer = meeting.read_answer()
            return self._follow(model, common, inputs, plan_in(answer))
        except NobodyCameError as error:
            logger.warning(
                "%s to plan together: was the model wrapped on all ranks? This one plans by itself", str(error)
            )
            return False

    def _lead(self, model: nn.Module, common: Inputs, begun: Inputs, budget_bytes: int, meeting: Meeting) -> bool:
        """Plan for all, within the smallest budget, and tell them; also where no plan is found."""
        plans, job = self._maker.plans, self._maker.plans.job
        answer: dict[str, Any] = {"error": "planning failed there; its own message says why"}
        own = job.eligible
        try:
            if budget_bytes < own.budget.device_bytes:
                job.eligible = own.replace(memory_budget_gb=budget_bytes / 1e9)
            self._maker.plan(model, common, inside=True, begun=begun)
            plan = plans.now
            is_for_all = plan is not None and not plan.provisional and not plans.deciding.names
            answer = {"plan": plan.to_json()} if plan is not None and is_for_all else {}
        except DoesNotFitError as error:
            answer = {"misfit": str(error)}
            raise
        finally:
            job.eligible = own
            meeting.answer(answer)
        return True

    def _follow(self, model: nn.Module, common: Inputs, begun: Inputs, plan: Plan | None) -> bool:
        """Do what the leader has planned. False: that was for itself alone."""
        if plan is None:
            return False
        plans = self._maker.plans
        plans.remember(plans.of(plans.demand(model, common), plan))
        plans.put_in_force(plan, begun)
        plans.announce(plan)
        return True
