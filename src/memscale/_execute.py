"""`execute(model, plan)`: attaches the plan's actions. The `Executor` owns the undo stack: detach leaves no trace."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from typing_extensions import assert_never

from memscale._errors import PlanError
from memscale._patching import EXECUTOR_ATTRIBUTE, keep_copies_clean, set_attribute
from memscale._plan import (
    Action,
    Checkpoint,
    OffloadActivations,
    OffloadOptimizer,
    Plan,
    StreamParameters,
    TileHead,
)
from memscale.techniques import checkpointing, tiling

logger = logging.getLogger("memscale")


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """What happened since the plan was attached."""

    device_type: str
    peak_bytes: int | None
    """The device allocator's peak; None on a CPU, which keeps no such counter: use `memscale.measure()`."""
    num_recomputes: int
    """Blocks recomputed in backward."""


class Executor:
    """What is attached to one model. Taking it off leaves the model as it was."""

    def __init__(self, model: nn.Module, *, verify: bool = False) -> None:
        self._model = weakref.ref(model)
        self._verify = verify
        self._techniques = contextlib.ExitStack()
        self._undo = contextlib.ExitStack()
        self._checkpointed: list[checkpointing.CheckpointedForward] = []
        self.plan: Plan | None = None
        """None until the first training forward, when there was nothing to plan from before."""
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
        self.suspend()
        self.attach(plan.actions)
        self.plan = plan

    def suspend(self) -> None:
        """Take the plan's techniques off; the model stays ours."""
        self._techniques.close()
        self.plan = None

    def attach(self, actions: Iterable[Action]) -> None:
        with contextlib.ExitStack() as undo:
            undo.callback(self._checkpointed.clear)
            for action in actions:
                self._attach_one(action, undo)
            if self._checkpointed:
                _switch_off_caches(self.model, undo)
            self._techniques = undo.pop_all()

    def _attach_one(self, action: Action, undo: contextlib.ExitStack) -> None:
        match action:
            case Checkpoint():
                module = find_module(self.model, action.module_fqn)
                self._checkpointed.append(checkpointing.attach(action, module, undo, verify=self._verify))
            case TileHead():
                tiling.attach_head(action, self.model, undo)
            case OffloadActivations() | OffloadOptimizer() | StreamParameters():
                raise PlanError(f"{type(action).__name__} cannot be executed yet")
            case _:
                assert_never(action)

    def on_detach(self, callback: Any, *args: Any) -> None:
        self._undo.callback(callback, *args)

    def detach(self) -> None:
        """Take everything off again. A second call does nothing."""
        if not self.detached:
            self.detached = True
            self._techniques.close()
            self._undo.close()

    def stats(self) -> Stats:
        device_type = self.plan.device_type if self.plan is not None else "cpu"
        on_device = device_type != "cpu" and torch.accelerator.is_available()
        return Stats(
            device_type=device_type,
            peak_bytes=torch.accelerator.max_memory_allocated() if on_device else None,
            num_recomputes=sum(forward.num_recomputes for forward in self._checkpointed),
        )


def execute(model: nn.Module, plan: Plan, *, verify: bool = False) -> Executor:
    """Attach a plan to a model."""
    executor = Executor(model, verify=verify)
    executor.apply(plan)
    executor.adopt()
    return executor


def executor_of(model: nn.Module) -> Executor | None:
    """The model's own executor, if it is wrapped."""
    executor = vars(model).get(EXECUTOR_ATTRIBUTE)
    return executor if isinstance(executor, Executor) else None


def find_module(model: nn.Module, module_fqn: str) -> nn.Module:
    try:
        return model.get_submodule(module_fqn)
    except AttributeError as error:
        raise PlanError(
            f"the plan names {module_fqn!r}, which {type(model).__name__} does not have: it was made for another model"
        ) from error


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
