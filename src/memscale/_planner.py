"""Plans that follow the batches: made at the first training forward, and made again when a larger one comes."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._config import Config
from memscale._errors import DoesNotFitError
from memscale._execute import Executor
from memscale._hardware import Hardware
from memscale._patching import OwnHook
from memscale._pipeline import device_of, make_plan
from memscale._plan import Plan, StreamParameters
from memscale._profile.inputs import Inputs
from memscale._units import show_bytes
from memscale.report import console

logger = logging.getLogger("memscale")

Report = Callable[[Executor, Plan, Hardware], None]
"""Is called after every plan."""


class Planner(OwnHook):
    """A forward pre-hook: plans at the first training forward, and again when a larger batch comes, or one that is
    added to gradients which are there already and for which the plan leaves no room."""

    def __init__(
        self,
        executor: Executor,
        config: Config,
        optimizer: str | Optimizer,
        hardware: Hardware,
        reporter: Report | None = None,
        replacement: Optimizer | None = None,
        holds_gradients: bool = False,
    ) -> None:
        self.executor = executor
        self.config = config
        self.hardware = hardware
        self.reporter = reporter
        self.optimizer = optimizer
        self.replacement = replacement
        self.holds_gradients = holds_gradients
        self.planned_elements = 0
        self._is_planning = False
        self._is_tight = False
        """All gradients beside the planned peak would exceed the budget."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_planning or not (model.training and torch.is_grad_enabled()):
            return  # a real rehearsal runs the model, and with it this hook
        inputs = Inputs(args, kwargs)
        if _num_elements(inputs) > self.planned_elements:
            if self.executor.plan is not None:
                logger.info("a larger batch than planned for: planning again")
            self.plan(model, inputs, inside=True)
        elif self._is_tight and _held_bytes(model):
            self._plan_for_held(model, inputs)

    def _plan_for_held(self, model: nn.Module, inputs: Inputs) -> None:
        """The loop adds up gradients over several batches, or keeps them during forward: the plan is to count them."""
        earlier = self.executor.plan
        self._is_tight, self.holds_gradients = False, True
        logger.info("a forward began with gradients of an earlier batch: planning again, with them")
        try:
            self.plan(model, inputs, inside=True)
        except DoesNotFitError as error:
            self.holds_gradients = False
            if self.executor.plan is None and earlier is not None:  # a real step was tried
                self.executor.apply_inside(earlier, inputs.args, inputs.kwargs)
            warnings.warn(
                f"gradients of an earlier batch are held ({show_bytes(_held_bytes(model))}), which the plan does not "
                f"count and for which none was found: the peak may be as much above it. {error}",
                stacklevel=2,
            )

    def plan(self, model: nn.Module, inputs: Inputs, *, inside: bool = False) -> None:
        """`inside`: in the first moment of a forward, which is to follow the plan already."""
        # Copies of a wrapped model are plain, so a plan on fake tensors needs nothing taken off.
        self._is_planning = True
        hardware = Hardware.detect(self._device(model), self.config.offload_dir)
        try:
            plan = make_plan(
                model,
                inputs,
                self.config,
                self.optimizer,
                hardware,
                self.executor.suspend,
                replacement=self.replacement,
                holds_gradients=self.holds_gradients,
            )
        finally:
            self._is_planning = False
        if inside:
            self.executor.apply_inside(plan, inputs.args, inputs.kwargs)
        else:
            self.executor.apply(plan)
        self.planned_elements = _num_elements(inputs)
        gradient_bytes = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
        self._is_tight = not self.holds_gradients and plan.predicted_peak_bytes + gradient_bytes > plan.budget_bytes
        if self.config.enable_logging:
            console.show_plan(plan)
        if self.reporter is not None:
            self.reporter(self.executor, plan, self.hardware)

    def _device(self, model: nn.Module) -> torch.device:
        """Where the model computes. Streamed parameters do not tell: between visits they are at home, on the host."""
        plan, device = self.executor.plan, self.executor.settings.device
        if plan is not None and device is not None and any(isinstance(a, StreamParameters) for a in plan.actions):
            return device
        return device_of(model, self.config)


def _held_bytes(model: nn.Module) -> int:
    return sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)


def _num_elements(inputs: Inputs) -> int:
    return sum(tensor.numel() for tensor in inputs.tensors())
