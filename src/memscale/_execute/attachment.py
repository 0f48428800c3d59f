"""What a technique finds when it is attached: the model, where to put its undo, and what it shares with others.

technique.attach(actions, attachment)       # all actions of one technique at once, techniques in order of `place`
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memscale._execute.settings import ExecutionSettings, is_fake
from memscale._plan import Action, LayerAction
from memscale._torch.overrides import find_module

if TYPE_CHECKING:
    from memscale._execute.offloading import Offloading
    from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
    from memscale.techniques.offload.optimizer.late_state import SendStateLate
    from memscale.techniques.offload.transfer.transfers import Transfers
    from memscale.techniques.precision.autocast import Precision
    from memscale.techniques.precision.loss_scale import LossScale
    from memscale.techniques.recompute import RecomputedForward

Packer = Callable[[contextlib.ExitStack], Any]
"""Makes what says how optimizer state waits; it is undone with the state."""


@dataclasses.dataclass(frozen=True, slots=True)
class StateHandling:
    """What one technique does about optimizer state."""

    actions: tuple[Any, ...]
    moves: bool
    """State waits on the next tier."""
    packer: Packer | None
    resident_share: float = 0.0
    """The share of what could wait there that stays on the device."""
    guest_bytes: int | None = None
    """Streamed parameters are stepped on the device, so many bytes of them at once; None: nothing is said of them."""


class Attachment:
    """The attachment of one plan to one model."""

    def __init__(
        self,
        model: nn.Module,
        settings: ExecutionSettings,
        undo: contextlib.ExitStack,
        offloading: Offloading,
        waiting_bytes: int | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.undo = undo
        self.offloading = offloading
        self.loss_scale = loss_scale
        """What the plan before has scaled losses with."""
        self.placed_from: torch.device | None = None
        """Where the model was before the executor moved it to its device; None: it was not moved."""
        self.recomputed: list[RecomputedForward] = []
        """Blocks that are computed again in backward, for what wants to count them."""
        self.precision: Precision | None = None
        self.at_home: Sequence[LayerAction] = ()
        """Layers whose parameters live in host memory."""
        self.held: list[torch.Tensor] = []
        """What exists before the step on a stage, beside the model and its inputs."""
        self.lessons: list[Callable[[], Any]] = []
        """What is asked to say what a technique has learnt from steps, such as in which order layers come."""
        self.begun: list[Callable[[], None]] = []
        """Called where a forward of the model has begun already, which is to follow the plan."""
        self.early: Sequence[FetchStateEarly] = ()
        """Layers before whose backward some of the optimizer's state is asked for."""
        self.late: Sequence[SendStateLate] = ()
        """Layers before whose forward some of the state that still leaves lets go of its memory."""
        self._waiting_bytes = waiting_bytes
        self._held: list[StateHandling] = []
        self._is_settled = False
        self._tier: Transfers | None = None

    @property
    def device(self) -> torch.device:
        return self.settings.device_of(self.model)

    @property
    def users(self) -> dict[str, Any]:
        """Who moves tensors, with its `stats`, by technique."""
        return self.offloading.users

    def find_module(self, action: LayerAction) -> nn.Module:
        return find_module(self.model, action.module_fqn)

    def hold_state(
        self,
        actions: Sequence[Action],
        *,
        moves: bool = False,
        packer: Packer | None = None,
        resident_share: float = 0.0,
        guest_bytes: int | None = None,
    ) -> None:
        """Adopt the model's optimizer, with all that is said about its state: what waits packed is what travels."""
        self._held.append(StateHandling(tuple(actions), moves, packer, resident_share, guest_bytes))

    def open_tier(self) -> Transfers:
        """The one tier that all of the plan share; `StoreFullError` if it has no room for what is known to wait."""
        self.settle_state()
        if self._tier is None:
            self._tier = self.offloading.open_tier(self._tier_budget(), self.undo)
            self._tier.require_room(self._waiting_bytes or 0)
        return self._tier

    def settle_state(self) -> None:
        """What was said about optimizer state is done, or undone where nothing was said. A second call does nothing."""
        if self._is_settled:
            return
        self._is_settled = True
        # A rehearsal runs no optimizer step.
        held = [] if is_fake(self.model) else self._held
        self._tier = self.offloading.settle_state(held, self._tier_budget(), self._waiting_bytes)
        if self._tier is not None:
            self._tier.require_room(self._waiting_bytes or 0)

    def _tier_budget(self) -> int | None:
        """What streaming leaves of the host budget."""
        budget = self.settings.host_budget_bytes
        if budget is None:
            return None
        modules = [self.find_module(action) for action in self.at_home]
        homes = {id(p): p.nbytes * (1 + p.requires_grad) for module in modules for p in module.parameters()}
        return max(0, budget - sum(homes.values()))
