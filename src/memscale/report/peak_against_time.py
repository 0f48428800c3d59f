"""`PeakAgainstTime`: every plan that was weighed against the chosen one. Data, which a report draws."""

from __future__ import annotations

import dataclasses

from memscale._plan import FrontPoint


@dataclasses.dataclass(frozen=True, slots=True)
class PeakAgainstTime:
    """What the mode allows, by peak and time. Figures are those of the peak model and the time model."""

    front: tuple[FrontPoint, ...]
    """Plans that no other beats, the highest peak first; the chosen one is marked."""
    candidates: tuple[FrontPoint, ...]
    """All that were weighed; of those that would be drawn at one place, the lowest."""
    num_candidates: int
    """How many were weighed."""
