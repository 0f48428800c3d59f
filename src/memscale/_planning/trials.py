"""Techniques are tried on the stage, each once and only when a plan needs it, and the profile grows by what they show.

    trials = Trials(job, inputs, travel)
    trials.try_variants({TraceKey(CHECKPOINT): actions}, eligible)
    trials.profile                          # the plain step, and every variant that ran
    trials.cost_model()                     # what it says about any choice

What a technique wants to be tried is said by its record (`Technique.rehearse`), which is handed these trials; in which
order techniques are looked into is said in `one_way.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memscale._config import Config
from memscale._decide import decide, decide_on
from memscale._decide.choice import block_actions
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import Eligible
from memscale._decide.travel import Travel
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import (
    Action,
    MixedPrecision,
    StreamParameters,
)
from memscale._planning.job import Job
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale._planning.stage import Stage
from memscale._planning.tile_sizes import Tiles
from memscale._profile import KEEP, STREAM, Profile, StepTrace, TraceKey, Treatment
from memscale._profile.inputs import Inputs
from memscale._profile.layers import compiled_parts
from memscale._profile.profiler import profile_model, refuse_unprofilable, try_variant
from memscale._profile.rehearsal import Attach
from memscale._profile.shallow import (
    ShallowRehearsal,
)
from memscale.report.explain import words_of_actions
from memscale.techniques import TREATMENTS, planned_step, technique_of
from memscale.techniques.offload.parameters import streaming

logger = logging.getLogger("memscale")


class Trials:
    """One model's step on one hardware, by one way of travelling: the stage where it can be tried, and the profile of
    what was tried so far."""

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
            profile,
            communication_bytes=job.ranks.bucket_bytes,
            loop_bytes=job.loop.other_bytes,
            bucket_bytes=travel.bucket_bytes,
        )
        self._tried: set[TraceKey] = set()
        self._exact: dict[TraceKey, tuple[Action, ...]] = {}
        self.skipped_inside = False
        self._compiled = compiled_parts(job.model)
        self._known_cost_model: CostModel | None = None

    def cost_model(self) -> CostModel:
        """The cost model of the profile as it is now, built once."""
        model = self._known_cost_model
        if model is None or model.profile is not self.profile:
            window_bytes = min(self.travel.transfers.window_bytes, self.travel.transfers.prefetch_bytes)
            model = CostModel(self.profile, self.hardware, overlaps=self.travel.overlaps, window_bytes=window_bytes)
            model.is_compiled = self.is_compiled
            self._known_cost_model = model
        return model

    def streamable(self, module_fqns: Sequence[str]) -> frozenset[int]:
        """What leaves the device when these are streamed: a weight that somebody else has, too, does not."""
        modules = [self.model.get_submodule(module_fqn) for module_fqn in module_fqns]
        return frozenset(streaming.streamable(self.model, modules)) if modules else frozenset()

    def key_of(self, actions: tuple[Action, ...]) -> Hashable:
        """What is done, without the reasons for it; and how tensors travel, where any does: in which buckets, say the
        actions, and how far ahead matters to weights alone."""
        travel = self.travel.in_buckets_of(0) if any(technique_of(action).travels for action in actions) else None
        if travel is not None and not planned_step(actions).streams:
            travel = travel.fetching_ahead(1)
        return travel, *map(_without_reason, actions)

    def blocks_hold_the_peak(self, eligible: Eligible) -> bool:
        """Whether the lowest plan would be lower if blocks needed nothing but what they leave behind."""
        forced = eligible.replace(force_optimize=True)
        bound = decide(_without_block_peaks(self.profile), forced, raise_if_unfit=False)
        return bound.predicted_peak_bytes < decide_on(self.cost_model(), forced).predicted_peak_bytes

    def try_in_16_bits(self, eligible: Eligible) -> None:
        dtype = eligible.half_type
        if dtype is not None:
            exact = {key: actions for key, actions in self._exact.items() if key in self.profile.variants}
            self.try_variants(
                {
                    dataclasses.replace(key, precision=dtype): (*actions, MixedPrecision(dtype))
                    for key, actions in {TraceKey(): (), **exact}.items()
                },
                eligible,
            )

    def cost_in_8_bits(self) -> None:
        """Once; `profile.eight_bit_optimizer` stays None where there is no state to quantise."""
        if self.profile.eight_bit_optimizer is None:
            self.learn(eight_bit_optimizer=self.costs.eight_bit())

    def try_variants(self, variants: Mapping[TraceKey, tuple[Action, ...]], eligible: Eligible) -> None:
        """Rehearse what was not rehearsed yet; what does not run is left out of the profile."""
        traces = dict(self.profile.variants)
        for key, actions in variants.items():
            if key not in self._tried:
                self._tried.add(key)
                if not key.precision:
                    self._exact[key] = actions
                known = self.key_of(actions)
                if known not in self.stage.tried:
                    self.stage.tried[known] = self._tried_trace(actions, eligible.config)
                trace = self.stage.tried[known]
                if trace is not None:
                    traces[key] = trace
        self.learn(variants=traces)

    def gains(self, key: TraceKey, actions: tuple[Action, ...], eligible: Eligible) -> bool:
        """Rehearse this beside the blocks. Whether it rises less high than the plain step anywhere: if it does not, it
        is left out of the profile."""
        if key not in self._tried:
            self.try_variants({key: actions}, eligible)
            trace, plain = self.profile.variants.get(key), self.profile.plain
            if trace is not None and trace.spans(plain):
                self.learn(variants={each: found for each, found in self.profile.variants.items() if each != key})
        return key in self.profile.variants

    @property
    def is_compiled(self) -> bool:
        """Whether the model or a part of it is compiled."""
        return bool(self._compiled)

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
            inside, rest = self.streamable(blocks), tuple(x for x in beside if x not in elsewhere)
            leaving = self.streamable((*blocks, *rest)) - inside
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

    def treatments(self, eligible: Eligible) -> dict[Treatment, tuple[Action, ...]]:
        """The actions that give each eligible treatment to every block."""
        blocks = tuple(self.rehearsal.blocks)
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
