"""Stage 2: the cheapest plan that fits. A pure function of frozen data; it sees no module and no tensor.

A choice says for each block what is done to it, and for the run how large the tiles are and where the optimizer's
state waits. `_search` offers the choices that no other beats, whatever the budget is; the fastest that fits is taken.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from memscale._config import Config
from memscale._errors import DoesNotFitError
from memscale._hardware import Hardware
from memscale._peak import Choice, CostModel, Outcome, Run, Treatment
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
    TileAttention,
    TileMlp,
)
from memscale._profile import Layer, Profile
from memscale._search import Candidate, search
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
    candidates = find_candidates(model, baseline, budget, config)
    placeable = [c for c in candidates if dataclasses.replace(budget, device_bytes=2**63).admits(c.outcome)]
    smallest = min(placeable, key=lambda c: (c.outcome.peak_bytes, round(c.outcome.step_ms, 9), c.choice.num_actions))
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
    fastest = min(fitting, key=lambda c: (round(c.outcome.step_ms, 9), c.outcome.peak_bytes, c.choice.num_actions))
    return fastest, Reason("the fastest of the candidates that fit", numbers)


def find_candidates(model: CostModel, baseline: Outcome, budget: Budget, config: Config) -> list[Candidate]:
    """What the config makes eligible and no other candidate beats. It does not depend on the device's budget."""
    found = [Candidate(Choice(), baseline)]
    for treatment in model.whole_treatments:
        if _is_allowed(treatment, config):
            whole = Choice(tuple((fqn, treatment) for fqn in model.blocks))
            found.append(Candidate(whole, model.evaluate_whole(treatment)))
    allowed = [treatment for treatment in model.treatments if _is_allowed(treatment, config)]
    most = model.most_waiting_bytes()
    counts_waiting = most > budget.host_bytes
    return found + search(model, _runs(model, config), allowed, counts_waiting=counts_waiting)


def _runs(model: CostModel, config: Config) -> Iterator[Run]:
    """Every eligible way of running what is not a single block."""
    can_offload_optimizer = config.enable_offloading and model.profile.optimizer.offloaded_step_bytes is not None
    heads = (0, *model.head_rows) if config.enable_tiling else (0,)
    insides = (0, *model.num_tiles) if config.enable_tiling else (0,)
    optimizers = (False, True) if can_offload_optimizer else (False,)
    for head_rows, num_tiles, offloads_optimizer in itertools.product(heads, insides, optimizers):
        yield Run(head_rows, num_tiles, offloads_optimizer)


def _is_allowed(treatment: Treatment, config: Config) -> bool:
    if treatment in ("selective", "checkpoint"):
        return bool(config.enable_checkpointing)
    if treatment == "stream":
        return bool(config.enable_offloading and config.enable_checkpointing)
    return bool(config.enable_offloading)


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
    run = choice.run
    if run.num_tiles:
        actions += cut_inside(model.profile.inside, run.num_tiles)
    if run.head_rows:
        assert model.profile.head is not None
        actions.append(dataclasses.replace(model.profile.head, rows=run.head_rows, reason=_head_reason(model, run)))
    if run.offloads_optimizer:
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


def cut_inside(coarsest: tuple[TileAttention | TileMlp, ...], num_tiles: int) -> tuple[TileAttention | TileMlp, ...]:
    """Attention and MLPs in so many tiles, from those in two."""
    return tuple(
        dataclasses.replace(action, num_tiles=num_tiles)
        if isinstance(action, TileMlp)
        else dataclasses.replace(action, rows=-(-2 * action.rows // num_tiles))
        for action in coarsest
    )


def _head_reason(model: CostModel, run: Run) -> Reason:
    plain = model.evaluate(Choice()).peak_bytes
    tiled = model.evaluate(Choice((), Run(head_rows=run.head_rows))).peak_bytes
    return Reason("tile the head", {"frees_bytes": plain - tiled, "rows": run.head_rows})


def _row(model: CostModel, layer: Layer, choice: Choice) -> LayerRow:
    treatment = dict(choice.blocks).get(layer.module_fqn)
    head = model.profile.head
    techniques: tuple[str, ...]
    if treatment is not None:
        techniques, reason = (_NAME_OF[treatment],), _reason(model, layer.module_fqn, treatment)
    elif choice.run.head_rows and head is not None and head.module_fqn == layer.module_fqn:
        techniques, reason = ("tile the head",), _head_reason(model, choice.run)
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
