"""Wishes and abilities: what a config asks for, as far as one hardware can follow it. No torch.

    eligible = resolve(config, hardware)        # the one place where the two meet, once for each `Job`
    eligible.under(other_config)                # the same hardware, where somebody changes the wishes
    eligible.by(travel)                         # with tensors that travel so

`plan`, `estimate`, `fit`, the front of peak against time and the policies are handed the result, so none of them offers
what another would refuse. The hardware is the one that is planned for, which need not be this machine's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from memscale._config import SWITCHES, AsyncOffloadConfig, Config, OptimizationMode
from memscale._decide.budget import Budget, Held, full_budget
from memscale._decide.travel import Travel, travels
from memscale._hardware import Hardware
from memscale._plan import Plan
from memscale._profile import Treatment
from memscale.techniques import TECHNIQUES, TREATED, planned_step, technique_of
from memscale.techniques.offload.next_tier import no_next_tier
from memscale.techniques.offload.parameters import HOST_KERNELS
from memscale.techniques.precision import HalfType, half_type
from memscale.techniques.technique import Technique


@dataclasses.dataclass(frozen=True, slots=True)
class Eligible:
    """What a plan may use, and what it must. Two are equal where a plan may use the same, whoever asked for it."""

    config: Config = dataclasses.field(compare=False)
    """What was asked for."""
    hardware: Hardware = dataclasses.field(compare=False)
    """What it is planned for."""
    techniques: tuple[Technique, ...]
    """The techniques whose switch is on and that nothing hinders."""
    hindrances: Mapping[str, str] = dataclasses.field(compare=False)
    """Why techniques cannot be used there though their switch is on, by their names."""
    asked_for: frozenset[str]
    """Switches that the user has set by name."""
    half_type: HalfType | None
    """The 16-bit type that may be computed in."""
    ways: tuple[Travel, ...]
    """How tensors may travel, the way that is tried first at the front."""
    host_step: bool
    """The host's kernels may step streamed parameters."""
    budget: Budget
    withheld: frozenset[str]
    """Techniques and treatments, by their names, that are not to be used; see `Config.withheld`."""

    @property
    def travels(self) -> tuple[Travel, ...]:
        """The ways that are worth looking into: where nothing travels, they are all alike."""
        return self.ways if any(technique.travels for technique in self.techniques) else self.ways[:1]

    @property
    def travel(self) -> Travel:
        """The way that is tried first."""
        return self.ways[0]

    @property
    def overlaps(self) -> bool:
        """Transfers run beside compute, in the way that is tried first."""
        return self.travel.overlaps

    @property
    def has_next_tier(self) -> bool:
        """Whether there is anywhere for tensors to wait: host memory beside a device, or a directory on disk."""
        return not no_next_tier(self.config, self.hardware)

    # ---- the same hardware, with other wishes

    def under(self, config: Config) -> Eligible:
        """What another config makes eligible there."""
        return self if config is self.config else resolve(config, self.hardware)

    def replace(self, **wishes: Any) -> Eligible:
        """What this config makes eligible with these fields."""
        return self.under(self.config.replace(**wishes))

    def in_mode(self, mode: OptimizationMode) -> Eligible:
        """What this config makes eligible in another mode; what the user has set by name stays as it is."""
        return self.under(self.config.under(mode))

    def by(self, travel: Travel) -> Eligible:
        """The same, with tensors that travel in this way and no other."""
        return self.under(travel.said_in(self.config))

    def travel_of(self, plan: Plan) -> Travel:
        """The way that a plan was made for."""
        if plan.conditions is None:
            return self.travel
        transfers = dataclasses.replace(self.config.async_config or AsyncOffloadConfig(), **plan.conditions.transfers)
        bucket_bytes = planned_step(plan.actions).bucket_bytes or self.travel.bucket_bytes
        return Travel(plan.conditions.async_offload, transfers, bucket_bytes)

    # ---- what may be used

    def has_room_for(self, held: Held) -> bool:
        """Whether what the allocator reserves is within the budget, and the total within the card."""
        return held.reserved_bytes <= self.budget.device_bytes and held.total_bytes <= self.hardware.total_bytes

    def has(self, technique: Technique) -> bool:
        return technique in self.techniques

    def must_use(self, technique: Technique) -> bool:
        """What is not exact, or changes the loop, is used where the user asks for it by name, whether the budget needs
        it or not."""
        is_matter_of_taste = technique.changes_loop or not technique.is_exact
        return self.has(technique) and is_matter_of_taste and technique.switch in self.asked_for

    def allows(self, treatment: Treatment) -> bool:
        """Whether a block may be treated so."""
        has_all = all(self.has(technique_of(action)) for action in TREATED[treatment].actions)
        return has_all and treatment.name not in self.withheld


def resolve(config: Config, hardware: Hardware) -> Eligible:
    """What this config makes eligible on this hardware."""
    wished = [technique for technique in TECHNIQUES if getattr(config, technique.switch)]
    hindrances = {technique.name: why for technique in wished if (why := technique.hindrance(config, hardware))}
    return Eligible(
        config=config,
        hardware=hardware,
        techniques=tuple(t for t in wished if t.name not in hindrances and t.name not in config.withheld),
        hindrances=hindrances,
        asked_for=frozenset(switch for switch in SWITCHES if config.asks_for(switch)),
        half_type=half_type(config, hardware),
        ways=travels(config, hardware),
        host_step=_may_step_on_host(config, hardware),
        budget=full_budget(hardware, config),
        withheld=config.withheld,
    )


def _may_step_on_host(config: Config, hardware: Hardware) -> bool:
    """Where its kernels give the device's bits, or the user does not mind."""
    if config.allow_host_step is not None:
        return config.allow_host_step
    return hardware.device_type in HOST_KERNELS
