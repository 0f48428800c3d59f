"""`PlansInForce`: the plans of one model in training, and which of them its forwards follow.

plans.find(model, inputs)                # the plan that holds for a batch, if one is known
plans.put_in_force(known.plan, inputs)   # the forward that has just begun follows it already
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memscale._decide.eligible import Eligible
from memscale._errors import MemScaleError, StaticProfileError
from memscale._execute.executor import Executor
from memscale._execute.reserving import empty_cache
from memscale._plan import Plan
from memscale._planning.job import Job
from memscale._planning.loop.deciding_values import DecidingValues
from memscale._planning.loop.demand import Demand, Weights, read_demand
from memscale._planning.loop.known_plans import Known, KnownPlans
from memscale._planning.loop.standing_job import StandingJob
from memscale._planning.other_peaks import warn_of_other_peaks
from memscale._profile import StepTrace
from memscale._profile.inputs import Inputs
from memscale.report import console
from memscale.report.peak_against_time import PeakAgainstTime
from memscale.report.step_memory import StepMemory
from memscale.report.step_times import StepTimes

logger = logging.getLogger("memscale")

Report = Callable[[Executor, Plan, Eligible], None]
"""A function that is called after every plan."""


class PlansInForce:
    """What was planned for, by demand, and how a plan is put in force and announced. It makes none itself."""

    def __init__(self, executor: Executor, job: Job, reporter: Report | None = None) -> None:
        self.executor = executor
        self.job = StandingJob(executor, job)
        self.known = KnownPlans()
        self.deciding = DecidingValues()
        self.num_seen: collections.Counter[Any] = collections.Counter()
        """How often batches of each bucket came that have no plan of their own. See NOTE [plans by shape]."""
        self._reporter = reporter
        self._has_warned = False
        self._batch: Inputs | None = None
        """A batch that the plan in force is for, as `Inputs.kept` keeps it; None: it cannot be kept."""
        executor.show_steps = self.shown_steps

    @property
    def now(self) -> Plan | None:
        """The plan that is in force."""
        return self.executor.plan

    def demand(self, model: nn.Module, inputs: Inputs, weights: Weights | None = None) -> Demand:
        """What this batch asks for. `weights`: those of the model, where they were read already."""
        return read_demand(model, inputs, self.job.device(model), self.deciding.names, self.job.ranks, weights)

    def find(self, model: nn.Module, inputs: Inputs) -> Known | None:
        """The plan that holds for this batch; None: none is known."""
        return self.known.find(self.demand(model, inputs))

    def find_by_values(self, model: nn.Module, inputs: Inputs, demand: Demand) -> Known | None:
        """What holds for a batch whose values, and no dimension, go beyond those that were planned for: a plan for a
        step that goes the same way, and nowhere lower. See NOTE [values that decide]."""
        alike = self.known.of_shapes(demand)
        if not alike:
            return None
        if not self.deciding.may_look:
            if self.deciding.forget():
                self.known = self.known.without_values()
            return self.known.find(demand)
        self.deciding.begin_look(demand)
        try:
            plain = self.job.rehearsed_plain(model, inputs)
        except StaticProfileError:
            return None  # a plan for it will meet the same error, and observe the step
        wider = self.deciding.covering(plain, demand, alike)
        if wider is not None:
            self.remember(wider)
        return wider

    # ---- what is known

    def forget(self) -> None:
        """None of the plans holds any more."""
        self.known = KnownPlans()

    def of(self, demand: Demand, plan: Plan, plain: StepTrace | None = None) -> Known:
        """A plan for this demand that was made as the job stands now."""
        return Known(demand, plan, plain, self.job.counted)

    def remember(self, new: Known) -> None:
        """One more was made."""
        known = self.known.beside(new)
        if len(known) < len(self.known):
            self.num_seen.clear()  # what was found out about smaller shapes was about another placement
        self.known = known.with_one(new)

    # ---- where the model computes

    def follow_move(self) -> None:
        """Whatever this forward is for: a model that was moved elsewhere while it was streamed computes there."""
        device = self.executor.moved_to
        if device is not None and self.job.config.device is None:
            self.turn_to(device)

    def turn_to(self, device: torch.device) -> None:
        """Plan for this device: the model may have been moved since it was wrapped."""
        if self.job.turn_to(device):
            if self.known:
                logger.info("the model computes on %s now: planning again", device)
            self.forget()

    # ---- what is in force

    def put_in_force(self, plan: Plan, inputs: Inputs | None) -> None:
        """`inputs`: of the forward that has just begun, if one has."""
        if inputs is not None:
            self.note_batch(inputs)
        with console.progress(self.job.config.enable_logging):
            if inputs is None:
                self.executor.apply(plan)
            else:
                self.executor.apply_inside(plan, inputs.args, inputs.kwargs)

    def note_batch(self, inputs: Inputs) -> None:
        """The plan in force is for such a batch."""
        self._batch = inputs.kept()

    def shown_steps(self) -> tuple[StepMemory, StepMemory, StepTimes, PeakAgainstTime]:
        """A plain step and one under the plan in force, and what there would be instead, for a report.

        `MemScaleError`: they cannot be rehearsed.
        """
        if self._batch is None or self.now is None:
            raise MemScaleError("no batch is known that a step could be rehearsed with")
        return self.job.shown_steps(self.executor.model, self._batch, self.now)

    def promise(self, counted: Known, known: Known, inputs: Inputs) -> None:
        """Give the plan that is in force other numbers."""
        self.known = self.known.replaced(known, counted)
        if counted.plan.allocator == known.plan.allocator:
            self.executor.plan = counted.plan
        else:
            self.put_in_force(counted.plan, inputs)
        self.begin_afresh()

    def begin_afresh(self) -> None:
        """Give back what the allocator has cached.

        NOTE [plans begin afresh]: what a plan reserves is predicted for steps that begin with nothing cached. Segments
        that building the model or an earlier plan left behind have other sizes, and would be held beside its own.
        """
        if self.job.hardware.has_caching_allocator:
            empty_cache()

    def announce(self, plan: Plan) -> None:
        """Tell the user, and who asked to be told."""
        if self.job.config.enable_logging:
            console.show_plan(plan)
        if self._reporter is not None:
            self._reporter(self.executor, plan, self.job.eligible)
        if not self._has_warned:
            self._has_warned = True
            warn_of_other_peaks(plan)
