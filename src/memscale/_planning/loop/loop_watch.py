"""What a training loop holds beside its model, seen in its first steps.

    watch = LoopWatch(model)
    found = watch.look(plan, inputs, weights, device, known)  # when a training forward begins; None: nothing new
    watch.begin()                                             # the forward follows a plan: what becomes of its outputs?

Two things are looked at, at instants that every loop has:

- **outputs that stay bound** (`outputs = model(**batch)`; `outputs.loss.backward()` keeps the logits): which tensors of
  the model's output are still alive when the optimizer steps, and when the next forward begins. Seen on every device;
- **everything else on a device that counts its bytes** (a moving average of the weights, tensors in a list): what is
  allocated when a forward begins, without what the model, its gradients, its optimizer's state and the batch take.
  With a budget in GB only what has come since the first step counts: what was there before, the user knew of;
- **state that nobody steps**: that of parameters that were trained and are frozen now stays with their optimizer. It
  goes on being counted when they are trained again.

On a CPU, which has no such count, everything else is not seen. What MemScale itself may have on its way to the device
is left out of the count, so that a plan whose tensors travel notices less.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memscale._plan import Plan
from memscale._planning.loop.demand import Weights
from memscale._planning.loop.step_watch import TOLERATED_BYTES, TOLERATED_SHARE, bytes_on
from memscale._profile import LoopHolds
from memscale._profile.inputs import Inputs
from memscale._torch import private
from memscale._torch.live_bytes import rounding_of
from memscale._torch.optimizer_steps import StepWatcher, steps_model, watch_steps
from memscale._torch.outputs import tensors_in
from memscale._torch.overrides import OwnHook, undo_with
from memscale._torch.released_gradients import held_gradient
from memscale._units import round_up
from memscale.techniques import technique_of

_NUM_STEPS = 8
"""Outputs are followed in so many steps: a loop does the same in all of them."""
_MAX_ANSWERS = 4
"""So often other bytes are planned for anew: what grows at every step is a leak, which no plan ends."""
_TOLERATED_BYTES_OF_CARD = 64 * 1024 * 1024
"""A card's libraries may take so much in the first step, beside the workspaces of matrix products."""
_NUM_THREADS = 2
"""Forward and backward multiply in a thread each, which has a workspace of its own. Plans count these apart."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What no plan has counted yet."""

    loop: LoopHolds
    """All that is known now."""
    new_bytes: int
    """What has come to what was known."""


class LoopWatch(StepWatcher):
    """Watches the loop around one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._undo, self._output_hook = contextlib.ExitStack(), contextlib.ExitStack()
        self._num_steps = self._num_answers = 0
        self._outputs: list[list[weakref.ref[torch.UntypedStorage]]] = []
        """The storages of each tensor of the last output of a training forward."""
        self._kept: dict[int, int] = {}
        """The bytes of outputs that were alive when an optimizer stepped, by their place."""
        self._has_stepped = False
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._first_bytes: int | None = None
        """What others had on the device when the first step began."""
        self._highest_bytes = -1
        """The most that was allocated when a step began, as far as it was looked into."""
        self._is_hooked = False
        self._weights: Weights | None = None
        """The model's when a forward last began; None: look at them again."""
        self._idle_bytes = 0
        """The state of those that are not."""

    # ---- instants

    def begin(self) -> None:
        """Follow the outputs of the forward that begins, unless enough of them were followed."""
        model = self._model()
        if model is None or self._is_hooked:
            return
        self._is_hooked = True
        self._output_hook.callback(model.register_forward_hook(_Returned(self), with_kwargs=True).remove)
        undo_with(model, watch_steps(self), self._undo)

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has, since the last training forward, as long as outputs are followed."""
        return self._has_stepped

    def stop(self) -> None:
        """Watch nothing any more. A second call does nothing."""
        self._outputs, self._kept = [], {}
        self._output_hook.close()
        self._undo.close()

    def returned(self, inputs: Inputs, output: Any) -> None:
        """A training forward is over."""
        if self._num_steps < _NUM_STEPS:
            given = _keys_of(inputs.tensors())
            found = [_storages_of(tensor) for tensor in tensors_in(output)]
            self._outputs = [[weakref.ref(s) for s in each if private.storage_key(s) not in given] for each in found]
            self._kept, self._has_stepped = {}, False

    def concerns(self, optimizer: Optimizer) -> bool:
        model = self._model()
        return model is not None and steps_model(optimizer, model)

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        model = self._model()
        if private.graph_task_id() >= 0 or self._has_stepped or model is None:
            return  # in the middle of a backward, or the second optimizer of this step
        self._has_stepped = True
        self._num_steps += 1
        own = _keys_of([*model.parameters(), *model.buffers()]) if self._outputs else set()
        self._kept = {place: size for place in range(len(self._outputs)) if (size := self._alive_bytes(place, own))}

    def after_step(self, optimizer: Optimizer) -> None:
        others = [known for known in self._optimizers if known() not in (None, optimizer)]
        if len(others) == len(self._optimizers):
            self._weights = None  # a new one: look at its state
        self._optimizers = [*others, weakref.ref(optimizer)]

    def _alive_bytes(self, place: int, own: set[int]) -> int:
        alive = [storage for reference in self._outputs[place] if (storage := reference()) is not None]
        return sum(_rounded(storage) for storage in alive if private.storage_key(storage) not in own)

    # ---- what is found

    def look(
        self,
        plan: Plan,
        inputs: Inputs,
        weights: Weights,
        device: torch.device,
        known: LoopHolds,
        *,
        counts_all: bool,
        workspace_bytes: int,
    ) -> Found | None:
        """A training forward begins. `counts_all`: also what was there before the first step. `workspace_bytes`: what
        each thread that multiplies matrices has taken."""
        found = self._kept_outputs(known)
        if found is None:
            tolerated_bytes = tolerated(plan, workspace_bytes)
            self._look_at_weights(weights, device)
            found = self._other_bytes(tolerated_bytes, inputs, device, known, counts_all=counts_all)
        if self._num_steps >= _NUM_STEPS:
            self._follow_no_more(device)
        return found

    def _follow_no_more(self, device: torch.device) -> None:
        """Once a loop has shown what it does with outputs, only a device that counts its bytes tells more of it."""
        self._outputs = []
        self._output_hook.close()
        if device.type == "cpu":
            self._undo.close()

    def _kept_outputs(self, known: LoopHolds) -> Found | None:
        if not self._has_stepped:
            return None
        self._has_stepped = False
        kept_bytes = sum(self._kept.values())
        still_bytes = sum(self._alive_bytes(place, set()) for place in self._kept)
        into_next = known.into_next or still_bytes > TOLERATED_BYTES
        new_bytes = sum(size for place, size in self._kept.items() if place not in known.outputs)
        is_known = new_bytes <= TOLERATED_BYTES and into_next == known.into_next
        if kept_bytes <= TOLERATED_BYTES or is_known:
            return None
        outputs = tuple(sorted({*known.outputs, *self._kept}))
        return Found(dataclasses.replace(known, outputs=outputs, into_next=into_next), kept_bytes)

    def _other_bytes(
        self, tolerated_bytes: int, inputs: Inputs, device: torch.device, known: LoopHolds, *, counts_all: bool
    ) -> Found | None:
        allocated_bytes = _allocated_on(device)
        if self._num_answers >= _MAX_ANSWERS:
            return None
        if allocated_bytes is None:
            return self._answer(self._idle_bytes - known.other_bytes, tolerated_bytes, known)
        if self._num_steps >= _NUM_STEPS and allocated_bytes <= self._highest_bytes:
            return None
        # So that small rises are not looked into.
        self._highest_bytes = max(self._highest_bytes, allocated_bytes + tolerated_bytes // 2)
        others_bytes = max(0, allocated_bytes - self._our_bytes(inputs, device)) + self._idle_bytes
        if self._first_bytes is None:
            self._first_bytes = others_bytes
        known_bytes = known.other_bytes + (0 if counts_all else self._first_bytes)
        if others_bytes - known_bytes <= tolerated_bytes:
            return None
        gc.collect()  # what nobody holds any more may only not have been swept up yet
        others_bytes -= allocated_bytes - (_allocated_on(device) or 0)
        return self._answer(others_bytes - known_bytes, tolerated_bytes, known)

    def _answer(self, new_bytes: int, tolerated_bytes: int, known: LoopHolds) -> Found | None:
        if new_bytes <= tolerated_bytes:
            return None
        self._num_answers += 1
        return Found(dataclasses.replace(known, other_bytes=known.other_bytes + new_bytes), new_bytes)

    def _look_at_weights(self, weights: Weights, device: torch.device) -> None:
        """Where other parameters are trained than in the forward before, the state of those that are not is looked at,
        which may have to come from where it waits."""
        model = self._model()
        if model is None or weights == self._weights:
            return
        self._weights, self._highest_bytes = weights, -1
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        states = [known.state for reference in self._optimizers if frozen and (known := reference()) is not None]
        idle = [state[parameter] for state in states for parameter in frozen if parameter in state]
        self._idle_bytes = bytes_on(tree_leaves([list(each.values()) for each in idle]), device.type)

    def _our_bytes(self, inputs: Inputs, device: torch.device) -> int:
        model = self._model()
        if model is None:
            return 0
        state = [known.state for reference in self._optimizers if (known := reference()) is not None]
        leaves = [parameter for parameter in model.parameters() if parameter.is_leaf]
        tensors = [
            *model.parameters(),
            *model.buffers(),
            *map(held_gradient, leaves),
            *tree_leaves([list(each.values()) for each in state]),
            *inputs.tensors(),
        ]
        kept = sum(self._alive_bytes(place, set()) for place in range(len(self._outputs)))
        return bytes_on(tensors, device.type) + kept


class _Returned(OwnHook):
    """A forward hook that tells the watch of outputs."""

    def __init__(self, watch: LoopWatch) -> None:
        self._watch = watch

    @private.never_compiled
    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not (model.training and torch.is_grad_enabled()) or private.inside_functional_transform():
            return
        if private.graph_task_id() < 0:
            self._watch.returned(Inputs(args, kwargs), output)


def _allocated_on(device: torch.device) -> int | None:
    if device.type == "cpu":
        return None
    index = device.index if device.index is not None else torch.accelerator.current_device_index()
    counted = private.allocator_bytes(index)
    return None if counted is None else counted[0]


def tolerated(plan: Plan, workspace_bytes: int) -> int:
    """What may be there without a word: rounding, workspaces, and tensors of ours that are on their way."""
    num_bytes = max(int(TOLERATED_SHARE * plan.predicted_peak_bytes), TOLERATED_BYTES)
    if plan.device_type not in ("simgpu", "cpu"):
        num_bytes += _TOLERATED_BYTES_OF_CARD + _NUM_THREADS * workspace_bytes
    travels = any(technique_of(action).travels for action in plan.actions)
    if travels and plan.conditions is not None:
        num_bytes += plan.conditions.window_bytes + plan.conditions.prefetch_bytes
    return num_bytes


def _storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor, or of those that it consists of; a sharded one names its mesh among its parts."""
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [storage for part in parts if isinstance(part, torch.Tensor) for storage in _storages_of(part)]
    return [tensor.untyped_storage()] if tensor.layout is torch.strided else []


def _keys_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {private.storage_key(storage) for tensor in tensors for storage in _storages_of(tensor)}


def _rounded(storage: torch.UntypedStorage) -> int:
    return round_up(storage.nbytes(), rounding_of(storage.device.type))


def words_of_loop(earlier: LoopHolds, now: LoopHolds) -> str:
    """What the loop holds that it was not known to hold, as in "this loop ..."."""
    if now.other_bytes > earlier.other_bytes:
        return "holds more on the device than the model and its training need"
    until = "until the next outputs come" if now.into_next else "through backward and the optimizer's step"
    return f"keeps outputs of the model {until}"
