"""`Demand`: what decides how much memory a training step takes. A plan holds for the demands that its own covers."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memscale._profile import TensorSpec
from memscale._profile.inputs import Inputs
from memscale._profile.ranks import ALONE, Ranks
from memscale._torch import private

_OPTION_TYPES = (bool, str, type(None))
"""Arguments that switch something. Numbers do not count: they are as often a step's own figures as a switch."""


Reach = tuple[int, ...]
"""How far the values of an integer tensor go: its maximum and the like. If none is larger, the step is not, either."""


Weights = tuple[tuple[bool, torch.dtype, int], ...]
"""For each parameter of a model: whether it is trained, its type, and how many elements it has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """The demand of one forward of a model in training."""

    device: str
    parameters: Weights
    inputs: tuple[TensorSpec, ...]
    options: tuple[Any, ...]
    attention: tuple[str, ...]
    """The implementations of attention that `transformers` models use: the model, or what it is made of."""
    autocast: torch.dtype | None = None
    """The type in which the user's own `torch.autocast` computes; None: there is none around the forward."""
    ranks: Ranks = ALONE
    reaches: tuple[tuple[str, Reach], ...] = ()
    """How far the values of inputs that decide something reach, by their place."""

    def covers(self, other: Demand) -> bool:
        """Whether a step under `other` takes at most what one under this does: no dimension is larger, and no value
        that decides something goes further."""
        if len(self.inputs) != len(other.inputs) or not self._agrees_with(other):
            return False
        theirs = dict(other.reaches)
        return all(_spans(mine, theirs) for mine, theirs in zip(self.inputs, other.inputs, strict=True)) and all(
            name in theirs and _is_within(theirs[name], mine) for name, mine in self.reaches
        )

    @property
    def num_elements(self) -> int:
        """The number of elements of all tensors of the batch."""
        return sum(math.prod(spec.shape) for spec in self.inputs)

    def without_values(self) -> Demand:
        """The same shapes, whatever the values are."""
        return dataclasses.replace(self, reaches=())

    def widened(self, other: Demand) -> Demand:
        """The demand for values that go as far as these, or as those of `other`."""
        theirs = dict(other.reaches)
        wider = tuple((name, tuple(map(max, mine, theirs.get(name, mine)))) for name, mine in self.reaches)
        return dataclasses.replace(self, reaches=wider)

    def _agrees_with(self, other: Demand) -> bool:
        return dataclasses.replace(self, inputs=other.inputs, reaches=other.reaches) == other


def _spans(mine: TensorSpec, theirs: TensorSpec) -> bool:
    return (mine.name, mine.dtype, len(mine.shape)) == (theirs.name, theirs.dtype, len(theirs.shape)) and all(
        size >= other for size, other in zip(mine.shape, theirs.shape, strict=True)
    )


def _is_within(inner: Reach, outer: Reach) -> bool:
    return all(number <= other for number, other in zip(inner, outer, strict=True))


_NO_REACH: Reach = (-sys.maxsize,) * 9
"""The reach of a tensor that has no values to look at: whatever comes goes further."""


def _reach_of(tensor: torch.Tensor) -> Reach:
    """Counts (of a mask), sums and maxima (of lengths), steps (of offsets), how many there are (of kinds)."""
    if tensor.device.type == "meta" or private.is_fake(tensor) or not tensor.numel():
        return _NO_REACH
    numbers = tensor.detach().to("cpu", torch.long)
    rows = numbers.reshape(-1, numbers.shape[-1]) if numbers.dim() else numbers.reshape(1, 1)
    steps = rows.diff()
    found = (
        numbers.eq(0).sum(),
        numbers.lt(0).sum(),
        numbers.gt(0).sum(),
        rows.ne(0).sum(1).max(),
        numbers.sum(),
        numbers.max(),
        -numbers.min(),
        steps.max() if steps.numel() else steps.sum(),
    )
    return (*(int(number) for number in found), len(numbers.unique()))


def _attention_of(model: nn.Module) -> tuple[str, ...]:
    """The implementations that the configs of its modules name: a class around a `transformers` model has no config."""
    configs = [config for module in model.modules() if (config := vars(module).get("config")) is not None]
    known = {id(config): getattr(config, "_attn_implementation", None) for config in configs}
    return tuple(str(implementation) for implementation in known.values())


def read_weights(model: nn.Module) -> Weights:
    """What of a model's parameters decides its demand. A walk over all modules: once in a step is enough."""
    return tuple((p.requires_grad, p.dtype, p.numel()) for p in model.parameters())


def read_demand(
    model: nn.Module,
    inputs: Inputs,
    device: torch.device,
    deciding: frozenset[str] = frozenset(),
    ranks: Ranks = ALONE,
    weights: Weights | None = None,
) -> Demand:
    """The demand of a forward of this model with these inputs; the values of those in `deciding` count. `weights`: the
    model's, where they were read already."""
    leaves = tree_leaves((inputs.args, inputs.kwargs))
    looked_at = [(name, tensor) for name, tensor in inputs.named_tensors() if name in deciding] if deciding else []
    return Demand(
        device=device.type,
        parameters=read_weights(model) if weights is None else weights,
        inputs=inputs.specs(),
        options=tuple(leaf for leaf in leaves if isinstance(leaf, _OPTION_TYPES)),
        attention=_attention_of(model),
        autocast=torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
        ranks=ranks,
        reaches=tuple((name, _reach_of(tensor)) for name, tensor in looked_at),
    )
