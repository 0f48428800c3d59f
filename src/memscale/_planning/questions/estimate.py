"""`estimate()`: what a training step would peak at, as it is and in each mode, before anything is allocated."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from memscale import _json
from memscale._config import Config, OptimizationMode
from memscale._decide.choice import Choice
from memscale._decide.eligible import Eligible
from memscale._decide.policy import choose_strategy
from memscale._errors import ConfigError, MemScaleError, no_model, quoted, shown
from memscale._hardware import Hardware
from memscale._plan import Plan
from memscale._planning.advice import find_smaller
from memscale._planning.garbage import few_collections
from memscale._planning.job import Job, open_job
from memscale._planning.planner import Planner
from memscale._planning.rank_meetings import withheld_from
from memscale._profile import Profile
from memscale._profile.inputs import Inputs, derive_inputs
from memscale._profile.optimizer_twin import OPTIMIZERS
from memscale.techniques import TECHNIQUES

_AS_FAST = 1.01
"""Predicted times that differ by less are called equal: the time model knows no better."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModeEstimate:
    """What one mode comes to."""

    predicted_peak_bytes: int
    predicted_slowdown: float
    fits: bool
    """Reserved bytes are within the budget (on a CPU: live ones), the total within the card, and the rest has room."""
    of_bound: float | None
    """The predicted time, as a multiple of the least that any exact plan could take at this budget; None where nothing
    is done, or something that is not exact."""
    host_bytes: int
    """What waits in host memory, which is filled before the disk."""
    disk_bytes: int
    """What waits on disk."""
    plan: Plan
    """The plan with all of its numbers, the allocated, reserved and total bytes among them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What a training step would peak at.

        found = memscale.estimate(model, batch)
        for mode, entry in found.by_mode.items():
            print(mode.value, entry.predicted_peak_bytes, entry.predicted_slowdown, entry.fits)

    Every figure is a prediction; nothing is trained for it.
    """

    baseline_peak_bytes: int
    breakdown: dict[str, int]
    """The baseline's bytes at its peak: params, grads, optimizer, activations, temporaries, other (inputs, buffers,
    and through which ranks exchange gradients)."""
    budget_bytes: int
    baseline_fits: bool
    by_mode: dict[OptimizationMode, ModeEstimate]
    recommended_mode: OptimizationMode | None
    """The fastest exact mode that fits, and the milder of two that are as fast; AGGRESSIVE only where no other fits;
    None when none does."""
    device_name: str
    optimizer_name: str
    inputs: tuple[str, ...]
    baseline_reserved_bytes: int | None = None
    """What PyTorch's allocator reserves for the plain step; None where none does, as on a CPU."""
    baseline_allocated_bytes: int | None = None
    """What it hands out."""
    baseline_total_bytes: int | None = None
    """What it reserves, the context and what others hold."""
    advice: str = ""
    """When no mode fits: a batch or a sequence length that the last of them was found to fit, if any was."""

    def to_json(self) -> str:
        """The estimate as JSON, the plan of each mode included."""
        return _json.dumps(self)


def estimate(
    model: nn.Module,
    sample_input: Any = None,
    *,
    optimizer: str | Optimizer = "adamw",
    config: Config | None = None,
    hardware: Hardware | None = None,
) -> Estimate:
    """Predict the peak and the slowdown of each mode, on this machine or for a card that is elsewhere.

        found = memscale.estimate(model, batch, hardware=memscale.Hardware.from_name("RTX 3090"))
        print(found.recommended_mode, found.baseline_peak_bytes)

    Args:
        model: The model as it is. It may be on the meta device: no weights are needed. It is not touched.
        sample_input: A training batch, as for `wrap`; None: derived from a `transformers` config.
        optimizer: An optimizer, or the name of one.
        config: The budget, and what may be done in every mode.
        hardware: Where it would train; None: this machine.

    Returns:
        An `Estimate`: the plain peak and what it consists of, and for each mode the planned peak, the slowdown and
        whether it fits.

    Raises:
        TypeError: An argument has the wrong type.
        ProfileError: The model does not run on the sample, or decides by values that only training can show.
        MemScaleError: No inputs were given and none can be derived.
    """
    _check_arguments(model, optimizer, config, hardware)
    config = config or Config()
    inputs = Inputs.from_sample(sample_input) if sample_input is not None else derive_inputs(model)
    if inputs is None:
        raise MemScaleError(f"no inputs can be derived for {type(model).__name__}; pass sample_input")
    return estimate_job(open_job(model, config, optimizer, hardware), inputs)


@few_collections()
def estimate_job(job: Job, inputs: Inputs) -> Estimate:
    """What a step of this job would peak at, on each of the ranks that train it."""
    job = job.under(withheld_from(job.config, job.ranks))
    planner, own = Planner(job, inputs), job.eligible
    by_mode = {mode: _estimate_mode(planner, own.replace(mode=mode, auto_policy=False)) for mode in OptimizationMode}
    profile, hardware = planner.profile, planner.hardware
    baseline = planner.cost_model().peak_of(profile.plain, Choice())
    held = planner.held((), own.config)
    budget = own.budget.device_bytes
    recommended = recommended_of(by_mode)
    widest = next(reversed(by_mode))
    advice = None
    if recommended is None:
        advice = find_smaller(planner, own.replace(mode=widest), by_mode[widest].plan)
    return Estimate(
        baseline_peak_bytes=baseline,
        breakdown=breakdown_at_peak(profile, baseline),
        budget_bytes=budget,
        baseline_fits=baseline <= budget and (held is None or own.has_room_for(held)),
        by_mode=by_mode,
        recommended_mode=recommended,
        device_name=hardware.device_name,
        optimizer_name=profile.optimizer.name,
        inputs=by_mode[widest].plan.inputs,
        baseline_reserved_bytes=None if held is None else held.reserved_bytes,
        baseline_allocated_bytes=None if held is None else held.allocated_bytes,
        baseline_total_bytes=None if held is None else held.total_bytes,
        advice="" if advice is None else advice.remedy,
    )


def recommended_of(by_mode: dict[OptimizationMode, ModeEstimate]) -> OptimizationMode | None:
    """The mildest mode that is as fast as any, among those that fit and whose techniques are all exact.

    A mode with inexact techniques is recommended only where no other fits. Modes are ordered from mild to wide.
    """
    fitting = [mode for mode, entry in by_mode.items() if entry.fits]
    exact = [mode for mode in fitting if all(t.is_exact for t in TECHNIQUES if mode in t.modes)]
    if not exact:
        return next(iter(fitting), None)
    fastest = min(by_mode[mode].predicted_slowdown for mode in exact)
    return next(mode for mode in exact if by_mode[mode].predicted_slowdown <= fastest * _AS_FAST)


def _estimate_mode(planner: Planner, eligible: Eligible) -> ModeEstimate:
    plan = planner.plan(choose_strategy(eligible))
    waiting_bytes = plan.host_bytes + plan.movable_bytes
    on_host_bytes = min(waiting_bytes, max(plan.host_bytes, eligible.budget.host_bytes))
    return ModeEstimate(
        plan.predicted_peak_bytes,
        plan.predicted_slowdown,
        plan.fits,
        plan.of_bound,
        on_host_bytes,
        waiting_bytes - on_host_bytes,
        plan,
    )


def _check_arguments(model: object, optimizer: object, config: object, hardware: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"memscale.estimate takes an nn.Module, not {no_model(model)}")
    if not isinstance(optimizer, str | Optimizer):
        raise TypeError(f"optimizer must be a name or a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, str) and optimizer not in (*OPTIMIZERS, "none"):
        raise ValueError(
            f"optimizer={shown(optimizer)} is not known; it must be one of {', '.join([*OPTIMIZERS, 'none'])}"
        )
    if not isinstance(config, Config | None):
        raise TypeError(f"config must be a memscale.Config or None, not {type(config).__name__}")
    if not isinstance(hardware, Hardware | None):
        raise TypeError(
            f"hardware must be a memscale.Hardware or None, not {type(hardware).__name__}; "
            "a card by its name is Hardware.from_name(name)"
        )
    if hardware is not None:
        _check_device_type(hardware.device_type)


def _check_device_type(device_type: object) -> None:
    try:
        torch.device(cast(str, device_type))  # whatever stands there: PyTorch knows its own devices
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"device_type={shown(device_type)} of the hardware is not a device: {quoted(error)}"
        ) from error


def breakdown_at_peak(profile: Profile, peak_bytes: int) -> dict[str, int]:
    """Who holds the bytes at the plain step's peak; the parts add up to it."""
    parts = {
        "params": profile.parameter_bytes,
        "grads": profile.plain.gradients_at_peak,
        "optimizer": profile.optimizer.state_bytes,
        "activations": profile.plain.activations_at_peak,
        "other": profile.buffer_bytes + profile.input_bytes + profile.communication_bytes + profile.loop_bytes,
    }
    if peak_bytes > profile.static_bytes + profile.plain.peak_bytes:  # the optimizer step is the peak
        parts |= {"grads": profile.plain.end_bytes, "activations": 0}
    parts["temporaries"] = peak_bytes - sum(parts.values())
    return parts
