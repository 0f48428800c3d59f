"""What an executor keeps on other tiers: streamed parameters, activations and optimizer state, which share one tier.

    offloading.attach(actions, undo, waiting_bytes)     # streaming and activations are undone with the plan
    offloading.give_back()                              # optimizer state is back where its parameters are

Optimizer state outlives the plan: it may not fit anywhere else while there is none. A later plan that treats it alike
goes on with it; before one that does not, it is given back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._execute.settings import ExecutionSettings, is_fake
from memscale._plan import Action, OffloadActivations, OffloadOptimizer, QuantizeOptimizer, Reason, StreamParameters
from memscale._torch.overrides import find_module
from memscale.techniques import optimizer8bit
from memscale.techniques.offload import activations, optimizer
from memscale.techniques.offload.parameters import streaming
from memscale.techniques.offload.parameters.streamer import Streamer
from memscale.techniques.offload.store import tiers
from memscale.techniques.offload.transfer.transfers import Transfers

_StateAction: TypeAlias = OffloadOptimizer | QuantizeOptimizer
"""What is done about optimizer state."""
AnyAction = TypeVar("AnyAction", bound=Action)


@dataclasses.dataclass(frozen=True, slots=True)
class ParkedState:
    """Optimizer state that waits elsewhere, from one plan to the next."""

    actions: tuple[_StateAction, ...]
    transfers: Transfers | None
    adoption: optimizer.Adoption
    undo: contextlib.ExitStack

    def goes_on_with(self, actions: Sequence[_StateAction]) -> bool:
        return without_reasons(actions) == self.actions

    def resume(self, host_budget_bytes: int | None) -> None:
        """Another plan is attached: parameters may have moved, and the host's budget with them."""
        if self.transfers is not None:
            tiers.set_host_budget(self.transfers.store, host_budget_bytes)
        self.adoption.follow_devices()


def without_reasons(actions: Sequence[AnyAction]) -> tuple[AnyAction, ...]:
    """What is done, whyever it is done."""
    return tuple(dataclasses.replace(action, reason=Reason("")) for action in actions)


class Offloading:
    """The tiers of one model."""

    def __init__(
        self,
        model_ref: weakref.ref[nn.Module],
        settings: ExecutionSettings,
        optimizer_ref: weakref.ref[Optimizer] | None,
    ) -> None:
        self._model_ref = model_ref
        self._settings = settings
        self._optimizer = optimizer_ref
        """None: whatever optimizer steps first on the model's parameters."""
        self.users: dict[str, Any] = {}
        """By technique: who moves tensors, with its `stats`."""
        self.parked: ParkedState | None = None
        self._handed_over: Streamer | None = None
        """By the plan before; only while one takes the place of another."""

    @property
    def _model(self) -> nn.Module:
        model = self._model_ref()
        assert model is not None, "who attaches holds the model"
        return model

    @property
    def _device(self) -> torch.device:
        return self._settings.device_of(self._model)

    @property
    def _is_fake(self) -> bool:
        return is_fake(self._model)

    def attach(self, actions: Sequence[Action], undo: contextlib.ExitStack, waiting_bytes: int | None) -> None:
        """All that these actions move to other tiers, until undone; optimizer state goes on waiting after that.

        `waiting_bytes` are known to wait there; `StoreFullError` if there is no room for them. None: not known.
        """
        streamed = [action for action in actions if isinstance(action, StreamParameters)]
        sent_away = [action for action in actions if isinstance(action, OffloadActivations)]
        if streamed:
            self._attach_streaming(streamed, undo)
        # A rehearsal runs no optimizer step.
        kinds = OffloadOptimizer | QuantizeOptimizer
        optimizers = [] if self._is_fake else [action for action in actions if isinstance(action, kinds)]
        if self.parked is not None and not self.parked.goes_on_with(optimizers):
            self.give_back()  # now that parameters are where this plan wants them
        budget = self._tier_budget(streamed)
        if self.parked is not None:
            self.parked.resume(budget)
        elif optimizers:
            self._park(optimizers, budget, waiting_bytes)
        transfers = self.parked.transfers if self.parked is not None else None
        if transfers is None and sent_away:
            transfers = self._open_tier(budget, undo)
        if transfers is not None:
            transfers.require_room(waiting_bytes or 0)
        if self.parked is not None:
            self.users["optimizer"] = self.parked.adoption
        if sent_away:
            assert transfers is not None
            self._attach_activations(sent_away, transfers, undo)

    def _park(self, actions: Sequence[_StateAction], budget: int | None, waiting_bytes: int | None) -> None:
        """Adopt the optimizer. Its state outlives the plan: a later one that treats it alike goes on with it."""
        with contextlib.ExitStack() as undo:
            moves_state = any(isinstance(action, OffloadOptimizer) for action in actions)
            transfers = self._open_tier(budget, undo) if moves_state else None
            adoption = self._attach_optimizer(actions, transfers, self._host_has_room(budget, waiting_bytes), undo)
            self.parked = ParkedState(without_reasons(actions), transfers, adoption, undo.pop_all())

    def turn_to(self, settings: ExecutionSettings) -> None:
        """The model computes on another device: tiers are opened anew, below that one."""
        self.give_back()
        self._settings = settings

    def give_back(self) -> None:
        """The whole optimizer state, to where its parameters are. A second call does nothing."""
        parked, self.parked = self.parked, None
        if parked is not None:
            parked.undo.close()

    def hand_over(self, actions: Sequence[Action]) -> None:
        """Before a plan is taken off for one with these actions: what both stream stays at home in between."""
        modules = [find_module(self._model, a.module_fqn) for a in actions if isinstance(a, StreamParameters)]
        streamer = self.users.get("streaming")
        if modules and streamer is not None and not self._is_fake:
            streamer.homes.hand_over(streaming.streamable(self._model, modules))
            self._handed_over = streamer

    def end_hand_over(self) -> None:
        """After it: where the next plan could not be attached, parameters go back to where they came from."""
        streamer, self._handed_over = self._handed_over, None
        if streamer is not None:
            streaming.let_go(streamer, self._model)

    def _attach_streaming(self, actions: Sequence[StreamParameters], undo: contextlib.ExitStack) -> None:
        settings = self._settings
        streamer = streaming.attach(
            actions,
            self._model,
            self._device,
            undo,
            asynchronous=settings.asynchronous,
            prefetch_depth=settings.async_config.prefetch_depth,
            host_budget_bytes=settings.host_budget_bytes,
            gradient_window_bytes=min(settings.async_config.window_bytes, streaming.GRADIENT_WINDOW_BYTES),
            verify=settings.verify,
            previous=self._handed_over,
        )
        self._handed_over = None
        self.users["streaming"] = streamer
        if not self._is_fake and torch.accelerator.is_available():
            torch.accelerator.empty_cache()  # else the segments that parameters have left stay reserved for nobody

    def _attach_activations(
        self, actions: Sequence[OffloadActivations], transfers: Transfers, undo: contextlib.ExitStack
    ) -> None:
        self.users["activations"] = activations.attach(
            actions,
            self._model,
            self._device,
            undo,
            transfers=transfers,
            min_tensor_bytes=self._settings.async_config.min_tensor_bytes,
            prefetch_bytes=self._settings.async_config.prefetch_bytes,
        )

    def _attach_optimizer(
        self,
        actions: Sequence[_StateAction],
        transfers: Transfers | None,
        host_has_room: bool,
        undo: contextlib.ExitStack,
    ) -> optimizer.Adoption:
        """One adoption for both: what waits in 8 bits is what travels."""
        quantized = [action for action in actions if isinstance(action, QuantizeOptimizer)]
        packer = optimizer8bit.EightBit(quantized[0], self._model, undo, self._device) if quantized else None
        bucket_bytes = min(action.bucket_bytes for action in actions)
        store = transfers.store if transfers is not None else None
        known = self._optimizer() if self._optimizer is not None else None
        if known is None:
            return optimizer.adopt(self._model, store, transfers, bucket_bytes, undo, packer, host_has_room)
        return optimizer.adopt_optimizer(known, store, transfers, bucket_bytes, undo, packer, host_has_room)

    def _host_has_room(self, budget: int | None, waiting_bytes: int | None) -> bool:
        """Whether all that waits is known to fit in host memory, so that nothing in it needs to leave for the disk."""
        if waiting_bytes is None or self._device.type == "cpu":
            return False
        return budget is None or waiting_bytes <= budget

    def _tier_budget(self, streamed: Sequence[StreamParameters]) -> int | None:
        """What streaming leaves of the host budget."""
        budget = self._settings.host_budget_bytes
        if budget is None:
            return None
        modules = [find_module(self._model, action.module_fqn) for action in streamed]
        homes = {id(p): p.nbytes * (1 + p.requires_grad) for module in modules for p in module.parameters()}
        return max(0, budget - sum(homes.values()))

    def _open_tier(self, budget: int | None, undo: contextlib.ExitStack) -> Transfers:
        """One tier for activations and optimizer state."""
        return tiers.open_tier(
            self._device,
            undo,
            is_fake=self._is_fake,
            asynchronous=self._settings.asynchronous,
            async_config=self._settings.async_config,
            host_budget_bytes=budget,
            offload_dir=self._settings.offload_dir,
        )

    def traffic(self) -> tuple[int, int, int, int]:
        """Transfers to the next tier so far and their bytes; those back, and theirs. Without the optimizer's."""
        stats = [self.users[name].stats.transfers for name in ("streaming", "activations") if name in self.users]
        return (
            sum(one.num_sends for one in stats),
            sum(one.bytes_sent for one in stats),
            sum(one.num_fetches for one in stats),
            sum(one.bytes_fetched for one in stats),
        )
