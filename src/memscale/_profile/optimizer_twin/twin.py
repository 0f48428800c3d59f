"""The optimizer over fake parameters, and trials of its step there."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._profile.optimizer_twin.books import Books
from memscale._profile.optimizer_twin.same_optimizer import host_counters, same_class
from memscale._profile.optimizer_twin.stepping import Prepare
from memscale._profile.rehearsal import device_exists
from memscale._profile.sharding import share_rows
from memscale._profile.values import Recollection
from memscale._torch import private
from memscale._torch.live_bytes import rounding_of
from memscale._torch.optimizer_steps import parameters_of

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "sgd_momentum": ("SGD", {"momentum": 0.9}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
    "adafactor": ("Adafactor", {}),
}
"""Optimizers that can be named in `estimate`; `"none"` is training without one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """What two steps of an optimizer over some parameters have shown, however its state is to wait afterwards."""

    optimizer: Optimizer
    states: tuple[Mapping[Any, Any], ...]
    """The states of the parameters with gradients, in their order."""
    state_bytes: int
    making_bytes: int
    """The most that there was in the first step, in which the state is made."""
    step_bytes: int
    """The temporaries of the second."""
    num_launches: int
    launched_bytes: int


Trials = dict[Hashable, Trial]
"""Trials by what decides what their steps take: the kinds of the parameters, group by group."""


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a parameter decides what its step takes."""
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class SteppedModel:
    """A model, the optimizer that steps it, and the device that this happens on."""

    model: nn.Module
    optimizer: str | Optimizer
    """The optimizer, or one of the names in `OPTIMIZERS`."""
    device_type: str
    left_out: Collection[int] = ()
    """The ids of parameters that are streamed."""
    idle: Collection[int] = ()
    """The ids of parameters that get no gradient."""
    prepare: Prepare | None = None
    """Called before any step."""
    num_shards: int = 1
    """The optimizer steps one of so many shares of each parameter."""
    trials: Trials = dataclasses.field(default_factory=dict)
    """Steps of the same optimizer on this device that are known; more are added."""
    stand_ins: Mapping[int, nn.Parameter] = dataclasses.field(default_factory=dict)
    """Fake parameters that are there already, by the ids of those that they stand for."""


class Twin:
    """The same optimizer over fake parameters, choosing its implementation as the real device would."""

    def __init__(self, stepped: SteppedModel) -> None:
        model, optimizer, device_type = stepped.model, stepped.optimizer, stepped.device_type
        left_out = self.left_out = stepped.left_out
        self._num_shards = stepped.num_shards
        self._idle = stepped.idle
        self._prepare = stepped.prepare
        self._trials = stepped.trials
        self._stand_ins = stepped.stand_ins
        self.name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
        self.device_type = device_type
        self.mode = private.fake_tensor_mode()
        self.is_emulated = not device_exists(device_type)
        self.rounding_bytes = rounding_of(device_type)
        self.device = torch.device("cpu" if self.is_emulated else device_type)
        self.fakes: dict[int, nn.Parameter] = {}
        self._idle_fakes: dict[int, nn.Parameter] = {}
        """They get no gradient here, either: whether anything is kept for them is for the optimizer to say."""
        if isinstance(optimizer, str):
            class_name, options = OPTIMIZERS[optimizer]
            members = [list(model.parameters())]
            groups = [{"params": self._fake_all(members[0])}]
            self.optimizer: Optimizer = getattr(torch.optim, class_name)(groups, **options)
            self.optimizer.state.clear()  # Adagrad makes its state at once; made at the first step it is counted
        else:
            members = [group["params"] for group in optimizer.param_groups]
            groups = [{**group, "params": self._fake_all(group["params"])} for group in optimizer.param_groups]
            self.optimizer = same_class(optimizer, groups)
        self.members = members
        self.resident = [p for p in each_once(members) if id(p) not in left_out]
        self.picked = self._pick_foreach()
        self.split = [i for i in self.picked if any(self.is_trained(p) and id(p) in left_out for p in members[i])]

    def _pick_foreach(self) -> list[int]:
        """Choose the multi-tensor step as PyTorch does, but never for fake tensors. Returns the groups it is chosen
        for.

        NOTE [two devices]: PyTorch does so only for a group whose parameters are all on such a device. When some are
        streamed, and thus on the host, those of each device are stepped for themselves, at once; an optimizer that
        cannot be split is left to PyTorch, which steps the group's parameters one by one.
        """
        has_foreach = self.device_type in private.foreach_device_types()
        groups = self.optimizer.param_groups
        free = [i for i, group in enumerate(groups) if private.chooses_by_device(self.optimizer, group)]
        for index in free:
            groups[index]["foreach"] = has_foreach
        return free if has_foreach else []

    def _fake_all(self, parameters: Any) -> list[nn.Parameter]:
        return [self._fake(p) for p in parameters if p.requires_grad and id(p) not in self.left_out]

    def is_trained(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad and id(parameter) not in self._idle

    def _fake(self, parameter: torch.Tensor) -> nn.Parameter:
        fakes = self.fakes if self.is_trained(parameter) else self._idle_fakes
        if id(parameter) in self._stand_ins:
            fakes[id(parameter)] = self._stand_ins[id(parameter)]
        elif id(parameter) not in fakes:
            with self.mode:
                shape, stride = parameter.shape, parameter.stride()
                if self._num_shards > 1 and shape:
                    shape = torch.Size((share_rows(parameter, self._num_shards), *shape[1:]))
                empty = torch.empty_strided(shape, stride, dtype=parameter.dtype, device=self.device)
                fakes[id(parameter)] = nn.Parameter(empty)
        return fakes[id(parameter)]

    def again(self, looped: Collection[int] = ()) -> Optimizer:
        """The same over all parameters, without state; those of some groups are stepped one by one."""
        groups = enumerate(self.optimizer.param_groups)
        return same_class(self.optimizer, [{**g, "foreach": False} if i in looped else g for i, g in groups])

    def tried(self, optimizer: Optimizer, trained: dict[int, nn.Parameter], packs: tuple[bool, ...] = ()) -> Trial:
        """Two steps with gradients for these; what is alike is tried once, whole or in buckets of any kind.

        What is prepared before its steps may be prepared by what it packs.
        """
        inside = {id(fake) for fake in trained.values()}
        members = tuple(
            (index, group.get("foreach"), id(fake) in inside, kind_of(fake))
            for index, group in enumerate(optimizer.param_groups)
            for fake in group["params"]
        )
        key = members, packs if self._prepare is not None else ()
        if key not in self._trials:
            self._trials[key] = self._try(optimizer, trained)
        return self._trials[key]

    def _try(self, optimizer: Optimizer, trained: dict[int, nn.Parameter]) -> Trial:
        books = self._books()
        with self.mode:
            for parameter in trained.values():
                parameter.grad = torch.empty_like(parameter)
            parameters = parameters_of(optimizer)
            books.see_all([parameters, [parameter.grad for parameter in parameters]])
            before = books.total_bytes
            books.reset_peak()
            if private.active_modes() == [self.mode]:
                books.recall = Recollection(self.mode)
            with books:
                if self._prepare is not None:
                    self._prepare(optimizer, trained)
                optimizer.step()
                making_bytes, state_bytes = books.peak_bytes - before, books.total_bytes - before
                books.reset_peak()
                books.begin_work()
                optimizer.step()
            step_bytes = max(0, books.peak_bytes - before - state_bytes)
        for parameter in trained.values():
            parameter.grad = None
        work, states = books.work, tuple(optimizer.state[parameter] for parameter in trained.values())
        moved_bytes = work.matmul_bytes + work.other_bytes
        return Trial(optimizer, states, state_bytes, making_bytes, step_bytes, work.num_launches, moved_bytes)

    def _books(self) -> Books:
        books = Books(self.device.type, self.rounding_bytes)
        books.opens_kernels = self.device_type == "cpu"
        return books

    def counter_bytes(self, optimizer: Optimizer) -> int:
        """The bytes of counters that are on the host in a real run, and were counted here."""
        return self.rounding_bytes * len(host_counters(optimizer)) if self.is_emulated else 0


def each_once(members: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The parameters in the order of the groups."""
    return list({id(parameter): parameter for group in members for parameter in group}.values())
