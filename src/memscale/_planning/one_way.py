"""Planning one model's step, with tensors that travel in one way: techniques are tried, plans decided and rehearsed.

    way = OneWay(job, inputs, travel)
    plan = way.decide_and_rehearse(strategy)    # `plan.fits` says whether there is one
    way.profile                                 # what was seen so far

What a technique does to the peak and to the time depends on how tensors travel (`_decide/travel.py`). Here nothing is
known of other ways: `Planner` looks at all that a strategy leaves open, and owns one of these for each.

This is where the stages meet: profile, decide, execute on the stage; only frozen data crosses between them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale._config import Config
from memscale._decide import Traits, confirmed, decide, decide_on, full_front, suspects_of
from memscale._decide.allocator import MIN_BLOCK_BYTES, SEGMENT_ROUNDING_BYTES
from memscale._decide.allocator.settings import AllocatorSettings
from memscale._decide.budget import Held, budget_bytes, full_budget
from memscale._decide.choice import Choice, Outcome, block_actions, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.policy import Strategy
from memscale._decide.travel import Travel
from memscale._errors import quoted
from memscale._execute.executor import Executor
from memscale._execute.reserving import points_of
from memscale._execute.settings import ExecutionSettings
from memscale._hardware.allocator_environment import may_switch
from memscale._plan import (
    Action,
    AllocatorUse,
    FrontPoint,
    MixedPrecision,
    Plan,
    Reason,
    StreamParameters,
)
from memscale._planning.allocation_log import AllocationLog
from memscale._planning.allocations import allocator_settings, reserved_of
from memscale._planning.job import Job
from memscale._planning.least_reserved import growing, least_reserved
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale._planning.recording import GoesOn, highest_of, record_steps, rehearse_lengthened
from memscale._planning.stage import Stage
from memscale._planning.tile_sizes import Tiles
from memscale._profile import KEEP, STREAM, Profile, StepTrace, TraceKey, Treatment
from memscale._profile.inputs import Inputs
from memscale._profile.layers import compiled_parts
from memscale._profile.profiler import profile_model, refuse_unprofilable, try_variant
from memscale._profile.rehearsal import Attach
from memscale._profile.shallow import (
    KEPT,
    Cut,
    ShallowRehearsal,
    find_runs_under,
    rehearse_short,
    short_actions,
)
from memscale._progress import stage
from memscale._torch import private
from memscale._units import MIB, round_up, show_bytes
from memscale.report.explain import words_of_actions
from memscale.techniques import TREATMENTS, planned_step, settling_steps, technique_of
from memscale.techniques.offload.parameters import streaming
from memscale.techniques.technique import PlannedStep

logger = logging.getLogger("memscale")

_MAX_REHEARSALS = 4
_WORTH_ASKING = 0.02
"""The share of the reserved bytes that must be saved, or the allocator is left as it is."""
_MARGIN = 0.015
"""What is added to reserved bytes that releases bring down. Little is left unused then, so that it shows in which order
kernels allocate in backward, which is not known of all: on the emulated card up to 1.2 % more was reserved."""
ASKED = "the lowest peak that the mode allows, which fits with what is asked of the allocator"


class OneWay:
    """One model's step on one hardware, by one way of travelling: the stage where it can be tried, and the profile of
    what was tried so far. Techniques are tried only when a plan needs them, each once."""

    def __init__(
        self,
        job: Job,
        inputs: Inputs,
        travel: Travel,
        costs: OptimizerCosts | None = None,
        stage: Stage | None = None,
    ) -> None:
        """`costs`: those of the same optimizer over the same model, and `stage`: that of the same step, where they are
        known."""
        refuse_unprofilable(job.model)
        self.job = job
        self.inputs = inputs
        self.model, self.hardware = job.model, job.hardware
        self.travel = travel
        self.costs = (costs or OptimizerCosts(job)).by(travel)
        self.stage = stage or Stage(job, inputs)
        self.rehearsal = self.stage.rehearsal
        untrained = self.rehearsal.untrained
        self.costs.leave_idle(frozenset(id(p) for name, p in job.model.named_parameters() if name in untrained))
        profile = profile_model(job.model, self.rehearsal, self.stage.plain, self.costs.cost(), inputs)
        self.profile = dataclasses.replace(
            profile, communication_bytes=job.ranks.bucket_bytes, loop_bytes=job.loop.other_bytes
        )
        self._tried: set[TraceKey] = set()
        self._exact: dict[TraceKey, tuple[Action, ...]] = {}
        self._leaner_by: dict[Hashable, Held] = {}
        self._last_log: tuple[Hashable, AllocationLog] = (None, AllocationLog())
        """The last log, and of whose steps it is. A log is large, so only one is kept."""
        self.skipped_inside = False
        self._compiled = compiled_parts(job.model)
        self._known_cost_model: CostModel | None = None

    def full_front(self, strategy: Strategy, plan: Plan) -> tuple[FrontPoint, ...]:
        """Peak against time with everything that the strategy allows, also what the plan did not need."""
        self.look_into_everything(strategy.config)
        return full_front(self.cost_model(), self.travel.said_in(strategy.config), plan)

    def look_into_everything(self, config: Config) -> None:
        """Try all that the config allows, whether the budget needs it or not."""
        config = self.travel.said_in(config)
        for level in self.levels(config):
            level(config)

    def levels(self, config: Config) -> list[Callable[[Config], None]]:
        """What is dear to find out, or not exact, is looked into only when nothing else is left."""
        eligible = resolve(config, self.hardware)
        levels: list[Callable[[Config], None]] = [self._try_simple]
        if any(technique.is_dear for technique in eligible.techniques):
            levels.append(self._try_dear)
        if not all(technique.is_exact for technique in eligible.techniques):
            levels.append(self._try_lossy)
            if any(eligible.must_use(technique) and not technique.is_exact for technique in eligible.techniques):
                levels.insert(0, self._try_lossy)  # what is tiled inside comes after it, and then in 16 bits, too
        return levels

    def decide_and_rehearse(self, strategy: Strategy) -> Plan:
        """Decide, and decide again with what the rehearsal taught, until the plan fits or cannot."""
        taught = _Taught(self.first_reserve(strategy.config))
        for attempt in range(_MAX_REHEARSALS + 1):
            with stage("deciding what is done to which block"):
                decided = decide_on(
                    self.cost_model(),
                    strategy.config,
                    strategy.source,
                    margin_bytes=taught.margin_bytes,
                    margins=taught.margins,
                    reserve_bytes=taught.reserve_bytes,
                    rehearsed=taught.needed(),
                )
            choice = choice_of(decided.actions, self.profile)
            is_known = choice in taught.plans
            plan = taught.plans[choice] if is_known else self.confirm(decided, strategy.config)
            if plan.fits or not decided.fits:
                break
            taught.by(choice, plan, decided, is_last=is_known or attempt + 2 > _MAX_REHEARSALS)
        return plan if plan.fits else self._with_less_reserved(plan, strategy.config)

    def _with_less_reserved(self, plan: Plan, config: Config) -> Plan:
        """The last resort: releases take time that no model knows, so a plan that needs none is preferred."""
        if not plan.actions or plan.predicted_reserved_bytes is None:
            return plan
        held = self.held(plan.actions, config)
        assert held is not None, "the plan has its numbers"
        leaner = self._leaner(held, plan.actions, config)
        if not leaner.fits(self.hardware, config):
            return leaner.written_in(plan)
        return leaner.written_in(dataclasses.replace(plan, fits=True, summary=Reason(ASKED, plan.summary.numbers)))

    def confirm(self, plan: Plan, config: Config) -> Plan:
        """The number holds: run this very plan on the stage, and promise what that shows."""
        if not plan.actions:
            return self._confirm_plain(plan, config)
        choice = choice_of(plan.actions, self.profile)
        if choice.run.quantizes_optimizer:
            self.cost_in_8_bits()
        peak_of, budget = self._peaks(choice, planned_step(plan.actions)), full_budget(self.hardware, config)

        def is_admitted(trace: StepTrace) -> bool:
            return budget.admits(Outcome(peak_of(trace), 0.0, plan.host_bytes, plan.movable_bytes))

        trace = self._rehearsed(plan.actions, config, is_admitted)
        peak_bytes, fits = peak_of(trace), is_admitted(trace)
        held = self.held(plan.actions, config) if fits else None
        if held is not None:
            held = self._asking(held, plan.actions, config)
            fits = held.fits(self.hardware, config)
        return confirmed(plan, peak_bytes, fits=fits, held=held)

    def _confirm_plain(self, plan: Plan, config: Config) -> Plan:
        """Its live bytes were confirmed by the profile, which was such a run."""
        held = self.held((), config) if plan.fits else None
        if held is None:
            return dataclasses.replace(plan, rehearsed=True)
        return confirmed(plan, plan.predicted_peak_bytes, fits=held.fits(self.hardware, config), held=held)

    # ---- what the allocator holds

    def held(self, actions: tuple[Action, ...], config: Config) -> Held | None:
        """What the model of the caching allocator holds, fed with whole steps; None where there is none, or where
        the steps cannot be recorded."""
        if not self._has_log:
            return None
        key = self._key(actions)
        if key not in self.stage.held:
            self._record_held(key, actions, config)
        return self.stage.held[key]

    @property
    def _has_log(self) -> bool:
        """Whether there is an allocator whose model can be fed: what gathering allocates, and when, is in no log."""
        return self.hardware.has_caching_allocator and self.rehearsal.sharding is None

    def _asking(self, held: Held, actions: tuple[Action, ...], config: Config) -> Held:
        """What is held with what a plan may ask of the allocator before it is given up for another."""
        if config.force_optimize:
            return self._leaner(held, actions, config)
        return held if held.fits(self.hardware, config) else self._leaner(held, actions, config, releases=False)

    def _leaner(self, held: Held, actions: tuple[Action, ...], config: Config, *, releases: bool = True) -> Held:
        """What is held with what can be asked, if that saves something; without `releases`, with what takes no time."""
        key = self._key(actions), releases
        if not releases and not self._may_switch:
            return held
        if key not in self._leaner_by:
            last_key, log = self._last_log
            log = log if last_key == key[0] else self.steps(actions, config)
            self._leaner_by[key] = self._find_leaner(log, held, releases=releases)
        leaner = self._leaner_by[key]
        return leaner if leaner.reserved_bytes < held.reserved_bytes * (1 - _WORTH_ASKING) else held

    @property
    def _may_switch(self) -> bool:
        """Whether segments may be made to grow page by page."""
        return may_switch() or not self.hardware.present

    def _find_leaner(self, log: AllocationLog, held: Held, *, releases: bool) -> Held:
        workspace_bytes = self.hardware.workspace_bytes
        with stage("playing the caching allocator, with what a plan may ask of it"):
            if releases:
                use, found = least_reserved(
                    log, self.allocator, may_switch=self._may_switch, workspace_bytes=workspace_bytes
                )
            else:
                use, found = growing(log, self.allocator, workspace_bytes=workspace_bytes)
        use = dataclasses.replace(use, otherwise_reserved_bytes=held.reserved_bytes)
        reserved_bytes = round_up(int(found.reserved_peak_bytes * (1 + _MARGIN)), MIB)
        return self._held_on(found.allocated_peak_bytes, reserved_bytes, use)

    def _held_on(self, allocated_bytes: int, reserved_bytes: int, use: AllocatorUse | None = None) -> Held:
        """What is held with buckets of ranks that train together and what the loop holds, all there before a step."""
        others = [*self.job.ranks.bucket_sizes(), self.job.loop.other_bytes]
        allocated_bytes += sum(round_up(size, MIN_BLOCK_BYTES) for size in others)
        reserved_bytes += sum(round_up(size, SEGMENT_ROUNDING_BYTES) for size in others)
        return Held.on(self.hardware, allocated_bytes, reserved_bytes, use)

    def _record_held(
        self, key: Hashable, actions: tuple[Action, ...], config: Config, goes_on: GoesOn | None = None
    ) -> None:
        """Find what is held, unless `goes_on` sees from live bytes that nobody needs to know."""
        try:
            with stage(f"recording what is allocated in steps with {words_of_actions(actions)}"):
                log = self.steps(actions, config, goes_on=goes_on)
        except Exception as error:  # a third party's optimizer on fake tensors, or one of bitsandbytes
            logger.debug("what is reserved is not predicted: %s", quoted(error), exc_info=True)
            self.stage.held[key] = None
            return
        self.stage.rehearsed.setdefault(key, highest_of(log.levels))
        if log.steps:
            self._last_log = key, log
            with stage("playing the caching allocator"):
                found = reserved_of(log, self.allocator, workspace_bytes=self.hardware.workspace_bytes)
            self.stage.held[key] = self._held_on(found.allocated_peak_bytes, found.reserved_peak_bytes)

    def steps(
        self,
        actions: tuple[Action, ...],
        config: Config,
        *,
        names_modules: bool = False,
        goes_on: GoesOn | None = None,
    ) -> AllocationLog:
        """The allocations of whole steps under these actions, in order, with the moments at which memory could be given
        back. `goes_on` may end the recording when live bytes are known."""
        log = None if names_modules else self._steps_short(actions, config, goes_on)
        return log or self._record(actions, config, names_modules=names_modules, goes_on=goes_on)

    def _steps_short(
        self, actions: tuple[Action, ...], config: Config, goes_on: GoesOn | None = None
    ) -> AllocationLog | None:
        """Recorded on a shorter model, and lengthened; None where that is not the same."""
        cuts = self._cuts(actions)
        if not cuts:
            return None
        here = short_actions(actions, self.rehearsal.blocks, cuts)
        try:
            return self._record(actions, config, here, cuts=cuts, goes_on=goes_on)
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
        goes_on: GoesOn | None = None,
    ) -> AllocationLog:
        attached = actions if attached is None else attached
        beside = streaming.rest_of(self.rehearsal.model, self.rehearsal.blocks)
        return record_steps(
            self.rehearsal,
            self.model,
            self.job.optimizer,
            learns=self._learns(actions),
            attach=self.attacher(attached, config) if actions else None,
            rules=self.costs.rules(planned_step(actions), window_bytes=self.travel.transfers.window_bytes),
            hardware=self.hardware,
            points=points_of(beside) if actions else (),
            names_modules=names_modules,
            cuts=cuts,
            known=self.stage.known_steps,
            goes_on=goes_on,
        )

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
        return find_runs_under(self.rehearsal, actions, self._num_kept(actions))

    def _num_kept(self, actions: tuple[Action, ...]) -> int:
        """How many blocks come to pass before one is as the next. What overlaps is bounded by bytes: so many as fill
        these, and those that come ahead."""
        if not self.travel.overlaps:
            return KEPT
        transfers, profile = self.travel.transfers, self.profile
        sizes = {layer.module_fqn: layer.param_bytes for layer in profile.layers}
        least_bytes = most_bytes = max(transfers.window_bytes, transfers.prefetch_bytes)
        choice = choice_of(actions, profile)
        for module_fqn, treatment in choice.blocks:
            trace = profile.variants.get(TraceKey(treatment), profile.plain)
            sent = sum(s.sent_bytes for s in trace.segments if (s.phase, s.module_fqn) == ("forward", module_fqn))
            if treatment.streams:
                least_bytes = min(least_bytes, sizes[module_fqn])
            if treatment.offloads:
                least_bytes = min(least_bytes, sent)
        least_bytes //= 1 if choice.run.is_exact else 2  # in 16 bits half as much travels
        travels = any(treatment.streams or treatment.offloads for _, treatment in choice.blocks)
        return KEPT - 1 + transfers.prefetch_depth + -(-most_bytes // max(1, least_bytes)) if travels else KEPT

    @functools.cached_property
    def allocator(self) -> AllocatorSettings:
        """The settings of this process; a card elsewhere is taken to have PyTorch's defaults."""
        return allocator_settings() if self.hardware.present else AllocatorSettings()

    def first_reserve(self, config: Config) -> int:
        """What is expected to be held above what is live: that of the plain step, where that could be left alone."""
        if not self.hardware.has_caching_allocator:
            return 0
        least_bytes = 2 * self.hardware.workspace_bytes
        baseline_bytes = self.cost_model().evaluate(Choice()).peak_bytes
        if config.force_optimize or baseline_bytes + least_bytes > budget_bytes(self.hardware, config):
            return least_bytes
        held = self.held((), config)
        return least_bytes if held is None else max(least_bytes, held.reserved_bytes - baseline_bytes)

    def trace_of(self, actions: tuple[Action, ...], config: Config) -> StepTrace:
        """A step with these actions, layer by layer; without any, the plain one. Confirming a plan takes less."""
        if not actions:
            return self.profile.plain
        num_steps = settling_steps(actions) if self.travel.overlaps else 1
        return self.rehearsal.run(self.attacher(actions, config), num_steps=num_steps)

    def _rehearsed(self, actions: tuple[Action, ...], config: Config, is_admitted: GoesOn) -> StepTrace:
        key, known = self._key(actions), self.stage.rehearsed
        if key not in known and self._has_log and key not in self.stage.held:
            self._record_held(key, actions, config, is_admitted)  # recorded steps show what is live, too
        if key not in known:
            num_steps = settling_steps(actions) if self.travel.overlaps else 1
            with stage(f"rehearsing steps with {words_of_actions(actions)}"):
                trace = self._rehearsed_short(actions, config, num_steps)
                known[key] = trace or self.rehearsal.run(self.attacher(actions, config), num_steps=num_steps)
        return known[key]

    def _key(self, actions: tuple[Action, ...]) -> Hashable:
        """What is done, without the reasons for it; and how tensors travel, where any does."""
        travel = self.travel if any(technique_of(action).travels for action in actions) else None
        return travel, *map(_without_reason, actions)

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

    def _peaks(self, choice: Choice, step: PlannedStep) -> Callable[[StepTrace], int]:
        """What says the peak of a rehearsed step, with the optimizer over what is not streamed, to the byte."""
        blocks = tuple(fqn for fqn, treatment in choice.blocks if treatment.streams)
        streamed = self._streamable((*blocks, *(self.profile.rest if choice.run.streams_rest else ())))
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
        model = self.cost_model()
        return lambda trace: model.peak_of(trace, choice, optimizer, num_bytes)

    def cost_model(self) -> CostModel:
        """The cost model of the profile as it is now, built once."""
        model = self._known_cost_model
        if model is None or model.profile is not self.profile:
            window_bytes = min(self.travel.transfers.window_bytes, self.travel.transfers.prefetch_bytes)
            model = CostModel(self.profile, self.hardware, overlaps=self.travel.overlaps, window_bytes=window_bytes)
            self._known_cost_model = model
        return model

    def _streamable(self, module_fqns: Sequence[str]) -> frozenset[int]:
        """What leaves the device when these are streamed: a weight that somebody else has, too, does not."""
        modules = [self.model.get_submodule(module_fqn) for module_fqn in module_fqns]
        return frozenset(streaming.streamable(self.model, modules)) if modules else frozenset()

    # ---- trying techniques

    def _try_simple(self, config: Config) -> None:
        """Treatments of blocks, and what else is exact and soon found out."""
        self.try_variants({TraceKey(treatment): a for treatment, a in self.treatments(config).items()}, config)
        self._rehearse(config, is_exact=True, is_dear=False)

    def _try_dear(self, config: Config) -> None:
        self._rehearse(config, is_exact=True, is_dear=True)

    def _try_lossy(self, config: Config) -> None:
        """All that was tried so far, in 16 bits; and optimizer state in 8."""
        self._try_simple(config)
        self._rehearse(config, is_exact=False, is_dear=False)
        if self.skipped_inside:
            self._try_dear(config)  # where it did not help, it may in 16 bits
            self._rehearse(config, is_exact=False, is_dear=False)

    def _rehearse(self, config: Config, *, is_exact: bool, is_dear: bool) -> None:
        """What eligible techniques of this kind want to be tried."""
        for technique in resolve(config, self.hardware).techniques:
            if technique.rehearse is not None and (technique.is_exact, technique.is_dear) == (is_exact, is_dear):
                technique.rehearse(self, config)

    def blocks_hold_the_peak(self, config: Config) -> bool:
        """Whether the lowest plan would be lower if blocks needed nothing but what they leave behind."""
        forced = config.replace(force_optimize=True)
        bound = decide(_without_block_peaks(self.profile), self.hardware, forced, raise_if_unfit=False)
        return bound.predicted_peak_bytes < decide_on(self.cost_model(), forced).predicted_peak_bytes

    def try_in_16_bits(self, config: Config) -> None:
        dtype = resolve(config, self.hardware).half_type
        if dtype is not None:
            exact = {key: actions for key, actions in self._exact.items() if key in self.profile.variants}
            self.try_variants(
                {
                    dataclasses.replace(key, precision=dtype): (*actions, MixedPrecision(dtype))
                    for key, actions in {TraceKey(): (), **exact}.items()
                },
                config,
            )

    def cost_in_8_bits(self) -> None:
        """Once; `profile.eight_bit_optimizer` stays None where there is no state to quantise."""
        if self.profile.eight_bit_optimizer is None:
            self.learn(eight_bit_optimizer=self.costs.eight_bit())

    def try_variants(self, variants: Mapping[TraceKey, tuple[Action, ...]], config: Config) -> None:
        """Rehearse what was not rehearsed yet; what does not run is left out of the profile."""
        traces = dict(self.profile.variants)
        for key, actions in variants.items():
            if key not in self._tried:
                self._tried.add(key)
                if not key.precision:
                    self._exact[key] = actions
                known = self._key(actions)
                if known not in self.stage.tried:
                    self.stage.tried[known] = self._tried_trace(actions, config)
                trace = self.stage.tried[known]
                if trace is not None:
                    traces[key] = trace
        self.learn(variants=traces)

    def learn(self, **facts: Any) -> None:
        """Write into the profile what is new. What is known makes no other profile, with a cost model of its own."""
        if any(getattr(self.profile, name) != fact for name, fact in facts.items()):
            self.profile = dataclasses.replace(self.profile, **facts)

    def rest_actions(self) -> tuple[Action, ...]:
        """What streams embeddings, norms and heads; nothing where blocks cannot be streamed."""
        if TraceKey(STREAM) not in self.profile.variants:
            return ()
        if self.profile.rest_optimizer is None:
            blocks = tuple(self.rehearsal.blocks)
            beside = streaming.rest_of(self.rehearsal.model, blocks)
            elsewhere = self.rehearsal.readings.outside((*blocks, *beside))
            inside, rest = self._streamable(blocks), tuple(x for x in beside if x not in elsewhere)
            leaving = self._streamable((*blocks, *rest)) - inside
            parameters = [p for p in self.model.parameters() if id(p) in leaving]
            self.learn(
                rest_optimizer=self.costs.cost(without=inside),
                guests=self.costs.guests(inside),
                rest_guests=self.costs.guests(leaving),
                rest=rest,
                rest_param_bytes=sum(p.nbytes for p in parameters),
                rest_trainable_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
                rest_shared_bytes=sum(
                    p.nbytes for p in streaming.shared(self.model) if p.requires_grad and id(p) in leaving
                ),
            )
        return tuple(StreamParameters(fqn) for fqn in self.profile.rest)

    def _tried_trace(self, actions: tuple[Action, ...], config: Config) -> StepTrace | None:
        """On a shorter model where that shows the same."""
        shallow, what = self.shallow, words_of_actions(actions)
        if shallow is not None:
            names = {None, *(name for name, _ in shallow.stage.model.named_modules())}
            here = tuple(action for action in actions if getattr(action, "module_fqn", None) in names)
            trace = try_variant(shallow.stage, self.attacher(here, config), what)
            return None if trace is None else shallow.stretch(trace)
        return try_variant(self.rehearsal, self.attacher(actions, config), what)

    @property
    def shallow(self) -> ShallowRehearsal | None:
        return self.stage.shallow

    def treatments(self, config: Config) -> dict[Treatment, tuple[Action, ...]]:
        """The actions that give each eligible treatment to every block."""
        blocks = tuple(self.rehearsal.blocks)
        eligible = resolve(config, self.hardware)
        allowed = [treatment for treatment in TREATMENTS if treatment != KEEP and eligible.allows(treatment)]
        if self._compiled:  # who keeps outputs of operators must see them, and the compiler fuses them
            allowed = [treatment for treatment in allowed if treatment.recompute != "selective"]
        if self._read_elsewhere:
            allowed = [treatment for treatment in allowed if not treatment.streams]
        given: dict[Treatment, tuple[Action, ...]]
        given = {t: tuple(action for fqn in blocks for action in block_actions(fqn, t)) for t in allowed}
        return given if blocks else {}

    @functools.cached_property
    def _read_elsewhere(self) -> frozenset[str]:
        """Blocks with a parameter that is read while they do not run. Where there is one, blocks are not streamed.

        A block that never runs is in no plan.
        """
        called = [module_fqn for module_fqn in self.rehearsal.blocks if self.rehearsal.num_calls.get(module_fqn)]
        found = self.rehearsal.readings.outside(called)
        if found:
            names = ", ".join(sorted(found)[:3]) + (", ..." if len(found) > 3 else "")
            logger.info("blocks are not streamed: a parameter of %s is read while its block does not run", names)
        return found

    @property
    def tiles(self) -> Tiles:
        found = self.stage.tiles
        return dataclasses.replace(found, inside=tuple(a for a in found.inside if not self._is_compiled(a.module_fqn)))

    def _is_compiled(self, module_fqn: str) -> bool:
        return any(f"{module_fqn}.".startswith(f"{part}.") or not part for part in self._compiled)

    def attacher(self, actions: tuple[Action, ...], config: Config) -> Attach:
        """What attaches these actions on the stage."""
        travelling, device = self.travel.said_in(config), torch.device(self.rehearsal.device_type)
        settings = ExecutionSettings.from_config(travelling, device)
        settings = dataclasses.replace(settings, optimizer_on_stage=self.costs.on_stage)
        return functools.partial(_rehearse_actions, actions, settings)


@dataclasses.dataclass(slots=True)
class _Taught:
    """What rehearsals of plans that did not fit have taught about others."""

    reserve_bytes: int
    margin_bytes: int = 0
    margins: dict[Traits, int] = dataclasses.field(default_factory=dict)
    plans: dict[Choice, Plan] = dataclasses.field(default_factory=dict)

    def needed(self) -> dict[Choice, int]:
        """What each plan needs beside the reserve: it may hold more than that above what is live."""
        return {
            choice: max(plan.predicted_peak_bytes, (plan.predicted_reserved_bytes or 0) - self.reserve_bytes)
            for choice, plan in self.plans.items()
        }

    def by(self, choice: Choice, plan: Plan, decided: Plan, *, is_last: bool) -> None:
        """The plan did not fit. `is_last`: there is one more try."""
        self.plans[choice] = plan
        above_model, suspects = plan.predicted_peak_bytes - decided.predicted_peak_bytes, suspects_of(choice)
        self.margins[suspects] = max(self.margins.get(suspects, 0), above_model)
        logger.debug("the rehearsal peaked %s above the peak model: deciding again", show_bytes(above_model))
        reserved_bytes = plan.predicted_reserved_bytes
        if is_last and reserved_bytes is not None:
            self.reserve_bytes = plan.budget_bytes  # the lowest that there is
        elif is_last:
            self.margin_bytes = plan.budget_bytes  # what was traced as a whole is trusted
        elif reserved_bytes is not None:
            # Plans hold about as much above what is live as this one does.
            self.reserve_bytes = max(self.reserve_bytes, reserved_bytes - plan.predicted_peak_bytes)


def _without_reason(action: Action) -> Hashable:
    """What is done, whatever it is done for: actions that agree in this are rehearsed alike."""
    fields = (field.name for field in dataclasses.fields(action) if field.name != "reason")
    return type(action), *(getattr(action, name) for name in fields)


def _without_block_peaks(profile: Profile) -> Profile:
    """What no tiling inside the blocks can go below."""
    blocks = {layer.module_fqn for layer in profile.layers if layer.is_block}

    def flat(trace: StepTrace) -> StepTrace:
        segments = [
            dataclasses.replace(s, peak_bytes=max(0, s.net_bytes)) if s.module_fqn in blocks else s
            for s in trace.segments
        ]
        return StepTrace(tuple(segments))

    variants = {key: flat(trace) for key, trace in profile.variants.items()}
    return dataclasses.replace(profile, plain=flat(profile.plain), variants=variants)


def _rehearse_actions(actions: tuple[Action, ...], settings: ExecutionSettings, model: nn.Module) -> Executor:
    executor = Executor(model, settings)
    executor.attach(actions)
    return executor
