"""What FSDP2 (`fully_shard`) allocates in a step, put into the log of a step that is rehearsed with the whole model.

    shared = SharedOut(rehearsal, log)
    shared.take_shares()                   # in the place of the parameters
    shared.move("forward", "layers.0")     # ... whenever the step comes to a part of the model
    shared.end_backward()
    shared.make_gradients()                # of its shares, for the optimizer's step
    shared.clear_gradients()

NOTE [streams of FSDP2]: memory never moves from one stream to another, so what is held depends on which stream asked
for it. As read in PyTorch 2.13 (`torch/distributed/fsdp/_fully_shard`), and compared on an emulated card
(`benchmarks/ranks.py`):
- the buffer that a unit's parameters are gathered into, on a stream of its own. In forward it stays until the next
  unit has gathered its own; in backward it goes when the parameters have been copied out, and the next unit's is
  gathered then, before this unit computes;
- the parameters that are copied out, one allocation each, and the buffer whose gradients are reduced, on the stream
  that computes. The buffer goes when the next unit is at that point;
- the reduced gradients of a unit, together, on a third stream, where they stay until `zero_grad()`.

See NOTE [gathered units] in `_profile/sharding.py` for what a unit is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._planning.reserved.allocation_log import AllocationLog, Place
from memscale._profile import Phase
from memscale._profile.rehearsal import FakeRehearsal
from memscale._profile.sharding import REST, Sharding, padded_bytes, share_rows
from memscale._torch import private
from memscale._torch.released_gradients import held_gradient

if TYPE_CHECKING:
    from memscale._planning.reserved.event_recorder import LogRecorder

GATHERING, REDUCING = 1, 2
"""The streams beside the one that computes."""


@dataclasses.dataclass(slots=True)
class _Unit:
    """What is gathered and reduced together, and what of it is on the device, by serial."""

    parameters: list[nn.Parameter]
    padded: list[int]
    """The bytes of each of them, whole."""
    buffer: int | None = None
    copies: list[int] = dataclasses.field(default_factory=list)
    reduced: int | None = None


class SharedOut:
    """One rank's part in the steps of a log."""

    def __init__(self, rehearsal: FakeRehearsal, log: AllocationLog, sharding: Sharding) -> None:
        """`sharding` knows which parameters are in which unit."""
        self._rehearsal, self._log = rehearsal, log
        self._num_shards = sharding.num_shards
        named = dict(rehearsal.model.named_parameters())
        self._units = {fqn: self._unit([named[name] for name in names]) for fqn, names in sharding.names.items()}
        self._phase: Phase = "forward"
        self._here = ""
        """The unit that computes; empty outside of the blocks."""
        self._order: list[str] = []
        """The units that have computed in this forward."""
        self._last_buffer: int | None = None
        self._reducing: int | None = None
        self._trained: set[int] = set()
        """The ids of what has got gradients in this step."""
        self._shares: dict[int, nn.Parameter] = {}

    def _unit(self, parameters: list[nn.Parameter]) -> _Unit:
        return _Unit(parameters, [padded_bytes(parameter, self._num_shards) for parameter in parameters])

    def take_shares(self) -> None:
        """The rank's share of each parameter, in the order of the model."""
        self._log.place = Place("parameters")
        for parameter in self._rehearsal.model.parameters():
            share_bytes = padded_bytes(parameter, self._num_shards) // self._num_shards
            self._log.allocate(private.storage_key(parameter.untyped_storage()), share_bytes)

    def shares_of(self, stand_ins: Mapping[int, nn.Parameter]) -> dict[int, nn.Parameter]:
        """What an optimizer steps in the place of these."""
        self._shares = {id(parameter): self._share_of(parameter) for parameter in stand_ins.values()}
        return {number: self._shares[id(parameter)] for number, parameter in stand_ins.items()}

    def _share_of(self, parameter: nn.Parameter) -> nn.Parameter:
        shape = parameter.shape and (share_rows(parameter, self._num_shards), *parameter.shape[1:])
        with self._rehearsal.mode:
            empty = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
        return nn.Parameter(empty, requires_grad=parameter.requires_grad)

    def make_gradients(self, recorder: LogRecorder) -> None:
        """Shares have the gradients that were reduced, which are parts of what is in the log already."""
        with self._rehearsal.mode, recorder.without_log(), private.without_function_modes():
            recorder.see_all(list(self._shares.values()), "parameters")
            for number in self._trained:
                self._shares[number].grad = gradient = torch.empty_like(self._shares[number])
                recorder.see(gradient, "gradients")

    def clear_gradients(self) -> None:
        """`zero_grad()`."""
        self._trained = set()
        for share in self._shares.values():
            share.grad = None
        for unit in self._units.values():
            if unit.reduced is not None:
                self._log.give_back(unit.reduced)
                unit.reduced = None

    # ---- where the step is

    def begin_forward(self) -> None:
        self._phase, self._here, self._order = "forward", "", []
        rest = self._units[REST]
        if rest.parameters:
            self._gather(rest)
            self._copy_out(rest)
            self._last_buffer, rest.buffer = rest.buffer, None

    def move(self, phase: Phase, module_fqn: str) -> None:
        """The step has come to a part of the model; outside of its units: nowhere."""
        unit_fqn = module_fqn if module_fqn in self._units else REST
        if phase == "backward" and self._phase == "forward":
            self._leave_forward()
            self._begin_backward()
        if unit_fqn == self._here and phase == self._phase:
            return
        leave, enter = (
            (self._leave_forward, self._enter_forward)
            if phase == "forward"
            else (self._leave_backward, self._enter_backward)
        )
        leave()
        self._phase, self._here = phase, unit_fqn
        if unit_fqn != REST:
            enter(self._units[unit_fqn])

    def _enter_forward(self, unit: _Unit) -> None:
        self._gather(unit)
        self._let_go_of_last_buffer()
        self._copy_out(unit)
        self._last_buffer, unit.buffer = unit.buffer, None

    def _leave_forward(self) -> None:
        if self._here != REST:
            self._order.append(self._here)
            self._reshard(self._units[self._here])
            self._here = REST

    def _begin_backward(self) -> None:
        self._phase = "backward"
        self._let_go_of_last_buffer()
        self._gather_ahead(len(self._order))

    def _enter_backward(self, unit: _Unit) -> None:
        if unit.copies:
            return
        self._gather(unit)
        self._copy_out(unit)
        self._give_back_buffer(unit)
        before = self._order.index(self._here) if self._here in self._order else 0
        self._gather_ahead(before)

    def _gather_ahead(self, num_units: int) -> None:
        """The last of so many units that have computed is the next whose backward comes."""
        if num_units:
            self._gather(self._units[self._order[num_units - 1]])

    def _leave_backward(self) -> None:
        if self._here != REST:
            self._reduce(self._units[self._here])
            self._here = REST

    def end_backward(self) -> None:
        """Backward is over: the rest is given up, its gradients are reduced, and all buffers go."""
        self._leave_backward()
        for unit in self._units.values():
            if unit.copies:  # its inputs have no gradients, or it is the rest
                self._reduce(unit)
            self._give_back_buffer(unit)
            for parameter in unit.parameters:
                parameter.grad = None
        self._let_go_of_reducing()

    # ---- what it allocates there

    def _gather(self, unit: _Unit) -> None:
        if unit.buffer is None:
            unit.buffer = self._log.take(sum(unit.padded), GATHERING)

    def _copy_out(self, unit: _Unit) -> None:
        unit.copies = [self._log.take(num_bytes) for num_bytes in unit.padded]

    def _reshard(self, unit: _Unit) -> None:
        for serial in unit.copies:
            self._log.give_back(serial)
        unit.copies = []

    def _give_back_buffer(self, unit: _Unit) -> None:
        if unit.buffer is not None:
            self._log.give_back(unit.buffer)
            unit.buffer = None

    def _let_go_of_last_buffer(self) -> None:
        if self._last_buffer is not None:
            self._log.give_back(self._last_buffer)
            self._last_buffer = None

    def _let_go_of_reducing(self) -> None:
        if self._reducing is not None:
            self._log.give_back(self._reducing)
            self._reducing = None

    def _reduce(self, unit: _Unit) -> None:
        """The unit's parameters go, and its gradients become shares."""
        self._reshard(unit)
        self._let_go_of_reducing()
        reduced_bytes = 0
        keys = []
        for parameter, num_bytes in zip(unit.parameters, unit.padded, strict=True):
            gradient = held_gradient(parameter)
            if gradient is not None:
                self._trained.add(id(parameter))
                reduced_bytes += num_bytes
                keys.append(private.storage_key(gradient.untyped_storage()))
        if not keys:
            return
        self._reducing = self._log.take(reduced_bytes)
        for key in keys:
            self._log.free(key)
        unit.reduced = self._log.take(reduced_bytes // self._num_shards, REDUCING)


def step_one_by_one(stepping: Optimizer, theirs: str | Optimizer) -> None:
    """Sharded parameters are `DTensor`s, which PyTorch steps one by one where nobody has asked for another way."""
    groups = stepping.param_groups
    originals = groups if isinstance(theirs, str) else theirs.param_groups
    for group, original in zip(groups, originals, strict=True):
        if isinstance(theirs, str) or private.chooses_by_device(theirs, original):
            group["foreach"] = False


def knows_shares(rehearsal: FakeRehearsal) -> bool:
    """Whether a rank's steps can be recorded: units are the blocks, and each is called once.

    Not where gradients of several batches are added up: whole ones may be kept until they are reduced (`no_sync`).
    """
    sharding = rehearsal.sharding
    if sharding is None or not sharding.names or rehearsal.holds_gradients or rehearsal.leaves_gradients:
        return False
    return all(rehearsal.num_calls.get(fqn, 0) == 1 for fqn in sharding.units)
