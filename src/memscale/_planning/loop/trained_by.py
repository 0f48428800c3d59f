"""Which optimizer a plan counts: the one that was given, else the one of this process that owns the parameters.

`wrap` is not told of the optimizer, and often comes before it. So plans look for it. As long as there is none, they
count AdamW, which is what most models are trained with, and which keeps more state than most others. At the first
training forward it is there, and if it takes other memory than the one that was counted, the plan is made again.

Known limits: of several optimizers none is taken for the one; an optimizer that replaces another after the first
training forward is not looked for.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._torch.optimizer_steps import parameters_of
from memscale.techniques.offload.optimizer.separable import owners_of

_OPTIONS_OF_MEMORY = ("amsgrad", "capturable", "differentiable", "foreach", "fused")


class TrainedBy:
    """The optimizer of one model. A found one is not kept alive."""

    def __init__(self, given: str | Optimizer) -> None:
        self._given = given
        self._counted: weakref.ref[Optimizer] | None = None
        """The found optimizer that was planned for; None: what is assumed without one."""
        self._is_settled = isinstance(given, Optimizer)
        """There is nothing to look for any more."""

    def find(self, model: nn.Module) -> str | Optimizer:
        """The optimizer to plan for, or the name of the one that is assumed."""
        if isinstance(self._given, Optimizer):
            return self._given
        found = _only_owner(model)
        self._counted = None if found is None else weakref.ref(found)
        return self._given if found is None else found

    def has_changed(self, model: nn.Module) -> bool:
        """Whether the plans so far count an optimizer that takes other memory. Looks once, when training begins."""
        if self._is_settled:
            return False
        self._is_settled = True
        found = _only_owner(model)
        counted = None if self._counted is None else self._counted()
        if found is None or found is counted:
            return False
        is_assumed = self._counted is None or (counted is not None and _is_as_assumed(counted))
        return not (is_assumed and _is_as_assumed(found))


def _only_owner(model: nn.Module) -> Optimizer | None:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = owners_of(trained)
    return found[0] if len(found) == 1 and _owns_all(found[0], trained) else None


def _owns_all(optimizer: Optimizer, parameters: list[nn.Parameter]) -> bool:
    owned = {id(parameter) for parameter in parameters_of(optimizer)}
    return all(id(parameter) in owned for parameter in parameters)


def _is_as_assumed(optimizer: Optimizer) -> bool:
    """Whether it takes the memory of AdamW without options."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    return not any(group.get(name) for group in optimizer.param_groups for name in _OPTIONS_OF_MEMORY)
