"""What an executor keeps on other tiers: streamed parameters, activations and optimizer state, which share one tier.

    offloading.settle_state(held, budget, waiting_bytes)     # optimizer state goes where the plan says, or back
    offloading.give_back()                                   # it is back where its parameters are

Optimizer state outlives the plan: it may not fit anywhere else while there is none. A later plan that treats it alike
goes on with it; before one that does not, it is given back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._execute.attachment import StateHandling
from memscale._execute.settings import ExecutionSettings, is_fake
from memscale._plan import Action, Reason
from memscale._torch.overrides import find_module
from memscale.techniques import streamed_fqns
from memscale.techniques.offload.optimizer import adoption
from memscale.techniques.offload.optimizer.adopted_optimizer import BucketSizes
from memscale.techniques.offload.parameters import streaming
from memscale.techniques.offload.parameters.streamer import Streamer
from memscale.techniques.offload.store import tiers
from memscale.techniques.offload.transfer.transfers import Transfers

AnyAction = TypeVar("AnyAction", bound=Action)


@dataclasses.dataclass(frozen=True, slots=True)
class ParkedState:
    """Optimizer state that waits elsewhere, from one plan to the next."""

    actions: tuple[Any, ...]
    overlaps: bool
    """Whether it was parked for transfers beside compute, in pinned memory."""
    transfers: Transfers | None
    adoption: adoption.Adoption
    undo: contextlib.ExitStack

    def goes_on_with(self, actions: Sequence[Action], settings: ExecutionSettings) -> bool:
        """Memory that is pinned serves transfers that block, too; other memory does not serve those that overlap."""
        can_travel = self.transfers is None or self.overlaps or not settings.asynchronous
        return can_travel and without_reasons(actions) == self.actions

    def resume(self, host_budget_bytes: int | None, settings: ExecutionSettings) -> None:
        """Another plan is attached: parameters may have moved, the host's budget with them, and the way that state
        travels may be another."""
        if self.transfers is not None:
            tiers.set_host_budget(self.transfers.store, host_budget_bytes)
            self.transfers.turn_to(settings.asynchronous, settings.async_config.window_bytes)
        self.adoption.follow_devices()


def without_reasons(actions: Sequence[AnyAction]) -> tuple[AnyAction, ...]:
    """The actions without the reasons for them."""
    return tuple(dataclasses.replace(action, reason=Reason("")) for action in actions)


def _bucket_sizes(held: Sequence[StateHandling]) -> BucketSizes:
    """State of what is on the device stays there where nobody moves it, though there is a tier for that of guests."""
    of_residents = [action.bucket_bytes for one in held if one.guest_bytes is None for action in one.actions]
    return BucketSizes(
        resident_bytes=min(of_residents, default=None),
        resident_share=max((one.resident_share for one in held if one.moves), default=1.0),
        guest_bytes=min((one.guest_bytes for one in held if one.guest_bytes is not None), default=None),
    )


class Offloading:
    """The tiers of one model."""

    def __init__(
        self,
        model_ref: weakref.ref[nn.Module],
        settings: ExecutionSettings,
        optimizer_ref: weakref.ref[Optimizer] | None,
    ) -> None:
        self._model_ref = model_ref
        self.settings = settings
        """The settings of the plan that is attached, or is about to be."""
        self._optimizer = optimizer_ref
        """None: whatever optimizer steps first on the model's parameters."""
        self.users: dict[str, Any] = {}
        """Who moves tensors, with its `stats`, by technique."""
        self.parked: ParkedState | None = None
        self.handed_over: Streamer | None = None
        """The streamer of the plan before; only while one plan takes the place of another."""

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        assert model is not None, "who attaches holds the model"
        return model

    @property
    def _device(self) -> torch.device:
        return self.settings.device_of(self._model)

    @property
    def _is_fake(self) -> bool:
        return is_fake(self._model)

    @property
    def optimizer(self) -> Optimizer | None:
        """None: not known yet."""
        return self._optimizer() if self._optimizer is not None else None

    def settle_state(
        self, held: Sequence[StateHandling], budget: int | None, waiting_bytes: int | None
    ) -> Transfers | None:
        """Optimizer state waits as these say; where they say nothing, it is where its parameters are.

        `waiting_bytes` are known to wait; None: not known. What is returned moves the state; None: nothing does.
        """
        actions = [action for one in held for action in one.actions]
        if self.parked is not None and not self.parked.goes_on_with(actions, self.settings):
            self.give_back()  # now that parameters are where this plan wants them
        if self.parked is not None:
            self.parked.resume(budget, self.settings)
        elif actions:
            self._park(held, budget, waiting_bytes)
        if self.parked is None:
            return None
        self.users["optimizer"] = self.parked.adoption
        return self.parked.transfers

    def _park(self, held: Sequence[StateHandling], budget: int | None, waiting_bytes: int | None) -> None:
        """Adopt the optimizer. Its state outlives the plan: a later one that treats it alike goes on with it."""
        actions = [action for one in held for action in one.actions]
        with contextlib.ExitStack() as undo:
            transfers = self.open_tier(budget, undo) if any(one.moves or one.guest_bytes for one in held) else None
            adopted = self._adopt(held, transfers, self._host_has_room(budget, waiting_bytes), undo)
            how = without_reasons(actions), self.settings.asynchronous
            self.parked = ParkedState(*how, transfers, adopted, undo.pop_all())

    def turn_to(self, settings: ExecutionSettings) -> None:
        """The model computes on another device: tiers are opened anew, below that one."""
        self.give_back()
        self.settings = settings

    def give_back(self) -> None:
        """The whole optimizer state, to where its parameters are. A second call does nothing."""
        parked, self.parked = self.parked, None
        if parked is not None:
            parked.undo.close()

    def let_go(self) -> None:
        """Let what is on its way arrive, and keep nothing of ours on the device; called between two steps."""
        streamer = self.users.get("streaming")
        if streamer is not None:
            streamer.let_go()
        if self.parked is not None:
            self.parked.adoption.drop_early()
            self.parked.adoption.late.let_go_all()
        parked = self.parked.transfers if self.parked is not None else None
        moving = [parked, *(getattr(user, "transfers", None) for user in self.users.values())]
        for transfers in {id(one): one for one in moving if one is not None}.values():
            transfers.settle()

    def hand_over(self, actions: Sequence[Action]) -> None:
        """Note what this plan and one with these actions both stream: it stays at home while the plans change."""
        modules = [find_module(self._model, module_fqn) for module_fqn in streamed_fqns(actions)]
        streamer = self.users.get("streaming")
        if modules and streamer is not None and not self._is_fake:
            streamer.homes.hand_over(streaming.streamable(self._model, modules))
            self.handed_over = streamer

    def end_hand_over(self) -> None:
        """End a change of plans: if the next could not be attached, parameters go back to where they came from."""
        streamer, self.handed_over = self.handed_over, None
        if streamer is not None:
            streaming.let_go(streamer, self._model)

    def _adopt(
        self,
        held: Sequence[StateHandling],
        transfers: Transfers | None,
        host_has_room: bool,
        undo: contextlib.ExitStack,
    ) -> adoption.Adoption:
        """One adoption for all: what waits packed is what travels."""
        packers = [one.packer for one in held if one.packer is not None]
        packer = packers[0](undo) if packers else None
        store, sizes = transfers.store if transfers is not None else None, _bucket_sizes(held)
        known = self.optimizer
        if known is None:
            return adoption.adopt(self._model, store, transfers, sizes, undo, packer, host_has_room)
        return adoption.adopt_optimizer(known, store, transfers, sizes, undo, packer, host_has_room)

    def _host_has_room(self, budget: int | None, waiting_bytes: int | None) -> bool:
        """Whether all that waits is known to fit in host memory, so that nothing in it needs to leave for the disk."""
        if waiting_bytes is None or self._device.type == "cpu":
            return False
        return budget is None or waiting_bytes <= budget

    def open_tier(self, budget: int | None, undo: contextlib.ExitStack) -> Transfers:
        """One tier for activations and optimizer state."""
        return tiers.open_tier(
            self._device,
            undo,
            is_fake=self._is_fake,
            asynchronous=self.settings.asynchronous,
            async_config=self.settings.async_config,
            host_budget_bytes=budget,
            offload_dir=self.settings.offload_dir,
            verify=self.settings.verify,
        )

    def taken_bytes(self, *, in_memory: bool) -> int:
        """The most that was taken of host memory, or of the disk, for what waits there.

        With overlap streamed parameters are in the store, too; else they are ordinary host tensors.
        """
        users = [user for user in self.users.values() if getattr(user, "transfers", None) is not None]
        leaves = {id(leaf): leaf for user in users for leaf in user.transfers.store.leaves()}
        taken: int = sum(each.counters.peak_allocated_bytes for each in leaves.values() if each.in_memory == in_memory)
        streamer = self.users.get("streaming")
        if in_memory and streamer is not None and streamer.homes.store is None:
            taken += sum(parameter.nbytes for parameter in streamer.parameters())
        return taken

    def traffic(self) -> tuple[int, int, int, int]:
        """Transfers to the next tier so far and their bytes; those back, and theirs. Without the optimizer's."""
        users = [self.users[name] for name in ("streaming", "activations", "gradients") if name in self.users]
        stats = {id(user.stats.transfers): user.stats.transfers for user in users}.values()  # they may share a tier
        return (
            sum(one.num_sends for one in stats),
            sum(one.bytes_sent for one in stats),
            sum(one.num_fetches for one in stats),
            sum(one.bytes_fetched for one in stats),
        )
