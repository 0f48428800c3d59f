"""A wrapped model that is trained without being called: plans are made in its forward, so it must hear that.

A LightningModule whose `training_step` calls `self.net(x)` never has its own forward called, nor has a model whose
parts are called one by one. Training works, and nothing is done about its memory.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memscale._execute.executor import Executor
from memscale._torch.optimizer_steps import StepWatcher, owns_any, watch_steps
from memscale._torch.overrides import undo_with

logger = logging.getLogger("memscale")


class UncalledWatch(StepWatcher):
    """Looks at the first step that trains the model, and says if its forward was not called before that."""

    def __init__(self, executor: Executor) -> None:
        self._executor = weakref.ref(executor)
        self._is_over = False
        self._watching = contextlib.ExitStack()
        undo_with(executor.model, watch_steps(self), self._watching)
        executor.on_detach(self._watching.close)

    def stop(self) -> None:
        """The model was called: nobody looks at its steps any more."""
        if not self._is_over:
            self._is_over = True
            self._watching.close()

    def concerns(self, optimizer: Optimizer) -> bool:
        executor = self._executor()
        return not self._is_over and executor is not None and owns_any(optimizer, executor.model.parameters())

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        executor = self._executor()
        assert executor is not None
        if _has_gradient(executor.model):
            self._is_over = True
            self._tell(executor)

    def _tell(self, executor: Executor) -> None:
        name = type(executor.model).__name__
        if executor.plan is not None:
            logger.info(
                "%s is trained without being called itself: the plan stays as it is, whatever batches come", name
            )
            return
        warnings.warn(
            f"{name} is wrapped and has been trained for a step, but its forward was never called, so nothing was "
            f"planned and nothing is done about its memory. {_remedy(executor.model)}",
            stacklevel=2,
        )


def _remedy(model: nn.Module) -> str:
    if any(kind.__name__ == "LightningModule" for kind in type(model).__mro__):
        return (
            "With Lightning use Trainer(callbacks=[MemScaleCallback()]) from memscale.integrations.lightning: it finds "
            "the module that training_step calls."
        )
    return "Wrap the module that the training loop calls, or give wrap() a sample_input."


def _has_gradient(model: nn.Module) -> bool:
    """Whether a backward has reached it: frameworks step once on gradients of zeros to make an optimizer's state."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.is_leaf]
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)
