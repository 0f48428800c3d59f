"""Plans that follow the batches: made at the first training forward, and made again when a step may need more.

NOTE [joint forwards]: a forward that comes while an earlier one awaits its backward follows the plan that is in force,
also where that was made for less. From the next step on every batch is planned for as if it were as large as the
largest of such a step, so that one plan holds for all of them.

Ranks that train together agree on their first plan (`together.py`).
"""

from __future__ import annotations

import collections
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from memscale._decide.budget import full_budget
from memscale._errors import DoesNotFitError, StaticProfileError
from memscale._execute.executor import Executor
from memscale._execute.reserving import empty_cache
from memscale._hardware import Hardware
from memscale._plan import Plan
from memscale._planning.job import Job
from memscale._planning.loop.deciding_values import DecidingValues
from memscale._planning.loop.demand import Demand, read_demand
from memscale._planning.loop.held_gradients import GradientWatch, held_bytes
from memscale._planning.loop.known_plans import Known, KnownPlans
from memscale._planning.loop.loop_watch import Found, LoopWatch, words_of_loop
from memscale._planning.loop.observed_steps import ObservedSteps
from memscale._planning.loop.open_passes import OpenPasses
from memscale._planning.loop.shapes import bucket_below, largest_that_fits, misfit_of, shape_text
from memscale._planning.loop.standing_job import StandingJob
from memscale._planning.loop.step_watch import Excess, StepWatch
from memscale._planning.loop.uncalled import UncalledWatch
from memscale._planning.other_peaks import warn_of_other_peaks
from memscale._planning.saved import plan_cache
from memscale._planning.together import (
    Meeting,
    Need,
    NobodyCameError,
    Specs,
    enlarged,
    largest_of,
    meets,
    plan_in,
)
from memscale._profile import Profile
from memscale._profile.inputs import Inputs
from memscale._profile.ranks import ALONE, Group, find_group, refuse_flat_parameters
from memscale._torch import private
from memscale._torch.overrides import OwnHook, is_redirected, refuse_compiler
from memscale._units import show_bytes
from memscale.report import console

logger = logging.getLogger("memscale")

Report = Callable[[Executor, Plan, Hardware], None]
"""A function that is called after every plan."""
_TIMES_SEEN = 2
"""Shapes that are smaller than what was planned for get a plan of their own when they come so often."""
_MAX_EXCEEDED = 2
"""How often steps are observed anew because one exceeded the budget."""


class Replanner(OwnHook):
    """A forward pre-hook: plans at the first training forward, and again when a forward comes that no plan covers (a
    larger dimension, other trained parameters, another device), or one that begins with gradients which the plan does
    not count and for which it leaves no room. A model that cannot be rehearsed is observed in its first steps, and so
    is one of which a step took more than its plan had promised."""

    def __init__(
        self, executor: Executor, job: Job, reporter: Report | None = None, replica: nn.Module | None = None
    ) -> None:
        """`replica`: the DDP around the model, where it was there before."""
        self.executor = executor
        self._replica = None if replica is None else weakref.ref(replica)
        self._has_met = False
        """The other ranks. See NOTE [no collective] in `together.py`."""
        self.job = StandingJob(executor, job)
        self.reporter = reporter
        self._known = KnownPlans()
        self._observed: ObservedSteps | None = None
        """While a model that cannot be rehearsed shows what it needs."""
        self._needs_observation = False
        self._deciding = DecidingValues()
        self._watch = StepWatch(executor.model)
        self._loop_watch = LoopWatch(executor.model)
        self._num_seen: collections.Counter[Any] = collections.Counter()
        """How often batches of each bucket came that have no plan of their own. See NOTE [plans by shape]."""
        self._excess: Excess | None = None
        """What is known of a step that has ended, until the next one begins."""
        self._num_exceeded = 0
        """Steps above the budget."""
        self._uncalled = UncalledWatch(executor)
        self._passes = OpenPasses(executor.model)
        self._joint: Specs | None = None
        """The largest sizes of batches that shared a step with others. See NOTE [joint forwards]."""
        self._has_warned = False
        self.is_repeating = False
        """A forward is run again inside its backward: its plan is in force, and gradients that are there are its."""
        self._gradients = GradientWatch("backward" if job.holds_gradients else "none")
        self._ignores_held = False
        """No plan that counts gradients of earlier batches fits."""
        self._not_evaluated: list[Demand] = []
        """What came in evaluation mode with gradients, and could not be planned for."""
        executor.on_detach(self._stop_observing)
        executor.on_detach(self._passes.stop)
        executor.on_detach(self._watch.stop)
        executor.on_detach(self._loop_watch.stop)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            if model.training and torch.is_grad_enabled():
                refuse_compiler(type(model).__name__)
            return
        if self.job.is_planning or self.is_repeating or is_redirected(model):
            return
        if private.graph_task_id() >= 0 and self.executor.plan is not None:
            return  # a checkpoint around the whole model computes it again, and must do what its forward did
        if torch.is_grad_enabled():
            self._uncalled.stop()
        self._follow_move()
        if model.training and torch.is_grad_enabled() and self._passes.are_open and self.executor.plan is not None:
            self._stay(model, Inputs(args, kwargs))
            return
        self._excess = self._watch.end() or self._excess
        if not torch.is_grad_enabled() or private.inside_functional_transform():
            return  # tensors of a transform (`torch.func.grad`) have no bytes of their own, and cannot be rehearsed
        if not model.training:
            self._prepare_evaluation(model, Inputs(args, kwargs))
            return
        self._gradients.look(model, has_stepped=self._loop_watch.has_stepped)
        if self._observed is not None and self._observed.is_under_way:
            return  # one more forward of the step that is being observed
        inputs = Inputs(args, kwargs)
        excess, self._excess = self._excess, None
        held = self._look_at_loop(model, inputs)
        if held is None and excess is not None:
            self._answer_excess(excess)
        if held is None or not self._plan_for_loop(model, inputs, held):
            self._prepare(model, inputs)
        plan = self.executor.plan
        if plan is not None and (plan.actions or plan.device_type != "cpu"):
            self._passes.follow()
        else:
            self._passes.stop()  # what a CPU computes without techniques needs no plan in its backward
        if plan is not None and not plan.provisional and self._observed is None:
            self._watch.begin(plan, inputs, self.job.device(model), counts_held=self.job.holds)
            if not self._needs_observation:
                self._loop_watch.begin()

    def _stay(self, model: nn.Module, inputs: Inputs) -> None:
        """An earlier forward awaits its backward. See NOTE [joint forwards]."""
        if self._observed is not None or self._deciding.names or private.inside_functional_transform():
            return
        demand, plan = self._demand(model, inputs), self.executor.plan
        if any(known.plan is plan and known.demand.covers(demand) for known in self._known):
            return
        joint = inputs.specs() if self._joint is None else largest_of([self._joint, inputs.specs()])
        if joint is not None and joint != self._joint:
            logger.info("this loop runs the model several times before backward: one plan will hold for all of them")
            self._joint = joint

    def _joined(self, inputs: Inputs) -> Inputs:
        """A batch as large as those that may come before its backward."""
        largest = None if self._joint is None or self._deciding.names else largest_of([self._joint, inputs.specs()])
        return inputs if largest in (None, inputs.specs()) else enlarged(inputs, largest)

    def _prepare(self, model: nn.Module, begun: Inputs) -> None:
        """Put a plan in force that holds for the training forward that begins."""
        group = find_group(model, None if self._replica is None else self._replica())
        self.job.train_with(ALONE if group is None else group.ranks)
        if group is not None and meets(group) and not self._has_met:
            self._has_met = True
            if self._plan_together(model, begun, group):
                return
        inputs = self._joined(begun)
        demand = self._demand(model, inputs)
        known = self._known.find(demand)
        if self._observed is not None:
            self._go_on_observing(model, begun, demand, is_known=known is not None)
            return
        known = known or self._look_at(model, inputs, demand)
        if known is not None and self.job.trained_by.has_changed(model):
            logger.info("the optimizer is not the one that was planned for: planning again")
            self._known, known = KnownPlans(), None
        if known is None:
            if self._known:
                logger.info("this step may need more memory than any that was planned for: planning again")
            self.plan(model, inputs, inside=True, begun=begun)
            return
        known = self._loosened(model, inputs, known)
        if known.plan is not self.executor.plan:
            self._put_in_force(known.plan, begun)
        if known.stay != self._gradients.stay and not (self._ignores_held or self.job.ranks.keeps_gradients):
            self._count_held(model, begun, known, is_largest=known.demand == demand and inputs is begun)

    def _prepare_evaluation(self, model: nn.Module, inputs: Inputs) -> None:
        """A forward in evaluation mode that records a graph holds what one of training holds, and some programs train
        in that mode. So it follows a plan for training, where there is one. What does not fit is not refused here: it
        may be an evaluation for which nobody has turned gradients off."""
        if self._observed is not None or self._needs_observation:
            return
        if find_group(model, None if self._replica is None else self._replica()) is not None:
            return  # ranks plan together, in a forward that all of them come to
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        demand = self._demand(model, inputs)
        known = self._known.find(demand)
        if known is not None:
            if known.plan is not self.executor.plan:
                self._put_in_force(known.plan, inputs)
            return
        if any(demand.covers(refused) for refused in self._not_evaluated):
            return
        try:
            self.plan(model, inputs, inside=True)
        except (DoesNotFitError, StaticProfileError) as error:
            self._not_evaluated.append(demand)
            logger.warning(
                "a forward in evaluation mode that records a graph for gradients is not planned for: %s If this is an "
                "evaluation, torch.no_grad() around it takes far less",
                str(error),
            )

    def _demand(self, model: nn.Module, inputs: Inputs) -> Demand:
        return read_demand(model, inputs, self.job.device(model), self._deciding.names, self.job.ranks)

    # ---- plans by shape

    def plan_shapes(self, model: nn.Module, samples: Sequence[Inputs], *, is_guess: bool = False) -> None:
        """Plan before the first step for all of these batches, of which the largest comes first."""
        try:
            self.plan(model, samples[0], is_guess=is_guess)
        except DoesNotFitError as error:
            if len(samples) == 1:
                raise
            found = largest_that_fits(samples, lambda sample: self._fits(model, sample))
            raise misfit_of(samples[0], found, error) from error
        if self._observed is not None:
            return  # what fake tensors cannot show is seen as the batches come
        for sample in samples[1:]:
            known = self._known.find(self._demand(model, sample))
            if known is None:
                self.plan(model, sample)
            else:
                self._loosened(model, sample, known, times_seen=1)

    def _fits(self, model: nn.Module, sample: Inputs) -> bool:
        try:
            self._rehearsed_plan(model, sample, lambda profile: None)
        except DoesNotFitError:
            return False
        return True

    def _loosened(self, model: nn.Module, inputs: Inputs, known: Known, *, times_seen: int = _TIMES_SEEN) -> Known:
        """What holds for this batch and slows it less, if its shape has come before and is well below `known`."""
        plan = known.plan
        goes_low = self.job.config.force_optimize  # as low as the mode allows, with every batch
        if not known.is_worth_loosening or goes_low or self._deciding.names:
            return known
        largest = bucket_below(inputs, known.demand)
        if largest is None:
            return known
        self._num_seen[largest.specs()] += 1
        if self._num_seen[largest.specs()] != times_seen:
            return known
        return self._loosened_plan(model, largest, plan) or known

    def _loosened_plan(self, model: nn.Module, largest: Inputs, plan: Plan) -> Known | None:
        found = self.job.loosened_plan(model, largest, plan)
        if found is None:
            return None
        looser, plain = found
        new = Known(self._demand(model, largest), looser, plain, self.job.counted)
        self._remember(new)
        logger.info(
            "batches up to %s get a plan of their own, with %d of the %d actions of the plan for larger ones",
            shape_text(largest),
            len(looser.actions),
            len(plan.actions),
        )
        return new

    # ---- gradients of earlier batches

    def _count_held(self, model: nn.Module, inputs: Inputs, known: Known, *, is_largest: bool) -> None:
        """The loop adds up gradients over several batches, or keeps them during forward: plans are to count them.

        What is done stays as it is where that fits; else it is planned again. `is_largest`: these inputs are as large
        as those that were planned for.
        """
        if not is_largest and known.is_bound:
            return
        earlier = self.job.holds_gradients, self.job.loop, self._known
        self.job.hold_until(self._gradients.stay)
        counted = self._counting(model, inputs, known, is_largest=is_largest)
        if counted.plan.fits:
            logger.info("this loop keeps gradients between batches: the plan's numbers count them from here on")
            self._promise(counted, known, inputs)
            return
        logger.info("this loop keeps gradients between batches: planning again, so that the plan counts them")
        self._known = KnownPlans()
        try:
            self.plan(model, inputs, inside=True)
        except DoesNotFitError as error:
            self.job.holds_gradients, self.job.loop, self._known = earlier
            why = f"this loop keeps gradients between batches ({show_bytes(held_bytes(model))}), for which the current"
            if not self._could_hold(counted.plan):
                misfit = DoesNotFitError(f"{why} plan has no room, and the device would run out of memory. {error}")
                misfit.batch_size = error.batch_size
                raise misfit from error
            self._ignores_held = True
            self._promise(counted, known, inputs)
            warnings.warn(
                f"{why} plan has no room, and no plan that counts them fits the budget: the peak will be above it. "
                f"{error}",
                stacklevel=2,
            )

    def _could_hold(self, plan: Plan) -> bool:
        """Whether the device has as much as the plan says, above the budget as it may be. RAM is not so strict."""
        needed_bytes = max(plan.predicted_peak_bytes, plan.predicted_allocated_bytes or 0)
        return self.job.hardware.device_type == "cpu" or needed_bytes <= self.job.hardware.free_bytes

    def _promise(self, counted: Known, known: Known, inputs: Inputs) -> None:
        """The plan that is in force, with other numbers."""
        self._known = self._known.replaced(known, counted)
        if counted.plan.allocator == known.plan.allocator:
            self.executor.plan = counted.plan
        else:
            self._put_in_force(counted.plan, inputs)
            self._begin_afresh()

    def _counting(self, model: nn.Module, inputs: Inputs, known: Known, *, is_largest: bool) -> Known:
        """What was planned for, with gradients of earlier batches in its numbers."""
        if is_largest and not self._needs_observation and known.plan.rehearsed:
            plan = self.job.counted_plan(model, inputs, known.plan)
            if plan is not None:
                return Known(known.demand, plan, known.plain, self.job.counted)
        more = 0 if known.stay == "backward" else held_bytes(model)
        return known.bounded(more)

    # ---- what the loop holds

    def _look_at_loop(self, model: nn.Module, inputs: Inputs) -> Found | None:
        plan = self.executor.plan
        if plan is None or plan.provisional or self._observed is not None or self._needs_observation:
            return None  # who observes sees it with the rest
        device, counts_all = self.job.device(model), self.job.config.memory_budget_gb is None
        return self._loop_watch.look(
            plan,
            inputs,
            device,
            self.job.seen_loop,
            counts_all=counts_all,
            workspace_bytes=self.job.hardware.workspace_bytes,
        )

    def _plan_for_loop(self, model: nn.Module, inputs: Inputs, found: Found) -> bool:
        """Count from here on what the loop holds. Plans that have room for it promise more; for others new ones are
        made when they are needed. True: one was made for this batch."""
        earlier, known = self.job.loop, self._known
        self.job.loop = self.job.seen_loop = found.loop
        self._num_seen.clear()
        self._known, in_force = known.holding(found.new_bytes, inputs, self.executor.plan)
        if in_force is not None:
            self.executor.plan = in_force
        what = words_of_loop(earlier, found.loop)
        if self._known.find(self._demand(model, inputs)) is not None:
            logger.info("this loop %s (%s): plans count it from here on", what, show_bytes(found.new_bytes))
            return False
        logger.info("this loop %s (%s): planning again, to count it", what, show_bytes(found.new_bytes))
        try:
            self.plan(model, inputs, inside=True)
        except DoesNotFitError as error:
            self.job.loop, self._known = earlier, known
            logger.warning(
                "this loop %s (%s), and no plan that counts it fits the budget: the peak may be above the predicted "
                "one by that much. %s",
                what,
                show_bytes(found.new_bytes),
                str(error),
            )
            return False
        return True

    def plan(
        self,
        model: nn.Module,
        inputs: Inputs,
        *,
        inside: bool = False,
        is_guess: bool = False,
        begun: Inputs | None = None,
    ) -> None:
        """`inside`: in the first moment of a forward, which is to follow the plan already; `begun`: with which it was
        called, where the plan is for more. `is_guess`: the inputs were derived, not given, so an error about them is no
        error of the user's."""
        refuse_flat_parameters(model)
        device = self.job.device(model)
        if inside:  # else it is being wrapped, and its hardware was looked at a moment ago
            self._turn_to(device)
        profiles: list[Profile] = []
        is_untouched = self.executor.plan is None and not self._needs_observation
        slot = plan_cache.slot_for(self.job.of(model), inputs) if is_untouched else None
        kept = None if slot is None else slot.read()
        if kept is not None:
            logger.info("the plan that was made for this before is used; MEMSCALE_CACHE=0 would plan anew")
        try:
            plan = kept or self._rehearsed_plan(model, inputs, profiles.append)
        except StaticProfileError as error:
            is_sample, is_evaluation = not inside and not is_guess, inside and not model.training
            may_observe = self.job.config.use_empirical_fallback and not is_evaluation  # which may have no backward
            if not may_observe or (is_sample and not error.needs_values):
                raise
            self._observe_instead(model, begun or inputs, error, inside=inside)
            return
        plain = None  # of a plan that was kept: it is for steps where no value of an input decides anything
        if profiles:
            plain = profiles[-1].plain
            self._deciding.add(profiles[-1].deciding_inputs)
            if slot is not None and not profiles[-1].deciding_inputs:
                slot.write(plan)
        demand = self._demand(model, inputs)
        self._remember(self._known.widened(Known(demand, plan, plain, self.job.counted)))
        self._put_in_force(plan, (begun or inputs) if inside else None)
        self._begin_afresh()
        self._announce(plan)

    def tighten(self, model: nn.Module, inputs: Inputs, budget_bytes: int, *, inside: bool) -> None:
        """Plan for this batch, and for all that come, within a smaller budget. If nothing fits, all stays as it is."""
        earlier = self.job.config, self._known
        self.job.config = self.job.config.replace(memory_budget_gb=budget_bytes / 1e9, force_optimize=False)
        self._known = KnownPlans()
        try:
            self.plan(model, inputs, inside=inside)
        except BaseException:
            self.job.config, self._known = earlier
            raise

    @property
    def is_observing(self) -> bool:
        """The plan in force is the careful one, under which steps are observed."""
        return self._observed is not None

    def _rehearsed_plan(self, model: nn.Module, inputs: Inputs, on_profile: Callable[[Profile], None]) -> Plan:
        if self._needs_observation:
            refusal = StaticProfileError(f"{type(model).__name__} could not be rehearsed before")
            refusal.needs_values = True
            raise refusal
        return self.job.rehearsed_plan(model, inputs, on_profile)

    # ---- ranks that train together

    def _plan_together(self, model: nn.Module, inputs: Inputs, group: Group) -> bool:
        """Agree with the other ranks on a plan for the largest of their batches. False: each goes on by itself."""
        self._turn_to(self.job.device(model))
        meeting = Meeting(group, type(model).__name__)
        try:
            needs = meeting.gather(Need(inputs.specs(), full_budget(self.job.hardware, self.job.config).device_bytes))
            largest = largest_of([need.specs for need in needs])
            if largest is None:
                logger.info("the batches of the ranks are of different kinds: each rank plans by itself")
                return False
            common = enlarged(inputs, largest)
            if meeting.leads(needs, largest):
                return self._lead(model, common, inputs, min(need.budget_bytes for need in needs), meeting)
            return self._follow(model, common, inputs, plan_in(meeting.read_answer()))
        except NobodyCameError as error:
            logger.warning(
                "%s to plan together: was the model wrapped on all ranks? This one plans by itself", str(error)
            )
            return False

    def _lead(self, model: nn.Module, common: Inputs, begun: Inputs, budget_bytes: int, meeting: Meeting) -> bool:
        """Plan for all, within the smallest budget, and tell them; also where no plan is found."""
        answer: dict[str, Any] = {"error": "planning failed there; its own message says why"}
        own = self.job.config
        try:
            if budget_bytes < full_budget(self.job.hardware, own).device_bytes:
                self.job.config = own.replace(memory_budget_gb=budget_bytes / 1e9)
            self.plan(model, common, inside=True, begun=begun)
            plan = self.executor.plan
            is_for_all = plan is not None and not plan.provisional and not self._deciding.names
            answer = {"plan": plan.to_json()} if plan is not None and is_for_all else {}
        except DoesNotFitError as error:
            answer = {"misfit": str(error)}
            raise
        finally:
            self.job.config = own
            meeting.answer(answer)
        return True

    def _follow(self, model: nn.Module, common: Inputs, begun: Inputs, plan: Plan | None) -> bool:
        """Do what the leader has planned. False: that was for itself alone."""
        if plan is None:
            return False
        self._remember(Known(self._demand(model, common), plan, None, self.job.counted))
        self._put_in_force(plan, begun)
        self._announce(plan)
        return True

    # ---- values that decide

    def _look_at(self, model: nn.Module, inputs: Inputs, demand: Demand) -> Known | None:
        """What holds for a batch whose values, and no dimension, go beyond those that were planned for: a plan for a
        step that goes the same way, and nowhere lower. See NOTE [values that decide]."""
        alike = self._known.of_shapes(demand)
        if not alike:
            return None
        if not self._deciding.may_look:
            if self._deciding.forget():
                self._known = self._known.without_values()
            return self._known.find(demand)
        self._deciding.begin_look(demand)
        try:
            plain = self.job.rehearsed_plain(model, inputs)
        except StaticProfileError:
            return None  # a plan for it will meet the same error, and observe the step
        wider = self._deciding.covering(plain, demand, alike)
        if wider is not None:
            self._remember(wider)
        return wider

    # ---- steps that take more than was promised

    def _answer_excess(self, excess: Excess) -> None:
        """Say so. Above the budget the next steps are observed, and planned for anew; within it the number is mended.

        Where that has not helped, because large steps come when nobody observes, the careful plan stays.
        """
        observes = excess.is_over and self.job.config.use_empirical_fallback
        what = ". The next steps are observed, and planned for anew." if observes else "; the promise is corrected"
        logger.warning("%s%s", excess.words, what)
        if observes:
            self._num_exceeded += 1
            self._needs_observation, self._known = True, KnownPlans()
        else:
            self._known = self._known.promising(excess.plan, excess.corrected)

    def _follow_move(self) -> None:
        """Whatever this forward is for: a model that was moved elsewhere while it was streamed computes there."""
        device = self.executor.moved_to
        if device is not None and self.job.config.device is None:
            self._turn_to(device)

    def _turn_to(self, device: torch.device) -> None:
        """Plan for this device: the model may have been moved since it was wrapped."""
        if self.job.turn_to(device):
            if self._known:
                logger.info("the model computes on %s now: planning again", device)
            self._known = KnownPlans()

    def _put_in_force(self, plan: Plan, inputs: Inputs | None) -> None:
        """`inputs`: of the forward that has just begun, if one has."""
        with console.progress(self.job.config.enable_logging):
            if inputs is None:
                self.executor.apply(plan)
            else:
                self.executor.apply_inside(plan, inputs.args, inputs.kwargs)

    def _begin_afresh(self) -> None:
        """Give back what the allocator has cached.

        NOTE [plans begin afresh]: what a plan reserves is predicted for steps that begin with nothing cached. Segments
        that building the model or an earlier plan left behind have other sizes, and would be held beside its own.
        """
        if self.job.hardware.has_caching_allocator:
            empty_cache()

    def _remember(self, new: Known) -> None:
        known = self._known.beside(new)
        if len(known) < len(self._known):
            self._num_seen.clear()  # what was found out about smaller shapes was about another placement
        self._known = known.with_one(new)

    def _announce(self, plan: Plan) -> None:
        if self.job.config.enable_logging:
            console.show_plan(plan)
        if self.reporter is not None:
            self.reporter(self.executor, plan, self.job.hardware)
        if not self._has_warned:
            self._has_warned = True
            warn_of_other_peaks(plan)

    # ---- models that cannot be rehearsed

    def _observe_instead(self, model: nn.Module, inputs: Inputs, error: StaticProfileError, *, inside: bool) -> None:
        if not self._needs_observation:
            logger.info("%s Its first training steps are observed, and the plan is made from them.", error)
            self._needs_observation = error.needs_values
        self._deciding.names = frozenset()  # what was seen is what counts
        self._observed = ObservedSteps(model, self.job.config, self.job.hardware, self.job.costs(model))
        if self._num_exceeded > _MAX_EXCEEDED:
            self._observed.give_up("what they showed was exceeded by later ones, above the budget")
        self._put_in_force(self._observed.careful, inputs if inside else None)
        if inside:
            self._open(model, inputs, self._demand(model, inputs))

    def _go_on_observing(self, model: nn.Module, inputs: Inputs, demand: Demand, *, is_known: bool) -> None:
        """A further training step begins: what the one before has shown is used."""
        steps = self._observed
        assert steps is not None
        if steps.has_given_up:
            return
        steps.close()
        if steps.plan is not None and not is_known:
            self.plan(model, inputs, inside=True)  # this step is another: what was seen does not tell of it
            return
        if steps.is_ready(demand):
            was_planned = steps.plan is not None
            plan = self._observed_plan(model, steps)
            if plan is not None:
                for seen in steps.demands:
                    self._remember(Known(seen, plan, None, self.job.counted))
                self._put_in_force(plan, inputs)
                self._announce(plan)
            if was_planned and (plan is None or plan.rehearsed):
                self._observed = None
                return
        self._open(model, inputs, demand)

    def _observed_plan(self, model: nn.Module, steps: ObservedSteps) -> Plan | None:
        """From what was seen; None: what is in force stays."""
        costs = self.job.costs(model)
        try:
            return steps.make_plan(model, costs) if steps.plan is None else steps.check(model, costs)
        except DoesNotFitError as error:
            if not self._num_exceeded:
                raise
            steps.give_up(f"no plan fits what was seen: {error}")
            return None

    def _open(self, model: nn.Module, inputs: Inputs, demand: Demand) -> None:
        """Observe the step that begins; one that is being traced by others is let go by."""
        assert self._observed is not None
        if private.can_take_outermost_mode() and not self._observed.has_given_up:
            self._observed.open(model, inputs, demand, self.executor.traffic)

    def _stop_observing(self) -> None:
        if self._observed is not None:
            self._observed.abandon()
            self._observed = None
