"""A choice, written down as a plan: actions with their reasons, a row a layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from memscale._config import Config
from memscale._decide.bound import least_ms
from memscale._decide.choice import Choice, Outcome, actions_of, block_actions
from memscale._decide.chosen import Chosen, lossy_reason
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import Eligible
from memscale._decide.pareto import slowdown
from memscale._decide.search import Candidate
from memscale._plan import Action, Conditions, DecisionSource, FrontPoint, LayerAction, LayerRow, Plan, Reason
from memscale._profile import Layer, Treatment
from memscale.report.explain import words_of_block
from memscale.techniques import technique_of
from memscale.techniques.offload.pinned import arriving_bytes, segments_bytes
from memscale.techniques.technique import Technique

_SPEEDS = (
    "fp32_flops",
    "half_flops",
    "matmul_efficiency",
    "half_matmul_efficiency",
    "memory_efficiency",
    "memory_bytes_per_s",
    "host_bytes_per_s",
    "link_bytes_per_s",
    "blocking_link_bytes_per_s",
    "launch_s",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, and why: what becomes a plan."""

    source: DecisionSource
    baseline: Outcome
    """The plain step's."""
    chosen: Candidate
    fits: bool
    summary: Reason
    front: tuple[FrontPoint, ...] = ()
    """What there was to choose among."""
    front_note: str = ""


def write_plan(model: CostModel, eligible: Eligible, decision: Decision) -> Plan:
    """The plan that does what was chosen."""
    profile, config, baseline, chosen = model.profile, eligible.config, decision.baseline, decision.chosen
    outcome, budget_bytes = chosen.outcome, eligible.budget.device_bytes
    host_bytes, movable_bytes = taken_elsewhere(model, eligible, chosen)
    return Plan(
        actions=tuple(_actions(model, eligible, chosen.choice)),
        baseline_peak_bytes=baseline.peak_bytes,
        predicted_peak_bytes=outcome.peak_bytes,
        predicted_slowdown=slowdown(chosen, baseline),
        budget_bytes=budget_bytes,
        fits=decision.fits,
        decision_source=decision.source,
        mode=config.mode.value,
        device_type=model.hardware.device_type,
        device_name=model.hardware.device_name,
        optimizer_name=profile.optimizer.name,
        profile_source=profile.source,
        model_class=profile.model_class,
        inputs=tuple(f"{s.name}: {'x'.join(map(str, s.shape)) or 'scalar'} {s.dtype}" for s in profile.inputs),
        summary=decision.summary,
        rows=tuple(_row(model, eligible, layer, chosen.choice) for layer in profile.layers),
        host_bytes=host_bytes,
        movable_bytes=movable_bytes,
        front=decision.front,
        front_note=decision.front_note,
        conditions=conditions_of(eligible),
        loop_bytes=profile.loop_bytes,
        least_slowdown=_least_slowdown(model, eligible, baseline, _bounded_bytes(config, budget_bytes, outcome)),
        baseline_step_ms=round(baseline.step_ms, 3) or None,
    )


def taken_elsewhere(model: CostModel, eligible: Eligible, chosen: Candidate) -> tuple[int, int]:
    """What is taken on the host, and on the host or the disk. For overlap it is pinned, which takes some more; but no
    more than the budget, within which stores take smaller segments."""
    outcome, run = chosen.outcome, chosen.choice.run
    if not outcome.waiting_bytes or not model.pace.overlaps:
        return outcome.host_bytes, outcome.movable_bytes
    seen, profile = Chosen(model, eligible, chosen.choice), model.profile
    gradients = seen.streamed_bytes + profile.rest_trainable_bytes * run.streams_rest
    shared = profile.rest_shared_bytes * run.streams_rest
    arriving = arriving_bytes(gradients, shared, stays=run.steps_on_device)
    most = eligible.budget.host_bytes
    host_bytes = max(outcome.host_bytes, min(outcome.host_bytes + arriving, most - outcome.movable_bytes))
    movable_bytes = max(outcome.movable_bytes, min(segments_bytes(outcome.movable_bytes), most - host_bytes))
    return host_bytes, movable_bytes


def _bounded_bytes(config: Config, budget_bytes: int, outcome: Outcome) -> int:
    """The peak that the plan's time is compared at: its own, where it is to go as low as it can."""
    return outcome.peak_bytes if config.force_optimize else max(budget_bytes, outcome.peak_bytes)


def _least_slowdown(model: CostModel, eligible: Eligible, baseline: Outcome, budget_bytes: int) -> float | None:
    """The bound on the slowdown, rounded down: a bound must not be above what it bounds."""
    if not baseline.step_ms:
        return None
    least = least_ms(model, budget_bytes, host_step=may_step_on_host(model, eligible))
    return max(1.0, math.floor(least / baseline.step_ms * 1e4) / 1e4)


def may_step_on_host(model: CostModel, eligible: Eligible) -> bool:
    """Streamed parameters, also where there is no other way."""
    return eligible.host_step or model.profile.guests is None


def conditions_of(eligible: Eligible) -> Conditions:
    """What the numbers of a plan rest on that is made with this eligible."""
    travel = eligible.travel
    transfers = travel.transfers
    speeds = {name: getattr(eligible.hardware, name) for name in _SPEEDS}
    return Conditions(
        async_offload=travel.overlaps,
        prefetch_depth=transfers.prefetch_depth,
        prefetch_bytes=transfers.prefetch_bytes,
        window_bytes=transfers.window_bytes,
        min_tensor_bytes=transfers.min_tensor_bytes,
        speeds={name: float(value) for name, value in speeds.items() if value},
    )


# ---- actions, and why


def _actions(model: CostModel, eligible: Eligible, choice: Choice) -> Iterator[Action]:
    """The actions of the plan, with their reasons."""
    treated, chosen = dict(choice.blocks), Chosen(model, eligible, choice)
    of_the_run: dict[str, Reason] = {}  # tiles are many, and each would evaluate the plan anew
    for action in actions_of(choice, model.profile):
        technique = technique_of(action)
        treatment = treated.get(action.module_fqn) if isinstance(action, LayerAction) else None
        if technique.traits is not None and treatment is not None and isinstance(action, LayerAction):
            reason = _reason(model, action.module_fqn, treatment)
        else:
            reason = of_the_run.get(technique.name) or _run_reason(technique, chosen)
            of_the_run[technique.name] = reason
        yield dataclasses.replace(action, reason=reason)


def _run_reason(technique: Technique, chosen: Chosen) -> Reason:
    assert technique.reason is not None, "what has an option has a rule for it"
    return technique.reason(chosen)


def asked_for(model: CostModel, eligible: Eligible) -> Iterator[Action]:
    """Lossy techniques that the user has named: they are used even where nothing is needed."""
    for technique in eligible.techniques:
        option = technique.option
        if option is not None and option.asked_for is not None and eligible.must_use(technique):
            for action in option.asked_for(model.profile, eligible):
                yield dataclasses.replace(action, reason=lossy_reason(eligible.config, technique.switch, {}))


def _reason(model: CostModel, module_fqn: str, treatment: Treatment) -> Reason:
    numbers: dict[str, int | float | str] = {"frees_bytes": model.saved_bytes(module_fqn, treatment)}
    if treatment.streams:
        numbers["parameter_bytes"] = model.blocks[module_fqn].param_bytes
    numbers["costs_ms"] = round(model.extra_ms(module_fqn, treatment), 4)
    return Reason(_words(treatment), numbers)


def _words(treatment: Treatment) -> str:
    return words_of_block(block_actions("", treatment))


# ---- rows


def _row(model: CostModel, eligible: Eligible, layer: Layer, choice: Choice) -> LayerRow:
    treatment = dict(choice.blocks).get(layer.module_fqn)
    shown = [(technique, words) for technique in choice.run.techniques if (words := _in_row(technique, layer, model))]
    around = [(technique, words) for technique, words in shown if technique.scope != "inside"]
    techniques: tuple[str, ...]
    if treatment is not None:
        techniques, reason = (_words(treatment),), _reason(model, layer.module_fqn, treatment)
    elif around:
        techniques = tuple(word for _, words in around for word in words)
        reason = _run_reason(around[0][0], Chosen(model, eligible, choice))
    else:
        why = "not needed for the budget" if layer.is_block else "not a block, and kept as it is"
        techniques, reason = (), Reason(why)
    for technique, words in shown:
        if technique.scope == "inside" and technique.option is not None:
            number = getattr(choice.run, technique.option.field)
            techniques = (*techniques, *words)
            reason = Reason(f"{reason.rule}; tiles inside", {**reason.numbers, "tiles": number})
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


def _in_row(technique: Technique, layer: Layer, model: CostModel) -> tuple[str, ...]:
    in_row = technique.option.in_row if technique.option is not None else None
    return () if in_row is None else in_row(layer, model.profile)
