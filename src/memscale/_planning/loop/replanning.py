"""`Replanner`: plans follow the batches. One is made at the first training forward, and another when a step may need
more than any plan was made for.

It asks, in this order: may this forward be planned for at all (`__call__`), does it share a step with earlier ones
(`joint_forwards.py`), does the loop hold more than plans count (`counted_loop.py`), do the ranks plan together
(`agreed_plans.py`), which plan holds for this batch (`plans_in_force.py`), is there a faster one for its shape
(`plans_by_shape.py`), and does it count gradients that are there (`counted_gradients.py`). What is missing is made by
`plan_maker.py`, from a rehearsal or from observed steps (`observing.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memscale._errors import runs_in_threads
from memscale._execute.executor import Executor
from memscale._planning.job import Job
from memscale._planning.loop.agreed_plans import AgreedPlans
from memscale._planning.loop.counted_gradients import CountedGradients
from memscale._planning.loop.counted_loop import CountedLoop
from memscale._planning.loop.demand import Weights, read_weights
from memscale._planning.loop.evaluation import Evaluation
from memscale._planning.loop.joint_forwards import JointForwards
from memscale._planning.loop.loop_watch import LoopWatch
from memscale._planning.loop.observing import Observing
from memscale._planning.loop.open_passes import OpenPasses
from memscale._planning.loop.plan_maker import PlanMaker
from memscale._planning.loop.plans_by_shape import PlansByShape
from memscale._planning.loop.plans_in_force import PlansInForce, Report
from memscale._planning.loop.standing_job import StandingJob
from memscale._planning.loop.step_watch import Excess, StepWatch
from memscale._planning.loop.uncalled import UncalledWatch
from memscale._profile.inputs import Inputs
from memscale._torch import private
from memscale._torch.overrides import OwnHook, is_redirected, refuse_compiler

logger = logging.getLogger("memscale")


class Replanner(OwnHook):
    """A forward pre-hook: plans at the first training forward, and again when a forward comes that no plan covers (a
    larger dimension, other trained parameters, another device), or one that begins with gradients which the plan does
    not count and for which it leaves no room. A model that cannot be rehearsed is observed in its first steps, and so
    is one of which a step took more than its plan had promised."""

    def __init__(
        self, executor: Executor, job: Job, reporter: Report | None = None, replica: nn.Module | None = None
    ) -> None:
        """`replica`: the DDP around the model, where it was there before."""
        self.plans = PlansInForce(executor, job, reporter)
        self._observing = Observing(self.plans)
        self._maker = PlanMaker(self.plans, self._observing)
        self._by_shape = PlansByShape(self._maker, self._observing)
        self._agreed = AgreedPlans(self._maker, replica)
        self._joint = JointForwards(self.plans)
        self._evaluation = Evaluation(self._maker, executor.model)
        self._gradients = CountedGradients(self._maker, self._observing)
        self._loop_watch = LoopWatch(executor.model)
        self._loop = CountedLoop(self._maker, self._observing, self._loop_watch)
        self._step_watch = StepWatch(executor.model)
        self._excess: Excess | None = None
        """What is known of a step that has ended, until the next one begins."""
        self._uncalled = UncalledWatch(executor)
        self._passes = OpenPasses(executor.model)
        self.is_repeating = False
        """A forward is run again inside its backward: its plan is in force, and gradients that are there are its."""
        for watch in (self._observing, self._passes, self._step_watch, self._loop_watch, self._evaluation):
            executor.on_detach(watch.stop)

    @property
    def job(self) -> StandingJob:
        """What is to be planned, as it stands now."""
        return self.plans.job

    @property
    def is_observing(self) -> bool:
        """The plan in force is the careful one, under which steps are observed."""
        return self._observing.is_on

    def plan_shapes(self, model: nn.Module, samples: Sequence[Inputs], *, is_guess: bool = False) -> None:
        """Plan before the first step for all of these batches, of which the largest comes first."""
        self._by_shape.plan(model, samples, is_guess=is_guess)

    def tighten(self, model: nn.Module, inputs: Inputs, budget_bytes: int, *, inside: bool) -> None:
        """Plan for this batch, and for all that come, within a smaller budget. If nothing fits, all stays as it is."""
        self._maker.tighten(model, inputs, budget_bytes, inside=inside)

    # ---- the hook

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            if model.training and torch.is_grad_enabled():
                refuse_compiler(type(model).__name__)
            return
        if torch.is_grad_enabled() and private.is_data_parallel_copy(model):
            raise runs_in_threads(type(model).__name__)
        if self.job.is_planning or self.is_repeating or is_redirected(model):
            return
        if private.graph_task_id() >= 0 and self.plans.now is not None:
            return  # a checkpoint around the whole model computes it again, and must do what its forward did
        if torch.is_grad_enabled():
            self._uncalled.stop()
        self.plans.follow_move()
        if model.training and torch.is_grad_enabled() and self._passes.are_open and self.plans.now is not None:
            if not self._observing.is_on:
                self._joint.note(model, Inputs(args, kwargs))
            return
        self._excess = self._step_watch.end() or self._excess
        self._evaluation.end_step()
        if not torch.is_grad_enabled() or private.inside_functional_transform():
            return  # tensors of a transform (`torch.func.grad`) have no bytes of their own, and cannot be rehearsed
        if model.training:
            self._begin_step(model, Inputs(args, kwargs))
        elif not self._observing.is_on and not self._observing.is_needed and self._agreed.group_of(model) is None:
            self._evaluation.prepare(model, Inputs(args, kwargs))  # ranks plan together, where all of them come to

    def _begin_step(self, model: nn.Module, inputs: Inputs) -> None:
        """A training forward begins, and no earlier one awaits its backward."""
        self._gradients.look(model, has_stepped=self._loop_watch.has_stepped)
        if self._observing.is_under_way:
            return  # one more forward of the step that is being observed
        excess, self._excess = self._excess, None
        weights = read_weights(model)
        held = self._loop.look(model, inputs, weights)
        if held is None and excess is not None:
            self._observing.answer(excess)
        if held is None or not self._loop.plan_for(model, inputs, held):
            self._prepare(model, inputs, weights if held is None and excess is None else read_weights(model))
        self._follow_step(model, inputs)

    def _prepare(self, model: nn.Module, begun: Inputs, weights: Weights) -> None:
        """Put a plan in force that holds for the training forward that begins."""
        if self._agreed.prepare(model, begun):
            return
        plans, inputs = self.plans, self._joint.enlarged(begun)
        demand = plans.demand(model, inputs, weights)
        known = plans.known.find(demand)
        if self._observing.is_on:
            if self._observing.go_on(model, begun, demand, is_known=known is not None):
                self._maker.plan(model, begun, inside=True)
            return
        known = known or plans.find_by_values(model, inputs, demand)
        if known is not None and self.job.trained_by.has_changed(model):
            logger.info("the optimizer is not the one that was planned for: planning again")
            plans.forget()
            known = None
        if known is None:
            if plans.known:
                logger.info("this step may need more memory than any that was planned for: planning again")
            self._maker.plan(model, inputs, inside=True, begun=begun)
            return
        known = self._by_shape.loosened(model, inputs, known)
        if known.plan is not plans.now:
            plans.put_in_force(known.plan, begun)
        if self._gradients.are_missing_in(known):
            self._gradients.count(model, begun, known, is_largest=known.demand == demand and inputs is begun)

    def _follow_step(self, model: nn.Module, inputs: Inputs) -> None:
        """Watch the step that begins, as far as its plan needs it."""
        plan = self.plans.now
        if plan is not None and (plan.actions or plan.device_type != "cpu"):
            self._passes.follow()
        else:
            self._passes.stop()  # what a CPU computes without techniques needs no plan in its backward
        if plan is not None and not plan.provisional and not self._observing.is_on:
            self._step_watch.begin(plan, inputs, self.job.device(model), counts_held=self.job.holds)
            if not self._observing.is_needed:
                self._loop_watch.begin()
