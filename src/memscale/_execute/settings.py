"""How a plan is carried out on this machine: `ExecutionSettings`. A plan says what is done, and how tensors travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._config import AsyncOffloadConfig, Config
from memscale._plan import Conditions
from memscale._torch import private


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """The device, the tiers below it, and how transfers go."""

    device: torch.device | None = None
    """Where the model computes; None: where its parameters are."""
    verify: bool = False
    asynchronous: bool = False
    async_config: AsyncOffloadConfig = dataclasses.field(default_factory=AsyncOffloadConfig)
    host_budget_bytes: int | None = None
    offload_dir: str | None = None
    optimizer_on_stage: Callable[[nn.Module], Optimizer] | None = None
    """What makes the optimizer over the stage's model, in a rehearsal of a plan that steps in backward."""

    @classmethod
    def from_config(
        cls, config: Config, device: torch.device, host_budget_bytes: int | None = None
    ) -> ExecutionSettings:
        return cls(
            device=device,
            verify=config.verify_correctness,
            asynchronous=bool(config.async_offload),  # None: the plan says it, see `under`
            async_config=config.async_config or AsyncOffloadConfig(),
            host_budget_bytes=host_budget_bytes,
            offload_dir=config.offload_dir,
        )

    def under(self, conditions: Conditions | None) -> ExecutionSettings:
        """The settings with tensors that travel as a plan reckons; None: the plan does not say, and they travel as they
        do here."""
        if conditions is None:
            return self
        transfers = dataclasses.replace(self.async_config, **conditions.transfers)
        return dataclasses.replace(self, asynchronous=conditions.async_offload, async_config=transfers)

    def device_of(self, model: nn.Module) -> torch.device:
        """Where the model computes."""
        if self.device is not None:
            return self.device
        return next((p.device for p in model.parameters() if p.device.type != "cpu"), torch.device("cpu"))


def is_fake(model: nn.Module) -> bool:
    """Whether this is a rehearsal on fake tensors: nothing moves, and no optimizer steps."""
    return any(private.is_fake(parameter) for parameter in model.parameters())
