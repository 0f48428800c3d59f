"""An optimizer's step that runs out of device memory goes on where it stopped, instead of being left half-applied.

    watch_plain_steps(model, undo)              # from now on, for steps that are not taken over by anybody
    run_resumed(optimizer, step)                # for who runs a step

A step changes some tensors and makes others, operator by operator. PyTorch's AdamW has decayed the weights and updated
both moments of all parameters before it makes its first temporaries, so an error there leaves every parameter
half-way, in silence. An operator that only makes tensors has changed nothing when it fails. So it is tried again, after
memory was released: first what the allocator keeps, then all gradients that the operator does not use, which wait in
host memory for the rest of the step or until an operator asks for them. They are as many bytes as the weights, which is
what the steps of `torch.optim` need at once.

An operator that writes to tensors is not tried again, since nobody knows how far it came. Those of `torch.optim` take
no memory. If a step fails for good, state that it began to make is removed; if it had changed anything by then, the
error is `PartialStepError`.

NOTE [what a good step costs]: operators are seen where Python calls them (`TorchFunctionMode`), a few dozen in a step
with `foreach`, and nothing is done there that grows with the number of tensors: of what was written to, the first
tensor is noted weakly, and looked at only after a failure. One level below, at the dispatcher, every list of tensors
would be made into Python's objects again, which doubled the processor time of such a step.

NOTE [which steps]: those of the optimizers of `torch.optim` that update a parameter from its own values; the user's own
step hooks come first, as in adoption.py. Not with `differentiable=True`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from memscale._errors import PartialStepError, shortened
from memscale._torch import private
from memscale._torch.optimizer_steps import StepOrder, StepWatcher, parameters_of, steps_model, watch_steps
from memscale._torch.overrides import undo_with
from memscale._units import show_bytes
from memscale.techniques.offload.optimizer.buckets import values_here
from memscale.techniques.offload.optimizer.implementations import devices_of_streamed
from memscale.techniques.offload.optimizer.separable import (
    StepCall,
    is_known_separable,
    is_shadow,
    is_taken_over,
    shadow,
    step_without_hooks,
)

logger = logging.getLogger("memscale")


_PLAIN = (torch.Tensor, nn.Parameter)
"""Other classes of tensors (sharded ones) do more in an operator than is seen here."""
_stepping: set[int] = set()
"""The ids of the optimizers whose step runs here."""


def _key(tensor: torch.Tensor) -> int:
    return private.storage_key(tensor.untyped_storage())


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if type(leaf) in _PLAIN]


class _Aside:
    """Gradients that wait in host memory, by the memory that they had on the device."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def has(self, gradient: torch.Tensor) -> bool:
        return gradient.layout is torch.strided and _key(gradient) in self._waiting

    def take(self, gradients: Iterable[torch.Tensor]) -> int:
        """Send these away. Returns how many bytes are free for it."""
        num_bytes = 0
        for gradient in gradients:
            storage, key = gradient.untyped_storage(), _key(gradient)
            if key not in self._waiting and storage.nbytes():
                self._waiting[key] = storage, _bytes_of(storage, gradient.device).to("cpu", copy=True)
                num_bytes += storage.nbytes()
                storage.resize_(0)
        return num_bytes

    def bring_back(self, used: Iterable[torch.Tensor] | None = None) -> None:
        """Those that these tensors lie in; None: all."""
        keys = list(self._waiting) if used is None else [key for key in map(_key, used) if key in self._waiting]
        for key in keys:
            storage, host = self._waiting[key]
            storage.resize_(host.numel())
            _bytes_of(storage, storage.device).copy_(host)
            del self._waiting[key]


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


@functools.lru_cache(maxsize=1024)
def _writes(name: str) -> bool:
    """Whether an operator of this name writes to what it is given: it ends in an underscore then, or assigns."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name.startswith("__i") or name in ("__setitem__", "__set__", "__delete__")


_READS = frozenset({"__get__", "item", "is_complex", "is_floating_point", "numel", "size", "dim"})
"""What makes no tensor of the device: more than nine in ten of what Python calls in a step."""


def _first_tensor(args: tuple[Any, ...]) -> torch.Tensor | None:
    """The tensor that is written to, or the first of a list. Lists are of one kind: all are ours, or none is."""
    first = args[0] if args else None
    if isinstance(first, list | tuple) and first:
        first = first[0]
    return first if isinstance(first, torch.Tensor) else None


class _Resuming(TorchFunctionMode):
    """Sees every operator of a step. See NOTE [what a good step costs]."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._aside = _Aside()
        self._num_known = len(optimizer.state)
        self._written: list[weakref.ref[torch.Tensor]] = []
        self._has_written_unseen = False
        """Something was written to of which the first tensor cannot be told."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "_")
        if name in _READS and not self._aside:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if self._aside:
            self._aside.bring_back(filter(_has_memory, _tensors_in((args, kwargs))))
        if not _writes(name) and kwargs.get("out") is None:
            return self._made(func, args, kwargs)
        first = _first_tensor(args) if "out" not in kwargs else None
        if first is None:
            self._has_written_unseen = True
        else:
            self._written.append(weakref.ref(first))
        return func(*args, **kwargs)

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What the operator makes; tried again where there is no room for it."""
        for make_room in (_release, self._put_aside):
            try:
                return func(*args, **kwargs)
            except torch.OutOfMemoryError as error:
                failure = error.with_traceback(None)
            make_room(args, kwargs, failure)
        return func(*args, **kwargs)

    def has_changed(self) -> bool:
        """Whether the step has written to a parameter, or to state that was there."""
        if self._has_written_unseen:
            return True
        known = itertools.islice(self._optimizer.state.values(), self._num_known)
        state = [value for entry in known for value in _tensors_in(values_here(entry))]
        held = {_key(tensor) for tensor in [*parameters_of(self._optimizer), *state] if _has_memory(tensor)}
        written = [tensor for reference in self._written if (tensor := reference()) is not None]
        return any(not _has_memory(tensor) or _key(tensor) in held for tensor in written)

    def _put_aside(self, args: Any, kwargs: Any, failure: Exception) -> None:
        used = {_key(each) for each in _tensors_in((args, kwargs)) if _has_memory(each)}
        found = [parameter.grad for parameter in parameters_of(self._optimizer) if parameter.grad is not None]
        movable = [each for each in found if type(each) is torch.Tensor and each.layout is torch.strided]
        free = self._aside.take(each for each in movable if each.device.type != "cpu" and _key(each) not in used)
        logger.warning(
            "out of memory in the step of %s (%s): %s of gradients wait in host memory, and the step goes on",
            type(self._optimizer).__name__,
            shortened(str(failure)),
            show_bytes(free),
        )

    def end(self) -> None:
        """The gradients are where they were."""
        try:
            self._aside.bring_back()
        except torch.OutOfMemoryError:
            _release((), {}, None)
            self._bring_back_or_drop()

    def _bring_back_or_drop(self) -> None:
        try:
            self._aside.bring_back()
        except torch.OutOfMemoryError as error:
            for parameter in parameters_of(self._optimizer):
                if parameter.grad is not None and self._aside.has(parameter.grad):
                    parameter.grad = None
            raise torch.OutOfMemoryError(
                f"{shortened(str(error))} Gradients that waited in host memory for the step of "
                f"{type(self._optimizer).__name__} found no room on the device, and are None now"
            ) from None

    def undo(self) -> None:
        """Forget state that the step began to make."""
        for parameter in list(self._optimizer.state)[self._num_known :]:
            del self._optimizer.state[parameter]


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not private.is_fake(tensor) and tensor.device.type != "meta"


def _release(args: Any, kwargs: Any, failure: Exception | None) -> None:
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


def _is_on_device(optimizer: Optimizer) -> bool:
    """Whether it steps ordinary tensors, and not all of them on the CPU."""
    parameters = parameters_of(optimizer)
    is_plain = all(type(parameter) in _PLAIN and not private.is_fake(parameter) for parameter in parameters)
    return is_plain and not all(parameter.device.type == "cpu" for parameter in parameters)


def run_resumed(optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """Run this step of the optimizer: it goes on where it runs out of memory."""
    if not _is_on_device(optimizer):
        step()
        return
    mode = _Resuming(optimizer)
    try:
        with mode:
            step()
    except torch.OutOfMemoryError as error:
        failure = error.with_traceback(None)  # its frames hold what the step has made
    except BaseException:
        mode.end()
        raise
    else:
        mode.end()
        return
    has_changed = mode.has_changed()
    if not has_changed:
        mode.undo()
    mode.end()
    if not has_changed:
        raise failure
    raise PartialStepError(
        f"the step of {type(optimizer).__name__} ran out of memory half-way ({shortened(str(failure))}), although its "
        "gradients waited in host memory: some parameters are updated, others are not. Load a checkpoint of the model "
        "and of the optimizer before going on"
    ) from failure


class _PlainSteps(StepWatcher):
    """The steps of a model's optimizers which nobody else has taken over. See NOTE [which steps]."""

    order = StepOrder.TAKE_OVER

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._hooks: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()

    def concerns(self, optimizer: Optimizer) -> bool:
        model = self._model()
        return model is not None and _is_plain_step(optimizer) and steps_model(optimizer, model)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in self._hooks:
            self._hooks[optimizer] = optimizer.register_step_pre_hook(_take_step)
        private.step_pre_hooks(optimizer).move_to_end(self._hooks[optimizer].id)

    def stop(self) -> None:
        for hook in list(self._hooks.values()):
            hook.remove()
        self._hooks.clear()


def _is_plain_step(optimizer: Optimizer) -> bool:
    """Whether nobody else runs the steps of this optimizer. Those of streamed parameters run in parts (in_parts.py)."""
    if is_shadow(optimizer) or is_taken_over(optimizer) or not is_known_separable(optimizer):
        return False
    streamed = devices_of_streamed()
    return not streamed or not any(id(parameter) in streamed for parameter in parameters_of(optimizer))


def _take_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the step here, and let an idle one follow."""
    is_differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    if not _is_plain_step(optimizer) or is_shadow(args[0]) or is_differentiable or torch.compiler.is_compiling():
        return None
    if id(optimizer) in _stepping:  # somebody has put more around the class's step than PyTorch's own wrapper
        return None
    call = StepCall(args[1:], kwargs)
    call.evaluate_closure()
    step = step_without_hooks(optimizer)
    _stepping.add(id(optimizer))
    try:
        run_resumed(optimizer, lambda: step(optimizer, *call.args, **call.kwargs))
    finally:
        _stepping.discard(id(optimizer))
    call.give_back_loss()
    # Options are not copied, as `idle_shadow` does: PyTorch's own steps change none, and locks or models may be there.
    idle = shadow(optimizer, [{**group, "params": []} for group in optimizer.param_groups], {})
    return (idle, *call.args), call.kwargs


def watch_plain_steps(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Plain steps of its optimizers go on where they run out of memory, until undone or until the model is gone."""
    watcher = _PlainSteps(model)
    undo.callback(watcher.stop)
    undo_with(model, watch_steps(watcher), undo)
