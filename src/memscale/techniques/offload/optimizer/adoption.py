"""Adoption: the user's own optimizer steps bucket by bucket, on shadows of itself, while its state waits.

    with contextlib.ExitStack() as undo:
        adopt(model, store, transfers, bucket_bytes, undo)                  # the optimizer is adopted at its first step
        adopt_optimizer(optimizer, store, transfers, bucket_bytes, undo)    # or at once

The training loop, `param_groups`, schedulers, `GradScaler`, closures and checkpoints stay as they were. `state_dict()`
gives ordinary tensors on the host, which a plain optimizer loads, and a plain optimizer's state dict loads here. When
adoption is undone, the whole state is back on its device and the hooks are gone.

NOTE [how a step is taken over]: an optimizer that owns parameters of the model is adopted before its first step (see
`_torch/optimizer_steps.py`), and at once if it has stepped before. The work sits in an instance pre-hook that is kept
last, so that the user's own hooks, which may change gradients, come first. It steps the buckets (adopted_optimizer.py)
and hands the outer step a shadow without parameters.

Known limits: an optimizer whose update of one parameter depends on others is left alone with a warning. The dict that
`state_dict()` returns is a snapshot, whereas a plain optimizer's dict changes when the state does.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import Any, Protocol

from torch import nn
from torch.optim.optimizer import Optimizer

from memscale._torch.optimizer_steps import StepOrder, StepWatcher, living_optimizers, owns_any, watch_steps
from memscale._torch.overrides import undo_with
from memscale.techniques.offload.optimizer.adopted_optimizer import AdoptedOptimizer, BucketSizes
from memscale.techniques.offload.optimizer.bucket_transfers import OptimizerStats, Visits
from memscale.techniques.offload.optimizer.buckets import Choose
from memscale.techniques.offload.optimizer.late_departures import LateDepartures
from memscale.techniques.offload.optimizer.separable import NotSeparable, check_separable, is_shadow, is_taken_over
from memscale.techniques.offload.store.stores import Store
from memscale.techniques.offload.transfer.transfers import Transfers


class Packer(Protocol):
    """Chooses how the state of an optimizer is packed while it waits; None if it waits as it is."""

    def choose(self, optimizer: Optimizer) -> Choose | None: ...


def adopt(
    model: nn.Module,
    store: Store | None,
    transfers: Transfers | None,
    sizes: BucketSizes | int,
    undo: contextlib.ExitStack,
    packer: Packer | None = None,
    host_has_room: bool = False,
) -> Adoption:
    """Adopt every optimizer that owns parameters of the model, at its first step, before it has made any state.

    An optimizer that has state already is adopted at once, because the next step has no room for that on the device.

    Without a store the state stays on its device: a `packer` packs it there; without one it stays as it is, and only
    the step's temporaries shrink. With `host_has_room`, the state of parameters in host memory stays in host memory,
    even if there is a disk below it. A number in place of `sizes` is the size for parameters on the device.
    """
    adoption = Adoption(store, transfers, sizes, model, packer, host_has_room)
    undo.callback(adoption.detach)
    for optimizer in living_optimizers():
        if optimizer.state and adoption.concerns(optimizer):
            adoption.take(optimizer)
    adoption.watch(model)
    return adoption


def adopt_optimizer(
    optimizer: Optimizer,
    store: Store | None,
    transfers: Transfers | None,
    sizes: BucketSizes | int,
    undo: contextlib.ExitStack,
    packer: Packer | None = None,
    host_has_room: bool = False,
) -> Adoption:
    """Adopt this optimizer now, and move the state that it has."""
    adoption = Adoption(store, transfers, sizes, packer=packer, host_has_room=host_has_room)
    undo.callback(adoption.detach)
    adoption.take(optimizer)
    adoption.watch(optimizer)
    return adoption


class Adoption(StepWatcher):
    """The adopted optimizers of one model, or one optimizer. See NOTE [how a step is taken over]."""

    order = StepOrder.TAKE_OVER

    def __init__(
        self,
        store: Store | None,
        transfers: Transfers | None,
        sizes: BucketSizes | int,
        model: nn.Module | None = None,
        packer: Packer | None = None,
        host_has_room: bool = False,
    ) -> None:
        self.store = store
        self.packer = packer
        self.host_has_room = host_has_room
        self.transfers = transfers
        self.sizes = BucketSizes(sizes) if isinstance(sizes, int) else sizes
        self.stats = OptimizerStats()
        """What the adopted optimizers have done so far."""
        self._model = weakref.ref(model) if model is not None else None
        self._versions = _versions(model)
        self._known: weakref.WeakKeyDictionary[Optimizer, AdoptedOptimizer | None] = weakref.WeakKeyDictionary()
        self._left: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Those that another model's plan steps, as long as that is attached."""
        self._watching = contextlib.ExitStack()
        self._has_seen_any = False
        self._early_bytes = self._most_early_bytes = 0
        self.late = LateDepartures()
        """State that still leaves when a step is over."""

    def watch(self, owner: object) -> None:
        """Watch the steps of the model's optimizers as long as the owner lives."""
        undo_with(owner, watch_steps(self), self._watching)

    def concerns(self, optimizer: Optimizer) -> bool:
        if is_shadow(optimizer):
            return False
        model = self._model() if self._model is not None else None
        return optimizer in self._known or (model is not None and owns_any(optimizer, model.parameters()))

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._known:
            self.take(optimizer)
        adopted = self._known.get(optimizer)
        if adopted is not None:
            adopted.stay_last(optimizer)

    def take(self, optimizer: Optimizer) -> None:
        """Adopt an optimizer, or warn once why it cannot be adopted."""
        self._has_seen_any = True  # the optimizer may be gone when the model is detached
        if is_taken_over(optimizer):
            self._leave_to_others(optimizer)
            return
        self._known[optimizer] = None
        try:
            check_separable(optimizer)
        except NotSeparable as reason:
            warnings.warn(
                f"{type(optimizer).__name__} is left as it is, and its state stays on the device: {reason}",
                stacklevel=2,
            )
            return
        choose = self.packer.choose(optimizer) if self.packer is not None else None
        if choose is None and self.store is None and self.packer is not None:
            return  # 8 bits were asked for, and none of this state can be kept in 8 bits
        visits = Visits(self.store, self.transfers, self.stats, self.host_has_room)
        adopted = AdoptedOptimizer(visits, self.sizes, choose, self.late)
        adopted.attach(optimizer)
        self._known[optimizer] = adopted
        self.stats.num_optimizers += 1

    def _leave_to_others(self, optimizer: Optimizer) -> None:
        """One step is run by one: an optimizer over two models is stepped as the plan that came first says."""
        if optimizer not in self._left:
            self._left.add(optimizer)
            warnings.warn(
                f"{type(optimizer).__name__} steps parameters of another wrapped model, too, and is stepped as that "
                "model's plan says: what is planned for its state here is not done. Give each model an optimizer",
                stacklevel=2,
            )

    def follow_devices(self) -> None:
        """Let state follow parameters that have moved to other devices."""
        for optimizer, adopted in list(self._known.items()):
            if adopted is not None:
                adopted.follow_devices(optimizer)

    def expect_early(self, num_bytes: int) -> None:
        """From here on no more than so many bytes of state are asked for before a step; nothing is there now."""
        self._most_early_bytes = num_bytes
        self.drop_early()

    def fetch_early(self, num_bytes: int) -> None:
        """Ask for so much more of the state, before the optimizer steps. See NOTE [early state]."""
        self._early_bytes = min(self._early_bytes + num_bytes, self._most_early_bytes)
        every = [(optimizer, one) for optimizer, one in list(self._known.items()) if one is not None]
        for optimizer, adopted in every:
            others_bytes = sum(one.early.num_bytes for _, one in every if one is not adopted)
            adopted.early.fetch(optimizer.state, adopted.buckets, self._early_bytes - others_bytes)

    def drop_early(self) -> None:
        """Give up what was asked for and not used: a forward begins."""
        self._early_bytes = 0
        for adopted in list(self._known.values()):
            if adopted is not None:
                adopted.early.drop()

    def adopted(self, optimizer: Optimizer) -> bool:
        return self._known.get(optimizer) is not None

    def detach(self) -> None:
        """Bring the whole state back and remove the hooks. Warn if the model was trained by an unseen optimizer."""
        self._watching.close()
        with contextlib.ExitStack() as last:
            for adopted in list(self._known.values()):
                if adopted is not None:
                    last.callback(adopted.detach)
        model = self._model() if self._model is not None else None
        if not self._has_seen_any and model is not None and _was_trained(model, self._versions):
            warnings.warn(
                f"no optimizer of this {type(model).__name__} was ever seen to step, so {self._what_was_not_done}; "
                "only torch.optim.Optimizer subclasses are seen. Use memscale.optimize(model, optimizer)",
                stacklevel=2,
            )
        self._known.clear()

    @property
    def _what_was_not_done(self) -> str:
        if self.store is not None:
            return "no optimizer state was offloaded"
        return "none stepped in buckets" if self.packer is None else "no optimizer state was kept in 8 bits"


def _versions(model: nn.Module | None) -> dict[int, int]:
    return {id(p): p._version for p in model.parameters()} if model is not None else {}


def _was_trained(model: nn.Module, versions: dict[int, int]) -> bool:
    return any(p.grad is not None or p._version != versions.get(id(p), p._version) for p in model.parameters())
