"""A choice, written down as a plan: actions with their reasons, a row a layer; and what to say when nothing fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from memscale._config import AsyncOffloadConfig, Config
from memscale._decide.choice import Choice, Outcome, Run, Treatment
from memscale._decide.cost_model import CostModel
from memscale._decide.pareto import NAME_OF, slowdown
from memscale._decide.search import Candidate
from memscale._errors import assert_never
from memscale._hardware import Hardware
from memscale._plan import (
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
    StreamParameters,
    TileAttention,
    TileMlp,
)
from memscale._profile import Layer, Profile
from memscale._units import show_bytes

OPTIMIZER_BUCKET_BYTES = 16 * 1024 * 1024
"""State is brought to the device in pieces that belong to parameters of this many bytes."""

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
    """In the model's order, not in that of the ranking: a plan is read by people."""
    treated, run = dict(choice.blocks), choice.run
    for layer in model.profile.layers:
        if layer.module_fqn in treated:
            treatment = treated[layer.module_fqn]
            yield from _block_actions(layer.module_fqn, treatment, _reason(model, layer.module_fqn, treatment))
    if run.streams_rest:
        for module_fqn in model.profile.rest:
            yield StreamParameters(module_fqn, _rest_reason(model))
    if run.num_tiles:
        reason = _inside_reason(model, choice)
        yield from (dataclasses.replace(a, reason=reason) for a in cut_inside(model.profile.inside, run.num_tiles))
    if run.head_rows:
        assert model.profile.head is not None
        yield dataclasses.replace(model.profile.head, rows=run.head_rows, reason=_head_reason(model, choice))
    if run.offloads_optimizer:
        numbers: dict[str, int | float | str] = {"state_bytes": model.optimizer.cost(run).state_bytes}
        numbers |= _part_of_the_run(model, choice, offloads_optimizer=False)
        rule = "offload optimizer state: the device holds one bucket of it"
        yield OffloadOptimizer(OPTIMIZER_BUCKET_BYTES, Reason(rule, numbers))
    yield from _lossy_actions(model, config, choice)


def _lossy_actions(model: CostModel, config: Config, choice: Choice) -> Iterator[Action]:
    run = choice.run
    if run.precision:
        dtype: Literal["bfloat16", "float16"] = "bfloat16" if run.precision == "bfloat16" else "float16"
        part = _part_of_the_run(model, choice, precision="")
        yield MixedPrecision(dtype, _lossy_reason(config, "use_mixed_precision", part))
    if run.quantizes_optimizer:
        numbers: dict[str, int | float | str] = {
            "state_bytes": model.profile.optimizer.state_bytes,
            "in_8_bit_bytes": model.optimizer.cost(run).state_bytes,
            **_part_of_the_run(model, choice, quantizes_optimizer=False),
        }
        yield QuantizeOptimizer(OPTIMIZER_BUCKET_BYTES, reason=_lossy_reason(config, "use_8bit_optimizer", numbers))


def _part_of_the_run(model: CostModel, choice: Choice, **without: Any) -> dict[str, int | float | str]:
    """What one part of the run frees and costs: this very plan without it, and with it."""
    other = Choice(choice.blocks, dataclasses.replace(choice.run, **without))
    treatments = {treatment for _, treatment in choice.blocks} or {"keep"}
    if not model.can_run(other.run) or not all(model.can_treat(other.run, treatment) for treatment in treatments):
        return {}  # one of a pair that was traced together only
    before, after = model.evaluate(other), model.evaluate(choice)
    return {
        "frees_bytes": before.peak_bytes - after.peak_bytes,
        "costs_ms": round(after.step_ms - before.step_ms, 4),
    }


def asked_for(model: CostModel, config: Config, dtype: Literal["bfloat16", "float16"] | None) -> Iterator[Action]:
    """Lossy techniques that the user has named: they are used even where nothing is needed."""
    if dtype is not None and config.asks_for("use_mixed_precision"):
        yield MixedPrecision(dtype, _lossy_reason(config, "use_mixed_precision", {}))
    if config.asks_for("use_8bit_optimizer") and model.profile.optimizer.state_bytes:
        yield QuantizeOptimizer(OPTIMIZER_BUCKET_BYTES, reason=_lossy_reason(config, "use_8bit_optimizer", {}))


def _lossy_reason(config: Config, name: str, numbers: dict[str, int | float | str]) -> Reason:
    why = f"{name}=True" if config.asks_for(name) else f"mode {config.mode.value}: nothing exact suffices"
    return Reason(why, numbers)


def _block_actions(module_fqn: str, treatment: Treatment, reason: Reason) -> Iterator[Action]:
    match treatment:
        case "checkpoint" | "checkpoint+offload":
            yield Checkpoint(module_fqn, reason=reason)
        case "selective":
            yield Checkpoint(module_fqn, keep=("matmul", "attention"), reason=reason)
        case "stream" | "stream+offload":
            yield StreamParameters(module_fqn, reason)
        case "keep" | "offload":
            pass
        case _:
            assert_never(treatment)
    if "offload" in treatment:
        yield OffloadActivations(module_fqn, reason)


def _reason(model: CostModel, module_fqn: str, treatment: Treatment) -> Reason:
    numbers: dict[str, int | float | str] = {"frees_bytes": model.saved_bytes(module_fqn, treatment)}
    if treatment.startswith("stream"):
        numbers["parameter_bytes"] = model.blocks[module_fqn].param_bytes
    numbers["costs_ms"] = round(model.extra_ms(module_fqn, treatment), 4)
    return Reason(NAME_OF[treatment], numbers)


def _rest_reason(model: CostModel) -> Reason:
    return Reason("stream parameters", {"parameter_bytes": model.profile.rest_param_bytes})


def cut_inside(coarsest: tuple[TileAttention | TileMlp, ...], num_tiles: int) -> tuple[TileAttention | TileMlp, ...]:
    """Attention and MLPs in so many tiles, from those in two."""
    return tuple(
        dataclasses.replace(action, num_tiles=num_tiles)
        if isinstance(action, TileMlp)
        else dataclasses.replace(action, rows=-(-2 * action.rows // num_tiles))
        for action in coarsest
    )


def _head_reason(model: CostModel, choice: Choice) -> Reason:
    part = _part_of_the_run(model, choice, head_rows=0)
    return Reason("tile the head", {**part, "rows": choice.run.head_rows})


def _inside_reason(model: CostModel, choice: Choice) -> Reason:
    part = _part_of_the_run(model, choice, num_tiles=0)
    return Reason("tile attention and MLPs inside the layers", {**part, "tiles": choice.run.num_tiles})


def _tiled_inside(model: CostModel, layer: Layer, run: Run) -> tuple[str, ...]:
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
        techniques, reason = (NAME_OF[treatment],), _reason(model, layer.module_fqn, treatment)
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
    )


def _with_tiles(reason: Reason, run: Run) -> Reason:
    return Reason(f"{reason.rule}; tiles inside", {**reason.numbers, "tiles": run.num_tiles})


def explain_misfit(profile: Profile, plan: Plan, config: Config, smaller: str | None = None, tried: str = "") -> str:
    """What is missing, and the nearest thing that does fit.

    `smaller` is a batch or a sequence that was found to fit, "" when there is none, and `tried` is what was looked at
    for it; None: nobody looked, and the batch that the activations' share suggests is named.
    """
    peak, budget = plan.predicted_peak_bytes, plan.budget_bytes
    switches = ("enable_checkpointing", "enable_offloading", "enable_tiling")
    untried = " and ".join(name for name in switches if not getattr(config, name))
    batch = max((spec.shape[0] for spec in profile.inputs if spec.shape), default=0)
    if smaller is None:
        suggested = _fitting_batch(profile, peak, budget, batch)
        smaller = f"lower the batch size from {batch} to {suggested} (an estimate, not tried)" if suggested else ""
    remedies = [*([smaller] if smaller else []), f"raise the budget to {show_bytes(peak)}"]
    return (
        f"The peak is {show_bytes(peak)} after every enabled technique (mode {plan.mode}); "
        f"the budget is {show_bytes(budget)}. To fit, {' or '.join(remedies)}."
        + (f" Sizes that were rehearsed: {tried}{'' if smaller else '; none of them fits'}." if tried else "")
        + (f" Off, and not tried: {untried}." if untried else "")
    )


def _fitting_batch(profile: Profile, peak: int, budget: int, batch: int) -> int:
    """The largest batch whose share of the activations fits; 0 when parameters and their company alone do not."""
    fixed = profile.static_bytes - profile.input_bytes + profile.plain.end_bytes
    if batch < 2 or peak <= fixed or budget <= fixed:
        return 0
    return min(batch - 1, int(batch * (budget - fixed) / (peak - fixed)))
