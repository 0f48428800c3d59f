"""The strategies that a policy chooses among, those that cost the least planning first.

A strategy is a mode, and which treatments of blocks are worth a rehearsal under it. The fewer are rehearsed, the sooner
a plan is found; what is left out can only make it slower, or make nothing fit, and then everything becomes eligible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from memscale._config import OptimizationMode
from memscale._decide.eligible import Eligible
from memscale._profile import CHECKPOINT, CHECKPOINT_OFFLOAD, KEEP, OFFLOAD, SELECTIVE, STREAM, Treatment
from memscale.techniques import TECHNIQUES, TREATMENTS

_RECOMPUTED = frozenset({SELECTIVE, CHECKPOINT})
_NOT_STREAMED = frozenset({SELECTIVE, CHECKPOINT, OFFLOAD, CHECKPOINT_OFFLOAD})


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """A mode, where it differs from what that mode says, and what is worth rehearsing."""

    mode: OptimizationMode
    tiles: bool | None = None
    treatments: frozenset[Treatment] | None = None
    """The treatments of blocks that are rehearsed; None: all that are eligible."""
    is_short: bool = False
    """Nothing is looked into that is dear to find out: tensors travel in the way that is tried first, and blocks are
    not tiled inside."""

    def under(self, own: Eligible) -> Eligible:
        """What the user's config makes eligible with this; what the user set by name stays as it is."""
        config, hardware = own.config, own.hardware
        changes: dict[str, bool] = {} if self.tiles is None else {"enable_tiling": self.tiles}
        if self.mode is OptimizationMode.AGGRESSIVE:
            changes["use_mixed_precision"] = hardware.has_fast_16bit
        if self.is_short and config.async_offload is None and hardware.has_streams:
            changes["async_offload"] = True
        chosen = config.under(self.mode, **changes)
        return own.under(chosen.without(chosen.withheld | self._passed_over()))

    def _passed_over(self) -> set[str]:
        """The names of what is not worth a rehearsal."""
        dear = {technique.name for technique in TECHNIQUES if technique.is_dear and self.is_short}
        kept = TREATMENTS if self.treatments is None else {KEEP, *self.treatments}
        return dear | {treatment.name for treatment in TREATMENTS if treatment not in kept}


_CONSERVATIVE, _BALANCED = OptimizationMode.CONSERVATIVE, OptimizationMode.BALANCED
STRATEGIES: dict[str, Option] = {
    "conservative": Option(_CONSERVATIVE),
    "balanced": Option(_BALANCED),
    "aggressive": Option(OptimizationMode.AGGRESSIVE),
}
"""The modes as they are: what the rules choose among."""
WIDEST = "aggressive"
"""All that there is; what is not exact is still the last resort of stage 2."""


def _short(mode: OptimizationMode, treatments: Iterable[Treatment] | None, *, tiles: bool = False) -> Option:
    return Option(mode, tiles, None if treatments is None else frozenset(treatments), is_short=True)


SHORTLISTS: dict[str, Option] = {
    "selective checkpoints": _short(_CONSERVATIVE, {SELECTIVE}),
    "checkpoints": _short(_CONSERVATIVE, _RECOMPUTED),
    "checkpoints, state elsewhere": _short(_BALANCED, _RECOMPUTED),
    "head tiles": _short(_CONSERVATIVE, (), tiles=True),
    "checkpoints, streaming": _short(_BALANCED, {CHECKPOINT, STREAM}),
    "no streaming": _short(_BALANCED, _NOT_STREAMED),
    "checkpoints, head tiles": _short(_CONSERVATIVE, _RECOMPUTED, tiles=True),
    "checkpoints, head tiles, state elsewhere": _short(_BALANCED, _RECOMPUTED, tiles=True),
    "checkpoints, streaming, head tiles": _short(_BALANCED, {CHECKPOINT, STREAM}, tiles=True),
    "no streaming, head tiles": _short(_BALANCED, _NOT_STREAMED, tiles=True),
    "no tiles": _short(_BALANCED, None),
    "everything exact": _short(_BALANCED, None, tiles=True),
}
"""What the learned policy chooses among, beside `WIDEST`: those that cost the least planning first."""
