"""A planner of one model's step: techniques are tried on a stage, plans are decided on what that shows, and rehearsed.

    planner = Planner(job, inputs)
    plan = planner.plan(strategy)       # `plan.fits` says whether there is one
    planner.profile                     # what was seen so far

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

from memscale._config import AsyncOffloadConfig, Config
from memscale._decide import confirmed, decide, decide_on, full_front, needs_optimizing
from memscale._decide.allocator import AllocatorSettings
from memscale._decide.budget import Held, budget_bytes, full_budget
from memscale._decide.choice import Choice, Outcome, block_actions, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.policy import Strategy
from memscale._errors import quoted
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import (
    Action,
    FrontPoint,
    MixedPrecision,
    OffloadOptimizer,
    Plan,
    QuantizeOptimizer,
    StepInBuckets,
    StreamParameters,
)
from memscale._planning.allocations import AllocationLog, allocator_settings, record_steps, reserved_of
from memscale._planning.job import Job
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale._planning.tile_sizes import Tiles, find_tiles
from memscale._profile import KEEP, STREAM, Profile, StepTrace, TraceKey, Treatment
from memscale._profile.inputs import Inputs
from memscale._profile.profiler import open_rehearsal, profile_model, refuse_unprofilable, try_variant
from memscale._profile.rehearsal import Attach
from memscale._profile.shallow import ShallowRehearsal, open_shallow, rehearse_short
from memscale._torch import private
from memscale._units import round_up, show_bytes
from memscale.report.explain import words_of_actions
from memscale.techniques import TREATMENTS, by_technique, technique_of
from memscale.techniques.offload.parameters import streaming

logger = logging.getLogger("memscale")

_MAX_REHEARSALS = 4
MORE_BELOW = "the mode allows more, which this budget did not need and which was not looked into"


class Planner:
    """One model's step on one hardware: the stage where it can be tried, and the profile of what was tried so far.

    Techniques are tried only when a plan needs them, each once; several strategies can be planned on one planner.
    """

    def __init__(self, job: Job, inputs: Inputs, costs: OptimizerCosts | None = None) -> None:
        """`costs`: those of the same optimizer over the same model, where they are known."""
        refuse_unprofilable(job.model)
        self.job = job
        self.inputs = inputs
        self.model, self.hardware = job.model, job.hardware
        self.costs = costs or OptimizerCosts(job)
        self.rehearsal, plain = open_rehearsal(
            job.model,
            inputs,
            torch.device(job.hardware.device_type),
            static=job.config.use_static_profiling,
            holds_gradients=job.holds_gradients,
        )
        untrained = self.rehearsal.untrained
        self.costs.leave_idle(frozenset(id(p) for name, p in job.model.named_parameters() if name in untrained))
        self.profile = profile_model(job.model, self.rehearsal, plain, self.costs.cost(), inputs)
        self._tried: set[TraceKey] = set()
        self._exact: dict[TraceKey, tuple[Action, ...]] = {}
        self._tiles: Tiles | None = None
        self._traces: dict[Hashable, StepTrace] = {}
        """Rehearsals, by what was done, without the reasons for it, and whether transfers overlapped."""
        self._held_by: dict[Hashable, Held | None] = {}
        self.skipped_inside = False
        self._known_cost_model: CostModel | None = None

    def plan(self, strategy: Strategy) -> Plan:
        """The cheapest plan that fits under this strategy; `plan.fits` is False when there is none."""
        config = strategy.config
        if not needs_optimizing(self.cost_model(config), config, self._first_reserve(config)):
            return self._decide_and_rehearse(strategy)
        *levels, last = self._levels(config)
        for level in levels:
            level(config)
            if not config.force_optimize:
                plan = self._decide_and_rehearse(strategy)
                if plan.fits:
                    return dataclasses.replace(plan, front_note=MORE_BELOW)
        last(config)
        return self._decide_and_rehearse(strategy)

    def full_front(self, strategy: Strategy, plan: Plan) -> tuple[FrontPoint, ...]:
        """Peak against time with everything that the strategy allows, also what the plan did not need."""
        self.look_into_everything(strategy.config)
        return full_front(self.cost_model(strategy.config), strategy.config, plan)

    def look_into_everything(self, config: Config) -> None:
        """Try all that the config allows, whether the budget needs it or not."""
        for level in self._levels(config):
            level(config)

    def _levels(self, config: Config) -> list[Callable[[Config], None]]:
        """What is dear to find out, or not exact, is looked into only when nothing else is left."""
        eligible = resolve(config, self.hardware)
        levels: list[Callable[[Config], None]] = [self._try_simple]
        if any(technique.is_dear for technique in eligible.techniques):
            levels.append(self._try_dear)
        if not all(technique.is_exact for technique in eligible.techniques):
            levels.append(self._try_lossy)
            if any(map(eligible.must_use, eligible.techniques)):
                levels.insert(0, self._try_lossy)  # what is tiled inside comes after it, and then in 16 bits, too
        return levels

    def _decide_and_rehearse(self, strategy: Strategy) -> Plan:
        """Decide, and decide again with what the rehearsal taught, until the plan fits or cannot."""
        margin_bytes, rehearsed = 0, dict[Choice, int]()
        reserve_bytes = self._first_reserve(strategy.config)
        for attempt in range(_MAX_REHEARSALS + 1):
            decided = decide_on(
                self.cost_model(strategy.config),
                strategy.config,
                strategy.source,
                margin_bytes=margin_bytes,
                reserve_bytes=reserve_bytes,
                rehearsed=rehearsed,
            )
            plan = self.confirm(decided, strategy.config)
            if plan.fits or not decided.fits:
                break
            if plan.predicted_reserved_bytes is not None:
                # Plans hold about as much above what is live as this one does.
                above_bytes = plan.predicted_reserved_bytes - plan.predicted_peak_bytes
                reserve_bytes = max(reserve_bytes, above_bytes)
            # What this plan was above the model: with so much to spare it is not chosen again.
            margin_bytes = max(margin_bytes, plan.predicted_peak_bytes - decided.predicted_peak_bytes)
            rehearsed[choice_of(plan.actions, self.profile)] = plan.predicted_peak_bytes
            if attempt + 2 > _MAX_REHEARSALS:
                margin_bytes = plan.budget_bytes  # the last time, only what was traced as a whole is trusted
                if plan.predicted_reserved_bytes is not None:
                    reserve_bytes = plan.budget_bytes  # and of that only the lowest
            logger.debug("the rehearsal peaked %s above the peak model: deciding again", show_bytes(margin_bytes))
        return plan

    def confirm(self, plan: Plan, config: Config) -> Plan:
        """The number holds: run this very plan on the stage, and promise what that shows."""
        if not plan.actions:
            return self._confirm_plain(plan, config)
        trace = self._rehearsed(plan.actions, config)
        choice = choice_of(plan.actions, self.profile)
        if choice.run.quantizes_optimizer:
            self.cost_in_8_bits()
        peak_bytes = self._peak_of(trace, choice, config)
        shown = Outcome(peak_bytes, 0.0, plan.host_bytes, plan.movable_bytes)
        fits = full_budget(self.hardware, config).admits(shown)
        held = self.held(plan.actions, config) if fits else None
        if held is not None:
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
        """By the model of the caching allocator, fed with whole steps; None where there is no such allocator, or where
        the steps cannot be recorded."""
        if not self.hardware.has_caching_allocator:
            return None
        key = (*map(_without_reason, actions), config.async_offload)
        if key not in self._held_by:
            self._held_by[key] = self._record_held(actions, config)
        return self._held_by[key]

    def _record_held(self, actions: tuple[Action, ...], config: Config) -> Held | None:
        try:
            log = self.steps(actions, config)
        except Exception as error:  # a third party's optimizer on fake tensors, or one of bitsandbytes
            logger.debug("what is reserved is not predicted: %s", quoted(error), exc_info=True)
            return None
        found = reserved_of(log, self.allocator, workspace_bytes=self.hardware.workspace_bytes)
        return Held.on(self.hardware, found.allocated_peak_bytes, found.reserved_peak_bytes)

    def steps(self, actions: tuple[Action, ...], config: Config, *, names_modules: bool = False) -> AllocationLog:
        """The allocations of whole steps under these actions, in order."""
        transfers = config.async_config or AsyncOffloadConfig()
        kinds = {type(action) for action in actions}
        rules = self.costs.rules(
            moves=OffloadOptimizer in kinds,
            eight_bit=QuantizeOptimizer in kinds,
            streams=StreamParameters in kinds,
            in_buckets=StepInBuckets in kinds,
            resident_share=max((a.resident_share for a in actions if isinstance(a, OffloadOptimizer)), default=0.0),
            window_bytes=transfers.window_bytes,
        )
        return record_steps(
            self.rehearsal,
            self.model,
            self.job.optimizer,
            learns=config.async_offload and StreamParameters in kinds,
            attach=self._attacher(actions, config) if actions else None,
            rules=rules,
            hardware=self.hardware,
            names_modules=names_modules,
        )

    @functools.cached_property
    def allocator(self) -> AllocatorSettings:
        """As this process would run; a card elsewhere is taken to have PyTorch's defaults."""
        return allocator_settings() if self.hardware.present else AllocatorSettings()

    def _first_reserve(self, config: Config) -> int:
        """What is expected to be held above what is live: that of the plain step, where that could be left alone."""
        if not self.hardware.has_caching_allocator:
            return 0
        least_bytes = 2 * self.hardware.workspace_bytes
        baseline_bytes = self.cost_model(config).evaluate(Choice()).peak_bytes
        if config.force_optimize or baseline_bytes + least_bytes > budget_bytes(self.hardware, config):
            return least_bytes
        held = self.held((), config)
        return least_bytes if held is None else max(least_bytes, held.reserved_bytes - baseline_bytes)

    def _rehearsed(self, actions: tuple[Action, ...], config: Config) -> StepTrace:
        key = (*map(_without_reason, actions), config.async_offload)
        if key not in self._traces:
            steps = [technique_of(mine[0]).settling_steps for mine in by_technique(actions).values()]
            num_steps = max(steps) if config.async_offload else 1
            trace = None if num_steps > 1 else self._rehearsed_short(actions, config)
            self._traces[key] = trace or self.rehearsal.run(self._attacher(actions, config), num_steps=num_steps)
        return self._traces[key]

    def _rehearsed_short(self, actions: tuple[Action, ...], config: Config) -> StepTrace | None:
        """On a shorter model where that shows the same."""
        if self.shallow is None:
            return None
        return rehearse_short(self.rehearsal, actions, lambda here: self._attacher(here, config))

    def _peak_of(self, trace: StepTrace, choice: Choice, config: Config) -> int:
        """With the optimizer over what is not streamed, to the byte."""
        blocks = tuple(fqn for fqn, treatment in choice.blocks if treatment.streams)
        streamed = self._streamable((*blocks, *(self.profile.rest if choice.run.streams_rest else ())))
        in_8_bits = choice.run.quantizes_optimizer and self.profile.eight_bit_optimizer is not None
        optimizer = self.costs.cost(eight_bit=in_8_bits, without=streamed)
        storages = [p.untyped_storage() for p in self.model.parameters() if id(p) in streamed]
        sizes = {private.storage_key(storage): storage.nbytes() for storage in storages}
        num_bytes = sum(round_up(size, self.rehearsal.rounding_bytes) for size in sizes.values())
        return self.cost_model(config).peak_of(trace, choice, optimizer, num_bytes)

    def cost_model(self, config: Config) -> CostModel:
        """That of the profile as it is now, built once."""
        model = self._known_cost_model
        if model is None or model.profile is not self.profile or model.pace.overlaps != config.async_offload:
            model = CostModel(self.profile, self.hardware, overlaps=config.async_offload)
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
        return bound.predicted_peak_bytes < decide_on(self.cost_model(config), forced).predicted_peak_bytes

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
                trace = self._tried_trace(actions, config)
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
            inside, rest = self._streamable(blocks), streaming.rest_of(self.rehearsal.model, blocks)
            leaving = self._streamable((*blocks, *rest)) - inside
            parameters = [p for p in self.model.parameters() if id(p) in leaving]
            self.learn(
                rest_optimizer=self.costs.cost(without=inside),
                rest=rest,
                rest_param_bytes=sum(p.nbytes for p in parameters),
                rest_trainable_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
            )
        return tuple(StreamParameters(fqn) for fqn in self.profile.rest)

    def _tried_trace(self, actions: tuple[Action, ...], config: Config) -> StepTrace | None:
        """On a shorter model where that shows the same."""
        shallow, what = self.shallow, words_of_actions(actions)
        if shallow is not None:
            names = {None, *(name for name, _ in shallow.stage.model.named_modules())}
            here = tuple(action for action in actions if getattr(action, "module_fqn", None) in names)
            trace = try_variant(shallow.stage, self._attacher(here, config), what)
            return None if trace is None else shallow.stretch(trace)
        return try_variant(self.rehearsal, self._attacher(actions, config), what)

    @functools.cached_property
    def shallow(self) -> ShallowRehearsal | None:
        if not self.rehearsal.is_fake or self.rehearsal.holds_gradients:
            return None  # what is held belongs to all blocks, and to none of their stretches
        blocks = self.rehearsal.blocks
        return open_shallow(self.model, self.inputs, self.hardware.device_type, blocks, self.profile.plain)

    def treatments(self, config: Config) -> dict[Treatment, tuple[Action, ...]]:
        """By eligible treatment: the actions that give it to every block."""
        blocks = tuple(self.rehearsal.blocks)
        eligible = resolve(config, self.hardware)
        allowed = [treatment for treatment in TREATMENTS if treatment != KEEP and eligible.allows(treatment)]
        given: dict[Treatment, tuple[Action, ...]]
        given = {t: tuple(action for fqn in blocks for action in block_actions(fqn, t)) for t in allowed}
        return given if blocks else {}

    @property
    def tiles(self) -> Tiles:
        if self._tiles is None:
            self._tiles = find_tiles(self.rehearsal, self.shallow)
        return self._tiles

    def _attacher(self, actions: tuple[Action, ...], config: Config) -> Attach:
        settings = ExecutionSettings.from_config(config, torch.device(self.rehearsal.device_type))
        return functools.partial(_rehearse_actions, actions, settings)


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
