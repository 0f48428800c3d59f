"""What an optimizer keeps and what its step needs, by running two of its steps on fake parameters.

stepping         how a step runs bucket by bucket, as the executor will run it
bucket_cost      what the state of a few parameters takes, and the peak of a step over such buckets
same_optimizer   the same optimizer over other parameters
twin             the optimizer over fake parameters, and what its steps cost
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from memscale._errors import quoted
from memscale._profile import GuestCost, OptimizerCost
from memscale._profile.optimizer_twin.same_optimizer import host_counters, over_parameters, same_class
from memscale._profile.optimizer_twin.step_costs import StepCosts, Ways
from memscale._profile.optimizer_twin.stepping import Prepare, Stepping
from memscale._profile.optimizer_twin.twin import OPTIMIZERS, SteppedModel, Trials, Twin
from memscale._torch.quiet_steps import quiet_steps

__all__ = [
    "OPTIMIZERS",
    "Prepare",
    "SteppedModel",
    "Stepping",
    "Trials",
    "Ways",
    "guest_cost",
    "host_counters",
    "optimizer_cost",
    "optimizer_over",
    "over_parameters",
]


logger = logging.getLogger("memscale")
_AS_IT_IS = Ways()


def optimizer_cost(stepped: SteppedModel, ways: Ways = _AS_IT_IS) -> OptimizerCost:
    """State and step temporaries of an optimizer over this model's parameters on this device, in each of these ways."""
    if stepped.optimizer == "none":
        return OptimizerCost("none", 0, 0, 0)
    try:
        with quiet_steps():
            return StepCosts(Twin(stepped), ways.guests).cost(ways)
    except Exception as error:  # whatever a third party's optimizer does on fake tensors
        if isinstance(stepped.optimizer, str):
            raise
        name = type(stepped.optimizer).__name__
        logger.warning("%s cannot be tried on fake tensors (%s); its state is taken to be AdamW's", name, quoted(error))
        logger.debug("%s failed on fake tensors", name, exc_info=True)
        taken_as = dataclasses.replace(stepped, optimizer="adamw", prepare=None, trials={})
        with quiet_steps():
            cost = StepCosts(Twin(taken_as), guests=None).cost(Ways(is_separable=False))
        return dataclasses.replace(cost, name=f"{name}, taken as AdamW")


def guest_cost(stepped: SteppedModel, guests: Stepping) -> GuestCost | None:
    """What it takes to step the parameters that are left out on the device; None where that cannot be tried."""
    if stepped.optimizer == "none":
        return None
    try:
        with quiet_steps():
            return StepCosts(Twin(stepped), guests).guest_cost()
    except Exception as error:  # whatever a third party's optimizer does on fake tensors
        logger.debug("%s failed on fake tensors: %s", stepped.optimizer, quoted(error), exc_info=True)
        return None


def optimizer_over(
    stand_ins: Mapping[int, nn.Parameter], model: nn.Module, optimizer: str | Optimizer, device_type: str
) -> Optimizer:
    """The optimizer, without state, over fake parameters that stand in for the model's, given by the ids of those.

    It chooses its implementation as it would on the device.
    """
    twin = Twin(SteppedModel(model, optimizer, device_type, stand_ins=stand_ins))
    standing = {id(stand_ins[number]) for number in twin.fakes if number in stand_ins}
    groups = twin.optimizer.param_groups
    chosen = [{**group, "params": [p for p in group["params"] if id(p) in standing]} for group in groups]
    return same_class(twin.optimizer, chosen)
