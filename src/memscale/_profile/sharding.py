"""What sharing a model out among ranks does to a step: the trace of the whole model, as FSDP2 (`fully_shard`) runs it.

A rank holds its share of parameters, gradients and optimizer state. NOTE [gathered units]: a *unit* is what
`fully_shard` was called on, here a block, and the rest of the model as one. Before a unit computes, its parameters are
gathered into one buffer and copied out of it, so they exist twice for a moment. In forward, the buffer stays until
the next unit has copied out of its own; afterwards the unit's parameters are given up. In backward, the buffer of the
next unit is gathered while one computes, and whole gradients are copied into a buffer that is reduced and stays until
the next unit is at that point. The rest stays whole from the first forward to the end of backward.

How these sizes follow each other was read in PyTorch 2.13; `benchmarks/ranks.py` compares with an emulated card.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from memscale._profile import Segment, StepTrace
from memscale._torch import private

REST = ""
"""The name of what is in no unit but the model's own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """The bytes of what is gathered together, as padded for the shares to be equal."""

    gathered_bytes: int = 0
    trained_bytes: int = 0
    """The part of them that gets gradients."""

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor], num_shards: int) -> Unit:
        unique = {id(p): p for p in parameters}.values()
        sizes = [(padded_bytes(p, num_shards), p.requires_grad) for p in unique]
        return cls(sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains))


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """How one model is shared out."""

    num_shards: int
    units: Mapping[str, Unit]
    """The unit of each block, by the block's name."""
    rest: Unit
    names: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """The names of the parameters of each unit, and of `REST`; empty where a step is not known allocation by
    allocation."""

    @property
    def parameter_bytes(self) -> int:
        """The share of one rank."""
        return sum(unit.gathered_bytes for unit in (*self.units.values(), self.rest)) // self.num_shards

    def applied(self, trace: StepTrace) -> StepTrace:
        """The step of one rank, from that of the whole model. See NOTE [gathered units]."""
        before = _Forward(self).run([s for s in trace.segments if s.phase == "forward"])
        after = _Backward(self).run([s for s in trace.segments if s.phase == "backward"])
        return dataclasses.replace(
            trace, segments=(*before, *after), gradients_at_peak=trace.gradients_at_peak // self.num_shards
        )


class _Forward:
    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._buffer_bytes = sharding.rest.gathered_bytes
        """The buffer of the unit that was gathered last. The rest is the first."""

    def run(self, segments: list[Segment]) -> list[Segment]:
        found = [self._unit(s) if s.module_fqn in self._sharding.units else s for s in segments]
        whole = 2 * self._sharding.rest.gathered_bytes
        if found:
            found[0] = _raised(found[0], before=whole, peak=whole, net=whole)
            found[-1] = _raised(found[-1], net=-self._buffer_bytes)
        return found

    def _unit(self, segment: Segment) -> Segment:
        gathered = self._sharding.units[segment.module_fqn].gathered_bytes
        held = gathered - self._buffer_bytes
        self._buffer_bytes = gathered
        return _raised(segment, before=held + gathered, peak=gathered, net=held)


class _Backward:
    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._reducing_bytes = 0
        """The buffer that was reduced last."""

    def run(self, segments: list[Segment]) -> list[Segment]:
        order = [s.module_fqn for s in segments if s.module_fqn in self._sharding.units]
        following = iter([*(self._sharding.units[fqn].gathered_bytes for fqn in order[1:]), 0])
        found = [self._unit(s, next(following)) if s.module_fqn in self._sharding.units else s for s in segments]
        if found:
            first = self._sharding.units[order[0]].gathered_bytes if order else 0
            found[0] = _raised(found[0], before=first, peak=first, net=first)
            found[-1] = self._end(found[-1])
        return found

    def _unit(self, segment: Segment, next_bytes: int) -> Segment:
        unit = self._sharding.units[segment.module_fqn]
        ahead = next_bytes - unit.gathered_bytes  # its own buffer goes, the next one's comes
        at_copy = segment.net_bytes + ahead - self._reducing_bytes + unit.trained_bytes
        left = ahead - self._reducing_bytes + unit.trained_bytes // self._sharding.num_shards
        self._reducing_bytes = unit.trained_bytes
        raised = _raised(segment, before=unit.gathered_bytes + ahead, peak=unit.gathered_bytes, net=left)
        return dataclasses.replace(raised, peak_bytes=max(raised.peak_bytes, at_copy))

    def _end(self, segment: Segment) -> Segment:
        """The rest is given up, its gradients are reduced, and all buffers go."""
        rest = self._sharding.rest
        left = rest.trained_bytes // self._sharding.num_shards - rest.trained_bytes
        at_copy = segment.net_bytes - rest.gathered_bytes - self._reducing_bytes + rest.trained_bytes
        ended = _raised(segment, net=left - rest.gathered_bytes - self._reducing_bytes)
        return dataclasses.replace(ended, peak_bytes=max(segment.peak_bytes, at_copy))


def _raised(segment: Segment, *, before: int = 0, peak: int = 0, net: int = 0) -> Segment:
    """The segment with more bytes while it computes (`before`), in its first moment (`peak`), and at its end
    (`net`)."""
    return dataclasses.replace(
        segment, peak_bytes=max(peak, segment.peak_bytes + before, 0), net_bytes=segment.net_bytes + net
    )


def padded_bytes(parameter: torch.Tensor, num_shards: int) -> int:
    """The bytes of a parameter that is cut along its first dimension into equal shares."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return share_rows(parameter, num_shards) * num_shards * (parameter.nbytes // max(1, rows))


def share_rows(parameter: torch.Tensor, num_shards: int) -> int:
    """The rows of the largest share."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return -(-rows // num_shards)


def sharding_of(model: nn.Module, blocks: Iterable[str], num_shards: int) -> Sharding:
    """How `fully_shard` has shared the model out; else how it would, called on each block and on the model."""
    members: dict[str, list[str]] = {name: [] for name in blocks}
    rest: list[str] = []
    whole = private.unsharded_between(model)
    named = dict(model.named_parameters())
    for name in named:
        inside = next((block for block in members if name.startswith(f"{block}.")), None)
        stays = any(name.startswith(f"{part}.") for part in whole)
        (rest if inside is None or stays else members[inside]).append(name)
    units = {block: Unit.of([named[name] for name in own], num_shards) for block, own in members.items() if own}
    sharding = Sharding(num_shards, units, Unit.of([named[name] for name in rest], num_shards))
    called_on = private.fully_sharded(model)
    if whole or private.gathers_otherwise(model) or (called_on and called_on.keys() != {REST, *units}):
        return sharding
    names = {REST: tuple(rest), **{block: tuple(own) for block, own in members.items() if own}}
    return dataclasses.replace(sharding, names=names)
