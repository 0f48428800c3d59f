"""`Demand`: what decides how much memory a training step takes. A plan holds for the demands that its own covers."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memscale._profile import TensorSpec
from memscale._profile.inputs import Inputs

_OPTION_TYPES = (bool, str, type(None))
"""Arguments that switch something. Numbers do not count: they are as often a step's own figures as a switch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Of one forward of a model in training."""

    device: str
    parameters: tuple[tuple[bool, torch.dtype, int], ...]
    """Which of them are trained, in which type, and of how many elements."""
    inputs: tuple[TensorSpec, ...]
    options: tuple[Any, ...]
    attention: str | None
    """The implementation of attention that a `transformers` model uses."""

    def covers(self, other: Demand) -> bool:
        """Whether a step under `other` takes at most what one under this does: no dimension is larger."""
        if len(self.inputs) != len(other.inputs) or not self._agrees_with(other):
            return False
        return all(_spans(mine, theirs) for mine, theirs in zip(self.inputs, other.inputs, strict=True))

    def _agrees_with(self, other: Demand) -> bool:
        return (self.device, self.parameters, self.options, self.attention) == (
            other.device,
            other.parameters,
            other.options,
            other.attention,
        )


def _spans(mine: TensorSpec, theirs: TensorSpec) -> bool:
    return (mine.name, mine.dtype, len(mine.shape)) == (theirs.name, theirs.dtype, len(theirs.shape)) and all(
        size >= other for size, other in zip(mine.shape, theirs.shape, strict=True)
    )


def read_demand(model: nn.Module, inputs: Inputs, device: torch.device) -> Demand:
    """The demand of a forward of this model with these inputs."""
    leaves = tree_leaves((inputs.args, inputs.kwargs))
    return Demand(
        device=device.type,
        parameters=tuple((p.requires_grad, p.dtype, p.numel()) for p in model.parameters()),
        inputs=inputs.specs(),
        options=tuple(leaf for leaf in leaves if isinstance(leaf, _OPTION_TYPES)),
        attention=getattr(getattr(model, "config", None), "_attn_implementation", None),
    )
