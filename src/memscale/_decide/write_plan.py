"""A choice, written down as a plan: actions with their reasons, a row a layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from memscale._config import AsyncOffloadConfig, Config
from memscale._decide.choice import Choice, Outcome, RunOptions, actions_of, block_actions
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import Eligible
from memscale._decide.pareto import slowdown
from memscale._decide.search import Candidate
from memscale._errors import assert_never
from memscale._hardware import Hardware
from memscale._plan import (
    OPTIMIZER_BUCKET_BYTES,
    Action,
    Checkpoint,
    Conditions,
    DecisionSource,
    FrontPoint,
    LayerRow,
    MixedPrecision,
    OffloadActivations,
    OffloadOptimizer,
    Plan,
    QuantizeOptimizer,
    Reason,
    StepInBuckets,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)
from memscale._profile import KEEP, Layer, Profile, Treatment
from memscale.report.explain import words_of_block

_SPEEDS = (
    "fp32_flops",
    "half_flops",
    "matmul_efficiency",
    "memory_bytes_per_s",
    "host_bytes_per_s",
    "link_bytes_per_s",
    "blocking_link_bytes_per_s",
    "launch_s",
)


def write_plan(
    model: CostModel,
    config: Config,
    decision_source: DecisionSource,
    baseline: Outcome,
    chosen: Candidate,
    budget_bytes: int,
    fits: bool,
    summary: Reason,
    front: tuple[FrontPoint, ...] = (),
    front_note: str = "",
) -> Plan:
    profile, outcome = model.profile, chosen.outcome
    return Plan(
        actions=tuple(_actions(model, config, chosen.choice)),
        baseline_peak_bytes=baseline.peak_bytes,
        predicted_peak_bytes=outcome.peak_bytes,
        predicted_slowdown=slowdown(chosen, baseline),
        budget_bytes=budget_bytes,
        fits=fits,
        decision_source=decision_source,
        mode=config.mode.value,
        device_type=model.hardware.device_type,
        device_name=model.hardware.device_name,
        optimizer_name=profile.optimizer.name,
        profile_source=profile.source,
        model_class=profile.model_class,
        inputs=tuple(f"{s.name}: {'x'.join(map(str, s.shape)) or 'scalar'} {s.dtype}" for s in profile.inputs),
        summary=summary,
        rows=tuple(_row(model, layer, chosen.choice) for layer in profile.layers),
        host_bytes=outcome.host_bytes,
        movable_bytes=outcome.movable_bytes,
        front=front,
        front_note=front_note,
        conditions=_conditions(model.hardware, config),
    )


def _conditions(hardware: Hardware, config: Config) -> Conditions:
    transfers = config.async_config or AsyncOffloadConfig()
    speeds = {name: getattr(hardware, name) for name in _SPEEDS}
    return Conditions(
        async_offload=config.async_offload,
        prefetch_depth=transfers.prefetch_depth,
        prefetch_bytes=transfers.prefetch_bytes,
        window_bytes=transfers.window_bytes,
        min_tensor_bytes=transfers.min_tensor_bytes,
        speeds={name: float(value) for name, value in speeds.items() if value},
    )


def _actions(model: CostModel, config: Config, choice: Choice) -> Iterator[Action]:
    """With their reasons."""
    of_tiles: dict[type[Action], Reason] = {}
    for action in actions_of(choice, model.profile):
        reason = of_tiles.get(type(action)) or _action_reason(model, config, choice, action)
        if isinstance(action, TileAttention | TileMlp):
            of_tiles[type(action)] = reason  # there are many of them, and each would evaluate the plan anew
        yield dataclasses.replace(action, reason=reason)


def _action_reason(model: CostModel, config: Config, choice: Choice, action: Action) -> Reason:
    treated = dict(choice.blocks)
    match action:
        case Checkpoint() | OffloadActivations():
            return _reason(model, action.module_fqn, treated[action.module_fqn])
        case StreamParameters() if action.module_fqn in treated:
            return _reason(model, action.module_fqn, treated[action.module_fqn])
        case StreamParameters():
            return _rest_reason(model)
        case TileAttention() | TileMlp():
            return _inside_reason(model, choice)
        case TileHead():
            return _head_reason(model, choice)
        case StepInBuckets():
            return _step_reason(model, choice)
        case OffloadOptimizer():
            numbers: dict[str, int | float | str] = {"state_bytes": model.optimizer.cost(choice.run).state_bytes}
            numbers |= _part_of_the_run(model, choice, offloads_optimizer=False, resident_share=0.0)
            if not action.resident_share:
                return Reason("offload optimizer state: the device holds one bucket of it", numbers)
            numbers["resident_bytes"] = round(model.optimizer.resident_bytes(choice.run, 0))
            return Reason("offload a share of the optimizer state: the least that is considered and fits", numbers)
        case MixedPrecision():
            return _lossy_reason(config, "use_mixed_precision", _part_of_the_run(model, choice, precision=""))
        case QuantizeOptimizer():
            numbers = {
                "state_bytes": model.profile.optimizer.state_bytes,
                "in_8_bit_bytes": model.optimizer.cost(choice.run).state_bytes,
                **_part_of_the_run(model, choice, quantizes_optimizer=False),
            }
            return _lossy_reason(config, "use_8bit_optimizer", numbers)
        case _:
            assert_never(action)


def _part_of_the_run(model: CostModel, choice: Choice, **without: Any) -> dict[str, int | float | str]:
    """What one part of the run frees and costs: this very plan without it, and with it."""
    other = Choice(choice.blocks, dataclasses.replace(choice.run, **without))
    treatments = {treatment for _, treatment in choice.blocks} or {KEEP}
    if not model.can_run(other.run) or not all(model.can_treat(other.run, treatment) for treatment in treatments):
        return {}  # one of a pair that was traced together only
    before, after = model.evaluate(other), model.evaluate(choice)
    return {
        "frees_bytes": before.peak_bytes - after.peak_bytes,
        "costs_ms": round(after.step_ms - before.step_ms, 4),
    }


def asked_for(model: CostModel, config: Config, eligible: Eligible) -> Iterator[Action]:
    """Lossy techniques that the user has named: they are used even where nothing is needed."""
    if eligible.half_type is not None and eligible.must_halve:
        yield MixedPrecision(eligible.half_type, _lossy_reason(config, "use_mixed_precision", {}))
    if eligible.must_quantize and model.profile.optimizer.state_bytes:
        yield QuantizeOptimizer(OPTIMIZER_BUCKET_BYTES, reason=_lossy_reason(config, "use_8bit_optimizer", {}))


def _lossy_reason(config: Config, name: str, numbers: dict[str, int | float | str]) -> Reason:
    why = f"{name}=True" if config.asks_for(name) else f"mode {config.mode.value}: nothing exact suffices"
    return Reason(why, numbers)


def _reason(model: CostModel, module_fqn: str, treatment: Treatment) -> Reason:
    numbers: dict[str, int | float | str] = {"frees_bytes": model.saved_bytes(module_fqn, treatment)}
    if treatment.streams:
        numbers["parameter_bytes"] = model.blocks[module_fqn].param_bytes
    numbers["costs_ms"] = round(model.extra_ms(module_fqn, treatment), 4)
    return Reason(_words(treatment), numbers)


def _words(treatment: Treatment) -> str:
    return words_of_block(block_actions("", treatment))


def _rest_reason(model: CostModel) -> Reason:
    return Reason("stream parameters", {"parameter_bytes": model.profile.rest_param_bytes})


def _step_reason(model: CostModel, choice: Choice) -> Reason:
    cost = model.optimizer.cost(choice.run)
    numbers: dict[str, int | float | str] = {
        "at_once_bytes": cost.step_bytes,
        "in_buckets_bytes": cost.bucketed_step_bytes or 0,
        **_part_of_the_run(model, choice, steps_in_buckets=False),
    }
    return Reason("step in buckets: the temporaries are those of one bucket, the state stays where it is", numbers)


def _head_reason(model: CostModel, choice: Choice) -> Reason:
    part = _part_of_the_run(model, choice, head_rows=0)
    return Reason("tile the head", {**part, "rows": choice.run.head_rows})


def _inside_reason(model: CostModel, choice: Choice) -> Reason:
    part = _part_of_the_run(model, choice, num_tiles=0)
    return Reason("tile attention and MLPs inside the layers", {**part, "tiles": choice.run.num_tiles})


def _tiled_inside(model: CostModel, layer: Layer, run: RunOptions) -> tuple[str, ...]:
    """What of a layer is tiled: its attention, its MLP."""
    parts = [a for a in model.profile.inside if f"{a.module_fqn}.".startswith(f"{layer.module_fqn}.")]
    names = ["tile attention" if isinstance(part, TileAttention) else "tile the MLP" for part in parts]
    return tuple(dict.fromkeys(names)) if run.num_tiles and layer.module_fqn else ()


def _has_the_head(profile: Profile, layer: Layer) -> bool:
    """Whether this row stands for the head: its own, or the nearest above it (BERT's is deep inside `cls`)."""
    head_fqn = None if profile.head is None else profile.head.module_fqn
    rows = [row.module_fqn for row in profile.layers]
    holders = [fqn for fqn in rows if head_fqn is not None and f"{head_fqn}.".startswith(f"{fqn}.")]
    return max(holders, key=len, default=None) == layer.module_fqn


def _row(model: CostModel, layer: Layer, choice: Choice) -> LayerRow:
    treatment, run = dict(choice.blocks).get(layer.module_fqn), choice.run
    inside = _tiled_inside(model, layer, run)
    techniques: tuple[str, ...]
    if treatment is not None:
        techniques, reason = (_words(treatment),), _reason(model, layer.module_fqn, treatment)
    elif run.head_rows and _has_the_head(model.profile, layer):
        techniques, reason = ("tile the head",), _head_reason(model, choice)
        if run.streams_rest:
            techniques = ("tile the head", "stream parameters")
    elif run.streams_rest and any(f"{fqn}.".startswith(f"{layer.module_fqn}.") for fqn in model.profile.rest):
        techniques, reason = ("stream parameters",), _rest_reason(model)
    else:
        why = "not needed for the budget" if layer.is_block else "no block: embeddings, stem or head"
        techniques, reason = (), Reason(why)
    if inside:
        techniques, reason = (*techniques, *inside), _with_tiles(reason, run)
    return LayerRow(
        module_fqn=layer.module_fqn,
        class_name=layer.class_name,
        num_calls=layer.num_calls,
        param_bytes=layer.param_bytes,
        activation_bytes=model.activation_bytes(layer.module_fqn),
        forward_ms=round(model.forward_ms(layer.module_fqn), 4),
        techniques=techniques,
        reason=reason,
        is_block=layer.is_block,
    )


def _with_tiles(reason: Reason, run: RunOptions) -> Reason:
    return Reason(f"{reason.rule}; tiles inside", {**reason.numbers, "tiles": run.num_tiles})
