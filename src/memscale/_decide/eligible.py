"""Wishes and abilities: what a config asks for, as far as one hardware can follow it. No torch.

    eligible = resolve(config, hardware)       # the one place where the two meet

`plan`, `estimate`, `fit`, the front of peak against time and the policies all go by its result, so none of them offers
what another would refuse. The hardware is the one that is planned for, which need not be this machine's.
"""

from __future__ import annotations

import dataclasses

from memscale._config import SWITCHES, Config
from memscale._decide.budget import Budget, full_budget
from memscale._decide.travel import Travel, travels
from memscale._hardware import Hardware
from memscale._profile import Treatment
from memscale.techniques import TECHNIQUES, TREATED, technique_of
from memscale.techniques.offload.next_tier import no_next_tier
from memscale.techniques.offload.parameters import HOST_KERNELS
from memscale.techniques.precision import HalfType, half_type
from memscale.techniques.technique import Technique


@dataclasses.dataclass(frozen=True, slots=True)
class Eligible:
    """What a plan may use, and what it must."""

    techniques: tuple[Technique, ...]
    """The techniques whose switch is on and that nothing hinders."""
    asked_for: frozenset[str]
    """Switches that the user has set by name."""
    half_type: HalfType | None
    """The 16-bit type that may be computed in."""
    travels: tuple[Travel, ...]
    """How tensors may travel, the way that is tried first at the front."""
    host_step: bool
    """The host's kernels may step streamed parameters."""
    budget: Budget
    withheld: frozenset[str]
    """Techniques and treatments, by their names, that are not to be used; see `Config.withheld`."""

    @property
    def overlaps(self) -> bool:
        """Transfers run beside compute, in the way that is tried first."""
        return self.travels[0].overlaps

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
    wished = (t for t in TECHNIQUES if getattr(config, t.switch) and t.name not in config.withheld)
    techniques = tuple(t for t in wished if not t.hindrance(config, hardware))
    ways = travels(config, hardware)
    return Eligible(
        techniques=techniques,
        asked_for=frozenset(switch for switch in SWITCHES if config.asks_for(switch)),
        half_type=half_type(config, hardware),
        travels=ways if any(technique.travels for technique in techniques) else ways[:1],
        host_step=_may_step_on_host(config, hardware),
        budget=full_budget(hardware, config),
        withheld=config.withheld,
    )


def _may_step_on_host(config: Config, hardware: Hardware) -> bool:
    """Where its kernels give the device's bits, or the user does not mind."""
    if config.allow_host_step is not None:
        return config.allow_host_step
    return hardware.device_type in HOST_KERNELS


def has_next_tier(config: Config, hardware: Hardware) -> bool:
    """Whether there is anywhere for tensors to wait: host memory beside a device, or a directory on disk."""
    return not no_next_tier(config, hardware)
