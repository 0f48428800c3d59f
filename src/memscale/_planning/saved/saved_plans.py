"""A plan that was saved, before it is executed: does it belong to this machine?"""

from __future__ import annotations

import torch
from torch import nn

from memscale._config import Config
from memscale._decide.choice import Outcome
from memscale._decide.eligible import Eligible
from memscale._errors import DoesNotFitError, PlanError
from memscale._plan import Plan
from memscale._planning.job import device_of
from memscale._units import show_bytes
from memscale.techniques import by_technique, technique_of

_AGAIN = "Or plan on this machine: memscale.wrap(model)."


def device_for(plan: Plan, model: nn.Module, config: Config) -> torch.device:
    """Where the plan computes; `PlanError` where that is not what was asked for, or is not there."""
    device = device_of(model, config)
    if device.type != plan.device_type and config.device is None and _is_here(plan.device_type):
        return torch.device(plan.device_type)
    if device.type != plan.device_type:
        where = f"config.device is {config.device!r}" if config.device is not None else "there is none here"
        raise PlanError(
            f"the plan was made for {plan.device_name} ({plan.device_type}), and {where}: other kernels keep other "
            "tensors, so its numbers do not hold. " + _AGAIN
        )
    return device


def _is_here(device_type: str) -> bool:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device_type == "cpu" or (accelerator is not None and accelerator.type == device_type)


def refuse_plan(plan: Plan, eligible: Eligible) -> None:
    """What this device, its host or its disk cannot hold or do."""
    _refuse_misfit(plan, eligible)
    for actions in by_technique(plan.actions).values():
        refusal = technique_of(actions[0]).refusal(actions, eligible.config, eligible.hardware)
        if refusal:
            raise PlanError(refusal)


def _refuse_misfit(plan: Plan, eligible: Eligible) -> None:
    here, hardware = eligible.budget, eligible.hardware
    reserved_bytes = plan.predicted_reserved_bytes if hardware.has_caching_allocator else None
    needed_bytes = max(plan.predicted_peak_bytes, reserved_bytes or 0)
    needed, device, host, disk = map(show_bytes, (needed_bytes, here.device_bytes, here.host_bytes, here.disk_bytes))
    if needed_bytes > here.device_bytes:
        does = "peaks at" if reserved_bytes is None else "reserves"
        raise DoesNotFitError(
            f"the plan, made for {plan.device_name}, {does} {needed}; the budget here, on "
            f"{hardware.device_name}, is {device}. {_AGAIN}"
        )
    if not here.admits(Outcome(plan.predicted_peak_bytes, 0.0, plan.host_bytes, plan.movable_bytes)):
        raise DoesNotFitError(
            f"the plan lets {show_bytes(plan.host_bytes)} wait on the host, and {show_bytes(plan.movable_bytes)} there "
            f"or on disk; here the host has {host} for it and the disk {disk}. Raise max_cpu_offload_gb or set "
            f"offload_dir. {_AGAIN}"
        )
