"""Stage 2: the cheapest plan that fits. A pure function of frozen data; it sees no module and no tensor.

A choice says for each block what is done to it, and for the run whether the head is tiled and the optimizer's state
waits elsewhere. Blocks are ranked once, by bytes freed for each millisecond; candidates treat prefixes of that ranking.
The family of candidates does not depend on the budget, so a larger budget can never give a slower plan.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from memscale._config import Config
from memscale._errors import DoesNotFitError
from memscale._hardware import Hardware
from memscale._peak import Choice, CostModel, Outcome, Treatment
from memscale._plan import (
    Action,
    Checkpoint,
    DecisionSource,
    LayerRow,
    MixedPrecision,
    OffloadActivations,
    OffloadOptimizer,
    Plan,
    QuantizeOptimizer,
    Reason,
    StreamParameters,
)
from memscale._profile import Layer, Profile
from memscale._units import show_bytes

OPTIMIZER_BUCKET_BYTES = 16 * 1024 * 1024
"""State is brought to the device in pieces that belong to parameters of this many bytes."""
HOST_MARGIN = 0.1
"""The share of available host memory that offloading leaves alone, unless told how much it may use."""

_NAME_OF: dict[Treatment, str] = {
    "selective": "checkpoint (selective)",
    "checkpoint": "checkpoint",
    "offload": "offload activations",
    "stream": "stream parameters",
}
_MIXTURE_STEPS = 12
"""Mixtures of treatments are tried at this many lengths each; prefixes of one kind block by block."""


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A choice, and what it comes to."""

    choice: Choice
    outcome: Outcome


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """What a plan may use."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int

    def admits(self, outcome: Outcome) -> bool:
        waits = outcome.host_bytes + outcome.movable_bytes
        return (
            outcome.peak_bytes <= self.device_bytes
            and outcome.host_bytes <= self.host_bytes
            and waits <= self.host_bytes + self.disk_bytes
        )


def budget_bytes(hardware: Hardware, config: Config) -> int:
    """What a plan may fill: the hard budget, else the utilisation's share of the memory, or what others leave of it."""
    if config.memory_budget_gb is not None:
        return int(config.memory_budget_gb * 1e9)
    return min(int(hardware.total_bytes * config.target_gpu_utilization), hardware.free_bytes)


def full_budget(hardware: Hardware, config: Config) -> Budget:
    """Device, host and disk. On a CPU the host is the device, and the next tier is the disk."""
    if hardware.device_type == "cpu":
        host = 0
    elif config.max_cpu_offload_gb is not None:
        host = int(config.max_cpu_offload_gb * 1e9)
    else:
        host = int(hardware.host_available_bytes * (1 - HOST_MARGIN))
    disk = (hardware.disk_free_bytes or 0) if config.offload_dir is not None else 0
    return Budget(budget_bytes(hardware, config), host, disk)


def needs_optimizing(profile: Profile, hardware: Hardware, config: Config) -> bool:
    """The smart skip: a model that fits as it is is left alone, unless the user insists."""
    baseline = CostModel(profile, hardware).evaluate(Choice())
    return config.force_optimize or baseline.peak_bytes > budget_bytes(hardware, config)


def decide(
    profile: Profile,
    hardware: Hardware,
    config: Config,
    decision_source: DecisionSource = "user_config",
    *,
    margin_bytes: int = 0,
    raise_if_unfit: bool = True,
) -> Plan:
    """The plan for this profile on this hardware under this config; `DoesNotFitError` when there is none.

    `margin_bytes` is how far the peak model was found to be below a rehearsal: candidates must fit with it added.
    """
    model = CostModel(profile, hardware, overlaps=config.async_offload)
    baseline = model.evaluate(Choice())
    budget = full_budget(hardware, config)
    if not needs_optimizing(profile, hardware, config):
        numbers = {"baseline_bytes": baseline.peak_bytes, "budget_bytes": budget.device_bytes}
        chosen, summary = Candidate(Choice(), baseline), Reason("smart skip: fits as it is", {**numbers})
    else:
        tighter = dataclasses.replace(budget, device_bytes=budget.device_bytes - margin_bytes)
        chosen, summary = _choose(model, baseline, tighter, config)
    plan = _write_plan(model, config, decision_source, baseline, chosen, budget, summary)
    if raise_if_unfit and not plan.fits:
        raise DoesNotFitError(explain_misfit(profile, plan, config))
    return plan


def _choose(model: CostModel, baseline: Outcome, budget: Budget, config: Config) -> tuple[Candidate, Reason]:
    candidates = list(_candidates(model, baseline, config))
    waiting = dataclasses.replace(budget, device_bytes=2**63)
    placeable = [c for c in candidates if waiting.admits(c.outcome)]
    smallest = min(placeable, key=lambda c: (c.outcome.peak_bytes, c.outcome.step_ms, c.choice.num_actions))
    numbers: dict[str, int | float | str] = {
        "baseline_bytes": baseline.peak_bytes,
        "budget_bytes": budget.device_bytes,
        "candidates": len(candidates),
    }
    if config.force_optimize:
        return smallest, Reason("force_optimize: the lowest peak that the mode allows", numbers)
    fitting = [c for c in placeable if budget.admits(c.outcome)]
    if not fitting:
        return smallest, Reason("nothing fits: the lowest peak that the mode allows", numbers)
    fastest = min(fitting, key=lambda c: (c.outcome.step_ms, c.outcome.peak_bytes, c.choice.num_actions))
    return fastest, Reason("the fastest of the candidates that fit", numbers)


def _candidates(model: CostModel, baseline: Outcome, config: Config) -> Iterator[Candidate]:
    yield Candidate(Choice(), baseline)
    can_offload_optimizer = config.enable_offloading and model.profile.optimizer.offloaded_step_bytes is not None
    heads = (False, True) if config.enable_tiling and model.can_tile_head else (False,)
    optimizers = (False, True) if can_offload_optimizer else (False,)
    for treatment in model.whole_treatments:
        if _is_allowed(treatment, config):
            whole = Choice(tuple((fqn, treatment) for fqn in model.blocks))
            yield Candidate(whole, model.evaluate_whole(treatment))
    for blocks in _block_choices(model, config):
        insides = (False, True) if config.enable_tiling and model.can_tile_inside(blocks) else (False,)
        for tiles_head, tiles_inside, offloads_optimizer in itertools.product(heads, insides, optimizers):
            choice = Choice(blocks, tiles_head, tiles_inside, offloads_optimizer)
            if choice.num_actions:
                yield Candidate(choice, model.evaluate(choice))


def _block_choices(model: CostModel, config: Config) -> Iterator[tuple[tuple[str, Treatment], ...]]:
    """Nothing; prefixes of the ranking under one treatment; and under several, the smallest first, in strides."""
    yield ()
    allowed = [treatment for treatment in model.treatments if _is_allowed(treatment, config)]
    rankings = {treatment: _ranking(model, treatment) for treatment in allowed}
    for treatment in allowed:
        for length in range(1, len(rankings[treatment]) + 1):
            yield tuple((fqn, treatment) for fqn in rankings[treatment][:length])
    yield from _mixtures(rankings, tuple(reversed(allowed)))


def _is_allowed(treatment: Treatment, config: Config) -> bool:
    if treatment in ("selective", "checkpoint"):
        return bool(config.enable_checkpointing)
    if treatment == "stream":
        return bool(config.enable_offloading and config.enable_checkpointing)
    return bool(config.enable_offloading)


def _mixtures(
    rankings: dict[Treatment, list[str]], order: tuple[Treatment, ...]
) -> Iterator[tuple[tuple[str, Treatment], ...]]:
    """A stretch of each treatment along the best ranking: streamed blocks first, then checkpointed, and so on."""
    if len(order) < 2:
        return
    ranking = rankings[order[0]] or rankings[order[1]]
    stride = max(1, -(-len(ranking) // _MIXTURE_STEPS))
    lengths = sorted({*range(0, len(ranking) + 1, stride), len(ranking)})
    for stretches in itertools.product(lengths, repeat=len(order)):
        if sum(stretches) <= len(ranking) and sum(map(bool, stretches)) > 1:
            position, blocks = 0, []
            for treatment, stretch in zip(order, stretches, strict=True):
                worthy = set(rankings[treatment])
                blocks += [(fqn, treatment) for fqn in ranking[position : position + stretch] if fqn in worthy]
                position += stretch
            yield tuple(blocks)


def _ranking(model: CostModel, treatment: Treatment) -> list[str]:
    """Blocks worth treating, the best bargain first; among equals the earliest, whose recompute comes last."""
    worth = []
    for fqn, layer in model.blocks.items():
        frees = model.saved_bytes(fqn, treatment) + (layer.param_bytes if treatment == "stream" else 0)
        if layer.num_calls and frees > 0:
            worth.append((fqn, frees / max(model.extra_ms(fqn, treatment), 1e-6)))
    # Rounded, so that layers that differ by noise of no meaning keep their order in the model.
    return [fqn for fqn, bargain in sorted(worth, key=lambda entry: -float(f"{entry[1]:.2g}"))]


def _write_plan(
    model: CostModel,
    config: Config,
    decision_source: DecisionSource,
    baseline: Outcome,
    chosen: Candidate,
    budget: Budget,
    summary: Reason,
) -> Plan:
    profile, outcome = model.profile, chosen.outcome
    lossy = _lossy_actions(model, config, is_skip=summary.rule.startswith("smart skip"))
    return Plan(
        actions=(*_actions(model, chosen.choice, outcome), *lossy),
        baseline_peak_bytes=baseline.peak_bytes,
        predicted_peak_bytes=outcome.peak_bytes,
        predicted_slowdown=round(outcome.step_ms / baseline.step_ms, 4) if baseline.step_ms else 1.0,
        budget_bytes=budget.device_bytes,
        fits=budget.admits(outcome),
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
    )


def _actions(model: CostModel, choice: Choice, outcome: Outcome) -> tuple[Action, ...]:
    """In the model's order, not in that of the ranking: a plan is read by people."""
    treated = dict(choice.blocks)
    actions: list[Action] = [
        _block_action(fqn, treated[fqn], _reason(model, fqn, treated[fqn])) for fqn in model.blocks if fqn in treated
    ]
    if choice.tiles_inside:
        actions += model.profile.inside
    if choice.tiles_head:
        assert model.profile.head is not None
        actions.append(dataclasses.replace(model.profile.head, reason=_head_reason(model)))
    if choice.offloads_optimizer:
        numbers: dict[str, int | float | str] = {"state_bytes": model.profile.optimizer.state_bytes}
        reason = Reason("offload optimizer state: the device holds one bucket of it", numbers)
        actions.append(OffloadOptimizer(OPTIMIZER_BUCKET_BYTES, reason))
    return tuple(actions)


def _lossy_actions(model: CostModel, config: Config, *, is_skip: bool) -> Iterator[Action]:
    """Techniques that are not exact: what was asked for by name always, what the mode allows only under pressure."""
    hardware, optimizer = model.hardware, model.profile.optimizer
    if config.use_mixed_precision and (config.asks_for("use_mixed_precision") or not is_skip):
        dtype = MixedPrecision.choose_dtype(
            hardware.device_type,
            supports_bf16=hardware.supports_bf16,
            supports_fp16=hardware.supports_fp16,
            has_fast_16bit=hardware.has_fast_16bit,
        )
        if dtype is not None:
            yield MixedPrecision(dtype, _lossy_reason(config, "use_mixed_precision", {}))
    if config.use_8bit_optimizer and (config.asks_for("use_8bit_optimizer") or not is_skip) and optimizer.state_bytes:
        numbers: dict[str, int | float | str] = {"state_bytes": optimizer.state_bytes}
        reason = _lossy_reason(config, "use_8bit_optimizer", numbers)
        yield QuantizeOptimizer(OPTIMIZER_BUCKET_BYTES, reason=reason)


def _lossy_reason(config: Config, name: str, numbers: dict[str, int | float | str]) -> Reason:
    why = f"{name}=True" if config.asks_for(name) else f"mode {config.mode.value}, under pressure"
    return Reason(why, numbers)


def _block_action(module_fqn: str, treatment: Treatment, reason: Reason) -> Action:
    match treatment:
        case "checkpoint":
            return Checkpoint(module_fqn, reason=reason)
        case "selective":
            return Checkpoint(module_fqn, keep=("matmul", "attention"), reason=reason)
        case "offload":
            return OffloadActivations(module_fqn, reason)
        case "stream":
            return StreamParameters(module_fqn, reason)
    raise AssertionError(f"{treatment} is no treatment with an action")


def _reason(model: CostModel, module_fqn: str, treatment: Treatment) -> Reason:
    numbers: dict[str, int | float | str] = {"frees_bytes": model.saved_bytes(module_fqn, treatment)}
    if treatment == "stream":
        numbers["parameter_bytes"] = model.blocks[module_fqn].param_bytes
    numbers["costs_ms"] = round(model.extra_ms(module_fqn, treatment), 4)
    return Reason(_NAME_OF[treatment], numbers)


def _head_reason(model: CostModel) -> Reason:
    plain, tiled = model.profile.plain, model.profile.variants["tile_head"]
    return Reason("tile the head", {"frees_bytes": plain.peak_bytes - tiled.peak_bytes})


def _row(model: CostModel, layer: Layer, choice: Choice) -> LayerRow:
    treatment = dict(choice.blocks).get(layer.module_fqn)
    head = model.profile.head
    techniques: tuple[str, ...]
    if treatment is not None:
        techniques, reason = (_NAME_OF[treatment],), _reason(model, layer.module_fqn, treatment)
    elif choice.tiles_head and head is not None and head.module_fqn == layer.module_fqn:
        techniques, reason = ("tile the head",), _head_reason(model)
    else:
        why = "not needed for the budget" if layer.is_block else "no block: embeddings, stem or head"
        techniques, reason = (), Reason(why)
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


def explain_misfit(profile: Profile, plan: Plan, config: Config) -> str:
    """What is missing, and the nearest thing that does fit."""
    peak, budget = plan.predicted_peak_bytes, plan.budget_bytes
    switches = ("enable_checkpointing", "enable_offloading", "enable_tiling")
    remedies = [f"set {name}=True" for name in switches if not getattr(config, name)]
    batch = max((spec.shape[0] for spec in profile.inputs if spec.shape), default=0)
    smaller = _fitting_batch(profile, peak, budget, batch)
    if smaller:
        remedies.append(f"lower the batch size from {batch} to {smaller}")
    remedies.append(f"raise the budget to {show_bytes(peak)}")
    return (
        f"The peak is {show_bytes(peak)} after every enabled technique (mode {plan.mode}); "
        f"the budget is {show_bytes(budget)}. To fit, {' or '.join(remedies)}."
    )


def _fitting_batch(profile: Profile, peak: int, budget: int, batch: int) -> int:
    """The largest batch whose share of the activations fits; 0 when parameters and their company alone do not."""
    fixed = profile.static_bytes - profile.input_bytes + profile.plain.end_bytes
    if batch < 2 or peak <= fixed or budget <= fixed:
        return 0
    return min(batch - 1, int(batch * (budget - fixed) / (peak - fixed)))
