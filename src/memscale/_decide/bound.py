"""The least time that any exact plan could take within a budget, from a profile alone. No torch.

    bound = least_ms(model, budget_bytes, host_step=False)      # of one step; no candidate of the search is below it
    least_blocking_ms(model, budget_bytes, host_step=False)     # the same where transfers block

It is a bound, not a plan: nothing need reach it. Three things work side by side at best, and the slowest of them is
waited for: what computes, and each direction of the link. What computes takes at least every stretch of the step in the
cheapest way that was rehearsed, and the optimizer's step over the faster of the two memories, that of the device and
the host's. Three moments say what must come on top of that:

- In the optimizer's step parameters, gradients and state all exist, and what does not fit the budget is elsewhere.
  State that is elsewhere comes and goes in every step. A streamed layer takes its gradients and its state along: its
  parameters come at least once, and its gradients leave. So of each byte that does not fit at least a certain share
  crosses the link, whatever a plan chooses. (Gradients that are used up in backward do not exist then.)
- Between backward and the step every gradient is final and nothing is stepped yet. Where the device steps everything,
  what does not fit it at that moment has still to come: behind all that computes, not beside it. See NOTE [one by one].
- When forward is over, what it has left for backward is there, beside parameters and state. What does not fit is
  computed again or is elsewhere: each block can let go of so many bytes, at best for so much recomputing and so many
  bytes across the link; parameters and state can leave, too. See NOTE [prices].

What it leaves out makes it lower: parameters that come a second time for backward, temporaries, and transfers that
nothing hides.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

from memscale._decide.choice import RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.timeline import Spent

_SHARES = (0.0, *(2.0**-k for k in range(20, 0, -1)), *(1 - 2.0**-k for k in range(2, 21)), 1.0)
"""The weight of compute in the sum of prices: bytes across a slow link cost thousands of times as much."""


def least_ms(model: CostModel, budget_bytes: int, *, host_step: bool) -> float:
    """The bound of a step that peaks at no more than the budget; `host_step`: the host may step what is streamed."""
    computes_ms = model.least_compute_ms + _least_optimizer_ms(model)
    prices = _all_prices(model.hardware.link_directions)
    found = [computes_ms, _step_ms(model, budget_bytes), _freeing_ms(model, budget_bytes, computes_ms, prices)]
    if not host_step and model.profile.optimizer.in_backward is None:
        found.append(model.least_compute_ms + _arriving_ms(model, budget_bytes))
    return max(found)


def least_blocking_ms(model: CostModel, budget_bytes: int, *, host_step: bool) -> float:
    """The same where transfers block: nothing is beside anything, so that all of it adds up, on a slower link."""
    assert not model.pace.overlaps, "what overlaps may be faster"
    slower = float(model.pace.link_ms(1)) / _byte_ms(model)
    excess_bytes = max(0, _bytes_in_step(model) - budget_bytes)
    crossing_ms = [
        _byte_ms(model) * slower * excess_bytes * sum(_crossing_shares(model)),
        _freeing_ms(model, budget_bytes, 0.0, [_Prices(1.0, slower, slower)]),
    ]
    if not host_step and model.profile.optimizer.in_backward is None:
        crossing_ms.append(slower * _arriving_ms(model, budget_bytes))
    return model.least_compute_ms + _least_optimizer_ms(model) + max(crossing_ms)


def _byte_ms(model: CostModel) -> float:
    """The price of a byte across the link, one way; pinned or not."""
    hardware = model.hardware
    return 1e3 / max(hardware.link_bytes_per_s, hardware.blocking_link_bytes_per_s or 0.0)


# ---- in the optimizer's step


def _step_ms(model: CostModel, budget_bytes: int) -> float:
    coming, leaving = _crossing_shares(model)
    excess_bytes = max(0, _bytes_in_step(model) - budget_bytes)
    link_ms = _byte_ms(model) * excess_bytes
    in_ms, out_ms = link_ms * coming, link_ms * leaving
    return max(in_ms, out_ms) if model.hardware.link_directions > 1 else in_ms + out_ms


def _arriving_ms(model: CostModel, budget_bytes: int) -> float:
    """The bytes that are stepped on the device and are not there when backward ends.

    NOTE [one by one]: a training loop may read, clip or drop gradients between backward and the step, so no parameter
    is stepped before the last gradient is final. Trained parameters, their gradients and their state are all needed on
    the device in the step. What of them exceeds the budget when backward ends comes after it, and what computes in
    forward and backward cannot hide that. What nobody trains may be elsewhere for nothing, and is not counted.
    """
    profile = model.profile
    gradients = min(profile.trainable_bytes, profile.plain.end_bytes)
    parameters = min(gradients, sum(min(layer.param_bytes, layer.trainable_bytes) for layer in profile.layers))
    return _byte_ms(model) * max(0, parameters + gradients + profile.optimizer.state_bytes - budget_bytes)


def _bytes_in_step(model: CostModel) -> int:
    """Parameters, gradients and state, wherever they are while the optimizer steps."""
    profile = model.profile
    gradients = profile.plain.end_bytes if profile.optimizer.in_backward is None else 0
    return model.base_bytes() + profile.optimizer.state_bytes + gradients


def _crossing_shares(model: CostModel) -> tuple[float, float]:
    """What must come in a step, and what must leave, for each byte that is not on the device in the optimizer's."""
    with_state = 1 + _state_of_byte(model)
    away = [(params, own, params + own * with_state) for params, own in _homes(model) if params]
    coming = min((params / whole for params, _, whole in away), default=1.0)
    leaving = min((own / whole for _, own, whole in away), default=1.0)
    return coming, leaving


def _homes(model: CostModel) -> list[tuple[int, int]]:
    """What could be streamed: bytes of parameters, and of those that are trained."""
    layers = [(layer.param_bytes, layer.trainable_bytes) for layer in model.profile.layers]
    return [*layers, (model.profile.rest_param_bytes, model.profile.rest_trainable_bytes)]


def _state_of_byte(model: CostModel) -> float:
    """State that leaves the device with each trainable byte that is streamed, at most."""
    whole = model.profile.optimizer.state_bytes / max(1, model.profile.trainable_bytes)
    return max(whole, model.optimizer.state_of_streamed_byte())


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


# ---- when forward is over


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """One way in which something can let go of device memory, and what that takes."""

    freed_bytes: float
    compute_ms: float = 0.0
    out_ms: float = 0.0
    in_ms: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Prices:
    """What a millisecond of each counts.

    NOTE [prices]: whatever prices there are, of which the sum is 1: the slowest of three is no less than their sum at
    these prices. And at given prices the cheapest way to free some bytes is known: what is cheapest by the byte goes
    first. So every choice of prices gives a bound, and the highest of them is taken. Where nothing is beside anything,
    the three add up, and each counts fully.
    """

    compute: float
    leaving: float
    coming: float

    def of(self, way: _Way) -> float:
        """The price, by freed byte."""
        total = way.compute_ms * self.compute + way.out_ms * self.leaving + way.in_ms * self.coming
        return total / way.freed_bytes


def _freeing_ms(model: CostModel, budget_bytes: int, computes_ms: float, every: Iterable[_Prices]) -> float:
    """What computes, and what frees the bytes that do not fit, at the highest of these prices."""
    if model.whole_treatments:
        return 0.0  # their steps go another way, and their forward ends elsewhere
    ways, end_of_forward = model.exact_ways, model.first_backward
    kept_bytes = sum(
        ways[0][index].net_bytes if owner else min(way[index].net_bytes for way in ways)
        for index, owner in enumerate(model.owners[:end_of_forward])
    )
    static_bytes = model.base_bytes() + model.profile.optimizer.state_bytes
    excess_bytes = static_bytes + kept_bytes - budget_bytes
    if excess_bytes <= 0:
        return 0.0
    holders = collections.Counter([*_blocks(model, ways), *_homes_and_state(model)])
    return max(prices.compute * computes_ms + _cheapest(holders, prices, excess_bytes) for prices in every)


def _all_prices(link_directions: int) -> Iterator[_Prices]:
    for compute, outward in itertools.product(_SHARES, (0.0, 0.5, 1.0) if link_directions > 1 else (1.0,)):
        link = 1 - compute
        yield _Prices(compute, link * outward, link * (1 - outward) if link_directions > 1 else link)


def _cheapest(holders: collections.Counter[tuple[_Way, ...]], prices: _Prices, excess_bytes: float) -> float:
    """To free so many bytes at these prices."""
    offers = []
    for ways, count in holders.items():
        offers.append((min(map(prices.of, ways)), count * max(way.freed_bytes for way in ways)))
    total = 0.0
    for price, most_bytes in sorted(offers):
        taken = min(excess_bytes, most_bytes)
        total += price * taken
        excess_bytes -= taken
    return total


def _blocks(model: CostModel, ways: Sequence[Sequence[Spent]]) -> Iterator[tuple[_Way, ...]]:
    """What each block can let go of that its forward leaves behind. Blocks of the same offers are equal."""
    before, link_ms = model.first_backward, _byte_ms(model)
    least = [min(way[index].busy_ms for way in ways) for index in range(len(model.owners))]
    for fqn in model.blocks:
        places, found = model.places(fqn), []
        for way in ways[1:]:
            freed = sum(ways[0][index].net_bytes - way[index].net_bytes for index in places if index < before)
            if freed > 0:
                extra_ms = sum(way[index].busy_ms - least[index] for index in places)
                out_ms, in_ms = (
                    sum(getattr(way[index], field) for index in places) * link_ms for field in ("out_bytes", "in_bytes")
                )
                found.append(_Way(freed, max(0.0, extra_ms), max(0.0, out_ms), max(0.0, in_ms)))
        if found:
            yield tuple(found)


def _homes_and_state(model: CostModel) -> Iterator[tuple[_Way, ...]]:
    """Parameters that are streamed, with their state; and state that waits elsewhere by itself."""
    link_ms, with_state = _byte_ms(model), _state_of_byte(model)
    blocks = [(b.param_bytes, b.trainable_bytes) for b in model.blocks.values()]
    can_stream = any(treatment.streams for treatment in model.treatments)
    rest = (model.profile.rest_param_bytes, model.profile.rest_trainable_bytes)
    for params, own in [*(blocks if can_stream else ()), rest]:
        if params:
            yield (_Way(params + own * with_state, 0.0, own * link_ms, params * link_ms),)
    cost = model.profile.optimizer
    if cost.offloaded_step_bytes is not None and cost.state_bytes:
        sizes = cost.bucket_bytes or (cost.state_bytes,)
        kept = [(cost.offloaded_state_bytes, (False,) * len(sizes))]
        kept += [(share.state_bytes, share.stays) for share in cost.shares]
        moved = [sum(n for n, does_stay in zip(sizes, stays, strict=True) if not does_stay) for _, stays in kept]
        pairs = [(cost.state_bytes - left, away) for (left, _), away in zip(kept, moved, strict=True)]
        found = tuple(_Way(freed, 0.0, away * link_ms, away * link_ms) for freed, away in pairs if freed > 0)
        if found:
            yield found
