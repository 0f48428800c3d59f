"""`StandingJob`: what is to be planned while a loop trains, as it stands now.

A model may be moved, its optimizer may come later, gradients may stay from batch to batch, ranks may join: all of that
changes the `Job` of the next plan. The model itself is no part of it: it holds the hook that holds this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator

import torch
from torch import nn

from memscale._config import Config
from memscale._decide.eligible import Eligible
from memscale._decide.policy import choose_strategy
from memscale._errors import StaticProfileError
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._hardware import Hardware
from memscale._plan import Plan
from memscale._planning import make_plan
from memscale._planning.garbage import few_collections
from memscale._planning.job import Job, device_of, eligible_here
from memscale._planning.loop.held_gradients import Stay, counted_for
from memscale._planning.loop.shapes import loosened
from memscale._planning.loop.trained_by import TrainedBy
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale._planning.planner import Planner
from memscale._planning.questions.shown_steps import shown_steps
from memscale._planning.rank_meetings import withheld_from
from memscale._profile import Profile, StepTrace
from memscale._profile.inputs import Inputs
from memscale._profile.profiler import open_rehearsal
from memscale._profile.ranks import Ranks
from memscale._progress import stage
from memscale._torch import private
from memscale.report import console
from memscale.report.peak_against_time import PeakAgainstTime
from memscale.report.step_memory import StepMemory
from memscale.report.step_times import StepTimes

logger = logging.getLogger("memscale")


class StandingJob:
    """One model's training, and plans on fake tensors for it. Copies of a wrapped model are plain, so such a plan needs
    nothing taken off."""

    def __init__(self, executor: Executor, job: Job) -> None:
        self._executor = executor
        self.eligible, self.trained_by = job.eligible, TrainedBy(job.optimizer)
        """What is eligible for the next plan: the model may be moved, and the budget may change."""
        self.replacement, self.holds_gradients, self.ranks = job.replacement, job.holds_gradients, job.ranks
        self.loop = self.seen_loop = job.loop
        """What the loop holds, as plans count it and as it was seen: some of it may have fitted no plan."""
        self.is_planning = False

    def of(self, model: nn.Module) -> Job:
        """The job of the next plan."""
        eligible, optimizer = self._travelling(), self.trained_by.find(model)
        return Job(
            model,
            eligible.config,
            eligible.hardware,
            optimizer,
            self.replacement,
            self.holds,
            self.ranks,
            self.loop,
            resolved=eligible,
        )

    @property
    def config(self) -> Config:
        return self.eligible.config

    @property
    def hardware(self) -> Hardware:
        return self.eligible.hardware

    def costs(self, model: nn.Module) -> OptimizerCosts:
        return OptimizerCosts(self.of(model))

    def _travelling(self) -> Eligible:
        """What waits in memory that is not pinned goes on to block: to be moved, it would have to fit the device."""
        plan = self._executor.plan
        blocks = plan is not None and plan.conditions is not None and not plan.conditions.async_offload
        if plan is None or not blocks or not self._executor.keeps_waiting:
            return self.eligible
        return self.eligible.by(self.eligible.travel_of(plan))

    def device(self, model: nn.Module) -> torch.device:
        """Where the model computes. Streamed parameters do not tell: between visits they are at home, on the host."""
        device = self._executor.settings.device
        if device is not None and self._executor.streams:
            return device
        return device_of(model, self.config)

    # ---- what changes while the loop trains

    @property
    def holds(self) -> bool:
        """Whether plans count gradients of earlier batches."""
        return self.holds_gradients or self.ranks.keeps_gradients

    @property
    def counted(self) -> Stay:
        """How long plans that are made now count them."""
        if not self.holds:
            return "none"
        return "forward" if self.loop.clears_late else "backward"

    def hold_until(self, stay: Stay) -> None:
        """Plans that are made from here on count gradients of earlier batches so long."""
        self.holds_gradients = stay != "none"
        self.loop, self.seen_loop = (
            dataclasses.replace(loop, clears_late=stay == "forward") for loop in (self.loop, self.seen_loop)
        )

    def train_with(self, ranks: Ranks) -> None:
        """What these ranks cannot do with a model is not planned for it."""
        self.ranks = ranks
        self.eligible = self.eligible.under(withheld_from(self.config, ranks))

    def turn_to(self, device: torch.device) -> bool:
        """Plan for this device from here on. True: it is another than before."""
        self.eligible = eligible_here(self.config, device)
        if self._executor.settings.device == device:
            return False
        host_bytes = self.eligible.budget.host_bytes
        self._executor.turn_to(ExecutionSettings.from_config(self.config, device, host_bytes))
        return True

    # ---- planning

    @contextlib.contextmanager
    def _planning(self, what: str | None = None) -> Iterator[None]:
        """Forwards in here are no steps, for our own hook or for a checkpoint of the user's around the whole model."""
        self.is_planning = True
        try:
            with contextlib.ExitStack() as shown, private.outside_checkpoints(), few_collections():
                if what is not None:
                    shown.enter_context(console.progress(self.config.enable_logging))
                    shown.enter_context(stage(what))
                yield
        finally:
            self.is_planning = False

    def rehearsed_plan(self, model: nn.Module, inputs: Inputs, on_profile: Callable[[Profile], None]) -> Plan:
        """A plan for this batch."""
        with self._planning(f"planning {type(model).__name__}"):
            return make_plan(self.of(model), inputs, on_profile=on_profile)

    def plan_for_device(self, model: nn.Module, inputs: Inputs, device: torch.device) -> Plan:
        """A plan for this batch as if the model were on this device; the job stays where it is."""
        eligible = eligible_here(self.config, device)
        job = dataclasses.replace(self.of(model), config=eligible.config, hardware=eligible.hardware, resolved=eligible)
        with self._planning(f"planning {type(model).__name__} for {device.type}"):
            return make_plan(job, inputs)

    def loosened_plan(self, model: nn.Module, largest: Inputs, plan: Plan) -> tuple[Plan, StepTrace] | None:
        """What this plan may leave undone for smaller batches, and the plain step with them; None if nothing."""
        try:
            with self._planning(f"planning {type(model).__name__} for a shape"):
                job = self.of(model)
                planner = Planner(job, largest, OptimizerCosts(job))
                looser = None if planner.profile.deciding_inputs else loosened(planner, plan, self.eligible)
        except StaticProfileError as error:  # a size that the model does not take, though smaller ones do
            logger.debug("no plan for this shape: %s", str(error))
            return None
        return None if looser is None else (looser, planner.profile.plain)

    def counted_plan(self, model: nn.Module, inputs: Inputs, plan: Plan) -> Plan | None:
        """The plan with its numbers as the job stands now; None where that cannot be rehearsed."""
        try:
            with self._planning(f"counting what {type(model).__name__} takes"):
                return counted_for(Planner(self.of(model), inputs), plan, self.eligible)
        except StaticProfileError as error:
            logger.debug("gradients of earlier batches are not counted: %s", str(error))
            return None

    def shown_steps(
        self, model: nn.Module, inputs: Inputs, plan: Plan
    ) -> tuple[StepMemory, StepMemory, StepTimes, PeakAgainstTime]:
        """A plain step and one under this plan, with this batch, and what there would be instead, for a report."""
        with self._planning():
            job = self.of(model)
            planner = Planner(job.under(job.eligible.travel_of(plan).said_in(self.config)), inputs)
            strategy = choose_strategy(planner.job.eligible, planner.profile)
            return *shown_steps(planner, plan), planner.peak_against_time(strategy, plan)

    def rehearsed_plain(self, model: nn.Module, inputs: Inputs) -> StepTrace:
        """The step without techniques, with this batch."""
        with self._planning():
            device, static = torch.device(self.hardware.device_type), self.config.use_static_profiling
            shards = self.ranks.num_shards
            return open_rehearsal(
                model, inputs, device, static=static, holds_gradients=self.holds, num_shards=shards, loop=self.loop
            )[1]
