"""Plans for models that cannot be rehearsed: the user's own first steps are observed, and the plan is made from them.

    steps = ObservedSteps(model, eligible, costs)
    executor.apply(steps.careful)               # every block recomputed; see `careful_plan`
    steps.open(model, inputs, demand, traffic)  # at the beginning of each of these forwards
    plan = steps.make_plan(model, costs)        # when enough of them have been seen; `DoesNotFitError` where none fits

The plan's own first step is observed, too: where it shows more than was promised, the promise is corrected, and where
that exceeds the budget, another plan is made with so much to spare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memscale._decide.choice import block_actions, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import Eligible
from memscale._decide.write_plan import conditions_of
from memscale._plan import Action, Plan, Reason
from memscale._planning import keep_plan, plan_from
from memscale._planning.loop.demand import Demand
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale._profile import CHECKPOINT, KEEP, STREAM, Profile, StepTrace, TraceKey, Treatment
from memscale._profile.inputs import Inputs
from memscale._profile.layers import find_blocks
from memscale._profile.observation import Observation, ObservedStep, profile_observed
from memscale._profile.segments import Traffic
from memscale._torch import private
from memscale._torch.optimizer_steps import StepWatcher, owns_any, watch_steps
from memscale._torch.overrides import OwnHook, is_failing, undo_with
from memscale._units import show_bytes
from memscale.techniques import careful_actions, streamed_fqns, technique_of
from memscale.techniques.offload.optimizer import OPTIMIZER
from memscale.techniques.offload.parameters import streaming
from memscale.techniques.technique import Unrehearsed

logger = logging.getLogger("memscale")

ROOM_SHARE = 0.5
"""How much of the budget parameters, gradients and optimizer state may take before the careful plan sends them away:
what activations need is not known yet."""
UNREHEARSED = Reason("the model cannot be rehearsed, so nobody knows what overlap would take")
_MAX_PLANS = 4
MAX_FAILED_TRIES = 8
"""Steps in a row that could not be observed to their end."""


def careful_plan(model: nn.Module, eligible: Eligible, costs: OptimizerCosts) -> tuple[Plan, Treatment]:
    """What is done while nothing is known yet: as little memory as exact techniques need, as far as the mode goes.

    Every block is recomputed. Where what is there all the time takes more than half of the budget, and the mode
    offloads, optimizer state waits on the next tier; where that does not suffice, the blocks' parameters are streamed.
    """
    budget_bytes = eligible.budget.device_bytes
    weights = sum(p.nbytes * (1 + p.requires_grad) for p in model.parameters())
    state, treatment = costs.cost(), _careful_treatment(eligible, weights > budget_bytes * ROOM_SHARE)
    reason = Reason("careful, until a step has been seen")
    blocks = (action for fqn in find_blocks(model) for action in block_actions(fqn, treatment))
    known = Unrehearsed(
        eligible,
        can_move_state=eligible.has(OPTIMIZER) and state.offloaded_step_bytes is not None,
        state_is_large=weights + state.state_bytes > budget_bytes * ROOM_SHARE,
        streams=treatment.streams,
    )
    actions = tuple(dataclasses.replace(action, reason=reason) for action in (*blocks, *careful_actions(known)))
    return _provisional(model, eligible, actions, state.name), treatment


def _careful_treatment(eligible: Eligible, weights_are_large: bool) -> Treatment:
    if not eligible.allows(CHECKPOINT):
        return KEEP
    return STREAM if weights_are_large and eligible.allows(STREAM) else CHECKPOINT


def _provisional(model: nn.Module, eligible: Eligible, actions: tuple[Action, ...], optimizer_name: str) -> Plan:
    """A plan whose peak nobody knows: what is named is what the parameters alone take."""
    hardware, budget_bytes = eligible.hardware, eligible.budget.device_bytes
    least_bytes = sum({id(p): p.nbytes for p in model.parameters()}.values())
    return Plan(
        actions=actions,
        baseline_peak_bytes=least_bytes,
        predicted_peak_bytes=least_bytes,
        predicted_slowdown=1.0,
        budget_bytes=budget_bytes,
        fits=least_bytes <= budget_bytes,
        decision_source="user_config",
        mode=eligible.config.mode.value,
        device_type=hardware.device_type,
        device_name=hardware.device_name,
        optimizer_name=optimizer_name,
        profile_source="empirical",
        model_class=type(model).__name__,
        inputs=(),
        summary=Reason("the model cannot be rehearsed: its first training steps are observed"),
        rows=(),
        provisional=True,
        conditions=conditions_of(eligible),
    )


class ObservedSteps(StepWatcher):
    """A model's first training steps, under the careful plan and then under the one that is made from them."""

    def __init__(self, model: nn.Module, eligible: Eligible, costs: OptimizerCosts) -> None:
        self.travel = eligible.ways[-1]
        """One way for all plans, the most careful: what overlapping takes is known only from rehearsals."""
        self._blocking = UNREHEARSED if eligible.overlaps and not self.travel.overlaps else None
        self.eligible = eligible.by(self.travel)
        self.hardware = eligible.hardware
        careful, self._treatment = careful_plan(model, self.eligible, costs.by(self.travel))
        self.careful = self._saying_why(careful)
        self.plan: Plan | None = None
        """None while the careful plan is in force."""
        self._profile: Profile | None = None
        self.demands: list[Demand] = []
        """The demands of the steps that were seen under the careful plan: the plan made from them holds for these."""
        self._demand: Demand | None = None
        self._seen: list[ObservedStep] = []
        self._margin_bytes = 0
        self._num_plans = 0
        self._num_failed = 0
        self.has_given_up = False
        """What is in force stays: the careful plan, which is exact, or one that was made before."""
        self._observation: Observation | None = None
        self._closing = contextlib.ExitStack()
        self._model = weakref.ref(model)

    def open(self, model: nn.Module, inputs: Inputs, demand: Demand, traffic: Traffic) -> None:
        """Observe the step that begins with this forward; until the optimizer steps, the forward fails, or `close`."""
        self.abandon()
        self._demand = demand
        self._num_failed += 1  # until it is seen to its end
        if self._num_failed > MAX_FAILED_TRIES:
            self.give_up(f"{MAX_FAILED_TRIES} steps in a row could not be observed from forward to backward")
            return
        observation = Observation(model, self.hardware.device_type, inputs, traffic)
        with contextlib.ExitStack() as undo:
            undo_with(model, observation.abandon, undo)
            stop_watching = watch_steps(self)
            undo_with(model, stop_watching, undo)
            failure = _FailureHook(observation, stop_watching)
            undo.callback(model.register_forward_hook(failure, always_call=True).remove)
            self._observation, self._closing = observation, undo.pop_all()

    def concerns(self, optimizer: Optimizer) -> bool:
        model = self._model()
        return model is not None and owns_any(optimizer, model.parameters())

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Ends the observation: the optimizer's state is not part of the trace."""
        if private.graph_task_id() < 0:  # otherwise it steps in the middle of backward, which goes on
            self.end_step()

    def give_up(self, reason: str) -> None:
        """Stop observing for good."""
        self.abandon()
        self.has_given_up = True
        what = "the careful plan" if self.plan is None else "the plan that was made from earlier ones"
        logger.warning("training steps are not observed any more: %s. %s stays in force.", reason, what.capitalize())

    @property
    def is_under_way(self) -> bool:
        """Whether the observed step has not had its backward yet: another forward is part of it."""
        observation = self._observation
        return observation is not None and not observation.saw_backward and not observation.has_failed

    def close(self) -> None:
        """The observed step is over. One without a backward is not counted."""
        self.end_step()
        self.abandon()

    def end_step(self) -> None:
        """Take down what was seen. Hooks of the process stay until `abandon`: one of them may be what calls this."""
        observation, self._observation = self._observation, None
        step = observation.close() if observation is not None and _is_whole(observation) else None
        if step is None:
            return
        self._num_failed = 0
        self._seen.append(step)
        if self.plan is None and self._demand is not None:
            self.demands.append(self._demand)

    def abandon(self) -> None:
        """Stop observing, if a step is being observed."""
        self._closing.close()
        self._observation = None

    def is_ready(self, demand: Demand) -> bool:
        """Whether enough was seen: `warmup_steps` steps, at least one, under the careful plan, also of what comes now;
        or one under another plan."""
        if self.plan is not None:
            return bool(self._seen)
        is_covered = any(seen.covers(demand) for seen in self.demands)
        return is_covered and len(self._seen) >= max(1, self.eligible.config.warmup_steps)

    def make_plan(self, model: nn.Module, costs: OptimizerCosts) -> Plan:
        """The profile of what was seen under the careful plan; the highest of these steps counts."""
        costs = costs.by(self.travel)
        highest = max(self._seen, key=lambda step: step.trace.peak_bytes)
        profile = profile_observed(model, highest, costs.cost(), self.hardware.device_type, self._treatment)
        profile = dataclasses.replace(profile, communication_bytes=costs.ranks.bucket_bytes)
        self._profile = self._with_optimizer(model, profile, costs)
        return self._decide()

    def _decide(self) -> Plan:
        plan = self._chosen_plan()
        eligible, used = self.eligible, {technique_of(action) for action in plan.actions}
        kept = ((action, technique_of(action)) for action in self.careful.actions)
        asked = [action for action, technique in kept if eligible.must_use(technique) and technique not in used]
        self.plan = self._saying_why(dataclasses.replace(plan, actions=(*plan.actions, *asked)))
        self._seen, self._num_plans = [], self._num_plans + 1
        return self.plan

    def _saying_why(self, plan: Plan) -> Plan:
        """The plan with the reason for which transfers block, where that is not the user's own wish."""
        assert plan.conditions is not None
        return dataclasses.replace(plan, conditions=dataclasses.replace(plan.conditions, blocking=self._blocking))

    def _chosen_plan(self) -> Plan:
        """NOTE [no way back]: to stream other blocks, parameters and their state come to the device in between. Where
        they do not fit there, what is streamed stays streamed."""
        profile, eligible = self._profile, self.eligible
        assert profile is not None
        if self._treatment == STREAM and profile.static_bytes > eligible.budget.device_bytes:
            rule = "careful from the first step on: parameters and optimizer state alone exceed the budget"
            return keep_plan(profile, eligible, self.careful.actions, rule)
        return plan_from(profile, eligible, margin_bytes=self._margin_bytes)

    def _with_optimizer(self, model: nn.Module, profile: Profile, costs: OptimizerCosts) -> Profile:
        """The profile with what the optimizer costs in 8 bits, and over what is left when blocks are streamed."""
        if self.eligible.config.use_8bit_optimizer:
            profile = dataclasses.replace(profile, eight_bit_optimizer=costs.eight_bit())
        if TraceKey(STREAM) in profile.variants:
            blocks = tuple(layer.module_fqn for layer in profile.layers if layer.is_block)
            streamed = _streamed(model, blocks)
            profile = dataclasses.replace(
                profile, rest_optimizer=costs.cost(without=streamed), guests=costs.guests(streamed)
            )
        return profile

    def check(self, model: nn.Module, costs: OptimizerCosts) -> Plan | None:
        """Hold the plan against its own first step. None: it stands; else what takes its place."""
        plan, profile, costs = self.plan, self._profile, costs.by(self.travel)
        assert plan is not None
        assert profile is not None
        shown_bytes = self._peak_of(model, profile, self._seen.pop().trace, plan, costs)
        above_bytes = shown_bytes - plan.predicted_peak_bytes
        if above_bytes <= 0:
            return None
        shown, said = show_bytes(shown_bytes), show_bytes(plan.predicted_peak_bytes)
        logger.info("the plan's first step peaked at %s, where %s was predicted", shown, said)
        if shown_bytes > plan.budget_bytes and self._num_plans < _MAX_PLANS:
            self._margin_bytes += above_bytes
            return self._decide()
        self.plan = dataclasses.replace(
            plan, predicted_peak_bytes=shown_bytes, fits=shown_bytes <= plan.budget_bytes, rehearsed=True
        )
        return self.plan

    def _peak_of(self, model: nn.Module, profile: Profile, trace: StepTrace, plan: Plan, costs: OptimizerCosts) -> int:
        choice = choice_of(plan.actions, profile)
        streamed = _streamed(model, streamed_fqns(plan.actions))
        in_8_bits = choice.run.quantizes_optimizer and profile.eight_bit_optimizer is not None
        optimizer = costs.cost(eight_bit=in_8_bits, without=streamed, guests=choice.run.steps_on_device)
        return CostModel(profile, self.hardware).peak_of(trace, choice, optimizer)


def _is_whole(observation: Observation) -> bool:
    return observation.saw_backward and not observation.has_failed and not observation.broke_off


def _streamed(model: nn.Module, module_fqns: tuple[str, ...]) -> frozenset[int]:
    modules = [model.get_submodule(module_fqn) for module_fqn in module_fqns]
    return frozenset(streaming.streamable(model, modules)) if modules else frozenset()


class _FailureHook(OwnHook):
    """Takes the mode and the hook of the process off at once where the forward raises: nothing may follow.

    What sits on modules is left to the next forward or `detach`: PyTorch is going through their hooks right now. It
    calls this one after an `Exception`; a `KeyboardInterrupt` passes it by, and the next forward or `detach` cleans up.
    """

    def __init__(self, observation: Observation, remove_step_hook: Callable[[], None]) -> None:
        self._observation = observation
        self._remove_step_hook = remove_step_hook

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_failing(output):
            self._observation.fail()
            self._remove_step_hook()
