"""How lazy scores are computed: queries, transposed keys, and the steps that are done to their product."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from memscale.techniques.tiling.common import TilingError, names

SOFTMAX = names("softmax _softmax")
CASTS = names("to type type_as float half bfloat16 double")


@dataclasses.dataclass(frozen=True)
class Slot:
    """The place of a tensor among a step's arguments."""

    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One function of the scores: the function, its arguments, and where among them the scores go.

    NOTE [steps hold no tensors]: arguments that are tensors stand in `Steps.arguments`, and go through autograd's own
    saving. A step that held them would keep them alive inside a checkpointed block.
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    position: int

    def apply(self, scores: torch.Tensor, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        args, kwargs = tree_map_only(Slot, lambda slot: arguments[slot.index], (self.args, self.kwargs))
        result: torch.Tensor = self.func(*args[: self.position], scores, *args[self.position :], **kwargs)
        return result


@dataclasses.dataclass(frozen=True, eq=False)
class Drop:
    """Dropout with noise that was drawn for all scores."""

    kept: Slot
    p: float

    def apply(self, scores: torch.Tensor, arguments: Sequence[torch.Tensor]) -> torch.Tensor:
        # As the plain kernel does it: the noise is 1 / (1 - p), rounded to the scores' dtype, or 0.
        noise = arguments[self.kept.index].to(scores.dtype).div_(1 - self.p)
        return scores * noise


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """Queries, transposed keys, and what is done to their product."""

    queries: torch.Tensor
    keys: torch.Tensor
    steps: tuple[Step | Drop, ...] = ()
    arguments: tuple[torch.Tensor, ...] = ()
    versions: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, queries: torch.Tensor, keys: torch.Tensor) -> Steps:
        return cls(queries, keys, versions=(_version(queries), _version(keys)))

    def call(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> Steps:
        """One more function."""
        found: list[torch.Tensor] = []

        def put(tensor: torch.Tensor) -> Slot:
            found.append(tensor)
            return Slot(len(self.arguments) + len(found) - 1)

        args, kwargs = tree_map_only(torch.Tensor, put, (args, kwargs))
        if not torch.is_grad_enabled():
            found = [tensor.detach() for tensor in found]
        return self._with(Step(name, func, args, kwargs, position), *found)

    def drop(self, kept: torch.Tensor, p: float) -> Steps:
        return self._with(Drop(Slot(len(self.arguments)), p), kept)

    def _with(self, step: Step | Drop, *arguments: torch.Tensor) -> Steps:
        return dataclasses.replace(
            self,
            steps=(*self.steps, step),
            arguments=(*self.arguments, *arguments),
            versions=(*self.versions, *(_version(argument) for argument in arguments)),
        )

    def check_unchanged(self) -> None:
        tensors = (self.queries, self.keys, *self.arguments)
        if self.versions != tuple(_version(tensor) for tensor in tensors):
            raise TilingError(
                "queries, keys, a mask or a bias of a tiled attention were changed in place after the scores were "
                "formed; take the tiling of this attention out of the plan"
            )

    def replay(self) -> torch.Tensor:
        """All scores, by ordinary operators."""
        self.check_unchanged()
        return replay(self.steps, self.queries, self.keys, self.arguments)

    def needs_grad(self) -> bool:
        return any(tensor.requires_grad for tensor in (self.queries, self.keys, *self.arguments))

    def is_softmaxed(self) -> bool:
        return any(isinstance(step, Step) and step.name in SOFTMAX for step in self.steps)


def replay(
    steps: Sequence[Step | Drop], queries: torch.Tensor, keys: torch.Tensor, arguments: Sequence[torch.Tensor]
) -> torch.Tensor:
    scores = torch.matmul(queries, keys)
    for step in steps:
        scores = step.apply(scores, arguments)
    return scores


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
