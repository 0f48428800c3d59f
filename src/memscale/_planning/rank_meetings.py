"""Ranks that plan together: one plan for all of them, for the largest of their batches and the smallest budget.

NOTE [no collective]: ranks tell each other through the key-value store in which they met when they started, and never
through a collective, which could pair with one of the training's own on another rank. They do so once, in the first
training forward that DDP or FSDP runs: each rank of the group must come to that point, or training itself would wait
for it. Whatever comes later (a longer batch on one rank) each rank plans by itself, since the others may be anywhere.
What ranks send each other in training does not depend on their plans.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import time
from typing import Any

import torch

from memscale import _json
from memscale._config import Config
from memscale._errors import DoesNotFitError, MemScaleError
from memscale._plan import Plan
from memscale._profile import TensorSpec
from memscale._profile.inputs import Inputs
from memscale._profile.ranks import Group, Ranks
from memscale._torch import private
from memscale.techniques.offload.optimizer import OPTIMIZER
from memscale.techniques.offload.optimizer.in_buckets import BUCKETED_STEP
from memscale.techniques.offload.optimizer.on_device import DEVICE_STEP
from memscale.techniques.offload.parameters import PARAMETERS
from memscale.techniques.optimizer8bit import EIGHT_BIT

logger = logging.getLogger("memscale")

_PAUSE_S = 0.02
_num_meetings: collections.Counter[str] = collections.Counter()
"""How many meetings there were, by group and subject. Every rank counts alike, so equal numbers mean the same
meeting."""


class NobodyCameError(Exception):
    """A rank did not come to the meeting in time; says which."""


Specs = tuple[TensorSpec, ...]
"""The tensors of a batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Need:
    """What one rank brings along."""

    specs: Specs
    """The tensors of its batch."""
    budget_bytes: int


class Meeting:
    """One exchange between the ranks of a group: each brings a need, the leader answers all of them."""

    def __init__(self, group: Group, subject: str) -> None:
        self._members = torch.distributed.get_process_group_ranks(group.process_group)
        self._rank = torch.distributed.get_rank()
        name = f"memscale/{'-'.join(map(str, self._members))}/{subject}"
        _num_meetings[name] += 1
        self._key = f"{name}/{_num_meetings[name]}"
        self._store = private.meeting_store()
        self._timeout_s = private.timeout_of(group.process_group).total_seconds()

    def gather(self, mine: Need) -> list[Need]:
        """What every rank brings, in the order of the ranks; `NobodyCameError` as late as a collective would fail."""
        self._store.set(f"{self._key}/{self._rank}", _json.dumps(mine))
        self._wait([f"{self._key}/{rank}" for rank in self._members])
        texts = [self._store.get(f"{self._key}/{rank}") for rank in self._members]
        needs: list[Need] = [_json.decode(Need, json.loads(text)) for text in texts]
        return needs

    def leads(self, needs: list[Need], largest: tuple[TensorSpec, ...]) -> bool:
        """Whether this rank plans for all: the first one whose own batch is the largest, else the first."""
        having = [rank for rank, need in zip(self._members, needs, strict=True) if need.specs == largest]
        return self._rank == (having or self._members)[0]

    def answer(self, content: dict[str, Any]) -> None:
        """What the leader has found; for all who wait."""
        self._store.set(f"{self._key}/answer", json.dumps(content))

    def read_answer(self) -> dict[str, Any]:
        """Wait for the leader, who may plan for minutes."""
        self._wait([f"{self._key}/answer"])
        content: dict[str, Any] = json.loads(self._store.get(f"{self._key}/answer"))
        return content

    def _wait(self, keys: list[str]) -> None:
        """Look again and again: a call that waits would keep other threads of the process from the store."""
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = [key.rpartition("/")[2] for key in keys if not self._store.check([key])]
                raise NobodyCameError(f"rank {', '.join(missing)} did not come within {self._timeout_s:.0f} s")
            time.sleep(_PAUSE_S)


_NOT_REPLICATED = frozenset({PARAMETERS.name, DEVICE_STEP.name})
"""DDP has buckets for the gradients on the device where the parameters were: these may not leave it."""
_NOT_SHARDED = _NOT_REPLICATED | {OPTIMIZER.name, EIGHT_BIT.name, BUCKETED_STEP.name}
"""An optimizer over parameters that FSDP2 has shared out steps their shares, which are no plain tensors."""


def withheld_from(config: Config, ranks: Ranks) -> Config:
    """The config without what ranks that train in this way cannot do."""
    if ranks.num_ranks == 1 and not ranks.shards:
        return config.without(frozenset())
    return config.without(_NOT_SHARDED if ranks.shards else _NOT_REPLICATED)


def meets(group: Group | None) -> bool:
    """Whether there is anybody to plan with."""
    if group is None or group.ranks.num_ranks == 1:
        return False
    return torch.distributed.get_backend(group.process_group) != "fake"  # its other ranks do not exist


def largest_of(batches: list[Specs]) -> Specs | None:
    """Every dimension as large as in the batch where it is largest; None where the batches are of different kinds."""
    kinds = {tuple((spec.name, spec.dtype, len(spec.shape)) for spec in specs) for specs in batches}
    if len(kinds) != 1:
        return None
    columns = zip(*batches, strict=True)
    return tuple(
        dataclasses.replace(column[0], shape=tuple(map(max, *(spec.shape for spec in column)))) for column in columns
    )


def plan_in(answer: dict[str, Any]) -> Plan | None:
    """The plan that the leader has answered with; None: it has planned for itself alone. Raises what it has met."""
    if "misfit" in answer:
        raise DoesNotFitError(f"the batch of another rank, which is the largest, does not fit: {answer['misfit']}")
    if "error" in answer:
        raise MemScaleError(f"the rank with the largest batch could not plan: {answer['error']}")
    return Plan.from_json(answer["plan"]) if "plan" in answer else None


def enlarged(inputs: Inputs, largest: Specs) -> Inputs:
    """A batch of these sizes; tensors that have them already keep their values."""
    shapes = {id(tensor): spec.shape for tensor, spec in zip(inputs.tensors(), largest, strict=True)}

    def enlarge(tensor: torch.Tensor) -> torch.Tensor:
        shape = shapes[id(tensor)]
        if tuple(tensor.shape) == shape:
            return tensor
        return torch.empty(shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)

    return inputs.map_tensors(enlarge)
