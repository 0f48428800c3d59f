"""Plans that follow the batches: made at the first training forward, and made again when a larger one comes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._config import Config
from memscale._execute import Executor
from memscale._hardware import Hardware
from memscale._patching import OwnHook
from memscale._pipeline import device_of, make_plan
from memscale._plan import Plan, StreamParameters
from memscale._profile.inputs import Inputs
from memscale.report import console

logger = logging.getLogger("memscale")

Report = Callable[[Executor, Plan, Hardware], None]
"""Is called after every plan."""


class Planner(OwnHook):
    """A forward pre-hook: plans at the first training forward, and again when a larger batch comes."""

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

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_planning or not (model.training and torch.is_grad_enabled()):
            return  # a real rehearsal runs the model, and with it this hook
        inputs = Inputs(args, kwargs)
        if _num_elements(inputs) > self.planned_elements:
            if self.executor.plan is not None:
                logger.info("a larger batch than planned for: planning again")
            self.plan(model, inputs, inside=True)

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


def _num_elements(inputs: Inputs) -> int:
    return sum(tensor.numel() for tensor in inputs.tensors())
