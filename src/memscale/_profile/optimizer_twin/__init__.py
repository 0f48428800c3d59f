"""What an optimizer keeps and what its step needs, by running two of its steps on fake parameters.

stepping         how a step runs bucket by bucket, as the executor will run it
bucket_cost      what the state of a few parameters takes, and the peak of a step over such buckets
same_optimizer   the same optimizer over other parameters
twin             the optimizer over fake parameters, and what its steps cost
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping

from torch import nn
from torch.optim import Optimizer

from memscale._errors import quoted
from memscale._profile import GuestCost, OptimizerCost
from memscale._profile.optimizer_twin.same_optimizer import host_counters, over_parameters, same_class
from memscale._profile.optimizer_twin.step_costs import StepCosts
from memscale._profile.optimizer_twin.stepping import Prepare, Stepping
from memscale._profile.optimizer_twin.twin import OPTIMIZERS, Trials, Twin
from memscale._torch.quiet_steps import quiet_steps

__all__ = [
    "OPTIMIZERS",
    "Prepare",
    "Stepping",
    "Trials",
    "guest_cost",
    "host_counters",
    "optimizer_cost",
    "optimizer_over",
    "over_parameters",
]


logger = logging.getLogger("memscale")


def optimizer_cost(
    model: nn.Module,
    optimizer: str | Optimizer,
    device_type: str,
    *,
    resident: Stepping | None = None,
    offloaded: Stepping | None = None,
    is_separable: bool = True,
    in_buckets: Stepping | None = None,
    in_backward: Stepping | None = None,
    guests: Stepping | None = None,
    without: Collection[int] = (),
    idle: Collection[int] = (),
    prepare: Prepare | None = None,
    num_shards: int = 1,
    trials: Trials | None = None,
) -> OptimizerCost:
    """State and step temporaries of an optimizer over this model's parameters on this device.

    `resident` is how it steps where its state is on the device, None: as it is; `offloaded` how where it is not, None:
    it cannot; `in_buckets` how where that is chosen, its state where it is, `in_backward` how where that is; `guests`
    how parameters that are streamed visit the device to be stepped there, None: they are stepped on the host.
    `is_separable`: it can be stepped in parts. `without` leaves out parameters that are streamed, `idle` those that get
    no gradient, both by id; `prepare` is called before any step. `num_shards`: it steps one share of each parameter.
    `trials`: steps of the same optimizer on this device that are known; more are added.
    """
    if optimizer == "none":
        return OptimizerCost("none", 0, 0, 0)
    try:
        with quiet_steps():
            twin = Twin(model, optimizer, device_type, without, idle, prepare, num_shards, trials)
            steps = StepCosts(twin, guests)
            cost = steps.cost(resident, offloaded, is_separable=is_separable)
            cost = cost if in_buckets is None else steps.with_buckets(cost, in_buckets)
            if in_backward is None:
                return cost
            return dataclasses.replace(cost, in_backward=steps.in_backward(in_backward))
    except Exception as error:  # whatever a third party's optimizer does on fake tensors
        if isinstance(optimizer, str):
            raise
        logger.warning(
            "%s cannot be tried on fake tensors (%s); its state is taken to be AdamW's",
            type(optimizer).__name__,
            quoted(error),
        )
        logger.debug("%s failed on fake tensors", type(optimizer).__name__, exc_info=True)
        with quiet_steps():
            twin = Twin(model, "adamw", device_type, without, idle, num_shards=num_shards)
            cost = StepCosts(twin, guests=None).cost(None, None, is_separable=False)
        return dataclasses.replace(cost, name=f"{type(optimizer).__name__}, taken as AdamW")


def guest_cost(
    model: nn.Module,
    optimizer: str | Optimizer,
    device_type: str,
    guests: Stepping,
    streamed: Collection[int],
    idle: Collection[int] = (),
    prepare: Prepare | None = None,
    trials: Trials | None = None,
) -> GuestCost | None:
    """What it takes to step the parameters with these ids on the device; None where that cannot be tried."""
    if optimizer == "none":
        return None
    try:
        with quiet_steps():
            twin = Twin(model, optimizer, device_type, streamed, idle, prepare, trials=trials)
            return StepCosts(twin, guests).guest_cost()
    except Exception as error:  # whatever a third party's optimizer does on fake tensors
        logger.debug("%s failed on fake tensors: %s", optimizer, quoted(error), exc_info=True)
        return None


def optimizer_over(
    stand_ins: Mapping[int, nn.Parameter], model: nn.Module, optimizer: str | Optimizer, device_type: str
) -> Optimizer:
    """The optimizer, without state, over fake parameters that stand in for the model's, given by the ids of those.

    It chooses its implementation as it would on the device.
    """
    twin = Twin(model, optimizer, device_type, (), ())
    standing = {id(fake): stand_ins[number] for number, fake in twin.fakes.items() if number in stand_ins}
    groups = twin.optimizer.param_groups
    chosen = [{**group, "params": [standing[id(p)] for p in group["params"] if id(p) in standing]} for group in groups]
    return same_class(twin.optimizer, chosen)
