"""Plans that follow the batches: made at the first training forward, and made again when a step may need more."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._config import Config
from memscale._decide.budget import full_budget
from memscale._errors import DoesNotFitError, StaticProfileError
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._hardware import Hardware
from memscale._plan import Plan
from memscale._planning import device_of, make_plan
from memscale._planning.demand import Demand, read_demand
from memscale._planning.observed_steps import ObservedSteps
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale._profile.inputs import Inputs
from memscale._torch import private
from memscale._torch.overrides import OwnHook
from memscale._units import show_bytes
from memscale.report import console

logger = logging.getLogger("memscale")

Report = Callable[[Executor, Plan, Hardware], None]
"""Is called after every plan."""
_MAX_KNOWN = 32
"""Demands whose plans are remembered."""


class Planner(OwnHook):
    """A forward pre-hook: plans at the first training forward, and again when a forward comes that no plan covers (a
    larger dimension, other trained parameters, another device), or one that is added to gradients which are there
    already and for which the plan leaves no room. A model that cannot be rehearsed is observed in its first steps."""

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
        self._known: list[tuple[Demand, Plan]] = []
        """What was planned for; none of these demands covers another."""
        self._observed: ObservedSteps | None = None
        """While a model that cannot be rehearsed shows what it needs."""
        self._needs_observation = False
        self._is_planning = False
        self._is_tight = False
        """All gradients beside the planned peak would exceed the budget."""
        executor.on_detach(self._stop_observing)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_planning or not (model.training and torch.is_grad_enabled()):
            return
        if self._observed is not None and self._observed.is_under_way:
            return  # one more forward of the step that is being observed
        inputs = Inputs(args, kwargs)
        demand = read_demand(model, inputs, self._device(model))
        known = next((plan for planned, plan in self._known if planned.covers(demand)), None)
        if self._observed is not None:
            self._go_on_observing(model, inputs, demand, is_known=known is not None)
        elif known is None:
            if self._known:
                logger.info("this step may need more memory than any that was planned for: planning again")
            self.plan(model, inputs, inside=True)
        elif known is not self.executor.plan:
            self._put_in_force(known, inputs)
        elif self._is_tight and _held_bytes(model):
            self._plan_for_held(model, inputs)

    def _plan_for_held(self, model: nn.Module, inputs: Inputs) -> None:
        """The loop adds up gradients over several batches, or keeps them during forward: the plan is to count them."""
        self._is_tight, self.holds_gradients = False, True
        logger.info("a forward began with gradients of an earlier batch: planning again, with them")
        earlier, self._known = self._known, []
        try:
            self.plan(model, inputs, inside=True)
        except DoesNotFitError as error:
            self.holds_gradients, self._known = False, earlier
            warnings.warn(
                f"gradients of an earlier batch are held ({show_bytes(_held_bytes(model))}), which the plan does not "
                f"count and for which none was found: the peak may be as much above it. {error}",
                stacklevel=2,
            )

    def plan(self, model: nn.Module, inputs: Inputs, *, inside: bool = False, is_guess: bool = False) -> None:
        """`inside`: in the first moment of a forward, which is to follow the plan already. `is_guess`: the inputs were
        derived, not given, so an error about them is no error of the user's."""
        device = self._device(model)
        self._turn_to(device)
        demand = read_demand(model, inputs, device)
        try:
            plan = self._rehearsed_plan(model, inputs)
        except StaticProfileError as error:
            is_sample = not inside and not is_guess
            if not self.config.use_empirical_fallback or (is_sample and not error.needs_values):
                raise
            self._observe_instead(model, inputs, error, inside=inside)
            return
        self._remember(demand, plan)
        self._put_in_force(plan, inputs if inside else None)
        self._announce(plan)

    def _rehearsed_plan(self, model: nn.Module, inputs: Inputs) -> Plan:
        if self._needs_observation:
            refusal = StaticProfileError(f"{type(model).__name__} could not be rehearsed before")
            refusal.needs_values = True
            raise refusal
        # Copies of a wrapped model are plain, so a plan on fake tensors needs nothing taken off.
        self._is_planning = True
        try:
            return make_plan(
                model,
                inputs,
                self.config,
                self.optimizer,
                self.hardware,
                replacement=self.replacement,
                holds_gradients=self.holds_gradients,
            )
        finally:
            self._is_planning = False

    def _turn_to(self, device: torch.device) -> None:
        """Plan for this device: the model may have been moved since it was wrapped."""
        self.hardware = Hardware.detect(device, self.config.offload_dir)
        if self.executor.settings.device != device:
            if self._known:
                logger.info("the model computes on %s now: planning again", device)
            host_bytes = full_budget(self.hardware, self.config).host_bytes
            self.executor.turn_to(ExecutionSettings.from_config(self.config, device, host_bytes))
            self._known = []

    def _put_in_force(self, plan: Plan, inputs: Inputs | None) -> None:
        """`inputs`: of the forward that has just begun, if one has."""
        if inputs is None:
            self.executor.apply(plan)
        else:
            self.executor.apply_inside(plan, inputs.args, inputs.kwargs)
        trained = [parameter for parameter in self.executor.model.parameters() if parameter.requires_grad]
        gradient_bytes = sum(parameter.nbytes for parameter in trained)
        self._is_tight = not self.holds_gradients and plan.predicted_peak_bytes + gradient_bytes > plan.budget_bytes

    def _remember(self, demand: Demand, plan: Plan) -> None:
        others = [(planned, other) for planned, other in self._known if not demand.covers(planned)]
        self._known = [*others, (demand, plan)][-_MAX_KNOWN:]

    def _announce(self, plan: Plan) -> None:
        if self.config.enable_logging:
            console.show_plan(plan)
        if self.reporter is not None:
            self.reporter(self.executor, plan, self.hardware)

    def _device(self, model: nn.Module) -> torch.device:
        """Where the model computes. Streamed parameters do not tell: between visits they are at home, on the host."""
        device = self.executor.settings.device
        if device is not None and self.executor.streams:
            return device
        return device_of(model, self.config)

    # ---- models that cannot be rehearsed

    def _observe_instead(self, model: nn.Module, inputs: Inputs, error: StaticProfileError, *, inside: bool) -> None:
        if not self._needs_observation:
            logger.info("%s Its first training steps are observed, and the plan is made from them.", error)
            self._needs_observation = error.needs_values
        self._observed = ObservedSteps(model, self.config, self.hardware, self._costs(model))
        self._put_in_force(self._observed.careful, inputs if inside else None)
        if inside:
            self._open(model, inputs, read_demand(model, inputs, self._device(model)))

    def _go_on_observing(self, model: nn.Module, inputs: Inputs, demand: Demand, *, is_known: bool) -> None:
        """A further training step begins: what the one before has shown is used."""
        steps = self._observed
        assert steps is not None
        steps.close()
        if steps.plan is not None and not is_known:
            self.plan(model, inputs, inside=True)  # this step is another: what was seen does not tell of it
            return
        if steps.is_ready(demand):
            was_planned = steps.plan is not None
            plan = steps.check(model, self._costs(model)) if was_planned else steps.make_plan(model, self._costs(model))
            if plan is not None:
                for seen in steps.demands:
                    self._remember(seen, plan)
                self._put_in_force(plan, inputs)
                self._announce(plan)
            if was_planned and (plan is None or plan.rehearsed):
                self._observed = None
                return
        self._open(model, inputs, demand)

    def _open(self, model: nn.Module, inputs: Inputs, demand: Demand) -> None:
        """Observe the step that begins; one that is being traced by others is let go by."""
        assert self._observed is not None
        if private.can_take_outermost_mode():
            self._observed.open(model, inputs, demand, self.executor.traffic)

    def _stop_observing(self) -> None:
        if self._observed is not None:
            self._observed.abandon()
            self._observed = None

    def _costs(self, model: nn.Module) -> OptimizerCosts:
        return OptimizerCosts(model, self.optimizer, self.hardware, self.config, self.replacement)


def _held_bytes(model: nn.Module) -> int:
    leaves = [parameter for parameter in model.parameters() if parameter.is_leaf]  # others have none
    return sum(parameter.grad.nbytes for parameter in leaves if parameter.grad is not None)
