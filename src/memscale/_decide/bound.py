"""The least time that any exact plan could take within a budget, from a profile alone. No torch.

    bound = least_ms(model, budget_bytes)      # of one step; no candidate of the search is below it

It is a bound, not a plan: nothing need reach it. Three things work side by side at best, and the slowest of them is
waited for:

- what computes: every stretch of the step in the cheapest way that was rehearsed, and the optimizer's step over the
  faster of the two memories, that of the device and the host's;
- each direction of the link, for the bytes that must cross it. In the optimizer's step parameters, gradients and state
  all exist, and what does not fit the budget is elsewhere. State that is elsewhere comes and goes in every step. A
  streamed layer takes its gradients and its state along: its parameters come at least once, and its gradients leave.
  So of each byte that does not fit at least a certain share crosses the link, whatever a plan chooses.

What it leaves out makes it lower: activations that do not fit, parameters that come a second time for backward,
temporaries, and transfers that nothing hides.
"""

from __future__ import annotations

from memscale._decide.choice import RunOptions
from memscale._decide.cost_model import CostModel


def least_ms(model: CostModel, budget_bytes: int) -> float:
    """Of a step that peaks at no more than the budget."""
    coming, leaving = _crossing_shares(model)
    excess_bytes = max(0, _bytes_in_step(model) - budget_bytes)
    link_ms = 1e3 / model.hardware.link_bytes_per_s * excess_bytes
    in_ms, out_ms = link_ms * coming, link_ms * leaving
    across_ms = max(in_ms, out_ms) if model.hardware.link_directions > 1 else in_ms + out_ms
    return max(model.least_compute_ms() + _least_optimizer_ms(model), across_ms)


def _bytes_in_step(model: CostModel) -> int:
    """Parameters, gradients and state, wherever they are while the optimizer steps."""
    return model.base_bytes() + model.profile.optimizer.state_bytes + model.profile.plain.end_bytes


def _crossing_shares(model: CostModel) -> tuple[float, float]:
    """Of each byte that is not on the device in the optimizer's step: what must come in a step, and what must leave."""
    profile = model.profile
    layers = [(layer.param_bytes, layer.trainable_bytes) for layer in profile.layers]
    layers.append((profile.rest_param_bytes, profile.rest_trainable_bytes))
    trainable = sum(layer.trainable_bytes for layer in profile.layers)
    with_state = 1 + max(profile.optimizer.state_bytes / max(1, trainable), model.optimizer.state_of_streamed_byte())
    away = [(params, own, params + own * with_state) for params, own in layers if params]
    coming = min((params / whole for params, _, whole in away), default=1.0)
    leaving = min((own / whole for _, own, whole in away), default=1.0)
    return coming, leaving


def _least_optimizer_ms(model: CostModel) -> float:
    """Its operators, or their work in host memory; nothing where a simulated clock does not count that."""
    optimizer, hardware = model.optimizer, model.hardware
    cost = optimizer.cost(RunOptions())
    on_device_ms = float(optimizer.compute_ms(cost, 1.0))
    if hardware.device_type == "cpu":
        return on_device_ms
    if hardware.host_bytes_per_s is None:
        return 0.0
    on_host_ms = cost.moved_bytes / min(hardware.host_bytes_per_s, hardware.memory_bytes_per_s) * 1e3
    return min(on_device_ms, on_host_ms)
