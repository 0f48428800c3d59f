"""Stage 2: the cheapest plan that fits. A pure function of frozen data; it sees no module and no tensor.

With checkpointing as the technique, a plan says for each block: keep, recompute all but matmul and attention
outputs (selective), or recompute everything. Blocks are ranked once, by bytes freed for each millisecond of
recompute; candidates treat a prefix of that ranking. The family of candidates does not depend on the budget, so a
larger budget can never give a slower plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

from memscale._config import Config
from memscale._errors import DoesNotFitError
from memscale._hardware import Hardware
from memscale._peak import CostModel, Outcome, Treatment
from memscale._plan import Action, Checkpoint, DecisionSource, LayerRow, Plan, Reason
from memscale._profile import Layer, Profile
from memscale._units import show_bytes

_KEEP_OF: dict[Treatment, tuple[Literal["matmul", "attention"], ...]] = {
    "selective": ("matmul", "attention"),
    "checkpoint": (),
}
_NAME_OF: dict[Treatment, str] = {"selective": "checkpoint (selective)", "checkpoint": "checkpoint"}

_MIXTURE_STEPS = 24
"""Mixtures of full and selective checkpointing are tried at this many lengths each."""

Assignment = dict[str, Treatment]


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """An assignment of treatments to blocks, and what it comes to."""

    assignment: tuple[tuple[str, Treatment], ...]
    outcome: Outcome


def budget_bytes(hardware: Hardware, config: Config) -> int:
    """What a plan may fill: the hard budget, else the utilisation's share of the memory, or what others leave of it."""
    if config.memory_budget_gb is not None:
        return int(config.memory_budget_gb * 1e9)
    return min(int(hardware.total_bytes * config.target_gpu_utilization), hardware.free_bytes)


def needs_optimizing(profile: Profile, hardware: Hardware, config: Config) -> bool:
    """The smart skip: a model that fits as it is is left alone, unless the user insists."""
    baseline = CostModel(profile, hardware).evaluate({})
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
    model = CostModel(profile, hardware)
    baseline = model.evaluate({})
    budget = budget_bytes(hardware, config)
    if not needs_optimizing(profile, hardware, config):
        summary = Reason("smart skip: fits as it is", {"baseline_bytes": baseline.peak_bytes, "budget_bytes": budget})
        chosen = Candidate((), baseline)
    else:
        chosen, summary = _choose(model, baseline, budget - margin_bytes, config)
    plan = _write_plan(model, hardware, config, decision_source, baseline, chosen, budget, summary)
    if raise_if_unfit and not plan.fits:
        raise DoesNotFitError(explain_misfit(profile, plan, config))
    return plan


def _choose(model: CostModel, baseline: Outcome, budget: int, config: Config) -> tuple[Candidate, Reason]:
    candidates = list(_candidates(model, baseline, config))
    smallest = min(candidates, key=lambda c: (c.outcome.peak_bytes, c.outcome.step_ms, len(c.assignment)))
    numbers: dict[str, int | float | str] = {
        "baseline_bytes": baseline.peak_bytes,
        "budget_bytes": budget,
        "candidates": len(candidates),
    }
    if config.force_optimize:
        return smallest, Reason("force_optimize: the lowest peak that the mode allows", numbers)
    fitting = [c for c in candidates if c.outcome.peak_bytes <= budget]
    if not fitting:
        return smallest, Reason("nothing fits: the lowest peak that the mode allows", numbers)
    fastest = min(fitting, key=lambda c: (c.outcome.step_ms, c.outcome.peak_bytes, len(c.assignment)))
    return fastest, Reason("the fastest of the candidates that fit", numbers)


def _candidates(model: CostModel, baseline: Outcome, config: Config) -> Iterator[Candidate]:
    """Nothing; then a fully checkpointed prefix of the ranking, a selective stretch behind it, the rest kept.

    Prefixes of one kind are tried block by block, mixtures in strides that bound the number of candidates.
    """
    yield Candidate((), baseline)
    if not config.enable_checkpointing:
        return
    ranking = _ranking(model)
    for treatment in model.treatments:
        if not model.can_mix(treatment):
            yield _candidate(model, dict.fromkeys(ranking, treatment))
    full = ranking if "checkpoint" in model.treatments and model.can_mix("checkpoint") else []
    selective = ranking if "selective" in model.treatments and model.can_mix("selective") else []
    stride = -(-len(ranking) // _MIXTURE_STEPS)
    for num_full in range(len(full) + 1):
        longest = len(selective) - num_full if selective else 0
        for stretch in range(longest + 1):
            is_pure = num_full == 0 or stretch in (0, longest)
            if num_full + stretch and (is_pure or (num_full % stride == 0 and stretch % stride == 0)):
                assignment: Assignment = dict.fromkeys(ranking[:num_full], "checkpoint")
                assignment |= dict.fromkeys(ranking[num_full : num_full + stretch], "selective")
                yield _candidate(model, assignment)


def _candidate(model: CostModel, assignment: Assignment) -> Candidate:
    return Candidate(tuple(assignment.items()), model.evaluate(assignment))


def _ranking(model: CostModel) -> list[str]:
    """Blocks worth treating, the best bargain first; among equals the earliest, whose recompute comes last."""
    treatment: Treatment = "checkpoint" if "checkpoint" in model.treatments else "selective"
    if treatment not in model.treatments:
        return []
    worth = [
        (
            layer.module_fqn,
            model.saved_bytes(layer.module_fqn, treatment),
            model.extra_ms(layer.module_fqn, treatment),
        )
        for layer in model.profile.layers
        if layer.is_block and layer.num_calls
    ]
    worth = [entry for entry in worth if entry[1] > 0]
    # Rounded, so that layers that differ by noise of no meaning keep their order in the model.
    return [entry[0] for entry in sorted(worth, key=lambda entry: -round(entry[1] / max(entry[2], 1e-6), -3))]


def _write_plan(
    model: CostModel,
    hardware: Hardware,
    config: Config,
    decision_source: DecisionSource,
    baseline: Outcome,
    chosen: Candidate,
    budget: int,
    summary: Reason,
) -> Plan:
    profile = model.profile
    reasons = {fqn: _reason(model, fqn, treatment) for fqn, treatment in chosen.assignment}
    assignment = dict(chosen.assignment)
    return Plan(
        actions=_actions(profile, assignment, reasons),
        baseline_peak_bytes=baseline.peak_bytes,
        predicted_peak_bytes=chosen.outcome.peak_bytes,
        predicted_slowdown=round(chosen.outcome.step_ms / baseline.step_ms, 4) if baseline.step_ms else 1.0,
        budget_bytes=budget,
        fits=chosen.outcome.peak_bytes <= budget,
        decision_source=decision_source,
        mode=config.mode.value,
        device_type=hardware.device_type,
        device_name=hardware.device_name,
        optimizer_name=profile.optimizer.name,
        profile_source=profile.source,
        model_class=profile.model_class,
        inputs=tuple(f"{s.name}: {'x'.join(map(str, s.shape)) or 'scalar'} {s.dtype}" for s in profile.inputs),
        summary=summary,
        rows=tuple(_row(model, layer, assignment, reasons) for layer in profile.layers),
    )


def _actions(profile: Profile, assignment: Assignment, reasons: dict[str, Reason]) -> tuple[Action, ...]:
    """In the model's order, not in that of the ranking: a plan is read by people."""
    return tuple(
        Checkpoint(layer.module_fqn, keep=_KEEP_OF[assignment[layer.module_fqn]], reason=reasons[layer.module_fqn])
        for layer in profile.layers
        if layer.module_fqn in assignment
    )


def _reason(model: CostModel, module_fqn: str, treatment: Treatment) -> Reason:
    return Reason(
        f"{_NAME_OF[treatment]}: frees activations",
        {
            "frees_bytes": model.saved_bytes(module_fqn, treatment),
            "recompute_ms": round(model.extra_ms(module_fqn, treatment), 4),
        },
    )


def _row(model: CostModel, layer: Layer, assignment: Assignment, reasons: dict[str, Reason]) -> LayerRow:
    treatment = assignment.get(layer.module_fqn)
    why_not = "not needed for the budget" if layer.is_block else "no block: embeddings, stem or head"
    return LayerRow(
        module_fqn=layer.module_fqn,
        class_name=layer.class_name,
        num_calls=layer.num_calls,
        param_bytes=layer.param_bytes,
        activation_bytes=model.activation_bytes(layer.module_fqn),
        forward_ms=round(model.forward_ms(layer.module_fqn), 4),
        techniques=(_NAME_OF[treatment],) if treatment else (),
        reason=reasons.get(layer.module_fqn, Reason(why_not)),
    )


def explain_misfit(profile: Profile, plan: Plan, config: Config) -> str:
    """What is missing, and the nearest thing that does fit."""
    peak, budget = plan.predicted_peak_bytes, plan.budget_bytes
    remedies = []
    if not config.enable_checkpointing:
        remedies.append("set enable_checkpointing=True")
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
