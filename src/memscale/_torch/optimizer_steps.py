"""The one hook that MemScale has on the optimizers of the process, and what it tells to whom.

PyTorch's global step hooks see every optimizer, also those of models that we know nothing about. So there is one of
them before a step and one after it, only while anybody is interested; who is interested says which optimizers.

NOTE [order at a step]: before a step, watchers are told in the order of `StepOrder`, equals in the order in which they
came; what one returns as the step's arguments the next one sees. After the step they are told in the opposite order.
PyTorch calls an optimizer's own hooks after ours before the step, and before ours after it.
"""

from __future__ import annotations

import enum
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

StepArguments = tuple[tuple[Any, ...], dict[str, Any]]


class StepOrder(enum.IntEnum):
    """See NOTE [order at a step]."""

    OBSERVE = 0
    """Looks only: gradients and state are as the training loop made them."""
    SCALE = 1
    """May hide the gradients of a step that must not be taken."""
    PLACE = 2
    """Moves state to where the parameters are."""
    TAKE_OVER = 3
    """Gives the optimizer a hook of its own, which runs the step."""


class StepWatcher:
    """Base of those who want to know when an optimizer steps."""

    order: ClassVar[StepOrder] = StepOrder.OBSERVE

    def concerns(self, optimizer: Optimizer) -> bool:
        """Whether the steps of this optimizer are this watcher's business."""
        raise NotImplementedError

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        """The step is about to run. May return other arguments for it; `args[0]` is the optimizer."""
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        """The step has run."""


class CountedSteps(StepWatcher):
    """Counts the steps of optimizers that own some of these parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self.count = 0

    def concerns(self, optimizer: Optimizer) -> bool:
        return owns_any(optimizer, (reference() for reference in self._parameters))

    def after_step(self, optimizer: Optimizer) -> None:
        self.count += 1


def watch_steps(watcher: StepWatcher) -> Callable[[], None]:
    """Tell this watcher of the steps that concern it. Returns what undoes that. The watcher is not kept alive."""
    return _WATCHERS.enter(watcher)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def living_optimizers() -> list[Optimizer]:
    """All optimizers of the process. Those that nobody has stepped since we look are found by no hook."""
    # By type, not isinstance: asking a lazy proxy for its __class__ may run user code.
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]


def owns_any(optimizer: Optimizer, parameters: Iterable[Any]) -> bool:
    """Whether the optimizer steps at least one of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    return any(id(parameter) in wanted for parameter in parameters_of(optimizer))


class _Witness:
    """A parameter that a model and an optimizer have in common, and where both have it."""

    __slots__ = ("_group", "_name", "_part", "_place")

    def __init__(self, part: nn.Module, name: str, group: int, place: int) -> None:
        self._part, self._name, self._group, self._place = weakref.ref(part), name, group, place

    def holds(self, optimizer: Optimizer) -> bool:
        part, groups = self._part(), optimizer.param_groups
        if part is None or len(groups) <= self._group or len(groups[self._group]["params"]) <= self._place:
            return False
        return part._parameters.get(self._name) is groups[self._group]["params"][self._place]


_WITNESSES: weakref.WeakKeyDictionary[nn.Module, weakref.WeakKeyDictionary[Optimizer, _Witness]]
_WITNESSES = weakref.WeakKeyDictionary()


def steps_model(optimizer: Optimizer, model: nn.Module) -> bool:
    """Whether the optimizer steps a parameter of the model. Asked in every step, so one that is known is looked at
    first: going through all parameters of both takes as long as a part of the step itself."""
    witnesses = _WITNESSES.setdefault(model, weakref.WeakKeyDictionary())
    known = witnesses.get(optimizer)
    if known is not None and known.holds(optimizer):
        return True
    places = {id(p): (g, k) for g, group in enumerate(optimizer.param_groups) for k, p in enumerate(group["params"])}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if id(parameter) in places:
                witnesses[optimizer] = _Witness(part, name, *places[id(parameter)])
                return True
    return False


class _Watchers:
    """Everybody who is interested, and the hooks that are there as long as anybody is."""

    def __init__(self) -> None:
        self._by_token: dict[object, weakref.ref[StepWatcher]] = {}
        self._hooks: list[RemovableHandle] = []
        # Taken again by the same thread where a garbage collection inside it lets go of another model.
        self._lock = threading.RLock()

    def enter(self, watcher: StepWatcher) -> Callable[[], None]:
        token = object()
        with self._lock:
            self._by_token[token] = weakref.ref(watcher)
            if not self._hooks:
                self._hooks.append(register_optimizer_step_pre_hook(self._before_step))
                self._hooks.append(register_optimizer_step_post_hook(self._after_step))
        return functools.partial(self._leave, token)

    def _leave(self, token: object) -> None:
        with self._lock:
            self._by_token.pop(token, None)
            while self._hooks and not self._by_token:
                self._hooks.pop().remove()

    def _in_order(self) -> list[StepWatcher]:
        found = [reference() for reference in list(self._by_token.values())]
        return sorted((watcher for watcher in found if watcher is not None), key=lambda watcher: watcher.order)

    def _concerned(self, watchers: Iterable[StepWatcher], optimizer: Optimizer) -> Iterator[StepWatcher]:
        """Each is asked when its turn comes: those before it may have changed the answer."""
        return (watcher for watcher in watchers if watcher.concerns(optimizer))

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        arguments: StepArguments | None = None
        for watcher in self._concerned(self._in_order(), optimizer):
            changed = watcher.before_step(optimizer, args, kwargs)
            if changed is not None:
                arguments = args, kwargs = changed
        return arguments

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        for watcher in self._concerned(reversed(self._in_order()), optimizer):
            watcher.after_step(optimizer)


_WATCHERS = _Watchers()
