"""What the learned policy looks at: whole numbers without a unit, so that models and cards of all sizes are alike.

NOTE [whole numbers]: every feature is made from the plain step's integers by integer arithmetic, in thousandths and
rounded down, and rates of the hardware are rounded to integers before they are used. So the same profile, hardware,
budget and config give the same features on every machine, and with them the same walk through the trees: no result of a
mathematical library and no order of a floating-point sum is involved.
"""

from __future__ import annotations

from collections.abc import Iterable

from memscale._decide.choice import RunOptions
from memscale._decide.policy.situation import Situation
from memscale._decide.policy.strategies import STRATEGIES, WIDEST
from memscale._profile import KEEP, Segment

LEARNED_SWITCHES = {
    "can_checkpoint": "enable_checkpointing",
    "can_offload": "enable_offloading",
    "can_tile": "enable_tiling",
    "can_halve": "use_mixed_precision",
    "can_quantize": "use_8bit_optimizer",
}
"""The switch of the techniques that a policy may count on, by feature. A trained policy knows the features that it was
trained with, so a new technique is added here together with a newly trained policy."""
_MOST = 1_000_000
"""No feature is larger."""


def features_of(situation: Situation) -> dict[str, int]:
    """The features by name, always in the same order."""
    found = {**_bytes(situation), **_times(situation), **_room(situation), **_eligible(situation)}
    return {name: max(-_MOST, min(_MOST, value)) for name, value in found.items()}


def _thousandths(part: int, whole: int) -> int:
    return 1000 * part // max(1, whole)


def _bytes(situation: Situation) -> dict[str, int]:
    """Over the budget: what the plain step holds, and what would be left of it without its largest parts."""
    model, profile, blocks = situation.model, situation.profile, situation.model.blocks
    order, run = model.nested_order() or (), RunOptions()
    middle = model.middle(run, order)
    backward = [model.block(run, fqn, KEEP)[1].peak_bytes for fqn in order]
    activations = [max(0, model.activation_bytes(fqn)) for fqn in blocks]
    largest, rise = max(activations, default=0), max(backward, default=0)
    left_behind = sum(s.net_bytes for s in profile.plain.segments if s.phase == "forward")
    around = max(0, left_behind - sum(activations))
    gradients, state = profile.plain.end_bytes, profile.optimizer.state_bytes
    static = profile.static_bytes
    in_blocks = sum(layer.param_bytes for layer in blocks.values())
    at_rest = profile.base_bytes - in_blocks
    one_block = largest + rise + gradients + around
    sizes = {
        "baseline": situation.baseline.peak_bytes,
        "parameters": profile.parameter_bytes,
        "parameters_of_blocks": in_blocks,
        "gradients": gradients,
        "optimizer": state,
        "optimizer_step": static + gradients + profile.optimizer.step_bytes,
        "activations_of_blocks": sum(activations),
        "largest_activations": largest,
        "largest_backward": rise,
        "between_blocks": around,
        "head": max(0, middle.peak_bytes),
        "with_head_alone": static + around + middle.peak_bytes,
        "with_one_block": static + one_block,
        "without_state_with_head": static - state + around + middle.peak_bytes,
        "without_state_with_one_block": static - state + one_block,
        "rest_with_head": at_rest + around + middle.peak_bytes,
        "rest_with_one_block": at_rest + one_block - gradients,
    }
    return {name: _thousandths(int(size), situation.budget.device_bytes) for name, size in sizes.items()}


def _times(situation: Situation) -> dict[str, int]:
    """Over the plain step's: what techniques would add, were each used on everything."""
    model, hardware, blocks = situation.model, situation.hardware, situation.model.blocks
    segments = situation.profile.plain.segments
    step_ns = _compute_ns(situation, segments)
    activations = sum(max(0, model.activation_bytes(fqn)) for fqn in blocks)
    visits = sum(2 * layer.param_bytes + layer.trainable_bytes for layer in blocks.values())
    moved = {
        "moving_activations": 2 * activations,
        "moving_parameters": visits,
        "moving_state": 2 * situation.profile.optimizer.state_bytes,
    }
    link_ns = {name: size * 10**9 // _rate(hardware.link_bytes_per_s) for name, size in moved.items()}
    forward = [s for s in segments if s.phase == "forward" and s.module_fqn in blocks]
    beside = [s for s in segments if s.module_fqn not in blocks]
    return {
        "recomputing": _thousandths(_compute_ns(situation, forward), step_ns),
        "head_time": _thousandths(_compute_ns(situation, beside), step_ns),
        "step_us": step_ns // 1000,
        **{name: _thousandths(each, step_ns) for name, each in link_ns.items()},
    }


def _compute_ns(situation: Situation, segments: Iterable[Segment]) -> int:
    """A rough time: products at the peak rate, all else at that of memory."""
    hardware = situation.hardware
    flops, moved = 0, 0
    for segment in segments:
        flops += segment.flops
        moved += segment.other_bytes
    return flops * 10**9 // _rate(hardware.fp32_flops) + moved * 10**9 // _rate(hardware.memory_bytes_per_s)


def _rate(per_second: float) -> int:
    return max(1, int(per_second))


def _room(situation: Situation) -> dict[str, int]:
    """The room on other tiers, over what would wait there if everything did."""
    waiting, budget = situation.model.most_waiting_bytes(), situation.budget
    return {
        "host_room": min(100_000, _thousandths(budget.host_bytes, waiting)),
        "room": min(100_000, _thousandths(budget.host_bytes + budget.disk_bytes, waiting)),
        "num_blocks": len(situation.model.blocks),
    }


def _eligible(situation: Situation) -> dict[str, int]:
    """What the hardware has, and what the user has not ruled out."""
    widest = STRATEGIES[WIDEST].under(situation.eligible)
    switches = {technique.switch for technique in widest.techniques}
    return {
        "on_cpu": int(situation.hardware.device_type == "cpu"),
        **{feature: int(switch in switches) for feature, switch in LEARNED_SWITCHES.items()},
        "overlaps": int(situation.eligible.overlaps),
    }
