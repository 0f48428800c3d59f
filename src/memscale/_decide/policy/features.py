"""What the learned policy looks at: numbers without a unit, so that models and cards of all sizes are alike."""

from __future__ import annotations

import math

from memscale._config import Config
from memscale._decide.choice import RunOptions
from memscale._decide.eligible import resolve
from memscale._decide.policy.situation import Situation
from memscale._decide.policy.strategies import STRATEGIES, WIDEST
from memscale._decide.travel import travels
from memscale._profile import KEEP

LEARNED_SWITCHES = {
    "can_checkpoint": "enable_checkpointing",
    "can_offload": "enable_offloading",
    "can_tile": "enable_tiling",
    "can_halve": "use_mixed_precision",
    "can_quantize": "use_8bit_optimizer",
}
"""The switch of the techniques that a policy may count on, by feature. A trained policy knows the features that it was
trained with, so a new technique is added here together with a newly trained policy."""


def features_of(situation: Situation, config: Config) -> dict[str, float]:
    """The features by name, always in the same order."""
    return {**_bytes(situation), **_times(situation), **_room(situation), **_eligible(situation, config)}


def _bytes(situation: Situation) -> dict[str, float]:
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
    budget = max(1, situation.budget.device_bytes)
    return {name: size / budget for name, size in sizes.items()}


def _times(situation: Situation) -> dict[str, float]:
    """Over the plain step's: what techniques would add, were each used on everything."""
    model, hardware, blocks = situation.model, situation.hardware, situation.model.blocks
    step_ms = max(situation.baseline.step_ms, 1e-9)
    activations = sum(max(0, model.activation_bytes(fqn)) for fqn in blocks)
    visits = sum(2 * layer.param_bytes + layer.trainable_bytes for layer in blocks.values())
    moved = {
        "moving_activations": 2 * activations,
        "moving_parameters": visits,
        "moving_state": 2 * situation.profile.optimizer.state_bytes,
    }
    middle_ms = model.middle(RunOptions(), model.nested_order() or ()).ms
    return {
        "recomputing": sum(model.forward_ms(fqn) for fqn in blocks) / step_ms,
        "head_time": middle_ms / step_ms,
        "step_ms": math.log10(step_ms),
        **{name: size / hardware.link_bytes_per_s * 1e3 / step_ms for name, size in moved.items()},
    }


def _room(situation: Situation) -> dict[str, float]:
    """The room on other tiers, over what would wait there if everything did."""
    waiting = max(1, situation.model.most_waiting_bytes())
    budget = situation.budget
    return {
        "host_room": min(100.0, budget.host_bytes / waiting),
        "room": min(100.0, (budget.host_bytes + budget.disk_bytes) / waiting),
        "num_blocks": float(len(situation.model.blocks)),
    }


def _eligible(situation: Situation, config: Config) -> dict[str, float]:
    """What the hardware has, and what the user has not ruled out."""
    eligible = resolve(STRATEGIES[WIDEST].under(config, situation.hardware), situation.hardware)
    switches = {technique.switch for technique in eligible.techniques}
    return {
        "on_cpu": float(situation.hardware.device_type == "cpu"),
        **{feature: float(switch in switches) for feature, switch in LEARNED_SWITCHES.items()},
        "overlaps": float(travels(config, situation.hardware)[0].overlaps),
    }
