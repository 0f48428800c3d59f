"""Planning one model's step, with tensors that travel in one way: plans are decided and rehearsed.

    way = OneWay(job, inputs, travel)
    plan = way.decide_and_rehearse(strategy)    # `plan.fits` says whether there is one
    way.profile                                 # what was seen so far

What a plan is decided by is in `trials.py`: the techniques that were tried, and what each showed.
What a technique does to the peak and to the time depends on how tensors travel (`_decide/travel.py`). Here nothing is
known of other ways: `Planner` looks at all that a strategy leaves open, and owns one of these for each.

This is where the stages meet: profile, decide, execute on the stage; only frozen data crosses between them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from memscale._config import Config
from memscale._decide import confirmed, decide_on, peak_against_time
from memscale._decide.allocator import MIN_BLOCK_BYTES, SEGMENT_ROUNDING_BYTES
from memscale._decide.allocator.settings import AllocatorSettings
from memscale._decide.budget import Held, needed_bytes
from memscale._decide.choice import Choice, Outcome, choice_of
from memscale._decide.eligible import Eligible
from memscale._decide.other_buckets import redecided
from memscale._decide.policy import Strategy
from memscale._decide.search import Candidate
from memscale._decide.travel import Travel
from memscale._decide.write_plan import taken_elsewhere
from memscale._errors import quoted
from memscale._execute.reserving import points_of
from memscale._hardware.allocator_environment import may_switch
from memscale._plan import (
    Action,
    AllocatorUse,
    Plan,
    Reason,
)
from memscale._planning.admission import Admission
from memscale._planning.job import Job
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale._planning.reserved.allocation_log import AllocationLog
from memscale._planning.reserved.allocations import (
    Reserved,
    Start,
    allocator_settings,
    reserved_of,
    settings_before_plans,
)
from memscale._planning.reserved.beginning import Beginning, beginning_of
from memscale._planning.reserved.found_memory import FoundMemory, find_memory, find_placed, find_workspaces
from memscale._planning.reserved.least_reserved import as_little, growing, least_reserved
from memscale._planning.reserved.recording import (
    Shortcuts,
    UnderPlan,
    highest_of,
    record_steps,
    rehearse_lengthened,
)
from memscale._planning.reserved.shared_out import knows_shares
from memscale._planning.stage import Stage
from memscale._planning.taught import Taught
from memscale._planning.trials import Trials
from memscale._profile import KEEP, StateShare, StepTrace, TraceKey
from memscale._profile.inputs import Inputs
from memscale._profile.layers import compiled_parts
from memscale._profile.shallow import (
    KEPT,
    Cut,
    find_runs_under,
    rehearse_short,
    short_actions,
)
from memscale._progress import stage
from memscale._torch import private
from memscale._units import MIB, round_up
from memscale.report.explain import words_of_actions
from memscale.report.peak_against_time import PeakAgainstTime
from memscale.techniques import planned_step, settling_steps, technique_of
from memscale.techniques.offload.optimizer.buckets import values_here
from memscale.techniques.offload.parameters import streaming

logger = logging.getLogger("memscale")

_MAX_REHEARSALS = 4
_MAX_REFINEMENTS = 2
"""How many faster plans are tried where one fits that leaves room."""
_WORTH_REFINING = 0.02
"""The share of the budget that a plan must leave, or no faster ones are tried."""
_WORTH_ASKING = 0.02
"""The share of the reserved bytes that must be saved, or the allocator is left as it is."""
_MARGIN = 0.015
"""What is added to reserved bytes that releases bring down. Little is left unused then, so that it shows in which order
kernels allocate in backward, which is not known of all: on the emulated card up to 1.2 % more was reserved."""
ASKED = "the lowest peak that the mode allows, which fits with what is asked of the allocator"


class OneWay(Trials):
    """Plans for one model's step on one hardware, by one way of travelling, decided by what was tried and rehearsed."""

    def __init__(
        self,
        job: Job,
        inputs: Inputs,
        travel: Travel,
        costs: OptimizerCosts | None = None,
        stage: Stage | None = None,
    ) -> None:
        """The arguments are those of `Trials`."""
        super().__init__(job, inputs, travel, costs, stage)
        self._leaner_by: dict[Hashable, Held] = {}
        self.taught = Taught(0)
        """What the rehearsals of the last decision have taught."""
        self._last_log: tuple[Hashable, AllocationLog] = (None, AllocationLog())
        """The last log, and of whose steps it is. A log is large, so only one is kept."""

    def peak_against_time(self, strategy: Strategy, plan: Plan) -> PeakAgainstTime:
        """Everything that the strategy allows, also what the plan did not need."""
        self.look_into_everything(strategy.eligible)
        return peak_against_time(self.cost_model(), strategy.eligible.by(self.travel), plan)

    # ---- what is tried, and when

    def look_into_everything(self, eligible: Eligible) -> None:
        """Try all that is eligible, whether the budget needs it or not."""
        eligible = eligible.by(self.travel)
        for level in self.levels(eligible):
            level(eligible)

    def levels(self, eligible: Eligible) -> list[Callable[[Eligible], None]]:
        """What is dear to find out, or not exact, is looked into only when nothing else is left."""
        levels: list[Callable[[Eligible], None]] = [self._try_simple]
        if any(technique.is_dear for technique in eligible.techniques):
            levels.append(self._try_dear)
        if not all(technique.is_exact for technique in eligible.techniques):
            levels.append(self._try_lossy)
            if any(eligible.must_use(technique) and not technique.is_exact for technique in eligible.techniques):
                levels.insert(0, self._try_lossy)  # what is tiled inside comes after it, and then in 16 bits, too
        return levels

    def _try_simple(self, eligible: Eligible) -> None:
        """Treatments of blocks, and what else is exact and soon found out."""
        self.try_variants({TraceKey(treatment): a for treatment, a in self.treatments(eligible).items()}, eligible)
        self._rehearse(eligible, is_exact=True, is_dear=False)

    def _try_dear(self, eligible: Eligible) -> None:
        self._rehearse(eligible, is_exact=True, is_dear=True)

    def _try_lossy(self, eligible: Eligible) -> None:
        """All that was tried so far, in 16 bits; and optimizer state in 8."""
        self._try_simple(eligible)
        self._rehearse(eligible, is_exact=False, is_dear=False)
        if self.skipped_inside:
            self._try_dear(eligible)  # where it did not help, it may in 16 bits
            self._rehearse(eligible, is_exact=False, is_dear=False)

    def _rehearse(self, eligible: Eligible, *, is_exact: bool, is_dear: bool) -> None:
        """What eligible techniques of this kind want to be tried."""
        for technique in eligible.techniques:
            if technique.rehearse is not None and (technique.is_exact, technique.is_dear) == (is_exact, is_dear):
                technique.rehearse(self, eligible)

    # ---- deciding

    def decide_and_rehearse(self, strategy: Strategy, beating: Plan | None = None, like: OneWay | None = None) -> Plan:
        """Decide, and decide again with what the rehearsal taught, until the plan fits or cannot.

        What rehearsals have taught of another way that is `like` this one is not found out again. Where no plan is
        expected to fit that is faster than the one to be `beating`, that one is returned.
        """
        taught = Taught(self.first_reserve(strategy.eligible)) if like is None else like.taught.as_it_began()
        self.taught = taught
        while taught.num_tried <= _MAX_REHEARSALS:
            decided = self._decide(strategy, taught)
            if beating is not None and not self._beats(decided, beating):
                return beating
            choice = choice_of(decided.actions, self.profile)
            is_known = choice in taught.plans
            plan = taught.plans[choice] if is_known else self.confirm(decided, strategy.eligible)
            if plan.fits or not decided.fits:
                break
            taught.by(choice, plan, decided, is_last=is_known or taught.num_tried + 2 > _MAX_REHEARSALS)
        if plan.fits and taught.has_margins:
            self._hold(plan)
        return plan if plan.fits else self._with_less_reserved(plan, strategy.eligible)

    def _decide(self, strategy: Strategy, taught: Taught) -> Plan:
        with stage("deciding what is done to which block"):
            return decide_on(self.cost_model(), strategy.eligible, strategy.source, **taught.lessons())

    def _hold(self, plan: Plan) -> None:
        """Expect of plans like this one that they hold as much above what is live as it does."""
        if plan.predicted_reserved_bytes is not None:
            above_bytes = plan.predicted_reserved_bytes - plan.predicted_peak_bytes
            self.taught.hold(choice_of(plan.actions, self.profile), above_bytes)

    def refined(self, plan: Plan, strategy: Strategy) -> Plan:
        """A faster plan than the one that fits, where there is one that holds as much above what is live as this does.

        Plans that were rehearsed before did not fit, and what they held was asked of all others: of this one, which
        holds less, and of those like it.
        """
        tried, taught = plan, self.taught
        for _ in range(_MAX_REFINEMENTS if taught.has_margins else 0):
            has_room = needed_bytes(plan) <= plan.budget_bytes * (1 - _WORTH_REFINING)
            if tried.predicted_reserved_bytes is None or not has_room:
                break
            decided = self._decide(strategy, taught)
            if not decided.fits or not self._beats(decided, plan):
                break
            tried = self.confirm(decided, strategy.eligible)
            self._hold(tried)
            if tried.fits:
                plan = tried
            else:
                taught.plans[choice_of(tried.actions, self.profile)] = tried
        return plan

    def _beats(self, decided: Plan, plan: Plan) -> bool:
        """Whether it is faster, and exact if the other is."""
        is_exact, other = (choice_of(one.actions, self.profile).run.is_exact for one in (decided, plan))
        return is_exact >= other and decided.predicted_slowdown < plan.predicted_slowdown

    def _with_less_reserved(self, plan: Plan, eligible: Eligible, like: AllocatorUse | None = None) -> Plan:
        """The last resort: releases take time that no model knows, so a plan that needs none is preferred.

        `like`: what a plan asks for that is nearly this one. Where that suffices here, too, nothing else is looked for.
        """
        live = Outcome(plan.predicted_peak_bytes, 0.0, plan.host_bytes, plan.movable_bytes)
        if not plan.actions or plan.predicted_reserved_bytes is None or not eligible.budget.admits(live):
            return plan
        held = self.held(plan.actions, eligible.config)
        assert held is not None, "the plan has its numbers"
        leaner = held if like is None else self._as_little(held, like, plan.actions, eligible)
        if like is None or not eligible.has_room_for(leaner):
            leaner = self._leaner(held, plan.actions, eligible)
        if not eligible.has_room_for(leaner):
            return leaner.written_in(plan)
        return leaner.written_in(dataclasses.replace(plan, fits=True, summary=Reason(ASKED, plan.summary.numbers)))

    def in_these_buckets(self, plan: Plan, eligible: Eligible) -> Plan | None:
        """What the plan of another way does, in the buckets of this one; None where it is not worth a rehearsal."""
        decided = redecided(self.cost_model(), eligible, plan)
        if decided is None:
            return None
        found = self.confirm(decided, eligible)
        is_last_resort = plan.summary.rule == ASKED and not found.fits
        return self._with_less_reserved(found, eligible, plan.allocator) if is_last_resort else found

    def confirm(self, plan: Plan, eligible: Eligible) -> Plan:
        """The number holds: run this very plan on the stage, and promise what that shows."""
        if not plan.actions:
            return self._confirm_plain(plan, eligible)
        choice = choice_of(plan.actions, self.profile)
        if choice.run.quantizes_optimizer:
            self.cost_in_8_bits()
        admission = self._admission(choice, plan, eligible)
        trace = self._rehearsed(plan.actions, eligible.config)
        peak_bytes, fits = admission.peak_bytes(trace), admission.admits(trace)
        held = self.held(plan.actions, eligible.config)  # of what is too high as well: it says how much others hold
        if held is not None and fits:
            held = self._asking(held, plan.actions, eligible)
            fits = eligible.has_room_for(held)
        elif held is not None:
            held = self._leaner(held, plan.actions, eligible, releases=False)
        plan = dataclasses.replace(plan, host_bytes=admission.host_bytes, movable_bytes=admission.movable_bytes)
        return confirmed(plan, peak_bytes, fits=fits, held=held)

    def _confirm_plain(self, plan: Plan, eligible: Eligible) -> Plan:
        """Its live bytes were confirmed by the profile, which was such a run."""
        held = self.held((), eligible.config) if plan.predicted_peak_bytes <= eligible.budget.device_bytes else None
        if held is None:
            return dataclasses.replace(plan, rehearsed=True)
        return confirmed(plan, plan.predicted_peak_bytes, fits=eligible.has_room_for(held), held=held)

    # ---- what the allocator holds

    def held(self, actions: tuple[Action, ...], config: Config) -> Held | None:
        """What the model of the caching allocator holds, fed with whole steps; None where there is none, or where
        the steps cannot be recorded."""
        if not self._has_log:
            return None
        key = self.key_of(actions)
        if key not in self.stage.held:
            self._record_held(key, actions, config)
        return self.stage.held[key]

    @property
    def _has_log(self) -> bool:
        """Whether there is an allocator whose model can be fed; for sharded models see `SharedOut`."""
        return self.hardware.has_caching_allocator and (self._is_whole or knows_shares(self.rehearsal))

    @property
    def _is_whole(self) -> bool:
        """Each rank has all of the model."""
        return self.rehearsal.sharding is None

    def _asking(self, held: Held, actions: tuple[Action, ...], eligible: Eligible) -> Held:
        """What is held with what a plan may ask of the allocator before it is given up for another."""
        if not self._is_whole:
            return held  # ranks ask the allocator for nothing
        if eligible.config.force_optimize:
            return self._leaner(held, actions, eligible)
        return held if eligible.has_room_for(held) else self._leaner(held, actions, eligible, releases=False)

    def _leaner(self, held: Held, actions: tuple[Action, ...], eligible: Eligible, *, releases: bool = True) -> Held:
        """What is held with what can be asked, if that saves something; without `releases`, with what takes no time."""
        key = self.key_of(actions), releases
        if not releases and not self._may_switch:
            return held
        if key not in self._leaner_by:
            log = self._log_of(actions, eligible.config)
            self._leaner_by[key] = self._find_leaner(log, held, eligible, releases=releases)
        leaner = self._leaner_by[key]
        return leaner if leaner.reserved_bytes < held.reserved_bytes * (1 - _WORTH_ASKING) else held

    def _log_of(self, actions: tuple[Action, ...], config: Config) -> AllocationLog:
        """The log of steps with these actions, which is still there where it is the last one."""
        key, log = self._last_log
        return log if key == self.key_of(actions) else self.steps(actions, config)

    def _as_little(self, held: Held, like: AllocatorUse, actions: tuple[Action, ...], eligible: Eligible) -> Held:
        """What is held with what a plan asks for that is nearly this one."""
        log = self._log_of(actions, eligible.config)
        with stage("playing the caching allocator, with what is asked of it already"):
            workspace_bytes = self.hardware.workspace_bytes
            use, found = as_little(log, self.allocator, like, workspace_bytes=workspace_bytes, start=self._start)
        has_room = use.compacted_bytes <= self._most_moved_bytes(eligible)
        return self._held_asking(held, use, found) if has_room else held

    @property
    def _may_switch(self) -> bool:
        """Whether segments may be made to grow page by page."""
        return may_switch() or not self.hardware.present

    def _most_moved_bytes(self, eligible: Eligible) -> int:
        """How much of what stays on the device may visit the host at once: half of what offloading may use there. None
        while a step is under way, whose graph holds weights where they are."""
        return 0 if isinstance(self._start, FoundMemory) else eligible.budget.host_bytes // 2

    def _find_leaner(self, log: AllocationLog, held: Held, eligible: Eligible, *, releases: bool) -> Held:
        workspace_bytes = self.hardware.workspace_bytes
        with stage("playing the caching allocator, with what a plan may ask of it"):
            if releases:
                use, found = least_reserved(
                    log,
                    self.allocator,
                    may_switch=self._may_switch,
                    workspace_bytes=workspace_bytes,
                    most_moved_bytes=self._most_moved_bytes(eligible),
                    start=self._start,
                )
            else:
                use, found = growing(log, self.allocator, workspace_bytes=workspace_bytes, start=self._start)
        return self._held_asking(held, use, found)

    def _held_asking(self, held: Held, use: AllocatorUse, found: Reserved) -> Held:
        """What is held where this is asked of the allocator, instead of what is held otherwise."""
        use = dataclasses.replace(use, otherwise_reserved_bytes=held.reserved_bytes)
        reserved_bytes = round_up(int(found.reserved_peak_bytes * (1 + _MARGIN)), MIB)
        return self._held_on(found.allocated_peak_bytes, reserved_bytes, use)

    def _held_on(self, allocated_bytes: int, reserved_bytes: int, use: AllocatorUse | None = None) -> Held:
        """What is held with buckets of ranks that train together and what the loop holds, all there before a step."""
        others = [*self.job.ranks.bucket_sizes(), self.job.loop.other_bytes]
        allocated_bytes += sum(round_up(size, MIN_BLOCK_BYTES) for size in others)
        reserved_bytes += sum(round_up(size, SEGMENT_ROUNDING_BYTES) for size in others)
        return Held.on(self.hardware, allocated_bytes, reserved_bytes, use)

    def _record_held(self, key: Hashable, actions: tuple[Action, ...], config: Config) -> None:
        """Find what is held."""
        try:
            with stage(f"recording what is allocated in steps with {words_of_actions(actions)}"):
                log = self.steps(actions, config)
        except Exception as error:  # a third party's optimizer on fake tensors, or one of bitsandbytes
            logger.debug("what is reserved is not predicted: %s", quoted(error), exc_info=True)
            self.stage.held[key] = None
            return
        if self._is_whole:
            self.stage.rehearsed.setdefault(key, highest_of(log.levels))
        self._last_log = key, log
        with stage("playing the caching allocator"):
            workspace_bytes = self.hardware.workspace_bytes
            found = reserved_of(log, self.allocator, workspace_bytes=workspace_bytes, start=self._start)
        self.stage.held[key] = self._held_on(found.allocated_peak_bytes, found.reserved_peak_bytes)

    def steps(
        self,
        actions: tuple[Action, ...],
        config: Config,
        *,
        names_modules: bool = False,
    ) -> AllocationLog:
        """The allocations of whole steps under these actions, in order, with the moments at which memory could be given
        back."""
        log = None if names_modules else self._steps_short(actions, config)
        return log or self._record(actions, config, names_modules=names_modules)

    def _steps_short(self, actions: tuple[Action, ...], config: Config) -> AllocationLog | None:
        """Recorded on a shorter model, and lengthened; None where that is not the same."""
        cuts = self._cuts(actions)
        if not cuts:
            return None
        here = short_actions(actions, self.rehearsal.blocks, cuts)
        try:
            return self._record(actions, config, here, cuts=cuts)
        except Exception as error:
            logger.debug("steps are not recorded at a fraction of the depth: %s", quoted(error))
            return None

    def _record(
        self,
        actions: tuple[Action, ...],
        config: Config,
        attached: tuple[Action, ...] | None = None,
        *,
        names_modules: bool = False,
        cuts: Sequence[Cut] = (),
    ) -> AllocationLog:
        attached = actions if attached is None else attached
        of_passes = tuple(map(_in_passes, (action for action in actions if not technique_of(action).only_steps)))
        beside = streaming.rest_of(self.rehearsal.model, self.rehearsal.blocks)
        step = planned_step(actions)
        rules = self.costs.rules(step, window_bytes=self.travel.transfers.window_bytes)
        # Passes know nothing of the optimizer's step, nor of the buckets in which its state travels.
        travel = self.travel.in_buckets_of(0)
        asked_at = frozenset(fqn for fqn, _ in (*step.early, *step.late)) - self.rehearsal.blocks.keys()
        key = (travel, self.key_of(of_passes), rules is None, asked_at, bool(actions), names_modules, tuple(cuts))
        return record_steps(
            self.rehearsal,
            self.model,
            self.job.optimizer,
            under=UnderPlan(
                attach=self.attacher(attached, config) if actions else None,
                rules=rules,
                points=points_of(beside) if actions else (),
                blocks=self.rehearsal.blocks if actions and not compiled_parts(self.model) else (),
                learns=self._learns(actions),
                early=planned_step(attached).early,
                late=planned_step(attached).late,
            ),
            # Passes know nothing of what waits between steps, nor of shares.
            shortcuts=Shortcuts(
                cuts=cuts, known=self.stage.known_steps, passes=self.stage.passes(key) if self._is_whole else None
            ),
            hardware=self.hardware,
            names_modules=names_modules,
            beginning=self._beginning,
        )

    @functools.cached_property
    def _beginning(self) -> Beginning:
        return beginning_of(self.model, self.inputs, self.hardware)

    def _learns(self, actions: tuple[Action, ...]) -> bool:
        """Whether the second step may differ from the first."""
        return self.travel.overlaps and settling_steps(actions) > 1

    def _cuts(self, actions: tuple[Action, ...]) -> list[Cut]:
        """Blocks without which the step shows the same; what is collected to be stepped together goes across blocks.

        Where the loop keeps outputs, steps are rehearsed whole: what it keeps is no part of a shortened record.
        """
        keeps_outputs = bool(self.rehearsal.loop.outputs)
        if self.shallow is None or keeps_outputs or any(technique_of(action).changes_loop for action in actions):
            return []
        choice = choice_of(actions, self.profile)
        num_kept_of = functools.partial(self._num_kept, choice)
        return find_runs_under(self.rehearsal, actions, num_kept_of)

    def _num_kept(self, choice: Choice, module_fqn: str) -> int:
        """How many blocks like this one, treated alike, come to pass before one is as the next.

        What overlaps is bounded by bytes: so many as fill these, and those that come ahead. What else is on its way
        when the first of them comes only fills the room sooner, and blocks that send nothing leave it as it is.
        """
        treatment, transfers = dict(choice.blocks).get(module_fqn, KEEP), self.travel.transfers
        waits = choice.run.waiting_gradients if not treatment.streams else 0.0
        if not self.travel.overlaps or not (treatment.streams or treatment.offloads or waits):
            return KEPT
        least_bytes = most_bytes = max(transfers.window_bytes, transfers.prefetch_bytes)
        if treatment.streams:
            sizes = (layer.param_bytes for layer in self.profile.layers if layer.module_fqn == module_fqn)
            least_bytes = min(least_bytes, *sizes)
        if treatment.offloads:
            trace = self.profile.variants.get(TraceKey(treatment), self.profile.plain)
            forward = (s for s in trace.segments if (s.phase, s.module_fqn) == ("forward", module_fqn))
            least_bytes = min(least_bytes, sum(segment.sent_bytes for segment in forward))
        if waits:
            trained = (layer.trainable_bytes for layer in self.profile.layers if layer.module_fqn == module_fqn)
            least_bytes = min(least_bytes, *(int(waits * num_bytes) for num_bytes in trained))
        least_bytes //= 1 if choice.run.is_exact else 2  # in 16 bits half as much travels
        return KEPT - 1 + transfers.prefetch_depth + -(-most_bytes // max(1, least_bytes))

    @functools.cached_property
    def allocator(self) -> AllocatorSettings:
        """The settings of this process; a card elsewhere is taken to have PyTorch's defaults."""
        return allocator_settings() if self.hardware.present else AllocatorSettings()

    @functools.cached_property
    def _start(self) -> Start:
        """What steps begin with: memory as it is where a step has begun; else which weights were placed under other
        settings, or may have been (NOTE [two starts] in allocations.py), or what workspaces keep."""
        if not self.hardware.present or not self._is_whole:
            return None
        found, device_type = None, self.hardware.device_type
        if self.rehearsal.holds_gradients and not self.rehearsal.leaves_gradients and not self._has_state:
            found = find_memory(self.model, self.inputs, device_type)
        before = settings_before_plans()
        if found is None and before is None:
            return find_workspaces(self.model, self.inputs, device_type, self.hardware.workspace_bytes)
        if found is not None or before is None or before.expandable_segments == self.allocator.expandable_segments:
            return found or before
        return find_placed(before, self.model, self.inputs, device_type) or before

    @property
    def _has_state(self) -> bool:
        """Whether the optimizer has made its state: the log makes it again, and does not know where it lies."""
        return not isinstance(self.job.optimizer, str) and any(map(values_here, self.job.optimizer.state.values()))

    def first_reserve(self, eligible: Eligible) -> int:
        """What is expected to be held above what is live: that of the plain step, where that could be left alone."""
        if not self.hardware.has_caching_allocator:
            return 0
        least_bytes = 2 * self.hardware.workspace_bytes
        baseline_bytes = self.cost_model().evaluate(Choice()).peak_bytes
        if eligible.config.force_optimize or baseline_bytes + least_bytes > eligible.budget.device_bytes:
            return least_bytes
        held = self.held((), eligible.config)
        return least_bytes if held is None else max(least_bytes, held.reserved_bytes - baseline_bytes)

    def trace_of(self, actions: tuple[Action, ...], config: Config) -> StepTrace:
        """A step with these actions, layer by layer; without any, the plain one. Confirming a plan takes less."""
        if not actions:
            return self.profile.plain
        num_steps = settling_steps(actions) if self.travel.overlaps else 1
        return self.rehearsal.run(self.attacher(actions, config), num_steps=num_steps)

    def _rehearsed(self, actions: tuple[Action, ...], config: Config) -> StepTrace:
        key, known = self.key_of(actions), self.stage.rehearsed
        if key not in known and self._has_log and key not in self.stage.held:
            self._record_held(key, actions, config)  # recorded steps show what is live, too
        if key not in known:
            num_steps = settling_steps(actions) if self.travel.overlaps else 1
            with stage(f"rehearsing steps with {words_of_actions(actions)}"):
                trace = self._rehearsed_short(actions, config, num_steps)
                trace = trace or self.rehearsal.run(self.attacher(actions, config), num_steps=num_steps)
                step = planned_step(actions)
                known[key] = trace.raised_by(max(step.early_bytes, step.late_bytes))
        return known[key]

    def _rehearsed_short(self, actions: tuple[Action, ...], config: Config, num_steps: int) -> StepTrace | None:
        """On a shorter model where that shows the same."""
        cuts = self._cuts(actions)
        if num_steps == 1 or not cuts:
            return rehearse_short(self.rehearsal, actions, cuts, lambda here: self.attacher(here, config))
        attach = self.attacher(short_actions(actions, self.rehearsal.blocks, cuts), config)
        try:
            return rehearse_lengthened(self.rehearsal, attach, cuts, num_steps)
        except Exception as error:
            logger.debug("the plan is not rehearsed at a fraction of the depth: %s", quoted(error))
            return None

    def _admission(self, choice: Choice, plan: Plan, eligible: Eligible) -> Admission:
        """What a rehearsed step of this plan is held against, with the optimizer over what is not streamed."""
        step = planned_step(plan.actions)
        blocks = tuple(fqn for fqn, treatment in choice.blocks if treatment.streams)
        streamed = self.streamable((*blocks, *(self.profile.rest if choice.run.streams_rest else ())))
        in_8_bits = choice.run.quantizes_optimizer and self.profile.eight_bit_optimizer is not None
        optimizer = self.costs.cost(
            eight_bit=in_8_bits,
            without=streamed,
            guests=choice.run.steps_on_device,
            resident_share=step.resident_share if step.moves else None,
        )
        storages = [p.untyped_storage() for p in self.model.parameters() if id(p) in streamed]
        sizes = {private.storage_key(storage): storage.nbytes() for storage in storages}
        num_bytes = sum(round_up(size, self.rehearsal.rounding_bytes) for size in sizes.values())
        waiting = self._waiting(choice, plan, optimizer.share(step.resident_share), eligible)
        return Admission(self.cost_model(), choice, optimizer, num_bytes, eligible.budget, *waiting)

    def _waiting(self, choice: Choice, plan: Plan, staying: StateShare | None, eligible: Eligible) -> tuple[int, int]:
        """What waits on the host, and there or on the disk. The model does not know which buckets of the optimizer's
        state stay on the device where some parameters are streamed; this does."""
        if staying is None:
            return plan.host_bytes, plan.movable_bytes
        model = self.cost_model()
        outcome = Outcome(plan.predicted_peak_bytes, 0.0, *model.waiting_beside(choice, staying.state_bytes))
        return taken_elsewhere(model, eligible, Candidate(choice, outcome))


def _in_passes(action: Action) -> Action:
    """Equal for actions that do the same in forward and backward."""
    named: Any = action
    found: Action = dataclasses.replace(named, bucket_bytes=1) if technique_of(action).buckets_only_step else action
    return found
