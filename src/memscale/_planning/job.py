"""`Job`: what is to be planned. One object goes through all of planning, instead of the same six values.

What its config makes eligible on its hardware is found when it is made, and handed on from there (`job.eligible`).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._config import Config
from memscale._decide.eligible import Eligible, resolve
from memscale._errors import ConfigError, shown
from memscale._hardware import Hardware
from memscale._hardware.detect import detect_hardware
from memscale._profile import NOTHING_HELD, LoopHolds
from memscale._profile.ranks import ALONE, Ranks


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One model's training on one hardware, under one config. The batch comes beside it: there are many of them."""

    model: nn.Module
    config: Config
    hardware: Hardware
    optimizer: str | Optimizer = "adamw"
    """What trains the unmodified model: an optimizer, or the name of one that is still to come."""
    replacement: Optimizer | None = None
    """What steps in the optimizer's place, in 8 bits."""
    holds_gradients: bool = False
    """The loop adds up gradients over several batches."""
    ranks: Ranks = ALONE
    """Who trains it together."""
    loop: LoopHolds = NOTHING_HELD
    """What else the loop holds, as far as its first steps have shown it."""
    resolved: dataclasses.InitVar[Eligible | None] = None
    """What is eligible, where that is known already."""
    eligible: Eligible = dataclasses.field(init=False)
    """What the config makes eligible on the hardware."""

    def __post_init__(self, resolved: Eligible | None) -> None:
        object.__setattr__(self, "eligible", resolved or resolve(self.config, self.hardware))

    def under(self, config: Config) -> Job:
        """The same work, with other wishes."""
        return dataclasses.replace(self, config=config, resolved=self.eligible.under(config))


def eligible_here(config: Config, device: torch.device | None) -> Eligible:
    """What a config makes eligible on a device of this machine, which is looked at once, here."""
    return resolve(config, detect_hardware(device, config.offload_dir))


def open_job(
    model: nn.Module, config: Config, optimizer: str | Optimizer = "adamw", hardware: Hardware | None = None
) -> Job:
    """The job for this hardware; None: where the model computes.

    A model on the meta device has no weights anywhere yet: it will compute where this machine computes.
    """
    if hardware is not None:
        return Job(model, config, hardware, optimizer)
    device = device_of(model, config)
    eligible = eligible_here(config, None if device.type == "meta" else device)
    return Job(model, config, eligible.hardware, optimizer, resolved=eligible)


def device_of(model: nn.Module, config: Config) -> torch.device:
    """Where the model computes: as configured, else where its parameters are."""
    if config.device is not None:
        try:
            return torch.device(config.device)
        except RuntimeError as error:
            raise ConfigError(f"device={shown(config.device)} is not a device that PyTorch knows") from error
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
