"""The strategies that a policy chooses among, the mildest first."""

from __future__ import annotations

import dataclasses

from memscale._config import Config, OptimizationMode
from memscale._hardware import Hardware


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A mode, and where it differs from what that mode says."""

    mode: OptimizationMode
    tiles: bool | None = None

    def under(self, config: Config, hardware: Hardware) -> Config:
        """The user's config with this eligible; what the user set by name stays as it is."""
        changes: dict[str, bool] = {} if self.tiles is None else {"enable_tiling": self.tiles}
        if self.mode is OptimizationMode.AGGRESSIVE:
            changes["use_mixed_precision"] = hardware.has_fast_16bit
        return config.under(self.mode, **changes)


STRATEGIES: dict[str, Option] = {
    "conservative": Option(OptimizationMode.CONSERVATIVE),
    "balanced": Option(OptimizationMode.BALANCED),
    "conservative+tiling": Option(OptimizationMode.CONSERVATIVE, tiles=True),
    "aggressive": Option(OptimizationMode.AGGRESSIVE),
}
WIDEST = "aggressive"
"""All that there is; what is not exact is still the last resort of stage 2."""
