"""`execute(model, plan)`: attaches the plan's actions. The `Executor` owns the undo stack: detach leaves no trace."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import assert_never

from memscale import _torch_private
from memscale._config import AsyncOffloadConfig
from memscale._errors import PlanError
from memscale._malloc import is_short, return_freed_memory
from memscale._patching import EXECUTOR_ATTRIBUTE, find_module, keep_copies_clean, set_attribute
from memscale._plan import (
    Action,
    Checkpoint,
    MixedPrecision,
    OffloadActivations,
    OffloadOptimizer,
    Plan,
    QuantizeOptimizer,
    Reason,
    StreamParameters,
    TileAttention,
    TileHead,
    TileMlp,
)
from memscale._recompute import RecomputedForward
from memscale.techniques import checkpointing, optimizer8bit, precision, tiling
from memscale.techniques.offload import activations, followers, optimizer, streaming, tiers
from memscale.techniques.offload.transfers import Transfers

logger = logging.getLogger("memscale")

_StateAction: TypeAlias = OffloadOptimizer | QuantizeOptimizer
"""What is done about optimizer state."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """How a plan is carried out on this machine; a plan itself says only what."""

    device: torch.device | None = None
    """Where the model computes; None: where its parameters are."""
    verify: bool = False
    asynchronous: bool = False
    async_config: AsyncOffloadConfig = dataclasses.field(default_factory=AsyncOffloadConfig)
    host_budget_bytes: int | None = None
    offload_dir: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """What happened since the plan was attached."""

    device_type: str
    peak_bytes: int | None
    """The device allocator's peak; None on a CPU, which keeps no such counter: use `memscale.measure()`."""
    num_recomputes: int
    """Blocks recomputed in backward."""
    transfers: dict[str, Any] = dataclasses.field(default_factory=dict)
    """By technique: bytes moved each way, time waited, hits of prefetching."""
    loss_scale: float | None = None
    """What fp16 gradients are multiplied with now; None where nothing is scaled."""
    num_skipped_steps: int = 0
    """Steps not taken because fp16 gradients had overflowed."""


class Executor:
    """What is attached to one model. Taking it off leaves the model as it was."""

    def __init__(
        self, model: nn.Module, settings: ExecutionSettings | None = None, optimizer: Optimizer | None = None
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self.settings = settings or ExecutionSettings()
        self._techniques = contextlib.ExitStack()
        self._undo = contextlib.ExitStack()
        self._recomputed: list[RecomputedForward] = []
        self._transfers: dict[str, Any] = {}
        self._parked: _ParkedState | None = None
        self._precision: precision.Precision | None = None
        self._loss_scale: precision.LossScale | None = None
        """Outlives the plan: a later one goes on with it."""
        self.plan: Plan | None = None
        """None until the first training forward, when there was nothing to plan from before."""
        self.outcomes: tuple[Any, ...] = ()
        """After `apply_all_optimizations`: each technique, and what was done or why it was not."""
        self.detached = False

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this executor is gone")
        return model

    def adopt(self) -> None:
        """Become the model's executor."""
        model = self.model
        vars(model)[EXECUTOR_ATTRIBUTE] = self
        self._undo.callback(_forget, self._model, weakref.ref(self))
        keep_copies_clean(model, self._undo)

    def apply(self, plan: Plan) -> None:
        """Put this plan in the place of the one before. All or nothing."""
        if self.plan is None or self.plan.actions != plan.actions:
            self.suspend()
            self.attach(plan.actions, waiting_bytes=plan.movable_bytes, peak_bytes=plan.predicted_peak_bytes)
        self.plan = plan

    def apply_inside(self, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`apply` in the first moment of a forward with these arguments: that forward follows the plan already."""
        before = self._precision
        self.apply(plan)
        if self._precision is not None and self._precision is not before:
            self._precision.enter(self.model, args, kwargs)

    def suspend(self) -> None:
        """Take the plan's techniques off; the model stays ours. Optimizer state goes on waiting: it may not fit."""
        self._techniques.close()
        self.plan = None

    def attach(
        self, actions: Iterable[Action], waiting_bytes: int | None = None, peak_bytes: int | None = None
    ) -> None:
        """Attach these actions: those on single blocks, the head, then what moves tensors to other tiers.

        `waiting_bytes` are known to wait there; `StoreFullError` if there is no room for them. `peak_bytes` is what
        the step is known to need on its device. None: not known.
        """
        actions = tuple(actions)
        with contextlib.ExitStack() as failing, contextlib.ExitStack() as undo:
            if self._parked is None:
                failing.callback(self._unpark)
            undo.callback(self._recomputed.clear)
            undo.callback(self._transfers.clear)
            undo.callback(self._forget_precision)
            if actions and self._device().type == "cpu" and not self._is_fake() and is_short(peak_bytes):
                return_freed_memory(self.model, undo)
            self._place(actions, undo)
            for action in sorted(actions, key=_is_around_blocks):
                self._attach_one(action, undo)
            self._attach_offloading(actions, undo, waiting_bytes)
            if any(isinstance(action, Checkpoint | StreamParameters) for action in actions):
                _switch_off_caches(self.model, undo)
            self._techniques = undo.pop_all()
            failing.pop_all()

    def _attach_one(self, action: Action, undo: contextlib.ExitStack) -> None:
        match action:
            case Checkpoint():
                module = find_module(self.model, action.module_fqn)
                self._recomputed.append(checkpointing.attach(action, module, undo, verify=self.settings.verify))
            case TileHead():
                tiling.attach_head(action, self.model, undo)
            case TileAttention():
                tiling.attach_attention(action, self.model, undo)
            case TileMlp():
                tiling.attach_mlp(action, self.model, undo)
            case MixedPrecision():
                self._attach_precision(action, undo)
            case OffloadActivations() | OffloadOptimizer() | StreamParameters() | QuantizeOptimizer():
                pass  # together, in _attach_offloading: they share tiers and prefetch one another's neighbours
            case _:
                assert_never(action)

    def _attach_precision(self, action: MixedPrecision, undo: contextlib.ExitStack) -> None:
        scale = self._loss_scale
        self._precision = precision.attach(action, self.model, self._device().type, undo, scale=scale)
        if self._precision is not None and self._precision.scale is not None:
            self._loss_scale = self._precision.scale

    def _forget_precision(self) -> None:
        self._precision = None

    def _place(self, actions: Sequence[Action], undo: contextlib.ExitStack) -> None:
        """Put the model where it computes. Streamed layers are placed by what streams them."""
        device = self.settings.device
        streams = any(isinstance(action, StreamParameters) for action in actions)
        if device is not None and not streams and not self._is_fake():
            place(self.model, device, undo)

    def _attach_offloading(
        self, actions: Sequence[Action], undo: contextlib.ExitStack, waiting_bytes: int | None
    ) -> None:
        streamed = [action for action in actions if isinstance(action, StreamParameters)]
        sent_away = [action for action in actions if isinstance(action, OffloadActivations)]
        if streamed:
            self._attach_streaming(streamed, undo)
        # A rehearsal runs no optimizer step.
        kinds = OffloadOptimizer | QuantizeOptimizer
        optimizers = [] if self._is_fake() else [action for action in actions if isinstance(action, kinds)]
        if self._parked is not None and not self._parked.goes_on_with(optimizers):
            self._unpark()  # now that parameters are where this plan wants them
        budget = self._tier_budget(streamed)
        if self._parked is not None:
            self._parked.resume(budget)
        elif optimizers:
            self._park(optimizers, budget, waiting_bytes)
        transfers = self._parked.transfers if self._parked is not None else None
        if transfers is None and sent_away:
            transfers = self._open_tier(budget, undo)
        if transfers is not None:
            transfers.require_room(waiting_bytes or 0)
        if self._parked is not None:
            self._transfers["optimizer"] = self._parked.adoption
        if sent_away:
            assert transfers is not None
            self._attach_activations(sent_away, transfers, undo)

    def _park(self, actions: Sequence[_StateAction], budget: int | None, waiting_bytes: int | None) -> None:
        """Adopt the optimizer. Its state outlives the plan: a later one that treats it alike goes on with it."""
        with contextlib.ExitStack() as undo:
            moves_state = any(isinstance(action, OffloadOptimizer) for action in actions)
            transfers = self._open_tier(budget, undo) if moves_state else None
            adoption = self._attach_optimizer(actions, transfers, self._host_has_room(budget, waiting_bytes), undo)
            self._parked = _ParkedState(_without_reasons(actions), transfers, adoption, undo.pop_all())

    def _unpark(self) -> None:
        parked, self._parked = self._parked, None
        if parked is not None:
            parked.undo.close()

    def _attach_streaming(self, actions: Sequence[StreamParameters], undo: contextlib.ExitStack) -> None:
        settings = self.settings
        streamer = streaming.attach(
            actions,
            self.model,
            self._device(),
            undo,
            asynchronous=settings.asynchronous,
            prefetch_depth=settings.async_config.prefetch_depth,
            host_budget_bytes=settings.host_budget_bytes,
            gradient_window_bytes=min(settings.async_config.window_bytes, streaming.GRADIENT_WINDOW_BYTES),
            verify=settings.verify,
        )
        self._transfers["streaming"] = streamer

    def _attach_activations(
        self, actions: Sequence[OffloadActivations], transfers: Transfers, undo: contextlib.ExitStack
    ) -> None:
        self._transfers["activations"] = activations.attach(
            actions,
            self.model,
            self._device(),
            undo,
            transfers=transfers,
            min_tensor_bytes=self.settings.async_config.min_tensor_bytes,
            prefetch_bytes=self.settings.async_config.prefetch_bytes,
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
        packer = optimizer8bit.EightBit(quantized[0], self.model, undo) if quantized else None
        bucket_bytes = min(action.bucket_bytes for action in actions)
        store = transfers.store if transfers is not None else None
        known = self._optimizer() if self._optimizer is not None else None
        if known is None:
            return optimizer.adopt(self.model, store, transfers, bucket_bytes, undo, packer, host_has_room)
        return optimizer.adopt_optimizer(known, store, transfers, bucket_bytes, undo, packer, host_has_room)

    def _host_has_room(self, budget: int | None, waiting_bytes: int | None) -> bool:
        """Whether all that waits is known to fit in host memory, so that nothing in it needs to leave for the disk."""
        if waiting_bytes is None or self._device().type == "cpu":
            return False
        return budget is None or waiting_bytes <= budget

    def _tier_budget(self, streamed: Sequence[StreamParameters]) -> int | None:
        """What streaming leaves of the host budget."""
        budget = self.settings.host_budget_bytes
        if budget is None:
            return None
        modules = [find_module(self.model, action.module_fqn) for action in streamed]
        homes = {id(p): p.nbytes * (1 + p.requires_grad) for module in modules for p in module.parameters()}
        return max(0, budget - sum(homes.values()))

    def _open_tier(self, budget: int | None, undo: contextlib.ExitStack) -> Transfers:
        """One tier for activations and optimizer state."""
        return tiers.open_tier(
            self._device(),
            undo,
            is_fake=self._is_fake(),
            asynchronous=self.settings.asynchronous,
            async_config=self.settings.async_config,
            host_budget_bytes=budget,
            offload_dir=self.settings.offload_dir,
        )

    def _device(self) -> torch.device:
        if self.settings.device is not None:
            return self.settings.device
        return next((p.device for p in self.model.parameters() if p.device.type != "cpu"), torch.device("cpu"))

    def _is_fake(self) -> bool:
        return any(_torch_private.is_fake(parameter) for parameter in self.model.parameters())

    def on_detach(self, callback: Any, *args: Any) -> None:
        self._undo.callback(callback, *args)

    def detach(self) -> None:
        """Take everything off again. A second call does nothing."""
        if not self.detached:
            self.detached = True
            with contextlib.ExitStack() as last_first:
                last_first.callback(self._undo.close)
                last_first.callback(self._unpark)  # when parameters are back: their state goes where they are
                last_first.callback(self._techniques.close)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs beside the model's and the optimizer's state: the loss scale of fp16."""
        return {"loss_scale": None if self._loss_scale is None else self._loss_scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on as the run that this state was saved in. May come before there is a plan."""
        if state.get("loss_scale") is not None:
            if self._loss_scale is None:
                self._loss_scale = precision.LossScale()
            self._loss_scale.load_state_dict(state["loss_scale"])

    def traffic(self) -> tuple[int, int, int, int]:
        """Transfers to the next tier so far and their bytes; those back, and theirs. Without the optimizer's."""
        stats = [
            self._transfers[name].stats.transfers for name in ("streaming", "activations") if name in self._transfers
        ]
        return (
            sum(one.num_sends for one in stats),
            sum(one.bytes_sent for one in stats),
            sum(one.num_fetches for one in stats),
            sum(one.bytes_fetched for one in stats),
        )

    def stats(self) -> Stats:
        scale = self._precision.scale if self._precision is not None else None
        device_type = self.plan.device_type if self.plan is not None else "cpu"
        on_device = device_type != "cpu" and torch.accelerator.is_available()
        return Stats(
            device_type=device_type,
            peak_bytes=torch.accelerator.max_memory_allocated() if on_device else None,
            num_recomputes=sum(forward.num_recomputes for forward in self._recomputed),
            transfers={name: user.stats for name, user in self._transfers.items()},
            loss_scale=scale.value if scale is not None else None,
            num_skipped_steps=scale.num_skipped_steps if scale is not None else 0,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _ParkedState:
    """Optimizer state that waits elsewhere, from one plan to the next."""

    actions: tuple[_StateAction, ...]
    transfers: Transfers | None
    adoption: optimizer.Adoption
    undo: contextlib.ExitStack

    def goes_on_with(self, actions: Sequence[_StateAction]) -> bool:
        return _without_reasons(actions) == self.actions

    def resume(self, host_budget_bytes: int | None) -> None:
        """Another plan is attached: parameters may have moved, and the host's budget with them."""
        if self.transfers is not None:
            tiers.set_host_budget(self.transfers.store, host_budget_bytes)
        self.adoption.follow_devices()


def _without_reasons(actions: Sequence[_StateAction]) -> tuple[_StateAction, ...]:
    return tuple(dataclasses.replace(action, reason=Reason("")) for action in actions)


def _is_around_blocks(action: Action) -> bool:
    """What is inside a block is attached before what recomputes or moves the block as a whole."""
    return not isinstance(action, TileHead | TileAttention | TileMlp)


def execute(
    model: nn.Module, plan: Plan, settings: ExecutionSettings | None = None, optimizer: Optimizer | None = None
) -> Executor:
    """Attach a plan to a model of the kind that it was made for."""
    for layer in plan.rows:
        found = type(find_module(model, layer.module_fqn)).__name__
        if found != layer.class_name:
            raise PlanError(
                f"the plan was made for another model: {layer.module_fqn!r} is a {found} here, "
                f"a {layer.class_name} there"
            )
    executor = Executor(model, settings, optimizer)
    executor.apply(plan)
    executor.adopt()
    return executor


def executor_of(model: nn.Module) -> Executor | None:
    """The model's own executor, if it is wrapped."""
    executor = vars(model).get(EXECUTOR_ATTRIBUTE)
    return executor if isinstance(executor, Executor) else None


def place(model: nn.Module, device: torch.device, undo: contextlib.ExitStack) -> None:
    """Move the model to its device until undone, keeping its `Parameter` objects."""
    homes = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if {home.type for home in homes} <= {device.type}:
        return
    if len(homes) > 1:
        raise PlanError(f"the model lies on several devices ({', '.join(sorted(map(str, homes)))}); move it to one")
    following = followers.attach(model, undo)  # undone after the move: state follows its parameters both ways
    undo.callback(_move_back, weakref.ref(model), homes.pop())
    model.to(device)
    following.follow_all()


def _move_back(model_ref: weakref.ref[nn.Module], device: torch.device) -> None:
    model = model_ref()
    if model is not None:
        model.to(device)


def _forget(model_ref: weakref.ref[nn.Module], executor_ref: weakref.ref[Executor]) -> None:
    model = model_ref()
    if model is not None and vars(model).get(EXECUTOR_ATTRIBUTE) is executor_ref():
        vars(model).pop(EXECUTOR_ATTRIBUTE, None)


def _switch_off_caches(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Key-value caches are of no use in training, and a recompute would fill them a second time."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        if getattr(config, "use_cache", False) is True:
            set_attribute(config, "use_cache", False, undo)
